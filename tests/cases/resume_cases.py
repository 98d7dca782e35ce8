"""A small training run whose every part has a state, under every plugin, cut anywhere and resumed."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import Dataset

from booster import Booster, FP16NaiveMixedPrecision, FP16TorchMixedPrecision
from booster.moe import FFNExperts, MoeModule
from booster.plugins import GeminiPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin
from booster.plugins.hybrid_parallel.plugin import HybridParallelPlugin

PRECISIONS = {
    "fp32": lambda: None,
    "bf16": lambda: "bf16",
    # Overflows and grows on the way.
    "fp16": lambda: FP16TorchMixedPrecision(init_scale=2**16, growth_interval=2),
    "fp16_naive": lambda: FP16NaiveMixedPrecision(initial_scale=2**16, growth_interval=2),
    "fp8": lambda: "fp8",
}
STEPS_AFTER = 20


class Noisy(Dataset):
    """Samples that depend on every generator of the process that reads them."""

    def __init__(self) -> None:
        self.samples = torch.randn(26, 16, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = random.gauss(0, 1) + np.random.standard_normal() + torch.randn(16)
        return self.samples[index] + 0.01 * noise.float()


class Net(nn.Module):
    """Dropout, tied weights, a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(16, 16)
        self.drop = nn.Dropout(0.1)
        self.b = nn.Linear(16, 16, bias=False)
        self.b.weight = self.a.weight
        self.frozen = nn.Linear(16, 16).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.b(self.drop(torch.relu(self.a(x)))))


class ExpertNet(Net):
    """Experts before the rest, chosen with noise."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = MoeModule(16, 4, noisy_policy="Gaussian", expert_instance=FFNExperts(4, 16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.experts(x))


class Job:
    """A small training run whose every part has a state. An epoch has 7 batches on two ranks, 13 on one, 4 on four.

    Args:
        precision: One of `PRECISIONS`.
        plugin: Plugin of the Booster; `TorchDDPPlugin` by default.
        accumulation: Microbatches of a step.
        make_loader: Makes a loader of indices of the samples; by default the samples are read themselves.
        make_model: Makes the model.
    """

    def __init__(
        self, precision: str = "fp32", plugin=None, accumulation: int = 1, make_loader=None, make_model=Net
    ) -> None:
        torch.manual_seed(7)
        self.booster = Booster(plugin=plugin or TorchDDPPlugin(), mixed_precision=PRECISIONS[precision]())
        self.accumulation = accumulation
        model = make_model()
        groups = [{"params": [model.a.weight], "lr": 0.02}, {"params": [model.a.bias], "weight_decay": 0.0}]
        if isinstance(model, ExpertNet):
            groups.append({"params": list(model.experts.parameters())})
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        self.scheduler = CosineAnnealingLR(optimizer, T_max=20)
        if make_loader is None:
            self.loader = self.booster.prepare_dataloader(Noisy(), 2, shuffle=True)
        else:
            self.loader = self.booster.prepare_dataloader(make_loader())
        self.model, self.optimizer, *_ = self.booster.boost(model, optimizer)
        self.batches = None
        self.seen: list[torch.Tensor] = []
        self.losses: list[float] = []
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(100 + self.booster.plugin.dp_rank)  # as a run does after it was built: other dropout for other data

    def next_batch(self) -> torch.Tensor:
        if self.batches is None:  # kept between calls: a new iter() is a new epoch, unless a state was loaded
            self.batches = iter(self.loader)
        batch = next(self.batches, None)
        if batch is None:
            self.batches = None
            return self.next_batch()
        batch = batch.to(self.booster.device)
        self.seen.append(batch)
        return batch

    def train(self, micro_steps: int) -> Job:
        for _ in range(micro_steps):
            batch = self.next_batch()
            with self.booster.accumulate(self.model, self.optimizer, self.accumulation) as is_last:
                loss = self._backward(batch)
                self.booster.clip_grad_norm_(self.optimizer, 1.0)
                self.optimizer.step()
                self.optimizer.zero_grad()
            if is_last:
                self.scheduler.step()
            self.losses.append(loss.item())
        return self

    def _backward(self, batch: torch.Tensor) -> torch.Tensor:
        def criterion(outputs, _):
            return outputs.square().mean() * 10

        if not batch.is_floating_point():
            batch = Noisy().samples.to(batch.device)[batch]
        return self.booster.execute_pipeline(iter([batch]), self.model, criterion, self.optimizer)["loss"]

    @property
    def parts(self):
        return self.model, self.optimizer, self.scheduler, self.loader

    def save(self, path: Path, **options) -> None:
        self.booster.save(path, *self.parts, extra={"losses": self.losses}, **options)

    def load(self, path: Path) -> Job:
        self.booster.load(path, *self.parts)
        return self

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        pending = self.optimizer.pending_gradients()
        pending.synchronize()
        found |= {f"{name}.grad": gradient.clone() for name, gradient in pending.tensors().items()}
        slices = [*pending.reduced(), *self.optimizer.checkpoint_state().slices()]
        return found | {f"{part.name} {part.span}": part.tensor.clone() for part in slices}


def until_overflow(job: Job) -> None:
    before = job.optimizer.num_skipped_steps
    while job.optimizer.num_skipped_steps == before:
        job.train(1)


def with_rotation(job: Job, path: Path) -> None:
    for step in (1, 2, 3):
        job.train(2)
        job.save(path, step=step, keep_last=2, use_async=step < 3)


# What a run does before it is cut, and over how many microbatches it accumulates.
CUTS = {
    "step 1": (lambda job: job.train(1), 1),
    "mid-accumulation": (lambda job: job.train(5), 3),
    "epoch end": (lambda job: job.train(len(job.loader)), 1),
    "mid-epoch": (lambda job: job.train(len(job.loader) + 2), 1),
    "after an overflow": (until_overflow, 1),
    "after rotation": (None, 2),
}


def assert_resume_is_exact(path: Path, precision: str, cut: str, make_plugin, make_loader=None, make_model=Net) -> None:
    before, accumulation = CUTS[cut]
    whole = Job(precision, make_plugin(), accumulation, make_loader, make_model)
    if before is None:
        with_rotation(whole, path)
    else:
        before(whole)
        whole.save(path)
    num_before = len(whole.losses)
    whole.train(STEPS_AFTER)

    again = Job(precision, make_plugin(), accumulation, make_loader, make_model)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    again.load(path).train(STEPS_AFTER)
    assert again.losses == whole.losses[num_before:]
    assert again.optimizer.num_skipped_steps == whole.optimizer.num_skipped_steps
    assert again.optimizer.num_microbatches == whole.optimizer.num_microbatches
    assert again.scheduler.state_dict() == whole.scheduler.state_dict()
    if whole.optimizer.loss_scaler is not None:
        assert again.optimizer.loss_scaler.state_dict() == whole.optimizer.loss_scaler.state_dict()
        assert whole.optimizer.num_skipped_steps > 0
    expected, found = whole.tensors(), again.tensors()
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        # Gradients that overflowed and wait for their step may be nan on both sides.
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0, equal_nan=True, msg=name)
    assert len(again.seen) == STEPS_AFTER
    for _ in range(3):
        random_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
        expected_batch = whole.next_batch()
        random.setstate(random_state[0])
        np.random.set_state(random_state[1])
        torch.set_rng_state(random_state[2])
        assert torch.equal(again.next_batch(), expected_batch)


def in_turn(sizes, cases):
    """Every case in every world; by default the worlds in turn, one for each case."""
    return [
        pytest.param(*case, size, marks=() if number % len(sizes) == index else pytest.mark.slow)
        for number, case in enumerate(cases)
        for index, size in enumerate(sizes)
    ]


# Plugins.


def zero_plugin(stage: int, precision: str = "fp32", **arguments):
    """Tiny buckets, so that this small model has several."""
    return LowLevelZeroPlugin(
        stage, precision, initial_scale=2**16, growth_interval=2, reduce_bucket_size_in_m=0.001, **arguments
    )


def gemini_plugin(precision: str = "fp32", **arguments):
    """Tiny chunks, one of which is gathered ahead."""
    return GeminiPlugin(
        precision=precision,
        initial_scale=2**16,
        growth_interval=2,
        hysteresis=1,
        chunk_config_dict={"chunk_size": 256},
        **{"max_prefetch": 1} | arguments,
    )


FSDP_PRECISIONS = {
    "fsdp_bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32),
    "fsdp_bf16_fp32_reduce": MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
    ),
    "fsdp_fp16": MixedPrecisionPolicy(param_dtype=torch.float16, output_dtype=torch.float32),
}


def fsdp_plugin(precision: str = "fp32", sharding_strategy: str = "FULL_SHARD", extra_dp_size: int | None = None):
    """Gathers weights in a precision of FSDP's own, or in that of the Booster."""
    return TorchFSDPPlugin(
        sharding_strategy=sharding_strategy,
        extra_dp_size=extra_dp_size,
        mixed_precision=FSDP_PRECISIONS.get(precision),
        initial_scale=2**16,
        growth_interval=2,
        hysteresis=1,
    )


def hybrid_plugin(precision: str = "fp32", zero_stage: int = 0, tp_size: int = 2):
    """The tied weight is cut by its rows."""
    return HybridParallelPlugin(
        tp_size=tp_size,
        precision=precision,
        zero_stage=zero_stage,
        plan={"a": "colwise_gather_output", "b": "colwise_gather_output", "frozen": "colwise_gather_output"},
        initial_scale=2**16,
        growth_interval=2,
        hysteresis=1,
        zero_bucket_size_in_m=0.001,
    )


def expert_plugin(precision: str = "fp32", zero_stage: int = 0):
    """Every two ranks share the experts."""
    return HybridParallelPlugin(
        ep_size=2,
        precision=precision,
        zero_stage=zero_stage,
        initial_scale=2**16,
        growth_interval=2,
        hysteresis=1,
        zero_bucket_size_in_m=0.001,
    )


def staged_plugin(precision: str = "fp32", zero_stage: int = 0, num_microbatches: int = 2):
    """The tied weight is on both stages."""
    return HybridParallelPlugin(
        pp_size=2,
        num_microbatches=num_microbatches,
        split=["b"],
        precision=precision,
        zero_stage=zero_stage,
        initial_scale=2**16,
        growth_interval=2,
        hysteresis=1,
        zero_bucket_size_in_m=0.001,
    )
