"""Tiny models that together have what real ones have: odd sizes, ties, buffers, unused parameters, experts."""

from __future__ import annotations

from zoo.entry import Batch, ZooEntry, split_batch
from zoo.registry import get_model, model_names, needs_transformers
from zoo.transformers_models import TRANSFORMERS_MODULES
from zoo.whole_batches import WholeBatches

__all__ = [
    "TRANSFORMERS_MODULES",
    "Batch",
    "WholeBatches",
    "ZooEntry",
    "get_model",
    "model_names",
    "needs_transformers",
    "split_batch",
]
