"""Makes sure that the variants of benchmarks/adam/run.py do the same before anyone compares how long they take."""

from __future__ import annotations

import torch
from adam.variants import BASELINES, DEEPSPEED, OUR_PASS, REFERENCE_PASS, Data, variants_of

__all__ = ["wrong_variants"]

_WITH_LESS_WORK = (DEEPSPEED["mixed"], OUR_PASS, REFERENCE_PASS)
_NUMEL, _NUM_TENSORS = 20_011, 3
_RELATIVE, _ABSOLUTE = 1e-6, 1e-9  # a few roundings of a parameter; its change is 1e-5


def wrong_variants(precision: str, *, with_peers: bool = True) -> list[str]:
    """Returns the names of the variants whose step has another result than the baseline's."""
    names = list(variants_of(precision, Data(_NUMEL, _NUM_TENSORS), with_peers=with_peers, with_memory=False))
    comparable = [name for name in names if name not in _WITH_LESS_WORK]
    results = {name: _result_of(name, precision, with_peers) for name in comparable}
    expected = results[BASELINES[precision]]
    return [name for name, result in results.items() if not _are_close(result, expected)]


def _result_of(name: str, precision: str, with_peers: bool) -> list[torch.Tensor]:
    data = Data(_NUMEL, _NUM_TENSORS)
    flats = [data.flat, data.flat_exp_avg, data.flat_exp_avg_sq, data.flat_grad]
    before = [flat.clone() for flat in flats]
    variant = variants_of(precision, data, with_peers=with_peers, with_memory=False)[name]
    for flat, values in zip(flats, before, strict=True):
        flat.copy_(values)  # torch's optimizers took a step to make their states
    variant.step(0)
    if precision == "fp32":
        return flats[:3]
    return [*flats[:3], torch.cat(data.copies), torch.cat(data.half_grads)]


def _are_close(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    pairs = zip(ours, theirs, strict=True)
    # Numbers of 16 bits may be rounded to the other neighbour.
    return all(
        torch.allclose(a, b, rtol=_RELATIVE if a.dtype is torch.float32 else 2.0**-7, atol=_ABSOLUTE) for a, b in pairs
    )
