"""Models under solved plans train as in one process; layouts are converted on real ranks."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from harness import preload, run_ranks
from machine_profiles import profile_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from booster import Booster, BoosterError
from booster.auto_parallel.placements import convert_layout, find_conversion, solve_placements
from booster.comm import group_rank
from booster.device import current_device
from booster.plugins import HybridParallelPlugin

preload(*(f"transformers.models.{name}.modeling_{name}" for name in ("gpt2", "llama")))

FAST = profile_of(bytes_per_second=1e9, call=1e-6, latency=1e-6, seconds_per_byte=1e-10)


def build_gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    no_dropout = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_head=4, n_layer=2, n_positions=32, vocab_size=64, **no_dropout))


def build_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=64, intermediate_size=64, use_cache=False))


class Uneven(nn.Sequential):
    """Hidden features and a vocabulary that do not divide: gathered outputs, split inputs, padding."""

    def __init__(self):
        super().__init__(nn.Embedding(65, 32), nn.Linear(32, 33), nn.GELU(), nn.Linear(33, 32), nn.Linear(32, 65))

    def forward(self, input_ids, labels=None):
        return super().forward(input_ids)


MODELS = {"gpt2": build_gpt2, "llama": build_llama, "uneven": Uneven}


def batch_of(step):
    ids = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids}


def loss_of(outputs, batch):
    if isinstance(outputs, torch.Tensor):
        return nn.functional.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten())
    return outputs.loss


def solve(name, tp_size):
    return solve_placements(MODELS[name](), batch_of(0), tp_size, profile=FAST, criterion=loss_of)


def train(name, tp_size, plan, arguments):
    torch.manual_seed(0)
    model = MODELS[name]()
    if tp_size > 1 and plan is None:
        plan = solve(name, tp_size).plan  # after the launch
    plugin = HybridParallelPlugin(tp_size=tp_size, precision="fp32", plan=plan, **arguments)
    boost = Booster(plugin=plugin)
    model, optimizer, *_ = boost.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    losses = []
    for step in range(3):
        batch = {key: value.to(current_device()) for key, value in batch_of(step).items()}
        loss = loss_of(model(**batch), batch)
        boost.backward(loss, optimizer)
        boost.clip_grad_norm_(optimizer, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, dict(plan or {})


@pytest.mark.slow
@pytest.mark.on_device
@pytest.mark.parametrize("name", MODELS)
def test_training_under_a_solved_plan_is_that_of_one_process(name):
    plan = solve(name, 2).plan
    ((expected, _),) = run_ranks(train, 1, name, 1, None, {})
    for losses, _ in run_ranks(train, 2, name, 2, plan, {}):
        assert losses == pytest.approx(expected, rel=1e-5, abs=1e-6)
    styles = set(plan.values())
    assert styles >= ({"colwise_gather_output", "rowwise_split_input"} if name == "uneven" else {"rowwise"})


@pytest.mark.on_device
def test_a_plan_is_solved_after_the_launch_and_is_the_same_on_all_ranks():
    plan = solve("llama", 2).plan
    ((expected, _),) = run_ranks(train, 1, "llama", 1, None, {})
    for losses, found in run_ranks(train, 2, "llama", 2, None, {"zero_stage": 1}):
        assert losses == pytest.approx(expected, rel=1e-5, abs=1e-6)
        assert found == plan


def solve_with_other_profiles():
    rank = group_rank()
    model, batch = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.zeros(4, 8)
    caught = []
    for profile in (profile_of(latency=1e-6 * (1 + rank)), replace(FAST, collectives=FAST.collectives * (1 - rank))):
        try:
            solve_placements(model, batch, 2, profile=profile, criterion=lambda outputs, batch: outputs.mean())
        except BoosterError as error:
            caught.append(f"{type(error).__name__}: {error}")
    return caught


def test_ranks_whose_profiles_differ_or_lack_collectives_are_told_so():
    for different, missing in run_ranks(solve_with_other_profiles, 2):
        assert different.startswith("DesyncError: ")
        assert "the same profile=" in different
        assert missing.startswith("ConfigError: ")
        assert "has no time of all_gather" in missing


SHAPE = (5, 4, 6)  # 5 is divided unevenly


def convert(sizes, pairs):
    """Returns how many conversions gave other values, or took another number of collectives than planned."""
    mesh = init_device_mesh("cpu", sizes)
    full = torch.arange(120.0).reshape(SHAPE)
    wrong = []
    for source, target in pairs:
        tensor = distribute_tensor(full, mesh, [Replicate() if one.is_partial() else one for one in source])
        size = 1
        for axis, placement in enumerate(source):
            size *= sizes[axis] if placement.is_partial() else 1
        tensor = DTensor.from_local(
            tensor.to_local() / size, mesh, source, run_check=False, shape=full.shape, stride=full.stride()
        )
        profile = profile_of(latency=1e-6, seconds_per_byte=1e-9, bytes_per_second=1e10)
        plan = find_conversion(SHAPE, full.dtype, mesh, source, target, profile)
        with CommDebugMode() as count:
            found = convert_layout(tensor, target, profile)
        num_collectives = sum(step.operation != "slice" for step in plan.steps)
        if found.placements != tuple(target) or count.get_total_counts() != num_collectives:
            wrong.append((source, target, found.placements, count.get_total_counts(), num_collectives))
        elif not torch.allclose(found.full_tensor(), full):
            wrong.append((source, target, "other values"))
    return wrong


@pytest.mark.parametrize(("num_ranks", "sizes"), [(2, (2,)), (4, (2, 2))])
def test_conversions_give_the_same_values_by_the_planned_collectives(num_ranks, sizes):
    kept = [Replicate(), *map(Shard, range(3))]
    sources = itertools.product([*kept, Partial()], repeat=len(sizes))
    pairs = list(itertools.product(sources, itertools.product(kept, repeat=len(sizes))))
    pairs = pairs[:: 1 if len(sizes) == 1 else 7]
    for wrong in run_ranks(convert, num_ranks, sizes, pairs):
        assert not wrong
