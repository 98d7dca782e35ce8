"""Model wrapper of ZeRO 1 and 2, and the all-gather of updated weights, which are read only after it."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from booster.comm import AllGather, start_all_gather
from booster.core.compiling import EagerHook, is_compiled_layer, not_compiled
from booster.interface import Shard
from booster.plugins.base import DistributedModel, ForwardWrites, refuse_conversion

from .grad_bucket import GradientBucket


class ParamAllGather:
    """All-gather of the weights after a step.

    Args:
        buckets: All buckets, in the order of backward.
        model: The boosted model.

    Attributes:
        module_hook: Hook of modules that are called while weights are in flight.
    """

    def __init__(self, buckets: Sequence[GradientBucket], model: ZeroModel) -> None:
        self._buckets = buckets[::-1]  # the order of forward
        self._modules = tuple(model.module.modules())
        self.module_hook = WaitBeforeModules(self, model)
        self._in_flight: dict[int, AllGather] = {}
        self._needed: dict[int, list[int]] = {}

    @property
    def is_pending(self) -> bool:
        """Whether weights of other ranks are in flight."""
        return bool(self._in_flight)

    @torch.no_grad()
    def start(self) -> None:
        """Start the all-gather of all buckets. Collective over the ranks that share the shards."""
        for index, one in enumerate(self._buckets):
            buffer = one.group.weights[one.bucket.start : one.bucket.stop]
            self._in_flight[index] = start_all_gather(buffer, one.group.groups.shard_group)
            for param_grad in one.param_grads:
                self._needed.setdefault(id(param_grad.parameter), []).append(index)

    def wait_before_modules(self) -> None:
        """Let the user's modules wait when they are called by themselves; those that run no hook wait now."""
        if any(one._compiled_call_impl is not None for one in self._modules):
            self.wait()
        else:
            self.module_hook.register()

    @not_compiled
    def wait(self) -> None:
        """Wait for all weights."""
        for index in list(self._in_flight):
            self._in_flight.pop(index).wait()
        self._needed.clear()
        self.module_hook.remove()

    def wait_for(self, parameter: nn.Parameter) -> None:
        """Wait for one parameter."""
        for index in self._needed.pop(id(parameter), ()):
            if index in self._in_flight:
                self._in_flight.pop(index).wait()


class WaitBeforeModules:
    """Hook by which the user's modules, called by themselves and not by the boosted model, wait for all weights.

    It is torch's hook of all modules, and registered only while weights are in flight outside of the boosted model's
    forward. Hooks of each module would be copied and scripted with it, and torch.compile would leave them out.

    Args:
        all_gather: All-gather of the weights.
        model: The boosted model.
    """

    def __init__(self, all_gather: ParamAllGather, model: ZeroModel) -> None:
        self._all_gather = weakref.ref(all_gather)  # torch holds the hook, if the model is deleted before its forward
        self._modules = frozenset(map(id, model.module.modules()))
        self._compiled = self._modules | {id(model)}
        self._handle: RemovableHandle | None = None

    def register(self) -> None:
        """Register the hook."""
        if self._handle is None:
            _ignore_warning_of_compiled_modules()
            self._handle = register_module_forward_pre_hook(EagerHook(self._wait))

    def remove(self) -> None:
        """Remove the hook."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _wait(self, module: nn.Module, args: Any) -> None:
        all_gather = self._all_gather()
        if all_gather is None:
            self.remove()
        elif id(module) in self._modules or id(_compiled_module(module)) in self._compiled:
            all_gather.wait()


def _compiled_module(module: nn.Module) -> nn.Module | None:
    """Return the module that torch.compile has wrapped, or None."""
    modules = module._modules  # not getattr(), by which a boosted model waits; those of TorchScript have no get()
    if "_orig_mod" not in modules:
        return None
    return modules["_orig_mod"]


@functools.cache
def _ignore_warning_of_compiled_modules() -> None:
    # That hooks of all modules are called for the wrapper as well, which is right here.
    warnings.filterwarnings("ignore", message=r"Using `torch\.compile\(module\)` when there are global hooks")


class WaitForParams(TorchFunctionMode):
    """Makes every operator wait for the weights that it reads.

    Module hooks are not enough: a module may read the weights of another one that is never called, as
    `nn.MultiheadAttention` reads those of its `out_proj`.
    """

    def __init__(self, all_gather: ParamAllGather) -> None:
        super().__init__()
        self._all_gather = all_gather

    def __enter__(self) -> WaitForParams:
        self._all_gather.module_hook.remove()  # which would wait for all weights
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self._all_gather.is_pending:
            self._all_gather.wait_before_modules()

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._all_gather.is_pending:
            self._wait_for(args)
            self._wait_for(kwargs.values())
        return function(*args, **kwargs)

    def _wait_for(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, nn.Parameter):
                self._all_gather.wait_for(value)
            elif isinstance(value, (list, tuple)):
                self._wait_for(value)


def _hides_operators(module: nn.Module) -> bool:
    """Whether a module reads its weights where no operator of torch is seen."""
    is_compiled = hasattr(module, "_orig_mod") or module._compiled_call_impl is not None or is_compiled_layer(module)
    return is_compiled or isinstance(module, torch.jit.ScriptModule)


class ZeroModel(DistributedModel):
    """Boosted model; every rank holds all weights.

    With `overlap_allgather` the weights of other ranks may still be in flight after a step: the forward, the methods of
    this class, `unwrap()`, and calls of the user's modules wait for them. References to parameters do not.

    Args:
        module: The user's model.
        group: Ranks that hold replicas; optional, defaults to the world group.
        is_primary: If True, this rank saves what is equal on all ranks.
        broadcasts_buffers: If True, buffers are made equal on all ranks after each step in training.
    """

    def __init__(
        self, module: nn.Module, group: dist.ProcessGroup | None, *, is_primary: bool, broadcasts_buffers: bool
    ) -> None:
        super().__init__(module, group, is_primary=is_primary, broadcasts_buffers=broadcasts_buffers)
        self._all_gather: ParamAllGather | None = None
        self.forward_writes = ForwardWrites()

    def connect(self, all_gather: ParamAllGather) -> None:
        """Set the all-gather of the weights after a step."""
        self._all_gather = all_gather

    def compares_gradients(self) -> bool:
        """Return whether `compare_gradients` is to be called before this step; equal on all ranks."""
        return False

    def compare_gradients(self, shards: Sequence[Shard]) -> None:
        """Compare gradients of ranks that share layers. Collective; does nothing by default.

        Args:
            shards: This rank's shards, with the reduced gradients of a step.
        """

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
        if torch.compiler.is_compiling():  # whatever is in flight now, the graph runs after any step
            self.wait_for_weights()
        elif self._all_gather is not None and self._all_gather.is_pending:
            if any(map(_hides_operators, self.module.modules())):
                self._all_gather.wait()
            else:
                waiting = WaitForParams(self._all_gather)
        versions = self.forward_writes.begin(self.module)
        with waiting:
            outputs = super().forward(*args, **kwargs)
        self.wait_for_weights()
        if versions is not None:
            self.forward_writes.end(self.module, versions)
        return outputs

    def _begin_run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._begin_training_forward()

    def _run_method(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.wait_for_weights()
        return super()._run_method(method, *args, **kwargs)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> ZeroModel:
        refuse_conversion(self.module, fn, "optimizer has it")
        super()._apply(fn, recurse)
        return self

    def unwrap(self) -> nn.Module:
        self.wait_for_weights()
        return super().unwrap()
