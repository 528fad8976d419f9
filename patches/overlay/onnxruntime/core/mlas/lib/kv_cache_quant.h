/*++

Copyright (c) the kv-quant patch set authors.

Licensed under the MIT License.

Module Name:

    kv_cache_quant.h

Abstract:

    Dispatch table of the quantized KV cache kernels. One table per instruction set, chosen by
    MLAS_PLATFORM; a null table means the portable one.

--*/

#pragma once

#include "mlas_kv_cache_quant.h"
#include "mlasi.h"

constexpr size_t MlasKvCacheCodecCount = 3;

struct MLAS_KV_CACHE_QUANT_DISPATCH {
    const char* Name;

    // Elements of one prepared block: prepared rows are padded to a multiple of it.
    size_t BlockElements;

    float (*Amax)(const float* X, size_t Count);
    float (*SoftmaxTile)(float* Scores, size_t Count, float* RunningMax, float* RunningSum);

    // Indexed by MLAS_KV_CACHE_CODEC.
    struct CODEC_KERNELS {
        void (*EncodeRow)(const float*, const float*, bool, bool, size_t, uint8_t*);
        void (*PrepareRows)(const float*, size_t, size_t, float*);
        void (*FinishRows)(const float*, size_t, size_t, float*);
        void (*ScoreTile)(const float*, size_t, const uint8_t*, size_t, size_t, const float*, float*, size_t);
        void (*MixTile)(const float*, size_t, size_t, const uint8_t*, size_t, size_t, float*);
        void (*DecodeTile)(const uint8_t*, size_t, size_t, const float*, float*);
    } Codecs[MlasKvCacheCodecCount];
};
