"""Forward of one model chunk by the model's own forward.

Note [Chunk forward]
Every stage calls the model's own forward with its microbatch. Before the stage's first layer, layers of earlier stages
return the received activation, and modules of other stages return placeholder tensors of the right shape, so that the
code around them runs unchanged. From the stage's first layer on the run is *live*: its values are used. After the
stage's last layer the forward is left by an exception with the layer's output. So a model needs no rewriting, only
layers that run in sequence. Violations (layers in another order or skipped, values that bypass the layers) are
detected, here and in `placeholders`.

Synchronization of persistent buffers that several pipeline stages hold.

Note [Shared buffers]
Modules without parameters outside of the layers are on every stage, as are the buffers of modules that contain layers,
because every stage runs the model's own forward. Their actual values are computed on one stage, in a *live* run (see
Note [Chunk forward]): before the layers on the stage of the first chunk, after them on that of the last. Other stages
run the same code on placeholders, or do not reach it. So after each batch the stage that changed a buffer in a live run
broadcasts it. Only persistent buffers take part, as only they are model state. A buffer that several stages change
differently has no value that one process would have, and raises.
"""

from __future__ import annotations

import dis
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from booster.comm import all_gather_equal, broadcast
from booster.core.layer_stacks import subclass_of
from booster.core.model_wrapper import call_with_batch
from booster.errors import ConfigError
from booster.kernels.checksum import crc32
from booster.moe.loss import attach_auxiliary_loss, detach_auxiliary_losses
from booster.plugins.hybrid_parallel.sequence_parallel.layer_stack import note_full_length, noted_full_length
from booster.plugins.hybrid_parallel.sequence_parallel.recorded_outputs import captured_lists
from booster.pytree import map_first

from .stage_partition.stage_plan import ModelChunk, StagePartition, StagePlan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PersistentBuffer:
    """A persistent buffer of the full model.

    Attributes:
        names: All names, in model order.
        modules: Module that holds it under each name.
        stages: Stages that hold it, ascending.
        is_replicated: Whether all stages run the code that uses it; False if only one stage runs such a module.
    """

    names: tuple[str, ...]
    modules: tuple[nn.Module, ...]
    stages: tuple[int, ...]
    is_replicated: bool

    @property
    def tensor(self) -> torch.Tensor:
        """Current tensor, on a stage that holds it."""
        keys = [name.rpartition(".")[2] for name in self.names]
        found = (module._buffers.get(key) for module, key in zip(self.modules, keys, strict=True))
        return next(tensor for tensor in found if tensor is not None)


def persistent_buffers(model: nn.Module, partition: StagePartition) -> list[PersistentBuffer]:
    """Return the persistent buffers of a full model, tied ones once."""
    of_module = partition.module_stages(model)
    places: dict[int, list[tuple[str, nn.Module]]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                places.setdefault(id(buffer), []).append((f"{prefix}.{key}" if prefix else key, module))
    return [
        PersistentBuffer(
            names=tuple(name for name, _ in found),
            modules=tuple(module for _, module in found),
            stages=tuple(sorted({stage for _, module in found for stage in of_module[id(module)]})),
            is_replicated=all(len(partition.stages_of(name.rpartition(".")[0])) > 1 for name, _ in found),
        )
        for found in places.values()
    ]


class SharedBuffers:
    """Persistent buffers on several stages; see Note [Shared buffers].

    Args:
        buffers: All persistent buffers of the model, equal on all stages.
        stage: Index of this stage.
    """

    def __init__(self, buffers: Sequence[PersistentBuffer], stage: int) -> None:
        self._shared = [one for one in buffers if len(one.stages) > 1]
        self._held = [one for one in self._shared if stage in one.stages]
        self._changed: set[PersistentBuffer] = set()
        self._at_start: list[torch.Tensor] | None = None
        self._live_from: list[torch.Tensor] = []

    def begin_chunk(self, *, is_first: bool, is_computing: bool) -> None:
        """Start a chunk forward.

        Args:
            is_first: If True, it is the stage's first chunk in the model.
            is_computing: If True, the chunk computes from the start.
        """
        self._live_from = self._copies() if is_computing else []
        # The stage's first chunk has run the same code before the layers already.
        self._at_start = None if is_computing or is_first else self._copies()

    @torch.no_grad()
    def begin_live(self) -> None:
        """Start the live part of a chunk forward, and undo earlier changes of buffers."""
        for one, before in zip(self._held, self._at_start or (), strict=False):
            if _differ(one.tensor, before):
                one.tensor.copy_(before)
        self._live_from = self._copies()

    def end_chunk(self) -> None:
        """End a chunk forward, and record changed buffers."""
        for one, before in zip(self._held, self._live_from, strict=False):
            if _differ(one.tensor, before):
                self._changed.add(one)

    def synchronize(self, group: dist.ProcessGroup | None) -> None:
        """Broadcast the buffers that a stage changed since the last call. Collective over the stages.

        Raises:
            ConfigError: Several stages changed a buffer differently, or layers of several stages change a tied one.
        """
        if not self._shared:
            return
        changed, self._changed = self._changed, set()
        own = [
            [int(one in changed), crc32(_bytes(one.tensor).cpu().numpy().data) if one in changed else 0]
            for one in self._shared
        ]
        of_stages = all_gather_equal(torch.tensor([own]), group).tolist()
        for index, one in enumerate(self._shared):
            found = {stage: row[index][1] for stage, row in enumerate(of_stages) if row[index][0]}
            if not found:
                continue
            if len(set(found.values())) > 1 or not one.is_replicated:
                raise ConfigError(
                    f"the persistent buffer {' = '.join(map(repr, one.names))} is on the pipeline stages"
                    f" {', '.join(map(str, one.stages))} and was changed in a forward by {', '.join(map(str, found))}:"
                    " every stage would continue with another value, and none with that of one process. Give every"
                    " module a separate buffer, or register it with persistent=False if it is not part of the model's"
                    " state, or use pp_size=1"
                )
            broadcast([one.tensor], group, source=min(found))

    def _copies(self) -> list[torch.Tensor]:
        return [one.tensor.detach().clone() for one in self._held]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors differ bitwise, so that a nan equals itself."""
    return one.shape != other.shape or one.dtype != other.dtype or not torch.equal(_bytes(one), _bytes(other))


@dataclass(frozen=True, slots=True, eq=False)
class StageActivation:
    """Activation sent from one chunk to the next; see Note [Tree specs] for what it may hold.

    Attributes:
        output: Output of the last layer.
        skip_outputs: Outputs of complete modules that later chunks need, by module name.
        captured: Outputs of earlier layers that a model of transformers has captured, such as router logits, by name.
        auxiliary_loss: Auxiliary losses of earlier layers of `booster.moe`, if any.
        full_length: Tokens of the full sequence, if the output has this rank's only.
    """

    output: Any
    skip_outputs: Mapping[str, Any]
    captured: Mapping[str, list[Any]] = field(default_factory=dict)
    auxiliary_loss: torch.Tensor | None = None
    full_length: int | None = None


_CALL = nn.Module._call_impl.__code__


class ChunkDone(BaseException):
    """The last layer of a chunk has run. A BaseException, so that a model's `except Exception` does not catch it."""

    def __init__(self, output: Any) -> None:
        super().__init__("end of the model chunk's forward")
        self.output = output
        self.captured = {key: list(values) for key, values in captured_lists().items() if values}


class ChunkForward:
    """State of one chunk forward.

    Args:
        chunk: Model chunk.
        received: Activation from the previous chunk; None for the first one.

    Attributes:
        is_computing: Whether values computed now are used; see Note [Chunk forward].
        next_layer: Index of the first layer that may run next; conditional layers may be skipped.
        skip_outputs: Outputs of complete modules, by name.
    """

    def __init__(self, chunk: ModelChunk, received: StageActivation | None) -> None:
        self.chunk = chunk
        self.received = received
        self.is_computing = received is None
        self.next_layer = chunk.start
        self.skip_outputs: dict[str, Any] = {} if received is None else dict(received.skip_outputs)
        self._captured = {} if received is None else dict(received.captured)

    def skip_layer(self) -> Any:
        """Return the received activation in place of the output of a layer of an earlier chunk."""
        assert self.received is not None
        lists = captured_lists() if self._captured else {}
        for key, values in self._captured.items():
            lists[key].extend(values)
        self._captured = {}
        return self.received.output


@dataclass(eq=False)
class ChunkContext:
    """Context of the layers and placeholders of one model: the chunk forward in progress.

    Attributes:
        plan: Stage plan of the model.
        buffers: Persistent buffers that other stages hold as well.
        has_routers: Whether the model has routers of `booster.moe`, with auxiliary losses.
        run: Chunk forward in progress, or None.
        on_received: Called where the received activation enters the forward, behind code that runs on placeholders;
            optional.
    """

    plan: StagePlan
    buffers: SharedBuffers
    has_routers: bool = False
    run: ChunkForward | None = None
    on_received: Callable[[], None] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> ChunkContext:
        return ChunkContext(self.plan, SharedBuffers((), 0), self.has_routers)

    def require_run(self) -> ChunkForward:
        """Return the chunk forward in progress.

        Raises:
            ConfigError: The model was called directly.
        """
        if self.run is None:
            raise ConfigError(
                "the model was called directly, but this rank holds some of its layers only (pp_size > 1): write"
                " booster.execute_pipeline(data_iter, model, criterion, optimizer), which runs all stages"
            )
        return self.run


def run_chunk(
    model: nn.Module, context: ChunkContext, chunk: ModelChunk, received: StageActivation | None, batch: Any
) -> tuple[StageActivation | None, Any]:
    """Return the activation for the next chunk and None, or for the last chunk None and the model's outputs.

    Args:
        model: Stage model.
        context: Context of its layers.
        chunk: Chunk of this stage.
        received: Activation from the previous chunk.
        batch: The microbatch.

    Raises:
        ConfigError: Layers ran in another order than planned, or the last one did not run.
    """
    if received is not None and received.auxiliary_loss is not None:
        loss = received.auxiliary_loss
        received = replace(received, output=map_first(received.output, lambda one: attach_auxiliary_loss(one, loss)))
    if received is not None and received.full_length is not None:
        note_full_length(received.output, received.full_length)
    run = ChunkForward(chunk, received)
    context.run = run
    is_computing = run.is_computing or context.plan.sequence is not None
    context.buffers.begin_chunk(is_first=chunk.chunk == 0, is_computing=is_computing)
    try:
        if context.plan.sequence is not None:
            outputs = _run_sequence(model, context.plan.sequence, run, batch)
        else:
            outputs = call_with_batch(model, batch)
    except ChunkDone as finished:
        _call_always_called_hooks(finished)
        output, full_length = finished.output, noted_full_length(finished.output)
        losses: list[torch.Tensor | None] = []
        if context.has_routers:

            def detach(tensor: torch.Tensor) -> torch.Tensor:
                tensor, loss = detach_auxiliary_losses(tensor)
                losses.append(loss)
                return tensor

            output = map_first(output, detach)
        auxiliary_loss = losses[0] if losses else None
        return StageActivation(output, run.skip_outputs, finished.captured, auxiliary_loss, full_length), None
    finally:
        context.run = None
        context.buffers.end_chunk()
    if not chunk.is_last:
        raise ConfigError(
            f"the model's forward ended without {context.plan.layers[chunk.stop - 1]!r}, the last layer of a pipeline"
            " stage, whose output is sent on: it has to run in every forward. Turn layer dropping off (layerdrop=0), or"
            " choose num_layers_per_stage or split= so that a layer that always runs ends the stage"
        )
    return None, outputs


def _call_always_called_hooks(finished: ChunkDone) -> None:
    """Call the forward hooks with `always_call` of the modules that it has ended: torch does so for an `Exception`."""
    calls = [frame for frame, _ in traceback.walk_tb(finished.__traceback__) if frame.f_code is _CALL]
    for frame in reversed(calls):
        module: nn.Module = frame.f_locals["self"]
        args, kwargs = frame.f_locals["args"], frame.f_locals["kwargs"]
        for key in tuple(module._forward_hooks_always_called):
            given = (args, kwargs) if key in module._forward_hooks_with_kwargs else (args,)
            module._forward_hooks[key](module, *given, None)


def install_layer(module: nn.Module, index: int, context: ChunkContext) -> None:
    """Let a layer run only in its own chunk. In place, by a subclass set as its class."""
    _add_mixin(module, _Layer)
    module.__dict__["_pipeline_layer"] = (index, context)


def install_skip_output(module: nn.Module, name: str, complete_at: int, context: ChunkContext) -> None:
    """Let a module record its output for later chunks, or return the received one. In place.

    Args:
        module: Module such as the encoder of an encoder-decoder model.
        name: Name of the module.
        complete_at: Number of layers that run before its output is complete.
        context: Context of the model.
    """
    _add_mixin(module, _SkipOutput)
    module.__dict__["_pipeline_skip_output"] = (name, complete_at, context)


def forget_forward_attributes(module: nn.Module, name: str, reads_values: Callable[[], bool]) -> None:
    """Let a chunk's forward raise where it reads what the forward of another stage's module sets on it. In place.

    Args:
        module: Module of another stage; its submodules are treated alike.
        name: Its name.
        reads_values: Whether a read now is not one of a chunk's forward: it gives the value from before the first one.
    """
    for own_name, inner in module.named_modules():
        values = {key: inner.__dict__.pop(key) for key in _set_in_forward(type(inner)) & inner.__dict__.keys()}
        if values:
            _add_mixin(inner, _ElsewhereModule)
            full_name = f"{name}.{own_name}" if own_name else name
            inner.__dict__["_pipeline_elsewhere"] = (full_name, values, reads_values)


def _set_in_forward(module_class: type[nn.Module]) -> frozenset[str]:
    """Return the names of the attributes that a class's forward sets on the module."""
    names: set[str] = set()
    code = getattr(module_class.forward, "__code__", None)
    if code is not None and code.co_argcount > 0:
        loads_self = False
        for instruction in dis.get_instructions(code):
            if instruction.opname == "STORE_ATTR" and loads_self:
                names.add(instruction.argval)
            loads_self = instruction.opname.startswith("LOAD_FAST") and instruction.argval == code.co_varnames[0]
    return frozenset(names)


class _Layer(nn.Module):
    """Mixin of layers. Overrides `__call__` and not `forward`, so that hooks of skipped layers do not run."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        index, context = self.__dict__["_pipeline_layer"]
        run: ChunkForward = context.require_run()
        if index < run.chunk.start:
            if index == run.chunk.start - 1 and context.on_received is not None:
                context.on_received()
            return run.skip_layer()
        if not run.next_layer <= index < run.chunk.stop:
            before = context.plan.layers[run.next_layer - 1]
            raise ConfigError(
                f"the model ran {context.plan.layers[index]!r} after {before!r}, in another order than the pipeline's"
                " plan has it, or twice, or left out the last layer of a stage: layers run at most once each, in the"
                " order in which they are registered, and a stage's last one always. Turn layer dropping off"
                " (layerdrop=0), or give split= or execution_sequence= to say how your model runs"
            )
        if not run.is_computing:
            run.is_computing = True
            context.buffers.begin_live()
        output = super().__call__(*args, **kwargs)
        run.next_layer = index + 1
        if run.next_layer == run.chunk.stop and not run.chunk.is_last:
            raise ChunkDone(output)
        return output


class _ElsewhereModule(nn.Module):
    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            own_name, values, reads_values = self.__dict__["_pipeline_elsewhere"]
            if name not in values:
                raise
            if reads_values():
                return values[name]
            raise ConfigError(
                f"the model reads {name!r} of {own_name!r}, which its forward sets, and another pipeline stage runs:"
                " only the output of a layer travels from stage to stage. Let the layers add it up and hand it on with"
                " their output, or use booster.moe for losses of experts"
            ) from None


class _SkipOutput(nn.Module):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        name, complete_at, context = self.__dict__["_pipeline_skip_output"]
        run: ChunkForward = context.require_run()
        if run.chunk.start > complete_at:
            return run.skip_outputs[name]
        run.skip_outputs[name] = output = super().__call__(*args, **kwargs)
        return output


def _add_mixin(module: nn.Module, mixin: type[nn.Module]) -> None:
    if not isinstance(module, mixin):
        module.__class__ = subclass_of(type(module), "stage", mixin=mixin)


def _run_sequence(model: nn.Module, sequence: Sequence[str | Callable[..., Any]], run: ChunkForward, batch: Any) -> Any:
    """Run a chunk of an execution sequence, instead of the model's forward."""
    value = None if run.received is None else run.received.output
    takes_batch = run.chunk.is_first
    for index, steps in enumerate(_steps_by_layer(sequence)):
        if not run.chunk.start <= index < run.chunk.stop:
            continue
        run.next_layer = index + 1
        for step in steps:
            function = model.get_submodule(step) if isinstance(step, str) else step
            value = call_with_batch(function, batch) if takes_batch else function(value)
            takes_batch = False
    if not run.chunk.is_last:
        raise ChunkDone(value)
    return value


def _steps_by_layer(sequence: Sequence[str | Callable[..., Any]]) -> list[list[str | Callable[..., Any]]]:
    """Return the steps of each layer: its module and the functions after it; leading functions join the first."""
    found: list[list[str | Callable[..., Any]]] = [[]]
    for step in sequence:
        if isinstance(step, str) and any(isinstance(one, str) for one in found[-1]):
            found.append([])
        found[-1].append(step)
    return found
