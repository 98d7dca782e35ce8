"""Low-rank adapters of peft: added to a model before `boost`, and saved in peft's format from any plugin.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022 (arXiv:2106.09685).
"""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from booster.checkpoint_io.layout import ADAPTER
from booster.checkpoint_io.loading.fill import read_slices
from booster.checkpoint_io.loading.reader import open_checkpoint
from booster.checkpoint_io.storage import Storage
from booster.errors import ConfigError
from booster.interface import ModelWrapper, TensorSlice
from booster.interface.checkpoint_io import AdapterFiles
from booster.validation import check_path

CONFIG_FILE = "adapter_config.json"


def add_lora(model: nn.Module, lora_config: Any, pretrained_dir: str | os.PathLike[str] | None) -> nn.Module:
    """Return the model with trainable adapters on this rank; see `Booster.enable_lora`. Not collective."""
    peft = _peft()
    if isinstance(model, ModelWrapper):
        raise ConfigError(
            "enable_lora() got a boosted model: call it before boost(), which then shards the adapters, too"
        )
    if not isinstance(model, nn.Module):
        raise ConfigError(f"enable_lora() got a {type(model).__name__}: give a torch.nn.Module")
    if isinstance(model, peft.PeftModel):
        raise ConfigError(
            "enable_lora() got a model with adapters: boost() takes it as it is; for another adapter write"
            " model.add_adapter('name', lora_config)"
        )
    if (lora_config is None) == (pretrained_dir is None):
        raise ConfigError(
            f"enable_lora() got {'neither' if lora_config is None else 'both'} of lora_config and pretrained_dir: give"
            " lora_config=peft.LoraConfig(...) for a new adapter, or pretrained_dir= of a saved one"
        )
    if pretrained_dir is not None:
        if isinstance(pretrained_dir, peft.PeftConfig):
            raise ConfigError(
                f"enable_lora() got a {type(pretrained_dir).__name__} as pretrained_dir: write lora_config=config"
            )
        check_path("pretrained_dir", pretrained_dir)
        return _load_adapter(peft, model, Path(pretrained_dir))
    if not isinstance(lora_config, peft.PeftConfig):
        raise ConfigError(
            f"lora_config={lora_config!r} is not a configuration of peft: give a peft.LoraConfig(r=8, ...)"
        )
    return _with_adapter(peft, model, lora_config)


@contextmanager
def unchanged_on_failure(model: Any) -> Iterator[None]:
    """Context in which adapters are added: if it raises, the model has its modules and trains what it did before."""
    if not isinstance(model, nn.Module):
        yield
        return
    children = [(module, dict(module._modules)) for module in model.modules()]
    trains = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    attributes = dict(vars(model))
    try:
        yield
    except Exception:
        for module, modules in children:
            module._modules.clear()
            module._modules.update(modules)
        for parameter, flag in trains:
            parameter.requires_grad_(flag)
        for name in vars(model).keys() - attributes.keys():
            delattr(model, name)
        raise


def refuse_quantization(quantize: Any, bnb_quantization_config: Any) -> None:
    """Raise `ConfigError` if a quantized base is asked for, which transformers loads."""
    if not quantize and bnb_quantization_config is None:
        return
    needs = "" if importlib.util.find_spec("bitsandbytes") else "run `pip install bitsandbytes`, which is missing, and "
    raise ConfigError(
        f"enable_lora() does not quantize the base: {needs}load the model by from_pretrained(...,"
        " quantization_config=BitsAndBytesConfig(load_in_4bit=True)), leave quantize and bnb_quantization_config out,"
        " and take TorchFSDPPlugin, LowLevelZeroPlugin or TorchDDPPlugin"
    )


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ConfigError(
            f"LoRA needs peft, which is not installed ({error}): run `pip install torch-booster[lora]`"
        ) from error
    return peft


def _with_adapter(peft: Any, model: nn.Module, config: Any) -> nn.Module:
    try:
        adapted: nn.Module = peft.get_peft_model(model, config)
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"peft can't add an adapter to {type(model).__name__} ({error}): give target_modules that end names of"
            " model.named_modules(), such as ['q_proj', 'v_proj'], or 'all-linear'"
        ) from error
    return adapted


def _load_adapter(peft: Any, model: nn.Module, directory: Path) -> nn.Module:
    if not (directory / CONFIG_FILE).is_file():
        raise ConfigError(
            f"pretrained_dir={str(directory)!r} has no {CONFIG_FILE}: give a directory that save_lora_as_pretrained()"
            " or peft's save_pretrained() wrote; download one from the hub before"
        )
    try:
        config = peft.PeftConfig.from_pretrained(str(directory))
        if config.peft_type is None:
            raise KeyError("peft_type")
    except (KeyError, TypeError, ValueError) as error:  # ValueError: no JSON
        raise ConfigError(
            f"{directory / CONFIG_FILE} is not a configuration of peft ({type(error).__name__}: {error}): take another"
            " copy of the adapter"
        ) from error
    config.inference_mode = False
    stored = _stored_tensors(directory)
    adapted = _with_adapter(peft, model, config)
    expected = peft.get_peft_model_state_dict(adapted)
    wrong = next((name for name in {**expected, **stored} if _shape(expected, name) != _shape(stored, name)), None)
    if wrong is not None:
        raise ConfigError(
            f"the adapter in {str(directory)!r} is not one of this {type(model).__name__}: {wrong!r} is"
            f" {_text(_shape(stored, wrong))} there and {_text(_shape(expected, wrong))} here. Give the model that it"
            " was trained with"
        )
    peft.set_peft_model_state_dict(adapted, stored)
    return adapted


def _stored_tensors(directory: Path) -> dict[str, torch.Tensor]:
    with open_checkpoint(Storage(), directory, ADAPTER, requires_manifest=False) as stored:
        tensors = {name: torch.empty(spec.shape, dtype=spec.dtype) for name, spec in stored.specs.items()}
        slices = [(name, TensorSlice.full(name, tensor, primary=False)) for name, tensor in tensors.items()]
        read_slices(stored, slices, verifies=True)
    return tensors


def _shape(tensors: Mapping[str, torch.Tensor], name: str) -> tuple[int, ...] | None:
    return tuple(tensors[name].shape) if name in tensors else None


def _text(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else f"of shape {shape}"


def has_adapters(model: ModelWrapper) -> bool:
    """Return whether a boosted model is a `peft.PeftModel`; False without peft."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model.unwrap(), peft.PeftModel)


def check_adapters(model: ModelWrapper) -> None:
    """Raise `ConfigError` if a boosted model has no adapters."""
    adapted = model.unwrap()
    if not isinstance(adapted, _peft().PeftModel):
        raise ConfigError(
            f"save_lora_as_pretrained() got a {type(adapted).__name__} without adapters: add them before boost() by"
            " booster.enable_lora(model, lora_config=...), or write save_model()"
        )


def has_resized_embeddings(model: ModelWrapper) -> bool:
    """Return whether the vocabulary differs from that of the stored base, so that peft saves the embeddings, too.

    Like peft, False if the stored base is unknown or can't be reached. It may be on the network: ask it on one rank.
    """
    adapted: Any = model.unwrap()
    vocabulary = getattr(adapted.config, "vocab_size", None)
    bases = {config.base_model_name_or_path for config in adapted.peft_config.values()} - {None, ""}
    if vocabulary is None or not bases:
        return False
    try:
        return any(type(adapted.config).from_pretrained(base).vocab_size != vocabulary for base in bases)
    except (OSError, ValueError):  # transformers' errors for what is neither a directory nor on the hub
        return False


def adapter_files(model: ModelWrapper, *, saves_embeddings: bool) -> dict[str, AdapterFiles]:
    """Return the files of each adapter of a boosted model, by the folder that peft gives it: "" for the default one.

    Args:
        model: Boosted model with adapters.
        saves_embeddings: Result of `has_resized_embeddings`, equal on all ranks. Base weights of embeddings that an
            adapter targets are saved in any case.
    """
    peft = _peft()
    adapted: Any = model.unwrap()
    slices = model.tensor_slices()
    found: dict[str, AdapterFiles] = {}
    for name, config in adapted.peft_config.items():
        is_targeted = not getattr(config, "trainable_token_indices", None) and _targets_embeddings(adapted, name)
        own = _names_in_file(peft, adapted, name, saves_embeddings=saves_embeddings or is_targeted)
        folder = "" if name == "default" else name
        found[folder] = AdapterFiles(
            slices=[replace(one, name=own[one.name]) for one in slices if one.name in own],
            documents={CONFIG_FILE: _config_document(adapted, config)},
        )
    return found


def frozen_names(model: ModelWrapper) -> frozenset[str]:
    """Return the frozen parameters on this rank that are in no adapter. Inactive adapters are frozen, too."""
    adapted: Any = model.unwrap()
    own: set[str] = set()
    if has_adapters(model):
        names = (_names_in_file(_peft(), adapted, name, saves_embeddings=False) for name in adapted.peft_config)
        own = {key for of_adapter in names for key in of_adapter}
    tied = model.tied_names()
    frozen = {
        model.logical_name(name)
        for name, one in adapted.named_parameters(remove_duplicate=False)
        if not one.requires_grad and name not in own
    }
    return frozenset(frozen.union(*(tied.get(name, ()) for name in frozen)))


def _targets_embeddings(adapted: nn.Module, adapter: str) -> bool:
    """Return whether an embedding or a head on this rank has the adapter, by the names that peft looks for."""
    from peft.utils.other import EMBEDDING_LAYER_NAMES

    return any(
        adapter in getattr(module, kind, ())
        for name, module in adapted.named_modules()
        if name.rpartition(".")[2] in EMBEDDING_LAYER_NAMES
        for kind in ("lora_A", "lora_embedding_A")
    )


def _names_in_file(peft: Any, adapted: nn.Module, adapter: str, *, saves_embeddings: bool) -> dict[str, str]:
    """Return the names that peft gives an adapter's tensors in its file, by those in the model."""
    # Marks instead of the tensors, of which this rank may hold nothing.
    named = [*adapted.named_parameters(remove_duplicate=False), *adapted.named_buffers(remove_duplicate=False)]
    marks = {name: torch.empty(0) for name, _ in named}
    kept = peft.get_peft_model_state_dict(
        adapted, state_dict=marks, adapter_name=adapter, save_embedding_layers=saves_embeddings
    )
    names = {id(mark): key for key, mark in kept.items()}
    return {key: names[id(mark)] for key, mark in marks.items() if id(mark) in names}


def _config_document(adapted: nn.Module, config: Any) -> bytes:
    """Return `adapter_config.json` as peft writes it, for inference."""
    config = copy.deepcopy(config)
    if config.task_type is None:  # AutoPeftModel finds the class by it
        base = type(adapted.get_base_model())  # type: ignore[operator]
        config.auto_mapping = {"base_model_class": base.__name__, "parent_library": base.__module__}
    config.inference_mode = True
    config.base_model_name_or_path = config.base_model_name_or_path or None
    fields = config.to_dict()
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in fields.items()}
    return json.dumps(plain, indent=2, sort_keys=True, default=str).encode()
