"""Files of a base model for a model with LoRA of peft, whose tensors have other names there.

Note [Names of the base]
peft puts the user's model into `base_model.model`, a layer with an adapter into `base_layer` of its wrapper, and a
layer of `modules_to_save` into `original_module` beside the copies that train. Without these parts, names are those of
the base's own files. A copy has the name of its original, and is filled with it: it would otherwise keep what the
original was before. The tensors of the adapters are in no file of a base, and stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

from torch import nn

from booster.errors import ConfigError
from booster.interface import TensorSlice

_PREFIX = "base_model.model."
_WRAPPERS = re.compile(r"\.(?:base_layer|original_module|modules_to_save\.[^.]+)(?=\.)")
# Adapters that start at random, whatever the base's weights are.
_INDEPENDENT = (True, False, None, "gaussian", "orthogonal")


def names_in_base(model: nn.Module, names: Collection[str], stored: Collection[str]) -> dict[str, str]:
    """Return the names that a model's tensors have in its base, or nothing unless the files are those of the base.

    Args:
        model: The user's model.
        names: Names of its tensors on all ranks.
        stored: Names of the stored tensors.

    Raises:
        ConfigError: The files are those of the base, and an adapter was computed from other weights of it.

    Collective: no.
    """
    configs: Any = getattr(model, "peft_config", None)
    if not isinstance(configs, dict) or not all(name.startswith(_PREFIX) for name in names):
        return {}
    if any(name.startswith(_PREFIX) for name in stored):
        return {}
    for name, config in configs.items():
        start = "use_dora=True" if getattr(config, "use_dora", False) else getattr(config, "init_lora_weights", None)
        if start not in _INDEPENDENT:
            raise ConfigError(
                f"the adapter {name!r} ({start}) was computed from the weights of the base, which this load would"
                " replace: load the base before the adapter is added, as by from_pretrained()"
            )
    return {name: _WRAPPERS.sub("", name.removeprefix(_PREFIX)) for name in names if not is_of_lora(name)}


def is_of_lora(name: str) -> bool:
    """Return whether a tensor belongs to an adapter."""
    return any(part.startswith("lora_") for part in name.split("."))


def base_of(model: Any) -> nn.Module:
    """Return the base of a model with adapters."""
    base: nn.Module = model.get_base_model()
    return base


def renamed_slices(slices: Iterable[TensorSlice], names: dict[str, str]) -> list[TensorSlice]:
    """Return slices under other names."""
    return [replace(one, name=names.get(one.name, one.name)) for one in slices]
