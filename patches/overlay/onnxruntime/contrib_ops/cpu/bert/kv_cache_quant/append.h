// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.

#pragma once

#include "core/platform/threadpool.h"
#include "contrib_ops/cpu/bert/kv_cache_quant/problem.h"

namespace onnxruntime {
namespace contrib {
namespace kv_cache_quant {

// Rotates, quantizes and writes the new rows of K and V and their scales at P_b .. T_b - 1 of each valid entry.
// In a prompt the exact rows also go to prompt_key and prompt_value.
template <typename T>
void AppendRows(const GqaProblem<T>& problem, concurrency::ThreadPool* thread_pool);

}  // namespace kv_cache_quant
}  // namespace contrib
}  // namespace onnxruntime
