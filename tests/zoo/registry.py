"""The models by name."""

from __future__ import annotations

from zoo.attention import ATTENTION_MODELS
from zoo.custom import CUSTOM_MODELS
from zoo.discrete import DISCRETE_MODELS
from zoo.entry import ZooEntry
from zoo.language import LANGUAGE_MODELS
from zoo.recommendation import RECOMMENDATION_MODELS
from zoo.transformers_models import TRANSFORMERS_MODELS

_MODELS = {
    entry.name: entry
    for entry in (
        *CUSTOM_MODELS,
        *LANGUAGE_MODELS,
        *ATTENTION_MODELS,
        *DISCRETE_MODELS,
        *RECOMMENDATION_MODELS,
        *TRANSFORMERS_MODELS,
    )
}


def get_model(name: str) -> ZooEntry:
    """Returns a model of the zoo.

    Raises:
        KeyError: there is no model of that name; the message lists them.
    """
    if name not in _MODELS:
        raise KeyError(f"no model {name!r} in the zoo: take one of {', '.join(_MODELS)}")
    return _MODELS[name]


def model_names(*, transformers: bool | None = None) -> list[str]:
    """Returns all names, or those that need transformers (True), or those that need nothing but torch (False)."""
    theirs = {entry.name for entry in TRANSFORMERS_MODELS}
    return [name for name in _MODELS if transformers is None or (name in theirs) == transformers]
