// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
//
// What a decode block makes of the call's activations: its query rows, scaled so that half holds them whatever the
// activation type is, and the new rows of the cache that are in its split. A warp makes a row.

#pragma once

#include "contrib_ops/cuda/bert/kv_cache_quant/append.cuh"
#include "contrib_ops/cuda/bert/kv_cache_quant/decode_tile.cuh"
#include "contrib_ops/cuda/bert/kv_cache_quant/query_tile.cuh"
#include "contrib_ops/cuda/bert/kv_cache_quant/unit.cuh"

namespace onnxruntime {
namespace contrib {
namespace kv_cache_quant {

// Query rows are laid out times this over KeyUnit, which keeps the largest element, 1, below half's 65504 and small
// ones above its subnormal numbers for every unit.
constexpr float kQueryUnit = 0x1p-10f;

// The query rows of a block as operands: words of two halves, as DecodeWarp::Score takes them.
template <int kRowTiles, int kHeadSize>
struct QueryRows {
  static constexpr int kWords = kHeadSize / 8;  // of a row, in each of the four lanes that share it
  uint4 words[kRowTiles][kWords / 4][32];       // (row / 8, word / 4, lane: row % 8, quarter)
  float factor[8 * kRowTiles];                  // from a product with K's expanded codes to a score in log2 units
  float sum[8 * kRowTiles];                     // of the row times KeyUnit, what KeyBias is multiplied by
};

// A query row and its first element from p.query.
struct QueryRowPlace : QueryRow {
  int64_t offset;
  __device__ __forceinline__ QueryRowPlace(const GqaParams& p, int64_t b, int kv_head, int row)
      : QueryRow(p, kv_head, row),
        offset((b * p.sequence_length + s) * p.query_stride + static_cast<int64_t>(head) * p.head_size) {}
};

// A lane's part of that row as it lies in memory, on its way before anything else of the row is; nothing without
// `vectors` (plan.activation_vectors).
template <int kHeadSize>
__device__ __forceinline__ LaneWords<kHeadSize / 32> LoadQueryWords(const GqaParams& p, int64_t b, int kv_head, int row,
                                                                    int rows, int lane, bool vectors) {
  if (!vectors || row >= rows) return {};
  constexpr int kElements = kHeadSize / 32;
  return LoadLaneWords<kElements>(p, p.query, QueryRowPlace(p, b, kv_head, row).offset, lane * kElements, true);
}

// Row `row` of the s * G + g rows of (b, kv_head), of which there are `rows`; zeros from there on. After rotary, times
// K's PER_CHANNEL scale, times a power of two that brings the largest element to [0.5, 1). words: LoadQueryWords'.
template <typename Shape, KvFormat kFormat, int kRowTiles, int kHeadSize>
__device__ __forceinline__ void LayOutQueryRow(const GqaParams& p, int64_t b, int kv_head, int row, int rows,
                                               int64_t past, int lane, bool vectors,
                                               const LaneWords<kHeadSize / 32>& words,
                                               QueryRows<kRowTiles, kHeadSize>& query) {
  using FormatCodec = Codec<kFormat>;
  constexpr int kElements = kHeadSize / 32;  // of a lane
  float x[kElements] = {};
  float factor = 0.0f;
  if (row < rows) {
    const QueryRowPlace place(p, b, kv_head, row);
    if (vectors) {
      UnpackRotated(p, words, lane * kElements, past + place.s, true, x);
    } else {
      LoadLaneRow(p, p.query, place.offset, past + place.s, lane, true, false, x);
    }
    factor = p.scale * kLog2E;
    if (p.k.mode == KvScaleMode::kPerTensor) factor *= p.k.static_scale[0];
    if (p.k.mode == KvScaleMode::kPerChannel) {
      float channel[kElements] = {};
      LoadStaticScales(p, p.k, kv_head, lane, channel);
#pragma unroll
      for (int i = 0; i < kElements; ++i) x[i] *= channel[i];
    }
    // Inf and NaN stay what they are. The ends keep both powers normal numbers.
    const int exponent = min(max((__float_as_int(WarpAmax(x)) >> 23) - 126, -126), 126);
    factor *= PowerOfTwo(exponent);
#pragma unroll
    for (int i = 0; i < kElements; ++i) x[i] *= PowerOfTwo(-exponent);
  }
  const int word = lane * kElements / Shape::kElements;  // of the cache row
  const int quarter = word / Shape::kKeyVector % 4;
  const int first = word / (4 * Shape::kKeyVector) * Shape::kKeyVector + word % Shape::kKeyVector;  // of the quarter
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    // What the products will have: rounded after the power of two that makes up for the unit of K's operand.
    const int e = lane * kElements % Shape::kElements + i % Shape::kElements;
    const float unit = FormatCodec::KeyUnit(i % 2);
    const __half stored = __float2half_rn(x[i] * (kQueryUnit / unit));
    sum += __half2float(stored) * unit;
    const int at = (first + i / Shape::kElements) * Shape::kElements + FormatCodec::KeyPlace(e);  // in halves
    auto* const to = reinterpret_cast<__half*>(&query.words[row / 8][at / 8][row % 8 * 4 + quarter]);
    to[at % 8] = stored;
  }
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, mask);
  if (lane == 0) {
    query.factor[row] = factor * (1.0f / kQueryUnit);
    query.sum[row] = sum;
  }
}

// New row of K or V (side 0 or 1) at `position`: codes and scale into the cache, and into row `index` of new_rows.
template <KvFormat kFormat, int kHeadSize, int kRows>
__device__ __forceinline__ void AppendNewRow(const GqaParams& p, int64_t b, int kv_head, int s, int64_t position,
                                             int side, int index, int lane, bool vectors,
                                             NewRows<kFormat, kHeadSize, kRows>& new_rows) {
  const KvSide& to = side == 0 ? p.k : p.v;
  const int64_t offset = (b * p.sequence_length + s) * p.kv_stride + static_cast<int64_t>(kv_head) * p.head_size;
  constexpr int kElements = kHeadSize / 32;  // of a lane
  float x[kElements];
  LoadLaneRow(p, side == 0 ? p.key : p.value, offset, position, lane, side == 0, vectors, x);
  const int64_t cache_row = (b * p.kv_num_heads + kv_head) * p.capacity + position;
  int32_t code[kElements] = {};
  if (to.mode == KvScaleMode::kPerToken) {
    const float scale = EncodeTokenRow<kFormat>(to, x, code);
    if (lane == 0) {
      StoreTokenScale(to, cache_row, scale);
      new_rows.scale[side][index] = scale;
    }
  } else {
    float scale[kElements] = {};
    LoadStaticScales(p, to, kv_head, lane, scale);
    EncodeStaticRow<kFormat>(scale, x, code);
  }
  if (lane * kElements < p.head_size) StoreCodes<kFormat>(to.codes + cache_row * p.row_bytes, lane, code);
  StoreCodes<kFormat>(new_rows.codes[side][index], lane, code);
}

}  // namespace kv_cache_quant
}  // namespace contrib
}  // namespace onnxruntime
