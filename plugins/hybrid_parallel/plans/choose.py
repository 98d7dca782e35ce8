"""Chooses where a model's plan comes from: its user, transformers, our tables, or the model's own graph."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from booster.errors import ConfigError
from booster.plugins.hybrid_parallel.plans.check import check_plan
from booster.plugins.hybrid_parallel.plans.complete import complete
from booster.plugins.hybrid_parallel.plans.derived import derived_draft
from booster.plugins.hybrid_parallel.plans.draft import Draft
from booster.plugins.hybrid_parallel.plans.from_transformers import transformers_draft
from booster.plugins.hybrid_parallel.plans.plan import TensorParallelPlan, UserPlan
from booster.plugins.hybrid_parallel.plans.regions import TENSOR_AXIS_MODES
from booster.plugins.hybrid_parallel.plans.stacks import find_stacks
from booster.plugins.hybrid_parallel.plans.tables import table_draft
from booster.plugins.hybrid_parallel.plans.token_wise import check_token_wise
from booster.plugins.hybrid_parallel.plans.user import user_draft
from booster.plugins.hybrid_parallel.plans.users_proof import prove_users_plan

__all__ = ["choose_plan"]


def choose_plan(
    model: nn.Module, *, tp_size: int, plan: UserPlan | None = None, sequence_mode: str | None = None
) -> TensorParallelPlan:
    """Returns what tensor and sequence parallelism do to a model: a checked plan.

    The first of these that says anything: the user's plan, transformers' own, our tables for models that transformers
    has no plan of, and what the model's graph shows.

    Args:
        model: The user's, maybe without memory. It is not changed.
        tp_size: Number of tensor-parallel ranks; 1: only the stacks of layers are found, and that a user's plan
            is of this model.
        plan: The user's plan; None: there is none.
        sequence_mode: How the sequence is split; None: not at all.

    Raises:
        ConfigError: No plan can be found, or it can't be carried out.
    """
    if tp_size == 1:
        if plan is not None:
            user_draft(model, plan)  # for its mistakes, which shall not wait for more ranks
        return TensorParallelPlan(stacks=find_stacks(model), source="no tensor parallelism")
    _check_is_whole(model)
    draft = _draft(model, plan, tp_size)
    completed = complete(model, draft, sequence_mode=sequence_mode)
    if draft.is_derived and sequence_mode in TENSOR_AXIS_MODES:
        check_token_wise(completed, model)
    check_plan(completed, model, tp_size, is_users=draft.is_users)
    unproven = prove_users_plan(completed, model, tp_size) if draft.is_users else ()
    return replace(completed, is_derived=draft.is_derived, notes=(*completed.notes, *unproven))


def _draft(model: nn.Module, plan: UserPlan | None, tp_size: int) -> Draft:
    if plan is not None:
        return user_draft(model, plan)
    return transformers_draft(model) or table_draft(model) or derived_draft(model, tp_size)


def _check_is_whole(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if type(parameter) is not nn.Parameter and hasattr(parameter, "placements"):
            raise ConfigError(
                f"the parameter {name!r} is a DTensor, so that the model is cut already: give tensor parallelism the"
                " model as it was made, without a tp_plan of transformers or parallelize_module"
            )
