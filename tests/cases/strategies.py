"""One small model and one loop under every plugin, with a twin in one process that sees the batches of all ranks."""

from __future__ import annotations

import contextlib

import torch
from oracles.joined_slices import joined_over_ranks
from torch import nn

from booster import Booster
from booster.device import current_device
from booster.mixed_precision import FP16NaiveMixedPrecision
from booster.plugins import GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin

# By name a Booster that computes in fp32, with chunks and buckets as small as there are.
FP32 = {
    "ddp": lambda: Booster(plugin=TorchDDPPlugin()),
    "zero1": lambda: Booster(plugin=LowLevelZeroPlugin(stage=1, precision="fp32", reduce_bucket_size_in_m=1e-6)),
    "zero2": lambda: Booster(
        plugin=LowLevelZeroPlugin(stage=2, precision="fp32", reduce_bucket_size_in_m=1e-6, overlap_allgather=True)
    ),
    "gemini": lambda: Booster(plugin=GeminiPlugin(precision="fp32", min_chunk_size_m=1e-4, search_range_m=2e-4)),
    "gemini_whole": lambda: Booster(
        plugin=GeminiPlugin(precision="fp32", min_chunk_size_m=1e-4, search_range_m=2e-4, shard_param_frac=0.0)
    ),
    "fsdp": lambda: Booster(plugin=TorchFSDPPlugin()),
    "hybrid_dp": lambda: Booster(plugin=HybridParallelPlugin(precision="fp32")),
    "hybrid_zero": lambda: Booster(plugin=HybridParallelPlugin(precision="fp32", zero_stage=1)),
    "hybrid_tp": lambda: Booster(plugin=HybridParallelPlugin(precision="fp32", tp_size=2)),
}

# With fp32 masters of low-precision weights; a loss scale that does not overflow.
HALF = {
    "ddp": lambda: Booster(plugin=TorchDDPPlugin(), mixed_precision=FP16NaiveMixedPrecision(initial_scale=2.0**8)),
    "zero1": lambda: Booster(plugin=LowLevelZeroPlugin(stage=1, precision="bf16", reduce_bucket_size_in_m=1e-6)),
    "gemini": lambda: Booster(plugin=GeminiPlugin(precision="bf16", min_chunk_size_m=1e-4, search_range_m=2e-4)),
    "fsdp": lambda: Booster(plugin=TorchFSDPPlugin(), mixed_precision=FP16NaiveMixedPrecision(initial_scale=2.0**8)),
    "hybrid_zero": lambda: Booster(plugin=HybridParallelPlugin(precision="bf16", zero_stage=1)),
}


def perceptron() -> nn.Module:
    """Two linear layers, which tensor parallelism can split, and one that no world divides."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(7, 12), nn.Tanh(), nn.Linear(12, 5))


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, 7, generator=torch.Generator().manual_seed(step)).to(current_device())


class Pair:
    """The boosted model and its twin.

    Args:
        booster: The Booster.
        make_optimizer: Makes an optimizer of parameters; None: the model is boosted alone.

    Attributes:
        model: The boosted model; `optimizer` is its boosted optimizer.
        plain: The model that one process trains; `plain_optimizer` is its optimizer.
    """

    def __init__(self, booster, make_optimizer=None) -> None:
        self.booster = booster
        raw, self.plain = perceptron(), perceptron().to(booster.device)
        if make_optimizer is None:
            self.model, *_ = booster.boost(raw)
        else:
            self.plain_optimizer = make_optimizer(self.plain.parameters())
            self.model, self.optimizer, *_ = booster.boost(raw, make_optimizer(raw.parameters()))

    def part(self, step: int) -> torch.Tensor:
        """Returns this rank's part of a batch."""
        return batch(step).chunk(self.booster.plugin.dp_size)[self.booster.plugin.dp_rank]

    def losses(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns this rank's loss of the boosted model, and the twin's."""
        return (self.model(self.part(step)) - 1).square().mean(), (self.plain(batch(step)) - 1).square().mean()

    def backward(self, step: int) -> None:
        loss, plain_loss = self.losses(step)
        self.booster.backward(loss, self.optimizer)
        plain_loss.backward()

    def on_both(self, name: str, *arguments) -> None:
        for optimizer in (self.optimizer, self.plain_optimizer):
            getattr(optimizer, name)(*arguments)

    def train(self, *steps: int) -> None:
        for step in steps:
            self.backward(step)
            self.on_both("step")
            self.on_both("zero_grad")

    def assert_equal(self, *, rtol=1e-5, atol=1e-6) -> None:
        """Weights and outputs are the twin's, up to sums in fp32 in another order. Collective."""
        expected = {name: one.cpu() for name, one in self.plain.state_dict().items()}
        torch.testing.assert_close(joined_over_ranks(self.model), expected, rtol=rtol, atol=atol)
        with torch.no_grad():
            found = self.model(batch(99))
            torch.testing.assert_close(found, self.plain(batch(99)), rtol=rtol, atol=atol, check_dtype=False)


def assert_masters_are_shown(model) -> None:
    """The model computes with the masters, rounded. Collective."""
    gathered = model.gathered() if hasattr(model, "gathered") else contextlib.nullcontext()
    with gathered:
        shown = {name: one.detach().clone() for name, one in model.unwrap().named_parameters()}
    masters = model.master_slices()
    assert masters, "there are no masters on this rank"
    for part in masters:
        whole = shown[part.name].reshape(-1)[slice(*part.span)]
        assert torch.equal(part.tensor.reshape(-1).to(whole.dtype), whole), part.name
