"""Solved placements: the program against brute force, the patterns that are found, costs, memory and mistakes."""

from __future__ import annotations

import itertools
import math
import random
import sys
from dataclasses import replace

import pytest
import torch
from machine_profiles import FLOPS_PER_SECOND, profile_of
from torch import nn
from torch.nn import functional

from booster import ConfigError, estimate_memory
from booster.auto_parallel.placements import solve_placements
from booster.auto_parallel.placements.integer_program import IntegerProgram
from booster.auto_parallel.placements.layer_graph import record_step
from booster.auto_parallel.placements.layout_conversion import AxisSpeed
from booster.auto_parallel.placements.placement_program import PlacementProgram, StepCosts
from booster.auto_parallel.placements.sharding_rules import PARTIAL, REPLICATED, ShardingRules, sharded
from booster.auto_parallel.placements.styles import styled_modules
from booster.comm import fake_world
from booster.estimate import repeated_layers
from booster.estimate.estimate import TrainingRecipe
from booster.plugins import HybridParallelPlugin

# Computation takes long, communication does not: whatever can be divided is worth it.
FAST = profile_of(bytes_per_second=1e9, call=1e-6, latency=1e-6, seconds_per_byte=1e-10)
# The other way round.
SLOW = profile_of(bytes_per_second=1e9, call=1e-6, latency=1e-1, seconds_per_byte=1e-5)
SIZES = {"vocab_size": 256, "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}


class Mlp(nn.Module):
    def __init__(self, width=16, hidden=64, num_blocks=1, bias=True):
        super().__init__()
        self.num_blocks = num_blocks
        self.fc1 = nn.Linear(width, hidden * num_blocks, bias=bias)
        self.fc2 = nn.Linear(hidden, width, bias=bias)

    def forward(self, x):
        hidden, *others = self.fc1(x).chunk(self.num_blocks, -1)
        for other in others:
            hidden = hidden * other
        return self.fc2(functional.gelu(hidden))


class Attention(nn.Module):
    def __init__(self, width, num_heads):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, width // num_heads
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width) for _ in range(3))
        self.o_proj = nn.Linear(width, width)

    def forward(self, x):
        heads = (one(x).view(*x.shape[:2], -1, self.head_dim).transpose(1, 2) for one in self.projections())
        y = functional.scaled_dot_product_attention(*heads)
        return self.o_proj(y.transpose(1, 2).flatten(2))

    def projections(self):
        return self.q_proj, self.k_proj, self.v_proj


class LanguageModel(nn.Module):
    def __init__(self, vocab_size, width, is_tied=False):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.mlp = Mlp(width, width)
        self.head = nn.Linear(width, vocab_size, bias=False)
        if is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids)
        return self.head(x + self.mlp(x))


class Residual(Mlp):
    def forward(self, x):
        return x + super().forward(x)


class Stack(nn.Module):
    def __init__(self, *hidden, kind=Residual):
        super().__init__()
        self.layers = nn.ModuleList(kind(16, one) for one in hidden)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class SumStack(Stack):
    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)  # between layers
        return x


def make_llama(**settings):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {**SIZES, "intermediate_size": 128, "num_key_value_heads": 2, "use_cache": False, **settings}
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**sizes))


def make_gpt2(**settings):
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 32, "vocab_size": 256, **settings}
    with torch.device("meta"):
        return GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, **sizes))


def token_batch(num_examples=4, length=16):
    ids = torch.zeros(num_examples, length, dtype=torch.long, device="meta")
    return {"input_ids": ids, "labels": ids}


def mean_of(outputs, batch):
    return outputs.mean()


def cross_entropy_of(logits, ids):
    return functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def solve(model, batch, profile=FAST, tp_size=2, **arguments):
    return solve_placements(model, batch, tp_size, profile=profile, **arguments)


def solve_mlp(model, profile=FAST, **arguments):
    return solve(model, torch.zeros(8, 16, 16), profile, criterion=mean_of, **arguments)


def divided(solution):
    return {name: style for name, style in solution.plan.items() if style != "replicated"}


# The program


def all_solutions(nodes, edges):
    """Yields cost and memory of all choices: nodes are lists of pairs, edges triples with a matrix."""
    for choices in itertools.product(*(range(len(node)) for node in nodes)):
        taken = [node[choice] for node, choice in zip(nodes, choices, strict=True)]
        cost = sum(one for one, _ in taken) + sum(matrix[choices[u]][choices[v]] for u, v, matrix in edges)
        if math.isfinite(cost):
            yield cost, sum(memory for _, memory in taken)


def random_matrix(draw, rows, columns):
    kind = draw.choice(["costs", "equal", "some"])
    if kind == "costs":
        return [[draw.uniform(0, 1) for _ in range(columns)] for _ in range(rows)]
    if kind == "equal":
        return [[0.0 if row == column else math.inf for column in range(columns)] for row in range(rows)]
    return [[draw.choice([0, 0.3, math.inf]) for _ in range(columns)] for _ in range(rows)]


@pytest.mark.parametrize("has_budget", [False, True])
def test_the_program_is_optimal_on_random_graphs(has_budget):
    solved = 0
    for seed in range(150):
        draw = random.Random(seed)
        nodes = [
            [(draw.uniform(0, 1), draw.uniform(0, 1)) for _ in range(draw.randint(1, 4))]
            for _ in range(draw.randint(2, 8))
        ]
        pairs = [draw.sample(range(len(nodes)), 2) for _ in range(draw.randint(1, 9))]
        edges = [(u, v, random_matrix(draw, len(nodes[u]), len(nodes[v]))) for u, v in pairs]
        budget = 0.45 * len(nodes) if has_budget else None
        program = IntegerProgram()
        for node in nodes:
            program.add_node([cost for cost, _ in node], [memory for _, memory in node])
        for edge in edges:
            program.add_edge(*edge)
        known = list(all_solutions(nodes, edges))
        best = min((cost for cost, memory in known if budget is None or memory <= budget), default=None)
        program.reduce()
        found = program.solve(memory_budget=budget)
        assert (found is None) == (best is None)
        if found is not None:
            solved += 1
            assert found.cost == pytest.approx(best, abs=1e-6)
            again = [node[choice] for node, choice in zip(nodes, found.choices, strict=True)]
            between = sum(matrix[found.choices[u]][found.choices[v]] for u, v, matrix in edges)
            assert sum(cost for cost, _ in again) + between == pytest.approx(found.cost)
            assert sum(memory for _, memory in again) == pytest.approx(found.memory)
            assert budget is None or found.memory <= budget + 1e-6
        least = min((memory for _, memory in known), default=math.inf)
        assert program.least_memory() == pytest.approx(least, abs=1e-6)
    assert solved > 40  # not all of them exclude everything


def program_of(model, batch, criterion, profile, tp_size=2):
    graph = record_step(TrainingRecipe(model=model, batch=batch, criterion=criterion))
    costs = StepCosts(profile=profile, axis=AxisSpeed.of(profile, range(tp_size)))
    return PlacementProgram(model, graph, styled_modules(model, graph, tp_size), costs)


def cheapest_by_search(program):
    """Tries all choices of all nodes of a program, node by node along its edges, and returns the least cost."""
    nodes = [[state.cost for state in states] for states in program._states.values()]
    edges = program._edges
    neighbors = {index: [] for index in range(len(nodes))}
    for (u, v), matrix in edges.items():
        neighbors[u].append((v, matrix))
        neighbors[v].append((u, matrix.T))
    order, seen = [], set()
    for start in range(len(nodes)):
        stack = [start]
        while stack:
            node = stack.pop()
            if node not in seen:
                seen.add(node)
                order.append(node)
                stack.extend(other for other, _ in neighbors[node])
    best = math.inf
    taken = {}

    def extend(depth, cost):
        nonlocal best
        if depth == len(order):
            best = min(best, cost)
            return
        node = order[depth]
        for choice, own in enumerate(nodes[node]):
            between = sum(matrix[choice][taken[other]] for other, matrix in neighbors[node] if other in taken)
            if math.isfinite(between):
                taken[node] = choice
                extend(depth + 1, cost + own + between)
                del taken[node]

    extend(0, 0.0)
    return best


@pytest.mark.parametrize("profile", [FAST, SLOW, profile_of(latency=2e-4, seconds_per_byte=1e-8)])
@pytest.mark.parametrize("kind", ["mlp", "packed", "tied"])
def test_the_program_of_a_model_is_optimal(kind, profile):
    if kind == "tied":
        ids = torch.zeros(2, 4, dtype=torch.long)
        program = program_of(LanguageModel(32, 8, is_tied=True), ids, cross_entropy_of, profile)
    else:
        program = program_of(Mlp(num_blocks=1 + (kind == "packed")), torch.zeros(8, 16), mean_of, profile)
    expected = cheapest_by_search(program.program)
    assert program.program.reduce()
    assert program.program.solve().cost == pytest.approx(expected, rel=1e-9)


# What torch knows of operators: fails if it changes what the rules ask it.


def strategies_of(run, name, options):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, *tensors):
            return run(*tensors).sum() * self.scale

    shapes = [torch.zeros(shape) for shape, _ in options]
    graph = record_step(TrainingRecipe(model=Model(), batch=tuple(shapes), criterion=lambda outputs, batch: outputs))
    node = next(one for one in graph.nodes if str(one.func) == f"aten.{name}")
    found = ShardingRules(2).strategies(node, [placements for _, placements in options])
    return {(*one.inputs, *one.outputs) for one in found}


def test_strategies_of_matrix_products_are_those_of_column_and_row_parallel_layers():
    every = [REPLICATED, sharded(0), sharded(1), PARTIAL]
    found = strategies_of(torch.mm, "mm.default", [((8, 4), every), ((4, 16), [REPLICATED, sharded(0), sharded(1)])])
    assert found >= {
        (REPLICATED, REPLICATED, REPLICATED),
        (REPLICATED, sharded(1), sharded(1)),
        (sharded(1), sharded(0), PARTIAL),
        (sharded(0), REPLICATED, sharded(0)),
    }
    assert not {one for one in found if one[:2] in ((sharded(0), sharded(0)), (sharded(1), REPLICATED))}


def test_heads_are_not_divided_unevenly():
    whole = {(REPLICATED, REPLICATED)}
    options = [((2, 8, 12), [REPLICATED, sharded(2)])]
    for run, heads in ((lambda x: x.view(2, 8, 3, 4), set()), (lambda x: x.view(2, 8, 4, 3), {(sharded(2),) * 2})):
        assert strategies_of(run, "view.default", options) == whole | heads


def test_packed_dimensions_are_split_into_their_blocks():
    packed = sharded(1, 3)
    found = strategies_of(lambda x: x.chunk(3, 1)[0], "split.Tensor", [((4, 12), [REPLICATED, sharded(1), packed])])
    assert found == {(REPLICATED,) * 4, (packed, *(sharded(1),) * 3)}
    # the heads of all examples in one dimension, and back
    flat = strategies_of(lambda x: x.view(8, 6, 2), "view.default", [((2, 4, 6, 2), [REPLICATED, sharded(1)])])
    assert flat == {(REPLICATED,) * 2, (sharded(1), sharded(0, 2))}
    back = strategies_of(lambda x: x.view(2, 4, 6, 2), "view.default", [((8, 6, 2), [REPLICATED, sharded(0, 2)])])
    assert back == {(REPLICATED,) * 2, (sharded(0, 2), sharded(1))}


# The patterns


def test_an_mlp_is_a_column_row_pair():
    assert divided(solve_mlp(Mlp())) == {"fc1": "colwise", "fc2": "rowwise"}
    assert divided(solve_mlp(Mlp(num_blocks=2))) == {"fc1": "packed_colwise:2", "fc2": "rowwise"}


@pytest.mark.parametrize("tp_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_attention_is_divided_by_heads(tp_size):
    batch = torch.zeros(4, 16, 64)
    found = solve(Attention(64, 4), batch, tp_size=tp_size, criterion=mean_of)
    columns = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "colwise")
    assert divided(found) == {**columns, "o_proj": "rowwise"}
    uneven = solve(Attention(96, 3), torch.zeros(4, 16, 96), criterion=mean_of)
    assert not {"colwise", "rowwise"} & set(uneven.plan.values())
    assert "colwise_gather_output" in uneven.plan.values()  # whose outputs are gathered before they become heads


def test_llama_is_divided_as_in_megatron():
    found = solve(make_llama(), token_batch())
    layer = "model.layers.*."
    pairs = {f"{layer}self_attn.{one}_proj": "colwise" for one in "qkv"}
    pairs |= {f"{layer}mlp.{one}_proj": "colwise" for one in ("gate", "up")}
    pairs |= {f"{layer}self_attn.o_proj": "rowwise", f"{layer}mlp.down_proj": "rowwise", "lm_head": "vocab_head"}
    assert {name: style for name, style in divided(found).items() if "embed" not in name} == pairs
    assert found.plan["model.embed_tokens"] in ("vocab", "embedding_colwise_gather_output")
    assert found.is_tensor_parallel_faster


# Attention by a kernel, by matrix products.
@pytest.mark.parametrize("dropout", [0.0, pytest.param(0.1, marks=pytest.mark.slow)])
def test_gpt2_is_divided_as_in_megatron(dropout):
    found = solve(make_gpt2(attn_pdrop=dropout, use_cache=dropout > 0), token_batch())
    layer = "transformer.h.*."
    assert {name: style for name, style in divided(found).items() if "wpe" not in name} == {
        "transformer.wte": "vocab",  # tied
        f"{layer}attn.c_attn": "packed_colwise:3",
        f"{layer}attn.c_proj": "rowwise",
        f"{layer}mlp.c_fc": "colwise",
        f"{layer}mlp.c_proj": "rowwise",
        "lm_head": "vocab_head",
    }


@pytest.mark.slow
def test_norms_of_heads_have_partial_gradients():
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {**SIZES, "intermediate_size": 128, "num_key_value_heads": 2, "head_dim": 16, "use_cache": False}
    with torch.device("meta"):
        model = Qwen3ForCausalLM(Qwen3Config(**sizes))
    found = solve(model, token_batch())
    norms = {f"model.layers.*.self_attn.{one}_norm": "replicated_with_grad_allreduce" for one in "qk"}
    assert norms.items() <= found.plan.items()


def test_a_large_head_is_divided_by_the_vocabulary_and_a_small_one_is_not():
    profile = profile_of(latency=1e-4, seconds_per_byte=1e-8)
    ids = torch.zeros(4, 8, dtype=torch.long)
    large = solve(LanguageModel(4096, 16), ids, profile, criterion=cross_entropy_of)
    small = solve(LanguageModel(8, 16), ids, profile, criterion=cross_entropy_of)
    assert large.plan["head"] == "vocab_head"
    assert small.plan.get("head", "replicated") == "replicated"
    # Logits that are used otherwise have to be gathered.
    other = solve(LanguageModel(4096, 16), ids, profile, criterion=lambda logits, ids: logits.square().mean())
    assert other.plan.get("head", "replicated") != "vocab_head"


def test_data_parallelism_is_faster_where_tensor_parallelism_does_not_pay():
    slow = solve_mlp(Mlp(), SLOW)
    assert slow.plan == {}
    assert not slow.is_tensor_parallel_faster
    assert "data parallelism is faster" in slow.explain()
    tiny = solve(Mlp(4, 8), torch.zeros(4096, 4), profile_of(bytes_per_second=1e8, latency=1e-5), criterion=mean_of)
    assert not tiny.is_tensor_parallel_faster  # activations are larger than weights
    wide = solve(Mlp(512, 2048), torch.zeros(4, 512), FAST, criterion=mean_of)
    assert wide.is_tensor_parallel_faster


# Costs


@pytest.mark.parametrize("latency", [0.0, 1e-3])
def test_the_time_of_a_pair_by_hand(latency):
    width, hidden, rows = 16, 64, 32
    profile = profile_of(latency=latency)
    found = solve(Mlp(width, hidden, bias=False), torch.zeros(rows, width), profile, criterion=mean_of)
    # Two products in forward, and all but the input's gradient in backward. Only forward reduces: inputs are data.
    seconds = 5 * 2 * rows * width * hidden / FLOPS_PER_SECOND
    if latency == 0:
        assert divided(found) == {"fc1": "colwise", "fc2": "rowwise"}
        assert found.seconds == pytest.approx(seconds / 2, rel=1e-4)
    else:
        assert found.plan == {}
        assert found.seconds == pytest.approx(seconds, rel=1e-4)
    assert found.seconds_data_parallel == pytest.approx(seconds / 2 + latency, rel=1e-4)
    one = next(one for one in found.choices if one.pattern == "fc1")
    assert one.seconds["colwise"] == pytest.approx(seconds / 2 + latency, rel=1e-4)
    assert one.seconds["replicated"] == pytest.approx(0.7 * seconds if latency == 0 else seconds, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("make", [make_gpt2, make_llama])
def test_times_and_memory_are_those_of_the_simulated_plugin(make):
    # Slow enough that communication counts.
    profile = profile_of(bytes_per_second=1e9, call=1e-6, latency=5e-3, seconds_per_byte=1e-8)
    given = (
        {"attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0, "use_cache": False, "n_embd": 128}
        if make is make_gpt2
        else {}
    )
    model, batch = make(**given), token_batch(8, 32)
    found = solve(model, batch, profile)
    settings = {"tp_size": 2, "plan": found.plan, "precision": "fp32"}
    simulated = estimate_memory(model, "hybrid_parallel", batch=batch, num_ranks=2, settings=settings, profile=profile)
    assert simulated.step_time.exposed_communication > 0.1 * simulated.step_time.total
    assert found.seconds == pytest.approx(simulated.step_time.total, rel=0.05)
    assert found.memory == pytest.approx(simulated.total, rel=0.1)
    half = {name: ids[:4] for name, ids in batch.items()}
    simulated = estimate_memory(model, "torch_ddp", batch=half, num_ranks=2, profile=profile)
    assert found.seconds_data_parallel == pytest.approx(simulated.step_time.total, rel=0.05)


@pytest.mark.parametrize("kind", [Stack, pytest.param(SumStack, marks=pytest.mark.slow)])
def test_equal_layers_are_solved_once_and_count_as_often_as_there_are(kind, monkeypatch):
    def record(depth):
        return record_step(TrainingRecipe(model=kind(*[64] * depth), batch=torch.zeros(8, 16, 16), criterion=mean_of))

    def time_of(depth):
        found = solve_mlp(kind(*[64] * depth), verify=False)
        assert {one.num_modules for one in found.choices} == {depth}
        return found.seconds

    seconds = {depth: time_of(depth) for depth in (2, 3, 6)}
    assert seconds[6] - seconds[3] == pytest.approx(3 * (seconds[3] - seconds[2]), rel=1e-9)
    # Of deep models, a few layers are recorded.
    whole = record(6)
    monkeypatch.setattr(repeated_layers, "MIN_LAYERS", 3)
    monkeypatch.setattr(repeated_layers, "MIN_NUMEL", 1)
    short = record(6)
    assert len(short.nodes) == len(whole.nodes) if kind is SumStack else len(short.nodes) < 0.6 * len(whole.nodes)
    assert short.kinds == whole.kinds
    assert time_of(6) == pytest.approx(seconds[6], rel=1e-9)


def test_layers_that_differ_are_solved_apart():
    found = solve_mlp(Stack(64, 65, 64))
    assert [found.plan[f"layers.{index}.fc1"] for index in (0, 2)] == ["colwise"] * 2
    assert found.plan["layers.1.fc1"] == "rowwise_split_input"  # 65 features
    assert [found.plan[f"layers.{index}.fc2"] for index in (0, 1, 2)] == ["rowwise", "colwise_gather_output", "rowwise"]


# Memory


def test_a_memory_budget_changes_the_choice():
    free = solve_mlp(Mlp(), SLOW)
    tight = solve_mlp(Mlp(), SLOW, memory_budget=0.75 * free.memory)
    assert free.plan == {}
    assert divided(tight)
    assert tight.seconds > free.seconds
    assert tight.memory <= 0.75 * free.memory
    with pytest.raises(ConfigError, match=r"memory_budget=1,000 bytes is too small: .* at least [0-9,]+ bytes"):
        solve_mlp(Mlp(), memory_budget=1000)


def test_memory_is_that_of_weights_gradients_states_and_kept_activations():
    model = Mlp(16, 64, bias=False)
    rows = 4096  # so that activations count
    whole = solve(model, torch.zeros(rows, 16), SLOW, criterion=mean_of)
    weights = 2 * 16 * 64
    kept = rows * 64 * 4 * 2  # the output of fc1, and that of gelu
    assert whole.memory == pytest.approx(16 * weights + kept, rel=0.01)
    half = solve(model, torch.zeros(rows, 16), FAST, criterion=mean_of)
    assert half.memory == pytest.approx((16 * weights + kept) / 2, rel=0.01)
    sgd = solve(model, torch.zeros(rows, 16), SLOW, criterion=mean_of, optimizer=lambda one: torch.optim.SGD(one, 0.1))
    assert sgd.memory == pytest.approx(8 * weights + kept, rel=0.01)


# What is shown


def test_the_table_has_the_cost_of_each_choice_and_the_plugin_prints_it():
    found = solve_mlp(Mlp())
    assert list(found.plan) == ["fc1", "fc2"]
    text = found.explain()
    for one in found.choices:
        assert one.style == min(one.seconds, key=one.seconds.get)
        for style, seconds in one.seconds.items():
            assert f"{style} {1e3 * seconds:.4g} ms" in text
        assert {"replicated", "colwise_gather_output"} < set(one.seconds)
    assert "tensor parallelism is faster" in text
    with fake_world(2):
        plugin = HybridParallelPlugin(tp_size=2, plan=found.plan, precision="fp32")
        shown = plugin.explain(Mlp())
    assert f"fc1: chosen for the time of a step: colwise {1e3 * found.seconds:.4g} ms, " in shown
    assert "replicated" in shown


def test_what_the_plugin_refuses_is_not_chosen():
    class Scores(Attention):  # as attention weights of transformers, which would be those of a rank's heads
        def forward(self, x):
            q, k, v = (one(x).view(*x.shape[:2], -1, self.head_dim).transpose(1, 2) for one in self.projections())
            scores = (q @ k.transpose(-1, -2)).softmax(-1)
            return self.o_proj((scores @ v).transpose(1, 2).flatten(2)), scores

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = Scores(64, 4)

        def forward(self, x):
            return self.attention(x)[0]

    model, batch = Model(), torch.zeros(4, 16, 64)
    found = solve(model, batch, criterion=mean_of)
    assert found.plan["attention.q_proj"] == "colwise_gather_output"
    refused = {one.pattern: one.refused for one in found.choices}
    assert refused["attention.q_proj"]["colwise"] == refused["attention.o_proj"]["rowwise"]
    assert "colwise is refused: the plan shards 'attention' (Scores)" in found.explain()
    unverified = solve(model, batch, criterion=mean_of, verify=False)
    assert unverified.plan["attention.q_proj"] == "colwise"


def test_a_weight_that_other_code_reads_is_not_divided():
    class Model(Mlp):
        def forward(self, x):
            return super().forward(x) + self.fc1.weight.sum()

    found = solve_mlp(Model())
    assert next(one for one in found.choices if one.pattern == "fc1").style == "replicated"


# Mistakes


def test_mistakes(monkeypatch, tmp_path):
    monkeypatch.setenv("BOOSTER_PROFILE_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match="no profile with the times of collectives: run `booster profile-mesh"):
        solve_mlp(Mlp(), None)
    with pytest.raises(ConfigError, match="tp_size=1 is not a number of ranks that share layers"):
        solve_mlp(Mlp(), tp_size=1)
    with pytest.raises(ConfigError, match="memory_budget='80GiB' is not a positive number of bytes"):
        solve_mlp(Mlp(), memory_budget="80GiB")
    with pytest.raises(ConfigError, match=r"has no time of all_gather, all_reduce, all_to_all, reduce_scatter"):
        solve_mlp(Mlp(), replace(FAST, collectives=()))
    with pytest.raises(ConfigError, match="can't be run on fake tensors to record its operators"):
        solve(Mlp(), torch.zeros(8, 5), criterion=mean_of)
    with pytest.raises(ConfigError, match="without a loss to run backward from: give criterion="):
        solve(Mlp(), torch.zeros(8, 16))
    with pytest.raises(ConfigError, match="the loss of Mlp depends on no parameter that is trained"):
        solve(Mlp(), torch.zeros(8, 16), criterion=lambda outputs, batch: outputs.detach().mean())
    with pytest.raises(ConfigError, match="Mlp has no parameter that is trained"):
        solve_mlp(Mlp().requires_grad_(False))
    adapted = Mlp()
    adapted.fc2 = nn.ModuleDict({"base_layer": adapted.fc2})  # as those of peft
    with pytest.raises(ConfigError, match=r"'fc2' has an adapter, .* solve for the model without adapters"):
        solve_mlp(adapted)
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(ConfigError, match=r"needs scipy, .*: pip install 'torch-booster\[auto\]'"):
        solve_mlp(Mlp())
