"""Runs a piece of a model by the model's own forward: what comes before is answered, what comes after is not reached.

Note [Running a piece]
The model's own forward is started on every stage, with the stage's microbatch. Until its first own unit the run is
*not live*: units of earlier stages return what has arrived of the last of them, modules that the stage does not hold
return tensors of the right shape and no meaning, and the loops and masks around them never know. From its first own
unit on the run is live, and everything counts. Behind the last own unit nobody needs the rest of the forward, which is
left by an exception that carries the unit's output. So a model needs no rewriting, only layers that hand on what they
return; what does not keep to that (units that run in another order or not at all, values that bypass the units) is
noticed, here and in `stand_ins`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from booster.errors import ConfigError
from booster.interface.batch_call import call_with_batch
from booster.plugins.hybrid_parallel.pipeline_parallel.stages.pieces import Piece
from booster.plugins.hybrid_parallel.pipeline_parallel.stages.shared_buffers import SharedBuffers
from booster.plugins.hybrid_parallel.pipeline_parallel.stages.stage_plan import StagePlan

__all__ = ["Boundary", "PieceContext", "PieceRun", "make_carried", "make_unit", "run_piece"]


class Boundary:
    """What travels from one piece to the next.

    Attributes:
        output: Of the last unit before.
        carried: By module name the output of modules that are complete, and that later pieces need.
    """

    def __init__(self, output: Any, carried: Mapping[str, Any]) -> None:
        self.output = output
        self.carried = dict(carried)

    def to_tree(self) -> dict[str, Any]:
        """Returns the same as containers."""
        return {"output": self.output, "carried": self.carried}

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> Boundary:
        """Returns what `to_tree` gave."""
        return cls(tree["output"], tree["carried"])


class PieceFinished(BaseException):
    """The last unit of a piece has run. Not an Exception, so that no model's `except Exception` takes it for one."""

    def __init__(self, output: Any) -> None:
        super().__init__("the forward of a pipeline's piece ends here")
        self.output = output


class PieceRun:
    """One forward of a piece.

    Args:
        piece: Which.
        received: What has arrived from the piece before; None for the first one.

    Attributes:
        is_live: What is computed now counts; see Note [Running a piece].
        next_unit: The first unit that may run next; those between may be left out, as a conditional one.
        carried: Outputs of modules that are complete, by name.
    """

    def __init__(self, piece: Piece, received: Boundary | None) -> None:
        self.piece = piece
        self.received = received
        self.is_live = received is None
        self.next_unit = piece.start
        self.carried: dict[str, Any] = {} if received is None else dict(received.carried)


class PieceContext:
    """What the stand-ins and the units of one model ask: which piece runs now.

    Attributes:
        run: The forward under way; None: there is none.
        plan: Of the model.
        buffers: Those that other stages hold, too.
    """

    def __init__(self, plan: StagePlan, buffers: SharedBuffers) -> None:
        self.run: PieceRun | None = None
        self.plan = plan
        self.buffers = buffers

    def __deepcopy__(self, memo: dict[int, Any]) -> PieceContext:
        return PieceContext(self.plan, SharedBuffers((), 0))

    def require_run(self) -> PieceRun:
        """Returns the forward under way.

        Raises:
            ConfigError: The model was called directly.
        """
        if self.run is None:
            raise ConfigError(
                "the model was called directly, but this rank holds some of its layers only (pp_size > 1): write"
                " booster.execute_pipeline(data_iter, model, criterion, optimizer), which runs all stages"
            )
        return self.run


def run_piece(
    model: nn.Module, context: PieceContext, piece: Piece, received: Boundary | None, batch: Any
) -> tuple[Boundary | None, Any]:
    """Returns what goes to the next piece, or the model's outputs where the piece is the last: one of them is None.

    Args:
        model: The user's model, carved.
        context: Of its units.
        piece: One of this stage's.
        received: From the piece before.
        batch: The microbatch.

    Raises:
        ConfigError: Units ran in another order than planned, or the last one did not.
    """
    run = PieceRun(piece, received)
    context.run = run
    is_live = run.is_live or context.plan.sequence is not None
    context.buffers.begin_piece(is_first=piece.chunk == 0, is_live=is_live)
    try:
        if context.plan.sequence is not None:
            outputs = _run_sequence(model, context.plan.sequence, run, batch)
        else:
            outputs = call_with_batch(model, batch)
    except PieceFinished as finished:
        boundary = Boundary(finished.output, run.carried)
        return boundary, None
    finally:
        context.run = None
        context.buffers.end_piece()
    if not piece.is_last:
        raise ConfigError(
            f"the model's forward ended without {context.plan.units[piece.stop - 1]!r}, the last layer of a pipeline"
            " stage, whose output is sent on: it has to run in every forward. Turn layer dropping off (layerdrop=0), or"
            " choose num_layers_per_stage or split= so that a layer that always runs ends the stage"
        )
    return None, outputs


def make_unit(module: nn.Module, index: int, context: PieceContext) -> None:
    """Has a unit ask whether it runs. In place; its class is exchanged for one derived from it."""
    _derive(module, _Unit)
    module.__dict__["_pipeline_unit"] = (index, context)


def make_carried(module: nn.Module, name: str, complete_at: int, context: PieceContext) -> None:
    """Has a module whose output later pieces need keep it, or return what has arrived. In place.

    Args:
        module: Such as the encoder of an encoder-decoder model.
        name: Its name.
        complete_at: How many units come before its output is there.
        context: Of the model.
    """
    _derive(module, _Carried)
    module.__dict__["_pipeline_carried"] = (name, complete_at, context)


class _Unit(nn.Module):
    """What is put before the class of a unit. `__call__` and not `forward`: hooks must not run either."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        index, context = self.__dict__["_pipeline_unit"]
        run: PieceRun = context.require_run()
        if index < run.piece.start:
            assert run.received is not None
            return run.received.output
        if not run.next_unit <= index < run.piece.stop:
            before = context.plan.units[run.next_unit - 1]
            raise ConfigError(
                f"the model ran {context.plan.units[index]!r} after {before!r}, in another order than the pipeline's"
                " plan has it, or twice, or left out the last layer of a stage: layers run at most once each, in the"
                " order in which they are registered, and a stage's last one always. Turn layer dropping off"
                " (layerdrop=0), or give split= or execution_sequence= to say how your model runs"
            )
        if not run.is_live:
            run.is_live = True
            context.buffers.begin_live()
        output = super().__call__(*args, **kwargs)
        run.next_unit = index + 1
        if run.next_unit == run.piece.stop and not run.piece.is_last:
            raise PieceFinished(output)
        return output


class _Carried(nn.Module):
    """What is put before the class of a module whose output is carried."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        name, complete_at, context = self.__dict__["_pipeline_carried"]
        run: PieceRun = context.require_run()
        if run.piece.start > complete_at:
            return run.carried[name]
        run.carried[name] = output = super().__call__(*args, **kwargs)
        return output


_classes: dict[tuple[type[nn.Module], type[nn.Module]], type[nn.Module]] = {}


def _derive(module: nn.Module, kind: type[nn.Module]) -> None:
    base = type(module)
    if issubclass(base, kind):
        return
    if (kind, base) not in _classes:
        _classes[kind, base] = type(base.__name__, (kind, base), {"__module__": base.__module__})
    module.__class__ = _classes[kind, base]


def _run_sequence(model: nn.Module, sequence: Sequence[str | Callable[..., Any]], run: PieceRun, batch: Any) -> Any:
    """Runs a piece of an execution sequence, which takes the place of the model's forward."""
    value = None if run.received is None else run.received.output
    takes_batch = run.piece.is_first
    for index, steps in enumerate(_steps_by_unit(sequence)):
        if not run.piece.start <= index < run.piece.stop:
            continue
        run.next_unit = index + 1
        for step in steps:
            function = model.get_submodule(step) if isinstance(step, str) else step
            value = call_with_batch(function, batch) if takes_batch else function(value)
            takes_batch = False
    if not run.piece.is_last:
        raise PieceFinished(value)
    return value


def _steps_by_unit(sequence: Sequence[str | Callable[..., Any]]) -> list[list[str | Callable[..., Any]]]:
    """Returns the steps of each unit: its module, the functions behind it, and those before the first module."""
    found: list[list[str | Callable[..., Any]]] = [[]]
    for step in sequence:
        if isinstance(step, str) and any(isinstance(one, str) for one in found[-1]):
            found.append([])
        found[-1].append(step)
    return found
