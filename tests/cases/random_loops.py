"""Random models, loops and settings of plugins, each of which trains as one process does."""

from __future__ import annotations

import copy
import random
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.checkpoint import checkpoint

from booster import Booster
from booster.device import current_device
from booster.plugins import GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin

WIDTH, BATCH, OUTPUTS = 8, 4, 3
PLUGINS = {
    "ddp": TorchDDPPlugin,
    "zero": LowLevelZeroPlugin,
    "gemini": GeminiPlugin,
    "fsdp": TorchFSDPPlugin,
    "hybrid": HybridParallelPlugin,
}
# A large eps, as a small one makes large differences of small ones.
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9, "nesterov": True},
    "Adam": {"eps": 1e-2, "amsgrad": True},
    "AdamW": {"eps": 1e-2, "weight_decay": 0.05},
    "RMSprop": {"eps": 0.1, "momentum": 0.5},
    "Adagrad": {"eps": 1e-2},
}
TOLERANCES = {torch.float64: {"rtol": 1e-10, "atol": 1e-12}, torch.float32: {"rtol": 2e-3, "atol": 3e-4}}


# Blocks: modules called with activations, the number of the step, and the rank.


class _Block(nn.Module):
    """Block that adds what `compute` returns."""

    def forward(self, x: torch.Tensor, step: int, rank: int) -> torch.Tensor:
        return x + self.compute(x, step, rank)


class Linear(_Block):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def compute(self, x: torch.Tensor, step: int, rank: int) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class Mlp(_Block):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 5 * WIDTH), nn.Linear(5 * WIDTH, WIDTH)
        self.act = nn.ReLU(inplace=True)

    def compute(self, x: torch.Tensor, step: int, rank: int) -> torch.Tensor:
        return self.down(self.act(self.up(x)))


class Norm(nn.Module):
    """A norm with a scale without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.scale = nn.LayerNorm(WIDTH), nn.Parameter(torch.tensor(1.3))

    def forward(self, x: torch.Tensor, step: int, rank: int) -> torch.Tensor:
        return self.norm(x) * self.scale


class Tied(_Block):
    """Uses the weight of another block."""

    def __init__(self, other: Linear) -> None:
        super().__init__()
        self.weight, self.bias = other.linear.weight, nn.Parameter(torch.zeros(WIDTH))

    def compute(self, x: torch.Tensor, step: int, rank: int) -> torch.Tensor:
        return torch.tanh(F.linear(x, self.weight.t(), self.bias))


class Reader(_Block):
    """Reads a weight of a block that is not its submodule, and parameters of a module that is never called."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(WIDTH, WIDTH), [other]

    def compute(self, x: torch.Tensor, step: int, rank: int) -> torch.Tensor:
        read = next((one for one in self.other[0].parameters() if one.dim() > 0), self.linear.bias)
        return F.linear(x, self.linear.weight, self.linear.bias) * 0.1 + 0.1 * x * torch.tanh(read.mean())


class Branches(_Block):
    """Runs one of two layers, chosen by the step, the rank or the data, or both in an order of the rank."""

    def __init__(self, choice: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.choice = choice

    def compute(self, x: torch.Tensor, step: int, rank: int) -> torch.Tensor:
        is_first = {
            "unused": True,
            "step": step % 2 == 0,
            "rank": (rank + step) % 2 == 0,
            "order": (rank + step) % 2 == 0,
            "data": float(x.detach().sum()) > 0,
        }[self.choice]
        layers = (self.first, self.second) if is_first else (self.second, self.first)
        return layers[1](layers[0](x)) if self.choice == "order" else layers[0](x)


class Attention(_Block):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH // 2, 2, batch_first=True)

    def compute(self, x: torch.Tensor, step: int, rank: int) -> torch.Tensor:
        hidden = x.view(len(x), 2, WIDTH // 2)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):  # has second derivatives
            return self.attention(hidden, hidden, hidden, need_weights=False)[0].reshape(len(x), WIDTH)


class Recurrent(_Block):
    def __init__(self, layer: type[nn.RNNBase]) -> None:
        super().__init__()
        self.recurrent = layer(WIDTH // 2, WIDTH // 2, batch_first=True)

    def compute(self, x: torch.Tensor, step: int, rank: int) -> torch.Tensor:
        return self.recurrent(x.view(len(x), 2, WIDTH // 2))[0].reshape(len(x), WIDTH)


class Lookup(_Block):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH, padding_idx=0)

    def compute(self, x: torch.Tensor, step: int, rank: int) -> torch.Tensor:
        return 0.3 * self.embedding((3 * x.detach()[:, 0]).long().remainder(11))


class Parametrized(_Block):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def compute(self, x: torch.Tensor, step: int, rank: int) -> torch.Tensor:
        return torch.sin(self.linear(x))


class Convolution(_Block):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv1d(2, 2, 3, padding=1), nn.GroupNorm(1, 2)

    def compute(self, x: torch.Tensor, step: int, rank: int) -> torch.Tensor:
        return self.norm(self.convolution(x.view(len(x), 2, WIDTH // 2))).reshape(len(x), WIDTH)


class Lists(nn.Module):
    """Parameters in a list and a dictionary, of which a step uses some."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(0.3 * torch.randn(WIDTH)) for _ in range(3))
        self.named = nn.ParameterDict({"column": nn.Parameter(0.3 * torch.randn(WIDTH, 1))})

    def forward(self, x: torch.Tensor, step: int, rank: int) -> torch.Tensor:
        return x * self.scales[step % 3] + x @ self.named["column"]


class Repeated(nn.Module):
    """Runs its layer a number of times that differs from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, step: int, rank: int) -> torch.Tensor:
        for _ in range(1 + step % 3):
            x = x + 0.2 * torch.relu(self.linear(x))
        return x


class _Giver(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"outputs": self.linear(x), "weight": self.linear.weight}


class Returned(_Block):
    """Has a submodule that returns its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.giver = _Giver()

    def compute(self, x: torch.Tensor, step: int, rank: int) -> torch.Tensor:
        given = self.giver(x)
        return given["outputs"] + 0.1 * x @ given["weight"]


CHOICES = ("unused", "step", "rank", "order", "data")
KINDS = (
    *("linear", "linear", "mlp", "norm", "tied", "reader", "again", "attention", "gru", "lstm", "lookup"),
    *("parametrized", "convolution", "lists", "repeated", "returned", *CHOICES),
)


def new_block(kind: str, blocks: list[nn.Module], draw: random.Random) -> nn.Module:
    """Returns a block of this kind, which may be or use one of those before."""
    linear = [one for one in blocks if isinstance(one, Linear)]
    if kind == "tied" and linear:
        return Tied(draw.choice(linear))
    if kind == "again" and blocks:
        return draw.choice(blocks)
    if kind == "reader" and blocks:
        return Reader(draw.choice(blocks))
    if kind in CHOICES:
        return Branches(kind)
    classes = {
        **{"mlp": Mlp, "norm": Norm, "attention": Attention, "lookup": Lookup, "parametrized": Parametrized},
        **{"convolution": Convolution, "lists": Lists, "repeated": Repeated, "returned": Returned},
    }
    if kind in ("gru", "lstm"):
        return Recurrent(nn.GRU if kind == "gru" else nn.LSTM)
    return classes.get(kind, Linear)()


# Every class of a block, for a policy that shards each on its own.
BLOCKS = (Linear, Mlp, Norm, Tied, Reader, Branches, Attention, Recurrent, Lookup, Parametrized, Convolution)
ALL_BLOCKS = frozenset((*BLOCKS, Lists, Repeated, Returned, _Giver))


class Model(nn.Module):
    """Model of random blocks.

    Args:
        kinds: Kinds of its blocks.
        checkpoints: For each block in turn: recomputed in backward or not; and whether reentrantly.
        has_unused: If True, it has a layer that never runs.
    """

    def __init__(self, kinds: list[str], checkpoints: list[bool | None], has_unused: bool) -> None:
        super().__init__()
        draw, blocks = random.Random(len(kinds)), list[nn.Module]()
        for kind in kinds:
            blocks.append(new_block(kind, blocks, draw))
        self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(WIDTH, OUTPUTS)
        self.unused = nn.Linear(2, 2) if has_unused else None
        self.checkpoints = checkpoints

    def forward(self, x: torch.Tensor, step: int, rank: int) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            reentrant = self.checkpoints[number % len(self.checkpoints)] if self.training else None
            if reentrant is None or (reentrant and not x.requires_grad):
                x = block(x, step, rank)
            else:
                x = checkpoint(block, x, step, rank, use_reentrant=reentrant)
            x = x / (1 + 0.1 * x.abs().max().detach())
        return self.head(x)


# Cases.


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A training step.

    Attributes:
        number: Number of the step, which its data depend on.
        num_microbatches: Number of backward passes.
        way: "sum" of the gradients, "no_sync" for all but the last, or "accumulate".
        clip: Clipping: "norm", "inf", "value" or None.
        loss: What the loss consists of.
        clears_first: If True, zero_grad() is called before backward, as well.
        skips: If True, the gradients are thrown away.
    """

    number: int
    num_microbatches: int
    way: str
    clip: str | None
    loss: str
    clears_first: bool
    skips: bool


@dataclass(slots=True, kw_only=True)
class Case:
    """A random case.

    Attributes:
        seed: Number that all of it is drawn by.
        plugins: Plugins with arguments; `hop` takes the next one.
        actions: Steps, and names of other actions.
    """

    seed: int
    kinds: list[str]
    checkpoints: list[bool | None]
    has_unused: bool
    dtype: torch.dtype
    optimizer: str
    groups: str
    plugins: list[tuple[str, dict[str, Any]]]
    actions: list[Step | str] = field(default_factory=list)


LOSSES = ("mean", "mean", "two forwards", "two backwards", "penalty", "penalty before", "gradient penalty", "items")
OTHER_ACTIONS = ("evaluate", "infer", "learning rate", "unfreeze", "freeze", "reload", "hop", "hop", "copy")


def draw_case(seed: int, num_ranks: int) -> Case:
    """Returns the case of a seed, the same on all ranks."""
    draw = random.Random(seed)
    case = Case(
        seed=seed,
        kinds=[draw.choice(KINDS) for _ in range(draw.randint(1, 5))],
        checkpoints=draw.choice([[None], [None], [False], [None, False], [True, None], [False, True]]),
        has_unused=draw.random() < 0.3,
        dtype=draw.choice([torch.float32, torch.float32, torch.float64]),
        optimizer=draw.choice(list(OPTIMIZERS)),
        groups=draw.choice(["one", "two", "frozen", "frozen outside"]),
        plugins=[draw_plugin(draw, num_ranks) for _ in range(3)],
    )
    for number in range(draw.randint(3, 7)):
        if draw.random() < 1 / 3:
            case.actions.append(draw.choice(OTHER_ACTIONS))
            continue
        case.actions.append(
            Step(
                number=number,
                num_microbatches=draw.choice([1, 1, 1, 2, 3]),
                way=draw.choice(["sum", "no_sync", "accumulate"]),
                clip=draw.choice([None, "norm", "inf", "value"]),
                loss=draw.choice(LOSSES),
                clears_first=draw.random() < 0.5,
                skips=draw.random() < 0.1,
            )
        )
    if any(isinstance(one, Step) and one.loss == "gradient penalty" for one in case.actions):
        case.checkpoints = [None if reentrant else reentrant for reentrant in case.checkpoints]  # torch refuses that
    return case


def draw_plugin(draw: random.Random, num_ranks: int) -> tuple[str, dict[str, Any]]:
    """Returns a plugin's name and arguments."""
    name = draw.choice(["ddp", "zero", "zero", "gemini", "gemini", "fsdp", "fsdp", "hybrid"])
    replicas = {"extra_dp_size": 2} if num_ranks == 4 and draw.random() < 0.5 else {}
    bucket = draw.choice([12, 0.0005])
    if name == "ddp":
        return name, {"bucket_cap_mb": bucket, "gradient_as_bucket_view": draw.random() < 0.3}
    if name == "zero":
        stage, overlaps, gathers_late = draw.choice([1, 2]), draw.random() < 0.7, draw.random() < 0.3
        options = {"overlap_communication": overlaps, "overlap_allgather": gathers_late}
        return name, {"stage": stage, "precision": "fp32", "reduce_bucket_size_in_m": bucket, **options, **replicas}
    if name == "gemini":
        sizes = {"search_range_m": 1, "min_chunk_size_m": draw.choice([0.0001, 0.0005, 32])}
        placement: dict[str, Any] = draw.choice(
            [
                {},
                {"placement_policy": "cpu"},
                {"shard_param_frac": draw.choice([0.0, 0.5]), "offload_optim_frac": draw.choice([0.0, 0.5, 1.0])},
                {"offload_optim_frac": 1.0, "offload_param_frac": draw.choice([0.5, 1.0])},
            ]
        )
        ahead = {"max_prefetch": draw.choice([0, 1, 2]), "enable_async_reduce": draw.random() < 0.7}
        return name, {"precision": "fp32", **sizes, **placement, **ahead, **replicas}
    if name == "fsdp":
        strategy = "HYBRID_SHARD" if replicas else draw.choice(["FULL_SHARD", "FULL_SHARD", "SHARD_GRAD_OP"])
        classes = draw.choice([None, ALL_BLOCKS, frozenset({nn.Linear, nn.GRU, nn.Embedding, nn.LayerNorm})])
        policy = None if classes is None else ModuleWrapPolicy(classes)
        return name, {"sharding_strategy": strategy, "auto_wrap_policy": policy, **replicas}
    buckets = {"zero_bucket_size_in_m": bucket, "ddp_bucket_cap_mb": bucket}
    return name, {"precision": "fp32", "zero_stage": draw.choice([0, 1, 2]), **buckets}


def new_model(case: Case) -> Model:
    torch.manual_seed(case.seed)
    return Model(case.kinds, case.checkpoints, case.has_unused).to(case.dtype)


def new_optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    """Returns an optimizer, after weights of the model are frozen."""
    draw = random.Random(case.seed + 1)
    for name, parameter in model.named_parameters():
        if case.groups.startswith("frozen") and draw.random() < 0.3 and not name.startswith("head"):
            parameter.requires_grad_(False)
    given = [one for one in model.parameters() if one.requires_grad or case.groups != "frozen outside"]
    groups = [{"params": given[::2]}, {"params": given[1::2], "lr": 0.02}] if case.groups == "two" else given
    return getattr(torch.optim, case.optimizer)(groups, lr=0.03, **OPTIMIZERS[case.optimizer])


class Loop:
    """A boosted model, its twin in one process, and what trains both; subclasses say what they compute.

    Args:
        case: With `seed`, `dtype`, `plugins` and `actions`.
        folder: For checkpoints.
    """

    tolerances = TOLERANCES
    max_value = 0.05  # where gradients are clipped by value

    def __init__(self, case: Any, folder: Path) -> None:
        self.case, self.folder = case, folder
        self.plain = self.new_model()
        self.plain_optimizer = self.new_optimizer(self.plain)
        self.num_hops = 0
        self.boost()

    # What subclasses define.

    def new_model(self) -> nn.Module:
        raise NotImplementedError

    def new_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Returns an optimizer, after weights of the model are frozen."""
        raise NotImplementedError

    def weights(self) -> dict[str, torch.Tensor]:
        """Returns the boosted model's weights as those of one process. Collective."""
        raise NotImplementedError

    def backward_plain(self, step: Step) -> None:
        """Computes the twin's gradients of a step, of the batches of all ranks."""
        raise NotImplementedError

    def backward_boosted(self, step: Step, number: int) -> None:
        """Computes the boosted model's gradients of a microbatch."""
        raise NotImplementedError

    def freeze(self, action: str) -> None:
        raise NotImplementedError

    def evaluate(self, number: int, mode: Any) -> None:
        raise NotImplementedError

    # What is the same for all.

    def boost(self) -> None:
        """Boosts a new model with the plugin whose turn it is."""
        name, arguments = self.case.plugins[self.num_hops % len(self.case.plugins)]
        self.booster = Booster(plugin=PLUGINS[name](**arguments))
        raw = self.new_model()
        optimizer = self.new_optimizer(raw)
        for parameter, twin in zip(raw.parameters(), self.plain.parameters(), strict=True):
            parameter.requires_grad_(twin.requires_grad)
        self.model, self.optimizer, *_ = self.booster.boost(raw, optimizer)

    def run(self) -> None:
        """Runs all actions, and compares the weights after each."""
        for number, action in enumerate(self.case.actions):
            if isinstance(action, Step):
                self.train(action)
            else:
                self.act(number, action)
            self.assert_close(self.weights(), dict(self.plain.state_dict()))

    def assert_close(self, found: Any, expected: Any) -> None:
        torch.testing.assert_close(found, expected, **self.tolerances[self.case.dtype])

    def train(self, step: Step) -> None:
        """Trains one step of both."""
        self.backward_plain(step)
        norm = self.end_plain_step(step)
        found = self.train_boosted(step)
        if norm is not None:
            self.assert_close(float(found), float(norm))

    def end_plain_step(self, step: Step) -> torch.Tensor | None:
        """Returns the norm before clipping, if it was computed."""
        trained = [one for group in self.plain_optimizer.param_groups for one in group["params"]]
        norm = None
        if step.clip == "value":
            nn.utils.clip_grad_value_(trained, self.max_value)
        elif step.clip is not None:
            norm = nn.utils.clip_grad_norm_(trained, 0.3, norm_type=_norm_type(step))
        if not step.skips:
            self.plain_optimizer.step()
        self.plain_optimizer.zero_grad()
        return norm

    def train_boosted(self, step: Step) -> torch.Tensor | None:
        """Trains the boosted model with this rank's batches; returns the norm before clipping, if it was computed."""
        norm = None
        for microbatch in range(step.num_microbatches):
            is_last = microbatch == step.num_microbatches - 1
            context: Any = nullcontext()
            if step.way == "accumulate":
                context = self.booster.accumulate(self.model, self.optimizer, steps=step.num_microbatches)
            elif step.way == "no_sync" and not is_last:
                context = self.booster.no_sync(self.model, self.optimizer)
            with context:
                if step.clears_first and (step.way == "accumulate" or microbatch == 0):
                    self.optimizer.zero_grad()
                self.backward_boosted(step, microbatch)
                if step.way == "accumulate" or is_last:
                    norm = self.end_step(step)
        return norm

    def end_step(self, step: Step) -> torch.Tensor | None:
        norm = None
        if step.clip == "value":
            self.optimizer.clip_grad_by_value(self.max_value)
        elif step.clip is not None:
            norm = self.booster.clip_grad_norm_(self.optimizer, 0.3, norm_type=_norm_type(step))
        if not step.skips:
            self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def act(self, number: int, action: str) -> None:
        """Runs an action other than a step."""
        if action in ("evaluate", "infer"):
            self.evaluate(number, torch.no_grad if action == "evaluate" else torch.inference_mode)
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

    def reload(self, path: Path) -> None:
        """Saves, trains a step that is lost, and loads."""
        path.mkdir(exist_ok=True)
        self.booster.save_model(self.model, path / "model", shard=True)
        self.booster.save_optimizer(self.optimizer, path / "optimizer", shard=True)
        lost = {"way": "sum", "clip": None, "loss": "mean", "clears_first": False, "skips": False}
        self.train_boosted(Step(number=0, num_microbatches=1, **lost))
        self.booster.load_model(self.model, path / "model")
        self.booster.load_optimizer(self.optimizer, path / "optimizer")


class RandomLoop(Loop):
    """A model of blocks under every plugin."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        super().__init__(case, folder)

    def new_model(self) -> nn.Module:
        return new_model(self.case).to(current_device())

    def new_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return new_optimizer(self.case, model)

    def weights(self) -> dict[str, torch.Tensor]:
        return dict(copy.deepcopy(self.model).state_dict())

    def batch(self, step: int, microbatch: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns a rank's inputs and targets."""
        generator = torch.Generator().manual_seed(self.case.seed * 1000 + step * 100 + microbatch * 10 + rank)
        numbers = torch.randn(BATCH, WIDTH + OUTPUTS, generator=generator, dtype=torch.float64)
        inputs, targets = numbers.to(current_device(), self.case.dtype).split([WIDTH, OUTPUTS], dim=1)
        return inputs.contiguous(), targets.contiguous()

    def loss(self, kind: str, model: nn.Module, step: int, microbatch: int, rank: int) -> torch.Tensor:
        """Returns the loss of a rank's microbatch: a mean, or a sum of "items"."""
        inputs, targets = self.batch(step, microbatch, rank)
        penalty = _penalty(model) if kind == "penalty before" else 0.0
        inputs.requires_grad_(kind == "gradient penalty")
        outputs = model(inputs, step, rank)
        if kind == "items":
            return F.mse_loss(outputs, targets, reduction="sum")
        loss = F.mse_loss(outputs, targets) + penalty
        if kind == "two forwards":
            loss = loss + F.mse_loss(model(inputs / 2, step + 1, rank), targets)
        if kind == "penalty":
            loss = loss * (1 + rank) + _penalty(model)
        if kind == "gradient penalty":
            (gradient,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
            loss = loss + gradient.square().mean()
        return loss

    def backward_plain(self, step: Step) -> None:
        num_parts = self.size * (step.num_microbatches if step.way == "accumulate" or step.loss == "items" else 1)
        num_parts *= BATCH * OUTPUTS if step.loss == "items" else 1
        for microbatch in range(step.num_microbatches):
            for rank in range(self.size):
                self.backward(step, self.loss(step.loss, self.plain, step.number, microbatch, rank) / num_parts)

    def backward_boosted(self, step: Step, number: int) -> None:
        self.backward(step, self.loss(step.loss, self.model, step.number, number, self.rank), boosted=True)

    def backward(self, step: Step, loss: torch.Tensor, *, boosted: bool = False) -> None:
        """Runs the backward of one of both, at once or in two halves."""
        halves = [loss / 2, loss / 2] if step.loss == "two backwards" else [loss]
        for number, part in enumerate(halves):
            options: dict[str, Any] = {"retain_graph": number < len(halves) - 1}
            if not boosted:
                part.backward(**options)
                continue
            if step.loss == "items":
                options["num_items"] = BATCH * OUTPUTS
            self.booster.backward(part, self.optimizer, **options)

    def freeze(self, action: str) -> None:
        for model in (self.plain, self.model):
            for index, (name, parameter) in enumerate(model.named_parameters()):
                if action == "unfreeze" and self.case.groups != "frozen outside":
                    parameter.requires_grad_(True)
                if action == "freeze" and index % 4 == 1 and not name.startswith("head"):
                    parameter.requires_grad_(False)

    def evaluate(self, number: int, mode: Any) -> None:
        inputs, _ = self.batch(number, 0, self.rank)
        outputs = []
        for model in (self.model, self.plain):
            model.eval()
            with mode():
                outputs.append(model(inputs, number, self.rank).clone())
            model.train()
        self.assert_close(*outputs)


def _penalty(model: nn.Module) -> Any:
    return 0.01 * sum(one.square().sum() for one in model.parameters() if one.requires_grad)


def _norm_type(step: Step) -> float:
    return float("inf") if step.clip == "inf" else 2.0
