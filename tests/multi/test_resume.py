"""A run that stops and starts again is the run that was never stopped; other world sizes go on from the same state."""

from __future__ import annotations

import functools
import random
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness import distributed, run_ranks
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import Dataset

from booster import Booster, FP16NaiveMixedPrecision, FP16TorchMixedPrecision
from booster.comm import group_rank, group_size
from booster.errors import CheckpointError, ConfigError
from booster.plugins import GeminiPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin
from booster.plugins.hybrid_parallel.plugin import HybridParallelPlugin
from booster.single_device import SingleDevicePlugin

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


class Job:
    """A small training run whose every part has a state. An epoch has 7 batches on two ranks, 13 on one, 4 on four."""

    def __init__(self, precision: str = "fp32", plugin=None, accumulation: int = 1) -> None:
        torch.manual_seed(7)
        self.booster = Booster(plugin=plugin or TorchDDPPlugin(), mixed_precision=PRECISIONS[precision]())
        self.accumulation = accumulation
        model = Net()
        groups = [{"params": [model.a.weight], "lr": 0.02}, {"params": [model.a.bias], "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        self.scheduler = CosineAnnealingLR(optimizer, T_max=20)
        self.loader = self.booster.prepare_dataloader(Noisy(), 2, shuffle=True)
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


# What a run does before it is cut, and over how many micro-batches it accumulates.
CUTS = {
    "step 1": (lambda job: job.train(1), 1),
    "mid-accumulation": (lambda job: job.train(5), 3),
    "epoch end": (lambda job: job.train(len(job.loader)), 1),
    "mid-epoch": (lambda job: job.train(len(job.loader) + 2), 1),
    "after an overflow": (until_overflow, 1),
    "after rotation": (None, 2),
}


def assert_resume_is_exact(path: Path, precision: str, cut: str, make_plugin) -> None:
    before, accumulation = CUTS[cut]
    whole = Job(precision, make_plugin(), accumulation)
    if before is None:
        with_rotation(whole, path)
    else:
        before(whole)
        whole.save(path)
    num_before = len(whole.losses)
    whole.train(STEPS_AFTER)

    again = Job(precision, make_plugin(), accumulation)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    again.load(path).train(STEPS_AFTER)
    assert again.losses == whole.losses[num_before:]
    assert again.optimizer.num_skipped_steps == whole.optimizer.num_skipped_steps
    assert again.optimizer.num_micro_steps == whole.optimizer.num_micro_steps
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


@pytest.fixture(autouse=True)
def _random_state():
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])


def in_turn(sizes, cases):
    """Every case in every world; by default the worlds in turn, one for each case."""
    return [
        pytest.param(*case, size, marks=() if number % len(sizes) == index else pytest.mark.slow)
        for number, case in enumerate(cases)
        for index, size in enumerate(sizes)
    ]


@pytest.mark.parametrize("cut", ["mid-accumulation", "epoch end", "after rotation"])
def test_one_device_resumes_bit_for_bit(tmp_path, cut):
    assert_resume_is_exact(tmp_path / "c", "fp32", cut, lambda: SingleDevicePlugin("cpu"))


@distributed(world_size=2)
@pytest.mark.parametrize(
    ("precision", "cut"),
    [
        *[(precision, cut) for precision in ("fp32", "fp16") for cut in ("mid-accumulation", "epoch end", "mid-epoch")],
        ("bf16", "mid-accumulation"),
        ("fp16_naive", "mid-accumulation"),
        ("fp8", "mid-epoch"),
    ],
)
def test_ranks_resume_bit_for_bit(tmp_path, precision, cut):
    assert_resume_is_exact(tmp_path / "c", precision, cut, TorchDDPPlugin)


def zero_plugin(stage: int, precision: str = "fp32", **arguments):
    """Tiny buckets, so that this small model has several."""
    return LowLevelZeroPlugin(
        stage, precision, initial_scale=2**16, growth_interval=2, reduce_bucket_size_in_m=0.001, **arguments
    )


ZERO_CASES = [
    *[(stage, "fp32", cut) for cut in ("mid-accumulation", "epoch end", "after rotation") for stage in (1, 2)],
    (1, "bf16", "mid-accumulation"),
    (2, "bf16", "mid-accumulation"),
    (2, "fp16", "mid-accumulation"),
    (1, "fp16", "mid-epoch"),
]


def assert_zero_resume_is_exact(path: Path, stage: int, precision: str, cut: str) -> None:
    assert_resume_is_exact(path, "fp32", cut, lambda: zero_plugin(stage, precision))


@pytest.mark.parametrize(("stage", "precision", "cut", "world_size"), in_turn((2, 3), ZERO_CASES))
def test_sharded_ranks_resume_bit_for_bit(tmp_path, stage, precision, cut, world_size):
    run_ranks(assert_zero_resume_is_exact, world_size, tmp_path / "c", stage, precision, cut)


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


GEMINI_POLICIES = {
    "static": {},
    "kept": {"shard_param_frac": 0.0},
    "on disk": {"placement_policy": "cpu"},
    "states on disk": {"offload_optim_frac": 1.0, "max_prefetch": 0},
    "auto": {"placement_policy": "auto"},
}


GEMINI_CASES = [
    ("fp32", "mid-accumulation", "static"),
    ("fp32", "epoch end", "on disk"),
    ("fp32", "after rotation", "kept"),
    ("bf16", "mid-accumulation", "static"),
    ("bf16", "mid-epoch", "states on disk"),
    ("fp16", "mid-accumulation", "on disk"),
    ("fp16", "after an overflow", "static"),
]


def assert_gemini_resume_is_exact(path: Path, precision: str, cut: str, policy: str) -> None:
    assert_resume_is_exact(path, "fp32", cut, lambda: gemini_plugin(precision, **GEMINI_POLICIES[policy]))


@pytest.mark.parametrize(("precision", "cut", "policy", "world_size"), in_turn((2, 3), GEMINI_CASES))
def test_ranks_with_chunks_resume_bit_for_bit(tmp_path, precision, cut, policy, world_size):
    run_ranks(assert_gemini_resume_is_exact, world_size, tmp_path / "c", precision, cut, policy)


@pytest.mark.slow
@distributed(world_size=(1, 2, 4))
@pytest.mark.parametrize(
    ("precision", "cut"),
    [
        (precision, cut)
        for precision in ("fp32", "bf16", "fp16")
        for cut in CUTS
        if cut != "after an overflow" or precision == "fp16"  # only a scaled loss overflows
    ],
)
@pytest.mark.parametrize("policy", GEMINI_POLICIES)
def test_every_cut_of_ranks_with_chunks_resumes_bit_for_bit(tmp_path, policy, precision, cut):
    arguments = GEMINI_POLICIES[policy] | {"extra_dp_size": 2 if group_size() == 4 else 1}
    assert_resume_is_exact(tmp_path / "c", "fp32", cut, lambda: gemini_plugin(precision, **arguments))


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


def assert_fsdp_resume_is_exact(path: Path, precision: str, cut: str, *arguments) -> None:
    of_booster = "fp32" if precision in FSDP_PRECISIONS else precision
    assert_resume_is_exact(path, of_booster, cut, lambda: fsdp_plugin(precision, *arguments))


FSDP_CASES = [
    *[("fp32", cut, "FULL_SHARD") for cut in ("mid-accumulation", "epoch end", "after rotation")],
    ("fp32", "mid-accumulation", "SHARD_GRAD_OP"),
    ("fp32", "mid-epoch", "NO_SHARD"),
    ("bf16", "mid-accumulation", "FULL_SHARD"),
    ("fp16", "mid-accumulation", "FULL_SHARD"),
    ("fp16_naive", "mid-accumulation", "FULL_SHARD"),
    ("fp8", "mid-epoch", "FULL_SHARD"),
    ("fsdp_bf16", "mid-accumulation", "FULL_SHARD"),
    ("fsdp_bf16_fp32_reduce", "mid-accumulation", "SHARD_GRAD_OP"),
    ("fsdp_fp16", "after an overflow", "FULL_SHARD"),
    ("fsdp_fp16", "mid-accumulation", "SHARD_GRAD_OP"),
]


@pytest.mark.parametrize(("precision", "cut", "strategy", "world_size"), in_turn((2, 3), FSDP_CASES))
def test_ranks_with_units_resume_bit_for_bit(tmp_path, precision, cut, strategy, world_size):
    run_ranks(assert_fsdp_resume_is_exact, world_size, tmp_path / "c", precision, cut, strategy)


@distributed(world_size=4)
@pytest.mark.parametrize("precision", ["fp32", "fsdp_fp16"])
def test_replicas_of_units_resume_bit_for_bit(tmp_path, precision):
    assert_fsdp_resume_is_exact(tmp_path / "c", precision, "mid-accumulation", "HYBRID_SHARD", 2)


@pytest.mark.slow
@distributed(world_size=(1, 2, 4))
@pytest.mark.parametrize(
    ("precision", "cut"),
    [
        (precision, cut)
        for precision in (*PRECISIONS, *FSDP_PRECISIONS)
        for cut in CUTS
        if cut != "after an overflow" or "fp16" in precision  # only a scaled loss overflows
    ],
)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"])
def test_every_cut_of_ranks_with_units_resumes_bit_for_bit(tmp_path, strategy, precision, cut):
    num_replicas = (2 if group_size() == 4 else 1) if strategy == "HYBRID_SHARD" else None
    assert_fsdp_resume_is_exact(tmp_path / "c", precision, cut, strategy, num_replicas)


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


HYBRID_CASES = [
    *[("fp32", cut, stage) for cut in ("mid-accumulation", "epoch end") for stage in (0, 1, 2)],
    ("bf16", "mid-accumulation", 0),
    ("fp32", "after rotation", 1),
    ("fp16", "mid-accumulation", 2),
    ("fp16", "after an overflow", 1),
]


def assert_hybrid_resume_is_exact(path: Path, precision: str, cut: str, zero_stage: int) -> None:
    assert_resume_is_exact(path, "fp32", cut, lambda: hybrid_plugin(precision, zero_stage))


@pytest.mark.parametrize(("precision", "cut", "zero_stage", "world_size"), in_turn((2, 4), HYBRID_CASES))
def test_ranks_that_share_layers_resume_bit_for_bit(tmp_path, precision, cut, zero_stage, world_size):
    run_ranks(assert_hybrid_resume_is_exact, world_size, tmp_path / "c", precision, cut, zero_stage)


@pytest.mark.slow
@distributed(world_size=(2, 4))
@pytest.mark.parametrize(
    ("precision", "cut"),
    [
        (precision, cut)
        for precision in ("fp32", "bf16", "fp16")
        for cut in CUTS
        if cut != "after an overflow" or precision == "fp16"  # only a scaled loss overflows
    ],
)
@pytest.mark.parametrize("zero_stage", [0, 1, 2])
@pytest.mark.parametrize("is_all", [True, False])
def test_every_cut_of_ranks_that_share_layers_resumes_bit_for_bit(tmp_path, is_all, zero_stage, precision, cut):
    tp_size = group_size() if is_all else 2
    assert_resume_is_exact(tmp_path / "c", "fp32", cut, lambda: hybrid_plugin(precision, zero_stage, tp_size))


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


@distributed(world_size=(2, 4))
@pytest.mark.parametrize(
    ("precision", "cut", "zero_stage"),
    [
        *[("fp32", cut, stage) for cut in ("mid-accumulation", "epoch end") for stage in (0, 1)],
        ("fp32", "after rotation", 1),
        ("bf16", "mid-accumulation", 0),
        ("fp16", "after an overflow", 1),
        ("fp16", "mid-accumulation", 0),
    ],
)
def test_stages_resume_bit_for_bit(tmp_path, precision, cut, zero_stage):
    assert_resume_is_exact(tmp_path / "c", "fp32", cut, lambda: staged_plugin(precision, zero_stage))


@pytest.mark.slow
@distributed(world_size=(2, 4))
@pytest.mark.parametrize(
    ("precision", "cut"),
    [
        (precision, cut)
        for precision in ("fp32", "bf16", "fp16")
        for cut in CUTS
        if cut != "after an overflow" or precision == "fp16"  # only a scaled loss overflows
    ],
)
@pytest.mark.parametrize("zero_stage", [0, 1])
def test_every_cut_of_stages_resumes_bit_for_bit(tmp_path, zero_stage, precision, cut):
    assert_resume_is_exact(tmp_path / "c", "fp32", cut, lambda: staged_plugin(precision, zero_stage))


@pytest.mark.slow
@distributed(world_size=(1, 2, 4))
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("overlap", [True, False])
def test_every_cut_of_sharded_ranks_resumes_bit_for_bit(tmp_path, stage, precision, cut, overlap):
    if cut == "after an overflow" and precision != "fp16":
        pytest.skip("only a scaled loss overflows")
    extra = 2 if group_size() == 4 and not overlap else 1
    arguments = {"overlap_communication": overlap, "overlap_allgather": overlap, "extra_dp_size": extra}
    assert_resume_is_exact(tmp_path / "c", "fp32", cut, lambda: zero_plugin(stage, precision, **arguments))


@pytest.mark.slow
@distributed(world_size=(1, 2, 4))
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_cut_of_every_world_resumes_bit_for_bit(tmp_path, precision, cut):
    if cut == "after an overflow" and not precision.startswith("fp16"):
        pytest.skip("only a scaled loss overflows")
    assert_resume_is_exact(tmp_path / "c", precision, cut, TorchDDPPlugin)


@pytest.mark.slow
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_every_cut_of_one_device_resumes_bit_for_bit(tmp_path, precision, cut):
    if cut == "after an overflow" and precision != "fp16":
        pytest.skip("only a scaled loss overflows")
    assert_resume_is_exact(tmp_path / "c", precision, cut, lambda: SingleDevicePlugin("cpu"))


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


@distributed(world_size=2)
def test_a_loaders_own_generator_is_each_ranks_own(tmp_path):
    plugin = TorchDDPPlugin()
    booster = Booster(plugin=plugin)

    def make(seed: int):
        generator = torch.Generator().manual_seed(seed)
        return booster.prepare_dataloader(torch.arange(12.0), 2, generator=generator), generator

    loader, generator = make(plugin.dp_rank)
    next(iter(loader))
    booster.save(tmp_path / "c", dataloader=loader)
    other, restored = make(9)
    booster.load(tmp_path / "c", dataloader=other)
    assert torch.equal(restored.get_state(), generator.get_state())
    assert not torch.equal(restored.get_state(), make(1 - plugin.dp_rank)[1].get_state())


@distributed(world_size=2)
def test_what_one_rank_alone_cannot_save_fails_on_both(tmp_path):
    job = Job()
    extra = {"a": 1} if group_rank() == 0 else {"a": object()}
    with pytest.raises(CheckpointError, match=r"extra\['a'\] is a builtins.object"):
        job.booster.save(tmp_path / "c", *job.parts, extra=extra)
    assert not (tmp_path / "c").exists()
    job.booster.wait_for_everyone()
    job.save(tmp_path / "c")
    loader = job.loader if group_rank() == 0 else job.booster.prepare_dataloader(torch.ones(8, 16), 2, shuffle=True)
    before = job.tensors()
    with pytest.raises(ConfigError, match="num_samples=26"):
        job.booster.load(tmp_path / "c", job.model, job.optimizer, dataloader=loader)
    assert all(torch.equal(tensor, before[name]) for name, tensor in job.tensors().items())


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
        return {name: p.grad.clone() for name, p in job.model.named_parameters() if p.grad is not None}
    parts = [(part.name, part.global_shape, part.span, part.parameter.grad) for part in job.optimizer.shards.parts]
    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, parts)
    found = {}
    for name, shape, span, gradient in (part for parts in of_ranks for part in parts):
        if gradient is not None:
            found.setdefault(name, torch.full(shape, float("nan"))).view(-1)[slice(*span)] = gradient
    return found


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
