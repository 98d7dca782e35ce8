"""Initialisers of torch that look at what they draw: recorded as one call each."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from booster.lazy_init.arguments import are_ordinary
from booster.lazy_init.recorder import Recorder
from booster.lazy_init.storage import record_of

__all__ = ["whole_initialisers"]

# Note [Rejection loops]: trunc_normal_ draws until no value is out of bounds (torch 2.13; older ones drew once). Call
# by call, every look at the values would be a replay of all rounds before. What it leaves depends on its arguments,
# the generator and the tensor's geometry alone, so the whole function is one call of the record.
_NAME = "_no_grad_trunc_normal_"  # what every way to nn.init.trunc_normal_ ends in, also names imported before


@contextmanager
def whole_initialisers(recorder: Recorder) -> Iterator[None]:
    """Makes torch's initialisers that look at values tell the recorder about lazy tensors, and run on others."""
    original = getattr(nn.init, _NAME, None)
    if original is None:
        yield
        return
    setattr(nn.init, _NAME, _recorded(original, recorder))
    try:
        yield
    finally:
        setattr(nn.init, _NAME, original)


def _recorded(original: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    def quiet(*args: Any, **kwargs: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the build has shown them
            original(*args, **kwargs)

    def fill(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        arguments = ((tensor, *args), kwargs)
        if type(tensor) not in (torch.Tensor, nn.Parameter) or record_of(tensor) is None or not are_ordinary(arguments):
            return original(tensor, *args, **kwargs)
        recorder.record_fill(original, arguments, quiet)
        return tensor

    return fill
