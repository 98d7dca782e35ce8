"""Embeddings and output heads sharded over the vocabulary or the features.

As with linear layers, the module's class is replaced by a subclass, and its parameters are already sharded. See
`shard_spec.vocabulary_rows` for the rows of each rank; padding rows are zero and stay zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from booster.errors import ConfigError

from .dynamic_class import mixin_forward
from .group import TensorParallelGroup
from .linear import is_plain_linear, matmul
from .mappings import gather_from_tp_region, reduce_from_tp_region, shared_copy_to_tp_region
from .shard_spec import vocabulary_sizes
from .vocab_parallel_logits import VocabParallelLogits


@dataclass(frozen=True, slots=True)
class EmbeddingShard:
    """Shard of a vocabulary, or of the features of its entries, on a rank.

    Attributes:
        tp_group: The tensor-parallel group.
        sizes: Number of entries, or of features, of each rank.
        gathers_output: If True, an embedding returns all features, and a head all logits as a plain tensor.
    """

    tp_group: TensorParallelGroup
    sizes: tuple[int, ...]
    gathers_output: bool = False

    @property
    def start(self) -> int:
        """First entry of this rank."""
        return sum(self.sizes[: self.tp_group.rank])

    @property
    def stop(self) -> int:
        """End of this rank's entries, exclusive."""
        return sum(self.sizes[: self.tp_group.rank + 1])


def make_vocab_parallel_embedding(
    module: nn.Module, tp_group: TensorParallelGroup, *, vocab_size: int, multiple: int
) -> None:
    """Make an embedding vocabulary-parallel: it looks up this rank's rows, and the results are all-reduced.

    Args:
        module: An `nn.Embedding`, or a subclass that scales its output, with this rank's shard as weight.
        tp_group: The tensor-parallel group.
        vocab_size: Number of rows of the logical weight.
        multiple: Multiple to which the vocabulary is padded.

    Raises:
        ConfigError: The module uses max_norm or scale_grad_by_freq.

    Collective: no; the module's forward is.
    """
    assert isinstance(module, nn.Embedding)
    if module.max_norm is not None or module.scale_grad_by_freq:
        raise ConfigError(
            "an embedding with max_norm or scale_grad_by_freq depends on the rows that are looked up, which differ"
            " between tensor-parallel ranks: leave it out of the plan, so that it stays unsharded"
        )
    split = EmbeddingShard(tp_group, vocabulary_sizes(vocab_size, multiple, tp_group.size))
    padding, module.num_embeddings = module.padding_idx, module.weight.shape[0]
    is_local = padding is not None and split.start <= padding < split.stop
    module.padding_idx = padding - split.start if padding is not None and is_local else None
    mixin_forward(module, VocabParallel, split)


def make_feature_parallel_embedding(
    module: nn.Module, tp_group: TensorParallelGroup, *, sizes: Sequence[int], gathers_output: bool
) -> None:
    """Make an embedding look up this rank's features of every row.

    Args:
        module: An `nn.Embedding` or a subclass, with this rank's shard as weight.
        tp_group: The tensor-parallel group.
        sizes: Number of features of each rank.
        gathers_output: If True, the module returns the features of all ranks.

    Raises:
        ConfigError: The module uses max_norm.

    Collective: no; with `gathers_output` the module's forward is.
    """
    assert isinstance(module, nn.Embedding)
    if module.max_norm is not None:
        raise ConfigError(
            "an embedding with max_norm needs full rows to compute their norms: leave it out of the plan, or shard its"
            ' vocabulary with the style "vocab"'
        )
    module.embedding_dim = sizes[tp_group.rank]
    mixin_forward(module, FeatureParallel, EmbeddingShard(tp_group, tuple(sizes), gathers_output))


def make_vocab_parallel_head(
    module: nn.Module, tp_group: TensorParallelGroup, *, vocab_size: int, multiple: int, gathers_output: bool
) -> None:
    """Make an output head compute the logits of this rank's entries.

    Args:
        module: A linear layer whose weight and bias are this rank's rows.
        tp_group: The tensor-parallel group.
        vocab_size: Number of rows of the logical weight.
        multiple: Multiple to which the vocabulary is padded.
        gathers_output: If True, the module returns all logits as a plain tensor, otherwise `VocabParallelLogits`.

    Collective: no; the module's backward is, and with `gathers_output` its forward.
    """
    sizes = vocabulary_sizes(vocab_size, multiple, tp_group.size)
    mixin_forward(module, VocabParallelHead, EmbeddingShard(tp_group, sizes, gathers_output))


class VocabParallel(nn.Module):
    """Mixin of an embedding sharded over its rows."""

    _split: EmbeddingShard

    def forward(self, entries: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the embeddings of entries of any shape, with the features in a new last dimension."""
        split, vocab_size = self._split, sum(self._split.sizes)
        if entries.device.type == "cpu" and not torch.compiler.is_compiling() and not isinstance(entries, FakeTensor):
            outside = entries[(entries < 0) | (entries >= vocab_size)]
            if outside.numel() > 0:  # as one process: a tokenizer of another vocabulary would go unnoticed
                raise IndexError(f"index {int(outside[0])} is out of range of {vocab_size} embeddings")
        is_remote = (entries < split.start) | (entries >= split.stop)
        local = (entries - split.start).masked_fill(is_remote, 0)
        found: torch.Tensor = super().forward(local, *args, **kwargs)
        found = found.masked_fill(is_remote.unsqueeze(-1), 0)
        return reduce_from_tp_region(found, split.tp_group, overwrites=True)

    traced_forward = forward


class FeatureParallel(nn.Module):
    """Mixin of an embedding sharded over its features."""

    _split: EmbeddingShard

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return this rank's features of the entries, or those of all ranks."""
        found: torch.Tensor = super().forward(*args, **kwargs)
        split = self._split
        return gather_from_tp_region(found, split.tp_group, split.sizes) if split.gathers_output else found

    traced_forward = forward


class VocabParallelHead(nn.Module):
    """Mixin of a linear layer sharded over the vocabulary."""

    _split: EmbeddingShard

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits without those of padding rows."""
        split = self._split
        x = shared_copy_to_tp_region(x, split.tp_group)
        num_rows = split.sizes[split.tp_group.rank]
        if is_plain_linear(self):
            bias: torch.Tensor | None = self.bias  # type: ignore[assignment]
            local = matmul(self, x, None if bias is None else bias[:num_rows], num_outputs=num_rows)
        else:
            local = super().forward(x)[..., :num_rows]
        if split.gathers_output:
            return gather_from_tp_region(local, split.tp_group, split.sizes)
        return VocabParallelLogits.of(local, split.tp_group, split.sizes) if split.tp_group.size > 1 else local
