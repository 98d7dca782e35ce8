"""AutoPlugin on several ranks: one plan on all, found beside the launched world, that trains as one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness import distributed
from machine_profiles import profile_of, short_measurement
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from booster import AutoPlugin, Booster, autoparallelize, estimate_memory
from booster.comm import all_gather_equal, all_gather_text, fake_world, group_rank, group_size, new_group
from booster.device import current_device
from booster.errors import ConfigError, DesyncError

PROFILE = profile_of(call=1e-5, latency=1e-5, seconds_per_byte=1e-9)
STEPS, BATCH = 4, 4


def make_model(width=16):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, 8), nn.GELU(), nn.Linear(8, 2))


def samples():
    generator = torch.Generator().manual_seed(1)
    size = STEPS * BATCH * 2
    return TensorDataset(torch.randn(size, 8, generator=generator), torch.randn(size, 2, generator=generator))


def train_alone(dp_size):
    """Returns the weights of one process after steps on the batches of all data-parallel ranks together."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for inputs, targets in DataLoader(samples(), batch_size=BATCH * dp_size):
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def train(booster):
    """Returns the full weights after one epoch."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(samples(), batch_size=BATCH)
    model, optimizer, criterion, loader, _ = booster.boost(model, optimizer, nn.MSELoss(), loader)
    for batch in loader:
        step(booster, model, optimizer, criterion, batch)
    return model


def step(booster, model, optimizer, criterion, batch):
    inputs, targets = (one.to(booster.device) for one in batch)
    booster.backward(criterion(model(inputs), targets), optimizer)
    optimizer.step()
    optimizer.zero_grad()


@distributed(world_size=2)
@pytest.mark.parametrize("objective", ["time", "memory"])
def test_the_choice_is_the_same_on_all_ranks_and_trains_as_one_process(objective, tmp_path):
    booster = Booster(plugin=AutoPlugin(objective, profile=PROFILE, verbose=False))
    model = train(booster)
    assert len(set(map(tuple, all_gather_text("plans", [str(booster.plan)])))) == 1
    assert_trained_as_alone(booster, model, tmp_path)


def assert_trained_as_alone(booster, model, folder):
    booster.save_model(model, folder / "model.safetensors")
    saved = load_file(folder / "model.safetensors")
    for name, expected in train_alone(booster.plugin.dp_size).items():
        torch.testing.assert_close(saved[name], expected, rtol=1e-4, atol=1e-6)


@distributed(world_size=2)
@pytest.mark.parametrize("name", ["torch_ddp", "low_level_zero", "gemini", "torch_fsdp", "hybrid_parallel"])
def test_the_plan_of_each_plugin_trains_as_one_process(name, tmp_path):
    candidates = [(name, {"tp_size": 2, "precision": "fp32"})] if name == "hybrid_parallel" else [name]
    chooser = AutoPlugin(candidates=candidates, profile=PROFILE, verbose=False)
    booster = Booster(plugin=chooser)
    assert_trained_as_alone(booster, train(booster), tmp_path)
    assert booster.plan.plugin == name
    if group_rank() == 0:
        booster.plan.save(tmp_path / "plan.json")
    booster.wait_for_everyone()
    again = Booster(plugin=AutoPlugin.from_plan(tmp_path / "plan.json"))
    assert type(again.plugin) is type(booster.plugin)
    assert_trained_as_alone(again, train(again), tmp_path)
    assert again.plan == booster.plan


@pytest.mark.slow
@distributed(world_size=2)
def test_stages_are_chosen_for_loops_that_execute_them():
    stages = [("hybrid_parallel", {"tp_size": 1, "pp_size": 2, "num_microbatches": 2, "precision": "fp32"})]
    with pytest.raises(ConfigError, match=r"no plugin has a plan for Sequential(.|\n)*execute_pipeline\(\)"):
        train(Booster(plugin=AutoPlugin(candidates=stages, profile=PROFILE, verbose=False)))
    chooser = AutoPlugin(candidates="all", profile=PROFILE, verbose=False, batch=torch.rand(4, 8), criterion=mean)
    booster = Booster(plugin=chooser)
    model = make_model()
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    result = booster.execute_pipeline(iter([torch.rand(4, 8)]), model, mean, optimizer)
    assert result["loss"] is not None


def mean(outputs, batch):
    return outputs.mean()


@distributed(world_size=2)
def test_placements_are_solved_as_part_of_the_search(tmp_path):
    pytest.importorskip("scipy")
    settings = {"tp_size": 2, "precision": "fp32", "plan": "solve"}
    booster = Booster(plugin=AutoPlugin(candidates=[("hybrid_parallel", settings)], profile=PROFILE, verbose=False))
    assert_trained_as_alone(booster, train(booster), tmp_path)
    assert set(booster.plan.settings["plan"]) <= {"0", "2", "4"}
    with pytest.raises(ConfigError, match=r"divides layers between tp_size=1 ranks: give tp_size=2"):
        train(
            Booster(
                plugin=AutoPlugin(
                    candidates=[("hybrid_parallel", {**settings, "tp_size": 1})], profile=PROFILE, verbose=False
                )
            )
        )


@pytest.mark.slow
@distributed(world_size=2)
def test_what_does_not_fit_recomputes(tmp_path):
    def boosted(budget=None):
        model = Deep()
        chooser = AutoPlugin(
            candidates=["low_level_zero"],
            device_memory_budget=budget,
            profile=PROFILE,
            verbose=False,
            batch=torch.rand(256, 16),
            criterion=mean,
        )
        booster = Booster(plugin=chooser)
        return booster, booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))

    kept, _ = boosted()
    assert kept.plan.activation_schedule is None
    budget = int(0.8 * kept.plan.memory)
    booster, (model, optimizer, *_) = boosted(budget)
    assert booster.plan.memory <= budget
    assert "recomputes" in str(booster.plan)
    if group_rank() == 0:
        booster.plan.save(tmp_path / "plan.json")
    booster.wait_for_everyone()
    again = Booster(plugin=AutoPlugin.from_plan(tmp_path / "plan.json"))
    assert again.plan == booster.plan
    inputs = torch.rand(4, 16, device=booster.device)
    booster.backward(mean(model(inputs), None), optimizer)
    optimizer.step()


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@distributed(world_size=2)
def test_a_precision_is_kept(tmp_path):
    chooser = AutoPlugin(candidates=["low_level_zero", "torch_ddp"], profile=PROFILE, verbose=False)
    booster = Booster(mixed_precision="bf16", plugin=chooser)
    train(booster)
    assert "bf16" in (booster.plan.mixed_precision, booster.plan.settings.get("precision"))


@pytest.mark.slow
@distributed(world_size=2)
def test_the_machine_is_measured_once_and_its_profile_is_rank_0s(tmp_path, monkeypatch):
    monkeypatch.setenv("BOOSTER_PROFILE_CACHE", str(tmp_path / "machines"))
    with short_measurement():
        first = AutoPlugin(verbose=False).machine()
    second = AutoPlugin(verbose=False).machine()
    assert first == second
    assert (first.num_ranks, len(list((tmp_path / "machines").iterdir()))) == (2, 1)


@distributed(world_size=2)
def test_mistakes_are_errors_on_all_ranks():
    def boost(model, **arguments):
        loader = DataLoader(samples(), batch_size=BATCH) if arguments.pop("has_loader", True) else None
        booster = Booster(plugin=AutoPlugin(profile=PROFILE, verbose=False, **arguments))
        booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss(), loader)

    with pytest.raises(DesyncError, match=r"0\.weight"):
        boost(make_model(8 * (1 + group_rank())))
    with pytest.raises(DesyncError, match="objective"):
        boost(make_model(), objective="time" if group_rank() else "memory")
    with pytest.raises(ConfigError, match="no dataloader"):
        boost(make_model(), has_loader=group_rank() == 1)
    with pytest.raises(ConfigError, match="no setting fits"):
        boost(make_model(), device_memory_budget=10)


# Fake worlds beside the launched one.


@distributed(world_size=2)
@pytest.mark.parametrize("settings", [{"tp_size": 2}, {"pp_size": 2, "num_microbatches": 2}, {"tp_size": 4}], ids=str)
def test_estimates_by_name_are_those_before_the_launch(settings):
    num_ranks = 2 * settings.get("tp_size", 2)
    arguments = {"batch": torch.rand(4, 8), "criterion": mean, "num_ranks": num_ranks, "profile": PROFILE}
    before_groups = len(dist.distributed_c10d._world.pg_names)
    estimate = estimate_memory(make_model(), "hybrid_parallel", settings={**settings, "precision": "fp32"}, **arguments)
    assert estimate.num_ranks == num_ranks
    assert len(dist.distributed_c10d._world.pg_names) == before_groups
    totals = all_gather_equal(torch.tensor([estimate.total, round(1e9 * estimate.step_time.total)])).view(2, -1)
    assert totals[0].tolist() == totals[1].tolist()


def fail_in_a_fake_world():
    with fake_world(8, 3):
        assert (group_size(), group_rank()) == (8, 3)
        assert len(dist.get_process_group_ranks(new_group([3, 5]))) == 2
        raise ValueError("inside")


@distributed(world_size=2)
def test_the_launched_world_is_whole_after_a_fake_one():
    group = new_group([0, 1])
    with pytest.raises(ValueError, match="inside"):
        fail_in_a_fake_world()
    assert group_size() == 2
    for one in (None, group, new_group([0, 1])):
        number = torch.ones(1, device=current_device())
        dist.all_reduce(number, group=one)
        assert number.item() == 2


# The documents' spelling.


def plain_loop(model, optimizer, rows):
    for first in range(0, len(rows), BATCH):
        inputs, targets = rows[first : first + BATCH]
        loss = nn.functional.mse_loss(model(inputs.to(current_device())), targets.to(current_device()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@distributed(world_size=2)
@pytest.mark.parametrize("preference", ["dp", "tp"])
def test_autoparallelize_trains_by_a_plain_loop(preference):
    model = autoparallelize(make_model(), (torch.empty(BATCH, 8, device="meta"),), solver_preference=preference)
    rows = samples()
    own = [TensorDataset(*rows[group_rank() :: 2]), rows][preference == "tp"]
    plain_loop(model, torch.optim.SGD(model.parameters(), lr=0.1), own)
    alone, expected = make_model(), []
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for first in range(0, len(own), BATCH):
        chosen = slice(2 * first, 2 * (first + BATCH)) if preference == "dp" else slice(first, first + BATCH)
        inputs, targets = rows[chosen]
        nn.functional.mse_loss(alone(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    expected = alone(rows[:BATCH][0])
    torch.testing.assert_close(model(rows[:BATCH][0].to(current_device())).cpu(), expected, rtol=1e-4, atol=1e-6)


@distributed(world_size=2)
def test_autoparallelize_with_an_optimizer_keeps_its_solution(tmp_path):
    path = tmp_path / "solution.json"

    def run(**arguments):
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        given = {"meta_args": {"input": torch.empty(BATCH, 8, device="meta")}, "optimizer": optimizer}
        return autoparallelize(model, **given, return_solution=True, solution_path=path, **arguments)

    model, optimizer, plan = run(save_solver_solution=True, alpha_beta_dict={(0, 1): (1e-5, 1e-9)})
    optimizer.backward(model(torch.rand(BATCH, 8, device=current_device())).mean())
    optimizer.step()
    assert run(load_solver_solution=True)[2] == plan


@distributed(world_size=2)
def test_autoparallelize_says_what_it_cannot_keep_to():
    arguments = torch.empty(BATCH, 8, device="meta")
    for given, message in (
        ({"solver_preference": "pp"}, "give one of 'standard', 'dp', 'tp'"),
        ({"dataloader_option": "replicated"}, "leave it out"),
        ({"shard_option": "full"}, "leave it"),
        ({"logical_mesh_id": torch.tensor([1, 0])}, "another order of ranks"),
        ({"logical_mesh_shape": (3, 1)}, "two numbers whose product is 2"),
        ({"logical_mesh_shape": (2, 1), "solver_preference": "tp"}, "leaves no plan"),
        ({"save_solver_solution": True}, "give the file's path"),
        ({"memory_budget": 10}, "no setting fits"),
    ):
        with pytest.raises(ConfigError, match=message):
            autoparallelize(make_model(), arguments, **given)
    with pytest.raises(ConfigError, match="neither meta_args nor data_loader"):
        autoparallelize(make_model())
