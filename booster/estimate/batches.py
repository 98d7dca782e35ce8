"""Example batches for transformers models: shapes and dtypes of their inputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from booster.errors import ConfigError

__all__ = ["DEFAULT_SEQUENCE", "ExampleBatch", "example_batch"]

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
    """Batch on the meta device.

    Attributes:
        inputs: Keyword arguments of the model's forward.
        text: Description of the batch.
        has_labels: Whether the model returns a loss for it.
    """

    inputs: dict[str, torch.Tensor | bool]
    text: str
    has_labels: bool


def example_batch(model: nn.Module, *, batch: int = 1, sequence: int | None = None) -> ExampleBatch:
    """Return a batch of text, images or audio, with labels if the model accepts them.

    Args:
        model: transformers model.
        batch: Batch size.
        sequence: Sequence length, for text; optional, defaults to 2048 or the model's maximum.

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


def _texts(config: Any, batch: int, length: int) -> tuple[dict[str, Any], str]:
    return {"input_ids": _token_ids(batch, length)}, f"{batch} x {length} tokens"


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
    "input_ids": _texts,
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
