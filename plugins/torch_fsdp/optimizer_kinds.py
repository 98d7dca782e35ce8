"""What an optimizer has to see at once: rows of parameters, whole ones, or all of them."""

from __future__ import annotations

from enum import IntEnum

from torch import optim

from booster.errors import ConfigError
from booster.plugins.sharding.elementwise import obstacle_to_parts
from booster.plugins.sharding.probe import find_tie

__all__ = ["OptimizerKind", "kind_of"]

# torch's own, whose formulas were read and that tests try out. A subclass may do something else, so it is tried.
_WHOLES = frozenset({optim.Adafactor, optim.Muon})


class OptimizerKind(IntEnum):
    """What a rank's optimizer has to see to do what it would do in one process; the larger serves all smaller."""

    PIECES = 0  # any elements of parameters
    WHOLES = 1  # whole parameters, but not all of them
    TOGETHER = 2  # all parameters, whole


def kind_of(optimizer: optim.Optimizer) -> OptimizerKind:
    """Returns what an optimizer has to see; unknown classes are found out by trying copies on small tensors.

    The optimizer itself and the process's state stay as they are; it is not stepped. Each rank finds out by itself, so
    the ranks should compare, or take the largest.

    Args:
        optimizer: The user's optimizer, before its parameters are cut.

    Raises:
        ConfigError: It can't run on sharded parameters at all.
    """
    if obstacle_to_parts(optimizer) is None:
        return OptimizerKind.PIECES
    if isinstance(optimizer, optim.SparseAdam):
        raise ConfigError(
            f"{type(optimizer).__name__} takes sparse gradients, and gradients are dense where they are summed over"
            " sharded parameters: use torch.optim.AdamW, and embeddings without sparse=True"
        )
    if isinstance(optimizer, optim.LBFGS):
        return OptimizerKind.TOGETHER
    if type(optimizer) in _WHOLES:
        return OptimizerKind.WHOLES
    return OptimizerKind.TOGETHER if find_tie(optimizer) is not None else OptimizerKind.WHOLES
