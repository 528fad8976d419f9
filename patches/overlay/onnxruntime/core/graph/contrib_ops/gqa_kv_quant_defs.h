// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
//
// Type and shape inference of GroupQueryAttention's cache and scale outputs, shared with no other operator.

#pragma once

#include <algorithm>
#include <string>

#include "core/graph/onnx_protobuf.h"
#include "onnx/defs/shape_inference.h"
#include "onnx/defs/tensor_proto_util.h"

namespace onnxruntime {
namespace contrib {

// Rows of the present cache where they are known: as many as past has, or total_sequence_length if that is more.
// -1 where either is not a constant: with separate buffers present may be longer than past.
inline int64_t GqaPresentCapacity(const ONNX_NAMESPACE::InferenceContext& ctx,
                                  const ONNX_NAMESPACE::TensorShapeProto& past) {
  const auto* total = ctx.getInputData(6);
  if (total == nullptr || !past.dim(2).has_dim_value()) return -1;
  const auto values = ONNX_NAMESPACE::ParseData<int32_t>(total);
  return values.size() == 1 ? std::max<int64_t>(values[0], past.dim(2).dim_value()) : -1;
}

inline bool HasInputType(const ONNX_NAMESPACE::InferenceContext& ctx, size_t input) {
  return input < ctx.getNumInputs() && ctx.getInputType(input) != nullptr;
}

// The input whose element type the present cache has: the past cache, or the query (input 0) where there is none.
inline size_t GqaCacheTypeInput(const ONNX_NAMESPACE::InferenceContext& ctx, int past_index) {
  return past_index >= 0 && HasInputType(ctx, static_cast<size_t>(past_index)) ? static_cast<size_t>(past_index) : 0;
}

// Shape of output <- shape of input with the capacity (dimension 2) replaced.
inline void InferGqaStateShape(ONNX_NAMESPACE::InferenceContext& ctx, size_t input, size_t output, int64_t capacity) {
  if (!ONNX_NAMESPACE::hasInputShape(ctx, input)) return;
  ONNX_NAMESPACE::TensorShapeProto shape = ONNX_NAMESPACE::getInputShape(ctx, input);
  if (shape.dim_size() != 4) {
    fail_shape_inference("GroupQueryAttention: input ", input, " shall have 4 dimensions");
  }
  shape.mutable_dim(2)->Clear();
  if (capacity >= 0) shape.mutable_dim(2)->set_dim_value(capacity);
  ONNX_NAMESPACE::updateOutputShape(ctx, output, shape);
}

// Shapes of a quantized cache's outputs, and types and shapes of the scale outputs. An empty output slot in between
// counts as an output here, so each is looked at by its own mode and not by the count.
inline void InferGqaKvQuantOutputs(ONNX_NAMESPACE::InferenceContext& ctx) {
  const auto mode = [&ctx](const char* name) {
    const auto* attribute = ctx.getAttribute(name);
    return attribute != nullptr ? attribute->s() : std::string("NONE");
  };
  const std::string modes[] = {mode("k_quant_type"), mode("v_quant_type")};
  if (modes[0] == "NONE" && modes[1] == "NONE") return;
  if (!HasInputType(ctx, 3) || !HasInputType(ctx, 4)) {
    fail_type_inference("GroupQueryAttention: a quantized cache needs inputs past_key and past_value");
  }
  int64_t capacity = -1;
  if (ONNX_NAMESPACE::hasInputShape(ctx, 3) && ONNX_NAMESPACE::getInputShape(ctx, 3).dim_size() == 4) {
    capacity = GqaPresentCapacity(ctx, ONNX_NAMESPACE::getInputShape(ctx, 3));
  }
  const size_t outputs = ctx.getNumOutputs();
  for (size_t side = 0; side < 2; ++side) {
    if (outputs > 1 + side) InferGqaStateShape(ctx, 3 + side, 1 + side, capacity);
    if (outputs > 4 + side && modes[side] == "PER_TOKEN" && HasInputType(ctx, 12 + side)) {
      ONNX_NAMESPACE::propagateElemTypeFromInputToOutput(ctx, 12 + side, 4 + side);
      InferGqaStateShape(ctx, 12 + side, 4 + side, capacity);
    }
  }
}

}  // namespace contrib
}  // namespace onnxruntime
