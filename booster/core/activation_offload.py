"""Offload of activations to host memory, and prefetch ahead of their use in backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch

from booster.comm import is_fake_world
from booster.comm.fake import offloaded_memory

_MIN_BYTES = 1024  # a smaller tensor costs more to copy than to keep


Packed = Callable[[], torch.Tensor]
"""A tensor saved for backward, as a function that returns it."""


def keep(tensor: torch.Tensor, held: object = None) -> Packed:
    """Save a tensor that stays on its device; reading it raises `RuntimeError` if it was modified in place.

    torch checks versions of saved tensors only without hooks.

    Args:
        tensor: The tensor.
        held: Object to reference as long as the tensor is saved, optional.
    """
    # Detached, as an operator's output would otherwise keep its own graph alive.
    return partial(_unchanged, tensor.detach(), tensor._version, held)


def _unchanged(tensor: torch.Tensor, version: int, held: object) -> torch.Tensor:
    _check_version(tensor, version)
    return tensor


def _check_version(tensor: torch.Tensor, version: int) -> None:
    if tensor._version != version:
        raise RuntimeError(
            f"a {tensor.dtype} tensor of shape {tuple(tensor.shape)}, which backward needs as it was in forward, has"
            " been modified by an in-place operation: use an operation that is not in place"
        )


def _by_others(unpack: Callable[[Any], torch.Tensor], packed: Any, held: object) -> torch.Tensor:
    return unpack(packed)


@contextmanager
def packing(pack: Callable[[torch.Tensor], Packed | None], held: object = None) -> Iterator[None]:
    """Save tensors for backward in the block by a function; those that it returns None for are saved as outside of it.

    Unlike torch's hooks, of which only the innermost ones are called: around these may be those of activation
    checkpointing, or of a plugin that gathers weights for backward.

    Args:
        pack: Function of each tensor.
        held: Object to reference as long as the tensors left to others are saved, optional.
    """
    outer = torch._C._autograd._top_saved_tensors_default_hooks(False)

    def pack_hook(tensor: torch.Tensor) -> Packed:
        packed = pack(tensor)
        if packed is not None:
            return packed
        return keep(tensor, held) if outer is None else partial(_by_others, outer[1], outer[0](tensor), held)

    with torch.autograd.graph.saved_tensors_hooks(pack_hook, lambda packed: packed()):
        yield


class ActivationOffload:
    """Moves activations to pinned host memory after their use in forward, and back ahead of their use in backward.

    Both directions have a stream of their own. Backward needs activations in the reverse order of forward: reading one
    starts the copy of the one before, which travels during the recomputation of the layer in between. On the CPU
    activations are in host memory already, and nothing is copied. Copies of a model share it.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, tuple[torch.Stream, torch.Stream]] = {}
        self._last: weakref.ref[_OnHost] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> ActivationOffload:
        return self

    def of_inputs(self, inputs: Sequence[Any]) -> AbstractContextManager[None]:
        """Offload, in the block, those inputs of a layer that need a gradient, when they are saved for backward.

        Others stay: masks and position embeddings are the same tensors for all layers.
        """
        tensors = [one for one in inputs if isinstance(one, torch.Tensor) and one.requires_grad]
        storages = {one.untyped_storage()._cdata for one in tensors}
        return packing(lambda one: self.pack(one) if one.untyped_storage()._cdata in storages else None)

    def pack(self, tensor: torch.Tensor) -> Packed | None:
        """Start the copy of a tensor to the host; None if it stays on its device."""
        is_on_host = tensor.device.type == "cpu" and not is_fake_world()
        if is_on_host or tensor.nbytes < _MIN_BYTES:
            return None
        if is_fake_world():
            with offloaded_memory():  # counts as the host's
                return partial(torch.empty_like, torch.empty_like(tensor.detach()))
        before = None if self._last is None else self._last()
        device = tensor.device
        if device not in self._streams:
            self._streams[device] = (torch.Stream(device=device), torch.Stream(device=device))
        offloaded = _OnHost(tensor, self._streams[device], before)
        self._last = weakref.ref(offloaded)
        return offloaded


class _OnHost:
    """An activation in host memory.

    Args:
        tensor: The activation on its device.
        streams: Streams of the copies to the host and back.
        before: Activation that was offloaded before it, or None.
    """

    def __init__(
        self, tensor: torch.Tensor, streams: tuple[torch.Stream, torch.Stream], before: _OnHost | None
    ) -> None:
        self._device = tensor.device
        to_host, self._to_device = streams
        self._before = None if before is None else weakref.ref(before)
        self._fetched: torch.Tensor | None = None
        self._source, self._version = weakref.ref(tensor), tensor._version
        source = tensor.detach()
        self._host = torch.empty_like(source, device="cpu", pin_memory=True)
        to_host.wait_stream(torch.accelerator.current_stream(self._device))
        with to_host:
            self._host.copy_(source, non_blocking=True)
        self._is_on_host = to_host.record_event()
        source.record_stream(to_host)  # type: ignore[arg-type]

    def start_fetch(self) -> None:
        """Start the copy to the device, unless it has been started."""
        if self._fetched is not None:
            return
        self._to_device.wait_event(self._is_on_host)
        with self._to_device:
            self._fetched = torch.empty_like(self._host, device=self._device)
            self._fetched.copy_(self._host, non_blocking=True)
        self._is_on_device = self._to_device.record_event()

    def __call__(self) -> torch.Tensor:
        """Return the activation on its device, and start the copy of the one before.

        Raises:
            RuntimeError: It was modified in place, perhaps before it was copied.
        """
        source = self._source()
        if source is not None:
            _check_version(source, self._version)
        self.start_fetch()
        current = torch.accelerator.current_stream(self._device)
        current.wait_event(self._is_on_device)
        fetched, self._fetched = self._fetched, None  # a second backward over the graph fetches it again
        assert fetched is not None
        fetched.record_stream(current)  # type: ignore[arg-type]
        before = None if self._before is None else self._before()
        if before is not None:
            before.start_fetch()
        return fetched
