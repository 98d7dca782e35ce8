#include "simccl.h"

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <set>
#include <thread>

#include "device.h"
#include "operators.h"
#include "report.h"

namespace simulated {

using at::Tensor;
using Tensors = Simccl::Tensors;
using WorkPtr = Simccl::WorkPtr;
using Milliseconds = std::chrono::milliseconds;
using Instant = std::chrono::steady_clock::time_point;

namespace {

constexpr int kMessageTag = 77, kAcknowledgementTag = 78, kAllToAllTag = 79;
constexpr auto kNever = std::chrono::hours(24);  // of gloo, whose errors mean nothing to NCCL's callers
constexpr auto kWatchdogInterval = Milliseconds(50);

void wait_for_all(std::vector<WorkPtr>& works) {
  for (auto& work : works) work->wait();
  works.clear();
}

// Whether an error of gloo is about a rank that has ended.
bool is_loss(const std::string& error) {
  for (const auto* word : {"onnection", "closed", "imed out", "reset by peer", "roken pipe"})
    if (error.find(word) != std::string::npos) return true;
  return false;
}

}  // namespace

// An operation runs in three stages. Those of a batch run each stage together, so that messages in both directions
// meet.
struct Operation {
  std::string name;
  Tensors reads, writes;
  std::function<void()> start = [] {};
  std::function<void()> acknowledge = [] {};
  std::function<void()> finish = [] {};
  // Of collectives: what must be equal on all ranks.
  bool is_collective = true;
  int64_t num_bytes = 0;
  int64_t root = -1;
};

namespace {

class SimcclWork final : public c10d::Work {
 public:
  SimcclWork(int rank, c10::DeviceIndex device, Clock clock, Tensors reads, Tensors writes)
      : c10d::Work(rank, c10d::OpType::UNKNOWN),
        device_(device),
        clock_(std::move(clock)),
        reads_(std::move(reads)),
        writes_(std::move(writes)),
        future_(c10::make_intrusive<c10::ivalue::Future>(
            c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{c10::Device(kDevice, device)})) {}

  // Called by the communicator's thread, or by that which aborts.
  void end(std::exception_ptr error) {
    Tensors results;
    {
      std::lock_guard guard(mutex_);
      if (is_done_) return;
      is_done_ = true;
      error_ = error;
      if (has_future_) results = writes_;
    }
    changed_.notify_all();
    if (has_future_) complete_future(std::move(results));
  }

  bool isCompleted() override {
    std::lock_guard guard(mutex_);
    return is_done_;
  }

  bool isSuccess() const override { return is_done_ && !error_; }

  bool wait(Milliseconds timeout) override {
    std::unique_lock guard(mutex_);
    changed_.wait(guard, [&] { return is_done_; });
    if (error_) std::rethrow_exception(error_);
    guard.unlock();
    if (timeout != kNoTimeout) {  // NCCL blocks the host for a timeout
      report("sync", "wait with a timeout");
      host_waits(clock_);
    }
    synchronize();
    return true;
  }

  // As NCCL's, it holds no tensors after the wait: buffers are reused when nothing refers to them.
  void synchronize() override {
    stream_waits(key_of(current_stream(device_)), clock_);
    reads_.clear();
    kept_.clear();
    writes_.clear();
  }

  void blockCurrentStream() override { synchronize(); }
  std::vector<Tensor> result() override { return writes_; }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    bool is_done;
    {
      std::lock_guard guard(mutex_);
      has_future_ = true;
      is_done = is_done_;
    }
    if (is_done) complete_future(writes_);
    return future_;
  }

  const Clock& clock() const { return clock_; }

 private:
  void complete_future(Tensors results) {
    if (future_is_complete_.exchange(true)) return;
    clock_of_events = &clock_;
    if (error_)
      future_->setError(error_);
    else
      future_->markCompleted(c10::IValue(std::move(results)));
    clock_of_events = nullptr;
  }

  std::atomic<bool> has_future_ = false, future_is_complete_ = false;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_done_ = false;
  std::exception_ptr error_;
  c10::DeviceIndex device_;
  Clock clock_;
  Tensors reads_, writes_, kept_;  // live until the wait
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

struct Task {
  std::vector<Operation> operations;
  c10::intrusive_ptr<SimcclWork> work;
  Instant start;
  Milliseconds timeout;
  uint64_t number;
};

}  // namespace

// What the thread of a communicator shares with its backend, which may end first.
struct Communicator {
  explicit Communicator(c10::intrusive_ptr<c10d::Backend> gloo) : gloo(std::move(gloo)), stream(new_stream(-1)) {}

  c10::intrusive_ptr<c10d::Backend> gloo;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::shared_ptr<Task>> tasks;  // the first one is running
  bool is_closed = false;                   // no more tasks come
  bool is_aborted = false;
  std::string loss;  // why the running task will never end
  c10::Stream stream;
  bool has_device = false;

  int rank() const { return gloo->getRank(); }
  int size() const { return gloo->getSize(); }

  void run();
  void perform(Task& task);
  void check_alike(const Operation& operation);
  void end(Task& task, std::exception_ptr error);
  void watch(Instant now);
};

namespace {

// Ends the process at the timeout of an operation, as NCCL's watchdog does.
class Watchdog {
 public:
  static void add(const std::shared_ptr<Communicator>& communicator) {
    static auto* watchdog = new Watchdog;  // never destroyed: its thread lives as long as the process
    std::lock_guard guard(watchdog->mutex_);
    watchdog->communicators_.push_back(communicator);
  }

 private:
  Watchdog() {
    std::thread([this] {
      for (;;) {
        std::this_thread::sleep_for(kWatchdogInterval);
        check();
      }
    }).detach();
  }

  void check() {
    std::vector<std::shared_ptr<Communicator>> alive;
    {
      std::lock_guard guard(mutex_);
      std::vector<std::weak_ptr<Communicator>> left;
      for (auto& one : communicators_)
        if (auto communicator = one.lock()) {
          left.push_back(one);
          alive.push_back(std::move(communicator));
        }
      communicators_.swap(left);
    }
    for (auto& communicator : alive) communicator->watch(std::chrono::steady_clock::now());
  }

  std::mutex mutex_;
  std::vector<std::weak_ptr<Communicator>> communicators_;
};

}  // namespace

void Communicator::run() {
  for (;;) {
    std::shared_ptr<Task> task;
    {
      std::unique_lock guard(mutex);
      changed.wait(guard, [&] { return is_closed || is_aborted || !tasks.empty(); });
      if (is_aborted || tasks.empty()) return;
      task = tasks.front();
    }
    set_current_device(stream.device_index());
    set_current_stream(stream);
    try {
      perform(*task);
    } catch (const std::exception& failure) {
      if (!is_loss(failure.what())) {
        end(*task, std::current_exception());
        continue;
      }
      std::unique_lock guard(mutex);  // a lost rank, of which NCCL learns nothing
      loss = failure.what();
      changed.wait(guard, [&] { return is_aborted; });
      return;
    }
    end(*task, nullptr);
  }
}

void Communicator::end(Task& task, std::exception_ptr error) {
  {
    std::lock_guard guard(mutex);
    if (!tasks.empty()) tasks.pop_front();
  }
  task.operations.clear();  // with the tensors that they hold, before anybody knows of the end
  task.work->end(error);
}

void Communicator::perform(Task& task) {
  for (auto& operation : task.operations)
    if (operation.is_collective) check_alike(operation);
  for (auto& operation : task.operations) operation.start();
  for (auto& operation : task.operations) operation.acknowledge();
  for (auto& operation : task.operations) operation.finish();
}

void Communicator::check_alike(const Operation& operation) {
  if (size() == 1) return;
  int64_t name = std::hash<std::string>()(operation.name);
  auto mine = at::tensor({name, operation.num_bytes, operation.root, int64_t(stream.device_index())}, at::kLong);
  auto flat = at::empty({size() * 4}, at::kLong);
  gloo->_allgather_base(flat, mine, {})->wait();
  auto all = flat.view({size(), 4});
  std::set<int64_t> devices;
  for (int other = 0; other < size(); ++other) {
    bool is_alike = all[other].slice(0, 0, 3).equal(mine.slice(0, 0, 3));
    bool is_alone = devices.insert(all[other][3].item<int64_t>()).second;
    if (is_alike && is_alone) continue;
    auto text = "rank " + std::to_string(rank()) + " of a communicator calls " + operation.name + " of " +
                std::to_string(operation.num_bytes) + " bytes";
    if (!is_alone)
      text = "Duplicate GPU detected: rank " + std::to_string(other) + " of a communicator has the device of another";
    else
      text += ", and rank " + std::to_string(other) + " calls another collective, size or root";
    report("mismatch", text);
    throw std::runtime_error(text);
  }
}

void Communicator::watch(Instant now) {
  std::lock_guard guard(mutex);
  if (is_aborted || tasks.empty()) return;
  const auto& task = *tasks.front();
  auto elapsed = std::chrono::duration_cast<Milliseconds>(now - task.start);
  if (elapsed < task.timeout) return;
  std::fprintf(
      stderr,
      "[Rank %d] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=%llu, OpType=%s, Timeout(ms)=%lld) ran "
      "for %lld milliseconds before timing out.%s%s\n",
      rank(), static_cast<unsigned long long>(task.number), task.operations.front().name.c_str(),
      static_cast<long long>(task.timeout.count()), static_cast<long long>(elapsed.count()),
      loss.empty() ? "" : " Gloo reported: ", loss.c_str());
  std::fflush(stderr);
  std::abort();
}

// The backend.

Simccl::Simccl(c10::intrusive_ptr<c10d::Store> store, int rank, int size, c10::intrusive_ptr<Options> options)
    : c10d::Backend(rank, size), store_(std::move(store)), options_(std::move(options)) {
  if (auto* parent = dynamic_cast<Simccl*>(options_->split_from.get())) parent->split_without_part();
  auto gloo = new_gloo(store_, rank, size, options_->timeout);
  gloo->setTimeout(kNever);
  communicator_ = std::make_shared<Communicator>(std::move(gloo));
  Watchdog::add(communicator_);
  std::thread([communicator = communicator_] { communicator->run(); }).detach();
}

Simccl::~Simccl() { shutdown(); }

void Simccl::shutdown() {
  std::lock_guard guard(communicator_->mutex);
  communicator_->is_closed = true;
  communicator_->changed.notify_all();
}

void Simccl::abort() {
  std::deque<std::shared_ptr<Task>> left;
  {
    std::lock_guard guard(communicator_->mutex);
    communicator_->is_aborted = true;
    left.swap(communicator_->tasks);
    communicator_->changed.notify_all();
  }
  for (auto& task : left) task->work->end(nullptr);
}

void Simccl::setTimeout(Milliseconds timeout) { options_->timeout = timeout; }

c10::intrusive_ptr<c10d::Backend> Simccl::split(
    const c10::intrusive_ptr<c10d::Store>&, const std::vector<int>& ranks,
    const c10::intrusive_ptr<c10d::Backend::Options>& options) {
  ++num_splits_;
  // The given store has the name of the group, which may differ between ranks: NCCL splits without a store.
  auto name = "split " + std::to_string(num_splits_) + " from " + std::to_string(ranks.at(0));
  auto store = c10::make_intrusive<c10d::PrefixStore>(name, store_->clone());
  auto found = std::find(ranks.begin(), ranks.end(), getRank());
  if (found == ranks.end()) return nullptr;
  auto own = c10::make_intrusive<Options>();
  own->timeout = options->timeout;
  own->group_name = options->group_name;
  own->global_ranks_in_group = options->global_ranks_in_group;
  return c10::make_intrusive<Simccl>(std::move(store), int(found - ranks.begin()), int(ranks.size()), std::move(own));
}

WorkPtr Simccl::add(Operation operation) {
  for (const auto& tensor : operation.reads) check_tensor(tensor);
  for (const auto& tensor : operation.writes) check_tensor(tensor);
  if (is_batching_) {
    batch_.push_back(std::move(operation));
    return nullptr;
  }
  std::vector<Operation> single;
  single.push_back(std::move(operation));
  return enqueue(std::move(single));
}

WorkPtr Simccl::endCoalescing() {
  is_batching_ = false;
  std::vector<Operation> operations;
  operations.swap(batch_);
  return enqueue(std::move(operations));
}

WorkPtr Simccl::enqueue(std::vector<Operation> operations) {
  const auto& stream = communicator_->stream;
  auto key = key_of(stream);
  stream_waits(key, clock_of(key_of(current_stream(stream.device_index()))));
  auto point = launch(key);
  Tensors reads, writes;
  for (const auto& operation : operations) {
    for (const auto& tensor : operation.reads) note_access(point, tensor, false, "nccl " + operation.name);
    for (const auto& tensor : operation.writes) note_access(point, tensor, true, "nccl " + operation.name);
    reads.insert(reads.end(), operation.reads.begin(), operation.reads.end());
    writes.insert(writes.end(), operation.writes.begin(), operation.writes.end());
    report("collective", operation.name);
  }
  auto work = c10::make_intrusive<SimcclWork>(
      getRank(), stream.device_index(), clock_of(key), std::move(reads), std::move(writes));
  auto task = std::make_shared<Task>();
  *task = {std::move(operations), work, std::chrono::steady_clock::now(), options_->timeout, ++num_operations_};
  std::lock_guard guard(communicator_->mutex);
  TORCH_CHECK(!communicator_->is_aborted, "NCCL communicator was aborted on rank ", getRank());
  communicator_->tasks.push_back(std::move(task));
  communicator_->changed.notify_all();
  return work;
}

void Simccl::check_tensor(const Tensor& tensor) {
  static const std::set<at::ScalarType> known{
      at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kChar, at::kByte, at::kBool, at::kInt, at::kLong,
      at::kFloat8_e4m3fn, at::kFloat8_e5m2, at::kFloat8_e4m3fnuz, at::kFloat8_e5m2fnuz,
      at::kComplexFloat, at::kComplexDouble};
  TORCH_CHECK(tensor.device().type() == kDevice && !tensor.is_sparse(), "Tensors must be CUDA and dense");
  TORCH_CHECK(tensor.is_contiguous(tensor.suggest_memory_format()), "Tensors must be contiguous");
  TORCH_CHECK_TYPE(
      known.count(tensor.scalar_type()), "Input tensor data type is not supported for NCCL process group: ",
      tensor.scalar_type());
  auto& stream = communicator_->stream;
  if (!communicator_->has_device) {
    communicator_->has_device = true;
    stream = new_stream(tensor.device().index());
  }
  TORCH_CHECK(
      stream.device() == tensor.device(), "a communicator of ", stream.device(), " can't take a tensor of ",
      tensor.device());
}

// The collectives.

namespace {

Tensor bytes_of(const Tensor& tensor) { return host_view(tensor).view({-1}).view(at::kByte); }

Tensor gather_bytes(Communicator& communicator, Tensor bytes) {
  auto all = at::empty({communicator.size() * bytes.numel()}, at::kByte);
  if (bytes.numel() > 0) communicator.gloo->_allgather_base(all, bytes, {})->wait();
  return all.view({communicator.size(), bytes.numel()});
}

void check_reduction(const c10d::ReduceOp& op, const Tensor& tensor) {
  auto kind = c10d::ReduceOp::RedOpType(op);
  bool is_bitwise = kind == c10d::ReduceOp::BAND || kind == c10d::ReduceOp::BOR || kind == c10d::ReduceOp::BXOR;
  TORCH_CHECK_VALUE(!is_bitwise, "Cannot use a bitwise ReduceOp with NCCL");
  TORCH_CHECK(!at::isFloat8Type(tensor.scalar_type()), "Unsupported Float8 type for NCCL reduction");
  TORCH_CHECK_TYPE(
      tensor.scalar_type() != at::kBool || kind != c10d::ReduceOp::AVG, "Cannot use ReduceOp.AVG with boolean inputs");
  TORCH_CHECK(
      !tensor.is_complex() || kind == c10d::ReduceOp::SUM || kind == c10d::ReduceOp::AVG,
      "all_reduce does not support this ReduceOp on complex tensors");
}

// In the dtype of the tensor, one rank after the other: low precision rounds after each.
Tensor reduced(const Tensor& rows, const c10d::ReduceOp& op) {
  auto kind = c10d::ReduceOp::RedOpType(op);
  bool is_any = rows.scalar_type() == at::kBool;
  auto total = rows[0].clone();
  if (kind == c10d::ReduceOp::PREMUL_SUM) {
    auto* supplement = reinterpret_cast<c10d::PreMulSumSupplement*>(op.supplement_.get());
    auto factor = supplement->tensor_factor.defined() ? host_view(supplement->tensor_factor)
                                                      : at::scalar_tensor(supplement->double_factor);
    return (rows * factor.to(rows.scalar_type())).sum(0, false, rows.scalar_type());
  }
  for (int64_t rank = 1; rank < rows.size(0); ++rank) {
    if (kind == c10d::ReduceOp::MAX || (is_any && kind == c10d::ReduceOp::SUM))
      total = at::maximum(total, rows[rank]);
    else if (kind == c10d::ReduceOp::MIN)
      total = at::minimum(total, rows[rank]);
    else if (kind == c10d::ReduceOp::PRODUCT)
      total.mul_(rows[rank]);
    else
      total.add_(rows[rank]);
  }
  if (kind != c10d::ReduceOp::AVG) return total;
  return at::isIntegralType(rows.scalar_type(), false) ? total.div_(rows.size(0), "trunc") : total.div_(rows.size(0));
}

Tensor reduce_over_ranks(Communicator& communicator, const Tensor& tensor, const c10d::ReduceOp& op) {
  if (tensor.numel() == 0) return host_view(tensor).view({0});  // rows without elements have no dtype but bytes
  auto rows = gather_bytes(communicator, bytes_of(tensor)).view(tensor.scalar_type());
  return reduced(rows, op);
}

}  // namespace

WorkPtr Simccl::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  auto tensor = tensors.at(0);
  bool is_root = options.rootRank == getRank();
  Operation operation{"broadcast", is_root ? Tensors{tensor} : Tensors{}, is_root ? Tensors{} : Tensors{tensor}};
  operation.num_bytes = tensor.nbytes();
  operation.root = options.rootRank;
  operation.finish = [communicator = communicator_, tensor, options] {
    Tensors bytes{bytes_of(tensor)};
    auto forwarded = options;
    forwarded.rootTensor = 0;
    if (tensor.numel() > 0) communicator->gloo->broadcast(bytes, forwarded)->wait();
  };
  return add(std::move(operation));
}

WorkPtr Simccl::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  auto tensor = tensors.at(0);
  check_reduction(options.reduceOp, tensor);
  Operation operation{"all_reduce", {}, {tensor}};
  operation.num_bytes = tensor.nbytes();
  operation.finish = [communicator = communicator_, tensor, op = options.reduceOp] {
    host_view(tensor).view({-1}).copy_(reduce_over_ranks(*communicator, tensor, op));
  };
  return add(std::move(operation));
}

WorkPtr Simccl::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  is_batching_ = true;
  for (const auto& tensor : tensors) {
    Tensors single{tensor};
    allreduce(single, options);
  }
  return endCoalescing();
}

WorkPtr Simccl::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  auto tensor = tensors.at(0);
  check_reduction(options.reduceOp, tensor);
  bool is_root = options.rootRank == getRank();
  Operation operation{"reduce", is_root ? Tensors{} : Tensors{tensor}, is_root ? Tensors{tensor} : Tensors{}};
  operation.num_bytes = tensor.nbytes();
  operation.root = options.rootRank;
  operation.finish = [communicator = communicator_, tensor, op = options.reduceOp, is_root] {
    auto total = reduce_over_ranks(*communicator, tensor, op);
    if (is_root) host_view(tensor).view({-1}).copy_(total);
  };
  return add(std::move(operation));
}

WorkPtr Simccl::allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions&) {
  auto input = inputs.at(0);
  auto output = outputs.at(0);
  Operation operation{"all_gather", {input}, output};
  operation.num_bytes = input.nbytes();
  operation.finish = [communicator = communicator_, input, output] {
    auto all = gather_bytes(*communicator, bytes_of(input));
    for (size_t rank = 0; rank < output.size(); ++rank) bytes_of(output[rank]).copy_(all[rank]);
  };
  return add(std::move(operation));
}

WorkPtr Simccl::_allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions&) {
  TORCH_CHECK_TYPE(input.dtype() == output.dtype(), "output tensor must have the same type as input tensor");
  TORCH_CHECK_VALUE(
      input.numel() * getSize() == output.numel(), "output tensor size must be equal to world_size times input tensor size");
  Operation operation{"all_gather_into_tensor", {input}, {output}};
  operation.num_bytes = input.nbytes();
  operation.finish = [communicator = communicator_, input, output] {
    bytes_of(output).copy_(gather_bytes(*communicator, bytes_of(input).clone()).view({-1}));
  };
  return add(std::move(operation));
}

WorkPtr Simccl::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  is_batching_ = true;
  for (size_t index = 0; index < inputs.size(); ++index) _allgather_base(outputs[index], inputs[index], options);
  return endCoalescing();
}

WorkPtr Simccl::_reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) {
  TORCH_CHECK_TYPE(input.dtype() == output.dtype(), "input tensor must be the same type as the output tensor.");
  TORCH_CHECK_VALUE(
      input.numel() == output.numel() * getSize(),
      "input tensor must be the same size as output size times world size");
  check_reduction(options.reduceOp, input);
  Operation operation{"reduce_scatter_tensor", {input}, {output}};
  operation.num_bytes = input.nbytes();
  operation.finish = [communicator = communicator_, input, output, op = options.reduceOp] {
    auto total = reduce_over_ranks(*communicator, input, op);
    host_view(output).view({-1}).copy_(total.view({communicator->size(), output.numel()})[communicator->rank()]);
  };
  return add(std::move(operation));
}

WorkPtr Simccl::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  is_batching_ = true;
  for (size_t index = 0; index < inputs.size(); ++index) _reduce_scatter_base(outputs[index], inputs[index], options);
  return endCoalescing();
}

WorkPtr Simccl::reduce_scatter(
    Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) {
  Tensors flat;
  for (const auto& tensor : inputs.at(0)) flat.push_back(tensor.reshape({-1}));
  auto joined = at::cat(flat);
  return _reduce_scatter_base(outputs.at(0), joined, options);
}

WorkPtr Simccl::alltoall_base(
    Tensor& output, Tensor& input, std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
    const c10d::AllToAllOptions& options) {
  Operation operation{"all_to_all_single", {input}, {output}};
  operation.num_bytes = output_sizes.empty() && input_sizes.empty() ? input.nbytes() : 0;
  operation.finish = [communicator = communicator_, input, output, output_sizes, input_sizes, options]() mutable {
    auto rows_of = [](const Tensor& tensor) {
      auto rows = tensor.dim() == 0 ? 1 : tensor.size(0);
      return bytes_of(tensor).view({rows, rows == 0 ? 0 : int64_t(tensor.nbytes()) / rows});
    };
    auto to = rows_of(output), from = rows_of(input);
    communicator->gloo->alltoall_base(to, from, output_sizes, input_sizes, options)->wait();
  };
  return add(std::move(operation));
}

WorkPtr Simccl::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions&) {
  Operation operation{"all_to_all", inputs, outputs};
  operation.finish = [communicator = communicator_, inputs, outputs] {
    std::vector<WorkPtr> works;
    for (int other = 0; other < communicator->size(); ++other) {
      Tensors to{bytes_of(inputs[other])}, from{bytes_of(outputs[other])};
      if (other == communicator->rank()) {
        from[0].copy_(to[0]);
        continue;
      }
      if (from[0].numel() > 0) works.push_back(communicator->gloo->recv(from, other, kAllToAllTag));
      if (to[0].numel() > 0) works.push_back(communicator->gloo->send(to, other, kAllToAllTag));
    }
    wait_for_all(works);
  };
  return add(std::move(operation));
}

WorkPtr Simccl::gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  auto input = inputs.at(0);
  auto output = options.rootRank == getRank() ? outputs.at(0) : Tensors{};
  Operation operation{"gather", {input}, output};
  operation.num_bytes = input.nbytes();
  operation.root = options.rootRank;
  operation.finish = [communicator = communicator_, input, output] {
    auto all = gather_bytes(*communicator, bytes_of(input));
    for (size_t rank = 0; rank < output.size(); ++rank) bytes_of(output[rank]).copy_(all[rank]);
  };
  return add(std::move(operation));
}

WorkPtr Simccl::scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) {
  auto output = outputs.at(0);
  auto input = options.rootRank == getRank() ? inputs.at(0) : Tensors{};
  Operation operation{"scatter", input, {output}};
  operation.num_bytes = output.nbytes();
  operation.root = options.rootRank;
  operation.finish = [communicator = communicator_, input, output, options] {
    Tensors to{bytes_of(output)};
    std::vector<Tensors> from;
    if (!input.empty()) from.emplace_back();
    for (const auto& tensor : input) from[0].push_back(bytes_of(tensor));
    communicator->gloo->scatter(to, from, options)->wait();
  };
  return add(std::move(operation));
}

// A send ends when its receiver has acknowledged it.

WorkPtr Simccl::send(Tensors& tensors, int receiver, int) {
  auto tensor = tensors.at(0);
  auto works = std::make_shared<std::vector<WorkPtr>>();
  auto acknowledgement = at::zeros({1}, at::kByte);
  Operation operation{"send", {tensor}, {}};
  operation.is_collective = false;
  operation.start = [communicator = communicator_, tensor, receiver, works] {
    Tensors bytes{bytes_of(tensor)};
    works->push_back(communicator->gloo->send(bytes, receiver, kMessageTag));
  };
  operation.acknowledge = [communicator = communicator_, acknowledgement, receiver, works] {
    wait_for_all(*works);
    Tensors bytes{acknowledgement};
    works->push_back(communicator->gloo->recv(bytes, receiver, kAcknowledgementTag));
  };
  operation.finish = [works] { wait_for_all(*works); };
  return add(std::move(operation));
}

WorkPtr Simccl::recv(Tensors& tensors, int sender, int) {
  auto tensor = tensors.at(0);
  auto works = std::make_shared<std::vector<WorkPtr>>();
  auto acknowledgement = at::zeros({1}, at::kByte);
  Operation operation{"recv", {}, {tensor}};
  operation.is_collective = false;
  operation.start = [communicator = communicator_, tensor, sender, works] {
    Tensors bytes{bytes_of(tensor)};
    works->push_back(communicator->gloo->recv(bytes, sender, kMessageTag));
  };
  operation.acknowledge = [communicator = communicator_, acknowledgement, sender, works] {
    wait_for_all(*works);
    Tensors bytes{acknowledgement};
    works->push_back(communicator->gloo->send(bytes, sender, kAcknowledgementTag));
  };
  operation.finish = [works] { wait_for_all(*works); };
  return add(std::move(operation));
}

WorkPtr Simccl::barrier(const c10d::BarrierOptions&) {
  Operation operation{"barrier", {}, {}};
  auto work = add(std::move(operation));
  report("sync", "barrier");
  without_interpreter([&] { work->wait(); });
  host_waits(clock_of(key_of(communicator_->stream)));
  return work;
}

}  // namespace simulated

namespace c10d {
namespace {

struct SimulatedTimer final : Timer {
  explicit SimulatedTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event, Event) override { return 0; }
};

C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, SimulatedTimer)

}  // namespace
}  // namespace c10d
