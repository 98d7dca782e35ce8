"""The other variants to save and load one training state that benchmarks/checkpoint/run.py compares with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpoint.disk import read_raw, sync_files, write_raw
from checkpoint.state import TrainingState

__all__ = [
    "Actions",
    "build_async_dcp",
    "build_buffer_copy",
    "build_dcp",
    "build_raw",
    "build_safetensors",
    "build_save_pretrained",
    "build_torch_save",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Actions:
    """What one variant does on this rank; all ranks call each of them together.

    Attributes:
        save: Puts the state into an empty directory; durable when it returns, unless there is `settle`.
        load: Fills the live state from that directory; None: it is not measured.
        warm_load: The same with the files in the page cache; None: it is not measured.
        settle: Waits until what `save` began is durable; None: nothing is left to wait for.
        num_bytes: What it saves.
        fills_state: False: `load` reads, and leaves the state alone.
    """

    save: Callable[[Path], None]
    load: Callable[[Path], None] | None = None
    warm_load: Callable[[Path], None] | None = None
    settle: Callable[[], None] | None = None
    num_bytes: int
    fills_state: bool = True


def _is_first_rank() -> bool:
    return dist.get_rank() == 0


# The limits of the disk and of memory.


def build_raw(state: TrainingState, *, is_direct: bool) -> Actions:
    """Every rank writes its part of the bytes into a file of its own, and reads it back past the page cache."""
    share = -(-state.num_bytes // dist.get_world_size())
    name = f"raw-{dist.get_rank()}"
    return Actions(
        save=lambda directory: write_raw(directory / name, share, is_direct=is_direct),
        load=(lambda directory: read_raw(directory / name)) if is_direct else None,
        num_bytes=state.num_bytes,
        fills_state=False,
    )


def build_buffer_copy(state: TrainingState) -> Actions:
    """Every rank copies its part of the bytes into memory that is there from the start, and all bytes back."""
    buffers = [tensor.detach().clone() for tensor in state.tensors.values()]

    def save(directory: Path) -> None:
        for source, target in zip(_own_part(state.tensors.values()), _own_part(buffers), strict=True):
            target.copy_(source)

    def load(directory: Path) -> None:
        for source, target in zip(buffers, state.tensors.values(), strict=True):
            target.detach().copy_(source)

    return Actions(save=save, warm_load=load, num_bytes=state.num_bytes)


def _own_part(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Returns one rank's share of all elements, as the parts of the tensors that it lies in."""
    flat = [tensor.detach().view(-1) for tensor in tensors]
    total, rank, size = sum(map(len, flat)), dist.get_rank(), dist.get_world_size()
    start, stop, parts = rank * total // size, (rank + 1) * total // size, []
    for tensor in flat:
        parts.append(tensor[max(0, start) : max(0, stop)])
        start, stop = start - len(tensor), stop - len(tensor)
    return [part for part in parts if len(part)]


# One rank saves.


def build_safetensors(state: TrainingState) -> Actions:
    """save_file of the first rank; every rank reads the file into its live tensors."""
    from safetensors.torch import load_file, save_file

    def save(directory: Path) -> None:
        if _is_first_rank():
            save_file(state.tensors, directory / "state.safetensors")
            sync_files(directory)

    def load(directory: Path) -> None:
        live = state.tensors
        for name, tensor in load_file(directory / "state.safetensors").items():
            live[name].copy_(tensor)

    return Actions(save=save, load=load, warm_load=load, num_bytes=state.num_bytes)


def build_torch_save(state: TrainingState) -> Actions:
    """torch.save of the first rank's state dicts; every rank loads them."""

    def save(directory: Path) -> None:
        if _is_first_rank():
            document = {"model": state.module.state_dict(), "optimizer": state.plain_optimizer.state_dict()}
            torch.save(document, directory / "state.pt")
            sync_files(directory)

    def load(directory: Path) -> None:
        document = torch.load(directory / "state.pt", weights_only=True)
        state.module.load_state_dict(document["model"])
        # Not Optimizer.load_state_dict, which would put other tensors in place of the live ones.
        states = state.plain_optimizer.state_dict()["state"]
        for index, stored in document["optimizer"]["state"].items():
            for key, tensor in stored.items():
                states[index][key].copy_(tensor)

    return Actions(save=save, load=load, warm_load=load, num_bytes=state.num_bytes)


def build_save_pretrained(state: TrainingState) -> Actions:
    """save_pretrained of the first rank, of a GPT-2 whose weights alone are as many bytes as the whole state."""
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = None
    if _is_first_rank():
        per_layer = sum(p.numel() for p in state.module.blocks[0].parameters())
        width = state.module.token.embedding_dim
        vocabulary = state.module.token.num_embeddings
        layers = max(1, round((state.num_bytes / 4 - vocabulary * width) / per_layer))
        config = GPT2Config(
            vocab_size=vocabulary,
            n_positions=32,
            n_embd=width,
            n_layer=layers,
            n_head=state.module.blocks[0].heads,
            bos_token_id=0,
            eos_token_id=0,
        )
        model = GPT2LMHeadModel(config)
    counts = [0 if model is None else sum(parameter.nbytes for parameter in model.parameters())]
    dist.broadcast_object_list(counts, src=0)

    def save(directory: Path) -> None:
        if model is not None:
            model.save_pretrained(directory)
            sync_files(directory)

    return Actions(save=save, num_bytes=counts[0])


# All ranks save, by torch.distributed.checkpoint.


def build_dcp(state: TrainingState) -> Actions:
    """torch.distributed.checkpoint as it comes: every rank writes a part and fsyncs it."""
    import torch.distributed.checkpoint as dcp

    group = dist.new_group(backend="gloo")

    def load(directory: Path) -> None:
        dcp.load(state.tensors, checkpoint_id=directory / "dcp", process_group=group)

    return Actions(
        save=lambda directory: dcp.save(state.tensors, checkpoint_id=directory / "dcp", process_group=group),
        load=load,
        warm_load=load,
        num_bytes=state.num_bytes,
    )


def build_async_dcp(state: TrainingState, *, reuses_staging: bool) -> Actions:
    """async_save, with its default staging or with shared memory that is kept from save to save."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    # A group of its own: a thread of async_save communicates while this benchmark waits at barriers.
    group = dist.new_group(backend="gloo")
    begin: Callable[..., Any] = partial(dcp.async_save, process_group=group)
    if reuses_staging:
        options = StagingOptions(
            use_pinned_memory=False, use_shared_memory=True, use_async_staging=False, use_non_blocking_copy=False
        )
        begin = partial(begin, async_stager=DefaultStager(options))
    running: list[Future[Any]] = []
    return Actions(
        save=lambda directory: running.append(begin(state.tensors, checkpoint_id=directory / "dcp")),
        settle=lambda: running.pop().result(),
        num_bytes=state.num_bytes,
    )
