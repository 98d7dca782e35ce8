"""Optional interfaces are recognized by method names: each has an implementation with the same names and parameters."""

from __future__ import annotations

import importlib
import inspect

import pytest
from import_graph import MODULES

import booster.core.shard_aware as interfaces

PROTOCOLS = [
    one for one in vars(interfaces).values() if inspect.isclass(one) and getattr(one, "_is_runtime_protocol", False)
]


def methods_of(cls):
    return {
        name: list(inspect.signature(value).parameters)
        for name, value in vars(cls).items()
        if inspect.isfunction(value) and not name.startswith("_")
    }


def classes():
    for name in MODULES:
        module = importlib.import_module(name)
        for one in vars(module).values():
            if inspect.isclass(one) and one.__module__ == name and one not in PROTOCOLS:
                yield one


def test_there_are_protocols():
    assert {one.__name__ for one in PROTOCOLS} == {"ShardAware", "NeedsFullStep", "FusedUpdate", "StateAllocator"}


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda one: one.__name__)
def test_a_class_of_the_package_implements_every_protocol(protocol):
    expected = methods_of(protocol)
    assert expected
    found = [
        one
        for one in classes()
        if all(
            callable(method := getattr(one, name, None)) and list(inspect.signature(method).parameters) == parameters
            for name, parameters in expected.items()
        )
    ]
    assert found, f"{protocol.__name__} has methods that no class has: {expected}"
