"""Offloading on the simulated device: what is copied when, in which stream, and through how much pinned memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from device_costs import measure
from harness import RanksFailed, run_ranks
from parity import Case
from simulated_cuda import device, reports
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from booster import Booster
from booster.optim import HybridAdam
from booster.plugins import GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin, TorchFSDPPlugin

SIMULATED = "simulated_cuda"
WIDTH, DEPTH = 30, 4
CHUNKS = {"chunk_config_dict": {"chunk_size": WIDTH * WIDTH}}  # a layer each
OFFLOADED = {"offload_optim_frac": 1.0, "offload_param_frac": 1.0, "precision": "bf16", **CHUNKS}
BUCKETS = {"reduce_bucket_size_in_m": 4 * WIDTH * WIDTH / 2**20}  # about a layer each


def _boosted(plugin: Any, make_optimizer: Callable[..., Any] = HybridAdam) -> tuple[Booster, Any, Any, list[nn.Module]]:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)]
    booster = Booster(plugin=plugin)
    model = nn.Sequential(*layers)
    model, optimizer, *_ = booster.boost(model, make_optimizer(model.parameters(), lr=1e-2))
    return booster, model, optimizer, layers


def _batch(booster: Booster, seed: int = 0) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed)).to(booster.device)


def _step(booster: Booster, model: Any, optimizer: Any, x: torch.Tensor | None = None) -> torch.Tensor:
    loss = model(_batch(booster) if x is None else x).float().square().mean()
    booster.backward(loss, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


# Gemini: loads ahead of their use, stores in backward, both beside computation.


def order_of_copies() -> list[str]:
    """Returns what happens in a step: "load 1" and "store 1" of a chunk, "computed 1" and "backward 1" of a layer."""
    from booster.plugins.gemini.tiers import ChunkShard

    booster, model, optimizer, layers = _boosted(GeminiPlugin(**OFFLOADED))
    for _ in range(2):
        _step(booster, model, optimizer)
    chunks = model.manager.chunks
    index_of = {id(shard): chunk.index for chunk in chunks for shard in (chunk.weights, chunk.grad_shard)}
    log: list[str] = []

    def logged(name: str) -> Any:
        original = getattr(ChunkShard, name)

        def copy(self: Any, tensor: torch.Tensor) -> Any:
            log.append(f"{name} {index_of[id(self)]}")
            return original(self, tensor)

        return mock.patch.object(ChunkShard, name, copy)

    def watch(index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            log.append(f"computed {index}")
            output.register_hook(lambda gradient: log.append(f"backward {index}"))

        return hook

    handles = [layer.register_forward_hook(watch(index)) for index, layer in enumerate(layers)]
    with logged("load"), logged("store"):
        _step(booster, model, optimizer)
    for handle in handles:
        handle.remove()
    return log


def test_shards_are_loaded_ahead_and_stored_in_backward():
    for log in run_ranks(order_of_copies, 2, device=SIMULATED):
        for index in range(DEPTH - 1):
            assert log.index(f"load {index + 1}") < log.index(f"computed {index}"), log
        assert log.index(f"store {DEPTH - 1}") < log.index("backward 0"), log


@contextmanager
def _without_waits_for_copies() -> Iterator[None]:
    from booster.plugins.gemini.tiers import _HostTransfer

    with mock.patch.object(_HostTransfer, "wait"):
        yield


def train_without_waits_for_copies(settings: dict[str, Any]) -> None:
    with _without_waits_for_copies():
        measure(settings)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_copies_that_are_not_waited_for_are_reported(num_ranks):
    arguments = {**OFFLOADED, **CHUNKS}
    del arguments["precision"]
    case = Case(plugin="gemini", model="mlp_odd", plugin_arguments=arguments, device=SIMULATED, world_size=num_ranks)
    with pytest.raises(RanksFailed, match=r"(?s)the simulated device reports.*race"):
        run_ranks(train_without_waits_for_copies, num_ranks, asdict(case), device=SIMULATED, timeout=60)


PARTS_OFFLOADED = [
    {"offload_optim_frac": 0.5},
    {"offload_optim_frac": 1.0},
    {"offload_optim_frac": 0.5, "offload_param_frac": 0.5},
    {"offload_optim_frac": 1.0, "offload_param_frac": 1.0},
]


def copies_of_steps(arguments: dict[str, Any]) -> tuple[list[float], int]:
    """Returns the losses, and the waits of the host of a last step."""
    booster, model, optimizer, _ = _boosted(GeminiPlugin(precision="bf16", **CHUNKS, **arguments))
    batches = [_batch(booster, seed) for seed in range(5)]
    losses = [_step(booster, model, optimizer, batch).item() for batch in batches[1:]]
    device.set_options(drops_avoidable_waits=True)
    with reports.recording() as record:
        _step(booster, model, optimizer, batches[0])
    device.set_options()
    return losses, record.count("sync", "pageable")


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_offloading_states_alone_costs_no_more_waits_than_offloading_all(num_ranks):
    expected = run_ranks(copies_of_steps, num_ranks, {}, device=SIMULATED)
    for arguments in PARTS_OFFLOADED:
        for (losses, waits), (expected_losses, _) in zip(
            run_ranks(copies_of_steps, num_ranks, arguments, device=SIMULATED), expected, strict=True
        ):
            assert losses == pytest.approx(expected_losses, rel=1e-5), arguments  # no chunk is updated twice
            assert waits <= DEPTH * arguments["offload_optim_frac"], arguments  # for gradients, chunk by chunk


def masters_of_changed_weights() -> list[list[float]]:
    """Returns, after each of some changes in `gathered()`, a weight and its master."""
    booster, model, optimizer, layers = _boosted(GeminiPlugin(**OFFLOADED))
    found = []
    for value in (2.0, 3.0, 4.0):
        _step(booster, model, optimizer)
        with model.gathered(), torch.no_grad():
            layers[0].weight.fill_(value)
        chunk = model.manager.chunks[0]
        found.append([chunk.weights.as_tensor()[0].item(), chunk.master.as_tensor()[0].item()])
    return found


def test_masters_follow_weights_that_are_still_on_their_way():
    for found in run_ranks(masters_of_changed_weights, 2, device=SIMULATED):
        assert found == [[2.0, 2.0], [3.0, 3.0], [4.0, 4.0]]


# Pinned memory.


@contextmanager
def _pinned_sizes() -> Iterator[list[int]]:
    """Record the bytes of all pinned memory that torch is asked for."""
    sizes: list[int] = []
    with ExitStack() as stack:
        for name in ("empty", "zeros", "empty_like"):
            original = getattr(torch, name)

            def record(*args: Any, original: Any = original, **kwargs: Any) -> torch.Tensor:
                tensor = original(*args, **kwargs)
                if kwargs.get("pin_memory"):
                    sizes.append(tensor.nbytes)
                return tensor

            stack.enter_context(mock.patch.object(torch, name, record))
        yield sizes


def pinned_sizes_of_training() -> list[list[int]]:
    found = []
    for make_plugin in (
        lambda: GeminiPlugin(**OFFLOADED),
        lambda: LowLevelZeroPlugin(stage=2, precision="bf16", cpu_offload=True, **BUCKETS),
    ):
        with _pinned_sizes() as sizes:
            booster, model, optimizer, _ = _boosted(make_plugin())
            for _ in range(2):
                _step(booster, model, optimizer)
        found.append(sizes)
    return found


def test_torch_has_nothing_to_round_up():
    """Its pinned memory comes in powers of two, up to twice as much as it is asked for."""
    for sizes_of_plugins in run_ranks(pinned_sizes_of_training, 2, device=SIMULATED):
        for sizes in sizes_of_plugins:
            large = [size for size in sizes if size > 1]
            assert large
            assert all(size.bit_count() == 1 for size in large), sizes


# ZeRO: the first buckets are updated while the last ones travel.


class _Spy(HybridAdam):
    """Notes which copies to the host the host knows to have ended, at each call."""

    events: list[torch.Event] = []
    seen: list[list[bool]] = []

    def fused_step(self, **arguments: Any) -> None:
        self.seen.append([event.query() for event in self.events])
        super().fused_step(**arguments)


def offloaded_steps(is_offloaded: bool, max_norm: float) -> tuple[list[float], list[list[bool]], float]:
    """Returns the losses, what `_Spy` saw in the last step, and the waits of the host in it."""
    from booster.plugins.low_level_zero.grad_bucket import GradientBucket

    plugin = LowLevelZeroPlugin(stage=2, precision="bf16", cpu_offload=is_offloaded, max_norm=max_norm, **BUCKETS)
    booster, model, optimizer, _ = _boosted(plugin, _Spy)
    start = GradientBucket.start_copy_to_host

    def note(self: GradientBucket) -> Any:
        wait = start(self)
        _Spy.events.append(wait.args[0])
        return wait

    device.set_options(drops_avoidable_waits=True)
    losses = []
    with mock.patch.object(GradientBucket, "start_copy_to_host", note):
        for batch in [_batch(booster, seed) for seed in range(4)]:
            _Spy.events, _Spy.seen = [], []
            with reports.recording() as record:
                losses.append(_step(booster, model, optimizer, batch))
    device.set_options()
    return [loss.item() for loss in losses], _Spy.seen, record.count("sync")


def test_the_first_bucket_is_updated_while_the_last_one_travels():
    expected = run_ranks(offloaded_steps, 2, False, 0.0, device=SIMULATED)
    for (losses, seen, syncs), (losses_on_device, _, _) in zip(
        run_ranks(offloaded_steps, 2, True, 0.0, device=SIMULATED), expected, strict=True
    ):
        num_buckets = len(seen[0])
        assert num_buckets > 2
        assert seen == [[index <= call for index in range(num_buckets)] for call in range(num_buckets)]
        assert syncs == num_buckets
        assert losses == pytest.approx(losses_on_device, rel=1e-5)


def offloaded_steps_of_gemini() -> list[list[bool]]:
    """Returns what `_Spy` saw in the last step."""
    from booster.plugins.gemini.tiers import ChunkShard

    booster, model, optimizer, _ = _boosted(GeminiPlugin(**OFFLOADED), _Spy)
    store = ChunkShard.store

    def note(self: ChunkShard, source: torch.Tensor) -> Any:
        transfer = store(self, source)
        _Spy.events.append(transfer._event)
        return transfer

    with mock.patch.object(ChunkShard, "store", note):
        for batch in [_batch(booster, seed) for seed in range(3)]:
            _Spy.events, _Spy.seen = [], []
            _step(booster, model, optimizer, batch)
    return _Spy.seen


def test_the_first_chunk_is_updated_while_the_last_one_travels():
    for seen in run_ranks(offloaded_steps_of_gemini, 2, device=SIMULATED):
        assert seen == [[index <= call for index in range(DEPTH)] for call in range(DEPTH)]


def test_a_norm_waits_for_all_buckets_at_once():
    for _, seen, syncs in run_ranks(offloaded_steps, 2, True, 0.5, device=SIMULATED):
        assert len(seen) == syncs == 1
        assert all(seen[0])


# Saves.


def saves(folder: str) -> tuple[dict[str, int], str, list[int], bool]:
    """Returns the collectives and the waits of asynchronous saves, their pinned bytes, and whether all came back."""
    from booster.checkpoint_io.saving import async_save

    booster, model, optimizer, _ = _boosted(LowLevelZeroPlugin(stage=1, precision="bf16"))
    _step(booster, model, optimizer)
    booster.save_model(model, f"{folder}/first")  # groups and buffers are made
    booster.checkpoint_io.wait()
    with (
        mock.patch.object(async_save, "MAX_BLOCK_BYTES", 4096),
        _pinned_sizes() as sizes,
        reports.recording() as record,
    ):
        booster.save_model(model, f"{folder}/model", use_async=True)
        booster.save_optimizer(optimizer, f"{folder}/optimizer", use_async=True, shard=True)
        booster.checkpoint_io.wait()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    _step(booster, model, optimizer)
    booster.load_model(model, f"{folder}/model")
    after = model.state_dict()
    is_back = all(torch.equal(value, after[name]) for name, value in before.items())
    return dict(record.collectives()), record.describe("sync", "pageable"), sizes, is_back


def test_saves_leave_the_device_alone_but_for_their_copies(tmp_path: Path):
    for collectives, waits, sizes, is_back in run_ranks(saves, 2, str(tmp_path), device=SIMULATED):
        assert collectives == {}
        for line in waits.splitlines():
            assert "checkpoint_io/copy_elements.py" in line, waits
        assert sizes
        assert max(sizes) <= 4096
        assert is_back


# Dtypes of sums.


def zero_1(**arguments):
    return LowLevelZeroPlugin(stage=1, precision="bf16", **arguments)


def gemini(**arguments):
    return GeminiPlugin(precision="bf16", **arguments)


def hybrid(zero_stage):
    return HybridParallelPlugin(precision="bf16", zero_stage=zero_stage)


def fsdp(strategy, reduce_dtype=None):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    return TorchFSDPPlugin(sharding_strategy=strategy, mixed_precision=policy)


def summed_gradient(make_plugin: Callable[..., Any], arguments: dict[str, Any]) -> tuple[list[float], torch.dtype]:
    """Returns the mean of a gradient that is 256 on rank 0 and 1 on rank 1, and the dtype that the plugin names."""
    booster = Booster(plugin=make_plugin(**arguments))
    module = nn.Linear(1, 1, bias=False)
    model, optimizer, *_ = booster.boost(module, torch.optim.SGD(module.parameters(), lr=0.1))
    found: list[float] = []
    optimizer.register_gradient_hook(lambda gradients: found.extend(one.sum().item() for one in gradients))
    x = torch.tensor([[256.0 if booster.plugin.dp_rank == 0 else 1.0]], device=booster.device)
    booster.backward(model(x).sum(), optimizer)
    optimizer.step()
    return [one for one in found if one], booster.plugin.reduction_dtype(torch.bfloat16)


@pytest.mark.parametrize(
    ("device", "make_plugin", "arguments", "mean", "dtype"),
    [
        ("cpu", zero_1, {}, 128.5, torch.float32),
        (SIMULATED, zero_1, {}, 128.0, torch.bfloat16),  # bf16 has no 257
        (SIMULATED, zero_1, {"communication_dtype": torch.float32}, 128.5, torch.float32),
        (SIMULATED, zero_1, {"extra_dp_size": 2}, 128.5, torch.float32),  # one shard, of two replicas
        (SIMULATED, gemini, {}, 128.0, torch.bfloat16),
        (SIMULATED, gemini, {"extra_dp_size": 2}, 128.5, torch.float32),
        (SIMULATED, hybrid, {"zero_stage": 0}, 128.5, torch.float32),
        (SIMULATED, hybrid, {"zero_stage": 1}, 128.0, torch.bfloat16),
        (SIMULATED, fsdp, {"strategy": "FULL_SHARD"}, 128.0, torch.bfloat16),
        (SIMULATED, fsdp, {"strategy": "FULL_SHARD", "reduce_dtype": torch.float32}, 128.5, torch.float32),
        (SIMULATED, fsdp, {"strategy": "NO_SHARD"}, 128.5, torch.float32),
    ],
)
def test_sums_have_the_dtype_that_the_plugin_names(device, make_plugin, arguments, mean, dtype):
    results = run_ranks(summed_gradient, 2, make_plugin, arguments, device=device)
    assert {value for found, _ in results for value in found} == {mean}
    assert {named for _, named in results} == {dtype}
