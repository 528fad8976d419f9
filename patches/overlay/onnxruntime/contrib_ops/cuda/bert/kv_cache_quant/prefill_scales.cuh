// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
//
// PER_TOKEN scales on their way to a tile of the prefill kernel.

#pragma once

#include "contrib_ops/cuda/bert/kv_cache_quant/prefill_warp.cuh"

namespace onnxruntime {
namespace contrib {
namespace kv_cache_quant {

// The scales of the next tile, on their way from memory to shared memory: K's by warp 0, V's by warp 1, tokens lane,
// lane + 32, ... in each lane.
template <int kTokens>
struct ScaleCopy {
  static constexpr int kLaneScales = kTokens / 32;
  float scales[kLaneScales];

  // row: of the tile's first token in the scale cache. 0, which does not count as a scale, from count on; 1 without
  // scales per token.
  __device__ __forceinline__ void Load(const GqaParams& p, int64_t row, int count) {
    const int thread = ReadThread();
    const int warp = thread / 32;
    const int lane = thread % 32;
    if (warp >= 2) return;
    const KvSide& side = warp == 0 ? p.k : p.v;
    const bool per_token = side.mode == KvScaleMode::kPerToken;
#pragma unroll
    for (int i = 0; i < kLaneScales; ++i) {
      scales[i] = 1.0f;
      if (per_token) scales[i] = lane + 32 * i < count ? LoadTokenScale(side, row + lane + 32 * i) : 0.0f;
    }
  }

  // low: first token of the tile that a row of the block attends. V scales before it count for nothing: they must not
  // set the range of the others. exponent: V's so far.
  __device__ __forceinline__ void Store(const GqaParams& p, int low, int exponent, TileScales<kTokens>* to) const {
    const int thread = ReadThread();
    const int warp = thread / 32;
    const int lane = thread % 32;
    if (warp == 0) {
#pragma unroll
      for (int i = 0; i < kLaneScales; ++i) {
        // The product of a row of zero codes is zero but for rounding: Inf times it would be any infinity or NaN.
        to->k[lane + 32 * i] = fmaf(scales[i], 0.0f, scales[i]);
      }
    } else if (warp == 1) {
      const int chosen = p.v.mode == KvScaleMode::kPerToken ? ChooseExponent(lane, low, exponent) : exponent;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const bool counts = i < kLaneScales && lane + 32 * i >= low;
        const bool finite = !counts || fabsf(scales[i % kLaneScales]) < INFINITY;
        const uint32_t bad = __ballot_sync(0xFFFFFFFFu, !finite);
        if (lane == 0) to->v_bad[i] = bad;
        if (i < kLaneScales) to->v[lane + 32 * i] = counts && finite ? scales[i] * PowerOfTwo(-chosen) : 0.0f;
      }
      if (lane == 0) {
        to->v_exponent = chosen;
        to->shrink = PowerOfTwo(exponent) * PowerOfTwo(-chosen);
      }
    }
  }

  // Another exponent where a scale is too large for it. Scales that are not finite do not count.
  __device__ __forceinline__ int ChooseExponent(int lane, int low, int exponent) const {
    float top = 0.0f;
#pragma unroll
    for (int i = 0; i < kLaneScales; ++i) {
      const float size = fabsf(scales[i]);
      if (lane + 32 * i >= low && size < INFINITY) top = fmaxf(top, size);
    }
    if (!__any_sync(0xFFFFFFFFu, top * PowerOfTwo(-exponent) > kScaleLimit)) return exponent;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFu, top, step));
    return max((__float_as_int(top) >> 23) - 127 - kScaleTarget, -126);
  }
};

}  // namespace kv_cache_quant
}  // namespace contrib
}  // namespace onnxruntime
