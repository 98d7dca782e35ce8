// Adam over many tensors in one call: splits them over the threads and picks the instruction set.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cmath>

#include "adam.h"
#include "instruction_sets.h"
#include "thread_pool.h"

namespace booster {

#define BOOSTER_DECLARE(set) \
    namespace set {          \
    void adam_range(const AdamTensor&, const AdamSettings&, int64_t, int64_t); \
    }
BOOSTER_FOR_EACH_SET(BOOSTER_DECLARE)

namespace {

#define BOOSTER_ADAM_RANGE(set) set::adam_range,
constexpr AdamRange ADAM_RANGES[] = {BOOSTER_FOR_EACH_SET(BOOSTER_ADAM_RANGE)};

// The settings from Python; documented in adam.py.
struct Options {
    double lr, beta1, beta2, eps, weight_decay;
    bool decoupled_weight_decay, bias_correction;
    double multiplier;
    uint64_t multiplier_address;  // of one fp32; 0: none
    bool zeroes_grads, rounds_stochastically;
    uint64_t seed;
    int num_threads;
};

AdamSettings settings_of(const Options& options) {
    double multiplier = options.multiplier;
    if (options.multiplier_address != 0) multiplier *= *reinterpret_cast<const float*>(options.multiplier_address);
    AdamSettings settings;
    settings.multiplier = static_cast<float>(multiplier);
    settings.beta2 = static_cast<float>(options.beta2);
    settings.exp_avg_weight = static_cast<float>(1.0 - options.beta1);
    settings.exp_avg_sq_weight = static_cast<float>(1.0 - options.beta2);
    const bool is_decoupled = options.decoupled_weight_decay;
    settings.l2_penalty = is_decoupled ? 0.0f : static_cast<float>(options.weight_decay);
    settings.kept_share = is_decoupled ? static_cast<float>(1.0 - options.lr * options.weight_decay) : 1.0f;
    settings.zeroes_grads = options.zeroes_grads;
    settings.rounds_stochastically = options.rounds_stochastically;
    settings.streams_copies = false;
    return settings;
}

// lr and eps with the bias correction of a step number.
void set_step(AdamTensor& tensor, double step, const Options& options) {
    double correction1 = 1.0, correction2_root = 1.0;
    if (options.bias_correction) {
        correction1 = 1.0 - std::pow(options.beta1, step);
        correction2_root = std::sqrt(1.0 - std::pow(options.beta2, step));
    }
    tensor.step_size = static_cast<float>(options.lr * correction2_root / correction1);
    tensor.eps = static_cast<float>(options.eps * correction2_root);
}

// Note [Table]: seven integers per tensor: the addresses of param, grad, exp_avg, exp_avg_sq and working copy, the
// number of elements, and the dtypes of param, grad and working copy, four bits each.
constexpr size_t NUM_COLUMNS = 7;

template <class Element>
Element* pointer(int64_t address) {
    return reinterpret_cast<Element*>(static_cast<uintptr_t>(address));
}

AdamTensor tensor_of(const int64_t* row) {
    AdamTensor tensor;
    tensor.param = pointer<void>(row[0]);
    tensor.grad = pointer<void>(row[1]);
    tensor.exp_avg = pointer<float>(row[2]);
    tensor.exp_avg_sq = pointer<float>(row[3]);
    tensor.working_copy = pointer<void>(row[4]);
    tensor.numel = row[5];
    tensor.param_dtype = static_cast<int>(row[6] & 15);
    tensor.grad_dtype = static_cast<int>(row[6] >> 4 & 15);
    tensor.copy_dtype = static_cast<int>(row[6] >> 8 & 15);
    return tensor;
}

std::vector<AdamTensor> tensors_of(const std::vector<int64_t>& table, const std::vector<double>& steps,
                                   const Options& options) {
    if (table.size() != steps.size() * NUM_COLUMNS) throw std::invalid_argument("a table of another length");
    std::vector<AdamTensor> tensors;
    tensors.reserve(steps.size());
    for (size_t i = 0; i < steps.size(); ++i) {
        tensors.push_back(tensor_of(table.data() + i * NUM_COLUMNS));
        tensors[i].rounding_key = options.seed + static_cast<uint64_t>(i) * 0xd1342543de82ef95ull;
        if (i > 0 && steps[i] == steps[i - 1]) {  // reuses the powers
            tensors[i].step_size = tensors[i - 1].step_size;
            tensors[i].eps = tensors[i - 1].eps;
        } else {
            set_step(tensors[i], steps[i], options);
        }
    }
    return tensors;
}

constexpr int64_t OVERHEAD = 64;  // fixed cost of a tensor, in elements
constexpr int64_t GRANULE = 64;  // ranges start at multiples of it, to avoid false sharing of cache lines
constexpr int64_t FEWEST = 32768;  // elements per thread whose work takes longer than waking the thread
constexpr int64_t FEWEST_STREAMED = int64_t{1} << 20;  // elements; see Note [Memory] in adam_vector.cpp
constexpr int64_t RANDOM_RANGE = int64_t{1} << 32;  // see Note [Random numbers] in adam_vector.cpp

void run_range(AdamRange function, const AdamTensor& tensor, const AdamSettings& settings, int64_t begin, int64_t end) {
    while (begin < end) {
        const int64_t next = (begin / RANDOM_RANGE + 1) * RANDOM_RANGE;
        function(tensor, settings, begin, next < end ? next : end);
        begin = next;
    }
}

// Maps a boundary between threads at `position` to an element of the tensor that starts at `start`.
int64_t cut(int64_t position, int64_t start, int64_t numel) {
    const int64_t offset = position - start;
    if (offset <= 0) return 0;
    return offset >= numel ? numel : offset / GRANULE * GRANULE;
}

int64_t length_of(const std::vector<AdamTensor>& tensors) {
    int64_t total = 0;
    for (const AdamTensor& tensor : tensors) total += tensor.numel + OVERHEAD;
    return total;
}

// Splits the concatenated tensors into one range per thread, which balances many small tensors and large ones alike.
void run_all(AdamRange function, const std::vector<AdamTensor>& tensors, const AdamSettings& settings,
             int num_threads) {
    const int64_t total = length_of(tensors);
    const int64_t most = (total + FEWEST - 1) / FEWEST;
    run_parts(static_cast<int>(most < num_threads ? most : num_threads), [&](int part, int num_parts) {
        const int64_t first = total / num_parts * part;
        const int64_t last = part + 1 == num_parts ? total : total / num_parts * (part + 1);
        int64_t start = 0;
        for (const AdamTensor& tensor : tensors) {
            const int64_t begin = cut(first, start, tensor.numel);
            const int64_t end = cut(last, start, tensor.numel);
            run_range(function, tensor, settings, begin, end);
            start += tensor.numel + OVERHEAD;
        }
    });
}

void adam_step(const std::vector<int64_t>& table, const std::vector<double>& steps, double lr, double beta1,
               double beta2, double eps, double weight_decay, bool decoupled_weight_decay, bool bias_correction,
               double multiplier, uint64_t multiplier_address, bool zero_grads, bool rounds_stochastically,
               uint64_t seed, int num_threads, const std::string& instruction_set) {
    const Options options{lr, beta1, beta2, eps, weight_decay, decoupled_weight_decay, bias_correction, multiplier,
                          multiplier_address, zero_grads, rounds_stochastically, seed, num_threads};
    const AdamRange function = ADAM_RANGES[chosen_set(instruction_set)];
    pybind11::gil_scoped_release released;
    const std::vector<AdamTensor> tensors = tensors_of(table, steps, options);
    AdamSettings settings = settings_of(options);
    settings.streams_copies = length_of(tensors) >= FEWEST_STREAMED;
    run_all(function, tensors, settings, num_threads);
}

}  // namespace
}  // namespace booster

PYBIND11_MODULE(adam_native, m) {
    using pybind11::arg;
    m.def("instruction_sets", &booster::instruction_sets);
    m.def("adam_step", &booster::adam_step, arg("table"), arg("steps"), pybind11::kw_only(), arg("lr"), arg("beta1"),
          arg("beta2"), arg("eps"), arg("weight_decay"), arg("decoupled_weight_decay"), arg("bias_correction"),
          arg("multiplier"), arg("multiplier_address"), arg("zero_grads"), arg("rounds_stochastically"), arg("seed"),
          arg("num_threads"), arg("instruction_set"));
}
