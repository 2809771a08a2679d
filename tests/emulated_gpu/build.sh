#!/usr/bin/env bash
# Makes the libraries that stand in for CUDA's: build.sh PYTHON FOLDER
# PYTHON has a CUDA build of torch, and FBGEMM; the headers are those of CUDA_HOME (default /usr/local/cuda).
set -euo pipefail
python=$1
out=$(mkdir -p "$2" && cd "$2" && pwd)
packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cd "$(dirname "$0")"
headers=${CUDA_HOME:-/usr/local/cuda}/include
[ -f "$headers/cuda_runtime_api.h" ] || { echo "build: no CUDA headers in $headers; set CUDA_HOME" >&2; exit 1; }

undefined() { nm -D --undefined-only "$@" 2>/dev/null | awk '{print $NF}' | sed 's/@.*//' | sort -u; }
# Functions without a part here still need a name for the libraries to load: those of CUDA itself answer "not
# supported" (801), those of its libraries that all is well.
stubs() { awk '{print "int " $1 "(void) { return " ($1 ~ /^(cublas|nccl|nvml)/ ? 0 : 801) "; }"}'; }

for part in runtime device libraries; do
  g++ -std=c++17 -O2 -fPIC -Wall -I"$headers" -c "$part.cpp" -o "$out/$part.o"
done
nm --defined-only "$out"/{runtime,device,libraries}.o | awk '{print $3}' | sort -u > "$out/made.txt"
undefined "$packages"/torch/lib/libtorch_cuda.so "$packages"/torch/lib/libtorch_python.so "$packages"/torch/lib/libc10_cuda.so \
  "$packages"/fbgemm_gpu/*.so | grep -E '^(cublas|nccl|nvml|cudaGraph|cudaIpc|cudaStreamBegin|cudaStreamEnd)' |
  comm -23 - "$out/made.txt" | stubs > "$out/rest.c"
gcc -O2 -fPIC -w -c "$out/rest.c" -o "$out/rest.o"
# FBGEMM wants NVML; by its name the preloaded library is that, too.
g++ -shared -pthread -Wl,-soname,libnvidia-ml.so.1 -o "$out/made.so" "$out"/{runtime,device,libraries,rest}.o
mv "$out/made.so" "$out/libemulated_gpu.so"  # at once, for those that have the old one loaded

{
  undefined "$packages"/torch/lib/libcaffe2_nvrtc.so
  strings -a "$packages"/torch/lib/libc10_cuda.so "$packages"/torch/lib/libtorch_cuda.so
} | grep -E '^cu[A-Z][A-Za-z_0-9]+$' | grep -vE '^(cuDevicePrimaryCtxGetState|cuCtxGetCurrent|cuFile.*)$' | sort -u | stubs > "$out/driver.c"
cat >> "$out/driver.c" <<'C'
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *flags = 0; *active = 1; return 0; }
int cuCtxGetCurrent(void **context) { *context = (void *)16; return 0; }
C
mkdir -p "$out/driver"
gcc -O2 -fPIC -shared -w -Wl,-soname,libcuda.so.1 -o "$out/driver/libcuda.so.1" "$out/driver.c"
