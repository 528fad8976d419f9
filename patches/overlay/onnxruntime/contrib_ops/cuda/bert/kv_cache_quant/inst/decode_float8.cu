// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.

#include "contrib_ops/cuda/bert/kv_cache_quant/decode_kernel.cuh"
#include "contrib_ops/cuda/bert/kv_cache_quant/decode_launch.h"

namespace onnxruntime {
namespace contrib {
namespace kv_cache_quant {

template cudaError_t LaunchDecodeFormat<KvFormat::kFloat8E4M3FN>(const GqaParams& p, const GqaPlan& plan,
                                                                 cudaStream_t stream);

}  // namespace kv_cache_quant
}  // namespace contrib
}  // namespace onnxruntime
