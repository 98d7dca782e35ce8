"""A run that stops and starts again is the run that was never stopped, where the ranks share the model's parts."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import distributed, run_ranks
from resume_cases import (
    CUTS,
    FSDP_PRECISIONS,
    PRECISIONS,
    ExpertNet,
    assert_resume_is_exact,
    expert_plugin,
    fsdp_plugin,
    gemini_plugin,
    hybrid_plugin,
    in_turn,
    staged_plugin,
    zero_plugin,
)

from booster.comm import group_size
from booster.rng_state import preserved_rng

pytestmark = pytest.mark.on_device


@pytest.fixture(autouse=True)
def _random_state():
    with preserved_rng():
        yield


ZERO_CASES = [
    *[(stage, "fp32", cut) for cut in ("mid-accumulation", "epoch end", "after rotation") for stage in (1, 2)],
    (1, "bf16", "mid-accumulation"),
    (2, "bf16", "mid-accumulation"),
    (2, "fp16", "mid-accumulation"),
    (1, "fp16", "mid-epoch"),
]


def assert_zero_resume_is_exact(path: Path, stage: int, precision: str, cut: str) -> None:
    assert_resume_is_exact(path, "fp32", cut, lambda: zero_plugin(stage, precision))


@pytest.mark.parametrize(("stage", "precision", "cut", "world_size"), in_turn((2, 3), ZERO_CASES))
def test_sharded_ranks_resume_bit_for_bit(tmp_path, stage, precision, cut, world_size):
    run_ranks(assert_zero_resume_is_exact, world_size, tmp_path / "c", stage, precision, cut)


@pytest.mark.slow
@distributed(world_size=(1, 2, 4))
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("overlap", [True, False])
def test_every_cut_of_sharded_ranks_resumes_bit_for_bit(tmp_path, stage, precision, cut, overlap):
    if cut == "after an overflow" and precision != "fp16":
        pytest.skip("only a scaled loss overflows")
    extra = 2 if group_size() == 4 and not overlap else 1
    arguments = {"overlap_communication": overlap, "overlap_allgather": overlap, "extra_dp_size": extra}
    assert_resume_is_exact(tmp_path / "c", "fp32", cut, lambda: zero_plugin(stage, precision, **arguments))


GEMINI_POLICIES = {
    "static": {},
    "kept": {"shard_param_frac": 0.0},
    "on disk": {"placement_policy": "cpu"},
    "states on disk": {"offload_optim_frac": 1.0, "max_prefetch": 0},
    "auto": {"placement_policy": "auto"},
}


GEMINI_CASES = [
    ("fp32", "mid-accumulation", "static"),
    ("fp32", "epoch end", "on disk"),
    ("fp32", "after rotation", "kept"),
    ("bf16", "mid-accumulation", "static"),
    ("bf16", "mid-epoch", "states on disk"),
    ("fp16", "mid-accumulation", "on disk"),
    ("fp16", "after an overflow", "static"),
]


def assert_gemini_resume_is_exact(path: Path, precision: str, cut: str, policy: str) -> None:
    assert_resume_is_exact(path, "fp32", cut, lambda: gemini_plugin(precision, **GEMINI_POLICIES[policy]))


@pytest.mark.parametrize(("precision", "cut", "policy", "world_size"), in_turn((2, 3), GEMINI_CASES))
def test_ranks_with_chunks_resume_bit_for_bit(tmp_path, precision, cut, policy, world_size):
    run_ranks(assert_gemini_resume_is_exact, world_size, tmp_path / "c", precision, cut, policy)


@pytest.mark.slow
@distributed(world_size=(1, 2, 4))
@pytest.mark.parametrize(
    ("precision", "cut"),
    [
        (precision, cut)
        for precision in ("fp32", "bf16", "fp16")
        for cut in CUTS
        if cut != "after an overflow" or precision == "fp16"  # only a scaled loss overflows
    ],
)
@pytest.mark.parametrize("policy", GEMINI_POLICIES)
def test_every_cut_of_ranks_with_chunks_resumes_bit_for_bit(tmp_path, policy, precision, cut):
    arguments = GEMINI_POLICIES[policy] | {"extra_dp_size": 2 if group_size() == 4 else 1}
    assert_resume_is_exact(tmp_path / "c", "fp32", cut, lambda: gemini_plugin(precision, **arguments))


def assert_fsdp_resume_is_exact(path: Path, precision: str, cut: str, *arguments) -> None:
    of_booster = "fp32" if precision in FSDP_PRECISIONS else precision
    assert_resume_is_exact(path, of_booster, cut, lambda: fsdp_plugin(precision, *arguments))


FSDP_CASES = [
    *[("fp32", cut, "FULL_SHARD") for cut in ("mid-accumulation", "epoch end", "after rotation")],
    ("fp32", "mid-accumulation", "SHARD_GRAD_OP"),
    ("fp32", "mid-epoch", "NO_SHARD"),
    ("bf16", "mid-accumulation", "FULL_SHARD"),
    ("fp16", "mid-accumulation", "FULL_SHARD"),
    ("fp16_naive", "mid-accumulation", "FULL_SHARD"),
    ("fp8", "mid-epoch", "FULL_SHARD"),
    ("fsdp_bf16", "mid-accumulation", "FULL_SHARD"),
    ("fsdp_bf16_fp32_reduce", "mid-accumulation", "SHARD_GRAD_OP"),
    ("fsdp_fp16", "after an overflow", "FULL_SHARD"),
    ("fsdp_fp16", "mid-accumulation", "SHARD_GRAD_OP"),
]


@pytest.mark.parametrize(("precision", "cut", "strategy", "world_size"), in_turn((2, 3), FSDP_CASES))
def test_ranks_with_units_resume_bit_for_bit(tmp_path, precision, cut, strategy, world_size):
    run_ranks(assert_fsdp_resume_is_exact, world_size, tmp_path / "c", precision, cut, strategy)


@distributed(world_size=4)
@pytest.mark.parametrize("precision", ["fp32", "fsdp_fp16"])
def test_replicas_of_units_resume_bit_for_bit(tmp_path, precision):
    assert_fsdp_resume_is_exact(tmp_path / "c", precision, "mid-accumulation", "HYBRID_SHARD", 2)


@pytest.mark.slow
@distributed(world_size=(1, 2, 4))
@pytest.mark.parametrize(
    ("precision", "cut"),
    [
        (precision, cut)
        for precision in (*PRECISIONS, *FSDP_PRECISIONS)
        for cut in CUTS
        if cut != "after an overflow" or "fp16" in precision  # only a scaled loss overflows
    ],
)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"])
def test_every_cut_of_ranks_with_units_resumes_bit_for_bit(tmp_path, strategy, precision, cut):
    num_replicas = (2 if group_size() == 4 else 1) if strategy == "HYBRID_SHARD" else None
    assert_fsdp_resume_is_exact(tmp_path / "c", precision, cut, strategy, num_replicas)


HYBRID_CASES = [
    *[("fp32", cut, stage) for cut in ("mid-accumulation", "epoch end") for stage in (0, 1, 2)],
    ("bf16", "mid-accumulation", 0),
    ("fp32", "after rotation", 1),
    ("fp16", "mid-accumulation", 2),
    ("fp16", "after an overflow", 1),
]


def assert_hybrid_resume_is_exact(path: Path, precision: str, cut: str, zero_stage: int) -> None:
    assert_resume_is_exact(path, "fp32", cut, lambda: hybrid_plugin(precision, zero_stage))


def assert_expert_resume_is_exact(path: Path, precision: str, cut: str, zero_stage: int) -> None:
    assert_resume_is_exact(path, "fp32", cut, lambda: expert_plugin(precision, zero_stage), make_model=ExpertNet)


@pytest.mark.parametrize(("precision", "cut", "zero_stage", "world_size"), in_turn((4, 2), HYBRID_CASES))
def test_ranks_that_share_experts_resume_bit_for_bit(tmp_path, precision, cut, zero_stage, world_size):
    run_ranks(assert_expert_resume_is_exact, world_size, tmp_path / "c", precision, cut, zero_stage)


@pytest.mark.parametrize(("precision", "cut", "zero_stage", "world_size"), in_turn((2, 4), HYBRID_CASES))
def test_ranks_that_share_layers_resume_bit_for_bit(tmp_path, precision, cut, zero_stage, world_size):
    run_ranks(assert_hybrid_resume_is_exact, world_size, tmp_path / "c", precision, cut, zero_stage)


@pytest.mark.slow
@distributed(world_size=(2, 4))
@pytest.mark.parametrize(
    ("precision", "cut"),
    [
        (precision, cut)
        for precision in ("fp32", "bf16", "fp16")
        for cut in CUTS
        if cut != "after an overflow" or precision == "fp16"  # only a scaled loss overflows
    ],
)
@pytest.mark.parametrize("zero_stage", [0, 1, 2])
@pytest.mark.parametrize("is_all", [True, False])
def test_every_cut_of_ranks_that_share_layers_resumes_bit_for_bit(tmp_path, is_all, zero_stage, precision, cut):
    tp_size = group_size() if is_all else 2
    assert_resume_is_exact(tmp_path / "c", "fp32", cut, lambda: hybrid_plugin(precision, zero_stage, tp_size))


@distributed(world_size=(2, 4))
@pytest.mark.parametrize(
    ("precision", "cut", "zero_stage"),
    [
        *[("fp32", cut, stage) for cut in ("mid-accumulation", "epoch end") for stage in (0, 1)],
        ("fp32", "after rotation", 1),
        ("bf16", "mid-accumulation", 0),
        ("fp16", "after an overflow", 1),
        ("fp16", "mid-accumulation", 0),
    ],
)
def test_stages_resume_bit_for_bit(tmp_path, precision, cut, zero_stage):
    assert_resume_is_exact(tmp_path / "c", "fp32", cut, lambda: staged_plugin(precision, zero_stage))


@pytest.mark.slow
@distributed(world_size=(2, 4))
@pytest.mark.parametrize(
    ("precision", "cut"),
    [
        (precision, cut)
        for precision in ("fp32", "bf16", "fp16")
        for cut in CUTS
        if cut != "after an overflow" or precision == "fp16"  # only a scaled loss overflows
    ],
)
@pytest.mark.parametrize("zero_stage", [0, 1])
def test_every_cut_of_stages_resumes_bit_for_bit(tmp_path, zero_stage, precision, cut):
    assert_resume_is_exact(tmp_path / "c", "fp32", cut, lambda: staged_plugin(precision, zero_stage))
