"""One step of a model of `zoo.transformers_sweep` under each strategy, against one process, with save and reopen."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from harness import run_ranks
from oracles.serial_training import Record
from parity import Case, assert_ranks_equal_serial, train_parallel
from zoo import get_model

GLOBAL_BATCH = 4
# The chunks and buckets of parity.py are for models of a few thousand parameters.
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"plugin": "torch_ddp", "plugin_arguments": {}},
    "gemini": {"plugin": "gemini", "plugin_arguments": {}},
    "fsdp": {"plugin": "torch_fsdp", "plugin_arguments": {}},
    "tp": {"plugin": "hybrid_parallel", "plugin_arguments": {"tp_size": 2}},
    "sp": {
        "plugin": "hybrid_parallel",
        "plugin_arguments": {
            "sp_size": 2,
            "enable_sequence_parallelism": True,
            "sequence_parallelism_mode": "all_to_all",
        },
    },
    "ring_attn": {
        "plugin": "hybrid_parallel",
        "plugin_arguments": {
            "sp_size": 2,
            "enable_sequence_parallelism": True,
            "sequence_parallelism_mode": "ring_attn",
        },
    },
    "split_gather": {
        "plugin": "hybrid_parallel",
        "plugin_arguments": {
            "tp_size": 2,
            "enable_sequence_parallelism": True,
            "sequence_parallelism_mode": "split_gather",
        },
    },
    "ring": {
        "plugin": "hybrid_parallel",
        "plugin_arguments": {
            "tp_size": 2,
            "enable_sequence_parallelism": True,
            "sequence_parallelism_mode": "ring",
        },
    },
    "pp": {"plugin": "hybrid_parallel", "plugin_arguments": {"pp_size": 2, "num_microbatches": 2}},
}


def sweep_case(name: str, strategy: str, save_to: Path) -> Case:
    """Return the case of a model under a strategy."""
    settings = STRATEGIES[strategy]
    arguments = dict(settings["plugin_arguments"])
    entry = get_model(name)
    if strategy == "pp" and entry.mixes_samples:
        arguments["num_microbatches"] = 1  # the statistics are of a microbatch
    if strategy == "ddp":
        arguments["find_unused_parameters"] = leaves_parameters_unused(name)
    case = Case(
        plugin=settings["plugin"],
        model=name,
        steps=1,
        samples_per_rank=1,
        plugin_arguments=arguments,
        save_to=str(save_to),
    )
    return dataclasses.replace(case, samples_per_rank=GLOBAL_BATCH // case.num_data_parts)


@functools.lru_cache(maxsize=1)
def leaves_parameters_unused(name: str) -> bool:
    """Return whether a batch leaves parameters without gradients, so that DDP is to look for them."""
    entry = get_model(name)
    model = entry.build()
    entry.loss(model, entry.make_batch(0, GLOBAL_BATCH // 2)).backward()
    return any(parameter.grad is None for parameter in model.parameters() if parameter.requires_grad)


def train_or_refuse(settings: dict[str, Any]) -> Record | str:
    """Train on this rank; return the text of the library's error where it refuses. Runs on every rank."""
    from booster.errors import BoosterError

    try:
        return train_parallel(settings)
    except BoosterError as error:
        return f"{type(error).__name__}: {error}"


def run_sweep_case(name: str, strategy: str, folder: Path) -> str | None:
    """Assert that a model trains under a strategy as in one process, and is saved and reopened.

    Returns:
        The refusal where the library refuses it, on all ranks; otherwise None.
    """
    case = sweep_case(name, strategy, folder / "saved")
    ranks = run_ranks(train_or_refuse, case.world_size, asdict(case), timeout=120)
    refusals = [result for result in ranks if isinstance(result, str)]
    if refusals:
        assert len(refusals) == len(ranks), f"refused on some ranks only: {refusals}"
        # Where a rank finds out in the middle of a step, the other one says that it has left.
        causes = [text for text in refusals if not text.startswith("RankFailedError")]
        assert causes, refusals
        return causes[0]
    weights = assert_ranks_equal_serial(case, ranks)
    assert_reopens(case, weights)
    return None


def assert_reopens(case: Case, weights: dict[str, torch.Tensor]) -> None:
    """Assert that `from_pretrained` gives the trained weights."""
    model_class = type(case.entry.build())
    reopened, info = model_class.from_pretrained(case.save_to, output_loading_info=True)
    assert not any(info.values()), info
    found = reopened.state_dict()
    assert found.keys() == weights.keys(), found.keys() ^ weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(found[name], tensor), f"{name} of the reopened model differs"
