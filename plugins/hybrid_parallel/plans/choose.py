"""Choose the source of a model's plan: the user, transformers, built-in tables or the module graph."""

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
    """Return the checked plan of a model for tensor and sequence parallelism.

    The first available source is used: the user's plan, the plan of transformers, built-in tables for models that
    transformers has no plan for, and a plan derived from the module graph.

    Args:
        model: The user's model, possibly on the meta device. It is not changed.
        tp_size: Number of tensor-parallel ranks. With 1 only stacks of layers are found and a user's plan is checked.
        plan: The user's plan, optional.
        sequence_mode: Mode of sequence parallelism; optional, defaults to unsharded sequences.

    Raises:
        ConfigError: There is no plan, or it is not applicable.
    """
    if tp_size == 1:
        if plan is not None:
            user_draft(model, plan)  # report its mistakes already on one rank
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
                f"the parameter {name!r} is a DTensor, so the model is already sharded: pass the unsharded model,"
                " without a tp_plan of transformers or parallelize_module"
            )
