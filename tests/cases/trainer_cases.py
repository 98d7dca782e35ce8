"""A Trainer with every hook under every plugin, and the same run by plain torch in one process."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from oracles.joined_slices import joined_over_ranks
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

from booster import Booster, Trainer
from booster.plugins import GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin
from booster.trainer import (
    AccuracyHook,
    CheckpointHook,
    EarlyStopHook,
    EMAHook,
    MemoryHook,
    MetricHook,
    MonitorHook,
    ProfilerHook,
    ThroughputHook,
    TimingHook,
)

WIDTH, CLASSES, SAMPLES, BATCH = 8, 4, 22, 4  # 5 batches of all ranks and one of 2 samples
ACCUMULATE, EPOCHS, MAX_NORM, DECAY, LR = 4, 3, 0.5, 0.5, 0.05

PLUGINS = {
    "ddp": lambda: TorchDDPPlugin(),
    "zero_2": lambda: LowLevelZeroPlugin(stage=2, precision="fp32", reduce_bucket_size_in_m=1e-4),
    "gemini": lambda: GeminiPlugin(precision="fp32", min_chunk_size_m=1e-4, search_range_m=2e-4),
    "fsdp": lambda: TorchFSDPPlugin(),
    "tp_2": lambda: HybridParallelPlugin(tp_size=2, precision="fp32"),
    "pp_2": lambda: HybridParallelPlugin(pp_size=2, num_microbatches=2, precision="fp32"),
}


def make_model(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(5)
    layers = [nn.Linear(WIDTH, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 16), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(16, CLASSES))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR)


def make_data() -> tuple[TensorDataset, TensorDataset]:
    """Returns samples for training, and others, of which the last batch of two ranks is padded."""
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(SAMPLES + 11, WIDTH, generator=generator)
    labels = torch.randint(0, CLASSES, (SAMPLES + 11,), generator=generator)
    return TensorDataset(inputs[:SAMPLES], labels[:SAMPLES]), TensorDataset(inputs[SAMPLES:], labels[SAMPLES:])


class Confusion:
    """A metric with the methods of torchmetrics: the share of samples of class 0 among those that are taken for it."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.right = self.num_taken = self.num_samples = 0

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        taken = outputs.argmax(1) == 0
        self.right += int((taken & (targets == 0)).sum())
        self.num_taken += int(taken.sum())
        self.num_samples += len(targets)

    def compute(self) -> dict[str, torch.Tensor]:
        precision = self.right / max(self.num_taken, 1)
        return {"precision": torch.tensor(precision), "samples": torch.tensor(self.num_samples)}


class Recorder:
    """A hook of one's own, without a base class: losses of all ranks, and the points of the first epoch."""

    priority = 55

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.points: list[str] = []
        self.rates: list[float] = []

    def before_epoch(self, trainer):
        self.points.append("before_epoch")

    def after_epoch(self, trainer):
        self.points.append("after_epoch")

    def before_iteration(self, trainer):
        self.points.append("before_iteration")

    def after_iteration(self, trainer):
        self.points.append("step" if trainer.is_step_end else "microbatch")
        self.losses.append(float(trainer.booster.gather_for_metrics(trainer.loss.reshape(1).float()).mean()))
        self.rates.append(trainer.optimizer.param_groups[0]["lr"])

    def before_evaluation(self, trainer):
        self.points.append("before_evaluation")

    def after_evaluation_iteration(self, trainer):
        self.points.append("evaluation")

    def after_evaluation(self, trainer):
        self.points.append("after_evaluation")


@dataclass
class Result:
    """What a run has in the end."""

    losses: list[float]
    metrics: dict[str, float]
    weights: dict[str, torch.Tensor]
    average: dict[str, torch.Tensor]
    predictions: torch.Tensor | None
    points: list[str] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    record: dict[str, Any] = field(default_factory=dict)


def make_trainer(kind: str, hooks, *, dropout: float = 0.0, accumulate: int = ACCUMULATE) -> tuple[Trainer, Any, Any]:
    """Returns the Trainer and its loaders."""
    booster = Booster(plugin=PLUGINS[kind]()) if kind != "none" else Booster(device="cpu")
    train, test = make_data()
    batch_size = BATCH // booster.plugin.dp_size
    loader = booster.prepare_dataloader(train, batch_size, shuffle=True)
    test_loader = booster.prepare_dataloader(test, batch_size)
    model = make_model(dropout)
    optimizer = make_optimizer(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    model, optimizer, criterion, *_ = booster.boost(model, optimizer, nn.CrossEntropyLoss(), lr_scheduler=scheduler)
    trainer = Trainer(
        booster, model, optimizer, criterion, scheduler, hooks=hooks, accumulate=accumulate, max_norm=MAX_NORM
    )
    return trainer, loader, test_loader


def train_with_all_hooks(kind: str, folder: Path) -> Result:
    """Trains with every hook of the library. Collective."""
    recorder, average, monitor, memory = Recorder(), EMAHook(DECAY), MonitorHook(log=folder / "log.jsonl"), MemoryHook()
    checkpoints = CheckpointHook(
        folder / "run", every_steps=2, keep_last=2, best="eval_accuracy", mode="max", use_async=True
    )
    profiler = ProfilerHook(folder / "traces", wait=1, warmup=1, active=2)
    hooks = [
        *(recorder, average, monitor, memory, checkpoints, profiler, ThroughputHook(), TimingHook()),
        *(AccuracyHook(), MetricHook(Confusion(), "zero"), EarlyStopHook("eval_accuracy", mode="max", wait=50)),
    ]
    trainer, loader, test_loader = make_trainer(kind, hooks)
    metrics = trainer.fit(loader, epochs=EPOCHS, eval_loader=test_loader)
    assert trainer.epoch == EPOCHS
    assert trainer.step == trainer.optimizer.num_steps == EPOCHS * 2
    weights = joined_over_ranks(trainer.model)
    with average.applied():
        averages = joined_over_ranks(trainer.model)
        predictions = trainer.predict(test_loader)
    assert all(torch.equal(one, weights[name]) for name, one in joined_over_ranks(trainer.model).items())
    assert len(memory.by_rank) == trainer.booster.world_size
    record = monitor.record
    assert record is not None
    return Result(
        recorder.losses, dict(metrics), weights, averages, predictions, recorder.points, recorder.rates, record
    )


def train_by_torch(dp_size: int) -> Result:
    """Trains in one process by plain torch on the batches of all ranks.

    Args:
        dp_size: Number of data-parallel ranks of the run that it is compared with, which decides how it is padded.
    """
    train, test = make_data()
    loader = Booster(device="cpu").prepare_dataloader(train, BATCH, shuffle=True)  # the same order
    model = make_model()
    optimizer = make_optimizer(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    losses: list[float] = []
    for _ in range(EPOCHS):
        batches = list(loader)
        for start in range(0, len(batches), ACCUMULATE):
            group = batches[start : start + ACCUMULATE]
            optimizer.zero_grad()
            for inputs, labels in group:
                loss = F.cross_entropy(model(inputs), labels)
                (loss / len(group)).backward()
                losses.append(float(loss.detach()))
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            scheduler.step()
            average.update_parameters(model)
    inputs, labels = test.tensors
    with torch.no_grad():
        outputs = average(inputs)
    each = F.cross_entropy(outputs, labels, reduction="none")
    padded = torch.cat([each, each[:1]]) if dp_size == 2 else each  # 11 samples on two ranks: one counts twice
    taken = outputs.argmax(1)
    metrics = {
        "epoch_loss": sum(losses[-len(batches) :]) / len(batches),
        "eval_loss": float(padded.mean()),
        "eval_accuracy": float((taken == labels).float().mean()),
        "eval_zero_precision": float(((taken == 0) & (labels == 0)).sum() / max(int((taken == 0).sum()), 1)),
        "eval_zero_samples": float(len(labels)),
    }
    averages = {name.removeprefix("module."): one for name, one in average.named_parameters()}
    return Result(losses, metrics, dict(model.named_parameters()), averages, outputs)
