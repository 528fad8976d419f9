// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
//
// One query row per warp, scaled so that half holds it whatever the activation type is.

#pragma once

#include "contrib_ops/cuda/bert/kv_cache_quant/query_tile.cuh"
#include "contrib_ops/cuda/bert/kv_cache_quant/unit.cuh"

namespace onnxruntime {
namespace contrib {
namespace kv_cache_quant {

// Row `row` of the s * G + g rows of (b, kv_head), of which there are `rows`, by one warp: calls store(d, x) for every
// d below kHeadSize with the element after rotary, times K's PER_CHANNEL scale, times a power of two that brings the
// largest to [0.5, 1). Returns the factor from a product with K's codes to a score in log2 units: it undoes the power
// of two and has the softmax scale and K's PER_TENSOR scale in it. 0 beyond D and for rows from `rows` on, which are
// not read.
template <int kHeadSize, typename Store>
__device__ __forceinline__ float LoadQueryRow(const GqaParams& p, int64_t b, int kv_head, int row, int rows,
                                              int64_t past, int lane, Store store) {
  constexpr int kPerLane = kHeadSize / 32;
  float x[1][kPerLane];
  float factor[1];
  query_internal::LoadScaledRows<1, kPerLane, false>(p, past, b, kv_head, row, rows, lane, x, factor);
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) store(lane + 32 * i, x[0][i]);
  const float tensor = p.k.mode == KvScaleMode::kPerTensor ? p.k.static_scale[0] : 1.0f;
  return factor[0] * p.scale * kLog2E * tensor;
}

}  // namespace kv_cache_quant
}  // namespace contrib
}  // namespace onnxruntime
