// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
//
// The merge of a unit's splits by the block that ends last, in place of a launch: merge.cu says what is computed.

#pragma once

#include "contrib_ops/cuda/bert/kv_cache_quant/row_part.cuh"

namespace onnxruntime {
namespace contrib {
namespace kv_cache_quant {

// Whether this block is the last of the unit's `parts` blocks to get here; what the others wrote before is then
// visible. The counter is zero again afterwards. All threads take part; it is a barrier.
__device__ __forceinline__ bool IsLastOfUnit(uint32_t* counter, int parts) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    uint32_t before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;\n" : "=r"(before) : "l"(counter) : "memory");
    last = before + 1 == static_cast<uint32_t>(parts);
    if (last) *counter = 0;
  }
  __syncthreads();
  return last;
}

// A warp merges 128 elements of a row (64 at D 64, its halves different parts), or a share of their parts where there
// are more warps than rows.
template <int kHeadSize, int kThreads>
struct PartMerge {
  static constexpr int kRowLanes = kHeadSize < 128 ? kHeadSize / 4 : 32;
  static constexpr int kLaneParts = 32 / kRowLanes;
  static constexpr int kPieces = kHeadSize / (4 * kRowLanes);  // of a row
  static constexpr int kReads = 8;                             // parts that are on their way together
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kWarpBits = kWarps == 16 ? 4 : kWarps == 8 ? 3
                                                                  : 2;
  static constexpr int kMaxGroupBits = 2;  // more shares cost more to add than they save
  static_assert(kWarps == 1 << kWarpBits, "warps are a power of two");

  // What the groups leave for the first one.
  struct Shared {
    float4 sums[kThreads];
    float2 stats[kThreads];
  };

  // Adds parts begin, begin + step, ... of `parts`. stats, sums: of part 0; rows: from part to part.
  static __device__ __forceinline__ void AddParts(const float2* stats, const float4* sums, int rows, int begin,
                                                  int step, int parts, RowPart& to) {
    float2 s[kReads];
    float4 x[kReads];
#pragma unroll
    for (int i = 0; i < kReads; ++i) {
      const int part = begin + i * step;
      s[i] = make_float2(-INFINITY, 0.0f);
      if (part >= parts) continue;
      s[i] = __ldcg(stats + part * rows);
      x[i] = __ldcg(sums + part * rows * (kHeadSize / 4));
    }
    float top = to.maximum;
#pragma unroll
    for (int i = 0; i < kReads; ++i) top = fmaxf(top, s[i].x);
    if (to.denominator != 0.0f) to.Scale(Exp2(to.maximum - top));
    to.maximum = top;
#pragma unroll
    for (int i = 0; i < kReads; ++i) {
      if (s[i].y == 0.0f) continue;  // no token of the row
      // A maximum or denominator that is not finite becomes NaN here or in the product.
      const float weight = Exp2(s[i].x - top);
      to.denominator += weight * s[i].y;
      to.sum.x += weight * x[i].x;
      to.sum.y += weight * x[i].y;
      to.sum.z += weight * x[i].z;
      to.sum.w += weight * x[i].w;
    }
  }

  const GqaPlan& plan;
  const int lane;
  const int piece_bits;  // warps for as many pieces as the next power of two
  const int group;
  const int groups;
  const int first_piece;
  const float2* stats;  // of part 0, row 0
  const float4* sums;

  // All that is known before the parts are there.
  __device__ __forceinline__ PartMerge(const GqaParams& p, const GqaPlan& of_plan, int64_t unit, int rows)
      : plan(of_plan),
        lane(static_cast<int>(threadIdx.x) % 32),
        piece_bits(min(max(CeilLog2(rows * kPieces), kWarpBits - kMaxGroupBits), kWarpBits)),
        group(static_cast<int>(threadIdx.x) / 32 >> piece_bits),
        groups(kWarps >> piece_bits),
        first_piece(static_cast<int>(threadIdx.x) / 32 & ((1 << piece_bits) - 1)) {
    const int64_t row = PartialRow(plan, unit, 0, 0);
    stats = p.partial_stats + row;
    sums = reinterpret_cast<const float4*>(p.partial_out) + row * (kHeadSize / 4) + lane % kRowLanes;
  }

  // The unit's rows of the output.
  __device__ __forceinline__ void Run(const GqaParams& p, int64_t b, int kv_head, int parts, int rows,
                                      Shared& shared) const {
    const int step = groups * kLaneParts;
#pragma unroll 1
    for (int piece = first_piece; piece - first_piece < rows * kPieces; piece += kWarps) {
      const int row = piece / kPieces;
      const int item = piece % kPieces * kRowLanes;
      RowPart part;
      if (row < rows) {
#pragma unroll 1
        for (int begin = group * kLaneParts; begin < parts; begin += kReads * step) {
          AddParts(stats + row, sums + row * (kHeadSize / 4) + item, plan.unit_rows, begin + lane / kRowLanes, step,
                   parts, part);
        }
        if (kLaneParts > 1) part.AddLanes(kRowLanes);
      }
      if (groups > 1) {
        shared.sums[threadIdx.x] = part.sum;
        shared.stats[threadIdx.x] = make_float2(part.maximum, part.denominator);
        __syncthreads();
        if (group != 0) return;
#pragma unroll
        for (int i = 1; i < 1 << kMaxGroupBits; ++i) {
          const int other = static_cast<int>(threadIdx.x) + (32 * i << piece_bits);
          if (i < groups) part.Add(shared.stats[other], shared.sums[other]);
        }
      }
      if (row < rows && lane < kRowLanes) {
        WriteRowPart(p, plan.activation_vectors, b, kv_head, row, 4 * (item + lane), part);
      }
    }
  }
};

}  // namespace kv_cache_quant
}  // namespace contrib
}  // namespace onnxruntime
