"""Shards of parameters for optimizers: their states, and the interface of optimizers that are not elementwise.

An elementwise optimizer computes every element of a parameter from that element, its gradient and its state alone, so
it works on shards unchanged. LAMB, LARS and Adafactor need norms or means over full parameters. A `ShardAware`
optimizer computes these from the shards of all ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from booster.comm import all_reduce_sum, collective_device, group_size, is_fake_world
from booster.errors import ConfigError
from booster.pytree import copy_with_tensors

from .shard_spec import Box, ShardSpec, TensorSlice, _overlaps, is_sharded, shard_spec_of


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardBlock:
    """Elements of a shard that form a block of the user's parameter.

    Attributes:
        view: View of the elements in the block's shape, with the parameter's number of dims.
        box: Offset and length per dim of the parameter.
        is_owned: True on exactly one of the ranks that hold the same elements.
    """

    view: torch.Tensor
    box: Box
    is_owned: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shard:
    """Shard of a logical parameter that this rank's optimizer updates.

    Attributes:
        name: The user's name of the parameter.
        global_shape: Shape of the user's parameter.
        span: First element and one past the last, in the row-major flattening of `model_param`; that is the full
            parameter, unless the model itself is sharded, see `shard_spec`.
        parameter: 1-D entry of the optimizer's `param_groups`, with `span[1] - span[0]` elements.
        model_param: The model's parameter, in the model's dtype. It changes after the step.
        group_index: Index of its param group.
        has_master: Whether `parameter` is an fp32 master weight, separate from the model's weights.
        is_primary: True on exactly one of the ranks that hold this span, if shards are replicated.
    """

    name: str
    global_shape: tuple[int, ...]
    span: tuple[int, int]
    parameter: nn.Parameter = field(repr=False)
    model_param: nn.Parameter = field(repr=False)
    group_index: int
    has_master: bool
    is_primary: bool

    def __post_init__(self) -> None:
        # An optimizer may read attributes that the user sets on parameters, before boost() or later.
        self.parameter.__dict__ = self.model_param.__dict__

    @property
    def shard_spec(self) -> ShardSpec:
        """Layout of `model_param` in the user's parameter."""
        return shard_spec_of(self.model_param, self.global_shape)

    def owned(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return views of the elements of a tensor of the shard's shape that count in a sum over the full parameter.

        That is all elements but padding and those that another rank of a tensor-parallel group counts.
        """
        return self.shard_spec.owned(tensor, self.span) if is_sharded(self.model_param) else [tensor]

    def blocks(self, tensor: torch.Tensor) -> list[ShardBlock]:
        """Return views of a tensor of the shard's shape with their positions in the parameter, without padding.

        A flat range of a matrix is some of its first row, complete rows, and some of its last row. Unlike `positions()`
        this takes no memory.
        """
        layout = self.shard_spec
        return [
            ShardBlock(view=view, box=box, is_owned=region.is_primary and layout.is_counted)
            for region in layout.regions
            for view, box in _overlaps(region, layout.local_shape, tensor, self.span)
        ]

    def positions(self) -> torch.Tensor:
        """Return the indices of the shard's elements in the row-major flattening of the user's parameter.

        Returns:
            1-D int64 tensor; -1 for padding.
        """
        return self.shard_spec.positions(self.span)

    def slices(self, name: str, tensor: torch.Tensor) -> list[TensorSlice]:
        """Return a tensor with one value per element of the shard as slices of the logical tensor `name`."""
        return self.shard_spec.slices(name, tensor, span=self.span, primary=self.is_primary)


class Shards:
    """All shards of this rank, and sums over the ranks of the sharding group.

    A rank may hold no shard of a parameter, one, or several.

    Args:
        parts: This rank's shards.
        names: Names of all sharded parameters, in order of param groups, equal on all ranks.
        group: Sharding group, None for the world.
        shapes: Shapes of the parameters by name; optional, defaults to those of `parts`.

    All arguments are attributes.
    """

    def __init__(
        self,
        parts: Sequence[Shard],
        names: Sequence[str],
        group: dist.ProcessGroup | None,
        *,
        shapes: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        self.parts: Sequence[Shard] = tuple(parts)
        self.names: Sequence[str] = tuple(names)
        known = {part.name: part.global_shape for part in parts} if shapes is None else shapes
        self.shapes: Mapping[str, tuple[int, ...]] = {name: tuple(shape) for name, shape in known.items()}
        self.group = group
        self._by_parameter = {id(part.parameter): part for part in parts}

    def shard_of(self, parameter: torch.Tensor) -> Shard | None:
        """Return the shard of an entry of `param_groups`, or None for an unsharded parameter."""
        return self._by_parameter.get(id(parameter))

    def sum_over_ranks(
        self, values: Mapping[str, torch.Tensor], lengths: int | Mapping[str, int] = 1
    ) -> dict[str, torch.Tensor]:
        """Return the sums of the ranks' values by name, as fp32 vectors, equal on all ranks.

        Args:
            values: Tensors by parameter name: the contribution of all of this rank's shards of that parameter. Missing
                names count as zeros.
            lengths: Number of elements for every name, or for each. Every rank passes it, as a rank without shards does
                not know it from its values.

        Collective: every rank of the group must call it with the same lengths. One all-reduce of all vectors.

        Raises:
            ConfigError: A name is not a sharded parameter, or a value has another number of elements than `lengths`.
        """
        sizes = [lengths if isinstance(lengths, int) else lengths[name] for name in self.names]
        self._check(values, sizes)
        device = self.parts[0].parameter.device if self.parts else collective_device(self.group)
        rows = [
            values[name].detach().reshape(-1).to(device, torch.float32)
            if name in values
            else torch.zeros(size, dtype=torch.float32, device=device)
            for name, size in zip(self.names, sizes, strict=True)
        ]
        if not rows:
            return {}
        total = torch.cat(rows)
        if group_size(self.group) > 1:
            total = all_reduce_sum(total.to(collective_device(self.group)), self.group).to(device)
        return dict(zip(self.names, total.split(sizes), strict=True))

    def _check(self, values: Mapping[str, torch.Tensor], sizes: Sequence[int]) -> None:
        foreign = sorted(values.keys() - set(self.names))
        if foreign:
            raise ConfigError(
                f"sum_over_ranks() got a value for {foreign[0]!r}, which is not a sharded parameter: pass values by"
                " Shard.name, without parameters for which shard_of() returns None"
            )
        for name, size in zip(self.names, sizes, strict=True):
            if name in values and values[name].numel() != size:
                raise ConfigError(
                    f"sum_over_ranks() got {values[name].numel()} numbers for {name!r} where {size} are summed: pass"
                    " lengths=, equal on all ranks, as a rank without shards has no values"
                )


@runtime_checkable
class ShardAware(Protocol):
    """Optimizer that is not elementwise and supports shards.

    Without `use_shards` it is an ordinary `torch.optim.Optimizer` on full parameters. After it, `param_groups` hold 1-D
    shards (and, unsharded, parameters that don't train), and the optimizer computes reductions over a full parameter
    from all of its shards:

    - LAMB (You et al., 2020, Algorithm 2) computes its update per element as Adam does, then sums the squares of the
      weights and of the update over each of its shards (over `shard.owned(...)` of them: a tensor-parallel rank may
      hold padding and copies), adds those of one name, calls
      `shards.sum_over_ranks(squares, lengths=2)` once, and scales every shard by the ratio of the two roots.
    - LARS (You et al., 2017, section 5) does the same with weights and gradients before it applies momentum.
    - Adafactor (Shazeer and Stern, 2018, Algorithm 4) sums the squared gradient of a matrix by rows and by columns:
      `shard.blocks(gradient)` has their indices, and `lengths={name: rows + columns}` is known from `shards.shapes`.
      Its clipping by the root mean square of the update takes a second call with `lengths=1`.

    Requirements of `step()`:

    - Every rank calls `sum_over_ranks` equally often and with the same lengths, also a rank that has no shard, or none
      with a gradient. Whether a parameter has a gradient (`shard.parameter.grad`) is equal on all ranks.
    - A state tensor of the shard's shape has one value per element, and is stored and resharded with the elements.
      Every other state must be equal on all ranks that hold shards of the parameter. It has at least two dims (or none,
      or is not a tensor): a 1-D one might have the length of a shard.
    - A plugin may call it several times per step, each time with the gradients of some parameters; all shards of a
      parameter are in the same call. An optimizer that needs all gradients at once also is a `NeedsFullStep`.
    - State belongs to the shard in `param_groups`; `Shard.model_param` must not be changed.

    An elementwise optimizer that draws random numbers, or cannot be probed on small tensors, declares itself by a
    `use_shards` that does nothing.
    """

    def use_shards(self, shards: Shards) -> None:
        """Set the shards that `param_groups` hold from now on.

        Called once when the groups have shards, after existing state was sharded, and again with new `Shards` when the
        groups change. Not collective, so it must not communicate.
        """
        ...


@runtime_checkable
class NeedsFullStep(Protocol):
    """`ShardAware` optimizer that needs all gradients at once, as for a norm over all of them."""

    def full_step(self) -> AbstractContextManager[None]:
        """Return a context in which all calls of `step()` belong to one step.

        It is entered when all gradients are set. In each call some parameters have theirs, and the others have none.
        Not collective.
        """
        ...


def full_step(optimizer: Any) -> AbstractContextManager[None]:
    """Return the `full_step()` context of an optimizer, or an empty context if it is not a `NeedsFullStep`."""
    # By attribute: `isinstance` with a protocol takes longer.
    enter: Callable[[], AbstractContextManager[None]] | None = getattr(optimizer, "full_step", None)
    if enter is None and callable(enter := getattr(optimizer, "whole_step", None)):
        message = f"{type(optimizer).__name__}.whole_step() is deprecated: rename it to full_step()"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
    return nullcontext() if enter is None else enter()


@runtime_checkable
class FusedUpdate(Protocol):
    """Optimizer with a fused step, which saves a plugin separate passes over gradients and weights."""

    def fused_step(
        self,
        *,
        grad_scale: float = 1.0,
        clip_coef: Tensor | None = None,
        model_params: Mapping[nn.Parameter, Tensor] | None = None,
        gradients: Mapping[nn.Parameter, Tensor] | None = None,
        zero_grads: bool = False,
    ) -> None:
        """Update the parameters as `step()` would with unscaled gradients; runs the same hooks.

        Args:
            grad_scale: Factor that unscales the stored gradients: 1 / loss scale, 1 / ranks and the like.
            clip_coef: Further fp32 factor with one element, which is not read on the host: a clip coefficient.
            model_params: Low-precision weights by their fp32 master weights; they are rounded from the updated
                masters.
            gradients: Gradients used in place of `parameter.grad`; may be of lower precision than the parameter.
            zero_grads: If True, set the used gradients to zero; by default they are unchanged.
        """
        ...


@runtime_checkable
class StateAllocator(Protocol):
    """Optimizer that allocates its own states; called by a checkpoint before it reads or replaces them."""

    def prepare_states(self) -> None:
        """Allocate the states of all parameters, so that failures happen before any state is replaced.

        Raises:
            ConfigError: There is not enough space.
        """
        ...

    def allocate_state(self, parameter: Tensor, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """Return the memory of a state that is about to be filled, or None for ordinary memory.

        Args:
            parameter: Parameter of `param_groups`.
            key: Name of the state.
            shape: Shape of the state.
            dtype: Dtype of the stored state.
        """
        ...

    @property
    def may_fail_locally(self) -> bool:
        """Whether a step may fail on one rank alone, as a disk access does."""
        ...

    def check_states(self) -> None:
        """Raise `CheckpointError` unless the states are complete and readable."""
        ...


# 0-dim state tensors of torch's optimizers that are not per element, even for a scalar parameter.
_SCALARS = frozenset({"step", "mu_product", "eta", "mu"})
# Factored second moments of our optimizers. They may have the shape of a tensor-parallel shard of a narrow matrix.
_FACTORED = frozenset({"exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_res_row", "exp_avg_res_col"})


def shard_state(optimizer: Optimizer, parameter: nn.Parameter, shards: Sequence[Shard]) -> None:
    """Move a parameter's optimizer state from before boost() to this rank's shards of the parameter.

    Tensors of the parameter's shape are sharded. As in torch's `load_state_dict`, floating-point tensors take the dtype
    of the shard (fp32 if it is a master). Other state is copied for each shard. The unsharded state is dropped.

    Args:
        optimizer: The user's optimizer; only its `state` is modified.
        parameter: The unsharded parameter of `param_groups`.
        shards: Shards that this rank updates; if empty, the state is dropped.
    """
    full = optimizer.state.pop(parameter, None)
    if full is None or (isinstance(full, Mapping) and not full):
        return
    for shard in shards:
        optimizer.state[shard.parameter] = _shard_of(full, parameter, shard)


def _shard_of(full: Any, parameter: nn.Parameter, shard: Shard) -> Any:
    def part(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape != parameter.shape:
            return number(tensor)
        target = shard.parameter
        dtype = target.dtype if tensor.is_floating_point() else tensor.dtype
        part = tensor.detach().reshape(-1)[slice(*shard.span)].to(target.device, dtype, copy=True)
        return part.view(target.shape)

    def number(tensor: torch.Tensor) -> torch.Tensor:
        # Factors of a matrix are where it is; a number, such as that of steps, may stay in host memory.
        follows = tensor.dim() > 0 or tensor.device == parameter.device
        device = shard.parameter.device if follows else tensor.device
        return tensor.detach().to(device, copy=True)

    if not isinstance(full, Mapping):
        return copy_with_tensors(part, full)
    return {
        key: copy_with_tensors(number if key in _SCALARS | _FACTORED else part, value) for key, value in full.items()
    }


@torch.no_grad()
def follow_weights(shard: Shard) -> None:
    """Copy changed model weights into their master shard.

    An element that still rounds to its weight keeps its full precision, so weights and masters can be loaded in any
    order.
    """
    weights = shard.model_param.detach().reshape(-1)[slice(*shard.span)]
    update_master(shard.parameter.detach(), weights)


@torch.no_grad()
def update_master(master: torch.Tensor, weights: torch.Tensor) -> None:
    """Overwrite each master element that does not round to its weight; both tensors have equal numbers of elements."""
    weights, rounded = weights.to(master.device), master.to(weights.dtype)
    # On an accelerator the host would have to wait for the answer.
    if master.device.type == "cpu" and (is_fake_world() or torch.equal(rounded, weights)):
        return
    is_same = rounded == weights
    master.copy_(torch.where(is_same, master, weights.to(master.dtype)))
