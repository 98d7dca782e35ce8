"""Metadata of one rank's tensor slices: the table that ranks exchange to plan a save."""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from booster.checkpoint_io.planning.byte_runs import Box, whole_box
from booster.interface import TensorSlice, TensorSpec

__all__ = ["SliceTable"]

K = TypeVar("K", bound=Hashable)

_PRIMARY, _SHARED, _WHOLE = 1, 2, 4
_MAX_NUMEL = 2**63 - 1
_DIGIT_ZERO = ord("0")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SliceTable:
    """Slices of one rank as columns, in the rank's order.

    Attributes:
        names: Tensor name of each slice.
        specs: Distinct dtypes and shapes.
        spec_of: Index into `specs` for each slice.
        boxes: Distinct boxes.
        box_of: Index into `boxes` for each slice.
        starts: First element of each slice's span.
        stops: One past the last element of each slice's span.
        is_primary: Whether this rank's copy is the primary one.
        is_shared: Whether all replicas are bitwise equal.
    """

    names: list[str]
    specs: list[TensorSpec]
    spec_of: np.ndarray
    boxes: list[Box]
    box_of: np.ndarray
    starts: np.ndarray
    stops: np.ndarray
    is_primary: np.ndarray
    is_shared: np.ndarray

    @classmethod
    def of(cls, slices: Sequence[TensorSlice]) -> SliceTable:
        """Build the table of these slices."""
        specs: dict[tuple[torch.dtype, tuple[int, ...]], int] = {}
        boxes: dict[Box, int] = {}
        return cls(
            names=[part.name for part in slices],
            spec_of=_integers([_number(specs, (part.dtype, tuple(part.global_shape))) for part in slices]),
            specs=[TensorSpec(shape=shape, dtype=dtype) for dtype, shape in specs],
            box_of=_integers([_number(boxes, part.box) for part in slices]),
            boxes=list(boxes),
            starts=_integers([part.span[0] for part in slices]),
            stops=_integers([part.span[1] for part in slices]),
            is_primary=np.array([part.primary for part in slices], dtype=bool),
            is_shared=np.array([part.shared for part in slices], dtype=bool),
        )

    def __len__(self) -> int:
        return len(self.names)

    def encode(self) -> bytes:
        """Serialize the table as compact JSON; equal tables give equal bytes.

        A slice that is a full tensor takes its name, the index of its dtype and shape, and one digit. Box and span
        follow from the shape, so the columns `box`, `start` and `stop` cover the other slices only.
        """
        is_part = ~self._is_whole()
        used, box_of = np.unique(self.box_of[is_part], return_inverse=True)
        flags = _PRIMARY * self.is_primary + _SHARED * self.is_shared + _WHOLE * ~is_part
        columns = {
            "names": self.names,
            "specs": [[str(spec.dtype).removeprefix("torch."), spec.shape] for spec in self.specs],
            "spec": self.spec_of.tolist(),
            "flags": (flags + _DIGIT_ZERO).astype(np.uint8).tobytes().decode("ascii"),
            "boxes": [self.boxes[number] for number in used.tolist()],
            "box": box_of.tolist(),
            "start": self.starts[is_part].tolist(),
            "stop": self.stops[is_part].tolist(),
        }
        return json.dumps(columns, separators=(",", ":"), check_circular=False).encode("ascii")

    @classmethod
    def decode(cls, raw: bytes) -> SliceTable:
        """Parse the output of `encode`."""
        columns = json.loads(raw)
        specs = [TensorSpec(shape=tuple(shape), dtype=getattr(torch, dtype)) for dtype, shape in columns["specs"]]
        boxes: dict[Box, int] = {}
        numbers = _integers(
            [_number(boxes, tuple((offset, length) for offset, length in pairs)) for pairs in columns["boxes"]]
        )
        whole = _integers([_number(boxes, whole_box(spec.shape)) for spec in specs])
        flags = np.frombuffer(columns["flags"].encode("ascii"), dtype=np.uint8) - _DIGIT_ZERO
        is_part, spec_of = flags & _WHOLE == 0, _integers(columns["spec"])
        box_of, starts = whole[spec_of], np.zeros(len(spec_of), dtype=np.int64)
        stops = _numels(specs)[spec_of]
        box_of[is_part] = numbers[_integers(columns["box"])]
        starts[is_part], stops[is_part] = columns["start"], columns["stop"]
        return cls(
            names=columns["names"],
            specs=specs,
            spec_of=spec_of,
            boxes=list(boxes),
            box_of=box_of,
            starts=starts,
            stops=stops,
            is_primary=flags & _PRIMARY != 0,
            is_shared=flags & _SHARED != 0,
        )

    def _is_whole(self) -> np.ndarray:
        numbers = {box: number for number, box in enumerate(self.boxes)}
        whole = _integers([numbers.get(whole_box(spec.shape), -1) for spec in self.specs])[self.spec_of]
        numel = _numels(self.specs)[self.spec_of]
        is_whole: np.ndarray = (self.box_of == whole) & (self.starts == 0) & (self.stops == numel)
        return is_whole


def _number(numbers: dict[K, int], value: K) -> int:
    return numbers.setdefault(value, len(numbers))


def _numels(specs: Sequence[TensorSpec]) -> np.ndarray:
    # A shape beyond 64 bits is rejected later by the plan, where the tensor's name is known.
    return _integers([min(math.prod(spec.shape), _MAX_NUMEL) for spec in specs])


def _integers(values: Sequence[int]) -> np.ndarray:
    return np.array(values, dtype=np.int64)
