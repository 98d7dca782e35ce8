"""Validation of the plain values of a stored optimizer state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from booster.errors import CheckpointError
from booster.interface import TensorSpec

from . import json_values

MASTER_SUFFIX = ".master"
# Keys of an exported state_dict: names of the parameters by number, and fp32 master weights by number.
PARAMETER_NAMES = "parameter_names"
MASTER_WEIGHTS = "master_weights"


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


def from_torch_state_dict(content: Mapping[str, Any], source_name: str) -> tuple[dict[str, torch.Tensor], str]:
    """Return the tensors and plain values of a torch optimizer's state_dict, as `save_optimizer` stores them.

    Args:
        content: The state_dict. Parameters have the names that the optimizer was built from, or those that
            `export_optimizer` has added, else their numbers.
        source_name: Name of the file for messages.

    Returns:
        Tensors by `<parameter>.<state>`, and JSON text for `parse_values`. Shapes that do not follow from the states
        are None.

    Raises:
        CheckpointError: The content is malformed, or has states that are neither tensors nor plain values.
    """
    try:
        return _from_torch_state_dict(content, source_name)
    except (TypeError, KeyError, ValueError, AttributeError, IndexError) as error:
        raise CheckpointError(
            f"{source_name} looks like the state_dict of a torch optimizer, but is not one ({error!r:.200}): save"
            " optimizer.state_dict() again"
        ) from error


def _from_torch_state_dict(content: Mapping[str, Any], source_name: str) -> tuple[dict[str, torch.Tensor], str]:
    exported = content.get(PARAMETER_NAMES)
    names: dict[Any, str] = {}
    groups: list[dict[str, Any]] = []
    for group in content["param_groups"]:
        own = group.get("param_names") or (exported and [exported[number] for number in group["params"]])
        found = dict(zip(group["params"], own or map(str, group["params"]), strict=True))
        names |= found
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        groups.append({**options, "params": list(found.values())})
    tensors: dict[str, torch.Tensor] = {}
    numbers: dict[str, dict[str, Any]] = {}
    shapes: dict[str, list[int] | None] = dict.fromkeys(names.values())
    for number, states in content["state"].items():
        name = names[number]
        of_states = {key: value for key, value in states.items() if isinstance(value, torch.Tensor)}
        tensors |= {f"{name}.{key}": value for key, value in of_states.items()}
        numbers[name] = {key: value for key, value in states.items() if key not in of_states}
        of_elements = {tuple(value.shape) for value in of_states.values() if value.numel() > 1}
        shapes[name] = list(of_elements.pop()) if len(of_elements) == 1 else None
    for number, master in content.get(MASTER_WEIGHTS, {}).items():
        tensors[f"{names[number]}{MASTER_SUFFIX}"], shapes[names[number]] = master, list(master.shape)
    values = {
        "optimizer": None,
        "param_groups": groups,
        "shapes": shapes,
        "numbers": {name: own for name, own in numbers.items() if own},
        "loss_scaler": None,
        "num_skipped_steps": 0,
    }
    return tensors, json_values.dumps(values, source_name)


def renamed(
    specs: Mapping[str, TensorSpec], values: Mapping[str, Any], names: Mapping[str, str]
) -> tuple[dict[str, TensorSpec], dict[str, Any], dict[str, str]]:
    """Return a stored optimizer state with other names of its parameters, and the stored name of each tensor."""
    stored_name = {}
    for full_name in specs:
        name, _, key = full_name.rpartition(".")
        stored_name[f"{names[name]}.{key}"] = full_name
    groups = [{**group, "params": [names[name] for name in group["params"]]} for group in values["param_groups"]]
    by_name = {key: {names[name]: one for name, one in values[key].items()} for key in ("shapes", "numbers")}
    of_name = {name: specs[stored] for name, stored in stored_name.items()}
    return of_name, {**values, "param_groups": groups, **by_name}, stored_name


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
