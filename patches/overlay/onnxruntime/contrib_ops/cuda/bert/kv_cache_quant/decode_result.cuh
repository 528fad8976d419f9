// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
//
// What a decode block has in shared memory, and its result: the warps' results, added and sent where they belong.

#pragma once

#include "contrib_ops/cuda/bert/kv_cache_quant/decode_cluster.cuh"
#include "contrib_ops/cuda/bert/kv_cache_quant/decode_inputs.cuh"
#include "contrib_ops/cuda/bert/kv_cache_quant/decode_merge.cuh"
#include "contrib_ops/cuda/bert/kv_cache_quant/decode_tile.cuh"
#include "contrib_ops/cuda/bert/kv_cache_quant/kernel_launch.cuh"

namespace onnxruntime {
namespace contrib {
namespace kv_cache_quant {

enum class DecodeResult : int32_t { kOutput,
                                    kPartial,    // of a split, in memory
                                    kCluster };  // likewise, in the inbox of the block that finishes it

// Dynamic shared memory of a block.
template <typename Shape>
struct DecodeShared {
  static constexpr int kRowItems = Shape::kHeadSize / 4;  // float4 of a row
  using Query = QueryRows<Shape::kRowTiles, Shape::kHeadSize>;
  using Inbox = ClusterInbox<Shape::kRows * kRowItems>;

  union {
    Query query;  // until the attention is done
    Inbox inbox;  // from when all blocks of the cluster have arrived there
  };
  alignas(16) float maximum[Shape::kRows][Shape::kWarps];  // of each warp
  alignas(16) float denominator[Shape::kRows][Shape::kWarps];
  alignas(16) float norm[Shape::kWarps];
  // A warp's tiles of V, then its sums of 8 rows, in SumPlace.
  union Space {
    uint8_t tiles[2 * DecodeTile<Shape>::kValueTileBytes];
    float4 sums[8][kRowItems];
  };
  alignas(16) Space space[Shape::kWarps];
  uint64_t inbox_barrier;
  int32_t guess;     // the entry's seqlens_k before the wait for the kernel before
  int32_t last;      // and after it
  MergeRows merges;  // which of the unit's the block merges
  // What is needed again after the attention, which has no registers left for it.
  struct Place {
    uint32_t unit;
    uint32_t b;
    int kv_head;
    int split;
    int parts;  // TokenRange's
    DecodeResult result;
  };
  alignas(16) Place place;
};

// Where float4 `item` of row `row` of eight lies in a row of DecodeShared::sums: as it is written by lanes of four
// different `row / 2`, those get different banks.
__device__ __forceinline__ int SumPlace(int row, int item) { return item ^ row / 2; }

// NaN for all rows of an entry whose lengths do not fit.
__device__ __forceinline__ void WriteNanRows(const GqaParams& p, int64_t b, int kv_head, int rows) {
  for (int i = threadIdx.x; i < rows * p.head_size; i += blockDim.x) {
    const int row = i / p.head_size;
    const int64_t at = OutputRow(p, b, row / p.group_size, kv_head * p.group_size + row % p.group_size);
    StoreActivation(p.output, at + i % p.head_size, NAN, p.activation);
  }
}

template <int kCount>
__device__ __forceinline__ float Largest(const float (&x)[kCount]) {
  float top[4] = {x[0], x[1], x[2], x[3]};
#pragma unroll
  for (int i = 4; i < kCount; ++i) top[i % 4] = fmaxf(top[i % 4], x[i]);
  return fmaxf(fmaxf(top[0], top[1]), fmaxf(top[2], top[3]));
}

// Four elements of a row, of all warps: relative to the row's maximum. kGroups lanes share the warps; row: of all.
template <typename Shape, int kGroups>
__device__ __forceinline__ RowPart AddWarps(const DecodeShared<Shape>& shared, int row, int item, int group) {
  constexpr int kWarps = Shape::kWarps / kGroups;
  RowPart part;
  part.maximum = Largest(shared.maximum[row]);
  const float reference = part.maximum == -INFINITY ? 0.0f : part.maximum;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) {
    const int w = group * kWarps + i;
    // A warp without tokens has zeros, and a factor of 0; so has nothing of it to be NaN.
    const float shrink = Exp2(shared.maximum[row][w] - reference);
    part.denominator += shared.denominator[row][w] * shrink;
    part.AddSum(shared.space[w].sums[row % 8][SumPlace(row % 8, item)], shrink * shared.norm[w]);
  }
  part.SumLanes(32 / kGroups);
  return part;
}

// A warp's sums of eight rows into shared memory, those of `rows` rows in all.
template <typename Warp, typename Shared>
__device__ __forceinline__ void StoreSums(const Warp& warp, Shared& shared, int n, int rows) {
  __syncwarp();                // all lanes are through with their tiles of V, which lay there
  const int row = 2 * warp.c;  // and the next one
  if (8 * n + row >= rows) return;
  auto& sums = shared.space[threadIdx.x / 32].sums;
#pragma unroll
  for (int i = 0; i < Warp::Shape::kElementTiles; i += 2) {
    const int place = SumPlace(row, Warp::ElementOf(2 * i, warp.r) / 4);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      sums[row + e][place] =
          make_float4(warp.out[n][i][e], warp.out[n][i][2 + e], warp.out[n][i + 1][e], warp.out[n][i + 1][2 + e]);
    }
  }
}

// Adds the warps' results and writes the block's.
template <typename Warp>
__device__ __forceinline__ void WriteRows(const GqaParams& p, const GqaPlan& plan, const Warp& warp,
                                          DecodeShared<typename Warp::Shape>& shared, int rows, DecodeResult result) {
  using Shape = typename Warp::Shape;
  constexpr int kRowItems = DecodeShared<Shape>::kRowItems;
  // Lanes share the warps of an item where there would be none for some of four rows' items, or of a tile's.
  constexpr int kItems = (Shape::kRowTiles > 1 ? 8 : 4) * kRowItems;
  constexpr int kGroups = Shape::kThreads > kItems ? Shape::kThreads / kItems : 1;
  constexpr int kLaneItems = 32 / kGroups;
  static_assert(kRowItems % kLaneItems == 0, "the lanes of a warp have items of one row");
  const int warp_index = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < Shape::kRowTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (warp.r != 0) continue;
      shared.maximum[8 * n + 2 * warp.c + e][warp_index] = warp.maximum[n][e];
      shared.denominator[8 * n + 2 * warp.c + e][warp_index] = warp.denominator[n][e];
    }
  }
  if (lane == 0) shared.norm[warp_index] = warp.v_norm;
  const auto& at = shared.place;
  // Of each item of the tile: (row, item of the row, RowPart), in one of the lanes that share it.
  const auto for_each = [&](int n, auto deliver) {
    const int items = min(rows - 8 * n, 8) * kRowItems;
#pragma unroll 1
    for (int first = warp_index * kLaneItems; first < items; first += Shape::kThreads / kGroups) {
      const int row = 8 * n + first / kRowItems;
      const int item = first % kRowItems + lane % kLaneItems;
      const RowPart part = AddWarps<Shape, kGroups>(shared, row, item, lane / kLaneItems);
      if (lane < kLaneItems) deliver(row, item, part);
    }
  };
#pragma unroll
  for (int n = 0; n < Shape::kRowTiles; ++n) {
    if (n > 0) __syncthreads();  // the sums of the tile before are no longer needed
    StoreSums(warp, shared, n, rows);
    __syncthreads();
    if (kHasClusters && result == DecodeResult::kCluster) {
      if (n == 0) WaitForCluster();
      const ClusterSlices slices(plan.cluster, at.split, rows * kRowItems);
      const int from = at.split << slices.bits;
      for_each(n, [&](int row, int item, const RowPart& part) {
        const int place = row * kRowItems + item;
        SendItem(shared.inbox, &shared.inbox_barrier, place >> slices.bits,
                 from + (place & ((1 << slices.bits) - 1)), part);
      });
    } else if (result == DecodeResult::kPartial) {
      const UnitParts<Shape::kHeadSize> parts(p, plan, at.unit);
      for_each(n, [&](int row, int item, const RowPart& part) { parts.Write(at.split, row, item, part); });
    } else {
      for_each(n, [&](int row, int item, const RowPart& part) {
        WriteRowPart(p, plan.activation_vectors, at.b, at.kv_head, row, 4 * item, part);
      });
    }
  }
}

}  // namespace kv_cache_quant
}  // namespace contrib
}  // namespace onnxruntime
