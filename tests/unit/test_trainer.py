"""A Trainer in one process: forms of batches, metrics, schedules, trackers, and wrong uses."""

from __future__ import annotations

import math
import sys
import types
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from booster import Booster, FP16TorchMixedPrecision, Trainer
from booster.core.model_wrapper import LabeledBatch, call_with_batch
from booster.errors import ConfigError
from booster.trainer import (
    AccuracyHook,
    CheckpointHook,
    EarlyStopHook,
    EMAHook,
    Hook,
    LossHook,
    LRScheduleHook,
    MetricHook,
    MonitorHook,
    ProfilerHook,
)


class Net(nn.Module):
    """Takes inputs alone, or computes its loss as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 4)

    def forward(self, x, labels=None):
        logits = self.layer(x)
        return logits if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


INPUTS = torch.randn(10, 3, generator=torch.Generator().manual_seed(1))
LABELS = torch.arange(10) % 4


def make(criterion=F.cross_entropy, hooks=(), scheduler=None, **arguments):
    booster = Booster(device="cpu")
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = None if scheduler is None else scheduler(optimizer)
    model, optimizer, *_ = booster.boost(model, optimizer)
    trainer = Trainer(booster, model, optimizer, criterion, scheduler, hooks, **arguments)
    return trainer, booster.prepare_dataloader(TensorDataset(INPUTS, LABELS), batch_size=4)


def weights(trainer):
    return trainer.model.unwrap().layer.weight.detach().clone()


# Batches.


def test_all_forms_of_batches_train_alike():
    pairs = [(INPUTS[:4], LABELS[:4]), (INPUTS[4:], LABELS[4:])]
    trainer, _ = make()
    trainer.fit(pairs, epochs=1)
    others = {
        "mappings with their loss": (None, [{"x": x, "labels": y} for x, y in pairs]),
        "mappings as inputs": (F.cross_entropy, [({"x": x}, y) for x, y in pairs]),
        "positional inputs": (F.cross_entropy, [((x,), y) for x, y in pairs]),
        "mappings and a criterion": (lambda out, batch: F.cross_entropy(out["logits"], batch["labels"]),
                                     [{"x": x, "labels": y} for x, y in pairs]),
    }  # fmt: skip
    for name, (criterion, batches) in others.items():
        other, _ = make(criterion)
        other.fit(batches, epochs=1)
        assert torch.equal(weights(other), weights(trainer)), name


def test_inputs_alone_are_given_to_the_criterion():
    seen = []

    def criterion(outputs, inputs):
        seen.append(inputs)
        return outputs.mean()

    trainer, _ = make(criterion)
    trainer.fit([INPUTS, [INPUTS]], epochs=1)
    assert all(torch.equal(one, INPUTS) for one in seen)
    assert len(seen) == 2


def test_a_labeled_batch_gives_the_model_its_inputs():
    assert call_with_batch(lambda x, *, y: (x, y), LabeledBatch(({"a": 1},), None).__class__({"x": 1, "y": 2}, 3)) == (
        1,
        2,
    )
    assert call_with_batch(lambda x: x, LabeledBatch(5, 3)) == 5


def test_predictions_are_in_order():
    trainer, loader = make()
    expected = F.linear(INPUTS, weights(trainer), trainer.model.unwrap().layer.bias)
    torch.testing.assert_close(trainer.predict(loader), expected.detach())
    batches = [{"x": INPUTS[:6], "labels": LABELS[:6]}, {"x": INPUTS[6:], "labels": LABELS[6:]}]

    def select(outputs):
        return {"logits": outputs["logits"], "names": list("abcdef"[: len(outputs["logits"])])}

    found = trainer.predict(batches, select)
    torch.testing.assert_close(found["logits"], expected.detach())
    assert found["names"] == list("abcdefabcd")


# Metrics.


def test_evaluations_leave_frozen_layers_in_their_mode():
    class Freeze(Hook):
        seen: list[bool]

        def before_epoch(self, trainer):
            trainer.model.unwrap().layer.eval()
            self.seen = []

        def after_iteration(self, trainer):
            self.seen.append(trainer.model.unwrap().layer.training)
            assert trainer.model.training

    hook = Freeze()
    trainer, loader = make(hooks=[hook])
    trainer.fit(loader, epochs=2, eval_loader=loader, evaluate_every=1)
    assert hook.seen == [False] * len(loader)


def test_fit_leaves_frozen_layers_in_their_mode():
    trainer, loader = make()
    trainer.model.unwrap().layer.eval()
    trainer.fit(loader, epochs=1)
    assert not trainer.model.unwrap().layer.training
    trainer.model.eval()
    trainer.fit(loader, epochs=1)
    assert trainer.model.unwrap().layer.training


def test_metrics_are_means_over_samples_or_tokens():
    def length(outputs, targets):
        return outputs.abs().sum(1)

    def tokens(outputs, targets):
        return (targets > 0).float(), torch.ones_like(targets)

    trainer, loader = make(hooks=[AccuracyHook(), MetricHook(length), MetricHook(tokens, "positive")])
    found = trainer.evaluate(loader)
    outputs = trainer.predict(loader)
    assert found["eval_accuracy"] == pytest.approx(float((outputs.argmax(1) == LABELS).float().mean()))
    assert found["eval_length"] == pytest.approx(float(outputs.abs().sum(1).mean()))
    assert found["eval_positive"] == pytest.approx(0.7)
    assert found["eval_loss"] == pytest.approx(float(F.cross_entropy(outputs, LABELS)))


def test_accuracy_takes_logits_and_labels_of_mappings_and_ignores_padding():
    labels = LABELS.clone()
    labels[5:] = -100
    trainer, _ = make(None, hooks=[AccuracyHook()])
    found = trainer.evaluate([{"x": INPUTS, "labels": labels}])
    right = F.linear(INPUTS, weights(trainer), trainer.model.unwrap().layer.bias).argmax(1) == LABELS
    assert found["eval_accuracy"] == pytest.approx(float(right[:5].float().mean()))


def test_metrics_that_would_sum_over_ranks_are_told_not_to():
    class Metric(nn.Module):  # as of torchmetrics
        def __init__(self):
            super().__init__()
            self.distributed_available_fn = lambda: True

        def update(self, outputs, targets):
            pass

        def reset(self):
            pass

        def compute(self):
            return torch.tensor(float(self.distributed_available_fn()))

    class Collection(nn.Module):
        update, reset = Metric.update, Metric.reset

        def __init__(self):
            super().__init__()
            self.a = Metric()

        def compute(self):
            return {"a": self.a.compute()}

    trainer, loader = make(hooks=[MetricHook(Metric()), MetricHook(Collection(), "all")])
    found = trainer.evaluate(loader)
    assert (found["eval_metric"], found["eval_all_a"]) == (0.0, 0.0)


def test_metrics_of_one_kind_have_names():
    hooks = [AccuracyHook(), AccuracyHook("least", outputs=torch.neg)]
    trainer, loader = make(hooks=hooks)
    trainer.evaluate(loader)
    logits = F.linear(INPUTS, weights(trainer), trainer.model.unwrap().layer.bias)
    assert trainer.metrics["eval_accuracy"] == pytest.approx(float((logits.argmax(1) == LABELS).double().mean()))
    assert trainer.metrics["eval_least"] == pytest.approx(float((logits.argmin(1) == LABELS).double().mean()))


def test_a_metric_that_is_a_mean_is_an_error():
    trainer, loader = make(hooks=[MetricHook(lambda outputs, targets: outputs.mean(), "mean")])
    with pytest.raises(ConfigError, match="without a row per sample"):
        trainer.evaluate(loader)


# Schedules and decisions.


def test_schedules_by_steps_epochs_and_metrics():
    def rate_after(hooks, scheduler):
        trainer, loader = make(hooks=hooks, scheduler=scheduler)
        trainer.fit(loader, epochs=2, eval_loader=loader)
        return trainer.optimizer.param_groups[0]["lr"]

    def halving(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    def plateau(optimizer):
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", 0.1, 0)

    assert rate_after([], halving) == 0.5 * 0.5**6
    assert rate_after([LRScheduleHook("epoch")], halving) == 0.5 * 0.5**2
    assert rate_after([LRScheduleHook("evaluation", monitor="eval_loss")], plateau) == pytest.approx(0.05)


def test_skipped_steps_count_neither_in_schedules_nor_in_averages():
    booster = Booster(device="cpu", mixed_precision=FP16TorchMixedPrecision(init_scale=2.0**40, growth_interval=100))
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    model, optimizer, *_ = booster.boost(model, optimizer)
    seen = []

    class Look:
        def after_iteration(self, trainer):
            averages = [state["ema"].clone() for state in optimizer.state.values() if "ema" in state]
            seen.append((optimizer.step_was_skipped, scheduler.last_epoch, averages))

    hooks = [EMAHook(0.5), Look()]
    trainer = Trainer(booster, model, optimizer, F.cross_entropy, scheduler, hooks)
    trainer.fit([(INPUTS, LABELS)] * 40, epochs=1)
    skipped = [was_skipped for was_skipped, _, _ in seen]
    first = skipped.index(False)
    assert first > 2
    assert not any(skipped[first:])
    assert [count for _, count, _ in seen] == [0] * first + list(range(1, 41 - first))
    assert not any(averages for _, _, averages in seen[:first])
    assert all(len(averages) == 2 for _, _, averages in seen[first:])


def test_a_nan_is_no_improvement():
    hook = EarlyStopHook(wait=2)
    stops = []
    trainer = SimpleNamespace(is_fitting=True, metrics={}, stop=stops.append)
    for loss in (1.0, math.nan, math.nan):
        trainer.metrics["eval_loss"] = loss
        hook.after_evaluation(trainer)
    assert stops == [False, False, True]
    assert hook.best == 1.0


def test_hooks_are_called_by_priority():
    order = []

    class Named(Hook):
        def __init__(self, name, priority):
            self.name, self.priority = name, priority

        def before_fit(self, trainer):
            order.append(self.name)

    trainer, loader = make(hooks=[Named("late", 80), Named("first", -5), Named("second", 50), Named("third", 50)])
    trainer.fit(loader, epochs=1)
    assert order == ["first", "second", "third", "late"]


def test_a_hook_may_give_a_bar_its_length():
    class Bar(Hook):
        def before_fit(self, trainer):
            trainer.total_steps = 1

    trainer, loader = make(hooks=[Bar()])
    trainer.fit(loader, epochs=2)
    assert trainer.epoch == 2


# Trackers.


def test_records_go_to_trackers(monkeypatch):
    calls = []

    class Run:
        def log(self, numbers):
            calls.append(("wandb", numbers))

        def finish(self):
            calls.append(("wandb", "finish"))

    wandb, mlflow = types.ModuleType("wandb"), types.ModuleType("mlflow")
    wandb.init = lambda project: calls.append(("wandb", project)) or Run()
    mlflow.set_experiment = lambda name: calls.append(("mlflow", name))
    mlflow.start_run = lambda run_name=None: calls.append(("mlflow", run_name))
    mlflow.log_metrics = lambda numbers, step: calls.append(("mlflow", step, numbers))
    mlflow.end_run = lambda: calls.append(("mlflow", "end"))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    trainer, loader = make(hooks=[MonitorHook(wandb="gpt", mlflow="runs", progress=False)])
    trainer.fit(loader, epochs=1, eval_loader=loader)
    assert calls[:3] == [("wandb", "gpt"), ("mlflow", "runs"), ("mlflow", None)]
    assert {("wandb", "finish"), ("mlflow", "end")} <= {one for one in calls if isinstance(one[1], str)}
    logged = [one[1] for one in calls if one[0] == "wandb" and isinstance(one[1], dict)]
    assert [one["step"] for one in logged] == [1, 2, 3, 3]
    assert logged[0].keys() >= {"loss", "lr", "seconds_in/backward"}
    assert logged[3].keys() == {"step", "eval_loss", "epoch_loss"}
    assert [one[1] for one in calls if one[0] == "mlflow" and len(one) == 3] == [1, 2, 3, 3]
    trainer, loader = make(hooks=[MonitorHook(mlflow={"run_name": "a", "other": 1}, progress=False)])
    with pytest.raises(ConfigError, match=r"mlflow.start_run does not take these"):
        trainer.fit(loader, epochs=1)


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_tracker_that_is_not_installed_is_an_error(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    trainer, loader = make(hooks=[MonitorHook(**{name: "gpt"}, progress=False)])
    with pytest.raises(ConfigError, match=rf"pip install torch-booster\[{name}\]"):
        trainer.fit(loader, epochs=1)
    trainer, loader = make(hooks=[MonitorHook(**{name: 3}, progress=False)])
    with pytest.raises(ConfigError, match="neither a name nor keyword arguments"):
        trainer.fit(loader, epochs=1)


# Wrong uses.


# As loops for DDP have it: with shuffle=True every epoch would have one order, and evaluations count samples twice.
DIVIDED = DataLoader([1, 2, 3], sampler=DistributedSampler([1, 2, 3], num_replicas=2, rank=0))


class Misspelt:
    def after_iteraton(self, trainer):
        pass


class Late(Hook):
    priority = "late"

    def after_fit(self, trainer):
        pass


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hooks": [LossHook]}, r"is a class.*write LossHook\(\)"),
        ({"hooks": LossHook()}, "must be a list, got a single LossHook"),
        ({"hooks": [object()]}, "with none of the methods"),
        ({"hooks": [Misspelt()]}, r"has the method after_iteraton.*Name it after_iteration"),
        ({"hooks": [Late()]}, "priority='late'"),
        ({"criterion": 3}, "criterion=3 is not callable"),
        ({"accumulate": 0}, "accumulate=0 is not a count"),
        ({"max_norm": -1.0}, "max_norm=-1.0"),
        ({"gradient_handlers": ["Unknown"]}, "is unknown"),
        ({"gradient_handlers": 5}, "gradient_handlers=5 is a single handler"),
        ({"hooks": [AccuracyHook(), AccuracyHook()]}, "two of the hooks write the metric eval_accuracy"),
    ],
)
def test_wrong_arguments_of_a_trainer(arguments, message):
    with pytest.raises(ConfigError, match=message):
        make(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "give the length of the run by one of them"),
        ({"epochs": 1, "steps": 1}, "give the length of the run by one of them"),
        ({"steps": 0}, "steps=0 is not a count"),
        ({"epochs": 1, "evaluate_every": 2}, "has nothing to evaluate"),
        ({"epochs": 1, "resume": "auto"}, "there is none: add one"),
        ({"epochs": 1, "resume": 3}, r"fit\(resume=3\): give resume='auto'"),
        ({"epochs": 1, "eval_loader": 3}, "eval_loader must be iterable"),
        ({"epochs": 1, "eval_loader": DIVIDED}, "divided by a DistributedSampler.*prepare_dataloader"),
    ],
)
def test_wrong_arguments_of_fit(arguments, message):
    trainer, loader = make()
    with pytest.raises(ConfigError, match=message):
        trainer.fit(loader, **arguments)


@pytest.mark.parametrize(
    ("make_hook", "message"),
    [
        (lambda: LRScheduleHook("day"), "by='day'"),
        (lambda: LRScheduleHook("step", monitor="eval_loss"), "write by='evaluation'"),
        (lambda: EarlyStopHook(wait=0), "wait=0"),
        (lambda: EarlyStopHook(mode="least"), "mode='least'"),
        (lambda: EarlyStopHook(3), "give its name"),
        (lambda: EarlyStopHook(min_delta=-1), "min_delta=-1"),
        (lambda: MetricHook(3), "neither a function"),
        (lambda: CheckpointHook("a", every_steps=0), "every_steps=0"),
        (lambda: CheckpointHook("a", every_steps=1, every_iterations=1), "by both"),
        (lambda: CheckpointHook(3), "path must be a path"),
        (lambda: CheckpointHook("a", keep_last=0), "keep_last=0"),
        (lambda: ProfilerHook("a", active=0), "active=0"),
        (lambda: ProfilerHook("a", ranks=0), r"write ranks=\[0\]"),
    ],
)
def test_wrong_arguments_of_hooks(make_hook, message):
    with pytest.raises(ConfigError, match=message):
        make_hook()


@pytest.mark.parametrize(
    ("hooks", "message"),
    [
        ([LRScheduleHook()], "no scheduler to step"),
        ([EarlyStopHook()], "EarlyStopHook needs evaluations"),
        ([CheckpointHook("a", best="eval_loss")], "needs evaluations"),
    ],
)
def test_hooks_that_lack_what_they_need(hooks, message):
    trainer, loader = make(hooks=hooks)
    with pytest.raises(ConfigError, match=message):
        trainer.fit(loader, epochs=1)


def test_an_unknown_metric_is_named():
    trainer, loader = make(hooks=[EarlyStopHook("eval_f1")])
    with pytest.raises(ConfigError, match="monitors 'eval_f1', and the metrics are eval_loss: choose"):
        trainer.fit(loader, epochs=1, eval_loader=loader)


def test_batches_and_loaders_that_cannot_be_run():
    trainer, loader = make()
    with pytest.raises(ConfigError, match="a tuple of 3 values"):
        trainer.fit([(INPUTS, LABELS, LABELS)], epochs=1)
    with pytest.raises(ConfigError, match="must be iterable once per epoch"):
        trainer.fit(iter([INPUTS]), epochs=1)
    with pytest.raises(ConfigError, match="has no batches"):
        trainer.fit([], epochs=1)
    trainer, loader = make(None)
    with pytest.raises(ConfigError, match=r"criterion=None.*without a loss"):
        trainer.fit(loader, epochs=1)


@pytest.mark.parametrize("make_several", [lambda one: [one, one], lambda one: (one,), lambda one: {"a": one}])
def test_several_loaders_in_place_of_one(make_several):
    trainer, loader = make()
    before = weights(trainer)
    with pytest.raises(ConfigError, match=r"eval_loader is a .*call trainer.evaluate\(loader\) for each"):
        trainer.fit(loader, epochs=1, eval_loader=make_several(loader))
    assert torch.equal(weights(trainer), before)
    with pytest.raises(ConfigError, match=r"train_loader is a .*one loader over a torch.utils.data.ConcatDataset"):
        trainer.fit(make_several(loader), epochs=1)
    for method in (trainer.evaluate, trainer.predict):
        with pytest.raises(ConfigError, match=r"loader is a .*and a Trainer reads one loader"):
            method(make_several(loader))


def test_two_checkpoint_hooks_with_one_path(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "a")
    for other in ("a", "b/../a", "link"):
        hooks = [CheckpointHook(tmp_path / "a", every_steps=1), CheckpointHook(tmp_path / other, every_epochs=1)]
        with pytest.raises(ConfigError, match=r"two CheckpointHooks save into .*give each a path of its own"):
            make(hooks=hooks)


@pytest.mark.parametrize("order", [1, -1])
def test_auto_resumes_from_the_latest_checkpoint_of_several_hooks(tmp_path, order):
    def hooks():
        frequent = CheckpointHook(tmp_path / "a", every_iterations=2, saves_end=False)
        rare = CheckpointHook(tmp_path / "b", every_epochs=2, saves_end=False)
        return [frequent, CheckpointHook(tmp_path / "nothing yet", every_epochs=9, saves_end=False), rare][::order]

    def resumed_at():
        trainer, loader = make(hooks=hooks())
        trainer.fit(loader, steps=1, resume="auto")
        return trainer.step

    assert resumed_at() == 1  # there is none: the first step
    trainer, loader = make(hooks=hooks())
    trainer.fit(loader, steps=5)  # 3 in an epoch
    assert resumed_at() == 4
    trainer.fit(loader, epochs=3)  # the frequent one after 8 batches
    assert resumed_at() == 8
    remove = tmp_path / "a" / "step-00000008"
    remove.rename(tmp_path / "moved")
    assert resumed_at() == 6
    assert (tmp_path / "b" / "step-00000006").is_dir()


def test_checkpoints_of_other_loops_and_lists(tmp_path):
    trainer, loader = make(hooks=[CheckpointHook(tmp_path / "a")])
    trainer.booster.save(tmp_path / "own", trainer.model, trainer.optimizer, dataloader=loader, extra={"step": 3})
    with pytest.raises(ConfigError, match="without the position of a Trainer"):
        trainer.fit(loader, epochs=1, resume=tmp_path / "own")
    with pytest.raises(ConfigError, match="without a position to save"):
        trainer.fit([(INPUTS, LABELS)], epochs=1)


class Unlike:
    def after_iteration(self):
        """Takes no Trainer."""


def test_a_hook_that_takes_other_arguments():
    with pytest.raises(ConfigError, match=r"Unlike.after_iteration can't be called .*: write def after_iteration"):
        make(hooks=[Unlike()])


def test_a_resume_with_other_hooks_and_batches_is_warned_of(tmp_path, capsys):
    trainer, loader = make(hooks=[CheckpointHook(tmp_path, every_epochs=1), EMAHook(0.9)])
    trainer.fit(loader, epochs=1)
    trainer, loader = make(hooks=[CheckpointHook(tmp_path, every_epochs=1), EarlyStopHook("eval_loss")], accumulate=2)
    trainer.fit(loader, epochs=2, eval_loader=loader, resume="auto")
    said = capsys.readouterr()
    text = said.out + said.err
    assert "which are ignored: EMAHook" in text
    assert "which start anew: EarlyStopHook" in text
    assert "saved with accumulate=1, and continues with accumulate=2" in text


def test_a_maximum_norm_of_zero_clips_nothing():
    trainer, loader = make(max_norm=0)
    reference, other = make()
    trainer.fit(loader, epochs=1)
    reference.fit(other, epochs=1)
    assert torch.equal(weights(trainer), weights(reference))
    assert trainer.grad_norm is None


class _FailingOnce:
    """A criterion that fails in the first evaluation."""

    def __init__(self) -> None:
        self.has_failed = False

    def __call__(self, outputs, targets):
        if not torch.is_grad_enabled() and not self.has_failed:
            self.has_failed = True
            raise KeyError("in the evaluation")
        return F.cross_entropy(outputs, targets)


def test_averages_are_no_weights_after_an_evaluation_that_failed(tmp_path):
    hook = EMAHook(0.5)
    trainer, loader = make(criterion=_FailingOnce(), hooks=[hook])
    trainer.fit(loader, epochs=1)
    before = weights(trainer)
    loss, batch = trainer.loss, trainer.batch
    with pytest.raises(KeyError):
        trainer.evaluate(loader)
    assert trainer.loss is loss
    assert trainer.batch is batch
    with pytest.raises(ConfigError, match="saved after an evaluation that failed"):
        trainer.save(tmp_path / "run")
    trainer.evaluate(loader)
    assert torch.equal(weights(trainer), before)
    trainer.criterion.has_failed = False
    with pytest.raises(KeyError):
        trainer.evaluate(loader)
    trainer.fit(loader, epochs=2)  # from the weights
    reference, other = make(hooks=[EMAHook(0.5)])
    reference.fit(other, epochs=2)
    assert torch.equal(weights(trainer), weights(reference))


def test_an_average_goes_on_in_another_trainer_of_its_optimizer_only():
    hook = EMAHook(0.5)
    trainer, loader = make(hooks=[hook])
    trainer.fit(loader, epochs=1)
    before = [state["ema"].clone() for state in trainer.optimizer.state.values()]
    again = Trainer(trainer.booster, trainer.model, trainer.optimizer, F.cross_entropy, hooks=[hook])
    again.fit(loader, epochs=1)
    after = [state["ema"] for state in trainer.optimizer.state.values()]
    assert not any(torch.equal(*both) for both in zip(before, after, strict=True))
    other, _ = make(hooks=[hook])
    with pytest.raises(ConfigError, match="averages the weights of another optimizer"):
        other.fit(loader, epochs=1)


def test_a_metric_that_is_nan_is_logged_once(tmp_path):
    class Nan(Hook):
        def after_epoch(self, trainer):
            trainer.metrics["eval_nan"] = math.nan

    monitored = MonitorHook(log=tmp_path / "log.jsonl")
    trainer, loader = make(hooks=[Nan(), monitored])
    trainer.fit(loader, epochs=3)
    assert (tmp_path / "log.jsonl").read_text().count("eval_nan") == 1
