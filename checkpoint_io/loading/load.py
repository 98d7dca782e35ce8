"""Two-phase load: all but the data is checked on all ranks first, then each rank fills its own memory."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from booster.checkpoint_io.formats.optimizer_values import MASTER_SUFFIX, parse_values, renamed
from booster.checkpoint_io.layout import EXCLUDES_FROZEN, MODEL, OPTIMIZER, FileKind
from booster.checkpoint_io.parallel import CheckpointGroup
from booster.checkpoint_io.storage import Storage
from booster.comm import all_gather_bytes, all_gather_text, check_same_across_ranks
from booster.errors import CheckpointError, ConfigError
from booster.interface import ModelWrapper, OptimizerState, OptimizerWrapper, TensorSlice, TensorSpec
from booster.logger import get_dist_logger

from .conversion import ConvertedSpecs, convert_specs
from .fill import empty_slice, read_slices, read_slices_on_all_ranks, verify_ranges
from .reader import StoredCheckpoint, open_checkpoint

MAX_LISTED = 10
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


@dataclass(slots=True, kw_only=True)
class Match:
    """Stored tensor for each slice, and the mismatches.

    Attributes:
        sources: Stored name by slice name, for slices that can be filled.
        duplicates: Further stored names of a tied tensor, by the stored name that is used.
        missing: Names of the model that are not in the checkpoint.
        unexpected: Names of the checkpoint that are not in the model.
        differing: One line per name whose shape or dtype does not match.
    """

    sources: dict[str, str] = field(default_factory=dict)
    duplicates: dict[str, list[str]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)

    def check(
        self, stored: StoredCheckpoint, converted: ConvertedSpecs | None, source_name: str, *, strict: bool
    ) -> None:
        """Raise one error that lists all mismatches.

        Args:
            stored: Open checkpoint.
            converted: Its tensors in the model's form, if that differs.
            source_name: Its name for messages.
            strict: If False, raise only if no tensor matches.

        Raises:
            CheckpointError: There are mismatches, or a tied tensor is stored with different values; with
                `strict=False`, there are no matches.
        """
        has_unfilled = bool(self.missing or self.differing)
        if strict and (has_unfilled or self.unexpected):
            advice = "Load it into the model that it was saved from, or pass strict=False to load only what fits"
            prefix = _added_prefix(self.missing, self.unexpected)
            if prefix is not None:
                advice = (
                    f"The names in the checkpoint begin with {prefix!r}, which a wrapper of the model adds, such as"
                    " DistributedDataParallel or torch.compile: save the state_dict() of the model inside of it"
                    f" (model.{prefix}state_dict()), or rename them by name.removeprefix({prefix!r})"
                )
            if converted is not None and converted.failures:
                failures = "".join(f"\n    {line}" for line in converted.failures[:MAX_LISTED])
                advice += (
                    f"\n  {len(converted.failures)} not converted as from_pretrained does:{failures}\nOpen it with"
                    " from_pretrained before boost() instead, or once to save it with save_model"
                )
            raise CheckpointError(
                f"{source_name} does not fit the model, so nothing was loaded:{self.format_mismatches()}\n{advice}"
            )
        if not self.sources and (has_unfilled or self.unexpected):
            raise CheckpointError(
                f"no tensor of {source_name} fits the model, so nothing was loaded:{self.format_mismatches()}"
            )
        for used, duplicates in self.duplicates.items() if strict else ():
            differing = [name for name in duplicates if not _are_equal(stored, converted, used, name)]
            if differing:
                raise CheckpointError(
                    f"{used!r} and {differing[0]!r} are one tied tensor in the model, but differ in {stored.path}, so"
                    " nothing was loaded: untie them in the model, or pass strict=False to load the first"
                )

    def format_mismatches(self) -> str:
        """Format all mismatches, one per line; empty if there are none."""
        mismatches = {
            "missing in the checkpoint": self.missing,
            "not in the model": self.unexpected,
            "differing": self.differing,
        }
        lines: list[str] = []
        for title, names in mismatches.items():
            if names:
                lines += [f"  {len(names)} {title}:", *(f"    {name}" for name in names[:MAX_LISTED])]
            if len(names) > MAX_LISTED:
                lines.append(f"    ... and {len(names) - MAX_LISTED} more")
        return "".join(f"\n{line}" for line in lines)


def _added_prefix(missing: Sequence[str], unexpected: Sequence[str]) -> str | None:
    """Return the prefix, such as "module.", of all unexpected names, with which all missing ones are among them."""
    prefix = unexpected[0].partition(".")[0] + "." if unexpected else ""
    found = {f"{prefix}{name}" for name in missing} <= set(unexpected)
    return prefix if missing and found and all(name.startswith(prefix) for name in unexpected) else None


def match_names(
    specs: Mapping[str, TensorSpec],
    slices: Sequence[TensorSlice],
    tied: Mapping[str, Sequence[str]],
    names_of_all_ranks: Collection[str] | None = None,
    optional: Collection[str] = (),
) -> Match:
    """Match stored tensors with slices.

    Args:
        specs: Dtypes and shapes of the stored tensors.
        slices: Slices of the model on this rank, by the first name of each tensor; a tensor may have several slices.
        tied: Further names of the same memory, which match as well; the first name takes precedence.
        names_of_all_ranks: Names that the model has on any rank; these are not unexpected. Optional, defaults to those
            of `slices`.
        optional: Names of the model that may be missing. Optional, defaults to none.
    """
    match = Match()
    known = set(names_of_all_ranks or ())
    for tensor_slice in {tensor_slice.name: tensor_slice for tensor_slice in slices}.values():
        names = (tensor_slice.name, *tied.get(tensor_slice.name, ()))
        known.update(names)
        stored = [name for name in names if name in specs]
        problems = {name: line for name in stored if (line := _mismatch(name, specs[name], tensor_slice)) is not None}
        matching = [name for name in stored if name not in problems]
        match.differing.extend(problems.values())
        if not stored and tensor_slice.name not in optional:
            match.missing.append(tensor_slice.name)
        if matching:
            match.sources[tensor_slice.name] = matching[0]
        if len(matching) > 1:
            match.duplicates[matching[0]] = matching[1:]
    match.unexpected.extend(name for name in specs if name not in known)
    return match


def _mismatch(name: str, spec: TensorSpec, tensor_slice: TensorSlice) -> str | None:
    if spec.shape != tensor_slice.global_shape:
        return f"{name!r} has shape {spec.shape} in the checkpoint, {tensor_slice.global_shape} in the model"
    # A load converts any float to any float, but other dtypes only without loss.
    stored, target = spec.dtype, tensor_slice.dtype
    is_float = stored.is_floating_point and target.is_floating_point
    # promote_types supports no unsigned dtype but uint8; all others count as lossy.
    is_integer = stored in _INTEGERS and target in _INTEGERS
    if stored == target or is_float or (is_integer and torch.promote_types(stored, target) == target):
        return None
    return f"{name!r} is {stored} in the checkpoint, {target} in the model"


VERIFY = ("checksums", "before", "structure")

# How long other ranks retry to open what rank 0 has found: network file systems show new files late.
_VISIBILITY_TIMEOUT_SECONDS = 30.0
_COMPARED_ELEMENTS = 2**20


def check_verify(verify: object) -> None:
    """Raise `ConfigError` unless `verify` is a supported verification mode."""
    if verify not in VERIFY:
        raise ConfigError(f"verify={verify!r} is not a verification mode: give one of {', '.join(VERIFY)}")


@contextmanager
def incomplete_on_failure(parts: Iterable[ModelWrapper | OptimizerWrapper]) -> Iterator[None]:
    """Context in which models and optimizers are filled: they are marked as incomplete if it raises, else as loaded."""
    failure: BaseException | None = None
    try:
        yield
    except BaseException as error:
        failure = error
        raise
    finally:
        for part in parts:
            # Not the error itself, which refers to its frames.
            text = None if failure is None else f"{type(failure).__name__}: {failure}"
            failed_loads = part.failed_loads if isinstance(part, ModelWrapper) else part.model.failed_loads
            failed_loads.pop(part, None)
            if text is not None:
                failed_loads[part] = text
            if isinstance(part, WrapsPlainObject):
                part.mark_object(text)


class WrapsPlainObject:
    """Wrapper of a model or an optimizer that is used without it, so that the object itself must be marked."""

    def mark_object(self, error: str | None) -> None:
        """Have the object raise when it is used, as a load into it has failed, or no longer if `error` is None."""
        raise NotImplementedError


class Loader(ExitStack):
    """Opens and verifies checkpoints for one process group; a context manager that closes them.

    Args:
        ranks: Ranks that load together.
        storage: Storage to read from.
        verify: "checksums" verifies the data while it is loaded, in one pass; "before" reads and verifies all of it
            before anything is changed; "structure" verifies no data.

    Attributes:
        verifies_while_reading: Whether to let `read_slices` verify what it reads.
        verifies_before: Whether to call `verify` for data that `read_slices` reads in one call, too.

    Raises:
        ConfigError: Unknown value of `verify`.
    """

    def __init__(self, ranks: CheckpointGroup, storage: Storage, verify: str = "checksums") -> None:
        super().__init__()
        check_verify(verify)
        self.ranks = ranks
        self.storage = storage
        self._verifies = verify != "structure"
        self.verifies_while_reading = verify == "checksums"
        self.verifies_before = verify == "before"

    def open(self, path: Path, kind: FileKind) -> StoredCheckpoint:
        """Open a checkpoint and check its structure; it stays open until the loader is closed. Collective."""

        def open_stored(timeout_seconds: float) -> StoredCheckpoint:
            stored = open_checkpoint(
                self.storage, path, kind, timeout_seconds=timeout_seconds, requires_manifest=self._verifies
            )
            self.callback(stored.close)
            return stored

        action, rank = f"loading the {kind.name} from {path}", self.ranks.rank
        first: StoredCheckpoint | None = None
        with suppress(Exception):  # rank 0 tries again, and its error is raised on all ranks
            first = open_stored(0.0)
        if self.ranks.size > 1:
            what = f"a {kind.name} from {path}"
            lines = [what, "nothing" if first is None else first.fingerprint]
            of_ranks = all_gather_text("what they load", lines, self.ranks.group)
            if first is not None and all(one == lines for one in of_ranks):  # usual, and on all ranks or none
                return first
            check_same_across_ranks("what they load", [what], self.ranks.group)
        # What rank 0 has found, other ranks of a network file system may find later.
        found = self.ranks.run_on_all_ranks(lambda: open_stored(0.0) if rank == 0 and first is None else first, action)
        stored = self.ranks.run_on_all_ranks(lambda: found or open_stored(_VISIBILITY_TIMEOUT_SECONDS), action)
        if self.ranks.size > 1:
            # A concurrent save could show some ranks the old checkpoint and others the new one, each consistent.
            what = f"the {kind.name} that they found at {path}"
            check_same_across_ranks(what, [stored.fingerprint], self.ranks.group)
        return stored

    def verify(self, stored: StoredCheckpoint) -> None:
        """Verify all checksums, sharded over the ranks. Collective.

        Raises:
            CheckpointError: Data differs from its checksum.
        """
        if self._verifies:
            ranks = self.ranks
            ranks.run_on_all_ranks(lambda: verify_ranges(stored, ranks.rank, ranks.size), f"verifying {stored.path}")

    def names_of_all_ranks(self, names: Collection[str]) -> frozenset[str]:
        """Return the union of the ranks' names. Collective."""
        if self.ranks.size == 1:
            return frozenset(names)
        payloads, _ = all_gather_bytes(json.dumps(sorted(names)).encode(), self.ranks.group)
        return frozenset(name for raw in payloads for name in json.loads(raw))


@dataclass(slots=True, eq=False)
class ModelLoad:
    """Load of a model.

    A model with LoRA also takes the files of its base, see Note [Names of the base]. A tied tensor may be stored under
    any of its names. Names and forms that transformers converts are converted as `from_pretrained` does. Floating-point
    tensors are converted to the model's dtype; other dtypes are converted only if lossless.

    Args:
        loader: Loader that opens the files.
        model: Boosted model.
        path: File, index or directory.
        strict: If False, load only tensors that match in name and shape.
        frozen: Names of frozen parameters on this rank, which stay as they are if the checkpoint leaves them out.
    """

    _loader: Loader
    _model: ModelWrapper
    _path: Path
    strict: bool
    frozen: Collection[str] = ()
    # From `check` for `fill`: the open checkpoint, and stored name and slice of what it fills.
    _stored: StoredCheckpoint = field(init=False)
    _source_and_slice: list[tuple[str, TensorSlice]] = field(init=False)
    _computed: dict[str, torch.Tensor] = field(init=False)  # to be given to the modules, by name

    def check(self) -> None:
        """Open, match and verify. Collective.

        Raises:
            CheckpointError: Missing, unexpected or differing names, or damaged files.
        """
        loader, ranks, action = self._loader, self._loader.ranks, f"loading the model from {self._path}"
        self._stored = stored = loader.open(self._path, MODEL)
        slices, tied = ranks.run_on_all_ranks(lambda: (self._model.tensor_slices(), self._model.tied_names()), action)
        computed = {one.name: one.tensor for one in slices if one.is_computed}
        names = loader.names_of_all_ranks(
            {name for tensor_slice in slices for name in (tensor_slice.name, *tied.get(tensor_slice.name, ()))}
        )
        model: Any = self._model.module
        base_names: dict[str, str] = {}
        if hasattr(model, "peft_config"):
            base_names = ranks.run_on_all_ranks(lambda: _names_in_base(model, names, stored.specs), action)
        if base_names:
            model = model.get_base_model()
            slices = _renamed_slices(slices, base_names)
            tied = {base_names.get(name, name): tuple(base_names.get(one, one) for one in tied[name]) for name in tied}
            names = frozenset(base_names.get(name, name) for name in names)
        excludes_frozen = stored.manifest is not None and bool(stored.manifest.metadata.get(EXCLUDES_FROZEN))
        excluded = loader.names_of_all_ranks(self.frozen) - stored.specs.keys() if excludes_frozen else frozenset()
        converted: ConvertedSpecs | None = None
        if base_names:
            excluded = frozenset(filter(_is_of_adapter, names))  # they stay as they are
        if stored.specs.keys() != names - excluded:  # on all ranks or none
            converted = ranks.run_on_all_ranks(lambda: convert_specs(stored.specs, model, names), action)
        source_name = f"{self._path}{' (saved with exclude_frozen_parameters=True)' if excludes_frozen else ''}"
        specs, optional = (stored.specs, frozenset()) if converted is None else (converted.specs, converted.optional)
        own = ranks.run_on_all_ranks(lambda: match_names(specs, slices, tied, names, optional | excluded), action)
        matched = replace(  # a rank may hold none of a tensor, and names it nevertheless
            own,
            missing=own.missing + sorted(loader.names_of_all_ranks(own.missing) - {*own.missing}),
            differing=own.differing + sorted(loader.names_of_all_ranks(own.differing) - {*own.differing}),
        )
        ranks.run_on_all_ranks(lambda: matched.check(stored, converted, source_name, strict=self.strict), action)
        if not self.strict and ranks.rank == 0 and matched.format_mismatches():
            get_dist_logger().warning(f"{action} with strict=False leaves out:{matched.format_mismatches()}")
        self._computed = {
            name: tensor for name, tensor in computed.items() if base_names.get(name, name) in matched.sources
        }
        if loader.verifies_before:
            loader.verify(stored)
        # Masters too: the file may have more precision than the model weights.
        masters = ranks.run_on_all_ranks(self._model.master_slices, action)
        all_slices = [*slices, *(_renamed_slices(masters, base_names) if base_names else masters)]
        self._source_and_slice = [
            (matched.sources[tensor_slice.name], tensor_slice)
            for tensor_slice in all_slices
            if tensor_slice.name in matched.sources
        ]
        if converted is not None:
            self._source_and_slice = converted.stored_slices(self._source_and_slice)

    def fill(self) -> None:
        """Read this rank's slices into the model's memory. Collective."""
        loader, action = self._loader, f"loading the model from {self._path}"
        read_slices_on_all_ranks(
            self._stored, self._source_and_slice, loader.ranks, action, verifies=loader.verifies_while_reading
        )
        if self._computed:
            loader.ranks.run_on_all_ranks(lambda: self._model.load_computed_state(self._computed), action)
        loader.ranks.run_on_all_ranks(self._model.notify_loaded, action)


# Note [Names of the base]
# peft puts the user's model into `base_model.model`, a layer with an adapter into `base_layer` of its wrapper, and a
# layer of `modules_to_save` into `original_module` beside the copies that train. Without these parts, names are those
# of the base's own files. A copy has the name of its original, and is filled with it: it would otherwise keep what the
# original was before. The tensors of the adapters are in no file of a base, and stay as they are.
_PEFT_PREFIX = "base_model.model."
_PEFT_WRAPPERS = re.compile(r"\.(?:base_layer|original_module|modules_to_save\.[^.]+)(?=\.)")
# Adapters that start at random, whatever the base's weights are.
_INDEPENDENT = (True, False, None, "gaussian", "orthogonal")


def _names_in_base(model: nn.Module, names: Collection[str], stored: Collection[str]) -> dict[str, str]:
    """Return the names that a model's tensors have in its base, or nothing unless the files are those of the base.

    Raises:
        ConfigError: The files are those of the base, and an adapter was computed from other weights of it.
    """
    configs: Any = getattr(model, "peft_config", None)
    if not isinstance(configs, dict) or not all(name.startswith(_PEFT_PREFIX) for name in names):
        return {}
    if any(name.startswith(_PEFT_PREFIX) for name in stored):
        return {}
    for name, config in configs.items():
        start = "use_dora=True" if getattr(config, "use_dora", False) else getattr(config, "init_lora_weights", None)
        if start not in _INDEPENDENT:
            raise ConfigError(
                f"the adapter {name!r} ({start}) was computed from the weights of the base, which this load would"
                " replace: load the base before the adapter is added, as by from_pretrained()"
            )
    return {name: _PEFT_WRAPPERS.sub("", name.removeprefix(_PEFT_PREFIX)) for name in names if not _is_of_adapter(name)}


def _is_of_adapter(name: str) -> bool:
    return any(part.startswith("lora_") for part in name.split("."))


def _renamed_slices(slices: Iterable[TensorSlice], names: Mapping[str, str]) -> list[TensorSlice]:
    return [replace(one, name=names.get(one.name, one.name)) for one in slices]


class OptimizerLoad:
    """Load of an optimizer.

    Stored fp32 master weights fill the optimizer's masters. An optimizer without masters gets them written into the
    parameters, because they are more precise than the model's file: load the model first. If none are stored, masters
    are copied from the model's weights.

    Args:
        loader: Loader that opens the files.
        optimizer: Boosted optimizer.
        path: File, index or directory.
    """

    def __init__(self, loader: Loader, optimizer: OptimizerWrapper, path: Path) -> None:
        self._loader = loader
        self._optimizer = optimizer
        self._path = path
        self._action = f"loading the optimizer from {path}"
        self._stored_name: dict[str, str] = {}  # of tensors that have another name in the file

    def check(self) -> None:
        """Open, compare and verify. Collective.

        Raises:
            CheckpointError: Other parameters, groups or shapes, or damaged files.
        """
        self._stored = stored = self._loader.open(self._path, OPTIMIZER)

        def compare() -> tuple[OptimizerState, dict[str, Any], set[str]]:
            if stored.groups is None:
                raise CheckpointError(
                    f"{self._path} holds no param groups: it is neither an optimizer of save_optimizer nor the"
                    " state_dict of a torch optimizer"
                )
            specs, values = stored.specs, parse_values(stored.groups, stored.specs, str(self._path))
            state = self._optimizer.checkpoint_state()
            names = state.names_by_order(values)
            if names:
                specs, values, self._stored_name = renamed(specs, values, names)
            state.check(specs, values)
            self._specs = specs
            return state, values, {part.name for part in state.master_slices()}

        self._state, self._values, masters = self._loader.ranks.run_on_all_ranks(compare, self._action)
        # A rank without a shard of a master must not conclude that no rank has memory for it.
        self._masters = self._loader.names_of_all_ranks(masters)
        if self._loader.verifies_before:
            self._loader.verify(stored)

    def fill(self) -> None:
        """Replace the optimizer's state with the stored one. Collective."""
        loader, stored = self._loader, self._stored

        def allocate() -> tuple[list[tuple[str, TensorSlice]], list[tuple[str, TensorSlice]]]:
            slices = self._state.allocate(self._specs, self._values)
            named = [(self._stored_name.get(one.name, one.name), one) for one in slices]
            return named, list(self._unused_masters())

        named, in_parameters = loader.ranks.run_on_all_ranks(allocate, self._action)
        read_slices_on_all_ranks(
            stored, [*named, *in_parameters], loader.ranks, self._action, verifies=loader.verifies_while_reading
        )
        loader.ranks.run_on_all_ranks(
            lambda: self._optimizer.model.notify_loaded() if in_parameters else None, self._action
        )

    def _unused_masters(self) -> Iterator[tuple[str, TensorSlice]]:
        masters = [name for name in self._stored.specs if name.endswith(MASTER_SUFFIX) and name not in self._masters]
        if not masters:
            return
        of_model: dict[str, list[TensorSlice]] = {}
        for tensor_slice in self._optimizer.model.tensor_slices():
            of_model.setdefault(tensor_slice.name, []).append(tensor_slice)
        for name in masters:
            yield from ((name, tensor_slice) for tensor_slice in of_model.get(name.removesuffix(MASTER_SUFFIX), []))


def _are_equal(stored: StoredCheckpoint, converted: ConvertedSpecs | None, left: str, right: str) -> bool:
    specs = stored.specs if converted is None else converted.specs
    spec = specs[left]
    if specs[right] != spec:
        return False
    for start in range(0, spec.numel, _COMPARED_ELEMENTS):
        span = (start, min(start + _COMPARED_ELEMENTS, spec.numel))
        named = [(name, empty_slice(name, spec, span)) for name in (left, right)]
        read_slices(stored, named if converted is None else converted.stored_slices(named))
        if not torch.equal(*(each.tensor.view(torch.uint8) for _, each in named)):  # bits, so that NaN equals itself
            return False
    return True
