"""A run that `booster run --max-restarts` starts anew after every kill, and the same run unbroken.

booster run --nproc-per-node 2 --max-restarts 2 restart_cases.py ROOT "zero 2" '[[{"rank": 1, "at": "commit"}], []]'
"""

from __future__ import annotations

import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from resume_cases import Job, fsdp_plugin, gemini_plugin, hybrid_plugin, staged_plugin, zero_plugin

import booster
from booster.comm import group_rank
from booster.fault_tolerance.fault_injection import Fault, inject_faults
from booster.plugins import TorchDDPPlugin

NUM_STEPS = 8
SAVE_EVERY = 2
TIMEOUT_SECONDS = 30

PLUGINS = {
    "ddp": TorchDDPPlugin,
    "zero 1": functools.partial(zero_plugin, 1),
    "zero 2": functools.partial(zero_plugin, 2),
    "gemini": gemini_plugin,
    "gemini on the host": functools.partial(gemini_plugin, placement_policy="cpu"),
    "fsdp": fsdp_plugin,
    "tensor parallel": hybrid_plugin,
    "pipeline": staged_plugin,
}


def train(root: Path, plugin: str) -> dict[str, Any]:
    """Continues from the last save, if anything was, to the end; returns losses and tensors of this rank."""
    job = Job("fp32", PLUGINS[plugin](), accumulation=2)
    extra = job.booster.load(root / "latest", *job.parts, missing_ok=True)
    job.losses = [] if extra is None else extra["losses"]
    with (root.parent / f"starts-{group_rank()}").open("a") as starts:
        print(len(job.losses), file=starts)
    while len(job.losses) < NUM_STEPS:
        job.train(1)
        if len(job.losses) % SAVE_EVERY == 0:
            job.save(root, step=len(job.losses), keep_last=2, use_async=len(job.losses) == NUM_STEPS)
    job.booster.wait_for_checkpoints()
    return {"losses": job.losses, "tensors": job.tensors(), "scheduler": job.scheduler.state_dict()}


def main(root: str, plugin: str, faults: str) -> None:
    """Is one rank of one attempt, with the faults of that attempt."""
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    torch.set_num_threads(1)
    booster.launch_from_torch(
        verbose=False,
        timeout_seconds=TIMEOUT_SECONDS,
        setup_timeout_seconds=TIMEOUT_SECONDS,
        checkpoint_timeout_seconds=TIMEOUT_SECONDS,
    )
    with inject_faults(*(Fault.kill(**fault) for fault in json.loads(faults)[attempt])):
        result = train(Path(root), plugin)
    torch.save(result, Path(root).parent / f"result-{group_rank()}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
