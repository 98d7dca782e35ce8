"""Models that are divided into chunks that follow each other: what stands between layers differs in each."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from zoo.entry import Batch, ZooEntry
from zoo.samples import class_loss, vectors

_WIDTH = 10


class Residual(nn.Module):
    """A norm and two linear layers around a residual; hands on what it was given beside the hidden states."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.up = nn.Linear(_WIDTH, inner)
        self.down = nn.Linear(inner, _WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        """Maps (batch, places, width) and a mask to the same shape, and to what is known about it."""
        y = self.down(torch.tanh(self.up(self.norm(x))))
        return x + y.masked_fill(~mask, 0.0), {"size": y.detach().abs().mean(), "kind": "residual"}


class GluedChain(nn.Module):
    """A list of layers with code between them: a mask of the input, a gain of the model's own, every second one halved.

    The gains are one parameter, of which every layer reads an element.
    """

    def __init__(self, num_layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(7, _WIDTH)
        self.gains = nn.Parameter(torch.linspace(0.8, 1.2, num_layers))
        self.layers = nn.ModuleList(Residual(11 + index) for index in range(num_layers))
        self.norm = nn.LayerNorm(_WIDTH)
        self.head = nn.Linear(_WIDTH, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (batch, places, 7) to (batch, 5)."""
        mask = x[..., :1] > -1.0
        hidden = self.embed(x)
        for index, layer in enumerate(self.layers):
            before = hidden * self.gains[index]
            hidden, known = layer(before, mask)
            if index % 2:
                hidden = 0.5 * hidden + 0.01 * known["size"]
        return self.head(self.norm(hidden).mean(dim=1))


class LongSkip(nn.Module):
    """A list of layers, behind each of which the first hidden states are added once more."""

    def __init__(self, num_layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(7, _WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(_WIDTH, 13), nn.Tanh(), nn.Linear(13, _WIDTH)) for _ in range(num_layers)
        )
        self.head = nn.Linear(_WIDTH, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (batch, 7) to (batch, 5)."""
        first = torch.tanh(self.embed(x))
        hidden = first
        for layer in self.layers:
            hidden = layer(hidden) + 0.5 * first
        return self.head(hidden)


class Adding(nn.Module):
    """A norm, a linear layer and its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.linear = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (batch, width) to the same shape."""
        return x + torch.tanh(self.linear(self.norm(x)))


class PartlyFrozenChain(nn.Module):
    """The first half of the layers doesn't train, and one module is never called."""

    def __init__(self, num_layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(6, _WIDTH).requires_grad_(False)
        self.layers = nn.ModuleList(Adding() for _ in range(num_layers))
        for layer in self.layers[: num_layers // 2]:
            layer.requires_grad_(False)
        self.spare = nn.Linear(3, 3)
        self.head = nn.Linear(_WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (batch, 6) to (batch, 4)."""
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


class Stem(nn.Module):
    """Three modules by name, which no list holds together."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 12)
        self.left = nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 9))
        self.right = nn.Linear(9, 14)
        self.tail = nn.LayerNorm(14)
        self.head = nn.Linear(14, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (batch, 6) to (batch, 4)."""
        hidden = torch.tanh(self.stem(x))
        hidden = F.gelu(self.left(hidden))
        return self.head(self.tail(torch.tanh(self.right(hidden))))


def _unlike_sequence() -> nn.Module:
    """Convolution, norm, activation, pooling, a change of shape, and linear layers, one behind the other."""
    return nn.Sequential(
        nn.Conv1d(3, 6, 3, padding=1),
        nn.GroupNorm(2, 6),
        nn.GELU(),
        nn.Conv1d(6, 8, 3),
        nn.Tanh(),
        nn.AdaptiveAvgPool1d(4),
        nn.Flatten(),
        nn.Linear(32, 11),
        nn.LayerNorm(11),
        nn.Tanh(),
        nn.Linear(11, 5),
    )


def _numbers(num_samples: int, generator: torch.Generator) -> Batch:
    return {"x": torch.randn(num_samples, 3, 9, generator=generator)}


def _sizes_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Regression on sums that are computed from the input: there are no labels."""
    x = batch["x"]
    target = torch.cat([x.square().mean(dim=2), x[:, 0, :2]], dim=1)
    return F.mse_loss(model(x), target)


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """Weights decay, the rest does not, and the head has a learning rate of its own."""
    named = {name: one for name, one in model.named_parameters() if one.requires_grad}
    head = [named.pop(name) for name in list(named) if name.startswith("head.")]
    return [
        {"params": [one for one in named.values() if one.dim() >= 2], "lr": 1e-2, "weight_decay": 0.1},
        {"params": [one for one in named.values() if one.dim() < 2], "lr": 1e-2, "weight_decay": 0.0},
        {"params": head, "lr": 3e-3, "weight_decay": 0.01},
    ]


def _frozen_names(num_layers: int = 4) -> tuple[str, ...]:
    layers = [f"layers.{index}.{name}" for index in range(num_layers // 2) for name in ("norm", "linear")]
    return tuple(f"{name}.{kind}" for name in ("embed", *layers, "spare") for kind in ("weight", "bias"))


def _chain(name: str, construct: Any, width: int | tuple[int, ...], num_classes: int, **settings: Any) -> ZooEntry:
    shape = (width,) if isinstance(width, int) else width
    return ZooEntry(
        name=name,
        construct=construct,
        sample=vectors(*shape, num_classes=num_classes),
        loss=class_loss,
        is_layer_variant=True,
        **settings,
    )


CHAINS = (
    _chain("glued_chain", GluedChain, (6, 7), 5, construct_deep=GluedChain, param_groups=_groups),
    _chain("long_skip", LongSkip, 7, 5, construct_deep=LongSkip),
    _chain(
        "partly_frozen_chain",
        PartlyFrozenChain,
        6,
        4,
        construct_deep=PartlyFrozenChain,
        param_groups=_groups,
        uses_unused_parameters=True,
        never_used=_frozen_names(),
    ),
    ZooEntry(
        name="unlike_sequence",
        construct=_unlike_sequence,
        sample=_numbers,
        loss=_sizes_loss,
        is_layer_variant=True,
    ),
    _chain("named_chain", Stem, 6, 4),
)
