"""The plugin's arguments from the `parallel` dict of a configuration file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from booster.comm import group_size
from booster.errors import ConfigError

__all__ = ["arguments_from_config"]

_MODE = "1d"
_LATER_MODES = ("2d", "2.5d", "3d", "sequence")
_EXAMPLE = "dict(pipeline=dict(size=2, num_microbatches=4), tensor=dict(size=4, mode='1d'))"
_AXES = ("data", "pipeline", "tensor")
_ARGUMENTS = {"pipeline": "pp_size", "tensor": "tp_size"}
_OF_PIPELINE = (
    *("num_microbatches", "microbatch_size", "pp_style", "num_model_chunks", "num_layers_per_stage", "broadcast_loss"),
    *("enable_metadata_cache", "split", "execution_sequence"),
)


def arguments_from_config(config: Mapping[str, Any], more: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns the keyword arguments of the plugin that a configuration stands for.

    An axis is a number of ranks or a dict with `size`; one that is left out has 1 rank. `tensor` has a `mode`, too:
    "1d" (Shoeybi et al., "Megatron-LM", 2019) is the one there is. `pipeline` may hold the plugin's other arguments of
    stages, under their names. `data` is worked out, and checked where it is given. No communication.

    Args:
        config: As in `dict(pipeline=dict(size=2, num_microbatches=4), tensor=dict(size=4, mode="1d"))`.
        more: Further keyword arguments of the plugin, which are returned as well.

    Raises:
        ConfigError: The configuration can't be, or says something else than `more`.
    """
    _check_names(config)
    sizes = {axis: _size(axis, config[axis]) for axis in _AXES if axis in config}
    _check_mode(config.get("tensor", 1), sizes.get("tensor", 1))
    _check_data(sizes)
    arguments = {argument: sizes.get(axis, 1) for axis, argument in _ARGUMENTS.items()}
    return _joined(arguments, _of_pipeline(config.get("pipeline", 1)), more or {})


def _check_names(config: Any) -> None:
    if not isinstance(config, Mapping):
        raise ConfigError(
            f"the configuration {config!r} is of type {type(config).__name__}, which names no axes: give a dict,"
            f" such as {_EXAMPLE}"
        )
    unknown = [axis for axis in config if axis not in _AXES]
    if "parallel" in unknown:
        raise ConfigError(
            f"the configuration has the key 'parallel' among {', '.join(map(repr, config))}: give what is below it, as"
            " in from_config(config['parallel'])"
        )
    if unknown:
        raise ConfigError(
            f"the configuration has {unknown[0]!r}, which is no axis that ranks are divided along: choose from"
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
        raise ConfigError(f"{axis}={given!r} has no number of ranks: give a whole number from 1, as in {axis}=2")
    return size


def _check_keys(axis: str, given: Mapping[str, Any]) -> None:
    # Modes that come later have further keys: what is said of the mode is said first.
    if axis == "tensor" and given.get("mode") != _MODE:
        return
    known = ("size", *{"tensor": ("mode",), "pipeline": _OF_PIPELINE}.get(axis, ()))
    for key in given:
        if key not in known:
            raise ConfigError(
                f"{axis}={dict(given)!r} has {key!r}, which means nothing there: write {axis}={_example(axis)}"
                + (f" (its keys are {', '.join(known)})" if axis == "pipeline" else "")
            )


def _example(axis: str) -> str:
    examples = {"tensor": "dict(size=4, mode='1d')", "pipeline": "dict(size=2, num_microbatches=4)"}
    return examples.get(axis, "dict(size=2)")


def _of_pipeline(given: Any) -> dict[str, Any]:
    return {name: given[name] for name in _OF_PIPELINE if name in given} if isinstance(given, Mapping) else {}


def _check_mode(given: Any, size: int) -> None:
    mode = given.get("mode") if isinstance(given, Mapping) else None
    if mode is None and size > 1:
        raise ConfigError(
            f"tensor={_shown(given)} splits layers over {size} ranks and does not say how: write"
            f" tensor=dict(size={size}, mode='1d')"
        )
    if mode in _LATER_MODES:
        raise ConfigError(
            f"tensor={_shown(given)}: mode {mode!r} comes in a later version: use mode='1d'"
            + (", or sequence_parallelism_mode='ring_attn' with sp_size, as arguments" if mode == "sequence" else "")
        )
    if mode not in (None, _MODE):
        raise ConfigError(
            f"tensor={_shown(given)}: mode {mode!r} is not known: use mode='1d' ({', '.join(_LATER_MODES)} come in a"
            " later version)"
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
            f" {sizes['data'] * others} ranks, and there are {world_size}: leave data out, as it is worked out from the"
            " others"
        )


def _joined(arguments: dict[str, Any], of_pipeline: dict[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    for name, argument in _ARGUMENTS.items():
        if argument in more:
            raise ConfigError(
                f"{argument}={more[argument]!r} was given beside the configuration, whose {name!r} says"
                f" {arguments[argument]}: leave {argument} out"
            )
    for name, value in of_pipeline.items():
        if name in more:
            raise ConfigError(
                f"{name}={more[name]!r} was given beside the configuration, whose 'pipeline' says {value!r}: leave one"
                " of them out"
            )
    return arguments | of_pipeline | dict(more)
