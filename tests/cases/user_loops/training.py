"""Loops around one model: unfreezing, recurrence, losses of several ranks, ties, evaluations, and early stops."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

from booster.optim import Muon

from .one_process import Outcome, adamw, evaluate, fit, noise, part, seeded, sgd, update

BATCH, WIDTH = 8, 6


class Net(nn.Module):
    """A body and a head, and a loss that goes around the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.body(x))

    def compute_loss(self, batch):
        return (self.head(self.body(batch["x"])) - batch["y"]).square().mean()


def make_stack() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


def squares(outputs, inputs):
    return (outputs - inputs.sum(dim=1, keepdim=True)).square().mean()


def distillation(booster):
    """The teacher is boosted alone, and does not train."""
    teacher, student = seeded(make_stack).requires_grad_(False), seeded(make_stack, 1)
    student, optimizer, *_ = booster.boost(student, adamw(student.parameters()))
    teacher, *_ = booster.boost(teacher)
    teacher.eval()
    losses = []
    for step in range(4):
        inputs = part(booster, noise(step, BATCH, WIDTH))
        with torch.no_grad():
            soft = F.softmax(teacher(inputs) / 2, dim=-1)
        loss = 4 * F.kl_div(F.log_softmax(student(inputs) / 2, dim=-1), soft, reduction="batchmean")
        booster.backward(loss, optimizer)
        update(optimizer)
        losses.append(float(loss.detach()))
    return Outcome(losses, {"student": student, "teacher": teacher})


def distillation_from_a_plain_teacher(booster):
    """Every rank has the whole teacher."""
    teacher, student = seeded(make_stack).requires_grad_(False).to(booster.device), seeded(make_stack, 1)
    student, optimizer, *_ = booster.boost(student, adamw(student.parameters()))

    def criterion(outputs, inputs):
        soft = F.softmax(teacher(inputs) / 2, dim=-1)
        return 4 * F.kl_div(F.log_softmax(outputs / 2, dim=-1), soft, reduction="batchmean")

    losses = []
    for step in range(4):
        losses.append(fit(booster, student, optimizer, part(booster, noise(step, BATCH, WIDTH)), criterion))
        update(optimizer)
    return Outcome(losses, {"student": student})


def gradual_unfreezing(booster):
    """All parameters are in the optimizer's groups; layers are unfrozen from the last one on."""
    model = seeded(make_stack)
    layers = [model[0], model[2], model[4]]
    optimizer = torch.optim.AdamW([{"params": one.parameters(), "lr": 0.01} for one in layers], eps=1e-3)
    for one in layers[:-1]:
        one.requires_grad_(False)
    model, optimizer, *_ = booster.boost(model, optimizer)
    losses = []
    for step in range(6):
        if step in (2, 4):
            for one in list(booster.unwrap_model(model).children())[-step - 1 :]:
                one.requires_grad_(True)
        losses.append(fit(booster, model, optimizer, part(booster, noise(step, BATCH, WIDTH)), squares))
        booster.clip_grad_norm_(optimizer, 0.5)
        update(optimizer)
    return Outcome(losses, {"model": model})


def matrices_by_muon(booster):
    """Muon for the hidden matrices and AdamW for the rest, in one optimizer, of which the settings change."""
    model = seeded(make_stack)
    hidden = [model[0].weight, model[2].weight]
    others = [model[0].bias, model[2].bias, *model[4].parameters()]
    groups = [{"params": hidden, "lr": 0.02}, {"params": others, "lr": 0.005, "use_muon": False}]
    optimizer = Muon(groups, adam_eps=1e-3, ns_dtype="float32")
    model, optimizer, *_ = booster.boost(model, optimizer)
    losses = []
    for step in range(4):
        losses.append(fit(booster, model, optimizer, part(booster, noise(step, BATCH, WIDTH)), squares))
        booster.clip_grad_norm_(optimizer, 0.5)
        update(optimizer)
        optimizer.param_groups[0]["lr"] *= 1.5
        optimizer.param_groups[0]["ns_steps"] = 4 if step == 2 else 5
    return Outcome(losses, {"model": model})


def unfreezing_by_new_groups(booster):
    """fastai and Lightning: unfrozen layers are added to the optimizer."""
    model = seeded(make_stack)
    model[0].requires_grad_(False)
    model, optimizer, *_ = booster.boost(model, adamw([*model[2].parameters(), *model[4].parameters()]))
    losses = []
    for step in range(4):
        if step == 2:
            first = booster.unwrap_model(model)[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(first.parameters()), "lr": 0.005})
        losses.append(fit(booster, model, optimizer, part(booster, noise(step, BATCH, WIDTH)), squares))
        booster.clip_grad_norm_(optimizer, 0.5)
        update(optimizer)
    return Outcome(losses, {"model": model})


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(WIDTH, 12, batch_first=True)
        self.head = nn.Linear(12, 3)

    def forward(self, x, state=None):
        hidden, state = self.rnn(x, state)
        return self.head(hidden), state


def truncated_backpropagation(booster):
    """Long sequences in windows: the state is handed on without its graph."""
    model = seeded(Recurrent)
    model, optimizer, *_ = booster.boost(model, adamw(model.parameters()))
    losses = []
    for sequence in range(2):
        inputs, state = part(booster, noise(sequence, BATCH, 12, WIDTH)), None
        for window in inputs.split(4, dim=1):
            outputs, state = model(window, state)
            state = tuple(one.detach() for one in state)
            loss = (outputs - window[..., :3]).square().mean()
            booster.backward(loss, optimizer)
            booster.clip_grad_norm_(optimizer, 0.5)
            update(optimizer)
            losses.append(float(loss.detach()))
    return Outcome(losses, {"model": model})


def recurrence_by_hand(booster):
    """One cell is called in every time step, and windows of two are accumulated."""
    cell = seeded(lambda: nn.GRUCell(WIDTH, 12))
    cell, optimizer, *_ = booster.boost(cell, adamw(cell.parameters()))
    losses = []
    for sequence in range(3):
        inputs, hidden = part(booster, noise(sequence, BATCH, 6, WIDTH)), None
        for start in (0, 3):
            total = 0.0
            for time in range(start, start + 3):
                hidden = cell(inputs[:, time], hidden)
                total = total + (hidden - 0.5).square().mean()
            booster.backward(total / 3, optimizer)
            hidden = hidden.detach()
            losses.append(float(total.detach()) / 3)
        update(optimizer)
    return Outcome(losses, {"cell": cell})


class Gather(torch.autograd.Function):
    """The all-gather that contrastive scripts bring along, such as open_clip's relatives."""

    @staticmethod
    def forward(ctx, tensor, group):
        ctx.group = group
        size = torch.distributed.get_world_size(group)
        found = [torch.empty_like(tensor) for _ in range(size)]
        torch.distributed.all_gather(found, tensor.contiguous(), group=group)
        return torch.cat(found)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        torch.distributed.all_reduce(grad, group=ctx.group)
        size, rank = torch.distributed.get_world_size(ctx.group), torch.distributed.get_rank(ctx.group)
        return grad.chunk(size)[rank], None


def gathered_by_function(features, group):
    return Gather.apply(features, group)


def gathered_by_torch(features, group):
    return torch.cat(torch.distributed.nn.functional.all_gather(features, group=group))


def _contrastive(booster, all_gather):
    images, texts = seeded(make_stack), seeded(make_stack, 1)
    images, i_optimizer, *_ = booster.boost(images, adamw(images.parameters()))
    texts, t_optimizer, *_ = booster.boost(texts, adamw(texts.parameters()))
    losses = []
    for step in range(4):
        one = F.normalize(images(part(booster, noise(step, BATCH, WIDTH))), dim=-1)
        other = F.normalize(texts(part(booster, noise(100 + step, BATCH, WIDTH))), dim=-1)
        ones, others, start = one, other, 0
        if booster.plugin.dp_size > 1:
            ones, others = (all_gather(features, booster.plugin.dp_group) for features in (one, other))
            start = booster.plugin.dp_rank * len(one)
        labels = start + torch.arange(len(one), device=one.device)
        loss = (F.cross_entropy(5 * one @ others.T, labels) + F.cross_entropy(5 * other @ ones.T, labels)) / 2
        booster.backward(loss, i_optimizer)
        update(i_optimizer, t_optimizer)
        losses.append(float(loss.detach()))
    return Outcome(losses, {"images": images, "texts": texts})


def contrastive(booster):
    return _contrastive(booster, gathered_by_torch)


def contrastive_by_function(booster):
    return _contrastive(booster, gathered_by_function)


class Tied(nn.Module):
    """An embedding and a head of the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(12, 8), nn.Linear(8, 12, bias=False)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(2)])

    def forward(self, tokens):
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)

    def tie_weights(self):
        self.head.weight = self.embed.weight


def _tied(booster, tie):
    model = seeded(Tied)
    model, optimizer, *_ = booster.boost(model, adamw(model.parameters()))
    tie(model)

    def criterion(outputs, tokens):
        return F.cross_entropy(outputs[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    losses = []
    for step in range(4):
        tokens = torch.randint(0, 12, (BATCH, 5), generator=torch.Generator().manual_seed(step))
        tokens = part(booster, tokens.to(booster.device))
        losses.append(fit(booster, model, optimizer, tokens, criterion))
        update(optimizer)
    return Outcome(losses, {"model": model})


def tying_after_boost(booster):
    def tie(model):
        model.head.weight = model.embed.weight

    return _tied(booster, tie)


def tying_by_a_method_after_boost(booster):
    return _tied(booster, lambda model: model.tie_weights())


def make_normalized() -> nn.Module:
    """The layers behind the batch norm are a pair that tensor parallelism divides."""
    norm = nn.BatchNorm1d(16)
    return nn.Sequential(nn.Linear(WIDTH, 16), norm, nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


def evaluation_in_between(booster):
    """The loss of a validation batch after every step, with the statistics of a batch norm."""
    model = seeded(make_normalized)
    model, optimizer, *_ = booster.boost(model, adamw(model.parameters()))
    losses = []
    for step in range(4):
        losses.append(fit(booster, model, optimizer, part(booster, noise(step, BATCH, WIDTH)), squares))
        update(optimizer)
        losses.append(evaluate(booster, model, part(booster, noise(50, BATCH, WIDTH)), squares))
    return Outcome(losses, {"model": model})


def metrics_in_between(booster):
    """The predictions of all ranks, in evaluation mode, after every step."""
    model = seeded(make_normalized)
    model, optimizer, *_ = booster.boost(model, adamw(model.parameters()))
    losses, predictions = [], []
    for step in range(4):
        model.train()
        inputs = part(booster, noise(step, BATCH, WIDTH))
        loss = squares(model(inputs), inputs)
        booster.backward(loss, optimizer)
        update(optimizer)
        losses.append(float(loss.detach()))
        model.eval()
        with torch.no_grad():
            inputs = part(booster, noise(100 + step, BATCH, WIDTH))
            predictions.append(booster.gather_for_metrics(model(inputs).argmax(dim=-1)))
    return Outcome(losses, {"model": model}, {"predictions": torch.stack(predictions)})


def early_stop(booster):
    """Stops when the mean loss of the validation batch has grown; goes back to the best weights."""
    model = seeded(make_stack)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.05))
    losses, best, best_state = [], float("inf"), None
    for step in range(30):
        losses.append(fit(booster, model, optimizer, part(booster, noise(step % 3, BATCH, WIDTH)), squares))
        update(optimizer)
        found = evaluate(booster, model, part(booster, noise(50, BATCH, WIDTH)), squares)
        found = float(booster.gather_for_metrics(torch.tensor([found], device=booster.device)).mean())
        losses.append(found)
        if found >= best:
            break
        best, best_state = found, copy.deepcopy(model.state_dict())
    assert 2 < step < 29
    model.load_state_dict(best_state)
    return Outcome(losses, {"model": model}, {"steps": torch.tensor(step)})


def loss_by_another_method(booster):
    model = seeded(Net)
    model, optimizer, *_ = booster.boost(model, adamw(model.parameters()))
    losses = []
    for step in range(4):
        batch = {"x": part(booster, noise(step, BATCH, WIDTH)), "y": part(booster, noise(100 + step, BATCH, 3))}
        loss = model.compute_loss(batch)
        booster.backward(loss, optimizer)
        update(optimizer)
        losses.append(float(loss.detach()))
    return Outcome(losses, {"model": model})


def loss_by_submodules(booster):
    """Features are taken from a part of the model, which is called by itself."""
    model = seeded(Net)
    model, optimizer, *_ = booster.boost(model, adamw(model.parameters()))
    losses = []
    for step in range(4):
        inputs = part(booster, noise(step, BATCH, WIDTH))
        features = model.body(inputs)
        loss = squares(model.head(features), inputs) + 0.1 * features.square().mean()
        booster.backward(loss, optimizer)
        update(optimizer)
        losses.append(float(loss.detach()))
    return Outcome(losses, {"model": model})


def features_by_hooks(booster):
    """A forward hook of the user's keeps what a layer gives."""
    model = seeded(Net)
    model, optimizer, *_ = booster.boost(model, adamw(model.parameters()))
    kept = {}
    booster.unwrap_model(model).body.register_forward_hook(lambda *args: kept.update(features=args[-1]))
    losses = []
    for step in range(4):
        inputs = part(booster, noise(step, BATCH, WIDTH))
        loss = squares(model(inputs), inputs) + 0.1 * kept["features"].square().mean()
        booster.backward(loss, optimizer)
        update(optimizer)
        losses.append(float(loss.detach()))
    return Outcome(losses, {"model": model})


def boosted_alone(booster):
    """A model without an optimizer, for inference, under `inference_mode`."""
    model = seeded(Net).eval()
    model, *_ = booster.boost(model)
    with torch.inference_mode():
        outputs = torch.stack([model(noise(step, BATCH, WIDTH)) for step in range(3)])
    return Outcome([], {"model": model}, {"outputs": outputs.clone()})


def evaluated_alone(booster):
    """A model without an optimizer gives the losses of batches, also in stages."""
    model = seeded(make_normalized)
    model, *_ = booster.boost(model)
    batches = [part(booster, noise(step, BATCH, WIDTH)) for step in range(3)]
    return Outcome([evaluate(booster, model, one, squares) for one in batches], {"model": model})


def l2_penalty(booster):
    """A penalty of the weights, written into the loss."""
    model = seeded(Net)
    model, optimizer, *_ = booster.boost(model, sgd(model.parameters()))
    losses = []
    for step in range(4):
        inputs = part(booster, noise(step, BATCH, WIDTH))
        loss = squares(model(inputs), inputs) + 0.01 * sum(one.square().sum() for one in model.parameters())
        booster.backward(loss, optimizer)
        update(optimizer)
        losses.append(float(loss.detach()))
    return Outcome(losses, {"model": model})


def frozen_reference(booster):
    """The weights are frozen for a reference forward behind the one that is trained, as peft's `disable_adapter`."""
    model = seeded(Net)
    model, optimizer, *_ = booster.boost(model, adamw(model.parameters()))
    weights = list(booster.unwrap_model(model).parameters())
    losses = []
    for step in range(4):
        inputs = part(booster, noise(step, BATCH, WIDTH))
        outputs = model(inputs)
        for one in weights[: len(weights) if step % 2 else 1]:
            one.requires_grad_(False)
        with torch.no_grad():
            reference = model(inputs)
        for one in weights:
            one.requires_grad_(True)
        loss = squares(outputs, inputs) + (outputs - reference - 1).square().mean()
        booster.backward(loss, optimizer)
        booster.clip_grad_norm_(optimizer, 0.5)
        update(optimizer)
        losses.append(float(loss.detach()))
    return Outcome(losses, {"model": model})


def frozen_before_backward(booster):
    """A weight is frozen between forward and backward: it has no gradient, and doesn't decay."""
    model = seeded(Net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    model, optimizer, *_ = booster.boost(model, optimizer)
    weight = next(booster.unwrap_model(model).parameters())
    losses = []
    for step in range(4):
        inputs = part(booster, noise(step, BATCH, WIDTH))
        loss = squares(model(inputs), inputs)
        weight.requires_grad_(step % 2 == 0)
        booster.backward(loss, optimizer)
        booster.clip_grad_norm_(optimizer, 0.5)
        update(optimizer)
        weight.requires_grad_(True)
        losses.append(float(loss.detach()))
    return Outcome(losses, {"model": model})


def logged_weights(booster):
    """Norms, sums and extremes of the weights are logged between steps, also in inference mode."""
    model = seeded(Net)
    model, optimizer, *_ = booster.boost(model, sgd(model.parameters()))
    losses, logged = [], []
    for step in range(4):
        losses.append(fit(booster, model, optimizer, part(booster, noise(step, BATCH, WIDTH)), squares))
        update(optimizer)
        with torch.inference_mode() if step % 2 else torch.no_grad():
            for one in booster.unwrap_model(model).parameters():
                logged += [one.norm().item(), one.sum().item(), one.mean().item(), float(one.abs().max())]
                logged += [(one * one).sum().item(), one.detach().norm().item()]
    return Outcome(losses, {"model": model}, {"logged": torch.tensor(logged)})
