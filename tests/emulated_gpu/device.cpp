// What the emulated GPU says of itself: the numbers of an H100.
#include "runtime.hpp"
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <unordered_map>

API cudaError_t cudaGetDeviceCount(int *n) {
    const char *visible = std::getenv("CUDA_VISIBLE_DEVICES");
    *n = !visible || *visible;
    return *n ? cudaSuccess : cudaErrorNoDevice;
}
API cudaError_t cudaGetDevice(int *d) { *d = 0; return cudaSuccess; }
API cudaError_t cudaSetDevice(int d) { return d ? said(cudaErrorInvalidDevice) : cudaSuccess; }
API cudaError_t cudaDeviceCanAccessPeer(int *a, int, int) { *a = 0; return cudaSuccess; }
API cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
API cudaError_t cudaDeviceGetPCIBusId(char *to, int n, int) { snprintf(to, n, "0000:00:00.0"); return cudaSuccess; }
API cudaError_t cudaDeviceGetByPCIBusId(int *d, const char *) { *d = 0; return cudaSuccess; }
API cudaError_t cudaDeviceGetStreamPriorityRange(int *low, int *high) { *low = 0; *high = -5; return cudaSuccess; }
API cudaError_t cudaDriverGetVersion(int *v) { *v = CUDART_VERSION; return cudaSuccess; }
API cudaError_t cudaRuntimeGetVersion(int *v) { *v = CUDART_VERSION; return cudaSuccess; }
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int) {
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "emulated GPU");
    p->totalGlobalMem = memory_of_the_gpu();
    p->sharedMemPerBlock = 49152; p->sharedMemPerBlockOptin = 232448; p->sharedMemPerMultiprocessor = 233472;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536; p->warpSize = 32;
    p->maxThreadsPerBlock = 1024; p->maxThreadsPerMultiProcessor = 2048; p->maxBlocksPerMultiProcessor = 32;
    p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024; p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 2147483647; p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->major = 9; p->minor = 0; p->multiProcessorCount = 132; p->l2CacheSize = 50 << 20;
    p->textureAlignment = 512; p->unifiedAddressing = p->managedMemory = p->concurrentKernels = 1;
    p->concurrentManagedAccess = 1; p->asyncEngineCount = 3; p->totalConstMem = 65536;
    return cudaSuccess;
}
API cudaError_t cudaDeviceGetAttribute(int *v, cudaDeviceAttr which, int) {
    static const std::unordered_map<int, int> known{
        {cudaDevAttrMaxThreadsPerBlock, 1024}, {cudaDevAttrMaxSharedMemoryPerBlock, 49152},
        {cudaDevAttrMaxSharedMemoryPerBlockOptin, 232448}, {cudaDevAttrMaxSharedMemoryPerMultiprocessor, 233472},
        {cudaDevAttrMultiProcessorCount, 132}, {cudaDevAttrComputeCapabilityMajor, 9}, {cudaDevAttrWarpSize, 32},
        {cudaDevAttrMaxGridDimX, 2147483647}, {cudaDevAttrMaxGridDimY, 65535}, {cudaDevAttrMaxGridDimZ, 65535},
        {cudaDevAttrMaxBlockDimX, 1024}, {cudaDevAttrMaxBlockDimY, 1024}, {cudaDevAttrMaxBlockDimZ, 64},
        {cudaDevAttrMaxThreadsPerMultiProcessor, 2048}, {cudaDevAttrMaxRegistersPerBlock, 65536},
        {cudaDevAttrMaxRegistersPerMultiprocessor, 65536}, {cudaDevAttrL2CacheSize, 50 << 20},
        {cudaDevAttrManagedMemory, 1}, {cudaDevAttrUnifiedAddressing, 1}, {cudaDevAttrConcurrentManagedAccess, 1}};
    auto found = known.find(which);
    *v = found == known.end() ? 0 : found->second;
    return cudaSuccess;
}
API cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *p, int) { *p = (cudaMemPool_t)0x10; return cudaSuccess; }
API cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void *v) { *(uint64_t *)v = 0; return cudaSuccess; }
API cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void *) { return cudaSuccess; }
API cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc *, size_t) { return cudaSuccess; }
API cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) { return cudaSuccess; }

namespace {
thread_local cudaError_t last_error;
}

cudaError_t said(cudaError_t error) {
    if (error) last_error = error;
    return error;
}
API cudaError_t cudaGetLastError() { cudaError_t e = last_error; last_error = cudaSuccess; return e; }
API cudaError_t cudaPeekAtLastError() { return last_error; }
API const char *cudaGetErrorString(cudaError_t e) {
    switch (e) {
    case cudaSuccess: return "no error";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorInvalidConfiguration: return "invalid configuration argument";
    case cudaErrorNotSupported: return "the emulated GPU does not have this (its name is on stderr)";
    default: return "an error of the emulated GPU";
    }
}
API const char *cudaGetErrorName(cudaError_t e) { return e == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaError"; }
