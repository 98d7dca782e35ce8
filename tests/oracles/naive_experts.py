"""Dispatch of tokens to experts, one assignment at a time."""

from __future__ import annotations

import torch


def naive_experts(networks, hidden_states, top_k_index, top_k_weights):
    """Returns the weighted sums of what `networks` make of each token; the number of networks stands for a drop."""
    rows = []
    for states, index, weights in zip(hidden_states, top_k_index.tolist(), top_k_weights, strict=True):
        outputs = [
            weight * networks[expert](states[None])[0]
            for expert, weight in zip(index, weights, strict=True)
            if expert < len(networks)
        ]
        rows.append(sum(outputs, torch.zeros_like(states)))
    return torch.stack(rows) if rows else torch.zeros_like(hidden_states)


def naive_routing(probabilities, top_k, capacity, token_order):
    """Returns index and unnormalized weights of each token's experts, filling experts choice by choice in an order."""
    num_experts = probabilities.shape[1]
    index = probabilities.argsort(dim=1, descending=True)[:, :top_k].clone()
    weights = probabilities.gather(1, index)
    load = [0] * num_experts
    for choice in range(top_k):
        for token in token_order:
            expert = int(index[token, choice])
            if load[expert] >= capacity:
                index[token, choice], weights[token, choice] = num_experts, 0
            load[expert] += 1
    return index, weights
