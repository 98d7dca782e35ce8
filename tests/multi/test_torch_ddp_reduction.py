"""How TorchDDPPlugin reduces gradients: what is averaged when, and what the arguments and hooks of torch's DDP do."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from harness import distributed
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from booster import Booster, ConfigError, DesyncError
from booster.comm import count_communication
from booster.device import current_device
from booster.kernels.shared_memory import SharedMemory
from booster.plugins import TorchDDPPlugin
from booster.plugins.torch_ddp.reducer import Reducer

pytestmark = pytest.mark.on_device

SMALL_BUCKETS = {"bucket_cap_mb": 1e-6}  # of one parameter each
ARGUMENTS = [{}, SMALL_BUCKETS, {"gradient_as_bucket_view": True, **SMALL_BUCKETS}, {"static_graph": True}]


def boosted(model, optimizer=None, **arguments):
    booster = Booster(plugin=TorchDDPPlugin(**arguments))
    model, optimizer, *_ = booster.boost(model, optimizer)
    return booster, model, optimizer


def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr)


def on_all_ranks(tensor):
    """Returns the ranks' tensors."""
    ranks = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(ranks, tensor.detach().contiguous())
    return ranks


def assert_equal_on_all_ranks(tensors):
    for tensor in tensors:
        assert all(torch.equal(one, tensor) for one in on_all_ranks(tensor))


def drawn(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(current_device())


def ones(*shape, times=1.0):
    return torch.full(shape, times, device=current_device())


def part(whole):
    rank, size = dist.get_rank(), dist.get_world_size()
    return whole.chunk(size)[rank]


class Branches(nn.Module):
    """Every sample chooses the layers that it goes through."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
        self.never = nn.Linear(3, 3)

    def forward(self, inputs, chosen):
        for index in chosen:
            inputs = torch.tanh(self.layers[index](inputs))
        return inputs


@distributed(world_size=[2, 3])
@pytest.mark.parametrize("arguments", ARGUMENTS[:3])
def test_ranks_that_use_different_parameters(arguments):
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Branches()
    reference = copy.deepcopy(model).to(current_device())
    booster, model, optimizer = boosted(model, torch.optim.AdamW(model.parameters(), lr=0.1), **arguments)
    serial = torch.optim.AdamW(reference.parameters(), lr=0.1)
    for step in range(4):
        inputs = drawn(step, size, 2, 3)
        choices = [[(step + one) % 3, 2 - one % 2] for one in range(size)]
        sum(reference(inputs[one], choices[one]).square().mean() for one in range(size)).div(size).backward()
        booster.backward(model(inputs[rank], choices[rank]).square().mean(), optimizer)
        for mine, whole in zip(model.parameters(), reference.parameters(), strict=True):
            assert (mine.grad is None) == (whole.grad is None)
            if whole.grad is not None:
                torch.testing.assert_close(mine.grad, whole.grad)
        for one in (optimizer, serial):
            one.step()
            one.zero_grad()
    for mine, whole in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, whole)


@distributed(world_size=2)
@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_reentrant_checkpoints_give_gradients_twice(arguments):
    torch.manual_seed(0)
    shared, other = nn.Linear(4, 4), nn.Linear(4, 4)
    model = nn.ModuleDict({"other": other, "shared": shared})
    reference = copy.deepcopy(model).to(current_device())
    booster, _, optimizer = boosted(model, sgd(model), **arguments)
    serial = sgd(reference)

    def loss(net, inputs):
        hidden = checkpoint(lambda x: torch.tanh(net["shared"](net["other"](x))), inputs, use_reentrant=True)
        return net["shared"](hidden).square().mean()

    for step in range(3):
        whole = drawn(step, 4, 4).requires_grad_()
        loss(reference, whole).backward()
        booster.backward(loss(model, part(whole.detach()).requires_grad_()), optimizer)
        for mine, expected in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, expected.grad)
        for one in (optimizer, serial):
            one.step()
            one.zero_grad()


@distributed(world_size=2)
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_gradients_are_in_grad_after_every_backward(arguments, set_to_none):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    reference = copy.deepcopy(model).to(current_device())
    booster, model, optimizer = boosted(model, sgd(model), **arguments)
    for step in range(3):
        whole = drawn(step, 4, 3)
        reference.zero_grad()
        reference(whole).square().mean().backward()
        booster.backward(model(part(whole)).square().mean(), optimizer)
        for mine, expected in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, expected.grad)
        assert_equal_on_all_ranks(one.grad for one in model.parameters())
        optimizer.zero_grad(set_to_none=set_to_none)


@distributed(world_size=2)
def test_a_plain_optimizer_over_a_model_that_was_boosted_alone():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    reference = copy.deepcopy(model).to(current_device())
    _, model, _ = boosted(model)
    optimizers = sgd(model), sgd(reference)
    for step in range(3):
        whole = drawn(step, 4, 3)
        reference(whole).square().mean().backward()
        model(part(whole)).square().mean().backward()
        for one in optimizers:
            one.step()
            one.zero_grad()
    for mine, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, expected)


@distributed(world_size=2)
@pytest.mark.parametrize("is_plain", [True, False])
def test_one_loss_through_two_models(is_plain):
    """By a plain backward, or by that of one of their optimizers: the other one's step still has the mean."""
    torch.manual_seed(0)
    encoder, decoder = nn.Linear(3, 4), nn.Linear(4, 2)
    references = [copy.deepcopy(one).to(current_device()) for one in (encoder, decoder)]
    booster, encoder, encoder_optimizer = boosted(encoder, sgd(encoder))
    decoder, decoder_optimizer, *_ = booster.boost(decoder, sgd(decoder))
    serial = [sgd(one) for one in references]
    for step in range(3):
        whole = drawn(step, 4, 3)
        references[1](references[0](whole)).square().mean().backward()
        loss = decoder(encoder(part(whole))).square().mean()
        if is_plain:
            loss.backward()
        else:
            booster.backward(loss, encoder_optimizer)
        for one in (encoder_optimizer, decoder_optimizer, *serial):
            one.step()
            one.zero_grad()
    ours = [*encoder.parameters(), *decoder.parameters()]
    theirs = [*references[0].parameters(), *references[1].parameters()]
    for mine, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, expected)


@distributed(world_size=2)
def test_gradients_for_another_optimizer_are_not_sent():
    """A generator's backward through its critic: the critic's gradients are thrown away by its own loop."""
    booster, critic, critic_optimizer = boosted(nn.Linear(2, 1), None)
    generator, critic = nn.Linear(2, 2), nn.Linear(2, 512)
    generator, optimizer, *_ = booster.boost(generator, sgd(generator))
    critic, critic_optimizer, *_ = booster.boost(critic, sgd(critic))
    with count_communication() as count:
        booster.backward(critic(generator(ones(2, 2))).mean(), optimizer)
        critic_optimizer.zero_grad()
    gradient_bytes = 4 * 6  # of the generator
    assert gradient_bytes <= sum(count.sent.values()) < gradient_bytes + 100


@distributed(world_size=2)
@pytest.mark.parametrize("name", ["fp16", "power", "bare", "buffer"])
def test_communication_hooks_have_the_bits_of_torch(name):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 50), nn.Tanh(), nn.Linear(50, 3))
    theirs = DistributedDataParallel(copy.deepcopy(model).to(current_device()), broadcast_buffers=False)
    booster, model, optimizer = boosted(model, sgd(model))
    raw = sgd(theirs)
    for one in (model, theirs):
        state, hook = {
            "fp16": (None, default_hooks.fp16_compress_hook),
            "power": (
                powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2, warm_start=False),
                powerSGD_hook.powerSGD_hook,
            ),
            "bare": (None, default_hooks.allreduce_hook),
            "buffer": (None, sent_as_bfloat16),
        }[name]
        one.register_comm_hook(state, hook)
    # From step 2 on, PowerSGD waits for collectives in callbacks of others, which torch's DDP does not end on the
    # simulated device either.
    for step in range(2 if name == "power" and current_device().type != "cpu" else 4):
        inputs = part(drawn(step, 8, 40))
        booster.backward(model(inputs).square().mean(), optimizer)
        theirs(inputs).square().mean().backward()
        for mine, expected in zip(model.parameters(), theirs.parameters(), strict=True):
            if name == "power" and step >= 2:  # of a bucket as a whole, whose parameters lie in another order there
                torch.testing.assert_close(mine.grad, expected.grad, rtol=0, atol=float(expected.grad.abs().max()))
                assert_equal_on_all_ranks([mine.grad])
            else:
                assert torch.equal(mine.grad, expected.grad)
        for one in (optimizer, raw):
            one.step()
            one.zero_grad()
    with pytest.raises(ConfigError, match="called twice"):
        model.register_comm_hook(None, default_hooks.allreduce_hook)


def sent_as_bfloat16(_, bucket):
    """A hook that uses all that a bucket has."""
    assert bucket.index() == 0
    assert bucket.is_last()
    assert [one.shape for one in bucket.gradients()] == [one.shape for one in bucket.parameters()]
    bucket.set_buffer(bucket.buffer().bfloat16())
    rounded = bucket.buffer().float()
    future = dist.all_reduce(rounded, async_op=True).get_future()
    return future.then(lambda done: done.value()[0] / dist.get_world_size())


@distributed(world_size=2, device="cpu")  # the simulated device has no sparse tensors
def test_sparse_gradients_stay_sparse():
    torch.manual_seed(0)
    model = nn.Embedding(11, 4, sparse=True)
    reference = copy.deepcopy(model).to(current_device())
    booster, model, optimizer = boosted(model, torch.optim.SparseAdam(model.parameters(), lr=0.1))
    serial = torch.optim.SparseAdam(reference.parameters(), lr=0.1)
    for step in range(3):
        ids = torch.randint(0, 11, (4,), generator=torch.Generator().manual_seed(step)).to(current_device())
        reference(ids).square().mean().backward()
        booster.backward(model(part(ids)).square().mean(), optimizer)
        gradient = model.unwrap().weight.grad
        assert gradient.is_sparse
        torch.testing.assert_close(gradient.to_dense(), reference.weight.grad.to_dense())
        for one in (optimizer, serial):
            one.step()
            one.zero_grad()
    torch.testing.assert_close(model.unwrap().weight, reference.weight)


@distributed(world_size=2)
@pytest.mark.parametrize("views", [False, True])
def test_unusual_parameters(views):
    """Of several dtypes, complex, channels last, empty and of no dimensions."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
            self.wave = nn.Parameter(torch.randn(3, dtype=torch.complex64))
            self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
            self.empty = nn.Parameter(torch.empty(0, 3))

        def forward(self, inputs):
            rows = self.conv(inputs).mean((2, 3)) + self.empty.sum()
            return (rows * self.wave).abs().double() * self.scale

    torch.manual_seed(0)
    model = Net()
    reference = copy.deepcopy(model).to(current_device())
    booster, model, optimizer = boosted(model, sgd(model), gradient_as_bucket_view=views)
    whole = torch.randn(4, 2, 3, 3).to(current_device())
    for _ in range(2):
        reference.zero_grad()
        reference(whole).mean().backward()
        booster.backward(model(part(whole)).mean(), optimizer)
        for mine, expected in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, expected.grad)
            assert mine.grad.stride() == expected.grad.stride()
        optimizer.zero_grad()


@distributed(world_size=2)
def test_buffers_of_the_first_rank_between_steps():
    """Also where no forward of the wrapper runs, and an evaluation on one rank alone needs no other."""

    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, inputs):
            if self.training:
                self.seen += inputs.sum()
            return self.layer(inputs) * (1 + 0 * self.seen)

    model = Counter()
    booster, model, optimizer = boosted(model, sgd(model))
    rank = dist.get_rank()
    model.unwrap()(ones(1, 2, times=rank + 1.0))
    booster.backward(model.unwrap()(ones(1, 2, times=rank + 1.0)).sum(), optimizer)
    assert model.unwrap().seen == 4
    model.eval()
    if rank == 0:
        model(ones(1, 2))
    booster.wait_for_everyone()


@distributed(world_size=2)
def test_a_static_graph_that_changes_is_an_error():
    model = Branches()
    booster, model, optimizer = boosted(model, sgd(model), static_graph=True)
    booster.backward(model(ones(1, 3), [0]).sum(), optimizer)
    with count_communication() as count:
        booster.backward(model(ones(1, 3), [0]).sum(), optimizer)
    assert count.calls["all_reduce"] == 1  # nothing is agreed on again
    optimizer.zero_grad()
    with pytest.raises(ConfigError, match="static_graph=True promises"):
        booster.backward(model(ones(1, 3), [1]).sum(), optimizer)


def add_one(parameter):
    parameter.grad += 1


@distributed(world_size=2)
def test_hooks_of_the_user_come_before_the_reduction():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    booster, model, optimizer = boosted(model, sgd(model), **SMALL_BUCKETS)
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * 10)
        parameter.register_post_accumulate_grad_hook(add_one)
    for _ in range(2):
        booster.backward(model(ones(1, 2, times=float(dist.get_rank()))).sum(), optimizer)
        assert torch.equal(model.unwrap()[1].bias.grad, ones(2, times=11.0))
        optimizer.zero_grad()


@distributed(world_size=2)
@pytest.mark.parametrize("is_plain", [True, False])
def test_a_backward_that_fails_is_forgotten(is_plain):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    booster, model, optimizer = boosted(model, sgd(model), **SMALL_BUCKETS)

    def backward(loss):
        loss.backward() if is_plain else booster.backward(loss, optimizer)

    hidden = model.unwrap()[0](ones(1, 2))
    hidden.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        backward(model.unwrap()[1](hidden).sum())
    optimizer.zero_grad()
    with count_communication() as count:
        backward(model(ones(1, 2, times=float(dist.get_rank()))).sum())
    assert count.calls["all_reduce"] == 4 + 1  # the parameters' buckets, and the agreement on their use
    assert torch.equal(model.unwrap()[1].bias.grad, ones(2))
    assert_equal_on_all_ranks(one.grad for one in model.parameters())


@distributed(world_size=2)
def test_a_model_that_is_dropped_takes_its_reducer_along():
    _, model, optimizer = boosted(nn.Linear(2, 2), None)
    held = weakref.ref(model.reducer)
    assert isinstance(held(), Reducer)
    raw = model.unwrap()
    del model, optimizer
    gc.collect()
    raw(ones(1, 2, times=float(dist.get_rank()))).sum().backward()  # the wrapper is gone, and the mean is there
    assert torch.equal(raw.weight.grad, ones(2, 2, times=0.5))
    copied = copy.deepcopy(raw)
    copied(ones(1, 2, times=float(dist.get_rank()))).sum().backward()
    assert torch.equal(copied.weight.grad, ones(2, 2, times=float(dist.get_rank())))
    del raw
    gc.collect()
    assert held() is None


@distributed(world_size=2)
@pytest.mark.parametrize("views", [False, True])
def test_buffers_take_two_buckets_or_all_gradients(views):
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    parameters = list(model.parameters())
    booster, model, optimizer = boosted(
        model, sgd(model), bucket_cap_mb=0.02, gradient_as_bucket_view=views, broadcast_buffers=False
    )
    booster.backward(model(ones(1, 64)).sum(), optimizer)
    flats = [bucket.flat.untyped_storage() for bucket in model.reducer._buckets]
    found = sum({flat.data_ptr(): flat.nbytes() for flat in flats}.values())
    bucket_bytes = int(0.02 * 2**20)
    whole = sum(one.nbytes for one in parameters)
    assert found == whole if views else found <= 2 * (bucket_bytes + max(one.nbytes for one in parameters))


@distributed(world_size=2, device="cpu")
def test_buckets_go_through_shared_memory_from_within_the_backward():
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(6)))
    num_bytes = sum(one.nbytes for one in model.parameters())
    booster, model, optimizer = boosted(model, sgd(model), bucket_cap_mb=0.02)
    all_reduce, calls = SharedMemory.all_reduce, []

    def recorded(memory, tensor, *arguments, only_publishes=False):
        calls.append((tensor.nbytes, only_publishes, torch._C._current_graph_task_id() != -1))
        all_reduce(memory, tensor, *arguments, only_publishes=only_publishes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SharedMemory, "all_reduce", recorded)
        booster.backward(model(ones(1, 64)).sum(), optimizer)
        optimizer.step()
    buckets = [num_bytes // 3] * 3  # beside them go the flags of what is used
    assert [size for size, only_publishes, _ in calls if only_publishes] == buckets
    assert [size for size, only_publishes, _ in calls if not only_publishes][:3] == buckets
    assert calls[0] == (buckets[0], True, True)  # before the backward of the first layers


@distributed(3, device="cpu")  # NCCL sums in the dtype in which they travel
def test_gradients_of_low_precision_are_summed_in_fp32():
    module = nn.Linear(1, 1, bias=False).bfloat16()
    booster, model, optimizer = boosted(module, sgd(module))
    x = ones(1, 1, times=256.0 if dist.get_rank() == 0 else 1.0)
    booster.backward(model(x.bfloat16()).sum(), optimizer)
    assert module.weight.grad.item() == 86  # 258 / 3; bf16 has no 257
    assert booster.plugin.reduction_dtype(torch.bfloat16) is torch.float32


@pytest.mark.parametrize("leaves_out", ["the only backward", "the first of two"])
@distributed(2, fresh=True)
def test_a_rank_that_leaves_out_a_backward_and_steps_is_named(leaves_out):
    """Else the gradients of its next backward are averaged with those of the others' last one."""
    booster, model, optimizer = boosted(model := nn.Linear(3, 1), sgd(model))

    def train():
        for step in range(4):
            for number in range(1 if leaves_out == "the only backward" else 2):
                if (dist.get_rank(), step, number) != (1, 1, 0):
                    booster.backward(model(ones(2, 3, times=step + 1.0)).sum(), optimizer)
            optimizer.step()
            optimizer.zero_grad()

    with pytest.raises(DesyncError, match=r"rank 0 after step 1, rank 1 after step 2.*model\(inputs\).sum\(\) \* 0"):
        train()


def train_a_step(booster, model, optimizer, clip=None, steps=1, **arguments):
    for _ in range(steps):
        with booster.accumulate(model, optimizer, steps):
            booster.backward(model(ones(2, 3)).sum(), optimizer, **arguments)
            if clip is not None:
                clip()
            optimizer.step()
            optimizer.zero_grad()


@distributed(2, fresh=True)
def test_num_items_on_one_rank_alone_is_an_error_before_the_step():
    booster, model, optimizer = boosted(model := nn.Linear(3, 1), sgd(model))
    before = model.weight.detach().clone()
    with pytest.raises(DesyncError, match=r"rank 0 did not give num_items, rank 1 gave num_items.*on every rank or"):
        train_a_step(booster, model, optimizer, **({"num_items": 2} if dist.get_rank() == 1 else {}))
    assert torch.equal(model.weight, before)


@distributed(2, fresh=True)
def test_different_numbers_of_microbatches_are_an_error_before_the_step():
    booster, model, optimizer = boosted(model := nn.Linear(3, 1), sgd(model))
    before = model.weight.detach().clone()
    with pytest.raises(
        DesyncError, match=r"rank 0 averages 2, rank 1 averages 3\. Call accumulate.* with the same steps"
    ):
        train_a_step(booster, model, optimizer, steps=2 + dist.get_rank())
    assert torch.equal(model.weight, before)


@distributed(2)
def test_numbers_of_microbatches_may_differ_with_num_items():
    booster, model, optimizer = boosted(model := nn.Linear(3, 1), sgd(model, lr=1.0))
    before = model.weight.detach().clone()
    train_a_step(booster, model, optimizer, steps=2 + dist.get_rank(), num_items=2)
    torch.testing.assert_close(before - model.weight, ones(1, 3))


CLIPPING = {
    "other norms": lambda b, m, o: b.clip_grad_norm_(o, 0.5 * (1 + dist.get_rank())),
    "one rank": lambda b, m, o: b.clip_grad_norm_(o, 0.5) if dist.get_rank() == 0 else None,
    "other values": lambda b, m, o: o.clip_grad_by_value(0.5 * (1 + dist.get_rank())),
    "torch's norm": lambda b, m, o: nn.utils.clip_grad_norm_(m.parameters(), max_norm=0.5 * (1 + dist.get_rank())),
    "torch's value": lambda b, m, o: nn.utils.clip_grad_value_(m.parameters(), 0.5 * (1 + dist.get_rank())),
}


@pytest.mark.parametrize("name", CLIPPING)
@distributed(2, fresh=True)
def test_clipping_that_differs_between_ranks_is_an_error_in_the_next_backward(name):
    booster, model, optimizer = boosted(model := nn.Linear(3, 1), sgd(model))
    train_a_step(booster, model, optimizer, lambda: CLIPPING[name](booster, model, optimizer))
    found = "rank 0 to 0.5, rank 1 not at all" if name == "one rank" else "rank 0 to 0.5, rank 1 to 1. "
    with pytest.raises(DesyncError, match=f"clip gradients differently, after step 1: {found}.*Clip on every rank"):
        train_a_step(booster, model, optimizer)


@distributed(2)
def test_ranks_may_read_the_norm_alone():
    booster, model, optimizer = boosted(model := nn.Linear(3, 1), sgd(model))
    for step in range(3):
        clip = lambda: booster.clip_grad_norm_(optimizer, float("inf"))  # noqa: E731
        train_a_step(booster, model, optimizer, clip if dist.get_rank() == step % 2 else None)
        train_a_step(booster, model, optimizer, lambda: booster.clip_grad_norm_(optimizer, 0.5))
    assert_equal_on_all_ranks(model.parameters())


@pytest.mark.parametrize(("is_plain", "clears"), [(False, True), (False, False), (True, True)])
@distributed(2, fresh=True)
def test_an_optimizer_inside_of_backward_is_an_error(is_plain, clears):
    model = nn.Linear(3, 1)
    optimizers = {one: torch.optim.SGD([one], lr=0.1) for one in model.parameters()}
    booster, boosted_model, optimizer = boosted(model, None if is_plain else sgd(model))

    def step(parameter):
        optimizers[parameter].step()
        if clears:
            optimizers[parameter].zero_grad()

    for one in model.parameters():
        one.register_post_accumulate_grad_hook(step)
    loss = boosted_model(ones(2, 3)).sum()
    with pytest.raises(ConfigError, match=r"a hook in backward.*'(weight|bias)' or cleared its .grad.*step.. after"):
        loss.backward() if is_plain else booster.backward(loss, optimizer)


class Writes(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how, self.last = how, nn.Linear(3, 1)
        self.weight = nn.Parameter(torch.randn(4, 3), requires_grad=how == "embedding")

    def forward(self, inputs):
        if self.how == "embedding":
            rows = torch.arange(2, device=inputs.device) + 2 * dist.get_rank()
            return self.last(nn.functional.embedding(rows, self.weight, max_norm=0.1))
        with torch.no_grad():
            if self.how == "codebook":
                self.weight.mul_(0.9).add_(inputs.mean(), alpha=0.1)
            else:  # equally on all ranks
                self.weight.copy_(nn.functional.normalize(self.weight, dim=1))
        return self.last(inputs + self.weight[:2])


@pytest.mark.parametrize("how", ["embedding", "codebook"])
@distributed(2, fresh=True)
def test_a_forward_that_writes_other_weights_on_each_rank_is_an_error(how):
    torch.manual_seed(0)
    booster, model, optimizer = boosted(model := Writes(how), sgd(model))
    with pytest.raises(ConfigError, match=r"a forward in training wrote to weights \('weight'\).*as a buffer"):
        booster.backward(model(ones(2, 3, times=1.0 + dist.get_rank())).sum(), optimizer)


@distributed(2)
def test_a_forward_may_write_the_same_weights_on_all_ranks():
    booster, model, optimizer = boosted(model := Writes("normalized"), sgd(model))
    for step in range(6):
        booster.backward(model(ones(2, 3, times=step + dist.get_rank())).sum(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    assert_equal_on_all_ranks(model.parameters())
