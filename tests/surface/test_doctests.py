"""The examples in docstrings run."""

from __future__ import annotations

import doctest
import importlib

from import_graph import MODULES

import booster


def test_examples():
    for name in MODULES:
        result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
        assert result.failed == 0, name


def test_the_facade_has_an_example():
    assert doctest.DocTestFinder().find(booster.Booster)[0].examples
