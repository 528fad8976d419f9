// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
//
// AppendKernel
//   grid            ceil(2 B S Hkv / 4) blocks in x: first the rows of K, then those of V, each in the order (b, s, h)
//   block           128 threads; a warp owns one new row of one KV head of K or V and writes all that comes of it:
//                   codes, PER_TOKEN scale, and in a prompt with rotary the row of prompt_key
//   shared memory   none
//   alignment       cache rows 8 bytes (4 for int4), prompt_key 16 bytes;
//   activations any, 16 bytes with
//                   plan.activation_vectors

#include "contrib_ops/cuda/bert/kv_cache_quant/append.cuh"
#include "contrib_ops/cuda/bert/kv_cache_quant/kernel_launch.cuh"
#include "contrib_ops/cuda/bert/kv_cache_quant/launch.h"

namespace onnxruntime {
namespace contrib {
namespace kv_cache_quant {

namespace {

constexpr int kWarps = 4;
constexpr int kLaneElements = 8;  // rows of up to 256
static_assert(kMaxHeadSize <= 32 * kLaneElements, "a warp holds one row");

__device__ __forceinline__ uint32_t PackTwo(float x, float y, ActivationType type) {
  if (type == ActivationType::kBFloat16) {
    const uint32_t low = __bfloat16_as_ushort(__float2bfloat16_rn(x));
    return low | static_cast<uint32_t>(__bfloat16_as_ushort(__float2bfloat16_rn(y))) << 16;
  }
  const uint32_t low = __half_as_ushort(__float2half_rn(x));
  return low | static_cast<uint32_t>(__half_as_ushort(__float2half_rn(y))) << 16;
}

// Row (b, h, s) of p.prompt_key <- x, rounded to the activation type.
__device__ __forceinline__ void StorePromptKey(const GqaParams& p, int64_t b, int h, int s, int d,
                                               const float (&x)[8]) {
  const int64_t row = (b * p.kv_num_heads + h) * p.sequence_length + s;
  uint4 words;
  words.x = PackTwo(x[0], x[1], p.activation);
  words.y = PackTwo(x[2], x[3], p.activation);
  words.z = PackTwo(x[4], x[5], p.activation);
  words.w = PackTwo(x[6], x[7], p.activation);
  *reinterpret_cast<uint4*>(static_cast<uint16_t*>(p.prompt_key) + row * p.head_size + d) = words;
}

// vectors: plan.activation_vectors. rows: B S Hkv.
// Four blocks a multiprocessor: without a number some compilers spill a register although they have more.
template <KvFormat kFormat>
__global__ void __launch_bounds__(32 * kWarps, 4)
    AppendKernel(const __grid_constant__ GqaParams p, uint32_t rows, bool vectors) {
  AllowNextKernel();
  uint32_t row = blockIdx.x * kWarps + threadIdx.x / 32;
  const bool is_value = row >= rows;
  if (is_value) row -= rows;
  if (row >= rows) return;
  const auto lane = static_cast<int>(threadIdx.x % 32);
  const int d = lane * kLaneElements;
  const uint32_t token = row / static_cast<uint32_t>(p.kv_num_heads);
  const auto h = static_cast<int>(row - token * static_cast<uint32_t>(p.kv_num_heads));
  const uint32_t b = p.sequence_length == 1 ? token : token / static_cast<uint32_t>(p.sequence_length);
  const auto s = static_cast<int>(token - b * static_cast<uint32_t>(p.sequence_length));
  const int64_t offset = static_cast<int64_t>(token) * p.kv_stride + static_cast<int64_t>(h) * p.head_size;
  const KvSide side = is_value ? p.v : p.k;
  const void* base = is_value ? p.value : p.key;

  // These loads do not depend on the length, so they are under way while it is read.
  LaneWords<kLaneElements> words = {};
  if (vectors) LoadLaneWords(p, FindLaneWords(p, base, offset, d, !is_value), words);
  const bool per_token = side.mode == KvScaleMode::kPerToken;
  float scale[8];
  if (!per_token) LoadStaticScales(p, side, h, lane, scale);

  const SequenceState sequence = LoadSequence(p, b);
  if (!sequence.valid || s >= sequence.rows) return;
  const int64_t position = sequence.past + s;
  float x[8] = {};
  if (vectors) {
    LaneSource angles;
    FindLaneAngles(p, d, position, !is_value, angles);
    LoadLaneWords(p, angles, words);
    UnpackRotated(p, words, d, !is_value, x);
  } else {
    LoadLaneRow(p, base, offset, position, lane, !is_value, false, x);
  }
  if (!is_value && p.is_prompt && p.cos_cache != nullptr && d < p.head_size) StorePromptKey(p, b, h, s, d, x);

  const int64_t cache_row = (static_cast<int64_t>(b) * p.kv_num_heads + h) * p.capacity + position;
  int32_t code[8];
  if (per_token) {
    const float token_scale = EncodeTokenRow<kFormat>(side, x, code);
    if (lane == 0) StoreTokenScale(side, cache_row, token_scale);
  } else if (d < p.head_size) {
    EncodeStaticRow<kFormat>(scale, x, code);
  }
  if (d < p.head_size) StoreCodes<kFormat>(side.codes + cache_row * p.row_bytes, lane, code);
}

}  // namespace

cudaError_t FindDeviceCode() {
  cudaFuncAttributes attributes;
  const auto* const kernel = reinterpret_cast<const void*>(AppendKernel<KvFormat::kInt8>);
  const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
  if (error != cudaSuccess) cudaGetLastError();  // not an error of what the thread does next
  return error;
}

cudaError_t LaunchAppend(const GqaParams& p, const GqaPlan& plan, cudaStream_t stream) {
  const int64_t rows = static_cast<int64_t>(p.batch_size) * p.sequence_length * p.kv_num_heads;
  if (rows == 0) return cudaSuccess;
  if (rows > INT32_MAX / 2) return cudaErrorInvalidConfiguration;  // MakePlan allows fewer
  const auto blocks = static_cast<unsigned int>((2 * rows + kWarps - 1) / kWarps);
  const auto count = static_cast<uint32_t>(rows);
  switch (p.format) {
    case KvFormat::kInt8:
      AppendKernel<KvFormat::kInt8><<<blocks, 32 * kWarps, 0, stream>>>(p, count, plan.activation_vectors);
      break;
    case KvFormat::kFloat8E4M3FN:
      AppendKernel<KvFormat::kFloat8E4M3FN><<<blocks, 32 * kWarps, 0, stream>>>(p, count, plan.activation_vectors);
      break;
    case KvFormat::kInt4:
      AppendKernel<KvFormat::kInt4><<<blocks, 32 * kWarps, 0, stream>>>(p, count, plan.activation_vectors);
      break;
    default:
      return cudaErrorInvalidValue;
  }
  return cudaGetLastError();
}

}  // namespace kv_cache_quant
}  // namespace contrib
}  // namespace onnxruntime
