// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
//
// The kernel around DecodeWarp (decode.cuh, which says what grid, block and shared memory are): finds the split, lays
// out Q, quantizes and appends the split's new rows, adds the warps' results and writes them, merges the splits.

#pragma once

#include "contrib_ops/cuda/bert/kv_cache_quant/decode.cuh"
#include "contrib_ops/cuda/bert/kv_cache_quant/decode_cluster.cuh"
#include "contrib_ops/cuda/bert/kv_cache_quant/decode_inputs.cuh"
#include "contrib_ops/cuda/bert/kv_cache_quant/decode_merge.cuh"
#include "contrib_ops/cuda/bert/kv_cache_quant/kernel_launch.cuh"
#include "contrib_ops/cuda/bert/kv_cache_quant/row_part.cuh"

namespace onnxruntime {
namespace contrib {
namespace kv_cache_quant {

// What the warps leave for each other. Statistics of a row lie side by side, by warp.
template <int kRows, int kHeadSize, int kThreads>
struct DecodeBlockShared {
  static constexpr int kWarps = kThreads / 32;
  alignas(16) float maximum[kRows][kWarps];
  alignas(16) float denominator[kRows][kWarps];
  alignas(16) float norm[kWarps];
  float2 stats[kRows];                     // the block's, for ClusterMerge
  float4 sums[kThreads * kHeadSize / 16];  // accumulators of 8 rows, (warp, quad, lane); then what merges need
};

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
  float top = x[0];
#pragma unroll
  for (int i = 1; i < kCount; ++i) top = fmaxf(top, x[i]);
  return top;
}

// A row's numerators, four elements, of all warps: relative to the row's maximum.
template <typename Warp, typename Shared>
__device__ __forceinline__ RowPart AddWarps(const Shared& shared, int row, int quad, int lane) {
  RowPart part;
  part.maximum = Largest(shared.maximum[row]);
  const float reference = part.maximum == -INFINITY ? 0.0f : part.maximum;
#pragma unroll
  for (int w = 0; w < Shared::kWarps; ++w) {
    // A warp without tokens has zeros, and a factor of 0; so has nothing of it to be NaN.
    const float shrink = Exp2(shared.maximum[row][w] - reference);
    part.denominator += shared.denominator[row][w] * shrink;
    const float factor = shrink * shared.norm[w];
    const float4 x = shared.sums[(w * Warp::Shape::kElementTiles + quad) * 32 + lane];
    part.sum.x += x.x * factor;
    part.sum.y += x.y * factor;
    part.sum.z += x.z * factor;
    part.sum.w += x.w * factor;
  }
  return part;
}

enum class DecodeResult { kOutput,
                          kPartial,    // of a split, in memory
                          kCluster };  // likewise, in shared memory

// The block's results from those of its warps.
template <typename Warp, typename Shared>
__device__ __forceinline__ void WriteRows(const GqaParams& p, const GqaPlan& plan, const Warp& warp, Shared& shared,
                                          int64_t b, int kv_head, int64_t unit, int split, int rows,
                                          DecodeResult result) {
  using Shape = typename Warp::Shape;
  constexpr int kQuads = Shape::kElementTiles;  // float4 of one lane: 4 elements of one of its two rows
  constexpr int kHeadSize = Shape::kElementTiles * 16;
  constexpr int kRowTiles = Shape::kRows / 8;
  constexpr int kWarpQuads = (kQuads + Shared::kWarps - 1) / Shared::kWarps;
  const int warp_index = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (warp.r != 0) continue;
      shared.maximum[8 * n + 2 * warp.c + e][warp_index] = warp.maximum[n][e];
      shared.denominator[8 * n + 2 * warp.c + e][warp_index] = warp.denominator[n][e];
    }
  }
  if (lane == 0) shared.norm[warp_index] = warp.v_norm;
  float4 kept[kRowTiles][kWarpQuads];  // for the cluster, whose place is that of the warps' sums
#pragma unroll
  for (int n = 0; n < kRowTiles; ++n) {
    if (n > 0) __syncthreads();  // the sums of the tile before are no longer needed
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      const int i = quad / 2 * 2;
      const int e = quad % 2;
      shared.sums[(warp_index * kQuads + quad) * 32 + lane] =
          make_float4(warp.out[n][i][e], warp.out[n][i][2 + e], warp.out[n][i + 1][e], warp.out[n][i + 1][2 + e]);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kWarpQuads; ++i) {
      const int quad = warp_index + i * Shared::kWarps;
      const int row = 8 * n + 2 * warp.c + quad % 2;
      if (quad >= kQuads || row >= rows) continue;
      const RowPart part = AddWarps<Warp>(shared, row, quad, lane);
      const int d = Warp::ElementOf(quad / 2 * 4, warp.r);
      const float2 stats = make_float2(part.maximum, part.denominator);
      if (result == DecodeResult::kCluster) {
        kept[n][i] = part.sum;
        if (d == 0) shared.stats[row] = stats;
      } else if (result == DecodeResult::kPartial) {
        const int64_t at = PartialRow(plan, unit, split, row);
        reinterpret_cast<float4*>(p.partial_out)[(at * kHeadSize + d) / 4] = part.sum;
        if (d == 0) p.partial_stats[at] = stats;
      } else {
        WriteRowPart(p, b, kv_head, row, d, part);
      }
    }
  }
  if (result != DecodeResult::kCluster) return;
  if (kRowTiles > 1) __syncthreads();  // with one tile, who writes a place is the only one that has read it
#pragma unroll
  for (int i = 0; i < kRowTiles * kWarpQuads; ++i) {
    const int quad = warp_index + i % kWarpQuads * Shared::kWarps;
    if (quad < kQuads) shared.sums[(i / kWarpQuads * kQuads + quad) * 32 + lane] = kept[i / kWarpQuads][i % kWarpQuads];
  }
}

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

template <KvFormat kFormat, int kHeadSize, bool kWholeRows, int kRowTiles>
__global__ void __launch_bounds__(DecodeShape<kFormat, kHeadSize, kWholeRows, kRowTiles>::kThreads,
                                  DecodeShape<kFormat, kHeadSize, kWholeRows, kRowTiles>::kMinBlocks)
    DecodeKernel(const __grid_constant__ GqaParams p, const __grid_constant__ GqaPlan plan) {
  using Warp = DecodeWarp<kFormat, kHeadSize, kWholeRows, kRowTiles>;
  using Shape = typename Warp::Shape;
  constexpr int kRows = Shape::kRows;
  __shared__ QueryRows<kRowTiles, kHeadSize> query;
  __shared__ typename Warp::Tiles::New new_rows;
  __shared__ DecodeBlockShared<kRows, kHeadSize, Shape::kThreads> shared;

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
  const auto range_of = [&](const SequenceState& q) {
    return SplitRange(q.past, q.total - 1, p.local_window_size, split, plan.splits, Shape::kTileTokens,
                      kMinSplitTokens);
  };
  // Lengths that the kernel before may still write: good enough for what a wrong guess does no harm to.
  if (kWholeRows) {
    const SequenceState guess = LoadSequence(p, b);
    const int64_t begin = range_of(guess).begin;
    if (guess.valid) PrefetchTiles<Shape>(p, unit * p.capacity + begin, min(range_of(guess).end, guess.past) - begin);
  }
  WaitForPreviousKernel();
  const SequenceState sequence = SequenceOf(p, __ldcg(p.seqlens_k + b));
  auto words = LoadQueryWords<kHeadSize>(p, b, kv_head, warp_index, rows, lane, plan.activation_vectors);
  const TokenRange range = range_of(sequence);
  if (!sequence.valid) {
    if (split == 0 && (plan.splits == 1 || in_cluster || merges)) WriteNanRows(p, b, kv_head, rows);
    return;
  }
  if (range.begin >= range.end) {
    if (!in_cluster && !merges && threadIdx.x < static_cast<unsigned>(rows)) {
      p.partial_stats[PartialRow(plan, unit, split, threadIdx.x)] = make_float2(-INFINITY, 0.0f);
    }
    if (!in_cluster) return;  // else its slice is left to merge
  } else {
    // The first loads of the cache go out before everything else that takes time.
    const int count = static_cast<int>(range.end - range.begin);
    const int old = static_cast<int>(min(max(sequence.past - range.begin, int64_t{0}), static_cast<int64_t>(count)));
    Warp warp(p, lane, static_cast<int64_t>(unit) * p.capacity + range.begin, count, old, new_rows,
              &query.words[0][0][0]);
    const int tile = warp_index * Shape::kTileTokens;
    warp.Begin(tile);

    // New rows begin with the warp that has the last query row, if any.
#pragma unroll 1
    for (int job = Shape::kWarps - 1 - warp_index; job < 2 * (count - old); job += Shape::kWarps) {
      const int64_t position = range.begin + old + job / 2;
      AppendNewRow(p, b, kv_head, static_cast<int>(position - sequence.past), position, job % 2, job / 2, lane,
                   plan.activation_vectors, new_rows);
    }
#pragma unroll 1
    for (int row = warp_index; row < kRows; row += Shape::kWarps) {
      LayOutQueryRow<Shape, kFormat>(p, b, kv_head, row, rows, sequence.past, lane, plan.activation_vectors, words,
                                     query);
      words = LoadQueryWords<kHeadSize>(p, b, kv_head, row + Shape::kWarps, rows, lane, plan.activation_vectors);
    }
    __syncthreads();
    warp.SetRows(query.factor, query.sum, sequence.past - range.begin);
    warp.Run(tile);
    const bool finished = plan.splits == 1 || (merges && range.parts == 1);
    // After a short split the merge through memory is quicker without the next kernel's blocks and what they prefetch.
    if (!merges || finished || count > kShortSplitTokens) AllowNextKernel();
    WriteRows(p, plan, warp, shared, b, kv_head, unit, split, rows,
              in_cluster ? DecodeResult::kCluster : finished ? DecodeResult::kOutput
                                                             : DecodeResult::kPartial);
    if (finished && !in_cluster) return;
  }
  if (in_cluster) {
    ClusterMerge<Warp>::Run(p, b, kv_head, plan.cluster, split, range.parts, rows, shared.sums, shared.stats);
    return;
  }
  if (!merges) return;
  AllowNextKernel();
  if (!IsLastOfUnit(p.counters + unit, range.parts)) return;
  PartMerge<kHeadSize, Shape::kThreads>::Run(p, plan, unit, b, kv_head, range.parts, rows, shared.sums);
}

// One block for every split of every unit.
template <KvFormat kFormat, int kHeadSize, bool kWholeRows, int kRowTiles>
cudaError_t LaunchDecodeKernel(const GqaParams& p, const GqaPlan& plan, cudaStream_t stream) {
  using Shape = DecodeShape<kFormat, kHeadSize, kWholeRows, kRowTiles>;
  if (plan.counters != 0 && p.counters == nullptr) return cudaErrorInvalidValue;
  const int64_t blocks = static_cast<int64_t>(p.batch_size) * p.kv_num_heads * plan.splits;
  return LaunchOverlapping(DecodeKernel<kFormat, kHeadSize, kWholeRows, kRowTiles>, blocks, plan.cluster,
                           Shape::kThreads, 0, stream, p, plan);
}

template <KvFormat kFormat, int kHeadSize>
cudaError_t LaunchDecodeHeadSize(const GqaParams& p, const GqaPlan& plan, cudaStream_t stream) {
  if (plan.unit_rows == 8) {
    return plan.whole_rows ? LaunchDecodeKernel<kFormat, kHeadSize, true, 1>(p, plan, stream)
                           : LaunchDecodeKernel<kFormat, kHeadSize, false, 1>(p, plan, stream);
  }
  if constexpr (kHeadSize <= 128) {
    if (plan.unit_rows == 16) {
      return plan.whole_rows ? LaunchDecodeKernel<kFormat, kHeadSize, true, 2>(p, plan, stream)
                             : LaunchDecodeKernel<kFormat, kHeadSize, false, 2>(p, plan, stream);
    }
  }
  return cudaErrorInvalidValue;  // MakePlan makes no such plan
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
