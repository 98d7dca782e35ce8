"""Damage to saved files, as data: what disks, copies and people do to them."""

from __future__ import annotations

import random
from dataclasses import dataclass

BLOCK_BYTES = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """New contents of some files.

    Attributes:
        what: What happened, for the test's message.
        contents: New bytes by file name; None: the file is gone.
        offset: The first byte that changed, where it is one file's.
        is_addition: Only files were added that do not belong to the checkpoint.
    """

    what: str
    contents: dict[str, bytes | None]
    offset: int | None = None
    is_addition: bool = False


def random_damages(files, seed, number):
    """Yields seeded damages of single files: bits, bytes, blocks.

    Args:
        files: Bytes by name; empty ones cannot be damaged.
        seed: Which of them.
        number: How many.
    """
    rng = random.Random(seed)
    names = sorted(name for name, raw in files.items() if raw)
    for count in range(number):
        name = names[count % len(names)]
        way = rng.choice((_flip, _flip, _flip, _overwrite, _zero_block))
        what, offset, damaged = way(rng, files[name])
        if damaged != files[name]:
            yield Damage(what=f"seed {seed}, number {count}: {what} of {name}", contents={name: damaged}, offset=offset)


def whole_file_damages(files, others):
    """Yields what can happen to whole files.

    Args:
        files: Bytes by name.
        others: The files of another save of the same names.
    """
    for name, raw in sorted(files.items()):
        yield Damage(what=f"{name} deleted", contents={name: None})
        yield Damage(what=f"{name} emptied", contents={name: b""})
        yield Damage(what=f"{name} cut", contents={name: raw[: len(raw) // 2]})
        yield Damage(what=f"{name} longer", contents={name: raw + b"\0"})
        yield Damage(what=f"a copy of {name} added", contents={f"copy-{name}": raw}, is_addition=True)
        if others[name] != raw:
            yield Damage(what=f"{name} from another save", contents={name: others[name]})
        for twin in _neighbours(files, name):
            if files[twin] != raw:
                yield Damage(what=f"{name} over {twin}", contents={twin: raw})
                yield Damage(what=f"{name} and {twin} swapped", contents={twin: raw, name: files[twin]})


def _neighbours(files, name):
    names = sorted(files)
    place = names.index(name)
    return {names[(place + step) % len(names)] for step in (1, 2, 5)} - {name}


def _position(rng, raw):
    # Heads are mostly padding: three times out of four, a byte that says something.
    if rng.random() < 0.25:
        return rng.randrange(len(raw))
    return rng.choice([place for place, byte in enumerate(raw) if byte != ord(" ")])


def _flip(rng, raw):
    damaged, place, bit = bytearray(raw), _position(rng, raw), rng.randrange(8)
    damaged[place] ^= 1 << bit
    return f"bit {bit} of byte {place}", place, bytes(damaged)


def _overwrite(rng, raw):
    start = _position(rng, raw)
    new = rng.randbytes(rng.randint(2, 16))[: len(raw) - start]
    return f"bytes {start} to {start + len(new)}", start, raw[:start] + new + raw[start + len(new) :]


def _zero_block(rng, raw):
    start = _position(rng, raw) // BLOCK_BYTES * BLOCK_BYTES
    stop = min(start + BLOCK_BYTES, len(raw))
    return f"zeroed block {start} to {stop}", start, raw[:start] + bytes(stop - start) + raw[stop:]
