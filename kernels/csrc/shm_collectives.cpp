// Python module of the collectives of processes on one host through shared memory.
//
// A Collectives object is the endpoint of one rank. Every call releases the GIL, and returns None, or (reason, rank) if
// it failed; see Failure. Addresses, lengths and types are checked in kernels/shared_memory.py.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "instruction_sets.h"
#include "shm_operations.h"
#include "shm_pipeline.h"
#include "shm_segment.h"
#include "shm_vector.h"
#include "shm_waiting.h"

namespace py = pybind11;

namespace booster {

#define BOOSTER_DECLARE(set) \
    namespace set {          \
    void reduce(const Reduction& what, const void* const* terms, int num_terms, void* output, int64_t count); \
    void copy_past_caches(void* to, const void* from, int64_t bytes); \
    }
BOOSTER_FOR_EACH_SET(BOOSTER_DECLARE)

namespace {

constexpr uint64_t ELEMENT_BYTES[NUM_ELEMENT_TYPES] = {4, 2, 2, 8, 1, 4, 8};

// Up to this size a second synchronization costs more than reducing everything on every rank; with two ranks that
// repeats little work.
constexpr uint64_t short_all_reduce_bytes(int num_ranks) {
    return num_ranks == 2 ? 512u << 10 : (256u << 10) / static_cast<uint64_t>(num_ranks);
}

enum OperationCode : int64_t { ALL_REDUCE = 0, REDUCE_SCATTER = 1, ALL_GATHER = 2, ALL_TO_ALL = 3, BROADCAST = 4 };

struct Functions {
    ReduceFunction reduce;
    CopyFunction copy_past_caches;
};

#define BOOSTER_FUNCTIONS(set) {set::reduce, set::copy_past_caches},
constexpr Functions FUNCTIONS[] = {BOOSTER_FOR_EACH_SET(BOOSTER_FUNCTIONS)};

// Runs Python's pending signal handlers; returns true if one of them raised.
bool has_interrupt() {
    py::gil_scoped_acquire holds_gil;
    return PyErr_CheckSignals() != 0;
}

int64_t nanoseconds(double seconds) { return static_cast<int64_t>(seconds * 1e9); }

char* address(uint64_t number) { return reinterpret_cast<char*>(static_cast<uintptr_t>(number)); }

class Collectives {
  public:
    Collectives(Segment segment, int rank, double timeout_seconds, const Functions& functions)
        : process_id_(getpid()), rank_(rank), segment_(std::move(segment)),
          waiter_(segment_, rank, nanoseconds(timeout_seconds), has_interrupt),
          pipeline_(segment_, rank, waiter_),
          context_{segment_, rank, segment_.num_ranks(), functions.reduce, functions.copy_past_caches} {
        RankState& rank_state = segment_.rank_state(rank);
        rank_state.process_id = process_id_;
        CPU_ZERO(&rank_state.processors);
        sched_getaffinity(0, sizeof rank_state.processors, &rank_state.processors);
    }

    // Called after every rank has created its endpoint.
    void begin() {
        segment_.close_file();
        waiter_.meet_peers();
        has_begun_ = true;
    }

    // For later waits.
    void set_timeout(double seconds) { waiter_.set_timeout(nanoseconds(seconds)); }

    int file_number() const { return segment_.file(); }

    // With `only_publishes` an operation writes what it can, and is called again to complete it, before any other one;
    // see Note [Publishing].
    py::object all_reduce(int64_t number, uint64_t data, uint64_t count, int type, int reduction_operator,
                          bool only_publishes) {
        const Reduction reduction = {type, type, reduction_operator, false, false};
        const uint64_t bytes = count * ELEMENT_BYTES[type];
        const CallInfo call = {ALL_REDUCE, number, static_cast<int64_t>(count), type, reduction_operator};
        if (bytes <= short_all_reduce_bytes(segment_.num_ranks())) {
            return run(ShortAllReduce(context_, reduction, ELEMENT_BYTES[type], address(data), count), call,
                       only_publishes);
        }
        return run(LongAllReduce(context_, reduction, ELEMENT_BYTES[type], address(data), count), call,
                   only_publishes);
    }

    py::object reduce_scatter(int64_t number, uint64_t payload, uint64_t output, uint64_t shard_count, int type,
                              int output_type, bool accumulates, bool only_publishes) {
        const uint64_t rank_offset = static_cast<uint64_t>(rank_) * shard_count * ELEMENT_BYTES[type];
        const bool is_in_place = output == payload + rank_offset;
        const bool is_large = shard_count * ELEMENT_BYTES[output_type] >= PAST_CACHES_BYTES;
        const Reduction reduction = {type, output_type, SUM, accumulates, is_large && !is_in_place};
        // The output's dtype, address and mode may differ between ranks, so they are not compared.
        const CallInfo call = {REDUCE_SCATTER, number, total(shard_count), type, 0};
        return run(ReduceScatter(context_, reduction, ELEMENT_BYTES[type], ELEMENT_BYTES[output_type], address(payload),
                                 address(output), shard_count),
                   call, only_publishes);
    }

    py::object all_gather(int64_t number, uint64_t buffer, uint64_t own, uint64_t shard_bytes,
                          bool only_publishes) {
        const CallInfo call = {ALL_GATHER, number, total(shard_bytes), 0, 0};
        return run(AllGather(context_, address(buffer), address(own), shard_bytes), call, only_publishes);
    }

    py::object all_to_all(int64_t number, uint64_t output, uint64_t input, uint64_t shard_bytes,
                          bool only_publishes) {
        const CallInfo call = {ALL_TO_ALL, number, total(shard_bytes), 0, 0};
        return run(AllToAll(context_, address(output), address(input), shard_bytes), call, only_publishes);
    }

    py::object broadcast(int64_t number, uint64_t data, uint64_t bytes, int source) {
        const CallInfo call = {BROADCAST, number, static_cast<int64_t>(bytes), 0, source};
        return run(Broadcast(context_, address(data), bytes, source), call, false);
    }

    // Makes all calls fail on all ranks. Takes no lock, as another thread may be within a call.
    void abort() const {
        if (is_usable()) waiter_.abort(ABORTED, rank_);
    }

    // The calls of the ranks at the step where they differed: operation, number, length, type, detail.
    std::vector<std::vector<int64_t>> calls_of_ranks() const {
        std::vector<std::vector<int64_t>> all;
        const uint64_t step = segment_.header().abort_step.load();
        for (int rank = 0; rank < segment_.num_ranks(); ++rank) {
            const CallInfo& call = segment_.rank_state(rank).at[step % NUM_PARITIES].call;
            all.push_back({call.operation, call.number, call.length, call.type, call.detail});
        }
        return all;
    }

  private:
    // A forked child has the memory as well, but is not a rank.
    bool is_usable() const { return getpid() == process_id_; }

    int64_t total(uint64_t of_shard) const {
        return static_cast<int64_t>(of_shard * static_cast<uint64_t>(segment_.num_ranks()));
    }

    template <class Operation>
    py::object run(Operation&& operation, const CallInfo& call, bool only_publishes) {
        if (!is_usable()) throw std::runtime_error("a forked process can't take part in its parent's collectives");
        if (!has_begun_) throw std::logic_error("begin() was not called");
        try {
            py::gil_scoped_release without_gil;
            if (only_publishes) {
                pipeline_.publish(operation, call);
            } else {
                pipeline_.run(operation, call);
            }
        } catch (const Failure& failure) {
            if (failure.is_python_error) throw py::error_already_set();
            return py::make_tuple(static_cast<int>(failure.reason), failure.rank);
        }
        return py::none();
    }

    const pid_t process_id_;
    const int rank_;
    Segment segment_;
    Waiter waiter_;
    Pipeline pipeline_;
    const Context context_;
    bool has_begun_ = false;
};

std::unique_ptr<Collectives> create(int num_ranks, uint64_t slot_bytes, uint64_t key, double timeout_seconds,
                                    const std::string& instruction_set) {
    return std::make_unique<Collectives>(Segment::create(num_ranks, slot_bytes, key), 0, timeout_seconds,
                                         FUNCTIONS[chosen_set(instruction_set)]);
}

std::unique_ptr<Collectives> attach(int process_id, int file_number, int num_ranks, int rank, uint64_t slot_bytes,
                                    uint64_t key, double timeout_seconds, const std::string& instruction_set) {
    return std::make_unique<Collectives>(
        Segment::attach(process_id, file_number, num_ranks, slot_bytes, key), rank, timeout_seconds,
        FUNCTIONS[chosen_set(instruction_set)]);
}

}  // namespace
}  // namespace booster

PYBIND11_MODULE(shm_collectives_native, module) {
    using booster::Collectives;
    module.def("instruction_sets", booster::instruction_sets);
    module.def("create", booster::create);
    module.def("attach", booster::attach);
    py::class_<Collectives>(module, "Collectives")
        .def("begin", &Collectives::begin)
        .def("set_timeout", &Collectives::set_timeout)
        .def("file_number", &Collectives::file_number)
        .def("all_reduce", &Collectives::all_reduce)
        .def("reduce_scatter", &Collectives::reduce_scatter)
        .def("all_gather", &Collectives::all_gather)
        .def("all_to_all", &Collectives::all_to_all)
        .def("broadcast", &Collectives::broadcast)
        .def("abort", &Collectives::abort)
        .def("calls_of_ranks", &Collectives::calls_of_ranks);
}
