// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
//
// Codes and scales on the device. The format is format.h's; expansion to half is exact in all three formats.
//
// A 32-bit word of a row holds kElements codes. Expansion knows three orders, because a dot product does not care about
// the order along D and a permuted order needs fewer instructions:
//   ExpandWord   one word of one row -> kElements / 2 half2; half2 i holds elements 2i and 2i + 1, of int4 i and i + 4
//   ExpandPair   the same word of two rows -> kElements half2; half2 d holds element d of row a and of row b
//   ExpandKey    as ExpandWord for products with a query: element e is in half KeyPlace(e), and is
//                (code + kKeyBias) * KeyUnit(e). The integer formats leave the offset code in the low bits of a half,
//                where it is that many 2^-24: a query then has 1 / KeyUnit folded in, and kKeyBias times its sum is
//                subtracted from the product. Sums over many tokens, as V's, would lose bits to the bias.

#pragma once

#include <cstdint>

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "contrib_ops/cuda/bert/kv_cache_quant/format.h"

namespace onnxruntime {
namespace contrib {
namespace kv_cache_quant {

namespace codec_internal {

__device__ __forceinline__ uint32_t SubtractHalf2(uint32_t a, uint32_t b) {
  uint32_t y;
  asm("sub.f16x2 %0, %1, %2;\n" : "=r"(y) : "r"(a), "r"(b));
  return y;
}

__device__ __forceinline__ uint32_t FmaHalf2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t y;
  asm("fma.rn.f16x2 %0, %1, %2, %3;\n" : "=r"(y) : "r"(a), "r"(b), "r"(c));
  return y;
}

// (x & mask) | bits in one instruction.
template <uint32_t kMask, uint32_t kBits>
__device__ __forceinline__ uint32_t Insert(uint32_t x) {
  uint32_t y;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;\n" : "=r"(y) : "r"(x), "n"(kMask), "n"(kBits));
  return y;
}

// (x ^ flip) & mask in one instruction.
template <uint32_t kFlip, uint32_t kMask>
__device__ __forceinline__ uint32_t FlipAndMask(uint32_t x) {
  uint32_t y;
  asm("lop3.b32 %0, %1, %2, %3, 0x28;\n" : "=r"(y) : "r"(x), "n"(kFlip), "n"(kMask));
  return y;
}

// ExpandPair of a format of one byte an element.
template <typename ByteCodec>
__device__ __forceinline__ void ExpandBytePair(uint32_t a, uint32_t b, uint32_t (&out)[4]) {
  uint32_t half[2];
  ByteCodec::ExpandWord(__byte_perm(a, b, 0x5140), half);
  out[0] = half[0];
  out[1] = half[1];
  ByteCodec::ExpandWord(__byte_perm(a, b, 0x7362), half);
  out[2] = half[0];
  out[3] = half[1];
}

}  // namespace codec_internal

template <KvFormat kFormat>
struct Codec;

template <>
struct Codec<KvFormat::kInt8> {
  static constexpr int kBits = 8;
  static constexpr int kElements = 4;

  // Offset binary behind the exponent of 1024: 0x6400 + u is the half 1024 + u.
  static __device__ __forceinline__ void ExpandWord(uint32_t word, uint32_t (&out)[2]) {
    const uint32_t u = word ^ 0x80808080u;
    out[0] = codec_internal::SubtractHalf2(__byte_perm(u, 0x64646464u, 0x4140), 0x64806480u);
    out[1] = codec_internal::SubtractHalf2(__byte_perm(u, 0x64646464u, 0x4342), 0x64806480u);
  }

  static constexpr float kKeyBias = 128.0f;
  __host__ __device__ static constexpr int KeyPlace(int e) { return e % 2 * 2 + e / 2; }
  __host__ __device__ static constexpr float KeyUnit(int) { return 0x1p-24f; }

  static __device__ __forceinline__ void ExpandKey(uint32_t word, uint32_t (&out)[2]) {
    out[0] = codec_internal::FlipAndMask<0x00800080u, 0x00FF00FFu>(word);
    out[1] = codec_internal::FlipAndMask<0x00800080u, 0x00FF00FFu>(word >> 8);
  }

  static __device__ __forceinline__ void ExpandPair(uint32_t a, uint32_t b, uint32_t (&out)[4]) {
    codec_internal::ExpandBytePair<Codec>(a, b, out);
  }
};

template <>
struct Codec<KvFormat::kFloat8E4M3FN> {
  static constexpr int kBits = 8;
  static constexpr int kElements = 4;

  static __device__ __forceinline__ void ExpandWord(uint32_t word, uint32_t (&out)[2]) {
#if __CUDA_ARCH__ >= 890
    const auto low = static_cast<unsigned short>(word & 0xFFFFu);
    const auto high = static_cast<unsigned short>(word >> 16);
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;\n" : "=r"(out[0]) : "h"(low));
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;\n" : "=r"(out[1]) : "h"(high));
#else
    out[0] = ExpandTwo(__byte_perm(word, 0u, 0x1404));
    out[1] = ExpandTwo(__byte_perm(word, 0u, 0x3424));
#endif
  }

  static constexpr float kKeyBias = 0.0f;
  __host__ __device__ static constexpr int KeyPlace(int e) { return e; }
  __host__ __device__ static constexpr float KeyUnit(int) { return 1.0f; }

  static __device__ __forceinline__ void ExpandKey(uint32_t word, uint32_t (&out)[2]) { ExpandWord(word, out); }

  static __device__ __forceinline__ void ExpandPair(uint32_t a, uint32_t b, uint32_t (&out)[4]) {
    codec_internal::ExpandBytePair<Codec>(a, b, out);
  }

#if __CUDA_ARCH__ < 890
  // Codes in bytes 1 and 3. Exponent and mantissa move right by one; the bias differs by 8, hence * 256. The NaN code
  // would come out as 480.
  static __device__ __forceinline__ uint32_t ExpandTwo(uint32_t x) {
    const uint32_t bits = (x & 0x80008000u) | ((x & 0x7F007F00u) >> 1);
    uint32_t y;
    asm("mul.f16x2 %0, %1, %2;\n" : "=r"(y) : "r"(bits), "r"(0x5C005C00u));
    if (__vcmpeq2(x & 0x7F007F00u, 0x7F007F00u) != 0u) {
      if ((x & 0x00007F00u) == 0x00007F00u) y |= 0x00007FFFu;
      if ((x & 0x7F000000u) == 0x7F000000u) y |= 0x7FFF0000u;
    }
    return y;
  }
#endif
};

template <>
struct Codec<KvFormat::kInt4> {
  static constexpr int kBits = 4;
  static constexpr int kElements = 8;

  // Nibbles 0 and 4 (and 1 and 5 times 16) behind the exponent of 1024; the other four after a shift.
  static __device__ __forceinline__ void ExpandWord(uint32_t word, uint32_t (&out)[4]) {
    using codec_internal::FmaHalf2;
    using codec_internal::Insert;
    using codec_internal::SubtractHalf2;
    const uint32_t upper = word >> 8;
    out[0] = SubtractHalf2(Insert<0x000F000Fu, 0x64006400u>(word), 0x64086408u);          // - 1032
    out[1] = FmaHalf2(Insert<0x00F000F0u, 0x64006400u>(word), 0x2C002C00u, 0xD480D480u);  // / 16 - 72
    out[2] = SubtractHalf2(Insert<0x000F000Fu, 0x64006400u>(upper), 0x64086408u);
    out[3] = FmaHalf2(Insert<0x00F000F0u, 0x64006400u>(upper), 0x2C002C00u, 0xD480D480u);
  }

  static constexpr float kKeyBias = 8.0f;
  __host__ __device__ static constexpr int KeyPlace(int e) { return e % 4 * 2 + e / 4; }
  __host__ __device__ static constexpr float KeyUnit(int e) { return e % 2 == 0 ? 0x1p-24f : 0x1p-20f; }

  static __device__ __forceinline__ void ExpandKey(uint32_t word, uint32_t (&out)[4]) {
    const uint32_t upper = word >> 8;
    out[0] = word & 0x000F000Fu;
    out[1] = word & 0x00F000F0u;
    out[2] = upper & 0x000F000Fu;
    out[3] = upper & 0x00F000F0u;
  }

  static __device__ __forceinline__ void ExpandPair(uint32_t a, uint32_t b, uint32_t (&out)[8]) {
    uint32_t half[4];
    ExpandWord(__byte_perm(a, b, 0x5410), half);
#pragma unroll
    for (int i = 0; i < 4; ++i) out[i] = half[i];
    ExpandWord(__byte_perm(a, b, 0x7632), half);
#pragma unroll
    for (int i = 0; i < 4; ++i) out[4 + i] = half[i];
  }
};

// PER_TOKEN scale of a row as it reads back from the scale cache.
__device__ __forceinline__ float TokenScale(float amax, float qmax, bool is_half) {
  const float s = __fdiv_rn(amax, qmax);
  if (!is_half) return s;
  if (amax == 0.0f) return 0.0f;
  if (!isfinite(s)) return s;
  return __half2float(__float2half_rn(fminf(fmaxf(s, kHalfScaleMin), kHalfScaleMax)));
}

// Code of y = x / scale, as an int8 or int4 number or an fp8 byte. per_token: clamp symmetrically.
__device__ __forceinline__ int32_t EncodeQuotient(float y, KvFormat format, bool per_token) {
  if (format == KvFormat::kFloat8E4M3FN) {
    if (isnan(y)) return 0x7F;
    return static_cast<int32_t>(__nv_cvt_float_to_fp8(y, __NV_SATFINITE, __NV_E4M3));
  }
  if (isnan(y)) return 0;
  const float high = format == KvFormat::kInt8 ? 127.0f : 7.0f;
  const float low = per_token ? -high : -high - 1.0f;
  return static_cast<int32_t>(rintf(fminf(fmaxf(y, low), high)));
}

// Code of x. per_token: 0 for a scale that is not finite.
__device__ __forceinline__ int32_t EncodeElement(float x, float scale, KvFormat format, bool per_token) {
  if (scale == 0.0f || (per_token && !isfinite(scale))) return 0;
  return EncodeQuotient(__fdiv_rn(x, scale), format, per_token);
}

}  // namespace kv_cache_quant
}  // namespace contrib
}  // namespace onnxruntime
