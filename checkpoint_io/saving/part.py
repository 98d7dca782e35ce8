"""Part of a checkpoint: one set of tensors and, once planned, every byte of its files except the data."""

from __future__ import annotations

import copy
import os
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import IO, Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from booster.checkpoint_io.formats import json_values
from booster.checkpoint_io.formats.json import json_bytes
from booster.checkpoint_io.formats.manifest import MANIFEST_KEY, DocumentRecord, FileRecord, Manifest, RangeRecord
from booster.checkpoint_io.formats.safetensors import encode_header
from booster.checkpoint_io.formats.tensor_files import GROUPS_KEY, completed_head, with_placeholder
from booster.checkpoint_io.layout import PAGE_BYTES, SaveTarget, index_document
from booster.checkpoint_io.planning.save_plan import PlannedFile, SavePlan, WriteRange
from booster.checkpoint_io.planning.slices import full_box
from booster.errors import ConfigError
from booster.interface import ModelWrapper, OptimizerWrapper, TensorSlice, TensorSpec
from booster.version import __version__

# `torch.serialization.skip_data` makes `torch.save` seek over the bytes of storages instead of writing them, and fake
# tensors need no memory. The archive is written to a recorder that keeps the written bytes and the seeks. Seeks come in
# the order of the tensors, because each tensor has its own storage. The result is deterministic, so every rank can
# compute it.


class _Recorder:
    """File object that records writes and forward seeks."""

    def __init__(self) -> None:
        self.fragments: list[tuple[int, bytearray]] = []
        self.seeks: list[tuple[int, int]] = []
        self.position = 0

    def write(self, content: Any) -> int:
        if not self.fragments or self.fragments[-1][0] + len(self.fragments[-1][1]) != self.position:
            self.fragments.append((self.position, bytearray()))
        self.fragments[-1][1].extend(content)
        self.position += len(content)
        return len(content)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        assert whence == os.SEEK_CUR, "torch.save steps forward only"
        self.seeks.append((self.position, offset))
        self.position += offset
        return self.position

    def flush(self) -> None:
        """Do nothing; `torch.save` requires the method."""


def _offsets(specs: Mapping[str, TensorSpec], recorder: _Recorder) -> dict[str, int]:
    seeks = iter(recorder.seeks)
    offsets: dict[str, int] = {}
    for name, spec in specs.items():
        offset, num_bytes = next(seeks) if spec.num_bytes else (0, 0)  # empty storages cause no seek
        assert num_bytes == spec.num_bytes, f"torch.save left {num_bytes} bytes for {name}, not {spec.num_bytes}"
        offsets[name] = offset
    return offsets


@dataclass(frozen=True, slots=True, kw_only=True)
class FileImage:
    """Tensor file without the tensor data. Rank 0 writes the fragments when it creates the file, all ranks the tensors.

    Attributes:
        head: First fragment: in a packed file, all bytes before the tensors.
        fragments: Offset and content of all bytes other than tensors, by offset.
        num_bytes: Size of the file.
        offsets: Offset of each tensor in the file; a multiple of its item size.
        specs: Shape and dtype of each tensor.
        data_start: Offset of the tensors in a packed file, where they are contiguous from there on; 0 in others.
    """

    head: bytes
    fragments: tuple[tuple[int, bytes], ...]
    num_bytes: int
    offsets: Mapping[str, int]
    specs: Mapping[str, TensorSpec]
    data_start: int = 0


def safetensors_image(file: PlannedFile, metadata: Mapping[str, str]) -> FileImage:
    """Build the image of a safetensors file; the header is padded so that the data is page-aligned.

    Args:
        file: Planned file.
        metadata: Metadata strings.

    Raises:
        CheckpointError: A name or dtype that safetensors does not support, or a header above the size limit.
    """
    head, ranges = encode_header(file.tensors, metadata, alignment=PAGE_BYTES)
    starts = {name: tensor_range.start for name, tensor_range in ranges.items()}
    assert starts == file.starts, f"{file.name}: the plan puts tensors elsewhere than the file's header"
    return FileImage(
        head=head,
        fragments=((0, head),),
        num_bytes=len(head) + file.data_bytes,
        offsets={name: len(head) + start for name, start in starts.items()},
        specs=file.tensors,
        data_start=len(head),
    )


def torch_image(file: PlannedFile, values: str | None) -> FileImage:
    """Build the image of a `torch.save` file without the tensors' data, in memory for the rest only.

    Args:
        file: Planned file.
        values: Optimizer's plain values as JSON, to store as `{"state": tensors, "values": values}`. Optional,
            defaults to a plain dictionary of tensors.
    """
    with FakeTensorMode():
        tensors = {name: torch.empty(spec.shape, dtype=spec.dtype, device="cpu") for name, spec in file.tensors.items()}
    recorder = _Recorder()
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(tensors if values is None else {"state": tensors, "values": values}, cast("IO[bytes]", recorder))
    fragments = tuple((offset, bytes(content)) for offset, content in recorder.fragments)
    return FileImage(
        head=fragments[0][1],
        fragments=fragments,
        num_bytes=recorder.position,
        offsets=_offsets(file.tensors, recorder),
        specs=file.tensors,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPart:
    """Model, optimizer or another set of tensors, with its small files.

    Attributes:
        target: Path and format.
        slices: Slices on this rank.
        always_index: If True, number the files and write an index even for a single file.
        folder: Subdirectory of the target; empty for the target itself.
        documents: Further files by name, such as a model's config.
        values: An optimizer's plain values as JSON, for a single file.
        parameter_names: Parameters whose elements the index counts. Optional, defaults to no count.
    """

    target: SaveTarget
    slices: Sequence[TensorSlice]
    always_index: bool = False
    folder: str = ""
    documents: Mapping[str, bytes] = field(default_factory=dict)
    values: str | None = None
    parameter_names: frozenset[str] | None = None


Images = dict[int, FileImage]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlannedPart:
    """Checkpoint part with its save plan.

    Attributes:
        part: Part to save.
        plan: Save plan.
        paths: Paths of the tensor files, relative to the directory of the save.
        images: Cache of file images (everything but the data) for this plan; extended here.
    """

    part: CheckpointPart
    plan: SavePlan
    paths: list[str]
    images: Images
    _ranges: dict[int, list[WriteRange]] = field(default_factory=dict, init=False)

    def image(self, index: int) -> FileImage:
        """Return the image of a tensor file: everything but the data."""
        if index in self.images:
            return self.images[index]
        file, values = self.plan.files[index], self.part.values
        if self.part.target.names.suffix == "safetensors":
            metadata = {"format": "pt"}
            if values is not None:
                metadata[GROUPS_KEY] = values
            if self.part.target.is_directory:
                metadata[MANIFEST_KEY] = self.part.target.names.manifest
            else:
                records = self._records(0, None)
                metadata = with_placeholder(metadata, records)
            self.images[index] = safetensors_image(file, metadata)
        else:
            self.images[index] = torch_image(file, values)
        return self.images[index]

    def complete(
        self, crcs: Mapping[WriteRange, int], metadata: Mapping[str, Any], final_names: Mapping[str, str]
    ) -> tuple[bytes | None, dict[str, bytes]]:
        """Return what is written after the data: the head of a single file, if it changes, and the small files by name.

        A single safetensors file embeds its checksums in its head. A directory has documents, index and manifest; the
        manifest is last.

        Args:
            crcs: Checksum of every written range.
            metadata: JSON metadata of the save.
            final_names: Names of tensor files that differ from the planned ones, by the planned one.
        """
        if not self.part.target.is_directory:
            if self.part.target.names.suffix != "safetensors":
                return None, {}
            return completed_head(self.image(0).head, [record.crc32 for record in self._records(0, crcs)]), {}
        found = dict(self.part.documents)
        if self.plan.layout.index is not None:
            specs, names = self.plan.specs, self.part.parameter_names
            counted = None if names is None else sum(specs[name].numel for name in names if name in specs)
            sizes = {name: spec.num_bytes for name, spec in specs.items()}
            files_of_index = {final_names.get(name, name): held for name, held in self.plan.layout.files.items()}
            layout = replace(self.plan.layout, files=files_of_index)
            found[self.plan.layout.index] = json_bytes(index_document(layout, sizes, counted))
        documents = {name: DocumentRecord.of(raw) for name, raw in sorted(found.items())}
        files: dict[str, FileRecord] = {}
        for index, file in enumerate(self.plan.files):
            image = self.image(index)
            files[final_names.get(file.name, file.name)] = FileRecord(
                num_bytes=image.num_bytes,
                head_bytes=len(image.head),
                head_crc32=zlib.crc32(image.head),
                ranges=tuple(self._records(index, crcs)),
            )
        manifest = Manifest(kind=self.part.target.kind.name, files=files, documents=documents, metadata=dict(metadata))
        return None, found | {self.part.target.names.manifest: manifest.encode()}

    def _records(self, index: int, crcs: Mapping[WriteRange, int] | None) -> list[RangeRecord]:
        """Return the records of a file's ranges, with zeros for checksums that are not known yet."""
        if not self._ranges:
            for write_range in self.plan.ranges():
                self._ranges.setdefault(write_range.file, []).append(write_range)
        full_boxes = {name: full_box(spec.shape) for name, spec in self.plan.files[index].tensors.items()}
        return [
            RangeRecord(
                name=each.name,
                box=None if each.box == full_boxes[each.name] else each.box,
                span=each.span,
                crc32=0 if crcs is None else crcs[each],
            )
            for each in self._ranges.get(index, [])
        ]


# transformers' save_pretrained writes the config with the model's class and dtype, without attributes of the file that
# it was read from, and without compile settings. Here the same is done to a copy, which is asked for its JSON text:
# save_pretrained itself writes files and would bypass the storage.


def config_documents(model: nn.Module) -> dict[str, bytes]:
    """Return the contents of `config.json` and `generation_config.json`, if the model has such configs.

    A model with adapters of peft has none: it forwards its base's configs, by which `from_pretrained` would make a base
    with other names of tensors, and initialize it at random.

    Args:
        model: User's model. Any config with a `to_json_string` method is supported.

    Raises:
        ConfigError: A config cannot be written as JSON.
    """
    documents: dict[str, bytes] = {}
    config: Any = getattr(model, "config", None)
    has_adapters = any(type(module).__module__.startswith("peft.") for module in model.modules())
    if config is None or has_adapters or not _has_json_text(config):
        return documents
    config_copy = copy.deepcopy(config)
    if hasattr(config_copy, "architectures"):
        config_copy.architectures = [type(model).__name__]
    if hasattr(config_copy, "dtype"):
        dtypes = (parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
        config_copy.dtype = str(next(dtypes, torch.get_default_dtype())).removeprefix("torch.")
    documents["config.json"] = _config_json(config_copy, "config")
    generation_config: Any = getattr(model, "generation_config", None)
    can_generate = getattr(model, "can_generate", None)
    if _has_json_text(generation_config) and (can_generate is None or can_generate()):
        documents["generation_config.json"] = _config_json(copy.deepcopy(generation_config), "generation_config")
    return documents


def _has_json_text(config: Any) -> bool:
    return not isinstance(config, type) and callable(getattr(config, "to_json_string", None))


def _config_json(config: Any, what: str) -> bytes:
    if hasattr(config, "transformers_weights"):
        del config.transformers_weights
    if getattr(config, "compile_config", None) is not None:
        config.compile_config = None
    try:
        text = config.to_json_string()
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"the model's {what} cannot be written as JSON: {error}. Remove values other than strings, numbers, lists"
            " and dicts from it"
        ) from error
    if not isinstance(text, str):
        raise ConfigError(f"the model's {what}.to_json_string() returned a {type(text).__name__}: it must return a str")
    return text.encode("utf-8")


def model_part(
    model: ModelWrapper, target: SaveTarget, folder: str = "", excluded: Collection[str] | None = None
) -> CheckpointPart:
    """Build the checkpoint part of a model; a sharded one includes its configs.

    Args:
        model: Boosted model.
        target: Save target.
        folder: Subdirectory of the target.
        excluded: Names of tensors to leave out, and with them the configs: transformers' `from_pretrained` would
            initialize the missing tensors at random. Optional, defaults to a full model.
    """
    model.require_complete()
    return CheckpointPart(
        target=target,
        slices=[one for one in model.tensor_slices() if one.name not in (excluded or ())],
        folder=folder,
        documents=config_documents(model.unwrap()) if target.is_directory and excluded is None else {},
        parameter_names=frozenset(name for name, _ in model.named_parameters()),
    )


def optimizer_values(optimizer: OptimizerWrapper) -> str:
    """Return an optimizer's plain values as JSON, identical on all ranks.

    Collective if states are sharded: no code that can fail on a single rank may precede it.

    Raises:
        CheckpointError: A state is neither a tensor nor a plain value.
    """
    return json_values.dumps(optimizer.checkpoint_state().values(), "the optimizer's values")


def optimizer_part(optimizer: OptimizerWrapper, target: SaveTarget, values: str, folder: str = "") -> CheckpointPart:
    """Build the checkpoint part of an optimizer; plain values go into a separate file, or into the single file.

    Args:
        optimizer: Boosted optimizer.
        target: Save target.
        values: Result of `optimizer_values`.
        folder: Subdirectory of the target.
    """
    optimizer.model.require_complete()
    return CheckpointPart(
        target=target,
        slices=optimizer.checkpoint_state().slices(),
        always_index=True,
        folder=folder,
        documents={target.names.groups: values.encode("utf-8")} if target.is_directory else {},
        values=None if target.is_directory else values,
    )


def save_metadata(world_size: int) -> dict[str, Any]:
    """Return the metadata that every manifest records of its save.

    Args:
        world_size: Number of ranks that save.
    """
    return {
        "world_size": world_size,
        "versions": {"torch": torch.__version__, "torch-booster": __version__},
    }
