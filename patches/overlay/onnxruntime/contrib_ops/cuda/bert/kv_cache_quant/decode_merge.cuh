// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
//
// The merge of a unit's splits by one or two of its blocks, in place of a launch: merge.cu says what is computed.
//
// A block clears its part of the scratch, says that it has begun, and writes the part when it is through. The one that
// begins last merges: all the others run by then, so it waits for them without holding any of them up. With 16 rows it
// leaves half of them to the first block that is through, unless that was before all had begun: such a block does not
// wait. What is waited for is the parts themselves, each word of which is kNotWritten until it is there: no fence and
// no count lie between the last part and its reader.

#pragma once

#include "contrib_ops/cuda/bert/kv_cache_quant/row_part.cuh"

namespace onnxruntime {
namespace contrib {
namespace kv_cache_quant {

constexpr uint32_t kNotWritten = 0xFFFFFFFFu;  // a NaN that no arithmetic makes

namespace merge_internal {

// Words that others read before the kernel ends.
__device__ __forceinline__ void Store(float4* to, uint4 x) {
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1,%2,%3,%4};\n" ::"l"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
}
__device__ __forceinline__ void Store(float2* to, uint2 x) {
  asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1,%2};\n" ::"l"(to), "r"(x.x), "r"(x.y) : "memory");
}
__device__ __forceinline__ uint4 Load(const float4* from) {
  uint4 x;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(from)
               : "memory");
  return x;
}
__device__ __forceinline__ uint2 Load(const float2* from) {
  uint2 x;
  asm volatile("ld.relaxed.gpu.global.v2.u32 {%0,%1}, [%2];\n" : "=r"(x.x), "=r"(x.y) : "l"(from) : "memory");
  return x;
}

__device__ __forceinline__ bool IsWritten(uint2 x) { return max(x.x, x.y) != kNotWritten; }
__device__ __forceinline__ bool IsWritten(uint4 x) { return max(max(x.x, x.y), max(x.z, x.w)) != kNotWritten; }

// The bits of a number, which are those of a NaN that counts as written if it is one.
__device__ __forceinline__ uint32_t Word(float x) { return min(__float_as_uint(x), kNotWritten - 1); }

}  // namespace merge_internal

// Where the parts of a unit's rows are: of part 0, row 0; in others, `stride` rows further each.
template <int kHeadSize>
struct UnitParts {
  static constexpr int kRowItems = kHeadSize / 4;  // float4 of a row

  float2* stats;
  float4* sums;
  int stride;

  __device__ __forceinline__ UnitParts(const GqaParams& p, const GqaPlan& plan, int64_t unit)
      : stats(p.partial_stats + PartialRow(plan, unit, 0, 0)),
        sums(reinterpret_cast<float4*>(p.partial_out) + PartialRow(plan, unit, 0, 0) * kRowItems),
        stride(plan.unit_rows) {}

  // Item `item` of row `row`.
  __device__ __forceinline__ void Write(int part, int row, int item, const RowPart& x) const {
    using merge_internal::Word;
    const int at = part * stride + row;
    merge_internal::Store(sums + at * kRowItems + item,
                          make_uint4(Word(x.sum.x), Word(x.sum.y), Word(x.sum.z), Word(x.sum.w)));
    if (item == 0) merge_internal::Store(stats + at, make_uint2(Word(x.maximum), Word(x.denominator)));
  }

  // By all threads of the block that will write the part.
  __device__ __forceinline__ void Clear(int part, int rows) const {
    const int at = part * stride;
    for (int i = static_cast<int>(threadIdx.x); i < rows * kRowItems; i += static_cast<int>(blockDim.x)) {
      merge_internal::Store(sums + at * kRowItems + i, make_uint4(kNotWritten, kNotWritten, kNotWritten, kNotWritten));
      if (i < rows) merge_internal::Store(stats + at + i, make_uint2(kNotWritten, kNotWritten));
    }
  }

  // Adds parts begin, begin + step, ... of `parts`, kReads at most, to four elements: item `item` of all rows' items.
  template <int kReads>
  __device__ __forceinline__ void Add(int item, int begin, int step, int parts, RowPart& to) const {
    const float2* const from_stats = stats + item / kRowItems;
    const float4* const from_sums = sums + item;
    uint2 s[kReads];
    uint4 x[kReads];
    bool all;
    do {
      all = true;
#pragma unroll
      for (int i = 0; i < kReads; ++i) {
        const int part = begin + i * step;
        s[i] = make_uint2(0xFF800000u, 0);  // of no token
        x[i] = make_uint4(0, 0, 0, 0);
        if (part >= parts) continue;
        s[i] = merge_internal::Load(from_stats + part * stride);
        x[i] = merge_internal::Load(from_sums + part * stride * kRowItems);
      }
#pragma unroll
      for (int i = 0; i < kReads; ++i) {
        all = all && merge_internal::IsWritten(s[i]) && merge_internal::IsWritten(x[i]);
      }
    } while (!all);
    float top = to.maximum;
#pragma unroll
    for (int i = 0; i < kReads; ++i) top = fmaxf(top, __uint_as_float(s[i].x));
    if (to.denominator != 0.0f) to.Scale(Exp2(to.maximum - top));
    to.maximum = top;
#pragma unroll
    for (int i = 0; i < kReads; ++i) {
      if (s[i].y == 0) continue;  // no token of the row
      // A maximum or denominator that is not finite becomes NaN here or in the product.
      const float weight = Exp2(__uint_as_float(s[i].x) - top);
      to.denominator += weight * __uint_as_float(s[i].y);
      to.AddSum(make_float4(__uint_as_float(x[i].x), __uint_as_float(x[i].y), __uint_as_float(x[i].z),
                            __uint_as_float(x[i].w)),
                weight);
    }
  }
};

// The rows of a unit that a block merges.
enum class MergeRows : uint8_t { kNone,
                                 kAll,
                                 kLowerHalf,
                                 kUpperHalf };

// What a unit's counter counts a block as that is through: above those that have begun.
constexpr uint32_t kThrough = 0x10000;

// Counts a block of a unit of `parts` blocks, whose part is cleared, behind a barrier, as begun. By one thread. The
// counter is zero again when all have begun and, with two blocks that merge, all but the last one of them are through.
template <int kMergeBlocks>
__device__ __forceinline__ MergeRows CountBegun(uint32_t* counter, int parts) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;\n" : "=r"(before) : "l"(counter) : "memory");
  const uint32_t through = kMergeBlocks > 1 ? before / kThrough : 0;
  const bool last = before - through * kThrough + 1 == static_cast<uint32_t>(parts);
  if (last && (kMergeBlocks == 1 || through + 1 == static_cast<uint32_t>(parts))) *counter = 0;
  if (!last) return MergeRows::kNone;
  return kMergeBlocks == 1 || through > 0 ? MergeRows::kAll : MergeRows::kLowerHalf;
}

// Counts a block that did not begin last as through. By one thread.
__device__ __forceinline__ MergeRows CountThrough(uint32_t* counter, int parts) {
  uint32_t before;
  asm volatile("atom.acquire.gpu.global.add.u32 %0, [%1], %2;\n"
               : "=r"(before)
               : "l"(counter), "n"(kThrough)
               : "memory");
  const uint32_t through = before / kThrough;
  if (before % kThrough != static_cast<uint32_t>(parts)) return MergeRows::kNone;
  if (through + 2 == static_cast<uint32_t>(parts)) *counter = 0;
  return through == 0 ? MergeRows::kUpperHalf : MergeRows::kNone;
}

// Those of the unit's `rows` of the output, of all parts. The lanes of a warp have 8 items, or 16 or 32 where that is a
// round less, and each a share of the parts, of which it reads kReads together: the same ones whoever merges a row.
template <int kHeadSize, int kThreads, int kReads, int kMergeBlocks>
__device__ __forceinline__ void MergeParts(const GqaParams& p, bool vectors, const UnitParts<kHeadSize>& from,
                                           int64_t b, int kv_head, int parts, int rows, MergeRows which) {
  constexpr int kRowItems = UnitParts<kHeadSize>::kRowItems;
  constexpr int kWarps = kThreads / 32;
  constexpr int kWarpBits = kWarps == 16 ? 4 : kWarps == 8 ? 3
                                                           : 2;
  static_assert(kWarps == 1 << kWarpBits, "warps are a power of two");
  const int begin_item = which == MergeRows::kUpperHalf ? (rows + 1) / 2 * kRowItems : 0;
  const int end_item = (which == MergeRows::kLowerHalf ? (rows + 1) / 2 : rows) * kRowItems;
  const int bits = min(max(CeilLog2((rows + kMergeBlocks - 1) / kMergeBlocks * kRowItems) - kWarpBits, 3), 5);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int share = lane >> bits;
  const int step = 32 >> bits;
#pragma unroll 1
  for (int first = begin_item + (static_cast<int>(threadIdx.x) / 32 << bits); first < end_item;
       first += kWarps << bits) {
    const int item = first + (lane & ((1 << bits) - 1));
    RowPart part;
    if (item < end_item) {
      if (kReads > 4 && parts <= 4 * step) {
        from.template Add<4>(item, share, step, parts, part);
      } else {
#pragma unroll 1
        for (int begin = share; begin < parts; begin += kReads * step) {
          from.template Add<kReads>(item, begin, step, parts, part);
        }
      }
    }
    part.AddLanes(1 << bits);
    if (item < end_item && share == 0) {
      WriteRowPart(p, vectors, b, kv_head, item / kRowItems, item % kRowItems * 4, part);
    }
  }
}

}  // namespace kv_cache_quant
}  // namespace contrib
}  // namespace onnxruntime
