// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
//
// A warp's current tile of K and V in registers, as codes: loading it and reading its scales. decode.cuh says which
// lane has what.

#pragma once

#include "contrib_ops/cuda/bert/kv_cache_quant/activation.cuh"
#include "contrib_ops/cuda/bert/kv_cache_quant/cache_row.cuh"
#include "contrib_ops/cuda/bert/kv_cache_quant/decode_shape.cuh"
#include "contrib_ops/cuda/bert/kv_cache_quant/shared_copy.cuh"

namespace onnxruntime {
namespace contrib {
namespace kv_cache_quant {

template <typename TileShape>
struct DecodeTile {
  using Shape = TileShape;
  static constexpr bool kWholeRows = Shape::kWholeRows;
  static constexpr int kTokenTiles = Shape::kTokenTiles;

  const GqaParams& p;
  const int lane;
  const int64_t base_row;  // cache row of the first token of the split; tokens are counted from it below
  const int count;         // tokens of the split
  const int old;           // those that were in the cache before the call; the block appends the others
  const bool k_per_token;
  const bool v_per_token;
  const int row_bytes;
  const int key_left;          // bytes of a row from quarter c on
  const int value_left;        // from eighth r on
  const uint32_t value_place;  // in shared memory: this lane's first part of the first of two tiles

  uint32_t key_words[kTokenTiles][2][Shape::kKeyWords];  // of tokens r, r + 8 of each 16
  uint32_t value_words[4][Shape::kValueWords];           // without kValueInShared: of tokens 2c, 2c + 1, 2c + 8, 2c + 9
  uint32_t k_scale[kTokenTiles][2];                      // of tokens r, r + 8, as stored
  uint32_t v_scale[kTokenTiles][2];

  __device__ __forceinline__ DecodeTile(const GqaParams& params, int lane_index, int64_t first_row, int tokens,
                                        int old_tokens, const void* value_tiles)
      : p(params),
        lane(lane_index),
        base_row(first_row),
        count(tokens),
        old(old_tokens),
        k_per_token(params.k.mode == KvScaleMode::kPerToken),
        v_per_token(params.v.mode == KvScaleMode::kPerToken),
        row_bytes(kWholeRows ? Shape::kRowBytes : params.row_bytes),
        key_left(row_bytes - Shape::KeyOffset(0, lane % 4)),
        value_left(row_bytes - Shape::ValueOffset(0, lane / 4)),
        value_place(SharedAddress(value_tiles) + kValueBytes * ValuePlace(lane / 4, lane % 4)) {
#pragma unroll
    for (int i = 0; i < 2 * kTokenTiles; ++i) {
      k_scale[i / 2][i % 2] = v_scale[i / 2][i % 2] = 0x3F800000u;  // 1: stays so without token scales
    }
  }

  // A lane's i-th token of K and of V in 16 tokens.
  static __device__ __forceinline__ int KeyToken(int lane, int i) { return lane / 4 + 8 * i; }
  static __device__ __forceinline__ int ValueToken(int lane, int i) { return 2 * (lane % 4) + i / 2 * 8 + i % 2; }

  // Whether all of a tile was in the cache before the call.
  __device__ __forceinline__ bool IsWhole(int tile) const { return tile + Shape::kTileTokens <= old; }

  __device__ __forceinline__ void LoadKey(int tile) {
    if (IsWhole(tile)) {
      LoadKeyRows<true>(tile);
    } else {
      LoadKeyRows<false>(tile);
    }
  }

  __device__ __forceinline__ void LoadValue(int tile) {
    if (IsWhole(tile)) {
      LoadValueRows<true>(tile);
    } else {
      LoadValueRows<false>(tile);
    }
  }

  __device__ __forceinline__ void LoadValueScales(int tile) {
    if (!v_per_token) return;
    if (IsWhole(tile)) {
      LoadScales<true>(p.v, tile, v_scale);
    } else {
      LoadScales<false>(p.v, tile, v_scale);
    }
  }

  // In a whole tile all rows are at constant distances, which costs no address arithmetic. Another one has rows that
  // the block has just written, behind a barrier, and beyond the last token that one again, which is masked there.
  template <bool kWholeTile>
  __device__ __forceinline__ void LoadKeyRows(int tile) {
    // Quarter c of the row of token r: no registers are left to keep the address.
    const uint8_t* const key_codes =
        p.k.codes + (base_row + tile + lane / 4) * row_bytes + Shape::KeyOffset(0, lane % 4);
#pragma unroll
    for (int m = 0; m < kTokenTiles; ++m) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint8_t* codes = key_codes + (16 * m + 8 * i) * row_bytes;
        if (!kWholeTile) codes -= Beyond(tile + 16 * m + KeyToken(lane, i)) * row_bytes;
#pragma unroll
        for (int w = 0; w < Shape::kKeyWords; w += Shape::kKeyVector) {
          LoadRowPart<Shape::kKeyVector, Shape::kWholeRows, Shape::kPieceWords, kWholeTile>(
              codes, Shape::KeyOffset(w, 0), key_left, key_words[m][i] + w);
        }
      }
    }
    if (k_per_token) LoadScales<kWholeTile>(p.k, tile, k_scale);
  }

  // Codes of V in shared memory are two tiles, as each lane will take them: a vector of kValueBytes for each token,
  // where a row is long enough two. A lane reads what it has copied itself.
  static_assert(Shape::kValueInShared || kTokenTiles == 1, "registers for 16 tokens");
  static constexpr int kValueBytes = 4 * Shape::kValueVector;
  static constexpr int kValueVectors = Shape::kValueWords / Shape::kValueVector;
  static constexpr uint32_t kValueTileBytes = 32 * kValueBytes * kTokenTiles * 4 * kValueVectors;

  // The place of lane 4r + c's vector among the lanes': rows are whole, and the lanes that read together get different
  // banks.
  static __device__ __forceinline__ int ValuePlace(int r, int c) {
    return 8 * c + (kValueBytes == 16 ? r ^ 2 * c : kValueBytes == 8 ? r ^ c / 2 * 4
                                                                     : r);
  }

  template <bool kWholeTile>
  __device__ __forceinline__ void LoadValueRows(int tile) {
    // Eighth r of the row of token 2c.
    const uint8_t* const value_codes =
        p.v.codes + (base_row + tile + 2 * (lane % 4)) * row_bytes + Shape::ValueOffset(0, lane / 4);
#pragma unroll
    for (int m = 0; m < kTokenTiles; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint8_t* codes = value_codes + (16 * m + ValueToken(0, i)) * row_bytes;
        if (!kWholeTile) codes -= Beyond(tile + 16 * m + ValueToken(lane, i)) * row_bytes;
#pragma unroll
        for (int v = 0; v < kValueVectors; ++v) {
          const int offset = Shape::ValueOffset(v * Shape::kValueVector, 0);
          if constexpr (Shape::kValueInShared) {
            CopyValue<kWholeTile>(VectorPlace(tile, m, i, v), codes, offset);
          } else {
            LoadRowPart<Shape::kValueVector, kWholeRows, Shape::kPieceWords, kWholeTile>(
                codes, offset, value_left, value_words[i] + v * Shape::kValueVector);
          }
        }
      }
    }
    if constexpr (Shape::kValueInShared) GroupCopies();
  }

  // The warp's tiles take turns. Place of a vector of the i-th tokens of 16.
  __device__ __forceinline__ uint32_t VectorPlace(int tile, int m, int i, int v) const {
    const uint32_t turn = static_cast<uint32_t>(tile) / (Shape::kWarps * Shape::kTileTokens) % 2;
    return value_place + turn * kValueTileBytes + ((4 * m + i) * kValueVectors + v) * 32 * kValueBytes;
  }

  // A vector of a row, whose part from the lane's first byte on is value_left bytes.
  template <bool kWholeTile>
  __device__ __forceinline__ void CopyValue(uint32_t to, const uint8_t* row, int offset) const {
    if constexpr (!kWholeTile) {  // of this kernel's own writing: not by an asynchronous copy
      uint32_t words[Shape::kValueVector];
      LoadRowPart<Shape::kValueVector, kWholeRows, Shape::kPieceWords, false>(row, offset, value_left, words);
#pragma unroll
      for (int w = 0; w < Shape::kValueVector; ++w) {
        asm volatile("st.shared.u32 [%0], %1;\n" ::"r"(to + 4 * w), "r"(words[w]) : "memory");
      }
    } else if constexpr (kWholeRows) {
      StartCopy<kValueBytes>(to, row + offset, true);
    } else {
      constexpr int kPieceBytes = Shape::kValueVector < Shape::kPieceWords ? kValueBytes : 4 * Shape::kPieceWords;
#pragma unroll
      for (int at = 0; at < kValueBytes; at += kPieceBytes) {
        StartCopy<kPieceBytes>(to + at, row + offset + at, offset + at < value_left);
      }
    }
  }

  // Codes of the m-th 16 tokens of a tile.
  __device__ __forceinline__ void ReadValue(int tile, int m, uint32_t (&words)[4][Shape::kValueWords]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int v = 0; v < kValueVectors; ++v) {
        if constexpr (Shape::kValueInShared) {
          LoadShared<Shape::kValueVector>(VectorPlace(tile, m, i, v), words[i] + v * Shape::kValueVector);
        } else {
#pragma unroll
          for (int w = v * Shape::kValueVector; w < (v + 1) * Shape::kValueVector; ++w) words[i][w] = value_words[i][w];
        }
      }
    }
  }

  template <int kWords>
  static __device__ __forceinline__ void LoadShared(uint32_t from, uint32_t* words) {
    if constexpr (kWords == 4) {
      asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];\n"
                   : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                   : "r"(from)
                   : "memory");
    } else if constexpr (kWords == 2) {
      asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];\n" : "=r"(words[0]), "=r"(words[1]) : "r"(from) : "memory");
    } else {
      asm volatile("ld.shared.u32 %0, [%1];\n" : "=r"(words[0]) : "r"(from) : "memory");
    }
  }

  // Scales of tokens r and r + 8 of each 16 as they are stored: to touch them here would wait for the load.
  template <bool kWholeTile>
  __device__ __forceinline__ void LoadScales(const KvSide& side, int tile, uint32_t (&bits)[kTokenTiles][2]) const {
#pragma unroll
    for (int i = 0; i < 2 * kTokenTiles; ++i) {
      const int token = tile + 8 * i + lane / 4;
      const int64_t row = base_row + (kWholeTile ? token : token - Beyond(token));
      bits[i / 2][i % 2] = side.token_scale_is_half ? static_cast<const uint16_t*>(side.token_scale)[row]
                                                    : static_cast<const uint32_t*>(side.token_scale)[row];
    }
  }

  // How far a token is beyond the last one.
  __device__ __forceinline__ int Beyond(int token) const { return max(token - count + 1, 0); }

  // From LoadScales' bits; 1 on a side without token scales.
  static __device__ __forceinline__ void ReadScales(const KvSide& side, const uint32_t (&bits)[kTokenTiles][2],
                                                    float (&scales)[kTokenTiles][2]) {
    const bool is_half = side.mode == KvScaleMode::kPerToken && side.token_scale_is_half;
#pragma unroll
    for (int i = 0; i < 2 * kTokenTiles; ++i) scales[i / 2][i % 2] = __uint_as_float(bits[i / 2][i % 2]);
    if (!is_half) return;
#pragma unroll
    for (int i = 0; i < 2 * kTokenTiles; ++i) {
      scales[i / 2][i % 2] = __half2float(__ushort_as_half(static_cast<unsigned short>(bits[i / 2][i % 2])));
    }
  }

  // 0xFF in the bytes of fp8 codes that are NaN.
  static __device__ __forceinline__ uint32_t NanBytes(uint32_t word) {
    return __vcmpeq4(word & 0x7F7F7F7Fu, 0x7F7F7F7Fu);
  }
};

}  // namespace kv_cache_quant
}  // namespace contrib
}  // namespace onnxruntime
