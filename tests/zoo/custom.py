"""Models of our own, each with one property that parallel training must get right."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from zoo.entry import Batch, ZooEntry
from zoo.samples import class_loss, vectors


class OddMLP(nn.Module):
    """Sizes that no world divides, and two parameters smaller than most worlds."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 13)
        self.wide = nn.Linear(1, 17, bias=False)
        self.last = nn.Linear(13 + 17, 5)
        self.gain = nn.Parameter(torch.full((1,), 1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (batch, 7) to (batch, 5)."""
        features = torch.cat([torch.tanh(self.first(x)), torch.tanh(self.wide(x[:, :1]))], dim=1)
        return self.gain * self.last(features)


class ConvNet(nn.Module):
    """Convolutions with BatchNorm: buffers, and outputs that depend on the rest of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 5, 3, padding=1, bias=False),
            nn.BatchNorm2d(5),
            nn.ReLU(),
            nn.Conv2d(5, 9, 3, stride=2),
            nn.BatchNorm2d(9),
            nn.ReLU(),
        )
        self.head = nn.Linear(9, 3)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Maps (batch, 1, 8, 8) to (batch, 3)."""
        return self.head(self.body(image).mean(dim=(2, 3)))


class FrozenUnusedConditional(nn.Module):
    """A frozen layer, one that is never used, and one used only for samples whose first value is positive.

    The branch is not called for a batch without such samples: then its parameters have no gradient at all on that rank.
    """

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(6, 8).requires_grad_(False)
        self.trunk = nn.Linear(8, 8)
        self.branch = nn.Linear(8, 8)
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (batch, 6) to (batch, 4)."""
        hidden = torch.tanh(self.trunk(self.frozen(x)))
        chosen = x[:, 0] > 0
        if bool(chosen.any()):
            hidden = hidden.index_put((chosen,), torch.tanh(self.branch(hidden[chosen])))
        return self.head(hidden)


class MultiOutput(nn.Module):
    """Returns a dict of tensors, a value that is none, and a nested tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.norm = nn.LayerNorm(6)
        self.classes = nn.Linear(6, 3)
        self.value = nn.Linear(6, 1)

    def forward(self, ids: torch.Tensor) -> dict[str, Any]:
        """Maps (batch, 4) ids to class scores, a value, and features per sample."""
        hidden = self.norm(self.embedding(ids).mean(dim=1))
        return {
            "scores": self.classes(hidden),
            "label": "not a tensor",
            "nested": (self.value(hidden).squeeze(1), (hidden, hidden.square())),
        }


def _multi_output_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    outputs = model(batch["ids"])
    value, (_, squares) = outputs["nested"]
    return F.cross_entropy(outputs["scores"], batch["y"]) + F.mse_loss(value, batch["value"]) + 0.1 * squares.mean()


def _multi_output_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Weights decay, biases and norms do not, and the embedding has a learning rate of its own."""
    named = dict(model.named_parameters())
    embedding = [named.pop("embedding.weight")]
    flat = [parameter for parameter in named.values() if parameter.dim() < 2]
    matrices = [parameter for parameter in named.values() if parameter.dim() >= 2]
    return [
        {"params": matrices, "lr": 1e-2, "weight_decay": 0.1},
        {"params": flat, "lr": 1e-2, "weight_decay": 0.0},
        {"params": embedding, "lr": 3e-3, "weight_decay": 0.01},
    ]


def _sorted_vectors(num_samples: int, generator: torch.Generator) -> Batch:
    """Puts the samples that use the conditional branch first: the last ranks have none of them."""
    batch = vectors(6, num_classes=4)(num_samples, generator)
    num_positive = max(1, num_samples // 3)
    direction = torch.where(torch.arange(num_samples) < num_positive, 1.0, -1.0)
    batch["x"][:, 0] = batch["x"][:, 0].abs().clamp_min(1e-3) * direction
    return batch


def _images(num_samples: int, generator: torch.Generator) -> Batch:
    x = torch.randn(num_samples, 1, 8, 8, generator=generator)
    return {"x": x, "y": torch.randint(3, (num_samples,), generator=generator)}


def _short_ids(num_samples: int, generator: torch.Generator) -> Batch:
    return {
        "ids": torch.randint(11, (num_samples, 4), generator=generator),
        "y": torch.randint(3, (num_samples,), generator=generator),
        "value": torch.randn(num_samples, generator=generator),
    }


CUSTOM_MODELS = (
    ZooEntry(name="mlp_odd", construct=OddMLP, sample=vectors(7, num_classes=5), loss=class_loss),
    ZooEntry(name="convnet_batchnorm", construct=ConvNet, sample=_images, loss=class_loss, mixes_samples=True),
    ZooEntry(
        name="frozen_unused_conditional",
        construct=FrozenUnusedConditional,
        sample=_sorted_vectors,
        loss=class_loss,
        uses_unused_parameters=True,
        never_used=("frozen.weight", "frozen.bias", "unused.weight", "unused.bias"),
    ),
    ZooEntry(
        name="multi_output_groups",
        construct=MultiOutput,
        sample=_short_ids,
        loss=_multi_output_loss,
        param_groups=_multi_output_groups,
    ),
)
