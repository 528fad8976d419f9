// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
//
// A warp's current tile of K and V in registers, as codes: loading it and reading its scales. decode.cuh says which
// lane has what.

#pragma once

#include "contrib_ops/cuda/bert/kv_cache_quant/activation.cuh"
#include "contrib_ops/cuda/bert/kv_cache_quant/cache_row.cuh"
#include "contrib_ops/cuda/bert/kv_cache_quant/decode_shape.cuh"

namespace onnxruntime {
namespace contrib {
namespace kv_cache_quant {

template <KvFormat kFormat, int kHeadSize, bool kWholeRows, int kRowTiles>
struct DecodeTile {
  using Shape = DecodeShape<kFormat, kHeadSize, kWholeRows, kRowTiles>;
  static constexpr int kTokenTiles = Shape::kTokenTiles;

  const GqaParams& p;
  const int r;             // lane / 4
  const int c;             // lane % 4
  const int64_t base_row;  // cache row of the first token of the split; tokens are counted from it below
  const int count;         // tokens of the split
  const bool k_per_token;
  const bool v_per_token;
  const int row_bytes;
  const uint8_t* const key_codes;    // of this lane: quarter c of the row of token r of the split
  const int key_left;                // bytes of a row from there on
  const uint8_t* const value_codes;  // eighth r of the row of token 2c
  const int value_left;

  uint32_t key_words[kTokenTiles][2][Shape::kKeyWords];      // of tokens r, r + 8
  uint32_t value_words[kTokenTiles][4][Shape::kValueWords];  // of tokens 2c, 2c + 1, 2c + 8, 2c + 9
  uint32_t k_scale[kTokenTiles][2];                          // of tokens r, r + 8, as stored
  uint32_t v_scale[kTokenTiles][2];

  __device__ __forceinline__ DecodeTile(const GqaParams& params, int lane, int64_t first_row, int tokens)
      : p(params),
        r(lane / 4),
        c(lane % 4),
        base_row(first_row),
        count(tokens),
        k_per_token(params.k.mode == KvScaleMode::kPerToken),
        v_per_token(params.v.mode == KvScaleMode::kPerToken),
        row_bytes(kWholeRows ? kHeadSize * Codec<kFormat>::kBits / 8 : params.row_bytes),
        key_codes(params.k.codes + (first_row + lane / 4) * row_bytes + Shape::KeyOffset(0, lane % 4)),
        key_left(row_bytes - Shape::KeyOffset(0, lane % 4)),
        value_codes(params.v.codes + (first_row + 2 * (lane % 4)) * row_bytes + Shape::ValueOffset(0, lane / 4)),
        value_left(row_bytes - Shape::ValueOffset(0, lane / 4)) {
#pragma unroll
    for (int m = 0; m < kTokenTiles; ++m) {
#pragma unroll
      for (int i = 0; i < 2; ++i) k_scale[m][i] = v_scale[m][i] = 0x3F800000u;  // 1: stays so without token scales
    }
  }

  __device__ __forceinline__ void LoadKey(int tile) {
    if (tile + Shape::kTileTokens <= count) {
      LoadKeyRows<true>(tile);
    } else {
      LoadKeyRows<false>(tile);
    }
  }

  __device__ __forceinline__ void LoadValue(int tile) {
    if (tile + Shape::kTileTokens <= count) {
      LoadValueRows<true>(tile);
    } else {
      LoadValueRows<false>(tile);
    }
  }

  // Tokens from a lane's first token of the tile to one `at` later. In a whole tile a constant, which costs
  // no address arithmetic. Rows of a tile beyond the split repeat its last token: they are masked, and nothing past it
  // is read.
  template <bool kWholeTile>
  __device__ __forceinline__ int Ahead(int first, int at) const {
    return kWholeTile ? at : min(first + at, count - 1) - first;
  }

  template <bool kWholeTile>
  __device__ __forceinline__ void LoadKeyRows(int tile) {
    const uint8_t* const codes = key_codes + static_cast<int64_t>(tile) * row_bytes;
#pragma unroll
    for (int m = 0; m < kTokenTiles; ++m) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint8_t* const row = codes + Ahead<kWholeTile>(tile + r, 16 * m + 8 * i) * row_bytes;
#pragma unroll
        for (int w = 0; w < Shape::kKeyWords; w += Shape::kKeyVector) {
          LoadRowPart<Shape::kKeyVector, kWholeRows, Shape::kPieceWords>(row, Shape::KeyOffset(w, 0), key_left,
                                                                         key_words[m][i] + w);
        }
      }
    }
    if (k_per_token) LoadScales<kWholeTile>(p.k, tile, k_scale);
  }

  template <bool kWholeTile>
  __device__ __forceinline__ void LoadValueRows(int tile) {
    const uint8_t* const codes = value_codes + static_cast<int64_t>(tile) * row_bytes;
#pragma unroll
    for (int m = 0; m < kTokenTiles; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint8_t* const row = codes + Ahead<kWholeTile>(tile + 2 * c, 16 * m + i / 2 * 8 + i % 2) * row_bytes;
#pragma unroll
        for (int w = 0; w < Shape::kValueWords; w += Shape::kValueVector) {
          LoadRowPart<Shape::kValueVector, kWholeRows, Shape::kPieceWords>(row, Shape::ValueOffset(w, 0), value_left,
                                                                           value_words[m][i] + w);
        }
      }
    }
    if (v_per_token) LoadScales<kWholeTile>(p.v, tile, v_scale);
  }

  // Scales of tokens r and r + 8 of each token tile as they are stored: to touch them here would wait for the load.
  template <bool kWholeTile>
  __device__ __forceinline__ void LoadScales(const KvSide& side, int tile, uint32_t (&bits)[kTokenTiles][2]) const {
    const int64_t row = base_row + tile + r;
    if (side.token_scale_is_half) {
      const auto* const at = static_cast<const uint16_t*>(side.token_scale) + row;
#pragma unroll
      for (int i = 0; i < 2 * kTokenTiles; ++i) bits[i / 2][i % 2] = at[Ahead<kWholeTile>(tile + r, 8 * i)];
    } else {
      const auto* const at = static_cast<const uint32_t*>(side.token_scale) + row;
#pragma unroll
      for (int i = 0; i < 2 * kTokenTiles; ++i) bits[i / 2][i % 2] = at[Ahead<kWholeTile>(tile + r, 8 * i)];
    }
  }

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
