// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
//
// One call of GroupQueryAttention on a quantized cache, as plain pointers with their shapes: what the device code
// works on. Passed to kernels by value. Letters: B batch, S new tokens, H query heads, Hkv KV heads, G = H / Hkv,
// C capacity of present, D head size. All pointers are device memory.

#pragma once

#include <cstdint>

#include <vector_types.h>

#include "contrib_ops/cuda/bert/kv_cache_quant/format.h"

namespace onnxruntime {
namespace contrib {
namespace kv_cache_quant {

enum class ActivationType : int32_t { kHalf = 0,
                                      kBFloat16 = 1 };

// K or V of the cache.
struct KvSide {
  KvScaleMode mode = KvScaleMode::kNone;
  bool token_scale_is_half = false;
  uint8_t* codes = nullptr;             // present, (B, Hkv, C, row_bytes)
  void* token_scale = nullptr;          // PER_TOKEN: present, (B, Hkv, C), float or half
  const float* static_scale = nullptr;  // PER_TENSOR (1), PER_CHANNEL (Hkv, D)
  // Where past is a buffer of its own, (B, Hkv, past_capacity, ...); nullptr where past is present.
  const uint8_t* past_codes = nullptr;
  const void* past_token_scale = nullptr;
};

struct GqaParams {
  int32_t batch_size = 0;       // B
  int32_t sequence_length = 0;  // S
  int32_t num_heads = 0;        // H
  int32_t kv_num_heads = 0;     // Hkv
  int32_t group_size = 0;       // G
  int32_t head_size = 0;        // D
  int32_t row_bytes = 0;        // of one cache row
  int64_t capacity = 0;         // C
  int64_t past_capacity = 0;    // rows of past; C where past is present
  bool is_prompt = false;       // no past, attention over the exact new K and V
  KvFormat format = KvFormat::kInt8;
  ActivationType activation = ActivationType::kHalf;

  // (B, S, heads, D), tokens *_stride elements apart: packed QKV has all three in one row.
  const void* query = nullptr;
  const void* key = nullptr;
  const void* value = nullptr;
  int64_t query_stride = 0;
  int64_t kv_stride = 0;
  const int32_t* seqlens_k = nullptr;  // (B), T_b - 1

  const void* cos_cache = nullptr;  // (rotary_rows, rotary_dim / 2) in the activation type; nullptr: no rotary
  const void* sin_cache = nullptr;
  int32_t rotary_dim = 0;
  int64_t rotary_rows = 0;
  bool rotary_interleaved = false;

  float scale = 0.0f;
  float softcap = 0.0f;             // 0: none
  int32_t local_window_size = -1;   // tokens to the left that a query attends besides itself; -1: all
  const void* head_sink = nullptr;  // (H) in the activation type, may be nullptr
  bool smooth_softmax = false;      // a sink of 0 where head_sink is nullptr

  KvSide k;
  KvSide v;
  void* output = nullptr;  // (B, S, H, D)

  // Scratch, laid out by MakePlan (plan.h).
  void* prompt_key = nullptr;       // (B, Hkv, S, D) in the activation type: K after rotary; prompt with rotary only
  float* partial_out = nullptr;     // (units, splits, unit_rows, padded D): numerators, see unit.cuh
  float2* partial_stats = nullptr;  // (units, splits, unit_rows): maximum (log2 units) and denominator

  // (GqaPlan::counters), not of the scratch: zero before a call, and left so. Calls that use the same ones must be of
  // one stream. nullptr where the plan has none.
  uint32_t* counters = nullptr;
};

}  // namespace kv_cache_quant
}  // namespace contrib
}  // namespace onnxruntime
