"""Torch's own encoder and decoder layers, with masks, under tensor and sequence parallelism: as in one process."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from harness import distributed
from torch import nn

from booster import Booster
from booster.plugins import HybridParallelPlugin

pytestmark = pytest.mark.on_device

VOCABULARY, WIDTH, BATCH, LENGTH, VISIBLE = 64, 32, 4, 8, 6
MODES = {
    "tp": {"tp_size": 2},
    "pp": {"pp_size": 2, "num_microbatches": 2},
    **{
        mode: {"enable_sequence_parallelism": True, "sequence_parallelism_mode": mode, size: 2}
        for mode, size in [("split_gather", "tp_size"), ("ring", "tp_size"), ("all_to_all", "sp_size")]
    },
    "ring_attn": {"enable_sequence_parallelism": True, "sequence_parallelism_mode": "ring_attn", "sp_size": 2},
}
MASKS = ["none", "padding", "causal", "causal and padding", "boolean", "of each head"]


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x, padding=None, mask=None):
        return self.head(self.encoder(self.embed(x), mask, src_key_padding_mask=padding))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerDecoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.decoder = nn.TransformerDecoder(layer, 2)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x, padding=None, mask=None):
        memory, of_memory = self.embed(x[:, :5]), None if padding is None else padding[:, 3:]
        padded = {"tgt_key_padding_mask": padding, "memory_key_padding_mask": of_memory}
        return self.head(self.decoder(self.embed(x), memory, mask, **padded))


def masks(kind):
    """Return the padding and the attention mask of a batch."""
    padding = mask = None
    if "padding" in kind:
        padding = torch.zeros(BATCH, LENGTH)
        padding[:, VISIBLE:] = -torch.inf
        padding = padding if "causal" in kind else padding.bool()
    if "causal" in kind:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
    if kind == "boolean":
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(3)
    if kind == "of each head":
        mask = torch.randn(BATCH * 4, LENGTH, LENGTH, generator=torch.Generator().manual_seed(5))
    return padding, mask


def loss_of(outputs, x):
    return F.cross_entropy(outputs[:, :VISIBLE].flatten(0, 1), x[:, :VISIBLE].flatten())


QUICK = [("tp", Encoder, "boolean"), ("tp", Decoder, "padding"), ("split_gather", Encoder, "padding")]
QUICK += [("all_to_all", Encoder, "causal and padding"), ("all_to_all", Decoder, "padding")]
QUICK += [("ring_attn", Encoder, "of each head"), ("ring_attn", Decoder, "causal")]
ALL = [(mode, build, kind) for mode in MODES if mode != "pp" for build in (Encoder, Decoder) for kind in MASKS]
SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in ALL if case not in QUICK]


@distributed(world_size=2)
@pytest.mark.parametrize(("mode", "build", "kind"), [*QUICK, *SLOW])
def test_torch_layers_with_masks_equal_one_process(mode, build, kind):
    torch.manual_seed(0)
    raw = build()
    expected = copy.deepcopy(raw)
    booster = Booster(plugin=HybridParallelPlugin(precision="fp32", **MODES[mode]))
    model, optimizer, *_ = booster.boost(raw, torch.optim.SGD(raw.parameters(), lr=0.1))
    reference = torch.optim.SGD(expected.parameters(), lr=0.1)
    padding, mask = masks(kind)
    for step in range(2):
        x = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step))
        model.train()
        expected.train()
        loss, other = loss_of(model(x, padding, mask), x), loss_of(expected(x, padding, mask), x)
        torch.testing.assert_close(loss, other, rtol=1e-5, atol=1e-5)
        booster.backward(loss, optimizer)
        other.backward()
        for one in (optimizer, reference):
            one.step()
            one.zero_grad()
        model.eval()
        expected.eval()
        torch.backends.mha.set_fastpath_enabled(kind != "of each head")  # of which torch's fused operators return nan
        with torch.no_grad():  # where torch has these operators, which read weights of the layers
            outputs, others = model(x, padding, mask), expected(x, padding, mask)
        torch.backends.mha.set_fastpath_enabled(True)
        torch.testing.assert_close(outputs[:, :VISIBLE], others[:, :VISIBLE], rtol=1e-4, atol=1e-5)
    sharded = {name: one.shape for name, one in model.named_parameters() if "linear1.weight" in name}
    assert set(sharded.values()) == {(32 if "tp_size" in MODES[mode] else 64, WIDTH)}


@distributed(world_size=2)
def test_an_encoder_with_padding_in_a_pipeline_equals_one_process():
    torch.manual_seed(0)
    raw = Encoder()
    expected = copy.deepcopy(raw)
    booster = Booster(plugin=HybridParallelPlugin(precision="fp32", tp_size=1, **MODES["pp"]))
    model, optimizer, *_ = booster.boost(raw, torch.optim.SGD(raw.parameters(), lr=0.1))
    reference = torch.optim.SGD(expected.parameters(), lr=0.1)
    padding, _ = masks("padding")
    for step in range(2):
        x = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step))
        for train in (True, False):
            model.train(train)
            expected.train(train)
            with torch.set_grad_enabled(train):
                other = loss_of(expected(x, padding), x)
            batch = {"x": x, "padding": padding}
            result = booster.execute_pipeline(
                iter([batch]),
                model,
                lambda outputs, given: loss_of(outputs, given["x"]),
                optimizer if train else None,
                return_loss=True,
            )
            if result["loss"] is not None:
                torch.testing.assert_close(result["loss"], other.detach(), rtol=1e-5, atol=1e-5)
            if train:
                other.backward()
                for one in (optimizer, reference):
                    one.step()
                    one.zero_grad()
