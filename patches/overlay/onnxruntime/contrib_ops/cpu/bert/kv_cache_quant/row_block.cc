// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.

#include "contrib_ops/cpu/bert/kv_cache_quant/row_block.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/mlas/inc/mlas_kv_cache_quant.h"
#include "contrib_ops/cpu/bert/kv_cache_quant/rows.h"

namespace onnxruntime {
namespace contrib {
namespace kv_cache_quant {

namespace {

// Prepared rows are padded to the kernels' vector block, at most 32 floats.
constexpr size_t kMaxPadding = 32;

struct Scratch {
  float* query;        // kBlockRows x D, scaled
  float* prepared;     // kBlockRows x padded D: query in the kernels' order
  float* accumulator;  // kBlockRows x padded D
  float* scores;       // kBlockRows x kTileTokens
  float* k_tile;       // kTileTokens x D
  float* v_tile;       // kTileTokens x D
  float* k_scale;      // kTileTokens
  float* v_scale;      // kTileTokens
  float* maximum;      // kBlockRows
  float* sum;          // kBlockRows
};

Scratch Carve(float* p, int64_t head_size) {
  const auto d = static_cast<size_t>(head_size);
  const auto take = [&p](size_t count) {
    float* start = p;
    p += (count + 15) / 16 * 16;
    return start;
  };
  Scratch s;
  s.query = take(kBlockRows * d);
  s.prepared = take(kBlockRows * (d + kMaxPadding));
  s.accumulator = take(kBlockRows * (d + kMaxPadding));
  s.scores = take(kBlockRows * kTileTokens);
  s.k_tile = take(kTileTokens * d);
  s.v_tile = take(kTileTokens * d);
  s.k_scale = take(kTileTokens);
  s.v_scale = take(kTileTokens);
  s.maximum = take(kBlockRows);
  s.sum = take(kBlockRows);
  return s;
}

// Scales of `count` tokens of a PER_TOKEN side as floats; nullptr for a static side, whose scale is folded elsewhere.
template <typename T>
const float* TokenScales(const GqaProblem<T>& p, const CacheSide& side, const RowBlock& block, int64_t token,
                         int64_t count, float* buffer) {
  if (side.mode != KvScaleMode::kPerToken) return nullptr;
  const int64_t row = CacheRow(p, block.batch, block.kv_head, token);
  if (side.token_scale != nullptr) return side.token_scale + row;
  MlasConvertHalfToFloatBuffer(reinterpret_cast<const MLFloat16*>(side.token_scale_half) + row, buffer,
                               static_cast<size_t>(count));
  return buffer;
}

// x[d] *= the static scale of a side, and x[d] *= factor.
template <typename T>
void ScaleRow(const GqaProblem<T>& p, const CacheSide& side, int64_t kv_head, float factor, float* x) {
  const bool per_channel = !p.is_prompt && side.mode == KvScaleMode::kPerChannel;
  if (!p.is_prompt && side.mode == KvScaleMode::kPerTensor) factor *= *side.static_scale;
  for (int64_t d = 0; d < p.head_size; ++d) {
    x[d] *= per_channel ? factor * side.static_scale[kv_head * p.head_size + d] : factor;
  }
}

template <typename T>
void LoadQuery(const GqaProblem<T>& p, const RowBlock& block, Scratch& scratch) {
  const int64_t group = p.num_heads / p.kv_num_heads;
  const int64_t past = p.sequences[static_cast<size_t>(block.batch)].past;
  float rotation[kMaxHeadSize];
  for (int64_t r = 0; r < block.rows; ++r) {
    const int64_t s = (block.first_row + r) / group;
    const int64_t head = block.kv_head * group + (block.first_row + r) % group;
    const T* row = p.query + (block.batch * p.sequence_length + s) * p.query_stride + head * p.head_size;
    float* q = scratch.query + r * p.head_size;
    ReadRotatedRow(p, row, past + s, rotation, q);
    ScaleRow(p, p.k, block.kv_head, p.scale, q);
  }
}

// Softcap, online softmax and the token scales of V on one row's scores of a tile. Tokens [low, high) of the tile
// are attended; the weights of the others become 0. Returns the factor for what the row accumulated before.
float WeighRow(float* scores, int64_t count, int64_t low, int64_t high, float softcap, const float* v_scale,
               float* maximum, float* sum) {
  std::fill(scores, scores + low, 0.0f);
  std::fill(scores + high, scores + count, 0.0f);
  if (low >= high) return 1.0f;
  if (softcap > 0.0f) {
    for (int64_t t = low; t < high; ++t) scores[t] = softcap * std::tanh(scores[t] / softcap);
  }
  const float factor = MlasKvCacheSoftmaxTile(scores + low, static_cast<size_t>(high - low), maximum, sum);
  if (v_scale != nullptr) {
    for (int64_t t = low; t < high; ++t) scores[t] *= v_scale[t];
  }
  return factor;
}

// One tile of tokens for all rows of a block.
template <typename T>
class TileLoop {
 public:
  TileLoop(const GqaProblem<T>& problem, const RowBlock& block, const Scratch& scratch)
      : p_(problem), block_(block), s_(scratch), direct_(!problem.is_prompt && block.rows <= kDirectRows) {
    const auto d = static_cast<size_t>(p_.head_size);
    stride_ = direct_ ? MlasKvCachePreparedSize(d) : d;
    std::fill(s_.accumulator, s_.accumulator + block.rows * stride_, 0.0f);
    std::fill(s_.maximum, s_.maximum + block.rows, -std::numeric_limits<float>::infinity());
    std::fill(s_.sum, s_.sum + block.rows, 0.0f);
    if (direct_) MlasKvCachePrepareRows(Codec(), s_.query, static_cast<size_t>(block.rows), d, s_.prepared);
  }

  void Run() {
    for (int64_t t = block_.first_token; t < block_.end_token; t += kTileTokens) {
      Tile(t, std::min(kTileTokens, block_.end_token - t));
    }
    if (direct_) {
      const auto d = static_cast<size_t>(p_.head_size);
      // Through the query buffer, which is no longer needed: the accumulator's rows are longer.
      MlasKvCacheFinishRows(Codec(), s_.accumulator, static_cast<size_t>(block_.rows), d, s_.query);
      std::memcpy(s_.accumulator, s_.query, static_cast<size_t>(block_.rows) * d * sizeof(float));
    }
  }

 private:
  MLAS_KV_CACHE_CODEC Codec() const { return static_cast<MLAS_KV_CACHE_CODEC>(p_.format); }

  const uint8_t* Codes(const CacheSide& side, int64_t token) const {
    return side.codes + CacheRow(p_, block_.batch, block_.kv_head, token) * p_.row_bytes;
  }

  void Tile(int64_t token, int64_t count) {
    const float* v_scale = p_.is_prompt ? nullptr : TokenScales(p_, p_.v, block_, token, count, s_.v_scale);
    Score(token, count);

    bool whole = true;  // every row attends the whole tile
    int64_t low[kBlockRows];
    int64_t high[kBlockRows];
    const auto& sequence = p_.sequences[static_cast<size_t>(block_.batch)];
    for (int64_t r = 0; r < block_.rows; ++r) {
      int64_t first, end;
      AttendedTokens(p_, sequence, block_.first_row + r, 1, &first, &end);
      low[r] = std::clamp(first - token, int64_t{0}, count);
      high[r] = std::clamp(end - token, low[r], count);
      whole = whole && low[r] == 0 && high[r] == count;

      const float factor = WeighRow(s_.scores + r * kTileTokens, count, low[r], high[r], p_.softcap, v_scale,
                                    s_.maximum + r, s_.sum + r);
      if (factor != 1.0f) {
        float* acc = s_.accumulator + r * stride_;
        for (size_t d = 0; d < stride_; ++d) acc[d] *= factor;
      }
    }
    Mix(token, count, whole, low, high);
  }

  void Score(int64_t token, int64_t count) {
    const auto n = static_cast<size_t>(count);
    const auto d = static_cast<size_t>(p_.head_size);
    const auto rows = static_cast<size_t>(block_.rows);
    const float* tile = s_.k_tile;
    if (p_.is_prompt) {
      tile = PromptRows(p_.prompt_key, token);
    } else {
      const float* scale = TokenScales(p_, p_.k, block_, token, count, s_.k_scale);
      if (direct_) {
        MlasKvCacheScoreTile(Codec(), s_.prepared, rows, Codes(p_.k, token), n, d, scale, s_.scores, kTileTokens);
        return;
      }
      MlasKvCacheDecodeTile(Codec(), Codes(p_.k, token), n, d, scale, s_.k_tile);
    }
    MlasGemm(CblasNoTrans, CblasTrans, rows, n, d, 1.0f, s_.query, d, tile, d, 0.0f, s_.scores, kTileTokens, nullptr);
  }

  // A weight of 0 does not cancel a NaN code or value of a token that a row must not see: such a tile goes row by
  // row over just the tokens attended.
  void Mix(int64_t token, int64_t count, bool whole, const int64_t* low, const int64_t* high) {
    const float* tile = nullptr;
    const auto d = static_cast<size_t>(p_.head_size);
    bool may_have_nan = p_.format == KvFormat::kFloat8E4M3FN;
    if (!direct_) {
      tile = s_.v_tile;
      if (p_.is_prompt) {
        tile = PromptRows(p_.prompt_value, token);
      } else {
        MlasKvCacheDecodeTile(Codec(), Codes(p_.v, token), static_cast<size_t>(count), d, nullptr, s_.v_tile);
      }
      may_have_nan = !whole && !std::isfinite(MlasKvCacheAmax(tile, static_cast<size_t>(count) * d));
    }
    if (whole || !may_have_nan) {
      MixRows(0, block_.rows, token, 0, count, tile);
      return;
    }
    for (int64_t r = 0; r < block_.rows; ++r) {
      if (low[r] < high[r]) MixRows(r, 1, token, low[r], high[r], tile);
    }
  }

  // accumulator[r] += weights[r][low .. high) times the tile's rows, for `rows` rows from r.
  void MixRows(int64_t r, int64_t rows, int64_t token, int64_t low, int64_t high, const float* tile) {
    const auto d = static_cast<size_t>(p_.head_size);
    const auto n = static_cast<size_t>(high - low);
    const float* weights = s_.scores + r * kTileTokens + low;
    float* acc = s_.accumulator + r * stride_;
    if (direct_) {
      MlasKvCacheMixTile(Codec(), weights, kTileTokens, static_cast<size_t>(rows), Codes(p_.v, token + low), n, d, acc);
    } else {
      MlasGemm(CblasNoTrans, CblasNoTrans, static_cast<size_t>(rows), d, n, 1.0f, weights, kTileTokens, tile + low * d,
               d, 1.0f, acc, d, nullptr);
    }
  }

  const float* PromptRows(const float* rows, int64_t token) const {
    return rows + ((block_.batch * p_.kv_num_heads + block_.kv_head) * p_.sequence_length + token) * p_.head_size;
  }

  const GqaProblem<T>& p_;
  const RowBlock& block_;
  const Scratch& s_;
  const bool direct_;
  size_t stride_;  // floats of an accumulator row while tiles are added
};

// Divides by the softmax denominator, applies V's static scale and writes one row of the output.
template <typename T>
void WriteOutput(const GqaProblem<T>& p, const RowBlock& block, int64_t r, float maximum, float sum, float* x) {
  const int64_t group = p.num_heads / p.kv_num_heads;
  const int64_t s = (block.first_row + r) / group;
  const int64_t head = block.kv_head * group + (block.first_row + r) % group;
  if (p.head_sink != nullptr || p.smooth_softmax) {
    float sink = 0.0f;
    if (p.head_sink != nullptr) ReadRow(p.head_sink + head, 1, &sink);
    // Far above the maximum this is Inf and the row 0, the limit it is meant to have.
    sum += std::exp(sink - maximum);
  }
  ScaleRow(p, p.v, block.kv_head, 1.0f / sum, x);
  WriteRow(x, p.head_size, p.output + ((block.batch * p.sequence_length + s) * p.num_heads + head) * p.head_size);
}

}  // namespace

size_t RowBlockScratchSize(int64_t head_size) {
  const auto d = static_cast<size_t>(head_size);
  constexpr size_t kAlignmentSlack = 10 * 16;
  return kBlockRows * (3 * d + 2 * kMaxPadding + kTileTokens + 2) + 2 * kTileTokens * (d + 1) + kAlignmentSlack;
}

template <typename T>
void AttendRowBlock(const GqaProblem<T>& p, const RowBlock& block, float* buffer) {
  Scratch scratch = Carve(buffer, p.head_size);
  LoadQuery(p, block, scratch);
  TileLoop<T>(p, block, scratch).Run();
  const auto d = static_cast<size_t>(p.head_size);
  for (int64_t r = 0; r < block.rows; ++r) {
    float* x = scratch.accumulator + r * d;
    if (block.partial == nullptr) {
      WriteOutput(p, block, r, scratch.maximum[r], scratch.sum[r], x);
    } else {
      float* partial = block.partial + r * (d + 2);
      std::memcpy(partial, x, d * sizeof(float));
      partial[d] = scratch.maximum[r];
      partial[d + 1] = scratch.sum[r];
    }
  }
}

template <typename T>
void MergeRowBlocks(const GqaProblem<T>& p, const RowBlock* blocks, int64_t splits, float* scratch) {
  const auto d = static_cast<size_t>(p.head_size);
  for (int64_t r = 0; r < blocks[0].rows; ++r) {
    float maximum = -std::numeric_limits<float>::infinity();
    for (int64_t i = 0; i < splits; ++i) maximum = std::max(maximum, blocks[i].partial[r * (d + 2) + d]);
    std::fill(scratch, scratch + d, 0.0f);
    float sum = 0.0f;
    for (int64_t i = 0; i < splits; ++i) {
      const float* partial = blocks[i].partial + r * (d + 2);
      // A split in which the row attends nothing has maximum -Inf and all zeros.
      const bool empty = std::isinf(partial[d]) && partial[d + 1] == 0.0f;
      const float weight = empty ? 0.0f : std::isinf(partial[d]) ? 1.0f
                                                                 : std::exp(partial[d] - maximum);
      sum += weight * partial[d + 1];
      for (size_t j = 0; j < d; ++j) scratch[j] += weight * partial[j];
    }
    WriteOutput(p, blocks[0], r, maximum, sum, scratch);
  }
}

template void AttendRowBlock<float>(const GqaProblem<float>&, const RowBlock&, float*);
template void AttendRowBlock<MLFloat16>(const GqaProblem<MLFloat16>&, const RowBlock&, float*);
template void MergeRowBlocks<float>(const GqaProblem<float>&, const RowBlock*, int64_t, float*);
template void MergeRowBlocks<MLFloat16>(const GqaProblem<MLFloat16>&, const RowBlock*, int64_t, float*);

}  // namespace kv_cache_quant
}  // namespace contrib
}  // namespace onnxruntime
