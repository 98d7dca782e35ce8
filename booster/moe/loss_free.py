"""Balance of experts without an auxiliary loss: a bias of each expert that only decides which ones are chosen.

Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", 2024 (arXiv:2408.15664), as in
DeepSeek-V3 (arXiv:2412.19437).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from booster.comm import all_reduce_sum
from booster.errors import ConfigError
from booster.validation import is_non_nan_number

from .loss import is_training_forward

_BIAS = "e_score_correction_bias"  # of transformers' routers, which add it to the scores that they choose by


@dataclass(slots=True, eq=False)
class _Balanced:
    """A router with a bias.

    Attributes:
        gate: Module with the bias.
        bias: The bias in fp32: steps are too small for a buffer in low precision.
        counts: Tokens of each expert since the last step, on this rank; None before the first forward.
    """

    gate: nn.Module
    bias: Tensor
    counts: Tensor | None = None

    def count(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if not module.training or not is_training_forward():
            return
        index = [*args, *kwargs.values()][1].reshape(-1).clamp(max=len(self.bias))  # a larger one is a dropped token
        if self.counts is None:
            self.counts = index.new_zeros(len(self.bias) + 1)
        self.counts.scatter_add_(0, index, torch.ones_like(index))


class LossFreeBalancing:
    """Updates the routers' biases of a model so that all experts get equally many tokens of the global batch.

    The bias of an expert with fewer tokens than the mean grows by `rate`, that of one with more shrinks by it. It has
    no gradient and is part of the model's state.

    Args:
        model: The user's model, boosted or not, with routers of transformers that have an `e_score_correction_bias`.
        rate: Size of an update.
        group: Ranks that read different data; optional, defaults to the world. With a plugin that has several axes it
            is `plugin.data_group`.

    Raises:
        ConfigError: The model has no such routers, or the rate is invalid.
    """

    def __init__(self, model: nn.Module, rate: float = 1e-3, group: dist.ProcessGroup | None = None) -> None:
        if not is_non_nan_number(rate) or not 0 < rate < 1:
            raise ConfigError(f"rate={rate!r} is not a size of updates: give a number between 0 and 1, such as 1e-3")
        self._rate, self._group = rate, group
        self._routers: list[_Balanced] = []
        for gate, experts in _routers_of(model):
            bias: Tensor = getattr(gate, _BIAS)
            router = _Balanced(gate, bias.detach().float().clone())
            experts.register_forward_pre_hook(router.count, with_kwargs=True)
            self._routers.append(router)
        if not self._routers:
            raise ConfigError(
                f"LossFreeBalancing() found no router with an {_BIAS} beside a module `experts` in"
                f" {type(model).__name__}: give a model that has them, such as DeepSeek-V3, or use an auxiliary loss"
            )

    @torch.no_grad()
    def step(self) -> None:
        """Update the biases by the tokens since the last call; call it once a step, after the optimizer's.

        Collective: over the group.
        """
        for router in self._routers:
            counts = torch.zeros_like(router.bias) if router.counts is None else router.counts[:-1].float()
            counts, router.counts = all_reduce_sum(counts.contiguous(), self._group), None
            current: Tensor = getattr(router.gate, _BIAS)
            if not torch.equal(current, router.bias.to(current)):  # loaded, or changed by the user
                router.bias = current.detach().float().clone()
            router.bias = router.bias.to(current.device) + self._rate * (counts.mean() - counts).sign()
            current.copy_(router.bias)


def _routers_of(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield modules with a bias, and the experts beside them."""
    for block in model.modules():
        experts = getattr(block, "experts", None)
        for _, gate in block.named_children() if isinstance(experts, nn.Module) else ():
            if isinstance(getattr(gate, _BIAS, None), Tensor) and isinstance(experts, nn.Module):
                yield gate, experts
