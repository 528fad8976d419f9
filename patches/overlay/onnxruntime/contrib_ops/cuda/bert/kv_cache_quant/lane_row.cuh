// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
//
// One row of activations in a warp: lane i holds elements [kElements i, kElements (i + 1)), zeros beyond D. kElements
// is 2, 4 or 8: 32 lanes hold a row of 64, 128 or 256.

#pragma once

#include "contrib_ops/cuda/bert/kv_cache_quant/activation.cuh"

namespace onnxruntime {
namespace contrib {
namespace kv_cache_quant {

// A lane's activations as they lie in memory, and what they rotate with: the other half's elements and the angles, or
// half as many angles where rotary is interleaved.
template <int kElements>
struct LaneWords {
  uint32_t own[kElements / 2];
  uint32_t partner[kElements / 2];
  uint32_t cos[kElements / 2];
  uint32_t sin[kElements / 2];
};

namespace lane_row_internal {

template <int kWords>
__device__ __forceinline__ void LoadWords(const uint16_t* from, uint32_t (&words)[kWords]) {
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

// The angles of kElements interleaved elements, half as many: as the first words.
template <int kElements>
__device__ __forceinline__ void LoadPairAngles(const uint16_t* from, uint32_t (&words)[kElements / 2]) {
  if constexpr (kElements == 2) {
    words[0] = __ldg(from);
  } else {
    uint32_t loaded[kElements / 4];
    LoadWords(from, loaded);
#pragma unroll
    for (int i = 0; i < kElements / 4; ++i) words[i] = loaded[i];
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

// Whether elements at d rotate; `rotates`: rows of K and Q do.
__device__ __forceinline__ bool IsRotated(const GqaParams& p, int d, bool rotates) {
  return rotates && p.cos_cache != nullptr && d < p.rotary_dim;
}

// Where a lane's words are, all aligned to the load; nullptr: they are not needed, and zeros.
struct LaneSource {
  const uint16_t* own = nullptr;
  const uint16_t* partner = nullptr;
  const uint16_t* cos = nullptr;
  const uint16_t* sin = nullptr;
};

// Elements at d of a row that starts row_offset elements from base. Eight elements at a multiple of 8 rotate alike.
__device__ __forceinline__ LaneSource FindLaneWords(const GqaParams& p, const void* base, int64_t row_offset, int d,
                                                    bool rotates) {
  LaneSource from;
  if (d >= p.head_size) return from;
  const auto* const row = static_cast<const uint16_t*>(base) + row_offset;
  from.own = row + d;
  if (IsRotated(p, d, rotates) && !p.rotary_interleaved) {
    const int half = p.rotary_dim / 2;
    from.partner = row + (d < half ? d + half : d - half);
  }
  return from;
}

// And their angles at `position`.
__device__ __forceinline__ void FindLaneAngles(const GqaParams& p, int d, int64_t position, bool rotates,
                                               LaneSource& from) {
  if (!IsRotated(p, d, rotates)) return;
  const int half = p.rotary_dim / 2;
  const int64_t at = position * half + (p.rotary_interleaved ? d / 2 : d < half ? d
                                                                                : d - half);
  from.cos = static_cast<const uint16_t*>(p.cos_cache) + at;
  from.sin = static_cast<const uint16_t*>(p.sin_cache) + at;
}

// Loads what `from` names, and leaves the other words.
template <int kElements>
__device__ __forceinline__ void LoadLaneWords(const GqaParams& p, const LaneSource& from, LaneWords<kElements>& words) {
  using lane_row_internal::LoadPairAngles;
  using lane_row_internal::LoadWords;
  if (from.own != nullptr) LoadWords(from.own, words.own);
  if (from.partner != nullptr) LoadWords(from.partner, words.partner);
  if (from.cos == nullptr) return;
  if (p.rotary_interleaved) {
    LoadPairAngles<kElements>(from.cos, words.cos);
    LoadPairAngles<kElements>(from.sin, words.sin);
  } else {
    LoadWords(from.cos, words.cos);
    LoadWords(from.sin, words.sin);
  }
}

// x <- the elements at d of words, each as LoadRotated gives it.
template <int kElements>
__device__ __forceinline__ void UnpackRotated(const GqaParams& p, const LaneWords<kElements>& words, int d,
                                              bool rotates, float (&x)[kElements]) {
  using lane_row_internal::Unpack;
  Unpack(words.own, p.activation, x);
  if (!IsRotated(p, d, rotates)) return;
  float cos[kElements];
  float sin[kElements];
  Unpack(words.cos, p.activation, cos);
  Unpack(words.sin, p.activation, sin);
  if (p.rotary_interleaved) {
#pragma unroll
    for (int i = 0; i < kElements / 2; ++i) {
      const float even = x[2 * i];
      const float odd = x[2 * i + 1];
      x[2 * i] = __fsub_rn(__fmul_rn(even, cos[i]), __fmul_rn(odd, sin[i]));
      x[2 * i + 1] = __fadd_rn(__fmul_rn(odd, cos[i]), __fmul_rn(even, sin[i]));
    }
    return;
  }
  const bool first = d < p.rotary_dim / 2;
  float partner[kElements];
  Unpack(words.partner, p.activation, partner);
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
    LaneWords<kElements> words = {};
    LaneSource from = FindLaneWords(p, base, row_offset, d, rotates);
    FindLaneAngles(p, d, position, rotates, from);
    LoadLaneWords(p, from, words);
    UnpackRotated(p, words, d, rotates, x);
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
