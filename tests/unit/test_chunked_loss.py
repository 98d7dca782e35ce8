"""Chunks of logits on one process: equal losses and gradients, memory of one chunk, and mistakes."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from booster import Booster, chunked_cross_entropy
from booster.chunked_loss import ChunkedLogits
from booster.errors import ConfigError

CLASSES, FEATURES, TOKENS = 50, 4, 37
cross_entropy = nn.functional.cross_entropy


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(FEATURES, FEATURES)
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x):
        return self.head(self.body(x))


def pair(chunk_size=5):
    plain = Model()
    return plain, chunked_cross_entropy(copy.deepcopy(plain), chunk_size, head="head")


def inputs():
    torch.manual_seed(1)
    target = torch.randint(CLASSES, (TOKENS,))
    target[[0, 3, 4, 20]] = -100
    return torch.randn(TOKENS, FEATURES), target


def capped(logits):
    return 3 * torch.tanh(logits.float() / 3)


LOSSES = {
    "mean": lambda logits, target: cross_entropy(logits, target),
    "sum": lambda logits, target: cross_entropy(logits, target, reduction="sum"),
    "none": lambda logits, target: cross_entropy(logits, target, reduction="none").square().mean(),
    "smoothed": lambda logits, target: cross_entropy(logits, target, label_smoothing=0.2),
    "weighted": lambda logits, target: cross_entropy(logits, target, torch.linspace(0.5, 2, CLASSES)),
    "both": lambda logits, target: cross_entropy(logits, target, torch.linspace(0.5, 2, CLASSES), label_smoothing=0.2),
    "ignored": lambda logits, target: cross_entropy(logits, target.clamp(min=7), ignore_index=7),
    "capped": lambda logits, target: cross_entropy(capped(logits), target),
    "shifted": lambda logits, target: cross_entropy(logits[:-1].contiguous(), target[1:]),
    "view": lambda logits, target: cross_entropy(
        logits.view(1, -1, CLASSES).to(torch.float64).view(-1, CLASSES), target
    ),
    "masked": lambda logits, target: cross_entropy(logits[target != -100], target[target != -100]),
}


@pytest.mark.parametrize("chunk_size", [1, 5, 37, 100])
@pytest.mark.parametrize("loss", LOSSES)
def test_losses_and_gradients_are_those_of_whole_logits(loss, chunk_size):
    plain, chunked = pair(chunk_size)
    x, target = inputs()
    expected, found = (LOSSES[loss](model(x), target) for model in (plain, chunked))
    torch.testing.assert_close(found, expected)
    expected.backward()
    found.backward()
    for one, other in zip(chunked.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-6)


class LargestTensor(TorchDispatchMode):
    """Number of elements of the largest tensor that an operation returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [one.numel() for one in tree_leaves(result) if type(one) is torch.Tensor]
        self.numel = max(self.numel, *sizes, 0)
        return result


def test_the_logits_of_one_chunk_are_in_memory():
    plain, chunked = pair(chunk_size=5)
    x, target = inputs()
    sizes = []
    for model in (plain, chunked):
        with LargestTensor() as largest:
            cross_entropy(model(x).float(), target).backward()
        sizes.append(largest.numel)
    assert sizes[0] == TOKENS * CLASSES
    assert sizes[1] == 5 * CLASSES  # more than the weight's FEATURES * CLASSES


def test_other_uses_compute_all_logits_and_say_so():
    plain, chunked = pair()
    x, _ = inputs()
    logits = chunked(x)
    assert type(logits) is ChunkedLogits
    assert (logits.shape, logits.dtype, logits.requires_grad) == ((TOKENS, CLASSES), torch.float32, True)
    with pytest.warns(UserWarning, match=r"softmax reads the logits .* all \(37, 50\) of them"):
        probabilities = logits.softmax(-1)
    torch.testing.assert_close(probabilities, plain(x).softmax(-1))
    probabilities.square().sum().backward()
    assert chunked.head.weight.grad is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        logits.argmax(-1)  # computed already
        chunked(x)[-2:].argmax(-1)  # less than a chunk
        assert "ChunkedLogits(shape=(37, 50)" in repr(chunked(x))
    assert torch.equal(chunked.head(x[0]), plain.head(x[0]))  # of one token


def test_without_gradients():
    plain, chunked = pair()
    x, target = inputs()
    with torch.no_grad():
        loss = cross_entropy(chunked(x), target)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, cross_entropy(plain(x), target))


def test_logits_of_a_forward_without_gradients_have_none_where_they_are_read():
    _, chunked = pair()
    x, target = inputs()
    with torch.no_grad():
        logits = chunked(x)
    assert not cross_entropy(logits.float() / 2, target).requires_grad
    assert not logits[:2].softmax(-1).requires_grad


def test_logits_of_changed_weights_or_adapters_are_an_error():
    _, chunked = pair()
    x, target = inputs()
    for change in (
        lambda: chunked.head.weight.detach().zero_(),
        lambda: setattr(chunked.head, "_disable_adapters", True),
    ):
        logits = chunked(x)
        change()
        for use in (lambda logits: logits[-2:].argmax(-1), lambda logits: cross_entropy(logits, target)):
            with pytest.raises(ConfigError, match=r"changed since the forward.*leave chunked_cross_entropy\(\) out"):
                use(logits)
    logits = chunked(x)
    chunked.eval()
    logits[-2:].argmax(-1)  # a linear layer computes the same in both modes


def test_what_would_be_lost_is_an_error():
    _, chunked = pair()
    x, _ = inputs()

    class Identity(torch.autograd.Function):
        @staticmethod
        def forward(ctx, tensor):
            return tensor * 1

        @staticmethod
        def backward(ctx, grad):
            return grad

    with pytest.raises(ConfigError, match=r"a custom autograd function got the logits"):
        Identity.apply(chunked(x)).sum().backward()
    for change in (lambda logits: logits.mul_(2), lambda logits: logits.register_hook(print)):
        with pytest.raises(RuntimeError, match=r"computes in chunks would change none of them"):
            change(chunked(x))


def test_mistakes():
    for call, message in (
        (lambda: chunked_cross_entropy(Model()), r"Model has no output embeddings, .* head='lm_head'"),
        (lambda: chunked_cross_entropy(Model(), head="heads"), r"head='heads' is not a module of the model"),
        (lambda: chunked_cross_entropy(Model(), head=nn.Linear(2, 2)), r"is not a module of the model"),
        (lambda: chunked_cross_entropy(Model(), head=""), r"the head is a Model without a weight"),
        (lambda: chunked_cross_entropy(Model(), 0, head="head"), r"chunk_size=0 is not a number of tokens"),
        (lambda: chunked_cross_entropy(pair()[1], head="head"), r"was called for this model before"),
        (lambda: chunked_cross_entropy(Booster(device="cpu").boost(Model())[0], head="head"), r"a boosted model"),
    ):
        with pytest.raises(ConfigError, match=message):
            call()
