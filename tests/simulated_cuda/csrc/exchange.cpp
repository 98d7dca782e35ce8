#include "exchange.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <cstring>
#include <string>

namespace simulated {

namespace {

constexpr int kMaxRanks = 16, kMaxQueued = 256;
constexpr int64_t kBufferBytes = int64_t(4) << 30;  // of addresses: memory is what was written
constexpr int64_t kHeaderBytes = 1 << 18;
constexpr int64_t kAlignment = 64;
constexpr long kPollNanoseconds = 50'000'000;  // how often a wait looks for an interruption

std::string error_text(const char* what) { return std::string(what) + ": " + std::strerror(errno); }

bool is_reached(uint32_t value, uint32_t number) { return int32_t(value - number) >= 0; }

void post(std::atomic<uint32_t>& word, uint32_t number) {
  word.store(number);
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

char* map(int file, size_t num_bytes) {
  auto* memory = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
  TORCH_CHECK(memory != MAP_FAILED, error_text("mmap"));
  return static_cast<char*>(memory);
}

}  // namespace

struct Exchange::Header {
  struct Message {
    int64_t offset, num_bytes;
  };

  std::atomic<uint32_t> num_arrived;
  Call calls[2];
  int64_t num_bytes[2];
  std::atomic<uint32_t> num_sent[kMaxRanks];      // by receiver
  std::atomic<uint32_t> num_received[kMaxRanks];  // by sender
  Message messages[kMaxRanks][kMaxQueued];
};

Exchange::Exchange(c10d::Store& store, int rank, int size)
    : rank_(rank), segments_(size, nullptr), segment_bytes_(kHeaderBytes + (2 + size) * kBufferBytes), queued_(size) {
  static_assert(sizeof(Header) <= kHeaderBytes);
  TORCH_CHECK(size <= kMaxRanks, "the simulated NCCL has communicators of at most ", kMaxRanks, " ranks");
  int own = memfd_create("simulated nccl", MFD_CLOEXEC);
  TORCH_CHECK(own >= 0 && ftruncate(own, segment_bytes_) == 0, error_text("memfd_create"));
  segments_[rank] = map(own, segment_bytes_);
  auto key = [](int of) { return "segment of rank " + std::to_string(of); };
  store.set(key(rank), "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(own));
  for (int other = 0; other < size; ++other) {
    if (other == rank) continue;
    auto path = store.get_to_str(key(other));
    int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
    TORCH_CHECK(file >= 0, error_text(path.c_str()));
    segments_[other] = map(file, segment_bytes_);
    close(file);
  }
  std::vector<Call> calls;
  gather({}, at::empty({0}, at::kByte), calls);  // all have opened the own file
  close(own);
}

Exchange::~Exchange() {
  for (auto* segment : segments_)
    if (segment != nullptr) munmap(segment, segment_bytes_);
}

char* Exchange::buffer(int rank, int index) const { return segments_[rank] + kHeaderBytes + index * kBufferBytes; }

void Exchange::wait_until(std::atomic<uint32_t>& word, uint32_t number) const {
  const timespec poll{0, kPollNanoseconds};
  for (;;) {
    auto value = word.load();
    if (is_reached(value, number)) return;
    if (is_interrupted_) throw Interrupted();
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, value, &poll, nullptr, 0);
  }
}

std::vector<at::Tensor> Exchange::gather(const Call& mine, const at::Tensor& bytes, std::vector<Call>& calls) {
  // A rank that is here has read what it got in the collective before, so that the buffer before that one is free.
  const int half = ++num_collectives_ % 2;
  TORCH_CHECK(bytes.numel() <= kBufferBytes, "a collective of ", bytes.numel(), " bytes");
  auto& own = header(rank_);
  own.calls[half] = mine;
  own.num_bytes[half] = bytes.numel();
  if (bytes.numel() > 0) std::memcpy(buffer(rank_, half), bytes.const_data_ptr(), bytes.numel());
  post(own.num_arrived, num_collectives_);
  std::vector<at::Tensor> all;
  calls.clear();
  for (int other = 0; other < size(); ++other) {
    wait_until(header(other).num_arrived, num_collectives_);
    calls.push_back(header(other).calls[half]);
    all.push_back(at::from_blob(buffer(other, half), {header(other).num_bytes[half]}, at::kByte));
  }
  return all;
}

uint32_t Exchange::send(int receiver, const at::Tensor& bytes) {
  auto& own = header(rank_);
  auto num_sent = own.num_sent[receiver].load(), num_received = header(receiver).num_received[rank_].load();
  if (num_sent == num_received) queued_[receiver] = 0;
  auto offset = queued_[receiver];
  queued_[receiver] += (bytes.numel() + kAlignment - 1) / kAlignment * kAlignment;
  TORCH_CHECK(
      num_sent - num_received < kMaxQueued && queued_[receiver] <= kBufferBytes,
      "too many messages that are not received");
  own.messages[receiver][num_sent % kMaxQueued] = {offset, bytes.numel()};
  if (bytes.numel() > 0) std::memcpy(buffer(rank_, 2 + receiver) + offset, bytes.const_data_ptr(), bytes.numel());
  post(own.num_sent[receiver], num_sent + 1);
  return num_sent + 1;
}

void Exchange::wait_received(int receiver, uint32_t number) {
  wait_until(header(receiver).num_received[rank_], number);
}

int64_t Exchange::receive(int sender, const at::Tensor& bytes) {
  auto& num_received = header(rank_).num_received[sender];
  auto number = num_received.load();
  wait_until(header(sender).num_sent[rank_], number + 1);
  auto message = header(sender).messages[rank_][number % kMaxQueued];
  if (message.num_bytes == bytes.numel() && message.num_bytes > 0)
    std::memcpy(bytes.mutable_data_ptr(), buffer(sender, 2 + rank_) + message.offset, message.num_bytes);
  post(num_received, number + 1);
  return message.num_bytes;
}

}  // namespace simulated
