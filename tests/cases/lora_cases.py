"""Plugins under which models with adapters train, and steps of such models."""

from __future__ import annotations

import torch

from booster.plugins import GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin


def hybrid(**arguments):
    return lambda: HybridParallelPlugin(precision="fp32", **arguments)


def sequence(mode, **arguments):
    return hybrid(enable_sequence_parallelism=True, sequence_parallelism_mode=mode, **arguments)


PLUGINS = {
    "none": lambda: None,
    "torch_ddp": TorchDDPPlugin,
    "zero_1": lambda: LowLevelZeroPlugin(stage=1, precision="fp32"),
    "zero_2": lambda: LowLevelZeroPlugin(stage=2, precision="fp32"),
    "gemini": lambda: GeminiPlugin(precision="fp32"),
    "torch_fsdp": TorchFSDPPlugin,
    "all_to_all": sequence("all_to_all", sp_size=2),
    "ring_attn": sequence("ring_attn", sp_size=2),
    "pp": hybrid(pp_size=2, num_microbatches=2),
    "zbv": hybrid(pp_size=2, num_microbatches=2, pp_style="zbv", num_model_chunks=2),
}
TENSOR_PARALLEL = {
    "tp": hybrid(tp_size=2),
    "tp_zero_1": hybrid(tp_size=2, zero_stage=1),
    "split_gather": sequence("split_gather", tp_size=2),
    "ring": sequence("ring", tp_size=2),
    "tp_pp": hybrid(tp_size=2, pp_size=2, num_microbatches=2),
}
ON_FOUR = ("tp_pp", "tp_zero_1")
WITH_STAGES = ("pp", "zbv", "tp_pp")


def batch_of(model, plugin):
    ids = torch.randint(0, 64, (4, 8), generator=torch.Generator().manual_seed(1))
    own = slice(4 * plugin.dp_rank // plugin.dp_size, 4 * (plugin.dp_rank + 1) // plugin.dp_size)
    labels = torch.arange(4) % 2 if model == "bert" else ids
    batch = {"input_ids": ids[own], "attention_mask": torch.ones_like(ids[own]), "labels": labels[own]}
    return {name: one.to(plugin.device) for name, one in batch.items()}


def run_batch(booster, model, batch, optimizer=None):
    """Run a batch, and its backward with an optimizer; return the loss of all ranks."""
    if booster.plugin.pp_size > 1:
        loss = booster.execute_pipeline(iter([batch]), model, lambda outputs, _: outputs.loss, optimizer)["loss"]
    else:
        loss = model(**batch).loss
        if optimizer is not None:
            booster.backward(loss, optimizer)
    return float(booster.gather_for_metrics(loss.detach().reshape(1)).mean())
