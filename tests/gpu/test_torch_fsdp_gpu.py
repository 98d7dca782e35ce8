"""TorchFSDPPlugin on GPUs: every strategy and precision trains as plain torch. Run by benchmarks/gpu_suite.py."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpu_groups import HAS_GPU, group_of_devices, needs_four, needs_gpu, needs_two
from harness import distributed
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from booster import BF16MixedPrecision, Booster, FP16TorchMixedPrecision, LazyInitContext
from booster.device import current_device, device_type
from booster.plugins import TorchFSDPPlugin

pytestmark = [pytest.mark.gpu, pytest.mark.on_device, needs_gpu]

WIDTH, DEPTH, SAMPLES = 64, 4, 32
STEPS = 5
MAX_NORM = 0.1  # below the norms of these gradients: every step is clipped
LOSS_SCALE = 2.0**10  # low enough that no step overflows
TIMEOUT = 300.0  # nccl takes seconds to begin

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
POLICIES: dict[str, MixedPrecisionPolicy | None] = {
    "fp32": None,
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    "bf16, fp32 sums": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "fp16": MixedPrecisionPolicy(param_dtype=torch.float16, output_dtype=torch.float32),
}
# The losses of a few steps: fp32 sums in another order, bf16 rounds by 2**-9 and fp16 by 2**-12 per operation.
TOLERANCES = {"fp32": 1e-4, "bf16": 2e-2, "bf16, fp32 sums": 2e-2, "fp16": 1e-2}


class Stack(nn.Module):
    """Blocks that the plugin finds, between an input and an output layer of odd widths."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(7, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH + 1), nn.GELU(), nn.Linear(WIDTH + 1, WIDTH))
            for _ in range(DEPTH)
        )
        self.outlet = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = x + block(x)
        return self.outlet(x)


def make_model() -> nn.Module:
    """Returns a model on the host: the plugin brings it to where it belongs."""
    torch.manual_seed(0)
    return Stack()


def make_batch(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns all ranks' samples of a step."""
    generator = torch.Generator().manual_seed(index)
    x, y = torch.randn(SAMPLES, 7, generator=generator), torch.randn(SAMPLES, 3, generator=generator)
    return x.to(current_device()), y.to(current_device())


def part_of(tensor: torch.Tensor, index: int, count: int) -> torch.Tensor:
    return tensor.chunk(count)[index]


def make_plugin(precision: str, strategy: str = "FULL_SHARD", **arguments: Any) -> TorchFSDPPlugin:
    return TorchFSDPPlugin(
        sharding_strategy=strategy, mixed_precision=POLICIES[precision], initial_scale=LOSS_SCALE, **arguments
    )


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 5e-3, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2)


def train_plain(steps: int = STEPS) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Returns losses, gradient norms and weights of one process that takes the whole batch."""
    model = make_model().to(current_device())
    optimizer, losses, norms = make_optimizer(model), [], []
    for index in range(steps):
        x, y = make_batch(index)
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, model.state_dict()


def boosted(plugin: TorchFSDPPlugin, **arguments: Any) -> tuple[Booster, Any, Any]:
    booster, model = Booster(plugin=plugin, **arguments), make_model()
    model, optimizer, *_ = booster.boost(model, make_optimizer(model))
    return booster, model, optimizer


def train(
    booster: Booster, model: Any, optimizer: Any, steps: range, num_parts: int = 1
) -> tuple[list[float], list[float]]:
    """Returns the losses over all ranks, and the gradient norms.

    Args:
        booster: Of the model and the optimizer.
        model: To train.
        optimizer: Of it.
        steps: Numbers of the batches.
        num_parts: Microbatches of a step, all but the last of them without communication.
    """
    losses, norms = [], []
    rank, size = dist.get_rank(), dist.get_world_size()
    for index in steps:
        x, y = (part_of(tensor, rank, size) for tensor in make_batch(index))
        total = 0.0
        for part in range(num_parts):
            loss = nn.functional.mse_loss(model(part_of(x, part, num_parts)).float(), part_of(y, part, num_parts))
            total += loss.item() / num_parts
            if part < num_parts - 1:
                with booster.no_sync(model, optimizer):
                    booster.backward(loss / num_parts, optimizer)
            else:
                booster.backward(loss / num_parts, optimizer)
        norms.append(float(booster.clip_grad_norm_(optimizer, MAX_NORM)))
        optimizer.step()
        assert not optimizer.step_was_skipped
        optimizer.zero_grad()
        losses.append(mean_over_ranks(total))
    return losses, norms


def mean_over_ranks(value: float) -> float:
    total = torch.tensor(value, device=current_device())
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def assert_trains_as_plain_torch(
    plugin: TorchFSDPPlugin, precision: str, num_parts: int = 1, **arguments: Any
) -> tuple[Any, Any]:
    booster, model, optimizer = boosted(plugin, **arguments)
    losses, norms = train(booster, model, optimizer, range(STEPS), num_parts)
    expected, expected_norms, weights = train_plain()
    assert min(expected_norms) > MAX_NORM
    assert losses == pytest.approx(expected, rel=TOLERANCES[precision])
    assert norms == pytest.approx(expected_norms, rel=5 * TOLERANCES[precision])
    if precision == "fp32":
        for name, value in model.state_dict().items():
            torch.testing.assert_close(
                value.to(weights[name].device),
                weights[name],
                rtol=1e-3,
                atol=1e-4,
                msg=lambda text, name=name: f"{name}: {text}",
            )
    return model, optimizer


# One rank.


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("offloads", [False, True])
@pytest.mark.parametrize("precision", POLICIES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_trains_as_plain_torch(strategy: str, precision: str, offloads: bool) -> None:
    offload = CPUOffloadPolicy(pin_memory=HAS_GPU) if offloads else None
    _, optimizer = assert_trains_as_plain_torch(make_plugin(precision, strategy, cpu_offload=offload), precision)
    kinds = {state["exp_avg"].device.type for state in optimizer.state.values()}
    assert kinds == {"cpu" if offloads else device_type()}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_boosters_own_precision(precision: str) -> None:
    is_bf16 = precision == "bf16"
    mixed_precision = BF16MixedPrecision() if is_bf16 else FP16TorchMixedPrecision(init_scale=LOSS_SCALE)
    assert_trains_as_plain_torch(make_plugin("fp32"), precision, mixed_precision=mixed_precision)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("precision", POLICIES)
def test_microbatches_without_communication(precision: str) -> None:
    assert_trains_as_plain_torch(make_plugin(precision), precision, num_parts=4)


@pytest.mark.usefixtures("alone")
def test_fp16_skips_a_step_that_overflows() -> None:
    booster, model, optimizer = boosted(make_plugin("fp16", hysteresis=1))
    train(booster, model, optimizer, range(2))
    before = copy.deepcopy(model.state_dict())
    x, y = make_batch(2)
    booster.backward(nn.functional.mse_loss(model(x), y) * torch.inf, optimizer)
    optimizer.step()
    assert optimizer.step_was_skipped
    optimizer.zero_grad()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    train(booster, model, optimizer, range(2, 4))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("precision", POLICIES)
@pytest.mark.parametrize(("saved", "loaded"), [("FULL_SHARD", "SHARD_GRAD_OP"), ("NO_SHARD", "FULL_SHARD")])
def test_a_checkpoint_goes_on_under_another_strategy(saved: str, loaded: str, precision: str, tmp_path: Path) -> None:
    assert_continues(make_plugin(precision, saved), make_plugin(precision, loaded), precision, tmp_path)


@pytest.mark.usefixtures("alone")
def test_a_checkpoint_goes_on_in_host_memory(tmp_path: Path) -> None:
    offload = CPUOffloadPolicy(pin_memory=HAS_GPU)
    assert_continues(make_plugin("fp32"), make_plugin("fp32", cpu_offload=offload), "fp32", tmp_path)


@pytest.mark.usefixtures("alone")
def test_a_lazy_model_is_materialised_on_the_device() -> None:
    torch.manual_seed(0)
    with LazyInitContext(eager_below_bytes=0):
        model: Any = Stack()
    booster = Booster(plugin=make_plugin("fp32"))
    model, optimizer, *_ = booster.boost(model, make_optimizer(model))
    assert {parameter.device.type for parameter in model.parameters()} == {device_type()}
    losses, _ = train(booster, model, optimizer, range(STEPS))
    assert losses == pytest.approx(train_plain()[0], rel=TOLERANCES["fp32"])


def assert_continues(saver: TorchFSDPPlugin, loader: TorchFSDPPlugin, precision: str, folder: Path) -> None:
    """Saves after three steps, loads into a model of another plugin, and trains both on."""
    booster, model, optimizer = boosted(saver)
    train(booster, model, optimizer, range(3))
    booster.save_model(model, folder / "model", shard=True)
    booster.save_optimizer(optimizer, folder / "optimizer", shard=True)
    weights = copy.deepcopy(model.state_dict())
    expected, _ = train(booster, model, optimizer, range(3, 6))

    booster, model, optimizer = boosted(loader)
    booster.load_model(model, folder / "model")
    booster.load_optimizer(optimizer, folder / "optimizer")
    for name, value in model.state_dict().items():
        assert torch.equal(value.cpu(), weights[name].cpu()), name
    found, _ = train(booster, model, optimizer, range(3, 6))
    assert found == pytest.approx(expected, rel=TOLERANCES[precision])


# Several ranks.


@needs_two
@pytest.mark.parametrize("precision", POLICIES)
@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(2, fresh=True, timeout=TIMEOUT)
def test_two_ranks_train_as_plain_torch(strategy: str, precision: str, tmp_path: Path) -> None:
    with group_of_devices(tmp_path):
        assert_trains_as_plain_torch(make_plugin(precision, strategy), precision)


@needs_two
@distributed(2, fresh=True, timeout=TIMEOUT)
def test_two_ranks_with_shards_in_host_memory(tmp_path: Path) -> None:
    with group_of_devices(tmp_path):
        offload = CPUOffloadPolicy(pin_memory=HAS_GPU)
        assert_trains_as_plain_torch(make_plugin("fp32", cpu_offload=offload), "fp32")


@needs_two
@pytest.mark.parametrize("precision", POLICIES)
@distributed(2, fresh=True, timeout=TIMEOUT)
def test_two_ranks_accumulate_without_communication(precision: str, tmp_path: Path) -> None:
    with group_of_devices(tmp_path):
        assert_trains_as_plain_torch(make_plugin(precision), precision, num_parts=4)


@needs_two
@distributed(2, fresh=True, timeout=TIMEOUT)
def test_two_ranks_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    with group_of_devices(tmp_path):
        assert_continues(make_plugin("fp32"), make_plugin("fp32", "NO_SHARD"), "fp32", tmp_path)


@needs_four
@pytest.mark.parametrize("precision", POLICIES)
@distributed(4, fresh=True, timeout=TIMEOUT)
def test_two_replicas_of_two_shards(precision: str, tmp_path: Path) -> None:
    with group_of_devices(tmp_path):
        plugin = make_plugin(precision, "HYBRID_SHARD", extra_dp_size=2)
        assert_trains_as_plain_torch(plugin, precision, num_parts=2)
