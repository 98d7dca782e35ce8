"""TorchFSDPPlugin: blocks that change inputs or outputs in place, and structured ones, train as in one process."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from fsdp_model_cases import ONE_LEVEL, grid
from fsdp_twins import STRATEGIES, FSDPTwins, small_units
from gemini_models import (
    WIDTH,
    Block,
    DataclassOutput,
    seeded,
    square_loss,
)
from harness import distributed
from torch import nn
from zoo import needs_transformers

from booster import Booster
from booster.device import current_device
from booster.errors import ConfigError
from booster.plugins import TorchFSDPPlugin

pytestmark = pytest.mark.on_device


class ViewBlock(nn.Module):
    """Returns a view of what it computed."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.kind = kind

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.second(torch.tanh(self.first(x)))
        if self.kind == "view":
            return hidden.view(2, -1, WIDTH)
        if self.kind == "slice":
            return torch.cat([hidden, hidden], dim=1)[:, :WIDTH]
        if self.kind == "transposed":
            return hidden.t()
        if self.kind == "of the input":
            return (x + 0)[:, :WIDTH] + 0 * hidden
        if self.kind == "chunks":
            return hidden.chunk(2, dim=1)
        return hidden


class ChangesInPlace(nn.Module):
    """Changes in place what its blocks return."""

    def __init__(self, kind: str, change: str) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.blocks = nn.ModuleList(ViewBlock(kind) for _ in range(3))
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            y = block(x)
            if isinstance(y, tuple):
                y = torch.cat([self.changed(part) for part in y], dim=1)
            else:
                y = self.changed(y)
            x = x + (y.t() if y.shape[0] == WIDTH else y.reshape(-1, WIDTH))
        return x

    def changed(self, y: torch.Tensor) -> torch.Tensor:
        if self.change == "added to":
            y += 1
        elif self.change == "multiplied":
            y.mul_(2)
        elif self.change == "rectified":
            F.relu(y, inplace=True)
        elif self.change == "a part":
            y[:1] = 0
        return y


@pytest.mark.parametrize(
    ("kind", "change"),
    grid(
        ["itself", "view", "slice", "transposed", "of the input"],
        ["added to", "multiplied", "rectified", "a part"],
        fast=lambda kind, change: kind == "view" or change == "multiplied",
    ),
)
@distributed(world_size=2)
def test_what_a_block_returns_may_be_changed_in_place(kind, change):
    FSDPTwins(lambda: ChangesInPlace(kind, change)).train().assert_equal()


class WritesToItsInput(nn.Module):
    """Blocks that begin by changing their input in place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


@distributed(world_size=2)
def test_a_block_may_change_its_input_in_place():
    FSDPTwins(WritesToItsInput).train().assert_equal()


@dataclass
class Hidden:
    value: torch.Tensor
    note: str
    others: list[torch.Tensor]


class Structured(nn.Module):
    """Blocks that take and return dictionaries, dataclasses, tuples with None, and other values."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.blocks = nn.ModuleList(StructuredBlock() for _ in range(4))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        state: Any = {"x": x, "all": ()}
        for number, block in enumerate(self.blocks):
            state = block(state, as_dataclass=number % 2 == 0)
        return {"logits": self.head(state["x"]), "nested": ({"all": state["all"]}, None, "text")}


class StructuredBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, state: Any, *, as_dataclass: bool) -> Any:
        if isinstance(state, Hidden):
            state = {"x": state.value, "all": tuple(state.others)}
        x = self.inner(state["x"])
        found = (*state["all"], x)
        return Hidden(value=x, note="text", others=list(found)) if as_dataclass else {"x": x, "all": found}


def _of_structure(model, x, backward, rank, step):
    outputs = model(x)
    loss = square_loss(outputs["logits"])
    for hidden in outputs["nested"][0]["all"]:
        loss = loss + hidden.square().mean()
    backward(loss)


def _of_dataclass(model, x, backward, rank, step):
    result = model(x)
    backward(square_loss(result.logits) + result.hidden.square().mean())


@pytest.mark.parametrize(
    ("model", "loop"), [(Structured, _of_structure), (DataclassOutput, _of_dataclass)], ids=["dicts", "dataclass"]
)
@pytest.mark.parametrize("policy", [None, 1])
@ONE_LEVEL
@distributed(world_size=2)
def test_structured_inputs_and_outputs(strategy, model, loop, policy):
    arguments = {} if policy is None else {"auto_wrap_policy": small_units(policy)}
    FSDPTwins(seeded(model), loop, **STRATEGIES[strategy], **arguments).train().assert_equal()


@needs_transformers
@distributed(world_size=2)
def test_transformers_sees_the_classes_of_the_users_modules(tmp_path):
    from transformers import LlamaConfig, LlamaModel

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    raw = LlamaModel(LlamaConfig(vocab_size=32, attn_implementation="eager", **sizes))
    booster = Booster(plugin=TorchFSDPPlugin())
    model, *_ = booster.boost(raw, torch.optim.AdamW(raw.parameters()))
    assert type(raw).__name__ == "LlamaModel"
    tokens = torch.arange(8, device=current_device())[None]
    outputs = model(input_ids=tokens, output_hidden_states=True, output_attentions=True)
    assert (len(outputs.hidden_states), len(outputs.attentions)) == (3, 2)
    booster.save_model(model, tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["architectures"] == ["LlamaModel"]
    with pytest.raises(ConfigError, match=r"write booster\.save_model"):
        raw.save_pretrained(tmp_path / "other")
    with model.gathered():
        raw.save_pretrained(tmp_path / f"own{dist.get_rank()}")
