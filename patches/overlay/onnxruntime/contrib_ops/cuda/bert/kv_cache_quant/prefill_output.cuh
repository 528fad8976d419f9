// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
//
// Which rows a block of the prefill kernel owns, and how it writes them.

#pragma once

#include "contrib_ops/cuda/bert/kv_cache_quant/prefill_warp.cuh"

namespace onnxruntime {
namespace contrib {
namespace kv_cache_quant {

// Which row block of which (batch entry, KV head) a block works on.
template <int kRows>
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
    first_row = row_block * kRows;
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
template <int kRows>
__device__ __forceinline__ void FillOutput(const GqaParams& p, const PrefillWork<kRows>& work, float x) {
  const int rows = min(kRows, work.rows - work.first_row);
  for (int i = threadIdx.x; i < rows * p.head_size; i += kPrefillThreads) {
    const int row = i / p.head_size;
    StoreActivation(p.output, work.Output(p, work.first_row + row) + i - row * p.head_size, x, p.activation);
  }
}

// The maximum and the denominator of rows 16m + r + 8h, over all tokens.
template <typename Warp>
__device__ __forceinline__ void LoadStats(const Warp& warp, typename Warp::PerRow& maximum,
                                          typename Warp::PerRow& denominator) {
  const LanePlace at;
  Warp::OfRows(warp.State().maximum, at.r, maximum);
#pragma unroll
  for (int m = 0; m < Warp::kRowTiles; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float sum = warp.State().denominator[at.lane][2 * m + h];
      sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 1);
      denominator[m][h] = sum + __shfl_xor_sync(0xFFFFFFFFu, sum, 2);
    }
  }
}

// Results of one split: accumulators times v_norm and the statistics. valid_rows: of the warp's.
template <typename Warp>
__device__ __forceinline__ void WritePartial(const GqaParams& p, const Warp& warp, int lane, float v_norm,
                                             int64_t partial_row, int valid_rows) {
  const int c = lane % 4;
  typename Warp::PerRow maximum;
  typename Warp::PerRow denominator;
  LoadStats(warp, maximum, denominator);
#pragma unroll
  for (int m = 0; m < Warp::kRowTiles; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = 16 * m + lane / 4 + 8 * h;
      if (row >= valid_rows) continue;
      if (c == 0) {
        const float top = maximum[m][h] == kNoMaximum ? -INFINITY : maximum[m][h];
        p.partial_stats[partial_row + row] = make_float2(top, denominator[m][h]);
      }
      float* out = p.partial_out + (partial_row + row) * Warp::kHeadSize;
#pragma unroll
      for (int chunk = 0; chunk < Warp::Shape::kRowChunks; ++chunk) {
#pragma unroll
        for (int i = 0; i < Warp::kRun; i += 2) {
          *reinterpret_cast<float2*>(out + Warp::FirstElement(chunk, c) + i) =
              make_float2(warp.Sum(m, h, chunk, i) * v_norm, warp.Sum(m, h, chunk, i + 1) * v_norm);
        }
      }
    }
  }
}

// Finished rows, through the warp's rows of `staging` (shared), so that a row leaves in
// 16-byte vectors. first_row: of the warp. Rows from valid_end on are padding and get 0.
template <ActivationType kType, typename Warp>
__device__ __forceinline__ void WriteOutput(const GqaParams& p, const Warp& warp,
                                            const PrefillWork<Warp::Shape::kRows>& work, int lane, int first_row,
                                            int valid_end, float v_norm, uint8_t* staging) {
  constexpr int kChunks = Warp::kHeadSize / 8;
  using Layout = TileLayout<kChunks>;
  const int r = lane / 4;
  const int c = lane % 4;
  const bool scaled = !Warp::Rows::kExact && p.v.mode == KvScaleMode::kPerChannel;
  const float common = scaled ? 1.0f : StaticValueScale(p, work.kv_head, 0);
  typename Warp::PerRow maximum;
  typename Warp::PerRow denominator;
  LoadStats(warp, maximum, denominator);
  __syncwarp();  // the query rows that were in staging have been read
#pragma unroll
  for (int m = 0; m < Warp::kRowTiles; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = first_row + 16 * m + r + 8 * h;
      const float sink = SinkLog2(p, work.kv_head * p.group_size + row % p.group_size);
      const float top = fmaxf(maximum[m][h], sink);
      const float shrink = Exp2(maximum[m][h] - top);
      const float weight = common * __fdividef(v_norm * shrink,
                                               denominator[m][h] * shrink + Exp2(sink - top));
#pragma unroll
      for (int chunk = 0; chunk < Warp::Shape::kRowChunks; ++chunk) {
        const int d = Warp::FirstElement(chunk, c);
        uint32_t words[Warp::kRun / 2];
#pragma unroll
        for (int i = 0; i < Warp::kRun; i += 2) {
          float x[2] = {warp.Sum(m, h, chunk, i) * weight, warp.Sum(m, h, chunk, i + 1) * weight};
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            if (scaled && d + i + e < p.head_size) x[e] *= StaticValueScale(p, work.kv_head, d + i + e);
          }
          words[i / 2] = kType == ActivationType::kHalf ? PackHalf(x[0], x[1]) : PackBFloat16(x[0], x[1]);
          if (row >= valid_end) words[i / 2] = 0;
        }
        uint8_t* const to = staging + Layout::Offset(16 * m + r + 8 * h, d / 8) + d % 8 * 2;
#pragma unroll
        for (int i = 0; i < Warp::kRun / 2; ++i) reinterpret_cast<uint32_t*>(to)[i] = words[i];
      }
    }
  }
  __syncwarp();
  auto* const output = static_cast<uint16_t*>(p.output);
  const bool aligned = reinterpret_cast<uintptr_t>(p.output) % 16 == 0;
#pragma unroll 1
  for (int i = lane; i < Warp::kWarpRows * kChunks; i += 32) {
    const int row = i / kChunks;
    const int chunk = i % kChunks;
    if (first_row + row >= work.rows || chunk * 8 >= p.head_size) continue;
    const uint8_t* from = staging + Layout::Offset(row, chunk);
    uint16_t* to = output + work.Output(p, first_row + row) + chunk * 8;
    if (aligned) {
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j) to[j] = reinterpret_cast<const uint16_t*>(from)[j];
    }
  }
}

}  // namespace kv_cache_quant
}  // namespace contrib
}  // namespace onnxruntime
