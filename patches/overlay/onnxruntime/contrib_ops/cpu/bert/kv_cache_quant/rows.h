// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
//
// Rows of activations in fp32: reading, writing and rotary embedding.

#pragma once

#include <cstring>

#include "core/framework/float16.h"
#include "core/mlas/inc/mlas.h"
#include "contrib_ops/cpu/bert/kv_cache_quant/problem.h"

namespace onnxruntime {
namespace contrib {
namespace kv_cache_quant {

inline void ReadRow(const float* row, int64_t count, float* out) {
  std::memcpy(out, row, static_cast<size_t>(count) * sizeof(float));
}

inline void ReadRow(const MLFloat16* row, int64_t count, float* out) {
  MlasConvertHalfToFloatBuffer(row, out, static_cast<size_t>(count));
}

inline void WriteRow(const float* row, int64_t count, float* out) { ReadRow(row, count, out); }

inline void WriteRow(const float* row, int64_t count, MLFloat16* out) {
  MlasConvertFloatToHalfBuffer(row, out, static_cast<size_t>(count));
}

// Rotates the first rotary_dim elements of a row for one position, in fp32. cos and sin hold rotary_dim / 2 values.
// A fused multiply-add would make the scale of a token depend on the compiler: rows.cc is built without contraction.
void RotateRow(const float* cos, const float* sin, int64_t rotary_dim, bool interleaved, float* row);

// Reads a row of Q or K and rotates it for a position. scratch: rotary_dim floats.
template <typename T>
void ReadRotatedRow(const GqaProblem<T>& p, const T* row, int64_t position, float* scratch, float* out) {
  ReadRow(row, p.head_size, out);
  if (p.rotary_dim == 0) return;
  const int64_t half = p.rotary_dim / 2;
  ReadRow(p.cos_cache + position * half, half, scratch);
  ReadRow(p.sin_cache + position * half, half, scratch + half);
  RotateRow(scratch, scratch + half, p.rotary_dim, p.rotary_interleaved, out);
}

}  // namespace kv_cache_quant
}  // namespace contrib
}  // namespace onnxruntime
