"""Tiers of memory: blocks keep what is written, in order, whatever the sizes and addresses; copies of accelerators."""

import random

import pytest
import torch
from disk_cases import MIB, random_bytes
from tier_cases import DTYPES, LONG, disk_tier_in, read, run_random_actions, same, written

from booster.kernels.disk_io import ALIGNMENT, aligned_buffer
from booster.plugins.gemini import tiers
from booster.plugins.gemini.tiers import HostTier


@pytest.fixture
def disk(tmp_path):
    with disk_tier_in(tmp_path / "offload") as tier:
        yield tier


@pytest.fixture(params=["host", "disk"])
def tier(request):
    return HostTier(pin_memory=True) if request.param == "host" else request.getfixturevalue("disk")


def test_the_names_and_the_end_of_tiers(tier):
    block = tier.new_block(10)
    assert (tier.name, block.num_bytes, tier.bytes_held) == (type(tier).__name__[:4].lower(), 10, 10)
    block.free()
    assert tier.bytes_held == 0
    if tier.name == "disk":
        tier.close()
        tier.close()


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6))])
def test_blocks_are_as_plain_bytes(tier, seed):
    run_random_actions(tier, random.Random(seed), 150)


# Lengths that take another way to the disk, by default in some format: in bytes they are what matters.
LENGTHS = [1, 1000, 33 * ALIGNMENT]


@pytest.mark.parametrize(
    ("numel", "dtype"),
    [
        pytest.param(numel, dtype, marks=() if number % len(LENGTHS) == index else pytest.mark.slow)
        for index, numel in enumerate(LENGTHS)
        for number, dtype in enumerate(DTYPES)
    ],
)
def test_a_tensor_at_an_address_that_is_not_aligned(tier, dtype, numel):
    source = random_bytes((numel + 5) * dtype.itemsize).view(dtype)[3 : numel + 3]
    block = written(tier, source)
    target = torch.zeros((numel + 5) * dtype.itemsize, dtype=torch.uint8).view(dtype)
    block.read_into(target[3 : numel + 3]).wait()
    assert same(target[3 : numel + 3], source)
    assert not target[:3].view(torch.uint8).any()
    assert not target[numel + 3 :].view(torch.uint8).any()


def test_an_empty_block_gives_zeros(tier):
    block = tier.new_block(LONG)
    assert not read(block).any()
    assert block.is_empty
    assert not block.as_tensor(torch.float32).any()


def test_a_block_of_nothing(tier):
    block = tier.new_block(0)
    block.write_from(torch.empty(0)).wait()
    block.read_into(torch.empty(0, dtype=torch.bfloat16)).wait()
    assert block.as_tensor(torch.float32).shape == (0,)
    block.free()


@pytest.mark.parametrize("tensor", [torch.zeros(9), torch.zeros(5, 2), torch.zeros(20)[::2]])
def test_a_tensor_that_does_not_fit_the_block(tier, tensor):
    block = tier.new_block(40)
    with pytest.raises(AssertionError):
        block.write_from(tensor)
    with pytest.raises(AssertionError):
        block.read_into(tensor)
    block.free()
    with pytest.raises(AssertionError, match="freed"):
        block.write_from(torch.zeros(10))


def test_a_parameter_can_be_read_into(tier):
    parameter = torch.nn.Parameter(torch.zeros(1000))
    data = torch.randn(1000)
    written(tier, data).read_into(parameter).wait()
    assert torch.equal(parameter, data)
    assert parameter.grad_fn is None


def test_the_order_of_requests_of_one_block(tier):
    """Without a wait for the first ones: a read sees the write before it, and the last write stays."""
    block = tier.new_block(MIB)
    for round_ in range(20):
        first, second = aligned_buffer(MIB).fill_(round_), aligned_buffer(MIB).fill_(100 + round_)
        seen, seen_last = aligned_buffer(MIB), aligned_buffer(MIB)
        transfers = [block.write_from(first), block.read_into(seen), block.write_from(second)]
        transfers.append(block.read_into(seen_last))
        for transfer in reversed(transfers):
            transfer.wait()
        assert seen.eq(round_).all()
        assert seen_last.eq(100 + round_).all()


def test_a_tensor_is_let_go_when_its_transfer_is_done(tier):
    """Memory is reused by reference count."""
    block = tier.new_block(ALIGNMENT + 100)
    tensor = aligned_buffer(ALIGNMENT + 100)
    count = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    for begin in (block.read_into, block.write_from, block.read_into):
        transfer = begin(tensor)
        transfer.wait()
        assert torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) == count


@pytest.mark.parametrize("address", [0, 1])
def test_a_live_tensor_and_the_block_are_one(tier, address):
    block = tier.new_block(LONG + 2)
    tensor = block.as_tensor(torch.bfloat16)
    assert tensor.shape == ((LONG + 2) // 2,)
    for seed in range(5):
        data = aligned_buffer(LONG + 2 + address)[address:].copy_(random_bytes(LONG + 2, seed))
        block.write_from(data).wait()
        assert torch.equal(tensor.view(torch.uint8), data)
        tensor.view(torch.uint8).copy_(random_bytes(LONG + 2, 50 + seed))
        block.read_into(data).wait()
        assert torch.equal(data, random_bytes(LONG + 2, 50 + seed))
    assert block.as_tensor(torch.uint8).data_ptr() == tensor.data_ptr()


# Beside an accelerator, which a device without memory stands in for.


class _Event:
    log = []

    def __init__(self, device):
        assert device.type == "meta"

    def query(self):
        return False  # not yet

    def __getattr__(self, name):
        return lambda: _Event.log.append(name)


def test_copies_of_an_accelerator_are_waited_for(monkeypatch):
    monkeypatch.setattr(torch, "Event", _Event)
    monkeypatch.setattr(_Event, "log", [])
    monkeypatch.setattr(torch.Tensor, "copy_", lambda into, source, non_blocking=False: into)
    block = HostTier(pin_memory=False).new_block(40)
    on_device, on_host = torch.empty(10, device="meta"), torch.empty(10)
    first = block.write_from(on_device)
    assert _Event.log == ["record"]
    second = block.read_into(on_device)
    assert _Event.log == ["record", "wait", "record"]
    third = block.read_into(on_host)
    assert _Event.log == ["record", "wait", "record", "synchronize"]
    for transfer in (third, second, first, first):  # the host has waited for the second
        transfer.wait()
    assert _Event.log[4:] == ["wait", "wait"]
    block.write_from(on_device)
    block.as_tensor(torch.float32)
    assert _Event.log[6:] == ["record", "synchronize"]
    block.write_from(on_device)
    block.free()
    assert _Event.log[8:] == ["record", "synchronize"]


@pytest.mark.parametrize(
    ("kind", "asked", "pinned"), [("cpu", True, False), ("xpu", True, True), ("xpu", False, False)]
)
def test_memory_is_pinned_where_it_helps(monkeypatch, kind, asked, pinned):
    empty, seen = torch.empty, []

    def record(*arguments, pin_memory=False, **settings):
        seen.append(pin_memory)
        return empty(*arguments, **settings)

    monkeypatch.setattr(tiers, "device_type", lambda: kind)
    monkeypatch.setattr(torch, "empty", record)
    HostTier(pin_memory=asked).new_block(10)
    assert seen == [pinned]
