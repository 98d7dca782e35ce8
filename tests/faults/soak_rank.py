"""What one rank does in one cycle of a soak: load, train, save, and write down all of it as it goes."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from soak_plan import GLOBAL_BATCH, Cycle, Settings
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import Dataset

import booster
from booster import Booster
from booster.errors import BoosterError
from booster.fault_tolerance.fault_injection import Fault, inject_faults
from booster.plugins import GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin

# A lost rank is noticed at once by its closed connections; these are for what is not.
TIMEOUT_SECONDS = 20.0
NUM_SAMPLES = 64  # five batches an epoch, and four samples that are dropped

_COLUMNWISE = {"a": "colwise_gather_output", "b": "colwise_gather_output", "frozen": "colwise_gather_output"}


def _zero(stage: int) -> LowLevelZeroPlugin:
    return LowLevelZeroPlugin(stage, "fp32", reduce_bucket_size_in_m=0.001)  # several buckets


def _gemini(**arguments: Any) -> GeminiPlugin:
    return GeminiPlugin(precision="fp32", chunk_config_dict={"chunk_size": 256}, max_prefetch=1, **arguments)


def _hybrid(**arguments: Any) -> HybridParallelPlugin:
    tensor = {"plan": _COLUMNWISE} if "tp_size" in arguments else {}
    stages = {"split": ["b"], "num_microbatches": 2} if "pp_size" in arguments else {}
    return HybridParallelPlugin(precision="fp32", zero_bucket_size_in_m=0.001, **tensor, **stages, **arguments)


# One for every name of `soak_plan.WORLDS`.
LAYOUTS: dict[str, Callable[[], Any]] = {
    "one device": lambda: None,
    "ddp": TorchDDPPlugin,
    "zero 1": functools.partial(_zero, 1),
    "zero 2": functools.partial(_zero, 2),
    "gemini": _gemini,
    "gemini on the host": functools.partial(_gemini, placement_policy="cpu"),
    "fsdp": functools.partial(TorchFSDPPlugin),
    "fsdp grad op": functools.partial(TorchFSDPPlugin, sharding_strategy="SHARD_GRAD_OP"),
    "fsdp hybrid": functools.partial(TorchFSDPPlugin, sharding_strategy="HYBRID_SHARD", extra_dp_size=2),
    "tensor parallel": functools.partial(_hybrid, tp_size=2),
    "tensor parallel zero 1": functools.partial(_hybrid, tp_size=2, zero_stage=1),
    "pipeline": functools.partial(_hybrid, pp_size=2),
    "pipeline zero 1": functools.partial(_hybrid, pp_size=2, zero_stage=1),
    "tensor parallel pipeline": functools.partial(_hybrid, tp_size=2, pp_size=2),
}


class Samples(Dataset):
    """Vectors whose first number is the number of the sample, for the diary."""

    def __init__(self) -> None:
        self.vectors = torch.randn(NUM_SAMPLES, 16, generator=torch.Generator().manual_seed(1))
        self.vectors[:, 0] = torch.arange(NUM_SAMPLES)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.vectors[index]


class Net(nn.Module):
    """Tied weights, a frozen layer, and dropout if asked for."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.a = nn.Linear(16, 16)
        self.drop = nn.Dropout(dropout)
        self.b = nn.Linear(16, 16, bias=False)
        self.b.weight = self.a.weight
        self.frozen = nn.Linear(16, 16).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.cat([x[:, :1] / NUM_SAMPLES, x[:, 1:]], dim=1)
        return self.frozen(self.b(self.drop(torch.relu(self.a(x)))))


def criterion(outputs: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    """Asks for more than the model can learn, so that gradients stay far above their rounding."""
    return (outputs - batch.roll(3, dims=1).sign()).square().mean()


def make_training(dropout: float) -> tuple[Net, torch.optim.AdamW, CosineAnnealingLR]:
    """Returns model, optimizer and scheduler as every run begins with them."""
    torch.manual_seed(7)
    model = Net(dropout)
    groups = [{"params": [model.a.weight], "lr": 0.02}, {"params": [model.a.bias], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    return model, optimizer, CosineAnnealingLR(optimizer, T_max=20)


class Diary:
    """What a rank did, a line of JSON each, in the file before anything follows: SIGKILL loses nothing of it."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", buffering=1)

    def write(self, event: str, **values: Any) -> None:
        """Adds a line."""
        self._file.write(json.dumps({"event": event, **values}) + "\n")


class Training:
    """The training run of one rank, from its start to its end."""

    def __init__(self, settings: Settings, cycle: Cycle, root: Path, diary: Diary) -> None:
        self.settings, self.cycle, self.root, self.diary = settings, cycle, root, diary
        self.booster = Booster(plugin=LAYOUTS[cycle.layout](), device=None if cycle.layout != "one device" else "cpu")
        model, optimizer, self.scheduler = make_training(settings.dropout)
        batch_size = GLOBAL_BATCH // self.booster.plugin.dp_size
        self.loader = self.booster.prepare_dataloader(Samples(), batch_size, shuffle=True, drop_last=True)
        self.model, self.optimizer, *_ = self.booster.boost(model, optimizer)

    @property
    def parts(self) -> tuple[Any, ...]:
        """What is saved."""
        return self.model, self.optimizer, self.scheduler, self.loader

    def load(self) -> int:
        """Returns the step to go on from, 0 where nothing was saved yet."""
        path = self.root / "latest" if self.cycle.by_pointer else self.root
        extra = self.booster.load(path, *self.parts, missing_ok=True)
        return 0 if extra is None else extra["step"]

    def run(self) -> int:
        """Loads, trains, saves; returns the last step."""
        step = start = self.load()
        self.diary.write("start", step=start)
        unsure = None
        batches = self._batches()
        stop = min(start + self.cycle.num_steps, self.settings.num_steps)
        for step in range(start + 1, stop + 1):
            self._train(step, next(batches))
            if step % self.cycle.save_every == 0 or step == stop:
                self.diary.write("saving", step=step)
                self.booster.save(
                    self.root,
                    *self.parts,
                    extra={"step": step},
                    step=step,
                    keep_last=2,
                    use_async=self.cycle.use_async,
                )
                unsure = step
                if not self.cycle.use_async:
                    self.diary.write("saved", step=step)
        self.booster.wait_for_checkpoints()
        if unsure is not None:
            self.diary.write("saved", step=unsure)
        return step

    def _batches(self) -> Iterator[torch.Tensor]:
        while True:
            yield from self.loader

    def _train(self, step: int, batch: torch.Tensor) -> None:
        booster, optimizer = self.booster, self.optimizer
        with booster.accumulate(self.model, optimizer, self.settings.accumulation) as is_last:
            loss = booster.execute_pipeline(iter([batch]), self.model, criterion, optimizer)["loss"]
            booster.clip_grad_norm_(optimizer, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if is_last:
            self.scheduler.step()
        losses = booster.gather_for_metrics(loss).double()
        samples = booster.gather_for_metrics(batch[:, 0])
        self.diary.write("step", step=step, loss=losses.mean().item(), samples=[int(index) for index in samples])

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns weights, gradients that wait, and the optimizer's states. For one device."""
        found = {name: tensor.detach().clone() for name, tensor in self.model.module.state_dict().items()}
        return found | states_of(self.model.module, self.optimizer.optim)


def states_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Returns a plain optimizer's states and the gradients."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[f"{name} grad"] = parameter.grad.clone()
        for kind, value in optimizer.state.get(parameter, {}).items():
            found[f"{name} {kind}"] = torch.as_tensor(value).clone()
    return found


def run_cycle(
    settings: Settings, cycle: Cycle, root: Path, directory: Path, rank: int, port: int, dump: bool = False
) -> None:
    """Is one rank of a cycle, and ends the process as a script's end would.

    Args:
        settings: Of the soak.
        cycle: What to do.
        root: Where the checkpoints are.
        directory: Where to write the diary `rank-N.jsonl` and the output `rank-N.txt`.
        rank: Which rank.
        port: Where the ranks meet.
        dump: Train on nothing, and write all tensors to `final.pt`.
    """
    output = os.open(directory / f"rank-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)
    faulthandler.enable(output)
    torch.set_num_threads(1)
    diary = Diary(directory / f"rank-{rank}.jsonl")
    code = 0
    with _faults_of(cycle):
        try:
            booster.launch(
                rank,
                cycle.world_size,
                "127.0.0.1",
                port,
                timeout_seconds=TIMEOUT_SECONDS,
                setup_timeout_seconds=TIMEOUT_SECONDS,
                checkpoint_timeout_seconds=TIMEOUT_SECONDS,
            )
            training = Training(settings, cycle, root, diary)
            if dump:
                diary.write("start", step=training.load())
                torch.save(training.tensors(), directory / "final.pt")
            else:
                training.run()
            diary.write("end")
        except BaseException as error:
            traceback.print_exc()
            diary.write("error", type=type(error).__name__, ours=isinstance(error, BoosterError), text=str(error))
            sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
            code = 1
        atexit._run_exitfuncs()  # a forked process ends without them, a script's doesn't
    sys.exit(code)


def _faults_of(cycle: Cycle) -> contextlib.AbstractContextManager[None]:
    if cycle.ends != "kill":
        return contextlib.nullcontext()
    return inject_faults(Fault.kill(rank=cycle.rank, at=cycle.at, call=cycle.call))
