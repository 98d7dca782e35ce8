"""Auxiliary losses of all ranks' tokens: under every plugin those of one process with the global batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from harness import preload, run_ranks
from oracles.joined_slices import joined_over_ranks
from strategies import FP32
from torch import nn
from zoo import TRANSFORMERS_MODULES, get_model, split_batch
from zoo.small_configs import small_config

from booster import Booster, ConfigError
from booster.device import current_device
from booster.moe import Experts, LossFreeBalancing, MoeLayer, MoeLoss, Top2Router, global_load_balancing
from booster.moe.balance import _running
from booster.plugins import HybridParallelPlugin

preload(*TRANSFORMERS_MODULES)
pytestmark = pytest.mark.on_device

STEPS = 3
BOOSTERS: dict[str, Callable[[], Booster]] = {
    **FP32,
    "hybrid_ep": lambda: Booster(plugin=HybridParallelPlugin(precision="fp32", ep_size=2)),
    "hybrid_ep_zero": lambda: Booster(plugin=HybridParallelPlugin(precision="fp32", ep_size=2, zero_stage=1)),
}


class Classifier(nn.Module):
    """Layers of booster.moe, without drops: these depend on how tokens are divided."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MoeLayer(12, 4, Top2Router(drop_tks=False), Experts(Feed, 4)) for _ in range(2))
        self.head = nn.Linear(12, 3)

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            vectors = vectors + layer(vectors)
        return self.head(vectors)


class Feed(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(12, 20), nn.GELU(), nn.Linear(20, 12))


def make_model(name: str) -> nn.Module:
    if name == "own":
        torch.manual_seed(0)
        return Classifier()
    return get_model(name).build()


def make_batch(name: str, step: int, num_samples: int) -> dict[str, torch.Tensor]:
    if name == "own":
        generator = torch.Generator().manual_seed(step)
        classes = torch.randint(3, (num_samples,), generator=generator)
        return {"vectors": torch.randn(num_samples, 12, generator=generator), "classes": classes}
    batch = get_model(name).make_batch(step, num_samples)
    if name == "mixtral_balanced":  # padding that differs between samples, without labels
        lengths = torch.arange(num_samples) % 4
        mask = torch.arange(batch["input_ids"].shape[1]) < batch["input_ids"].shape[1] - lengths[:, None]
        batch["attention_mask"] = mask.long()
    return batch


def loss_of(name: str, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    if name == "own":
        return MoeLoss(0.5, nn.CrossEntropyLoss)(model(batch["vectors"]), batch["classes"])
    return model(**batch).loss


def step_of(name: str, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return loss_of(name, model, {key: value.to(current_device()) for key, value in batch.items()})


def train(name: str, strategy: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    booster, rank, world_size = BOOSTERS[strategy](), dist.get_rank(), dist.get_world_size()
    raw = make_model(name)
    model, optimizer, *_ = booster.boost(raw, torch.optim.AdamW(raw.parameters(), lr=1e-2, eps=1e-3))
    if not strategy.startswith("hybrid_ep"):  # which does it by default
        global_load_balancing(model)
    losses = []
    for step in range(STEPS):
        batch = split_batch(make_batch(name, step, 2 * world_size), rank, world_size)
        loss = step_of(name, model, batch)
        losses.append(loss.item())
        booster.backward(loss, optimizer)
        optimizer.clip_grad_by_norm(0.05)
        optimizer.step()
        optimizer.zero_grad()
    return losses, joined_over_ranks(model)


def train_alone(name: str, world_size: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = make_model(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    losses = []
    for step in range(STEPS):
        loss = loss_of(name, model, make_batch(name, step, 2 * world_size))
        losses.append(loss.item())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    return losses, model.state_dict()


@pytest.mark.parametrize("strategy", [name for name in BOOSTERS if name != "hybrid_tp"])
@pytest.mark.parametrize("name", ["mixtral_balanced", "own"])
def test_the_auxiliary_loss_is_that_of_one_process(name, strategy):
    expected_losses, expected = train_alone(name, 2)
    found = run_ranks(train, 2, name, strategy, timeout=120)
    for mean, one in zip(zip(*(losses for losses, _ in found), strict=True), expected_losses, strict=True):
        assert sum(mean) / 2 == pytest.approx(one, rel=1e-6)
    for key, weight in found[0][1].items():
        torch.testing.assert_close(weight, expected[key], rtol=1e-5, atol=1e-5)


def train_without(name: str) -> list[float]:
    booster = BOOSTERS["zero1"]()
    raw = make_model(name)
    model, *_ = booster.boost(raw, torch.optim.AdamW(raw.parameters()))
    return [step_of(name, model, split_batch(make_batch(name, 0, 4), dist.get_rank(), 2)).item()]


@pytest.mark.parametrize("name", ["mixtral_balanced", "own"])
def test_a_mean_of_local_losses_is_another_one(name):
    """Whether the test above can fail."""
    (first,), (second,) = run_ranks(train_without, 2, name)
    assert abs((first + second) / 2 / train_alone(name, 2)[0][0] - 1) > 1e-4


def evaluate_on_one_rank(name: str) -> list[float]:
    """Evaluates on the first rank alone, with gradients as for an attribution; the others do not take part."""
    model = make_model(name).eval().to(current_device())
    global_load_balancing(model)
    return [step_of(name, model, make_batch(name, 0, 4)).item()] if dist.get_rank() == 0 else []


@pytest.mark.parametrize("name", ["mixtral_balanced", "own"])
def test_an_evaluation_communicates_nothing(name):
    (found,), _ = run_ranks(evaluate_on_one_rank, 2, name)
    model = make_model(name).eval()
    assert found == pytest.approx(loss_of(name, model, make_batch(name, 0, 4)).item(), rel=1e-6)


def test_a_model_without_auxiliary_losses_is_refused():
    with pytest.raises(ConfigError, match="found no auxiliary loss in Linear"):
        global_load_balancing(nn.Linear(2, 2))


# Pipelines: losses of a microbatch of all data-parallel ranks, from the layers of all stages.


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = MoeLayer(12, 4, Top2Router(drop_tks=False), Experts(Feed, 4))

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        return vectors + self.experts(vectors)


class DeepClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Residual() for _ in range(4))
        self.head = nn.Linear(12, 3)

    def forward(self, vectors: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            vectors = layer(vectors)
        return self.head(vectors)


NUM_MICROBATCHES = 2


def deep_model(name: str) -> nn.Module:
    if name == "own":
        return DeepClassifier()
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    changes = {"output_router_logits": True, "router_aux_loss_coef": 0.5, "num_hidden_layers": 4}
    return MixtralForCausalLM(small_config(MixtralConfig, changes))


def criterion_of(name: str) -> Callable[..., torch.Tensor]:
    if name == "own":
        criterion = MoeLoss(0.5, nn.CrossEntropyLoss)
        return lambda outputs, batch: criterion(outputs, batch["classes"])
    return lambda outputs, batch: outputs.loss


def train_in_stages(name: str, arguments: dict[str, object]) -> tuple[list[float], dict[str, torch.Tensor]]:
    plugin = HybridParallelPlugin(precision="fp32", pp_size=2, num_microbatches=NUM_MICROBATCHES, **arguments)
    booster, raw = Booster(plugin=plugin), deep_model(name)
    model, optimizer, *_ = booster.boost(raw, torch.optim.AdamW(raw.parameters(), lr=1e-2, eps=1e-3))
    if "ep_size" not in arguments:
        global_load_balancing(model, plugin.data_group)
    losses = []
    for step in range(STEPS):
        batch = split_batch(make_batch(name, step, 4 * plugin.dp_size), plugin.dp_rank, plugin.dp_size)
        batch = {key: value.to(current_device()) for key, value in batch.items()}
        losses.append(booster.execute_pipeline(iter([batch]), model, criterion_of(name), optimizer)["loss"].item())
        optimizer.clip_grad_by_norm(0.05)
        optimizer.step()
        optimizer.zero_grad()
    assert not _running.forwards  # else losses of other models would be gathered over this one's ranks
    return losses, joined_over_ranks(model)


def train_microbatches_alone(name: str, dp_size: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = deep_model(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    losses = []
    for step in range(STEPS):
        batch, total = make_batch(name, step, 4 * dp_size), 0.0
        for number in range(NUM_MICROBATCHES):
            parts = [
                split_batch(split_batch(batch, rank, dp_size), number, NUM_MICROBATCHES) for rank in range(dp_size)
            ]
            microbatch = {key: torch.cat([part[key] for part in parts]) for key in batch}
            loss = criterion_of(name)(model(**microbatch), microbatch) / NUM_MICROBATCHES
            loss.backward()
            total += loss.item()
        losses.append(total)
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    return losses, model.state_dict()


@pytest.mark.parametrize(
    ("world_size", "arguments"),
    [
        (2, {}),
        (2, {"pp_style": "gpipe"}),
        (2, {"pp_style": "interleaved", "num_model_chunks": 2}),
        (2, {"pp_style": "zbv", "num_model_chunks": 2}),
        (2, {"gradient_checkpoint_config": True}),
        (4, {}),
        (4, {"ep_size": 2, "zero_stage": 1}),
        (4, {"num_layers_per_stage": (3, 1)}),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["mixtral_balanced", "own"])
def test_stages_add_the_auxiliary_losses_of_all_layers(name, world_size, arguments):
    dp_size = world_size // 2
    expected_losses, expected = train_microbatches_alone(name, dp_size)
    found = run_ranks(train_in_stages, world_size, name, arguments, timeout=120)
    for step, one in enumerate(expected_losses):  # every rank of a pipeline has the loss of its data
        mean = sum(losses[step] for losses, _ in found) / world_size
        assert mean == pytest.approx(one, rel=1e-6)
    for key, weight in found[0][1].items():
        torch.testing.assert_close(weight, expected[key], rtol=1e-5, atol=1e-5)


# Without a loss.


def biases_of(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {key.removeprefix("module."): one for key, one in model.named_buffers() if key.endswith("correction_bias")}
    return {key: one.detach().cpu().float().clone() for key, one in found.items()}


def balance(strategy: str) -> dict[str, torch.Tensor]:
    booster, rank, world_size = BOOSTERS[strategy](), dist.get_rank(), dist.get_world_size()
    raw = get_model("deepseek_v3").build()
    model, optimizer, *_ = booster.boost(raw, torch.optim.SGD(raw.parameters(), lr=1e-2))
    balancing = LossFreeBalancing(model)
    for step in range(STEPS):
        batch = split_batch(get_model("deepseek_v3").make_batch(step, 2 * world_size), rank, world_size)
        booster.backward(step_of("deepseek_v3", model, batch), optimizer)
        with torch.no_grad():
            step_of("deepseek_v3", model, batch)  # an evaluation does not count
        optimizer.step()
        optimizer.zero_grad()
        balancing.step()
    return biases_of(model)


def balance_alone() -> dict[str, torch.Tensor]:
    model = get_model("deepseek_v3").build()
    optimizer, balancing = torch.optim.SGD(model.parameters(), lr=1e-2), LossFreeBalancing(model)
    for step in range(STEPS):
        model(**get_model("deepseek_v3").make_batch(step, 4)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        balancing.step()
    return biases_of(model)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "gemini", "fsdp", "hybrid_zero", "hybrid_ep_zero"])
def test_biases_balance_the_global_batch(strategy):
    expected = balance_alone()
    for found in run_ranks(balance, 2, strategy, timeout=120):
        assert len(found) == len(expected) == 1
        for bias, one in zip(found.values(), expected.values(), strict=True):
            assert set(one.abs().mul(1e3).round().int().tolist()) & {1, 2, 3}  # it was changed
            torch.testing.assert_close(bias, one)


def deep_deepseek() -> nn.Module:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(0)
    changes = {"first_k_dense_replace": 1, "n_routed_experts": 8, "n_group": 4, "num_hidden_layers": 4}
    return DeepseekV3ForCausalLM(small_config(DeepseekV3Config, changes))


def balance_stages() -> dict[str, torch.Tensor]:
    plugin = HybridParallelPlugin(precision="fp32", pp_size=2, num_microbatches=NUM_MICROBATCHES, ep_size=2)
    booster, raw = Booster(plugin=plugin), deep_deepseek()
    model, optimizer, *_ = booster.boost(raw, torch.optim.SGD(raw.parameters(), lr=1e-2))
    balancing = LossFreeBalancing(model, group=plugin.data_group)
    for step in range(STEPS):
        batch = split_batch(get_model("deepseek_v3").make_batch(step, 8), plugin.dp_rank, plugin.dp_size)
        batch = {key: value.to(current_device()) for key, value in batch.items()}
        booster.execute_pipeline(iter([batch]), model, lambda outputs, _: outputs.loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        balancing.step()
    return biases_of(model)


def test_every_stage_balances_its_own_layers():
    model = deep_deepseek()
    optimizer, balancing = torch.optim.SGD(model.parameters(), lr=1e-2), LossFreeBalancing(model)
    for step in range(STEPS):
        model(**get_model("deepseek_v3").make_batch(step, 8)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        balancing.step()
    found: dict[str, torch.Tensor] = {}
    for biases in run_ranks(balance_stages, 4, timeout=120):
        found |= biases
    expected = biases_of(model)
    assert found.keys() == expected.keys()
    for name, bias in expected.items():
        torch.testing.assert_close(found[name], bias)


def test_a_bias_grows_where_tokens_are_few():
    model = get_model("deepseek_v3").build()
    balancing = LossFreeBalancing(model, rate=0.1)
    block = model.model.layers[1].mlp
    tokens = torch.randn(6, 32, requires_grad=True)
    block.experts(tokens, torch.tensor([[0, 1]] * 6), torch.ones(6, 2))
    balancing.step()
    assert block.gate.e_score_correction_bias.tolist() == pytest.approx([-0.1] * 2 + [0.1] * 6)
    for _ in range(3):
        block.experts(tokens, torch.tensor([[0, 1]] * 6), torch.ones(6, 2))
    balancing.step()
    assert block.gate.e_score_correction_bias.tolist() == pytest.approx([-0.2] * 2 + [0.2] * 6)


def test_mistakes_with_biases():
    with pytest.raises(ConfigError, match="found no router with an e_score_correction_bias"):
        LossFreeBalancing(get_model("mixtral").construct())
    with pytest.raises(ConfigError, match="rate=0 is not a size of updates"):
        LossFreeBalancing(get_model("deepseek_v3").construct(), rate=0)
