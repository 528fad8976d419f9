// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
//
// The state that a call of GroupQueryAttention on a quantized cache carries on: K and V and their PER_TOKEN scales,
// each as past (an input) and present (an output). Header only, like attributes.h.

#pragma once

#include <vector>

#include "contrib_ops/cpu/bert/kv_cache_quant/check_inputs.h"

namespace onnxruntime {
namespace contrib {
namespace kv_cache_quant {

// One tensor of the state, of which row_bytes belong to a token.
struct StateTensor {
  const char* name;
  const uint8_t* past;
  uint8_t* present;
  size_t past_bytes;
  size_t present_bytes;
  size_t row_bytes;

  bool IsShared() const { return past == present; }

  bool Overlaps() const {
    return past_bytes != 0 && present_bytes != 0 && past < present + present_bytes && present < past + past_bytes;
  }
};

struct GqaKvQuantState {
  Tensor* present[2] = {nullptr, nullptr};        // K, V
  Tensor* present_scale[2] = {nullptr, nullptr};  // of a side that is PER_TOKEN
  std::vector<StateTensor> tensors;
  bool shared = false;  // past and present of every tensor are one buffer
};

namespace state_tensors_internal {

inline StateTensor MakeStateTensor(const char* name, const Tensor& past, Tensor& present, size_t row_bytes) {
  return {name, static_cast<const uint8_t*>(past.DataRaw()), static_cast<uint8_t*>(present.MutableDataRaw()),
          past.SizeInBytes(), present.SizeInBytes(), row_bytes};
}

// Either all of the state is updated in place or all of it is copied.
inline Status CheckSharing(const std::vector<StateTensor>& state, bool* shared) {
  *shared = state[0].IsShared();
  for (const StateTensor& t : state) {
    if (t.IsShared() != *shared && t.past_bytes != 0) {
      return ORT_MAKE_STATUS(ONNXRUNTIME, INVALID_ARGUMENT, "GroupQueryAttention: past and present of '", t.name,
                             "' are ", t.IsShared() ? "one buffer" : "two buffers", " and those of '", state[0].name,
                             "' are not; share all of the cache and its scales or none.");
    }
    if (t.IsShared() && t.past_bytes != t.present_bytes) {
      return ORT_MAKE_STATUS(ONNXRUNTIME, INVALID_ARGUMENT, "GroupQueryAttention: past and present of '", t.name,
                             "' are one buffer with ", t.past_bytes, " bytes as past and ", t.present_bytes,
                             " as present; its rows lie differently. Bind it with one shape.");
    }
    if (!*shared && t.Overlaps()) {
      return ORT_MAKE_STATUS(ONNXRUNTIME, INVALID_ARGUMENT, "GroupQueryAttention: past and present of '", t.name,
                             "' overlap; bind one buffer or two separate ones.");
    }
  }
  return Status::OK();
}

}  // namespace state_tensors_internal

// Makes the outputs that hold the state, and checks how they lie to the inputs.
template <typename Context>
Status MakeGqaKvQuantState(Context* context, const GqaKvQuantAttributes& a, const GqaKvQuantShapes& s,
                           GqaKvQuantState* state) {
  using namespace state_tensors_internal;
  const TensorShape cache_shape({s.batch_size, a.kv_num_heads, s.capacity, s.row_bytes});
  const TensorShape scale_shape({s.batch_size, a.kv_num_heads, s.capacity, 1});
  const char* names[2][2] = {{"past_key", "k_scale"}, {"past_value", "v_scale"}};
  const KvScaleMode modes[2] = {a.k_mode, a.v_mode};
  for (int i = 0; i < 2; ++i) {
    state->present[i] = context->Output(static_cast<int>(kPresentKey) + i, cache_shape);
    const auto* past = context->template Input<Tensor>(static_cast<int>(kPastKey) + i);
    const auto row_bytes = static_cast<size_t>(s.row_bytes);
    state->tensors.push_back(MakeStateTensor(names[i][0], *past, *state->present[i], row_bytes));
    if (modes[i] == KvScaleMode::kPerToken) {
      state->present_scale[i] = context->Output(static_cast<int>(kPresentKScale) + i, scale_shape);
      const auto* past_scale = context->template Input<Tensor>(static_cast<int>(kKScale) + i);
      const size_t scale_bytes = past_scale->DataType()->Size();
      state->tensors.push_back(MakeStateTensor(names[i][1], *past_scale, *state->present_scale[i], scale_bytes));
    }
  }
  return CheckSharing(state->tensors, &state->shared);
}

}  // namespace kv_cache_quant
}  // namespace contrib
}  // namespace onnxruntime
