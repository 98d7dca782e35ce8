"""Config files that make a directory of weights loadable by `from_pretrained`."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from booster.errors import ConfigError

__all__ = ["config_documents"]

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
        config_copy.dtype = _dtype_name(model)
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


def _dtype_name(model: nn.Module) -> str:
    dtypes = (parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    return str(next(dtypes, torch.get_default_dtype())).removeprefix("torch.")
