"""`booster estimate`: its table, what it recommends, and what it says to mistakes."""

from __future__ import annotations

import json
import re
import resource
from dataclasses import replace

import pytest
import torch
from machine_profiles import profile_of

from booster.cli import main, profile_mesh
from booster.errors import ConfigError
from booster.estimate import candidates
from booster.estimate.allocation_tracker import MemoryParts
from booster.estimate.candidates import (
    Candidate,
    CandidateResult,
    bytes_from_text,
    find_candidates,
    format_recommendation,
    format_setting,
    least_communication,
    least_memory,
)
from booster.estimate.estimate import MemoryEstimate
from booster.estimate.machine_profile import load_profile, save_profile
from booster.estimate.simulation import RankMemory
from booster.interface import Plugin
from booster.plugins import TorchDDPPlugin

SCRIPT = """
import torch
from torch import nn

def build_model():
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 1))
    return model, torch.empty(8, 64), lambda outputs, batch: outputs.mean()

def too_large():
    return nn.Linear(100_000, 100_000), torch.empty(2, 100_000), lambda outputs, batch: outputs.mean()

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))

def stack():
    layers = [Block() for _ in range(5)]
    return nn.Sequential(*layers), torch.empty(16, 64, 64), lambda outputs, batch: outputs.mean()

def reads_values():
    class Reads(nn.Linear):
        def forward(self, x):
            return super().forward(x) if x.sum().item() > 0 else x
    return Reads(4, 4), torch.empty(2, 4), lambda outputs, batch: outputs.mean()
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def found(script, capsys, *arguments, function="build_model", code=0):
    """Returns what was printed."""
    if "--profile" not in arguments:
        arguments = (*arguments, "--no-step-time")
    assert main(["estimate", "--model", f"{script}:{function}", *arguments]) == code
    return capsys.readouterr().out


def test_the_table_has_a_row_for_each_setting(script, capsys):
    text = found(script, capsys, "--nproc", "2", "--plugin", "torch_ddp", "--device-memory", "1GiB")
    lines = text.splitlines()
    assert lines[0].startswith(
        f"{script}:build_model: 16897 parameters in fp32, the batch of the script, AdamW, 2 ranks"
    )
    headings = "parameters gradients states activations buffers peak offloaded sent groups fits (sizes in KiB)"
    assert lines[2].split() == headings.split()
    row = lines[3].split()
    assert (row[0], row[2], row[8:]) == ("66.00", "132.02", ["1", "yes", "torch_ddp", "<--"])
    assert lines[4].endswith(" torch_ddp mixed_precision=bf16")
    assert lines[-1].startswith("cheapest that fits, by bytes sent: torch_ddp")


@pytest.mark.slow
def test_layers_are_recomputed_as_far_as_it_takes_to_fit(script, capsys):
    arguments = ["--nproc", "1", "--plugin", "none", "--mixed-precision", "fp32"]
    totals = {}
    for policy in ([], ["--checkpoint-activations", "layers"]):
        told = json.loads(found(script, capsys, *arguments, *policy, "--json", function="stack"))
        totals[bool(policy)] = told["candidates"][0]["peak"]["total"]
    memory = (totals[True] + totals[False]) // 2
    arguments += ["--checkpoint-activations", "auto", "--device-memory"]
    lines = found(script, capsys, *arguments, str(memory), function="stack").splitlines()
    assert re.search(r" yes  none.*, recomputes [123] of 5 layers", lines[3])
    assert "layers are recomputed in backward as far as it takes to fit; --json has the schedules" in lines
    told = json.loads(found(script, capsys, *arguments, str(memory), "--json", function="stack"))["candidates"][0]
    assert told["fits"]
    assert memory * 0.6 < told["peak"]["total"] <= memory
    assert any(isinstance(item, list) for item in told["activation_schedule"])
    told = json.loads(found(script, capsys, *arguments, "1GiB", "--json", function="stack"))["candidates"][0]
    assert told["activation_schedule"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "whose memory was not given: add --device-memory"),
        (["--device-memory", "1GiB", "--checkpoint"], "auto with --checkpoint is not possible"),
        (["--device-memory", "1GiB", "--offload-activations"], "auto with --offload-activations is not possible"),
    ],
)
def test_what_planned_activations_can_not_go_with(script, capsys, arguments, message):
    assert main(["estimate", "--model", f"{script}:stack", "--checkpoint-activations", "auto", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_step_times_have_a_column_and_name_the_fastest(script, capsys, tmp_path):
    path = tmp_path / "profile.json"
    save_profile(profile_of(seconds_per_byte=1e-6), path)
    arguments = ["--nproc", "2", "--plugin", "torch_ddp,hybrid_parallel", "--profile", str(path)]
    lines = found(script, capsys, *arguments, "--device-memory", "1GiB").splitlines()
    assert lines[2].split()[-6:] == ["step", "time", "fits", "(sizes", "in", "KiB)"]
    assert "step times: predicted from test with 2 rank(s) at work" in lines
    told = json.loads(found(script, capsys, *arguments, "--device-memory", "1GiB", "--json"))
    timed = [one for one in told["candidates"] if one["fits"]]
    best = told["candidates"][told["fastest"]]
    assert best["step_time"] / best["dp_size"] == min(one["step_time"] / one["dp_size"] for one in timed)
    assert lines[-1].startswith(f"fastest that fits: {best['plugin']}")
    assert re.search(r" ms a step of \d batch.*, of which the optimizer takes .* ms.*; .* of 1\.0 GiB$", lines[-1])
    unlimited = found(script, capsys, *arguments).splitlines()
    assert unlimited[-2].startswith("least memory: ")
    assert unlimited[-1].startswith("fastest: ")


def test_the_machine_is_measured_once(script, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("BOOSTER_PROFILE_CACHE", str(tmp_path))
    asked = []

    def measure(num_ranks, path):
        asked.append(num_ranks)
        save_profile(replace(profile_of(), num_ranks=num_ranks), path)
        return load_profile(path)

    monkeypatch.setattr(profile_mesh, "measure", measure)
    monkeypatch.setattr(profile_mesh, "_capacity", lambda: 4)
    arguments = ["estimate", "--model", f"{script}:build_model", "--plugin", "torch_ddp", "--nproc"]
    for number in ("16", "4", "2", "2"):
        assert main([*arguments, number]) == 0
    assert asked == [4, 2]

    def fail(num_ranks, path):
        raise profile_mesh.MeasurementError("no loopback")

    monkeypatch.setattr(profile_mesh, "measure", fail)
    capsys.readouterr()
    assert main([*arguments, "3"]) == 0
    text = capsys.readouterr().out
    assert "step times: unknown, as the machine could not be measured: no loopback" in text
    assert "step time " not in text


def test_what_saves_take_has_columns_of_its_own(script, capsys):
    arguments = ["--nproc", "2", "--plugin", "low_level_zero", "--settings", "precision=fp32", "--checkpoint"]
    lines = found(script, capsys, *arguments).splitlines()
    assert re.fullmatch(r".* offloaded +sent +save +async save +groups +\(sizes in KiB\)", lines[2])
    saves = json.loads(found(script, capsys, *arguments, "--json"))["candidates"][0]["memory"]["checkpoint"]
    assert saves["device"] == 0
    assert saves["host"] == 8 * 2**20  # one buffer, for one small job
    written = 2 * 4 * 16897  # the weights, too small to be shared, and a half of two states
    assert written <= saves["async_host"] - saves["host"] <= 1.1 * written


def test_all_plugins_are_compared(script, capsys):
    told = json.loads(found(script, capsys, "--nproc", "4", "--device-memory", "1GiB", "--json"))
    plugins = {one["plugin"] for one in told["candidates"]}
    assert {"torch_ddp", "torch_fsdp", "low_level_zero", "gemini", "hybrid_parallel"} <= plugins
    assert not any(one["reason"] and "Error" in one["reason"].split(":")[0] for one in told["candidates"])
    best = told["candidates"][told["cheapest"]]
    fitting = [one for one in told["candidates"] if one["fits"]]
    assert best["memory"]["sent"] / best["dp_size"] == min(one["memory"]["sent"] / one["dp_size"] for one in fitting)
    for one in fitting:
        parts = {key: value for key, value in one["peak"].items() if key != "total"}
        assert sum(parts.values()) == one["peak"]["total"] > 0


def test_one_device_needs_no_plugin(script, capsys):
    text = found(script, capsys, "--nproc", "1", "--plugin", "none")
    assert " none  <--\n" in text
    assert "\nleast memory: none, " in text
    assert text.endswith("\ngive --device-memory, such as 80GiB, to find what fits\n")


def test_settings_and_optimizers_are_the_users(script, capsys):
    settings = ["--plugin", "low_level_zero", "--settings", "stage=2", "precision=fp32", "--nproc", "2", "--json"]
    adam = json.loads(found(script, capsys, *settings))["candidates"]
    assert [one["settings"] for one in adam] == [{"stage": 2, "precision": "fp32"}]
    plain = json.loads(found(script, capsys, *settings, "--optimizer", "sgd"))["candidates"]
    momentum = ["--optimizer", "SGD", "--optimizer-settings", "momentum=0.9"]
    moved = json.loads(found(script, capsys, *settings, *momentum))["candidates"]
    states = [one[0]["memory"]["steady_state"]["optimizer_states"] for one in (plain, moved, adam)]
    assert states[0] < states[1] < states[2]


def test_what_does_not_fit_and_what_cannot_be_run_is_told(script, capsys):
    few = ["--plugin", "torch_ddp", "--nproc", "2", "--device-memory", "80GiB"]
    text = found(script, capsys, *few, function="too_large", code=1)
    assert "no setting fits in 80.0 GiB: torch_ddp" in text
    assert "most of it is the model: give more ranks" in text
    text = found(script, capsys, *few, function="reads_values", code=1)
    assert "not possible: Reads can't be run on fake tensors" in text
    assert text.endswith("    torch_ddp\n    torch_ddp mixed_precision=bf16\n\nno setting can train this model\n")


def test_a_fault_of_one_plugin_does_not_hide_the_others(script, capsys, monkeypatch):
    def fails(self, *arguments, **options):
        raise ZeroDivisionError("broken")

    monkeypatch.setattr(TorchDDPPlugin, "configure", fails)
    text = found(script, capsys, "--plugin", "torch_ddp,low_level_zero", "--nproc", "2", code=1)
    assert "failed: ZeroDivisionError: broken\n    torch_ddp\n" in text
    assert "least memory: low_level_zero" in text


@pytest.mark.slow
def test_nothing_large_is_allocated(script, capsys):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found(script, capsys, "--plugin", "torch_ddp,low_level_zero", "--nproc", "2", function="too_large")  # 37 GiB
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 2**20, f"{grown} KiB"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nproc", "0"], "--nproc 0 is not positive: give a number from 1"),
        (["--plugin", "zero"], "plugin='zero' is not known"),
        (["--plugin", "torch_ddp,all"], "is not a list of plugins"),
        (["--plugin", "none"], "--plugin none is one device without a plugin, but --nproc is 8"),
        (["--settings", "stage=2"], "are arguments of one plugin, but --plugin all is 6 of them"),
        (["--plugin", "torch_ddp", "--settings", "stage"], "--settings stage is not key=value"),
        (["--plugin", "gemini", "--settings", "a=1", "a=2"], "a was given twice"),
        (["--plugin", "torch_ddp", "--settings", "stage=2"], "TorchDDPPlugin does not accept stage: .* use those that"),
        (["--optimizer", "adamv"], "--optimizer adamv is not in .* Did you mean Adam"),
        (["--optimizer", "sgd", "--optimizer-settings", "moment=1"], "--optimizer SGD can't be created with moment=1"),
        (["--device-memory", "80G"], "--device-memory 80G is not a size: .* 80GiB or 80GB"),
        (["--device-memory", "much"], "--device-memory much is not a size"),
        (["--mixed-precision", "bf17"], "mixed_precision='bf17' is not known"),
    ],
)
def test_arguments_that_cannot_work(script, capsys, monkeypatch, arguments, message):
    monkeypatch.setattr(profile_mesh, "measure", lambda *_: pytest.fail("measured before an error"))
    assert main(["estimate", "--model", f"{script}:build_model", *arguments]) == 2
    with pytest.raises(ConfigError, match=message):
        raise ConfigError(capsys.readouterr().err)


def test_sizes():
    assert bytes_from_text("80GiB", "x") == 80 * 2**30
    assert bytes_from_text(" 1.5 gb", "x") == 1_500_000_000
    assert bytes_from_text("4194304", "x") == 2**22
    with pytest.raises(ConfigError, match="write a number and its unit, such as 80GiB"):
        bytes_from_text("80", "x")


def test_precisions_are_the_boosters_where_the_plugin_has_none():
    names = [one.name for one in find_candidates("torch_ddp,low_level_zero", 2)]
    assert names[:2] == ["torch_ddp", "torch_ddp mixed_precision=bf16"]
    assert not any("mixed_precision" in one for one in names[2:])
    given = find_candidates("torch_ddp", 2, mixed_precision="fp16")
    assert [one.mixed_precision for one in given] == ["fp16"]
    ours = find_candidates("all", 2, mixed_precision="fp16")
    assert not any(one.mixed_precision for one in ours if one.plugin == "low_level_zero")


def test_policies_are_written_in_few_words():
    assert format_setting(torch.bfloat16) == "bfloat16"
    policy = torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    assert format_setting(policy) == "MixedPrecisionPolicy(bfloat16)"


def outcome(name, total, sent, dp_size, device_memory=100):
    parts = MemoryParts(parameters=total)
    memory = RankMemory(backward=parts, step=parts, steady_state=parts, sent=sent)
    estimate = MemoryEstimate(plugin=name, num_ranks=4, memory=memory, device_memory=device_memory)
    return CandidateResult(candidate=Candidate(plugin=name), estimate=estimate, dp_size=dp_size)


def test_the_cheapest_sends_the_least_for_every_batch():
    failed = CandidateResult(candidate=Candidate(plugin="failed"), reason="why")
    large, replicas, divided = (
        outcome("large", 101, 0, 4),
        outcome("replicas", 90, 40, 4),
        outcome("divided", 30, 20, 1),
    )
    every = [failed, large, replicas, divided]
    assert least_communication(every) is replicas  # 40 bytes for 4 batches, 20 for one
    assert least_memory(every) is divided
    assert least_communication([failed, large]) is None
    assert least_memory([failed]) is None
    assert "no setting fits" in format_recommendation([large], 100)
    assert format_recommendation([failed], 100) == "no setting can train this model"


def test_plugins_of_others_are_asked_too(monkeypatch):
    class Theirs(TorchDDPPlugin):
        @classmethod
        def settings_for(cls, num_ranks):
            return [{"bucket_cap_mb": num_ranks}]

    assert issubclass(Theirs, Plugin)
    monkeypatch.setattr(candidates, "plugin_class", lambda name: Theirs)
    monkeypatch.setattr(candidates, "plugin_with_precision", lambda name, precision, **settings: Theirs(**settings))
    names = [one.name for one in find_candidates("theirs", 3)]
    assert names == ["theirs bucket_cap_mb=3", "theirs bucket_cap_mb=3 mixed_precision=bf16"]
