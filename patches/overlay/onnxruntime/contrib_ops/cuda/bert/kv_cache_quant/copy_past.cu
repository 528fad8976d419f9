// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
//
// CopyPastKernel
//   grid            in x: for each of up to four tensors (codes and PER_TOKEN scales of K and V), B Hkv heads times
//                   the chunks that past_capacity rows of one head have. Shapes only: blocks beyond P_b rows leave
//   block           256 threads; owns one chunk of kChunkBytes of one head, whose rows are contiguous
//   shared memory   none
//   alignment       2 bytes; 16 bytes a load where both addresses have that, else 4, else 2

#include "contrib_ops/cuda/bert/kv_cache_quant/activation.cuh"
#include "contrib_ops/cuda/bert/kv_cache_quant/launch.h"

namespace onnxruntime {
namespace contrib {
namespace kv_cache_quant {

namespace {

constexpr int kThreads = 256;
constexpr int kLoadsInFlight = 4;
constexpr int64_t kChunkBytes = static_cast<int64_t>(kThreads) * kLoadsInFlight * sizeof(uint4);

struct CopyTensor {
  const uint8_t* past;  // (B, Hkv, past_capacity, row_bytes)
  uint8_t* present;     // (B, Hkv, C, row_bytes)
  int32_t row_bytes;    // even
  int32_t chunks;       // of one head
  uint32_t end_block;   // first block of the next tensor
};

struct CopyList {
  CopyTensor tensor[4];
  int32_t count;
};

// Copies `bytes`, an even number, in words of type Word and a tail of two bytes at a time.
template <typename Word>
__device__ __forceinline__ void CopyBytes(const uint8_t* source, uint8_t* target, int64_t bytes) {
  const auto words = static_cast<int>(bytes / static_cast<int64_t>(sizeof(Word)));
  const auto* from = reinterpret_cast<const Word*>(source);
  auto* to = reinterpret_cast<Word*>(target);
  int i = static_cast<int>(threadIdx.x);
  for (; i + (kLoadsInFlight - 1) * kThreads < words; i += kLoadsInFlight * kThreads) {
    Word word[kLoadsInFlight];
#pragma unroll
    for (int j = 0; j < kLoadsInFlight; ++j) word[j] = from[i + j * kThreads];
#pragma unroll
    for (int j = 0; j < kLoadsInFlight; ++j) to[i + j * kThreads] = word[j];
  }
  for (; i < words; i += kThreads) to[i] = from[i];
  const int64_t copied = static_cast<int64_t>(words) * static_cast<int64_t>(sizeof(Word));
  const int64_t at = copied + 2 * static_cast<int64_t>(threadIdx.x);
  if (at < bytes) {
    *reinterpret_cast<uint16_t*>(target + at) = *reinterpret_cast<const uint16_t*>(source + at);
  }
}

__global__ void __launch_bounds__(kThreads)
    CopyPastKernel(const __grid_constant__ GqaParams p, const __grid_constant__ CopyList list) {
  uint32_t block = blockIdx.x;
  CopyTensor tensor = list.tensor[0];
#pragma unroll
  for (int i = 1; i < 4; ++i) {
    if (i < list.count && blockIdx.x >= list.tensor[i - 1].end_block) {
      tensor = list.tensor[i];
      block = blockIdx.x - list.tensor[i - 1].end_block;
    }
  }
  const uint32_t head = block / static_cast<uint32_t>(tensor.chunks);  // b * Hkv + h
  const uint32_t chunk = block - head * static_cast<uint32_t>(tensor.chunks);
  const SequenceState sequence = LoadSequence(p, head / static_cast<uint32_t>(p.kv_num_heads));
  if (!sequence.valid) return;
  const int64_t begin = static_cast<int64_t>(chunk) * kChunkBytes;
  const int64_t left = sequence.past * tensor.row_bytes - begin;
  if (left <= 0) return;
  const int64_t bytes = left < kChunkBytes ? left : kChunkBytes;
  const uint8_t* source = tensor.past + static_cast<int64_t>(head) * p.past_capacity * tensor.row_bytes + begin;
  uint8_t* target = tensor.present + static_cast<int64_t>(head) * p.capacity * tensor.row_bytes + begin;
  const uintptr_t address = reinterpret_cast<uintptr_t>(source) | reinterpret_cast<uintptr_t>(target);
  if (address % sizeof(uint4) == 0) {
    CopyBytes<uint4>(source, target, bytes);
  } else if (address % sizeof(uint32_t) == 0) {
    CopyBytes<uint32_t>(source, target, bytes);
  } else {
    CopyBytes<uint16_t>(source, target, bytes);
  }
}

}  // namespace

cudaError_t LaunchCopyPast(const GqaParams& p, cudaStream_t stream) {
  const int64_t heads = static_cast<int64_t>(p.batch_size) * p.kv_num_heads;
  if (p.k.past_codes == nullptr || heads == 0 || p.past_capacity == 0) return cudaSuccess;
  CopyList list = {};
  int64_t blocks = 0;
  const auto add = [&](const void* past, void* present, int32_t row_bytes) {
    const int64_t chunks = (p.past_capacity * row_bytes + kChunkBytes - 1) / kChunkBytes;
    blocks += heads * chunks;
    list.tensor[list.count++] = {static_cast<const uint8_t*>(past), static_cast<uint8_t*>(present), row_bytes,
                                 static_cast<int32_t>(chunks), static_cast<uint32_t>(blocks)};
  };
  for (const KvSide* side : {&p.k, &p.v}) {
    add(side->past_codes, side->codes, p.row_bytes);
    if (side->mode == KvScaleMode::kPerToken) {
      const size_t scale_bytes = side->token_scale_is_half ? sizeof(__half) : sizeof(float);
      add(side->past_token_scale, side->token_scale, static_cast<int32_t>(scale_bytes));
    }
  }
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;  // 32 TB of cache, or 2^29 heads
  CopyPastKernel<<<static_cast<unsigned int>(blocks), kThreads, 0, stream>>>(p, list);
  return cudaGetLastError();
}

}  // namespace kv_cache_quant
}  // namespace contrib
}  // namespace onnxruntime
