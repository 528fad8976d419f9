// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
//
// One row of activations in a warp: lane i holds elements [kElements i, kElements (i + 1)), zeros beyond D. kElements
// is 2, 4 or 8: 32 lanes hold a row of 64, 128 or 256.

#pragma once

#include "contrib_ops/cuda/bert/kv_cache_quant/activation.cuh"

namespace onnxruntime {
namespace contrib {
namespace kv_cache_quant {

// A lane's activations as they lie in memory, and those that rotate with them.
template <int kElements>
struct LaneWords {
  uint32_t own[kElements / 2];
  uint32_t partner[kElements / 2];
};

namespace lane_row_internal {

template <int kWords>
__device__ __forceinline__ void LoadWords(const void* base, int64_t index, uint32_t (&words)[kWords]) {
  const auto* const from = static_cast<const uint16_t*>(base) + index;
  if constexpr (kWords == 4) {
    const uint4 x = __ldg(reinterpret_cast<const uint4*>(from));
    words[0] = x.x;
    words[1] = x.y;
    words[2] = x.z;
    words[3] = x.w;
  } else if constexpr (kWords == 2) {
    const uint2 x = __ldg(reinterpret_cast<const uint2*>(from));
    words[0] = x.x;
    words[1] = x.y;
  } else {
    static_assert(kWords == 1, "one load");
    words[0] = __ldg(reinterpret_cast<const uint32_t*>(from));
  }
}

template <int kElements>
__device__ __forceinline__ void Unpack(const uint32_t (&words)[kElements / 2], ActivationType type,
                                       float (&x)[kElements]) {
  if (type == ActivationType::kBFloat16) {
#pragma unroll
    for (int i = 0; i < kElements / 2; ++i) {
      x[2 * i] = __uint_as_float(words[i] << 16);
      x[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kElements / 2; ++i) {
      const float2 pair = __half22float2(reinterpret_cast<const __half2&>(words[i]));
      x[2 * i] = pair.x;
      x[2 * i + 1] = pair.y;
    }
  }
}

}  // namespace lane_row_internal

// Loads elements [d, d + kElements) of a row that starts row_offset elements from base, aligned; rotates: K and Q.
template <int kElements>
__device__ __forceinline__ LaneWords<kElements> LoadLaneWords(const GqaParams& p, const void* base, int64_t row_offset,
                                                              int d, bool rotates) {
  LaneWords<kElements> words = {};
  if (d >= p.head_size) return words;
  lane_row_internal::LoadWords(base, row_offset + d, words.own);
  if (rotates && p.cos_cache != nullptr && d < p.rotary_dim && !p.rotary_interleaved) {
    const int half = p.rotary_dim / 2;
    lane_row_internal::LoadWords(base, row_offset + (d < half ? d + half : d - half), words.partner);
  }
  return words;
}

// x <- the elements at d of words, each as LoadRotated gives it. Eight elements at a multiple of 8 rotate alike.
template <int kElements>
__device__ __forceinline__ void UnpackRotated(const GqaParams& p, const LaneWords<kElements>& words, int d,
                                              int64_t position, bool rotates, float (&x)[kElements]) {
  using lane_row_internal::LoadWords;
  using lane_row_internal::Unpack;
  Unpack(words.own, p.activation, x);
  if (!rotates || p.cos_cache == nullptr || d >= p.rotary_dim) return;
  const int half = p.rotary_dim / 2;
  if (p.rotary_interleaved) {
    const int64_t at = position * half + d / 2;
#pragma unroll
    for (int i = 0; i < kElements / 2; ++i) {
      const float cos = LoadActivation(p.cos_cache, at + i, p.activation);
      const float sin = LoadActivation(p.sin_cache, at + i, p.activation);
      const float even = x[2 * i];
      const float odd = x[2 * i + 1];
      x[2 * i] = __fsub_rn(__fmul_rn(even, cos), __fmul_rn(odd, sin));
      x[2 * i + 1] = __fadd_rn(__fmul_rn(odd, cos), __fmul_rn(even, sin));
    }
    return;
  }
  const bool first = d < half;
  const int64_t at = position * half + (first ? d : d - half);
  uint32_t cos_words[kElements / 2];
  uint32_t sin_words[kElements / 2];
  LoadWords(p.cos_cache, at, cos_words);
  LoadWords(p.sin_cache, at, sin_words);
  float partner[kElements];
  float cos[kElements];
  float sin[kElements];
  Unpack(words.partner, p.activation, partner);
  Unpack(cos_words, p.activation, cos);
  Unpack(sin_words, p.activation, sin);
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    const float a = __fmul_rn(x[i], cos[i]);
    const float b = __fmul_rn(partner[i], sin[i]);
    x[i] = __fadd_rn(a, first ? -b : b);
  }
}

// x <- this lane's elements of the row that starts row_offset elements from base, at `position`; rotates: K and Q.
// vectors: plan.activation_vectors; without it, by element.
template <int kElements>
__device__ __forceinline__ void LoadLaneRow(const GqaParams& p, const void* base, int64_t row_offset, int64_t position,
                                            int lane, bool rotates, bool vectors, float (&x)[kElements]) {
  const int d = lane * kElements;
  if (vectors) {
    UnpackRotated(p, LoadLaneWords<kElements>(p, base, row_offset, d, rotates), d, position, rotates, x);
    return;
  }
#pragma unroll
  for (int i = 0; i < kElements; ++i) x[i] = 0.0f;
  if (d >= p.head_size) return;
#pragma unroll 1
  for (int i = 0; i < kElements; ++i) {
    const float y = rotates ? LoadRotated(p, base, row_offset, d + i, position)
                            : LoadActivation(base, row_offset + d + i, p.activation);
    // A register array takes no index that is not constant.
#pragma unroll
    for (int j = 0; j < kElements; ++j) x[j] = j == i ? y : x[j];
  }
}

// Largest |x| of the warp's row, in every lane. As unsigned integers |x| are in order and NaN is above Inf, so NaN
// propagates.
template <int kElements>
__device__ __forceinline__ float WarpAmax(const float (&x)[kElements]) {
  uint32_t amax = 0;
#pragma unroll
  for (int i = 0; i < kElements; ++i) amax = max(amax, __float_as_uint(x[i]) & 0x7FFFFFFFu);
#if __CUDA_ARCH__ >= 800
  amax = __reduce_max_sync(0xFFFFFFFFu, amax);
#else
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    amax = max(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, distance));
  }
#endif
  return __uint_as_float(amax);
}

}  // namespace kv_cache_quant
}  // namespace contrib
}  // namespace onnxruntime
