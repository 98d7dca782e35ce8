"""Verify that a module computes the same with sharded linear layers, by running it."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from booster.errors import ConfigError
from booster.plugins.hybrid_parallel.plans.features import feature_sizes, split_dim
from booster.plugins.hybrid_parallel.plans.plan import AttributeChange
from booster.plugins.hybrid_parallel.tensor_parallel.linear import is_linear
from booster.plugins.hybrid_parallel.tensor_parallel.splits import Block, local_sizes, sharded_spec

__all__ = [
    "UNSHARDED_SIZES_HINT",
    "EquivalenceCheck",
    "SplitCandidate",
    "all_close",
    "copy_as_float64",
    "module_signature",
    "run",
    "run_equivalence_check",
    "sample_inputs",
    "shard_layer",
]

UNSHARDED_SIZES_HINT = (
    "where its code computes sizes from the full width, such as C // self.n_head, or uses the full width in a view or"
    " a split, use -1 or a head_dim attribute instead, as in view(B, T, -1, self.head_dim), and chunk instead of split"
)
"""Advice for a forward that reshapes tensors with unsharded sizes."""

_BATCH, _LENGTH = 3, 6  # of the sample inputs
_TOLERANCE = 1e-9  # relative to the largest element, in double precision
_MAX_RANKS_TRIED = 32  # largest number of units for which a split is tried with one unit per rank

# Note [Equivalence check]
# A split is verified by running it. A copy of the module with random weights, in double precision, runs on random
# input, and the inputs and outputs of its linear layers are recorded. Then, for each rank, another copy runs with the
# rank's shards of the weights and numbers of heads, in which the row-parallel layer returns the recorded output, as the
# all-reduce would. If its input is the rank's shard of the recorded input and the module's output is equal, then no
# computation between the layers mixes features of different ranks, and nothing else reads these features. This holds
# for any code: views, attention, activations, gates. It is done for two, three, five and the requested number of ranks,
# and for one rank per head, because a wrong split may keep heads on one rank by chance at some numbers of ranks.
# A user's plan is verified in the same way (users_proof.py), for its number of ranks.


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitCandidate:
    """Candidate of column- and row-parallel layers in a module.

    Attributes:
        columns: Blocks of the outputs of the column-parallel layers, by name.
        row: Name of the row-parallel layer that reads their outputs.
        row_blocks: Blocks of its inputs.
        attributes: Size attributes of the module to change.
    """

    columns: Mapping[str, tuple[Block, ...]]
    row: str
    row_blocks: tuple[Block, ...]
    attributes: tuple[AttributeChange, ...] = ()


class EquivalenceCheck:
    """Reference run of a module, with recorded inputs and outputs of its linear layers. See Note [Equivalence check].

    Attributes:
        module: Copy of the module in double precision with random weights.
        inputs: Its input.
        call: Its other arguments, by name.
        output: Its output tensors.
        calls: Input and output of each linear layer that was called exactly once, in call order.
        num_heads: Numbers of heads in calls of attention functions.
        has_raised_for_sizes: Whether a split failed because the module's code reshapes with unsharded sizes.
    """

    def __init__(self, module: nn.Module, inputs: torch.Tensor, arguments: Mapping[str, object], tp_size: int) -> None:
        self.module = module
        self._tp_size = tp_size
        self.inputs = inputs
        self.arguments = arguments
        self.calls: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        repeated: set[str] = set()
        handles = [
            one.register_forward_hook(self._recorder(name, repeated))
            for name, one in module.named_modules()
            if is_linear(one)
        ]
        try:
            with _AttentionSizes() as sizes:
                self.output = run(module, inputs, arguments)
        finally:
            for handle in handles:
                handle.remove()
        self.num_heads = sizes.num_heads
        self.had_size_error = False
        for name in repeated:
            self.calls.pop(name, None)

    def is_equivalent(self, split: SplitCandidate) -> bool:
        """Whether the module computes the same with these layers sharded."""
        num_units = split.row_blocks[0].num_units
        counts = {2, 3, 5, self._tp_size, num_units if num_units <= _MAX_RANKS_TRIED else 2}
        possible = [count for count in sorted(counts) if count > 1 and _is_possible(split, count)]
        cases = [(count, rank) for count in possible for rank in (0, count - 1)]
        return bool(cases) and all(self._is_rank_equivalent(split, count, rank) for count, rank in cases)

    def _is_rank_equivalent(self, split: SplitCandidate, num_ranks: int, rank: int) -> bool:
        module = copy.deepcopy(self.module)
        for name, blocks in split.columns.items():
            shard_layer(module.get_submodule(name), "colwise", blocks, num_ranks, rank)
        for change in split.attributes:
            value = change.local_value(num_ranks, rank)
            setattr(module.get_submodule(change.module), change.attribute, value)
        full, output = self.calls[split.row]
        shard_spec = sharded_spec(full.shape, full.ndim - 1, split.row_blocks, num_ranks, rank)
        seen: list[torch.Tensor] = []
        row = module.get_submodule(split.row)
        row.forward = lambda given: (seen.append(given), output)[1]  # type: ignore[func-returns-value]
        try:
            result = run(module, self.inputs, self.arguments)
        except Exception as error:  # the module's code may use sizes that a shard does not have
            message = str(error)
            self.had_size_error |= "is invalid for input of size" in message or "values to unpack" in message
            return False
        return len(seen) == 1 and all_close(seen[0], shard_spec.shard(full)) and all_close(result, self.output)

    def _recorder(self, name: str, repeated: set[str]) -> object:
        def record(_: nn.Module, given: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            if name in self.calls or len(given) != 1:
                repeated.add(name)
            else:
                self.calls[name] = (given[0].clone(), output.clone())

        return record


def run_equivalence_check(module: nn.Module, tp_size: int = 2) -> EquivalenceCheck | str:
    """Run a copy of a module on random input.

    Args:
        module: Any module, possibly on the meta device. Neither it nor the caller's RNG state is changed.
        tp_size: Number of ranks for which splits are verified, among others.

    Returns:
        The recorded run, or the reason why the module could not be run.
    """
    given = sample_inputs(module)
    if isinstance(given, str):
        return given
    call, tried = given
    try:
        copied = copy_as_float64(module)
    except RuntimeError as error:  # torch refuses to copy non-leaf tensors in attributes, as weight_norm has
        return f"it cannot be copied ({str(error).splitlines()[0]})"
    reason = ""
    for inputs in tried:
        try:
            return EquivalenceCheck(copied, inputs, call, tp_size)
        except Exception as error:  # a user's forward may raise anything
            reason = reason or f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return f"it cannot be run alone on a tensor of (batch, length, features) ({reason})"


def sample_inputs(module: nn.Module) -> tuple[dict[str, object], Iterator[torch.Tensor]] | str:
    """Return a module's other arguments by name, and inputs to try; or the reason why it cannot be run."""
    call = _arguments(module)
    return call if isinstance(call, str) else (call, _inputs(module))


def _inputs(module: nn.Module) -> Iterator[torch.Tensor]:
    sizes = {feature_sizes(one)[0]: None for one in module.modules() if is_linear(one)}
    generator = torch.Generator().manual_seed(1)
    for size in sizes:
        lengths = dict.fromkeys((_LENGTH, *sizes))  # layers that mix tokens require a fixed number of them
        for shape in (*((_BATCH, length, size) for length in lengths), (_BATCH, size)):
            yield torch.randn(shape, dtype=torch.float64, device="cpu", generator=generator)


class _AttentionSizes(torch.overrides.TorchFunctionMode):
    """Records the numbers of heads in calls of scaled_dot_product_attention and 4-d softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads: list[int] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204
        name = getattr(func, "__name__", "")
        if name in ("scaled_dot_product_attention", "softmax") and args and isinstance(args[0], torch.Tensor):
            sizes = args[1].shape if name.startswith("scaled") and len(args) > 1 else args[0].shape
            self.num_heads.extend(size[1] for size in (args[0].shape, sizes) if len(size) == 4)
        return func(*args, **(kwargs or {}))


def _arguments(module: nn.Module) -> dict[str, object] | str:
    """Return the arguments of a module's forward after the first, or the reason why they are unknown."""
    try:
        parameters = list(inspect.signature(module.forward).parameters.values())
    except (TypeError, ValueError):
        return "its forward has no signature"
    call: dict[str, object] = {}
    for parameter in parameters[1:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or parameter.default != parameter.empty:
            continue
        if "mask" not in parameter.name:
            return f"its forward has the further argument {parameter.name!r}, whose value is unknown"
        call[parameter.name] = None
    return call if parameters else "its forward takes no input"


def copy_as_float64(module: nn.Module) -> nn.Module:
    """Return a copy in eval mode, in double precision and with random weights."""
    memo = {id(one): one.new_empty(one.shape, dtype=_as_float64(one.dtype), device="cpu") for one in _tensors(module)}
    generator = torch.Generator().manual_seed(0)
    for original in _tensors(module):
        filled = memo[id(original)]
        if isinstance(original, nn.Parameter):
            memo[id(original)] = nn.Parameter(_random(filled, generator), requires_grad=False)
        elif original.is_meta:
            filled.fill_(1)  # probably a mask
        else:
            filled.copy_(original)
    return copy.deepcopy(module, dict(memo)).eval()


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def _as_float64(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype.is_floating_point else dtype


def _random(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    scale = max(1, tensor.shape[-1]) ** -0.5 if tensor.ndim > 1 else 1.0
    return tensor.normal_(generator=generator) * scale if tensor.is_floating_point() else tensor.fill_(1)


def run(module: nn.Module, inputs: torch.Tensor, call: Mapping[str, object], *, seed: int = 2) -> list[torch.Tensor]:
    """Return a module's output tensors, without gradients and with random numbers that depend on the seed only."""
    # Only if needed: a device context is a mode, and torch's encoder layers use a fused path without calling their
    # linear layers unless a mode is active.
    device = torch.device("cpu") if torch.get_default_device().type != "cpu" else contextlib.nullcontext()
    with torch.no_grad(), torch.random.fork_rng(devices=[]), device:
        torch.manual_seed(seed)
        output = module(inputs.clone(), **call)
    outputs = output if isinstance(output, (tuple, list)) else [output]
    if not all(one is None or isinstance(one, torch.Tensor) for one in outputs):
        raise TypeError("its output is not a tensor")
    return [one for one in outputs if isinstance(one, torch.Tensor)]


def _is_possible(split: SplitCandidate, num_ranks: int) -> bool:
    try:
        for blocks in (*split.columns.values(), split.row_blocks):
            local_sizes(blocks, num_ranks)
    except ConfigError:  # such as more ranks than heads
        return False
    return True


def shard_layer(layer: nn.Module, style: str, blocks: tuple[Block, ...], num_ranks: int, rank: int) -> None:
    dim = split_dim(layer, style)
    for name, parameter in layer.named_parameters(recurse=False):
        along = dim if name == "weight" else 0
        shard_spec = sharded_spec(parameter.shape, along, blocks, num_ranks, rank)
        setattr(layer, name, nn.Parameter(shard_spec.shard(parameter), requires_grad=False))
    size = layer.get_parameter("weight").shape[dim]
    setattr(layer, "nf" if hasattr(layer, "nf") else "out_features", size)


def all_close(
    actual: torch.Tensor | Sequence[torch.Tensor],
    expected: torch.Tensor | Sequence[torch.Tensor],
    tolerance: float = _TOLERANCE,
) -> bool:
    """Whether tensors are equal up to rounding, that of double precision by default."""
    if isinstance(actual, torch.Tensor) and isinstance(expected, torch.Tensor):
        if actual.shape != expected.shape:
            return False
        limit = tolerance * max(1.0, float(expected.abs().max())) if expected.numel() else 0.0
        return actual.numel() == 0 or float((actual - expected).abs().max()) <= limit
    return len(actual) == len(expected) and all(
        all_close(one, other, tolerance) for one, other in zip(actual, expected, strict=True)
    )


def module_signature(module: nn.Module, names: tuple[str, ...]) -> tuple[object, ...]:
    """Return a key that is equal for modules that differ in the values of their weights only."""
    shapes = tuple((name, tuple(one.shape)) for name, one in module.named_parameters())
    kinds = tuple((name, type(one), _plain_attributes(one)) for name, one in module.named_modules())
    return names, shapes, kinds


def _plain_attributes(module: nn.Module) -> tuple[tuple[str, object], ...]:
    plain = (int, float, bool, str)
    return tuple((name, value) for name, value in vars(module).items() if type(value) in plain and "idx" not in name)
