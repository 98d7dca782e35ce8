"""Save and load methods of `Booster`, which delegate to the plugin's CheckpointIO."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from os import PathLike
from typing import Any, ParamSpec, TypeAlias, TypeVar

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from .boost_checks import (
    check_boosted_model,
    check_optimizer,
    check_scheduler,
    check_stateful_loader,
    training_fingerprint,
)
from .checkpoint_io import CheckpointIO, GeneralCheckpointIO
from .checkpoint_io.checkpoint_io import as_optimizer_wrapper
from .checkpoint_io.loading.load import check_verify
from .comm import all_gather_text, check_same_across_ranks, group_rank, group_size, timeout_scope
from .compatibility import check_foreign
from .errors import ConfigError
from .fault_tolerance.progress import Phase
from .interface import MixedPrecision, ModelWrapper, OptimizerWrapper, Plugin
from .interface.checkpoint_io import SaveOptions, TrainingParts
from .lora import adapter_files, check_adapters, frozen_names, has_resized_embeddings
from .rng_state import ProcessRNG
from .validation import check_flag, check_path, error_of

Models: TypeAlias = ModelWrapper | Mapping[str, ModelWrapper]
Optimizers: TypeAlias = OptimizerWrapper | Optimizer | Mapping[str, OptimizerWrapper | Optimizer]
Schedulers: TypeAlias = LRScheduler | Mapping[str, LRScheduler]
Loaders: TypeAlias = DataLoader[Any] | Mapping[str, DataLoader[Any]]


P = ParamSpec("P")
R = TypeVar("R")


def _checkpoint_call(phase: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator: run the function in a phase and, if there are other ranks to wait for, with the checkpoint timeout."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def within(*args: P.args, **kwargs: P.kwargs) -> R:
            with Phase(phase), timeout_scope("checkpoint") if group_size() > 1 else nullcontext():
                return function(*args, **kwargs)

        return within

    return decorate


class CheckpointMethods:
    """Checkpoint methods of `Booster`. Every method is collective."""

    plugin: Plugin
    mixed_precision: MixedPrecision | None
    checkpoint_io: CheckpointIO

    @_checkpoint_call("save")
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
        size_per_shard: float | str = 1024,
        use_safetensors: bool = True,
        use_async: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> None:
        """Save the training state for an exact resume: the arguments and the RNG states of every rank.

        It includes the accumulated gradients of an unfinished accumulation. Each of the four may be a dict by name;
        then `path/<name>/` holds the model and the optimizer of that name. Without a dict, transformers'
        `from_pretrained(path)` loads the model.

        Args:
            path: Directory.
            model: Boosted model.
            optimizer: Its boosted optimizer, or a plain torch one.
            lr_scheduler: Scheduler.
            dataloader: Stateful loader, as returned by `boost()` and `prepare_dataloader()`.
            extra: Numbers, strings, tensors, and containers of them; rank 0's are written, and `load` returns them.
            step: If given, write `path/step-00001200` instead, and name it in the file `path/latest`.
            keep_last: If given, remove the oldest committed steps until this many are left.
            size_per_shard: Largest file in MB (10**6 bytes), or with a unit, such as "5GB".
            use_safetensors: If False, write `.bin` files.
            use_async: If True, return after a copy into host memory; errors are raised by the next checkpoint call, or
                by `wait_for_checkpoints`.
            exclude_frozen_parameters: If True, leave out parameters that do not train, except those of adapters, such
                as the base under LoRA. `load` then leaves them as they are, so the model must be built with the same
                base; `from_pretrained` does not open the result.

        Collective: every rank must call it.

        Raises:
            ConfigError: An object is not boosted, a name, number or path is invalid, or a save between clipping and
                step.
            DesyncError: The ranks have different numbers of steps or learning rates.
            CheckpointError: A value of `extra` or of a state is not a plain value, named by its key; or writing failed
                on some rank. Existing files are unchanged.
        """
        options = SaveOptions(
            step=step,
            keep_last=keep_last,
            size_per_shard=size_per_shard,
            use_safetensors=use_safetensors,
            exclude_frozen_parameters=exclude_frozen_parameters,
        )
        with _checks_on_all_ranks("save") as fingerprint:
            _check_path(path, "save")
            check_flag("use_safetensors", use_safetensors)
            check_flag("use_async", use_async)
            check_flag("exclude_frozen_parameters", exclude_frozen_parameters)
            options.check()
            parts = self._parts("save", model, optimizer, lr_scheduler, dataloader)
            optimizers = _by_name(optimizer, check_optimizer, "save")
            fingerprint += training_fingerprint(optimizers, parts.lr_schedulers)
        precision = next((one.precision for one in parts.models.values()), self.mixed_precision)
        self.checkpoint_io.save_training_state(
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

    @_checkpoint_call("load")
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
        """Load the given objects and the RNG states from a result of `save`; return `extra`.

        The same plugin with the same number of ranks resumes bit for bit. Others resume from the same weights,
        optimizer states and samples; a rank beyond the stored ones gets RNG states derived from theirs, equal at every
        such load.

        Args:
            path: Directory given to `save`: its state or the latest committed step below it, whichever was saved last;
                `path/latest` means the same. `path/step-00001200` is that step.
            model: Models as for `save`; stored objects that are not given are ignored.
            optimizer: Optimizers as for `save`.
            lr_scheduler: Schedulers as for `save`.
            dataloader: Loaders as for `save`.
            strict: If False, load only the tensors of a model that match in name and shape.
            verify: "checksums" reads every byte once and compares its checksum on the way; "before" compares all
                checksums before anything is changed, and reads twice; "structure" compares none.
            missing_ok: If True, return None and change nothing if there is no committed state yet, for scripts that are
                restarted after a failure. Damaged files still raise.

        Collective: every rank must call it.

        Raises:
            ConfigError: An object is not boosted, a loader has other data, or a scheduler has other settings.
            CheckpointError: A requested object is missing or does not match, or files are damaged. Nothing was changed,
                unless a checksum of the data differs, without verify="before", or reading fails on the way: then every
                use of these models and optimizers raises the error again until a load has succeeded.
        """
        with _checks_on_all_ranks("load"):
            _check_path(path, "load")
            check_flag("strict", strict)
            check_flag("missing_ok", missing_ok)
            check_verify(verify)
            parts = self._parts("load", model, optimizer, lr_scheduler, dataloader)
        return self.checkpoint_io.load_training_state(path, parts, strict=strict, verify=verify, missing_ok=missing_ok)

    @_checkpoint_call("save")
    def wait_for_checkpoints(self) -> None:
        """Wait for all background saves. Collective.

        Raises:
            CheckpointError: One of them failed.
        """
        self.checkpoint_io.wait()

    def _parts(self, caller: str, model: Any, optimizer: Any, lr_scheduler: Any, dataloader: Any) -> TrainingParts:
        optimizers = _by_name(optimizer, check_optimizer, caller)
        models = _by_name(model, check_boosted_model, caller)
        return TrainingParts(
            models=models,
            frozen={name: frozen_names(one) for name, one in models.items()},
            optimizers={
                name: as_optimizer_wrapper(one, is_primary=group_rank() == 0) for name, one in optimizers.items()
            },
            lr_schedulers=_by_name(lr_scheduler, check_scheduler, caller),
            dataloaders=_by_name(dataloader, check_stateful_loader, caller),
            random_state=ProcessRNG(self.plugin.device),
        )

    @_checkpoint_call("save")
    def save_model(
        self,
        model: ModelWrapper,
        checkpoint: str | PathLike[str],
        shard: bool = False,
        gather_dtensor: bool = True,
        prefix: str | None = None,
        size_per_shard: float | str = 1024,
        use_safetensors: bool | None = None,
        *,
        use_async: bool = False,
    ) -> None:
        """Save the model; see `CheckpointIO.save_model`. Collective.

        `gather_dtensor` exists for compatibility with ColossalAI: files always hold full tensors, so False is an error.
        """
        with _checks_on_all_ranks("save_model"):
            _check_save(checkpoint, gather_dtensor, shard, use_safetensors, use_async)
            check_boosted_model(model, "save_model")
        self.checkpoint_io.save_model(
            model,
            checkpoint,
            shard=shard,
            prefix=prefix or None,
            size_per_shard=size_per_shard,
            use_async=use_async,
            **({} if use_safetensors is None else {"use_safetensors": use_safetensors}),
        )

    @_checkpoint_call("load")
    def load_model(
        self,
        model: ModelWrapper,
        checkpoint: str | PathLike[str],
        strict: bool = True,
        low_cpu_mem_mode: bool = True,
        num_threads: int = 1,
        *,
        verify: str = "checksums",
    ) -> None:
        """Load the model; see `CheckpointIO.load_model`. Collective.

        `low_cpu_mem_mode` and `num_threads` exist for compatibility with ColossalAI, and have no effect.
        """
        with _checks_on_all_ranks("load_model"):
            check_path("checkpoint", checkpoint)
            check_flag("strict", strict)
            check_verify(verify)
            if not low_cpu_mem_mode or num_threads != 1:
                check_foreign({"low_cpu_mem_mode": low_cpu_mem_mode, "num_threads": num_threads})
            check_boosted_model(model, "load_model")
        self.checkpoint_io.load_model(model, checkpoint, strict=strict, verify=verify)

    @_checkpoint_call("save")
    def save_lora_as_pretrained(
        self,
        model: ModelWrapper,
        checkpoint: str | PathLike[str],
        use_safetensors: bool = True,
        *,
        use_async: bool = False,
    ) -> None:
        """Save the adapters of a model with LoRA as `peft.PeftModel.from_pretrained` opens them. Collective.

        Every rank writes its part; the base is not written. The adapter "default" is in the directory itself, others
        are in subdirectories of their names.

        Args:
            model: Boosted model that `enable_lora` or `peft.get_peft_model` has given adapters.
            checkpoint: Directory.
            use_safetensors: Must be True; pickled files are not written.
            use_async: If True, write in the background, as `save_model` does.

        Raises:
            ConfigError: The model has no adapters, or an argument is invalid.
            CheckpointError: The files can't be written.
        """
        with _checks_on_all_ranks("save_lora_as_pretrained"):
            check_path("checkpoint", checkpoint)
            check_flag("use_async", use_async)
            if use_safetensors is not True:
                raise ConfigError(
                    f"use_safetensors={use_safetensors!r} asks for a pickled adapter, which is not written: leave it"
                    " out, as peft reads adapter_model.safetensors"
                )
            check_boosted_model(model, "save_lora_as_pretrained")
            check_adapters(model)
        if not isinstance(self.checkpoint_io, GeneralCheckpointIO):
            raise ConfigError(
                f"{type(self.checkpoint_io).__name__} saves no adapters: use the plugin's own CheckpointIO, or"
                " save_model()"
            )
        is_resized = _on_first_rank(lambda: has_resized_embeddings(model), "save_lora_as_pretrained()")
        prepare = partial(adapter_files, model, saves_embeddings=is_resized)
        self.checkpoint_io.save_adapters(model, checkpoint, prepare, use_async=use_async)

    @_checkpoint_call("save")
    def save_optimizer(
        self,
        optimizer: OptimizerWrapper | Optimizer,
        checkpoint: str | PathLike[str],
        shard: bool = False,
        gather_dtensor: bool = True,
        prefix: str | None = None,
        size_per_shard: float | str = 1024,
        use_safetensors: bool | None = None,
        *,
        use_async: bool = False,
    ) -> None:
        """Save the optimizer, boosted or plain; see `CheckpointIO.save_optimizer`. Collective.

        `gather_dtensor` as in `save_model`.
        """
        with _checks_on_all_ranks("save_optimizer") as fingerprint:
            _check_save(checkpoint, gather_dtensor, shard, use_safetensors, use_async)
            check_optimizer(optimizer, "save_optimizer")
            fingerprint += training_fingerprint({"": optimizer})
        self.checkpoint_io.save_optimizer(
            optimizer,
            checkpoint,
            shard=shard,
            prefix=prefix or None,
            size_per_shard=size_per_shard,
            use_async=use_async,
            **({} if use_safetensors is None else {"use_safetensors": use_safetensors}),
        )

    @_checkpoint_call("load")
    def load_optimizer(
        self,
        optimizer: OptimizerWrapper | Optimizer,
        checkpoint: str | PathLike[str],
        low_cpu_mem_mode: bool = True,
        num_threads: int = 1,
        *,
        verify: str = "checksums",
    ) -> None:
        """Load the optimizer, boosted or plain; see `CheckpointIO.load_optimizer`. Collective.

        `low_cpu_mem_mode` and `num_threads` as in `load_model`.
        """
        with _checks_on_all_ranks("load_optimizer"):
            check_path("checkpoint", checkpoint)
            check_verify(verify)
            if not low_cpu_mem_mode or num_threads != 1:
                check_foreign({"low_cpu_mem_mode": low_cpu_mem_mode, "num_threads": num_threads})
            check_optimizer(optimizer, "load_optimizer")
        self.checkpoint_io.load_optimizer(optimizer, checkpoint, verify=verify)

    @_checkpoint_call("save")
    def save_lr_scheduler(self, lr_scheduler: LRScheduler, checkpoint: str | PathLike[str]) -> None:
        """Save the scheduler; see `CheckpointIO.save_lr_scheduler`. Collective."""
        with _checks_on_all_ranks("save_lr_scheduler"):
            check_path("checkpoint", checkpoint)
            check_scheduler(lr_scheduler, "save_lr_scheduler")
        self.checkpoint_io.save_lr_scheduler(lr_scheduler, checkpoint)

    @_checkpoint_call("load")
    def load_lr_scheduler(self, lr_scheduler: LRScheduler, checkpoint: str | PathLike[str]) -> None:
        """Load the scheduler; see `CheckpointIO.load_lr_scheduler`. Collective."""
        with _checks_on_all_ranks("load_lr_scheduler"):
            check_path("checkpoint", checkpoint)
            check_scheduler(lr_scheduler, "load_lr_scheduler")
        self.checkpoint_io.load_lr_scheduler(lr_scheduler, checkpoint)


def _on_first_rank(question: Callable[[], bool], caller: str) -> bool:
    """Return rank 0's answer on all ranks; its exception is raised on all of them. Collective."""
    answer: list[str] = []
    error = error_of(lambda: answer.append(str(group_rank() == 0 and question())))
    return all_gather_text(caller, answer, error=error)[0] == ["True"]


@contextmanager
def _checks_on_all_ranks(caller: str) -> Iterator[list[str]]:
    """Context of the checks of this rank's arguments, which ends once all ranks pass them and are at the same call.

    Args:
        caller: Name of the calling method.

    Yields:
        An empty list, to which the block adds lines of text that must be equal on all ranks.

    Collective. One small message, before files are opened: the other ranks would wait for one that raises.

    Raises:
        ConfigError: A rank's check raised; on all ranks.
        DesyncError: Ranks are at other calls, or their lines differ.
    """
    lines: list[str] = []
    if group_size() == 1:
        yield lines
        return
    try:
        yield lines
    except Exception as error:  # raised on the other ranks, too
        check_same_across_ranks(f"{caller}()", [], error=error)
        raise
    check_same_across_ranks(f"{caller}()", lines)


def _check_path(path: Any, caller: str) -> None:
    if not isinstance(path, (str, PathLike)):
        raise ConfigError(
            f"{caller}() was given a {type(path).__name__} as its path: give the directory first, as in"
            f" {caller}('runs/a', model, optimizer)"
        )


def _by_name(given: Any, check: Callable[[Any, str], Any], caller: str) -> dict[str, Any]:
    """Return the checked objects by name, "" for a single one."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        return {"": check(given, caller)}
    for name in given:
        if not isinstance(name, str) or not name:
            raise ConfigError(
                f"{caller}() was given a dict with the key {name!r}: give names that are strings and not empty"
            )
    return {name: check(one, caller) for name, one in given.items()}


def _check_save(
    checkpoint: Any, gather_dtensor: bool, shard: bool, use_safetensors: bool | None, use_async: bool
) -> None:
    check_path("checkpoint", checkpoint)
    for name, value in (("shard", shard), ("use_async", use_async)):
        check_flag(name, value)
    if use_safetensors is not None:
        check_flag("use_safetensors", use_safetensors, advice="pass True or False, or leave it out")
    if not gather_dtensor:
        raise ConfigError(
            "gather_dtensor=False would write shards that only the same layout could load: leave it out; every rank"
            " writes its own shards of full tensors, without a gather"
        )
