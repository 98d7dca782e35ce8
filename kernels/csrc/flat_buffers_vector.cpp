// Sums of squares, and copies that scale and convert, of contiguous elements.

#include <stddef.h>

#include "simd.h"
#include "simd_fp64.h"

namespace booster {
namespace BOOSTER_ISA {
namespace {

// Note [Lanes of a sum]: an element's index determines the lane that it is added to, and the lanes are added in a fixed
// order, independent of the register width. So the sum is bitwise equal on every instruction set and at every address.
// There are enough lanes to hide the latency of additions.
//
// fp32 is widened to fp64, in which its squares are exact: finite numbers have a finite sum, and the loop is
// memory-bound. 16-bit elements need half the bandwidth, so four of their squares, which are exact in fp32 unless they
// leave its range, are added in fp32 before they are widened. Results that this may have changed (inf, nan and sums
// close to zero) are recomputed in fp64.
constexpr int MOST_LANES = 32;
constexpr double LEAST_FP32_SUM = 0x1p-80;  // squares below fp32's range (2^-126) are negligible beside it

double sum_of_lanes(const Wide* sums, int num_lanes) {
    double lanes[MOST_LANES];
    for (int i = 0; i < num_lanes; i += WIDE_WIDTH) store(lanes + i, sums[i / WIDE_WIDTH]);
    for (int count = num_lanes / 2; count > 0; count /= 2) {
        for (int i = 0; i < count; ++i) lanes[i] += lanes[i + count];
    }
    return lanes[0];
}

// One step of a sum, over LENGTH elements into LANES lanes.
struct InFp64 {
    static constexpr int LANES = MOST_LANES;
    static constexpr int LENGTH = LANES;

    template <class Element>
    static void add_squares(Wide* sums, const Element* data) {
        for (int i = 0; i < LANES / WIDE_WIDTH; ++i) sums[i] = add_square(sums[i], widen(data + i * WIDE_WIDTH));
    }
};

struct InFp32 {
    static constexpr int ROWS = 4;
    static constexpr int LANES = 16;
    static constexpr int LENGTH = ROWS * LANES;

    template <class Element>
    static void add_squares(Wide* sums, const Element* data) {
        for (int i = 0; i < LANES / WIDTH; ++i) {
            Vec sum = square(load(data + i * WIDTH));
            for (int row = 1; row < ROWS; ++row) sum = add(sum, square(load(data + row * LANES + i * WIDTH)));
            add_wide(sums + i * WIDTH / WIDE_WIDTH, sum);
        }
    }
    static void add_wide(Wide* sums, Vec v) {
        sums[0] = add(sums[0], first_half(v));
        if (WIDTH > WIDE_WIDTH) sums[1] = add(sums[1], last_half(v));
    }
    static Vec square(Vec v) { return mul(v, v); }
};

template <class Method, class Element>
double sum_by(const Element* data, int64_t length) {
    constexpr int NUM_SUMS = Method::LANES / WIDE_WIDTH;
    Wide sums[NUM_SUMS];
    for (int i = 0; i < NUM_SUMS; ++i) sums[i] = zero();
    int64_t i = 0;
    for (; i + Method::LENGTH <= length; i += Method::LENGTH) Method::add_squares(sums, data + i);
    if (i < length) {
        Element tail[Method::LENGTH] = {};  // zeros add nothing
        __builtin_memcpy(tail, data + i, static_cast<size_t>(length - i) * sizeof(Element));
        Method::add_squares(sums, tail);
    }
    return sum_of_lanes(sums, Method::LANES);
}

double sum_of_elements(const float* data, int64_t length) { return sum_by<InFp64>(data, length); }

template <class Element>
double sum_of_elements(const Element* data, int64_t length) {
    const double sum = sum_by<InFp32>(data, length);
    return sum >= LEAST_FP32_SUM && sum < __builtin_inf() ? sum : sum_by<InFp64>(data, length);
}

template <bool STREAMS, class From, class To>
void copy_vectors(const From* from, To* to, int64_t length, Vec scale) {
    for (int64_t i = 0; i + WIDTH <= length; i += WIDTH) {
        const Vec scaled = mul(load(from + i), scale);
        if (STREAMS) {
            stream(to + i, scaled);
        } else {
            store(to + i, scaled);
        }
    }
    const int rest = static_cast<int>(length % WIDTH);
    const int64_t done = length - rest;
    if (rest > 0) store_partial(to + done, mul(load_partial(from + done, rest), scale), rest);
}

// Number of elements before the next address that is aligned for non-temporal stores.
template <class To>
int64_t unaligned_count(const To* to) {
    constexpr uintptr_t ALIGNMENT = WIDTH * sizeof(To);
    const uintptr_t bytes = (ALIGNMENT - reinterpret_cast<uintptr_t>(to) % ALIGNMENT) % ALIGNMENT;
    return static_cast<int64_t>(bytes / sizeof(To));
}

template <class From, class To>
void copy_elements(const From* from, To* to, int64_t length, float factor, bool streams) {
    const Vec scale = set1(factor);
    const bool is_aligned = reinterpret_cast<uintptr_t>(to) % sizeof(To) == 0;  // else no element begins at such a one
    if (!streams || !is_aligned) {
        copy_vectors<false>(from, to, length, scale);
        return;
    }
    const int64_t unaligned = unaligned_count(to);
    const int64_t head = unaligned < length ? unaligned : length;
    copy_vectors<false>(from, to, head, scale);
    copy_vectors<true>(from + head, to + head, length - head, scale);
    stream_fence();
}

template <class From>
void copy_to(const From* from, void* to, int to_dtype, int64_t length, float scale, bool streams) {
    if (to_dtype == FLOAT32) copy_elements(from, static_cast<float*>(to), length, scale, streams);
    if (to_dtype == BFLOAT16) copy_elements(from, static_cast<BFloat16*>(to), length, scale, streams);
    if (to_dtype == FLOAT16) copy_elements(from, static_cast<Float16*>(to), length, scale, streams);
}

}  // namespace

double sum_of_squares(const void* data, int dtype, int64_t length) {
    if (dtype == BFLOAT16) return sum_of_elements(static_cast<const BFloat16*>(data), length);
    if (dtype == FLOAT16) return sum_of_elements(static_cast<const Float16*>(data), length);
    return sum_of_elements(static_cast<const float*>(data), length);
}

void scaled_copy(const void* from, int from_dtype, void* to, int to_dtype, int64_t length, float scale, bool streams) {
    if (from_dtype == FLOAT32) copy_to(static_cast<const float*>(from), to, to_dtype, length, scale, streams);
    if (from_dtype == BFLOAT16) copy_to(static_cast<const BFloat16*>(from), to, to_dtype, length, scale, streams);
    if (from_dtype == FLOAT16) copy_to(static_cast<const Float16*>(from), to, to_dtype, length, scale, streams);
}

}  // namespace BOOSTER_ISA
}  // namespace booster
