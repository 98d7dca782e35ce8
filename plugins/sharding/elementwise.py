"""Which optimizers may run on parts of parameters."""

from __future__ import annotations

from torch import optim

from booster.errors import ConfigError
from booster.interface import ShardAware
from booster.optim import CPUAdam, FusedAdam, HybridAdam

from .elementwise_check import find_obstacle

_OUR_OWN = frozenset({CPUAdam, FusedAdam, HybridAdam})
# torch's own, whose formulas were read and that tests compare on parts and on wholes.
_ELEMENTWISE = frozenset(
    {
        optim.ASGD,
        optim.Adadelta,
        optim.Adagrad,
        optim.Adam,
        optim.AdamW,
        optim.Adamax,
        optim.NAdam,
        optim.RAdam,
        optim.RMSprop,
        optim.Rprop,
        optim.SGD,
    }
)
_REFUSED = {
    optim.Adafactor: "it needs means over the rows and columns of whole matrices",
    optim.LBFGS: "it needs dot products over all parameters",
    optim.Muon: "it makes the update of a whole matrix orthogonal",
    optim.SparseAdam: "it takes sparse gradients, which are not summed over the ranks here",
}


def require_elementwise(optimizer: optim.Optimizer) -> None:
    """Return if the optimizer may update parts of parameters in place of whole ones; see `obstacle_to_parts`.

    Args:
        optimizer: The user's optimizer, before its parameters are cut.

    Raises:
        ConfigError: It may not; the message says what was seen.
    """
    obstacle = obstacle_to_parts(optimizer)
    if obstacle is not None:
        raise ConfigError(
            f"{type(optimizer).__name__} can't update parts of parameters: {obstacle}. Use an optimizer that updates"
            " every element by itself, such as torch.optim.AdamW, or the torch_ddp plugin; or give the class a method"
            " use_shards(), see booster.interface.ShardAware (an empty one declares that it is elementwise after all)"
        )


def obstacle_to_parts(optimizer: optim.Optimizer) -> str | None:
    """Return what keeps an optimizer from updating parts of parameters in place of whole ones; None: it may.

    It may if it is one of torch's or our elementwise classes, if it is `ShardAware`, or if it did the same on parts as
    on wholes when copies of it were tried out on small tensors. The optimizer itself and the process's state stay as
    they are; it is not stepped.

    Args:
        optimizer: The user's optimizer, before its parameters are cut.

    Raises:
        ConfigError: Its steps are to be differentiated, which no sharded training can do.
    """
    if isinstance(optimizer, ShardAware):
        return None
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ConfigError(
            "differentiable=True asks for gradients through the step, and the weights that it makes are copied between"
            " ranks: make the optimizer without it"
        )
    if type(optimizer) in _ELEMENTWISE or type(optimizer) in _OUR_OWN:
        return None
    obstacle = next((why for cls, why in _REFUSED.items() if isinstance(optimizer, cls)), None)
    return find_obstacle(optimizer) if obstacle is None else obstacle


def takes_empty_groups(optimizer: optim.Optimizer) -> bool:
    """Return whether an optimizer is known to step where a rank holds nothing of a group."""
    return isinstance(optimizer, ShardAware) or type(optimizer) in _ELEMENTWISE | _OUR_OWN
