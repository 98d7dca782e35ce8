// Synchronization of ranks: spin with yields for a moment, then sleep on a futex, with periodic liveness checks.
//
// Note [Waiting]: a rank that arrives increments a shared word; the last one wakes the ranks that sleep on it (a
// process-shared futex). A sleeping rank wakes at least every SLICE, and checks for an abort, ended processes, its
// timeout and a user interrupt. So a missed wake or exit costs at most one slice.
// Note [Abortion]: a rank that can't continue writes the reason into the header, where the first one stays, and wakes
// all ranks. From then on every call on every rank fails with that reason.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <vector>

#include "shm_process.h"
#include "shm_segment.h"

namespace booster {

enum Reason : uint32_t {
    NO_REASON = 0,
    TIMED_OUT = 1,    // the rank's wait timed out
    PEER_ENDED = 2,   // the rank's process has ended
    MISMATCH = 3,      // the ranks are in different calls; detected by the rank
    INTERRUPTED = 4,  // the rank was interrupted by a Python signal
    ABORTED = 5,      // the rank called abort()
};

// Thrown when a collective fails; the same on all ranks, as the first reason stays.
struct Failure {
    Reason reason;
    int rank;           // the rank that the reason refers to
    bool is_python_error;  // a Python exception is set on this rank

    static Failure unpack(uint64_t word) {
        return {static_cast<Reason>(word & 0xff), static_cast<int>(word >> 8), false};
    }
    static uint64_t pack(Reason reason, int rank) { return reason | static_cast<uint64_t>(rank) << 8; }
};

enum Phase { WRITTEN, CONSUMED };

class Waiter {
  public:
    static constexpr int64_t SLICE_NANOSECONDS = 100'000'000;
    static constexpr int NUM_PAUSES = 100;
    static constexpr int64_t YIELD_NANOSECONDS = 100'000;

    // `has_interrupt` returns whether the interpreter has a pending signal that raises.
    Waiter(const Segment& segment, int rank, int64_t timeout_nanoseconds, bool (*has_interrupt)())
        : segment_(segment), rank_(rank), timeout_(timeout_nanoseconds), has_interrupt_(has_interrupt) {}

    // For later waits. Any thread may call it.
    void set_timeout(int64_t nanoseconds) { timeout_.store(nanoseconds, std::memory_order_relaxed); }

    // Called after all ranks have written their rank states.
    void meet_peers() {
        const int num_ranks = segment_.num_ranks();
        cpu_set_t all;
        CPU_ZERO(&all);
        for (int rank = 0; rank < num_ranks; ++rank) {
            peers_.emplace_back(segment_.rank_state(rank).process_id);
            CPU_OR(&all, &all, &segment_.rank_state(rank).processors);
        }
        // If ranks share processors, a spinning rank may block the one that it waits for.
        num_pauses_ = CPU_COUNT(&all) >= num_ranks ? NUM_PAUSES : 0;
    }

    bool is_intact() const { return segment_.header().abort_reason.load(std::memory_order_acquire) == 0; }

    void require_intact() const {
        const uint64_t word = segment_.header().abort_reason.load(std::memory_order_acquire);
        if (word != 0) throw Failure::unpack(word);
    }

    // Signals that this rank has completed a phase of a step.
    void arrive(Phase phase, uint64_t step) const {
        number_of(phase, rank_).store(static_cast<uint32_t>(step + 1), std::memory_order_relaxed);
        std::atomic<uint32_t>& word = word_of(phase, step);
        const uint32_t count = word.fetch_add(1, std::memory_order_seq_cst) + 1;
        const bool is_last = count == target_of(step);
        if (is_last && segment_.header().num_sleepers.load(std::memory_order_seq_cst) != 0) wake(word);
    }

    // Waits until all ranks have completed a phase of a step. Throws Failure.
    void await(Phase phase, uint64_t step) const {
        if (has_come(phase, step) || spin(phase, step)) return;
        std::atomic<uint32_t>& num_sleepers = segment_.header().num_sleepers;
        num_sleepers.fetch_add(1, std::memory_order_seq_cst);
        try {
            sleep(phase, step);
        } catch (...) {
            num_sleepers.fetch_sub(1, std::memory_order_relaxed);
            throw;
        }
        num_sleepers.fetch_sub(1, std::memory_order_relaxed);
    }

    // Aborts the memory for all ranks; see Note [Abortion]. The first reason stays.
    void abort(Reason reason, int failed_rank, uint64_t step = 0) const {
        Header& header = segment_.header();
        uint64_t expected = 0;
        if (header.abort_reason.load() == 0) header.abort_step.store(step);
        header.abort_reason.compare_exchange_strong(expected, Failure::pack(reason, failed_rank));
        for (Counter& counter : header.written) wake(counter.value);
        for (Counter& counter : header.consumed) wake(counter.value);
    }

    [[noreturn]] void fail(Reason reason, int failed_rank, uint64_t step = 0) const {
        abort(reason, failed_rank, step);
        throw Failure::unpack(segment_.header().abort_reason.load());
    }

    bool has_come(Phase phase, uint64_t step) const {
        return reaches(word_of(phase, step).load(std::memory_order_acquire), target_of(step));
    }

  private:
    std::atomic<uint32_t>& word_of(Phase phase, uint64_t step) const {
        Header& header = segment_.header();
        return (phase == WRITTEN ? header.written : header.consumed)[step % NUM_COUNTERS].value;
    }

    std::atomic<uint32_t>& number_of(Phase phase, int rank) const {
        RankState& rank_state = segment_.rank_state(rank);
        return phase == WRITTEN ? rank_state.num_written : rank_state.num_consumed;
    }

    // Value of a step's word when all ranks have arrived; the word was used for every NUM_COUNTERS-th step before.
    uint32_t target_of(uint64_t step) const {
        return static_cast<uint32_t>(static_cast<uint64_t>(segment_.num_ranks()) * (step / NUM_COUNTERS + 1));
    }

    // Words wrap around, so the comparison uses the difference.
    static bool reaches(uint32_t value, uint32_t target) { return static_cast<int32_t>(value - target) >= 0; }

    bool is_behind(Phase phase, uint64_t step, int rank) const {
        return !reaches(number_of(phase, rank).load(std::memory_order_relaxed), static_cast<uint32_t>(step + 1));
    }

    // Yields the processor between checks, as the awaited rank may need it.
    bool spin(Phase phase, uint64_t step) const {
        for (int turn = 0; turn < num_pauses_; ++turn) {
            relax();
            if (has_come(phase, step)) return true;
        }
        const int64_t end = now() + YIELD_NANOSECONDS;
        do {
            sched_yield();
            if (has_come(phase, step)) return true;
        } while (now() < end);
        return false;
    }

    void sleep(Phase phase, uint64_t step) const {
        std::atomic<uint32_t>& word = word_of(phase, step);
        const int64_t deadline = now() + timeout_.load(std::memory_order_relaxed);
        for (;;) {
            const uint32_t value = word.load(std::memory_order_seq_cst);
            if (reaches(value, target_of(step))) return;
            require_intact();
            const int64_t left = deadline - now();
            if (left <= 0) fail(TIMED_OUT, rank_);
            if (!sleep_on(word, value, left < SLICE_NANOSECONDS ? left : SLICE_NANOSECONDS)) {
                look_after_peers(phase, step);
                if (has_interrupt_()) interrupt();
            }
        }
    }

    // Returns false if the sleep timed out.
    static bool sleep_on(std::atomic<uint32_t>& word, uint32_t value, int64_t nanoseconds) {
        const timespec duration = {static_cast<time_t>(nanoseconds / 1'000'000'000),
                                   static_cast<long>(nanoseconds % 1'000'000'000)};
        const long result = syscall(SYS_futex, &word, FUTEX_WAIT, value, &duration, nullptr, 0);
        return result == 0 || errno == EAGAIN;
    }

    static void wake(std::atomic<uint32_t>& word) {
        syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
    }

    void look_after_peers(Phase phase, uint64_t step) const {
        for (int rank = 0; rank < segment_.num_ranks(); ++rank) {
            if (rank == rank_ || !is_behind(phase, step, rank) || !peers_[rank].has_ended()) continue;
            // It may have completed the phase before its process ended.
            if (is_behind(phase, step, rank)) fail(PEER_ENDED, rank);
        }
    }

    [[noreturn]] void interrupt() const {
        abort(INTERRUPTED, rank_);
        throw Failure{INTERRUPTED, rank_, true};
    }

    static int64_t now() {
        timespec time;
        clock_gettime(CLOCK_MONOTONIC, &time);
        return static_cast<int64_t>(time.tv_sec) * 1'000'000'000 + time.tv_nsec;
    }

    static void relax() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("isb" ::: "memory");
#endif
    }

    const Segment& segment_;
    const int rank_;
    std::atomic<int64_t> timeout_;
    bool (*const has_interrupt_)();
    std::vector<PeerProcess> peers_;
    int num_pauses_ = 0;
};

}  // namespace booster
