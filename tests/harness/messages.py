"""What parent and worker say to each other. Values travel as pickle: both ends are processes of this test run."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.failures import RankFailure
from harness.reference import FunctionReference


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """Asks a rank to make a process group with the others, before a job for which none is there.

    Apart from the job, whose timeout is for the test and not for the start of processes on a busy machine.
    """

    store_path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """The answer: the group stands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One function call on every rank of a pool.

    Attributes:
        function: what to call.
        arguments: pickled `(args, kwargs)`; opened after the function's module is imported, which may define them.
        timeout: seconds after which the parent fails the test.
    """

    function: FunctionReference
    arguments: bytes
    timeout: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned:
    """A rank's normal end: the pickled result."""

    result: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Settle:
    """Asks a rank to clean up after a job, once all ranks have returned.

    Not earlier: a rank that closes its connections while another is still making some would fail that one.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """The answer: whether the rank's process group can serve the next job."""

    is_group_reusable: bool


Request = Join | Job | Settle
Reply = Joined | Returned | Settled | RankFailure


def pack_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """Returns the call's arguments as bytes.

    Raises:
        TypeError: an argument can't be pickled; the message names it.
    """
    for name, value in [*enumerate(args), *kwargs.items()]:
        try:
            pickle.dumps(value)
        except Exception as error:
            raise TypeError(
                f"argument {name!r} ({type(value).__name__}) can't be sent to other ranks: {error}. "
                "Pass plain values (numbers, paths, tensors, dataclasses) and build the rest on the rank."
            ) from error
    return pickle.dumps((tuple(args), dict(kwargs)))
