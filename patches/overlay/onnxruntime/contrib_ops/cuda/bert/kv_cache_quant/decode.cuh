// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
//
// Attention of up to 16 query rows (S x G) of one KV head over the quantized cache.
//
// grid    units * splits blocks in x; unit = b * Hkv + h. A block owns one split of one unit's tokens.
// block   4 warps. A warp owns every fourth tile of 16 or 32 tokens of the split and all query rows; the warps'
//         results are added at the end.
// shared  query rows as half, then the warps' accumulators: 32 KB at most.
// align   cache rows: 16 bytes with kWholeRows, else 8 (8-bit codes) or 4 bytes (int4).
//
// Both products are transposed, so that tokens and head elements fill the 16 rows of the matrix instruction and query
// rows its 8 columns: scores^T (tokens x rows) = K Q^T, out^T (elements x rows) = V^T P^T. With r = lane / 4 and
// c = lane % 4, a lane converts for K the tokens r and r + 8 of a tile, the quarter c of each row; for V the tokens
// 2c, 2c + 1, 2c + 8, 2c + 9, the eighth r of each row. The order along D inside a quarter is whatever conversion is
// cheapest in; Q is laid out once to match. So a byte is loaded straight into the register that converts it.

#pragma once

#include "contrib_ops/cuda/bert/kv_cache_quant/cache_row.cuh"
#include "contrib_ops/cuda/bert/kv_cache_quant/codec.cuh"
#include "contrib_ops/cuda/bert/kv_cache_quant/mma.cuh"
#include "contrib_ops/cuda/bert/kv_cache_quant/query.cuh"
#include "contrib_ops/cuda/bert/kv_cache_quant/unit.cuh"

namespace onnxruntime {
namespace contrib {
namespace kv_cache_quant {

constexpr int kDecodeWarps = 4;
constexpr int kDecodeSplitTile = 64;  // tokens; a split is a multiple of it

// Scores may exceed the running maximum by this (log2 units) before it is raised, and a V scale the running
// normalizer by this factor: fewer rescalings, and weights stay below 2^12 in half.
constexpr float kMaximumSlack = 8.0f;
constexpr float kScaleSlack = 16.0f;
constexpr float kSmallestNorm = 1e-37f;  // its inverse is finite

template <KvFormat kFormat, int kHeadSize, bool kWholeRows, int kRowTiles>
struct DecodeShape {
  using FormatCodec = Codec<kFormat>;
  static constexpr int kRows = 8 * kRowTiles;
  static constexpr int kTokenTiles = kHeadSize <= 128 && kRowTiles == 1 ? 2 : 1;
  static constexpr int kTileTokens = 16 * kTokenTiles;
  static constexpr int kElements = FormatCodec::kElements;
  static constexpr int kKeyWords = kHeadSize / kElements / 4;    // of one row, per lane
  static constexpr int kValueWords = kHeadSize / kElements / 8;  // of one row, per lane
  static constexpr int kKeyVector = kKeyWords < 4 ? kKeyWords : 4;
  static constexpr int kValueVector = kValueWords < 4 ? kValueWords : 4;
  static constexpr int kPieceWords = kFormat == KvFormat::kInt4 ? 1 : 2;
  static constexpr int kElementTiles = kHeadSize / 16;
  static constexpr bool kQueryInRegisters = kHeadSize * kRowTiles <= (kWholeRows ? 256 : 128);
  static constexpr int kQueryStride = kHeadSize + 8;
#if __CUDA_ARCH__ < 890
  static constexpr bool kManyRegisters = kFormat == KvFormat::kFloat8E4M3FN;  // conversion in software
#else
  static constexpr bool kManyRegisters = false;
#endif
  static constexpr int kMinBlocks = kHeadSize <= 128 && kRowTiles == 1 && !kManyRegisters ? 3 : 2;

  // Byte offset in a row of word w of a lane's part.
  static __device__ __forceinline__ int KeyOffset(int w, int c) {
    return (w / kKeyVector * 4 + c) * kKeyVector * 4 + w % kKeyVector * 4;
  }
  static __device__ __forceinline__ int ValueOffset(int w, int r) {
    return (w / kValueVector * 8 + r) * kValueVector * 4 + w % kValueVector * 4;
  }
  // First head element in the word at a byte offset.
  static __device__ __forceinline__ int Element(int offset) { return offset / 4 * kElements; }
};

// Replaces NaN halves of x by 0 and marks them in `nan` by 1.
__device__ __forceinline__ void SplitNan(uint32_t& x, uint32_t& nan) {
  const __half2 h = reinterpret_cast<const __half2&>(x);
  const uint32_t mask = (__hisnan(__low2half(h)) ? 0x0000FFFFu : 0u) | (__hisnan(__high2half(h)) ? 0xFFFF0000u : 0u);
  nan = mask & 0x3C003C00u;
  x &= ~mask;
}

// One warp's part of the attention of a unit.
template <KvFormat kFormat, int kHeadSize, bool kWholeRows, int kRowTiles>
struct DecodeWarp {
  using Shape = DecodeShape<kFormat, kHeadSize, kWholeRows, kRowTiles>;
  using FormatCodec = Codec<kFormat>;
  static constexpr int kTokenTiles = Shape::kTokenTiles;

  const GqaParams& p;
  const int r;             // lane / 4
  const int c;             // lane % 4
  const int64_t base_row;  // cache row of the first token of the split; tokens are counted from it below
  const int count;         // tokens of the split
  const __half* query;     // shared, (kRows, kQueryStride)
  const bool k_per_token;
  const bool v_per_token;

  // Of query rows 8 * tile + 2c + e.
  float factor[kRowTiles][2];  // from accumulated products to log2 units
  int low[kRowTiles][2];       // tokens [low, high) are attended
  int high[kRowTiles][2];
  float maximum[kRowTiles][2];
  float denominator[kRowTiles][2];  // this lane's tokens only
  float out[kRowTiles][Shape::kElementTiles][4];
  float v_norm;   // V scales are divided by it: half weights keep their precision whatever the scales are
  int whole_low;  // every row attends tokens [whole_low, whole_high)
  int whole_high;

  uint32_t query_words[Shape::kQueryInRegisters ? kRowTiles : 1][Shape::kElementTiles][2];
  uint32_t key_words[kTokenTiles][2][Shape::kKeyWords];
  uint32_t value_words[kTokenTiles][4][Shape::kValueWords];
  float k_scale[kTokenTiles][2];
  float v_scale[kTokenTiles][2];

  __device__ __forceinline__ DecodeWarp(const GqaParams& params, int lane, int64_t first_row, int tokens,
                                        const __half* shared_query)
      : p(params),
        r(lane / 4),
        c(lane % 4),
        base_row(first_row),
        count(tokens),
        query(shared_query),
        k_per_token(params.k.mode == KvScaleMode::kPerToken),
        v_per_token(params.v.mode == KvScaleMode::kPerToken),
        v_norm(0.0f) {
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        maximum[n][e] = -INFINITY;
        denominator[n][e] = 0.0f;
      }
#pragma unroll
      for (int i = 0; i < Shape::kElementTiles; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) out[n][i][j] = 0.0f;
      }
    }
  }

  // first: tokens of the split before the position of the first query row (negative where the split begins later).
  // Rows beyond the last one are like it; they are not written.
  __device__ __forceinline__ void SetRows(const float* row_factor, int64_t first, int rows) {
    whole_low = 0;
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int row = 8 * n + 2 * c + e;
        const int64_t position = first + min(row, rows - 1) / p.group_size;
        factor[n][e] = row_factor[row];
        high[n][e] = ClampToken(position + 1);
        low[n][e] = p.local_window_size < 0 ? 0 : ClampToken(position - p.local_window_size);
      }
    }
    const int64_t last = first + (rows - 1) / p.group_size;
    whole_high = ClampToken(first + 1);
    if (p.local_window_size >= 0) whole_low = ClampToken(last - p.local_window_size);
  }

  __device__ __forceinline__ int ClampToken(int64_t token) const {
    return static_cast<int>(token < 0 ? 0 : token > count ? count
                                                          : token);
  }

  // Rows of a tile beyond the split repeat its last token: they are masked, and nothing past it is read.
  __device__ __forceinline__ int64_t CacheRow(int token) const { return base_row + min(token, count - 1); }

  __device__ __forceinline__ void LoadKey(int tile) {
#pragma unroll
    for (int m = 0; m < kTokenTiles; ++m) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int64_t row = CacheRow(tile + 16 * m + 8 * i + r);
        const uint8_t* codes = p.k.codes + row * p.row_bytes;
#pragma unroll
        for (int w = 0; w < Shape::kKeyWords; w += Shape::kKeyVector) {
          LoadRowPart<Shape::kKeyVector, kWholeRows, Shape::kPieceWords>(codes, Shape::KeyOffset(w, c), p.row_bytes,
                                                                         key_words[m][i] + w);
        }
        k_scale[m][i] = k_per_token ? LoadTokenScale(p.k, row) : 1.0f;
      }
    }
  }

  __device__ __forceinline__ void LoadValue(int tile) {
#pragma unroll
    for (int m = 0; m < kTokenTiles; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint8_t* codes = p.v.codes + CacheRow(tile + 16 * m + i / 2 * 8 + 2 * c + i % 2) * p.row_bytes;
#pragma unroll
        for (int w = 0; w < Shape::kValueWords; w += Shape::kValueVector) {
          LoadRowPart<Shape::kValueVector, kWholeRows, Shape::kPieceWords>(codes, Shape::ValueOffset(w, r),
                                                                           p.row_bytes, value_words[m][i] + w);
        }
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        v_scale[m][i] = v_per_token ? LoadTokenScale(p.v, CacheRow(tile + 16 * m + 8 * i + r)) : 1.0f;
      }
    }
  }

  // Operand of query rows 8 * n + r for the i-th half2 of K word w.
  __device__ __forceinline__ uint32_t QueryWord(int n, int w, int i) const {
    const __half* row = query + (8 * n + r) * Shape::kQueryStride + Shape::Element(Shape::KeyOffset(w, c));
    const __half2 pair = __halves2half2(row[FormatCodec::First(i)], row[FormatCodec::Second(i)]);
    return reinterpret_cast<const uint32_t&>(pair);
  }

  __device__ __forceinline__ void LoadQueryWords() {
    if constexpr (Shape::kQueryInRegisters) {
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
        for (int k = 0; k < Shape::kElementTiles; ++k) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            constexpr int kHalves = Shape::kElements / 2;
            query_words[n][k][i] = QueryWord(n, (2 * k + i) / kHalves, (2 * k + i) % kHalves);
          }
        }
      }
    }
  }

  // scores[m][n]: tokens r (0, 1) and r + 8 (2, 3) of token tile m, query rows 2c and 2c + 1 of row tile n.
  __device__ __forceinline__ void Score(float (&scores)[kTokenTiles][kRowTiles][4]) const {
#pragma unroll
    for (int m = 0; m < kTokenTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
        for (int j = 0; j < 4; ++j) scores[m][n][j] = 0.0f;
      }
#pragma unroll
      for (int w = 0; w < Shape::kKeyWords; ++w) {
        constexpr int kHalves = Shape::kElements / 2;
        uint32_t upper[kHalves];
        uint32_t lower[kHalves];
        FormatCodec::ExpandWord(key_words[m][0][w], upper);
        FormatCodec::ExpandWord(key_words[m][1][w], lower);
#pragma unroll
        for (int i = 0; i < kHalves; i += 2) {
          const uint32_t a[4] = {upper[i], lower[i], upper[i + 1], lower[i + 1]};
          const int k = (w * kHalves + i) / 2;
#pragma unroll
          for (int n = 0; n < kRowTiles; ++n) {
            if constexpr (Shape::kQueryInRegisters) {
              MmaHalf(scores[m][n], a, query_words[n][k][0], query_words[n][k][1]);
            } else {
              MmaHalf(scores[m][n], a, QueryWord(n, w, i), QueryWord(n, w, i + 1));
            }
          }
        }
      }
    }
  }

  // From products to log2 units; masked scores become -inf, whatever they were.
  __device__ __forceinline__ void FinishScores(float (&scores)[kTokenTiles][kRowTiles][4], int tile,
                                               bool masked) const {
#pragma unroll
    for (int m = 0; m < kTokenTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float s = scores[m][n][j] * factor[n][j % 2] * k_scale[m][j / 2];
          if (p.softcap > 0.0f) s = SoftcapLog2(s, p.softcap);
          if (masked) {
            const int token = tile + 16 * m + j / 2 * 8 + r;
            if (token < low[n][j % 2] || token >= high[n][j % 2]) s = -INFINITY;
          }
          scores[m][n][j] = s;
        }
      }
    }
  }

  // Raises the running maxima where a score exceeds them by more than the slack.
  __device__ __forceinline__ void UpdateMaximum(const float (&scores)[kTokenTiles][kRowTiles][4]) {
    float top[kRowTiles][2];
    bool exceeded = false;
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        top[n][e] = -INFINITY;
#pragma unroll
        for (int m = 0; m < kTokenTiles; ++m) {
          top[n][e] = fmaxf(top[n][e], fmaxf(scores[m][n][e], scores[m][n][2 + e]));
        }
        exceeded = exceeded || top[n][e] > maximum[n][e] + kMaximumSlack;
      }
    }
    if (!__any_sync(0xFFFFFFFFu, exceeded)) return;
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float x = top[n][e];
#pragma unroll
        for (int mask = 4; mask < 32; mask *= 2) x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, mask));
        const float raised = fmaxf(maximum[n][e], x);
        const float shrink = maximum[n][e] == -INFINITY ? 0.0f : Exp2(maximum[n][e] - raised);
        maximum[n][e] = raised;
        denominator[n][e] *= shrink;
#pragma unroll
        for (int i = 0; i < Shape::kElementTiles; ++i) {
          out[n][i][e] *= shrink;
          out[n][i][2 + e] *= shrink;
        }
      }
    }
  }

  // Raises v_norm where a V scale exceeds it by more than the slack, and divides the tile's scales by it. Scales that
  // are not finite neither count nor change.
  __device__ __forceinline__ void NormalizeValueScales() {
    float top = 0.0f;
#pragma unroll
    for (int m = 0; m < kTokenTiles; ++m) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float size = fabsf(v_scale[m][i]);
        if (size < INFINITY) top = fmaxf(top, size);
      }
    }
    if (__any_sync(0xFFFFFFFFu, top > v_norm * kScaleSlack)) {
#pragma unroll
      for (int mask = 4; mask < 32; mask *= 2) top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFu, top, mask));
      const float raised = fmaxf(fmaxf(v_norm, top), kSmallestNorm);
      const float shrink = v_norm / raised;
      v_norm = raised;
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
        for (int i = 0; i < Shape::kElementTiles; ++i) {
#pragma unroll
          for (int j = 0; j < 4; ++j) out[n][i][j] *= shrink;
        }
      }
    }
    const float inverse = v_norm > 0.0f ? 1.0f / v_norm : 1.0f;
#pragma unroll
    for (int m = 0; m < kTokenTiles; ++m) {
#pragma unroll
      for (int i = 0; i < 2; ++i) v_scale[m][i] *= inverse;
    }
  }

  // Scores become weights: 2^(score - maximum) times the V scale. A masked token's weight is 0 whatever its scale is.
  __device__ __forceinline__ void Weigh(float (&scores)[kTokenTiles][kRowTiles][4]) {
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float reference = maximum[n][e] == -INFINITY ? 0.0f : maximum[n][e];
#pragma unroll
        for (int m = 0; m < kTokenTiles; ++m) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float& x = scores[m][n][2 * i + e];
            const bool masked = x == -INFINITY;
            const float weight = Exp2(x - reference);
            denominator[n][e] += weight;
            x = masked ? 0.0f : weight * v_scale[m][i];
          }
        }
      }
    }
  }

  // Adds weights times V. With kNanCodes, for a masked tile of fp8 codes with NaN among them, 0 * NaN must not reach
  // rows that do not attend the token: the codes count as 0, and a second product, of which rows attend which tokens
  // and which codes are NaN, says where the sum is NaN.
  template <bool kNanCodes>
  __device__ __forceinline__ void Mix(const float (&weights)[kTokenTiles][kRowTiles][4], int tile) {
#pragma unroll
    for (int m = 0; m < kTokenTiles; ++m) {
      uint32_t b[kRowTiles][2];
      uint32_t attends[kRowTiles][2];
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          b[n][i] = TransposeMatrix(PackHalf(weights[m][n][2 * i], weights[m][n][2 * i + 1]));
          if constexpr (kNanCodes) {
            const int token = tile + 16 * m + 8 * i + r;
            attends[n][i] = TransposeMatrix(PackHalf(IsAttended(n, 0, token), IsAttended(n, 1, token)));
          }
        }
      }
#pragma unroll
      for (int w = 0; w < Shape::kValueWords; ++w) {
        uint32_t near[Shape::kElements];
        uint32_t far[Shape::kElements];
        FormatCodec::ExpandPair(value_words[m][0][w], value_words[m][1][w], near);
        FormatCodec::ExpandPair(value_words[m][2][w], value_words[m][3][w], far);
#pragma unroll
        for (int d = 0; d < Shape::kElements; d += 2) {
          uint32_t a[4] = {near[d], near[d + 1], far[d], far[d + 1]};
          uint32_t nan[4];
          if constexpr (kNanCodes) {
#pragma unroll
            for (int i = 0; i < 4; ++i) SplitNan(a[i], nan[i]);
          }
#pragma unroll
          for (int n = 0; n < kRowTiles; ++n) {
            float (&sum)[4] = out[n][(w * Shape::kElements + d) / 2];
            MmaHalf(sum, a, b[n][0], b[n][1]);
            if constexpr (kNanCodes) {
              float count[4] = {0.0f, 0.0f, 0.0f, 0.0f};
              MmaHalf(count, nan, attends[n][0], attends[n][1]);
#pragma unroll
              for (int j = 0; j < 4; ++j) sum[j] = count[j] > 0.0f ? NAN : sum[j];
            }
          }
        }
      }
    }
  }

  __device__ __forceinline__ float IsAttended(int n, int e, int token) const {
    return token >= low[n][e] && token < high[n][e] ? 1.0f : 0.0f;
  }

  // Whether the tile has a NaN code in V, in any lane.
  __device__ __forceinline__ bool HasNanCode() const {
    uint32_t found = 0;
#pragma unroll
    for (int m = 0; m < kTokenTiles; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int w = 0; w < Shape::kValueWords; ++w) {
          found |= __vcmpeq4(value_words[m][i][w] & 0x7F7F7F7Fu, 0x7F7F7F7Fu);
        }
      }
    }
    return __any_sync(0xFFFFFFFFu, found != 0);
  }

  // Head element of the i-th element of a lane's part of V.
  __device__ __forceinline__ int ElementOf(int i) const {
    return Shape::Element(Shape::ValueOffset(i / Shape::kElements, r)) + i % Shape::kElements;
  }

  // All tiles from `tile` on that are this warp's; K and V of the first are in registers.
  __device__ __forceinline__ void Run(int tile) {
    constexpr int kStep = kDecodeWarps * Shape::kTileTokens;
    for (; tile < count; tile += kStep) {
      float scores[kTokenTiles][kRowTiles][4];
      Score(scores);
      const bool masked = tile < whole_low || tile + Shape::kTileTokens > whole_high;
      FinishScores(scores, tile, masked);
      const bool more = tile + kStep < count;
      if (more) LoadKey(tile + kStep);
      UpdateMaximum(scores);
      if (v_per_token) NormalizeValueScales();
      Weigh(scores);
      if (kFormat == KvFormat::kFloat8E4M3FN && masked && HasNanCode()) {
        Mix<kFormat == KvFormat::kFloat8E4M3FN>(scores, tile);
      } else {
        Mix<false>(scores, tile);
      }
      if (more) LoadValue(tile + kStep);
    }
    if (!v_per_token) v_norm = 1.0f;
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
#pragma unroll
        for (int mask = 4; mask < 32; mask *= 2) {
          denominator[n][e] += __shfl_xor_sync(0xFFFFFFFFu, denominator[n][e], mask);
        }
      }
    }
  }
};

}  // namespace kv_cache_quant
}  // namespace contrib
}  // namespace onnxruntime
