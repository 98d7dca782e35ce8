"""Conversions of transformers on placeholders against the same on tensors."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import nn
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Chunk, Concatenate, MergeModulelist, Transpose, WeightConverter
from zoo import get_model
from zoo.transformers_sweep import TASKS

from booster.checkpoint_io import GeneralCheckpointIO
from booster.checkpoint_io.loading.conversion import convert_specs
from booster.errors import CheckpointError
from booster.interface import ModelWrapper, TensorSlice, TensorSpec

IO = GeneralCheckpointIO()
SMALL = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 37,
    "num_experts_per_tok": 2,
}


class _Config(PreTrainedConfig):
    model_type = "converted"


class _Converted(PreTrainedModel):
    """Experts in one tensor, and three projections that are stored as one."""

    config_class = _Config

    def __init__(self, num_experts: int = 11, features: int = 3, hidden: int = 5, operation: str = "none") -> None:
        super().__init__(_Config())
        self.experts = nn.Parameter(torch.zeros(num_experts, 2 * features, hidden))
        self.query, self.key, self.value = (nn.Linear(4, 6, bias=False) for _ in range(3))
        self.turned = nn.Parameter(torch.zeros(4, 2))
        self.post_init()


@pytest.fixture(autouse=True)
def _conversions():
    operations = {
        ("experts.*.gate.weight", "experts.*.up.weight"): ("experts", [MergeModulelist(dim=0), Concatenate(dim=-2)]),
        ("qkv.weight",): (["query.weight", "key.weight", "value.weight"], [Chunk(dim=-2)]),
        ("straight",): ("turned", [Transpose(0, 1)]),
    }
    mapping = [WeightConverter(list(sources), targets, ops) for sources, (targets, ops) in operations.items()]
    register_checkpoint_conversion_mapping("converted", mapping, overwrite=True)


def _stored(num_experts: int = 11) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_experts)
    names = {f"experts.{index}.{name}.weight": (3, 5) for index in range(num_experts) for name in ("gate", "up")}
    return {name: torch.randn(shape, generator=generator) for name, shape in {**names, "qkv.weight": (18, 4)}.items()}


def _expected(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    number = (len(stored) - 1) // 2
    gate, up = (
        torch.stack([stored[f"experts.{index}.{name}.weight"] for index in range(number)]) for name in ("gate", "up")
    )
    parts = stored["qkv.weight"].chunk(3)
    return {
        "experts": torch.cat([gate, up], 1),
        "query.weight": parts[0],
        "key.weight": parts[1],
        "value.weight": parts[2],
    }


def _read(stored: dict[str, torch.Tensor], parts: list[tuple[str, TensorSlice]]) -> int:
    """Fill slices as a load does; return the number of elements."""
    for name, part in parts:
        box = stored[name][tuple(slice(offset, offset + length) for offset, length in part.box)]
        assert part.global_shape == tuple(stored[name].shape)
        part.tensor.copy_(box.reshape(-1)[slice(*part.span)].view(part.tensor.shape))
    return sum(part.tensor.numel() for _, part in parts)


def _random_slice(chance: random.Random, name: str, full: torch.Tensor) -> tuple[TensorSlice, torch.Tensor]:
    box = []
    for size in full.shape:
        first, last = sorted(chance.sample(range(size + 1), 2)) if chance.random() < 0.6 else (0, size)
        box.append((first, last - first))
    expected = full[tuple(slice(offset, offset + length) for offset, length in box)]
    is_flat = chance.random() < 0.6
    span = (0, expected.numel())
    if is_flat:
        first, last = sorted(chance.choices(range(expected.numel() + 1), k=2))
        span, expected = (first, last), expected.reshape(-1)[first:last]
    memory = torch.full(expected.shape, math.nan)
    if not is_flat and chance.random() < 0.5:  # as a parameter with other strides
        memory = torch.full(expected.shape[::-1], math.nan).permute(*range(expected.dim() - 1, -1, -1))
    made = TensorSlice(
        name=name,
        dtype=full.dtype,
        global_shape=tuple(full.shape),
        box=tuple(box),
        span=span,
        tensor=memory,
        primary=True,
    )
    return made, expected


@pytest.mark.parametrize("seed", range(200))
def test_any_slice_is_filled_once(seed):
    chance = random.Random(seed)
    stored = _stored(chance.choice([1, 2, 11]))
    specs = {name: TensorSpec(dtype=tensor.dtype, shape=tuple(tensor.shape)) for name, tensor in stored.items()}
    whole = _expected(stored)
    converted = convert_specs(specs, _Converted(), {*whole, "turned"})
    assert {name: spec.shape for name, spec in converted.specs.items()} == {
        name: tuple(tensor.shape) for name, tensor in whole.items()
    }
    for name, full in whole.items():
        tensor_slice, expected = _random_slice(chance, name, full)
        assert _read(stored, converted.stored_slices([(name, tensor_slice)])) == expected.numel()
        assert torch.equal(tensor_slice.tensor, expected)


def test_a_conversion_that_only_from_pretrained_does_is_an_error(tmp_path):
    from safetensors.torch import save_file

    save_file({**_stored(), "straight": torch.zeros(2, 4)}, tmp_path / "model.safetensors")
    model = _Converted()
    with pytest.raises(CheckpointError) as caught:
        IO.load_model(ModelWrapper(model), tmp_path)
    text = str(caught.value)
    assert "1 missing in the checkpoint:\n    turned" in text
    assert "1 not in the model:\n    straight" in text
    assert "1 not converted as from_pretrained does:\n    'turned' from 'straight' by [Transpose]" in text
    assert "Open it with from_pretrained" in text
    assert not model.experts.any()
    IO.load_model(ModelWrapper(model), tmp_path, strict=False)
    assert torch.equal(model.experts, _expected(_stored())["experts"])


def test_experts_of_another_number_or_dtype_are_an_error(tmp_path):
    from safetensors.torch import save_file

    stored = {**_stored(10), "turned": torch.zeros(4, 2)}
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"'experts' has shape \(10, 6, 5\) in the checkpoint, \(11, 6, 5\) in"):
        IO.load_model(ModelWrapper(_Converted()), tmp_path)
    stored["experts.3.up.weight"] = stored["experts.3.up.weight"].half()
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="the tensors differ in dtype"):
        IO.load_model(ModelWrapper(_Converted()), tmp_path)


def test_what_the_models_class_does_not_need_is_left_out(tmp_path):
    from safetensors.torch import save_file

    save_file({**_stored(), "old.mask": torch.zeros(3)}, tmp_path / "model.safetensors")
    model = _Converted()
    with pytest.raises(
        CheckpointError, match=r"1 missing in the checkpoint:\n    turned\n  1 not in the model:\n    old"
    ):
        IO.load_model(ModelWrapper(model), tmp_path)
    model._keys_to_ignore_on_load_missing, model._keys_to_ignore_on_load_unexpected = {r"^turned"}, {r"\.mask$"}
    IO.load_model(ModelWrapper(model), tmp_path)
    assert torch.equal(model.experts, _expected(_stored())["experts"])
    assert not model.turned.any()


def test_the_models_own_names_take_precedence(tmp_path):
    from safetensors.torch import save_file

    own = torch.ones(11, 6, 5)
    save_file({**_stored(), "turned": torch.zeros(4, 2), "experts": own}, tmp_path / "model.safetensors")
    model = _Converted()
    with pytest.raises(CheckpointError, match=r"22 not in the model:\n    experts\.0\.gate\.weight"):
        IO.load_model(ModelWrapper(model), tmp_path)
    IO.load_model(ModelWrapper(model), tmp_path, strict=False)
    assert torch.equal(model.experts, own)


@pytest.mark.parametrize("options", [{}, {"max_shard_size": "9KB"}], ids=repr)
@pytest.mark.parametrize("verify", ["checksums", "before"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=12)),
        lambda: Qwen2MoeForCausalLM(
            Qwen2MoeConfig(**SMALL, num_experts=12, moe_intermediate_size=12, shared_expert_intermediate_size=12)
        ),
    ],
    ids=["mixtral", "qwen2_moe"],
)
def test_what_save_pretrained_wrote_loads_and_goes_back(tmp_path, make, options, verify):
    torch.manual_seed(0)
    saved, loaded = make(), make()
    saved.save_pretrained(tmp_path / "theirs", **options)
    IO.load_model(ModelWrapper(loaded), tmp_path / "theirs", verify=verify)
    expected = saved.state_dict()
    assert [name for name, tensor in loaded.state_dict().items() if not torch.equal(tensor, expected[name])] == []
    IO.save_model(ModelWrapper(loaded), tmp_path / "ours", shard=True)
    back, report = type(saved).from_pretrained(tmp_path / "ours", output_loading_info=True, local_files_only=True)
    assert not any(report.values())
    assert [name for name, tensor in back.state_dict().items() if not torch.equal(tensor, expected[name])] == []


REFUSED = {"Inkling2ForCausalLM": r"not converted as from_pretrained does:(?s:.*)\[Interleave\(dim=1\)\]"}
NEVER_STORED = {"MarianMTModel": {"model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight"}}


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_what_save_pretrained_wrote_of_any_model_loads(tmp_path, name):
    saved, loaded = get_model(name).build(), get_model(name).build()
    with torch.no_grad():
        for parameter in saved.parameters():
            parameter.add_(1)
    saved.save_pretrained(tmp_path)
    if name in REFUSED:
        with pytest.raises(CheckpointError, match=REFUSED[name]):
            IO.load_model(ModelWrapper(loaded), tmp_path)
        return
    IO.load_model(ModelWrapper(loaded), tmp_path)
    expected = saved.state_dict()
    differing = {key for key, tensor in loaded.state_dict().items() if not torch.equal(tensor, expected[key])}
    assert differing == NEVER_STORED.get(name, set())
