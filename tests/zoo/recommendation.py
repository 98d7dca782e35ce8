"""Click prediction: many embedding tables of very different heights, and interactions between their rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from zoo.entry import Batch, ZooEntry

_ROWS = (3, 17, 101)
_NUM_DENSE = 5
_BAG = 3  # ids per bag
_WIDTH = 6


class DLRM(nn.Module):
    """Bags of rows and dense features, their dot products, and an MLP (Naumov et al., DLRM, 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(_NUM_DENSE, 11), nn.ReLU(), nn.Linear(11, _WIDTH))
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(rows, _WIDTH, mode=mode) for rows, mode in zip(_ROWS, ("sum", "mean", "sum"), strict=True)
        )
        num_vectors = len(_ROWS) + 1
        self.top = nn.Sequential(nn.Linear(_WIDTH + num_vectors * (num_vectors - 1) // 2, 13), nn.ReLU())
        self.click = nn.Linear(13, 1)

    def forward(self, dense: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Maps (batch, 5) numbers and (batch, tables, 3) ids to (batch,) scores."""
        features = self.bottom(dense)
        rows = [table(ids[:, index]).to(features.dtype) for index, table in enumerate(self.tables)]
        vectors = torch.stack([features, *rows], dim=1)
        dots = vectors @ vectors.transpose(1, 2)
        first, second = torch.triu_indices(len(rows) + 1, len(rows) + 1, offset=1)
        return self.click(self.top(torch.cat([features, dots[:, first, second]], dim=1))).squeeze(1)


class DeepFM(nn.Module):
    """A factorization machine and an MLP over the same rows (Guo et al., DeepFM, 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ModuleList(nn.Embedding(rows, 1) for rows in _ROWS)
        self.factors = nn.ModuleList(nn.Embedding(rows, _WIDTH) for rows in _ROWS)
        self.dense = nn.Linear(_NUM_DENSE, 1, bias=False)
        self.deep = nn.Sequential(nn.Linear(len(_ROWS) * _WIDTH, 14), nn.ReLU(), nn.Linear(14, 1))
        self.bias = nn.Parameter(torch.zeros(()))
        for table in [*self.weights, *self.factors]:
            nn.init.normal_(table.weight, std=0.3)  # the pairs are a difference of squares, which rounding hits hardest

    def forward(self, dense: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Maps (batch, 5) numbers and (batch, tables, 3) ids, of which the first counts, to (batch,) scores."""
        columns = ids[:, :, 0].unbind(1)
        linear = sum(table(column) for table, column in zip(self.weights, columns, strict=True)) + self.dense(dense)
        rows = torch.stack([table(column) for table, column in zip(self.factors, columns, strict=True)], dim=1)
        pairs = 0.5 * (rows.sum(dim=1).square() - rows.square().sum(dim=1)).sum(dim=1, keepdim=True)
        return (linear + pairs + self.deep(rows.flatten(1))).squeeze(1) + self.bias


def _clicks(num_samples: int, generator: torch.Generator) -> Batch:
    ids = [torch.randint(rows, (num_samples, _BAG), generator=generator) for rows in _ROWS]
    return {
        "dense": torch.randn(num_samples, _NUM_DENSE, generator=generator),
        "ids": torch.stack(ids, dim=1),
        "y": torch.randint(2, (num_samples,), generator=generator).float(),
    }


def _click_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(model(batch["dense"], batch["ids"]), batch["y"])


RECOMMENDATION_MODELS = (
    ZooEntry(name="dlrm", construct=DLRM, sample=_clicks, loss=_click_loss),
    ZooEntry(name="deepfm", construct=DeepFM, sample=_clicks, loss=_click_loss),
)
