"""Plugin arguments from the `parallel` dict of a configuration file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from booster.comm import group_size
from booster.errors import ConfigError

__all__ = ["arguments_from_config"]

_MODE = "1d"
_UNSUPPORTED_MODES = ("2d", "2.5d", "3d", "sequence")
_EXAMPLE = "dict(pipeline=dict(size=2, num_microbatches=4), tensor=dict(size=4, mode='1d'))"
_AXES = ("data", "pipeline", "tensor")
_ARGUMENTS = {"pipeline": "pp_size", "tensor": "tp_size"}
_PIPELINE_ARGUMENTS = (
    *("num_microbatches", "microbatch_size", "pp_style", "num_model_chunks", "num_layers_per_stage", "broadcast_loss"),
    *("enable_metadata_cache", "split", "execution_sequence"),
)


def arguments_from_config(config: Mapping[str, Any], extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the plugin's keyword arguments for a configuration.

    An axis is a number of ranks or a dict with `size`, and defaults to 1 rank. `tensor` also has a `mode`, of which
    "1d" (Shoeybi et al., "Megatron-LM", 2019) is supported. `pipeline` may contain the plugin's other pipeline
    arguments under their names. `data` is optional, as it follows from the others.

    Args:
        config: Axis sizes, such as `dict(pipeline=dict(size=2, num_microbatches=4), tensor=dict(size=4, mode="1d"))`.
        extra: Further keyword arguments of the plugin, which are added to the result.

    Raises:
        ConfigError: The configuration is invalid, or contradicts `extra`.

    Collective: no.
    """
    _check_names(config)
    sizes = {axis: _size(axis, config[axis]) for axis in _AXES if axis in config}
    _check_mode(config.get("tensor", 1), sizes.get("tensor", 1))
    _check_data(sizes)
    arguments = {argument: sizes.get(axis, 1) for axis, argument in _ARGUMENTS.items()}
    return _merge(arguments, _pipeline_arguments(config.get("pipeline", 1)), extra or {})


def _check_names(config: Any) -> None:
    if not isinstance(config, Mapping):
        raise ConfigError(
            f"the configuration must be a dict of axes, got {config!r} of type {type(config).__name__}: give a dict,"
            f" such as {_EXAMPLE}"
        )
    unknown = [axis for axis in config if axis not in _AXES]
    if "parallel" in unknown:
        raise ConfigError(
            f"the configuration has the key 'parallel' among {', '.join(map(repr, config))}: give its value, as in"
            " from_config(config['parallel'])"
        )
    if unknown:
        raise ConfigError(
            f"the configuration has {unknown[0]!r}, which is not a parallel axis: choose from"
            f" {', '.join(_AXES)}, as in {_EXAMPLE}; other arguments follow it, as in from_config(config, zero_stage=1)"
        )


def _size(axis: str, given: Any) -> int:
    size = given
    if isinstance(given, Mapping):
        if "size" not in given:
            raise ConfigError(f"{axis}={dict(given)!r} has no 'size': write {axis}={_example(axis)}")
        size = given["size"]
        _check_keys(axis, given)
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ConfigError(f"{axis}={given!r} is not a number of ranks: give a positive integer, as in {axis}=2")
    return size


def _check_keys(axis: str, given: Mapping[str, Any]) -> None:
    # Unsupported modes may have further keys; the error about the mode comes first.
    if axis == "tensor" and given.get("mode") != _MODE:
        return
    known = ("size", *{"tensor": ("mode",), "pipeline": _PIPELINE_ARGUMENTS}.get(axis, ()))
    for key in given:
        if key not in known:
            raise ConfigError(
                f"{axis}={dict(given)!r} has the unknown key {key!r}: write {axis}={_example(axis)}"
                + (f" (its keys are {', '.join(known)})" if axis == "pipeline" else "")
            )


def _example(axis: str) -> str:
    examples = {"tensor": "dict(size=4, mode='1d')", "pipeline": "dict(size=2, num_microbatches=4)"}
    return examples.get(axis, "dict(size=2)")


def _pipeline_arguments(given: Any) -> dict[str, Any]:
    return {name: given[name] for name in _PIPELINE_ARGUMENTS if name in given} if isinstance(given, Mapping) else {}


def _check_mode(given: Any, size: int) -> None:
    mode = given.get("mode") if isinstance(given, Mapping) else None
    if mode is None and size > 1:
        raise ConfigError(
            f"tensor={_shown(given)} shards layers over {size} ranks but has no mode: write"
            f" tensor=dict(size={size}, mode='1d')"
        )
    if mode in _UNSUPPORTED_MODES:
        raise ConfigError(
            f"tensor={_shown(given)}: mode {mode!r} is not supported yet: use mode='1d'"
            + (", or sequence_parallelism_mode='ring_attn' with sp_size, as arguments" if mode == "sequence" else "")
        )
    if mode not in (None, _MODE):
        raise ConfigError(
            f"tensor={_shown(given)}: mode {mode!r} is unknown: use mode='1d' ({', '.join(_UNSUPPORTED_MODES)} are not"
            " supported yet)"
        )


def _shown(given: Any) -> str:
    return repr(dict(given) if isinstance(given, Mapping) else given)


def _check_data(sizes: Mapping[str, int]) -> None:
    if "data" not in sizes:
        return
    others, world_size = sizes.get("pipeline", 1) * sizes.get("tensor", 1), group_size()
    if sizes["data"] * others != world_size:
        raise ConfigError(
            f"data={sizes['data']} times pipeline={sizes.get('pipeline', 1)} and tensor={sizes.get('tensor', 1)} is"
            f" {sizes['data'] * others} ranks, but the world size is {world_size}: leave data out, as it follows from"
            " the others"
        )


def _merge(arguments: dict[str, Any], pipeline_arguments: dict[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    for name, argument in _ARGUMENTS.items():
        if argument in extra:
            raise ConfigError(
                f"{argument}={extra[argument]!r} was given in addition to {name!r}={arguments[argument]} of the"
                f" configuration: leave {argument} out"
            )
    for name, value in pipeline_arguments.items():
        if name in extra:
            raise ConfigError(
                f"{name}={extra[name]!r} was given in addition to {value!r} in the configuration's 'pipeline': leave one"
                " of them out"
            )
    return arguments | pipeline_arguments | dict(extra)
