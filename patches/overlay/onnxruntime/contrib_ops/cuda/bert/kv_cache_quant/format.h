// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
//
// The byte format of a quantized KV cache. This comment is the one normative description; every
// kernel, on every execution provider, writes and reads exactly this.
//
// Cache      K and V are each one dense BNSH array of codes, (B, Hkv, C, row), row contiguous.
//            int8            row = D bytes, one two's complement code per element
//            float8e4m3fn    row = D bytes, one e4m3fn code per element (no infinity, 0x7F and 0xFF are NaN)
//            int4            row = D / 2 bytes; byte j holds elements 2j and 2j + 1:
//                            (code[2j] + 8) | (code[2j + 1] + 8) << 4
// Scale      PER_TENSOR      float, (1)
//            PER_CHANNEL     float, (1, Hkv, 1, D)
//            PER_TOKEN       float or float16, (B, Hkv, C, 1): the scale cache, written with each row
// Value      x' = code * scale
//
// PER_TOKEN  amax = max |x| over the D elements of one (token, KV head), fp32, after rotary; NaN propagates.
//            s = amax / qmax, one fp32 division; qmax = 127 (int8), 448 (fp8), 7 (int4).
//            Stored as float: s. Stored as float16: 0 when amax is 0; a finite s is clamped to
//            [2^-24, 65504] and rounded to nearest even; Inf and NaN are kept.
//            code = clamp(round(x / scale), -qmax, qmax) with the scale as stored, one fp32 division, ties to
//            even. fp8: nearest e4m3 of x / scale, ties to even, saturating at 448.
//            scale 0: all codes 0. scale Inf or NaN: all codes 0, so that the row reads back as NaN.
// Static     code = clamp(round(x / scale), lowest, highest): int8 [-128, 127], int4 [-8, 7], fp8 saturates.
//            scale 0: code 0. NaN: int code 0, fp8 code 0x7F. +-Inf saturates.
//
// Rotary     fp32; each product is rounded before the sum (no fused multiply-add), and the result is not
//            rounded to the activation type before amax and codes are taken.
//
// Rows at and beyond a sequence's length are never read and never written.

#pragma once

#include <cstddef>
#include <cstdint>

namespace onnxruntime {
namespace contrib {
namespace kv_cache_quant {

enum class KvFormat : int32_t { kInt8 = 0,
                                kFloat8E4M3FN = 1,
                                kInt4 = 2 };

// Values follow upstream's KVQuantizationType.
enum class KvScaleMode : int32_t { kNone = 0,
                                   kPerTensor = 1,
                                   kPerChannel = 2,
                                   kPerToken = 3 };

// Bytes of one cache row (one token of one KV head).
constexpr size_t RowBytes(KvFormat format, size_t head_size) {
  return format == KvFormat::kInt4 ? (head_size + 1) / 2 : head_size;
}

// Divisor of amax that gives the PER_TOKEN scale; also the largest PER_TOKEN code.
constexpr float QMax(KvFormat format) {
  return format == KvFormat::kInt8 ? 127.0f : format == KvFormat::kFloat8E4M3FN ? 448.0f
                                                                                : 7.0f;
}

// Smallest and largest finite scale that a float16 scale cache stores for a row with amax > 0.
constexpr float kHalfScaleMin = 5.9604644775390625e-08f;  // 2^-24
constexpr float kHalfScaleMax = 65504.0f;

// Head sizes and query heads per KV head that a quantized cache supports.
constexpr int kMaxHeadSize = 256;
constexpr int kMaxGroupSize = 64;

}  // namespace kv_cache_quant
}  // namespace contrib
}  // namespace onnxruntime
