// What is ordered before what: streams and the host as vector clocks, and the accesses to memory that they order.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

namespace simulated {

using StreamKey = int64_t;
using Clock = std::map<StreamKey, uint64_t>;  // of each stream, the last operation that is known to be done

// An operation in a stream. Numbers grow over all streams.
struct Point {
  StreamKey stream = 0;
  uint64_t number = 0;
};

// Operations up to this number are before everything: the host has waited for them.
extern std::atomic<uint64_t> num_settled;

inline bool is_before(const Point& point, const Clock& clock) {
  if (point.number <= num_settled) return true;
  auto found = clock.find(point.stream);
  return found != clock.end() && point.number <= found->second;
}

// Starts an operation in a stream, behind all that the stream and the host have waited for.
Point launch(StreamKey stream);
Clock clock_of(StreamKey stream);
Clock clock_of_device(int device);
Clock clock_of_host();
void stream_waits(StreamKey stream, const Clock& clock);

// The host has waited: it may read what was copied to pinned memory, and change what was copied from there.
void host_waits(const Clock& clock);
// A wait that the program did not ask for, such as that of item(). With `drops_avoidable_waits` it orders nothing, so
// that it does not hide a wait that is missing elsewhere.
void host_waits_avoidably(const Clock& clock);
extern bool drops_avoidable_waits;
// The host has waited for all streams, and nothing is compared any more with what came before. Without it the clocks of
// a process that runs many programs grow with each stream that one of them had.
void settle_order();

// Memory, with the stream that was current when it was allocated. Pinned memory may be freed at any time, as torch's
// allocator waits before it gives it to another.
enum class Memory { kDevice, kPinned };
void note_allocation(const void* begin, size_t num_bytes, StreamKey stream, Memory kind);
void note_free(const void* begin);
void record_stream(const void* begin, StreamKey stream);

// Notes that an operation reads or writes bytes, and reports a race with an earlier one that is not ordered before it.
void note_access(const Point& point, uintptr_t begin, uintptr_t end, bool writes, const std::string& operation);
extern bool checks_order;

}  // namespace simulated
