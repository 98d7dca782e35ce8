"""The examples in docstrings run."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import booster

NAMES = [
    module.name
    for module in pkgutil.walk_packages(booster.__path__, "booster.")
    if module.name != "booster.booster"  # the checkout's root shows the package inside of itself, and that is refused
]


@pytest.mark.parametrize("name", NAMES)
def test_examples(name):
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.failed == 0


def test_the_facade_has_an_example():
    assert doctest.DocTestFinder().find(booster.Booster)[0].examples
