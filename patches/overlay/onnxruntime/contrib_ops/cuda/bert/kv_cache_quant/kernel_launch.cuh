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
// not wait.
template <typename... Params>
cudaError_t LaunchOverlapping(void (*kernel)(Params...), int64_t blocks, int threads, size_t shared_bytes,
                              cudaStream_t stream, Params... params) {
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel));
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = attributes.ptxVersion >= 90 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, params...);
}

}  // namespace kv_cache_quant
}  // namespace contrib
}  // namespace onnxruntime
