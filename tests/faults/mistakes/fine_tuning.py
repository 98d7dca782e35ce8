"""Adapters of peft."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
from faults.mistakes.models import PLUGINS, boosted, pair, plugin
from faults.mistakes.wrong_call import CallSite, WrongCall
from torch import nn

from booster import Booster

WORLD_SIZE = 2


def _config(**settings: Any) -> peft.LoraConfig:
    return peft.LoraConfig(**{"r": 1, "target_modules": ["up"]} | settings)


def _before_boost(what: str, call: Callable[[Booster, nn.Module], Any]) -> WrongCall:
    def prepare(_: CallSite) -> Callable[[], Any]:
        booster, (model, _optimizer) = Booster(plugin=plugin("ddp")), pair()
        return lambda: call(booster, model)

    return WrongCall(name=what, prepare=prepare)


def _on_one_rank(what: str, call: Callable[[Booster, nn.Module], Any]) -> WrongCall:
    """The other rank adds an adapter, and must not keep it."""

    def prepare(place: CallSite) -> Callable[[], Any]:
        booster, (model, _optimizer) = Booster(plugin=plugin("ddp")), pair()
        if place.is_wrong:
            return lambda: call(booster, model)
        return lambda: booster.enable_lora(model, lora_config=_config())

    return WrongCall(name=f"{what} on one rank", prepare=prepare)


def _late_adapters(name: str) -> WrongCall:
    def prepare(_: CallSite) -> Callable[[], Any]:
        booster, (model, optimizer) = Booster(plugin=plugin(name)), pair()
        adapted = booster.enable_lora(model, lora_config=_config())
        return lambda: booster.boost(adapted, optimizer)

    return WrongCall(name=f"{name}: boost() with an optimizer from before enable_lora()", prepare=prepare)


def _after_boost(what: str, call: Callable[[Any, Any, Any], Any]) -> WrongCall:
    def prepare(_: CallSite) -> Callable[[], Any]:
        booster, model, optimizer = boosted()
        return lambda: call(booster, model, optimizer)

    return WrongCall(name=what, prepare=prepare)


def wrong_calls() -> list[WrongCall]:
    """Returns the wrong calls of this topic."""
    return [
        _before_boost("enable_lora() without a config", lambda b, m: b.enable_lora(m)),
        _before_boost("enable_lora() of a class", lambda b, m: b.enable_lora(type(m), lora_config=_config())),
        _before_boost("enable_lora(lora_config={'r': 8})", lambda b, m: b.enable_lora(m, lora_config={"r": 8})),
        _before_boost("enable_lora(lora_config) in place of a path", lambda b, m: b.enable_lora(m, _config())),
        _before_boost("enable_lora() with both", lambda b, m: b.enable_lora(m, "adapter", _config())),
        _before_boost("enable_lora() of no directory", lambda b, m: b.enable_lora(m, "no/adapter")),
        _before_boost(
            "enable_lora() with targets that match nothing",
            lambda b, m: b.enable_lora(m, lora_config=_config(target_modules=["q_proj"])),
        ),
        _on_one_rank(
            "enable_lora() with targets that match nothing",
            lambda b, m: b.enable_lora(m, lora_config=_config(target_modules=["q_proj"])),
        ),
        _after_boost("enable_lora() after boost()", lambda b, m, o: b.enable_lora(m, lora_config=_config())),
        _after_boost("save_lora_as_pretrained() without adapters", lambda b, m, o: b.save_lora_as_pretrained(m, "c")),
        _after_boost(
            "save_lora_as_pretrained(use_safetensors=False)",
            lambda b, m, o: b.save_lora_as_pretrained(m, "c", use_safetensors=False),
        ),
        _after_boost(
            "save(exclude_frozen_parameters='yes')", lambda b, m, o: b.save("c", m, o, exclude_frozen_parameters="yes")
        ),
        *map(_late_adapters, PLUGINS),
    ]
