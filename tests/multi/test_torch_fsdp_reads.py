"""TorchFSDPPlugin: weights that are read where their module does not run train as in one process."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from fsdp_model_cases import grid
from fsdp_twins import STRATEGIES, FSDPTwins
from gemini_models import WIDTH, Block, Stack, square_loss
from harness import distributed, run_ranks
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.checkpoint import checkpoint
from weight_reads import LOOPS, penalty

from booster.errors import ConfigError
from booster.plugins.torch_fsdp.fsdp2_internals import ShardedWeight

pytestmark = pytest.mark.on_device
BLOCKS = ModuleWrapPolicy({Block})


def read_between_forwards(loop, plain_backward, **arguments):
    twins = FSDPTwins(Stack, LOOPS[loop], calls_plain_backward=plain_backward, auto_wrap_policy=BLOCKS, **arguments)
    twins.train().assert_equal()


@pytest.mark.parametrize(
    ("loop", "strategy", "backward", "world_size"),
    grid(
        LOOPS,
        ["full", "grad op", "none"],
        ["booster", "plain"],
        [2, 3],
        fast=lambda loop, strategy, backward, world_size: (strategy, backward, world_size) == ("full", "booster", 2),
    ),
)
def test_weights_are_read_between_forwards(loop, strategy, backward, world_size):
    run_ranks(read_between_forwards, world_size, loop, backward == "plain", **STRATEGIES[strategy])


def test_weights_are_read_between_forwards_over_replicas():
    run_ranks(read_between_forwards, 4, "with_a_factor_of_the_rank", False, **STRATEGIES["hybrid"])


class Reader(nn.Module):
    """Computes with the weight of a block that does not run at that time."""

    def __init__(self, block: Block, way: str) -> None:
        super().__init__()
        self.block, self.way, self.own = [block], way, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.block[0].first.weight
        if self.way == "detached":
            weight = weight.detach()
        if self.way == "called":
            return x + self.own(self.block[0].second(x))
        return x + self.own(F.linear(x, weight.t()))


class Readers(nn.Module):
    """Blocks, and modules that read their weights, on some ranks only if `by_rank`."""

    def __init__(self, way: str, checkpoints: bool, by_rank: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.readers = nn.ModuleList(Reader(self.blocks[number], way) for number in (2, 0))
        self.head = nn.Linear(WIDTH, 3)
        self.checkpoints, self.by_rank = checkpoints, by_rank

    def run(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(module, x, use_reentrant=False) if self.checkpoints else module(x)

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            x = self.run(block, x)
            if number < 2 and not (self.by_rank and (rank + number) % 2):
                x = self.run(self.readers[number], x)
        return self.head(x)


def _read(model, x, backward, rank, step):
    model.eval()
    with torch.no_grad():
        evaluated = model(x, rank).clone()
    model.train()
    backward(square_loss(model(x, rank)))
    return [evaluated]


@pytest.mark.parametrize("way", ["read", "detached", "called"])
@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("by_rank", [False, True])
@distributed(world_size=2)
def test_modules_read_weights_of_others(way, checkpoints, by_rank):
    policy = ModuleWrapPolicy({Block, Reader})
    twins = FSDPTwins(lambda: Readers(way, checkpoints, by_rank), _read, auto_wrap_policy=policy)
    twins.train().assert_equal()


class Returned(nn.Module):
    """Returns its weight, or a view of it."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.linear.weight.requires_grad_(way != "frozen")
        self.way = way

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weight = self.linear.weight
        return self.linear(x), weight.t() if self.way == "view" else weight


class UsesReturned(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.giver, self.head = Returned(way), nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, weight = self.giver(x)
        return self.head(y + x @ weight)


def _evaluate_and_train(model, x, backward, rank, step):
    found = []
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            found.append(model(x).clone())
    loss = square_loss(model(x))
    backward(loss, retain_graph=True)  # frees the weights
    backward(loss)
    return found


@pytest.mark.parametrize("way", ["itself", "view", "frozen"])
@pytest.mark.parametrize("strategy", ["full", "grad op"])
@distributed(world_size=2)
def test_modules_return_weights(way, strategy):
    arguments = {"auto_wrap_policy": ModuleWrapPolicy({Returned}), **STRATEGIES[strategy]}
    FSDPTwins(lambda: UsesReturned(way), _evaluate_and_train, **arguments).train().assert_equal()


@distributed(world_size=2)
def test_a_penalty_reads_the_shards_in_their_own_dtype():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    twins = FSDPTwins(Stack, auto_wrap_policy=BLOCKS, mixed_precision=policy)
    twins.model(twins.batch(0))
    found, expected = penalty(twins.model.blocks), penalty(twins.plain.blocks)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    twins.optimizer.backward(found)
    twins.booster.clip_grad_norm_(twins.optimizer, float("inf"))
    expected.backward()
    gradients = dict(twins.optimizer.named_gradients())
    for name, parameter in twins.plain.blocks.named_parameters(prefix="blocks"):
        start, stop = twins.model.param_of[id(twins.model.get_parameter(name))].flat_range
        own = parameter.grad.reshape(-1)[start:stop]
        # Gradients are of the dtype that the weights are computed with, and have its precision.
        torch.testing.assert_close(gradients[name].reshape(-1), own, rtol=2**-8, atol=1e-7)


@distributed(world_size=2)
def test_writes_to_weights_in_graphs_are_errors():
    twins = FSDPTwins(Stack, auto_wrap_policy=BLOCKS)
    weight = twins.model.blocks[0].first.weight
    assert isinstance(weight, ShardedWeight)
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        weight.mul_(2)
    is_called = isinstance(weight.detach(), ShardedWeight)  # before 2.13 torch does not call subclasses of DTensor
    with torch.no_grad(), pytest.raises((ConfigError, RuntimeError), match="gathered" if is_called else "DTensor"):
        weight.copy_(torch.zeros(WIDTH, WIDTH, device=twins.booster.device))
    twins.train().assert_equal()
