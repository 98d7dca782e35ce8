// 16 lanes with AVX-512 (F, BW, DQ, VL) and F16C; the functions are documented in simd.h.
#pragma once

// gcc 12 warns about undefined lanes inside of its intrinsics (gcc bug 105593).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include <immintrin.h>

namespace booster {
namespace BOOSTER_ISA {

constexpr int WIDTH = 16;
constexpr int VECTOR_BYTES = 64;

struct Vec {
    __m512 lanes;
};
struct UVec {
    __m512i lanes;
};

inline __mmask16 first_lanes(int count) { return static_cast<__mmask16>((1u << count) - 1u); }

inline Vec set1(float x) { return {_mm512_set1_ps(x)}; }
inline Vec add(Vec a, Vec b) { return {_mm512_add_ps(a.lanes, b.lanes)}; }
inline Vec sub(Vec a, Vec b) { return {_mm512_sub_ps(a.lanes, b.lanes)}; }
inline Vec mul(Vec a, Vec b) { return {_mm512_mul_ps(a.lanes, b.lanes)}; }
inline Vec div(Vec a, Vec b) { return {_mm512_div_ps(a.lanes, b.lanes)}; }
inline Vec sqrt(Vec a) { return {_mm512_sqrt_ps(a.lanes)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.lanes, b.lanes, c.lanes)}; }

inline UVec set1_u32(uint32_t x) { return {_mm512_set1_epi32(static_cast<int>(x))}; }
inline UVec lane_numbers() { return {_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0)}; }
inline UVec add(UVec a, UVec b) { return {_mm512_add_epi32(a.lanes, b.lanes)}; }
inline UVec exclusive_or(UVec a, UVec b) { return {_mm512_xor_si512(a.lanes, b.lanes)}; }
inline UVec mul_low(UVec a, UVec b) { return {_mm512_mullo_epi32(a.lanes, b.lanes)}; }
template <int count>
inline UVec shift_right(UVec a) {
    return {_mm512_srli_epi32(a.lanes, count)};
}

inline Vec widen_bf16(__m256i bits) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
}
inline Vec widen_f16(__m256i bits) { return {_mm512_cvtph_ps(bits)}; }

// The rounding term is added below the 16 bits that are kept; inf and nan skip it, and a nan keeps a mantissa bit.
inline __m256i narrow_bf16(Vec v, __m512i rounding) {
    const __m512i bits = _mm512_castps_si512(v.lanes);
    const __m512i rounded = _mm512_add_epi32(bits, rounding);
    const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    const __mmask16 is_nan = _mm512_cmp_ps_mask(v.lanes, v.lanes, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, is_nan, quiet), 16));
}
inline __m256i nearest_bf16(Vec v) {
    const __m512i last_bit = _mm512_srli_epi32(_mm512_slli_epi32(_mm512_castps_si512(v.lanes), 15), 31);
    return narrow_bf16(v, _mm512_add_epi32(last_bit, _mm512_set1_epi32(0x7fff)));
}
inline __m256i stochastic_bf16(Vec v, UVec random) { return narrow_bf16(v, _mm512_srli_epi32(random.lanes, 16)); }
inline __m256i nearest_f16(Vec v) { return _mm512_cvtps_ph(v.lanes, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

inline __m256i load_16bit(const uint16_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
inline __m256i load_16bit_partial(const uint16_t* from, int count) {
    return _mm256_maskz_loadu_epi16(first_lanes(count), from);
}
inline void store_16bit(uint16_t* to, __m256i bits) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), bits); }
inline void store_16bit_partial(uint16_t* to, __m256i bits, int count) {
    _mm256_mask_storeu_epi16(to, first_lanes(count), bits);
}
inline void stream_16bit(uint16_t* to, __m256i bits) { _mm256_stream_si256(reinterpret_cast<__m256i*>(to), bits); }

inline Vec load(const float* from) { return {_mm512_loadu_ps(from)}; }
inline Vec load_partial(const float* from, int count) { return {_mm512_maskz_loadu_ps(first_lanes(count), from)}; }

inline void store(float* to, Vec v) { _mm512_storeu_ps(to, v.lanes); }
inline void store_partial(float* to, Vec v, int count) { _mm512_mask_storeu_ps(to, first_lanes(count), v.lanes); }

inline void stream(float* to, Vec v) { _mm512_stream_ps(to, v.lanes); }
inline void stream_fence() { _mm_sfence(); }

}  // namespace BOOSTER_ISA
}  // namespace booster
