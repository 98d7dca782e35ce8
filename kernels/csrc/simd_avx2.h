// 8 lanes with AVX2, FMA and F16C; the functions are documented in simd.h.
#pragma once

#include <immintrin.h>

namespace booster {
namespace BOOSTER_ISA {

constexpr int WIDTH = 8;
constexpr int VECTOR_BYTES = 32;

struct Vec {
    __m256 lanes;
};
struct UVec {
    __m256i lanes;
};

inline Vec set1(float x) { return {_mm256_set1_ps(x)}; }
inline Vec add(Vec a, Vec b) { return {_mm256_add_ps(a.lanes, b.lanes)}; }
inline Vec sub(Vec a, Vec b) { return {_mm256_sub_ps(a.lanes, b.lanes)}; }
inline Vec mul(Vec a, Vec b) { return {_mm256_mul_ps(a.lanes, b.lanes)}; }
inline Vec div(Vec a, Vec b) { return {_mm256_div_ps(a.lanes, b.lanes)}; }
inline Vec sqrt(Vec a) { return {_mm256_sqrt_ps(a.lanes)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.lanes, b.lanes, c.lanes)}; }

inline UVec set1_u32(uint32_t x) { return {_mm256_set1_epi32(static_cast<int>(x))}; }
inline UVec lane_numbers() { return {_mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0)}; }
inline UVec add(UVec a, UVec b) { return {_mm256_add_epi32(a.lanes, b.lanes)}; }
inline UVec exclusive_or(UVec a, UVec b) { return {_mm256_xor_si256(a.lanes, b.lanes)}; }
inline UVec mul_low(UVec a, UVec b) { return {_mm256_mullo_epi32(a.lanes, b.lanes)}; }
template <int count>
inline UVec shift_right(UVec a) {
    return {_mm256_srli_epi32(a.lanes, count)};
}

inline Vec widen_bf16(__m128i bits) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16))};
}
inline Vec widen_f16(__m128i bits) { return {_mm256_cvtph_ps(bits)}; }

// The rounding term is added below the 16 bits that are kept; inf and nan skip it, and a nan keeps a mantissa bit.
inline __m128i narrow_bf16(Vec v, __m256i rounding) {
    const __m256i bits = _mm256_castps_si256(v.lanes);
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(v.lanes, v.lanes, _CMP_UNORD_Q));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_andnot_si256(is_nan, rounding));
    const __m256i quiet = _mm256_and_si256(is_nan, _mm256_set1_epi32(0x400000));
    const __m256i upper = _mm256_srli_epi32(_mm256_or_si256(rounded, quiet), 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(upper), _mm256_extracti128_si256(upper, 1));
}
inline __m128i nearest_bf16(Vec v) {
    const __m256i last_bit = _mm256_srli_epi32(_mm256_slli_epi32(_mm256_castps_si256(v.lanes), 15), 31);
    return narrow_bf16(v, _mm256_add_epi32(last_bit, _mm256_set1_epi32(0x7fff)));
}
inline __m128i stochastic_bf16(Vec v, UVec random) { return narrow_bf16(v, _mm256_srli_epi32(random.lanes, 16)); }
inline __m128i nearest_f16(Vec v) { return _mm256_cvtps_ph(v.lanes, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

inline __m256i first_lanes(int count) { return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), lane_numbers().lanes); }

inline __m128i load_16bit(const uint16_t* from) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)); }
inline __m128i load_16bit_partial(const uint16_t* from, int count) {
    uint16_t buffer[WIDTH] = {};
    for (int i = 0; i < count; ++i) buffer[i] = from[i];
    return load_16bit(buffer);
}
inline void store_16bit(uint16_t* to, __m128i bits) { _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bits); }
inline void store_16bit_partial(uint16_t* to, __m128i bits, int count) {
    uint16_t buffer[WIDTH];
    store_16bit(buffer, bits);
    for (int i = 0; i < count; ++i) to[i] = buffer[i];
}
inline void stream_16bit(uint16_t* to, __m128i bits) { _mm_stream_si128(reinterpret_cast<__m128i*>(to), bits); }

inline Vec load(const float* from) { return {_mm256_loadu_ps(from)}; }
inline Vec load_partial(const float* from, int count) { return {_mm256_maskload_ps(from, first_lanes(count))}; }

inline void store(float* to, Vec v) { _mm256_storeu_ps(to, v.lanes); }
inline void store_partial(float* to, Vec v, int count) { _mm256_maskstore_ps(to, first_lanes(count), v.lanes); }

inline void stream(float* to, Vec v) { _mm256_stream_ps(to, v.lanes); }
inline void stream_fence() { _mm_sfence(); }

}  // namespace BOOSTER_ISA
}  // namespace booster
