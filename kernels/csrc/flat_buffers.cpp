// Many tensors as one flat sequence of elements: splits it over the threads and selects the instruction set.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>

#include "instruction_sets.h"
#include "thread_pool.h"

namespace py = pybind11;

namespace booster {

#define BOOSTER_DECLARE(set) \
    namespace set {          \
    double sum_of_squares(const void* data, int dtype, int64_t length); \
    void scaled_copy(const void* from, int from_dtype, void* to, int to_dtype, int64_t length, float scale, \
                     bool streams); \
    }
BOOSTER_FOR_EACH_SET(BOOSTER_DECLARE)

namespace {

struct Functions {
    double (*sum_of_squares)(const void*, int, int64_t);
    void (*scaled_copy)(const void*, int, void*, int, int64_t, float, bool);
};

#define BOOSTER_FUNCTIONS(set) {set::sum_of_squares, set::scaled_copy},
constexpr Functions FUNCTIONS[] = {BOOSTER_FOR_EACH_SET(BOOSTER_FUNCTIONS)};

struct Tensor {
    char* data;
    int64_t numel;
    int dtype;
    int64_t start;  // in the flat sequence
};

constexpr size_t NUM_COLUMNS = 3;  // of a tensor in the table from Python: address, number of elements, dtype

// Threads split the sequence at multiples of it, and each block has a separate sum, so the total is the same for any
// number of threads.
constexpr int64_t GRANULE = 32768;
constexpr int64_t FEWEST_PER_THREAD = 131072;  // minimum of elements worth waking a thread for
// Results larger than the caches use non-temporal stores, which avoid fetching the old content.
constexpr int64_t STREAMED_BYTES = 16 << 20;

constexpr int FLOAT32 = 0;  // as in `enum DType` of simd.h, which only vector sources can include

int64_t itemsize(int dtype) { return dtype == FLOAT32 ? 4 : 2; }

class FlatRow {
  public:
    explicit FlatRow(const std::vector<int64_t>& table) {
        if (table.size() % NUM_COLUMNS != 0) throw std::invalid_argument("a table of another width");
        tensors_.reserve(table.size() / NUM_COLUMNS);
        for (size_t i = 0; i + NUM_COLUMNS <= table.size(); i += NUM_COLUMNS) {
            char* data = reinterpret_cast<char*>(static_cast<uintptr_t>(table[i]));
            tensors_.push_back({data, table[i + 1], static_cast<int>(table[i + 2]), numel_});
            numel_ += table[i + 1];
        }
    }

    int64_t numel() const { return numel_; }

    // Calls function(address, dtype, position in the sequence, count) for every tensor range within begin..end.
    template <class Function>
    void for_parts(int64_t begin, int64_t end, Function&& function) const {
        const auto is_before = [](int64_t position, const Tensor& tensor) { return position < tensor.start; };
        auto tensor = std::upper_bound(tensors_.begin(), tensors_.end(), begin, is_before);
        if (tensor != tensors_.begin()) --tensor;
        for (; begin < end && tensor != tensors_.end(); ++tensor) {
            const int64_t offset = begin - tensor->start;
            const int64_t count = std::min(tensor->numel - offset, end - begin);
            if (count <= 0) continue;
            function(tensor->data + offset * itemsize(tensor->dtype), tensor->dtype, begin, count);
            begin += count;
        }
    }

  private:
    std::vector<Tensor> tensors_;
    int64_t numel_ = 0;
};

int threads_for(int64_t numel, int num_threads) {
    return static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(num_threads, numel / FEWEST_PER_THREAD)));
}

double sum_of_squares(const std::vector<int64_t>& table, int num_threads, const std::string& instruction_set) {
    const auto sum_of_part = FUNCTIONS[chosen_set(instruction_set)].sum_of_squares;
    const py::gil_scoped_release release;
    const FlatRow row(table);
    std::vector<double> sums(static_cast<size_t>((row.numel() + GRANULE - 1) / GRANULE), 0.0);
    parallel_for(threads_for(row.numel(), num_threads), row.numel(), GRANULE, [&](int64_t begin, int64_t end) {
        for (; begin < end; begin += GRANULE) {
            double& sum = sums[static_cast<size_t>(begin / GRANULE)];
            row.for_parts(begin, std::min(begin + GRANULE, end), [&](char* data, int dtype, int64_t, int64_t count) {
                sum += sum_of_part(data, dtype, count);
            });
        }
    });
    double total = 0.0;
    for (const double sum : sums) total += sum;
    return total;
}

// A buffer for the concatenated tensors.
struct Buffer {
    char* data;
    int dtype;
};

enum class Direction { PACK, UNPACK };

void copy(const std::vector<int64_t>& table, Buffer flat, Direction direction, float scale, int num_threads,
          const std::string& instruction_set) {
    const auto scaled_copy = FUNCTIONS[chosen_set(instruction_set)].scaled_copy;
    const py::gil_scoped_release release;
    const FlatRow row(table);
    const bool streams = row.numel() * itemsize(flat.dtype) >= STREAMED_BYTES;
    parallel_for(threads_for(row.numel(), num_threads), row.numel(), GRANULE, [&](int64_t begin, int64_t end) {
        row.for_parts(begin, end, [&](char* data, int dtype, int64_t position, int64_t count) {
            char* const there = flat.data + position * itemsize(flat.dtype);
            if (direction == Direction::PACK) {
                scaled_copy(data, dtype, there, flat.dtype, count, scale, streams);
            } else {
                scaled_copy(there, flat.dtype, data, dtype, count, scale, streams);
            }
        });
    });
}

template <Direction DIRECTION>
void copy_all(const std::vector<int64_t>& table, uint64_t flat_address, int flat_dtype, float scale, int num_threads,
              const std::string& instruction_set) {
    const Buffer flat{reinterpret_cast<char*>(static_cast<uintptr_t>(flat_address)), flat_dtype};
    copy(table, flat, DIRECTION, scale, num_threads, instruction_set);
}

}  // namespace
}  // namespace booster

PYBIND11_MODULE(flat_buffers_native, m) {
    using booster::Direction;
    m.def("instruction_sets", &booster::instruction_sets, "What this CPU can use, best first.");
    m.def("sum_of_squares", &booster::sum_of_squares, "Arguments: table, number of threads, instruction set.");
    m.def("pack", &booster::copy_all<Direction::PACK>,
          "Arguments: table, the buffer's address and dtype, scale, number of threads, instruction set.");
    m.def("unpack", &booster::copy_all<Direction::UNPACK>, "Arguments: as those of pack.");
}
