"""Forward of one model chunk by the model's own forward.

Note [Chunk forward]
Every stage calls the model's own forward with its microbatch. Before the stage's first layer, layers of earlier stages
return the received activation, and modules of other stages return placeholder tensors of the right shape, so that the
code around them runs unchanged. From the stage's first layer on the run is *live*: its values are used. After the
stage's last layer the forward is left by an exception with the layer's output. So a model needs no rewriting, only
layers that run in sequence. Violations (layers in another order or skipped, values that bypass the layers) are
detected, here and in `placeholders`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from booster.errors import ConfigError
from booster.interface.batch_call import call_with_batch
from booster.plugins.hybrid_parallel.pipeline_parallel.stages.pieces import ModelChunk
from booster.plugins.hybrid_parallel.pipeline_parallel.stages.shared_buffers import SharedBuffers
from booster.plugins.hybrid_parallel.pipeline_parallel.stages.stage_plan import StagePlan

__all__ = ["ChunkContext", "ChunkForward", "StageActivation", "install_layer", "install_skip_output", "run_chunk"]


class StageActivation:
    """Activation sent from one chunk to the next.

    Attributes:
        output: Output of the last layer.
        carried: Outputs of complete modules that later chunks need, by module name.
    """

    def __init__(self, output: Any, carried: Mapping[str, Any]) -> None:
        self.output = output
        self.skip_outputs = dict(carried)

    def to_tree(self) -> dict[str, Any]:
        """Return the activation as containers."""
        return {"output": self.output, "carried": self.skip_outputs}

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> StageActivation:
        """Return the activation from the result of `to_tree`."""
        return cls(tree["output"], tree["carried"])


class ChunkDone(BaseException):
    """The last layer of a chunk has run. A BaseException, so that a model's `except Exception` does not catch it."""

    def __init__(self, output: Any) -> None:
        super().__init__("the forward of a pipeline's piece ends here")
        self.output = output


class ChunkForward:
    """State of one chunk forward.

    Args:
        piece: Model chunk.
        received: Activation from the previous chunk; None for the first one.

    Attributes:
        is_live: Whether values computed now are used; see Note [Chunk forward].
        next_unit: Index of the first layer that may run next; conditional layers may be skipped.
        carried: Outputs of complete modules, by name.
    """

    def __init__(self, chunk: ModelChunk, received: StageActivation | None) -> None:
        self.chunk = chunk
        self.received = received
        self.is_computing = received is None
        self.next_layer = chunk.start
        self.skip_outputs: dict[str, Any] = {} if received is None else dict(received.skip_outputs)


class ChunkContext:
    """Context of the layers and placeholders of one model: the chunk forward in progress.

    Attributes:
        run: Chunk forward in progress, or None.
        plan: Stage plan of the model.
        buffers: Persistent buffers that other stages hold as well.
    """

    def __init__(self, plan: StagePlan, buffers: SharedBuffers) -> None:
        self.run: ChunkForward | None = None
        self.plan = plan
        self.buffers = buffers

    def __deepcopy__(self, memo: dict[int, Any]) -> ChunkContext:
        return ChunkContext(self.plan, SharedBuffers((), 0))

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
    run = ChunkForward(chunk, received)
    context.run = run
    is_live = run.is_computing or context.plan.sequence is not None
    context.buffers.begin_chunk(is_first=chunk.chunk == 0, is_live=is_live)
    try:
        if context.plan.sequence is not None:
            outputs = _run_sequence(model, context.plan.sequence, run, batch)
        else:
            outputs = call_with_batch(model, batch)
    except ChunkDone as finished:
        boundary = StageActivation(finished.output, run.skip_outputs)
        return boundary, None
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


def install_layer(module: nn.Module, index: int, context: ChunkContext) -> None:
    """Let a layer run only in its own chunk. In place, by a subclass set as its class."""
    _derive(module, _Layer)
    module.__dict__["_pipeline_unit"] = (index, context)


def install_skip_output(module: nn.Module, name: str, complete_at: int, context: ChunkContext) -> None:
    """Let a module record its output for later chunks, or return the received one. In place.

    Args:
        module: Module such as the encoder of an encoder-decoder model.
        name: Name of the module.
        complete_at: Number of layers that run before its output is complete.
        context: Context of the model.
    """
    _derive(module, _SkipOutput)
    module.__dict__["_pipeline_carried"] = (name, complete_at, context)


class _Layer(nn.Module):
    """Mixin of layers. Overrides `__call__` and not `forward`, so that hooks of skipped layers do not run."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        index, context = self.__dict__["_pipeline_unit"]
        run: ChunkForward = context.require_run()
        if index < run.chunk.start:
            assert run.received is not None
            return run.received.output
        if not run.next_layer <= index < run.chunk.stop:
            before = context.plan.units[run.next_layer - 1]
            raise ConfigError(
                f"the model ran {context.plan.units[index]!r} after {before!r}, in another order than the pipeline's"
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


class _SkipOutput(nn.Module):
    """Mixin of modules whose output is carried."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        name, complete_at, context = self.__dict__["_pipeline_carried"]
        run: ChunkForward = context.require_run()
        if run.chunk.start > complete_at:
            return run.skip_outputs[name]
        run.skip_outputs[name] = output = super().__call__(*args, **kwargs)
        return output


_classes: dict[tuple[type[nn.Module], type[nn.Module]], type[nn.Module]] = {}


def _derive(module: nn.Module, kind: type[nn.Module]) -> None:
    base = type(module)
    if issubclass(base, kind):
        return
    if (kind, base) not in _classes:
        _classes[kind, base] = type(base.__name__, (kind, base), {"__module__": base.__module__})
    module.__class__ = _classes[kind, base]


def _run_sequence(model: nn.Module, sequence: Sequence[str | Callable[..., Any]], run: ChunkForward, batch: Any) -> Any:
    """Run a chunk of an execution sequence, instead of the model's forward."""
    value = None if run.received is None else run.received.output
    takes_batch = run.chunk.is_first
    for index, steps in enumerate(_steps_by_unit(sequence)):
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


def _steps_by_unit(sequence: Sequence[str | Callable[..., Any]]) -> list[list[str | Callable[..., Any]]]:
    """Return the steps of each layer: its module and the functions after it; leading functions join the first."""
    found: list[list[str | Callable[..., Any]]] = [[]]
    for step in sequence:
        if isinstance(step, str) and any(isinstance(one, str) for one in found[-1]):
            found.append([])
        found[-1].append(step)
    return found
