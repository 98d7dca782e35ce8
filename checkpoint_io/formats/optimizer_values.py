"""Validation of the plain values of a stored optimizer state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from booster.errors import CheckpointError
from booster.interface import TensorSpec

from . import json_values

MASTER_SUFFIX = ".master"


def parse_values(raw: bytes, specs: Mapping[str, TensorSpec], source_name: str) -> dict[str, Any]:
    """Parse and validate the output of `OptimizerState.values()` in a checkpoint.

    Args:
        raw: JSON text.
        specs: Stored tensors.
        source_name: Name of the checkpoint for messages.

    Raises:
        CheckpointError: The text is malformed or inconsistent.
    """
    values = json_values.loads(raw, source_name)
    for problem in _problems(values, specs):
        raise CheckpointError(
            f"the param groups of {source_name} are damaged: {problem}. Take another copy of the checkpoint"
        )
    return dict(values)


def _problems(values: Any, specs: Mapping[str, TensorSpec]) -> Iterable[str]:
    types: dict[str, Any] = {"param_groups": list, "shapes": dict, "numbers": dict, "loss_scaler": (dict, type(None))}
    if not isinstance(values, dict):
        yield "they are not a JSON object"
        return
    for key, expected_type in types.items():
        if not isinstance(values.get(key, 0), expected_type):
            yield f"{key!r} is missing or of the wrong type"
            return
    if type(values.get("num_skipped_steps")) is not int:
        yield "'num_skipped_steps' is missing or not an integer"
        return
    yield from _group_problems(values, specs)


def _group_problems(values: Mapping[str, Any], specs: Mapping[str, TensorSpec]) -> Iterable[str]:
    named: list[str] = []
    for index, group in enumerate(values["param_groups"]):
        params = group.get("params") if isinstance(group, dict) else None
        if not isinstance(params, list) or not all(isinstance(name, str) for name in params):
            yield f"group {index} has no list of parameter names"
            return
        named += params
    if len(set(named)) != len(named) or set(named) != set(values["shapes"]):
        yield "shapes and groups have different parameters, or a parameter is in two groups"
    if not set(values["numbers"]) <= set(named) or not all(isinstance(n, dict) for n in values["numbers"].values()):
        yield "there are numbers of a parameter that is in no group"
    for full_name, spec in specs.items():
        shape = (
            values["shapes"].get(full_name.removesuffix(MASTER_SUFFIX)) if full_name.endswith(MASTER_SUFFIX) else None
        )
        if shape is not None and list(spec.shape) != shape:
            yield f"{full_name!r} has shape {spec.shape}, its parameter {shape}"
