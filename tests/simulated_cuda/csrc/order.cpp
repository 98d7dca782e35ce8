#include "order.h"

#include <algorithm>
#include <mutex>
#include <set>
#include <vector>

#include "pinned.h"
#include "report.h"

namespace simulated {

bool drops_avoidable_waits = false;
bool checks_order = true;
std::atomic<uint64_t> num_settled{0};

namespace {

constexpr StreamKey kHost = -1;

struct Access {
  Point point;
  uintptr_t begin, end;
  bool writes;
  std::string operation, place;
};

struct Allocation {
  size_t num_bytes;
  StreamKey stream;
  Memory kind;
  std::vector<Access> accesses;  // those that a later one may race with
  std::set<StreamKey> recorded;
};

std::mutex lock;
std::map<uintptr_t, Allocation> allocations;
std::map<StreamKey, Clock> clocks;
uint64_t last_number = 0;

void join(Clock& clock, const Clock& other) {
  for (const auto& [stream, number] : other) {
    auto& mine = clock[stream];
    mine = std::max(mine, number);
  }
}

Allocation* allocation_of(uintptr_t address) {
  auto found = allocations.upper_bound(address);
  if (found == allocations.begin()) return nullptr;
  --found;
  return address < found->first + std::max<size_t>(found->second.num_bytes, 1) ? &found->second : nullptr;
}

std::string name_of(StreamKey stream) {
  return "stream " + std::to_string(stream % 1000000) + " of cuda:" + std::to_string(stream / 1000000);
}

std::string description_of(const Access& access) {
  auto text = access.operation + (access.writes ? " writes" : " reads") + " on " + name_of(access.point.stream);
  return access.place.empty() ? text : text + " (" + access.place + ")";
}

}  // namespace

Point launch(StreamKey stream) {
  std::lock_guard guard(lock);
  auto& clock = clocks[stream];
  join(clock, clocks[kHost]);
  return {stream, clock[stream] = ++last_number};
}

Clock clock_of(StreamKey stream) {
  std::lock_guard guard(lock);
  return clocks[stream];
}

Clock clock_of_host() { return clock_of(kHost); }

Clock clock_of_device(int device) {
  std::lock_guard guard(lock);
  Clock all;
  for (const auto& [stream, clock] : clocks)
    if (stream != kHost && stream / 1000000 == device) join(all, clock);
  return all;
}

void stream_waits(StreamKey stream, const Clock& clock) {
  std::lock_guard guard(lock);
  join(clocks[stream], clock);
}

void host_waits(const Clock& clock) {
  Clock known;
  {
    std::lock_guard guard(lock);
    join(clocks[kHost], clock);
    known = clocks[kHost];
  }
  finish_pinned_copies(known);
}

void host_waits_avoidably(const Clock& clock) {
  if (!drops_avoidable_waits) host_waits(clock);
}

void settle_order() {
  std::lock_guard guard(lock);
  num_settled = last_number;
  clocks.clear();
}

void note_allocation(const void* begin, size_t num_bytes, StreamKey stream, Memory kind) {
  std::lock_guard guard(lock);
  allocations[reinterpret_cast<uintptr_t>(begin)] = Allocation{num_bytes, stream, kind, {}, {}};
}

void note_free(const void* begin) {
  std::string fault;
  {
    std::lock_guard guard(lock);
    auto found = allocations.find(reinterpret_cast<uintptr_t>(begin));
    if (found == allocations.end()) return;
    const auto& freed = found->second;
    const auto &own = clocks[freed.stream], &host = clocks[kHost];
    if (checks_order && freed.kind == Memory::kDevice)
      for (const auto& access : freed.accesses) {
        bool is_safe = access.point.stream == freed.stream || is_before(access.point, own) ||
                       is_before(access.point, host);
        // The memory is used again behind all that the recorded streams have been given by now.
        for (auto stream : freed.recorded)
          is_safe = is_safe || access.point.stream == stream || is_before(access.point, clocks[stream]);
        if (!is_safe)
          fault = std::to_string(freed.num_bytes) + " bytes allocated on " + name_of(freed.stream) +
                  " are freed while " + description_of(access) + " them, without record_stream or an event";
      }
    allocations.erase(found);
  }
  if (!fault.empty()) report("lifetime", fault);
}

void record_stream(const void* begin, StreamKey stream) {
  std::lock_guard guard(lock);
  if (auto* found = allocation_of(reinterpret_cast<uintptr_t>(begin))) found->recorded.insert(stream);
}

void note_access(const Point& point, uintptr_t begin, uintptr_t end, bool writes, const std::string& operation) {
  if (!checks_order || begin >= end) return;
  Access now{point, begin, end, writes, operation, place_if_traced()};
  std::string fault;
  {
    std::lock_guard guard(lock);
    auto* allocation = allocation_of(begin);
    if (allocation == nullptr) return;
    const auto& clock = clocks[point.stream];
    auto& accesses = allocation->accesses;
    for (const auto& earlier : accesses) {
      bool overlaps = earlier.begin < end && begin < earlier.end;
      if (overlaps && (earlier.writes || writes) && !is_before(earlier.point, clock))
        fault = description_of(now) + " what " + description_of(earlier) + " with no order between them";
    }
    // Whatever is ordered behind this access is ordered behind those that it follows, so those can be forgotten.
    accesses.erase(
        std::remove_if(
            accesses.begin(), accesses.end(),
            [&](const Access& earlier) {
              bool is_covered = begin <= earlier.begin && earlier.end <= end;
              return is_covered && (writes || (!earlier.writes && earlier.point.stream == point.stream));
            }),
        accesses.end());
    accesses.push_back(std::move(now));
  }
  if (!fault.empty()) report("race", fault);
}

}  // namespace simulated
