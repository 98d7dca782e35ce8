"""Damaged checkpoints: found before anything is loaded, or the damage is outside of what is read."""

from __future__ import annotations

import json

import pytest
import torch
from checkpoint_cases import Net, stepped
from oracles.damage import Damage, random_damages, whole_file_damages
from oracles.faulting_storage import UnsyncedStorage
from oracles.naive_reader import naive_load
from safetensors.torch import load_file
from stored_tensors import bits

from booster.checkpoint_io import GeneralCheckpointIO
from booster.errors import CheckpointError

# What is saved in each form: the options, and the names of model and optimizer.
FORMS = {
    "sharded": ({"shard": True, "size_per_shard": 200e-6}, ".", "."),
    "single files": ({}, "model.safetensors", "optimizer.safetensors"),
    "sharded bin": ({"shard": True, "size_per_shard": 200e-6, "use_safetensors": False}, ".", "."),
}
WORDS = ("model", "optimizer")


class Live:
    """A model and its optimizer, whose state a load would replace."""

    def __init__(self, seed):
        self.model, self.optimizer = stepped(Net(seed=seed))
        self._net = self.model.unwrap()

    def state(self):
        """Returns the bytes of every tensor that a load may change, in two parts."""
        model = {name: bits(tensor) for name, tensor in self._net.state_dict().items()}
        state = self.optimizer.checkpoint_state()
        optimizer = {part.name: bits(part.tensor) for part in state.slices()} | {"values": repr(state.values())}
        return {"model": model, "optimizer": optimizer}

    def load(self, root, form, part, verify):
        """Loads one part."""
        _, *places = FORMS[form]
        io = GeneralCheckpointIO(storage=UnsyncedStorage())
        if part == "model":
            io.load_model(self.model, root / places[0], verify=verify)
        else:
            io.load_optimizer(self.optimizer, root / places[1], verify=verify)

    def refuses_to_be_used(self, part):
        """Whether the part is marked as incomplete, so that it raises when it is used."""
        was_marked = self.is_marked
        if was_marked:
            with pytest.raises(CheckpointError, match=f"this {part} is incomplete"):
                self.model(torch.zeros(1, 3))
        self.model.failed_loads.clear()
        return was_marked

    @property
    def is_marked(self):
        """Whether a load into some part has failed halfway."""
        try:
            self.model.require_complete()
        except CheckpointError:
            return True
        return False


class Saved:
    """A save of both parts in one directory, and the means to damage it and to put it right again."""

    def __init__(self, root, form, seed):
        self.root, self.form = root, form
        root.mkdir()
        live = Live(seed)
        self.state = live.state()
        options, *places = FORMS[form]
        io = GeneralCheckpointIO(storage=UnsyncedStorage())
        io.save_model(live.model, root / places[0], **options)
        io.save_optimizer(live.optimizer, root / places[1], **options)
        self.files = {path.name: path.read_bytes() for path in root.iterdir()}

    def apply(self, damage):
        """Changes the files."""
        for name, raw in damage.contents.items():
            (self.root / name).unlink(missing_ok=True)
            if raw is not None:
                (self.root / name).write_bytes(raw)

    def restore(self, damage):
        """Undoes it."""
        for name in damage.contents:
            (self.root / name).unlink(missing_ok=True)
            if name in self.files:
                (self.root / name).write_bytes(self.files[name])


@pytest.fixture(scope="module", params=FORMS)
def case(request, tmp_path_factory):
    root = tmp_path_factory.mktemp("corruption")
    saved = Saved(root / "saved", request.param, seed=1)
    other = Saved(root / "other", request.param, seed=2)
    return saved, other, Live(seed=3)


def _outcome(saved, live, part, verify="before"):
    """Returns the error of a load, None for an exact one; fails for anything else."""
    before = live.state()
    failure = None
    try:
        live.load(saved.root, saved.form, part, verify)
    except CheckpointError as error:
        failure = str(error)
    after = live.state()
    if failure is not None:
        is_unchanged = after == before
        is_refused = live.refuses_to_be_used(part)
        assert is_unchanged or verify == "checksums", f"the load raised and changed something: {failure}"
        assert is_unchanged or is_refused, f"a changed {part} can be used: {failure}"
        assert not is_refused or verify == "checksums", f"an unchanged {part} cannot be used: {failure}"
        return failure
    assert after[part] == saved.state[part], "the load did not raise, and something else was loaded"
    assert not live.is_marked, "what a load has filled is marked as incomplete"
    _reset(live, before)
    return None


def _reset(live, before):
    """Makes what was loaded differ from what is saved again."""
    for tensor in live.model.unwrap().state_dict().values():
        tensor.zero_()
    for part in live.optimizer.checkpoint_state().slices():
        part.tensor.zero_()
    assert before.keys() == live.state().keys()


def _check(saved, live, damage):
    saved.apply(damage)
    try:
        errors = {part: _outcome(saved, live, part) for part in WORDS}
        while_reading = {part: _outcome(saved, live, part, "checksums") for part in WORDS}
    except AssertionError as error:
        raise AssertionError(f"{damage.what}: {error}") from None
    finally:
        saved.restore(damage)
        for part in WORDS:
            live.load(saved.root, saved.form, part, "checksums")
        assert not live.is_marked
    assert list(map(bool, errors.values())) == list(map(bool, while_reading.values())), f"{errors}, {while_reading}"
    for error in filter(None, errors.values()):
        assert any(name in error for name in _names(damage)), f"{damage.what}: {error}"
    return errors


def _names(damage):
    return [name.removeprefix("copy-") for name in damage.contents]


def _tensor_at(raw, offset):
    """Returns the tensor at an offset of a safetensors file; None in its head."""
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    header.pop("__metadata__", None)
    places = {name: entry["data_offsets"] for name, entry in header.items()}
    return next((name for name, (low, high) in places.items() if low <= offset - start < high), None)


def _run(case, seed, number):
    saved, _, live = case
    found = 0
    for damage in random_damages(saved.files, seed, number):
        errors = _check(saved, live, damage)
        found += any(errors.values())
        (name,) = damage.contents
        if name.endswith(".bin"):
            continue  # a zip has bytes that are never read
        assert any(errors.values()), f"{damage.what} was not found"
        tensor = _tensor_at(saved.files[name], damage.offset) if name.endswith(".safetensors") else None
        assert tensor is None or repr(tensor) in "".join(filter(None, errors.values())), f"{damage.what}: {errors}"
    assert found > 0.6 * number


def test_damaged_bytes_are_found_or_not_read(case):
    _run(case, 0, 50)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(33))
def test_many_damaged_bytes_are_found_or_not_read(case, seed):
    _run(case, seed, 110)


def test_files_lost_swapped_and_of_another_save(case):
    saved, other, live = case
    assert saved.files.keys() == other.files.keys()
    num_found = 0
    damages = list(whole_file_damages(saved.files, other.files))
    for damage in damages:
        if saved.form == "single files" and "from another save" in damage.what:
            continue  # a whole checkpoint of its own
        errors = _check(saved, live, damage)
        num_found += any(errors.values())
        is_needed = not damage.is_addition and not _is_lost_manifest_of_bin(damage)
        assert any(errors.values()) or not is_needed, f"{damage.what} was not found"
    assert num_found > len(damages) / 2


def _is_lost_manifest_of_bin(damage):
    # Such files carry no mark that says that there was one: they load as those of other programs do.
    return all(".bin.manifest." in name and raw is None for name, raw in damage.contents.items())


@pytest.mark.parametrize(
    "name", ["model-00009-of-00009.safetensors", "model.safetensors", "pytorch_model.bin", "optimizer.safetensors"]
)
def test_files_left_by_others_are_not_taken(case, name):
    saved, other, live = case
    if name in saved.files or saved.form == "single files":
        pytest.skip("the name is taken, or not looked for")
    raw = next(raw for found, raw in sorted(other.files.items()) if found.endswith((".safetensors", ".bin")))
    _check(saved, live, Damage(what=f"{name} added", contents={name: raw}, is_addition=True))


def test_an_undamaged_save_loads(case):
    saved, _, live = case
    assert [_outcome(saved, live, part) for part in WORDS] == [None, None]


# The detectors themselves: what other readers do with the same damage.


def test_safetensors_alone_sees_no_damage_of_data(case, tmp_path):
    saved, _, _ = case
    if saved.form == "sharded bin":
        pytest.skip("no safetensors")
    shards = {name: raw for name, raw in saved.files.items() if name.endswith(".safetensors")}
    num_silent = num_flips = 0
    for damage in random_damages(shards, seed=0, number=200):
        ((name, raw),) = damage.contents.items()
        if _tensor_at(shards[name], damage.offset) is None:
            continue
        (tmp_path / "x.safetensors").write_bytes(raw)
        (tmp_path / "good.safetensors").write_bytes(shards[name])
        loaded, good = load_file(tmp_path / "x.safetensors"), load_file(tmp_path / "good.safetensors")
        num_flips += 1
        num_silent += any(bits(loaded[key]) != bits(good[key]) for key in good)
    assert num_silent == num_flips > 10


class NaiveLive(Live):
    """Loads the model as many programs do."""

    def load(self, root, form, part, verify):
        """Fills what has the right name, whatever it is."""
        if part == "model":
            naive_load(root if form == "sharded" else root / "model.safetensors", self.model.unwrap().state_dict())


def test_the_detectors_find_fault_with_a_naive_reader(case):
    saved, other, _ = case
    if saved.form == "sharded bin":
        pytest.skip("the naive reader has safetensors only")
    live, num_wrong = NaiveLive(seed=3), 0
    shards = [name for name in saved.files if name.startswith("model") and name.endswith(".safetensors")]
    model = {name: saved.files[name] for name in shards}
    damages = [*random_damages(model, seed=0, number=60)]
    damages += [Damage(what="stale", contents={"model-9.safetensors": other.files[shards[0]]})]
    for damage in damages:
        saved.apply(damage)
        try:
            _outcome(saved, live, "model")
        except AssertionError:
            num_wrong += 1
        except Exception:
            pass
        finally:
            saved.restore(damage)
    assert num_wrong > 5
