// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.

#include "contrib_ops/cuda/bert/kv_cache_quant/dispatch.h"
#include "contrib_ops/cuda/bert/kv_cache_quant/launch.h"
#include "contrib_ops/cuda/bert/kv_cache_quant/prefill_launch.h"

namespace onnxruntime {
namespace contrib {
namespace kv_cache_quant {

cudaError_t LaunchPrefill(const GqaParams& p, const GqaPlan& plan, cudaStream_t stream) {
  if (plan.path == GqaPath::kPrompt) {
    return DispatchActivation(p.activation, [&](auto type) {
      return LaunchPrefillRows<ExactRows<decltype(type)::value>>(p, plan, stream);
    });
  }
  return DispatchFormat(p.format, [&](auto format) {
    return LaunchPrefillRows<CacheRows<decltype(format)::value>>(p, plan, stream);
  });
}

}  // namespace kv_cache_quant
}  // namespace contrib
}  // namespace onnxruntime
