// Pinned memory, and the copies between it and the device that the host has not waited for.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <vector>

#include "order.h"

namespace simulated {

c10::Allocator* pinned_allocator();
bool is_pinned(const void* address);

// A copy from the device: until the host waits for it, the memory shows garbage.
void copy_to_pinned(const Point& point, const at::Tensor& host, std::vector<char> bytes);
// A copy to the device: returns the bytes that it reads, which include those of copies that are ordered before it.
// Until the host waits for it, it must not change them.
std::vector<char> copy_from_pinned(const Point& point, const at::Tensor& host);
// Ends the copies that the host knows to be done.
void finish_pinned_copies(const Clock& known);
// Ends all copies, and reports sources that were changed although nothing ever waited for their copies.
void settle_pinned_copies();

}  // namespace simulated
