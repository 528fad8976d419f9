// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
//
// Launches that overlap the launch before them on the same stream (programmatic dependent launch, sm_90 and later).
// A kernel launched so starts as soon as the blocks of the kernel before have all called AllowNextKernel or ended. It
// must call WaitForPreviousKernel before it reads what that kernel writes; what was finished before that kernel
// began is there from the start. Captured in a graph, this becomes an edge of the graph.

#pragma once

#include <cstdint>

#include <cuda_runtime.h>

namespace onnxruntime {
namespace contrib {
namespace kv_cache_quant {

// Whether code for a chip (10 * major + minor) has clusters of blocks. That for sm_120 could have them, but its decode
// kernel would spill registers.
constexpr bool HasClusters(int chip) { return chip >= 90 && chip < 120; }
#ifdef __CUDA_ARCH__
constexpr bool kHasClusters = HasClusters(__CUDA_ARCH__ / 10);
#else
constexpr bool kHasClusters = false;
#endif

__device__ __forceinline__ void AllowNextKernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;\n");
#endif
}

__device__ __forceinline__ void WaitForPreviousKernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\n" ::: "memory");
#endif
}

// A plain launch where the code that runs is for an older chip, be it compiled from its PTX for a later one: it does
// not wait. cluster: blocks of a cluster, of which that code has none.
template <typename... Params>
cudaError_t LaunchOverlapping(void (*kernel)(Params...), int64_t blocks, int cluster, int threads, size_t shared_bytes,
                              cudaStream_t stream, Params... params) {
  const auto* const entry = reinterpret_cast<const void*>(kernel);
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, entry);
  if (error != cudaSuccess) return error;
  if (cluster > 1 && !HasClusters(attributes.ptxVersion)) return cudaErrorInvalidValue;
  cudaLaunchAttribute launch[2] = {};
  launch[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  launch[0].val.programmaticStreamSerializationAllowed = 1;
  launch[1].id = cudaLaunchAttributeClusterDimension;
  launch[1].val.clusterDim.x = static_cast<unsigned>(cluster);
  launch[1].val.clusterDim.y = launch[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = launch;
  config.numAttrs = attributes.ptxVersion < 90 ? 0 : cluster > 1 ? 2
                                                                 : 1;
  return cudaLaunchKernelEx(&config, kernel, params...);
}

}  // namespace kv_cache_quant
}  // namespace contrib
}  // namespace onnxruntime
