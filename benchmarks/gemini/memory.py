"""What a rank needs by the theory of ZeRO-3 with chunks, beside what it really holds, for benchmarks/gemini/run.py."""

from __future__ import annotations

import torch
from _harness.gpt import GPT, SIZES
from _harness.pair import Comparison
from gemini.engines import BASELINE, FLOOR, GEMINI, KEPT, PREFETCH, STATIC, STATIC_HYBRID
from zero.memory import Formula, MemoryRow, num_parameters
from zero.memory import formula_of as zero_formula_of

__all__ = ["formula_of", "memory_rows", "payload_elements"]

_MEBI = 2**20
# fp32: weights, gradient sums, moments. bf16: weights, gradient sums, master and moments.
_BYTES = {"fp32": (4, 4, 8), "bf16": (2, 2, 12)}


def payload_elements(size: str, chunk_size_m: float) -> int:
    """Returns the least elements of the largest chunk's payload: a parameter larger than a chunk makes chunks larger.

    Args:
        size: Name of the model.
        chunk_size_m: Least elements of a chunk, in units of 2**20.
    """
    with torch.device("meta"):
        largest = max(parameter.numel() for parameter in GPT(SIZES[size]).parameters())
    return max(int(chunk_size_m * _MEBI), largest)


def formula_of(name: str, precision: str, N: int, P: int, payload: int) -> Formula | None:
    """Returns what an engine needs by its theory; None where it has no simple one.

    ZeRO-3 needs 16 bytes a weight over P ranks (Rajbhandari et al., arXiv:1910.02054, section 5), the payloads of the
    chunk in use and of those fetched ahead, and one of gradients that are reduced.

    Args:
        name: Of the engine.
        precision: "fp32" or "bf16".
        N: Weights of the model.
        P: Ranks that share them.
        payload: Elements of a gathered chunk.
    """
    if name in (BASELINE, FLOOR):
        return zero_formula_of(name, precision, N, P)
    if name not in (STATIC, STATIC_HYBRID, KEPT, PREFETCH):
        return None  # what lies in the other tier has buffers that no paper fixes
    weight_bytes, gradient_bytes, state_bytes = _BYTES[precision]
    num_gathered = 1 + GEMINI[name].arguments.get("max_prefetch", 0)
    is_kept = name == KEPT
    return Formula(
        weights=weight_bytes * N if is_kept else weight_bytes * N // P,
        gradients=gradient_bytes * N // P,
        states=state_bytes * N // P,
        buffers=weight_bytes * payload * (1 if is_kept else num_gathered + 1),
    )


def memory_rows(
    comparison: Comparison, size: str, precision: str, activations: int, chunk_size_m: float
) -> list[MemoryRow]:
    """Returns a row for every measured engine that has a formula."""
    N, P = num_parameters(size), comparison.world.size
    payload = min(N, payload_elements(size, chunk_size_m))
    rows = []
    for engine in comparison.engines:
        formula = formula_of(engine.name, precision, N, P, payload)
        if formula is not None and engine.memory is not None:
            peak = engine.memory.step_peak
            rows.append(MemoryRow(name=engine.name, formula=formula, activations=activations, peak=peak))
    return rows
