"""The plugin around FSDP2 and its twins by hand, as engines of benchmarks/zero: same units, policy and optimizer."""

from __future__ import annotations

from functools import partial
from typing import Any

from _harness.gpt import plain_step
from _harness.pair import Engine, Step
from zero.engines import adamw, boosted_step, task
from zero.manual import STRATEGIES, policy_of, shard_manual

__all__ = ["engines_of", "manual_name", "plugin_name", "plugin_of"]


def manual_name(strategy: str, *, has_our_collectives: bool = False) -> str:
    """Returns the name of FSDP2 set up by hand; with our collectives only the wrapper tells it from the plugin."""
    return f"FSDP2 {strategy}" + (", our collectives" if has_our_collectives else "")


def plugin_name(strategy: str) -> str:
    """Returns the name of the plugin's engine."""
    return f"TorchFSDPPlugin {strategy}"


def engines_of(size: str, precision: str) -> list[Engine]:
    """Returns the engines of one comparison, FSDP2 by hand first.

    Args:
        size: Name of the model.
        precision: "fp32", or "bf16": `MixedPrecisionPolicy(param_dtype=torch.bfloat16)` over fp32 shards.
    """
    return [
        *(_manual(size, precision, strategy, has_our_collectives=False) for strategy in STRATEGIES),
        *(_manual(size, precision, strategy, has_our_collectives=True) for strategy in STRATEGIES),
        *(_plugin(size, precision, strategy) for strategy in STRATEGIES),
    ]


def plugin_of(strategy: str, precision: str, **arguments: Any) -> Any:
    """Returns a TorchFSDPPlugin set up as `shard_manual` sets FSDP2 up.

    Args:
        strategy: One of STRATEGIES.
        precision: "fp32" or "bf16".
        **arguments: Of the plugin.
    """
    from booster.plugins import TorchFSDPPlugin

    policy = None if precision == "fp32" else policy_of(precision)
    return TorchFSDPPlugin(sharding_strategy=strategy, mixed_precision=policy, **arguments)


def _manual(size: str, precision: str, strategy: str, *, has_our_collectives: bool) -> Engine:
    return Engine(
        name=manual_name(strategy, has_our_collectives=has_our_collectives),
        build=partial(_build_manual, size, precision, strategy, has_our_collectives),
        requires=("booster",) if has_our_collectives else (),
    )


def _plugin(size: str, precision: str, strategy: str) -> Engine:
    build = partial(_build_plugin, size, precision, strategy)
    return Engine(name=plugin_name(strategy), build=build, requires=("booster",))


def _build_manual(size: str, precision: str, strategy: str, has_our_collectives: bool) -> Step:
    model, batch = task(size)
    reshards = STRATEGIES[strategy]
    shard_manual(model, policy_of(precision), reshard_after_forward=reshards, has_our_collectives=has_our_collectives)
    return plain_step(model, adamw(model.parameters()), batch)


def _build_plugin(size: str, precision: str, strategy: str) -> Step:
    return boosted_step(size, plugin_of(strategy, precision), adamw)
