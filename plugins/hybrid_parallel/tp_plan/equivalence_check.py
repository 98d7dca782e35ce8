"""Verify that a module computes the same with sharded linear layers, by running it."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from booster.errors import ConfigError, first_line
from booster.plugins.hybrid_parallel.tensor_parallel.linear import has_plain_forward, is_linear
from booster.plugins.hybrid_parallel.tensor_parallel.shard_spec import Block, local_sizes, sharded_spec
from booster.pytree import map_tensors

from .plan import (
    AttributeChange,
    feature_sizes,
    split_dim,
)

UNSHARDED_SIZES_HINT = (
    "where its code computes sizes from the full width, such as C // self.n_head, or uses the full width in a view or"
    " a split, use -1 or a head_dim attribute instead, as in view(B, T, -1, self.head_dim), and chunk instead of split"
)
"""Advice for a forward that reshapes tensors with unsharded sizes."""

_BATCH, _LENGTH = 3, 6  # of the sample inputs
_TOLERANCE = 1e-9  # relative to the largest element, in double precision
_MAX_RANKS_TRIED = 32  # largest number of units for which a split is tried with one unit per rank

_Result = TypeVar("_Result")

# Note [Equivalence check]
# A split is verified by running it. A copy of the module with random weights, in double precision, runs on random
# input, and the inputs and outputs of its linear layers are recorded. Then, for each rank, another copy runs with the
# rank's shards of the weights and numbers of heads, in which the row-parallel layer returns the recorded output, as the
# all-reduce would. If its input is the rank's shard of the recorded input and the module's output is equal, then no
# computation between the layers mixes features of different ranks, and nothing else reads these features. This holds
# for any code: views, attention, activations, gates. It is done for two, three, five and the requested number of ranks,
# and for one rank per head, because a wrong split may keep heads on one rank by chance at some numbers of ranks.
# Parameters of other layers may be used between the sharded ones, such as a norm of each head: then each rank has a
# part of their gradient. For two ranks the gradients are compared with those of the full module, too: where they are
# equal, nothing is to be done, and where their sum is equal, they are all-reduced in training.
# A row-parallel layer whose class has a forward of its own must add up from its shards, as a product does. A module
# that computes something else in training mode, without random numbers, is verified in both modes.
# A user's plan is verified in the same way, for its number of ranks: see `user_plan_check`.


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitCandidate:
    """Candidate of column- and row-parallel layers in a module.

    Attributes:
        columns: Blocks of the outputs of the column-parallel layers, by name.
        row: Name of the row-parallel layer that reads their outputs.
        row_blocks: Blocks of its inputs.
        attributes: Size attributes of the module to change.
        partial: Modules inside, and parameters of the module itself, of whose gradient each rank has a part.
    """

    columns: Mapping[str, tuple[Block, ...]]
    row: str
    row_blocks: tuple[Block, ...]
    attributes: tuple[AttributeChange, ...] = ()
    partial: tuple[str, ...] = ()


class EquivalenceCheck:
    """Reference run of a module, with recorded inputs and outputs of its linear layers. See Note [Equivalence check].

    Attributes:
        module: Copy of the module in double precision with random weights.
        inputs: Its input.
        arguments: Its other arguments, by name.
        output: Its output tensors.
        calls: Input and output of each linear layer that was called exactly once, in call order.
        num_heads: Numbers of heads in calls of attention functions.
        had_size_error: Whether a split failed because the module's code reshapes with unsharded sizes.
        other: Run on an input with another number of dimensions, in which splits have to be equivalent, too; None where
            the module takes only one. A batch normalization of features is one of tokens if they are as many.
    """

    def __init__(self, module: nn.Module, inputs: torch.Tensor, arguments: Mapping[str, object], tp_size: int) -> None:
        self.module = module
        self._tp_size = tp_size
        self.inputs = inputs
        self.arguments = arguments
        linear_layers = [name for name, layer in module.named_modules() if is_linear(layer)]
        with _AttentionSizes() as sizes:
            self.output, recorded = record_calls(module, linear_layers, inputs, arguments)
        self.calls: dict[str, tuple[torch.Tensor, torch.Tensor]] = {
            name: (given[0], output)
            for name, ((given, output), *others) in recorded.items()
            if len(given) == 1 and not others
        }
        self.num_heads = sizes.num_heads
        self.had_size_error = False
        self.other: EquivalenceCheck | None = None  # without a dimension of tokens
        self.training: EquivalenceCheck | None = None  # in training mode, if the module computes something else there

    def is_equivalent(self, split: SplitCandidate) -> bool:
        """Whether the module computes the same with these layers sharded."""
        num_units = split.row_blocks[0].num_units
        counts = {2, 3, 5, self._tp_size, num_units if num_units <= _MAX_RANKS_TRIED else 2}
        cases: list[tuple[int, int]] = []
        for count in sorted(one for one in counts if one > 1):
            with contextlib.suppress(ConfigError):  # such as more ranks than heads
                for blocks in (*split.columns.values(), split.row_blocks):
                    local_sizes(blocks, count)
                cases += [(count, 0), (count, count - 1)]
        if not cases or not self._adds_up(split):
            return False
        if not all(self._is_rank_equivalent(split, count, rank) for count, rank in cases):
            return False
        others = [one for one in (self.other, self.training) if one is not None]
        return all(split.row in one.calls and one.is_equivalent(split) for one in others)

    def _adds_up(self, split: SplitCandidate) -> bool:
        layers = [self.module.get_submodule(name) for name in (*split.columns, split.row)]
        if any(name not in ("weight", "bias") for one in layers for name, _ in one.named_parameters(recurse=False)):
            return False  # such as an adapter of the layer's own
        given, output = self.calls[split.row]
        return adds_up(layers[-1], split.row_blocks, given, output)

    def partial_gradients(self, split: SplitCandidate) -> tuple[str, ...] | None:
        """Return what `SplitCandidate.partial` lists of an equivalent split; None if gradients are neither.

        Column-parallel layers all-reduce the gradient of their input, so that what comes before them has all of it.
        """
        expected = self._other_gradients(split, copy.deepcopy(self.module), None)
        of_ranks = []
        for rank in range(2):
            module = self._local_module(split, 2, rank)
            of_ranks.append(self._other_gradients(split, module, (2, rank)))
        is_partial: dict[str, bool] = {}
        for name, gradient in expected.items():
            own = [found[name] for found in of_ranks]
            owner = name.rpartition(".")[0] or name
            if all(all_close(one, gradient) for one in own):
                partial = False
            elif all_close(own[0] + own[1], gradient):
                partial = True
            else:
                return None
            if is_partial.setdefault(owner, partial) != partial:
                return None
        return tuple(name for name, partial in is_partial.items() if partial)

    def _other_gradients(
        self, split: SplitCandidate, module: nn.Module, place: tuple[int, int] | None
    ) -> dict[str, torch.Tensor]:
        """Return the gradients of the parameters of all but the sharded layers; `place` is (num_ranks, rank)."""
        for name in split.columns:
            module.get_submodule(name).register_forward_pre_hook(lambda _, given: (given[0].detach(),))
        if place is not None:
            row, output = module.get_submodule(split.row), self.calls[split.row][1]
            local = copy.deepcopy(row)
            weight = local.get_parameter("weight")
            shard_spec = sharded_spec(weight.shape, split_dim(local, "rowwise"), split.row_blocks, *place)
            local.weight = nn.Parameter(shard_spec.shard(weight), requires_grad=False)

            def forward(given: torch.Tensor) -> torch.Tensor:
                """Return the output of all ranks, with the gradient of this rank's own part."""
                own: torch.Tensor = local(given)
                return output + (own - own.detach())

            row.forward = forward
        sharded = {*split.columns, split.row}
        others = {
            name: parameter
            for name, parameter in module.named_parameters()
            if name.rpartition(".")[0] not in sharded and parameter.is_floating_point()
        }
        if not others:
            return {}
        for parameter in others.values():
            parameter.requires_grad_()
        generator = torch.Generator().manual_seed(3)
        outputs = [one for one in run(module, self.inputs, self.arguments, with_grad=True) if one.requires_grad]
        weights = [torch.randn(one.shape, dtype=one.dtype, device="cpu", generator=generator) for one in outputs]
        found: Sequence[torch.Tensor | None] = [None] * len(others)
        if outputs:
            found = torch.autograd.grad(outputs, list(others.values()), weights, allow_unused=True)
        return {
            name: torch.zeros_like(parameter) if gradient is None else gradient
            for (name, parameter), gradient in zip(others.items(), found, strict=True)
        }

    def _local_module(self, split: SplitCandidate, num_ranks: int, rank: int) -> nn.Module:
        module = copy.deepcopy(self.module)
        for name, blocks in split.columns.items():
            shard_layer(module.get_submodule(name), "colwise", blocks, num_ranks, rank)
        for change in split.attributes:
            change.apply(module, num_ranks, rank)
        return module

    def _is_rank_equivalent(self, split: SplitCandidate, num_ranks: int, rank: int) -> bool:
        module = self._local_module(split, num_ranks, rank)
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


def run_equivalence_check(module: nn.Module, tp_size: int = 2) -> EquivalenceCheck | str:
    """Run a copy of a module on random input.

    Args:
        module: Any module, possibly on the meta device. Neither it nor the caller's RNG state is changed.
        tp_size: Number of ranks for which splits are verified, among others.

    Returns:
        The recorded run, or the reason why the module could not be run.
    """

    def check_with(copied: nn.Module, inputs: torch.Tensor, arguments: Mapping[str, object]) -> EquivalenceCheck:
        check = EquivalenceCheck(copied, inputs, arguments, tp_size)
        if inputs.ndim == 3:
            with contextlib.suppress(Exception):  # it takes sequences only
                check.other = EquivalenceCheck(copied, inputs[:, 0], arguments, tp_size)
        training = _training_copy(check)
        if training is not None:
            check.training = EquivalenceCheck(training, inputs, arguments, tp_size)
        return check

    return try_inputs(module, check_with)


def _training_copy(check: EquivalenceCheck) -> nn.Module | None:
    """Return a copy in training mode, without dropout, if it computes something else there, and always the same."""
    module = copy.deepcopy(check.module).train()
    for one in module.modules():
        if isinstance(one, nn.modules.dropout._DropoutNd):
            one.p = 0.0
    try:
        first, second = (run(module, check.inputs, check.arguments, seed=seed) for seed in (2, 3))
    except Exception:  # a user's forward may raise anything
        return None
    # Random numbers, and statistics that change in each run, can't be compared.
    is_comparable = all_close(first, second) and not all_close(first, check.output)
    return module if is_comparable else None


def try_inputs(
    module: nn.Module, function: Callable[[nn.Module, torch.Tensor, Mapping[str, object]], _Result]
) -> _Result | str:
    """Return the result of a function that runs a module, with the first random input with which it does not raise.

    Args:
        module: Any module, possibly on the meta device.
        function: Function of a copy of the module in eval mode, in double precision and with random weights, of its
            input, and of its other arguments by name.

    Returns:
        The function's result, or the reason why the module could not be run.
    """
    given = _sample_inputs(module)
    if isinstance(given, str):
        return given
    arguments, tried = given
    try:
        copied = _copy_as_float64(module)
    except RuntimeError as error:  # torch refuses to copy non-leaf tensors in attributes, as weight_norm has
        return f"it cannot be copied ({first_line(error)})"
    reason = ""
    for inputs in tried:
        for further in further_arguments(module, inputs):
            try:
                return function(copied, inputs, {**arguments, **further})
            except Exception as error:  # a user's forward may raise anything
                reason = reason or f"{type(error).__name__}: {first_line(error)}"
    return f"it cannot be run alone on a tensor of (batch, length, features) ({reason})"


def _sample_inputs(module: nn.Module) -> tuple[dict[str, object], Iterator[torch.Tensor]] | str:
    """Return a module's other arguments by name, and inputs to try; or the reason why it cannot be run."""
    try:
        parameters = list(inspect.signature(module.forward).parameters.values())
    except (TypeError, ValueError):
        return "its forward has no signature"
    if not parameters:
        return "its forward takes no input"
    arguments: dict[str, object] = {}
    for parameter in parameters[1:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or parameter.default != parameter.empty:
            continue
        if "mask" not in parameter.name and parameter.name not in (*POSITIONS, *_OTHER_STATES):
            return f"its forward has the further argument {parameter.name!r}, whose value is unknown"
        arguments[parameter.name] = None
    return arguments, _inputs(module)


def _inputs(module: nn.Module) -> Iterator[torch.Tensor]:
    sizes = {feature_sizes(one)[0]: None for one in module.modules() if is_linear(one)}
    generator = torch.Generator().manual_seed(1)
    for size in sizes:
        lengths = dict.fromkeys((_LENGTH, *sizes))  # layers that mix tokens require a fixed number of them
        for shape in (*((_BATCH, length, size) for length in lengths), (_BATCH, size)):
            yield torch.randn(shape, dtype=torch.float64, device="cpu", generator=generator)


POSITIONS = ("position_ids", "cache_position", "position_embeddings")
_OTHER_STATES = ("memory", "encoder_hidden_states")
_ROTARY_SIZES = ("head_dim", "head_size", "attention_head_size", "rotary_ndims", "rotary_dim", "qk_rope_head_dim")


def further_arguments(module: nn.Module, inputs: torch.Tensor) -> Iterator[dict[str, object]]:
    """Yield values of further arguments: another sequence's states alone, and with places of tokens."""
    names = inspect.signature(module.forward).parameters
    generator = torch.Generator().manual_seed(4)
    shape = (inputs.shape[0], _LENGTH + 1, inputs.shape[-1])
    states: dict[str, object] = {
        name: torch.randn(shape, dtype=inputs.dtype, device="cpu", generator=generator)
        for name in _OTHER_STATES
        if name in names and names[name].default is names[name].empty and inputs.ndim > 2
    }
    yield states
    if inputs.ndim < 3:
        return
    numbers = torch.arange(inputs.shape[1])
    given = {"position_ids": numbers[None], "cache_position": numbers}
    found = {**states, **{name: value for name, value in given.items() if name in names}}
    if "position_embeddings" not in names:
        if len(found) > len(states):
            yield found
        return
    sizes = (vars(one).get(name) for one in module.modules() for name in _ROTARY_SIZES)
    for size in dict.fromkeys(size for size in sizes if type(size) is int):
        angles = numbers[None, :, None] * torch.linspace(1, 0.1, size // 2, dtype=inputs.dtype).repeat(2)
        yield {**found, "position_embeddings": (angles.cos(), angles.sin())}


class _AttentionSizes(torch.overrides.TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads: list[int] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204
        name = getattr(func, "__name__", "")
        if name in ("scaled_dot_product_attention", "softmax") and args and isinstance(args[0], torch.Tensor):
            sizes = args[1].shape if name.startswith("scaled") and len(args) > 1 else args[0].shape
            self.num_heads.extend(size[1] for size in (args[0].shape, sizes) if len(size) == 4)
        return func(*args, **(kwargs or {}))


def _copy_as_float64(module: nn.Module) -> nn.Module:
    copies: dict[int, torch.Tensor] = {}
    generator = torch.Generator().manual_seed(0)
    for original in (*module.parameters(), *module.buffers()):
        dtype = torch.float64 if original.dtype.is_floating_point else original.dtype
        copied = torch.empty(original.shape, dtype=dtype, device="cpu")
        if isinstance(original, nn.Parameter):
            scale = max(1, copied.shape[-1]) ** -0.5 if copied.ndim > 1 else 1.0
            values = copied.normal_(generator=generator) * scale if dtype.is_floating_point else copied.fill_(1)
            copied = nn.Parameter(values, requires_grad=False)
        elif original.is_meta or isinstance(original, FakeTensor):
            copied.fill_(1)  # probably a mask
        else:
            copied.copy_(original)
        copies[id(original)] = copied
    return copy.deepcopy(module, dict(copies)).eval()


def run(
    module: nn.Module,
    inputs: torch.Tensor,
    call: Mapping[str, object],
    *,
    seed: int = 2,
    with_grad: bool = False,
) -> list[torch.Tensor]:
    """Return a module's output tensors, with random numbers that depend on the seed only."""
    with torch.set_grad_enabled(with_grad), torch.random.fork_rng(devices=[]), torch.device("cpu"), _no_fused_layers():
        torch.manual_seed(seed)
        output = module(inputs.clone(), **call)
    outputs = output if isinstance(output, (tuple, list)) else [output]
    if not all(one is None or isinstance(one, torch.Tensor) for one in outputs):
        raise TypeError("its output is not a tensor")
    return [one for one in outputs if isinstance(one, torch.Tensor)]


@contextlib.contextmanager
def _no_fused_layers() -> Iterator[None]:
    """Have torch's encoder layers call their linear layers in evaluation, too."""
    is_enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(is_enabled)


def record_calls(
    module: nn.Module, names: Iterable[str], inputs: torch.Tensor, arguments: Mapping[str, object]
) -> tuple[list[torch.Tensor], dict[str, list[tuple[tuple[Any, ...], Any]]]]:
    """Run a module; return its output, and copies of the arguments and output of each call of modules inside of it.

    The arguments are the positional ones; without any, `hidden_states`.
    """
    calls: dict[str, list[tuple[tuple[Any, ...], Any]]] = {}
    with contextlib.ExitStack() as hooks:
        for name in names:

            def record(
                _: nn.Module, given: tuple[Any, ...], named: dict[str, Any], output: Any, name: str = name
            ) -> None:
                if not given and "hidden_states" in named:
                    given = (named["hidden_states"],)
                calls.setdefault(name, []).append((map_tensors(torch.clone, given), map_tensors(torch.clone, output)))

            hooks.callback(module.get_submodule(name).register_forward_hook(record, with_kwargs=True).remove)
        return run(module, inputs, arguments), calls


def adds_up(
    row: nn.Module, blocks: tuple[Block, ...], given: torch.Tensor, output: torch.Tensor, tolerance: float = _TOLERANCE
) -> bool:
    """Return whether the outputs of the shards of a row-parallel layer, and its bias, add up to its output.

    Args:
        row: The layer, unsharded; of torch's own forward this holds.
        blocks: Blocks of its inputs.
        given: A recorded input.
        output: The output for it.
        tolerance: Relative to the largest element.
    """
    owner = next(base for base in type(row).__mro__ if "forward" in vars(base))
    if has_plain_forward(owner) and "forward" not in vars(row):
        return True
    bias, dim = row._parameters.get("bias"), split_dim(row, "rowwise")
    total: torch.Tensor | float = 0.0 if bias is None else bias
    try:
        for rank in range(2):
            local = copy.deepcopy(row)
            weight = sharded_spec(local.get_parameter("weight").shape, dim, blocks, 2, rank)
            local.weight = nn.Parameter(weight.shard(row.get_parameter("weight")), requires_grad=False)
            local.register_parameter("bias", None)
            if "in_features" in vars(local):
                setattr(local, "in_features", local.weight.shape[dim])  # noqa: B010
            own_input = sharded_spec(given.shape, given.ndim - 1, blocks, 2, rank).shard(given)
            total = total + local(own_input)
    except Exception:  # a user's forward may raise anything
        return False
    return isinstance(total, torch.Tensor) and all_close(total, output, tolerance)


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
    kinds = []
    for name, one in module.named_modules():
        plain = [(key, value) for key, value in vars(one).items() if type(value) in (int, float, bool, str)]
        kinds.append((name, type(one), tuple(item for item in plain if "idx" not in item[0])))
    return names, shapes, tuple(kinds)
