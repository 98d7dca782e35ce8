"""Random numbers of stacks on split sequences: of an example or of the model on all ranks alike, of tokens on each."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import distributed
from torch import nn
from torch.utils.checkpoint import checkpoint

from booster import Booster
from booster.device import current_device
from booster.errors import ConfigError
from booster.plugins import HybridParallelPlugin
from booster.plugins.hybrid_parallel.activation_checkpointing import GradientCheckpointConfig, checkpoint_layers
from booster.plugins.hybrid_parallel.sequence_parallel.group import SequenceParallelGroup
from booster.plugins.hybrid_parallel.sequence_parallel.layer_stack import attach_stack
from booster.plugins.hybrid_parallel.sequence_parallel.splitters import SequenceAxisSplitter, TensorAxisSplitter
from booster.plugins.hybrid_parallel.tensor_parallel.group import TensorParallelGroup

pytestmark = pytest.mark.on_device

MODES = ["all_to_all", "ring_attn", "split_gather"]
NUM_EXAMPLES, NUM_TOKENS = 16, 7

# How layers draw whether an example is dropped.
DRAWS = {
    "rand": lambda x: torch.rand(x.shape[0], 1, 1, device=x.device) < 0.5,
    "transformers": lambda x: (0.5 + torch.rand((x.shape[0],) + (1,) * (x.ndim - 1), device=x.device)).floor() > 0,
    "timm": lambda x: x.new_empty((x.shape[0], 1, 1)).bernoulli_(0.5) > 0,
    "vector": lambda x: (torch.rand(x.shape[0], device=x.device) < 0.5)[:, None, None],
    "like": lambda x: torch.rand_like(x[:, :1, :1]) < 0.5,
    "dropout": lambda x: F.dropout(torch.ones_like(x[:, :1, :1]), 0.5) > 0,
    "layer": lambda x: torch.rand([], device=x.device) < 0.5,
    "integers": lambda x: torch.randint(0, 2, (x.shape[0], 1, 1), device=x.device) > 0,
    "permutation": lambda x: (torch.randperm(x.shape[0], device=x.device) < 8)[:, None, None],
}


def splitter(mode):
    if mode == "split_gather":
        return TensorAxisSplitter(TensorParallelGroup(None, sequence_mode=mode))
    return SequenceAxisSplitter(SequenceParallelGroup(None, mode))


class Attention(nn.Module):
    def __init__(self, *, mixes):
        super().__init__()
        self.linear, self.mixes = nn.Linear(8, 8), mixes

    def forward(self, x):
        heads = self.linear(x).unsqueeze(1)
        return F.scaled_dot_product_attention(heads, heads, heads).squeeze(1) if self.mixes else heads.squeeze(1)


class Dropping(nn.Module):
    """A residual layer that drops examples, and tokens' features by dropout; parts of it may be recomputed alone."""

    def __init__(self, draw, *, mixes, dropout=0.0):
        super().__init__()
        self.attention, self.draw = Attention(mixes=mixes), draw
        self.mlp = DroppingPart(draw, dropout)
        self.checkpoints_part = False

    def forward(self, x):
        x = x + 0.1 * self.attention(x)
        if self.checkpoints_part:
            return checkpoint(self.mlp, x, use_reentrant=False)
        return self.mlp(x)


class DroppingPart(nn.Module):
    def __init__(self, draw, dropout):
        super().__init__()
        self.linear, self.dropout, self.draw = nn.Linear(8, 8), nn.Dropout(dropout), draw

    def forward(self, x):
        x = self.dropout(x)
        x = x + self.linear(x) * self.draw(x)
        return x + self.dropout(self.linear(x)) * self.draw(x)


class Marks(nn.Module):
    """A layer whose output is 1 for kept examples and 0 for dropped ones."""

    def __init__(self, draw, *, mixes):
        super().__init__()
        self.attention, self.draw = Attention(mixes=mixes), draw

    def forward(self, x):
        F.dropout(x, 0.5)  # of as many tokens as the rank has
        return self.draw(x) + 0 * self.attention(x)


@distributed([2, 3])
@pytest.mark.parametrize("mode", MODES)
def test_an_example_is_dropped_as_a_whole(world_size, mode):
    for name, draw in DRAWS.items():
        torch.manual_seed(0)
        layers = nn.ModuleList(Marks(draw, mixes=mode != "split_gather") for _ in range(3)).to(current_device())
        attach_stack([layers[0]], splitter(mode))
        attach_stack([layers[1], layers[2]], splitter(mode))
        masks = []
        for _ in range(8):
            x = torch.ones(NUM_EXAMPLES, NUM_TOKENS, 8, device=current_device())
            masks += [layers[0](x), layers[2](layers[1](x))]
        kept = torch.stack(masks)
        assert torch.equal(kept, kept[:, :, :1, :1].expand_as(kept)), name
        assert 0.2 < kept.mean() < 0.8, name
        assert len({tuple(one.flatten().tolist()) for one in masks}) > 1, name
        shared = [torch.empty(2, device=current_device()) for _ in range(world_size)]
        dist.all_gather(shared, torch.rand(2, device=current_device()))
        assert all(torch.equal(one, shared[0]) for one in shared), name


@distributed(2)
@pytest.mark.parametrize("mode", MODES)
def test_dropout_masks_of_tokens_differ_between_ranks(mode):
    class Masks(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = Attention(mixes=mode != "split_gather")

        def forward(self, x):
            torch.rand(x.shape[0], 1, 1)
            return F.dropout(torch.ones_like(x), 0.5) + 0 * self.attention(x)

    layers = nn.ModuleList(Masks() for _ in range(2)).to(current_device())
    attach_stack(list(layers), splitter(mode))
    kept = layers[1](layers[0](torch.ones(2, 64, 8, device=current_device()))) > 0
    first, second = kept.chunk(2, dim=1)
    assert not torch.equal(first, second)


@distributed(2)
@pytest.mark.parametrize("mode", MODES)
def test_recomputed_layers_drop_the_same_examples(mode):
    gradients = []
    for checkpoints in ("none", "calls", "layers", "parts"):
        torch.manual_seed(0)
        mixes = mode != "split_gather"
        layers = nn.ModuleList(Dropping(DRAWS["rand"], mixes=mixes, dropout=0.3) for _ in range(3))
        model = nn.ModuleDict({"layers": layers}).to(current_device())
        attach_stack(list(layers), splitter(mode))
        for layer in layers:
            layer.checkpoints_part = checkpoints == "parts"
        if checkpoints == "layers":
            checkpoint_layers(model, [f"layers.{index}" for index in range(3)], GradientCheckpointConfig())
        torch.manual_seed(1)
        hidden = torch.randn(NUM_EXAMPLES, NUM_TOKENS, 8).to(current_device()).requires_grad_()
        for layer in layers:
            hidden = checkpoint(layer, hidden, use_reentrant=False) if checkpoints == "calls" else layer(hidden)
        hidden.square().sum().backward()
        gradients.append({name: one.grad for name, one in model.named_parameters() if one.grad is not None})
    for others in gradients[1:]:
        for name, gradient in gradients[0].items():
            assert torch.equal(gradient, others[name]), name


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        heads = (one(x).unflatten(-1, (-1, 4)).transpose(1, 2) for one in (self.query, self.key, self.value))
        return self.out(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(2))
        self.attention = Heads()
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, x, skip=None):
        x = x + self.attention(self.norms[0](x))
        x = x + self.mlp(self.norms[1](x))
        return x if skip is None else x + skip


class Between(nn.Module):
    """A model that computes something between its layers."""

    def __init__(self, between="", skips=()):
        super().__init__()
        self.embedding, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.dropout = nn.Dropout(0.5)
        self.between, self.skips, self.kept, self.marks = between, skips, [], None

    def forward(self, ids, kept=None):
        x = first = self.embedding(ids)
        states, self.kept = [], []
        for index, layer in enumerate(self.layers):
            is_kept = index not in self.skips
            if self.between == "layerdrop" and index == 1 and self.training:
                is_kept = bool(torch.rand([]) < 0.5) if kept is None else kept[1]
            self.kept.append(is_kept)
            if not is_kept:
                continue
            x = layer(x, first) if self.between == "argument" else layer(x)
            states.append(x)
            x = x + first if self.between == "first" else x
            if self.between == "dropout" and index == 0:
                self.marks = self.dropout(torch.ones_like(x))
        if self.between == "logits":
            return self.head(x)
        x = torch.stack(states).mean(0) if self.between == "mean" else x
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def boosted(mode, *args, **kwargs):
    torch.manual_seed(0)
    model = Between(*args, **kwargs)
    reference = copy.deepcopy(model).to(current_device())
    sizes = {"tp_size": 2} if mode == "split_gather" else {"sp_size": 2}
    plugin = HybridParallelPlugin(
        **sizes, precision="fp32", enable_sequence_parallelism=True, sequence_parallelism_mode=mode
    )
    return Booster(plugin=plugin).boost(model)[0], reference


IDS = torch.arange(28).view(4, 7) % 16


@distributed(2)
@pytest.mark.parametrize("mode", MODES)
def test_layers_that_a_model_skips_at_random_are_the_same_on_all_ranks(mode):
    model, reference = boosted(mode, "layerdrop")
    patterns = set()
    for _ in range(12):
        loss = model(IDS.to(current_device()))
        kept = model.unwrap().kept
        patterns.add(tuple(kept))
        torch.testing.assert_close(loss, reference(IDS.to(current_device()), kept))
    assert len(patterns) == 2


@distributed(2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("between", "skips", "message"),
    [
        ("", (0,), "layer 1 of a stack ran without the layers before it.*layerdrop=0"),
        ("", (2,), r"rank's [34] tokens with all 7.*layerdrop=0"),
        ("logits", (2,), "the last layer of a stack did not run.*layerdrop=0"),
        ("first", (), "rank's [34] tokens with all 7.*(pass it to the layers as an argument|'all_to_all')"),
        ("mean", (), "rank's [34] tokens with all 7.*let the model return it"),
    ],
)
def test_models_that_combine_tokens_of_one_rank_and_of_all_are_refused(mode, between, skips, message):
    model, _ = boosted(mode, between, skips=skips)
    with pytest.raises(ConfigError, match=message):
        model(IDS.to(current_device()))


@distributed(2)
@pytest.mark.parametrize("mode", ["all_to_all", "ring_attn"])
def test_states_from_before_the_layers_may_be_their_arguments(mode):
    model, reference = boosted(mode, "argument")
    torch.testing.assert_close(model(IDS.to(current_device())), reference(IDS.to(current_device())))


@distributed(2)
@pytest.mark.parametrize("mode", MODES)
def test_dropout_between_layers_has_a_mask_of_each_rank(mode):
    model, _ = boosted(mode, "dropout")
    model(torch.zeros(2, 64, dtype=torch.long, device=current_device()))
    marks = model.unwrap().marks.contiguous()
    both = [torch.empty_like(marks) for _ in range(2)]
    dist.all_gather(both, marks)
    assert not torch.equal(*both)
