"""Synchronization of persistent buffers that several pipeline stages hold.

Note [Shared buffers]
Modules without parameters outside of the units are on every stage, as are the buffers of modules that contain units,
because every stage runs the model's own forward. Their actual values are computed on one stage, in a *live* run (see
Note [Chunk forward]): before the units on the stage of the first chunk, after them on that of the last. Other stages
run the same code on placeholders, or do not reach it. So after each batch the stage that changed a buffer in a live run
broadcasts it. Only persistent buffers take part, as only they are model state. A buffer that several stages change
differently has no value that one process would have, and raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from booster.comm import all_gather_equal, broadcast
from booster.errors import ConfigError
from booster.kernels.checksum import crc32
from booster.plugins.hybrid_parallel.pipeline_parallel.stages.pieces import StagePartition

__all__ = ["PersistentBuffer", "SharedBuffers", "persistent_buffers"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PersistentBuffer:
    """A persistent buffer of the full model.

    Attributes:
        names: All names, in model order.
        modules: Module that holds it under each name.
        stages: Stages that hold it, ascending.
        is_replicated: Whether all stages run the code that uses it; False if only one stage runs such a module.
    """

    names: tuple[str, ...]
    modules: tuple[nn.Module, ...]
    stages: tuple[int, ...]
    is_replicated: bool

    @property
    def tensor(self) -> torch.Tensor:
        """Current tensor, on a stage that holds it."""
        keys = [name.rpartition(".")[2] for name in self.names]
        found = (module._buffers.get(key) for module, key in zip(self.modules, keys, strict=True))
        return next(tensor for tensor in found if tensor is not None)


def persistent_buffers(model: nn.Module, division: StagePartition) -> list[PersistentBuffer]:
    """Return the persistent buffers of a full model, tied ones once."""
    of_module = division.module_stages(model)
    places: dict[int, list[tuple[str, nn.Module]]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                places.setdefault(id(buffer), []).append((f"{prefix}.{key}" if prefix else key, module))
    return [
        PersistentBuffer(
            names=tuple(name for name, _ in found),
            modules=tuple(module for _, module in found),
            stages=tuple(sorted({stage for _, module in found for stage in of_module[id(module)]})),
            is_replicated=all(len(division.stages_of(name.rpartition(".")[0])) > 1 for name, _ in found),
        )
        for found in places.values()
    ]


class SharedBuffers:
    """Persistent buffers on several stages; see Note [Shared buffers].

    Args:
        buffers: All persistent buffers of the model, equal on all stages.
        stage: Index of this stage.
    """

    def __init__(self, buffers: Sequence[PersistentBuffer], stage: int) -> None:
        self._shared = [one for one in buffers if len(one.stages) > 1]
        self._held = [one for one in self._shared if stage in one.stages]
        self._changed: set[PersistentBuffer] = set()
        self._at_start: list[torch.Tensor] | None = None
        self._live_from: list[torch.Tensor] = []

    def begin_chunk(self, *, is_first: bool, is_live: bool) -> None:
        """Start a chunk forward.

        Args:
            is_first: If True, it is the stage's first chunk in the model.
            is_live: If True, the run is live from the start.
        """
        self._live_from = self._copies() if is_live else []
        # The stage's first chunk has run the same code before the units already.
        self._at_start = None if is_live or is_first else self._copies()

    @torch.no_grad()
    def begin_live(self) -> None:
        """Start the live part of a chunk forward, and undo earlier changes of buffers."""
        for one, before in zip(self._held, self._at_start or (), strict=False):
            if _differ(one.tensor, before):
                one.tensor.copy_(before)
        self._live_from = self._copies()

    def end_chunk(self) -> None:
        """End a chunk forward, and record changed buffers."""
        for one, before in zip(self._held, self._live_from, strict=False):
            if _differ(one.tensor, before):
                self._changed.add(one)

    def synchronize(self, group: dist.ProcessGroup | None) -> None:
        """Broadcast the buffers that a stage changed since the last call. Collective over the stages.

        Raises:
            ConfigError: Several stages changed a buffer differently, or layers of several stages change a tied one.
        """
        if not self._shared:
            return
        changed, self._changed = self._changed, set()
        own = [
            [int(one in changed), crc32(_bytes(one.tensor).cpu().numpy().data) if one in changed else 0]
            for one in self._shared
        ]
        of_stages = all_gather_equal(torch.tensor([own]), group).tolist()
        for index, one in enumerate(self._shared):
            found = {stage: row[index][1] for stage, row in enumerate(of_stages) if row[index][0]}
            if not found:
                continue
            if len(set(found.values())) > 1 or not one.is_replicated:
                raise _conflict_error(one, list(found))
            broadcast([one.tensor], group, source=min(found))

    def _copies(self) -> list[torch.Tensor]:
        return [one.tensor.detach().clone() for one in self._held]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors differ bitwise, so that a nan equals itself."""
    return one.shape != other.shape or one.dtype != other.dtype or not torch.equal(_bytes(one), _bytes(other))


def _conflict_error(buffer: PersistentBuffer, changers: Sequence[int]) -> ConfigError:
    return ConfigError(
        f"the persistent buffer {' = '.join(map(repr, buffer.names))} is on the pipeline stages"
        f" {', '.join(map(str, buffer.stages))} and was changed in a forward by {', '.join(map(str, changers))}: every"
        " stage would continue with another value, and none with that of one process. Give every module a separate"
        " buffer, or register it with persistent=False if it is not part of the model's state, or use pp_size=1"
    )
