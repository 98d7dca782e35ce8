"""Tensor parallelism on grids of ranks against one process: models, layouts, shapes, bytes, streams of dropout."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from harness import distributed, run_ranks
from hybrid_cases import assert_hybrid_equals_serial
from torch import nn
from torch._dynamo.utils import counters
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM
from zoo import get_model

from booster import Booster
from booster.comm import count_communication
from booster.device import current_device
from booster.errors import ConfigError
from booster.plugins import HybridParallelPlugin
from booster.plugins.hybrid_parallel.tensor_parallel_nd.linear import grid_matmul
from booster.pytree import map_tensors

pytestmark = pytest.mark.on_device

SQUARE = (4, {"tp_size": 4, "tp_mode": "2d"})
SQUARES = (8, {"tp_size": 8, "tp_mode": "2.5d", "tp_depth": 2})
CUBE = (8, {"tp_size": 8, "tp_mode": "3d"})
GRIDS = {"2d": SQUARE, "2.5d": SQUARES, "3d": CUBE}
STAGES = {"pp_size": 2, "num_microbatches": 2}
MODELS = ["llama", "gpt2", "bert", "vit"]


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize("model", [*MODELS, slow("qwen3"), slow("phi"), slow("opt"), slow("user_transformer")])
def test_a_square_equals_one_process(model):
    assert_hybrid_equals_serial(model, SQUARE, max_norm=0.5, steps=3)


@pytest.mark.parametrize(
    ("model", "mode"),
    [("llama", "3d"), ("gpt2", "2.5d"), *(slow(model, mode) for mode in ("2.5d", "3d") for model in MODELS)],
)
def test_eight_ranks_equal_one_process(model, mode):
    assert_hybrid_equals_serial(model, GRIDS[mode], max_norm=0.5, steps=3)


COMBINED = {
    "zero 0": {"zero_stage": 0, "accumulation": 2, "synchronize": "no_sync"},
    "zero 1": {"zero_stage": 1, "accumulation": 2, "synchronize": "accumulate"},
    "zero 2": {"zero_stage": 2},
    "bf16": {"zero_stage": 1, "precision": "bf16"},
    "fp16": {"zero_stage": 0, "precision": "fp16"},
    "stages": {"arguments": STAGES},
    "stages zero 1": {"zero_stage": 1, "arguments": STAGES | {"gradient_checkpoint_config": True}},
    "zbv": {"arguments": STAGES | {"pp_style": "zbv", "num_model_chunks": 2}, "num_layers": 4},
}


@pytest.mark.parametrize(
    ("model", "name"),
    [("llama", "zero 1"), ("gpt2", "stages"), *(slow(model, name) for model in ("llama", "bert") for name in COMBINED)],
)
def test_a_square_with_other_axes(model, name):
    assert_hybrid_equals_serial(model, (8, SQUARE[1]), max_norm=0.5, steps=3, **COMBINED[name])


@pytest.mark.parametrize(
    ("model", "mode", "settings"),
    [
        ("bert", "2d", {"precision": "bf16"}),
        ("llama", "2d", {"arguments": {"gradient_checkpoint_config": True}}),
        slow("llama", "2d", {"precision": "fp16"}),
        slow("gpt2", "2.5d", {"precision": "bf16"}),
        slow("llama", "3d", {"precision": "fp16"}),
        slow("llama", "3d", {"arguments": {"gradient_checkpoint_config": True}}),
        slow("llama", "2d", {"arguments": {"parallel_output": False}}),
    ],
)
def test_arguments_and_precisions(model, mode, settings):
    assert_hybrid_equals_serial(model, GRIDS[mode], max_norm=0.5, steps=3, **settings)


class Pair(nn.Module):
    def __init__(self, hidden=256, inner=1024, has_bias=True):
        super().__init__()
        self.up, self.down = nn.Linear(hidden, inner, has_bias), nn.Linear(inner, hidden, has_bias)

    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(x)))


class Functional(nn.Module):
    """A layer whose norms are functions in its own code."""

    def __init__(self, hidden=12):
        super().__init__()
        self.pair = Pair(hidden, 24)

    def forward(self, x):
        x = x + self.pair(nn.functional.rms_norm(x, (x.shape[-1],)))
        return nn.functional.layer_norm(x, x.shape[-1:]) * x.square().mean(-1, keepdim=True)


def plan_of(model):
    prefix = "" if isinstance(model, Pair) else "*.pair."
    return {f"{prefix}up": "colwise", f"{prefix}down": "rowwise"}


NETWORKS = {
    "alone": lambda: Pair(12, 24),
    "without bias": lambda: Pair(12, 24, has_bias=False),
    "stack": lambda: nn.Sequential(Functional(), Functional(), Functional()),
    "frozen": lambda: _freeze(nn.Sequential(Functional(), Functional())),
}


def _freeze(model):
    model[0].pair.up.weight.requires_grad_(False)
    model[1].pair.down.bias.requires_grad_(False)
    return model


def gradients(name, arguments, num_examples):
    """Returns output, gradient of the input and output after a step, in fp64, on the grid and in one process."""
    torch.manual_seed(0)
    serial = NETWORKS[name]().to(current_device(), torch.float64)
    divided = copy.deepcopy(serial)
    plugin = HybridParallelPlugin(precision="fp32", plan=plan_of(serial), **arguments)
    booster = Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(divided, torch.optim.SGD(divided.parameters(), lr=1e-3))
    values, weights = torch.randn(2, num_examples, 5, 12, dtype=torch.float64).to(current_device())
    found = []
    for network, step in ((model, optimizer), (serial, torch.optim.SGD(serial.parameters(), lr=1e-3))):
        x = values.clone().requires_grad_()
        output = network(x)
        loss = (output * weights).sum()
        booster.backward(loss, step) if network is model else loss.backward()
        step.step()
        found.append([output.detach(), x.grad])
        found[-1] += [network(values).detach()]  # by the weights after the step
    return found


def assert_gradients(name, arguments, num_examples):
    ours, theirs = gradients(name, arguments, num_examples)
    for actual, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


@distributed(4)
@pytest.mark.parametrize("num_examples", [4, 3, 1])
@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_on_a_square(name, num_examples):
    assert_gradients(name, SQUARE[1], num_examples)


@distributed(9)
@pytest.mark.slow
def test_gradients_on_a_square_of_nine():
    assert_gradients("stack", {"tp_size": 9, "tp_mode": "2d"}, 7)


@distributed(8)
@pytest.mark.parametrize("num_examples", [8, 6])
@pytest.mark.parametrize("mode", ["2.5d", "3d"])
@pytest.mark.parametrize("name", ["alone", "stack"])
def test_gradients_on_squares_and_cubes(name, mode, num_examples):
    assert_gradients(name, GRIDS[mode][1], num_examples)


def assert_an_mlp_trains_alike(arguments):
    """AdamW with clipping, three steps, in fp32."""
    torch.manual_seed(0)
    serial = Pair().to(current_device())
    divided = copy.deepcopy(serial)
    booster = Booster(plugin=HybridParallelPlugin(precision="fp32", plan=plan_of(serial), **arguments))
    model, optimizer, *_ = booster.boost(divided, torch.optim.AdamW(divided.parameters(), lr=1e-3))
    own = torch.optim.AdamW(serial.parameters(), lr=1e-3)
    x, targets = torch.randn(2, 16, 256).to(current_device())
    for _ in range(3):
        loss, expected = (nn.functional.mse_loss(one(x), targets) for one in (model, serial))
        booster.backward(loss, optimizer)
        norm = booster.clip_grad_norm_(optimizer, 0.01)
        expected.backward()
        assert norm.item() == pytest.approx(nn.utils.clip_grad_norm_(serial.parameters(), 0.01).item(), rel=1e-5)
        assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
        for one in (optimizer, own):
            one.step()
            one.zero_grad()
    torch.testing.assert_close(model(x), serial(x), rtol=0, atol=1e-5)


@distributed(4)
def test_an_mlp_on_a_square():
    assert_an_mlp_trains_alike(SQUARE[1])


@distributed(8)
@pytest.mark.parametrize("mode", ["2.5d", "3d"])
def test_an_mlp_on_squares_and_cubes(mode):
    assert_an_mlp_trains_alike(GRIDS[mode][1])


def shapes_of(mode):
    """Returns the shapes that forward sees, in the order of the documents, and the table of `explain`."""
    model = Pair()
    plugin = HybridParallelPlugin(precision="fp32", plan=plan_of(model), **GRIDS[mode][1])
    table = plugin.explain(model, batch_size=16)
    boosted, *_ = Booster(plugin=plugin).boost(model)
    found = [list(one.weight.shape)[::-1] for one in (boosted.module.up, boosted.module.down)]
    seen = []
    boosted.module.up.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    boosted.module.down.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape))
    output = boosted(torch.randn(16, 256, device=current_device()))
    assert output.shape == (16, 256)
    return found, [list(shape) for shape in seen], table


def assert_shapes(mode, weights, inner, lines):
    found, seen, table = shapes_of(mode)
    assert found == weights
    assert seen == [inner, inner]
    for line in lines:
        assert line in table


@distributed(4)
def test_the_shapes_of_the_documents_on_a_square():
    assert_shapes("2d", [[128, 512], [512, 128]], [8, 512], ["up: 8x128 -> 8x512", "down: 8x512 -> 8x128"])


@distributed(8)
def test_the_shapes_of_the_documents_on_squares_and_cubes():
    lines = ["up: 4x128 -> 4x512", "down: 4x512 -> 4x128"]
    assert_shapes("2.5d", [[128, 512], [512, 128]], [4, 512], lines)
    assert_shapes("3d", [[128, 256], [512, 64]], [4, 512], lines)


def received_by_one_layer(mode, rows, inputs, outputs):
    """Returns what the papers say that a rank receives in forward, and in backward, in elements."""
    side, depth = 2, 2 if mode == "2.5d" else 1
    if mode == "3d":
        x, weight, output = rows * inputs / side**3, inputs * outputs / side**3, rows * outputs / side**3
        forward = (side - 1) * (x + weight + output)
        # The three are gathered or summed once more, X and W gathered again, and Y in the place of a sum.
        return [forward, (side - 1) * (output + 2 * weight + 2 * x)]
    x, weight = rows * inputs / (depth * side**2), inputs * outputs / side**2
    return [(side - 1) * (x + weight), (side - 1) * 2 * (x + weight) + 2 * (depth - 1) / depth * weight]


def assert_bytes(mode):
    rows, inputs, outputs = 8, 4, 12
    grid = HybridParallelPlugin(precision="fp32", **GRIDS[mode][1])._partitioner.grid
    shape = grid.shape
    x = torch.randn(rows // shape.num_batch_shards, inputs // 2, device=current_device()).requires_grad_()
    num_rows = outputs // (4 if mode == "3d" else 2)
    weight = torch.randn(num_rows, inputs // 2, device=current_device()).requires_grad_()
    with count_communication() as forward:
        output = grid_matmul(x, weight, grid, is_second=False)
    grid.tp_group.reset()  # as at the end of a model's forward
    with count_communication() as backward:
        output.sum().backward()
    found = [sum(count.received.values()) / 4 for count in (forward, backward)]
    assert found == received_by_one_layer(mode, rows, inputs, outputs)


@distributed(4)
def test_the_bytes_on_a_square():
    assert_bytes("2d")


@distributed(4)
def test_layers_with_one_input_gather_it_once():
    grid = HybridParallelPlugin(precision="fp32", **SQUARE[1])._partitioner.grid
    x = torch.randn(4, 8, device=current_device()).requires_grad_()
    weights = [torch.randn(6, 8, device=current_device()).requires_grad_() for _ in range(3)]

    def received():
        with count_communication() as count:
            sum(grid_matmul(x, weight, grid, is_second=False).sum() for weight in weights).backward()
        grid.tp_group.reset()
        return sum(count.received.values()), [one.grad.clone() for one in (x, *weights)]

    found, gradients = received()
    for one in (x, *weights):
        one.grad = None
    with torch.no_grad():
        x.add_(0)  # another version of the same memory
    again, others = received()
    assert found == again
    for one, other in zip(gradients, others, strict=True):
        assert torch.equal(one, other)
    block, weight = 4 * 8 * 4, 6 * 8 * 4
    # The input once, as backward follows at once; three weights in forward and backward; sums of three gradients each.
    assert found == block + 6 * weight + 3 * block + 3 * weight


@distributed(8)
@pytest.mark.parametrize("mode", ["2.5d", "3d"])
def test_the_bytes_on_squares_and_cubes(mode):
    assert_bytes(mode)


def _llama(**changes):
    config = LlamaConfig(
        **{"vocab_size": 96, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32},
        **changes,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


@distributed(4)
def test_outputs_of_layers_masks_and_uneven_batches():
    serial = _llama().to(current_device())
    plugin = HybridParallelPlugin(precision="fp32", parallel_output=False, **SQUARE[1])
    model, *_ = Booster(plugin=plugin).boost(copy.deepcopy(serial))
    tokens = torch.randint(0, 96, (3, 7), device=current_device())
    mask = torch.ones_like(tokens)
    mask[1, :3] = 0
    expected = serial(input_ids=tokens, attention_mask=mask, output_hidden_states=True)
    found = model(input_ids=tokens, attention_mask=mask, output_hidden_states=True)
    torch.testing.assert_close(found.logits, expected.logits, rtol=0, atol=1e-5)
    for one, other in zip(found.hidden_states, expected.hidden_states, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    with pytest.raises(ConfigError, match="attention weights"):
        model(input_ids=tokens, output_attentions=True)


@distributed(4)
@pytest.mark.parametrize("way", ["plugin", "transformers"])
def test_batches_of_two_sizes_before_their_backwards(way):
    """Layers are computed again after a forward of other examples, of which each rank has as many."""
    serial = _llama().to(current_device())
    settings = {"gradient_checkpoint_config": True} if way == "plugin" else {}
    plugin = HybridParallelPlugin(precision="fp32", parallel_output=False, **settings, **SQUARE[1])
    model = copy.deepcopy(serial)
    if way == "transformers":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    booster = Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batches = [torch.randint(0, 96, (count, 7), device=current_device()) for count in (3, 4)]
    losses = []
    for one in (serial, model):
        outputs = []
        for tokens in batches:
            mask = torch.ones_like(tokens)
            mask[1, :3] = 0
            outputs.append(one(input_ids=tokens, attention_mask=mask).logits.square().mean())
        losses.append(sum(outputs))
    losses[0].backward()
    booster.backward(losses[1], optimizer)
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=0)
    torch.optim.SGD(serial.parameters(), lr=0.1).step()
    optimizer.step()
    tokens = batches[1]
    found, expected = (one(input_ids=tokens).logits for one in (model, serial))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@distributed(4)
def test_generation():
    serial = _llama().to(current_device()).eval()
    model, *_ = Booster(plugin=HybridParallelPlugin(precision="fp32", **SQUARE[1])).boost(copy.deepcopy(serial))
    model.eval()
    tokens = torch.randint(0, 96, (3, 5), device=current_device())
    settings = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(tokens)}
    assert torch.equal(model.module.generate(tokens, **settings), serial.generate(tokens, **settings))
    with pytest.raises(ConfigError, match="beam search exchanges the cached keys and values"):
        model.module.generate(tokens, num_beams=2, **settings)


def losses_with_dropout(checkpoints, seed):
    config = BertConfig(
        **{"vocab_size": 96, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.3},
    )
    torch.manual_seed(seed)
    model = BertForMaskedLM(config)
    masks = []
    plugin = HybridParallelPlugin(precision="fp32", gradient_checkpoint_config=checkpoints, **SQUARE[1])
    booster = Booster(plugin=plugin)
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    layer = boosted.module.bert.encoder.layer[0].attention.output.dropout
    layer.register_forward_hook(lambda module, args, output: masks.append(output == 0))
    tokens = torch.randint(0, 96, (4, 6), device=current_device())
    losses = []
    for _ in range(3):
        loss = boosted(input_ids=tokens, labels=tokens).loss
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, masks[0], torch.rand(1).item()


@distributed(4)
def test_every_rank_drops_other_elements_and_recomputation_the_same_ones():
    plain, mask, after = losses_with_dropout(None, 0)
    recomputed, again, also_after = losses_with_dropout(True, 0)
    assert plain == recomputed
    assert torch.equal(mask, again)
    assert after == also_after
    masks = [torch.empty_like(mask) for _ in range(4)]
    dist.all_gather(masks, mask)
    assert 0.1 < mask.float().mean() < 0.5
    assert all(not torch.equal(mask, other) for rank, other in enumerate(masks) if rank != dist.get_rank())
    numbers = [None] * 4
    dist.all_gather_object(numbers, after)
    assert len(set(numbers)) == 1  # outside of layers all ranks draw the same


def compiled_losses(model_name, arguments, compiles):
    """Returns losses under torch.compile, or without, and the number of graph breaks."""
    entry = get_model(model_name)
    torch.manual_seed(0)
    model = entry.build().to(current_device())
    options = {"compile": {"backend": "aot_eager"}} if compiles else {}
    booster = Booster(plugin=HybridParallelPlugin(precision="fp32", **arguments), **options)
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    torch._dynamo.reset()
    counters.clear()
    generator, losses = torch.Generator().manual_seed(1), []
    for _ in range(3):
        loss = entry.loss(boosted, map_tensors(lambda one: one.to(current_device()), entry.sample(4, generator)))
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, sum(counters["graph_break"].values()), counters["stats"]["unique_graphs"]


def assert_compiles(model_name, arguments):
    plain, _, _ = compiled_losses(model_name, arguments, compiles=False)
    losses, breaks, num_graphs = compiled_losses(model_name, arguments, compiles=True)
    assert losses == pytest.approx(plain, rel=1e-5)
    assert breaks == 0
    assert num_graphs > 0


@pytest.mark.slow
@distributed(4)
@pytest.mark.parametrize("model", ["llama", "gpt2", "bert", "vit"])
def test_compiled_layers_on_a_square(model):
    assert_compiles(model, SQUARE[1])


@distributed(8)
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["2.5d", "3d"])
def test_compiled_layers_on_squares_and_cubes(mode):
    assert_compiles("bert", GRIDS[mode][1])


def save_and_load(mode, folder):
    """Saves under a grid, and loads into zeros."""
    serial = _llama()
    booster = Booster(plugin=HybridParallelPlugin(precision="fp32", **GRIDS[mode][1]))
    model, *_ = booster.boost(copy.deepcopy(serial))
    booster.save_model(model, folder, shard=True)
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    with torch.no_grad():
        for one in model.parameters():
            one.zero_()
    booster.load_model(model, folder)
    for name, one in model.named_parameters():
        assert torch.equal(one, before[name]), name


@pytest.mark.parametrize("mode", ["2.5d", slow("3d")])
def test_checkpoints_of_squares_and_cubes(mode, tmp_path):
    run_ranks(save_and_load, 8, mode, str(tmp_path / "model"), timeout=120)
    saved, expected = LlamaForCausalLM.from_pretrained(tmp_path / "model").state_dict(), _llama().state_dict()
    for name, weight in expected.items():
        assert torch.equal(saved[name], weight), name
