"""Verify that a stack's layers compute tokens independently, as a sharded sequence requires, by running them."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from booster.errors import ConfigError
from booster.plugins.hybrid_parallel.sequence_parallel.layer_stack import map_hidden
from booster.pytree import map_tensors

from .equivalence_check import (
    POSITIONS,
    EquivalenceCheck,
    all_close,
    further_arguments,
    module_signature,
    record_calls,
    run,
    run_equivalence_check,
)
from .plan import COLUMN_STYLES, ROW_STYLES, PlannedEntry, TensorParallelPlan
from .sequence_regions import is_cross_attention, is_within


def check_token_wise(plan: TensorParallelPlan, model: nn.Module) -> None:
    """Verify that the layers of a plan's stacks compute tokens independently outside of their regions.

    A sharded sequence requires this, and that the tokens are the second dimension of the regions' inputs. A layer is
    run on all tokens, and the inputs and outputs of its regions are recorded. It is then run on the first and on the
    last tokens, with its regions returning these tokens of their recorded outputs. The regions' inputs and the layer's
    output must be these tokens of the recorded ones.

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
        blocks = {block.removeprefix(f"{name}.") for block in plan.all_token_blocks if block.startswith(f"{name}.")}
        reason = _find_violation(layer, name, entries, blocks)
        if reason:
            raise ConfigError(
                f"the layer {name!r} could not be verified to compute tokens independently outside of its sharded"
                f" modules ({reason}), as a sequence sharded over the tensor-parallel ranks requires: use"
                " sequence_parallelism_mode='all_to_all', which has a separate axis, or disable sequence parallelism"
            )


def _find_violation(layer: nn.Module, name: str, entries: Iterable[PlannedEntry], blocks: set[str]) -> str:
    check = run_equivalence_check(layer)
    if isinstance(check, str):
        return check
    prefix = f"{name}."
    entries = [entry for entry in entries if not is_within(entry.name.removeprefix(prefix), blocks)]
    columns = [entry for entry in entries if entry.style in COLUMN_STYLES]
    gathering = {entry.name.removeprefix(prefix) for entry in columns if entry.region == entry.name}
    sharded = {entry.region.removeprefix(prefix) for entry in columns if entry.region not in ("", entry.name)}
    rows = {entry.name.removeprefix(prefix) for entry in entries if entry.style in ROW_STYLES}
    sharded |= blocks | {row for row in rows if not any(row.startswith(f"{region}.") for region in sharded)}
    if check.inputs.ndim < 3:
        return "its input is not a tensor of (batch, length, features)"
    checks = [one for one in (check, check.training) if one is not None]
    parts = _parts(check.inputs.shape[1])
    reasons = (_compare(one, gathering, sharded, part) for one in checks for part in parts)
    return next(filter(None, reasons), "")


def _parts(num_tokens: int) -> tuple[slice, slice]:
    """Return the first and the last tokens: the first alone would not show that a token depends on earlier ones."""
    half = max(1, num_tokens // 2)
    return slice(0, half), slice(half, num_tokens)


def _compare(check: EquivalenceCheck, gathering: set[str], sharded: set[str], part: slice) -> str:
    """Return how a run on some tokens differs, or "" if it does not.

    Modules of `gathering` gather the tokens of their input and return all; those of `sharded` return the rank's.
    """
    _, calls = record_calls(copy.deepcopy(check.module), gathering | sharded, check.inputs, check.arguments)
    recorded: dict[str, tuple[torch.Tensor, Any]] = {
        name: (given[0], output)
        for name, ((given, output), *others) in calls.items()
        if not others and given and isinstance(given[0], torch.Tensor) and _hidden_of(output) is not None
    }
    uncalled = {name for name in gathering | sharded if name not in calls and is_cross_attention(name)}
    if set(recorded) != (gathering | sharded) - uncalled:
        return "not all of them are called once with a tensor and return one, possibly first in a tuple"
    module = copy.deepcopy(check.module)
    differing: list[str] = []
    for name, (given, output) in recorded.items():
        tokens = given[:, part]
        # A row-parallel layer next to its column-parallel layers gets all tokens, as these return them.
        expected = (tokens, given) if gathering and name in sharded else (tokens,)
        returned = output if name in gathering else map_hidden(output, lambda full: full[:, part])
        _replace(module.get_submodule(name), name, expected, returned, differing)
    try:
        result: list[torch.Tensor] | str = run(module, check.inputs[:, part], check.arguments)
    except Exception as error:  # a user's forward may raise anything
        result = f"{type(error).__name__}: {error}"
    if differing:
        return f"the input of {differing[0]} for some tokens is not these tokens of (batch, length, features)"
    if isinstance(result, str):
        return result
    hidden, *others = check.output  # the others are of all tokens, or of some
    same = all_close(result[:1], [hidden[:, part]]) and len(result) == len(check.output)
    same = same and all(
        all_close(one, other) or (other.ndim > 1 and all_close(one, other[:, part]))
        for one, other in zip(result[1:], others, strict=True)
    )
    return "" if same else "its output for some tokens depends on others"


def _hidden_of(output: Any) -> torch.Tensor | None:
    """Return the tensor, or the first one of a tuple, that a module returns."""
    first = output[0] if isinstance(output, (tuple, list)) and output else output
    return first if isinstance(first, torch.Tensor) else None


def _replace(module: nn.Module, name: str, expected: Iterable[torch.Tensor], output: Any, differing: list[str]) -> None:
    def forward(*arguments: object, **named: object) -> Any:
        first = arguments[0] if arguments else named.get("hidden_states")
        if not isinstance(first, torch.Tensor) or not any(all_close(first, one) for one in expected):
            differing.append(name)
        return output

    module.forward = forward


# Note [Tokens outside of attention]
# With an axis of its own, a sequence is sharded in all of a layer but attention, in which the ranks communicate. So a
# layer is run on all tokens, and what its calls of attention get and return is recorded. It is then run on the first
# and on the last tokens, with these tokens of what the calls returned. What they get, and the layer's output, must be
# these tokens of the recorded ones. Otherwise a token's place or other tokens matter, as to rotary embeddings by the
# number of queries, to a shift or to a mean over tokens. A layer that can't be run alone, has no such attention, or
# takes something else that may tell it the places, is not verified.
_ROUNDING = 1e-5  # of layers that compute a part in single precision
_NO_PLACES = ("mask", "past_key_value", "cache", "output_", "return_", "is_causal")


def check_attention_alone_mixes_tokens(model: nn.Module, stacks: Iterable[Sequence[str]]) -> None:
    """Verify that layers compute tokens independently outside of attention; see Note [Tokens outside of attention].

    Args:
        model: The user's model.
        stacks: Names of the layers of each stack.

    Raises:
        ConfigError: A layer does not.
    """
    known: set[tuple[object, ...]] = set()
    for name in (layer for stack in stacks for layer in stack):
        layer = model.get_submodule(name)
        kind = module_signature(layer, ())
        if kind in known:
            continue
        known.add(kind)
        reason = _find_mixing(layer)
        if reason:
            raise ConfigError(
                f"the layer {name!r} computes {reason}, and with a sharded sequence a rank has its own tokens there,"
                " the first of which is not the first of the sequence: compute what depends on places or on other"
                " tokens before the layers, and pass it to them as an argument with a dimension of tokens, such as"
                " position_ids or position_embeddings"
            )


def _find_mixing(layer: nn.Module) -> str:
    """Return what depends on other tokens, or on a token's place, outside of attention; "" if nothing is known to."""
    check = run_equivalence_check(layer)
    if isinstance(check, str) or check.inputs.ndim < 3:
        return ""
    in_training = "" if check.training is None else _find_mixing_in(layer, check.training)
    return _find_mixing_in(layer, check) or in_training


def _find_mixing_in(layer: nn.Module, check: EquivalenceCheck) -> str:
    num_tokens, parameters = check.inputs.shape[1], list(inspect.signature(layer.forward).parameters.values())[1:]
    named = {one.name for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)}
    takes_any = len(named) < len(parameters) and named.isdisjoint(POSITIONS)
    if takes_any or any(all(known not in name for known in _NO_PLACES) for name in named - {*POSITIONS}):
        return ""
    # The places that a model passes, before those that the layer makes without them.
    for further in reversed(list(further_arguments(layer, check.inputs))):
        check.arguments = {**check.arguments, **further}
        with contextlib.suppress(Exception), _Attention() as recorded:
            full = run(copy.deepcopy(check.module), check.inputs, check.arguments)
            break
    else:
        return ""
    calls = recorded.calls
    with _Attention() as repeated:
        again = run(copy.deepcopy(check.module), check.inputs, check.arguments, seed=3)
    if not _are_calls_close(calls, repeated.calls) or not all_close(full[:1], again[:1], _ROUNDING):
        return ""  # it draws random numbers in evaluation mode, too
    if not calls or any(one.shape[-2] != num_tokens for call in calls for one in call):
        return ""
    for part in _parts(num_tokens):
        try:
            with _Attention(calls, part) as replayed:
                result = run(copy.deepcopy(check.module), check.inputs[:, part], _arguments_of(check, part))
        except Exception:  # a user's forward may raise anything; then its first batch does, too
            return ""
        if replayed.differs or len(replayed.calls) != len(calls):
            return "queries, keys or values of some tokens from their places or from other tokens"
        if not all_close(result[:1], [full[0][:, part]], _ROUNDING):
            return "its output for some tokens from their places or from other tokens, outside of attention"
    return ""


def _are_calls_close(calls: Sequence[Sequence[torch.Tensor]], others: Sequence[Sequence[torch.Tensor]]) -> bool:
    return len(calls) == len(others) and all(
        all_close(one, other, _ROUNDING) for one, other in zip(calls, others, strict=True)
    )


def _arguments_of(check: EquivalenceCheck, part: slice) -> dict[str, object]:
    """Return the other arguments of a layer for some tokens."""
    num_tokens = check.inputs.shape[1]

    def of_part(tensor: torch.Tensor) -> torch.Tensor:
        dim = next((dim for dim, size in enumerate(tensor.shape) if size == num_tokens), None)
        return tensor if dim is None else tensor.narrow(dim, part.start, part.stop - part.start)

    return {name: map_tensors(of_part, value) for name, value in check.arguments.items()}


class _Attention(TorchFunctionMode):
    """Records calls of attention, or returns some tokens of what recorded ones returned."""

    def __init__(self, recorded: Sequence[tuple[torch.Tensor, ...]] = (), part: slice | None = None) -> None:
        super().__init__()
        self._recorded = recorded
        self._part = part
        self.calls: list[tuple[torch.Tensor, ...]] = []  # query, key, value and output
        self.differs = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") != "scaled_dot_product_attention":
            return func(*args, **kwargs)
        given = [*args[:3], *(kwargs[name] for name in ("query", "key", "value")[len(args) :])]
        if self._part is None:
            output = func(*args, **kwargs)
            self.calls.append((*given, output))
            return output
        *expected, output = self._recorded[len(self.calls)]
        parts = [one[..., self._part, :] for one in expected]
        self.differs = self.differs or not all(all_close(*pair, _ROUNDING) for pair in zip(given, parts, strict=True))
        output = output[..., self._part, :]
        self.calls.append((*given, output))
        return output
