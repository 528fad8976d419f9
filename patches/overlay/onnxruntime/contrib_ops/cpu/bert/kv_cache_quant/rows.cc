// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.

#include "contrib_ops/cpu/bert/kv_cache_quant/rows.h"

// Products are rounded before they are added (format.h). GCC contracts by default where the target has FMA.
#if defined(__clang__) || defined(_MSC_VER)
#pragma STDC FP_CONTRACT OFF
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#endif

namespace onnxruntime {
namespace contrib {
namespace kv_cache_quant {

void RotateRow(const float* cos, const float* sin, int64_t rotary_dim, bool interleaved, float* row) {
  const int64_t half = rotary_dim / 2;
  const int64_t step = interleaved ? 2 : 1;
  const int64_t partner = interleaved ? 1 : half;
  for (int64_t i = 0; i < half; ++i) {
    float* x = row + i * step;
    const float a = x[0];
    const float b = x[partner];
    x[0] = a * cos[i] - b * sin[i];
    x[partner] = b * cos[i] + a * sin[i];
  }
}

}  // namespace kv_cache_quant
}  // namespace contrib
}  // namespace onnxruntime
