"""One set of tensors on its way to disk: what is asked for, and, once it is planned, every byte but the data."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from booster.checkpoint_io.files.file_image import FileImage, safetensors_image, torch_image
from booster.checkpoint_io.files.file_record import completed_head, with_placeholder
from booster.checkpoint_io.files.json_documents import json_bytes
from booster.checkpoint_io.files.manifest import MANIFEST_KEY, DocumentRecord, FileRecord, Manifest, RangeRecord
from booster.checkpoint_io.files.tensor_files import GROUPS_KEY
from booster.checkpoint_io.layout import FileNames, FilePlan, Kind, index_document
from booster.checkpoint_io.planning.plan import PlannedFile, SavePlan, WriteRange
from booster.errors import CheckpointError
from booster.interface import TensorSlice

__all__ = ["Component", "Images", "PlannedComponent", "check_storable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """A model, an optimizer or another set of tensors, with the small files that go with it.

    Attributes:
        kind: What it is.
        names: What its files are called.
        slices: What this rank holds of it.
        max_shard_bytes: Largest file; a single larger tensor makes a larger one.
        is_sharded: Into a directory; False: one file, which the target names.
        always_index: Number the files and write an index even where there is only one.
        folder: Where below the target's directory; empty: in it.
        documents: Further files by name, such as a model's config.
        values: An optimizer's plain values as JSON, for the single file.
        parameter_names: Whose elements the index counts; None: it counts none, as for optimizers.
    """

    kind: Kind
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


class PlannedComponent:
    """A component and its plan.

    Args:
        component: What is asked for.
        plan: Which tensor goes where.
        single_name: The file's name where the component is not sharded.
        images: Tensor files as they are before their data, of an earlier save by the same plan; filled here.
    """

    def __init__(self, component: Component, plan: SavePlan, single_name: str, images: Images) -> None:
        self.component = component
        self.plan = plan
        self._single_name = single_name
        self._images = images
        self._ranges: dict[int, list[WriteRange]] = {}

    @property
    def num_bytes(self) -> int:
        """Size of all tensor files."""
        return sum(self.image(index).num_bytes for index in range(len(self.plan.files)))

    def path_of(self, directory: Path, index: int) -> Path:
        """Returns where a tensor file goes."""
        return directory / self.component.folder / self._file_name(index)

    def image(self, index: int) -> FileImage:
        """Returns a tensor file as it is before its data."""
        if index not in self._images:
            self._images[index] = self._make_image(self.plan.files[index])
        return self._images[index]

    def completed_head(self, crcs: Mapping[WriteRange, int]) -> bytes | None:
        """Returns the head with the checksums of the data, where the file carries its own."""
        if self.component.is_sharded or self.component.names.suffix != "safetensors":
            return None
        return completed_head(self.image(0).head, [crcs[part] for part in self._ranges_of_file(0)])

    def small_files(self, crcs: Mapping[WriteRange, int], facts: Mapping[str, Any]) -> dict[str, bytes]:
        """Returns documents, index and, last, the manifest, by name.

        Args:
            crcs: Checksum of every range that was written.
            facts: What a reader may want to know of the save, as JSON has it.
        """
        if not self.component.is_sharded:
            return {}
        found = dict(self.component.documents)
        if self.plan.index is not None:
            found[self.plan.index] = json_bytes(self._index())
        documents = {
            name: DocumentRecord(num_bytes=len(raw), crc32=zlib.crc32(raw)) for name, raw in sorted(found.items())
        }
        files = {self._file_name(index): self._record(index, crcs) for index in range(len(self.plan.files))}
        manifest = Manifest(kind=self.component.kind.name, files=files, documents=documents, facts=dict(facts))
        return found | {self.component.names.manifest: manifest.encode()}

    def _file_name(self, index: int) -> str:
        return self.plan.files[index].name if self.component.is_sharded else self._single_name

    def _make_image(self, file: PlannedFile) -> FileImage:
        component = self.component
        if component.names.suffix != "safetensors":
            return torch_image(file, component.values)
        metadata = {"format": "pt"}
        if component.values is not None:
            metadata[GROUPS_KEY] = component.values
        if component.is_sharded:
            metadata[MANIFEST_KEY] = component.names.manifest
        else:
            metadata = with_placeholder(metadata, [self._range_record(part, 0) for part in self._ranges_of_file(0)])
        return safetensors_image(file, metadata)

    def _ranges_of_file(self, index: int) -> list[WriteRange]:
        if not self._ranges:
            for part in self.plan.all_ranges():
                self._ranges.setdefault(part.file, []).append(part)
        return self._ranges.get(index, [])

    def _record(self, index: int, crcs: Mapping[WriteRange, int]) -> FileRecord:
        image = self.image(index)
        ranges = tuple(self._range_record(part, crcs[part]) for part in self._ranges_of_file(index))
        return FileRecord(
            num_bytes=image.num_bytes, head_bytes=len(image.head), head_crc32=zlib.crc32(image.head), ranges=ranges
        )

    def _range_record(self, part: WriteRange, crc32: int) -> RangeRecord:
        shape = self.plan.specs[part.name].shape
        is_whole_box = part.box == tuple((0, size) for size in shape)
        return RangeRecord(name=part.name, box=None if is_whole_box else part.box, span=part.span, crc32=crc32)

    def _index(self) -> dict[str, Any]:
        plan = self.plan
        names = self.component.parameter_names
        counted = None if names is None else sum(plan.specs[name].numel for name in names if name in plan.specs)
        files = FilePlan(files={file.name: tuple(file.tensors) for file in plan.files}, index=plan.index)
        sizes = {name: spec.num_bytes for name, spec in plan.specs.items()}
        return index_document(files, sizes, counted)


def check_storable(slices: Sequence[TensorSlice]) -> None:
    """Raises if a tensor has no plain elements to write.

    Raises:
        CheckpointError: A sparse or quantized tensor, or one on the meta device.
    """
    for part in slices:
        tensor = part.tensor
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
            layout = "quantized" if tensor.is_quantized else str(tensor.layout)
            raise CheckpointError(
                f"{part.name!r} is a {layout} tensor on {tensor.device}, without plain elements to write: materialise"
                " it before saving"
            )
