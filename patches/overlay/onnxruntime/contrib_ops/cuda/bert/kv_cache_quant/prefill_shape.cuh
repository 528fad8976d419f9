// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
//
// How the prefill kernel cuts its work, and what it keeps in shared memory.

#pragma once

#include "contrib_ops/cuda/bert/kv_cache_quant/kv_tile.cuh"
#include "contrib_ops/cuda/bert/kv_cache_quant/plan.h"

namespace onnxruntime {
namespace contrib {
namespace kv_cache_quant {

constexpr int kPrefillWarps = 4;
constexpr int kPrefillThreads = 32 * kPrefillWarps;

// Stands for a maximum of no score: unlike -inf it can be subtracted from -inf.
constexpr float kNoMaximum = -3.402823466e38f;

// threadIdx.x, of which the compiler cannot know that it is the same as before: what is derived from it would else be
// kept in registers through the loop over tiles.
__device__ __forceinline__ int ReadThread() {
  int x;
  asm volatile("mov.u32 %0, %%tid.x;\n" : "=r"(x));
  return x;
}

// x, of which the compiler cannot know that it is the same as before.
template <typename T>
__device__ __forceinline__ T Hide(T x) {
  static_assert(sizeof(T) == 4, "a register");
  asm volatile("" : "+r"(x));
  return x;
}

// A lane's place in the fragments of a matrix product.
struct LanePlace {
  int lane;
  int r;
  int c;
  __device__ __forceinline__ LanePlace() : lane(ReadThread() % 32), r(lane / 4), c(lane % 4) {}
};

// Tokens [first, first + count) of a tile.
struct TileSpan {
  int first;
  uint32_t count;
  __device__ __forceinline__ bool Has(int token) const { return static_cast<uint32_t>(token - first) < count; }
};

// The tokens [Low, End) that a row attends, counted from the first token of the split, of which they may lie outside.
// window: tokens before the row's own, INT32_MAX for all.
struct AttendedTokens {
  int position;  // of the row, counted likewise

  __device__ __forceinline__ int Low(int32_t window) const {
    return static_cast<int>(max(static_cast<int64_t>(position) - window, int64_t{0}));
  }
  __device__ __forceinline__ int End() const { return position + 1; }

  // Whether the row attends all, or any, of the tokens [tile, tile + tokens).
  __device__ __forceinline__ bool All(int32_t window, int tile, int tokens) const {
    return tile >= Low(window) && tile + tokens <= End();
  }
  __device__ __forceinline__ bool Any(int32_t window, int tile, int tokens) const {
    return tile < End() && tile + tokens > Low(window);
  }

  // In the tile that begins at token `tile`.
  __device__ __forceinline__ TileSpan Span(int32_t window, int tile) const {
    const int low = Low(window);
    return {low - tile, static_cast<uint32_t>(max(End() - low, 0))};
  }
};

// Rows of K or V.
struct RowSource {
  const uint8_t* at;  // the first token's of the split
  int stride;         // bytes; those of a whole tile fit 32 bits
  bool aligned;       // every row is, to 16 bytes
};

// What a block keeps of its split.
struct SplitState {
  RowSource k;
  RowSource v;
  int64_t first_row;  // of the scale cache
  int tokens;
  int window;     // as AttendedTokens has it
  int first_low;  // the first token that a row attends
  int last_low;   // all rows attend the tokens [last_low, first_end)
  int first_end;
};

// PER_TOKEN scales of a tile; 1 on a side without them.
template <int kTokens>
struct TileScales {
  float k[kTokens];
  float v[kTokens];   // over 2^v_exponent; 0 where not finite
  uint32_t v_bad[2];  // bit i: the scale of token i, or 32 + i, is not finite
  int v_exponent;
  float shrink;  // 2^(the exponent before - v_exponent)
};

// What a warp keeps of its rows from tile to tile, but for the sums.
template <int kRowTiles>
struct RowState {
  float denominator[32][2 * kRowTiles];  // of each lane: of its tokens, and its rows r, r + 8, ...
  float factor[16 * kRowTiles];          // from scaled products to log2 units; not negative
  float bias[16 * kRowTiles];            // what products begin with: makes up for the offset in K's codes
  float maximum[16 * kRowTiles];         // that the weights refer to; kNoMaximum before the first attended token
  int position[16 * kRowTiles];          // as AttendedTokens has it; -1 where the warp has no rows and nothing to do
};

// kRowTilesOfWarp: of 16 rows, whose sums are registers.
template <typename RowsOfTiles, int kPaddedHeadSize, int kRowTilesOfWarp>
struct PrefillShape {
  using Rows = RowsOfTiles;
  static constexpr int kHeadSize = kPaddedHeadSize;
  static constexpr int kRowTiles = kRowTilesOfWarp;
  static constexpr int kWarpRows = 16 * kRowTiles;
  static constexpr int kRows = kPrefillWarps * kWarpRows;
  static_assert(kRows <= PrefillRows(kHeadSize), "the plan's rows of a unit");
  static constexpr int kRowChunks = kHeadSize / Rows::kChunk;

  // Tiles of codes are copied one tile ahead. Those of exact rows would take a second block's shared memory: K is
  // copied during the second product, V during the first. Before sm_80 there are no copies that one does not wait for,
  // and 64 KB for all.
  static constexpr int Stages(bool asynchronous) { return asynchronous && !Rows::kExact ? 2 : 1; }
  static constexpr int kMostTokens = kHeadSize == 256 ? 32 : 64;
  static constexpr int Tokens(bool asynchronous) {
    return asynchronous || !Rows::kExact ? kMostTokens : kMostTokens / 2;
  }
#if __CUDA_ARCH__ >= 800
  static constexpr bool kAsynchronous = true;
#else
  static constexpr bool kAsynchronous = false;
#endif
  static constexpr int kStages = Stages(kAsynchronous);
  static constexpr int kTokens = Tokens(kAsynchronous);  // of a tile
  static constexpr int kTileBytes = kTokens * kRowChunks * 16;

  // In shared memory: query rows as operands, by warp; K and V of each stage; and
  static constexpr int kWarpQueryBytes = kWarpRows * kHeadSize * 2;
  static constexpr int kQueryBytes = kPrefillWarps * kWarpQueryBytes;
  struct Rest {
    SplitState split;
    RowState<kRowTiles> rows[kPrefillWarps];
    TileScales<kMostTokens> scales[2];  // of even and odd tiles
  };

  // Of a block; ptx_version: of its code, 10 * major + minor.
  static int SharedBytes(int ptx_version) {
    const bool asynchronous = ptx_version >= 80;
    const int tiles = Stages(asynchronous) * 2 * Tokens(asynchronous) * kRowChunks * 16;
    return kQueryBytes + tiles + static_cast<int>(sizeof(Rest));
  }
};

}  // namespace kv_cache_quant
}  // namespace contrib
}  // namespace onnxruntime
