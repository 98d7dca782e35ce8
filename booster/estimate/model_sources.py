"""Where the model comes from that is asked about: a known name, a config of transformers, or a function of the user."""

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
from booster.estimate.question import loss_of
from booster.tensor_tree import map_tensors

__all__ = ["ModelSource", "checkpoint_layers", "load_model"]

# By which task a config without `architectures` is read: the first that transformers has a model for.
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
    """A model without memory, and what to train it with.

    Attributes:
        name: Of the preset, of the file and class, or of the function.
        model: On the meta device.
        batch: Of one rank.
        batch_text: What it is, in words; empty where the user gave it.
        criterion: Returns the loss of (outputs, batch).
        notes: What the user should know.
    """

    name: str
    model: nn.Module
    batch: Any
    batch_text: str = ""
    criterion: _Criterion = loss_of
    notes: list[str] = field(default_factory=list)


def load_model(
    text: str, *, batch: int | None = None, sequence: int | None = None, dtype: torch.dtype = torch.float32
) -> ModelSource:
    """Return the model that a text names, made on the meta device.

    Args:
        text: One of `PRESETS`, the path of a transformers config, or `script.py:function`.
        batch: Examples of a batch; None: one, or what the function gives.
        sequence: Tokens of an example; None: as many as usual, or what the function gives.
        dtype: Of the weights.

    Raises:
        ConfigError: There is no such model, or what its batches are isn't known.
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
            f"--model {text} is neither a known model nor a file{f' seen from {Path.cwd()}' if '.' in text else ''}."
            f"{hint} Known: {', '.join(PRESETS)}; or give the path of a transformers config.json, or"
            " script.py:build_model"
        )
    return _from_config(str(path), _read_config(path), batch, sequence, dtype)


def checkpoint_layers(source: ModelSource) -> None:
    """Let a model of transformers compute its layers again in backward instead of keeping their activations.

    Raises:
        ConfigError: It is no such model, or can't.
    """
    enable = getattr(source.model, "gradient_checkpointing_enable", None)
    if enable is None or not getattr(source.model, "supports_gradient_checkpointing", False):
        raise ConfigError(
            f"--gradient-checkpointing with {source.name}, whose layers transformers can't checkpoint: leave it out,"
            " and let script.py:build_model use torch.utils.checkpoint, or for hybrid_parallel give --settings"
            " gradient_checkpoint_config=True"
        )
    enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    source.notes.append("layers are computed again in backward")


def _read_config(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model {path} can't be read as JSON ({error}): give a transformers config.json") from error
    if not isinstance(found, dict) or not isinstance(found.get("model_type"), str):
        raise ConfigError(
            f"--model {path} has no entry model_type, by which transformers knows what it describes: give the"
            " config.json of a model of transformers, or script.py:build_model"
        )
    if "quantization_config" in found:
        raise ConfigError(
            f"--model {path} describes quantized weights (quantization_config), which are not trained as they are: take"
            " that entry out to ask about training the weights in full"
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
    except Exception as error:  # transformers checks entries with many kinds of errors, its own among them
        raise ConfigError(
            f"--model {name}: transformers {transformers.__version__} makes no config of it ({_brief(error)}): correct"
            " it, install another transformers, or give script.py:build_model"
        ) from error
    with _on_meta(dtype):
        model = _made(transformers, name, config, architecture)
    example = example_batch(model, batch=1 if batch is None else batch, sequence=sequence)
    title = name if name in PRESETS else f"{type(model).__name__} of {name}"
    if example.has_labels:
        return ModelSource(name=title, model=model, batch=example.inputs, batch_text=example.text)
    note = f"{type(model).__name__} gives no loss: the mean of its first output stands for one"
    return ModelSource(
        name=title,
        model=model,
        batch=example.inputs,
        batch_text=example.text,
        criterion=_mean_of_first,
        notes=[note],
    )


def _made(transformers: Any, name: str, config: Any, architecture: str | None) -> nn.Module:
    cls = getattr(transformers, architecture, None) if isinstance(architecture, str) else None
    if architecture is not None and cls is None:
        raise ConfigError(
            f"--model {name}: transformers {transformers.__version__} has no {architecture} (entry architectures):"
            " install one that has it, take the entry out for the usual class, or give script.py:build_model"
        )
    try:
        if cls is None:
            mappings = (getattr(transformers, task)._model_mapping for task in _TASKS)
            cls = next((one[type(config)] for one in mappings if type(config) in one), None)
        made: nn.Module | None = None if cls is None else cls(config)
    except Exception as error:  # whatever the model's code raises at sizes that don't go together
        raise ConfigError(
            f"--model {name}: {architecture or type(config).__name__} can't be made of its config ({_brief(error)}):"
            " correct the entries"
        ) from error
    if made is not None:
        return made
    raise ConfigError(
        f"--model {name}: transformers has no model for {type(config).__name__} that is known to train: name the class"
        " in the entry architectures, or give script.py:build_model"
    )


def _from_function(text: str, batch: int | None, sequence: int | None, dtype: torch.dtype) -> ModelSource:
    file, _, function = text.rpartition(":") if ".py:" in text else (text, "", "")
    path = Path(file)
    if not path.is_file():
        raise ConfigError(f"--model {text}: there is no file {path}, seen from {Path.cwd()}: correct the path")
    if not function:
        raise ConfigError(f"--model {text} names no function of the script: write {text}:build_model")
    build = _function_of(path, function)
    try:
        with _on_meta(dtype):
            built = build()
    except BoosterError:
        raise
    except Exception as error:
        raise ConfigError(
            f"--model {text}: {function}() failed with {_brief(error)}; it runs under torch.device('meta'), where"
            " tensors have no values: make those whose values are looked at with device='cpu'"
        ) from error
    parts = built if isinstance(built, tuple) else (built,)
    if not isinstance(parts[0] if parts else None, nn.Module) or len(parts) > 3:
        raise ConfigError(
            f"--model {text}: {function}() returned {_described(built)}: return the model, (model, batch) or (model,"
            " batch, criterion)"
        )
    return _of_parts(text, parts, batch, sequence)


def _of_parts(text: str, parts: tuple[Any, ...], batch: int | None, sequence: int | None) -> ModelSource:
    model = parts[0]
    if len(parts) == 1:
        example = example_batch(model, batch=1 if batch is None else batch, sequence=sequence)
        if not example.has_labels:
            raise ConfigError(
                f"--model {text}: {type(model).__name__} makes no loss of a batch of its own: return (model, batch,"
                " criterion), where criterion(outputs, batch) returns the loss"
            )
        return ModelSource(name=text, model=model, batch=example.inputs, batch_text=example.text)
    if batch is not None or sequence is not None:
        raise ConfigError(
            f"--model {text} gives a batch of its own, and --batch or --seq was given too: leave them out, or let the"
            " function return the model alone"
        )
    found: list[torch.Tensor] = []
    map_tensors(lambda tensor: found.append(tensor), parts[1])
    if not found:
        raise ConfigError(
            f"--model {text} gave {_described(parts[1])} as a batch, which has no tensor in it: give what the model's"
            " forward takes: a tensor, a tuple, or a dict by name"
        )
    if len(parts) == 2:
        return ModelSource(name=text, model=model, batch=parts[1])
    if not callable(parts[2]):
        raise ConfigError(
            f"--model {text} gave {_described(parts[2])} as a criterion: give a function of (outputs, batch) that"
            " returns the loss"
        )
    return ModelSource(name=text, model=model, batch=parts[1], criterion=parts[2])


def _function_of(path: Path, name: str) -> Callable[[], Any]:
    spec = importlib.util.spec_from_file_location("booster_estimated_script", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"--model {path} is no Python file: give script.py:build_model")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.absolute().parent))  # it imports its neighbours, as when it is run
    sys.modules[spec.name] = module  # dataclasses look there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever a script does
        raise ConfigError(
            f"--model {path}: the script failed when it was imported, with {_brief(error)}: put what trains below"
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


def _described(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(type(one).__name__ for one in value)})"
    return "None" if value is None else f"a {type(value).__name__}"


def _brief(error: BaseException) -> str:
    return f"{type(error).__name__}: {shorten(str(error), 300, placeholder=' ...')}"
