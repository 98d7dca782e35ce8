"""Attention of which every rank holds its own tokens equals dense attention, with all gradients."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import distributed

from booster.comm import count_communication
from booster.device import current_device, device_type
from booster.errors import ConfigError
from booster.plugins.hybrid_parallel.sequence_parallel import ring_attention
from booster.plugins.hybrid_parallel.sequence_parallel import ring_attention as ring_blocks
from booster.plugins.hybrid_parallel.sequence_parallel.attention_dispatch import sequence_attention
from booster.plugins.hybrid_parallel.sequence_parallel.group import SequenceParallelGroup

pytestmark = pytest.mark.on_device

MODES = ["all_to_all", "ring_attn"]


def _tensors(batch, heads, key_heads, length, features, value_features=None, dtype=torch.float32):
    torch.manual_seed(5)
    shapes = [(heads, features), (key_heads, features), (key_heads, value_features or features)]
    tensors = [torch.randn(batch, count, length, width) for count, width in shapes]
    tensors.append(torch.randn(batch, heads, length, shapes[2][1]))
    *tensors, grad = (tensor.to(current_device(), dtype) for tensor in tensors)
    return tensors, grad


def _masks(batch, heads, length):
    """Masks by name, each of whole sequences."""
    lengths = torch.tensor([length - 3 * row % length for row in range(batch)])
    is_token = torch.arange(length) < lengths[:, None]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    masks = {
        "padding": is_token[:, None, None, :],
        "left padding, causal": is_token.flip(1)[:, None, None, :] & causal,
        "additive": torch.randn(1, heads, length, length),
        "lowest": torch.zeros(batch, 1, length, length).masked_fill(
            ~(is_token[:, None, None, :] & causal), torch.finfo(torch.float32).min
        ),
        "two dimensions": causal.logical_or(torch.rand(length, length) > 0.7),
    }
    return {"none": None, **{name: mask.to(current_device()) for name, mask in masks.items()}}


def _dense(tensors, grad, mask, **how):
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    mask = mask.detach().clone().requires_grad_() if how.pop("needs_mask", False) else mask
    output = F.scaled_dot_product_attention(*leaves, mask, enable_gqa=True, **how)
    output.backward(grad)
    return [output.detach(), *(leaf.grad for leaf in leaves)], mask


def _check(ranks, tensors, grad, mask, *, tolerance=1e-6, needs_mask=False, **how):
    expected, dense_mask = _dense(tensors, grad, mask, needs_mask=needs_mask, **how)
    length = grad.shape[2]
    order = ranks.sharding_of(length)
    local = [order.shard(tensor, 2, ranks.rank).clone().requires_grad_() for tensor in tensors]
    own_mask = mask.clone().requires_grad_() if needs_mask else mask
    output = sequence_attention(*local, ranks, attn_mask=own_mask, enable_gqa=True, length=length, **how)
    output.backward(order.shard(grad, 2, ranks.rank))
    for name, ours, whole in zip("oqkv", [output.detach(), *(leaf.grad for leaf in local)], expected, strict=True):
        error = float((ours - order.shard(whole, 2, ranks.rank)).abs().max()) if ours.numel() else 0.0
        assert error <= tolerance * whole.abs().max(), (name, error, whole.abs().max())
    if needs_mask:
        total = own_mask.grad.clone()
        dist.all_reduce(total)
        torch.testing.assert_close(total, dense_mask.grad, rtol=0, atol=2e-6 * float(dense_mask.grad.abs().max()))


@distributed([2, 3, 4])
@pytest.mark.parametrize("mode", MODES)
def test_attention_equals_dense_attention(world_size, mode):
    ranks = SequenceParallelGroup(None, mode)
    for heads, key_heads, length in [(4, 4, 16), (4, 2, 17), (6, 3, 23), (4, 1, 9), (5, 5, 24), (2, 2, 5), (2, 1, 2)]:
        tensors, grad = _tensors(2, heads, key_heads, length, 8)
        _check(ranks, tensors, grad, None, tolerance=2e-6)
        _check(ranks, tensors, grad, None, tolerance=2e-6, is_causal=True)
        _check(ranks, tensors, grad, None, tolerance=2e-6, is_causal=True, scale=0.7)


@distributed([2, 3, 4])
@pytest.mark.parametrize("mode", MODES)
def test_masks_are_those_of_whole_sequences(world_size, mode):
    ranks = SequenceParallelGroup(None, mode)
    for heads, key_heads, length in [(4, 4, 16), (6, 2, 19)]:
        tensors, grad = _tensors(3, heads, key_heads, length, 8)
        for name, mask in _masks(3, heads, length).items():
            if name == "left padding, causal":  # rows of padding see nothing; torch says 0, or nothing that is meant
                seen = mask.any(-1).expand(3, heads, length).unsqueeze(-1)
                _check(ranks, tensors, grad * seen, mask, tolerance=2e-6)
            else:
                _check(ranks, tensors, grad, mask, tolerance=2e-6)


@distributed([2, 3])
@pytest.mark.parametrize("mode", MODES)
def test_the_gradient_of_a_mask_is_the_sum_of_the_ranks(world_size, mode):
    ranks = SequenceParallelGroup(None, mode)
    tensors, grad = _tensors(2, 4, 2, 13, 8)
    for shape in [(1, 4, 13, 13), (2, 1, 13, 13), (1, 1, 1, 13)]:
        _check(ranks, tensors, grad, torch.randn(shape).to(current_device()), tolerance=2e-6, needs_mask=True)


@distributed([2, 4])
@pytest.mark.parametrize("mode", MODES)
def test_values_of_other_features_and_low_precision(world_size, mode):
    ranks = SequenceParallelGroup(None, mode)
    tensors, grad = _tensors(2, 4, 4, 14, 8, value_features=6)
    _check(ranks, tensors, grad, None, is_causal=True, tolerance=2e-6)
    for dtype in (torch.bfloat16, torch.float16):
        tensors, grad = _tensors(2, 4, 2, 33, 16, dtype=dtype)
        # Output and gradients are rounded to the dtype in several places, differently from dense attention.
        _check(ranks, tensors, grad, None, is_causal=True, tolerance=4 * torch.finfo(dtype).eps)
    tensors, grad = _tensors(2, 4, 2, 33, 16, dtype=torch.float64)
    _check(ranks, tensors, grad, None, is_causal=True, tolerance=1e-13)


@distributed([2, 3])
def test_without_a_fused_kernel_rows_go_one_after_the_other(world_size):
    ranks = SequenceParallelGroup(None, "ring_attn")
    before = ring_attention._MAX_SCORES, ring_attention.supports_flash, ring_blocks.supports_flash
    try:
        ring_attention.supports_flash = ring_blocks.supports_flash = lambda *_: False
        for ring_attention._MAX_SCORES in (2**26, 100):
            for heads, key_heads, length in [(4, 2, 17), (4, 1, 16)]:
                tensors, grad = _tensors(2, heads, key_heads, length, 8)
                _check(ranks, tensors, grad, None, tolerance=2e-6)
                _check(ranks, tensors, grad, None, tolerance=2e-6, is_causal=True)
                for name in ("padding", "additive", "two dimensions"):
                    _check(ranks, tensors, grad, _masks(2, heads, length)[name], tolerance=2e-6)
                mask = torch.randn(2, 1, length, length).to(current_device())
                _check(ranks, tensors, grad, mask, tolerance=2e-6, needs_mask=True)
    finally:
        ring_attention._MAX_SCORES, ring_attention.supports_flash, ring_blocks.supports_flash = before


@distributed(2)
@pytest.mark.parametrize("mode", MODES)
def test_autocast_is_followed(mode):
    ranks = SequenceParallelGroup(None, mode)
    (query, key, value), _ = _tensors(1, 2, 2, 11, 8)
    order = ranks.sharding_of(11)
    local = [order.shard(tensor, 2, ranks.rank) for tensor in (query, key, value)]
    whole = F.scaled_dot_product_attention(query, key, value)
    output = sequence_attention(*local, ranks, length=11)
    torch.testing.assert_close(output, order.shard(whole, 2, ranks.rank), rtol=0, atol=2e-6)
    with torch.autocast(device_type(), torch.bfloat16):
        assert sequence_attention(*local, ranks, length=11).dtype == torch.bfloat16


@distributed([2, 3])
@pytest.mark.parametrize("mode", MODES)
def test_dropout_keeps_the_mean_and_has_its_own_gradient(world_size, mode):
    ranks = SequenceParallelGroup(None, mode)
    torch.manual_seed(ranks.rank)
    heads, length = 3, 64
    # Values of one make a row's output the sum of its weights: its mean over many rows is 1.
    query, key = (torch.randn(8, heads, length, 8).to(current_device()) for _ in range(2))
    value = torch.ones(8, heads, length, 8, device=current_device())
    order = ranks.sharding_of(length)
    local = [order.shard(tensor, 2, ranks.rank).clone().requires_grad_() for tensor in (query, key, value)]

    def run(scale):
        torch.manual_seed(ranks.rank)
        return sequence_attention(local[0], local[1], local[2] * scale, ranks, dropout_p=0.3, length=length)

    output = run(1.0)
    assert abs(output.mean().item() - 1) < 0.02
    assert output.std() > 0.05
    assert torch.equal(output, run(1.0))
    # Output is linear in value: its gradient of the sum times value gives back the sum over all ranks.
    total = output.sum()
    total.backward()
    sums = torch.stack([total.detach(), (local[2].grad * local[2].detach()).sum()])
    dist.all_reduce(sums)
    assert abs(sums[0] - sums[1]) < 1e-4 * sums[0].abs()
    # And along query, against the slope.
    step = torch.randn_like(local[0])
    slopes = []
    for direction in (1, -1):
        torch.manual_seed(ranks.rank)
        moved = sequence_attention(
            (local[0] + direction * 1e-2 * step).detach(),
            local[1].detach(),
            local[2].detach(),
            ranks,
            dropout_p=0.3,
            length=length,
        )
        slopes.append(moved.sum().double())
    slope = (slopes[0] - slopes[1]) / 2e-2
    assert abs(slope - (local[0].grad * step).sum()) < 2e-2 * max(1.0, slope.abs().item())


@distributed([2, 4])
def test_bytes_equal_theory(world_size):
    batch, heads, key_heads, length, features = 2, 4, 4, 32, 8
    size = 4 * batch * heads * length * features // world_size  # of this rank's part of one of query, key, value
    for mode in MODES:
        ranks = SequenceParallelGroup(None, mode)
        tensors, grad = _tensors(batch, heads, key_heads, length, features)
        order = ranks.sharding_of(length)
        local = [order.shard(tensor, 2, ranks.rank).clone().requires_grad_() for tensor in tensors]
        with count_communication() as forward:
            output = sequence_attention(*local, ranks, is_causal=True, length=length)
        with count_communication() as backward:
            output.backward(order.shard(grad, 2, ranks.rank))
        others = world_size - 1
        if mode == "all_to_all":
            expected = [4 * size * others // world_size] * 2
            calls = [2, 2]
        else:  # keys and values go P - 1 steps; in backward too, and their gradients P steps
            expected = [2 * size * others, 2 * size * others + 2 * size * world_size]
            calls = [others, others + world_size]
        assert [sum(count.sent.values()) for count in (forward, backward)] == expected, mode
        assert [count.calls.total() for count in (forward, backward)] == calls, mode


@distributed(4, timeout=180)
def test_ring_attention_equals_dense_attention_at_4096_tokens():
    ranks = SequenceParallelGroup(None, "ring_attn")
    tensors, grad = _tensors(1, 2, 1, 4096, 16)
    _check(ranks, tensors, grad, None, is_causal=True, tolerance=3e-6)


@distributed(2)
def test_mistakes_are_named():
    for mode in MODES:
        ranks = SequenceParallelGroup(None, mode)
        query, key = (torch.randn(1, heads, 3, 8).to(current_device()) for heads in (4, 2))
        mask = torch.ones(6, 6, device=current_device())
        with pytest.raises(ConfigError, match="enable_gqa=True"):
            sequence_attention(query, key, key, ranks, length=6)
        with pytest.raises(ConfigError, match=r"create it outside of the layers"):
            sequence_attention(query, query, query, ranks, length=6, attn_mask=mask[:3, :3].bool())
        with pytest.raises(ConfigError, match="is_causal=True"):
            sequence_attention(query, query, query, ranks, length=6, attn_mask=mask, is_causal=True)
        with pytest.raises(ConfigError, match=r"give \(batch, heads, tokens, features\)"):
            sequence_attention(query[0], query[0], query[0], ranks, length=6)
