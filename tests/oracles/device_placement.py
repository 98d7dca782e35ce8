"""Trains and saves by every plugin on fake "cuda" tensors and prints what happened as JSON.

Run: python -m oracles.device_placement [NUMBER ...] (in tests/, with a CPU build of torch; all cases by default)
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

from simulated_cuda import device

device.install()

import torch  # noqa: E402 - after the device
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from booster import estimate_memory, optim  # noqa: E402

OFFLOADED = {"placement_policy": "static", "offload_optim_frac": 1.0, "offload_param_frac": 1.0}
SEQUENCE = {"enable_sequence_parallelism": True}
SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("torch_ddp", {}),
    ("torch_ddp", {"gradient_as_bucket_view": True}),
    ("low_level_zero", {"stage": 1, "precision": "fp16"}),
    ("low_level_zero", {"stage": 1, "precision": "fp32", "overlap_allgather": True}),
    ("low_level_zero", {"stage": 2, "precision": "fp16", "max_norm": 1.0}),
    ("low_level_zero", {"stage": 2, "precision": "bf16", "cpu_offload": True}),
    ("gemini", {"precision": "bf16", "max_norm": 1.0}),
    ("gemini", {"precision": "fp16", "max_prefetch": 1, "placement_policy": "auto"}),
    ("gemini", {"precision": "fp16", **OFFLOADED}),
    ("gemini", {"precision": "bf16", "pin_memory": True, **OFFLOADED}),
    ("torch_fsdp", {"max_norm": 1.0}),
    ("torch_fsdp", {"sharding_strategy": "SHARD_GRAD_OP"}),
    ("torch_fsdp", {"cpu_offload": True}),
    ("hybrid_parallel", {"tp_size": 2, "precision": "bf16", "max_norm": 1.0}),
    ("hybrid_parallel", {"tp_size": 2, "sequence_parallelism_mode": "split_gather", **SEQUENCE}),
    ("hybrid_parallel", {"sp_size": 2, "sequence_parallelism_mode": "ring_attn", **SEQUENCE}),
    ("hybrid_parallel", {"sp_size": 2, "sequence_parallelism_mode": "all_to_all", **SEQUENCE}),
    ("hybrid_parallel", {"pp_size": 2, "num_microbatches": 2, "zero_stage": 1}),
    ("hybrid_parallel", {"pp_size": 2, "num_microbatches": 2, "pp_style": "gpipe"}),
    ("hybrid_parallel", {"zero_stage": 2, "cpu_offload": True}),
]
PRECISIONS = ("fp32", "bf16", "fp16", "fp16_naive", "fp16_apex", "fp8")
OPTIMIZERS = ("HybridAdam", "FusedAdam", "FusedSGD", "FusedLAMB", "Lamb", "Lars", "CAME", "Adafactor")


class _OnTheCpu(nn.Module):
    """Adds a tensor of the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        return (self.linear(x_BD) + torch.ones(16)).sum()


class _StatesOnTheCpu(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state.setdefault("sum", torch.zeros(parameter.shape)).add_(parameter.grad)


def _muon(parameters: Iterable[nn.Parameter]) -> optim.Muon:
    given = list(parameters)
    kinds = [[one for one in given if (one.dim() == 2) is is_matrix] for is_matrix in (True, False)]
    return optim.Muon([{"params": kinds[0]}, {"params": kinds[1], "use_muon": False}])


def cases() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name of each case and its arguments of `estimate_memory`; the last two must fail."""
    config = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    llama = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, vocab_size=36, use_cache=False, **config))
    ids = torch.zeros(4, 8, dtype=torch.long)
    common: dict[str, Any] = {"model": llama, "batch": {"input_ids": ids, "labels": ids}, "num_ranks": 2}
    for precision in PRECISIONS:
        yield f"single device, {precision}", common | {"num_ranks": 1, "mixed_precision": precision}
    for name, settings in SETTINGS:
        yield f"{name} {settings}", common | {"plugin": name, "settings": settings}
    for name in OPTIMIZERS:
        optimizer = getattr(optim, name) if name == "Adafactor" else partial(getattr(optim, name), lr=1e-3)
        yield f"low_level_zero, {name}", common | {"plugin": "low_level_zero", "optimizer": optimizer}
    yield "low_level_zero, Muon", common | {"plugin": "low_level_zero", "optimizer": _muon}
    for name, settings in (("ZeRO 1", {"zero_stage": 1}), ("DP", {"zero_stage": 0})):
        settings |= {"tp_size": 2, "pp_size": 2, "num_microbatches": 2}
        yield f"tp x pp x {name}", common | {"plugin": "hybrid_parallel", "num_ranks": 8, "settings": settings}
    yield "torch_fsdp, bf16", common | {"plugin": "torch_fsdp", "mixed_precision": "bf16"}
    plain = {"model": _OnTheCpu(), "batch": torch.zeros(4, 16), "criterion": lambda outputs, _: outputs}
    yield "a model on the CPU", common | plain
    states = {"model": nn.Linear(16, 16), "batch": torch.zeros(4, 16), "optimizer": _StatesOnTheCpu}
    yield "states on the CPU", common | states | {"criterion": lambda outputs, _: F.mse_loss(outputs, outputs * 0)}


def main() -> None:
    """Run the cases."""
    chosen = [int(one) for one in sys.argv[1:]]
    every = list(cases())
    found: dict[str, dict[str, Any]] = {}
    for name, arguments in [every[index] for index in chosen] if chosen else every:
        arguments.setdefault("plugin", "torch_ddp" if arguments["num_ranks"] > 1 else None)
        try:
            memory = estimate_memory(**arguments, checkpoint=True).memory
            assert memory.checkpoint is not None
            found[name] = {
                "error": None,
                "on_device": memory.steady_state.total,
                "offloaded": memory.offloaded,
                "communicators": memory.communicators,
                "saving": asdict(memory.checkpoint),
            }
        except Exception as error:  # all that a plugin may raise
            found[name] = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
