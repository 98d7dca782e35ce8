"""The training state that benchmarks/checkpoint saves: a GPT under the DDP plugin, and the states of its AdamW."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from _harness.gpt import GPTSize, batches, make_gpt, next_token_loss
from torch import nn

__all__ = ["BYTES_PER_PARAMETER", "TrainingState", "size_of"]

BYTES_PER_PARAMETER = 12  # an fp32 weight and AdamW's two fp32 states
_WIDTHS = (1024, 768, 512, 256, 128, 64)
_FEWEST_LAYERS = 6
_HEAD_WIDTH = 64


def size_of(num_bytes: int) -> GPTSize:
    """Returns the shape of a GPT whose weights and AdamW states take about that many bytes."""
    num_parameters = num_bytes // BYTES_PER_PARAMETER
    width = next((width for width in _WIDTHS if _layers(width, num_parameters) >= _FEWEST_LAYERS), 32)
    return GPTSize(
        width=width,
        layers=max(1, _layers(width, num_parameters)),
        heads=max(1, width // _HEAD_WIDTH),
        vocabulary=_vocabulary(width),
        sequence=32,  # the one step it does does not affect speed
        samples=1,
    )


def _layers(width: int, num_parameters: int) -> int:
    return round((num_parameters - 2 * _vocabulary(width) * width) / (12 * width**2))


def _vocabulary(width: int) -> int:
    return 8192 if width >= 256 else 256


class TrainingState:
    """A boosted model and optimizer after one step.

    The step makes the optimizer's states; then all values are replaced by random ones, the same on every rank, so that
    nothing below can save time on zeros.

    Attributes:
        booster: With the TorchDDPPlugin.
        model: The boosted model.
        optimizer: The boosted optimizer.
        num_bytes: Of all tensors.
    """

    def __init__(self, size: GPTSize) -> None:
        from booster import Booster

        self.booster = Booster(plugin="torch_ddp")
        model = make_gpt(size)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        self.model, self.optimizer, *_ = self.booster.boost(model, optimizer)
        self._step(size)
        self.num_bytes = sum(tensor.nbytes for tensor in self.tensors.values())
        self.fill()

    @property
    def module(self) -> nn.Module:
        """The model in plain torch, for the peers."""
        return self.model.unwrap()

    @property
    def plain_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer in plain torch, for the peers."""
        return self.optimizer.unwrap()

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor of both, live, by a name of its own. Ask again after a load, which may have put others there."""
        return dict(self._named_tensors())

    @torch.no_grad()
    def fill(self) -> None:
        """Gives every tensor its random values."""
        generator = torch.Generator().manual_seed(1)
        for tensor in self.tensors.values():
            tensor.uniform_(generator=generator)

    @torch.no_grad()
    def clear(self) -> None:
        """Zeroes every tensor: what is there after a load was loaded."""
        for tensor in self.tensors.values():
            tensor.zero_()

    def fingerprint(self) -> int:
        """Returns a checksum of all bytes."""
        checksum = 0
        for tensor in self.tensors.values():
            checksum = zlib.crc32(tensor.detach().view(-1).view(torch.uint8).numpy(), checksum)
        return checksum

    def _step(self, size: GPTSize) -> None:
        tokens, targets = batches(size, dist.get_rank(), dist.get_world_size())(0)
        self.booster.backward(next_token_loss(self.model(tokens), targets), self.optimizer)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.module.named_parameters():
            yield f"model.{name}", parameter.detach()
            for key, value in self.plain_optimizer.state[parameter].items():
                yield f"optimizer.{name}.{key}", value
