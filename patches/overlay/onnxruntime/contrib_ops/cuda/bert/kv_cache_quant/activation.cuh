// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
//
// Activations in memory (half or bfloat16, a runtime choice) as floats, and the length state of a batch entry.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "contrib_ops/cuda/bert/kv_cache_quant/params.h"

namespace onnxruntime {
namespace contrib {
namespace kv_cache_quant {

__device__ __forceinline__ float LoadActivation(const void* base, int64_t index, ActivationType type) {
  return type == ActivationType::kHalf ? __half2float(static_cast<const __half*>(base)[index])
                                       : __bfloat162float(static_cast<const __nv_bfloat16*>(base)[index]);
}

__device__ __forceinline__ void StoreActivation(void* base, int64_t index, float x, ActivationType type) {
  if (type == ActivationType::kHalf) {
    static_cast<__half*>(base)[index] = __float2half_rn(x);
  } else {
    static_cast<__nv_bfloat16*>(base)[index] = __float2bfloat16_rn(x);
  }
}

// An activation's 16 bits as a float and back. Both conversions and a selection: a branch would keep loads apart.
__device__ __forceinline__ float ActivationFromBits(uint16_t bits, ActivationType type) {
  const float half = __half2float(__ushort_as_half(bits));
  const float bfloat16 = __uint_as_float(static_cast<uint32_t>(bits) << 16);
  return type == ActivationType::kHalf ? half : bfloat16;
}

__device__ __forceinline__ uint16_t ActivationToBits(float x, ActivationType type) {
  return type == ActivationType::kHalf ? __half_as_ushort(__float2half_rn(x))
                                       : __bfloat16_as_ushort(__float2bfloat16_rn(x));
}

// Element d of one row of D activations at position `position`, after rotary where p.cos_cache is set. row points at
// the row's first element (row_offset elements from base). Each product is rounded before the sum: format.h.
__device__ __forceinline__ float LoadRotated(const GqaParams& p, const void* base, int64_t row_offset, int d,
                                             int64_t position) {
  const float x = LoadActivation(base, row_offset + d, p.activation);
  if (p.cos_cache == nullptr || d >= p.rotary_dim) return x;
  const int half = p.rotary_dim / 2;
  const int angle = p.rotary_interleaved ? d / 2 : (d < half ? d : d - half);
  const bool first = p.rotary_interleaved ? (d & 1) == 0 : d < half;
  const int partner = p.rotary_interleaved ? d ^ 1 : (first ? d + half : d - half);
  const float y = LoadActivation(base, row_offset + partner, p.activation);
  const int64_t at = position * half + angle;
  const float cos = LoadActivation(p.cos_cache, at, p.activation);
  const float sin = LoadActivation(p.sin_cache, at, p.activation);
  const float a = __fmul_rn(x, cos);
  const float b = __fmul_rn(y, sin);
  return first ? __fsub_rn(a, b) : __fadd_rn(a, b);
}

// Length state of one batch entry. Nothing of an invalid entry is read or written; its output is NaN.
struct SequenceState {
  int64_t past;   // P_b: rows in the cache before this call
  int64_t total;  // T_b: rows after it
  int32_t rows;   // new tokens that count; fewer than S where a prompt is padded on the right
  bool valid;
};

// last: the entry's seqlens_k.
__device__ __forceinline__ SequenceState SequenceOf(const GqaParams& p, int32_t last) {
  SequenceState q;
  q.total = static_cast<int64_t>(last) + 1;
  q.past = p.is_prompt ? 0 : q.total - p.sequence_length;
  const int64_t limit = p.is_prompt ? p.sequence_length : p.capacity;
  q.valid = q.total >= 0 && q.total <= limit && q.past >= 0 && q.past <= p.past_capacity;
  if (p.cos_cache != nullptr && q.total > p.rotary_rows) q.valid = false;
  q.rows = static_cast<int32_t>(p.is_prompt ? q.total : p.sequence_length);
  return q;
}

__device__ __forceinline__ SequenceState LoadSequence(const GqaParams& p, int64_t b) {
  return SequenceOf(p, p.seqlens_k[b]);
}

// Scale of the token in cache row `row` (units of rows of present) on a PER_TOKEN side.
__device__ __forceinline__ float LoadTokenScale(const KvSide& side, int64_t row) {
  return side.token_scale_is_half ? __half2float(static_cast<const __half*>(side.token_scale)[row])
                                  : static_cast<const float*>(side.token_scale)[row];
}

}  // namespace kv_cache_quant
}  // namespace contrib
}  // namespace onnxruntime
