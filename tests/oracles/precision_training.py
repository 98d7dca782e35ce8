"""Training in low precision written by hand with plain torch, on a small model and batches that overflow."""

from __future__ import annotations

import torch
from torch import nn

from booster.interface import ModelWrapper, OptimizerWrapper

STEPS = 10
OVERFLOW_STEPS = (2, 3, 7)


class Net(nn.Module):
    """Odd sizes, a batch norm, a tied weight, a frozen weight, several outputs."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.norm = nn.BatchNorm1d(7)
        self.middle = nn.Linear(7, 7)
        self.again = self.middle
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.last = nn.Linear(7, 3)

    def forward(self, batch, scale=1.0):
        hidden = self.norm(self.first(batch["x"]) * scale).relu()
        hidden = self.again(self.middle(hidden)) + self.frozen(hidden)
        return {"logits": self.last(hidden), "index": batch["index"]}


def make_net(seed=0):
    torch.manual_seed(seed)
    return Net()


def make_optimizer(model, cls=torch.optim.AdamW):
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return cls([{"params": trainable[:3], "lr": 0.02}, {"params": trainable[3:], "lr": 0.01}], weight_decay=0.1)


def batches():
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        x = torch.randn(6, 5, generator=generator)
        # 60000 is finite in float16, its products are not.
        yield (
            {"x": x * 60000 if step in OVERFLOW_STEPS else x, "index": torch.arange(6)},
            torch.randint(3, (6,), generator=generator),
        )


def boost(precision, model, optimizer=None, criterion=None):
    prepared = precision.prepare(model)
    boosted = ModelWrapper(model)
    wrapped = None if optimizer is None else OptimizerWrapper(optimizer, boosted)
    return precision.configure(boosted, wrapped, criterion, prepared)


def train_boosted(precision, *, clip=1.0, model=None):
    model = make_net() if model is None else model
    model, optimizer, criterion = boost(precision, model, make_optimizer(model), nn.CrossEntropyLoss())
    record = []
    for batch, target in batches():
        output = model(batch)
        loss = criterion(output["logits"], target)
        optimizer.backward(loss)
        norm = optimizer.clip_grad_by_norm(clip)
        optimizer.step()
        scale = None if optimizer.loss_scaler is None else optimizer.loss_scaler.scale
        record.append((loss.item(), norm.item(), scale, optimizer.step_was_skipped))
        optimizer.zero_grad()
    return model, optimizer, record


def assert_same_records(found, expected):
    assert len(found) == len(expected) == STEPS
    for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert repr(ours) == repr(theirs), f"step {step}"  # repr: nan equals nan


def assert_same_weights(model, reference):
    torch.testing.assert_close(dict(model.state_dict()), dict(reference.state_dict()), rtol=0, atol=0, equal_nan=True)


def train_autocast(dtype, **scaler_settings):
    """Plain torch: autocast and GradScaler, as the torch documentation writes it."""
    model = make_net()
    optimizer, criterion = make_optimizer(model), nn.CrossEntropyLoss()
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16, **scaler_settings)
    record = []
    for batch, target in batches():
        with torch.autocast("cpu", dtype):
            logits = model(batch)["logits"].float()
            loss = criterion(logits, target)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skipped = scaler.get_scale() < scale
        record.append((loss.item(), norm.item(), scaler.get_scale() if scaler.is_enabled() else None, skipped))
        optimizer.zero_grad()
    return model, optimizer, record


def assert_same_states(ours, theirs):
    ours, theirs = ours.state_dict()["state"], theirs.state_dict()["state"]
    assert ours.keys() == theirs.keys()
    for index, state in theirs.items():
        for name, value in state.items():
            assert torch.equal(ours[index][name], value), (index, name)


def cast_by_hand(model, keeps_norm):
    for module in model.modules():
        if keeps_norm and isinstance(module, nn.BatchNorm1d):
            continue
        for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            if tensor.is_floating_point():
                tensor.data = tensor.data.half()


def train_half_by_hand(scale, growth_interval, hysteresis, *, keeps_norm=False, clip=1.0):
    """float16 weights, a list of fp32 masters, a loss scale: with nothing but torch operations."""
    model = make_net()
    masters = {name: nn.Parameter(p.detach().clone(), p.requires_grad) for name, p in model.named_parameters()}
    cast_by_hand(model, keeps_norm)
    holder = nn.ParameterList(masters.values())
    optimizer, criterion = make_optimizer(holder), nn.CrossEntropyLoss()
    clean = overflows = 0
    record = []
    for batch, target in batches():
        loss = criterion(model({"x": batch["x"].half(), "index": batch["index"]})["logits"].float(), target)
        (loss * scale).backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                masters[name].grad = parameter.grad.float() * (1.0 / scale)
        grads = [master.grad for master in masters.values() if master.grad is not None]
        is_finite = all(bool(torch.isfinite(grad).all()) for grad in grads)
        norm = torch.stack([torch.linalg.vector_norm(grad) for grad in grads]).norm()
        if is_finite:
            nn.utils.clip_grad_norm_(holder, clip)
            optimizer.step()
            for name, parameter in model.named_parameters():
                parameter.data.copy_(masters[name].data)
            clean += 1
            if clean == growth_interval:
                scale, clean, overflows = scale * 2, 0, 0
        else:
            clean, overflows = 0, overflows + 1
            scale = scale / 2 if overflows >= hysteresis else scale
        record.append((loss.item(), norm.item(), scale, not is_finite))
        optimizer.zero_grad()
        model.zero_grad()
    return model, masters, record
