"""A model under TorchFSDPPlugin and its twin in one process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from gemini_models import Twins
from torch import nn
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

from booster.interface import Plugin
from booster.plugins import TorchFSDPPlugin

STRATEGIES: dict[str, dict[str, Any]] = {
    "full": {"sharding_strategy": "FULL_SHARD"},
    "grad op": {"sharding_strategy": "SHARD_GRAD_OP"},
    "none": {"sharding_strategy": "NO_SHARD"},
    # Of four ranks, two share the shards.
    "hybrid": {"sharding_strategy": "HYBRID_SHARD", "extra_dp_size": 2},
}


def small_units(min_num_params: int = 100) -> functools.partial[bool]:
    """Returns a policy that makes units of what is hardly larger than one layer of the tests' models."""
    return functools.partial(size_based_auto_wrap_policy, min_num_params=min_num_params)


class FSDPTwins(Twins):
    """`Twins` whose boosted model is sharded by FSDP2."""

    def make_plugin(self, ignores: Callable[[nn.Module], list[nn.Module]] | None = None, **arguments: Any) -> Plugin:
        """Returns the plugin; `ignores` says which modules of the model to boost it leaves alone."""
        if ignores is not None:
            arguments["ignored_modules"] = ignores(self.raw)
        return TorchFSDPPlugin(**arguments)
