"""Routers: which experts compute a token, within which capacity, and noise that lets others be tried."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from booster.errors import ConfigError
from booster.validation import check_count, check_flag, is_non_nan_number

from .loss import load_balance_loss

_POLICIES = ("first", "random")


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Assignments of tokens to experts.

    Attributes:
        top_k_index: Experts of each token, of shape (tokens, k), int64. The number of experts stands for an assignment
            that was dropped.
        top_k_weights: Weights of their outputs, of shape (tokens, k), fp32; 0 for a dropped assignment.
        auxiliary_loss: Load-balancing loss, a 0-dim tensor.
        num_dropped: Number of dropped assignments, a 0-dim tensor on the device of the logits.
    """

    top_k_index: Tensor
    top_k_weights: Tensor
    auxiliary_loss: Tensor
    num_dropped: Tensor


class NormalNoiseGenerator:
    """Gaussian noise on logits, with a standard deviation of 1 / num_experts (arXiv:2106.05974).

    Args:
        num_experts: Number of experts.

    Raises:
        ConfigError: `num_experts` is invalid.
    """

    def __init__(self, num_experts: int) -> None:
        check_count(num_experts=num_experts)
        self.num_experts = num_experts

    def __call__(self, logits: Tensor) -> Tensor:
        """Return the logits with noise added."""
        return logits + torch.randn_like(logits) / self.num_experts


class UniformNoiseGenerator:
    """Jitter: logits times factors drawn uniformly from [1 - eps, 1 + eps] (arXiv:2101.03961).

    Args:
        eps: Largest relative change.

    Raises:
        ConfigError: `eps` is invalid.
    """

    def __init__(self, eps: float = 1e-2) -> None:
        if not is_non_nan_number(eps) or not 0 <= eps < 1:
            raise ConfigError(f"eps={eps!r} is not a relative change: give a number in [0, 1), such as 1e-2")
        self.eps = eps

    def __call__(self, logits: Tensor) -> Tensor:
        """Return the logits times the factors."""
        return logits * torch.empty_like(logits).uniform_(1 - self.eps, 1 + self.eps)


def expert_capacity(num_assignments: int, num_experts: int, factor: float, minimum: int) -> int:
    """Return how many assignments an expert computes at most (GShard, arXiv:2006.16668).

    It is `factor` times the even share of the assignments, rounded down and then up to an even number, and at least
    `minimum`.
    """
    capacity = math.floor(factor * num_assignments / num_experts)
    return max(capacity + capacity % 2, minimum)


class Router(nn.Module):
    """Router of each token to the `top_k` experts with the highest probabilities; see `Top1Router` and `Top2Router`.

    An expert computes at most `capacity()` assignments of a forward, and further ones are dropped. First choices come
    before second ones (arXiv:2006.16668, algorithm 1). Routers have no parameters, so several layers can share one.

    Attributes:
        top_k: Number of experts per token.
        sum_over_batch: Reduction of the sums in `load_balance_loss`, optional; by default they are those of the tokens
            of this forward.

    Args:
        capacity_factor_train: Factor of the capacity in training.
        capacity_factor_eval: Factor of the capacity in evaluation.
        min_capacity: Lower limit of the capacity.
        select_policy: Which assignments of an expert beyond its capacity stay: "first" for those of the first tokens,
            or "random".
        noisy_func: Function of the logits that adds noise in training, optional.
        drop_tks: If False, capacity is unlimited.

    Raises:
        ConfigError: An argument is invalid.
    """

    top_k: ClassVar[int]

    def __init__(
        self,
        capacity_factor_train: float = 1.25,
        capacity_factor_eval: float = 2.0,
        min_capacity: int = 4,
        select_policy: str = "first",
        noisy_func: Callable[[Tensor], Tensor] | None = None,
        drop_tks: bool = True,
    ) -> None:
        super().__init__()
        for name, factor in (("train", capacity_factor_train), ("eval", capacity_factor_eval)):
            if not is_non_nan_number(factor) or not 0 < factor < math.inf:
                raise ConfigError(
                    f"capacity_factor_{name}={factor!r} leaves no expert a capacity: give a positive number, such as"
                    " 1.25, or drop_tks=False for no limit"
                )
        check_count(min_capacity=min_capacity)
        if noisy_func is not None and not callable(noisy_func):
            raise ConfigError(
                f"noisy_func={noisy_func!r} is not callable: give NormalNoiseGenerator(num_experts),"
                " UniformNoiseGenerator(), or a function of the logits"
            )
        if select_policy not in _POLICIES:
            raise ConfigError(
                f"select_policy={select_policy!r} is unknown: give 'first', which keeps an expert's first tokens, or"
                " 'random'"
            )
        check_flag("drop_tks", drop_tks)
        self.capacity_factor_train = capacity_factor_train
        self.capacity_factor_eval = capacity_factor_eval
        self.min_capacity = min_capacity
        self.noisy_func = noisy_func
        self.drop_tks = drop_tks
        self.select_policy = select_policy
        self.sum_over_batch: Callable[[Tensor], Tensor] | None = None

    def check_num_experts(self, num_experts: int) -> None:
        """Raise `ConfigError` if there are fewer experts than each token gets."""
        if num_experts < self.top_k:
            raise ConfigError(
                f"num_experts={num_experts} is less than the {self.top_k} experts that {type(self).__name__} gives each"
                f" token: use at least {self.top_k} experts, or Top1Router"
            )

    def capacity(self, num_tokens: int, num_experts: int) -> int:
        """Return how many assignments an expert computes at most; see `expert_capacity`."""
        factor = self.capacity_factor_train if self.training else self.capacity_factor_eval
        return expert_capacity(self.top_k * num_tokens, num_experts, factor, self.min_capacity)

    def forward(self, logits: Tensor) -> Routing:
        """Return the assignments of tokens.

        Args:
            logits: Output of a gate, of shape (tokens, experts); computed with in fp32.

        Raises:
            ConfigError: There are fewer experts than each token gets.
        """
        num_experts = logits.shape[-1]
        self.check_num_experts(num_experts)
        logits = logits.float()
        if self.training and self.noisy_func is not None:
            logits = self.noisy_func(logits)
        probabilities = logits.softmax(-1)
        weights, index = probabilities.topk(self.top_k)
        reduction = self.sum_over_batch if self.training else None
        auxiliary_loss = load_balance_loss(probabilities, index[:, 0], num_experts, reduction) / self.top_k
        weights = self._weights(weights)
        if not self.drop_tks:
            num_dropped = index.new_zeros(())
        else:
            is_dropped = self._positions(index, num_experts) >= self.capacity(len(logits), num_experts)
            index = index.masked_fill(is_dropped, num_experts)
            weights = weights.masked_fill(is_dropped, 0)
            num_dropped = is_dropped.sum()
        return Routing(top_k_index=index, top_k_weights=weights, auxiliary_loss=auxiliary_loss, num_dropped=num_dropped)

    def _weights(self, probabilities: Tensor) -> Tensor:
        return probabilities

    def _positions(self, index: Tensor, num_experts: int) -> Tensor:
        """Return the position of each assignment among those of its expert, of shape (tokens, k)."""
        num_tokens, top_k = index.shape
        priority = None
        if self.select_policy == "random":
            priority = torch.randperm(num_tokens, device=index.device)
            index = index[priority]
        experts, order = index.t().reshape(-1).sort(stable=True)  # all first choices, then all second ones
        starts = torch.searchsorted(experts, torch.arange(num_experts, device=index.device))
        sorted_positions = torch.arange(len(experts), device=index.device) - starts[experts]
        positions = torch.empty_like(order).scatter_(0, order, sorted_positions).view(top_k, num_tokens).t()
        return positions if priority is None else torch.empty_like(positions).index_copy_(0, priority, positions)


class Top1Router(Router):
    """Router to the expert with the highest probability, which weights its output (arXiv:2101.03961); see `Router`."""

    top_k = 1


class Top2Router(Router):
    """Router to the two experts with the highest probabilities (arXiv:2006.16668); arguments as of `Router`.

    The weights are normalized to a sum of 1 before assignments are dropped, as in algorithm 1 of the paper. Unlike
    there, the second expert is used whenever it has capacity, and not at random. The auxiliary loss is that of first
    choices, halved.
    """

    top_k = 2

    def _weights(self, probabilities: Tensor) -> Tensor:
        return probabilities / probabilities.sum(-1, keepdim=True)
