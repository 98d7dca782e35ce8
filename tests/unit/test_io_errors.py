"""An I/O error at every operation of a save: the same error on both ranks, the old checkpoint whole, nothing left over.

Every fault meets a save by two ranks over an older checkpoint, and a save without a fault follows.
"""

from __future__ import annotations

import pytest
from fault_cases import faults_at_every_operation, operations_of, saves_with_faults, wrong_with
from harness import run_ranks

CASES = [("directory", False), ("directory", True), ("file", False), ("file", True), ("bin directory", False)]


@pytest.mark.parametrize(("case", "use_async"), CASES)
def test_an_error_at_every_operation(tmp_path, case, use_async):
    operations = run_ranks(operations_of, 2, tmp_path, case, use_async)
    faults = faults_at_every_operation(operations)
    by_rank = run_ranks(saves_with_faults, 2, tmp_path / "saves", case, faults, use_async, nexts=5, timeout=300)
    wrong = [
        f"{fault} at {operations[fault.rank][fault.at]}: {text}"
        for fault, outcomes in zip(faults, zip(*by_rank, strict=True), strict=True)
        for text in wrong_with(fault, operations, outcomes)
    ]
    print(len(faults), "faults", operations)
    assert not wrong, f"{len(wrong)} of {len(faults)} faults:\n" + "\n".join(wrong[:20])
