"""Dispatch of tokens to experts on other ranks: forward, gradients and bytes of a loop over all experts."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from harness import distributed
from torch import nn

from booster.comm import all_reduce_sum, count_communication
from booster.core.shard_spec import ShardSpec
from booster.device import current_device
from booster.errors import ConfigError
from booster.moe import FFNExperts
from booster.plugins import HybridParallelPlugin
from booster.plugins.hybrid_parallel.expert_parallel.dispatch import Capacity
from booster.plugins.hybrid_parallel.expert_parallel.experts import ExpertParallelGroup, make_expert_parallel
from booster.plugins.hybrid_parallel.expert_parallel.loops import make_loop_expert_parallel
from booster.plugins.hybrid_parallel.expert_parallel.plan import find_experts

pytestmark = pytest.mark.on_device

TOKENS, WIDTH, EXPERTS, TOP_K = 12, 8, 6, 2
FP32, INT64 = 4, 8

# What each rank's tokens are routed to: from a generator, the number of tokens and k.
ROUTINGS = {
    "any": lambda draw, rank: torch.rand(TOKENS, EXPERTS, generator=draw).topk(TOP_K)[1],
    "all to one expert": lambda draw, rank: torch.zeros(TOKENS, 1, dtype=torch.long),
    "all to the last rank": lambda draw, rank: torch.full((TOKENS, 2), EXPERTS - 1) - torch.tensor([0, 1]),
    "each to its own rank": lambda draw, rank: torch.full((TOKENS, 1), min(2 * rank, EXPERTS - 1)),
    "some dropped": lambda draw, rank: torch.randint(EXPERTS + 1, (TOKENS, TOP_K), generator=draw),
    "all dropped": lambda draw, rank: torch.full((TOKENS, TOP_K), EXPERTS),
    "none on one rank": lambda draw, rank: torch.randint(EXPERTS, (TOKENS * (rank > 0), TOP_K), generator=draw),
    "every expert": lambda draw, rank: torch.arange(EXPERTS).expand(TOKENS, EXPERTS).contiguous(),
}


def make_experts() -> nn.Module:
    torch.manual_seed(0)
    return FFNExperts(EXPERTS, WIDTH, 2 * WIDTH).to(current_device())


def own_experts(group: ExpertParallelGroup) -> tuple[nn.Module, int, int]:
    """Returns the module with this rank's experts, the first of them, and one past the last."""
    module = make_experts()
    model = nn.ModuleDict({"experts": module})
    plan = find_experts(model, group.size, None)
    bounds = plan.bounds(plan.entries[0])
    first, last = bounds[group.rank], bounds[group.rank + 1]
    for parameter in module.parameters():
        parameter.data = ShardSpec.unsharded(parameter.shape).experts(first, last).shard(parameter.data)
    make_expert_parallel(module, "experts", group, bounds, is_stacked=True)
    return module, first, last


def inputs(routing: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rank = dist.get_rank()
    draw = torch.Generator().manual_seed(10 + rank)
    index = ROUTINGS[routing](draw, rank)
    tokens = torch.randn(len(index), WIDTH, generator=draw)
    weights = torch.rand(index.shape, generator=draw)
    device = current_device()
    return tokens.to(device).requires_grad_(), index.to(device), weights.to(device).requires_grad_()


def loop(module: nn.Module, tokens: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Returns the sums of a loop over all experts."""
    output = torch.zeros_like(tokens)
    for number in range(EXPERTS):
        token, place = torch.where(index == number)
        hidden = nn.functional.gelu(tokens[token] @ module.up_weight[number].t() + module.up_bias[number])
        rows = hidden @ module.down_weight[number].t() + module.down_bias[number]
        output = output.index_add(0, token, rows * weights[token, place, None])
    return output


@distributed(world_size=(2, 3, 4))
@pytest.mark.parametrize("routing", ROUTINGS)
def test_forward_and_gradients_are_those_of_a_loop(routing):
    group = ExpertParallelGroup.of(dist.group.WORLD)
    module, first, last = own_experts(group)
    tokens, index, weights = inputs(routing)
    output = module(tokens, index, weights)
    output.square().sum().backward()
    found = [tokens.grad, weights.grad]

    reference = make_experts()
    tokens, index, weights = inputs(routing)
    expected = loop(reference, tokens, index, weights)
    expected.square().sum().backward()
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found, [tokens.grad, weights.grad], rtol=1e-5, atol=1e-5)
    for own, full in zip(module.parameters(), reference.parameters(), strict=True):
        total = all_reduce_sum(full.grad.clone())  # of the tokens of all ranks
        torch.testing.assert_close(own.grad, total[first:last], rtol=1e-4, atol=1e-5)
        assert own.shape[0] == last - first


@distributed(world_size=(2, 3))
@pytest.mark.parametrize("drops", [True, False])
@pytest.mark.parametrize("routing", ["any", "all to one expert", "some dropped", "every expert"])
def test_a_capacity_drops_an_experts_last_tokens_or_none(routing, drops):
    group = ExpertParallelGroup.of(dist.group.WORLD, Capacity(factor=0.7, minimum=2, drops=drops))
    module, *_ = own_experts(group)
    tokens, index, weights = inputs(routing)
    output = module(tokens, index, weights)
    output.square().sum().backward()
    found = [tokens.grad, weights.grad]

    kept = index.clone()
    limit = group.capacity.rows(index.numel(), EXPERTS)
    for number in range(EXPERTS if drops else 0):
        kept.view(-1)[(index.view(-1) == number).nonzero().view(-1)[limit:]] = EXPERTS
    assert not drops or bool((kept != index).any())  # so few that some are dropped
    tokens, index, weights = inputs(routing)
    expected = loop(make_experts(), tokens, kept, weights)
    expected.square().sum().backward()
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found, [tokens.grad, weights.grad], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("factor", "minimum", "rows", "expected"), [(1.0, 4, 60, 10), (1.25, 4, 60, 12), (1.0, 4, 18, 4), (0.9, 1, 60, 10)]
)
def test_the_capacity_is_rounded_to_even_numbers(factor, minimum, rows, expected):
    assert Capacity(factor=factor, minimum=minimum, drops=True).rows(rows, 6) == expected


@distributed(world_size=(2, 4))
@pytest.mark.parametrize("routing", ["any", "all to one expert", "each to its own rank"])
def test_bytes_are_those_of_the_rows_for_other_ranks(routing):
    group = ExpertParallelGroup.of(dist.group.WORLD)
    module, first, last = own_experts(group)
    tokens, index, weights = inputs(routing)
    leaving = int(((index < first) | (index >= last)).sum())
    with count_communication() as forward:
        output = module(tokens, index, weights)
    row = WIDTH * FP32
    arriving = _rows_from_others(index, first, last)
    counts = (group.size - 1) * EXPERTS * INT64
    assert forward.sent["all_to_all"] == leaving * (row + FP32) + arriving * row
    assert forward.sent["all_gather"] == counts
    assert sum(forward.sent.values()) == forward.sent["all_to_all"] + counts
    with count_communication() as backward:
        output.sum().backward()
    assert backward.sent["all_to_all"] == leaving * row + arriving * (row + FP32)
    assert sum(backward.sent.values()) == backward.sent["all_to_all"]


def _rows_from_others(index: torch.Tensor, first: int, last: int) -> int:
    """Returns how many rows the other ranks send to this one's experts."""
    indices: list[torch.Tensor] = [None] * dist.get_world_size()
    dist.all_gather_object(indices, index.cpu())
    others = [one for rank, one in enumerate(indices) if rank != dist.get_rank()]
    return sum(int(((one >= first) & (one < last)).sum()) for one in others)


@distributed(world_size=2)
def test_mistakes_in_the_arguments():
    for arguments, message in (
        ({"ep_size": 3}, r"ep_size=3 does not divide the 2 data-parallel ranks"),
        ({"ep_size": 2, "tp_size": 2}, r"ep_size=2 does not divide the 1 data-parallel ranks"),
        ({"ep_size": 0}, r"ep_size=0 is not a number of ranks"),
        ({"ep_size": 2, "capacity_factor": 0.0}, r"capacity_factor=0.0 gives an expert no token"),
        ({"ep_size": 2, "capacity_factor": 1.0, "min_capacity": 0}, r"min_capacity=0 is not a number of tokens"),
        ({"capacity_factor": 1.0}, r"capacity_factor=1.0 has no effect with ep_size=1"),
        ({"ep_size": 2, "drop_tokens": False}, r"drop_tokens=False has no effect without a capacity_factor"),
    ):
        with pytest.raises(ConfigError, match=message):
            HybridParallelPlugin(precision="fp32", **arguments)


class Unlike(nn.Module):
    """Parameters without a common leading dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.ones(4, 3, 3)), nn.Parameter(torch.ones(3, 3, 3))

    def forward(self, tokens: torch.Tensor, expert_index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return tokens


def test_mistakes_in_the_model():
    for model, plan, message in (
        (nn.Linear(2, 2), None, r"ep_size=2 shards experts, but Linear has none: .*plan="),
        (nn.ModuleDict({"experts": Unlike()}), None, r"but ModuleDict has none"),
        (nn.ModuleDict({"experts": Unlike()}), {"experts": "expert"}, r"'experts', a Unlike, .* \(4, 3, 3\)"),
        (nn.ModuleDict({"experts": Unlike()}), {"expert": "expert"}, r"'expert' .*matches no module"),
        (nn.ModuleDict({"experts": FFNExperts(2, 2, 2)}), None, None),
    ):
        if message is None:
            assert find_experts(model, 2, plan).entries[0].num_experts == 2
            with pytest.raises(ConfigError, match=r"ep_size=3 is larger than the 2 experts of 'experts'"):
                find_experts(model, 3, plan)
            continue
        with pytest.raises(ConfigError, match=message):
            find_experts(model, 2, plan)


class Looping(nn.Module):
    """A gate, and a list of experts that the forward calls, as `call` says."""

    def __init__(self, call=lambda experts, number, tokens: experts[number](tokens)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))
        self.call = call
        self.balance: list[torch.Tensor] = []
        self.num_calls = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        tokens.add_(1)  # in place, as some models add noise
        noise = torch.rand(EXPERTS, device=tokens.device)
        weights, index = (self.gate(tokens) + noise).softmax(-1).max(-1)
        self.balance.append(weights.sum())
        output = torch.zeros_like(tokens)
        for number in range(EXPERTS):
            chosen = (index == number).nonzero()[:, 0]
            found = self.call(self.experts, number, tokens[chosen])
            output.index_add_(0, chosen, (found * weights[chosen, None]).to(output.dtype))
        return output


def looping(capacity: Capacity | None = None, **arguments) -> tuple[nn.Module, nn.Module]:
    """Returns a block whose experts all ranks share, and the same block with all of them."""
    group, reference = ExpertParallelGroup.of(dist.group.WORLD, capacity), Looping(**arguments).to(current_device())
    model = nn.ModuleDict({"block": copy.deepcopy(reference)})
    (entry,) = find_experts(model, group.size, None).entries
    assert (entry.name, entry.is_looped) == ("block.experts", True)
    make_loop_expert_parallel(model, entry.name, group, find_experts(model, group.size, None).bounds(entry))
    return model["block"], reference


@distributed(world_size=(2, 3))
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("num_tokens", [TOKENS, 0])
def test_a_loop_over_a_list_of_experts(num_tokens, autocast):
    block, reference = looping()
    num_tokens = num_tokens if dist.get_rank() == 0 else TOKENS
    torch.manual_seed(dist.get_rank())
    own = torch.randn(num_tokens, WIDTH).to(current_device()).requires_grad_()
    found = []
    for module in (block, reference):
        own.grad = None
        tokens = own * 1
        torch.manual_seed(7)
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=autocast):
            output = module(tokens)
        after = torch.rand(1)
        assert (len(module.balance), module.num_calls) == (1, 1)
        (output.square().sum() + sum(module.balance)).backward()
        found.append((output, tokens, after, own.grad, module.gate.weight.grad))
    bound = {"rtol": 2e-2, "atol": 2e-2} if autocast else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(found[0], found[1], **bound)
    for expert, other in zip(block.experts, reference.experts, strict=True):
        total = all_reduce_sum(other.weight.grad.clone())  # of the tokens of all ranks
        if expert.weight.grad is not None:
            torch.testing.assert_close(expert.weight.grad, total, rtol=bound["rtol"], atol=10 * bound["atol"])
    held = [expert.weight.grad is not None for expert in block.experts]
    assert sum(held) == EXPERTS // dist.get_world_size()  # each was called, if only without tokens


@distributed(world_size=2)
def test_a_loop_with_a_capacity_drops_the_last_tokens():
    block, reference = looping(Capacity(factor=0.5, minimum=1, drops=True))
    limit = Capacity(factor=0.5, minimum=1, drops=True).rows(TOKENS, EXPERTS)
    tokens = torch.randn(TOKENS, WIDTH).to(current_device())
    counts = [0] * EXPERTS

    def call_with_limit(experts, number, rows):
        counts[number] = len(rows)
        outputs = experts[number](rows)
        return torch.cat([outputs[:limit], torch.zeros_like(outputs[limit:])])

    reference.call = call_with_limit
    outputs = []
    for module in (block, reference):
        torch.manual_seed(7)
        outputs.append(module(tokens.clone()))
    torch.testing.assert_close(*outputs)
    assert max(counts) > limit


@distributed(world_size=2)
def test_mistakes_in_a_loop():
    tokens = torch.randn(TOKENS, WIDTH).to(current_device())
    with pytest.raises(ConfigError, match=r"'block.experts' was called with more than its tokens"):
        looping(call=lambda experts, number, rows: experts[number](rows, number))[0](tokens)
    block, _ = looping()
    with pytest.raises(ConfigError, match=r"expert 1 of 'block.experts' .* \(12, 8\) outside of its block's forward"):
        block.experts[1](tokens)
    times = []

    def other_in_the_second_pass(experts, number, rows):
        times.append(number)
        return experts[number](rows if len(times) <= EXPERTS else torch.cat([rows, tokens[:1]]))

    with pytest.raises(ConfigError, match=r"does not call the same experts when it runs again"):
        looping(call=other_in_the_second_pass)[0](tokens)
    dist.barrier()


def test_layers_in_a_list_are_no_experts():
    model = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), "head": nn.Linear(4, 3)})
    with pytest.raises(ConfigError, match=r"no plain list beside a gate or router"):
        find_experts(model, 2, None)
    assert find_experts(model, 2, {"layers": "expert"}).entries[0].is_looped


@distributed(world_size=2)
def test_a_configuration_and_an_explanation():
    plugin = HybridParallelPlugin.from_config(
        {"moe": {"size": 2, "capacity_factor": 1.5}}, precision="fp32", zero_stage=1
    )
    text = plugin.explain(nn.ModuleDict({"experts": FFNExperts(5, 4, 4)}))
    assert "experts: 5 experts (" in text
    assert "rank 0: 0-2" in text
    assert "rank 1: 3-4" in text
    held = 3 if dist.get_rank() == 0 else 2
    assert f"{held}x4x4 of 5x4x4" in text
    alone = HybridParallelPlugin(precision="fp32", plan={"expert": "expert"})  # the mistake is reported at any size
    with pytest.raises(ConfigError, match=r"'expert' .*matches no module"):
        alone.explain(nn.ModuleDict({"experts": FFNExperts(5, 4, 4)}))
    with pytest.raises(ConfigError, match="ep_size=2 was given in addition to 'moe'=2"):
        HybridParallelPlugin.from_config({"moe": 2}, ep_size=2)
