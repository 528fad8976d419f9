// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
//
// Operators and limits for CUB's algorithms. CUB had its own until CUDA 12; libcu++ has them since 12.9, and
// CUDA 13 has no others.

#pragma once

#include <cuda_runtime_api.h>
#include <cub/cub.cuh>

#if CUDART_VERSION >= 12090
#include <cuda_fp16.h>
#include <cuda/functional>
#include <cuda/std/functional>
#include <cuda/std/limits>
#endif

namespace onnxruntime {

#if CUDART_VERSION >= 12090
using CubMax = ::cuda::maximum<>;
using CubMin = ::cuda::minimum<>;
using CubSum = ::cuda::std::plus<>;

template <typename T>
__host__ __device__ constexpr T CubLowest() {
  // The primary template answers too, with zero.
  static_assert(::cuda::std::numeric_limits<T>::is_specialized);
  return ::cuda::std::numeric_limits<T>::lowest();
}
#else
using CubMax = cub::Max;
using CubMin = cub::Min;
using CubSum = cub::Sum;

template <typename T>
__host__ __device__ T CubLowest() {
  return cub::FpLimits<T>::Lowest();
}
#endif

}  // namespace onnxruntime
