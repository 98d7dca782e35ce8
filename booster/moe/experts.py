"""Experts of a layer: modules of any class, or feed-forward networks with stacked parameters.

Both have the interface of the experts in transformers 5, such as `MixtralExperts`: hidden states, the experts of each
token, and the weights of their outputs.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from booster.compatibility import takes_foreign
from booster.core.opaque_operator import autocast_dtype, opaque_method
from booster.errors import ConfigError
from booster.validation import check_count


def sort_by_expert(top_k_index: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return assignments sorted by expert, without a synchronization with the host.

    Args:
        top_k_index: Experts of each token, of shape (tokens, k); `num_experts` for a dropped assignment.
        num_experts: Number of experts.

    Returns:
        Indices into the flattened assignments, of shape (tokens * k,), dropped ones last; and the end of each expert's
        range of them, of shape (experts,).
    """
    experts, order = top_k_index.reshape(-1).sort(stable=True)
    return order, torch.searchsorted(experts, torch.arange(num_experts, device=experts.device), right=True)


def combine(outputs: Tensor, order: Tensor, top_k_index: Tensor, top_k_weights: Tensor, num_experts: int) -> Tensor:
    """Return the weighted sum of the outputs of each token's experts, of shape (tokens, dim).

    Args:
        outputs: Outputs for the sorted assignments, of shape (tokens * k, dim).
        order: Indices of the sorted assignments.
        top_k_index: Experts of each token.
        top_k_weights: Weights of each token's experts; that of a dropped assignment is ignored.
        num_experts: Number of experts.
    """
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    weights = top_k_weights.masked_fill(top_k_index == num_experts, 0)
    by_token = outputs[inverse].view(*top_k_index.shape, outputs.shape[-1])
    return (by_token * weights.unsqueeze(-1)).sum(1).to(outputs.dtype)


class Experts(nn.Module):
    """Experts of one class, each with its own initialization.

    Every expert runs in every forward, also on zero tokens. So all parameters have a gradient, zeros for an expert
    without tokens, on every rank, and `find_unused_parameters` is not needed.

    Args:
        expert_cls: Class of an expert, or a function that returns one, which maps (tokens, dim) to (tokens, dim_out)
            and accepts zero tokens.
        num_experts: Number of experts.
        **kwargs: Keyword arguments of the class.

    Raises:
        ConfigError: An argument is invalid.
    """

    @takes_foreign(expert="expert_cls")
    def __init__(self, expert_cls: Callable[..., nn.Module], num_experts: int, **kwargs: Any) -> None:
        super().__init__()
        check_count(num_experts=num_experts)
        if isinstance(expert_cls, nn.Module) or not callable(expert_cls):
            raise ConfigError(
                f"expert_cls={expert_cls!r} is not a class of experts, of which each has its own parameters: give the"
                " class, and its arguments by keyword"
            )
        self.num_experts = num_experts
        self.experts = nn.ModuleList(expert_cls(**kwargs) for _ in range(num_experts))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of the outputs of each token's experts, of shape (tokens, dim_out).

        Args:
            hidden_states: Tokens, of shape (tokens, dim).
            top_k_index: Experts of each token, of shape (tokens, k), int64; `num_experts` for a dropped assignment.
            top_k_weights: Weights of their outputs, of shape (tokens, k).
        """
        order, ends = sort_by_expert(top_k_index, self.num_experts)
        states = hidden_states[order // top_k_index.shape[1]]
        like = None
        if torch.compiler.is_compiling():
            with torch.no_grad():
                like = self.experts[0](states[:0])  # tells the shape of the outputs
        outputs = self._compute(states, ends, like)
        return combine(outputs, order, top_k_index, top_k_weights, self.num_experts)

    def _run_modules(self, states: Tensor, ends: Tensor, like: Tensor | None) -> Tensor:
        *ranges, dropped = states.split(_sizes(ends, len(states)))
        outputs = [expert(rows) for expert, rows in zip(self.experts, ranges, strict=True)]
        return torch.cat([*outputs, outputs[0].new_zeros(len(dropped), outputs[0].shape[-1])])

    _compute = opaque_method(_run_modules, lambda states, ends, like: like.new_empty(len(states), like.shape[-1]))


def _sizes(ends: Tensor, num_rows: int) -> list[int]:
    """Return the number of rows of each expert, and of those after them. Synchronizes with the host."""
    if _has_no_values(ends):  # memory estimates: tokens spread evenly
        bounds = [num_rows * number // len(ends) for number in range(len(ends) + 1)] + [num_rows]
    else:
        bounds = [0, *ends.tolist(), num_rows]
    return [end - start for start, end in itertools.pairwise(bounds)]


def _has_no_values(tensor: Tensor) -> bool:
    return tensor.is_meta or isinstance(tensor, FakeTensor)


class FFNExperts(nn.Module):
    """Feed-forward networks of two linear layers, with the parameters of all experts stacked along dim 0.

    One grouped product computes a layer of all experts on accelerators where torch has it for the dtype and the sizes,
    else one product per expert. All parameters have a gradient, zeros for an expert without tokens.

    Args:
        num_experts: Number of experts.
        d_model: Size of tokens.
        d_ff: Size of the hidden layer.
        activation: Class of the activation, or a function.
        drop_rate: Probability of dropout after each layer.
        bias: If True, the layers have biases.

    Raises:
        ConfigError: An argument is invalid.
    """

    def __init__(
        self,
        num_experts: int,
        d_model: int,
        d_ff: int,
        activation: Callable[..., Any] = nn.GELU,
        drop_rate: float = 0,
        bias: bool = True,
    ) -> None:
        super().__init__()
        check_count(num_experts=num_experts, d_model=d_model, d_ff=d_ff)
        if not callable(activation):
            raise ConfigError(f"activation={activation!r} is not callable: give a class such as nn.GELU, or a function")
        self.num_experts = num_experts
        self.up_weight = nn.Parameter(torch.empty(num_experts, d_ff, d_model))
        self.down_weight = nn.Parameter(torch.empty(num_experts, d_model, d_ff))
        self.up_bias = nn.Parameter(torch.empty(num_experts, d_ff)) if bias else None
        self.down_bias = nn.Parameter(torch.empty(num_experts, d_model)) if bias else None
        self.activation = activation() if isinstance(activation, type) else activation
        self.dropout = nn.Dropout(drop_rate)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize each expert as `nn.Linear` is."""
        for weight, bias in ((self.up_weight, self.up_bias), (self.down_weight, self.down_bias)):
            bound = 1 / math.sqrt(weight.shape[-1])
            nn.init.uniform_(weight, -bound, bound)
            if bias is not None:
                nn.init.uniform_(bias, -bound, bound)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of the outputs of each token's experts; arguments and shapes as of `Experts`."""
        order, ends = sort_by_expert(top_k_index, self.num_experts)
        states = hidden_states[order // top_k_index.shape[1]]
        # Grouped products leave rows outside of all ranges uninitialized, and the gradients of such rows. The last
        # expert computes the dropped assignments, too; with a weight of 0 they have neither output nor gradient.
        ends = torch.cat([ends[:-1], ends.new_full((1,), len(order))])
        outputs = self._compute(states, ends, self.down_weight.shape[1])
        return combine(outputs, order, top_k_index, top_k_weights, self.num_experts)

    def _is_grouped(self, states: Tensor, ends: Tensor) -> bool:
        weights = (self.up_weight, self.down_weight)
        return (
            not _has_no_values(ends)
            and all(map(_is_aligned, (states, *weights)))
            and _has_grouped_mm(states.device, autocast_dtype(states))
        )

    def _run_grouped(self, states: Tensor, ends: Tensor) -> Tensor:
        states = self.dropout(self.activation(grouped_linear(states, self.up_weight, self.up_bias, ends)))
        outputs: Tensor = self.dropout(grouped_linear(states, self.down_weight, self.down_bias, ends))
        return outputs

    def _run_each(self, states: Tensor, ends: Tensor) -> Tensor:
        ranges = states.split(_sizes(ends, len(states))[:-1])
        none = [None] * len(ranges)
        ups = zip(ranges, self.up_weight.unbind(), none if self.up_bias is None else self.up_bias.unbind(), strict=True)
        downs = zip(self.down_weight.unbind(), none if self.down_bias is None else self.down_bias.unbind(), strict=True)
        hidden = (self.dropout(self.activation(F.linear(*one))) for one in ups)
        return torch.cat([self.dropout(F.linear(one, *down)) for one, down in zip(hidden, downs, strict=True)])

    def _run_stacked(self, states: Tensor, ends: Tensor, num_features: int) -> Tensor:
        return self._run_grouped(states, ends) if self._is_grouped(states, ends) else self._run_each(states, ends)

    _compute = opaque_method(
        _run_stacked,
        lambda states, ends, num_features: states.new_empty(len(states), num_features, dtype=autocast_dtype(states)),
    )


def grouped_linear(states: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor) -> Tensor:
    """Return the product of ranges of rows with a matrix each, plus its bias, of shape (rows, out).

    Args:
        states: Rows, of shape (rows, in).
        weight: Matrices, of shape (groups, out, in).
        bias: Biases, of shape (groups, out), optional.
        ends: End of each group's range, of shape (groups,); the last one is the number of rows.
    """
    dtype = autocast_dtype(states)  # grouped products have no autocast rule
    states, weight, bias = states.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    outputs = F.grouped_mm(states, weight.transpose(-2, -1), offs=ends.int())
    if bias is None:
        return outputs
    rows = torch.arange(len(states), device=states.device)
    return outputs + bias[torch.searchsorted(ends, rows, right=True)]


def _is_aligned(tensor: Tensor) -> bool:
    """Return whether rows begin at multiples of 16 bytes, and outputs of any number of them do."""
    return all(count * tensor.element_size() % 16 == 0 for count in (*tensor.shape[1:], tensor.storage_offset()))


@functools.cache
def _has_grouped_mm(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether torch computes grouped products and their gradients with one kernel, by a call."""
    if device.type == "cpu":  # one product after the other, without the biases
        return False
    try:
        with torch.enable_grad(), torch.inference_mode(False):
            states = torch.ones(16, 16, device=device, dtype=dtype, requires_grad=True)
            weight = torch.ones(2, 16, 16, device=device, dtype=dtype, requires_grad=True)
            ends = torch.tensor([8, 16], device=device, dtype=torch.int32)
            outputs = F.grouped_mm(states, weight.transpose(-2, -1), offs=ends)
            torch.autograd.grad(outputs, (states, weight), torch.ones_like(outputs))
    except (RuntimeError, AttributeError):  # no kernel, or a torch without it
        return False
    return True
