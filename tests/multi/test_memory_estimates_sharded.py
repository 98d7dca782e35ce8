"""What `estimate_memory` says of plugins that divide a model among ranks, against what they allocate and send."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness import distributed
from memory_cases import BATCH, TOKENS, VOCABULARY, WIDTH, LanguageModel, check, next_token_loss, of_name, trained
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

from booster import Booster, ConfigError, estimate_memory
from booster.optim import HybridAdam
from booster.plugins import GeminiPlugin, LowLevelZeroPlugin, TorchFSDPPlugin

pytestmark = pytest.mark.on_device

SMALL_BUCKETS = {"reduce_bucket_size_in_m": 1}
SMALL_CHUNKS = {"min_chunk_size_m": 0.25, "search_range_m": 0.25}
BF16_UNITS = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Tied(LanguageModel):
    def __init__(self):
        super().__init__()
        self.head.weight = self.embedding.weight


class Frozen(LanguageModel):
    def __init__(self):
        super().__init__()
        for part in (self.embedding, self.layers[0], self.layers[2].up):
            part.requires_grad_(False)


class Uneven(LanguageModel):
    """Has sizes that no number of ranks divides, and a parameter without dimensions."""

    def __init__(self):
        super().__init__()
        self.narrow, self.wide = nn.Linear(WIDTH, 37), nn.Linear(37, WIDTH)
        self.scale = nn.Parameter(torch.zeros(()))

    def forward(self, ids):
        x = self.embedding(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        x = x + self.scale * self.wide(torch.tanh(self.narrow(x)))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Checkpointed(LanguageModel):
    """Computes layers again in backward, so many at a time."""

    num_together = 1

    def forward(self, ids):
        x = self.embedding(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for start in range(0, len(self.layers), self.num_together):
            x = checkpoint(self.run, x, start, use_reentrant=False)
        return self.head(self.norm(x))

    def run(self, x, start):
        for layer in self.layers[start : start + self.num_together]:
            x = layer(x)
        return x


class CheckpointedInPairs(Checkpointed):
    num_together = 2


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def check_ranks(plugin_class, settings, *, within=0.1, **arguments):
    """Compares the estimate of each rank with what it has."""
    estimate, measured = trained(lambda: plugin_class(**settings), **arguments)
    check(estimate, measured, within=within)


def of_precision(settings):
    """Returns arguments of `check_ranks`."""
    if settings.get("precision") != "fp16":
        return {"settings": settings}
    # A scale that does not overflow, as a skipped step would allocate no states; and a small batch, as it is slow.
    return {"settings": settings | {"initial_scale": 2**8}, "batch": 1}


ZERO = [
    ({"stage": 1, "precision": "fp32"}, HybridAdam),
    ({"stage": 2, "precision": "fp32", **SMALL_BUCKETS}, torch.optim.AdamW),
    ({"stage": 1, "precision": "bf16", **SMALL_BUCKETS}, torch.optim.AdamW),
    ({"stage": 2, "precision": "fp16"}, momentum),
]
MORE_OF_ZERO = [
    ({"stage": stage, "precision": precision, **buckets}, optimizer)
    for stage in (1, 2)
    for precision in ("fp32", "bf16", "fp16")
    for buckets in ({}, SMALL_BUCKETS)
    for optimizer in (torch.optim.AdamW, HybridAdam, momentum)
] + [
    ({"stage": 1, "precision": "bf16", "communication_dtype": torch.float32}, torch.optim.AdamW),
    ({"stage": 2, "precision": "bf16", "master_weights": False}, torch.optim.AdamW),
    ({"stage": 1, "precision": "bf16", "overlap_communication": False}, HybridAdam),
]


@distributed(world_size=2)
@pytest.mark.parametrize(("settings", "optimizer"), ZERO)
def test_zero(settings, optimizer):
    check_ranks(LowLevelZeroPlugin, **of_precision(settings), optimizer=optimizer, within=0.03)


@distributed(world_size=2)
@pytest.mark.slow
@pytest.mark.parametrize(("settings", "optimizer"), MORE_OF_ZERO)
def test_zero_in_all_ways(settings, optimizer):
    check_ranks(LowLevelZeroPlugin, **of_precision(settings), optimizer=optimizer)


GEMINI = [
    ({"precision": "fp32"}, HybridAdam),
    ({"precision": "bf16", **SMALL_CHUNKS}, torch.optim.AdamW),
    ({"precision": "bf16", **SMALL_CHUNKS, "max_prefetch": 1, "shard_param_frac": 0.5}, HybridAdam),
    ({"precision": "fp16", **SMALL_CHUNKS, "offload_optim_frac": 0.5}, momentum),
]
MORE_OF_GEMINI = [
    ({"precision": precision, **chunks}, optimizer)
    for precision in ("fp32", "bf16", "fp16")
    for chunks in ({}, SMALL_CHUNKS)
    for optimizer in (torch.optim.AdamW, HybridAdam, momentum)
] + [
    ({"precision": "fp32", **SMALL_CHUNKS, "offload_param_frac": 0.5}, torch.optim.AdamW),
    ({"precision": "bf16", **SMALL_CHUNKS, "strict_ddp_mode": True}, torch.optim.AdamW),
    ({"precision": "bf16", **SMALL_CHUNKS, "max_prefetch": 2}, torch.optim.AdamW),
    ({"precision": "bf16", **SMALL_CHUNKS, "enable_async_reduce": False}, torch.optim.AdamW),
    ({"precision": "bf16", "force_outputs_fp32": True}, torch.optim.AdamW),
    (
        {"precision": "bf16", **SMALL_CHUNKS, "placement_policy": "const", "device_memory_budget": 8_000_000},
        torch.optim.AdamW,
    ),
]


@pytest.mark.slow
@distributed(world_size=2)
@pytest.mark.parametrize(("settings", "optimizer"), GEMINI)
def test_gemini(settings, optimizer):
    check_ranks(GeminiPlugin, **of_precision(settings), optimizer=optimizer, within=0.03)


@distributed(world_size=2)
@pytest.mark.slow
@pytest.mark.parametrize(("settings", "optimizer"), MORE_OF_GEMINI)
def test_gemini_in_all_ways(settings, optimizer):
    check_ranks(GeminiPlugin, **of_precision(settings), optimizer=optimizer)


@pytest.mark.slow
@distributed(world_size=2)
def test_what_gemini_offloads_is_elsewhere():
    settings = {"precision": "bf16", **SMALL_CHUNKS, "placement_policy": "cpu"}
    estimate, measured = trained(lambda: GeminiPlugin(**settings), optimizer=HybridAdam)
    memory = estimate.memory
    assert measured["kept"] < 2**12 > memory.steady_state.total
    assert abs(memory.backward.total / measured["backward"] - 1) < 0.03
    assert abs(estimate.sent / measured["sent"] - 1) < 0.03
    booster = Booster(plugin=GeminiPlugin(**settings))
    ids = torch.randint(0, VOCABULARY, (BATCH, TOKENS)).to(booster.device)
    model = LanguageModel()
    model, optimizer, *_ = booster.boost(model, HybridAdam(model.parameters()))
    booster.backward(next_token_loss(model(ids), ids), optimizer)
    optimizer.step()
    optimizer.zero_grad()
    held = torch.tensor([model.manager.tier.bytes_held], device=booster.device)
    dist.all_reduce(held, op=dist.ReduceOp.MAX)
    assert abs(memory.offloaded / held.item() - 1) < 0.01


FSDP = [
    ({}, None, torch.optim.AdamW),
    ({"sharding_strategy": "SHARD_GRAD_OP"}, None, HybridAdam),
    ({"mixed_precision": BF16_UNITS}, None, torch.optim.AdamW),
    ({}, "bf16", momentum),
    ({}, "fp16_naive", torch.optim.AdamW),
]
MORE_OF_FSDP = [
    ({"sharding_strategy": strategy}, precision, optimizer)
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
    for precision in (None, "bf16", "fp16", "fp16_naive")
    for optimizer in (torch.optim.AdamW, HybridAdam, momentum)
] + [
    ({"reshard_after_forward": True}, None, torch.optim.AdamW),
    ({"mixed_precision": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}, None, torch.optim.AdamW),
    ({"sharding_strategy": "SHARD_GRAD_OP", "mixed_precision": BF16_UNITS}, None, momentum),
]


@pytest.mark.slow
@distributed(world_size=2)
@pytest.mark.parametrize(("settings", "precision", "optimizer"), FSDP)
def test_fsdp(settings, precision, optimizer):
    batch = 1 if precision == "fp16_naive" else BATCH  # which is slow
    check_ranks(TorchFSDPPlugin, settings, optimizer=optimizer, precision=of_name(precision), batch=batch, within=0.05)


@distributed(world_size=2)
@pytest.mark.slow
@pytest.mark.parametrize(("settings", "precision", "optimizer"), MORE_OF_FSDP)
def test_fsdp_in_all_ways(settings, precision, optimizer):
    check_ranks(TorchFSDPPlugin, settings, optimizer=optimizer, precision=of_name(precision))


OTHER_MODELS = [
    (LowLevelZeroPlugin, {"stage": 2, "precision": "bf16", **SMALL_BUCKETS}),
    (GeminiPlugin, {"precision": "bf16", **SMALL_CHUNKS}),
    (TorchFSDPPlugin, {}),
]


@distributed(world_size=2)
@pytest.mark.slow
@pytest.mark.parametrize(("plugin_class", "settings"), OTHER_MODELS)
@pytest.mark.parametrize("make_model", [Tied, Frozen, Uneven])
def test_other_models(plugin_class, settings, make_model):
    check_ranks(plugin_class, settings, make_model=make_model, within=0.05)


@distributed(world_size=2)
@pytest.mark.parametrize(
    ("plugin_class", "settings"), [*OTHER_MODELS, (GeminiPlugin, {"precision": "fp32", **SMALL_CHUNKS})]
)
@pytest.mark.parametrize("make_model", [Checkpointed, CheckpointedInPairs])
@pytest.mark.slow
def test_layers_computed_again(plugin_class, settings, make_model):
    check_ranks(plugin_class, settings, make_model=make_model, within=0.02)


@distributed(world_size=3)
@pytest.mark.parametrize(("plugin_class", "settings"), OTHER_MODELS)
@pytest.mark.slow
def test_three_ranks(plugin_class, settings):
    check_ranks(plugin_class, settings, make_model=Uneven, optimizer=HybridAdam, within=0.05)


@distributed(world_size=4)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("plugin_class", "settings"),
    [
        (LowLevelZeroPlugin, {"stage": 1, "precision": "bf16", "extra_dp_size": 2}),
        (LowLevelZeroPlugin, {"stage": 2, "precision": "fp32", "extra_dp_size": 2}),
        (GeminiPlugin, {"precision": "bf16", **SMALL_CHUNKS, "extra_dp_size": 2}),
        (TorchFSDPPlugin, {"sharding_strategy": "HYBRID_SHARD", "extra_dp_size": 2}),
        (TorchFSDPPlugin, {"reshard_after_forward": 2}),
    ],
)
def test_replicas_of_shards(plugin_class, settings):
    check_ranks(plugin_class, settings, within=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("plugin_class", [LowLevelZeroPlugin, GeminiPlugin, TorchFSDPPlugin])
def test_settings_worth_a_look_can_be_asked_about(plugin_class):
    with torch.device("meta"):
        model = LanguageModel()
    batch = torch.zeros(1, TOKENS, dtype=torch.int64, device="meta")
    name = {LowLevelZeroPlugin: "low_level_zero", GeminiPlugin: "gemini", TorchFSDPPlugin: "torch_fsdp"}[plugin_class]
    for settings in plugin_class.settings_for(8):
        arguments = {"batch": batch, "criterion": next_token_loss, "num_ranks": 8}
        estimate = estimate_memory(model, name, settings=settings, **arguments)
        whole = sum(one.numel() for one in model.parameters())
        assert 0 < estimate.memory.steady_state.total + estimate.memory.offloaded < 16 * whole
        assert estimate.sent > 0


@distributed(world_size=2)
def test_fsdp_cannot_tell_about_modules_of_another_model():
    model = LanguageModel()
    plugin = TorchFSDPPlugin(ignored_modules=[model.head])
    batch = torch.zeros(1, TOKENS, dtype=torch.int64)
    with pytest.raises(ConfigError, match="leave ignored_modules out"):
        estimate_memory(model, plugin, batch=batch, criterion=next_token_loss)
