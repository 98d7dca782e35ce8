"""`BoosterTrainer`: transformers' Trainer, whose loop, evaluation and checkpoints run under a Booster plugin."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from booster.booster import Booster
from booster.checkpoint_io.storage import Storage
from booster.checkpoint_io.training_state.retention import read_training_manifest
from booster.comm import all_gather_equal, all_gather_text, check_same_across_ranks, group_rank
from booster.data.dataloader import DistributedDataLoader, active_position
from booster.errors import ConfigError
from booster.interface import ModelWrapper, OptimizerWrapper
from booster.lora import has_adapters
from booster.pytree import map_tensors
from booster.validation import check_path, error_of

if TYPE_CHECKING:
    from transformers import Trainer
else:
    try:
        from transformers import Trainer
    except ImportError:

        class Trainer:
            """Takes the place of transformers' class where that is not installed."""

            def __init__(self, *_: Any, **__: Any) -> None:
                raise ConfigError(
                    "BoosterTrainer needs transformers and accelerate, and transformers is not installed: run pip"
                    " install 'torch-booster[hf,trainer]'"
                )


# Note [Trainer]
# transformers' loop calls an Accelerator for what depends on the strategy: it prepares loaders, computes gradients,
# clips and gathers. `_BoosterAccelerator` answers these calls by the Booster, and leaves all others to Accelerate's
# object, such as the flags of an accumulation. The trainer's own methods that read or write files are overridden:
# Trainer pickles optimizers, and would write one rank's shards.

# Arguments of the trainer that select a strategy or a precision, which the Booster has, and what to write instead.
_PRECISION = "pass Booster(mixed_precision=...), or precision= of the plugin"
_REFUSED: dict[str, str] = {
    "fsdp": "leave it out, and give Booster(plugin=TorchFSDPPlugin())",
    "deepspeed": "leave it out, and give Booster(plugin=LowLevelZeroPlugin(stage=2)) or GeminiPlugin()",
    "parallelism_config": "leave it out, and give Booster(plugin=HybridParallelPlugin(tp_size=2))",
    "fp16": f"leave it out, and {_PRECISION}",
    "bf16": f"leave it out, and {_PRECISION}",
    "fp16_full_eval": f"leave it out, and {_PRECISION}",
    "bf16_full_eval": f"leave it out, and {_PRECISION}",
    "torch_compile": "leave it out, and pass Booster(compile=True)",
    "auto_find_batch_size": "leave it out, and look for a batch size by `booster estimate`",
}


class BoosterTrainer(Trainer):
    """transformers' `Trainer` under a Booster plugin; the loop, callbacks, arguments and metrics are the Trainer's.

    Checkpoints (`checkpoint-500`) are those of `Booster.save`: sharded, without pickle, and `from_pretrained` opens
    them. `train(resume_from_checkpoint=True)` continues exactly, in the middle of an epoch, too, also on other numbers
    of ranks and under another plugin.

    The model is boosted by the first `train`, `evaluate` or `predict`. `trainer.model` stays the user's module;
    `trainer.model_wrapped` is the boosted one. Batch sizes are per data-parallel rank.

    Args:
        booster: The Booster, with any plugin but a pipeline.
        *args: Arguments of `Trainer`.
        **kwargs: Arguments of `Trainer`. `TrainingArguments` that select a strategy or precision are errors.

    Raises:
        ConfigError: The arguments contradict the Booster; on all ranks.

    Collective: every rank must create it, with equal arguments, and call its methods alike.
    """

    model: Any
    model_wrapped: Any
    optimizer: Any
    accelerator: Any

    def __init__(self, booster: Booster | None = None, *args: Any, **kwargs: Any) -> None:
        if not isinstance(booster, Booster):
            raise ConfigError(
                f"BoosterTrainer() was given a {type(booster).__name__} as its booster: give the Booster first, as in"
                " BoosterTrainer(Booster(plugin='torch_ddp'), model, args)"
            )
        if isinstance(args[0] if args else kwargs.get("model"), ModelWrapper):
            raise ConfigError(
                "BoosterTrainer() was given a boosted model, and boosts it itself, with its optimizer: give the model"
                " as it was before boost()"
            )
        self.booster = booster
        super().__init__(*args, **kwargs)

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train as `Trainer.train`. Collective.

        Args:
            resume_from_checkpoint: Directory of a checkpoint, or True for the last complete one in `output_dir`.
            *args: Arguments of `Trainer.train`.
            **kwargs: Arguments of `Trainer.train`.

        Raises:
            ConfigError: There is no such checkpoint, or it has no training state; on all ranks.
            CheckpointError: A checkpoint is damaged; on all ranks.
        """
        checkpoint = self._checkpoint_to_resume(resume_from_checkpoint)
        with _skipping_by_position():
            return super().train(checkpoint, *args, **kwargs)

    def _checkpoint_to_resume(self, given: Any) -> str | None:
        """Return the directory to resume from, or None for a new start. Collective; rank 0 looks for it."""
        found: list[str] = []

        def find() -> None:
            if group_rank() == 0 and given is not None and given is not False:
                found.append(_last_checkpoint(self.args.output_dir) if given is True else _as_text(given))

        call = "BoosterTrainer.train()"
        error = error_of(find)
        checkpoint = next(iter(all_gather_text(call, found, error=error)[0]), None)
        error = None if checkpoint is None else error_of(functools.partial(_check_checkpoint, checkpoint))
        check_same_across_ranks(call, [], error=error)
        return checkpoint

    def create_accelerator_and_postprocess(self) -> None:
        """Check the arguments, and let the Booster take the Accelerator's place; see Note [Trainer]. Collective."""
        error = error_of(self._check_arguments)
        check_same_across_ranks("making a BoosterTrainer", [], error=error)
        super().create_accelerator_and_postprocess()
        self.accelerator = _BoosterAccelerator(self.accelerator, self)
        self.gather_function = self.accelerator.gather_for_metrics

    def _check_arguments(self) -> None:
        if self.booster.plugin.pp_size > 1:
            raise ConfigError(
                f"BoosterTrainer with pp_size={self.booster.plugin.pp_size}: Trainer calls the model, and a stage has"
                " some of its layers: write the loop with booster.execute_pipeline(), or choose tp_size or another"
                " plugin"
            )
        for name, instead in _REFUSED.items():
            given = getattr(self.args, name, None)
            if given:
                raise ConfigError(
                    f"TrainingArguments({name}={given!r}) is a choice of the Booster of a BoosterTrainer: {instead}"
                )
        for name in ("split_batches", "dispatch_batches"):
            if getattr(self.args.accelerator_config, name):
                raise ConfigError(
                    f"TrainingArguments(accelerator_config={{'{name}': True}}) asks for other batches than the"
                    " Booster's loaders give: leave it out; batch sizes are per data-parallel rank"
                )
        if getattr(self.args, "train_sampling_strategy", None) == "batch_rebalance":
            raise ConfigError(
                "TrainingArguments(train_sampling_strategy='batch_rebalance') makes each rank's batches itself, and the"
                " Booster's loaders divide one order among the ranks: use 'random' or 'group_by_length'"
            )

    # The model and its optimizer.

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: DataLoader[Any] | None = None) -> Any:
        """Return the boosted model; the first call boosts it, with its optimizer. Collective."""
        if not isinstance(self.model_wrapped, ModelWrapper):
            if self.train_dataset is not None and self.optimizer is None:
                self.create_optimizer()
            self.model_wrapped, self.optimizer, *_ = self.booster.boost(self.model, self.optimizer)
        return self.model_wrapped

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Do nothing: boost() places the model, of which a rank may hold a part."""

    def get_total_train_batch_size(self, args: Any = None) -> int:
        """Return the number of samples of a step of the optimizer, over all ranks."""
        num_samples: int = self._train_batch_size * self.args.gradient_accumulation_steps * self.booster.plugin.dp_size
        return num_samples

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor | None:
        return self.booster.clip_grad_norm_(self.optimizer, self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return self.booster.clip_grad_norm_(self.optimizer, float("inf")) if grad_norm is None else grad_norm

    # Checkpoints: one training state, instead of a file for each of model, optimizer, scheduler, scaler and RNG.

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model and the processing class for `from_pretrained`, in shards. Collective.

        Of a `PeftModel` the adapters are saved, as Trainer does; a checkpoint holds both.

        Args:
            output_dir: Directory; optional, defaults to the `output_dir` of the arguments.
            _internal_call: Whether Trainer calls it for a checkpoint.
        """
        directory = self.args.output_dir if output_dir is None else output_dir
        model = self._wrap_model(self.model)
        is_adapted = has_adapters(model)
        if is_adapted:
            self.booster.save_lora_as_pretrained(model, directory)
        if self.args.save_only_model or not (_internal_call or is_adapted):
            self.booster.save_model(model, directory, shard=True)
        if self.processing_class is not None and self.args.should_save:
            self.processing_class.save_pretrained(directory)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self.booster.save(output_dir, self.model_wrapped, self.optimizer, self.lr_scheduler)

    def _save_rng_state(self, output_dir: str) -> None:
        """Do nothing: the training state has the RNG states of all ranks."""

    def _save_scaler(self, output_dir: str) -> None:
        """Do nothing: the optimizer's state has the loss scale."""

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Do nothing: the model is loaded with the optimizer, after it was boosted."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self.booster.load(checkpoint, self.model_wrapped, self.optimizer, self.lr_scheduler)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Do nothing: they are loaded with the training state, and the Booster's loaders draw no random numbers."""

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Do nothing: the loss scale is loaded with the optimizer."""

    def _load_best_model(self) -> None:
        self.booster.load_model(self.model_wrapped, os.fspath(self.state.best_model_checkpoint))

    # Evaluation.

    def prediction_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate a batch as Trainer does, and count its samples for the mean of the losses. Collective."""
        sizes = [one.shape[0] for one in inputs.values() if isinstance(one, torch.Tensor) and one.dim() > 0]
        self.accelerator.num_samples = sizes[0] if sizes else None
        return super().prediction_step(model, inputs, *args, **kwargs)


def _is_complete(directory: Path) -> bool:
    """Return whether both were written: the training state, and after it what Trainer needs to resume."""
    has_state = read_training_manifest(Storage(), directory) is not None
    return has_state and (directory / "trainer_state.json").is_file()


def _last_checkpoint(output_dir: str) -> str:
    """Return the complete checkpoint of the highest step; one that a crash left incomplete is passed over."""
    steps = {path: path.name.removeprefix("checkpoint-") for path in Path(output_dir).glob("checkpoint-*")}
    found = [path for path, step in steps.items() if step.isdecimal() and _is_complete(path)]
    if not found:
        raise ConfigError(
            f"resume_from_checkpoint=True, and {output_dir!r} has no complete checkpoint of BoosterTrainer: leave it"
            " out for a new start. save_only_model=True writes none to resume from"
        )
    return str(max(found, key=lambda path: int(steps[path])))


def _as_text(given: Any) -> str:
    check_path("resume_from_checkpoint", given)
    return str(given)


def _check_checkpoint(directory: str) -> None:
    if not _is_complete(Path(directory)):
        raise ConfigError(
            f"resume_from_checkpoint={directory!r} is not a directory with training_state.manifest.json and"
            " trainer_state.json (a crash, save_only_model=True or another Trainer leaves one without): give one that"
            " BoosterTrainer has saved, such as 'checkpoint-500', or True for the last complete one in output_dir"
        )


class _BoosterAccelerator:
    """Accelerator of a `BoosterTrainer`; see Note [Trainer].

    Attributes:
        num_samples: Number of samples of this rank's batch in evaluation, None if unknown.
    """

    def __init__(self, accelerator: Any, trainer: BoosterTrainer) -> None:
        self._accelerator = accelerator
        self._trainer = trainer
        self._booster = trainer.booster
        self.num_samples: int | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "_accelerator":  # __init__ did not run
            raise AttributeError(name)
        return getattr(self._accelerator, name)

    def free_memory(self, *objects: Any) -> Any:
        """Keep the boosted objects, which a second `train` uses."""
        return objects

    def prepare(self, one: Any) -> Any:
        """Return a loader of this rank's samples; a boosted optimizer is returned unchanged."""
        if not isinstance(one, DataLoader):
            return one
        args = self._trainer.args
        seed = args.seed if args.data_seed is None else args.data_seed
        has_generator = one.generator is not None or getattr(one.sampler, "generator", None) is not None
        return self._booster.prepare_dataloader(one, seed=None if has_generator else seed)

    def unwrap_model(self, model: nn.Module, *_: Any, **__: Any) -> nn.Module:
        """Return the user's model."""
        return self._booster.unwrap_model(model)

    @property
    def gradient_state(self) -> Any:
        """The flags of an accumulation, and whether the current batch is the last of its loader."""
        return _GradientState(self._accelerator.gradient_state)

    def no_sync(self, model: Any) -> contextlib.AbstractContextManager[None]:
        """Return the context of all batches of a step but the last."""
        if not self._booster.plugin.support_no_sync():
            return contextlib.nullcontext()
        return self._booster.no_sync(model, self._trainer.optimizer)

    def clip_grad_norm_(self, _: Any, max_norm: float, *__: Any, **___: Any) -> torch.Tensor | None:
        """Clip gradients, and return their norm before it; loops of older versions call it."""
        return self._booster.clip_grad_norm_(self._trainer.optimizer, max_norm)

    def backward(self, loss: torch.Tensor, **_: Any) -> None:
        """Compute gradients."""
        self._booster.backward(loss, self._trainer.optimizer)

    # Trainer divides by the number of processes, and sums what it gathers, such as numbers of tokens. Ranks that
    # compute a batch together count once.

    @property
    def num_processes(self) -> int:
        """Number of data-parallel ranks."""
        return self._booster.plugin.dp_size

    def gather(self, data: Any) -> Any:
        """Return the tensors of the data-parallel ranks, one after another. Collective."""
        return map_tensors(functools.partial(all_gather_equal, group=self._booster.plugin.data_group), data)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step was skipped, because a scaled gradient overflowed."""
        optimizer: Optimizer = self._trainer.optimizer
        return isinstance(optimizer, OptimizerWrapper) and optimizer.step_was_skipped

    def gather_for_metrics(self, data: Any, *_: Any, **__: Any) -> Any:
        """Return the data of all ranks, without the samples that fill up the last batch."""
        rows = self.num_samples
        if isinstance(data, torch.Tensor) and data.dim() == 1 and rows is not None:
            data = data[:rows]  # Trainer repeats the mean loss of a batch by the batch size of the arguments
        return self._booster.gather_for_metrics(data)


class _GradientState:
    """Accelerate's flags of an accumulation, and the end of the Booster's loaders, which Accelerate does not know."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the current batch is the last."""
        position = active_position()
        return bool(self._state.end_of_dataloader) if position is None else position.is_last


class _RestOfEpoch:
    """Batches of an epoch after the first ones. A position of the loader keeps its seeds of samples, too."""

    def __init__(self, loader: DistributedDataLoader[Any], num_batches: int) -> None:
        self._loader = loader
        self._num_batches = num_batches

    def set_epoch(self, epoch: int) -> None:
        """Set the position of the loader. Collective if the sampler is a user's."""
        sampler: Any = self._loader.epoch_sampler
        sampler.start_at(epoch, 0)
        position = 0
        for _ in range(self._num_batches):
            position = sampler.batch_at(position).stop
        self._loader.load_state_dict(self._loader.state_dict() | {"epoch": epoch, sampler.position_key: position})

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)


@contextlib.contextmanager
def _skipping_by_position() -> Iterator[None]:
    """Context in which Trainer's loop skips batches of the Booster's loaders by their position.

    Accelerate's function makes a plain loader of the dataset, where random samples would be other ones.
    """
    trainer: Any = sys.modules[Trainer.__module__]
    of_accelerate = trainer.skip_first_batches

    def skip_first_batches(loader: Any, num_batches: int = 0) -> Any:
        if isinstance(loader.dataset, IterableDataset):
            raise ConfigError(
                f"the checkpoint is {num_batches} batches inside of an epoch of a {type(loader.dataset).__name__},"
                " where Trainer would read all ranks' samples to skip them: use a dataset with a length, or"
                " TrainingArguments(ignore_data_skip=True), which starts the stream again"
            )
        is_ours = isinstance(loader, DistributedDataLoader)
        return _RestOfEpoch(loader, num_batches) if is_ours else of_accelerate(loader, num_batches)

    trainer.skip_first_batches = skip_first_batches
    try:
        yield
    finally:
        trainer.skip_first_batches = of_accelerate
