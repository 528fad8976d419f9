// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
//
// Between the operator's tensors and the plain pointers of the device code: the only file here that knows ORT.

#include "contrib_ops/cuda/bert/kv_cache_quant/gqa_cuda.h"

#include <cmath>
#include <iostream>
#include <sstream>

#include "core/providers/cuda/cuda_common.h"
#include "contrib_ops/cpu/bert/kv_cache_quant/state_tensors.h"
#include "contrib_ops/cuda/bert/attention_kernel_options.h"
#include "contrib_ops/cuda/bert/kv_cache_quant/launch.h"

namespace onnxruntime {
namespace contrib {
namespace cuda {

using namespace kv_cache_quant;
using onnxruntime::cuda::CudaKernel;

namespace {

std::vector<MLDataType> CacheTypes() {
  return {DataTypeImpl::GetTensorType<int8_t>(),
#if !defined(DISABLE_FLOAT8_TYPES)
          DataTypeImpl::GetTensorType<Float8E4M3FN>(),
#endif
          DataTypeImpl::GetTensorType<uint8_t>()};
}

std::vector<MLDataType> ScaleTypes() {
  return {DataTypeImpl::GetTensorType<float>(), DataTypeImpl::GetTensorType<MLFloat16>()};
}

}  // namespace

// The name of the unquantized kernels' classes ends with T alone.
#define REGISTER_KV_QUANT_KERNEL(T)                                    \
  ONNX_OPERATOR_TYPED_KERNEL_EX(                                       \
      GroupQueryAttention,                                             \
      kMSDomain,                                                       \
      1,                                                               \
      T##_KvQuant,                                                     \
      kCudaExecutionProvider,                                          \
      (*KernelDefBuilder::Create())                                    \
          .TypeConstraint("T", DataTypeImpl::GetTensorType<T>())       \
          .TypeConstraint("T_CACHE", CacheTypes())                     \
          .TypeConstraint("T_KV_SCALE", ScaleTypes())                  \
          .TypeConstraint("M", DataTypeImpl::GetTensorType<int32_t>()) \
          .MayInplace(kPastKey, kPresentKey)                           \
          .MayInplace(kPastValue, kPresentValue)                       \
          .MayInplace(kKScale, kPresentKScale)                         \
          .MayInplace(kVScale, kPresentVScale)                         \
          .InputMemoryType(OrtMemTypeCPUInput, kTotalSequenceLength),  \
      GroupQueryAttentionKvQuant);

REGISTER_KV_QUANT_KERNEL(MLFloat16)
REGISTER_KV_QUANT_KERNEL(BFloat16)

#undef REGISTER_KV_QUANT_KERNEL

namespace {

const void* InputData(OpKernelContext* context, size_t input) {
  const Tensor* tensor = context->Input<Tensor>(static_cast<int>(input));
  return tensor != nullptr ? tensor->DataRaw() : nullptr;
}

void SetActivations(OpKernelContext* context, const GqaKvQuantAttributes& a, const GqaKvQuantShapes& s, GqaParams& p) {
  const int64_t q_width = a.num_heads * s.head_size;
  const int64_t kv_width = a.kv_num_heads * s.head_size;
  p.query = InputData(context, kQuery);
  if (s.packed_qkv) {
    p.query_stride = p.kv_stride = q_width + 2 * kv_width;
    p.key = static_cast<const uint16_t*>(p.query) + q_width;
    p.value = static_cast<const uint16_t*>(p.key) + kv_width;
  } else {
    p.query_stride = q_width;
    p.kv_stride = kv_width;
    p.key = InputData(context, kKey);
    p.value = InputData(context, kValue);
  }
  if (s.rotary_dim != 0) {
    p.cos_cache = InputData(context, kCosCache);
    p.sin_cache = InputData(context, kSinCache);
  }
  p.rotary_dim = static_cast<int32_t>(s.rotary_dim);
  p.rotary_rows = s.rotary_rows;
  p.rotary_interleaved = a.rotary_interleaved;
  p.head_sink = InputData(context, kHeadSink);
  p.smooth_softmax = a.smooth_softmax;
  p.scale = a.scale != 0.0f ? a.scale : 1.0f / std::sqrt(static_cast<float>(s.head_size));
  p.softcap = a.softcap;
  p.local_window_size = static_cast<int32_t>(a.local_window_size);
}

void SetSizes(const GqaKvQuantAttributes& a, const GqaKvQuantShapes& s, GqaParams& p) {
  p.batch_size = gsl::narrow<int32_t>(s.batch_size);
  p.sequence_length = gsl::narrow<int32_t>(s.sequence_length);
  p.num_heads = a.num_heads;
  p.kv_num_heads = a.kv_num_heads;
  p.group_size = a.num_heads / a.kv_num_heads;
  p.head_size = static_cast<int32_t>(s.head_size);
  p.row_bytes = static_cast<int32_t>(s.row_bytes);
  p.capacity = s.capacity;
  p.past_capacity = s.past_capacity;
  p.is_prompt = s.is_prompt;
  p.format = a.format;
}

// side: 0 is K, 1 is V.
KvSide MakeSide(OpKernelContext* context, KvScaleMode mode, const GqaKvQuantState& state, size_t side) {
  KvSide x;
  x.mode = mode;
  x.codes = static_cast<uint8_t*>(state.present[side]->MutableDataRaw());
  if (!state.shared) x.past_codes = static_cast<const uint8_t*>(InputData(context, kPastKey + side));
  if (mode != KvScaleMode::kPerToken) {
    x.static_scale = static_cast<const float*>(InputData(context, kKScale + side));
    return x;
  }
  x.token_scale_is_half = state.present_scale[side]->IsDataType<MLFloat16>();
  x.token_scale = state.present_scale[side]->MutableDataRaw();
  if (!state.shared) x.past_token_scale = InputData(context, kKScale + side);
  return x;
}

// The device code loads and stores 8-bit rows 8 bytes at a time and int4 rows 4, everything else by element at least.
Status CheckAlignment(const GqaParams& p) {
  const size_t row_word = p.format == KvFormat::kInt4 ? 4 : 8;
  const size_t k_scale = p.k.token_scale_is_half ? sizeof(uint16_t) : sizeof(float);
  const size_t v_scale = p.v.token_scale_is_half ? sizeof(uint16_t) : sizeof(float);
  const struct {
    const char* name;
    const void* address;
    size_t bytes;
  } tensors[] = {
      {"past_key", p.k.past_codes, row_word},
      {"past_value", p.v.past_codes, row_word},
      {"present_key", p.k.codes, row_word},
      {"present_value", p.v.codes, row_word},
      {"k_scale", p.k.past_token_scale, k_scale},
      {"v_scale", p.v.past_token_scale, v_scale},
      {"present_k_scale", p.k.token_scale, k_scale},
      {"present_v_scale", p.v.token_scale, v_scale},
  };
  for (const auto& t : tensors) {
    if (reinterpret_cast<uintptr_t>(t.address) % t.bytes != 0) {
      return ORT_MAKE_STATUS(ONNXRUNTIME, INVALID_ARGUMENT, "GroupQueryAttention: '", t.name, "' is at address ",
                             t.address, "; expected a multiple of ", t.bytes, " bytes.");
    }
  }
  return Status::OK();
}

// One line in the format of AttentionKernelDebugInfo.
void PrintDebugInfo(const std::string& node_name, const GqaParams& p, const GqaPlan& plan) {
  std::ostringstream line;
  line << "Operator=GroupQueryAttention";
  if (!node_name.empty()) line << " Node=" << node_name;
  line << " DataType=" << (p.activation == ActivationType::kBFloat16 ? "bf16" : "fp16");
  line << " SdpaKernel=" << plan.PathName() << " HeadSize=" << p.head_size;
  line << " PaddedHeadSize=" << plan.padded_head_size << " UnitRows=" << plan.unit_rows;
  line << " Splits=" << plan.splits << " Cluster=" << plan.cluster << " WorkspaceBytes=" << plan.workspace_bytes;
  std::cout << "\x1B[36m" << line.str() << "\x1B[0m" << std::endl;
}

}  // namespace

Status StreamCounters::Get(const OpKernelInfo& info, cudaStream_t stream, int32_t count, uint32_t** counters) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto range = buffers_.equal_range(stream);
  for (auto it = range.first; it != range.second; ++it) {
    if (it->second.count >= count) {
      *counters = it->second.data.get();
      return Status::OK();
    }
  }
  Buffer buffer{IAllocator::MakeUniquePtr<uint32_t>(info.GetAllocator(OrtMemTypeDefault), count), count};
  CUDA_RETURN_IF_ERROR(cudaMemsetAsync(buffer.data.get(), 0, count * sizeof(uint32_t), stream));
  *counters = buffer.data.get();
  buffers_.emplace(stream, std::move(buffer));
  return Status::OK();
}

GroupQueryAttentionKvQuant::GroupQueryAttentionKvQuant(const OpKernelInfo& info)
    : CudaKernel(info), attributes_(ReadGqaKvQuantAttributes(info)) {
  ORT_ENFORCE(attributes_.IsQuantized());
  const int32_t type = attributes_internal::ElementType(info.node().InputDefs(), kQuery);
  const bool is_bfloat16 = type == ONNX_NAMESPACE::TensorProto_DataType_BFLOAT16;
  activation_ = is_bfloat16 ? ActivationType::kBFloat16 : ActivationType::kHalf;
  const cudaDeviceProp& device = GetDeviceProp();
  device_.multiprocessors = device.multiProcessorCount;
  device_.compute_capability = 10 * device.major + device.minor;
  const int needed = is_bfloat16 ? 80 : 75;
  if (device_.compute_capability < needed) {
    ORT_NOT_IMPLEMENTED("GroupQueryAttention: a quantized KV cache with ", is_bfloat16 ? "bfloat16" : "float16",
                        " activations needs a GPU of compute capability ", needed / 10, ".", needed % 10, "; ",
                        device.name, " has ", device.major, ".", device.minor, ".");
  }
  const cudaError_t found = FindDeviceCode();
  if (found != cudaSuccess) {
    ORT_NOT_IMPLEMENTED("GroupQueryAttention: this build has no code of the kernels for a quantized KV cache that ",
                        device.name, " (compute capability ", device.major, ".", device.minor, ") can run: ",
                        cudaGetErrorString(found), ". Build with --cuda-arch ", device_.compute_capability, ".");
  }
  CUDA_CALL_THROW(FindClusters(device_.clusters));
}

Status GroupQueryAttentionKvQuant::ComputeInternal(OpKernelContext* context) const {
  const GqaKvQuantAttributes& a = attributes_;
  GqaKvQuantShapes s;
  ORT_RETURN_IF_ERROR(CheckGqaKvQuantInputs(context, a, &s));
  Tensor* output =
      context->Output(kOutput, TensorShape({s.batch_size, s.sequence_length, a.num_heads * s.head_size}));
  GqaKvQuantState state;
  ORT_RETURN_IF_ERROR(MakeGqaKvQuantState(context, a, s, &state));

  GqaParams p;
  p.activation = activation_;
  SetSizes(a, s, p);
  SetActivations(context, a, s, p);
  p.seqlens_k = context->Input<Tensor>(kSeqlensK)->Data<int32_t>();
  p.k = MakeSide(context, a.k_mode, state, 0);
  p.v = MakeSide(context, a.v_mode, state, 1);
  p.output = output->MutableDataRaw();
  ORT_RETURN_IF_ERROR(CheckAlignment(p));

  GqaPlan plan;
  std::string error;
  if (!MakePlan(p, device_, &plan, &error)) {
    return ORT_MAKE_STATUS(ONNXRUNTIME, NOT_IMPLEMENTED,
                           "GroupQueryAttention: no CUDA kernel for a quantized KV cache with ", error, ".");
  }
  const auto workspace = GetScratchBuffer<void>(plan.workspace_bytes, context->GetComputeStream());
  if (workspace != nullptr) BindWorkspace(plan, workspace.get(), &p);
  if (plan.counters != 0) {
    ORT_RETURN_IF_ERROR(counters_.Get(Info(), Stream(context), plan.counters, &p.counters));
  }
  if (GetAttentionKernelOptions()->AllowDebugInfo()) PrintDebugInfo(Node().Name(), p, plan);
  CUDA_RETURN_IF_ERROR(LaunchGqa(p, plan, Stream(context)));
  return Status::OK();
}

}  // namespace cuda
}  // namespace contrib
}  // namespace onnxruntime
