// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
//
// What the attention kernels and the merge share: which query rows a unit has, which tokens a split has, where
// partial results lie, and how a finished row is written.
//
// Partial results of split i of unit u, for each of its unit_rows rows:
//   stats  (maximum m of the scores in log2 units, denominator l = sum of 2^(score - m)); (-inf, 0) where the split
//          has no token of the row
//   out    sum of 2^(score - m) * V row, without V's static scale; unspecified where l is 0

#pragma once

#include <cmath>

#include "contrib_ops/cuda/bert/kv_cache_quant/activation.cuh"
#include "contrib_ops/cuda/bert/kv_cache_quant/mma.cuh"
#include "contrib_ops/cuda/bert/kv_cache_quant/plan.h"

namespace onnxruntime {
namespace contrib {
namespace kv_cache_quant {

constexpr float kLog2E = 1.4426950408889634f;

// The smallest n with 2^n >= x; x: 1 or more.
__device__ __forceinline__ int CeilLog2(int x) { return 32 - __clz(x - 1); }

// Tokens [begin, end) of one block; empty where begin >= end.
struct TokenRange {
  int64_t begin;
  int64_t end;
  int parts;  // splits that are not empty: the first ones
};

// The part of split `split` of the tokens that rows at positions [first, last] attend, in whole tiles of `tile` tokens
// from the first one. Every part but the last has the same number of tiles, and `least` tokens or more.
__device__ __forceinline__ TokenRange SplitRange(int64_t first_position, int64_t last_position, int32_t window,
                                                 int split, int splits, int tile, int least = 0) {
  const int64_t begin = window < 0 || first_position <= window ? 0 : (first_position - window) / tile * tile;
  const int64_t end = last_position + 1;
  // A grid has at most 2^31 blocks, a split 2^31 tokens: 32 bits, whose divisions are short.
  const auto tiles = static_cast<uint32_t>((end - begin + tile - 1) / tile);
  const auto count = static_cast<uint32_t>(splits);
  const uint32_t part_tiles = max((tiles + count - 1) / count, static_cast<uint32_t>(least / tile));
  const auto part = static_cast<int64_t>(part_tiles) * tile;
  TokenRange range;
  range.begin = begin + split * part;
  range.end = range.begin + part < end ? range.begin + part : end;
  range.parts = static_cast<int>((tiles + part_tiles - 1) / max(part_tiles, 1u));
  return range;
}

// Index of row `row` of split `split` of unit `unit` in partial_stats, and in partial_out in units of padded rows.
__device__ __forceinline__ int64_t PartialRow(const GqaPlan& plan, int64_t unit, int split, int row) {
  return (unit * plan.splits + split) * plan.unit_rows + row;
}

// Logit of the attention sink of query head `head`, in log2 units; -inf: none.
__device__ __forceinline__ float SinkLog2(const GqaParams& p, int head) {
  if (p.head_sink != nullptr) return LoadActivation(p.head_sink, head, p.activation) * kLog2E;
  return p.smooth_softmax ? 0.0f : -INFINITY;
}

// Softcap of a score, from and to log2 units: c tanh(s / c) = c - 2c / (e^(2s / c) + 1), whose error is c * 2^-23.
// factor: 2 / c.
__device__ __forceinline__ float SoftcapLog2(float s, float softcap, float factor) {
  const float c = softcap * kLog2E;
  return c - __fdividef(2.0f * c, Exp2(s * factor) + 1.0f);
}
__device__ __forceinline__ float SoftcapLog2(float s, float softcap) { return SoftcapLog2(s, softcap, 2.0f / softcap); }

// The factor that a V row's codes still need when the sum over tokens is done.
__device__ __forceinline__ float StaticValueScale(const GqaParams& p, int kv_head, int d) {
  if (p.is_prompt || p.v.mode == KvScaleMode::kPerToken) return 1.0f;
  return p.v.mode == KvScaleMode::kPerTensor ? p.v.static_scale[0]
                                             : p.v.static_scale[static_cast<int64_t>(kv_head) * p.head_size + d];
}

// Row `row` of the s * G + g query rows of a KV head.
struct QueryRow {
  int s;
  int head;
  __device__ __forceinline__ QueryRow(const GqaParams& p, int kv_head, int row)
      : s(p.sequence_length == 1 ? 0 : row / p.group_size),
        head(kv_head * p.group_size + row - s * p.group_size) {}
};

// First element of the output of token s, query head `head`.
__device__ __forceinline__ int64_t OutputRow(const GqaParams& p, int64_t b, int s, int head) {
  return ((b * p.sequence_length + s) * p.num_heads + head) * p.head_size;
}

}  // namespace kv_cache_quant
}  // namespace contrib
}  // namespace onnxruntime
