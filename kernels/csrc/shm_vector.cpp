// Elementwise sums and maxima of the ranks' slots, and copies with non-temporal stores.
#include <string.h>

#include "shm_vector.h"
#include "simd.h"

namespace booster {
namespace BOOSTER_ISA {
namespace {

constexpr int UNROLL = 4;      // vectors in flight, to hide the latency of additions
constexpr int BLOCK = 256;     // elements of the plain loops, which the compiler vectorizes

template <class T>
const T* term_at(const void* const* terms, int term, int64_t element) {
    return static_cast<const T*>(terms[term]) + element;
}

// ---- Sums of floats, in fp32

template <class Source, class Target>
void sum_tail(const void* const* terms, int num_terms, Target* to, int64_t from, int count, bool accumulates) {
    Vec total = load_partial(term_at<Source>(terms, 0, from), count);
    for (int term = 1; term < num_terms; ++term) {
        total = add(total, load_partial(term_at<Source>(terms, term, from), count));
    }
    if (accumulates) total = add(total, load_partial(to + from, count));
    store_partial(to + from, total, count);
}

template <class Source, class Target, bool STREAMS>
void sum(const void* const* terms, int num_terms, Target* to, int64_t count, bool accumulates) {
    constexpr int STRIDE = UNROLL * WIDTH;
    int64_t at = 0;
    for (; at + STRIDE <= count; at += STRIDE) {
        Vec total[UNROLL];
        for (int i = 0; i < UNROLL; ++i) total[i] = load(term_at<Source>(terms, 0, at + i * WIDTH));
        for (int term = 1; term < num_terms; ++term) {
            const Source* from = term_at<Source>(terms, term, at);
            for (int i = 0; i < UNROLL; ++i) total[i] = add(total[i], load(from + i * WIDTH));
        }
        if (accumulates) {
            for (int i = 0; i < UNROLL; ++i) total[i] = add(total[i], load(to + at + i * WIDTH));
        }
        for (int i = 0; i < UNROLL; ++i) {
            if (STREAMS) stream(to + at + i * WIDTH, total[i]);
            else store(to + at + i * WIDTH, total[i]);
        }
    }
    if (STREAMS) stream_fence();
    for (; at < count; at += WIDTH) {
        const int left = count - at < WIDTH ? static_cast<int>(count - at) : WIDTH;
        sum_tail<Source>(terms, num_terms, to, at, left, accumulates);
    }
}

template <class Source, class Target>
void sum(const Reduction& what, const void* const* terms, int num_terms, void* output, int64_t count) {
    const bool is_aligned = reinterpret_cast<uintptr_t>(output) % VECTOR_BYTES == 0;
    Target* to = static_cast<Target*>(output);
    if (what.goes_past_caches && is_aligned && !what.accumulates) {
        sum<Source, Target, true>(terms, num_terms, to, count, false);
    } else {
        sum<Source, Target, false>(terms, num_terms, to, count, what.accumulates);
    }
}

// ---- Everything else, in plain C++

template <class T>
T combined(T a, T b, int reduction_operator) {
    if (reduction_operator == SUM) return static_cast<T>(a + b);
    return (a < b) | (b != b) ? b : a;
}

template <class T>
void combine(T* total, const T* other, int count, int reduction_operator) {
    if (reduction_operator == SUM) {
        for (int i = 0; i < count; ++i) total[i] = combined(total[i], other[i], SUM);
    } else {
        for (int i = 0; i < count; ++i) total[i] = combined(total[i], other[i], MAX);
    }
}

template <class T>
void reduce_plainly(const Reduction& what, const void* const* terms, int num_terms, void* output, int64_t count) {
    T total[BLOCK];
    T* to = static_cast<T*>(output);
    for (int64_t at = 0; at < count; at += BLOCK) {
        const int length = count - at < BLOCK ? static_cast<int>(count - at) : BLOCK;
        memcpy(total, term_at<T>(terms, 0, at), sizeof(T) * length);
        for (int term = 1; term < num_terms; ++term) {
            combine(total, term_at<T>(terms, term, at), length, what.reduction_operator);
        }
        if (what.accumulates) combine(total, to + at, length, what.reduction_operator);
        memcpy(to + at, total, sizeof(T) * length);
    }
}

template <class From, class To>
void convert(const From* from, To* to, int count) {
    for (int i = 0; i < count; i += WIDTH) {
        const int left = count - i < WIDTH ? count - i : WIDTH;
        store_partial(to + i, load_partial(from + i, left), left);
    }
}

template <class Half>
void max_of_halves(const void* const* terms, int num_terms, void* output, int64_t count, bool accumulates) {
    float total[BLOCK], other[BLOCK];
    Half* to = static_cast<Half*>(output);
    for (int64_t at = 0; at < count; at += BLOCK) {
        const int length = count - at < BLOCK ? static_cast<int>(count - at) : BLOCK;
        convert(term_at<Half>(terms, 0, at), total, length);
        for (int term = 1; term < num_terms + accumulates; ++term) {
            convert(term < num_terms ? term_at<Half>(terms, term, at) : to + at, other, length);
            combine(total, other, length, MAX);
        }
        convert(total, to + at, length);
    }
}

template <class Half>
void reduce_halves(const Reduction& what, const void* const* terms, int num_terms, void* output, int64_t count) {
    if (what.reduction_operator == MAX) {
        max_of_halves<Half>(terms, num_terms, output, count, what.accumulates);
    } else if (what.output_type == ELEMENT_FLOAT32) {
        sum<Half, float>(what, terms, num_terms, output, count);
    } else {
        sum<Half, Half>(what, terms, num_terms, output, count);
    }
}

}  // namespace

void reduce(const Reduction& what, const void* const* terms, int num_terms, void* output, int64_t count) {
    switch (what.element_type) {
        case ELEMENT_FLOAT32:
            if (what.reduction_operator == SUM) return sum<float, float>(what, terms, num_terms, output, count);
            return reduce_plainly<float>(what, terms, num_terms, output, count);
        case ELEMENT_BFLOAT16: return reduce_halves<BFloat16>(what, terms, num_terms, output, count);
        case ELEMENT_FLOAT16: return reduce_halves<Float16>(what, terms, num_terms, output, count);
        case ELEMENT_FLOAT64: return reduce_plainly<double>(what, terms, num_terms, output, count);
        case ELEMENT_UINT8: return reduce_plainly<uint8_t>(what, terms, num_terms, output, count);
        // Unsigned, so that a sum that overflows wraps around instead of being undefined; maxima are of signed numbers.
        case ELEMENT_INT32:
            if (what.reduction_operator == SUM) return reduce_plainly<uint32_t>(what, terms, num_terms, output, count);
            return reduce_plainly<int32_t>(what, terms, num_terms, output, count);
        case ELEMENT_INT64:
            if (what.reduction_operator == SUM) return reduce_plainly<uint64_t>(what, terms, num_terms, output, count);
            return reduce_plainly<int64_t>(what, terms, num_terms, output, count);
    }
}

void copy_past_caches(void* to, const void* from, int64_t bytes) {
    char* target = static_cast<char*>(to);
    const char* source = static_cast<const char*>(from);
    const int64_t misaligned = static_cast<int64_t>(reinterpret_cast<uintptr_t>(target) % VECTOR_BYTES);
    int64_t at = misaligned == 0 ? 0 : VECTOR_BYTES - misaligned;
    if (at > bytes) at = bytes;
    memcpy(target, source, static_cast<size_t>(at));
    for (; at + VECTOR_BYTES <= bytes; at += VECTOR_BYTES) {
        stream(reinterpret_cast<float*>(target + at), load(reinterpret_cast<const float*>(source + at)));
    }
    stream_fence();
    memcpy(target + at, source + at, static_cast<size_t>(bytes - at));
}

}  // namespace BOOSTER_ISA
}  // namespace booster
