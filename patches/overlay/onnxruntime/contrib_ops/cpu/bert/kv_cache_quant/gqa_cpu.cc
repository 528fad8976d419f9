// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
//
// Between the operator's tensors and the plain pointers of append and attention.

#include "contrib_ops/cpu/bert/kv_cache_quant/gqa_cpu.h"

#include <cmath>
#include <cstring>

#include "core/common/safeint.h"
#include "contrib_ops/cpu/bert/kv_cache_quant/append.h"
#include "contrib_ops/cpu/bert/kv_cache_quant/attention.h"
#include "contrib_ops/cpu/bert/kv_cache_quant/state_tensors.h"

namespace onnxruntime {
namespace contrib {
namespace kv_cache_quant {

namespace {

// Copies the rows that a step keeps, as bytes, where past and present are separate.
void CopyPastRows(const std::vector<StateTensor>& state, const std::vector<SequenceState>& sequences,
                  const GqaKvQuantShapes& s, int64_t kv_num_heads, concurrency::ThreadPool* thread_pool) {
  const double bytes = static_cast<double>(s.past_capacity * s.row_bytes);
  const TensorOpCost cost{bytes, bytes, bytes};
  concurrency::ThreadPool::TryParallelFor(
      thread_pool, s.batch_size * kv_num_heads, cost, [&](std::ptrdiff_t begin, std::ptrdiff_t end) {
        for (int64_t i = begin; i < end; ++i) {
          const SequenceState& sequence = sequences[static_cast<size_t>(i / kv_num_heads)];
          if (!sequence.valid) continue;
          for (const StateTensor& t : state) {
            std::memcpy(t.present + static_cast<size_t>(i * s.capacity) * t.row_bytes,
                        t.past + static_cast<size_t>(i * s.past_capacity) * t.row_bytes,
                        static_cast<size_t>(sequence.past) * t.row_bytes);
          }
        }
      });
}

std::vector<SequenceState> ReadSequences(const Tensor& seqlens_k, const GqaKvQuantShapes& s) {
  std::vector<SequenceState> sequences(static_cast<size_t>(s.batch_size));
  const int32_t* last = seqlens_k.Data<int32_t>();
  for (size_t b = 0; b < sequences.size(); ++b) {
    SequenceState& q = sequences[b];
    q.total = static_cast<int64_t>(last[b]) + 1;
    q.past = s.is_prompt ? 0 : q.total - s.sequence_length;
    q.rows = s.is_prompt ? q.total : s.sequence_length;
    const int64_t limit = s.is_prompt ? s.sequence_length : s.capacity;
    q.valid = q.total >= 0 && q.total <= limit && q.past >= 0 && q.past <= s.past_capacity;
    if (s.rotary_dim != 0 && q.total > s.rotary_rows) q.valid = false;
  }
  return sequences;
}

template <typename T>
void SetActivations(OpKernelContext* context, const GqaKvQuantAttributes& a, const GqaKvQuantShapes& s,
                    GqaProblem<T>& p) {
  const int64_t q_width = a.num_heads * s.head_size;
  const int64_t kv_width = a.kv_num_heads * s.head_size;
  p.query = context->Input<Tensor>(kQuery)->Data<T>();
  if (s.packed_qkv) {
    p.query_stride = p.kv_stride = q_width + 2 * kv_width;
    p.key = p.query + q_width;
    p.value = p.key + kv_width;
  } else {
    p.query_stride = q_width;
    p.kv_stride = kv_width;
    p.key = context->Input<Tensor>(kKey)->Data<T>();
    p.value = context->Input<Tensor>(kValue)->Data<T>();
  }
  p.rotary_dim = s.rotary_dim;
  p.rotary_interleaved = a.rotary_interleaved;
  p.cos_cache = s.rotary_dim != 0 ? context->Input<Tensor>(kCosCache)->Data<T>() : nullptr;
  p.sin_cache = s.rotary_dim != 0 ? context->Input<Tensor>(kSinCache)->Data<T>() : nullptr;
  const Tensor* sink = context->Input<Tensor>(kHeadSink);
  p.head_sink = sink != nullptr ? sink->Data<T>() : nullptr;
  p.smooth_softmax = a.smooth_softmax;
  p.scale = a.scale != 0.0f ? a.scale : 1.0f / std::sqrt(static_cast<float>(s.head_size));
  p.softcap = a.softcap;
  p.local_window_size = a.local_window_size;
}

// One side of the cache, in present.
CacheSide MakeSide(KvScaleMode mode, Tensor* present, const Tensor& scale, Tensor* present_scale) {
  CacheSide side;
  side.mode = mode;
  side.codes = static_cast<uint8_t*>(present->MutableDataRaw());
  if (mode != KvScaleMode::kPerToken) {
    side.static_scale = scale.Data<float>();
  } else if (present_scale->IsDataType<float>()) {
    side.token_scale = present_scale->MutableData<float>();
  } else {
    side.token_scale_half = reinterpret_cast<uint16_t*>(present_scale->MutableData<MLFloat16>());
  }
  return side;
}

}  // namespace

template <typename T>
Status ComputeGqaKvQuant(OpKernelContext* context, const GqaKvQuantAttributes& a) {
  GqaKvQuantShapes s;
  ORT_RETURN_IF_ERROR(CheckGqaKvQuantInputs(context, a, &s));

  Tensor* output = context->Output(kOutput, {s.batch_size, s.sequence_length, a.num_heads * s.head_size});
  GqaKvQuantState state;
  ORT_RETURN_IF_ERROR(MakeGqaKvQuantState(context, a, s, &state));

  GqaProblem<T> p{};
  p.batch_size = s.batch_size;
  p.sequence_length = s.sequence_length;
  p.num_heads = a.num_heads;
  p.kv_num_heads = a.kv_num_heads;
  p.head_size = s.head_size;
  p.capacity = s.capacity;
  p.row_bytes = s.row_bytes;
  p.is_prompt = s.is_prompt;
  p.format = a.format;
  p.output = output->MutableData<T>();
  p.sequences = ReadSequences(*context->Input<Tensor>(kSeqlensK), s);
  p.k = MakeSide(a.k_mode, state.present[0], *context->Input<Tensor>(kKScale), state.present_scale[0]);
  p.v = MakeSide(a.v_mode, state.present[1], *context->Input<Tensor>(kVScale), state.present_scale[1]);
  SetActivations(context, a, s, p);

  AllocatorPtr allocator;
  ORT_RETURN_IF_ERROR(context->GetTempSpaceAllocator(&allocator));
  auto* thread_pool = context->GetOperatorThreadPool();
  IAllocatorUniquePtr<float> exact;
  if (s.is_prompt) {
    const size_t side = SafeInt<size_t>(s.batch_size) * a.kv_num_heads * s.sequence_length * s.head_size;
    exact = IAllocator::MakeUniquePtr<float>(allocator, SafeInt<size_t>(side) * 2);
    p.prompt_key = exact.get();
    p.prompt_value = exact.get() + side;
  } else if (!state.shared) {
    CopyPastRows(state.tensors, p.sequences, s, a.kv_num_heads, thread_pool);
  }
  AppendRows(p, thread_pool);
  Attend(p, allocator, thread_pool);
  return Status::OK();
}

template Status ComputeGqaKvQuant<float>(OpKernelContext*, const GqaKvQuantAttributes&);
template Status ComputeGqaKvQuant<MLFloat16>(OpKernelContext*, const GqaKvQuantAttributes&);

}  // namespace kv_cache_quant
}  // namespace contrib
}  // namespace onnxruntime
