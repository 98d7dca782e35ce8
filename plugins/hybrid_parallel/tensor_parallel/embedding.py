"""Embeddings and output heads sharded over the vocabulary or the features.

As with linear layers, the module's class is replaced by a subclass, and its parameters are already sharded. See
`splits.vocabulary_rows` for the rows of each rank; padding rows are zero and stay zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from booster.errors import ConfigError
from booster.plugins.hybrid_parallel.tensor_parallel.derived_classes import become
from booster.plugins.hybrid_parallel.tensor_parallel.linear import is_plain_linear, product, require_linear
from booster.plugins.hybrid_parallel.tensor_parallel.ranks import TensorParallelRanks
from booster.plugins.hybrid_parallel.tensor_parallel.regions import (
    gather_features,
    shared_copy_to_ranks,
    sum_over_ranks,
)
from booster.plugins.hybrid_parallel.tensor_parallel.split_logits import SplitLogits
from booster.plugins.hybrid_parallel.tensor_parallel.splits import vocabulary_rows

__all__ = ["make_feature_embedding", "make_vocabulary_embedding", "make_vocabulary_head"]


@dataclass(frozen=True, slots=True)
class VocabularySplit:
    """Vocabulary shard of a rank.

    Attributes:
        ranks: The tensor-parallel group.
        start: First entry of this rank.
        stop: End of this rank's entries, exclusive.
        num_entries: Size of the vocabulary.
        multiple: Multiple to which the vocabulary is padded.
        gathers_output: If True, a head returns the logits of all entries as a plain tensor.
    """

    ranks: TensorParallelRanks
    start: int
    stop: int
    num_entries: int
    multiple: int
    gathers_output: bool = False

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of entries of each rank."""
        size = self.ranks.size
        rows = [vocabulary_rows(self.num_entries, self.multiple, size, rank) for rank in range(size)]
        return tuple(stop - start for start, stop, _ in rows)


@dataclass(frozen=True, slots=True)
class FeatureSplit:
    """Settings of an embedding sharded over its features."""

    ranks: TensorParallelRanks
    sizes: tuple[int, ...]
    gathers_output: bool


def make_vocabulary_embedding(
    module: nn.Module, ranks: TensorParallelRanks, *, num_entries: int, multiple: int
) -> None:
    """Make an embedding vocabulary-parallel: it looks up this rank's rows, and the results are all-reduced.

    Args:
        module: An `nn.Embedding`, or a subclass that scales its output, with this rank's shard as weight.
        ranks: The tensor-parallel group.
        num_entries: Number of rows of the logical weight.
        multiple: Multiple to which the vocabulary is padded.

    Raises:
        ConfigError: The module is not an embedding, or uses max_norm or scale_grad_by_freq.

    Collective: no; the module's forward is.
    """
    embedding = _require_embedding(module, "vocab")
    if embedding.max_norm is not None or embedding.scale_grad_by_freq:
        raise ConfigError(
            "an embedding with max_norm or scale_grad_by_freq depends on the rows that are looked up, which differ"
            " between tensor-parallel ranks: leave it out of the plan, so that it stays unsharded"
        )
    split = _vocabulary_split(ranks, num_entries, multiple)
    padding, embedding.num_embeddings = embedding.padding_idx, embedding.weight.shape[0]
    is_mine = padding is not None and split.start <= padding < split.stop
    embedding.padding_idx = padding - split.start if padding is not None and is_mine else None
    become(embedding, VocabularyParallel, split)


def make_feature_embedding(
    module: nn.Module, ranks: TensorParallelRanks, *, sizes: Sequence[int], gathers_output: bool
) -> None:
    """Make an embedding look up this rank's features of every row.

    Args:
        module: An `nn.Embedding` or a subclass, with this rank's shard as weight.
        ranks: The tensor-parallel group.
        sizes: Number of features of each rank.
        gathers_output: If True, the module returns the features of all ranks.

    Raises:
        ConfigError: The module is not an embedding, or uses max_norm.

    Collective: no; with `gathers_output` the module's forward is.
    """
    embedding = _require_embedding(module, "embedding_colwise")
    if embedding.max_norm is not None:
        raise ConfigError(
            "an embedding with max_norm needs full rows to compute their norms: leave it out of the plan, or shard its"
            ' vocabulary with the style "vocab"'
        )
    embedding.embedding_dim = sizes[ranks.rank]
    become(embedding, FeatureParallel, FeatureSplit(ranks, tuple(sizes), gathers_output))


def make_vocabulary_head(
    module: nn.Module, ranks: TensorParallelRanks, *, num_entries: int, multiple: int, gathers_output: bool
) -> None:
    """Make an output head compute the logits of this rank's entries.

    Args:
        module: A linear layer whose weight and bias are this rank's rows.
        ranks: The tensor-parallel group.
        num_entries: Number of rows of the logical weight.
        multiple: Multiple to which the vocabulary is padded.
        gathers_output: If True, the module returns all logits as a plain tensor, otherwise `SplitLogits`.

    Raises:
        ConfigError: The module is not a linear layer.

    Collective: no; the module's backward is, and with `gathers_output` its forward.
    """
    require_linear(module, "vocab_head")
    become(module, VocabularyHead, _vocabulary_split(ranks, num_entries, multiple, gathers_output))


class VocabularyParallel(nn.Module):
    """Mixin of an embedding sharded over its rows."""

    _split: VocabularySplit

    def forward(self, entries: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the embeddings of entries of any shape, with the features in a new last dimension."""
        split = self._split
        is_foreign = (entries < split.start) | (entries >= split.stop)
        own = (entries - split.start).masked_fill(is_foreign, 0)
        found: torch.Tensor = super().forward(own, *args, **kwargs)
        found = found.masked_fill(is_foreign.unsqueeze(-1), 0)
        return sum_over_ranks(found, split.ranks, overwrites=True)


class FeatureParallel(nn.Module):
    """Mixin of an embedding sharded over its features."""

    _split: FeatureSplit

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return this rank's features of the entries, or those of all ranks."""
        found: torch.Tensor = super().forward(*args, **kwargs)
        split = self._split
        return gather_features(found, split.ranks, split.sizes) if split.gathers_output else found


class VocabularyHead(nn.Module):
    """Mixin of a linear layer sharded over the vocabulary."""

    _split: VocabularySplit

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits without those of padding rows."""
        split = self._split
        x = shared_copy_to_ranks(x, split.ranks)
        local = self._logits(x, split.stop - split.start)
        if split.gathers_output:
            return gather_features(local, split.ranks, split.sizes)
        return SplitLogits.of(local, split.ranks, split.sizes) if split.ranks.size > 1 else local

    def _logits(self, x: torch.Tensor, num_rows: int) -> torch.Tensor:
        if not is_plain_linear(self):
            whole: torch.Tensor = super().forward(x)
            return whole[..., :num_rows]
        bias: torch.Tensor | None = self.bias  # type: ignore[assignment]
        return product(self, x, None if bias is None else bias[:num_rows], num_outputs=num_rows)


def _vocabulary_split(
    ranks: TensorParallelRanks, num_entries: int, multiple: int, gathers_output: bool = False
) -> VocabularySplit:
    start, stop, _ = vocabulary_rows(num_entries, multiple, ranks.size, ranks.rank)
    return VocabularySplit(ranks, start, stop, num_entries, multiple, gathers_output)


def _require_embedding(module: nn.Module, style: str) -> nn.Embedding:
    if not isinstance(module, nn.Embedding):
        raise ConfigError(
            f"the plan gives the style {style!r} to a {type(module).__name__}, which is not an nn.Embedding: leave it"
            " out of the plan"
        )
    return module
