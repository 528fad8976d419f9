// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.

#include "contrib_ops/cpu/bert/kv_cache_quant/attention.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <vector>

#include "contrib_ops/cpu/bert/kv_cache_quant/row_block.h"
#include "contrib_ops/cpu/bert/kv_cache_quant/rows.h"

namespace onnxruntime {
namespace contrib {
namespace kv_cache_quant {

namespace {

using concurrency::ThreadPool;

// Blocks per thread that even out unequal lengths, and the tokens below which a split costs more than it gives.
constexpr int64_t kBlocksPerThread = 2;
constexpr int64_t kMinSplitTokens = 4 * kTileTokens;

// Output rows that no block computes: NaN for an entry that does not fit, 0 for the padding of a prompt.
template <typename T>
void FillUncomputedRows(const GqaProblem<T>& p) {
  const int64_t width = p.num_heads * p.head_size;
  for (int64_t b = 0; b < p.batch_size; ++b) {
    const auto& sequence = p.sequences[static_cast<size_t>(b)];
    const int64_t first = sequence.valid ? sequence.rows : 0;
    const T value(sequence.valid ? 0.0f : std::numeric_limits<float>::quiet_NaN());
    T* rows = p.output + b * p.sequence_length * width;
    std::fill(rows + first * width, rows + p.sequence_length * width, value);
  }
}

// All blocks, those of one row range next to each other.
template <typename T>
std::vector<RowBlock> MakeRowBlocks(const GqaProblem<T>& p, int64_t threads, int64_t* splits) {
  const int64_t group = p.num_heads / p.kv_num_heads;
  std::vector<RowBlock> ranges;
  int64_t longest = 0;
  for (int64_t b = 0; b < p.batch_size; ++b) {
    const auto& sequence = p.sequences[static_cast<size_t>(b)];
    if (!sequence.valid) continue;
    const int64_t rows = sequence.rows * group;
    for (int64_t h = 0; h < p.kv_num_heads; ++h) {
      for (int64_t r = 0; r < rows; r += kBlockRows) {
        RowBlock block{b, h, r, std::min(kBlockRows, rows - r), 0, 0, nullptr};
        AttendedTokens(p, sequence, block.first_row, block.rows, &block.first_token, &block.end_token);
        longest = std::max(longest, block.end_token - block.first_token);
        ranges.push_back(block);
      }
    }
  }
  *splits = 1;
  const auto count = static_cast<int64_t>(ranges.size());
  if (count == 0 || threads == 1 || count >= kBlocksPerThread * threads) return ranges;

  *splits = std::min((kBlocksPerThread * threads + count - 1) / count,
                     std::max<int64_t>(1, longest / kMinSplitTokens));
  if (*splits == 1) return ranges;
  std::vector<RowBlock> blocks;
  for (const RowBlock& range : ranges) {
    const int64_t tokens = range.end_token - range.first_token;
    for (int64_t i = 0; i < *splits; ++i) {
      RowBlock block = range;
      block.first_token = range.first_token + tokens * i / *splits;
      block.end_token = range.first_token + tokens * (i + 1) / *splits;
      blocks.push_back(block);
    }
  }
  return blocks;
}

// Calls work(index, scratch) for every index, each worker taking the next one: blocks differ in length.
template <typename Work>
void ForEach(ThreadPool* thread_pool, int64_t count, int64_t workers, float* scratch, size_t scratch_size,
             const Work& work) {
  std::atomic<int64_t> next{0};
  ThreadPool::TrySimpleParallelFor(thread_pool, workers, [&](std::ptrdiff_t worker) {
    for (int64_t i = next++; i < count; i = next++) {
      work(i, scratch + static_cast<size_t>(worker) * scratch_size);
    }
  });
}

}  // namespace

template <typename T>
void Attend(const GqaProblem<T>& p, const AllocatorPtr& allocator, ThreadPool* thread_pool) {
  FillUncomputedRows(p);
  const int64_t threads = ThreadPool::DegreeOfParallelism(thread_pool);
  int64_t splits = 1;
  std::vector<RowBlock> blocks = MakeRowBlocks(p, threads, &splits);
  const auto count = static_cast<int64_t>(blocks.size());
  if (count == 0) return;

  const int64_t workers = std::min(threads, count);
  const size_t scratch_size = RowBlockScratchSize(p.head_size);
  const size_t partial_size = splits == 1 ? 0 : static_cast<size_t>(kBlockRows * (p.head_size + 2));
  const size_t floats = static_cast<size_t>(workers) * scratch_size + static_cast<size_t>(count) * partial_size;
  auto buffer = IAllocator::MakeUniquePtr<float>(allocator, floats);
  float* partials = buffer.get() + static_cast<size_t>(workers) * scratch_size;
  if (splits > 1) {
    for (RowBlock& block : blocks) {
      block.partial = partials;
      partials += partial_size;
    }
  }

  ForEach(thread_pool, count, workers, buffer.get(), scratch_size,
          [&](int64_t i, float* scratch) { AttendRowBlock(p, blocks[static_cast<size_t>(i)], scratch); });
  if (splits > 1) {
    ForEach(thread_pool, count / splits, workers, buffer.get(), scratch_size, [&](int64_t i, float* scratch) {
      MergeRowBlocks(p, blocks.data() + i * splits, splits, scratch);
    });
  }
}

template void Attend<float>(const GqaProblem<float>&, const AllocatorPtr&, ThreadPool*);
template void Attend<MLFloat16>(const GqaProblem<MLFloat16>&, const AllocatorPtr&, ThreadPool*);

}  // namespace kv_cache_quant
}  // namespace contrib
}  // namespace onnxruntime
