// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.

#pragma once

#include <vector>

#include "core/framework/op_kernel.h"
#include "contrib_ops/cpu/bert/kv_cache_quant/attributes.h"

namespace onnxruntime {
namespace contrib {
namespace kv_cache_quant {

// Types of the cache (T_CACHE) and of its scales (T_KV_SCALE) that the CPU kernel takes.
template <typename T>
std::vector<MLDataType> CacheTypes() {
  return {DataTypeImpl::GetTensorType<T>(), DataTypeImpl::GetTensorType<int8_t>(),
#if !defined(DISABLE_FLOAT8_TYPES)
          DataTypeImpl::GetTensorType<Float8E4M3FN>(),
#endif
          DataTypeImpl::GetTensorType<uint8_t>()};
}

inline std::vector<MLDataType> ScaleTypes() {
  return {DataTypeImpl::GetTensorType<float>(), DataTypeImpl::GetTensorType<MLFloat16>()};
}

// One call of GroupQueryAttention whose cache is quantized, on the CPU. T: float or MLFloat16.
template <typename T>
Status ComputeGqaKvQuant(OpKernelContext* context, const GqaKvQuantAttributes& attributes);

}  // namespace kv_cache_quant
}  // namespace contrib
}  // namespace onnxruntime
