"""Plans: what files hold, how candidates are ranked, machines by their data sheets, and what mistakes are told."""

from __future__ import annotations

import json
import random
import re
from functools import partial

import pytest
import torch
from machine_profiles import profile_of
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import DataLoader, TensorDataset

from booster import AutoPlugin, Booster, ParallelPlan
from booster.auto_parallel.auto_plugin import first_batch
from booster.auto_parallel.search import refuse_pipelines, refuse_small_batches, search
from booster.cli import main
from booster.cli.estimate_jobs import in_processes
from booster.errors import ConfigError
from booster.estimate.candidates import Candidate, find_candidates
from booster.estimate.data_sheets import DEVICES, LINKS, profile_of_data_sheets
from booster.estimate.estimate import TrainingRecipe
from booster.mixed_precision import BF16MixedPrecision
from booster.plugins.hybrid_parallel.tensor_parallel.shard_spec import Block
from booster.plugins.hybrid_parallel.tp_plan.plan import Style

PLAN = ParallelPlan(
    plugin="torch_fsdp",
    settings={
        "mixed_precision": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        "plan": {
            "layers.*.up": Style("colwise", blocks=(Block(num_units=4, unit_size=8),)),
            "layers.*.down": "rowwise",
        },
        "sizes": (1, 2),
    },
    num_ranks=4,
    model="Linear",
    num_parameters=6,
    batches=4,
    memory=2**30,
    seconds=0.5,
    machine="test",
)


def recipe(width=32):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, 1))
        batch = torch.empty(4, 8)
    return TrainingRecipe(
        model=model, batch=batch, optimizer=torch.optim.AdamW, criterion=lambda outputs, batch: outputs.mean()
    )


def searched(candidates, **arguments):
    arguments = {"objective": "time", "device_memory": None, "profile": None} | arguments
    return search(recipe(), [Candidate(plugin=name) for name in candidates], 2, **arguments)


# Files.


def test_a_plan_is_read_as_it_was_written(tmp_path):
    PLAN.save(tmp_path / "plan.json")
    assert ParallelPlan.load(tmp_path / "plan.json") == PLAN
    assert [one.name for one in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.parametrize("change", [{"version": 2}, {"format": "x"}, {"more": 1}, {"num_ranks": None}], ids=str)
def test_another_file_is_not_a_plan(tmp_path, change):
    path = tmp_path / "plan.json"
    PLAN.save(path)
    values = json.loads(path.read_text()) | change
    if change == {"num_ranks": None}:
        del values["num_ranks"]
    path.write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="not a plan of this version"):
        ParallelPlan.load(path)


def test_a_plan_names_no_code(tmp_path):
    path = tmp_path / "plan.json"
    PLAN.save(path)
    path.write_text(path.read_text().replace("MixedPrecisionPolicy", "Popen"))
    with pytest.raises(ConfigError, match="not a plan of this version"):
        AutoPlugin.from_plan(path)


def test_a_plan_that_cannot_be_kept(tmp_path):
    with pytest.raises(ConfigError, match="can't be read"):
        ParallelPlan.load(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="can't be written"):
        PLAN.save(tmp_path / "none" / "plan.json")
    with pytest.raises(ConfigError, match="a plan can't hold"):
        ParallelPlan(plugin="torch_ddp", settings={"x": object()}, num_ranks=1, model="", num_parameters=0).save(
            tmp_path / "plan.json"
        )


def test_a_plan_is_for_its_model_and_world():
    PLAN.check_model(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match=r"Linear with 6 parameters, and boost\(\) was given a Linear with 12"):
        PLAN.check_model(nn.Linear(3, 3))
    with pytest.raises(ConfigError, match=r"for 4 rank\(s\), and 1 were launched"):
        PLAN.make_plugin()


def test_a_plan_has_its_precision(tmp_path):
    plan = ParallelPlan(plugin="none", mixed_precision="bf16", num_ranks=1, model="Linear", num_parameters=6)
    plan.save(tmp_path / "plan.json")
    chooser = AutoPlugin.from_plan(tmp_path / "plan.json")
    assert isinstance(Booster(plugin=chooser).mixed_precision, BF16MixedPrecision)
    assert isinstance(Booster(mixed_precision="bf16", plugin=chooser).mixed_precision, BF16MixedPrecision)
    with pytest.raises(ConfigError, match="'fp16' was given with a plan that has 'bf16'"):
        Booster(mixed_precision="fp16", plugin=chooser)
    with pytest.raises(ConfigError, match="leave device out"):
        Booster(device="cpu", plugin=chooser)


# The search.


def test_ranked_by_time_per_batch_then_memory_and_what_is_out():
    result = searched(["torch_ddp", "low_level_zero", "nonsense", "gemini"], profile=profile_of(call=1e-5))
    times = [one.seconds_per_batch for one in result.results[:3]]
    assert times == sorted(times)
    assert result.best is result.results[0]
    assert result.results[3].candidate.plugin == "nonsense"
    text = result.format(["a note"])
    assert text.index("<--") < text.index("a note") < text.index("nonsense") < text.index("chosen, fastest")
    by_memory = searched(["torch_ddp", "low_level_zero", "gemini"], objective="memory")
    totals = [one.estimate.total for one in by_memory.results]
    assert totals == sorted(totals)
    assert by_memory.best.candidate.plugin == "gemini"


def test_without_times_fewest_bytes_stand_for_them():
    result = searched(["torch_ddp", "torch_fsdp"], device_memory=2**30)
    sent = [one.sent_per_batch for one in result.results]
    assert sent == sorted(sent)
    assert "chosen, fewest bytes sent" in result.format()


def test_what_does_not_fit_is_behind_and_never_chosen():
    small, large = (one.estimate.total for one in searched(["torch_ddp", "gemini"], objective="memory").results)
    result = searched(["torch_ddp", "gemini"], device_memory=(small + large) // 2, profile=profile_of())
    assert result.best.candidate.plugin == "gemini"
    assert [one.estimate.fits for one in result.results] == [True, False]
    nothing = searched(["torch_ddp", "gemini"], device_memory=10, profile=profile_of())
    assert nothing.best is None
    assert "no setting fits" in nothing.format()
    with pytest.raises(ConfigError, match="no plugin has a plan for Sequential on 2"):
        nothing.plan(recipe(), 2)


def test_a_plan_of_the_best():
    plan = searched(["torch_ddp"], profile=profile_of(call=1e-5)).plan(recipe(), 2)
    assert (plan.plugin, plan.num_ranks, plan.model, plan.num_parameters) == ("torch_ddp", 2, "Sequential", 321)
    assert (plan.batches, plan.machine) == (2, "test")
    assert plan.memory > 4 * 4 * 321
    assert plan.seconds > 0


def test_offloading_is_out_where_the_device_is_the_host():
    offloading = [Candidate(plugin="gemini", settings={"placement_policy": "cpu", "precision": "fp32"})]
    arguments = {"objective": "memory", "device_memory": None}
    on_cpu = search(recipe(), offloading, 2, profile=profile_of(), **arguments)
    assert on_cpu.best is None
    assert "which is the device's own on a CPU" in on_cpu.format()
    asked = search(recipe(), offloading, 2, profile=profile_of(), needs_accelerator_to_offload=False, **arguments)
    assert asked.best is not None
    assert search(recipe(), offloading, 2, profile=profile_of(is_asynchronous=True), **arguments).best is not None


def test_stages_are_out_where_they_cannot_run():
    stages = Candidate(plugin="hybrid_parallel", settings={"tp_size": 1, "pp_size": 8, "num_microbatches": 8})
    plain = Candidate(plugin="torch_ddp")
    assert "execute_pipeline" in refuse_pipelines(stages, 8)
    assert refuse_pipelines(plain, 8) == ""
    assert "4 sample(s)" in refuse_small_batches(stages, 8, recipe())
    assert refuse_small_batches(plain, 8, recipe()) == ""


def test_an_asked_precision_replaces_fsdps_own_policy():
    names = {one.name for one in find_candidates("torch_fsdp", 2, mixed_precision="bf16")}
    assert names == {
        "torch_fsdp sharding_strategy=FULL_SHARD mixed_precision=bf16",
        "torch_fsdp sharding_strategy=SHARD_GRAD_OP mixed_precision=bf16",
    }


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [False, True], ids=["alone", "shared"])
def test_processes_share_the_work_in_order(at_once):
    seen = []
    given = [-1, 2, -3, 4, -5]
    found = in_processes(abs, partial(partial, abs), given, seen.append, at_once=at_once)
    assert found == [1, 2, 3, 4, 5]
    assert sorted(seen) == sorted(given)
    with pytest.raises(ValueError, match="invalid literal for int"):
        in_processes(int, partial(partial, int), ["1", "x", "y"], seen.append, at_once=at_once)


# Batches.


def test_the_first_batch_changes_neither_loader_nor_generators():
    class Augmented(TensorDataset):
        def __getitem__(self, index):
            return torch.rand(3) + random.random(), super().__getitem__(index)[0]

    loader = DataLoader(Augmented(torch.arange(5)), batch_size=4, shuffle=True)
    torch.manual_seed(0)
    random.seed(0)
    expected = [batch[1].tolist() for batch in loader], torch.rand(1), random.random()
    torch.manual_seed(0)
    random.seed(0)
    inputs, targets = first_batch(loader)
    assert (inputs.shape, targets.tolist()) == ((4, 3), [0, 1, 2, 3])
    assert ([batch[1].tolist() for batch in loader], torch.rand(1), random.random()) == expected


def test_batches_that_cannot_be_taken():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter([1])

    class Broken(TensorDataset):
        def __getitem__(self, index):
            raise OSError("gone")

    with pytest.raises(ConfigError, match=r"without using up its samples: give AutoPlugin\(batch=...\)"):
        first_batch(DataLoader(Stream()))
    with pytest.raises(ConfigError, match="Broken failed with OSError: gone"):
        first_batch(DataLoader(Broken(torch.zeros(2))))
    with pytest.raises(ConfigError, match="not a torch DataLoader"):
        first_batch([1, 2])


# Machines.


def test_an_data_sheets_has_its_data_sheets_speeds():
    profile = profile_of_data_sheets("h100", "nvlink4,ib-ndr", 64, 8, None)
    assert profile.curve("matmul", "bfloat16").rate == pytest.approx(0.7 * DEVICES["h100"].bfloat16)
    assert profile.curve("matmul", "float32").rate == pytest.approx(0.7 * DEVICES["h100"].float32)
    assert profile.curve("elementwise", "float32").rate == pytest.approx(0.85 * DEVICES["h100"].memory)
    within, outside = LINKS["nvlink4"][0], LINKS["ib-ndr"][0]
    assert 1 / profile.speed("all_reduce", 8).seconds_per_byte == pytest.approx(0.8 * within)
    # One rank of each host has one link; all ranks of a host have eight of them, up to what they exchange in it.
    assert 1 / profile.speed("all_reduce", 8, 8).seconds_per_byte == pytest.approx(0.8 * outside)
    assert 1 / profile.speed("all_reduce", 64, 8).seconds_per_byte == pytest.approx(0.8 * min(within, 8 * outside))


def test_links_by_numbers():
    profile = profile_of_data_sheets("a100", "200GB/s:5us,400Gb/s", 16, 8, None)
    inside, across = profile.speed("send", 8), profile.speed("send", 2, 2)
    assert (inside.latency, 1 / inside.seconds_per_byte) == (pytest.approx(5e-6), pytest.approx(0.8 * 200e9))
    assert 1 / across.seconds_per_byte == pytest.approx(0.8 * 50e9)


def test_links_alone_keep_this_machines_operators():
    measured = profile_of(call=1.0)
    profile = profile_of_data_sheets(None, "pcie5", 2, 8, measured)
    assert (profile.operators, profile.call_seconds) == (measured.operators, 1.0)
    assert profile.speed("all_gather", 2).transport == "pcie5"


@pytest.mark.parametrize(
    ("device", "links", "message"),
    [
        ("h1000", None, "--device h1000 is not known: give one of a100"),
        ("h100", "warp", "has the link 'warp': give one of nvlink3"),
        ("h100", "nvlink4,ib-ndr,pcie4", "is not a link within a host"),
        ("h100", "0GB/s", "has the link '0GB/s'"),
        (None, None, "the speed of the machine is unknown"),
    ],
)
def test_machines_that_are_not_known(device, links, message):
    with pytest.raises(ConfigError, match=message):
        profile_of_data_sheets(device, links, 8, 8, None)


# Arguments of AutoPlugin.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"objective": "speed"}, r"objective='speed'\): give one of 'time', 'memory'"),
        ({"device_memory_budget": "much"}, "AutoPlugin.device_memory_budget. much is not a size"),
        ({"device_memory_budget": -1}, r"device_memory_budget=-1\) is not a size"),
        ({"candidates": []}, "has none"),
        ({"candidates": [1]}, "has 1, which is not a plugin"),
        ({"candidates": [("torch_ddp",)]}, "which is not a plugin"),
        ({"verbose": 2}, "verbose"),
    ],
    ids=str,
)
def test_arguments_of_auto_plugin(arguments, message):
    with pytest.raises(ConfigError, match=message):
        AutoPlugin(**arguments)


def test_before_the_choice_there_is_no_plugin():
    booster = Booster(plugin=AutoPlugin(profile=profile_of(), verbose=False))
    for use in (lambda: booster.plugin, lambda: booster.checkpoint_io, lambda: booster.prepare_dataloader([1])):
        with pytest.raises(ConfigError, match=r"has no \w+ yet: its AutoPlugin chooses one at the first boost\(\)"):
            use()
    assert booster.plan is None
    with pytest.raises(ConfigError, match="give its name, such as 'bf16'"):
        Booster(mixed_precision=BF16MixedPrecision(), plugin=AutoPlugin())


def boosted(booster, *, dataloader=True, model=None, optimizer=True, criterion=None):
    model = model or nn.Linear(3, 1)
    loader = DataLoader(TensorDataset(torch.rand(8, 3), torch.rand(8, 1)), batch_size=4) if dataloader else None
    given = torch.optim.SGD(model.parameters(), lr=0.1) if optimizer else None
    return booster.boost(model, given, criterion or nn.MSELoss(), loader)


def test_one_process_is_a_plan_too(capsys):
    booster = Booster(plugin=AutoPlugin(profile=profile_of(call=1e-5)))
    model, optimizer, criterion, loader, _ = boosted(booster)
    for inputs, targets in loader:
        booster.backward(criterion(model(inputs), targets), optimizer)
        optimizer.step()
    assert booster.plan.num_ranks == 1
    printed = capsys.readouterr().out
    assert re.search(r"chosen, fastest: .* a step of 1 batch", printed)
    assert "memory per rank" in printed


def test_what_boost_is_given_must_make_a_step():
    def chooser(**arguments):
        return Booster(plugin=AutoPlugin(profile=profile_of(), verbose=False, **arguments))

    with pytest.raises(ConfigError, match=r"no dataloader: pass it to boost\(\), or give AutoPlugin\(batch"):
        boosted(chooser(), dataloader=False)
    with pytest.raises(ConfigError, match="boost the model that trains"):
        boosted(chooser(), optimizer=False)
    wrong = (
        r"no plugin has a plan for Linear on 1 rank\(s\): \d+ of \d+ candidates can't be used, as Linear can't be run"
    )
    with pytest.raises(ConfigError, match=wrong):
        boosted(chooser(), criterion=lambda outputs, targets: outputs.nonsense)
    with pytest.raises(ConfigError, match="plugin='Auto' is not known: write plugin='auto'"):
        Booster(plugin="Auto")
    model, *_ = boosted(chooser(batch=(torch.rand(4, 3), torch.rand(4, 1))), dataloader=False)
    assert model.unwrap().weight.shape == (1, 3)


def test_a_chosen_plan_is_kept_for_the_next_booster():
    chooser = AutoPlugin(objective="memory", profile=profile_of(), verbose=False)
    boosted(Booster(plugin=chooser))
    assert Booster(plugin=chooser).plan is chooser.plan
    with pytest.raises(ConfigError, match="make another plan for this model"):
        boosted(Booster(plugin=chooser), model=nn.Sequential(nn.Linear(3, 1), nn.Linear(1, 1)))


# The command.


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(
        "import torch\nfrom torch import nn\n"
        "def build_model():\n"
        "    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 1))\n"
        "    return model, torch.empty(8, 64), lambda outputs, batch: outputs.mean()\n"
    )
    return path


def test_the_command_ranks_and_writes_a_plan(script, tmp_path, capsys):
    arguments = ["plan", "--model", f"{script}:build_model", "--nproc", "4", "--device", "h100"]
    arguments += ["--plugin", "torch_ddp,low_level_zero", "--mixed-precision", "bf16"]
    assert main([*arguments, "--device-memory", "1MiB", "--output", str(tmp_path / "plan.json")]) == 0
    printed = capsys.readouterr().out
    assert "step times: predicted from h100 with nvlink4" in printed
    plan = ParallelPlan.load(tmp_path / "plan.json")
    assert f"chosen, fastest: {plan.plugin}" in printed
    assert (plan.num_ranks, plan.model) == (4, "Sequential")
    assert main([*arguments, "--json", "--objective", "memory"]) == 0
    values = json.loads(capsys.readouterr().out)
    totals = [one["peak"]["total"] for one in values["candidates"]]
    assert values["chosen"] == 0
    assert totals == sorted(totals)
    assert main([*arguments, "--device-memory", "1MiB", "--settings", "stage=1"]) == 2
    assert "arguments of one plugin" in capsys.readouterr().err


def test_the_command_finds_none(script, capsys):
    arguments = ["plan", "--model", f"{script}:build_model", "--nproc", "2", "--device", "h100"]
    assert main([*arguments, "--plugin", "torch_ddp", "--device-memory", "1000000", "--settings", "x=1"]) == 2
    capsys.readouterr()
    assert main([*arguments, "--plugin", "torch_ddp", "--device-memory", "1KiB"]) == 1
    assert "no setting fits in 1.0 KiB" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--ranks-per-host", "0"], "--ranks-per-host 0 is not positive"),
        (["--ranks-per-host", "4"], "describes a machine without --device"),
        (["--device", "h100", "--profile", "x.json"], "give one of them"),
        (["--device", "h100", "--output", "none/plan.json"], "there is no directory"),
    ],
    ids=str,
)
def test_mistakes_on_the_command_line(script, capsys, more, message):
    assert main(["plan", "--model", f"{script}:build_model", "--nproc", "2", *more]) == 2
    assert message in capsys.readouterr().err
