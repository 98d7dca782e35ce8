"""`training_state.json`: all values of a training checkpoint that are not tensors, and the list of its parts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from booster.checkpoint_io.formats import json_values
from booster.checkpoint_io.formats.json import MAX_JSON_BYTES, json_bytes
from booster.errors import CheckpointError
from booster.lr_scheduler.base import check_scheduler_state

# Without reduced gradients, format 1 is written, which earlier versions can read; they would ignore reduced gradients.
FORMATS = (1, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class PerRank:
    """Plain values per rank, deduplicated.

    Attributes:
        values: Distinct values.
        of_rank: Index into `values` for each rank.
    """

    values: list[dict[str, Any]]
    of_rank: list[int]

    def for_rank(self, rank: int) -> dict[str, Any]:
        """Return a rank's values; with more ranks than stored, stored ranks repeat cyclically."""
        return self.values[self.of_rank[rank % len(self.of_rank)]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingDocument:
    """Content of the file.

    Attributes:
        facts: Sequence number, step, world layout and versions; also in every manifest of the save.
        models: Names of the models; "" for a single one.
        optimizers: Names of the optimizers.
        gradients: Names of the optimizers with accumulated gradients.
        reduced: Names of those of which some gradients are already reduced over ranks. Format 2.
        lr_schedulers: Class and state of every scheduler by name.
        dataloaders: Names of the dataloaders, whose positions are in `per_rank`.
        per_rank: Dataloader positions and gradient counters.
        extra: User values.
    """

    facts: dict[str, Any]
    models: list[str] = field(default_factory=list)
    optimizers: list[str] = field(default_factory=list)
    gradients: list[str] = field(default_factory=list)
    reduced: list[str] = field(default_factory=list)
    lr_schedulers: dict[str, Any] = field(default_factory=dict)
    dataloaders: list[str] = field(default_factory=list)
    per_rank: PerRank
    extra: Any = None

    def encode(self) -> bytes:
        """Serialize to JSON.

        Raises:
            CheckpointError: A value is not plain (the message names it), or the text exceeds the size limit of readers.
        """
        per_rank = {"values": self.per_rank.values, "of_rank": self.per_rank.of_rank}
        content = {each.name: getattr(self, each.name) for each in fields(self)} | {"per_rank": per_rank}
        if not self.reduced:
            del content["reduced"]
        encoded = {name: json_values.encode(value, name) for name, value in content.items()}
        raw = json_bytes({"format": FORMATS[bool(self.reduced)], **encoded})
        if len(raw) > MAX_JSON_BYTES:
            raise CheckpointError(
                f"extra, the LR schedulers and the loaders take {len(raw)} bytes as JSON, but at most {MAX_JSON_BYTES}"
                " are allowed: save large tensors as a model's buffers or in a separate file"
            )
        return raw

    @classmethod
    def parse(cls, raw: bytes, source_name: str) -> TrainingDocument:
        """Parse the output of `encode`.

        Raises:
            CheckpointError: Malformed or of an unsupported version.
        """
        content = json_values.loads(raw, source_name)
        if isinstance(content, dict) and content.get("format") == FORMATS[0]:
            content["reduced"] = []
        problem = _find_problem(content)
        if problem is not None:
            raise CheckpointError(
                f"{source_name} is not a training state: {problem}. Take another copy of the checkpoint"
            )
        per_rank = PerRank(**content["per_rank"])
        return cls(**{part.name: content[part.name] for part in fields(cls)} | {"per_rank": per_rank})

    def missing_parts(self, requested: Mapping[str, Sequence[str]]) -> list[str]:
        """Describe the requested parts that are missing.

        Args:
            requested: Names by kind: "models", "optimizers", "lr_schedulers", "dataloaders".
        """
        missing: list[str] = []
        for kind, names in requested.items():
            held: Collection[str] = getattr(self, kind)
            listed = ", ".join("one without a name" if not name else repr(name) for name in held) or "none"
            missing += [f"{_format_part(kind, name)} (it holds {listed})" for name in names if name not in held]
        return missing

    def unrequested_parts(self, requested: Mapping[str, Sequence[str]]) -> list[str]:
        """Describe the stored parts that are not requested; see `missing_parts`."""
        return [
            f"{'a' if kind in ('models', 'dataloaders') else 'an'} {_format_part(kind, name)}"
            for kind, names in requested.items()
            for name in getattr(self, kind)
            if name not in names
        ]


_KINDS = {"models": "model", "optimizers": "optimizer", "lr_schedulers": "LR scheduler", "dataloaders": "dataloader"}


def _format_part(kind: str, name: str) -> str:
    return f"{_KINDS[kind]}{f' {name!r}' if name else ''}"


def _find_problem(content: Any) -> str | None:
    if not isinstance(content, dict):
        return "it is not a JSON object"
    if type(content.get("format")) is not int or content["format"] not in FORMATS:
        return (
            f"its format is {str(content.get('format'))[:40]}, but this version reads {' and '.join(map(str, FORMATS))}"
        )
    missing = [part.name for part in fields(TrainingDocument) if part.name not in content]
    if missing:
        return f"{', '.join(missing)} missing"
    lists = ("models", "optimizers", "gradients", "reduced", "dataloaders")
    if not all(_is_list_of(content[key], str) for key in lists):
        return "its lists of names are malformed"
    if not isinstance(content["facts"], dict) or not isinstance(content["lr_schedulers"], dict):
        return "its tables are malformed"
    is_complete = _is_per_rank(content["per_rank"], content["dataloaders"], content["gradients"])
    return None if is_complete else "its values by rank are malformed"


def _is_per_rank(value: Any, dataloaders: Sequence[str], gradients: Sequence[str]) -> bool:
    if not isinstance(value, dict) or set(value) != {"values", "of_rank"}:
        return False
    if not _is_list_of(value["values"], dict) or not _is_list_of(value["of_rank"], int) or not value["of_rank"]:
        return False
    return all(0 <= index < len(value["values"]) for index in value["of_rank"]) and all(
        isinstance(rank_values.get("dataloaders"), dict)
        and isinstance(rank_values.get("gradients"), dict)
        and rank_values["dataloaders"].keys() >= set(dataloaders)
        and rank_values["gradients"].keys() >= set(gradients)
        for rank_values in value["values"]
    )


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(type(item) is kind for item in value)


def scheduler_document(lr_scheduler: Any) -> dict[str, Any]:
    """Return a scheduler's class name and state dict."""
    return {"scheduler": type(lr_scheduler).__name__, "state": lr_scheduler.state_dict()}


def scheduler_state(document: Any, lr_scheduler: Any, path: Path) -> dict[str, Any]:
    """Return the state dict in the output of `scheduler_document`.

    Raises:
        CheckpointError: Malformed, or of another scheduler class.
        ConfigError: The scheduler rejects the state because it was built with other settings.
    """
    state = document.get("state") if isinstance(document, dict) else None
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds no scheduler state: give a file that save_lr_scheduler wrote")
    name = type(lr_scheduler).__name__
    if document.get("scheduler") != name:
        raise CheckpointError(
            f"{path} holds the state of a {document.get('scheduler')!s:.80}, not of a {name}: build the scheduler"
            " that was saved"
        )
    check_scheduler_state(lr_scheduler, state)  # before models and optimizers are filled
    return state
