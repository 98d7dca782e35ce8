"""Starting the world: each refused before anything is started."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from faults.mistakes.wrong_call import CallSite, WrongCall, calling

import booster
from booster import Booster, Config, LazyInitContext, launch_from_openmpi, launch_from_slurm, launch_from_torch
from booster.launch import launch
from booster.plugins import GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin

WORLD_SIZE = 1
_HERE = {"rank": 0, "world_size": 1, "host": "localhost", "port": 29500}


def _launch(**wrong: Any) -> WrongCall:
    return WrongCall(
        name=calling(launch, **wrong).name,
        prepare=lambda _: lambda: launch(**{**_HERE, "verbose": False, **wrong}),
    )


def _from(function: Callable[..., Any], what: str, variables: dict[str, str], **arguments: Any) -> WrongCall:
    def prepare(_: CallSite) -> Callable[[], Any]:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
        os.environ.update(variables)
        return lambda: function(verbose=False, **arguments)

    return WrongCall(name=f"{function.__name__}() with {what}", prepare=prepare)


_TORCH = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


def wrong_calls() -> list[WrongCall]:
    """Returns the wrong calls of this topic."""
    return [
        _launch(rank=1),
        _launch(rank=-1),
        _launch(rank="0"),
        _launch(rank=None),
        _launch(world_size=0),
        _launch(world_size="2"),
        _launch(world_size=2.0),
        _launch(local_rank=1),
        _launch(local_rank="0"),
        _launch(world_size=2, host=""),
        _launch(world_size=2, host=None),
        _launch(world_size=2, port=0),
        _launch(world_size=2, port=70000),
        _launch(world_size=2, port="29500"),
        _launch(backend="mpi2"),
        _launch(backend=3),
        _launch(seed=-1),
        _launch(seed="a"),
        _launch(seed=2**32),
        _launch(timeout_seconds=0),
        _launch(timeout_seconds=float("nan")),
        _launch(timeout_seconds="60"),
        _launch(timeout_seconds=None),
        _launch(config=3),
        _launch(config="no-such-config.py"),
        _launch(config={3: "a number for a name"}),
        _from(launch_from_torch, "RANK alone", {"RANK": "0"}),
        _from(launch_from_torch, "WORLD_SIZE=two", {**_TORCH, "WORLD_SIZE": "two"}),
        _from(launch_from_torch, "RANK=3 of 1", {**_TORCH, "RANK": "3"}),
        _from(launch_from_torch, "backend='glo'", _TORCH, backend="glo"),
        _from(launch_from_torch, "srun's 4 tasks and no RANK", {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "1"}),
        _from(launch_from_openmpi, "no variable of mpirun", {}),
        _from(launch_from_slurm, "no variable of srun", {}),
        calling(booster.set_seed, -1),
        calling(booster.set_seed, "a"),
        calling(booster.set_seed, 1.5),
        calling(booster.get_config),
        calling(Config, 3),
        calling(Config.load, "no-such-config.py"),
        calling(TorchDDPPlugin),
        calling(LowLevelZeroPlugin),
        calling(GeminiPlugin),
        calling(TorchFSDPPlugin),
        calling(HybridParallelPlugin),
        calling(Booster, plugin="torch_dpp"),
        calling(Booster, plugin=TorchDDPPlugin),
        calling(Booster, plugin=3),
        *(calling(Booster, plugin=name) for name in ("zero", "FSDP", "zero-2", "tensor_parallel", "apex")),
        calling(Booster, device="gpu0"),
        calling(Booster, device="meta"),
        calling(Booster, device=3.5),
        calling(Booster, mixed_precision="fp17"),
        calling(Booster, mixed_precision=torch.bfloat16),
        calling(Booster, mixed_precision=True),
        calling(booster.FP16TorchMixedPrecision, init_scale=0),
        calling(booster.FP16TorchMixedPrecision, init_scale="big"),
        calling(booster.FP16TorchMixedPrecision, growth_factor=1.0),
        calling(booster.FP16TorchMixedPrecision, backoff_factor=1.5),
        calling(booster.FP16TorchMixedPrecision, growth_interval=0),
        calling(booster.FP16TorchMixedPrecision, growth_interval=2.5),
        calling(booster.FP16NaiveMixedPrecision, initial_scale=-1),
        calling(booster.FP16NaiveMixedPrecision, min_scale=8, max_scale=4),
        calling(booster.FP16NaiveMixedPrecision, hysteresis=0),
        calling(booster.FP16NaiveMixedPrecision, verbose="yes"),
        calling(booster.FP16ApexMixedPrecision, opt_level="O4"),
        calling(booster.FP16ApexMixedPrecision, opt_level=2),
        calling(booster.FP16ApexMixedPrecision, loss_scale="static"),
        calling(booster.FP16ApexMixedPrecision, cast_model_type="fp16"),
        calling(booster.FP16ApexMixedPrecision, num_losses=0),
        calling(booster.FP8MixedPrecision, recipe="delayed"),
        calling(booster.FP8MixedPrecision, module_filter="lm_head"),
        calling(booster.FP8MixedPrecision, emulate="yes"),
        calling(LazyInitContext, default_device="meta"),
        calling(LazyInitContext, default_device="gpu0"),
        calling(LazyInitContext, eager_below_bytes=-1),
        calling(LazyInitContext, eager_below_bytes="64K"),
    ]
