/*++

Copyright (c) the kv-quant patch set authors.

Licensed under the MIT License.

Module Name:

    kv_cache_quant_kernel_avx512.cpp

Abstract:

    Quantized KV cache kernels for AVX-512 (F, BW, DQ, VL). VNNI is not used: its products take Q and
    the weights in 8 bits, which would cost more accuracy than an int8 cache itself.

--*/

#include <immintrin.h>

#include "kv_cache_quant.h"
#include "kv_cache_quant_kernel.h"

namespace
{

struct Avx512Vec {
    static constexpr size_t Lanes = 16;
    static constexpr size_t TokenBlock = 4;
    static constexpr size_t MixBlocks = 2;

    using Reg = __m512;

    static Reg Zero() { return _mm512_setzero_ps(); }
    static Reg Broadcast(float x) { return _mm512_set1_ps(x); }
    static Reg Load(const float* p) { return _mm512_loadu_ps(p); }
    static void Store(float* p, Reg a) { _mm512_storeu_ps(p, a); }
    static Reg Add(Reg a, Reg b) { return _mm512_add_ps(a, b); }
    static Reg Sub(Reg a, Reg b) { return _mm512_sub_ps(a, b); }
    static Reg Mul(Reg a, Reg b) { return _mm512_mul_ps(a, b); }
    static Reg Fma(Reg a, Reg b, Reg c) { return _mm512_fmadd_ps(a, b, c); }
    static Reg Max(Reg a, Reg b) { return _mm512_max_ps(a, b); }

    // The masked form: the plain extraction and the cast trip the warning of GCC 12 about undefined registers.
    static __m256 Low(Reg a) { return _mm512_maskz_extractf32x8_ps(0xFF, a, 0); }
    static __m256 High(Reg a) { return _mm512_maskz_extractf32x8_ps(0xFF, a, 1); }

    static float
    ReduceAdd(Reg a)
    {
        const __m256 y = _mm256_add_ps(Low(a), High(a));
        __m128 x = _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
        x = _mm_add_ps(x, _mm_movehl_ps(x, x));
        return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
    }

    static float
    ReduceMax(Reg a)
    {
        const __m256 y = _mm256_max_ps(Low(a), High(a));
        __m128 x = _mm_max_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
        x = _mm_max_ps(x, _mm_movehl_ps(x, x));
        return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
    }

    template <size_t N>
    static void
    ReduceAddMany(const Reg (&a)[N], float* out)
    {
        if constexpr (N == 4) {
            const __m256 x01 = _mm256_hadd_ps(_mm256_add_ps(Low(a[0]), High(a[0])), _mm256_add_ps(Low(a[1]), High(a[1])));
            const __m256 x23 = _mm256_hadd_ps(_mm256_add_ps(Low(a[2]), High(a[2])), _mm256_add_ps(Low(a[3]), High(a[3])));
            const __m256 x = _mm256_hadd_ps(x01, x23);
            _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1)));
        } else {
            for (size_t i = 0; i < N; i++) {
                out[i] = ReduceAdd(a[i]);
            }
        }
    }

    static Reg
    Pow2(Reg biased)
    {
        const __m512i n = _mm512_slli_epi32(_mm512_castps_si512(biased), 23);
        return _mm512_castsi512_ps(_mm512_add_epi32(n, _mm512_set1_epi32(0x3F800000)));
    }

    static Reg
    ExpandInt8Half(const uint8_t* p)
    {
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
    }

    static void
    ExpandInt8(const uint8_t* p, Reg& a, Reg& b)
    {
        a = ExpandInt8Half(p);
        b = ExpandInt8Half(p + 16);
    }

    static void
    ExpandInt4(const uint8_t* p, Reg& a, Reg& b)
    {
        // The permutation looks at the low four bits of an index alone, so a nibble needs no masking.
        const __m512 values = _mm512_setr_ps(-8.0f, -7.0f, -6.0f, -5.0f, -4.0f, -3.0f, -2.0f, -1.0f, 0.0f, 1.0f, 2.0f, 3.0f, 4.0f, 5.0f, 6.0f, 7.0f);
        const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
        a = _mm512_permutexvar_ps(bytes, values);
        b = _mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), values);
    }

    // e4m3 moved into the fields of a half has an exponent bias of 15 instead of 7: a factor of 2^8.
    static constexpr float Float8Unit = 256.0f;

    static Reg
    ExpandFloat8Half(const uint8_t* p)
    {
        const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
        const __m256i magnitude = _mm256_and_si256(wide, _mm256_set1_epi16(0x7F));
        const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(0x80)), 8);
        __m256i half = _mm256_or_si256(_mm256_slli_epi16(magnitude, 7), sign);
        const __m256i nan = _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x7F));
        half = _mm256_or_si256(half, _mm256_and_si256(nan, _mm256_set1_epi16(0x7E00)));
        return _mm512_cvtph_ps(half);
    }

    static void
    ExpandFloat8(const uint8_t* p, Reg& a, Reg& b)
    {
        a = ExpandFloat8Half(p);
        b = ExpandFloat8Half(p + 16);
    }

    static void
    StoreInterleaved(float* p, Reg a, Reg b)
    {
        const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        const __m512i high = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        _mm512_storeu_ps(p, _mm512_permutex2var_ps(a, low, b));
        _mm512_storeu_ps(p + 16, _mm512_permutex2var_ps(a, high, b));
    }
};

}  // namespace

extern constexpr MLAS_KV_CACHE_QUANT_DISPATCH MlasKvCacheQuantDispatchAvx512 =
    kv_cache_quant::MakeDispatch<Avx512Vec>("avx512");
