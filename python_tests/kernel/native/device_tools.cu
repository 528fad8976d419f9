// Kernels of the tests and benchmarks themselves: memory that is too large for the host to look at, and the read
// bandwidth that decode is measured against.
//
// All: grid of any size, 256 threads, grid-stride loops, no shared memory; pointers aligned to 16 bytes where a kernel
// says so.

#include <cstddef>
#include <cstdint>

#include <cuda_fp16.h>
#include <cuda_runtime.h>

namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ uint64_t Mix(uint64_t x) {
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

__device__ __forceinline__ size_t First() { return static_cast<size_t>(blockIdx.x) * kThreads + threadIdx.x; }
__device__ __forceinline__ size_t Step() { return static_cast<size_t>(gridDim.x) * kThreads; }

// *count += the bytes of data, (bytes), that differ from value. data is aligned to 16 bytes.
__global__ void __launch_bounds__(kThreads) CountOtherKernel(const uint4* data, size_t vectors, uint32_t word,
                                                             unsigned long long* count) {
  unsigned long long other = 0;
  for (size_t i = First(); i < vectors; i += Step()) {
    const uint4 x = data[i];
    if (x.x != word || x.y != word || x.z != word || x.w != word) ++other;
  }
  if (other != 0) atomicAdd(count, other);
}

// Reads everything once, in 16-byte loads of which four are in flight; *sum gets what the compiler must not drop.
__global__ void __launch_bounds__(kThreads) ReadKernel(const uint4* data, size_t vectors, uint32_t* sum) {
  uint32_t x = 0;
  size_t i = First();
  for (; i + 3 * Step() < vectors; i += 4 * Step()) {
    uint4 v[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] = __ldcs(data + i + j * Step());
#pragma unroll
    for (int j = 0; j < 4; ++j) x ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
  }
  for (; i < vectors; i += Step()) x ^= data[i].x ^ data[i].y ^ data[i].z ^ data[i].w;
  // Never true for random data; keeps the loads.
  if (x == 0x9E3779B9u) atomicXor(sum, x);
}

// Random bytes without 0x7F and 0xFF, the NaN codes of e4m3.
__global__ void __launch_bounds__(kThreads) RandomCodesKernel(uint8_t* data, size_t bytes, uint64_t seed) {
  for (size_t i = First(); i < bytes; i += Step()) {
    const auto x = static_cast<uint8_t>(Mix(seed ^ i) >> 24);
    data[i] = (x & 0x7F) == 0x7F ? x ^ 0x20 : x;
  }
}

// Values of a uniform distribution over [low, high), as float or half.
template <typename T>
__global__ void __launch_bounds__(kThreads) UniformKernel(T* data, size_t count, float low, float high, uint64_t seed) {
  for (size_t i = First(); i < count; i += Step()) {
    const float u = static_cast<float>(Mix(seed ^ i) >> 40) * (1.0f / 16777216.0f);
    data[i] = static_cast<T>(low + (high - low) * u);
  }
}

unsigned Blocks(size_t items) {
  const size_t wanted = (items + kThreads - 1) / kThreads;
  return static_cast<unsigned>(wanted < 1 ? 1 : wanted > 4096 ? 4096
                                                              : wanted);
}

}  // namespace

extern "C" {

// *count (device, zeroed by the caller) += 16-byte vectors of data with a byte that is not `value`. bytes % 16 == 0.
int kvq_count_other(const void* data, size_t bytes, int value, unsigned long long* count, cudaStream_t stream) {
  const uint32_t word = static_cast<uint8_t>(value) * 0x01010101u;
  CountOtherKernel<<<Blocks(bytes / 16), kThreads, 0, stream>>>(static_cast<const uint4*>(data), bytes / 16, word, count);
  return cudaGetLastError();
}

// *capability: what the library's code was compiled for, 10 * major + minor; below the device's where it is PTX of an
// older chip.
int kvq_compiled_for(int* capability) {
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, ReadKernel);
  *capability = attributes.ptxVersion;
  return error;
}

int kvq_read(const void* data, size_t bytes, int blocks, uint32_t* sum, cudaStream_t stream) {
  ReadKernel<<<blocks, kThreads, 0, stream>>>(static_cast<const uint4*>(data), bytes / 16, sum);
  return cudaGetLastError();
}

int kvq_random_codes(void* data, size_t bytes, uint64_t seed, cudaStream_t stream) {
  RandomCodesKernel<<<Blocks(bytes), kThreads, 0, stream>>>(static_cast<uint8_t*>(data), bytes, seed << 32);
  return cudaGetLastError();
}

int kvq_uniform(void* data, size_t count, int is_half, float low, float high, uint64_t seed, cudaStream_t stream) {
  if (is_half != 0) {
    UniformKernel<<<Blocks(count), kThreads, 0, stream>>>(static_cast<__half*>(data), count, low, high, seed << 32);
  } else {
    UniformKernel<<<Blocks(count), kThreads, 0, stream>>>(static_cast<float*>(data), count, low, high, seed << 32);
  }
  return cudaGetLastError();
}

}  // extern "C"
