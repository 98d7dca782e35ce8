"""Settings of a training script: a dict or a Python file, read as attributes."""

from __future__ import annotations
import __future__

import inspect
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from booster.errors import ConfigError


class Config(Mapping[str, Any]):
    """Read-only mapping of settings, read as attributes or items; nested dicts, also in lists, likewise.

    `dict(config)`, `config.get("lr", 0.1)`, `"lr" in config` and `**config` work. A setting whose name is a method of
    mappings (`items`, `keys`, `values`, `get`) or of this class is read as an item.

    Examples:
        >>> config = Config({"lr": 0.1, "model": {"dim": 64}})
        >>> config.model.dim, config["lr"]
        (64, 0.1)
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Raise `ConfigError` if a name is not a string."""
        if not isinstance(settings, Mapping):
            raise ConfigError(
                f"Config({settings!r}) was given a {type(settings).__name__}, which has no named settings: give a dict,"
                " or use Config.load(path) for a Python file"
            )
        for name in settings:
            if not isinstance(name, str):
                raise ConfigError(
                    f"config has the key {name!r}, which is not an attribute name: use strings as keys of the config"
                )
        self._settings = {name: _wrap(value) for name, value in settings.items()}

    @classmethod
    def from_file(cls, path: str | Path) -> Config:
        """Run a Python file and return its top-level names as settings.

        Names that start with `_`, modules, and imported functions and classes are left out.

        Raises:
            ConfigError: The file does not exist, is not a `.py` file, or fails to run.
        """
        namespace = _run_file(_checked_path(Path(path)))
        return cls({name: one for name, one in namespace.items() if not name.startswith("_") and not _is_import(one)})

    @classmethod
    def load(cls, source: Config | Mapping[str, Any] | str | Path) -> Config:
        """Return the config of a dict, the path of a Python file, or a config.

        Raises:
            ConfigError: The source is of another type, or the file is unusable.
        """
        if isinstance(source, Config):
            return source
        if isinstance(source, Mapping):
            return cls(source)
        if isinstance(source, str | Path):
            return cls.from_file(source)
        raise ConfigError(
            f"config={source!r} is a {type(source).__name__}, which has no named settings: give a dict or the path of "
            "a Python file"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain dicts and lists, at every depth."""
        return {name: _unwrap(value) for name, value in self._settings.items()}

    def __getattr__(self, name: str) -> Any:
        # Called only for names without a normal attribute; for "_settings" while an object is being copied.
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self._settings[name]
        except KeyError:
            known = ", ".join(self._settings) or "nothing"
            raise AttributeError(f"config has no setting {name!r}; it has: {known}") from None

    def __getitem__(self, name: str) -> Any:
        return self._settings[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._settings)

    def __len__(self) -> int:
        return len(self._settings)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._settings]

    def __repr__(self) -> str:
        return f"Config({self.to_dict()!r})"


def _wrap(value: Any) -> Any:
    if isinstance(value, Config):
        return value
    if isinstance(value, dict) and all(isinstance(name, str) for name in value):
        return Config(value)
    if type(value) in (list, tuple):
        return type(value)(_wrap(item) for item in value)
    return value


def _unwrap(value: Any) -> Any:
    if isinstance(value, Config):
        return value.to_dict()
    if type(value) in (list, tuple):
        return type(value)(_unwrap(item) for item in value)
    return value


def _checked_path(path: Path) -> Path:
    if path.is_dir():
        raise ConfigError(f"config={str(path)!r} is a directory, not settings: give the path of a Python file in it")
    if path.suffix != ".py":
        raise ConfigError(
            f"config={str(path)!r} does not end in .py, and only Python files are read: rename it, or pass a dict"
        )
    if not path.is_file():
        raise ConfigError(f"config={str(path)!r} does not exist, relative to {Path.cwd()}: correct the path")
    return path


def _run_file(path: Path) -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": "booster_config", "__file__": str(path)}
    try:
        exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), namespace)  # noqa: S102 - the user's own
    except Exception as error:
        raise ConfigError(
            f"config={str(path)!r} failed with {type(error).__name__}: {error}; correct the file: it runs like a "
            "script, and can import installed packages only"
        ) from error
    return namespace


def _is_import(value: Any) -> bool:
    if isinstance(value, types.ModuleType):
        return True
    if not (inspect.isroutine(value) or inspect.isclass(value)):
        return isinstance(value, __future__._Feature)  # left by `from __future__ import ...`
    return getattr(value, "__module__", None) != "booster_config"
