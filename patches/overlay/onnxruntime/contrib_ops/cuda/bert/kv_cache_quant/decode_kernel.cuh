// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
//
// The kernel around DecodeWarp (decode.cuh, which says what grid, block and shared memory are): finds the split, lays
// out Q, quantizes and appends the split's new rows, adds the warps' results and writes them, merges the splits.

#pragma once

#include "contrib_ops/cuda/bert/kv_cache_quant/decode.cuh"
#include "contrib_ops/cuda/bert/kv_cache_quant/decode_inputs.cuh"
#include "contrib_ops/cuda/bert/kv_cache_quant/decode_merge.cuh"
#include "contrib_ops/cuda/bert/kv_cache_quant/kernel_launch.cuh"

namespace onnxruntime {
namespace contrib {
namespace kv_cache_quant {

// What the warps leave for each other. Statistics of a row lie side by side, by warp.
template <int kRows, int kHeadSize, int kThreads>
struct DecodeBlockShared {
  static constexpr int kWarps = kThreads / 32;
  alignas(16) float maximum[kRows][kWarps];
  alignas(16) float denominator[kRows][kWarps];
  float4 sums[kThreads * kHeadSize / 16];  // accumulators of 8 rows, (warp, quad, lane); then PartMerge's
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

template <int kCount>
__device__ __forceinline__ float Total(const float (&x)[kCount]) {
  float sum = x[0];
#pragma unroll
  for (int i = 1; i < kCount; ++i) sum += x[i];
  return sum;
}

// Adds the warps' results of row tile n, which all refer to the rows' common maxima, and writes them: finished, or as
// the partial results of a split.
template <typename Warp, typename Shared>
__device__ __forceinline__ void WriteRowTile(const GqaParams& p, const GqaPlan& plan, const Warp& warp,
                                             const Shared& shared, int n, int64_t b, int kv_head, int64_t unit,
                                             int split, int rows, bool finished) {
  constexpr int kQuads = Warp::Shape::kElementTiles;  // float4 of one lane: 4 elements of one of its two rows
  constexpr int kHeadSize = Warp::Shape::kElementTiles * 16;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < (kQuads + Shared::kWarps - 1) / Shared::kWarps; ++i) {
    const int quad = threadIdx.x / 32 + i * Shared::kWarps;
    if (quad >= kQuads) break;
    const int row = 8 * n + 2 * warp.c + quad % 2;
    if (row >= rows) continue;
    float x[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int w = 0; w < Shared::kWarps; ++w) {
      const float4 part = shared.sums[(w * kQuads + quad) * 32 + lane];
      x[0] += part.x;
      x[1] += part.y;
      x[2] += part.z;
      x[3] += part.w;
    }
    const int d = warp.ElementOf(quad / 2 * 4);
    if (!finished) {
      const int64_t at = PartialRow(plan, unit, split, row);
      reinterpret_cast<float4*>(p.partial_out)[(at * kHeadSize + d) / 4] = make_float4(x[0], x[1], x[2], x[3]);
      if (d == 0) p.partial_stats[at] = make_float2(Largest(shared.maximum[row]), Total(shared.denominator[row]));
      continue;
    }
    const int s = p.sequence_length == 1 ? 0 : row / p.group_size;
    const int head = kv_head * p.group_size + row - s * p.group_size;
    const float sink = SinkLog2(p, head);
    const float own = Largest(shared.maximum[row]);
    const float top = fmaxf(own, sink);
    const float inverse =
        __fdividef(Exp2(own - top), Total(shared.denominator[row]) * Exp2(own - top) + Exp2(sink - top));
    const int64_t at = OutputRow(p, b, s, head);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (d + e >= p.head_size) break;
      StoreActivation(p.output, at + d + e, x[e] * inverse * StaticValueScale(p, kv_head, d + e), p.activation);
    }
  }
}

// The block's results from those of its warps.
template <typename Warp, typename Shared>
__device__ __forceinline__ void WriteRows(const GqaParams& p, const GqaPlan& plan, const Warp& warp, Shared& shared,
                                          int64_t b, int kv_head, int64_t unit, int split, int rows, bool finished) {
  constexpr int kQuads = Warp::Shape::kElementTiles;
  constexpr int kRowTiles = Warp::Shape::kRows / 8;
  const int warp_index = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (warp.r == 0) shared.maximum[8 * n + 2 * warp.c + e][warp_index] = warp.maximum[n][e];
    }
  }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < kRowTiles; ++n) {
    if (n > 0) __syncthreads();  // the sums of the tile before are no longer needed
    float factor[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int row = 8 * n + 2 * warp.c + e;
      const float top = Largest(shared.maximum[row]);
      const float shrink = Exp2(warp.maximum[n][e] - (top == -INFINITY ? 0.0f : top));
      if (warp.r == 0) shared.denominator[row][warp_index] = warp.denominator[n][e] * shrink;
      // A warp without tokens has zeros, and a factor of 0; so has nothing of it to be NaN.
      factor[e] = shrink * warp.v_norm;
    }
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      const int i = quad / 2 * 2;
      const int e = quad % 2;
      shared.sums[(warp_index * kQuads + quad) * 32 + lane] =
          make_float4(warp.out[n][i][e] * factor[e], warp.out[n][i][2 + e] * factor[e],
                      warp.out[n][i + 1][e] * factor[e], warp.out[n][i + 1][2 + e] * factor[e]);
    }
    __syncthreads();
    WriteRowTile(p, plan, warp, shared, n, b, kv_head, unit, split, rows, finished);
  }
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

  AllowNextKernel();
  const uint32_t unit = blockIdx.x / static_cast<uint32_t>(plan.splits);
  const auto split = static_cast<int>(blockIdx.x - unit * static_cast<uint32_t>(plan.splits));
  const uint32_t b = unit / static_cast<uint32_t>(p.kv_num_heads);
  const auto kv_head = static_cast<int>(unit - b * static_cast<uint32_t>(p.kv_num_heads));
  const int warp_index = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int rows = p.sequence_length * p.group_size;
  const bool merges = plan.counters != 0;
  // The parameters' way into the constant cache is as long as one to memory; it overlaps the kernel before.
  asm volatile("" ::"r"(p.batch_size), "l"(p.query), "l"(p.cos_cache), "f"(p.scale), "l"(p.k.codes), "l"(p.v.codes),
               "l"(p.v.past_token_scale), "l"(p.counters), "r"(plan.path), "l"(plan.workspace_bytes));
  WaitForPreviousKernel();
  const SequenceState sequence = LoadSequence(p, b);
  if (!sequence.valid) {
    if (split == 0 && (merges || plan.splits == 1)) WriteNanRows(p, b, kv_head, rows);
    return;
  }
  const TokenRange range = SplitRange(sequence.past, sequence.total - 1, p.local_window_size, split, plan.splits,
                                      Shape::kTileTokens, kMinSplitTokens);
  if (range.begin >= range.end) {
    if (!merges && threadIdx.x < static_cast<unsigned>(rows)) {
      p.partial_stats[PartialRow(plan, unit, split, threadIdx.x)] = make_float2(-INFINITY, 0.0f);
    }
    return;
  }

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
    LayOutQueryRow<Shape, kFormat>(p, b, kv_head, row, rows, sequence.past, lane, plan.activation_vectors, query);
  }
  __syncthreads();
  warp.SetRows(query.factor, query.sum, sequence.past - range.begin);
  warp.Run(tile);

  const bool finished = plan.splits == 1 || (merges && range.parts == 1);
  WriteRows(p, plan, warp, shared, b, kv_head, unit, split, rows, finished);
  if (finished || !merges) return;
  if (!IsLastOfUnit(p.counters + unit, range.parts)) return;
  PartMerge<kHeadSize, Shape::kThreads>::Run(p, plan, unit, b, kv_head, range.parts, rows, shared.sums);
}

// One block for every split of every unit.
template <KvFormat kFormat, int kHeadSize, bool kWholeRows, int kRowTiles>
cudaError_t LaunchDecodeKernel(const GqaParams& p, const GqaPlan& plan, cudaStream_t stream) {
  using Shape = DecodeShape<kFormat, kHeadSize, kWholeRows, kRowTiles>;
  if (plan.counters != 0 && p.counters == nullptr) return cudaErrorInvalidValue;
  const int64_t blocks = static_cast<int64_t>(p.batch_size) * p.kv_num_heads * plan.splits;
  return LaunchOverlapping(DecodeKernel<kFormat, kHeadSize, kWholeRows, kRowTiles>, blocks, Shape::kThreads, 0, stream,
                           p, plan);
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
