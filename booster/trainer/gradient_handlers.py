"""Gradient handlers: classes that read or change the gradients between backward and step."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist

from booster.booster import Booster
from booster.comm import all_reduce_sum, group_size
from booster.errors import ConfigError
from booster.interface import ModelWrapper, OptimizerWrapper

from .hook import ends_all_ranks

# Note [Gradient handlers]
# A handler is a gradient hook of the optimizer: it runs once per step, after the plugin has reduced and unscaled the
# gradients and before they are clipped, so that the norm is that of what it leaves. The gradients are shards where the
# plugin shards them. A handler that itself reduces over the data-parallel ranks would average means once more, or add
# up shards of different parameters. So it says so by `reduces`, and the plugin either leaves its own reduction out
# (`Plugin.leave_reduction`) or refuses.


class GradientHandler(ABC):
    """Base of gradient handlers.

    Args:
        booster: Booster of the model.
        model: Boosted model.
        optimizer: Boosted optimizer of the model.

    Attributes:
        reduces: Axis of the plugin's mesh over which `handle_gradient` itself reduces the gradients, "dp" or an axis of
            the plugin's author; None for a handler that takes the reduced gradients as they are.
    """

    reduces: ClassVar[str | None] = None

    def __init__(self, booster: Booster, model: ModelWrapper, optimizer: OptimizerWrapper) -> None:
        self.booster, self.model, self.optimizer = booster, model, optimizer

    @abstractmethod
    def handle_gradient(self) -> None:
        """Read or change this rank's gradients in place. Called on every rank, once per step that is not skipped."""

    def named_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield this rank's gradients with the user's names: unscaled, and shards where the plugin shards them."""
        return self.optimizer.named_gradients()

    def group(self, axis: str = "dp") -> dist.ProcessGroup | None:
        """Return the process group of this rank along an axis of the plugin's mesh; None for the world.

        Args:
            axis: "dp" for the ranks that read different data, or a name of `booster.plugin.axis_sizes()`.

        Raises:
            ConfigError: The plugin has no such axis.
        """
        plugin = self.booster.plugin
        if axis == "dp":
            return plugin.data_group
        mesh = plugin.mesh
        names = () if mesh is None else mesh.mesh_dim_names or ()
        if mesh is None or axis not in names:
            raise ConfigError(
                f"{type(self).__name__}.group({axis!r}): {type(plugin).__name__} has no such axis: choose one of"
                f" {', '.join(dict.fromkeys(('dp', *names)))}"
            )
        group: dist.ProcessGroup = mesh.get_group(axis)
        return group


Handler = TypeVar("Handler", bound=type[GradientHandler])

_registered: dict[str, type[GradientHandler]] = {}


def register_gradient_handler(cls: Handler) -> Handler:
    """Register a class of gradient handlers under its name, for configurations that give the name. A decorator.

    Raises:
        ConfigError: It is not a subclass of `GradientHandler` with `handle_gradient`, or another class has its name.

    Examples:
        >>> from booster import GradientHandler, register_gradient_handler
        >>> @register_gradient_handler
        ... class Halve(GradientHandler):
        ...     def handle_gradient(self):
        ...         for _, gradient in self.named_gradients():
        ...             gradient.mul_(0.5)
    """
    _check_class(cls)
    before = _registered.get(cls.__name__)
    if before is not None and (before.__module__, before.__qualname__) != (cls.__module__, cls.__qualname__):
        raise ConfigError(
            f"a gradient handler named {cls.__name__} is registered already, of {before.__module__}: name this class"
            " otherwise"
        )
    _registered[cls.__name__] = cls  # a cell of a notebook that runs again replaces its class
    return cls


def _check_class(cls: Any) -> None:
    if not (isinstance(cls, type) and issubclass(cls, GradientHandler)):
        raise ConfigError(
            f"{getattr(cls, '__name__', cls)!r} is not a gradient handler: derive a class from booster.GradientHandler"
            " that defines handle_gradient(self)"
        )
    if getattr(cls, "__abstractmethods__", None):
        raise ConfigError(f"the gradient handler {cls.__name__} lacks handle_gradient(self): define it")


@register_gradient_handler
class DataParallelGradientHandler(GradientHandler):
    """Averages the gradients over the data-parallel ranks, in place of `TorchDDPPlugin`.

    All gradients of a dtype are in one message, which no computation hides.
    """

    reduces = "dp"

    def handle_gradient(self) -> None:
        group = self.group("dp")
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for _, gradient in self.named_gradients():
            by_dtype.setdefault(gradient.dtype, []).append(gradient)
        for gradients in by_dtype.values() if group_size(group) > 1 else ():
            flat = all_reduce_sum(torch.cat([one.reshape(-1) for one in gradients]), group) / group_size(group)
            parts = flat.split([one.numel() for one in gradients])
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part.view_as(gradient))


Given = str | Mapping[str, Any] | type[GradientHandler]
"""A handler: its registered name, its class, or a mapping `dict(type=name, ...)` with arguments of its constructor."""


def resolve_gradient_handlers(given: Sequence[Given]) -> list[tuple[type[GradientHandler], dict[str, Any]]]:
    """Return the classes and their arguments; raise `ConfigError` for an entry that is unknown or not `Given`."""
    if isinstance(given, (str, Mapping, type)) or not isinstance(given, Iterable):
        raise ConfigError(f"gradient_handlers={given!r} is a single handler: pass a list, as in [{given!r}]")
    return [_resolve(one) for one in given]


def _resolve(one: Any) -> tuple[type[GradientHandler], dict[str, Any]]:
    arguments = dict(one) if isinstance(one, Mapping) else {"type": one}
    found = arguments.pop("type", None)
    if isinstance(found, str):
        if found not in _registered:
            raise ConfigError(
                f"the gradient handler {found!r} is unknown: decorate its class with @register_gradient_handler, or"
                f" choose one of {', '.join(sorted(_registered))}"
            )
        found = _registered[found]
    _check_class(found)
    try:
        inspect.signature(found).bind(None, None, None, **arguments)
    except TypeError as error:
        raise ConfigError(
            f"the gradient handler {found.__name__} does not take the arguments {arguments!r} ({error}): pass those"
            " of its constructor, without booster, model and optimizer"
        ) from error
    return found, arguments


def attach_gradient_handlers(
    booster: Booster, model: ModelWrapper, optimizer: OptimizerWrapper, given: Sequence[Given]
) -> list[GradientHandler]:
    """Attach handlers to a boosted optimizer, which calls them in every step, in this order. No communication.

    Args:
        booster: Booster of the model.
        model: Boosted model.
        optimizer: Boosted optimizer of the model.
        given: Handlers: registered names, classes, or mappings such as dict(type="MyHandler", scale=2).

    Raises:
        ConfigError: A handler is unknown, or reduces over an axis over which the plugin must reduce itself.
    """
    resolved = resolve_gradient_handlers(given)
    handlers = [cls(booster, model, optimizer, **arguments) for cls, arguments in resolved]
    axes = [one.reduces for one in handlers if one.reduces is not None]
    for axis in dict.fromkeys(axes):
        if axes.count(axis) > 1:
            names = ", ".join(type(one).__name__ for one in handlers if one.reduces == axis)
            raise ConfigError(f"{names} all reduce the gradients over {axis!r}, which is done once: leave one of them")
        reducer = next(type(one).__name__ for one in handlers if one.reduces == axis)
        booster.plugin.leave_reduction(model, axis, reducer)

    def handle(_: Sequence[torch.Tensor]) -> None:
        if optimizer.accumulation.found_nonfinite:
            return  # the step is skipped on all ranks
        for handler in handlers:
            with ends_all_ranks(f"the gradient handler {type(handler).__name__}"), torch.no_grad():
                handler.handle_gradient()

    if handlers:
        optimizer.register_gradient_hook(handle)
    return handlers
