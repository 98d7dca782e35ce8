"""Every state that a crash can leave of a whole training state's save, and of the rotation of steps that follows it."""

from __future__ import annotations

import pytest
from crash_recording import assert_sound, recorded
from oracles.crash_states import examine
from save_cases import NEW, NEXT, OLD, SHARD_MB, names_below, read_as_transformers
from training_saves import read_state, save_state

OLDER = 5  # the version of the step before the last
MODELS = ("actor", "critic")
SMALL_SHARDS = {"shard_size": SHARD_MB}


def _next_step(root):
    """Saves the next step; two are left, and nothing else."""
    save_state(root, NEXT, step=4, keep_last=2)
    found = read_state(root)
    if found != "next":
        return f"finds {found}"
    names = names_below(root)
    steps = [name for name in names if name.startswith("step-") and "/" not in name]
    hidden = [name for name in names if "/." in f"/{name}"]
    if hidden or len(steps) != 2 or (root / "latest").read_text().strip() != "step-00000004":
        return f"leaves {hidden}, {steps}, latest {(root / 'latest').read_text()!r}"
    return None


@pytest.mark.parametrize("is_whole", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["its end", "whole"])
@pytest.mark.parametrize("use_async", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["sync", "async"])
def test_a_step_and_the_rotation_after_it(tmp_path, use_async, is_whole):
    """KempnerForge 102 moved `latest` before the data was there; Accelerate deletes before it saves."""
    before = [((version,), {"step": step, "keep_last": 2}) for step, version in ((1, OLDER), (2, OLD))]
    new = ((NEW,), {"step": 3, "keep_last": 2, "use_async": use_async})
    disk, operations = recorded(tmp_path, save_state, new, before)
    # What is written before counts for none, as the cases of one model show: from the last file of the step on.
    commit = next(number for number, operation in enumerate(operations) if operation.kind == "rename")
    last = max(number for number in range(commit) if operations[number].kind == "create")
    since = 0 if is_whole else last
    verdict = examine(disk, operations, tmp_path / "crash", read_state, _next_step, has_old=True, since=since)
    assert_sound(verdict, old="old")
    assert any(operation.kind == "remove_tree" and "step-" in operation.path for operation in operations)


@pytest.mark.slow
def test_the_first_step(tmp_path):
    disk, operations = recorded(tmp_path, save_state, ((NEW,), {"step": 3, "keep_last": 2}))

    def next_step(root):
        save_state(root, NEXT, step=4, keep_last=2)
        hidden = [name for name in names_below(root) if "/." in f"/{name}"]
        return None if read_state(root) == "next" and not hidden else f"finds {read_state(root)}, leaves {hidden}"

    verdict = examine(disk, operations, tmp_path / "crash", read_state, next_step, has_old=False)
    assert_sound(verdict, old="nothing")


def test_transformers_finds_the_model_of_the_old_or_the_new_state(tmp_path):
    """The optimizer's shards lie in the same directory, and take turns with their names as well."""
    disk, operations = recorded(tmp_path, save_state, ((NEW,), SMALL_SHARDS), [((OLD,), SMALL_SHARDS)])
    last = max(number for number, operation in enumerate(operations) if operation.kind == "create")
    options = {"has_old": True, "since": last, "models": ["kill", "entries"]}
    verdict = examine(disk, operations, tmp_path / "crash", read_as_transformers, **options)
    assert not verdict.violations, verdict.violations[:20]
    assert verdict.found("kill") == {"old", "new"}


@pytest.mark.parametrize("models", [["kill"], pytest.param(["data", "entries"], marks=pytest.mark.slow)], ids=repr)
def test_two_models_over_two_older_ones(tmp_path, models):
    """One directory with folders: all of it changes at once, or nothing."""
    disk, operations = recorded(tmp_path, save_state, ((NEW,), {"names": MODELS}), [((OLD,), {"names": MODELS})])

    def next_save(root):
        save_state(root, NEXT, names=MODELS)
        hidden = [name for name in names_below(root) if "/." in f"/{name}"]
        found = read_state(root, MODELS)
        return None if found == "next" and not hidden else f"finds {found}, leaves {hidden}"

    # What is written before counts for none, as the cases of one model show: from the last file on.
    last = max(number for number, operation in enumerate(operations) if operation.kind == "create")
    options = {"has_old": True, "since": last, "models": models}
    verdict = examine(disk, operations, tmp_path / "crash", lambda root: read_state(root, MODELS), next_save, **options)
    assert not verdict.violations, verdict.violations[:20]
    assert verdict.found(models[-1]) == {"old", "new"}
