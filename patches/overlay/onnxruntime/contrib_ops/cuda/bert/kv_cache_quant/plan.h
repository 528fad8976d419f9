// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
//
// Which kernels serve a call and how its work and scratch are laid out. Depends on shapes only, never on lengths, so
// that a captured launch stays right for every later length.
//
// The G x S query rows of one (batch entry, KV head) are row s * G + g. They are cut into units of unit_rows rows; a
// unit's tokens are cut into `splits` parts, one block each. With one split the attention kernel writes the output.
// Decode also merges few splits itself: as a cluster of blocks, or in the block that begins last. Else there are
// partial results, which the merge kernel combines.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "contrib_ops/cuda/bert/kv_cache_quant/params.h"

namespace onnxruntime {
namespace contrib {
namespace kv_cache_quant {

enum class GqaPath : int32_t { kDecode = 0,    // up to kDecodeRows rows per (batch entry, KV head), after the past
                               kPrefill = 1,   // more rows, after the past
                               kPrompt = 2 };  // no past: attention over the exact new K and V

constexpr int kDecodeRows = 16;  // half as many where heads are padded to 256 elements: accumulators are registers
// Query rows of a unit of the prefill kernel at most: its accumulators are registers.
constexpr int PrefillRows(int padded_head_size) { return padded_head_size == 256 ? 64 : 128; }
constexpr int kMaxSplits = 512;
constexpr int kMaxMergeSplits = 32;  // that decode merges in memory; more take the merge kernel
constexpr int kMergeReads = 16;      // parts of a row that a block reads together, of up to four rows
constexpr int kMaxCluster = 8;       // blocks: what every chip with clusters takes

// Warps of a decode block. Heads padded to 256 elements leave registers for half as many.
constexpr int DecodeWarps(int padded_head_size) { return padded_head_size == 256 ? 4 : 8; }

// Twice as many where two blocks would fit on a multiprocessor and one is enough: half as many splits to merge.
constexpr bool HasWideDecode(bool whole_rows, int unit_rows) { return whole_rows && unit_rows <= 8; }

// Whether blocks of such units, these warps, fit into the 64 KB of shared memory that there are before sm_80.
constexpr bool FitsBeforeSm80(int padded_head_size, bool whole_rows, int unit_rows, int warps) {
  return warps <= DecodeWarps(padded_head_size) && !(whole_rows && unit_rows > 8);
}

// Tokens that a warp takes at a time: as many as there are registers for. Where a multiprocessor has only eight warps,
// more are needed to keep it busy.
constexpr int DecodeTileTokens(KvFormat format, int padded_head_size, bool whole_rows, int unit_rows) {
  return whole_rows && padded_head_size <= 128 && (format == KvFormat::kInt4 || unit_rows > 8) ? 32 : 16;
}

// Tokens of a split at least: a tile for every warp.
constexpr int MinSplitTokens(int warps) { return warps > 8 ? 16 * warps : 128; }

// Decode blocks that fit on a multiprocessor: 16 warps of 128 registers a thread, or 8 of 255.
constexpr int DecodeBlocks(KvFormat format, int padded_head_size, bool whole_rows, int unit_rows, int warps) {
  return warps > DecodeWarps(padded_head_size) || unit_rows > 8 ||
                 (format == KvFormat::kFloat8E4M3FN && padded_head_size == 128 && !whole_rows)
             ? 1
             : 2;
}

struct DeviceLimits {
  int multiprocessors = 0;
  int compute_capability = 0;  // 10 * major + minor
  // [n]: clusters of n blocks that the device runs at once, at one block a multiprocessor; 0: no such clusters, by the
  // chip or by the code that runs.
  int32_t clusters[kMaxCluster + 1] = {};
};

struct GqaPlan {
  GqaPath path = GqaPath::kDecode;
  int32_t padded_head_size = 0;  // 64, 128 or 256
  bool whole_rows = false;       // D == padded_head_size and every cache row is 16-byte aligned
  int32_t warps = 0;             // of a decode block
  int32_t unit_rows = 0;         // prefill: PrefillRows, or fewer in the only unit of few rows
  int32_t units_per_head = 0;    // row blocks of one (batch entry, KV head)
  int32_t splits = 1;
  int32_t cluster = 1;              // blocks of a cluster, the splits of a unit; 1: no clusters
  int32_t counters = 0;             // one for every unit whose blocks merge its splits in memory, else 0
  bool activation_vectors = false;  // rows of Q, K, V and the output and rotary tables: 16 bytes at a time
  // Scratch, each part at a multiple of 256 bytes; 0 bytes where not needed.
  size_t prompt_key_offset = 0;
  size_t partial_out_offset = 0;
  size_t partial_stats_offset = 0;
  size_t workspace_bytes = 0;

  const char* PathName() const;
  // Whether the attention kernel writes the output, so that nothing is left to LaunchMerge.
  bool WritesOutput() const { return splits == 1 || cluster > 1 || counters != 0; }
};

// Fills *plan; false with *error naming the value where no kernel serves the call. Reads shapes, formats and
// addresses of p; its scratch pointers are not looked at.
bool MakePlan(const GqaParams& p, const DeviceLimits& device, GqaPlan* plan, std::string* error);

// Points p at its parts of the workspace.
void BindWorkspace(const GqaPlan& plan, void* workspace, GqaParams* p);

}  // namespace kv_cache_quant
}  // namespace contrib
}  // namespace onnxruntime
