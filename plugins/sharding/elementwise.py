"""Check of whether an optimizer can update shards of parameters."""

from __future__ import annotations

from torch import optim

from booster.errors import ConfigError
from booster.interface import ShardAware
from booster.optim import CPUAdam, FusedAdam, HybridAdam

from .elementwise_check import find_obstacle

_OUR_OWN = frozenset({CPUAdam, FusedAdam, HybridAdam})
# torch's optimizers with elementwise formulas; tests compare them on shards and on full parameters.
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
    """Check that the optimizer can update shards of parameters; see `sharding_obstacle`.

    Args:
        optimizer: The user's optimizer, before its parameters are sharded.

    Raises:
        ConfigError: It can't; the message gives the observed difference.
    """
    obstacle = sharding_obstacle(optimizer)
    if obstacle is not None:
        raise ConfigError(
            f"{type(optimizer).__name__} can't update shards of parameters: {obstacle}. Use an optimizer that updates"
            " every element by itself, such as torch.optim.AdamW, or the torch_ddp plugin; or give the class a method"
            " use_shards(), see booster.interface.ShardAware (an empty one declares that it is elementwise after all)"
        )


def sharding_obstacle(optimizer: optim.Optimizer) -> str | None:
    """Return the reason why an optimizer can't update shards of parameters, or None if it can.

    It can if it is one of torch's or our elementwise classes or `ShardAware`, or if copies of it gave equal results on
    shards and on full parameters in a trial on small tensors. The optimizer itself is not stepped or changed.

    Args:
        optimizer: The user's optimizer, before its parameters are sharded.

    Raises:
        ConfigError: It has `differentiable=True`, which no sharded training can do.
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
    """Return whether an optimizer is known to step with param groups that are empty on this rank."""
    return isinstance(optimizer, ShardAware) or type(optimizer) in _ELEMENTWISE | _OUR_OWN
