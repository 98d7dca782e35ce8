"""Muon: matrices are updated by their orthogonalized momentum, other parameters by AdamW."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from booster.comm import all_gather_bytes, any_rank, group_size
from booster.core.param_redistribution import ParamRedistribution, assign_owners
from booster.core.shard_aware import ShardBlock, Shards
from booster.core.shard_spec import Box
from booster.errors import ConfigError
from booster.validation import is_non_nan_number

from .adam_update import (
    AdamGroupUpdate,
    AdamParamUpdate,
    Hyperparameters,
    StepArguments,
    update_on_device,
    update_on_host,
)
from .base import (
    OptimizerBase,
    check_decay_rates,
    check_flags,
    check_learning_rate,
    check_non_negative,
    init_moments,
    init_step_counter,
)
from .param_update import ParamUpdate

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_LR_ADJUSTMENTS = (None, "original", "match_rms_adamw")
_ITERATION_SETTINGS = ("ns_coefficients", "eps", "ns_steps", "ns_dtype")


class Muon(OptimizerBase):
    """Muon (Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024) and AdamW in one optimizer.

    Arguments and arithmetic of matrices are those of `torch.optim.Muon`. A param group with `use_muon=False` is updated
    as by `torch.optim.AdamW`, with its own `lr`: embeddings, heads, vectors, and whatever is not a matrix.

        hidden = [one for one in model.blocks.parameters() if one.dim() == 2]
        known = set(map(id, hidden))
        others = [one for one in model.parameters() if id(one) not in known]
        optimizer = Muon([{"params": hidden, "lr": 0.02}, {"params": others, "lr": 3e-4, "use_muon": False}])

    Over shards each matrix is put together on one rank, as in Liu et al., "Muon is Scalable for LLM Training" (2025,
    section 2.3), so that the arithmetic is that of one process: two all-to-alls in `ns_dtype`, of (P-1)/P of 1/P of the
    elements on P ranks, and one small all-reduce. In bfloat16 the iteration turns what sums of gradients in another
    order differ by, 1e-7, into differences of up to 1e-2 where a matrix has a low rank; in float32 it does not.

    Bytes per element: 4 for the momentum; 8 for AdamW's moments.

    Args:
        params: Tensors, or param groups.
        lr: Learning rate.
        weight_decay: Decoupled weight decay.
        momentum: Decay rate of the momentum.
        nesterov: If True, the gradient is averaged with the momentum.
        ns_coefficients: Coefficients of the Newton-Schulz iteration.
        eps: Smallest norm that a matrix is divided by.
        ns_steps: Number of iterations.
        adjust_lr_fn: "original" (or None): matrices of n rows and m columns have `lr * sqrt(max(1, n / m))`;
            "match_rms_adamw": `0.2 * lr * sqrt(max(n, m))`, for learning rates of AdamW (Liu et al., section 2.2).
        ns_dtype: "bfloat16", as torch's, or "float32": dtype of the iteration, and of what travels between ranks.
        use_muon: If False, update by AdamW; usually given in a param group.
        betas: AdamW's decay rates.
        adam_eps: Term added to AdamW's denominator.

    Raises:
        ConfigError: A hyperparameter is invalid, or a parameter of a group with `use_muon=True` is not a matrix.
    """

    _moments = ("momentum_buffer", "exp_avg", "exp_avg_sq")
    _keys_of_others = ("differentiable", "ns_dtype", "use_muon", "betas", "adam_eps")  # torch.optim.Muon has none

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        ns_dtype: str = "bfloat16",
        use_muon: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        adam_eps: float = 1e-8,
    ) -> None:
        self._matrices: _MatrixRedistribution | None = None
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "ns_dtype": ns_dtype,
            "use_muon": use_muon,
            "betas": betas,
            "adam_eps": adam_eps,
        }
        super().__init__(params, defaults)

    def _check_group(self, group: Mapping[str, Any]) -> None:
        check_learning_rate(group)
        check_non_negative(group, "weight_decay")
        check_non_negative(group, "momentum", below=1.0)
        check_decay_rates(group, "betas", 2, example=(0.9, 0.999))
        check_flags(group, "nesterov", "use_muon")
        check_non_negative(group, "eps", is_positive=True, why="divides 0 by 0 where a matrix has no gradient")
        check_non_negative(
            group, "adam_eps", is_positive=True, why="divides 0 by 0 where an element never had a gradient"
        )
        coefficients, steps, adjustment = group["ns_coefficients"], group["ns_steps"], group["adjust_lr_fn"]
        is_triple = isinstance(coefficients, (tuple, list)) and len(coefficients) == 3
        if not is_triple or not all(is_non_nan_number(one) for one in coefficients):
            raise ConfigError(f"ns_coefficients={coefficients!r}: give three numbers, such as (3.4445, -4.775, 2.0315)")
        if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps < 100:
            raise ConfigError(f"ns_steps={steps!r} is not a number of iterations: give one from 1 to 99, such as 5")
        if group["ns_dtype"] not in _DTYPES:
            raise ConfigError(f"ns_dtype={group['ns_dtype']!r} is not known: give {' or '.join(map(repr, _DTYPES))}")
        if adjustment not in _LR_ADJUSTMENTS:
            raise ConfigError(f"adjust_lr_fn={adjustment!r} is not known: give 'original' or 'match_rms_adamw'")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        other = next((one for one in group["params"] if group["use_muon"] and one.dim() != 2), None)
        if other is not None:
            self.param_groups.pop()
            raise ConfigError(
                f"Muon was given a parameter of shape {tuple(other.shape)}, which is not a matrix: put it, with"
                ' embeddings and the head, into a group of AdamW: {"params": others, "lr": 3e-4, "use_muon": False}'
            )

    def use_shards(self, shards: Shards) -> None:
        super().use_shards(shards)
        self._matrices = None

    def _update(self, steps: list[ParamUpdate]) -> None:
        sharded: list[ParamUpdate] = []
        for step in steps:
            if not step.group["use_muon"]:
                _update_by_adamw(step)
            elif step.shard is None:
                matrix = _orthogonalized(self._direction(step), step.group)
                self._apply(step, matrix)
            else:
                sharded.append(step)
        if self._shards is not None:
            self._update_shards(self._shards, sharded)

    def _update_shards(self, shards: Shards, steps: Sequence[ParamUpdate]) -> None:
        """Update matrices that this rank has shards of. Collective."""
        matrices, used = self._agree_on_matrices(shards, steps)
        directions = [self._direction(step) for step in steps]
        dtypes = {index: _DTYPES[matrices.settings[index]["ns_dtype"]] for index in used}
        device = shards.parts[0].parameter.device if shards.parts else torch.device("cpu")
        full = matrices.gather(matrices.views(steps, directions, to_owner=True), dtypes, device)
        full = {index: _orthogonalized(one, matrices.settings[index]) for index, one in full.items()}
        updates = [torch.zeros_like(one) for one in directions]  # padding stays zero
        matrices.scatter(full, matrices.views(steps, updates, to_owner=False), dtypes)
        for step, update in zip(steps, updates, strict=True):
            self._apply(step, update)

    def _agree_on_matrices(
        self, shards: Shards, steps: Sequence[ParamUpdate]
    ) -> tuple[_MatrixRedistribution, list[int]]:
        """Return where all matrices are, and which have gradients. Collective."""
        groups = {parameter: group for group in self.param_groups for parameter in group["params"]}
        settings = {
            one.name: {key: groups[one.parameter][key] for key in _ITERATION_SETTINGS}
            for one in shards.parts
            if groups[one.parameter]["use_muon"]
        }
        names = {step.shard.name for step in steps if step.shard is not None}
        used = None if self._matrices is None else self._matrices.used_by_any(names, settings)
        if self._matrices is None or used is None:
            self._matrices = _MatrixRedistribution(shards, settings)
            used = self._matrices.used_by_any(names, settings)
            assert used is not None
        return self._matrices, used

    def _direction(self, step: ParamUpdate) -> Tensor:
        """Update the momentum and return what is orthogonalized, rounded."""
        momentum = step.group["momentum"]
        average = self._state_tensor(step, "momentum_buffer").lerp_(step.gradient, 1 - momentum)
        direction = step.gradient.lerp(average, momentum) if step.group["nesterov"] else average
        return direction.to(_DTYPES[step.group["ns_dtype"]])

    def _apply(self, step: ParamUpdate, update: Tensor) -> None:
        lr = float(step.group["lr"])
        rows, columns = step.shape
        if step.group["adjust_lr_fn"] == "match_rms_adamw":
            factor = 0.2 * math.sqrt(max(rows, columns))
        else:
            factor = math.sqrt(max(1, rows / columns))
        step.weights.mul_(1 - lr * step.group["weight_decay"])
        step.weights.add_(update, alpha=-lr * factor)


def _orthogonalized(matrix: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Return the matrix with singular values of about 1, by Newton-Schulz iterations (Jordan et al., 2024).

    An iteration applies the odd polynomial a x + b x^3 + c x^5 to the singular values, which are at most 1 before.
    """
    a, b, c = group["ns_coefficients"]
    is_tall = matrix.shape[0] > matrix.shape[1]
    wide = matrix.T if is_tall else matrix
    wide = wide / wide.norm().clamp(min=group["eps"])
    for _ in range(group["ns_steps"]):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return (wide.T if is_tall else wide).contiguous()


def _update_by_adamw(step: ParamUpdate) -> None:
    group, state = step.group, step.state
    hyperparameters = Hyperparameters(
        lr=group["lr"],
        betas=group["betas"],
        eps=group["adam_eps"],
        weight_decay=group["weight_decay"],
        decoupled_weight_decay=True,
        bias_correction=True,
        maximize=False,
    )
    counter = init_step_counter(state)
    init_moments(state, step.weights)
    update = AdamParamUpdate(step.weights, step.gradient, None, state, counter, state["exp_avg"], state["exp_avg_sq"])
    run = update_on_host if step.weights.is_cpu else update_on_device
    run(AdamGroupUpdate(hyperparameters, [update]), StepArguments())


class _MatrixRedistribution(ParamRedistribution):
    """Redistribution of the matrices of a step, of which the ranks have any blocks.

    Args:
        shards: This rank's shards.
        settings: Param groups of this rank's matrices by name.

    Collective over the group of the shards.

    Attributes:
        settings: Values of the param groups that the owner needs, by index of the matrix.
    """

    def __init__(self, shards: Shards, settings: Mapping[str, dict[str, Any]]) -> None:
        self._own_settings = settings
        held: dict[str, Any] = {name: {"blocks": [], "settings": one} for name, one in settings.items()}
        for shard in shards.parts:
            if shard.name in held:
                held[shard.name]["blocks"] += [(one.box, one.is_owned) for one in shard.blocks(shard.parameter)]
        payloads, number_of = all_gather_bytes(json.dumps(held).encode(), shards.group)
        ranks = [json.loads(payloads[number]) for number in number_of]
        found = {name for rank in ranks for name in rank}
        self._names = [name for name in shards.names if name in found]
        self._index = {name: index for index, name in enumerate(self._names)}
        self._blocks = [
            {
                self._index[name]: sorted((_box(box), is_owned) for box, is_owned in one["blocks"])
                for name, one in rank.items()
            }
            for rank in ranks
        ]
        self.settings = {self._index[name]: one["settings"] for rank in ranks for name, one in rank.items()}
        shapes = [shards.shapes[name] for name in self._names]
        costs = [min(shape) * math.prod(shape) for shape in shapes]  # multiplications of an iteration
        super().__init__(shapes, assign_owners(costs, group_size(shards.group)), shards.group)

    def blocks_of(self, rank: int, index: int, *, to_owner: bool) -> Sequence[Box]:
        return [box for box, is_owned in self._blocks[rank].get(index, ()) if is_owned or not to_owner]

    def used_by_any(self, names: set[str], settings: Mapping[str, dict[str, Any]]) -> list[int] | None:
        """Return the matrices that any rank has a gradient of, or None if the settings have changed. Collective."""
        has_changed, *flags = any_rank(
            [settings != self._own_settings, *(name in names for name in self._names)], self._group
        )
        return None if has_changed else [index for index, flag in enumerate(flags) if flag]

    def views(
        self, steps: Sequence[ParamUpdate], tensors: Sequence[Tensor], *, to_owner: bool
    ) -> dict[int, list[Tensor]]:
        """Return the blocks of tensors of the shards' shapes, in the order of `blocks_of`."""
        found: dict[int, list[ShardBlock]] = {}
        for step, tensor in zip(steps, tensors, strict=True):
            assert step.shard is not None
            blocks = [one for one in step.blocks(tensor) if one.is_owned or not to_owner]
            found.setdefault(self._index[step.shard.name], []).extend(blocks)
        return {index: [one.view for one in sorted(blocks, key=lambda one: one.box)] for index, blocks in found.items()}


def _box(lengths: Sequence[Sequence[int]]) -> Box:
    return tuple((start, length) for start, length in lengths)
