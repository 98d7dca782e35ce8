"""Random models, loops and settings of HybridParallelPlugin, each of which trains as one process does."""

from __future__ import annotations

import copy
import random
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hybrid_cases import EXPERTS, NUM_FUSED_GROUPS, OWN_ATTENTION, on_own_axis, on_tensor_axis
from oracles.joined_slices import joined_over_ranks
from pipeline_cases import DECODERS, ENCODER_DECODERS, ENCODERS, MORE_DECODERS, SCHEDULES, num_layers_for
from random_loops import OPTIMIZERS, PLUGINS, draw_plugin, norm_type
from torch import nn
from zoo import Batch, WholeBatches, get_model

from booster import Booster
from booster.pytree import map_tensors

MODELS = [*DECODERS, *MORE_DECODERS, *ENCODERS, *ENCODER_DECODERS, "user_transformer", "tied_lm"]
SAMPLES = 4
MAX_TP_SIZES = {**NUM_FUSED_GROUPS, "tied_lm": 2}
# Norms of transformers compute in fp32 also where weights are in fp64.
TOLERANCES = {torch.float64: {"rtol": 1e-4, "atol": 2e-6}, torch.float32: {"rtol": 2e-3, "atol": 3e-4}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A training step.

    Attributes:
        number: Number of the step, which its data depend on.
        num_batches: Number of batches whose gradients it has.
        way: "sum" of the gradients, "no_sync" for all but the last, or "accumulate".
        clip: Clipping: "norm", "inf", "value" or None.
        loss: "mean", the sum over "items" of which ranks have unlike numbers, or the sum of "two" batches.
        skips: If True, the gradients are thrown away.
    """

    number: int
    num_batches: int
    way: str
    clip: str | None
    loss: str
    skips: bool


@dataclass(slots=True, kw_only=True)
class Case:
    """A random case.

    Attributes:
        seed: Number that all of it is drawn by.
        layouts: Plugins with arguments; `hop` takes the next one.
        actions: Steps, and names of other actions.
    """

    seed: int
    model: str
    num_layers: int | None
    dtype: torch.dtype
    optimizer: str
    groups: str
    layouts: list[tuple[str, dict[str, Any]]]
    actions: list[Step | str] = field(default_factory=list)


OTHER_ACTIONS = ("evaluate", "learning rate", "unfreeze", "freeze", "reload", "hop", "hop", "copy")


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
        layouts=layouts,
    )
    for number in range(draw.randint(2, 5)):
        if number and draw.random() < 1 / 3:
            case.actions.append(draw.choice(OTHER_ACTIONS))
            continue
        case.actions.append(
            Step(
                number=number,
                num_batches=draw.choice([1, 1, 2, 3]),
                way=draw.choice(["sum", "no_sync", "accumulate"]),
                clip=draw.choice([None, "norm", "inf", "value"]),
                loss=draw.choice(["mean", "mean", "items", "two"]),
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


class RandomHybridLoop:
    """The boosted model of a case, and its twin in one process."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.folder = case, folder
        self.whole = WholeBatches(get_model(case.model, case.num_layers))
        self.plain = self.new_model()
        self.plain_optimizer = new_optimizer(case, self.plain)
        self.num_hops = 0
        self.boost()

    def new_model(self) -> nn.Module:
        return self.whole.build().to(self.case.dtype)

    def boost(self) -> None:
        """Boosts a new model with the plugin whose turn it is."""
        name, arguments = self.case.layouts[self.num_hops % len(self.case.layouts)]
        self.booster = Booster(plugin=PLUGINS[name](**arguments))
        self.num_parts = getattr(self.booster.plugin, "dp_size", dist.get_world_size())
        self.part = getattr(self.booster.plugin, "dp_rank", dist.get_rank())
        raw = self.new_model()
        optimizer = new_optimizer(self.case, raw)
        for parameter, twin in zip(raw.parameters(), self.plain.parameters(), strict=True):
            parameter.requires_grad_(twin.requires_grad)
        self.model, self.optimizer, *_ = self.booster.boost(raw, optimizer)
        self.is_staged = arguments.get("pp_size", 1) > 1

    def run(self) -> None:
        """Runs all actions, and compares the weights after each."""
        for number, action in enumerate(self.case.actions):
            if isinstance(action, Step):
                self.train(action)
            else:
                self.act(number, action)
            torch.testing.assert_close(
                joined_over_ranks(self.model), dict(self.plain.state_dict()), **TOLERANCES[self.case.dtype]
            )

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

    # Steps.

    def train(self, step: Step) -> None:
        norm = self.train_plain(step)
        found = self.train_boosted(step)
        if norm is not None:
            torch.testing.assert_close(float(found), float(norm), **TOLERANCES[self.case.dtype])

    def train_plain(self, step: Step) -> torch.Tensor | None:
        """Trains the twin with the batches of all ranks; returns the norm before clipping, if it was computed."""
        batches = [self.batch(step.number, number, step.loss)[0] for number in range(step.num_batches)]
        num_items = sum(self.whole.num_samples(one) for one in batches)
        for batch in batches:
            loss = self.compute_loss(self.plain, batch)
            if step.loss == "items":
                loss = loss * self.whole.num_samples(batch) / num_items
            elif step.way == "accumulate":
                loss = loss / step.num_batches
            loss.backward()
        trained = [one for group in self.plain_optimizer.param_groups for one in group["params"]]
        norm = None
        if step.clip == "value":
            nn.utils.clip_grad_value_(trained, 0.01)
        elif step.clip is not None:
            norm = nn.utils.clip_grad_norm_(trained, 0.3, norm_type=norm_type(step.clip))
        if not step.skips:
            self.plain_optimizer.step()
        self.plain_optimizer.zero_grad()
        return norm

    def train_boosted(self, step: Step) -> torch.Tensor | None:
        """Trains the boosted model with this rank's batches; returns the norm before clipping, if it was computed."""
        norm = None
        for number in range(step.num_batches):
            is_last = number == step.num_batches - 1
            context: Any = nullcontext()
            if step.way == "accumulate":
                context = self.booster.accumulate(self.model, self.optimizer, steps=step.num_batches)
            elif step.way == "no_sync" and not is_last:
                context = self.booster.no_sync(self.model, self.optimizer)
            with context:
                self.backward(self.batch(step.number, number, step.loss)[1], sums=step.loss == "items")
                if step.way == "accumulate" or is_last:
                    norm = self.end_step(step)
        return norm

    def backward(self, fed: Any, *, sums: bool) -> None:
        options: dict[str, Any] = {"num_items": self.whole.num_samples(fed)} if sums else {}
        if self.is_staged:
            criterion = self.sum_of_items if sums else self.whole.criterion
            self.booster.execute_pipeline(iter([fed]), self.model, criterion, self.optimizer, **options)
            return
        loss = self.compute_loss(self.model, fed)
        if sums:
            loss = loss * self.whole.num_samples(fed)
        self.booster.backward(loss, self.optimizer, **options)

    def end_step(self, step: Step) -> torch.Tensor | None:
        norm = None
        if step.clip == "value":
            self.optimizer.clip_grad_by_value(0.01)
        elif step.clip is not None:
            norm = self.booster.clip_grad_norm_(self.optimizer, 0.3, norm_type=norm_type(step.clip))
        if not step.skips:
            self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    # Other actions.

    def act(self, number: int, action: str) -> None:
        if action == "evaluate":
            self.evaluate(number)
        elif action == "learning rate":
            for optimizer in (self.plain_optimizer, self.optimizer):
                for group in optimizer.param_groups:
                    group["lr"] /= 2
        elif action in ("freeze", "unfreeze"):
            self.freeze(action)
        elif action == "reload":
            self.reload(self.folder / str(number))
        elif action == "hop":
            path = self.folder / str(number)
            self.booster.save(path, model=self.model, optimizer=self.optimizer)
            self.num_hops += 1
            self.boost()
            self.booster.load(path, model=self.model, optimizer=self.optimizer)
        elif action == "copy":
            copy.deepcopy(self.model).train(False)

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

    def evaluate(self, number: int) -> None:
        _, fed = self.batch(number, 0, "mean")
        self.model.eval()
        self.plain.eval()
        with torch.no_grad():
            expected = self.compute_loss(self.plain, fed)
            if self.is_staged:
                found = self.booster.execute_pipeline(iter([fed]), self.model, self.whole.criterion)["loss"]
            else:
                found = self.compute_loss(self.model, fed)
        self.model.train()
        self.plain.train()
        torch.testing.assert_close(float(found), float(expected), **TOLERANCES[self.case.dtype])

    def reload(self, path: Path) -> None:
        """Saves, trains a step that is lost, and loads."""
        path.mkdir(exist_ok=True)
        self.booster.save_model(self.model, path / "model", shard=True)
        self.booster.save_optimizer(self.optimizer, path / "optimizer", shard=True)
        self.backward(self.batch(0, 0, "mean")[1], sums=False)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.booster.load_model(self.model, path / "model")
        self.booster.load_optimizer(self.optimizer, path / "optimizer")
