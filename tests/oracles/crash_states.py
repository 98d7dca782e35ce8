"""Every state that a crash can leave of a recorded save, and the verdict on what a reader finds in each.

Three crash models, after every operation of the recording:
- "kill": the process ends. All that was done is there; the write in flight is there in part.
- "data": the power fails. Entries of directories are there, bytes that were not fsynced are lost, zeros, or cut off.
- "entries": the power fails. Entries that were not fsynced are lost: all, all but one, or one of them; with
  their files' bytes as written, or with those that were not fsynced lost as well.
"""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, field, replace

from oracles.crash_disk import write_tree

MODELS = ("kill", "data", "entries")


@dataclass(frozen=True, slots=True)
class CrashState:
    """What a crash leaves.

    Attributes:
        num_done: How many operations were done.
        model: Which crash model.
        detail: What was lost.
        tree: Path to bytes, None for a directory.
    """

    num_done: int
    model: str
    detail: str
    tree: dict

    def __str__(self) -> str:
        return f"{self.model} after {self.num_done} operations, {self.detail}"


def crash_states(disk, operations):
    """Gives every crash state of operations done on a disk, from before the first to after the last.

    Args:
        disk: What was there before; it is left alone.
        operations: What was recorded.
    """
    disk = copy.deepcopy(disk)
    yield from _states_now(disk, 0)
    for num_done, operation in enumerate(operations, 1):
        yield from _states_within(disk, operation, num_done - 1)
        disk.apply(operation)
        yield from _states_now(disk, num_done)


def _states_within(disk, operation, num_done):
    """Gives what a process leaves that is killed in the middle of an operation."""
    if operation.kind == "write":
        num_bytes = len(operation.content) // 2
        for count in sorted({1, num_bytes // 2, num_bytes - 1} - {0, num_bytes}):
            yield CrashState(
                num_done, "kill", f"{count} bytes of: {operation}", _tree_after_part(disk, operation, count)
            )
    elif operation.kind == "remove_tree":
        # In no certain order: one order, and files from the other end of it.
        paths = disk.below(operation.path)
        files = [path for path in reversed(paths) if disk.tree()[path] is not None]
        for order in (paths, files):
            partly = copy.deepcopy(disk)
            for path in order:
                partly.remove_one(path)
                yield CrashState(num_done, "kill", f"up to {path} of: {operation}", partly.tree())


def _tree_after_part(disk, operation, count):
    partly = copy.deepcopy(disk)
    partly.apply(replace(operation, content=operation.content[: 2 * count]))
    return partly.tree()


def _states_now(disk, num_done):
    yield CrashState(num_done, "kill", "nothing lost", disk.tree())
    unsynced = disk.unsynced()
    for detail, contents in _data_losses(disk, unsynced):
        yield CrashState(num_done, "data", detail, disk.tree(contents=contents))
    lost = {number: disk.nodes[number].durable for number in range(len(disk.nodes))}
    for detail, kept in _entry_losses(disk.pending):
        entries = disk.entries_with(kept)
        yield CrashState(num_done, "entries", detail, disk.tree(entries))
        yield CrashState(num_done, "entries", f"{detail}, and data", disk.tree(entries, lost))


def _data_losses(disk, unsynced):
    for how, damage in DAMAGES.items():
        damaged = {number: damage(disk.nodes[number].content, disk.nodes[number].durable) for number in unsynced}
        if damaged:
            yield f"data {how}", damaged
        if len(damaged) > 1:
            yield from ((f"data of file {number} {how}", {number: damaged[number]}) for number in unsynced)


def _entry_losses(pending):
    if pending:
        yield "all entries lost", []
    for position, change in enumerate(pending):
        yield f"lost: {change.what}", pending[:position] + pending[position + 1 :]
        yield f"kept alone: {change.what}", [change]


def _span(content, durable):
    """Returns the first and the last byte that differ; all beyond the end of the shorter differ."""
    common = min(len(content), len(durable))
    different = [position for position in range(common) if content[position] != durable[position]]
    last = max(len(content), len(durable)) - 1
    return (different[0] if different else common), (last if len(content) != len(durable) else different[-1])


def _lost(content, durable):
    return durable


def _zeroed(content, durable):
    first, last = _span(content, durable)
    return content[:first] + bytes(len(content[first : last + 1])) + content[last + 1 :]


def cut_at(content, durable, position):
    """Returns what is there when the bytes up to a position were written before the power failed."""
    return content[:position] + durable[position:]


def _cut(part):
    def damage(content, durable):
        first, last = _span(content, durable)
        return cut_at(content, durable, first + int(part * (last - first)))

    return damage


DAMAGES = {
    "lost": _lost,
    "zeroed": _zeroed,
    "cut near its begin": _cut(0.01),
    "cut in the middle": _cut(0.5),
    "cut near its end": _cut(1.0),
}


@dataclass(slots=True)
class Verdict:
    """What a reader found.

    Attributes:
        num_states: How many crash states there were.
        num_trees: How many of them differ.
        outcomes: How often each outcome was found under each model.
        violations: What may not be.
    """

    num_states: int = 0
    num_trees: int = 0
    outcomes: Counter = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)

    def found(self, model):
        """Returns the outcomes under one crash model."""
        return {outcome for (at, outcome) in self.outcomes if at == model}


def examine(disk, operations, scratch, read, next_save=None, *, has_old, models=MODELS, since=0, max_violations=None):
    """Returns the verdict over every crash state.

    A reader may find the old or the new, whole, and nothing only before the first was there; once a killed process left
    the new, a later kill leaves it too; and after the last operation the new is there whatever the crash loses.

    Args:
        disk: What was there before.
        operations: What the save did.
        scratch: A directory to put each state into.
        read: Says what it finds in a directory: "old", "new", "nothing", or what else it may be.
        next_save: Saves into a directory and returns what is wrong then, or None. Called for each set of names.
        has_old: Whether there was an older one.
        models: Which crash models.
        since: From which operation on.
        max_violations: After how many there is no need to look further.
    """
    allowed, verdict, is_new = {"old" if has_old else "nothing", "new"}, Verdict(), False
    outcome_of, debris_seen = {}, set()
    for state in crash_states(disk, operations):
        if state.model not in models or state.num_done < since:
            continue
        if max_violations is not None and len(verdict.violations) >= max_violations:
            break
        verdict.num_states += 1
        key = hash(tuple(state.tree.items()))
        if key not in outcome_of:
            write_tree(state.tree, scratch)
            outcome_of[key] = read(scratch)
            debris = (tuple(state.tree), outcome_of[key])
            if next_save is not None and debris not in debris_seen:
                debris_seen.add(debris)
                wrong = next_save(scratch)
                if wrong is not None:
                    verdict.violations.append(f"next save after {state}: {wrong}")
        outcome = outcome_of[key]
        verdict.outcomes[state.model, outcome] += 1
        if outcome not in allowed:
            verdict.violations.append(f"{state}: {outcome}")
        elif outcome != "new" and (state.num_done == len(operations) or (is_new and state.model == "kill")):
            verdict.violations.append(f"{state}: {outcome}, though the save was done")
        is_new = is_new or (state.model == "kill" and outcome == "new")
    verdict.num_trees = len(outcome_of)
    return verdict
