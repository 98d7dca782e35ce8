"""What makes a directory of weights a model for `from_pretrained`: the model's own config, written by itself."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn

__all__ = ["write_configs"]


def write_configs(model: nn.Module, directory: Path) -> None:
    """Writes `config.json` and `generation_config.json` where the model has such configs; nothing else has to be there.

    Args:
        model: The user's model; its configs are asked for `save_pretrained`, whatever library they are from.
        directory: A directory that exists.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "save_pretrained"):
        return
    described = copy.deepcopy(config)
    # As transformers' own save_pretrained: the first opens the right class, the second the right number format.
    described.architectures = [type(model).__name__]
    described.dtype = _dtype_name(model)
    described.save_pretrained(directory)
    generation_config: Any = getattr(model, "generation_config", None)
    can_generate = getattr(model, "can_generate", None)
    if hasattr(generation_config, "save_pretrained") and (can_generate is None or can_generate()):
        generation_config.save_pretrained(directory)


def _dtype_name(model: nn.Module) -> str:
    dtypes = (parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    return str(next(dtypes, torch.get_default_dtype())).removeprefix("torch.")
