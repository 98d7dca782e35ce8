"""A language model, and what is estimated of its training beside what is allocated and sent in it."""

from __future__ import annotations

import torch
from allocations import Allocations
from torch import nn
from torch.nn import functional

from booster import Booster, FP16NaiveMixedPrecision, estimate_memory
from booster.comm import count_communication
from booster.device import current_device

TOKENS, BATCH, VOCABULARY, WIDTH, HEADS = 128, 4, 2000, 256, 4

PLAN = {
    "embedding": "vocab",
    "layers.*.query": "colwise",
    "layers.*.key": "colwise",
    "layers.*.value": "colwise",
    "layers.*.out": "rowwise",
    "layers.*.up": "colwise",
    "layers.*.down": "rowwise",
    "head": "vocab_head",
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads = HEADS
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        batch, tokens, _ = x.shape
        normed = self.attention_norm(x)
        query, key, value = (
            layer(normed).view(batch, tokens, -1, WIDTH // HEADS).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, -1))
        return x + self.down(functional.gelu(self.up(self.mlp_norm(x))))


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids):
        x = self.embedding(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def next_token_loss(logits, ids):
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def trained(make_plugin, *, make_model=LanguageModel, batch=BATCH, optimizer=torch.optim.AdamW, precision=None):
    """Returns what was estimated on this rank, and what was allocated and sent in the third step."""
    plugin = None if make_plugin is None else make_plugin()
    given = {"make_model": make_model, "batch": batch, "optimizer": optimizer, "precision": precision}
    estimate = estimated(plugin, **given)
    del plugin
    return estimate, measured(make_plugin, **given)


def estimated(plugin, *, make_model=LanguageModel, batch=BATCH, optimizer=torch.optim.AdamW, precision=None, **world):
    """Returns the estimate."""
    with torch.device("meta"):
        model, ids = make_model(), torch.empty(batch, TOKENS, dtype=torch.int64)
    return estimate_memory(
        model,
        plugin,
        batch=ids,
        optimizer=optimizer,
        criterion=next_token_loss,
        mixed_precision=precision,
        **world,
    )


def measured(
    make_plugin, *, make_model=LanguageModel, batch=BATCH, optimizer=torch.optim.AdamW, precision=None, stages=False
):
    """Returns what was allocated and sent in the third step."""
    ids = torch.randint(0, VOCABULARY, (batch, TOKENS)).to(current_device())
    with Allocations() as allocations:
        model = make_model()
        booster = Booster(plugin=None if make_plugin is None else make_plugin(), mixed_precision=precision)
        model, optimizer, *_ = booster.boost(model, optimizer([p for p in model.parameters() if p.requires_grad]))
        for step in range(3):
            with count_communication() as count:
                allocations.mark(f"start {step}")
                if stages:
                    booster.execute_pipeline(iter([ids]), model, next_token_loss, optimizer)
                else:
                    loss = next_token_loss(model(ids), ids)
                    booster.backward(loss, optimizer)
                    del loss
                allocations.mark(f"backward {step}")
                optimizer.step()
                optimizer.zero_grad()
                allocations.mark(f"end {step}")
    return {
        "kept": allocations.at("end 2"),
        "backward": allocations.peak("start 2", "backward 2"),
        "step": allocations.peak("backward 2", "end 2"),
        "sent": sum(count.sent.values()),
    }


def of_name(precision):
    # A scale that does not overflow: a skipped step would allocate no states.
    return FP16NaiveMixedPrecision(initial_scale=2**8) if precision == "fp16_naive" else precision


def check(estimate, measured, *, within=0.1):
    """Fails where what was estimated is not what was measured, but for a part of it."""
    memory = estimate.memory
    said = {"kept": memory.steady_state.total, "backward": memory.backward.total, "step": memory.step.total}
    assert estimate.total == max(said.values())
    said["sent"] = estimate.sent
    ratios = {name: said[name] / measured[name] for name in said if measured[name]}
    text = f"{estimate.plugin} { {name: round(ratio, 3) for name, ratio in ratios.items()} } of {measured}; {memory}"
    print(text)
    assert all(abs(ratio - 1) <= within for ratio in ratios.values()), text
    assert measured["sent"] or not estimate.sent, text
