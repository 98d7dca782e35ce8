"""Models as people write them by hand, who give no plan of how their layers are to be cut."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from zoo.entry import Batch, ZooEntry
from zoo.samples import class_loss, vectors

_VOCABULARY = 83
_LENGTH = 12


class Attention(nn.Module):
    """Causal attention with three projections.

    Args:
        width: Features of a token.
        num_heads: Heads that they are divided into.
        counts_heads: The forward says how many heads there are; False: it leaves that to their width.
    """

    def __init__(self, width: int, num_heads: int, *, counts_heads: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_width = width // num_heads
        self.counts_heads = counts_heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (batch, length, width) to the same shape."""
        query, key, value = self._heads(self.query(x)), self._heads(self.key(x)), self._heads(self.value(x))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(2))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        num_heads = self.num_heads if self.counts_heads else -1
        return x.view(batch, length, num_heads, self.head_width).transpose(1, 2)


class Layer(nn.Module):
    """Attention and a gated MLP, each behind its norm."""

    def __init__(self, width: int, num_heads: int, inner: int, *, counts_heads: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, num_heads, counts_heads=counts_heads)
        self.norm2 = nn.LayerNorm(width)
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (batch, length, width) to the same shape."""
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Transformer(nn.Module):
    """A language model with learned positions, whose embedding is its head."""

    def __init__(self, num_layers: int, *, counts_heads: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(_VOCABULARY, 32)
        self.places = nn.Embedding(_LENGTH, 32)
        self.layers = nn.ModuleList(Layer(32, 4, 54, counts_heads=counts_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, _VOCABULARY, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Maps (batch, length) ids to (batch, length, vocabulary) scores."""
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class MixerLayer(nn.Module):
    """Two linear layers over the places of a feature, and two over the features of a place."""

    def __init__(self, num_places: int, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.places_up = nn.Linear(num_places, 14)
        self.places_down = nn.Linear(14, num_places)
        self.norm2 = nn.LayerNorm(width)
        self.features = nn.Sequential(nn.Linear(width, 29), nn.GELU(), nn.Linear(29, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (batch, places, width) to the same shape."""
        x = x + self.places_down(F.gelu(self.places_up(self.norm1(x).transpose(1, 2)))).transpose(1, 2)
        return x + self.features(self.norm2(x))


class Mixer(nn.Module):
    """Linear layers, element-wise operators, norms, residuals (Tolstikhin et al., MLP-Mixer, 2021)."""

    def __init__(self, num_layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Linear(7, 18)
        self.layers = nn.ModuleList(MixerLayer(6, 18) for _ in range(num_layers))
        self.norm = nn.LayerNorm(18)
        self.head = nn.Linear(18, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (batch, places, 7) to (batch, 5)."""
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(dim=1))


def _transformer(num_layers: int = 2) -> nn.Module:
    return Transformer(num_layers, counts_heads=False)


def _transformer_with_head_counts(num_layers: int = 2) -> nn.Module:
    return Transformer(num_layers, counts_heads=True)


def _tokens(num_samples: int, generator: torch.Generator) -> Batch:
    return {"ids": torch.randint(_VOCABULARY, (num_samples, _LENGTH + 1), generator=generator)}


def _next_token_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    scores = model(batch["ids"][:, :-1])
    return F.cross_entropy(scores.flatten(0, 1), batch["ids"][:, 1:].flatten())


_TIES = (("tokens.weight", "head.weight"),)

USER_WRITTEN_MODELS = (
    ZooEntry(
        name="user_transformer",
        construct=_transformer,
        construct_deep=_transformer,
        sample=_tokens,
        loss=_next_token_loss,
        tied=_TIES,
        is_layer_variant=True,
    ),
    ZooEntry(
        name="user_transformer_with_head_counts",
        construct=_transformer_with_head_counts,
        construct_deep=_transformer_with_head_counts,
        sample=_tokens,
        loss=_next_token_loss,
        tied=_TIES,
        is_layer_variant=True,
    ),
    ZooEntry(
        name="user_mixer",
        construct=Mixer,
        construct_deep=Mixer,
        sample=vectors(6, 7, num_classes=5),
        loss=class_loss,
        is_layer_variant=True,
    ),
)
