/*++

Copyright (c) the kv-quant patch set authors.

Licensed under the MIT License.

Module Name:

    kv_cache_quant_codec.h

Abstract:

    Codes of a quantized KV cache: how a value becomes a code, and how a vector type expands codes.
    The byte format is that of contrib_ops/cuda/bert/kv_cache_quant/format.h. Everything has internal
    linkage, for the reason that kv_cache_quant_kernel.h gives.

--*/

#pragma once

#include <cstring>

#include "kv_cache_quant.h"

namespace
{
namespace kv_cache_quant
{

inline uint32_t
ToBits(float x)
{
    uint32_t b;
    std::memcpy(&b, &x, sizeof(b));
    return b;
}

inline float
FromBits(uint32_t b)
{
    float x;
    std::memcpy(&x, &b, sizeof(x));
    return x;
}

// Adding and removing it rounds |x| < 2^22 to an integer, ties to even; the sum's low bits are that integer.
constexpr float RoundingBias = 12582912.0f;  // 1.5 * 2^23
constexpr uint32_t RoundingBiasBits = 0x4B400000u;

inline float
DecodeFloat8(uint8_t code)
{
    const uint32_t magnitude = code & 0x7Fu;
    const uint32_t sign = static_cast<uint32_t>(code & 0x80u) << 24;
    if (magnitude == 0x7Fu) {
        return FromBits(sign | 0x7FC00000u);
    }
    // Below 8 the code is subnormal: a multiple of 2^-9. Otherwise the exponent bias goes from 7 to 127.
    const float value = magnitude < 8 ? static_cast<float>(magnitude) * 0.001953125f
                                      : FromBits((magnitude << 20) + (120u << 23));
    return FromBits(ToBits(value) | sign);
}

inline uint8_t
EncodeFloat8(float y)
{
    const uint32_t sign = (ToBits(y) >> 24) & 0x80u;
    float a = FromBits(ToBits(y) & 0x7FFFFFFFu);
    a = a > 448.0f ? 448.0f : a;  // a NaN stays
    const uint32_t bits = ToBits(a);
    const uint32_t normal = ((bits + 0x7FFFFu + ((bits >> 20) & 1u)) >> 20) - 960u;
    const uint32_t subnormal = ToBits(a * 512.0f + RoundingBias) - RoundingBiasBits;
    uint32_t code = a < 0.015625f ? subnormal : normal;
    code = a == a ? code : 0x7Fu;
    return static_cast<uint8_t>(code | sign);
}

inline float
ZeroUnlessFinite(float scale)
{
    return (ToBits(scale) & 0x7F800000u) == 0x7F800000u ? 0.0f : scale;
}

// The code as an integer, before packing. Scale 0 (also in place of Inf and NaN) means code 0.
inline int32_t
EncodeInt(float x, float scale, float lowest, float highest)
{
    float y = x / scale;
    y = y < lowest ? lowest : y;
    y = y > highest ? highest : y;
    y = (y == y && scale != 0.0f) ? y : 0.0f;
    return static_cast<int32_t>(ToBits(y + RoundingBias) - RoundingBiasBits);
}

float
Amax(const float* X, size_t Count)
{
    // Magnitudes order like their bit patterns, NaN above all.
    uint32_t m = 0;
    for (size_t i = 0; i < Count; i++) {
        const uint32_t b = ToBits(X[i]) & 0x7FFFFFFFu;
        m = b > m ? b : m;
    }
    return FromBits(m > 0x7F800000u ? 0x7FC00000u : m);
}

template <class V>
struct Int8Codec {
    static constexpr float Unit = 1.0f;
    static constexpr bool Interleaved = false;
    static constexpr size_t Bytes(size_t Elements) { return Elements; }
    static void Expand(const uint8_t* p, typename V::Reg& a, typename V::Reg& b) { V::ExpandInt8(p, a, b); }

    static void
    EncodeRow(const float* X, const float* Scale, bool PerElement, bool Symmetric, size_t HeadSize, uint8_t* Codes)
    {
        const float lowest = Symmetric ? -127.0f : -128.0f;
        if (PerElement) {
            for (size_t i = 0; i < HeadSize; i++) {
                Codes[i] = static_cast<uint8_t>(EncodeInt(X[i], ZeroUnlessFinite(Scale[i]), lowest, 127.0f));
            }
        } else {
            const float scale = ZeroUnlessFinite(*Scale);
            for (size_t i = 0; i < HeadSize; i++) {
                Codes[i] = static_cast<uint8_t>(EncodeInt(X[i], scale, lowest, 127.0f));
            }
        }
    }
};

template <class V>
struct Float8Codec {
    static constexpr float Unit = V::Float8Unit;
    static constexpr bool Interleaved = false;
    static constexpr size_t Bytes(size_t Elements) { return Elements; }
    static void Expand(const uint8_t* p, typename V::Reg& a, typename V::Reg& b) { V::ExpandFloat8(p, a, b); }

    static void
    EncodeRow(const float* X, const float* Scale, bool PerElement, bool Symmetric, size_t HeadSize, uint8_t* Codes)
    {
        MLAS_UNREFERENCED_PARAMETER(Symmetric);  // e4m3 has a sign bit: the range is symmetric anyway
        for (size_t i = 0; i < HeadSize; i++) {
            const float scale = ZeroUnlessFinite(PerElement ? Scale[i] : *Scale);
            Codes[i] = scale == 0.0f ? uint8_t{0} : EncodeFloat8(X[i] / scale);
        }
    }
};

template <class V>
struct Int4Codec {
    static constexpr float Unit = 1.0f;
    static constexpr bool Interleaved = true;
    static constexpr size_t Bytes(size_t Elements) { return Elements / 2; }
    static void Expand(const uint8_t* p, typename V::Reg& a, typename V::Reg& b) { V::ExpandInt4(p, a, b); }

    static void
    EncodeRow(const float* X, const float* Scale, bool PerElement, bool Symmetric, size_t HeadSize, uint8_t* Codes)
    {
        const float lowest = Symmetric ? -7.0f : -8.0f;
        for (size_t i = 0; i < HeadSize; i += 2) {
            const float s0 = ZeroUnlessFinite(PerElement ? Scale[i] : *Scale);
            const float s1 = ZeroUnlessFinite(PerElement ? Scale[i + 1] : *Scale);
            const int32_t even = EncodeInt(X[i], s0, lowest, 7.0f) + 8;
            const int32_t odd = EncodeInt(X[i + 1], s1, lowest, 7.0f) + 8;
            Codes[i / 2] = static_cast<uint8_t>(even | (odd << 4));
        }
    }
};

}  // namespace kv_cache_quant
}  // namespace
