"""A training loop over the user's own iterators, of which some ranks' end before others', and what follows the loop."""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from faults.loss_program import PLUGINS, become_a_program, make_model

import booster
from booster.comm import use_shared_memory

TRAINING_SECONDS, SETUP_SECONDS, CHECKPOINT_SECONDS = 3.0, 6.0, 3.0  # the longest waits


@dataclass(frozen=True, slots=True, kw_only=True)
class UnevenCase:
    """One program.

    Attributes:
        plugin: Name of the plugin, see `PLUGINS`.
        lengths: Number of batches of each rank.
        after: What the program does behind its loop, see `AFTER_THE_LOOP`.
        shares_memory: Ranks of a host talk through shared memory; else by gloo.
        joins: The loop goes through `join_uneven`.
    """

    plugin: str
    lengths: tuple[int, ...]
    after: str
    shares_memory: bool = True
    joins: bool = False

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.lengths)

    @property
    def short_ranks(self) -> list[int]:
        """The ranks whose batches end first."""
        return [rank for rank, length in enumerate(self.lengths) if length == min(self.lengths)]

    def __str__(self) -> str:
        way = "" if self.shares_memory else ", gloo"
        return f"{self.plugin} {'-'.join(map(str, self.lengths))} {self.after}{way}{', joined' * self.joins}"


def _save(strategy: booster.Booster, model: Any, optimizer: Any, directory: Path) -> None:
    strategy.save(directory / "checkpoint", model, optimizer)


def _gather(strategy: booster.Booster, model: Any, optimizer: Any, directory: Path) -> None:
    strategy.gather_for_metrics(torch.ones(2))


def _wait(strategy: booster.Booster, model: Any, optimizer: Any, directory: Path) -> None:
    strategy.wait_for_everyone()


def _boost(strategy: booster.Booster, model: Any, optimizer: Any, directory: Path) -> None:
    strategy.boost(*make_model())


AFTER_THE_LOOP: dict[str, Callable[[booster.Booster, Any, Any, Path], None]] = {
    "end": lambda strategy, model, optimizer, directory: None,
    "save": _save,
    "gather": _gather,
    "wait": _wait,
    "boost": _boost,
}


def train(case: UnevenCase, rank: int, port: int, directory: Path) -> None:
    """Trains on this rank's batches; the file `loop-ended-<rank>` says when it had no more."""
    booster.launch(
        rank,
        case.world_size,
        "127.0.0.1",
        port,
        verbose=False,
        timeout_seconds=TRAINING_SECONDS,
        setup_timeout_seconds=SETUP_SECONDS,
        checkpoint_timeout_seconds=CHECKPOINT_SECONDS,
    )
    strategy = booster.Booster(plugin=PLUGINS[case.plugin]())
    model, optimizer = make_model()
    model, optimizer, *_ = strategy.boost(model, optimizer)
    batches = [torch.full((2, 6), 0.1 * number + strategy.plugin.dp_rank) for number in range(case.lengths[rank])]
    num_steps = 0
    for batch in strategy.join_uneven(batches) if case.joins else batches:
        strategy.backward(model(batch).square().mean(), optimizer)
        strategy.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        num_steps += 1
    (directory / f"loop-ended-{rank}").write_text(f"{time.monotonic()} {num_steps}")
    AFTER_THE_LOOP[case.after](strategy, model, optimizer, directory)


def run_rank(case: UnevenCase, rank: int, port: int, directory: str) -> None:
    """Runs the program in this process, and ends it as the interpreter ends a program. Never returns.

    Its output is in the directory's file `output-<rank>`, its last error in `error-<rank>`.
    """
    become_a_program(Path(directory) / f"output-{rank}")
    use_shared_memory(case.shares_memory)
    code = 0
    try:
        train(case, rank, port, Path(directory))
    except Exception as error:
        (Path(directory) / f"error-{rank}").write_text(json.dumps([type(error).__name__, str(error)]))
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    ctypes.pythonapi.Py_Exit(code)  # threads are joined, and what is registered runs, as after a script's last line
