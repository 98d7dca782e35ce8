"""Gradients of a sharded optimizer that wait for their step: a rank's own, and its parts of sums over ranks.

After loading them all arrive at the same gradient of the step.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from harness import distributed, run_ranks
from sharded_by_hand import FixedScale, ShardedByHand
from torch import nn
from training_saves import VersionedState

from booster.checkpoint_io import GeneralCheckpointIO
from booster.checkpoint_io.training_state import accumulated_gradients
from booster.checkpoint_io.training_state.document import TrainingDocument
from booster.comm import group_rank, group_size
from booster.core.accumulation import AccumulationState
from booster.errors import CheckpointError, ConfigError
from booster.interface import ModelWrapper, OptimizerWrapper
from booster.interface.checkpoint_io import SaveOptions, TrainingParts

pytestmark = pytest.mark.on_device


@dataclass(frozen=True)
class Layout:
    """How an optimizer is held: whole by every rank, or in shards by each of some groups of ranks."""

    size: int
    num_groups: int = 1
    is_sharded: bool = True

    def __str__(self) -> str:
        groups = f" in {self.num_groups} groups" if self.num_groups > 1 else ""
        return f"{'sharded' if self.is_sharded else 'whole'} x{self.size}{groups}"


class Net(nn.Module):
    """Parameters that differ in which gradients they have; computes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Parameter(torch.zeros(7, 13))
        self.own = nn.Parameter(torch.zeros(5))
        self.reduced = nn.Parameter(torch.zeros(()))
        self.neither = nn.Parameter(torch.zeros(1))
        self.mostly = nn.Parameter(torch.zeros(2, 3, 4))
        self.frozen = nn.Parameter(torch.zeros(3, 2), requires_grad=False)


SHAPES = {name: tuple(parameter.shape) for name, parameter in Net().named_parameters()}
REDUCED = ("both", "reduced", "mostly")
USED = {*REDUCED, "own"}


def numbers(*key: object, shape) -> torch.Tensor:
    """Numbers that are sums of few powers of two: adding some of them up is exact in fp32, and bf16 has each."""
    generator = torch.Generator().manual_seed(sum(str(key).encode()))
    return torch.randint(-64, 65, shape, generator=generator).float() / 8


def own_gradients(rank: int, size: int) -> dict[str, torch.Tensor]:
    has = {"both": True, "own": rank % 2 == 0, "mostly": rank == size - 1}
    return {name: numbers(name, "of", rank, shape=SHAPES[name]) for name, it_has in has.items() if it_has}


def sum_of(name: str, group: int) -> torch.Tensor:
    return numbers(name, "summed by", group, shape=SHAPES[name])


def total(place: Layout) -> dict[str, torch.Tensor]:
    """The sum of all gradients that a place starts with, by name: W times D."""
    found = {name: torch.zeros(SHAPES[name]) for name in USED}
    for rank in range(place.size):
        for name, gradient in own_gradients(rank, place.size).items():
            found[name] += gradient
    for group, name in itertools.product(range(place.num_groups), REDUCED if place.is_sharded else ()):
        found[name] += sum_of(name, group)
    return found


def items_of(rank: int) -> float:
    return 3.0 + rank


def make(place: Layout, seed: int, *, scale: float | None = None, dtype=torch.float32):
    net = Net().to(dtype)
    optimizer = torch.optim.SGD(
        [{"params": [net.own, net.frozen, net.both]}, {"params": [net.reduced, net.neither, net.mostly]}], lr=0.1
    )
    model = ModelWrapper(net, is_primary=group_rank() == 0)
    scaler = None if scale is None else FixedScale(scale)
    if not place.is_sharded:
        wrapped = OptimizerWrapper(optimizer, model)
        wrapped.loss_scaler = scaler
        return wrapped
    group, length = None, place.size // place.num_groups
    if place.num_groups > 1:
        ranks = [list(range(first, first + length)) for first in range(0, place.size, length)]
        group = [dist.new_group(members) for members in ranks][group_rank() // length]
    return ShardedByHand(optimizer, model, seed=seed, group=group, loss_scaler=scaler)


def put_gradients(wrapped, place: Layout, factor: float = 1.0) -> None:
    own = own_gradients(group_rank(), place.size)
    if not place.is_sharded:
        for name, parameter in wrapped.model.named_parameters():
            parameter.grad = (own[name] * factor).to(parameter.dtype) if name in own else None
        return
    for name, gradient in own.items():
        wrapped.set_local_gradient(name, gradient * factor)
    for name in REDUCED:
        wrapped.set_sum(name, sum_of(name, group_rank() // (place.size // place.num_groups)) * factor)


def held(wrapped) -> dict[tuple, torch.Tensor]:
    """What a rank holds: its own gradients by name, its parts of sums by name and span."""
    found = {("own", name): gradient.clone() for name, gradient in wrapped.pending_gradients().tensors().items()}
    if isinstance(wrapped, ShardedByHand):
        parts = wrapped.reduced_gradients()
        found |= {("sum", shard.name, shard.span): memory.clone() for shard, memory in parts}
    return found


def sum_of_all(of_rank: list[dict[tuple, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The sum of what all ranks hold, by name."""
    found: dict[str, torch.Tensor] = {}
    for holding in of_rank:
        for (kind, name, *span), tensor in holding.items():
            whole = found.setdefault(name, torch.zeros(SHAPES[name], dtype=torch.float64)).view(-1)
            part = slice(None) if kind == "own" else slice(*span[0])
            whole[part] += tensor.reshape(-1).double()
    return found


def parts_of(wrapped) -> TrainingParts:
    return TrainingParts(
        models={}, optimizers={"": wrapped}, lr_schedulers={}, dataloaders={}, random_state=VersionedState(1)
    )


def save_state(wrapped, path: str) -> None:
    GeneralCheckpointIO().save_training_state(path, parts_of(wrapped), facts={}, options=SaveOptions())


def load_state(wrapped, path: str) -> None:
    GeneralCheckpointIO().load_training_state(path, parts_of(wrapped))


def save(path: str, place: Layout, seed: int, has_items: bool, scale: float | None = None, dtype=torch.float32):
    wrapped = make(place, seed, scale=scale, dtype=dtype)
    put_gradients(wrapped, place, scale or 1.0)
    accumulation = AccumulationState(num_backwards=3, num_averaged=2)
    accumulation.num_items = items_of(group_rank()) if has_items else None
    wrapped.restore_accumulation(accumulation, 2)
    save_state(wrapped, path)
    return held(wrapped)


def load(path: str, place: Layout, seed: int, scale: float | None = None, dtype=torch.float32, saves_to=None):
    wrapped = make(place, seed, scale=scale, dtype=dtype)
    put_gradients(wrapped, place, 1000.0)
    if place.is_sharded:
        wrapped.set_local_gradient("neither", torch.ones(1))
    load_state(wrapped, path)
    assert wrapped.accumulation.num_backwards == 3
    assert wrapped.accumulation.num_averaged == wrapped.num_microbatches == 2
    assert all(gradient.dtype == dtype for gradient in wrapped.pending_gradients().tensors().values())
    if saves_to is not None:
        save_state(wrapped, saves_to)
    return held(wrapped), wrapped.accumulation.num_items


def assert_same_step(saved: Layout, loaded: Layout, of_rank, has_items: bool, *, factor=1.0, rtol=1e-6) -> None:
    """The loaded gradients are those of the same step; see Note [Accumulated gradients]."""
    found = sum_of_all([holding for holding, _ in of_rank])
    assert found.keys() == {name for name, gradient in total(saved).items() if name in found or bool(gradient.any())}
    for name, whole in found.items():
        of_mean = 1.0 if has_items else loaded.size / saved.size  # W' D' is W D, or D' is D
        torch.testing.assert_close(whole, total(saved)[name].double() * of_mean * factor, rtol=rtol, atol=rtol)
    items = [num_items for _, num_items in of_rank]
    assert (
        items == [None] * loaded.size
        if not has_items
        else sum(items) == pytest.approx(sum(items_of(rank) for rank in range(saved.size)))
    )


PLACES = [
    *(Layout(size) for size in (1, 2, 3, 4)),
    Layout(4, num_groups=2),
    Layout(2, num_groups=2),
    *(Layout(size, is_sharded=False) for size in (1, 2, 3)),
]


def cases() -> list[object]:
    found = []
    pairs = [pair for pair in itertools.product(PLACES, PLACES) if pair[0].is_sharded or pair[1].is_sharded]
    for number, (pair, has_items) in enumerate(itertools.product(pairs, (False, True))):
        is_chosen = number % 4 == (number // 8) % 2  # every second pair, with and without items in turn
        name = f"{pair[0]} to {pair[1]}{', items' if has_items else ''}"
        found.append(pytest.param(*pair, has_items, number, id=name, marks=() if is_chosen else pytest.mark.slow))
    return found


@pytest.mark.parametrize(("saved", "loaded", "has_items", "seed"), cases())
def test_the_step_is_the_same_wherever_it_is_made(tmp_path, saved, loaded, has_items, seed):
    path = str(tmp_path / "c")
    before = run_ranks(save, saved.size, path, saved, seed, has_items)
    of_rank = run_ranks(load, loaded.size, path, loaded, seed if saved == loaded else seed + 1)
    assert_same_step(saved, loaded, of_rank, has_items)
    if saved == loaded:
        assert_bitwise(before, [holding for holding, _ in of_rank])


def assert_bitwise(before, after) -> None:
    for left, right in zip(before, after, strict=True):
        assert left.keys() == right.keys()
        for key, tensor in left.items():
            assert tensor.dtype == right[key].dtype
            assert torch.equal(tensor, right[key]), key


@pytest.mark.parametrize("scale", [None, 2.0**12])
def test_another_cut_of_the_same_ranks_takes_over_every_bit(tmp_path, scale):
    place, path = Layout(4, num_groups=2), str(tmp_path / "c")
    before = run_ranks(save, 4, path, place, 5, False, scale, torch.bfloat16)
    after = [holding for holding, _ in run_ranks(load, 4, path, place, 6, scale, torch.bfloat16)]
    assert before[0].keys() != after[0].keys()
    for ranks in ((0, 1), (2, 3)):
        left, right = (sum_of_all([one[rank] for rank in ranks]) for one in (before, after))
        assert left.keys() == right.keys()
        assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("has_items", [False, True], ids=["mean", "items"])
@pytest.mark.parametrize("stored_scale", [None, 2.0**10])
def test_through_an_optimizer_without_shards_and_back(tmp_path, has_items, stored_scale):
    first, between, last = Layout(3), Layout(2, is_sharded=False), Layout(4)
    paths = [str(tmp_path / name) for name in "ab"]
    run_ranks(save, first.size, paths[0], first, 1, has_items, stored_scale)
    run_ranks(load, between.size, paths[0], between, 1, saves_to=paths[1])  # which has no scale
    of_rank = run_ranks(load, last.size, paths[1], last, 2, 2.0**6)
    assert_same_step(first, last, of_rank, has_items, factor=2.0**6)


@pytest.mark.parametrize("place", [Layout(2), Layout(3), Layout(2, is_sharded=False)], ids=str)
def test_another_loss_scale(tmp_path, place):
    saved, path = Layout(2), str(tmp_path / "c")
    run_ranks(save, saved.size, path, saved, 1, False, 2.0**10)
    of_rank = run_ranks(load, place.size, path, place, 3)
    assert_same_step(saved, place, of_rank, False, factor=1.0)


@pytest.mark.parametrize("place", [Layout(3), Layout(3, is_sharded=False)], ids=str)
def test_sums_are_kept_in_fp32_for_half_weights(tmp_path, place):
    saved, path = Layout(2), str(tmp_path / "c")
    run_ranks(save, saved.size, path, saved, 1, False, None, torch.bfloat16)
    of_rank = run_ranks(load, place.size, path, place, 3, None, torch.bfloat16)
    sums = [tensor for holding, _ in of_rank for key, tensor in holding.items() if key[0] == "sum"]
    assert all(tensor.dtype == torch.float32 for tensor in sums)
    assert_same_step(saved, place, of_rank, False, rtol=2**-6)  # own gradients in bf16: 8 bits, several added


# What is written, and what is not.


@distributed(world_size=4)
def test_only_a_file_with_sums_has_the_new_format(tmp_path):
    wrapped = make(Layout(4), 3)
    for name in ("own", "reduced"):
        wrapped.set_local_gradient(name, torch.ones(SHAPES[name]))
    wrapped.restore_accumulation(AccumulationState(num_backwards=1), 0)
    save_state(wrapped, tmp_path / "a")
    document = json.loads((tmp_path / "a" / "training_state.json").read_text())
    assert document["format"] == 1
    assert document["gradients"] == [""]
    assert "reduced" not in document
    wrapped.set_sum("reduced", torch.tensor(3.0))  # which only one rank holds a part of
    save_state(wrapped, tmp_path / "b")
    document = json.loads((tmp_path / "b" / "training_state.json").read_text())
    assert document["format"] == 2
    assert document["reduced"] == [""]
    raw = (tmp_path / "b" / "training_state.json").read_bytes()
    assert TrainingDocument.parse(raw, "here").encode() == raw
    with pytest.raises(CheckpointError, match="its format is 3, but this version reads 1 and 2"):
        TrainingDocument.parse(
            raw.replace(b'"format": 2', b'"format": 3').replace(b'"format":2', b'"format":3'), "here"
        )


@distributed(world_size=4)
@pytest.mark.parametrize("seed", range(3))
def test_sums_alone_wait_even_on_ranks_that_hold_none(tmp_path, seed):
    wrapped = make(Layout(4), seed)
    wrapped.set_sum("reduced", torch.tensor(3.0))
    wrapped.restore_accumulation(AccumulationState(num_backwards=1), 0)
    save_state(wrapped, tmp_path / "a")
    other = make(Layout(4), seed + 10)
    put_gradients(other, Layout(4))
    load_state(other, tmp_path / "a")
    assert not other.local_gradients()
    found = [(shard.name, memory.tolist()) for shard, memory in other.reduced_gradients()]
    holders = [shard for shard in other.shards.parts if shard.name == "reduced"]
    assert found == [("reduced", [3.0])] * len(holders)
    after_step = make(Layout(4), seed)
    after_step.set_sum("reduced", torch.tensor(3.0))
    after_step.restore_accumulation(AccumulationState(num_backwards=1, has_stepped=True), 0)
    save_state(after_step, tmp_path / "a")
    assert not (tmp_path / "a" / "gradients.safetensors").exists()
    load_state(other, tmp_path / "a")
    assert not other.reduced_gradients()
    assert not other.accumulation.is_open


@distributed(world_size=3)
def test_a_sum_that_was_made_in_part_is_zero_in_the_rest(tmp_path):
    place = Layout(3)
    wrapped = make(place, 1)
    wrapped.set_sum("both", torch.ones(7, 13))
    first = next(shard for shard in wrapped.shards.parts if shard.name == "both")
    if group_rank() == group_size() - 1:
        del wrapped._sums["both", first.span]
    wrapped.restore_accumulation(AccumulationState(num_backwards=1), 0)
    save_state(wrapped, tmp_path / "a")
    again = make(place, 1)
    load_state(again, tmp_path / "a")
    for shard, memory in again.reduced_gradients():
        is_missing = group_rank() == group_size() - 1 and shard.span == first.span
        assert torch.equal(memory, torch.full(memory.shape, 0.0 if is_missing else 1.0))


@distributed(world_size=2)
def test_final_gradients_are_refused(tmp_path):
    wrapped = make(Layout(2), 1)
    put_gradients(wrapped, Layout(2))
    wrapped.restore_accumulation(AccumulationState(num_backwards=1, is_unscaled=True, was_unscaled=True), 0)
    with pytest.raises(ConfigError, match="between clipping"):
        save_state(wrapped, tmp_path / "a")
    assert not (tmp_path / "a").exists()


@distributed(world_size=2)
def test_a_gradient_of_what_is_frozen_here_is_refused(tmp_path):
    wrapped = make(Layout(2, is_sharded=False), 1)
    wrapped.model.unwrap().frozen.grad = torch.ones(3, 2)
    wrapped.restore_accumulation(AccumulationState(num_backwards=1), 0)
    save_state(wrapped, tmp_path / "a")
    other = make(Layout(2), 1)
    put_gradients(other, Layout(2))
    before = held(other)
    with pytest.raises(CheckpointError, match=r"a gradient of 'frozen' with shape \(3, 2\)"):
        load_state(other, tmp_path / "a")
    assert_bitwise([before], [held(other)])


def test_a_tensor_that_is_no_gradient_is_refused(tmp_path, monkeypatch):
    wrapped = make(Layout(1, is_sharded=False), 1)
    put_gradients(wrapped, Layout(1, is_sharded=False))
    wrapped.restore_accumulation(AccumulationState(num_backwards=1), 0)
    real = accumulated_gradients.CheckpointPart

    def renamed(*, slices, **options):
        return real(slices=[replace(one, name=one.name.replace("rank0", "rankdom")) for one in slices], **options)

    monkeypatch.setattr(accumulated_gradients, "CheckpointPart", renamed)
    save_state(wrapped, tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"'rankdom\.own' among its gradients that is not a gradient"):
        load_state(wrapped, tmp_path / "a")
