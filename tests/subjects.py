"""Subjects of the tests: the long runs `make test-SUBJECT`, and their parts `make test-SUBJECT-1`, ...

Run: python tests/subjects.py [SUBJECT[-PART]], which prints the arguments of pytest, or the subjects and their parts.
"""

from __future__ import annotations

import sys
from fnmatch import fnmatch
from pathlib import Path

TESTS = Path(__file__).parent
# Each part takes at most 20 minutes on two cores; conftest.py selects the cases of a part by a checksum of their names.
NUM_PARTS = {
    **{"gemini": 2, "fsdp": 3, "zero": 2, "pipeline": 2, "hybrid": 3, "checkpoints": 6, "faults": 2, "core": 2},
    "sweep": 5,
}
# The first subject with a pattern that matches takes a file; "core" takes the rest.
SUBJECTS: dict[str, tuple[str, ...]] = {
    "sweep": ("*/test_transformers_sweep*",),
    "device": ("*/test_simulated_cuda*", "*/test_shared_gpu*", "*/test_device_costs*"),
    "gemini": ("*/test_gemini*", "*/test_chunk_*", "*/test_disk_*", "*/test_nvme_*"),
    "fsdp": ("*/test_torch_fsdp*",),
    "zero": ("*/test_low_level_zero*", "*/test_zero_*", "*/test_torch_ddp*", "*/test_flat_*", "*/test_local_sgd*"),
    "pipeline": ("*/test_pipeline*", "*/test_stage_*", "*/test_micro*", "*/test_deferred_*", "*/test_p2p_*"),
    "hybrid": ("*/test_hybrid*", "*/test_extra_axes*", "*/test_parallel_groups*"),
    "moe": ("*/test_moe*", "*/test_expert_*", "*/test_load_balancing*", "*/test_shared_experts*"),
    "tensor": (
        *("*/test_tensor_*", "*/test_sequence*", "*/test_vocab_*", "*/test_zoo*", "*/test_lora*", "*/test_quantized*"),
        *("*/test_placement*", "*/test_layout_conversion*", "*/test_solved_placements*"),
    ),
    "checkpoints": (
        *("*/test_any_to_any*", "*/test_async_*", "*/test_checkpoint*", "*/test_ckpt*", "*/test_comm[ip]*"),
        *("*/test_conversion*", "*/test_byte_runs*", "*/test_copy_elements*", "*/test_direct_*"),
        *("*/test_corruption*", "*/test_concurrent*", "*/test_crash*", "*/test_file_*", "*/test_general_*"),
        *("*/test_hostile*", "*/test_huggingface*", "*/test_io_errors*", "*/test_j*", "*/test_malformed*"),
        *("*/test_manifest*", "*/test_pending_commit*", "*/test_range_*", "*/test_recorded*", "*/test_relay*"),
        *("*/test_resharding*", "*/test_resume*", "*/test_retention*", "*/test_save*", "*/test_st[or]*", "*/test_sys*"),
        *("*/test_training_state*", "*/test_unboosted*", "*/test_syscall*", "*/test_weight_*"),
    ),
    "launch": (
        *("*/test_launch*", "*/test_run_*", "*/test_restart*", "*/test_rendezvous*", "*/test_network*"),
        "*/test_check_*",
        "*/test_check.py",
        *("*/test_cl*", "*/test_benchmark*", "*/test_worker*", "*/test_docs*", "*/test_examples*", "*/test_vit*"),
        *("*/test_kernel_builds*", "*/test_failure_hints*", "ports/*"),
    ),
    "faults": (
        *("faults/*", "*/test_collective_errors*", "*/test_timeouts*", "*/test_heartbeat*", "*/test_faults*"),
        *("*/test_uneven*", "*/test_monitor*", "*/test_progress*"),
    ),
    "data": ("*/test_data*", "*/test_sampler*"),
    "estimates": (
        *("*/test_estimate*", "*/test_memory_*", "*/test_step_time*", "*/test_machine_speed*"),
        *("*/test_activation_plan*", "*/test_auto_plugin*", "*/test_parallel_plan*"),
    ),
    "loops": (
        *("*/test_user_loops*", "*/test_random_loops*", "*/test_trainer*", "*/test_gradient_handlers*", "*/test_ema*"),
        *("*/test_engine*", "*/test_transformers_trainer*"),
    ),
    "optim": ("*/test_opt*", "*/test_adam*", "*/test_lr_*", "*/test_shard*", "*/test_whole*", "*/test_state_*"),
}


def subject_of(path: Path) -> str:
    """Return the subject of a test file."""
    name = path.relative_to(TESTS).as_posix()
    return next((key for key, patterns in SUBJECTS.items() if any(fnmatch(name, one) for one in patterns)), "core")


def files_of(subject: str) -> list[Path]:
    """Return the test files of a subject."""
    return [path for path in sorted(TESTS.rglob("test_*.py")) if subject_of(path) == subject]


def targets() -> list[str]:
    """Return all subjects and, of those with several, all parts."""
    return [
        target
        for subject in (*SUBJECTS, "core")
        for parts in [NUM_PARTS.get(subject, 1)]
        for target in (subject, *(f"{subject}-{part}" for part in range(1, parts + 1) if parts > 1))
    ]


def arguments_of(target: str) -> list[str]:
    """Return the arguments of pytest for a subject or a part of it."""
    subject, _, part = target.partition("-")
    selection = [f"--part={part}/{NUM_PARTS[subject]}"] if part else []
    return [*selection, *(str(path.relative_to(TESTS.parent)) for path in files_of(subject))]


if __name__ == "__main__":
    if len(sys.argv) == 1:
        print(*targets())
    elif sys.argv[1] in targets():
        print(*arguments_of(sys.argv[1]))
    else:
        sys.exit(f"{sys.argv[1]!r} is not a subject: choose one of {', '.join(targets())}")
