"""TorchFSDPPlugin: training loops as people write them train as in one process."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from fsdp_loop_cases import ONE_LEVEL, Odd, sgd, slow
from fsdp_twins import STRATEGIES, FSDPTwins
from gemini_models import WIDTH, Block, Stack, adamw, square_loss
from harness import distributed
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR, StepLR

from booster import Booster, ConfigError
from booster.device import current_device
from booster.plugins import TorchFSDPPlugin

pytestmark = pytest.mark.on_device

# Where it matters that weights stay gathered from forward to backward.
TWO_LEVELS = pytest.mark.parametrize("strategy", ["full", "grad op", slow("none")])


def _two_forwards(model, x, backward, rank, step):
    backward(square_loss(model(x)) + square_loss(model(2 * x)))


def _two_graphs(model, x, backward, rank, step):
    first, second = square_loss(model(x)), square_loss(model(-x))
    backward(first)
    backward(second)


def _twice(model, x, backward, rank, step):
    loss = square_loss(model(x))
    backward(loss, retain_graph=True)
    backward(loss)


def _two_losses(model, x, backward, rank, step):
    output = model(x)
    backward(output[:, 0].mean(), retain_graph=True)
    backward(output[:, 1].square().mean())


def _evaluating(model, x, backward, rank, step):
    outputs = []
    model.eval()
    with torch.no_grad():
        outputs += [model(x).clone(), model(x[:1]).clone()]
    model.train()
    output = model(x)
    with torch.no_grad():
        outputs.append(model(-x).clone())  # between forward and backward
    backward(square_loss(output))
    with torch.no_grad():
        outputs.append(model(x + 1).clone())  # between backward and step
    return outputs


def _inferring(model, x, backward, rank, step):
    backward(square_loss(model(x)))
    with torch.inference_mode():
        return [model(x + 1).clone()]


def _generating(model, x, backward, rank, step):
    backward(square_loss(model(x)))
    with torch.no_grad():
        for _ in range(5):
            x = torch.cat([model(x), x[:, 3:]], dim=1)
    return [x]


def _evaluating_with_gradients_on(model, x, backward, rank, step):
    backward(square_loss(model(x)))
    return [model(x + 1).detach().clone()]  # a graph that is not used, and the step comes next


def _without_backward(model, x, backward, rank, step):
    model(x + 3)  # a graph that is not used
    backward(square_loss(model(x)))


def _unwrapped(model, x, backward, rank, step):
    backward(square_loss((model.unwrap() if hasattr(model, "unwrap") else model)(x)))


def _after_a_failure(model, x, backward, rank, step):
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(x[:, : WIDTH - 1])
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), torch.no_grad():
        model(x[:, : WIDTH - 1])
    backward(square_loss(model(x)))


def _with_gradient_of_the_input(model, x, backward, rank, step):
    x = x.clone().requires_grad_()
    backward(square_loss(model(x)))
    assert x.grad is not None
    return []


def _of_a_part(model, x, backward, rank, step):
    output = model(x)
    backward(output[:, 0].square().mean() if rank == 0 else (output * 0).sum())


LOOPS = {
    loop.__name__.strip("_"): loop
    for loop in (
        _two_forwards,
        _two_graphs,
        _twice,
        _two_losses,
        _evaluating,
        _inferring,
        _generating,
        _evaluating_with_gradients_on,
        _without_backward,
        _unwrapped,
        _after_a_failure,
        _with_gradient_of_the_input,
        _of_a_part,
    )
}


# By default every loop in one way or the other, in turn; weights are gathered again for the backward, or stay.
FAST_LOOPS = [
    ("full", loop, "booster") if number % 2 else ("grad op", loop, "plain") for number, loop in enumerate(LOOPS)
]


@pytest.mark.parametrize(
    ("strategy", "loop", "way"),
    [
        case if case in FAST_LOOPS else slow(*case)
        for case in itertools.product(["full", "grad op", "none"], LOOPS, ["booster", "plain"])
    ],
)
@distributed(world_size=2)
def test_every_loop_trains_as_in_one_process(strategy, loop, way):
    FSDPTwins(Stack, LOOPS[loop], calls_plain_backward=way == "plain", **STRATEGIES[strategy]).train().assert_equal()


@pytest.mark.parametrize("loop", ["two_graphs", "evaluating", "of_a_part"])
@distributed(world_size=4)
def test_loops_over_replicas_train_as_in_one_process(loop):
    FSDPTwins(Stack, LOOPS[loop], **STRATEGIES["hybrid"]).train().assert_equal()


@distributed(world_size=2)
def test_a_plain_backward_is_averaged_where_nothing_is_scaled():
    booster = Booster(plugin=TorchFSDPPlugin())
    model, optimizer, *_ = booster.boost(model := nn.Linear(3, 2), torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        before = model.state_dict()["bias"].clone()
        (model(torch.ones(2, 3, device=current_device())).sum() * dist.get_rank()).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(model.state_dict()["bias"], before - 0.1 * 2 / 2)


class Branches(nn.Module):
    """Blocks of which an iteration uses those that it is told."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.branches = nn.ModuleList(Block() for _ in range(5))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor, taken: list[int]) -> torch.Tensor:
        for number in taken:
            x = self.branches[number](x)
        return self.head(x)


def _by_step_and_rank(model, x, backward, rank, step):
    backward(square_loss(model(x, [(step + rank) % 5, (2 * step + 1) % 5])))


@TWO_LEVELS
@distributed(world_size=[slow(2), 3])
def test_no_sync_adds_up(strategy):
    twins = FSDPTwins(Stack, **STRATEGIES[strategy])
    for step in range(3):
        with twins.booster.no_sync(twins.model, twins.optimizer):
            twins.backward(10 * step)
            twins.backward(10 * step + 1)
        twins.backward(10 * step + 2)
        twins.step()
    twins.assert_equal()


@pytest.mark.parametrize("synchronize", ["always", "no_sync"])
@TWO_LEVELS
@distributed(world_size=[2, slow(3)])
def test_each_microbatch_uses_other_units(strategy, synchronize):
    """What only a backward inside of no_sync used is reduced all the same."""
    twins = FSDPTwins(Branches, _by_step_and_rank, **STRATEGIES[strategy])
    for step in range(4):
        for micro in range(3):
            if synchronize == "no_sync" and micro < 2:
                with twins.booster.no_sync(twins.model, twins.optimizer):
                    twins.backward(10 * step + micro)
            else:
                twins.backward(10 * step + micro)
        twins.step()
    twins.assert_equal()


@pytest.mark.parametrize("strategy", ["full", "grad op", "none"])
@distributed(world_size=2)
def test_a_synchronized_backward_before_one_without(strategy):
    twins = FSDPTwins(Stack, **STRATEGIES[strategy])
    for step in range(2):
        twins.backward(3 * step)
        with twins.booster.no_sync(twins.model, twins.optimizer):
            twins.backward(3 * step + 1)
        twins.backward(3 * step + 2)
        with twins.booster.no_sync(twins.model, twins.optimizer):
            twins.backward(3 * step + 3)
        twins.step()  # the last backward was not synchronized: what it left is reduced now
    twins.assert_equal()


@distributed(world_size=4)
def test_windows_over_replicas():
    twins = FSDPTwins(Branches, _by_step_and_rank, **STRATEGIES["hybrid"])
    for step in range(3):
        twins.backward(10 * step)
        with twins.booster.no_sync(twins.model, twins.optimizer):
            twins.backward(10 * step + 1)
        twins.backward(10 * step + 2)
        twins.step()
    twins.assert_equal()


@distributed(world_size=2)
def test_forwards_without_gradients_inside_of_no_sync():
    twins = FSDPTwins(Stack)
    x = torch.ones(2, WIDTH, device=current_device())
    for step in range(3):
        with twins.booster.no_sync(twins.model, twins.optimizer), torch.no_grad():
            torch.testing.assert_close(twins.model(x), twins.plain(x), rtol=1e-4, atol=1e-5)
        with twins.booster.no_sync(twins.model, twins.optimizer):
            twins.backward(10 * step)
            with torch.no_grad():
                torch.testing.assert_close(twins.model(x), twins.plain(x), rtol=1e-4, atol=1e-5)
        twins.backward(10 * step + 1)
        twins.step()
    twins.assert_equal()


@ONE_LEVEL
@pytest.mark.parametrize("model", [Stack, Branches])
@distributed(world_size=2)
def test_accumulate_takes_the_mean(strategy, model):
    iterate = {} if model is Stack else {"iterate": _by_step_and_rank}
    twins = FSDPTwins(model, **iterate, **STRATEGIES[strategy])
    for step in range(3):
        for micro in range(3):
            with twins.booster.accumulate(twins.model, twins.optimizer, 3) as is_last:
                twins.backward(10 * step + micro)
                norm = twins.booster.clip_grad_norm_(twins.optimizer, 0.05)
                assert (norm is None) == (not is_last)
                twins.optimizer.step()
                twins.optimizer.zero_grad()
        for parameter in twins.plain.parameters():
            if parameter.grad is not None:
                parameter.grad /= 3
        expected = nn.utils.clip_grad_norm_(twins.plain.parameters(), 0.05)
        assert expected > 0.05  # it does clip
        torch.testing.assert_close(norm, expected, rtol=1e-4, atol=1e-6)
        twins.plain_optimizer.step()
        twins.plain_optimizer.zero_grad()
    twins.assert_equal()


@pytest.mark.parametrize("strategy", ["full", "hybrid"])
@distributed(world_size=4)
def test_num_items_divides_by_the_global_count(strategy):
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    # Unequal parts, two microbatches a rank.
    tokens = [torch.randn(3 + 5 * part, WIDTH).to(current_device()) for part in range(2 * size)]
    reference, ours = Stack().to(current_device()), Stack()
    reference(torch.cat(tokens)).square().mean(dim=1).sum().backward()
    num_items = sum(len(part) for part in tokens)
    for parameter in reference.parameters():
        parameter.grad /= num_items
    booster = Booster(plugin=TorchFSDPPlugin(**STRATEGIES[strategy]))
    model, optimizer, *_ = booster.boost(ours, torch.optim.SGD(ours.parameters(), lr=0.1))
    for index, part in enumerate([tokens[2 * rank], tokens[2 * rank + 1]]):
        with booster.accumulate(model, optimizer, steps=2):
            booster.backward(model(part).square().mean(dim=1).sum(), optimizer, num_items=len(part))
            norm = booster.clip_grad_norm_(optimizer, float("inf"))
            assert (norm is None) == (index == 0)
            optimizer.step()
    torch.testing.assert_close(norm, nn.utils.get_total_norm([one.grad for one in reference.parameters()]))
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    torch.testing.assert_close(dict(model.state_dict()), dict(reference.state_dict()), rtol=1e-5, atol=1e-6)


def three_groups(model):
    matrices = [one for one in model.parameters() if one.dim() == 2]
    return torch.optim.AdamW(
        [
            {"params": matrices[:1], "lr": 0.02, "weight_decay": 0.3},
            {"params": [one for one in model.parameters() if one.dim() < 2], "betas": (0.5, 0.9)},
            {"params": matrices[1:], "eps": 1e-2},
        ],
        lr=0.01,
        eps=1e-3,
    )


@ONE_LEVEL
@distributed(world_size=[2, slow(3)])
def test_hyperparameters_of_groups_are_live(strategy):
    twins = FSDPTwins(Odd, optimizer=three_groups, **STRATEGIES[strategy])
    for step in range(4):
        for optimizer in (twins.plain_optimizer, twins.optimizer.optim if step % 2 else twins.optimizer):
            optimizer.param_groups[0]["lr"] = 0.02 / (step + 1)
            optimizer.param_groups[1]["weight_decay"] = 0.1 * step
            optimizer.param_groups[2]["betas"] = (0.9 - 0.1 * step, 0.99)
        twins.train([step])
    twins.assert_equal()


def _step_lr(optimizer):
    return StepLR(optimizer, 2, 0.3)


def _one_cycle(optimizer):
    return OneCycleLR(optimizer, [0.1, 0.05, 0.2], 6)  # moves the betas too


class Scheduled(FSDPTwins):
    """Twins whose learning rates change; the boosted one's scheduler was made before boost or after it."""

    def __init__(self, make, is_made_before: bool, **arguments) -> None:
        super().__init__(Odd, optimizer=three_groups, **arguments)
        self.scheduler, self.plain_scheduler = None, make(self.plain_optimizer)
        if is_made_before:
            raw = Odd()
            optimizer = three_groups(raw)
            self.model, self.optimizer, _, _, self.scheduler = self.booster.boost(
                raw, optimizer, lr_scheduler=make(optimizer)
            )
        else:
            self.scheduler = make(self.optimizer)


@pytest.mark.parametrize("is_made_before", [True, False])
@pytest.mark.parametrize("make", [_step_lr, _one_cycle])
@distributed(world_size=2)
def test_schedulers_made_before_and_after_boost(make, is_made_before):
    twins = Scheduled(make, is_made_before)
    for step in range(5):
        twins.train([step])
        twins.plain_scheduler.step()
        twins.scheduler.step()
    assert twins.scheduler.get_last_lr() == twins.plain_scheduler.get_last_lr()
    twins.assert_equal()


def _first_layer(model):
    return torch.optim.AdamW(model.body[0].parameters(), eps=1e-3)


@TWO_LEVELS
@distributed(world_size=[2, slow(3)])
def test_add_param_group_after_boost(strategy):
    twins = FSDPTwins(Odd, optimizer=_first_layer, **STRATEGIES[strategy])

    def forget_others():  # gradients of unoptimized parameters are not in the boosted optimizer's norm
        known = {id(one) for group in twins.plain_optimizer.param_groups for one in group["params"]}
        for parameter in twins.plain.parameters():
            if id(parameter) not in known:
                parameter.grad = None

    def train(steps):
        for step in steps:
            twins.backward(step)
            forget_others()
            twins.step()

    train(range(2))
    for number, plain, ours in (
        (2, list(twins.plain.body[2].parameters()), list(twins.raw.body[2].parameters())),
        (4, [twins.plain.body[4].weight, twins.plain.gain], [twins.raw.body[4].weight, twins.raw.gain]),
    ):
        twins.plain_optimizer.add_param_group({"params": plain, "lr": 0.01 * number})
        twins.optimizer.add_param_group({"params": ours, "lr": 0.01 * number})
        train(range(3, 6))
    twins.assert_equal()
    assert len(twins.optimizer.param_groups) == 3
    twins.backward(7)
    with pytest.raises(ConfigError, match="with accumulated gradients"):
        twins.optimizer.add_param_group({"params": [twins.raw.body[4].bias]})
    forget_others()
    twins.step()
    with pytest.raises(ConfigError, match="not the model's"):
        twins.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


@ONE_LEVEL
@pytest.mark.parametrize("optimizer", [sgd, adamw])
@distributed(world_size=2)
def test_freezing_and_unfreezing_between_steps(strategy, optimizer):
    twins = FSDPTwins(Stack, optimizer=optimizer, **STRATEGIES[strategy]).train(range(2))
    for is_trained in (False, True):
        for model in (twins.plain, twins.raw):
            model.blocks[1].requires_grad_(is_trained)  # a whole unit
            model.blocks[2].first.requires_grad_(is_trained)  # a part of one
        before = twins.plain.blocks[1].first.weight.clone()
        twins.train(range(3, 6))
        assert torch.equal(before, twins.plain.blocks[1].first.weight) == (not is_trained)
        twins.assert_equal()


def _all_but_some_frozen(model):
    """All parameters are in the groups, a block, a layer and a single bias of them frozen."""
    model.blocks[0].requires_grad_(False)
    model.blocks[1].second.requires_grad_(False)
    model.head.bias.requires_grad_(False)
    groups = [{"params": model.blocks.parameters()}, {"params": model.head.parameters(), "lr": 0.02}]
    return torch.optim.AdamW(groups, eps=1e-3)


@TWO_LEVELS
@distributed(world_size=[slow(2), 3])
def test_parameters_that_came_frozen_train_later(strategy):
    twins = FSDPTwins(Stack, optimizer=_all_but_some_frozen, **STRATEGIES[strategy]).train(range(3))
    twins.assert_equal()
    for model in (twins.plain, twins.raw):
        model.requires_grad_(True)
    twins.train(range(3, 6))
    assert not torch.equal(twins.plain.head.bias, twins.initial["head.bias"])
    twins.assert_equal()


@distributed(world_size=2)
def test_unfreezing_while_gradients_wait_is_refused():
    twins = FSDPTwins(Stack, optimizer=_all_but_some_frozen)
    twins.backward(0)
    twins.raw.blocks[0].requires_grad_(True)
    with pytest.raises(ConfigError, match="unfreezing a parameter with accumulated gradients"):
        twins.backward_of_boosted(square_loss(twins.model(twins.batch(1))))


@ONE_LEVEL
@distributed(world_size=2)
def test_a_closure_that_calls_backward(strategy):
    twins = FSDPTwins(Stack, **STRATEGIES[strategy])
    for step in range(3):

        def plain_closure(step=step):
            twins.plain_optimizer.zero_grad()
            for rank in range(twins.size):
                (square_loss(twins.plain(twins.batch(step, rank))) / twins.size).backward()

        def closure(step=step):
            twins.optimizer.zero_grad()
            loss = square_loss(twins.model(twins.batch(step)))
            twins.booster.backward(loss, twins.optimizer)
            return loss

        twins.plain_optimizer.step(plain_closure)
        assert twins.optimizer.step(closure).shape == ()
    twins.assert_equal()


@ONE_LEVEL
@pytest.mark.parametrize("optimizer", [sgd, adamw, three_groups])
@distributed(world_size=[slow(2), 3])
def test_steps_before_boost_are_remembered(strategy, optimizer):
    made = {}

    def after_steps(model):
        made[len(made)] = one = optimizer(model)
        for step in range(3):
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
            square_loss(model(x.to(next(model.parameters()).device))).backward()
            one.step()
            one.zero_grad()
        return one

    FSDPTwins(Odd, optimizer=after_steps, **STRATEGIES[strategy]).train().assert_equal()
    assert len(made) == 2


@distributed(world_size=2)
def test_the_optimizer_from_before_boost_refuses_to_step():
    raw = torch.optim.SGD((model := nn.Linear(3, 2)).parameters(), lr=0.1)
    booster = Booster(plugin=TorchFSDPPlugin())
    model, optimizer, *_ = booster.boost(model, raw)
    booster.backward(model(torch.ones(2, 3, device=current_device())).sum(), optimizer)
    with pytest.raises(ConfigError, match="on the optimizer that it returned"):
        raw.step()
    optimizer.step()


@distributed(world_size=[2, 3])
def test_overflow_on_one_rank_skips_the_step_on_all():
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.float16)
    booster = Booster(plugin=TorchFSDPPlugin(mixed_precision=policy, initial_scale=2**10, hysteresis=1))
    model, optimizer, *_ = booster.boost(model := nn.Linear(4, 1), adamw(model))
    skipped = []
    for step in range(4):
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        scale = optimizer.loss_scaler.scale
        x = torch.ones(2, 4, device=current_device())
        if step in (1, 2) and dist.get_rank() == 1:
            x[0, 0] = float("inf") if step == 1 else float("nan")
        booster.backward(model(x).float().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
        skipped.append(optimizer.step_was_skipped)
        after = model.state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before) == optimizer.step_was_skipped
        assert not optimizer.step_was_skipped or optimizer.loss_scaler.scale == scale / 2
    assert skipped == [False, True, True, False]
    assert optimizer.num_skipped_steps == 2


@distributed(world_size=2)
def test_parameters_that_join_later_have_masters_where_the_others_have():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].requires_grad_(False)
    booster = Booster(plugin=TorchFSDPPlugin(), mixed_precision="fp16_naive")
    given = [*net[0].parameters(), *net[1].parameters()]
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD(given, lr=0.1))
    net[1].requires_grad_(True)
    optimizer.add_param_group({"params": list(net[2].parameters())})
    booster.backward(model(torch.ones(1, 4, device=current_device())).sum(), optimizer)
    optimizer.step()
    assert {part.name for part in optimizer.shards.parts} == set(optimizer.shards.names)
    assert len(optimizer.shards.names) == 6
    for part in optimizer.shards.parts:
        assert part.has_master
        assert part.parameter.dtype is torch.float32
