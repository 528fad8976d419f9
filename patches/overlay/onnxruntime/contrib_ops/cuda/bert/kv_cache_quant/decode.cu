// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.

#include "contrib_ops/cuda/bert/kv_cache_quant/decode_launch.h"
#include "contrib_ops/cuda/bert/kv_cache_quant/launch.h"

namespace onnxruntime {
namespace contrib {
namespace kv_cache_quant {

cudaError_t LaunchDecode(const GqaParams& p, const GqaPlan& plan, cudaStream_t stream) {
  switch (p.format) {
    case KvFormat::kInt8:
      return LaunchDecodeFormat<KvFormat::kInt8>(p, plan, stream);
    case KvFormat::kFloat8E4M3FN:
      return LaunchDecodeFormat<KvFormat::kFloat8E4M3FN>(p, plan, stream);
    case KvFormat::kInt4:
      return LaunchDecodeFormat<KvFormat::kInt4>(p, plan, stream);
    default:
      return cudaErrorInvalidValue;  // MakePlan has named it
  }
}

}  // namespace kv_cache_quant
}  // namespace contrib
}  // namespace onnxruntime
