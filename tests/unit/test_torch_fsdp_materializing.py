"""Modules without values get those of an ordinary build, one unit at a time, whatever the units are."""

from __future__ import annotations

import itertools
import random
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from zoo import get_model

from booster import ConfigError, LazyInitContext
from booster.lazy_init import is_lazy, materialize_own
from booster.plugins.sharding.deferred_init import Materializer

CPU = torch.device("cpu")
WORDS, WIDTH = 30, 16


class TiedNet(nn.Module):
    """A head tied to an embedding with a padding row, buffers of both kinds, and a frozen layer."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=2)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.head = nn.Linear(WIDTH, WORDS)
        self.head.weight = self.words.weight


class Scales(nn.Module):
    """Parameters and buffers of its own, which it resets by hand."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.empty(5))
        self.register_buffer("table", torch.empty(3, 4), persistent=False)
        self.register_buffer("mask", torch.empty(4, 4, dtype=torch.bool))
        self.reset_parameters()

    def reset_parameters(self):
        self.scale.data.normal_()  # a write that the parameter's version doesn't show
        self.table = torch.arange(12.0).view(3, 4)
        self.mask.copy_(torch.ones(4, 4).tril().bool())


class Adapted(nn.Module):
    """Resets its children, as adapters and attentions do."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 2), nn.Linear(2, 3)
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.normal_(self.first.weight, std=100.0)
        nn.init.zeros_(self.second.weight)


def _on_meta(build):
    with torch.device("meta"):
        return build()


def _materializer(model, **arguments):
    return Materializer(model, CPU, **{"param_init_fn": None, "sync": False, "seed": 5, **arguments})


def _filled(model, units=None, **arguments):
    materializer = _materializer(model, **arguments)
    materializer.check()
    materializer.sync_initialized()
    for unit in units or [list(model.modules())]:
        materializer.fill(unit)
    return materializer


def _tensors(model):
    named = itertools.chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    return {name: tensor.detach() for name, tensor in named}


def _assert_same(found, expected):
    assert list(found) == list(expected)
    for name in found:
        assert found[name].dtype == expected[name].dtype, name
        assert torch.equal(found[name], expected[name]), name


# Meta, with the classes' own initialisation.


def test_layers_are_filled_as_their_constructors_fill_them():
    model = _on_meta(TiedNet)
    _filled(model)
    assert not any(tensor.is_meta for tensor in _tensors(model).values())
    bound = WIDTH**-0.5
    for layer in (*model.layers, model.frozen):
        for tensor in (layer.weight, layer.bias):
            assert bound * 0.7 < tensor.abs().max() <= bound
    assert 0.8 < model.words.weight.std() < 1.2
    assert not model.words.weight[2].any()
    assert torch.equal(model.norm.weight, torch.ones(WIDTH))
    assert torch.equal(model.norm.running_var, torch.ones(WIDTH))
    assert int(model.norm.num_batches_tracked) == 0
    assert not torch.equal(model.layers[0].weight, model.layers[1].weight)


def test_values_depend_on_the_seed_and_neither_on_the_units_nor_on_their_order():
    whole, by_one, backwards, other = (_on_meta(TiedNet) for _ in range(4))
    _filled(whole)
    _filled(by_one, [[module] for module in by_one.modules()])
    torch.manual_seed(9)
    _filled(backwards, [[module] for module in reversed(list(backwards.modules()))])
    _filled(other, seed=6)
    _assert_same(_tensors(by_one), _tensors(whole))
    _assert_same(_tensors(backwards), _tensors(whole))
    assert not torch.equal(other.words.weight, whole.words.weight)


def test_without_a_seed_it_is_that_of_torch():
    models = [_on_meta(TiedNet) for _ in range(3)]
    for model, seed in zip(models, (7, 7, 8), strict=True):
        torch.manual_seed(seed)
        torch.rand(seed)  # what was drawn since has no influence
        _filled(model, seed=None)
    _assert_same(_tensors(models[0]), _tensors(models[1]))
    assert not torch.equal(models[0].words.weight, models[2].words.weight)


def test_the_generators_of_the_process_stay_as_they_were():
    def draw(module):
        module.to_empty(device=CPU, recurse=False)
        nn.init.normal_(module.weight)
        module.bias.fill_(random.random() + np.random.rand())

    torch.manual_seed(3)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)["state"]
    models = [_on_meta(lambda: nn.Linear(3, 3)) for _ in range(2)]
    for model in models:
        _filled(model, param_init_fn=draw)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert torch.initial_seed() == 3
    assert random.getstate() == states[1]
    assert np.array_equal(np.random.get_state(legacy=False)["state"]["key"], states[2]["key"])
    _assert_same(_tensors(models[0]), _tensors(models[1]))


def test_only_the_given_modules_get_memory():
    model = _on_meta(lambda: nn.Sequential(nn.Sequential(nn.Linear(3, 3)), nn.Linear(3, 3)))
    materializer = _filled(model, [[model, model[0]]])
    assert all(parameter.is_meta for parameter in model.parameters())
    materializer.fill([model[0][0]])
    assert [parameter.is_meta for parameter in model.parameters()] == [False, False, True, True]


def test_while_a_module_is_filled_all_others_are_on_the_meta_device():
    seen = []

    def watch(module):
        module.to_empty(device=CPU, recurse=False).reset_parameters()
        seen.append(sum(not tensor.is_meta for tensor in _tensors(model).values()))

    model = nn.Sequential(nn.Linear(2, 2), *_on_meta(lambda: [nn.Linear(2, 2), nn.Linear(2, 2)]))
    expected = model[0].weight.detach().clone()
    _filled(model, param_init_fn=watch)
    assert seen == [2, 2]
    assert torch.equal(model[0].weight, expected)


def test_replaced_tells_where_an_optimizers_parameters_are_now():
    model = _on_meta(TiedNet)
    old = dict(model.named_parameters())
    old["words.weight"].is_special = True
    materializer = _filled(model)
    new = dict(model.named_parameters())
    assert len(materializer.replaced) == len(new)
    for name, parameter in old.items():
        assert materializer.replaced[id(parameter)] is new[name]
        assert new[name].requires_grad == parameter.requires_grad
    assert model.head.weight is model.words.weight
    assert model.words.weight.is_special


def test_a_replaced_parameter_is_freed_with_its_last_user():
    model = _on_meta(lambda: nn.Sequential(nn.Linear(2, 2, bias=False)))
    materializer = _filled(model)
    gone = weakref.ref(model[0].weight)
    model[0].weight = nn.Parameter(torch.ones(2, 2))
    assert gone() is None
    assert not materializer.replaced


def test_a_tied_weight_is_what_its_first_module_makes_of_it_when_another_is_filled_first():
    model, expected = _on_meta(TiedNet), _on_meta(TiedNet)
    _filled(expected)
    materializer = _filled(model, [[model.head]])
    assert model.words.weight is model.head.weight
    _assert_same(_tensors(model.head), _tensors(expected.head))
    filled = model.words.weight
    materializer.fill([model.words])
    assert model.words.weight is filled


def test_what_has_values_in_a_module_keeps_them():
    model = _on_meta(lambda: nn.Linear(3, 3))
    model.weight = nn.Parameter(torch.full((3, 3), 7.0))
    weight = model.weight
    _filled(model)
    assert model.weight is weight
    assert torch.equal(weight, torch.full((3, 3), 7.0))
    assert not model.bias.is_meta


def test_place_real_touches_nothing_without_values():
    model = nn.Sequential(nn.Linear(2, 2), _on_meta(lambda: nn.Linear(2, 2)))
    before = list(model.parameters())
    _materializer(model).sync_initialized()
    assert all(one is other for one, other in zip(model.parameters(), before, strict=True))
    assert [one.is_meta for one in model.parameters()] == [False, False, True, True]


def test_a_module_resets_parameters_and_buffers_in_any_way():
    model, expected = _on_meta(Scales), Scales()
    _filled(model)
    assert torch.equal(model.table, expected.table)
    assert torch.equal(model.mask, expected.mask)
    assert model.scale.std() > 0.1
    assert list(model.state_dict()) == list(expected.state_dict())


def test_what_an_ancestor_does_to_its_children_is_done_in_whatever_units_they_are():
    model, other = _on_meta(lambda: nn.Sequential(Adapted())), _on_meta(lambda: nn.Sequential(Adapted()))
    _filled(model)
    _filled(other, [[module] for module in reversed(list(other.modules()))])
    assert model[0].first.weight.abs().max() > 10
    assert 0 < model[0].first.bias.abs().max() < 1
    assert not model[0].second.weight.any()
    _assert_same(_tensors(other), _tensors(model))


def test_a_multihead_attention_clears_the_bias_of_its_child():
    model = _on_meta(lambda: nn.MultiheadAttention(8, 2))
    _filled(model)
    assert not model.out_proj.bias.any()
    assert not model.in_proj_bias.any()
    assert model.out_proj.weight.std() > 0.1
    assert model.in_proj_weight.std() > 0.1


def test_an_lstm_computes_with_its_new_weights():
    model = _on_meta(lambda: nn.LSTM(3, 4))
    _filled(model)
    result, _ = model(torch.ones(2, 1, 3))
    result.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


class _Watching(nn.Linear):
    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        if name == "weight":
            self.__dict__["seen"] = value


def test_a_class_that_watches_its_parameters_sees_the_new_ones():
    model = _on_meta(lambda: _Watching(2, 2))
    _filled(model)
    assert model.seen is model.weight


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "vit"])
def test_a_transformers_model_is_initialised_as_an_ordinary_build(name):
    build = get_model(name).build
    model, expected = _on_meta(build), build()
    blocks = [module for module in model.modules() if type(module).__name__ in (model._no_split_modules or [])]
    inside = {id(part) for block in blocks for part in block.modules()}
    units = [list(block.modules()) for block in blocks]
    _filled(model, [*units, [module for module in model.modules() if id(module) not in inside]])
    assert blocks
    found, wanted = dict(model.named_parameters()), dict(expected.named_parameters())
    assert list(found) == list(wanted)
    for parameter_name, parameter in wanted.items():
        if parameter.std() == 0:
            assert torch.equal(found[parameter_name], parameter), parameter_name
        else:  # a standard deviation of n draws is off by 1 / sqrt(2 n)
            deviation = found[parameter_name].std() / parameter.std() - 1
            assert abs(deviation) < 5 * parameter.numel() ** -0.5, parameter_name
    _assert_same(dict(model.named_buffers()), dict(expected.named_buffers()))


def test_the_weights_that_gpt2_scales_by_its_depth_are_scaled_in_a_unit_of_their_own_too():
    build = get_model("gpt2").build
    model, expected = _on_meta(build), _on_meta(build)
    _filled(model, [[module] for module in reversed(list(model.modules()))])
    _filled(expected)
    _assert_same(_tensors(model), _tensors(expected))
    block = model.transformer.h[0]
    assert block.mlp.c_proj.weight.std() < 0.7 * block.mlp.c_fc.weight.std()


# Meta, with the user's function.


def _to_empty(module):
    module.to_empty(device=CPU, recurse=False)
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        tensor.data.fill_(len(calls))
    calls.append(type(module).__name__)


calls: list[str] = []


def test_param_init_fn_is_called_once_for_each_module_with_tensors_on_meta():
    calls.clear()
    model = nn.Sequential(_on_meta(TiedNet), nn.Linear(2, 2))
    old = dict(model.named_parameters())
    materializer = _filled(model, param_init_fn=_to_empty)
    assert calls == ["Embedding", "Linear", "Linear", "BatchNorm1d", "Linear", "Linear"]
    assert model[0].head.weight is model[0].words.weight
    assert not model[0].words.weight.any()
    assert torch.equal(model[0].norm.running_mean, torch.full((WIDTH,), 3.0))
    assert torch.equal(model[0].head.bias, torch.full((WORDS,), 5.0))
    for name, parameter in model[0].named_parameters(prefix="0"):
        assert materializer.replaced[id(old[name])] is parameter
        assert parameter.requires_grad == old[name].requires_grad
    assert model[1].weight is old["1.weight"]


def test_param_init_fn_fills_what_no_class_initialises():
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

    calls.clear()
    model = _on_meta(Bare)
    _filled(model, param_init_fn=_to_empty)
    assert torch.equal(model.scale, torch.zeros(3))


def _nothing(module):
    pass


def _everything(module):
    module.to_empty(device=CPU)


def _another_dtype(module):
    module.to_empty(device=CPU, recurse=False).double()


def _fewer(module):
    module.to_empty(device=CPU, recurse=False)
    del module.bias


@pytest.mark.parametrize(
    ("param_init_fn", "message"),
    [
        (_nothing, "is torch.float32 .* on meta"),
        (_everything, "recurse=False"),
        (_another_dtype, "is torch.float64"),
        (_fewer, "'bias' of module '0'.* is missing"),
    ],
)
def test_a_param_init_fn_that_does_something_else_is_refused(param_init_fn, message):
    class Outer(nn.Linear):
        def __init__(self):
            super().__init__(2, 2)
            self.inner = nn.Linear(2, 2)

    model = _on_meta(lambda: nn.Sequential(Outer()))
    with pytest.raises(ConfigError, match=message):
        _filled(model, param_init_fn=param_init_fn)
    assert all(tensor.is_meta for tensor in _tensors(model).values())
    assert len(_tensors(model)) == 4


# What can't be filled.


class _Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.ones(2))


class _Forgetful(nn.Linear):
    def __init__(self, dtype):
        super().__init__(2, 2)
        self.register_buffer("table", torch.ones(3, dtype=dtype))


class _Failing(nn.Linear):
    def reset_parameters(self):
        if not self.weight.is_meta:
            raise OSError("no such file")


def test_a_parameter_that_nothing_initialises_is_refused_before_anything_is_changed():
    model = _on_meta(lambda: nn.Sequential(_Custom()))
    with pytest.raises(ConfigError, match=r"'scale' of module '0' \(_Custom\).*param_init_fn.*LazyInitContext"):
        _materializer(model).check()
    with pytest.raises(ConfigError, match="'scale'"):
        _materializer(model, sync=True).sync_initialized()
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_a_buffer_that_the_initialisation_forgets_is_refused_and_not_left_as_garbage(dtype):
    with pytest.raises(ConfigError, match=r"'table' of module '' \(_Forgetful\).*got no values"):
        _filled(_on_meta(lambda: _Forgetful(dtype)))


def test_an_initialisation_that_fails_is_named():
    model = _on_meta(lambda: nn.Sequential(_Failing(2, 2)))
    with pytest.raises(ConfigError, match=r"module '0' \(_Failing\).*no such file"):
        _filled(model)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_layer_whose_shape_is_not_known_is_refused():
    with pytest.raises(ConfigError, match="run a forward"):
        _materializer(nn.Sequential(nn.LazyLinear(3))).check()


def test_a_sharded_model_is_refused():
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        model = nn.Linear(4, 4)
        mesh = init_device_mesh("cpu", (2,))
        model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
        with pytest.raises(ConfigError, match=r"'weight' is a DTensor, so the model is parallelised already"):
            _materializer(model).check()
    finally:
        torch.distributed.destroy_process_group()


# Lazily built.


def _lazily(build, seed=4):
    torch.manual_seed(seed)
    with LazyInitContext(eager_below_bytes=0):
        return build()


@pytest.mark.parametrize("name", ["tied", "llama", "gpt2"])
def test_a_lazy_model_gets_the_bits_of_an_ordinary_build_unit_by_unit(name):
    build = TiedNet if name == "tied" else get_model(name).build
    torch.manual_seed(4)
    expected, model = build(), _lazily(build)
    before = list(model.parameters())
    materializer = _filled(model, [[module] for module in reversed(list(model.modules()))])
    _assert_same(_tensors(model), _tensors(expected))
    assert all(one is other for one, other in zip(model.parameters(), before, strict=True))
    assert not materializer.replaced


def test_lazy_tensors_of_other_modules_stay_lazy():
    model = _lazily(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    _filled(model, [[model[1]]])
    assert [is_lazy(parameter) for parameter in model.parameters()] == [True, True, False, False]


def test_a_lazy_and_a_meta_module_in_one_model():
    torch.manual_seed(4)
    expected = nn.Linear(3, 3)
    model = nn.Sequential(_lazily(lambda: nn.Linear(3, 3)), _on_meta(lambda: nn.Linear(3, 3)))
    _filled(model)
    _assert_same(_tensors(model[0]), _tensors(expected))
    assert not model[1].weight.is_meta


class _Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("whole", torch.rand(6))
        self.register_buffer("front", self.whole[:3])
        self.inner = nn.Module()
        self.inner.register_buffer("rest", self.whole[3:])
        self.unregistered = [torch.rand(2)]


def test_materialize_own_fills_the_given_modules_alone_and_keeps_what_they_share():
    torch.manual_seed(4)
    expected, model = _Shared(), _lazily(_Shared)
    materialize_own([model])
    assert is_lazy(model.inner.rest)
    assert torch.equal(model.whole, expected.whole)
    assert torch.equal(model.unregistered[0], expected.unregistered[0])
    assert model.front.data_ptr() == model.whole.data_ptr()
    materialize_own([model.inner])
    assert torch.equal(model.inner.rest, expected.inner.rest)
    assert model.inner.rest.untyped_storage().data_ptr() != model.whole.untyped_storage().data_ptr()
