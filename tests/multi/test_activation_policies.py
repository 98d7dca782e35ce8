"""Activation checkpointing by policy under every plugin: the bits of training without it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from decoder_cases import LAYOUTS, LENGTH, VOCABULARY, Decoder, compute_loss, make_plugin
from harness import run_ranks
from torch._dynamo.utils import counters
from zoo import get_model, split_batch

from booster import Booster, ConfigError, DesyncError, checkpoint_activations
from booster.core.activation_budget import ActivationBudget, LayerCost
from booster.core.activation_policy import policy_of
from booster.device import current_device

pytestmark = pytest.mark.on_device

NUM_BLOCKS = 4
GIBI = 2**30
POLICIES = {
    "layers": {},
    "selective": {"policy": "selective"},
    "offload": {"offload": "cpu"},
    "all fit": {"policy": "budget", "budget_bytes": GIBI},
    "some fit": {"policy": "budget"},
    "some fit, offload": {"policy": "budget", "offload": "cpu"},
    "segments": {"policy": "budget"},
    "schedule": {"policy": "schedule", "schedule": [["blocks.0"], "blocks.1", ["blocks.2"]]},
    "segment schedule": {
        "policy": "schedule",
        "schedule": [[["blocks.0", "blocks.1"], "blocks.2"], "blocks.3"],
    },
    "segments, offload": {
        "policy": "schedule",
        "schedule": [["blocks.0", "blocks.1"], [["blocks.2"], "blocks.3"]],
        "offload": "cpu",
    },
}


def train(layout, settings, is_compiled=False):
    """Return the losses, weights and number of layers that are recomputed, if it depends on a budget."""
    torch._dynamo.reset()
    counters.clear()
    name, _, arguments = LAYOUTS[layout]
    plugin = None if name is None else make_plugin(name, arguments)
    booster = Booster(plugin=plugin, compile=is_compiled and {"backend": "aot_eager"})
    torch.manual_seed(0)
    model = Decoder(NUM_BLOCKS, dropout=0.2)
    if settings is not None:
        checkpoint_activations(model, **settings)
    policy = policy_of(model.blocks[0])
    budget = policy if isinstance(policy, ActivationBudget) else None
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))
    torch.manual_seed(0 if plugin is None else plugin.dp_rank)
    losses = []
    for step in range(5):
        for microbatch in range(2):
            generator = torch.Generator().manual_seed(
                10 * step + microbatch + (0 if plugin is None else plugin.dp_rank)
            )
            ids = torch.randint(0, VOCABULARY, (2, LENGTH), generator=generator).to(current_device())
            with booster.accumulate(model, optimizer, 2):
                loss = compute_loss(model, ids)
                booster.backward(loss, optimizer)
                booster.clip_grad_norm_(optimizer, 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    if settings is not None and settings.get("offload") and current_device().type != "cpu":
        assert policy.offload._streams, "nothing was offloaded"
    weights = {one.name: one.tensor.detach().cpu().clone() for one in model.tensor_slices()}
    if is_compiled:
        assert counters["stats"]["unique_graphs"] > 0
        assert not counters["graph_break"]
    return losses, weights, budget and budget.schedule, budget and budget.costs


def budget_for(layout, policy):
    """Return a budget that half of the layers fit in, or one that their inputs do not fit in."""
    offload = POLICIES[policy].get("offload")
    *_, costs = run_ranks(train, LAYOUTS[layout][1], layout, POLICIES["all fit"])[0]
    inputs = 0 if offload else sum(cost.input_bytes * cost.num_live for cost in costs.values())
    cost = costs["blocks.0"]
    assert cost.kept_bytes > cost.input_bytes > 0
    kept = cost.kept_bytes + (cost.input_bytes if offload else 0)
    if policy == "segments":
        return inputs + cost.kept_bytes - cost.input_bytes // 2
    return inputs + 2 * kept * cost.num_live + cost.kept_bytes


QUICK = [("none", "layers"), ("gemini", "selective"), ("fsdp", "some fit"), ("tp", "selective"), ("zero 2", "offload")]
QUICK += [("none", "segments"), ("tp", "segment schedule"), ("zero 1", "segments, offload"), ("gemini", "schedule")]
PLAIN = [layout for layout in LAYOUTS if not layout.endswith("checkpointed")]  # the plugin checkpoints the others
SEGMENTS = ("segments", "segment schedule", "segments, offload")
GRID = [
    (layout, policy)
    for layout in PLAIN
    for policy in POLICIES
    if (layout, policy) not in QUICK and not (policy in SEGMENTS and LAYOUTS[layout][0] in ("gemini", "torch_fsdp"))
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "policy"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in GRID)]
)
def test_training_is_the_same(layout, policy):
    settings = dict(POLICIES[policy])
    if settings.get("policy") == "budget":
        settings.setdefault("budget_bytes", budget_for(layout, policy))
    num_ranks = LAYOUTS[layout][1]
    expected, found = run_ranks(train, num_ranks, layout, None), run_ranks(train, num_ranks, layout, settings)
    for (losses, weights, _, _), (other_losses, other_weights, schedule, costs) in zip(expected, found, strict=True):
        assert other_losses == losses
        assert all(torch.equal(other_weights[name], weight) for name, weight in weights.items())
        if settings.get("policy") == "budget":
            is_pipeline = max(cost.num_live for cost in costs.values()) > 1
            numbers = {"all fit": 0, "segments": len(schedule.recomputed)}
            has_inputs = settings.get("offload") is not None  # a kept layer has its input on the device in addition
            assert len(schedule.recomputed) == numbers.get(policy, 2 if is_pipeline or has_inputs else 1)
            assert schedule.has_segments == (policy == "segments")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "policy"),
    [
        ("fsdp", "layers"),
        ("tp", "segment schedule"),
        *(
            pytest.param(layout, policy, marks=pytest.mark.slow)
            for layout in PLAIN
            for policy in ("layers", "selective", "segment schedule")
            if not (policy in SEGMENTS and LAYOUTS[layout][0] in ("gemini", "torch_fsdp"))
        ),
    ],
)
def test_compiled_layers(layout, policy):
    num_ranks = LAYOUTS[layout][1]
    expected, found = (run_ranks(train, num_ranks, layout, one, True) for one in (None, POLICIES[policy]))
    for (losses, *_), (other, *_) in zip(expected, found, strict=True):
        assert other == pytest.approx(losses, rel=1e-6)


def train_model(name, arguments, settings):
    entry = get_model(name)
    model = entry.build()
    if settings is not None:
        checkpoint_activations(model, **settings)
    plugin = make_plugin("hybrid_parallel", {"precision": "fp32", **arguments})
    booster = Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    for step in range(3):
        batch = split_batch(entry.make_batch(step, 8), plugin.dp_rank, plugin.dp_size)

        def criterion(outputs, batch):
            return outputs["loss"]

        result = booster.execute_pipeline(iter([batch]), model, criterion, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(result["loss"].item())
    return losses


PIPELINE = {"pp_size": 2, "num_microbatches": 4}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments", "num_ranks"),
    [
        ("llama", PIPELINE, 2),
        pytest.param("llama", {**PIPELINE, "tp_size": 2}, 4, marks=pytest.mark.slow),
        pytest.param("gpt2", PIPELINE, 2, marks=pytest.mark.slow),
        pytest.param("mixtral", {"ep_size": 2}, 2, marks=pytest.mark.slow),
        pytest.param("t5", {**PIPELINE, "pp_style": "1f1b"}, 2, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("policy", ["layers", "selective", "all fit"])
def test_pipelines_and_experts(name, arguments, num_ranks, policy):
    expected, found = (run_ranks(train_model, num_ranks, name, arguments, one) for one in (None, POLICIES[policy]))
    assert found == expected


def train_stages(arguments, schedule):
    plugin = make_plugin("hybrid_parallel", {"precision": "fp32", **PIPELINE, **arguments})
    booster = Booster(plugin=plugin)
    torch.manual_seed(0)
    model = Decoder(8, dropout=0.2)
    if schedule is not None:
        checkpoint_activations(model, "schedule", schedule=schedule)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    for step in range(3):
        ids = torch.randint(0, VOCABULARY, (8, LENGTH), generator=torch.Generator().manual_seed(step))

        def criterion(logits, ids):
            return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

        ids = ids.to(current_device())
        losses.append(booster.execute_pipeline(iter([ids]), model, criterion, optimizer)["loss"].item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize(
    "arguments",
    [
        {"pp_style": "1f1b"},
        *(
            pytest.param({"pp_style": style, "num_model_chunks": 2}, marks=pytest.mark.slow)
            for style in ("interleaved", "zbv")
        ),
    ],
)
def test_segments_over_stages(arguments):
    """Each stage, and each part of it, runs its own layers of a segment."""
    names = [f"blocks.{index}" for index in range(8)]
    schedule = [[[names[0], names[1], names[2]], *names[3:6]], *names[6:7], names[7:]]
    expected, found = (run_ranks(train_stages, 2, arguments, one) for one in (None, schedule))
    assert found == expected
    assert expected[0][0] != expected[0][2]


def boost_differently(settings, options):
    rank = dist.get_rank()
    booster = Booster(plugin=make_plugin("torch_ddp", {}), compile=options[rank])
    try:
        booster.boost(checkpoint_activations(Decoder(), **settings[rank]))
    except DesyncError as error:
        return str(error)
    return None


SAME = [{"backend": "eager"}] * 2


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        ([{}, {"policy": "selective"}], SAME, "blocks.0: Recompute"),
        ([{"policy": "budget", "budget_bytes": size} for size in (GIBI, 2 * GIBI)], SAME, f"of {GIBI} bytes"),
        ([{}, {}], [{"backend": "eager"}, {"backend": "aot_eager"}], "compile with backend='eager'"),
        ([{}, {}], [False, {"backend": "eager"}], "no compile"),
    ],
)
def test_ranks_with_different_settings(settings, options, message):
    for text in run_ranks(boost_differently, 2, settings, options):
        assert message in text


def test_layers_that_did_not_run_are_recomputed():
    ran, other = LayerCost(1, 10, 1, 1), "layers.1"
    budget = ActivationBudget(["layers.0", other], GIBI)
    budget._measured["layers.0"].cost = ran
    budget._choose()
    budget._choose()
    assert budget.recomputed == {other}


def train_segments_of_gathered_layers(layout):
    try:
        train(layout, POLICIES["segment schedule"])
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.parametrize("layout", ["gemini", "fsdp"])
def test_segments_of_layers_whose_weights_are_gathered(layout):
    for text in run_ranks(train_segments_of_gathered_layers, 2, layout):
        assert "has the segment ['blocks.0', 'blocks.1', 'blocks.2']" in text
        assert "weights of one layer at a time" in text


def train_too_small():
    try:
        train("zero 1", {"policy": "budget", "budget_bytes": 1000})
    except ConfigError as error:
        return str(error)
    return None


def test_a_budget_below_one_layer_raises_on_all_ranks():
    first, second = run_ranks(train_too_small, 2)
    assert "budget_bytes=1000" in first
    assert "give at least budget_bytes=" in first
    assert first == second
