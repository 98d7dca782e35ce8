"""Plans of models with adapters of peft, which are sharded as the layers that they wrap.

Note [Adapters]
A low-rank adapter adds B(A(x)) to a layer's output. Beside a column-parallel layer A is replicated, as the input is,
and B is column-parallel. Beside a row-parallel layer A is row-parallel, and B is replicated, as the output is. So both
outputs are sharded in the same way, and the product of a rank's A and B is its shard of the full update, which peft
can merge into the rank's weight. DoRA's magnitudes are one per output feature: sharded beside a column-parallel layer.

A plan is made for the model without adapters, with the wrapped layers under the names of their wrappers. Its entries
are then renamed to the wrapped layers, and those of the adapters are added.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import NoReturn

from torch import nn

from booster.errors import ConfigError
from booster.plugins.hybrid_parallel.tensor_parallel.linear import is_linear

from .plan import (
    CLOSING_STYLES,
    COLUMN_STYLES,
    OPEN_STYLES,
    ROW_STYLES,
    PlannedEntry,
    TensorParallelPlan,
    split_dim,
)

# Styles of B, beside a layer of the same style.
_STYLES_OF_B = COLUMN_STYLES | {"vocab_head", "mla_kv_a_proj", "replicated_with_grad_allreduce"}
# Styles of A, beside a layer of the same style.
_STYLES_OF_A = ROW_STYLES | {"replicated_with_grad_allreduce"}
_REPLICATED = frozenset({"replicated", "sequence"})
_PLACES = ("base_layer", "original_module", "token_adapter.base_layer")  # of a wrapped layer in its wrapper


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[dict[str, nn.Module]]:
    """Put wrapped layers into the places of their wrappers, and yield the wrappers by name. Collective: no."""
    wrappers: dict[str, nn.Module] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if _wrapped(module) is not None and not any(name.startswith(f"{other}.") for other in wrappers):
            wrappers[name] = module
    places = [(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], name) for name in wrappers]
    for parent, key, name in places:
        parent._modules[key] = _wrapped(wrappers[name])
    try:
        yield wrappers
    finally:
        for parent, key, name in places:
            parent._modules[key] = wrappers[name]


def unwrapped_model(model: nn.Module) -> tuple[str, nn.Module]:
    """Return the model inside of peft's models, such as `PeftModel`, and its name in them. Collective: no."""
    name = ""
    while _is_of_peft(model) and _wrapped(model) is None:
        key = next((key for key in ("base_model", "model") if key in model._modules), None)
        if key is None:
            break
        name, model = f"{name}.{key}" if name else key, model.get_submodule(key)
    return name, model


def check_prefixes(model: nn.Module) -> None:
    """Check that no keys and values are prepended to those of a rank's heads.

    Raises:
        ConfigError: The model has prefix tuning.

    Collective: no.
    """
    for module in model.modules():
        if _is_of_peft(module) and type(module).__name__ == "PrefixEncoder":
            raise ConfigError(
                "prefix tuning of peft prepends keys and values of all heads, and with tp_size > 1 a rank has some of"
                " them: use LoraConfig or PromptTuningConfig, or use tp_size=1"
            )


def shard_adapters(plan: TensorParallelPlan, wrappers: Mapping[str, nn.Module]) -> TensorParallelPlan:
    """Return a model's plan with those of its adapters; see Note [Adapters].

    Args:
        plan: Resolved plan of the model without adapters.
        wrappers: Wrappers of layers by name, from `without_adapters`.

    Raises:
        ConfigError: The plan shards a layer with another kind of adapter.

    Collective: no.
    """
    if not wrappers:
        return plan
    entries: list[PlannedEntry] = []
    for entry in plan.entries:
        siblings = tuple(moved for name in entry.siblings for moved in _names_of(name, wrappers))
        entries.extend(replace(entry, name=name, siblings=siblings) for name in _names_of(entry.name, wrappers))
        owner, wrapper = _wrapper_of(entry.name, wrappers)
        if wrapper is not None and entry.style not in _REPLICATED:
            entries.extend(_adapter_entries(entry, owner, wrapper))
    return replace(
        plan,
        entries=tuple(entries),
        attributes=tuple(
            replace(one, module=name) for one in plan.attributes for name in _names_of(one.module, wrappers)
        ),
        arguments=tuple(
            replace(one, module=name) for one in plan.arguments for name in _names_of(one.module, wrappers)
        ),
    )


def _wrapper_of(name: str, wrappers: Mapping[str, nn.Module]) -> tuple[str, nn.Module | None]:
    """Return the name and the wrapper of the layer that is or contains a module, or None."""
    owner = name
    while owner and owner not in wrappers:
        owner = owner.rpartition(".")[0]
    return owner, wrappers.get(owner)


def _names_of(name: str, wrappers: Mapping[str, nn.Module]) -> list[str]:
    """Return a module's names in the model with adapters: several if peft trains a copy of it."""
    owner, wrapper = _wrapper_of(name, wrappers)
    if wrapper is None:
        return [name]
    return [f"{owner}.{place}{name[len(owner) :]}" for place in _places(wrapper)]


def _adapter_entries(entry: PlannedEntry, owner: str, wrapper: nn.Module) -> Iterator[PlannedEntry]:
    if "modules_to_save" in wrapper._modules:
        return  # copies of the layer, with entries of their own
    if entry.name != owner or entry.is_parameter or not _is_low_rank(wrapper, entry.style):
        _refuse(entry, owner, wrapper)
    own = replace(entry, region="", siblings=(), reason="")
    for key in wrapper.lora_A:  # type: ignore[union-attr]
        a, b = (f"{owner}.{kind}.{key}" for kind in ("lora_A", "lora_B"))
        dropout = f"{owner}.lora_dropout.{key}"
        if entry.style in _STYLES_OF_A:
            yield replace(own, name=a, dim=split_dim(nn.Linear(1, 1), entry.style) if entry.blocks else 0)
        if entry.style in _STYLES_OF_B:
            yield replace(own, name=b, dim=0, region=entry.region, siblings=(b,), reads_region=False)
        if key in getattr(wrapper, "lora_magnitude_vector", ()):
            magnitudes = f"{owner}.lora_magnitude_vector.{key}"
            if entry.style in COLUMN_STYLES:
                yield replace(own, name=f"{magnitudes}.weight", dim=0, is_parameter=True)
            yield PlannedEntry(name=magnitudes, style="dora")
        if isinstance(wrapper.get_submodule(f"lora_dropout.{key}"), nn.Dropout):
            if entry.style in OPEN_STYLES:
                yield PlannedEntry(name=dropout, style="replicated_dropout")
            elif entry.style in CLOSING_STYLES:
                yield PlannedEntry(name=dropout, style="sharded_dropout")


def _is_low_rank(wrapper: nn.Module, style: str) -> bool:
    """Whether the adapters are products of two linear layers, or DoRA of a style that shards its magnitudes."""
    base, *pairs = (wrapper._modules.get(name) for name in ("base_layer", "lora_A", "lora_B"))
    layers = [layer for pair in pairs if isinstance(pair, nn.ModuleDict) for layer in pair.children()]
    variants = {type(one).__name__ for one in getattr(wrapper, "lora_variant", {}).values()}
    is_dora = variants == {"DoraLinearVariant"} and style in COLUMN_STYLES | ROW_STYLES
    if base is None or (variants and not is_dora):
        return False
    if isinstance(base, nn.Embedding):  # its adapter is replicated
        return hasattr(wrapper, "lora_embedding_A")
    return bool(layers) and all(map(is_linear, [base, *layers]))


def _refuse(entry: PlannedEntry, owner: str, wrapper: nn.Module) -> NoReturn:
    variants = sorted({type(one).__name__ for one in getattr(wrapper, "lora_variant", {}).values()})
    kind = variants[0] if variants else f"{type(wrapper).__module__.split('.')[-2]}.{type(wrapper).__name__}"
    raise ConfigError(
        f"the plan shards {owner[-60:]!r} ({entry.style}), and its adapter of peft ({kind}) cannot be sharded with it:"
        " use plain LoRA, leave the layer out of target_modules, or use tp_size=1"
    )


def _places(wrapper: nn.Module) -> list[str]:
    """Return the names of the wrapped layer and of trained copies of it in their wrapper."""
    copies = wrapper._modules.get("modules_to_save")
    if copies is not None:
        return ["original_module", *(f"modules_to_save.{key}" for key, _ in copies.named_children())]
    return [next(place for place in _PLACES if _at(wrapper, place) is not None)]


def _wrapped(module: nn.Module) -> nn.Module | None:
    """Return the layer that a wrapper of peft wraps, or None."""
    if not _is_of_peft(module):
        return None
    return next((found for place in _PLACES if (found := _at(module, place)) is not None), None)


def _at(module: nn.Module | None, place: str) -> nn.Module | None:
    for key in place.split("."):
        module = None if module is None else module._modules.get(key)
    return module


def _is_of_peft(module: nn.Module) -> bool:
    return any(base.__module__.partition(".")[0] == "peft" for base in type(module).__mro__)
