"""What tests call: `run_ranks` for a function, `@distributed` for a whole test."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from simulated_cuda import device as simulated_device

from harness.failures import RanksFailed
from harness.forkserver import SIMULATED, Device, job_device
from harness.messages import pack_arguments
from harness.pool import run_on_fresh_ranks, run_on_live_ranks
from harness.reference import BODY_ATTRIBUTE, reference_to

_DEFAULT_TIMEOUT_SECONDS = 60.0


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = _DEFAULT_TIMEOUT_SECONDS,
    fresh: bool = False,
    device: Device | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Returns what `fn(*args, **kwargs)` returned on every rank, by rank.

    Each rank is a process with an initialised gloo default group of `world_size` ranks, with RANK, WORLD_SIZE,
    LOCAL_RANK and LOCAL_WORLD_SIZE set, and with all generators seeded by 0. Ranks live on between jobs, so what `fn`
    leaves in its own modules stays; environment, directory and process groups are put back.

    Args:
        fn: a function of a module, not a closure.
        world_size: number of ranks.
        *args: positional arguments of `fn`, the same on all ranks.
        timeout: seconds until ranks that still run are asked for their stacks and killed.
        fresh: take new processes. Needed where a rank ends its process or breaks the group on purpose.
        device: "simulated_cuda" gives each rank a CUDA device in host memory, and a default group of "nccl"; see
            `simulated_cuda`. A job in which a fault was seen fails. Where it can't be used the test is skipped.
            "shared_gpu" gives all ranks the first GPU, and the default group of `harness.shared_gpu`;
            "simulated_shared_gpu" does so with the simulated device. By default
            "cpu", or what `pytest --device` says where the test is marked `on_device`.
        **kwargs: keyword arguments of `fn`.

    Raises:
        RanksFailed: a rank raised, died or was too late. The message has all ranks, the first real error first.
        TypeError: `fn` or an argument can't be sent to another process.
    """
    __tracebackhide__ = True
    return _run(fn, world_size, args, kwargs, timeout, fresh, device)


def distributed(
    world_size: int | Sequence[int] = 4,
    *,
    timeout: float = _DEFAULT_TIMEOUT_SECONDS,
    fresh: bool = False,
    device: Device | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Runs the body of a test on all ranks of a process group.

    Parameters and fixtures work as in any test where their values can be pickled, as `tmp_path` can. A body that has
    an argument `world_size` gets the number of ranks.

    Args:
        world_size: number of ranks; several of them make one test case each.
        timeout: seconds until ranks that still run are asked for their stacks and killed.
        fresh: take new processes, for a test that ends one or breaks the group on purpose.
        device: device of the ranks, as of `run_ranks`.
    """
    sizes = [world_size] if isinstance(world_size, int) else list(world_size)

    def decorate(body: Callable[..., Any]) -> Callable[..., None]:
        signature = inspect.signature(body)
        passes_size = "world_size" in signature.parameters
        has_cases = passes_size or len(sizes) > 1

        @functools.wraps(body)
        def test(*args: Any, **fixtures: Any) -> None:
            __tracebackhide__ = True
            size = fixtures["world_size"] if has_cases else sizes[0]
            if not passes_size:
                fixtures.pop("world_size", None)
            _run(body, size, args, fixtures, timeout, fresh, device)

        setattr(test, BODY_ATTRIBUTE, body)
        if not has_cases:
            return test
        if not passes_size:  # pytest looks at the signature for what to pass
            test.__signature__ = _with_world_size(signature)  # type: ignore[attr-defined]
        return pytest.mark.parametrize("world_size", sizes)(test)

    return decorate


def _with_world_size(signature: inspect.Signature) -> inspect.Signature:
    extra = inspect.Parameter("world_size", inspect.Parameter.KEYWORD_ONLY)
    return signature.replace(parameters=[*signature.parameters.values(), extra])


def _run(
    fn: Callable[..., Any],
    world_size: int,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    timeout: float,
    fresh: bool,
    device: Device | None,
) -> list[Any]:
    __tracebackhide__ = True
    device = device or job_device()
    if device in SIMULATED and (reason := simulated_device.problem()) is not None:
        pytest.skip(reason)
    run = run_on_fresh_ranks if fresh else run_on_live_ranks
    function, arguments = reference_to(fn), pack_arguments(args, kwargs)
    try:
        return run(world_size, function, arguments, timeout, device)
    except RanksFailed as failed:
        if failed.first.kind == "skipped":
            pytest.skip(f"rank {failed.first.rank}: {failed.first.summary}")
        raise
