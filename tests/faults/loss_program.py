"""A small training program as a user writes it, in which a fault strikes, and the end that such a program has."""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import random
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import booster
from booster.comm import Fault, inject_faults
from booster.device import device_type
from booster.interface import Plugin
from booster.moe import FFNExperts, MoeModule
from booster.plugins import GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin

# Longest waits, in seconds. In training they are short, as every case in which a rank hangs waits for them; to meet and
# to boost is what takes long on a busy machine.
TRAINING_SECONDS, SETUP_SECONDS, CHECKPOINT_SECONDS = 4.0, 8.0, 4.0
# On an accelerator the backend ends the process after this time, and heartbeats name the lost rank before.
DEVICE_TRAINING_SECONDS = 12.0

PLUGINS: dict[str, Callable[[], Plugin]] = {
    "torch_ddp": TorchDDPPlugin,
    "low_level_zero": lambda: LowLevelZeroPlugin(stage=2, precision="fp32"),
    "gemini": lambda: GeminiPlugin(precision="fp32"),
    "torch_fsdp": TorchFSDPPlugin,
    "hybrid_parallel": lambda: HybridParallelPlugin(tp_size=2, precision="fp32", plan={"0": "colwise", "2": "rowwise"}),
}
EXPERT_PARALLEL = "expert_parallel"  # whose model has experts


def make_plugin(name: str) -> Plugin:
    """Returns a plugin of `PLUGINS`, or the one whose ranks share experts."""
    if name == EXPERT_PARALLEL:
        return HybridParallelPlugin(ep_size=2, zero_stage=1, precision="fp32")
    return PLUGINS[name]()


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One program with one fault.

    Attributes:
        plugin: Name of the plugin, see `make_plugin`.
        world_size: Number of ranks.
        fault: What happens.
    """

    plugin: str
    world_size: int
    fault: Fault

    def __str__(self) -> str:
        return f"{self.fault}, {self.plugin} on {self.world_size} ranks"

    @classmethod
    def random(cls, seed: int) -> Case:
        """Returns the case of a seed: any rank, at any communication or phase of the program, also far into it."""
        generator = random.Random(seed)
        plugin = generator.choice(list(PLUGINS))
        world_size = 2 if plugin == "hybrid_parallel" else generator.choice([2, 3])
        fault = Fault(
            rank=generator.randrange(world_size),
            at=generator.choice(["all_gather", "all_reduce", "broadcast", "reduce_scatter", "step", "commit"]),
            call=generator.randint(1, 12),
            action=generator.choice(["kill", "throw", "leave"]),
        )
        return cls(plugin=plugin, world_size=world_size, fault=fault)

    def to_json(self) -> dict[str, Any]:
        """Returns the case as JSON can hold it."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Case:
        """Returns what `to_json` wrote."""
        return cls(**{**fields, "fault": Fault(**fields["fault"])})


def make_model(plugin: str = "") -> tuple[nn.Module, torch.optim.Optimizer]:
    """Returns the model of a plugin's cases and its optimizer, the same on all ranks."""
    torch.manual_seed(0)
    middle = nn.Tanh() if plugin != EXPERT_PARALLEL else MoeModule(8, 4, expert_instance=FFNExperts(4, 8, 8))
    model = nn.Sequential(nn.Linear(6, 8), middle, nn.Linear(8, 4))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(case: Case, rank: int, port: int | None, directory: Path) -> None:
    """Boosts, trains and saves two steps, loads the second, and trains a third.

    The ranks meet at the port, or where the launcher says (None).

    The file `marks-<rank>` in the directory gets a line with the time as each part begins.
    """
    marks = open(directory / f"marks-{rank}", "a", buffering=1)  # noqa: SIM115 - until the program ends

    def mark(part: str) -> None:
        marks.write(f"{time.monotonic()} {part}\n")

    mark("launch")
    limits = {
        "verbose": False,
        "timeout_seconds": TRAINING_SECONDS if device_type() == "cpu" else DEVICE_TRAINING_SECONDS,
        "setup_timeout_seconds": SETUP_SECONDS,
        "checkpoint_timeout_seconds": CHECKPOINT_SECONDS,
    }
    if port is None:
        booster.launch_from_torch(**limits)
    else:
        booster.launch(rank, case.world_size, "127.0.0.1", port, **limits)
    mark("plugin")
    strategy = booster.Booster(plugin=make_plugin(case.plugin))
    model, optimizer = make_model(case.plugin)

    def step(number: int) -> None:
        mark(f"forward {number}")
        x = torch.full((2, 6), 0.1 * number + strategy.plugin.dp_rank, device=strategy.device)
        loss = model(x).square().mean()
        mark(f"backward {number}")
        strategy.backward(loss, optimizer)
        mark(f"clip {number}")
        strategy.clip_grad_norm_(optimizer, 1.0)
        mark(f"step {number}")
        optimizer.step()
        optimizer.zero_grad()

    with inject_faults(case.fault):
        mark("boost")
        model, optimizer, *_ = strategy.boost(model, optimizer)
        for number in (1, 2):
            step(number)
            mark(f"save {number}")
            strategy.save(directory / "checkpoint", model, optimizer, extra={"step": number})
        mark("load")
        strategy.load(directory / "checkpoint", model, optimizer)
        step(3)
    booster.DistCoordinator().block_all()
    mark("end")


def run_rank(case: Case, rank: int, port: int, directory: str) -> None:
    """Runs the program in this process, and ends it as the interpreter ends a program. Never returns.

    Its output is in the directory's file `output-<rank>`, its last error in `error-<rank>`.
    """
    become_a_program(Path(directory) / f"output-{rank}")
    code = 0
    try:
        train(case, rank, port, Path(directory))
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException as error:
        (Path(directory) / f"error-{rank}").write_text(json.dumps([type(error).__name__, str(error)]))
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    # As after a script's last line: threads are joined, what is registered runs, modules and C++ objects are destroyed.
    ctypes.pythonapi.Py_Exit(code)


def become_a_program(output: Path) -> None:
    """Makes this process one that a user has started, whose output goes to a file."""
    os.setsid()  # whatever it starts is found by its session
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for number in (1, 2):
        os.dup2(file, number)
    os.close(file)
    faulthandler.enable()  # a test that is tired of waiting sends SIGABRT, and finds the stacks in the output
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "OFF"  # as for users
    dist.set_debug_level_from_env()
    torch.set_num_threads(1)
