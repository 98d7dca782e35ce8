"""The GPT that all benchmarks train, in named sizes, with its data, its loss and its number of operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from _harness.engine import Step
from torch import nn

if TYPE_CHECKING:
    from booster import Booster

__all__ = [
    "GPT",
    "MAX_NORM",
    "SIZES",
    "GPTSize",
    "batches",
    "boosted_step",
    "make_gpt",
    "next_token_loss",
    "plain_step",
    "step_flops",
]

MAX_NORM = 1.0  # that gradients are clipped to

_NUM_BATCHES = 8  # they come again after that: a step must not wait for data


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTSize:
    """Shape of a model and of one rank's batch.

    Attributes:
        width: Features per token.
        layers: Blocks.
        heads: Attention heads per block.
        vocabulary: Tokens that there are.
        sequence: Tokens per sample.
        samples: Per rank and step.
    """

    width: int
    layers: int
    heads: int
    vocabulary: int
    sequence: int
    samples: int

    @property
    def num_matmul_parameters(self) -> int:
        """Weights that are multiplied with: all matrices but the two embedding tables, which are looked up."""
        return 12 * self.layers * self.width**2 + self.width * self.vocabulary

    @property
    def tokens(self) -> int:
        """Tokens per rank and step."""
        return self.sequence * self.samples


SIZES = {
    "tiny": GPTSize(width=32, layers=2, heads=2, vocabulary=256, sequence=32, samples=2),
    "1m": GPTSize(width=128, layers=4, heads=4, vocabulary=1024, sequence=128, samples=2),
    "10m": GPTSize(width=256, layers=8, heads=4, vocabulary=8192, sequence=128, samples=4),
    "50m": GPTSize(width=640, layers=8, heads=10, vocabulary=8192, sequence=128, samples=4),
    "125m": GPTSize(width=768, layers=12, heads=12, vocabulary=32768, sequence=1024, samples=4),
    "350m": GPTSize(width=1024, layers=24, heads=16, vocabulary=32768, sequence=1024, samples=8),
    "1.3b": GPTSize(width=2048, layers=24, heads=16, vocabulary=32768, sequence=1024, samples=8),
}


class Block(nn.Module):
    """Attention and a two-layer network, each on the normalised input and added to it."""

    def __init__(self, size: GPTSize) -> None:
        super().__init__()
        self.heads = size.heads
        self.attention_norm = nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.attention_out = nn.Linear(size.width, size.width)
        self.mlp_norm = nn.LayerNorm(size.width)
        self.mlp_in = nn.Linear(size.width, 4 * size.width)
        self.mlp_out = nn.Linear(4 * size.width, size.width)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """B: samples, T: tokens, D: width."""
        B, T, D = x_BTD.shape
        qkv = self.qkv(self.attention_norm(x_BTD)).view(B, T, 3, self.heads, D // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.attention_out(attended.transpose(1, 2).reshape(B, T, D))
        return x_BTD + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x_BTD)), approximate="tanh"))


class GPT(nn.Module):
    """A decoder with learned positions and an output matrix of its own."""

    def __init__(self, size: GPTSize) -> None:
        super().__init__()
        self.token = nn.Embedding(size.vocabulary, size.width)
        self.position = nn.Embedding(size.sequence, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Returns the logits of shape (samples, tokens, vocabulary)."""
        x_BTD = self.token(tokens_BT)
        x_BTD = x_BTD + self.position(torch.arange(tokens_BT.size(1), device=tokens_BT.device))
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.norm(x_BTD))


def make_gpt(size: GPTSize, device: torch.device | str = "cpu", seed: int = 0) -> GPT:
    """Returns a model whose weights depend on the seed and the kind of device alone."""
    torch.manual_seed(seed)
    with torch.device(device):
        model = GPT(size)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, 0.0, 0.02)
    return model


def batches(
    size: GPTSize, rank: int = 0, world_size: int = 1, device: torch.device | str = "cpu"
) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    """Returns a function that gives this rank's (tokens, next tokens) of step i; every rank reads its own part."""
    generator = torch.Generator().manual_seed(1)
    shape = (_NUM_BATCHES, world_size, size.samples, size.sequence + 1)
    mine = torch.randint(0, size.vocabulary, shape, generator=generator)[:, rank].to(device)
    inputs, targets = mine[..., :-1].contiguous(), mine[..., 1:].contiguous()
    return lambda index: (inputs[index % _NUM_BATCHES], targets[index % _NUM_BATCHES])


def next_token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Returns the mean cross-entropy, computed in fp32."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def plain_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Callable[[int], Sequence[torch.Tensor]],
    *,
    autocasts: bool = False,
) -> Step:
    """Returns a step of the loop in plain torch; `autocasts` has it compute in bf16 on the CPU."""

    def step(index: int) -> torch.Tensor:
        tokens, targets = batch(index)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
            loss = next_token_loss(model(tokens), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def boosted_step(
    booster: Booster,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Callable[[int], Sequence[torch.Tensor]],
) -> Step:
    """Returns a step of the same loop through the booster, which boosts the model."""
    boosted, optimizer, criterion, _, _ = booster.boost(model, optimizer, next_token_loss)

    def step(index: int) -> torch.Tensor:
        tokens, targets = batch(index)
        loss: torch.Tensor = criterion(boosted(tokens), targets)
        booster.backward(loss, optimizer)
        booster.clip_grad_norm_(optimizer, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def step_flops(size: GPTSize) -> float:
    """Returns the operations of one forward and backward on one rank's batch: 6 N a token and the attention's.

    N counts the matrices that are multiplied with. Attention is 12 layers * width * sequence a token, as if it were
    not causal (Chowdhery et al., "PaLM", appendix B). What a method computes twice does not count.
    """
    attention = 12 * size.layers * size.width * size.sequence
    return float(size.tokens * (6 * size.num_matmul_parameters + attention))
