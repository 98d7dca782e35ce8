"""Norms and other modules with one value per feature, and random numbers, on blocks of activations."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from booster.comm import all_gather_equal, sum_dtype
from booster.core.activation_policy import RECOMPUTED
from booster.core.compiling import COMPILED
from booster.core.layer_stacks import subclass_of
from booster.core.opaque_operator import autocast_dtype, opaque
from booster.errors import ConfigError
from booster.plugins.hybrid_parallel.sequence_parallel.layer_stack import hidden_key
from booster.plugins.hybrid_parallel.tensor_parallel.mappings import sum_over
from booster.plugins.hybrid_parallel.tensor_parallel.random_functions import (
    FEATURE_DROPOUTS,
    FILLS,
    RANDOM_FUNCTIONS,
    call_named,
    fill,
)

from .grid import ActivationLayout, TensorGrid, grid_of_number

_DIVISION = "_feature_division"  # attribute of a module

_NORMS = frozenset({F.layer_norm, F.rms_norm})
_MEANS = frozenset({torch.mean, torch.Tensor.mean})
_NAMES = (
    "sum var std norm softmax log_softmax logsumexp max min amax amin argmax argmin prod cumsum sort topk median"
    " var_mean std_mean aminmax nansum nanmean nanmedian logcumsumexp cumprod cummax cummin argsort kthvalue quantile"
    " cosine_similarity pairwise_distance"
)
_REDUCTIONS = frozenset(
    getattr(where, name) for where in (torch, torch.Tensor, F) for name in _NAMES.split() if hasattr(where, name)
) | {
    *filter(callable, vars(torch.fft).values()),
    F.normalize,
    F.group_norm,
    F.batch_norm,
    F.instance_norm,
    torch.linalg.norm,
    torch.linalg.vector_norm,
}


Where: TypeAlias = Literal["module", "layer", "region"]
"""What functions of a module see of the features; see `FeatureDivision.where`."""


@dataclass(frozen=True, slots=True)
class FeatureDivision:
    """What functions of a module see of the features.

    Attributes:
        name: Name of the module, for errors.
        grid: The grid.
        where: "module": all tensors are blocks of activations in the outer layout. "layer": those of the shape of the
            hidden states are. "region": tensors of this shape may have the inner layout, which differs.
    """

    name: str
    grid: TensorGrid
    where: Where


def divide_features(module: nn.Module, name: str, grid: TensorGrid, where: Where) -> None:
    """Make a module reduce over the features of all ranks that share its examples.

    Layer norm, RMS norm and means over the last dimension are computed over all features, everything else elementwise.

    Args:
        module: A layer of a stack; a module in one with one value per feature, whose parameters are this rank's shards
            already; or in the mode "3d" one that contains the first linear layer of a pair. Its class is replaced by a
            subclass.
        name: Its name, for errors.
        grid: The grid.
        where: Which of these; see `FeatureDivision`.

    Collective: no; the module's forward and backward are.
    """
    module.__dict__[_DIVISION] = FeatureDivision(name, grid, where)
    module.__class__ = subclass_of(type(module), "divided features", _members, below=COMPILED | RECOMPUTED)


def _members(base: type[nn.Module]) -> dict[str, Any]:
    @functools.wraps(base.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        key = hidden_key(args, kwargs)
        block = kwargs[key] if isinstance(key, str) else args[key]
        division: FeatureDivision = self.__dict__[_DIVISION]
        with _GroupReductions(division, block.shape, is_training=self.training):
            return base.forward(self, *args, **kwargs)

    return {"forward": forward}


class FeatureReductions(TorchFunctionMode):
    """Torch function mode in which reductions over the last dimension are those of a subclass.

    It takes tensors of the shape of the hidden states for blocks of activations; see `FeatureDivision.where`.

    Args:
        name: Name of the module, for errors.
        mode: Mode of the grid, for errors.
        where: As in `FeatureDivision`.
        shape: Shape of the hidden states.
    """

    def __init__(self, name: str, mode: str, where: Where, shape: torch.Size) -> None:
        super().__init__()
        self._name, self._mode, self._where, self._shape = name, mode, where, shape

    def mean(self, x: torch.Tensor, keepdim: bool, dtype: torch.dtype | None) -> torch.Tensor:
        """Return the mean over the features."""
        raise NotImplementedError

    def layer_norm(
        self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
    ) -> torch.Tensor:
        """Return the layer norm over the features."""
        raise NotImplementedError

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor | None, eps: float | None) -> torch.Tensor:
        """Return the RMS norm over the features."""
        raise NotImplementedError

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_block = bool(args) and isinstance(args[0], torch.Tensor) and args[0].shape == self._shape
        if func not in _MEANS | _NORMS | _REDUCTIONS or not (is_block or self._where == "module"):
            return func(*args, **kwargs)
        if func in _REDUCTIONS or self._where == "region":
            raise ConfigError(
                f"{self._name!r} calls {func.__name__}(), but tp_mode={self._mode!r} divides the features that it would"
                " reduce: use tp_mode='1d', or a module of means over the features (LayerNorm, RMSNorm)"
            )
        if func in _MEANS:
            return self._mean(*args, **kwargs)
        return (self._layer_norm if func is F.layer_norm else self._rms_norm)(*args, **kwargs)

    def _mean(
        self, x: torch.Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        dims = [dim] if isinstance(dim, int) else list(dim or range(x.dim()))
        if [one % x.dim() for one in dims] != [x.dim() - 1]:
            raise ConfigError(
                f"{self._name!r} takes a mean over dim={dim} of {tuple(x.shape)}, but tp_mode={self._mode!r} divides"
                " examples and features: use tp_mode='1d', or a mean over the last dimension"
            )
        return self.mean(x, keepdim, dtype)

    def _layer_norm(
        self,
        x: torch.Tensor,
        normalized_shape: Sequence[int],
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        eps: float = 1e-5,
    ) -> torch.Tensor:
        self._check_normalized("layer norm", normalized_shape)
        return self.layer_norm(x, weight, bias, eps)

    def _rms_norm(
        self,
        x: torch.Tensor,
        normalized_shape: Sequence[int],
        weight: torch.Tensor | None = None,
        eps: float | None = None,
    ) -> torch.Tensor:
        self._check_normalized("RMS norm", normalized_shape)
        return self.rms_norm(x, weight, eps)

    def _check_normalized(self, what: str, shape: Sequence[int]) -> None:
        if len(shape) != 1:
            raise ConfigError(
                f"{self._name!r} is a {what} over {len(shape)} dimensions, of which tp_mode={self._mode!r} divides"
                " some: use tp_mode='1d', or normalize the last dimension only"
            )


class _GroupReductions(FeatureReductions):
    """Reductions over the features of all ranks that share the examples, and random numbers that ranks share."""

    def __init__(self, division: FeatureDivision, shape: torch.Size, *, is_training: bool) -> None:
        super().__init__(division.name, division.grid.shape.mode, division.where, shape)
        self._number = division.grid.tp_group.number
        self._layout = division.grid.shape.outer
        self._is_training = is_training
        self._num_draws = 0  # that ranks share

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_random = self._is_training and self._where != "module" and func in RANDOM_FUNCTIONS
        if is_random and kwargs.get("generator") is None:
            return self._draw(func, *args, **kwargs)
        return super().__torch_function__(func, types, args, kwargs)

    def _draw(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function that draws random numbers, from a stream that the ranks which need equal ones share."""
        given = args[0] if args else kwargs.get("input")
        if isinstance(given, torch.Tensor):
            shape = given.shape[:2] + (1,) * (given.dim() - 2) if func in FEATURE_DROPOUTS else given.shape
        else:
            shape = func(*args, **{**kwargs, "device": "meta"}).shape  # which draws none
        axes = shared_axes(shape, self._shape, self._layout)
        if axes is None:
            return func(*args, **kwargs)
        if self._where == "region":
            raise ConfigError(
                f"{self._name!r} draws random numbers of shape {tuple(shape)}, which ranks share, but tp_mode='3d'"
                " divides the examples in another way between linear layers: draw them in the layer around it, or use"
                " tp_mode='2d' or '1d'"
            )
        self._num_draws += 1
        if func in FILLS:
            like = torch.empty_like(args[0])
            return args[0].copy_(self._draw_shared(axes, fill, func, like, *args[1:], **kwargs))
        return self._draw_shared(axes, func, *args, **kwargs)

    def _draw_shared(self, axes: tuple[str, ...], func: Any, *args: Any, **kwargs: Any) -> Any:
        call = func, len(args), tuple(kwargs), *args, *kwargs.values()
        return _draw_in_shared_stream(self._number, self._num_draws, axes, *call)

    def mean(self, x: torch.Tensor, keepdim: bool, dtype: torch.dtype | None) -> torch.Tensor:
        return _feature_mean(self._number, keepdim, dtype, x)  # type: ignore[no-any-return]

    def layer_norm(
        self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
    ) -> torch.Tensor:
        return _feature_layer_norm(self._number, eps, x, weight, bias)  # type: ignore[no-any-return]

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor | None, eps: float | None) -> torch.Tensor:
        return _feature_rms_norm(self._number, eps, x, weight)  # type: ignore[no-any-return]


def shared_axes(shape: Sequence[int], block: Sequence[int], layout: ActivationLayout) -> tuple[str, ...] | None:
    """Return the axes of a grid along which ranks need other random numbers of a shape; None for all of them.

    Ranks with the same examples need the same numbers for them, as for stochastic depth, where none is of a feature.

    Args:
        shape: Shape of the numbers.
        block: Shape of a rank's block of the hidden states.
        layout: Layout of the hidden states.
    """
    if math.prod(shape) == 1 and len(shape) < 2:
        return ()  # such as whether a layer is left out
    of_examples = layout.batch if shape[0] == block[0] else ()
    if of_examples and all(size == 1 for size in shape[1:]):
        return of_examples
    if len(shape) == 1:
        known: dict[int, tuple[str, ...]] = {**dict.fromkeys(block[1:-1], ()), block[-1]: (layout.features,)}
        return known.get(shape[0])
    if len(shape) != len(block) or any(size not in (1, full) for size, full in zip(shape, block, strict=True)):
        return None  # of heads, or of features between two linear layers
    of_features = () if shape[-1] == 1 else (layout.features,)
    return None if of_examples and of_features else (*of_examples, *of_features)


def _call_in_shared_stream(number: int, draw: int, axes: tuple[str, ...], *call: Any) -> Any:
    grid = grid_of_number(number)
    with grid.tp_group.rng.shared(draw, grid.shape.index(grid.tp_group.rank, axes)):
        return call_named(number, *call)


def _call_for_shape(number: int, draw: int, axes: tuple[str, ...], *call: Any) -> Any:
    return call_named(number, *call)


_draw_in_shared_stream = opaque(_call_in_shared_stream, _call_for_shape)


def _group_of_features(number: int) -> tuple[dist.ProcessGroup, int]:
    grid = grid_of_number(number)
    return grid.group(grid.shape.outer.features), grid.side


# Each of the following runs outside of the modes of modules around the one that calls it.


def _mean_of_all(number: int, keepdim: bool, dtype: torch.dtype | None, x: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunction():
        return _Mean.apply(x.mean(-1, keepdim, dtype=dtype), *_group_of_features(number))  # type: ignore[no-any-return]


def _mean_shape(number: int, keepdim: bool, dtype: torch.dtype | None, x: torch.Tensor) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], 1) if keepdim else x.shape[:-1], dtype=dtype or x.dtype)


def _layer_norm_of_all(
    number: int, eps: float, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    with torch._C.DisableTorchFunction():
        x = x.float() if autocast_dtype(x) != x.dtype else x
        return _LayerNorm.apply(x, weight, bias, eps, *_group_of_features(number))  # type: ignore[no-any-return]


def _rms_norm_of_all(number: int, eps: float | None, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    with torch._C.DisableTorchFunction():
        wide = x.to(sum_dtype(x.dtype))
        eps = torch.finfo(x.dtype).eps if eps is None else eps
        square = _Mean.apply(wide.square().mean(-1, keepdim=True), *_group_of_features(number))
        y = wide * torch.rsqrt(square + eps)
        return (y if weight is None else y * weight).to(x.dtype)


def _norm_shape(number: int, eps: float | None, x: torch.Tensor, *parameters: torch.Tensor | None) -> torch.Tensor:
    is_cast = len(parameters) == 2 and autocast_dtype(x) != x.dtype  # by layer norm
    return torch.empty_like(x, dtype=torch.float32 if is_cast else x.dtype)


_feature_mean = opaque(_mean_of_all, _mean_shape)
_feature_layer_norm = opaque(_layer_norm_of_all, _norm_shape)
_feature_rms_norm = opaque(_rms_norm_of_all, _norm_shape)


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mean: torch.Tensor, group: dist.ProcessGroup, size: int) -> torch.Tensor:
        ctx.group, ctx.size = group, size
        return sum_over(mean, group).div_(size).to(mean.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return sum_over(grad, ctx.group).div_(ctx.size).to(grad.dtype), None, None


class _LayerNorm(torch.autograd.Function):
    """Layer norm over the features of a group; Chan et al., "Updating Formulae", 1979, for the variance of parts."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        group: dist.ProcessGroup,
        size: int,
    ) -> torch.Tensor:
        wide = x.to(sum_dtype(x.dtype))
        own = wide.mean(-1, keepdim=True)
        parts = torch.stack([own, (wide - own).square().mean(-1, keepdim=True)])
        means, variances = all_gather_equal(parts.flatten(1), group).view(size, 2, *own.shape).unbind(1)
        mean = means.mean(0)
        scale = torch.rsqrt((variances + (means - mean).square()).mean(0) + eps)
        normalized = (wide - mean) * scale
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.group, ctx.num_features = group, size * x.shape[-1]
        y = normalized if weight is None else normalized * weight
        return (y if bias is None else y + bias).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, mean, scale = ctx.saved_tensors
        wide = grad.to(sum_dtype(grad.dtype))
        normalized = (x.to(wide.dtype) - mean) * scale
        inside = wide if weight is None else wide * weight
        sums = torch.stack([inside.sum(-1, keepdim=True), (inside * normalized).sum(-1, keepdim=True)])
        total, projection = sum_over(sums, ctx.group).div_(ctx.num_features)
        grad_x = ((inside - total - normalized * projection) * scale).to(x.dtype)
        dims = tuple(range(grad.dim() - 1))
        grad_weight = (wide * normalized).sum(dims).to(weight.dtype) if ctx.needs_input_grad[1] else None
        grad_bias = wide.sum(dims).to(grad.dtype) if ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias, None, None, None
