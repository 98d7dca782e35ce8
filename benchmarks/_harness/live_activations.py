"""How much autograd keeps from forward to backward at a time, in any order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from _harness.engine import Engine, build_engine
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = ["peak_activation_bytes"]


def peak_activation_bytes(engines: Sequence[Engine]) -> dict[str, int]:
    """Returns this rank's most bytes kept during a step of each engine that can be built; slow, never timed.

    Tensors that outlive the step, such as weights and batches, don't count, and shared memory counts once.
    Collective: every rank must call it with the same engines.
    """
    peaks = {}
    for engine in engines:
        step, _ = build_engine(engine)
        if step is not None:
            peaks[engine.name] = _peak(lambda step=step: step(0))
    return peaks


def _peak(run: Callable[[], object]) -> int:
    run()  # what is built on first use is there
    lasting = _Kept(lasting=frozenset())
    lasting.watch(run)
    kept = _Kept(lasting=lasting.alive())
    kept.watch(run)
    return kept.peak


class _Kept:
    """The memory of tensors that autograd has saved, as long as it is there.

    Args:
        lasting: Memory not to count.
    """

    def __init__(self, lasting: frozenset[int]) -> None:
        self.peak = 0
        self._lasting = lasting
        self._sizes: dict[StorageWeakRef, int] = {}

    def watch(self, run: Callable[[], object]) -> None:
        with saved_tensors_hooks(self._note, lambda kept: kept):
            run()

    def alive(self) -> frozenset[int]:
        return frozenset(reference.cdata for reference in self._sizes if not reference.expired())

    def _note(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        # A reference keeps its number from being taken by other memory: equal numbers are the same memory.
        reference = StorageWeakRef(storage)
        if reference.cdata not in self._lasting:
            self._sizes = {one: size for one, size in self._sizes.items() if not one.expired()}
            self._sizes[reference] = storage.nbytes()
            self.peak = max(self.peak, sum(self._sizes.values()))
        return tensor.detach()  # of an output, the tensor itself would be a cycle
