// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
//
// NaN codes of V in the decode kernel: the one value that a weight of 0 does not cancel.

#pragma once

#include <cmath>
#include <cstdint>

#include <cuda_runtime.h>

namespace onnxruntime {
namespace contrib {
namespace kv_cache_quant {

// NaN into the sums of the elements of word w marked in `nan`, for the rows that attend the token.
template <typename Warp>
__device__ __forceinline__ void SpoilSums(Warp& warp, int token, int w, uint32_t nan) {
#pragma unroll
  for (int n = 0; n < Warp::kRowTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      int low, high;
      warp.Attended(n, e, &low, &high);
      if (token < low || token >= high) continue;
#pragma unroll
      for (int d = 0; d < Warp::Shape::kElements; ++d) {
        float& sum = warp.out[n][(w * Warp::Shape::kElements + d) / 2][d % 2 * 2 + e];
        if ((nan >> (Warp::FormatCodec::kBits * d) & 1) != 0) sum = NAN;
      }
    }
  }
}

// For 16 tokens from `tile` on of a masked tile of fp8 codes, where 0 * NaN would reach rows that do not attend the
// token: NaN codes of V become 0, and the sums of the rows that do attend them become NaN.
template <typename Warp>
__device__ __forceinline__ void TakeOutNanCodes(Warp& warp, int tile, uint32_t (&words)[4][Warp::Shape::kValueWords]) {
  uint32_t found = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int w = 0; w < Warp::Shape::kValueWords; ++w) found |= warp.kv.NanBytes(words[i][w]);
  }
  if (!__any_sync(Warp::kAllLanes, found != 0)) return;
  // The codes of an element lie in the lanes of one r, its sums for different rows too: every c shows the others its
  // codes.
#pragma unroll 1
  for (int source = 0; source < 4; ++source) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = tile + i / 2 * 8 + 2 * source + i % 2;
#pragma unroll
      for (int w = 0; w < Warp::Shape::kValueWords; ++w) {
        const uint32_t code = __shfl_sync(Warp::kAllLanes, words[i][w], 4 * warp.r + source);
        const uint32_t nan = warp.kv.NanBytes(code);
        if (nan != 0) SpoilSums(warp, token, w, nan);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int w = 0; w < Warp::Shape::kValueWords; ++w) words[i][w] &= ~warp.kv.NanBytes(words[i][w]);
  }
}

}  // namespace kv_cache_quant
}  // namespace contrib
}  // namespace onnxruntime
