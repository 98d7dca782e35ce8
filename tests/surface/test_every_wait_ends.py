"""No wait without end: each call that may block has a timeout, or stands here with the reason why it ends."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = {
    str(path.relative_to(ROOT)): path
    for folder in ("booster", "plugins", "kernels", "checkpoint_io")
    for path in sorted((ROOT / folder).rglob("*.py"))
}

# Methods that block until something happens, where they are called without any argument, thus without a time.
WITHOUT_ARGUMENTS = ("accept", "acquire", "exception", "get", "join", "pause", "result", "select", "wait")
# Those that have no argument for it, or take it by name; an attribute `timeout=` is looked for.
BLOCKING = ("communicate", "recv", "recv_bytes", "recv_into", "wait_for", "waitid", "waitpid")
SUBPROCESS = ("call", "check_call", "check_output", "run")
OF_A_STORE = ("get", "multi_get", "wait")  # with keys alone they wait as long as the store was told

OPERATION = "it ends in CollectiveOp.wait, at the timeout of the group"
MESSAGE = "all waits of messages and of started collectives come here: at the limit of the group or of its messages"
SAVES = "it ends with saves of this process, the waits of which end at the limit of checkpoints"
OWN_THREADS = "threads of this process that end by themselves: what they wait for ends"
IS_THERE = "the key is there: it was waited for, or looked for, just before"
DISK = "a request that the system performs on a disk"
DEVICE = "nothing is waited for here: the device's stream will"
ENDING = "a process that was killed, or has closed its output as it ends"

ALLOWED = {
    "booster/booster_checkpoint.py": {
        "self.checkpoint_io.wait": SAVES,
    },
    "booster/cli/demo.py": {"subprocess.run": "booster run ends with its ranks, whose waits have timeouts"},
    "booster/cli/benchmark/workers.py": {
        "connection.recv_bytes": "a daemon's thread, which waits for the end of the parent",
        "process.join": ENDING,
        "threading.Event().wait": "the process is killed by its parent, or ends with it",
    },
    "booster/cli/check.py": {
        "process.wait": ENDING,
    },
    "booster/cli/run/elastic_agent.py": {
        "heartbeat_store.get": IS_THERE,
    },
    "booster/cli/run/log_prefix.py": {
        "self._selector.select": "a daemon's thread, which every line and the end of the launcher wake",
        "self._thread.join": "the thread was woken and told to end",
    },
    "booster/cli/run/multi_node.py": {
        "host.process.wait": ENDING,
    },
    "booster/cli/run/rendezvous_handler.py": {
        "round_info.store.get": "the limit of torch's rendezvous, which made the store",
    },
    "booster/cli/run/signals.py": {
        "watch_thread.join": "the thread sees the end of its pipe",
    },
    "booster/comm/all_to_all.py": {
        "started.wait": OPERATION,
    },
    "booster/comm/bucket_collectives.py": {
        "self._work.wait": OPERATION,
    },
    "booster/comm/collective_op.py": {
        "PendingWork(group_memory, self.ending, lambda: in_memory(group_memory.memory)).wait": OPERATION,
        "work.wait": MESSAGE,
    },
    "booster/estimate/machine_speed.py": {
        "started.wait": OPERATION,
    },
    "booster/comm/p2p.py": {
        "one.wait": OPERATION,
        "start_receive_tensor(sender, group).wait": OPERATION,
        "start_send_tensor(tensor, receiver, group).wait": OPERATION,
    },
    "booster/comm/store_barrier.py": {
        "self._store.get": IS_THERE,
        "self._store.multi_get": IS_THERE,
    },
    "booster/fault_tolerance/failure_diagnosis.py": {
        "self._store.get": IS_THERE,
        "store.get": IS_THERE,
    },
    "booster/fault_tolerance/heartbeat.py": {
        "self._store.get": IS_THERE,
        "store.get": IS_THERE,
    },
    "booster/fault_tolerance/store.py": {
        "self._store.get": "in a thread that is given up after a time",
        "self._store.multi_get": "in a thread that is given up after a time",
    },
    "booster/launch/rendezvous.py": {
        "store.get": IS_THERE,
    },
    "booster/optim/nvme_offload/pipeline.py": {
        "ticket.wait": DISK,
        "transfer.wait": DISK,
    },
    "checkpoint_io/checkpoint_io.py": {
        "self.saver.wait": SAVES,
    },
    "checkpoint_io/loading/direct_reads.py": {
        "ticket.wait": DISK,
    },
    "checkpoint_io/saving/async_save.py": {
        "self._changed.wait_for": SAVES,
    },
    "checkpoint_io/saving/save.py": {
        "self._async.wait": SAVES,
    },
    "checkpoint_io/storage.py": {
        "_freeing.wait_for": OWN_THREADS,
        "_held.get": "a context variable",
    },
    "checkpoint_io/saving/writer.py": {
        "self._idle.get": OWN_THREADS,
    },
    "checkpoint_io/parallel.py": {
        "pool.shutdown": OWN_THREADS,
    },
    "booster/cli/estimate_jobs.py": {
        "one.result": "a thread that waits for such processes",
        "pool.submit(_call, item).result": "a process of this machine, which computes, or breaks the pool",
    },
    "kernels/disk_io.py": {
        "requests.get": "a daemon's thread, which works until it is told to end",
        "threads[-1].join": OWN_THREADS,
    },
    "plugins/gemini/chunk.py": {
        "self._gather.wait": OPERATION,
    },
    "plugins/gemini/model.py": {
        "flight.wait": OPERATION,
    },
    "plugins/gemini/nvme_tier.py": {
        "ticket.wait": DISK,
    },
    "plugins/gemini/tiers.py": {
        "self._event.wait": DEVICE,
        "self._last.wait": DEVICE,
        "self._held().read_into(host).wait": DISK,
        "transfer.wait": DISK,
    },
    "plugins/sharding/step_in_parts.py": {
        "arrival.wait": "a copy from a device to host memory",
    },
    "plugins/hybrid_parallel/pipeline_parallel/p2p.py": {
        "link.wait": OPERATION,
        "self._incoming[sender].recv": OPERATION,
    },
    "plugins/hybrid_parallel/pipeline_runner.py": {
        "self._p2p.wait": OPERATION,
    },
    "plugins/hybrid_parallel/expert_parallel/dispatch.py": {
        "ctx.transfer.wait": OPERATION,
        "message.wait": OPERATION,
        "transfer.wait": OPERATION,
    },
    "plugins/hybrid_parallel/sequence_parallel/recorded_outputs.py": {
        "collector.get": "a variable of the context",
    },
    "plugins/hybrid_parallel/tensor_parallel/collective_matmul.py": {
        "work.wait": OPERATION,
    },
    "plugins/hybrid_parallel/tensor_parallel/deferred_wgrad.py": {
        "self.queue.put": "a list of this process, which takes all",
    },
    "plugins/hybrid_parallel/tensor_parallel/mappings.py": {
        "start_all_gather(full.view(-1), tp_group.group).wait": OPERATION,
        "start_all_gather(shards.view(-1), tp_group.group).wait": OPERATION,
        "start_all_reduce(x, tp_group.group).wait": OPERATION,
        "start_all_reduce(total, group_of_number(group).group).wait": OPERATION,
    },
    "plugins/low_level_zero/grad_bucket.py": {
        "self._work.wait": OPERATION,
    },
    "plugins/low_level_zero/model.py": {
        "self._all_gather.wait": OPERATION,
        "self._all_gather.wait_for": OPERATION,
        "self._in_flight.pop(index).wait": OPERATION,
        "all_gather.wait": OPERATION,
        "self.wait": OPERATION,
    },
    "plugins/low_level_zero/optimizer.py": {
        "self.param_all_gather.wait": OPERATION,
    },
    "plugins/torch_ddp/reducer.py": {
        "future.wait": "the collectives of a communication hook end at the limit of their group",
        "work.wait": OPERATION,
    },
    "plugins/torch_fsdp/param_group.py": {
        "self._work.wait": OPERATION,
        "start_all_gather(buffer, self.process_group).wait": OPERATION,
        "work.wait": OPERATION,
    },
}


def _unending(source):
    """Returns the calls that may block and are given no time, as they are written."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        named, name = {one.arg for one in node.keywords}, node.func.attr
        last = _last_name(node.func.value)
        is_listed = (
            (name in WITHOUT_ARGUMENTS and not node.args and not named)
            or name in BLOCKING
            or (name in SUBPROCESS and last == "subprocess")
            or (name in OF_A_STORE and "store" in last and len(node.args) < 2)
            or (name == "put" and "queue" in last)
            or (name == "shutdown" and last in ("pool", "executor"))
        )
        if is_listed and "timeout" not in named:
            found.add(ast.unparse(node.func))
    return found


def _last_name(receiver):
    """Returns `c` of a.b.c, in small letters."""
    name = receiver.attr if isinstance(receiver, ast.Attribute) else getattr(receiver, "id", "")
    return name.lower()


def _sleepers(source):
    """Returns the names of functions that sleep in a `while` and look at no clock."""
    found = []
    if "sleep(" not in source:
        return found
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        loops = [ast.unparse(node) for node in ast.walk(function) if isinstance(node, ast.While)]
        if any("sleep(" in loop and "deadline" not in loop and "monotonic" not in loop for loop in loops):
            found.append(function.name)
    return found


def test_every_wait_has_a_timeout_or_a_reason():
    for name, path in FILES.items():
        found, allowed = _unending(path.read_text()), set(ALLOWED.get(name, ()))
        without = sorted(found - allowed)
        assert not without, f"{name}: {without} may wait for ever: give a timeout, or write here why it ends"
        assert not allowed - found, f"{name}: {sorted(allowed - found)} is gone: remove it from the list"


def test_every_loop_that_sleeps_looks_at_a_clock():
    for name, path in FILES.items():
        assert not _sleepers(path.read_text()), f"{name} may sleep for ever: give the loop a deadline"


def test_the_list_is_of_files_that_there_are():
    assert set(ALLOWED) <= set(FILES)


@pytest.mark.parametrize(
    "source",
    [
        "event.wait()",
        "self.thread.join()",
        "requests.get()",
        "future.result()",
        "lock.acquire()",
        "process.communicate(text)",
        "subprocess.run(command, check=True)",
        "store.get(key)",
        "self._store.wait(keys)",
        "condition.wait_for(lambda: done)",
        "connection.recv_bytes()",
        "queue.put(job)",
    ],
)
def test_the_search_finds_waits_without_end(source):
    assert _unending(source)


@pytest.mark.parametrize(
    "source",
    [
        "event.wait(5)",
        "thread.join(timeout=3)",
        "', '.join(names)",
        "table.get(key)",
        "process.communicate(timeout=9)",
        "subprocess.run(command, timeout=9)",
        "store.wait(keys, timedelta(seconds=3))",
        "condition.wait_for(is_done, timeout=3)",
        "queue.put(job, timeout=1)",
    ],
)
def test_the_search_leaves_the_rest(source):
    assert not _unending(source)


def test_the_search_tells_loops_apart():
    endless = "def f():\n    while not there():\n        time.sleep(1)"
    ending = "def f():\n    while time.monotonic() < deadline:\n        time.sleep(1)"
    assert _sleepers(endless) == ["f"]
    assert not _sleepers(ending)


# Making groups: one place, so that each has the limits of the launch.

MAKING = ("init_device_mesh", "init_process_group", "new_group", "new_subgroups", "split_group")
MAKERS = {
    "booster/comm/process_groups.py": "the place",
    "booster/launch/launch.py": "the world",
    "booster/comm/fake.py": "a world that only pretends",
}


def _makers(source):
    """Returns what of torch's own a module makes groups with."""
    if not any(name in source for name in MAKING):
        return set()
    tree = ast.parse(source)
    found = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr.startswith(MAKING)
        and ast.unparse(node.value) in ("dist", "torch.distributed", "distributed", "distributed_c10d", "device_mesh")
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed"):
            found |= {alias.name for alias in node.names if alias.name.startswith(MAKING)}
    return found


def test_groups_are_made_in_one_place():
    for name, path in FILES.items():
        found = _makers(path.read_text())
        assert bool(found) == (name in MAKERS), f"{name} makes {found}: booster.comm.process_groups sets the timeouts"


@pytest.mark.parametrize(
    "source",
    [
        "dist.new_group([0])",
        "from torch.distributed.device_mesh import init_device_mesh",
        "torch.distributed.new_subgroups_by_enumeration(rows)",
    ],
)
def test_the_search_finds_makers(source):
    assert _makers(source)


def test_the_search_leaves_our_own_makers():
    assert not _makers("from booster.comm import new_group\nnew_group([0])")
