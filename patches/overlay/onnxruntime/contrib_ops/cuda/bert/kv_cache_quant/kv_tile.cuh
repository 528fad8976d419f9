// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
//
// Tiles of K and V rows, from global memory through registers to 16-bit elements in shared memory.
//
// A tile row is kHeadSize elements in chunks of 8 (16 bytes). Chunk i of row r lies at chunk i ^ (r % 8), so that the 8
// rows that a matrix load reads, and the 8 threads that store together, touch all banks once, without padding.

#pragma once

#include "contrib_ops/cuda/bert/kv_cache_quant/activation.cuh"
#include "contrib_ops/cuda/bert/kv_cache_quant/codec.cuh"

namespace onnxruntime {
namespace contrib {
namespace kv_cache_quant {

// Index of the first element of a chunk in a tile.
template <int kHeadSize>
__device__ __forceinline__ int ChunkIndex(int row, int chunk) {
  return row * kHeadSize + ((chunk ^ (row & 7)) << 3);
}

// Rows of codes. kInterleaved: a chunk holds elements 0, 4, 1, 5, 2, 6, 3, 7, as int4 words expand.
template <KvFormat kFormat>
struct CacheRows {
  static constexpr bool kExact = false;
  static constexpr bool kBFloat16 = false;
  static constexpr bool kInterleaved = kFormat == KvFormat::kInt4;
  static constexpr bool kMayBeNonFinite = kFormat == KvFormat::kFloat8E4M3FN;
  static constexpr int kChunks = 16 / Codec<kFormat>::kBits;  // of 16 bytes of memory
  static constexpr int kPieceWords = kInterleaved ? 1 : 2;    // a chunk's words; every row is aligned to them
  static constexpr uint32_t kZero = kInterleaved ? 0x88888888u : 0u;

  static __device__ __forceinline__ uint4 LoadAligned(const uint8_t* at) {
    return __ldg(reinterpret_cast<const uint4*>(at));
  }

  // Of 16 bytes those of the first `chunks` chunks, zeros for the rest.
  static __device__ __forceinline__ uint4 LoadPieces(const uint8_t* at, int chunks) {
    uint32_t w[4] = {kZero, kZero, kZero, kZero};
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      if (i >= chunks) continue;
      if constexpr (kPieceWords == 2) {
        const uint2 piece = __ldg(reinterpret_cast<const uint2*>(at) + i);
        w[2 * i] = piece.x;
        w[2 * i + 1] = piece.y;
      } else {
        w[i] = __ldg(reinterpret_cast<const uint32_t*>(at) + i);
      }
    }
    return make_uint4(w[0], w[1], w[2], w[3]);
  }

  // Bits 7 of the bytes that are NaN.
  static __device__ __forceinline__ uint32_t NonFinite(uint32_t w) { return (w & 0x7F7F7F7Fu) + 0x01010101u; }
  static constexpr uint32_t kNonFiniteMask = 0x80808080u;

  static __device__ __forceinline__ void Expand(const uint4& x, uint4 (&chunks)[kChunks]) {
    const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      uint32_t out[4];
      if constexpr (kPieceWords == 1) {
        Codec<kFormat>::ExpandWord(words[i], out);
      } else {
        uint32_t pair[2];
        Codec<kFormat>::ExpandWord(words[2 * i], pair);
        out[0] = pair[0];
        out[1] = pair[1];
        Codec<kFormat>::ExpandWord(words[2 * i + 1], pair);
        out[2] = pair[0];
        out[3] = pair[1];
      }
      chunks[i] = make_uint4(out[0], out[1], out[2], out[3]);
    }
  }
};

// Rows of activations.
template <ActivationType kType>
struct ExactRows {
  static constexpr bool kExact = true;
  static constexpr bool kBFloat16 = kType == ActivationType::kBFloat16;
  static constexpr bool kInterleaved = false;
  static constexpr bool kMayBeNonFinite = true;
  static constexpr int kChunks = 1;
  static constexpr uint32_t kZero = 0;

  static __device__ __forceinline__ uint4 LoadAligned(const uint8_t* at) {
    return __ldg(reinterpret_cast<const uint4*>(at));
  }

  // For buffers that are aligned to their elements only.
  static __device__ __forceinline__ uint4 LoadPieces(const uint8_t* at, int chunks) {
    uint32_t w[4] = {0, 0, 0, 0};
    if (chunks > 0) {
      const auto* elements = reinterpret_cast<const uint16_t*>(at);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        w[i] = __ldg(elements + 2 * i) | static_cast<uint32_t>(__ldg(elements + 2 * i + 1)) << 16;
      }
    }
    return make_uint4(w[0], w[1], w[2], w[3]);
  }

  static constexpr uint32_t kExponent = kBFloat16 ? 0x7F807F80u : 0x7C007C00u;
  static constexpr uint32_t kExponentOne = kBFloat16 ? 0x00800080u : 0x04000400u;
  static constexpr uint32_t kNonFiniteMask = 0x80008000u;
  static __device__ __forceinline__ uint32_t NonFinite(uint32_t w) { return (w & kExponent) + kExponentOne; }

  static __device__ __forceinline__ void Expand(const uint4& x, uint4 (&chunks)[1]) { chunks[0] = x; }
};

// The part of one thread in copying tiles of kTokens rows: 16-byte vectors of the rows
// row, row + kRowStep, ... at one place in the row. Threads that store together (8 neighbours) are spread over as many
// rows as a vector has chunks, so that their chunks differ modulo 8 after the swizzle.
// kOneByOne: convert vector by vector, where converting them together would take more registers than there are.
template <typename Rows, int kHeadSize, int kTokens, int kThreads, bool kOneByOne>
struct TileCopy {
  static constexpr int kNeighbourVectors = 8 / Rows::kChunks;
  static constexpr int kNeighbourRows = Rows::kChunks;
  static constexpr int kVectorGroups = kHeadSize / 64;  // of kNeighbourVectors, in a row
  static constexpr int kRowStep = kThreads / 8 / kVectorGroups * kNeighbourRows;
  static constexpr int kVectors = kTokens / kRowStep;
  static_assert(kThreads / 8 % kVectorGroups == 0 && kTokens % kRowStep == 0, "whole vectors for every thread");
  static_assert((kRowStep & (kRowStep - 1)) == 0, "rows below kRowStep add to its multiples without carry");

  int row;
  int chunk;         // first one of the vector
  int valid_chunks;  // from there to the end of the row
  bool aligned;      // vectors are aligned to 16 bytes

  // aligned: base and stride of the rows are. Then only whole vectors are beyond the row.
  __device__ __forceinline__ TileCopy(int thread, int head_size, bool rows_aligned) : aligned(rows_aligned) {
    const int group = thread / 8;
    row = group / kVectorGroups * kNeighbourRows + thread / kNeighbourVectors % kNeighbourRows;
    chunk = (group % kVectorGroups * kNeighbourVectors + thread % kNeighbourVectors) * Rows::kChunks;
    valid_chunks = head_size / 8 - chunk;
  }

  // tile: the first of `count` rows, stride bytes apart. Rows from count on and elements from D on are not read.
  __device__ __forceinline__ void Load(const uint8_t* tile, int stride, int count, uint4 (&staged)[kVectors]) const {
    const uint8_t* at = tile + (row * stride + chunk / Rows::kChunks * 16);
    const int rows = valid_chunks > 0 ? count - row : 0;
    if (aligned) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        staged[i] = make_uint4(Rows::kZero, Rows::kZero, Rows::kZero, Rows::kZero);
        if (i * kRowStep < rows) staged[i] = Rows::LoadAligned(at + i * kRowStep * stride);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        staged[i] = make_uint4(Rows::kZero, Rows::kZero, Rows::kZero, Rows::kZero);
        if (i * kRowStep < rows) staged[i] = Rows::LoadPieces(at + i * kRowStep * stride, valid_chunks);
      }
    }
  }

  __device__ __forceinline__ void Store(const uint4 (&staged)[kVectors], uint16_t* tile) const {
    if constexpr (kOneByOne) {
      uint4 rest[kVectors];
#pragma unroll
      for (int i = 0; i < kVectors; ++i) rest[i] = staged[i];
#pragma unroll 1
      for (int i = 0; i < kVectors; ++i) {
        StoreVector(rest[0], i, tile);
#pragma unroll
        for (int j = 1; j < kVectors; ++j) rest[j - 1] = rest[j];
      }
    } else {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) StoreVector(staged[i], i, tile);
    }
  }

  __device__ __forceinline__ void StoreVector(const uint4& vector, int i, uint16_t* tile) const {
    uint4 chunks[Rows::kChunks];
    Rows::Expand(vector, chunks);
#pragma unroll
    for (int j = 0; j < Rows::kChunks; ++j) {
      // ChunkIndex(row + i * kRowStep, chunk + j), whose sums carry nothing: few offsets serve all i and j.
      const int swizzled = chunk ^ (row & 7) ^ (i * kRowStep & 7) ^ j;
      *reinterpret_cast<uint4*>(tile + row * kHeadSize + swizzled * 8 + i * kRowStep * kHeadSize) = chunks[j];
    }
  }

  // Whether this thread's part has an Inf or NaN.
  static __device__ __forceinline__ bool HasNonFinite(const uint4 (&staged)[kVectors]) {
    uint32_t found = 0;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      found |= Rows::NonFinite(staged[i].x) | Rows::NonFinite(staged[i].y) | Rows::NonFinite(staged[i].z) |
               Rows::NonFinite(staged[i].w);
    }
    return (found & Rows::kNonFiniteMask) != 0;
  }
};

}  // namespace kv_cache_quant
}  // namespace contrib
}  // namespace onnxruntime
