// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
//
// Shapes of one call of GroupQueryAttention on a quantized cache. Header only, like attributes.h.

#pragma once

#include <algorithm>
#include <utility>

#include "contrib_ops/cpu/bert/kv_cache_quant/attributes.h"

namespace onnxruntime {
namespace contrib {
namespace kv_cache_quant {

struct GqaKvQuantShapes {
  int64_t batch_size = 0;
  int64_t sequence_length = 0;        // S: new tokens
  int64_t total_sequence_length = 0;  // host value of input 6
  int64_t past_capacity = 0;          // rows of past_key
  int64_t capacity = 0;               // C: rows of present_key
  int64_t head_size = 0;              // D
  int64_t row_bytes = 0;              // last dimension of the cache
  int64_t rotary_dim = 0;             // elements that rotate; 0: no rotary
  int64_t rotary_rows = 0;            // positions in cos_cache and sin_cache
  bool packed_qkv = false;
  bool is_prompt = false;  // S == total_sequence_length: no past, attention over the exact new K and V
};

namespace check_inputs_internal {

template <typename T>
Status Mismatch(const char* name, const T& shape, const std::string& expected) {
  return ORT_MAKE_STATUS(ONNXRUNTIME, INVALID_ARGUMENT, "GroupQueryAttention: input '", name, "' has shape ",
                         shape.ToString(), "; expected ", expected, ".");
}

template <typename T>
bool Is(const T& shape, std::initializer_list<int64_t> dims) {
  return shape.NumDimensions() == dims.size() &&
         std::equal(dims.begin(), dims.end(), shape.GetDims().begin());
}

template <typename Tensor>
Status CheckQkv(const Tensor* query, const Tensor* key, const Tensor* value, const GqaKvQuantAttributes& a,
                GqaKvQuantShapes& s) {
  const auto& q = query->Shape();
  if (q.NumDimensions() != 3) return Mismatch("query", q, "3 dimensions");
  s.batch_size = q[0];
  s.sequence_length = q[1];
  s.packed_qkv = key == nullptr;
  if (s.packed_qkv != (value == nullptr)) {
    return ORT_MAKE_STATUS(ONNXRUNTIME, INVALID_ARGUMENT, "GroupQueryAttention: inputs 'key' and 'value' must be ",
                           "both present, or both absent when query is packed QKV.");
  }
  const int64_t heads = s.packed_qkv ? a.num_heads + 2 * a.kv_num_heads : a.num_heads;
  if (q[2] % heads != 0 || q[2] == 0) {
    return Mismatch("query", q, MakeString("a last dimension divisible by ", heads, " heads"));
  }
  s.head_size = q[2] / heads;
  if (s.head_size % 8 != 0 || s.head_size > kMaxHeadSize) {
    return ORT_MAKE_STATUS(ONNXRUNTIME, NOT_IMPLEMENTED, "GroupQueryAttention: head_size ", s.head_size,
                           " with a quantized cache; supported are multiples of 8 up to ", kMaxHeadSize, ".");
  }
  if (!s.packed_qkv) {
    const int64_t kv_hidden = a.kv_num_heads * s.head_size;
    for (const auto& [name, tensor] : {std::pair{"key", key}, std::pair{"value", value}}) {
      if (!Is(tensor->Shape(), {s.batch_size, s.sequence_length, kv_hidden})) {
        return Mismatch(name, tensor->Shape(),
                        MakeString("{", s.batch_size, ",", s.sequence_length, ",", kv_hidden, "}"));
      }
    }
  }
  return Status::OK();
}

template <typename Tensor>
Status CheckScale(const char* name, const Tensor* scale, KvScaleMode mode, const GqaKvQuantAttributes& a,
                  const GqaKvQuantShapes& s) {
  const auto& shape = scale->Shape();
  switch (mode) {
    case KvScaleMode::kPerTensor:
      return Is(shape, {1}) ? Status::OK() : Mismatch(name, shape, "{1} for PER_TENSOR");
    case KvScaleMode::kPerChannel:
      return Is(shape, {1, a.kv_num_heads, 1, s.head_size})
                 ? Status::OK()
                 : Mismatch(name, shape, MakeString("{1,", a.kv_num_heads, ",1,", s.head_size, "} for PER_CHANNEL"));
    case KvScaleMode::kPerToken: {
      const int64_t rows = s.past_capacity;
      return Is(shape, {s.batch_size, a.kv_num_heads, rows, 1})
                 ? Status::OK()
                 : Mismatch(name, shape,
                            MakeString("{", s.batch_size, ",", a.kv_num_heads, ",", rows, ",1} for PER_TOKEN"));
    }
    default:
      return ORT_MAKE_STATUS(ONNXRUNTIME, INVALID_ARGUMENT, "GroupQueryAttention: '", name, "' with scale mode ",
                             static_cast<int>(mode), ".");
  }
}

template <typename Tensor>
Status CheckRotary(const Tensor* cos, const Tensor* sin, GqaKvQuantShapes& s) {
  if (cos == nullptr || sin == nullptr) {
    return ORT_MAKE_STATUS(ONNXRUNTIME, INVALID_ARGUMENT,
                           "GroupQueryAttention: do_rotary=1 needs inputs 'cos_cache' and 'sin_cache'.");
  }
  const auto& c = cos->Shape();
  if (c.NumDimensions() != 2 || c[1] == 0 || 2 * c[1] > s.head_size) {
    return Mismatch("cos_cache", c, MakeString("{rows, n} with 1 <= n <= ", s.head_size / 2));
  }
  if (c[0] < s.total_sequence_length) {
    return Mismatch("cos_cache", c, MakeString("at least total_sequence_length = ", s.total_sequence_length, " rows"));
  }
  if (!Is(sin->Shape(), {c[0], c[1]})) return Mismatch("sin_cache", sin->Shape(), "the shape of cos_cache");
  s.rotary_dim = 2 * c[1];
  s.rotary_rows = c[0];
  return Status::OK();
}

}  // namespace check_inputs_internal

// Checks everything that shapes and host values show; fills *shapes. The lengths in seqlens_k are data: an entry
// that does not fit is answered per batch entry with NaN (see docs), not here.
template <typename Context>
Status CheckGqaKvQuantInputs(Context* context, const GqaKvQuantAttributes& a, GqaKvQuantShapes* shapes) {
  using namespace check_inputs_internal;
  GqaKvQuantShapes& s = *shapes;
  const auto input = [context](size_t i) { return context->template Input<Tensor>(static_cast<int>(i)); };
  ORT_RETURN_IF_ERROR(CheckQkv(input(kQuery), input(kKey), input(kValue), a, s));

  const auto* seqlens = input(kSeqlensK);
  if (!Is(seqlens->Shape(), {s.batch_size}) && !Is(seqlens->Shape(), {s.batch_size, 1})) {
    return Mismatch("seqlens_k", seqlens->Shape(), MakeString("{", s.batch_size, "}"));
  }
  const auto* total = input(kTotalSequenceLength);
  if (total->Shape().Size() != 1) return Mismatch("total_sequence_length", total->Shape(), "one element");
  s.total_sequence_length = *total->template Data<int32_t>();
  if (s.total_sequence_length < s.sequence_length || s.total_sequence_length <= 0) {
    return ORT_MAKE_STATUS(ONNXRUNTIME, INVALID_ARGUMENT, "GroupQueryAttention: total_sequence_length is ",
                           s.total_sequence_length, "; expected at least the ", s.sequence_length, " new tokens.");
  }
  s.is_prompt = s.sequence_length == s.total_sequence_length;

  const auto& past = input(kPastKey)->Shape();
  s.row_bytes = static_cast<int64_t>(RowBytes(a.format, static_cast<size_t>(s.head_size)));
  if (past.NumDimensions() != 4 || !Is(past, {s.batch_size, a.kv_num_heads, past[2], s.row_bytes})) {
    return Mismatch("past_key", past,
                    MakeString("{", s.batch_size, ",", a.kv_num_heads, ",capacity,", s.row_bytes, "} for head_size ",
                               s.head_size));
  }
  s.past_capacity = past[2];
  s.capacity = std::max(s.past_capacity, s.total_sequence_length);
  if (input(kPastValue)->Shape() != past) {
    return Mismatch("past_value", input(kPastValue)->Shape(), MakeString(past.ToString(), " like past_key"));
  }
  ORT_RETURN_IF_ERROR(CheckScale("k_scale", input(kKScale), a.k_mode, a, s));
  ORT_RETURN_IF_ERROR(CheckScale("v_scale", input(kVScale), a.v_mode, a, s));
  if (a.do_rotary) {
    ORT_RETURN_IF_ERROR(CheckRotary(input(kCosCache), input(kSinCache), s));
  }
  const auto* sink = input(kHeadSink);
  if (sink != nullptr && !Is(sink->Shape(), {a.num_heads})) {
    return Mismatch("head_sink", sink->Shape(), MakeString("{", a.num_heads, "}"));
  }
  return Status::OK();
}

}  // namespace kv_cache_quant
}  // namespace contrib
}  // namespace onnxruntime
