// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
//
// The merge of a unit's splits where its blocks are a cluster (sm_90 and later): they read each other's results from
// shared memory, each block a slice of the unit's rows.

#pragma once

#include "contrib_ops/cuda/bert/kv_cache_quant/row_part.cuh"

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
