"""A small decoder with a plan for tensor parallelism, and a layout of every plugin that it trains under."""

from __future__ import annotations

import importlib

import torch
import torch.nn.functional as F
from hybrid_cases import on_own_axis, on_tensor_axis
from torch import nn

from booster.plugins import BUILT_IN

VOCABULARY, WIDTH, LENGTH = 64, 32, 12


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head_dim = 8
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = [
            one(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for one in (self.query, self.key, self.value)
        ]
        return self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x))
        inner = F.dropout(F.gelu(self.up(self.norms[1](x))), self.dropout, self.training)
        return x + F.dropout(self.down(inner), self.dropout, self.training)


class Decoder(nn.Module):
    """Has a buffer, which ranks are given before each forward."""

    def __init__(self, num_blocks: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(x)


PLAN = {
    **{f"blocks.*.attention.{name}": "colwise" for name in ("query", "key", "value")},
    **{"blocks.*.attention.out": "rowwise", "blocks.*.up": "colwise", "blocks.*.down": "rowwise"},
    **{"embedding": "vocab", "head": "vocab_head"},
}


def hybrid(world_size, arguments):
    plan = {"plan": PLAN} if arguments.get("tp_size", 1) > 1 else {}
    return "hybrid_parallel", world_size, {"precision": "fp32", **arguments, **plan}


# By name: plugin, ranks, arguments.
LAYOUTS = {
    "none": (None, 1, {}),
    "ddp": ("torch_ddp", 2, {}),
    "zero 1": ("low_level_zero", 2, {"stage": 1, "precision": "fp32"}),
    "zero 2": ("low_level_zero", 2, {"stage": 2, "precision": "fp32"}),
    "zero 1 overlapping": ("low_level_zero", 2, {"stage": 1, "precision": "fp32", "overlap_allgather": True}),
    "gemini": ("gemini", 2, {"precision": "fp32"}),
    "fsdp": ("torch_fsdp", 2, {}),
    **{f"dp zero {stage}": hybrid(2, {"zero_stage": stage}) for stage in (0, 1, 2)},
    "dp overlapping": hybrid(2, {"zero_stage": 1, "overlap_allgather": True}),
    "tp": hybrid(2, {"tp_size": 2}),
    **{f"tp zero {stage}": hybrid(4, {"tp_size": 2, "zero_stage": stage}) for stage in (1, 2)},
    "tp checkpointed": hybrid(2, {"tp_size": 2, "gradient_checkpoint_config": True}),
    **{mode: hybrid(*on_tensor_axis(mode, 2)) for mode in ("split_gather", "ring")},
    **{mode: hybrid(*on_own_axis(mode, 2)) for mode in ("all_to_all", "ring_attn")},
    "sp checkpointed": hybrid(2, {**on_own_axis("all_to_all", 2)[1], "gradient_checkpoint_config": True}),
    "tp and sp": hybrid(*on_own_axis("all_to_all", 2, tp_size=2)),
}


def compute_loss(model, ids):
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def make_plugin(name, arguments):
    module, kind = BUILT_IN[name]
    return getattr(importlib.import_module(module), kind)(**arguments)
