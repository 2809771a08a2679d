#!/usr/bin/env bash
# The suite and the benchmark of a GPU in one command, all logs in one folder.
#
#   tests/gpu/run.sh FOLDER [all|suite|bench] [SECONDS]
#
# The suite runs in several processes, for at most half of the seconds (default 560 in all) if the benchmark
# follows, and beside it compute-sanitizer; then the benchmark runs alone with the seconds that are left. FOLDER
# gets machine.txt, suite.log, sanitizer.log, bench.log, gpu.json (given again, the benchmark goes on from it) and
# trace.json.gz. A test that takes a minute has its stack in the log.
# RECPIPE_GPU_SUITE=cpu tries the suite on a CPU, and RECPIPE_GPU_BENCH="--device cpu --quick" the benchmark;
# RECPIPE_GPU_TESTS has words for pytest in place of tests/gpu.
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

status=0
longest=$((seconds - 20))
if [ "$what" = all ]; then longest=$((seconds / 2)); fi
if [ "$what" != bench ]; then
  timeout -k 10 "$longest" python3 benchmarks/gpu.py --json "$folder/gpu.json" --seconds 200 --only sanitizer \
    > "$folder/sanitizer.log" 2>&1 &
  sanitizer=$!
  # shellcheck disable=SC2086
  OMP_NUM_THREADS=2 timeout -k 10 "$longest" python3 -m pytest -m gpu -q -ra --durations=15 -p no:cacheprovider \
    -o addopts="--strict-markers --import-mode=importlib" -o faulthandler_timeout=60 \
    --dist load --maxschedchunk 1 -n $(($(nproc) * 3 / 4 + 1)) ${RECPIPE_GPU_TESTS:-tests/gpu} > "$folder/suite.log" 2>&1 || status=1
  tail -n 60 "$folder/suite.log"
  wait "$sanitizer" || status=1
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
