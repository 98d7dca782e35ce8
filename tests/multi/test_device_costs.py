"""What a training step costs on an accelerator: waits of the host for the device, and collectives, for every plugin.

Measured on the simulated device with `drops_avoidable_waits`, so that no accidental wait hides one that is missing.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
from device_costs import measure
from harness import preload, run_ranks
from parity import Case
from zoo import TRANSFORMERS_MODULES

preload(*TRANSFORMERS_MODULES)

CHUNKS = {"chunk_config_dict": {"chunk_size": 4096}}
OFFLOADED = {"offload_optim_frac": 1.0, "offload_param_frac": 1.0, "placement_policy": "static", **CHUNKS}
STAGES = {"pp_size": 2, "num_microbatches": 4}
SP = {"enable_sequence_parallelism": True}
ZERO_STEP = {"reduce_scatter_tensor": 1, "all_reduce": 1, "all_gather_into_tensor": 1}  # one bucket, and the norm


@dataclass(frozen=True)
class Expected:
    """A case, with its waits of the host and its collectives of the device per step; None: not compared."""

    plugin: str
    arguments: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    syncs: int = 0
    collectives: dict[str, int] | None = None


BF16, FP16 = {"precision": "bf16", "optimizer": "hybrid_adam"}, {"precision": "fp16", "optimizer": "hybrid_adam"}
FOUR_SAMPLES = {"samples_per_rank": 4}
EXPECTED = {
    "ddp": Expected("torch_ddp", collectives={"all_reduce": 1}),
    "zero 1": Expected("low_level_zero", {"stage": 1}, BF16, collectives=ZERO_STEP),
    "zero 2": Expected("low_level_zero", {"stage": 2}, BF16, collectives=ZERO_STEP),
    # Whether the step is skipped.
    "zero 2, fp16": Expected("low_level_zero", {"stage": 2}, FP16, syncs=1, collectives=ZERO_STEP),
    # The gradients' arrival in host memory; the norm is the host's.
    "zero 2, offloaded": Expected(
        "low_level_zero",
        {"stage": 2, "cpu_offload": True},
        BF16,
        syncs=1,
        collectives={"reduce_scatter_tensor": 1, "all_gather_into_tensor": 1},
    ),
    "gemini": Expected("gemini", CHUNKS, BF16),
    "gemini, offloaded": Expected("gemini", OFFLOADED, BF16, syncs=1),
    "gemini, offloaded and prefetched": Expected("gemini", {"max_prefetch": 1, **OFFLOADED}, BF16, syncs=1),
    "fsdp": Expected("torch_fsdp"),
    "fsdp, offloaded": Expected("torch_fsdp", {"cpu_offload": True}, syncs=1),
    "tensor": Expected("hybrid_parallel", {"tp_size": 2}, BF16),
    "data, zero 1": Expected("hybrid_parallel", {"zero_stage": 1}, BF16),
    "split_gather": Expected("hybrid_parallel", {"tp_size": 2, "sequence_parallelism_mode": "split_gather", **SP}),
    "ring": Expected("hybrid_parallel", {"tp_size": 2, "sequence_parallelism_mode": "ring", **SP}),
    "all_to_all": Expected("hybrid_parallel", {"sp_size": 2, "sequence_parallelism_mode": "all_to_all", **SP}),
    "ring_attn": Expected("hybrid_parallel", {"sp_size": 2, "sequence_parallelism_mode": "ring_attn", **SP}),
    # The norm, and the tied embedding; the loss stays on the device.
    "pipeline": Expected("hybrid_parallel", STAGES, BF16 | FOUR_SAMPLES),
    "pipeline, fp16": Expected("hybrid_parallel", STAGES, FP16 | FOUR_SAMPLES, syncs=1),
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
    for costs in run_ranks(measure, case.world_size, asdict(case), device="simulated_cuda"):
        assert costs.syncs <= expected.syncs, f"{name}: {costs.syncs} waits per step:\n{costs.places}"
        assert costs.pageable == 0, f"{name}: {costs.places}"
        if expected.collectives is not None:
            assert costs.collectives == expected.collectives, name


def test_the_documentation_has_these_numbers():
    text = (Path(__file__).parents[2] / "docs" / "development.md").read_text()
    rows = dict(re.findall(r"^\| ([^|]+) \| (\d+) \|$", text, re.MULTILINE))
    assert rows == {name: str(one.syncs) for name, one in EXPECTED.items()}


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
