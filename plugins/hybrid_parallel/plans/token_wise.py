"""Verify that a layer computes tokens independently outside of its parallel regions."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from torch import nn

from booster.errors import ConfigError
from booster.plugins.hybrid_parallel.plans.features import COLUMN_STYLES, ROW_STYLES
from booster.plugins.hybrid_parallel.plans.plan import PlannedEntry, TensorParallelPlan
from booster.plugins.hybrid_parallel.plans.probing import Probe, equal, module_kind, probe, run

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
        kind = module_kind(layer, tuple(entry.name.removeprefix(name) for entry in entries))
        if kind in known:
            continue
        known.add(kind)
        reason = _why_not(layer, name, entries)
        if reason:
            raise ConfigError(
                f"the layer {name!r} could not be verified to compute tokens independently outside of its sharded"
                f" modules ({reason}), as a sequence sharded over the tensor-parallel ranks requires: use"
                " sequence_parallelism_mode='all_to_all', which has a separate axis, or disable sequence parallelism"
            )


def _why_not(layer: nn.Module, name: str, entries: Iterable[PlannedEntry]) -> str:
    probed = probe(layer)
    if isinstance(probed, str):
        return probed
    prefix = f"{name}."
    columns = [entry for entry in entries if entry.style in COLUMN_STYLES]
    whole = {entry.name.removeprefix(prefix) for entry in columns if entry.region == entry.name}
    parts = {entry.region.removeprefix(prefix) for entry in columns if entry.region not in ("", entry.name)}
    rows = {entry.name.removeprefix(prefix) for entry in entries if entry.style in ROW_STYLES}
    parts |= {row for row in rows if not any(row.startswith(f"{region}.") for region in parts)}
    return _compare(probed, whole, parts)


def _compare(probed: Probe, whole: set[str], parts: set[str]) -> str:
    """Return how a run on the first tokens differs, or "" if it does not.

    Args:
        probed: The layer's recorded run.
        whole: Modules that gather the tokens of their input and return all tokens.
        parts: Modules that return the rank's tokens.
    """
    if probed.inputs.ndim < 3:
        return "its input is not a tensor of (batch, length, features)"
    num_tokens = max(1, probed.inputs.shape[1] // 2)
    recorded = _record(probed, whole | parts)
    if set(recorded) != whole | parts:
        return "not all of them are called once with one tensor and return one tensor"
    few = copy.deepcopy(probed.module)
    differing: list[str] = []
    for name, (given, output) in recorded.items():
        given_few = given[:, :num_tokens]
        # A row-parallel layer next to its column-parallel layers gets all tokens, as these return them.
        expected = (given_few, given) if whole and name in parts else (given_few,)
        _replace(
            few.get_submodule(name), name, expected, output if name in whole else output[:, :num_tokens], differing
        )
    try:
        result = run(few, probed.inputs[:, :num_tokens], probed.call)
    except Exception as error:  # a user's forward may raise anything
        return _misfed(differing) or f"{type(error).__name__}: {error}"
    if differing:
        return _misfed(differing)
    same = equal(result, [one[:, :num_tokens] for one in probed.output])
    return "" if same else "its output for some tokens depends on others"


def _misfed(names: list[str]) -> str:
    return f"the input of {names[0]} is not (batch, length, features)" if names else ""


def _record(probed: Probe, names: set[str]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    refused: set[str] = set()
    module = copy.deepcopy(probed.module)
    for name in names:

        def record(_: nn.Module, given: tuple[object, ...], output: object, name: str = name) -> None:
            first = given[0] if given else None
            if name in found or not isinstance(first, torch.Tensor) or not isinstance(output, torch.Tensor):
                refused.add(name)
            else:
                found[name] = (first.clone(), output.clone())

        module.get_submodule(name).register_forward_hook(record)
    run(module, probed.inputs, probed.call)
    return {name: calls for name, calls in found.items() if name not in refused}


def _replace(
    module: nn.Module, name: str, expected: Iterable[torch.Tensor], output: torch.Tensor, differing: list[str]
) -> None:
    def forward(*arguments: object, **_: object) -> torch.Tensor:
        first = arguments[0] if arguments else None
        if not isinstance(first, torch.Tensor) or not any(equal(first, one) for one in expected):
            differing.append(name)
        return output

    module.forward = forward
