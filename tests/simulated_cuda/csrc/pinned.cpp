#include "pinned.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "report.h"

namespace simulated {
namespace {

constexpr int kGarbage = 0xCB;

struct Copy {
  Point point;
  uintptr_t begin;
  std::vector<char> bytes;
  at::Tensor host;  // keeps the memory alive
  std::string place;
  bool is_alone = true;  // of copies to the host: no other one in flight overlaps
  uintptr_t end() const { return begin + bytes.size(); }
  bool overlaps(const Copy& other) const { return begin < other.end() && other.begin < end(); }
};

std::mutex lock;
std::map<uintptr_t, size_t> blocks;
std::vector<Copy> to_host, from_host;  // in the order of their launches

void free_block(void* block) {
  if (block == nullptr) return;
  note_free(block);
  {
    std::lock_guard guard(lock);
    blocks.erase(reinterpret_cast<uintptr_t>(block));
  }
  std::free(block);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    void* block = nullptr;
    if (num_bytes > 0) {
      TORCH_CHECK(posix_memalign(&block, 4096, num_bytes) == 0, "no memory to pin");
      note_allocation(block, num_bytes, 0, Memory::kPinned);
      std::lock_guard guard(lock);
      blocks[reinterpret_cast<uintptr_t>(block)] = num_bytes;
    }
    return {block, block, &free_block, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t num_bytes) const override { std::memcpy(to, from, num_bytes); }
};

template <class Predicate>
std::vector<Copy> take(std::vector<Copy>& copies, Predicate is_taken) {
  std::vector<Copy> taken, left;
  for (auto& copy : copies) (is_taken(copy) ? taken : left).push_back(std::move(copy));
  copies.swap(left);
  return taken;
}

std::string changed(const Copy& copy, const std::string& direction) {
  return "the host changed " + std::to_string(copy.bytes.size()) + " pinned bytes before it knew that their copy " +
         direction + " the device was done; copied at " + copy.place;
}

// Destroyed without the lock: a copy may be the last owner of its memory.
std::vector<Copy> finish(const std::function<bool(const Copy&)>& is_done, std::vector<std::string>& faults) {
  std::lock_guard guard(lock);
  auto finished = take(to_host, is_done);
  for (const auto& copy : finished) {
    auto* memory = reinterpret_cast<unsigned char*>(copy.begin);
    if (copy.is_alone && !std::all_of(memory, memory + copy.bytes.size(), [](auto byte) { return byte == kGarbage; }))
      faults.push_back(changed(copy, "from"));
    std::memcpy(memory, copy.bytes.data(), copy.bytes.size());
  }
  for (auto& copy : take(from_host, is_done)) {
    if (std::memcmp(reinterpret_cast<void*>(copy.begin), copy.bytes.data(), copy.bytes.size()) != 0)
      faults.push_back(changed(copy, "to"));
    finished.push_back(std::move(copy));
  }
  return finished;
}

}  // namespace

c10::Allocator* pinned_allocator() {
  static PinnedAllocator allocator;
  return &allocator;
}

bool is_pinned(const void* address) {
  std::lock_guard guard(lock);
  auto found = blocks.upper_bound(reinterpret_cast<uintptr_t>(address));
  if (found == blocks.begin()) return false;
  --found;
  return reinterpret_cast<uintptr_t>(address) < found->first + found->second;
}

void copy_to_pinned(const Point& point, const at::Tensor& host, std::vector<char> bytes) {
  auto begin = reinterpret_cast<uintptr_t>(host.mutable_data_ptr());
  Copy copy{point, begin, std::move(bytes), host, place()};
  note_access(point, copy.begin, copy.end(), true, "copy_ to pinned memory");
  std::vector<Copy> overwritten;
  std::lock_guard guard(lock);
  // The device changes what an earlier copy has read: no longer a fault of the host's.
  overwritten = take(from_host, [&](const Copy& one) { return one.overlaps(copy); });
  for (auto& other : to_host)
    if (other.overlaps(copy)) other.is_alone = copy.is_alone = false;
  std::memset(reinterpret_cast<void*>(begin), kGarbage, copy.bytes.size());
  to_host.push_back(std::move(copy));
}

std::vector<char> copy_from_pinned(const Point& point, const at::Tensor& host) {
  auto begin = reinterpret_cast<uintptr_t>(host.const_data_ptr());
  auto* memory = reinterpret_cast<const char*>(begin);
  Copy copy{point, begin, std::vector<char>(memory, memory + host.nbytes()), host, place()};
  note_access(point, copy.begin, copy.end(), false, "copy_ from pinned memory");
  std::lock_guard guard(lock);
  for (const auto& written : to_host) {
    auto low = std::max(written.begin, copy.begin), high = std::min(written.end(), copy.end());
    if (low < high) std::memcpy(&copy.bytes[low - copy.begin], &written.bytes[low - written.begin], high - low);
  }
  from_host.push_back(copy);
  return copy.bytes;
}

void finish_pinned_copies(const Clock& known) {
  std::vector<std::string> faults;
  finish([&](const Copy& copy) { return is_before(copy.point, known); }, faults);
  for (const auto& fault : faults) report("pinned", fault);
}

void settle_pinned_copies() {
  std::vector<std::string> faults;
  finish([](const Copy&) { return true; }, faults);
  for (const auto& fault : faults) report("pinned", fault);
}

}  // namespace simulated
