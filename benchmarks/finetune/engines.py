"""What benchmarks/finetune/run.py compares: LoRA steps of one Llama, by peft with its usual engines, and by plugins."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from _harness.llama import LLAMA_SIZES, LlamaSize
from _harness.pair import Engine, Step
from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["ACCELERATE_FSDP2", "DDP", "GEMINI", "OUR_DDP", "OUR_FSDP", "TENSOR", "ZERO_1", "ZERO_2", "engines_of"]

DDP = "peft, torch DDP"
ACCELERATE_FSDP2 = "peft, Accelerate FSDP2"
OUR_DDP = "TorchDDPPlugin"
ZERO_1, ZERO_2 = "LowLevelZeroPlugin stage 1", "LowLevelZeroPlugin stage 2"
GEMINI = "GeminiPlugin"
OUR_FSDP = "TorchFSDPPlugin"
TENSOR = "HybridParallelPlugin tp 2"

_PEFT = ("peft", "transformers.models.llama.modeling_llama")
_MODULES = {
    OUR_DDP: "booster.plugins.torch_ddp.plugin",
    ZERO_1: "booster.plugins.low_level_zero",
    ZERO_2: "booster.plugins.low_level_zero",
    GEMINI: "booster.plugins.gemini",
    OUR_FSDP: "booster.plugins.torch_fsdp",
    TENSOR: "booster.plugins.hybrid_parallel",
}
_NUM_BATCHES = 8
_ADAPTER_RANK = 8
_MAX_NORM = 1.0


def engines_of(size: str) -> list[Engine]:
    """Returns the engines of a model of LLAMA_SIZES, torch's DDP first.

    Args:
        size: Name of the model.
    """
    return [
        Engine(name=DDP, build=partial(_build_ddp, size), requires=_PEFT),
        Engine(
            name=ACCELERATE_FSDP2,
            build=partial(_build_accelerate, size),
            requires=(*_PEFT, "accelerate"),
            is_optional=True,
        ),
        *(
            Engine(name=name, build=partial(_build_ours, size, name), requires=(*_PEFT, "booster", _MODULES[name]))
            for name in _MODULES
        ),
    ]


def _build_ddp(size: str) -> Step:
    model = DistributedDataParallel(_adapted(size))
    parameters = _trained(model)
    optimizer = _adamw(parameters)

    def update(loss: torch.Tensor) -> None:
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, _MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return _step(size, model, update)


def _build_accelerate(size: str) -> Step:
    """`Accelerator.prepare`, which trains DDP on a CPU whatever it is given, with its state set to FSDP."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import DistributedType

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
    )
    accelerator = Accelerator(cpu=True)
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    model = _adapted(size)
    model, optimizer = accelerator.prepare(model, _adamw(_trained(model)))

    def update(loss: torch.Tensor) -> None:
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), _MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return _step(size, model, update)


def _build_ours(size: str, name: str) -> Step:
    from booster import Booster

    booster = Booster(plugin=_plugin(name))
    model = booster.enable_lora(_base(size), lora_config=_lora())
    model, optimizer, *_ = booster.boost(model, _adamw(_trained(model)))

    def update(loss: torch.Tensor) -> None:
        booster.backward(loss, optimizer)
        booster.clip_grad_norm_(optimizer, _MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return _step(size, model, update, divides_batch=name != TENSOR)


def _plugin(name: str) -> Any:
    from booster import plugins  # each is imported on first use, so that no engine's memory holds the code of others

    makers: dict[str, Callable[[], Any]] = {
        OUR_DDP: lambda: plugins.TorchDDPPlugin(),
        ZERO_1: lambda: plugins.LowLevelZeroPlugin(stage=1, precision="fp32"),
        ZERO_2: lambda: plugins.LowLevelZeroPlugin(stage=2, precision="fp32"),
        GEMINI: lambda: plugins.GeminiPlugin(precision="fp32", min_chunk_size_m=1, search_range_m=2),
        OUR_FSDP: lambda: plugins.TorchFSDPPlugin(),
        TENSOR: lambda: plugins.HybridParallelPlugin(tp_size=dist.get_world_size(), precision="fp32"),
    }
    return makers[name]()


def _step(size: str, model: nn.Module, update: Callable[[torch.Tensor], None], *, divides_batch: bool = True) -> Step:
    """Returns a step on the batch of all ranks, of which data-parallel ranks take their part."""
    shape, rank, num_ranks = LLAMA_SIZES[size], dist.get_rank(), dist.get_world_size()
    draw = torch.Generator().manual_seed(1)
    batches = torch.randint(shape.vocabulary, (_NUM_BATCHES, num_ranks, shape.samples, shape.sequence), generator=draw)
    batches = batches[:, rank] if divides_batch else batches.flatten(1, 2)

    def step(index: int) -> torch.Tensor:
        tokens = batches[index % _NUM_BATCHES]
        loss = model(input_ids=tokens, labels=tokens).loss
        update(loss)
        mean = loss.detach() / num_ranks  # of all ranks, so that losses are comparable
        dist.all_reduce(mean)
        return mean

    return step


def base_model(shape: LlamaSize, sequence: int) -> Any:
    """Returns transformers' Llama of a size, in training mode.

    Args:
        shape: The size.
        sequence: Most tokens per sample.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        max_position_embeddings=sequence,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


def _base(size: str) -> nn.Module:
    return base_model(LLAMA_SIZES[size], LLAMA_SIZES[size].sequence)


def _lora() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=_ADAPTER_RANK, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")


def _adapted(size: str) -> nn.Module:
    from peft import get_peft_model

    return get_peft_model(_base(size), _lora())


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)
