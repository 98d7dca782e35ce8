"""Index of a sharded checkpoint: file of each tensor, with validated file names."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from booster.checkpoint_io.layout import FileNames
from booster.errors import CheckpointError, ConfigError, format_list
from booster.interface import TensorSpec

from .json import parse_json

MAX_TENSORS = 1_000_000
_MAX_NAME = 255  # limit of file systems
_MAX_LISTED = 10


def parse_index(raw: bytes, source_name: str, file_names: FileNames) -> dict[str, list[str]]:
    """Return the tensors of every file in an index.

    Args:
        raw: Content of the index.
        source_name: Path of the index for messages.
        file_names: File names of this checkpoint.

    Raises:
        CheckpointError: Not an index, or an index with names other than tensor files in the same directory.
    """
    document = parse_json(raw, source_name)
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weight_map, dict) or len(weight_map) > MAX_TENSORS:
        raise CheckpointError(
            f"{source_name} has no weight_map, or one of more than a million tensors: it is damaged or not an index."
            " Take another copy of it"
        )
    if not weight_map:
        # The index of an optimizer without states has no entries, but there is one shard, without tensors.
        return {file_names.shard(1, 1): []}
    named: dict[str, list[str]] = {}
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or file_name not in named:
            check_file_name(file_name, source_name, file_names)
        named.setdefault(file_name, []).append(name)
    return named


def check_file_name(file_name: Any, source_name: str, file_names: FileNames) -> None:
    """Check that an untrusted name is that of a tensor file in the same directory.

    Raises:
        CheckpointError: The name is a path, hidden, not printable, or has another suffix.
    """
    is_plain = (
        isinstance(file_name, str)
        and len(file_name.encode("utf-8", "surrogatepass")) <= _MAX_NAME
        and not file_name.startswith(".")
        and not any(character in '/\\:*?"<>|' or not character.isprintable() for character in file_name)
        and file_name.endswith(f".{file_names.suffix}")
    )
    if not is_plain:
        raise CheckpointError(
            f"{source_name} names the file {str(file_name)[:200]!r}: it may name only .{file_names.suffix} files beside"
            " itself. Do not trust this checkpoint"
        )


def check_index_entries(names: Iterable[str], specs: Mapping[str, TensorSpec], path: object, index: str) -> None:
    """Check that a file holds the tensors that the index assigns to it.

    Raises:
        CheckpointError: Tensors are missing; the message lists them.
    """
    missing = [name for name in names if name not in specs]
    if missing:
        raise CheckpointError(
            f"{path} lacks {len(missing)} tensors that {index} assigns to it, such as {format_names(missing)}: the"
            " files are from different saves, or one is damaged"
        )


def format_names(names: Iterable[str]) -> str:
    """Format the first ten names for a message, and the number of further ones."""
    return format_list((repr(name[:200]) for name in names), _MAX_LISTED) or "nothing"


# transformers' save_pretrained writes the config with the model's class and dtype, without attributes of the file that
# it was read from, and without compile settings. Here the same is done to a copy, which is asked for its JSON text:
# save_pretrained itself writes files and would bypass the storage.


def config_documents(model: nn.Module) -> dict[str, bytes]:
    """Return the contents of `config.json` and `generation_config.json`, if the model has such configs.

    Args:
        model: User's model. Any config with a `to_json_string` method is supported.

    Raises:
        ConfigError: A config cannot be written as JSON.
    """
    documents: dict[str, bytes] = {}
    config: Any = getattr(model, "config", None)
    if not _has_json_text(config):
        return documents
    config_copy = copy.deepcopy(config)
    if hasattr(config_copy, "architectures"):
        config_copy.architectures = [type(model).__name__]
    if hasattr(config_copy, "dtype"):
        dtypes = (parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
        config_copy.dtype = str(next(dtypes, torch.get_default_dtype())).removeprefix("torch.")
    documents["config.json"] = _config_json(config_copy, "config")
    generation_config: Any = getattr(model, "generation_config", None)
    can_generate = getattr(model, "can_generate", None)
    if _has_json_text(generation_config) and (can_generate is None or can_generate()):
        documents["generation_config.json"] = _config_json(copy.deepcopy(generation_config), "generation_config")
    return documents


def _has_json_text(config: Any) -> bool:
    return not isinstance(config, type) and callable(getattr(config, "to_json_string", None))


def _config_json(config: Any, what: str) -> bytes:
    if hasattr(config, "transformers_weights"):
        del config.transformers_weights
    if getattr(config, "compile_config", None) is not None:
        config.compile_config = None
    try:
        text = config.to_json_string()
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"the model's {what} cannot be written as JSON: {error}. Remove values other than strings, numbers, lists"
            " and dicts from it"
        ) from error
    if not isinstance(text, str):
        raise ConfigError(f"the model's {what}.to_json_string() returned a {type(text).__name__}: it must return a str")
    return text.encode("utf-8")
