"""Finds a plugin by name: the built-in ones, and those that other packages register."""

from __future__ import annotations

import difflib
import importlib
import inspect
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from booster.errors import ConfigError
from booster.interface import Plugin

__all__ = ["plugin_class", "plugin_from_name", "plugin_names"]

ENTRY_POINT_GROUP = "booster.plugins"


def plugin_names() -> list[str]:
    """Returns every name that `Booster(plugin=name)` takes."""
    return sorted({*_built_in(), *_registered()})


def plugin_from_name(name: str, **arguments: Any) -> Plugin:
    """Returns a new plugin of that name.

    A built-in name can't be taken over by another package.

    Args:
        name: Of the plugin.
        **arguments: Of its constructor.

    Raises:
        ConfigError: No plugin of that name, what another package registered is no Plugin, or it has no such arguments.
    """
    cls = plugin_class(name)
    try:
        inspect.signature(cls).bind(**arguments)
    except TypeError as error:
        raise ConfigError(
            f"{cls.__name__} can't be made with {', '.join(arguments)}: {error}; it takes"
            f" {', '.join(inspect.signature(cls).parameters)}"
        ) from error
    return cls(**arguments)


def plugin_class(name: str) -> type[Plugin]:
    """Returns the class of a plugin.

    Raises:
        ConfigError: No plugin of that name, or what another package registered is no Plugin.
    """
    if name in _built_in():
        module, class_name = _built_in()[name]
        cls = getattr(importlib.import_module(module), class_name)
    elif name in _registered():
        cls = _registered()[name].load()
    else:
        near = difflib.get_close_matches(name, plugin_names(), n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"plugin={name!r} is not known.{hint} Known plugins: {', '.join(plugin_names())}")
    if not (isinstance(cls, type) and issubclass(cls, Plugin)):
        raise ConfigError(
            f"plugin={name!r} is registered as {cls!r}, which is not a subclass of booster.Plugin: fix the"
            f" {ENTRY_POINT_GROUP!r} entry point of the package that brings it"
        )
    return cls


def _built_in() -> dict[str, tuple[str, str]]:
    # By name, not by import: the facade must not depend on any strategy.
    names: dict[str, tuple[str, str]] = importlib.import_module("booster.plugins").BUILT_IN
    return names


def _registered() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
