// Linux io_uring by plain system calls: a submission ring and a completion ring, shared with the kernel.
//
// A `Ring` is used by one thread; see io_uring(7) for the protocol. If the headers are older than Linux 5.6, or the
// system has no io_uring, `BOOSTER_HAS_IO_URING` is not defined and there is no `Ring`.
#pragma once

#if defined(__has_include)
#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#endif
#endif

#ifdef IORING_FEAT_RW_CUR_POS  // introduced together with IORING_OP_READ and IORING_OP_WRITE
#define BOOSTER_HAS_IO_URING

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <system_error>
#include <thread>

#ifndef __NR_io_uring_setup
#define __NR_io_uring_setup 425
#define __NR_io_uring_enter 426
#define __NR_io_uring_register 427
#endif

namespace booster {

// Owner of a descriptor, which closes it.
class Descriptor {
  public:
    // Takes the result of a system call; throws if it is an error.
    explicit Descriptor(long value, const char* what) : value_(static_cast<int>(value)) {
        if (value < 0) {
            throw std::system_error(errno, std::generic_category(), what);
        }
    }
    ~Descriptor() { ::close(value_); }
    Descriptor(const Descriptor&) = delete;
    Descriptor& operator=(const Descriptor&) = delete;

    int get() const { return value_; }

  private:
    int value_;
};

// Memory that is shared with the kernel.
class RingMemory {
  public:
    RingMemory(int descriptor, std::size_t num_bytes, std::uint64_t what) : num_bytes_(num_bytes) {
        start_ = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, descriptor,
                      static_cast<off_t>(what));
        if (start_ == MAP_FAILED) {
            throw std::system_error(errno, std::generic_category(), "mmap of an io_uring");
        }
        madvise(start_, num_bytes, MADV_DONTFORK);  // forked processes must not use the ring
    }
    ~RingMemory() { munmap(start_, num_bytes_); }
    RingMemory(const RingMemory&) = delete;
    RingMemory& operator=(const RingMemory&) = delete;

    template <typename T>
    T* at(std::size_t offset) const {
        return reinterpret_cast<T*>(static_cast<char*>(start_) + offset);
    }

  private:
    void* start_;
    std::size_t num_bytes_;
};

class Ring {
  public:
    // At most `num_entries` requests, a power of two, may be in flight.
    explicit Ring(unsigned num_entries)
        : descriptor_(syscall(__NR_io_uring_setup, num_entries, &parameters_), "io_uring_setup"),
          rings_(descriptor_.get(), size_of_rings(), IORING_OFF_SQ_RING),
          entries_(descriptor_.get(), parameters_.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES) {
        require_operations();
        unsigned* order = rings_.at<unsigned>(parameters_.sq_off.array);
        for (unsigned index = 0; index < parameters_.sq_entries; ++index) {
            order[index] = index;
        }
    }

    // Adds a request, which `submit_and_wait` submits. The caller must not exceed the number of entries.
    void add(const io_uring_sqe& request) {
        const unsigned tail = *submitted_tail();
        *entries_.at<io_uring_sqe>((tail & mask(parameters_.sq_off.ring_mask)) * sizeof(io_uring_sqe)) = request;
        __atomic_store_n(submitted_tail(), tail + 1, __ATOMIC_RELEASE);
    }

    // Submits the added requests and sleeps until one is complete; may return earlier.
    void submit_and_wait() {
        const unsigned num_added =
            *submitted_tail() - __atomic_load_n(rings_.at<unsigned>(parameters_.sq_off.head), __ATOMIC_ACQUIRE);
        if (syscall(__NR_io_uring_enter, descriptor_.get(), num_added, 1U, IORING_ENTER_GETEVENTS, nullptr, 0) >= 0 ||
            errno == EINTR) {
            return;
        }
        if (errno != EAGAIN && errno != EBUSY) {
            throw std::system_error(errno, std::generic_category(), "io_uring_enter");
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(1));  // the kernel is short of memory
    }

    // Calls `take(user_data, result)` for every complete request.
    template <typename Take>
    void take_completions(Take take) {
        unsigned* head_place = rings_.at<unsigned>(parameters_.cq_off.head);
        unsigned head = *head_place;
        const unsigned tail = __atomic_load_n(rings_.at<unsigned>(parameters_.cq_off.tail), __ATOMIC_ACQUIRE);
        while (head != tail) {
            const io_uring_cqe completion =
                rings_.at<io_uring_cqe>(parameters_.cq_off.cqes)[head & mask(parameters_.cq_off.ring_mask)];
            __atomic_store_n(head_place, ++head, __ATOMIC_RELEASE);
            take(completion.user_data, completion.res);
        }
    }

  private:
    std::size_t size_of_rings() const {
        // Every kernel with the features required here supports one mapping for both rings.
        const std::size_t requests = parameters_.sq_off.array + parameters_.sq_entries * sizeof(unsigned);
        const std::size_t completions = parameters_.cq_off.cqes + parameters_.cq_entries * sizeof(io_uring_cqe);
        return std::max(requests, completions);
    }

    unsigned* submitted_tail() const { return rings_.at<unsigned>(parameters_.sq_off.tail); }
    unsigned mask(unsigned offset) const { return *rings_.at<unsigned>(offset); }

    // Probes the operations, as sandboxes may emulate io_uring with fewer of them.
    void require_operations() const {
        constexpr unsigned NUM_OPERATIONS = 256;
        alignas(io_uring_probe) char memory[sizeof(io_uring_probe) + NUM_OPERATIONS * sizeof(io_uring_probe_op)];
        std::memset(memory, 0, sizeof(memory));
        auto* probe = reinterpret_cast<io_uring_probe*>(memory);
        if (syscall(__NR_io_uring_register, descriptor_.get(), IORING_REGISTER_PROBE, probe, NUM_OPERATIONS) < 0) {
            throw std::system_error(errno, std::generic_category(), "io_uring_register");
        }
        const auto* operations = reinterpret_cast<const io_uring_probe_op*>(memory + sizeof(io_uring_probe));
        for (const int operation : {IORING_OP_READ, IORING_OP_WRITE, IORING_OP_POLL_ADD}) {
            if (operation > probe->last_op || (operations[operation].flags & IO_URING_OP_SUPPORTED) == 0) {
                throw std::system_error(ENOSYS, std::generic_category(), "io_uring without reads and writes");
            }
        }
    }

    io_uring_params parameters_{};
    Descriptor descriptor_;
    RingMemory rings_;
    RingMemory entries_;
};

}  // namespace booster

#endif  // IORING_FEAT_RW_CUR_POS
