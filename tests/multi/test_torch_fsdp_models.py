"""TorchFSDPPlugin: models as they are, whatever way they use their weights, train as in one process."""

from __future__ import annotations

import functools
import itertools
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from fsdp_twins import STRATEGIES, FSDPTwins, small_units
from gemini_models import (
    CHECKPOINTED,
    MODELS,
    WIDTH,
    AdaptedStack,
    Block,
    DataclassOutput,
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
from booster.plugins import TorchFSDPPlugin

preload(*TRANSFORMERS_MODULES)


def slow(*values):
    """Returns a case that `make test` leaves to `make test-all`."""
    return pytest.param(*values, marks=pytest.mark.slow)


ONE_LEVEL = pytest.mark.parametrize("strategy", ["full", slow("grad op"), slow("none")])


def grid(*values, fast):
    """Returns the product of lists as parameters; those that `fast` refuses are slow tests."""
    return [case if fast(*case) else slow(*case) for case in itertools.product(*values)]


# Models as they are.


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


@distributed(world_size=2)
def test_sparse_gradients_are_refused():
    with pytest.raises(ConfigError, match=r"'rows' makes sparse gradients"):
        FSDPTwins(lambda: Lookup(sparse=True))


# Activation checkpoints.

# In "pieces of a block", the model itself reads weights and calls layers of its blocks, which must not be units then.
UNITS_FOR = {"pieces of a block": {"auto_wrap_policy": small_units(10**9)}}


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


@pytest.mark.parametrize("way", ["reentrant", "non-reentrant", "whole, reentrant", "pieces of a block"])
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


# Another way on each rank.


class Routes(nn.Module):
    """Goes the way that it is told."""

    def __init__(self, is_checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.trunk, self.head, self.extra = Block(), nn.Linear(WIDTH, 3), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.is_checkpointed = is_checkpointed

    def forward(self, x: torch.Tensor, way: list[int], uses_extra: bool = False) -> torch.Tensor:
        x = self.trunk(x)
        for number in way:
            block = self.blocks[number]
            x = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
        return self.head(F.linear(x, self.extra.weight) if uses_extra else x)


def _one_branch(rank, step):
    return [[0], []][min(rank, 1)]


def _own_branch(rank, step):
    return [(rank + step) % 5]


def _early_exit(rank, step):
    return list(range(1 + (rank + step) % 5))


def _layer_drop(rank, step):
    kept = torch.rand(6, generator=torch.Generator().manual_seed(10 * step + rank)) < 0.6
    return [number for number in range(6) if kept[number]]


def _own_order(rank, step):
    return torch.randperm(6, generator=torch.Generator().manual_seed(10 * step + rank)).tolist()


def _several_times(rank, step):
    return [rank % 6] * (1 + (rank + step) % 3)


def _alike_at_first(rank, step):
    return [0, 1, 2] if step == 0 else _layer_drop(rank, step)


WAYS = {
    way.__name__.strip("_"): way
    for way in (_one_branch, _own_branch, _early_exit, _layer_drop, _own_order, _several_times, _alike_at_first)
}


def _go(choose, variant):
    def iterate(model, x, backward, rank, step):
        way = choose(rank, step)
        if variant == "accumulated":
            backward(square_loss(model(x, way)))
            way = choose(rank + 1, step + 7)
        loss = square_loss(model(x, way, uses_extra=variant == "extra" and rank == step % 2))
        if variant == "two forwards":
            loss = loss + square_loss(model(-x, choose(rank + 2, step)))
        outputs = []
        if variant == "evaluated":
            with torch.no_grad():
                outputs = [model(x, choose(rank + 3, step)).clone()]
        backward(loss)
        return outputs

    return iterate


def go_own_ways(way, variant, arguments, has_plain_backward=False):
    twins = FSDPTwins(
        lambda: Routes(variant == "checkpointed"),
        _go(WAYS[way], variant),
        build_plain=Routes,
        calls_plain_backward=has_plain_backward,
        **arguments,
    )
    twins.train(range(5)).assert_equal()


@pytest.mark.parametrize(
    ("way", "strategy", "world_size"),
    grid(
        WAYS,
        ["full", "grad op", "none"],
        [2, 3, 4],
        # Every way once; two of them elsewhere too.
        fast=lambda way, strategy, world_size: (
            (strategy, world_size) == ("full", 2)
            or ((strategy, world_size) in (("grad op", 3), ("full", 4)) and way in ("layer_drop", "own_order"))
        ),
    ),
)
def test_each_rank_goes_its_own_way(way, strategy, world_size):
    run_ranks(go_own_ways, world_size, way, "simple", STRATEGIES[strategy])


@pytest.mark.parametrize("way", [way if way in ("one_branch", "layer_drop") else slow(way) for way in WAYS])
def test_each_rank_goes_its_own_way_over_replicas(way):
    run_ranks(go_own_ways, 4, way, "simple", STRATEGIES["hybrid"])


@pytest.mark.parametrize(
    ("way", "variant", "backward"),
    grid(
        ["own_branch", "layer_drop", "own_order"],
        ["accumulated", "extra", "checkpointed", "evaluated", "two forwards"],
        ["booster", "plain"],
        fast=lambda way, variant, backward: (
            (way, backward) == ("layer_drop", "plain")
            or ((way, backward) == ("own_order", "booster") and variant in ("accumulated", "extra"))
        ),
    ),
)
def test_each_rank_goes_its_own_way_in_other_loops(way, variant, backward):
    run_ranks(go_own_ways, 2, way, variant, {}, backward == "plain")


@pytest.mark.parametrize("policy", [1, 600])
def test_each_rank_goes_its_own_way_through_other_units(policy):
    run_ranks(go_own_ways, 3, "layer_drop", "two forwards", {"auto_wrap_policy": small_units(policy)})


def _without_some(model, x, backward, rank, step):
    with torch.set_grad_enabled(rank == step % 2):
        hidden = (model.unwrap() if hasattr(model, "unwrap") else model).blocks[2](x)
    backward(square_loss(model(hidden, [1])))


@distributed(world_size=[slow(2), 3])
def test_a_rank_that_calls_a_block_by_itself_without_gradients():
    FSDPTwins(Routes, _without_some).train().assert_equal()


# Ties and reuse.


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


# Parameters of all sizes and formats.


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


# Inputs and outputs.


class ViewBlock(nn.Module):
    """Returns a view of what it computed."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.kind = kind

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.second(torch.tanh(self.first(x)))
        if self.kind == "view":
            return hidden.view(2, -1, WIDTH)
        if self.kind == "slice":
            return torch.cat([hidden, hidden], dim=1)[:, :WIDTH]
        if self.kind == "transposed":
            return hidden.t()
        if self.kind == "of the input":
            return (x + 0)[:, :WIDTH] + 0 * hidden
        if self.kind == "chunks":
            return hidden.chunk(2, dim=1)
        return hidden


class ChangesInPlace(nn.Module):
    """Changes in place what its blocks return."""

    def __init__(self, kind: str, change: str) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.blocks = nn.ModuleList(ViewBlock(kind) for _ in range(3))
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            y = block(x)
            if isinstance(y, tuple):
                y = torch.cat([self.changed(part) for part in y], dim=1)
            else:
                y = self.changed(y)
            x = x + (y.t() if y.shape[0] == WIDTH else y.reshape(-1, WIDTH))
        return x

    def changed(self, y: torch.Tensor) -> torch.Tensor:
        if self.change == "added to":
            y += 1
        elif self.change == "multiplied":
            y.mul_(2)
        elif self.change == "rectified":
            F.relu(y, inplace=True)
        elif self.change == "a part":
            y[:1] = 0
        return y


@pytest.mark.parametrize(
    ("kind", "change"),
    grid(
        ["itself", "view", "slice", "transposed", "of the input"],
        ["added to", "multiplied", "rectified", "a part"],
        fast=lambda kind, change: kind == "view" or change == "multiplied",
    ),
)
@distributed(world_size=2)
def test_what_a_block_returns_may_be_changed_in_place(kind, change):
    FSDPTwins(lambda: ChangesInPlace(kind, change)).train().assert_equal()


class WritesToItsInput(nn.Module):
    """Blocks that begin by changing their input in place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


@distributed(world_size=2)
def test_a_block_may_change_its_input_in_place():
    FSDPTwins(WritesToItsInput).train().assert_equal()


@dataclass
class Hidden:
    value: torch.Tensor
    note: str
    others: list[torch.Tensor]


class Structured(nn.Module):
    """Blocks that take and return dictionaries, dataclasses, tuples with None, and what is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.blocks = nn.ModuleList(StructuredBlock() for _ in range(4))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        state: Any = {"x": x, "all": ()}
        for number, block in enumerate(self.blocks):
            state = block(state, as_dataclass=number % 2 == 0)
        return {"logits": self.head(state["x"]), "nested": ({"all": state["all"]}, None, "text")}


class StructuredBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, state: Any, *, as_dataclass: bool) -> Any:
        if isinstance(state, Hidden):
            state = {"x": state.value, "all": tuple(state.others)}
        x = self.inner(state["x"])
        found = (*state["all"], x)
        return Hidden(value=x, note="text", others=list(found)) if as_dataclass else {"x": x, "all": found}


def _of_structure(model, x, backward, rank, step):
    outputs = model(x)
    loss = square_loss(outputs["logits"])
    for hidden in outputs["nested"][0]["all"]:
        loss = loss + hidden.square().mean()
    backward(loss)


def _of_dataclass(model, x, backward, rank, step):
    result = model(x)
    backward(square_loss(result.logits) + result.hidden.square().mean())


@pytest.mark.parametrize(
    ("model", "loop"), [(Structured, _of_structure), (DataclassOutput, _of_dataclass)], ids=["dicts", "dataclass"]
)
@pytest.mark.parametrize("policy", [None, 1])
@ONE_LEVEL
@distributed(world_size=2)
def test_structured_inputs_and_outputs(strategy, model, loop, policy):
    arguments = {} if policy is None else {"auto_wrap_policy": small_units(policy)}
    FSDPTwins(seeded(model), loop, **STRATEGIES[strategy], **arguments).train().assert_equal()


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


# Which modules are units.


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
    plain, raw = Stack(), Stack().requires_grad_(False)
    model, *_ = booster.boost(raw)
    x = torch.ones(2, WIDTH).requires_grad_()
    for _ in range(2):
        expected, found = plain(x), model(x)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(torch.autograd.grad(found.sum(), x), torch.autograd.grad(expected.sum(), x))


@distributed(world_size=2)
def test_two_models_and_a_loss_through_both():
    booster = Booster(plugin=TorchFSDPPlugin())
    torch.manual_seed(0)
    plain = nn.ModuleList([Stack(2), nn.Linear(3, 2)])
    expected = torch.optim.SGD(plain.parameters(), lr=0.1)
    raw_first, raw_second = Stack(2), nn.Linear(3, 2)
    raw_second.load_state_dict(plain[1].state_dict())
    first, of_first, *_ = booster.boost(raw_first, torch.optim.SGD(raw_first.parameters(), lr=0.1))
    second, of_second, *_ = booster.boost(raw_second, torch.optim.SGD(raw_second.parameters(), lr=0.1))
    for step in range(3):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        plain[1](plain[0](x)).square().mean().backward()
        mine = x[2 * dist.get_rank() : 2 * dist.get_rank() + 2]
        booster.backward(second(first(mine)).square().mean(), of_first)
        for optimizer in (of_first, of_second, expected):
            optimizer.step()
            optimizer.zero_grad()
    found = [dict(first.state_dict()), dict(second.state_dict())]
    torch.testing.assert_close(found, [dict(one.state_dict()) for one in plain], rtol=2e-5, atol=4e-6)
