// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
//
// Reading parts of cache rows from global memory into registers. Rows that were in the cache before do not change while
// an attention kernel runs, and each byte is read once per block: the read-only path, without a place in L1.

#pragma once

#include <cstdint>

namespace onnxruntime {
namespace contrib {
namespace kv_cache_quant {

// 4, 8 or 16 bytes at an address aligned to them. kUnchanged: nothing of the kernel writes there.
template <int kWords, bool kUnchanged = true>
__device__ __forceinline__ void LoadWords(const uint8_t* address, uint32_t* out) {
  static_assert(kWords == 1 || kWords == 2 || kWords == 4, "one vector load");
  if constexpr (kWords == 4 && kUnchanged) {
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "l"(address));
  } else if constexpr (kWords == 4) {
    asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "l"(address)
                 : "memory");
  } else if constexpr (kWords == 2 && kUnchanged) {
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];\n" : "=r"(out[0]), "=r"(out[1]) : "l"(address));
  } else if constexpr (kWords == 2) {
    asm volatile("ld.global.v2.u32 {%0,%1}, [%2];\n" : "=r"(out[0]), "=r"(out[1]) : "l"(address) : "memory");
  } else if constexpr (kUnchanged) {
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];\n" : "=r"(out[0]) : "l"(address));
  } else {
    asm volatile("ld.global.u32 %0, [%1];\n" : "=r"(out[0]) : "l"(address) : "memory");
  }
}

// kWords words at byte `offset` of a row of row_bytes bytes. With kWholeRows one vector; otherwise in pieces of
// kPieceWords words, to which rows and their lengths are aligned, and zero beyond the row.
template <int kWords, bool kWholeRows, int kPieceWords, bool kUnchanged = true>
__device__ __forceinline__ void LoadRowPart(const uint8_t* row, int offset, int row_bytes, uint32_t* out) {
  if constexpr (kWholeRows) {
    LoadWords<kWords, kUnchanged>(row + offset, out);
  } else {
    constexpr int kPiece = kWords < kPieceWords ? kWords : kPieceWords;
#pragma unroll
    for (int w = 0; w < kWords; w += kPiece) {
      if (offset + 4 * w < row_bytes) {
        LoadWords<kPiece, kUnchanged>(row + offset + 4 * w, out + w);
      } else {
#pragma unroll
        for (int i = 0; i < kPiece; ++i) out[w + i] = 0;
      }
    }
  }
}

}  // namespace kv_cache_quant
}  // namespace contrib
}  // namespace onnxruntime
