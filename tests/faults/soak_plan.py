"""What a soak will do, as data: drawn from a seed, written to a file, read from it again."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

# Samples of all ranks in a batch: every number of ranks divides it, so that a step is over the same samples anywhere.
GLOBAL_BATCH = 12
FORMAT = "soak 1"

# Names of layouts as `soak_rank.LAYOUTS` makes them, and the worlds that each runs in.
WORLDS = {
    "one device": (1,),
    "ddp": (1, 2, 3, 4),
    "zero 1": (1, 2, 3, 4),
    "zero 2": (2, 3, 4),
    "gemini": (1, 2, 3, 4),
    "gemini on the host": (2, 3, 4),
    "fsdp": (2, 3, 4),
    "fsdp grad op": (2, 3, 4),
    "fsdp hybrid": (4,),
    "tensor parallel": (2, 4),
    "tensor parallel zero 1": (4,),
    "pipeline": (2, 4),
    "pipeline zero 1": (4,),
    "tensor parallel pipeline": (4,),
}

# Where ranks are killed, and up to which call. Most of the operations strike in the middle of something.
PLACES = {
    "boost": 1,
    "load": 1,
    "data": 12,
    "forward": 12,
    "pipeline": 12,
    "backward": 12,
    "clip": 8,
    "step": 8,
    "save": 3,
    "save plan": 3,
    "save write": 3,
    "commit": 3,
    "all_gather": 40,
    "all_reduce": 20,
    "reduce_scatter": 10,
    "broadcast": 6,
    "send": 10,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What holds for a whole soak.

    Attributes:
        seed: Of all that is drawn.
        num_cycles: How many times ranks are started, the last cycle included.
        num_steps: How many batches are trained on in all.
        accumulation: Batches per step of the optimizer.
        same_layout: Keep one layout all along: then the result is the same bit for bit, and there is dropout.
    """

    seed: int
    num_cycles: int
    num_steps: int
    accumulation: int
    same_layout: bool = False

    @property
    def dropout(self) -> float:
        """Random streams are those of ranks: another layout draws other numbers."""
        return 0.1 if self.same_layout else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cycle:
    """One start of the ranks: where, what is saved, and how it ends.

    Attributes:
        layout: A name of `WORLDS`.
        world_size: How many ranks.
        num_steps: How many batches they go on for if nothing happens.
        save_every: After how many batches they save.
        use_async: Whether in the background.
        by_pointer: Load from `root/latest`, not from `root`.
        ends: "kill" by a fault at a place; "moment": SIGKILL of one rank at a moment; "power": of all; "done": of none.
        rank: Who is killed.
        at: Where, as `Fault.at`.
        call: In which call of that.
        seconds: When, after the start.
    """

    layout: str
    world_size: int
    num_steps: int
    save_every: int
    use_async: bool
    by_pointer: bool = False
    ends: str = "done"
    rank: int = 0
    at: str = ""
    call: int = 1
    seconds: float = 0.0

    def __str__(self) -> str:
        end = {
            "done": "no fault",
            "kill": f"kill rank {self.rank} at {self.at} number {self.call}",
            "moment": f"SIGKILL of rank {self.rank} after {self.seconds:.1f} s",
            "power": f"SIGKILL of all ranks after {self.seconds:.1f} s",
        }[self.ends]
        saves = f"saves every {self.save_every}{' in the background' * self.use_async}"
        return f"{self.layout} on {self.world_size}, {saves}, {end}"


def draw(settings: Settings) -> list[Cycle]:
    """Returns the cycles of a soak; the same for the same settings."""
    stream = random.Random(f"soak {settings.seed} {settings.same_layout}")
    cases = [(layout, size) for layout, sizes in WORLDS.items() for size in sizes if size > 1]
    alone = [(layout, 1) for layout, sizes in WORLDS.items() if 1 in sizes]
    kept = stream.choice(cases)
    # Each cycle goes so far that all of them together come a good way beyond the last, whatever their kills cost.
    reach = max(2, 2 * settings.num_steps // settings.num_cycles)
    cycles = []
    for _ in range(settings.num_cycles - 1):
        layout, size = kept if settings.same_layout else stream.choice(alone if stream.random() < 0.1 else cases)
        cycle = Cycle(
            layout=layout,
            world_size=size,
            num_steps=stream.randint(reach // 2 + 1, reach + 2),
            save_every=stream.randint(1, 4),
            use_async=stream.random() < 0.4,
            by_pointer=stream.random() < 0.5,
        )
        cycles.append(_with_an_end(cycle, stream))
    layout, size = kept if settings.same_layout else stream.choice(cases)
    last = Cycle(layout=layout, world_size=size, num_steps=settings.num_steps, save_every=25, use_async=False)
    return [*cycles, last]


def _with_an_end(cycle: Cycle, stream: random.Random) -> Cycle:
    rank, lot = stream.randrange(cycle.world_size), stream.random()
    at = stream.choice(list(PLACES))
    call, seconds = stream.randint(1, PLACES[at]), round(stream.uniform(0.1, 1.5), 2)
    if lot < 0.65:
        return replace(cycle, ends="kill", rank=rank, at=at, call=call)
    if lot < 0.8:
        return replace(cycle, ends="moment", rank=rank, seconds=seconds)
    return replace(cycle, ends="power", seconds=seconds) if lot < 0.9 else cycle


def write(path: Path, settings: Settings, cycles: list[Cycle], failure: str) -> None:
    """Writes a soak that failed, to be run again and to stay as a test."""
    document = {
        "format": FORMAT,
        "failure": failure,
        "settings": asdict(settings),
        "cycles": [asdict(cycle) for cycle in cycles],
    }
    path.write_text(json.dumps(document, indent=1) + "\n")


def read(path: Path) -> tuple[Settings, list[Cycle]]:
    """Returns what `write` wrote."""
    document: dict[str, Any] = json.loads(path.read_text())
    if document["format"] != FORMAT:
        raise ValueError(f"{path} is of the format {document['format']!r}, not {FORMAT!r}")
    return Settings(**document["settings"]), [Cycle(**cycle) for cycle in document["cycles"]]
