"""What one layout saved, every layout loads: bit for bit, and training continues as if one process had never stopped.

A plugin extends the table by its layouts in `LAYOUTS`; the pairs follow.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from harness.forkserver import Device
from oracles.joined_slices import copied_slices, gathered_over_ranks, join_slices, joined_over_ranks
from oracles.serial_training import make_optimizer, train_serial
from parity import EXACT, _assert_close, _assert_same_move, _mean_over_ranks
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from zoo import WholeBatches, get_model, split_batch

from booster import Booster
from booster.plugins import GeminiPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin
from booster.plugins.hybrid_parallel.plugin import HybridParallelPlugin
from booster.pytree import map_tensors
from booster.single_device import SingleDevicePlugin

pytestmark = pytest.mark.on_device

# Several groups; tied weights; frozen, unused and sometimes unused parameters. No dropout: its numbers depend on ranks.
MODELS = ("multi_output_groups", "tied_lm", "frozen_unused_conditional")
PLANS = {
    "multi_output_groups": {"embedding": "vocab"},
    "tied_lm": {"embedding": "vocab", "head": "vocab", "blocks.*.up": "colwise", "blocks.*.down": "rowwise"},
    "frozen_unused_conditional": {"frozen": "colwise", "trunk": "rowwise", "branch": "colwise_gather_output"},
}
# Stages run all of their layers in every step. Of these models, the last does not.
STAGED_MODELS = ("multi_output_groups", "tied_lm")
SPLITS = {"multi_output_groups": ["norm"]}
DEPTHS = {"tied_lm": 4}  # a layer for each of two model chunks on two stages


@dataclass(frozen=True)
class Needs:
    """What a plugin has to be told about a model.

    Attributes:
        uses_unused: Whether a step may leave parameters unused.
        plan: How its layers can be cut.
        split: Where a second stage can begin; None: this is found.
    """

    uses_unused: bool = False
    plan: dict[str, str] | None = None
    split: list[str] | None = None


@dataclass(frozen=True)
class Layout:
    """One way of holding a model on some ranks."""

    name: str
    world_size: int
    make_plugin: Callable[[Needs], object]
    models: tuple[str, ...] = MODELS

    def __str__(self) -> str:
        return f"{self.name} x{self.world_size}"


def single_device(needs):
    return SingleDevicePlugin("cpu")


def torch_ddp(needs):
    return TorchDDPPlugin(find_unused_parameters=needs.uses_unused)


def zero_1(needs):
    return LowLevelZeroPlugin(stage=1, precision="fp32", reduce_bucket_size_in_m=0.004)


def zero_2(needs):
    return LowLevelZeroPlugin(stage=2, precision="fp32", reduce_bucket_size_in_m=0.004)


def zero_2_replicated(needs):
    return LowLevelZeroPlugin(stage=2, precision="fp32", extra_dp_size=2)


def gemini_plugin(**arguments):
    """Small chunks, so that these small models have several."""
    return GeminiPlugin(precision="fp32", chunk_config_dict={"chunk_size": 512}, **arguments)


def gemini(needs):
    return gemini_plugin()


def gemini_on_disk(needs):
    return gemini_plugin(placement_policy="cpu")


def gemini_half_kept(needs):
    return gemini_plugin(shard_param_frac=0.5)


def gemini_replicated(needs):
    return gemini_plugin(extra_dp_size=2)


def torch_fsdp(needs):
    return TorchFSDPPlugin()


def fsdp_grad_op(needs):
    return TorchFSDPPlugin(sharding_strategy="SHARD_GRAD_OP")


def fsdp_hybrid(needs):
    return TorchFSDPPlugin(sharding_strategy="HYBRID_SHARD", extra_dp_size=2)


def fsdp_whole(needs):
    return TorchFSDPPlugin(sharding_strategy="NO_SHARD")


def hybrid_plugin(needs, **arguments):
    """Several buckets, and little padding in these small vocabularies."""
    arguments = {"zero_bucket_size_in_m": 0.004, "ddp_bucket_cap_mb": 0.004} | arguments
    return HybridParallelPlugin(precision="fp32", make_vocab_size_divisible_by=8, plan=needs.plan, **arguments)


def tensor_parallel_2(needs):
    return hybrid_plugin(needs, tp_size=2)


def tensor_parallel_3(needs):
    return hybrid_plugin(needs, tp_size=3)


def tensor_parallel_4(needs):
    return hybrid_plugin(needs, tp_size=4)


def tensor_parallel_2_zero_1(needs):
    return hybrid_plugin(needs, tp_size=2, zero_stage=1)


def tensor_parallel_2_zero_2(needs):
    return hybrid_plugin(needs, tp_size=2, zero_stage=2)


def tensor_parallel_square(needs):
    return hybrid_plugin(needs, tp_size=4, tp_mode="2d")


def staged_plugin(needs, **arguments):
    """Microbatches of one to four samples."""
    return hybrid_plugin(needs, **{"pp_size": 2, "num_microbatches": 3, "split": needs.split} | arguments)


def stages_2(needs):
    return staged_plugin(needs)


def stages_2_zero_1(needs):
    return staged_plugin(needs, zero_stage=1)


def stages_2_tensor_parallel_2(needs):
    return staged_plugin(needs, tp_size=2)


def stages_2_interleaved(needs):
    return staged_plugin(needs, pp_style="interleaved", num_model_chunks=2)


def stages_2_in_a_v(needs):
    return staged_plugin(needs, pp_style="zbv", num_model_chunks=2)


LAYOUTS = [
    Layout("one device", 1, single_device),
    *(Layout("torch_ddp", world_size, torch_ddp) for world_size in (1, 2, 3, 4)),
    *(Layout("zero 1", world_size, zero_1) for world_size in (1, 2, 4)),
    *(Layout("zero 2", world_size, zero_2) for world_size in (2, 3)),
    Layout("zero 2 replicated", 4, zero_2_replicated),
    *(Layout("gemini", world_size, gemini) for world_size in (1, 2, 3, 4)),
    Layout("gemini on disk", 2, gemini_on_disk),
    Layout("gemini half kept", 2, gemini_half_kept),
    Layout("gemini replicated", 4, gemini_replicated),
    *(Layout("torch_fsdp", world_size, torch_fsdp) for world_size in (1, 2, 3, 4)),
    Layout("fsdp grad op", 2, fsdp_grad_op),
    Layout("fsdp hybrid", 4, fsdp_hybrid),
    Layout("fsdp whole", 2, fsdp_whole),
    Layout("tp 2", 2, tensor_parallel_2),
    Layout("tp 3", 3, tensor_parallel_3),
    Layout("tp 4", 4, tensor_parallel_4),
    Layout("tp 2d", 4, tensor_parallel_square),
    Layout("tp 2 zero 1", 4, tensor_parallel_2_zero_1),
    Layout("tp 2 zero 2", 4, tensor_parallel_2_zero_2),
    Layout("pp 2", 2, stages_2, STAGED_MODELS),
    Layout("pp 2 zero 1", 4, stages_2_zero_1, STAGED_MODELS),
    Layout("pp 2 tp 2", 4, stages_2_tensor_parallel_2, STAGED_MODELS),
    Layout("pp 2 interleaved", 2, stages_2_interleaved, ("tied_lm",)),
    Layout("pp 2 zbv", 2, stages_2_in_a_v, ("tied_lm",)),
]
SAMPLES = 12  # divides over all worlds
STEPS = 3
NUM_PAIRS = 72


def covering_pairs(layouts: list[Layout], limit: int) -> list[tuple[Layout, Layout, str]]:
    """Every layout as source and as target as often as any other, with the models in turn; at most `limit` pairs."""
    size = len(layouts)
    num_shifts = min(size, max(1, limit // size))
    # The next one, which is mostly of the same kind, and others as far apart as can be.
    shifts = [1 + number * size // num_shifts for number in range(num_shifts)]
    return [
        (source, target, model)
        for number, shift in enumerate(shifts)
        for index in range(size)
        for source, target in [(layouts[index], layouts[(index + shift) % size])]
        for model in [models_of(source, target)[(index + number) % len(models_of(source, target))]]
    ]


def models_of(source: Layout, target: Layout) -> list[str]:
    """Returns the models that both can train."""
    return [model for model in MODELS if model in source.models and model in target.models]


def all_cases() -> list[object]:
    chosen = covering_pairs(LAYOUTS, NUM_PAIRS)
    pairs = itertools.product(LAYOUTS, LAYOUTS)
    everything = [(*pair, model) for pair in pairs for model in models_of(*pair)]
    cases = []
    for case in [*chosen, *(case for case in everything if case not in chosen)]:
        source, target, model = case
        is_quick = case in chosen and max(source.world_size, target.world_size) < 4
        name = f"{source} to {target}, {model}"
        cases.append(pytest.param(*case, id=name, marks=() if is_quick else pytest.mark.slow))
    return cases


def zoo_entry(model: str):
    return get_model(model, DEPTHS.get(model))


def has_stages(booster) -> bool:
    return isinstance(booster.plugin, HybridParallelPlugin) and booster.plugin.axis_sizes()["pp"] > 1


class Training:
    """A model of the zoo under one layout."""

    def __init__(self, make_plugin, model: str) -> None:
        self.entry = zoo_entry(model)
        self.whole = WholeBatches(self.entry)
        needs = Needs(self.entry.uses_unused_parameters, PLANS[model], SPLITS.get(model))
        self.booster = Booster(plugin=make_plugin(needs))
        raw = self.whole.build() if has_stages(self.booster) else self.entry.build()
        optimizer = make_optimizer("adamw", self.entry.param_groups(raw))
        self.model, self.optimizer, *_ = self.booster.boost(raw, optimizer)
        self.losses: list[float] = []

    def train(self, steps) -> None:
        size, rank = self.booster.plugin.dp_size, self.booster.plugin.dp_rank
        for step in steps:
            batch = split_batch(self.entry.make_batch(step, SAMPLES), rank, size)
            batch = map_tensors(lambda tensor: tensor.to(self.booster.device), batch)
            loss = self._backward(batch)
            self.booster.clip_grad_norm_(self.optimizer, float("inf"))
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.losses.append(_mean_over_ranks(float(loss.detach())))

    def _backward(self, batch) -> torch.Tensor:
        if has_stages(self.booster):
            batches = iter([self.whole.feed(batch)])
            return self.booster.execute_pipeline(batches, self.model, self.whole.criterion, self.optimizer)["loss"]
        loss = self.entry.loss(self.model, batch)
        self.booster.backward(loss, self.optimizer)
        return loss

    def spoil(self) -> None:
        """Changes every weight, so that a load that skips one is seen."""
        shown = getattr(self.model, "gathered", nullcontext)  # where the parameters do not show the weights always
        with shown(), torch.no_grad():
            for tensor in self.model.unwrap().state_dict().values():
                tensor.add_(1)

    def weights(self) -> dict[str, torch.Tensor]:
        return whole_weights(self.booster, self.model)

    def states(self) -> dict[str, torch.Tensor]:
        return whole_states(self.optimizer)


def whole_weights(booster, model) -> dict[str, torch.Tensor]:
    """The weights by name, in whole: what the model shows, unless this rank has parts of them."""
    if isinstance(booster.plugin, HybridParallelPlugin):
        return joined_over_ranks(model)
    return {name: tensor.detach().clone().cpu() for name, tensor in model.state_dict().items()}


def whole_states(optimizer) -> dict[str, torch.Tensor]:
    """The optimizer's states by name, in whole: a layout that cuts them joins them here."""
    return join_slices(gathered_over_ranks(copied_slices(optimizer.checkpoint_state().slices())))


def train_and_save(make_plugin, model: str, path: str):
    training = Training(make_plugin, model)
    training.train(range(STEPS))
    training.booster.save(Path(path), training.model, training.optimizer, extra={"losses": training.losses})
    return training.weights(), training.states(), training.optimizer.checkpoint_state().values()


def load_and_train(make_plugin, model: str, path: str):
    training = Training(make_plugin, model)
    training.train([7])  # states of another history, to be replaced
    training.spoil()
    training.losses = training.booster.load(Path(path), training.model, training.optimizer)["losses"]
    loaded = training.weights(), training.states(), training.optimizer.checkpoint_state().values()
    training.train(range(STEPS, 2 * STEPS))
    return loaded, training.losses, training.weights()


def run_layout(layout: Layout, function, *arguments, device: Device | None = None):
    """The results of all ranks; a layout of one process without a process group runs in this one."""
    if layout.make_plugin is single_device:
        with torch.random.fork_rng():
            return [function(layout.make_plugin, *arguments)]
    return run_ranks(function, layout.world_size, layout.make_plugin, *arguments, device=device)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Saves of every layout and model, made when they are first asked for."""

    @functools.cache
    def save(layout: Layout, model: str):
        path = str(tmp_path_factory.mktemp("saved") / "c")
        return path, run_layout(layout, train_and_save, model, path)[0]

    return save


@functools.cache
def serial(model: str):
    with torch.random.fork_rng():
        return train_serial(
            zoo_entry(model),
            precision=None,
            steps=2 * STEPS,
            batch_size=SAMPLES,
            accumulation=1,
            parts=1,
            max_norm=float("inf"),
            optimizer="adamw",
        )


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize(("source", "target", "model"), all_cases())
def test_any_layout_loads_what_another_saved(saved, source, target, model):
    path, at_save = saved(source, model)
    assert_continues(at_save, run_layout(target, load_and_train, model, path), model, f"{source} to {target}")


def assert_continues(at_save, ranks, model: str, what: str) -> None:
    """Asserts that ranks hold what they loaded, and that saved and loaded training is that of one process."""
    weights, states, values = at_save
    expected = serial(model)
    initial = zoo_entry(model).build().state_dict()
    for (loaded_weights, loaded_states, loaded_values), losses, after in ranks:
        assert_same(loaded_weights, weights)
        assert_same(loaded_states, states)
        assert loaded_values == values
        _assert_close(losses, expected.losses, EXACT.loss, f"losses of {what}")
        _assert_same_move(after, expected.weights, initial, EXACT.update, what)


# From one device to another.

DEVICES = ("cpu", "simulated_cuda")


def assert_crosses(source: Layout, target: Layout, devices: tuple[Device, Device], folder: Path) -> None:
    model, path = models_of(source, target)[0], str(folder / f"{source} to {target}")
    at_save = run_layout(source, train_and_save, model, path, device=devices[0])[0]
    ranks = run_layout(target, load_and_train, model, path, device=devices[1])
    assert_continues(at_save, ranks, model, f"{source} on {devices[0]} to {target} on {devices[1]}")


@pytest.mark.parametrize("devices", [DEVICES, DEVICES[::-1]], ids="-to-".join)
@pytest.mark.parametrize("source", LAYOUTS, ids=str)
def test_every_layout_crosses_between_devices(tmp_path, source, devices):
    assert_crosses(source, LAYOUTS[(LAYOUTS.index(source) + 1) % len(LAYOUTS)], devices, tmp_path)


def test_the_chosen_pairs_cover_every_layout_on_both_sides():
    many = [Layout("a", number, torch_ddp) for number in range(12)]
    chosen = covering_pairs(many, NUM_PAIRS)
    assert len(chosen) <= NUM_PAIRS
    for layout in many:
        assert {layout} <= {pair[0] for pair in chosen}
        assert {layout} <= {pair[1] for pair in chosen}
    assert len({pair[:2] for pair in chosen}) == len(chosen)
    ours = covering_pairs(LAYOUTS, NUM_PAIRS)
    assert len({pair[:2] for pair in ours}) == len(ours) <= NUM_PAIRS
    for layout in LAYOUTS:
        for side in (0, 1):
            assert sum(pair[side] == layout for pair in ours) >= 2


# Hugging Face's own forms.

LLAMA = LlamaConfig(
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=1,
    vocab_size=37,
    tie_word_embeddings=True,
)


def build_llama(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LLAMA)


def train_llama(make_plugin, path: str) -> dict[str, torch.Tensor]:
    booster = Booster(plugin=make_plugin(Needs()))
    raw = build_llama(1)
    model, optimizer, *_ = booster.boost(raw, torch.optim.AdamW(raw.parameters(), lr=0.01))
    tokens = torch.arange(12, device=booster.device).view(2, 6)
    batches = iter([{"input_ids": tokens, "labels": tokens}])
    booster.execute_pipeline(batches, model, lambda outputs, _: outputs.loss, optimizer)
    optimizer.step()
    booster.save(Path(path), model, optimizer)
    return whole_weights(booster, model)


def load_llama(make_plugin, path: str) -> dict[str, torch.Tensor]:
    booster = Booster(plugin=make_plugin(Needs()))
    model, *_ = booster.boost(build_llama(2))
    booster.load_model(model, path)
    return whole_weights(booster, model)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_transformers_model_that_was_trained_here_opens_with_from_pretrained(tmp_path, layout):
    trained = run_layout(layout, train_llama, str(tmp_path / "c"))[0]
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "c")
    assert_same(found.state_dict(), trained)
    assert found.lm_head.weight is found.model.embed_tokens.weight


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """A model as `save_pretrained` writes it in each form, and as a `.bin`."""
    root = tmp_path_factory.mktemp("pretrained")
    with torch.random.fork_rng():
        model = build_llama(3)
    model.save_pretrained(root / "single")
    model.save_pretrained(root / "sharded", max_shard_size="4KB")
    (root / "bin").mkdir()
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    torch.save(state, root / "bin" / "pytorch_model.bin")
    assert len(list((root / "sharded").glob("*.safetensors"))) > 1
    return root, {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("form", ["single", "sharded", "bin"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_loads_what_save_pretrained_wrote(pretrained, layout, form):
    root, expected = pretrained
    for found in run_layout(layout, load_llama, str(root / form)):
        assert_same(found, expected)


def save_gathered_llama(make_plugin, path: str) -> dict[str, torch.Tensor]:
    model, *_ = Booster(plugin=make_plugin(Needs())).boost(build_llama(1))
    with model.gathered() as net:
        if dist.get_rank() == 0:
            net.save_pretrained(path)
    return model.state_dict()


@pytest.mark.parametrize(
    "layout", [one for one in LAYOUTS if one.name.startswith(("gemini", "torch_fsdp", "fsdp"))], ids=str
)
def test_gathered_weights_are_saved_by_transformers_itself(tmp_path, layout):
    for weights in run_layout(layout, save_gathered_llama, str(tmp_path / "c")):
        assert_same(weights, build_llama(1).state_dict())
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "c")
    assert_same(found.state_dict(), build_llama(1).state_dict())
