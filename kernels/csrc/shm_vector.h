// What shm_vector.cpp is compiled to for every instruction set.
#pragma once

#include <stdint.h>

namespace booster {

// Formats that are reduced: those of simd.h, and three of integers.
enum ElementType : int {
    ELEMENT_FLOAT32 = 0,
    ELEMENT_BFLOAT16 = 1,
    ELEMENT_FLOAT16 = 2,
    ELEMENT_FLOAT64 = 3,
    ELEMENT_UINT8 = 4,
    ELEMENT_INT32 = 5,
    ELEMENT_INT64 = 6,
    NUM_ELEMENT_TYPES = 7
};

enum Operator : int { SUM = 0, MAX = 1 };

// One reduction of `num_terms` arrays, element by element, in the order of the terms and then what the output holds.
// 16-bit formats are summed in fp32 and rounded once. The output may be one of the terms. A nan makes a maximum nan.
struct Reduction {
    int element_type;
    int output_type;  // the same, or fp32 for sums of the 16-bit formats
    int reduction_operator;
    bool accumulates;  // the output's own values are the last term
    bool goes_past_caches;  // the output is neither a term nor read soon
};

#define BOOSTER_SHM_VECTOR(isa) \
    namespace isa {             \
    void reduce(const Reduction& what, const void* const* terms, int num_terms, void* output, int64_t count); \
    void copy_past_caches(void* to, const void* from, int64_t bytes); \
    }

#if defined(BOOSTER_ISA)
BOOSTER_SHM_VECTOR(BOOSTER_ISA)
#else
#if defined(BOOSTER_HAS_AVX512)
BOOSTER_SHM_VECTOR(avx512)
#endif
#if defined(BOOSTER_HAS_AVX2)
BOOSTER_SHM_VECTOR(avx2)
#endif
#if defined(BOOSTER_HAS_NEON)
BOOSTER_SHM_VECTOR(neon)
#else
BOOSTER_SHM_VECTOR(baseline)
#endif
#endif

}  // namespace booster
