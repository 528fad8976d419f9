// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
//
// Token scales of V in the decode kernel: divided by a running norm, so that weights in half keep their precision.

#pragma once

#include <cmath>

#include "contrib_ops/cuda/bert/kv_cache_quant/decode_shape.cuh"

namespace onnxruntime {
namespace contrib {
namespace kv_cache_quant {

// Raises v_norm where a V scale exceeds it by more than the slack, and divides the tile's scales by it. Scales that
// are not finite neither count nor change.
template <typename Warp>
__device__ __forceinline__ void NormalizeValueScales(Warp& warp, float (&scale)[Warp::kTokenTiles][2]) {
  float top = 0.0f;
#pragma unroll
  for (int m = 0; m < Warp::kTokenTiles; ++m) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float size = fabsf(scale[m][i]);
      if (size < INFINITY) top = fmaxf(top, size);
    }
  }
  if (__any_sync(Warp::kAllLanes, top > warp.v_norm * kScaleSlack)) {
#pragma unroll
    for (int mask = 4; mask < 32; mask *= 2) top = fmaxf(top, __shfl_xor_sync(Warp::kAllLanes, top, mask));
    const float raised = fmaxf(fmaxf(warp.v_norm, top), kSmallestNorm);
    const float shrink = warp.v_norm * __fdividef(1.0f, raised);
    warp.v_norm = raised;
    if (warp.started) {
#pragma unroll
      for (int n = 0; n < Warp::kRowTiles; ++n) {
#pragma unroll
        for (int i = 0; i < Warp::Shape::kElementTiles; ++i) {
#pragma unroll
          for (int j = 0; j < 4; ++j) warp.out[n][i][j] *= shrink;
        }
      }
    }
  }
  // Again each time: a register less through the loop. Without a scale above 0 so far there is nothing to divide.
  const float inverse = warp.v_norm == 0.0f ? 1.0f : __fdividef(1.0f, warp.v_norm);
#pragma unroll
  for (int m = 0; m < Warp::kTokenTiles; ++m) {
#pragma unroll
    for (int i = 0; i < 2; ++i) scale[m][i] *= inverse;
  }
}

}  // namespace kv_cache_quant
}  // namespace contrib
}  // namespace onnxruntime
