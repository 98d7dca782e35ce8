"""Every source of random numbers of this process: one seed for all of them, and their states to save and restore."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from booster.device import current_device, device_type, num_devices
from booster.errors import CheckpointError, ConfigError

__all__ = [
    "ProcessRandomState",
    "capture_random_state",
    "check_random_state",
    "check_seed",
    "default_seed",
    "derive_random_state",
    "restore_random_state",
    "set_default_seed",
    "set_seed",
]

# Note [Random state]
# A state is a few tensors, all exact: "torch_cpu" is torch's own form. "python" holds the version and the 625 numbers
# of `random`, "numpy" the 624 numbers and the position of numpy's global generator; "python_gauss" and "numpy_gauss"
# hold the second half of a pair of normal numbers, or nothing. "<kind>", such as "cuda", is this rank's own device,
# whatever its number is here, and "<kind>.<number>" every other one that the process sees.
# A rank beyond the stored ones must not draw what another rank draws, and must draw the same at every such load: its
# generators are seeded by a hash of a stored state and its own number.

_NUM_SEEDS = 2**32  # numpy's limit, the narrowest of the three
_TORCH, _PYTHON, _PYTHON_GAUSS, _NUMPY, _NUMPY_GAUSS = "torch_cpu", "python", "python_gauss", "numpy", "numpy_gauss"
_NUMPY_KIND = "MT19937"


def check_seed(seed: int) -> int:
    """Returns the seed if every source of random numbers takes it.

    Raises:
        ConfigError: It is no whole number in 0 .. 2**32 - 1.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < _NUM_SEEDS:
        raise ConfigError(
            f"seed={seed!r} does not fit numpy's generator: choose a whole number in 0 .. {_NUM_SEEDS - 1}"
        )
    return seed


def set_seed(seed: int) -> None:
    """Seeds Python's `random`, numpy, and torch on the CPU and on every device, all with the same number.

    The same on all ranks, so that a model built after it has the same weights everywhere.

    Args:
        seed: 0 .. 2**32 - 1.

    Raises:
        ConfigError: The seed is no whole number of that range; nothing is seeded then.
    """
    check_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)  # reaches the generators of all devices too


_default_seed = 1024


def set_default_seed(seed: int) -> None:
    """Sets the seed of what is given none, the same on all ranks: that of the launch."""
    global _default_seed
    _default_seed = check_seed(seed)


def default_seed() -> int:
    """Returns the seed of the launch; 1024 where nothing was launched."""
    return _default_seed


def capture_random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """Returns the state of every global generator of this process, as tensors on the CPU; see Note [Random state].

    Args:
        device: The device that this rank computes on.

    Raises:
        ConfigError: numpy's global generator was exchanged for one of another kind.
    """
    state = {_TORCH: torch.get_rng_state(), **_python_tensors(random.getstate()), **_numpy_tensors(np.random)}
    for name, accelerator in _accelerators(device):
        state[name] = torch.get_device_module(accelerator.type).get_rng_state(accelerator).cpu()
    return state


def check_random_state(state: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Raises if `restore_random_state` could not take the state.

    Args:
        state: The tensors by name.
        device: The device that this rank computes on.

    Raises:
        CheckpointError: A generator's state is missing or damaged.
    """
    lost = [name for name in (_TORCH, _PYTHON, _PYTHON_GAUSS, _NUMPY, _NUMPY_GAUSS) if name not in state]
    if lost:
        raise CheckpointError(f"the stored random state lacks {', '.join(lost)}: take another copy of the checkpoint")
    try:
        torch.Generator().set_state(state[_TORCH])
        random.Random().setstate(_python_state(state))  # noqa: S311 - nothing is drawn from it
        np.random.RandomState().set_state(_numpy_state(state))
        for name, accelerator in _accelerators(device):
            if name in state:
                torch.Generator(accelerator).set_state(state[name])
    except (ValueError, TypeError, RuntimeError, IndexError, OverflowError) as error:
        raise CheckpointError(
            f"the stored random state is damaged ({error}): take another copy of the checkpoint"
        ) from None


def restore_random_state(state: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Puts every global generator of this process into a state that `capture_random_state` returned.

    An accelerator that had none, as in a run that moves from the CPU to it, is seeded by a hash of the state. Call
    `check_random_state` first.

    Args:
        state: The tensors by name.
        device: The device that this rank computes on.
    """
    torch.set_rng_state(state[_TORCH])
    random.setstate(_python_state(state))
    np.random.set_state(_numpy_state(state))
    for name, accelerator in _accelerators(device):
        stored = state.get(name)
        if stored is None:
            stored = torch.Generator(accelerator).manual_seed(_seed_from(state, name)).get_state()
        torch.get_device_module(accelerator.type).set_rng_state(stored, accelerator)


def derive_random_state(state: Mapping[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    """Returns the state of a rank that stored none: fixed by another rank's state and its own number.

    Args:
        state: What a stored rank had.
        rank: The number of the rank that is beyond the stored ones.
    """
    seed = _seed_from(state, f"rank {rank}")
    python = random.Random(seed)  # noqa: S311 - a training run's numbers, no secrets
    return {
        _TORCH: torch.Generator().manual_seed(seed).get_state(),
        **_python_tensors(python.getstate()),
        **_numpy_tensors(np.random.RandomState(seed % _NUM_SEEDS)),
    }


def _seed_from(state: Mapping[str, torch.Tensor], purpose: str) -> int:
    digest = hashlib.blake2b(purpose.encode(), digest_size=8)
    for name in sorted(state):
        digest.update(name.encode())
        digest.update(state[name].contiguous().numpy().tobytes())
    return int.from_bytes(digest.digest(), "little") >> 1


def _accelerators(device: torch.device) -> Iterator[tuple[str, torch.device]]:
    """Yields this process's accelerators, its own first, with their names in a state."""
    kind = device_type()
    if kind == "cpu":
        return
    if device.type != kind and not getattr(torch.get_device_module(kind), "is_initialized", bool)():
        return  # a run on the CPU of a machine with accelerators: it has not touched them, nor should saving
    own = device.index if device.type == kind and device.index is not None else current_device().index
    yield kind, torch.device(kind, own)
    for index in range(num_devices()):
        if index != own:
            yield f"{kind}.{index}", torch.device(kind, index)


def _python_tensors(state: tuple[Any, ...]) -> dict[str, torch.Tensor]:
    version, words, gauss = state
    return {
        _PYTHON: torch.tensor([version, *words], dtype=torch.int64),
        _PYTHON_GAUSS: torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
    }


def _python_state(state: Mapping[str, torch.Tensor]) -> tuple[int, tuple[int, ...], float | None]:
    version, *words = state[_PYTHON].tolist()
    return version, tuple(words), _waiting(state[_PYTHON_GAUSS])


def _numpy_tensors(source: Any) -> dict[str, torch.Tensor]:
    state = source.get_state(legacy=False)
    if state["bit_generator"] != _NUMPY_KIND:
        raise ConfigError(
            f"numpy's global generator is a {state['bit_generator']}, and checkpoints hold the state of a"
            f" {_NUMPY_KIND}: leave np.random as it is, and keep the state of a generator of your own in `extra`"
        )
    words, position = state["state"]["key"], state["state"]["pos"]
    return {
        _NUMPY: torch.tensor([*words.tolist(), position], dtype=torch.int64),
        _NUMPY_GAUSS: torch.tensor([state["gauss"]] if state["has_gauss"] else [], dtype=torch.float64),
    }


def _numpy_state(state: Mapping[str, torch.Tensor]) -> tuple[str, np.ndarray[Any, Any], int, int, float]:
    *words, position = state[_NUMPY].tolist()
    if not 0 <= position <= len(words):  # numpy itself would read beyond its memory
        raise ValueError(f"numpy's generator stands at {position} of {len(words)} numbers")
    gauss = _waiting(state[_NUMPY_GAUSS])
    return _NUMPY_KIND, np.array(words, dtype=np.uint32), position, int(gauss is not None), gauss or 0.0


def _waiting(tensor: torch.Tensor) -> float | None:
    if tensor.dim() != 1 or len(tensor) > 1:
        raise ValueError(f"{tuple(tensor.shape)} normal numbers wait, and one does at most")
    return float(tensor[0]) if len(tensor) else None


class ProcessRandomState:
    """This process's generators, as a checkpoint engine asks for them.

    Args:
        device: The device that this rank computes on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def capture(self) -> dict[str, torch.Tensor]:
        """Returns the state; see `capture_random_state`."""
        return capture_random_state(self._device)

    def derive(self, state: Mapping[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
        """Returns the state of a rank that stored none; see `derive_random_state`."""
        return derive_random_state(state, rank)

    def check(self, state: Mapping[str, torch.Tensor]) -> None:
        """Raises CheckpointError if the state can't be restored; see `check_random_state`."""
        check_random_state(state, self._device)

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Puts the generators into the state; see `restore_random_state`."""
        restore_random_state(state, self._device)
