// Memory that the ranks of a communicator share, all on one host, and hand each other bytes through.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <vector>

namespace simulated {

// What a rank says of the collective that it calls; must be equal on all ranks, but for the device.
struct Call {
  int64_t name = 0, num_bytes = 0, root = -1, device = -1;
};

// Thrown by waits once `interrupt` was called.
struct Interrupted : std::runtime_error {
  Interrupted() : std::runtime_error("the communicator was aborted") {}
};

// Every rank has a segment, which the others map: a word that counts the collectives it arrived at, two buffers in turn
// for what it hands out in them, and for each receiver a queue of messages. Who waits sleeps in the kernel, so that a
// rank that is late has the cores. (Gloo's threads spin from the arrival of bytes to the call that receives them.) To be
// called by one thread, but for `interrupt`.
class Exchange {
 public:
  // Returns when all ranks are there.
  Exchange(c10d::Store& store, int rank, int size);
  ~Exchange();
  Exchange(const Exchange&) = delete;

  int rank() const { return rank_; }
  int size() const { return int(segments_.size()); }

  // Hands out bytes and waits for those of all ranks, which are good until the next call.
  std::vector<at::Tensor> gather(const Call& mine, const at::Tensor& bytes, std::vector<Call>& calls);

  // Leaves a message; returns its number.
  uint32_t send(int receiver, const at::Tensor& bytes);
  void wait_received(int receiver, uint32_t number);
  // Waits for the next message. Returns its size, which the caller compares: it is copied only where it fits.
  int64_t receive(int sender, const at::Tensor& bytes);

  void interrupt() { is_interrupted_ = true; }

 private:
  struct Header;
  Header& header(int rank) const { return *reinterpret_cast<Header*>(segments_[rank]); }
  char* buffer(int rank, int index) const;
  void wait_until(std::atomic<uint32_t>& word, uint32_t number) const;

  int rank_;
  std::vector<char*> segments_;
  size_t segment_bytes_;
  uint32_t num_collectives_ = 0;
  std::vector<int64_t> queued_;  // by receiver: bytes of messages that may not have been received
  std::atomic<bool> is_interrupted_ = false;
};

}  // namespace simulated
