"""The part of the facade that saves and loads; it asks the plugin's CheckpointIO."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from os import PathLike
from typing import Any, TypeAlias, TypeVar

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from booster.argument_checks import check_flag, check_path
from booster.boost_checks import (
    require_boosted_model,
    require_optimizer,
    require_scheduler,
    require_stateful_loader,
)
from booster.checkpoint_io import CheckpointIO
from booster.checkpoint_io.loading.loader import check_verify
from booster.checkpoint_io.training.training_parts import SaveOptions, TrainingParts
from booster.checkpoint_io.training.unboosted import as_optimizer_wrapper
from booster.comm import agree, group_rank, patience
from booster.errors import ConfigError
from booster.interface import MixedPrecision, ModelWrapper, OptimizerWrapper, Plugin
from booster.phases import in_phase
from booster.random_state import ProcessRandomState
from booster.save_agreement import training_facts

__all__ = ["CheckpointMethods"]

T = TypeVar("T")
Models: TypeAlias = ModelWrapper | Mapping[str, ModelWrapper]
Optimizers: TypeAlias = OptimizerWrapper | Optimizer | Mapping[str, OptimizerWrapper | Optimizer]
Schedulers: TypeAlias = LRScheduler | Mapping[str, LRScheduler]
Loaders: TypeAlias = DataLoader[Any] | Mapping[str, DataLoader[Any]]


class CheckpointMethods:
    """What `Booster` does with checkpoints. Every method is collective."""

    plugin: Plugin
    mixed_precision: MixedPrecision | None
    _checkpoint_io: CheckpointIO

    # The whole training state.

    @in_phase("save")
    @patience("checkpoint")
    def save(
        self,
        path: str | PathLike[str],
        model: Models | None = None,
        optimizer: Optimizers | None = None,
        lr_scheduler: Schedulers | None = None,
        dataloader: Loaders | None = None,
        extra: Any = None,
        *,
        step: int | None = None,
        keep_last: int | None = None,
        size_per_shard: int = 1024,
        use_safetensors: bool = True,
        use_async: bool = False,
    ) -> None:
        """Writes everything that a run needs to go on exactly: beside what is given, the random states of every rank.

        Gradients that wait for their step, in the middle of an accumulation, are part of it. Each of the four may be a
        dict by name; then `path/<name>/` holds the model and the optimizer of that name. Without a dict, transformers'
        `from_pretrained(path)` opens the model.

        Args:
            path: A directory.
            model: The boosted model.
            optimizer: Its boosted optimizer, or a plain torch one.
            lr_scheduler: A scheduler.
            dataloader: A loader that knows its position, as `boost()` and `prepare_dataloader()` return.
            extra: Numbers, strings, tensors, and containers of them; rank 0's are written, and `load` returns them.
            step: Write `path/step-00001200` instead, and name it in the file `path/latest`.
            keep_last: Then remove whole steps, oldest first, until this many are left.
            size_per_shard: Largest file in MB (10**6 bytes).
            use_safetensors: False writes `.bin` files.
            use_async: Return after a copy into host memory; what goes wrong is raised by the next checkpoint call, or
                by `wait_for_checkpoints`.

        Collective: every rank must call it.

        Raises:
            ConfigError: Something that was not boosted, names, numbers or paths that can't be, or a save between
                clipping and step.
            DesyncError: The ranks have made different numbers of steps, or have other learning rates.
            CheckpointError: A value of `extra` or of a state that is no plain value, named by its key; or writing
                failed on some rank. What was on disk is as it was.
        """
        options = SaveOptions(
            step=step, keep_last=keep_last, size_per_shard=size_per_shard, use_safetensors=use_safetensors
        )

        def checked() -> TrainingParts:
            _check_path(path, "save")
            for name, value in (("use_safetensors", use_safetensors), ("use_async", use_async)):
                check_flag(name, value)
            options.check()
            return self._parts("save", model, optimizer, lr_scheduler, dataloader)

        def facts(parts: TrainingParts) -> list[str]:
            return training_facts(_by_name(optimizer, require_optimizer, "save"), parts.lr_schedulers)

        parts = _on_all_ranks("save", checked, facts)
        precision = next((one.precision for one in parts.models.values()), self.mixed_precision)
        self._checkpoint_io.save_training_state(
            path,
            parts,
            extra=extra,
            facts={
                "plugin": type(self.plugin).__name__,
                "dp_size": self.plugin.dp_size,
                "precision": "fp32" if precision is None else precision.describe(),
            },
            options=options,
            use_async=use_async,
        )

    @in_phase("load")
    @patience("checkpoint")
    def load(
        self,
        path: str | PathLike[str],
        model: Models | None = None,
        optimizer: Optimizers | None = None,
        lr_scheduler: Schedulers | None = None,
        dataloader: Loaders | None = None,
        *,
        strict: bool = True,
        verify: str = "checksums",
        missing_ok: bool = False,
    ) -> Any:
        """Fills what is given from what `save` wrote, and restores the random states; returns `extra`.

        The same plugin on as many ranks goes on bit for bit. Any other goes on from the same weights, optimizer states
        and samples; a rank beyond the stored ones gets random states of its own, the same at every such load.

        Args:
            path: What `save` was given: the directory itself, or the latest whole step below it, whichever was saved
                last; `path/latest` means the same. `path/step-00001200` is that step.
            model: As for `save`; what the checkpoint has and is not asked for is left alone.
            optimizer: As for `save`.
            lr_scheduler: As for `save`.
            dataloader: As for `save`.
            strict: False loads of a model what matches in name and shape.
            verify: "checksums" reads everything that a checksum was recorded for before anything is loaded;
                "structure" trusts the bytes.
            missing_ok: Return None, and change nothing, where there is no whole state yet: what a script asks that is
                started anew after a failure. What is there and damaged is an error nevertheless.

        Collective: every rank must call it.

        Raises:
            ConfigError: Something that was not boosted, or a loader over other data.
            CheckpointError: Something that was asked for is missing or does not fit, or files are damaged. Nothing was
                changed.
        """

        def checked() -> TrainingParts:
            _check_path(path, "load")
            check_flag("strict", strict)
            check_flag("missing_ok", missing_ok)
            check_verify(verify)
            return self._parts("load", model, optimizer, lr_scheduler, dataloader)

        parts = _on_all_ranks("load", checked)
        return self._checkpoint_io.load_training_state(path, parts, strict=strict, verify=verify, missing_ok=missing_ok)

    @in_phase("save")
    @patience("checkpoint")
    def wait_for_checkpoints(self) -> None:
        """Returns when no save is under way in the background any more. Collective.

        Raises:
            CheckpointError: One of them failed.
        """
        self._checkpoint_io.wait()

    def _parts(self, caller: str, model: Any, optimizer: Any, lr_scheduler: Any, dataloader: Any) -> TrainingParts:
        optimizers = _by_name(optimizer, require_optimizer, caller)
        return TrainingParts(
            models=_by_name(model, require_boosted_model, caller),
            optimizers={
                name: as_optimizer_wrapper(one, is_primary=group_rank() == 0) for name, one in optimizers.items()
            },
            lr_schedulers=_by_name(lr_scheduler, require_scheduler, caller),
            dataloaders=_by_name(dataloader, require_stateful_loader, caller),
            random_state=ProcessRandomState(self.plugin.device),
        )

    # One thing at a time.

    @in_phase("save")
    @patience("checkpoint")
    def save_model(
        self,
        model: ModelWrapper,
        checkpoint: str | PathLike[str],
        shard: bool = False,
        gather_dtensor: bool = True,
        prefix: str | None = None,
        size_per_shard: int = 1024,
        use_safetensors: bool = True,
        *,
        use_async: bool = False,
    ) -> None:
        """Writes the model; see `CheckpointIO.save_model`. Collective.

        `gather_dtensor` is there for callers of ColossalAI: files hold whole tensors always, so False is an error.
        """

        def checked() -> ModelWrapper:
            _check_save(checkpoint, gather_dtensor, shard, use_safetensors, use_async)
            return require_boosted_model(model, "save_model")

        self._checkpoint_io.save_model(
            _on_all_ranks("save_model", checked),
            checkpoint,
            shard=shard,
            prefix=prefix or None,
            size_per_shard=size_per_shard,
            use_safetensors=use_safetensors,
            use_async=use_async,
        )

    @in_phase("load")
    @patience("checkpoint")
    def load_model(
        self,
        model: ModelWrapper,
        checkpoint: str | PathLike[str],
        strict: bool = True,
        *,
        verify: str = "checksums",
    ) -> None:
        """Fills the model; see `CheckpointIO.load_model`. Collective."""

        def checked() -> ModelWrapper:
            check_path("checkpoint", checkpoint)
            check_flag("strict", strict)
            check_verify(verify)
            return require_boosted_model(model, "load_model")

        wrapped = _on_all_ranks("load_model", checked)
        self._checkpoint_io.load_model(wrapped, checkpoint, strict=strict, verify=verify)

    @in_phase("save")
    @patience("checkpoint")
    def save_optimizer(
        self,
        optimizer: OptimizerWrapper | Optimizer,
        checkpoint: str | PathLike[str],
        shard: bool = False,
        gather_dtensor: bool = True,
        prefix: str | None = None,
        size_per_shard: int = 1024,
        use_safetensors: bool = True,
        *,
        use_async: bool = False,
    ) -> None:
        """Writes the optimizer, boosted or plain; see `CheckpointIO.save_optimizer`. Collective.

        `gather_dtensor` as in `save_model`.
        """

        def checked() -> OptimizerWrapper | Optimizer:
            _check_save(checkpoint, gather_dtensor, shard, use_safetensors, use_async)
            return require_optimizer(optimizer, "save_optimizer")

        self._checkpoint_io.save_optimizer(
            _on_all_ranks("save_optimizer", checked, lambda one: training_facts({"": one})),
            checkpoint,
            shard=shard,
            prefix=prefix or None,
            size_per_shard=size_per_shard,
            use_safetensors=use_safetensors,
            use_async=use_async,
        )

    @in_phase("load")
    @patience("checkpoint")
    def load_optimizer(
        self,
        optimizer: OptimizerWrapper | Optimizer,
        checkpoint: str | PathLike[str],
        *,
        verify: str = "checksums",
    ) -> None:
        """Fills the optimizer, boosted or plain; see `CheckpointIO.load_optimizer`. Collective."""

        def checked() -> OptimizerWrapper | Optimizer:
            check_path("checkpoint", checkpoint)
            check_verify(verify)
            return require_optimizer(optimizer, "load_optimizer")

        self._checkpoint_io.load_optimizer(_on_all_ranks("load_optimizer", checked), checkpoint, verify=verify)

    @in_phase("save")
    @patience("checkpoint")
    def save_lr_scheduler(self, lr_scheduler: LRScheduler, checkpoint: str | PathLike[str]) -> None:
        """Writes the scheduler; see `CheckpointIO.save_lr_scheduler`. Collective."""

        def checked() -> Any:
            check_path("checkpoint", checkpoint)
            return require_scheduler(lr_scheduler, "save_lr_scheduler")

        self._checkpoint_io.save_lr_scheduler(_on_all_ranks("save_lr_scheduler", checked), checkpoint)

    @in_phase("load")
    @patience("checkpoint")
    def load_lr_scheduler(self, lr_scheduler: LRScheduler, checkpoint: str | PathLike[str]) -> None:
        """Takes over what `save_lr_scheduler` wrote. Collective."""

        def checked() -> Any:
            check_path("checkpoint", checkpoint)
            return require_scheduler(lr_scheduler, "load_lr_scheduler")

        self._checkpoint_io.load_lr_scheduler(_on_all_ranks("load_lr_scheduler", checked), checkpoint)


def _on_all_ranks(caller: str, check: Callable[[], T], facts: Callable[[T], list[str]] | None = None) -> T:
    """Returns what a check of this rank's arguments gives, once every rank's are right and all make the same call.

    Args:
        caller: The call.
        check: Raises for what can't be.
        facts: Gives, for what the check gave, lines of text that must be the same on all ranks.

    Collective. One small message before files are opened, for which a rank that refuses would be waited for in vain.

    Raises:
        ConfigError: What a rank's check raised; on all ranks.
        DesyncError: Ranks make other calls, or their facts differ.
    """
    try:
        checked = check()
        lines = [] if facts is None else facts(checked)
    except Exception as error:  # for the other ranks too
        agree(f"{caller}()", [], error=error)
        raise
    agree(f"{caller}()", lines)
    return checked


def _check_path(path: Any, caller: str) -> None:
    if not isinstance(path, (str, PathLike)):
        raise ConfigError(
            f"{caller}() was given a {type(path).__name__} as its path: the directory comes first, so write"
            f" {caller}('runs/a', model, optimizer)"
        )


def _by_name(given: Any, require: Callable[[Any, str], Any], caller: str) -> dict[str, Any]:
    """Returns the objects by name, "" for the only one, once each is of its kind."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        return {"": require(given, caller)}
    for name in given:
        if not isinstance(name, str) or not name:
            raise ConfigError(
                f"{caller}() was given a dict with the key {name!r}: give names that are strings and not empty"
            )
    return {name: require(one, caller) for name, one in given.items()}


def _check_save(checkpoint: Any, gather_dtensor: bool, shard: bool, use_safetensors: bool, use_async: bool) -> None:
    check_path("checkpoint", checkpoint)
    for name, value in (("shard", shard), ("use_safetensors", use_safetensors), ("use_async", use_async)):
        check_flag(name, value)
    if not gather_dtensor:
        raise ConfigError(
            "gather_dtensor=False asks for files with parts of tensors, which only the same layout could load: leave it"
            " out; every rank writes its own parts of whole tensors, without a gather"
        )
