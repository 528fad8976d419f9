// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.

#pragma once

#include <cuda_runtime_api.h>

#include "contrib_ops/cuda/bert/kv_cache_quant/plan.h"

namespace onnxruntime {
namespace contrib {
namespace kv_cache_quant {

// LaunchDecode for one format. Instantiated in inst/, a file per format, so that they compile side by side.
template <KvFormat kFormat>
cudaError_t LaunchDecodeFormat(const GqaParams& p, const GqaPlan& plan, cudaStream_t stream);

}  // namespace kv_cache_quant
}  // namespace contrib
}  // namespace onnxruntime
