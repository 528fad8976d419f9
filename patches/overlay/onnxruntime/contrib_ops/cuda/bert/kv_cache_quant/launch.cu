// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.

#include "contrib_ops/cuda/bert/kv_cache_quant/launch.h"

namespace onnxruntime {
namespace contrib {
namespace kv_cache_quant {

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
  if (error != cudaSuccess || plan.splits == 1 || plan.counters != 0) return error;
  return LaunchMerge(p, plan, stream);
}

}  // namespace kv_cache_quant
}  // namespace contrib
}  // namespace onnxruntime
