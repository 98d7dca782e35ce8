"""How far a training run is from the serial run, and how far it may be.

Note [Bounds]: low precision has no bound that fits all models. Where the input of a ReLU, or a score of an attention
with large scores, falls to the other side of a rounding, everything after it differs, and OPT and T5 have many of them:
in one process, initial weights that change by less than one fp32 unit in the last place move weights of theirs by 15
times what other models differ by. So a bound has three parts.

1. The fixed one, from the roundings of a model without such amplification. It is the first answer and the usual one.
2. Where a run is beyond it, the measured one: the serial run again, `NUM_NUDGES` times, with initial weights changed at
   random below one unit in the last place. Each tensor may be twice as far from the serial run as the farthest of these
   was; the loss and the norm of a step, in units of the fixed bound, as the farthest in this step and those before.
   Early steps, which amplified nothing yet, stay as narrow as they are.
3. The cap, which no measurement widens.

What it proves: the run lies within the model's own sensitivity to roundings, so that one process whose sums round in
another way is as far. What it does not: that the run has no fault of that size. Faults of the gradient show at the
first step, and those of an update in a tensor that nothing amplified; tests/unit/test_run_distances.py plants them.

A loss scale must not overflow in any of these runs, as steps that are skipped would count as roundings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from .serial_training import Record

NUM_NUDGES = 6
# Above one, because another run may be farther than the farthest of these few.
SPREAD_FACTOR = 2.0

_OF_STEP = " of step "
_TINY = 1e-300
Quantities = dict[str, float]
# The serial run; with a seed, from nudged initial weights.
TrainSerial = Callable[[int | None], Record]


@dataclass(frozen=True)
class Tolerance:
    """Largest relative differences allowed.

    Attributes:
        loss: Of a step's loss.
        norm: Of a step's gradient norm.
        update: Of how far training moved a tensor, in the 2-norm; a tensor that hardly moved may differ by this share
            of a twentieth of the whole model's move: one ReLU whose input rounds to the other side of zero changes the
            few gradients behind it by more than any rounding.
    """

    loss: float
    norm: float
    update: float


def distances(found: Record, serial: Record) -> Quantities:
    """Return how far each loss, norm and tensor of a run is from the serial one's.

    Raises:
        AssertionError: The runs hold other tensors, dtypes or integers, or other numbers of steps.
    """
    pairs = {"loss": (found.losses, serial.losses), "gradient norm": (found.norms, serial.norms)}
    steps = {
        f"{what}{_OF_STEP}{step}": abs(one - other)
        for what, (ours, theirs) in pairs.items()
        for step, (one, other) in enumerate(zip(ours, theirs, strict=True))
    }
    return steps | tensor_distances(found.weights, serial.weights)


def bounds(serial: Record, initial: dict[str, torch.Tensor], tolerance: Tolerance) -> Quantities:
    """Return what `tolerance` allows of `distances`."""
    expected = {"loss": (serial.losses, tolerance.loss), "gradient norm": (serial.norms, tolerance.norm)}
    steps = {
        f"{what}{_OF_STEP}{step}": scalar_bound(value, relative)
        for what, (values, relative) in expected.items()
        for step, value in enumerate(values)
    }
    return steps | tensor_bounds(serial.weights, initial, tolerance.update)


def scalar_bound(expected: float, relative: float) -> float:
    """Return what a relative tolerance allows of a loss or a norm; near zero, what it allows of 0.01."""
    return relative * (abs(expected) + 1e-2)


def tensor_distances(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> Quantities:
    """Return the 2-norms of the differences of floating tensors; others must be equal."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    result = {}
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, f"{name}: {found[name].dtype} instead of {tensor.dtype}"
        if tensor.is_floating_point():
            result[name] = _norm(found[name].double() - tensor.double())
        else:
            assert torch.equal(found[name], tensor), f"{name} differs"
    return result


def tensor_bounds(expected: dict[str, torch.Tensor], initial: dict[str, torch.Tensor], relative: float) -> Quantities:
    """Return what `Tolerance.update` allows of `tensor_distances`."""
    # Counters of batches are in the whole: the bias of a convolution before a BatchNorm moves by roundings alone, which
    # a share of the other weights' move does not cover in bf16.
    moves = {name: _norm(tensor.double() - initial[name].double()) for name, tensor in expected.items()}
    whole = sum(move**2 for move in moves.values()) ** 0.5
    # Weights that are kept in half precision may fall on either side of a rounding boundary.
    return {
        name: relative * max(moves[name], 0.05 * whole) + _norm(tensor.double()) * torch.finfo(tensor.dtype).eps
        for name, tensor in expected.items()
        if tensor.is_floating_point()
    }


def beyond(found: Quantities, allowed: Quantities) -> list[str]:
    """Return what is farther away than allowed, or not finite, as text, the farthest first."""
    factors = {key: distance / max(allowed[key], _TINY) for key, distance in found.items()}
    far = sorted((key for key in found if not found[key] <= allowed[key]), key=lambda key: -factors[key])
    return [f"{key}: {found[key]:.3g} away, allowed {allowed[key]:.3g}" for key in far]


def measured_bounds(serial: Record, nudged: Iterable[Record], fixed: Quantities, cap: Quantities) -> Quantities:
    """Return the bounds of Note [Bounds]: as far as the nudged runs are, never above `cap`."""
    spread = dict.fromkeys(fixed, 0.0)
    for run in nudged:
        spread = {key: max(spread[key], distance) for key, distance in distances(run, serial).items()}
    measured: Quantities = {}
    largest: Quantities = {}
    for key, bound in fixed.items():
        amplification = SPREAD_FACTOR * spread[key] / max(bound, _TINY)
        what, is_of_step, _ = key.partition(_OF_STEP)
        if is_of_step:
            # What a model amplifies in one step it may amplify in any later one, in other runs than these few.
            amplification = largest[what] = max(largest.get(what, 0.0), amplification)
        measured[key] = max(bound, min(amplification * bound, cap[key]))
    return measured


def assert_within_spread(
    found: Record,
    train: TrainSerial,
    initial: dict[str, torch.Tensor],
    fixed: Tolerance,
    cap: Tolerance,
    where: str,
) -> None:
    """Assert that a run is within `fixed` of the serial run, or else within the measured bounds of Note [Bounds]."""
    serial = train(None)
    found_distances, allowed = distances(found, serial), bounds(serial, initial, fixed)
    if not beyond(found_distances, allowed):
        return
    nudged = [train(seed) for seed in range(NUM_NUDGES)]
    assert all(math.isfinite(norm) for run in [serial, *nudged] for norm in run.norms), f"a step overflowed: {where}"
    allowed = measured_bounds(serial, nudged, allowed, bounds(serial, initial, cap))
    far = beyond(found_distances, allowed)
    assert not far, f"{where}, with bounds measured over {NUM_NUDGES} nudged runs: {'; '.join(far)}"


def assert_near_one(
    found: Record, train: TrainSerial, initial: dict[str, torch.Tensor], fixed: Tolerance, where: str
) -> None:
    """Assert that a run is within `fixed` of the serial run, or else of one whose initial weights are nudged.

    For bounds that are caps themselves: not wider where a model amplifies roundings, but around each of the ways that
    a ReLU near zero can go.
    """
    far: list[str] = []
    for seed in (None, *range(NUM_NUDGES)):
        serial = train(seed)
        too_far = beyond(distances(found, serial), bounds(serial, initial, fixed))
        if not too_far:
            return
        far = far or too_far
    raise AssertionError(f"{where}, and not near any of {NUM_NUDGES} nudged runs either: {'; '.join(far)}")


def _norm(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor))
