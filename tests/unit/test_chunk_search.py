"""Which parameters share a chunk, where they lie in it, and which size of chunks wastes least: against naive twins."""

from __future__ import annotations

import math
import random
import time
from itertools import pairwise

import pytest
import torch
from torch import nn

from booster.plugins.gemini.chunk_layout import (
    ChunkLayout,
    ParamInfo,
    ParamRegion,
    default_step,
    plan_chunks,
    search_chunk_numel,
    unit_numel,
)

FORMATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8]


def facts(*shapes, dtype=torch.float32, trains=True):
    return [ParamInfo(shape=tuple(shape), dtype=dtype, trains=trains) for shape in shapes]


def random_model(seed):
    """Parameters of several kinds with scalars, empty ones and giants, and the numbers of their modules."""
    generator = random.Random(seed)
    formats = generator.sample(FORMATS, generator.choice([1, 1, 2, 3]))
    parameters, module_of = [], []
    for module in range(generator.randrange(1, 12)):
        for _ in range(generator.choice([1, 2, 2, 3, 5])):
            shape = tuple(generator.choice([1, 2, 5, 16, 40]) for _ in range(generator.randrange(0, 4)))
            if generator.random() < 0.1:
                shape = (0, 7)
            if generator.random() < 0.05:
                shape = (generator.randrange(1000, 20000),)
            trains = generator.random() < 0.8
            parameters.append(ParamInfo(shape=shape, dtype=generator.choice(formats), trains=trains))
            module_of.append(module)
    return generator, parameters, module_of


def random_plan(seed):
    generator, parameters, module_of = random_model(seed)
    plan = plan_chunks(
        parameters,
        num_shards=generator.choice([1, 2, 3, 4, 7, 8]),
        chunk_numel=generator.choice([1, 50, 300, 1000, 5000, 10**6]),
        module_of=generator.choice([None, module_of]),
        outlier_numel=generator.choice([None, 0, 100, 2000]),
    )
    return parameters, module_of, plan


def naive_waste(parameters, num_shards, chunk_numel, outlier_numel, module_of):
    """Elements of no parameter, one chunk after another: sizes in a list, the last one open."""
    numel_of = {}
    for number, parameter in enumerate(parameters):
        owner = number if module_of is None else module_of[number]
        numel_of.setdefault((parameter.dtype, parameter.trains), []).append((owner, parameter.numel))
    wasted = -sum(parameter.numel for parameter in parameters)
    for (dtype, _), members in numel_of.items():
        unit = num_shards * (64 if dtype == torch.uint8 else 32)
        chunks, alone, position = [], [], 0
        members = [member for member in members if member[1] > 0]
        while position < len(members):
            if outlier_numel is not None and members[position][1] > outlier_numel:
                alone.append(aligned(members.pop(position)[1]))
            else:
                position += 1
        while members:
            run = [aligned(numel) for owner, numel in members]
            while len({owner for owner, _ in members[: len(run)]}) > 1:
                run.pop()
            del members[: len(run)]
            for numel in [sum(run)] if sum(run) <= chunk_numel else run:
                if numel > chunk_numel:
                    alone.append(numel)
                elif chunks and chunks[-1] + numel <= chunk_numel:
                    chunks[-1] += numel
                else:
                    chunks.append(numel)
        if not chunks and not alone:
            alone.append(0)
        wasted += sum(chunk_numel for _ in chunks[:-1])
        wasted += sum(max(unit, math.ceil(used / unit) * unit) for used in alone + chunks[-1:])
    return wasted


def aligned(numel):
    return math.ceil(numel / 8) * 8


# As many as a change is soon found out by; the rest in the long run.
SEEDS = pytest.mark.parametrize(
    "seed", [*range(60), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(60, 300))]
)


@SEEDS
def test_every_parameter_has_one_place(seed):
    parameters, _, plan = random_plan(seed)
    seen = [place.index for chunk in plan.chunks for place in chunk.regions]
    assert sorted(seen) == list(range(len(parameters)))
    for chunk in plan.chunks:
        assert chunk.regions
        assert [place.index for place in chunk.regions] == sorted(place.index for place in chunk.regions)
        end = 0
        for place in chunk.regions:
            parameter = parameters[place.index]
            assert (chunk.dtype, chunk.trains) == (parameter.dtype, parameter.trains)
            assert place.shape == parameter.shape
            assert (place.start, place.stop) == (aligned(end), aligned(end) + parameter.numel)
            end = place.stop
        assert end <= chunk.numel
        assert chunk.used_numel == sum(parameters[place.index].numel for place in chunk.regions)
    assert [chunk.regions[0].index for chunk in plan.chunks] == sorted(chunk.regions[0].index for chunk in plan.chunks)


@SEEDS
def test_parts_of_all_ranks_tile_every_parameter(seed):
    parameters, _, plan = random_plan(seed)
    for chunk in plan.chunks:
        owners = torch.zeros(chunk.numel, dtype=torch.int64)
        covered = [0] * len(chunk.regions)
        for rank in range(chunk.num_shards):
            shard = chunk.shard_range(rank)
            assert shard.stop - shard.start == chunk.shard_numel
            for part in chunk.parts(rank):
                place = chunk.regions[part.region_index]
                start, stop = part.span
                assert start == covered[part.region_index] < stop
                covered[part.region_index] = stop
                in_chunk = slice(place.start + start, place.start + stop)
                assert part.in_shard == slice(in_chunk.start - shard.start, in_chunk.stop - shard.start)
                assert 0 <= part.in_shard.start < part.in_shard.stop <= chunk.shard_numel
                owners[in_chunk] += 1
        assert covered == [parameters[place.index].numel for place in chunk.regions]
        padding = torch.zeros(chunk.numel, dtype=torch.int64)
        for one in chunk.padding:
            padding[one] += 1
        assert torch.equal(owners, 1 - padding)


@SEEDS
def test_sizes(seed):
    """Shards are aligned in every format. Chunks that several share have one size, but for the last of each kind."""
    _, _, plan = random_plan(seed)
    shared = {}
    for chunk in plan.chunks:
        assert chunk.numel == chunk.shard_numel * chunk.num_shards > 0
        assert chunk.shard_numel * chunk.dtype.itemsize % 64 == 0
        assert chunk.shard_numel % 32 == 0
        assert chunk.num_bytes == chunk.numel * chunk.dtype.itemsize
        if chunk.numel != plan.chunk_numel:
            used = sum(aligned(place.stop - place.start) for place in chunk.regions)
            assert chunk.numel - used < unit_numel(chunk.dtype, chunk.num_shards) or used == 0
        if sum(place.stop > place.start for place in chunk.regions) > 1:
            shared.setdefault((chunk.dtype, chunk.trains), []).append(chunk.numel)
    for sizes in shared.values():
        assert set(sizes[:-1]) <= {plan.chunk_numel}
        assert sizes[-1] <= plan.chunk_numel


@SEEDS
def test_reported_waste_is_what_the_chunks_waste(seed):
    generator, parameters, module_of = random_model(seed)
    num_shards, outlier = generator.choice([1, 2, 3, 8]), generator.choice([None, 100, 2000])
    modules = generator.choice([None, module_of])
    size = generator.choice([50, 300, 1000])
    plan = plan_chunks(parameters, num_shards=num_shards, chunk_numel=size, module_of=modules, outlier_numel=outlier)
    used = sum(parameter.numel for parameter in parameters)
    total = sum(chunk.numel for chunk in plan.chunks)
    assert plan.wasted_numel == total - used
    assert plan.wasted_numel == naive_waste(parameters, num_shards, plan.chunk_numel, outlier, modules)


@SEEDS
def test_modules_stay_together_where_a_chunk_can_hold_them(seed):
    generator, parameters, module_of = random_model(seed)
    plan = plan_chunks(parameters, num_shards=2, chunk_numel=generator.choice([300, 1000, 5000]), module_of=module_of)
    chunk_of = {place.index: number for number, chunk in enumerate(plan.chunks) for place in chunk.regions}
    members = {}
    for index, parameter in enumerate(parameters):
        if parameter.numel:
            members.setdefault((parameter.dtype, parameter.trains, module_of[index]), []).append(index)
    for indices in members.values():
        if sum(aligned(parameters[index].numel) for index in indices) <= plan.chunk_numel:
            assert len({chunk_of[index] for index in indices}) == 1


def test_modules_decide_where_a_chunk_is_closed():
    parameters = facts((40,), (10,), (40,), (10,))
    apart = plan_chunks(parameters, num_shards=1, chunk_numel=96)
    together = plan_chunks(parameters, num_shards=1, chunk_numel=96, module_of=[0, 0, 1, 1])
    assert [[place.index for place in chunk.regions] for chunk in apart.chunks] == [[0, 1, 2], [3]]
    assert [[place.index for place in chunk.regions] for chunk in together.chunks] == [[0, 1], [2, 3]]


def test_large_parameters_have_chunks_of_their_own_and_leave_the_open_chunk_open():
    parameters = facts((8,), (100,), (8,), (70,), (10,))
    plan = plan_chunks(parameters, num_shards=1, chunk_numel=96, outlier_numel=64)
    indices = [[place.index for place in chunk.regions] for chunk in plan.chunks]
    assert indices == [[0, 2, 4], [1], [3]]
    assert [chunk.numel for chunk in plan.chunks] == [32, 128, 96]
    without = plan_chunks(parameters, num_shards=1, chunk_numel=96)
    assert [[place.index for place in chunk.regions] for chunk in without.chunks] == [[0, 2, 3], [1], [4]]


def test_limits_are_included():
    """A module of just a chunk stays together; a parameter of just the outlier's size is none."""
    modules = plan_chunks(facts((32,), (40,), (56,)), num_shards=1, chunk_numel=96, module_of=[0, 1, 1])
    assert [[place.index for place in chunk.regions] for chunk in modules.chunks] == [[0], [1, 2]]
    sizes = plan_chunks(facts((10,), (64,), (10,), (65,)), num_shards=1, chunk_numel=96, outlier_numel=64)
    assert [[place.index for place in chunk.regions] for chunk in sizes.chunks] == [[0, 1, 2], [3]]


def test_scalars_and_parameters_without_elements():
    plan = plan_chunks(facts((0,), (), (3, 0), (200,), (0, 4), ()), num_shards=2, chunk_numel=64)
    first, second = plan.chunks
    assert first.regions == (
        ParamRegion(0, (0,), 0, 0),
        ParamRegion(1, (), 0, 1),
        ParamRegion(2, (3, 0), 8, 8),
        ParamRegion(5, (), 8, 9),
    )
    assert second.regions == (ParamRegion(3, (200,), 0, 200), ParamRegion(4, (0, 4), 200, 200))
    assert [part.region_index for part in first.parts(0)] == [1, 3]
    assert first.parts(1) == []
    nothing = plan_chunks(facts((0,), (0, 2)), num_shards=3, chunk_numel=1000)
    assert [chunk.numel for chunk in nothing.chunks] == [96]
    assert plan_chunks([], num_shards=4, chunk_numel=1000).chunks == ()


def test_a_tied_parameter_is_laid_out_once():
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50, bias=False))
    model[1].weight = model[0].weight
    parameters = [
        ParamInfo(shape=tuple(tensor.shape), dtype=tensor.dtype, trains=tensor.requires_grad)
        for tensor in model.parameters()
    ]
    plan = plan_chunks(parameters, num_shards=2, chunk_numel=1000)
    assert plan.describe() == "1 chunk for 400 elements of parameters, and 48 unused (10.71%)"


@pytest.mark.parametrize("seed", range(200))
def test_search_agrees_with_brute_force(seed):
    generator, parameters, module_of = random_model(seed)
    num_shards, modules = generator.choice([1, 2, 3, 8]), generator.choice([None, module_of])
    smallest, span, step = (
        generator.choice([1, 100, 700]),
        generator.choice([0, 500, 3000]),
        generator.choice([7, 40, 999]),
    )
    result = search_chunk_numel(
        parameters,
        num_shards=num_shards,
        search_range_numel=span,
        min_chunk_numel=smallest,
        step_numel=step,
        module_of=modules,
    )
    unit = max(unit_numel(parameter.dtype, num_shards) for parameter in parameters)
    sizes = [-(-size // unit) * unit for size in range(smallest, smallest + span + 1, max(step, unit))]
    totals = {}
    for parameter in parameters:
        key, numel = (parameter.dtype, parameter.trains), parameter.numel
        is_outlier = result.outlier_numel is not None and numel > result.outlier_numel
        totals[key] = totals.get(key, 0) + (0 if is_outlier else aligned(numel))
    largest = max(unit, -(-max(totals.values()) // unit) * unit)
    candidates = sorted({min(size, largest) for size in sizes})
    expected = {size: naive_waste(parameters, num_shards, size, result.outlier_numel, modules) for size in candidates}
    assert result.waste == expected
    assert list(result.waste) == candidates
    assert result.chunk_numel == min(candidates, key=lambda size: (expected[size], size))
    plan = plan_chunks(
        parameters,
        num_shards=num_shards,
        chunk_numel=result.chunk_numel,
        module_of=modules,
        outlier_numel=result.outlier_numel,
    )
    assert plan.chunk_numel == result.chunk_numel
    assert plan.wasted_numel == result.waste[result.chunk_numel]


def search(parameters, **changes):
    arguments = {"num_shards": 2, "search_range_numel": 1000, "min_chunk_numel": 1000, "step_numel": 64, **changes}
    return search_chunk_numel(parameters, **arguments)


def test_search_finds_the_size_that_divides():
    """Layers of 3 * 64 elements: sizes that hold a whole number of them waste nothing, and the smallest is taken."""
    result = search(facts(*[(3, 64)] * 20), num_shards=1)
    assert result.chunk_numel == 1000 // 32 * 32 + 32 + 2 * 64
    assert result.waste[result.chunk_numel] == 0
    assert all(wasted > 0 for size, wasted in result.waste.items() if size < result.chunk_numel)


def test_a_model_smaller_than_a_chunk_has_one_of_its_size():
    parameters = facts((300,), (50,)) + facts((20,), dtype=torch.float16)
    result = search(parameters, min_chunk_numel=10**6)
    plan = plan_chunks(parameters, num_shards=2, chunk_numel=result.chunk_numel)
    assert result.chunk_numel == 384
    assert [chunk.numel for chunk in plan.chunks] == [384, 64]
    assert search([]).chunk_numel == 64


def test_outliers_take_no_part_in_the_search():
    common = [(100,)] * 40
    without = search(facts(*common))
    result = search(facts(*common, (100_000,)))
    assert without.outlier_numel is None
    assert 1000 <= result.outlier_numel < 100_000
    assert result.chunk_numel == without.chunk_numel
    assert {size: wasted - without.waste[size] for size, wasted in result.waste.items()} == dict.fromkeys(
        result.waste, -100_000 % 64
    )


def test_no_outliers_among_few_parameters_or_within_a_chunk():
    assert search(facts(*[(10,)] * 6, (10**6,))).outlier_numel is None
    assert search(facts(*[(10,)] * 40, (900,))).outlier_numel is None
    assert search(facts(*[(1200,)] * 40)).outlier_numel is None


def test_many_candidates_are_thinned_out_evenly():
    result = search(facts(*[(1000,)] * 100), num_shards=1, search_range_numel=50_000, step_numel=1)
    assert len(result.waste) == 50_000 // 32 + 1
    thinned = search(facts(*[(10**6,)] * 100), num_shards=1, search_range_numel=10**7, step_numel=32)
    sizes = list(thinned.waste)
    assert 5000 < len(sizes) <= 10_000
    assert {second - first for first, second in pairwise(sizes)} == {32 * 32}


def test_512_ranks():
    parameters = facts(*[(1024, 1024), (1024,), (4096, 1024), (4096,), (7,)] * 6, dtype=torch.bfloat16)
    result = search(parameters, num_shards=512, min_chunk_numel=2**22, search_range_numel=2**22, step_numel=1024)
    plan = plan_chunks(parameters, num_shards=512, chunk_numel=result.chunk_numel)
    assert len(plan.chunks) > 1
    covered = [0] * len(parameters)
    for chunk in plan.chunks:
        assert chunk.numel % (512 * 32) == 0
        for rank in range(512):
            for part in chunk.parts(rank):
                index = chunk.regions[part.region_index].index
                assert part.span[0] == covered[index]
                covered[index] = part.span[1]
    assert covered == [parameter.numel for parameter in parameters]


def test_the_search_is_fast():
    """Processor time of this process, not time on the wall: other work on the machine doesn't count."""
    generator = random.Random(0)
    parameters = facts(*[(generator.choice([1, 3, 4]) * 768, generator.choice([1, 768])) for _ in range(3000)])
    began = time.process_time()
    result = search(parameters, num_shards=8, min_chunk_numel=2**22, search_range_numel=768 * 1000, step_numel=768)
    assert time.process_time() - began < 2.0
    assert len(result.waste) == 1001


def test_the_step_is_the_hidden_dimension():
    layer = [(3 * 64, 64), (3 * 64,), (64, 64), (64,), (256, 64), (256,), (64, 256), (64,)]
    assert default_step(facts((1000, 64), *layer * 3)) == 64
    assert default_step(facts((8, 3, 3, 3), (8,))) == 1024
    assert default_step(facts((5, 0), (5, 9), (5, 7))) == 7


def test_units_are_64_bytes_per_rank_in_every_format():
    assert unit_numel(torch.float16, 3) == unit_numel(torch.float32, 3) == unit_numel(torch.float64, 3) == 96
    assert unit_numel(torch.uint8, 3) == 192


def test_reports_in_words():
    plan = plan_chunks(facts(*[(1500,)] * 3), num_shards=1, chunk_numel=2048)
    assert plan.describe() == "3 chunks for 4,500 elements of parameters, and 1,100 unused (19.64%)"
    nothing = plan_chunks([], num_shards=1, chunk_numel=1).describe()
    assert nothing == "0 chunks for 0 elements of parameters, and 0 unused (0.00%)"


def test_a_layout_refuses_sizes_that_do_not_divide():
    with pytest.raises(AssertionError, match="not a multiple of 64"):
        ChunkLayout(torch.float32, True, 96, 2, ())
    with pytest.raises(AssertionError, match="65 elements in a chunk of 64"):
        ChunkLayout(torch.float32, True, 64, 2, (ParamRegion(0, (65,), 0, 65),))
    with pytest.raises(AssertionError, match="rank 2 of 2"):
        ChunkLayout(torch.float32, True, 64, 2, ()).shard_range(2)
