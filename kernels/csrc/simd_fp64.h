// Vectors of fp64 lanes, widened from narrower types, which is exact. For vector sources; see simd.h.
//
//     WIDE_WIDTH                 lanes of a Wide
//     widen(p)                   WIDE_WIDTH elements from p on, of float*, BFloat16* or Float16*; no alignment needed
//     first_half(v), last_half(v)    the lanes of a Vec; the last half of one lane is zero
//     zero(), add(a, b)
//     add_square(s, v)           s + v * v; the square of a widened value is exact, fused or not
//     store(p, v)                to double*
#pragma once

#include "simd.h"

namespace booster {
namespace BOOSTER_ISA {

#if defined(BOOSTER_ISA_AVX512)

constexpr int WIDE_WIDTH = 8;
struct Wide {
    __m512d lanes;
};
inline __m128i eight_of_16bit(const uint16_t* from) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)); }
inline Wide widen(const float* from) { return {_mm512_cvtps_pd(_mm256_loadu_ps(from))}; }
inline Wide widen(const BFloat16* from) {
    const __m256i bits = _mm256_slli_epi32(_mm256_cvtepu16_epi32(eight_of_16bit(&from->bits)), 16);
    return {_mm512_cvtps_pd(_mm256_castsi256_ps(bits))};
}
inline Wide widen(const Float16* from) { return {_mm512_cvtps_pd(_mm256_cvtph_ps(eight_of_16bit(&from->bits)))}; }
inline Wide first_half(Vec v) { return {_mm512_cvtps_pd(_mm512_castps512_ps256(v.lanes))}; }
inline Wide last_half(Vec v) { return {_mm512_cvtps_pd(_mm512_extractf32x8_ps(v.lanes, 1))}; }
inline Wide zero() { return {_mm512_setzero_pd()}; }
inline Wide add(Wide a, Wide b) { return {_mm512_add_pd(a.lanes, b.lanes)}; }
inline Wide add_square(Wide sum, Wide v) { return {_mm512_fmadd_pd(v.lanes, v.lanes, sum.lanes)}; }
inline void store(double* to, Wide v) { _mm512_storeu_pd(to, v.lanes); }

#elif defined(BOOSTER_ISA_AVX2)

constexpr int WIDE_WIDTH = 4;
struct Wide {
    __m256d lanes;
};
inline __m128i four_of_16bit(const uint16_t* from) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)); }
inline Wide widen(const float* from) { return {_mm256_cvtps_pd(_mm_loadu_ps(from))}; }
inline Wide widen(const BFloat16* from) {
    return {_mm256_cvtps_pd(_mm_castsi128_ps(_mm_slli_epi32(_mm_cvtepu16_epi32(four_of_16bit(&from->bits)), 16)))};
}
inline Wide widen(const Float16* from) { return {_mm256_cvtps_pd(_mm_cvtph_ps(four_of_16bit(&from->bits)))}; }
inline Wide first_half(Vec v) { return {_mm256_cvtps_pd(_mm256_castps256_ps128(v.lanes))}; }
inline Wide last_half(Vec v) { return {_mm256_cvtps_pd(_mm256_extractf128_ps(v.lanes, 1))}; }
inline Wide zero() { return {_mm256_setzero_pd()}; }
inline Wide add(Wide a, Wide b) { return {_mm256_add_pd(a.lanes, b.lanes)}; }
inline Wide add_square(Wide sum, Wide v) { return {_mm256_fmadd_pd(v.lanes, v.lanes, sum.lanes)}; }
inline void store(double* to, Wide v) { _mm256_storeu_pd(to, v.lanes); }

#elif defined(BOOSTER_ISA_NEON)

constexpr int WIDE_WIDTH = 2;
struct Wide {
    float64x2_t lanes;
};
inline uint16x4_t two_of_16bit(const uint16_t* from) {
    uint32_t bits;
    __builtin_memcpy(&bits, from, sizeof bits);
    return vreinterpret_u16_u32(vdup_n_u32(bits));
}
inline Wide widen(const float* from) { return {vcvt_f64_f32(vld1_f32(from))}; }
inline Wide widen(const BFloat16* from) {
    const uint32x4_t bits = vshll_n_u16(two_of_16bit(&from->bits), 16);
    return {vcvt_f64_f32(vget_low_f32(vreinterpretq_f32_u32(bits)))};
}
inline Wide widen(const Float16* from) {
    return {vcvt_f64_f32(vget_low_f32(vcvt_f32_f16(vreinterpret_f16_u16(two_of_16bit(&from->bits)))))};
}
inline Wide first_half(Vec v) { return {vcvt_f64_f32(vget_low_f32(v.lanes))}; }
inline Wide last_half(Vec v) { return {vcvt_f64_f32(vget_high_f32(v.lanes))}; }
inline Wide zero() { return {vdupq_n_f64(0.0)}; }
inline Wide add(Wide a, Wide b) { return {vaddq_f64(a.lanes, b.lanes)}; }
inline Wide add_square(Wide sum, Wide v) { return {vfmaq_f64(sum.lanes, v.lanes, v.lanes)}; }
inline void store(double* to, Wide v) { vst1q_f64(to, v.lanes); }

#else

constexpr int WIDE_WIDTH = 1;
struct Wide {
    double lane;
};
inline Wide widen(const float* from) { return {*from}; }
inline Wide widen(const BFloat16* from) { return {load(from).lane}; }
inline Wide widen(const Float16* from) { return {load(from).lane}; }
inline Wide first_half(Vec v) { return {v.lane}; }
inline Wide last_half(Vec) { return {0.0}; }
inline Wide zero() { return {0.0}; }
inline Wide add(Wide a, Wide b) { return {a.lane + b.lane}; }
inline Wide add_square(Wide sum, Wide v) { return {sum.lane + v.lane * v.lane}; }
inline void store(double* to, Wide v) { *to = v.lane; }

#endif

}  // namespace BOOSTER_ISA
}  // namespace booster
