/*++

Copyright (c) the kv-quant patch set authors.

Licensed under the MIT License.

Module Name:

    mlas_kv_cache_quant.h

Abstract:

    Attention primitives that read a quantized KV cache tile by tile. The byte format is that of
    contrib_ops/cuda/bert/kv_cache_quant/format.h; these routines know codes and row scales and
    nothing of operators or threads.

    All arithmetic is fp32. A "tile" is a run of consecutive cache rows of one KV head. Rows of Q and
    of the output accumulator use a private element order ("prepared"), so that a nibble pair needs no
    interleaving in the inner loop: write them with MlasKvCachePrepareRows, read them back with
    MlasKvCacheFinishRows.

--*/

#pragma once

#include <cstddef>
#include <cstdint>

enum MLAS_KV_CACHE_CODEC {
    MlasKvCacheInt8 = 0,
    MlasKvCacheFloat8E4M3 = 1,
    MlasKvCacheInt4 = 2,
};

/**
 * @brief max |x| over Count elements; NaN when any element is NaN.
 */
float
MlasKvCacheAmax(const float* X, size_t Count);

/**
 * @brief Encode one row.
 *
 * @param X             HeadSize values
 * @param Scale         one scale, or HeadSize scales when ScalePerElement
 * @param Symmetric     clamp integers to [-qmax, qmax] (PER_TOKEN) rather than to the full code range
 * @param Codes         output, HeadSize bytes (HeadSize / 2 for int4)
 */
void
MlasKvCacheEncodeRow(
    MLAS_KV_CACHE_CODEC Codec,
    const float* X,
    const float* Scale,
    bool ScalePerElement,
    bool Symmetric,
    size_t HeadSize,
    uint8_t* Codes
);

/**
 * @brief Floats per prepared row: HeadSize rounded up to the vector block of the kernels in use.
 */
size_t
MlasKvCachePreparedSize(size_t HeadSize);

/**
 * @brief Bring Rows rows of HeadSize floats (row stride HeadSize) into the prepared order.
 */
void
MlasKvCachePrepareRows(MLAS_KV_CACHE_CODEC Codec, const float* X, size_t Rows, size_t HeadSize, float* Prepared);

/**
 * @brief Inverse of MlasKvCachePrepareRows for an accumulator that MlasKvCacheMixTile filled.
 */
void
MlasKvCacheFinishRows(MLAS_KV_CACHE_CODEC Codec, const float* Prepared, size_t Rows, size_t HeadSize, float* X);

/**
 * @brief Scores[r][t] = TokenScale[t] * dot(Q[r], codes of row t).
 *
 * @param Q             Rows prepared rows
 * @param Codes         Tokens cache rows
 * @param TokenScale    Tokens scales, or nullptr for 1
 * @param ScoreStride   floats from one row of Scores to the next
 */
void
MlasKvCacheScoreTile(
    MLAS_KV_CACHE_CODEC Codec,
    const float* Q,
    size_t Rows,
    const uint8_t* Codes,
    size_t Tokens,
    size_t HeadSize,
    const float* TokenScale,
    float* Scores,
    size_t ScoreStride
);

/**
 * @brief Accumulator[r] += sum over t of Weights[r][t] * codes of row t, in the prepared order.
 */
void
MlasKvCacheMixTile(
    MLAS_KV_CACHE_CODEC Codec,
    const float* Weights,
    size_t WeightStride,
    size_t Rows,
    const uint8_t* Codes,
    size_t Tokens,
    size_t HeadSize,
    float* Accumulator
);

/**
 * @brief X[t][d] = TokenScale[t] * code, plain element order; for a tile that many query rows share.
 *
 * @param TokenScale    Tokens scales, or nullptr for 1
 */
void
MlasKvCacheDecodeTile(
    MLAS_KV_CACHE_CODEC Codec,
    const uint8_t* Codes,
    size_t Tokens,
    size_t HeadSize,
    const float* TokenScale,
    float* X
);

/**
 * @brief One step of an online softmax over Count scores, in place: Scores = exp(Scores - max).
 *
 * @param RunningMax    in: maximum so far (-inf at first); out: including these scores
 * @param RunningSum    in: sum so far; out: rescaled to the new maximum, these weights added
 * @return              factor by which an accumulator of earlier tiles must be multiplied
 *
 * A NaN score makes its weight and the sum NaN.
 */
float
MlasKvCacheSoftmaxTile(float* Scores, size_t Count, float* RunningMax, float* RunningSum);

/**
 * @brief Name of the kernels that the processor gets: "avx512", "avx2" or "portable".
 */
const char*
MlasKvCacheKernelName();
