// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
//
// The merge of a unit's splits by the block that ends last, in place of a launch: merge.cu says what is computed.

#pragma once

#include "contrib_ops/cuda/bert/kv_cache_quant/unit.cuh"

namespace onnxruntime {
namespace contrib {
namespace kv_cache_quant {

// Whether this block is the last of the unit's `parts` blocks to get here; what the others wrote before is then
// visible. The counter is zero again afterwards. All threads take part; it is a barrier.
__device__ __forceinline__ bool IsLastOfUnit(uint32_t* counter, int parts) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    uint32_t before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;\n" : "=r"(before) : "l"(counter) : "memory");
    last = before + 1 == static_cast<uint32_t>(parts);
    if (last) *counter = 0;
  }
  __syncthreads();
  return last;
}

// A warp merges a row, or a share of its parts where there are more warps than rows. Lanes have four elements of the
// row each, at D 256 twice, and at D 64 every second part.
template <int kHeadSize, int kThreads>
struct PartMerge {
  static constexpr int kQuads = kHeadSize / 4;
  static constexpr int kRowLanes = kQuads < 32 ? kQuads : 32;
  static constexpr int kLaneParts = 32 / kRowLanes;
  static constexpr int kVectors = kQuads / kRowLanes;
  static constexpr int kReads = 8 / kVectors;  // parts whose numerators are on their way together
  static_assert(kMaxMergeSplits <= 32, "a lane has the statistics of a part");
  static constexpr int kWarps = kThreads / 32;
  static constexpr unsigned kAllLanes = 0xFFFFFFFFu;

  // The weight of part `lane` of a row, over the denominator, from its statistics; negative: a part without a token of
  // the row.
  static __device__ __forceinline__ float Weigh(float sink, float2 stats) {
    float top = fmaxf(sink, stats.x);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, step));
    // A maximum or denominator that is not finite becomes NaN here or in the product.
    const bool empty = stats.y == 0.0f;
    const float weight = Exp2(stats.x - top);
    float sum = empty ? 0.0f : weight * stats.y;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
    return empty ? -1.0f : weight * __fdividef(1.0f, sum + Exp2(sink - top));
  }

  // Numerators of parts begin, begin + step, ...; `from`: of part 0, this lane's.
  static __device__ __forceinline__ void Read(const float4* from, int stride, int begin, int step, int parts,
                                              float4 (&x)[kReads][kVectors]) {
    from += begin * stride;
#pragma unroll
    for (int i = 0; i < kReads; ++i) {
      if (begin + i * step < parts) {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) x[i][v] = __ldcg(from + v * kRowLanes);
      }
      asm volatile("" : "+l"(from));  // one pointer that moves on, not one for every read
      from += step * stride;
    }
  }

  static __device__ __forceinline__ void Add(const float4 (&x)[kReads][kVectors], float weight, int begin, int step,
                                             int parts, float4 (&sum)[kVectors]) {
#pragma unroll
    for (int i = 0; i < kReads; ++i) {
      const int part = begin + i * step;
      const float w = __shfl_sync(kAllLanes, weight, part % 32);
      if (part >= parts || w < 0.0f) continue;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        sum[v].x += x[i][v].x * w;
        sum[v].y += x[i][v].y * w;
        sum[v].z += x[i][v].z * w;
        sum[v].w += x[i][v].w * w;
      }
    }
  }

  // Adds what lane + kRowLanes has.
  static __device__ __forceinline__ void AddLanes(float4& x) {
    if constexpr (kLaneParts == 2) {
      x.x += __shfl_xor_sync(kAllLanes, x.x, kRowLanes);
      x.y += __shfl_xor_sync(kAllLanes, x.y, kRowLanes);
      x.z += __shfl_xor_sync(kAllLanes, x.z, kRowLanes);
      x.w += __shfl_xor_sync(kAllLanes, x.w, kRowLanes);
    }
  }

  static __device__ __forceinline__ void Write(const GqaParams& p, int64_t b, int kv_head, int row, int d,
                                               const float4& x) {
    const QueryRow place(p, kv_head, row);
    const int64_t at = OutputRow(p, b, place.s, place.head);
    const float elements[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (d + i >= p.head_size) break;
      StoreActivation(p.output, at + d + i, elements[i] * StaticValueScale(p, kv_head, d + i), p.activation);
    }
  }

  // The unit's rows of the output. sums: shared, (kThreads, kVectors).
  static __device__ __forceinline__ void Run(const GqaParams& p, const GqaPlan& plan, int64_t unit, int64_t b,
                                             int kv_head, int parts, int rows, float4* sums) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int groups = rows < kWarps ? kWarps / rows : 1;
    const int group = groups > 1 ? warp / rows : 0;
    const int step = groups * kLaneParts;
    const int first = group * kLaneParts + lane / kRowLanes;
    const int64_t partial_row = PartialRow(plan, unit, 0, 0);
#pragma unroll 1
    for (int row = warp - group * rows; row < rows; row += kWarps) {
      float4 sum[kVectors] = {};
      if (group < groups) {
        const auto* const stats_of = p.partial_stats + partial_row + row;
        const auto* const numerators =
            reinterpret_cast<const float4*>(p.partial_out) + (partial_row + row) * kQuads + lane % kRowLanes;
        const int stride = plan.unit_rows * kQuads;  // of a part, in float4
        const float2 stats = lane < parts ? __ldcg(stats_of + lane * plan.unit_rows) : make_float2(-INFINITY, 0.0f);
        float4 x[kReads][kVectors] = {};
        Read(numerators, stride, first, step, parts, x);
        const float weight = Weigh(SinkLog2(p, kv_head * p.group_size + row % p.group_size), stats);
        Add(x, weight, first, step, parts, sum);
#pragma unroll 1
        for (int begin = first + kReads * step; __any_sync(kAllLanes, begin < parts); begin += kReads * step) {
          Read(numerators, stride, begin, step, parts, x);
          Add(x, weight, begin, step, parts, sum);
        }
#pragma unroll
        for (int v = 0; v < kVectors; ++v) AddLanes(sum[v]);
      }
      if (groups > 1) {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) sums[v * kThreads + threadIdx.x] = sum[v];
        __syncthreads();
        if (group != 0) return;
#pragma unroll 1
        for (int i = 1; i < groups; ++i) {
#pragma unroll
          for (int v = 0; v < kVectors; ++v) {
            const float4 x = sums[v * kThreads + threadIdx.x + 32 * rows * i];
            sum[v].x += x.x;
            sum[v].y += x.y;
            sum[v].z += x.z;
            sum[v].w += x.w;
          }
        }
      }
      if (lane >= kRowLanes) continue;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) Write(p, b, kv_head, row, 4 * (v * kRowLanes + lane), sum[v]);
    }
  }
};

}  // namespace kv_cache_quant
}  // namespace contrib
}  // namespace onnxruntime
