// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
//
// Query rows in a warp's registers: after rotary, with K's PER_CHANNEL scale folded in, and scaled so that half holds
// them whatever the activation type is.

#pragma once

#include "contrib_ops/cuda/bert/kv_cache_quant/activation.cuh"

namespace onnxruntime {
namespace contrib {
namespace kv_cache_quant {

// 2^e for e in [-126, 127].
__device__ __forceinline__ float PowerOfTwo(int e) { return __int_as_float((e + 127) << 23); }

namespace query_internal {

// Elements lane, lane + 32, ... of kRows rows: LoadRotated's arithmetic, with the loads of all rows in flight together.
// rows[r] is the row's first element from p.query, positions[r] its position. Elements from D on come out as 0.
template <int kRows, int kPerLane, bool kRotary>
__device__ __forceinline__ void LoadRows(const GqaParams& p, const int64_t (&rows)[kRows],
                                         const int64_t (&positions)[kRows], int lane, float (&x)[kRows][kPerLane]) {
  const auto* query = static_cast<const uint16_t*>(p.query);
  const auto* cos_cache = static_cast<const uint16_t*>(p.cos_cache);
  const auto* sin_cache = static_cast<const uint16_t*>(p.sin_cache);
  const int half = p.rotary_dim / 2;
  uint16_t own[kRows][kPerLane];
  uint16_t other[kRows][kPerLane];
  uint16_t cos[kRows][kPerLane];
  uint16_t sin[kRows][kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int d = lane + 32 * i < p.head_size ? lane + 32 * i : 0;
    const bool first = p.rotary_interleaved ? (d & 1) == 0 : d < half;
    // Without a rotation: the element itself and the table's first entry, which are there to be read.
    const bool rotated = d < p.rotary_dim;
    const int partner = !rotated ? d : p.rotary_interleaved ? d ^ 1
                                   : first                  ? d + half
                                                            : d - half;
    const int angle = p.rotary_interleaved ? d / 2 : (first ? d : d - half);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      own[r][i] = __ldg(query + rows[r] + d);
      if constexpr (kRotary) {
        const int64_t at = rotated ? positions[r] * half + angle : 0;
        other[r][i] = __ldg(query + rows[r] + partner);
        cos[r][i] = __ldg(cos_cache + at);
        sin[r][i] = __ldg(sin_cache + at);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int d = lane + 32 * i;
    const bool first = p.rotary_interleaved ? (d & 1) == 0 : d < half;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      x[r][i] = ActivationFromBits(own[r][i], p.activation);
      if constexpr (kRotary) {
        const float a = __fmul_rn(x[r][i], ActivationFromBits(cos[r][i], p.activation));
        const float b = __fmul_rn(ActivationFromBits(other[r][i], p.activation),
                                  ActivationFromBits(sin[r][i], p.activation));
        if (d < p.rotary_dim) x[r][i] = first ? __fsub_rn(a, b) : __fadd_rn(a, b);
      }
      if (d >= p.head_size) x[r][i] = 0.0f;
    }
  }
}

// Rows [row, row + kRows) of (b, kv_head) in a warp's registers, as LoadQueryRows describes them.
template <int kRows, int kPerLane, bool kNative>
__device__ __forceinline__ void LoadScaledRows(const GqaParams& p, int64_t past, int64_t b, int kv_head, int row,
                                               int rows, int lane, float (&x)[kRows][kPerLane],
                                               float (&factor)[kRows]) {
  int64_t offsets[kRows];
  int64_t positions[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int at = row + r < rows ? row + r : rows - 1;
    const int s = at / p.group_size;
    const int head = kv_head * p.group_size + at - s * p.group_size;
    offsets[r] = (b * p.sequence_length + s) * p.query_stride + static_cast<int64_t>(head) * p.head_size;
    positions[r] = past + s;
  }
  if (p.cos_cache != nullptr) {
    LoadRows<kRows, kPerLane, true>(p, offsets, positions, lane, x);
  } else {
    LoadRows<kRows, kPerLane, false>(p, offsets, positions, lane, x);
  }
  const bool fold = !kNative && p.k.mode == KvScaleMode::kPerChannel;
  const float* channels = p.k.static_scale + static_cast<int64_t>(kv_head) * p.head_size;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const float channel = fold && lane + 32 * i < p.head_size ? channels[lane + 32 * i] : 1.0f;
#pragma unroll
    for (int r = 0; r < kRows; ++r) x[r][i] = row + r < rows ? x[r][i] * channel : 0.0f;
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    factor[r] = 1.0f;
    if constexpr (!kNative) {
      float amax = 0.0f;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) amax = fmaxf(amax, fabsf(x[r][i]));
#pragma unroll
      for (int step = 16; step > 0; step /= 2) amax = fmaxf(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, step));
      // Inf and NaN stay what they are. The ends keep both powers normal numbers.
      const int exponent = min(max((__float_as_int(amax) >> 23) - 126, -126), 126);
      factor[r] = PowerOfTwo(exponent);
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) x[r][i] *= PowerOfTwo(-exponent);
    }
  }
}

}  // namespace query_internal

// Rows [first_row, first_row + kWarpRows) of the s * G + g rows of (b, kv_head), by one warp; rows from `rows` on are
// not read and are 0, as are elements from D to kHeadSize. Calls store(r, d, x) for element d of the r-th of them and
// adds up what it returns. Leaves in lane i, of the row i % kWarpRows, that sum (not with kNative) and the factor that
// undoes what was done to the row:
//   kNative   nothing, for exact keys; 1
//   else      K's PER_CHANNEL scale, times a power of two that brings the row's largest element to [0.5, 1)
template <int kHeadSize, int kWarpRows, bool kNative, typename Store>
__device__ __forceinline__ void LoadQueryRows(const GqaParams& p, int64_t past, int64_t b, int kv_head, int first_row,
                                              int rows, int lane, Store store, float* lane_factor, float* lane_sum) {
  constexpr int kRows = kHeadSize == 256 ? 2 : kHeadSize == 128 ? 4
                                                                : 8;  // with their loads in flight together
  constexpr int kPerLane = kHeadSize / 32;
  static_assert(kWarpRows % kRows == 0, "whole groups of rows");
#pragma unroll 1
  for (int base = 0; base < kWarpRows; base += kRows) {
    float x[kRows][kPerLane];
    float factor[kRows];
    query_internal::LoadScaledRows<kRows, kPerLane, kNative>(p, past, b, kv_head, first_row + base, rows, lane, x,
                                                             factor);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) sum += store(base + r, lane + 32 * i, x[r][i]);
      if constexpr (!kNative) {
#pragma unroll
        for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
      }
      if (lane % kWarpRows == base + r) {
        *lane_factor = factor[r];
        *lane_sum = sum;
      }
    }
  }
}

}  // namespace kv_cache_quant
}  // namespace contrib
}  // namespace onnxruntime
