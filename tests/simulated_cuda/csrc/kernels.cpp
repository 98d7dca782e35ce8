// Operators that torch has for CUDA alone: parts of SyncBatchNorm, the fused cells of LSTMs and GRUs, histograms of
// integers, as in the routers of transformers, and the choice of a kernel for CTC losses. Each is made of operators that
// the device runs one by one.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace simulated {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// SyncBatchNorm. The features are dimension 1; statistics of low precision are in fp32.

Tensor widened(const Tensor& tensor) {
  return tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16 ? tensor.to(at::kFloat) : tensor;
}

std::vector<int64_t> dims_of_samples(const Tensor& input) {
  std::vector<int64_t> dims;
  for (int64_t dim = 0; dim < input.dim(); ++dim)
    if (dim != 1) dims.push_back(dim);
  return dims;
}

// A vector over features, as wide as the input.
Tensor spread(const Tensor& features, const Tensor& input) {
  std::vector<int64_t> shape(input.dim(), 1);
  shape[1] = features.numel();
  return features.view(shape);
}

std::tuple<Tensor, Tensor> batch_norm_stats(const Tensor& input, double eps) {
  auto wide = widened(input);
  auto dims = dims_of_samples(input);
  auto mean = wide.mean(dims);
  auto variance = (wide - spread(mean, wide)).square().mean(dims);
  return {mean, (variance + eps).rsqrt()};
}

std::tuple<Tensor, Tensor> batch_norm_gather_stats_with_counts(
    const Tensor& input, const Tensor& means, const Tensor& invstds, const OptionalTensor& running_mean,
    const OptionalTensor& running_var, double momentum, double eps, const Tensor& counts) {
  auto weights = counts.to(means.scalar_type()).view({-1, 1});
  auto total = weights.sum();
  auto mean = (weights * means).sum(0) / total;
  auto variances = invstds.pow(-2) - eps;
  auto squares = (weights * (variances + (means - mean).square())).sum(0);
  if (running_mean.has_value() && running_mean->defined()) {
    Tensor written = *running_mean;
    written.lerp_(mean.to(written.scalar_type()), momentum);
  }
  if (running_var.has_value() && running_var->defined()) {
    Tensor written = *running_var;
    written.lerp_((squares / (total - 1)).to(written.scalar_type()), momentum);
  }
  return {mean, (squares / total + eps).rsqrt()};
}

Tensor batch_norm_elemt(
    const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias, const Tensor& mean,
    const Tensor& invstd, double) {
  auto wide = widened(input);
  auto normed = (wide - spread(mean, wide)) * spread(invstd, wide);
  if (weight.has_value() && weight->defined()) normed = normed * spread(*weight, wide);
  if (bias.has_value() && bias->defined()) normed = normed + spread(*bias, wide);
  return normed.to(input.scalar_type());
}

std::tuple<Tensor, Tensor, Tensor, Tensor> batch_norm_backward_reduce(
    const Tensor& gradient, const Tensor& input, const Tensor& mean, const Tensor& invstd,
    const OptionalTensor& weight, bool for_input, bool for_weight, bool for_bias) {
  auto wide = widened(gradient);
  auto dims = dims_of_samples(input);
  auto sum = wide.sum(dims);
  auto sum_centred = (wide * (widened(input) - spread(mean, wide))).sum(dims);
  auto dtype = weight.has_value() && weight->defined() ? weight->scalar_type() : sum.scalar_type();
  return {
      for_input ? sum : Tensor(), for_input ? sum_centred : Tensor(),
      for_weight ? (sum_centred * invstd).to(dtype) : Tensor(), for_bias ? sum.to(dtype) : Tensor()};
}

Tensor batch_norm_backward_elemt(
    const Tensor& gradient, const Tensor& input, const Tensor& mean, const Tensor& invstd,
    const OptionalTensor& weight, const Tensor& sum, const Tensor& sum_centred, const Tensor& counts) {
  auto wide = widened(gradient);
  auto total = counts.sum().to(sum.scalar_type());
  auto centred = widened(input) - spread(mean, wide);
  auto found = wide - spread(sum / total, wide) - centred * spread(invstd.square() * sum_centred / total, wide);
  found = found * spread(invstd, wide);
  if (weight.has_value() && weight->defined()) found = found * spread(*weight, wide);
  return found.to(input.scalar_type());
}

// Recurrent cells.

Tensor with_bias(const Tensor& gates, const OptionalTensor& bias) {
  return bias.has_value() && bias->defined() ? gates + *bias : gates;
}

Tensor or_zeros(const OptionalTensor& gradient, const Tensor& like) {
  return gradient.has_value() && gradient->defined() ? *gradient : at::zeros_like(like);
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell(
    const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& cx, const OptionalTensor& input_bias,
    const OptionalTensor& hidden_bias) {
  auto gates = (with_bias(input_gates, input_bias) + with_bias(hidden_gates, hidden_bias)).chunk(4, -1);
  auto in = gates[0].sigmoid(), forget = gates[1].sigmoid(), cell = gates[2].tanh(), out = gates[3].sigmoid();
  auto cy = forget * cx + in * cell;
  return {out * cy.tanh(), cy, at::cat({in, forget, cell, out}, -1)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(
    const OptionalTensor& grad_hy, const OptionalTensor& grad_cy, const Tensor& cx, const Tensor& cy,
    const Tensor& workspace, bool has_bias) {
  auto gates = workspace.chunk(4, -1);
  auto in = gates[0], forget = gates[1], cell = gates[2], out = gates[3];
  auto of_hy = or_zeros(grad_hy, cy), bent = cy.tanh();
  auto of_cy = of_hy * out * (1 - bent.square()) + or_zeros(grad_cy, cy);
  auto grad_gates = at::cat(
      {of_cy * cell * (1 - in) * in, of_cy * cx * (1 - forget) * forget, of_cy * in * (1 - cell.square()),
       of_hy * bent * (1 - out) * out},
      -1);
  return {grad_gates, of_cy * forget, has_bias ? grad_gates.sum(0) : Tensor()};
}

std::tuple<Tensor, Tensor> gru_cell(
    const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& hx, const OptionalTensor& input_bias,
    const OptionalTensor& hidden_bias) {
  auto given = with_bias(input_gates, input_bias).chunk(3, -1);
  auto hidden = with_bias(hidden_gates, hidden_bias).chunk(3, -1);
  auto reset = (given[0] + hidden[0]).sigmoid(), update = (given[1] + hidden[1]).sigmoid();
  auto fresh = (given[2] + reset * hidden[2]).tanh();
  return {fresh + update * (hx - fresh), at::cat({reset, update, fresh, hx, hidden[2]}, -1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(
    const Tensor& gradient, const Tensor& workspace, bool has_bias) {
  auto saved = workspace.chunk(5, -1);
  auto reset = saved[0], update = saved[1], fresh = saved[2], hx = saved[3], hidden = saved[4];
  auto of_update = gradient * (hx - fresh) * (1 - update) * update;
  auto of_fresh = gradient * (1 - update) * (1 - fresh.square());
  auto of_reset = of_fresh * hidden * (1 - reset) * reset;
  auto of_input = at::cat({of_reset, of_update, of_fresh}, -1);
  auto of_hidden = at::cat({of_reset, of_update, of_fresh * reset}, -1);
  return {
      of_input, of_hidden, gradient * update, has_bias ? of_input.sum(0) : Tensor(),
      has_bias ? of_hidden.sum(0) : Tensor()};
}

// The last bin includes its upper bound.
Tensor histc(const Tensor& input, int64_t bins, const at::Scalar& min, const at::Scalar& max) {
  auto values = input.flatten().to(at::kDouble);
  double low = min.toDouble(), high = max.toDouble();
  if (low == high && values.numel() > 0) {
    low = values.min().item<double>();
    high = values.max().item<double>();
  }
  if (low == high) {
    low -= 1;
    high += 1;
  }
  auto bin = ((values - low) * (double(bins) / (high - low))).floor().to(at::kLong).clamp_max(bins - 1);
  auto inside = values.ge(low).logical_and(values.le(high));
  auto counts = at::bincount(at::where(inside, bin, bins), {}, bins + 1);
  return counts.narrow(0, 0, bins).to(input.scalar_type());
}

// cuDNN's kernel takes only targets in host memory.
bool refuse_ctc_loss(const Tensor&, const Tensor&, c10::IntArrayRef, c10::IntArrayRef, int64_t) { return false; }

bool refuse_ctc_loss_of_tensors(const Tensor&, const Tensor&, const Tensor&, const Tensor&, int64_t) { return false; }

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("histc", histc);
  for (const std::string name : {"_use_cudnn_ctc_loss", "_use_miopen_ctc_loss"}) {
    library.impl(name.c_str(), refuse_ctc_loss);
    library.impl((name + ".Tensor").c_str(), refuse_ctc_loss_of_tensors);
  }
  library.impl("batch_norm_stats", batch_norm_stats);
  library.impl("batch_norm_gather_stats_with_counts", batch_norm_gather_stats_with_counts);
  library.impl("batch_norm_elemt", batch_norm_elemt);
  library.impl("batch_norm_backward_reduce", batch_norm_backward_reduce);
  library.impl("batch_norm_backward_elemt", batch_norm_backward_elemt);
  library.impl("_thnn_fused_lstm_cell", lstm_cell);
  library.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
  library.impl("_thnn_fused_gru_cell", gru_cell);
  library.impl("_thnn_fused_gru_cell_backward", gru_cell_backward);
}

}  // namespace
}  // namespace simulated
