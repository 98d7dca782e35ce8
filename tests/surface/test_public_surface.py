"""The public names, signatures and defaults change only on purpose.

Run `python tests/surface/test_public_surface.py` to write public_surface.txt anew, and read the difference.
"""

from __future__ import annotations

import inspect
from pathlib import Path

import booster
import booster.moe
import booster.optim
import booster.plugins
import booster.trainer
from booster.deprecation import DeprecatedAlias

FROZEN = Path(__file__).with_name("public_surface.txt")


def surface() -> str:
    """Returns one line for every public function, class and method."""
    names = {name: getattr(booster, name) for name in booster.__all__}
    names |= {f"plugins.{cls}": getattr(booster.plugins, cls) for _, cls in booster.plugins.BUILT_IN.values()}
    names |= {f"optim.{name}": getattr(booster.optim, name) for name in booster.optim.__all__}
    names |= {f"moe.{name}": getattr(booster.moe, name) for name in booster.moe.__all__}
    others = (name for name in booster.trainer.__all__ if name not in names)
    names |= {f"trainer.{name}": getattr(booster.trainer, name) for name in others}
    return "\n".join(line for name in sorted(names) for line in _lines(name, names[name])) + "\n"


def _lines(name: str, thing: object) -> list[str]:
    if not inspect.isclass(thing):
        return [f"{name}{inspect.signature(thing)}"]  # type: ignore[arg-type]
    lines = [name if issubclass(thing, Exception) else f"{name}{inspect.signature(thing)}"]
    for member, value in sorted(_members(thing).items()):
        if member.startswith("_"):
            continue
        if isinstance(value, property):
            lines.append(f"{name}.{member}")
        elif inspect.isfunction(value):
            lines.append(f"{name}.{member}{inspect.signature(value)}")
        elif isinstance(value, DeprecatedAlias):
            lines.append(f"{name}.{member} (deprecated: {value.name})")
        elif isinstance(value, classmethod):
            lines.append(f"{name}.{member}{inspect.signature(value.__func__)}")
    return lines


def _members(cls: type) -> dict[str, object]:
    """Returns what the class defines, and what its bases do that have no line of their own."""
    shown = {*booster.__all__, *booster.trainer.__all__}
    parts = [base for base in cls.__mro__ if base.__module__.startswith("booster.") and base.__name__ not in shown]
    return {name: value for part in (*reversed(parts), cls) for name, value in vars(part).items()}


def test_the_public_surface_is_the_frozen_one():
    assert surface() == FROZEN.read_text()


if __name__ == "__main__":
    FROZEN.write_text(surface())
