"""Settings of torch's launcher without a dedicated option: `--extra-launch-args "name=value name=value"`."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from booster.errors import ConfigError

__all__ = ["ExtraArguments", "parse_extra_arguments"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraArguments:
    """Fields of torch's LaunchConfig, and of its rendezvous configuration."""

    launch: dict[str, Any] = field(default_factory=dict)
    rendezvous: dict[str, Any] = field(default_factory=dict)


def _flag(text: str) -> bool:
    if text.lower() not in ("0", "1", "true", "false"):
        raise ValueError
    return text.lower() in ("1", "true")


_LAUNCH: dict[str, Callable[[str], Any]] = {
    "event_log_handler": str,
    "local_addr": str,
    "monitor_interval": float,
    "rdzv_backend": str,
    "rdzv_endpoint": str,
    "rdzv_id": str,
    "role": str,
    "shutdown_timeout": int,
    "signals_to_handle": str,
    "virtual_local_rank": _flag,
}
_RENDEZVOUS: dict[str, Callable[[str], Any]] = {
    "close_timeout": int,
    "heartbeat_timeout": int,
    "is_host": _flag,
    "join_timeout": int,
    "keep_alive_interval": int,
    "keep_alive_max_attempt": int,
    "last_call_timeout": int,
    "read_timeout": int,
    "store_type": str,
    "timeout": int,
}
_TYPE_NAMES = {int: "an integer", float: "a number", _flag: "0 or 1"}
_FIELDS = {"rdzv_id": "run_id"}  # option of torchrun -> field of LaunchConfig


def parse_extra_arguments(text: str) -> ExtraArguments:
    """Parse settings such as "monitor_interval=5 rdzv_id=job-7".

    Names are torchrun's options and fields of the rendezvous configuration, with "-" or "_".

    Raises:
        ConfigError: A name is unknown or repeated, or its value has the wrong type.
    """
    extra = ExtraArguments()
    for word in _split_words(text):
        name, equals, value = word.lstrip("-").partition("=")
        name = name.replace("-", "_")
        parse = _LAUNCH.get(name) or _RENDEZVOUS.get(name)
        if not equals or parse is None:
            raise ConfigError(
                f"--extra-launch-args: {word!r} is not a setting of torch's launcher: write name=value with one of "
                f"{', '.join(sorted(_LAUNCH | _RENDEZVOUS))}"
            )
        settings, name = (extra.launch, _FIELDS.get(name, name)) if name in _LAUNCH else (extra.rendezvous, name)
        if name in settings:
            raise ConfigError(f"--extra-launch-args: {word!r} repeats a setting: give it once")
        try:
            settings[name] = parse(value)
        except ValueError as error:
            raise ConfigError(
                f"--extra-launch-args: {word!r} has a value of the wrong type: give {_TYPE_NAMES[parse]}"
            ) from error
    return extra


def _split_words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(
            f"--extra-launch-args={text!r} can't be parsed ({error}): write name=value, with quotes around values that "
            "contain spaces"
        ) from error
