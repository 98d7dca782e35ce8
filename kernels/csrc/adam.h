// Interface between the dispatcher of the Adam kernel and its loops for each instruction set.
#pragma once

#include <stdint.h>

namespace booster {

constexpr int NO_WORKING_COPY = 15;  // in place of a DType

// One parameter with its tensors, and the settings with the bias correction of its step number.
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
    uint64_t rounding_key;  // of the stochastic rounding: from the seed and the tensor's index
};

// Settings shared by all tensors.
struct AdamSettings {
    float multiplier;
    float beta2;
    float exp_avg_weight;     // 1 - beta1
    float exp_avg_sq_weight;  // 1 - beta2
    float l2_penalty;         // Adam's weight decay, which is part of the gradient
    float kept_share;         // 1 - lr * weight_decay with AdamW, else 1
    bool zeroes_grads;
    bool rounds_stochastically;
    bool streams_copies;  // non-temporal stores of working copies
};

// Updates the elements begin <= i < end of a tensor; one such function per instruction set.
using AdamRange = void (*)(const AdamTensor& tensor, const AdamSettings& settings, int64_t begin, int64_t end);

}  // namespace booster
