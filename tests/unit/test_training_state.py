"""One call that saves a whole run: what it writes, what it refuses, and what it leaves alone."""

from __future__ import annotations

import json
import os
import random
import shutil

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, StepLR
from torch.utils.data import DataLoader, IterableDataset

from booster import Booster, FP16NaiveMixedPrecision, FP16TorchMixedPrecision
from booster.errors import CheckpointError, ConfigError

PRECISIONS = {
    "fp32": lambda: None,
    "bf16": lambda: "bf16",
    "fp16": lambda: FP16TorchMixedPrecision(init_scale=2**8),
    "fp16_naive": lambda: FP16NaiveMixedPrecision(initial_scale=2**8),
}


class Run:
    """A model with all that goes with it."""

    def __init__(self, seed=0, width=4, length=20, precision=None):
        torch.manual_seed(seed)
        self.booster = Booster(device="cpu", mixed_precision=precision)
        model = nn.Sequential(nn.Linear(width, 3), nn.Dropout(0.2), nn.Linear(3, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        self.scheduler = StepLR(optimizer, 2)
        samples = torch.randn(length, width, generator=torch.Generator().manual_seed(9))
        self.loader = self.booster.prepare_dataloader(samples, 2, shuffle=True)
        self.model, self.optimizer, *_ = self.booster.boost(model, optimizer)

    @property
    def parts(self):
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "lr_scheduler": self.scheduler,
            "dataloader": self.loader,
        }

    def backward(self, inputs, **options):
        self.booster.backward(self.model(inputs).square().mean(), self.optimizer, **options)

    def train(self, steps):
        batches = iter(self.loader)
        for _ in range(steps):
            self.backward(next(batches))
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
        return self

    def everything(self):
        parts = [*self.model.state_dict().values()]
        parts += [part.tensor for part in self.optimizer.checkpoint_state().slices()]
        values = self.optimizer.checkpoint_state().values()
        numbers = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
        position = self.loader.state_dict()
        return [p.tolist() for p in parts], values, self.scheduler.state_dict(), position, numbers

    def gradients(self):
        return {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}


@pytest.fixture(autouse=True)
def _random_state():
    before = random.getstate(), np.random.get_state()
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])


def files(directory):
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


MODEL_FILES = ["model.safetensors", "model.safetensors.manifest.json"]
OPTIMIZER_FILES = [
    "optimizer-00001-of-00001.safetensors",
    "optimizer.safetensors.index.json",
    "optimizer.safetensors.manifest.json",
    "optimizer_groups.json",
]
STATE_FILES = [
    "random_state.safetensors",
    "random_state.safetensors.manifest.json",
    "training_state.json",
    "training_state.manifest.json",
]


class TestWhole:
    @pytest.mark.parametrize("use_safetensors", [True, False])
    def test_everything_comes_back(self, tmp_path, use_safetensors):
        run = Run().train(3)
        run.booster.save(tmp_path / "c", **run.parts, use_safetensors=use_safetensors)
        expected = run.everything()
        other = Run(seed=1).train(5)
        random.random()
        assert other.everything() != expected
        assert other.booster.load(tmp_path / "c", **other.parts) is None
        assert other.everything() == expected
        after = []
        for one in (other, run):
            one.booster.load(tmp_path / "c", **one.parts)
            after.append(one.train(4).everything())
        assert after[0] == after[1]

    def test_the_files(self, tmp_path):
        run = Run().train(1)
        run.booster.save(tmp_path / "c", **run.parts, size_per_shard=1)
        assert files(tmp_path) == sorted(f"c/{name}" for name in MODEL_FILES + OPTIMIZER_FILES + STATE_FILES)
        run.booster.save(tmp_path / "s", **run.parts, step=12)
        assert sorted(os.listdir(tmp_path / "s")) == ["latest", "step-00000012"]
        state = json.loads((tmp_path / "s" / "step-00000012" / "training_state.json").read_text())
        facts = state["facts"]
        assert facts["step"] == 12
        assert facts["plugin"] == "SingleDevicePlugin"
        assert (facts["world_size"], facts["dp_size"], facts["precision"]) == (1, 1, "fp32")
        assert facts["versions"].keys() == {"torch", "torch-booster", "python"}

    def test_a_save_over_another_leaves_nothing_of_it(self, tmp_path):
        run = Run().train(1)
        run.backward(torch.ones(2, 4))
        run.booster.save(tmp_path, **run.parts)
        (tmp_path / "log.txt").write_text("mine")
        assert "gradients.safetensors" in os.listdir(tmp_path)
        run.optimizer.zero_grad()
        run.booster.save(tmp_path, model=run.model)
        assert files(tmp_path) == sorted(["log.txt", *MODEL_FILES, *STATE_FILES])
        run.booster.load(tmp_path, model=run.model)

    @pytest.mark.parametrize("name", ["", "model.safetensors"])
    def test_a_model_saved_over_a_part_is_refused(self, tmp_path, name):
        run = Run().train(1)
        run.booster.save(tmp_path, **run.parts)
        with pytest.raises(CheckpointError, match=r"would replace a part of the training state in .*prefix="):
            run.booster.save_model(run.model, tmp_path / name, shard=not name)
        with pytest.raises(CheckpointError, match="would replace a part of the training state"):
            run.booster.save_optimizer(run.optimizer, tmp_path, shard=True)
        run.booster.save_model(run.model, tmp_path, shard=True, prefix="average")
        run.booster.load(tmp_path, **run.parts)

    def test_what_was_not_asked_for_is_left_alone(self, tmp_path):
        run = Run().train(2)
        run.booster.save(tmp_path, **run.parts)
        other = Run(seed=1).train(3)
        before = other.everything()
        other.booster.load(tmp_path, dataloader=other.loader)
        assert other.everything()[:3] == before[:3]
        assert other.loader.state_dict() == run.loader.state_dict()

    def test_a_model_alone_is_enough_for_load_model(self, tmp_path):
        run = Run().train(1)
        run.booster.save(tmp_path, **run.parts)
        other = Run(seed=1)
        other.booster.load_model(other.model, tmp_path)
        other.booster.load_optimizer(other.optimizer, tmp_path)
        assert other.everything()[:2] == run.everything()[:2]

    def test_the_state_may_change_while_a_save_runs(self, tmp_path):
        run = Run().train(2)
        expected = run.everything()
        run.booster.save(tmp_path / "c", **run.parts, extra={"step": 2}, use_async=True)
        run.train(5)
        run.booster.wait_for_checkpoints()
        other = Run(seed=1)
        assert other.booster.load(tmp_path / "c", **other.parts) == {"step": 2}
        assert other.everything() == expected

    @pytest.mark.parametrize("verify", ["checksums", "before", "structure"])
    def test_ways_to_verify(self, tmp_path, verify):
        run = Run().train(1)
        run.booster.save(tmp_path, **run.parts)
        run.booster.load(tmp_path, **run.parts, verify=verify)
        with pytest.raises(ConfigError, match="verify='maybe'"):
            run.booster.load(tmp_path, **run.parts, verify="maybe")


class TestExtra:
    def test_plain_values_come_back_as_they_were(self, tmp_path):
        run = Run()
        extra = {
            "step": 3,
            "best": float("inf"),
            "shape": (1, (2, "x")),
            7: [True, None, b"raw"],
            "deep": {"a": {"b": [1.5, {"c": np.float32(0.1)}]}},
            "tensor": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
            "names": {"b", "a"},
        }
        run.booster.save(tmp_path, extra=extra)
        found = run.booster.load(tmp_path)
        assert torch.equal(found.pop("tensor"), extra.pop("tensor"))
        assert found == extra
        assert type(found["shape"]) is tuple

    @pytest.mark.parametrize(
        ("extra", "place"),
        [
            ({"args": object()}, r"extra\['args'\] is a builtins.object"),
            ({"a": [1, {"model": nn.Linear(1, 1)}]}, r"extra\['a'\]\[1\]\['model'\] is a torch.nn"),
            (open, "extra is a builtins.builtin_function"),
        ],
    )
    def test_something_else_is_named_before_anything_is_written(self, tmp_path, extra, place):
        run = Run()
        with pytest.raises(CheckpointError, match=place):
            run.booster.save(tmp_path / "c", **run.parts, extra=extra)
        assert os.listdir(tmp_path) == []

    def test_a_schedulers_own_object(self, tmp_path):
        run = Run()

        class Factor:
            def __init__(self):
                self.hook = print

            def __call__(self, step):
                return 1.0

        scheduler = LambdaLR(run.optimizer, Factor())
        with pytest.raises(CheckpointError, match=r"lr_schedulers\[''\]\['state'\]\['lr_lambdas'\]\[0\]\['hook'\]"):
            run.booster.save(tmp_path / "c", lr_scheduler=scheduler)
        assert os.listdir(tmp_path) == []


class TestNames:
    def test_models_and_optimizers_by_name(self, tmp_path):
        runs = {"generator": Run(seed=1).train(1), "critic": Run(seed=2).train(2)}
        booster = runs["critic"].booster

        def parts(found):
            return {
                "model": {name: run.model for name, run in found.items()},
                "optimizer": {name: run.optimizer for name, run in found.items()},
                "lr_scheduler": {name: run.scheduler for name, run in found.items()},
                "dataloader": {"train": found["critic"].loader},
            }

        booster.save(tmp_path, **parts(runs))
        assert sorted(os.listdir(tmp_path)) == ["critic", "generator", *STATE_FILES]
        assert files(tmp_path / "critic") == sorted(MODEL_FILES + OPTIMIZER_FILES)
        others = {name: Run(seed=5) for name in runs}
        booster.load(tmp_path, **parts(others))
        for name, run in runs.items():
            assert others[name].everything()[:3] == run.everything()[:3]
        alone = Run(seed=6)
        alone.booster.load(tmp_path, model={"generator": alone.model})
        assert alone.everything()[0][:4] == runs["generator"].everything()[0][:4]
        alone.booster.load_model(alone.model, tmp_path / "critic")

    def test_one_model_beside_named_optimizers(self, tmp_path):
        run = Run()
        optimizers = {"first": torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1), "main": run.optimizer}
        run.booster.save(tmp_path, model=run.model, optimizer=optimizers)
        run.booster.load(tmp_path, model=run.model, optimizer=optimizers)
        assert "model.safetensors" in os.listdir(tmp_path)

    @pytest.mark.parametrize("name", ["../out", "a/b", ".hidden", "latest", "step-00000001", "", 3])
    def test_names_that_are_no_folders(self, tmp_path, name):
        run = Run()
        with pytest.raises(ConfigError):
            run.booster.save(tmp_path / "c", model={name: run.model})
        assert os.listdir(tmp_path) == []

    def test_all_that_is_missing_is_said_at_once(self, tmp_path):
        run = Run().train(1)
        run.booster.save(tmp_path, model=run.model, lr_scheduler={"main": run.scheduler})
        other = Run(seed=1)
        before = other.everything()
        with pytest.raises(CheckpointError) as failure:
            other.booster.load(
                tmp_path, model={"net": other.model}, **{k: v for k, v in other.parts.items() if k != "model"}
            )
        text = str(failure.value)
        lines = ["model 'net' (it holds one without a name)", "optimizer (it holds none)", "dataloader (it holds none)"]
        for line in (*lines, "LR scheduler (it holds 'main')"):
            assert line in text
        assert other.everything() == before


def _damage(path):
    raw = bytearray(path.read_bytes())
    raw[-20] ^= 4
    path.write_bytes(raw)


class TestChecksFirst:
    def assert_refused(self, tmp_path, run, match, error=CheckpointError, *, verify="checksums", **parts):
        before = run.everything()
        with pytest.raises(error, match=match):
            run.booster.load(tmp_path, **{**run.parts, **parts}, verify=verify)
        assert run.everything() == before

    def test_another_model(self, tmp_path):
        run = Run().train(2)
        run.booster.save(tmp_path, **run.parts)
        self.assert_refused(tmp_path, Run(width=5).train(1), "has shape")

    def test_another_scheduler(self, tmp_path):
        run = Run().train(2)
        run.booster.save(tmp_path, **run.parts)
        other = Run(seed=1)
        scheduler = torch.optim.lr_scheduler.ConstantLR(other.optimizer)
        self.assert_refused(tmp_path, other, "StepLR, not of a ConstantLR", lr_scheduler=scheduler)
        scheduler = StepLR(other.optimizer, 3)
        message = "step_size=2, but this one has step_size=3"
        self.assert_refused(tmp_path, other, message, ConfigError, lr_scheduler=scheduler)

    def test_a_loader_over_other_data(self, tmp_path):
        run = Run().train(2)
        run.booster.save(tmp_path, **run.parts)
        self.assert_refused(tmp_path, Run(seed=1, length=18).train(1), "num_samples=20", ConfigError)

    def test_one_of_two_loaders_over_other_data(self, tmp_path):
        first, second = Run(), Run()
        first.booster.save(tmp_path, dataloader={"a": first.train(2).loader, "b": second.train(1).loader})
        other, wrong = Run(seed=1), Run(length=10)
        before = other.loader.state_dict()
        with pytest.raises(ConfigError, match="num_samples=20"):
            other.booster.load(tmp_path, dataloader={"a": other.loader, "b": wrong.loader})
        assert other.loader.state_dict() == before

    @pytest.mark.parametrize(
        "name", ["model.safetensors", "optimizer-00001-of-00001.safetensors", "random_state.safetensors"]
    )
    def test_damage(self, tmp_path, name):
        run = Run().train(2)
        run.booster.save(tmp_path, **run.parts)
        _damage(tmp_path / name)
        match = name.split("-")[0].removesuffix(".safetensors")
        self.assert_refused(tmp_path, Run(seed=1).train(1), match, verify="before")

    @pytest.mark.parametrize("name", ["model.safetensors", "optimizer-00001-of-00001.safetensors"])
    def test_damage_that_is_found_halfway(self, tmp_path, name):
        run = Run().train(2)
        run.booster.save(tmp_path / "good", **run.parts)
        run.booster.save(tmp_path / "damaged", **run.parts)
        _damage(tmp_path / "damaged" / name)
        other = Run(seed=1).train(1)
        with pytest.raises(CheckpointError, match="is damaged: elements"):
            other.booster.load(tmp_path / "damaged", **other.parts)
        match = r"this (model|optimizer) is incomplete, as a load into it has failed halfway: .* is damaged: elements"
        uses = {
            "forward": lambda: other.model(torch.ones(2, 4)),
            "step": other.optimizer.step,
            "state dict": other.model.state_dict,
            "state dict of the optimizer": other.optimizer.state_dict,
            "save": lambda: other.booster.save(tmp_path / "c", **other.parts),
            "save of the model": lambda: other.booster.save_model(other.model, tmp_path / "c"),
            "save of the optimizer": lambda: other.booster.save_optimizer(other.optimizer, tmp_path / "c"),
        }
        for use in uses.values():
            with pytest.raises(CheckpointError, match=match):
                use()
        other.booster.load_model(other.model, tmp_path / "good")
        with pytest.raises(CheckpointError, match="this optimizer is incomplete"):
            other.optimizer.step()  # the optimizer is what it was
        other.booster.load(tmp_path / "good", **other.parts)
        assert other.everything() == run.everything()
        other.train(1)
        assert sorted(os.listdir(tmp_path)) == ["damaged", "good"]

    def test_another_model_copied_over_the_states(self, tmp_path):
        run, other, path = Run().train(2), Run(seed=1).train(1), tmp_path / "state"
        run.booster.save(path, **run.parts)
        other.booster.save_model(other.model, tmp_path / "other", shard=True)
        shutil.copytree(tmp_path / "other", path, dirs_exist_ok=True)
        self.assert_refused(path, other, "another save into the same directory")
        other.booster.load(path, optimizer=other.optimizer)

    def test_a_state_that_was_edited(self, tmp_path):
        run = Run()
        run.booster.save(tmp_path, **run.parts)
        path = tmp_path / "training_state.json"
        path.write_text(path.read_text().replace('"step": null', '"step": 1234'))
        self.assert_refused(tmp_path, run, "training_state.json")
        path.write_text(path.read_text().replace('"step": 1234', '"step": nuul'))
        self.assert_refused(tmp_path, run, "training_state.json")


class TestArguments:
    @pytest.mark.parametrize(
        ("options", "match"),
        [
            ({"step": -1}, "step=-1"),
            ({"step": 1.5}, "step=1.5"),
            ({"step": True}, "step=True"),
            ({"keep_last": 2}, "give step as well"),
            ({"step": 1, "keep_last": 0}, "keep_last=0"),
            ({"size_per_shard": 0}, "size_per_shard=0"),
        ],
    )
    def test_numbers(self, tmp_path, options, match):
        run = Run()
        with pytest.raises(ConfigError, match=match):
            run.booster.save(tmp_path / "c", model=run.model, **options)
        assert os.listdir(tmp_path) == []

    def test_paths(self, tmp_path):
        run = Run()
        (tmp_path / "file").write_text("")
        with pytest.raises(ConfigError, match="is a file"):
            run.booster.save(tmp_path / "file", model=run.model)
        with pytest.raises(ConfigError, match="path is empty"):
            run.booster.save("", model=run.model)
        for name in ("a\0b", "a\udc80b"):
            with pytest.raises(ConfigError, match="NUL or not in UTF-8"):
                run.booster.save(tmp_path / name, model=run.model)

    def test_objects(self, tmp_path):
        run = Run()

        class Endless(IterableDataset):
            def __iter__(self):
                return iter([torch.ones(1)])

        for loader in (DataLoader(torch.ones(3)), DataLoader(Endless()), [torch.ones(1)]):
            with pytest.raises(ConfigError, match="without a position to save"):
                run.booster.save(tmp_path / "c", dataloader=loader)
        with pytest.raises(ConfigError, match=r"model that boost\(\) returned"):
            run.booster.save(tmp_path / "c", model=run.model.unwrap())
        with pytest.raises(ConfigError, match=r"optimizer that boost\(\) returned"):
            run.booster.load(tmp_path / "c", optimizer={"a": run.optimizer.unwrap()})
        with pytest.raises(ConfigError, match="is not an LR scheduler"):
            run.booster.save(tmp_path / "c", lr_scheduler=run.optimizer)
        assert os.listdir(tmp_path) == []


class TestGradients:
    @pytest.mark.parametrize("precision", PRECISIONS)
    def test_they_are_part_of_the_state(self, tmp_path, precision):
        run = Run(precision=PRECISIONS[precision]()).train(2)
        batches = torch.randn(6, 2, 4)

        def micro_step(one, batch):
            with one.booster.accumulate(one.model, one.optimizer, 3):
                one.backward(batch)
                one.optimizer.step()
                one.optimizer.zero_grad()

        for batch in batches[:2]:
            micro_step(run, batch)
        run.booster.save(tmp_path, **run.parts)
        other = Run(seed=1, precision=PRECISIONS[precision]())
        other.booster.load(tmp_path, **other.parts)
        assert other.gradients().keys() == run.gradients().keys()
        assert all(torch.equal(grad, other.gradients()[name]) for name, grad in run.gradients().items())
        after = []
        for one in (run, other):
            run.booster.load(tmp_path)  # the random state
            for batch in batches[2:]:
                micro_step(one, batch)
            after.append(one.everything()[:2])
        assert after[0] == after[1]
        assert run.optimizer.num_microbatches == other.optimizer.num_microbatches == 0

    def test_items_count_on(self, tmp_path):
        run, other = Run(), Run()
        run.model.eval()
        other.model.eval()
        run.backward(torch.ones(2, 4), num_items=3)
        run.booster.save(tmp_path, **run.parts)
        other.booster.load(tmp_path, **other.parts)
        for one in (run, other):
            one.backward(torch.full((2, 4), 2.0), num_items=5)
        assert run.optimizer.get_grad_norm() == other.optimizer.get_grad_norm()
        assert run.optimizer.accumulation.num_items == other.optimizer.accumulation.num_items == 8
        other.optimizer.zero_grad()
        other.booster.load(tmp_path, **other.parts)
        with pytest.raises(ConfigError, match="num_items"):
            other.backward(torch.ones(2, 4))

    def test_another_loss_scale(self, tmp_path):
        run = Run(precision=FP16NaiveMixedPrecision(initial_scale=2**10))
        run.model.eval()
        run.backward(torch.ones(2, 4))
        run.booster.save(tmp_path, **run.parts)
        plain = Run(seed=1)
        plain.booster.load(tmp_path, **plain.parts)
        for name, grad in plain.gradients().items():
            assert grad.dtype == torch.float32
            assert torch.equal(grad, run.gradients()[name].float() / 2**10)

    @pytest.mark.parametrize("end", ["step", "zero_grad", "zeros", "by hand"])
    def test_nothing_is_written_where_none_waits(self, tmp_path, end):
        run = Run()
        run.backward(torch.ones(2, 4))
        if end == "step":
            run.optimizer.step()
        elif end == "by hand":
            run.model.zero_grad()
        else:
            run.optimizer.zero_grad(set_to_none=end == "zero_grad")
        run.booster.save(tmp_path, **run.parts)
        assert "gradients.safetensors" not in os.listdir(tmp_path)

    def test_gradients_of_a_plain_backward_count(self, tmp_path):
        run = Run()
        run.model(torch.ones(2, 4)).sum().backward()
        run.booster.save(tmp_path, **run.parts)
        other = Run(seed=1)
        other.booster.load(tmp_path, **other.parts)
        assert all(torch.equal(grad, other.gradients()[name]) for name, grad in run.gradients().items())

    def test_going_back_forgets_what_waits(self, tmp_path):
        run = Run().train(1)
        run.booster.save(tmp_path, **run.parts)
        with run.booster.accumulate(run.model, run.optimizer, 3):
            run.backward(torch.ones(2, 4))
        run.booster.load(tmp_path, **run.parts)
        assert not run.gradients()
        assert run.optimizer.num_microbatches == 0
        assert not run.optimizer.accumulation.is_open

    def test_between_clip_and_step(self, tmp_path):
        run = Run(precision="fp16")
        run.backward(torch.ones(2, 4))
        run.booster.clip_grad_norm_(run.optimizer, 1.0)
        with pytest.raises(ConfigError, match=r"between clipping .* and optimizer.step\(\)"):
            run.booster.save(tmp_path / "c", **run.parts)
        assert os.listdir(tmp_path) == []

    def test_sparse(self, tmp_path):
        booster = Booster(device="cpu")
        model = nn.Embedding(5, 2, sparse=True)
        model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        booster.backward(model(torch.tensor([1])).sum(), optimizer)
        with pytest.raises(CheckpointError, match="'weight' is sparse, which cannot be stored"):
            booster.save(tmp_path / "c", model, optimizer)

    def test_gradients_of_other_parameters(self, tmp_path):
        run = Run()
        run.backward(torch.ones(2, 4))
        run.booster.save(tmp_path, **run.parts)
        raw = nn.Sequential(nn.Linear(4, 3), nn.Dropout(), nn.Linear(3, 1))
        wrong = torch.optim.AdamW(raw[0].parameters())
        _, optimizer, *_ = run.booster.boost(raw, wrong)
        with pytest.raises(CheckpointError, match="nothing was loaded"):
            run.booster.load(tmp_path, optimizer=optimizer)


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("is_safetensors", [False, True])
def test_what_a_save_in_flight_leaves_is_removed_by_the_next_one(tmp_path, exists, is_safetensors):
    run, folders = Run().train(1), [tmp_path / name for name in ("background", "one after the other")]
    for folder in folders:
        if exists:
            folder.mkdir()
        use_async = folder is folders[0]
        run.booster.save(folder, **run.parts, use_safetensors=is_safetensors, use_async=use_async)
        run.booster.save(folder, run.model, use_safetensors=not is_safetensors, use_async=use_async)
    run.booster.wait_for_checkpoints()
    names = [sorted(path.name for path in folder.iterdir()) for folder in folders]
    assert names[0] == names[1]
    assert not any("optimizer" in name for name in names[0])
