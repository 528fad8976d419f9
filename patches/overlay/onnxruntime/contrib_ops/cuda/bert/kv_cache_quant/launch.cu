// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.

#include "contrib_ops/cuda/bert/kv_cache_quant/launch.h"

#include "contrib_ops/cuda/bert/kv_cache_quant/kernel_launch.cuh"

namespace onnxruntime {
namespace contrib {
namespace kv_cache_quant {

namespace {

// What the occupancy of clusters is asked for: a block that takes a multiprocessor for itself.
__global__ void WholeMultiprocessorKernel() {}

}  // namespace

cudaError_t FindClusters(int32_t (&clusters)[kMaxCluster + 1]) {
  for (int32_t& count : clusters) count = 0;
  const auto* const kernel = reinterpret_cast<const void*>(WholeMultiprocessorKernel);
  cudaFuncAttributes attributes;
  cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
  if (error != cudaSuccess || !HasClusters(attributes.ptxVersion)) return error;
  int device = 0;
  int shared_bytes = 0;  // of a multiprocessor: two blocks with half of it each, and what is reserved, do not fit
  error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  }
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes / 2);
  }
  for (int blocks = 2; blocks <= kMaxCluster && error == cudaSuccess; ++blocks) {
    cudaLaunchAttribute cluster = {};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = static_cast<unsigned>(blocks);
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(blocks));
    config.blockDim = dim3(32);
    config.dynamicSmemBytes = static_cast<size_t>(shared_bytes) / 2;
    config.attrs = &cluster;
    config.numAttrs = 1;
    error = cudaOccupancyMaxActiveClusters(&clusters[blocks], kernel, &config);
  }
  return error;
}

cudaError_t LaunchGqa(const GqaParams& p, const GqaPlan& plan, cudaStream_t stream) {
  // A prompt has no past rows to copy; a call without new tokens has nothing else to do.
  cudaError_t error = p.is_prompt ? cudaSuccess : LaunchCopyPast(p, stream);
  if (error != cudaSuccess || p.batch_size == 0 || p.sequence_length == 0) return error;
  switch (plan.path) {
    case GqaPath::kDecode:
      error = LaunchDecode(p, plan, stream);
      break;
    case GqaPath::kPrefill:
    case GqaPath::kPrompt:
      error = LaunchAppend(p, plan, stream);
      if (error == cudaSuccess) error = LaunchPrefill(p, plan, stream);
      break;
    default:
      error = cudaErrorInvalidValue;
  }
  if (error != cudaSuccess || plan.WritesOutput()) return error;
  return LaunchMerge(p, plan, stream);
}

}  // namespace kv_cache_quant
}  // namespace contrib
}  // namespace onnxruntime
