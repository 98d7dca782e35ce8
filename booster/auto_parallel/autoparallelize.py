"""ColossalAI's `autoparallelize`, over `AutoPlugin` and the Booster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from booster.booster import Booster
from booster.comm import group_rank, group_size
from booster.errors import ConfigError
from booster.estimate.estimate import default_criterion
from booster.estimate.machine_profile import CollectiveSpeed, MachineProfile
from booster.estimate.model_sources import mean_of_first_output

from .auto_plugin import AutoPlugin, first_batch

_PREFERENCES = ("standard", "dp", "tp")


def autoparallelize(
    model: nn.Module,
    meta_args: Mapping[str, Any] | Sequence[Any] | torch.Tensor | None = None,
    data_loader: Any = None,
    data_process_func: Callable[[Any], Any] | None = None,
    alpha_beta_dict: Mapping[Any, tuple[float, float]] | None = None,
    logical_mesh_shape: Sequence[int] | None = None,
    logical_mesh_id: torch.Tensor | None = None,
    solver_preference: str = "standard",
    dataloader_option: str | None = None,
    shard_option: str | None = None,
    save_solver_solution: bool = False,
    load_solver_solution: bool = False,
    solution_path: str | PathLike[str] | None = None,
    return_solution: bool = False,
    memory_budget: float = -1.0,
    *,
    optimizer: Optimizer | None = None,
    criterion: Callable[[Any, Any], torch.Tensor] | None = None,
) -> Any:
    """Return a model that is parallelised in the way that is fastest here; see `AutoPlugin`.

    Without an optimizer the result trains by `loss.backward()` and an optimizer that the caller makes of its
    parameters: data parallelism or tensor parallelism over all ranks is chosen. With one, any plugin is, and the
    boosted optimizer is returned too; its loop is `optimizer.backward(loss)` and `optimizer.step()`.

    Args:
        model: Any `nn.Module`.
        meta_args: Inputs of one rank's batch, by name or in order, of which shapes and dtypes matter.
        data_loader: Loader whose first samples are taken in place of `meta_args`.
        data_process_func: Function of such a batch that returns the model's inputs.
        alpha_beta_dict: Seconds of a message, and per byte, by a group of ranks, in place of the measured speeds.
        logical_mesh_shape: Numbers of data-parallel and of tensor-parallel ranks, to choose among these only.
        logical_mesh_id: Ranks of that mesh, in ascending order.
        solver_preference: "standard", "dp" for data parallelism only, or "tp" for tensor parallelism only.
        dataloader_option: "distributed" or None: each data-parallel rank has its own batches.
        shard_option: "standard" or None.
        save_solver_solution: If True, write the plan to `solution_path`.
        load_solver_solution: If True, use the plan in `solution_path`.
        solution_path: File of the plan.
        return_solution: If True, return the plan too.
        memory_budget: Bytes per rank; -1 for what is free.
        optimizer: Optimizer of the model's parameters, optional.
        criterion: Function of (outputs, batch) that returns the loss, optional; by default the model's own loss, or the
            mean of its first output.

    Returns:
        The boosted model; with an optimizer or `return_solution` a tuple: model, optimizer if given, `ParallelPlan` if
        asked for.

    Collective: every rank must call it, with equal arguments.

    Raises:
        ConfigError: An argument can't be kept to, or no plan fits; on all ranks.
    """
    _check(solver_preference, dataloader_option, shard_option, logical_mesh_id)
    if (save_solver_solution or load_solver_solution) and solution_path is None:
        raise ConfigError("autoparallelize() saves or loads its solution without solution_path: give the file's path")
    if load_solver_solution:
        assert solution_path is not None
        chooser = AutoPlugin.from_plan(solution_path)
    else:
        batch = _batch(meta_args, data_loader, data_process_func)
        chooser = AutoPlugin(
            device_memory_budget=None if memory_budget < 0 else int(memory_budget),
            candidates=_candidates(solver_preference, logical_mesh_shape, trains_alone=optimizer is None),
            verbose=False,
            batch=batch,
            criterion=criterion or _loss_or_mean,
            profile=_profile(alpha_beta_dict),
        )
        chooser.choose(model, torch.optim.AdamW if optimizer is None else optimizer, None, None, None)
    assert chooser.plan is not None
    if save_solver_solution and group_rank() == 0:
        assert solution_path is not None
        chooser.plan.save(solution_path)
    boosted, wrapped, *_ = Booster(plugin=chooser).boost(model, optimizer)
    found = [boosted, *([] if optimizer is None else [wrapped]), *([chooser.plan] if return_solution else [])]
    return found[0] if len(found) == 1 else tuple(found)


def _check(preference: str, dataloader_option: str | None, shard_option: str | None, mesh_id: Any) -> None:
    if preference not in _PREFERENCES:
        raise ConfigError(
            f"autoparallelize(solver_preference={preference!r}): give one of {', '.join(map(repr, _PREFERENCES))}"
        )
    if dataloader_option not in (None, "distributed"):
        raise ConfigError(
            f"autoparallelize(dataloader_option={dataloader_option!r}): each data-parallel rank has batches of its own,"
            " so leave it out, and divide the data by booster's loaders"
        )
    if shard_option not in (None, "standard"):
        raise ConfigError(
            f"autoparallelize(shard_option={shard_option!r}): dimensions are sharded where it is fastest, so leave it"
            " out, or give a plan of your own to HybridParallelPlugin(plan=...)"
        )
    if mesh_id is not None and torch.as_tensor(mesh_id).flatten().tolist() != list(range(group_size())):
        raise ConfigError(
            "autoparallelize(logical_mesh_id=...) has another order of ranks than the ascending one: leave it out, and"
            " launch the ranks in the order that they are to have"
        )


def _batch(meta_args: Any, data_loader: Any, process: Callable[[Any], Any] | None) -> Any:
    """Return the batch of one rank, as `execute_pipeline` takes it."""
    if meta_args is not None:
        return dict(meta_args) if isinstance(meta_args, Mapping) else meta_args
    if data_loader is None:
        raise ConfigError(
            "autoparallelize() was given neither meta_args nor data_loader: give the inputs of one batch, such as"
            " meta_args={'x': torch.empty(8, 16, device='meta')}"
        )
    batch = first_batch(data_loader)
    return batch if process is None else process(batch)


def _candidates(
    preference: str, mesh_shape: Sequence[int] | None, *, trains_alone: bool
) -> list[str | tuple[str, Mapping[str, Any]]] | None:
    """Return the candidates that keep to the preference, the mesh and the loop."""
    size = group_size()
    tp_sizes = [tp for tp in range(1, size + 1) if size % tp == 0]
    if mesh_shape is not None:
        shape = [int(one) for one in mesh_shape]
        if len(shape) != 2 or shape[0] * shape[1] != size:
            raise ConfigError(
                f"autoparallelize(logical_mesh_shape={tuple(shape)}) is not a mesh of data-parallel and tensor-parallel"
                f" ranks for {size} launched: give two numbers whose product is {size}"
            )
        tp_sizes = [shape[1]]
    if preference == "dp":
        tp_sizes = [tp for tp in tp_sizes if tp == 1]
    if preference == "tp":
        tp_sizes = [tp for tp in tp_sizes if tp > 1 or size == 1]
    if trains_alone:  # its gradients are reduced in loss.backward() itself, or are whole on every rank
        tp_sizes = [tp for tp in tp_sizes if tp in (1, size)]
    if not tp_sizes:
        raise ConfigError(
            f"autoparallelize(solver_preference={preference!r}, logical_mesh_shape={mesh_shape!r}) leaves no plan"
            f" {'without an optimizer ' if trains_alone else ''}on {size} ranks: leave one of them out"
            f"{', or give optimizer=' if trains_alone else ''}"
        )
    if size == 1:
        return ["none"]
    if not trains_alone and preference == "standard" and mesh_shape is None:
        return None
    found: list[str | tuple[str, Mapping[str, Any]]] = []
    for tp in tp_sizes:
        if tp == 1:
            found += ["torch_ddp"] if trains_alone else ["torch_ddp", "low_level_zero", "gemini", "torch_fsdp"]
        else:
            stage = 0 if trains_alone or tp == size else 1
            found.append(("hybrid_parallel", {"tp_size": tp, "zero_stage": stage, "precision": "fp32"}))
    return found


def _profile(alpha_beta: Mapping[Any, tuple[float, float]] | None) -> MachineProfile | None:
    """Return the machine's profile with these speeds of collectives; None to use the measured ones."""
    if alpha_beta is None:
        return None
    measured = AutoPlugin(verbose=False).machine()
    collectives = [
        CollectiveSpeed(
            operation=operation,
            num_ranks=len(ranks),
            num_hosts=len({rank // measured.ranks_per_host for rank in ranks}),
            transport="given",
            latency=float(alpha),
            seconds_per_byte=float(beta),
        )
        for ranks, (alpha, beta) in alpha_beta.items()
        for operation in dict.fromkeys(one.operation for one in measured.collectives)
    ]
    return replace(measured, collectives=tuple(collectives))


def _loss_or_mean(outputs: Any, batch: Any) -> torch.Tensor:
    try:
        return default_criterion(outputs, batch)
    except ConfigError:
        return mean_of_first_output(outputs, batch)
