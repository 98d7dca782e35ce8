"""Placements of parameters, by which a plain model becomes tensor parallel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from booster.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement

_PLACEMENT = "_booster_placement"  # attribute of a parameter

_Parameter = TypeVar("_Parameter", bound=nn.Parameter)


def shard(parameter: _Parameter, placement: Placement) -> _Parameter:
    """Mark how tensor-parallel ranks hold a parameter; `HybridParallelPlugin` derives what its layer computes.

    Nothing is sharded before `boost`, and nothing at all by plugins without tensor parallelism. The weight of a linear
    layer with a shard of its output features makes the layer column-parallel, one with a shard of its input features
    row-parallel. An embedding is sharded by its vocabulary or by its features. `plugin.explain(model)` shows the
    result. Copies of the model are not marked.

    Args:
        parameter: Parameter of a model.
        placement: `Shard(dim)` or `Replicate()` of `torch.distributed.tensor`.

    Returns:
        The parameter.

    Raises:
        ConfigError: The placement does not fit to the parameter, or contradicts an earlier one.

    Collective: no, but all ranks must mark the same.

    Examples:
        >>> import booster
        >>> from torch.distributed.tensor import Shard
        >>> mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        >>> _ = booster.shard(mlp[0].weight, Shard(0)), booster.shard(mlp[2].weight, Shard(1))
    """
    if not isinstance(parameter, nn.Parameter):
        raise ConfigError(
            f"shard() got {type(parameter).__name__}, which is not a parameter: give one, such as model.fc1.weight"
        )
    dim = sharded_dim("shard()", tuple(parameter.shape), placement)
    known = placement_of(parameter)
    if known is not None and sharded_dim("shard()", tuple(parameter.shape), known) != dim:
        raise ConfigError(f"shard() got {placement!r} for a parameter that is {known!r} already: leave one of them out")
    setattr(parameter, _PLACEMENT, placement)
    return parameter


def placement_of(parameter: nn.Parameter) -> Placement | None:
    """Return the placement that `shard` has given a parameter, or None."""
    placement: Placement | None = getattr(parameter, _PLACEMENT, None)
    return placement


def is_placement(given: object) -> bool:
    """Whether a value is a placement of `torch.distributed.tensor`."""
    return all(callable(getattr(given, name, None)) for name in ("is_shard", "is_replicate", "is_partial"))


def sharded_dim(where: str, shape: tuple[int, ...], placement: Any) -> int | None:
    """Return the dimension that a placement shards, or None for replicated parameters.

    Args:
        where: What the placement is given to, for messages.
        shape: Shape of the parameter.
        placement: The placement.

    Raises:
        ConfigError: It is none, or none of a parameter of this shape.
    """
    if not is_placement(placement):
        raise ConfigError(
            f"{where} got {placement!r}, which is not a placement: give Shard(dim) or Replicate() of"
            " torch.distributed.tensor"
        )
    if placement.is_replicate():
        return None
    from torch.distributed.tensor import Shard  # imported by those who give a placement

    if type(placement) is not Shard:
        raise ConfigError(
            f"{where} got {placement!r}, but parameters are sharded or replicated: give Shard(dim) or Replicate()"
        )
    dim: int = placement.dim
    if not -len(shape) <= dim < len(shape):
        raise ConfigError(
            f"{where} got {placement!r} for a parameter of shape {shape}, which has the dimensions 0 to"
            f" {len(shape) - 1}: give one of them"
        )
    return dim % len(shape)
