// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
//
// The kernel around DecodeWarp (decode.cuh, which says what grid, block and shared memory are): finds the split, lays
// out Q, quantizes and appends the split's new rows, has the warps' results added and written, merges the splits.

#pragma once

#include "contrib_ops/cuda/bert/kv_cache_quant/decode.cuh"
#include "contrib_ops/cuda/bert/kv_cache_quant/decode_result.cuh"
#include "contrib_ops/cuda/bert/kv_cache_quant/kernel_launch.cuh"

namespace onnxruntime {
namespace contrib {
namespace kv_cache_quant {

// Has what the first tiles of a split need on its way to L2 while the kernel before ends: rows `row` on of the cache,
// of which that kernel may still write some, as L2 does not mind. One thread each of four warps.
template <typename Shape>
__device__ __forceinline__ void PrefetchTiles(const GqaParams& p, int64_t row, int64_t tokens) {
#if __CUDA_ARCH__ >= 900
  const int part = static_cast<int>(threadIdx.x) / 32;
  if (threadIdx.x % 32 != 0 || part >= 4) return;
  constexpr int64_t kTokens = Shape::kWarps * Shape::kTileTokens;
  const auto count = static_cast<int>(min(tokens, kTokens));
  const KvSide& side = part % 2 == 0 ? p.k : p.v;
  const int scale_bytes = side.token_scale_is_half ? 2 : 4;
  const int bytes = part < 2 ? Shape::kRowBytes : side.mode == KvScaleMode::kPerToken ? scale_bytes
                                                                                      : 0;
  const auto* const base = part < 2 ? side.codes : static_cast<const uint8_t*>(side.token_scale);
  // Whole pieces of 16 bytes, which is what the instruction takes.
  const uint64_t begin = (reinterpret_cast<uint64_t>(base) + row * bytes + 15) & ~uint64_t{15};
  const uint64_t end = (reinterpret_cast<uint64_t>(base) + (row + count) * bytes) & ~uint64_t{15};
  if (begin >= end) return;
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;\n" ::"l"(begin), "r"(static_cast<uint32_t>(end - begin))
               : "memory");
#endif
}

template <typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kMinBlocks)
    DecodeKernel(const __grid_constant__ GqaParams p, const __grid_constant__ GqaPlan plan) {
  using Warp = DecodeWarp<Shape>;
  using Shared = DecodeShared<Shape>;
  constexpr int kElements = Shape::kHeadSize / 32;  // of a row, in a lane
  constexpr int kWarpRows = Shape::kRows > Shape::kWarps ? Shape::kRows / Shape::kWarps : 1;
  extern __shared__ __align__(16) uint8_t decode_shared[];
  Shared& shared = *reinterpret_cast<Shared*>(decode_shared);

  const uint32_t unit = blockIdx.x / static_cast<uint32_t>(plan.splits);
  const auto split = static_cast<int>(blockIdx.x - unit * static_cast<uint32_t>(plan.splits));
  const uint32_t b = unit / static_cast<uint32_t>(p.kv_num_heads);
  const auto kv_head = static_cast<int>(unit - b * static_cast<uint32_t>(p.kv_num_heads));
  const int warp_index = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int rows = p.sequence_length * p.group_size;
  const bool in_cluster = kHasClusters && plan.cluster > 1;
  const bool merges = plan.counters != 0;
  // The parameters' way into the constant cache is as long as one to memory; it overlaps the kernel before.
  asm volatile("" ::"r"(p.batch_size), "l"(p.query), "l"(p.cos_cache), "f"(p.scale), "l"(p.k.codes), "l"(p.v.codes),
               "l"(p.v.past_token_scale), "l"(p.counters), "r"(plan.path), "l"(plan.workspace_bytes));
  if (in_cluster && threadIdx.x == 0) OpenInbox(&shared.inbox_barrier);
  // The length may still be written by the kernel before. Work begins with it, and begins again where it was not right.
  // One thread reads it, as the others might see something else.
  if (threadIdx.x == 0) shared.guess = p.seqlens_k[b];
  __syncthreads();
  int32_t last = shared.guess;
  bool waited = false;
#pragma unroll 1
  while (true) {
    const SequenceState sequence = SequenceOf(p, last);
    const TokenRange range = SplitRange(sequence.past, sequence.total - 1, p.local_window_size, split, plan.splits,
                                        Shape::kTileTokens, Shape::kMinSplitTokens);
    if (!sequence.valid || range.begin >= range.end) {
      if (!waited) {
        WaitForPreviousKernel();
        waited = true;
        const int32_t actual = __ldcg(p.seqlens_k + b);
        if (actual != last) {
          last = actual;
          continue;
        }
      }
      if (!sequence.valid) {
        if (split == 0 && (plan.splits == 1 || in_cluster || merges)) WriteNanRows(p, b, kv_head, rows);
        return;
      }
      if (!in_cluster && !merges && threadIdx.x < static_cast<unsigned>(rows)) {
        p.partial_stats[PartialRow(plan, unit, split, threadIdx.x)] = make_float2(-INFINITY, 0.0f);
      }
      if (!in_cluster || range.parts <= 1) return;
      if (threadIdx.x == 0) shared.place = {unit, b, kv_head, split, range.parts, DecodeResult::kCluster};
      __syncthreads();
      ArriveInCluster();
      WaitForCluster();
      break;
    }
    const int count = static_cast<int>(range.end - range.begin);
    const int old = static_cast<int>(min(max(sequence.past - range.begin, int64_t{0}), static_cast<int64_t>(count)));
    const auto find_query = [&](int row) {
      return FindQuery(p, b, kv_head, row, rows, sequence.past, lane * kElements, plan.activation_vectors);
    };
    // New rows begin with the warp that has the last query row, if any. Rows are asked for before the cache is.
    int job = Shape::kWarps - 1 - warp_index;
    NewRowPlace new_row(p, b, kv_head, sequence.past, range.begin + old, job);
    LaneSource from = job < 2 * (count - old) ? new_row.Find(p, lane * kElements, plan.activation_vectors)
                                              : find_query(warp_index);
    Warp warp(p, lane, static_cast<int64_t>(unit) * p.capacity + range.begin, count, old,
              &shared.query.words[0][0][0], shared.space[warp_index].tiles);
    const int tile = warp_index * Shape::kTileTokens;
    if (!waited) {
      Prefetch(from);
      if (Shape::kWholeRows) PrefetchTiles<Shape>(p, unit * p.capacity + range.begin, old);
      // So that all that is known is known when the wait ends.
      asm volatile("" ::"l"(from.own), "l"(from.partner), "l"(from.cos), "l"(from.sin), "l"(warp.kv.base_row),
                   "r"(tile));
      WaitForPreviousKernel();
      waited = true;
    }
    const bool has_new = job < 2 * (count - old);
    if (threadIdx.x == Shape::kThreads / 2) {  // its warp has the least to do
      const bool finished = plan.splits == 1 || ((merges || in_cluster) && range.parts == 1);
      shared.place = {unit, b, kv_head, split, range.parts,
                      finished ? DecodeResult::kOutput : in_cluster ? DecodeResult::kCluster
                                                                    : DecodeResult::kPartial};
      shared.last = __ldcg(p.seqlens_k + b);
    }
    if (has_new) {
      // Nothing may be written to the cache for a length that is wrong.
      const bool right = __ldcg(p.seqlens_k + b) == last;
#pragma unroll 1
      while (true) {
        AppendNewRow<Shape::kFormat, kElements>(p, kv_head, new_row, from, lane, plan.activation_vectors, right);
        job += Shape::kWarps;
        if (!right || job >= 2 * (count - old)) break;
        new_row = NewRowPlace(p, b, kv_head, sequence.past, range.begin + old, job);
        from = new_row.Find(p, lane * kElements, plan.activation_vectors);
      }
      from = find_query(warp_index);
    }
    float query_rows[kWarpRows][kElements];
    LoadQueryRows(p, b, kv_head, warp_index, Shape::kWarps, rows, sequence.past, lane, plan.activation_vectors, from,
                  query_rows);
    const bool merged = merges && range.parts > 1;
    if (merged) UnitParts<Shape::kHeadSize>(p, plan, unit).Clear(split, rows);
#pragma unroll
    for (int i = 0; i < kWarpRows; ++i) {
      const int row = warp_index + i * Shape::kWarps;
      if (row < Shape::kRows) LayOutQueryRow<Shape>(p, kv_head, row, rows, lane, query_rows[i], shared.query);
    }
    // Later than what comes before: a warp that waits for one of its loads waits for all that are under way.
    warp.template Begin<true>(tile);
    __syncthreads();
    if (shared.last != last) {
      last = shared.last;
      WaitForCopies();  // of a tile that is not wanted: its place is used again
      __syncthreads();
      continue;
    }
    warp.template Begin<false>(tile);
    // While the warp waits for its first tile: another one of those that have the least to do.
    if (merged && threadIdx.x == Shape::kThreads / 2 + 32) {
      shared.merges = CountBegun<Shape::kMergeBlocks>(p.counters + unit, range.parts);
    }
    warp.SetRows(shared.query.factor, shared.query.sum, sequence.past - range.begin);
    warp.Run(tile);
    AllowNextKernel();
    const DecodeResult result = shared.place.result;
    if (kHasClusters && result == DecodeResult::kCluster) ArriveInCluster();
    // Before the results are written, which takes as long as the answer.
    const bool counts = Shape::kMergeBlocks > 1 && merges && result == DecodeResult::kPartial &&
                        threadIdx.x == Shape::kThreads / 2 + 32 && shared.merges == MergeRows::kNone;
    MergeRows half = MergeRows::kNone;
    if (counts) half = CountThrough(p.counters + shared.place.unit, shared.place.parts);
    WriteRows(p, plan, warp, shared, rows, result);
    if (result == DecodeResult::kOutput) return;
    if (counts) shared.merges = half;
    break;
  }
  const auto at = shared.place;
  if (in_cluster) {
    FinishSlice<Shape>(p, plan.activation_vectors, at.b, at.kv_head, plan.cluster, at.split, at.parts, rows,
                       shared.inbox, &shared.inbox_barrier);
    return;
  }
  if (!merges) return;
  if (Shape::kMergeBlocks > 1) __syncthreads();  // shared.merges of this block
  if (shared.merges == MergeRows::kNone) return;
  const UnitParts<Shape::kHeadSize> parts(p, plan, at.unit);
  const MergeRows which = Shape::kMergeBlocks > 1 ? shared.merges : MergeRows::kAll;
  MergeParts<Shape::kHeadSize, Shape::kThreads, Shape::kLaneReads, Shape::kMergeBlocks>(
      p, plan.activation_vectors, parts, at.b, at.kv_head, at.parts, rows, which);
}

// One block for every split of every unit.
template <typename Shape>
cudaError_t LaunchDecodeKernel(const GqaParams& p, const GqaPlan& plan, cudaStream_t stream) {
  if (plan.counters != 0 && p.counters == nullptr) return cudaErrorInvalidValue;
  constexpr size_t kBytes = sizeof(DecodeShared<Shape>);
  static_assert(kBytes <= 99 * 1024, "what chips from sm_80 on have for a block");
  static_assert(!Shape::kBeforeSm80 || kBytes <= 64 * 1024, "what the others have");
  if constexpr (kBytes > 48 * 1024) {
    const cudaError_t error = cudaFuncSetAttribute(DecodeKernel<Shape>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                   static_cast<int>(kBytes));
    if (error != cudaSuccess) return error;
  }
  const int64_t blocks = static_cast<int64_t>(p.batch_size) * p.kv_num_heads * plan.splits;
  return LaunchOverlapping(DecodeKernel<Shape>, blocks, plan.cluster, Shape::kThreads, kBytes, stream, p, plan);
}

template <KvFormat kFormat, int kHeadSize, bool kWholeRows>
cudaError_t LaunchDecodeRows(const GqaParams& p, const GqaPlan& plan, cudaStream_t stream) {
  constexpr int kWarps = DecodeWarps(kHeadSize);
  if (plan.unit_rows == 8 && plan.warps == kWarps) {
    return LaunchDecodeKernel<DecodeShape<kFormat, kHeadSize, kWholeRows, 1, kWarps>>(p, plan, stream);
  }
  if constexpr (HasWideDecode(kWholeRows, 8)) {
    if (plan.unit_rows == 8 && plan.warps == 2 * kWarps) {
      return LaunchDecodeKernel<DecodeShape<kFormat, kHeadSize, kWholeRows, 1, 2 * kWarps>>(p, plan, stream);
    }
  }
  if constexpr (kHeadSize <= 128) {
    if (plan.unit_rows == 16 && plan.warps == kWarps) {
      return LaunchDecodeKernel<DecodeShape<kFormat, kHeadSize, kWholeRows, 2, kWarps>>(p, plan, stream);
    }
  }
  return cudaErrorInvalidValue;  // MakePlan makes no such plan
}

template <KvFormat kFormat, int kHeadSize>
cudaError_t LaunchDecodeHeadSize(const GqaParams& p, const GqaPlan& plan, cudaStream_t stream) {
  return plan.whole_rows ? LaunchDecodeRows<kFormat, kHeadSize, true>(p, plan, stream)
                         : LaunchDecodeRows<kFormat, kHeadSize, false>(p, plan, stream);
}

template <KvFormat kFormat>
cudaError_t LaunchDecodeFormat(const GqaParams& p, const GqaPlan& plan, cudaStream_t stream) {
  switch (plan.padded_head_size) {
    case 64:
      return LaunchDecodeHeadSize<kFormat, 64>(p, plan, stream);
    case 128:
      return LaunchDecodeHeadSize<kFormat, 128>(p, plan, stream);
    case 256:
      return LaunchDecodeHeadSize<kFormat, 256>(p, plan, stream);
    default:
      return cudaErrorInvalidValue;  // MakePlan makes no such plan
  }
}

}  // namespace kv_cache_quant
}  // namespace contrib
}  // namespace onnxruntime
