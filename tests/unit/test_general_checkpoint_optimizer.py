"""GeneralCheckpointIO with optimizers, master weights and LR schedulers, in one process."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from checkpoint_cases import FORMS, Net, assert_equal, names_in, state_of, stepped, train_step
from torch import nn
from torch.optim import SGD, Adam, AdamW, lr_scheduler

from booster.checkpoint_io import GeneralCheckpointIO
from booster.errors import CheckpointError, ConfigError
from booster.interface import ModelWrapper, OptimizerWrapper
from booster.mixed_precision.fp16 import Fp32MasterWeights

IO = GeneralCheckpointIO()


@pytest.fixture(params=FORMS.values(), ids=FORMS.keys())
def form(request):
    return request.param


# Optimizers.


def _same_state(left, right):
    left, right = left.state_dict(), right.state_dict()
    assert left["param_groups"] == right["param_groups"]
    assert left["state"].keys() == right["state"].keys()
    for index, state in left["state"].items():
        assert_equal(_as_tensors(state), _as_tensors(right["state"][index]))


def _as_tensors(state):
    return {key: torch.as_tensor(-1 if value is None else value) for key, value in state.items()}


OPTIMIZERS = {
    "adamw": (AdamW, {"amsgrad": True, "betas": (0.8, 0.9)}),
    "adam": (Adam, {"weight_decay": 0.1}),
    "sgd": (SGD, {"momentum": 0.9}),
    "plain sgd": (SGD, {}),
    "adagrad": (torch.optim.Adagrad, {}),
    "rmsprop": (torch.optim.RMSprop, {"momentum": 0.5, "centered": True}),
}


def goes_on():
    """Everything; by default one kind in all forms and before its first step, the others in one of the forms each."""
    for number, (name, made) in enumerate(OPTIMIZERS.items()):
        for index, (form_name, one) in enumerate(FORMS.items()):
            for num_steps in (0, 2):
                is_default = name == "adamw" or (num_steps == 2 and number % len(FORMS) == index)
                marks = () if is_default else pytest.mark.slow
                yield pytest.param(one, num_steps, *made, id=f"{form_name}-{num_steps}-{name}", marks=marks)


@pytest.mark.parametrize(("form", "num_steps", "optimizer_class", "options"), [*goes_on()], indirect=["form"])
def test_an_optimizer_goes_on_as_if_it_never_stopped(tmp_path, form, optimizer_class, options, num_steps):
    name, save_options = form
    model, optimizer = stepped(Net(), optimizer_class, num_steps, **options)
    IO.save_model(model, tmp_path / name, **save_options)
    target = tmp_path / name if save_options.get("shard") else (tmp_path / name).with_stem("optimizer")
    IO.save_optimizer(optimizer, target, **save_options)
    other_model, other = stepped(Net(1), optimizer_class, 1, **options | {"lr": 3.0})
    IO.load_model(other_model, tmp_path / name)
    IO.load_optimizer(other, target)
    _same_state(other, optimizer)
    for _ in range(3):
        train_step(model, optimizer)
        train_step(other_model, other)
    assert_equal(state_of(other_model), state_of(model))


def test_states_of_the_same_form_keep_their_memory(tmp_path):
    _, saved = stepped(Net())
    IO.save_optimizer(saved, tmp_path / "o")
    _, optimizer = stepped(Net(seed=1))
    parameter = optimizer.param_groups[0]["params"][0]
    state = optimizer.state[parameter]
    state["exp_avg_sq"] = state["exp_avg_sq"].double()  # another form
    before = dict(state)
    IO.load_optimizer(optimizer, tmp_path / "o")
    after = optimizer.state[parameter]
    assert after["exp_avg"] is before["exp_avg"]
    assert after["exp_avg_sq"] is not before["exp_avg_sq"]
    _same_state(optimizer.unwrap(), saved.unwrap())


def test_a_state_that_parameters_share_is_filled_for_each(tmp_path):
    _, saved = stepped(Net())
    _, optimizer = stepped(Net(seed=1))
    shared = torch.zeros(())
    for number, parameter in enumerate(optimizer.param_groups[0]["params"]):
        optimizer.state[parameter]["step"] = shared
        saved.state[saved.param_groups[0]["params"][number]]["step"].fill_(number)
    IO.save_optimizer(saved, tmp_path / "o")
    IO.load_optimizer(optimizer, tmp_path / "o")
    _same_state(optimizer.unwrap(), saved.unwrap())


def test_the_files_of_an_optimizer(tmp_path):
    IO.save_optimizer(stepped(Net())[1], tmp_path / "o", shard=True)
    assert names_in(tmp_path / "o") == [
        "optimizer-00001-of-00001.safetensors",
        "optimizer.safetensors.index.json",
        "optimizer.safetensors.manifest.json",
        "optimizer_groups.json",
    ]
    index = json.loads((tmp_path / "o" / "optimizer.safetensors.index.json").read_text())
    assert {"embed.weight.exp_avg", "scale.step", "norm.bias.exp_avg_sq"} <= set(index["weight_map"])
    groups = json.loads((tmp_path / "o" / "optimizer_groups.json").read_text())
    assert [group["params"] for group in groups["param_groups"]] == [
        ["embed.weight", "scale"],
        ["norm.weight", "norm.bias"],
    ]


@pytest.mark.parametrize("verify", ["checksums", "structure"])
def test_an_optimizer_without_states_over_an_older_save(tmp_path, verify):
    _, saved = stepped(Net(), SGD)
    for number in (1, 2, 3):  # the shards take turns with their names
        IO.save_optimizer(saved, tmp_path / "o", shard=True)
        if verify == "structure":  # as a copy without the manifest
            (tmp_path / "o" / "optimizer.safetensors.manifest.json").unlink()
        _, other = stepped(Net(1), SGD, lr=3.0)
        IO.load_optimizer(other, tmp_path / "o", verify=verify)
        _same_state(other, saved)
        assert (tmp_path / "o" / "optimizer-00001-of-00001.b.safetensors").exists() == (number == 2)


def test_an_optimizer_over_other_parameters_is_refused_untouched(tmp_path):
    model, optimizer = stepped(Net())
    IO.save_optimizer(optimizer, tmp_path / "o", shard=True)
    other = OptimizerWrapper(AdamW(model.parameters(), lr=0.5), model)
    with pytest.raises(CheckpointError, match="2 param groups are stored, the optimizer has 1"):
        IO.load_optimizer(other, tmp_path / "o")
    assert other.param_groups[0]["lr"] == 0.5
    assert not other.state


def test_an_optimizer_that_cannot_be_stored_is_refused_by_name(tmp_path):
    model = ModelWrapper(nn.Linear(2, 2))
    optimizer = OptimizerWrapper(torch.optim.LBFGS(model.parameters()), model)

    def closure():
        loss = model(torch.ones(1, 2)).sum().pow(2)
        optimizer.zero_grad()
        loss.backward()
        return loss

    optimizer.step(closure)
    with pytest.raises(CheckpointError, match="LBFGS"):
        IO.save_optimizer(optimizer, tmp_path / "o", shard=True)
    assert names_in(tmp_path) == []


GROUP_DAMAGES = {
    "no table": lambda groups: [],
    "no groups": lambda groups: groups | {"param_groups": 3},
    "no names": lambda groups: groups | {"param_groups": [{"params": [1]}]},
    "shapes of others": lambda groups: groups | {"shapes": {"x": [1]}},
    "numbers of others": lambda groups: groups | {"numbers": {"x": {}}},
    "no scaler": lambda groups: {key: value for key, value in groups.items() if key != "loss_scaler"},
    "no count": lambda groups: groups | {"num_skipped_steps": "many"},
}


@pytest.mark.parametrize("damage", GROUP_DAMAGES.values(), ids=GROUP_DAMAGES.keys())
def test_damaged_groups_are_refused(tmp_path, damage):
    IO.save_optimizer(stepped(Net())[1], tmp_path / "o", shard=True)
    path = tmp_path / "o" / "optimizer_groups.json"
    path.write_text(json.dumps(damage(json.loads(path.read_text()))))
    _, optimizer = stepped(Net(1))
    with pytest.raises(CheckpointError, match="differs from its checksum"):
        IO.load_optimizer(optimizer, tmp_path / "o")
    (tmp_path / "o" / "optimizer.safetensors.manifest.json").unlink()
    before = optimizer.state_dict()["state"][0]["exp_avg"].clone()
    with pytest.raises(CheckpointError, match="are damaged"):
        IO.load_optimizer(optimizer, tmp_path / "o", verify="structure")
    assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], before)


def test_a_model_is_no_optimizer(tmp_path):
    model, optimizer = stepped(Net())
    IO.save_model(model, tmp_path / "m.safetensors")
    IO.save_model(model, tmp_path / "m", shard=True)
    for path in (tmp_path / "m.safetensors", tmp_path / "m"):
        with pytest.raises(CheckpointError):
            IO.load_optimizer(optimizer, path)


# Master weights.


def _with_masters(seed):
    model, optimizer = stepped(Net(seed, dtype=torch.bfloat16), SGD, 0, momentum=0.5)
    optimizer.master_weights = Fp32MasterWeights(optimizer.unwrap())
    with torch.no_grad():
        for group in optimizer.param_groups:
            for master in group["params"]:
                master.add_(torch.randn_like(master) * 1e-4)
    optimizer.master_weights.copy_to_model()
    return model, optimizer


def _optimized(optimizer):
    return [parameter.detach().clone() for group in optimizer.param_groups for parameter in group["params"]]


@pytest.mark.parametrize("model_first", [True, False])
def test_masters_come_back_in_either_order(tmp_path, form, model_first):
    name, options = form
    model, optimizer = _with_masters(0)
    file = (tmp_path / "o") if options.get("shard") else (tmp_path / name).with_stem("o")
    IO.save_model(model, tmp_path / "m.safetensors")
    IO.save_optimizer(optimizer, file, **options)
    other_model, other = _with_masters(1)
    other_model.register_load_hook(other.master_weights.refresh)
    if model_first:
        IO.load_model(other_model, tmp_path / "m.safetensors")
    IO.load_optimizer(other, file)
    if not model_first:
        IO.load_model(other_model, tmp_path / "m.safetensors")
    assert all(map(torch.equal, _optimized(other), _optimized(optimizer)))
    assert any(not torch.equal(master, master.bfloat16().float()) for master in _optimized(other))


def test_masters_become_the_weights_of_an_optimizer_without(tmp_path):
    model, optimizer = _with_masters(0)
    IO.save_model(model, tmp_path / "m.safetensors")
    IO.save_optimizer(optimizer, tmp_path / "o", shard=True)
    other_model, other = stepped(Net(1), SGD, 1, momentum=0.5)
    IO.load_model(other_model, tmp_path / "m.safetensors")
    IO.load_optimizer(other, tmp_path / "o")
    assert all(map(torch.equal, _optimized(other), _optimized(optimizer)))


def test_masters_follow_the_weights_where_none_are_stored(tmp_path):
    _, optimizer = stepped(Net(0), SGD, 1, momentum=0.5)
    IO.save_optimizer(optimizer, tmp_path / "o", shard=True)
    other_model, other = _with_masters(1)
    with torch.no_grad():
        other_model.module.embed.weight.fill_(2)  # changed from outside, without a word to the masters
    IO.load_optimizer(other, tmp_path / "o")
    assert torch.equal(_optimized(other)[0], torch.full((11, 6), 2.0))


# Schedulers.


def test_a_scheduler_goes_on_where_it_stopped(tmp_path):
    def build():
        optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        scheduler = lr_scheduler.MultiStepLR(optimizer, [2, 4, 4], gamma=0.5)
        return optimizer, scheduler

    optimizer, scheduler = build()
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    IO.save_lr_scheduler(scheduler, tmp_path / "deep" / "scheduler.json")
    _, other = build()
    IO.load_lr_scheduler(other, tmp_path / "deep" / "scheduler.json")
    assert other.state_dict() == scheduler.state_dict()
    assert type(other.milestones) is type(scheduler.milestones)
    with pytest.raises(CheckpointError, match="not of a StepLR"):
        IO.load_lr_scheduler(lr_scheduler.StepLR(optimizer, 1), tmp_path / "deep" / "scheduler.json")


SCHEDULERS = {
    "steps": (lambda o, n: lr_scheduler.StepLR(o, n), r"with step_size=2, but .* step_size=3: .* with last_epoch=4$"),
    "milestones": (lambda o, n: lr_scheduler.MultiStepLR(o, [1, n]), r"with milestones=\[1, 2\]"),
    "cosine": (lambda o, n: lr_scheduler.CosineAnnealingLR(o, 9, n / 100), "with eta_min=0.02"),
    "restarts": (lambda o, n: lr_scheduler.CosineAnnealingWarmRestarts(o, 1, n), "with T_mult=2,"),
    "cycles": (lambda o, n: lr_scheduler.CyclicLR(o, 0.1, n), r"with max_lrs=\[2\]"),
    "one cycle": (lambda o, n: lr_scheduler.OneCycleLR(o, 1.0, 10, pct_start=n / 10), "with schedule_phases="),
    "plateau": (lambda o, n: lr_scheduler.ReduceLROnPlateau(o, cooldown=n), "cooldown=2, .*the optimizer alone$"),
    "sequence": (
        lambda o, n: lr_scheduler.SequentialLR(o, [lr_scheduler.LinearLR(o), lr_scheduler.StepLR(o, n)], [2]),
        "of a StepLR with step_size=2",
    ),
    "switch": (
        lambda o, n: lr_scheduler.SequentialLR(o, [lr_scheduler.LinearLR(o), lr_scheduler.StepLR(o, 1)], (n,)),
        r"of a SequentialLR with milestones=\[2\]",
    ),
    "chain": (
        lambda o, n: lr_scheduler.ChainedScheduler([lr_scheduler.ExponentialLR(o, 0.9) for _ in range(n)]),
        "with number of schedulers=2",
    ),
    "functions": (lambda o, n: lr_scheduler.LambdaLR(o, lambda step: n / (step + 1)), None),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_of_torch_keeps_its_settings(tmp_path, name):
    build, message = SCHEDULERS[name]

    def of(number):
        return build(SGD([nn.Parameter(torch.zeros(1))], lr=1.0, momentum=0.9), number)

    scheduler = of(2)
    for _ in range(5):
        scheduler.optimizer.step()
        scheduler.step(1.0) if name == "plateau" else scheduler.step()
    IO.save_lr_scheduler(scheduler, tmp_path / "scheduler.json")
    same = of(2)
    IO.load_lr_scheduler(same, tmp_path / "scheduler.json")
    assert same.state_dict() == scheduler.state_dict()
    IO.load_lr_scheduler(same, tmp_path / "scheduler.json")
    other = of(3)
    if message is None:  # functions are not compared
        IO.load_lr_scheduler(other, tmp_path / "scheduler.json")
        return
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(ConfigError, match=message):
        IO.load_lr_scheduler(other, tmp_path / "scheduler.json")
    assert other.state_dict() == before


def test_a_group_that_came_later_is_no_other_setting(tmp_path):
    def build():
        optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, "min", 0.1, 0)
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
        return scheduler

    scheduler = build()
    for _ in range(3):
        scheduler.step(1.0)
    IO.save_lr_scheduler(scheduler, tmp_path / "scheduler.json")
    other = build()
    IO.load_lr_scheduler(other, tmp_path / "scheduler.json")
    assert other.state_dict() == scheduler.state_dict()


def test_scheduler_files_and_states_that_do_not_fit(tmp_path):
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(ConfigError, match="is a directory"):
        IO.save_lr_scheduler(scheduler, tmp_path)
    with pytest.raises(ConfigError, match="is a directory"):
        IO.load_lr_scheduler(scheduler, tmp_path)
    with pytest.raises(CheckpointError, match="cannot open"):
        IO.load_lr_scheduler(scheduler, tmp_path / "nowhere.json")
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(CheckpointError, match="holds no scheduler state"):
        IO.load_lr_scheduler(scheduler, tmp_path / "other.json")
    scheduler.callback = print
    with pytest.raises(CheckpointError, match=r"\['callback'\]"):
        IO.save_lr_scheduler(scheduler, tmp_path / "scheduler.json")
    assert names_in(tmp_path) == ["other.json"]


class Keeping(SGD):
    """Keeps what it is told to, in its state or in its state dict."""

    def __init__(self, params, *, state=(), top=()):
        super().__init__(params, lr=0.1)
        self._state, self._top = state, top

    def step(self, closure=None):
        super().step(closure)
        for key in self._state:
            owner = self.state if key == "global" else self.state[self.param_groups[0]["params"][0]]
            owner[key] = {"count": 1} if key == "global" else torch.ones(2)

    def state_dict(self):
        return super().state_dict() | dict.fromkeys(self._top, 1)


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        ({"state": ["global"]}, "keeps 'global' beside the states of its parameters"),
        ({"top": ["k"]}, "keeps 'k' beside the states of its parameters"),
        ({"state": ["master"]}, "has a state 'master', which has another meaning"),
        ({"state": ["m.1"]}, "has a state 'm.1', which has another meaning"),
        ({"state": ["m@rank"]}, "has a state 'm@rank', which has another meaning"),
    ],
)
def test_states_that_a_load_would_lose_are_refused(tmp_path, form, kept, message):
    name, options = form
    model = Net(0)
    wrapped = ModelWrapper(model)
    optimizer = OptimizerWrapper(Keeping(model.parameters(), **kept), wrapped)
    train_step(wrapped, optimizer)
    with pytest.raises(CheckpointError, match=message):
        IO.save_optimizer(optimizer, tmp_path / name, **options)
    assert names_in(tmp_path) == []


def test_states_with_numbers_and_with_names_say_how_to_build_the_optimizer(tmp_path):
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(20)))
    numbered, named = SGD(model.parameters(), lr=0.1), SGD(model.named_parameters(), lr=0.1)
    IO.save_optimizer(numbered, tmp_path / "numbered.safetensors")
    IO.save_optimizer(named, tmp_path / "named.safetensors")
    torch.save(numbered.state_dict(), tmp_path / "torch.pt")
    for optimizer, other in ((named, "numbered"), (numbered, "named")):
        with pytest.raises(
            CheckpointError, match=r"and 30 more are missing in[^$]*AdamW\(model.named_parameters\(\)\)"
        ):
            IO.load_optimizer(optimizer, tmp_path / f"{other}.safetensors")
    IO.load_optimizer(named, tmp_path / "torch.pt")  # by the order of the parameters


def test_a_file_of_several_parts_names_the_part_to_save(tmp_path):
    torch.save({"model": Net().state_dict(), "epoch": 1}, tmp_path / "all.pt")
    with pytest.raises(
        CheckpointError, match=r"torch.save\(torch.load\(path, weights_only=True\)\['model'\], new_path\)"
    ):
        IO.load_model(Net(), tmp_path / "all.pt")
