"""Ranks that give boost() or a plugin different things are told so, all of them, at once, and nothing was changed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from agreement_cases import (
    CASES,
    PLUGINS,
    SECONDS,
    Holding,
    Net,
    Stateless,
    boosted,
    contents,
    disagree,
    distributed_loader,
    lambda_schedule,
    ones,
    optimizer_of,
    plugin_choice,
    unlike,
)
from harness import distributed, preload, run_ranks
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from booster import Booster, boost_checks
from booster.comm import (
    check_same_across_ranks,
    count_communication,
    fake_collectives,
    raise_on_all_ranks,
)
from booster.errors import ConfigError, DesyncError, RankFailedError
from booster.plugins import (
    HybridParallelPlugin,
    TorchDDPPlugin,
)

pytestmark = pytest.mark.on_device

preload("booster", "booster.plugins", "agreement_cases")

SEEDS = [*range(len(CASES)), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(len(CASES), 250))]


@pytest.mark.parametrize("has_shared_memory", [True, False], ids=["shared memory", "gloo"])
@pytest.mark.parametrize("seed", SEEDS, ids=lambda seed: f"seed {seed}: {CASES[seed % len(CASES)].name}")
def test_every_rank_is_told_who_differs_in_what(seed, has_shared_memory):
    case = CASES[seed % len(CASES)]
    plugin, world_size, odd = plugin_choice(case, seed)
    told = run_ranks(disagree, world_size, case, plugin, odd, has_shared_memory)
    story = f"{plugin}, {world_size} ranks, other on {odd}: {told}"
    assert max(seconds for *_, seconds in told) < SECONDS, story
    for rank, (name, text, _) in enumerate(told):
        if case.error is DesyncError:
            assert name == "DesyncError", story
            assert unlike(world_size, odd) in text, story
            # whichever side is named first
            either = [case.told, ".*".join(reversed(case.told.split(".*")))]
            assert any(re.search(pattern, text) for pattern in either), story
            assert "Start every rank from the same script" in text or "start every rank from the same script" in text
        else:
            own = name if rank in odd and case.error is RankFailedError else case.error.__name__
            assert name == own, story
            assert re.search(case.told, text), story
            if rank not in odd:
                assert text.startswith(f"rank {odd[0]} failed"), story
    assert len({text for _, text, _ in told}) == 1 or case.error is not DesyncError, story


# What is said.


def compare(facts_of_rank: list[list[str]]) -> str:
    with pytest.raises(DesyncError) as caught:
        check_same_across_ranks("lunch", facts_of_rank[dist.get_rank()])
    return str(caught.value)


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        ([["a"], ["b"]], "the ranks differ in lunch: rank 0 has a, rank 1 has b; rank 1 differs from rank 0"),
        ([["a"], ["b"], ["b"]], "ranks 1, 2 have b, rank 0 has a; rank 0 differs from ranks 1, 2"),
        ([["a"], ["b"], ["c"]], "rank 0 has a, rank 1 has b, rank 2 has c; ranks 1, 2 differ from rank 0"),
        ([["a"], ["b"], ["b"], ["a"]], "ranks 0, 3 have a, ranks 1, 2 have b; ranks 1, 2 differ from ranks 0, 3"),
        ([["a", "b"], ["a"]], "rank 0 has b, rank 1 has nothing"),
        ([["a\nb"], ["a", "b"]], "rank 0 has a\nb, rank 1 has a"),
        ([["a", "b"], ["a", "x"], ["y", "b"], ["a", "b"]], "ranks 0, 1, 3 have a, rank 2 has y; ranks 1, 2 differ"),
        ([["\ud800"], ["\udfff"]], "rank 0 has \ud800, rank 1 has \udfff"),
    ],
)
def test_the_first_difference_and_all_ranks_that_differ_are_named(facts, told):
    texts = run_ranks(compare, len(facts), facts)
    assert set(texts) == {texts[0]}
    assert told in texts[0]


@distributed(world_size=3)
def test_different_calls_say_what_each_rank_is_at():
    rank = dist.get_rank()
    with pytest.raises(
        DesyncError, match="make different calls: ranks 0, 2 are at tea, rank 1 is at coffee; rank 1 diff"
    ):
        check_same_across_ranks("coffee" if rank == 1 else "tea", ["with milk"])
    with pytest.raises(
        DesyncError, match="rank 0 is at tea, rank 1 is at coffee, rank 2 is at water; ranks 1, 2 differ"
    ):
        check_same_across_ranks(("tea", "coffee", "water")[rank], [str(rank)])


@distributed(world_size=3)
def test_an_error_counts_more_than_a_difference():
    rank = dist.get_rank()
    error = ConfigError("no sugar") if rank else None
    with pytest.raises(ConfigError) as caught:
        check_same_across_ranks(f"place {rank}", [], error=error)
    expected = "no sugar" if rank else "rank 1 failed (and on 1 more ranks), so rank 0 stops too: no sugar"
    assert str(caught.value) == expected
    with pytest.raises(RankFailedError if rank else KeyError, match="salt"):
        check_same_across_ranks("dinner", [], error=None if rank else KeyError("salt"))
    check_same_across_ranks("dinner", ["alike"])


@distributed(world_size=3)
def test_ranks_of_a_group_have_their_numbers_of_the_world():
    group = dist.new_group([1, 2])
    rank = dist.get_rank()
    if rank:
        with pytest.raises(DesyncError, match="rank 1 has 1, rank 2 has 2; rank 2 differs from rank 1"):
            check_same_across_ranks("numbers", [str(rank)], group)
        with pytest.raises(ConfigError, match="no" if rank == 2 else "rank 2 failed, so rank 1 stops too: no"):
            raise_on_all_ranks(ConfigError("no") if rank == 2 else None, group)


def test_one_process_agrees_with_itself():
    check_same_across_ranks("lunch", ["alone"])
    with pytest.raises(KeyError, match="salt"):
        check_same_across_ranks("lunch", [], error=KeyError("salt"))


@distributed(world_size=2)
def test_fake_ranks_agree():
    with fake_collectives():
        check_same_across_ranks("lunch", [str(dist.get_rank())])


def refused_then_boosted(plugin: str) -> None:
    model = Net()
    booster = Booster(plugin=PLUGINS[plugin]())
    optimizer = torch.optim.LBFGS(model.parameters()) if dist.get_rank() == 1 else optimizer_of(model)
    before = contents(model)
    with pytest.raises(ConfigError, match="LBFGS"):
        booster.boost(model, optimizer)
    assert contents(model) == before
    booster.boost(model, optimizer_of(model))
    with pytest.raises(ConfigError, match="boosted already"):
        booster.boost(model)


@pytest.mark.parametrize("plugin", ["zero", "gemini", "hybrid"])
def test_what_was_refused_can_be_boosted_rightly(plugin):
    run_ranks(refused_then_boosted, 2, plugin)


# What may differ, and what it costs.


@pytest.mark.parametrize("plugin", PLUGINS)
@distributed(world_size=2)
def test_values_and_where_they_are_may_differ(plugin):
    torch.manual_seed(dist.get_rank())
    arguments = {"fsdp": {"sync_module_states": True}, "gemini": {"verbose": dist.get_rank() == 0}}
    _, model, _ = boosted(plugin, arguments=arguments.get(plugin))
    weights = model.state_dict()["lower.weight"]
    everyone = [torch.empty_like(weights) for _ in range(2)]
    dist.all_gather(everyone, weights.contiguous())
    assert torch.equal(*everyone)


SHAREABLE_SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "functions": lambda_schedule(lambda step: 1.0 + dist.get_rank() * step, lambda step: 1.0),
    "things of its own": lambda optimizer: Holding(optimizer, 4),
    "a state that can't be asked": lambda optimizer: Stateless(optimizer, 1 + dist.get_rank()),
    "not torch's": lambda _: FreeScheduler(),
}


class FreeScheduler:
    """Steps, and is known to no plugin."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()

    def step(self) -> None:
        """Does nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Returns what differs."""
        return vars(self)


@pytest.mark.parametrize("kind", SHAREABLE_SCHEDULERS)
@distributed(world_size=2)
def test_what_is_a_ranks_own_in_a_scheduler_may_differ(kind):
    model = Net()
    optimizer = optimizer_of(model)
    scheduler = SHAREABLE_SCHEDULERS[kind](optimizer)
    assert Booster(plugin=TorchDDPPlugin()).boost(model, optimizer, lr_scheduler=scheduler)[4] is scheduler


class Portions(DistributedSampler):
    """A sampler of the user's own, with more for some ranks."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(4 * (1 + dist.get_rank())))


class Portioned(BatchSampler):
    """As above, of batches."""

    num_replicas, rank = 2, 0


def _portioned_batches() -> DataLoader[Any]:
    dataset, size = ones(8 * (1 + dist.get_rank()), 1 + dist.get_rank())
    sampler = Portioned(range(len(dataset)), size, drop_last=False)
    sampler.rank = dist.get_rank()
    return DataLoader(dataset, batch_sampler=sampler)


def _portions() -> DataLoader[Any]:
    dataset, size = ones(8 * (1 + dist.get_rank()), 1 + dist.get_rank())
    return DataLoader(dataset, size, sampler=Portions(dataset))


SHAREABLE_LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "a sampler": _portions,
    "a sampler of batches": _portioned_batches,
    "batches of another size": lambda: distributed_loader(batch_size=1 + dist.get_rank()),
}


@pytest.mark.parametrize("kind", SHAREABLE_LOADERS)
@distributed(world_size=2)
def test_what_the_users_own_sampler_gives_may_differ(kind):
    loader = SHAREABLE_LOADERS[kind]()
    model = Net()
    assert Booster(plugin=TorchDDPPlugin()).boost(model, dataloader=loader)[3] is loader


@distributed(world_size=2)
def test_agreement_at_boost_is_one_small_all_gather():
    plugin = TorchDDPPlugin()
    model = Net()
    optimizer = optimizer_of(model)
    with count_communication() as count:
        boost_checks.verify_same_across_ranks(plugin, None, model, optimizer, None, None, None)
    assert dict(count.calls) == {"all_gather": 1}
    assert count.sent["all_gather"] == 33


@distributed(world_size=2)
def test_a_rank_without_memory_for_the_model_stops_all():
    model = Net()
    if dist.get_rank() == 1:
        model.last.weight = nn.Parameter(torch.empty(4, 4, device="meta"))
    with pytest.raises(ConfigError, match=r"'last\.weight' is on the meta device"):
        Booster(plugin=TorchDDPPlugin()).boost(model)


@distributed(world_size=2)
def test_a_configuration_that_one_rank_alone_has_wrong():
    config = {"tensor": {"size": 2, "mode": "2d" if dist.get_rank() else "1d"}}
    with pytest.raises(ConfigError, match="2d"):
        HybridParallelPlugin.from_config(config)
