"""Models that choose: a codebook of which a batch picks some entries, and experts of which every rank uses others.

What is chosen must not depend on rounding, or a step in low precision has no reference: the codes lie far apart for the
inputs they get, and an expert is chosen by an integer of the batch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from zoo.entry import Batch, ZooEntry

_NUM_CODES = 8
_NUM_EXPERTS = 5


def corners() -> torch.Tensor:
    """Returns (codes, 3): the corners of a cube, 2 apart."""
    index = torch.arange(_NUM_CODES)
    return torch.stack([(index >> bit) & 1 for bit in range(3)], dim=1) * 2.0 - 1.0


class VectorQuantizer(nn.Module):
    """Replaces vectors by the nearest code; the gradient passes straight through (van den Oord et al., VQ-VAE, 2017).

    Codes that no vector picked get a gradient of zeros, not none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.codebook = nn.Parameter(corners() * 0.9)

    def forward(self, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Maps (batch, 3) to the codes, and to the loss of codebook and commitment."""
        with torch.no_grad():
            chosen = (z[:, None, :].float() - self.codebook.float()).square().sum(dim=-1).argmin(dim=1)
        code = self.codebook[chosen]
        loss = F.mse_loss(code, z.detach()) + 0.25 * F.mse_loss(z, code.detach())
        return z + (code - z).detach(), loss


class VQAutoencoder(nn.Module):
    """Encoder, codebook, decoder. The encoder adds a small correction to its input, which lies near a code."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 3))
        self.quantize = VectorQuantizer()
        self.decode = nn.Sequential(nn.Linear(3, 11), nn.Tanh(), nn.Linear(11, 3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Maps (batch, 3) to its reconstruction, and to the quantizer's loss."""
        codes, loss = self.quantize(x + 0.2 * self.encode(x))
        return self.decode(codes), loss


class RoutedExperts(nn.Module):
    """Each sample goes through one expert, chosen by its kind. Experts without samples are not called.

    Every rank uses other experts, others in every step, and some step leaves one out on all ranks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 9)
        self.gates = nn.Embedding(_NUM_EXPERTS, 1)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(9, width), nn.Tanh(), nn.Linear(width, 9)) for width in (4, 5, 6, 7, 8)
        )
        self.head = nn.Linear(9, 4)

    def forward(self, x: torch.Tensor, kind: torch.Tensor) -> torch.Tensor:
        """Maps (batch, 6) vectors and (batch,) kinds to (batch, 4)."""
        hidden = torch.tanh(self.trunk(x))
        routed = torch.zeros_like(hidden)
        for index, expert in enumerate(self.experts):
            places = (kind == index).nonzero().flatten()
            if len(places) > 0:
                routed = routed.index_add(0, places, expert(hidden[places]).to(hidden.dtype))
        gated = torch.sigmoid(self.gates(kind)).to(hidden.dtype) * routed
        return self.head(hidden + gated)


def _near_codes(num_samples: int, generator: torch.Generator) -> Batch:
    """Vectors within 0.3 of a corner: the correction, 0.2 of a tanh network's output, can't reach the next one."""
    chosen = torch.randint(_NUM_CODES, (num_samples,), generator=generator)
    noise = (torch.rand(num_samples, 3, generator=generator) - 0.5) * 0.6
    return {"x": corners()[chosen] + noise}


def _routed(num_samples: int, generator: torch.Generator) -> Batch:
    """Contiguous kinds, beginning with another one at every step: ranks share at most one expert."""
    first = torch.randint(_NUM_EXPERTS, (1,), generator=generator)
    kind = (first + torch.arange(num_samples) * 4 // num_samples) % _NUM_EXPERTS
    x = torch.randn(num_samples, 6, generator=generator)
    return {"x": x, "kind": kind, "y": torch.randint(4, (num_samples,), generator=generator)}


def _vq_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    reconstructed, loss = model(batch["x"])
    return F.mse_loss(reconstructed, batch["x"]) + loss


def _routed_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"], batch["kind"]), batch["y"])


DISCRETE_MODELS = (
    ZooEntry(name="vq_autoencoder", construct=VQAutoencoder, sample=_near_codes, loss=_vq_loss),
    ZooEntry(
        name="routed_experts",
        construct=RoutedExperts,
        sample=_routed,
        loss=_routed_loss,
        uses_unused_parameters=True,
    ),
)
