"""What a training step costs on an accelerator: waits of the host for the device, and collectives, for every plugin.

Each case also trains as one process does, without a report of the device; docs/development.md has the table. Measured
on the simulated device with `drops_avoidable_waits`, so that no accidental wait hides one that is missing.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
from device_costs import measure
from harness import preload, run_ranks
from parity import Case, assert_parallel_equals_serial
from zoo import TRANSFORMERS_MODULES

preload(*TRANSFORMERS_MODULES)

CHUNKS = {"chunk_config_dict": {"chunk_size": 4096}}
OFFLOADED = {"offload_optim_frac": 1.0, "offload_param_frac": 1.0, "placement_policy": "static", **CHUNKS}
STAGES = {"pp_size": 2, "num_microbatches": 4}
SP = {"enable_sequence_parallelism": True}
ZERO_STEP = {"reduce_scatter_tensor": 1, "all_reduce": 1, "all_gather_into_tensor": 1}  # one bucket, and the norm


@dataclass(frozen=True)
class Expected:
    """A case, with its waits of the host and its collectives of the device per step, on the rank that has most."""

    plugin: str
    arguments: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    syncs: int = 0
    collectives: dict[str, int] = field(default_factory=dict)

    def row(self, name: str) -> str:
        """Return the case as a row of the documentation's table."""
        collectives = [f"{number} {one}" for one, number in sorted(self.collectives.items())]
        return f"| {name} | yes | 0 | {self.syncs} | {', '.join(collectives)} |"


BF16, FP16 = {"precision": "bf16", "optimizer": "hybrid_adam"}, {"precision": "fp16", "optimizer": "hybrid_adam"}
FOUR_SAMPLES = {"samples_per_rank": 4}
CHUNKED, DEEP = {"num_model_chunks": 2}, {"num_layers": 4, **BF16, **FOUR_SAMPLES}


def _counts(gathers: int = 0, scatters: int = 0, reductions: int = 0, **others: int) -> dict[str, int]:
    found = {"all_gather_into_tensor": gathers, "all_reduce": reductions, "reduce_scatter_tensor": scatters, **others}
    return {name: number for name, number in found.items() if number}


EXPECTED = {
    "ddp": Expected("torch_ddp", collectives=_counts(0, 0, 1)),
    "zero 1": Expected("low_level_zero", {"stage": 1}, BF16, 0, ZERO_STEP),
    "zero 1, overlap_allgather": Expected(
        "low_level_zero", {"stage": 1, "overlap_allgather": True}, BF16, 0, ZERO_STEP
    ),
    "zero 2": Expected("low_level_zero", {"stage": 2}, BF16, 0, ZERO_STEP),
    # Whether the step is skipped.
    "zero 2, fp16": Expected("low_level_zero", {"stage": 2}, FP16, 1, ZERO_STEP),
    # The gradients' arrival in host memory; the norm is the host's.
    "zero 2, offloaded": Expected("low_level_zero", {"stage": 2, "cpu_offload": True}, BF16, 1, _counts(1, 1)),
    # One chunk is gathered ahead by default on an accelerator.
    "gemini": Expected("gemini", CHUNKS, BF16, 0, _counts(11, 7, 1)),
    "gemini, fp16": Expected("gemini", CHUNKS, FP16, 1, _counts(11, 7, 1)),
    "gemini, max_prefetch=0": Expected("gemini", {"max_prefetch": 0, **CHUNKS}, BF16, 0, _counts(12, 7, 1)),
    "gemini, offloaded": Expected("gemini", OFFLOADED, BF16, 1, _counts(12, 7)),
    "gemini, offloaded, max_prefetch=0": Expected("gemini", {"max_prefetch": 0, **OFFLOADED}, BF16, 1, _counts(13, 7)),
    # As with everything offloaded: gradients travel in backward, and the host waits for nothing else.
    "gemini, states offloaded": Expected("gemini", {"offload_optim_frac": 1.0, **CHUNKS}, BF16, 1, _counts(12, 7)),
    "fsdp": Expected("torch_fsdp", collectives=_counts(5, 3, 1)),
    "fsdp, SHARD_GRAD_OP": Expected("torch_fsdp", {"sharding_strategy": "SHARD_GRAD_OP"}, collectives=_counts(3, 3, 1)),
    "fsdp, bf16": Expected("torch_fsdp", {}, {"precision": "fsdp_bf16_fp32_reduce"}, 0, _counts(5, 3, 1)),
    "fsdp, offloaded": Expected("torch_fsdp", {"cpu_offload": True}, {}, 1, _counts(5, 3)),
    "tensor": Expected("hybrid_parallel", {"tp_size": 2}, BF16, 0, _counts(0, 0, 9)),
    "data, zero 1": Expected("hybrid_parallel", {"zero_stage": 1}, BF16, 0, _counts(22, 22, 1)),
    "split_gather": Expected(
        "hybrid_parallel", {"tp_size": 2, "sequence_parallelism_mode": "split_gather", **SP}, {}, 0, _counts(12, 10, 13)
    ),
    "ring": Expected(
        "hybrid_parallel", {"tp_size": 2, "sequence_parallelism_mode": "ring", **SP}, {}, 0, _counts(32, 30, 13)
    ),
    "all_to_all": Expected(
        "hybrid_parallel",
        {"sp_size": 2, "sequence_parallelism_mode": "all_to_all", **SP},
        {},
        0,
        _counts(2, 0, 22, all_to_all_single=8),
    ),
    "ring_attn": Expected(
        "hybrid_parallel",
        {"sp_size": 2, "sequence_parallelism_mode": "ring_attn", **SP},
        {},
        0,
        _counts(2, 0, 22, all_to_all_single=8),
    ),
    # The norm, the loss and the tied embedding; the loss stays on the device.
    "pipeline": Expected("hybrid_parallel", STAGES, BF16 | FOUR_SAMPLES, 0, _counts(0, 0, 3, send=4, recv=4)),
    "pipeline, fp16": Expected("hybrid_parallel", STAGES, FP16 | FOUR_SAMPLES, 1, _counts(0, 0, 3, send=4, recv=4)),
    "pipeline, interleaved": Expected(
        "hybrid_parallel",
        {**STAGES, **CHUNKED, "pp_style": "interleaved"},
        DEEP,
        0,
        _counts(0, 0, 3, send=12, recv=12),
    ),
    "pipeline, zbv": Expected(
        "hybrid_parallel", {**STAGES, **CHUNKED, "pp_style": "zbv"}, DEEP, 0, _counts(0, 0, 2, send=8, recv=8)
    ),
}


def _check(name: str) -> None:
    expected = EXPECTED[name]
    case = Case(
        plugin=expected.plugin,
        model="user_transformer",
        plugin_arguments=expected.arguments,
        max_norm=0.5,
        device="simulated_cuda",
        **expected.settings,
    )
    most: Counter[str] = Counter()
    for costs in run_ranks(measure, case.world_size, asdict(case), device="simulated_cuda"):
        assert costs.syncs <= expected.syncs, f"{name}: {costs.syncs} waits per step:\n{costs.places}"
        assert costs.pageable == 0, f"{name}: {costs.places}"
        most |= Counter(costs.collectives)
    found = dict(most)
    assert found == expected.collectives, name


def _check_equals_one_process(name: str) -> None:
    expected = EXPECTED[name]
    settings = {"max_norm": 0.5, **expected.settings}
    if settings.get("precision") is not None:  # its update is linear in the gradient
        settings["optimizer"] = "sgd"
    arguments = {"plugin_arguments": expected.arguments, "device": "simulated_cuda", **settings}
    assert_parallel_equals_serial(expected.plugin, "user_transformer", **arguments)


def test_the_documentation_has_these_numbers():
    text = (Path(__file__).parents[2] / "docs" / "development.md").read_text()
    rows = [line for line in text.splitlines() if re.match(r"\| [^|]+ \| yes \| 0 \|", line)]
    assert rows == [one.row(name) for name, one in EXPECTED.items()]


def test_one_case_of_each_plugin():
    for name in ("ddp", "zero 2, fp16", "zero 2, offloaded", "gemini", "gemini, offloaded", "fsdp", "fsdp, offloaded"):
        _check(name)


def test_stages_and_tensors():
    for name in ("pipeline", "tensor"):
        _check(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPECTED)
def test_every_case(name):
    _check(name)
    _check_equals_one_process(name)
