// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
//
// The merge of a unit's splits where its blocks are a cluster (sm_90 and later): each block owns a slice of the unit's
// results and finishes it; the others send it their parts of the slice, into its shared memory, as soon as they have
// them. It waits for as many bytes, so nothing but the data itself goes from block to block.

#pragma once

#include "contrib_ops/cuda/bert/kv_cache_quant/row_part.cuh"
#include "contrib_ops/cuda/bert/kv_cache_quant/shared_copy.cuh"

namespace onnxruntime {
namespace contrib {
namespace kv_cache_quant {

// All threads take part in both. After the wait all of the cluster's threads have been at the arrival. Without an order
// for memory, which would cost a fence: what a block has read of its shared memory before is in registers, and what it
// writes to others is waited for by its bytes.
__device__ __forceinline__ void ArriveInCluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\n" ::: "memory");
#endif
}

__device__ __forceinline__ void WaitForCluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.aligned;\n" ::: "memory");
#endif
}

// What a block gets. items: of its slice, kItems in all slices; an item is four elements of a row.
template <int kItems>
struct ClusterInbox {
  // Slices are powers of two, up to twice what they would be otherwise. (sending block, item)
  float4 sums[2 * kItems];
  float2 stats[2 * kItems];
};

// The slices of a unit of `items` items in a cluster of `blocks`.
struct ClusterSlices {
  int bits;   // log2 of the items of a slice
  int items;  // of this block's slice

  __device__ __forceinline__ ClusterSlices(int blocks, int rank, int all_items) {
    // The smallest that is enough: the logarithms alone may give twice as much.
    bits = max(CeilLog2(all_items) - CeilLog2(blocks) + 1, 0);
    if (bits > 0 && blocks << (bits - 1) >= all_items) --bits;
    items = min(max(all_items - (rank << bits), 0), 1 << bits);
  }
};

namespace cluster_internal {

// The address of a block's shared variable in block `rank` of the cluster.
__device__ __forceinline__ uint32_t AddressIn(const void* variable, int rank) {
  uint32_t at = 0;
#if __CUDA_ARCH__ >= 900
  asm("mapa.shared::cluster.u32 %0, %1, %2;\n" : "=r"(at) : "r"(SharedAddress(variable)), "r"(rank));
#endif
  return at;
}

}  // namespace cluster_internal

// Before the block's arrival in the cluster, by one thread.
__device__ __forceinline__ void OpenInbox(uint64_t* barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "mbarrier.init.shared::cta.b64 [%0], 1;\n"
      "fence.mbarrier_init.release.cluster;\n" ::"r"(SharedAddress(barrier))
      : "memory");
#endif
}

// Says what will come: `count` items. By one thread, before or after they come.
__device__ __forceinline__ void ExpectItems(uint64_t* barrier, int count) {
#if __CUDA_ARCH__ >= 900
  const auto bytes = static_cast<uint32_t>(count * static_cast<int>(sizeof(float4) + sizeof(float2)));
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(
                   SharedAddress(barrier)),
               "r"(bytes)
               : "memory");
#endif
}

// Sends an item to the inbox at this address, at place `index`, of block `to`.
template <int kItems>
__device__ __forceinline__ void SendItem(ClusterInbox<kItems>& inbox, uint64_t* barrier, int to, int index,
                                         const RowPart& part) {
#if __CUDA_ARCH__ >= 900
  const uint32_t signal = cluster_internal::AddressIn(barrier, to);
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];\n" ::"r"(
          cluster_internal::AddressIn(inbox.sums + index, to)),
      "f"(part.sum.x), "f"(part.sum.y), "f"(part.sum.z), "f"(part.sum.w), "r"(signal)
      : "memory");
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1,%2}, [%3];\n" ::"r"(
          cluster_internal::AddressIn(inbox.stats + index, to)),
      "f"(part.maximum), "f"(part.denominator), "r"(signal)
      : "memory");
#endif
}

// Until all that is expected has come.
__device__ __forceinline__ void WaitForItems(uint64_t* barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n.reg .pred done;\n"
      "wait_for_items:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], 0;\n"
      "@!done bra wait_for_items;\n}\n" ::"r"(SharedAddress(barrier))
      : "memory");
#endif
}

// This block's slice of the output: of parts that the first `parts` blocks have sent.
template <typename Shape, int kItems>
__device__ __forceinline__ void FinishSlice(const GqaParams& p, bool vectors, int64_t b, int kv_head, int blocks,
                                            int rank, int parts, int rows, const ClusterInbox<kItems>& inbox,
                                            uint64_t* barrier) {
  constexpr int kRowItems = Shape::kHeadSize / 4;
  const ClusterSlices slices(blocks, rank, rows * kRowItems);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  // Lanes for the parts of an item, and for as many items.
  const int width = blocks <= 2 ? 2 : blocks <= 4 ? 4
                                                  : 8;
  const int lane_items = 32 / width;
  const int from = lane / lane_items;
  const int first = static_cast<int>(threadIdx.x) / 32 * lane_items;
  if (first >= slices.items) return;
  if (threadIdx.x == 0) ExpectItems(barrier, slices.items * parts);
  WaitForItems(barrier);
#pragma unroll 1
  for (int begin = first; begin < slices.items; begin += Shape::kThreads / width) {
    const int item = begin + lane % lane_items;
    const bool used = item < slices.items;
    RowPart part;
    if (used && from < parts) {
      const int index = (from << slices.bits) + item;
      part.Add(inbox.stats[index], inbox.sums[index]);
    }
    part.AddLanes(lane_items);
    const int place = (rank << slices.bits) + item;
    if (used && from == 0) {
      WriteRowPart(p, vectors, b, kv_head, place / kRowItems, place % kRowItems * 4, part);
    }
  }
}

}  // namespace kv_cache_quant
}  // namespace contrib
}  // namespace onnxruntime
