"""Loading of the model to estimate: from a preset, a transformers config, or a function of a script."""

from __future__ import annotations

import copy
import difflib
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from torch import nn

from booster.errors import BoosterError, ConfigError
from booster.estimate.batches import example_batch
from booster.estimate.presets import PRESETS
from booster.estimate.question import default_criterion
from booster.tensor_tree import map_tensors

__all__ = ["ModelSource", "enable_gradient_checkpointing", "load_model"]

# Auto classes for a config without `architectures`: the first that has a model for it is used.
_TASKS = (
    "AutoModelForCausalLM",
    "AutoModelForSeq2SeqLM",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForMaskedLM",
    "AutoModelForImageClassification",
    "AutoModel",
)
_Criterion = Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """Model on the meta device, with a batch and criterion.

    Attributes:
        name: Preset, class and config file, or function.
        model: Model on the meta device.
        batch: Batch of one rank.
        batch_text: Description of the batch; empty if the user provided it.
        criterion: Function of (outputs, batch) that returns the loss.
        notes: Notes for the user.
    """

    name: str
    model: nn.Module
    batch: Any
    batch_text: str = ""
    criterion: _Criterion = default_criterion
    notes: list[str] = field(default_factory=list)


def load_model(
    text: str, *, batch: int | None = None, sequence: int | None = None, dtype: torch.dtype = torch.float32
) -> ModelSource:
    """Create a model on the meta device.

    Args:
        text: One of `PRESETS`, the path of a transformers config, or `script.py:function`.
        batch: Batch size; optional, defaults to 1 or the function's batch.
        sequence: Sequence length; optional, defaults to that of `example_batch` or the function's batch.
        dtype: dtype of the weights.

    Raises:
        ConfigError: The model is unknown or invalid, or it has no example batch.
    """
    if ".py:" in text or text.endswith(".py"):
        return _from_function(text, batch, sequence, dtype)
    if text.lower() in PRESETS and not Path(text).exists():
        return _from_config(text.lower(), copy.deepcopy(PRESETS[text.lower()]), batch, sequence, dtype)
    path = Path(text) / "config.json" if Path(text).is_dir() else Path(text)
    if not path.is_file():
        near = difflib.get_close_matches(text.lower(), PRESETS, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ConfigError(
            f"--model {text} is not a known model or a file{f' relative to {Path.cwd()}' if '.' in text else ''}."
            f"{hint} Known: {', '.join(PRESETS)}; or give the path of a transformers config.json, or"
            " script.py:build_model"
        )
    return _from_config(str(path), _read_config(path), batch, sequence, dtype)


def enable_gradient_checkpointing(source: ModelSource) -> None:
    """Enable gradient checkpointing of a transformers model.

    Raises:
        ConfigError: The model does not support it.
    """
    enable = getattr(source.model, "gradient_checkpointing_enable", None)
    if enable is None or not getattr(source.model, "supports_gradient_checkpointing", False):
        raise ConfigError(
            f"--gradient-checkpointing is not supported by {source.name} in transformers: omit it, and use"
            " torch.utils.checkpoint in script.py:build_model, or for hybrid_parallel give --settings"
            " gradient_checkpoint_config=True"
        )
    enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    source.notes.append("layers are recomputed in backward")


def _read_config(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model {path} can't be read as JSON ({error}): give a transformers config.json") from error
    if not isinstance(found, dict) or not isinstance(found.get("model_type"), str):
        raise ConfigError(
            f"--model {path} has no entry model_type, which transformers requires: give the config.json of a"
            " transformers model, or script.py:build_model"
        )
    if "quantization_config" in found:
        raise ConfigError(
            f"--model {path} has quantized weights (quantization_config), which can't be trained: remove that entry to"
            " estimate training of the unquantized weights"
        )
    return found


def _from_config(
    name: str, entries: dict[str, Any], batch: int | None, sequence: int | None, dtype: torch.dtype
) -> ModelSource:
    transformers = _transformers(name)
    architecture = (entries.pop("architectures", None) or [None])[0]
    for unused in ("auto_map", "torch_dtype", "dtype", "transformers_version"):
        entries.pop(unused, None)
    try:
        config = transformers.AutoConfig.for_model(**entries)
    except Exception as error:  # transformers validates entries with many types of errors, its own among them
        raise ConfigError(
            f"--model {name}: transformers {transformers.__version__} rejects this config ({_format_error(error)}): correct"
            " it, install another transformers, or give script.py:build_model"
        ) from error
    with _on_meta(dtype):
        model = _make_model(transformers, name, config, architecture)
    example = example_batch(model, batch=1 if batch is None else batch, sequence=sequence)
    title = name if name in PRESETS else f"{type(model).__name__} of {name}"
    if example.has_labels:
        return ModelSource(name=title, model=model, batch=example.inputs, batch_text=example.text)
    note = f"{type(model).__name__} returns no loss: the mean of its first output is used instead"
    return ModelSource(
        name=title,
        model=model,
        batch=example.inputs,
        batch_text=example.text,
        criterion=_mean_of_first,
        notes=[note],
    )


def _make_model(transformers: Any, name: str, config: Any, architecture: str | None) -> nn.Module:
    cls = getattr(transformers, architecture, None) if isinstance(architecture, str) else None
    if architecture is not None and cls is None:
        raise ConfigError(
            f"--model {name}: transformers {transformers.__version__} has no {architecture} (entry architectures):"
            " install one that has it, remove the entry for the default class, or give script.py:build_model"
        )
    try:
        if cls is None:
            mappings = (getattr(transformers, task)._model_mapping for task in _TASKS)
            cls = next((one[type(config)] for one in mappings if type(config) in one), None)
        made: nn.Module | None = None if cls is None else cls(config)
    except Exception as error:  # any error that the model's code raises for inconsistent sizes
        raise ConfigError(
            f"--model {name}: {architecture or type(config).__name__} can't be created from its config"
            f" ({_format_error(error)}): correct the entries"
        ) from error
    if made is not None:
        return made
    raise ConfigError(
        f"--model {name}: transformers has no default model for training {type(config).__name__}: give the class in the"
        " entry architectures, or give script.py:build_model"
    )


def _from_function(text: str, batch: int | None, sequence: int | None, dtype: torch.dtype) -> ModelSource:
    file, _, function = text.rpartition(":") if ".py:" in text else (text, "", "")
    path = Path(file)
    if not path.is_file():
        raise ConfigError(f"--model {text}: there is no file {path}, relative to {Path.cwd()}: correct the path")
    if not function:
        raise ConfigError(f"--model {text} has no function of the script: write {text}:build_model")
    build = _load_function(path, function)
    try:
        with _on_meta(dtype):
            built = build()
    except BoosterError:
        raise
    except Exception as error:
        raise ConfigError(
            f"--model {text}: {function}() failed with {_format_error(error)}; it runs under torch.device('meta'), where"
            " tensors have no values: create those whose values are read with device='cpu'"
        ) from error
    parts = built if isinstance(built, tuple) else (built,)
    if not isinstance(parts[0] if parts else None, nn.Module) or len(parts) > 3:
        raise ConfigError(
            f"--model {text}: {function}() returned {_format_type(built)}: return the model, (model, batch) or (model,"
            " batch, criterion)"
        )
    return _from_parts(text, parts, batch, sequence)


def _from_parts(text: str, parts: tuple[Any, ...], batch: int | None, sequence: int | None) -> ModelSource:
    model = parts[0]
    if len(parts) == 1:
        example = example_batch(model, batch=1 if batch is None else batch, sequence=sequence)
        if not example.has_labels:
            raise ConfigError(
                f"--model {text}: {type(model).__name__} returns no loss: return (model, batch, criterion), where"
                " criterion(outputs, batch) returns the loss"
            )
        return ModelSource(name=text, model=model, batch=example.inputs, batch_text=example.text)
    if batch is not None or sequence is not None:
        raise ConfigError(
            f"--model {text} returns its own batch, but --batch or --seq was given too: omit them, or return the model"
            " alone"
        )
    found: list[torch.Tensor] = []
    map_tensors(lambda tensor: found.append(tensor), parts[1])
    if not found:
        raise ConfigError(
            f"--model {text} returned {_format_type(parts[1])} as a batch, which has no tensor: return the inputs of the"
            " model's forward: a tensor, a tuple, or a dict by name"
        )
    if len(parts) == 2:
        return ModelSource(name=text, model=model, batch=parts[1])
    if not callable(parts[2]):
        raise ConfigError(
            f"--model {text} returned {_format_type(parts[2])} as a criterion: return a function of (outputs, batch) that"
            " returns the loss"
        )
    return ModelSource(name=text, model=model, batch=parts[1], criterion=parts[2])


def _load_function(path: Path, name: str) -> Callable[[], Any]:
    spec = importlib.util.spec_from_file_location("booster_estimated_script", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"--model {path} is not a Python file: give script.py:build_model")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.absolute().parent))  # for imports of its neighbours, as when it is run
    sys.modules[spec.name] = module  # required by dataclasses
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # any error of the script
        raise ConfigError(
            f"--model {path}: importing the script failed with {_format_error(error)}: put the training code below"
            ' if __name__ == "__main__":'
        ) from error
    build = getattr(module, name, None)
    if not callable(build):
        names = [one for one, value in vars(module).items() if callable(value) and not one.startswith("_")]
        own = [one for one in names if getattr(getattr(module, one), "__module__", None) == module.__name__]
        raise ConfigError(
            f"--model {path}:{name}: the script has no function {name}; it has {', '.join(own) or 'none'}: correct the"
            " name"
        )
    return build  # type: ignore[no-any-return]


@contextmanager
def _on_meta(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(before)


def _mean_of_first(outputs: Any, batch: Any) -> torch.Tensor:
    found: list[torch.Tensor] = []
    first = next(iter(outputs.values())) if isinstance(outputs, Mapping) else outputs
    map_tensors(lambda tensor: found.append(tensor), first)
    return found[0].float().mean()


def _transformers(name: str) -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            f"--model {name} needs transformers, which is not installed: pip install 'torch-booster[hf]', or give"
            " script.py:build_model"
        ) from error
    transformers.logging.set_verbosity_error()
    return transformers


def _format_type(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(type(one).__name__ for one in value)})"
    return "None" if value is None else f"a {type(value).__name__}"


def _format_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {shorten(str(error), 300, placeholder=' ...')}"
