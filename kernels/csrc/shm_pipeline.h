// Runs a collective as a pipeline of steps: a rank fills its next slot while other ranks still write.
//
// Note [Steps]: an operation has the same number of steps on every rank. In a step each rank fills one of its two
// slots, signals WRITTEN, waits for WRITTEN of all ranks, reads from the slots of the others, and signals CONSUMED.
// Steps are numbered across operations, and a rank fills the slot of step s once all ranks have consumed step s - 2,
// which used the same slot. With a lag of 1 it fills the slot of step s + 1 before it waits for step s. No rank is more
// than two steps ahead of another, so four rotating counters suffice. At its first step each rank writes a description
// of its call next to the slot, and compares it with those of the others: ranks in different calls fail there, before
// any data is misinterpreted.
#pragma once

#include <cstdint>

#include "shm_waiting.h"

namespace booster {

class Pipeline {
  public:
    Pipeline(const Segment& segment, int rank, const Waiter& waiter)
        : segment_(segment), rank_(rank), waiter_(waiter) {}

    // `Operation` has num_steps() (1 at least), lag(), fill(step, slot) and drain(step, global_step). Throws Failure.
    template <class Operation>
    void run(Operation& operation, const CallInfo& call) {
        waiter_.require_intact();
        const uint64_t first = next_step_, num_steps = operation.num_steps(), lag = operation.lag();
        for (uint64_t step = 0; step < num_steps + lag; ++step) {
            if (step < num_steps) {
                if (first + step >= NUM_PARITIES) waiter_.await(CONSUMED, first + step - NUM_PARITIES);
                if (step == 0) segment_.rank_state(rank_).at[first % NUM_PARITIES].call = call;
                operation.fill(step, segment_.slot(rank_, first + step));
                waiter_.arrive(WRITTEN, first + step);
            }
            if (step < lag) continue;
            waiter_.await(WRITTEN, first + step - lag);
            if (step == lag) compare(call, first);
            operation.drain(step - lag, first + step - lag);
            waiter_.arrive(CONSUMED, first + step - lag);
        }
        next_step_ = first + num_steps;
    }

  private:
    void compare(const CallInfo& call, uint64_t step) const {
        for (int rank = 0; rank < segment_.num_ranks(); ++rank) {
            if (segment_.rank_state(rank).at[step % NUM_PARITIES].call == call) continue;
            waiter_.fail(MISMATCH, rank_, step);
        }
    }

    const Segment& segment_;
    const int rank_;
    const Waiter& waiter_;
    uint64_t next_step_ = 0;
};

}  // namespace booster
