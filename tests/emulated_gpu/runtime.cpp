// A CUDA runtime for machines without a GPU, preloaded in place of libcudart. Device memory is host memory, and
// streams are queues: a copy is made when somebody waits for it, and not before (EMULATED_GPU_COPIES=late, the
// default), or at once (=now). What torch's operators compute, operators.py computes; a kernel that is launched
// nevertheless is an error that has its name, or does nothing (EMULATED_GPU_KERNELS=none, to time the host's work).
#include "runtime.hpp"
#include <sys/mman.h>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace {

std::string setting(const char *name, const char *otherwise) {
    const char *text = getenv(name);
    return text ? text : otherwise;
}
const size_t memory = std::stoull(setting("EMULATED_GPU_BYTES", "85899345920"));
const bool late = setting("EMULATED_GPU_COPIES", "late") == "late";
const bool no_kernels = setting("EMULATED_GPU_KERNELS", "") == "none";

// ---- streams ------------------------------------------------------------------------------------------------

struct Stream;
struct Work {
    enum { Copy, Set, Call, Wait } what;
    char *to = nullptr;
    const char *from = nullptr;
    size_t bytes = 0;
    int value = 0;
    std::vector<char> staged;  // of pageable memory, which the caller may change at once
    cudaHostFn_t function = nullptr;
    Stream *stream = nullptr;
    long until = 0;
};
struct Stream {
    std::deque<Work> queue;
    long issued = 0, done = 0;
    int priority = 0;
};
struct Event {
    Stream *stream = nullptr;
    long at = 0;
    int asked = 0;
    timespec time{};
};
Stream default_stream;
std::vector<Stream *> streams{&default_stream};
std::recursive_mutex order;
using Locked = std::lock_guard<std::recursive_mutex>;

Stream *of(cudaStream_t stream) { return (uintptr_t)stream < 16 ? &default_stream : reinterpret_cast<Stream *>(stream); }

void finish(Stream *stream, long until) {
    while (stream->done < until) {
        Work work = std::move(stream->queue.front());
        stream->queue.pop_front();
        stream->done++;
        switch (work.what) {
        case Work::Copy: memmove(work.to, work.staged.empty() ? work.from : work.staged.data(), work.bytes); break;
        case Work::Set: memset(work.to, work.value, work.bytes); break;
        case Work::Call: work.function(work.to); break;
        case Work::Wait: finish(work.stream, work.until); break;
        }
    }
}
void finish(Stream *stream) { finish(stream, stream->issued); }
void finish_all() {
    for (size_t i = 0; i < streams.size(); i++) finish(streams[i]);
}
void issue(Stream *stream, Work work) {
    stream->queue.push_back(std::move(work));
    stream->issued++;
    if (!late) finish(stream);
}

// ---- memory -------------------------------------------------------------------------------------------------

struct Range { size_t size; cudaMemoryType kind; bool mapped; };
std::map<char *, Range> ranges;
size_t used;

std::map<char *, Range>::iterator find(const void *p) {
    auto after = ranges.upper_bound((char *)p);
    if (after == ranges.begin()) return ranges.end();
    --after;
    return (const char *)p < after->first + after->second.size ? after : ranges.end();
}
cudaMemoryType kind_of(const void *p) {
    auto found = find(p);
    return found == ranges.end() ? cudaMemoryTypeUnregistered : found->second.kind;
}
cudaError_t allocate(void **p, size_t size, cudaMemoryType kind) {
    Locked locked(order);
    *p = nullptr;
    if (!size) return cudaSuccess;
    size = (size + 4095) & ~size_t(4095);
    if (kind == cudaMemoryTypeDevice && used + size > memory) return said(cudaErrorMemoryAllocation);
    void *got = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (got == MAP_FAILED) return said(cudaErrorMemoryAllocation);
    ranges[(char *)got] = {size, kind, true};
    if (kind == cudaMemoryTypeDevice) used += size;
    *p = got;
    return cudaSuccess;
}
cudaError_t release(void *p) {
    if (!p) return cudaSuccess;
    Locked locked(order);
    finish_all();  // as cudaFree does
    auto found = ranges.find((char *)p);
    if (found == ranges.end()) return said(cudaErrorInvalidValue);
    if (found->second.kind == cudaMemoryTypeDevice) used -= found->second.size;
    if (found->second.mapped) munmap(p, found->second.size);
    ranges.erase(found);
    return cudaSuccess;
}
cudaError_t copy(void *to, const void *from, size_t bytes, Stream *stream) {
    Locked locked(order);
    Work work{Work::Copy};
    work.to = (char *)to, work.from = (const char *)from, work.bytes = bytes;
    if (late && kind_of(from) == cudaMemoryTypeUnregistered) work.staged.assign(work.from, work.from + bytes);
    issue(stream, std::move(work));
    if (kind_of(to) == cudaMemoryTypeUnregistered) finish(stream);  // a copy to pageable memory is waited for
    return cudaSuccess;
}
cudaError_t set(void *to, int value, size_t bytes, Stream *stream) {
    Locked locked(order);
    Work work{Work::Set};
    work.to = (char *)to, work.value = value, work.bytes = bytes;
    issue(stream, std::move(work));
    return cudaSuccess;
}

}  // namespace

size_t memory_of_the_gpu() { return memory; }

// What operators.py asks for: that all of a stream is done before its next operator.
API void emulated_gpu_finish(cudaStream_t stream) {
    Locked locked(order);
    finish(of(stream));
}

API cudaError_t cudaMalloc(void **p, size_t n) { return allocate(p, n, cudaMemoryTypeDevice); }
API cudaError_t cudaMallocAsync(void **p, size_t n, cudaStream_t) { return allocate(p, n, cudaMemoryTypeDevice); }
API cudaError_t cudaMallocManaged(void **p, size_t n, unsigned) { return allocate(p, n, cudaMemoryTypeManaged); }
API cudaError_t cudaHostAlloc(void **p, size_t n, unsigned) { return allocate(p, n, cudaMemoryTypeHost); }
API cudaError_t cudaFree(void *p) { return release(p); }
API cudaError_t cudaFreeAsync(void *p, cudaStream_t) { return release(p); }
API cudaError_t cudaFreeHost(void *p) { return release(p); }
API cudaError_t cudaHostRegister(void *p, size_t n, unsigned) {
    Locked locked(order);
    ranges[(char *)p] = {n, cudaMemoryTypeHost, false};
    return cudaSuccess;
}
API cudaError_t cudaHostUnregister(void *p) { return release(p); }
API cudaError_t cudaHostGetDevicePointer(void **d, void *h, unsigned) { *d = h; return cudaSuccess; }
API cudaError_t cudaMemGetInfo(size_t *left, size_t *all) { *all = memory; *left = memory - used; return cudaSuccess; }
API cudaError_t cudaMemAdvise(const void *, size_t, cudaMemoryAdvise, cudaMemLocation) { return cudaSuccess; }
API cudaError_t cudaMemPrefetchAsync(const void *, size_t, cudaMemLocation, unsigned, cudaStream_t) { return cudaSuccess; }
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *a, const void *p) {
    Locked locked(order);
    memset(a, 0, sizeof *a);
    a->type = kind_of(p);
    if (a->type != cudaMemoryTypeUnregistered) a->devicePointer = (void *)p;
    if (a->type != cudaMemoryTypeDevice) a->hostPointer = a->devicePointer;
    return cudaSuccess;
}
API cudaError_t cudaMemcpy(void *to, const void *from, size_t n, cudaMemcpyKind) {
    cudaError_t error = copy(to, from, n, &default_stream);
    emulated_gpu_finish(nullptr);
    return error;
}
API cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t n, cudaMemcpyKind, cudaStream_t s) { return copy(to, from, n, of(s)); }
API cudaError_t cudaMemcpyPeerAsync(void *to, int, const void *from, int, size_t n, cudaStream_t s) { return copy(to, from, n, of(s)); }
API cudaError_t cudaMemcpy2DAsync(void *to, size_t tp, const void *from, size_t fp, size_t w, size_t h, cudaMemcpyKind, cudaStream_t s) {
    for (size_t i = 0; i < h; i++) copy((char *)to + i * tp, (const char *)from + i * fp, w, of(s));
    return cudaSuccess;
}
API cudaError_t cudaMemset(void *p, int v, size_t n) {
    set(p, v, n, &default_stream);
    emulated_gpu_finish(nullptr);
    return cudaSuccess;
}
API cudaError_t cudaMemsetAsync(void *p, int v, size_t n, cudaStream_t s) { return set(p, v, n, of(s)); }

API cudaError_t cudaDeviceSynchronize() {
    Locked locked(order);
    finish_all();
    return cudaSuccess;
}

// ---- streams and events ------------------------------------------------------------------------------------

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t *to, unsigned, int priority) {
    Locked locked(order);
    auto *made = new Stream;
    made->priority = priority;
    streams.push_back(made);
    *to = (cudaStream_t)made;
    return cudaSuccess;
}
API cudaError_t cudaStreamCreate(cudaStream_t *to) { return cudaStreamCreateWithPriority(to, 0, 0); }
API cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
API cudaError_t cudaStreamGetPriority(cudaStream_t s, int *p) { *p = of(s)->priority; return cudaSuccess; }
API cudaError_t cudaStreamSynchronize(cudaStream_t s) {
    emulated_gpu_finish(s);
    return cudaSuccess;
}
API cudaError_t cudaStreamQuery(cudaStream_t s) { emulated_gpu_finish(s); return cudaSuccess; }
API cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned) {
    Locked locked(order);
    auto *event = (Event *)e;
    Work work{Work::Wait};
    work.stream = event->stream, work.until = event->at;
    if (event->stream && event->stream->done < event->at) issue(of(s), std::move(work));
    return cudaSuccess;
}
API cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus *c) { *c = cudaStreamCaptureStatusNone; return cudaSuccess; }
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus *c, unsigned long long *id, cudaGraph_t *,
                                         const cudaGraphNode_t **, const cudaGraphEdgeData **, size_t *) {
    *c = cudaStreamCaptureStatusNone;
    if (id) *id = 0;
    return cudaSuccess;
}
API cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t f, void *given) {
    Locked locked(order);
    Work work{Work::Call};
    work.function = f, work.to = (char *)given;
    issue(of(s), std::move(work));
    return cudaSuccess;
}
API cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t f, void *given, unsigned) {
    emulated_gpu_finish(s);
    f(s, cudaSuccess, given);
    return cudaSuccess;
}
API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *) { return cudaSuccess; }
API cudaError_t cudaEventCreate(cudaEvent_t *e) { *e = (cudaEvent_t) new Event; return cudaSuccess; }
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned) { return cudaEventCreate(e); }
API cudaError_t cudaEventDestroy(cudaEvent_t e) { delete (Event *)e; return cudaSuccess; }
API cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
    Locked locked(order);
    auto *event = (Event *)e;
    event->stream = of(s), event->at = of(s)->issued, event->asked = 0;
    clock_gettime(CLOCK_MONOTONIC, &event->time);
    return cudaSuccess;
}
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned) { return cudaEventRecord(e, s); }
API cudaError_t cudaEventSynchronize(cudaEvent_t e) {
    Locked locked(order);
    auto *event = (Event *)e;
    if (event->stream) finish(event->stream, event->at);
    return cudaSuccess;
}
API cudaError_t cudaEventQuery(cudaEvent_t e) {  // not ready, but only twice, for those who ask until it is
    Locked locked(order);
    auto *event = (Event *)e;
    if (!event->stream || event->stream->done >= event->at) return cudaSuccess;
    if (event->asked++ < 2) return cudaErrorNotReady;
    return cudaEventSynchronize(e);
}
API cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) {  // of the host's clock
    timespec &x = ((Event *)a)->time, &y = ((Event *)b)->time;
    *ms = (y.tv_sec - x.tv_sec) * 1e3 + (y.tv_nsec - x.tv_nsec) / 1e6;
    return cudaSuccess;
}

// ---- kernels ------------------------------------------------------------------------------------------------

namespace {
std::unordered_map<const void *, std::string> &names() {  // filled while libraries load, so made when first asked for
    static auto *all = new std::unordered_map<const void *, std::string>;
    return *all;
}
struct Launch { dim3 grid, block; size_t shared; cudaStream_t stream; };
thread_local std::vector<Launch> launches;

cudaError_t launched(const void *function, dim3 g, dim3 b) {
    if (!g.x || !g.y || !g.z || !b.x || !b.y || !b.z || b.x * b.y * b.z > 1024 || g.y > 65535 || g.z > 65535)
        return said(cudaErrorInvalidConfiguration);
    if (no_kernels) return cudaSuccess;
    auto found = names().find(function);
    fprintf(stderr, "emulated GPU: no kernel %s\n", found == names().end() ? "?" : found->second.c_str());
    return said(cudaErrorNotSupported);
}
}  // namespace

API unsigned __cudaPushCallConfiguration(dim3 g, dim3 b, size_t n, CUstream_st *s) {
    launches.push_back({g, b, n, s});
    return 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3 *g, dim3 *b, size_t *n, void *s) {
    Launch call = launches.back();
    launches.pop_back();
    *g = call.grid, *b = call.block, *n = call.shared, *(cudaStream_t *)s = call.stream;
    return cudaSuccess;
}
API cudaError_t cudaLaunchKernel(const void *f, dim3 g, dim3 b, void **, size_t, cudaStream_t) { return launched(f, g, b); }
API cudaError_t __cudaLaunchKernel(cudaKernel_t f, dim3 g, dim3 b, void **, size_t, cudaStream_t) { return launched(f, g, b); }
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *f, void **) { return launched(f, c->gridDim, c->blockDim); }
API cudaError_t __cudaGetKernel(cudaKernel_t *k, const void *f) { *k = (cudaKernel_t)f; return cudaSuccess; }
API void **__cudaRegisterFatBinary(void *) { static void *one[1]; return one; }
API void __cudaRegisterFatBinaryEnd(void **) {}
API void __cudaUnregisterFatBinary(void **) {}
API void __cudaRegisterFunction(void **, const char *host, char *, const char *name, int, void *, void *, void *, void *, int *) { names()[host] = name; }
API void __cudaRegisterVar(void **, char *, char *, const char *, int, size_t, int, int) {}
API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *a, const void *) {
    memset(a, 0, sizeof *a);
    a->maxThreadsPerBlock = 1024; a->numRegs = 32; a->ptxVersion = a->binaryVersion = 90; a->maxDynamicSharedSizeBytes = 49152;
    return cudaSuccess;
}
API cudaError_t cudaFuncSetAttribute(const void *, cudaFuncAttribute, int) { return cudaSuccess; }
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *, int block, size_t, unsigned) {
    *n = block > 0 && block < 2048 ? 2048 / block : 1;
    return cudaSuccess;
}
API cudaError_t cudaGetSymbolAddress(void **p, const void *s) { *p = (void *)s; return cudaSuccess; }
API cudaError_t cudaMemcpyToSymbol(const void *, const void *, size_t, size_t, cudaMemcpyKind) { return cudaSuccess; }
API cudaError_t cudaProfilerStart() { return cudaSuccess; }
API cudaError_t cudaProfilerStop() { return cudaSuccess; }
static int no_driver() { return cudaErrorNotSupported; }
API cudaError_t cudaGetDriverEntryPointByVersion(const char *, void **p, unsigned, unsigned long long, cudaDriverEntryPointQueryResult *r) {
    *p = (void *)no_driver;
    if (r) *r = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
