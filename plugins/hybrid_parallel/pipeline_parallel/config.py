"""Pipeline arguments of the plugin, validated before anything is allocated."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from booster.errors import ConfigError
from booster.validation import check_flag, error_of, is_count

from .schedules import PipelineSchedule, schedule_from_name, schedule_names

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_MANY = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineArguments:
    """Options of pipeline parallelism by their names in `HybridParallelPlugin`, where they are documented."""

    pp_size: int
    num_microbatches: int | None
    microbatch_size: int | None
    pp_style: str | PipelineSchedule
    num_model_chunks: int
    num_layers_per_stage: Sequence[int] | None
    broadcast_loss: bool
    enable_metadata_cache: bool
    split: Sequence[str] | None
    execution_sequence: Sequence[str | Callable[..., Any]] | None

    @property
    def fingerprint(self) -> list[str]:
        """Options that must be equal on all ranks, without addresses, by which equal ones would differ."""
        return [f"{name}={without_addresses(getattr(self, name))}" for name in self.__slots__]

    @property
    def schedule(self) -> PipelineSchedule:
        """Schedule object; valid after `check`."""
        return schedule_from_name(self.pp_style) if isinstance(self.pp_style, str) else self.pp_style

    @property
    def num_positions(self) -> int:
        """Number of chunks of the full model."""
        return self.pp_size * self.num_model_chunks

    def remarks(self) -> list[str]:
        """Return log lines about arguments that have no effect with one stage."""
        given_and_usual = {
            "num_microbatches": (self.num_microbatches, None),
            "microbatch_size": (self.microbatch_size, None),
            "pp_style": (self.pp_style, "1f1b"),
            "num_model_chunks": (self.num_model_chunks, 1),
            "num_layers_per_stage": (self.num_layers_per_stage, None),
            "split": (self.split, None),
            "execution_sequence": (self.execution_sequence, None),
        }
        return [
            f"{name}={without_addresses(given)} changes nothing: pp_size=1 has no pipeline stages to fill"
            for name, (given, usual) in given_and_usual.items()
            if self.pp_size == 1 and given != usual
        ]

    def check(self) -> None:
        """Validate the arguments.

        With one stage only values that are never valid are refused, so that scripts may change the number of stages
        alone. If `num_microbatches` is given, it is checked against the requirements of the schedule.

        Raises:
            ConfigError: An argument is invalid.
        """
        for name in ("broadcast_loss", "enable_metadata_cache"):
            check_flag(name, getattr(self, name))
        self._check_numbers()
        self._check_style()
        self._check_names()
        if self.pp_size == 1:
            return
        self._check_microbatches()
        self._check_division()

    # Checks of single arguments.

    def _check_numbers(self) -> None:
        for name in ("num_microbatches", "microbatch_size"):
            if getattr(self, name) is not None and not is_count(getattr(self, name)):
                raise ConfigError(
                    f"{name}={getattr(self, name)!r} is not a number: give a whole number from 1, or None"
                )
        if not is_count(self.num_model_chunks):
            raise ConfigError(
                f"num_model_chunks={self.num_model_chunks!r} is not a number of model chunks per stage: give a whole"
                " number from 1"
            )
        layers = self.num_layers_per_stage
        if layers is not None and not _is_list_of(is_count, layers):
            raise ConfigError(
                f"num_layers_per_stage={layers!r} does not say how many layers each stage holds: give a list of whole"
                " numbers from 1, such as [3, 5] for two stages, or None to divide them by their costs"
            )

    def _check_style(self) -> None:
        if isinstance(self.pp_style, type) and issubclass(self.pp_style, PipelineSchedule):
            raise ConfigError(
                f"pp_style={self.pp_style.__name__} is a class, which orders no work: give an object of it,"
                f" pp_style={self.pp_style.__name__}()"
            )
        if not isinstance(self.pp_style, PipelineSchedule) and self.pp_style not in schedule_names():
            raise ConfigError(
                f"pp_style={self.pp_style!r} is not known: choose one of {', '.join(schedule_names())}, register a"
                " schedule with register_schedule, or give an object of one"
            )

    def _check_names(self) -> None:
        if self.split is not None and not _is_list_of(_is_name, self.split):
            raise ConfigError(
                f"split={self.split!r} does not say where a model is divided: give a list of the names of the modules"
                " with which stages after the first begin, such as ['layers.4'] for two stages, or leave it out"
            )
        sequence = self.execution_sequence
        if sequence is not None and not _is_list_of(lambda one: _is_name(one) or callable(one), sequence):
            raise ConfigError(
                f"execution_sequence={without_addresses(sequence)} is not an order of execution: give a list"
                " of names of modules and functions of one argument, such as ['embedding', 'layers.0', 'layers.1',"
                " 'head'], or leave it out"
            )

    # Checks of combinations.

    def _check_microbatches(self) -> None:
        if self.num_microbatches is None and self.microbatch_size is None:
            raise ConfigError(
                f"pp_size={self.pp_size} without num_microbatches and microbatch_size does not say into what a batch"
                " is divided, of which stages work on several parts at a time: give"
                f" num_microbatches={2 * self.pp_size}, or microbatch_size=1"
            )
        if self.num_microbatches is not None and self.microbatch_size is not None:
            raise ConfigError(
                f"num_microbatches={self.num_microbatches} and microbatch_size={self.microbatch_size} both say how a"
                " batch is divided, and only one size of batches could fit both: leave one of them out"
            )
        # If the number depends on the batch, only errors with any number of microbatches are raised.
        some = (self.num_positions, _MANY * self.num_positions)
        numbers = some if self.num_microbatches is None else (self.num_microbatches,)
        check = self.schedule.check
        errors = [error_of(functools.partial(check, self.pp_size, number, self.num_model_chunks)) for number in numbers]
        if errors[-1] is not None and all(errors):
            raise errors[-1]

    def _check_division(self) -> None:
        layers, split = self.num_layers_per_stage, self.split
        chunks = f"pp_size={self.pp_size}"
        if self.num_model_chunks > 1:
            chunks += f" with num_model_chunks={self.num_model_chunks}"
        if layers is not None and split is not None:
            raise ConfigError(
                f"num_layers_per_stage={layers!r} and split={split!r} both say where a model is divided: leave one of"
                " them out"
            )
        if layers is not None and len(layers) != self.num_positions:
            raise ConfigError(
                f"num_layers_per_stage={layers!r} has {len(layers)} numbers, and {chunks} divides a model into"
                f" {self.num_positions} chunks: give {self.num_positions} numbers, in the order in which the model runs"
                " its layers"
            )
        if split is None:
            return
        if len(split) != self.num_positions - 1:
            raise ConfigError(
                f"split={split!r} has {len(split)} names, which divide a model into {len(split) + 1} chunks, and"
                f" {chunks} needs {self.num_positions}: give {self.num_positions - 1} names, of the modules with which"
                " the chunks after the first begin"
            )


def without_addresses(value: Any) -> str:
    """Return the text of a value that is equal in every process, which addresses are not."""
    return _ADDRESS.sub("", repr(value))


def _is_list_of(belongs: Callable[[Any], bool], value: Any) -> bool:
    is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    return is_list and len(value) > 0 and all(belongs(one) for one in value)


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and bool(value)
