// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
//
// Attention of many query rows (S x G) of one KV head: over the quantized cache, or in a prompt over exact new rows.
//
// grid    units * splits blocks in x, ordered by (batch entry, KV head), split, row block, the latest rows first: they
//         attend the most tokens, and neighbouring blocks read the same K and V. A block owns 128 query rows (64 for
//         D 256) and one split of their tokens.
// block   4 warps of 32 rows (16 for D 256).
// shared  query rows as operands; tiles of K and V (64 tokens, 32 for D 256) as they are in memory, two of each for
//         codes; 5 KB of state: prefill_shape.cuh. Up to 70 KB, and before sm_80 up to 54 KB.
// align   cache rows: 16 bytes to be read in vectors, else 8 (8-bit codes) or 4 bytes (int4). Exact rows: 2 bytes, 16
//         to be read in vectors.
//
// Tiles are copied asynchronously. Every warp turns their words into operands for itself: prefill_warp.cuh.

#pragma once

#include "contrib_ops/cuda/bert/kv_cache_quant/dispatch.h"
#include "contrib_ops/cuda/bert/kv_cache_quant/kernel_launch.cuh"
#include "contrib_ops/cuda/bert/kv_cache_quant/prefill_launch.h"
#include "contrib_ops/cuda/bert/kv_cache_quant/prefill_output.cuh"
#include "contrib_ops/cuda/bert/kv_cache_quant/prefill_scales.cuh"

namespace onnxruntime {
namespace contrib {
namespace kv_cache_quant {

// begin: first token of the split.
template <typename Rows>
__device__ __forceinline__ void FindRows(const GqaParams& p, int64_t b, int kv_head, int64_t begin, SplitState* state) {
  const int64_t head = b * p.kv_num_heads + kv_head;
  const auto rows = [](const void* base, int64_t first, int64_t stride) {
    const uint8_t* const at = static_cast<const uint8_t*>(base) + first * stride;
    const bool aligned = (reinterpret_cast<uintptr_t>(at) | static_cast<uintptr_t>(stride)) % 16 == 0;
    return RowSource{at, static_cast<int>(stride), aligned};
  };
  if constexpr (Rows::kExact) {
    const int64_t element = static_cast<int64_t>(kv_head) * p.head_size;
    const int64_t first = b * p.sequence_length + begin;
    state->v = rows(static_cast<const uint16_t*>(p.value) + element, first, p.kv_stride * 2);
    state->k = p.cos_cache == nullptr
                   ? rows(static_cast<const uint16_t*>(p.key) + element, first, p.kv_stride * 2)
                   : rows(p.prompt_key, head * p.sequence_length + begin, static_cast<int64_t>(p.head_size) * 2);
  } else {
    state->first_row = head * p.capacity + begin;
    state->k = rows(p.k.codes, state->first_row, p.row_bytes);
    state->v = rows(p.v.codes, state->first_row, p.row_bytes);
  }
}

// From scaled products to log2 units, but for what is done to single rows.
template <typename Rows>
__device__ __forceinline__ float CommonFactor(const GqaParams& p) {
  const float factor = p.scale * kLog2E;
  return !Rows::kExact && p.k.mode == KvScaleMode::kPerTensor ? factor * p.k.static_scale[0] : factor;
}

// Lays out the warp's query rows as operands, and begins with their state. Rows from `rows` on are 0.
template <typename Warp>
__device__ __forceinline__ void LayOutQuery(const GqaParams& p, int64_t past, int64_t b, int kv_head, int first_row,
                                            int rows, uint16_t* operands,
                                            RowState<Warp::kRowTiles>* state) {
  using Rows = typename Warp::Rows;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const float common = CommonFactor<Rows>(p);
  const float sign = common < 0.0f ? -1.0f : 1.0f;  // the largest product is to be the largest score
  constexpr ActivationType kElement = Rows::kBFloat16 ? ActivationType::kBFloat16 : ActivationType::kHalf;
  const auto store = [&](int row, int d, float x) {
    const float unit = Rows::KeyUnit(d);
    const uint16_t bits = ActivationToBits(x * (sign * Rows::kQueryUnit / unit), kElement);
    operands[Warp::QueryIndex(row, d)] = bits;
    return ActivationFromBits(bits, kElement) * unit;  // what the products will have
  };
  float factor = 1.0f;
  float sum = 0.0f;
  LoadQueryRows<Warp::kHeadSize, Warp::kWarpRows, Rows::kExact>(p, past, b, kv_head, first_row, rows, lane, store,
                                                                &factor, &sum);
  if (lane < Warp::kWarpRows) {
    constexpr float kLeast = 0x1p-126f;  // not 0, whose product with -inf is NaN
    const float row_factor = factor * (fabsf(common) / Rows::kQueryUnit);
    state->factor[lane] = row_factor < kLeast ? kLeast : row_factor;
    state->bias[lane] = -Rows::kKeyBias * sum;
    state->maximum[lane] = kNoMaximum;
  }
#pragma unroll
  for (int i = 0; i < 2 * Warp::kRowTiles; ++i) state->denominator[lane][i] = 0.0f;
}

template <typename Shape>
__device__ __forceinline__ void PrefillBlock(const GqaParams& p, const GqaPlan& plan) {
  using Warp = PrefillWarp<Shape>;
  using Rows = typename Shape::Rows;
  constexpr int kTokens = Shape::kTokens;
  constexpr int kTileBytes = Shape::kTileBytes;
  using Copy = TileCopy<Rows, Shape::kHeadSize, kTokens, kPrefillThreads>;
  constexpr bool kTwoStages = Shape::kStages == 2;
  extern __shared__ __align__(128) uint8_t prefill_shared[];
  uint8_t* const tiles = prefill_shared + Shape::kQueryBytes;
  auto* const rest = reinterpret_cast<typename Shape::Rest*>(tiles + Shape::kStages * 2 * kTileBytes);

  AllowNextKernel();
  const PrefillWork<Shape::kRows> work(p, plan, static_cast<int>(blockIdx.x));
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
  const TokenRange range = SplitRange(position(work.first_row), position(work.first_row + Shape::kRows - 1),
                                      p.local_window_size, work.split, plan.splits, kTokens);

  SplitState found;
  FindRows<Rows>(p, work.b, work.kv_head, range.begin, &found);
  const auto attended = [&](int row) { return AttendedTokens{static_cast<int>(position(row) - range.begin)}; };
  const int32_t window = p.local_window_size < 0 ? INT32_MAX : p.local_window_size;
  const int tokens = static_cast<int>(max(range.end - range.begin, int64_t{0}));
  found.tokens = tokens;
  found.window = window;
  found.first_low = attended(work.first_row).Low(window);
  found.last_low = attended(work.first_row + Shape::kRows - 1).Low(window);
  found.first_end = attended(work.first_row).End();
  if (threadIdx.x == 0) rest->split = found;

  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const int warp_index = thread / 32;
  const uint32_t tiles_address = SharedAddress(tiles);
  const auto start = [&](const RowSource& rows, int tile, int count, uint32_t to) {
    const int width = Rows::kExact ? p.head_size * 2 : p.row_bytes;
    const uint8_t* const at = rows.at + static_cast<int64_t>(Hide(tile)) * rows.stride;
    Copy(ReadThread()).Start(at, rows.stride, width, count - tile, rows.aligned, to);
  };
  ScaleCopy<Shape::kMostTokens> first_scales;

  WaitForPreviousKernel();  // the new rows are the append kernel's work
  // The first tile is on its way while Q is laid out.
  if (tokens > 0) {
    start(found.k, 0, tokens, tiles_address);
    if (kTwoStages) start(found.v, 0, tokens, tiles_address + kTileBytes);
    if (!Rows::kExact) first_scales.Load(p, found.first_row, tokens);
  }
  const int first_row = work.first_row + warp_index * Shape::kWarpRows;
  LayOutQuery<Warp>(p, sequence.past, work.b, work.kv_head, first_row, valid_end,
                    reinterpret_cast<uint16_t*>(prefill_shared + warp_index * Shape::kWarpQueryBytes),
                    &rest->rows[warp_index]);
  if (lane < Shape::kWarpRows) {
    rest->rows[warp_index].position[lane] = first_row < valid_end ? attended(first_row + lane).position : -1;
  }
  // Below every scale that matters: the first tile chooses.
  const int smallest = p.v.mode == KvScaleMode::kPerToken ? -126 : 0;
  if (!Rows::kExact) first_scales.Store(p, found.first_low, smallest, &rest->scales[0]);
  __syncthreads();  // the state is there
  const SplitState& state = rest->split;
  Warp warp(prefill_shared, rest->rows);

#pragma unroll 1
  for (int tile = 0; tile < state.tokens; tile += kTokens) {
    const int next = tile + kTokens;
    const int odd = tile / kTokens & 1;
    const uint32_t keys = tiles_address + (kTwoStages ? odd * 2 * kTileBytes : 0);
    const uint32_t values = keys + kTileBytes;
    const AttendedTokens own = warp.OwnTokens();
    const bool active = __any_sync(0xFFFFFFFFu, own.Any(state.window, tile, kTokens));
    const bool masked = !__all_sync(0xFFFFFFFFu, own.All(state.window, tile, kTokens));
    WaitForCopies();
    __syncthreads();  // K is there, with two stages V; all warps are done with the tile before
    const bool more = next < state.tokens;
    if (kTwoStages && more) {
      const uint32_t other = tiles_address + (1 - odd) * 2 * kTileBytes;
      start(state.k, next, state.tokens, other);
      start(state.v, next, state.tokens, other + kTileBytes);
    }
    if (!kTwoStages) start(state.v, tile, state.tokens, values);
    ScaleCopy<Shape::kMostTokens> scale_copy;
    if (!Rows::kExact && more) scale_copy.Load(p, state.first_row + next, state.tokens - next);

    typename Warp::Scores scores;
    if (active) {
      warp.Score(keys, scores);
    } else {
      warp.NoScores(scores);
    }
    if (!Rows::kExact) {
      const auto& scales = rest->scales[odd];
      if (scales.shrink != 1.0f) warp.Shrink(scales.shrink);
      if (more) scale_copy.Store(p, state.first_low - next, scales.v_exponent, &rest->scales[1 - odd]);
    }
    if (!kTwoStages) {
      WaitForCopies();
      __syncthreads();  // V is there; all warps are done with K
      if (more) start(state.k, next, state.tokens, keys);
    }
    if (Rows::kMayBeNonFinite && (tile < state.last_low || next > state.first_end)) {
      uint8_t* const rows = prefill_shared + (values - SharedAddress(prefill_shared));
      if (__syncthreads_or(Copy(ReadThread()).HasNonFinite(rows)) != 0) {
        SpoilSums(warp, rows, state.window, tile);
        __syncthreads();
        Copy(ReadThread()).Clean(rows);
        __syncthreads();
      }
    }
    if (active) warp.Attend(p.softcap, masked, state.window, tile, &rest->scales[odd], values, scores);
  }

  // Found anew, from indices that the compiler cannot know to be the same: keeping them costs registers in the loop.
  int result_block;
  int result_thread;
  asm volatile("mov.u32 %0, %%ctaid.x;\n" : "=r"(result_block));
  asm volatile("mov.u32 %0, %%tid.x;\n" : "=r"(result_thread));
  const PrefillWork<Shape::kRows> result(p, plan, result_block);
  const int result_lane = result_thread % 32;
  const int result_warp = result_thread / 32;
  const int result_row = result.first_row + Shape::kWarpRows * result_warp;
  const int result_end = ValidRows<Rows>(p, LoadSequence(p, result.b));
  if (result_row >= result.rows) return;
  float v_norm = 1.0f;
  if (!Rows::kExact && state.tokens > 0) v_norm = PowerOfTwo(rest->scales[(state.tokens - 1) / kTokens & 1].v_exponent);
  if (plan.splits > 1) {
    const int64_t partial_row = PartialRow(plan, result.unit, result.split, Shape::kWarpRows * result_warp);
    WritePartial(p, warp, result_lane, v_norm, partial_row, result_end - result_row);
    return;
  }
  uint8_t* const staging = prefill_shared + result_warp * Shape::kWarpQueryBytes;
  if (Rows::kExact ? !Rows::kBFloat16 : p.activation == ActivationType::kHalf) {
    WriteOutput<ActivationType::kHalf>(p, warp, result, result_lane, result_row, result_end, v_norm, staging);
  } else {
    WriteOutput<ActivationType::kBFloat16>(p, warp, result, result_lane, result_row, result_end, v_norm, staging);
  }
}

template <typename Shape>
__global__ void __launch_bounds__(kPrefillThreads, 2)
    PrefillKernel(const __grid_constant__ GqaParams p, const __grid_constant__ GqaPlan plan) {
#if __CUDA_ARCH__ >= 800
  PrefillBlock<Shape>(p, plan);
#else
  // No bfloat16 product: MakePlan rejects the call.
  if constexpr (!Shape::Rows::kBFloat16) PrefillBlock<Shape>(p, plan);
#endif
}

template <typename Shape>
cudaError_t LaunchPrefillShape(const GqaParams& p, const GqaPlan& plan, cudaStream_t stream) {
  const int64_t blocks = static_cast<int64_t>(p.batch_size) * p.kv_num_heads * plan.units_per_head * plan.splits;
  const auto kernel = PrefillKernel<Shape>;
  cudaFuncAttributes attributes;
  cudaError_t error = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel));
  if (error != cudaSuccess) return error;
  const int bytes = Shape::SharedBytes(attributes.ptxVersion);
  if (bytes > 48 * 1024) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) return error;
  }
  return LaunchOverlapping(kernel, blocks, 1, kPrefillThreads, bytes, stream, p, plan);
}

template <typename Rows>
cudaError_t LaunchPrefillRows(const GqaParams& p, const GqaPlan& plan, cudaStream_t stream) {
  if (p.batch_size == 0 || plan.units_per_head == 0) return cudaSuccess;
  return DispatchHeadSize(plan.padded_head_size, [&](auto head_size) {
    constexpr int kHeadSize = decltype(head_size)::value;
    if constexpr (kHeadSize == 256) {
      return LaunchPrefillShape<PrefillShape<Rows, kHeadSize, 1>>(p, plan, stream);
    } else {
      // The only unit of few rows keeps all warps busy with half as many each.
      if constexpr (!Rows::kExact) {
        if (plan.unit_rows <= 64) return LaunchPrefillShape<PrefillShape<Rows, kHeadSize, 1>>(p, plan, stream);
      }
      return LaunchPrefillShape<PrefillShape<Rows, kHeadSize, 2>>(p, plan, stream);
    }
  });
}

}  // namespace kv_cache_quant
}  // namespace contrib
}  // namespace onnxruntime
