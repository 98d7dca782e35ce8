"""Embeddings and output heads of which each rank has a part of the vocabulary, or of the features.

As with linear layers, the module's class is exchanged for one derived from it, and its parameters are this rank's parts
already. See `splits.vocabulary_rows` for which rows those are; rows behind the vocabulary's end are zero and stay zero.
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
    """Which entries a rank has.

    Attributes:
        ranks: Who have the others.
        start: First entry of this rank.
        stop: One past its last.
        num_entries: Of the whole vocabulary.
        multiple: What the rows of all ranks together are a multiple of.
        gathers_output: Whether a head returns the logits of all entries as an ordinary tensor.
    """

    ranks: TensorParallelRanks
    start: int
    stop: int
    num_entries: int
    multiple: int
    gathers_output: bool = False

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many entries each rank has."""
        size = self.ranks.size
        rows = [vocabulary_rows(self.num_entries, self.multiple, size, rank) for rank in range(size)]
        return tuple(stop - start for start, stop, _ in rows)


@dataclass(frozen=True, slots=True)
class FeatureSplit:
    """How an embedding goes about of whose features each rank has some."""

    ranks: TensorParallelRanks
    sizes: tuple[int, ...]
    gathers_output: bool


def make_vocabulary_embedding(
    module: nn.Module, ranks: TensorParallelRanks, *, num_entries: int, multiple: int
) -> None:
    """Lets an embedding look up its own rows; the ranks sum what they found.

    Args:
        module: An `nn.Embedding`, or one derived from it that scales what it looks up, whose weight is this rank's.
        ranks: Who have the other rows.
        num_entries: Rows of the logical weight.
        multiple: What the rows of all ranks together are a multiple of.

    Raises:
        ConfigError: The module is no embedding, or renormalises or counts its rows.

    The forward is collective.
    """
    embedding = _require_embedding(module, "vocab")
    if embedding.max_norm is not None or embedding.scale_grad_by_freq:
        raise ConfigError(
            "an embedding with max_norm or scale_grad_by_freq changes rows by which ones are looked up, which its ranks"
            " don't know of each other: leave it out of the plan, so that it stays whole"
        )
    split = _vocabulary_split(ranks, num_entries, multiple)
    padding, embedding.num_embeddings = embedding.padding_idx, embedding.weight.shape[0]
    is_mine = padding is not None and split.start <= padding < split.stop
    embedding.padding_idx = padding - split.start if padding is not None and is_mine else None
    become(embedding, VocabularyParallel, split)


def make_feature_embedding(
    module: nn.Module, ranks: TensorParallelRanks, *, sizes: Sequence[int], gathers_output: bool
) -> None:
    """Lets an embedding look up its own features of every row.

    Args:
        module: An `nn.Embedding` or one derived from it, whose weight is this rank's.
        ranks: Who have the other features.
        sizes: Features of each rank.
        gathers_output: Return the features of all ranks.

    Raises:
        ConfigError: The module is no embedding, or renormalises its rows.

    The forward is collective with `gathers_output`.
    """
    embedding = _require_embedding(module, "embedding_colwise")
    if embedding.max_norm is not None:
        raise ConfigError(
            "an embedding with max_norm needs whole rows to measure them: leave it out of the plan, or split it by"
            ' vocabulary with the style "vocab"'
        )
    embedding.embedding_dim = sizes[ranks.rank]
    become(embedding, FeatureParallel, FeatureSplit(ranks, tuple(sizes), gathers_output))


def make_vocabulary_head(
    module: nn.Module, ranks: TensorParallelRanks, *, num_entries: int, multiple: int, gathers_output: bool
) -> None:
    """Lets an output head compute the logits of its own entries.

    Args:
        module: A linear layer whose weight, and bias, are this rank's rows.
        ranks: Who have the other rows.
        num_entries: Rows of the logical weight.
        multiple: What the rows of all ranks together are a multiple of.
        gathers_output: Return all logits as an ordinary tensor; otherwise as `SplitLogits`.

    Raises:
        ConfigError: The module is no linear layer.

    The backward is collective, and the forward with `gathers_output`.
    """
    require_linear(module, "vocab_head")
    become(module, VocabularyHead, _vocabulary_split(ranks, num_entries, multiple, gathers_output))


class VocabularyParallel(nn.Module):
    """What is put before an embedding's class to split it by rows."""

    _split: VocabularySplit

    def forward(self, entries: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Returns the rows of the entries, of any shape, as features along a last dimension."""
        split = self._split
        is_foreign = (entries < split.start) | (entries >= split.stop)
        own = (entries - split.start).masked_fill(is_foreign, 0)
        found: torch.Tensor = super().forward(own, *args, **kwargs)
        found = found.masked_fill(is_foreign.unsqueeze(-1), 0)
        return sum_over_ranks(found, split.ranks, overwrites=True)


class FeatureParallel(nn.Module):
    """What is put before an embedding's class to split it by features."""

    _split: FeatureSplit

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Returns this rank's features of the entries, or all of them."""
        found: torch.Tensor = super().forward(*args, **kwargs)
        split = self._split
        return gather_features(found, split.ranks, split.sizes) if split.gathers_output else found


class VocabularyHead(nn.Module):
    """What is put before a linear layer's class to split it by rows of the vocabulary."""

    _split: VocabularySplit

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the logits, without those of rows that are padding."""
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
            f"the plan gives the style {style!r} to a {type(module).__name__}, which is no nn.Embedding: leave it out"
            " of the plan"
        )
    return module
