#!/usr/bin/env bash
# Runs a command on the emulated GPU: tests/emulated_gpu/run.sh PYTHON ARGUMENT...
#   tests/emulated_gpu/run.sh python3 -m pytest -m gpu tests/gpu
#   tests/emulated_gpu/run.sh python3 benchmarks/gpu.py --quick --json gpu.json
# PYTHON has one of the CUDA sets (requirements/), without a driver. g++ and CUDA's headers (CUDA_HOME, default
# /usr/local/cuda) are needed once; what they make is kept in EMULATED_GPU_FOLDER.
# EMULATED_GPU_BYTES       memory of the GPU (default 80 GiB)
# EMULATED_GPU_COPIES=now  copies are made at once
# EMULATED_GPU_KERNELS=none  nothing is computed: what the host does for a step, by the clock
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
python=$1
shift
folder=${EMULATED_GPU_FOLDER:-${XDG_CACHE_HOME:-$HOME/.cache}/recpipe/emulated_gpu}
stamp=$(cat "$here"/*.[ch]pp "$here/build.sh" | cksum)-$("$python" -c 'import importlib.metadata as m; print(m.version("torch"), m.version("fbgemm-gpu"))')
if [ "$(cat "$folder/stamp" 2>/dev/null)" != "$stamp" ]; then
  "$here/build.sh" "$python" "$folder"
  echo "$stamp" > "$folder/stamp"
fi
export PYTHONPATH="$here/site:$root:$root/plugins${PYTHONPATH:+:$PYTHONPATH}"
export EMULATED_GPU=1 PYTORCH_NVML_BASED_CUDA_CHECK=1
export LD_LIBRARY_PATH="$folder/driver${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" LD_PRELOAD="$folder/libemulated_gpu.so"
exec "$python" "$@"
