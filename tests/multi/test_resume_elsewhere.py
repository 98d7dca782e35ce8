"""Other plugins and other numbers of ranks go on from the same state, also in the middle of a step."""

from __future__ import annotations

import functools
import random
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from resume_cases import Job, Net, fsdp_plugin, gemini_plugin, zero_plugin
from torch import nn

from booster.plugins import TorchDDPPlugin
from booster.rng_state import preserved_rng

pytestmark = pytest.mark.on_device


@pytest.fixture(autouse=True)
def _random_state():
    with preserved_rng():
        yield


def draws(job: Job) -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def save_and_draw(path: str) -> tuple[float, float, float]:
    job = Job().train(2)
    job.save(Path(path))
    return draws(job)


def load_and_draw(path: str) -> tuple[float, float, float]:
    return draws(Job().load(Path(path)))


@pytest.mark.parametrize(("saved", "loaded"), [(2, 1), (2, 4), (1, 3)])
def test_no_two_ranks_of_another_world_draw_alike(tmp_path, saved, loaded):
    path = str(tmp_path / "c")
    expected = run_ranks(save_and_draw, saved, path)
    found = run_ranks(load_and_draw, loaded, path)
    assert found[:saved] == expected[:loaded]
    assert run_ranks(load_and_draw, loaded, path) == found
    for numbers in zip(*found, strict=True):
        assert len(set(numbers)) == loaded


def no_plugin_of_its_own():
    return None


def train_with_items(
    path: str, saves: bool, has_items: bool, make_plugin=no_plugin_of_its_own
) -> tuple[dict[str, torch.Tensor], float]:
    """Makes half a step before the checkpoint or half a step after it, on this rank's part of 12 samples."""
    job = Job("fp32", make_plugin(), accumulation=2)
    job.model.eval()
    size, rank = job.booster.plugin.dp_size, job.booster.plugin.dp_rank
    if not saves:
        job.load(Path(path))
    samples = torch.randn(2, 12, 16, generator=torch.Generator().manual_seed(4))[0 if saves else 1]
    samples = samples.to(job.booster.device)
    # With items, the parts differ in length: the last rank has most of them.
    bounds = [12 * r // size - (r % size > 0 and has_items) for r in (rank, rank + 1)]
    part = samples[bounds[0] : bounds[1] if rank + 1 < size else 12]
    with job.booster.accumulate(job.model, job.optimizer, 2):
        losses = job.model(part).square().mean(dim=1)
        loss, num_items = (losses.sum(), len(part)) if has_items else (losses.mean(), None)
        job.booster.backward(loss, job.optimizer, num_items=num_items)
        norm = None if saves else job.optimizer.get_grad_norm()
    if saves:
        job.save(Path(path))
    return whole_gradients(job), norm


def whole_gradients(job: Job) -> dict[str, torch.Tensor]:
    """This rank's gradients; under a plugin that shards them, those of all ranks put together."""
    if not hasattr(job.optimizer, "shards"):
        return {name: p.grad.clone().cpu() for name, p in job.model.named_parameters() if p.grad is not None}
    parts = [
        (part.name, part.global_shape, part.span, _of_host(part.parameter.grad)) for part in job.optimizer.shards.parts
    ]
    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, parts)
    found = {}
    for name, shape, span, gradient in (part for parts in of_ranks for part in parts):
        if gradient is not None:
            found.setdefault(name, torch.full(shape, float("nan"))).view(-1)[slice(*span)] = gradient
    return found


def _of_host(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return None if gradient is None else gradient.cpu()


PLUGINS = {
    "ddp": TorchDDPPlugin,
    "zero 1": functools.partial(zero_plugin, 1),
    "zero 2": functools.partial(zero_plugin, 2),
    "gemini": gemini_plugin,
    "gemini on disk": functools.partial(gemini_plugin, placement_policy="cpu"),
    "fsdp": fsdp_plugin,
    "fsdp grad op": functools.partial(fsdp_plugin, sharding_strategy="SHARD_GRAD_OP"),
    "fsdp hybrid": functools.partial(fsdp_plugin, sharding_strategy="HYBRID_SHARD", extra_dp_size=2),
}


CROSSINGS = [
    (("zero 1", 2), ("zero 1", 2)),
    (("zero 2", 2), ("zero 2", 2)),
    (("zero 1", 3), ("ddp", 2)),
    (("zero 2", 3), ("ddp", 2)),
    (("ddp", 2), ("zero 1", 3)),
    (("ddp", 2), ("zero 2", 2)),
    (("zero 2", 4), ("zero 1", 2)),
    (("zero 2", 2), ("zero 2", 3)),
    (("zero 1", 2), ("zero 2", 4)),
    (("zero 2", 2), ("ddp", 2)),
    (("gemini", 2), ("gemini", 2)),
    (("gemini", 3), ("gemini on disk", 2)),
    (("gemini on disk", 2), ("zero 2", 4)),
    (("gemini", 4), ("ddp", 2)),
    (("zero 1", 2), ("gemini", 3)),
    (("ddp", 3), ("gemini on disk", 2)),
    (("fsdp", 2), ("fsdp", 2)),
    (("fsdp", 2), ("fsdp", 3)),
    (("fsdp grad op", 3), ("ddp", 2)),
    (("fsdp hybrid", 4), ("fsdp grad op", 2)),
    (("ddp", 2), ("fsdp", 3)),
    (("zero 2", 2), ("fsdp", 4)),
    (("fsdp", 3), ("zero 1", 2)),
    (("gemini", 2), ("fsdp hybrid", 4)),
    (("fsdp", 2), ("gemini", 3)),
]


# By default with items and without in turn.
@pytest.mark.parametrize(
    ("saved", "loaded", "has_items"),
    [
        pytest.param(*crossing, has_items, marks=() if number % 2 == has_items else pytest.mark.slow)
        for number, crossing in enumerate(CROSSINGS)
        for has_items in (False, True)
    ],
)
def test_a_step_may_begin_under_one_plugin_and_end_under_another(tmp_path, saved, loaded, has_items):
    path = str(tmp_path / "c")
    run_ranks(train_with_items, saved[1], path, True, has_items, PLUGINS[saved[0]])
    assert_whole_gradients(run_ranks(train_with_items, loaded[1], path, False, has_items, PLUGINS[loaded[0]]))


@pytest.mark.parametrize("has_items", [False, True], ids=["mean", "items"])
@pytest.mark.parametrize(("saved", "loaded"), [(2, 2), (1, 2), (2, 1), (2, 3), (4, 2), (3, 4)])
def test_a_step_may_begin_in_one_world_and_end_in_another(tmp_path, saved, loaded, has_items):
    path = str(tmp_path / "c")
    run_ranks(train_with_items, saved, path, True, has_items)
    assert_whole_gradients(run_ranks(train_with_items, loaded, path, False, has_items))


def assert_whole_gradients(found) -> None:
    """Compares with the gradient of all samples in one process."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        net = Net().eval()
    samples = torch.randn(2, 12, 16, generator=torch.Generator().manual_seed(4))
    net(samples.flatten(0, 1)).square().mean().backward()
    expected = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    for gradients, norm in found:
        assert gradients.keys() == expected.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-7)
        assert norm == pytest.approx(float(nn.utils.get_total_norm(expected.values())), rel=1e-5)
