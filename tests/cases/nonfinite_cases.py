"""A small language model under every plugin and dtype, into whose gradients an inf or nan can be put."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from fsdp_twins import small_units
from torch import nn
from torch.distributed.fsdp import MixedPrecision
from zoo import split_batch
from zoo.language import ByteGPT

from booster import Booster, FP16ApexMixedPrecision, FP16NaiveMixedPrecision
from booster.optim import CPUAdam
from booster.plugins import GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin

VOCABULARY, LENGTH = 24, 8
SCALE = 2.0**8  # under which no gradient of this model overflows by itself
HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A way to train.

    Attributes:
        precision: "fp16" or "bf16", what it means coming from `arguments` or `booster_precision`.
        booster_precision: For plugins that leave the dtype to the Booster.
    """

    plugin: str
    precision: str
    world_size: int = 2
    arguments: dict[str, Any] = field(default_factory=dict)
    booster_precision: str | None = None
    optimizer: str = "sgd"

    @property
    def is_pipelined(self) -> bool:
        return self.arguments.get("pp_size", 1) > 1

    def make_booster(self) -> Booster:
        """Returns a Booster; scales are lowered at the first overflow. Collective."""
        arguments = dict(self.arguments)
        if self.plugin == "torch_ddp":
            precision: Any = self.booster_precision
            if precision == "fp16_naive":
                precision = FP16NaiveMixedPrecision(initial_scale=SCALE, hysteresis=1)
            elif precision == "fp16_apex":
                precision = FP16ApexMixedPrecision("O2", max_loss_scale=SCALE, verbosity=0)
            return Booster(plugin=TorchDDPPlugin(**arguments), mixed_precision=precision)
        arguments |= {"hysteresis": 1, "initial_scale": SCALE}
        if self.plugin == "torch_fsdp":
            if self.booster_precision is None:
                half = HALF[self.precision]
                arguments["mixed_precision"] = MixedPrecision(param_dtype=half, reduce_dtype=torch.float32)
            plugin = TorchFSDPPlugin(auto_wrap_policy=small_units(), **arguments)
            return Booster(plugin=plugin, mixed_precision=self.booster_precision)
        classes = {
            "low_level_zero": LowLevelZeroPlugin,
            "gemini": GeminiPlugin,
            "hybrid_parallel": HybridParallelPlugin,
        }
        return Booster(plugin=classes[self.plugin](precision=self.precision, **arguments))


def _hybrid(precision: str, world_size: int = 2, **arguments: Any) -> Case:
    if arguments.get("pp_size", 1) > 1:
        arguments["num_microbatches"] = 2
    return Case(plugin="hybrid_parallel", precision=precision, world_size=world_size, arguments=arguments)


_SPLIT_GATHER = {"enable_sequence_parallelism": True, "sequence_parallelism_mode": "split_gather"}
_ALL_TO_ALL = {"sp_size": 2, "enable_sequence_parallelism": True, "sequence_parallelism_mode": "all_to_all"}
_OFFLOADED = {"offload_optim_frac": 1.0, "offload_param_frac": 1.0}

CASES: dict[str, Case] = {
    "ddp fp16": Case(plugin="torch_ddp", precision="fp16", booster_precision="fp16"),
    "ddp fp16_naive": Case(plugin="torch_ddp", precision="fp16", booster_precision="fp16_naive"),
    "ddp fp16_apex": Case(plugin="torch_ddp", precision="fp16", booster_precision="fp16_apex"),
    "ddp bf16": Case(plugin="torch_ddp", precision="bf16", booster_precision="bf16"),
    "zero 1 fp16": Case(plugin="low_level_zero", precision="fp16", arguments={"stage": 1}),
    "zero 2 bf16": Case(plugin="low_level_zero", precision="bf16", arguments={"stage": 2}),
    "zero 2 fp16 replicas": Case(
        plugin="low_level_zero", precision="fp16", world_size=4, arguments={"stage": 2, "extra_dp_size": 2}
    ),
    "zero 1 fp16 fused": Case(plugin="low_level_zero", precision="fp16", arguments={"stage": 1}, optimizer="cpu_adam"),
    "gemini fp16": Case(plugin="gemini", precision="fp16"),
    "gemini bf16": Case(plugin="gemini", precision="bf16"),
    "gemini fp16 offloaded": Case(plugin="gemini", precision="fp16", arguments=_OFFLOADED, optimizer="cpu_adam"),
    "gemini fp16 replicas": Case(plugin="gemini", precision="fp16", world_size=4, arguments={"extra_dp_size": 2}),
    "fsdp fp16": Case(plugin="torch_fsdp", precision="fp16"),
    "fsdp fp16 autocast": Case(plugin="torch_fsdp", precision="fp16", booster_precision="fp16"),
    "fsdp bf16 replicas": Case(
        plugin="torch_fsdp",
        precision="bf16",
        world_size=4,
        arguments={"sharding_strategy": "HYBRID_SHARD", "extra_dp_size": 2},
    ),
    "hybrid tp fp16": _hybrid("fp16", tp_size=2),
    "hybrid tp bf16": _hybrid("bf16", tp_size=2),
    "hybrid tp dp zero fp16": _hybrid("fp16", 4, tp_size=2, zero_stage=1),
    "hybrid sequences over tp fp16": _hybrid("fp16", tp_size=2, **_SPLIT_GATHER),
    "hybrid sp fp16": _hybrid("fp16", **_ALL_TO_ALL),
    "hybrid pp fp16": _hybrid("fp16", pp_size=2),
    "hybrid pp bf16": _hybrid("bf16", pp_size=2),
    "hybrid pp tp fp16": _hybrid("fp16", 4, pp_size=2, tp_size=2),
    "hybrid zbv fp16": _hybrid("fp16", pp_size=2, pp_style="zbv", num_model_chunks=2),
}


def build_model() -> nn.Module:
    """Returns the same model at every call: four blocks, the embedding is the head."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return ByteGPT(vocabulary=VOCABULARY, width=16, num_heads=2, depth=4, length=LENGTH, is_tied=True).train()


def make_optimizer(name: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if name == "cpu_adam":
        return CPUAdam(parameters, lr=0.01, eps=1e-3)
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def loss_of(scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())


class Training:
    """The model under a case, and its twin in one process, which trains on the batches of all ranks in fp32.

    Attributes:
        model: The boosted one; `optimizer` is its optimizer.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        self.booster = case.make_booster()
        self.twin, raw = build_model().to(self.booster.device), build_model()
        self.initial = {name: one.detach().clone().cpu() for name, one in self.twin.named_parameters()}
        self._twin_optimizer = make_optimizer(case.optimizer, list(self.twin.parameters()))
        self.model, self.optimizer, *_ = self.booster.boost(raw, make_optimizer(case.optimizer, list(raw.parameters())))
        self._num_batches = 0

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the next batch of all ranks, and this rank's part of it."""
        plugin, self._num_batches = self.booster.plugin, self._num_batches + 1
        generator = torch.Generator().manual_seed(self._num_batches)
        ids = torch.randint(VOCABULARY, (2 * plugin.dp_size, LENGTH), generator=generator).to(self.booster.device)
        return ids, split_batch(ids, plugin.dp_rank, plugin.dp_size)

    def backward(self, ids: torch.Tensor) -> None:
        """Runs forward and backward for this rank's part of a batch. Collective."""
        if self.case.is_pipelined:
            self.booster.execute_pipeline(iter([ids]), self.model, loss_of, self.optimizer)
        else:
            self.booster.backward(loss_of(self.model(ids), ids), self.optimizer)

    def micro_steps(self, number: int) -> Iterator[torch.Tensor]:
        """Yields this rank's part of a batch for each microbatch; a single one is not an accumulation."""
        for _ in range(number):
            with self.booster.accumulate(self.model, self.optimizer, number) if number > 1 else nullcontext():
                yield self.batch()[1]

    def good_step(self) -> None:
        """Steps both. Collective."""
        whole, part = self.batch()
        self.backward(part)
        self.optimizer.step()
        assert not self.optimizer.step_was_skipped, "a good step was skipped"
        self.optimizer.zero_grad()
        loss_of(self.twin(whole), whole).backward()
        self._twin_optimizer.step()
        self._twin_optimizer.zero_grad()

    def memory(self) -> list[torch.Tensor]:
        """Returns copies of all that a step changes on this rank: weights, masters, and states of the optimizer."""
        groups = [one.detach() for group in self.optimizer.param_groups for one in group["params"]]
        states = [value for state in self.optimizer.optim.state.values() for value in state.values()]
        tensors = [part.tensor for part in self.model.tensor_slices()] + groups
        tensors += [value for value in states if isinstance(value, torch.Tensor)]
        numbers = [torch.tensor(float(value)) for value in states if isinstance(value, (int, float))]
        return [tensor.detach().clone() for tensor in tensors] + numbers


def good_step_with_names(training: Training) -> list[str]:
    """Trains a good step; returns the parameters whose gradients this rank computes, or may under FSDP. Collective.

    A pipeline stage shows a parameter of the model itself, which its part of the forward may not use.
    """
    names = [name for name, one in training.model.named_parameters() if one.requires_grad and one.numel() > 0]
    if training.case.plugin == "torch_fsdp":  # shows other parameters while a module runs
        training.good_step()
        return [name for name in names if "." in name]
    computed: set[str] = set()
    handles = [
        _parameter(training, name).register_hook(lambda gradient, name=name: computed.add(name)) for name in names
    ]
    training.good_step()
    for handle in handles:
        handle.remove()
    return [name for name in names if name in computed]


def _parameter(training: Training, name: str) -> nn.Parameter:
    module_name, _, key = name.rpartition(".")
    return training.model.unwrap().get_submodule(module_name)._parameters[key]


@contextmanager
def poisoned(
    training: Training, name: str, value: float, *, in_backward: int = 0, place: float = 0.0
) -> Iterator[None]:
    """Puts a value into the gradient that this rank computes for a parameter, once, on the rank that enters the block.

    Args:
        training: What trains in the block.
        name: Of the parameter.
        value: Such as inf.
        in_backward: In the index of the gradient of that parameter, from 0.
        place: Which element: 0 is the first one, towards 1 the last.
    """
    module_name, _, key = name.rpartition(".")
    module = training.model.unwrap().get_submodule(module_name)
    num_calls = 0
    handles = []

    def put(gradient: torch.Tensor) -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        if num_calls != in_backward + 1:
            return gradient
        changed = gradient.clone()
        changed.view(-1)[int(place * changed.numel())] = value
        return changed

    def show(module: nn.Module, *_: Any) -> None:
        if len(handles) == 1:
            handles.append(module._parameters[key].register_hook(put))

    if training.case.plugin == "torch_fsdp":  # shows other parameters while the module runs
        handles.append(module.register_forward_pre_hook(show))
    else:
        handles.append(module._parameters[key].register_hook(put))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    assert num_calls > in_backward, f"no gradient of {name} was computed on rank {dist.get_rank()}"
