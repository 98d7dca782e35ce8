"""Base classes of the distributed plugins and of the models that they boost."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, TypeVar, get_type_hints

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from booster.comm import (
    check_same_across_ranks,
    group_rank,
    group_size,
    is_initialized,
    release_groups,
    release_unused_groups,
    sum_dtype,
)
from booster.core.compiling import not_compiled
from booster.core.shard_spec import shard_spec_of
from booster.data import shard_dataloader
from booster.device import current_device
from booster.errors import ConfigError, format_list
from booster.interface import Boosted, ModelWrapper, OptimizerWrapper, Plugin
from booster.kernels.checksum import tensor_crc32
from booster.validation import error_of

from .sync_batch_norm import synchronize_buffers

if TYPE_CHECKING:
    from booster.checkpoint_io import CheckpointIO

_NUM_WATCHED_FORWARDS = 4

Arguments = TypeVar("Arguments")
WrappedPair: TypeAlias = tuple[ModelWrapper, OptimizerWrapper | None]
"""Boosted model and optimizer."""


def arguments_of(cls: type[Arguments], given: Mapping[str, Any]) -> Arguments:
    """Create a config from the constructor arguments that have the names of its fields.

    A field without an argument of its name is a nested config, which is created in the same way.
    """
    names = [field.name for field in fields(cls)]  # type: ignore[arg-type]  # a dataclass
    nested = {} if given.keys() >= set(names) else get_type_hints(cls)
    return cls(**{name: given[name] if name in given else arguments_of(nested[name], given) for name in names})


@contextmanager
def taking_hooks(parameter: nn.Parameter) -> Iterator[None]:
    """Let a floating-point parameter take gradient hooks in the block, also a frozen one, for when it trains."""
    trains = parameter.requires_grad
    parameter.requires_grad_(True)
    try:
        yield
    finally:
        parameter.requires_grad_(trains)


class PluginConfig(ABC):
    """Base of the frozen dataclasses of a plugin's options, which have the names of its constructor arguments.

    Attributes:
        per_rank: Names of options that may differ between ranks.
    """

    __slots__ = ()
    per_rank: ClassVar[frozenset[str]] = frozenset({"verbose"})

    @abstractmethod
    def check(self, world_size: int) -> None:
        """Raise `ConfigError` if an option is invalid."""

    @property
    def fingerprint(self) -> list[str]:
        """Options that must be equal on all ranks."""
        lines: list[str] = []
        for name in (field.name for field in fields(self)):  # type: ignore[arg-type]  # a dataclass
            value = getattr(self, name)
            if hasattr(value, "fingerprint"):  # a nested config
                lines += value.fingerprint
            elif name not in self.per_rank:
                lines.append(f"{name}={value!r}")
        return lines


class DistributedPlugin(Plugin):
    """Base of plugins that need an initialized process group; each rank computes on one device.

    The constructor of a subclass calls `super().__init__()`, stores its arguments, and calls
    `self._verify_arguments(...)`. Only then may it create process groups: with different arguments, ranks would wait
    for each other until the timeout. It defines `place`, `_wrap`, `supported_precisions` and `control_precision`.

    Raises:
        ConfigError: `launch` was not called.
    """

    def __init__(self) -> None:
        if not is_initialized():
            raise ConfigError(
                f"{type(self).__name__} was created before the process group: call"
                " booster.launch_from_torch() and start the script with `booster run`"
            )
        release_unused_groups()  # of deleted plugins
        self._device = current_device()

    def _verify_arguments(self, check: Callable[[], object]) -> None:
        """Raise on all ranks if `check` raises on any, or if the ranks' arguments differ. Collective."""
        error = error_of(check)
        check_same_across_ranks(
            f"making a {type(self).__name__}", [] if error else self.config_fingerprint(), error=error
        )

    def reduction_dtype(self, parameter_dtype: torch.dtype) -> torch.dtype:
        return sum_dtype(parameter_dtype) if self._device.type == "cpu" else parameter_dtype

    def supported_devices(self) -> list[str]:
        return ["cpu", self._device.type]

    def control_device(self) -> bool:
        return True

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def dp_size(self) -> int:
        return group_size()

    @property
    def dp_rank(self) -> int:
        return group_rank()

    def configure(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        criterion: Callable[..., Any] | None = None,
        dataloader: DataLoader[Any] | None = None,
        lr_scheduler: LRScheduler | None = None,
        *,
        placed: Any = None,
    ) -> Boosted:
        boosted, wrapped = self._wrap(model, optimizer, placed)
        if dataloader is not None:
            dataloader = shard_dataloader(dataloader, dp_rank=self.dp_rank, dp_size=self.dp_size)
        return boosted, wrapped, criterion, dataloader, lr_scheduler

    @abstractmethod
    def _wrap(self, model: nn.Module, optimizer: Optimizer | None, placed: Any) -> WrappedPair:
        """Return the boosted model and optimizer. Collective."""

    def close(self) -> None:
        release_groups(self._groups())

    def _groups(self) -> Iterable[dist.ProcessGroup | None]:
        """Return the process groups that `close` releases, in the same order on all ranks; None entries are ignored."""
        return ()

    def control_checkpoint_io(self) -> bool:
        return False

    def get_checkpoint_io(self) -> CheckpointIO:
        from booster.checkpoint_io import GeneralCheckpointIO

        return GeneralCheckpointIO()


class DistributedModel(ModelWrapper):
    """Boosted model with buffers, which forwards in training change on each rank, that a step makes equal again.

    They become equal, too, before a forward in training that follows another one without a step between.

    Args:
        module: The user's model.
        group: Ranks with equal buffers; optional, defaults to the world group.
        is_primary: If True, this rank saves what is equal on all ranks.
        broadcasts_buffers: If True, buffers become those of the group's first rank, and statistics of instance norms
            the mean of all ranks.
    """

    def __init__(
        self, module: nn.Module, group: dist.ProcessGroup | None, *, is_primary: bool, broadcasts_buffers: bool
    ) -> None:
        super().__init__(module, is_primary=is_primary)
        self._group = group
        self.broadcasts_buffers = broadcasts_buffers
        self._has_changed_buffers = False

    def _begin_training_forward(self) -> None:
        """Make the buffers equal before a forward, which may change them. Does nothing in evaluation. Collective."""
        if self.broadcasts_buffers and self.training and torch.is_grad_enabled():
            self._note_forward()

    @not_compiled
    def _note_forward(self) -> None:
        self.synchronize_buffers()
        self._has_changed_buffers = True

    def synchronize_buffers(self) -> None:
        """Make the buffers equal if a forward may have changed them. Collective: all ranks must have run the same."""
        if self._has_changed_buffers:
            self._has_changed_buffers = False
            synchronize_buffers(self.module, self._group)


class ForwardWrites:
    """Finds weights that a forward in training writes to, for the ranks to compare. Watches the first few only."""

    def __init__(self) -> None:
        self._num_left = _NUM_WATCHED_FORWARDS
        self._checksum = 0
        self._names: list[str] = []

    def begin(self, module: nn.Module) -> list[int] | None:
        """Return the versions of the weights before a forward; None if it is not watched."""
        if torch.compiler.is_compiling() or self._num_left == 0 or not (module.training and torch.is_grad_enabled()):
            return None
        self._num_left -= 1
        return [_version_of(one) for one in module.parameters()]

    def end(self, module: nn.Module, versions: Sequence[int]) -> None:
        """Note what the forward has written since `begin`. Experts are not equal on all ranks, and left out."""
        pairs = zip(module.named_parameters(), versions, strict=False)
        written = {name: one for (name, one), version in pairs if _version_of(one) != version}
        for name, one in written.items():
            if not shard_spec_of(one).is_expert:
                self._names.append(name)
                self._checksum = zlib.crc32(tensor_crc32(one).to_bytes(4, "little"), self._checksum)

    def bytes(self) -> tuple[int, int]:
        """Return what must be equal on all ranks: a checksum of all that was written since the last `forget`."""
        return self._checksum & 255, self._checksum >> 8 & 255

    def forget(self) -> None:
        """Begin again, as the ranks have compared."""
        if self._names:
            self._checksum = 0
            self._names.clear()

    def error(self) -> ConfigError:
        """Return the error of writes that differ."""
        names = format_list(map(repr, dict.fromkeys(self._names)), 3) or "those of another rank"
        return ConfigError(
            f"a forward in training wrote to weights ({names}), other values on each rank, so that their models differ:"
            " write weights between steps, to equal values on all ranks, or register what follows from the batch, such"
            " as a codebook, as a buffer, which is made equal"
        )


def _version_of(parameter: nn.Parameter) -> int:
    return -1 if parameter.is_inference() else parameter._version


def check_memory_is_apart(model: nn.Module, trained: list[nn.Parameter]) -> None:
    """Check that no two of the parameters share memory.

    Raises:
        ConfigError: Two of them do.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    seen: dict[int, str] = {}
    for parameter in trained:
        if parameter.numel() == 0 or parameter.is_meta:
            continue
        with torch._C.DisableTorchFunction():  # a lazy tensor reports an address to no other caller
            address = parameter.data_ptr()
        other = seen.setdefault(address, names[id(parameter)])
        if other != names[id(parameter)]:
            raise ConfigError(
                f"{other!r} and {names[id(parameter)]!r} are two parameters in the same memory, which would come apart:"
                " tie them by making them one nn.Parameter, as in head.weight = embedding.weight"
            )


def check_gradients_add_up(model: nn.Module, dp_size: int) -> None:
    """Check that the gradients of all ranks' parts of a batch add up to that of the batch.

    Raises:
        ConfigError: Those of an embedding do not.
    """
    for name, module in model.named_modules() if dp_size > 1 else ():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.scale_grad_by_freq:
            raise ConfigError(
                f"{name!r} has scale_grad_by_freq=True: its gradient is divided by how often a row is looked up, which"
                f" each of the {dp_size} ranks counts in its own part of the batch. Leave scale_grad_by_freq out"
            )


def check_weights_stay_equal(model: nn.Module, dp_size: int) -> None:
    """Check that no module's forward writes to weights that several ranks hold.

    Raises:
        ConfigError: One does.
    """
    for name, module in model.named_modules() if dp_size > 1 else ():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise ConfigError(
                f"{name!r} has max_norm={module.max_norm}: its forward scales the rows that are looked up, on each of"
                f" the {dp_size} ranks others, so that their weights would differ. Leave max_norm out, and after"
                f" optimizer.step() scale all rows under torch.no_grad(), by"
                f" weight.renorm_({module.norm_type:g}, 0, {module.max_norm})"
            )


def refuse_conversion(model: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], where: str) -> None:
    """Check that `nn.Module._apply(fn)` changes neither dtype nor device of a boosted model's parameters.

    Args:
        model: The user's model.
        fn: Function of a parameter.
        where: What has the parameters, for the message.

    Raises:
        ConfigError: It does.
    """
    for parameter in model.parameters():
        probe = fn(torch.zeros((), dtype=parameter.dtype, device=parameter.device))
        if probe.dtype != parameter.dtype or probe.device != parameter.device:
            raise ConfigError(
                f"the boosted model was to become {probe.dtype} on {probe.device}, by .to(), .half() or the like, and"
                f" is {parameter.dtype} on {parameter.device}, where its {where}: do it before boost()"
            )


def check_save_pretrained(module: nn.Module, is_sharded: Callable[[nn.Module], bool]) -> None:
    """Let `save_pretrained` of a model of transformers raise where it would write this rank's shards only. In place.

    Args:
        module: The user's model.
        is_sharded: Whether the model's parameters are shards when `save_pretrained` is called; a module's function.
    """
    if hasattr(module, "save_pretrained"):
        module.save_pretrained = partial(_save_pretrained, module.save_pretrained, is_sharded)  # type: ignore[assignment, arg-type]


def _save_pretrained(original: Any, is_sharded: Callable[[nn.Module], bool], *args: Any, **kwargs: Any) -> Any:
    if kwargs.get("state_dict") is None and is_sharded(original.__self__):
        raise ConfigError(
            "save_pretrained() of a sharded model would write this rank's shards only: write"
            " booster.save_model(model, directory, shard=True) on all ranks, which from_pretrained() reads, or for an"
            " adapter of peft pass the saved weights as state_dict="
        )
    return original(*args, **kwargs)


def refuse_quantized_weights(model: nn.Module, plugin: str, reason: str) -> None:
    """Check that no weights of a model are quantized by bitsandbytes.

    Args:
        model: The user's model.
        plugin: Plugin with its arguments, for the message.
        reason: Why it can't train on them.

    Raises:
        ConfigError: Some are.
    """
    for name, parameter in model.named_parameters():
        if type(parameter).__module__.partition(".")[0] == "bitsandbytes":
            raise ConfigError(
                f"{name!r} is quantized by bitsandbytes ({type(parameter).__name__}), and {plugin} {reason}: use"
                " TorchFSDPPlugin, which shards such weights, LowLevelZeroPlugin or TorchDDPPlugin, or load the model"
                " without a quantization_config"
            )
