"""Loading of the model to estimate: from a preset, a transformers config, or a function of a script."""

from __future__ import annotations

import copy
import difflib
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from torch import nn

from booster.errors import BoosterError, ConfigError
from booster.pytree import iter_tensors

from .estimate import default_criterion

_Config = dict[str, Any]


def _config(kind: tuple[str, str], width: int, layers: int, heads: int, **others: Any) -> _Config:
    return {
        "model_type": kind[0],
        "architectures": [kind[1]],
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        **others,
    }


def _decoder(
    kind: tuple[str, str], width: int, inner: int, layers: int, heads: int, vocabulary: int, **others: Any
) -> _Config:
    sizes = {"intermediate_size": inner, "num_key_value_heads": heads, "vocab_size": vocabulary}
    defaults = {"max_position_embeddings": 4096, "tie_word_embeddings": False}
    return _config(kind, width, layers, heads, **(sizes | defaults | others))


def _encoder(kind: tuple[str, str], width: int, layers: int, heads: int, **others: Any) -> _Config:
    return _config(kind, width, layers, heads, intermediate_size=4 * width, **others)


def _gpt2(width: int, layers: int, heads: int, positions: int = 1024) -> _Config:
    sizes = {"n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": positions}
    return {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **sizes}


def _opt(width: int, layers: int, heads: int, **others: Any) -> _Config:
    sizes = {"word_embed_proj_dim": width, "ffn_dim": 4 * width}
    return _config(("opt", "OPTForCausalLM"), width, layers, heads, **(sizes | others))


def _t5(width: int, inner: int, layers: int, heads: int, head_width: int = 64) -> _Config:
    sizes = {"d_model": width, "d_ff": inner, "num_layers": layers, "num_heads": heads, "d_kv": head_width}
    starts = {"decoder_start_token_id": 0}
    return {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], **sizes, **starts}


def _whisper(width: int, layers: int, heads: int, **others: Any) -> _Config:
    sides = {
        f"{side}_{name}": size
        for side in ("encoder", "decoder")
        for name, size in (("layers", layers), ("attention_heads", heads), ("ffn_dim", 4 * width))
    }
    return {
        "model_type": "whisper",
        "architectures": ["WhisperForConditionalGeneration"],
        "d_model": width,
        "vocab_size": 51865,
        **sides,
        **others,
    }


_LLAMA = ("llama", "LlamaForCausalLM")
_LLAMA_3 = {"num_key_value_heads": 8, "max_position_embeddings": 8192}
_LLAMA_32 = {"num_key_value_heads": 8, "max_position_embeddings": 131072, "tie_word_embeddings": True}
_MIXTRAL = ("mixtral", "MixtralForCausalLM")
_QWEN2 = ("qwen2", "Qwen2ForCausalLM")
_QWEN3 = ("qwen3", "Qwen3ForCausalLM")
_QWEN3_MOE = ("qwen3_moe", "Qwen3MoeForCausalLM")
_GEMMA = ("gemma", "GemmaForCausalLM")
_GEMMA_ALL = {"head_dim": 256, "tie_word_embeddings": True, "max_position_embeddings": 8192}
_LONG = {"max_position_embeddings": 32768}
_MORE_HEADS = {"head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 40960}
_EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
_QWEN3_EXPERTS = {**_MORE_HEADS, **_EXPERTS, "num_key_value_heads": 4}

PRESETS: dict[str, _Config] = {
    "llama-7b": _decoder(_LLAMA, 4096, 11008, 32, 32, 32000, max_position_embeddings=2048),
    "llama-13b": _decoder(_LLAMA, 5120, 13824, 40, 40, 32000, max_position_embeddings=2048),
    "llama-30b": _decoder(_LLAMA, 6656, 17920, 60, 52, 32000, max_position_embeddings=2048),
    "llama-65b": _decoder(_LLAMA, 8192, 22016, 80, 64, 32000, max_position_embeddings=2048),
    "llama-2-7b": _decoder(_LLAMA, 4096, 11008, 32, 32, 32000),
    "llama-2-13b": _decoder(_LLAMA, 5120, 13824, 40, 40, 32000),
    "llama-2-70b": _decoder(_LLAMA, 8192, 28672, 80, 64, 32000, num_key_value_heads=8),
    "llama-3-8b": _decoder(_LLAMA, 4096, 14336, 32, 32, 128256, **_LLAMA_3),
    "llama-3-70b": _decoder(_LLAMA, 8192, 28672, 80, 64, 128256, **_LLAMA_3),
    "llama-3-405b": _decoder(
        _LLAMA, 16384, 53248, 126, 128, 128256, num_key_value_heads=8, max_position_embeddings=131072
    ),
    "llama-3.2-1b": _decoder(_LLAMA, 2048, 8192, 16, 32, 128256, **_LLAMA_32),
    "llama-3.2-3b": _decoder(_LLAMA, 3072, 8192, 28, 24, 128256, **_LLAMA_32),
    "mistral-7b": _decoder(
        ("mistral", "MistralForCausalLM"), 4096, 14336, 32, 32, 32000, num_key_value_heads=8, **_LONG
    ),
    "mixtral-8x7b": _decoder(_MIXTRAL, 4096, 14336, 32, 32, 32000, num_key_value_heads=8, **_LONG),
    "mixtral-8x22b": _decoder(
        _MIXTRAL, 6144, 16384, 56, 48, 32768, num_key_value_heads=8, max_position_embeddings=65536
    ),
    "qwen2.5-0.5b": _decoder(
        _QWEN2, 896, 4864, 24, 14, 151936, num_key_value_heads=2, tie_word_embeddings=True, **_LONG
    ),
    "qwen2.5-1.5b": _decoder(
        _QWEN2, 1536, 8960, 28, 12, 151936, num_key_value_heads=2, tie_word_embeddings=True, **_LONG
    ),
    "qwen2.5-7b": _decoder(_QWEN2, 3584, 18944, 28, 28, 152064, num_key_value_heads=4, **_LONG),
    "qwen2.5-14b": _decoder(_QWEN2, 5120, 13824, 48, 40, 152064, num_key_value_heads=8, **_LONG),
    "qwen2.5-32b": _decoder(_QWEN2, 5120, 27648, 64, 40, 152064, num_key_value_heads=8, **_LONG),
    "qwen2.5-72b": _decoder(_QWEN2, 8192, 29568, 80, 64, 152064, num_key_value_heads=8, **_LONG),
    "qwen3-8b": _decoder(_QWEN3, 4096, 12288, 36, 32, 151936, **_MORE_HEADS),
    "qwen3-14b": _decoder(_QWEN3, 5120, 17408, 40, 40, 151936, **_MORE_HEADS),
    "qwen3-32b": _decoder(_QWEN3, 5120, 25600, 64, 64, 151936, **_MORE_HEADS),
    "qwen3-30b-a3b": _decoder(_QWEN3_MOE, 2048, 6144, 48, 32, 151936, **_QWEN3_EXPERTS),
    "gemma-2b": _decoder(_GEMMA, 2048, 16384, 18, 8, 256000, num_key_value_heads=1, **_GEMMA_ALL),
    "gemma-7b": _decoder(_GEMMA, 3072, 24576, 28, 16, 256000, **_GEMMA_ALL),
    "gpt2": _gpt2(768, 12, 12),
    "gpt2-medium": _gpt2(1024, 24, 16),
    "gpt2-large": _gpt2(1280, 36, 20),
    "gpt2-xl": _gpt2(1600, 48, 25),
    "gpt3-175b": _gpt2(12288, 96, 96, positions=2048),
    "gpt-neox-20b": _encoder(("gpt_neox", "GPTNeoXForCausalLM"), 6144, 44, 64, vocab_size=50432),
    "opt-125m": _opt(768, 12, 12),
    "opt-350m": _opt(1024, 24, 16, word_embed_proj_dim=512, do_layer_norm_before=False),
    "opt-1.3b": _opt(2048, 24, 32),
    "opt-2.7b": _opt(2560, 32, 32),
    "opt-6.7b": _opt(4096, 32, 32),
    "opt-13b": _opt(5120, 40, 40),
    "opt-30b": _opt(7168, 48, 56),
    "opt-66b": _opt(9216, 64, 72),
    "opt-175b": _opt(12288, 96, 96),
    "bloom-176b": {
        "model_type": "bloom",
        "architectures": ["BloomForCausalLM"],
        "hidden_size": 14336,
        "n_layer": 70,
        "n_head": 112,
        "vocab_size": 250880,
    },
    "bert-base": _encoder(("bert", "BertForMaskedLM"), 768, 12, 12),
    "bert-large": _encoder(("bert", "BertForMaskedLM"), 1024, 24, 16),
    "t5-small": _t5(512, 2048, 6, 8),
    "t5-base": _t5(768, 3072, 12, 12),
    "t5-large": _t5(1024, 4096, 24, 16),
    "t5-3b": _t5(1024, 16384, 24, 32, head_width=128),
    "t5-11b": _t5(1024, 65536, 24, 128, head_width=128),
    "vit-base": _encoder(("vit", "ViTForImageClassification"), 768, 12, 12, num_labels=1000),
    "vit-large": _encoder(("vit", "ViTForImageClassification"), 1024, 24, 16, num_labels=1000),
    "vit-huge": _encoder(("vit", "ViTForImageClassification"), 1280, 32, 16, num_labels=1000, patch_size=14),
    "whisper-small": _whisper(768, 12, 12),
    "whisper-large": _whisper(1280, 32, 20, num_mel_bins=128, vocab_size=51866),
}


DEFAULT_SEQUENCE = 2048

# Config entries for the maximum number of positions.
_POSITIONS = ("max_position_embeddings", "n_positions", "max_target_positions")
# Suffixes of classes with one label per example.
_SINGLE_LABEL = (
    "ForSequenceClassification",
    "ForImageClassification",
    "ForAudioClassification",
    "ForVideoClassification",
)
_ADVICE = "give --model script.py:build_model with a function that returns (model, batch)"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleBatch:
    """Keyword arguments of a model's forward on the meta device, described in words, and whether it returns a loss."""

    inputs: dict[str, torch.Tensor | bool]
    text: str
    has_labels: bool


def example_batch(model: nn.Module, *, batch: int = 1, sequence: int | None = None) -> ExampleBatch:
    """Return a batch of text, images or audio for a transformers model, with labels if the model accepts them.

    Without a sequence length, texts have 2048 tokens, or the model's maximum.

    Raises:
        ConfigError: The inputs of the model are unknown, or the sequence exceeds its positions.
    """
    parameter_names = set(inspect.signature(model.forward).parameters)
    main = getattr(model, "main_input_name", None)
    if main == "pixel_values" and "input_ids" in parameter_names:  # pairs of images and texts
        main = "input_ids"
    make = _INPUTS.get(main if isinstance(main, str) else "")
    config = getattr(model, "config", None)
    if make is None or config is None or main not in parameter_names:
        what = f"takes {', '.join(parameter_names)}" if main is None or config is None else f"takes {main} above all"
        raise ConfigError(
            f"no example batch for {type(model).__name__}: its forward {what}, but supported are transformers models"
            f" that take {', '.join(_INPUTS)}: {_ADVICE}"
        )
    length = _length(config, type(model).__name__, sequence)
    inputs, text = make(config, batch, length)
    if "pixel_values" in parameter_names and "pixel_values" not in inputs:
        images, more = _images(getattr(config, "vision_config", config), batch, length)
        inputs, text = {**inputs, **images}, f"{text} with {more}"
    labels = _labels(type(model).__name__, parameter_names, batch, length)
    return ExampleBatch(inputs={**inputs, **labels}, text=text, has_labels=bool(labels))


def _images(config: Any, batch: int, length: int) -> tuple[dict[str, Any], str]:
    size = getattr(config, "image_size", None)
    if size is None:
        raise ConfigError(f"the config ({type(config).__name__}) has no image_size: {_ADVICE}")
    height, width = (size, size) if isinstance(size, int) else tuple(size)
    shape = (batch, getattr(config, "num_channels", 3), height, width)
    return {"pixel_values": torch.empty(shape, device="meta")}, f"{batch} x {height} x {width} pixels"


def _audio(config: Any, batch: int, length: int) -> tuple[dict[str, Any], str]:
    frames = 2 * getattr(config, "max_source_positions", 1500)
    bands = getattr(config, "num_mel_bins", 80)
    features = torch.empty((batch, bands, frames), device="meta")
    return {"input_features": features}, f"{batch} x {frames} frames of audio and {length} tokens"


_INPUTS: dict[str, Callable[[Any, int, int], tuple[dict[str, Any], str]]] = {
    "input_ids": lambda _, batch, length: ({"input_ids": _token_ids(batch, length)}, f"{batch} x {length} tokens"),
    "pixel_values": _images,
    "input_features": _audio,
}


def _labels(name: str, parameter_names: set[str], batch: int, length: int) -> dict[str, Any]:
    if {"start_positions", "end_positions"} <= parameter_names:
        return {"start_positions": _token_ids(batch), "end_positions": _token_ids(batch)}
    if "return_loss" in parameter_names and "labels" not in parameter_names:  # contrastive loss of images and texts
        return {"return_loss": True}
    if "labels" not in parameter_names:
        return {}
    if name.endswith("ForMultipleChoice"):
        raise ConfigError(f"the number of choices of {name} is unknown: {_ADVICE}")
    if name.endswith((*_SINGLE_LABEL, "ForNextSentencePrediction")):
        return {"labels": _token_ids(batch)}
    others = {"next_sentence_label", "sentence_order_label"} & parameter_names
    return {"labels": _token_ids(batch, length), **{one: _token_ids(batch) for one in sorted(others)}}


def _length(config: Any, name: str, sequence: int | None) -> int:
    text_config = getattr(config, "text_config", config)
    max_positions = next(
        (getattr(text_config, one) for one in _POSITIONS if isinstance(getattr(text_config, one, None), int)), None
    )
    if max_positions is not None and max_positions < 1:  # XLNet: no limit
        max_positions = None
    elif getattr(config, "model_type", "") in ("roberta", "xlm-roberta", "camembert") and max_positions is not None:
        max_positions -= 2  # positions start after the padding index
    if sequence is None:
        return DEFAULT_SEQUENCE if max_positions is None else min(DEFAULT_SEQUENCE, max_positions)
    if max_positions is not None and sequence > max_positions:
        raise ConfigError(
            f"--seq {sequence} exceeds the {max_positions} positions of {name}: give at most {max_positions}"
        )
    return sequence


def _token_ids(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.long, device="meta")


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
    """Create a model on the meta device: one of `PRESETS`, of a transformers config's path, or of `script.py:function`.

    Without a batch size or a sequence length the batch is that of the function, or of `example_batch`.

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
            f"--model {name}: transformers {transformers.__version__} rejects this config ({_format_error(error)}):"
            " correct it, install another transformers, or give script.py:build_model"
        ) from error
    with _on_meta(dtype):
        model = _make_model(transformers, name, config, architecture)
    example = example_batch(model, batch=1 if batch is None else batch, sequence=sequence)
    title = name if name in PRESETS else f"{type(model).__name__} of {name}"
    source = ModelSource(name=title, model=model, batch=example.inputs, batch_text=example.text)
    if example.has_labels:
        return source
    note = f"{type(model).__name__} returns no loss: the mean of its first output is used instead"
    return replace(source, criterion=mean_of_first_output, notes=[note])


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
            f"--model {text}: {function}() failed with {_format_error(error)}; it runs under torch.device('meta'),"
            " where tensors have no values: create those whose values are read with device='cpu'"
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
    if next(iter_tensors(parts[1]), None) is None:
        raise ConfigError(
            f"--model {text} returned {_format_type(parts[1])} as a batch, which has no tensor: return the inputs of"
            " the model's forward: a tensor, a tuple, or a dict by name"
        )
    if len(parts) == 2:
        return ModelSource(name=text, model=model, batch=parts[1])
    if not callable(parts[2]):
        raise ConfigError(
            f"--model {text} returned {_format_type(parts[2])} as a criterion: return a function of (outputs, batch)"
            " that returns the loss"
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


def mean_of_first_output(outputs: Any, batch: Any) -> torch.Tensor:
    """Return the mean of a model's first output, in place of a loss."""
    first = next(iter(outputs.values())) if isinstance(outputs, Mapping) else outputs
    return next(iter_tensors(first)).float().mean()


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
