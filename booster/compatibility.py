"""Arguments of ColossalAI that have no counterpart here: taken if what they ask for happens, else an error says why."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

from .comm import check_same_across_ranks
from .errors import ConfigError
from .logger import log_rank_zero
from .validation import is_count

P = ParamSpec("P")
Result = TypeVar("Result")


def _is_off(value: Any) -> bool:
    return value is None or value is False


def _is_flag(value: Any) -> bool:
    return value is None or isinstance(value, bool)


def _is_on(value: Any) -> bool:
    return value is None or value is True


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignArgument:
    """Argument of ColossalAI.

    Attributes:
        is_taken: Predicate: with this value, what it asks for happens.
        reason: What another value asks for, and why that cannot happen.
        instead: What to write instead.
        instead_of_class: Text in place of `instead`, by the name of the class that is constructed.
        remark: Log line for a taken value that has no effect, optional.
        is_remarkable: Predicate: the remark applies to this value.
    """

    is_taken: Callable[[Any], bool]
    reason: str
    instead: str
    instead_of_class: Mapping[str, str] = field(default_factory=dict)
    remark: str = ""
    is_remarkable: Callable[[Any], bool] = lambda value: value is True


def _flag(remark: str = "") -> ForeignArgument:
    """Return an argument of which both values happen."""
    return ForeignArgument(is_taken=_is_flag, reason="is not a bool", instead="leave it out", remark=remark)


_COMPILE = "leave it out, and pass torch.compile(model) to boost(), which fuses them"
_FEWER_BYTES = "leave it out, and for fewer bytes pass communication_dtype=torch.bfloat16, or precision='bf16'"

ARGUMENTS: dict[str, ForeignArgument] = {
    # Plugins.
    "enable_all_optimization": _flag(  # those that there are: flash attention, which runs anyway
        "turns on what there is: flash attention, which models of transformers run by torch's"
        " scaled_dot_product_attention; for fused layers, pass torch.compile(model) to boost()"
    ),
    "enable_flash_attention": _flag(
        "has no effect: models of transformers use torch's scaled_dot_product_attention, which runs flash attention,"
        " unless they are loaded with attn_implementation='eager'"
    ),
    "enable_fused_normalization": ForeignArgument(
        is_taken=_is_off,
        reason="asks for other normalization layers, and models run their own ones here",
        instead=_COMPILE,
    ),
    "enable_jit_fused": ForeignArgument(
        is_taken=_is_off, reason="asks for JIT-fused layers, and models run their own ones here", instead=_COMPILE
    ),
    "enable_sequence_overlap": ForeignArgument(
        is_taken=_is_off,
        reason="asks for matrix products that overlap with the communication of sequences, which is a mode here",
        instead="leave it out, or use HybridParallelPlugin(sequence_parallelism_mode='ring', ...)",
    ),
    "enable_sequence_parallelism": ForeignArgument(
        is_taken=_is_off,
        reason="asks for shards of sequences, which this plugin does not make",
        instead="leave it out, or use HybridParallelPlugin(enable_sequence_parallelism=True, ...)",
    ),
    "fp8_communication": ForeignArgument(
        is_taken=_is_off,
        reason="asks for collectives in fp8, which are not built here",
        instead=_FEWER_BYTES,
        instead_of_class={
            "GeminiPlugin": "leave it out, and for fewer bytes than in fp32 pass precision='bf16'",
            "TorchDDPPlugin": "leave it out, and for fewer bytes pass torch's bf16_compress_hook to"
            " register_comm_hook() of the boosted model",
            "TorchFSDPPlugin": "leave it out, and for fewer bytes pass"
            " mixed_precision=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)",
        },
    ),
    "use_fp8": ForeignArgument(
        is_taken=_is_off,
        reason="asks for layers that compute in fp8, and this plugin has one dtype for weights and computation",
        instead="leave it out, or use Booster(mixed_precision='fp8') with TorchDDPPlugin or TorchFSDPPlugin",
    ),
    "overlap_p2p": _flag(),  # stages send and receive while they compute, so True is what happens
    "scheduler_nodes": ForeignArgument(
        is_taken=lambda value: value is None,
        reason="is a computed schedule, and schedules order their work themselves here",
        instead="leave it out; pp_style='zbv' is the zero-bubble schedule, and pp_style also takes a schedule object",
    ),
    "inner_ring_size": ForeignArgument(
        is_taken=lambda value: value is None,
        reason="asks for ring attention in two nested rings, and keys and values pass around one ring here",
        instead="leave it out",
    ),
    "backward_prefetch": ForeignArgument(
        is_taken=lambda value: value is None,
        reason="asks for another order of all-gathers, which FSDP2 chooses itself",
        instead="leave it out",
    ),
    # Loads.
    "low_cpu_mem_mode": _flag(),  # every load reads parts of files only
    "num_threads": ForeignArgument(
        is_taken=is_count,
        reason="is not a number of threads",
        instead="leave it out",
        remark="has no effect: every rank reads its own parts of the files",
        is_remarkable=lambda value: value != 1,
    ),
    # Optimizers.
    "bias_correction": ForeignArgument(
        is_taken=_is_on,
        reason="asks for moments without bias correction, which this class does not compute",
        instead="use FusedLAMB(bias_correction=False, max_grad_norm=0)",
    ),
    "amsgrad": ForeignArgument(
        is_taken=_is_off,
        reason="asks for AMSGrad, which this class does not compute",
        instead="use torch.optim.AdamW(amsgrad=True)",
    ),
    "set_grad_none": ForeignArgument(
        is_taken=_is_on,
        reason="asks for gradients that stay as tensors of zeros, which is an argument of zero_grad()",
        instead="leave it out, and call optimizer.zero_grad(set_to_none=False)",
    ),
}


def takes_foreign(
    *names: str, call: str | None = None, **aliases: str
) -> Callable[[Callable[P, Result]], Callable[P, Result]]:
    """Return a decorator of constructors that also take arguments of ColossalAI, as keywords.

    Python's errors of other arguments name the class that is constructed, which may inherit the constructor.

    Args:
        names: Names in `ARGUMENTS`.
        call: First comparison of the ranks in the method, with "{}" for the name of the object's class: an error is
            raised there, on all ranks. Optional; by default the method is called by one rank alone.
        **aliases: Name of an argument here, by its name in ColossalAI.
    """

    def decorate(method: Callable[P, Result]) -> Callable[P, Result]:
        owner = method.__qualname__.partition(".")[0]
        signature = inspect.signature(method)

        @functools.wraps(method)
        def taking(*args: P.args, **kwargs: P.kwargs) -> Result:
            given = {name: kwargs.pop(name) for name in names if name in kwargs}
            try:
                check_foreign(given, owner)
            except ConfigError as error:
                if call is not None:
                    check_same_across_ranks(call.format(type(args[0]).__name__), [], error=error)
                raise
            for name in aliases.keys() & kwargs.keys():
                _rename(name, aliases[name], kwargs)
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{type(args[0]).__name__}() {error}") from None
            return method(*args, **kwargs)

        return taking

    return decorate


def _rename(name: str, current: str, arguments: dict[str, Any]) -> None:
    if current in arguments:
        raise ConfigError(f"{name}= and {current}= are one argument, but both were given: leave {name} out")
    arguments[current] = arguments.pop(name)


def check_foreign(given: Mapping[str, Any], owner: str = "") -> None:
    """Check arguments of ColossalAI by name, and log those that have no effect.

    Args:
        given: Values by their names in `ARGUMENTS`.
        owner: Name of the class that is constructed, optional.

    Raises:
        ConfigError: What a value asks for cannot happen.
    """
    for name, value in given.items():
        argument = ARGUMENTS[name]
        if not argument.is_taken(value):
            instead = argument.instead_of_class.get(owner, argument.instead)
            raise ConfigError(f"{name}={value!r} {argument.reason}: {instead}")
    for name, value in given.items():
        argument = ARGUMENTS[name]
        if argument.remark and argument.is_remarkable(value):
            log_rank_zero(f"{name}={value!r} {argument.remark}")
