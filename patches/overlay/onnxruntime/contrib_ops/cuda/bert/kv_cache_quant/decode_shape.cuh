// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
//
// How the decode kernel cuts its work: decode.cuh.

#pragma once

#include "contrib_ops/cuda/bert/kv_cache_quant/codec.cuh"
#include "contrib_ops/cuda/bert/kv_cache_quant/plan.h"

namespace onnxruntime {
namespace contrib {
namespace kv_cache_quant {

// Scores may exceed the running maximum by this (log2 units) before it is raised, and a V scale the running
// normalizer by this factor: fewer rescalings, and weights stay below 2^12 in half.
constexpr float kMaximumSlack = 8.0f;
constexpr float kScaleSlack = 16.0f;
constexpr float kSmallestNorm = 1e-37f;  // its inverse is finite

template <KvFormat kCacheFormat, int kPaddedHeadSize, bool kRowsAreWhole, int kTilesOfRows, int kBlockWarps>
struct DecodeShape {
  static constexpr KvFormat kFormat = kCacheFormat;
  static constexpr int kHeadSize = kPaddedHeadSize;
  static constexpr bool kWholeRows = kRowsAreWhole;
  static constexpr int kRowTiles = kTilesOfRows;
  static constexpr int kRows = 8 * kRowTiles;
  static constexpr int kWarps = kBlockWarps;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr bool kBeforeSm80 = FitsBeforeSm80(kHeadSize, kWholeRows, kRows, kWarps);
  static constexpr int kMinSplitTokens = MinSplitTokens(kWarps);
  static constexpr int kTileTokens = DecodeTileTokens(kFormat, kHeadSize, kWholeRows, kRows);
  static constexpr int kTokenTiles = kTileTokens / 16;
  static constexpr int kElements = Codec<kFormat>::kElements;
  static constexpr int kRowBytes = static_cast<int>(RowBytes(kFormat, kHeadSize));
  static constexpr int kKeyWords = kHeadSize / kElements / 4;    // of one row, per lane
  static constexpr int kValueWords = kHeadSize / kElements / 8;  // of one row, per lane
  static constexpr int kKeyVector = kKeyWords < 4 ? kKeyWords : 4;
  static constexpr int kValueVector = kValueWords < 4 ? kValueWords : 4;
  static constexpr int kPieceWords = kFormat == KvFormat::kInt4 ? 1 : 2;
  static constexpr int kElementTiles = kHeadSize / 16;
  static constexpr int kMergeBlocks = kRowTiles;  // of a unit; one would read 16 rows of 128 elements in two rounds
  // Where a warp's tiles of V lie. In shared memory V is under way while the warp waits for K, which it cannot do in
  // registers: one wait is for all of a warp's loads. But an asynchronous copy asks L2 for each 32 bytes by themselves,
  // and 8-bit codes of 128 elements, which the memory alone limits, are slower for that many requests. Code for other
  // architectures than sm_90 and sm_100 needs more registers and would spill them; so for kLaneReads, the
  // parts that a lane of the merge reads together.
  static constexpr bool kValueIsBetterShared = kFormat == KvFormat::kInt4 || kRowTiles > 1 || kHeadSize != 128;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
  static constexpr bool kValueInShared = true;
  static constexpr int kMinBlocks =
      kFormat == KvFormat::kFloat8E4M3FN ? 1 : DecodeBlocks(kFormat, kHeadSize, kWholeRows, kRows, kWarps);
  static constexpr int kLaneReads = kThreads * kMinBlocks <= 256 ? 16 : 8;
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  static constexpr bool kValueInShared = kValueIsBetterShared || kFormat == KvFormat::kFloat8E4M3FN;
  static constexpr int kMinBlocks = DecodeBlocks(kFormat, kHeadSize, kWholeRows, kRows, kWarps);
  static constexpr int kLaneReads = kThreads * kMinBlocks <= 256 ? 16 : 4;
#else
  static constexpr bool kValueInShared = kValueIsBetterShared;
  static constexpr int kMinBlocks = DecodeBlocks(kFormat, kHeadSize, kWholeRows, kRows, kWarps);
  static constexpr int kLaneReads = kThreads * kMinBlocks <= 256 ? 16 : 8;
#endif

  // Byte offset in a row of word w of a lane's part: of quarter c for K, of eighth r for V.
  static __host__ __device__ constexpr int KeyOffset(int w, int c) {
    return (w / kKeyVector * 4 + c) * kKeyVector * 4 + w % kKeyVector * 4;
  }
  static __host__ __device__ constexpr int ValueOffset(int w, int r) {
    return (w / kValueVector * 8 + r) * kValueVector * 4 + w % kValueVector * 4;
  }
  // First head element in the word at a byte offset.
  static __host__ __device__ constexpr int Element(int offset) { return offset / 4 * kElements; }
};

}  // namespace kv_cache_quant
}  // namespace contrib
}  // namespace onnxruntime
