// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
//
// The kernel around DecodeWarp (decode.cuh, which says what grid, block and shared memory are): finds the split, loads
// Q, adds the warps' results and writes them.

#pragma once

#include "contrib_ops/cuda/bert/kv_cache_quant/decode.cuh"
#include "contrib_ops/cuda/bert/kv_cache_quant/kernel_launch.cuh"
#include "contrib_ops/cuda/bert/kv_cache_quant/query.cuh"

namespace onnxruntime {
namespace contrib {
namespace kv_cache_quant {

// What a warp leaves for the others, of each query row.
template <int kRows>
struct DecodeWarpStats {
  float maximum[kDecodeWarps][kRows];
  float denominator[kDecodeWarps][kRows];
  float v_norm[kDecodeWarps];
};

// Query rows are laid out times this over KeyUnit, which keeps the largest element, 1, below half's 65504 and small
// ones above its subnormal numbers for every unit.
constexpr float kQueryUnit = 0x1p-10f;

// Which of the half2 of a K word element d of a row is in.
template <typename Shape, typename FormatCodec>
__device__ __forceinline__ int KeyPlace(int d) {
  const int element = d % Shape::kElements;
  return element % (Shape::kElements / 2);
}

// NaN for all rows of an entry whose lengths do not fit.
__device__ __forceinline__ void WriteNanRows(const GqaParams& p, int64_t b, int kv_head, int rows) {
  for (int i = threadIdx.x; i < rows * p.head_size; i += blockDim.x) {
    const int row = i / p.head_size;
    const int64_t at = OutputRow(p, b, row / p.group_size, kv_head * p.group_size + row % p.group_size);
    StoreActivation(p.output, at + i % p.head_size, NAN, p.activation);
  }
}

// Combines the four warps' statistics of one row: the common maximum, the denominator, and each warp's factor.
template <int kRows>
__device__ __forceinline__ float2 CombineStats(const DecodeWarpStats<kRows>& stats, int row,
                                               float (&weight)[kDecodeWarps]) {
  float maximum = -INFINITY;
#pragma unroll
  for (int w = 0; w < kDecodeWarps; ++w) maximum = fmaxf(maximum, stats.maximum[w][row]);
  const float reference = maximum == -INFINITY ? 0.0f : maximum;
  float denominator = 0.0f;
#pragma unroll
  for (int w = 0; w < kDecodeWarps; ++w) {
    const float shrink = Exp2(stats.maximum[w][row] - reference);
    denominator += stats.denominator[w][row] * shrink;
    weight[w] = shrink * stats.v_norm[w];
  }
  return make_float2(maximum, denominator);
}

// Adds the warps' accumulators of row tile n and writes them: as partial results, or finished where there is one split.
template <typename Warp, int kRows>
__device__ __forceinline__ void WriteRowTile(const GqaParams& p, const GqaPlan& plan, const Warp& warp,
                                             const DecodeWarpStats<kRows>& stats, const float4* sums, int n, int64_t b,
                                             int kv_head, int split, int rows) {
  constexpr int kQuads = Warp::Shape::kElementTiles;  // float4 of one lane: 4 elements of one of its two rows
  constexpr int kHeadSize = Warp::Shape::kElementTiles * 16;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int quad = threadIdx.x / 32; quad < kQuads; quad += kDecodeWarps) {
    const int row = 8 * n + 2 * warp.c + quad % 2;
    const int d = warp.ElementOf(quad / 2 * 4);
    float weight[kDecodeWarps];
    const float2 total = CombineStats(stats, row, weight);
    float x[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int w = 0; w < kDecodeWarps; ++w) {
      const float4 part = sums[(w * kQuads + quad) * 32 + lane];
      // A warp without tokens has weight 0; so has nothing of it to be NaN.
      x[0] += part.x * weight[w];
      x[1] += part.y * weight[w];
      x[2] += part.z * weight[w];
      x[3] += part.w * weight[w];
    }
    if (row >= rows) continue;
    if (plan.splits > 1) {
      const int64_t at = PartialRow(plan, b * p.kv_num_heads + kv_head, split, row);
      reinterpret_cast<float4*>(p.partial_out)[(at * kHeadSize + d) / 4] = make_float4(x[0], x[1], x[2], x[3]);
      if (d == 0) p.partial_stats[at] = total;
      continue;
    }
    const int head = kv_head * p.group_size + row % p.group_size;
    const float sink = SinkLog2(p, head);
    const float maximum = fmaxf(total.x, sink);
    const float inverse = Exp2(total.x - maximum) / (total.y * Exp2(total.x - maximum) + Exp2(sink - maximum));
    const int64_t at = OutputRow(p, b, row / p.group_size, head);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (d + i < p.head_size) {
        StoreActivation(p.output, at + d + i, x[i] * inverse * StaticValueScale(p, kv_head, d + i), p.activation);
      }
    }
  }
}

template <KvFormat kFormat, int kHeadSize, bool kWholeRows, int kRowTiles>
__global__ void __launch_bounds__(32 * kDecodeWarps, DecodeShape<kFormat, kHeadSize, kWholeRows, kRowTiles>::kMinBlocks)
    DecodeKernel(const __grid_constant__ GqaParams p, const __grid_constant__ GqaPlan plan) {
  using Warp = DecodeWarp<kFormat, kHeadSize, kWholeRows, kRowTiles>;
  using Shape = typename Warp::Shape;
  using FormatCodec = Codec<kFormat>;
  constexpr int kQuads = Shape::kElementTiles;
  constexpr int kQueryBytes = Shape::kRows * Shape::kQueryStride * 2;
  constexpr int kSumBytes = kDecodeWarps * kQuads * 32 * 16;
  __shared__ __align__(16) unsigned char buffer[kQueryBytes > kSumBytes ? kQueryBytes : kSumBytes];
  __shared__ DecodeWarpStats<Shape::kRows> stats;
  __shared__ float row_factor[Shape::kRows];
  __shared__ float row_sum[Shape::kRows];

  AllowNextKernel();
  const int64_t unit = blockIdx.x / plan.splits;
  const int split = static_cast<int>(blockIdx.x % plan.splits);
  const int64_t b = unit / p.kv_num_heads;
  const int kv_head = static_cast<int>(unit % p.kv_num_heads);
  const int warp_index = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int rows = p.sequence_length * p.group_size;
  const SequenceState sequence = LoadSequence(p, b);
  if (!sequence.valid) {
    if (plan.splits == 1) WriteNanRows(p, b, kv_head, rows);
    return;
  }
  const TokenRange range = SplitRange(sequence.past, sequence.total - 1, p.local_window_size, split, plan.splits,
                                      kDecodeSplitTile);
  if (range.begin >= range.end) {
    if (threadIdx.x < static_cast<unsigned>(rows)) {
      p.partial_stats[PartialRow(plan, unit, split, threadIdx.x)] = make_float2(-INFINITY, 0.0f);
    }
    return;
  }

  auto* query = reinterpret_cast<__half*>(buffer);
  Warp warp(p, lane, unit * p.capacity + range.begin, static_cast<int>(range.end - range.begin), query);
  // Rows below P were there before the append kernel began; the new ones are its work. The wait is for the whole
  // kernel, of which every row comes before the end of this one.
  if (range.end > sequence.past) WaitForPreviousKernel();
  // The first loads of the cache go out before everything else that takes time.
  const int tile = warp_index * Shape::kTileTokens;
  if (tile < warp.count) {
    warp.kv.LoadKey(tile);
    warp.kv.LoadValue(tile);
  }
#pragma unroll 1
  for (int row = warp_index; row < Shape::kRows; row += kDecodeWarps) {
    float sum = 0.0f;
    const auto store = [&](int d, float x) {
      // What the products will have: rounded after the power of two that makes up for the unit of K's operand.
      const float unit = FormatCodec::KeyUnit(KeyPlace<Shape, FormatCodec>(d));
      const __half stored = __float2half_rn(x * (kQueryUnit / unit));
      query[row * Shape::kQueryStride + d] = stored;
      sum += __half2float(stored) * unit;
    };
    const float factor = LoadQueryRow<kHeadSize>(p, b, kv_head, row, rows, sequence.past, lane, store);
#pragma unroll
    for (int mask = 1; mask < 32; mask *= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, mask);
    if (lane == 0) {
      row_factor[row] = factor / kQueryUnit;
      row_sum[row] = sum;
    }
  }
  __syncthreads();
  warp.SetRows(row_factor, row_sum, sequence.past - range.begin);
  warp.LoadQueryWords();
  warp.Run(tile);

#pragma unroll
  for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (warp.r == 0) {
        stats.maximum[warp_index][8 * n + 2 * warp.c + e] = warp.maximum[n][e];
        stats.denominator[warp_index][8 * n + 2 * warp.c + e] = warp.denominator[n][e];
      }
    }
  }
  if (lane == 0) stats.v_norm[warp_index] = warp.v_norm;
  auto* sums = reinterpret_cast<float4*>(buffer);
#pragma unroll
  for (int n = 0; n < kRowTiles; ++n) {
    __syncthreads();  // the query rows, or the sums of the tile before, are no longer needed
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      const int i = quad / 2 * 2;
      const int e = quad % 2;
      sums[(warp_index * kQuads + quad) * 32 + lane] =
          make_float4(warp.out[n][i][e], warp.out[n][i][2 + e], warp.out[n][i + 1][e], warp.out[n][i + 1][2 + e]);
    }
    __syncthreads();
    WriteRowTile(p, plan, warp, stats, sums, n, b, kv_head, split, rows);
  }
}

// One block for every split of every unit.
template <KvFormat kFormat, int kHeadSize, bool kWholeRows, int kRowTiles>
cudaError_t LaunchDecodeKernel(const GqaParams& p, const GqaPlan& plan, cudaStream_t stream) {
  const int64_t blocks = static_cast<int64_t>(p.batch_size) * p.kv_num_heads * plan.splits;
  return LaunchOverlapping(DecodeKernel<kFormat, kHeadSize, kWholeRows, kRowTiles>, blocks, 32 * kDecodeWarps, 0,
                           stream, p, plan);
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
