"""All ranks start from the same values, wherever these come from, or all raise the same error."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness import distributed, run_ranks
from torch import nn

from booster import ConfigError, DesyncError, LazyInitContext
from booster.comm import all_gather_equal
from booster.device import current_device, device_type
from booster.plugins.sharding.deferred_init import Materializer

pytestmark = pytest.mark.on_device


class Net(nn.Module):
    """Two layers of equal shape, a frozen one, buffers, and a parameter that no class initialises if asked for."""

    def __init__(self, has_scale=False):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
        self.norm = nn.BatchNorm1d(5)
        self.frozen = nn.Linear(5, 3).requires_grad_(False)
        if has_scale:
            self.scale = nn.Parameter(torch.rand(5))


def _built(way, **arguments):
    if way == "meta":
        with torch.device("meta"):
            return Net(**arguments)
    if way == "lazy":
        with LazyInitContext(eager_below_bytes=0):
            return Net(**arguments)
    return Net(**arguments)


def _fill(model, **arguments):
    """Returns the values by name. Collective."""
    materializer = Materializer(model, current_device(), **{"param_init_fn": None, "sync": False, **arguments})
    materializer.check()
    materializer.sync_initialized()
    for module in reversed(list(model.modules())):
        materializer.fill([module])
    return {name: tensor.detach() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def _assert_equal_on_all_ranks(tensors):
    for name, tensor in tensors.items():
        everyone = all_gather_equal(tensor.reshape(1, -1))
        assert (everyone == everyone[0]).all(), name


def _assert_same(found, expected):
    assert list(found) == list(expected)
    for name in found:
        assert torch.equal(found[name].cpu(), expected[name].cpu()), name


def _rng_states():
    """Returns those of the host and of the device."""
    states = [torch.get_rng_state()]
    if device_type() != "cpu":
        states.append(torch.get_device_module().get_rng_state())
    return torch.cat(states)


def _filled_from_meta(sync):
    torch.manual_seed(40 + dist.get_rank())  # rank 0's counts
    state = _rng_states()
    values = _fill(_built("meta"), sync=sync)
    assert torch.equal(_rng_states(), state)
    return values


def test_a_model_has_the_same_values_on_any_number_of_ranks():
    by_world = [run_ranks(_filled_from_meta, world_size, False) for world_size in (1, 2, 3)]
    by_world.append(run_ranks(_filled_from_meta, 2, True))
    reference = by_world[0][0]
    for ranks in by_world:
        for values in ranks:
            _assert_same(values, reference)
    assert not torch.equal(reference["layers.0.weight"], reference["layers.1.weight"])
    halves = reference["layers.0.weight"].view(-1)[:24].chunk(2)
    assert not torch.equal(*halves)


@pytest.mark.parametrize("way", ["real", "lazy"])
@distributed([2, 3])
def test_sync_gives_all_ranks_the_values_of_rank_0(way):
    torch.manual_seed(50)
    expected = Net()
    torch.manual_seed(50 + dist.get_rank())
    model = _built(way)
    before = list(model.parameters())
    values = _fill(model, sync=True)
    _assert_same(values, {n: t.detach() for n, t in (*expected.named_parameters(), *expected.named_buffers())})
    assert all(one is other for one, other in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("way", ["real", "lazy"])
@distributed(2)
def test_ranks_that_built_something_else_are_told(way):
    torch.manual_seed(60 + dist.get_rank())
    with pytest.raises(DesyncError, match=r"different values of '.*sync_module_states=True"):
        _fill(_built(way))


@distributed(2)
def test_one_differing_tensor_is_named_and_the_others_are_not():
    torch.manual_seed(61)
    model = Net()
    model.norm.running_mean[2] = dist.get_rank()
    with pytest.raises(DesyncError, match=r"different values of 'norm.running_mean': pass"):
        _fill(model)


@distributed(2)
def test_a_nan_is_equal_to_itself():
    torch.manual_seed(62)
    model = Net()
    model.layers[0].weight.data.fill_(float("nan"))
    assert _fill(model)["layers.0.weight"].isnan().all()


@pytest.mark.parametrize("way", ["real", "lazy"])
@distributed([2, 3])
def test_ranks_without_values_receive_those_of_rank_0(way):
    torch.manual_seed(70)
    expected = Net(has_scale=True)
    torch.manual_seed(70)
    model = _built(way if dist.get_rank() == 0 else "meta", has_scale=True)
    old = dict(model.named_parameters())
    materializer = Materializer(model, current_device(), param_init_fn=None, sync=True)
    materializer.check()
    materializer.sync_initialized()
    assert [one.is_meta for one in model.parameters()] == [dist.get_rank() > 0] * len(old)
    materializer.fill(list(model.modules()))
    for (name, parameter), wanted in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(parameter.cpu(), wanted), name
        assert parameter.requires_grad == wanted.requires_grad
        assert materializer.replaced.get(id(old[name]), old[name]) is parameter
    for buffer, wanted in zip(model.buffers(), expected.buffers(), strict=True):
        assert torch.equal(buffer.cpu(), wanted)


@distributed(2)
def test_ranks_without_values_are_refused_where_nothing_is_sent():
    model = _built("meta" if dist.get_rank() else "real")
    with pytest.raises(DesyncError, match=r"on the ranks \[0\] and is on the meta device on the ranks \[1\].*sync_mod"):
        _fill(model)
    assert {one.is_meta for one in model.parameters()} == {dist.get_rank() == 1}


@distributed(2)
def test_values_that_rank_0_lacks_are_not_thrown_away():
    model = _built("real" if dist.get_rank() else "meta")
    with pytest.raises(ConfigError, match=r"on the ranks \[1\] .* throw them away"):
        _fill(model, sync=True)


@distributed(2)
def test_a_lazy_model_goes_with_an_ordinary_one_of_the_same_seed():
    torch.manual_seed(80)
    _assert_equal_on_all_ranks(_fill(_built("lazy" if dist.get_rank() else "real")))


@distributed(2)
def test_what_nothing_initialises_is_refused_on_all_ranks():
    with pytest.raises(ConfigError, match="'scale'"):
        _fill(_built("meta", has_scale=True), sync=True)


@distributed(2)
def test_models_that_differ_are_refused():
    model = _built("meta")
    model.frozen.requires_grad_(dist.get_rank() == 0)
    with pytest.raises(DesyncError, match="requires_grad"):
        _fill(model)


class _RankedInit:
    """Draws from a generator of its own, another on each rank."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(dist.get_rank())

    def __call__(self, module):
        module.to_empty(device=current_device(), recurse=False)
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            tensor.copy_(torch.rand(tensor.shape, generator=self.generator) * 100)


@distributed(2)
def test_the_values_of_param_init_fn_are_those_of_rank_0_with_sync():
    values = _fill(_built("meta", has_scale=True), param_init_fn=_RankedInit(), sync=True)
    _assert_equal_on_all_ranks(values)
    assert values["scale"].max() > 1


@distributed(2)
def test_a_param_init_fn_that_draws_differently_is_told():
    with pytest.raises(DesyncError, match="different values of"):
        _fill(_built("meta"), param_init_fn=_RankedInit())


@distributed(2)
def test_a_param_init_fn_that_fails_on_one_rank_fails_on_all():
    def fails(module):
        if dist.get_rank() == 1:
            raise ConfigError("no weights here")
        module.to_empty(device=current_device(), recurse=False).reset_parameters()

    with pytest.raises(ConfigError, match="no weights here"):
        _fill(_built("meta"), param_init_fn=fails)
