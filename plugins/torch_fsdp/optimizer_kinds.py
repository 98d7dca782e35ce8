"""Classification of optimizers: elementwise, per parameter, or over all parameters."""

from __future__ import annotations

from enum import IntEnum

from torch import optim

from booster.errors import ConfigError
from booster.plugins.sharding.elementwise import obstacle_to_parts
from booster.plugins.sharding.probe import find_tie

__all__ = ["OptimizerKind", "kind_of"]

# Known classes of torch, covered by tests. A subclass may behave differently, so it is probed.
_PER_PARAM_CLASSES = frozenset({optim.Adafactor, optim.Muon})


class OptimizerKind(IntEnum):
    """Unit of data that an optimizer's update depends on. A larger kind is valid for all smaller ones."""

    ELEMENTWISE = 0  # any elements of parameters
    PER_PARAM = 1  # one full parameter
    GLOBAL = 2  # all full parameters


def kind_of(optimizer: optim.Optimizer) -> OptimizerKind:
    """Return the kind of an optimizer; copies of unknown classes are probed on small tensors.

    The optimizer and the process's state do not change. The result is local, so the ranks should take the maximum.

    Args:
        optimizer: The user's optimizer, before its parameters are sharded.

    Raises:
        ConfigError: The optimizer can't run on sharded parameters.
    """
    if obstacle_to_parts(optimizer) is None:
        return OptimizerKind.ELEMENTWISE
    if isinstance(optimizer, optim.SparseAdam):
        raise ConfigError(
            f"{type(optimizer).__name__} takes sparse gradients, but gradients of sharded parameters are dense: use"
            " torch.optim.AdamW, and embeddings without sparse=True"
        )
    if isinstance(optimizer, optim.LBFGS):
        return OptimizerKind.GLOBAL
    if type(optimizer) in _PER_PARAM_CLASSES:
        return OptimizerKind.PER_PARAM
    return OptimizerKind.GLOBAL if find_tie(optimizer) is not None else OptimizerKind.PER_PARAM
