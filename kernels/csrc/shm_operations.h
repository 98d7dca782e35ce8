// The collectives as pipeline steps: what a rank writes to its slot, and what it reads from the slots of the others.
//
// Bytes that a rank copies, for a buffer of N bytes on P ranks (read and written; slots mostly stay in the caches):
//   broadcast        N at the source, N elsewhere
//   all_gather       N/P into the slot, N (P-1)/P out of the slots
//   all_to_all       N (P-1)/P into the slot, N out
//   reduce_scatter   N (P-1)/P into the slot, then one pass over N that writes N/P
//   all_reduce       short: N into the slot, then one pass over N P that writes N; every rank reduces everything.
//                    long: a reduce_scatter and an all_gather, block by block.
// Large results that are only copied use non-temporal stores: they exceed the caches, and need no fetch.
// The order of summation depends only on the ranks: a reduce_scatter starts with the rank's own shard and continues
// with those of the next ranks, see Note [Shards] in bucket_collectives.py; an all_reduce starts with rank 0.
#pragma once

#include <cstdint>
#include <cstring>

#include "shm_segment.h"
#include "shm_vector.h"

namespace booster {

using ReduceFunction = void (*)(const Reduction&, const void* const*, int, void*, int64_t);
using CopyFunction = void (*)(void*, const void*, int64_t);

constexpr uint64_t PAST_CACHES_BYTES = 8u << 20;

// Ranks, buffers and vector functions of an operation.
struct Context {
    const Segment& segment;
    int rank;
    int num_ranks;
    ReduceFunction reduce;
    CopyFunction copy_past_caches;

    // Copies a range of a result of `of_bytes` in total.
    void copy_result(char* to, const char* from, uint64_t bytes, uint64_t of_bytes) const {
        if (of_bytes >= PAST_CACHES_BYTES) {
            copy_past_caches(to, from, static_cast<int64_t>(bytes));
        } else {
            std::memcpy(to, from, bytes);
        }
    }

    uint64_t slot_bytes() const { return segment.slot_bytes(); }
    const char* slot(int of_rank, uint64_t step) const { return segment.slot(of_rank, step); }
    int other(int distance) const { return (rank + distance) % num_ranks; }
};

inline uint64_t smaller(uint64_t a, uint64_t b) { return a < b ? a : b; }

// A range that is processed in chunks; an empty one takes one step as well, to synchronize the ranks.
struct Chunks {
    uint64_t total;
    uint64_t chunk;

    uint64_t number() const { return total == 0 ? 1 : (total + chunk - 1) / chunk; }
    uint64_t begin(uint64_t index) const { return index * chunk; }
    uint64_t length(uint64_t index) const { return smaller(chunk, total - begin(index)); }
};

class Broadcast {
  public:
    Broadcast(const Context& context, char* data, uint64_t bytes, int source)
        : context_(context), data_(data), chunks_{bytes, context.slot_bytes()}, source_(source) {}

    uint64_t num_steps() const { return chunks_.number(); }
    uint64_t lag() const { return 1; }

    void fill(uint64_t step, char* slot) {
        if (context_.rank == source_) std::memcpy(slot, data_ + chunks_.begin(step), chunks_.length(step));
    }

    void drain(uint64_t step, uint64_t global_step) {
        if (context_.rank == source_) return;
        context_.copy_result(data_ + chunks_.begin(step), context_.slot(source_, global_step), chunks_.length(step),
                            chunks_.total);
    }

  private:
    const Context& context_;
    char* const data_;
    const Chunks chunks_;
    const int source_;
};

// `own` may alias this rank's shard of the buffer.
class AllGather {
  public:
    AllGather(const Context& context, char* buffer, const char* own, uint64_t shard_bytes)
        : context_(context), buffer_(buffer), own_(own), chunks_{shard_bytes, context.slot_bytes()} {}

    uint64_t num_steps() const { return chunks_.number(); }
    uint64_t lag() const { return 1; }

    void fill(uint64_t step, char* slot) {
        const char* from = own_ + chunks_.begin(step);
        std::memcpy(slot, from, chunks_.length(step));
        char* to = place(context_.rank, step);
        if (to != from) copy_shard(to, from, step);
    }

    void drain(uint64_t step, uint64_t global_step) {
        for (int distance = 1; distance < context_.num_ranks; ++distance) {
            const int other = context_.other(distance);
            copy_shard(place(other, step), context_.slot(other, global_step), step);
        }
    }

  private:
    void copy_shard(char* to, const char* from, uint64_t step) const {
        context_.copy_result(to, from, chunks_.length(step), chunks_.total * context_.num_ranks);
    }

    char* place(int rank, uint64_t step) const {
        return buffer_ + static_cast<uint64_t>(rank) * chunks_.total + chunks_.begin(step);
    }

    const Context& context_;
    char* const buffer_;
    const char* const own_;
    const Chunks chunks_;
};

// The first half of all_to_all and reduce_scatter: a slot holds a block for each rank.
class Blocks {
  public:
    Blocks(const Context& context, const char* input, uint64_t shard_bytes)
        : context_(context), input_(input), chunks_{shard_bytes, context.slot_bytes() / context.num_ranks / 64 * 64} {}

    const Chunks& chunks() const { return chunks_; }

    const char* own(uint64_t step) const { return shard(context_.rank, step); }

    void fill(uint64_t step, char* slot) const {
        for (int distance = 1; distance < context_.num_ranks; ++distance) {
            const int other = context_.other(distance);
            std::memcpy(slot + other * chunks_.chunk, shard(other, step), chunks_.length(step));
        }
    }

    // Data of another rank for this one.
    const char* from(int rank, uint64_t global_step) const {
        return context_.slot(rank, global_step) + context_.rank * chunks_.chunk;
    }

  private:
    const char* shard(int rank, uint64_t step) const {
        return input_ + static_cast<uint64_t>(rank) * chunks_.total + chunks_.begin(step);
    }

    const Context& context_;
    const char* const input_;
    const Chunks chunks_;
};

class AllToAll {
  public:
    AllToAll(const Context& context, char* output, const char* input, uint64_t shard_bytes)
        : context_(context), blocks_(context, input, shard_bytes), output_(output) {}

    uint64_t num_steps() const { return blocks_.chunks().number(); }
    uint64_t lag() const { return 1; }
    void fill(uint64_t step, char* slot) { blocks_.fill(step, slot); }

    void drain(uint64_t step, uint64_t global_step) {
        take(context_.rank, step, blocks_.own(step));
        for (int distance = 1; distance < context_.num_ranks; ++distance) {
            const int other = context_.other(distance);
            take(other, step, blocks_.from(other, global_step));
        }
    }

  private:
    void take(int rank, uint64_t step, const char* from) const {
        const Chunks& chunks = blocks_.chunks();
        char* to = output_ + static_cast<uint64_t>(rank) * chunks.total + chunks.begin(step);
        context_.copy_result(to, from, chunks.length(step), chunks.total * context_.num_ranks);
    }

    const Context& context_;
    const Blocks blocks_;
    char* const output_;
};

class ReduceScatter {
  public:
    ReduceScatter(const Context& context, const Reduction& reduction, uint64_t element_bytes,
                  uint64_t output_element_bytes, const char* payload, char* output, uint64_t shard_count)
        : context_(context), reduction_(reduction), blocks_(context, payload, shard_count * element_bytes),
          element_bytes_(element_bytes), output_element_bytes_(output_element_bytes), output_(output) {}

    uint64_t num_steps() const { return blocks_.chunks().number(); }
    uint64_t lag() const { return 1; }
    void fill(uint64_t step, char* slot) { blocks_.fill(step, slot); }

    void drain(uint64_t step, uint64_t global_step) {
        const void* terms[MAX_RANKS];
        terms[0] = blocks_.own(step);
        for (int distance = 1; distance < context_.num_ranks; ++distance) {
            terms[distance] = blocks_.from(context_.other(distance), global_step);
        }
        const Chunks& chunks = blocks_.chunks();
        char* to = output_ + chunks.begin(step) / element_bytes_ * output_element_bytes_;
        context_.reduce(reduction_, terms, context_.num_ranks, to,
                       static_cast<int64_t>(chunks.length(step) / element_bytes_));
    }

  private:
    const Context& context_;
    const Reduction reduction_;
    const Blocks blocks_;
    const uint64_t element_bytes_, output_element_bytes_;
    char* const output_;
};

// Every rank reduces everything, with one synchronization; for short tensors.
class ShortAllReduce {
  public:
    ShortAllReduce(const Context& context, const Reduction& reduction, uint64_t element_bytes, char* data,
                   uint64_t count)
        : context_(context), reduction_(reduction), element_bytes_(element_bytes), data_(data),
          chunks_{count * element_bytes, context.slot_bytes()} {}

    uint64_t num_steps() const { return chunks_.number(); }
    uint64_t lag() const { return 1; }
    void fill(uint64_t step, char* slot) { std::memcpy(slot, data_ + chunks_.begin(step), chunks_.length(step)); }

    void drain(uint64_t step, uint64_t global_step) {
        const void* terms[MAX_RANKS];
        for (int rank = 0; rank < context_.num_ranks; ++rank) terms[rank] = context_.slot(rank, global_step);
        context_.reduce(reduction_, terms, context_.num_ranks, data_ + chunks_.begin(step),
                       static_cast<int64_t>(chunks_.length(step) / element_bytes_));
    }

  private:
    const Context& context_;
    const Reduction reduction_;
    const uint64_t element_bytes_;
    char* const data_;
    const Chunks chunks_;
};

// Each rank reduces one block of a chunk (step 1 of the chunk), which all ranks then copy (step 2).
//
// Note [Interleaving]: with chunks A, B, C the steps are A1 B1 A2 C1 B2 C2. So with a lag of 1 a rank has reduced a
// block (drained A1) before it fills a slot with it (A2), and no rank waits for a step that has just started. A single
// chunk can't be interleaved, and runs without lag.
class LongAllReduce {
  public:
    LongAllReduce(const Context& context, const Reduction& reduction, uint64_t element_bytes, char* data,
                  uint64_t count)
        : context_(context), reduction_(reduction), element_bytes_(element_bytes), data_(data),
          block_(block_bytes(context, count * element_bytes)),
          chunks_{count * element_bytes, block_ * context.num_ranks} {}

    uint64_t num_steps() const { return 2 * chunks_.number(); }
    uint64_t lag() const { return chunks_.number() > 1 ? 1 : 0; }

    void fill(uint64_t step, char* slot) {
        const uint64_t chunk = chunk_of(step);
        if (spreads(step)) {
            std::memcpy(slot, data_ + begin(chunk, context_.rank), length(chunk, context_.rank));
            return;
        }
        for (int distance = 1; distance < context_.num_ranks; ++distance) {
            const int other = context_.other(distance);
            std::memcpy(slot + other * block_, data_ + begin(chunk, other), length(chunk, other));
        }
    }

    void drain(uint64_t step, uint64_t global_step) {
        const uint64_t chunk = chunk_of(step);
        if (!spreads(step)) return reduce(chunk, global_step);
        for (int distance = 1; distance < context_.num_ranks; ++distance) {
            const int other = context_.other(distance);
            std::memcpy(data_ + begin(chunk, other), context_.slot(other, global_step), length(chunk, other));
        }
    }

  private:
    static uint64_t block_bytes(const Context& context, uint64_t bytes) {
        const uint64_t num_ranks = static_cast<uint64_t>(context.num_ranks);
        const uint64_t shared_out = (bytes + num_ranks - 1) / num_ranks;
        return smaller(context.slot_bytes() / num_ranks, shared_out + 63) / 64 * 64;
    }

    bool spreads(uint64_t step) const {
        if (step == 0) return false;
        return step % 2 == 0 || step == num_steps() - 1;
    }

    uint64_t chunk_of(uint64_t step) const {
        if (step == 0) return 0;
        if (step == num_steps() - 1) return chunks_.number() - 1;
        return step % 2 == 0 ? step / 2 - 1 : (step + 1) / 2;
    }

    void reduce(uint64_t chunk, uint64_t global_step) const {
        char* own = data_ + begin(chunk, context_.rank);
        const void* terms[MAX_RANKS];
        for (int rank = 0; rank < context_.num_ranks; ++rank) {
            terms[rank] = rank == context_.rank ? own : context_.slot(rank, global_step) + context_.rank * block_;
        }
        context_.reduce(reduction_, terms, context_.num_ranks, own,
                       static_cast<int64_t>(length(chunk, context_.rank) / element_bytes_));
    }

    uint64_t begin(uint64_t chunk, int rank) const {
        return smaller(chunks_.total, chunks_.begin(chunk) + static_cast<uint64_t>(rank) * block_);
    }
    uint64_t length(uint64_t chunk, int rank) const { return smaller(block_, chunks_.total - begin(chunk, rank)); }

    const Context& context_;
    const Reduction reduction_;
    const uint64_t element_bytes_;
    char* const data_;
    const uint64_t block_;
    const Chunks chunks_;
};

}  // namespace booster
