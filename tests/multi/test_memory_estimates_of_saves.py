"""What `estimate_memory` says of saves before, against what they allocate."""

from __future__ import annotations

import mmap
import weakref

import pytest
import torch
from allocations import Allocations
from harness import run_ranks
from memory_cases import BATCH, PLAN, TOKENS, VOCABULARY, LanguageModel, estimated, next_token_loss

from booster import Booster
from booster.checkpoint_io.saving import writer
from booster.kernels import disk_io
from booster.registry import plugin_from_name


class HostMemory:
    """Bytes of the memory that is mapped for saves, and their peak."""

    def __init__(self, monkeypatch):
        self.held = self.peak = 0
        held = self

        class Counted(mmap.mmap):
            def __new__(cls, number, num_bytes, **options):
                made = super().__new__(cls, number, num_bytes, **options)
                size = num_bytes - (disk_io._HUGE_PAGE_BYTES if options else 0)  # added to align it, never touched
                held.held += size
                held.peak = max(held.peak, held.held)
                weakref.finalize(made, held.free, size)
                return made

        monkeypatch.setattr(mmap, "mmap", Counted)

    def free(self, size):
        self.held -= size


def small_jobs(monkeypatch):
    """Gives each thread of a writer a job, as with a larger model: a small one has fewer than there are threads."""
    monkeypatch.setattr(writer, "BLOCK_BYTES", 2**20)


def saved(plugin, settings, directory, *, use_async):
    """Returns the peaks of what a save maps, and of what torch allocates beside what training keeps."""
    with pytest.MonkeyPatch.context() as patch:
        small_jobs(patch)
        booster = Booster(plugin=plugin_from_name(plugin, **settings))
        model = LanguageModel()
        model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()))
        ids = torch.randint(0, VOCABULARY, (BATCH, TOKENS))
        booster.execute_pipeline(iter([ids]), model, next_token_loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        patch.setattr(writer, "_staging", writer.StagingBuffers(writer._staging.count, writer._staging.num_bytes))
        host = HostMemory(patch)
        with Allocations() as allocations:
            allocations.mark("start")
            booster.save_model(model, f"{directory}/model", shard=True, use_async=use_async)
            booster.save_optimizer(optimizer, f"{directory}/optimizer", shard=True, use_async=use_async)
            booster.wait_for_checkpoints()
            allocations.mark("end")
        return {"host": host.peak, "device": allocations.peak("start", "end") - allocations.at("start")}


CASES = [
    ("torch_ddp", {}),
    ("low_level_zero", {"stage": 1, "precision": "bf16"}),
    ("low_level_zero", {"stage": 2, "precision": "fp32"}),
    ("gemini", {"precision": "bf16"}),
    ("torch_fsdp", {}),
    ("hybrid_parallel", {"tp_size": 2, "plan": PLAN, "precision": "bf16"}),
    ("hybrid_parallel", {"pp_size": 2, "num_microbatches": 4, "precision": "fp32"}),
]


def both_ways(plugin, settings, directory):
    directory.mkdir(exist_ok=True)
    return {
        "host": saved(plugin, settings, directory / "sync", use_async=False),
        "async_host": saved(plugin, settings, directory / "async", use_async=True),
    }


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(("plugin", "settings"), CASES)
def test_what_saves_take(plugin, settings, world_size, tmp_path, monkeypatch):
    """On the rank that needs the most; the estimate has no rank that needs more."""
    if world_size == 1:
        settings = {name: value for name, value in settings.items() if name in ("stage", "precision")}
    small_jobs(monkeypatch)
    estimate = estimated(plugin, num_ranks=world_size, settings=settings, checkpoint=True).memory.checkpoint
    ranks = run_ranks(both_ways, world_size, plugin, settings, tmp_path, timeout=180)
    for name in ("host", "async_host"):
        most = max(one[name]["host"] for one in ranks)
        assert abs(getattr(estimate, name) / most - 1) <= 0.1, (name, estimate, ranks)
        # What torch itself allocates beside: one number per tensor at most.
        assert max(one[name]["device"] for one in ranks) <= estimate.device + 2**17, (name, estimate, ranks)
