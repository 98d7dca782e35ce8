"""Choose the source of a model's plan: the user, transformers, built-in tables or the module graph."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from booster.errors import ConfigError
from booster.plugins.hybrid_parallel.plans.check import check_plan
from booster.plugins.hybrid_parallel.plans.complete import resolve_plan
from booster.plugins.hybrid_parallel.plans.derived import derive_plan
from booster.plugins.hybrid_parallel.plans.draft import PartialPlan
from booster.plugins.hybrid_parallel.plans.from_transformers import transformers_plan
from booster.plugins.hybrid_parallel.plans.plan import TensorParallelPlan, UserPlan
from booster.plugins.hybrid_parallel.plans.regions import TENSOR_AXIS_MODES
from booster.plugins.hybrid_parallel.plans.stacks import find_stacks
from booster.plugins.hybrid_parallel.plans.tables import table_plan
from booster.plugins.hybrid_parallel.plans.token_wise import check_token_wise
from booster.plugins.hybrid_parallel.plans.user import read_user_plan
from booster.plugins.hybrid_parallel.plans.users_proof import verify_user_plan

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
            read_user_plan(model, plan)  # report its mistakes already on one rank
        return TensorParallelPlan(stacks=find_stacks(model), source="no tensor parallelism")
    _check_unsharded(model)
    partial = _partial_plan(model, plan, tp_size)
    resolved = resolve_plan(model, partial, sequence_mode=sequence_mode)
    if partial.is_derived and sequence_mode in TENSOR_AXIS_MODES:
        check_token_wise(resolved, model)
    check_plan(resolved, model, tp_size, is_user_plan=partial.is_user_plan)
    unverified = verify_user_plan(resolved, model, tp_size) if partial.is_user_plan else ()
    return replace(resolved, is_derived=partial.is_derived, notes=(*resolved.notes, *unverified))


def _partial_plan(model: nn.Module, plan: UserPlan | None, tp_size: int) -> PartialPlan:
    if plan is not None:
        return read_user_plan(model, plan)
    return transformers_plan(model) or table_plan(model) or derive_plan(model, tp_size)


def _check_unsharded(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if type(parameter) is not nn.Parameter and hasattr(parameter, "placements"):
            raise ConfigError(
                f"the parameter {name!r} is a DTensor, so the model is already sharded: pass the unsharded model,"
                " without a tp_plan of transformers or parallelize_module"
            )
