// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.

#include "contrib_ops/cuda/bert/kv_cache_quant/prefill.cuh"

namespace onnxruntime {
namespace contrib {
namespace kv_cache_quant {

template cudaError_t LaunchPrefillRows<ExactRows<ActivationType::kBFloat16>>(const GqaParams&, const GqaPlan&,
                                                                             cudaStream_t);

}  // namespace kv_cache_quant
}  // namespace contrib
}  // namespace onnxruntime
