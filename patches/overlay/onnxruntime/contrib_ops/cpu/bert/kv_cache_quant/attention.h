// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.

#pragma once

#include "core/common/status.h"
#include "core/framework/allocator.h"
#include "core/platform/threadpool.h"
#include "contrib_ops/cpu/bert/kv_cache_quant/problem.h"

namespace onnxruntime {
namespace contrib {
namespace kv_cache_quant {

// Attention of all query rows, into problem.output. In a step over the quantized cache, the new rows included
// (AppendRows ran before); in a prompt over prompt_key and prompt_value.
//
// The query rows of one KV head, S * G of them, are cut into blocks, and where there are fewer blocks than threads
// their tokens into splits that are merged at the end. A thread holds one tile of kTileTokens rows at a time, so
// scratch depends on threads, heads and D, never on the context.
template <typename T>
void Attend(const GqaProblem<T>& problem, const AllocatorPtr& allocator, concurrency::ThreadPool* thread_pool);

}  // namespace kv_cache_quant
}  // namespace contrib
}  // namespace onnxruntime
