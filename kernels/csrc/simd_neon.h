// 4 lanes with NEON on 64-bit ARM; the functions are documented in simd.h.
#pragma once

#include <arm_neon.h>

namespace booster {
namespace BOOSTER_ISA {

constexpr int WIDTH = 4;
constexpr int VECTOR_BYTES = 16;

struct Vec {
    float32x4_t lanes;
};
struct UVec {
    uint32x4_t lanes;
};

inline Vec set1(float x) { return {vdupq_n_f32(x)}; }
inline Vec add(Vec a, Vec b) { return {vaddq_f32(a.lanes, b.lanes)}; }
inline Vec sub(Vec a, Vec b) { return {vsubq_f32(a.lanes, b.lanes)}; }
inline Vec mul(Vec a, Vec b) { return {vmulq_f32(a.lanes, b.lanes)}; }
inline Vec div(Vec a, Vec b) { return {vdivq_f32(a.lanes, b.lanes)}; }
inline Vec sqrt(Vec a) { return {vsqrtq_f32(a.lanes)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {vfmaq_f32(c.lanes, a.lanes, b.lanes)}; }

inline UVec set1_u32(uint32_t x) { return {vdupq_n_u32(x)}; }
inline UVec lane_numbers() {
    const uint32_t numbers[WIDTH] = {0, 1, 2, 3};
    return {vld1q_u32(numbers)};
}
inline UVec add(UVec a, UVec b) { return {vaddq_u32(a.lanes, b.lanes)}; }
inline UVec exclusive_or(UVec a, UVec b) { return {veorq_u32(a.lanes, b.lanes)}; }
inline UVec mul_low(UVec a, UVec b) { return {vmulq_u32(a.lanes, b.lanes)}; }
template <int count>
inline UVec shift_right(UVec a) {
    return {vshrq_n_u32(a.lanes, count)};
}

inline Vec widen_bf16(uint16x4_t bits) { return {vreinterpretq_f32_u32(vshll_n_u16(bits, 16))}; }

// The rounding term is added below the 16 bits that are kept; inf and nan skip it, and a nan keeps a mantissa bit.
inline uint16x4_t narrow_bf16(Vec v, uint32x4_t rounding) {
    const uint32x4_t bits = vreinterpretq_u32_f32(v.lanes);
    const uint32x4_t rounded = vaddq_u32(bits, rounding);
    const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
    const uint32x4_t is_number = vceqq_f32(v.lanes, v.lanes);
    return vshrn_n_u32(vbslq_u32(is_number, rounded, quiet), 16);
}
inline uint16x4_t nearest_bf16(Vec v) {
    const uint32x4_t last_bit = vshrq_n_u32(vshlq_n_u32(vreinterpretq_u32_f32(v.lanes), 15), 31);
    return narrow_bf16(v, vaddq_u32(last_bit, vdupq_n_u32(0x7fff)));
}
inline uint16x4_t stochastic_bf16(Vec v, UVec random) { return narrow_bf16(v, vshrq_n_u32(random.lanes, 16)); }
inline uint16x4_t nearest_f16(Vec v) { return vreinterpret_u16_f16(vcvt_f16_f32(v.lanes)); }
inline Vec widen_f16(uint16x4_t bits) { return {vcvt_f32_f16(vreinterpret_f16_u16(bits))}; }

inline uint16x4_t load_16bit(const uint16_t* from) { return vld1_u16(from); }
inline uint16x4_t load_16bit_partial(const uint16_t* from, int count) {
    uint16_t buffer[WIDTH] = {};
    for (int i = 0; i < count; ++i) buffer[i] = from[i];
    return load_16bit(buffer);
}
inline void store_16bit(uint16_t* to, uint16x4_t bits) { vst1_u16(to, bits); }
inline void store_16bit_partial(uint16_t* to, uint16x4_t bits, int count) {
    uint16_t buffer[WIDTH];
    store_16bit(buffer, bits);
    for (int i = 0; i < count; ++i) to[i] = buffer[i];
}

inline Vec load(const float* from) { return {vld1q_f32(from)}; }
inline Vec load_partial(const float* from, int count) {
    float buffer[WIDTH] = {};
    for (int i = 0; i < count; ++i) buffer[i] = from[i];
    return load(buffer);
}

inline void store(float* to, Vec v) { vst1q_f32(to, v.lanes); }
inline void store_partial(float* to, Vec v, int count) {
    float buffer[WIDTH];
    store(buffer, v);
    for (int i = 0; i < count; ++i) to[i] = buffer[i];
}

// There is no intrinsic for non-temporal stores, and these CPUs detect streams of full lines.
inline void stream(float* to, Vec v) { store(to, v); }
inline void stream_16bit(uint16_t* to, uint16x4_t bits) { store_16bit(to, bits); }
inline void stream_fence() {}

}  // namespace BOOSTER_ISA
}  // namespace booster
