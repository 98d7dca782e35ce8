"""The Adam kernel at its edges: alignments, tails, rounding, denormals, inf and nan, forks, the process's end."""

from __future__ import annotations

import itertools
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from adam_cases import DTYPES, Operands, changed, load_native, operands, run_native, run_reference, same_bits

from booster.kernels.adam import round_stochastically

FP32, BF16, FP16 = DTYPES
LENGTHS = (0, 1, 2, 15, 16, 17, 31, 32, 33, 63, 100)
STOCHASTIC = changed(stochastic_rounding_seed=11, zero_grads=True)
MODES = {"nearest": changed(zero_grads=True), "stochastic": STOCHASTIC}
# Only rounding happens: nothing decays and nothing is added.
STILL = changed(lr=0.0, weight_decay=0.0)


@pytest.fixture(scope="module")
def native():
    return load_native()


@pytest.fixture
def num_threads():
    """Sets the number of threads; puts it back at the end."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@contextmanager
def _flushed_denormals():
    """Denormals are zero on this thread; torch computes nothing meanwhile: its threads would keep that setting."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU can't flush denormals")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("settings", MODES.values(), ids=MODES.keys())
@pytest.mark.parametrize("dtypes", [(FP32, FP32, None), (FP32, BF16, BF16), (BF16, FP16, FP16), (FP16, FP32, FP32)])
def test_any_alignment_and_length_touches_its_elements_alone(native, dtypes, settings):
    param, grad, copy = dtypes
    whole = operands(130, param=param, grad=grad, copy=copy)
    for name, length, offset in itertools.product(native.instruction_sets(), LENGTHS, range(18)):
        case = whole.clone()
        # Every tensor is at another distance from a boundary.
        parts = [
            tensor[(begin := (offset + shift) % 18) : begin + length] for shift, tensor in enumerate(case.tensors())
        ]
        part = Operands(*parts)
        copied = part.clone()
        run_native(native, [part], settings, instruction_set=name)
        run_native(native, [copied], settings, instruction_set=name)
        assert same_bits(part, copied), (name, length, offset)
        for shift, (tensor, before) in enumerate(zip(case.tensors(), whole.tensors(), strict=True)):
            begin = (offset + shift) % 18
            assert torch.equal(tensor[:begin], before[:begin]), (name, length, offset)
            assert torch.equal(tensor[begin + length :], before[begin + length :]), (name, length, offset)


@pytest.mark.parametrize("copy", DTYPES)
def test_large_copies_of_any_alignment(native, copy):
    """They are written past the caches, which takes whole aligned vectors."""
    numel = 2**20 + 7
    whole = operands(numel, grad=BF16)
    whole.copy = torch.zeros(numel + 40, dtype=copy)
    for name, offset in itertools.product(native.instruction_sets(), (0, 1, 4, 8, 16, 32)):
        if name == "baseline" and offset > 1:
            continue  # it takes seconds, and one lane at a time is always aligned
        case = whole.clone()
        before, case.copy, behind = case.copy.split([offset, numel, 40 - offset])
        run_native(native, [case], instruction_set=name)
        assert torch.equal(case.copy, case.param.to(copy)), (name, offset)
        assert not before.any()
        assert not behind.any()


@pytest.mark.parametrize("dtypes", list(itertools.product(DTYPES, DTYPES, (None, *DTYPES))))
def test_an_element_alone_has_the_bits_it_has_within_a_vector(native, dtypes):
    param, grad, copy = dtypes
    whole = operands(70, param=param, grad=grad, copy=copy)
    for name in native.instruction_sets():
        together = run_native(native, [whole.clone()], instruction_set=name)[0]
        singles = whole.clone()
        run_native(native, [singles.slice(i, i + 1) for i in range(70)], instruction_set=name)
        assert same_bits(singles, together), name


def _still(native, param, copy, name, settings=STILL):
    """Returns a working copy of these values, which no step changes."""
    zeros = torch.zeros(param.numel())
    case = Operands(param.clone(), zeros, zeros.clone(), zeros.clone(), torch.empty(param.numel(), dtype=copy))
    run_native(native, [case], settings, instruction_set=name)
    return case


def _assert_same_numbers(ours, theirs):
    """The same bits, except that one nan is as good as another."""
    is_nan = theirs.isnan()
    assert torch.equal(ours.isnan(), is_nan)
    assert torch.equal(ours[~is_nan], theirs[~is_nan])
    assert torch.equal(ours[~is_nan].signbit(), theirs[~is_nan].signbit())


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_every_number_of_16_bits_is_read_and_written_back(native, dtype):
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    for name in native.instruction_sets():
        case = _still(native, numbers, FP32, name)
        _assert_same_numbers(case.copy, numbers.float())
        _assert_same_numbers(case.param, numbers)


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_rounding_to_16_bits_is_torchs(native, dtype):
    random = torch.Generator().manual_seed(0)
    any_bits = torch.randint(-(2**31), 2**31, (200_003,), generator=random).to(torch.int32).view(FP32)
    # The numbers of 16 bits, the middles between them, and what lies next to both.
    kept = {BF16: 16, FP16: 13}[dtype]
    near = (torch.arange(-(2**31), 2**31, 2 ** (kept - 1) * (1 if dtype is BF16 else 5), dtype=torch.int64)).to(
        torch.int32
    )
    near = torch.cat([near - 1, near, near + 1]).view(FP32)
    scaled = torch.randn(200_003, generator=random) * 2.0 ** torch.randint(-30, 18, (200_003,), generator=random)
    numbers = torch.cat([any_bits, near, scaled])
    assert numbers.isnan().any()
    for name in native.instruction_sets():
        _assert_same_numbers(_still(native, numbers, dtype, name).copy, numbers.to(dtype))


def test_a_nan_whose_bits_are_cut_off_stays_one():
    numbers = torch.tensor([0x7F800001, 0x7FFFFFFF, -0x7FFFFF, -1], dtype=torch.int32).view(FP32)
    assert numbers.isnan().all()
    assert round_stochastically(numbers, seed=1).isnan().all()


def test_stochastic_rounding_is_that_of_the_reference(native):
    seed = 2**63 + 12345
    cases = [operands(numel, seed=numel, grad=BF16, copy=BF16) for numel in (3, 70_001, 1, 5000)]
    for name in native.instruction_sets():
        ours = run_native(
            native, [case.clone() for case in cases], changed(stochastic_rounding_seed=seed), instruction_set=name
        )
        for number, case in enumerate(ours):
            assert torch.equal(case.copy, round_stochastically(case.param, seed, number)), (name, number)
            assert number in (0, 2) or not torch.equal(case.copy, case.param.bfloat16())
    theirs = run_reference([case.clone() for case in cases], changed(stochastic_rounding_seed=seed))
    for number, case in enumerate(theirs):
        assert torch.equal(case.copy, round_stochastically(case.param, seed, number))


def test_stochastic_rounding_of_the_reference_does_not_depend_on_its_blocks():
    numel = 512 * 1024 + 77
    case = run_reference([operands(numel, copy=BF16)], changed(stochastic_rounding_seed=3))[0]
    assert torch.equal(case.copy, round_stochastically(case.param, 3))


@pytest.mark.parametrize("value", [1.0 + 2.0**-10, -3.1, 1e-40, 2.0**-133 * 0.3, 6.5e4])
def test_stochastic_rounding_is_right_on_average(native, value):
    numel = 100_003
    values = torch.full((numel,), value)
    rounded = _still(native, values, BF16, "", changed(STILL, stochastic_rounding_seed=5)).copy.double()
    low, high = rounded.min(), rounded.max()
    exact = values[0].double()
    assert low < exact < high
    assert rounded.unique().numel() == 2
    # The number of those rounded up is binomial: five standard deviations hold but once in two million.
    share = (exact - low) / (high - low)
    deviation = (share * (1 - share) * numel).sqrt()
    assert abs((rounded == high).sum() - share * numel) < 5 * deviation


def test_stochastic_rounding_leaves_what_fits():
    numbers = torch.tensor([0.0, -0.0, 1.0, -2.5, float("inf"), -float("inf"), 1e-40]).bfloat16().float().repeat(1000)
    rounded = round_stochastically(numbers, seed=9)
    assert torch.equal(rounded.view(torch.int16), numbers.bfloat16().view(torch.int16))


def test_chances_of_seeds_tensors_and_neighbours_are_independent():
    numel = 40_000
    values = torch.full((numel,), 1.0 + 2.0**-8)  # half way: up or down with the same chance
    choices = [
        round_stochastically(values, seed, number, begin) > 1.0
        for seed, number, begin in [
            (0, 0, 0),
            (1, 0, 0),
            (0, 1, 0),
            (1, 1, 0),
            (-1, 0, 0),
            (0, 0, 2**32),
            (2**32, 0, 0),
        ]
    ]
    choices += [choices[0].roll(shift) for shift in (1, 2, 16)]
    for one, other in itertools.combinations(choices, 2):
        assert abs(int((one == other).sum()) - numel / 2) < 5 * numel**0.5 / 2


SPECIAL = [0.0, -0.0, 1.0, -1.0, 1e-40, -1e-45, 1e-30, 1e30, -3e38, float("inf"), -float("inf"), float("nan")]


@pytest.mark.parametrize("decoupled", [True, False], ids=["AdamW", "Adam"])
@pytest.mark.parametrize("bias_correction", [True, False])
def test_inf_and_nan_are_those_of_the_reference(native, decoupled, bias_correction):
    squares = [0.0, 1e-40, 1.0, 1e30, float("inf"), float("nan")]
    values = torch.tensor(list(itertools.product(SPECIAL, SPECIAL, SPECIAL, squares))).t()
    settings = changed(decoupled_weight_decay=decoupled, bias_correction=bias_correction, lr=1e-3)
    case = Operands(*(row.clone() for row in values), torch.empty(values.shape[1], dtype=BF16))
    (theirs,) = run_reference([case.clone()], settings)
    results = [run_native(native, [case.clone()], settings, instruction_set=name) for name in native.instruction_sets()]
    for other in results[1:]:
        # The sign of a new nan differs between instructions.
        for a, b in zip(results[0][0].tensors(), other[0].tensors(), strict=True):
            _assert_same_numbers(a, b)
    for mine, its in zip(results[0][0].tensors(), theirs.tensors(), strict=True):
        assert torch.equal(mine.isnan(), its.isnan())
        assert torch.equal(mine.isinf(), its.isinf())
        finite = its.isfinite()
        tolerance = 2.0**-7 if mine.dtype is BF16 else 1e-6
        torch.testing.assert_close(
            mine[finite], its[finite], rtol=tolerance, atol=1e-35
        )  # denormal products on the way
    assert case.param.isnan().any()


@pytest.mark.parametrize("grad_scale", [float("inf"), float("nan"), 0.0])
def test_a_grad_scale_that_is_no_number_reaches_the_states(native, grad_scale):
    case = operands(100)
    case.grad[0] = 0.0
    settings = changed(clip_coef=torch.tensor(grad_scale))
    (theirs,), (ours,) = run_reference([case.clone()], settings), run_native(native, [case.clone()], settings)
    assert torch.equal(ours.exp_avg.isfinite(), theirs.exp_avg.isfinite())
    assert bool(ours.exp_avg.isfinite().all()) == (grad_scale == 0.0)


def _denormal_case(numel):
    """Gradients, moments and parameters whose true results are denormal."""
    return Operands(
        *(torch.full((numel,), value) for value in (3e-39, 2e-39, 1e-39, 1e-39)), torch.zeros(numel).bfloat16()
    )


def test_denormals_are_kept(native):
    settings = changed(lr=1e-45, weight_decay=0.0)
    (theirs,) = run_reference([_denormal_case(33)], settings)
    for name in native.instruction_sets():
        (ours,) = run_native(native, [_denormal_case(33)], settings, instruction_set=name)
        for mine, its in zip(ours.tensors(), theirs.tensors(), strict=True):
            assert (mine.abs() > 0).all()
            torch.testing.assert_close(mine.double(), its.double(), rtol=0, atol=3e-45)


@pytest.mark.parametrize("threads", [1, 3])
def test_denormals_are_flushed_on_all_threads_if_on_the_callers(native, num_threads, threads):
    num_threads(threads)
    flushed, kept = _denormal_case(300_000), _denormal_case(300_000)
    with _flushed_denormals():
        run_native(native, [flushed])
    # The threads may be torch's: they are given back as they were.
    torchs = torch.full((300_000,), 1e-39) * 1.5
    run_native(native, [kept])
    assert not flushed.exp_avg.view(torch.int32).any()
    assert kept.exp_avg.view(torch.int32).all()
    assert torchs.view(torch.int32).all()


FORKING = """
import os, signal, threading, torch
from adam_cases import operands, run_native, same_bits
from booster.kernels.loader import load_kernel

native = load_kernel("adam")
torch.set_num_threads(3)
expected = run_native(native, [operands(300_007)])
fresh, again, at_once = [operands(300_007)], [operands(300_007)], [operands(300_007) for _ in range(4)]
child = os.fork()
if child == 0:
    signal.alarm(30)  # one that waits for ever would outlive this test
    run_native(native, fresh)  # torch's threads did not come along: with threads of the child's own
    num_threads = len(os.listdir("/proc/self/task"))
    callers = [threading.Thread(target=run_native, args=(native, [case])) for case in at_once]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    grandchild = os.fork()
    if grandchild == 0:
        signal.alarm(30)
        run_native(native, again)  # nor did the child's
        torch.set_num_threads(1)
        os._exit(0 if same_bits(again, expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1]) == 0, "the grandchild's step is wrong"
    torch.set_num_threads(1)
    is_right = same_bits(fresh, expected) and all(same_bits([case], expected) for case in at_once)
    os._exit(0 if is_right and num_threads >= 3 else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "the child's step is wrong"
run_native(native, fresh)
assert same_bits(fresh, expected), "the parent's step after the fork is wrong"
print("done")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="forks, and counts threads in /proc")
def test_a_forked_child_steps_and_the_process_ends(native):
    # Whatever waits for the pool's threads, in the child or at the end, would wait for ever.
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKING],
        cwd=Path(__file__).parent.parent / "cases",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.stdout == "done\n", run.stderr
    assert run.returncode == 0
