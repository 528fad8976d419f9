// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
//
// One new row of K or V on its way into the cache. A warp owns a row: lane i holds elements [8 i, 8 i + 8), lanes at
// and beyond D / 8 hold zeros.

#pragma once

#include "contrib_ops/cuda/bert/kv_cache_quant/activation.cuh"
#include "contrib_ops/cuda/bert/kv_cache_quant/codec.cuh"

namespace onnxruntime {
namespace contrib {
namespace kv_cache_quant {

constexpr int kLaneElements = 8;
static_assert(kMaxHeadSize <= 32 * kLaneElements, "a warp holds one row");

// A lane's activations as they lie in memory, and those that rotate with them.
struct LaneWords {
  uint4 own;
  uint4 partner;
};

namespace append_internal {

__device__ __forceinline__ uint4 LoadWords(const void* base, int64_t index) {
  return __ldg(reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(base) + index));
}

__device__ __forceinline__ void UnpackTwo(uint32_t word, ActivationType type, float* x) {
  if (type == ActivationType::kBFloat16) {
    x[0] = __uint_as_float(word << 16);
    x[1] = __uint_as_float(word & 0xFFFF0000u);
  } else {
    x[0] = __half2float(__ushort_as_half(static_cast<unsigned short>(word & 0xFFFFu)));
    x[1] = __half2float(__ushort_as_half(static_cast<unsigned short>(word >> 16)));
  }
}

__device__ __forceinline__ void UnpackEight(const uint4& words, ActivationType type, float (&x)[8]) {
  UnpackTwo(words.x, type, x);
  UnpackTwo(words.y, type, x + 2);
  UnpackTwo(words.z, type, x + 4);
  UnpackTwo(words.w, type, x + 6);
}

// x / scale, correctly rounded, with the steps that do not depend on x taken once. They are those of a division, whose
// check for exponents far apart is made on the scale alone: at the ends of [2^-60, 2^60] a quotient that is inexact
// is far below half a code.
__device__ __forceinline__ void DivideEight(const float (&x)[8], float scale, float (&y)[8]) {
  if (scale >= 0x1p-60f && scale <= 0x1p60f) {
    const float reciprocal = __frcp_rn(scale);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float q = __fmul_rn(x[i], reciprocal);
      const float closer = __fmaf_rn(__fmaf_rn(-q, scale, x[i]), reciprocal, q);
      y[i] = copysignf(__fmaf_rn(__fmaf_rn(-closer, scale, x[i]), reciprocal, closer), x[i]);  // -0
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) y[i] = __fdiv_rn(x[i], scale);
  }
}

}  // namespace append_internal

// Loads elements [d, d + 8) of a row that starts row_offset elements from base, 16-byte aligned; rotates: K.
__device__ __forceinline__ LaneWords LoadLaneWords(const GqaParams& p, const void* base, int64_t row_offset, int d,
                                                   bool rotates) {
  LaneWords words = {};
  if (d >= p.head_size) return words;
  words.own = append_internal::LoadWords(base, row_offset + d);
  if (rotates && p.cos_cache != nullptr && d < p.rotary_dim && !p.rotary_interleaved) {
    const int half = p.rotary_dim / 2;
    words.partner = append_internal::LoadWords(base, row_offset + (d < half ? d + half : d - half));
  }
  return words;
}

// x <- the elements at d of words, each as LoadRotated gives it. Eight elements at a multiple of 8 rotate alike.
__device__ __forceinline__ void UnpackRotated(const GqaParams& p, const LaneWords& words, int d, int64_t position,
                                              bool rotates, float (&x)[8]) {
  using append_internal::LoadWords;
  using append_internal::UnpackEight;
  UnpackEight(words.own, p.activation, x);
  if (!rotates || p.cos_cache == nullptr || d >= p.rotary_dim) return;
  const int half = p.rotary_dim / 2;
  float cos[8], sin[8];
  if (p.rotary_interleaved) {
    const int64_t at = position * half + d / 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      cos[2 * i] = cos[2 * i + 1] = LoadActivation(p.cos_cache, at + i, p.activation);
      sin[2 * i] = sin[2 * i + 1] = LoadActivation(p.sin_cache, at + i, p.activation);
    }
    float even[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) even[i] = x[2 * i];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[2 * i] = __fsub_rn(__fmul_rn(even[i], cos[2 * i]), __fmul_rn(x[2 * i + 1], sin[2 * i]));
      x[2 * i + 1] = __fadd_rn(__fmul_rn(x[2 * i + 1], cos[2 * i + 1]), __fmul_rn(even[i], sin[2 * i + 1]));
    }
    return;
  }
  const bool first = d < half;
  const int64_t at = position * half + (first ? d : d - half);
  const uint4 cos_words = LoadWords(p.cos_cache, at);
  const uint4 sin_words = LoadWords(p.sin_cache, at);
  float partner[8];
  UnpackEight(words.partner, p.activation, partner);
  UnpackEight(cos_words, p.activation, cos);
  UnpackEight(sin_words, p.activation, sin);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float a = __fmul_rn(x[i], cos[i]);
    const float b = __fmul_rn(partner[i], sin[i]);
    x[i] = first ? __fsub_rn(a, b) : __fadd_rn(a, b);
  }
}

// Largest |x| of the warp's row, in every lane. As unsigned integers |x| are in order and NaN is above Inf, so NaN
// propagates.
__device__ __forceinline__ float WarpAmax(const float (&x)[8]) {
  uint32_t amax = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) amax = max(amax, __float_as_uint(x[i]) & 0x7FFFFFFFu);
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

// y <- x / scale with the PER_TOKEN scale of the warp's row, which lane 0 stores for row `cache_row`. qmax is
// QMax(format), a function of the host. All lanes take part.
__device__ __forceinline__ void DivideByTokenScale(const KvSide& side, int64_t cache_row, int lane, float qmax,
                                                   const float (&x)[8], float (&y)[8]) {
  const float scale = TokenScale(WarpAmax(x), qmax, side.token_scale_is_half);
  if (lane == 0) {
    if (side.token_scale_is_half) {
      static_cast<__half*>(side.token_scale)[cache_row] = __float2half_rn(scale);
    } else {
      static_cast<float*>(side.token_scale)[cache_row] = scale;
    }
  }
  if (scale > 0.0f && isfinite(scale)) {
    append_internal::DivideEight(x, scale, y);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) y[i] = 0.0f;
  }
}

// Stores a lane's eight codes at its place in a row: 8 bytes, or 4 of int4.
template <KvFormat kFormat>
__device__ __forceinline__ void StoreCodes(uint8_t* row, int lane, const int32_t (&code)[8]) {
  uint32_t word[2] = {0u, 0u};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const auto bits = static_cast<uint32_t>(code[i]);
    if constexpr (kFormat == KvFormat::kInt4) {
      word[0] |= (bits + 8u) << (4 * i);
    } else {
      word[i / 4] |= (bits & 0xFFu) << (8 * (i % 4));
    }
  }
  if constexpr (kFormat == KvFormat::kInt4) {
    reinterpret_cast<uint32_t*>(row)[lane] = word[0];
  } else {
    reinterpret_cast<uint2*>(row)[lane] = make_uint2(word[0], word[1]);
  }
}

}  // namespace kv_cache_quant
}  // namespace contrib
}  // namespace onnxruntime
