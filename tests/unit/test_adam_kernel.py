"""The Adam kernel against torch.optim, an fp64 reference and plain torch: dtypes, settings, many tensors, threads."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch
from adam_cases import (
    DTYPES,
    SETTINGS,
    UNIT,
    Operands,
    changed,
    load_native,
    operands,
    run_native,
    run_reference,
    same_bits,
)

from booster.kernels import adam
from booster.kernels.adam import adam_step

FP32, BF16, FP16 = DTYPES
BIG = 300_007  # elements: more than one thread takes, and not whole vectors


@pytest.fixture(scope="module")
def native():
    return load_native()


@pytest.fixture
def num_threads():
    """Sets the number of threads; puts it back at the end."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def _torch_optimizer(params, *, decoupled, fused=True):
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    return kind(params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, fused=fused)


def _trained(initial, grads, decoupled, dtype):
    param = initial.to(dtype, copy=True).requires_grad_()
    optimizer = _torch_optimizer([param], decoupled=decoupled)
    for grad in grads:
        param.grad = grad.to(dtype)
        optimizer.step()
    return param.detach()


def _trained_by_us(initial, grads, decoupled, step=adam_step):
    param, exp_avg, exp_avg_sq = initial.clone(), torch.zeros_like(initial), torch.zeros_like(initial)
    for number, grad in enumerate(grads, start=1):
        step(
            [param],
            [grad.clone()],
            [exp_avg],
            [exp_avg_sq],
            [number],
            lr=1e-3,
            betas=(0.9, 0.999),
            eps=1e-8,
            weight_decay=0.1,
            decoupled_weight_decay=decoupled,
        )
    return param


def _hundred_steps(seed=0):
    """Initial values in 1..2, where all numbers have one spacing, and gradients down to where eps counts."""
    random = torch.Generator().manual_seed(seed)
    initial = torch.rand(20_011, generator=random) * 0.6 + 1.2
    scale = 10.0 ** (torch.rand(20_011, generator=random) * 12 - 10)
    return initial, [torch.randn(20_011, generator=random) * scale for _ in range(100)]


@pytest.mark.slow
@pytest.mark.parametrize("decoupled", [True, False], ids=["AdamW", "Adam"])
def test_a_hundred_steps_are_those_of_torch(native, decoupled):
    initial, grads = _hundred_steps()
    difference = (_trained_by_us(initial, grads, decoupled) - _trained(initial, grads, decoupled, FP32)).abs()
    # Values stay below 2. A step rounds the parameter once here and twice in torch, each time by 2 * UNIT at most; the
    # change itself, below 2e-3, has a relative error below 200 * UNIT after as many roundings of the moments. Errors
    # add up at worst; as they are random, they grow by the square root of the steps on average.
    worst = 3 * 2 * UNIT + 2e-3 * 200 * UNIT
    assert difference.max() <= 100 * worst
    assert difference.mean() <= 10 * worst


@pytest.mark.parametrize("decoupled", [True, False], ids=["AdamW", "Adam"])
def test_a_hundred_steps_are_as_close_to_exact_ones_as_torchs(native, decoupled):
    initial, grads = _hundred_steps(seed=1)
    exact = _trained(initial, grads, decoupled, torch.float64)
    ours = (_trained_by_us(initial, grads, decoupled) - exact).abs().mean()
    theirs = (_trained(initial, grads, decoupled, FP32) - exact).abs().mean()
    assert ours <= 1.1 * theirs
    assert theirs > 0


def _assert_close(ours, theirs, settings):
    """Compares a step of the kernel with one of plain torch; see the tests of a hundred steps for the roundings."""
    # torch computes both moments by the same operations, but may round the product within the second one.
    assert torch.equal(ours.exp_avg.isnan(), theirs.exp_avg.isnan())
    torch.testing.assert_close(ours.exp_avg, theirs.exp_avg, rtol=4 * UNIT, atol=0)
    torch.testing.assert_close(ours.exp_avg_sq, theirs.exp_avg_sq, rtol=8 * UNIT, atol=0)
    for result in ("param", "copy"):
        mine, its = getattr(ours, result), getattr(theirs, result)
        if mine is None:
            continue
        # A value near the middle of two neighbours may be rounded to either: by one spacing, and rarely.
        spacing = {FP32: 4 * UNIT, BF16: 2.0**-7, FP16: 2.0**-10}[mine.dtype]
        smallest = {FP32: 0, BF16: 0, FP16: 2.0**-24}[mine.dtype]
        torch.testing.assert_close(mine, its, rtol=spacing, atol=100 * settings.lr * 20 * UNIT + smallest)
        if mine.dtype is not FP32:
            assert (mine != its).float().mean() < 1e-3


@pytest.mark.parametrize("seed", [None, 5], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("copy", [None, *DTYPES])
@pytest.mark.parametrize("grad", DTYPES)
@pytest.mark.parametrize("param", DTYPES)
def test_every_dtype(native, param, grad, copy, seed):
    settings = changed(grad_scale=0.5, zero_grads=True, stochastic_rounding_seed=seed)
    case = operands(4099, param=param, grad=grad, copy=copy)
    (theirs,) = run_reference([case.clone()], settings)
    ours = [run_native(native, [case.clone()], settings, instruction_set=name) for name in native.instruction_sets()]
    for other in ours[1:]:
        assert same_bits(ours[0], other)
    _assert_close(ours[0][0], theirs, settings)
    assert not ours[0][0].grad.any()
    assert not theirs.grad.any()


SETTINGS_CASES = {
    "AdamW": {},
    "Adam": {"decoupled_weight_decay": False},
    "no decay": {"weight_decay": 0.0},
    "no correction": {"bias_correction": False},
    "small beta1": {"betas": (0.3, 0.6)},
    "no momentum": {"betas": (0.0, 0.9)},
    "large eps": {"eps": 0.1},
    "multiplied": {"grad_scale": 3.0},
    "by a tensor": {"grad_scale": 3.0, "clip_coef": torch.tensor(0.1)},
    "by a vector": {"clip_coef": torch.tensor([7.0])},
    "zeroing": {"zero_grads": True},
}


@pytest.mark.parametrize("step", [1, 2, 1000, 10**7])
@pytest.mark.parametrize("values", SETTINGS_CASES.values(), ids=SETTINGS_CASES.keys())
def test_every_setting(native, values, step):
    settings = changed(**values)
    case = operands(1027, copy=BF16)
    (theirs,) = run_reference([case.clone()], settings, steps=[step])
    results = [
        run_native(native, [case.clone()], settings, steps=[step], instruction_set=name)
        for name in native.instruction_sets()
    ]
    assert all(same_bits(results[0], other) for other in results[1:])
    (ours,) = results[0]
    _assert_close(ours, theirs, settings)
    assert torch.equal(ours.copy, ours.param.bfloat16())
    assert torch.equal(ours.grad, torch.zeros_like(case.grad) if settings.zero_grads else case.grad)
    assert not torch.equal(ours.param, case.param)


def test_settings_matter():
    """Every one of the cases above gives another result than AdamW, or their comparison would show nothing."""
    plain = run_reference([operands(1027)])[0]
    for name, values in SETTINGS_CASES.items():
        if name not in ("AdamW", "zeroing"):
            other = run_reference([operands(1027)], changed(**values))[0]
            assert (other.param != plain.param).float().mean() > 0.5, name


def _many(sizes):
    dtypes = itertools.cycle(itertools.product(DTYPES, DTYPES, (None, *DTYPES)))
    return [
        operands(size, seed=number, param=param, grad=grad, copy=copy)
        for number, (size, (param, grad, copy)) in enumerate(zip(sizes, dtypes, strict=False))
    ]


@pytest.mark.parametrize(
    "sizes",
    [[BIG], [5] * 3000, [BIG, 1, 0, 7, 65_536, 64, 3], [10] * 300 + [BIG], [BIG] + [1000] * 70, [0], [0, 0, 1]],
    ids=["one", "tiny", "mixed", "one after many", "many after one", "empty", "nearly empty"],
)
def test_many_tensors_give_the_bits_of_each_alone_for_any_number_of_threads(native, num_threads, sizes):
    cases = _many(sizes)
    steps = [1 + number % 3 for number in range(len(sizes))]
    num_threads(1)
    alone = [run_native(native, [case.clone()], steps=[step])[0] for case, step in zip(cases, steps, strict=True)]
    for threads in (1, 2, 3, 5, 64):
        num_threads(threads)
        assert same_bits(run_native(native, [case.clone() for case in cases], steps=steps), alone), threads


def test_a_million_elements_on_every_instruction_set(native):
    case = operands(1_000_003, grad=BF16, copy=BF16)
    settings = changed(zero_grads=True, clip_coef=torch.tensor(0.25))
    sets = [name for name in native.instruction_sets() if name != "baseline"] or ["baseline"]
    ours = [run_native(native, [case.clone()], settings, instruction_set=name)[0] for name in sets]
    _assert_close(ours[0], run_reference([case.clone()], settings)[0], settings)
    assert all(same_bits(ours[0], other) for other in ours)


def test_two_threads_of_python_step_at_once(native, num_threads):
    num_threads(3)
    cases = [operands(BIG, seed=seed) for seed in range(4)]
    alone = [run_native(native, [case.clone()])[0] for case in cases]
    together = [case.clone() for case in cases]
    threads = [threading.Thread(target=run_native, args=(native, [case])) for case in together]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert same_bits(together, alone)


def _front(case, **values):
    """Calls the public function with the settings of these tests."""
    adam_step(
        [case.param],
        [case.grad],
        [case.exp_avg],
        [case.exp_avg_sq],
        [3],
        lr=SETTINGS.lr,
        betas=SETTINGS.betas,
        eps=SETTINGS.eps,
        weight_decay=SETTINGS.weight_decay,
        model_params=[case.copy],
        **values,
    )
    return case


def test_the_front_passes_everything_on(native):
    values = {
        "decoupled_weight_decay": False,
        "bias_correction": False,
        "grad_scale": 2.0,
        "clip_coef": torch.tensor(0.7),
        "zero_grads": True,
        "stochastic_rounding_seed": -3,
    }
    case = operands(1000, copy=BF16)
    assert same_bits(_front(case.clone(), **values), run_native(native, [case.clone()], changed(**values))[0])
    assert same_bits(_front(case.clone()), run_native(native, [case.clone()])[0])


def test_the_front_takes_the_reference_where_there_is_no_kernel(monkeypatch):
    case = operands(1000, copy=FP16)
    expected = run_reference([case.clone()])[0]
    monkeypatch.setattr(adam, "load_kernel", lambda name: None)
    assert same_bits(_front(case), expected)


@pytest.mark.parametrize("state", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("param", [torch.float64, torch.float32])
def test_other_dtypes_are_the_references(native, param, state):
    case = operands(1000)
    case = Operands(case.param.to(param), case.grad.to(param), case.exp_avg.to(state), case.exp_avg_sq.to(state))
    expected = run_reference([case.clone()])[0]
    assert same_bits(_front(case), expected)
    assert case.param.dtype is param
    assert case.exp_avg.dtype is state


def test_fp64_is_computed_in_fp64():
    param = torch.randn(1000, dtype=torch.float64)
    grads = [torch.randn(1000, dtype=torch.float64) for _ in range(5)]
    assert torch.equal(_trained_by_us(param, grads, True), _trained(param, grads, True, torch.float64))


def test_autograd_notices_the_step(native):
    weight = torch.randn(100, requires_grad=True)
    case = Operands(weight, torch.randn(100), torch.zeros(100), torch.zeros(100))
    loss = (weight * weight).sum()
    _front(case)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_wrong_tensors_are_refused():
    good = operands(10)
    for name in ("param", "grad", "exp_avg", "exp_avg_sq", "copy"):
        for wrong in (torch.zeros(11), torch.zeros(20)[::2], torch.zeros(10, device="meta")):
            case = good.clone()
            setattr(case, name, wrong)
            with pytest.raises(AssertionError):
                _front(case)
    with pytest.raises(AssertionError):
        _front(good, clip_coef=torch.ones(2))
    with pytest.raises(AssertionError):
        _front(good, clip_coef=torch.ones((), dtype=torch.float64))
    lists = [[good.param], [good.grad], [good.exp_avg], [good.exp_avg_sq]]
    with pytest.raises((ValueError, AssertionError)):
        adam_step(*lists, [1, 2], lr=1.0, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0)
    with pytest.raises(ValueError, match="argument"):
        adam_step(lists[0] * 2, *lists[1:], [1], lr=1.0, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0)


def test_an_unknown_instruction_set_is_refused(native):
    with pytest.raises(ValueError, match="instruction set 'sse9'"):
        run_native(native, [operands(10)], instruction_set="sse9")
