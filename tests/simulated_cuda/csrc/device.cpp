#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "pinned.h"
#include "report.h"

namespace simulated {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
using c10::StreamId;

int num_devices = 8;
thread_local const Clock* clock_of_events = nullptr;

namespace {

constexpr int kGarbage = 0xCB;  // bytes of fresh memory
constexpr size_t kTotalBytes = size_t(8) << 30;
constexpr uint64_t kDefaultSeed = 67280421310721;

thread_local DeviceIndex device_of_thread = 0;
thread_local std::map<DeviceIndex, StreamId> stream_of_thread;
std::atomic<StreamId> next_stream{1};
std::array<std::atomic<int64_t>, kMaxDevices> used, peak;

DeviceIndex or_current(DeviceIndex device) { return device < 0 ? device_of_thread : device; }

}  // namespace

DeviceIndex current_device() { return device_of_thread; }

void set_current_device(DeviceIndex device) {
  TORCH_CHECK(0 <= device && device < num_devices, "CUDA error: invalid device ordinal");
  device_of_thread = device;
}

Stream current_stream(DeviceIndex device) {
  device = or_current(device);
  auto found = stream_of_thread.find(device);
  return Stream(Stream::UNSAFE, Device(kDevice, device), found == stream_of_thread.end() ? 0 : found->second);
}

void set_current_stream(const Stream& stream) { stream_of_thread[stream.device_index()] = stream.id(); }

Stream new_stream(DeviceIndex device) {
  return Stream(Stream::UNSAFE, Device(kDevice, or_current(device)), next_stream++);
}

StreamKey key_of(const Stream& stream) { return StreamKey(stream.device_index()) * 1000000 + stream.id(); }

// Memory.

size_t bytes_in_use(DeviceIndex device) { return used[device]; }
size_t total_bytes() { return kTotalBytes; }

void count_bytes(DeviceIndex device, int64_t num_bytes) {
  auto now = used[device] += num_bytes;
  auto highest = peak[device].load();
  while (now > highest && !peak[device].compare_exchange_weak(highest, now)) {
  }
}

namespace {

struct Block {
  size_t num_bytes;
  DeviceIndex device;
};

// Each block stands behind its size, for the deleter.
constexpr size_t kHeader = 512;

void free_block(void* memory) {
  if (memory == nullptr) return;
  auto* begin = static_cast<char*>(memory) - kHeader;
  const auto& block = *reinterpret_cast<Block*>(begin);
  note_free(memory);
  count_bytes(block.device, -int64_t(block.num_bytes));
  std::free(begin);
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    auto device = device_of_thread;
    if (num_bytes == 0) return {nullptr, nullptr, &free_block, Device(kDevice, device)};
    TORCH_CHECK(bytes_in_use(device) + num_bytes <= kTotalBytes, "CUDA out of memory. Tried to allocate ", num_bytes);
    void* begin = nullptr;
    TORCH_CHECK(posix_memalign(&begin, kHeader, num_bytes + kHeader) == 0, "the host has no memory for cuda:", device);
    *static_cast<Block*>(begin) = {num_bytes, device};
    auto* memory = static_cast<char*>(begin) + kHeader;
    std::memset(memory, kGarbage, num_bytes);
    note_allocation(memory, num_bytes, key_of(current_stream(device)), Memory::kDevice);
    count_bytes(device, num_bytes);
    return {memory, memory, &free_block, Device(kDevice, device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t num_bytes) const override { std::memcpy(to, from, num_bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& memory, Stream stream) override { record_stream(memory.get(), key_of(stream)); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = stats.reserved_bytes[0].current = used[or_current(device)];
    stats.allocated_bytes[0].peak = stats.reserved_bytes[0].peak = peak[or_current(device)];
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex device) override { peak[or_current(device)] = used[or_current(device)].load(); }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    return {kTotalBytes - bytes_in_use(or_current(device)), kTotalBytes};
  }
};

Allocator allocator;
REGISTER_ALLOCATOR(kDevice, &allocator);

}  // namespace

c10::Allocator* device_allocator() { return &allocator; }

void resize_storage(const c10::Storage& storage, size_t num_bytes) {
  auto* impl = storage.unsafeGetStorageImpl();
  if (num_bytes == impl->nbytes()) return;
  c10::DeviceGuard guard(impl->device());
  auto memory = allocator.allocate(num_bytes);
  auto kept = std::min(num_bytes, impl->nbytes());
  if (kept > 0) std::memcpy(memory.get(), impl->data(), kept);
  impl->set_data_ptr_noswap(std::move(memory));
  impl->set_nbytes(num_bytes);
}

// Generators: those of the CPU, one for each device.

namespace {

struct DeviceGenerator final : c10::GeneratorImpl {
  at::Generator host;
  DeviceGenerator(DeviceIndex device, at::Generator host)
      : c10::GeneratorImpl(Device(kDevice, device), c10::DispatchKeySet(c10::DispatchKey::CUDA)), host(std::move(host)) {}
  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host.unsafeGetGeneratorImpl()->get_state(); }
  DeviceGenerator* clone_impl() const override { return new DeviceGenerator(device().index(), host.clone()); }
};

at::Generator new_generator(DeviceIndex device) {
  return at::make_generator<DeviceGenerator>(device, at::make_generator<at::CPUGeneratorImpl>(kDefaultSeed));
}

}  // namespace

const at::Generator& default_generator(DeviceIndex device) {
  static const auto generators = [] {
    std::vector<at::Generator> all;
    for (int index = 0; index < kMaxDevices; ++index) all.push_back(new_generator(DeviceIndex(index)));
    return all;
  }();
  return generators[or_current(device)];
}

const at::Generator& host_generator_of(const at::Generator& generator) {
  return static_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl())->host;
}

// What torch asks of a device.

namespace {

struct Event {
  Clock clock;
};

void wait_explicitly(const char* what, const Clock& clock) {
  report("sync", what);
  host_waits(clock);
}

bool is_known(const Clock& clock) {
  auto host = clock_of_host();
  for (const auto& [stream, number] : clock)
    if (!is_before({stream, number}, host)) return false;
  return true;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  Device exchangeDevice(Device device) const override {
    auto before = device_of_thread;
    setDevice(device);
    return Device(kDevice, before);
  }
  Device getDevice() const override { return Device(kDevice, device_of_thread); }
  void setDevice(Device device) const override {
    if (device.has_index()) set_current_device(device.index());
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.has_index()) device_of_thread = device.index();
  }
  Stream getStream(Device device) const override { return current_stream(device.index()); }
  Stream getDefaultStream(Device device) const override {
    return Stream(Stream::UNSAFE, Device(kDevice, or_current(device.index())), 0);
  }
  Stream getStreamFromGlobalPool(Device device, bool = false) const override { return new_stream(device.index()); }
  Stream getNewStream(Device device, int = 0) const override { return new_stream(device.index()); }
  Stream exchangeStream(Stream stream) const override {
    auto before = current_stream(stream.device_index());
    set_current_stream(stream);
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return DeviceIndex(num_devices); }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event;
    launch(key_of(stream));
    // The first event of a future is that of its operation; what callbacks record behind it is theirs.
    const auto* given = std::exchange(clock_of_events, nullptr);
    static_cast<Event*>(*event)->clock = given != nullptr ? *given : clock_of(key_of(stream));
  }
  void block(void* event, const Stream& stream) const override {
    if (event != nullptr) stream_waits(key_of(stream), static_cast<Event*>(event)->clock);
  }
  // What the host has not waited for is in flight: a device may always be that slow.
  bool queryEvent(void* event) const override { return event == nullptr || is_known(static_cast<Event*>(event)->clock); }
  bool queryStream(const Stream& stream) const override { return is_known(clock_of(key_of(stream))); }
  void synchronizeStream(const Stream& stream) const override {
    wait_explicitly("stream.synchronize", clock_of(key_of(stream)));
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) wait_explicitly("event.synchronize", static_cast<Event*>(event)->clock);
  }
  void synchronizeDevice(const DeviceIndex device) const override {
    wait_explicitly("device.synchronize", clock_of_device(or_current(device)));
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const Stream& stream) const override {
    record_stream(memory.get(), key_of(stream));
  }
  double elapsedTime(void*, void*, const DeviceIndex) const override { return 1.0; }
};

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return DeviceIndex(num_devices); }
  int getNumGPUs() const override { return num_devices; }
  DeviceIndex current_device() const override { return device_of_thread; }
  DeviceIndex getCurrentDevice() const override { return device_of_thread; }
  void setCurrentDevice(DeviceIndex device) const override { set_current_device(device); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    auto before = device_of_thread;
    if (device >= 0) set_current_device(device);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  c10::Allocator* getCUDADeviceAllocator() const override { return &allocator; }
  Device getDeviceFromPtr(void*) const override { return Device(kDevice, device_of_thread); }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(DeviceIndex device) const override { return new_generator(or_current(device)); }
  void deviceSynchronize(DeviceIndex device) const override { Guard().synchronizeDevice(device); }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard)

}  // namespace
}  // namespace simulated

namespace at {
using SimulatedCudaHooks = simulated::Hooks;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, SimulatedCudaHooks)
}  // namespace at
