"""Dividing units among stages: the largest cost is the smallest possible, and mistakes are said."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from zoo import get_model

from booster.errors import ConfigError
from booster.plugins.hybrid_parallel.pipeline_parallel.schedules import schedule_from_name
from booster.plugins.hybrid_parallel.pipeline_parallel.stage_partition.balance import (
    chunk_costs,
    gap_costs,
    layer_costs,
    partition_layers,
)
from booster.plugins.hybrid_parallel.pipeline_parallel.stage_partition.partition import (
    choose_stage_plan,
    explain_stages,
)
from booster.plugins.hybrid_parallel.pipeline_parallel.stage_partition.stage_plan import StagePartition, StagePlan


class Costly(nn.Module):
    """Units "0", "1", ... of given costs, and one module in each gap."""

    def __init__(self, units: list[int], gaps: dict[int, int]) -> None:
        super().__init__()
        for index, cost in enumerate(units):
            self.add_module(str(index), nn.Linear(cost, 1, device="meta"))
        for gap, cost in gaps.items():
            self.add_module(f"gap{gap}", nn.Linear(cost, 1, device="meta"))
        units_of = tuple(str(index) for index in range(len(units)))
        self.plan = StagePlan(layers=units_of, gaps={f"gap{gap}": gap for gap in gaps})


def all_bounds(num_units: int, num_parts: int) -> list[tuple[int, ...]]:
    inner = itertools.combinations(range(1, num_units), num_parts - 1)
    return [(0, *cuts, num_units) for cuts in inner]


def score(model: Costly, bounds: tuple[int, ...]) -> tuple[float, int, list[int]]:
    sizes = [end - start for start, end in itertools.pairwise(bounds)]
    return max(chunk_costs(model, model.plan, bounds)), sum(size**2 for size in sizes), sizes


@pytest.mark.parametrize("seed", range(12))
def test_best_of_all_divisions(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_units = 4 + seed % 4
    costs = torch.randint(1, 9, (num_units,), generator=generator).tolist()
    gaps = {gap: int(torch.randint(1, 20, (), generator=generator)) for gap in (0, num_units // 2, num_units)}
    model = Costly(costs, gaps)
    for num_parts in range(1, num_units + 1):
        best = min(all_bounds(num_units, num_parts), key=lambda bounds: score(model, bounds))
        assert partition_layers(model, model.plan, num_parts) == best


def test_costs_of_parts_add_up() -> None:
    model = Costly([3, 5, 7, 2], {0: 1, 2: 10, 4: 100})
    assert layer_costs(model, model.plan) == [3, 5, 7, 2]
    assert gap_costs(model, model.plan) == [1, 0, 10, 0, 100]
    assert chunk_costs(model, model.plan, (0, 2, 4)) == [9, 119]
    partition = StagePartition(model.plan, (0, 2, 4), schedule_from_name("gpipe"), 2, 1)
    assert [partition.position_of_gap(gap) for gap in range(5)] == [0, 0, 1, 1, 1]


def test_ties_leave_the_first_parts_smaller() -> None:
    model = Costly([4] * 7, {})
    assert partition_layers(model, model.plan, 3) == (0, 2, 4, 7)
    assert partition_layers(model, model.plan, 7) == tuple(range(8))


def test_a_heavy_head_takes_layers_off_the_last_part() -> None:
    model = Costly([4] * 8, {8: 8})
    assert partition_layers(model, model.plan, 2) == (0, 5, 8)


def test_embeddings_are_free_and_heads_are_not() -> None:
    model = get_model("gpt2").build()
    plan = choose_stage_plan(model)
    costs = gap_costs(model, plan)
    assert costs[0] == 0
    assert costs[2] == model.lm_head.weight.numel()
    layer = 32 * 96 + 32 * 32 + 2 * 32 * 128
    assert layer_costs(model, plan) == [layer, layer]


def test_only_chosen_experts_count() -> None:
    model = get_model("mixtral").build()
    attention, router, experts = 32 * 32 * 2 + 32 * 16 * 2, 32 * 4, 4 * 3 * 32 * 56
    assert layer_costs(model, choose_stage_plan(model)) == [attention + router + experts / 2] * 2


def test_given_numbers() -> None:
    model = Costly([1] * 6, {})
    assert partition_layers(model, model.plan, 3, [1, 3, 2]) == (0, 1, 4, 6)
    with pytest.raises(ConfigError, match="adds up to 7 layers, but the model has 6"):
        partition_layers(model, model.plan, 3, [2, 2, 3])


def test_split_has_as_many_parts_as_places() -> None:
    model = get_model("glued_chain").build()
    plan = choose_stage_plan(model, split=["layers.1", "layers.3"])
    assert partition_layers(model, plan, 3) == (0, 1, 3, 4)


def test_more_places_than_units() -> None:
    model = get_model("llama").build()
    with pytest.raises(ConfigError, match=r"has 2 layers to divide .*pipeline has 4 places"):
        partition_layers(model, choose_stage_plan(model), 4)


def test_table_shows_every_part() -> None:
    model = get_model("gpt2").build()
    plan = choose_stage_plan(model)
    text = explain_stages(model, StagePartition(plan, (0, 1, 2), schedule_from_name("1f1b"), 2, 1), 6)
    lines = text.splitlines()
    assert lines[1].split()[:3] == ["0", "0", "transformer.h.0"]
    assert "transformer.wte, transformer.wpe" in lines[1]
    assert "transformer.ln_f, lm_head" in lines[2]
    shares = [float(line.rstrip("%").split()[-1]) for line in lines[1:3]]
    assert sum(shares) == pytest.approx(100.0)
    assert shares[0] < shares[1]
    assert "held by stages 0, 1: transformer.wte.weight = lm_head.weight" in text
    assert "1f1b, 2 stages, 6 microbatches: stages wait 14.3%" in text  # (2 - 1) / (6 + 2 - 1)


def test_table_of_a_v_and_of_what_travels_on() -> None:
    model = get_model("whisper").build()
    plan = choose_stage_plan(model)
    text = explain_stages(model, StagePartition(plan, (0, 1, 2, 3, 4), schedule_from_name("zbv"), 2, 2))
    assert [line.split()[:2] for line in text.splitlines()[1:5]] == [["0", "0"], ["1", "0"], ["1", "1"], ["0", "1"]]
    assert "sent on to all later stages: the output of model.encoder" in text
    # The tied embedding begins the decoder, on stage 1; the head is on stage 0.
    assert "held by stages 0, 1: model.decoder.embed_tokens.weight = proj_out.weight" in text
    assert "wait" not in text


def test_parameters_around_units_are_held_by_all() -> None:
    model = get_model("byte_gpt").build()
    partition = StagePartition(choose_stage_plan(model), (0, 1, 2), schedule_from_name("gpipe"), 2, 1)
    text = explain_stages(model, partition)
    assert "held by all stages: positions" in text
