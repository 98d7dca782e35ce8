"""Configuration files of ColossalAI's engine, as arguments of the Booster that does what they ask for."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from .booster import Booster
from .errors import ConfigError
from .interface import MixedPrecision
from .mixed_precision import FP16ApexMixedPrecision, FP16NaiveMixedPrecision, FP16TorchMixedPrecision
from .registry import plugin_class, plugin_from_name
from .trainer.gradient_handlers import resolve_gradient_handlers
from .validation import is_count, is_number

# Keys with a meaning; other names in upper case are the script's hyperparameters.
KEYS = (
    *("parallel", "fp16", "zero", "clip_grad_norm", "gradient_accumulation", "gradient_handler", "gradient_handlers"),
    *("NUM_MICRO_BATCHES", "NUM_CHUNKS", "TENSOR_SHAPE"),
)
_PRECISIONS: dict[str, type[MixedPrecision]] = {
    "torch": FP16TorchMixedPrecision,
    "naive": FP16NaiveMixedPrecision,
    "apex": FP16ApexMixedPrecision,
}
# Handlers of ColossalAI whose reduction every plugin does by itself.
_OWN_HANDLERS = (
    *("DataParallelGradientHandler", "ZeROGradientHandler", "PipelineSharedModuleGradientHandler"),
    *("MoeGradientHandler", "SequenceParallelGradientHandler"),
)
# Features with other names here.
_REFUSED = {
    "amp": "write fp16=dict(mode='torch')",
    "moe": "write parallel=dict(moe=dict(size=...)), which divides the experts",
    "pipeline": "write parallel=dict(pipeline=...)",
    "tensor": "write parallel=dict(tensor=dict(size=..., mode='1d'))",
    "schedule": "write parallel=dict(pipeline=dict(size=..., pp_style='1f1b'))",
    "cudnn_benchmark": "set torch.backends.cudnn.benchmark in the script",
    "cudnn_deterministic": "set torch.backends.cudnn.deterministic in the script",
    "sync_batchnorm": "leave it out: batch normalization uses the statistics of all ranks by default",
}


@dataclass(slots=True, kw_only=True)
class EngineConfig:
    """What a configuration asks for.

    Attributes:
        plugin: Name of the plugin.
        parallel: Axes of the hybrid plugin, for its `from_config`; None for another plugin.
        arguments: Further arguments of the plugin.
        mixed_precision: Mixed precision of the Booster, or None.
        gradient_accumulation: Number of microbatches per step.
        clip_grad_norm: Maximum gradient norm; 0 for no clipping.
        gradient_handlers: Gradient handlers of the script.
    """

    plugin: str = "torch_ddp"
    parallel: Mapping[str, Any] | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    mixed_precision: MixedPrecision | None = None
    gradient_accumulation: int = 1
    clip_grad_norm: float = 0.0
    gradient_handlers: list[Any] = field(default_factory=list)

    def new_booster(self) -> Booster:
        """Return a Booster that does it. Collective."""
        if self.parallel is None:
            plugin = plugin_from_name(self.plugin, **self.arguments)
        else:
            hybrid: Any = plugin_class(self.plugin)
            plugin = hybrid.from_config(self.parallel, **self.arguments)
        return Booster(plugin=plugin, mixed_precision=self.mixed_precision)

    @property
    def fingerprint(self) -> list[str]:
        """Lines that must be equal on all ranks; the plugin and boost() compare the rest."""
        return [f"{name}={getattr(self, name)!r}" for name in ("plugin", "gradient_accumulation", "clip_grad_norm")]


def read_engine_config(config: Mapping[str, Any]) -> EngineConfig:
    """Return what a configuration of ColossalAI asks for. No communication.

    Args:
        config: Plain dict of the settings. Names in upper case that are not in `KEYS` are the script's.

    Raises:
        ConfigError: A key or a value asks for what cannot happen.
    """
    _check_keys(config)
    found = EngineConfig()
    _read_handlers(config, found)
    _read_parallel(config, found)
    _read_zero(config.get("zero"), found)
    _read_precision(config.get("fp16"), found)
    accumulation, max_norm = config.get("gradient_accumulation", 1), config.get("clip_grad_norm", 0.0)
    if not is_count(accumulation):
        raise ConfigError(
            f"gradient_accumulation={accumulation!r} is not a number of batches: give an int of 1 or more, such as 4"
        )
    if not is_number(max_norm) or max_norm < 0:
        raise ConfigError(f"clip_grad_norm={max_norm!r} is not a norm: give a number above 0, such as 1.0")
    found.gradient_accumulation, found.clip_grad_norm = accumulation, float(max_norm)
    return found


def _check_keys(config: Mapping[str, Any]) -> None:
    for name in config:
        near = difflib.get_close_matches(name, KEYS, n=1, cutoff=0.8)
        if name in _REFUSED:
            raise ConfigError(f"{name}={config[name]!r} is not a feature of the engine: {_REFUSED[name]}")
        if name not in KEYS and near:
            raise ConfigError(
                f"{name}={config[name]!r} is not a feature of the engine, and looks like one: write {near[0]}, or"
                " rename a hyperparameter of your script"
            )
        if name not in KEYS and not name.isupper():
            raise ConfigError(
                f"{name}={config[name]!r} is not a feature of the engine, which are {', '.join(KEYS)}: leave it out, or"
                f" write a hyperparameter of your script in upper case, {name.upper()}"
            )


def _read_handlers(config: Mapping[str, Any], found: EngineConfig) -> None:
    for name in ("gradient_handler", "gradient_handlers"):
        given = config.get(name) or ()
        if isinstance(given, (str, Mapping)):
            raise ConfigError(f"{name}={given!r} is a single handler: write a list, as in [{given!r}]")
        kinds = [(one.get("type") if isinstance(one, Mapping) else one, one) for one in given]
        found.gradient_handlers += [one for kind, one in kinds if kind not in _OWN_HANDLERS]
    resolve_gradient_handlers(found.gradient_handlers)


def _read_parallel(config: Mapping[str, Any], found: EngineConfig) -> None:
    parallel = config.get("parallel") or {}
    if not isinstance(parallel, Mapping):
        raise ConfigError(
            f"parallel={parallel!r} must be a dict of axes: write parallel=dict(pipeline=2, tensor=dict(size=2,"
            " mode='1d'))"
        )
    sizes = {axis: one.get("size", 1) if isinstance(one, Mapping) else one for axis, one in parallel.items()}
    is_hybrid = any(size != 1 for axis, size in sizes.items() if axis != "data")
    if is_hybrid or sizes.get("data", 1) != 1 or set(sizes) - {"data", "pipeline", "tensor", "moe"}:
        found.plugin, found.parallel = "hybrid_parallel", parallel
        found.arguments["precision"] = "fp32"
    _read_pipeline(config, found, has_stages=sizes.get("pipeline", 1) != 1)


def _read_pipeline(config: Mapping[str, Any], found: EngineConfig, *, has_stages: bool) -> None:
    for name, argument in (("NUM_MICRO_BATCHES", "num_microbatches"), ("NUM_CHUNKS", "num_model_chunks")):
        given = config.get(name)
        if given in (None, 1) and not (has_stages and name == "NUM_MICRO_BATCHES" and given == 1):
            continue
        if not has_stages:
            raise ConfigError(
                f"{name}={given!r} has no effect without pipeline stages: leave it out, or write"
                " parallel=dict(pipeline=2); gradient_accumulation sums over batches without stages"
            )
        found.arguments[argument] = given
        if argument == "num_model_chunks":
            found.arguments["pp_style"] = "interleaved"


def _read_zero(zero: Any, found: EngineConfig) -> None:
    if zero is None:
        return
    level = zero.get("level") if isinstance(zero, Mapping) else None
    if level not in (1, 2, 3) or not is_count(level):
        raise ConfigError(
            f"zero={zero!r} names no stage: write zero=dict(level=1) for sharded optimizer states, level=2 for sharded"
            " gradients, too, or level=3 for sharded weights, beside arguments of the plugin, such as"
            " dict(level=2, overlap_communication=True)"
        )
    arguments = {name: value for name, value in zero.items() if name != "level"}
    if found.parallel is not None:
        if level == 3:
            raise ConfigError(
                "zero=dict(level=3) shards weights, which tensor, pipeline and expert parallelism divide otherwise:"
                " write level=1 or 2 beside parallel, or leave parallel out"
            )
        found.arguments |= {"zero_stage": level, **arguments}
        return
    found.plugin = "gemini" if level == 3 else "low_level_zero"
    found.arguments |= {"precision": "fp32", **({} if level == 3 else {"stage": level}), **arguments}


def _read_precision(fp16: Any, found: EngineConfig) -> None:
    if fp16 is None:
        return
    given = dict(fp16) if isinstance(fp16, Mapping) else {}
    mode = given.pop("mode", None)
    mode = getattr(mode, "value", mode) if isinstance(mode, Enum) else mode
    if mode not in _PRECISIONS:
        raise ConfigError(
            f"fp16={fp16!r} names no mode: write fp16=dict(mode='torch'), 'naive' or 'apex', without colossalai's"
            " AMP_TYPE"
        )
    if given.pop("enabled", True) is False:
        return
    if "precision" not in found.arguments:
        try:
            found.mixed_precision = _PRECISIONS[mode](**given)
        except TypeError as error:
            raise ConfigError(
                f"fp16={fp16!r} has an argument that mode {mode!r} lacks ({error}): leave it out, or choose another"
                " mode"
            ) from error
        return
    if mode != "naive":
        raise ConfigError(
            f"fp16=dict(mode={mode!r}) computes by autocast, and with parallel or zero the weights themselves are in"
            " fp16: write fp16=dict(mode='naive')"
        )
    found.arguments |= {"precision": "fp16", **given}
