// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
//
// Warp-level matrix instructions. A fragment is named as in the PTX manual for m16n8k16: with r = lane / 4 and
// c = lane % 4, A has rows r, r + 8 and columns 2c, 2c + 1 (+ 8), B has rows 2c, 2c + 1 (+ 8) of column r, and the
// accumulator has rows r, r + 8 and columns 2c, 2c + 1.

#pragma once

#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace onnxruntime {
namespace contrib {
namespace kv_cache_quant {

// d += a * b, half operands.
__device__ __forceinline__ void MmaHalf(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};\n"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(b0));
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};\n"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[2]), "r"(a[3]), "r"(b1));
#endif
}

#if __CUDA_ARCH__ >= 800
// d += a * b, bfloat16 operands.
__device__ __forceinline__ void MmaBFloat16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif

// Transposes an 8 x 8 matrix of 16-bit elements: row r, columns 2c and 2c + 1 in each lane, before and after.
__device__ __forceinline__ uint32_t TransposeMatrix(uint32_t x) {
  uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;\n" : "=r"(y) : "r"(x));
  return y;
}

__device__ __forceinline__ uint32_t PackHalf(float x, float y) {
  const __half2 h = __floats2half2_rn(x, y);
  return reinterpret_cast<const uint32_t&>(h);
}

__device__ __forceinline__ uint32_t PackBFloat16(float x, float y) {
  const __nv_bfloat162 h = __floats2bfloat162_rn(x, y);
  return reinterpret_cast<const uint32_t&>(h);
}

// 2^x with flush of results below the normal range, as the attention kernels use it.
__device__ __forceinline__ float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace kv_cache_quant
}  // namespace contrib
}  // namespace onnxruntime
