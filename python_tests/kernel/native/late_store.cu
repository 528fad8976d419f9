// A kernel whose results come late: the next one on the stream may begin long before they are there. And one that looks
// at when that is. Before sm_90 nothing overlaps.

#include <cstddef>
#include <cstdint>

#include <cuda_runtime.h>

#include "contrib_ops/cuda/bert/kv_cache_quant/kernel_launch.cuh"

namespace kvq = onnxruntime::contrib::kv_cache_quant;

namespace {

constexpr int kStoreThreads = 256;
constexpr int kReadWarps = 16;
constexpr int kReadThreads = 32 * kReadWarps;

// grid 1 block; shared rows * count values, so that a store is no later than it is meant to be.
__global__ void __launch_bounds__(kStoreThreads)
    StoreLateKernel(int32_t* to, const int32_t* values, int rows, int count, int64_t cycles) {
  extern __shared__ int32_t late_values[];
  for (int i = threadIdx.x; i < rows * count; i += kStoreThreads) late_values[i] = values[i];
  __syncthreads();
  kvq::AllowNextKernel();
  const int64_t begin = clock64();
  for (int row = 0; row < rows; ++row) {
    while (clock64() - begin < cycles * (row + 1)) {
    }
    for (int i = threadIdx.x; i < count; i += kStoreThreads) {
      *static_cast<volatile int32_t*>(to + i) = late_values[row * count + i];
    }
  }
}

// grid of any size; one lane of each warp reads. The first time as the decode kernel does.
__global__ void __launch_bounds__(kReadThreads) ReadTwiceKernel(const int32_t* from, int32_t* seen) {
  if (threadIdx.x % 32 != 0) return;
  const int warps = static_cast<int>(gridDim.x) * kReadWarps;
  const int warp = static_cast<int>(blockIdx.x) * kReadWarps + static_cast<int>(threadIdx.x) / 32;
  const int32_t before = *from;
  asm volatile("" ::"r"(before) : "memory");
  kvq::WaitForPreviousKernel();
  seen[warp] = before;
  seen[warps + warp] = __ldcg(from);
}

}  // namespace

extern "C" {

// to: (count); values: (rows, count). Lets the next kernel begin at once, and copies row i to `to` after (i + 1) *
// cycles of the multiprocessor's clock. The rows are 48 KB at most.
int kvq_store_late(int32_t* to, const int32_t* values, int rows, int count, int64_t cycles, cudaStream_t stream) {
  const size_t bytes = static_cast<size_t>(rows) * count * sizeof(int32_t);
  StoreLateKernel<<<1, kStoreThreads, bytes, stream>>>(to, values, rows, count, cycles);
  return cudaGetLastError();
}

// seen: (2, blocks * 16), what *from was for each warp before and after the wait for the kernel before.
int kvq_read_twice(const int32_t* from, int32_t* seen, int blocks, cudaStream_t stream) {
  return kvq::LaunchOverlapping(ReadTwiceKernel, blocks, 1, kReadThreads, 0, stream, from, seen);
}

}  // extern "C"
