"""Pipeline runtime: executes the schedule's actions of one stage for a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import GradientEdge
from torch.distributed import DebugLevel, get_debug_level  # type: ignore[attr-defined]  # no __all__ there

from booster.comm import (
    abort_groups,
    all_reduce_sum,
    collective_device,
    is_fake_world,
    receive_tensor,
    report_failure,
    send_tensor,
)
from booster.core.accumulation import check_scalar_loss
from booster.core.model_wrapper import batch_on_device, forward_arguments
from booster.errors import ConfigError, RankFailedError, add_note
from booster.fault_tolerance.progress import Phase, current_thread, in_phase
from booster.logger import log_rank_zero
from booster.plugins.low_level_zero.optimizer import ZeroOptimizer
from booster.pytree import iter_tensors, map_tensors
from booster.rng_state import fork_rng_state, get_rng_state, set_rng_state

from .mesh import AXES, HybridMesh
from .model import HybridModel
from .pipeline_parallel.config import PipelineArguments
from .pipeline_parallel.microbatch import (
    BatchConsistency,
    Microbatch,
    NextBatch,
    PipelineRun,
    fetch,
    join_outputs,
    split_batch,
)
from .pipeline_parallel.p2p import LinkPeer, ReceivedActivation, StageP2P
from .pipeline_parallel.schedules import ActionKind, StageAction
from .pipeline_parallel.schedules.communication import stages_by_position
from .pipeline_parallel.stage_module import StageModel
from .pipeline_parallel.stage_partition.stage_plan import StagePartition
from .pipeline_parallel.trial_forward import TrialForward
from .sequence_parallel.recorded_outputs import captures
from .tensor_parallel.deferred_wgrad import DeferredWeightGrads

_KINDS = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.BACKWARD_WEIGHT: "weight gradients",
}


@dataclass(slots=True)
class _InFlightMicrobatch:
    """State of a microbatch between its forward and its backward through a model chunk."""

    received: ReceivedActivation | None
    sent: Sequence[GradientEdge] | None
    loss: torch.Tensor | None


class PipelineRuntime:
    """Runs the stage of this rank.

    Args:
        model: The boosted model.
        stage_model: Stage model.
        arguments: Pipeline arguments of the plugin.
        mesh: Mesh of the ranks, whose groups are all aborted if this rank fails.
        device: Compute device of the stage.
        weight_gradients: Deferred weight gradients, or None if the schedule has none.

    Collective: over the world.
    """

    def __init__(
        self,
        model: HybridModel,
        stage_model: StageModel,
        arguments: PipelineArguments,
        mesh: HybridMesh,
        device: torch.device,
        weight_gradients: DeferredWeightGrads | None,
    ) -> None:
        self._model = model
        self._stage_model = stage_model
        self._arguments = arguments
        self._weight_grads = weight_gradients
        self._stage = mesh.rank("pp")
        self._stage_group = mesh.group("pp")
        self._device = device
        self._groups = mesh.groups
        is_ordered = _is_ordered(device)
        self._p2p = StageP2P(
            stage_model.partition,
            self._stage,
            _link_ends(mesh, stage_model.partition, is_ordered=is_ordered),
            device,
            caches_specs=arguments.enable_metadata_cache,
            is_ordered=is_ordered,
        )
        self._consistency = BatchConsistency(mesh.control_group(*AXES), mesh.rank("dp"))
        self._checked: set[tuple[int, bool]] = set()
        self._trial = TrialForward(model.module, stage_model.context, stage_model.placeholders, device)
        self._trainable: tuple[bool, ...] = ()
        self._failure: str | None = None
        self._has_reported = False

    def run(
        self,
        data_iter: Iterator[Any],
        criterion: Callable[[Any, Any], torch.Tensor],
        optimizer: ZeroOptimizer | None,
        *,
        return_loss: bool,
        return_outputs: bool,
        num_items: float | None,
    ) -> dict[str, Any]:
        """Run all stages for the next batch, as in `Booster.execute_pipeline`. Collective.

        Raises:
            StopIteration: The iterators of all ranks are exhausted.
            DesyncError: The ranks have different batches, or only some have one.
            RankFailedError: Another stage has failed; the message has its position, if known.
        """
        if self._failure is not None:
            raise ConfigError(
                f"the pipeline has failed before ({self._failure}), and its process groups were aborted:"
                " end all processes and start again from a checkpoint"
            )
        self._model.sync_rng_state()
        fetched = fetch(data_iter)
        microbatches: list[Microbatch] = []
        if fetched.error is None and not fetched.has_ended:
            try:
                microbatches = self._split(fetched.batch)
            except ConfigError as error:  # raised on all ranks by the consistency check
                fetched = NextBatch(error=error)
        trains = optimizer is not None
        options = (self._model.training, trains, return_loss, return_outputs, num_items is not None)
        signatures = [(one.signature, self._model.training) for one in microbatches]
        trainable = tuple(parameter.requires_grad for parameter in self._model.module.parameters())
        is_stale = trainable != self._trainable or self._p2p.is_cache_full
        is_any_stale = self._consistency.check(fetched, signatures, options, changed=is_stale)
        self._trainable = trainable  # not before: the check raises at the end of the data
        if is_any_stale:
            self._p2p.clear_cache()
            self._checked.clear()
        microbatches = [replace(one, batch=batch_on_device(one.batch, self._device)) for one in microbatches]
        self._model.begin_batch()
        if optimizer is not None:
            for observer in current_thread.state.observers:
                observer.on_forward(self._model, *forward_arguments(fetched.batch))
        run = PipelineRun(len(microbatches))
        self._model.last_pipeline_run = run
        self._microbatches, self._criterion, self._current = microbatches, criterion, run
        self._keeps_outputs = return_outputs
        total = sum(one.num_samples for one in microbatches)
        self._loss_weights = [1.0 if num_items is not None else one.num_samples / total for one in microbatches]
        self._scale = 1.0 if optimizer is None or optimizer.loss_scaler is None else optimizer.loss_scaler.scale
        self._live: dict[tuple[int, int], _InFlightMicrobatch] = {}
        steps = self._p2p.begin(signatures, with_gradients=trains)
        with self._report_failures(), self._fork_rng_per_stage():
            trained = optimizer and optimizer.accumulate_microbatches(num_items, len(microbatches))
            with trained or torch.no_grad() as start_reducing:
                self._execute(steps, start_reducing)
            loss = self._loss(run) if return_loss else None
        self._stage_model.context.buffers.synchronize(self._stage_group)
        if optimizer is not None:
            for observer in current_thread.state.observers:
                if run.losses:
                    observer.on_loss(optimizer, sum(run.losses), num_items)
                else:
                    observer.on_remote_loss(optimizer)
        outputs = self._outputs(run) if return_outputs else None
        self._microbatches = []
        return {"loss": loss, "outputs": outputs}

    def _split(self, batch: Any) -> list[Microbatch]:
        """Return the microbatches; log a warning if the first batch has fewer samples than `num_microbatches`."""
        wanted, size = self._arguments.num_microbatches, self._arguments.microbatch_size
        _check_no_layer_outputs(self._model.module, batch)
        found = split_batch(batch, num_microbatches=wanted, microbatch_size=size)
        number = len(found)
        if not self._has_reported and wanted is not None and number < wanted:
            log_rank_zero(
                f"a batch of {number} sample(s) makes {number} microbatch(es), not num_microbatches={wanted}, which"
                " enlarges the pipeline bubble: give larger batches, or fewer microbatches"
            )
        self._has_reported = True
        return found

    @contextmanager
    def _fork_rng_per_stage(self) -> Iterator[None]:
        """Fork the RNG state per stage, and restore the common state afterwards.

        Stages draw different amounts of random numbers, but the data may depend on a common state.
        """
        if is_fake_world():
            yield
            return
        torch.rand(())  # advances the common state, for the next batch
        common = get_rng_state(self._device)
        set_rng_state(fork_rng_state(common, self._stage), self._device)
        try:
            yield
        finally:
            set_rng_state(common, self._device)

    # Actions.

    def _execute(self, steps: Sequence[StageAction], start_reducing: Callable[[], None] | None) -> None:
        last = len(self._microbatches) - 1
        receiving = [one for one in steps if one.receives is not None and one.receives.sender != self._stage]
        self._last_receiving, self._start_reducing = receiving[-1] if receiving else None, start_reducing
        for index, step in enumerate(steps):
            action = step.action
            self._position = f"{_KINDS[action.kind]} of microbatch {action.microbatch} (of 0 to {last})"
            self._p2p.post_recvs(index)
            if action.kind is ActionKind.FORWARD:
                self._forward(step)
            elif action.kind is ActionKind.BACKWARD:
                self._backward(step)
            elif self._weight_grads is not None:
                with Phase("backward"):
                    self._weight_grads.compute(_key(step))
        self._position = f"when its microbatches (0 to {last}) were done"
        self._p2p.wait()

    @in_phase("forward")
    def _forward(self, step: StageAction) -> None:
        chunk = self._stage_model.chunks[step.action.chunk]
        microbatch = self._microbatches[step.action.microbatch]
        received = None if step.receives is None else self._p2p.recv_output(step.receives)
        self._reduce_if_last(step)
        check = (chunk.position, self._model.training)
        # The first forward of a chunk needs a graph, which `check_independent` examines.
        with nullcontext() if check in self._checked else torch.enable_grad():
            activation = None if received is None else received.tree
            if check in self._checked or activation is None or not self._trial.is_needed:
                boundary, outputs = self._model.run_chunk(chunk, activation, microbatch.batch)
            else:
                run = partial(self._model.run_chunk, chunk)
                boundary, outputs = self._trial.run(run, activation, microbatch.batch)
            loss = None if boundary is not None else self._loss_of(outputs, step.action.microbatch)
            if check not in self._checked:
                results = [loss] if loss is not None else []
                results += iter_tensors(outputs if boundary is None else boundary)
                self._stage_model.placeholders.check_independent(results)
                self._checked.add(check)
        trains = torch.is_grad_enabled()
        live = _InFlightMicrobatch(received if trains else None, None, loss if trains else None)
        if boundary is not None:
            assert step.sends is not None
            sent = boundary if trains else map_tensors(torch.Tensor.detach, boundary)
            live.sent = self._p2p.send_output(step.sends, sent)
        elif self._keeps_outputs:
            self._current.outputs[step.action.microbatch] = map_tensors(torch.Tensor.detach, outputs)
        if trains:
            self._live[_key(step)] = live
            self._current.peak_live = max(self._current.peak_live, len(self._live))

    def _loss_of(self, outputs: Any, microbatch: int) -> torch.Tensor:
        try:
            loss = self._criterion(outputs, self._microbatches[microbatch].batch)
        except Exception as error:
            add_note(error, "It was raised in the criterion, which is called with (outputs, batch) of a microbatch.")
            raise
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            what = f"tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ConfigError(
                f"the criterion returned a {what} for a microbatch, but backward needs a scalar tensor: return a loss"
                " such as F.cross_entropy(...), or loss.mean()"
            )
        self._current.losses.append(loss.detach().double() * self._loss_weights[microbatch])
        return loss

    @in_phase("backward")
    def _backward(self, step: StageAction) -> None:
        live = self._live.pop(_key(step))
        with nullcontext() if self._weight_grads is None else self._weight_grads.deferring(_key(step)):
            if live.loss is not None:
                check_scalar_loss(live.loss)
                (live.loss * (self._loss_weights[step.action.microbatch] * self._scale)).backward()
            elif live.sent is not None and step.receives is not None:
                gradients = self._p2p.recv_gradients(step.receives)
                self._reduce_if_last(step)
                if live.sent:
                    torch.autograd.backward(live.sent, gradients)
        if step.sends is not None:
            assert live.received is not None
            self._p2p.send_gradients(step.sends, live.received)

    def _reduce_if_last(self, step: StageAction) -> None:
        """Reduce gradients over data-parallel ranks while the rest of the stage's actions run, which receive nothing.

        Before that, this rank could wait for one that waits, by way of other stages, for it.
        """
        if step is self._last_receiving and self._start_reducing is not None:
            self._start_reducing()

    # Results.

    def _loss(self, run: PipelineRun) -> torch.Tensor | None:
        is_last = any(chunk.is_last for chunk in self._stage_model.chunks)
        if not is_last and not self._arguments.broadcast_loss:
            return None
        # Not a number, for which the host would wait for the device.
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for loss in run.losses:
            total = total + loss.to(self._device)
        if self._arguments.broadcast_loss:
            total = all_reduce_sum(total.reshape(1).to(collective_device(self._stage_group)), self._stage_group)
        return total.reshape(()).to(self._device, torch.float32)

    def _outputs(self, run: PipelineRun) -> Any:
        if not run.outputs:
            return None
        ordered = [run.outputs[index] for index in range(run.num_microbatches)]
        run.outputs = {}
        return join_outputs(ordered, [one.num_samples for one in self._microbatches])

    # Failures.

    @contextmanager
    def _report_failures(self) -> Iterator[None]:
        """Report a failure of this rank, and abort its groups, so that its peers do not wait until the timeout."""
        self._position = "before its first microbatch"
        try:
            yield
        except BaseException as error:
            where = f"pipeline stage {self._stage}, {self._position}"
            self._failure = f"{where}: {type(error).__name__}"
            self._live.clear()
            if self._weight_grads is not None:
                self._weight_grads.discard()
            if not isinstance(error, RankFailedError):
                report_failure(f"{where}: {type(error).__name__}: {error}")
                add_note(error, f"This happened in {where}.")
            abort_groups(self._groups(), f"{where}: {error}")
            if isinstance(error, RankFailedError):
                raise RankFailedError(f"{where}: {error}") from error
            raise


def _key(step: StageAction) -> tuple[int, int]:
    return step.action.microbatch, step.action.chunk


def _check_no_layer_outputs(model: nn.Module, batch: Any) -> None:
    """Raise if a transformers model is asked for outputs of every layer that it does not capture by hooks.

    Those that it captures travel from stage to stage.
    """
    for name in ("output_hidden_states", "output_attentions", "output_router_logits"):
        given = batch.get(name) if isinstance(batch, Mapping) else None
        wanted = getattr(getattr(model, "config", None), name, False) if given is None else given
        if not isinstance(wanted, torch.Tensor) and wanted and not captures(model, name.removeprefix("output_")):
            raise ConfigError(
                f"{name}={wanted!r} asks for outputs of every layer, but with pp_size > 1 each stage has only its own"
                f" layers, and {type(model).__name__} does not capture them by transformers' hooks: leave it out of the"
                f" batch, and set model.config.{name} = False"
            )


def _is_ordered(device: torch.device) -> bool:
    """Return whether links need a common order: gloo matches messages by their tags."""
    return device.type != "cpu"


def _link_ends(mesh: HybridMesh, partition: StagePartition, *, is_ordered: bool) -> LinkPeer:
    """Return the groups of links; see Note [Ordered links].

    On the CPU they need a group of their own, as torch counts the operations of a group: messages of gloo by its tags,
    all operations in TORCH_DISTRIBUTED_DEBUG=DETAIL.
    """
    stage, stages = mesh.rank("pp"), range(partition.num_stages)
    earlier = later = mesh.subgroup("pp", stages)
    if is_ordered:
        later = mesh.subgroup("pp", stages) if get_debug_level() == DebugLevel.DETAIL else mesh.group("pp")

    def ends(sender: int, receiver: int) -> tuple[dist.ProcessGroup | None, int]:
        return later if sender < receiver else earlier, sender if stage == receiver else receiver

    if is_ordered and not is_fake_world():
        _connect(ends, stage, partition)
    return ends


def _connect(ends: LinkPeer, stage: int, partition: StagePartition) -> None:
    """Send a number over each link in a common order: nccl connects two ranks at their first message."""
    stages = stages_by_position(partition.schedule, partition.num_stages, partition.num_chunks)
    pairs = {pair for pair in pairwise(stages) if pair[0] != pair[1]}
    for sender, receiver in sorted(pairs | {(second, first) for first, second in pairs}):
        group, peer = ends(sender, receiver)
        if stage == sender:
            send_tensor(torch.zeros(1), peer, group)
        elif stage == receiver:
            receive_tensor(peer, group)
