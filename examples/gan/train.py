"""Trains a generative adversarial network on handwritten digits: two models, two optimizers, boosted one by one.

Run: booster run --nproc-per-node 2 examples/gan/train.py --plugin low_level_zero
"""

from __future__ import annotations

import argparse
from itertools import pairwise
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from booster import Booster, launch_from_torch

NOISE = 16


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("-p", "--plugin", default="torch_ddp", help="name of a plugin, or none")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--max-steps", type=int, default=None, help="of all epochs together")
    parser.add_argument("--batch-size", type=int, default=128, help="of all ranks together")
    parser.add_argument("--output", type=Path, default=Path("runs/gan"))
    return parser.parse_args(arguments)


def layers(*widths: int) -> list[nn.Module]:
    return [one for a, b in pairwise(widths) for one in (nn.Linear(a, b), nn.LeakyReLU(0.2))]


def train(booster: Booster, arguments: argparse.Namespace) -> tuple[list[tuple[float, float]], torch.Tensor]:
    """Returns the losses (discriminator, generator) of every step of this rank, and 16 images."""
    images = torch.tensor(load_digits().data, dtype=torch.float32) / 8 - 1
    batch_size = arguments.batch_size // booster.plugin.dp_size
    loader = booster.prepare_dataloader(TensorDataset(images), batch_size, shuffle=True, drop_last=True)
    torch.manual_seed(0)  # equal weights on all ranks
    generator = nn.Sequential(*layers(NOISE, 128, 256), nn.Linear(256, 64), nn.Tanh())
    discriminator = nn.Sequential(*layers(64, 256, 128), nn.Linear(128, 1))
    g_optimizer = torch.optim.Adam(generator.parameters(), lr=3e-4, betas=(0.5, 0.999))
    d_optimizer = torch.optim.Adam(discriminator.parameters(), lr=3e-4, betas=(0.5, 0.999))
    generator, g_optimizer, *_ = booster.boost(generator, g_optimizer)
    discriminator, d_optimizer, *_ = booster.boost(discriminator, d_optimizer)

    losses = []
    noise = torch.Generator().manual_seed(1 + booster.plugin.dp_rank)
    for (real,) in (batch for _ in range(arguments.epochs) for batch in loader):
        real = real.to(booster.device)
        z_BN = torch.randn(len(real), NOISE, generator=noise).to(booster.device)
        # The discriminator learns from real images, and from others through which no gradient flows.
        fake = generator(z_BN)
        on_real, on_fake = discriminator(real), discriminator(fake.detach())
        d_loss = F.softplus(-on_real).mean() + F.softplus(on_fake).mean()
        booster.backward(d_loss, d_optimizer)
        d_optimizer.step()
        d_optimizer.zero_grad()
        # The generator learns through the discriminator, whose gradients of this backward are dropped.
        g_loss = F.softplus(-discriminator(fake)).mean()
        booster.backward(g_loss, g_optimizer)
        g_optimizer.step()
        g_optimizer.zero_grad()
        d_optimizer.zero_grad()
        losses.append((float(d_loss.detach()), float(g_loss.detach())))
        if len(losses) == arguments.max_steps:
            break
    models, optimizers = {"g": generator, "d": discriminator}, {"g": g_optimizer, "d": d_optimizer}
    booster.save(arguments.output / "checkpoint", models, optimizers)
    with torch.no_grad():
        z_BN = torch.randn(16, NOISE, generator=torch.Generator().manual_seed(0)).to(booster.device)
        return losses, generator(z_BN).view(16, 8, 8).cpu()


def main() -> None:
    arguments = parse_arguments()
    launch_from_torch(seed=42)
    booster = Booster(plugin=None if arguments.plugin == "none" else arguments.plugin, mixed_precision="fp32")
    losses, images = train(booster, arguments)
    booster.print(f"{arguments.plugin}: discriminator {losses[-1][0]:.3f}, generator {losses[-1][1]:.3f}")
    if booster.is_main_process:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        sheet = images.view(2, 8, 8, 8).transpose(1, 2).reshape(16, 64)
        pyplot.imsave(
            arguments.output / "digits.png", sheet.repeat_interleave(6, 0).repeat_interleave(6, 1), cmap="gray"
        )


if __name__ == "__main__":
    main()
