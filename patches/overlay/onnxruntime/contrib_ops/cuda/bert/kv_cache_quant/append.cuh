// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
//
// One new row of K or V on its way into the cache, in a warp as lane_row.cuh has it.

#pragma once

#include "contrib_ops/cuda/bert/kv_cache_quant/codec.cuh"
#include "contrib_ops/cuda/bert/kv_cache_quant/lane_row.cuh"

namespace onnxruntime {
namespace contrib {
namespace kv_cache_quant {

// QMax, which is a function of the host.
template <KvFormat kFormat>
constexpr float kQMaxOf = QMax(kFormat);

namespace append_internal {

// x / scale, correctly rounded, with the steps that do not depend on x taken once. They are those of a division, whose
// check for exponents far apart is made on the scale alone: at the ends of [2^-60, 2^60] a quotient that is inexact
// is far below half a code.
template <int kElements>
__device__ __forceinline__ void DivideAll(const float (&x)[kElements], float scale, float (&y)[kElements]) {
  if (scale >= 0x1p-60f && scale <= 0x1p60f) {
    const float reciprocal = __frcp_rn(scale);
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      const float q = __fmul_rn(x[i], reciprocal);
      const float closer = __fmaf_rn(__fmaf_rn(-q, scale, x[i]), reciprocal, q);
      y[i] = copysignf(__fmaf_rn(__fmaf_rn(-closer, scale, x[i]), reciprocal, closer), x[i]);  // -0
    }
  } else {
#pragma unroll
    for (int i = 0; i < kElements; ++i) y[i] = __fdiv_rn(x[i], scale);
  }
}

}  // namespace append_internal

// A lane's scales of a side without token scales, of KV head h.
template <int kElements>
__device__ __forceinline__ void LoadStaticScales(const GqaParams& p, const KvSide& side, int h, int lane,
                                                 float (&scale)[kElements]) {
  const int d = lane * kElements;
  if (d >= p.head_size) return;
  const bool per_channel = side.mode == KvScaleMode::kPerChannel;
  const float* source = side.static_scale + (per_channel ? static_cast<int64_t>(h) * p.head_size + d : 0);
#pragma unroll
  for (int i = 0; i < kElements; ++i) scale[i] = __ldg(source + (per_channel ? i : 0));
}

// code <- a lane's codes of a row with its own scale; returns the scale as it reads back. All lanes take part.
template <KvFormat kFormat, int kElements>
__device__ __forceinline__ float EncodeTokenRow(const KvSide& side, const float (&x)[kElements],
                                                int32_t (&code)[kElements]) {
  const float scale = TokenScale(WarpAmax(x), kQMaxOf<kFormat>, side.token_scale_is_half);
  float y[kElements] = {};
  if (scale > 0.0f && isfinite(scale)) append_internal::DivideAll(x, scale, y);
#pragma unroll
  for (int i = 0; i < kElements; ++i) code[i] = EncodeQuotient(y[i], kFormat, true);
  return scale;
}

// The same with static scales.
template <KvFormat kFormat, int kElements>
__device__ __forceinline__ void EncodeStaticRow(const float (&scale)[kElements], const float (&x)[kElements],
                                                int32_t (&code)[kElements]) {
#pragma unroll
  for (int i = 0; i < kElements; ++i) code[i] = EncodeElement(x[i], scale[i], kFormat, false);
}

__device__ __forceinline__ void StoreTokenScale(const KvSide& side, int64_t cache_row, float scale) {
  if (side.token_scale_is_half) {
    static_cast<__half*>(side.token_scale)[cache_row] = __float2half_rn(scale);
  } else {
    static_cast<float*>(side.token_scale)[cache_row] = scale;
  }
}

// Stores a lane's codes at its place in a row: a byte each, or half a byte of int4.
template <KvFormat kFormat, int kElements>
__device__ __forceinline__ void StoreCodes(uint8_t* row, int lane, const int32_t (&code)[kElements]) {
  constexpr int kBits = Codec<kFormat>::kBits;
  uint32_t word[2] = {0u, 0u};
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    const auto bits = static_cast<uint32_t>(kFormat == KvFormat::kInt4 ? code[i] + 8 : code[i] & 0xFF);
    word[i * kBits / 32] |= bits << (i * kBits % 32);
  }
  constexpr int kBytes = kElements * kBits / 8;
  uint8_t* const to = row + lane * kBytes;
  if constexpr (kBytes == 8) {
    *reinterpret_cast<uint2*>(to) = make_uint2(word[0], word[1]);
  } else if constexpr (kBytes == 4) {
    *reinterpret_cast<uint32_t*>(to) = word[0];
  } else if constexpr (kBytes == 2) {
    *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(word[0]);
  } else {
    *to = static_cast<uint8_t>(word[0]);
  }
}

}  // namespace kv_cache_quant
}  // namespace contrib
}  // namespace onnxruntime
