"""A model under GeminiPlugin, or another plugin, and its twin in one process; models that do all that models do."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from booster import Booster
from booster.device import current_device
from booster.interface import Plugin
from booster.plugins import GeminiPlugin

WIDTH = 16
CHUNK = {"chunk_size": 256}  # one Linear(WIDTH, WIDTH) is more than one of them
POLICIES = {
    "static": {},
    "prefetch": {"max_prefetch": 1},
    "cpu": {"placement_policy": "cpu", "max_prefetch": 1},
}

Backward = Callable[..., None]
# Takes model, x, backward, rank and step; may return outputs to compare.
Iterate = Callable[[nn.Module, torch.Tensor, Backward, int, int], Any]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    # The large eps keeps gradients that are rounding noise small.
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=0.01, eps=1e-3, weight_decay=0.1)


def square_loss(output: Any) -> torch.Tensor:
    return (output - 1).abs().square().mean()


def simply(model: nn.Module, x: torch.Tensor, backward: Backward, rank: int, step: int) -> None:
    """One iteration of a training loop as everybody writes it."""
    backward(square_loss(model(x)))


class Twins:
    """The boosted model and its twin, which one process trains with what all ranks do one after another.

    Args:
        build: Makes the same model at every call.
        iterate: Computes what a rank computes, and calls backward(loss) for it.
        optimizer: Makes an optimizer for a model.
        at_once: The twin sees the whole batch in one forward, as a model must that changes its buffers there.
        build_plain: Makes the twin where it is to be another one.
        calls_plain_backward: The boosted model's backward is loss.backward(), without the booster.
        **arguments: Of the plugin.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        iterate: Iterate = simply,
        *,
        optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
        at_once: bool = False,
        build_plain: Callable[[], nn.Module] | None = None,
        calls_plain_backward: bool = False,
        **arguments: Any,
    ) -> None:
        self.iterate, self.at_once, self.calls_plain_backward = iterate, at_once, calls_plain_backward
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.plain, self.raw = (build_plain or build)().to(current_device()), build()
        self.booster = Booster(plugin=self.make_plugin(**arguments))
        self.plain_optimizer = optimizer(self.plain)
        self.initial = {name: tensor.clone() for name, tensor in self.plain.state_dict().items()}
        self.model, self.optimizer, *_ = self.booster.boost(self.raw, optimizer(self.raw))

    def make_plugin(self, **arguments: Any) -> Plugin:
        """Returns the plugin of the boosted model; twins of another one say here which."""
        return GeminiPlugin(**{"precision": "fp32", "chunk_config_dict": CHUNK, **arguments})

    def batch(self, step: int, rank: int | None = None) -> torch.Tensor:
        """Returns a rank's part of a batch; None: this rank's."""
        rank = self.rank if rank is None else rank
        generator = torch.Generator().manual_seed(100 * step + rank)
        return torch.randn(4, WIDTH, generator=generator).to(current_device())

    def backward(self, step: int) -> None:
        """Runs forward and backward of both, and compares the losses."""
        expected = {}
        for rank in [0] if self.at_once else range(self.size):
            losses: list[torch.Tensor] = []
            parts = [self.batch(step, one) for one in range(self.size)]
            x = torch.cat(parts) if self.at_once else parts[rank]
            outputs = self.iterate(self.plain, x, self._noting(losses, self._backward_of_plain), rank, step)
            expected[rank] = [*losses, *(outputs or [])]
        found: list[torch.Tensor] = []
        backward = self._noting(found, self.backward_of_boosted)
        found += self.iterate(self.model, self.batch(step), backward, self.rank, step) or []
        if not self.at_once:
            torch.testing.assert_close(found, expected[self.rank], rtol=1e-4, atol=1e-5)

    def _backward_of_plain(self, loss: torch.Tensor, **kwargs: Any) -> None:
        (loss if self.at_once else loss / self.size).backward(**kwargs)

    def backward_of_boosted(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Runs the boosted model's backward alone."""
        if self.calls_plain_backward:
            loss.backward(**kwargs)
        else:
            self.optimizer.backward(loss, **kwargs)

    @staticmethod
    def _noting(losses: list[torch.Tensor], run: Backward) -> Backward:
        def backward(loss: torch.Tensor, **kwargs: Any) -> None:
            losses.append(loss.detach().clone())
            run(loss, **kwargs)

        return backward

    def step(self) -> None:
        """Steps both, and compares the norms."""
        gradients = [one.grad.to_dense() for one in self.plain.parameters() if one.grad is not None]
        expected = torch.stack([gradient.abs().double().norm() for gradient in gradients]).norm()
        found = torch.as_tensor(self.booster.clip_grad_norm_(self.optimizer, float("inf"))).to(expected)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
        for optimizer in (self.plain_optimizer, self.optimizer):
            optimizer.step()
            optimizer.zero_grad()

    def train(self, steps: Iterable[int] = range(4)) -> Twins:
        for step in steps:
            self.backward(step)
            self.step()
        return self

    def assert_equal(self) -> None:
        """Both moved, and to the same place: a few steps' sums in fp32, in another order."""
        expected = dict(self.plain.state_dict())
        torch.testing.assert_close(dict(self.model.state_dict()), expected, rtol=2e-5, atol=4e-6)
        assert any(not torch.equal(tensor, self.initial[name]) for name, tensor in expected.items())


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.second(torch.tanh(self.first(x))))


class Stack(nn.Module):
    """Blocks, each of which may be computed a second time in backward.

    Args:
        num_blocks: How many there are.
        way: "plain", or how blocks are checkpointed.
    """

    def __init__(self, num_blocks: int = 4, way: str = "plain") -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, 3)
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.way in ("whole, reentrant", "whole, non-reentrant"):
            x = x.clone().requires_grad_()  # the reentrant kind needs an input that asks for a gradient
            return self.head(checkpoint(self._all, x, use_reentrant=self.way == "whole, reentrant"))
        for number, block in enumerate(self.blocks):
            x = self._run(block, x, number)
        return self.head(x)

    def _all(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def _run(self, block: nn.Module, x: torch.Tensor, number: int) -> torch.Tensor:
        if self.way == "reentrant":
            return checkpoint(block, x if x.requires_grad else x.clone().requires_grad_(), use_reentrant=True)
        if self.way == "non-reentrant" or (self.way == "every second" and number % 2):
            return checkpoint(block, x, use_reentrant=False)
        if self.way == "selective":
            from torch.utils.checkpoint import create_selective_checkpoint_contexts

            keeps = [torch.ops.aten.tanh.default]
            return checkpoint(
                block, x, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(keeps)
            )
        if self.way == "nested":
            return checkpoint(lambda y: checkpoint(block, y, use_reentrant=False), x, use_reentrant=False)
        if self.way == "parts of a block":
            first = block.first
            y = checkpoint(lambda y: torch.tanh(F.linear(y, first.weight, first.bias)), x, use_reentrant=False)
            return x + torch.tanh(checkpoint(block.second, y, use_reentrant=False))
        if self.way == "save_on_cpu":
            with torch.autograd.graph.save_on_cpu():
                return block(x)
        if self.way == "users_hooks":
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
                return block(x)
        return block(x)


CHECKPOINTED = (
    "reentrant",
    "non-reentrant",
    "every second",
    "selective",
    "nested",
    "parts of a block",
    "whole, reentrant",
    "whole, non-reentrant",
    "save_on_cpu",
    "users_hooks",
)


class Adapted(nn.Module):
    """A frozen layer with a trained one of low rank beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


class AdaptedStack(nn.Module):
    def __init__(self, way: str, num_blocks: int = 8) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.blocks = nn.ModuleList(Adapted() for _ in range(num_blocks))
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        if self.way == "whole, non-reentrant":
            return checkpoint(self._all, x, use_reentrant=False)
        for block in self.blocks:
            if self.way == "plain":
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.way == "reentrant")
        return x

    def _all(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Tied(nn.Module):
    """An embedding whose weight another function uses, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.middle = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.middle(self.embedding(tokens_of(x)).mean(dim=1)), self.embedding.weight)


class Lookup(nn.Module):
    """An embedding whose gradient may be sparse."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.rows, self.head = nn.Embedding(11, WIDTH, sparse=sparse), nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rows(tokens_of(x)).mean(dim=1))


def tokens_of(x: torch.Tensor) -> torch.Tensor:
    return (x.abs() * 4).long().clamp(max=10)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sequence = x.view(2, -1, WIDTH)
        return self.attention(sequence, sequence, sequence)[0]


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True), 2, enable_nested_tensor=False
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x.view(2, -1, WIDTH))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cell, self.head = kind(WIDTH, 8, num_layers=2, bidirectional=True, batch_first=True), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cell(x.view(2, -1, WIDTH))[0])


class Lists(nn.Module):
    """Parameters in lists and dictionaries, and of the root itself."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH) / 4) for _ in range(3))
        self.named = nn.ParameterDict({name: nn.Parameter(torch.randn(WIDTH)) for name in "ab"})
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.between = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for row in self.rows:
            x = self.between(torch.tanh(x @ row))
        return x * self.scale + self.named["a"] * self.named["b"]


class Giver(nn.Module):
    """Returns its weight, or a view of it."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.way = way

    def forward(self) -> Any:
        return {"itself": self.weight, "view": self.weight.t(), "among": {"all": [self.weight]}}[self.way]


class Taker(nn.Module):
    """Uses what `Giver` returned after other modules have run, which need its memory."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.giver = Giver(way)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = self.giver()
        weight = given["all"][0] if isinstance(given, dict) else given
        for block in self.blocks:
            x = block(x)
        return x @ weight


@dataclass
class Result:
    logits: torch.Tensor
    hidden: torch.Tensor


class DataclassOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Block(), nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> Result:
        hidden = self.block(x)
        return Result(logits=self.head(hidden), hidden=hidden)


class ManyUses(nn.Module):
    """A module called several times, one never, one under no_grad alone, and a second use that is detached."""

    def __init__(self) -> None:
        super().__init__()
        self.often, self.never, self.still = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.detached = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = torch.tanh(self.often(x))
        with torch.no_grad():
            offset = self.still(x)
        return self.detached(x + offset) + F.linear(x, self.detached.weight.detach())


class _OwnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x


class OwnFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH) / 4) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = torch.tanh(_OwnLinear.apply(x, weight))
        return x


class Formats(nn.Module):
    """Parameters of several formats, of integers, and of no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).double()
        self.counts = nn.Parameter(torch.arange(WIDTH), requires_grad=False)
        self.nothing = nn.Parameter(torch.zeros(0, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(torch.tanh(self.first(x)).double()).float()
        return x + self.counts / 8 + (x @ self.nothing.t()).sum()


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64) / 4)
        self.more = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.more(x).to(torch.complex64) @ self.turn


class Hooked(nn.Module):
    """Hooks of the user's read weights, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))
        self.blocks[0].register_forward_pre_hook(lambda module, args: (args[0] + module.second.weight.mean(),))
        self.blocks[1].register_forward_hook(lambda module, args, output: output * (1 + module.first.bias))
        self.blocks[2].register_full_backward_hook(lambda module, inputs, _: (inputs[0] * (1 + module.first.bias),))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


def seeded(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Returns the builder with the same random numbers at every call."""

    def built() -> nn.Module:
        torch.manual_seed(7)
        return build()

    return built


def _frozen_but_one() -> nn.Module:
    model = Stack()
    model.requires_grad_(False)
    model.blocks[1].second.bias.requires_grad_()
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "stack": Stack,
    "tied": Tied,
    "attention": Attention,
    "encoder": Encoder,
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "new_weight_norm": lambda: nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh(), Block()
    ),
    "orthogonal": lambda: nn.Sequential(
        nn.utils.parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)), nn.Tanh(), Block()
    ),
    "lists": Lists,
    "gives_itself": lambda: Taker("itself"),
    "gives_view": lambda: Taker("view"),
    "gives_among": lambda: Taker("among"),
    "relu_inplace": lambda: nn.Sequential(Block(), nn.ReLU(inplace=True), Block(), nn.ReLU(inplace=True), Block()),
    "many_uses": ManyUses,
    "own_function": OwnFunction,
    "formats": Formats,
    "complex": Complex,
    "hooked": Hooked,
    "frozen_but_one": _frozen_but_one,
    "sparse": lambda: Lookup(sparse=True),
}
