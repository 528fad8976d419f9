// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
//
// Host entry points of the device code. None allocates, synchronizes or reads device memory.

#pragma once

#include <cuda_runtime_api.h>

#include "contrib_ops/cuda/bert/kv_cache_quant/plan.h"

namespace onnxruntime {
namespace contrib {
namespace kv_cache_quant {

// cudaSuccess where this build has code that the current device can run, machine code or PTX of an older chip.
cudaError_t FindDeviceCode();

// DeviceLimits::clusters of the current device and the code that it runs.
cudaError_t FindClusters(int32_t (&clusters)[kMaxCluster + 1]);

// The whole call: copies the past where present is a buffer of its own, appends the new rows, attends, merges.
// p has its scratch bound (BindWorkspace).
cudaError_t LaunchGqa(const GqaParams& p, const GqaPlan& plan, cudaStream_t stream);

// Its steps. Copies rows [0, P_b) of codes and scales from past to present, as bytes.
cudaError_t LaunchCopyPast(const GqaParams& p, cudaStream_t stream);

// Rotates, quantizes and writes the new rows of K and V and their scales; in a prompt with rotary also prompt_key.
cudaError_t LaunchAppend(const GqaParams& p, const GqaPlan& plan, cudaStream_t stream);

// GqaPath::kDecode: LaunchAppend's work and the attention, and LaunchMerge's where the plan has counters.
cudaError_t LaunchDecode(const GqaParams& p, const GqaPlan& plan, cudaStream_t stream);

// Attention of GqaPath::kPrefill and kPrompt, over what LaunchAppend has left.
cudaError_t LaunchPrefill(const GqaParams& p, const GqaPlan& plan, cudaStream_t stream);

// Combines the partial results of plan.splits > 1. Not after a LaunchDecode that has done it.
cudaError_t LaunchMerge(const GqaParams& p, const GqaPlan& plan, cudaStream_t stream);

}  // namespace kv_cache_quant
}  // namespace contrib
}  // namespace onnxruntime
