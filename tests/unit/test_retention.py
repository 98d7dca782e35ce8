"""Steps under a root: which one is the latest, and which go, whatever else lies there."""

from __future__ import annotations

import os
import shutil

import pytest
import torch
from torch import nn

from booster import Booster, GeneralCheckpointIO
from booster.checkpoint_io.storage import Storage
from booster.checkpoint_io.training_state.retention import StepDirectories
from booster.errors import CheckpointError, ConfigError
from booster.single_device import SingleDevicePlugin


class Plugin(SingleDevicePlugin):
    def __init__(self, storage=None):
        super().__init__("cpu")
        self.storage = storage

    def get_checkpoint_io(self):
        return GeneralCheckpointIO(storage=self.storage)


def make(storage=None):
    booster = Booster(plugin=Plugin(storage))
    model, *_ = booster.boost(nn.Linear(2, 1))
    return booster, model


def fill(model, value):
    with torch.no_grad():
        model.module.weight.fill_(value)


def steps_in(root):
    return sorted(name for name in os.listdir(root) if name.startswith("step-"))


def save_steps(root, steps, **options):
    booster, model = make()
    for step in steps:
        fill(model, step)
        booster.save(root, model, extra=step, step=step, **options)
    return booster, model


class TestSteps:
    def test_names_and_latest(self, tmp_path):
        booster, model = save_steps(tmp_path, [5, 1200])
        assert steps_in(tmp_path) == ["step-00000005", "step-00001200"]
        assert (tmp_path / "latest").read_text() == "step-00001200\n"
        fill(model, 0)
        assert booster.load(tmp_path, model) == 1200
        assert model.module.weight[0, 0] == 1200
        assert booster.load(tmp_path / "step-00000005", model) == 5

    def test_more_digits_than_eight(self, tmp_path):
        booster, model = save_steps(tmp_path, [99_999_999, 100_000_000], keep_last=1)
        assert steps_in(tmp_path) == ["step-100000000"]
        assert booster.load(tmp_path, model) == 100_000_000

    def test_what_was_saved_last_is_the_latest_whatever_its_step(self, tmp_path):
        booster, model = save_steps(tmp_path, [100, 200])
        booster.load(tmp_path / "step-00000100", model)
        save_steps(tmp_path, [110])
        assert booster.load(tmp_path, model) == 110
        assert (tmp_path / "latest").read_text() == "step-00000110\n"
        save_steps(tmp_path, [100])  # over the one that is there
        assert booster.load(tmp_path, model) == 100
        save_steps(tmp_path, [120], keep_last=2)
        assert steps_in(tmp_path) == ["step-00000100", "step-00000120"]

    def test_a_state_in_the_root_itself_counts_by_its_order(self, tmp_path):
        booster, model = save_steps(tmp_path, [1])
        booster.save(tmp_path, model, extra="whole")
        assert booster.load(tmp_path, model) == "whole"
        save_steps(tmp_path, [2])
        assert booster.load(tmp_path, model) == 2

    def test_a_copy_by_hand_has_the_number_of_its_original(self, tmp_path):
        booster, model = save_steps(tmp_path, [1, 2])
        shutil.copytree(tmp_path / "step-00000001", tmp_path / "step-00000009")
        assert booster.load(tmp_path, model) == 2


class TestRotation:
    def test_the_oldest_go(self, tmp_path):
        save_steps(tmp_path, range(1, 6), keep_last=3)
        assert steps_in(tmp_path) == ["step-00000003", "step-00000004", "step-00000005"]

    def test_more_than_one_may_go_at_once(self, tmp_path):
        save_steps(tmp_path, range(1, 5))
        save_steps(tmp_path, [5], keep_last=1)
        assert steps_in(tmp_path) == ["step-00000005"]

    def test_nothing_goes_before_the_newer_one_is_there(self, tmp_path):
        events = []

        class Recording(Storage):
            def rename_new(self, source, target):
                super().rename_new(source, target)
                events.append((source.name, target.name))

        booster, model = make(Recording())
        booster.save(tmp_path, model, step=1, keep_last=1)
        booster.save(tmp_path, model, step=2, keep_last=1)
        targets = [target for _, target in events]
        removed = next(index for index, (source, _) in enumerate(events) if source == "step-00000001")
        assert targets.index("step-00000002") < removed

    def test_what_is_no_whole_step_of_ours_stays(self, tmp_path):
        for name in ("step-5", "step-00000001x", "steps", "step-00000000"):
            (tmp_path / name).mkdir()
        (tmp_path / "step-00000000" / "model.safetensors").write_bytes(b"not ours")
        (tmp_path / "step-00000002").write_text("a file")
        os.symlink(tmp_path / "steps", tmp_path / "step-00000003")
        before = set(os.listdir(tmp_path))
        save_steps(tmp_path, [7, 8, 9], keep_last=1)
        assert set(os.listdir(tmp_path)) == before | {"step-00000009", "latest"}

    def test_damaged_steps_stay_and_do_not_stop_a_save(self, tmp_path, capfd):
        save_steps(tmp_path, [1, 2])
        (tmp_path / "step-00000001" / "training_state.manifest.json").write_text("{")
        save_steps(tmp_path, [3, 4], keep_last=1)
        assert steps_in(tmp_path) == ["step-00000001", "step-00000004"]

    @pytest.mark.parametrize("use_async", [False, True])
    def test_a_queue_of_saves(self, tmp_path, use_async):
        booster, model = make()
        for step in range(1, 7):
            fill(model, step)
            booster.save(tmp_path, model, extra=step, step=step, keep_last=2, use_async=use_async)
            fill(model, -1)
        booster.wait_for_checkpoints()
        assert steps_in(tmp_path) == ["step-00000005", "step-00000006"]
        steps = StepDirectories(Storage(), tmp_path).steps()
        assert [step.sequence for step in steps] == [5, 6]
        assert booster.load(tmp_path, model) == 6
        assert model.module.weight[0, 0] == 6

    def test_all_steps_that_were_listed_are_gone_when_they_are_read(self, tmp_path):
        """A reader that slept while others saved and rotated looks again."""
        save_steps(tmp_path, [1])
        unread = [1]

        class Slow(Storage):
            def names(self, directory):
                names = super().names(directory)
                if directory == tmp_path and unread:
                    save_steps(tmp_path, [unread.pop() + 1], keep_last=1)
                return names

        assert StepDirectories(Slow(), tmp_path).latest().path.name == "step-00000002"


class TestDamage:
    def test_a_kill_before_latest_moves_costs_nothing(self, tmp_path):
        class Killed(Storage):
            def replace(self, source, target):
                if target.name == "latest" and target.exists():
                    raise KeyboardInterrupt
                super().replace(source, target)

        booster, model = make(Killed())
        booster.save(tmp_path, model, extra=1, step=1)
        with pytest.raises(KeyboardInterrupt):
            booster.save(tmp_path, model, extra=2, step=2)
        assert (tmp_path / "latest").read_text() == "step-00000001\n"
        booster, model = make()
        assert booster.load(tmp_path, model) == 2

    def test_a_latest_that_cant_be_moved_is_an_error_after_the_save(self, tmp_path):
        class Full(Storage):
            def write_file(self, path, content):
                if path.name == "latest":
                    raise OSError(28, "No space left on device")
                super().write_file(path, content)

        booster, model = make(Full())
        with pytest.raises(CheckpointError, match="No space left"):
            booster.save(tmp_path, model, extra=1, step=1)
        assert sorted(os.listdir(tmp_path)) == ["step-00000001"]
        assert make()[0].load(tmp_path, model) == 1

    def test_a_damaged_record_is_never_passed_over_in_silence(self, tmp_path):
        booster, model = save_steps(tmp_path, [1, 2])
        path = tmp_path / "step-00000002" / "training_state.manifest.json"
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2] ^= 1
        path.write_bytes(raw)
        with pytest.raises(CheckpointError, match="step-00000002"):
            booster.load(tmp_path, model)
        assert booster.load(tmp_path / "step-00000001", model) == 1

    def test_a_state_file_of_another_size(self, tmp_path):
        booster, model = save_steps(tmp_path, [1])
        with open(tmp_path / "step-00000001" / "training_state.json", "a") as file:
            file.write(" ")
        with pytest.raises(CheckpointError, match="bytes"):
            booster.load(tmp_path, model)

    def test_latest_is_a_directory(self, tmp_path):
        (tmp_path / "latest").mkdir()
        booster, model = make()
        with pytest.raises(ConfigError, match="latest is not a file"):
            booster.save(tmp_path, model, step=1)
        assert os.listdir(tmp_path) == ["latest"]

    def test_nothing_there(self, tmp_path):
        booster, model = make()
        with pytest.raises(CheckpointError, match="holds no training state"):
            booster.load(tmp_path / "nowhere", model)
        booster.save_model(model, tmp_path / "m", shard=True)
        with pytest.raises(CheckpointError, match=r"load_model\(\)"):
            booster.load(tmp_path / "m", model)
