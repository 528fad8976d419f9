// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
//
// Attention of up to 16 query rows (S x G) of one KV head over the quantized cache.
//
// grid    units * splits blocks in x; unit = b * Hkv + h. A block owns one split of one unit's tokens, the new rows of
//         the cache among them, and of the unit's output: in a cluster, which is a unit, a slice; else all of it where
//         it is the last one of its unit to begin. With 16 rows half is left to the first one that is through.
// block   8 or 16 warps, 4 or 8 for D 256. They take turns at tiles of 16 tokens (32 of int4 and with 16 rows), each
//         for all query rows; their results are added at the end.
// shared  dynamic, DecodeShared: query rows as operands or what the cluster sends; the warps' statistics; their tiles
//         of V, then their accumulators: 91 KB at most, and 58 KB in blocks for chips before sm_80.
// align   cache rows: 16 bytes with kWholeRows, else 8 (8-bit codes) or 4 bytes (int4).
//
// Both products are transposed, so that tokens and head elements fill the 16 rows of the matrix instruction and query
// rows its 8 columns: scores^T (tokens x rows) = K Q^T, out^T (elements x rows) = V^T P^T. With r = lane / 4 and
// c = lane % 4, a lane converts for K the tokens r and r + 8 of a tile, the quarter c of each row; for V the tokens
// 2c, 2c + 1, 2c + 8, 2c + 9, the eighth r of each row. The order along D inside a quarter is whatever conversion is
// cheapest in; Q is laid out once to match. So a byte is loaded straight into the register that converts it.

#pragma once

#include "contrib_ops/cuda/bert/kv_cache_quant/decode_nan.cuh"
#include "contrib_ops/cuda/bert/kv_cache_quant/decode_norm.cuh"
#include "contrib_ops/cuda/bert/kv_cache_quant/decode_tile.cuh"
#include "contrib_ops/cuda/bert/kv_cache_quant/mma.cuh"
#include "contrib_ops/cuda/bert/kv_cache_quant/unit.cuh"

namespace onnxruntime {
namespace contrib {
namespace kv_cache_quant {

// Inf * 0 is NaN.
__device__ __forceinline__ float InfinityToNan(float x) { return fmaf(x, 0.0f, x); }

// One warp's part of the attention of a unit.
template <typename WarpShape>
struct DecodeWarp {
  using Shape = WarpShape;
  using FormatCodec = Codec<Shape::kFormat>;
  static constexpr int kTokenTiles = Shape::kTokenTiles;
  static constexpr int kRowTiles = Shape::kRowTiles;
  static constexpr unsigned kAllLanes = 0xFFFFFFFFu;
  using Tile = float[kTokenTiles][kRowTiles][4];  // tokens r (0, 1) and r + 8 (2, 3), query rows 2c and 2c + 1

  using Tiles = DecodeTile<Shape>;
  static constexpr int kStep = Shape::kWarps * Shape::kTileTokens;

  const GqaParams& p;
  const int r;         // lane / 4
  const int c;         // lane % 4
  const uint4* query;  // shared, QueryRows::words
  Tiles kv;

  // Of query rows 8 * tile + 2c + e. A score in log2 units is (product * factor - bias) * K's token scale.
  float factor[kRowTiles][2];
  float bias[kRowTiles][2];
  float maximum[kRowTiles][2];      // that the weights refer to; -inf before the first attended token
  float denominator[kRowTiles][2];  // this lane's tokens only
  float out[kRowTiles][Shape::kElementTiles][4];
  float v_norm;        // V scales are divided by it: half weights keep their precision whatever the scales are
  bool started;        // a tile has been added
  int first_position;  // of query row 0, counted as tokens are; negative where the split begins later

  __device__ __forceinline__ DecodeWarp(const GqaParams& params, int lane, int64_t first_row, int tokens,
                                        int old_tokens, const uint4* shared_query, const void* value_tiles)
      : p(params),
        r(lane / 4),
        c(lane % 4),
        query(shared_query),
        kv(params, lane, first_row, tokens, old_tokens, value_tiles),
        v_norm(0.0f),
        started(false) {
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

  // row_factor, row_sum: of each query row, what LoadQueryRow returned and the sum of what it stored.
  __device__ __forceinline__ void SetRows(const float* row_factor, const float* row_sum, int64_t first) {
    first_position = static_cast<int>(max(first, static_cast<int64_t>(-Shape::kRows)));
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int row = 8 * n + 2 * c + e;
        factor[n][e] = row_factor[row];
        // A bias of 0 is none, whatever it is multiplied by.
        bias[n][e] = FormatCodec::kKeyBias == 0.0f ? 0.0f : FormatCodec::kKeyBias * row_factor[row] * row_sum[row];
      }
    }
  }

  // Tokens [low, high) are attended by query row 8 * n + 2c + e. Rows beyond the last one are like it; they are not
  // written.
  __device__ __forceinline__ void Attended(int n, int e, int* low, int* high) const {
    const int s = min((8 * n + 2 * c + e) / p.group_size, p.sequence_length - 1);
    *high = min(first_position + s + 1, kv.count);
    *low = p.local_window_size < 0 ? 0 : first_position + s - p.local_window_size;
  }

  // Whether a token of the tile is not attended by every row.
  __device__ __forceinline__ bool IsMasked(int tile) const {
    const int low = p.local_window_size < 0 ? 0 : first_position + p.sequence_length - 1 - p.local_window_size;
    return tile < low || tile + Shape::kTileTokens > min(first_position + 1, kv.count);
  }

  // Two sums for every score, of even and odd steps: half the latency of a chain of products.
  __device__ __forceinline__ void Score(Tile& scores) const {
    constexpr int kWords = Shape::kElementTiles * 2;  // of a query row, in a lane
    Tile odd;
#pragma unroll
    for (int m = 0; m < kTokenTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
        for (int j = 0; j < 4; ++j) scores[m][n][j] = odd[m][n][j] = 0.0f;
      }
    }
#pragma unroll
    for (int first = 0; first < kWords; first += 4) {
      uint4 q[kRowTiles];
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n) q[n] = query[(n * (kWords / 4) + first / 4) * 32 + 4 * r + c];
#pragma unroll
      for (int m = 0; m < kTokenTiles; ++m) {
        uint32_t upper[4];
        uint32_t lower[4];
        ExpandFour(kv.key_words[m][0], first, upper);
        ExpandFour(kv.key_words[m][1], first, lower);
        const uint32_t even_step[4] = {upper[0], lower[0], upper[1], lower[1]};
        const uint32_t odd_step[4] = {upper[2], lower[2], upper[3], lower[3]};
#pragma unroll
        for (int n = 0; n < kRowTiles; ++n) {
          MmaHalf(scores[m][n], even_step, q[n].x, q[n].y);
          MmaHalf(odd[m][n], odd_step, q[n].z, q[n].w);
        }
      }
    }
#pragma unroll
    for (int m = 0; m < kTokenTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
        for (int j = 0; j < 4; ++j) scores[m][n][j] += odd[m][n][j];
      }
    }
  }

  // Expanded words [first, first + 4) of a lane's part of a row of K: of one word of int4, of two of the others.
  static __device__ __forceinline__ void ExpandFour(const uint32_t (&words)[Shape::kKeyWords], int first,
                                                    uint32_t (&out)[4]) {
    if constexpr (Shape::kElements == 8) {
      FormatCodec::ExpandKey(words[first / 4], out);
    } else {
      uint32_t half[2];
      FormatCodec::ExpandKey(words[first / 2], half);
      out[0] = half[0];
      out[1] = half[1];
      FormatCodec::ExpandKey(words[first / 2 + 1], half);
      out[2] = half[0];
      out[3] = half[1];
    }
  }
  // From products to log2 units relative to the running maximum. Masked scores become -inf, whatever they were.
  __device__ __forceinline__ void FinishScores(Tile& scores, int tile, bool masked) const {
    float scale[kTokenTiles][2];
    kv.ReadScales(p.k, kv.k_scale, scale);
    // The product of a row of zero codes is zero but for rounding: Inf times it would be any infinity or NaN.
#pragma unroll
    for (int i = 0; i < 2 * kTokenTiles; ++i) scale[i / 2][i % 2] = InfinityToNan(scale[i / 2][i % 2]);
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float reference = maximum[n][e] == -INFINITY ? 0.0f : maximum[n][e];
#pragma unroll
        for (int m = 0; m < kTokenTiles; ++m) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float& s = scores[m][n][2 * i + e];
            s = fmaf(s, factor[n][e], -bias[n][e]);
            s = p.softcap > 0.0f ? SoftcapLog2(s * scale[m][i], p.softcap, __fdividef(2.0f, p.softcap)) - reference
                                 : fmaf(s, scale[m][i], -reference);
          }
        }
      }
    }
    if (!masked) return;
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        int low, high;
        Attended(n, e, &low, &high);
#pragma unroll
        for (int m = 0; m < kTokenTiles; ++m) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int token = tile + 16 * m + 8 * i + r;
            if (token < low || token >= high) scores[m][n][2 * i + e] = -INFINITY;
          }
        }
      }
    }
  }

  // Raises the running maxima where a score exceeds them by more than the slack, and has scores refer to the new ones.
  __device__ __forceinline__ void RaiseMaximum(Tile& scores) {
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
        exceeded = exceeded || top[n][e] > (maximum[n][e] == -INFINITY ? -INFINITY : kMaximumSlack);
      }
    }
    if (!__any_sync(kAllLanes, exceeded)) return;
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float step = top[n][e];
#pragma unroll
        for (int mask = 4; mask < 32; mask *= 2) step = fmaxf(step, __shfl_xor_sync(kAllLanes, step, mask));
        const bool first = maximum[n][e] == -INFINITY;
        if (!first) step = fmaxf(step, 0.0f);
        if (step == -INFINITY) continue;  // no token of the row yet
        maximum[n][e] = first ? step : maximum[n][e] + step;
        if (started) {  // the same in all lanes; else the sums are still zero
          const float shrink = first ? 0.0f : Exp2(-step);
          denominator[n][e] *= shrink;
#pragma unroll
          for (int i = 0; i < Shape::kElementTiles; ++i) {
            out[n][i][e] *= shrink;
            out[n][i][2 + e] *= shrink;
          }
        }
#pragma unroll
        for (int m = 0; m < kTokenTiles; ++m) {
          scores[m][n][e] -= step;
          scores[m][n][2 + e] -= step;
        }
      }
    }
  }

  // Scores become weights: 2^score times the V scale. A masked token's weight is 0 whatever its scale is.
  __device__ __forceinline__ void Weigh(Tile& scores, bool masked) {
    float scale[kTokenTiles][2];
    kv.ReadScales(p.v, kv.v_scale, scale);
    if (kv.v_per_token) NormalizeValueScales(*this, scale);
#pragma unroll
    for (int m = 0; m < kTokenTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const bool dropped = masked && scores[m][n][j] == -INFINITY;
          const float weight = Exp2(scores[m][n][j]);
          denominator[n][j % 2] += weight;
          scores[m][n][j] = dropped ? 0.0f : weight * scale[m][j / 2];
        }
      }
    }
  }

  // Adds weights times V.
  __device__ __forceinline__ void Mix(const Tile& weights, int tile, bool masked) {
#pragma unroll
    for (int m = 0; m < kTokenTiles; ++m) {
      uint32_t words[4][Shape::kValueWords];
      kv.ReadValue(tile, m, words);
      if constexpr (Shape::kFormat == KvFormat::kFloat8E4M3FN) {
        if (masked) TakeOutNanCodes(*this, tile + 16 * m, words);
      }
      uint32_t b[kRowTiles][2];
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n) {
        b[n][0] = TransposeMatrix(PackHalf(weights[m][n][0], weights[m][n][1]));
        b[n][1] = TransposeMatrix(PackHalf(weights[m][n][2], weights[m][n][3]));
      }
#pragma unroll
      for (int w = 0; w < Shape::kValueWords; ++w) {
        uint32_t near[Shape::kElements];
        uint32_t far[Shape::kElements];
        FormatCodec::ExpandPair(words[0][w], words[1][w], near);
        FormatCodec::ExpandPair(words[2][w], words[3][w], far);
#pragma unroll
        for (int d = 0; d < Shape::kElements; d += 2) {
          const uint32_t a[4] = {near[d], near[d + 1], far[d], far[d + 1]};
#pragma unroll
          for (int n = 0; n < kRowTiles; ++n) {
            MmaHalf(out[n][(w * Shape::kElements + d) / 2], a, b[n][0], b[n][1]);
          }
        }
      }
    }
  }

  // Head element of the i-th element of the part of V of the lanes 4 * lane_row + c.
  static __device__ __forceinline__ int ElementOf(int i, int lane_row) {
    return Shape::Element(Shape::ValueOffset(i / Shape::kElements, lane_row)) + i % Shape::kElements;
  }

  // Starts the loads of the first tile that is this warp's: before the new rows are there if it has none, or after.
  template <bool kWholeTile>
  __device__ __forceinline__ void Begin(int tile) {
    if (tile >= kv.count || kv.IsWhole(tile) != kWholeTile) return;
    kv.template LoadKeyRows<kWholeTile>(tile);
    if (kv.v_per_token) kv.template LoadScales<kWholeTile>(p.v, tile, kv.v_scale);
    kv.template LoadValueRows<kWholeTile>(tile);
  }

  // All tiles from `tile` on that are this warp's.
  __device__ __forceinline__ void Run(int tile) {
    for (; tile < kv.count; tile += kStep) {
      Tile scores;
      Score(scores);
      const bool masked = IsMasked(tile);
      FinishScores(scores, tile, masked);
      const bool more = tile + kStep < kv.count;
      if (more) kv.LoadKey(tile + kStep);
      if (Shape::kValueInShared) {  // a group of copies for every tile, be it empty
        if (more) {
          kv.LoadValue(tile + kStep);
        } else {
          GroupCopies();
        }
      }
      RaiseMaximum(scores);
      Weigh(scores, masked);
      if (Shape::kValueInShared) {
        if (more) kv.LoadValueScales(tile + kStep);
        WaitForGroups<1>();  // of this tile
      }
      Mix(scores, tile, masked);
      if (!Shape::kValueInShared && more) {
        kv.LoadValue(tile + kStep);
        kv.LoadValueScales(tile + kStep);
      }
      started = true;
    }
    if (!kv.v_per_token) v_norm = 1.0f;
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
#pragma unroll
        for (int mask = 4; mask < 32; mask *= 2) {
          denominator[n][e] += __shfl_xor_sync(kAllLanes, denominator[n][e], mask);
        }
      }
    }
  }
};

}  // namespace kv_cache_quant
}  // namespace contrib
}  // namespace onnxruntime
