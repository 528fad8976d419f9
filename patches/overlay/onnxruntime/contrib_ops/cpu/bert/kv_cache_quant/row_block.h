// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
//
// Attention of one block of query rows over one run of tokens: what one thread does at a time.

#pragma once

#include <cstddef>
#include <cstdint>

#include "contrib_ops/cpu/bert/kv_cache_quant/problem.h"

namespace onnxruntime {
namespace contrib {
namespace kv_cache_quant {

constexpr int64_t kTileTokens = 128;  // cache rows converted or scored together
constexpr int64_t kBlockRows = 64;    // query rows of one block
// Up to this many rows the codes are multiplied as they are converted, in registers. With more, one fp32 copy of
// the tile serves all rows and SGEMM is quicker.
constexpr int64_t kDirectRows = 16;

struct RowBlock {
  int64_t batch;
  int64_t kv_head;
  int64_t first_row;    // of the S * G rows of this KV head; row = s * G + g
  int64_t rows;         // at most kBlockRows
  int64_t first_token;  // this split's tokens
  int64_t end_token;
  float* partial;  // rows x (D + 2): unnormalized output, maximum, sum; nullptr: normalize and write the output
};

// Floats of scratch that AttendRowBlock needs.
size_t RowBlockScratchSize(int64_t head_size);

template <typename T>
void AttendRowBlock(const GqaProblem<T>& problem, const RowBlock& block, float* scratch);

// Merges the partial results of `splits` consecutive blocks that differ in their tokens, and writes the output.
template <typename T>
void MergeRowBlocks(const GqaProblem<T>& problem, const RowBlock* blocks, int64_t splits, float* scratch);

// Tokens that the rows [first_row, first_row + rows) of a sequence attend between them: [first, end).
template <typename T>
void AttendedTokens(const GqaProblem<T>& problem, const SequenceState& sequence, int64_t first_row, int64_t rows,
                    int64_t* first, int64_t* end) {
  const int64_t group = problem.num_heads / problem.kv_num_heads;
  const int64_t first_position = sequence.past + first_row / group;
  const int64_t last_position = sequence.past + (first_row + rows - 1) / group;
  *first = problem.local_window_size >= 0 && first_position > problem.local_window_size
               ? first_position - problem.local_window_size
               : 0;
  *end = last_position + 1;
}

}  // namespace kv_cache_quant
}  // namespace contrib
}  // namespace onnxruntime
