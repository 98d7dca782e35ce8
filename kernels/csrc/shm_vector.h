// Interface of shm_vector.cpp, which is compiled for every instruction set.
#pragma once

#include <stdint.h>

namespace booster {

// dtypes with reductions: those of simd.h, fp64 and three integer types.
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

// Elementwise reduction of `num_terms` arrays, in the order of the terms, then the output's old values. 16-bit dtypes
// are summed in fp32 and rounded once. The output may alias one of the terms. A nan makes a maximum nan.
struct Reduction {
    int element_type;
    int output_type;  // the same, or fp32 for sums of 16-bit dtypes
    int reduction_operator;
    bool accumulates;  // the output's old values are the last term
    bool goes_past_caches;  // non-temporal stores: the output is neither a term nor read soon
};

}  // namespace booster
