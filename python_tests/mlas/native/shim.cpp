// C entry points for ctypes.

#include "kv_cache_quant.h"

extern "C" {

// 0 portable, 1 AVX2, 2 AVX-512; returns the name of the kernels that are now in use.
const char*
kv_select(int which)
{
    const MLAS_KV_CACHE_QUANT_DISPATCH* tables[] = {nullptr, &MlasKvCacheQuantDispatchAvx2, &MlasKvCacheQuantDispatchAvx512};
    GetMlasPlatform().KvCacheQuantDispatch = tables[which];
    return MlasKvCacheKernelName();
}

float
kv_amax(const float* x, size_t count)
{
    return MlasKvCacheAmax(x, count);
}

void
kv_encode(int codec, const float* x, const float* scale, int per_element, int symmetric, size_t head_size, uint8_t* codes)
{
    MlasKvCacheEncodeRow(static_cast<MLAS_KV_CACHE_CODEC>(codec), x, scale, per_element != 0, symmetric != 0, head_size, codes);
}

size_t
kv_prepared_size(size_t head_size)
{
    return MlasKvCachePreparedSize(head_size);
}

void
kv_prepare(int codec, const float* x, size_t rows, size_t head_size, float* prepared)
{
    MlasKvCachePrepareRows(static_cast<MLAS_KV_CACHE_CODEC>(codec), x, rows, head_size, prepared);
}

void
kv_finish(int codec, const float* prepared, size_t rows, size_t head_size, float* x)
{
    MlasKvCacheFinishRows(static_cast<MLAS_KV_CACHE_CODEC>(codec), prepared, rows, head_size, x);
}

void
kv_score(int codec, const float* q, size_t rows, const uint8_t* codes, size_t tokens, size_t head_size, const float* token_scale, float* scores, size_t stride)
{
    MlasKvCacheScoreTile(static_cast<MLAS_KV_CACHE_CODEC>(codec), q, rows, codes, tokens, head_size, token_scale, scores, stride);
}

void
kv_mix(int codec, const float* weights, size_t stride, size_t rows, const uint8_t* codes, size_t tokens, size_t head_size, float* accumulator)
{
    MlasKvCacheMixTile(static_cast<MLAS_KV_CACHE_CODEC>(codec), weights, stride, rows, codes, tokens, head_size, accumulator);
}

void
kv_decode(int codec, const uint8_t* codes, size_t tokens, size_t head_size, const float* token_scale, float* x)
{
    MlasKvCacheDecodeTile(static_cast<MLAS_KV_CACHE_CODEC>(codec), codes, tokens, head_size, token_scale, x);
}

float
kv_softmax(float* scores, size_t count, float* maximum, float* sum)
{
    return MlasKvCacheSoftmaxTile(scores, count, maximum, sum);
}

}  // extern "C"
