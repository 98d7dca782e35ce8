"""Attributes of a wrapped optimizer that are the user's optimizer's."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

__all__ = ["OptimizerPassThrough"]


class OptimizerPassThrough(Optimizer):
    """Optimizer whose groups, states and hooks are those of another one.

    Args:
        optim: The user's optimizer.
    """

    def __init__(self, optim: Optimizer) -> None:
        # Optimizer.__init__ is not called: it would make a second set of groups and states.
        self.optim = optim

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The user's optimizer's groups, which LR schedulers change."""
        return self.optim.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The user's optimizer's states."""
        return self.optim.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The user's optimizer's default hyperparameters."""
        return self.optim.defaults

    def __getattr__(self, name: str) -> Any:
        if name == "optim":  # not set yet: __init__ did not run
            raise AttributeError(name)
        value = getattr(self.optim, name)
        if not (inspect.isroutine(value) or isinstance(value, functools.partial)):
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            return self._call_own(functools.partial(value, *args, **kwargs))

        functools.update_wrapper(call, value)
        return call

    def _call_own(self, method: Callable[[], Any]) -> Any:
        """Call a method that only the user's optimizer has."""
        return method()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optim!r})"

    def unwrap(self) -> Optimizer:
        """Return the user's optimizer."""
        return self.optim


def _delegate(name: str) -> Callable[..., Any]:
    def method(self: OptimizerPassThrough, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.optim, name)(*args, **kwargs)

    method.__name__ = name
    method.__doc__ = f"Call the user's optimizer's `{name}`."
    return method


# The inherited versions would write into hook tables that the user's optimizer never reads.
for _name in (
    "register_step_pre_hook",
    "register_step_post_hook",
    "register_state_dict_pre_hook",
    "register_state_dict_post_hook",
    "register_load_state_dict_pre_hook",
    "register_load_state_dict_post_hook",
):
    setattr(OptimizerPassThrough, _name, _delegate(_name))
