"""Schedule of activation checkpointing: which layers keep their activations, and from where others are recomputed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from booster.errors import ConfigError
from booster.pytree import iter_tensors

from .activation_chain import Items, restricted
from .activation_offload import ActivationOffload
from .activation_policy import LAYER_NAME, ActivationPolicy
from .activation_segments import SegmentForward, chained_argument, first_tensor

ScheduleItem: TypeAlias = "str | tuple[ScheduleItem, ...]"

_MAX_NODES = 100  # of a graph that are searched, when a segment is broken
_EXAMPLE = "'layers.0', ['layers.1'], ['layers.2', 'layers.3']"


@dataclass(frozen=True, slots=True)
class ActivationSchedule:
    """What each layer of a model keeps for backward; see `checkpoint_activations`.

    Attributes:
        items: Layers in the order of forward. A name is a layer that keeps its activations. A tuple is a segment of
            layers of which only the first one's input is kept; its recomputation follows the items inside of it.
    """

    items: tuple[ScheduleItem, ...]

    @classmethod
    def from_json(cls, value: Any) -> ActivationSchedule:
        """Return the schedule of nested lists of names, as `to_json` returns them.

        Raises:
            ConfigError: The value is something else, or a layer is in it twice.
        """
        if isinstance(value, ActivationSchedule):
            return value
        schedule = cls(_parse(value, value))
        twice = [name for name, count in Counter(schedule.names).items() if count > 1]
        if twice:
            raise ConfigError(f"the activation schedule has {twice[0]!r} twice: name each layer once")
        return schedule

    @classmethod
    def of_chain(cls, items: Items, names: Sequence[str]) -> ActivationSchedule:
        """Return the schedule of a chain's stages of these names."""
        return cls(_mapped(items, names.__getitem__, tuple))

    def to_json(self) -> list[Any]:
        """Return nested lists of names."""
        return _mapped(self.items, str, list)  # type: ignore[no-any-return]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all layers, in order."""
        return names_of(self.items)

    @property
    def recomputed(self) -> frozenset[str]:
        """Names of the layers that are recomputed."""
        return frozenset(name for item in self.items if not isinstance(item, str) for name in names_of(item))

    @property
    def has_segments(self) -> bool:
        """Whether a segment has several layers."""
        return any(len(names_of(item)) > 1 for item in self.items if not isinstance(item, str))

    @property
    def num_recomputations(self) -> int:
        """Number of forwards of layers that backward repeats."""

        def repeated(items: tuple[ScheduleItem, ...]) -> int:
            return sum(len(names_of(item)) + repeated(item) for item in items if not isinstance(item, str))

        return repeated(self.items)

    def __str__(self) -> str:
        """Return what is recomputed, such as "recomputes 12 of 32 layers"."""
        recomputed, again = len(self.recomputed), self.num_recomputations
        text = f"recomputes {recomputed} of {len(self.names)} layers"
        if self.has_segments:
            segments = [item for item in self.items if not isinstance(item, str)]
            text += f" in {len(segments)} segment(s)"
        return text if again == recomputed else f"{text}, {again} forwards in all"


def names_of(items: ScheduleItem) -> tuple[str, ...]:
    """Return the names in an item, in order."""
    return (items,) if isinstance(items, str) else tuple(name for item in items for name in names_of(item))


@dataclass(slots=True)
class _Place:
    """Place of a layer in its segment of several layers."""

    names: tuple[str, ...]
    index: int
    items: Items


@dataclass(slots=True)
class _Open:
    """Segment whose forward is not over: the next layer's place, and the output that it must take."""

    forward: SegmentForward
    names: tuple[str, ...]
    next_index: int
    output: torch.Tensor | None


class ScheduledLayers:
    """Runs layers by a schedule. Layers of no item keep their activations.

    Args:
        schedule: The schedule.
        recompute: Function that runs a layer alone and keeps its inputs.
        offload: Offload of the inputs of segments, optional.
        is_strict: If True, a layer that does not take the output of the one before it in its segment is an error.
            Otherwise a segment begins with it.
    """

    def __init__(
        self,
        schedule: ActivationSchedule,
        recompute: Callable[..., Any],
        offload: ActivationOffload | None,
        *,
        is_strict: bool,
    ) -> None:
        self.schedule = schedule
        self._recompute, self._offload, self._is_strict = recompute, offload, is_strict
        self._single: set[str] = set()
        self._places: dict[str, _Place] = {}
        self._open: _Open | None = None
        for item in schedule.items:
            if isinstance(item, str):
                continue
            names = names_of(item)
            if len(names) == 1:
                self._single.add(names[0])
            indices = _mapped(item, names.index, tuple)
            self._places |= {name: _Place(names, index, indices) for index, name in enumerate(names)}

    def run(self, name: str, forward: Callable[..., Any], args: Sequence[Any]) -> Any:
        if name in self._single:
            return self._recompute(forward, *args)
        place = self._places.get(name)
        if place is None:
            return forward(*args)
        opened, self._open = self._open, None
        chained = None
        if opened is not None and opened.names == place.names and opened.next_index == place.index:
            chained = chained_argument(args, opened.output)
        if chained is None:
            self._check_begins(place, args, opened)
            items = restricted(place.items, place.index, len(place.names))
            opened = _Open(SegmentForward(items, self._offload), place.names, 0, None)
        assert opened is not None
        output = opened.forward.run(forward, args, chained)
        if place.index + 1 < len(place.names):
            opened.next_index, opened.output = place.index + 1, first_tensor(output)
            self._open = opened
        return output

    def _check_begins(self, place: _Place, args: Sequence[Any], opened: _Open | None) -> None:
        """Raise `ConfigError` if a layer's input was computed from the output of the layer before it in its segment.

        Otherwise a part of a pipeline's model begins with the layer.
        """
        is_next = opened is not None and opened.names == place.names and opened.next_index == place.index
        if not self._is_strict or opened is None or not is_next or not _is_computed_from(args, opened.output):
            return
        before, name = place.names[place.index - 1], place.names[place.index]
        raise ConfigError(
            f"the activation schedule recomputes {name!r} from an earlier layer, but no argument of {name!r} is the"
            f" output of {before!r}, unchanged: give it a segment of its own, [{name!r}]"
        )


def _is_computed_from(args: Sequence[Any], output: torch.Tensor | None) -> bool:
    """Return whether one of the first nodes of the arguments' graphs is that of an output."""
    if output is None or output.grad_fn is None:
        return False
    nodes = [one.grad_fn for one in iter_tensors(list(args)) if one.grad_fn is not None]
    for node in nodes:  # grows
        if node is output.grad_fn:
            return True
        if len(nodes) < _MAX_NODES:
            nodes += [one for one, _ in node.next_functions if one is not None and one not in nodes]
    return False


class RecomputeBySchedule(ActivationPolicy):
    """Layers are kept and recomputed by a schedule.

    Args:
        schedule: The schedule.
        offload: Offload of the inputs of segments, optional.
    """

    def __init__(self, schedule: ActivationSchedule, offload: ActivationOffload | None = None) -> None:
        super().__init__(offload)
        self.schedule = schedule
        self.fingerprint += f" {schedule.to_json()}"
        self._layers = ScheduledLayers(schedule, self.recompute, offload, is_strict=True)

    def prepare(self, plugin: str, *, gathers_layers: bool) -> None:
        """Raise `ConfigError` if a plugin can't run a segment of several layers."""
        if gathers_layers and self.schedule.has_segments:
            names = next(names_of(one) for one in self.schedule.items if len(names_of(one)) > 1)
            raise ConfigError(
                f"the activation schedule has the segment {list(names)}, but {plugin} has the weights of one layer at a"
                f" time: give each layer a segment of its own, such as {[[name] for name in names[:2]]}"
            )

    def run(self, layer: nn.Module, forward: Callable[..., Any], *args: Any) -> Any:
        return self._layers.run(layer.__dict__[LAYER_NAME], forward, args)


def _mapped(items: Sequence[Any], function: Callable[[Any], Any], kind: type) -> Any:
    """Return nested sequences of a kind, with a function of each name or index of `items`."""
    return kind(_mapped(one, function, kind) if isinstance(one, (tuple, list)) else function(one) for one in items)


def _parse(value: Any, given: Any) -> tuple[ScheduleItem, ...]:
    if not isinstance(value, (list, tuple)) or not value:
        raise ConfigError(
            f"the activation schedule {str(given)[:80]} is not a list of names and of non-empty lists of them: write,"
            f" for example, [{_EXAMPLE}], where the first layer is kept and the others are recomputed"
        )
    return tuple(item if isinstance(item, str) else _parse(item, given) for item in value)
