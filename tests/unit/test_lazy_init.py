"""Models built without memory: filled later, in any order, they hold the numbers of an ordinary build."""

from __future__ import annotations

import contextlib
import copy
import math
import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn
from zoo import get_model, model_names

from booster import ConfigError, LazyInitContext
from booster.lazy_init import is_lazy, materialize, materialize_tensor

SEED = 1234
SIDE = 300  # a square of floats that is lazy by default


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.register_buffer("mask", torch.tril(torch.ones(16, 16)).view(1, 1, 16, 16), persistent=False)


class TiedGPT(nn.Module):
    """Initialised by `apply`, scaled by depth, its head tied to its embedding."""

    def __init__(self, width=24, depth=3, words=40):
        super().__init__()
        self.words, self.positions = nn.Embedding(words, width, padding_idx=2), nn.Embedding(16, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight
        self.rates = torch.linspace(0, 0.1, depth).tolist()
        self.apply(self._initialise)
        for name, parameter in self.named_parameters():
            if name.endswith("out.weight"):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * depth))

    def _initialise(self, module):
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias) if module.bias is not None else None
        elif isinstance(module, nn.Embedding):
            module.weight.data.normal_(mean=0.0, std=0.02)
            if module.padding_idx is not None:
                module.weight.data[module.padding_idx].zero_()


class ByHand(nn.Module):
    """What people do in constructors."""

    def __init__(self, side=20):
        super().__init__()
        self.old_style = nn.Parameter(torch.Tensor(side, side))
        self.old_style.data.uniform_(-1, 1)
        self.legacy = nn.Parameter(torch.FloatTensor(side, side).normal_())
        self.drawn = nn.Parameter(torch.randn(side, side) * 0.02 + torch.rand(side, side))
        self.narrow = nn.Parameter(torch.randn(side, side))
        self.narrow.data = self.narrow.data.half()
        with torch.no_grad():
            self.drawn[2:5].fill_(3.0)
            self.drawn.view(-1)[::7].normal_()
            self.drawn[:, torch.arange(side) % 2 == 0] += 5
            self.drawn.t()[1].copy_(self.drawn[0])
        generator = torch.Generator().manual_seed(3)
        self.own_generator = nn.Parameter(torch.empty(side, side).normal_(generator=generator))
        self.same_generator = nn.Parameter(torch.randn(side, side, generator=generator))
        self.register_buffer("table", _positions(side))
        self.register_buffer("causal", torch.full((side, side), float("-inf")).triu(1).bool())
        self.register_buffer("order", torch.randperm(side * side))
        self.register_buffer("table_copy", copy.deepcopy(self.table))
        self.orthogonal, self.sparse = nn.Linear(side, side), nn.Linear(side, side)
        nn.init.orthogonal_(self.orthogonal.weight, gain=0.5)
        nn.init.sparse_(self.sparse.weight, 0.3)
        self.sharing = nn.Linear(side, side)
        self.sharing.weight.data = self.sparse.weight.data
        self.orthogonal.bias.data.fill_(float(self.sparse.weight.detach().std()))
        self.kernel = nn.Conv2d(6, 6, 5).to(memory_format=torch.channels_last)
        self.wide = nn.Linear(side, side).double().requires_grad_(False)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(side, side))
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(side, side))
        self.conjugate = nn.Parameter(torch.randn(side, side, dtype=torch.cfloat).conj())
        self.draws = nn.Buffer(torch.multinomial(torch.ones(side).expand(side, side), side, replacement=True))
        self.coins = nn.Buffer(torch.empty(side, side).bernoulli_(0.3))
        self.dropped = nn.Buffer(nn.functional.dropout(torch.ones(side, side)))
        if self.drawn.mean() > 0:
            self.more = nn.Linear(side, side)


def _positions(side):
    table = torch.zeros(side, 8)
    angles = torch.arange(side).unsqueeze(1) * torch.exp(torch.arange(0, 8, 2) * -0.1)
    table[:, 0::2] = torch.sin(angles)
    table[:, 1::2] = torch.cos(angles)
    return table.unsqueeze(0)


def _copied_layers():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.TransformerEncoder(layer, num_layers=3)


def _with_default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        return nn.Sequential(nn.Linear(9, 9), nn.LayerNorm(9))
    finally:
        torch.set_default_dtype(torch.float32)


BUILDERS = {
    "linear": lambda: nn.Linear(30, 20),
    "embedding": lambda: nn.Embedding(30, 7, padding_idx=3),
    "norms": lambda: nn.Sequential(nn.LayerNorm(9), nn.BatchNorm2d(5), nn.GroupNorm(2, 4), nn.RMSNorm(6)),
    "conv": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ConvTranspose1d(4, 4, 3)),
    "lstm": lambda: nn.LSTM(10, 12, num_layers=2, bidirectional=True),
    "attention": lambda: nn.MultiheadAttention(12, 3, kdim=5, vdim=7),
    "encoder": _copied_layers,
    "transformer": lambda: nn.Transformer(16, 2, 2, 2, 32, batch_first=True),
    "tied_gpt": TiedGPT,
    "by_hand": ByHand,
    "half": lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).to(torch.bfloat16),
    "double_by_default": _with_default_dtype,
    "deep_copies": lambda: nn.ModuleList(copy.deepcopy(nn.ModuleList([TiedGPT(), Block(8)])) for _ in range(2)),
}


def _build(build, context=None):
    """Returns the model and the generator's state after it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        if context is None:
            model = build()
        else:
            with context:
                model = build()
        return model, torch.get_rng_state()


def _tensors(model):
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return dict(named)


def _assert_same(actual, expected):
    assert type(actual) is type(expected)
    assert (actual.dtype, actual.shape, actual.stride()) == (expected.dtype, expected.shape, expected.stride())
    assert actual.requires_grad == expected.requires_grad
    _assert_equal_bits(actual, expected)


def _assert_equal_bits(actual, expected):
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    bits = [tensor.detach().resolve_conj().reshape(-1).contiguous().view(torch.uint8) for tensor in (actual, expected)]
    assert torch.equal(*bits)


def _check_build(build, eager_below_bytes=0):
    expected, state_after = _build(build)
    lazy, lazy_state_after = _build(build, LazyInitContext(eager_below_bytes=eager_below_bytes))
    assert torch.equal(state_after, lazy_state_after)
    wanted, found = _tensors(expected), _tensors(lazy)
    assert list(wanted) == list(found)
    names, before = list(found), {name: id(tensor) for name, tensor in found.items()}
    state = torch.get_rng_state()
    for _ in range(2):
        random.Random(SEED).shuffle(names)
        for name in names:
            _assert_equal_bits(materialize_tensor(found[name]), wanted[name])
    num_lazy = sum(is_lazy(tensor) for tensor in found.values())
    assert materialize(lazy) is lazy
    assert torch.equal(torch.get_rng_state(), state)
    for name, tensor in _tensors(lazy).items():
        assert id(tensor) == before[name]
        assert not is_lazy(tensor)
        _assert_same(tensor, wanted[name])
    groups = [[[name for name in side if side[name] is tensor] for tensor in side.values()] for side in (wanted, found)]
    assert groups[0] == groups[1]
    return num_lazy


@pytest.mark.parametrize("name", BUILDERS)
def test_a_filled_model_is_the_ordinary_one(name):
    assert _check_build(BUILDERS[name]) >= 1


@pytest.mark.parametrize("name", model_names())
def test_a_filled_model_of_the_zoo_is_the_ordinary_one(name):
    assert _check_build(get_model(name).construct) >= 4


@pytest.mark.parametrize("side", [20, 200])
def test_small_tensors_are_made_at_once(side):
    num_lazy = _check_build(lambda: ByHand(side), eager_below_bytes=64 * 1024)
    assert (num_lazy > 0) == (side == 200)


def test_tensors_that_share_memory_share_it_when_filled():
    with LazyInitContext(eager_below_bytes=0):
        model = ByHand()
        model.kept = [model.table[:, :3], {"again": model.drawn.data}]
    materialize(model)
    assert model.sharing.weight.data_ptr() == model.sparse.weight.data_ptr()
    assert torch.equal(model.kept[0], model.table[:, :3])
    assert model.kept[1]["again"].data_ptr() == model.drawn.data_ptr()


def test_deep_copies_of_buffers_stay_lazy_and_share_as_the_originals_do():
    with LazyInitContext():
        model = nn.Module()
        model.register_buffer("whole", torch.ones(SIDE, SIDE).cumsum(0))
        model.register_buffer("part", model.whole[1:])
        twin = copy.deepcopy(model)
        twin.whole.mul_(2)
    assert is_lazy(twin.whole)
    materialize(twin)
    assert twin.part.data_ptr() == twin.whole[1:].data_ptr()
    assert torch.equal(twin.part, torch.arange(2.0, SIDE + 1).mul(2).unsqueeze(1).expand(-1, SIDE))
    assert torch.equal(materialize_tensor(model.part) * 2, twin.part)


TRUNCATIONS = {
    "wide": {"std": 0.02},
    "narrow": {"std": 0.02, "a": -0.03, "b": 0.01},
    "tail": {"mean": 0.1, "std": 0.02, "a": 0.13, "b": 0.16},
    "asymmetric with a generator": {"a": -0.5, "b": 3.0, "generator": True},
}


def _truncate(tensor, generator=False, **bounds):
    nn.init.trunc_normal_(tensor, generator=torch.Generator().manual_seed(5) if generator else None, **bounds)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=() if dtype is torch.float32 or name == "tail" else pytest.mark.slow)
        for name in TRUNCATIONS
        for dtype in (torch.float32, torch.bfloat16, torch.float64)
    ],
)
@pytest.mark.filterwarnings("ignore:mean is more than 2 std:UserWarning")
def test_truncated_draws_are_one_call_whatever_they_take(name, dtype):
    def build():
        model = nn.ParameterList([torch.empty(SIDE, SIDE, dtype=dtype), torch.ones(SIDE, SIDE, dtype=dtype).t()])
        for parameter in (*model, model[0].data[7:90, 3:], model[1].data):
            _truncate(parameter, **TRUNCATIONS[name])
        model.append(torch.randn(SIDE, SIDE))
        return model

    assert _check_build(build) == 3


def test_mistakes_in_truncated_draws_are_those_of_torch():
    messages = []
    for context in (contextlib.nullcontext(), LazyInitContext()):
        with context:
            tensor = torch.ones(SIDE, SIDE)
            with pytest.warns(UserWarning, match="more than 2 std"):
                nn.init.trunc_normal_(tensor, mean=5.0)
            with pytest.raises((TypeError, ZeroDivisionError)) as caught:
                nn.init.trunc_normal_(tensor, std=0)
            messages.append(str(caught.value))
    assert messages[0] == messages[1]
    materialize_tensor(tensor)  # and warns no more


# Every operator of a program: it takes the tensors there are, and a source of choices.
PROGRAM = (
    lambda t, pick: t.append(torch.randn(8, 8)),
    lambda t, pick: t.append(torch.rand(8, 8, generator=torch.Generator().manual_seed(pick.randrange(9)))),
    lambda t, pick: t.append(torch.zeros(8, 8)),
    lambda t, pick: t.append(torch.arange(64.0).view(8, 8)),
    lambda t, pick: t.append(pick.choice(t).clone()),
    lambda t, pick: t.append(pick.choice(t) + pick.choice(t)),
    lambda t, pick: t.append(pick.choice(t) @ pick.choice(t).sign()),
    lambda t, pick: t.append(torch.linalg.qr(pick.choice(t).nan_to_num(0, 1, -1).clamp(-2, 2))[pick.randrange(2)]),
    lambda t, pick: t.append(pick.choice(t).t()),
    lambda t, pick: t.append(torch.cat([pick.choice(t)[:3], pick.choice(t)[3:]])),
    lambda t, pick: t.append(pick.choice(t).double().float()),
    lambda t, pick: t.append(torch.empty_like(pick.choice(t)).exponential_()),
    lambda t, pick: t.append(torch.stack([pick.choice(t), pick.choice(t)]).unbind(0)[1]),
    lambda t, pick: t.append(copy.deepcopy(pick.choice(t))),
    lambda t, pick: t.append(torch.normal(pick.choice(t).sigmoid(), 0.5)),
    lambda t, pick: t.append(nn.functional.dropout(pick.choice(t), 0.4)),
    lambda t, pick: pick.choice(t).normal_(0, 0.1),
    lambda t, pick: pick.choice(t)[pick.randrange(8)].uniform_(),
    lambda t, pick: pick.choice(t)[:, pick.randrange(8)].zero_(),
    lambda t, pick: pick.choice(t)[1:5, ::2].fill_(pick.random()),
    lambda t, pick: pick.choice(t).copy_(pick.choice(t).clone()),
    lambda t, pick: pick.choice(t)[0].copy_(pick.choice(t)[7].clone()),
    lambda t, pick: nn.init.trunc_normal_(pick.choice(t), a=-1.0, b=0.5),
    lambda t, pick: pick.choice(t).mul_(0.5).clamp_(-1, 1).erfinv_().nan_to_num_(0.25),
    lambda t, pick: pick.choice(t).add_(pick.choice(t).mean().item()),
    lambda t, pick: pick.choice(t).masked_fill_(pick.choice(t) > 0.2, -1.0),
    lambda t, pick: pick.choice(t).index_fill_(0, torch.tensor([pick.randrange(8)]), 2.0),
    lambda t, pick: pick.choice(t).__setitem__(pick.choice(t) > 0.5, 0.5),
    lambda t, pick: pick.choice(t).__setitem__(pick.choice(t).argmax() % 8, torch.tensor(list(range(8)))),
    lambda t, pick: torch._foreach_add_([pick.choice(t)], 1.0),
    lambda t, pick: torch.sub(pick.choice(t).exp(), 1, out=pick.choice(t)),
    lambda t, pick: setattr(pick.choice(t), "data", pick.choice(t)),
    lambda t, pick: t[0].numpy().__setitem__(0, pick.choice(t).tolist()[0][0]) if pick.random() < 0.2 else None,
    lambda t, pick: t.pop(pick.randrange(len(t))) if len(t) > 4 else None,
)


def _run_program(seed):
    pick, tensors = random.Random(seed), [torch.ones(8, 8)]
    with torch.no_grad():
        for _ in range(pick.randrange(5, 40)):
            PROGRAM[pick.randrange(len(PROGRAM))](tensors, pick)
    return tensors


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in range(10, 400, 10))])
def test_programs_of_any_operators_are_replayed_in_any_order(first):
    num_lazy = 0
    for seed in range(first, first + 10):
        (expected, state_after), (lazy, lazy_state_after) = (
            _build(lambda seed=seed: _run_program(seed), context)
            for context in (None, LazyInitContext(eager_below_bytes=0))
        )
        assert torch.equal(state_after, lazy_state_after), seed
        pairs = list(zip(lazy, expected, strict=True))
        random.Random(seed).shuffle(pairs)
        for actual, wanted in pairs:
            num_lazy += is_lazy(actual)
            _assert_equal_bits(materialize_tensor(actual), wanted)
    assert num_lazy > 10


def test_an_optimizer_made_over_lazy_parameters_trains_them():
    losses = []
    for context in (None, LazyInitContext(eager_below_bytes=0)):
        model, _ = _build(lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), context)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        materialize(model)
        x = torch.linspace(-1, 1, 30).view(5, 6)
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(x).pow(2).mean()
            loss.backward()
            optimizer.step()
        losses.append(loss.detach())
    assert torch.equal(*losses)


USES = {
    "forward": lambda model: model(torch.ones(2, SIDE)),
    "arithmetic": lambda model: 2 * model.weight,
    "data": lambda model: model.weight.data.sum(),
    "write": lambda model: model.weight.data.normal_(),
    "view": lambda model: model.weight.view(-1),
    "item": lambda model: float(model.weight.detach()[0, 0]),
    "numpy": lambda model: np.asarray(model.weight.detach()),
    "memory": lambda model: model.weight.data_ptr(),
    "load": lambda model: model.load_state_dict(nn.Linear(SIDE, SIDE).state_dict()),
    "copy": lambda model: copy.deepcopy(model),
    "move": lambda model: model.to(torch.bfloat16),
    "into": lambda model: torch.stack([torch.ones(SIDE, SIDE), model.weight]),
}


@pytest.mark.parametrize("use", USES)
def test_values_that_are_not_there_yet_are_an_error(use):
    with LazyInitContext():
        model = nn.Linear(SIDE, SIDE)
    with pytest.raises((ConfigError, RuntimeError), match=r"materialize\(model\) first"):
        USES[use](model)
    assert is_lazy(model.weight)
    USES[use](materialize(model))


def test_a_lazy_parameter_tells_what_it_is():
    with LazyInitContext():
        model = nn.Linear(SIDE, 2 * SIDE)
    weight = model.weight
    assert isinstance(weight, nn.Parameter)
    assert (weight.shape, weight.numel(), weight.dim()) == ((2 * SIDE, SIDE), 2 * SIDE * SIDE, 2)
    assert (weight.dtype, weight.device.type, weight.stride()) == (torch.float32, "cpu", (SIDE, 1))
    assert weight.requires_grad
    assert weight.is_leaf
    assert weight.grad is None
    assert "size=(600, 300)" in repr(weight)
    assert weight in {weight: 1}
    assert not weight.requires_grad_(False).requires_grad
    assert model.train().requires_grad_(True).weight.requires_grad
    assert is_lazy(weight.detach())
    assert not is_lazy(torch.ones(2))


def test_data_given_to_a_lazy_parameter_makes_it_an_ordinary_one():
    with LazyInitContext():
        model = nn.Linear(SIDE, SIDE, bias=False)
    weight, flat = model.weight, torch.zeros(SIDE * SIDE + 5)
    flat[5:].copy_(materialize_tensor(weight).view(-1))
    weight.data = flat[5:].view(SIDE, SIDE)
    assert type(weight) is nn.Parameter
    assert not is_lazy(weight)
    model(torch.ones(1, SIDE)).sum().backward()
    assert torch.equal(weight.grad, torch.ones(SIDE, SIDE))
    assert materialize(model).weight.data_ptr() == flat[5:].data_ptr()


def test_an_unfinished_build_is_guarded_too():
    kept = []

    def fail():
        kept.append(torch.randn(SIDE, SIDE))
        raise KeyError

    with pytest.raises(KeyError), LazyInitContext():
        fail()
    with pytest.raises(ConfigError, match="not materialized"):
        kept[0].sum()
    assert not is_lazy(torch.randn(SIDE, SIDE))


def test_an_undeclared_draw_is_refused_and_never_other_values():
    library = torch.library.Library("lazy_init_test", "DEF")
    library.define("noise_(Tensor(a!) x) -> Tensor(a!)")
    library.define("noise(int n) -> Tensor")
    library.impl("noise_", lambda x: x.normal_(), "CPU")
    library.impl("noise_", lambda x: x, "Meta")
    library.impl("noise", lambda n: torch.randn(n, n), "CompositeExplicitAutograd")
    (drawn, _), (expected, _) = (
        _build(lambda: torch.ops.lazy_init_test.noise(SIDE), context) for context in (LazyInitContext(), None)
    )
    assert is_lazy(drawn)
    assert torch.equal(materialize_tensor(drawn), expected)
    written, _ = _build(lambda: torch.ops.lazy_init_test.noise_(torch.ones(SIDE, SIDE)), LazyInitContext())
    state = torch.get_rng_state()
    with pytest.raises(ConfigError, match=r"noise_.*outside of LazyInitContext"):
        materialize_tensor(written)
    assert torch.equal(torch.get_rng_state(), state)
    library._destroy()


def test_mistakes_are_named():
    with LazyInitContext(), pytest.raises(ConfigError, match="inside of another one"), LazyInitContext():
        pass
    with LazyInitContext():
        lazy = torch.ones(SIDE, SIDE)
        with pytest.raises(ConfigError, match="resize_"):
            lazy.resize_(3)
        with pytest.raises(RuntimeError, match="must match the size"):
            lazy.copy_(torch.ones(3, 7))
    with pytest.raises(ConfigError, match="negative"):
        LazyInitContext(eager_below_bytes=-1)
    with pytest.raises(ConfigError, match="no memory to fill"):
        LazyInitContext("meta")


@pytest.mark.slow
def test_a_model_of_400_megabytes_is_built_in_a_fraction_of_them():
    """At the peak there are a few of its 50 matrices of 8 MB, also where they are filled and dropped one by one."""
    program = """
import resource, torch
from torch import nn
from booster.lazy_init import LazyInitContext, materialize_tensor

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(1440, 1440) for _ in range(40)])
        self.drawn = nn.ParameterList([torch.randn(1440, 1440) * 0.02 for _ in range(10)])
        for number, layer in enumerate(self.layers):
            (nn.init.trunc_normal_ if number % 2 else nn.init.xavier_normal_)(layer.weight)

def peak_kilobytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

before = peak_kilobytes()
with LazyInitContext():
    model = Model()
built = peak_kilobytes() - before
for parameter in list(model.parameters())[::5]:
    materialize_tensor(parameter)
print(sum(p.numel() * p.element_size() for p in model.parameters()), built * 1024, (peak_kilobytes() - before) * 1024)
"""
    # Temporaries of trunc_normal_ come from malloc: without the threshold, holes of its heap would be measured.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120, env=environment)
    total, built, filled_one_by_one = map(int, result.stdout.split())
    assert total > 400e6
    assert built < 60e6
    assert filled_one_by_one < 150e6
