"""GeminiPlugin: any way through a model, the same on all ranks or not, trains as in one process, and nothing hangs."""

from __future__ import annotations

import itertools
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gemini_models import POLICIES, WIDTH, Block, Stack, Twins, simply, square_loss
from harness import distributed, run_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint
from weight_reads import LOOPS as LOOPS_THAT_READ
from weight_reads import after_the_forward, penalty

from booster.errors import ConfigError, DesyncError, RankFailedError
from booster.fault_tolerance import collective_errors

pytestmark = pytest.mark.on_device

PLACED = pytest.mark.parametrize("policy", ["static", pytest.param("prefetch", marks=pytest.mark.slow), "cpu"])


def _grid(*values, fast):
    """Returns the product of lists as parameters; those that `fast` refuses are slow tests."""
    return [pytest.param(*case, marks=[] if fast(*case) else pytest.mark.slow) for case in itertools.product(*values)]


# The same on all ranks.


def _twice(model, x, backward, rank, step):
    loss = square_loss(model(x))
    backward(loss, retain_graph=True)
    backward(loss)


def _two_losses(model, x, backward, rank, step):
    output = model(x)
    backward(output[:, 0].mean(), retain_graph=True)
    backward(output[:, 1].square().mean())


def _two_forwards(model, x, backward, rank, step):
    backward(square_loss(model(x)) + square_loss(model(2 * x)))


def _two_graphs(model, x, backward, rank, step):
    first, second = square_loss(model(x)), square_loss(model(-x))
    backward(first)
    backward(second)


def _penalty(model, x, backward, rank, step):
    x = x.clone().requires_grad_()
    output = model(x)
    (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    backward(square_loss(output) + gradient.square().sum())


def _penalty_of_weights(model, x, backward, rank, step):
    loss = square_loss(model(x))
    weights = [one for name, one in model.named_parameters() if name.startswith("blocks.1")]
    gradients = torch.autograd.grad(loss, weights, create_graph=True)
    backward(loss + sum(gradient.square().sum() for gradient in gradients))


def _regularized_between(model, x, backward, rank, step):
    loss = square_loss(model(x)) + penalty(model)
    backward(loss + square_loss(model(2 * x)))


def _regularized_by_views(model, x, backward, rank, step):
    flat = torch.cat([parameter.view(-1) for parameter in model.parameters()])
    norms = torch._foreach_norm([parameter.detach() for parameter in model.parameters()])
    backward(square_loss(model(x)) + 0.1 * flat.norm())
    return norms


def _some_inputs(model, x, backward, rank, step):
    named = dict(model.named_parameters())
    backward(square_loss(model(x)), inputs=[named["head.weight"], named["blocks.0.first.bias"]])


def _unwrapped(model, x, backward, rank, step):
    backward(square_loss((model.unwrap() if hasattr(model, "unwrap") else model)(x)))


def _evaluating(model, x, backward, rank, step):
    outputs = []
    for mode in (torch.no_grad, torch.inference_mode):
        model.eval()
        with mode():
            outputs += [model(x).clone(), model(x[:1]).clone()]
        model.train()
    output = model(x)
    with torch.no_grad():
        outputs.append(model(-x))  # between forward and backward
    backward(square_loss(output))
    with torch.inference_mode():
        outputs.append(model(x + 1).clone())
    return outputs


def _generating(model, x, backward, rank, step):
    backward(square_loss(model(x)))
    with torch.no_grad():
        for _ in range(5):
            x = torch.cat([model(x), x[:, 3:]], dim=1)
    return [x]


def _without_backward(model, x, backward, rank, step):
    model(x + 3)  # a graph that is not used
    backward(square_loss(model(x)))


def _only_after_a_failure(model, x, backward, rank, step):
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(x[:, : WIDTH - 1])
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), torch.no_grad():
        model(x[:, : WIDTH - 1])
    backward(square_loss(model(x)))


LOOPS = {
    loop.__name__.strip("_"): loop
    for loop in (
        _twice,
        _two_losses,
        _two_forwards,
        _two_graphs,
        _penalty,
        _penalty_of_weights,
        *LOOPS_THAT_READ.values(),
        _regularized_between,
        _regularized_by_views,
        _some_inputs,
        _unwrapped,
        _evaluating,
        _generating,
        _without_backward,
        _only_after_a_failure,
    )
}

FAST_LOOPS = [("booster", "cpu"), ("plain", "prefetch")]  # in turn


@pytest.mark.parametrize(
    ("loop", "way", "policy"),
    _grid(
        LOOPS,
        ["booster", "plain"],
        POLICIES,
        fast=lambda loop, way, policy: (way, policy) == FAST_LOOPS[list(LOOPS).index(loop) % 2],
    ),
)
@distributed(world_size=2)
def test_every_loop_trains_as_in_one_process(loop, way, policy):
    Twins(Stack, LOOPS[loop], calls_plain_backward=way == "plain", **POLICIES[policy]).train().assert_equal()


@pytest.mark.parametrize("policy", ["static", "prefetch"])
@pytest.mark.parametrize("way", ["reentrant", "non-reentrant", "whole, reentrant", "parts of a block"])
@distributed(world_size=2)
def test_a_plain_backward_through_activation_checkpoints(way, policy):
    twins = Twins(lambda: Stack(way=way), build_plain=Stack, calls_plain_backward=True, **POLICIES[policy])
    twins.train().assert_equal()


def _around_the_model(model, x, backward, rank, step):
    if hasattr(model, "unwrap"):
        backward(square_loss(checkpoint(model, x.requires_grad_(), use_reentrant=bool(step % 2))))
    else:
        backward(square_loss(model(x)))


def _hooks_around(model, x, backward, rank, step):
    with (
        torch.autograd.graph.save_on_cpu() if step % 2 else torch.autograd.graph.saved_tensors_hooks(_packed, _unpacked)
    ):
        loss = square_loss(model(x))
    backward(loss)


def _packed(tensor):
    return tensor.clone()


def _unpacked(tensor):
    return tensor


@PLACED
@pytest.mark.parametrize("way", ["booster", "plain"])
@pytest.mark.parametrize("loop", [_around_the_model, _hooks_around])
@distributed(world_size=2)
def test_checkpoints_and_hooks_around_the_model(loop, way, policy):
    Twins(Stack, loop, calls_plain_backward=way == "plain", **POLICIES[policy]).train().assert_equal()


class Forces(nn.Module):
    """Its output is a gradient, taken inside of the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = Stack()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = x.clone().requires_grad_()
            (forces,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=self.training)
        return self.energy(forces)


def _forces(model, x, backward, rank, step):
    backward(square_loss(model(x)))
    model.eval()
    with torch.no_grad():
        outputs = [model(x)]
    model.train()
    return outputs


@PLACED
@distributed(world_size=2)
def test_gradients_inside_of_the_forward(policy):
    Twins(Forces, _forces, **POLICIES[policy]).train().assert_equal()


# Another way on each rank.


class Ways(nn.Module):
    """Goes the way that it is told."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.trunk, self.head, self.extra = Block(), nn.Linear(WIDTH, 3), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(6))

    def forward(self, x: torch.Tensor, way: list[int], uses_extra: bool = False) -> torch.Tensor:
        x = self.trunk(x)
        for number in way:
            x = self.blocks[number](x)
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


def _first_alike(rank, step):
    return [0, 1, 2] if step == 0 else _layer_drop(rank, step)


WAYS = {
    way.__name__.strip("_"): way
    for way in (_one_branch, _own_branch, _early_exit, _layer_drop, _own_order, _first_alike)
}


def _go(choose, variant):
    def iterate(model, x, backward, rank, step):
        way = choose(rank, step)
        if variant == "accumulated":
            backward(square_loss(model(x, way)))
            way = choose(rank + 1, step + 7)
        if variant == "checkpointed" and hasattr(model, "unwrap"):
            output = checkpoint(model, x, way, use_reentrant=False)
        else:
            output = model(x, way, uses_extra=variant == "extra" and rank == step % 2)
        outputs = []
        if variant == "evaluated":
            with torch.no_grad():
                outputs = [model(x, choose(rank + 3, step))]
        backward(square_loss(output))
        return outputs

    return iterate


def _go_own_ways(way, policy):
    Twins(Ways, _go(WAYS[way], "simple"), **POLICIES[policy]).train(range(5)).assert_equal()


@pytest.mark.parametrize(
    ("world_size", "way", "policy"),
    _grid(
        [2, 3, 4],
        WAYS,
        POLICIES,
        # Every way once; two of them in other worlds and placements too.
        fast=lambda world_size, way, policy: (
            (world_size, policy) == (3, "cpu")
            or ((world_size, policy) in ((2, "static"), (4, "prefetch")) and way in ("layer_drop", "own_order"))
        ),
    ),
)
def test_each_rank_goes_its_own_way(world_size, way, policy):
    run_ranks(_go_own_ways, world_size, way, policy)


@pytest.mark.parametrize(
    ("way", "variant", "backward"),
    _grid(
        ["own_branch", "layer_drop", "own_order"],
        ["accumulated", "extra", "checkpointed", "evaluated"],
        ["booster", "plain"],
        fast=lambda way, _, backward: (way, backward) in (("layer_drop", "plain"), ("own_order", "booster")),
    ),
)
@distributed(world_size=2)
def test_each_rank_goes_its_own_way_in_other_loops(way, variant, backward):
    twins = Twins(Ways, _go(WAYS[way], variant), calls_plain_backward=backward == "plain", max_prefetch=2)
    twins.train(range(5)).assert_equal()


def _loss_of_a_part(model, x, backward, rank, step):
    output = model(x, [0, 1])
    backward(output[:, 0].square().mean() if rank == 0 else (output * 0).sum())


def _loss_without_some(model, x, backward, rank, step):
    with torch.set_grad_enabled(rank == step % 2):
        hidden = model.blocks[2](x) if not hasattr(model, "unwrap") else model.unwrap().blocks[2](x)
    backward(square_loss(model(hidden, [1])))


@pytest.mark.parametrize("policy", ["static", "cpu"])
@pytest.mark.parametrize("loop", [_loss_of_a_part, _loss_without_some])
@distributed(world_size=[2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_rank_without_gradients_of_a_part(loop, policy):
    Twins(Ways, loop, **POLICIES[policy]).train().assert_equal()


# Errors.


class _Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("a backward of the user's own")


class FailsInBackward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stack, self.fails = Stack(), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.stack.blocks):
            x = block(x)
            if self.fails and number == 1:
                x = _Failing.apply(x)
        return self.stack.head(x)


@PLACED
@pytest.mark.parametrize("way", ["booster", "plain"])
@distributed(world_size=2)
def test_training_goes_on_after_an_error_in_backward(way, policy):
    twins = Twins(FailsInBackward, calls_plain_backward=way == "plain", **POLICIES[policy])
    for step in range(4):
        twins.raw.fails = True
        loss = square_loss(twins.model(twins.batch(step)))
        with pytest.raises(ValueError, match="a backward of the user's own"):
            twins.backward_of_boosted(loss)
        twins.raw.fails = False
        twins.optimizer.zero_grad()
        twins.train([step])
    twins.assert_equal()


class RegularizesItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stack = Stack()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.stack(x) + penalty(self.stack)


@pytest.mark.parametrize("build", [Stack, RegularizesItself])
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"shard_param_frac": 0.5},
        {"placement_policy": "auto"},
        {"placement_policy": "auto", "device_memory_budget": 40_000},
    ],
)
@distributed(world_size=[1, 2, 3])
def test_weights_are_read_outside_of_their_modules(arguments, build):
    Twins(build, simply if build is RegularizesItself else after_the_forward, **arguments).train().assert_equal()


@distributed(world_size=2)
def test_weights_outside_of_modules_are_whole_and_refuse_to_be_written():
    twins = Twins(Stack).train(range(1))
    expected = dict(twins.plain.named_parameters())
    for name, parameter in twins.model.named_parameters():
        torch.testing.assert_close(parameter, expected[name], rtol=2e-5, atol=4e-6)
        assert isinstance(parameter, nn.Parameter)
        assert "sharded over the ranks" in repr(parameter)
        for write in (
            lambda one: one.add_(1),
            lambda one: one.copy_(torch.ones_like(one)),
            lambda one: one.normal_(),
            lambda one: torch._foreach_mul_([one], 2),
            lambda one: nn.init.uniform_(one),
        ):
            with torch.no_grad(), pytest.raises(ConfigError, match=f"'{name}' was modified .* lost: change weights"):
                write(parameter)
        with pytest.raises(ConfigError, match=rf"memory of '{name}' .* by \.data"):
            parameter.data.zero_()
        with pytest.raises(ConfigError, match=rf"memory of '{name}' .* by \.data"):
            parameter.data = torch.ones_like(parameter)
    with torch.no_grad():
        parameter.view(-1)[0] = 5.0
    with pytest.raises(ConfigError, match=f"'{name}' was modified"):
        twins.model(twins.batch(0))
    with pytest.raises(ConfigError, match=r"'blocks.0.first.weight' was modified"):
        twins.raw.blocks[0].first.reset_parameters()
    twins.train(range(1, 3)).assert_equal()


class Overwrites(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stack = Stack()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.exp(self.stack(x))
        return x.add_(1)


@pytest.mark.parametrize("way", ["booster", "plain"])
@distributed(world_size=2)
def test_a_saved_activation_that_was_written_over_is_an_error(way):
    twins = Twins(Overwrites, calls_plain_backward=way == "plain")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        twins.backward_of_boosted(square_loss(twins.model(twins.batch(0))))


@pytest.mark.parametrize("policy", ["static", "prefetch"])
@pytest.mark.parametrize("way", ["booster", "plain"])
@distributed(world_size=2)
def test_a_backward_through_a_graph_from_before_the_step_is_an_error(way, policy):
    twins = Twins(Stack, calls_plain_backward=way == "plain", **POLICIES[policy])
    for _ in range(2):
        loss = square_loss(twins.model(twins.batch(0)))
        twins.backward_of_boosted(loss, retain_graph=True)
        twins.optimizer.step()
        twins.optimizer.zero_grad()
        with pytest.raises(RuntimeError, match=r"were changed since, by optimizer\.step\(\)"):
            twins.backward_of_boosted(loss)
        twins.optimizer.zero_grad()


GROUP_SECONDS = 2


def _impatient(twins):
    collective_errors.REPORT_SECONDS = 2.0  # these processes are the test's own and end with it
    dist.set_debug_level(dist.DebugLevel.OFF)
    twins.model.manager.negotiation.group = dist.new_group(
        list(range(dist.get_world_size())), timeout=timedelta(seconds=GROUP_SECONDS), backend="gloo"
    )


@pytest.mark.slow
@pytest.mark.parametrize("num_steps", [1, pytest.param(6, marks=pytest.mark.slow)])  # the seventh is a replay
@pytest.mark.parametrize("what", ["forward", pytest.param("backward", marks=pytest.mark.slow)])
@distributed(world_size=3, fresh=True)
def test_a_rank_that_stays_away_is_named(what, num_steps):
    twins = Twins(Stack)
    twins.train(range(num_steps))
    _impatient(twins)
    if what == "forward" and twins.rank == 1:
        return
    loss = None if what == "forward" else square_loss(twins.model(twins.batch(1)))
    if twins.rank == 1:
        return
    with pytest.raises(RankFailedError, match="rank 1 is missing"):
        twins.optimizer.backward(square_loss(twins.model(twins.batch(1))) if loss is None else loss)


@pytest.mark.parametrize("num_steps", [1, 6])  # the seventh is a replay
@distributed(world_size=2, fresh=True)
def test_a_forward_where_others_go_backward_is_an_error_on_all_ranks(num_steps):
    twins = Twins(Stack)
    twins.train(range(num_steps))
    _impatient(twins)
    loss = square_loss(twins.model(twins.batch(1)))
    calls = [lambda: twins.optimizer.backward(loss), lambda: twins.model(twins.batch(1))]
    with pytest.raises(DesyncError, match=r"ranks \[0\] have finished a backward"):
        calls[twins.rank]()
