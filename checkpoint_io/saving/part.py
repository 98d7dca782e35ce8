"""Part of a checkpoint: one set of tensors and, once planned, every byte of its files except the data."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from booster.checkpoint_io.formats import json_values
from booster.checkpoint_io.formats.file_image import FileImage, safetensors_image, torch_image
from booster.checkpoint_io.formats.index import config_documents
from booster.checkpoint_io.formats.json import json_bytes
from booster.checkpoint_io.formats.manifest import MANIFEST_KEY, DocumentRecord, FileRecord, Manifest, RangeRecord
from booster.checkpoint_io.formats.tensor_files import GROUPS_KEY, completed_head, with_placeholder
from booster.checkpoint_io.layout import MODEL, OPTIMIZER, FileKind, FileNames, FilePlan, index_document
from booster.checkpoint_io.planning.save_plan import SavePlan, WriteRange
from booster.checkpoint_io.save_target import SaveTarget
from booster.interface import ModelWrapper, OptimizerWrapper, TensorSlice


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPart:
    """Model, optimizer or another set of tensors, with its small files.

    Attributes:
        kind: Kind of part.
        names: File names.
        slices: Slices on this rank.
        max_shard_bytes: Maximum file size; a single larger tensor gets its own larger file.
        is_sharded: If True, write into a directory. If False, write the one file that the target names.
        always_index: If True, number the files and write an index even for a single file.
        folder: Subdirectory of the target; empty for the target itself.
        documents: Further files by name, such as a model's config.
        values: An optimizer's plain values as JSON, for a single file.
        parameter_names: Parameters whose elements the index counts. Optional, defaults to no count.
    """

    kind: FileKind
    names: FileNames
    slices: Sequence[TensorSlice]
    max_shard_bytes: int
    is_sharded: bool
    always_index: bool = False
    folder: str = ""
    documents: Mapping[str, bytes] = field(default_factory=dict)
    values: str | None = None
    parameter_names: frozenset[str] | None = None


Images = dict[int, FileImage]


class PlannedPart:
    """Checkpoint part with its save plan.

    Args:
        part: Part to save.
        plan: Save plan.
        single_name: File name if the part is not sharded.
        images: Cache of file images (everything but the data) for this plan; extended here.

    Attributes:
        file_names: Names of the tensor files.
    """

    def __init__(self, part: CheckpointPart, plan: SavePlan, single_name: str, images: Images) -> None:
        self.part = part
        self.plan = plan
        self.file_names = [file.name for file in plan.files] if part.is_sharded else [single_name]
        self._images = images
        self._ranges: dict[int, list[WriteRange]] = {}

    def path_of(self, directory: Path, index: int) -> Path:
        """Return the path of a tensor file."""
        return directory / self.part.folder / self.file_names[index]

    def image(self, index: int) -> FileImage:
        """Return the image of a tensor file: everything but the data."""
        if index in self._images:
            return self._images[index]
        file, values = self.plan.files[index], self.part.values
        if self.part.names.suffix == "safetensors":
            metadata = {"format": "pt"}
            if values is not None:
                metadata[GROUPS_KEY] = values
            if self.part.is_sharded:
                metadata[MANIFEST_KEY] = self.part.names.manifest
            else:
                records = [self._range_record(write_range, 0) for write_range in self._ranges_of_file(0)]
                metadata = with_placeholder(metadata, records)
            self._images[index] = safetensors_image(file, metadata)
        else:
            self._images[index] = torch_image(file, values)
        return self._images[index]

    def completed_head(self, crcs: Mapping[WriteRange, int]) -> bytes | None:
        """Return the head with the checksums of the data, or None if the file does not embed its checksums."""
        if self.part.is_sharded or self.part.names.suffix != "safetensors":
            return None
        return completed_head(self.image(0).head, [crcs[write_range] for write_range in self._ranges_of_file(0)])

    def small_files(self, crcs: Mapping[WriteRange, int], metadata: Mapping[str, Any]) -> dict[str, bytes]:
        """Return documents, index and manifest by name; the manifest is last.

        Args:
            crcs: Checksum of every written range.
            metadata: JSON metadata of the save.
        """
        if not self.part.is_sharded:
            return {}
        found = dict(self.part.documents)
        if self.plan.index is not None:
            specs, names = self.plan.specs, self.part.parameter_names
            counted = None if names is None else sum(specs[name].numel for name in names if name in specs)
            file_plan = FilePlan(
                files={file.name: tuple(file.tensors) for file in self.plan.files}, index=self.plan.index
            )
            sizes = {name: spec.num_bytes for name, spec in specs.items()}
            found[self.plan.index] = json_bytes(index_document(file_plan, sizes, counted))
        documents = {
            name: DocumentRecord(num_bytes=len(raw), crc32=zlib.crc32(raw)) for name, raw in sorted(found.items())
        }
        files: dict[str, FileRecord] = {}
        for index, name in enumerate(self.file_names):
            image = self.image(index)
            files[name] = FileRecord(
                num_bytes=image.num_bytes,
                head_bytes=len(image.head),
                head_crc32=zlib.crc32(image.head),
                ranges=tuple(self._range_record(each, crcs[each]) for each in self._ranges_of_file(index)),
            )
        manifest = Manifest(kind=self.part.kind.name, files=files, documents=documents, metadata=dict(metadata))
        return found | {self.part.names.manifest: manifest.encode()}

    def _ranges_of_file(self, index: int) -> list[WriteRange]:
        if not self._ranges:
            for write_range in self.plan.all_ranges():
                self._ranges.setdefault(write_range.file, []).append(write_range)
        return self._ranges.get(index, [])

    def _range_record(self, write_range: WriteRange, crc32: int) -> RangeRecord:
        shape = self.plan.specs[write_range.name].shape
        is_full_box = write_range.box == tuple((0, size) for size in shape)
        return RangeRecord(
            name=write_range.name, box=None if is_full_box else write_range.box, span=write_range.span, crc32=crc32
        )


def model_part(model: ModelWrapper, target: SaveTarget, folder: str = "") -> CheckpointPart:
    """Build the checkpoint part of a model; a sharded one includes its configs.

    Args:
        model: Boosted model.
        target: Save target.
        folder: Subdirectory of the target.
    """
    return CheckpointPart(
        kind=MODEL,
        names=target.names,
        slices=model.tensor_slices(),
        max_shard_bytes=target.max_shard_bytes,
        is_sharded=target.is_sharded,
        folder=folder,
        documents=config_documents(model.unwrap()) if target.is_sharded else {},
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
    return CheckpointPart(
        kind=OPTIMIZER,
        names=target.names,
        slices=optimizer.checkpoint_state().slices(),
        max_shard_bytes=target.max_shard_bytes,
        is_sharded=target.is_sharded,
        always_index=True,
        folder=folder,
        documents={target.names.groups: values.encode("utf-8")} if target.is_sharded else {},
        values=None if target.is_sharded else values,
    )


def save_metadata(world_size: int) -> dict[str, Any]:
    """Return the metadata that every manifest records of its save.

    Args:
        world_size: Number of ranks that save.
    """
    return {
        "world_size": world_size,
        "versions": {"torch": torch.__version__, "torch-booster": metadata.version("torch-booster")},
    }
