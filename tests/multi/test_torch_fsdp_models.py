"""TorchFSDPPlugin: models as they are, whatever way they use their weights, train as in one process."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
import torch.distributed as dist
from fsdp_model_cases import ONE_LEVEL, Routes, _go, _own_branch, grid, slow
from fsdp_twins import STRATEGIES, FSDPTwins, small_units
from gemini_models import (
    CHECKPOINTED,
    MODELS,
    WIDTH,
    AdaptedStack,
    Block,
    Lookup,
    Stack,
    adamw,
    seeded,
    square_loss,
    tokens_of,
)
from harness import distributed, preload, run_ranks
from torch import nn
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    lambda_auto_wrap_policy,
    transformer_auto_wrap_policy,
)
from torch.utils.checkpoint import checkpoint
from zoo import TRANSFORMERS_MODULES

from booster import Booster, ConfigError
from booster.device import current_device
from booster.plugins import TorchFSDPPlugin

preload(*TRANSFORMERS_MODULES)

pytestmark = pytest.mark.on_device


AS_THEY_ARE = [name for name in MODELS if name != "sparse"]


# In these a module reads the weights of another one. FSDP2 shows them to the unit that has them, and to nothing else:
# that both are of one unit, the plugin sees to by itself, but not against a policy of the user's.
READS_OTHERS_WEIGHTS = {"tied", "gives_itself", "gives_among", "many_uses", "hooked"}


def train_as_it_is(model, arguments):
    FSDPTwins(seeded(MODELS[model]), **arguments).train().assert_equal()


@pytest.mark.parametrize(
    ("strategy", "world_size", "model"),
    grid(
        ["full", "grad op", "none"],
        [2, 3, 4],
        AS_THEY_ARE,
        fast=lambda strategy, size, _: (strategy, size) == ("full", 2),
    ),
)
def test_a_model_as_it_is_trains_as_in_one_process(strategy, world_size, model):
    run_ranks(train_as_it_is, world_size, model, STRATEGIES[strategy])


IN_SMALLEST_UNITS = [name for name in AS_THEY_ARE if name not in READS_OTHERS_WEIGHTS]


@pytest.mark.parametrize("model", [*IN_SMALLEST_UNITS[::2], *map(slow, IN_SMALLEST_UNITS[1::2])])
def test_a_model_in_the_smallest_units_trains_as_in_one_process(model):
    run_ranks(train_as_it_is, 2, model, {"auto_wrap_policy": small_units(1)})


def _by_torch_jit(way):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layer = nn.Linear(WIDTH, WIDTH)
        return torch.jit.script(layer) if way == "script" else torch.jit.trace(layer, torch.ones(2, WIDTH))


@pytest.mark.parametrize("way", ["script", "trace"])
@distributed(world_size=2)
def test_a_layer_of_torch_jit_is_replicated(way):
    def build():
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), _by_torch_jit(way), nn.Linear(WIDTH, 3))

    twins = FSDPTwins(seeded(build))
    twins.train().assert_equal()
    assert [one.name for one in twins.model.replicated_params.params] == ["1.weight", "1.bias"]
    with pytest.raises(ConfigError, match=r"torch.jit does not take the hooks .*: boost the model that was given to"):
        FSDPTwins(lambda: _by_torch_jit(way))


@distributed(world_size=2)
def test_sparse_gradients_are_refused():
    with pytest.raises(ConfigError, match=r"'rows' makes sparse gradients"):
        FSDPTwins(lambda: Lookup(sparse=True))


# In "parts of a block", the model itself reads weights and calls layers of its blocks, which must not be units then.
UNITS_FOR = {"parts of a block": {"auto_wrap_policy": small_units(10**9)}}


@pytest.mark.parametrize(
    ("strategy", "way"),
    grid(
        ["full", "grad op"],
        CHECKPOINTED,
        fast=lambda strategy, way: strategy == "full" or way == "non-reentrant",
    ),
)
@distributed(world_size=2)
def test_activation_checkpoints_and_hooks_of_saved_tensors_equal_one_process_without(strategy, way):
    arguments = STRATEGIES[strategy] | UNITS_FOR.get(way, {})
    twins = FSDPTwins(lambda: Stack(way=way), build_plain=Stack, **arguments)
    twins.train().assert_equal()


@pytest.mark.parametrize("way", ["reentrant", "non-reentrant", "whole, reentrant", "parts of a block"])
@distributed(world_size=2)
def test_a_plain_backward_through_activation_checkpoints(way):
    arguments = UNITS_FOR.get(way, {})
    twins = FSDPTwins(lambda: Stack(way=way), build_plain=Stack, calls_plain_backward=True, **arguments)
    twins.train().assert_equal()


@pytest.mark.parametrize("way", ["reentrant", "non-reentrant"])
@distributed(world_size=[2, slow(3)])
def test_activation_checkpoints_inside_of_no_sync(way):
    twins = FSDPTwins(lambda: Stack(way=way), build_plain=Stack)
    for step in range(3):
        twins.backward(step)
        with twins.booster.no_sync(twins.model, twins.optimizer):
            twins.backward(10 + step)
        twins.backward(20 + step)
        twins.step()
    twins.assert_equal()


def _around_the_model(model, x, backward, rank, step):
    if hasattr(model, "unwrap"):
        backward(square_loss(checkpoint(model, x.requires_grad_(), use_reentrant=bool(step % 2))))
    else:
        backward(square_loss(model(x)))


@ONE_LEVEL
@pytest.mark.parametrize("way", ["booster", "plain"])
@distributed(world_size=2)
def test_checkpoints_around_the_model(strategy, way):
    twins = FSDPTwins(Stack, _around_the_model, calls_plain_backward=way == "plain", **STRATEGIES[strategy])
    twins.train().assert_equal()


@ONE_LEVEL
@pytest.mark.parametrize("way", ["plain", "reentrant", "non-reentrant", "whole, non-reentrant"])
@distributed(world_size=2)
def test_frozen_weights_beside_trained_ones(strategy, way):
    twins = FSDPTwins(lambda: AdaptedStack(way), build_plain=lambda: AdaptedStack("plain"), **STRATEGIES[strategy])
    twins.train().assert_equal()


def _llama(gradient_checkpointing):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=33,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        use_cache=False,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    if gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": gradient_checkpointing == "reentrant"})
    return model.train()


def _train_llama(model, x, backward, rank, step):
    tokens = (x.abs() * 16).long().clamp(max=31)
    backward(model(input_ids=tokens, labels=tokens).loss)


@pytest.mark.parametrize("way", ["reentrant", "non-reentrant"])
@ONE_LEVEL
@distributed(world_size=[2, slow(3)])
def test_gradient_checkpointing_of_transformers(strategy, way):
    twins = FSDPTwins(lambda: _llama(way), _train_llama, build_plain=lambda: _llama(None), **STRATEGIES[strategy])
    twins.train().assert_equal()


class TiedBlock(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.second(torch.tanh(self.first(x))))


class TiedAcross(nn.Module):
    """Blocks of which two share a weight, an embedding that is the head, and a weight of a block and of the root."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embedding, self.head = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 11, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.head.weight = self.embedding.weight
        self.blocks[2].first.weight = self.blocks[0].first.weight
        self.blocks[3].second.weight = self.middle.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.middle(self.embedding(tokens_of(x)).mean(dim=1))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class TiedInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.blocks = nn.ModuleList(TiedBlock() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class OneBlockOften(nn.Module):
    """A list that holds the same block several times, and another one outside of the list."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        block = Block()
        self.blocks = nn.ModuleList([block, Block(), block, Block(), block])
        self.again = self.blocks[1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.again(x)


class ReusedPieces(nn.Module):
    """A block is called whole, and a layer of it by itself, before and after."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.blocks[2](self.blocks[1](x)) + self.blocks[0](2 * x)


@pytest.mark.parametrize("model", [TiedAcross, TiedInside, OneBlockOften, ReusedPieces])
@pytest.mark.parametrize("strategy", ["full", "grad op", slow("none")])
@distributed(world_size=[2, slow(3)])
def test_tied_weights_and_reused_blocks(strategy, model):
    twins = FSDPTwins(model, **STRATEGIES[strategy]).train()
    twins.assert_equal()
    state = twins.model.state_dict()
    for name, tensor in twins.plain.state_dict(keep_vars=True).items():
        others = [other for other, one in twins.plain.state_dict(keep_vars=True).items() if one is tensor]
        assert all(torch.equal(state[name], state[other]) for other in others)


class SmallParts(nn.Module):
    """First dimensions smaller than the world, single elements, 0-dim parameters, none at all, in block and root."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.down, self.up = nn.Linear(WIDTH, 2), nn.Linear(2, WIDTH)
        self.one, self.scalar = nn.Parameter(torch.ones(1)), nn.Parameter(torch.tensor(0.7))
        self.row, self.nothing = nn.Parameter(torch.randn(1, WIDTH)), nn.Parameter(torch.zeros(0, 3))
        self.three = nn.Parameter(torch.randn(3, 1, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.down(x)) * self.three.mean(dim=(0, 1))
        return x + self.scalar * self.up(hidden) * self.one + self.row + self.nothing.sum()


class OnlySmall(nn.Module):
    """A block of which a rank of three holds nothing, and one that has nothing but 0-dim parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.offset, self.scalars = nn.Parameter(torch.zeros(1, WIDTH)), nn.ParameterList()
        self.scalars.extend(nn.Parameter(torch.tensor(float(number))) for number in (1, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.offset) * self.scalars[0] / self.scalars[1]


class Small(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.blocks = nn.ModuleList(kind() for _ in range(3))
        self.last = kind()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x)


@pytest.mark.parametrize("kind", [SmallParts, OnlySmall])
@ONE_LEVEL
@distributed(world_size=[slow(2), 3, slow(4)])
def test_parameters_smaller_than_the_world(strategy, kind):
    FSDPTwins(lambda: Small(kind), **STRATEGIES[strategy]).train().assert_equal()


@pytest.mark.parametrize("kind", [SmallParts, OnlySmall])
@distributed(world_size=4)
def test_parameters_smaller_than_the_world_over_replicas(kind):
    FSDPTwins(lambda: Small(kind), **STRATEGIES["hybrid"]).train().assert_equal()


def _in_three_groups(model):
    named = dict(model.named_parameters())
    flat = [one for name, one in named.items() if one.dim() < 2]
    rest = [one for name, one in named.items() if one.dim() >= 2]
    return torch.optim.AdamW(
        [{"params": flat, "weight_decay": 0.0}, {"params": rest[::2], "lr": 0.02}, {"params": rest[1::2]}], eps=1e-3
    )


@distributed(world_size=[slow(3), 4])
def test_small_parameters_in_several_groups():
    FSDPTwins(lambda: Small(SmallParts), optimizer=_in_three_groups).train().assert_equal()


class MixedBlock(nn.Module):
    """fp32 and fp64, trained and not, and integers that are no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).double()
        self.counts = nn.Parameter(torch.arange(WIDTH), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
        self.still = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.second(torch.tanh(self.first(x)).double()) * self.scale + self.still
        return x + hidden.float() + self.counts / 8


@ONE_LEVEL
@distributed(world_size=[slow(2), 3])
def test_several_formats_in_one_block(strategy):
    FSDPTwins(lambda: Small(MixedBlock), **STRATEGIES[strategy]).train().assert_equal()


class HalfBlock(nn.Module):
    """A layer of bf16 beside one of fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.tanh(self.first(x)).bfloat16()).float()


@ONE_LEVEL
@distributed(world_size=[slow(2), 3])
def test_low_precision_beside_fp32_in_one_block(strategy):
    twins = FSDPTwins(  # at once: losses are as coarse as the weights
        lambda: Small(HalfBlock),
        at_once=True,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), 0.5),
        **STRATEGIES[strategy],
    )
    for step in range(3):
        twins.backward(step)
        for optimizer in (twins.plain_optimizer, twins.optimizer):
            optimizer.step()
            optimizer.zero_grad()
    found, expected = twins.model.state_dict(), twins.plain.state_dict()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        # A gradient of bf16 rounds each rank's part by up to 2**-9, and so does the update; the weights are at most 1.
        torch.testing.assert_close(found[name].float(), tensor.float(), rtol=2**-7, atol=2**-8)
        assert not torch.equal(tensor, twins.initial[name])


class Unlike(nn.Module):
    """Blocks that return their input, or a constant, on some calls: no gradient comes through them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.blocks = nn.ModuleList(UnlikeBlock(number) for number in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class UnlikeBlock(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.inner, self.number = Block(), number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.number == 1:
            return x
        if self.number == 2:
            return x + self.inner(x).detach()
        return self.inner(x)


@ONE_LEVEL
@distributed(world_size=2)
def test_blocks_through_which_no_gradient_goes(strategy):
    FSDPTwins(Unlike, **STRATEGIES[strategy]).train().assert_equal()


def _spectral_norm():
    torch.manual_seed(3)
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh(), Block())


def _old_weight_norm():
    torch.manual_seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # use the new one, it says
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh(), Block())


def _batch_norm():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), Block(), nn.BatchNorm1d(WIDTH))


@ONE_LEVEL
@pytest.mark.parametrize("build", [_spectral_norm, _old_weight_norm, _batch_norm])
@distributed(world_size=2)
def test_buffers_and_weights_that_are_computed_from_others(strategy, build):
    FSDPTwins(build, at_once=True, **STRATEGIES[strategy]).train().assert_equal()


def _one_ignored_block(model):
    return [model.blocks[1]]


def _a_part_of_a_block(model):
    return [model.blocks[0].first, model.head]


def _all_blocks(model):
    return list(model.blocks)


@pytest.mark.parametrize("ignores", [_one_ignored_block, _a_part_of_a_block, _all_blocks])
@pytest.mark.parametrize("strategy", ["full", slow("grad op"), "none"])
@distributed(world_size=[2, slow(3)])
def test_ignored_modules_train_whole_on_every_rank(strategy, ignores):
    twins = FSDPTwins(Stack, ignores=ignores, **STRATEGIES[strategy]).train()
    twins.assert_equal()
    shapes = {name: one.shape for name, one in twins.plain.named_parameters()}
    for ignored in ignores(twins.raw):
        for name, parameter in twins.raw.named_parameters():
            if any(parameter is one for one in ignored.parameters()):
                assert parameter.shape == shapes[name]


@distributed(world_size=4)
def test_ignored_modules_over_replicas():
    FSDPTwins(Stack, ignores=_a_part_of_a_block, **STRATEGIES["hybrid"]).train().assert_equal()


@distributed(world_size=2)
def test_ignored_modules_of_which_ranks_use_others():
    twins = FSDPTwins(Routes, _go(_own_branch, "simple"), ignores=lambda model: [model.blocks[0], model.blocks[2]])
    twins.train(range(5)).assert_equal()


def _transposed():
    model = Stack()
    weight = model.blocks[1].first.weight
    weight.data = weight.data.t().contiguous().t()
    return model


@distributed(world_size=2)
def test_an_ignored_weight_may_lie_in_memory_in_another_order():
    FSDPTwins(_transposed, ignores=_one_ignored_block, **STRATEGIES["full"]).train().assert_equal()


def _is_linear(module):
    return isinstance(module, nn.Linear)


def _is_head(module):
    return module.__class__ is nn.Linear and module.out_features == 3


POLICIES = {
    "by size, one unit": small_units(10**9),
    "by size, layers": small_units(1),
    "by size, blocks": small_units(500),
    "by class": ModuleWrapPolicy({Block}),
    "by two classes": ModuleWrapPolicy({Block, nn.Linear}),
    "of transformers": functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
    "by a function": functools.partial(lambda_auto_wrap_policy, lambda_fn=_is_linear),
    "by a condition": CustomPolicy(_is_head),
}


@pytest.mark.parametrize("policy", POLICIES)
@ONE_LEVEL
@distributed(world_size=[2, slow(3)])
def test_policies_say_what_the_units_are(strategy, policy):
    FSDPTwins(Stack, auto_wrap_policy=POLICIES[policy], **STRATEGIES[strategy]).train().assert_equal()


@pytest.mark.parametrize("num_layers", [1, 3])
@distributed(world_size=2)
def test_a_model_without_blocks(num_layers):
    def build():
        torch.manual_seed(2)
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers)))

    FSDPTwins(build, optimizer=adamw).train().assert_equal()


@distributed(world_size=2)
def test_a_model_without_trained_parameters_computes():
    booster = Booster(plugin=TorchFSDPPlugin())
    plain, raw = Stack().to(current_device()), Stack().requires_grad_(False)
    model, *_ = booster.boost(raw)
    x = torch.ones(2, WIDTH, device=current_device()).requires_grad_()
    for _ in range(2):
        expected, found = plain(x), model(x)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(torch.autograd.grad(found.sum(), x), torch.autograd.grad(expected.sum(), x))


@distributed(world_size=2)
def test_two_models_and_a_loss_through_both():
    booster = Booster(plugin=TorchFSDPPlugin())
    torch.manual_seed(0)
    plain = nn.ModuleList([Stack(2), nn.Linear(3, 2)]).to(current_device())
    expected = torch.optim.SGD(plain.parameters(), lr=0.1)
    raw_first, raw_second = Stack(2), nn.Linear(3, 2)
    raw_second.load_state_dict(plain[1].state_dict())
    first, of_first, *_ = booster.boost(raw_first, torch.optim.SGD(raw_first.parameters(), lr=0.1))
    second, of_second, *_ = booster.boost(raw_second, torch.optim.SGD(raw_second.parameters(), lr=0.1))
    for step in range(3):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step)).to(current_device())
        plain[1](plain[0](x)).square().mean().backward()
        mine = x[2 * dist.get_rank() : 2 * dist.get_rank() + 2]
        booster.backward(second(first(mine)).square().mean(), of_first)
        for optimizer in (of_first, of_second, expected):
            optimizer.step()
            optimizer.zero_grad()
    found = [dict(first.state_dict()), dict(second.state_dict())]
    torch.testing.assert_close(found, [dict(one.state_dict()) for one in plain], rtol=2e-5, atol=4e-6)
