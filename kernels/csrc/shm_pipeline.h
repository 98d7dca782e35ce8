// Runs a collective as a pipeline of steps: a rank fills its next slot while other ranks still write.
//
// Note [Steps]: an operation has the same number of steps on every rank. In a step each rank fills one of its two
// slots, signals WRITTEN, waits for WRITTEN of all ranks, reads from the slots of the others, and signals CONSUMED.
// Steps are numbered across operations, and a rank fills the slot of step s once all ranks have consumed step s - 2,
// which used the same slot. With a lag of 1 it fills the slot of step s + 1 before it waits for step s. No rank is more
// than two steps ahead of another, so four rotating counters suffice. At its first step each rank writes a description
// of its call next to the slot, and compares it with those of the others: ranks in different calls fail there, before
// any data is misinterpreted.
//
// Note [Publishing]: an operation that is started now and completed later can write its first steps, two at most, into
// the slots at once, if these are free: those that need nothing of the others. So a rank that completes it does not wait
// for these steps of a rank that still computes; an operation of no more steps is completed without any wait.
#pragma once

#include <algorithm>
#include <cstdint>

#include "shm_waiting.h"

namespace booster {

class Pipeline {
  public:
    Pipeline(const Segment& segment, int rank, const Waiter& waiter)
        : segment_(segment), rank_(rank), waiter_(waiter) {}

    // Writes the first steps of the operation that runs next, without waiting; see Note [Publishing].
    template <class Operation>
    void publish(Operation& operation, const CallInfo& call) {
        const uint64_t end = std::min(operation.num_steps(), operation.lag() + 1);
        if (waiter_.is_intact()) fill(operation, call, end, false);
    }

    // `Operation` has num_steps() (1 at least), lag(), fill(step, slot) and drain(step, global_step). Throws Failure.
    template <class Operation>
    void run(Operation& operation, const CallInfo& call) {
        waiter_.require_intact();
        const uint64_t first = next_step_, num_steps = operation.num_steps(), lag = operation.lag();
        for (uint64_t step = 0; step < num_steps + lag; ++step) {
            fill(operation, call, std::min(num_steps, step + 1), true);
            if (step < lag) continue;
            waiter_.await(WRITTEN, first + step - lag);
            if (step == lag) compare(call, first);
            operation.drain(step - lag, first + step - lag);
            waiter_.arrive(CONSUMED, first + step - lag);
        }
        next_step_ = first + num_steps;
        num_filled_ = 0;
    }

  private:
    // Fills slots up to a step of the operation; without waiting only those that are free now.
    template <class Operation>
    void fill(Operation& operation, const CallInfo& call, uint64_t end, bool waits) {
        for (; num_filled_ < end; ++num_filled_) {
            const uint64_t step = next_step_ + num_filled_;
            if (step >= NUM_PARITIES && !waiter_.has_come(CONSUMED, step - NUM_PARITIES)) {
                if (!waits) return;
                waiter_.await(CONSUMED, step - NUM_PARITIES);
            }
            if (num_filled_ == 0) segment_.rank_state(rank_).at[step % NUM_PARITIES].call = call;
            operation.fill(num_filled_, segment_.slot(rank_, step));
            waiter_.arrive(WRITTEN, step);
        }
    }

    void compare(const CallInfo& call, uint64_t step) const {
        for (int rank = 0; rank < segment_.num_ranks(); ++rank) {
            if (segment_.rank_state(rank).at[step % NUM_PARITIES].call == call) continue;
            waiter_.fail(MISMATCH, rank_, step);
        }
    }

    const Segment& segment_;
    const int rank_;
    const Waiter& waiter_;
    uint64_t next_step_ = 0;   // of all operations
    uint64_t num_filled_ = 0;  // steps of the operation that begins there
};

}  // namespace booster
