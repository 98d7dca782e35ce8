"""File names and shards, as pure functions."""

from __future__ import annotations

import random

import pytest
import torch
from huggingface_hub import split_torch_state_dict_into_shards

from booster.checkpoint_io.layout import (
    GRADIENTS,
    MODEL,
    OPTIMIZER,
    RANDOM_STATE,
    index_document,
    is_valid_prefix,
    plan_files,
)

NAMES = MODEL.names(is_safetensors=True)


def test_names_are_those_of_hugging_face():
    variant = MODEL.names(is_safetensors=True, prefix="fp16")
    assert (NAMES.single, NAMES.index) == ("model.safetensors", "model.safetensors.index.json")
    assert NAMES.shard(2, 13) == "model-00002-of-00013.safetensors"
    assert (variant.single, variant.index) == ("model.fp16.safetensors", "model.safetensors.index.fp16.json")
    assert variant.shard(1, 2) == "model.fp16-00001-of-00002.safetensors"
    binary = MODEL.names(is_safetensors=False)
    assert (binary.single, binary.index) == ("pytorch_model.bin", "pytorch_model.bin.index.json")
    assert binary.shard(1, 2) == "pytorch_model-00001-of-00002.bin"
    optimizer = OPTIMIZER.names(is_safetensors=True, prefix="a")
    assert (optimizer.index, optimizer.groups) == ("optimizer.safetensors.index.a.json", "optimizer_groups.a.json")


def test_a_manifest_is_named_after_its_index():
    assert NAMES.manifest == "model.safetensors.manifest.json"
    assert MODEL.names(is_safetensors=True, prefix="fp16").manifest == "model.safetensors.manifest.fp16.json"
    assert MODEL.names(is_safetensors=False).manifest == "pytorch_model.bin.manifest.json"


def test_no_kind_takes_another_kinds_files():
    kinds = (MODEL, OPTIMIZER, RANDOM_STATE, GRADIENTS)
    names = {kind.name: kind.names(is_safetensors=True) for kind in kinds}
    files = {name: (of.single, of.index, of.manifest, of.shard(1, 2)) for name, of in names.items()}
    for kind in kinds:
        for name, others in files.items():
            assert all(names[kind.name].may_have_written(file) is (name == kind.name) for file in others)
            assert all(kind.names_of(file) is None for file in others if name != kind.name)


@pytest.mark.parametrize("is_safetensors", [True, False])
@pytest.mark.parametrize("prefix", [None, "fp16", "a.b-c"])
@pytest.mark.parametrize("kind", [MODEL, OPTIMIZER, RANDOM_STATE, GRADIENTS], ids=lambda kind: kind.name)
def test_names_are_found_again(kind, prefix, is_safetensors):
    names = kind.names(is_safetensors=is_safetensors, prefix=prefix)
    assert kind.names_of(names.single) == names
    assert kind.names_of(names.index) == names
    assert kind.names_of(names.manifest) == names
    assert kind.names_of(names.shard(1, 2)) is None


@pytest.mark.parametrize(
    "other", ["adapter_model.safetensors", "training_args.bin", "config.json", "xmodel.safetensors"]
)
def test_other_files_are_nobodys(other):
    assert MODEL.names_of(other) is None
    assert not NAMES.may_have_written(other)


def _all_names(names):
    return names.single, names.index, names.manifest, names.shard(3, 7)


def test_a_save_owns_its_own_files_alone():
    variant = MODEL.names(is_safetensors=True, prefix="fp16")
    for names, others in ((NAMES, variant), (variant, NAMES)):
        assert all(names.may_have_written(name) for name in _all_names(names))
        assert not any(names.may_have_written(name) for name in _all_names(others))


def test_a_prefix_like_a_shard_number_is_refused():
    assert is_valid_prefix("fp16")
    assert not any(is_valid_prefix(prefix) for prefix in ("", "a/b", "..", ".x", "a b", "x-00001-of-00002"))


def test_shards_are_whole_tensors_in_order():
    plan = plan_files({"a": 4, "b": 4, "c": 3, "huge": 50, "d": 1, "e": 0}, NAMES, max_shard_bytes=8)
    assert list(plan.files.values()) == [("a", "b"), ("c",), ("huge",), ("d", "e")]
    assert list(plan.files)[2] == "model-00003-of-00004.safetensors"


def test_one_shard_has_no_number_and_no_index():
    assert plan_files({"a": 4}, NAMES, max_shard_bytes=8).files == {"model.safetensors": ("a",)}
    assert plan_files({"a": 4}, NAMES, max_shard_bytes=8).index is None
    assert plan_files({}, NAMES, max_shard_bytes=8).files == {"model.safetensors": ()}
    numbered = plan_files({}, NAMES, max_shard_bytes=8, always_index=True)
    assert numbered.files == {"model-00001-of-00001.safetensors": ()}
    assert numbered.index == NAMES.index


@pytest.mark.parametrize("seed", range(20))
def test_plans_are_those_of_hugging_face_where_nothing_is_oversized(seed):
    random.seed(seed)
    tensors = {f"t{i}": torch.zeros(random.randint(1, 100), dtype=torch.uint8) for i in range(50)}
    sizes = {name: tensor.numel() for name, tensor in tensors.items()}
    theirs = split_torch_state_dict_into_shards(
        tensors, filename_pattern="model{suffix}.safetensors", max_shard_size=300
    )
    plan = plan_files(sizes, NAMES, max_shard_bytes=300)
    assert {name: list(part) for name, part in plan.files.items()} == theirs.filename_to_tensors
    document = index_document(plan, sizes)
    assert document["weight_map"] == theirs.tensor_to_filename
    assert document["metadata"] == theirs.metadata


def test_the_index_counts_bytes_and_parameters():
    plan = plan_files({"b": 4, "a": 8}, NAMES, max_shard_bytes=8)
    document = index_document(plan, {"b": 4, "a": 8}, num_parameters=3)
    assert document["metadata"] == {"total_parameters": 3, "total_size": 12}
    assert list(document["weight_map"]) == ["a", "b"]
