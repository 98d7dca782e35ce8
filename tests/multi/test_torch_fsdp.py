"""Training under TorchFSDPPlugin equals training in one process."""

from __future__ import annotations

import itertools

import pytest
from fsdp_twins import STRATEGIES, small_units
from harness import preload
from parity import FSDP_DTYPES, assert_parallel_equals_serial
from zoo import TRANSFORMERS_MODULES, model_names

preload(*TRANSFORMERS_MODULES)
WORLDS = (2, 3, 4)
ONE_LEVEL = ("full", "grad op", "none")
# Odd sizes, tied, frozen, unused and conditional parameters, several groups, whole blocks left out, a 0-dim parameter.
SMALL = ("mlp_odd", "tied_lm", "frozen_unused_conditional", "multi_output_groups", "routed_experts", "deepfm")
BOOSTERS_PRECISIONS = ("bf16", "fp16", "fp16_naive", "fp16_apex_o1", "fp16_apex_o2", "fp8")
WAYS = ("always", "no_sync", "accumulate")


def grid(fast, *values):
    """Every combination once; those that `fast` does not say yes to are slow."""
    return [case if fast(*case) else pytest.param(*case, marks=pytest.mark.slow) for case in itertools.product(*values)]


def assert_equals_serial(model, strategy="full", *, precision=None, arguments=None, **settings):
    # SGD in low precision: its update is linear in the gradient, so that an error is the gradient's own.
    settings.setdefault("optimizer", "adamw" if precision is None else "sgd")
    assert_parallel_equals_serial(
        "torch_fsdp",
        model,
        precision=precision,
        plugin_arguments=STRATEGIES[strategy] | (arguments or {}),
        **settings,
    )


def _fast_world(strategy, world_size, model):
    """Every model once, and small ones in every world and under every strategy."""
    if strategy == "full":
        return world_size == 2 or model in {3: ("mlp_odd", "tied_lm", "routed_experts"), 4: ("mlp_odd",)}[world_size]
    return world_size == {"grad op": 3, "none": 2}[strategy] and model in ("mlp_odd", "tied_lm")


@pytest.mark.parametrize(("strategy", "world_size", "model"), grid(_fast_world, ONE_LEVEL, WORLDS, model_names()))
def test_every_model_trains_as_in_one_process(strategy, world_size, model):
    assert_equals_serial(model, strategy, world_size=world_size, max_norm=0.5)


@pytest.mark.parametrize(
    "model", [one if one in SMALL[:3] else pytest.param(one, marks=pytest.mark.slow) for one in model_names()]
)
def test_replicas_of_shards_train_as_in_one_process(model):
    assert_equals_serial(model, "hybrid", world_size=4, max_norm=0.5)


@pytest.mark.parametrize("world_size", [1])
@pytest.mark.parametrize("model", ["tied_lm", "convnet_batchnorm"])
def test_one_rank_trains_as_one_process(model, world_size):
    assert_equals_serial(model, world_size=world_size, accumulation=2, synchronize="accumulate", max_norm=0.5)


@pytest.mark.parametrize(
    ("strategy", "world_size", "precision", "model"),
    grid(
        lambda strategy, world_size, precision, model: (
            (strategy, world_size) == ("full", 2)
            and (model == "tied_lm" or (precision == "fsdp_bf16" and model in ("routed_experts", "byte_gpt", "convit")))
        ),
        ONE_LEVEL,
        WORLDS,
        FSDP_DTYPES,
        model_names(),
    ),
)
def test_precisions_of_fsdp_train_as_in_one_process(strategy, world_size, precision, model):
    assert_equals_serial(model, strategy, world_size=world_size, precision=precision, max_norm=0.5)


@pytest.mark.parametrize(
    ("strategy", "world_size", "precision", "model"),
    grid(
        lambda strategy, world_size, precision, model: (
            (strategy, world_size) == ("full", 2)
            and (model == "mlp_odd" or (precision, model) in (("bf16", "llama"), ("fp16", "convnet_batchnorm")))
        ),
        ONE_LEVEL,
        WORLDS,
        BOOSTERS_PRECISIONS,
        model_names(),
    ),
)
def test_precisions_of_the_booster_train_as_in_one_process(strategy, world_size, precision, model):
    assert_equals_serial(model, strategy, world_size=world_size, precision=precision, max_norm=0.5)


@pytest.mark.parametrize(
    ("precision", "model"),
    grid(
        lambda precision, model: (precision, model) in (("fsdp_bf16", "tied_lm"), ("fp16", "mlp_odd")),
        [*FSDP_DTYPES, *BOOSTERS_PRECISIONS],
        model_names(),
    ),
)
def test_precisions_over_replicas_train_as_in_one_process(precision, model):
    assert_equals_serial(model, "hybrid", world_size=4, precision=precision, accumulation=2, synchronize="no_sync")


@pytest.mark.parametrize(
    ("strategy", "world_size", "synchronize", "model"),
    grid(
        lambda strategy, world_size, synchronize, model: (
            (strategy, world_size) == ("full", 2)
            and (model == "tied_lm" or (synchronize == "no_sync" and model in ("mlp_odd", "routed_experts")))
        ),
        ONE_LEVEL,
        WORLDS,
        WAYS,
        model_names(),
    ),
)
def test_accumulation_equals_one_batch(strategy, world_size, synchronize, model):
    assert_equals_serial(model, strategy, world_size=world_size, accumulation=3, synchronize=synchronize, max_norm=0.1)


def test_float8_by_rows_equals_serial():
    assert_equals_serial("byte_gpt", "full", precision="fp8_rowwise", max_norm=0.5)


@pytest.mark.parametrize(
    ("strategy", "synchronize", "precision", "model"),
    grid(
        lambda strategy, synchronize, precision, model: (
            strategy == "full"
            and model == "byte_gpt"
            and (synchronize == "accumulate" or precision == "fsdp_bf16")
            and precision != "fp8"
        ),
        ONE_LEVEL,
        WAYS,
        [*FSDP_DTYPES, "fp16_naive", "fp8"],
        ["byte_gpt", *SMALL],
    ),
)
def test_accumulation_in_low_precision_equals_one_batch(strategy, synchronize, precision, model):
    assert_equals_serial(model, strategy, precision=precision, accumulation=2, synchronize=synchronize, max_norm=0.5)


@pytest.mark.parametrize("synchronize", ["no_sync", pytest.param("accumulate", marks=pytest.mark.slow)])
@pytest.mark.parametrize("model", ["tied_lm", "routed_experts"])
def test_accumulation_over_replicas_equals_one_batch(model, synchronize):
    assert_equals_serial(model, "hybrid", world_size=4, accumulation=3, synchronize=synchronize, max_norm=0.1)


@pytest.mark.parametrize(
    ("optimizer", "strategy", "precision"),
    grid(
        lambda optimizer, strategy, precision: strategy == "full" and precision in (None, "fsdp_bf16"),
        ["sgd", "adamw", "hybrid_adam"],
        ONE_LEVEL,
        [None, *FSDP_DTYPES],
    ),
)
def test_other_optimizers(optimizer, strategy, precision):
    assert_equals_serial("multi_output_groups", strategy, precision=precision, optimizer=optimizer, max_norm=0.5)


@pytest.mark.parametrize(
    ("model", "world_size"),
    grid(lambda model, world_size: world_size == 3 and model in ("tied_lm", "mlp_odd", "llama"), model_names(), WORLDS),
)
def test_units_by_size(model, world_size):
    arguments = {"auto_wrap_policy": small_units()}
    assert_equals_serial(model, world_size=world_size, arguments=arguments, max_norm=0.5)


@pytest.mark.parametrize(
    ("model", "world_size"),
    grid(lambda model, world_size: (world_size, model) in ((2, "byte_gpt"), (3, "tied_lm")), model_names(), WORLDS),
)
def test_a_single_group_as_of_small_models(model, world_size):
    arguments = {"auto_wrap_policy": small_units(10**9)}
    assert_equals_serial(model, world_size=world_size, arguments=arguments, max_norm=0.5)


@pytest.mark.parametrize("reshard_after_forward", [True, False, pytest.param(2, marks=pytest.mark.slow)])
def test_what_is_kept_after_forward_changes_nothing(reshard_after_forward):
    arguments = {"reshard_after_forward": reshard_after_forward}
    assert_equals_serial("byte_gpt", world_size=4, arguments=arguments, max_norm=0.5)


@pytest.mark.parametrize("strategy", ["full", pytest.param("grad op", marks=pytest.mark.slow)])
def test_messages_in_place_of_shared_memory(strategy):
    assert_equals_serial("tied_lm", strategy, world_size=3, uses_shared_memory=False)
