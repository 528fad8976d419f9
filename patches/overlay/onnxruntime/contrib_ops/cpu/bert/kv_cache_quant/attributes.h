// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
//
// What a GroupQueryAttention node says about its cache, read once when its kernel is created.
// Header only: every execution provider that has a kernel for the quantized cache includes it.

#pragma once

#include <cstdint>
#include <limits>
#include <string>

#include "core/common/common.h"
#include "core/providers/common.h"
#include "contrib_ops/cuda/bert/kv_cache_quant/format.h"

namespace onnxruntime {
namespace contrib {
namespace kv_cache_quant {

// Node inputs and outputs, as in the operator's schema.
enum GqaInput : size_t { kQuery = 0,
                         kKey = 1,
                         kValue = 2,
                         kPastKey = 3,
                         kPastValue = 4,
                         kSeqlensK = 5,
                         kTotalSequenceLength = 6,
                         kCosCache = 7,
                         kSinCache = 8,
                         kPositionIds = 9,
                         kAttentionBias = 10,
                         kHeadSink = 11,
                         kKScale = 12,
                         kVScale = 13 };

enum GqaOutput : size_t { kOutput = 0,
                          kPresentKey = 1,
                          kPresentValue = 2,
                          kOutputQk = 3,
                          kPresentKScale = 4,
                          kPresentVScale = 5 };

struct GqaKvQuantAttributes {
  int num_heads = 0;
  int kv_num_heads = 0;
  float scale = 0.0f;    // 0: 1 / sqrt(head_size)
  float softcap = 0.0f;  // 0: none
  bool do_rotary = false;
  bool rotary_interleaved = false;
  bool smooth_softmax = false;
  int64_t local_window_size = -1;  // tokens to the left of the query that it attends; -1: all
  KvFormat format = KvFormat::kInt8;
  KvScaleMode k_mode = KvScaleMode::kNone;
  KvScaleMode v_mode = KvScaleMode::kNone;

  bool IsQuantized() const { return k_mode != KvScaleMode::kNone; }
};

namespace attributes_internal {

template <typename Defs>
bool Exists(const Defs& defs, size_t index) {
  return index < defs.size() && defs[index]->Exists();
}

template <typename Defs>
int32_t ElementType(const Defs& defs, size_t index) {
  const auto* type = Exists(defs, index) ? defs[index]->TypeAsProto() : nullptr;
  return type != nullptr ? type->tensor_type().elem_type() : ONNX_NAMESPACE::TensorProto_DataType_UNDEFINED;
}

inline KvScaleMode ParseMode(const std::string& text, const char* attribute) {
  if (text == "NONE") return KvScaleMode::kNone;
  if (text == "PER_TENSOR") return KvScaleMode::kPerTensor;
  if (text == "PER_CHANNEL") return KvScaleMode::kPerChannel;
  if (text == "PER_TOKEN") return KvScaleMode::kPerToken;
  ORT_THROW("GroupQueryAttention: ", attribute, " is '", text,
            "'; expected NONE, PER_TENSOR, PER_CHANNEL or PER_TOKEN.");
}

// The format that kv_cache_dtype, kv_cache_bit_width and the cache tensor's type agree on.
inline KvFormat ParseFormat(const std::string& dtype, int64_t bit_width, int32_t cache_type) {
  using ONNX_NAMESPACE::TensorProto_DataType_FLOAT8E4M3FN;
  using ONNX_NAMESPACE::TensorProto_DataType_INT8;
  using ONNX_NAMESPACE::TensorProto_DataType_UINT8;

  KvFormat format = KvFormat::kInt8;
  if (dtype == "auto") {
    if (cache_type == TensorProto_DataType_FLOAT8E4M3FN) {
      format = KvFormat::kFloat8E4M3FN;
    } else if (cache_type == TensorProto_DataType_UINT8) {
      ORT_ENFORCE(bit_width == 4, "GroupQueryAttention: a uint8 cache needs kv_cache_bit_width=4, or kv_cache_dtype ",
                  "'int4' or 'float8e4m3fn', to say what its bytes are.");
      format = KvFormat::kInt4;
    }
  } else if (dtype == "int8") {
    format = KvFormat::kInt8;
  } else if (dtype == "float8e4m3fn") {
    format = KvFormat::kFloat8E4M3FN;
  } else if (dtype == "int4") {
    format = KvFormat::kInt4;
  } else {
    ORT_THROW("GroupQueryAttention: kv_cache_dtype is '", dtype, "'; expected auto, int8, float8e4m3fn or int4.");
  }

  const bool type_fits =
      format == KvFormat::kInt8   ? cache_type == TensorProto_DataType_INT8
      : format == KvFormat::kInt4 ? cache_type == TensorProto_DataType_UINT8
                                  : cache_type == TensorProto_DataType_FLOAT8E4M3FN ||
                                        cache_type == TensorProto_DataType_UINT8;
  ORT_ENFORCE(type_fits, "GroupQueryAttention: kv_cache_dtype '", dtype, "' does not go with past_key of element type ",
              cache_type, " (int8 needs int8; int4 needs uint8; float8e4m3fn needs float8e4m3fn or uint8).");
  const int64_t bits = format == KvFormat::kInt4 ? 4 : 8;
  ORT_ENFORCE(bit_width == 0 || bit_width == bits, "GroupQueryAttention: kv_cache_bit_width is ", bit_width,
              "; the cache has ", bits, " bits (0 derives it).");
  return format;
}

// Slots that a mode requires or forbids, for one of K and V.
template <typename Inputs, typename Outputs>
void CheckScaleSlots(const Inputs& inputs, const Outputs& outputs, KvScaleMode mode, size_t scale_input,
                     size_t scale_output, const char* side) {
  ORT_ENFORCE(Exists(inputs, scale_input), "GroupQueryAttention: ", side, "_quant_type needs input ", side, "_scale.");
  const bool per_token = mode == KvScaleMode::kPerToken;
  ORT_ENFORCE(Exists(outputs, scale_output) == per_token, "GroupQueryAttention: output present_", side,
              "_scale is required exactly when ", side, "_quant_type is PER_TOKEN.");
  ORT_ENFORCE(per_token || ElementType(inputs, scale_input) == ONNX_NAMESPACE::TensorProto_DataType_FLOAT,
              "GroupQueryAttention: ", side, "_scale must be float unless ", side, "_quant_type is PER_TOKEN.");
}

// Slots that the operator has and this base does not honour.
template <typename Inputs, typename Outputs>
void RejectUnsupportedSlots(const Inputs& inputs, const Outputs& outputs, bool quantized) {
  const char* names[] = {"position_ids", "attention_bias", "head_sink", "k_scale", "v_scale"};
  for (size_t slot = kPositionIds; slot <= kVScale; ++slot) {
    const bool allowed = quantized && slot >= kHeadSink;
    if (Exists(inputs, slot) && !allowed) {
      ORT_NOT_IMPLEMENTED("GroupQueryAttention: input ", names[slot - kPositionIds], " is not supported with ",
                          quantized ? "a quantized" : "an unquantized", " KV cache on this release.");
    }
  }
  if (Exists(outputs, kOutputQk)) {
    ORT_NOT_IMPLEMENTED("GroupQueryAttention: output output_qk is not supported on this release.");
  }
}

template <typename Outputs>
void CheckUnquantized(const Outputs& outputs, const std::string& dtype, int64_t bit_width, int32_t cache_type) {
  const bool quantized_type = cache_type == ONNX_NAMESPACE::TensorProto_DataType_INT8 ||
                              cache_type == ONNX_NAMESPACE::TensorProto_DataType_UINT8 ||
                              cache_type == ONNX_NAMESPACE::TensorProto_DataType_FLOAT8E4M3FN;
  ORT_ENFORCE(!quantized_type, "GroupQueryAttention: past_key has a quantized element type (", cache_type,
              ") but k_quant_type is NONE.");
  ORT_ENFORCE(dtype == "auto" && bit_width == 0, "GroupQueryAttention: kv_cache_dtype '", dtype,
              "' and kv_cache_bit_width ", bit_width, " need k_quant_type and v_quant_type.");
  ORT_ENFORCE(!Exists(outputs, kPresentKScale) && !Exists(outputs, kPresentVScale),
              "GroupQueryAttention: outputs present_k_scale and present_v_scale need PER_TOKEN scales.");
}

// What is not about the format: heads, softmax, rotary, window.
template <typename KernelInfo>
void ReadAttention(const KernelInfo& info, GqaKvQuantAttributes& a) {
  a.num_heads = static_cast<int>(info.template GetAttrOrDefault<int64_t>("num_heads", 0));
  a.kv_num_heads = static_cast<int>(info.template GetAttrOrDefault<int64_t>("kv_num_heads", 0));
  ORT_ENFORCE(a.num_heads > 0 && a.kv_num_heads > 0 && a.num_heads % a.kv_num_heads == 0,
              "GroupQueryAttention: num_heads (", a.num_heads, ") must be a positive multiple of kv_num_heads (",
              a.kv_num_heads, ").");
  if (a.num_heads / a.kv_num_heads > kMaxGroupSize) {
    ORT_NOT_IMPLEMENTED("GroupQueryAttention: num_heads / kv_num_heads is ", a.num_heads / a.kv_num_heads,
                        "; a quantized cache supports up to ", kMaxGroupSize, ".");
  }
  a.scale = info.template GetAttrOrDefault<float>("scale", 0.0f);
  a.softcap = info.template GetAttrOrDefault<float>("softcap", 0.0f);
  ORT_ENFORCE(a.softcap >= 0.0f, "GroupQueryAttention: softcap is ", a.softcap, "; expected 0 (none) or more.");
  a.do_rotary = info.template GetAttrOrDefault<int64_t>("do_rotary", 0) == 1;
  a.rotary_interleaved = info.template GetAttrOrDefault<int64_t>("rotary_interleaved", 0) == 1;
  a.smooth_softmax = info.template GetAttrOrDefault<int64_t>("smooth_softmax", 0) == 1;
  a.local_window_size = info.template GetAttrOrDefault<int64_t>("local_window_size", -1);
  ORT_ENFORCE(a.local_window_size == -1 || a.local_window_size > 0,
              "GroupQueryAttention: local_window_size is ", a.local_window_size, "; expected -1 (none) or at least 1.");
  // A window that no sequence can exceed is none; past this point the value is never narrowed.
  if (a.local_window_size >= std::numeric_limits<int32_t>::max()) a.local_window_size = -1;
}

}  // namespace attributes_internal

// Reads and checks the node. Throws NotImplementedException for what the operator defines and no build of this
// base runs, OnnxRuntimeException for what contradicts the operator: both fail the creation of the session.
template <typename KernelInfo>
GqaKvQuantAttributes ReadGqaKvQuantAttributes(const KernelInfo& info) {
  using namespace attributes_internal;
  const auto inputs = info.node().InputDefs();
  const auto outputs = info.node().OutputDefs();
  const auto dtype = info.template GetAttrOrDefault<std::string>("kv_cache_dtype", "auto");
  const auto bit_width = info.template GetAttrOrDefault<int64_t>("kv_cache_bit_width", 0);

  GqaKvQuantAttributes a;
  a.k_mode = ParseMode(info.template GetAttrOrDefault<std::string>("k_quant_type", "NONE"), "k_quant_type");
  a.v_mode = ParseMode(info.template GetAttrOrDefault<std::string>("v_quant_type", "NONE"), "v_quant_type");
  ORT_ENFORCE((a.k_mode == KvScaleMode::kNone) == (a.v_mode == KvScaleMode::kNone),
              "GroupQueryAttention: k_quant_type and v_quant_type must both be NONE or both be set.");
  RejectUnsupportedSlots(inputs, outputs, a.IsQuantized());
  if (!a.IsQuantized()) {
    CheckUnquantized(outputs, dtype, bit_width, ElementType(inputs, kPastKey));
    return a;
  }
  ORT_ENFORCE(Exists(inputs, kPastKey) && Exists(inputs, kPastValue),
              "GroupQueryAttention: a quantized cache needs inputs past_key and past_value (capacity 0 is allowed).");
  ORT_ENFORCE(Exists(outputs, kPresentKey) && Exists(outputs, kPresentValue),
              "GroupQueryAttention: a quantized cache needs outputs present_key and present_value.");
  a.format = ParseFormat(dtype, bit_width, ElementType(inputs, kPastKey));
  CheckScaleSlots(inputs, outputs, a.k_mode, kKScale, kPresentKScale, "k");
  CheckScaleSlots(inputs, outputs, a.v_mode, kVScale, kPresentVScale, "v");
  ReadAttention(info, a);
  return a;
}

}  // namespace kv_cache_quant
}  // namespace contrib
}  // namespace onnxruntime
