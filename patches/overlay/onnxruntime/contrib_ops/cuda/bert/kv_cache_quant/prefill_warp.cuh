// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
//
// One warp's part of the prefill kernel: 32 query rows (16 for D 256) against tiles of K and V in shared memory
// (kv_tile.cuh).
//
// With r = lane / 4 and c = lane % 4, a lane's accumulators are, in each 16 rows, of rows r and r + 8 (index h = 0, 1)
// and, in each 8 columns, of columns 2c and 2c + 1: tokens in the scores, head elements in the output. The scores of
// two neighbouring 8-token tiles are at once the operand of the second product. Every warp converts K and V for itself,
// on the way from shared memory to an operand that serves all of its rows: the instructions that takes run beside the
// products, while a tile of 16-bit elements would double what is read from shared memory.

#pragma once

#include "contrib_ops/cuda/bert/kv_cache_quant/mma.cuh"
#include "contrib_ops/cuda/bert/kv_cache_quant/prefill_nan.cuh"
#include "contrib_ops/cuda/bert/kv_cache_quant/prefill_shape.cuh"
#include "contrib_ops/cuda/bert/kv_cache_quant/query_tile.cuh"
#include "contrib_ops/cuda/bert/kv_cache_quant/unit.cuh"

namespace onnxruntime {
namespace contrib {
namespace kv_cache_quant {

// Scores may exceed the running maximum by this (log2 units) before it is raised: fewer rescalings. PER_TOKEN V scales
// are divided by a power of two, so that half weights keep their precision whatever the scales are: one chosen to bring
// the largest scale to about 2^kScaleTarget, and chosen anew where a later one exceeds kScaleLimit. Weights times
// scales stay below 2^kMaximumRise * kScaleLimit, which half holds.
constexpr float kMaximumRise = 5.0f;
constexpr int kScaleTarget = 6;
constexpr float kScaleLimit = 1024.0f;

template <typename BlockShape>
struct PrefillWarp {
  using Shape = BlockShape;
  using Rows = typename Shape::Rows;
  static constexpr int kHeadSize = Shape::kHeadSize;
  using Layout = TileLayout<Shape::kRowChunks>;
  static constexpr int kRowTiles = Shape::kRowTiles;
  static constexpr int kWarpRows = Shape::kWarpRows;
  static constexpr int kTokens = Shape::kTokens;
  static constexpr int kScoreTiles = kTokens / 8;
  static constexpr int kMixSteps = kTokens / 16;
  static constexpr int kOutTiles = kHeadSize / 8;
  static constexpr int kQuerySteps = kHeadSize / 16;
  static constexpr int kColumnTiles = Rows::kColumnTiles;
  using Scores = float[kRowTiles][kScoreTiles][4];
  using Spans = TileSpan[kRowTiles][2];
  using PerRow = float[kRowTiles][2];
  using Scales = TileScales<Shape::kMostTokens>;

  const uint4* const operands;  // shared: query rows of all warps
  RowState<kRowTiles>* const states;
  float out[kRowTiles][kOutTiles][4];

  __device__ __forceinline__ PrefillWarp(const void* query, RowState<kRowTiles>* row_states)
      : operands(static_cast<const uint4*>(query)), states(row_states) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kOutTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) out[m][n][i] = 0.0f;
      }
    }
  }

  // Index in the warp's query rows, laid out as operands, of element d of row `row`.
  static __device__ __forceinline__ int QueryIndex(int row, int d) {
    const QueryPlace place = Rows::PlaceOf(d);
    const int operand = row / 16 * kQuerySteps + place.step;
    const int word = row / 8 % 2 + 2 * place.upper;
    return ((operand * 32 + row % 8 * 4 + place.column) * 4 + word) * 2 + place.second;
  }

  __device__ __forceinline__ RowState<kRowTiles>& State() const { return states[ReadThread() / 32]; }

  // Values of rows 16m + r + 8h.
  template <typename T>
  static __device__ __forceinline__ void OfRows(const T (&values)[kWarpRows], int r, T (&x)[kRowTiles][2]) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) x[m][h] = values[16 * m + r + 8 * h];
    }
  }

  // Of row lane % kWarpRows.
  __device__ __forceinline__ AttendedTokens OwnTokens() const { return {State().position[ReadThread() % kWarpRows]}; }

  // The tokens of the tile that rows 16m + r + 8h attend.
  __device__ __forceinline__ void FindSpans(int32_t window, int tile, int r, Spans& span) const {
    int position[kRowTiles][2];
    OfRows(State().position, r, position);
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) span[m][h] = AttendedTokens{position[m][h]}.Span(window, tile);
    }
  }

  static __device__ __forceinline__ void Multiply(float (&d)[4], const uint4& a, const uint32_t (&b)[2]) {
    const uint32_t words[4] = {a.x, a.y, a.z, a.w};
#if __CUDA_ARCH__ >= 800
    if constexpr (Rows::kBFloat16) {
      MmaBFloat16(d, words, b[0], b[1]);
      return;
    }
#endif
    MmaHalf(d, words, b[0], b[1]);
  }

  static __device__ __forceinline__ uint32_t Pack(float x, float y) {
    return Rows::kBFloat16 ? PackBFloat16(x, y) : PackHalf(x, y);
  }

  // scores = Q K^T, with what the bias takes back.
  __device__ __forceinline__ void Score(uint32_t keys, Scores& scores) const {
    const LanePlace at;
    PerRow start;
    OfRows(State().bias, at.r, start);
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int j = 0; j < kScoreTiles; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[m][j][i] = Rows::kKeyBias == 0.0f ? 0.0f : start[m][i / 2];
      }
    }
    const uint4* const query = operands + ReadThread() / 32 * (Shape::kWarpQueryBytes / 16) + at.lane;
    constexpr int kSteps = Rows::kKeySteps;
    constexpr int kChunks = Rows::kKeyChunks;
    constexpr int kLoadTokens = 32 / kChunks;
    const uint32_t row = keys + Layout::Offset(at.lane / 8 / kChunks * 8 + at.lane % 8, at.lane / 8 % kChunks);
#pragma unroll
    for (int group = 0; group < kQuerySteps / kSteps; ++group) {
      uint4 a[kSteps][kRowTiles];
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) a[s][m] = query[(m * kQuerySteps + group * kSteps + s) * 32];
      }
#pragma unroll
      for (int first = 0; first < kTokens; first += kLoadTokens) {
        uint32_t words[4];
        LoadTileMatrices(words, Layout::Chunk(row, group * kChunks) + first * Layout::kRowBytes);
#pragma unroll
        for (int j = 0; j < 4 / kChunks; ++j) {
          uint32_t parts[kChunks];
#pragma unroll
          for (int i = 0; i < kChunks; ++i) parts[i] = words[j * kChunks + i];
          uint32_t b[kSteps][2];
          Rows::ExpandKeys(parts, b);
#pragma unroll
          for (int s = 0; s < kSteps; ++s) {
#pragma unroll
            for (int m = 0; m < kRowTiles; ++m) Multiply(scores[m][first / 8 + j], a[s][m], b[s]);
          }
        }
      }
    }
  }

  // Scores that nobody reads. Without them the compiler keeps their registers from one tile to the next.
  static __device__ __forceinline__ void NoScores(Scores& scores) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int j = 0; j < kScoreTiles; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) asm volatile("mov.f32 %0, 0f00000000;\n" : "=f"(scores[m][j][i]));
      }
    }
  }

  // This lane's two of 8-token tile j.
  static __device__ __forceinline__ float2 ScalesOf(const float* scales, int j, int c) {
    return *reinterpret_cast<const float2*>(scales + 8 * j + 2 * c);
  }

  __device__ __forceinline__ void ScaleScores(const float* k_scales, int c, Scores& scores) const {
#pragma unroll
    for (int j = 0; j < kScoreTiles; ++j) {
      const float2 scale = ScalesOf(k_scales, j, c);
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[m][j][i] *= i % 2 == 0 ? scale.x : scale.y;
      }
    }
  }

  // Scores that are complete; by: 1.
  __device__ __forceinline__ void CapScores(float softcap, PerRow& by, Scores& scores) const {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int j = 0; j < kScoreTiles; ++j) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& s = scores[m][j][2 * h + e];
            s = SoftcapLog2(s * by[m][h], softcap);
          }
        }
        by[m][h] = 1.0f;
      }
    }
  }

  // Scores of tokens outside a row's span become -inf, whatever they were.
  __device__ __forceinline__ void MaskScores(const Spans& span, int c, Scores& scores) const {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int j = 0; j < kScoreTiles; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (!span[m][i / 2].Has(8 * j + 2 * c + i % 2)) scores[m][j][i] = -INFINITY;
        }
      }
    }
  }

  // Raises the running maxima where a score times `by` exceeds one by more than kMaximumRise.
  __device__ __forceinline__ void RaiseMaximum(const PerRow& by, int r, const Scores& scores, PerRow& maximum) {
    PerRow top;
    bool exceeded = false;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        top[m][h] = -INFINITY;
#pragma unroll
        for (int j = 0; j < kScoreTiles; ++j) {
          top[m][h] = fmaxf(top[m][h], fmaxf(scores[m][j][2 * h], scores[m][j][2 * h + 1]));
        }
        exceeded = exceeded || fmaf(top[m][h], by[m][h], -maximum[m][h]) > kMaximumRise;
      }
    }
    if (!__any_sync(0xFFFFFFFFu, exceeded)) return;
    auto& state = State();
    __syncwarp();  // all lanes have read the maxima
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float raised = top[m][h] * by[m][h];
        raised = fmaxf(raised, __shfl_xor_sync(0xFFFFFFFFu, raised, 1));
        raised = fmaxf(raised, __shfl_xor_sync(0xFFFFFFFFu, raised, 2));
        raised = fmaxf(raised, maximum[m][h]);
        // Not 0, whose product with Inf is NaN: SpoilSums comes before the first maximum.
        const float shrink = fmaxf(Exp2(maximum[m][h] - raised), 0x1p-126f);
        maximum[m][h] = raised;
        if (ReadThread() % 4 == 0) state.maximum[16 * m + r + 8 * h] = raised;  // four lanes have the same
        state.denominator[ReadThread() % 32][2 * m + h] *= shrink;
#pragma unroll
        for (int n = 0; n < kOutTiles; ++n) {
          out[m][n][2 * h] *= shrink;
          out[m][n][2 * h + 1] *= shrink;
        }
      }
    }
    __syncwarp();
  }

  // Multiplies the accumulators.
  __device__ __forceinline__ void Shrink(float by) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kOutTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) out[m][n][i] *= by;
      }
    }
  }

  // The weights of tokens [16k, 16k + 16), 2^(score - maximum) times V's scale, as operands, from their scores. They
  // are added to `sums`, without the scale.
  __device__ __forceinline__ void WeighStep(int k, const PerRow& by, const PerRow& maximum, const float* v_scales,
                                            int c, const Scores& scores, PerRow& sums, uint4 (&weights)[kRowTiles]) {
    uint32_t words[kRowTiles][4];
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      const int j = 2 * k + upper;
      float2 scale = make_float2(1.0f, 1.0f);
      if constexpr (!Rows::kExact) scale = ScalesOf(v_scales, j, c);
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float* score = scores[m][j] + 2 * h;
          float x = Exp2(fmaf(score[0], by[m][h], -maximum[m][h]));
          float y = Exp2(fmaf(score[1], by[m][h], -maximum[m][h]));
          sums[m][h] += x + y;
          if constexpr (!Rows::kExact) {
            x *= scale.x;
            y *= scale.y;
          }
          words[m][h + 2 * upper] = Pack(x, y);
        }
      }
    }
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      weights[m] = make_uint4(words[m][0], words[m][1], words[m][2], words[m][3]);
    }
  }

  // out += weights * V, of 16 tokens. rows: this lane's address for chunk 0 or 1 of them.
  __device__ __forceinline__ void MixStep(uint32_t rows, const uint4 (&weights)[kRowTiles]) {
#pragma unroll
    for (int chunk = 0; chunk < Shape::kRowChunks; chunk += 2) {
      uint32_t words[4];
      LoadTileMatricesTransposed(words, Layout::Chunk(rows, chunk));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t near[kColumnTiles];
        uint32_t far[kColumnTiles];
        Rows::ExpandValues(words[2 * i], near);
        Rows::ExpandValues(words[2 * i + 1], far);
#pragma unroll
        for (int n = 0; n < kColumnTiles; ++n) {
          const uint32_t b[2] = {near[n], far[n]};
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m) Multiply(out[m][(chunk + i) * kColumnTiles + n], weights[m], b);
        }
      }
    }
  }

  // Scores of a tile become weights, and out += weights * V. The weights of a step are made beside the product of two
  // steps before: scores take twice their registers.
  __device__ __forceinline__ void Mix(uint32_t values, const PerRow& by, PerRow& maximum, const float* v_scales, int c,
                                      const Scores& scores) {
    constexpr int kAhead = kMixSteps < 2 ? kMixSteps : 2;
    const int lane = ReadThread() % 32;
    const uint32_t rows = values + Layout::Offset(lane % 16, lane / 16);
    PerRow sums;
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i) sums[i / 2][i % 2] = 0.0f;
    uint4 weights[kAhead][kRowTiles];
#pragma unroll
    for (int k = 0; k < kMixSteps + kAhead; ++k) {
      if (k >= kAhead) MixStep(rows + 16 * (k - kAhead) * Layout::kRowBytes, weights[k % kAhead]);
      if (k < kMixSteps) {
        // Has the exponentials of a step wait for the sums of the step before: else all of a tile's are made first and
        // added up last, which takes a register each.
#pragma unroll
        for (int i = 0; i < 2 * kRowTiles && k > 0; ++i) {
          maximum[i / 2][i % 2] = fmaf(sums[i / 2][i % 2], 0.0f, maximum[i / 2][i % 2]);
        }
        WeighStep(k, by, maximum, v_scales, c, scores, sums, weights[k % kAhead]);
      }
    }
    float (&denominator)[2 * kRowTiles] = State().denominator[ReadThread() % 32];
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i) denominator[i] += sums[i / 2][i % 2];
  }

  // A tile's products become weights and are added up. scales: of its tokens; not for exact rows.
  __device__ __forceinline__ void Attend(float softcap, bool masked, int32_t window, int tile, const Scales* scales,
                                         uint32_t values, Scores& scores) {
    const LanePlace at;
    if constexpr (!Rows::kExact) {
      ScaleScores(scales->k, at.c, scores);
      if ((scales->v_bad[0] | scales->v_bad[1]) != 0) SpoilScores<PrefillWarp>(scales->v_bad, at.c, scores);
    }
    PerRow by;
    OfRows(State().factor, at.r, by);
    if (softcap > 0.0f) CapScores(softcap, by, scores);
    if (masked) {
      Spans span;
      FindSpans(window, tile, at.r, span);
      MaskScores(span, at.c, scores);
    }
    PerRow maximum;
    OfRows(State().maximum, at.r, maximum);
    RaiseMaximum(by, at.r, scores, maximum);
    Mix(values, by, maximum, Rows::kExact ? nullptr : scales->v, at.c, scores);
  }

  // Accumulators of row 16m + r + 8h that are neighbours in the output: those of elements
  // [FirstElement(chunk, column), + 2 * kColumnTiles), for the lanes with lane % 4 == column.
  static constexpr int kRun = 2 * kColumnTiles;
  static __device__ __forceinline__ int FirstElement(int chunk, int column) {
    return chunk * Rows::kChunk + column * kRun;
  }
  __device__ __forceinline__ float Sum(int m, int h, int chunk, int i) const {
    return out[m][chunk * kColumnTiles + i % kColumnTiles][2 * h + i / kColumnTiles];
  }
};

}  // namespace kv_cache_quant
}  // namespace contrib
}  // namespace onnxruntime
