"""What autograd saves for backward: of weights only which ones they are, so that they can go and be gathered again."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Any, Protocol

import torch

from booster.plugins.gemini.chunk import Chunk, ChunkParam
from booster.plugins.sharding.compiling import not_compiled

__all__ = ["SavedTensors", "WeightSource"]

_Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]

# Note [Saved weights]
# Most operators save the weights that they multiplied with, or a view of them, for their backward. While the model's
# forward runs, autograd asks `pack` what to keep instead. Of a tensor in a chunk's payload it keeps the chunk, the
# parameter, and the view's shape; `unpack` has the chunk gathered when the operator's backward asks for it, exactly
# then. That needs no hook of any module, so it makes no difference which module used the weights, through what view,
# and how its outputs look. Every other tensor is kept as it is. torch compares versions of saved tensors only where
# nobody packs them, so that is done here as well: a tensor that was written over before backward is an error.
# Others pack, too: activation checkpointing, which saves nothing in forward and fills a list in backward, or a user who
# moves what is saved elsewhere. They are handed all other tensors, and never weights: what they keep of those would
# stay gathered. As checkpointing counts tensors in forward and again in backward, both must hide the same ones; so
# wherever a module begins, these hooks come first.


class WeightSource(Protocol):
    """Who knows the chunks."""

    def chunk_at(self, address: int) -> Chunk | None:
        """Returns the chunk whose payload begins at an address in memory."""
        ...

    def gather_for_backward(self, slot: ChunkParam) -> torch.Tensor:
        """Returns the payload with the weights of a parameter."""
        ...

    def note_saved(self, address: int, num_bytes: int) -> None:
        """Takes note of memory that autograd keeps."""
        ...

    def note_released(self, address: int, num_bytes: int) -> None:
        """Takes note that autograd lets go of it once."""
        ...


class _SavedWeight:
    """A view of a parameter's weights."""

    __slots__ = ("_offset", "_param", "_size", "_source", "_stride", "_version")

    def __init__(self, source: WeightSource, slot: ChunkParam, tensor: torch.Tensor, offset: int) -> None:
        self._source = source
        self._param = slot
        self._version = slot.chunk.version
        self._size, self._stride, self._offset = tensor.size(), tensor.stride(), offset
        slot.num_saved += 1

    def __del__(self) -> None:
        self._param.num_saved -= 1

    def unpack(self) -> torch.Tensor:
        """Returns the weights, gathered if they are not here."""
        if self._param.chunk.version != self._version:
            raise RuntimeError(
                f"backward needs {self._param.name!r} as it was in the forward, and the weights have been changed since,"
                " by optimizer.step() or by loading a checkpoint: call backward() before that"
            )
        payload = self._source.gather_for_backward(self._param)
        return payload.as_strided(self._size, self._stride, self._offset)


class _SavedOther:
    """Any other tensor."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()  # not itself: an operator's output would keep its own graph alive
        self._version = tensor._version

    def unpack(self) -> torch.Tensor:
        """Returns it."""
        if self._tensor._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a"
                f" {self._tensor.dtype} tensor of shape {tuple(self._tensor.shape)} is at version"
                f" {self._tensor._version}; expected version {self._version} instead"
            )
        return self._tensor


class _CountedOther(_SavedOther):
    """Any other tensor, whose memory is taken note of."""

    __slots__ = ("_memory", "_source")

    def __init__(self, tensor: torch.Tensor, source: WeightSource, storage: torch.UntypedStorage) -> None:
        super().__init__(tensor)
        self._source = source
        self._memory = storage.data_ptr(), storage.nbytes()
        source.note_saved(*self._memory)

    def __del__(self) -> None:
        self._source.note_released(*self._memory)


class SavedTensors:
    """Packs and unpacks while a model's modules run; see Note [Saved weights].

    Args:
        source: Who knows the chunks.
    """

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        # One object each, to be known again by. torch.compile must not look into them: it would compile them, too.
        self._pack_hook = not_compiled(self._pack)
        self._unpack_hook = not_compiled(self._unpack)
        self._outer: list[_Hooks | None] = []
        self.counts = False

    def begin(self) -> bool:
        """Begins to pack, before all other hooks, where a graph is made; returns whether `end` has to be called.

        Nothing has to be begun where these hooks come first already, and nothing can be where torch forbids hooks.
        """
        if not torch.is_grad_enabled() or not _may_pack():
            return False
        first: _Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if first is not None and first[0] is self._pack_hook:
            return False
        self._outer.append(first)
        torch._C._autograd._push_saved_tensors_default_hooks(self._pack_hook, self._unpack_hook)
        return True

    def end(self) -> None:
        """Ends what `begin` began last."""
        torch._C._autograd._pop_saved_tensors_default_hooks()
        self._outer.pop()

    def _pack(self, tensor: torch.Tensor) -> Any:
        storage = tensor.untyped_storage()
        chunk = self._source.chunk_at(storage.data_ptr())
        if chunk is not None:
            offset = int(tensor.storage_offset())
            slot = _param_at(chunk, offset * tensor.itemsize // chunk.layout.dtype.itemsize)
            if slot is not None:
                return _SavedWeight(self._source, slot, tensor, offset)
        outer = self._outer[-1]
        if outer is not None:
            return outer[1], outer[0](tensor)
        if self.counts:
            return _CountedOther(tensor, self._source, storage)
        return _SavedOther(tensor)

    @staticmethod
    def _unpack(saved: Any) -> torch.Tensor:
        if isinstance(saved, tuple):
            unpack, packed = saved
            tensor: torch.Tensor = unpack(packed)
        else:
            tensor = saved.unpack()
        return tensor


def _may_pack() -> bool:
    """Whether torch lets hooks be, which torch.func's transforms do not."""
    return bool(torch._C._autograd._saved_tensors_hooks_is_enabled())  # type: ignore[attr-defined]


def _param_at(chunk: Chunk, element: int) -> ChunkParam | None:
    """Returns the parameter in whose place an element lies."""
    index = bisect_right(chunk.starts, element) - 1
    while index >= 0:  # parameters without elements begin where another one does
        slot = chunk.params[index]
        if slot.region.start <= element < slot.region.stop:
            return slot
        if slot.region.stop > slot.region.start:
            return None
        index -= 1
    return None
