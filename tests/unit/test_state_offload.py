"""Optimizer states on a disk: the same results in bounded memory, and states that load and save."""

from __future__ import annotations

import copy
import gc
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from offload_cases import (
    assert_alike,
    bytes_in,
    files_in,
    give_gradients,
    groups_of,
    parameters,
    params_of,
    train,
    twins,
)
from torch import nn

from booster import Booster
from booster.optim import CPUAdam, HybridAdam
from booster.optim.nvme_offload import directory, state_file
from booster.optim.nvme_offload.state_file import BlockLayout


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """4 pages: 4096 fp32 numbers."""
    monkeypatch.setattr(state_file, "CHUNK_BYTES", 4 * 4096)


# The same results.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("fraction", [1.0, 0.5, 0.01])
def test_results_are_those_without(tmp_path, dtype, fraction):
    offloaded, plain = twins(tmp_path, dtype, fraction)
    for step in range(4):
        train(offloaded, [step])
        train(plain, [step])
        assert_alike(offloaded, plain)


@pytest.mark.parametrize("fraction", [1.0, 0.6])
def test_results_with_fewer_gradients_in_some_steps(tmp_path, fraction):
    offloaded, plain = twins(tmp_path, fraction=fraction)
    for step in range(6):
        for optimizer in (offloaded, plain):
            params = params_of(optimizer)
            give_gradients(params, step)
            for index in ((0, 4), (1, 2, 5, 7), (), tuple(range(7)), (7,), tuple(range(8)))[step]:
                params[index].grad = None
            optimizer.step()
    assert_alike(offloaded, plain)


def test_memory_in_another_order(tmp_path):
    def make(**settings):
        values = torch.randn(8, 20, 9, 7, generator=torch.Generator().manual_seed(0))
        return CPUAdam([nn.Parameter(values.to(memory_format=torch.channels_last))], lr=0.1, **settings)

    offloaded, plain = make(nvme_offload_fraction=1.0, nvme_offload_dir=tmp_path), make()
    for step in range(3):
        train(offloaded, [step])
        train(plain, [step])
    assert_alike(offloaded, plain)
    assert bytes_in(tmp_path) > 0


def test_a_fused_step(tmp_path):
    offloaded, plain = twins(tmp_path)
    weights = [
        {parameter: torch.zeros(parameter.shape, dtype=torch.bfloat16) for parameter in params_of(optimizer)}
        for optimizer in (offloaded, plain)
    ]
    for step in range(3):
        for optimizer, copies in zip((offloaded, plain), weights, strict=True):
            give_gradients(params_of(optimizer), step)
            optimizer.fused_step(grad_scale=0.25, clip_coef=torch.tensor(0.7), model_params=copies, zero_grads=True)
            assert not any(parameter.grad.any() for parameter in params_of(optimizer))
    assert_alike(offloaded, plain)
    for one, other in zip(*(copies.values() for copies in weights), strict=True):
        assert torch.equal(one, other)


def test_groups_that_are_added_later_get_a_file_of_their_own(tmp_path):
    offloaded, plain = twins(tmp_path)
    for optimizer in (offloaded, plain):
        train(optimizer, range(2))
        optimizer.add_param_group({"params": parameters(shapes=[(2000,), (5,)]), "lr": 0.5})
        train(optimizer, range(2, 4))
    assert_alike(offloaded, plain)
    assert len(files_in(tmp_path)) == 2


def test_files_of_parameters_that_are_gone_are_removed(tmp_path):
    offloaded, _ = twins(tmp_path)
    train(offloaded, [0])
    (before,) = files_in(tmp_path)
    for group in offloaded.param_groups:  # as a plugin does that cuts them
        group["params"][:] = parameters(shapes=[(50,)])
    offloaded.state.clear()
    train(offloaded, [1])
    (after,) = files_in(tmp_path)
    assert after != before


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.9, 1.0])
def test_the_fraction_is_of_bytes(tmp_path, fraction):
    params = parameters(shapes=[(1000,)] * 20)
    optimizer = CPUAdam(params, nvme_offload_fraction=fraction, nvme_offload_dir=tmp_path)
    train(optimizer, [0])
    in_files = sum(optimizer._disk.holds(parameter) for parameter in params)
    assert in_files == round(20 * fraction)
    assert [optimizer._disk.holds(one) for one in params] == [True] * in_files + [False] * (20 - in_files)


def test_a_fraction_too_small_for_any_parameter_is_said(tmp_path, capsys):
    offloaded = CPUAdam(parameters(shapes=[(100,)]), nvme_offload_fraction=0.5, nvme_offload_dir=tmp_path)
    train(offloaded, [0])
    assert "moves no optimizer states" in capsys.readouterr().err


@pytest.mark.parametrize("seed", range(20))
def test_every_element_has_one_place(seed):
    generator = torch.Generator().manual_seed(seed)
    count = int(torch.randint(1, 12, (), generator=generator))
    sizes = [
        (int(torch.randint(1, 3 ** int(torch.randint(1, 10, (), generator=generator)), (), generator=generator)), size)
        for size in torch.tensor([4, 8])[torch.randint(2, (count,), generator=generator)].tolist()
    ]
    planes = BlockLayout(sizes)
    seen = torch.zeros(planes.num_bytes, dtype=torch.int32)
    counted = [0] * count
    for number, chunk in enumerate(planes.chunks):
        assert chunk.start == sum(one.num_bytes for one in planes.chunks[:number])
        for state_range in chunk.ranges:
            itemsize = sizes[state_range.index][1]
            assert counted[state_range.index] == state_range.start
            counted[state_range.index] = state_range.stop
            start = chunk.start + state_range.offset
            assert start == planes.starts[state_range.index] + state_range.start * itemsize
            assert start % 256 == 0
            num_bytes = (state_range.stop - state_range.start) * itemsize
            assert state_range.offset + num_bytes <= chunk.num_bytes
            seen[start : start + num_bytes] += 1
    assert counted == [numel for numel, _ in sizes]
    assert int(seen.max()) == 1


# States.


def test_states_load_into_torch_and_back(tmp_path):
    offloaded, plain = twins(tmp_path)
    for optimizer in (offloaded, plain):
        train(optimizer)
    theirs = torch.optim.Adam(groups_of(parameters()))
    theirs.load_state_dict(copy.deepcopy(offloaded.state_dict()))
    for p, q in zip(params_of(theirs), params_of(plain), strict=True):
        assert torch.equal(theirs.state[p]["exp_avg_sq"], plain.state[q]["exp_avg_sq"])
    other, _ = twins(tmp_path)
    other.load_state_dict(theirs.state_dict())
    for p, q in zip(params_of(other), params_of(plain), strict=True):
        p.data.copy_(q.data)
    for optimizer in (other, plain):
        train(optimizer, range(4, 7))
    assert_alike(other, plain)


def test_saved_states_are_as_small_as_those_in_memory(tmp_path):
    offloaded, plain = twins(tmp_path / "disk")
    for name, optimizer in (("offloaded", offloaded), ("plain", plain)):
        train(optimizer)
        torch.save(optimizer.state_dict(), tmp_path / name)
    assert (tmp_path / "offloaded").stat().st_size == pytest.approx((tmp_path / "plain").stat().st_size, rel=0.01)
    loaded = torch.load(tmp_path / "offloaded", weights_only=True)
    plain.load_state_dict(loaded)
    assert_alike(offloaded, plain)


@pytest.mark.parametrize("how", ["deepcopy", "own state_dict", "by hand", "dropped"])
def test_states_that_come_from_elsewhere_are_taken_over(tmp_path, how):
    offloaded, plain = twins(tmp_path)
    for optimizer in (offloaded, plain):
        train(optimizer, range(2))
    if how == "deepcopy":
        offloaded = copy.deepcopy(offloaded)
        assert len(files_in(tmp_path)) == 0 or gc.collect() >= 0
    elif how == "own state_dict":
        offloaded.load_state_dict(offloaded.state_dict())
    else:
        for optimizer in (offloaded, plain):
            params = params_of(optimizer)
            if how == "dropped":
                del optimizer.state[params[4]], optimizer.state[params[1]]
            else:
                optimizer.state[params[4]]["exp_avg"] = torch.full((5000,), 0.25)
    for optimizer in (offloaded, plain):
        train(optimizer, range(2, 4))
    assert_alike(offloaded, plain)
    assert all(offloaded._disk.holds(one) for one in params_of(offloaded) if one.numel() > 0)


def test_state_tensors_stay_the_same_and_show_the_newest(tmp_path):
    offloaded, plain = twins(tmp_path)
    for optimizer in (offloaded, plain):
        train(optimizer, [0])
    held = [offloaded.state[one]["exp_avg"] for one in params_of(offloaded)]
    for optimizer in (offloaded, plain):
        train(optimizer, [1, 2])
    for tensor, parameter in zip(held, params_of(plain), strict=True):
        assert torch.equal(tensor, plain.state[parameter]["exp_avg"])
    expected = [tensor.clone() for tensor in held]
    del offloaded, optimizer
    gc.collect()
    assert files_in(tmp_path) == []
    for tensor, values in zip(held, expected, strict=True):
        assert torch.equal(tensor, values)  # they outlive the optimizer and its file


def boosted(optimizer_of):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(70, 90), nn.Linear(90, 3, dtype=torch.bfloat16))
    booster = Booster(device="cpu")
    model, optimizer, *_ = booster.boost(model, optimizer_of(model.parameters()))
    return booster, optimizer


@pytest.mark.parametrize("shard", [False, True])
def test_checkpoints(tmp_path, shard):
    def offloaded(params):
        return HybridAdam(params, lr=0.01, nvme_offload_fraction=1.0, nvme_offload_dir=tmp_path / "disk")

    path = tmp_path / ("checkpoint" if shard else "checkpoint.safetensors")
    booster, plain = boosted(lambda params: HybridAdam(params, lr=0.01))
    train(plain.unwrap())
    booster.save_optimizer(plain, path, shard=shard)
    other, loaded = boosted(offloaded)
    other.load_optimizer(loaded, path)
    for p, q in zip(params_of(loaded), params_of(plain), strict=True):
        assert loaded.unwrap()._disk.holds(p)
        for key, value in plain.state[q].items():
            assert torch.equal(loaded.state[p][key], value)
        p.data.copy_(q.data)
    for optimizer in (plain, loaded):
        train(optimizer.unwrap(), range(4, 6))
    assert_alike(loaded.unwrap(), plain.unwrap())
    again = tmp_path / ("again" if shard else "again.safetensors")
    other.save_optimizer(loaded, again, shard=shard)
    back, last = boosted(lambda params: HybridAdam(params))
    back.load_optimizer(last, again)
    for p, q in zip(params_of(last), params_of(plain), strict=True):
        assert torch.equal(last.state[p]["exp_avg"], plain.state[q]["exp_avg"])


# Directories.


def test_the_directory_goes_with_the_optimizer(tmp_path):
    offloaded, _ = twins(tmp_path)
    train(offloaded, [0])
    assert files_in(tmp_path)
    del offloaded
    gc.collect()
    assert list(tmp_path.iterdir()) == []


OFFLOADS = """
import os, signal, sys
import torch
from booster.optim import CPUAdam
parameter = torch.nn.Parameter(torch.ones(5000))
optimizer = CPUAdam([parameter], nvme_offload_fraction=1.0, nvme_offload_dir=sys.argv[1] or None)
parameter.grad = torch.ones(5000)
optimizer.step()
print(optimizer._disk._directory.path, flush=True)
if sys.argv[2] == "fork":
    if os.fork() == 0:
        sys.exit()
    os.wait()
    optimizer.step()
    assert os.path.exists(optimizer._disk._directory.path)
if sys.argv[2] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
"""


def offloading_process(directory, end):
    done = subprocess.run(
        [sys.executable, "-c", OFFLOADS, str(directory), end], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == (-signal.SIGKILL if end == "kill" else 0), done.stderr
    return Path(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(("end", "where"), [("exit", "given"), ("fork", "temporary")])
@pytest.mark.slow
def test_the_directory_goes_with_the_process(tmp_path, monkeypatch, end, where):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    path = offloading_process(tmp_path if where == "given" else "", end)
    assert path.parent == tmp_path
    assert not path.exists()


@pytest.mark.slow
def test_what_a_killed_process_left_is_removed(tmp_path):
    left = offloading_process(tmp_path, "kill")
    assert left.is_dir()
    host, process, start = left.name.split("-")[2:5]
    others = [
        tmp_path / f"booster-states-{host}-{os.getpid()}-{int(directory.psutil.Process().create_time())}-alive",
        tmp_path / f"booster-states-00000000-{process}-{start}-elsewhere",
        tmp_path / "booster-states",
        tmp_path / f"booster-states-{host}-{process}-{start}",
    ]
    for other in others:
        other.mkdir()
    (tmp_path / f"booster-states-{host}-{process}-{start}-link").symlink_to(others[0])
    recycled = tmp_path / f"booster-states-{host}-{os.getpid()}-12345-recycled"
    recycled.mkdir()
    offloaded, _ = twins(tmp_path)
    train(offloaded, [0])
    assert not left.exists()
    assert not recycled.exists()
    assert all(other.exists() for other in others)


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="there is no file system in memory to try")
def test_a_directory_in_memory_is_said(tmp_path, capsys):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as shared:
        offloaded, plain = twins(shared)
        train(offloaded)
        train(plain)
        assert_alike(offloaded, plain)
        assert "on an in-memory file system" in capsys.readouterr().err
    offloaded, _ = twins(tmp_path)
    train(offloaded, [0])
    assert "in-memory file system" not in capsys.readouterr().err or directory._file_system(tmp_path) == "tmpfs"


# Memory.

MEMORY = """
import sys
from pathlib import Path
import torch
from booster import Booster
from booster.optim import HybridAdam

def held():
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return (int(lines["RssAnon"].split()[0]) + int(lines["RssShmem"].split()[0])) * 1024

def boosted(**settings):
    booster = Booster(device="cpu")
    sizes = [20_000_000] + [50_000] * 100
    model = torch.nn.ParameterDict({str(i): torch.nn.Parameter(torch.ones(n)) for i, n in enumerate(sizes)})
    model, optimizer, *_ = booster.boost(model, HybridAdam(model.parameters(), **settings))
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    return booster, optimizer

booster, optimizer = boosted(nvme_offload_fraction=1.0, nvme_offload_dir=sys.argv[1])
small = torch.nn.Parameter(torch.ones(10))
small.grad = torch.ones(10)
HybridAdam([small]).step()  # what the kernel and its threads need
before, peak = held(), 0
def look():
    global peak
    peak = max(peak, held() - before)
from booster.optim.nvme_offload import states
compute = states.OffloadedStep._compute
states.OffloadedStep._compute = lambda *arguments: (compute(*arguments), look())[0]
for _ in range(3):
    optimizer.unwrap().step()
    look()
print(peak)
booster.save_optimizer(optimizer, Path(sys.argv[1]) / "checkpoint", shard=True)
look()
booster.load_optimizer(optimizer, Path(sys.argv[1]) / "checkpoint")
look()
state = optimizer.state_dict()
optimizer.load_state_dict(state)
optimizer.unwrap().step()
look()
print(peak)
"""


@pytest.mark.slow
def test_states_are_not_in_memory(tmp_path):
    done = subprocess.run([sys.executable, "-c", MEMORY, str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    # 200 MB of states; 48 MiB of buffers, and 32 MiB through which a checkpoint is written and read.
    stepping, all_of_it = (int(number) for number in done.stdout.split()[-2:])
    assert stepping < 64e6
    assert all_of_it < 100e6
