/*++

Copyright (c) the kv-quant patch set authors.

Licensed under the MIT License.

Module Name:

    kv_cache_quant.cpp

Abstract:

    Public entry points of the quantized KV cache primitives and the portable kernels.

--*/

#include "kv_cache_quant.h"

#include "kv_cache_quant_kernel.h"

namespace
{

// Plain arrays of eight floats: the compiler maps them to whatever vectors the baseline target has.
struct PortableVec {
    static constexpr size_t Lanes = 8;
    static constexpr size_t TokenBlock = 2;
    static constexpr size_t MixBlocks = 1;

    struct Reg {
        float v[Lanes];
    };

    static Reg Zero() { return Broadcast(0.0f); }

    static Reg Broadcast(float x)
    {
        Reg r;
        for (size_t i = 0; i < Lanes; i++) r.v[i] = x;
        return r;
    }

    static Reg Load(const float* p)
    {
        Reg r;
        for (size_t i = 0; i < Lanes; i++) r.v[i] = p[i];
        return r;
    }

    static void Store(float* p, const Reg& a)
    {
        for (size_t i = 0; i < Lanes; i++) p[i] = a.v[i];
    }

    static Reg Sub(const Reg& a, const Reg& b)
    {
        Reg r;
        for (size_t i = 0; i < Lanes; i++) r.v[i] = a.v[i] - b.v[i];
        return r;
    }

    static Reg Add(const Reg& a, const Reg& b)
    {
        Reg r;
        for (size_t i = 0; i < Lanes; i++) r.v[i] = a.v[i] + b.v[i];
        return r;
    }

    static Reg Mul(const Reg& a, const Reg& b)
    {
        Reg r;
        for (size_t i = 0; i < Lanes; i++) r.v[i] = a.v[i] * b.v[i];
        return r;
    }

    static Reg Fma(const Reg& a, const Reg& b, const Reg& c)
    {
        Reg r;
        for (size_t i = 0; i < Lanes; i++) r.v[i] = a.v[i] * b.v[i] + c.v[i];
        return r;
    }

    // b where the comparison fails, so that a NaN in b stays.
    static Reg Max(const Reg& a, const Reg& b)
    {
        Reg r;
        for (size_t i = 0; i < Lanes; i++) r.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i];
        return r;
    }

    static Reg Pow2(const Reg& biased)
    {
        Reg r;
        for (size_t i = 0; i < Lanes; i++) {
            r.v[i] = kv_cache_quant::FromBits((kv_cache_quant::ToBits(biased.v[i]) << 23) + 0x3F800000u);
        }
        return r;
    }

    static float ReduceAdd(const Reg& a)
    {
        float s = 0.0f;
        for (size_t i = 0; i < Lanes; i++) s += a.v[i];
        return s;
    }

    template <size_t N>
    static void
    ReduceAddMany(const Reg (&a)[N], float* out)
    {
        for (size_t i = 0; i < N; i++) {
            out[i] = ReduceAdd(a[i]);
        }
    }

    static float ReduceMax(const Reg& a)
    {
        float m = a.v[0];
        for (size_t i = 1; i < Lanes; i++) m = a.v[i] > m ? a.v[i] : m;
        return m;
    }

    static void ExpandInt8(const uint8_t* p, Reg& a, Reg& b)
    {
        for (size_t i = 0; i < Lanes; i++) {
            a.v[i] = static_cast<float>(static_cast<int8_t>(p[i]));
            b.v[i] = static_cast<float>(static_cast<int8_t>(p[i + Lanes]));
        }
    }

    static void ExpandInt4(const uint8_t* p, Reg& a, Reg& b)
    {
        for (size_t i = 0; i < Lanes; i++) {
            a.v[i] = static_cast<float>(static_cast<int>(p[i] & 15) - 8);
            b.v[i] = static_cast<float>(static_cast<int>(p[i] >> 4) - 8);
        }
    }

    static void ExpandFloat8(const uint8_t* p, Reg& a, Reg& b)
    {
        for (size_t i = 0; i < Lanes; i++) {
            a.v[i] = kv_cache_quant::DecodeFloat8(p[i]);
            b.v[i] = kv_cache_quant::DecodeFloat8(p[i + Lanes]);
        }
    }

    static constexpr float Float8Unit = 1.0f;

    static void StoreInterleaved(float* p, const Reg& a, const Reg& b)
    {
        for (size_t i = 0; i < Lanes; i++) {
            p[2 * i] = a.v[i];
            p[2 * i + 1] = b.v[i];
        }
    }
};

constexpr MLAS_KV_CACHE_QUANT_DISPATCH MlasKvCacheQuantDispatchPortable =
    kv_cache_quant::MakeDispatch<PortableVec>("portable");

const MLAS_KV_CACHE_QUANT_DISPATCH&
Dispatch()
{
    const auto* Table = GetMlasPlatform().KvCacheQuantDispatch;
    return Table != nullptr ? *Table : MlasKvCacheQuantDispatchPortable;
}

}  // namespace

float
MlasKvCacheAmax(const float* X, size_t Count)
{
    return Dispatch().Amax(X, Count);
}

void
MlasKvCacheEncodeRow(
    MLAS_KV_CACHE_CODEC Codec,
    const float* X,
    const float* Scale,
    bool ScalePerElement,
    bool Symmetric,
    size_t HeadSize,
    uint8_t* Codes
)
{
    Dispatch().Codecs[Codec].EncodeRow(X, Scale, ScalePerElement, Symmetric, HeadSize, Codes);
}

size_t
MlasKvCachePreparedSize(size_t HeadSize)
{
    const size_t Block = Dispatch().BlockElements;
    return (HeadSize + Block - 1) / Block * Block;
}

void
MlasKvCachePrepareRows(MLAS_KV_CACHE_CODEC Codec, const float* X, size_t Rows, size_t HeadSize, float* Prepared)
{
    Dispatch().Codecs[Codec].PrepareRows(X, Rows, HeadSize, Prepared);
}

void
MlasKvCacheFinishRows(MLAS_KV_CACHE_CODEC Codec, const float* Prepared, size_t Rows, size_t HeadSize, float* X)
{
    Dispatch().Codecs[Codec].FinishRows(Prepared, Rows, HeadSize, X);
}

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
)
{
    Dispatch().Codecs[Codec].ScoreTile(Q, Rows, Codes, Tokens, HeadSize, TokenScale, Scores, ScoreStride);
}

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
)
{
    Dispatch().Codecs[Codec].MixTile(Weights, WeightStride, Rows, Codes, Tokens, HeadSize, Accumulator);
}

void
MlasKvCacheDecodeTile(
    MLAS_KV_CACHE_CODEC Codec,
    const uint8_t* Codes,
    size_t Tokens,
    size_t HeadSize,
    const float* TokenScale,
    float* X
)
{
    Dispatch().Codecs[Codec].DecodeTile(Codes, Tokens, HeadSize, TokenScale, X);
}

float
MlasKvCacheSoftmaxTile(float* Scores, size_t Count, float* RunningMax, float* RunningSum)
{
    return Dispatch().SoftmaxTile(Scores, Count, RunningMax, RunningSum);
}

const char*
MlasKvCacheKernelName()
{
    return Dispatch().Name;
}
