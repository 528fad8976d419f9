/*++

Copyright (c) the kv-quant patch set authors.

Licensed under the MIT License.

Module Name:

    kv_cache_quant_kernel.h

Abstract:

    The quantized KV cache kernels as templates over a vector type. Each including file is compiled
    for another instruction set, so everything here has internal linkage: were it not, the linker
    could keep the AVX-512 copy of a shared inline function for every processor. For the same reason
    nothing of the standard library's function templates is used.

    A vector type has
        Lanes           floats in a register
        TokenBlock      cache rows whose scores are accumulated together
        MixBlocks       blocks of 2 * Lanes output elements that are accumulated together
        Float8Unit      ExpandFloat8 yields code / Float8Unit
    and the operations that PortableVec shows. ExpandX turns 2 * Lanes consecutive codes into two
    registers: the first and second half, or for int4 the even and the odd elements.

--*/

#pragma once

#include <cstring>

#include "kv_cache_quant_codec.h"

namespace
{
namespace kv_cache_quant
{

template <class V, template <class> class C>
struct Kernels {
    using Reg = typename V::Reg;
    using Codec = C<V>;

    static constexpr size_t Block = 2 * V::Lanes;
    static constexpr size_t BlockBytes = Codec::Bytes(Block);

    static constexpr size_t Padded(size_t HeadSize) { return (HeadSize + Block - 1) / Block * Block; }

    // Position of element i of a row in the prepared order.
    static constexpr size_t
    PreparedIndex(size_t i)
    {
        return Codec::Interleaved ? i / Block * Block + (i % 2) * V::Lanes + i % Block / 2 : i;
    }

    static void
    PrepareRows(const float* X, size_t Rows, size_t HeadSize, float* Prepared)
    {
        const size_t padded = Padded(HeadSize);
        for (size_t r = 0; r < Rows; r++, X += HeadSize, Prepared += padded) {
            for (size_t i = 0; i < padded; i++) {
                Prepared[PreparedIndex(i)] = i < HeadSize ? X[i] * Codec::Unit : 0.0f;
            }
        }
    }

    static void
    FinishRows(const float* Prepared, size_t Rows, size_t HeadSize, float* X)
    {
        const size_t padded = Padded(HeadSize);
        for (size_t r = 0; r < Rows; r++, X += HeadSize, Prepared += padded) {
            for (size_t i = 0; i < HeadSize; i++) {
                X[i] = Prepared[PreparedIndex(i)] * Codec::Unit;
            }
        }
    }

    // Expands block c of a row. A last, partial block is read through a zeroed buffer: the row may be the
    // last of its allocation.
    static void
    ExpandBlock(const uint8_t* Row, size_t c, size_t HeadSize, Reg& a, Reg& b)
    {
        if ((c + 1) * Block <= HeadSize) {
            Codec::Expand(Row + c * BlockBytes, a, b);
        } else {
            uint8_t buffer[BlockBytes] = {};
            std::memcpy(buffer, Row + c * BlockBytes, Codec::Bytes(HeadSize - c * Block));
            Codec::Expand(buffer, a, b);
        }
    }

    // Scores of RowCount rows of Q with TokenCount cache rows.
    template <size_t RowCount, size_t TokenCount>
    static void
    ScoreMicro(const float* Q, const uint8_t* Codes, size_t HeadSize, const float* TokenScale, float* Scores, size_t Stride)
    {
        const size_t padded = Padded(HeadSize);
        const size_t row_bytes = Codec::Bytes(HeadSize);
        Reg sum[RowCount][TokenCount];
        for (size_t r = 0; r < RowCount; r++) {
            for (size_t t = 0; t < TokenCount; t++) {
                sum[r][t] = V::Zero();
            }
        }
        for (size_t c = 0; c * Block < padded; c++) {
            const float* q = Q + c * Block;
            for (size_t t = 0; t < TokenCount; t++) {
                Reg a, b;
                ExpandBlock(Codes + t * row_bytes, c, HeadSize, a, b);
                for (size_t r = 0; r < RowCount; r++) {
                    sum[r][t] = V::Fma(V::Load(q + r * padded), a, sum[r][t]);
                    sum[r][t] = V::Fma(V::Load(q + r * padded + V::Lanes), b, sum[r][t]);
                }
            }
        }
        for (size_t r = 0; r < RowCount; r++) {
            float* out = Scores + r * Stride;
            V::template ReduceAddMany<TokenCount>(sum[r], out);
            if (TokenScale != nullptr) {
                for (size_t t = 0; t < TokenCount; t++) {
                    out[t] *= TokenScale[t];
                }
            }
        }
    }

    template <size_t RowCount>
    static void
    ScoreRows(const float* Q, const uint8_t* Codes, size_t Tokens, size_t HeadSize, const float* TokenScale, float* Scores, size_t Stride)
    {
        const size_t row_bytes = Codec::Bytes(HeadSize);
        size_t t = 0;
        for (; t + V::TokenBlock <= Tokens; t += V::TokenBlock) {
            ScoreMicro<RowCount, V::TokenBlock>(Q, Codes + t * row_bytes, HeadSize, TokenScale != nullptr ? TokenScale + t : nullptr, Scores + t, Stride);
        }
        for (; t < Tokens; t++) {
            ScoreMicro<RowCount, 1>(Q, Codes + t * row_bytes, HeadSize, TokenScale != nullptr ? TokenScale + t : nullptr, Scores + t, Stride);
        }
    }

    static void
    ScoreTile(const float* Q, size_t Rows, const uint8_t* Codes, size_t Tokens, size_t HeadSize, const float* TokenScale, float* Scores, size_t Stride)
    {
        const size_t padded = Padded(HeadSize);
        for (; Rows >= 4; Rows -= 4, Q += 4 * padded, Scores += 4 * Stride) {
            ScoreRows<4>(Q, Codes, Tokens, HeadSize, TokenScale, Scores, Stride);
        }
        switch (Rows) {
            case 3:
                ScoreRows<3>(Q, Codes, Tokens, HeadSize, TokenScale, Scores, Stride);
                break;
            case 2:
                ScoreRows<2>(Q, Codes, Tokens, HeadSize, TokenScale, Scores, Stride);
                break;
            case 1:
                ScoreRows<1>(Q, Codes, Tokens, HeadSize, TokenScale, Scores, Stride);
                break;
            default:
                break;
        }
    }

    // Blocks [c, c + BlockCount) of the accumulator of RowCount rows.
    template <size_t RowCount, size_t BlockCount>
    static void
    MixMicro(const float* Weights, size_t Stride, const uint8_t* Codes, size_t Tokens, size_t HeadSize, size_t c, float* Accumulator)
    {
        const size_t padded = Padded(HeadSize);
        const size_t row_bytes = Codec::Bytes(HeadSize);
        Reg sum[RowCount][BlockCount][2];
        for (size_t r = 0; r < RowCount; r++) {
            for (size_t k = 0; k < BlockCount; k++) {
                const float* acc = Accumulator + r * padded + (c + k) * Block;
                sum[r][k][0] = V::Load(acc);
                sum[r][k][1] = V::Load(acc + V::Lanes);
            }
        }
        for (size_t t = 0; t < Tokens; t++) {
            Reg w[RowCount];
            for (size_t r = 0; r < RowCount; r++) {
                w[r] = V::Broadcast(Weights[r * Stride + t]);
            }
            for (size_t k = 0; k < BlockCount; k++) {
                Reg a, b;
                ExpandBlock(Codes + t * row_bytes, c + k, HeadSize, a, b);
                for (size_t r = 0; r < RowCount; r++) {
                    sum[r][k][0] = V::Fma(w[r], a, sum[r][k][0]);
                    sum[r][k][1] = V::Fma(w[r], b, sum[r][k][1]);
                }
            }
        }
        for (size_t r = 0; r < RowCount; r++) {
            for (size_t k = 0; k < BlockCount; k++) {
                float* acc = Accumulator + r * padded + (c + k) * Block;
                V::Store(acc, sum[r][k][0]);
                V::Store(acc + V::Lanes, sum[r][k][1]);
            }
        }
    }

    template <size_t RowCount>
    static void
    MixRows(const float* Weights, size_t Stride, const uint8_t* Codes, size_t Tokens, size_t HeadSize, float* Accumulator)
    {
        const size_t blocks = Padded(HeadSize) / Block;
        size_t c = 0;
        for (; c + V::MixBlocks <= blocks; c += V::MixBlocks) {
            MixMicro<RowCount, V::MixBlocks>(Weights, Stride, Codes, Tokens, HeadSize, c, Accumulator);
        }
        for (; c < blocks; c++) {
            MixMicro<RowCount, 1>(Weights, Stride, Codes, Tokens, HeadSize, c, Accumulator);
        }
    }

    static void
    MixTile(const float* Weights, size_t Stride, size_t Rows, const uint8_t* Codes, size_t Tokens, size_t HeadSize, float* Accumulator)
    {
        const size_t padded = Padded(HeadSize);
        for (; Rows >= 4; Rows -= 4, Weights += 4 * Stride, Accumulator += 4 * padded) {
            MixRows<4>(Weights, Stride, Codes, Tokens, HeadSize, Accumulator);
        }
        switch (Rows) {
            case 3:
                MixRows<3>(Weights, Stride, Codes, Tokens, HeadSize, Accumulator);
                break;
            case 2:
                MixRows<2>(Weights, Stride, Codes, Tokens, HeadSize, Accumulator);
                break;
            case 1:
                MixRows<1>(Weights, Stride, Codes, Tokens, HeadSize, Accumulator);
                break;
            default:
                break;
        }
    }

    static void
    DecodeTile(const uint8_t* Codes, size_t Tokens, size_t HeadSize, const float* TokenScale, float* X)
    {
        const size_t row_bytes = Codec::Bytes(HeadSize);
        const size_t blocks = Padded(HeadSize) / Block;
        for (size_t t = 0; t < Tokens; t++, Codes += row_bytes, X += HeadSize) {
            const Reg scale = V::Broadcast((TokenScale != nullptr ? TokenScale[t] : 1.0f) * Codec::Unit);
            for (size_t c = 0; c < blocks; c++) {
                Reg a, b;
                ExpandBlock(Codes, c, HeadSize, a, b);
                float buffer[Block];
                const bool whole = (c + 1) * Block <= HeadSize;
                float* out = whole ? X + c * Block : buffer;
                a = V::Mul(a, scale);
                b = V::Mul(b, scale);
                if (Codec::Interleaved) {
                    V::StoreInterleaved(out, a, b);
                } else {
                    V::Store(out, a);
                    V::Store(out + V::Lanes, b);
                }
                if (!whole) {
                    std::memcpy(X + c * Block, buffer, (HeadSize - c * Block) * sizeof(float));
                }
            }
        }
    }
};

// exp of x <= 0. Below -87.3 the result stays at exp(-87.3), about 1e-38; a NaN stays NaN.
template <class V>
inline typename V::Reg
ExpNonPositive(typename V::Reg x)
{
    x = V::Max(V::Broadcast(-87.3365447f), x);
    const auto biased = V::Fma(x, V::Broadcast(1.44269504f), V::Broadcast(RoundingBias));
    const auto n = V::Sub(biased, V::Broadcast(RoundingBias));
    // ln 2 in two parts, the first exact in 11 bits, so that x - n ln 2 keeps its low bits.
    auto r = V::Fma(n, V::Broadcast(-0.693359375f), x);
    r = V::Fma(n, V::Broadcast(2.12194440e-4f), r);
    auto p = V::Broadcast(1.0f / 5040.0f);
    p = V::Fma(p, r, V::Broadcast(1.0f / 720.0f));
    p = V::Fma(p, r, V::Broadcast(1.0f / 120.0f));
    p = V::Fma(p, r, V::Broadcast(1.0f / 24.0f));
    p = V::Fma(p, r, V::Broadcast(1.0f / 6.0f));
    p = V::Fma(p, r, V::Broadcast(0.5f));
    p = V::Fma(p, r, V::Broadcast(1.0f));
    p = V::Fma(p, r, V::Broadcast(1.0f));
    return V::Mul(p, V::Pow2(biased));
}

template <class V>
float
SoftmaxTile(float* Scores, size_t Count, float* RunningMax, float* RunningSum)
{
    using Reg = typename V::Reg;
    if (Count == 0) {
        return 1.0f;
    }
    const size_t whole = Count / V::Lanes * V::Lanes;
    float m = *RunningMax;
    Reg maximum = V::Broadcast(m);
    for (size_t i = 0; i < whole; i += V::Lanes) {
        maximum = V::Max(V::Load(Scores + i), maximum);  // a NaN score is skipped here and shows in its weight
    }
    m = V::ReduceMax(maximum);
    for (size_t i = whole; i < Count; i++) {
        m = Scores[i] > m ? Scores[i] : m;
    }

    const Reg shift = V::Broadcast(m);
    Reg sum = V::Zero();
    for (size_t i = 0; i < whole; i += V::Lanes) {
        const Reg e = ExpNonPositive<V>(V::Sub(V::Load(Scores + i), shift));
        V::Store(Scores + i, e);
        sum = V::Add(sum, e);
    }
    float buffer[V::Lanes];
    // The rest, and in one lane more the factor that takes earlier sums to the new maximum.
    for (size_t i = 0; i < V::Lanes; i++) {
        buffer[i] = whole + i < Count ? Scores[whole + i] - m : *RunningMax - m;
    }
    V::Store(buffer, ExpNonPositive<V>(V::Load(buffer)));
    float total = V::ReduceAdd(sum);
    for (size_t i = 0; whole + i < Count; i++) {
        Scores[whole + i] = buffer[i];
        total += buffer[i];
    }
    const float factor = *RunningMax == m ? 1.0f : buffer[V::Lanes - 1];
    *RunningSum = *RunningSum * factor + total;
    *RunningMax = m;
    return factor;
}

template <class V, template <class> class C>
constexpr MLAS_KV_CACHE_QUANT_DISPATCH::CODEC_KERNELS
MakeCodecKernels()
{
    return {C<V>::EncodeRow, Kernels<V, C>::PrepareRows, Kernels<V, C>::FinishRows, Kernels<V, C>::ScoreTile, Kernels<V, C>::MixTile, Kernels<V, C>::DecodeTile};
}

// constexpr: the tables are constants in the image, so that no start-up code is compiled for a larger
// instruction set than the processor may have.
template <class V>
constexpr MLAS_KV_CACHE_QUANT_DISPATCH
MakeDispatch(const char* Name)
{
    return {Name, 2 * V::Lanes, Amax, SoftmaxTile<V>, {MakeCodecKernels<V, Int8Codec>(), MakeCodecKernels<V, Float8Codec>(), MakeCodecKernels<V, Int4Codec>()}};
}

}  // namespace kv_cache_quant
}  // namespace
