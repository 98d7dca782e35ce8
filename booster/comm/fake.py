"""Fake process group: one rank of a world without the others and without communication, for memory estimates."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import DebugLevel, get_debug_level, set_debug_level

from booster.errors import ConfigError

# Note [Fake process group]
# The memory of a rank can be measured by running its program on fake tensors. Data of other ranks has no values either,
# so nothing has to be sent: collectives of CPU tensors return at once and leave their outputs unchanged, and
# consistency checks pass, as all ranks equal this one. Calls and bytes are counted as usual. Without a launch
# `fake_world` makes a world of any size, with torch's fake backend; after a launch its groups are used.
_is_fake = False


def is_fake_world() -> bool:
    """Return whether collectives are fake now; see Note [Fake process group]."""
    return _is_fake


@contextmanager
def fake_collectives() -> Iterator[None]:
    """Run collectives of this process in the block without communication."""
    global _is_fake
    before, _is_fake = _is_fake, True
    try:
        yield
    finally:
        _is_fake = before


@contextmanager
def fake_world(num_ranks: int) -> Iterator[None]:
    """Make this process rank 0 of a fake world of `num_ranks` ranks in the block.

    Raises:
        ConfigError: A process group exists already.
    """
    if dist.is_initialized():
        raise ConfigError(
            f"a world of {num_ranks} ranks cannot be faked after a launch of {dist.get_world_size()} ranks: ask about a"
            " plugin object that was made in it, or ask before the launch"
        )
    # Registers torch's backend "fake".
    from torch.testing._internal.distributed.fake_pg import FakeStore

    hook = sys.excepthook  # torch replaces it
    level = get_debug_level()
    set_debug_level(DebugLevel.OFF)  # TORCH_DISTRIBUTED_DEBUG=DETAIL would wait for real ranks in the store
    try:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
        with fake_collectives():
            yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        set_debug_level(level)
        sys.excepthook = hook


class FakeSharedMemory:
    """Shared memory whose collectives leave their outputs unchanged."""

    def _do_nothing(self, *arguments: Any, **options: Any) -> None:
        pass

    all_gather = all_reduce = all_to_all = broadcast = reduce_scatter = abort = _do_nothing
