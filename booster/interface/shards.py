"""What an optimizer that is not elementwise has to know when each rank updates parts of parameters only.

An elementwise optimizer computes every element of a parameter from that element, its gradient and its state alone, so
it can't tell a part of a parameter from a whole one. LAMB, LARS and Adafactor can: they need norms or means over whole
parameters. `ShardAware` is how such an optimizer says that it puts these together from the parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn

from booster.comm import all_reduce_sum, collective_device, group_size
from booster.errors import ConfigError
from booster.interface.parameter_layout import Box, ParameterLayout, _overlaps, is_cut, layout_of
from booster.interface.tensor_slice import TensorSlice

__all__ = ["Block", "SeesWholeSteps", "Shard", "ShardAware", "Shards"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """Elements of a shard that are a block of the parameter as the user made it.

    Attributes:
        view: The elements, in the block's shape; with as many dimensions as the parameter.
        box: Per dimension of the parameter the offset and the length of the block.
        is_counted: True on exactly one of the ranks that hold the same elements.
    """

    view: torch.Tensor
    box: Box
    is_counted: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shard:
    """A part of a logical parameter that this rank's optimizer updates.

    Attributes:
        name: The user's name of the parameter.
        global_shape: The parameter's shape, as the user made it.
        span: First element and one past the last, counted in the row-major flattening of `working`; that is the whole
            parameter, unless the model itself is cut over ranks, see `layout`.
        parameter: What the optimizer's `param_groups` hold: one dimension, `span[1] - span[0]` elements.
        working: The model's whole parameter, in the format that the model computes in. It changes after the step.
        group_index: Which of `param_groups` it is in.
        has_master: `parameter` is an fp32 copy apart from the model's weights.
        is_primary: True on exactly one of the ranks that hold this span, as where shards are replicated over nodes.
    """

    name: str
    global_shape: tuple[int, ...]
    span: tuple[int, int]
    parameter: nn.Parameter = field(repr=False)
    working: nn.Parameter = field(repr=False)
    group_index: int
    has_master: bool
    is_primary: bool

    def __post_init__(self) -> None:
        # An optimizer may ask for what the user has marked parameters with, before boost() or later.
        self.parameter.__dict__ = self.working.__dict__

    @property
    def layout(self) -> ParameterLayout:
        """Which blocks of the parameter as the user made it `working` consists of."""
        return layout_of(self.working, self.global_shape)

    def counted(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Returns views of a tensor of the shard's shape: the elements that count in a sum over the whole parameter.

        All of them, but for padding and for what another rank of a tensor-parallel group counts.
        """
        return self.layout.counted(tensor, self.span) if is_cut(self.working) else [tensor]

    def blocks(self, tensor: torch.Tensor) -> list[Block]:
        """Returns views of a tensor of the shard's shape by where they lie in the parameter: a few, without padding.

        A stretch of a matrix is some of its first row, whole rows, and some of its last row. Unlike `positions()` this
        takes no memory.
        """
        layout = self.layout
        return [
            Block(view=view, box=box, is_counted=piece.is_primary)
            for piece in layout.pieces
            for view, box in _overlaps(piece, layout.local_shape, tensor, self.span)
        ]

    def positions(self) -> torch.Tensor:
        """Returns where the shard's elements lie in the row-major flattening of the parameter as the user made it.

        Returns:
            int64, of one dimension; -1 for padding.
        """
        return self.layout.positions(self.span)

    def slices(self, name: str, tensor: torch.Tensor) -> list[TensorSlice]:
        """Returns a tensor with one value per element of the shard as slices of the logical tensor `name`."""
        return self.layout.slices(name, tensor, span=self.span, primary=self.is_primary)


class Shards:
    """All shards of this rank, and sums over the ranks that share the parameters.

    A rank may hold no shard of a parameter, one, or several.

    Args:
        parts: This rank's shards.
        names: The names of all sharded parameters, of all param groups in turn; the same on all ranks.
        group: The ranks that hold the parameters between them; None: the world.
        shapes: The shape of every name's parameter; None: those of `parts` alone are known.
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
        self._group = group
        self._by_parameter = {id(part.parameter): part for part in parts}

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the parameters between them; None: the world."""
        return self._group

    def of(self, parameter: torch.Tensor) -> Shard | None:
        """Returns the shard that an entry of `param_groups` is; None for a parameter that is whole."""
        return self._by_parameter.get(id(parameter))

    def sum_over_ranks(
        self, values: Mapping[str, torch.Tensor], lengths: int | Mapping[str, int] = 1
    ) -> dict[str, torch.Tensor]:
        """Returns for every name the sum of what the ranks give for it, as fp32 vectors, equal on all ranks.

        Args:
            values: By parameter name a tensor of this rank: the contribution of all of its shards of that parameter. A
                name that is left out counts as zeros.
            lengths: How many numbers there are for every name, or for each. A rank without shards can't see it from its
                values, so every rank says it.

        Collective: every rank of the group must call it with the same lengths. One all-reduce of all vectors together.

        Raises:
            ConfigError: A value is of no sharded parameter, or has another number of elements than `lengths` says.
        """
        sizes = [lengths if isinstance(lengths, int) else lengths[name] for name in self.names]
        self._check(values, sizes)
        device = self._home()
        rows = [
            values[name].detach().reshape(-1).to(device, torch.float32)
            if name in values
            else torch.zeros(size, dtype=torch.float32, device=device)
            for name, size in zip(self.names, sizes, strict=True)
        ]
        if not rows:
            return {}
        total = torch.cat(rows)
        if group_size(self._group) > 1:
            total = all_reduce_sum(total.to(collective_device(self._group)), self._group).to(device)
        return dict(zip(self.names, total.split(sizes), strict=True))

    def _home(self) -> torch.device:
        return self.parts[0].parameter.device if self.parts else collective_device(self._group)

    def _check(self, values: Mapping[str, torch.Tensor], sizes: Sequence[int]) -> None:
        foreign = sorted(values.keys() - set(self.names))
        if foreign:
            raise ConfigError(
                f"sum_over_ranks() got a value for {foreign[0]!r}, which is no sharded parameter: give values by"
                " Shard.name, and keep parameters for which Shards.of() returns None to yourself"
            )
        for name, size in zip(self.names, sizes, strict=True):
            if name in values and values[name].numel() != size:
                raise ConfigError(
                    f"sum_over_ranks() got {values[name].numel()} numbers for {name!r} where {size} are summed: pass"
                    " lengths=, the same on all ranks, as a rank without shards can't tell how many there are"
                )


@runtime_checkable
class ShardAware(Protocol):
    """An optimizer that is not elementwise, and runs on shards all the same.

    Without `use_shards` it is an ordinary `torch.optim.Optimizer` on whole parameters. After it, `param_groups` hold
    one-dimensional shards (and, whole, parameters that don't train), and what it used to compute over a whole parameter
    it puts together from all shards of the parameter:

    - LAMB (You et al., 2020, Algorithm 2) computes its update per element as Adam does, then sums the squares of the
      weights and of the update over each of its shards (over `shard.counted(...)` of them: a tensor-parallel rank may
      hold padding and copies), adds those of one name, calls
      `shards.sum_over_ranks(squares, lengths=2)` once, and scales every shard by the ratio of the two roots.
    - LARS (You et al., 2017, section 5) does the same with weights and gradients before it applies momentum.
    - Adafactor (Shazeer and Stern, 2018, Algorithm 4) sums the squared gradient of a matrix by rows and by columns:
      `shard.blocks(gradient)` says of which, and `lengths={name: rows + columns}` comes from `shards.shapes`. Its
      clipping by the root mean square of the update takes a second call with `lengths=1`.

    What `step()` has to keep to:

    - Every rank calls `sum_over_ranks` equally often and with the same lengths, also a rank that has no shard, or none
      with a gradient. Whether a parameter has a gradient (`shard.parameter.grad`) is the same on all ranks.
    - A state tensor of the shard's own shape holds one value per element, and is stored and re-cut with the elements.
      Every other state must be equal on all ranks that hold shards of the parameter. It has two dimensions at least
      (or none, or is no tensor), as in one it might be as long as a shard.
    - A plugin may call it several times for one step, every time with the gradients of some parameters; all shards of
      a parameter are in the same call. What has to see all gradients at once is `SeesWholeSteps` besides.
    - State belongs to the shard in `param_groups`; `Shard.working` is not to be changed.

    An optimizer that is elementwise, but draws random numbers or can't be tried out on small tensors, says so by a
    `use_shards` that does nothing.
    """

    def use_shards(self, shards: Shards) -> None:
        """Takes over which parts of which parameters `param_groups` hold from now on.

        Called once when the groups were re-pointed to shards, after state of earlier steps was cut; and again with new
        `Shards` when the groups changed. Not collective, so it must not communicate.
        """
        ...


@runtime_checkable
class SeesWholeSteps(Protocol):
    """A `ShardAware` optimizer that looks at all gradients together, as for a norm over all of them."""

    def whole_step(self) -> AbstractContextManager[None]:
        """Returns a context in which all calls of `step()` are parts of one step.

        It is entered when all gradients are where they belong. In each call some of them are shown, and the parameters
        of the others have none. Not collective.
        """
        ...
