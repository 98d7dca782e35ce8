// Operators of the simulated device.
#pragma once

#include <ATen/core/Tensor.h>

#include "order.h"

namespace simulated {

// Returns a CPU tensor that shares the memory of a tensor of the device.
at::Tensor host_view(const at::Tensor& tensor);
void note_access(const Point& point, const at::Tensor& tensor, bool writes, const std::string& operation);

}  // namespace simulated
