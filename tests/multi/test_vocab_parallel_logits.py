"""Logits that are split by vocabulary give the numbers of whole ones, whatever is done to them."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from harness import distributed, preload
from torch import nn
from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss

from booster.comm import count_communication
from booster.device import current_device, device_type
from booster.mixed_precision.fp16 import low_precision_to_fp32
from booster.plugins.hybrid_parallel.tensor_parallel.embedding import (
    make_vocab_parallel_embedding,
    make_vocab_parallel_head,
)
from booster.plugins.hybrid_parallel.tensor_parallel.group import TensorParallelGroup
from booster.plugins.hybrid_parallel.tensor_parallel.shard_spec import vocabulary_rows, vocabulary_spec
from booster.plugins.hybrid_parallel.tensor_parallel.vocab_parallel_logits import (
    VocabParallelLogits,
    vocab_parallel_cross_entropy,
)

pytestmark = pytest.mark.on_device

preload("transformers.loss.loss_utils")
WORLDS = [2, 3, 4]
BATCH, SEQUENCE, HIDDEN, ENTRIES = 2, 5, 6, 13
cross_entropy = nn.functional.cross_entropy


def assert_close(actual, expected, tolerance=1e-6):
    actual, expected = actual.detach(), expected.detach()
    assert type(actual) is torch.Tensor
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    if expected.numel() == 0:
        return
    if expected.isnan().any():
        assert torch.equal(actual.isnan(), expected.isnan())
        return
    error = (actual.double() - expected.double()).abs().max()
    assert error <= tolerance * expected.detach().double().abs().max().clamp_min(1), error


def columns(vocab_size, multiple=1):
    rank, size = dist.get_rank(), dist.get_world_size()
    start, stop, _ = vocabulary_rows(vocab_size, multiple, size, rank)
    return start, stop


def sizes(vocab_size, multiple=1):
    size = dist.get_world_size()
    rows = [vocabulary_rows(vocab_size, multiple, size, rank) for rank in range(size)]
    return [stop - start for start, stop, _ in rows]


@distributed(WORLDS)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12), (torch.bfloat16, 1e-2)]
)
def test_cross_entropy_equals_that_of_whole_logits(world_size, dtype, tolerance):
    ranks = TensorParallelGroup()
    for vocab_size, multiple in ((13, 1), (2, 64), (70, 8)):
        start, stop = columns(vocab_size, multiple)
        logits = (5 * torch.randn(9, vocab_size)).to(current_device(), dtype) + 30
        target = torch.randint(vocab_size, (9,)).to(current_device())
        for ignored in ([], [0, 4], list(range(9))):
            target[ignored] = -100
            for reduction in ("mean", "sum", "none"):
                for smoothing in (0.0, 0.1):
                    theirs = logits.clone().requires_grad_()
                    ours = logits[:, start:stop].clone().requires_grad_()
                    expected = cross_entropy(theirs, target, reduction=reduction, label_smoothing=smoothing)
                    with count_communication() as count:
                        loss = vocab_parallel_cross_entropy(
                            ours,
                            target,
                            ranks,
                            start,
                            vocab_size=vocab_size,
                            reduction=reduction,
                            label_smoothing=smoothing,
                        )
                        weights = torch.randn_like(expected)
                        (loss * weights).sum().backward()
                    (expected * weights).sum().backward()
                    assert count.calls == {"all_reduce": 2}
                    assert_close(loss, expected, tolerance)
                    assert_close(ours.grad, theirs.grad[:, start:stop], tolerance)


@distributed([2], device="cpu")  # the host would wait for another device
def test_targets_that_are_no_class_are_refused(world_size):
    logits = torch.randn(2, 4).split(2, 1)[dist.get_rank()]
    for wrong in (4, -1):
        with pytest.raises(IndexError, match=f"Target {wrong} is out of bounds"):
            vocab_parallel_cross_entropy(
                logits, torch.tensor([0, wrong]), TensorParallelGroup(), 2 * dist.get_rank(), vocab_size=4
            )
    loss = vocab_parallel_cross_entropy(
        logits, torch.tensor([0, 4]), TensorParallelGroup(), 2 * dist.get_rank(), vocab_size=4, ignore_index=4
    )
    assert loss.isfinite()


class Head(nn.Module):
    """A tied embedding and head with a bias, as language models have them."""

    def __init__(self, vocab_size=ENTRIES):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, HIDDEN)
        self.head = nn.Linear(HIDDEN, vocab_size)
        self.head.weight = self.embedding.weight

    def forward(self, entries):
        return self.head(torch.tanh(self.embedding(entries)))


def split_head(vocab_size=ENTRIES, multiple=1):
    """Returns a head over split logits, its serial twin, and what a serial gradient has to be cut by."""
    model, ranks = Head(vocab_size).to(current_device()), TensorParallelGroup()
    twin = copy.deepcopy(model)
    layouts = [vocabulary_spec(parameter.shape, multiple, ranks.size, ranks.rank) for parameter in model.parameters()]
    for parameter, layout in zip(model.parameters(), layouts, strict=True):
        parameter.data = layout.shard(parameter.data)
    options = {"vocab_size": vocab_size, "multiple": multiple}
    make_vocab_parallel_embedding(model.embedding, ranks, **options)
    make_vocab_parallel_head(model.head, ranks, gathers_output=False, **options)
    return model, twin, layouts


def assert_same_loss(loss_of, vocab_size=ENTRIES, multiple=1, tolerance=1e-6, calls=None):
    model, twin, layouts = split_head(vocab_size, multiple)
    entries = torch.randint(vocab_size, (BATCH, SEQUENCE)).to(current_device())
    logits = model(entries)
    assert isinstance(logits, VocabParallelLogits)
    with count_communication() as count:
        loss = loss_of(logits, entries)
    if calls is not None:
        assert count.calls == calls
    expected = loss_of(twin(entries), entries)
    assert_close(loss, expected, tolerance)
    loss.backward()
    expected.backward()
    for parameter, serial, layout in zip(model.parameters(), twin.parameters(), layouts, strict=True):
        assert_close(parameter.grad, layout.shard(serial.grad), tolerance)


def shifted(logits, labels):
    return cross_entropy(logits[:, :-1].contiguous().view(-1, ENTRIES), labels[:, 1:].reshape(-1))


def shifted_otherwise(logits, labels):
    return nn.CrossEntropyLoss()(logits[..., :-1, :].reshape(-1, logits.size(-1)), labels[..., 1:].flatten())


def masked(logits, labels):
    keep = labels % 2 == 0
    return cross_entropy(logits[keep], labels[keep], reduction="sum", label_smoothing=0.2)


def soft_capped(logits, labels):
    return cross_entropy(input=(torch.tanh(logits / 3) * 3.0).flatten(0, 1), target=labels.flatten())


def in_autocast(logits, labels):
    with torch.autocast(device_type(), torch.bfloat16):
        return cross_entropy(logits.flatten(0, -2), labels.flatten())


def with_fp32_outputs(logits, labels):
    return shifted(low_precision_to_fp32({"logits": [logits.bfloat16().float()]})["logits"][0].double(), labels)


STAY_SPLIT = [
    partial(ForCausalLMLoss, vocab_size=ENTRIES),
    partial(ForMaskedLMLoss, vocab_size=ENTRIES, num_items_in_batch=7),
    shifted,
    shifted_otherwise,
    masked,
    soft_capped,
    in_autocast,
    with_fp32_outputs,
]


@distributed(WORLDS)
@pytest.mark.parametrize("loss_of", STAY_SPLIT)
def test_losses_of_language_models_gather_nothing(world_size, loss_of):
    assert_same_loss(loss_of, calls={"all_reduce": 2}, tolerance=2e-2 if loss_of is with_fp32_outputs else 1e-6)


@distributed(WORLDS)
def test_a_padded_vocabulary_does_not_show(world_size):
    for vocab_size, multiple in ((13, 8), (3, 64)):
        assert_same_loss(lambda x, y: ForCausalLMLoss(x, y, x.shape[-1]), vocab_size, multiple)


class Doubled(torch.autograd.Function):
    """Goes past torch's override mechanism."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


def by_several_ways(logits, labels):
    """Some of it on the parts, some on the whole, some past the override mechanism."""
    flat = logits.view(-1, ENTRIES)
    return (
        cross_entropy(flat, labels.view(-1))
        + cross_entropy(logits.transpose(1, 2), labels)
        + (logits * logits).mean()
        + Doubled.apply(logits).square().sum()
    )


GATHER = {
    "log_softmax": lambda x, y: -nn.functional.log_softmax(x, -1).gather(-1, y.unsqueeze(-1)).mean(),
    "sum": lambda x, y: x.sum(),
    "squares": lambda x, y: (x * x).mean(),
    "one_column": lambda x, y: x[..., 3].sum() + x[..., 2:5].sum() + x[0, 0, 0],
    "last_dim_mixed": lambda x, y: x.view(BATCH, -1).square().sum() + x.flatten().sum(),
    "new_last_dim": lambda x, y: cross_entropy(x[..., None].squeeze(-1).flatten(0, 1), y.flatten()),
    "class_weights": lambda x, y: cross_entropy(
        x.flatten(0, 1), y.flatten(), weight=torch.arange(1.0, ENTRIES + 1, device=y.device)
    ),
    "soft_targets": lambda x, y: cross_entropy(
        x.flatten(0, 1), torch.full((BATCH * SEQUENCE, ENTRIES), 1 / ENTRIES, device=y.device)
    ),
    "classes_second": lambda x, y: cross_entropy(x.transpose(1, 2), y),
    "concatenated": lambda x, y: torch.cat([x, 2 * x]).square().sum(),
    "own_function": lambda x, y: Doubled.apply(x).square().sum(),
    "several": by_several_ways,
    "a_view_by_name": lambda x, y: torch.einsum("bsv,bsv->", x, x),
}


@distributed(WORLDS)
@pytest.mark.parametrize("name", GATHER)
def test_everything_else_gathers(world_size, name):
    assert_same_loss(GATHER[name])


@distributed(WORLDS)
def test_shapes_and_formats_are_those_of_whole_logits(world_size):
    model, twin, _ = split_head()
    entries = torch.randint(ENTRIES, (BATCH, SEQUENCE)).to(current_device())
    with count_communication() as count:
        logits, expected = model(entries), twin(entries)
        sums = dict(count.calls)
        for ask in (
            lambda x: x.shape,
            lambda x: x.size(-1),
            lambda x: x.dim(),
            lambda x: x.numel(),
            lambda x: (x.dtype, x.device, x.requires_grad, x.is_leaf, len(x)),
            lambda x: x.half().dtype,
            lambda x: x.to(torch.bfloat16).dtype,
            lambda x: x.detach().requires_grad,
            lambda x: x[0].shape,
            lambda x: x[:, :-1].shape,
            lambda x: x[..., None, :].shape,
            lambda x: x[0, None].shape,
            lambda x: x[entries > 3].shape,
            lambda x: x[:, torch.tensor([0, 2])].shape,
            lambda x: x[torch.tensor([0, 1]), :, :].shape,
            lambda x: x.view(-1, ENTRIES).shape,
            lambda x: x.reshape((1, -1, ENTRIES)).shape,
        ):
            assert ask(logits) == ask(expected)
        assert "entries per rank" in f"{logits} {logits!r} {logits!s}"
        assert dict(count.calls) == sums
    assert_close(logits.argmax(-1).double(), expected.argmax(-1).double())
    with torch.no_grad():
        assert_close(logits.detach() + 0, expected.detach())
        assert logits.full_tensor() is logits.full_tensor()
    assert logits.full_tensor().requires_grad
    assert_close(copy.deepcopy(logits.detach()), expected.detach())


@distributed([2])
def test_changes_in_place_are_refused(world_size):
    logits = split_head()[0](torch.zeros(1, 2, dtype=torch.int64, device=current_device()))

    def assign():
        logits[..., 0] = 0

    def divide():
        nonlocal logits
        logits /= 2

    for change in (
        assign,
        divide,
        lambda: logits.mul_(2),
        lambda: logits.retain_grad(),
        lambda: logits.register_hook(print),
        lambda: torch.mul(logits, 2, out=logits),
    ):
        with pytest.raises(RuntimeError, match="parallel_output=False"):
            change()


@distributed([2])
def test_evaluation_needs_no_graph(world_size):
    model, twin, _ = split_head()
    entries = torch.randint(ENTRIES, (BATCH, SEQUENCE)).to(current_device())
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            logits, expected = model(entries), twin(entries)
            assert isinstance(logits, VocabParallelLogits)
            assert_close(shifted(logits, entries), shifted(expected, entries))
            assert_close(logits.softmax(-1), expected.softmax(-1))
