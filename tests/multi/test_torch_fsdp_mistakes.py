"""What users get wrong with TorchFSDPPlugin: one error on all ranks that says what to write."""

from __future__ import annotations

import contextlib
import copy
import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.utils.prune
from gemini_models import WIDTH, Stack, adamw
from harness import distributed
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from booster import Booster
from booster.device import current_device
from booster.errors import ConfigError, DesyncError
from booster.plugins import GeminiPlugin, TorchFSDPPlugin
from booster.plugins.torch_fsdp.fsdp2_internals import ShardedWeight

pytestmark = pytest.mark.on_device


def net(depth=2, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(depth)))


def boosted(model=None, **arguments):
    model = model or net()
    booster = Booster(plugin=TorchFSDPPlugin(**arguments))
    return booster, *booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))[:2]


@distributed(world_size=2)
def test_precision_given_twice():
    plugin = TorchFSDPPlugin(mixed_precision=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    with pytest.raises(ConfigError, match="TorchFSDPPlugin that has one of its own: choose the precision where"):
        Booster(plugin=plugin, mixed_precision="bf16")


@distributed(world_size=2)
def test_other_models_on_other_ranks():
    with pytest.raises(DesyncError, match=r"rank 0 has .*, rank 1 has 2\.0\.weight: \(5, 5\)"):
        boosted(net(2 + dist.get_rank()))
    with pytest.raises(DesyncError, match="sync_module_states=True"):
        boosted(net(seed=dist.get_rank()))
    _, model, _ = boosted(net(seed=dist.get_rank()), sync_module_states=True)
    assert torch.equal(model.state_dict()["0.0.weight"].cpu(), net().state_dict()["0.0.weight"])


@distributed(world_size=2)
@pytest.mark.parametrize("name", ["bfloat16", "double"])
def test_a_model_that_changes_its_format_after_boost(name):
    _, model, _ = boosted()
    with pytest.raises(ConfigError, match="do it before boost"):
        getattr(model, name)()
    getattr(model.unwrap(), name)()
    with pytest.raises(ConfigError, match="was replaced after boost"):
        model(torch.ones(1, 5, device=current_device()))


def sharded(weight):
    if not isinstance(weight.detach(), ShardedWeight):
        pytest.skip("torch before 2.13 does not call subclasses of DTensor")
    return weight


def _first_rows_to_last(weight):
    weight[:2] = weight[4:]


PARTS = {
    "a row": lambda weight: weight[3].zero_(),
    "a row of data": lambda weight: weight.data[3].zero_(),
    "rows": _first_rows_to_last,
    "a chunk": lambda weight: weight.chunk(2)[1].mul_(0.5),
    "a flat view": lambda weight: weight.view(-1)[:7].mul_(0.5),
    "flattened": lambda weight: weight.flatten()[:7].zero_(),
    "the diagonal": lambda weight: weight.diagonal().zero_(),
    "an initializer": lambda weight: nn.init.ones_(weight[:2]),
    "a list": lambda weight: torch._foreach_mul_([weight[:2], weight[2:]], 0.5),
    "out": lambda weight: torch.neg(weight[0], out=weight[1]),
}


@distributed(world_size=2)
@pytest.mark.parametrize("part", PARTS)
def test_a_write_to_a_part_of_a_weight_that_would_be_lost(part):
    _, model, _ = boosted(nn.Sequential(nn.Linear(5, 6), nn.Tanh()))
    weight = sharded(model.unwrap()[0].weight)
    before = model.state_dict()
    with torch.no_grad(), pytest.raises(ConfigError, match=r"part is a copy.*Write to it inside of `with model.gath"):
        PARTS[part](weight)
    with torch.no_grad(), model.gathered():
        PARTS[part](model.unwrap()[0].weight)
    assert not torch.equal(model.state_dict()["0.weight"], before["0.weight"])


@distributed(world_size=2)
def test_writes_to_whole_weights_and_columns_hold_between_steps():
    booster, model, _ = boosted()
    plain = net().to(booster.device)
    for weight in (model.unwrap()[0][0].weight, plain[0][0].weight):
        with torch.no_grad():
            weight.mul_(0.5)
            weight[:, 1:3].add_(1)
            weight.t()[4].zero_()
            torch._foreach_mul_([weight], 1.5)
            if type(weight) is not DTensor:  # of torch 2.10, whose gloo gathers no part
                assert float(weight[3].sum()) != 0  # a part may be read
    torch.testing.assert_close(model.state_dict()["0.0.weight"], plain[0][0].weight.detach())


@distributed(world_size=2)
def test_weights_are_normalized_by_norms_and_means_of_all_shards():
    booster, model, _ = boosted()
    plain = net().to(booster.device)
    for weight in (model.unwrap()[0][0].weight, plain[0][0].weight):
        weight.data /= weight.data.norm(dim=0, keepdim=True)
        with torch.no_grad():
            weight.sub_(0.5 * weight.mean(0, keepdim=True))
            weight.copy_(weight / weight.norm(dim=0, keepdim=True))
            weight.div_(weight.abs().max())
    torch.testing.assert_close(model.state_dict()["0.0.weight"], plain[0][0].weight.detach())
    norm = model.unwrap()[0][0].weight.detach().norm()
    expected = plain[0][0].weight.detach().norm()
    torch.testing.assert_close(norm.full_tensor() if isinstance(norm, DTensor) else norm, expected)
    assert norm.item() == pytest.approx(float(expected))


@distributed(world_size=2)
@pytest.mark.parametrize("draw", [nn.init.xavier_normal_, nn.init.uniform_, torch.rand_like, nn.functional.dropout])
def test_random_numbers_for_a_sharded_weight(draw):
    booster, model, _ = boosted()
    weight = sharded(model.unwrap()[0][0].weight)
    with torch.no_grad(), pytest.raises(ConfigError, match=r"draws random numbers.*`with model.gathered\(\):`"):
        draw(weight)
    plain = net().to(booster.device)
    with torch.no_grad(), model.gathered():
        for one in (model.unwrap()[0][0].weight, plain[0][0].weight):
            torch.manual_seed(7)
            one.copy_(draw(one))
    torch.testing.assert_close(model.state_dict()["0.0.weight"], plain[0][0].weight.detach())


# With gradients enabled, as `reset_parameters()` calls them.
INITS = {
    "constant": (lambda weight: nn.init.constant_(weight, 0.25), None),
    "ones": (nn.init.ones_, None),
    "normal": (nn.init.normal_, "draws random numbers"),
    "kaiming": (nn.init.kaiming_uniform_, "draws random numbers"),
    "eye": (nn.init.eye_, "each has a part"),
    "orthogonal": (nn.init.orthogonal_, "inside of `with model.gathered"),
    "renorm": (lambda weight: weight.detach().renorm_(2, 0, 0.1), "inside of `with model.gathered"),
    "diagonal": (lambda weight: weight.detach().fill_diagonal_(0.0), "inside of `with model.gathered"),
}


@distributed(world_size=2)
@pytest.mark.parametrize("name", INITS)
def test_initializing_a_sharded_weight_works_or_is_an_error(name):
    write, text = INITS[name]
    _, model, _ = boosted()
    weight = sharded(model.unwrap()[0][0].weight)
    before = model.state_dict()["0.0.weight"]
    plain = nn.Parameter(before.clone())
    write(plain)
    if text is None:
        write(weight)
        torch.testing.assert_close(model.state_dict()["0.0.weight"], plain.detach())
    else:
        with pytest.raises((ConfigError, RuntimeError), match=text):
            write(weight)
        torch.testing.assert_close(model.state_dict()["0.0.weight"], before)


@distributed(world_size=2)
def test_backward_to_weights_is_an_error():
    booster, model, optimizer = boosted()
    inputs = torch.ones(2, model.unwrap()[0][0].in_features, device=booster.device)
    with pytest.raises(ConfigError, match=r"backward\(inputs=...\) with the weight '0.0.weight'"):
        optimizer.backward(model(inputs).sum(), inputs=list(model.parameters()))
    outputs = model(inputs)
    with pytest.raises(ConfigError, match=r"backward\(inputs=...\) with the weight '0.0.weight'"):
        optimizer.backward_by_grad(outputs, torch.ones_like(outputs), inputs=list(model.parameters()))


CHANGES = {
    "parametrized": lambda layer: nn.utils.parametrizations.weight_norm(layer),
    "pruned": lambda layer: nn.utils.prune.l1_unstructured(layer, "weight", 3),
    "removed": lambda layer: setattr(layer, "weight", None),
}


@distributed(world_size=2)
@pytest.mark.parametrize("change", CHANGES)
def test_a_weight_that_another_takes_the_place_of(change):
    _, model, _ = boosted()

    def change_and_run():
        with model.gathered():
            CHANGES[change](model.unwrap()[0][0])
        model(torch.ones(1, 5, device=current_device()))

    with pytest.raises(ConfigError, match=r"'0\.0\.weight' was replaced by another parameter after boost"):
        change_and_run()


@distributed(world_size=2)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@pytest.mark.parametrize("part", ["the model", "a module", "a parameter group", "a name"])
def test_functional_call_of_the_unwrapped_model(part, strategy):
    policy = ModuleWrapPolicy({nn.Sequential}) if part == "a parameter group" else None
    booster, model, _ = boosted(auto_wrap_policy=policy, sharding_strategy=strategy)
    x = torch.ones(1, 5, device=booster.device)
    expected = model(x)
    module = booster.unwrap_model(model)
    called = module if part in ("the model", "a name") else module[0] if part == "a parameter group" else module[0][0]
    given = {name: one * 0 for name, one in called.named_parameters()}
    if part == "a name":
        given = {"1.0.bias": given["1.0.bias"]}
    with pytest.raises(ConfigError, match=r"was replaced .*functional_call works inside of `with model.gathered\(\):`"):
        torch.func.functional_call(called, given, (x,))
    torch.testing.assert_close(model(x), expected)
    with model.gathered():
        zeros = {name: torch.zeros_like(one) for name, one in called.named_parameters()}
        assert not torch.func.functional_call(called, zeros, (x,)).any()


READS = {
    "square": lambda parameters: sum(one.square().sum() for one in parameters if one.dim() > 1),
    "norm": lambda parameters: torch.norm(parameters[0]),
    "detach": lambda parameters: parameters[0].detach().norm(),
    "data": lambda parameters: parameters[0].data.norm(),
    "mul_": lambda parameters: parameters[0].mul_(2),
}


@distributed(world_size=2)
@pytest.mark.parametrize("on_meta", [False, True])
def test_parameters_from_before_boost(on_meta):
    with torch.device("meta") if on_meta else contextlib.nullcontext():
        model = net()
    parameters, shapes = list(model.parameters()), [one.shape for one in model.parameters()]
    booster, model, optimizer = boosted(model)
    for step in range(2):
        booster.backward(model(torch.ones(1, 5, device=booster.device)).sum(), optimizer)
        assert [one.requires_grad for one in parameters] == [one.requires_grad for one in model.parameters()]
        for name, read in READS.items():
            message = rf"'{name}' of a parameter from before boost\(\).*from model.parameters\(\)"
            with pytest.raises(ConfigError, match=message), torch.set_grad_enabled(name != "mul_"):
                read(parameters)
        optimizer.step()
        optimizer.zero_grad()
        assert [one.shape for one in parameters] == shapes
        assert "Parameter containing" in f"{parameters[0]}"
        parameters[step].requires_grad = False
        assert parameters[0] in set(parameters)
        assert parameters[0].grad is None
    shown = list(model.parameters())
    plain = torch.optim.SGD(parameters, lr=0.1)
    with pytest.raises(ConfigError, match="not boosted"):
        plain.step()
    assert not any(type(one) is type(parameters[0]) for one in shown)


class Generated(nn.Module):
    """Linear layers of which one runs with weights that the other computes."""

    def __init__(self):
        super().__init__()
        self.main, self.other = nn.Linear(5, 5), nn.Linear(5, 30)

    def forward(self, x):
        weight, bias = self.other(x).mean(0).split([25, 5])
        return torch.func.functional_call(self.main, {"weight": weight.view(5, 5), "bias": bias}, (x,))


@distributed(world_size=2)
def test_functional_call_within_a_forward_uses_the_given_weights():
    torch.manual_seed(0)
    plain, x = Generated().to(current_device()), torch.randn(3, 5, device=current_device())
    booster, model, optimizer = boosted(copy.deepcopy(plain))
    booster.backward(model(x).square().mean(), optimizer)
    optimizer.step()
    plain(x).square().mean().backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    torch.testing.assert_close(model(x), plain(x))


@distributed(world_size=2)
def test_an_ignored_weight_that_changes_its_memory_after_boost():
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Conv2d(3, 2, 3))
    booster, model, optimizer = boosted(model, ignored_modules=[model[1]])
    model.unwrap()[1].to(memory_format=torch.channels_last)
    booster.backward(model(torch.ones(1, 2, 6, 6, device=booster.device)).sum(), optimizer)
    with pytest.raises(ConfigError, match=r"the memory of .* was replaced after boost"):
        optimizer.step()


@distributed(world_size=2)
def test_a_norm_below_zero():
    booster, model, optimizer = boosted()
    booster.backward(model(torch.ones(1, 5, device=booster.device)).sum(), optimizer)
    for wrong in (-1.0, float("nan")):
        with pytest.raises(ConfigError, match="max_norm"):
            booster.clip_grad_norm_(optimizer, wrong)
    assert float(booster.clip_grad_norm_(optimizer, float("inf"))) > 0


@distributed(world_size=2)
def test_one_rank_generates_with_gathered_weights():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=37,
    )
    _, model, _ = boosted(LlamaForCausalLM(config))
    tokens = torch.arange(4, device=current_device()).view(1, 4)
    with model.gathered() as whole:
        if dist.get_rank() == 0:
            found = whole.eval().generate(tokens, max_new_tokens=3, do_sample=False)
            assert found.shape == (1, 7)


@pytest.mark.slow
@distributed(world_size=2)
def test_a_compiled_model_trains():
    booster, model, optimizer = boosted()
    compiled = torch.compile(model, backend="eager")
    booster.backward(compiled(torch.ones(1, 5, device=booster.device)).sum(), optimizer)
    optimizer.step()


@distributed(world_size=2)
def test_an_error_in_one_forward_leaves_a_model_that_can_go_on():
    class Fragile(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = net(3)

        def forward(self, x, fails=False):
            x = self.blocks[1](self.blocks[0](x))
            if fails:
                raise KeyError("mine")
            return self.blocks[2](x)

    booster, model, optimizer = boosted(Fragile())
    with pytest.raises(KeyError, match="mine"):
        model(torch.ones(1, 5, device=booster.device), fails=True)
    booster.backward(model(torch.ones(1, 5, device=booster.device)).sum(), optimizer)
    optimizer.step()
    twin = Fragile()
    twin.blocks.load_state_dict(net(3).state_dict())
    twin(torch.ones(1, 5)).sum().backward()
    for name, parameter in twin.named_parameters():
        torch.testing.assert_close(model.state_dict()[name].cpu(), (parameter - 0.1 * parameter.grad).detach())


def _run_alone(plugin, when):
    """Trains two steps, and has the first rank evaluate alone in between; returns the error."""
    booster = Booster(plugin=plugin())
    model, optimizer, *_ = booster.boost(model := Stack(num_blocks=2), adamw(model))
    x = torch.ones(2, WIDTH, device=booster.device)

    def evaluate():
        if dist.get_rank() == 0:
            model.eval()
            with torch.no_grad():
                model(x)
            model.train()

    def train():
        for step in range(3):
            loss = model(x).square().mean()
            if step == 1 and when == "before the backward":
                evaluate()
            booster.backward(loss, optimizer)
            if step == 1 and when == "before the step":
                evaluate()
            optimizer.step()
            optimizer.zero_grad()
            if step == 1 and when == "after the step":
                evaluate()

    with pytest.raises(DesyncError) as caught:
        train()
    return str(caught.value)


@pytest.mark.parametrize(
    ("when", "ends"),
    [
        ("before the backward", ("the end of a forward", "the end of a backward")),
        ("before the step", ("the end of a forward", "a step")),
        ("after the step", ("the end of a forward", "the end of a backward")),
    ],
)
@distributed(world_size=2)
def test_a_rank_that_evaluates_alone_is_told_apart_from_the_others(when, ends):
    error = _run_alone(TorchFSDPPlugin, when)
    assert error.startswith(f"rank 0 is at {ends[0]}, rank 1 is at {ends[1]}: every rank must call the model")
    assert "evaluates alone" in error
    assert "`with model.gathered():`" in error


@distributed(world_size=2)
def test_a_rank_that_evaluates_alone_under_gemini_is_told_of_the_usual_cause():
    plugin = functools.partial(GeminiPlugin, precision="fp32", chunk_config_dict={"chunk_size": 256})
    assert "Where one rank evaluates alone" in _run_alone(plugin, "after the step")
