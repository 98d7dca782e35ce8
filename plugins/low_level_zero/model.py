"""Model wrapper of ZeRO 1 and 2: buffers equal on all ranks, weights read only after their all-gather."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from booster.errors import ConfigError
from booster.interface import ModelWrapper, TensorSlice
from booster.plugins.sharding.buffer_pool import broadcast_coalesced

from .param_all_gather import WaitForParams

if TYPE_CHECKING:
    from .param_all_gather import ParamAllGather


class ZeroModel(ModelWrapper):
    """Boosted model; every rank holds all weights.

    With `overlap_allgather` the weights of other ranks may still be in flight after a step: the forward, the methods of
    this class, and `unwrap()` wait for them. References to parameters from before boost() do not.

    Args:
        module: The user's model.
        group: Ranks that hold replicas; optional, defaults to the world group.
        is_primary: If True, this rank saves what is equal on all ranks.
        broadcasts_buffers: If True, broadcast the first rank's buffers before each forward in training.
    """

    def __init__(
        self, module: nn.Module, group: dist.ProcessGroup | None, *, is_primary: bool, broadcasts_buffers: bool
    ) -> None:
        super().__init__(module, is_primary=is_primary)
        self._group = group
        self._broadcasts_buffers = broadcasts_buffers
        self._all_gather: ParamAllGather | None = None
        self._clear_gradients: Callable[[bool], None] | None = None

    def connect(self, all_gather: ParamAllGather, clear_gradients: Callable[[bool], None]) -> None:
        """Set the all-gather of the weights after a step, and the callback that clears the gradients."""
        self._all_gather = all_gather
        self._clear_gradients = clear_gradients

    def wait_for_weights(self) -> None:
        """Wait for all weights of the last step."""
        if self._all_gather is not None:
            self._all_gather.wait()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's forward; arguments and result are those of the user's model.

        Collective over the group in training, if the model has buffers.
        """
        self._begin_run(args, kwargs)
        waiting: AbstractContextManager[Any] = nullcontext()
        if self._all_gather is not None and self._all_gather.is_pending:
            # A compiled module reads its weights where no operator of torch is seen.
            if torch.compiler.is_compiling() or any(
                hasattr(one, "_orig_mod") or one._compiled_call_impl is not None for one in self.module.modules()
            ):
                self._all_gather.wait()
            else:
                waiting = WaitForParams(self._all_gather)
        with waiting:
            outputs = super().forward(*args, **kwargs)
        self.wait_for_weights()
        return outputs

    def _begin_run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._broadcasts_buffers and self.training and torch.is_grad_enabled():
            broadcast_coalesced(list(self.module.buffers()), self._group)

    def _run_method(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.wait_for_weights()
        return super()._run_method(method, *args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the model and of its optimizer."""
        super().zero_grad(set_to_none)
        if self._clear_gradients is not None:
            self._clear_gradients(set_to_none)

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelWrapper:
        """Return a copy without an optimizer, for example for weight averaging."""
        self.wait_for_weights()
        copied = ModelWrapper(copy.deepcopy(self.module, memo), is_primary=self._is_primary)
        copied.precision = self.precision
        return copied.train(self.training)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> ZeroModel:
        for parameter in self.module.parameters():
            probe = fn(torch.zeros((), dtype=parameter.dtype, device=parameter.device))
            if probe.dtype != parameter.dtype or probe.device != parameter.device:
                raise ConfigError(
                    f"the boosted model was to become {probe.dtype} on {probe.device}, by .to(), .half() or the like,"
                    f" and is {parameter.dtype} on {parameter.device}, where its optimizer has it: do it before boost()"
                )
        super()._apply(fn, recurse)
        return self

    def unwrap(self) -> nn.Module:
        self.wait_for_weights()
        return super().unwrap()

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        self.wait_for_weights()
        return super().named_parameters(prefix, recurse, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self.wait_for_weights()
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        self.wait_for_weights()
        return super().load_state_dict(state_dict, strict, assign)

    def tensor_slices(self) -> list[TensorSlice]:
        self.wait_for_weights()
        return super().tensor_slices()
