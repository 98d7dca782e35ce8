"""`assert_parallel_equals_serial`: the property that every plugin's tests prove."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from harness import run_ranks
from harness.forkserver import Device, default_device
from oracles.joined_slices import copied_slices, join_slices
from oracles.run_distances import (
    Tolerance,
    assert_near_one,
    assert_within_spread,
    beyond,
    bounds,
    distances,
    scalar_bound,
    tensor_bounds,
    tensor_distances,
)
from oracles.serial_training import Fp32Sums, Record, make_optimizer, train_serial
from zoo import WholeBatches, ZooEntry, get_model, split_batch

# fp32: the batch is summed in another order, a few units of 2**-24 per step, grown by 5 steps of momentum or AdamW.
EXACT = Tolerance(loss=1e-5, norm=1e-4, update=2e-4)
# Low precision, against one process that takes the parts of the ranks in turn: the same roundings in forward and
# backward. What differs is the sum of the parts, and now and then a rounding that falls to the other side by it.
# Models with fp16 weights have fp16 gradients, so that the sum of the parts is itself rounded, at every
# microbatch and rank, to 2**-11; and some compute their own loss in fp16, of which one unit is 2**-10, or in bf16, of
# which it is 2**-7. Where ranks add them up in fp32, only the loss is as coarse.
IN_PARTS = {
    "bf16": Tolerance(loss=2e-3, norm=5e-3, update=1e-2),
    "fp16": Tolerance(loss=3e-4, norm=1e-3, update=2e-3),
    "fp16 weights": Tolerance(loss=1e-3, norm=4e-3, update=8e-3),
    "fp16 weights, fp32 sums": Tolerance(loss=1e-3, norm=1e-3, update=2e-3),
    "bf16 weights, fp32 sums": Tolerance(loss=8e-3, norm=5e-3, update=1e-2),
    "fp8": Tolerance(loss=1e-2, norm=2e-2, update=5e-2),
}
# Low precision, against one process that takes the whole batch at once, as its parts can't be had; and the cap of what
# nudged runs measure. Every gradient is rounded once instead of once a part. bf16 rounds by up to 2**-9, fp16 by
# 2**-12, fp8 by 2**-4 forward and 2**-3 backward, with another scale per part; the sums below are some 16 such errors
# over the layers and steps, or 4 of fp8's.
AT_ONCE = {
    "bf16": Tolerance(loss=2e-2, norm=5e-2, update=1.2e-1),
    "fp16": Tolerance(loss=3e-3, norm=1e-2, update=2.5e-2),
    "fp16 weights": Tolerance(loss=3e-3, norm=1e-2, update=2.5e-2),
    "bf16 weights": Tolerance(loss=2e-2, norm=5e-2, update=1.2e-1),
    "fp8": Tolerance(loss=1e-1, norm=2.5e-1, update=5e-1),
}
KIND = {
    "fp8_rowwise": "fp8",
    "fp16_naive": "fp16 weights",
    "fp16_apex_o2": "fp16 weights",
    "fp16_apex_o1": "fp16",
    "bf16_weights": "bf16 weights",
    "fsdp_bf16": "bf16 weights",
    "fsdp_fp16": "fp16 weights",
}
LOW_PRECISION = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
# FSDP's own precisions: (gathered weights, gradients on their way between ranks).
FSDP_DTYPES: dict[str, tuple[torch.dtype, torch.dtype | None]] = {
    "fsdp_bf16": (torch.bfloat16, None),
    "fsdp_bf16_fp32_reduce": (torch.bfloat16, torch.float32),
    "fsdp_fp16": (torch.float16, None),
}
# With fp32 buffers that their layers can't use beside low-precision weights: FSDP1's `MixedPrecision` casts them, and
# leaves batch norms as they are; FSDP2's policy does neither.
NEEDS_CAST_BUFFERS = ("convnet_batchnorm", "convit")


@dataclass(frozen=True)
class Case:
    """One training job.

    Attributes:
        synchronize: How the batches of a step are accumulated: "always", "no_sync" or "accumulate".
        num_layers: Of the model; None: as few as it has in the zoo.
        counts_items: Losses are sums over samples, and `num_items` says of how many. Of pipelines.
        save_to: Folder that the model is saved in after training; None: it is not saved.
        device: Of the ranks, by default that of `pytest --device`. See `train_reference` for that of the one process.
    """

    plugin: str
    model: str
    world_size: int = 2
    precision: str | None = None
    steps: int = 5
    samples_per_rank: int = 2
    accumulation: int = 1
    synchronize: str = "always"
    max_norm: float = float("inf")
    optimizer: str = "adamw"
    plugin_arguments: dict[str, Any] = field(default_factory=dict)
    uses_shared_memory: bool = True
    num_layers: int | None = None
    counts_items: bool = False
    save_to: str | None = None
    device: Device = field(default_factory=default_device)

    @property
    def entry(self) -> ZooEntry:
        """The model of the zoo."""
        return get_model(self.model, self.num_layers)

    @property
    def is_pipelined(self) -> bool:
        """Whether the model is divided into stages, which run microbatches of a batch."""
        return self.plugin_arguments.get("pp_size", 1) > 1

    @property
    def num_data_parts(self) -> int:
        """Parts that a global batch is divided into: ranks that share a model's computation read the same part."""
        if self.plugin != "hybrid_parallel":
            return self.world_size
        arguments = self.plugin_arguments
        # Ranks that share attention have an axis of their own only in these modes.
        has_own_axis = arguments.get("sequence_parallelism_mode") in ("all_to_all", "ring_attn")
        num_sequence_ranks = arguments["sp_size"] if has_own_axis else 1
        num_stages = arguments.get("pp_size", 1)
        return self.world_size // (arguments.get("tp_size", 1) * num_sequence_ranks * num_stages)

    @property
    def splits_computation(self) -> bool:
        """Whether several ranks compute one sample."""
        return self.num_data_parts < self.world_size


def assert_parallel_equals_serial(plugin: str, model: str, **settings) -> None:
    """Trains `model` of the zoo under `plugin` and in one process on the same global batches, and compares.

    Losses, gradient norms (before clipping), weights and buffers must agree; all ranks must hold the same. In low
    precision the one process takes the ranks' parts one by one where it can, which gives a much narrower bound than the
    whole batch; tests/unit/test_serial_training.py proves that the parts are the whole. Note [Bounds] of
    oracles/run_distances.py says what is allowed of models that amplify roundings.
    """
    case = Case(plugin=plugin, model=model, **settings)
    ranks = run_ranks(train_parallel, case.world_size, asdict(case), timeout=120, device=case.device)
    assert_ranks_equal_serial(case, ranks)


def assert_ranks_equal_serial(case: Case, ranks: list[Record]) -> dict[str, torch.Tensor]:
    """Asserts that what `train_parallel` returned is what one process gets; returns the weights, whole."""
    if case.plugin == "hybrid_parallel":
        # Each pipeline stage knows the ties of what it holds.
        tied_names = {name: others for record in ranks for name, others in record.tied_names.items()}
        whole = join_slices([record.slices for record in ranks], tied_names, what=str(case))
        ranks = [replace(record, weights=whole) for record in ranks]
    for rank, record in enumerate(ranks):
        for name, weight in record.weights.items():
            assert torch.equal(weight, ranks[0].weights[name]), f"{name} differs between rank 0 and {rank} of {case}"
    assert_equals_one_process(case, ranks[0])
    for record in ranks:
        assert record.losses == ranks[0].losses
        assert record.norms == ranks[0].norms
    return ranks[0].weights


def assert_equals_one_process(case: Case, found: Record) -> None:
    """Asserts that what a rank holds in the end is what one process gets."""
    in_parts, fixed, cap = _comparison(case)
    initial = case.entry.build().state_dict()
    where = f"{case}, one process{' by parts' if in_parts else ''}"
    if case.precision is None:
        serial = train_reference(case, in_parts)
        far = beyond(distances(found, serial), bounds(serial, initial, fixed))
        if far and case.entry.amplifies_roundings:
            # Batch statistics over few values amplify roundings, and a bias before them moves by roundings alone.
            train = partial(train_reference, case, in_parts, device=case.device)
            assert_within_spread(found, train, initial, fixed, AT_ONCE["fp16"], where)
            return
        assert not far, f"{where}: {'; '.join(far)}"
    elif fixed != cap:
        assert_within_spread(found, partial(train_reference, case, in_parts), initial, fixed, cap, where)
    else:
        # The fixed bound is that of roundings of the low precision, and so are the changes of the weights.
        dtype = LOW_PRECISION[_kind(case).split(" ")[0]]
        train = partial(train_reference, case, in_parts, nudge_dtype=dtype)
        assert_near_one(found, train, initial, fixed, where)


def _kind(case: Case) -> str:
    precision = _reference_precision(case)
    return KIND.get(precision, precision)


def _comparison(case: Case) -> tuple[bool, Tolerance, Tolerance]:
    """Returns whether one process takes the batch in parts, the fixed bound and the cap of a measured one."""
    if case.precision is None and case.entry.computes_in_bf16 and (case.splits_computation or case.is_pipelined):
        return False, AT_ONCE["bf16"], AT_ONCE["bf16"]
    if case.precision is None:
        return case.entry.routes_by_rank or case.entry.computes_in_bf16, EXACT, EXACT
    kind = _kind(case)
    at_once = AT_ONCE[kind]
    # The statistics are of the whole batch; or every rank's part of a sum over features is rounded by itself.
    if (case.entry.mixes_samples and not case.entry.routes_by_rank) or case.splits_computation:
        return False, at_once, at_once
    if _reference_precision(case).startswith("fsdp_") and case.entry.blocks_share_tensors:
        # FSDP2's hooks at the borders of units change in which order autograd adds up such a tensor's gradients, in low
        # precision, also of one part. tests/multi/test_torch_fsdp_numbers.py compares with FSDP2 itself, bit for bit.
        return True, at_once, at_once
    # DDP averages gradients in fp16 as such: dividing by 2 or 4 is exact, dividing by 3 rounds each of them once more.
    is_exact = kind != "fp16 weights" or case.num_data_parts in (1, 2, 4, 8) or _fp32_sums(case) != "none"
    finer = f"{kind}, fp32 sums" if _fp32_sums(case) != "none" else kind
    return True, IN_PARTS[finer] if is_exact else at_once, at_once


def _assert_close(found: list[float], expected: list[float], relative: float, what: str) -> None:
    for step, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert abs(one - other) <= scalar_bound(other, relative), f"{what}, step {step}: {found} against {expected}"


def _assert_same_move(found: dict, expected: dict, initial: dict, relative: float, where: str) -> None:
    far = beyond(tensor_distances(found, expected), tensor_bounds(expected, initial, relative))
    assert not far, f"{where}: {'; '.join(far)}"


def train_reference(
    case: Case,
    in_parts: bool,
    nudge: int | None = None,
    nudge_dtype: torch.dtype = torch.float32,
    device: Device | None = None,
) -> Record:
    """Trains in one process, on the batches that all ranks together see.

    `device` is by default the CPU in fp32, and in low precision that of the ranks: a device has roundings of its own,
    which quantization to float8 amplifies. Its attention is another kernel, and CUDA's products with a scale for each
    row are rounded to bf16.
    """
    if device is None:
        device = "cpu" if case.precision is None else case.device
    return _serial_run(
        device,
        case.model,
        case.num_layers,
        precision=_reference_precision(case),
        steps=case.steps,
        batch_size=case.samples_per_rank * case.num_data_parts,
        accumulation=case.accumulation,
        parts=case.num_data_parts if in_parts else 1,
        max_norm=case.max_norm,
        optimizer="adamw" if case.optimizer == "hybrid_adam" else case.optimizer,
        fp32_sums=_reference_sums(case),
        whole_model_is_half=case.precision not in FSDP_DTYPES or case.model in NEEDS_CAST_BUFFERS,
        nudge=nudge,
        nudge_dtype=nudge_dtype,
    )


@lru_cache(maxsize=2048)  # of models of some 100 kB: many cases are compared with one run
def _serial_run(device: Device, model: str, num_layers: int | None, **settings: Any) -> Record:
    """Runs `train_serial` on a device of the harness."""
    if device == "cpu":
        with _one_thread():
            return _train_serial("cpu", model, num_layers, settings)
    (record,) = run_ranks(_train_serial, 1, "cuda", model, num_layers, settings, timeout=120, device=device)
    return record


def _train_serial(device_type: str, model: str, num_layers: int | None, settings: dict[str, Any]) -> Record:
    return train_serial(get_model(model, num_layers), device=device_type, **settings)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Computes as the ranks do: with more threads, kernels sum in another order, and bf16 results fall elsewhere."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _reference_precision(case: Case) -> str | None:
    """Returns what `train_serial` calls the numbers of a plugin that has a precision of its own."""
    if case.plugin in ("low_level_zero", "gemini", "hybrid_parallel") and case.precision is not None:
        return {"fp16": "fp16_naive", "bf16": "bf16_weights"}[case.precision]
    return "fsdp_bf16" if case.precision == "fsdp_bf16_fp32_reduce" else case.precision


def _fp32_sums(case: Case) -> Fp32Sums:
    """Returns which gradients of low-precision weights the plugin adds up in fp32 on the CPU."""
    if case.plugin == "gemini" and case.precision is not None:
        return "all"
    if case.plugin == "torch_fsdp" and case.precision in (*FSDP_DTYPES, "fp16_naive", "fp16_apex_o2"):
        # What no_sync holds back is added by autograd, in the format of the gathered weights or of reductions.
        adds_before = case.synchronize != "always" and case.precision != "fsdp_bf16_fp32_reduce"
        return "parts" if adds_before else "all"
    if case.plugin not in ("low_level_zero", "hybrid_parallel") or case.precision is None:
        return "none"
    arguments = case.plugin_arguments
    stage = arguments.get("stage", 1) if case.plugin == "low_level_zero" else arguments.get("zero_stage", 0)
    reduces_always = case.synchronize == "always" and arguments.get("overlap_communication", True)
    return "all" if stage == 2 or reduces_always else "parts"


def _reference_sums(case: Case) -> Fp32Sums:
    """Returns `_fp32_sums` on the case's device: the backends of accelerators sum in the format that travels.

    Between replicas fp32 travels: in the hybrid without ZeRO, and under FSDP with NO_SHARD or HYBRID_SHARD. Of the
    latter, which sums in both ways, the one process takes fp32.
    """
    sums = _fp32_sums(case)
    arguments = case.plugin_arguments
    travels_in_fp32 = case.precision == "fsdp_bf16_fp32_reduce" or arguments.get("communication_dtype") is torch.float32
    is_without_zero = case.plugin == "hybrid_parallel" and arguments.get("zero_stage", 0) == 0
    has_replicas = str(arguments.get("sharding_strategy")).startswith(("NO_SHARD", "HYBRID"))
    if case.device == "cpu" or travels_in_fp32 or is_without_zero or has_replicas:
        return sums
    on_accelerators: dict[Fp32Sums, Fp32Sums] = {"all": "microbatches", "parts": "none, by parts", "none": "none"}
    return on_accelerators[sums]


def train_parallel(settings: dict[str, Any]) -> Record:
    """Trains on this rank through the booster; runs on every rank."""
    from booster.comm import use_shared_memory

    case = Case(**settings)
    use_shared_memory(None if case.uses_shared_memory else False)
    try:
        return _train(case)
    finally:
        use_shared_memory(None)


def _make_own_optimizer(name: str, groups: list) -> torch.optim.Optimizer:
    if name != "hybrid_adam":
        return make_optimizer(name, groups)
    from booster.optim import HybridAdam

    return HybridAdam(groups, lr=1e-2, eps=1e-3, weight_decay=0.01)  # what `make_optimizer` makes for one process


def _train(case: Case) -> Record:
    from booster.pytree import map_tensors

    entry = case.entry
    booster = make_booster(case, entry)
    raw = WholeBatches(entry).build() if case.is_pipelined else entry.build()
    model, optimizer, *_ = booster.boost(raw, _make_own_optimizer(case.optimizer, entry.param_groups(raw)))
    record = Record()
    size, rank = booster.plugin.dp_size, booster.plugin.dp_rank
    assert size == case.num_data_parts, f"{size} parts of the data under {case}"
    for step in range(case.steps):
        loss_sum = 0.0
        for index in range(case.accumulation):
            batch = entry.make_batch(step * case.accumulation + index, case.samples_per_rank * size)
            own = map_tensors(lambda tensor: tensor.to(booster.device), split_batch(batch, rank, size))
            loss_sum += _micro_step(booster, case, entry, model, optimizer, own, index)
        record.losses.append(_mean_over_ranks(loss_sum / case.accumulation))
        if case.synchronize != "accumulate":
            record.norms.append(float(booster.clip_grad_norm_(optimizer, case.max_norm)))
            optimizer.step()
            optimizer.zero_grad()
        else:
            record.norms.append(optimizer.get_grad_norm())
    if case.plugin == "hybrid_parallel":
        record.slices, record.tied_names = copied_slices(model.tensor_slices()), model.tied_names()
    else:
        record.weights = {name: tensor.detach().clone().cpu() for name, tensor in model.state_dict().items()}
    if case.save_to is not None:
        booster.save_model(model, case.save_to, shard=True)
    return record


def _micro_step(booster, case: Case, entry, model, optimizer, batch, index: int) -> float:
    is_last = index == case.accumulation - 1
    if case.synchronize == "accumulate":
        with booster.accumulate(model, optimizer, case.accumulation):
            loss = _backward(booster, case, entry, model, optimizer, batch, 1)
            booster.clip_grad_norm_(optimizer, case.max_norm)
            optimizer.step()
            optimizer.zero_grad()
        return loss
    skip = case.synchronize == "no_sync" and not is_last
    with booster.no_sync(model, optimizer) if skip else nullcontext():
        return _backward(booster, case, entry, model, optimizer, batch, case.accumulation)


def _backward(booster, case: Case, entry, model, optimizer, batch, divisor: int) -> float:
    """Adds the gradient of a part of the batch's loss; returns the loss."""
    if not case.is_pipelined:
        loss = entry.loss(model, batch)
        booster.backward(loss / divisor, optimizer)
        return float(loss.detach())
    whole = WholeBatches(entry)
    fed = whole.feed(batch)
    num_items = whole.num_samples(fed) if case.counts_items else None

    def weighted(outputs, inputs):
        loss = whole.criterion(outputs, inputs)
        return loss / divisor if num_items is None else loss * whole.num_samples(inputs)

    found = float(booster.execute_pipeline(iter([fed]), model, weighted, optimizer, num_items=num_items)["loss"])
    return found * divisor if num_items is None else found / num_items


def make_booster(case: Case, entry):
    from booster import Booster
    from booster.registry import plugin_from_name

    if case.plugin is None:
        return Booster(device="cpu", mixed_precision=make_precision(case.precision))
    arguments = dict(case.plugin_arguments)
    if case.plugin == "torch_ddp":
        from booster.plugins import TorchDDPPlugin

        arguments.setdefault("find_unused_parameters", entry.uses_unused_parameters)
        return Booster(plugin=TorchDDPPlugin(**arguments), mixed_precision=make_precision(case.precision))
    if case.plugin == "low_level_zero":
        from booster.plugins import LowLevelZeroPlugin

        if case.precision == "fp16":
            arguments.setdefault("initial_scale", 2**10)  # of oracles.serial_training.HalfLoop: nothing overflows
        return Booster(plugin=LowLevelZeroPlugin(precision=case.precision or "fp32", **arguments))
    if case.plugin == "gemini":
        from booster.plugins import GeminiPlugin

        if case.precision == "fp16":
            arguments.setdefault("initial_scale", 2**10)
        if case.precision is not None:
            arguments.setdefault("force_outputs_fp32", True)
        arguments.setdefault("chunk_config_dict", {"chunk_size": 512})  # several chunks in the zoo's small models
        return Booster(plugin=GeminiPlugin(precision=case.precision or "fp32", **arguments))
    if case.plugin == "hybrid_parallel":
        return make_hybrid_booster(case, arguments)
    if case.plugin == "torch_fsdp":
        return make_fsdp_booster(case, arguments)
    assert not arguments, f"say here how {case.plugin} takes {arguments}"
    return Booster(plugin=plugin_from_name(case.plugin), mixed_precision=make_precision(case.precision))


def make_hybrid_booster(case: Case, arguments: dict[str, Any]):
    from booster import Booster
    from booster.plugins.hybrid_parallel.plugin import HybridParallelPlugin

    if case.precision == "fp16":
        arguments.setdefault("initial_scale", 2**10)
    # Several buckets in the zoo's small models.
    arguments.setdefault("zero_bucket_size_in_m", 0.004)
    arguments.setdefault("ddp_bucket_cap_mb", 0.004)
    return Booster(plugin=HybridParallelPlugin(precision=case.precision or "fp32", **arguments))


def make_fsdp_booster(case: Case, arguments: dict[str, Any]):
    from booster import Booster
    from booster.plugins import TorchFSDPPlugin

    if case.precision not in FSDP_DTYPES:
        return Booster(plugin=TorchFSDPPlugin(**arguments), mixed_precision=make_precision(case.precision))
    if case.precision == "fsdp_fp16":
        arguments.setdefault("initial_scale", 2**10)  # of oracles.serial_training.HalfLoop: nothing overflows
    return Booster(plugin=TorchFSDPPlugin(mixed_precision=_fsdp_precision(case), **arguments))


def _fsdp_precision(case: Case):
    from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

    param_dtype, reduce_dtype = FSDP_DTYPES[case.precision]
    if case.model in NEEDS_CAST_BUFFERS:
        return MixedPrecision(param_dtype=param_dtype, reduce_dtype=reduce_dtype, buffer_dtype=param_dtype)
    return MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype, output_dtype=torch.float32)


def make_precision(name: str | None):
    """Returns the object for a name; scaled formats start low enough that no step overflows."""
    from booster import (
        BF16MixedPrecision,
        FP8MixedPrecision,
        FP16ApexMixedPrecision,
        FP16NaiveMixedPrecision,
        FP16TorchMixedPrecision,
    )

    makers = {
        "bf16": BF16MixedPrecision,
        "fp8": FP8MixedPrecision,
        "fp8_rowwise": lambda: FP8MixedPrecision(recipe="rowwise"),
        "fp16": lambda: FP16TorchMixedPrecision(init_scale=2**8),
        "fp16_naive": lambda: FP16NaiveMixedPrecision(initial_scale=2**10),
        "fp16_apex_o1": lambda: FP16ApexMixedPrecision(opt_level="O1", loss_scale=2**8),
        "fp16_apex_o2": lambda: FP16ApexMixedPrecision(opt_level="O2", loss_scale=2**10),
    }
    return None if name is None else makers[name]()


def _mean_over_ranks(value: float) -> float:
    from booster.comm import collective_device

    if not dist.is_initialized():
        return value
    total = torch.tensor(value, dtype=torch.float64, device=collective_device())
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()
