"""Optimizers of whole parameters on parts of them: the same as in one process, under every plugin, resumed anywhere."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from gemini_models import WIDTH, Twins
from harness import distributed, run_ranks
from oracles.joined_slices import copied_slices, gathered_over_ranks, join_slices, joined_over_ranks
from torch import nn
from torch.optim import Optimizer
from zoo import WholeBatches, get_model, split_batch

from booster import Booster
from booster.comm import count_communication, group_rank, group_size
from booster.core.shard_aware import shard_state
from booster.device import current_device
from booster.interface import Shard, Shards
from booster.optim import CAME, Adafactor, FusedLAMB, FusedSGD, Lamb, Lars, Muon
from booster.plugins import GeminiPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin
from booster.plugins.hybrid_parallel.plugin import HybridParallelPlugin
from booster.pytree import map_tensors
from booster.single_device import SingleDevicePlugin

pytestmark = pytest.mark.on_device


def make_muon(params, **arguments):
    """Returns a Muon of the matrices of each group; the rest of the group is AdamW's."""
    given = list(params)
    groups = given if isinstance(given[0], dict) else [{"params": given}]
    parts = []
    for group in groups:
        members = list(group["params"])
        for use_muon in (True, False):
            chosen = [one for one in members if (one.dim() == 2) is use_muon]
            parts += [{**group, "params": chosen, "use_muon": use_muon}] if chosen else []
    return Muon(parts, **arguments)


# A large eps where there is one, so that gradients that are rounding noise do not become steps of any sign.
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Lamb": partial(Lamb, lr=0.01, eps=1e-3, weight_decay=0.1),
    "Lars": partial(Lars, lr=0.5, momentum=0.9, eeta=0.02, weight_decay=0.1),
    "FusedLAMB": partial(FusedLAMB, lr=0.01, eps=1e-3, weight_decay=0.1, max_grad_norm=0.1),
    "FusedSGD": partial(FusedSGD, lr=0.05, momentum=0.9, weight_decay=0.1, nesterov=True),
    "Adafactor": partial(Adafactor, eps=(1e-6, 1e-3), beta1=0.9, weight_decay=0.1),
    # The first steps are up to (1 - 0.9999) ** -0.5 = 100 times as long as the rate.
    "CAME": partial(CAME, lr=2e-4, eps=(1e-6, 1e-6), weight_decay=0.1),
    # In bfloat16 the iteration makes directions without a gradient of what it rounds.
    "Muon": partial(make_muon, lr=0.01, weight_decay=0.1, ns_dtype="float32", adam_eps=1e-3),
}
NAMES = pytest.mark.parametrize("name", list(OPTIMIZERS))

# Parts cut by hand.

SHAPES = {
    "embedding": (7, 5),
    "weight": (6, 4),
    "bias": (6,),
    "scale": (),
    "column": (5, 1),
    "row": (1, 4),
    "stack": (2, 3, 4),
    "narrow": (2, 3),
}


def make_parameters(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return {name: nn.Parameter(one.to(current_device(), dtype)) for name, one in drawn.items()}


def make_groups(parameters, name):
    rate = {} if name == "Adafactor" else {"lr": 1e-3 if name == "CAME" else 0.02}
    half = len(parameters) // 2
    members = list(parameters.values())
    return [{"params": members[:half], **rate}, {"params": members[half:], "weight_decay": 0.0}]


def set_gradients(parameters, step, unused):
    generator = torch.Generator().manual_seed(100 + step)
    for name, parameter in parameters.items():
        gradient = torch.randn(parameter.shape, generator=generator).to(parameter.device)
        parameter.grad = None if name == unused else gradient


def cut_anywhere(seed: int, num_ranks: int) -> list[dict[str, list[tuple[int, int]]]]:
    """Every rank's spans: each parameter is cut at random places, also into more parts than it has elements."""
    generator = torch.Generator().manual_seed(seed)
    ranks: list[dict[str, list[tuple[int, int]]]] = [{} for _ in range(num_ranks)]
    for name, shape in SHAPES.items():
        numel = torch.Size(shape).numel()
        count = int(torch.randint(0, 5, (1,), generator=generator))
        cuts = sorted({0, numel, *torch.randint(0, numel + 1, (count,), generator=generator).tolist()})
        for span in itertools.pairwise(cuts):
            owner = int(torch.randint(0, num_ranks, (1,), generator=generator))
            ranks[owner].setdefault(name, []).append(span)
    return ranks


def cut(optimizer, parameters, spans):
    """Re-points the param groups to a rank's shards, as the plugins do."""
    parts = []
    for index, group in enumerate(optimizer.param_groups):
        own_of_group = []
        for name, parameter in parameters.items():
            if any(parameter is one for one in group["params"]):
                own = [make_shard(name, parameter, span, index) for span in spans.get(name, [])]
                shard_state(optimizer, parameter, own)
                own_of_group += own
        group["params"][:] = [part.parameter for part in own_of_group]
        parts += own_of_group
    return parts


def make_shard(name, working, span, group_index):
    return Shard(
        name=name,
        global_shape=tuple(working.shape),
        span=span,
        parameter=nn.Parameter(working.detach().reshape(-1)[slice(*span)].clone()),
        model_param=working,
        group_index=group_index,
        has_master=False,
        is_primary=True,
    )


@pytest.mark.parametrize("steps_before", [0, 2])
@NAMES
@distributed(world_size=[1, 2, 4])
def test_parts_cut_anywhere_equal_whole_parameters(name, steps_before):
    for seed, unused in ((1, None), (2, "weight"), (3, "stack"), (4, "bias")):
        parameters, serial = make_parameters(), make_parameters()
        optimizer = OPTIMIZERS[name](make_groups(parameters, name))
        reference = OPTIMIZERS[name](make_groups(serial, name))
        for step in range(steps_before):
            for some, one in ((parameters, optimizer), (serial, reference)):
                set_gradients(some, step, None)
                one.step()
        parts = cut(optimizer, parameters, cut_anywhere(seed, group_size())[group_rank()])
        optimizer.use_shards(Shards(parts, [*SHAPES], None, shapes=SHAPES))
        for step in range(steps_before, steps_before + 4):
            set_gradients(serial, step, unused)
            for part in parts:
                whole = serial[part.name].grad
                part.parameter.grad = None if whole is None else whole.reshape(-1)[slice(*part.span)].clone()
            optimizer.step()
            reference.step()
        # Squares are summed in another order: a few units of 2**-24 in every step.
        for part in parts:
            expected = serial[part.name].detach().reshape(-1)[slice(*part.span)]
            torch.testing.assert_close(part.parameter.detach(), expected, rtol=2e-6, atol=1e-6)
            for key, value in optimizer.state[part.parameter].items():
                whole = torch.as_tensor(reference.state[serial[part.name]][key])
                is_cut = whole.shape == SHAPES[part.name] and key != "step"
                whole = whole.reshape(-1)[slice(*part.span)] if is_cut else whole
                torch.testing.assert_close(torch.as_tensor(value), whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "count"),
    [("Lamb", 1), ("Lars", 1), ("FusedLAMB", 2), ("FusedSGD", 0), ("Adafactor", 2), ("CAME", 3), ("Muon", 3)],
)
@distributed(world_size=2)
def test_each_kind_of_sum_is_one_message_of_few_bytes(name, count):
    parameters = make_parameters()
    optimizer = OPTIMIZERS[name](make_groups(parameters, name))
    spans = cut_anywhere(1, 2)[group_rank()] if group_rank() else {}  # and one rank may have nothing
    parts = cut(optimizer, parameters, spans)
    optimizer.use_shards(Shards(parts, [*SHAPES], None, shapes=SHAPES))
    for part in parts:
        part.parameter.grad = torch.ones_like(part.parameter)
    optimizer.step()  # the first one agrees on which rank has what
    with count_communication() as counted:
        optimizer.step()
    assert sum(counted.calls.values()) == count


# Under the plugins.

MODELS = ("multi_output_groups", "tied_lm", "frozen_unused_conditional")  # groups; ties; frozen and unused parameters
PLANS = {
    "multi_output_groups": {"embedding": "vocab"},
    "tied_lm": {"embedding": "vocab", "head": "vocab", "blocks.*.up": "colwise", "blocks.*.down": "rowwise"},
    "frozen_unused_conditional": {"frozen": "colwise", "trunk": "rowwise", "branch": "colwise_gather_output"},
}
SPLITS = {"multi_output_groups": ["norm"]}
SAMPLES = 8
STEPS = 3


def zoo_entry(model: str):
    return get_model(model, 2 if model == "tied_lm" else None)  # a layer for each stage


@dataclass(frozen=True)
class Layout:
    """One way of holding a model on some ranks."""

    name: str
    world_size: int
    make_plugin: Callable[[str, Path], Any]
    models: tuple[str, ...] = MODELS

    def __str__(self) -> str:
        return f"{self.name} x{self.world_size}"


def torch_ddp(model, path):
    return TorchDDPPlugin(find_unused_parameters=zoo_entry(model).uses_unused_parameters)


def zero(model, path, **arguments):
    return LowLevelZeroPlugin(**{"precision": "fp32", "reduce_bucket_size_in_m": 0.004, **arguments})


def gemini(model, path, **arguments):
    return GeminiPlugin(**{"precision": "fp32", "chunk_config_dict": {"chunk_size": 512}, **arguments})


def gemini_on_disk(model, path):
    return gemini(model, path, placement_policy="static", offload_optim_frac=1.0, offload_dir=path)


def torch_fsdp(model, path, **arguments):
    return TorchFSDPPlugin(**arguments)


def hybrid(model, path, **arguments):
    if arguments.get("pp_size", 1) > 1:
        arguments = {"num_microbatches": 2, "split": SPLITS.get(model)} | arguments
    buckets = {"zero_bucket_size_in_m": 0.004, "ddp_bucket_cap_mb": 0.004}
    arguments = {"precision": "fp32", "make_vocab_size_divisible_by": 8, **buckets, **arguments}
    return HybridParallelPlugin(plan=PLANS[model], **arguments)


def one_device(model, path):
    return SingleDevicePlugin("cpu")


STAGED = ("multi_output_groups", "tied_lm")
LAYOUTS = [
    Layout("torch_ddp", 2, torch_ddp),
    Layout("zero 1", 1, partial(zero, stage=1)),
    Layout("zero 1", 2, partial(zero, stage=1)),
    Layout("zero 1", 4, partial(zero, stage=1)),
    Layout("zero 2", 2, partial(zero, stage=2)),
    Layout("zero 2 replicated", 4, partial(zero, stage=2, extra_dp_size=2)),
    Layout("gemini", 1, gemini),
    Layout("gemini", 2, gemini),
    Layout("gemini", 4, gemini),
    Layout("gemini on disk", 2, gemini_on_disk),
    Layout("torch_fsdp", 2, torch_fsdp),
    Layout("torch_fsdp replicated", 4, partial(torch_fsdp, sharding_strategy="HYBRID_SHARD", extra_dp_size=2)),
    Layout("torch_fsdp whole", 2, partial(torch_fsdp, sharding_strategy="NO_SHARD")),
    Layout("tp 2", 2, partial(hybrid, tp_size=2)),
    Layout("tp 4", 4, partial(hybrid, tp_size=4)),
    Layout("tp 2 zero 1", 4, partial(hybrid, tp_size=2, zero_stage=1)),
    Layout("tp 2 zero 2", 4, partial(hybrid, tp_size=2, zero_stage=2)),
    Layout("pp 2", 2, partial(hybrid, pp_size=2), STAGED),
    Layout("pp 2 tp 2", 4, partial(hybrid, pp_size=2, tp_size=2), STAGED),
]
IN_EVERY_RUN = {"torch_ddp x2", "zero 1 x4", "zero 2 x2", "gemini x2", "torch_fsdp x2", "tp 2 zero 1 x4", "pp 2 x2"}
EVERY_LAYOUT = pytest.mark.parametrize(
    "layout",
    [pytest.param(one, marks=() if str(one) in IN_EVERY_RUN else pytest.mark.slow) for one in LAYOUTS],
    ids=str,
)


def make_optimizer(name, groups):
    if name == "Adafactor":  # a group with a rate of its own has no relative one
        groups = [{**one, "relative_step": False} if isinstance(one, dict) and "lr" in one else one for one in groups]
    return OPTIMIZERS[name](groups)


class Training:
    """A model of the zoo under one layout, with one of the optimizers."""

    def __init__(self, layout: Layout, model: str, name: str, path: Path) -> None:
        self.entry = zoo_entry(model)
        self.whole = WholeBatches(self.entry)
        self.booster = Booster(plugin=layout.make_plugin(model, path))
        is_hybrid = isinstance(self.booster.plugin, HybridParallelPlugin)
        self.has_stages = is_hybrid and self.booster.plugin.axis_sizes()["pp"] > 1
        raw = self.whole.build() if self.has_stages else self.entry.build()
        optimizer = make_optimizer(name, self.entry.param_groups(raw))
        self.model, self.optimizer, *_ = self.booster.boost(raw, optimizer)

    def train(self, steps) -> None:
        size, rank = self.booster.plugin.dp_size, self.booster.plugin.dp_rank
        for step in steps:
            batch = split_batch(self.entry.make_batch(step, SAMPLES), rank, size)
            batch = map_tensors(lambda tensor: tensor.to(self.booster.device), batch)
            if self.has_stages:
                batches = iter([self.whole.feed(batch)])
                self.booster.execute_pipeline(batches, self.model, self.whole.criterion, self.optimizer)
            else:
                self.booster.backward(self.entry.loss(self.model, batch), self.optimizer)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def weights(self) -> dict[str, torch.Tensor]:
        if isinstance(self.booster.plugin, HybridParallelPlugin):
            return joined_over_ranks(self.model)
        return {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}

    def states(self) -> dict[str, torch.Tensor]:
        slices = self.optimizer.checkpoint_state().slices()
        return join_slices(gathered_over_ranks(copied_slices(slices)))


def run_layout(layout: Layout, function, *arguments):
    """The results of all ranks."""
    return run_ranks(function, layout.world_size, layout, *arguments, timeout=120)


def weights_after(layout: Layout, cases, path: str):
    found = {}
    for model, name in cases:
        training = Training(layout, model, name, Path(path))
        training.train(range(STEPS))
        found[model, name] = training.weights()
    return found


ONE_PROCESS = Layout("one device", 1, one_device)


@pytest.fixture(scope="module")
def serial():
    """Weights after training in one process, and before."""
    with torch.random.fork_rng():
        cases = list(itertools.product(MODELS, OPTIMIZERS))
        return weights_after(ONE_PROCESS, cases, ""), {name: zoo_entry(name).build().state_dict() for name in MODELS}


@EVERY_LAYOUT
def test_every_plugin_equals_one_process(serial, layout, tmp_path):
    cases = list(itertools.product(layout.models, OPTIMIZERS))
    ranks = run_layout(layout, weights_after, cases, str(tmp_path))
    trained, initial = serial
    for (model, name), found in itertools.chain.from_iterable(one.items() for one in ranks):
        expected = trained[model, name]
        assert found.keys() >= expected.keys()
        assert any(not torch.equal(tensor, initial[model][key]) for key, tensor in expected.items())
        for key, tensor in expected.items():
            assert_close(found[key], tensor, f"{key} of {model} with {name} under {layout}")


def assert_close(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """The gradients are summed in another order, too: a few units of 2**-24 in every step, of numbers around 1."""
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6, msg=lambda text: f"{what}: {text}")


BF16 = [
    Layout("zero 1 bf16", 2, partial(zero, stage=1, precision="bf16")),
    Layout("gemini bf16", 2, partial(gemini, precision="bf16")),
    Layout("tp 2 bf16", 2, partial(hybrid, tp_size=2, precision="bf16")),
]


ONE_IN_BF16 = Layout("one process bf16", 1, partial(zero, stage=1, precision="bf16"))


@pytest.mark.parametrize("layout", [BF16[0], *(pytest.param(one, marks=pytest.mark.slow) for one in BF16[1:])], ids=str)
def test_bf16_weights_with_masters_move_as_those_of_one_process(serial, layout, tmp_path):
    cases = [("tied_lm", name) for name in OPTIMIZERS]
    trained = run_layout(ONE_IN_BF16, weights_after, cases, str(tmp_path))[0]
    initial = serial[1]["tied_lm"]
    for (model, name), found in run_layout(layout, weights_after, cases, str(tmp_path))[0].items():
        expected = trained[model, name]
        moved = norm_of(tensor.float() - initial[key].bfloat16().float() for key, tensor in expected.items())
        wrong = norm_of(found[key].float() - tensor.float() for key, tensor in expected.items())
        # Ranks round gradients of their own parts of the batch, so that some weights end at the neighbouring number.
        assert moved > 0
        assert wrong < 0.1 * moved, name


def norm_of(tensors) -> float:
    return float(torch.stack([one.norm() for one in tensors]).norm())


# Checkpoints.


def layout_named(name: str, world_size: int) -> Layout:
    return next(one for one in [*LAYOUTS, ONE_PROCESS] if (one.name, one.world_size) == (name, world_size))


JOURNEYS = [
    (("zero 1", 2), ("gemini", 4)),
    (("gemini", 4), ("tp 2 zero 2", 4)),
    (("tp 4", 4), ("torch_fsdp", 2)),
    (("tp 2 zero 2", 4), ("torch_ddp", 2)),
    (("torch_fsdp", 2), ("one device", 1)),
    (("one device", 1), ("gemini on disk", 2)),
    (("gemini on disk", 2), ("zero 2 replicated", 4)),
    (("torch_ddp", 2), ("tp 2", 2)),
    (("pp 2 tp 2", 4), ("zero 1", 4)),
    (("zero 2", 2), ("pp 2", 2)),
    (("gemini", 2), ("gemini", 2)),
]


def train_and_save(layout: Layout, model: str, path: str):
    found = {}
    for name in OPTIMIZERS:
        training = Training(layout, model, name, Path(path))
        training.train(range(STEPS))
        training.booster.save(Path(path) / name, training.model, training.optimizer)
        found[name] = training.weights(), training.states(), training.optimizer.checkpoint_state().values()
        training.train(range(STEPS, 2 * STEPS))
        found[name] += (training.weights(),)
    return found


def load_and_train(layout: Layout, model: str, path: str):
    found = {}
    for name in OPTIMIZERS:
        training = Training(layout, model, name, Path(path))
        training.train([7])  # states of another history, to be replaced
        training.booster.load(Path(path) / name, training.model, training.optimizer)
        found[name] = training.weights(), training.states(), training.optimizer.checkpoint_state().values()
        training.train(range(STEPS, 2 * STEPS))
        found[name] += (training.weights(),)
    return found


@pytest.mark.parametrize(
    ("source", "target"),
    [
        *(pytest.param(*one) for one in JOURNEYS[:2]),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in JOURNEYS[2:]),
    ],
    ids=lambda one: " x".join(map(str, one)),
)
@pytest.mark.slow
def test_any_layout_goes_on_from_what_another_saved(source, target, tmp_path):
    model = "tied_lm"
    saved = run_layout(layout_named(*source), train_and_save, model, str(tmp_path))[0]
    for rank in run_layout(layout_named(*target), load_and_train, model, str(tmp_path)):
        for name, (weights, states, values, after) in rank.items():
            for found, expected in ((weights, saved[name][0]), (states, saved[name][1])):
                assert found.keys() == expected.keys()
                assert all(torch.equal(found[key], tensor) for key, tensor in expected.items()), name
            assert values == saved[name][2]
            for key, tensor in saved[name][3].items():
                if source == target:
                    assert torch.equal(after[key], tensor), f"{key} with {name}"
                assert_close(after[key], tensor, f"{key} with {name}")
            if name in ("Adafactor", "CAME"):
                vocabulary, width = weights["embedding.weight"].shape
                assert states["embedding.weight.exp_avg_sq_row"].shape == (vocabulary, 1)
                assert states["embedding.weight.exp_avg_sq_col"].shape == (1, width)


# Ranks that hold nothing of a group, or nothing at all.


class NeverEmpty(Optimizer):
    """Updates every element by itself, and is not made for groups without parameters or gradients."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "num_steps": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["num_steps"] += 1
            rate = group["lr"] / torch.full((), group["num_steps"], device=group["params"][0].device)
            torch._foreach_sub_(group["params"], torch._foreach_mul([one.grad for one in group["params"]], rate))


def tiny():
    torch.manual_seed(0)
    return nn.Linear(WIDTH, 1)  # of which FSDP gives all to the first rank


def with_a_tiny_group():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))


def in_two_groups(model):
    small = [one for one in model.parameters() if one.numel() <= 1]
    large = [one for one in model.parameters() if one.numel() > 1]
    return NeverEmpty([{"params": large}, {"params": small, "lr": 0.2}])


class ShardedTwins(Twins):
    def make_plugin(self, plugin):
        return {
            "zero": lambda: LowLevelZeroPlugin(precision="fp32"),
            "gemini": lambda: GeminiPlugin(precision="fp32", chunk_config_dict={"chunk_size": 64}),
            "torch_fsdp": TorchFSDPPlugin,
        }[plugin]()


@pytest.mark.parametrize("build", [tiny, with_a_tiny_group])
@pytest.mark.parametrize("plugin", ["zero", "gemini", "torch_fsdp"])
@distributed(world_size=2)
def test_ranks_that_hold_nothing_of_a_group_step_as_one_process(plugin, build):
    twins = ShardedTwins(build, optimizer=in_two_groups, plugin=plugin)
    num_calls = []
    twins.optimizer.optim.register_step_post_hook(lambda *_: num_calls.append(1))
    scheduler = torch.optim.lr_scheduler.ConstantLR(twins.optimizer.optim, factor=1.0)
    for step in range(3):
        twins.backward(step)
        twins.step()
        scheduler.step()  # which warns where no step came before
    twins.assert_equal()
    assert len(num_calls) == 3
    assert [group.get("num_steps") for group in twins.optimizer.param_groups] == [
        group.get("num_steps") for group in twins.plain_optimizer.param_groups
    ]
