// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
//
// Runtime values of a call to template arguments, once per launch on the host. MakePlan has named every value that no
// kernel serves; one that still gets here is an error, never a default.

#pragma once

#include <type_traits>

#include <cuda_runtime_api.h>

#include "contrib_ops/cuda/bert/kv_cache_quant/params.h"

namespace onnxruntime {
namespace contrib {
namespace kv_cache_quant {

// Each calls launch(std::integral_constant<...>) -> cudaError_t.

template <typename Launch>
cudaError_t DispatchFormat(KvFormat format, Launch&& launch) {
  switch (format) {
    case KvFormat::kInt8:
      return launch(std::integral_constant<KvFormat, KvFormat::kInt8>());
    case KvFormat::kFloat8E4M3FN:
      return launch(std::integral_constant<KvFormat, KvFormat::kFloat8E4M3FN>());
    case KvFormat::kInt4:
      return launch(std::integral_constant<KvFormat, KvFormat::kInt4>());
    default:
      return cudaErrorInvalidValue;
  }
}

template <typename Launch>
cudaError_t DispatchActivation(ActivationType type, Launch&& launch) {
  switch (type) {
    case ActivationType::kHalf:
      return launch(std::integral_constant<ActivationType, ActivationType::kHalf>());
    case ActivationType::kBFloat16:
      return launch(std::integral_constant<ActivationType, ActivationType::kBFloat16>());
    default:
      return cudaErrorInvalidValue;
  }
}

// GqaPlan::padded_head_size.
template <typename Launch>
cudaError_t DispatchHeadSize(int32_t padded_head_size, Launch&& launch) {
  switch (padded_head_size) {
    case 64:
      return launch(std::integral_constant<int, 64>());
    case 128:
      return launch(std::integral_constant<int, 128>());
    case 256:
      return launch(std::integral_constant<int, 256>());
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace kv_cache_quant
}  // namespace contrib
}  // namespace onnxruntime
