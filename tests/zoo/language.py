"""Language models of our own: a small GPT over bytes, and one whose embedding is its head."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from zoo.entry import Batch, ZooEntry


class Block(nn.Module):
    """Causal attention and an MLP, each behind its norm."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (batch, length, width) to the same shape."""
        query, key, value = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for part in self.qkv(self.attention_norm(x)).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class ByteGPT(nn.Module):
    """A GPT with learned positions. Its head is a matrix of its own, or the embedding where `is_tied`."""

    def __init__(self, *, vocabulary: int, width: int, num_heads: int, depth: int, length: int, is_tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        if is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Maps (batch, length) ids to (batch, length, vocabulary) scores."""
        x = self.embedding(ids) + self.positions[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _byte_gpt(depth: int = 2) -> nn.Module:
    return ByteGPT(vocabulary=256, width=48, num_heads=4, depth=depth, length=16, is_tied=False)


def _tied_lm(depth: int = 1) -> nn.Module:
    return ByteGPT(vocabulary=67, width=36, num_heads=3, depth=depth, length=12, is_tied=True)


def _next_token_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    ids = batch["ids"]
    scores = model(ids[:, :-1])
    return F.cross_entropy(scores.flatten(0, 1), ids[:, 1:].flatten())


def _tokens(vocabulary: int, length: int) -> Any:
    def sample(num_samples: int, generator: torch.Generator) -> Batch:
        return {"ids": torch.randint(vocabulary, (num_samples, length), generator=generator)}

    return sample


LANGUAGE_MODELS = (
    ZooEntry(
        name="byte_gpt",
        construct=_byte_gpt,
        construct_deep=_byte_gpt,
        sample=_tokens(256, 17),
        loss=_next_token_loss,
    ),
    ZooEntry(
        name="tied_lm",
        construct=_tied_lm,
        construct_deep=_tied_lm,
        sample=_tokens(67, 13),
        loss=_next_token_loss,
        tied=(("embedding.weight", "head.weight"),),
    ),
)
