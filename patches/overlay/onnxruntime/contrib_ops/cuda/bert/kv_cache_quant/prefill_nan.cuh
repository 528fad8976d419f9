// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
//
// What is not finite in V, in the prefill kernel: a weight of 0 does not cancel it.

#pragma once

#include <cmath>
#include <cstdint>

#include "contrib_ops/cuda/bert/kv_cache_quant/prefill_shape.cuh"

namespace onnxruntime {
namespace contrib {
namespace kv_cache_quant {

// Scores of tokens whose V scale is not finite become NaN: so does the whole output row, and 0 * NaN cannot arise.
template <typename Warp>
__device__ __forceinline__ void SpoilScores(const uint32_t (&v_bad)[2], int c, typename Warp::Scores& scores) {
#pragma unroll
  for (int j = 0; j < Warp::kScoreTiles; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool bad = (v_bad[8 * j / 32] >> (8 * j % 32 + 2 * c + i % 2) & 1) != 0;
#pragma unroll
      for (int m = 0; m < Warp::kRowTiles; ++m) {
        if (bad) scores[m][j][i] = NAN;
      }
    }
  }
}

// For a tile of V in which Inf or NaN is to be replaced by 0, as 0 * NaN would reach rows that do not attend the
// token: adds such elements to the sums that they belong to, whose weights do not matter.
template <typename Warp>
__device__ __forceinline__ void SpoilSums(Warp& warp, const uint8_t* values, int32_t window, int tile) {
  const LanePlace at;
  typename Warp::Spans span;
  warp.FindSpans(window, tile, at.r, span);
#pragma unroll 1
  for (int token = 0; token < Warp::kTokens; ++token) {
#pragma unroll
    for (int chunk = 0; chunk < Warp::Shape::kRowChunks; ++chunk) {
      const uint32_t word = *reinterpret_cast<const uint32_t*>(values + Warp::Layout::Offset(token, chunk) + 4 * at.c);
      const uint32_t found = Warp::Rows::NonFinite(word);
      if (found == 0) continue;
#pragma unroll
      for (int m = 0; m < Warp::kRowTiles; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          if (!span[m][h].Has(token)) continue;
#pragma unroll
          for (int i = 0; i < 2 * Warp::kColumnTiles; ++i) {
            const int column = chunk * Warp::kColumnTiles + i % Warp::kColumnTiles;
            float& sum = warp.out[m][column][2 * h + i / Warp::kColumnTiles];
            if ((found >> (Warp::Rows::kBits * (i + 1) - 1) & 1) != 0) sum += Warp::Rows::NonFiniteValue(word, i);
          }
        }
      }
    }
  }
}

}  // namespace kv_cache_quant
}  // namespace contrib
}  // namespace onnxruntime
