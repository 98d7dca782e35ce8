"""HybridParallelPlugin: bytes on the wire and memory per rank are what theory says."""

from __future__ import annotations

import gc
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from harness import distributed, preload
from hybrid_cases import on_own_axis, on_tensor_axis
from torch import nn
from zoo import TRANSFORMERS_MODULES, get_model

from booster import Booster
from booster.comm import count_communication
from booster.device import current_device
from booster.plugins.hybrid_parallel.model import _COMPARED_BATCHES
from booster.plugins.hybrid_parallel.plugin import HybridParallelPlugin
from booster.pytree import map_tensors

pytestmark = pytest.mark.on_device

preload(*TRANSFORMERS_MODULES)
BATCH, LENGTH, WIDTH, INNER, VOCABULARY = 2, 16, 64, 96, 128
FP32 = 4
HIDDEN_BYTES = BATCH * LENGTH * WIDTH * FP32


def llama(depth: int, **settings) -> nn.Module:
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=depth,
        num_attention_heads=4,
        vocab_size=VOCABULARY,
        use_cache=False,
        tie_word_embeddings=False,
        **settings,
    )
    return transformers.LlamaForCausalLM(config)


def boosted(model: nn.Module, **arguments):
    booster = Booster(plugin=HybridParallelPlugin(**{"precision": "fp32", **arguments}))
    return booster, *booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-3))[:2]


def tokens() -> torch.Tensor:
    return torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0)).to(current_device())


def counted(model, compute_loss, booster, optimizer):
    """Returns what a forward and what a backward communicates, once the groups have met and compared their batches."""
    for _ in range(_COMPARED_BATCHES):
        booster.backward(compute_loss(model), optimizer)
        optimizer.zero_grad()
    with count_communication() as forward:
        loss = compute_loss(model)
    with count_communication() as backward:
        booster.backward(loss, optimizer)
    optimizer.zero_grad()
    return forward, backward


def llama_loss(model):
    return model(input_ids=tokens(), labels=tokens()).loss


def per_layer(**arguments):
    """Returns calls and sent bytes that one more layer costs in a forward and in a backward."""
    counts = []
    for depth in (1, 2):
        booster, model, optimizer = boosted(llama(depth, num_key_value_heads=4), **arguments)
        counts.append(counted(model, llama_loss, booster, optimizer))
    costs = []
    for less, more in zip(*counts, strict=True):
        costs.append((more.calls - less.calls, sum(more.sent.values()) - sum(less.sent.values())))
    return costs


def share(size: int) -> float:
    """Of a tensor that a rank sends in an all-gather or a reduce-scatter, and twice in an all-reduce."""
    return (size - 1) / size


@distributed(world_size=[2, 4])
def test_a_column_and_a_row_layer_cost_one_all_reduce_each_way(world_size):
    plan = {"layers.*.gate": "colwise", "layers.*.up": "colwise", "layers.*.down": "rowwise"}
    entry = get_model("user_transformer")
    booster, model, optimizer = boosted(entry.build(), tp_size=world_size, plan=plan)
    batch = map_tensors(lambda tensor: tensor.to(booster.device), entry.make_batch(0, 2))
    forward, backward = counted(model, lambda model: entry.loss(model, batch), booster, optimizer)
    each = 2 * share(world_size) * (2 * 12 * 32 * FP32)
    assert forward.calls == Counter(all_reduce=2)  # one for each of two layers
    assert forward.sent["all_reduce"] == 2 * each
    # One for each; and which parameters were used, if the plugin asks, at most a few bytes.
    assert backward.sent["all_reduce"] - 2 * each <= 256
    assert backward.calls["all_reduce"] in (2, 3)


@distributed(world_size=[2, 4])
def test_a_layer_costs_two_all_reduces_each_way(world_size):
    (forward, forward_bytes), (backward, backward_bytes) = per_layer(tp_size=world_size)
    assert forward == backward == Counter(all_reduce=2)
    assert forward_bytes == backward_bytes == 2 * 2 * share(world_size) * HIDDEN_BYTES


@distributed(world_size=[2, 4])
def test_a_whole_forward_costs_what_its_parts_do(world_size):
    # Without the rotary frequencies, a buffer that all ranks get from the first.
    booster, model, optimizer = boosted(llama(2), tp_size=world_size, broadcast_buffers=False)
    forward, backward = counted(model, llama_loss, booster, optimizer)
    each = 2 * share(world_size) * HIDDEN_BYTES
    # The embedding and two of each layer; the loss has a few numbers per token.
    assert 5 * each < forward.sent["all_reduce"] <= 5 * each + 3 * 2 * share(world_size) * BATCH * LENGTH * 2 * FP32
    assert forward.calls["all_reduce"] <= 5 + 3
    assert set(forward.calls) == {"all_reduce"}  # no logits travel
    # The head's input instead of the embedding's output.
    assert 5 * each <= backward.sent["all_reduce"] <= 5 * each + 256


@pytest.mark.parametrize("mode", ["split_gather", "ring"])
@distributed(world_size=[2, 4])
def test_dividing_the_sequence_between_layers_costs_no_more_bytes(mode, world_size):
    costs = per_layer(**on_tensor_axis(mode, world_size)[1])
    for _, num_bytes in costs:
        assert num_bytes >= 2 * 2 * share(world_size) * HIDDEN_BYTES
    # Backward may gather the layers' inputs a second time instead of keeping them; two norms' gradients are summed.
    norms = 2 * 2 * share(world_size) * WIDTH * FP32
    assert costs[0][1] == 2 * 2 * share(world_size) * HIDDEN_BYTES
    assert costs[1][1] <= 3 * 2 * share(world_size) * HIDDEN_BYTES + norms


@distributed(world_size=[2, 4])
def test_exchanging_heads_for_tokens_costs_four_parts_of_the_hidden_states(world_size):
    # Query, key, value and what attention returns: each rank keeps its own share of its part.
    expected = 4 * share(world_size) * HIDDEN_BYTES / world_size
    (forward, forward_bytes), (_, backward_bytes) = per_layer(**on_own_axis("all_to_all", world_size)[1], zero_stage=1)
    assert forward_bytes == expected
    assert forward["all_to_all"] <= 4
    # The gradients of the layer's weights travel as well, in their own way.
    weights = (4 * WIDTH * WIDTH + 3 * WIDTH * INNER + 2 * WIDTH) * FP32 * share(world_size)
    assert expected <= backward_bytes <= expected + weights + 4096


@distributed(world_size=[2, 4])
def test_a_ring_passes_keys_and_values_to_all_other_ranks(world_size):
    expected = 2 * (world_size - 1) * HIDDEN_BYTES / world_size
    (_, forward_bytes), _ = per_layer(**on_own_axis("ring_attn", world_size)[1], zero_stage=1)
    assert forward_bytes == expected


@pytest.mark.parametrize("zero_stage", [0, 1, 2])
@distributed(world_size=4)
def test_replicas_exchange_only_gradients_of_their_own_part(zero_stage):
    booster, model, optimizer = boosted(llama(2), tp_size=2, zero_stage=zero_stage)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    llama_loss_of = model(input_ids=tokens(), labels=tokens()).loss
    with count_communication() as backward:
        booster.backward(llama_loss_of, optimizer)
    with count_communication() as step:
        optimizer.step()
    gradients = num_parameters * FP32 * share(2) * (2 if zero_stage == 0 else 1)
    activations = 5 * 2 * share(2) * HIDDEN_BYTES
    total = sum(backward.sent.values()) + sum(step.sent.values())
    weights = 0 if zero_stage == 0 else num_parameters * FP32 * share(2)
    assert gradients + activations + weights <= total <= 1.02 * (gradients + activations + weights) + 4096
    assert sum(step.sent.values()) <= weights + 4096  # gradients are reduced while backward continues


@pytest.mark.parametrize("mode", ["split_gather", "ring", "all_to_all", "ring_attn"])
@distributed(world_size=4)
def test_stages_send_each_ranks_tokens_only(mode):
    axis = {"sp_size": 2} if mode in ("all_to_all", "ring_attn") else {"tp_size": 2}
    sequence = {"enable_sequence_parallelism": True, "sequence_parallelism_mode": mode}
    booster, model, optimizer = boosted(
        llama(2, num_key_value_heads=4), pp_size=2, num_microbatches=2, **axis, **sequence
    )

    def run() -> None:
        batch = {"input_ids": tokens(), "labels": tokens()}
        booster.execute_pipeline(iter([batch]), model, lambda outputs, _: outputs.loss, optimizer, return_loss=False)

    run()
    with count_communication() as sent:
        run()
    # Activations from the first stage, gradients from the second.
    assert sent.sent["send"] == HIDDEN_BYTES // 2
    optimizer.step()


def alive_bytes() -> int:
    """Counts every storage that a tensor is alive of, once."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, nn.Parameter):
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


# By default the precisions in turn.
@pytest.mark.parametrize(
    ("precision", "tp_size", "zero_stage"),
    [
        pytest.param(precision, *sizes, marks=() if number % 2 == index else pytest.mark.slow)
        for index, precision in enumerate(["fp32", "bf16"])
        for number, sizes in enumerate([(1, 0), (2, 0), (2, 1), (2, 2), (4, 0)])
    ],
)
@distributed(world_size=4)
def test_memory_equals_theory(tp_size, zero_stage, precision):
    before = alive_bytes()
    booster, model, optimizer = boosted(
        llama(2, num_key_value_heads=4), tp_size=tp_size, zero_stage=zero_stage, precision=precision,
        zero_bucket_size_in_m=0.01, ddp_bucket_cap_mb=0.04,
    )  # fmt: skip
    divided = 2 * VOCABULARY * WIDTH + 2 * (4 * WIDTH * WIDTH + 3 * WIDTH * INNER)
    num_parameters = divided // tp_size + 5 * WIDTH
    num_shards = 1 if zero_stage == 0 else 4 // tp_size
    weight = 4 if precision == "fp32" else 2
    states = 8 if precision == "fp32" else 12  # two moments, and masters
    summed = 4 / num_shards  # for masters, gradients are in fp32 as well
    gradients = summed if zero_stage == 2 else max(weight, summed)
    for _ in range(2):
        loss = llama_loss(model)
        booster.backward(loss, optimizer)
        del loss
        optimizer.step()
        held = alive_bytes() - before
        expected = num_parameters * (weight + states / num_shards + gradients)
        buckets = 0.01 * 2**20 * weight
        assert 0.95 * expected <= held <= 1.05 * expected + buckets + 2**15, f"{held:,} of {expected:,}"
        optimizer.zero_grad()
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters


@distributed(world_size=2)
def test_everything_is_freed_with_the_wrappers():
    before = alive_bytes()
    for arguments in (on_tensor_axis("split_gather", 2)[1], on_own_axis("all_to_all", 2)[1], {"tp_size": 2}):
        booster, model, optimizer = boosted(llama(2), **arguments)
        booster.backward(llama_loss(model), optimizer)
        optimizer.step()
        optimizer.zero_grad()
        assert alive_bytes() - before > 10 * WIDTH**2
        del model, optimizer, booster
        assert alive_bytes() - before < 2**16
    assert dist.is_initialized()
