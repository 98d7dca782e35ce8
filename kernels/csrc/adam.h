// What the dispatcher of the Adam kernel hands to the instruction sets' loops.
#pragma once

#include <stdint.h>

namespace booster {

constexpr int NO_WORKING_COPY = 15;  // in place of a DType

// One parameter with what belongs to it, and what its count of steps makes of the settings.
struct AdamTensor {
    void* param;
    void* grad;
    float* exp_avg;
    float* exp_avg_sq;
    void* working_copy;
    int64_t numel;
    int param_dtype;
    int grad_dtype;
    int copy_dtype;
    float step_size;        // lr * sqrt(bias_correction2) / bias_correction1
    float eps;              // eps * sqrt(bias_correction2)
    uint64_t rounding_key;  // of the stochastic rounding: from the seed and the tensor's number
};

// What all tensors share.
struct AdamSettings {
    float multiplier;
    float beta2;
    float exp_avg_weight;     // 1 - beta1
    float exp_avg_sq_weight;  // 1 - beta2
    float l2_penalty;         // Adam's weight decay, which is part of the gradient
    float kept_share;         // AdamW's weight decay: what it leaves of a parameter
    bool zeroes_grads;
    bool rounds_stochastically;
    bool streams_copies;  // writes working copies past the caches
};

// Does one step on the elements begin <= i < end of a tensor; one such function per instruction set.
using AdamRange = void (*)(const AdamTensor& tensor, const AdamSettings& settings, int64_t begin, int64_t end);

}  // namespace booster
