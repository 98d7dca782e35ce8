"""One call to save a model or an optimizer: its arguments checked, then carried out by the rank that writes."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike, fspath
from pathlib import Path

import torch
from torch import nn

from booster.checkpoint_io.commit import PendingDirectory, new_file
from booster.checkpoint_io.huggingface import write_configs
from booster.checkpoint_io.layout import (
    BIN_SUFFIXES,
    OPTIMIZER,
    SAFETENSORS_SUFFIXES,
    FileNames,
    Kind,
    index_document,
    is_valid_prefix,
    plan_files,
)
from booster.checkpoint_io.storage import Storage
from booster.checkpoint_io.tensor_bytes import num_bytes
from booster.checkpoint_io.writer import check_storable, write_json, write_tensors
from booster.errors import ConfigError

__all__ = ["SaveRequest"]

MEGABYTE = 10**6


class SaveRequest:
    """Where and how to save; see `CheckpointIO.save_model` for the arguments.

    Raises:
        ConfigError: Arguments that contradict each other or themselves.
    """

    def __init__(
        self,
        checkpoint: str | PathLike[str],
        kind: Kind,
        shard: bool,
        prefix: str | None,
        size_per_shard: int,
        use_safetensors: bool,
    ) -> None:
        text = fspath(checkpoint)
        if not text:
            raise ConfigError("the checkpoint's path is empty: give a file, or with shard=True a directory")
        if isinstance(size_per_shard, bool) or not isinstance(size_per_shard, int) or size_per_shard < 1:
            raise ConfigError(f"size_per_shard={size_per_shard!r} is no size in MB: give a whole number from 1 on")
        _check_prefix(prefix, shard)
        self.path = Path(text)
        if not shard:
            _check_suffix(self.path, use_safetensors)
        self._kind = kind
        self._is_sharded = shard
        self._is_safetensors = use_safetensors
        self._max_shard_bytes = size_per_shard * MEGABYTE
        self._names: FileNames = kind.names(is_safetensors=use_safetensors, prefix=prefix)

    def write_model(self, storage: Storage, module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
        """Writes the model's files. One rank calls it.

        Args:
            storage: Where to write.
            module: The user's model, for its configs and its number of parameters.
            tensors: What to write.
        """
        check_storable(tensors)
        if not self._is_sharded:
            self._write_single(storage, tensors, None)
            return
        num_parameters = sum(parameter.numel() for parameter in module.parameters())
        with PendingDirectory(storage, self.path) as pending:
            write_configs(module, pending.path)
            self._write_shards(pending, tensors, num_parameters, [])

    def write_optimizer(self, storage: Storage, tensors: Mapping[str, torch.Tensor], groups: str) -> None:
        """Writes the optimizer's files. One rank calls it.

        Args:
            storage: Where to write.
            tensors: The states and master weights.
            groups: Everything else, as JSON.
        """
        check_storable(tensors)
        if not self._is_sharded:
            self._write_single(storage, tensors, groups)
            return
        with PendingDirectory(storage, self.path) as pending:
            with pending.new_file(self._names.groups) as file:
                file.write(groups.encode("utf-8"))
            self._write_shards(pending, tensors, None, [self._names.groups])

    def _write_single(self, storage: Storage, tensors: Mapping[str, torch.Tensor], groups: str | None) -> None:
        with new_file(storage, self.path) as file:
            write_tensors(file, tensors, is_safetensors=self._is_safetensors, groups=groups)

    def _write_shards(
        self,
        pending: PendingDirectory,
        tensors: Mapping[str, torch.Tensor],
        num_parameters: int | None,
        companions: list[str],
    ) -> None:
        sizes = {name: num_bytes(tensor) for name, tensor in tensors.items()}
        plan = plan_files(
            sizes, self._names, max_shard_bytes=self._max_shard_bytes, always_index=self._kind == OPTIMIZER
        )
        for file_name, names in plan.files.items():
            with pending.new_file(file_name) as file:
                part = {name: tensors[name] for name in names}
                write_tensors(file, part, is_safetensors=self._is_safetensors)
        if plan.index is not None:
            with pending.new_file(plan.index) as file:
                write_json(file, index_document(plan, sizes, num_parameters))
        pending.commit(members=[*plan.files, *companions], index=plan.index, is_stale=self._names.owns)


def _check_prefix(prefix: str | None, shard: bool) -> None:
    if prefix is None:
        return
    if not shard:
        raise ConfigError(
            f"prefix={prefix!r} goes into the names of shards, and shard=False writes to the path as it is"
        )
    if not is_valid_prefix(prefix):
        raise ConfigError(
            f"prefix={prefix!r} cannot be told apart within a file name: use letters, digits, '_' and '-',"
            " such as 'fp16'"
        )


def _check_suffix(path: Path, use_safetensors: bool) -> None:
    allowed, other = (SAFETENSORS_SUFFIXES, BIN_SUFFIXES) if use_safetensors else (BIN_SUFFIXES, SAFETENSORS_SUFFIXES)
    if path.is_dir():
        raise ConfigError(
            f"{path} is a directory, and shard=False writes one file: give a file name, or pass shard=True"
        )
    if path.suffix in allowed:
        return
    flag = f"pass use_safetensors={not use_safetensors}, " if path.suffix in other else ""
    raise ConfigError(
        f"{path} ends in {path.suffix!r}, and use_safetensors={use_safetensors} writes another format: {flag}give a"
        f" name that ends in {' or '.join(allowed)}"
    )
