// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
//
// What a decode block makes of the call's activations: its query rows, scaled so that half holds them whatever the
// activation type is, and the new rows of the cache that are in its split. A warp makes a row.

#pragma once

#include "contrib_ops/cuda/bert/kv_cache_quant/append.cuh"
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

// The sum over a warp of numbers that are together below 1/2, each to 2^-33. In all lanes.
__device__ __forceinline__ float SumOfLanes(float x) {
#if __CUDA_ARCH__ >= 800
  return static_cast<float>(__reduce_add_sync(0xFFFFFFFFu, __float2int_rn(x * 0x1p32f))) * 0x1p-32f;
#else
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, mask);
  return x;
#endif
}

// A query row and its first element from p.query.
struct QueryRowPlace : QueryRow {
  int64_t offset;
  __device__ __forceinline__ QueryRowPlace(const GqaParams& p, int64_t b, int kv_head, int row)
      : QueryRow(p, kv_head, row),
        offset((b * p.sequence_length + s) * p.query_stride + static_cast<int64_t>(head) * p.head_size) {}
};

// Where a lane's part of a row and its angles are.
__device__ __forceinline__ LaneSource FindRow(const GqaParams& p, const void* base, int64_t offset, int64_t position,
                                              int d, bool rotates) {
  LaneSource from = FindLaneWords(p, base, offset, d, rotates);
  FindLaneAngles(p, d, position, rotates, from);
  return from;
}

// Of a query row; nothing without `vectors` (plan.activation_vectors).
__device__ __forceinline__ LaneSource FindQuery(const GqaParams& p, int64_t b, int kv_head, int row, int rows,
                                                int64_t past, int d, bool vectors) {
  if (!vectors || row >= rows) return {};
  const QueryRowPlace place(p, b, kv_head, row);
  return FindRow(p, p.query, place.offset, past + place.s, d, true);
}

// Has it on its way to L2: rows that the kernel before may still write, as L2 does not mind.
__device__ __forceinline__ void Prefetch(const LaneSource& from) {
  const auto prefetch = [](const uint16_t* address) {
    if (address != nullptr) asm volatile("prefetch.global.L2 [%0];\n" ::"l"(address) : "memory");
  };
  prefetch(from.own);
  prefetch(from.cos);
  prefetch(from.sin);
}

// Rows first, first + step, ... of the s * G + g rows of (b, kv_head), of which there are `rows`, after rotary; zeros
// from there on. from: FindQuery's of the first one.
template <int kRows, int kElements>
__device__ __forceinline__ void LoadQueryRows(const GqaParams& p, int64_t b, int kv_head, int first, int step, int rows,
                                              int64_t past, int lane, bool vectors, const LaneSource& from,
                                              float (&x)[kRows][kElements]) {
  const int d = lane * kElements;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int j = 0; j < kElements; ++j) x[i][j] = 0.0f;
  }
  if (first >= rows) return;
  if (vectors) {
    LaneWords<kElements> words[kRows] = {};
    LoadLaneWords(p, from, words[0]);
#pragma unroll
    for (int i = 1; i < kRows; ++i) {
      LoadLaneWords(p, FindQuery(p, b, kv_head, first + i * step, rows, past, d, true), words[i]);
    }
    // All of them, be they zeros: a load that some way through the code does not wait for is waited for together with
    // the cache, by the next one to use its register.
#pragma unroll
    for (int i = 0; i < kRows; ++i) UnpackRotated(p, words[i], d, true, x[i]);
    return;
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int row = first + i * step;
    if (row >= rows) continue;
    const QueryRowPlace place(p, b, kv_head, row);
    LoadLaneRow(p, p.query, place.offset, past + place.s, lane, true, false, x[i]);
  }
}

// x, a row of LoadQueryRows, times K's PER_CHANNEL scale, times a power of two that brings the largest element to
// [0.5, 1), as operands.
template <typename Shape>
__device__ __forceinline__ void LayOutQueryRow(const GqaParams& p, int kv_head, int row, int rows, int lane,
                                               float (&x)[Shape::kHeadSize / 32],
                                               QueryRows<Shape::kRowTiles, Shape::kHeadSize>& query) {
  using FormatCodec = Codec<Shape::kFormat>;
  constexpr int kElements = Shape::kHeadSize / 32;  // of a lane
  float factor = 0.0f;
  float amax = 0.0f;
  if (row < rows) {
    factor = p.scale * kLog2E;
    if (p.k.mode == KvScaleMode::kPerTensor) factor *= p.k.static_scale[0];
    if (p.k.mode == KvScaleMode::kPerChannel) {
      float channel[kElements] = {};
      LoadStaticScales(p, p.k, kv_head, lane, channel);
#pragma unroll
      for (int i = 0; i < kElements; ++i) x[i] *= channel[i];
    }
    // Inf and NaN stay what they are. The ends keep both powers normal numbers.
    amax = WarpAmax(x);
    const int exponent = min(max((__float_as_int(amax) >> 23) - 126, -126), 126);
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
  if (FormatCodec::kKeyBias != 0.0f) sum = amax < INFINITY ? SumOfLanes(sum) : NAN;
  if (lane == 0) {
    query.factor[row] = factor * (1.0f / kQueryUnit);
    query.sum[row] = sum;
  }
}

// New row `number` of a split: the first one is at `first`; K's and V's take turns.
struct NewRowPlace {
  bool is_value;
  int64_t position;  // in the sequence
  int64_t offset;    // of its first element from p.key or p.value
  int64_t cache_row;

  __device__ __forceinline__ NewRowPlace(const GqaParams& p, int64_t b, int kv_head, int64_t past, int64_t first,
                                         int number)
      : is_value(number % 2 != 0),
        position(first + number / 2),
        offset((b * p.sequence_length + position - past) * p.kv_stride + static_cast<int64_t>(kv_head) * p.head_size),
        cache_row((b * p.kv_num_heads + kv_head) * p.capacity + position) {}

  // A lane's part; nothing without `vectors`.
  __device__ __forceinline__ LaneSource Find(const GqaParams& p, int d, bool vectors) const {
    if (!vectors) return {};
    return FindRow(p, is_value ? p.value : p.key, offset, position, d, !is_value);
  }
};

// Its codes and scale, into the cache where `write` says so. from: what Find gave.
template <KvFormat kFormat, int kElements>
__device__ __forceinline__ void AppendNewRow(const GqaParams& p, int kv_head, const NewRowPlace& place,
                                             const LaneSource& from, int lane, bool vectors, bool write) {
  const KvSide& to = place.is_value ? p.v : p.k;
  float x[kElements];
  if (vectors) {
    LaneWords<kElements> words = {};
    LoadLaneWords(p, from, words);
    UnpackRotated(p, words, lane * kElements, !place.is_value, x);
  } else {
    LoadLaneRow(p, place.is_value ? p.value : p.key, place.offset, place.position, lane, !place.is_value, false, x);
  }
  int32_t code[kElements] = {};
  if (to.mode == KvScaleMode::kPerToken) {
    const float scale = EncodeTokenRow<kFormat>(to, x, code);
    if (write && lane == 0) StoreTokenScale(to, place.cache_row, scale);
  } else {
    float scale[kElements] = {};
    LoadStaticScales(p, to, kv_head, lane, scale);
    EncodeStaticRow<kFormat>(scale, x, code);
  }
  if (!write || lane * kElements >= p.head_size) return;
  StoreCodes<kFormat>(to.codes + place.cache_row * p.row_bytes, lane, code);
}

}  // namespace kv_cache_quant
}  // namespace contrib
}  // namespace onnxruntime
