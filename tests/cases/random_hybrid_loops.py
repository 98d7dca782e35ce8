"""Random models, loops and settings of HybridParallelPlugin, each of which trains as one process does."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hybrid_cases import EXPERTS, NUM_FUSED_GROUPS, OWN_ATTENTION, on_own_axis, on_tensor_axis
from oracles.joined_slices import joined_over_ranks
from pipeline_cases import DECODERS, ENCODER_DECODERS, ENCODERS, MORE_DECODERS, SCHEDULES, num_layers_for
from random_loops import OPTIMIZERS, Loop, Step, draw_plugin
from torch import nn
from zoo import Batch, WholeBatches, get_model

from booster.plugins import HybridParallelPlugin
from booster.pytree import map_tensors

MODELS = [*DECODERS, *MORE_DECODERS, *ENCODERS, *ENCODER_DECODERS, "user_transformer", "tied_lm"]
SAMPLES = 4
MAX_TP_SIZES = {**NUM_FUSED_GROUPS, "tied_lm": 2}
# Norms of transformers compute in fp32 also where weights are in fp64.
TOLERANCES = {torch.float64: {"rtol": 1e-4, "atol": 2e-6}, torch.float32: {"rtol": 2e-3, "atol": 3e-4}}


@dataclass(slots=True, kw_only=True)
class Case:
    """A random case.

    Attributes:
        seed: Number that all of it is drawn by.
        plugins: Plugins with arguments; `hop` takes the next one.
        actions: Steps, and names of other actions.
    """

    seed: int
    model: str
    num_layers: int | None
    dtype: torch.dtype
    optimizer: str
    groups: str
    plugins: list[tuple[str, dict[str, Any]]]
    actions: list[Step | str] = field(default_factory=list)


OTHER_ACTIONS = ("evaluate", "infer", "learning rate", "unfreeze", "freeze", "reload", "hop", "hop", "copy")


def draw_case(seed: int, num_ranks: int) -> Case:
    """Returns the case of a seed, the same on all ranks."""
    draw = random.Random(seed)
    model = draw.choice(MODELS)
    layouts = [draw_layout(draw, num_ranks, model)]
    others = [draw_plugin(draw, num_ranks), draw_layout(draw, num_ranks, model), draw_layout(draw, num_ranks, model)]
    layouts += draw.sample(others, 2)
    num_chunks = max(arguments.get("pp_size", 1) * arguments.get("num_model_chunks", 1) for _, arguments in layouts)
    case = Case(
        seed=seed,
        model=model,
        num_layers=num_layers_for(model, num_chunks),
        dtype=torch.float32 if model in EXPERTS else draw.choice([torch.float32, torch.float64]),  # torch's grouped_mm
        optimizer=draw.choice(list(OPTIMIZERS)),
        groups=draw.choice(["one", "two", "frozen", "frozen outside"]),
        plugins=layouts,
    )
    for number in range(draw.randint(2, 5)):
        if number and draw.random() < 1 / 3:
            case.actions.append(draw.choice(OTHER_ACTIONS))
            continue
        case.actions.append(
            Step(
                number=number,
                num_microbatches=draw.choice([1, 1, 2, 3]),
                way=draw.choice(["sum", "no_sync", "accumulate"]),
                clip=draw.choice([None, "norm", "inf", "value"]),
                loss=draw.choice(["mean", "items"]),
                clears_first=draw.random() < 0.5,
                skips=draw.random() < 0.1,
            )
        )
    return case


def draw_layout(draw: random.Random, num_ranks: int, model: str) -> tuple[str, dict[str, Any]]:
    """Returns arguments of HybridParallelPlugin that divide the model over the ranks."""
    sizes = {"tp": 1, "pp": 1, "sp": 1, "dp": 1}
    while num_ranks > 1:
        axis = draw.choice(["tp", "tp", "pp", "pp", "sp", "dp"])
        limit = MAX_TP_SIZES.get(model, 4) if axis == "tp" else 4
        num_heads_needed = sizes["tp"] * sizes["sp"] * (2 if axis in ("tp", "sp") else 1)
        if (axis == "sp" and model in OWN_ATTENTION) or num_heads_needed > limit:
            continue
        sizes[axis] *= 2
        num_ranks //= 2
    bucket = draw.choice([12, 0.0005])
    arguments: dict[str, Any] = {"zero_bucket_size_in_m": bucket, "ddp_bucket_cap_mb": bucket, "precision": "fp32"}
    arguments |= {"overlap_communication": draw.random() < 0.7, "overlap_allgather": draw.random() < 0.3}
    arguments |= {"zero_stage": draw.choice([0, 1, 2]), "dp_outside": draw.random() < 0.7, "tp_size": sizes["tp"]}
    arguments |= {"gradient_checkpoint_config": draw.random() < 0.3 or None, "parallel_output": draw.random() < 0.7}
    if sizes["sp"] > 1:
        mode = draw.choice(["all_to_all", "ring_attn"])
        arguments |= on_own_axis(mode, sizes["sp"], tp_size=sizes["tp"])[1]
    elif sizes["tp"] > 1 and draw.random() < 0.4:
        arguments |= on_tensor_axis(draw.choice(["split_gather", "ring"]), sizes["tp"])[1]
    if sizes["pp"] > 1:
        schedule = draw.choice(list(SCHEDULES))
        arguments |= {"pp_size": sizes["pp"], **SCHEDULES[schedule]}
        arguments |= draw.choice([{"num_microbatches": SAMPLES}, {"num_microbatches": 2}, {"microbatch_size": 1}])
        arguments["zero_stage"] = min(arguments["zero_stage"], 1)
    return "hybrid", arguments


def new_optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    """Returns an optimizer, after weights of the model are frozen."""
    for name, parameter in model.named_parameters():
        if case.groups.startswith("frozen") and is_drawn(case, name):
            parameter.requires_grad_(False)
    given = [one for one in model.parameters() if one.requires_grad or case.groups != "frozen outside"]
    groups: Any = given
    if case.groups == "two":
        groups = [
            {"params": [one for one in given if one.dim() > 1]},
            {"params": [one for one in given if one.dim() <= 1], "lr": 0.02},
        ]
    return getattr(torch.optim, case.optimizer)(groups, lr=0.03, **OPTIMIZERS[case.optimizer])


def is_drawn(case: Case, name: str) -> bool:
    """Whether a weight is among those that the case freezes."""
    return random.Random(f"{case.seed} {name}").random() < 0.3


class RandomHybridLoop(Loop):
    """A model of the zoo under layouts of HybridParallelPlugin.

    A loss is the mean of a batch, or the sum over its "items", of which ranks have unlike numbers.
    """

    tolerances = TOLERANCES
    max_value = 0.01

    def __init__(self, case: Case, folder: Path) -> None:
        self.whole = WholeBatches(get_model(case.model, case.num_layers))
        super().__init__(case, folder)

    def new_model(self) -> nn.Module:
        return self.whole.build().to(self.case.dtype)

    def new_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return new_optimizer(self.case, model)

    def boost(self) -> None:
        super().boost()
        plugin = self.booster.plugin
        self.num_parts = getattr(plugin, "dp_size", dist.get_world_size())
        self.part = getattr(plugin, "dp_rank", dist.get_rank())
        self.is_staged = isinstance(plugin, HybridParallelPlugin) and dist.get_world_size(plugin.pp_group) > 1

    def weights(self) -> dict[str, torch.Tensor]:
        return joined_over_ranks(self.model)

    def batch(self, step: int, number: int, loss: str) -> tuple[Any, Any]:
        """Returns the batch of all ranks as the model takes it, and this rank's."""
        is_uneven = loss == "items"
        counts = [SAMPLES + (part + step) % 3 if is_uneven else SAMPLES for part in range(self.num_parts)]
        batch = self.whole.entry.make_batch(100 * step + number, sum(counts))
        start = sum(counts[: self.part])
        own = map_tensors(lambda one: one[start : start + counts[self.part]], batch)
        return self.feed(batch), self.feed(own)

    def feed(self, batch: Batch) -> Any:
        dtype = self.case.dtype
        batch = map_tensors(lambda one: one.to(dtype) if one.is_floating_point() else one, batch)
        return self.whole.feed(batch)

    def compute_loss(self, model: nn.Module, fed: Any) -> torch.Tensor:
        return self.whole.criterion(model(fed) if self.whole.is_bare else model(**fed), fed)

    def sum_of_items(self, outputs: Any, fed: Any) -> torch.Tensor:
        return self.whole.criterion(outputs, fed) * self.whole.num_samples(fed)

    def backward_plain(self, step: Step) -> None:
        batches = [self.batch(step.number, number, step.loss)[0] for number in range(step.num_microbatches)]
        num_items = sum(self.whole.num_samples(one) for one in batches)
        for batch in batches:
            loss = self.compute_loss(self.plain, batch)
            if step.loss == "items":
                loss = loss * self.whole.num_samples(batch) / num_items
            elif step.way == "accumulate":
                loss = loss / step.num_microbatches
            loss.backward()

    def backward_boosted(self, step: Step, number: int) -> None:
        fed, sums = self.batch(step.number, number, step.loss)[1], step.loss == "items"
        options: dict[str, Any] = {"num_items": self.whole.num_samples(fed)} if sums else {}
        if self.is_staged:
            criterion = self.sum_of_items if sums else self.whole.criterion
            self.booster.execute_pipeline(iter([fed]), self.model, criterion, self.optimizer, **options)
            return
        loss = self.compute_loss(self.model, fed)
        if sums:
            loss = loss * self.whole.num_samples(fed)
        self.booster.backward(loss, self.optimizer, **options)

    def freeze(self, action: str) -> None:
        """Freezes drawn weights, or unfreezes all that the optimizer has."""
        given = {id(one) for group in self.plain_optimizer.param_groups for one in group["params"]}
        for name, parameter in self.plain.named_parameters():
            if action == "unfreeze" and id(parameter) in given:
                parameter.requires_grad_(True)
            if action == "freeze" and is_drawn(self.case, "again " + name):
                parameter.requires_grad_(False)
        twins = dict(self.plain.named_parameters(remove_duplicate=False))
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(twins[name].requires_grad)

    def evaluate(self, number: int, mode: Any) -> None:
        _, fed = self.batch(number, 0, "mean")
        self.model.eval()
        self.plain.eval()
        with mode():
            expected = self.compute_loss(self.plain, fed)
            if self.is_staged:
                found = self.booster.execute_pipeline(iter([fed]), self.model, self.whole.criterion)["loss"]
            else:
                found = self.compute_loss(self.model, fed)
        self.model.train()
        self.plain.train()
        self.assert_close(float(found), float(expected))
