"""The harness itself, with real ranks: results, failures named by rank, hangs, deaths, and life after them."""

from __future__ import annotations

import os
import random
import signal
import threading
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness import RanksFailed, distributed, run_ranks
from harness.forkserver import WORKER_ENVIRONMENT
from zoo import get_model, split_batch

CALLS: list[int] = []


@dataclass(frozen=True)
class Point:
    """Travels to the ranks and back although its module can only be imported by path."""

    x: int


def rank_and_size() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def sum_over_ranks(value: torch.Tensor) -> torch.Tensor:
    total = value * (dist.get_rank() + 1)
    dist.all_reduce(total)
    return total


def shift(point: Point, *, by: int) -> Point:
    return Point(point.x + by + dist.get_rank())


def process_id() -> int:
    return os.getpid()


def calls_so_far() -> int:
    CALLS.append(0)
    return len(CALLS)


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        values = [1, 2]
        assert sum(values) == 4
    dist.barrier()


def die_on(rank: int, code: int | None) -> None:
    if dist.get_rank() == rank:
        if code is None:
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(code or 0)
    dist.barrier()


def wait_in_vain(ranks: tuple[int, ...]) -> str:
    if dist.get_rank() in ranks:
        threading.Event().wait()
    return "done"


def reduce_different_sizes() -> None:
    dist.all_reduce(torch.ones(2 + dist.get_rank()))


def disturb_everything() -> None:
    os.environ["LEFT_BEHIND"] = "1"
    os.environ["RANK"] = "17"
    os.chdir("/")
    torch.set_default_dtype(torch.float64)
    dist.new_group([0, 1])
    torch.rand(3)


def surroundings() -> dict[str, object]:
    return {
        "left": os.environ.get("LEFT_BEHIND"),
        "launcher": [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")],
        "directory": os.getcwd(),
        "dtype": str(torch.get_default_dtype()),
        "threads": torch.get_num_threads(),
        "debug": dist.get_debug_level().name,
        "random": (random.random(), np.random.rand(), torch.rand(()).item()),
    }


def destroy_group() -> None:
    dist.destroy_process_group()


def return_closure() -> object:
    return lambda: None


def skip_this() -> None:
    pytest.skip("nothing to do")


def train_with_ddp() -> float:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
    model(torch.full((2, 3), float(dist.get_rank()))).sum().backward()
    return model.module.weight.grad.sum().item()


def loss_of_own_part(name: str) -> torch.Tensor:
    entry = get_model(name)
    part = split_batch(entry.make_batch(0, 4), dist.get_rank(), dist.get_world_size())
    return entry.loss(entry.build(), part).detach()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_rank_returns_its_result(world_size):
    assert run_ranks(rank_and_size, world_size) == [(rank, world_size) for rank in range(world_size)]


def test_arguments_and_tensors_travel_both_ways():
    totals = run_ranks(sum_over_ranks, 2, torch.tensor([1.0, 2.0]))
    assert [total.tolist() for total in totals] == [[3.0, 6.0]] * 2
    assert run_ranks(shift, 2, Point(1), by=10) == [Point(11), Point(12)]


def test_ddp_works_under_the_detail_debug_level():
    assert run_ranks(train_with_ddp, 2) == [3.0, 3.0]  # mean of 0 and of 2 samples x 3 weights x 1


def test_the_zoo_is_the_same_on_the_ranks():
    entry = get_model("mlp_odd")
    whole = entry.loss(entry.build(), entry.make_batch(0, 4)).item()
    assert torch.stack(run_ranks(loss_of_own_part, 2, "mlp_odd")).mean().item() == pytest.approx(whole, rel=1e-6)


def test_live_ranks_are_used_again_and_fresh_ones_are_not():
    first, second = run_ranks(process_id, 2), run_ranks(process_id, 2)
    fresh = run_ranks(process_id, 2, fresh=True)
    assert first == second
    assert not set(first) & set(fresh)
    assert run_ranks(calls_so_far, 2, fresh=True) == [1, 1]


def test_worlds_can_change_from_job_to_job():
    sizes = [2, 4, 1, 2, 3, 4]
    assert [len(run_ranks(rank_and_size, size)) for size in sizes] == sizes


def test_jobs_start_in_the_same_surroundings():
    expected = run_ranks(surroundings, 2)
    run_ranks(disturb_everything, 2)
    assert run_ranks(surroundings, 2) == expected
    assert expected[1]["launcher"] == ["1", "2", "1", "2"]
    assert expected[0]["random"] == expected[1]["random"]
    debug = WORKER_ENVIRONMENT["TORCH_DISTRIBUTED_DEBUG"]
    assert (expected[0]["threads"], expected[0]["debug"], expected[0]["left"]) == (1, debug, None)


def test_a_job_may_destroy_the_group():
    run_ranks(destroy_group, 2)
    assert run_ranks(rank_and_size, 2) == [(0, 2), (1, 2)]


@pytest.mark.parametrize("fresh", [False, True])
def test_the_failing_rank_is_named_first_with_its_traceback(fresh):
    with pytest.raises(RanksFailed) as failed:
        run_ranks(fail_on, 4, 2, fresh=fresh)
    report = str(failed.value)
    assert report.startswith("rank 2 of 4 raised AssertionError: assert 3 == 4")
    assert "in fail_on\n    assert sum(values) == 4" in report
    assert failed.value.first.error_type == "AssertionError"
    assert {failure.rank for failure in failed.value.failures} == {0, 1, 2, 3}
    assert run_ranks(rank_and_size, 4)[3] == (3, 4)


@pytest.mark.slow
def test_a_hang_says_where_and_the_next_job_works():
    with pytest.raises(RanksFailed) as failed:
        run_ranks(wait_in_vain, 2, (1,), timeout=3)
    report = str(failed.value)
    assert report.startswith("timed out after 3 s on 1 of 2 ranks: rank 1 in wait_in_vain (test_harness_ranks.py:")
    assert report.endswith("--- rank 0 returned 'done'")
    assert failed.value.results == {0: "done"}
    assert "threading.py" in failed.value.first.detail
    assert run_ranks(rank_and_size, 2) == [(0, 2), (1, 2)]


def test_a_hang_of_all_names_all():
    with pytest.raises(RanksFailed, match=r"on 2 of 2 ranks: rank 0 in wait_in_vain .*; rank 1 in wait_in_vain"):
        run_ranks(wait_in_vain, 2, (0, 1), timeout=0.5, fresh=True)


@pytest.mark.parametrize(("code", "how"), [(None, "killed by SIGKILL"), (7, "left with exit code 7")])
@pytest.mark.parametrize("fresh", [False, True])
def test_a_death_is_reported_before_what_it_caused(code, how, fresh):
    with pytest.raises(RanksFailed) as failed:
        run_ranks(die_on, 2, 1, code, fresh=fresh)
    assert str(failed.value).startswith(f"rank 1 of 2 died: {how}")
    assert [failure.rank for failure in failed.value.failures] == [1, 0]
    assert run_ranks(rank_and_size, 2) == [(0, 2), (1, 2)]


@pytest.mark.skipif(
    WORKER_ENVIRONMENT["TORCH_DISTRIBUTED_DEBUG"] != "DETAIL", reason="only debugging at level DETAIL detects them"
)
def test_mismatched_collectives_raise_in_python():
    with pytest.raises(RanksFailed, match=r"all_reduce|ALLREDUCE") as failed:
        run_ranks(reduce_different_sizes, 2, fresh=True)
    assert failed.value.first.kind == "raised"
    assert "different" in str(failed.value) or "mismatch" in str(failed.value)


def test_a_result_that_cannot_travel_is_an_error_of_the_rank():
    with pytest.raises(RanksFailed, match="returned a function that can't be sent to the test"):
        run_ranks(return_closure, 1)


def test_a_skip_on_the_ranks_skips_the_test():
    with pytest.raises(pytest.skip.Exception, match="nothing to do"):
        run_ranks(skip_this, 2)


@distributed(world_size=2)
def test_a_decorated_body_runs_on_all_ranks():
    assert dist.get_world_size() == 2
    gathered: list[object] = [None, None]
    dist.all_gather_object(gathered, dist.get_rank())
    assert gathered == [0, 1]


@pytest.mark.parametrize("value", [3, 5])
@distributed(world_size=(1, 2))
def test_parameters_and_fixtures_reach_the_body(value, tmp_path):
    assert value in (3, 5)
    (tmp_path / f"rank-{dist.get_rank()}").write_text(str(value))
    dist.barrier()
    assert len(list(tmp_path.iterdir())) == dist.get_world_size()


@distributed(world_size=[2, 3])
def test_the_body_may_ask_for_the_world_size(world_size):
    assert dist.get_world_size() == world_size


@distributed(world_size=2, fresh=True)
def test_a_decorated_body_runs_in_fresh_processes():
    assert calls_so_far() == 1


class TestMethods:
    """A decorated method, as test classes have them."""

    offset = 1

    @distributed(world_size=2)
    def test_a_method_runs_on_all_ranks(self):
        assert dist.get_rank() + self.offset in (1, 2)
