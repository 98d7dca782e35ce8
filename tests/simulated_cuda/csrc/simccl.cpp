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
#include "exchange.h"
#include "operators.h"
#include "report.h"

namespace simulated {

using at::Tensor;
using Tensors = Simccl::Tensors;
using WorkPtr = Simccl::WorkPtr;
using Milliseconds = std::chrono::milliseconds;
using Instant = std::chrono::steady_clock::time_point;

namespace {

constexpr auto kWatchdogInterval = Milliseconds(50);

[[noreturn]] void fail_as_different(const std::string& text) {
  report("mismatch", text);
  throw std::runtime_error(text);
}

}  // namespace

// A collective gives bytes, and takes those of all ranks. A message has three stages; those of a batch run each stage
// together, so that messages in both directions meet.
struct Operation {
  std::string name;
  Tensors reads, writes;

  bool is_collective = true;
  std::function<Tensor()> give = [] { return at::empty({0}, at::kByte); };
  std::function<void(const Tensors& all)> take = [](const Tensors&) {};
  int64_t num_bytes = 0;  // equal on all ranks, as is the root
  int64_t root = -1;

  std::function<void(Exchange&)> send = [](Exchange&) {};
  std::function<void(Exchange&)> receive = [](Exchange&) {};
  std::function<void(Exchange&)> finish = [](Exchange&) {};
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
  Communicator(c10d::Store& store, int rank, int size) : exchange(store, rank, size), stream(new_stream(-1)) {}

  Exchange exchange;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::shared_ptr<Task>> tasks;  // the first one is running
  bool is_closed = false;                   // no more tasks come
  bool is_aborted = false;
  c10::Stream stream;
  bool has_device = false;

  int rank() const { return exchange.rank(); }
  int size() const { return exchange.size(); }

  void run();
  void perform(Task& task);
  void perform_collective(const Operation& operation);
  void check_alike(const Operation& operation, const std::vector<Call>& calls);
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
    } catch (const Interrupted&) {
      return;
    } catch (const std::exception&) {
      end(*task, std::current_exception());
      continue;
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
    if (operation.is_collective) perform_collective(operation);
  for (auto& operation : task.operations) operation.send(exchange);
  for (auto& operation : task.operations) operation.receive(exchange);
  for (auto& operation : task.operations) operation.finish(exchange);
}

void Communicator::perform_collective(const Operation& operation) {
  int64_t name = std::hash<std::string>()(operation.name);
  std::vector<Call> calls;
  const Call mine{name, operation.num_bytes, operation.root, stream.device_index()};
  auto all = exchange.gather(mine, operation.give(), calls);
  check_alike(operation, calls);
  operation.take(all);
}

void Communicator::check_alike(const Operation& operation, const std::vector<Call>& calls) {
  const auto& mine = calls[rank()];
  std::set<int64_t> devices;
  for (int other = 0; other < size(); ++other) {
    const auto& call = calls[other];
    if (!devices.insert(call.device).second)
      fail_as_different(
          "Duplicate GPU detected: rank " + std::to_string(other) + " of a communicator has the device of another");
    if (call.name != mine.name || call.num_bytes != mine.num_bytes || call.root != mine.root)
      fail_as_different(
          "rank " + std::to_string(rank()) + " of a communicator calls " + operation.name + " of " +
          std::to_string(operation.num_bytes) + " bytes, and rank " + std::to_string(other) +
          " calls another collective, size or root");
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
      "for %lld milliseconds before timing out.\n",
      rank(), static_cast<unsigned long long>(task.number), task.operations.front().name.c_str(),
      static_cast<long long>(task.timeout.count()), static_cast<long long>(elapsed.count()));
  std::fflush(stderr);
  std::abort();
}

// The backend.

Simccl::Simccl(c10::intrusive_ptr<c10d::Store> store, int rank, int size, c10::intrusive_ptr<Options> options)
    : c10d::Backend(rank, size), store_(std::move(store)), options_(std::move(options)) {
  if (auto* parent = dynamic_cast<Simccl*>(options_->split_from.get())) parent->split_without_part();
  without_interpreter([&] { communicator_ = std::make_shared<Communicator>(*store_, rank, size); });
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
    communicator_->exchange.interrupt();
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
Tensor reduced(const Tensors& all, at::ScalarType dtype, const c10d::ReduceOp& op) {
  if (all[0].numel() == 0) return at::empty({0}, dtype);
  Tensors rows;
  for (const auto& bytes : all) rows.push_back(bytes.view(dtype));
  auto kind = c10d::ReduceOp::RedOpType(op);
  auto total = rows[0].clone();
  if (kind == c10d::ReduceOp::PREMUL_SUM) {
    auto* supplement = reinterpret_cast<c10d::PreMulSumSupplement*>(op.supplement_.get());
    auto factor = supplement->tensor_factor.defined() ? host_view(supplement->tensor_factor)
                                                      : at::scalar_tensor(supplement->double_factor);
    return (at::stack(rows) * factor.to(dtype)).sum(0, false, dtype);
  }
  for (size_t rank = 1; rank < rows.size(); ++rank) {
    if (kind == c10d::ReduceOp::MAX || (dtype == at::kBool && kind == c10d::ReduceOp::SUM))
      total = at::maximum(total, rows[rank]);
    else if (kind == c10d::ReduceOp::MIN)
      total = at::minimum(total, rows[rank]);
    else if (kind == c10d::ReduceOp::PRODUCT)
      total.mul_(rows[rank]);
    else
      total.add_(rows[rank]);
  }
  int64_t size = rows.size();
  if (kind != c10d::ReduceOp::AVG) return total;
  return at::isIntegralType(dtype, false) ? total.div_(size, "trunc") : total.div_(size);
}

// Parts for all ranks, after their sizes.
Tensor joined_parts(const Tensors& parts) {
  std::vector<int64_t> sizes;
  for (const auto& part : parts) sizes.push_back(part.numel());
  Tensors joined{at::tensor(sizes, at::kLong).view(at::kByte)};
  joined.insert(joined.end(), parts.begin(), parts.end());
  return at::cat(joined);
}

void take_parts(const Tensors& all, int rank, const Tensors& outputs) {
  auto num_ranks = int64_t(all.size()), header = num_ranks * int64_t(sizeof(int64_t));
  for (int64_t other = 0; other < num_ranks; ++other) {
    auto sizes = all[other].slice(0, 0, header).view(at::kLong);
    auto begin = header + sizes.slice(0, 0, rank).sum().item<int64_t>();
    auto size = sizes[rank].item<int64_t>(), expected = outputs[other].numel();
    if (size != expected)
      fail_as_different(
          "rank " + std::to_string(rank) + " of a communicator expects " + std::to_string(expected) +
          " bytes of an all-to-all from rank " + std::to_string(other) + ", which sends " + std::to_string(size));
    Tensor output = outputs[other];
    output.copy_(all[other].slice(0, begin, begin + size));
  }
}

}  // namespace

WorkPtr Simccl::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  auto tensor = tensors.at(0);
  int root = options.rootRank;
  bool is_root = root == getRank();
  Operation operation{"broadcast", is_root ? Tensors{tensor} : Tensors{}, is_root ? Tensors{} : Tensors{tensor}};
  operation.num_bytes = tensor.nbytes();
  operation.root = root;
  if (is_root)
    operation.give = [tensor] { return bytes_of(tensor); };
  else
    operation.take = [tensor, root](const Tensors& all) { bytes_of(tensor).copy_(all[root]); };
  return add(std::move(operation));
}

WorkPtr Simccl::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  auto tensor = tensors.at(0);
  check_reduction(options.reduceOp, tensor);
  Operation operation{"all_reduce", {}, {tensor}};
  operation.num_bytes = tensor.nbytes();
  operation.give = [tensor] { return bytes_of(tensor); };
  operation.take = [tensor, op = options.reduceOp](const Tensors& all) {
    host_view(tensor).view({-1}).copy_(reduced(all, tensor.scalar_type(), op));
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
  operation.give = [tensor] { return bytes_of(tensor); };
  if (is_root)
    operation.take = [tensor, op = options.reduceOp](const Tensors& all) {
      host_view(tensor).view({-1}).copy_(reduced(all, tensor.scalar_type(), op));
    };
  return add(std::move(operation));
}

WorkPtr Simccl::allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions&) {
  auto input = inputs.at(0);
  auto output = outputs.at(0);
  Operation operation{"all_gather", {input}, output};
  operation.num_bytes = input.nbytes();
  operation.give = [input] { return bytes_of(input); };
  operation.take = [output](const Tensors& all) {
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
  operation.give = [input] { return bytes_of(input); };
  operation.take = [output](const Tensors& all) { bytes_of(output).copy_(at::cat(all)); };
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
  operation.give = [input] { return bytes_of(input); };
  operation.take = [output, rank = getRank(), op = options.reduceOp](const Tensors& all) {
    Tensors parts;  // for this rank
    for (const auto& bytes : all) parts.push_back(bytes.view({int64_t(all.size()), -1})[rank]);
    host_view(output).view({-1}).copy_(reduced(parts, output.scalar_type(), op));
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
    const c10d::AllToAllOptions&) {
  auto parts_of = [size = getSize()](const Tensor& tensor, const std::vector<int64_t>& num_rows) {
    auto bytes = bytes_of(tensor);
    if (num_rows.empty()) return bytes.chunk(size);
    auto bytes_per_row = tensor.numel() == 0 ? 0 : int64_t(tensor.nbytes()) / tensor.size(0);
    std::vector<int64_t> sizes;
    for (auto count : num_rows) sizes.push_back(count * bytes_per_row);
    return bytes.split_with_sizes(sizes);
  };
  Operation operation{"all_to_all_single", {input}, {output}};
  operation.num_bytes = output_sizes.empty() && input_sizes.empty() ? input.nbytes() : 0;
  operation.give = [=] { return joined_parts(parts_of(input, input_sizes)); };
  operation.take = [=, rank = getRank()](const Tensors& all) { take_parts(all, rank, parts_of(output, output_sizes)); };
  return add(std::move(operation));
}

WorkPtr Simccl::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions&) {
  auto bytes_of_each = [](const Tensors& tensors) {
    Tensors parts;
    for (const auto& tensor : tensors) parts.push_back(bytes_of(tensor));
    return parts;
  };
  Operation operation{"all_to_all", inputs, outputs};
  operation.give = [=, inputs = inputs] { return joined_parts(bytes_of_each(inputs)); };
  operation.take = [=, outputs = outputs, rank = getRank()](const Tensors& all) {
    take_parts(all, rank, bytes_of_each(outputs));
  };
  return add(std::move(operation));
}

WorkPtr Simccl::gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  auto input = inputs.at(0);
  auto output = options.rootRank == getRank() ? outputs.at(0) : Tensors{};
  Operation operation{"gather", {input}, output};
  operation.num_bytes = input.nbytes();
  operation.root = options.rootRank;
  operation.give = [input] { return bytes_of(input); };
  operation.take = [output](const Tensors& all) {
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
  if (!input.empty())
    operation.give = [input] {
      Tensors parts;
      for (const auto& tensor : input) parts.push_back(bytes_of(tensor));
      return at::cat(parts);
    };
  operation.take = [output, root = options.rootRank, rank = getRank()](const Tensors& all) {
    auto bytes = bytes_of(output);
    bytes.copy_(all[root].slice(0, rank * bytes.numel(), (rank + 1) * bytes.numel()));
  };
  return add(std::move(operation));
}

// A send ends when its receiver has the message.

WorkPtr Simccl::send(Tensors& tensors, int receiver, int) {
  auto tensor = tensors.at(0);
  auto number = std::make_shared<uint32_t>();
  Operation operation{"send", {tensor}, {}};
  operation.is_collective = false;
  operation.send = [=](Exchange& exchange) { *number = exchange.send(receiver, bytes_of(tensor)); };
  operation.finish = [=](Exchange& exchange) { exchange.wait_received(receiver, *number); };
  return add(std::move(operation));
}

WorkPtr Simccl::recv(Tensors& tensors, int sender, int) {
  auto tensor = tensors.at(0);
  Operation operation{"recv", {}, {tensor}};
  operation.is_collective = false;
  operation.receive = [=](Exchange& exchange) {
    auto bytes = bytes_of(tensor);
    auto size = exchange.receive(sender, bytes);
    if (size != bytes.numel())
      fail_as_different(
          "rank " + std::to_string(exchange.rank()) + " of a communicator receives " + std::to_string(bytes.numel()) +
          " bytes from rank " + std::to_string(sender) + ", which sends " + std::to_string(size));
  };
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
