"""The papers' updates in float64, one whole parameter after another, written out in plain torch."""

from __future__ import annotations

import math

import torch


class ReferenceOptimizer:
    """Keeps float64 copies of weights, and updates them by `update(weights, gradient, state)`.

    Args:
        weights: The parameters to start from.
        **settings: Hyperparameters.
    """

    def __init__(self, weights, **settings):
        self.weights = [one.detach().double().clone() for one in weights]
        self.states = [{"t": 0} for _ in self.weights]
        self.settings = settings

    def step(self, gradients):
        gradients = [None if one is None else one.detach().double() for one in gradients]
        for number, gradient in enumerate(self.prepared(gradients)):
            if gradient is not None:
                self.states[number]["t"] += 1
                self.weights[number] = self.update(self.weights[number], gradient, self.states[number], **self.settings)

    def prepared(self, gradients):
        return gradients


def moment(state, key, value, beta):
    state[key] = beta * state.get(key, torch.zeros_like(value)) + (1 - beta) * value
    return state[key]


def norm(x):
    return math.sqrt(float((x * x).sum()))


def rms(x):
    return math.sqrt(float((x * x).mean()))


class ReferenceLamb(ReferenceOptimizer):
    """Algorithm 2 of You et al., ICLR 2020."""

    def update(self, x, g, state, lr, betas, eps, weight_decay, adam=False):
        m = moment(state, "m", g, betas[0]) / (1 - betas[0] ** state["t"])
        v = moment(state, "v", g * g, betas[1]) / (1 - betas[1] ** state["t"])
        r = m / (v.sqrt() + eps) + weight_decay * x
        ratio = norm(x) / norm(r) if norm(x) > 0 and norm(r) > 0 and not adam else 1.0
        return x - lr * ratio * r


class ReferenceLars(ReferenceOptimizer):
    """Algorithm 1 of You, Gitman and Ginsburg, 2017."""

    def update(self, w, g, state, lr, momentum, eeta, weight_decay, eps):
        is_usual = norm(w) > 0 and norm(g) > 0
        local = eeta * norm(w) / (norm(g) + weight_decay * norm(w) + eps) if is_usual else 1.0
        state["v"] = momentum * state.get("v", torch.zeros_like(w)) + lr * local * (g + weight_decay * w)
        return w - state["v"]


class ReferenceFusedLamb(ReferenceOptimizer):
    """What apex's kernels of LAMB do, stage by stage."""

    def prepared(self, gradients):
        limit = self.settings["max_grad_norm"]
        total = math.sqrt(sum(norm(one) ** 2 for one in gradients if one is not None))
        divisor = total / limit if limit and total > limit else 1.0
        return [None if one is None else one / divisor for one in gradients]

    def update(
        self,
        x,
        g,
        state,
        lr,
        betas,
        eps,
        weight_decay,
        max_grad_norm,
        bias_correction=True,
        adam_w_mode=True,
        grad_averaging=True,
        use_nvlamb=False,
    ):
        del max_grad_norm  # see prepared()
        g = g if adam_w_mode else g + weight_decay * x
        beta3 = 1 - betas[0] if grad_averaging else 1.0
        m = state["m"] = betas[0] * state.get("m", torch.zeros_like(x)) + beta3 * g
        v = moment(state, "v", g * g, betas[1])
        if bias_correction:
            m, v = m / (1 - betas[0] ** state["t"]), v / (1 - betas[1] ** state["t"])
        r = m / (v.sqrt() + eps) + (weight_decay * x if adam_w_mode else 0)
        has_ratio = (use_nvlamb or weight_decay) and norm(x) > 0 and norm(r) > 0
        return x - lr * (norm(x) / norm(r) if has_ratio else 1.0) * r


class ReferenceSgd(ReferenceOptimizer):
    """SGD as apex's kernel has it, which is torch's but for `wd_after_momentum`."""

    def update(self, x, g, state, lr, momentum=0, dampening=0, weight_decay=0, nesterov=False, wd_after_momentum=False):
        if not wd_after_momentum:
            g = g + weight_decay * x
        if momentum:
            state["v"] = g if "v" not in state else momentum * state["v"] + (1 - dampening) * g
            g = g + momentum * state["v"] if nesterov else state["v"]
        if wd_after_momentum:
            g = g + weight_decay * x
        return x - lr * g


def estimate(state, key, squares, beta):
    """The running mean of squares: of matrices the outer product of rows and columns over their mean."""
    if squares.dim() < 2:
        return moment(state, key, squares, beta)
    rows = moment(state, key + " rows", squares.sum(-1), beta)
    columns = moment(state, key + " columns", squares.sum(-2), beta)
    return rows.unsqueeze(-1) * columns.unsqueeze(-2) / rows.sum(-1)[..., None, None]


class ReferenceAdafactor(ReferenceOptimizer):
    """Algorithms 4 and 5 of Shazeer and Stern, 2018, with the sums of the paper, and fairseq's options."""

    def update(
        self,
        x,
        g,
        state,
        lr=None,
        eps=(1e-30, 1e-3),
        clip_threshold=1.0,
        decay_rate=-0.8,
        beta1=None,
        weight_decay=0.0,
        scale_parameter=True,
        relative_step=True,
        warmup_init=False,
    ):
        t = state["t"]
        rate = min(1e-6 * t if warmup_init else 1e-2, 1 / math.sqrt(t)) if relative_step else lr
        if scale_parameter:
            rate *= max(eps[1], rms(x))
        # Sums over n squares that each have eps in them are over n of their means: shapes with more than one element.
        u = g / estimate(state, "v", g * g + eps[0], 1 - t**decay_rate).sqrt()
        u = rate * u / max(1.0, rms(u) / clip_threshold)
        if beta1 is not None:
            u = moment(state, "m", u, beta1)
        return x - weight_decay * rate * x - u


class ReferenceCame(ReferenceOptimizer):
    """Algorithm 2 of Luo et al., 2023, with the authors' code for other than matrices."""

    def update(
        self, x, g, state, lr, eps=(1e-30, 1e-16), clip_threshold=1.0, betas=(0.9, 0.999, 0.9999), weight_decay=0.0
    ):
        u = g / estimate(state, "v", g * g + eps[0], betas[1]).sqrt()
        u = u / max(1.0, rms(u) / clip_threshold)
        m = moment(state, "m", u, betas[0])
        if x.dim() >= 2:
            m = m / estimate(state, "s", (u - m) ** 2 + eps[1], betas[2]).sqrt()
        return x - lr * weight_decay * x - lr * m
