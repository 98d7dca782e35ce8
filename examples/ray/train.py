"""Trains the demo by Ray Train: Ray starts the workers and makes their process group, which the launch takes over.

Run: python examples/ray/train.py --workers 2 --steps 160
     python examples/ray/train.py --workers 2 --steps 160 --resume
"""

from __future__ import annotations

import argparse
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import ray.train
from ray.train.torch import TorchConfig, TorchTrainer

DEMO = Path(__file__).resolve().parents[1] / "demo"


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("-p", "--plugin", default="torch_ddp", help="name of a plugin")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpus", action="store_true", help="one for each worker")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--stop-after", type=int, default=None, help="save a checkpoint after this step and end")
    parser.add_argument("--output", type=Path, default=Path("runs/ray"), help="on a disk that all workers see")
    parser.add_argument("-r", "--resume", action="store_true", help="continue from there")
    return parser.parse_args(arguments)


def train_on_worker(config: dict[str, Any]) -> None:
    """Runs the demo's script on this worker, as `booster run` does, and reports its last step to Ray."""
    sys.path.insert(0, str(DEMO))
    sys.argv = [str(DEMO / "train.py"), *config["arguments"]]
    runpy.run_path(sys.argv[0], run_name="__main__")
    ray.train.report(last_step(config["log"]))


def last_step(log: str) -> dict[str, Any]:
    record = json.loads(Path(log).read_text().splitlines()[-1])
    return {"step": record["step"], "loss": record["loss"]}


def main() -> None:
    arguments = parse_arguments()
    output = arguments.output.resolve()
    log = str(output / "log.jsonl")
    given = ["--plugin", arguments.plugin, "--steps", str(arguments.steps), "--output", str(output)]
    given += [] if arguments.stop_after is None else ["--stop-after", str(arguments.stop_after)]
    trainer = TorchTrainer(
        train_on_worker,
        train_loop_config={
            "arguments": [*given, *(["--resume"] if arguments.resume else [])],
            "log": log,
        },
        torch_config=TorchConfig(backend="nccl" if arguments.gpus else "gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=arguments.workers, use_gpu=arguments.gpus),
        run_config=ray.train.RunConfig(storage_path=str(output / "ray")),
    )
    trainer.fit()
    last = last_step(log)
    print(f"step {last['step']}: loss {last['loss']:.3f}")


if __name__ == "__main__":
    main()
