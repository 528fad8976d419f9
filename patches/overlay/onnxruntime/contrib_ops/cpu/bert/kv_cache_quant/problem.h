// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
//
// One call of GroupQueryAttention on a quantized cache, as plain pointers with their shapes: what append and
// attention on the CPU work on. Letters: B batch, S new tokens, H query heads, Hkv KV heads, G = H / Hkv,
// C cache capacity, D head size.

#pragma once

#include <cstdint>
#include <vector>

#include "contrib_ops/cuda/bert/kv_cache_quant/format.h"

namespace onnxruntime {
namespace contrib {
namespace kv_cache_quant {

// Length state of one batch entry.
struct SequenceState {
  int64_t past = 0;    // P_b: rows in the cache before this call
  int64_t total = 0;   // T_b: rows after it
  int64_t rows = 0;    // new tokens that count; fewer than S where a prompt is padded on the right
  bool valid = false;  // otherwise nothing of the entry is written and its output is NaN
};

// K or V of the cache.
struct CacheSide {
  KvScaleMode mode = KvScaleMode::kNone;
  uint8_t* codes = nullptr;             // (B, Hkv, C, row_bytes)
  const float* static_scale = nullptr;  // PER_TENSOR (1), PER_CHANNEL (Hkv, D)
  float* token_scale = nullptr;         // PER_TOKEN (B, Hkv, C), one of the two
  uint16_t* token_scale_half = nullptr;
};

// T is float or MLFloat16, the type of the activations.
template <typename T>
struct GqaProblem {
  int64_t batch_size;
  int64_t sequence_length;  // S
  int64_t num_heads;        // H
  int64_t kv_num_heads;     // Hkv
  int64_t head_size;        // D
  int64_t capacity;         // C
  int64_t row_bytes;
  bool is_prompt;

  // (B, S, heads, D) with a token stride in elements: packed QKV has all three in one row.
  const T* query;
  const T* key;
  const T* value;
  int64_t query_stride;
  int64_t kv_stride;

  const T* cos_cache;  // (rotary_rows, rotary_dim / 2), nullptr without rotary
  const T* sin_cache;
  int64_t rotary_dim;
  bool rotary_interleaved;

  float scale;
  float softcap;              // 0: none
  int64_t local_window_size;  // -1: none
  const T* head_sink;         // (H), may be nullptr
  bool smooth_softmax;        // a sink of 0 where head_sink is nullptr

  KvFormat format;
  CacheSide k;
  CacheSide v;
  std::vector<SequenceState> sequences;  // (B)

  // Exact K (after rotary) and V of a prompt, (B, Hkv, S, D); nullptr in a step.
  float* prompt_key;
  float* prompt_value;

  T* output;  // (B, S, H, D)
};

// Row of the cache that holds token t of (batch entry b, KV head h), in units of rows.
template <typename T>
int64_t CacheRow(const GqaProblem<T>& p, int64_t b, int64_t h, int64_t t) {
  return (b * p.kv_num_heads + h) * p.capacity + t;
}

}  // namespace kv_cache_quant
}  // namespace contrib
}  // namespace onnxruntime
