// One pass of Adam over a range of a tensor, on one instruction set: everything is read and written once.
//
// The formula is that of torch's fused Adam, with two changes that save roundings: the square root of the second bias
// correction is part of step_size and eps, and the parameter is rounded once, by a fused multiply-add.
//
//     grad       = grad * multiplier + l2_penalty * param
//     exp_avg    = exp_avg + (1 - beta1) * (grad - exp_avg)
//     exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * grad * grad
//     param      = kept_share * param - step_size * exp_avg / (sqrt(exp_avg_sq) + eps)

#include "adam.h"
#include "simd.h"

namespace booster {
namespace BOOSTER_ISA {

// Valid lanes of a vector: all of them, or the first ones.
struct Whole {};
struct First {
    int count;
};

template <class Element>
inline Vec read(const Element* from, Whole) {
    return load(from);
}
template <class Element>
inline Vec read(const Element* from, First lanes) {
    return load_partial(from, lanes.count);
}
template <class Element>
inline void write(Element* to, Vec v, Whole) {
    store(to, v);
}
template <class Element>
inline void write(Element* to, Vec v, First lanes) {
    store_partial(to, v, lanes.count);
}
inline void write_stochastic(BFloat16* to, Vec v, UVec random, Whole) {
    store_16bit(&to->bits, stochastic_bf16(v, random));
}
inline void write_stochastic(BFloat16* to, Vec v, UVec random, First lanes) {
    store_16bit_partial(&to->bits, stochastic_bf16(v, random), lanes.count);
}

// The settings, broadcast to all lanes.
struct Constants {
    Vec multiplier, beta2, exp_avg_weight, exp_avg_sq_weight, l2_penalty, kept_share, minus_step_size, eps;
    UVec low_key, high_key;
    bool has_l2_penalty, is_near_exp_avg, zeroes_grads, rounds_stochastically, streams_copies;
};

// Note [Random numbers]: a hash of the lower 32 bits of the element's index and of two keys, which are derived from the
// seed, the tensor's index and the upper bits of the element's index. So they are independent of the order of
// evaluation. Constants and shifts are those of "lowbias32" (Chris Wellons, hash-prospector), with the second key mixed
// in half way, and of "splitmix64" (Sebastiano Vigna); adam_reference.py has the same hash.
inline UVec random_lanes(int64_t index, const Constants& c) {
    UVec x = exclusive_or(add(set1_u32(static_cast<uint32_t>(index)), lane_numbers()), c.low_key);
    x = mul_low(exclusive_or(x, shift_right<16>(x)), set1_u32(0x7feb352du));
    x = exclusive_or(x, c.high_key);
    x = mul_low(exclusive_or(x, shift_right<15>(x)), set1_u32(0x846ca68bu));
    return exclusive_or(x, shift_right<16>(x));
}

inline uint64_t mixed(uint64_t x) {
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

inline Constants constants_of(const AdamTensor& tensor, const AdamSettings& settings, int64_t begin) {
    const uint64_t key = mixed(mixed(tensor.rounding_key) + static_cast<uint64_t>(begin >> 32));
    Constants c;
    c.multiplier = set1(settings.multiplier);
    c.beta2 = set1(settings.beta2);
    // torch's lerp interpolates from the nearer end.
    c.is_near_exp_avg = settings.exp_avg_weight < 0.5f;
    c.exp_avg_weight = set1(c.is_near_exp_avg ? settings.exp_avg_weight : settings.exp_avg_weight - 1.0f);
    c.exp_avg_sq_weight = set1(settings.exp_avg_sq_weight);
    c.l2_penalty = set1(settings.l2_penalty);
    c.has_l2_penalty = settings.l2_penalty != 0.0f;
    c.kept_share = set1(settings.kept_share);
    c.minus_step_size = set1(-tensor.step_size);
    c.eps = set1(tensor.eps);
    c.low_key = set1_u32(static_cast<uint32_t>(key));
    c.high_key = set1_u32(static_cast<uint32_t>(key >> 32));
    c.zeroes_grads = settings.zeroes_grads;
    c.rounds_stochastically = settings.rounds_stochastically;
    c.streams_copies = settings.streams_copies && !settings.rounds_stochastically;
    return c;
}

// Parameter and working copy of the same dtype get the same bits.
template <class Element, class Lanes>
inline void write_result(Element* to, Vec v, int64_t, Lanes lanes, const Constants&) {
    write(to, v, lanes);
}
template <class Lanes>
inline void write_result(BFloat16* to, Vec v, int64_t index, Lanes lanes, const Constants& c) {
    if (c.rounds_stochastically) {
        write_stochastic(to, v, random_lanes(index, c), lanes);
    } else {
        write(to, v, lanes);
    }
}

template <class Element, class Lanes>
inline void write_copy(Element* copy, Vec v, int64_t index, Lanes lanes, const Constants& c) {
    write_result(copy + index, v, index, lanes, c);
}
// Note [Memory]: the loop is memory-bound. Software prefetch gains nothing: the hardware detects the streams, and with
// two threads prefetching was 10% slower. The working copy is the only tensor that is written without being
// read; non-temporal stores avoid fetching its old content, which saves 6%. If all tensors may fit into the caches,
// normal stores keep the copy there for the next forward pass.
template <class Element>
inline void write_copy(Element* copy, Vec v, int64_t index, Whole lanes, const Constants& c) {
    const bool is_aligned = reinterpret_cast<uintptr_t>(copy + index) % (WIDTH * sizeof(Element)) == 0;
    if (c.streams_copies && is_aligned) {
        stream(copy + index, v);
    } else {
        write_result(copy + index, v, index, lanes, c);
    }
}
struct NoCopy {};
template <class Lanes>
inline void write_copy(NoCopy*, Vec, int64_t, Lanes, const Constants&) {}
inline void write_copy(NoCopy*, Vec, int64_t, Whole, const Constants&) {}

template <class Param, class Grad, class Copy>
struct Loop {
    Param* param;
    Grad* grad;
    float* exp_avg;
    float* exp_avg_sq;
    Copy* working_copy;
    Constants c;

    template <class Lanes>
    inline void step(int64_t i, Lanes lanes) const {
        const Vec old_param = read(param + i, lanes);
        const Vec old_exp_avg = read(exp_avg + i, lanes);
        Vec g = mul(read(grad + i, lanes), c.multiplier);
        if (c.has_l2_penalty) g = fma(c.l2_penalty, old_param, g);
        const Vec difference = sub(g, old_exp_avg);
        const Vec new_exp_avg = c.is_near_exp_avg ? fma(c.exp_avg_weight, difference, old_exp_avg)
                                                  : fma(c.exp_avg_weight, difference, g);
        const Vec squared = mul(mul(c.exp_avg_sq_weight, g), g);
        const Vec new_exp_avg_sq = fma(c.beta2, read(exp_avg_sq + i, lanes), squared);
        const Vec change = div(mul(c.minus_step_size, new_exp_avg), add(sqrt(new_exp_avg_sq), c.eps));
        const Vec new_param = fma(c.kept_share, old_param, change);
        write(exp_avg + i, new_exp_avg, lanes);
        write(exp_avg_sq + i, new_exp_avg_sq, lanes);
        write_result(param + i, new_param, i, lanes, c);
        write_copy(working_copy, new_param, i, lanes, c);
        if (c.zeroes_grads) write(grad + i, set1(0.0f), lanes);
    }

    inline void run(int64_t begin, int64_t end) const {
        int64_t i = begin;
        for (; i + WIDTH <= end; i += WIDTH) step(i, Whole{});
        if (i < end) step(i, First{static_cast<int>(end - i)});
        stream_fence();
    }
};

template <class Param, class Grad, class Copy>
void run_loop(const AdamTensor& t, const AdamSettings& settings, int64_t begin, int64_t end) {
    Loop<Param, Grad, Copy> loop;
    loop.param = static_cast<Param*>(t.param);
    loop.grad = static_cast<Grad*>(t.grad);
    loop.exp_avg = t.exp_avg;
    loop.exp_avg_sq = t.exp_avg_sq;
    loop.working_copy = static_cast<Copy*>(t.working_copy);
    loop.c = constants_of(t, settings, begin);
    loop.run(begin, end);
}

template <class Param, class Grad>
void with_copy(const AdamTensor& t, const AdamSettings& settings, int64_t begin, int64_t end) {
    switch (t.copy_dtype) {
        case FLOAT32: return run_loop<Param, Grad, float>(t, settings, begin, end);
        case BFLOAT16: return run_loop<Param, Grad, BFloat16>(t, settings, begin, end);
        case FLOAT16: return run_loop<Param, Grad, Float16>(t, settings, begin, end);
        default: return run_loop<Param, Grad, NoCopy>(t, settings, begin, end);
    }
}

template <class Param>
void with_grad(const AdamTensor& t, const AdamSettings& settings, int64_t begin, int64_t end) {
    switch (t.grad_dtype) {
        case FLOAT32: return with_copy<Param, float>(t, settings, begin, end);
        case BFLOAT16: return with_copy<Param, BFloat16>(t, settings, begin, end);
        default: return with_copy<Param, Float16>(t, settings, begin, end);
    }
}

void adam_range(const AdamTensor& t, const AdamSettings& settings, int64_t begin, int64_t end) {
    switch (t.param_dtype) {
        case FLOAT32: return with_grad<float>(t, settings, begin, end);
        case BFLOAT16: return with_grad<BFloat16>(t, settings, begin, end);
        default: return with_grad<Float16>(t, settings, begin, end);
    }
}

}  // namespace BOOSTER_ISA
}  // namespace booster
