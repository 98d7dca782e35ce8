"""Checksums, norms and packing of many tensors: the kernels beside zlib's and torch's own calls, in one process.

    python benchmarks/collectives/flat_buffers.py [--only OPERATION] [--threads 1 2] [--quick] [--save] [--strict]

Operations: `crc32`; `norm` alone, and `check`, which also tells whether everything is finite, two norms in torch;
`pack` and `unpack` with a factor, where torch's side has its views ready and takes the faster one of its variants.
Targets: 1.3 times as fast as torch or zlib; `norm` has none, as one thread of torch's is at the limit of the memory.
The column `loss` is of the result: a check.
"""

from __future__ import annotations

import argparse
import math
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

if __name__ != "__mp_main__":  # a rank's sys.path comes from here anyway
    sys.path[:1] = map(str, Path(__file__).resolve().parents[1:3])  # benchmarks/, and booster from the checkout

import torch
from _harness.engine import Step, with_control
from _harness.pair import Comparison, Engine, Schedule, World, report_engines, save, time_engines
from _harness.targets import Target, print_targets

from booster.kernels.checksum import crc32
from booster.kernels.flat_buffers import pack, sum_of_squares, unpack

_LEAST_SPEEDUP = 1.3
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_NORM_SHAPES = ((2**20,), (50_000_000,), (10_240,) * 100, (500_000,) * 100)
_COPY_SHAPES = ((2**22,), (20_000_000,), (200_000,) * 100)
_COPY_DTYPES = (("fp32", "bf16"), ("bf16", "fp32"), ("fp32", "fp16"), ("fp16", "fp32"))
_CRC_BYTES = (2**16, 2**20, 2**28)
_SCALE = 0.37
_NUM_CHECKED = 1024
_RANDOM_NUMEL = 2**20
_SECONDS = 0.5  # of one comparison


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One operation on tensors of one dtype and some sizes; `target` is the flat buffer's dtype where there is one."""

    operation: str
    numels: tuple[int, ...]
    dtype: str
    target: str = ""
    num_threads: int = 1

    @property
    def title(self) -> str:
        """Heads the table."""
        to = f" with {self.target}" if self.target else ""
        threads = f"{self.num_threads} thread{'s' if self.num_threads > 1 else ''}"
        return f"{self.operation} of {len(self.numels)} x {self.numels[0]} {self.dtype}{to}, {threads}"

    @property
    def num_bytes(self) -> int:
        """Bytes that are read and written."""
        itemsizes = [1 if name == "bytes" else _DTYPES[name].itemsize for name in (self.dtype, self.target) if name]
        return sum(self.numels) * sum(itemsizes)

    def tensors(self) -> list[torch.Tensor]:
        """Returns random tensors, the same at every call; long ones repeat themselves."""
        generator = torch.Generator().manual_seed(0)
        if self.dtype == "bytes":
            block = torch.randint(256, (_RANDOM_NUMEL,), generator=generator, dtype=torch.uint8)
        else:
            block = torch.randn(_RANDOM_NUMEL, generator=generator).to(_DTYPES[self.dtype])
        return [block.repeat(-(-numel // _RANDOM_NUMEL))[:numel].clone() for numel in self.numels]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code: 1 with --strict if a target was missed."""
    options = _parser().parse_args(arguments)
    comparisons, targets = [], []
    for case in _cases(options):
        comparison = _compare(case, options.quick)
        print(comparison.table(), _speeds(case, comparison), sep="\n", end="\n\n", flush=True)
        comparisons.append(comparison)
        targets += [] if case.operation == "norm" else [_target(case, comparison)]
    all_met = print_targets(targets)
    if options.save:
        print("saved", save("flat_buffers", comparisons, vars(options)))
    return int(options.strict and not all_met)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", choices=sorted(_BUILDS), help="one operation; default: all")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="a fifth of the time: for a look, not for a figure")
    parser.add_argument("--save", action="store_true", help="write a JSON file under benchmarks/results/")
    parser.add_argument("--strict", action="store_true", help="exit with code 1 if a target is missed")
    return parser


def _cases(options: argparse.Namespace) -> Iterator[Case]:
    operations = [options.only] if options.only else list(_BUILDS)
    if "crc32" in operations:  # of one thread
        yield from (Case(operation="crc32", numels=(num_bytes,), dtype="bytes") for num_bytes in _CRC_BYTES)
    for num_threads in options.threads:
        for operation in operations:
            make = partial(Case, operation=operation, num_threads=num_threads)
            if operation in ("norm", "check"):
                yield from (make(numels=numels, dtype=dtype) for dtype in _DTYPES for numels in _NORM_SHAPES)
            elif operation != "crc32":
                for dtype, target in _COPY_DTYPES:
                    yield from (make(numels=numels, dtype=dtype, target=target) for numels in _COPY_SHAPES)


def _compare(case: Case, is_quick: bool) -> Comparison:
    torch.set_num_threads(case.num_threads)
    baseline, build_theirs, build_ours = _BUILDS[case.operation]
    engines = with_control(
        [
            Engine(name=baseline, build=partial(build_theirs, case)),
            Engine(name="booster", build=partial(build_ours, case)),
        ]
    )
    schedule = Schedule(steps=2000, warmup=5, seconds=_SECONDS / 5 if is_quick else _SECONDS)
    reports = report_engines(engines, [time_engines(engines, schedule)], {})
    world = World(num_threads=case.num_threads)
    return Comparison(title=case.title, world=world, schedule=schedule, engines=reports)


def _build_zlib(case: Case) -> Step:
    (data,) = (tensor.numpy() for tensor in case.tensors())
    return lambda index: zlib.crc32(data)


def _build_crc32(case: Case) -> Step:
    (data,) = (tensor.numpy() for tensor in case.tensors())
    return lambda index: crc32(data)


def _build_torch_norm(case: Case) -> Step:
    tensors = case.tensors()
    return lambda index: torch.stack(torch._foreach_norm(tensors, 2.0)).float().norm()


def _build_torch_check(case: Case) -> Step:
    tensors = case.tensors()

    def step(index: int) -> torch.Tensor:
        norm = torch.stack(torch._foreach_norm(tensors, 2.0)).float().norm()
        largest = torch.stack(torch._foreach_norm(tensors, math.inf)).float()
        return norm if bool(torch.isfinite(largest).all()) else norm * math.nan

    return step


def _build_norm(case: Case) -> Step:
    tensors = case.tensors()
    return lambda index: math.sqrt(sum_of_squares(tensors))


def _build_torch_copy(case: Case) -> Step:
    sources, targets = _sides(case)
    by_product = partial(_product_by_product, sources, targets)
    in_two_passes = partial(_in_two_passes, sources, targets)
    return _checked(_faster(by_product, in_two_passes), targets)


def _product_by_product(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        torch.mul(source, _SCALE, out=target)


def _in_two_passes(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    torch._foreach_copy_(list(targets), list(sources))
    torch._foreach_mul_(list(targets), _SCALE)


def _faster(*variants: Callable[[], None]) -> Callable[[], None]:
    schedule = Schedule(steps=5, warmup=2)
    engines = [Engine(name=str(number), build=partial(_as_step, variant)) for number, variant in enumerate(variants)]
    _, samples = time_engines(engines, schedule)
    return min(variants, key=lambda variant: min(samples[str(variants.index(variant))].seconds))


def _as_step(variant: Callable[[], None]) -> Step:
    def step(index: int) -> float:
        variant()
        return 0.0

    return step


def _build_copy(case: Case) -> Step:
    tensors, flat = _tensors_and_flat(case)
    if case.operation == "pack":
        return _checked(lambda: pack(tensors, flat, _SCALE), [flat])
    return _checked(lambda: unpack(flat, tensors, _SCALE), tensors)


def _sides(case: Case) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    tensors, flat = _tensors_and_flat(case)
    parts = list(flat.split(list(case.numels)))
    return (tensors, parts) if case.operation == "pack" else (parts, tensors)


def _tensors_and_flat(case: Case) -> tuple[list[torch.Tensor], torch.Tensor]:
    tensors = case.tensors()
    return tensors, torch.cat(tensors).to(_DTYPES[case.target])


def _checked(variant: Callable[[], None], results: Sequence[torch.Tensor]) -> Step:
    last = results[-1][-_NUM_CHECKED:]

    def step(index: int) -> torch.Tensor:
        variant()
        return last.float().sum()

    return step


_BUILDS = {
    "crc32": ("zlib", _build_zlib, _build_crc32),
    "norm": ("torch", _build_torch_norm, _build_norm),
    "check": ("torch", _build_torch_check, _build_norm),
    "pack": ("torch", _build_torch_copy, _build_copy),
    "unpack": ("torch", _build_torch_copy, _build_copy),
}


def _speeds(case: Case, comparison: Comparison) -> str:
    speeds = [
        f"{engine.name} {case.num_bytes / engine.figures.seconds.median / 1e9:.1f}"
        for engine in comparison.engines
        if engine.figures is not None and not engine.name.endswith("(control)")
    ]
    return f"GB/s: {', '.join(speeds)}"


def _target(case: Case, comparison: Comparison) -> Target:
    ours, control = comparison.engine("booster").figures, comparison.control.figures
    ratio = None if ours is None else ours.ratio
    return Target(
        what=f"speed over {comparison.engines[0].name}'s, {case.title}",
        value=None if ratio is None else 1 / ratio.median,
        low=_LEAST_SPEEDUP,
        unit="x",
        interval=None if ratio is None else (1 / ratio.high, 1 / ratio.low),
        control=None if control is None else 1 / control.ratio.median,
    )


if __name__ == "__main__":
    sys.exit(main())
