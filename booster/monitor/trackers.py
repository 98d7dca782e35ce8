"""Loggers of step records into experiment trackers: Weights & Biases and MLflow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from booster.errors import ConfigError

from .loggers import scalars_of

Settings = str | Mapping[str, Any]
"""Name of a project or experiment, or keyword arguments of the tracker's function that starts a run."""


class WandbLogger:
    """Run of Weights & Biases.

    Args:
        settings: Name of the project, or keyword arguments of `wandb.init`.

    Raises:
        ConfigError: wandb is not installed, or refuses the arguments.
    """

    def __init__(self, settings: Settings) -> None:
        try:
            import wandb
        except ImportError as error:
            raise _not_installed("wandb", settings, error) from error
        arguments = {"project": settings} if isinstance(settings, str) else dict(settings)
        try:
            self._run = wandb.init(**arguments)
        except TypeError as error:
            raise _wrong_arguments("wandb", "wandb.init", arguments, error) from error

    def write(self, record: Mapping[str, Any]) -> None:
        # Its steps only grow, and a step is written twice here: as its record and with the user's numbers.
        self._run.log({"step": record["step"], **dict(scalars_of(record))})

    def close(self) -> None:
        self._run.finish()


class MLflowLogger:
    """Run of MLflow.

    Args:
        settings: Name of the experiment, or keyword arguments of `mlflow.start_run`.

    Raises:
        ConfigError: MLflow is not installed, or refuses the arguments.
    """

    def __init__(self, settings: Settings) -> None:
        try:
            import mlflow
        except ImportError as error:
            raise _not_installed("mlflow", settings, error) from error
        self._mlflow = mlflow
        arguments = {} if isinstance(settings, str) else dict(settings)
        if isinstance(settings, str):
            mlflow.set_experiment(settings)
        try:
            mlflow.start_run(**arguments)
        except TypeError as error:
            raise _wrong_arguments("mlflow", "mlflow.start_run", arguments, error) from error

    def write(self, record: Mapping[str, Any]) -> None:
        self._mlflow.log_metrics(dict(scalars_of(record)), step=record["step"])

    def close(self) -> None:
        self._mlflow.end_run()


def check_settings(name: str, settings: Any) -> None:
    """Raise `ConfigError` if a tracker's settings are neither a name nor keyword arguments."""
    is_named = isinstance(settings, str) and settings
    if not is_named and not (isinstance(settings, Mapping) and all(isinstance(key, str) for key in settings)):
        raise ConfigError(
            f"{name}={settings!r} is neither a name nor keyword arguments: pass the name of a project, such as 'gpt',"
            " or a dict"
        )


def _not_installed(name: str, settings: Settings, error: ImportError) -> ConfigError:
    return ConfigError(
        f"{name}={settings!r} needs {name}, which is not installed ({error}): run `pip install torch-booster[{name}]`,"
        f" or leave {name} out"
    )


def _wrong_arguments(name: str, function: str, arguments: Mapping[str, Any], error: TypeError) -> ConfigError:
    return ConfigError(
        f"{name}={dict(arguments)!r}: {function} does not take these ({error}): pass its keyword arguments, or a name"
    )
