"""Files put together from an image and the tensors' bytes, as others read them."""

from __future__ import annotations

import itertools
import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch._subclasses.fake_tensor import FakeTensorMode

from booster.checkpoint_io.planning.save_plan import PlannedFile
from booster.checkpoint_io.saving.part import safetensors_image, torch_image
from booster.errors import CheckpointError
from booster.interface import TensorSpec

DTYPES = [
    torch.complex64,
    torch.float64,
    torch.int64,
    torch.uint64,
    torch.float32,
    torch.int32,
    torch.float16,
    torch.bfloat16,
    torch.int16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.uint8,
    torch.bool,
]


def _tensors():
    tensors = {f"t.{dtype}": torch.arange(7).to(dtype) for dtype in DTYPES}
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4), 'a/b "\u00e9" \u4f60': torch.ones(2, 3)}
    return tensors | {"big": torch.randn(70_000, generator=torch.Generator().manual_seed(1))}


def _planned(specs, name="some file"):
    ordered = dict(sorted(specs.items(), key=lambda item: -item[1].dtype.itemsize))
    stops = list(itertools.accumulate((spec.num_bytes for spec in ordered.values()), initial=0))
    return PlannedFile(name=name, tensors=ordered, starts=dict(zip(ordered, stops, strict=False)), data_bytes=stops[-1])


def _specs(tensors):
    return {name: TensorSpec(shape=tuple(tensor.shape), dtype=tensor.dtype) for name, tensor in tensors.items()}


def _write(path, image, tensors):
    """Writes the fragments and the tensors over something else than zeros."""
    with open(path, "wb") as file:
        file.write(b"\xa5" * image.num_bytes)
        for offset, content in image.fragments:
            file.seek(offset)
            file.write(content)
        for name, tensor in tensors.items():
            file.seek(image.offsets[name])
            file.write(bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy()) if tensor.numel() else b"")
    assert os.path.getsize(path) == image.num_bytes


def _assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert found[name].reshape(-1).view(torch.uint8).tolist() == tensor.reshape(-1).view(torch.uint8).tolist()


def _assert_tiled(image):
    """Every byte of the file belongs to a fragment or to a tensor, and to one of them."""
    taken = [(offset, offset + len(content)) for offset, content in image.fragments]
    taken += [
        (image.offsets[name], image.offsets[name] + spec.num_bytes)
        for name, spec in image.specs.items()
        if spec.num_bytes
    ]
    for (_, stop), (start, _) in itertools.pairwise(sorted(taken)):
        assert stop == start
    assert min(taken)[0] == 0
    assert max(taken)[1] == image.num_bytes


def test_safetensors_readers_open_the_file(tmp_path):
    tensors = _tensors()
    image = safetensors_image(_planned(_specs(tensors)), {"format": "pt", "more": "\u00e9 text"})
    _write(tmp_path / "a.safetensors", image, tensors)
    _assert_same(load_file(tmp_path / "a.safetensors"), tensors)
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "more": "\u00e9 text"}
        _assert_same({name: file.get_tensor(name) for name in file.keys()}, tensors)  # noqa: SIM118


def test_safetensors_data_starts_on_a_page_and_has_no_gaps():
    for count in (0, 1, 40, 300):
        specs = {f"layer.{index}.weight": TensorSpec(shape=(3, index), dtype=torch.bfloat16) for index in range(count)}
        file = _planned(specs)
        image = safetensors_image(file, {"format": "pt"})
        assert image.data_start == len(image.head)
        assert image.data_start % 4096 == 0
        assert image.offsets == {name: image.data_start + start for name, start in file.starts.items()}
        assert image.num_bytes == image.data_start + file.data_bytes
        _assert_tiled(image)


def test_safetensors_has_no_place_for_some_formats():
    with pytest.raises(CheckpointError, match="complex128"):
        safetensors_image(_planned({"a": TensorSpec(shape=(2,), dtype=torch.complex128)}), {})


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("values", [None, '{"text": "\u00e9"}'])
def test_torch_opens_the_file(tmp_path, mmap, values):
    tensors = _tensors() | {"wide": torch.arange(5).to(torch.complex128)}
    image = torch_image(_planned(_specs(tensors)), values)
    assert image.data_start == 0
    _assert_tiled(image)
    _write(tmp_path / "a.bin", image, tensors)
    content = torch.load(tmp_path / "a.bin", weights_only=True, mmap=mmap)
    if values is not None:
        assert content.keys() == {"state", "values"}
        assert content["values"] == values
        content = content["state"]
    assert list(content) == list(_planned(_specs(tensors)).tensors)
    _assert_same(content, tensors)
    assert all(type(tensor) is torch.Tensor and not tensor.requires_grad for tensor in content.values())


def test_torch_itself_says_the_same_offsets(tmp_path):
    tensors = _tensors()
    image = torch_image(_planned(_specs(tensors)), None)
    _write(tmp_path / "a.bin", image, tensors)
    with FakeTensorMode():
        content = torch.load(tmp_path / "a.bin", weights_only=True)
    for name, tensor in content.items():
        if tensor.numel():
            assert tensor.untyped_storage()._checkpoint_offset == image.offsets[name]
            assert image.offsets[name] % tensor.dtype.itemsize == 0


def test_torch_image_is_what_torch_writes_but_for_the_checksums(tmp_path):
    # Same records at the same places: a file of a later version of torch may differ, and both must stay readable.
    tensors = {"a": torch.arange(5.0), "b": torch.arange(3)}
    image = torch_image(_planned(_specs(tensors)), None)
    ordered = {name: tensors[name] for name in image.specs}
    with open(tmp_path / "theirs.bin", "wb") as file:  # by name, the records' folder would have another name
        torch.save(ordered, file)
    _write(tmp_path / "ours.bin", image, tensors)
    ours, theirs = (tmp_path / "ours.bin").read_bytes(), (tmp_path / "theirs.bin").read_bytes()
    assert len(ours) == len(theirs)
    for name, tensor in tensors.items():
        part = slice(image.offsets[name], image.offsets[name] + tensor.nbytes)
        assert ours[part] == theirs[part]


def test_every_rank_makes_the_same_image():
    specs = _specs(_tensors())
    for values in (None, "text"):
        first, second = torch_image(_planned(specs, "one"), values), torch_image(_planned(specs, "other"), values)
        assert first.fragments == second.fragments
        assert first.offsets == second.offsets
        assert first.num_bytes == second.num_bytes


def test_an_image_needs_no_memory_for_its_tensors(tmp_path):
    specs = {f"layer.{index}": TensorSpec(shape=(2**20, 2**20), dtype=torch.float32) for index in range(3)}
    specs["last"] = TensorSpec(shape=(3,), dtype=torch.float32)
    for image in (torch_image(_planned(specs), None), safetensors_image(_planned(specs), {})):
        assert image.num_bytes > 12 * 2**40  # 12 TiB
        assert sum(len(content) for _, content in image.fragments) < 20_000
        _assert_tiled(image)


def test_torch_opens_a_file_beyond_four_gigabytes(tmp_path):
    specs = {f"layer.{index}": TensorSpec(shape=(3, 2**29), dtype=torch.float32) for index in range(2)}
    specs["last"] = TensorSpec(shape=(3,), dtype=torch.float32)
    image = torch_image(_planned(specs), None)
    with open(tmp_path / "a.bin", "wb") as file:  # its tensors are holes that take no space
        file.truncate(image.num_bytes)
        for offset, content in image.fragments:
            file.seek(offset)
            file.write(content)
        file.seek(image.offsets["last"])
        file.write(bytes(torch.tensor([1.0, 2.0, 3.0]).view(torch.uint8).numpy()))
    content = torch.load(tmp_path / "a.bin", weights_only=True, mmap=True)
    assert content["last"].tolist() == [1, 2, 3]
    assert content["layer.1"].shape == (3, 2**29)
    assert content["layer.1"][2, -1] == 0


def test_files_without_tensors(tmp_path):
    for name, image in (
        ("a.safetensors", safetensors_image(_planned({}), {"format": "pt"})),
        ("a.bin", torch_image(_planned({}), None)),
    ):
        _write(tmp_path / name, image, {})
    assert load_file(tmp_path / "a.safetensors") == {}
    assert torch.load(tmp_path / "a.bin", weights_only=True) == {}
