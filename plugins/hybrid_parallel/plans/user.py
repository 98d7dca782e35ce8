"""Plans of users."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from torch import nn

from booster.errors import ConfigError
from booster.plugins.hybrid_parallel.plans.draft import PartialPlan, read_style
from booster.plugins.hybrid_parallel.plans.patterns import generalize, match_names
from booster.plugins.hybrid_parallel.plans.plan import Style
from booster.plugins.hybrid_parallel.tensor_parallel.linear import is_linear

__all__ = ["read_user_plan"]


def read_user_plan(model: nn.Module, plan: object) -> PartialPlan:
    """Parse a user's plan.

    Args:
        model: The user's model.
        plan: Styles by pattern of names of modules or bare parameters.

    Raises:
        ConfigError: The plan is not such a mapping, is empty, has an unknown style, a pattern without matches, or a
            pattern that matches the weight of a layer.
    """
    if not isinstance(plan, Mapping) or not plan:
        raise ConfigError(
            f"plan={plan!r} is not a plan: give a mapping of module names to styles, such as"
            " {'layers.*.mlp.up_proj': 'colwise', 'layers.*.mlp.down_proj': 'rowwise'}, or None to search for one"
        )
    styles: dict[str, Style] = {}
    for pattern, given in plan.items():
        if not isinstance(pattern, str):
            raise ConfigError(f"the plan has {pattern!r} as a module name: names must be strings")
        styles[pattern] = read_style(pattern, given)
    names = [name for name, _ in model.named_modules()] + [name for name, _ in model.named_parameters()]
    found, unmatched = match_names(styles, names, str(getattr(model, "base_model_prefix", "")))
    if unmatched:
        _raise_unmatched(unmatched[0], names)
    _check_no_layer_parameters(model, found)
    return PartialPlan(styles=found, source="the plan given by the user", is_user_plan=True)


def _check_no_layer_parameters(model: nn.Module, styles: Mapping[str, Style]) -> None:
    for name in styles:
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        if leaf in module._parameters and (is_linear(module) or isinstance(module, nn.Embedding)):
            raise ConfigError(
                f"the plan has {styles[name].name!r} for {name!r}, the {leaf} of a {type(module).__name__}, but styles"
                f" apply to layers, not their parameters: name the module, {generalize(owner)!r}"
            )


def _raise_unmatched(pattern: str, names: list[str]) -> None:
    known = sorted({generalize(name) for name in names if name})
    near = difflib.get_close_matches(pattern, known, n=3, cutoff=0.4)
    hint = f": did you mean {' or '.join(repr(name) for name in near)}?" if near else ""
    raise ConfigError(
        f"the plan has {pattern!r}, which matches no module or parameter of the model{hint or ':'} write names as in"
        " model.named_modules(), with * for a layer's index"
    )
