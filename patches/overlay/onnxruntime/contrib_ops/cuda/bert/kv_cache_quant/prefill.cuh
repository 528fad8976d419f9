// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
//
// Attention of many query rows (S x G) of one KV head: over the quantized cache, or in a prompt over exact new rows.
//
// grid    units * splits blocks in x, ordered by (batch entry, KV head), split, row block, the latest rows first: they
//         attend the most tokens, and neighbouring blocks read the same K and V. A block owns 64 query rows and one
//         split of their tokens.
// block   4 warps of 16 rows.
// shared  64 query rows, then one tile of K and one of V (64 tokens, 32 for D 256), 16-bit elements: 24, 48 or 64 KB.
// align   cache rows: 16 bytes with plan.whole_rows, else 8 (8-bit codes) or 4 bytes (int4). Exact rows: 2 bytes, 16 to
//         be read in vectors.
//
// A tile is loaded into registers while the product before it runs (V during Q K^T, the next K during P V), and
// converted to 16 bit once per block on its way to shared memory.

#pragma once

#include "contrib_ops/cuda/bert/kv_cache_quant/dispatch.h"
#include "contrib_ops/cuda/bert/kv_cache_quant/kernel_launch.cuh"
#include "contrib_ops/cuda/bert/kv_cache_quant/prefill_launch.h"
#include "contrib_ops/cuda/bert/kv_cache_quant/prefill_warp.cuh"

namespace onnxruntime {
namespace contrib {
namespace kv_cache_quant {

constexpr int kPrefillWarps = 4;
constexpr int kPrefillThreads = 32 * kPrefillWarps;
static_assert(kPrefillRows == 16 * kPrefillWarps, "a matrix operand of rows for every warp");

// x, of which the compiler cannot know that it is the same as before: for values whose derivatives (an address for
// every tensor and scale type) would else be kept in registers through the loop.
__device__ __forceinline__ int64_t Hide(int64_t x) {
  asm volatile("" : "+l"(x));
  return x;
}
__device__ __forceinline__ int Hide(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// The rows of K or V of one (batch entry, KV head).
struct RowSource {
  const uint8_t* base;
  int64_t first;  // row of the first token of the split, from base
  int stride;     // bytes of a row; those of a whole tile fit 32 bits

  __device__ __forceinline__ const uint8_t* Row(int token) const { return base + (Hide(first) + token) * stride; }
  __device__ __forceinline__ bool Aligned() const {
    return (reinterpret_cast<uintptr_t>(base) | static_cast<uint32_t>(stride)) % 16 == 0;
  }
};

// begin: first token of the split.
template <typename Rows>
__device__ __forceinline__ void FindRows(const GqaParams& p, int64_t b, int kv_head, int64_t begin, RowSource* k,
                                         RowSource* v) {
  const int64_t head = b * p.kv_num_heads + kv_head;
  if constexpr (Rows::kExact) {
    const int64_t element = static_cast<int64_t>(kv_head) * p.head_size;
    const int64_t first = b * p.sequence_length + begin;
    const int stride = static_cast<int>(p.kv_stride * 2);
    *v = {static_cast<const uint8_t*>(p.value) + element * 2, first, stride};
    *k = {static_cast<const uint8_t*>(p.key) + element * 2, first, stride};
    if (p.cos_cache != nullptr) {
      *k = {static_cast<const uint8_t*>(p.prompt_key), head * p.sequence_length + begin, p.head_size * 2};
    }
  } else {
    *k = {p.k.codes, head * p.capacity + begin, p.row_bytes};
    *v = {p.v.codes, head * p.capacity + begin, p.row_bytes};
  }
}

// The scales of tokens lane, lane + 32, ... of a tile, whose first one is in row `row` of the scale cache; 0, which
// does not count as a scale, from count on.
template <int kLaneScales>
__device__ __forceinline__ void LoadTileScales(const KvSide& side, int64_t row, int count, int lane,
                                               float (&scales)[kLaneScales]) {
#pragma unroll
  for (int i = 0; i < kLaneScales; ++i) {
    scales[i] = lane + 32 * i < count ? LoadTokenScale(side, row + lane + 32 * i) : 0.0f;
  }
}

// Which row block of which (batch entry, KV head) a block works on.
struct PrefillWork {
  int64_t b;
  int kv_head;
  int64_t unit;
  int split;
  int first_row;  // of the s * G + g rows
  int rows;       // S * G

  __device__ __forceinline__ PrefillWork(const GqaParams& p, const GqaPlan& plan, int index) {
    const int blocks_per_head = plan.units_per_head * plan.splits;
    const int head = index / blocks_per_head;
    const int rest = index % blocks_per_head;
    const int row_block = plan.units_per_head - 1 - rest % plan.units_per_head;
    b = head / p.kv_num_heads;
    kv_head = head % p.kv_num_heads;
    unit = static_cast<int64_t>(head) * plan.units_per_head + row_block;
    split = rest / plan.units_per_head;
    first_row = row_block * kPrefillRows;
    rows = p.sequence_length * p.group_size;
  }

  // First output element of a row.
  __device__ __forceinline__ int64_t Output(const GqaParams& p, int row) const {
    const int s = row / p.group_size;
    return OutputRow(p, b, s, kv_head * p.group_size + row - s * p.group_size);
  }
};

// Rows from here on are right padding of a prompt.
template <typename Rows>
__device__ __forceinline__ int ValidRows(const GqaParams& p, const SequenceState& sequence) {
  return (Rows::kExact ? sequence.rows : p.sequence_length) * p.group_size;
}

// The block's rows of output all x.
__device__ __forceinline__ void FillOutput(const GqaParams& p, const PrefillWork& work, float x) {
  const int rows = min(kPrefillRows, work.rows - work.first_row);
  for (int i = threadIdx.x; i < rows * p.head_size; i += kPrefillThreads) {
    const int row = i / p.head_size;
    StoreActivation(p.output, work.Output(p, work.first_row + row) + i - row * p.head_size, x, p.activation);
  }
}

// The tokens [Low, End) that a row attends, counted from the first token of the split, of which they may lie outside.
struct AttendedTokens {
  int position;  // of the row, counted likewise

  __device__ __forceinline__ int Low(int32_t window) const {
    return window < 0 ? 0 : static_cast<int>(max(static_cast<int64_t>(position) - window, int64_t{0}));
  }
  __device__ __forceinline__ int End() const { return position + 1; }

  // Whether the row attends all, or any, of the tokens [tile, tile + tokens).
  __device__ __forceinline__ bool All(int32_t window, int tile, int tokens) const {
    return tile >= Low(window) && tile + tokens <= End();
  }
  __device__ __forceinline__ bool Any(int32_t window, int tile, int tokens) const {
    return tile < End() && tile + tokens > Low(window);
  }

  // In the tile that begins at token `tile`.
  __device__ __forceinline__ TileSpan Span(int32_t window, int tile) const {
    const int low = Low(window);
    return {low - tile, static_cast<uint32_t>(max(End() - low, 0))};
  }
};

// Results of one split: accumulators as they are and the statistics. valid_rows: of the warp's 16.
template <typename Rows, int kHeadSize>
__device__ __forceinline__ void WritePartial(const GqaParams& p, const PrefillWarp<Rows, kHeadSize>& warp,
                                             int lane, int64_t partial_row, int valid_rows) {
  const int c = lane % 4;
  const float v_norm = PowerOfTwo(warp.v_norm_exponent);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = lane / 4 + 8 * h;
    if (row >= valid_rows) continue;
    if (c == 0) p.partial_stats[partial_row + row] = make_float2(warp.maximum[h], warp.denominator[h]);
    float* out = p.partial_out + (partial_row + row) * kHeadSize;
#pragma unroll
    for (int n = 0; n < PrefillWarp<Rows, kHeadSize>::kOutTiles; ++n) {
      const float x = warp.out[n][2 * h] * v_norm;
      const float y = warp.out[n][2 * h + 1] * v_norm;
      if constexpr (Rows::kInterleaved) {
        out[warp.Element(n, c, 0)] = x;
        out[warp.Element(n, c, 1)] = y;
      } else {
        *reinterpret_cast<float2*>(out + warp.Element(n, c, 0)) = make_float2(x, y);
      }
    }
  }
}

// Finished rows, through the warp's 16 rows of `staging` (shared, laid out like a tile), so that a row leaves in
// 16-byte vectors. scales: shared, kHeadSize, the warp's own. first_row: of the warp. Rows from valid_end on
// are padding and get 0.
template <ActivationType kType, typename Rows, int kHeadSize>
__device__ __forceinline__ void WriteOutput(const GqaParams& p, const PrefillWarp<Rows, kHeadSize>& warp,
                                            const PrefillWork& work, int lane, int first_row, int valid_end,
                                            float* scales, uint16_t* staging) {
  const int r = lane / 4;
  const int c = lane % 4;
  for (int d = lane; d < kHeadSize; d += 32) {
    scales[d] = d < p.head_size ? StaticValueScale(p, work.kv_head, d) : 0.0f;
  }
  float weight[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = first_row + r + 8 * h;
    const float sink = SinkLog2(p, work.kv_head * p.group_size + row % p.group_size);
    const float top = fmaxf(warp.maximum[h], sink);
    const float shrink = Exp2(warp.maximum[h] - top);
    weight[h] = __fdividef(PowerOfTwo(warp.v_norm_exponent) * shrink, warp.denominator[h] * shrink + Exp2(sink - top));
  }
  const bool valid[2] = {first_row + r < valid_end, first_row + r + 8 < valid_end};
  __syncwarp();  // the scales are there; the query rows that were in staging have been read
#pragma unroll
  for (int n = 0; n < PrefillWarp<Rows, kHeadSize>::kOutTiles; ++n) {
    const int d0 = warp.Element(n, c, 0);
    const int d1 = warp.Element(n, c, 1);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      uint16_t* to = staging + ChunkIndex<kHeadSize>(r + 8 * h, n);
      const float x = warp.out[n][2 * h] * weight[h] * scales[d0];
      const float y = warp.out[n][2 * h + 1] * weight[h] * scales[d1];
      to[d0 % 8] = valid[h] ? ActivationToBits(x, kType) : uint16_t{0};
      to[d1 % 8] = valid[h] ? ActivationToBits(y, kType) : uint16_t{0};
    }
  }
  __syncwarp();
  constexpr int kChunks = kHeadSize / 8;
  auto* const output = static_cast<uint16_t*>(p.output);
  const bool aligned = reinterpret_cast<uintptr_t>(p.output) % 16 == 0;
#pragma unroll 1
  for (int i = lane; i < 16 * kChunks; i += 32) {
    const int row = i / kChunks;
    const int chunk = i % kChunks;
    if (first_row + row >= work.rows || chunk * 8 >= p.head_size) continue;
    const uint16_t* from = staging + ChunkIndex<kHeadSize>(row, chunk);
    uint16_t* to = output + work.Output(p, first_row + row) + chunk * 8;
    if (aligned) {
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j) to[j] = from[j];
    }
  }
}

template <typename Rows, int kHeadSize>
__device__ __forceinline__ void PrefillBlock(const GqaParams& p, const GqaPlan& plan) {
  using Warp = PrefillWarp<Rows, kHeadSize>;
  using Copy = TileCopy<Rows, kHeadSize, Warp::kTokens, kPrefillThreads, !Warp::kLoadAhead && !Rows::kExact>;
  constexpr int kTokens = Warp::kTokens;
  extern __shared__ __align__(128) uint16_t prefill_shared[];
  uint16_t* const queries = prefill_shared;
  uint16_t* const keys = queries + kPrefillRows * kHeadSize;
  uint16_t* const values = keys + kTokens * kHeadSize;

  AllowNextKernel();
  const PrefillWork work(p, plan, static_cast<int>(blockIdx.x));
  const SequenceState sequence = LoadSequence(p, work.b);
  if (!sequence.valid) {
    if (work.split == 0) FillOutput(p, work, NAN);
    return;
  }
  const int valid_end = ValidRows<Rows>(p, sequence);
  if (work.first_row >= valid_end) {
    FillOutput(p, work, 0.0f);
    return;
  }
  const auto position = [&](int row) { return sequence.past + min(row, valid_end - 1) / p.group_size; };
  const TokenRange range = SplitRange(position(work.first_row), position(work.first_row + kPrefillRows - 1),
                                      p.local_window_size, work.split, plan.splits, kTokens);
  const int tokens = static_cast<int>(max(range.end - range.begin, int64_t{0}));

  // The first tile of K is on its way while Q is laid out.
  RowSource k_rows;
  RowSource v_rows;
  FindRows<Rows>(p, work.b, work.kv_head, range.begin, &k_rows, &v_rows);
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const Copy copy(thread, p.head_size, Rows::kExact ? k_rows.Aligned() && v_rows.Aligned() : plan.whole_rows);
  const bool k_per_token = !Rows::kExact && p.k.mode == KvScaleMode::kPerToken;
  const bool v_per_token = !Rows::kExact && p.v.mode == KvScaleMode::kPerToken;
  uint4 staged[Copy::kVectors];
  typename Warp::LaneScales k_scales;
  typename Warp::LaneScales v_scales;
  const auto load_keys = [&](int tile) {
    copy.Load(k_rows.Row(tile), Hide(k_rows.stride), tokens - tile, staged);
    if (k_per_token) LoadTileScales(p.k, Hide(k_rows.first) + tile, tokens - tile, lane, k_scales);
  };
  const auto load_values = [&](int tile) {
    copy.Load(v_rows.Row(tile), Hide(v_rows.stride), tokens - tile, staged);
    if (v_per_token) LoadTileScales(p.v, Hide(v_rows.first) + tile, tokens - tile, lane, v_scales);
  };
  WaitForPreviousKernel();  // the new rows are the append kernel's work
  if (Warp::kLoadAhead && tokens > 0) load_keys(0);

  auto* const row_factor = reinterpret_cast<float*>(values);  // until the first tile of V
  const auto place = [](int row, int d) {
    const int e = d & 7;
    return ChunkIndex<kHeadSize>(row, d >> 3) + (Rows::kInterleaved ? (e & 3) << 1 | e >> 2 : e);
  };
  LoadQueryTile<kHeadSize, kPrefillRows, kPrefillWarps, Rows::kExact>(p, sequence.past, work.b, work.kv_head,
                                                                      work.first_row, valid_end, queries, place,
                                                                      row_factor);
  __syncwarp();  // a warp reads only what it has written
  const int warp_row = thread / 32 * 16;
  const int first_row = work.first_row + warp_row;
  float common_factor = p.scale * kLog2E;
  if (!Rows::kExact && p.k.mode == KvScaleMode::kPerTensor) common_factor *= p.k.static_scale[0];
  Warp warp(lane, queries + warp_row * kHeadSize, row_factor + warp_row, common_factor, v_per_token);
  const int32_t window = p.local_window_size;
  const auto attended = [&](int row) { return AttendedTokens{static_cast<int>(position(row) - range.begin)}; };
  // Of row lane % 16 of the warp; -1 where the warp has no rows and nothing to do.
  const AttendedTokens own{first_row < valid_end ? attended(first_row + lane % 16).position : -1};
  const AttendedTokens block_first = attended(work.first_row);
  const AttendedTokens block_last = attended(work.first_row + kPrefillRows - 1);

#pragma unroll 1
  for (int tile = 0; tile < tokens; tile += kTokens) {
    // For D 256, looking for Inf and NaN in every tile costs less than the registers that tell where they matter.
    const bool block_masked = kHeadSize == 256 || tile < block_last.Low(window) || tile + kTokens > block_first.End();
    const bool active = __any_sync(0xFFFFFFFFu, own.Any(window, tile, kTokens));
    if (!Warp::kLoadAhead) load_keys(tile);
    copy.Store(staged, keys);
    if (Warp::kLoadAhead) load_values(tile);
    __syncthreads();  // K is there; all warps are done with the V before it

    typename Warp::Scores scores;
    if (active) {
      warp.Score(keys, scores);
      if (k_per_token) warp.ScaleScores(k_scales, scores);
    }
    if (!Warp::kLoadAhead) load_values(tile);
    bool scalar = false;
    if constexpr (Rows::kMayBeNonFinite) scalar = block_masked && Copy::HasNonFinite(staged);
    copy.Store(staged, values);
    if (Warp::kLoadAhead && tile + kTokens < tokens) load_keys(tile + kTokens);
    // V is there; all warps are done with K.
    if (Rows::kMayBeNonFinite && block_masked) {
      scalar = __syncthreads_or(scalar) != 0;
    } else {
      __syncthreads();
    }

    if (active) {
      const bool masked = !__all_sync(0xFFFFFFFFu, own.All(window, tile, kTokens));
      const TileSpan span[2] = {AttendedTokens{warp.OfRow(own.position, 0)}.Span(window, tile),
                                AttendedTokens{warp.OfRow(own.position, 1)}.Span(window, tile)};
      warp.Weigh(p.softcap, v_per_token, masked, span, v_scales, scores);
      if (Rows::kMayBeNonFinite && scalar && masked) {
        warp.MixAttended(values, scores, span, keys + warp_row * kTokens);
      } else {
        warp.Mix(values, scores);
      }
    }
    if (Rows::kMayBeNonFinite && scalar) __syncthreads();  // weights lie where the next K goes
  }

  // Found anew, from indices that the compiler cannot know to be the same: keeping them costs registers in the loop.
  int result_block;
  int result_thread;
  asm volatile("mov.u32 %0, %%ctaid.x;\n" : "=r"(result_block));
  asm volatile("mov.u32 %0, %%tid.x;\n" : "=r"(result_thread));
  const PrefillWork result(p, plan, result_block);
  const int result_lane = result_thread % 32;
  const int result_warp = result_thread / 32;
  const int result_row = result.first_row + 16 * result_warp;
  const int result_end = ValidRows<Rows>(p, LoadSequence(p, result.b));
  if (result_row >= result.rows) return;
  warp.Finish();
  if (plan.splits > 1) {
    const int64_t partial_row = PartialRow(plan, result.unit, result.split, 16 * result_warp);
    WritePartial(p, warp, result_lane, partial_row, result_end - result_row);
    return;
  }
  uint16_t* const staging = queries + 16 * result_warp * kHeadSize;
  auto* const scales = reinterpret_cast<float*>(keys) + result_warp * kHeadSize;
  if (Rows::kExact ? !Rows::kBFloat16 : p.activation == ActivationType::kHalf) {
    WriteOutput<ActivationType::kHalf>(p, warp, result, result_lane, result_row, result_end, scales, staging);
  } else {
    WriteOutput<ActivationType::kBFloat16>(p, warp, result, result_lane, result_row, result_end, scales, staging);
  }
}

template <typename Rows, int kHeadSize>
__global__ void __launch_bounds__(kPrefillThreads, kHeadSize == 256 ? 1 : 2)
    PrefillKernel(const __grid_constant__ GqaParams p, const __grid_constant__ GqaPlan plan) {
#if __CUDA_ARCH__ >= 800
  PrefillBlock<Rows, kHeadSize>(p, plan);
#else
  // No bfloat16 product: MakePlan rejects the call.
  if constexpr (!Rows::kBFloat16) PrefillBlock<Rows, kHeadSize>(p, plan);
#endif
}

template <typename Rows>
cudaError_t LaunchPrefillRows(const GqaParams& p, const GqaPlan& plan, cudaStream_t stream) {
  const int64_t blocks = static_cast<int64_t>(p.batch_size) * p.kv_num_heads * plan.units_per_head * plan.splits;
  if (blocks == 0) return cudaSuccess;
  return DispatchHeadSize(plan.padded_head_size, [&](auto head_size) {
    constexpr int kHeadSize = decltype(head_size)::value;
    constexpr int kBytes = (kPrefillRows + 2 * PrefillWarp<Rows, kHeadSize>::kTokens) * kHeadSize * 2;
    if (kBytes > 48 * 1024) {
      const cudaError_t error = cudaFuncSetAttribute(PrefillKernel<Rows, kHeadSize>,
                                                     cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
      if (error != cudaSuccess) return error;
    }
    return LaunchOverlapping(PrefillKernel<Rows, kHeadSize>, blocks, kPrefillThreads, kBytes, stream, p, plan);
  });
}

}  // namespace kv_cache_quant
}  // namespace contrib
}  // namespace onnxruntime
