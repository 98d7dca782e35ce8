"""Which loaders are being iterated right now, so that the facade knows when a batch is the last of its pass.

An iteration is known from its first batch until it ends, is closed or is garbage collected (what `break` does to a
`for` loop's iterator). The list holds weak references only, so that knowing an iteration does not keep it alive.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from booster.data.dataloader import DistributedDataLoader
    from booster.data.sampler import BatchPlace

__all__ = [
    "Iteration",
    "active_iteration",
    "active_loader",
    "active_place",
    "enter_iteration",
    "leave_iteration",
]


class Iteration(Protocol):
    """One pass over a loader, or over other batches (None), and the place of the batch that was handed out last."""

    @property
    def loader(self) -> DistributedDataLoader[Any] | None: ...

    @property
    def place(self) -> BatchPlace: ...


# Innermost last. An iteration moves to the end with each batch, so that a second loader whose iterator is only held
# (`val_iter = iter(val_loader)`) does not hide the one that is really being read.
_live: list[weakref.ref[Iteration]] = []


def enter_iteration(iteration: Iteration) -> None:
    """Makes an iteration the innermost one."""
    if _live and _live[-1]() is iteration:
        return
    leave_iteration(iteration)
    _live.append(weakref.ref(iteration, _forget))


def leave_iteration(iteration: Iteration) -> None:
    """Takes an iteration out; harmless if it is not in."""
    _live[:] = [ref for ref in _live if ref() is not iteration]


def _forget(dead: weakref.ref[Iteration]) -> None:
    _live[:] = [ref for ref in _live if ref is not dead]


def active_iteration(loader: DistributedDataLoader[Any] | None = None) -> Iteration | None:
    """The innermost iteration that is going on, of anything or of this loader; None outside."""
    for iteration in _innermost_first():
        if loader is None or iteration.loader is loader:
            return iteration
    return None


def active_place() -> BatchPlace | None:
    """The place of the batch that was handed out last by the innermost iteration; None outside of any.

    Collective: no. Every rank sees its own iterations only.
    """
    iteration = active_iteration()
    return None if iteration is None else iteration.place


def active_loader() -> DistributedDataLoader[Any] | None:
    """The loader whose batch was handed out last and whose iteration still goes on; None outside of any.

    Collective: no. Every rank sees its own loaders only.
    """
    loaders = (iteration.loader for iteration in _innermost_first())
    return next((loader for loader in loaders if loader is not None), None)


def _innermost_first() -> list[Iteration]:
    return [iteration for ref in reversed(_live) if (iteration := ref()) is not None]
