"""Options of the plugin and their checks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch

from booster.comm import group_size
from booster.errors import ConfigError
from booster.plugins.base import arguments_of
from booster.plugins.sharding.config import DTYPES, ShardedConfig, ZeroConfig
from booster.validation import check_flag, is_count, is_non_nan_number

from .activation_checkpointing import GradientCheckpointConfig, parse_checkpoint_config
from .expert_parallel.dispatch import Capacity
from .expert_parallel.plan import EXPERT_STYLE
from .mesh import AXES, EXPERT_AXES
from .pipeline_parallel.config import PipelineArguments
from .tensor_parallel_nd.grid import GRID_MODES, TensorGridShape

# The first two shard the tokens over the tp axis wherever its ranks would hold the same activations; Korthikanti et
# al., "Reducing Activation Recomputation in Large Transformer Models", MLSys 2023. The others shard the tokens over a
# separate sp axis, which communicates in attention: by exchanging heads for tokens (Jacobs et al., "DeepSpeed Ulysses",
# 2023), or by passing keys and values in a ring (Liu et al., "Ring Attention with Blockwise Transformers", 2023).
_TP_AXIS_MODES = ("split_gather", "ring")
_SP_AXIS_MODES: tuple[Literal["all_to_all", "ring_attn"], ...] = ("all_to_all", "ring_attn")
SEQUENCE_MODES = _TP_AXIS_MODES + _SP_AXIS_MODES

TENSOR_MODES = ("1d", *GRID_MODES)

_FLAGS = (
    *("enable_sequence_parallelism", "parallel_output", "dp_outside", "broadcast_buffers", "find_unused_parameters"),
    *("check_reduction", "gradient_as_bucket_view", "static_graph", "drop_tokens", "overlap_shared_experts"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridConfig(ShardedConfig):
    """Options of `HybridParallelPlugin` by their names there, where they are documented."""

    tp_size: int
    sp_size: int | None
    zero_stage: int
    enable_sequence_parallelism: bool
    sequence_parallelism_mode: str | None
    parallel_output: bool
    plan: Mapping[str, Any] | None
    custom_policy: Mapping[str, Any] | None
    make_vocab_size_divisible_by: int
    dp_outside: bool
    ddp_bucket_cap_mb: float
    find_unused_parameters: bool
    check_reduction: bool
    gradient_as_bucket_view: bool
    static_graph: bool
    zero_bucket_size_in_m: float
    cpu_offload: bool
    communication_dtype: torch.dtype | None
    overlap_communication: bool
    overlap_allgather: bool
    cast_inputs: bool
    gradient_checkpoint_config: GradientCheckpointConfig | Mapping[str, Any] | bool | None
    stages: PipelineArguments
    ep_size: int
    capacity_factor: float | None
    min_capacity: int
    drop_tokens: bool
    overlap_shared_experts: bool
    tp_mode: str
    tp_depth: int | None
    extra_axes: Mapping[str, int] | None

    # Derived values; valid after `check`.

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        return self.communication_dtype

    @property
    def sequence_mode(self) -> str | None:
        """One of `SEQUENCE_MODES`, resolved if omitted, or None if sequences are unsharded."""
        if not self.enable_sequence_parallelism:
            return None
        return self.sequence_parallelism_mode or "split_gather"

    @property
    def tp_axis_mode(self) -> str | None:
        """The sequence mode if it uses the tp axis, otherwise None."""
        return self.sequence_mode if self.sequence_mode in _TP_AXIS_MODES else None

    @property
    def sp_axis_mode(self) -> Literal["all_to_all", "ring_attn"] | None:
        """The sequence mode if it uses the sp axis, otherwise None."""
        own: dict[str | None, Literal["all_to_all", "ring_attn"]] = {one: one for one in _SP_AXIS_MODES}
        return own.get(self.sequence_mode)

    @property
    def tensor_grid(self) -> TensorGridShape | None:
        """Arrangement of the tensor-parallel ranks, or None for the mode "1d" and unsharded layers."""
        if self.tp_mode == "1d" or self.tp_size == 1:
            return None
        return TensorGridShape.of(self.tp_mode, self.tp_size, self.tp_depth)

    @property
    def given_plan(self) -> Mapping[str, Any] | None:
        """The user's plan, from `plan` or `custom_policy`, or None."""
        return self.custom_policy if self.plan is None else self.plan

    @property
    def layer_plan(self) -> Mapping[str, Any] | None:
        """The user's plan without its modules of experts, or None if nothing is left of it."""
        given = self.given_plan or {}
        return {name: style for name, style in given.items() if style != EXPERT_STYLE} or None

    @property
    def capacity(self) -> Capacity | None:
        """Number of rows for each expert, or None for as many as there are."""
        if self.capacity_factor is None:
            return None
        return Capacity(factor=self.capacity_factor, minimum=self.min_capacity, drops=self.drop_tokens)

    @property
    def checkpointing(self) -> GradientCheckpointConfig | None:
        """Config of activation checkpointing, or None if no layer is recomputed."""
        given = self.gradient_checkpoint_config
        return None if given is None else parse_checkpoint_config(given, self.pp_size)

    @property
    def pp_size(self) -> int:
        """Number of pipeline stages."""
        return self.stages.pp_size

    @property
    def pipeline(self) -> PipelineArguments | None:
        """Arguments of pipeline parallelism, or None with a single stage."""
        return self.stages if self.pp_size > 1 else None

    def axis_sizes(self, world_size: int) -> dict[str, int]:
        """Return the number of ranks along each axis; dp is the remaining factor."""
        sizes = {"pp": self.pp_size, "sp": (self.sp_size or 1) if self.sp_axis_mode else 1, "tp": self.tp_size}
        return {"dp": world_size // math.prod((*sizes.values(), *(self.extra_axes or {}).values()))} | sizes

    def remarks(self) -> list[str]:
        """Return log lines about defaults that were chosen and arguments without effect."""
        lines = []
        if self.enable_sequence_parallelism and self.sequence_parallelism_mode is None:
            lines.append(
                f"enable_sequence_parallelism=True without a mode: using"
                f" sequence_parallelism_mode={self.sequence_mode!r}, which shards the tokens over the tp_size ranks"
            )
        return lines + self.stages.remarks()

    # Checks.

    def check(self, world_size: int) -> None:
        for name in _FLAGS:
            check_flag(name, getattr(self, name))
        self._check_counts()
        self._check_extra_axes()
        self.stages.check()
        self._check_sequence_parallelism()
        self._check_tensor_grid()
        self._check_world(world_size)
        self._check_capacity()
        self._check_plan()
        self._check_gradients()
        self.zero().check(world_size)
        parse_checkpoint_config(self.gradient_checkpoint_config, self.pp_size)

    def _check_counts(self) -> None:
        for name in ("tp_size", "pp_size", "sp_size", "ep_size"):
            if not (is_count(getattr(self, name)) or (name == "sp_size" and self.sp_size is None)):
                raise ConfigError(
                    f"{name}={getattr(self, name)!r} is not a number of ranks: give a positive integer"
                    f"{', or None' * (name == 'sp_size')}"
                )
        if not is_count(self.make_vocab_size_divisible_by):
            raise ConfigError(
                f"make_vocab_size_divisible_by must be a positive integer, got {self.make_vocab_size_divisible_by!r}:"
                " give a multiple for the size of the vocabulary, such as 64"
            )

    def _check_extra_axes(self) -> None:
        example = "give a dict of names and numbers of ranks, such as {'replica': 2}, or leave it out"
        if not isinstance(self.extra_axes, Mapping | None):
            raise ConfigError(f"extra_axes={self.extra_axes!r} must be a dict: {example}")
        for name, size in (self.extra_axes or {}).items():
            if not isinstance(name, str) or not name.isidentifier() or not is_count(size):
                raise ConfigError(f"extra_axes has {name!r}: {size!r}, which is not an axis: {example}")
            if name in (*AXES, *EXPERT_AXES):
                raise ConfigError(
                    f"extra_axes has {name!r}, which is an axis of the plugin: give another name, or {name}_size"
                    " for the size of the plugin's"
                )

    def _check_sequence_parallelism(self) -> None:
        mode = self.sequence_parallelism_mode
        if mode is not None and mode not in SEQUENCE_MODES:
            raise ConfigError(
                f"sequence_parallelism_mode={mode!r} is unknown: choose one of {', '.join(SEQUENCE_MODES)}, or None"
            )
        if not self.enable_sequence_parallelism:
            self._check_no_sequence_arguments()
        elif mode is None:
            self._check_default_mode()
        elif mode in _TP_AXIS_MODES:
            self._check_tensor_axis(mode)
        elif self.sp_size is None or self.sp_size < 2:
            raise ConfigError(
                f"sequence_parallelism_mode={mode!r} with sp_size={self.sp_size} has no ranks to shard a sequence over:"
                " give sp_size=2 or more, in addition to tp_size"
            )

    def _check_no_sequence_arguments(self) -> None:
        if self.sequence_parallelism_mode is not None:
            raise ConfigError(
                f"sequence_parallelism_mode={self.sequence_parallelism_mode!r} has no effect while"
                " enable_sequence_parallelism=False: set enable_sequence_parallelism=True, or leave the mode out"
            )
        if self.sp_size not in (None, 1):
            raise ConfigError(
                f"sp_size={self.sp_size} has no effect while enable_sequence_parallelism=False: set"
                " enable_sequence_parallelism=True and sequence_parallelism_mode='all_to_all' or 'ring_attn', or leave"
                " sp_size out"
            )

    def _check_default_mode(self) -> None:
        if self.sp_size not in (None, 1):
            raise ConfigError(
                f"enable_sequence_parallelism=True with sp_size={self.sp_size} needs a mode: give"
                " sequence_parallelism_mode='all_to_all' or 'ring_attn', which use sp_size ranks besides tp_size, or"
                " 'split_gather' or 'ring', which use the tp_size ranks and need no sp_size"
            )
        if self.tp_size == 1:
            raise ConfigError(
                f"enable_sequence_parallelism=True with tp_size=1 and sp_size={self.sp_size} has no ranks to shard a"
                " sequence over: give tp_size=2 or more, or sequence_parallelism_mode='all_to_all' with sp_size=2"
            )

    def _check_tensor_axis(self, mode: str) -> None:
        if self.tp_size == 1:
            raise ConfigError(
                f"sequence_parallelism_mode={mode!r} with tp_size=1 has no ranks to shard a sequence over, as this mode"
                " uses the tensor-parallel ranks: give tp_size=2 or more, or choose 'all_to_all' or 'ring_attn' with"
                " sp_size=2"
            )
        if self.sp_size not in (None, self.tp_size):
            raise ConfigError(
                f"sequence_parallelism_mode={mode!r} with sp_size={self.sp_size} and tp_size={self.tp_size}: this mode"
                " shards a sequence over the tensor-parallel ranks: leave sp_size out"
            )

    def _check_tensor_grid(self) -> None:
        if self.tp_mode not in TENSOR_MODES:
            raise ConfigError(f"tp_mode={self.tp_mode!r} is unknown: choose one of {', '.join(TENSOR_MODES)}")
        if self.tp_depth is not None and not is_count(self.tp_depth):
            raise ConfigError(
                f"tp_depth={self.tp_depth!r} is not a number of squares of ranks: give a positive integer, or None"
            )
        if self.tp_mode != "2.5d" and self.tp_depth is not None:
            raise ConfigError(
                f"tp_depth={self.tp_depth} has no meaning with tp_mode={self.tp_mode!r}: leave it out, or use"
                " tp_mode='2.5d'"
            )
        if self.tensor_grid is None:
            return
        own = next((name for name in self.extra_axes or {} if name in self.tensor_grid.axes), None)
        if own is not None:
            raise ConfigError(
                f"extra_axes has {own!r}, which is an axis of tp_mode={self.tp_mode!r}: give another name"
            )
        if self.sequence_mode is not None:
            raise ConfigError(
                f"tp_mode={self.tp_mode!r} divides activations by examples and features, and"
                f" sequence_parallelism_mode={self.sequence_mode!r} by tokens: use one of them, and tp_mode='1d' with"
                " sequence parallelism"
            )
        if self.ep_size > 1:
            raise ConfigError(
                f"ep_size={self.ep_size} has experts get tokens of all features, which tp_mode={self.tp_mode!r}"
                " divides: use tp_mode='1d' with expert parallelism"
            )

    def _check_world(self, world_size: int) -> None:
        sizes = {f"{axis}_size": size for axis, size in self.axis_sizes(1).items() if axis != "dp"}
        sizes |= self.extra_axes or {}
        needed = math.prod(sizes.values())
        if world_size % needed:
            named = " x ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1)
            divisors = [str(size) for size in range(1, world_size + 1) if world_size % size == 0]
            raise ConfigError(
                f"{named} needs groups of {needed} ranks, which do not divide world_size={world_size}: choose sizes"
                f" whose product is one of {', '.join(divisors)}, or start a multiple of {needed} ranks"
            )
        dp_size = world_size // needed
        if dp_size % self.ep_size:
            divisors = [str(size) for size in range(1, dp_size + 1) if dp_size % size == 0]
            raise ConfigError(
                f"ep_size={self.ep_size} does not divide the {dp_size} data-parallel ranks, which share the experts:"
                f" choose one of {', '.join(divisors)}, or start other numbers of ranks"
            )

    def _check_capacity(self) -> None:
        factor = self.capacity_factor
        if factor is not None and (not is_non_nan_number(factor) or not 0 < factor < float("inf")):
            raise ConfigError(
                f"capacity_factor={factor!r} gives an expert no token: give a positive number, such as 1.25, or None to"
                " drop no token"
            )
        if not is_count(self.min_capacity):
            raise ConfigError(
                f"min_capacity={self.min_capacity!r} is not a number of tokens: give 1 or more, such as 4"
            )
        if self.ep_size == 1 and factor is not None:
            raise ConfigError(
                f"capacity_factor={factor} has no effect with ep_size=1, where each rank computes its tokens with its"
                " own experts: give an ep_size of 2 or more, or leave it out"
            )
        if factor is None and not self.drop_tokens:
            raise ConfigError(
                "drop_tokens=False has no effect without a capacity_factor, as then no token is dropped: leave it out,"
                " or give a capacity_factor, such as 1.25"
            )

    def _check_plan(self) -> None:
        if self.plan is not None and self.custom_policy is not None:
            raise ConfigError(
                "plan= and custom_policy= are aliases of one argument, but both were given: leave custom_policy out"
            )
        plan = self.given_plan
        is_plan = isinstance(plan, Mapping) and all(isinstance(name, str) for name in plan)
        if plan is not None and not is_plan:
            raise ConfigError(
                f"plan={plan!r} is not a tensor-parallel plan: give a dict of module names to styles, such as"
                " {'layers.*.mlp.up_proj': 'colwise', 'layers.*.mlp.down_proj': 'rowwise'}, or leave it out"
            )
        if plan is not None and not plan:
            name = "custom_policy" if self.plan is None else "plan"
            raise ConfigError(f"{name}={{}} names no module: name modules, or leave {name} out, and a plan is found")

    def _check_gradients(self) -> None:
        if not isinstance(self.precision, str):
            raise ConfigError(f"precision={self.precision!r} is unknown: choose one of {', '.join(DTYPES)}")
        if (
            not isinstance(self.zero_stage, int)
            or isinstance(self.zero_stage, bool)
            or self.zero_stage not in (0, 1, 2)
        ):
            raise ConfigError(
                f"zero_stage={self.zero_stage!r} is not a stage of this plugin: give 0 to shard nothing, 1 to shard"
                " optimizer states over the data-parallel ranks, or 2 to shard gradients too; GeminiPlugin and"
                " TorchFSDPPlugin also shard parameters"
            )
        if self.zero_stage == 2 and self.pp_size > 1:
            raise ConfigError(
                f"zero_stage=2 with pp_size={self.pp_size} would reduce gradients after every microbatch, which"
                " multiplies the communication of zero_stage=1 by the number of microbatches, and cannot free the"
                " gradients of tied weights earlier: give zero_stage=1, which shards optimizer states as well"
            )
        examples = {"ddp_bucket_cap_mb": "MiB, such as 25", "zero_bucket_size_in_m": "2**20 elements, such as 12"}
        for name, example in examples.items():
            size = getattr(self, name)
            if not is_non_nan_number(size) or not 0 < size < float("inf"):
                raise ConfigError(f"{name} must be a positive number, got {size!r}: give a size in {example}")

    def zero(self) -> ZeroConfig:
        """Return the equivalent options of ZeRO, whose checks apply here as well.

        Without ZeRO the shards are those of a group of one rank, and a bucket has `ddp_bucket_cap_mb` MiB of fp32.
        """
        given = {name: getattr(self, name) for name in (field.name for field in fields(self))}
        bucket_size = self.ddp_bucket_cap_mb if self.zero_stage == 0 else self.zero_bucket_size_in_m
        own = {"stage": max(1, self.zero_stage), "reduce_bucket_size_in_m": bucket_size, "extra_dp_size": 1}
        return arguments_of(ZeroConfig, given | own)


_EXAMPLE = "dict(pipeline=dict(size=2, num_microbatches=4), tensor=dict(size=4, mode='1d'))"
_AXIS_EXAMPLES = {
    "data": "dict(size=2)",
    "pipeline": "dict(size=2, num_microbatches=4)",
    "tensor": "dict(size=4, mode='1d')",
    "moe": "dict(size=2)",
}
# Arguments of the plugin by axis of a configuration and key of its dict.
_AXIS_ARGUMENTS: Mapping[str, Mapping[str, str]] = {
    "data": {},
    "pipeline": {("size" if one.name == "pp_size" else one.name): one.name for one in fields(PipelineArguments)},
    "tensor": {"size": "tp_size", "mode": "tp_mode", "depth": "tp_depth"},
    "moe": {
        "size": "ep_size",
        **{name: name for name in ("capacity_factor", "min_capacity", "drop_tokens", "overlap_shared_experts")},
    },
}


def arguments_from_config(config: Mapping[str, Any], extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the plugin's keyword arguments for a configuration.

    An axis is a number of ranks or a dict with `size`, and defaults to 1 rank. `tensor` also has a `mode`, one of
    `TENSOR_MODES`, and with "2.5d" a `depth`. `pipeline` may contain the plugin's other pipeline
    arguments under their names. `data` is optional, as it follows from the others. `moe` is the number of
    data-parallel ranks that share the experts, with the arguments of their capacity.

    Args:
        config: Axis sizes, such as `dict(pipeline=dict(size=2, num_microbatches=4), tensor=dict(size=4, mode="1d"))`.
        extra: Further keyword arguments of the plugin, which are added to the result.

    Raises:
        ConfigError: The configuration is invalid, or contradicts `extra`.

    Collective: no.
    """
    _check_names(config)
    extra = extra or {}
    sizes = {axis: _size(axis, config[axis]) for axis in _AXIS_ARGUMENTS if axis in config}
    _check_mode(config.get("tensor", 1), sizes.get("tensor", 1))
    _check_data(sizes, extra)
    found: dict[str, tuple[str, Any]] = {"pp_size": ("pipeline", 1), "tp_size": ("tensor", 1)}
    for axis, size in sizes.items():
        given = {**config[axis], "size": size} if isinstance(config[axis], Mapping) else {"size": size}
        for key, argument in _AXIS_ARGUMENTS[axis].items():
            if key in given and not (axis == "tensor" and given[key] is None):
                found[argument] = (axis, given[key])
    for argument, (axis, value) in found.items():
        if argument in extra:
            where = f"{value!r} in the configuration's {axis!r}: leave one of them out"
            if argument == _AXIS_ARGUMENTS[axis]["size"]:
                where = f"{axis!r}={value} of the configuration: leave {argument} out"
            raise ConfigError(f"{argument}={extra[argument]!r} was given in addition to {where}")
    return {argument: value for argument, (_, value) in found.items()} | dict(extra)


def _check_names(config: Any) -> None:
    if not isinstance(config, Mapping):
        raise ConfigError(
            f"the configuration must be a dict of axes, got {config!r} of type {type(config).__name__}: give a dict,"
            f" such as {_EXAMPLE}"
        )
    unknown = [axis for axis in config if axis not in _AXIS_ARGUMENTS]
    if "parallel" in unknown:
        raise ConfigError(
            f"the configuration has the key 'parallel' among {', '.join(map(repr, config))}: give its value, as in"
            " from_config(config['parallel'])"
        )
    if unknown:
        raise ConfigError(
            f"the configuration has {unknown[0]!r}, which is not a parallel axis: choose from"
            f" {', '.join(_AXIS_ARGUMENTS)}, as in {_EXAMPLE}; other arguments follow it, as in from_config(config,"
            " zero_stage=1)"
        )


def _size(axis: str, given: Any) -> int:
    size = given
    if isinstance(given, Mapping):
        if "size" not in given:
            raise ConfigError(f"{axis}={dict(given)!r} has no 'size': write {axis}={_AXIS_EXAMPLES[axis]}")
        size = given["size"]
        _check_keys(axis, given)
    if not is_count(size):
        raise ConfigError(f"{axis}={given!r} is not a number of ranks: give a positive integer, as in {axis}=2")
    return size


def _check_keys(axis: str, given: Mapping[str, Any]) -> None:
    # Unknown modes may have further keys; the error about the mode comes first.
    if axis == "tensor" and given.get("mode") not in TENSOR_MODES:
        return
    known = ["size", *(key for key in _AXIS_ARGUMENTS[axis] if key != "size")]
    if axis == "tensor" and given["mode"] != "2.5d":
        known.remove("depth")
    for key in given:
        if key not in known:
            raise ConfigError(
                f"{axis}={dict(given)!r} has the unknown key {key!r}: write {axis}={_AXIS_EXAMPLES[axis]}"
                + (f" (its keys are {', '.join(known)})" if axis in ("pipeline", "moe") else "")
            )


def _check_mode(given: Any, size: int) -> None:
    mode = given.get("mode") if isinstance(given, Mapping) else None
    shown = repr(dict(given) if isinstance(given, Mapping) else given)
    if mode is None and size > 1:
        raise ConfigError(
            f"tensor={shown} shards layers over {size} ranks but has no mode: write tensor=dict(size={size}, mode='1d')"
        )
    if mode == "sequence":  # of the documents
        raise ConfigError(
            f"tensor={shown}: mode 'sequence' shards sequences, not layers: use mode='1d', or"
            " sequence_parallelism_mode='ring_attn' with sp_size, as arguments"
        )
    if mode not in (None, *TENSOR_MODES):
        raise ConfigError(f"tensor={shown}: mode {mode!r} is unknown: use one of {', '.join(TENSOR_MODES)}")


def _check_data(sizes: Mapping[str, int], extra: Mapping[str, Any]) -> None:
    if "data" not in sizes:
        return
    others = {axis: sizes.get(axis, 1) for axis in ("pipeline", "tensor")} | dict(extra.get("extra_axes") or {})
    if extra.get("sequence_parallelism_mode") in _SP_AXIS_MODES:
        others["sp_size"] = extra.get("sp_size") or 1
    product, world_size = sizes["data"] * math.prod(others.values()), group_size()
    if product != world_size:
        factors = " and ".join(f"{axis}={size}" for axis, size in others.items())
        raise ConfigError(
            f"data={sizes['data']} times {factors} is {product} ranks, but the world size is {world_size}: leave data"
            " out, as it follows from the others"
        )
