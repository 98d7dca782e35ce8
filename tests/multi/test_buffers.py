"""Every kind of buffer under plugins that shard: computes, is saved and loaded as in one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from gemini_models import WIDTH, Block, Twins
from harness import distributed
from safetensors.torch import load_file
from torch import nn

from booster.plugins import GeminiPlugin, LowLevelZeroPlugin, TorchFSDPPlugin

pytestmark = pytest.mark.on_device

PLUGINS = {
    "zero": lambda: LowLevelZeroPlugin(precision="fp32"),
    "gemini": lambda: GeminiPlugin(precision="fp32", chunk_config_dict={"chunk_size": 256}),
    "torch_fsdp": TorchFSDPPlugin,
}


class Buffered(nn.Module):
    """Buffers of all kinds; two of them count forwards in training."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.register_buffer("scale", torch.tensor(1.5))  # without dimensions
        self.register_buffer("count", torch.tensor(0))  # integer, without dimensions
        self.register_buffer("order", torch.randperm(WIDTH))
        self.register_buffer("mask", torch.arange(WIDTH) % 3 > 0)
        self.register_buffer("wide", torch.ones(WIDTH, dtype=torch.float64))
        self.register_buffer("empty", torch.empty(0))
        self.register_buffer("none", None)
        self.register_buffer("passing", torch.full((WIDTH,), 2.0), persistent=False)
        for block in self.blocks:  # tied
            block.register_buffer("shift", self.wide if block is self.blocks[0] else self.blocks[0].shift)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and torch.is_grad_enabled():
            self.count += 1
        for block in self.blocks:
            x = block(x[:, self.order] * self.mask) + block.shift.float()
        return x * self.scale + self.passing + self.count + self.empty.sum()


class BufferTwins(Twins):
    def make_plugin(self, plugin):
        return PLUGINS[plugin]()


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("plugin", PLUGINS)
@distributed(world_size=2)
def test_every_kind_of_buffer_is_as_in_one_process(tmp_path, plugin, is_sharded):
    twins = BufferTwins(Buffered, at_once=True, plugin=plugin).train(range(2))
    twins.assert_equal()
    path = tmp_path / "model" if is_sharded else tmp_path / "model.safetensors"
    twins.booster.save_model(twins.model, path, shard=is_sharded)
    dist.barrier()
    saved = {} if is_sharded else load_file(path)
    assert all(saved[name].dtype == one.dtype for name, one in twins.plain.state_dict().items() if name in saved)
    loaded = BufferTwins(Buffered, at_once=True, plugin=plugin)
    loaded.booster.load_model(loaded.model, path)
    expected = twins.model.state_dict()
    torch.testing.assert_close(dict(loaded.model.state_dict()), dict(expected), rtol=0, atol=0)
    inside = loaded.booster.unwrap_model(loaded.model)
    assert inside.blocks[0].shift is inside.blocks[1].shift is inside.wide
    for model in (loaded.model, twins.model):
        model.eval()
    x = twins.batch(7)
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(x), twins.model(x), rtol=0, atol=0)
