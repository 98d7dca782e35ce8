"""Data parallelism by torch's own DistributedDataParallel: every rank holds the whole model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from booster.comm import group_size, patience
from booster.comm.counter import record
from booster.comm.waiting import Place, failures_named
from booster.data import shard_dataloader
from booster.errors import ConfigError
from booster.estimate.replicas import replica_memory
from booster.interface import Boosted, MemoryQuestion, ModelWrapper, OptimizerWrapper, RankMemory
from booster.mixed_precision import mixed_precision_names
from booster.phases import observers, spend_rest_of
from booster.placement import make_replicas_equal, move_to_device, require_values
from booster.plugins.distributed_plugin import DistributedPlugin
from booster.plugins.sharding.checks import check_flag, is_number
from booster.plugins.sync_batch_norm import convert_batch_norm
from booster.tensor_tree import map_tensors

__all__ = ["TorchDDPPlugin"]

# torch 2.13 renamed the argument, and warns at the old name. What it does before training, place() does in any case.
_SIGNATURE = inspect.signature(DistributedDataParallel.__init__).parameters
_BROADCAST_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _SIGNATURE else "broadcast_buffers"

# What torch's reducer does, in the words of an error about a lost rank.
_AVERAGING = "averaging of gradients"
_GIVING_BUFFERS = "broadcast of buffers"


class TorchDDPPlugin(DistributedPlugin):
    """Every rank holds the whole model and optimizer; gradients are averaged while backward runs.

    Memory per rank: parameters, gradients and optimizer states in full. Bytes sent per rank and step: 2(P-1)/P of the
    gradients. Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.

    Collective: every rank must make it, with the same arguments.

    Args:
        broadcast_buffers: Give all ranks the first rank's buffers before each forward.
        bucket_cap_mb: Gradients are summed in buckets of this many MiB.
        find_unused_parameters: Needed where a step may leave some parameters out on some rank.
        check_reduction: Kept for callers of older versions; torch's DistributedDataParallel ignores it.
        gradient_as_bucket_view: Gradients are views of the buckets: saves one copy of them.
        static_graph: The same parameters are used, in the same order, in every step.
        sync_batch_norm: Batch normalisation uses the statistics of all ranks' batches, as one process would.

    Raises:
        ConfigError: Before `launch`, or with a bucket size below zero; on all ranks if on any.
        DesyncError: The ranks' arguments differ.
    """

    @patience("setup")
    def __init__(
        self,
        broadcast_buffers: bool = True,
        bucket_cap_mb: float = 25,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        *,
        sync_batch_norm: bool = True,
    ) -> None:
        super().__init__()
        self._ddp_arguments: dict[str, Any] = {
            _BROADCAST_BUFFERS: broadcast_buffers,
            "bucket_cap_mb": bucket_cap_mb,
            "find_unused_parameters": find_unused_parameters,
            "check_reduction": check_reduction,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "static_graph": static_graph,
        }
        self._sync_batch_norm = sync_batch_norm
        self._agree(self._check_arguments)

    def _check_arguments(self) -> None:
        bucket_cap_mb = self._ddp_arguments["bucket_cap_mb"]
        if not is_number(bucket_cap_mb) or not bucket_cap_mb > 0:
            raise ConfigError(
                f"bucket_cap_mb={bucket_cap_mb!r} holds no gradient: give a size in MiB above 0, such as 25"
            )
        for name, value in self._ddp_arguments.items():
            if name != "bucket_cap_mb":
                check_flag("broadcast_buffers" if name == _BROADCAST_BUFFERS else name, value)
        check_flag("sync_batch_norm", self._sync_batch_norm)

    def supported_precisions(self) -> list[str]:
        return ["fp32", *mixed_precision_names()]

    def control_precision(self) -> bool:
        return False

    def agreement_facts(self) -> list[str]:
        arguments = self._ddp_arguments | {"sync_batch_norm": self._sync_batch_norm}
        return [f"{name}={value!r}" for name, value in arguments.items()]

    def check(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        require_values(model)

    def place(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        move_to_device(model, optimizer, self._device)
        make_replicas_equal(model)
        if self._sync_batch_norm and self.dp_size > 1:
            convert_batch_norm(model, self._device)

    def configure(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        criterion: Callable[..., Any] | None = None,
        dataloader: DataLoader[Any] | None = None,
        lr_scheduler: LRScheduler | None = None,
    ) -> Boosted:
        is_primary = self.dp_rank == 0
        boosted = ModelWrapper(model, self._distributed(model), is_primary=is_primary)
        wrapped = None if optimizer is None else _ReplicasOptimizer(optimizer, boosted, is_primary=is_primary)
        if dataloader is not None:
            dataloader = shard_dataloader(dataloader, dp_rank=self.dp_rank, dp_size=self.dp_size)
        return boosted, wrapped, criterion, dataloader, lr_scheduler

    def _distributed(self, model: nn.Module) -> nn.Module:
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return model  # a teacher: nothing to average, and DistributedDataParallel refuses it
        device_ids = None if self._device.type == "cpu" else [self._device]
        with _logger_that_survives_detail():
            # place() has compared and broadcast the weights already, in the precision they had then.
            return _WithFixedBuckets(model, device_ids=device_ids, init_sync=False, **self._ddp_arguments)

    def no_sync(
        self, model: ModelWrapper | None = None, optimizer: OptimizerWrapper | None = None
    ) -> AbstractContextManager[None]:
        if model is None:
            raise ConfigError("no_sync() was called without a model: write booster.no_sync(model, optimizer)")
        replicas = model.forward_module
        if not isinstance(replicas, _WithFixedBuckets):
            return nullcontext()
        if replicas.static_graph and not replicas.has_synchronized:
            # torch learns the static graph in a backward that synchronizes, and fails without one. Averaging the first
            # micro-batch's gradients once more than needed leaves their average as it is.
            return nullcontext()
        return replicas.no_sync()

    def estimate_memory(self, question: MemoryQuestion) -> RankMemory:
        size = self.dp_size
        averaged = question.activations().gradients
        return replica_memory(
            question,
            bucket_bytes=averaged,
            sent=2 * (size - 1) * averaged // size,
            views=bool(self._ddp_arguments["gradient_as_bucket_view"]),
        )


class _ReplicasOptimizer(OptimizerWrapper):
    """The optimizer of replicas, whose gradients torch averages in backward."""

    _num_backwards = 0

    def _collecting_gradients(self) -> AbstractContextManager[None]:
        if self.data_parallel_group is None and group_size() == 1:
            return nullcontext()
        self._num_backwards += 1
        return failures_named(Place(_AVERAGING, self._num_backwards), self.data_parallel_group)


class _WithFixedBuckets(DistributedDataParallel):
    """DistributedDataParallel whose buckets are the same from the first step on.

    torch's own measures in the first step in which order gradients arrive, and forms its buckets anew. Which place an
    element has in its bucket decides in which order three or more ranks sum it: so the first step after a restart would
    sum in another order than the same step of the run that was never stopped. These buckets are formed once, last
    parameter first, which is the order in which backward reaches the layers of most models.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.has_synchronized = False
        self._num_forwards = 0
        # Where any parameter may stay unused torch forms no new buckets.
        if not self.find_unused_parameters and not self.static_graph:
            self.reducer._push_all_rebuilt_params()
            self.reducer._rebuild_buckets()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.has_synchronized |= self.require_backward_grad_sync and torch.is_grad_enabled()
        outputs = super().forward(*args, **kwargs)
        if self.require_backward_grad_sync and torch.is_grad_enabled() and observers():
            self._have_the_wait_seen(outputs)
        return outputs

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Gives all ranks the first rank's buffers, and has a lost rank named."""
        self._num_forwards += 1
        with failures_named(Place(_GIVING_BUFFERS, self._num_forwards), self.process_group):
            return super()._pre_forward(*inputs, **kwargs)

    def _have_the_wait_seen(self, outputs: Any) -> None:
        """Has the end of backward, in which torch waits for the sums over the ranks, count as communication."""
        differentiable: list[torch.Tensor] = []
        map_tensors(lambda one: differentiable.append(one) if one.requires_grad else None, outputs)
        if differentiable:
            differentiable[0].register_hook(self._queue_behind_the_graph)

    def _queue_behind_the_graph(self, _: torch.Tensor) -> None:
        # Called before the reducer hears of any gradient: the engine then runs this before what the reducer queues.
        torch.autograd.Variable._execution_engine.queue_callback(self._begin_to_wait)  # type: ignore[attr-defined]

    def _begin_to_wait(self) -> None:
        volume = 2 * (group_size() - 1) * sum(one.nbytes for one in self.parameters() if one.requires_grad)
        record("all_reduce", sent=volume // group_size(), received=volume // group_size())
        spend_rest_of("backward", "communication")

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        parameters, expects_sparse = super()._build_params_for_reducer()
        return parameters[::-1], expects_sparse[::-1]


class _LoggerWithoutConstruction(dist.Logger):  # type: ignore[name-defined, misc]
    def set_construction_data_and_log(self, *data: Any) -> None:
        """Leaves out a statistic about the construction."""


@contextmanager
def _logger_that_survives_detail() -> Iterator[None]:
    """Keeps TORCH_DISTRIBUTED_DEBUG=DETAIL from ending the process.

    While DistributedDataParallel is constructed, torch's C++ logger casts the group to ProcessGroupGloo without asking.
    DETAIL wraps the group in another class, and the process dies of SIGSEGV (seen in torch 2.13).
    """
    original = dist.Logger  # type: ignore[attr-defined]
    if dist.get_debug_level() == dist.DebugLevel.DETAIL:  # type: ignore[attr-defined]
        dist.Logger = _LoggerWithoutConstruction  # type: ignore[attr-defined]
    try:
        yield
    finally:
        dist.Logger = original  # type: ignore[attr-defined]
