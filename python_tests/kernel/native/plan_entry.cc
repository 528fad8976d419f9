// What the tests call on the host: the layout of the structs that Python mirrors, and MakePlan. Free of device code,
// so that a machine without nvcc compiles it as well.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "contrib_ops/cuda/bert/kv_cache_quant/plan.h"

namespace kvq = onnxruntime::contrib::kv_cache_quant;

namespace {

struct Field {
  const char* name;
  size_t offset;
  size_t size;
};

#define KVQ_FIELD(type, member) \
  Field { #type "." #member, offsetof(kvq::type, member), sizeof(kvq::type::member) }
#define KVQ_WHOLE(type) \
  Field { #type, 0, sizeof(kvq::type) }

const Field kFields[] = {
    KVQ_WHOLE(KvSide),
    KVQ_FIELD(KvSide, mode),
    KVQ_FIELD(KvSide, token_scale_is_half),
    KVQ_FIELD(KvSide, codes),
    KVQ_FIELD(KvSide, token_scale),
    KVQ_FIELD(KvSide, static_scale),
    KVQ_FIELD(KvSide, past_codes),
    KVQ_FIELD(KvSide, past_token_scale),
    KVQ_WHOLE(GqaParams),
    KVQ_FIELD(GqaParams, batch_size),
    KVQ_FIELD(GqaParams, sequence_length),
    KVQ_FIELD(GqaParams, num_heads),
    KVQ_FIELD(GqaParams, kv_num_heads),
    KVQ_FIELD(GqaParams, group_size),
    KVQ_FIELD(GqaParams, head_size),
    KVQ_FIELD(GqaParams, row_bytes),
    KVQ_FIELD(GqaParams, capacity),
    KVQ_FIELD(GqaParams, past_capacity),
    KVQ_FIELD(GqaParams, is_prompt),
    KVQ_FIELD(GqaParams, format),
    KVQ_FIELD(GqaParams, activation),
    KVQ_FIELD(GqaParams, query),
    KVQ_FIELD(GqaParams, key),
    KVQ_FIELD(GqaParams, value),
    KVQ_FIELD(GqaParams, query_stride),
    KVQ_FIELD(GqaParams, kv_stride),
    KVQ_FIELD(GqaParams, seqlens_k),
    KVQ_FIELD(GqaParams, cos_cache),
    KVQ_FIELD(GqaParams, sin_cache),
    KVQ_FIELD(GqaParams, rotary_dim),
    KVQ_FIELD(GqaParams, rotary_rows),
    KVQ_FIELD(GqaParams, rotary_interleaved),
    KVQ_FIELD(GqaParams, scale),
    KVQ_FIELD(GqaParams, softcap),
    KVQ_FIELD(GqaParams, local_window_size),
    KVQ_FIELD(GqaParams, head_sink),
    KVQ_FIELD(GqaParams, smooth_softmax),
    KVQ_FIELD(GqaParams, k),
    KVQ_FIELD(GqaParams, v),
    KVQ_FIELD(GqaParams, output),
    KVQ_FIELD(GqaParams, prompt_key),
    KVQ_FIELD(GqaParams, partial_out),
    KVQ_FIELD(GqaParams, partial_stats),
    KVQ_FIELD(GqaParams, counters),
    KVQ_WHOLE(GqaPlan),
    KVQ_FIELD(GqaPlan, path),
    KVQ_FIELD(GqaPlan, padded_head_size),
    KVQ_FIELD(GqaPlan, whole_rows),
    KVQ_FIELD(GqaPlan, warps),
    KVQ_FIELD(GqaPlan, unit_rows),
    KVQ_FIELD(GqaPlan, units_per_head),
    KVQ_FIELD(GqaPlan, splits),
    KVQ_FIELD(GqaPlan, cluster),
    KVQ_FIELD(GqaPlan, counters),
    KVQ_FIELD(GqaPlan, activation_vectors),
    KVQ_FIELD(GqaPlan, prompt_key_offset),
    KVQ_FIELD(GqaPlan, partial_out_offset),
    KVQ_FIELD(GqaPlan, partial_stats_offset),
    KVQ_FIELD(GqaPlan, workspace_bytes),
};

#undef KVQ_FIELD
#undef KVQ_WHOLE

}  // namespace

extern "C" {

// Field `index` of the table; nullptr behind the last one.
const char* kvq_field(int index, size_t* offset, size_t* size) {
  if (index < 0 || static_cast<size_t>(index) >= sizeof(kFields) / sizeof(kFields[0])) return nullptr;
  *offset = kFields[index].offset;
  *size = kFields[index].size;
  return kFields[index].name;
}

int kvq_max_cluster() { return kvq::kMaxCluster; }

// clusters: (kMaxCluster + 1), DeviceLimits'. 1 and *plan, or 0 and the reason in error (error_size bytes, cut where it is longer).
int kvq_make_plan(const kvq::GqaParams* params, int multiprocessors, int compute_capability, const int32_t* clusters,
                  kvq::GqaPlan* plan, char* error, size_t error_size) {
  kvq::DeviceLimits device;
  device.multiprocessors = multiprocessors;
  device.compute_capability = compute_capability;
  std::memcpy(device.clusters, clusters, sizeof(device.clusters));
  std::string text;
  const bool made = kvq::MakePlan(*params, device, plan, &text);
  std::strncpy(error, text.c_str(), error_size - 1);
  error[error_size - 1] = '\0';
  return made ? 1 : 0;
}

void kvq_bind_workspace(const kvq::GqaPlan* plan, void* workspace, kvq::GqaParams* params) {
  kvq::BindWorkspace(*plan, workspace, params);
}

const char* kvq_path_name(const kvq::GqaPlan* plan) { return plan->PathName(); }

}  // extern "C"
