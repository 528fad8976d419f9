// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
//
// One warp's part of the prefill kernel: 16 query rows against tiles of K and V in shared memory (kv_tile.cuh).
//
// With r = lane / 4 and c = lane % 4, a lane's accumulators are of rows r and r + 8 (index h = 0, 1) and, in each 8
// columns, of columns 2c and 2c + 1: tokens in the scores, head elements in the output. The scores of two neighbouring
// 8-token tiles are at once the operand of the second product.

#pragma once

#include "contrib_ops/cuda/bert/kv_cache_quant/kv_tile.cuh"
#include "contrib_ops/cuda/bert/kv_cache_quant/mma.cuh"
#include "contrib_ops/cuda/bert/kv_cache_quant/query_tile.cuh"
#include "contrib_ops/cuda/bert/kv_cache_quant/unit.cuh"

namespace onnxruntime {
namespace contrib {
namespace kv_cache_quant {

// Tokens [first, first + count) of a tile.
struct TileSpan {
  int first;
  uint32_t count;
  __device__ __forceinline__ bool Has(int token) const { return static_cast<uint32_t>(token - first) < count; }
};

// PER_TOKEN V scales are divided by a power of two, so that half weights keep their precision whatever the scales are:
// one chosen to bring the largest scale to about 2^kScaleTarget, and chosen anew where a later one exceeds kScaleLimit,
// which leaves the weights finite.
constexpr int kScaleTarget = 10;
constexpr float kScaleLimit = 32768.0f;

template <typename Rows, int kHeadSize>
struct PrefillWarp {
  static constexpr int kTokens = kHeadSize == 256 ? 32 : 64;  // of a tile
  static constexpr int kScoreTiles = kTokens / 8;
  static constexpr int kOutTiles = kHeadSize / 8;
  static constexpr int kSteps = kHeadSize / 16;
  static constexpr int kLaneScales = kTokens / 32;
  // What fits in 255 registers without spills: Q, and the next tile of K or V while the product before it runs.
#if __CUDA_ARCH__ >= 800
  static constexpr bool kQueryInRegisters = kHeadSize == 64 || (kHeadSize == 128 && !Rows::kExact);
  static constexpr bool kLoadAhead = true;
#else
  static constexpr bool kQueryInRegisters = kHeadSize == 64;
  static constexpr bool kLoadAhead = kHeadSize <= 128;
#endif
  static constexpr ActivationType kElement = Rows::kBFloat16 ? ActivationType::kBFloat16 : ActivationType::kHalf;
  using Scores = float[kScoreTiles][4];
  using LaneScales = float[kLaneScales];  // of tokens lane, lane + 32 of a tile

  const int lane;
  const int r;
  const int c;
  const uint16_t* const query;  // the warp's 16 tile rows
  uint32_t query_words[kQueryInRegisters ? kSteps : 1][4];
  float factor;  // of row lane % 16, from products to log2 units
  float maximum[2] = {-INFINITY, -INFINITY};
  float denominator[2] = {0.0f, 0.0f};  // of this lane's tokens only
  float out[kOutTiles][4];
  int v_norm_exponent = 0;  // v_norm is a power of two

  __device__ __forceinline__ PrefillWarp(int lane_index, const uint16_t* query_rows, const float* row_factor,
                                         float common_factor, bool v_per_token)
      : lane(lane_index), r(lane_index / 4), c(lane_index % 4), query(query_rows) {
    factor = Rows::kExact ? common_factor : row_factor[lane % 16] * common_factor;
#pragma unroll
    for (int n = 0; n < kOutTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) out[n][i] = 0.0f;
    }
    if (v_per_token) v_norm_exponent = -126;  // below every scale that matters: the first tile chooses
    if constexpr (kQueryInRegisters) {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) LoadQueryStep(k, query_words[k]);
    }
  }

  // Where this lane reads for a matrix load of rows [row, row + 16), chunks `even` and even + 1: row row + lane % 16,
  // chunk even + lane / 16. Of an even chunk known at compile time only two bits meet the lane's in the swizzle, so
  // four offsets in registers serve all rows and chunks of Q, K and V.
  __device__ __forceinline__ const uint16_t* MatrixRow(const uint16_t* tile, int row, int even) const {
    const int offset = (lane & 15) * kHeadSize + ((even & 7) ^ (lane >> 4) ^ (lane & 7)) * 8;
    return tile + offset + row * kHeadSize + (even & ~7) * 8;
  }

  // A value of row r + 8h from the lanes that have it of row lane % 16.
  template <typename T>
  __device__ __forceinline__ T OfRow(T x, int h) const {
    return __shfl_sync(0xFFFFFFFFu, x, r + 8 * h);
  }

  // Operand A of elements [16k, 16k + 16).
  __device__ __forceinline__ void LoadQueryStep(int k, uint32_t (&a)[4]) const {
    LoadMatrices(a, MatrixRow(query, 0, 2 * k));
  }

  static __device__ __forceinline__ void Multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
    if constexpr (Rows::kBFloat16) {
      MmaBFloat16(d, a, b0, b1);
      return;
    }
#endif
    MmaHalf(d, a, b0, b1);
  }

  static __device__ __forceinline__ uint32_t Pack(float x, float y) {
    return Rows::kBFloat16 ? PackBFloat16(x, y) : PackHalf(x, y);
  }

  // scores = Q K^T.
  __device__ __forceinline__ void Score(const uint16_t* keys, Scores& scores) const {
#pragma unroll
    for (int j = 0; j < kScoreTiles; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[j][i] = 0.0f;
    }
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      uint32_t a[4];
      if constexpr (kQueryInRegisters) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = query_words[k][i];
      } else {
        LoadQueryStep(k, a);
      }
#pragma unroll
      for (int j = 0; j < kScoreTiles; j += 2) {
        uint32_t b[4];
        LoadMatrices(b, MatrixRow(keys, 8 * j, 2 * k));
        Multiply(scores[j], a, b[0], b[2]);
        Multiply(scores[j + 1], a, b[1], b[3]);
      }
    }
  }

  // The scale of this lane's column 2c + e of 8-token tile j.
  __device__ __forceinline__ float ScaleOf(const LaneScales& scales, int j, int e) const {
    return __shfl_sync(0xFFFFFFFFu, scales[8 * j / 32], 8 * j % 32 + 2 * c + e);
  }

  // Products of K's codes times its PER_TOKEN scales.
  __device__ __forceinline__ void ScaleScores(const LaneScales& k_scales, Scores& scores) const {
#pragma unroll
    for (int j = 0; j < kScoreTiles; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float scale = ScaleOf(k_scales, j, e);
        scores[j][e] *= scale;
        scores[j][2 + e] *= scale;
      }
    }
  }

  // Products become scores in log2 units.
  __device__ __forceinline__ void FinishScores(float softcap, Scores& scores) const {
    const float by[2] = {OfRow(factor, 0), OfRow(factor, 1)};
#pragma unroll
    for (int j = 0; j < kScoreTiles; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[j][i] *= by[i / 2];
    }
    if (softcap > 0.0f) {
      // SoftcapLog2 with one division for all: its slow path is a call, which costs registers everywhere around it.
      const float cap = softcap * kLog2E;
      const float inverse = __fdividef(1.0f, cap);
#pragma unroll
      for (int j = 0; j < kScoreTiles; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[j][i] = cap * tanhf(scores[j][i] * inverse);
      }
    }
  }

  // Scores of tokens outside a row's span become -inf, whatever they were.
  __device__ __forceinline__ void MaskScores(const TileSpan (&span)[2], Scores& scores) const {
#pragma unroll
    for (int j = 0; j < kScoreTiles; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (!span[i / 2].Has(8 * j + 2 * c + i % 2)) scores[j][i] = -INFINITY;
      }
    }
  }

  // Scores become 2^(score - maximum) and are added to the denominators. shrink: what the rows' accumulators are to be
  // multiplied by. A row that has only -inf so far keeps it as its maximum and weighs its tokens 0 (or NaN).
  __device__ __forceinline__ void Exponentiate(Scores& scores, float (&shrink)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float top = maximum[h];
#pragma unroll
      for (int j = 0; j < kScoreTiles; ++j) top = fmaxf(top, fmaxf(scores[j][2 * h], scores[j][2 * h + 1]));
      top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFu, top, 1));
      top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFu, top, 2));
      const float reference = top == -INFINITY ? 0.0f : top;
      shrink[h] = Exp2(maximum[h] - reference);
      maximum[h] = top;
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < kScoreTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          scores[j][2 * h + e] = Exp2(scores[j][2 * h + e] - reference);
          sum += scores[j][2 * h + e];
        }
      }
      denominator[h] = denominator[h] * shrink[h] + sum;
    }
  }

  // Divides the tile's V scales by v_norm, after choosing it anew where one is too large for it. Scales that are not
  // finite do not count. Returns what the accumulators are to be multiplied by.
  __device__ __forceinline__ float NormalizeValueScales(LaneScales& v_scales) {
    float top = 0.0f;
#pragma unroll
    for (int i = 0; i < kLaneScales; ++i) {
      const float size = fabsf(v_scales[i]);
      if (size < INFINITY) top = fmaxf(top, size);
    }
    float shrink = 1.0f;
    if (__any_sync(0xFFFFFFFFu, top * PowerOfTwo(-v_norm_exponent) > kScaleLimit)) {
#pragma unroll
      for (int step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFu, top, step));
      const int exponent = max((__float_as_int(top) >> 23) - 127 - kScaleTarget, -126);
      shrink = PowerOfTwo(v_norm_exponent) * PowerOfTwo(-exponent);
      v_norm_exponent = exponent;
    }
#pragma unroll
    for (int i = 0; i < kLaneScales; ++i) v_scales[i] *= PowerOfTwo(-v_norm_exponent);
    return shrink;
  }

  // Weights times V's PER_TOKEN scales; with kMasked 0 outside the spans, whatever the scale is.
  template <bool kMasked>
  __device__ __forceinline__ void ScaleWeights(const LaneScales& v_scales, const TileSpan (&span)[2],
                                               Scores& weights) const {
#pragma unroll
    for (int j = 0; j < kScoreTiles; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float scale = ScaleOf(v_scales, j, e);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const bool attended = !kMasked || span[h].Has(8 * j + 2 * c + e);
          weights[j][2 * h + e] = attended ? weights[j][2 * h + e] * scale : 0.0f;
        }
      }
    }
  }

  __device__ __forceinline__ void Shrink(const float (&by)[2]) {
    // The maxima settle early in a sequence.
    if (!__any_sync(0xFFFFFFFFu, by[0] != 1.0f || by[1] != 1.0f)) return;
#pragma unroll
    for (int n = 0; n < kOutTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) out[n][i] *= by[i / 2];
    }
  }

  // out += weights * V.
  __device__ __forceinline__ void Mix(const uint16_t* values, const Scores& weights) {
    constexpr int kMixSteps = kTokens / 16;
    uint32_t a[kMixSteps][4];
#pragma unroll
    for (int k = 0; k < kMixSteps; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        a[k][i] = Pack(weights[2 * k + i / 2][i % 2 * 2], weights[2 * k + i / 2][i % 2 * 2 + 1]);
      }
    }
    if constexpr (kLoadAhead) {
#pragma unroll
      for (int k = 0; k < kMixSteps; ++k) MixStep(values + 16 * k * kHeadSize, a[k]);
    } else {
#pragma unroll 1
      for (int k = 0; k < kMixSteps; ++k) {
        MixStep(values + 16 * k * kHeadSize, a[0]);
#pragma unroll
        for (int i = 0; i < 4 * (kMixSteps - 1); ++i) a[i / 4][i % 4] = a[i / 4 + 1][i % 4];
      }
    }
  }

  // Operand A of 16 tokens, whose rows of V begin at `rows`.
  __device__ __forceinline__ void MixStep(const uint16_t* rows, const uint32_t (&a)[4]) {
#pragma unroll
    for (int n = 0; n < kOutTiles; n += 2) {
      uint32_t b[4];
      LoadMatricesTransposed(b, MatrixRow(rows, 0, n));
      Multiply(out[n], a, b[0], b[1]);
      Multiply(out[n + 1], a, b[2], b[3]);
    }
  }

  // The same where V has Inf or NaN and not every row attends every token: adds attended tokens only, one by one.
  // scratch: shared, 16 x kTokens, this warp's own.
  __device__ __forceinline__ void MixAttended(const uint16_t* values, const Scores& weights, const TileSpan (&span)[2],
                                              uint16_t* scratch) {
#pragma unroll
    for (int j = 0; j < kScoreTiles; ++j) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        *reinterpret_cast<uint32_t*>(scratch + (r + 8 * h) * kTokens + 8 * j + 2 * c) =
            Pack(weights[j][2 * h], weights[j][2 * h + 1]);
      }
    }
    __syncwarp();
#pragma unroll 1
    for (int token = 0; token < kTokens; ++token) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (!span[h].Has(token)) continue;
        const float weight = ActivationFromBits(scratch[(r + 8 * h) * kTokens + token], kElement);
#pragma unroll
        for (int n = 0; n < kOutTiles; ++n) {
          const uint16_t* pair = values + ChunkIndex<kHeadSize>(token, n) + 2 * c;
          out[n][2 * h] += weight * ActivationFromBits(pair[0], kElement);
          out[n][2 * h + 1] += weight * ActivationFromBits(pair[1], kElement);
        }
      }
    }
  }

  // From a tile's scaled products to weights, and the accumulators rescaled for them. Without masked, every row attends
  // every token.
  __device__ __forceinline__ void Weigh(float softcap, bool v_per_token, bool masked, const TileSpan (&span)[2],
                                        LaneScales& v_scales, Scores& scores) {
    FinishScores(softcap, scores);
    if (masked) MaskScores(span, scores);
    float shrink[2];
    Exponentiate(scores, shrink);
    if (v_per_token) {
      const float renormalize = NormalizeValueScales(v_scales);
      shrink[0] *= renormalize;
      shrink[1] *= renormalize;
      if (masked) {
        ScaleWeights<true>(v_scales, span, scores);
      } else {
        ScaleWeights<false>(v_scales, span, scores);
      }
    }
    Shrink(shrink);
  }

  // Completes the denominators.
  __device__ __forceinline__ void Finish() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      denominator[h] += __shfl_xor_sync(0xFFFFFFFFu, denominator[h], 1);
      denominator[h] += __shfl_xor_sync(0xFFFFFFFFu, denominator[h], 2);
    }
  }

  // Head element of out[n][2h + e] in the lanes with lane % 4 == column.
  static __device__ __forceinline__ int Element(int n, int column, int e) {
    return 8 * n + (Rows::kInterleaved ? column + 4 * e : 2 * column + e);
  }
};

}  // namespace kv_cache_quant
}  // namespace contrib
}  // namespace onnxruntime
