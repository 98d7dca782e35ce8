// One lane in plain C++, for CPUs without a supported vector unit; the functions are documented in simd.h.
#pragma once

namespace booster {
namespace BOOSTER_ISA {

constexpr int WIDTH = 1;
constexpr int VECTOR_BYTES = 4;

struct Vec {
    float lane;
};
struct UVec {
    uint32_t lane;
};

inline Vec set1(float x) { return {x}; }
inline Vec add(Vec a, Vec b) { return {a.lane + b.lane}; }
inline Vec sub(Vec a, Vec b) { return {a.lane - b.lane}; }
inline Vec mul(Vec a, Vec b) { return {a.lane * b.lane}; }
inline Vec div(Vec a, Vec b) { return {a.lane / b.lane}; }
inline Vec sqrt(Vec a) { return {__builtin_sqrtf(a.lane)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {__builtin_fmaf(a.lane, b.lane, c.lane)}; }

inline UVec set1_u32(uint32_t x) { return {x}; }
inline UVec lane_numbers() { return {0}; }
inline UVec add(UVec a, UVec b) { return {a.lane + b.lane}; }
inline UVec exclusive_or(UVec a, UVec b) { return {a.lane ^ b.lane}; }
inline UVec mul_low(UVec a, UVec b) { return {a.lane * b.lane}; }
template <int count>
inline UVec shift_right(UVec a) {
    return {a.lane >> count};
}

inline uint32_t bits_of(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, sizeof bits);
    return bits;
}
inline float float_of(uint32_t bits) {
    float x;
    __builtin_memcpy(&x, &bits, sizeof x);
    return x;
}
inline bool is_nan(uint32_t bits) { return (bits & 0x7fffffffu) > 0x7f800000u; }

// The rounding term is added below the 16 bits that are kept; inf and nan skip it, and a nan keeps a mantissa bit.
inline uint16_t narrow_bf16(Vec v, uint32_t rounding) {
    const uint32_t bits = bits_of(v.lane);
    return static_cast<uint16_t>((is_nan(bits) ? bits | 0x400000u : bits + rounding) >> 16);
}
inline uint16_t nearest_bf16(Vec v) { return narrow_bf16(v, ((bits_of(v.lane) >> 16) & 1u) + 0x7fffu); }
inline uint16_t stochastic_bf16(Vec v, UVec random) { return narrow_bf16(v, random.lane >> 16); }
inline Vec widen_bf16(uint16_t bits) { return {float_of(static_cast<uint32_t>(bits) << 16)}; }

// Shifts right by `count` in 1..31 and rounds to nearest even.
inline uint32_t shift_to_nearest(uint32_t value, uint32_t count) {
    const uint32_t kept = value >> count;
    const uint32_t cut = value & ((1u << count) - 1u);
    const uint32_t half = 1u << (count - 1u);
    return kept + ((cut > half || (cut == half && (kept & 1u))) ? 1u : 0u);
}
// In integers only, as the hardware conversion keeps fp16 denormals regardless of the control word.
inline uint16_t nearest_f16(Vec v) {
    const uint32_t bits = bits_of(v.lane);
    const uint32_t magnitude = bits & 0x7fffffffu;
    uint32_t result;
    if (is_nan(bits)) {
        result = 0x7e00u | ((magnitude >> 13) & 0x1ffu);
    } else if (magnitude >= 0x477ff000u) {  // 65520, half way from the largest number to the next
        result = 0x7c00u;
    } else if (magnitude >= 0x38800000u) {  // 2^-14, the smallest normal number
        result = shift_to_nearest(magnitude - 0x38000000u, 13);
    } else if (magnitude >= 0x33000000u) {  // 2^-25, half the smallest number
        result = shift_to_nearest((magnitude & 0x7fffffu) | 0x800000u, 126u - (magnitude >> 23));
    } else {
        result = 0;
    }
    return static_cast<uint16_t>((bits >> 16 & 0x8000u) | result);
}
inline Vec widen_f16(uint16_t bits) {
    const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
    const uint32_t magnitude = bits & 0x7fffu;
    if (magnitude > 0x7c00u) return {float_of(sign | 0x7fc00000u | magnitude << 13)};
    if (magnitude == 0x7c00u) return {float_of(sign | 0x7f800000u)};
    if (magnitude >= 0x400u) return {float_of(sign | ((magnitude << 13) + 0x38000000u))};
    // Denormal, in units of 2^-24.
    const float value = static_cast<float>(magnitude) * 0x1p-24f;
    return {sign ? -value : value};
}

inline uint16_t load_16bit(const uint16_t* from) { return *from; }
inline uint16_t load_16bit_partial(const uint16_t* from, int count) { return count ? *from : uint16_t{0}; }
inline void store_16bit(uint16_t* to, uint16_t bits) { *to = bits; }
inline void store_16bit_partial(uint16_t* to, uint16_t bits, int count) {
    if (count) *to = bits;
}
inline void stream_16bit(uint16_t* to, uint16_t bits) { *to = bits; }

inline Vec load(const float* from) { return {*from}; }
inline Vec load_partial(const float* from, int count) { return {count ? *from : 0.0f}; }

inline void store(float* to, Vec v) { *to = v.lane; }
inline void store_partial(float* to, Vec v, int count) {
    if (count) store(to, v);
}

inline void stream(float* to, Vec v) { store(to, v); }
inline void stream_fence() {}

}  // namespace BOOSTER_ISA
}  // namespace booster
