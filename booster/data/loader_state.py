"""A loader's state as JSON has it: reading and writing of the part that is not plain, and the check of the rest."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import torch

from booster.errors import ConfigError

__all__ = ["decode_state", "encode_state"]


def encode_state(plain: dict[str, Any], generator: torch.Generator | None) -> dict[str, Any]:
    """The plain entries, and the generator's state as text if there is one."""
    if generator is None:
        return plain
    return plain | {"generator": base64.b64encode(bytes(generator.get_state().tolist())).decode("ascii")}


def decode_state(
    state: Mapping[str, Any], expected: set[str], *, has_generator: bool
) -> tuple[Mapping[str, Any], torch.Tensor | None]:
    """The state, checked, and the generator's state in it.

    Raises:
        ConfigError: entries are missing, the position is no number of at least 0, or only one of state and loader
            has a generator.
    """
    missing = sorted(expected - set(state))
    if missing:
        raise ConfigError(
            f"a loader state without {', '.join(missing)} (it has {', '.join(sorted(map(str, state))) or 'nothing'}): "
            "it is not of this kind of loader; pass what state_dict() of a loader made with the same "
            "distributed_sampler_cls (or without one) returned"
        )
    for key in sorted(expected & {"epoch", "samples_consumed", "batches_consumed"}):
        if not isinstance(state[key], int) or state[key] < 0:
            raise ConfigError(f"a loader state with {key}={state[key]!r}: it counts from 0; pass an unchanged state")
    if has_generator != ("generator" in state):
        raise ConfigError(
            f"a loader state with{'out' if has_generator else ''} a generator for a loader "
            f"with{'' if has_generator else 'out'} one: the run would draw other numbers; make the loader with the "
            "same `generator` argument as when the state was saved"
        )
    return state, _decode_generator(state["generator"]) if has_generator else None


def _decode_generator(text: str) -> torch.Tensor:
    return torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8)
