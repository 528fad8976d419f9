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

  __device__ __forceinline__ void Add(float2 stats, const float4& x) {
    if (stats.y == 0.0f) return;
    const float top = fmaxf(maximum, stats.x);
    if (denominator != 0.0f) Scale(Exp2(maximum - top));
    // A maximum or denominator that is not finite becomes NaN here or in the product.
    const float weight = Exp2(stats.x - top);
    maximum = top;
    denominator += weight * stats.y;
    sum.x += weight * x.x;
    sum.y += weight * x.y;
    sum.z += weight * x.z;
    sum.w += weight * x.w;
  }

  // Adds what the lanes have whose number differs in the bits of width - 1; width: a power of two, 8 at most.
  __device__ __forceinline__ void AddLanes(int width) {
    constexpr unsigned kAllLanes = 0xFFFFFFFFu;
    float top = maximum;
#pragma unroll
    for (int mask = 1; mask < 8; mask *= 2) {
      if (mask < width) top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, mask));
    }
    if (denominator != 0.0f) Scale(Exp2(maximum - top));
    maximum = top;
#pragma unroll
    for (int mask = 1; mask < 8; mask *= 2) {
      if (mask >= width) continue;
      denominator += __shfl_xor_sync(kAllLanes, denominator, mask);
      sum.x += __shfl_xor_sync(kAllLanes, sum.x, mask);
      sum.y += __shfl_xor_sync(kAllLanes, sum.y, mask);
      sum.z += __shfl_xor_sync(kAllLanes, sum.z, mask);
      sum.w += __shfl_xor_sync(kAllLanes, sum.w, mask);
    }
  }
};

// Finishes elements [d, d + 4) of an output row. Of `width` lanes that have the same, each writes a share.
__device__ __forceinline__ void WriteRowPart(const GqaParams& p, int64_t b, int kv_head, int row, int d,
                                             const RowPart& part, int lane = 0, int width = 1) {
  const QueryRow place(p, kv_head, row);
  const float sink = SinkLog2(p, place.head);
  const float top = fmaxf(part.maximum, sink);
  const float own = Exp2(part.maximum - top);
  const float inverse = __fdividef(own, part.denominator * own + Exp2(sink - top));
  const int64_t at = OutputRow(p, b, place.s, place.head);
  const float sums[4] = {part.sum.x, part.sum.y, part.sum.z, part.sum.w};
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    if ((e & (width - 1)) != (lane & (width - 1) & 3) || d + e >= p.head_size) continue;
    StoreActivation(p.output, at + d + e, sums[e] * inverse * StaticValueScale(p, kv_head, d + e), p.activation);
  }
}

}  // namespace kv_cache_quant
}  // namespace contrib
}  // namespace onnxruntime
