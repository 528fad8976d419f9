// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
//
// Parts of query rows, as decode blocks add them up, and the output that comes of them.

#pragma once

#include "contrib_ops/cuda/bert/kv_cache_quant/unit.cuh"

namespace onnxruntime {
namespace contrib {
namespace kv_cache_quant {

// Four elements of a row, of some of its tokens: the sums refer to the maximum. A denominator of 0: of no token.
struct RowPart {
  static constexpr unsigned kAllLanes = 0xFFFFFFFFu;

  float maximum = -INFINITY;
  float denominator = 0.0f;
  float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};

  __device__ __forceinline__ void Scale(float by) {
    denominator *= by;
    sum.x *= by;
    sum.y *= by;
    sum.z *= by;
    sum.w *= by;
  }

  __device__ __forceinline__ void AddSum(const float4& x, float by) {
    sum.x += x.x * by;
    sum.y += x.y * by;
    sum.z += x.z * by;
    sum.w += x.w * by;
  }

  __device__ __forceinline__ void Add(float2 stats, const float4& x) {
    if (stats.y == 0.0f) return;
    const float top = fmaxf(maximum, stats.x);
    if (denominator != 0.0f) Scale(Exp2(maximum - top));
    // A maximum or denominator that is not finite becomes NaN here or in the product.
    const float weight = Exp2(stats.x - top);
    maximum = top;
    denominator += weight * stats.y;
    AddSum(x, weight);
  }

  // Adds what those lanes have whose number differs in the bits from `first`, a power of two, on. Of one maximum.
  __device__ __forceinline__ void SumLanes(int first) {
#pragma unroll
    for (int mask = 16; mask >= 4; mask /= 2) {
      if (mask < first) continue;
      denominator += __shfl_xor_sync(kAllLanes, denominator, mask);
      sum.x += __shfl_xor_sync(kAllLanes, sum.x, mask);
      sum.y += __shfl_xor_sync(kAllLanes, sum.y, mask);
      sum.z += __shfl_xor_sync(kAllLanes, sum.z, mask);
      sum.w += __shfl_xor_sync(kAllLanes, sum.w, mask);
    }
  }

  // Likewise, each of a maximum of its own.
  __device__ __forceinline__ void AddLanes(int first) {
    float top = maximum;
#pragma unroll
    for (int mask = 16; mask >= 4; mask /= 2) {
      if (mask >= first) top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, mask));
    }
    if (denominator != 0.0f) Scale(Exp2(maximum - top));
    maximum = top;
    SumLanes(first);
  }
};

// Writes elements [d, d + 4) of an output row, times V's static scale. vectors: plan.activation_vectors.
__device__ __forceinline__ void WriteElements(const GqaParams& p, bool vectors, int64_t b, int kv_head,
                                              const QueryRow& row, int d, float4 x) {
  if (d >= p.head_size) return;
  if (p.v.mode != KvScaleMode::kPerToken) {
    x.x *= StaticValueScale(p, kv_head, d);
    x.y *= StaticValueScale(p, kv_head, d + 1);
    x.z *= StaticValueScale(p, kv_head, d + 2);
    x.w *= StaticValueScale(p, kv_head, d + 3);
  }
  const int64_t at = OutputRow(p, b, row.s, row.head) + d;
  if (vectors) {
    const bool is_half = p.activation == ActivationType::kHalf;
    *reinterpret_cast<uint2*>(static_cast<uint16_t*>(p.output) + at) =
        make_uint2(is_half ? PackHalf(x.x, x.y) : PackBFloat16(x.x, x.y),
                   is_half ? PackHalf(x.z, x.w) : PackBFloat16(x.z, x.w));
    return;
  }
  StoreActivation(p.output, at, x.x, p.activation);
  StoreActivation(p.output, at + 1, x.y, p.activation);
  StoreActivation(p.output, at + 2, x.z, p.activation);
  StoreActivation(p.output, at + 3, x.w, p.activation);
}

// Finishes elements [d, d + 4) of an output row.
__device__ __forceinline__ void WriteRowPart(const GqaParams& p, bool vectors, int64_t b, int kv_head, int row, int d,
                                             const RowPart& part) {
  const QueryRow place(p, kv_head, row);
  const float sink = SinkLog2(p, place.head);
  const float top = fmaxf(part.maximum, sink);
  const float own = Exp2(part.maximum - top);
  const float inverse = __fdividef(own, part.denominator * own + Exp2(sink - top));
  WriteElements(p, vectors, b, kv_head, place, d,
                make_float4(part.sum.x * inverse, part.sum.y * inverse, part.sum.z * inverse, part.sum.w * inverse));
}

}  // namespace kv_cache_quant
}  // namespace contrib
}  // namespace onnxruntime
