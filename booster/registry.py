"""Plugins by name: built-in ones, and those that other packages register."""

from __future__ import annotations

import difflib
import inspect
import re
from collections import Counter
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from . import plugins
from .errors import ConfigError
from .interface import Plugin
from .mixed_precision import mixed_precision_from_name
from .single_device import SingleDevicePlugin

ENTRY_POINT_GROUP = "booster.plugins"
# Other terms for built-in plugins, for hints in errors; words of the plugins' names need no entry.
_OTHER_NAMES = {
    "data": "torch_ddp",
    "tensor": "hybrid_parallel",
    "pipeline": "hybrid_parallel",
    "3d": "hybrid_parallel",
}
# The default arguments of the plugin of a name may be those of another stage.
_PLUGIN_OF_STAGE = {"1": "LowLevelZeroPlugin(stage=1)", "2": "LowLevelZeroPlugin(stage=2)", "3": "GeminiPlugin()"}


def plugin_names() -> list[str]:
    """Return all names that `Booster(plugin=name)` accepts."""
    return sorted({*plugins.BUILT_IN, *_registered()})


def plugin_from_name(name: str, **arguments: Any) -> Plugin:
    """Return a new plugin by name. Another package cannot override a built-in name.

    Args:
        name: Name of the plugin.
        **arguments: Arguments of its constructor.

    Raises:
        ConfigError: The name is unknown, the registered object is not a Plugin, or it has no such arguments.
    """
    check_plugin_arguments(name, arguments)
    return plugin_class(name)(**arguments)


def check_plugin_arguments(name: str, arguments: Mapping[str, Any]) -> None:
    """Check the names of arguments, before a plugin is made.

    Args:
        name: Name of the plugin.
        arguments: Arguments of its constructor.

    Raises:
        ConfigError: The name is unknown, the registered object is not a Plugin, or it has no such arguments.
    """
    cls = plugin_class(name)
    try:
        inspect.signature(cls).bind(**arguments)
    except TypeError as error:
        raise ConfigError(
            f"{cls.__name__} does not accept {', '.join(arguments)}: {error}; use those that it has:"
            f" {', '.join(inspect.signature(cls).parameters)}"
        ) from error


def plugin_with_precision(name: str, precision: Any, /, **arguments: Any) -> Plugin:
    """Return a new plugin by name; a name of a precision is its `precision` argument, if it has one.

    Args:
        name: Name of the plugin.
        precision: Mixed precision of the Booster.
        **arguments: Arguments of the plugin's constructor.

    Raises:
        ConfigError: As by `plugin_from_name`, or the plugin does not have this precision.
    """
    has_argument = "precision" in inspect.signature(plugin_class(name)).parameters
    if has_argument and isinstance(precision, str):
        arguments.setdefault("precision", precision)
    elif isinstance(precision, str) and precision != "fp32" and name in plugins.BUILT_IN:
        mixed_precision_from_name(precision)  # an unknown one is rejected before the plugin makes process groups
    return plugin_from_name(name, **arguments)


def resolve_plugin(plugin: Any, precision: Any, device: Any) -> Plugin:
    """Return the plugin of a Booster's arguments.

    Args:
        plugin: Plugin, name of one, or None for one device.
        precision: Mixed precision of the Booster.
        device: Device of the Booster, optional.

    Raises:
        ConfigError: As by `plugin_with_precision`, or it is not a plugin, or does not run on the device.
    """
    if plugin is None:
        return SingleDevicePlugin(device)
    resolved = plugin_with_precision(plugin, precision) if isinstance(plugin, str) else plugin
    if not isinstance(resolved, Plugin):
        raise ConfigError(
            f"plugin={plugin!r} is a {type(plugin).__name__}, not a Plugin: pass an object such as"
            " TorchDDPPlugin(), not its class, or a name such as 'torch_ddp'"
        )
    if resolved.device.type not in resolved.supported_devices():
        raise ConfigError(
            f"{type(resolved).__name__} supports {', '.join(resolved.supported_devices())}, and the device is"
            f" {resolved.device.type!r}: choose another plugin or launch on another device"
        )
    if device is not None and resolved.control_device():
        raise ConfigError(
            f"device={device!r} was given with {type(resolved).__name__}, which selects the device of every rank: leave"
            " device out"
        )
    return resolved


def plugin_class(name: str) -> type[Plugin]:
    """Return the class of a plugin; raise `ConfigError` if the name is unknown, or the registered object no Plugin."""
    if name in plugins.BUILT_IN:
        cls = getattr(plugins, plugins.BUILT_IN[name][1])  # imports the module of this plugin only
    elif name in _registered():
        cls = _registered()[name].load()
    else:
        meant = _meant(name)
        hint = "" if meant is None else f" Did you mean {meant}?"
        raise ConfigError(f"plugin={name!r} is not known.{hint} Known plugins: {', '.join(plugin_names())}")
    if not (isinstance(cls, type) and issubclass(cls, Plugin)):
        raise ConfigError(
            f"plugin={name!r} is registered as {cls!r}, which is not a subclass of booster.Plugin: fix the"
            f" {ENTRY_POINT_GROUP!r} entry point of the package that brings it"
        )
    return cls


def _meant(name: str) -> str | None:
    """Return what to write in place of an unknown name: the plugin of a ZeRO stage, else the closest known name."""
    stage = re.search(r"zero\D*([123])", name.lower())
    if stage is not None:
        return f"plugin={_PLUGIN_OF_STAGE[stage[1]]}"
    near = _near(name)
    return None if near is None else repr(near)


def _near(name: str) -> str | None:
    """Return the known name closest to an unknown one, by the whole name or a word of it."""
    known = plugin_names()
    count_of_word = Counter(word for one in known for word in one.split("_"))
    candidates = {word: one for one in known for word in one.split("_") if count_of_word[word] == 1}
    candidates |= {word: one for word, one in _OTHER_NAMES.items() if one in known} | {one: one for one in known}
    given = name.lower()
    near = [word for word in re.split(r"[\W_]+", given) if word in candidates] or difflib.get_close_matches(
        given, candidates, n=1
    )
    return candidates[near[0]] if near else None


def _registered() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
