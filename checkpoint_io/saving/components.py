"""Checkpoint parts of a boosted model and optimizer: slices and small files."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import torch

from booster.checkpoint_io.destination import SaveTarget
from booster.checkpoint_io.files import json_values
from booster.checkpoint_io.files.huggingface import config_documents
from booster.checkpoint_io.layout import MODEL, OPTIMIZER
from booster.checkpoint_io.saving.component import CheckpointPart
from booster.interface import ModelWrapper, OptimizerWrapper

__all__ = ["model_part", "optimizer_part", "optimizer_values", "save_metadata"]


def model_part(model: ModelWrapper, target: SaveTarget, folder: str = "") -> CheckpointPart:
    """Build the checkpoint part of a model; a sharded one includes its configs.

    Args:
        model: Boosted model.
        target: Save target.
        folder: Subdirectory of the target.
    """
    return CheckpointPart(
        kind=MODEL,
        names=target.names,
        slices=model.tensor_slices(),
        max_shard_bytes=target.max_shard_bytes,
        is_sharded=target.is_sharded,
        folder=folder,
        documents=config_documents(model.unwrap()) if target.is_sharded else {},
        parameter_names=frozenset(name for name, _ in model.named_parameters()),
    )


def optimizer_values(optimizer: OptimizerWrapper) -> str:
    """Return an optimizer's plain values as JSON, identical on all ranks.

    Collective if states are sharded: no code that can fail on a single rank may precede it.

    Raises:
        CheckpointError: A state is neither a tensor nor a plain value.
    """
    return json_values.dumps(optimizer.checkpoint_state().values(), "the optimizer's values")


def optimizer_part(optimizer: OptimizerWrapper, target: SaveTarget, values: str, folder: str = "") -> CheckpointPart:
    """Build the checkpoint part of an optimizer; plain values go into a separate file, or into the single file.

    Args:
        optimizer: Boosted optimizer.
        target: Save target.
        values: Result of `optimizer_values`.
        folder: Subdirectory of the target.
    """
    return CheckpointPart(
        kind=OPTIMIZER,
        names=target.names,
        slices=optimizer.checkpoint_state().slices(),
        max_shard_bytes=target.max_shard_bytes,
        is_sharded=target.is_sharded,
        always_index=True,
        folder=folder,
        documents={target.names.groups: values.encode("utf-8")} if target.is_sharded else {},
        values=None if target.is_sharded else values,
    )


def save_metadata(world_size: int) -> dict[str, Any]:
    """Return the metadata that every manifest records of its save.

    Args:
        world_size: Number of ranks that save.
    """
    return {
        "world_size": world_size,
        "versions": {"torch": torch.__version__, "torch-booster": metadata.version("torch-booster")},
    }
