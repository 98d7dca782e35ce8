"""Adam and AdamW with torch's param groups and states, in one pass over memory per step."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from booster.compatibility import takes_foreign
from booster.deprecation import DeprecatedAlias, renamed_arguments
from booster.errors import CheckpointError, ConfigError
from booster.validation import check_flag

from .adam_update import MOMENTS, AdamGroupUpdate, AdamParamUpdate, Hyperparameters, StepArguments, check_no_variants
from .base import (
    CheckedOptimizer,
    check_decay_rates,
    check_learning_rate,
    check_non_negative,
    init_moments,
    init_step_counter,
    moment_dtype,
)
from .nvme_offload.directory import OffloadSettings
from .nvme_offload.states import DiskStates
from .step import AdamStep

_KEYWORD_ADVICE = "give arguments after lr by keyword, as their order is not that of torch.optim.AdamW"


def _check_moments(state: Mapping[str, Any], parameter: Tensor) -> None:
    for key in MOMENTS if state else ():
        moment = state.get(key)
        if not isinstance(moment, Tensor):
            raise ConfigError(
                f"the state_dict has {', '.join(map(repr, state))} for a parameter of shape {tuple(parameter.shape)},"
                f" and no {key!r}: load the state of torch.optim.Adam, AdamW or an Adam of this package"
            )
        if moment.shape != parameter.shape:
            raise ConfigError(
                f"the state_dict has {key!r} of shape {tuple(moment.shape)} for a parameter of shape"
                f" {tuple(parameter.shape)}: load it into an optimizer for the same model, with the parameters in the"
                " same order"
            )


class AdamBase(CheckedOptimizer):
    """Adam and AdamW (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", ICLR 2019).

    Hyperparameters, states and `state_dict` have torch.optim.AdamW's names and meanings, and each loads the other's.
    States of CPU parameters are fp32 for bf16 and fp16 parameters as well. For `fused_step` see `FusedUpdate`, for the
    arguments `CPUAdam`.
    """

    # torch.amp.GradScaler then passes grad_scale and found_inf to `step` instead of unscaling the gradients.
    _step_supports_amp_scaling = True

    @takes_foreign("amsgrad", model_params="params")
    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        adamw_mode: bool = True,
        nvme_offload_fraction: float = 0.0,
        nvme_offload_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        offload = OffloadSettings.from_arguments(nvme_offload_fraction, nvme_offload_dir)
        for name, value in (("bias_correction", bias_correction), ("adamw_mode", adamw_mode)):
            check_flag(name, value, advice=_KEYWORD_ADVICE)
        defaults: dict[str, Any] = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": False,
            "maximize": False,
            "decoupled_weight_decay": adamw_mode,
        }
        if not bias_correction:  # torch has no such key: set only where torch's AdamW would compute something else
            defaults["bias_correction"] = False
        self._check_group(defaults)
        defaults["betas"] = tuple(betas)
        self._offload = offload
        self._disk = DiskStates(offload)
        self._failed_step: AdamStep | None = None
        super().__init__(params, defaults)

    def _check_group(self, group: Mapping[str, Any]) -> None:
        check_no_variants(group)
        check_learning_rate(group)
        check_non_negative(group, "eps")
        check_non_negative(group, "weight_decay")
        check_decay_rates(group, "betas", 2, example=(0.9, 0.999))

    def _step(self) -> None:
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        if found_inf is not None and bool(found_inf):
            return
        scale: Tensor | None = getattr(self, "grad_scale", None)
        self._update(StepArguments(clip_coef=None if scale is None else scale.reciprocal()), {}, {})

    @renamed_arguments(multiplier="grad_scale", multiplier_tensor="clip_coef", working_copies="model_params")
    @Optimizer.profile_hook_step
    @torch.no_grad()
    def fused_step(
        self,
        *,
        grad_scale: float = 1.0,
        clip_coef: Tensor | None = None,
        model_params: Mapping[nn.Parameter, Tensor] | None = None,
        gradients: Mapping[nn.Parameter, Tensor] | None = None,
        zero_grads: bool = False,
    ) -> None:
        """Update as `step` does with gradients multiplied by the given factors; see `FusedUpdate`.

        Raises:
            ConfigError: See `step`.
            OSError: See `step`.
        """
        arguments = StepArguments(float(grad_scale), clip_coef, zero_grads)
        self._update(arguments, gradients or {}, model_params or {})

    def _update(
        self, arguments: StepArguments, gradients: Mapping[Any, Tensor], model_params: Mapping[Any, Tensor]
    ) -> None:
        self._opt_called = True  # torch's LR schedulers warn if no optimizer step preceded theirs
        hyperparameters = [Hyperparameters.from_group(group) for group in self.param_groups]
        grads_by_group = [list(self._gradients_of(group, gradients)) for group in self.param_groups]
        failed_step = self._resumable_step
        if failed_step is not None:
            grads_by_id = {id(parameter): gradient for pairs in grads_by_group for parameter, gradient in pairs}
            if failed_step.matches_call(grads_by_id, arguments):
                self._run(failed_step)
                return
            if not failed_step.is_complete:
                raise ConfigError(
                    "the last step did not finish, and this call has other gradients, which would mix two steps: call"
                    " step() with the gradients of the failed step, or load a checkpoint of model and optimizer"
                )
        self.prepare_states()
        groups = [
            AdamGroupUpdate(
                hyperparameters_of_group, [self._param_update(*pair, model_params.get(pair[0])) for pair in pairs]
            )
            for hyperparameters_of_group, pairs in zip(hyperparameters, grads_by_group, strict=True)
        ]
        self._run(AdamStep(groups, arguments, self._disk))

    @property
    def _resumable_step(self) -> AdamStep | None:
        """The last step if it failed and no other states were loaded since."""
        if self._failed_step is not None and not self._failed_step.has_same_states(self.state):
            self._failed_step = None
        return self._failed_step

    def _run(self, step: AdamStep) -> None:
        self._failed_step = None
        try:
            step.run()
        except BaseException:
            if step.is_started:
                step.record_checksums()
                self._failed_step = step
            raise

    def _gradients_of(self, group: dict[str, Any], gradients: Mapping[Any, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each parameter to update with its gradient, checked."""
        for parameter in group["params"]:
            gradient = gradients.get(parameter) if gradients else None
            if gradient is None:
                gradient = parameter.grad
            elif gradient.shape != parameter.shape or gradient.device != parameter.device:
                raise ConfigError(
                    f"a parameter of shape {tuple(parameter.shape)} on {parameter.device} was given a gradient of shape"
                    f" {tuple(gradient.shape)} on {gradient.device}: shape and device must match"
                )
            if gradient is None:
                continue
            self._check_parameter(parameter)
            if gradient.layout is not torch.strided:
                raise ConfigError(
                    f"the gradient of a parameter of shape {tuple(parameter.shape)} is sparse: use"
                    " torch.optim.SparseAdam for it, or an embedding with sparse=False"
                )
            yield parameter, gradient

    def _param_update(self, parameter: Tensor, gradient: Tensor, model_param: Tensor | None) -> AdamParamUpdate:
        """Return the update of a parameter; its state is created if it is missing, and has the kernels' layout."""
        state: dict[str, Any] = self.state[parameter]
        step = init_step_counter(state)
        if self._disk.holds(parameter):
            self._disk.adopt(parameter, state)
        else:
            init_moments(state, parameter)
        return AdamParamUpdate(parameter, gradient, model_param, state, step, state["exp_avg"], state["exp_avg_sq"])

    def prepare_states(self) -> None:
        """Allocate disk space for the states of all parameters; see `StateAllocator`.

        Raises:
            ConfigError: The disk has too little free space.
        """
        self._disk.prepare([parameter for group in self.param_groups for parameter in group["params"]])

    def allocate_state(self, parameter: Tensor, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """Allocate a state that is about to be filled; see `StateAllocator`.

        Raises:
            ConfigError: The disk has too little free space.
        """
        if key == "step":
            return torch.zeros(shape, dtype=torch.float32)
        if key not in MOMENTS or tuple(shape) != tuple(parameter.shape):
            return None
        if self._disk.holds(parameter):
            return self._disk.moment(parameter, key)
        return torch.empty(shape, dtype=moment_dtype(parameter), device=parameter.device)

    @property
    def may_fail_locally(self) -> bool:
        """True if states are on disk; see `StateAllocator`."""
        return self._offload.fraction > 0

    can_fail_alone = DeprecatedAlias("may_fail_locally")

    def check_states(self) -> None:
        """Check that the states are complete and readable.

        Raises:
            CheckpointError: A state file is truncated, or a failed step left a parameter partially updated.
        """
        self._disk.check()
        step = self._resumable_step
        if step is not None and step.has_partial_update:
            raise CheckpointError(
                "the last step failed and left a parameter partially updated, so its step count is undefined: call"
                " step() again with the same gradients to finish the step before saving"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the state, as torch.optim.AdamW's; tensors of states on disk are read lazily through a file mapping.

        Raises:
            CheckpointError: The states can't be read; see `check_states`.
        """
        self.check_states()
        return super().state_dict()

    def _check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raise ConfigError if a state is not one of Adam for these parameters, or does not fit on the disk."""
        for saved, group in zip(state_dict["param_groups"], self.param_groups, strict=False):
            missing = [key for key in ("lr", "betas", "eps", "weight_decay") if key not in saved]
            if missing:
                raise ConfigError(
                    f"the state_dict has no {missing[0]!r} in a param group, so it belongs to an optimizer other than"
                    " Adam: load the state of torch.optim.Adam, AdamW or an Adam of this package"
                )
            for index, parameter in zip(saved["params"], group["params"], strict=False):
                _check_moments(state_dict["state"].get(index, {}), parameter)
        for group in state_dict["param_groups"]:
            self._check_group({**self.defaults, **group})
        self.prepare_states()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_offload": self._offload}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_disk" not in self.__dict__:  # a copy: states from the disk are in memory until its first step
            self._disk = DiskStates(state["_offload"])
            self._failed_step = None
        super().__setstate__(state)

    def _loaded(self, parameter: Tensor, key: str, value: Tensor) -> Tensor:
        memory = self.allocate_state(parameter, key, tuple(value.shape), value.dtype)
        if memory is None:
            return value.to(parameter.device)
        if (memory.device, memory.dtype) == (value.device, value.dtype) and not self._disk.holds(parameter):
            return value  # torch's optimizers use the loaded tensors without a copy as well
        return memory if memory.data_ptr() == value.data_ptr() else memory.copy_(value)


class FusedAdam(AdamBase):
    """Adam and AdamW with one kernel call for many parameters; states are on the parameters' devices.

    Args:
        params: Tensors, or param groups.
        lr: Learning rate.
        bias_correction: If True, the moments are corrected for their initialization to zero.
        betas: Decay rates of the moments.
        eps: Term added to the denominator.
        adamw_mode: If True, AdamW's decoupled weight decay; if False, Adam's L2 term in the gradient.
        weight_decay: Weight decay.

    Raises:
        ConfigError: An argument is invalid.
    """

    @takes_foreign("amsgrad", "set_grad_none", model_params="params")
    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adamw_mode: bool = True,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, lr, bias_correction, betas, eps, weight_decay, adamw_mode)


class HybridAdam(AdamBase):
    """Adam and AdamW on each parameter's device: `CPUAdam`'s kernel on the CPU, torch's fused kernel elsewhere.

    Accelerators run concurrently with the CPU. Their states have their parameter's dtype. Arguments and errors are
    those of `CPUAdam`, for parameters on any device.
    """


class CPUAdam(HybridAdam):
    """Adam and AdamW for CPU parameters, in one pass over memory, with optional offload of states to disk.

    Args:
        params: CPU tensors, or param groups of CPU tensors.
        lr: Learning rate.
        bias_correction: If True, the moments are corrected for their initialization to zero.
        betas: Decay rates of the moments.
        eps: Term added to the denominator.
        weight_decay: Weight decay.
        adamw_mode: If True, AdamW's decoupled weight decay; if False, Adam's L2 term in the gradient.
        nvme_offload_fraction: Fraction of the states' bytes on disk, from 0 to 1. Disk I/O of a step overlaps with its
            computation; results do not change. Memory: 48 MiB.
        nvme_offload_dir: Directory of the state file, which is twice as large as the states and is removed with the
            optimizer or at exit; optional, defaults to the system's directory for temporary files.

    Raises:
        ConfigError: An argument is invalid, or a parameter is not on the CPU.
    """

    def _check_parameter(self, parameter: Tensor) -> None:
        super()._check_parameter(parameter)
        if not parameter.is_cpu:
            raise ConfigError(
                f"CPUAdam got a parameter of shape {tuple(parameter.shape)} on {parameter.device}: use HybridAdam,"
                " which updates each parameter on its device, or move the model to the CPU"
            )
