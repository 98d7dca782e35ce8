"""A Trainer with every hook under every plugin equals plain torch in one process; runs resume bit for bit."""

from __future__ import annotations

import json
from functools import cache

import pytest
import torch
from harness import distributed, preload, run_ranks
from trainer_cases import ACCUMULATE, EPOCHS, PLUGINS, Recorder, make_trainer, train_by_torch, train_with_all_hooks

from booster import DesyncError
from booster.monitor.loggers import read_run
from booster.rng_state import preserved_rng
from booster.trainer import CheckpointHook, EarlyStopHook, EMAHook

preload("booster", "booster.plugins", "booster.trainer", "torch.profiler")

pytestmark = pytest.mark.on_device


@cache
def reference(dp_size: int):
    return train_by_torch(dp_size)


@pytest.mark.parametrize("kind", PLUGINS)
def test_every_hook_under_every_plugin(kind, tmp_path):
    ranks = run_ranks(train_with_all_hooks, 2, kind, tmp_path)
    expected = reference(1 if kind in ("tp_2", "pp_2") else 2)
    for found in ranks:
        assert found.losses == pytest.approx(expected.losses, rel=1e-4)
        for name, value in expected.metrics.items():
            assert found.metrics[name] == pytest.approx(value, rel=1e-4), name
        assert found.metrics == ranks[0].metrics
        for name, weight in expected.weights.items():
            torch.testing.assert_close(found.weights[name], weight.detach(), rtol=2e-4, atol=2e-5)
            torch.testing.assert_close(found.average[name], expected.average[name].detach(), rtol=2e-4, atol=2e-5)
        assert found.record["step"] == EPOCHS * 2
        for name in ("epoch_samples_per_second", "epoch_seconds", "epoch_step_seconds", "epoch_memory_bytes"):
            assert found.metrics[name] > 0
        # By the step of each schedule, which halves every two steps, after it is stepped.
        halvings = [round(-torch.tensor(rate / 0.05).log2().item()) for rate in found.rates]
        assert halvings[:6] == [0, 0, 0, 0, 0, 1]
        assert halvings[-1] == EPOCHS
    predictions = [found.predictions for found in ranks if found.predictions is not None]
    assert len(predictions) == (1 if kind == "pp_2" else 2)
    for one in predictions:
        torch.testing.assert_close(one, expected.predictions, rtol=1e-3, atol=1e-4)
    assert_points(ranks[0].points, num_evaluations=2 if kind not in ("tp_2", "pp_2") else 3)
    assert_files(tmp_path)


def assert_points(points, num_evaluations):
    iterations = ["before_iteration", "microbatch"] * 3 + ["before_iteration", "step"]
    iterations += ["before_iteration", "microbatch", "before_iteration", "step"]
    evaluation = ["before_evaluation", *["evaluation"] * num_evaluations, "after_evaluation"]
    epoch = ["before_epoch", *iterations, *evaluation, "after_epoch"]
    assert [one for one in points if one != "evaluation"] == [one for one in epoch if one != "evaluation"] * EPOCHS


def assert_files(folder):
    steps = sorted(path.name for path in (folder / "run").glob("step-*"))
    assert steps == ["step-00000004", "step-00000006"]
    assert (folder / "run" / "best" / "training_state.json").is_file()
    assert (folder / "run" / "latest").read_text().strip() == "step-00000006"
    assert len(list((folder / "traces").glob("rank-0-*.json"))) == 1
    assert json.loads(next((folder / "traces").glob("rank-1-*.json")).read_text())["traceEvents"]
    run = read_run(folder / "log.jsonl")
    assert list(run.records) == list(range(1, EPOCHS * 2 + 1))
    assert {"eval_accuracy", "epoch_loss"} <= run.records[2].keys()


# Resume.


def state_of(trainer):
    """Returns all tensors of a run on this rank."""
    found = {name: one.clone() for name, one in trainer.model.state_dict().items()}
    slices = trainer.optimizer.checkpoint_state().slices()
    return found | {f"{one.name} {one.span}": one.tensor.clone() for one in slices}


CUTS = (5, 6, 9)  # in an accumulation, the last of an epoch, and in the next epoch's accumulation; of 6 an epoch


@pytest.mark.parametrize(
    "kind", [one if one in ("ddp", "gemini", "pp_2") else pytest.param(one, marks=pytest.mark.slow) for one in PLUGINS]
)
@distributed(2)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(kind, tmp_path):
    def make():
        hooks = [recorder := Recorder(), EMAHook(0.5), CheckpointHook(tmp_path / "run", every_iterations=1)]
        return recorder, *make_trainer(kind, hooks, dropout=0.2)

    with preserved_rng():
        recorder, whole, loader, test_loader = make()
        torch.manual_seed(100 + whole.booster.plugin.dp_rank)
        whole.fit(loader, epochs=2, eval_loader=test_loader)
        expected = state_of(whole)
        for cut in CUTS:
            again_recorder, again, loader, test_loader = make()
            torch.manual_seed(7)
            path = tmp_path / "run" / f"step-{cut:08d}"
            metrics = again.fit(loader, epochs=2, eval_loader=test_loader, resume=path)
            assert again_recorder.losses == recorder.losses[cut:]
            assert again_recorder.rates == recorder.rates[cut:]
            assert metrics == whole.metrics
            assert (again.step, again.iteration, again.epoch) == (4, 12, 2)
            found = state_of(again)
            assert found.keys() == expected.keys()
            assert any(".ema" in name for name in found)
            for name, tensor in expected.items():
                assert torch.equal(found[name], tensor), f"{name} after a resume from batch {cut}"


class StopAt:
    """A hook that stops the run on rank 1's wish."""

    def __init__(self, iteration):
        self.iteration = iteration

    def after_iteration(self, trainer):
        trainer.stop(trainer.iteration == self.iteration and trainer.booster.rank == 1)


@distributed(2)
def test_auto_resumes_where_there_is_a_checkpoint(tmp_path):
    def run(iteration):
        hooks = [StopAt(iteration), CheckpointHook(tmp_path / "run", every_steps=1, keep_last=1)]
        trainer, loader, _ = make_trainer("ddp", hooks, dropout=0.2)
        trainer.fit(loader, epochs=2, resume="auto")
        return trainer

    with preserved_rng():
        torch.manual_seed(3)
        recorded = state_of(make_and_fit("ddp", epochs=2))
        torch.manual_seed(3)
        first = run(3)  # in an accumulation: saved at the end
        assert (first.iteration, first.step) == (3, 0)
        second = run(6)
        assert (second.iteration, second.step, second.epoch) == (6, 2, 1)
        last = run(-1)
        assert (last.iteration, last.step, last.epoch) == (12, 4, 2)
        found = state_of(last)
    assert all(torch.equal(found[name], one) for name, one in recorded.items())


@distributed(2)
def test_ranks_agree_on_the_latest_checkpoint_of_two_hooks(tmp_path):
    def make():
        hooks = [
            CheckpointHook(tmp_path / "rare", every_epochs=1, saves_end=False),
            CheckpointHook(tmp_path / "often", every_steps=1, saves_end=False),
        ]
        return make_trainer("ddp", hooks)

    trainer, loader, _ = make()
    trainer.fit(loader, steps=3)
    again, loader, _ = make()
    again.fit(loader, steps=3, resume="auto")
    assert (again.step, again.iteration) == (trainer.step, trainer.iteration)
    assert all(torch.equal(state_of(trainer)[name], one) for name, one in state_of(again).items())


# What is compared before a batch is read.

DIFFERENT = {
    "seed": "seed=",
    "shuffle": "shuffle=",
    "batch_size": "batch_size=",
    "drop_last": "drop_last=",
    "length": "num_samples=",
}


@pytest.mark.parametrize("what", DIFFERENT)
@distributed(2)
def test_loaders_that_differ_between_ranks(what):
    trainer, loader, test_loader = make_trainer("ddp", [])
    rank = trainer.booster.rank
    settings = {"shuffle": True, "seed": 3, "batch_size": 4, "drop_last": True}
    changed = {"shuffle": bool(rank), "seed": rank, "batch_size": 4 + rank, "drop_last": bool(rank)}
    dataset = torch.utils.data.Subset(test_loader.dataset, range(16 + rank * (what == "length")))
    other = trainer.booster.prepare_dataloader(dataset, **settings | {k: v for k, v in changed.items() if k == what})
    before = state_of(trainer)
    for call, name in (
        (lambda: trainer.fit(other, epochs=1), "train_loader"),
        (lambda: trainer.fit(loader, epochs=1, eval_loader=other), "eval_loader"),
        (lambda: trainer.evaluate(other), "loader"),
        (lambda: trainer.predict(other), "loader"),
    ):
        with pytest.raises(DesyncError, match=f"{name}: a dataloader with {DIFFERENT[what]}"):
            call()
    assert trainer.iteration == 0
    assert all(torch.equal(before[key], one) for key, one in state_of(trainer).items())
    trainer.fit(loader, epochs=1, eval_loader=test_loader)


def make_and_fit(kind, **options):
    trainer, loader, _ = make_trainer(kind, [], dropout=0.2)
    trainer.fit(loader, **options)
    return trainer


@distributed(2)
def test_fit_goes_on_in_the_epoch(tmp_path):
    with preserved_rng():
        torch.manual_seed(3)
        expected = state_of(make_and_fit("ddp", epochs=2))
        torch.manual_seed(3)
        trainer, loader, _ = make_trainer("ddp", [], dropout=0.2)
        for steps in (1, 3, 4):
            trainer.fit(loader, steps=steps)
        found = state_of(trainer)
    assert trainer.epoch == 2
    assert all(torch.equal(found[name], one) for name, one in expected.items())


@distributed(2)
def test_a_checkpoint_resumes_under_another_plugin(tmp_path):
    hook = CheckpointHook(tmp_path / "run", every_steps=1)
    trainer, loader, _ = make_trainer("zero_2", [EMAHook(0.5), hook])
    trainer.fit(loader, steps=2)
    average = EMAHook(0.5)
    other, loader, _ = make_trainer("fsdp", [average, CheckpointHook(tmp_path / "run")])
    other.fit(loader, steps=3, resume="auto")
    serial, loader, _ = make_trainer("ddp", [plain := EMAHook(0.5)])
    serial.fit(loader, steps=3)
    with average.applied(), plain.applied():
        with other.model.gathered():
            weights = {name: one.detach().clone() for name, one in other.model.unwrap().named_parameters()}
        for name, one in serial.model.named_parameters():
            torch.testing.assert_close(weights[name], one.detach(), rtol=1e-4, atol=1e-5)


def continue_run(folder, cut):
    """Returns the weights after two epochs, from what is saved after batch `cut`, or from the start."""
    trainer, loader, _ = make_trainer("ddp", [CheckpointHook(folder / "run", every_iterations=1)])
    path = None if cut is None else folder / "run" / f"step-{cut:08d}"
    metrics = trainer.fit(loader, epochs=2, resume=path)
    return {name: one.detach().clone() for name, one in trainer.model.named_parameters()}, metrics, trainer.iteration


@pytest.mark.parametrize("cut", [5, 6, 8])
def test_another_number_of_ranks_continues_the_epoch_and_the_accumulation(cut, tmp_path):
    expected, metrics, num_iterations = run_ranks(continue_run, 2, tmp_path, None)[0]
    found, metrics_of_one, num_of_one = run_ranks(continue_run, 1, tmp_path, cut)[0]
    assert num_of_one == num_iterations == 12
    assert metrics_of_one["epoch_loss"] == pytest.approx(metrics["epoch_loss"], rel=1e-5)
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-4, atol=1e-5)


# Decisions of all ranks.


@distributed(2)
def test_early_stop_ends_all_ranks_and_stays_ended(tmp_path):
    def run(resume):
        hooks = [stop := EarlyStopHook(wait=2, min_delta=1e6), CheckpointHook(tmp_path / "run")]
        trainer, loader, test_loader = make_trainer("ddp", hooks)
        trainer.fit(loader, epochs=20, eval_loader=test_loader, resume=resume)
        return trainer, stop

    trainer, stop = run(None)
    assert trainer.epoch == 3  # the first is the best, as no other improves so much
    assert stop.best is not None
    assert run("auto")[0].epoch == 3


@distributed(2)
def test_evaluations_between_steps(tmp_path):
    recorder = Recorder()
    trainer, loader, test_loader = make_trainer("ddp", [recorder], accumulate=1)
    trainer.fit(loader, steps=4, eval_loader=test_loader, evaluate_every=2)
    starts = [index for index, point in enumerate(recorder.points) if point == "before_evaluation"]
    assert [recorder.points[:index].count("before_iteration") for index in starts] == [2, 4]
    assert trainer.evaluate(test_loader) == {"eval_loss": trainer.metrics["eval_loss"]}
    assert trainer.model.training


def fail_at(point, on_rank, folder):
    """Returns what ends a run in which a hook raises on one rank."""

    class Failing:
        pass

    def fail(self, trainer):
        if trainer.booster.rank == on_rank:
            raise KeyError("what the hook says")

    setattr(Failing, point, fail)
    trainer, loader, test_loader = make_trainer("ddp", [Failing(), Recorder()])
    try:
        trainer.fit(loader, epochs=1, eval_loader=test_loader)
    except Exception as error:
        return type(error).__name__, str(error), "\n".join(getattr(error, "__notes__", []))
    return None


@pytest.mark.parametrize(
    "point",
    [
        *("before_fit", "after_iteration"),
        *(
            pytest.param(one, marks=pytest.mark.slow)
            for one in ("before_epoch", "before_iteration", "after_epoch", "before_evaluation", "after_evaluation")
        ),
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("after_evaluation_iteration", "after_fit")),
    ],
)
def test_a_hook_that_raises_on_one_rank_ends_all(point, tmp_path):
    other, failed = run_ranks(fail_at, 2, point, 1, tmp_path, fresh=True, device="cpu")
    assert failed[0] == "KeyError"
    assert f"Failing.{point}" in failed[1] + failed[2]
    assert other[0] == "RankFailedError"
    assert "what the hook says" in other[1]
    if point != "before_fit":
        assert f"the hook Failing.{point}" in other[1]


def test_the_accumulation_of_the_cases_is_longer_than_an_epochs_rest():
    assert 6 % ACCUMULATE  # else no cut would be at an accumulation that the epoch ends
