"""The text of the demo: the source of Python's own standard library, as bytes, split into training and validation."""

from __future__ import annotations

import sysconfig
import zlib
from pathlib import Path

import torch
from torch.utils.data import Dataset

MAX_BYTES = 8_000_000
VALIDATION_SHARE = 20  # one file in twenty


def read_library(is_validation: bool) -> torch.Tensor:
    """Returns the bytes of the library's files, joined in the order of their names, as uint8."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [path for path in root.rglob("*.py") if not {"site-packages", "test", "tests"} & set(path.parts)]
    chosen = [
        path
        for path in sorted(files)
        if (zlib.crc32(str(path.relative_to(root)).encode()) % VALIDATION_SHARE == 0) == is_validation
    ]
    data = b"".join(path.read_bytes() for path in chosen)[:MAX_BYTES]
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def unigram_entropy(data: torch.Tensor) -> float:
    """Returns the entropy of single bytes in nats: the loss of the best model that looks at no context."""
    shares = torch.bincount(data.int(), minlength=256).double() / len(data)
    shares = shares[shares > 0]
    return float(-(shares * shares.log()).sum())


class ByteWindows(Dataset):
    """Windows of `length` bytes, one after the other."""

    def __init__(self, data: torch.Tensor, length: int) -> None:
        self.data, self.length = data, length

    def __len__(self) -> int:
        return len(self.data) // self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.data[index * self.length : (index + 1) * self.length].long()
