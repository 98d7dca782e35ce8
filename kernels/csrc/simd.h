// One vector of fp32 lanes, with the same operations and the same bits on every instruction set.
//
// A vector source includes this file and is compiled once per instruction set, each time with BOOSTER_ISA set to the
// name of a namespace and one of BOOSTER_ISA_AVX512, _AVX2, _NEON or _BASELINE defined. Each simd_<name>.h defines, in
// namespace booster::BOOSTER_ISA,
//
//     WIDTH, VECTOR_BYTES                      lanes of a Vec, and the bytes of that many fp32
//     Vec, set1(x)                             fp32 lanes
//     load(p), load_partial(p, count)          from float*; the lanes from `count` on are 0; no alignment needed
//     store(p, v), store_partial(p, v, count)  to float*; only the first `count` lanes
//     stream(p, v)                             non-temporal store; p aligned to the stored size; then stream_fence()
//     load_16bit, store_16bit, stream_16bit    likewise (+ _partial), of uint16_t* and a vector of 16-bit lanes
//     widen_bf16, widen_f16                    16-bit lanes to fp32, which is exact
//     nearest_bf16, nearest_f16                to 16-bit lanes, rounded to nearest even; denormals stay, nan stays nan
//     stochastic_bf16(v, random)               to 16-bit lanes, rounded up with the probability of the cut fraction
//     add, sub, mul, div, sqrt, fma(a, b, c) = a * b + c, rounded once
//     UVec, set1_u32(x), lane_numbers(), add, exclusive_or, mul_low, shift_right<count>(v)   uint32 lanes, wrapping
//
// and this file adds overloads of load, store and stream for BFloat16* and Float16*, for templates.
//
// An element's result must depend neither on its position (body or tail, thread) nor on the instruction set. So every
// operation above is the correctly rounded IEEE one under the thread's control word (which selects denormal handling),
// and kernels use only these operations. Compile with -ffp-contract=off, so that the compiler fuses no others.
//
// The linker merges inline functions of the same name, so a copy with AVX-512 instructions could replace the one that
// older CPUs need. Hence all code of a vector source is in its instruction set's namespace, and calls no inline
// functions or templates from elsewhere, the standard library included.
#pragma once

#include <stdint.h>

namespace booster {

// Element type codes in the interface to Python.
enum DType : int { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2, FLOAT64 = 3 };

// 16-bit elements; distinct types, for overloads.
struct BFloat16 {
    uint16_t bits;
};
struct Float16 {
    uint16_t bits;
};

}  // namespace booster

#if defined(BOOSTER_ISA_AVX512)
#include "simd_avx512.h"
#elif defined(BOOSTER_ISA_AVX2)
#include "simd_avx2.h"
#elif defined(BOOSTER_ISA_NEON)
#include "simd_neon.h"
#elif defined(BOOSTER_ISA_BASELINE)
#include "simd_baseline.h"
#else
#error "define BOOSTER_ISA and one of BOOSTER_ISA_AVX512, BOOSTER_ISA_AVX2, BOOSTER_ISA_NEON, BOOSTER_ISA_BASELINE"
#endif

namespace booster {
namespace BOOSTER_ISA {

inline Vec load(const BFloat16* from) { return widen_bf16(load_16bit(&from->bits)); }
inline Vec load(const Float16* from) { return widen_f16(load_16bit(&from->bits)); }
inline Vec load_partial(const BFloat16* from, int count) { return widen_bf16(load_16bit_partial(&from->bits, count)); }
inline Vec load_partial(const Float16* from, int count) { return widen_f16(load_16bit_partial(&from->bits, count)); }

inline void store(BFloat16* to, Vec v) { store_16bit(&to->bits, nearest_bf16(v)); }
inline void store(Float16* to, Vec v) { store_16bit(&to->bits, nearest_f16(v)); }
inline void store_partial(BFloat16* to, Vec v, int count) { store_16bit_partial(&to->bits, nearest_bf16(v), count); }
inline void store_partial(Float16* to, Vec v, int count) { store_16bit_partial(&to->bits, nearest_f16(v), count); }
inline void stream(BFloat16* to, Vec v) { stream_16bit(&to->bits, nearest_bf16(v)); }
inline void stream(Float16* to, Vec v) { stream_16bit(&to->bits, nearest_f16(v)); }

// Prefetches the cache line of an address, which may be unmapped.
inline void prefetch(const void* address) { __builtin_prefetch(address, 0, 3); }

}  // namespace BOOSTER_ISA
}  // namespace booster
