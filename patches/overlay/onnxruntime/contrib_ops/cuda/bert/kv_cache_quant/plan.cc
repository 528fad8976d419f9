// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.

#include "contrib_ops/cuda/bert/kv_cache_quant/plan.h"

#include <algorithm>

namespace onnxruntime {
namespace contrib {
namespace kv_cache_quant {

namespace {

bool Fail(std::string* error, const std::string& what) {
  *error = what;
  return false;
}

int64_t DivUp(int64_t a, int64_t b) { return (a + b - 1) / b; }

size_t Align(size_t bytes) { return (bytes + 255) / 256 * 256; }

bool IsAligned(const void* pointer, uintptr_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

bool CheckValues(const GqaParams& p, const DeviceLimits& device, std::string* error) {
  switch (p.format) {
    case KvFormat::kInt8:
    case KvFormat::kFloat8E4M3FN:
    case KvFormat::kInt4:
      break;
    default:
      return Fail(error, "cache format " + std::to_string(static_cast<int>(p.format)));
  }
  for (const KvSide* side : {&p.k, &p.v}) {
    switch (side->mode) {
      case KvScaleMode::kPerTensor:
      case KvScaleMode::kPerChannel:
      case KvScaleMode::kPerToken:
        break;
      default:
        return Fail(error, "scale mode " + std::to_string(static_cast<int>(side->mode)));
    }
  }
  if (p.head_size <= 0 || p.head_size > kMaxHeadSize || p.head_size % 8 != 0) {
    return Fail(error, "head size " + std::to_string(p.head_size));
  }
  if (p.group_size < 1 || p.group_size > kMaxGroupSize) {
    return Fail(error, std::to_string(p.group_size) + " query heads per KV head");
  }
  if (device.compute_capability < 75) {
    return Fail(error, "compute capability " + std::to_string(device.compute_capability) + " (7.5 is the least)");
  }
  if (p.activation == ActivationType::kBFloat16 && device.compute_capability < 80) {
    return Fail(error, "bfloat16 activations on compute capability " + std::to_string(device.compute_capability));
  }
  return true;
}

// Largest of 16, 8, 4, ... that every row of the cache is aligned to.
bool RowsAlignedTo(const GqaParams& p, uintptr_t bytes) {
  return p.row_bytes % bytes == 0 && IsAligned(p.k.codes, bytes) && IsAligned(p.v.codes, bytes);
}

// Whether rows of Q, K, V and the output and rotary tables are 16-byte aligned, and eight elements at a multiple of 8
// rotate alike.
bool ActivationsInVectors(const GqaParams& p) {
  constexpr int kElements = 8;
  if (!IsAligned(p.query, 16) || !IsAligned(p.key, 16) || !IsAligned(p.value, 16)) return false;
  if (!IsAligned(p.output, 16)) return false;
  if (p.query_stride % kElements != 0 || p.kv_stride % kElements != 0) return false;
  if (p.cos_cache == nullptr) return true;
  const int32_t alike = p.rotary_interleaved ? p.rotary_dim : p.rotary_dim / 2;
  return alike % kElements == 0 && IsAligned(p.cos_cache, 16) && IsAligned(p.sin_cache, 16);
}

// Blocks of the attention kernel that fit on a multiprocessor: its __launch_bounds__ sees to registers. Two blocks of
// the prefill kernel take 140 KB of shared memory where a head has more than 64 elements.
int BlocksPerMultiprocessor(KvFormat format, const GqaPlan& plan, const DeviceLimits& device) {
  if (plan.path != GqaPath::kDecode) {
    const int generation = device.compute_capability / 10;
    const bool large_shared = device.compute_capability == 80 || device.compute_capability == 87 || generation == 9 ||
                              generation == 10 || generation == 11;
    return plan.padded_head_size == 64 || large_shared ? 2 : 1;
  }
  return DecodeBlocks(format, plan.padded_head_size, plan.whole_rows, plan.unit_rows, plan.warps);
}

// Whether all clusters of `splits` blocks, one a unit, run at once: to wait for others would cost more than they save.
bool ClustersFit(int64_t units, int64_t splits, int64_t resident, const DeviceLimits& device) {
  return splits > 1 && splits <= kMaxCluster && units <= device.clusters[splits] * resident;
}

// Whether the device has the shared memory that a decode block of so many warps takes.
bool HasShared(const GqaPlan& plan, int32_t warps, const DeviceLimits& device) {
  return device.compute_capability >= 80 ||
         FitsBeforeSm80(plan.padded_head_size, plan.whole_rows, plan.unit_rows, warps);
}

// Warps of a decode block: many where as many multiprocessors get work so, but for what few fit into a cluster each.
int32_t ChooseWarps(const GqaParams& p, const GqaPlan& plan, int64_t units, const DeviceLimits& device) {
  const int32_t few = DecodeWarps(plan.padded_head_size);
  if (!HasWideDecode(plan.whole_rows, plan.unit_rows) || units <= 0) return few;
  if (!HasShared(plan, 2 * few, device)) return few;
  const int64_t resident = DecodeBlocks(p.format, plan.padded_head_size, plan.whole_rows, plan.unit_rows, few);
  if (ClustersFit(units, DivUp(p.capacity, MinSplitTokens(few)), resident, device)) return few;
  const int64_t wide = device.multiprocessors / units * units * resident;
  const int64_t narrow = device.multiprocessors * resident / units * units;
  return wide > 0 && 10 * wide >= 9 * narrow ? 2 * few : few;
}

// Fewest splits that keep the multiprocessors within a tenth of the best balance that any number of splits gives.
int32_t ChooseSplits(int64_t units, int64_t slots, int64_t max_splits) {
  if (units * max_splits <= slots) return static_cast<int32_t>(max_splits);
  const int64_t limit = std::min(max_splits, std::max<int64_t>(1, DivUp(4 * slots, units)));
  const auto balance = [&](int64_t splits) {
    const int64_t blocks = units * splits;
    return static_cast<double>(blocks) / static_cast<double>(DivUp(blocks, slots) * slots);
  };
  // One wave, as full as it gets, has the least to merge. A few parts more than a multiple of what is read together
  // cost more than they bring.
  int64_t one_wave = std::max<int64_t>(1, slots / units);
  const int64_t rest = one_wave % kMergeReads;
  if (rest < one_wave / kMergeReads && one_wave - rest <= kMaxMergeSplits) one_wave -= rest;
  double best = 0.0;
  for (int64_t splits = one_wave; splits <= limit; ++splits) best = std::max(best, balance(splits));
  for (int64_t splits = one_wave; splits <= limit; ++splits) {
    if (balance(splits) >= 0.9 * best) return static_cast<int32_t>(splits);
  }
  return static_cast<int32_t>(one_wave);
}

}  // namespace

const char* GqaPlan::PathName() const {
  switch (path) {
    case GqaPath::kDecode:
      return "KV_CACHE_QUANT_DECODE";
    case GqaPath::kPrefill:
      return "KV_CACHE_QUANT_PREFILL";
    default:
      return "KV_CACHE_QUANT_PROMPT";
  }
}

bool MakePlan(const GqaParams& p, const DeviceLimits& device, GqaPlan* plan, std::string* error) {
  if (!CheckValues(p, device, error)) return false;
  GqaPlan x;
  const int64_t rows = static_cast<int64_t>(p.sequence_length) * p.group_size;
  x.padded_head_size = p.head_size <= 64 ? 64 : p.head_size <= 128 ? 128
                                                                   : 256;
  const int64_t decode_rows = x.padded_head_size == 256 ? kDecodeRows / 2 : kDecodeRows;
  x.path = p.is_prompt ? GqaPath::kPrompt : rows <= decode_rows ? GqaPath::kDecode
                                                                : GqaPath::kPrefill;
  x.whole_rows = p.head_size == x.padded_head_size && RowsAlignedTo(p, 16);
  if (!x.whole_rows && !RowsAlignedTo(p, p.format == KvFormat::kInt4 ? 4 : 8)) {
    return Fail(error, "cache rows that are not aligned to " +
                           std::string(p.format == KvFormat::kInt4 ? "4" : "8") + " bytes");
  }
  if (x.path == GqaPath::kDecode) {
    x.unit_rows = rows <= 8 ? 8 : 16;
    x.whole_rows = x.whole_rows && HasShared(x, DecodeWarps(x.padded_head_size), device);
  } else {
    // A single unit of few rows has scratch for no more than those.
    x.unit_rows = static_cast<int32_t>(std::clamp<int64_t>(DivUp(rows, 16) * 16, 16, PrefillRows(x.padded_head_size)));
  }
  x.units_per_head = static_cast<int32_t>(DivUp(rows, x.unit_rows));
  const int64_t units = static_cast<int64_t>(p.batch_size) * p.kv_num_heads * x.units_per_head;
  if (units > INT32_MAX / kMaxSplits) return Fail(error, std::to_string(units) + " blocks of query rows");
  x.activation_vectors = ActivationsInVectors(p);
  if (x.path == GqaPath::kDecode) x.warps = ChooseWarps(p, x, units, device);
  const int64_t resident = BlocksPerMultiprocessor(p.format, x, device);
  const int64_t slots = device.multiprocessors * resident;
  const int64_t tokens = p.is_prompt ? p.sequence_length : p.capacity;
  const int64_t least = MinSplitTokens(x.warps);
  const int64_t max_splits = p.is_prompt ? 1 : std::clamp<int64_t>(DivUp(tokens, least), 1, kMaxSplits);
  x.splits = units == 0 ? 1 : ChooseSplits(units, slots, max_splits);
  if (x.path == GqaPath::kDecode && x.splits > 1) {
    // As many splits as a cluster has, where more would only leave warps without a tile.
    const int64_t tile = DecodeTileTokens(p.format, x.padded_head_size, x.whole_rows, x.unit_rows);
    if (x.splits > kMaxCluster && tokens <= kMaxCluster * x.warps * tile &&
        ClustersFit(units, kMaxCluster, resident, device)) {
      x.splits = kMaxCluster;
    }
    if (ClustersFit(units, x.splits, resident, device)) {
      x.cluster = x.splits;
    } else if (x.splits <= kMaxMergeSplits) {
      x.counters = static_cast<int32_t>(units);
    }
  }

  const auto place = [&x](size_t bytes) {
    const size_t offset = x.workspace_bytes;
    x.workspace_bytes += Align(bytes);
    return offset;
  };
  if (p.is_prompt && p.cos_cache != nullptr) {
    const size_t elements = static_cast<size_t>(p.batch_size) * p.kv_num_heads * p.sequence_length * p.head_size;
    x.prompt_key_offset = place(elements * 2);
  }
  if (x.splits > x.cluster) {
    const size_t partial_rows = static_cast<size_t>(units) * x.splits * x.unit_rows;
    x.partial_out_offset = place(partial_rows * x.padded_head_size * sizeof(float));
    x.partial_stats_offset = place(partial_rows * sizeof(float2));
  }
  *plan = x;
  return true;
}

void BindWorkspace(const GqaPlan& plan, void* workspace, GqaParams* p) {
  auto* base = static_cast<unsigned char*>(workspace);
  p->prompt_key = base + plan.prompt_key_offset;
  p->partial_out = reinterpret_cast<float*>(base + plan.partial_out_offset);
  p->partial_stats = reinterpret_cast<float2*>(base + plan.partial_stats_offset);
}

}  // namespace kv_cache_quant
}  // namespace contrib
}  // namespace onnxruntime
