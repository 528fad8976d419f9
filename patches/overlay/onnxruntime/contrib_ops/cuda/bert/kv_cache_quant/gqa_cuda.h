// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.

#pragma once

#include <mutex>
#include <unordered_map>

#include "core/providers/cuda/cuda_kernel.h"
#include "contrib_ops/cpu/bert/kv_cache_quant/attributes.h"
#include "contrib_ops/cuda/bert/kv_cache_quant/plan.h"

namespace onnxruntime {
namespace contrib {
namespace cuda {

// The counters of a node's calls (GqaParams::counters). Calls on one stream come one after the other and share theirs.
class StreamCounters {
 public:
  // At least `count` zeros for calls on `stream`. They stay where they are for as long as this lives: a captured graph
  // has their address.
  Status Get(const OpKernelInfo& info, cudaStream_t stream, int32_t count, uint32_t** counters) const;

 private:
  struct Buffer {
    IAllocatorUniquePtr<uint32_t> data;
    int32_t count;
  };
  mutable std::mutex mutex_;
  mutable std::unordered_multimap<cudaStream_t, Buffer> buffers_;
};

// GroupQueryAttention on a quantized cache. Activations are MLFloat16 or BFloat16.
class GroupQueryAttentionKvQuant final : public onnxruntime::cuda::CudaKernel {
 public:
  explicit GroupQueryAttentionKvQuant(const OpKernelInfo& info);
  Status ComputeInternal(OpKernelContext* context) const override;

 private:
  kv_cache_quant::GqaKvQuantAttributes attributes_;
  kv_cache_quant::ActivationType activation_;
  kv_cache_quant::DeviceLimits device_;
  StreamCounters counters_;
};

}  // namespace cuda
}  // namespace contrib
}  // namespace onnxruntime
