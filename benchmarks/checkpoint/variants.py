"""All variants to save a training state that benchmarks/checkpoint/run.py compares: a list, and ours."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from checkpoint.peers import (
    Actions,
    build_async_dcp,
    build_buffer_copy,
    build_dcp,
    build_raw,
    build_safetensors,
    build_save_pretrained,
    build_torch_save,
)
from checkpoint.state import TrainingState

__all__ = ["ASYNC_BASELINE", "BASELINE", "CONTROL", "DCP", "OURS", "OURS_ASYNC", "SAFETENSORS", "WAYS", "Variant"]

OURS = "booster.save"
OURS_ASYNC = "booster.save(use_async=True)"
BASELINE = "raw O_DIRECT, fsync"
CONTROL = f"{BASELINE} (control)"
SAFETENSORS = "safetensors.save_file, fsync"
DCP = "torch.distributed.checkpoint"
ASYNC_BASELINE = "copy into persistent buffers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One variant to save and load.

    Attributes:
        name: How tables and files call it.
        build: Prepares it on this rank; all ranks call it together.
        is_peer: Another library's, neither ours nor a limit.
        requires: A package that a peer needs; a run without it is a good run.
        is_async: What counts is how long the training waits, not when the data is durable.
    """

    name: str
    build: Callable[[TrainingState], Actions]
    is_peer: bool = False
    requires: str | None = None
    is_async: bool = False

    @property
    def is_installed(self) -> bool:
        """False where a peer's package is missing."""
        return self.requires is None or importlib.util.find_spec(self.requires) is not None


def _build_ours(state: TrainingState, *, verify: str | None = None) -> Actions:
    """booster.save, which always makes checksums, and booster.load, which compares them unless `verify` says less."""
    booster, options = state.booster, {} if verify is None else {"verify": verify}
    both = {"model": state.model, "optimizer": state.optimizer}

    def load(directory: Path) -> None:
        booster.load(directory / "checkpoint", **both, **options)

    return Actions(
        save=lambda directory: booster.save(directory / "checkpoint", **both),
        load=load,
        warm_load=load,
        num_bytes=state.num_bytes,
    )


def _build_async_ours(state: TrainingState) -> Actions:
    booster = state.booster
    return Actions(
        save=lambda directory: booster.save(
            directory / "checkpoint", model=state.model, optimizer=state.optimizer, use_async=True
        ),
        settle=booster.wait_for_checkpoints,
        num_bytes=state.num_bytes,
    )


WAYS = (
    Variant(name=BASELINE, build=partial(build_raw, is_direct=True)),
    Variant(name=CONTROL, build=partial(build_raw, is_direct=True)),
    Variant(name=OURS, build=_build_ours),
    Variant(name="booster.save, verify='structure'", build=partial(_build_ours, verify="structure")),
    Variant(name="raw pwrite, fsync", build=partial(build_raw, is_direct=False)),
    Variant(name=SAFETENSORS, build=build_safetensors, is_peer=True),
    Variant(name="torch.save, fsync", build=build_torch_save, is_peer=True),
    Variant(name=DCP, build=build_dcp, is_peer=True),
    Variant(
        name="save_pretrained, fsync (model only)", build=build_save_pretrained, is_peer=True, requires="transformers"
    ),
    Variant(name=ASYNC_BASELINE, build=build_buffer_copy, is_async=True),
    Variant(name=OURS_ASYNC, build=_build_async_ours, is_async=True),
    Variant(name="DCP async_save", build=partial(build_async_dcp, reuses_staging=False), is_peer=True, is_async=True),
    Variant(
        name="DCP async_save, kept staging",
        build=partial(build_async_dcp, reuses_staging=True),
        is_peer=True,
        is_async=True,
    ),
)
