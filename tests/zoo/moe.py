"""Mixture-of-experts models of our own layers."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from booster.moe import Experts, FFNExperts, MoeLayer, MoeLoss, Top2Router
from zoo.entry import Batch, ZooEntry
from zoo.samples import vectors

_WIDTH, _NUM_HEADS, _NUM_EXPERTS, _NUM_CLASSES = 16, 2, 4, 3
_CRITERION = MoeLoss(aux_weight=0.1, loss_fn=nn.CrossEntropyLoss, label_smoothing=0.1)


class FeedForward(nn.Module):
    """An expert."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (tokens, d_model) to the same shape."""
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """Attention, and an MoE layer of its own gate over shared experts, each behind its norm."""

    def __init__(self, experts: nn.Module, router: nn.Module) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(_WIDTH)
        self.qkv = nn.Linear(_WIDTH, 3 * _WIDTH)
        self.project = nn.Linear(_WIDTH, _WIDTH)
        self.ffn_norm = nn.LayerNorm(_WIDTH)
        self.ffn = MoeLayer(dim_model=_WIDTH, num_experts=_NUM_EXPERTS, router=router, experts=experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (batch, patches, width) to the same shape."""
        query, key, value = (
            part.unflatten(-1, (_NUM_HEADS, -1)).transpose(1, 2)
            for part in self.qkv(self.attention_norm(x)).chunk(3, -1)
        )
        x = x + self.project(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))
        return x + self.ffn(self.ffn_norm(x))


class Widenet(nn.Module):
    """Encoder whose blocks share router and experts, with norms of their own (Xue et al., arXiv:2107.11817).

    The capacity is so small that tokens are dropped, if they may be.

    Args:
        is_stacked: The experts' parameters are stacked.
        use_reentrant: Blocks are checkpointed in that way; None: they are not.
        drops: Tokens are dropped.
    """

    def __init__(
        self, *, is_stacked: bool = False, use_reentrant: bool | None = None, drops: bool = True, depth: int = 2
    ) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        make = FFNExperts if is_stacked else partial(Experts, FeedForward)
        experts = make(num_experts=_NUM_EXPERTS, d_model=_WIDTH, d_ff=24)
        router = Top2Router(capacity_factor_train=0.8, min_capacity=1, drop_tks=drops)
        self.patches = nn.Linear(12, _WIDTH)
        self.positions = nn.Parameter(torch.randn(5, _WIDTH) * 0.1)
        self.blocks = nn.ModuleList(Block(experts, router) for _ in range(depth))
        self.norm = nn.LayerNorm(_WIDTH)
        self.head = nn.Linear(_WIDTH, _NUM_CLASSES)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """Maps (batch, 5, 12) to (batch, classes)."""
        x = self.patches(patches) + self.positions
        is_checkpointed = self.use_reentrant is not None and torch.is_grad_enabled()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant) if is_checkpointed else block(x)
        return self.head(self.norm(x).mean(dim=1))


def moe_class_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Returns the mean cross entropy with the auxiliary losses of the layers."""
    return _CRITERION(model(batch["x"]), batch["y"])


def _entry(name: str, **arguments: bool) -> ZooEntry:
    names = [name for name, _ in FFNExperts(1, 1, 1).named_parameters()] if "is_stacked" in arguments else [
        f"experts.{expert}.{layer}.{kind}"
        for expert in range(_NUM_EXPERTS) for layer in ("up", "down") for kind in ("weight", "bias")
    ]  # fmt: skip
    return ZooEntry(
        name=name,
        construct=partial(Widenet, **arguments),
        sample=vectors(5, 12, num_classes=_NUM_CLASSES),
        loss=moe_class_loss,
        # Without drops it does not matter which tokens are together where auxiliary losses are those of all ranks.
        mixes_samples=arguments.get("drops", True),
        routes_by_rank=arguments.get("drops", True),
        is_layer_variant=not arguments.get("drops", True),
        tied=tuple(tuple(f"blocks.{block}.ffn.experts.{one}" for block in range(2)) for one in names),
    )


MOE_MODELS = (
    _entry("widenet"),
    _entry("widenet_stacked", is_stacked=True),
    _entry("widenet_checkpointed", use_reentrant=False),
    _entry("widenet_reentrant", use_reentrant=True),
    _entry("widenet_dropless", drops=False),
    _entry("widenet_dropless_stacked", is_stacked=True, drops=False),
    _entry("widenet_dropless_checkpointed", use_reentrant=False, drops=False),
)
