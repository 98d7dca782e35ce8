"""float16 weights with fp32 masters and dynamic loss scaling."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from booster.core.model_wrapper import ModelWrapper
from booster.core.optimizer_wrapper import OptimizerWrapper
from booster.core.tensor_slice import TensorSlice
from booster.errors import ConfigError
from booster.interface.mixed_precision import MixedPrecision
from booster.lazy_init import materialize
from booster.pytree import map_tensors

from .loss_scaler import LossScaleArguments

LOW_PRECISION = (torch.float16, torch.bfloat16)


@dataclass(slots=True)
class _Pair:
    working: nn.Parameter
    master: nn.Parameter
    grad: torch.Tensor | None = None  # the master's gradient buffer, kept over the steps


class Fp32MasterWeights:
    """The fp32 copies of an optimizer's float16 and bfloat16 parameters.

    Creating it re-points the optimizer's `param_groups`, and the states that it has already, to the copies. Parameters
    in other formats stay as they are. Costs 8 bytes a parameter: the copy and its gradient.

    Args:
        optim: The optimizer.
        originals: The fp32 values that parameters had before they were rounded, by `id(parameter)`; a parameter that
            is missing here begins at its rounded value. The tensors become the copies' memory.
    """

    def __init__(self, optim: Optimizer, originals: Mapping[int, torch.Tensor] | None = None) -> None:
        self._pairs: list[_Pair] = []
        self._working_of: dict[int, nn.Parameter] = {}
        originals = originals or {}
        for group in optim.param_groups:
            # In place: optimizers such as LBFGS keep the list itself.
            group["params"][:] = [self._adopt(parameter, originals) for parameter in group["params"]]
        for pair in self._pairs:
            _move_state(optim, pair)

    def __len__(self) -> int:
        return len(self._pairs)

    def model_parameter(self, parameter: nn.Parameter) -> nn.Parameter:
        """Returns the model's parameter for one of the optimizer's (itself where there is no copy)."""
        return self._working_of.get(id(parameter), parameter)

    def copy_gradients(self) -> None:
        """Gives every master the gradient of its working parameter, in fp32; None where there is none."""
        for pair in self._pairs:
            pair.master.grad = _fp32_gradient(pair)

    @torch.no_grad()
    def copy_to_model(self) -> None:
        """Rounds the masters into the working parameters, after a step."""
        if self._pairs:
            torch._foreach_copy_([pair.working for pair in self._pairs], [pair.master for pair in self._pairs])

    @torch.no_grad()
    def refresh(self) -> None:
        """Takes over working parameters that were changed from outside.

        An element that still rounds to its working value keeps its extra digits, so the order of loading weights and
        masters does not matter.
        """
        for pair in self._pairs:
            is_same = pair.master.to(pair.working.dtype) == pair.working
            pair.master.copy_(torch.where(is_same, pair.master, pair.working.float()))

    def slices(self, model: ModelWrapper) -> list[TensorSlice]:
        """Returns the masters by the names of their parameters in the model."""
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        return [TensorSlice.whole(names[id(pair.working)], pair.master.detach(), primary=False) for pair in self._pairs]

    def _adopt(self, parameter: nn.Parameter, originals: Mapping[int, torch.Tensor]) -> nn.Parameter:
        if parameter.dtype not in LOW_PRECISION:
            return parameter
        values = originals.get(id(parameter), parameter.detach())
        values = values.to(device=parameter.device, dtype=torch.float32)
        master = nn.Parameter(values, requires_grad=parameter.requires_grad)
        master.__dict__ = parameter.__dict__  # the optimizer may ask for what the user has marked parameters with
        self._pairs.append(_Pair(working=parameter, master=master))
        self._working_of[id(master)] = parameter
        return master


def _fp32_gradient(pair: _Pair) -> torch.Tensor | None:
    source = pair.working.grad
    if source is None:
        return None
    if source.is_sparse:  # its number of rows changes from step to step: nothing to keep
        return source.float()
    if pair.grad is None:
        pair.grad = torch.empty_like(pair.master)
    return pair.grad.copy_(source)


def _move_state(optim: Optimizer, pair: _Pair) -> None:
    if pair.working in optim.state:
        state = optim.state.pop(pair.working)
        optim.state[pair.master] = {key: _fp32_state(value) for key, value in state.items()}


def _fp32_state(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in LOW_PRECISION else value


BATCH_NORMS = _BatchNorm  # also what plugins put in its place to normalise over ranks


class HalfWeights:
    """Casts models, and makes fp32 masters from the exact values that they had before.

    Args:
        dtype: The format that floating parameters and buffers are cast to; None: they stay.
        keep_batchnorm_fp32: Leave batch norms' parameters and statistics as they are.
        remember: Keep the values from before the cast, for `attach_masters`.
    """

    def __init__(self, dtype: torch.dtype | None, *, keep_batchnorm_fp32: bool = False, remember: bool = True) -> None:
        self.dtype = dtype
        self._keep_batchnorm_fp32 = keep_batchnorm_fp32
        self._remember = remember
        # The parameter goes along so that its id stays taken as long as it is a key.
        self._originals: WeakKeyDictionary[nn.Module, dict[int, tuple[nn.Parameter, torch.Tensor]]] = (
            WeakKeyDictionary()
        )

    def cast(self, model: nn.Module) -> None:
        """Casts every floating parameter and buffer of the model in place; the Parameter objects stay the same ones.

        Args:
            model: The model.
        """
        if self.dtype is None:
            return
        materialize(model)  # what was built lazily has no values to round yet
        originals: dict[int, tuple[nn.Parameter, torch.Tensor]] = {}
        for module in model.modules():
            if self._keep_batchnorm_fp32 and isinstance(module, BATCH_NORMS):
                continue
            for parameter in module.parameters(recurse=False):
                if self._remember and self._is_rounded(parameter):
                    originals[id(parameter)] = (parameter, parameter.detach().to(torch.float32))
                _cast_in_place(parameter, self.dtype)
            for buffer in module.buffers(recurse=False):
                _cast_in_place(buffer, self.dtype)
            if isinstance(module, nn.RNNBase):
                module.flatten_parameters()  # cuDNN wants its weights in one block, which the cast took apart
        if originals:
            self._originals[model] = originals

    def forget(self, model: ModelWrapper) -> None:
        """Frees the values from before the cast."""
        self._originals.pop(model.unwrap(), None)

    def attach_masters(self, model: ModelWrapper, optimizer: OptimizerWrapper) -> None:
        """Has the optimizer update fp32 masters, which begin at the values from before the cast.

        Args:
            model: The boosted model.
            optimizer: The boosted optimizer.
        """
        originals = {key: value for key, (_, value) in self._originals.pop(model.unwrap(), {}).items()}
        if optimizer.adopt_masters(originals):
            return
        masters = Fp32MasterWeights(optimizer.unwrap(), originals)
        optimizer.master_weights = masters
        model.register_load_hook(masters.refresh)
        model.register_exact_copies(lambda: masters.slices(model))

    def _is_rounded(self, parameter: nn.Parameter) -> bool:
        return parameter.is_floating_point() and parameter.dtype != self.dtype


def _cast_in_place(tensor: torch.Tensor, dtype: torch.dtype) -> None:
    if not tensor.is_floating_point() or tensor.dtype == dtype:
        return
    tensor.data = tensor.data.to(dtype)
    if tensor.grad is not None:
        tensor.grad = tensor.grad.to(dtype)


def cast_floats(dtype: torch.dtype, tree: Any) -> Any:
    """Returns the tree with every floating tensor in `dtype`."""
    return map_tensors(_caster(lambda tensor: tensor.is_floating_point(), dtype), tree)


def low_precision_to_fp32(tree: Any) -> Any:
    """Returns the tree with every float16 and bfloat16 tensor in fp32."""
    return map_tensors(_caster(lambda tensor: tensor.dtype in LOW_PRECISION, torch.float32), tree)


def _caster(is_cast: Callable[[torch.Tensor], bool], dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor.to(dtype) if is_cast(tensor) else tensor


class FP16NaiveMixedPrecision(MixedPrecision):
    """The whole model in float16; the optimizer updates fp32 masters, which begin at the exact values before the cast.

    A parameter costs 2 bytes and 2 of gradient in float16, and 8 bytes for its master and the master's gradient.

    Args:
        initial_scale: The loss scale to begin with.
        min_scale: The scale never falls below.
        growth_factor: Multiplies the scale after `growth_interval` steps without overflow.
        backoff_factor: Multiplies the scale when overflows lower it.
        growth_interval: Steps without overflow before the scale grows.
        hysteresis: How many overflows it takes before the scale is lowered.
        max_scale: The scale never grows above.
        log_num_zeros_in_grad: Count the zeros of every step's gradients, before clipping: logged on rank 0, and in
            `num_zeros_in_grad`.
        verbose: Log skipped steps and changes of the scale on rank 0.

    Attributes:
        num_zeros_in_grad: Zeros in the last step's gradients that this rank holds; None where they are not counted.

    Raises:
        ConfigError: A number out of its range.
    """

    def __init__(
        self,
        initial_scale: float = 2**32,
        min_scale: float = 1,
        growth_factor: float = 2,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        max_scale: float = 2**32,
        log_num_zeros_in_grad: bool = False,
        verbose: bool = False,
    ) -> None:
        _check_flag("log_num_zeros_in_grad", log_num_zeros_in_grad)
        _check_flag("verbose", verbose)
        self._loss_scale = LossScaleArguments(
            initial_scale=initial_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            hysteresis=hysteresis,
            min_scale=min_scale,
            max_scale=max_scale,
        )
        self._loss_scale.check()
        self._report = log_on_master if verbose else None
        self._weights = HalfWeights(torch.float16)
        self._counts_zeros = log_num_zeros_in_grad
        self.num_zeros_in_grad: int | None = None

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """The format of the matrix multiplications."""
        return torch.float16

    def config_fingerprint(self) -> list[str]:
        return [
            *super().config_fingerprint(),
            *self._loss_scale.facts,
            f"log_num_zeros_in_grad={self._counts_zeros}",
        ]

    @property
    def keeps_masters(self) -> bool:
        return True

    def prepare(self, model: nn.Module) -> None:
        """Casts the model to float16 in place, and remembers its values until `configure`.

        Args:
            model: The user's model; its Parameter objects stay the same ones.
        """
        self._weights.cast(model)

    def configure(
        self, model: ModelWrapper, optimizer: OptimizerWrapper | None, criterion: Callable[..., Any] | None
    ) -> tuple[ModelWrapper, OptimizerWrapper | None, Callable[..., Any] | None]:
        """Gives the model its casts, the optimizer its masters and loss scaler; returns the three."""
        super().configure(model, optimizer, criterion)
        if optimizer is None:
            self._weights.forget(model)
            return model, optimizer, criterion
        self._weights.attach_masters(model, optimizer)
        optimizer.loss_scaler = self._loss_scale.new_scaler(self._report)
        if self._counts_zeros:
            optimizer.register_gradient_hook(self._count_zeros)
        return model, optimizer, criterion

    def convert_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the forward's arguments with floating tensors in float16."""
        return cast_floats(torch.float16, args), cast_floats(torch.float16, kwargs)

    def convert_outputs(self, outputs: Any) -> Any:
        """Returns the outputs with float16 and bfloat16 tensors in fp32."""
        return low_precision_to_fp32(outputs)

    def _count_zeros(self, gradients: Sequence[torch.Tensor]) -> None:
        counts = [gradient.numel() - _num_nonzero(gradient) for gradient in gradients]
        self.num_zeros_in_grad = sum(counts)
        log_on_master(f"zeros in the gradients: {self.num_zeros_in_grad}")


def log_on_master(message: str) -> None:
    """Logs one line on rank 0."""
    from booster.logger import get_dist_logger  # not at the top: only who logs pays for the logger

    get_dist_logger("booster").info(message, ranks=[0])


def _num_nonzero(gradient: torch.Tensor) -> int:
    stored = gradient.coalesce().values() if gradient.is_sparse else gradient
    return int(torch.count_nonzero(stored))


def _check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r} is no truth value: pass True or False")
