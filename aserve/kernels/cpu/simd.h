/* Vectors of float32, as wide as the compiler's target allows.
 *
 * VF_LANES is 16 with AVX-512 (and VNNI), 8 with AVX2 + FMA and 4 elsewhere, where the compiler's own vectors
 * are used. ASERVE_PORTABLE forces the last, ASERVE_LANES=8 keeps an AVX-512 target at 8 lanes.
 * Fused multiply-adds are written out (compile with -ffp-contract=off), so a row of a matrix is
 * rounded the same way whichever tile it falls into.
 */
#ifndef ASERVE_SIMD_H
#define ASERVE_SIMD_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if !defined(ASERVE_PORTABLE) && defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>
#define ASERVE_X86 1
#endif

#define INLINE static inline __attribute__((always_inline, unused))

#if defined(ASERVE_X86) && defined(__AVX512VNNI__) && defined(__AVX512BW__) && !defined(ASERVE_LANES)

#define VF_LANES 16
typedef __m512 vf;

INLINE vf vf_set1(float x) { return _mm512_set1_ps(x); }
INLINE vf vf_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void vf_store(float *p, vf x) { _mm512_storeu_ps(p, x); }
INLINE __mmask16 vf_first(int n) { return (__mmask16)((1u << n) - 1); }
INLINE vf vf_load_part(const float *p, int n) { return _mm512_maskz_loadu_ps(vf_first(n), p); }
INLINE void vf_store_part(float *p, vf x, int n) { _mm512_mask_storeu_ps(p, vf_first(n), x); }
INLINE vf vf_add(vf a, vf b) { return _mm512_add_ps(a, b); }
INLINE vf vf_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
INLINE vf vf_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
INLINE vf vf_div(vf a, vf b) { return _mm512_div_ps(a, b); }
INLINE vf vf_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vf vf_max(vf a, vf b) { return _mm512_max_ps(a, b); } /* b if either is NaN */
INLINE vf vf_min(vf a, vf b) { return _mm512_min_ps(a, b); }
INLINE float vf_sum(vf x) { return _mm512_reduce_add_ps(x); }
INLINE float vf_top(vf x) { return _mm512_reduce_max_ps(x); }
INLINE vf vf_round(vf x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE vf vf_zero_below(vf x, vf limit, vf value) {
    return _mm512_mask_mov_ps(value, _mm512_cmp_ps_mask(x, limit, _CMP_LT_OQ), _mm512_setzero_ps());
}
/* 2^n for a whole n in [-126, 127] */
INLINE vf vf_exp2_whole(vf n) {
    __m512i bits = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
    return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 23));
}
INLINE vf vf_load_bf16(const uint16_t *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}
INLINE vf vf_load_f16(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }

#elif defined(ASERVE_X86)

#define VF_LANES 8
typedef __m256 vf;

INLINE vf vf_set1(float x) { return _mm256_set1_ps(x); }
INLINE vf vf_load(const float *p) { return _mm256_loadu_ps(p); }
INLINE void vf_store(float *p, vf x) { _mm256_storeu_ps(p, x); }
INLINE __m256i vf_first(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
INLINE vf vf_load_part(const float *p, int n) { return _mm256_maskload_ps(p, vf_first(n)); }
INLINE void vf_store_part(float *p, vf x, int n) { _mm256_maskstore_ps(p, vf_first(n), x); }
INLINE vf vf_add(vf a, vf b) { return _mm256_add_ps(a, b); }
INLINE vf vf_sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
INLINE vf vf_mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
INLINE vf vf_div(vf a, vf b) { return _mm256_div_ps(a, b); }
INLINE vf vf_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
INLINE vf vf_max(vf a, vf b) { return _mm256_max_ps(a, b); } /* b if either is NaN */
INLINE vf vf_min(vf a, vf b) { return _mm256_min_ps(a, b); }
INLINE float vf_sum(vf x) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}
INLINE float vf_top(vf x) {
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}
INLINE vf vf_round(vf x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE vf vf_zero_below(vf x, vf limit, vf value) {
    return _mm256_andnot_ps(_mm256_cmp_ps(x, limit, _CMP_LT_OQ), value);
}
INLINE vf vf_exp2_whole(vf n) {
    __m256i bits = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 23));
}
INLINE vf vf_load_bf16(const uint16_t *p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
}
INLINE vf vf_load_f16(const uint16_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }

#else

#define VF_LANES 4
typedef float vf __attribute__((vector_size(16)));
#define VF_EACH(expression) \
    vf result; \
    for (int i = 0; i < VF_LANES; i++) result[i] = (expression); \
    return result

INLINE float fma_or_not(float a, float b, float c) {
#ifdef __FP_FAST_FMAF
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c; /* a library call per element would be far too slow */
#endif
}
INLINE float float_from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
INLINE float float_from_f16(uint16_t bits) {
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16, exponent = (bits >> 10) & 31, mantissa = bits & 1023;
    if (exponent == 31) return float_from_bits(sign | 0x7f800000 | mantissa << 13);
    if (exponent == 0) return (sign ? -1.0f : 1.0f) * (float)mantissa * 0x1p-24f;
    return float_from_bits(sign | (exponent + 112) << 23 | mantissa << 13);
}
INLINE vf vf_set1(float x) { VF_EACH(x); }
INLINE vf vf_load(const float *p) { VF_EACH(p[i]); }
INLINE void vf_store(float *p, vf x) { memcpy(p, &x, sizeof x); }
INLINE vf vf_load_part(const float *p, int n) { VF_EACH(i < n ? p[i] : 0.0f); }
INLINE void vf_store_part(float *p, vf x, int n) {
    for (int i = 0; i < n; i++) p[i] = x[i];
}
INLINE vf vf_add(vf a, vf b) { return a + b; }
INLINE vf vf_sub(vf a, vf b) { return a - b; }
INLINE vf vf_mul(vf a, vf b) { return a * b; }
INLINE vf vf_div(vf a, vf b) { return a / b; }
INLINE vf vf_fma(vf a, vf b, vf c) { VF_EACH(fma_or_not(a[i], b[i], c[i])); }
INLINE vf vf_max(vf a, vf b) { VF_EACH(a[i] > b[i] ? a[i] : b[i]); } /* b if either is NaN */
INLINE vf vf_min(vf a, vf b) { VF_EACH(a[i] < b[i] ? a[i] : b[i]); }
INLINE float vf_sum(vf x) { return (x[0] + x[2]) + (x[1] + x[3]); }
INLINE float vf_top(vf x) {
    float low = x[0] > x[2] ? x[0] : x[2], high = x[1] > x[3] ? x[1] : x[3];
    return low > high ? low : high;
}
/* To the nearest whole number, ties to even; |x| < 2^22. */
INLINE vf vf_round(vf x) {
    vf magic = vf_set1(12582912.0f);
    return (x + magic) - magic;
}
INLINE vf vf_zero_below(vf x, vf limit, vf value) { VF_EACH(x[i] < limit[i] ? 0.0f : value[i]); }
INLINE vf vf_exp2_whole(vf n) { VF_EACH(float_from_bits((uint32_t)((int32_t)n[i] + 127) << 23)); }
INLINE vf vf_load_bf16(const uint16_t *p) { VF_EACH(float_from_bits((uint32_t)p[i] << 16)); }
INLINE vf vf_load_f16(const uint16_t *p) { VF_EACH(float_from_f16(p[i])); }

#endif

INLINE vf vf_zero(void) { return vf_set1(0.0f); }

/* Load up to VF_LANES floats: a whole vector where n allows it. */
INLINE vf vf_load_n(const float *p, int n) { return n >= VF_LANES ? vf_load(p) : vf_load_part(p, n); }
INLINE void vf_store_n(float *p, vf x, int n) {
    if (n >= VF_LANES) vf_store(p, x);
    else vf_store_part(p, x, n);
}

/* e^x to 2 units in the last place; 0 below -87.3, e^88.3 above that, NaN stays NaN.
 * x = n ln 2 + r with |r| <= ln 2 / 2, and a Taylor polynomial of degree 7 in r. */
INLINE vf vf_exp(vf x) {
    vf lowest = vf_set1(-87.3f);
    vf clamped = vf_min(vf_set1(88.3f), vf_max(lowest, x));
    vf n = vf_round(vf_mul(clamped, vf_set1(1.44269504f)));
    n = vf_min(vf_set1(127.0f), n);
    vf r = vf_fma(n, vf_set1(-0.693359375f), clamped);
    r = vf_fma(n, vf_set1(2.12194440e-4f), r);
    vf y = vf_fma(r, vf_set1(1.0f / 5040), vf_set1(1.0f / 720));
    y = vf_fma(y, r, vf_set1(1.0f / 120));
    y = vf_fma(y, r, vf_set1(1.0f / 24));
    y = vf_fma(y, r, vf_set1(1.0f / 6));
    y = vf_fma(y, r, vf_set1(0.5f));
    y = vf_fma(y, r, vf_set1(1.0f));
    y = vf_fma(y, r, vf_set1(1.0f));
    return vf_zero_below(x, lowest, vf_mul(y, vf_exp2_whole(n)));
}

#endif
