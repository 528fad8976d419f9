// The part of the CUDA runtime that the tests need, so that Python loads one library and no package beside it. Each
// function returns a cudaError_t as int.

#include <cstddef>
#include <cstdint>
#include <vector>

#include <cuda_runtime.h>

#include "contrib_ops/cuda/bert/kv_cache_quant/launch.h"

namespace kvq = onnxruntime::contrib::kv_cache_quant;

extern "C" {

const char* kvq_error_text(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

// Clears and returns what an earlier call left.
int kvq_last_error() { return cudaGetLastError(); }

struct KvqDevice {
  int32_t multiprocessors;
  int32_t compute_capability;
  int64_t l2_bytes;
  int64_t total_bytes;
  int64_t free_bytes;
  char name[256];
};

int kvq_device(KvqDevice* out) {
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  cudaDeviceProp properties;
  error = cudaGetDeviceProperties(&properties, device);
  if (error != cudaSuccess) return error;
  size_t free_bytes = 0, total_bytes = 0;
  error = cudaMemGetInfo(&free_bytes, &total_bytes);
  out->multiprocessors = properties.multiProcessorCount;
  out->compute_capability = properties.major * 10 + properties.minor;
  out->l2_bytes = properties.l2CacheSize;
  out->total_bytes = static_cast<int64_t>(total_bytes);
  out->free_bytes = static_cast<int64_t>(free_bytes);
  for (size_t i = 0; i < sizeof(out->name); ++i) out->name[i] = properties.name[i];
  return error;
}

int kvq_malloc(size_t bytes, void** pointer) { return cudaMalloc(pointer, bytes); }
int kvq_free(void* pointer) { return cudaFree(pointer); }
int kvq_set(void* pointer, int value, size_t bytes, cudaStream_t stream) {
  return cudaMemsetAsync(pointer, value, bytes, stream);
}
int kvq_to_device(void* to, const void* from, size_t bytes, cudaStream_t stream) {
  return cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream);
}
int kvq_to_host(void* to, const void* from, size_t bytes, cudaStream_t stream) {
  return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream);
}

int kvq_stream_create(cudaStream_t* stream) { return cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking); }
int kvq_stream_destroy(cudaStream_t stream) { return cudaStreamDestroy(stream); }
int kvq_synchronize(cudaStream_t stream) { return cudaStreamSynchronize(stream); }

int kvq_event_create(cudaEvent_t* event) { return cudaEventCreate(event); }
int kvq_event_destroy(cudaEvent_t event) { return cudaEventDestroy(event); }
int kvq_event_record(cudaEvent_t event, cudaStream_t stream) { return cudaEventRecord(event, stream); }
int kvq_event_elapsed(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
  return cudaEventElapsedTime(milliseconds, from, to);
}

// What is enqueued on the stream between begin and end becomes an executable graph; *kernels of its *nodes are kernels.
int kvq_capture_begin(cudaStream_t stream) {
  return cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
}
int kvq_capture_end(cudaStream_t stream, cudaGraphExec_t* executable, int* kernels, int* nodes) {
  cudaGraph_t graph = nullptr;
  cudaError_t error = cudaStreamEndCapture(stream, &graph);
  if (error != cudaSuccess) return error;
  size_t count = 0;
  error = cudaGraphGetNodes(graph, nullptr, &count);
  std::vector<cudaGraphNode_t> found(count);
  if (error == cudaSuccess && count > 0) error = cudaGraphGetNodes(graph, found.data(), &count);
  *nodes = static_cast<int>(count);
  *kernels = 0;
  for (cudaGraphNode_t node : found) {
    cudaGraphNodeType type = cudaGraphNodeTypeEmpty;
    if (error == cudaSuccess) error = cudaGraphNodeGetType(node, &type);
    if (type == cudaGraphNodeTypeKernel) ++*kernels;
  }
  if (error == cudaSuccess) error = cudaGraphInstantiate(executable, graph, 0);
  cudaGraphDestroy(graph);
  return error;
}
int kvq_graph_launch(cudaGraphExec_t executable, cudaStream_t stream) { return cudaGraphLaunch(executable, stream); }
int kvq_graph_destroy(cudaGraphExec_t executable) { return cudaGraphExecDestroy(executable); }

int kvq_find_device_code() { return kvq::FindDeviceCode(); }
// clusters: (kMaxCluster + 1).
int kvq_find_clusters(int32_t* clusters) {
  return kvq::FindClusters(*reinterpret_cast<int32_t (*)[kvq::kMaxCluster + 1]>(clusters));
}
int kvq_launch_gqa(const kvq::GqaParams* p, const kvq::GqaPlan* plan, cudaStream_t stream) {
  return kvq::LaunchGqa(*p, *plan, stream);
}
int kvq_launch_copy_past(const kvq::GqaParams* p, const kvq::GqaPlan*, cudaStream_t stream) {
  return kvq::LaunchCopyPast(*p, stream);
}
int kvq_launch_append(const kvq::GqaParams* p, const kvq::GqaPlan* plan, cudaStream_t stream) {
  return kvq::LaunchAppend(*p, *plan, stream);
}
int kvq_launch_decode(const kvq::GqaParams* p, const kvq::GqaPlan* plan, cudaStream_t stream) {
  return kvq::LaunchDecode(*p, *plan, stream);
}
int kvq_launch_prefill(const kvq::GqaParams* p, const kvq::GqaPlan* plan, cudaStream_t stream) {
  return kvq::LaunchPrefill(*p, *plan, stream);
}
int kvq_launch_merge(const kvq::GqaParams* p, const kvq::GqaPlan* plan, cudaStream_t stream) {
  return kvq::LaunchMerge(*p, *plan, stream);
}

}  // extern "C"
