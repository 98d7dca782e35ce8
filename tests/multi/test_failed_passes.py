"""What users go on with after an error that they caught, and weights that they write: nothing is lost silently."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness import distributed
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.utils.checkpoint import checkpoint

from booster import Booster, ConfigError
from booster.device import current_device
from booster.mixed_precision import FP16NaiveMixedPrecision
from booster.optim import FusedLAMB
from booster.plugins import GeminiPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin

pytestmark = pytest.mark.on_device


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(2))
        self.head = nn.Linear(8, 1)

    def forward(self, inputs):
        for block in self.blocks:
            inputs = block(inputs)
        return self.head(inputs)

    def first(self, inputs):
        return self.blocks[0][0](inputs)


def boosted(plugin, model, mixed_precision=None, lr=0.1):
    booster = Booster(plugin=plugin, mixed_precision=mixed_precision)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=lr))
    return booster, model, optimizer


def inputs(width=8):
    torch.manual_seed(10 + dist.get_rank())
    return torch.randn(4, width).to(current_device())


def assert_equal_on_all_ranks(model):
    for tensor in model.state_dict().values():
        ranks = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(ranks, tensor.contiguous())
        assert all(torch.equal(one, tensor) for one in ranks)


@distributed(world_size=2)
def test_fsdp_runs_after_a_direct_call_of_a_submodule_has_raised():
    booster, model, optimizer = boosted(TorchFSDPPlugin(), Blocks())
    with pytest.raises(RuntimeError, match="shape"):
        model.first(inputs(7))
    booster.backward(model(inputs()).square().mean(), optimizer)
    optimizer.step()
    assert_equal_on_all_ranks(model)


@distributed(world_size=2)
def test_fsdp_keeps_changes_of_gathered_weights_although_the_block_raised():
    precision = FP16NaiveMixedPrecision(initial_scale=2.0)
    booster, model, optimizer = boosted(TorchFSDPPlugin(), nn.Linear(8, 4), precision, lr=0.0)

    def change_and_fail():
        with model.gathered() as whole, torch.no_grad():
            whole.weight.fill_(0.5)
            raise KeyError

    with pytest.raises(KeyError):
        change_and_fail()
    booster.backward(model(inputs()).sum(), optimizer)
    optimizer.step()  # masters have the change as well
    assert bool((model.state_dict()["weight"] == 0.5).all())


@pytest.mark.parametrize("views", [False, True])
@distributed(world_size=2)
def test_ddp_reduces_what_a_failed_backward_left(views):
    _, model, optimizer = booster = boosted(TorchDDPPlugin(gradient_as_bucket_view=views), nn.Linear(8, 8))

    def fail(_):
        raise RuntimeError("late")

    given = inputs().requires_grad_() * 1
    given.register_hook(fail)
    with pytest.raises(RuntimeError, match="late"):
        booster[0].backward(model(given).square().mean(), optimizer)
    optimizer.step()
    assert_equal_on_all_ranks(model)


@pytest.mark.parametrize("begins_local", [False, True])
@distributed(world_size=2)
def test_ddp_with_a_static_graph_learns_it_from_a_backward_that_reduces(begins_local):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.other, self.shared = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            inner = checkpoint(lambda one: torch.tanh(self.shared(self.other(one))), x, use_reentrant=True)
            return self.shared(inner)

    booster, model, optimizer = boosted(TorchDDPPlugin(static_graph=True, bucket_cap_mb=1e-6), Twice())
    for step in range(3):
        loss = model(inputs().requires_grad_()).square().mean()
        if begins_local and step == 0:
            with booster.no_sync(model, optimizer):
                booster.backward(loss, optimizer)
        else:
            booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    assert_equal_on_all_ranks(model)


# PowerSGD waits for collectives in callbacks of others, which torch's DDP does not end on the simulated device either.
@distributed(world_size=2, device="cpu")
def test_a_communication_hook_stays_where_layers_are_frozen():
    booster, model, optimizer = boosted(TorchDDPPlugin(), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for _ in range(4):
        booster.backward(model(inputs()).square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    with booster.no_sync(model, optimizer):
        booster.backward(model(inputs()).square().mean(), optimizer)
    booster.unwrap_model(model)[0].requires_grad_(False)
    booster.backward(model(inputs()).square().mean(), optimizer)
    optimizer.step()
    assert_equal_on_all_ranks(model)
    optimizer.zero_grad()
    with booster.no_sync(model, optimizer):
        booster.backward(model(inputs()).square().mean(), optimizer)
    booster.unwrap_model(model).requires_grad_(False)
    optimizer.step()
    assert_equal_on_all_ranks(model)


@pytest.mark.parametrize("kind", ["ddp", "zero", "fsdp"])
@distributed(world_size=2)
def test_an_accumulation_is_discarded_after_an_error_and_by_a_step(kind):
    plugin = {"ddp": TorchDDPPlugin, "zero": lambda: LowLevelZeroPlugin(precision="fp32"), "fsdp": TorchFSDPPlugin}
    booster, model, optimizer = boosted(plugin[kind](), nn.Linear(8, 1), lr=1.0)
    ones = torch.ones(2, 8, device=current_device())

    def accumulate(scale, fails=False):
        with booster.accumulate(model, optimizer, 2) as is_last:
            booster.backward(model(ones * scale).mean(), optimizer)
            if fails:
                raise KeyError
            optimizer.step()
            optimizer.zero_grad()
        return is_last

    before = model.state_dict()["bias"].clone(), model.state_dict()["weight"].clone()
    with pytest.raises(KeyError):
        accumulate(100.0, fails=True)
    optimizer.zero_grad()
    assert not accumulate(1.0)
    assert accumulate(3.0)
    torch.testing.assert_close(model.state_dict()["weight"], before[1] - 2.0)
    assert not accumulate(1.0)
    optimizer.step()  # of the rest
    optimizer.zero_grad()
    assert not accumulate(1.0)
    torch.testing.assert_close(model.state_dict()["weight"], before[1] - 3.0)


@distributed(world_size=2)
def test_a_loss_through_two_models_is_not_accumulated_by_one_optimizer():
    booster = Booster(plugin=TorchDDPPlugin())
    encoder, decoder = nn.Linear(8, 4), nn.Linear(4, 1)
    encoder, first, *_ = booster.boost(encoder, torch.optim.SGD(encoder.parameters(), lr=0.1))
    decoder, second, *_ = booster.boost(decoder, torch.optim.SGD(decoder.parameters(), lr=0.1))
    with booster.accumulate(encoder, first, 2), booster.accumulate(decoder, second, 2):
        booster.backward(decoder(encoder(inputs())).square().mean(), first)
        first.step()
        with pytest.raises(ConfigError, match=r"this one's came from another backward"):
            second.step()


@distributed(world_size=2)
def test_the_loader_that_ends_a_step_may_be_named():
    booster = Booster(plugin=TorchDDPPlugin())
    model = nn.Linear(8, 1)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    labeled = booster.prepare_dataloader(torch.utils.data.TensorDataset(torch.randn(24, 8)), batch_size=2)
    others = booster.prepare_dataloader(torch.utils.data.TensorDataset(torch.randn(8, 8)), batch_size=2)
    lasts, other = [], iter(others)
    for (batch,) in labeled:
        try:
            next(other)
        except StopIteration:
            other = iter(others)
            next(other)
        with booster.accumulate(model, optimizer, 4, loader=labeled) as is_last:
            booster.backward(model(batch.to(booster.device)).mean(), optimizer)
            optimizer.step()
            optimizer.zero_grad()
        lasts.append(is_last)
    assert lasts == [False, False, False, True, False, True]
    with (
        pytest.raises(ConfigError, match=r"got a DataLoader that is not being read"),
        booster.accumulate(model, optimizer, 4, loader=torch.utils.data.DataLoader([1])),
    ):
        pass


@distributed(world_size=2)
def test_masters_follow_weights_that_the_user_writes():
    booster = Booster(plugin=TorchDDPPlugin(), mixed_precision=FP16NaiveMixedPrecision(initial_scale=2.0))
    model = nn.ModuleDict({"student": nn.Linear(8, 4), "teacher": nn.Linear(8, 4)})
    model["teacher"].requires_grad_(False)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = model

        def forward(self, x):
            return self.parts["student"](x)

    net = Net()
    net, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.0))
    parts = booster.unwrap_model(net).parts

    def step():
        booster.backward(net(inputs()).sum(), optimizer)
        optimizer.step()
        optimizer.zero_grad()

    step()
    with torch.no_grad():
        parts["student"].bias.fill_(2.0)
    parts["teacher"].weight.data.fill_(5.0)
    step()
    assert bool((parts["student"].bias == 2.0).all())
    assert bool((parts["teacher"].weight == 5.0).all())
    state = {name: torch.full_like(tensor, 3.0) for name, tensor in net.state_dict().items()}
    with pytest.raises(RuntimeError, match="Unexpected key"):
        net.load_state_dict({**state, "foreign": torch.ones(1)})  # torch copies first, and raises then
    step()
    assert bool((parts["student"].weight == 3.0).all())


class _Writes:
    """Ways to write all weights of a boosted model between two steps."""

    @staticmethod
    def in_place(parameters):
        with torch.no_grad():
            for one in parameters:
                one.clamp_(-0.01, 0.01)

    @staticmethod
    def by_data(parameters):
        for one in parameters:
            one.data.clamp_(-0.01, 0.01)


WRITTEN = {
    "ddp, masters": lambda: Booster(
        plugin=TorchDDPPlugin(), mixed_precision=FP16NaiveMixedPrecision(initial_scale=2.0)
    ),
    "zero 1, bf16": lambda: Booster(plugin=LowLevelZeroPlugin(precision="bf16", reduce_bucket_size_in_m=1e-6)),
    "zero 2, bf16": lambda: Booster(plugin=LowLevelZeroPlugin(stage=2, precision="bf16", overlap_allgather=True)),
    "zero 1, fp32": lambda: Booster(plugin=LowLevelZeroPlugin(precision="fp32")),
    "fsdp": lambda: Booster(plugin=TorchFSDPPlugin()),
    "fsdp, grad op": lambda: Booster(plugin=TorchFSDPPlugin(sharding_strategy="SHARD_GRAD_OP")),
    "fsdp, masters": lambda: Booster(
        plugin=TorchFSDPPlugin(), mixed_precision=FP16NaiveMixedPrecision(initial_scale=2.0)
    ),
}


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("write", [_Writes.by_data, _Writes.in_place])
@pytest.mark.parametrize("case", WRITTEN)
@distributed(world_size=2)
def test_weights_that_are_clipped_between_steps_stay_clipped(case, write, evaluates):
    booster, net = WRITTEN[case](), Blocks()
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.0, momentum=0.9))
    for step in range(3):
        booster.backward(model(inputs()).float().sum(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            if evaluates:
                with torch.no_grad():
                    model(inputs())
            write(model.parameters())
    assert all(0 < one.abs().max() < 0.0101 for one in model.state_dict().values())


@pytest.mark.parametrize("when", ["between steps", "after a forward", "after an evaluation"])
@distributed(world_size=2)
def test_fsdp_refuses_weights_whose_data_are_replaced(when):
    booster, model, optimizer = boosted(TorchFSDPPlugin(), Blocks())

    def halve():
        for parameter in booster.unwrap_model(model).parameters():
            parameter.data = parameter.data * 0.5

    def step():
        loss = model(inputs()).sum()
        if when == "after a forward":
            halve()
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()

    if when == "after a forward":
        with pytest.raises(ConfigError, match=r"the memory of '.*' was replaced"):
            step()
        return
    step()
    if when == "after an evaluation":
        with torch.no_grad():
            model(inputs())
    halve()
    with pytest.raises(ConfigError, match=r"the memory of '.*' was replaced.*data\.copy_\(values\)"):
        model(inputs())


# Under FSDP every rank calls the model and backward() equally often.
@pytest.mark.parametrize("kind", ["ddp", "zero"])
@distributed(world_size=2)
def test_a_rank_may_skip_a_microbatch(kind):
    plugin = {"ddp": TorchDDPPlugin, "zero": lambda: LowLevelZeroPlugin(precision="fp32")}
    booster, model, optimizer = boosted(plugin[kind](), nn.Linear(8, 1), lr=1.0)
    before = model.state_dict()["bias"].clone()
    for step in range(2):
        with booster.accumulate(model, optimizer, 2):
            outputs = model(torch.ones(2, 8, device=current_device()))
            if step == 1 or dist.get_rank() == 0:
                booster.backward(outputs.mean(), optimizer, num_items=1)
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(model.state_dict()["bias"], before - 1.0)


@pytest.mark.parametrize("write", ["in place", "by data"])
@pytest.mark.parametrize("plugin", [TorchFSDPPlugin, GeminiPlugin])
@distributed(world_size=2)
def test_weights_that_a_forward_writes_are_refused_where_they_are_gathered(plugin, write):
    class Writes(nn.Module):
        """Normalizes its prototypes in forward, as SwAV does."""

        def __init__(self):
            super().__init__()
            self.prototypes = nn.Linear(8, 4, bias=False)

        def forward(self, x):
            with torch.no_grad():
                normalized = nn.functional.normalize(self.prototypes.weight, dim=1)
                if write == "in place":
                    self.prototypes.weight.copy_(normalized)
                else:
                    self.prototypes.weight.data = normalized
            return self.prototypes(x)

    _, model, _ = boosted(plugin(), Writes())
    with pytest.raises(ConfigError, match=r"the forward of .* wrote to its weights \('prototypes.weight'\)"):
        model(inputs())


@pytest.mark.parametrize("kind", ["ddp", "zero"])
@distributed(world_size=2)
def test_zeros_of_an_optimizer_stay_gradients(kind):
    """`FusedLAMB(set_grad_none=False)` keeps updating parameters that have once been used."""
    booster = Booster(plugin=TorchDDPPlugin() if kind == "ddp" else LowLevelZeroPlugin(precision="fp32"))
    torch.manual_seed(0)
    model = nn.ModuleDict({"used": nn.Linear(8, 2), "once": nn.Linear(8, 2)})

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = model

        def forward(self, x, uses_both):
            return self.parts["used"](x) + (self.parts["once"](x) if uses_both else 0)

    net = Net()
    net, optimizer, *_ = booster.boost(net, FusedLAMB(net.parameters(), lr=0.1, set_grad_none=False))
    weights = []
    for uses_both in (True, False):
        booster.backward(net(inputs(), uses_both).square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
        weights.append(net.state_dict()["parts.once.weight"].clone())
    assert not torch.equal(*weights)  # by its moments


@distributed(world_size=2)
def test_gemini_steps_optimizers_that_keep_more_than_states_of_parameters():
    class Keeping(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            self.state["steps"] = self.state.get("steps", 0) + 1
            self.state["kept"]["tensor"] = torch.zeros(3)

        def use_shards(self, shards):
            """Elementwise."""

    model = nn.Linear(8, 4)
    booster = Booster(plugin=GeminiPlugin(precision="fp32"))
    model, optimizer, *_ = booster.boost(model, Keeping(model.parameters(), lr=0.1))
    for _ in range(2):
        booster.backward(model(inputs()).sum(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.state["steps"] == 2
