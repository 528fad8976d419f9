/*++

Copyright (c) the kv-quant patch set authors.

Licensed under the MIT License.

Module Name:

    kv_cache_quant_kernel_avx2.cpp

Abstract:

    Quantized KV cache kernels for AVX2, FMA3 and F16C.

--*/

#include <immintrin.h>

#include "kv_cache_quant.h"
#include "kv_cache_quant_kernel.h"

namespace
{

struct Avx2Vec {
    static constexpr size_t Lanes = 8;
    static constexpr size_t TokenBlock = 2;
    static constexpr size_t MixBlocks = 1;

    using Reg = __m256;

    static Reg Zero() { return _mm256_setzero_ps(); }
    static Reg Broadcast(float x) { return _mm256_set1_ps(x); }
    static Reg Load(const float* p) { return _mm256_loadu_ps(p); }
    static void Store(float* p, Reg a) { _mm256_storeu_ps(p, a); }
    static Reg Add(Reg a, Reg b) { return _mm256_add_ps(a, b); }
    static Reg Sub(Reg a, Reg b) { return _mm256_sub_ps(a, b); }
    static Reg Mul(Reg a, Reg b) { return _mm256_mul_ps(a, b); }
    static Reg Fma(Reg a, Reg b, Reg c) { return _mm256_fmadd_ps(a, b, c); }
    static Reg Max(Reg a, Reg b) { return _mm256_max_ps(a, b); }

    static float
    ReduceAdd(Reg a)
    {
        __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
        x = _mm_add_ps(x, _mm_movehl_ps(x, x));
        return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
    }

    template <size_t N>
    static void
    ReduceAddMany(const Reg (&a)[N], float* out)
    {
        for (size_t i = 0; i < N; i++) {
            out[i] = ReduceAdd(a[i]);
        }
    }

    static float
    ReduceMax(Reg a)
    {
        __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
        x = _mm_max_ps(x, _mm_movehl_ps(x, x));
        return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
    }

    static Reg
    Pow2(Reg biased)
    {
        const __m256i n = _mm256_slli_epi32(_mm256_castps_si256(biased), 23);
        return _mm256_castsi256_ps(_mm256_add_epi32(n, _mm256_set1_epi32(0x3F800000)));
    }

    static __m128i Load8(const uint8_t* p) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)); }

    static void
    ExpandInt8(const uint8_t* p, Reg& a, Reg& b)
    {
        a = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(Load8(p)));
        b = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(Load8(p + 8)));
    }

    static void
    ExpandInt4(const uint8_t* p, Reg& a, Reg& b)
    {
        const __m256i bytes = _mm256_cvtepu8_epi32(Load8(p));
        const __m256i even = _mm256_and_si256(bytes, _mm256_set1_epi32(15));
        const __m256i odd = _mm256_srli_epi32(bytes, 4);
        a = _mm256_cvtepi32_ps(_mm256_sub_epi32(even, _mm256_set1_epi32(8)));
        b = _mm256_cvtepi32_ps(_mm256_sub_epi32(odd, _mm256_set1_epi32(8)));
    }

    // e4m3 moved into the fields of a half has an exponent bias of 15 instead of 7: a factor of 2^8.
    static constexpr float Float8Unit = 256.0f;

    static Reg
    ExpandFloat8Half(const uint8_t* p)
    {
        const __m128i wide = _mm_cvtepu8_epi16(Load8(p));
        const __m128i magnitude = _mm_and_si128(wide, _mm_set1_epi16(0x7F));
        const __m128i sign = _mm_slli_epi16(_mm_and_si128(wide, _mm_set1_epi16(0x80)), 8);
        __m128i half = _mm_or_si128(_mm_slli_epi16(magnitude, 7), sign);
        const __m128i nan = _mm_cmpeq_epi16(magnitude, _mm_set1_epi16(0x7F));
        half = _mm_or_si128(half, _mm_and_si128(nan, _mm_set1_epi16(0x7E00)));
        return _mm256_cvtph_ps(half);
    }

    static void
    ExpandFloat8(const uint8_t* p, Reg& a, Reg& b)
    {
        a = ExpandFloat8Half(p);
        b = ExpandFloat8Half(p + 8);
    }

    static void
    StoreInterleaved(float* p, Reg a, Reg b)
    {
        const Reg low = _mm256_unpacklo_ps(a, b);
        const Reg high = _mm256_unpackhi_ps(a, b);
        _mm256_storeu_ps(p, _mm256_permute2f128_ps(low, high, 0x20));
        _mm256_storeu_ps(p + 8, _mm256_permute2f128_ps(low, high, 0x31));
    }
};

}  // namespace

extern constexpr MLAS_KV_CACHE_QUANT_DISPATCH MlasKvCacheQuantDispatchAvx2 =
    kv_cache_quant::MakeDispatch<Avx2Vec>("avx2");
