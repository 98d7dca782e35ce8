"""Checkpoints under TorchFSDPPlugin: what is saved is whole, however it is cut, and loads into any other layout."""

from __future__ import annotations

import copy
import itertools
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fsdp_checkpoint_cases import (
    ONE_LEVEL,
    PRECISIONS,
    Job,
    Net,
    assert_same,
    slow,
)
from fsdp_twins import STRATEGIES, FSDPTwins, small_units
from harness import distributed, preload, run_ranks
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from zoo import TRANSFORMERS_MODULES

from booster import Booster, RankFailedError
from booster.comm import count_communication
from booster.device import current_device
from booster.optim import HybridAdam
from booster.plugins import TorchFSDPPlugin

preload(*TRANSFORMERS_MODULES)

pytestmark = pytest.mark.on_device


def stored(path: Path) -> dict[str, torch.Tensor]:
    """Everything in a checkpoint's files but random states."""
    found = {}
    for file in path.glob("*.safetensors"):
        if "random" not in file.name:
            found |= load_file(file)
    return found


def train_and_save(strategy: str, path: Path, arguments: dict) -> dict[str, torch.Tensor]:
    job = Job(strategy, **arguments).train(0, 1, 2)
    job.save(path)
    return job.weights()


def load_and_save(strategy: str, source: Path, arguments: dict) -> dict[str, torch.Tensor]:
    Job(strategy, seed=1, **arguments).train(7).load(source).save(source.with_name("trained before"))
    fresh = Job(strategy, seed=1, **arguments).load(source)
    fresh.save(source.with_name("fresh"))
    return fresh.weights()


LAYOUTS = {
    "full x1": ("full", 1, {}),
    "full x2": ("full", 2, {}),
    "full x3": ("full", 3, {}),
    "full x4": ("full", 4, {}),
    "smallest units x3": ("full", 3, {"auto_wrap_policy": small_units(1)}),
    "one unit x2": ("full", 2, {"auto_wrap_policy": small_units(10**9)}),
    "grad op x3": ("grad op", 3, {}),
    "none x2": ("none", 2, {}),
    "hybrid x4": ("hybrid", 4, {}),
    "ignored layer x2": ("full", 2, {"ignores": "a layer"}),
    "ignored parts x3": ("grad op", 3, {"ignores": "parts"}),
    "hybrid, ignored x4": ("hybrid", 4, {"ignores": "parts"}),
    "fused x2": ("full", 2, {"make": HybridAdam}),
}


# By default every layout is a source or a target in fp32, where the target is the fifth after it, and a few in bf16.
FP32_SOURCES = ("full x1", "full x2", "full x3", "full x4", "smallest units x3", *list(LAYOUTS)[10:])


BF16_SOURCES = ("none x2", "hybrid, ignored x4")


@pytest.mark.parametrize(
    ("source", "precision"),
    [
        case if case[0] in {"fp32": FP32_SOURCES, "bf16": BF16_SOURCES}.get(case[1], ()) else slow(*case)
        for case in itertools.product(LAYOUTS, PRECISIONS)
    ],
)
def test_every_layout_loads_what_another_wrote_and_writes_the_same(tmp_path, source, precision):
    names = list(LAYOUTS)
    shift = {"fp32": 5, "bf16": 1, "fp16": 8, "bf16, fp32 sums": 3}[precision]
    target = names[(names.index(source) + shift) % len(names)]
    (strategy, size, arguments), (other, other_size, other_arguments) = LAYOUTS[source], LAYOUTS[target]
    precise = {"precision": precision}
    weights = run_ranks(train_and_save, size, strategy, tmp_path / "c", arguments | precise)
    loaded = run_ranks(load_and_save, other_size, other, tmp_path / "c", other_arguments | precise)
    for found in (*weights, *loaded):
        assert_same(found, weights[0])
    expected = stored(tmp_path / "c")
    assert not any(name.endswith(".master") for name in expected)  # the weights are in fp32 themselves
    assert expected["layers.0.wide.weight"].dtype == torch.float32
    assert_same(stored(tmp_path / "trained before"), expected)
    assert_same(stored(tmp_path / "fresh"), expected)


@pytest.mark.parametrize(("source", "target"), [("bf16", "fp32"), ("fp32", "fp16")])
def test_weights_of_one_precision_load_into_another(tmp_path, source, target):
    (weights, *_) = run_ranks(train_and_save, 2, "full", tmp_path / "c", {"precision": source})
    for found in run_ranks(load_weights, 3, tmp_path / "c", target):
        assert_same(found, weights)


def load_weights(path: Path, precision: str) -> dict[str, torch.Tensor]:
    job = Job(precision=precision, seed=1)
    job.booster.load_model(job.model, path)
    return job.weights()


def begin_step(strategy: str, path: Path, arguments: dict) -> dict[str, torch.Tensor]:
    """Saves where a step was half done, one backward with communication and one without; returns its end."""
    job = Job(strategy, **arguments).train(0)
    job.backward(1)
    with job.booster.no_sync(job.model, job.optimizer):
        job.backward(2)
    job.save(path)
    return end_step(job)


def end_step(job: Job) -> dict[str, torch.Tensor]:
    job.backward(3)
    job.optimizer.step()
    job.optimizer.zero_grad()
    return job.train(4).weights()


def load_and_end_step(strategy: str, path: Path, arguments: dict) -> dict[str, torch.Tensor]:
    return end_step(Job(strategy, seed=1, **arguments).load(path))


MIDWAY = {
    "full": ("full", {}),
    "smallest units": ("full", {"auto_wrap_policy": small_units(1)}),
    "grad op": ("grad op", {}),
    "none": ("none", {}),
    "hybrid": ("hybrid", {}),
    "ignored parts": ("full", {"ignores": "parts"}),
    "hybrid, ignored": ("hybrid", {"ignores": "a layer"}),
}


# By default every layout as source or as target of the next one, in fp32; one goes back into itself, bit for bit.
MIDWAY_PAIRS = [*((source, 1) for source in list(MIDWAY)[::2]), ("hybrid, ignored", 0)]


@pytest.mark.parametrize(
    ("source", "shift", "precision"),
    [
        case if case[:2] in MIDWAY_PAIRS and case[2] == "fp32" else slow(*case)
        for case in itertools.product(MIDWAY, [0, 1, 3], ["fp32", "bf16", "fp16"])
    ],
)
def test_a_step_begins_in_one_layout_and_ends_in_another(tmp_path, source, shift, precision):
    target = list(MIDWAY)[(list(MIDWAY).index(source) + shift) % len(MIDWAY)]
    (strategy, arguments), (other, other_arguments) = MIDWAY[source], MIDWAY[target]
    precise = {"precision": precision}
    expected = run_ranks(begin_step, 4, strategy, tmp_path / "c", arguments | precise)[0]
    for found in run_ranks(load_and_end_step, 4, other, tmp_path / "c", other_arguments | precise):
        if shift == 0:
            assert_same(found, expected)
        else:  # the sums are taken in another order, and of bf16 held back gradients where others are in fp32
            atol = 1e-6 if precision == "fp32" else 2e-3
            torch.testing.assert_close(dict(found), dict(expected), rtol=1e-5, atol=atol)


@distributed(world_size=[2, slow(3)])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@ONE_LEVEL
def test_a_load_between_steps_is_seen_by_the_next_forward(tmp_path, strategy, precision):
    job = Job(strategy, precision=precision).train(0, 1)
    job.save(tmp_path / "c")
    other = Job(strategy, precision=precision, seed=1).train(5, 6, 7).load(tmp_path / "c")
    tokens = torch.arange(11, device=current_device())
    for one in (job, other):
        one.model.eval()
    with torch.no_grad():
        assert torch.equal(other.model(tokens), job.model(tokens))
    for one in (job, other):
        one.model.train()
        one.train(2, 3)
    assert_same(other.weights(), job.weights())


@distributed(world_size=2)
@ONE_LEVEL
def test_a_save_in_the_background_is_of_the_moment_of_the_call(tmp_path, strategy):
    job = Job(strategy).train(0, 1)
    job.save(tmp_path / "now")
    job.save(tmp_path / "later", use_async=True)
    job.booster.save_model(job.model, tmp_path / "m", shard=True, use_async=True)
    job.train(2, 3, 4)
    job.booster.wait_for_checkpoints()
    assert_same(stored(tmp_path / "later"), stored(tmp_path / "now"))
    dist.barrier()
    other = Job(strategy, seed=1)
    other.booster.load_model(other.model, tmp_path / "m")
    job.load(tmp_path / "now")
    assert_same(other.weights(), job.weights())


@distributed(world_size=[2, slow(3)])
@pytest.mark.parametrize("shard", [True, False])
@ONE_LEVEL
def test_files_hold_the_whole_model_under_the_users_names(tmp_path, strategy, shard):
    job = Job(strategy, ignores="parts").train(0, 1)
    path = tmp_path / ("m" if shard else "m.safetensors")
    job.booster.save_model(job.model, path, shard=shard)
    found = load_file(path / "model.safetensors" if shard else path)
    weights = job.weights()
    assert set(weights) - set(found) == {"head.weight"}
    assert all(torch.equal(found[name], weights[name].cpu()) for name in found)
    assert found["none"].shape == (0, 3)


@distributed(world_size=[slow(2), 3])
@ONE_LEVEL
def test_neither_saves_nor_loads_send_weights(tmp_path, strategy):
    booster = Booster(plugin=TorchFSDPPlugin(**STRATEGIES[strategy]))
    net = nn.ModuleList(nn.Linear(128, 128, bias=False) for _ in range(4))
    model, optimizer, *_ = booster.boost(nn.Sequential(*net), torch.optim.AdamW(net.parameters(), foreach=False))
    booster.backward(model(torch.ones(1, 128, device=current_device())).mean(), optimizer)
    optimizer.step()
    optimizer.zero_grad()
    with count_communication() as count:
        booster.save_model(model, tmp_path / "m.safetensors")
        booster.save_model(model, tmp_path / "m", shard=True)
        booster.save_optimizer(optimizer, tmp_path / "o", shard=True)
        booster.save(tmp_path / "c", model, optimizer)
        booster.load_model(model, tmp_path / "m")
        booster.load(tmp_path / "c", model, optimizer)
    # The ranks tell each other what they hold. One of the four layers alone has 64 KiB.
    assert sum(count.received.values()) < 6 * 8 * 2**10


@distributed(world_size=[slow(1), slow(2), 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@ONE_LEVEL
def test_state_dict_is_the_users_models_own(strategy, precision):
    expected, job = Net(0).state_dict(), Job(strategy, precision=precision, ignores="parts")
    found = job.weights()
    assert_same(found, expected)
    assert found._metadata == expected._metadata
    assert found["head.weight"] is found["embed.weight"]
    for tensor in found.values():
        tensor.zero_()
    assert_same(job.weights(), expected)
    into = {"mine": 1}
    given = job.model.state_dict(destination=into, prefix="net.")
    assert given is into
    assert list(given) == ["mine", *(f"net.{name}" for name in expected)]


@distributed(world_size=4)
def test_state_dict_over_replicas():
    assert_same(Job("hybrid", ignores="a layer").weights(), Net(0).state_dict())


@distributed(world_size=[2, slow(3)])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@ONE_LEVEL
def test_load_state_dict_is_seen_by_the_optimizer(strategy, precision):
    other, job = Net(1), Job(strategy, precision=precision, ignores="parts").train(0, 1)
    result = job.model.load_state_dict(other.state_dict())
    assert result.missing_keys == result.unexpected_keys == []
    assert_same(job.weights(), other.state_dict())
    for group in job.optimizer.param_groups:
        group |= {"lr": 0.0, "weight_decay": 0.0}
    job.train(2)
    trained = {name: one for name, one in job.weights().items() if not name.startswith("norm.")}
    assert_same(trained, {name: other.state_dict()[name] for name in trained})


def spoiled(state: dict[str, torch.Tensor], how: str) -> dict[str, torch.Tensor]:
    found = {name: tensor + 1 if tensor.is_floating_point() else tensor for name, tensor in state.items()}
    if how == "missing":
        del found["layers.0.wide.bias"]
    elif how == "unexpected":
        found["further"] = torch.ones(1)
    elif how == "shape":
        found["layers.2.narrow.weight"] = torch.ones(2, 2)
    return found


@distributed(world_size=[slow(2), 3])
@pytest.mark.parametrize("wrong_ranks", ["all", "one"])
@ONE_LEVEL
def test_what_does_not_fit_changes_nothing_on_any_rank(strategy, wrong_ranks):
    job = Job(strategy).train(0)
    before = job.weights()
    is_wrong = wrong_ranks == "all" or dist.get_rank() == 1
    error = RuntimeError if is_wrong else RankFailedError
    for how, text in (("missing", "Missing"), ("unexpected", "Unexpected"), ("shape", "size mismatch")):
        with pytest.raises(error, match=text):
            job.model.load_state_dict(spoiled(before, how if is_wrong else "none"))
        assert_same(job.weights(), before)
    found = job.model.load_state_dict(spoiled(before, "missing"), strict=False)
    assert found.missing_keys == ["layers.0.wide.bias"]
    changed = job.weights()
    assert torch.equal(changed["layers.0.wide.bias"], before["layers.0.wide.bias"])
    assert torch.equal(changed["layers.0.wide.weight"], before["layers.0.wide.weight"] + 1)
    job.train(1)


@distributed(world_size=[2, slow(3)])
@ONE_LEVEL
def test_a_copy_averages_weights(strategy):
    job = Job(strategy, ignores="parts").train(0)
    average = copy.deepcopy(job.model).requires_grad_(False)
    expected = job.weights()
    assert_same(average.state_dict(), expected)
    for step in (1, 2):
        with job.train(step).model.gathered() as net, torch.no_grad():
            for mean, weight in zip(average.parameters(), net.parameters(), strict=True):
                mean.lerp_(weight, 0.1)
        now = job.weights()
        expected = {name: torch.lerp(old, now[name], 0.1) for name, old in expected.items() if old.is_floating_point()}
    for name, parameter in average.named_parameters():
        assert torch.equal(parameter, expected[name]), name
    if dist.get_rank() == 0:  # nothing of the copy communicates
        plain = Net(1).eval()
        plain.load_state_dict(average.state_dict())
        tokens = torch.arange(11, device=current_device())
        assert torch.equal(average.eval()(tokens), plain.to(current_device())(tokens))
    job.train(3)


def with_late_parameters(strategy: str, **arguments) -> Job:
    """A job that froze and left out much, and took it in after some steps."""
    net = Net(0)
    for one in net.layers[1].wide.parameters():
        one.requires_grad_(False)
    job = Job(strategy, net=net, **arguments).train(0, 1)
    net.layers[1].wide.requires_grad_(True)
    net.frozen.requires_grad_(True)
    return job.train(2)


@distributed(world_size=[slow(2), 3])
@pytest.mark.parametrize("ignores", ["nothing", "parts"])
@ONE_LEVEL
def test_an_unfrozen_layer_is_saved_and_loaded(tmp_path, strategy, ignores):
    job = with_late_parameters(strategy, ignores=ignores)
    expected = stored(job.save(tmp_path / "a"))
    assert any("frozen.weight.exp_avg" in name for name in expected)
    fresh = Net(1)
    fresh.frozen.requires_grad_(True)
    other = Job("full", net=fresh, auto_wrap_policy=small_units(1)).load(tmp_path / "a")
    assert_same(stored(other.save(tmp_path / "b")), expected)
    job.train(5).load(tmp_path / "b").train(3)
    other.train(3)
    torch.testing.assert_close(dict(job.weights()), dict(other.weights()))  # other shards are summed in another order
    assert_same(
        stored(with_late_parameters(strategy, ignores=ignores).load(tmp_path / "a").save(tmp_path / "d")), expected
    )


@distributed(world_size=[2, slow(3)])
@ONE_LEVEL
def test_a_group_that_joins_later_is_saved_and_loaded(tmp_path, strategy):
    def build() -> Job:
        job = Job(strategy)
        job.raw.frozen.requires_grad_(True)
        job.train(0)
        job.optimizer.add_param_group({"params": list(job.raw.frozen.parameters()), "lr": 0.5})
        return job

    job = build().train(1, 2)
    expected = stored(job.save(tmp_path / "a"))
    assert any("frozen.weight.exp_avg" in name for name in expected)
    other = build().load(tmp_path / "a")
    assert_same(stored(other.save(tmp_path / "b")), expected)
    assert_same(other.train(3).weights(), job.train(3).weights())
    other.train(4)


def _llama_config():
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=16,
        intermediate_size=25,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=37,
        tie_word_embeddings=True,
        use_cache=False,
    )


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    from transformers import LlamaForCausalLM

    path = tmp_path_factory.mktemp("pretrained") / "m"
    with torch.random.fork_rng():
        torch.manual_seed(3)
        LlamaForCausalLM(_llama_config()).save_pretrained(path, max_shard_size="8KB")
    return path


def _opened(path: Path) -> nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").train()


def _train_llama(model, x, backward, rank, step):
    tokens = (x.abs() * 16).long().clamp(max=36)
    backward(model(input_ids=tokens, labels=tokens).loss)


def train_opened(path: Path, saved: Path, strategy: str) -> dict[str, torch.Tensor]:
    twins = FSDPTwins(lambda: _opened(path), _train_llama, **STRATEGIES[strategy]).train(range(3))
    twins.assert_equal()
    twins.booster.save(saved, twins.model, twins.optimizer)
    return dict(twins.model.state_dict())


@pytest.mark.parametrize(("strategy", "world_size"), [slow("full", 2), ("full", 3), slow("grad op", 2), ("hybrid", 4)])
def test_a_model_that_from_pretrained_opened_trains_and_opens_again(tmp_path, pretrained, strategy, world_size):
    weights = run_ranks(train_opened, world_size, pretrained, tmp_path / "c", strategy)[0]
    again = _opened(tmp_path / "c")
    assert_same(again.state_dict(), weights)
    assert again.lm_head.weight is again.model.embed_tokens.weight


def train_in_half(path: Path, saved: Path) -> dict[str, torch.Tensor]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    booster = Booster(plugin=TorchFSDPPlugin(mixed_precision=policy))
    raw = _opened(path)
    before = {name: tensor.clone() for name, tensor in raw.state_dict().items()}
    model, optimizer, *_ = booster.boost(raw, torch.optim.AdamW(raw.parameters(), lr=0.01))
    tokens = torch.arange(12, device=current_device()).view(2, 6)
    booster.backward(model(input_ids=tokens, labels=tokens).loss, optimizer)
    optimizer.step()
    booster.save(saved, model, optimizer)
    weights = dict(model.state_dict())
    assert all(not torch.equal(weights[name].cpu(), tensor) for name, tensor in before.items())
    return weights


def test_a_model_trained_in_bf16_is_saved_in_fp32(tmp_path, pretrained):
    weights = run_ranks(train_in_half, 2, pretrained, tmp_path / "c")[0]
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert_same(_opened(tmp_path / "c").state_dict(), weights)


class Skips(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(3))

    def forward(self, x: torch.Tensor, depth: int) -> torch.Tensor:
        for block in self.blocks[:depth]:
            x = block(x)
        return x.square().mean()


@distributed(world_size=2)
@pytest.mark.parametrize("holds_back", [True, False])
def test_waiting_gradients_of_a_unit_that_is_not_used_again(tmp_path, holds_back):
    def make():
        booster = Booster(plugin=TorchFSDPPlugin())
        net = Skips()
        return booster, *booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))[:2]

    def begin(booster, model, optimizer):
        with booster.no_sync(model, optimizer) if holds_back else nullcontext():
            booster.backward(model(torch.ones(2, 5, device=current_device()) + dist.get_rank(), 3), optimizer)

    def end(booster, model, optimizer):
        booster.backward(model(torch.ones(2, 5, device=current_device()) - dist.get_rank(), 1), optimizer)
        optimizer.step()
        return model.state_dict()

    first, second = make(), make()
    begin(*first)
    first[0].save(tmp_path / "c", first[1], first[2])
    second[0].load(tmp_path / "c", second[1], second[2])
    assert_same(end(*second), end(*first))
    assert not torch.equal(first[1].state_dict()["blocks.2.0.weight"].cpu(), Skips().blocks[2][0].weight)
