// What torch asks of NCCL, of cuBLAS and of NVML where there is one rank and operators.py computes the products.
#include <cuda_runtime_api.h>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>

#define API extern "C" __attribute__((visibility("default")))

namespace {
const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};  // of ncclDataType_t
struct Comm { int ranks, rank; };
struct Part { void *where; size_t bytes; };
thread_local std::deque<Part> sent, awaited;

int handed_on(const void *from, void *to, size_t count, int type, cudaStream_t stream) {
    if (from != to) cudaMemcpyAsync(to, from, count * sizes[type], cudaMemcpyDefault, stream);
    return 0;
}
int met(cudaStream_t stream) {
    while (!sent.empty() && !awaited.empty()) {
        handed_on(sent.front().where, awaited.front().where, sent.front().bytes, 0, stream);
        sent.pop_front();
        awaited.pop_front();
    }
    return 0;
}
int made(void **to) { *to = calloc(1, 4096); return 0; }
}  // namespace

struct Id { char bytes[128]; };
API int ncclGetUniqueId(Id *id) { memset(id, 7, sizeof *id); return 0; }
API int ncclGetVersion(int *v) { *v = 22803; return 0; }
API int ncclCommInitRank(Comm **c, int ranks, Id, int rank) {
    *c = new Comm{ranks, rank};
    return ranks == 1 ? 0 : 4;  // ncclInvalidArgument: ranks do not meet here
}
API int ncclCommInitRankConfig(Comm **c, int ranks, Id id, int rank, void *) { return ncclCommInitRank(c, ranks, id, rank); }
API int ncclCommSplit(Comm *c, int, int, Comm **to, void *) { *to = new Comm(*c); return 0; }
API int ncclCommCount(Comm *c, int *n) { *n = c->ranks; return 0; }
API int ncclCommUserRank(Comm *c, int *n) { *n = c->rank; return 0; }
API int ncclCommGetAsyncError(Comm *, int *e) { *e = 0; return 0; }
API const char *ncclGetErrorString(int) { return "the emulated GPU has one rank"; }
API const char *ncclGetLastError(Comm *) { return "the emulated GPU has one rank"; }
API int ncclAllReduce(const void *a, void *b, size_t n, int type, int, Comm *, cudaStream_t s) { return handed_on(a, b, n, type, s); }
API int ncclReduce(const void *a, void *b, size_t n, int type, int, int, Comm *, cudaStream_t s) { return handed_on(a, b, n, type, s); }
API int ncclReduceScatter(const void *a, void *b, size_t n, int type, int, Comm *, cudaStream_t s) { return handed_on(a, b, n, type, s); }
API int ncclAllGather(const void *a, void *b, size_t n, int type, Comm *, cudaStream_t s) { return handed_on(a, b, n, type, s); }
API int ncclAlltoAll(const void *a, void *b, size_t n, int type, Comm *, cudaStream_t s) { return handed_on(a, b, n, type, s); }
API int ncclBroadcast(const void *a, void *b, size_t n, int type, int, Comm *, cudaStream_t s) { return handed_on(a, b, n, type, s); }
API int ncclBcast(void *, size_t, int, int, Comm *, cudaStream_t) { return 0; }
API int ncclSend(const void *a, size_t n, int type, int, Comm *, cudaStream_t s) {
    sent.push_back({(void *)a, n * sizes[type]});
    return met(s);
}
API int ncclRecv(void *b, size_t n, int type, int, Comm *, cudaStream_t s) {
    awaited.push_back({b, n * sizes[type]});
    return met(s);
}

API int cublasCreate_v2(void **h) { return made(h); }
API int cublasLtCreate(void **h) { return made(h); }
API int cublasGetVersion_v2(void *, int *v) { *v = 130000; return 0; }
API int cublasGetPointerMode_v2(void *, int *v) { *v = 0; return 0; }
API int cublasGetMathMode(void *, int *v) { *v = 0; return 0; }
API int cublasGetStream_v2(void *, void **v) { *v = nullptr; return 0; }
API int cublasLtMatmulDescCreate(void **d, int, int) { return made(d); }
API int cublasLtMatrixLayoutCreate(void **d, int, uint64_t, uint64_t, int64_t) { return made(d); }
API int cublasLtMatmulPreferenceCreate(void **d) { return made(d); }
API int cublasLtMatmulAlgoGetHeuristic(void *, void *, void *, void *, void *, void *, void *, int, void *result, int *found) {
    memset(result, 0, 96);
    *found = 1;
    return 0;
}

API int nvmlInit() { return 0; }
API int nvmlInit_v2() { return 0; }
API int nvmlDeviceGetCount_v2(unsigned *n) { *n = 1; return 0; }
API int nvmlDeviceGetHandleByIndex(unsigned, void **d) { *d = nullptr; return 0; }
API int nvmlDeviceGetHandleByIndex_v2(unsigned, void **d) { *d = nullptr; return 0; }
API int nvmlDeviceGetHandleByPciBusId_v2(const char *, void **d) { *d = nullptr; return 0; }
API int nvmlDeviceGetUUID(void *, char *to, unsigned) { strcpy(to, "GPU-00000000-0000-0000-0000-000000000000"); return 0; }
API int nvmlDeviceGetComputeRunningProcesses(void *, unsigned *n, void *) { *n = 0; return 0; }
API int nvmlSystemGetCudaDriverVersion_v2(int *v) { *v = CUDART_VERSION; return 0; }
API int nvmlDeviceGetGpuFabricInfoV(void *, void *) { return 3; }  // NVML_ERROR_NOT_SUPPORTED
API int nvmlDeviceGetNvLinkRemoteDeviceType(void *, unsigned, int *) { return 3; }
API int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *, unsigned, void *) { return 3; }
