// Devices "cuda:N" in host memory: current device and stream, allocator, generators.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include "order.h"

namespace simulated {

constexpr auto kDevice = c10::DeviceType::CUDA;
constexpr int kMaxDevices = 64;

extern int num_devices;

// The current device is that of the thread, and begins at 0, as in CUDA.
c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex device);
c10::Stream current_stream(c10::DeviceIndex device = -1);
void set_current_stream(const c10::Stream& stream);
c10::Stream new_stream(c10::DeviceIndex device);
StreamKey key_of(const c10::Stream& stream);

// Events that this thread records have this clock while it is set: those of a collective that has ended.
extern thread_local const Clock* clock_of_events;

c10::Allocator* device_allocator();
void resize_storage(const c10::Storage& storage, size_t num_bytes);
size_t bytes_in_use(c10::DeviceIndex device);
size_t total_bytes();
void count_bytes(c10::DeviceIndex device, int64_t num_bytes);

const at::Generator& default_generator(c10::DeviceIndex device);
const at::Generator& host_generator_of(const at::Generator& generator);

}  // namespace simulated
