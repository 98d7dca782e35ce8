"""LowLevelZeroPlugin: which optimizers and models it takes, and that what it refuses is refused on all ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness import distributed
from oracles.shard_aware_lamb import ShardAwareLamb
from torch import nn
from zero_twins import Twins, mlp, square_loss, trained

from booster import Booster, ConfigError, DesyncError
from booster.device import current_device
from booster.plugins import LowLevelZeroPlugin

pytestmark = pytest.mark.on_device

STAGES = pytest.mark.parametrize("stage", [1, 2])


def _of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    cls = getattr(torch.optim, name)
    # A large eps where there is one: tiny gradients must not become steps of full length and any sign.
    settings = {"ASGD": {}, "Rprop": {}, "SGD": {}}.get(name, {"eps": 1e-3})
    return cls(trained(model), lr=0.01, **settings)


class Making:
    """Makes an optimizer of torch by its name; can be sent to other ranks."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, model: nn.Module) -> torch.optim.Optimizer:
        return _of(self.name, model)


@STAGES
@pytest.mark.parametrize(
    "name",
    ["Adam", "AdamW", "SGD", "NAdam", "RAdam", "Adamax", "Adadelta", "Adagrad", "RMSprop", "ASGD"],
)
@distributed(world_size=[2])
def test_elementwise_optimizers_of_torch_equal_one_process(name, stage):
    Twins(optimizer=Making(name), stage=stage).boost().train(range(4)).assert_equal()


@distributed(world_size=2)
def test_signs_of_gradients_are_those_of_the_mean():
    # Rprop looks at signs only: compared after one step, where no gradient is rounding noise.
    Twins(optimizer=Making("Rprop")).boost().train([0]).assert_equal()


@pytest.mark.parametrize("only_one", [False, True])
@pytest.mark.parametrize("name", ["LBFGS", "Adafactor", "Muon", "SparseAdam"])
@distributed(world_size=2)
def test_other_optimizers_are_refused_on_all_ranks(name, only_one):
    model = nn.Linear(4, 4, bias=False)
    if only_one and dist.get_rank() == 0:
        name = "AdamW"
    optimizer = getattr(torch.optim, name)(model.parameters())
    before = model.weight.clone()
    with pytest.raises(ConfigError):
        Booster(plugin=LowLevelZeroPlugin(precision="bf16")).boost(model, optimizer)
    # Before anything was cast, moved or communicated.
    assert torch.equal(model.weight, before)
    assert optimizer.param_groups[0]["params"][0] is model.weight


def _lamb(model: nn.Module) -> torch.optim.Optimizer:
    named = dict(model.named_parameters())
    first = [parameter for name, parameter in named.items() if name.startswith("0.")]
    rest = [parameter for name, parameter in named.items() if not name.startswith("0.")]
    return ShardAwareLamb([{"params": first, "lr": 0.02}, {"params": rest}], lr=0.01, weight_decay=0.1)


@STAGES
@pytest.mark.parametrize("extra_dp_size", [1, 2])
@pytest.mark.parametrize("reduce_bucket_size_in_m", [1e-6, 12])
@distributed(world_size=4)
def test_lamb_equals_one_process(stage, extra_dp_size, reduce_bucket_size_in_m):
    twins = Twins(
        optimizer=_lamb,
        stage=stage,
        extra_dp_size=extra_dp_size,
        reduce_bucket_size_in_m=reduce_bucket_size_in_m,
    )
    for model, optimizer in ((twins.plain, twins.plain_optimizer), (twins.raw, twins.user_optimizer)):
        twins.loss(model, twins.batch(9)[0]).backward()  # a step on whole parameters
        optimizer.step()
        optimizer.zero_grad()
    twins.boost().train(range(4)).assert_equal()


@STAGES
@distributed(world_size=2)
def test_lamb_with_parameters_that_join_later(stage):
    twins = Twins(optimizer=lambda model: ShardAwareLamb(model[0].parameters(), lr=0.01), stage=stage).boost().train()
    for model, optimizer in ((twins.plain, twins.plain_optimizer), (twins.raw, twins.optimizer)):
        model.zero_grad()
        optimizer.add_param_group({"params": list(model[4].parameters())})
    twins.train(range(3, 6)).assert_equal()


@STAGES
@distributed(world_size=2)
def test_a_closure_that_calls_backward(stage):
    twins = Twins(stage=stage).boost()
    for step in range(3):
        whole, part = twins.batch(step)

        def plain_closure(whole=whole):
            twins.plain_optimizer.zero_grad()
            loss = twins.loss(twins.plain, whole)
            loss.backward()
            return loss

        def closure(part=part):
            twins.optimizer.zero_grad()
            loss = twins.loss(twins.model, part)
            twins.booster.backward(loss, twins.optimizer)
            return loss

        twins.plain_optimizer.step(plain_closure)
        assert twins.optimizer.step(closure).shape == ()
    twins.assert_equal()


@STAGES
@pytest.mark.parametrize("overlap_allgather", [True, False])
@distributed(world_size=2)
def test_a_gan_and_a_frozen_teacher(stage, overlap_allgather):
    booster = Booster(plugin=LowLevelZeroPlugin(stage=stage, precision="fp32", overlap_allgather=overlap_allgather))
    generator, discriminator, teacher = nn.Linear(2, 2), nn.Linear(2, 1), nn.Linear(2, 2).requires_grad_(False)
    generator, g_optimizer, *_ = booster.boost(generator, torch.optim.SGD(generator.parameters(), lr=0.1))
    discriminator, d_optimizer, *_ = booster.boost(discriminator, torch.optim.SGD(discriminator.parameters(), lr=0.1))
    teacher, none, *_ = booster.boost(teacher)
    assert none is None
    torch.manual_seed(dist.get_rank())
    for _ in range(3):
        noise = torch.randn(4, 2, device=current_device())
        booster.backward(discriminator(generator(noise).detach()).mean(), d_optimizer)
        d_optimizer.step()
        loss = discriminator(generator(noise)).mean() + (generator(noise) - teacher(noise)).square().mean()
        booster.backward(loss, g_optimizer)
        g_optimizer.step()
        g_optimizer.zero_grad()
        d_optimizer.zero_grad()  # what the generator's loss left in the discriminator is dropped
    for parameter in [*generator.parameters(), *discriminator.parameters(), *teacher.parameters()]:
        ranks = [torch.empty_like(parameter) for _ in range(2)]
        dist.all_gather(ranks, parameter.detach())
        assert torch.equal(ranks[0], ranks[1])


@distributed(world_size=2)
def test_replicas_start_equal():
    torch.manual_seed(dist.get_rank())  # every rank builds another model
    raw = nn.Linear(3, 3)
    model, *_ = Booster(plugin=LowLevelZeroPlugin(precision="bf16")).boost(raw, torch.optim.SGD(raw.parameters(), 0.1))
    for parameter in model.parameters():
        ranks = [torch.empty_like(parameter) for _ in range(2)]
        dist.all_gather(ranks, parameter.detach())
        assert torch.equal(ranks[0], ranks[1])


@distributed(world_size=2)
def test_param_groups_that_differ_between_ranks_are_an_error_on_all():
    model = mlp()
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters[: 4 + dist.get_rank()], lr=0.1)
    with pytest.raises(DesyncError, match="param groups"):
        Booster(plugin=LowLevelZeroPlugin(precision="fp32")).boost(model, optimizer)


@distributed(world_size=2)
def test_parameters_in_the_same_memory_are_refused():
    model = nn.ModuleDict({"embedding": nn.Linear(3, 5), "head": nn.Linear(3, 5)})
    model["head"].weight.data = model["embedding"].weight.data
    with pytest.raises(ConfigError, match=r"'embedding\.weight' and 'head\.weight' are two parameters in the same"):
        Booster(plugin=LowLevelZeroPlugin(precision="fp32")).boost(model, torch.optim.SGD(model.parameters(), lr=0.1))


@STAGES
@distributed(world_size=2)
def test_a_model_moved_after_boost_is_refused(stage):
    raw = mlp()
    booster = Booster(plugin=LowLevelZeroPlugin(stage=stage, precision="fp32"))
    model, optimizer, *_ = booster.boost(raw, torch.optim.SGD(raw.parameters(), lr=0.1))
    raw[0].double().float()
    booster.backward(square_loss(model, torch.ones(2, 7, device=current_device())), optimizer)
    with pytest.raises(ConfigError, match=r"the memory of '0\.weight' was replaced after boost"):
        optimizer.step()
