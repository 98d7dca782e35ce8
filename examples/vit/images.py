"""Small labelled images: scikit-learn's handwritten digits, or CIFAR-10 from its binary files."""

from __future__ import annotations

from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch.utils.data import Dataset

SIZE, NUM_CLASSES = 32, 10
NUM_HELD_OUT_DIGITS = 256
CIFAR_RECORD_BYTES = 1 + 3 * SIZE * SIZE  # the label, then red, green and blue


class LabelledImages(Dataset):
    """Images of shape (3, 32, 32) with their labels, under the names of the model's arguments."""

    def __init__(self, pixels: torch.Tensor, labels: torch.Tensor) -> None:
        self.pixels, self.labels = pixels, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"pixel_values": self.pixels[index], "labels": self.labels[index]}


def read_digits() -> tuple[LabelledImages, LabelledImages]:
    """Returns the images to train on and those held out: 8 x 8 grey ones, enlarged, the same in all three colours."""
    digits = load_digits()
    grey = torch.from_numpy(digits.images).float()[:, None] / 8 - 1
    pixels = torch.nn.functional.interpolate(grey, (SIZE, SIZE), mode="bilinear").expand(-1, 3, -1, -1)
    # They lie in the order of their writers.
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
    pixels, labels = pixels[order], torch.from_numpy(digits.target)[order]
    held_out, rest = slice(NUM_HELD_OUT_DIGITS), slice(NUM_HELD_OUT_DIGITS, None)
    return LabelledImages(pixels[rest], labels[rest]), LabelledImages(pixels[held_out], labels[held_out])


def read_cifar10(folder: Path) -> tuple[LabelledImages, LabelledImages]:
    """Returns the images to train on and those held out, from the folder cifar-10-batches-bin."""
    names = [f"data_batch_{number}.bin" for number in range(1, 6)]
    return _read_cifar_files(folder, names), _read_cifar_files(folder, ["test_batch.bin"])


def _read_cifar_files(folder: Path, names: list[str]) -> LabelledImages:
    content = b"".join((folder / name).read_bytes() for name in names)
    records = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(-1, CIFAR_RECORD_BYTES)
    pixels = records[:, 1:].reshape(-1, 3, SIZE, SIZE).float() / 127.5 - 1
    return LabelledImages(pixels, records[:, 0].long())
