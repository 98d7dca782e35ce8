"""ColossalAI's engine trains as one process does, with what its configuration asks for."""

from __future__ import annotations

import pytest
import torch
from harness import distributed
from oracles.joined_slices import joined_over_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import booster
from booster.comm import group_rank
from booster.device import current_device
from booster.errors import ConfigError
from booster.trainer import gradient_handlers

pytestmark = pytest.mark.on_device
TENSOR = {"parallel": {"tensor": {"size": 2, "mode": "1d"}}}
PIPELINE = {"parallel": {"pipeline": 2}, "NUM_MICRO_BATCHES": 2}
CONFIGS = {"ddp": {}, "zero 1": {"zero": {"level": 1}}, "zero 2": {"zero": {"level": 2}}, "tp": TENSOR, "pp": PIPELINE}


def make_model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def make_loader(num_samples=32):
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(num_samples, 6, generator=generator)
    return DataLoader(TensorDataset(inputs, inputs[:, :3].argmax(1)), batch_size=4)


class Reference:
    """One process on the batches of all data-parallel ranks."""

    def __init__(self, accumulation, max_norm):
        self.model = make_model().to(current_device())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.accumulation, self.max_norm, self.num_batches = accumulation, max_norm, 0

    def train(self, inputs, labels):
        loss = nn.functional.cross_entropy(self.model(inputs), labels)
        (loss / self.accumulation).backward()
        self.num_batches += 1
        if self.num_batches % self.accumulation == 0:
            if self.max_norm:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss.detach()


def start(config):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1000)
    return booster.initialize(
        model, optimizer, nn.CrossEntropyLoss(), make_loader(), make_loader(8), scheduler, config=config
    )


def assert_equal(engine, reference):
    expected = {name: one.cpu() for name, one in reference.model.state_dict().items()}
    torch.testing.assert_close(joined_over_ranks(engine.model), expected, rtol=1e-5, atol=1e-6)


@distributed(world_size=2)
@pytest.mark.parametrize("features", [{}, {"gradient_accumulation": 2, "clip_grad_norm": 0.1}])
@pytest.mark.parametrize("name", ["ddp", "zero 1", "zero 2", "tp"])
def test_the_loop_of_the_documents(name, features):
    engine, train_loader, test_loader, scheduler = start(CONFIGS[name] | features)
    reference = Reference(features.get("gradient_accumulation", 1), features.get("clip_grad_norm"))
    gather = engine.booster.gather_for_metrics
    engine.train()
    for batch in train_loader:
        inputs, labels = (one.to(current_device()) for one in batch)
        engine.zero_grad()
        loss = engine.criterion(engine(inputs), labels)
        engine.backward(loss)
        if engine.step():
            scheduler.step()
        expected = reference.train(*gather((inputs, labels)))
        torch.testing.assert_close(gather(loss.detach().reshape(1)).mean(), expected, rtol=1e-5, atol=1e-6)
    assert reference.num_batches > 3
    assert scheduler.last_epoch == reference.num_batches // reference.accumulation
    assert_equal(engine, reference)
    engine.eval()
    with torch.no_grad():
        found = [gather((engine(inputs.to(current_device())).argmax(1), labels)) for inputs, labels in test_loader]
        plain = [reference.model(inputs.to(current_device())).argmax(1) for inputs, _ in make_loader(8)]
    assert sum(len(labels) for _, labels in found) == 8
    assert sorted(torch.cat([one for one, _ in found])) == sorted(torch.cat(plain))


@distributed(world_size=2)
@pytest.mark.parametrize("features", [{}, {"gradient_accumulation": 2, "clip_grad_norm": 0.1}])
@pytest.mark.parametrize("name", ["ddp", "tp", "pp"])
def test_the_schedule_of_the_documents(name, features):
    engine, train_loader, test_loader, _ = start(CONFIGS[name] | features)
    reference = Reference(features.get("gradient_accumulation", 1), features.get("clip_grad_norm"))
    gather = engine.booster.gather_for_metrics
    batches, data_iter = list(train_loader), iter(train_loader)
    assert len(batches) in (4, 8)
    engine.train()
    for inputs, expected_labels in batches:
        engine.zero_grad()
        outputs, labels, loss = engine.execute_schedule(data_iter)
        engine.step()
        expected = reference.train(*(one.to(current_device()) for one in gather((inputs, expected_labels))))
        assert torch.equal(labels, expected_labels)
        assert (outputs is None) == (name == "pp" and group_rank() == 0)
        torch.testing.assert_close(gather(loss.reshape(1)).mean(), expected, rtol=1e-5, atol=1e-6)
    assert_equal(engine, reference)
    with pytest.raises(StopIteration):
        engine.execute_schedule(data_iter)
    engine.eval()
    before = joined_over_ranks(engine.model)
    outputs, labels, loss = engine.execute_schedule(
        iter(test_loader), forward_only=True, return_loss=False, return_output_label=False
    )
    assert outputs is labels is loss is None
    assert all(torch.equal(one, before[key]) for key, one in joined_over_ranks(engine.model).items())


class KeywordModel(nn.Module):
    """Takes a dict of arguments, as the documents' GPT does."""

    def __init__(self):
        super().__init__()
        self.layers = make_model()

    def forward(self, values, scale):
        return self.layers(values * scale)


class KeywordDataset(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        values = torch.randn(6, generator=torch.Generator().manual_seed(index))
        return {"values": values, "scale": torch.tensor([2.0])}, index % 3


@distributed(world_size=2)
def test_data_that_is_a_dict_of_arguments(tmp_path):
    path = tmp_path / f"config_{group_rank()}.py"
    path.write_text("BATCH_SIZE = 4\nparallel = dict(pipeline=2)\nNUM_MICRO_BATCHES = 2\n")
    model = KeywordModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(KeywordDataset(), batch_size=4)
    engine, loader, *_ = booster.initialize(model, optimizer, nn.CrossEntropyLoss(), loader, config=path)
    _, labels, loss = engine.execute_schedule(iter(loader))
    data, expected_labels = next(iter(DataLoader(KeywordDataset(), batch_size=4)))
    assert torch.equal(labels, expected_labels)
    torch.testing.assert_close(loss.cpu(), nn.functional.cross_entropy(KeywordModel()(**data), labels).detach())


@distributed(world_size=2)
def test_fp16_of_both_kinds_trains():
    for config in ({"fp16": {"mode": "torch", "init_scale": 2.0**8}}, {"fp16": {"mode": "naive"}} | TENSOR):
        engine, loader, *_ = start(config)
        losses = []
        for batch in loader:
            inputs, labels = (one.to(current_device()) for one in batch)
            engine.zero_grad()
            loss = engine.criterion(engine(inputs), labels)
            engine.backward(loss)
            engine.step()
            losses.append(float(loss))
        assert torch.isfinite(torch.tensor(losses)).all()
        assert engine.optimizer.loss_scaler is not None


@distributed(world_size=2)
def test_a_mistake_of_one_rank_is_raised_on_both():
    config = {"gradient_accumulation": 0} if group_rank() == 0 else {}
    with pytest.raises((ConfigError, booster.BoosterError), match="gradient_accumulation=0"):
        start(config)
    config = {"gradient_accumulation": 2 + group_rank()}
    with pytest.raises(booster.DesyncError, match="gradient_accumulation"):
        start(config)


@distributed(world_size=2, fresh=True)
def test_the_config_of_the_launch_is_the_default():
    config = {"clip_grad_norm": 0.0, "gradient_accumulation": 3, "LR": 0.1}
    rank = group_rank()
    booster.launch(rank, 2, "localhost", 29500, local_rank=rank, config=config, verbose=False)  # takes the group over
    engine, loader, *_ = start(None)
    batches = [[one.to(current_device()) for one in batch] for batch in loader]
    steps = []
    for inputs, labels in batches[:3]:
        engine.backward(engine.criterion(engine(inputs), labels))
        steps.append(engine.step())
    assert steps == [False, False, True]
    assert booster.get_config().LR == 0.1


@distributed(world_size=2)
def test_a_batch_without_labels_is_refused():
    engine, loader, *_ = start({})
    with pytest.raises(ConfigError, match=r"takes \(data, labels\)"):
        engine.execute_schedule(iter([torch.ones(4, 6)]))
    with pytest.raises(ConfigError, match="iter"):
        engine.execute_schedule(loader)


class Recorder(booster.GradientHandler):
    """Counts, and doubles the gradients."""

    def __init__(self, *objects, factor):
        super().__init__(*objects)
        self.factor = factor

    def handle_gradient(self):
        for _, gradient in self.named_gradients():
            gradient.mul_(self.factor)


@distributed(world_size=2)
@pytest.mark.parametrize("name", ["ddp", "zero 2"])
def test_gradient_handlers_of_the_configuration(name):
    booster.register_gradient_handler(Recorder)
    try:
        handlers = [{"type": "DataParallelGradientHandler"}, {"type": "Recorder", "factor": 2.0}]
        models = []
        for features, lr in (({"gradient_handler": handlers}, 0.1), ({}, 0.2)):
            model = make_model()
            optimizer = torch.optim.SGD(model.parameters(), lr=lr)
            engine, loader, *_ = booster.initialize(
                model, optimizer, nn.CrossEntropyLoss(), make_loader(), config=CONFIGS[name] | features
            )
            for batch in loader:
                inputs, labels = (one.to(current_device()) for one in batch)
                engine.zero_grad()
                engine.backward(engine.criterion(engine(inputs), labels))
                engine.step()
            models.append(joined_over_ranks(engine.model))
    finally:
        del gradient_handlers._registered["Recorder"]
    torch.testing.assert_close(*models)
