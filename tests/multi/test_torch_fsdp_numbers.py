"""TorchFSDPPlugin computes what FSDP2 computes that is set up by hand in the same units, bit for bit."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from harness import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from zoo import get_model, split_batch

from booster import Booster
from booster.device import current_device, device_type
from booster.plugins import TorchFSDPPlugin
from booster.plugins.torch_fsdp.wrap import plan_wrapping
from booster.pytree import map_tensors

pytestmark = pytest.mark.on_device

PRECISIONS = {
    "fp32": functools.partial(MixedPrecisionPolicy),
    "bf16": functools.partial(MixedPrecisionPolicy, param_dtype=torch.bfloat16),
    "fp16": functools.partial(MixedPrecisionPolicy, param_dtype=torch.float16),
}


def policy(precision, *, is_root):
    return PRECISIONS[precision](output_dtype=torch.float32 if is_root and precision != "fp32" else None)


def own_batch(entry):
    batch = split_batch(entry.make_batch(0, 2 * dist.get_world_size()), dist.get_rank(), dist.get_world_size())
    return map_tensors(lambda tensor: tensor.to(current_device()), batch)


def by_hand(entry, precision):
    """This rank's rows of the gradients, and the loss."""
    model = entry.build().to(current_device())
    mesh = init_device_mesh(device_type(), (dist.get_world_size(),))
    for plan in plan_wrapping(model, None, replicated=()):
        fully_shard(plan.module, mesh=mesh, mp_policy=policy(precision, is_root=False))
    fully_shard(model, mesh=mesh, mp_policy=policy(precision, is_root=True))
    model.set_gradient_divide_factor(1.0)
    for module in model.modules():
        if hasattr(module, "set_force_sum_reduction_for_comms"):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    loss = entry.loss(model, own_batch(entry))
    loss.backward()
    gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return {name: one._local_tensor.flatten() for name, one in gradients.items()}, loss.detach()


def by_plugin(entry, precision):
    raw = entry.build()
    booster = Booster(plugin=TorchFSDPPlugin(mixed_precision=policy(precision, is_root=True), initial_scale=1.0))
    model, optimizer, *_ = booster.boost(raw, torch.optim.SGD(entry.param_groups(raw), lr=0.1))
    loss = entry.loss(model, own_batch(entry))
    booster.backward(loss, optimizer)
    return {shard.name: sums for shard, sums in optimizer.reduced_gradients()}, loss.detach()


@distributed(world_size=[pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", ["byte_gpt", "llama", "t5"])
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_gradients_are_those_of_fsdp2_set_up_by_hand(name, precision):
    entry = get_model(name)
    torch.set_num_threads(1)
    expected, expected_loss = by_hand(entry, precision)
    found, loss = by_plugin(entry, precision)
    assert torch.equal(loss, expected_loss)
    assert found
    for key, gradient in found.items():
        if dist.get_world_size() == 1 or precision == "fp32":  # two numbers have one sum
            assert torch.equal(gradient, expected[key].float()), key
        else:  # by hand the sum is rounded to the format in which it travels
            assert torch.equal(gradient.to(PRECISIONS[precision]().param_dtype).float(), expected[key].float()), key
