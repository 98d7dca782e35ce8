"""Verify that a layer computes tokens independently outside of its parallel regions."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from torch import nn

from booster.errors import ConfigError
from booster.plugins.hybrid_parallel.plans.features import COLUMN_STYLES, ROW_STYLES
from booster.plugins.hybrid_parallel.plans.plan import PlannedEntry, TensorParallelPlan
from booster.plugins.hybrid_parallel.plans.probing import (
    EquivalenceCheck,
    all_close,
    module_signature,
    run,
    run_equivalence_check,
)

__all__ = ["check_token_wise"]


def check_token_wise(plan: TensorParallelPlan, model: nn.Module) -> None:
    """Verify that the layers of a plan's stacks compute tokens independently outside of their regions.

    A sharded sequence requires this, and that the tokens are the second dimension of the regions' inputs. A layer is
    run on all tokens, and the inputs and outputs of its regions are recorded. It is then run on the first tokens, with
    its regions returning these tokens of their recorded outputs. The regions' inputs and the layer's output must be the
    first tokens of the recorded ones.

    Raises:
        ConfigError: A layer could not be verified.
    """
    known: set[tuple[object, ...]] = set()
    for name in (layer for stack in plan.stacks for layer in stack):
        layer = model.get_submodule(name)
        entries = [entry for entry in plan.entries if entry.name.startswith(f"{name}.")]
        kind = module_signature(layer, tuple(entry.name.removeprefix(name) for entry in entries))
        if kind in known:
            continue
        known.add(kind)
        reason = _find_violation(layer, name, entries)
        if reason:
            raise ConfigError(
                f"the layer {name!r} could not be verified to compute tokens independently outside of its sharded"
                f" modules ({reason}), as a sequence sharded over the tensor-parallel ranks requires: use"
                " sequence_parallelism_mode='all_to_all', which has a separate axis, or disable sequence parallelism"
            )


def _find_violation(layer: nn.Module, name: str, entries: Iterable[PlannedEntry]) -> str:
    check = run_equivalence_check(layer)
    if isinstance(check, str):
        return check
    prefix = f"{name}."
    columns = [entry for entry in entries if entry.style in COLUMN_STYLES]
    gathering = {entry.name.removeprefix(prefix) for entry in columns if entry.region == entry.name}
    sharded = {entry.region.removeprefix(prefix) for entry in columns if entry.region not in ("", entry.name)}
    rows = {entry.name.removeprefix(prefix) for entry in entries if entry.style in ROW_STYLES}
    sharded |= {row for row in rows if not any(row.startswith(f"{region}.") for region in sharded)}
    return _compare(check, gathering, sharded)


def _compare(check: EquivalenceCheck, gathering: set[str], sharded: set[str]) -> str:
    """Return how a run on the first tokens differs, or "" if it does not.

    Args:
        check: The layer's recorded run.
        gathering: Modules that gather the tokens of their input and return all tokens.
        sharded: Modules that return the rank's tokens.
    """
    if check.inputs.ndim < 3:
        return "its input is not a tensor of (batch, length, features)"
    num_tokens = max(1, check.inputs.shape[1] // 2)
    recorded = _record(check, gathering | sharded)
    if set(recorded) != gathering | sharded:
        return "not all of them are called once with one tensor and return one tensor"
    module = copy.deepcopy(check.module)
    differing: list[str] = []
    for name, (given, output) in recorded.items():
        first_tokens = given[:, :num_tokens]
        # A row-parallel layer next to its column-parallel layers gets all tokens, as these return them.
        expected = (first_tokens, given) if gathering and name in sharded else (first_tokens,)
        _replace(
            module.get_submodule(name),
            name,
            expected,
            output if name in gathering else output[:, :num_tokens],
            differing,
        )
    try:
        result = run(module, check.inputs[:, :num_tokens], check.arguments)
    except Exception as error:  # a user's forward may raise anything
        return _describe_mismatch(differing) or f"{type(error).__name__}: {error}"
    if differing:
        return _describe_mismatch(differing)
    same = all_close(result, [one[:, :num_tokens] for one in check.output])
    return "" if same else "its output for some tokens depends on others"


def _describe_mismatch(names: list[str]) -> str:
    return f"the input of {names[0]} is not (batch, length, features)" if names else ""


def _record(check: EquivalenceCheck, names: set[str]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    refused: set[str] = set()
    module = copy.deepcopy(check.module)
    for name in names:

        def record(_: nn.Module, given: tuple[object, ...], output: object, name: str = name) -> None:
            first = given[0] if given else None
            if name in found or not isinstance(first, torch.Tensor) or not isinstance(output, torch.Tensor):
                refused.add(name)
            else:
                found[name] = (first.clone(), output.clone())

        module.get_submodule(name).register_forward_hook(record)
    run(module, check.inputs, check.arguments)
    return {name: calls for name, calls in found.items() if name not in refused}


def _replace(
    module: nn.Module, name: str, expected: Iterable[torch.Tensor], output: torch.Tensor, differing: list[str]
) -> None:
    def forward(*arguments: object, **_: object) -> torch.Tensor:
        first = arguments[0] if arguments else None
        if not isinstance(first, torch.Tensor) or not any(all_close(first, one) for one in expected):
            differing.append(name)
        return output

    module.forward = forward
