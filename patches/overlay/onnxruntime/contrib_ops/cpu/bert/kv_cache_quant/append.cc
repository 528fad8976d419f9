// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.

#include "contrib_ops/cpu/bert/kv_cache_quant/append.h"

#include <cmath>

#include "core/mlas/inc/mlas_kv_cache_quant.h"
#include "contrib_ops/cpu/bert/kv_cache_quant/rows.h"

namespace onnxruntime {
namespace contrib {
namespace kv_cache_quant {

static_assert(static_cast<int>(KvFormat::kInt8) == MlasKvCacheInt8 &&
                  static_cast<int>(KvFormat::kFloat8E4M3FN) == MlasKvCacheFloat8E4M3 &&
                  static_cast<int>(KvFormat::kInt4) == MlasKvCacheInt4,
              "KvFormat is cast to MLAS_KV_CACHE_CODEC");

namespace {

// Scale of one PER_TOKEN row as float16 stores it (format.h).
MLFloat16 HalfScale(float scale, float amax) {
  if (amax == 0.0f) return MLFloat16::FromBits(0);
  if (std::isfinite(scale)) {
    scale = scale < kHalfScaleMin ? kHalfScaleMin : scale > kHalfScaleMax ? kHalfScaleMax
                                                                          : scale;
  }
  return MLFloat16(scale);
}

template <typename T>
void QuantizeRow(const GqaProblem<T>& p, const CacheSide& side, int64_t kv_head, int64_t cache_row, const float* x) {
  const auto codec = static_cast<MLAS_KV_CACHE_CODEC>(p.format);
  const auto count = static_cast<size_t>(p.head_size);
  uint8_t* codes = side.codes + cache_row * p.row_bytes;
  if (side.mode != KvScaleMode::kPerToken) {
    const bool per_channel = side.mode == KvScaleMode::kPerChannel;
    const float* scale = side.static_scale + (per_channel ? kv_head * p.head_size : 0);
    MlasKvCacheEncodeRow(codec, x, scale, per_channel, /*Symmetric*/ false, count, codes);
    return;
  }
  const float amax = MlasKvCacheAmax(x, count);
  float scale = amax / QMax(p.format);
  if (side.token_scale_half != nullptr) {
    const MLFloat16 stored = HalfScale(scale, amax);
    side.token_scale_half[cache_row] = stored.val;
    scale = stored.ToFloat();
  } else {
    side.token_scale[cache_row] = scale;
  }
  MlasKvCacheEncodeRow(codec, x, &scale, /*ScalePerElement*/ false, /*Symmetric*/ true, count, codes);
}

}  // namespace

template <typename T>
void AppendRows(const GqaProblem<T>& p, concurrency::ThreadPool* thread_pool) {
  const int64_t tokens = p.batch_size * p.sequence_length;
  const double elements = static_cast<double>(p.kv_num_heads * p.head_size);
  const TensorOpCost cost{2 * elements * sizeof(T), 2 * elements, 16 * elements};
  concurrency::ThreadPool::TryParallelFor(thread_pool, tokens, cost, [&p](std::ptrdiff_t begin, std::ptrdiff_t end) {
    float row[kMaxHeadSize];
    float scratch[kMaxHeadSize];
    for (int64_t i = begin; i < end; ++i) {
      const int64_t b = i / p.sequence_length;
      const int64_t s = i % p.sequence_length;
      const SequenceState& sequence = p.sequences[static_cast<size_t>(b)];
      if (!sequence.valid || s >= sequence.rows) continue;
      const int64_t token = sequence.past + s;
      for (int64_t h = 0; h < p.kv_num_heads; ++h) {
        const int64_t cache_row = CacheRow(p, b, h, token);
        const int64_t new_row = ((b * p.kv_num_heads + h) * p.sequence_length + s) * p.head_size;
        const int64_t offset = i * p.kv_stride + h * p.head_size;

        float* k = p.prompt_key != nullptr ? p.prompt_key + new_row : row;
        ReadRotatedRow(p, p.key + offset, token, scratch, k);
        QuantizeRow(p, p.k, h, cache_row, k);

        float* v = p.prompt_value != nullptr ? p.prompt_value + new_row : row;
        ReadRow(p.value + offset, p.head_size, v);
        QuantizeRow(p, p.v, h, cache_row, v);
      }
    }
  });
}

template void AppendRows<float>(const GqaProblem<float>&, concurrency::ThreadPool*);
template void AppendRows<MLFloat16>(const GqaProblem<MLFloat16>&, concurrency::ThreadPool*);

}  // namespace kv_cache_quant
}  // namespace contrib
}  // namespace onnxruntime
