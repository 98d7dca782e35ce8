"""The random state of a process: captured exactly, restored exactly, different for ranks that stored none."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from booster.errors import CheckpointError, ConfigError
from booster.rng_state import check_rng_state, fork_rng_state, get_rng_state, set_rng_state, set_seed

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _random_state():
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])


def draw():
    """One number of each kind of draw: normal numbers come in pairs, of which the second may wait."""
    return [
        random.random(),
        random.gauss(0, 1),
        random.getrandbits(40),
        np.random.rand(),
        np.random.standard_normal(),
        np.random.randint(1000),
        torch.rand(()).item(),
        torch.randn(3).sum().item(),
        torch.randperm(7).tolist(),
    ]


def stored(state):
    """What comes back from a file: other tensors with the same elements."""
    return {name: tensor.clone() for name, tensor in state.items()}


class TestRestore:
    @pytest.mark.parametrize("num_draws", range(4))
    def test_the_numbers_that_follow_are_the_same(self, num_draws):
        set_seed(5)
        for _ in range(num_draws):
            draw()
        state = stored(get_rng_state(CPU))
        expected = [draw() for _ in range(3)]
        set_seed(6)
        check_rng_state(state, CPU)
        set_rng_state(state, CPU)
        assert [draw() for _ in range(3)] == expected

    def test_the_second_of_a_pair_of_normal_numbers_is_kept(self):
        set_seed(0)
        random.gauss(0, 1)
        np.random.standard_normal()
        state = get_rng_state(CPU)
        assert state["python_gauss"].numel() == state["numpy_gauss"].numel() == 1
        expected = random.gauss(0, 1), np.random.standard_normal()
        assert get_rng_state(CPU)["numpy_gauss"].numel() == 0
        set_rng_state(state, CPU)
        assert (random.gauss(0, 1), np.random.standard_normal()) == expected

    def test_capturing_draws_nothing(self):
        set_seed(1)
        expected = draw()
        set_seed(1)
        get_rng_state(CPU)
        assert draw() == expected

    def test_only_tensors_that_files_hold(self):
        for tensor in get_rng_state(CPU).values():
            assert tensor.device == CPU
            assert tensor.dtype in (torch.uint8, torch.int64, torch.float64)


class TestDerive:
    def test_a_rank_draws_as_no_other(self):
        set_seed(0)
        state = get_rng_state(CPU)
        draws = []
        for rank in range(1, 9):
            set_rng_state(fork_rng_state(state, rank), CPU)
            draws.append(draw())
        set_rng_state(state, CPU)
        draws.append(draw())
        for numbers in zip(*draws, strict=True):
            assert len({str(number) for number in numbers}) > len(draws) - 2  # randint(1000) may meet once

    def test_it_is_fixed_by_state_and_rank(self):
        set_seed(0)
        state = get_rng_state(CPU)
        first, second = fork_rng_state(state, 3), fork_rng_state(stored(state), 3)
        assert all(torch.equal(first[name], second[name]) for name in first)
        check_rng_state(first, CPU)
        set_seed(1)
        other = fork_rng_state(get_rng_state(CPU), 3)
        assert not any(torch.equal(first[name], other[name]) for name in ("python", "numpy", "torch_cpu"))


class TestDamage:
    @pytest.mark.parametrize(
        ("name", "damage"),
        [
            ("torch_cpu", lambda tensor: tensor[:-8]),
            ("torch_cpu", lambda tensor: tensor.double()),
            ("python", lambda tensor: tensor[:-1]),
            ("python", lambda tensor: tensor + 2**40),
            ("python", lambda tensor: tensor.double()),
            ("python", lambda tensor: tensor[:0]),
            ("numpy", lambda tensor: tensor[:-1]),
            ("numpy", lambda tensor: tensor - 2**40),
            ("numpy", lambda tensor: torch.cat([tensor[:-1], torch.tensor([10**6])])),
            ("numpy", lambda tensor: tensor[:0]),
            ("python_gauss", lambda tensor: torch.ones(2, 2)),
        ],
    )
    def test_it_is_found_and_nothing_changes(self, name, damage):
        set_seed(2)
        state = get_rng_state(CPU)
        expected = draw()
        state[name] = damage(state[name])
        set_seed(2)
        with pytest.raises(CheckpointError, match="take another copy"):
            check_rng_state(state, CPU)
        assert draw() == expected

    def test_a_missing_generator(self):
        state = get_rng_state(CPU)
        del state["numpy"]
        with pytest.raises(CheckpointError, match="lacks numpy"):
            check_rng_state(state, CPU)


class FakeAccelerators:
    """What torch gives for a kind of device, with three of them."""

    def __init__(self, is_initialized=True):
        self.states = {index: torch.Generator().manual_seed(index).get_state() for index in range(3)}
        self.starts = is_initialized

    def is_initialized(self):
        return self.starts

    def get_rng_state(self, device):
        return self.states[device.index]

    def set_rng_state(self, state, device):
        self.states[device.index] = state


@pytest.fixture
def accelerators(monkeypatch):
    fake = FakeAccelerators()
    generator = torch.Generator
    monkeypatch.setattr(torch, "get_device_module", lambda kind: fake)
    monkeypatch.setattr(torch, "Generator", lambda device="cpu": generator())
    monkeypatch.setattr("booster.rng_state.device_type", lambda: "xpu")
    monkeypatch.setattr("booster.rng_state.num_devices", lambda: 3)
    return fake


class TestAccelerators:
    def test_each_has_its_state(self, accelerators):
        state = stored(get_rng_state(torch.device("xpu", 1)))
        assert {"xpu", "xpu.0", "xpu.2"} <= state.keys()
        expected = dict(accelerators.states)
        accelerators.states = dict.fromkeys(range(3), expected[0])
        check_rng_state(state, torch.device("xpu", 1))
        set_rng_state(state, torch.device("xpu", 1))
        assert all(torch.equal(accelerators.states[index], expected[index]) for index in range(3))

    def test_a_ranks_own_device_may_have_another_number(self, accelerators):
        state = get_rng_state(torch.device("xpu", 2))
        set_rng_state(state, torch.device("xpu", 0))
        assert torch.equal(accelerators.states[0], torch.Generator().manual_seed(2).get_state())

    def test_a_run_that_comes_from_the_cpu_seeds_them(self, accelerators, monkeypatch):
        accelerators.starts = False
        state = get_rng_state(CPU)
        assert not any(name.startswith("xpu") for name in state)
        found = []
        for _ in range(2):
            set_rng_state(state, torch.device("xpu", 1))
            found.append(dict(accelerators.states))
        assert all(torch.equal(found[0][index], found[1][index]) for index in range(3))
        assert not torch.equal(found[0][0], found[0][1])

    def test_damage_is_found(self, accelerators):
        state = get_rng_state(torch.device("xpu", 1))
        state["xpu.2"] = state["xpu.2"][:9]
        with pytest.raises(CheckpointError, match="damaged"):
            check_rng_state(state, torch.device("xpu", 1))


def test_another_kind_of_generator_in_numpy():
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        with pytest.raises(ConfigError, match="PCG64"):
            get_rng_state(CPU)
    finally:
        np.random.set_bit_generator(before)
