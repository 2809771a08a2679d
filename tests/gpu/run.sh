#!/usr/bin/env bash
# The suite and the benchmark of a GPU in one command, all logs in one folder.
#
#   tests/gpu/run.sh FOLDER [all|suite|bench] [SECONDS]
#
# The suite's parts run at the same time, each in a process of its own, for at most half of the seconds (default
# 560 in all) if the benchmark follows, which runs alone with the seconds that are left. FOLDER gets at most eight
# files: machine.txt, suite-N.log for each of three parts, bench.log, gpu.json (given again, the benchmark goes on
# from it) and trace.json.gz. A test that takes a minute has its stack in the log.
# RECPIPE_GPU_SUITE=cpu tries the suite on a CPU, and RECPIPE_GPU_BENCH="--device cpu --quick" the benchmark.
set -uo pipefail
folder=$(mkdir -p "$1" && cd "$1" && pwd)
what=${2:-all}
seconds=${3:-560}
root=$(cd "$(dirname "$0")/../.." && pwd)
cd "$root"
began=$SECONDS
export PYTHONUNBUFFERED=1 PYTORCH_NVML_BASED_CUDA_CHECK=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
export PYTHONPATH="$root:$root/plugins${PYTHONPATH:+:$PYTHONPATH}"

{
  date -u
  nvidia-smi || echo "no nvidia-smi"
  nvidia-smi --query-gpu=pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current --format=csv
  lscpu | grep -E '^(Model name|CPU\(s\)|NUMA node\(s\))'
  free -g
  command -v compute-sanitizer || ls -d /usr/local/cuda*/bin/compute-sanitizer
  git log -1 --format=%H
  python3 -m recpipe doctor
} > "$folder/machine.txt" 2>&1 &
about=$!

parts=("test_tables.py test_kernels.py test_waits.py" "test_models.py test_stops.py test_batches.py test_races.py" "test_plugins.py test_runs.py")
status=0
longest=$((seconds - 20))
if [ "$what" = all ]; then longest=$((seconds / 2)); fi
if [ "$what" != bench ]; then
  running=()
  for number in "${!parts[@]}"; do
    files=()
    for name in ${parts[$number]}; do files+=("tests/gpu/$name"); done
    timeout -k 10 "$longest" python3 -m pytest -m gpu -q -ra --durations=10 -p no:xdist -p no:cacheprovider \
      -o addopts="--strict-markers --import-mode=importlib" -o faulthandler_timeout=60 \
      "${files[@]}" > "$folder/suite-$number.log" 2>&1 &
    running+=($!)
  done
  for process in "${running[@]}"; do wait "$process" || status=1; done
  tail -n 25 "$folder"/suite-?.log
fi
wait "$about"
cat "$folder/machine.txt"
left=$((seconds - (SECONDS - began) - 10))
if [ "$what" != suite ] && [ "$left" -gt 40 ]; then
  # shellcheck disable=SC2086
  OMP_NUM_THREADS=$(nproc) timeout -k 10 "$left" python3 benchmarks/gpu.py --json "$folder/gpu.json" --seconds $((left - 15)) \
    ${RECPIPE_GPU_BENCH:-} > "$folder/bench.log" 2>&1 || status=1
  tail -n 60 "$folder/bench.log"
fi
exit "$status"
