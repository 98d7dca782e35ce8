"""RNG states of this process: seeding, and saving and restoring the states of all global generators."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from .device import current_device, device_type, num_devices
from .errors import CheckpointError, ConfigError

# Note [RNG state]
# A state is a few tensors, all exact. "torch_cpu" has torch's format. "python" holds the version and the 625 numbers of
# `random`, "numpy" the 624 numbers and the position of numpy's global generator; "python_gauss" and "numpy_gauss" hold
# the second half of a pair of normal numbers, or are empty. "<type>", such as "cuda", is this rank's device, whatever
# its index, and "<type>.<index>" every other one that the process sees.
# A rank beyond the stored ones must not draw another rank's numbers, and must draw the same ones at every such load:
# its generators are seeded by a hash of a stored state and its rank.

_NUM_SEEDS = 2**32  # numpy's limit, the narrowest of the three
_TORCH, _PYTHON, _PYTHON_GAUSS, _NUMPY, _NUMPY_GAUSS = "torch_cpu", "python", "python_gauss", "numpy", "numpy_gauss"
_NUMPY_KIND = "MT19937"


def check_seed(seed: int) -> int:
    """Return the seed; raise `ConfigError` unless it is an int in 0 .. 2**32 - 1."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < _NUM_SEEDS:
        raise ConfigError(f"seed={seed!r} is not a seed of numpy's generator: choose an int in 0 .. {_NUM_SEEDS - 1}")
    return seed


def set_seed(seed: int) -> None:
    """Seed Python's `random`, numpy, and torch on the CPU and on every device.

    With equal seeds on all ranks, a model built afterwards has equal weights everywhere.

    Args:
        seed: Int in 0 .. 2**32 - 1.

    Raises:
        ConfigError: The seed is not an int of that range; nothing is seeded.
    """
    check_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)  # seeds the generators of all devices, too


_default_seed = 1024


def set_default_seed(seed: int) -> None:
    """Set the default seed, equal on all ranks: that of the launch."""
    global _default_seed
    _default_seed = check_seed(seed)


def default_seed() -> int:
    """Return the seed of the launch, or 1024 without one."""
    return _default_seed


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Restore the states of Python's `random`, numpy's and torch's CPU generator at the end of the block."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


def get_rng_state(device: torch.device) -> dict[str, torch.Tensor]:
    """Return the states of all global generators of this process as CPU tensors; see Note [RNG state].

    Args:
        device: Device of this rank.

    Raises:
        ConfigError: numpy's global generator was replaced by one of another type.
    """
    state = {_TORCH: torch.get_rng_state(), **_tensors_of(random.getstate(), np.random.get_state(legacy=False))}
    for name, accelerator in _accelerators(device):
        state[name] = torch.get_device_module(accelerator.type).get_rng_state(accelerator).cpu()
    return state


def check_rng_state(state: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Raise if `set_rng_state` would fail.

    Args:
        state: Tensors by name.
        device: Device of this rank.

    Raises:
        CheckpointError: A generator's state is missing or damaged.
    """
    lost = [name for name in (_TORCH, _PYTHON, _PYTHON_GAUSS, _NUMPY, _NUMPY_GAUSS) if name not in state]
    if lost:
        raise CheckpointError(f"the stored random state lacks {', '.join(lost)}: take another copy of the checkpoint")
    try:
        torch.Generator().set_state(state[_TORCH])
        python_state, numpy_state = _states_of(state)
        random.Random().setstate(python_state)  # noqa: S311 - nothing is drawn from it
        np.random.RandomState().set_state(numpy_state)
        for name, accelerator in _accelerators(device):
            if name in state:
                torch.Generator(accelerator).set_state(state[name])
    except (ValueError, TypeError, RuntimeError, IndexError, OverflowError) as error:
        raise CheckpointError(
            f"the stored random state is damaged ({error}): take another copy of the checkpoint"
        ) from None


def set_rng_state(state: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Restore all global generators of this process from a result of `get_rng_state`.

    An accelerator without a stored state, as in a run that moves from the CPU to it, is seeded by a hash of the state.
    Call `check_rng_state` first.

    Args:
        state: Tensors by name.
        device: Device of this rank.
    """
    torch.set_rng_state(state[_TORCH])
    python_state, numpy_state = _states_of(state)
    random.setstate(python_state)
    np.random.set_state(numpy_state)
    for name, accelerator in _accelerators(device):
        stored = state.get(name)
        if stored is None:
            stored = torch.Generator(accelerator).manual_seed(_seed_from(state, name)).get_state()
        torch.get_device_module(accelerator.type).set_rng_state(stored, accelerator)


def fork_rng_state(state: Mapping[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    """Return the state of a rank without a stored one, derived from another rank's state and its rank.

    Args:
        state: Stored state of another rank.
        rank: Rank beyond the stored ones.
    """
    seed = _seed_from(state, f"rank {rank}")
    python = random.Random(seed)  # noqa: S311 - not for secrets
    return {
        _TORCH: torch.Generator().manual_seed(seed).get_state(),
        **_tensors_of(python.getstate(), np.random.RandomState(seed % _NUM_SEEDS).get_state(legacy=False)),
    }


def _seed_from(state: Mapping[str, torch.Tensor], purpose: str) -> int:
    digest = hashlib.blake2b(purpose.encode(), digest_size=8)
    for name in sorted(state):
        digest.update(name.encode())
        digest.update(state[name].contiguous().numpy().tobytes())
    return int.from_bytes(digest.digest(), "little") >> 1


def _accelerators(device: torch.device) -> Iterator[tuple[str, torch.device]]:
    """Yield this process's accelerators, the rank's device first, with their names in a state."""
    kind = device_type()
    if kind == "cpu":
        return
    if device.type != kind and not getattr(torch.get_device_module(kind), "is_initialized", bool)():
        return  # a CPU run on a host with accelerators has not initialized them, nor should saving
    own = device.index if device.type == kind and device.index is not None else current_device().index
    yield kind, torch.device(kind, own)
    for index in range(num_devices()):
        if index != own:
            yield f"{kind}.{index}", torch.device(kind, index)


def _tensors_of(python_state: tuple[Any, ...], numpy_state: Any) -> dict[str, torch.Tensor]:
    """Return the states of Python's and numpy's generator as tensors; `_states_of` reads them."""
    if numpy_state["bit_generator"] != _NUMPY_KIND:
        raise ConfigError(
            f"numpy's global generator is a {numpy_state['bit_generator']}, and checkpoints store the state of a"
            f" {_NUMPY_KIND}: leave np.random unchanged, and save the state of another generator in `extra`"
        )
    version, words, gauss = python_state
    numpy_words, position = numpy_state["state"]["key"], numpy_state["state"]["pos"]
    numpy_gauss = [numpy_state["gauss"]] if numpy_state["has_gauss"] else []
    return {
        _PYTHON: torch.tensor([version, *words], dtype=torch.int64),
        _PYTHON_GAUSS: torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        _NUMPY: torch.tensor([*numpy_words.tolist(), position], dtype=torch.int64),
        _NUMPY_GAUSS: torch.tensor(numpy_gauss, dtype=torch.float64),
    }


def _states_of(state: Mapping[str, torch.Tensor]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the states for `random.setstate` and `np.random.set_state`; inverse of `_tensors_of`."""
    version, *words = state[_PYTHON].tolist()
    python_state = version, tuple(words), _cached_normal(state[_PYTHON_GAUSS])
    *numpy_words, position = state[_NUMPY].tolist()
    if not 0 <= position <= len(numpy_words):  # numpy would read beyond its memory
        raise ValueError(f"numpy's generator has position {position} of {len(numpy_words)} numbers")
    gauss = _cached_normal(state[_NUMPY_GAUSS])
    numpy_key = np.array(numpy_words, dtype=np.uint32)
    return python_state, (_NUMPY_KIND, numpy_key, position, int(gauss is not None), gauss or 0.0)


def _cached_normal(tensor: torch.Tensor) -> float | None:
    if tensor.dim() != 1 or len(tensor) > 1:
        raise ValueError(f"a cached normal number has shape {tuple(tensor.shape)} in place of at most one element")
    return float(tensor[0]) if len(tensor) else None


class ProcessRNG:
    """RNG state of this process, as the interface of checkpoints.

    Args:
        device: Device of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def capture(self) -> dict[str, torch.Tensor]:
        """Return the state; see `get_rng_state`."""
        return get_rng_state(self._device)

    def derive(self, state: Mapping[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
        """Return the state of a rank without a stored one; see `fork_rng_state`."""
        return fork_rng_state(state, rank)

    def check(self, state: Mapping[str, torch.Tensor]) -> None:
        """Raise CheckpointError if the state cannot be restored; see `check_rng_state`."""
        check_rng_state(state, self._device)

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore the generators; see `set_rng_state`."""
        set_rng_state(state, self._device)
