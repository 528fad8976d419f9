// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.

#pragma once

#include "core/providers/cuda/cuda_kernel.h"
#include "contrib_ops/cpu/bert/kv_cache_quant/attributes.h"
#include "contrib_ops/cuda/bert/kv_cache_quant/params.h"

namespace onnxruntime {
namespace contrib {
namespace cuda {

// GroupQueryAttention on a quantized cache. Activations are MLFloat16 or BFloat16.
class GroupQueryAttentionKvQuant final : public onnxruntime::cuda::CudaKernel {
 public:
  explicit GroupQueryAttentionKvQuant(const OpKernelInfo& info);
  Status ComputeInternal(OpKernelContext* context) const override;

 private:
  kv_cache_quant::GqaKvQuantAttributes attributes_;
  kv_cache_quant::ActivationType activation_;
  int compute_capability_;  // 10 * major + minor
};

}  // namespace cuda
}  // namespace contrib
}  // namespace onnxruntime
