// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
//
// Asynchronous copies to shared memory (sm_80 and later; earlier ones copy at once).

#pragma once

#include <cstdint>

#include <cuda_runtime.h>

namespace onnxruntime {
namespace contrib {
namespace kv_cache_quant {

__device__ __forceinline__ uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// kBytes (4, 8 or 16) from global to shared memory, zeros without a read where not `valid`; there after WaitForCopies,
// for other threads after a barrier as well. Before sm_80 at once.
template <int kBytes>
__device__ __forceinline__ void StartCopy(uint32_t to, const uint8_t* from, bool valid) {
#if __CUDA_ARCH__ >= 800
  const int size = valid ? kBytes : 0;
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from), "r"(size) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;\n" ::"r"(to), "l"(from), "n"(kBytes), "r"(size)
                 : "memory");
  }
#else
  uint32_t w[4] = {0, 0, 0, 0};
  if constexpr (kBytes == 16) {
    if (valid) {
      const uint4 x = __ldg(reinterpret_cast<const uint4*>(from));
      w[0] = x.x, w[1] = x.y, w[2] = x.z, w[3] = x.w;
    }
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};\n" ::"r"(to), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3])
                 : "memory");
  } else {
#pragma unroll
    for (int i = 0; i < kBytes / 4; ++i) {
      if (valid) w[i] = __ldg(reinterpret_cast<const uint32_t*>(from) + i);
      asm volatile("st.shared.u32 [%0], %1;\n" ::"r"(to + 4 * i), "r"(w[i]) : "memory");
    }
  }
#endif
}

// What was started since the last time becomes a group.
__device__ __forceinline__ void GroupCopies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;\n" ::: "memory");
#endif
}

// This thread's copies are there, but for those of the last kGroups groups.
template <int kGroups>
__device__ __forceinline__ void WaitForGroups() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kGroups) : "memory");
#endif
}

// All are.
__device__ __forceinline__ void WaitForCopies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;\n" ::: "memory");
#endif
}

}  // namespace kv_cache_quant
}  // namespace contrib
}  // namespace onnxruntime
