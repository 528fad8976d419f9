// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
//
// Combines the partial results of a row's splits (unit.cuh) and writes the row: weights 2^(m_s - M), their sum with
// the sink, V's static scale.
//
// MergeKernel, of many splits
// grid    one block per output row in x: (b * S + s) * H + head; where these are few, one for 64 elements of a row.
// block   256 threads, or 512 where 256 could not have all its reads in flight together. A group of threads reads a
//         split's numerators, a float4 each, and the groups take every n-th split; the first of them are on their way
//         while the statistics are. The groups' sums are added through shared memory.
// shared  7 KB, or 12 KB.
//
// MergeFewKernel, of up to eight
// grid    output rows, in the same order, over the blocks in x.
// block   256 threads. A row's thread has four elements of it, of all splits.
// shared  none.

#include "contrib_ops/cuda/bert/kv_cache_quant/dispatch.h"
#include "contrib_ops/cuda/bert/kv_cache_quant/kernel_launch.cuh"
#include "contrib_ops/cuda/bert/kv_cache_quant/launch.h"
#include "contrib_ops/cuda/bert/kv_cache_quant/row_part.cuh"

namespace onnxruntime {
namespace contrib {
namespace kv_cache_quant {

namespace {

constexpr int kMergeSplits = kMaxSplits;
constexpr int kFewMergeThreads = 256;
constexpr int kFewSplits = 8;
constexpr int kPieceElements = 64;  // of a row, where rows are few
constexpr int kFewBlocks = 128;     // as many as an H200 runs at once
constexpr int kManyMergeThreads = 512;
constexpr int kReadsInFlight = 8;  // of numerators, a thread
constexpr float kEmptySplit = -1.0f;
static_assert(kMaxHeadSize <= kFewMergeThreads, "an element of the row for every thread");

template <int kThreads>
struct MergeShared {
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kStatsPerThread = kThreads < kMergeSplits ? kMergeSplits / kThreads : 1;
  static constexpr int kMaxGroups = kThreads / (kPieceElements / 4);
  static constexpr int kBeyond = kMaxGroups * kReadsInFlight;
  // kEmptySplit: no token, nothing to read; so are the entries beyond the splits that a round of reads may ask for.
  float weight[kMergeSplits + kBeyond];
  float maximum[kWarps];
  float denominator[kWarps];
  float sums[kThreads * 4];  // (groups, kElements)
};

// 16 bytes at `address`, or zeros without a read: a predicate, where a branch would keep a thread's reads apart.
__device__ __forceinline__ float4 LoadIf(bool wanted, const float4* address) {
  float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.s32 p, %5, 0;\n@p ld.global.v4.f32 {%0,%1,%2,%3}, [%4];\n}\n"
      : "+f"(x.x), "+f"(x.y), "+f"(x.z), "+f"(x.w)
      : "l"(address), "r"(static_cast<int>(wanted)));
  return x;
}

// Weights into shared.weight; returns the denominator, the sink included. Ends behind a barrier.
// partial_row: of split 0.
template <int kThreads>
__device__ __forceinline__ float WeighSplits(const GqaParams& p, const GqaPlan& plan, int64_t partial_row, float sink,
                                             MergeShared<kThreads>& shared) {
  constexpr int kStatsPerThread = MergeShared<kThreads>::kStatsPerThread;
  constexpr int kWarps = MergeShared<kThreads>::kWarps;
  const int thread = static_cast<int>(threadIdx.x);
  float2 stats[kStatsPerThread];
  float top = sink;
#pragma unroll
  for (int i = 0; i < kStatsPerThread; ++i) {
    const int split = thread + i * kThreads;
    stats[i] = make_float2(-INFINITY, 0.0f);
    if (split < plan.splits) {
      stats[i] = p.partial_stats[partial_row + static_cast<int64_t>(split) * plan.unit_rows];
    }
  }
#pragma unroll
  for (int i = 0; i < kStatsPerThread; ++i) top = fmaxf(top, stats[i].x);
#pragma unroll
  for (int step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFu, top, step));
  if (thread % 32 == 0) shared.maximum[thread / 32] = top;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kWarps; ++i) top = fmaxf(top, shared.maximum[i]);

  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kStatsPerThread; ++i) {
    const int split = thread + i * kThreads;
    const bool empty = stats[i].y == 0.0f;
    // A maximum or denominator that is not finite becomes NaN here or in the product.
    const float weight = empty ? kEmptySplit : Exp2(stats[i].x - top);
    if (split < kMergeSplits) shared.weight[split] = weight;
    if (!empty) sum += weight * stats[i].y;
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
  for (int i = thread; i < MergeShared<kThreads>::kBeyond; i += kThreads) shared.weight[kMergeSplits + i] = kEmptySplit;
  if (thread % 32 == 0) shared.denominator[thread / 32] = sum;
  __syncthreads();
  sum = Exp2(sink - top);
#pragma unroll
  for (int i = 0; i < kWarps; ++i) sum += shared.denominator[i];
  return sum;
}

// Output row `index`, in the grid's order, and where its partial results are.
struct MergeRow {
  int64_t b;
  int head;
  int kv_head;
  int s;
  int row;          // of its KV head's: s * G + g
  int64_t partial;  // PartialRow of split 0

  __device__ __forceinline__ MergeRow(const GqaParams& p, const GqaPlan& plan, int index) {
    head = index % p.num_heads;
    const int token = index / p.num_heads;
    s = token % p.sequence_length;
    b = token / p.sequence_length;
    kv_head = head / p.group_size;
    row = s * p.group_size + head - kv_head * p.group_size;
    const int64_t unit = (b * p.kv_num_heads + kv_head) * plan.units_per_head + row / plan.unit_rows;
    partial = PartialRow(plan, unit, 0, row % plan.unit_rows);
  }
};

// kElements: of a row, in a block.
template <int kElements, int kThreads>
__global__ void __launch_bounds__(kThreads, 1)
    MergeKernel(const __grid_constant__ GqaParams p, const __grid_constant__ GqaPlan plan) {
  constexpr int kGroupThreads = kElements / 4;
  constexpr int kGroups = kThreads / kGroupThreads;
  static_assert(kGroups <= MergeShared<kThreads>::kMaxGroups, "weights beyond the last split");
  __shared__ MergeShared<kThreads> shared;
  const int thread = static_cast<int>(threadIdx.x);
  const int pieces = plan.padded_head_size / kElements;  // of a row
  const int first = static_cast<int>(blockIdx.x) % pieces * kElements;
  const MergeRow at(p, plan, static_cast<int>(blockIdx.x) / pieces);
  const int64_t output = OutputRow(p, at.b, at.s, at.head) + first;

  // Loads that depend on nothing first.
  const bool writes = thread < kElements && first + thread < p.head_size;
  const float scale = writes ? StaticValueScale(p, at.kv_head, first + thread) : 0.0f;
  const float sink = SinkLog2(p, at.head);
  if (!LoadSequence(p, at.b).valid) {
    if (writes) StoreActivation(p.output, output + thread, NAN, p.activation);
    return;
  }
  const int group = thread / kGroupThreads;
  const int quad = thread % kGroupThreads;
  const int row_items = plan.padded_head_size / 4;                          // float4 of a row
  const int64_t stride = static_cast<int64_t>(plan.unit_rows) * row_items;  // of a split
  const float4* const numerators =
      reinterpret_cast<const float4*>(p.partial_out) + at.partial * row_items + first / 4 + quad;
  const auto load = [&](int split, float4(&parts)[kReadsInFlight]) {
#pragma unroll
    for (int i = 0; i < kReadsInFlight; ++i, split += kGroups) {
      parts[i] = LoadIf(split < plan.splits, numerators + split * stride);
    }
  };
  WaitForPreviousKernel();
  // On their way while the statistics are. A split without tokens has left none: what is read there is not used.
  float4 parts[kReadsInFlight];
  load(group, parts);
  const float denominator = WeighSplits(p, plan, at.partial, sink, shared);

  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
  for (int split = group;;) {
#pragma unroll
    for (int i = 0; i < kReadsInFlight; ++i, split += kGroups) {
      const float weight = shared.weight[split];
      if (weight == kEmptySplit) continue;
      sum.x += parts[i].x * weight;
      sum.y += parts[i].y * weight;
      sum.z += parts[i].z * weight;
      sum.w += parts[i].w * weight;
    }
    if (split >= plan.splits) break;
    load(split, parts);
  }
  reinterpret_cast<float4*>(shared.sums)[thread] = sum;
  __syncthreads();
  if (!writes) return;
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < kGroups; ++i) total += shared.sums[i * kElements + thread];
  StoreActivation(p.output, output + thread, total / denominator * scale, p.activation);
}

template <int kHeadSize>
__global__ void __launch_bounds__(kFewMergeThreads)
    MergeFewKernel(const __grid_constant__ GqaParams p, const __grid_constant__ GqaPlan plan) {
  constexpr int kRowItems = kHeadSize / 4;  // float4 of a row
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t index = static_cast<int64_t>(blockIdx.x) * (kFewMergeThreads / kRowItems) + thread / kRowItems;
  const int item = thread % kRowItems;
  if (index >= static_cast<int64_t>(p.batch_size) * p.sequence_length * p.num_heads || 4 * item >= p.head_size) return;
  const MergeRow at(p, plan, static_cast<int>(index));
  if (!LoadSequence(p, at.b).valid) {
    for (int i = 0; i < 4; ++i) StoreActivation(p.output, index * p.head_size + 4 * item + i, NAN, p.activation);
    return;
  }
  const float2* const stats = p.partial_stats + at.partial;
  const auto* const sums = reinterpret_cast<const float4*>(p.partial_out) + at.partial * kRowItems + item;
  WaitForPreviousKernel();
  RowPart part;
#pragma unroll 1
  for (int begin = 0; begin < plan.splits; begin += kFewSplits / 2) {
    float2 s[kFewSplits / 2];
    float4 x[kFewSplits / 2];
#pragma unroll
    for (int i = 0; i < kFewSplits / 2; ++i) {
      s[i] = make_float2(-INFINITY, 0.0f);
      x[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (begin + i >= plan.splits) continue;
      s[i] = stats[(begin + i) * plan.unit_rows];
      x[i] = sums[static_cast<int64_t>(begin + i) * plan.unit_rows * kRowItems];
    }
#pragma unroll
    for (int i = 0; i < kFewSplits / 2; ++i) part.Add(s[i], x[i]);
  }
  WriteRowPart(p, plan.activation_vectors, at.b, at.kv_head, at.row, 4 * item, part);
}

template <int kElements>
cudaError_t LaunchMany(const GqaParams& p, const GqaPlan& plan, int64_t blocks, cudaStream_t stream) {
  if (plan.splits <= kFewMergeThreads / (kElements / 4) * kReadsInFlight) {
    return LaunchOverlapping(MergeKernel<kElements, kFewMergeThreads>, blocks, 1, kFewMergeThreads, 0, stream, p, plan);
  }
  return LaunchOverlapping(MergeKernel<kElements, kManyMergeThreads>, blocks, 1, kManyMergeThreads, 0, stream, p, plan);
}

}  // namespace

cudaError_t LaunchMerge(const GqaParams& p, const GqaPlan& plan, cudaStream_t stream) {
  const int64_t blocks = static_cast<int64_t>(p.batch_size) * p.sequence_length * p.num_heads;
  if (blocks == 0 || plan.splits <= 1) return cudaSuccess;
  if (plan.splits > kMergeSplits) return cudaErrorInvalidValue;
  return DispatchHeadSize(plan.padded_head_size, [&](auto head_size) {
    constexpr int kHeadSize = decltype(head_size)::value;
    if (plan.splits <= kFewSplits) {
      constexpr int kRows = kFewMergeThreads / (kHeadSize / 4);  // of a block
      return LaunchOverlapping(MergeFewKernel<kHeadSize>, (blocks + kRows - 1) / kRows, 1, kFewMergeThreads, 0, stream,
                               p, plan);
    }
    // Few rows leave most multiprocessors idle, and one takes long to read all parts of a row.
    if (kHeadSize > kPieceElements && blocks * (kHeadSize / kPieceElements) <= kFewBlocks) {
      return LaunchMany<kPieceElements>(p, plan, blocks * (kHeadSize / kPieceElements), stream);
    }
    return LaunchMany<kHeadSize>(p, plan, blocks, stream);
  });
}

}  // namespace kv_cache_quant
}  // namespace contrib
}  // namespace onnxruntime
