// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
//
// Tiles of K and V rows in shared memory, byte for byte what the rows are in global memory, and how words of them
// become operands.
//
// A tile row is cut into chunks of 16 bytes, which is what a matrix load (ldmatrix) takes of a row. Chunks change
// places so that those of 8 neighbouring rows lie in different banks. With r = lane / 4 and c = lane % 4, a load leaves
// in a lane of
//   K   (rows are tokens) word c of the chunk of token r
//   V   (transposed) the 16 bits number r of the chunk, of tokens 2c (low) and 2c + 1 (high)
// which conversion alone turns into operands: neither a dot product nor a set of columns cares about an order along D.

#pragma once

#include "contrib_ops/cuda/bert/kv_cache_quant/activation.cuh"
#include "contrib_ops/cuda/bert/kv_cache_quant/codec.cuh"
#include "contrib_ops/cuda/bert/kv_cache_quant/shared_copy.cuh"

namespace onnxruntime {
namespace contrib {
namespace kv_cache_quant {

// Where an element of a query row goes to meet its element of K: operand A of step `step`, columns
// 2 * column + second (+ 8 where upper).
struct QueryPlace {
  int step;
  int column;
  int upper;
  int second;
};

// Rows of codes.
template <KvFormat kFormat>
struct CacheRows {
  using FormatCodec = Codec<kFormat>;
  static constexpr bool kExact = false;
  static constexpr bool kBFloat16 = false;
  static constexpr bool kMayBeNonFinite = kFormat == KvFormat::kFloat8E4M3FN;
  static constexpr int kBits = FormatCodec::kBits;
  static constexpr int kChunk = 128 / kBits;              // elements
  static constexpr int kPieceBytes = kBits == 4 ? 4 : 8;  // every row is aligned to it
  static constexpr int kKeyChunks = 1;                    // of K that are converted together
  static constexpr int kKeySteps = kChunk / 16;           // steps of 16 elements that come of them
  static constexpr int kColumnTiles = kChunk / 8;         // tiles of 8 columns in a chunk of V
  static constexpr float kKeyBias = FormatCodec::kKeyBias;
  // Query rows are laid out times this over KeyUnit, which keeps the largest element, 1, below half's 65504 and small
  // ones above its subnormal numbers for every unit.
  static constexpr float kQueryUnit = kKeyBias == 0.0f ? 1.0f : 0x1p-10f;

  static __device__ __forceinline__ float KeyUnit(int d) { return FormatCodec::KeyUnit(d % FormatCodec::kElements); }
  static __device__ __forceinline__ QueryPlace PlaceOf(int d) {
    const int place = FormatCodec::KeyPlace(d % FormatCodec::kElements);  // in halves
    return {d / kChunk * kKeySteps + place / 4, d % kChunk / FormatCodec::kElements, place / 2 % 2, place % 2};
  }

  // b: operand B of each step.
  static __device__ __forceinline__ void ExpandKeys(const uint32_t (&words)[1], uint32_t (&b)[kKeySteps][2]) {
    uint32_t out[2 * kKeySteps];
    FormatCodec::ExpandKey(words[0], out);
#pragma unroll
    for (int i = 0; i < 2 * kKeySteps; ++i) b[i / 2][i % 2] = out[i];
  }

  // Two tokens' 16 bits each: their elements, the tokens side by side. b[i]: of column tile i.
  static __device__ __forceinline__ void ExpandValues(uint32_t word, uint32_t (&b)[kColumnTiles]) {
    if constexpr (kFormat == KvFormat::kInt8) {
      // As Codec::ExpandWord, without its byte permutation.
      b[0] = codec_internal::SubtractHalf2(MaskAndFlip(word), 0x64806480u);
      b[1] = codec_internal::SubtractHalf2(MaskAndFlip(word >> 8), 0x64806480u);
    } else if constexpr (kFormat == KvFormat::kFloat8E4M3FN) {
      FormatCodec::ExpandWord(__byte_perm(word, 0u, 0x3120), b);
    } else {
      FormatCodec::ExpandWord(word, b);
    }
  }

  // Behind the exponent of 1024 the offset code of the even bytes: (x & 0x00FF00FF) ^ 0x64806480 in one instruction.
  static __device__ __forceinline__ uint32_t MaskAndFlip(uint32_t x) {
    uint32_t y;
    asm("lop3.b32 %0, %1, %2, %3, 0x6A;\n" : "=r"(y) : "r"(x), "n"(0x00FF00FFu), "n"(0x64806480u));
    return y;
  }

  // The highest bit of each element that is NaN.
  static __device__ __forceinline__ uint32_t NonFinite(uint32_t word) {
    return ((word & 0x7F7F7F7Fu) + 0x01010101u) & 0x80808080u;
  }
  static __device__ __forceinline__ float NonFiniteValue(uint32_t, int) { return NAN; }
};

// Rows of activations.
template <ActivationType kType>
struct ExactRows {
  static constexpr bool kExact = true;
  static constexpr bool kBFloat16 = kType == ActivationType::kBFloat16;
  static constexpr bool kMayBeNonFinite = true;
  static constexpr int kBits = 16;
  static constexpr int kChunk = 8;
  static constexpr int kPieceBytes = 2;
  static constexpr int kKeyChunks = 2;
  static constexpr int kKeySteps = 1;
  static constexpr int kColumnTiles = 1;
  static constexpr float kKeyBias = 0.0f;
  static constexpr float kQueryUnit = 1.0f;

  static __device__ __forceinline__ float KeyUnit(int) { return 1.0f; }
  static __device__ __forceinline__ QueryPlace PlaceOf(int d) {
    return {d / 16, d % 8 / 2, d / 8 % 2, d % 2};
  }
  static __device__ __forceinline__ void ExpandKeys(const uint32_t (&words)[2], uint32_t (&b)[1][2]) {
    b[0][0] = words[0];
    b[0][1] = words[1];
  }
  static __device__ __forceinline__ void ExpandValues(uint32_t word, uint32_t (&b)[1]) { b[0] = word; }

  // The highest bit of each element that is Inf or NaN.
  static __device__ __forceinline__ uint32_t NonFinite(uint32_t word) {
    constexpr uint32_t kExponent = kBFloat16 ? 0x7F807F80u : 0x7C007C00u;
    constexpr uint32_t kOne = kBFloat16 ? 0x00800080u : 0x04000400u;
    return ((word & kExponent) + kOne) & 0x80008000u;
  }
  // Of element i.
  static __device__ __forceinline__ float NonFiniteValue(uint32_t word, int i) {
    return ActivationFromBits(static_cast<uint16_t>(word >> (16 * i)), kType);
  }
};

// Where chunks lie in a tile; offsets are bytes.
template <int kRowChunks>
struct TileLayout {
  static constexpr int kRowBytes = 16 * kRowChunks;
  static constexpr int kMask = kRowChunks < 8 ? kRowChunks - 1 : 7;
  static constexpr int kRowsPerChange = kRowChunks < 8 ? 8 / kRowChunks : 1;

  static __device__ __forceinline__ int Offset(int row, int chunk) {
    return row * kRowBytes + (chunk ^ (row / kRowsPerChange & kMask)) * 16;
  }
  // From the address of chunk 0 of a row, or of a chunk that shares no bit with `chunk`.
  static __device__ __forceinline__ uint32_t Chunk(uint32_t address, int chunk) {
    return (address ^ (chunk & kMask) * 16) + (chunk & ~kMask) * 16;
  }
};

// Four 8 x 8 matrices of 16-bit elements from shared memory; lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void LoadTileMatrices(uint32_t (&x)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address));
}

__device__ __forceinline__ void LoadTileMatricesTransposed(uint32_t (&x)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address));
}

// The part of one thread in tiles of kTokens rows: one chunk of the rows row, row + kRowStep, ...
template <typename Rows, int kHeadSize, int kTokens, int kThreads>
struct TileCopy {
  static constexpr int kRowChunks = kHeadSize / Rows::kChunk;
  using Layout = TileLayout<kRowChunks>;
  static constexpr int kRowStep = kThreads / kRowChunks;
  static constexpr int kChunks = kTokens / kRowStep;
  static_assert(kThreads % kRowChunks == 0 && kTokens % kRowStep == 0, "whole chunks for every thread");
  static_assert((kRowStep & (kRowStep - 1)) == 0, "rows below kRowStep add to its multiples without carry");

  int row;
  int chunk;

  __device__ __forceinline__ explicit TileCopy(int thread) : row(thread / kRowChunks), chunk(thread % kRowChunks) {}

  // Offset in a tile of chunk i: Layout::Offset(row + i * kRowStep, chunk), from few values for all i.
  __device__ __forceinline__ int OffsetOf(int i) const {
    constexpr int kStep = kRowStep;
    const int other = i * kStep / Layout::kRowsPerChange & Layout::kMask;
    return (Layout::Offset(row, chunk) ^ other * 16) + i * kStep * Layout::kRowBytes;
  }

  // tile: the first of `count` rows, stride bytes apart, of which `width` bytes count. What is beyond them is not read,
  // and 0 in shared memory. aligned: every row is, to 16 bytes.
  __device__ __forceinline__ void Start(const uint8_t* tile, int stride, int width, int count, bool aligned,
                                        uint32_t to) const {
    const uint8_t* at = tile + (row * stride + chunk * 16);
    const int left = width - chunk * 16;
    const int rows = left > 0 ? count - row : 0;
    if (aligned) {
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        StartCopy<16>(to + OffsetOf(i), at + i * kRowStep * stride, i * kRowStep < rows);
      }
      return;
    }
#pragma unroll 1
    for (int i = 0; i < kChunks; ++i) {
      CopyPieces(to + Layout::Offset(row + i * kRowStep, chunk), at + i * kRowStep * stride,
                 i * kRowStep < rows ? left : 0);
    }
  }

  // A chunk of which `left` bytes count.
  static __device__ __forceinline__ void CopyPieces(uint32_t to, const uint8_t* from, int left) {
    if constexpr (Rows::kExact) {
#pragma unroll 1
      for (int i = 0; i < 8; ++i) {
        const uint16_t x = 2 * i < left ? __ldg(reinterpret_cast<const uint16_t*>(from) + i) : uint16_t{0};
        asm volatile("st.shared.u16 [%0], %1;\n" ::"r"(to + 2 * i), "h"(x) : "memory");
      }
    } else {
#pragma unroll
      for (int i = 0; i < 16; i += Rows::kPieceBytes) StartCopy<Rows::kPieceBytes>(to + i, from + i, i < left);
    }
  }

  // Whether this thread's part has an Inf or NaN.
  __device__ __forceinline__ bool HasNonFinite(const uint8_t* tile) const {
    uint32_t found = 0;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const uint4 x = *reinterpret_cast<const uint4*>(tile + OffsetOf(i));
      found |= Rows::NonFinite(x.x) | Rows::NonFinite(x.y) | Rows::NonFinite(x.z) | Rows::NonFinite(x.w);
    }
    return found != 0;
  }

  // Inf and NaN in this thread's part become 0.
  __device__ __forceinline__ void Clean(uint8_t* tile) const {
#pragma unroll 1
    for (int i = 0; i < kChunks; ++i) {
      auto* const words = reinterpret_cast<uint32_t*>(tile + Layout::Offset(row + i * kRowStep, chunk));
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t first_bits = Rows::NonFinite(words[j]) >> (Rows::kBits - 1);
        words[j] &= ~(first_bits * ((1u << Rows::kBits) - 1));
      }
    }
  }
};

}  // namespace kv_cache_quant
}  // namespace contrib
}  // namespace onnxruntime
