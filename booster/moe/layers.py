"""Mixture-of-experts layers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn

from booster.errors import ConfigError
from booster.validation import check_count, check_flag

from .experts import Experts
from .loss import attach_auxiliary_loss
from .routers import NormalNoiseGenerator, Router, Top1Router, Top2Router, UniformNoiseGenerator


class MoeLayer(nn.Module):
    """Gate, router and experts. The gate is the layer's own; layers can share routers and experts.

    Attributes:
        auxiliary_loss: Load-balancing loss of the latest forward, detached; None before one.
        num_dropped: Number of assignments that the latest forward dropped, a 0-dim tensor; None before one.

    Args:
        dim_model: Size of tokens.
        num_experts: Number of experts.
        router: `Top1Router`, `Top2Router`, or a module that maps logits to a `Routing`.
        experts: `Experts`, `FFNExperts`, or a module with their interface.

    Raises:
        ConfigError: An argument is invalid.
    """

    auxiliary_loss: Tensor | None = None
    num_dropped: Tensor | None = None

    def __init__(self, dim_model: int, num_experts: int, router: nn.Module, experts: nn.Module) -> None:
        super().__init__()
        check_count(dim_model=dim_model, num_experts=num_experts)
        for name, module in (("router", router), ("experts", experts)):
            if not isinstance(module, nn.Module):
                raise ConfigError(f"{name}={module!r} is not a module: construct it before the layer")
        if getattr(experts, "num_experts", num_experts) != num_experts:
            raise ConfigError(
                f"num_experts={num_experts}, but the experts given are {experts.num_experts}: give both the same number"
            )
        if isinstance(router, Router):
            router.check_num_experts(num_experts)
        self.dim_model = dim_model
        self.num_experts = num_experts
        self.gate = nn.Linear(dim_model, num_experts, bias=False)
        self.router = router
        self.experts = experts

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the weighted sum of the outputs of each token's experts, zeros for a token that was dropped.

        Args:
            hidden_states: Tokens, of shape (..., dim_model).
        """
        tokens = hidden_states.reshape(-1, self.dim_model)
        # In the dtype of the gate's weight: rounding to that of autocast would change which experts are chosen.
        # The compiler of torch 2.10 can't trace the question; it runs on no device without autocast.
        has_autocast = torch.compiler.is_compiling() or torch.amp.is_autocast_available(tokens.device.type)
        with torch.autocast(tokens.device.type, enabled=False) if has_autocast else nullcontext():
            logits = self.gate(tokens.to(self.gate.weight.dtype))
            routing = self.router(logits)
        weights = attach_auxiliary_loss(routing.top_k_weights, routing.auxiliary_loss)
        self.auxiliary_loss, self.num_dropped = routing.auxiliary_loss.detach(), routing.num_dropped
        outputs: Tensor = self.experts(tokens, routing.top_k_index, weights)
        return outputs.view(*hidden_states.shape[:-1], outputs.shape[-1])


class MoeModule(nn.Module):
    """`MoeLayer` with its router and experts, and with a residual network if asked for.

    With `use_residual`, every token also passes a dense network; two weights, a softmax of a linear layer, mix its
    output with that of the experts (residual MoE, arXiv:2201.05596).

    Args:
        dim_model: Size of tokens.
        num_experts: Number of experts.
        top_k: Number of experts per token, 1 or 2.
        capacity_factor_train: Factor of the capacity in training.
        capacity_factor_eval: Factor of the capacity in evaluation.
        min_capacity: Lower limit of the capacity.
        noisy_policy: "Jitter" for uniform or "Gaussian" for normal noise on the logits in training, optional.
        drop_tks: If False, capacity is unlimited.
        use_residual: If True, a residual network is added.
        residual_instance: Residual network; optional, defaults to `expert_cls(**expert_args)`.
        expert_instance: Module with the interface of `Experts`; optional, defaults to one of `expert_cls`.
        expert_cls: Class of an expert.
        **expert_args: Keyword arguments of the class.

    Raises:
        ConfigError: An argument is invalid, missing, or without effect.
    """

    def __init__(
        self,
        dim_model: int,
        num_experts: int,
        top_k: int = 1,
        capacity_factor_train: float = 1.25,
        capacity_factor_eval: float = 2.0,
        min_capacity: int = 4,
        noisy_policy: str | None = None,
        drop_tks: bool = True,
        use_residual: bool = False,
        residual_instance: nn.Module | None = None,
        expert_instance: nn.Module | None = None,
        expert_cls: Callable[..., nn.Module] | None = None,
        **expert_args: Any,
    ) -> None:
        super().__init__()
        check_flag("use_residual", use_residual)
        if residual_instance is not None and not use_residual:
            raise ConfigError("residual_instance has no effect without use_residual=True: set it, or leave it out")
        constructs = expert_instance is None or (use_residual and residual_instance is None)
        if constructs and expert_cls is None:
            missing = "expert_instance" if expert_instance is None else "residual_instance"
            raise ConfigError(f"{missing} is not given, and no expert_cls to construct it from: give one of them")
        if not constructs and (expert_cls is not None or expert_args):
            raise ConfigError(
                f"expert_cls={expert_cls!r} and its arguments {sorted(expert_args)} have no effect beside"
                " expert_instance: leave them out"
            )
        if top_k not in (1, 2):
            raise ConfigError(
                f"top_k={top_k!r} is not a number of experts per token that there is a router for: give 1 or 2"
            )
        self.moe_layer = MoeLayer(
            dim_model,
            num_experts,
            (Top1Router if top_k == 1 else Top2Router)(
                capacity_factor_train=capacity_factor_train,
                capacity_factor_eval=capacity_factor_eval,
                min_capacity=min_capacity,
                noisy_func=_noise(noisy_policy, num_experts),
                drop_tks=drop_tks,
            ),
            expert_instance or Experts(cast(Any, expert_cls), num_experts, **expert_args),
        )
        self.use_residual = use_residual
        if use_residual:
            self.residual = residual_instance or cast(Any, expert_cls)(**expert_args)
            self.coefficient = nn.Linear(dim_model, 2)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the output of the experts, mixed with that of the residual network if there is one.

        Args:
            hidden_states: Tokens, of shape (..., dim_model).
        """
        outputs: Tensor = self.moe_layer(hidden_states)
        if not self.use_residual:
            return outputs
        of_experts, of_residual = self.coefficient(hidden_states).softmax(-1).split(1, dim=-1)
        mixed: Tensor = outputs * of_experts + self.residual(hidden_states) * of_residual
        return mixed


def _noise(policy: str | None, num_experts: int) -> Callable[[Tensor], Tensor] | None:
    if policy is None:
        return None
    if policy == "Jitter":
        return UniformNoiseGenerator()
    if policy == "Gaussian":
        return NormalNoiseGenerator(num_experts)
    raise ConfigError(f"noisy_policy={policy!r} is unknown: give 'Jitter', 'Gaussian', or None for no noise")
