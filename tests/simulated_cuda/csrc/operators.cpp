// Operators of the simulated device: each runs at once on CPU tensors that share the memory of its arguments.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <set>

#include "device.h"
#include "operators.h"
#include "pinned.h"
#include "report.h"

namespace simulated {
namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DispatchKey;
using c10::DispatchKeySet;

bool is_on_device(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == kDevice; }

void keep_memory(void*) {}

}  // namespace

Tensor host_view(const Tensor& tensor) {
  const auto& memory = tensor.storage();
  c10::DataPtr pointer(memory.mutable_data(), nullptr, &keep_memory, Device(c10::DeviceType::CPU));
  c10::Storage storage(
      c10::Storage::use_byte_size_t(), memory.nbytes(), std::move(pointer), c10::GetAllocator(c10::DeviceType::CPU),
      true);
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), DispatchKeySet(DispatchKey::CPU), tensor.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) view._set_conj(true);
  if (tensor.is_neg()) view._set_neg(true);
  return view;
}

void note_access(const Point& point, const Tensor& tensor, bool writes, const std::string& operation) {
  if (!tensor.defined() || tensor.numel() == 0) return;
  auto begin = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  int64_t extent = 1;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) extent += (tensor.size(dim) - 1) * tensor.stride(dim);
  note_access(point, begin, begin + extent * tensor.itemsize(), writes, operation);
}

namespace {

c10::TensorOptions options_of(std::optional<at::ScalarType> dtype) {
  return c10::TensorOptions().dtype(dtype.value_or(at::typeMetaToScalarType(at::get_default_dtype())));
}

// Factories.

Device device_or_current(std::optional<Device> device) {
  return Device(kDevice, device.has_value() && device->has_index() ? device->index() : current_device());
}

Tensor empty(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device> device,
    std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(device_or_current(device));
  auto kind = c10::typeMetaToScalarType(options_of(dtype).dtype());
  return at::detail::empty_generic(size, device_allocator(), DispatchKeySet(DispatchKey::CUDA), kind, format);
}

Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<Device> device, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(device_or_current(device));
  auto kind = c10::typeMetaToScalarType(options_of(dtype).dtype());
  return at::detail::empty_strided_generic(size, stride, device_allocator(), DispatchKeySet(DispatchKey::CUDA), kind);
}

// Views.

Tensor strided_view(
    const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(self.storage()), self.key_set(), self.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset.value_or(self.storage_offset()));
  return view;
}

Tensor viewed(const Tensor& self, c10::IntArrayRef size) {
  auto shape = at::infer_size(size, self.numel());
  auto stride = at::detail::computeStride(self.sizes(), self.strides(), shape);
  TORCH_CHECK(
      stride.has_value(),
      "view size is not compatible with input tensor's size and stride (at least one dimension spans across two "
      "contiguous subspaces). Use .reshape(...) instead.");
  return strided_view(self, shape, *stride, self.storage_offset());
}

Tensor reshape_alias(const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return strided_view(self, size, stride, self.storage_offset());
}

Tensor unfold(const Tensor& self, int64_t dim, int64_t size, int64_t step) {
  auto shape = host_view(self).unfold(dim, size, step);
  return strided_view(self, shape.sizes(), shape.strides(), shape.storage_offset());
}

const Tensor& resize(const Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto num_elements = self.storage_offset() + c10::multiply_integers(size);
  size_t num_bytes = num_elements * self.itemsize();
  if (num_bytes > self.storage().nbytes()) resize_storage(self.storage(), num_bytes);
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, c10::contiguous_strides(size));
  return self;
}

Tensor& set_storage(
    Tensor& self, at::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  bool is_contiguous = stride.empty() && !size.empty();
  if (is_contiguous)
    impl->set_sizes_and_strides(size, c10::contiguous_strides(size), offset);
  else
    impl->set_sizes_and_strides(size, stride, offset);
  return self;
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_whole_storage(Tensor& self, at::Storage storage) {
  int64_t numel = storage.nbytes() / self.itemsize();
  return set_storage(self, std::move(storage), 0, {numel}, {1});
}

Tensor& set_empty(Tensor& self) {
  c10::DeviceGuard guard(self.device());
  c10::Storage storage(
      c10::Storage::use_byte_size_t(), 0, device_allocator()->allocate(0), device_allocator(), true);
  return set_storage(self, std::move(storage), 0, {0}, {1});
}

// Copies. As in torch, a copy that needs a conversion or another layout goes through pageable memory of the host.

void wait_for(const c10::Stream& stream, const std::string& why) {
  report("sync", why);
  host_waits_avoidably(clock_of(key_of(stream)));
}

void copy_to_device(const Tensor& source, const Tensor& target, bool non_blocking) {
  auto stream = current_stream(target.device().index());
  auto point = launch(key_of(stream));
  note_access(point, target, true, "copy_ from the host");
  bool is_direct = source.dtype() == target.dtype() && source.is_contiguous();
  if (non_blocking && is_direct && is_pinned(source.const_data_ptr())) {
    auto bytes = copy_from_pinned(point, source);
    auto copy = at::from_blob(bytes.data(), source.sizes(), source.options());
    host_view(target).copy_(copy);
    return;
  }
  host_view(target).copy_(source);
  auto size = std::to_string(source.nbytes()) + " bytes to the device";
  if (non_blocking)
    report("pageable", size);
  else
    wait_for(stream, "copy of " + size);
}

void copy_to_host(const Tensor& source, const Tensor& target, bool non_blocking) {
  auto stream = current_stream(source.device().index());
  auto point = launch(key_of(stream));
  note_access(point, source, false, "copy_ to the host");
  bool is_direct = source.dtype() == target.dtype() && target.is_contiguous();
  if (non_blocking && is_direct && is_pinned(target.const_data_ptr())) {
    auto value = host_view(source).contiguous();
    auto* memory = static_cast<const char*>(value.const_data_ptr());
    copy_to_pinned(point, target, std::vector<char>(memory, memory + value.nbytes()));
    return;
  }
  wait_for(stream, "copy of " + std::to_string(source.nbytes()) + " bytes to the host");
  Tensor result = target;
  result.copy_(host_view(source));
}

void copy_on_device(const Tensor& source, const Tensor& target) {
  auto stream = current_stream(source.device().index());
  if (source.device() != target.device())  // torch lets both current streams wait for each other
    stream_waits(key_of(stream), clock_of(key_of(current_stream(target.device().index()))));
  auto point = launch(key_of(stream));
  note_access(point, source, false, "copy_");
  note_access(point, target, true, "copy_");
  host_view(target).copy_(host_view(source));
  if (source.device() != target.device())
    stream_waits(key_of(current_stream(target.device().index())), clock_of(key_of(stream)));
}

Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  if (target.numel() == 0) return target;
  if (is_on_device(source) && is_on_device(target))
    copy_on_device(source, target);
  else if (is_on_device(target))
    copy_to_device(source, target, non_blocking);
  else
    copy_to_host(source, target, non_blocking);
  return target;
}

Tensor& copy(Tensor& self, const Tensor& source, bool non_blocking) {
  if (!self.is_same(source)) copy_from(source.expand(self.sizes()), self, non_blocking);
  return self;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  Tensor result = target;
  result.resize_(source.sizes());
  return result.copy_(source);
}

at::Scalar local_scalar(const Tensor& self) {
  auto stream = current_stream(self.device().index());
  note_access(launch(key_of(stream)), self, false, "item");
  wait_for(stream, "item");
  return host_view(self).item();
}

void record_stream_of(Tensor& self, c10::Stream stream) { record_stream(self.storage().data(), key_of(stream)); }

int64_t fused_sdp_choice(
    const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool, std::optional<double>,
    bool) {
  return 0;  // plain matrix products
}

// All other operators.

const std::set<std::string> kIndexing{
    "aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_", "aten::_unsafe_index"};
// Operators whose result has a shape that the host must know.
const std::set<std::string> kWaits{
    "aten::nonzero", "aten::masked_select", "aten::_unique", "aten::_unique2", "aten::unique_dim", "aten::bincount",
    "aten::unique_consecutive", "aten::equal", "aten::is_nonzero", "aten::nonzero_static_size", "aten::histc"};

class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack& stack)
      : op_(op), schema_(op.schema()), stack_(stack), name_(schema_.operator_name().name), device_(current_device()) {}

  void run() {
    auto begin = stack_.size() - schema_.arguments().size();
    for (size_t index = 0; index < schema_.arguments().size(); ++index)
      convert(stack_[begin + index], schema_.arguments()[index]);
    check_devices();
    auto stream = current_stream(device_);
    point_ = launch(key_of(stream));
    for (const auto& argument : arguments_) note_access(point_, argument.tensor, argument.is_written, name_);
    if (kWaits.count(name_) || (kIndexing.count(name_) && has_mask_)) wait_for(stream, name_);
    op_.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), &stack_);
    for (const auto& argument : arguments_) resize_as_view(argument);
    for (size_t index = stack_.size() - schema_.returns().size(); index < stack_.size(); ++index)
      convert_back(stack_[index]);
  }

 private:
  struct Argument {
    Tensor tensor, view;
    bool is_written;
  };

  void convert(c10::IValue& value, const c10::Argument& argument) {
    bool is_written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    if (value.isTensor()) {
      value = view_of(value.toTensor(), is_written);
    } else if (value.isTensorList()) {
      c10::List<Tensor> views;
      for (const auto& one : value.toTensorVector()) views.push_back(view_of(one, is_written));
      value = views;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> views;
      for (const auto& one : value.toOptionalTensorVector()) {
        if (one.has_value() && one->defined())
          has_mask_ |= one->scalar_type() == at::kBool || one->scalar_type() == at::kByte;
        views.push_back(one.has_value() ? std::optional(view_of(*one, is_written)) : std::nullopt);
      }
      value = views;
    } else if (value.isDevice()) {
      convert_device(value);
    } else if (value.isGenerator() || is_generator(argument)) {
      convert_generator(value);
    }
  }

  Tensor view_of(const Tensor& tensor, bool is_written) {
    if (!tensor.defined()) return tensor;
    if (!is_on_device(tensor)) {
      if (tensor.device().is_cpu() && tensor.dim() > 0) foreign_ = tensor;
      return tensor;
    }
    TORCH_CHECK(
        arguments_.empty() || device_ == tensor.device().index(), name_,
        ": Expected all tensors to be on the same device, but found at least two devices, cuda:", int(device_), " and ",
        tensor.device(), "!");
    device_ = tensor.device().index();
    for (auto& argument : arguments_)
      if (argument.tensor.is_same(tensor)) {
        argument.is_written |= is_written;
        return argument.view;
      }
    arguments_.push_back({tensor, host_view(tensor), is_written});
    return arguments_.back().view;
  }

  void convert_device(c10::IValue& value) {
    auto device = value.toDevice();
    if (device.type() != kDevice) return;
    if (device.has_index() && arguments_.empty()) device_ = device.index();
    value = Device(c10::DeviceType::CPU);
  }

  static bool is_generator(const c10::Argument& argument) {
    auto optional = argument.type()->cast<c10::OptionalType>();
    return optional != nullptr && optional->getElementType()->kind() == c10::TypeKind::GeneratorType;
  }

  void convert_generator(c10::IValue& value) {
    if (value.isNone() || !value.toGenerator().defined()) {
      value = host_generator_of(default_generator(device_));
      return;
    }
    auto generator = value.toGenerator();
    TORCH_CHECK(
        generator.device().type() == kDevice, "Expected a 'cuda' device type for generator but found '",
        generator.device().type(), "'");
    value = host_generator_of(generator);
  }

  void check_devices() {
    TORCH_CHECK(
        !foreign_.defined() || arguments_.empty() || kIndexing.count(name_), name_,
        ": Expected all tensors to be on the same device, but found at least two devices, cuda:", int(device_),
        " and cpu! (", foreign_.sizes(), " ", foreign_.dtype(), ")");
    if (foreign_.defined() && kIndexing.count(name_)) report("sync", name_ + " with an index of the host");
  }

  // Operators may resize what they write.
  void resize_as_view(const Argument& argument) {
    const auto &tensor = argument.tensor, &view = argument.view;
    if (view.sizes() == tensor.sizes() && view.storage().data() == tensor.storage().data()) return;
    Tensor resized = tensor;
    resized.resize_(view.sizes());
    host_view(resized).copy_(view);
  }

  void convert_back(c10::IValue& value) {
    if (value.isTensor()) {
      value = result_of(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> results;
      for (const auto& one : value.toTensorVector()) results.push_back(result_of(one));
      value = results;
    }
  }

  Tensor result_of(const Tensor& result) {
    if (!result.defined() || is_on_device(result)) return result;
    for (const auto& argument : arguments_)
      if (argument.view.is_same(result)) return argument.tensor;
    for (const auto& argument : arguments_)
      if (result.storage().data() != nullptr && result.storage().data() == argument.view.storage().data())
        return view_like(argument.tensor, result);
    c10::DeviceGuard guard(Device(kDevice, device_));
    auto copied = empty_strided(result.sizes(), result.strides(), result.scalar_type(), {}, {}, {});
    host_view(copied).copy_(result);
    note_access(point_, copied, true, name_);
    return copied;
  }

  // A view of the argument's memory, perhaps of another dtype.
  static Tensor view_like(const Tensor& argument, const Tensor& result) {
    auto view = at::detail::make_tensor<c10::TensorImpl>(
        c10::TensorImpl::VIEW, c10::Storage(argument.storage()), argument.key_set(), result.dtype());
    view.unsafeGetTensorImpl()->set_sizes_and_strides(result.sizes(), result.strides(), result.storage_offset());
    return view;
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  torch::jit::Stack& stack_;
  std::string name_;
  DeviceIndex device_;
  std::vector<Argument> arguments_;
  Tensor foreign_;
  bool has_mask_ = false;
  Point point_;
};

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) { Call(op, *stack).run(); }

// It takes no generator, and would draw from the host's.
std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double rate, std::optional<bool> trains) {
  if (!trains.value_or(true)) return {input, at::ones_like(input, input.options().dtype(at::kBool))};
  auto mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - rate);
  auto scale = rate == 1 ? 0.0 : 1.0 / (1 - rate);
  return {input.mul(mask).mul(scale), mask};
}

// CUDA computes softmax of fp16 in fp32 where it is asked to, which the CPU refuses.
void softmax(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto &input = stack->end()[-3], &widens = stack->back();
  if (widens.toBool()) input = input.toTensor().to(at::kFloat);
  widens = false;
  fallback(op, stack);
}

void softmax_backward(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto dtype = stack->back().toScalarType(), wide = stack->end()[-4].toTensor().scalar_type();
  stack->back() = static_cast<int64_t>(wide);
  fallback(op, stack);
  if (dtype != wide) stack->back() = stack->back().toTensor().to(dtype);
}

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", strided_view);
  library.impl("view", viewed);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("unfold", unfold);
  library.impl("resize_", resize);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("set_.source_Storage", set_whole_storage);
  library.impl("set_", set_empty);
  library.impl("copy_", copy);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", local_scalar);
  library.impl("record_stream", record_stream_of);
  library.impl("_fused_sdp_choice", fused_sdp_choice);
  library.impl("native_dropout", native_dropout);
  for (const auto* name : {"_softmax", "_log_softmax"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&softmax>());
  for (const auto* name : {"_softmax_backward_data", "_log_softmax_backward_data"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&softmax_backward>());
  // Else torch chooses kernels that it has for CUDA alone, such as those of depthwise convolutions.
  for (const auto* name : {"convolution", "convolution_backward"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  // Else torch makes it of its variant with an `out`, which warns.
  library.impl("mse_loss", torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace
}  // namespace simulated
