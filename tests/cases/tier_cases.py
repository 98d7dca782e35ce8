"""Disk tiers of which nothing is left, and random use of any tier that is compared with plain bytes."""

import contextlib
import gc
import os
import threading
from pathlib import Path

import torch
from disk_cases import random_bytes

from booster.kernels.disk_io import ALIGNMENT, aligned_buffer
from booster.plugins.gemini import nvme_tier
from booster.plugins.gemini.nvme_tier import DiskTier

DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn]
LONG = nvme_tier._BOUNCE_BUFFER_BYTES + 10 * ALIGNMENT  # too long for a detour


@contextlib.contextmanager
def disk_tier_in(directory):
    tier = DiskTier(str(directory))
    yield tier
    tier.close()
    assert not any(str(directory) in target for target in descriptors())
    assert list(directory.iterdir()) == []


def descriptors():
    """Returns what this process's descriptors lead to."""
    gc.collect()
    links = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    return sorted(os.readlink(link) for link in links if os.path.lexists(link))


def num_threads():
    return threading.active_count()  # a thread that was joined may still be a task of the system


def file_of(tier):
    return tier._file._path


def read(block, dtype=torch.uint8):
    tensor = aligned_buffer(block.num_bytes).fill_(0xA5)
    block.read_into(tensor).wait()
    return tensor.view(dtype)


def written(tier, data):
    block = tier.new_block(data.nbytes)
    block.write_from(data).wait()
    return block


def same(one, other):
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def some_tensor(generator, num_bytes):
    """Returns an uninitialised tensor of some format, which begins at any address or at an aligned one."""
    dtype = generator.choice([dtype for dtype in DTYPES if num_bytes % dtype.itemsize == 0])
    skipped = generator.choice([0, 0, 1, 3, ALIGNMENT // dtype.itemsize, 700]) * dtype.itemsize
    return aligned_buffer(skipped + num_bytes)[skipped:].view(dtype)


def some_size(generator):
    pages = generator.choice([0, 1, 2, 20, 40])
    return max(0, pages * ALIGNMENT + generator.choice([0, 0, 0, -8, 2, 1, 100, 4095]))


def run_random_actions(tier, generator, num_actions):
    """Makes, writes, reads, shows and frees blocks at random, and compares all they give with plain bytes."""
    blocks, expected, shown, under_way = {}, {}, {}, []

    def finish(count):
        for _ in range(min(count, len(under_way))):
            transfer, tensor, wanted = under_way.pop(generator.randrange(len(under_way)))
            transfer.wait()
            assert same(tensor, wanted)
            transfer.wait()

    for number in range(num_actions):
        action = generator.choices(["new", "write", "read", "show", "drop", "free", "finish"], [3, 8, 8, 3, 3, 1, 5])[0]
        name = generator.choice(list(blocks)) if blocks else None
        if action == "new" or name is None:
            size = some_size(generator)
            blocks[number] = tier.new_block(size)
            assert blocks[number].is_empty
            expected[number] = torch.zeros(size, dtype=torch.uint8)
        elif action == "write":
            tensor = some_tensor(generator, blocks[name].num_bytes)
            tensor.view(torch.uint8).copy_(random_bytes(tensor.nbytes, number))
            expected[name] = tensor.view(torch.uint8).clone()
            under_way.append((blocks[name].write_from(tensor), tensor, expected[name].clone()))
            assert not blocks[name].is_empty
        elif action == "read":
            tensor = some_tensor(generator, blocks[name].num_bytes)
            under_way.append((blocks[name].read_into(tensor), tensor, expected[name].clone()))
        elif action == "show":
            finish(len(under_way))
            shown[name] = blocks[name].as_tensor(torch.uint8)
            assert torch.equal(shown[name], expected[name])
            shown[name][: number % 7] = number % 251
            expected[name][: number % 7] = number % 251
        elif action == "drop":
            shown.pop(name, None)
        elif action == "free":
            blocks.pop(name).free()
            expected.pop(name)
        else:
            finish(4)
        assert tier.bytes_held == sum(block.num_bytes for block in blocks.values())
        for name in shown.keys() & blocks.keys():
            if generator.random() < 0.1:
                finish(len(under_way))
                assert torch.equal(shown[name], expected[name])
    finish(len(under_way))
    for name, block in blocks.items():
        assert torch.equal(read(block), expected[name])
