"""Interface of what chooses a plugin when the model is known."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from torch import nn
from torch.optim import Optimizer

from .mixed_precision import MixedPrecision
from .plugin import Plugin


class PluginPlan(ABC):
    """A plugin with its settings, before it is made.

    Attributes:
        mixed_precision: Mixed precision of the Booster; None if unused or controlled by the plugin.
    """

    mixed_precision: str | None

    @abstractmethod
    def make_plugin(self) -> Plugin:
        """Return a new plugin with the plan's settings.

        Collective: every rank must call it.

        Raises:
            ConfigError: The launched world has another size, or the plugin refuses the settings.
        """

    @abstractmethod
    def check_model(self, model: nn.Module) -> None:
        """Check that the plan was made for a model of this class and size.

        Raises:
            ConfigError: It was made for another one.
        """

    @abstractmethod
    def prepare_model(self, model: nn.Module) -> None:
        """Change the model in place as the plan says, before it is boosted.

        Raises:
            ConfigError: The model can't be changed so.
        """


class PluginChoice(ABC):
    """What a Booster is given in place of a plugin that is chosen at the first `boost()`.

    A subclass with a name may be given by it: `class AutoPlugin(PluginChoice, name="auto")`.

    Attributes:
        plan: The chosen plan; None before.
    """

    by_name: ClassVar[dict[str, type[PluginChoice]]] = {}
    plan: PluginPlan | None

    def __init_subclass__(cls, name: str = "", **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if name:
            PluginChoice.by_name[name] = cls

    @abstractmethod
    def precision_for(self, mixed_precision: str | MixedPrecision | None) -> str | None:
        """Return the name of a Booster's mixed precision.

        Raises:
            ConfigError: It is an object, or another one than the plan's.
        """

    @abstractmethod
    def choose(
        self,
        model: nn.Module,
        optimizer: Optimizer | Callable[[list[nn.Parameter]], Optimizer] | None,
        criterion: Callable[..., Any] | None,
        dataloader: Any,
        mixed_precision: str | None,
    ) -> PluginPlan:
        """Return the best plan for the arguments of `boost()`, which stay as they are, and keep it as `plan`.

        Args:
            model: The user's model.
            optimizer: Its optimizer, or a function that would create one from a list of parameters.
            criterion: Loss function, optional.
            dataloader: Loader whose first samples make the batch, optional.
            mixed_precision: Mixed precision of the Booster.

        Collective: every rank must call it.

        Raises:
            ConfigError: No plugin has a plan that fits, or there is no batch; on all ranks.
            DesyncError: The ranks have different models or arguments.
        """
