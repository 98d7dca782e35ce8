"""Attention and recurrence: parameters that are read by another module than the one that holds them, and a gate."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from zoo.entry import Batch, ZooEntry
from zoo.samples import class_loss, vectors


class GatedPositionalAttention(nn.Module):
    """Attention by content and by distance, mixed by one gate per head (d'Ascoli et al., ConViT, 2021).

    The gate is a bare parameter of as many elements as there are heads, and the distances are a buffer.
    """

    distances: torch.Tensor

    def __init__(self, width: int, num_heads: int, side: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query_key = nn.Linear(width, 2 * width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.project = nn.Linear(width, width)
        self.position = nn.Linear(3, num_heads)
        self.gate = nn.Parameter(torch.ones(num_heads))
        self.register_buffer("distances", _distances(side), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (batch, patches, width) to the same shape."""
        query, key = (self._heads(part) for part in self.query_key(x).chunk(2, dim=-1))
        by_content = (query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5).softmax(dim=-1)
        by_position = self.position(self.distances).movedim(-1, 0).softmax(dim=-1)
        gate = self.gate.sigmoid().view(-1, 1, 1)
        mixed = (1 - gate) * by_content + gate * by_position
        mixed = mixed / mixed.sum(dim=-1, keepdim=True)
        return self.project((mixed @ self._heads(self.value(x))).transpose(1, 2).flatten(2))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


def _distances(side: int) -> torch.Tensor:
    """Returns (patches, patches, 3): difference in x, in y, and squared distance. Small integers: exact in fp16."""
    place = torch.arange(side)
    y, x = (axis.flatten() for axis in torch.meshgrid(place, place, indexing="ij"))
    dx, dy = x[None, :] - x[:, None], y[None, :] - y[:, None]
    return torch.stack([dx, dy, dx**2 + dy**2], dim=-1).float()


class ConViT(nn.Module):
    """One block of gated positional attention over image patches, and a class token that joins after it."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 12, 2, stride=2)
        self.norm = nn.LayerNorm(12)
        self.attention = GatedPositionalAttention(12, num_heads=3, side=4)
        self.class_token = nn.Parameter(torch.randn(1, 1, 12) * 0.02)
        self.mlp = nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 25), nn.GELU(), nn.Linear(25, 12))
        self.head = nn.Linear(12, 3)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Maps (batch, 1, 8, 8) to (batch, 3)."""
        x = self.patches(image).flatten(2).transpose(1, 2)
        x = x + self.attention(self.norm(x))
        token = self.class_token.to(x.dtype).expand(len(x), -1, -1) + x.mean(dim=1, keepdim=True)
        x = torch.cat([token, x], dim=1)
        return self.head((x + self.mlp(x))[:, 0])


class TorchTransformer(nn.Module):
    """Torch's own encoder layers and attention, which read `out_proj.weight` without calling `out_proj`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(7, 16)
        layer = nn.TransformerEncoderLayer(16, 4, 29, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.query = nn.Parameter(torch.randn(1, 1, 16) * 0.1)
        self.pool = nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (batch, length, 7) to (batch, 4)."""
        hidden = self.encoder(self.embed(x))
        query = self.query.to(hidden.dtype).expand(len(hidden), -1, -1)
        pooled, _ = self.pool(query, hidden, hidden, need_weights=False)
        return self.head(pooled[:, 0])


class Recurrent(nn.Module):
    """A two-way LSTM of two layers over token embeddings: its 16 parameters belong to one module without children."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(23, 6)
        self.lstm = nn.LSTM(6, 9, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(18, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Maps (batch, length) ids to (batch, 4)."""
        embedded = self.embedding(ids)
        # Many CPUs lack the fp16 LSTM that autocast would ask oneDNN for. In the weights' own format it always runs.
        with torch.autocast(embedded.device.type, enabled=False):
            hidden, _ = self.lstm(embedded)
        return self.head(hidden.mean(dim=1))


def _images(num_samples: int, generator: torch.Generator) -> Batch:
    x = torch.randn(num_samples, 1, 8, 8, generator=generator)
    return {"x": x, "y": torch.randint(3, (num_samples,), generator=generator)}


def _ids(num_samples: int, generator: torch.Generator) -> Batch:
    ids = torch.randint(23, (num_samples, 8), generator=generator)
    return {"ids": ids, "y": torch.randint(4, (num_samples,), generator=generator)}


def _ids_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch["ids"]), batch["y"])


ATTENTION_MODELS = (
    ZooEntry(name="convit", construct=ConViT, sample=_images, loss=class_loss),
    ZooEntry(
        name="torch_transformer", construct=TorchTransformer, sample=vectors(6, 7, num_classes=4), loss=class_loss
    ),
    ZooEntry(name="lstm", construct=Recurrent, sample=_ids, loss=_ids_loss),
)
