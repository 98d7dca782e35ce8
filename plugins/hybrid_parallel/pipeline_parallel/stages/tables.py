"""What is known of transformers' models: which modules don't run where they are registered, and what can't be cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["PLACES", "UNSPLITTABLE", "Places"]

# Note [Order of execution]
# Modules are assumed to run in the order in which they are registered: so it is in nearly all models of transformers.
# Where a model brings along a pipeline plan (`_pp_plan`, whose keys are in the order of execution), that is read; the
# table has what neither says. A name in it is that of a neighbour of the list of layers.


@dataclass(frozen=True, slots=True)
class Places:
    """Neighbours of a list of layers that don't run where they are registered.

    Attributes:
        before: They are registered behind the layers, and run before the first.
        after: They are registered before the layers, and run behind the last.
    """

    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


PLACES: Mapping[str, Places] = {
    "opt": Places(before=("project_in",), after=("final_layer_norm", "project_out")),
    **dict.fromkeys(
        ("bart", "mbart", "mvp", "plbart", "led", "blenderbot-small"), Places(before=("layernorm_embedding",))
    ),
    "prophetnet": Places(before=("embeddings_layer_norm",)),
}

UNSPLITTABLE: Mapping[str, str] = {
    "albert": "runs one group of layers again and again (num_hidden_layers counts the runs)",
    **dict.fromkeys(("mpnet", "roformer"), "gives every layer positions that only the first stage would compute"),
    "inkling2_text": "gives every layer the embeddings, which only the first stage would compute",
    **dict.fromkeys(("ctrl", "flaubert", "xlm"), "changes the embeddings in place, which only the first stage has"),
    "ibert": "reads the scales of the embeddings, which only the first stage has, as numbers",
}
