"""Plain torch in one process: what every plugin, world size and precision is compared with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn
from zoo import split_batch

from booster import FP8MixedPrecision
from booster.interface import TensorSlice
from booster.pytree import map_tensors

# Weights in low precision, made of fp32 masters: their format.
HALF = {
    "fp16_naive": torch.float16,
    "fp16_apex_o2": torch.float16,
    "bf16_weights": torch.bfloat16,
    "fsdp_bf16": torch.bfloat16,
    "fsdp_fp16": torch.float16,
}

# Of low-precision gradients: none (autograd adds them up as they are, or those of each part of a batch and then the
# parts), those of the parts of a batch (each part adds up its microbatches as they are), those of microbatches (each
# adds up its parts as they are), or all.
Fp32Sums = Literal["none", "none, by parts", "parts", "microbatches", "all"]


@dataclass
class Record:
    """What a training run left behind.

    Attributes:
        losses: Mean loss over the global batch, per step.
        norms: 2-norm of the true gradient before clipping, per step.
        weights: Every parameter and buffer at the end, by name, in fp32 or its own integer dtype.
        slices: What this rank held of them, where no rank has all.
        tied_names: Further names of a slice's parameter.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    slices: list[TensorSlice] = field(default_factory=list)
    tied_names: dict[str, tuple[str, ...]] = field(default_factory=dict)


def make_optimizer(name: str, groups: list) -> torch.optim.Optimizer:
    """Returns an optimizer that does not blow up rounding noise.

    Some gradients are zero but for rounding (the key bias of an attention layer). Adam with a tiny eps turns that noise
    into steps of full length and any sign, in one process as well; eps=1e-3 lets it stay noise.
    """
    if name == "sgd":
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-3, weight_decay=0.01)


def train_serial(
    entry,
    *,
    precision: str | None,
    steps: int,
    batch_size: int,
    accumulation: int,
    parts: int,
    max_norm: float,
    optimizer: str,
    fp32_sums: Fp32Sums = "none",
    whole_model_is_half: bool = True,
    nudge: int | None = None,
    nudge_dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Record:
    """Trains on the global batches with nothing but torch (and the float8 layers), each batch in `parts` parts.

    `precision` is a name of `booster.Booster`, "fp16_apex_o1", "fp16_apex_o2", "bf16_weights" for bf16 weights with
    fp32 masters, or "fsdp_bf16" and "fsdp_fp16" for such of which the masters come out in the end. `fp32_sums` says
    which gradients of low-precision weights are added in fp32. `whole_model_is_half`: of "fsdp_..." buffers are cast
    too, and outputs stay as they are. `nudge` is the seed of changes of the initial weights, each below one unit in the
    last place of `nudge_dtype`, which show how much the model amplifies roundings. `device` is the type that computes;
    what is recorded is on the CPU.
    """
    model = entry.build()
    if nudge is not None:
        nudge_weights(model, nudge, nudge_dtype)
    model.to(device)
    record = Record()
    if precision in HALF:
        is_of_fsdp = precision.startswith("fsdp_")
        loop: Loop = HalfLoop(
            model,
            entry,
            optimizer,
            HALF[precision],
            keep_batch_norm=is_of_fsdp or precision == "fp16_apex_o2",
            fp32_sums=fp32_sums,
            casts_buffers=whole_model_is_half,
            casts_outputs=not (is_of_fsdp and whole_model_is_half),
            keeps_fp32_state=is_of_fsdp,
        )
    else:
        loop = AutocastLoop(model, entry, optimizer, precision, device)
    for step in range(steps):
        whole = [entry.make_batch(step * accumulation + index, batch_size) for index in range(accumulation)]
        batches = [split_batch(batch, part, parts) for batch in whole for part in range(parts)]
        batches = [map_tensors(lambda tensor: tensor.to(device), batch) for batch in batches]
        record.losses.append(loop.backward(batches, parts))
        record.norms.append(loop.clip_and_step(max_norm))
    loop.finish()
    record.weights = {name: tensor.detach().clone().cpu() for name, tensor in model.state_dict().items()}
    return record


def nudge_weights(model: nn.Module, seed: int, dtype: torch.dtype) -> None:
    """Changes weights at random, each by less than one unit in its last place in `dtype`."""
    generator = torch.Generator().manual_seed(seed)
    largest = torch.finfo(dtype).eps / 2
    with torch.no_grad():
        for parameter in model.parameters():
            change = largest * (2 * torch.rand(parameter.shape, generator=generator, dtype=torch.float64) - 1)
            parameter.copy_(parameter.double() * (1 + change))


class Loop:
    """Backward over the microbatches of one step, then clip and step."""

    def backward(self, batches: list, parts: int) -> float:
        """Leaves the gradient of the mean over all batches; returns that mean.

        The mean over the `parts` of a batch is taken of gradients, not of losses: a loss divided by 3 would round in
        another way on the way back through low precision than it does on a rank of three.
        """
        raise NotImplementedError

    def clip_and_step(self, max_norm: float) -> float:
        raise NotImplementedError

    def finish(self) -> None:
        """Leaves in the model what is to be compared."""


class AutocastLoop(Loop):
    """fp32 weights; fp16 and bf16 by torch's autocast, fp16 with torch's GradScaler, float8 layers under bf16."""

    def __init__(self, model: nn.Module, entry, optimizer: str, precision: str | None, device: str) -> None:
        self.model, self.entry = model, entry
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = make_optimizer(optimizer, entry.param_groups(model))
        if precision in ("fp8", "fp8_rowwise"):
            FP8MixedPrecision(recipe="dynamic" if precision == "fp8" else "rowwise").prepare(model)
        dtype = {
            "bf16": torch.bfloat16,
            "fp8": torch.bfloat16,
            "fp8_rowwise": torch.bfloat16,
            "fp16": torch.float16,
            "fp16_apex_o1": torch.float16,
        }.get(precision or "")
        self.called = model if dtype is None else AutocastForward(model, device, dtype)
        self.scaler = torch.amp.GradScaler(device, init_scale=2.0**8, enabled=dtype is torch.float16)

    def backward(self, batches: list, parts: int) -> float:
        total = 0.0
        sums: dict[nn.Parameter, torch.Tensor] = {}
        # Each part adds up its microbatches, and then the parts in their order, as ranks do. In other orders one
        # process alone may differ from itself by more than the bounds, where the input of a ReLU changes its sign.
        for part in range(parts):
            self.optimizer.zero_grad()
            for batch in batches[part::parts]:
                loss = self.entry.loss(self.called, batch)
                self.scaler.scale(loss / (len(batches) // parts)).backward()
                total += float(loss.detach()) / len(batches)
            for parameter in self.parameters:
                if parameter.grad is not None:
                    mean = parameter.grad / parts
                    sums[parameter] = sums[parameter] + mean if parameter in sums else mean
        for parameter in self.parameters:
            parameter.grad = sums.get(parameter)
        return total

    def clip_and_step(self, max_norm: float) -> float:
        self.scaler.unscale_(self.optimizer)
        norm = nn.utils.clip_grad_norm_(self.parameters, max_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return float(norm)


class HalfLoop(Loop):
    """fp16 or bf16 weights with fp32 masters, written out by hand.

    The loss scale of fp16 is constant as nothing overflows here; bf16 has fp32's range and needs none.

    Args:
        keep_batch_norm: Normalisation over batches stays in fp32.
        fp32_sums: Which gradients are added in fp32.
        casts_buffers: Buffers are rounded like weights.
        casts_outputs: The model's outputs are cast to fp32.
        keeps_fp32_state: The masters are what comes out in the end, not the rounded weights.
    """

    # Of fp16: small gradients stay out of its subnormal numbers, and large ones below its largest.
    SCALE = 2.0**10

    def __init__(
        self,
        model: nn.Module,
        entry,
        optimizer: str,
        dtype: torch.dtype,
        *,
        keep_batch_norm: bool,
        fp32_sums: Fp32Sums = "none",
        casts_buffers: bool = True,
        casts_outputs: bool = True,
        keeps_fp32_state: bool = False,
    ) -> None:
        self.model, self.entry, self.dtype, self.fp32_sums = model, entry, dtype, fp32_sums
        self.casts_outputs, self.keeps_fp32_state = casts_outputs, keeps_fp32_state
        self.gradients: dict[nn.Parameter, torch.Tensor] = {}
        self.scale = self.SCALE if dtype is torch.float16 else 1.0
        exact = [parameter.detach().clone() for parameter in model.parameters()]
        for module in model.modules():
            if not (keep_batch_norm and isinstance(module, nn.modules.batchnorm._BatchNorm)):
                buffers = module.buffers(recurse=False) if casts_buffers else ()
                for tensor in [*module.parameters(recurse=False), *buffers]:
                    if tensor.is_floating_point():
                        tensor.data = tensor.data.to(dtype)
        self.working = list(model.parameters())
        self.masters = [nn.Parameter(value, w.requires_grad) for value, w in zip(exact, self.working, strict=True)]
        master_of = {id(w): m for w, m in zip(self.working, self.masters, strict=True)}
        groups = []
        for group in entry.param_groups(model):
            group = group if isinstance(group, dict) else {"params": [group]}
            groups.append({**group, "params": [master_of[id(p)] for p in group["params"]]})
        self.optimizer = make_optimizer(optimizer, groups)

    def backward(self, batches: list, parts: int) -> float:
        self.gradients = {}
        self.multiplier = 1 / (self.scale * parts)
        num_microbatches = len(batches) // parts
        by_part = [batches[part::parts] for part in range(parts)]
        groups = {
            "none": [batches],
            "none, by parts": by_part,
            "parts": by_part,
            "microbatches": [batches[start : start + parts] for start in range(0, len(batches), parts)],
            "all": [[b] for b in batches],
        }
        total = 0.0
        for group in groups[self.fp32_sums]:
            total += sum(self._backward(batch, num_microbatches) for batch in group) / len(batches)
            self._collect()
        return total

    def _backward(self, batch: dict, num_microbatches: int) -> float:
        loss = self.entry.loss(HalfInputs(self.model, self.dtype, self.casts_outputs), batch)
        (loss / num_microbatches * self.scale).backward()
        return float(loss.detach())

    def _collect(self) -> None:
        """Adds what autograd left to the sums, in fp32 or rounded to the gradients' dtype."""
        for working in self.working:
            if working.grad is not None:
                total = self.gradients.get(working, 0.0) + working.grad.float()
                in_fp32 = self.fp32_sums != "none, by parts"
                self.gradients[working] = total if in_fp32 else total.to(working.grad.dtype).float()
        self.model.zero_grad()

    def clip_and_step(self, max_norm: float) -> float:
        for working, master in zip(self.working, self.masters, strict=True):
            gradient = self.gradients.get(working)
            master.grad = None if gradient is None else gradient * self.multiplier
        norm = nn.utils.clip_grad_norm_([m for m in self.masters if m.requires_grad], max_norm)
        self.optimizer.step()
        for working, master in zip(self.working, self.masters, strict=True):
            working.data.copy_(master.data)
        return float(norm)

    def finish(self) -> None:
        if self.keeps_fp32_state:
            for working, master in zip(self.working, self.masters, strict=True):
                working.data = master.data


class AutocastForward(nn.Module):
    """Computes a model's outputs under autocast, and hands them on in fp32, so that a loss of them is in fp32.

    Under autocast, a cross entropy of bf16 scores is in fp32 on the CPU, and on CUDA its log-probabilities are in bf16.
    """

    def __init__(self, model: nn.Module, device: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.model, self.device, self.dtype = model, device, dtype

    def forward(self, *args, **kwargs):
        with torch.autocast(self.device, self.dtype):
            outputs = self.model(*args, **kwargs)
        return map_tensors(single, outputs)


class HalfInputs(nn.Module):
    """Feeds a model in low precision floating inputs in its format, and may hand its outputs on in fp32."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, casts_outputs: bool) -> None:
        super().__init__()
        self.model, self.dtype, self.casts_outputs = model, dtype, casts_outputs

    def forward(self, *args, **kwargs):
        def half(tensor):
            return tensor.to(self.dtype) if tensor.is_floating_point() else tensor

        outputs = self.model(*map_tensors(half, args), **map_tensors(half, kwargs))
        return map_tensors(single, outputs) if self.casts_outputs else outputs


def single(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor
