"""Whole training states small enough to be saved thousands of times: steps that rotate, and one with two models."""

from __future__ import annotations

import torch
import torch.distributed as dist
from oracles.faulting_storage import UnsyncedStorage
from save_cases import Net, SplitModel, version_of

from booster.checkpoint_io import GeneralCheckpointIO
from booster.errors import CheckpointError
from booster.interface import ModelWrapper, OptimizerWrapper
from booster.interface.checkpoint_io import SaveOptions, TrainingParts


class VersionedState:
    """In place of a process's generators: a few numbers."""

    def __init__(self, version):
        self.numbers = torch.full((8,), version)

    def capture(self):
        """Returns the numbers."""
        return {"torch_cpu": self.numbers.clone()}

    def derive(self, state, rank):
        """Returns the numbers for a rank that was not there."""
        return state

    def check(self, state):
        """Raises where the numbers differ among themselves."""
        assert len(set(state["torch_cpu"].tolist())) == 1

    def restore(self, state):
        """Takes the numbers over."""
        self.numbers = state["torch_cpu"].clone()


def _optimizer(model, version):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    for parameter in model.parameters():
        optimizer.state[parameter] = {"momentum_buffer": torch.full_like(parameter, version)}
    return OptimizerWrapper(optimizer, model)


def _parts(models, optimizers, state):
    return TrainingParts(models=models, optimizers=optimizers, lr_schedulers={}, dataloaders={}, random_state=state)


def save_state(
    root,
    version,
    *,
    step=None,
    keep_last=None,
    names=("",),
    shard_size="1KB",
    storage=None,
    use_async=False,
    group=None,
):
    """Saves a whole training state of a version on all ranks that run, or on this process alone."""
    models = {name: SplitModel(version) for name in names}
    # An optimizer's slices are whole on every rank: all of them hold it, rank 0 writes.
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    optimizers = {name: _optimizer(ModelWrapper(Net(version), is_primary=is_first), version) for name in names}
    io = GeneralCheckpointIO(group, storage or UnsyncedStorage())
    io.save_training_state(
        root,
        _parts(models, optimizers, VersionedState(version)),
        extra={"version": version},
        facts={},
        options=SaveOptions(step=step, keep_last=keep_last, size_per_shard=shard_size),
        use_async=use_async,
    )
    io.wait()


def read_state(root, names=("",), group=None, storage=None):
    """Returns the name of the version of all that is there, "nothing", or what is wrong."""
    models = {name: ModelWrapper(Net(0)) for name in names}
    optimizers = {name: _optimizer(model, 0) for name, model in models.items()}
    state = VersionedState(0)
    io = GeneralCheckpointIO(group, storage or UnsyncedStorage())
    try:
        extra = io.load_training_state(root, _parts(models, optimizers, state))
    except CheckpointError as error:
        is_nothing = "does not exist" in str(error) or "holds no" in str(error)
        return "nothing" if is_nothing else f"error: {error}"
    found = {version_of(model) for model in models.values()}
    versions = {extra["version"], *state.numbers.tolist()}
    for name, optimizer in optimizers.items():
        for parameter in models[name].parameters():
            versions.update(optimizer.state[parameter]["momentum_buffer"].flatten().tolist())
    return found.pop() if len(found) == len(versions) == 1 else f"mixture: {found} {versions}"
