// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.

#pragma once

#include <cuda_runtime_api.h>

#include "contrib_ops/cuda/bert/kv_cache_quant/plan.h"

namespace onnxruntime {
namespace contrib {
namespace kv_cache_quant {

// What K and V rows are read from: kv_tile.cuh.
template <KvFormat kFormat>
struct CacheRows;
template <ActivationType kType>
struct ExactRows;

// LaunchPrefill for one source of rows. Instantiated in inst/, a file per source, so that they compile side by side.
template <typename Rows>
cudaError_t LaunchPrefillRows(const GqaParams& p, const GqaPlan& plan, cudaStream_t stream);

}  // namespace kv_cache_quant
}  // namespace contrib
}  // namespace onnxruntime
