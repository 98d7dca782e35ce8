"""Known exceptions of transformers' models: modules that run out of registration order, and unsupported models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["OUT_OF_ORDER", "UNSPLITTABLE", "OutOfOrderModules"]


@dataclass(frozen=True, slots=True)
class OutOfOrderModules:
    """Siblings of a layer list that run out of registration order.

    Modules are assumed to run in the order of registration, as in nearly all models of transformers, or in that of a
    model's pipeline plan (`_pp_plan`). The table has the exceptions.

    Attributes:
        before: Modules that are registered after the layers, and run before the first.
        after: Modules that are registered before the layers, and run after the last.
    """

    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


OUT_OF_ORDER: Mapping[str, OutOfOrderModules] = {
    "opt": OutOfOrderModules(before=("project_in",), after=("final_layer_norm", "project_out")),
    **dict.fromkeys(
        ("bart", "mbart", "mvp", "plbart", "led", "blenderbot-small"),
        OutOfOrderModules(before=("layernorm_embedding",)),
    ),
    "prophetnet": OutOfOrderModules(before=("embeddings_layer_norm",)),
}

UNSPLITTABLE: Mapping[str, str] = {
    "albert": "runs one group of layers again and again (num_hidden_layers counts the runs)",
    **dict.fromkeys(("mpnet", "roformer"), "gives every layer positions that only the first stage would compute"),
    "inkling2_text": "gives every layer the embeddings, which only the first stage would compute",
    **dict.fromkeys(("ctrl", "flaubert", "xlm"), "changes the embeddings in place, which only the first stage has"),
    "ibert": "reads the scales of the embeddings, which only the first stage has, as numbers",
}
