"""Phases: every moment belongs to one, other threads can see where a thread is, and all seams of a loop have theirs."""

from __future__ import annotations

import threading
import time
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from booster import Booster
from booster.fault_tolerance.progress import (
    SAVE_PHASES,
    Phase,
    Progress,
    StepCallback,
    current_progress,
    current_thread,
    in_phase,
    observe_phases,
)


class Recorder(StepCallback):
    def __init__(self):
        self.seconds, self.entered, self.events = Counter(), [], []

    def on_time(self, name, seconds):
        self.seconds[name] += seconds
        self.entered.append(name)

    def on_forward(self, model, arguments, keywords):
        self.events.append("forward")

    def on_loss(self, optimizer, loss, num_items):
        self.events.append(("loss", float(loss.detach()), num_items))

    def on_step_end(self, optimizer):
        self.events.append(("step", optimizer.step_was_skipped))


def make():
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    booster = Booster(device="cpu")
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return booster, model, optimizer


def test_every_moment_belongs_to_the_innermost_phase(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))
    recorder = Recorder()
    with observe_phases(recorder), Phase("a"), Phase("b"):  # at 0, 1, 2; out of them at 3, 4, 5
        pass
    assert recorder.seconds == {None: 2.0, "a": 2.0, "b": 1.0}


def test_the_times_are_those_of_the_clock():
    recorder = Recorder()
    began = time.perf_counter()
    with observe_phases(recorder):
        for _ in range(100):
            with Phase("outer"), Phase("inner"):
                sum(range(100))
    elapsed = time.perf_counter() - began
    assert 0.9 * elapsed - 1e-3 < sum(recorder.seconds.values()) <= elapsed


def test_an_error_leaves_the_phase():
    with pytest.raises(ZeroDivisionError), Phase("a"), Phase("b"):
        _ = 1 / 0
    assert current_progress().phases == ()


def test_a_function_keeps_its_face():
    @in_phase("work")
    def function(number: int, *, other: str = "x") -> tuple[str, ...]:
        """Documented."""
        return current_progress().phases

    assert function(1) == ("work",)
    assert function.__name__ == "function"
    assert function.__doc__ == "Documented."
    assert current_progress().phases == ()


def test_another_thread_sees_where_this_one_is():
    operation = SimpleNamespace(name="all_reduce", group=None, number=3, peer=None)
    seen = []
    main = threading.get_ident()
    thread = threading.Thread(target=lambda: seen.extend([current_progress(main), current_progress()]))
    with Phase("backward"), Phase("communication", operation):
        thread.start()
        thread.join()
    assert seen[0].phases == ("backward", "communication")
    assert (seen[0].operation.name, seen[0].operation.number) == ("all_reduce", 3)
    assert "in communication in backward" in str(seen[0])
    assert seen[1].phases == ()
    assert current_progress().operation is None
    assert current_progress().last_operation.number == 3
    assert current_progress(thread_id=-1) == Progress()


def test_observers_see_their_own_thread_alone():
    recorder = Recorder()

    def elsewhere():
        assert current_thread.state.observers == ()
        with Phase("elsewhere"):
            pass

    with observe_phases(recorder):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert "elsewhere" not in recorder.entered
    assert current_thread.state.observers == ()


def test_nested_observers_each_have_their_own_block():
    outer, inner = Recorder(), Recorder()
    with observe_phases(outer):
        with Phase("a"):
            pass
        with observe_phases(inner), Phase("b"):
            pass
    assert "a" in outer.entered
    assert "b" in outer.entered
    assert "a" not in inner.entered
    assert "b" in inner.entered


def test_a_loop_enters_the_phases_of_its_calls(tmp_path):
    recorder = Recorder()
    booster, model, optimizer = make()
    loader = booster.prepare_dataloader(TensorDataset(torch.ones(4, 3)), batch_size=2)
    with observe_phases(recorder):
        for (inputs,) in loader:
            booster.backward(model(inputs).square().mean(), optimizer)
            booster.clip_grad_norm_(optimizer, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            model(torch.ones(1, 3))
        booster.save(tmp_path / "a", model, optimizer)
        booster.load(tmp_path / "a", model, optimizer)
        make()
    wanted = {None, "data", "forward", "backward", "clip", "step", "evaluate", "save", "load", "boost", *SAVE_PHASES}
    assert recorder.seconds.keys() == wanted
    kinds = [one if isinstance(one, str) else one[0] for one in recorder.events]
    assert kinds == ["forward", "loss", "step"] * 2
    assert current_progress().num_steps == 2


def test_the_pipeline_call_has_the_phases_inside():
    recorder = Recorder()
    booster, model, optimizer = make()
    with observe_phases(recorder):
        batches = iter([torch.ones(2, 3)])
        booster.execute_pipeline(batches, model, lambda outputs, batch: outputs.sum(), optimizer)
        optimizer.step()
    assert {"pipeline", "forward", "backward", "step"} <= recorder.seconds.keys()
    assert [one[0] for one in recorder.events] == ["f", "loss", "step"]


def test_micro_steps_end_one_step():
    recorder = Recorder()
    booster, model, optimizer = make()
    with observe_phases(recorder):
        for _ in range(4):
            with booster.accumulate(model, optimizer, steps=2):
                booster.backward(model(torch.ones(2, 3)).mean(), optimizer)
                optimizer.step()
                optimizer.zero_grad()
    assert [one[0] for one in recorder.events if one != "forward"] == ["loss", "loss", "step"] * 2


def test_a_closure_ends_a_step():
    recorder = Recorder()
    model = nn.Linear(3, 1)
    booster = Booster(device="cpu")
    model, optimizer, *_ = booster.boost(model, torch.optim.LBFGS(model.parameters(), max_iter=2))

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).square().mean()
        booster.backward(loss, optimizer)
        return loss

    with observe_phases(recorder):
        optimizer.step(closure)
    assert [one for one in recorder.events if one[0] == "step"] == [("step", False)]


def test_a_boosted_model_can_be_compiled():
    _, model, _ = make()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert torch.equal(compiled(torch.ones(2, 3)), model(torch.ones(2, 3)))


def test_a_phase_costs_about_nothing_without_observers():
    def run(number):
        began = time.perf_counter()
        for _ in range(number):
            with Phase("a"):
                pass
        return time.perf_counter() - began

    assert min(run(10_000) for _ in range(20)) / 10_000 < 3e-6  # 0.45 us measured; a busy machine is slower
