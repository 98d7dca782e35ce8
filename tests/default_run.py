"""Which part of the large grids of cases the default run takes; `make test-all` takes all of them.

The default run has to end in a quarter of an hour on two cores. Of the functions with parameters in these files it
takes one case in so many, chosen by a checksum of its name: from run to run the same ones, spread over all parameters,
and at least one of each function. The others are marked as slow.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from pathlib import Path

import pytest

__all__ = ["ONE_IN", "leave_cases_to_the_long_run"]

_TESTS = Path(__file__).parent

ONE_IN = {
    "faults/test_overflow.py": 3,
    "faults/test_uneven_end.py": 3,
    "multi/test_any_to_any.py": 4,
    "multi/test_checkpoint_memory.py": 4,
    "multi/test_concurrent_saves.py": 4,
    "multi/test_gemini.py": 3,
    "multi/test_gemini_checkpoints.py": 4,
    "multi/test_gemini_control_flow.py": 4,
    "multi/test_gemini_memory.py": 3,
    "multi/test_gemini_models.py": 4,
    "multi/test_hybrid_parallel.py": 4,
    "multi/test_hybrid_parallel_checkpoints.py": 3,
    "multi/test_hybrid_parallel_costs.py": 3,
    "multi/test_hybrid_parallel_loops.py": 4,
    "multi/test_low_level_zero.py": 4,
    "multi/test_memory_estimates.py": 4,
    "multi/test_memory_estimates_sharded.py": 4,
    "multi/test_monitor_ranks.py": 2,
    "multi/test_optim_shards.py": 4,
    "multi/test_optimizer_methods.py": 3,
    "multi/test_pipeline_parallel.py": 4,
    "multi/test_pipeline_parallel_checkpoints.py": 4,
    "multi/test_pipeline_parallel_loops.py": 4,
    "multi/test_pipeline_parallel_mistakes.py": 4,
    "multi/test_plain_torch.py": 3,
    "multi/test_readme.py": 3,
    "multi/test_resume_elsewhere.py": 3,
    "multi/test_resume_sharded.py": 4,
    "multi/test_run_over_ssh.py": 4,
    "multi/test_sequence_parallel_stacks.py": 3,
    "multi/test_sharded_pending_gradients.py": 3,
    "multi/test_shared_memory.py": 3,
    "multi/test_tensor_grids.py": 2,
    "multi/test_time_limits.py": 4,
    "multi/test_torch_ddp.py": 3,
    "multi/test_torch_fsdp.py": 4,
    "multi/test_torch_fsdp_checkpoints.py": 4,
    "multi/test_torch_fsdp_loops.py": 3,
    "multi/test_torch_fsdp_models.py": 4,
    "multi/test_torch_fsdp_optimizers.py": 4,
    "multi/test_vit_example.py": 3,
    "unit/test_checkpoint_plan.py": 3,
    "unit/test_corruption.py": 2,
    "unit/test_crash_states.py": 4,
    "unit/test_disk_io.py": 4,
    "unit/test_disk_tier.py": 4,
    "unit/test_gemini_tiers.py": 4,
    "unit/test_io_errors.py": 4,
    "unit/test_lazy_init.py": 4,
    "unit/test_malformed_files.py": 3,
    "unit/test_optimizer_kinds.py": 3,
    "unit/test_pipeline_simulation.py": 2,
    "unit/test_state_offload.py": 3,
    "unit/test_store_barrier.py": 2,
}


def leave_cases_to_the_long_run(items: Iterable[pytest.Item]) -> None:
    """Marks the cases that the default run leaves out as slow."""
    grids: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        if hasattr(item, "callspec") and item.get_closest_marker("slow") is None:
            file = item.path.relative_to(_TESTS).as_posix() if item.path.is_relative_to(_TESTS) else ""
            grids.setdefault((file, item.name.partition("[")[0]), []).append(item)
    for (file, _), cases in grids.items():
        one_in = ONE_IN.get(file, 1)
        taken = [case for case in cases if zlib.crc32(case.name.encode()) % one_in == 0] or cases[:1]
        for case in cases:
            if case not in taken:
                case.add_marker(pytest.mark.slow)
