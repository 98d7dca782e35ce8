// A backend of torch.distributed with the rules of NCCL, which moves its bytes through shared memory.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <memory>
#include <string>
#include <vector>

namespace simulated {

struct Communicator;
struct Operation;

// Tensors of one device only, of dtypes that NCCL has, and contiguous. Operations run in the order of their calls, in a
// stream and a thread of the communicator's own; the caller's stream waits for one when `wait` is called. A message
// ends when its receiver has it, and its tag means nothing. A lost rank raises nothing: the watchdog ends the process
// at the timeout. Other than by NCCL, `wait` blocks the host, and calls that differ between ranks raise there.
class Simccl final : public c10d::Backend {
 public:
  struct Options final : c10d::Backend::Options {
    Options() : c10d::Backend::Options("nccl") {}
    bool is_high_priority_stream = false;
    c10::intrusive_ptr<c10d::Backend> split_from;
    int64_t split_color = 0;
  };

  using Tensors = std::vector<at::Tensor>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  Simccl(c10::intrusive_ptr<c10d::Store> store, int rank, int size, c10::intrusive_ptr<Options> options);
  ~Simccl() override;

  const std::string getBackendName() const override { return "nccl"; }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override { return options_; }
  c10::intrusive_ptr<Options> options() const { return options_; }
  bool supportsSplitting() const override { return true; }
  bool supportsCoalescing() const override { return true; }
  c10::intrusive_ptr<c10d::Backend> split(
      const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
      const c10::intrusive_ptr<c10d::Backend::Options>& options) override;
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return num_operations_; }
  void setTimeout(std::chrono::milliseconds timeout) override;
  void abort() override;
  void shutdown() override;
  // Every rank of a communicator takes part in each split of it.
  void split_without_part() { ++num_splits_; }
  int64_t num_splits() const { return num_splits_; }

  void startCoalescing() override { is_batching_ = true; }
  WorkPtr endCoalescing() override;

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr allgather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPtr reduce_scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override;
  WorkPtr send(Tensors& tensors, int receiver, int tag) override;
  WorkPtr recv(Tensors& tensors, int sender, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;

 private:
  WorkPtr add(Operation operation);
  WorkPtr enqueue(std::vector<Operation> operations);
  void check_tensor(const at::Tensor& tensor);

  c10::intrusive_ptr<c10d::Store> store_;
  c10::intrusive_ptr<Options> options_;
  std::shared_ptr<Communicator> communicator_;
  std::vector<Operation> batch_;
  bool is_batching_ = false;
  uint64_t num_operations_ = 0;
  int64_t num_splits_ = 0;
};

}  // namespace simulated
