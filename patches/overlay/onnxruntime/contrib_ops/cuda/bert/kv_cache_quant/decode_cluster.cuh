// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
//
// The merge of a unit's splits where its blocks are a cluster (sm_90 and later): they read each other's results from
// shared memory, each block a slice of the unit's rows.

#pragma once

#include "contrib_ops/cuda/bert/kv_cache_quant/unit.cuh"

namespace onnxruntime {
namespace contrib {
namespace kv_cache_quant {

// All threads take part in all of these. What was written to shared memory before the arrival can be read by the
// cluster's other blocks after the wait.
__device__ __forceinline__ void ArriveInCluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;\n" ::: "memory");
#endif
}

__device__ __forceinline__ void WaitForCluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;\n" ::: "memory");
#endif
}

// The address of a block's shared variable in block `rank` of the cluster.
__device__ __forceinline__ uint32_t ClusterAddress(const void* variable, int rank) {
  uint32_t at = 0;
#if __CUDA_ARCH__ >= 900
  const auto own = static_cast<uint32_t>(__cvta_generic_to_shared(variable));
  asm("mapa.shared::cluster.u32 %0, %1, %2;\n" : "=r"(at) : "r"(own), "r"(rank));
#endif
  return at;
}

__device__ __forceinline__ float4 LoadFromCluster4(uint32_t address) {
  float4 x = {};
#if __CUDA_ARCH__ >= 900
  asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];\n"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(address));
#endif
  return x;
}

__device__ __forceinline__ float2 LoadFromCluster2(uint32_t address) {
  float2 x = {};
#if __CUDA_ARCH__ >= 900
  asm volatile("ld.shared::cluster.v2.f32 {%0,%1}, [%2];\n" : "=f"(x.x), "=f"(x.y) : "r"(address));
#endif
  return x;
}

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
  const int s = p.sequence_length == 1 ? 0 : row / p.group_size;
  const int head = kv_head * p.group_size + row - s * p.group_size;
  const float sink = SinkLog2(p, head);
  const float top = fmaxf(part.maximum, sink);
  const float own = Exp2(part.maximum - top);
  const float inverse = __fdividef(own, part.denominator * own + Exp2(sink - top));
  const int64_t at = OutputRow(p, b, s, head);
  const float sums[4] = {part.sum.x, part.sum.y, part.sum.z, part.sum.w};
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    if ((e & (width - 1)) != (lane & (width - 1) & 3) || d + e >= p.head_size) continue;
    StoreActivation(p.output, at + d + e, sums[e] * inverse * StaticValueScale(p, kv_head, d + e), p.activation);
  }
}

// A block's results in its shared memory: of four elements each, in the order of Warp's accumulators.
template <typename Warp>
struct ClusterMerge {
  static constexpr int kRows = Warp::Shape::kRows;
  static constexpr int kThreads = Warp::Shape::kThreads;
  static constexpr int kQuads = Warp::Shape::kElementTiles;  // float4 of one lane: 4 elements of one of its two rows
  static constexpr int kSlots = kRows / 8 * kQuads * 32;

  // Four elements of a row, by number: of the lanes that have rows of the unit, which are those with lane % 4 below
  // 2^column_bits.
  struct Item {
    int slot;
    int row;
    int d;
    __device__ __forceinline__ Item(int item, int column_bits) {
      const int column = item & ((1 << column_bits) - 1);
      const int r = item >> column_bits & 7;
      const int quad = item >> (column_bits + 3);  // counted through the row tiles
      slot = quad * 32 + 4 * r + column;
      row = quad / kQuads * 8 + 2 * column + quad % 2;
      d = Warp::ElementOf(quad % kQuads / 2 * 4, r);
    }
  };

  // cluster: its blocks, of which the first `parts` have tokens; rank: this one. sums, stats: shared, of the block's
  // split; (kSlots) and (kRows).
  static __device__ __forceinline__ void Run(const GqaParams& p, int64_t b, int kv_head, int cluster, int rank,
                                             int parts, int rows, const float4* sums, const float2* stats) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int width = cluster <= 2 ? 2 : cluster <= 4 ? 4
                                                      : 8;
    const int column_bits = rows <= 2 ? 0 : rows <= 4 ? 1
                                                      : 2;
    const int items = kSlots / 4 << column_bits;
    const int share = (items + cluster - 1) / cluster;
    const int end = min(share * (rank + 1), items);
    const int step = kThreads / width;
    const int from = lane % width;

    ArriveInCluster();
    WaitForCluster();
#pragma unroll 1
    for (int begin = share * rank; begin < end; begin += step) {
      const int index = begin + static_cast<int>(threadIdx.x) / width;
      const Item item(min(index, end - 1), column_bits);
      const bool used = index < end && item.row < rows;
      RowPart part;
      if (used && from < parts) {
        part.Add(LoadFromCluster2(ClusterAddress(stats + item.row, from)),
                 LoadFromCluster4(ClusterAddress(sums + item.slot, from)));
      }
      part.AddLanes(width);
      if (used) WriteRowPart(p, b, kv_head, item.row, item.d, part, from, width);
    }
    ArriveInCluster();
    WaitForCluster();  // the other blocks have read this block's results
  }
};

}  // namespace kv_cache_quant
}  // namespace contrib
}  // namespace onnxruntime
