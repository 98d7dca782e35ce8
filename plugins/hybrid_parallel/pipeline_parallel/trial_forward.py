"""First forward of a pipeline stage, which is checked for values that the stage does not have.

Note [Trial forward]
Code before a stage's layers runs on placeholders of the modules of earlier stages, and draws random numbers of this
stage. The autograd graph shows where a result depends on a placeholder, but not through comparisons and indices, such
as a mask of the rows that are zero, and random numbers leave no trace at all. So in the first batch a chunk runs again
with other values in the placeholders and other random numbers before its layers, and must give the same. A control,
which changes nothing, comes first: a chunk that doesn't repeat itself can't be checked. From the received activation
on, as in a dropout between two layers, random numbers are this stage's alone, and the same in the trials. Models of
transformers are not run again: docs/tested_models.md says which of them train in a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from booster.comm import is_fake_world
from booster.core.module_state import preserved_state
from booster.errors import ConfigError
from booster.pytree import iter_tensors, map_tensors
from booster.rng_state import fork_rng_state, get_rng_state, set_rng_state

from .placeholders import PlaceholderModules
from .stage_forward import ChunkContext

_VERIFIED = ("torch", "transformers", "peft", "booster")  # packages whose classes of modules are not run again


class TrialForward:
    """Runs a chunk again with other values of what its stage does not have; see Note [Trial forward].

    Args:
        model: Stage model.
        context: Context of its layers.
        placeholders: Its placeholders.
        device: Device of the stage.
    """

    def __init__(
        self, model: nn.Module, context: ChunkContext, placeholders: PlaceholderModules, device: torch.device
    ) -> None:
        self._model = model
        self._context = context
        self._placeholders = placeholders
        self._device = device
        classes = {cls for module in model.modules() for cls in type(module).__mro__ if issubclass(cls, nn.Module)}
        is_known = all(cls.__module__.partition(".")[0] in _VERIFIED for cls in classes)
        self.is_needed = not is_known and not is_fake_world()  # fake tensors have no values

    def run(self, forward: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of the first forward of a chunk, once it is checked.

        Args:
            forward: Function that runs the chunk.
            arguments: Its arguments; the tensors in them stay as they are in the trials.

        Raises:
            ConfigError: What the chunk computes depends on what its stage does not have.
        """
        copies = map_tensors(lambda one: one.detach().clone(), arguments)
        start, states = get_rng_state(self._device), list[Any]()
        with self._when_received(lambda: states.append(get_rng_state(self._device))):
            result = forward(*arguments)
        end = get_rng_state(self._device)
        self._placeholders.check_independent(list(iter_tensors(result)))  # which names the module
        if not states:
            return result

        def differs(state: Any, *, is_trial: bool) -> bool:
            set_rng_state(state, self._device)
            self._placeholders.is_trial = is_trial
            try:
                with preserved_state(self._model), torch.no_grad(), self._when_received(self._restorer(states[0])):
                    repeated = forward(*map_tensors(torch.clone, copies))
            except Exception:  # a user's forward may raise anything, such as an error of its own for such values
                return not is_trial
            finally:
                self._placeholders.is_trial = False
                set_rng_state(end, self._device)
            return not _are_close(list(iter_tensors(result)), list(iter_tensors(repeated)))

        if differs(start, is_trial=False) or not differs(fork_rng_state(start, 1), is_trial=True):
            return result
        if differs(start, is_trial=True):
            raise ConfigError(
                "what this pipeline stage computes depends on modules of an earlier stage, by a way around the layers"
                " between, such as a mask or an index that the forward computes from them before the layers: only the"
                " output of the layer before travels from stage to stage. Compute it from the batch, or let the layers"
                " hand it on with their output"
            )
        raise ConfigError(
            "the model's forward draws random numbers before its layers, such as noise, and what this pipeline stage"
            " computes depends on them: each stage draws other ones. Draw them for the batch and pass them with it, or"
            " draw them within the layers"
        )

    def _restorer(self, state: Any) -> Callable[[], None]:
        return lambda: set_rng_state(state, self._device)

    @contextmanager
    def _when_received(self, call: Callable[[], None]) -> Iterator[None]:
        self._context.on_received = call
        try:
            yield
        finally:
            self._context.on_received = None


def _are_close(results: Sequence[torch.Tensor], repeated: Sequence[torch.Tensor]) -> bool:
    if len(results) != len(repeated):
        return False
    for one, other in zip(results, repeated, strict=True):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        tolerance = 1e-2 if one.dtype in (torch.bfloat16, torch.float16) else 1e-4
        scale = float(one.detach().abs().nan_to_num().max()) if one.numel() and one.is_floating_point() else 0.0
        if not torch.allclose(one.detach(), other, rtol=tolerance, atol=tolerance * scale, equal_nan=True):
            return False
    return True
