"""The facade in one process: with no plugin the same loop runs, and every mistake has an error that says what to do."""

from __future__ import annotations

import copy
import importlib.metadata
import io
import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import booster
from booster import Booster, ConfigError, ModelWrapper, OptimizerWrapper, Plugin
from booster.mixed_precision import BF16MixedPrecision
from booster.plugins import TorchDDPPlugin
from booster.registry import plugin_names
from booster.single_device import SingleDevicePlugin


def make(**arguments):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    booster = Booster(device="cpu", **arguments)
    return booster, *booster.boost(model, optimizer)[:2]


def test_the_loop_equals_plain_torch_bit_for_bit():
    booster, model, optimizer = make()
    torch.manual_seed(0)
    raw = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    raw_optimizer = torch.optim.AdamW(raw.parameters(), lr=0.1)
    for step in range(5):
        inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
        booster.backward(model(inputs).square().mean(), optimizer)
        raw(inputs).square().mean().backward()
        norm = booster.clip_grad_norm_(optimizer, 0.1)
        assert torch.equal(norm, nn.utils.clip_grad_norm_(raw.parameters(), 0.1))
        assert optimizer.get_grad_norm() == float(norm)
        for one in (optimizer, raw_optimizer):
            one.step()
            one.zero_grad()
    for mine, plain in zip(model.parameters(), raw.parameters(), strict=True):
        assert torch.equal(mine, plain)


def test_boost_returns_five_in_order():
    booster = Booster(device="cpu")
    model, criterion = nn.Linear(2, 1), nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    loader = DataLoader(TensorDataset(torch.randn(5, 2), torch.randn(5, 1)), batch_size=2)
    boosted, wrapped, same_criterion, new_loader, same_scheduler = booster.boost(
        model, optimizer, criterion, loader, scheduler
    )
    assert isinstance(boosted, ModelWrapper)
    assert isinstance(wrapped, OptimizerWrapper)
    assert same_criterion is criterion
    assert len(new_loader) == 3
    assert same_scheduler is scheduler
    assert booster.boost(nn.Linear(1, 1))[1:] == (None, None, None, None)
    assert booster.unwrap_model(boosted) is model
    assert booster.unwrap_model(model) is model


def test_names_are_the_users():
    _, model, _ = make()
    assert [name for name, _ in model.named_parameters()] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert list(model.state_dict()) == list(model.module.state_dict())
    assert [name for name, _ in model.named_modules()] == ["", "0", "1", "2"]
    assert not model.eval().module[0].training
    assert model.train().module[0].training


def test_schedulers_work_on_either_optimizer():
    booster = Booster(device="cpu")
    model = nn.Linear(2, 1)
    raw = torch.optim.SGD(model.parameters(), lr=1.0)
    before = torch.optim.lr_scheduler.StepLR(raw, 1, gamma=0.5)
    model, optimizer, *_ = booster.boost(model, raw, lr_scheduler=before)
    after = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    booster.backward(model(torch.ones(1, 2)).sum(), optimizer)
    optimizer.step()
    before.step()
    assert optimizer.param_groups[0]["lr"] == 0.5
    after.step()
    assert math.isclose(raw.param_groups[0]["lr"], 0.05)


def test_attributes_are_those_of_the_users_model():
    class Model(nn.Linear):
        limit = 3

        def __init__(self):
            super().__init__(2, 1)
            self.temperature = 1.0
            self.register_buffer("seen", torch.zeros(2))
            self.register_buffer("kept", torch.zeros(2))

        @property
        def half(self):
            return self.temperature / 2

        @half.setter
        def half(self, value):
            self.temperature = 2 * value

        def training_step(self, x):
            """Documented."""
            return self(x).sum() * self.temperature

    user = Model()
    model, *_ = Booster(device="cpu").boost(user)
    model.temperature = 4.0
    assert user.temperature == 4.0
    assert (model.temperature, model.limit, model.in_features) == (4.0, 3, 2)
    model.half = 3.0
    assert user.temperature == 6.0
    assert torch.equal(model.training_step(torch.ones(1, 2)), user.training_step(torch.ones(1, 2)))
    assert (model.training_step.__name__, model.training_step.__doc__) == ("training_step", "Documented.")
    model.seen = torch.ones(2)
    assert torch.equal(user.seen, torch.ones(2))
    model.register_buffer("later", torch.ones(1))
    assert "later" in user.state_dict()
    model.training = False
    assert not user.training
    model.train()
    assert user.training
    model.kept = None
    assert user.kept is None
    model.note = "new"
    assert user.note == "new"
    del model.note
    assert not hasattr(model, "note")
    assert not hasattr(user, "note")
    assert {"training_step", "temperature", "unwrap"} <= set(dir(model))
    assert model.weight is user.weight
    assert model.get_parameter("weight") is user.weight
    assert copy.deepcopy(model).temperature == 6.0
    with pytest.raises(AttributeError, match="'Model' object has no attribute 'absent'"):
        model.absent  # noqa: B018
    for set_it in (
        lambda: setattr(model, "head", nn.Linear(1, 1)),
        lambda: setattr(model, "weight", nn.Parameter(torch.ones(1, 2))),
        lambda: setattr(model, "bias", None),
        lambda: model.add_module("head", nn.Linear(1, 1)),
        lambda: model.register_module("head", nn.Linear(1, 1)),
        lambda: model.register_parameter("scale", nn.Parameter(torch.ones(1))),
    ):
        with pytest.raises(ConfigError, match=r"after boost\(\) adds a module or parameter"):
            set_it()
    with pytest.raises(ConfigError, match="delete it before boost"):
        del model.bias
    assert "module" not in vars(model)
    assert model.unwrap() is user


def test_copies_have_no_optimizer_and_nothing_boosted_is_pickled():
    user = nn.Linear(2, 2)
    booster = Booster()
    model, optimizer, *_ = booster.boost(user, torch.optim.SGD(user.parameters(), lr=1.0))
    copied = copy.deepcopy(model).eval()
    for one in (model, copied):
        booster.backward(one(torch.ones(1, 2)).sum(), optimizer)
    model.zero_grad()
    assert user.weight.grad is None
    assert copied.weight.grad is not None
    copied.zero_grad()
    assert copied.weight.grad is None
    assert model.training
    assert torch.equal(copied.weight, user.weight)
    for action in (copy.copy, lambda value: torch.save(value, io.BytesIO())):
        with pytest.raises(ConfigError, match=r"pickled.*booster\.save_model\(model, path\)"):
            action(model)
    for action in (copy.copy, copy.deepcopy, lambda value: torch.save(value, io.BytesIO())):
        with pytest.raises(ConfigError, match=r"pickled.*booster\.save_optimizer\(optimizer, path\)"):
            action(optimizer)
    torch.save([model.state_dict(), optimizer.state_dict()], io.BytesIO())


def test_accumulate_averages_and_flushes_at_the_end_of_a_loader():
    booster, model, optimizer = make()
    data = torch.randn(7, 3)
    loader = booster.prepare_dataloader(data, batch_size=1)
    sizes, last = [], 0
    for index, inputs in enumerate(loader, start=1):
        with booster.accumulate(model, optimizer, steps=3) as is_last:
            booster.backward(model(inputs).square().mean(), optimizer)
            if is_last:
                norm = booster.clip_grad_norm_(optimizer, float("inf"))
                chunk = data[last:index]
                raw = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
                raw.load_state_dict(model.state_dict())
                raw(chunk).square().mean().backward()
                torch.testing.assert_close(norm, nn.utils.get_total_norm([p.grad for p in raw.parameters()]))
                sizes.append(index - last)
                last = index
            else:
                assert booster.clip_grad_norm_(optimizer, 0.0) is None
            before = [p.detach().clone() for p in model.parameters()]
            optimizer.step()
            moved = any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
            assert moved == is_last
            optimizer.zero_grad()
    assert sizes == [3, 3, 1]


@pytest.mark.parametrize("first", [True, False])
def test_accumulate_with_zero_grad_before_or_after(first):
    booster, model, optimizer = make()
    for index in range(4):
        with booster.accumulate(model, optimizer, steps=2):
            if first:
                optimizer.zero_grad()
            booster.backward(model(torch.full((1, 3), index + 1.0)).sum(), optimizer)
            optimizer.step()
            if not first:
                optimizer.zero_grad()
    assert next(iter(optimizer.state.values()))["step"] == 2


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("first", [True, False])
def test_accumulate_without_a_step_is_discarded_by_zero_grad(first, steps):
    booster, model, optimizer = make()
    for index in range(2 * steps):
        with booster.accumulate(model, optimizer, steps=steps):
            if first:
                optimizer.zero_grad()
            booster.backward(model(torch.full((1, 3), index + 1.0)).sum(), optimizer)
            booster.clip_grad_norm_(optimizer, 1.0)
            if not first and index < 2 * steps - 1:
                optimizer.zero_grad()
    (found,) = {parameter.grad for name, parameter in model.named_parameters() if name == "0.weight"}
    expected = torch.autograd.grad(
        sum(model(torch.full((1, 3), index + 1.0)).sum() for index in range(steps, 2 * steps)) / steps,
        list(model.parameters()),
    )
    scale = min(1.0, 1.0 / float(nn.utils.get_total_norm(expected)))
    torch.testing.assert_close(found, expected[0] * scale)


def test_execute_pipeline_runs_under_any_plugin():
    booster, model, optimizer = make()
    batches = iter([{"input": torch.ones(2, 3)}, (torch.ones(2, 3),), torch.ones(2, 3)])
    results = [
        booster.execute_pipeline(batches, model, lambda out, _: out.mean(), optimizer, return_outputs=True)
        for _ in range(3)
    ]
    assert len({float(result["loss"]) for result in results}) == 1
    assert results[0]["outputs"].shape == (2, 1)
    assert model.module[0].weight.grad is not None
    with pytest.raises(StopIteration):
        booster.execute_pipeline(batches, model, lambda out, _: out.mean())


def test_summary_tells_what_runs(capsys):
    booster, model, optimizer = make(mixed_precision="fp16_naive")
    text = booster.summary(model, optimizer)
    assert capsys.readouterr().out.strip() == text
    row = text.splitlines()[-1].split()
    assert row[:6] == ["0", "21", "float16", "float16", "float16", "float32"]
    assert "SingleDevicePlugin" in text
    assert "FP16NaiveMixedPrecision" in text


def test_small_names(capsys):
    booster, *_ = make()
    assert booster.is_main_process
    booster.print("once")
    assert capsys.readouterr().out == "once\n"
    booster.wait_for_everyone()
    assert booster.gather_for_metrics([torch.ones(2), (torch.tensor(1.0),)])[1][0].shape == (1,)


def test_plugins_of_other_packages_are_found(monkeypatch):
    class Point:
        name = "theirs"

        def __init__(self, value):
            self.value = value

        def load(self):
            return self.value

    class Theirs(SingleDevicePlugin):
        pass

    points = {"good": Theirs, "bad": int}
    for kind, value in points.items():
        monkeypatch.setattr("booster.registry.entry_points", lambda group, value=value: [Point(value)])
        assert "theirs" in plugin_names()
        if kind == "good":
            assert isinstance(Booster(plugin="theirs").plugin, Theirs)
        else:
            with pytest.raises(ConfigError, match=r"not a subclass of booster\.Plugin"):
                Booster(plugin="theirs")
    assert importlib.metadata.entry_points(group="booster.plugins") is not None


def test_plugins_and_precisions_that_pass_nothing_on_take_no_arguments_for_it():
    class Theirs(SingleDevicePlugin):
        def place(self, model, optimizer):
            super().place(model, optimizer)

        def configure(self, model, optimizer=None, criterion=None, dataloader=None, lr_scheduler=None):
            return super().configure(model, optimizer, criterion, dataloader, lr_scheduler)

    class TheirPrecision(BF16MixedPrecision):
        def configure(self, model, optimizer, criterion):
            return super().configure(model, optimizer, criterion)

    model = Booster(plugin=Theirs(), mixed_precision=TheirPrecision()).boost(nn.Linear(2, 1))[0]
    assert model(torch.ones(1, 2)).dtype == torch.float32


class TestMistakes:
    def test_a_plugin_that_wraps_nothing(self):
        class Forgetful(SingleDevicePlugin):
            def configure(self, model, optimizer=None, *others):
                return (super().configure(model, optimizer, *others)[0], optimizer, None, None, None)

        raw = nn.Linear(2, 1)
        with pytest.raises(ConfigError, match="Forgetful returned a SGD as the boosted optimizer"):
            Booster(plugin=Forgetful()).boost(raw, torch.optim.SGD(raw.parameters(), lr=1.0))

    def test_boosting_twice(self):
        booster = Booster(device="cpu")
        raw = nn.Linear(2, 1)
        raw_optimizer = torch.optim.SGD(raw.parameters(), lr=0.1)
        model, optimizer, *_ = booster.boost(raw, raw_optimizer)
        for again in (raw, model):
            with pytest.raises(ConfigError, match="boosted already"):
                booster.boost(again)
        for again in (raw_optimizer, optimizer):
            with pytest.raises(ConfigError, match="boosted already"):
                booster.boost(nn.Linear(2, 1), again)

    def test_a_failed_boost_leaves_the_model_free(self):
        booster = Booster(device="cpu")
        model, other = nn.Linear(2, 1), nn.Linear(2, 1)
        with pytest.raises(ConfigError, match="2 parameters of the optimizer are not the model's"):
            booster.boost(model, torch.optim.SGD(other.parameters(), lr=0.1))
        assert isinstance(booster.boost(model)[0], ModelWrapper)

    def test_wrong_types(self):
        booster = Booster(device="cpu")
        model = nn.Linear(2, 1)
        with pytest.raises(ConfigError, match=r"must be a torch\.nn\.Module"):
            booster.boost("model")
        with pytest.raises(ConfigError, match=r"must be a torch\.optim\.Optimizer"):
            booster.boost(model, "adam")
        with pytest.raises(ConfigError, match="is not callable"):
            booster.boost(model, criterion=3)
        with pytest.raises(ConfigError, match="device='cudaa' is not a torch device"):
            Booster(device="cudaa")
        with pytest.raises(ConfigError, match="not a torch DataLoader"):
            booster.boost(model, dataloader=[1, 2])
        other = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
        with pytest.raises(ConfigError, match="another optimizer"):
            booster.boost(
                model,
                torch.optim.SGD(model.parameters(), lr=0.1),
                lr_scheduler=torch.optim.lr_scheduler.StepLR(other, 1),
            )
        with pytest.raises(ConfigError, match="meta device"):
            booster.boost(nn.Linear(2, 1, device="meta"))

    def test_raw_objects(self):
        booster, model, optimizer = make()
        loss = model(torch.ones(1, 3)).sum()
        with pytest.raises(ConfigError, match=r"pass the optimizer that boost\(\) returned"):
            booster.backward(loss, optimizer.unwrap())
        with pytest.raises(ConfigError, match=r"pass the model that boost\(\) returned"):
            booster.save_model(model.unwrap(), "nowhere")
        with pytest.raises(ConfigError, match=r"pass the optimizer that boost\(\) returned"):
            booster.save_optimizer(optimizer.unwrap(), "nowhere")

        with pytest.raises(ConfigError, match=r"execute_pipeline\(\) was given a AdamW"):
            booster.execute_pipeline(iter([torch.ones(1, 3)]), model, lambda out, _: out.sum(), optimizer.unwrap())
        with pytest.raises(ConfigError, match=r"summary\(\) was given a AdamW"):
            booster.summary(model, optimizer.unwrap())
        for call in (booster.save_lr_scheduler, booster.load_lr_scheduler):
            for wrong in (optimizer, None):
                with pytest.raises(ConfigError, match="is not an LR scheduler"):
                    call(wrong, "nowhere")

    def test_values_that_cannot_be_joined(self):
        booster, *_ = make()
        with pytest.raises(ConfigError, match=r"torch\.tensor\(value\)"):
            booster.gather_for_metrics({"accuracy": 0.5})

    def test_losses(self):
        booster, model, optimizer = make()
        with pytest.raises(ConfigError, match=r"shape \(2, 1\).*loss\.mean\(\)"):
            booster.backward(model(torch.ones(2, 3)), optimizer)
        with pytest.raises(ConfigError, match="float, not a tensor"):
            booster.backward(1.0, optimizer)
        with torch.no_grad(), pytest.raises(ConfigError, match=r"outside of torch\.no_grad"):
            booster.backward(model(torch.ones(2, 3)).mean(), optimizer)

    def test_unknown_names(self):
        with pytest.raises(ConfigError, match=r"'torch_dpd' is not known. Did you mean 'torch_ddp'\?.*torch_ddp"):
            Booster(plugin="torch_dpd")
        for name, meant in {
            "Zero": "low_level_zero",
            "torch-zero": "low_level_zero",
            "pipeline": "hybrid_parallel",
        }.items():
            with pytest.raises(ConfigError, match=f"Did you mean '{meant}'"):
                Booster(plugin=name)
        for name, meant in {
            "zero_2": r"plugin=LowLevelZeroPlugin\(stage=2\)",
            "ZeRO-1": r"plugin=LowLevelZeroPlugin\(stage=1\)",
            "zero_stage_3": r"plugin=GeminiPlugin\(\)",
            "3d": "'hybrid_parallel'",
        }.items():
            with pytest.raises(ConfigError, match=f"Did you mean {meant}"):
                Booster(plugin=name)
        with pytest.raises(ConfigError, match=r"'apex' is not known\. Known"):
            Booster(plugin="apex")
        with pytest.raises(ConfigError, match=r"'bf61' is not known.*fp16, bf16, fp16_naive, fp16_apex, fp8"):
            Booster(mixed_precision="bf61")
        with pytest.raises(ConfigError, match="not its class"):
            Booster(plugin=TorchDDPPlugin)
        with pytest.raises(ConfigError, match="pass a name such as 'bf16'"):
            Booster(mixed_precision=torch.bfloat16)

    def test_a_plugin_before_launch(self):
        with pytest.raises(ConfigError, match=r"call booster\.launch_from_torch\(\)"):
            TorchDDPPlugin()

    def test_several_processes_without_a_plugin(self, monkeypatch):
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "2")
        with pytest.raises(ConfigError, match="2 were launched"):
            Booster()

    def test_a_plugin_that_decides_itself(self):
        class Strict(SingleDevicePlugin):
            def control_precision(self):
                return True

            def control_device(self):
                return True

            def support_no_sync(self):
                return False

            def supported_precisions(self):
                return ["fp32", "fp16"]

        class Elsewhere(SingleDevicePlugin):
            def supported_devices(self):
                return ["tpu"]

        class OnlyHalf(SingleDevicePlugin):
            def supported_precisions(self):
                return ["fp16"]

        with pytest.raises(ConfigError, match="supports tpu"):
            Booster(plugin=Elsewhere())
        with pytest.raises(ConfigError, match="'bf16' does not run with OnlyHalf: choose one of fp16"):
            Booster(plugin=OnlyHalf(), mixed_precision="bf16")
        with pytest.raises(ConfigError, match="leave device out"):
            Booster(plugin=Strict(), device="cpu")
        for precision in ("bf16", BF16MixedPrecision()):
            with pytest.raises(ConfigError, match="choose the precision where the plugin is created"):
                Booster(plugin=Strict(), mixed_precision=precision)
        with pytest.raises(ConfigError, match=r"leave no_sync\(\) out"):
            Booster(plugin=Strict()).no_sync()

    def test_files_with_parts_of_tensors(self, tmp_path):
        booster, model, optimizer = make()
        for save, what in ((booster.save_model, model), (booster.save_optimizer, optimizer)):
            with pytest.raises(ConfigError, match="gather_dtensor=False"):
                save(what, tmp_path / "out", shard=True, gather_dtensor=False)
        booster.save_model(model, tmp_path / "out", True, True, "", 10, use_safetensors=True)
        assert (tmp_path / "out" / "model.safetensors").is_file()

    def test_accumulate_over_no_steps(self):
        booster, model, optimizer = make()
        with pytest.raises(ConfigError, match="give an int of 1 or more"), booster.accumulate(model, optimizer, 0):
            pass

    def test_an_abstract_plugin_is_no_plugin(self):
        with pytest.raises(TypeError, match="abstract"):
            Plugin()


def test_ranks_and_checkpoint_engine_are_attributes(tmp_path):
    booster, model, _ = make()
    assert (booster.rank, booster.world_size) == (0, 1)
    plugin = booster.plugin
    assert (plugin.dp_size, plugin.tp_size, plugin.pp_size, plugin.sp_size, plugin.zero_stage) == (1, 1, 1, 1, 0)
    assert plugin.mesh is None
    assert plugin.dp_group is plugin.data_group is None
    booster.checkpoint_io.save_model(model, tmp_path / "model.safetensors")
    assert (tmp_path / "model.safetensors").is_file()


def test_package_and_object_are_told_apart():
    booster_object = Booster(device="cpu")
    with pytest.raises(AttributeError, match="a name of the package: write `from booster import launch_from_torch`"):
        booster_object.launch_from_torch()
    with pytest.raises(AttributeError, match="'Booster' object has no attribute 'launch_from_torhc'"):
        booster_object.launch_from_torhc()
    with pytest.raises(AttributeError, match=r"one of Booster objects: write Booster\(\.\.\.\)\.boost"):
        booster.boost(nn.Linear(1, 1))
    with pytest.raises(AttributeError, match=r"plugins are in booster\.plugins"):
        _ = booster.plugin
    with pytest.raises(AttributeError, match="module 'booster' has no attribute 'nothing'"):
        _ = booster.nothing


def test_an_attribute_error_of_a_property_is_kept():
    class Broken(SingleDevicePlugin):
        @property
        def device(self):
            return self.missing

    booster_object = Booster(device="cpu")
    booster_object.plugin = Broken("cpu")
    with pytest.raises(AttributeError, match="'Broken' object has no attribute 'missing'"):
        _ = booster_object.device
