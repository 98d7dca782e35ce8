"""The models by name."""

from __future__ import annotations

import importlib.util

import pytest

from zoo.adapters import ADAPTED_MODELS
from zoo.attention import ATTENTION_MODELS
from zoo.chains import CHAINS
from zoo.custom import CUSTOM_MODELS
from zoo.discrete import DISCRETE_MODELS
from zoo.entry import ZooEntry
from zoo.experts import EXPERT_MODELS
from zoo.language import LANGUAGE_MODELS
from zoo.layer_variants import LAYER_VARIANTS
from zoo.moe import MOE_MODELS
from zoo.recommendation import RECOMMENDATION_MODELS
from zoo.transformers_models import TRANSFORMERS_MODELS
from zoo.transformers_sweep import TASKS, sweep_model
from zoo.user_written import USER_WRITTEN_MODELS

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs the extra `hf`: transformers is not installed"
)
_MODELS = {
    entry.name: entry
    for entry in (
        *CUSTOM_MODELS,
        *LANGUAGE_MODELS,
        *ATTENTION_MODELS,
        *DISCRETE_MODELS,
        *RECOMMENDATION_MODELS,
        *TRANSFORMERS_MODELS,
        *USER_WRITTEN_MODELS,
        *CHAINS,
        *LAYER_VARIANTS,
        *EXPERT_MODELS,
        *MOE_MODELS,
        *ADAPTED_MODELS,
    )
}


def get_model(name: str, num_layers: int | None = None) -> ZooEntry:
    """Returns a model of the zoo.

    Args:
        name: Of the model; or of a class of transformers, of those in `zoo.transformers_sweep`.
        num_layers: How many layers it has; None: as few as show what it is about.

    Raises:
        KeyError: there is no model of that name; the message lists them.
        ValueError: its depth can't be chosen.
    """
    if name in TASKS:
        return sweep_model(name)
    if name not in _MODELS:
        raise KeyError(f"no model {name!r} in the zoo: take one of {', '.join(_MODELS)}")
    return _MODELS[name] if num_layers is None else _MODELS[name].with_layers(num_layers)


def model_names(*, transformers: bool | None = None, layer_variants: bool = False) -> list[str]:
    """Returns the names of models, without those that route by rank and those with adapters of peft.

    Args:
        transformers: Only those that need transformers (True), or that need nothing but torch (False); None: both.
        layer_variants: Also those that only a plugin that cuts layers apart can tell from others.
    """
    adapted = {entry.name for entry in ADAPTED_MODELS}
    theirs = {entry.name for entry in (*TRANSFORMERS_MODELS, *LAYER_VARIANTS, *EXPERT_MODELS)}
    return [
        entry.name
        for entry in _MODELS.values()
        if not entry.routes_by_rank
        and entry.name not in adapted
        and (layer_variants or not entry.is_layer_variant)
        and (transformers is None or (entry.name in theirs) == transformers)
    ]
