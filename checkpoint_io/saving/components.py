"""A boosted model or optimizer as a component: its slices, and the small files that make its folder complete."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import torch

from booster.checkpoint_io.destination import Destination
from booster.checkpoint_io.files import json_values
from booster.checkpoint_io.files.huggingface import config_documents
from booster.checkpoint_io.layout import MODEL, OPTIMIZER
from booster.checkpoint_io.saving.component import Component
from booster.interface import ModelWrapper, OptimizerWrapper

__all__ = ["model_component", "optimizer_component", "optimizer_values", "save_facts"]


def model_component(model: ModelWrapper, to: Destination, folder: str = "") -> Component:
    """Returns a model as a component; in a directory, with its configs.

    Args:
        model: The boosted model.
        to: Where it goes.
        folder: Where below the directory.
    """
    return Component(
        kind=MODEL,
        names=to.names,
        slices=model.tensor_slices(),
        max_shard_bytes=to.max_shard_bytes,
        is_sharded=to.is_sharded,
        folder=folder,
        documents=config_documents(model.unwrap()) if to.is_sharded else {},
        parameter_names=frozenset(name for name, _ in model.named_parameters()),
    )


def optimizer_values(optimizer: OptimizerWrapper) -> str:
    """Returns an optimizer's plain values as JSON, the same on all ranks.

    Collective where states are sharded: nothing that may fail on one rank alone goes before it.

    Raises:
        CheckpointError: A state is neither a tensor nor a plain value.
    """
    return json_values.dumps(optimizer.checkpoint_state().values(), "the optimizer's values")


def optimizer_component(optimizer: OptimizerWrapper, to: Destination, values: str, folder: str = "") -> Component:
    """Returns an optimizer as a component, its plain values beside it or, for a single file, in it.

    Args:
        optimizer: The boosted optimizer.
        to: Where it goes.
        values: What `optimizer_values` gave.
        folder: Where below the directory.
    """
    return Component(
        kind=OPTIMIZER,
        names=to.names,
        slices=optimizer.checkpoint_state().slices(),
        max_shard_bytes=to.max_shard_bytes,
        is_sharded=to.is_sharded,
        always_index=True,
        folder=folder,
        documents={to.names.groups: values.encode("utf-8")} if to.is_sharded else {},
        values=None if to.is_sharded else values,
    )


def save_facts(world_size: int) -> dict[str, Any]:
    """Returns what every manifest says of its save.

    Args:
        world_size: How many ranks saved.
    """
    return {
        "world_size": world_size,
        "versions": {"torch": torch.__version__, "torch-booster": metadata.version("torch-booster")},
    }
