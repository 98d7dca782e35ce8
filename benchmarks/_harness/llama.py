"""The Llama-like model of benchmarks/tensor_parallel/run.py, whole or with a rank's share of its features."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["LLAMA_SIZES", "Llama", "LlamaSize", "make_llama"]

_ROTARY_BASE = 10000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaSize:
    """Shape of a model and of one step's batch.

    Attributes:
        width: Features per token between the layers.
        heads: Attention heads per layer.
        head_width: Features per head.
        inner: Features inside of a layer's gated network.
        layers: How many.
        vocabulary: Tokens that there are.
        sequence: Tokens per sample.
        samples: Per step.
    """

    width: int
    heads: int
    head_width: int
    inner: int
    layers: int
    vocabulary: int
    sequence: int
    samples: int

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.sequence * self.samples

    def share(self, num_ranks: int) -> LlamaSize:
        """Returns the shape of what one of the ranks computes: the width between the layers stays.

        Raises:
            ValueError: The ranks would get different shares.
        """
        for name in ("heads", "inner", "vocabulary"):
            if getattr(self, name) % num_ranks:
                raise ValueError(f"{name}={getattr(self, name)} can't be shared equally by {num_ranks} ranks")
        return replace(
            self,
            heads=self.heads // num_ranks,
            inner=self.inner // num_ranks,
            vocabulary=self.vocabulary // num_ranks,
        )


LLAMA_SIZES = {
    "tiny": LlamaSize(width=32, heads=4, head_width=8, inner=88, layers=2, vocabulary=256, sequence=32, samples=2),
    "10m": LlamaSize(width=256, heads=4, head_width=64, inner=688, layers=8, vocabulary=8192, sequence=128, samples=4),
    "50m": LlamaSize(
        width=640, heads=10, head_width=64, inner=1728, layers=8, vocabulary=8192, sequence=128, samples=4
    ),
}


class Attention(nn.Module):
    """Causal attention with rotary positions; the number of heads follows from the weights it has."""

    def __init__(self, size: LlamaSize) -> None:
        super().__init__()
        self.head_width = size.head_width
        features = size.heads * size.head_width
        self.q = nn.Linear(size.width, features, bias=False)
        self.k = nn.Linear(size.width, features, bias=False)
        self.v = nn.Linear(size.width, features, bias=False)
        self.o = nn.Linear(features, size.width, bias=False)

    def forward(self, x_BTD: torch.Tensor, turn_TW: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """B: samples, T: tokens, D: width, W: features per head."""
        heads_of_token = (*x_BTD.shape[:2], -1, self.head_width)
        q, k, v = (linear(x_BTD).view(heads_of_token).transpose(1, 2) for linear in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(_turned(q, turn_TW), _turned(k, turn_TW), v, is_causal=True)
        return self.o(attended.transpose(1, 2).flatten(2))


class GatedNetwork(nn.Module):
    """Two linear layers beside each other, multiplied, and one back."""

    def __init__(self, size: LlamaSize) -> None:
        super().__init__()
        self.gate = nn.Linear(size.width, size.inner, bias=False)
        self.up = nn.Linear(size.width, size.inner, bias=False)
        self.down = nn.Linear(size.inner, size.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Keeps the shape."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    """Attention and a gated network, each on the normalised input and added to it."""

    def __init__(self, size: LlamaSize) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(size.width)
        self.attention = Attention(size)
        self.network_norm = nn.RMSNorm(size.width)
        self.network = GatedNetwork(size)

    def forward(self, x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Keeps the shape (samples, tokens, width)."""
        x = x + self.attention(self.attention_norm(x), turn)
        return x + self.network(self.network_norm(x))


class Llama(nn.Module):
    """A decoder with an output matrix of its own."""

    def __init__(self, size: LlamaSize) -> None:
        super().__init__()
        self.token = nn.Embedding(size.vocabulary, size.width)
        self.layers = nn.ModuleList(Layer(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        self.turn = _rotary_turn(size)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the logits of shape (samples, tokens, vocabulary)."""
        x = self.token(tokens)
        for layer in self.layers:
            x = layer(x, self.turn)
        return self.head(self.norm(x))


def make_llama(size: LlamaSize, seed: int = 0) -> Llama:
    """Returns a model whose weights depend on the seed alone."""
    torch.manual_seed(seed)
    model = Llama(size)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, 0.0, 0.02)
    return model


def _rotary_turn(size: LlamaSize) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns cosine and sine of every position's turn, each of shape (tokens, features per head)."""
    frequencies = _ROTARY_BASE ** -(torch.arange(0, size.head_width, 2) / size.head_width)
    angles = torch.outer(torch.arange(size.sequence), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def _turned(x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    cosine, sine = turn
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine
