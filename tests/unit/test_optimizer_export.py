"""`booster ckpt export-optimizer`: plain torch takes what it writes, and continues with it."""

from __future__ import annotations

import pytest
import torch
from checkpoint_cases import Net, assert_equal, state_of, stepped
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop

from booster.checkpoint_io import GeneralCheckpointIO
from booster.cli import main
from booster.interface import ModelWrapper, OptimizerWrapper
from booster.mixed_precision.fp16 import Fp32MasterWeights

IO = GeneralCheckpointIO()


@pytest.fixture
def ckpt(capsys):
    """Runs `booster ckpt` and returns its exit code and what it wrote."""

    def run(*arguments):
        code = main(["ckpt", *map(str, arguments)])
        written = capsys.readouterr()
        return code, written.out, written.err

    return run


@pytest.fixture
def run(tmp_path):
    """A directory of a model and its optimizer."""
    model, optimizer = stepped(Net())
    IO.save_model(model, tmp_path / "run", shard=True)
    IO.save_optimizer(optimizer, tmp_path / "run", shard=True)
    return tmp_path / "run"


OPTIMIZERS = {
    "adamw": (AdamW, {"amsgrad": True, "betas": (0.8, 0.9)}),
    "adam": (Adam, {"weight_decay": 0.1}),
    "tensor lr": (AdamW, {"lr": torch.tensor(0.5)}),
    "sgd": (SGD, {"momentum": 0.9}),
    "plain sgd": (SGD, {}),
    "adagrad": (Adagrad, {}),
    "rmsprop": (RMSprop, {"momentum": 0.5, "centered": True}),
}


@pytest.mark.parametrize(("optimizer_class", "options"), OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
@pytest.mark.parametrize("num_steps", [0, 2])
@pytest.mark.parametrize("shard", [True, False])
def test_plain_torch_takes_an_exported_optimizer(ckpt, tmp_path, optimizer_class, options, num_steps, shard):
    _, optimizer = stepped(Net(), optimizer_class, num_steps, **options)
    source = tmp_path / ("o" if shard else "o.safetensors")
    IO.save_optimizer(optimizer, source, shard=shard)
    code, out, _ = ckpt("export-optimizer", source, tmp_path / "out.pt")
    assert code == 0
    assert out.splitlines()[:4] == ["     0  embed.weight", "     1  scale", "     2  norm.weight", "     3  norm.bias"]
    exported = torch.load(tmp_path / "out.pt", weights_only=True)
    assert exported["parameter_names"] == ["embed.weight", "scale", "norm.weight", "norm.bias"]
    net = Net(1)
    groups = [{"params": [net.embed.weight, net.scale]}, {"params": list(net.norm.parameters())}]
    plain = optimizer_class(groups, lr=3.0)
    plain.load_state_dict(exported)
    expected, found = optimizer.unwrap().state_dict(), plain.state_dict()
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys()
    for number, state in expected["state"].items():
        assert_equal(_as_tensors(found["state"][number]), _as_tensors(state))
    _, other = stepped(Net(1), optimizer_class, 1, **options)
    IO.load_optimizer(other, tmp_path / "out.pt")  # and so does a boosted one
    loaded = other.unwrap().state_dict()
    assert loaded["param_groups"] == expected["param_groups"]
    assert loaded["state"].keys() == expected["state"].keys()
    for number, state in expected["state"].items():
        assert_equal(_as_tensors(loaded["state"][number]), _as_tensors(state))


def _as_tensors(state):
    return {key: torch.as_tensor(-1 if value is None else value) for key, value in state.items()}


def test_an_exported_optimizer_goes_on_in_plain_torch(ckpt, tmp_path):
    model, optimizer = stepped(Net())
    IO.save_model(model, tmp_path / "run", shard=True)
    IO.save_optimizer(optimizer, tmp_path / "run", shard=True)
    assert ckpt("export-optimizer", tmp_path / "run", tmp_path / "out.pt")[0] == 0
    net = Net(1)
    net.load_state_dict(model.state_dict())
    groups = [{"params": [net.embed.weight, net.scale]}, {"params": list(net.norm.parameters())}]
    plain = AdamW(groups)
    plain.load_state_dict(torch.load(tmp_path / "out.pt", weights_only=True))
    for _ in range(3):
        for owner, step in ((model, optimizer), (net, plain)):
            step.zero_grad()
            owner(torch.arange(8)).pow(2).mean().backward()
            step.step()
    assert_equal(state_of(net), state_of(model))


def test_master_weights_are_exported_when_asked_for(ckpt, tmp_path):
    net = nn.Linear(3, 2).bfloat16()
    optimizer = OptimizerWrapper(AdamW(net.parameters()), ModelWrapper(net))
    optimizer.master_weights = Fp32MasterWeights(optimizer.unwrap())
    IO.save_optimizer(optimizer, tmp_path / "o", shard=True)
    assert ckpt("export-optimizer", tmp_path / "o", tmp_path / "without.pt")[0] == 0
    assert "master_weights" not in torch.load(tmp_path / "without.pt", weights_only=True)
    assert ckpt("export-optimizer", tmp_path / "o", tmp_path / "with.pt", "--master-weights")[0] == 0
    exported = torch.load(tmp_path / "with.pt", weights_only=True)
    masters = [master for group in optimizer.param_groups for master in group["params"]]
    assert exported["state"] == {}
    assert_equal(exported["master_weights"], dict(enumerate(masters)))
    assert all(master.dtype == torch.float32 for master in exported["master_weights"].values())
    AdamW(net.parameters()).load_state_dict(exported)
    other = nn.Linear(3, 2).bfloat16()
    loaded = OptimizerWrapper(AdamW(other.parameters()), ModelWrapper(other))
    loaded.master_weights = Fp32MasterWeights(loaded.unwrap())
    IO.load_optimizer(loaded, tmp_path / "with.pt")
    assert_equal(dict(enumerate(loaded.param_groups[0]["params"])), exported["master_weights"])


def test_masters_that_are_not_there_can_not_be_exported(ckpt, run, tmp_path):
    code, _, err = ckpt("export-optimizer", run, tmp_path / "out.pt", "--master-weights")
    assert code == 2
    assert "leave --master-weights out" in err
    assert not (tmp_path / "out.pt").exists()


@pytest.mark.parametrize("name", ["out.safetensors", "out", "run/out.pt", "there.pt"])
def test_where_an_exported_optimizer_may_go(ckpt, run, tmp_path, name):
    (tmp_path / "there.pt").write_text("x")
    assert ckpt("export-optimizer", run, tmp_path / name)[0] == 2
    assert (tmp_path / "there.pt").read_text() == "x"
    assert ckpt("export-optimizer", run, tmp_path / "there.pt", "--overwrite")[0] == 0
