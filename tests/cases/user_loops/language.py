"""Loops of language models: preferences with a reference model, generation, distillation."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

from booster.device import current_device

from .one_process import Outcome, adamw, fit, part, seeded, update

BATCH, LENGTH, VOCABULARY = 4, 12, 50
GREEDY = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "use_cache": False}


def make_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=56,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        use_cache=False,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


def make_gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=32,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=1,
        eos_token_id=None,
    )
    return GPT2LMHeadModel(config)


def tokens(step: int, batch: int = BATCH, length: int = LENGTH) -> torch.Tensor:
    tokens = torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(step))
    return tokens.to(current_device())


def log_probabilities(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the log-probability of each sequence."""
    return logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1).sum(-1)


def dpo(booster):
    """Rafailov et al., 2023: chosen before rejected, in one batch; the reference is boosted alone."""
    model = seeded(make_gpt2)
    reference = copy.deepcopy(model).requires_grad_(False).eval()
    model, optimizer, *_ = booster.boost(model, adamw(model.parameters()))
    reference, *_ = booster.boost(reference)
    losses = []
    for step in range(3):
        ids = torch.cat([part(booster, tokens(step)), part(booster, tokens(100 + step))])
        with torch.no_grad():
            of_reference = log_probabilities(reference(input_ids=ids).logits, ids)
        chosen, rejected = (log_probabilities(model(input_ids=ids).logits, ids) - of_reference).chunk(2)
        loss = -F.logsigmoid(0.1 * (chosen - rejected)).mean()
        booster.backward(loss, optimizer)
        booster.clip_grad_norm_(optimizer, 1.0)
        update(optimizer)
        losses.append(float(loss.detach()))
    return Outcome(losses, {"model": model})


def dpo_with_two_forwards(booster):
    """As many write it: chosen and rejected in forwards of their own, and the reference is not boosted."""
    model = seeded(make_llama)
    reference = copy.deepcopy(model).requires_grad_(False).eval().to(booster.device)
    model, optimizer, *_ = booster.boost(model, adamw(model.parameters()))
    losses = []
    for step in range(3):
        gains = []
        for ids in (part(booster, tokens(step)), part(booster, tokens(100 + step))):
            with torch.no_grad():
                of_reference = log_probabilities(reference(input_ids=ids).logits, ids)
            gains.append(log_probabilities(model(input_ids=ids).logits, ids) - of_reference)
        loss = -F.logsigmoid(0.1 * (gains[0] - gains[1])).mean()
        booster.backward(loss, optimizer)
        update(optimizer)
        losses.append(float(loss.detach()))
    return Outcome(losses, {"model": model})


def dpo_of_pairs(booster):
    """A pair is two samples that follow each other, so that microbatches hold whole pairs."""
    model = seeded(make_gpt2)
    reference = copy.deepcopy(model).requires_grad_(False).eval().to(booster.device)
    model, optimizer, *_ = booster.boost(model, adamw(model.parameters()))

    def criterion(outputs, batch):
        ids = batch["input_ids"]
        with torch.no_grad():
            of_reference = log_probabilities(reference(input_ids=ids).logits, ids)
        gains = log_probabilities(outputs.logits, ids) - of_reference
        return -F.logsigmoid(0.1 * (gains[::2] - gains[1::2])).mean()

    losses = []
    for step in range(3):
        batch = {"input_ids": part(booster, tokens(step, 2 * BATCH))}
        losses.append(fit(booster, model, optimizer, batch, criterion))
        update(optimizer)
    return Outcome(losses, {"model": model})


def generation_in_between(booster):
    """Samples of the boosted model are looked at after every step."""
    model = seeded(make_llama)
    model, optimizer, *_ = booster.boost(model, adamw(model.parameters()))
    losses, found = [], []
    for step in range(3):
        model.train()
        ids = part(booster, tokens(step))
        loss = model(input_ids=ids, labels=ids).loss
        booster.backward(loss, optimizer)
        update(optimizer)
        losses.append(float(loss.detach()))
        model.eval()
        with torch.no_grad():
            found.append(model.generate(tokens(0, 2, 4), **GREEDY))
    return Outcome(losses, {"model": model}, {"tokens": torch.stack(found)})


def learning_from_samples(booster):
    """Policy gradient: each step learns from what the model has just generated, weighted by a reward."""
    model = seeded(make_gpt2)
    model, optimizer, *_ = booster.boost(model, adamw(model.parameters()))
    losses, found = [], []
    for step in range(3):
        model.eval()
        with torch.no_grad():
            ids = model.generate(part(booster, tokens(step, BATCH, 4)), **GREEDY)
        model.train()
        reward = (ids % 7).float().mean(dim=-1) - 3
        loss = -(reward * log_probabilities(model(input_ids=ids).logits, ids)).mean() / 10
        booster.backward(loss, optimizer)
        update(optimizer)
        losses.append(float(loss.detach()))
        found.append(booster.gather_for_metrics(ids))
    return Outcome(losses, {"model": model}, {"tokens": torch.stack(found)})


def _generation(booster, **options):
    model = seeded(make_llama).eval()
    model, *_ = booster.boost(model)
    found = [model.generate(tokens(step, 2, 4), **GREEDY | options) for step in range(2)]
    return Outcome([], {"model": model}, {"tokens": torch.stack(found)})


def generation_alone(booster):
    """A model that is boosted without an optimizer generates."""
    return _generation(booster)


def generation_with_a_cache(booster):
    """The same, with keys and values of earlier tokens."""
    return _generation(booster, use_cache=True)


def distillation_of_a_language_model(booster):
    """The logits of a frozen teacher, boosted alone, beside the labels."""
    teacher, student = seeded(make_gpt2).requires_grad_(False).eval(), seeded(make_llama)
    teacher, *_ = booster.boost(teacher)
    student, optimizer, *_ = booster.boost(student, adamw(student.parameters()))
    losses = []
    for step in range(3):
        ids = part(booster, tokens(step))
        with torch.no_grad():
            soft = teacher(input_ids=ids).logits.softmax(-1)
        outputs = student(input_ids=ids, labels=ids)
        loss = outputs.loss + F.cross_entropy(outputs.logits.flatten(0, 1), soft.flatten(0, 1))
        booster.backward(loss, optimizer)
        update(optimizer)
        losses.append(float(loss.detach()))
    return Outcome(losses, {"student": student})
