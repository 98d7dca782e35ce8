"""MoE layers: dispatch against a loop over tokens, capacity, load-balancing losses, and the criterion with them."""

from __future__ import annotations

import copy
import gc
import threading

import pytest
import torch
import torch.nn.functional as F
from oracles.naive_experts import naive_experts, naive_routing
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import booster.moe.experts as experts_module
from booster import ConfigError
from booster.moe import (
    Experts,
    FFNExperts,
    MoeLayer,
    MoeLoss,
    MoeModule,
    NormalNoiseGenerator,
    Top1Router,
    Top2Router,
    UniformNoiseGenerator,
    load_balance_loss,
)
from booster.moe.loss import _CarriedLoss

DIM, HIDDEN, NUM_EXPERTS = 8, 12, 4


class FFN(nn.Module):
    """A feed-forward network."""

    def __init__(self, d_model=DIM, d_ff=HIDDEN):
        super().__init__()
        self.up, self.down = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


def ffn_networks(experts):
    """Returns a function for each of the experts with stacked parameters."""

    def network(number):
        up, down = experts.up_bias, experts.down_bias
        return lambda x: F.linear(
            F.gelu(F.linear(x, experts.up_weight[number], None if up is None else up[number])),
            experts.down_weight[number],
            None if down is None else down[number],
        )

    return [network(number) for number in range(experts.num_experts)]


def stacked(dim=DIM, hidden=HIDDEN, **arguments):
    return FFNExperts(NUM_EXPERTS, dim, hidden, **arguments)


MAKERS = {
    "modules": lambda: Experts(FFN, NUM_EXPERTS),
    "stacked": stacked,
    "stacked, no bias": lambda: stacked(bias=False),
    "stacked, odd sizes": lambda: stacked(hidden=13),
}
E = NUM_EXPERTS
INDICES = {
    "any": [[0, 1], [3, 2], [1, 0], [2, 2], [0, 3]],
    "an expert without tokens": [[0, 1], [3, 0], [1, 0], [3, 1]],
    "all tokens at the last": [[3, 3], [3, 3], [3, 3]],
    "all at the first": [[0], [0], [0]],
    "some dropped": [[0, E], [E, 2], [E, E], [3, 1], [0, E]],
    "all dropped": [[E, E], [E, E]],
    "one each": [[3], [1], [0]],
}


@pytest.mark.parametrize("case", INDICES)
@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("grouped", [True, False])
def test_dispatch_equals_a_loop(maker, case, grouped, monkeypatch):
    if not grouped:
        monkeypatch.setattr(experts_module, "_has_grouped_mm", lambda device, dtype: False)
    torch.manual_seed(0)
    experts = MAKERS[maker]()
    index = torch.tensor(INDICES[case])
    tokens, weights = torch.randn(len(index), DIM), torch.rand(index.shape)
    results = []
    for run in (experts, None):
        leaves = [tokens.clone().requires_grad_(), weights.clone().requires_grad_()]
        model = copy.deepcopy(experts)
        if run is None:
            networks = model.experts if isinstance(model, Experts) else ffn_networks(model)
            outputs = naive_experts(networks, leaves[0], index, leaves[1])
        else:
            outputs = model(leaves[0], index, leaves[1])
            assert outputs.dtype == tokens.dtype
        if outputs.requires_grad:
            (outputs * torch.arange(1.0, 1 + outputs.numel()).view_as(outputs)).sum().backward()
        every = [*leaves, *model.parameters()]
        # The loop leaves out experts without tokens; here they have gradients of zeros.
        assert run is None or all(one.grad is not None for one in every)
        results.append([outputs.detach(), *(torch.zeros_like(one) if one.grad is None else one.grad for one in every)])
    for found, expected in zip(*results, strict=True):
        # Sums of at most 13 products in another order.
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("maker", MAKERS)
def test_no_tokens_at_all(maker):
    experts = MAKERS[maker]()
    index = torch.zeros(0, 2, dtype=torch.int64)
    outputs = experts(torch.zeros(0, DIM), index, torch.zeros(0, 2))
    outputs.sum().backward()
    assert outputs.shape == (0, DIM)
    assert all(torch.equal(one.grad, torch.zeros_like(one)) for one in experts.parameters())


def test_one_product_per_expert_on_the_cpu_and_a_grouped_one_elsewhere(monkeypatch):
    calls = []
    original = F.grouped_mm
    monkeypatch.setattr(F, "grouped_mm", lambda *args, **kwargs: calls.append(args) or original(*args, **kwargs))
    index, weights = torch.tensor([[0], [1]]), torch.ones(2, 1)

    def run(states, experts):
        calls.clear()
        outputs = experts(states, index, weights.to(states.dtype))
        outputs.square().sum().backward()
        return outputs, [one.grad for one in experts.parameters()], bool(calls)

    torch.manual_seed(0)
    *expected, is_grouped = run(torch.ones(2, DIM), stacked())
    assert not is_grouped
    monkeypatch.setattr(experts_module, "_has_grouped_mm", lambda device, dtype: dtype == torch.float32)
    torch.manual_seed(0)
    *found, is_grouped = run(torch.ones(2, DIM), stacked())
    assert is_grouped
    torch.testing.assert_close(found, expected)
    assert not run(torch.ones(2, DIM), stacked(hidden=13))[-1]  # rows of 52 bytes
    assert not run(torch.ones(2, DIM, dtype=torch.float64), stacked().double())[-1]


def test_weights_at_an_odd_place_of_a_buffer():
    experts = stacked()
    expected = experts(torch.ones(2, DIM), torch.tensor([[0], [1]]), torch.ones(2, 1))
    buffer = torch.zeros(1 + experts.up_weight.numel())
    buffer[1:] = experts.up_weight.detach().flatten()
    experts.up_weight.data = buffer[1:].view_as(experts.up_weight)
    found = experts(torch.ones(2, DIM), torch.tensor([[0], [1]]), torch.ones(2, 1))
    torch.testing.assert_close(found, expected)


def test_autocast_and_low_precision():
    torch.manual_seed(0)
    index, weights, tokens = torch.tensor([[0, 1], [2, 4]]), torch.rand(2, 2), torch.randn(2, DIM)
    for experts in (stacked(), Experts(FFN, NUM_EXPERTS)):
        expected = experts(tokens, index, weights)
        with torch.autocast("cpu", torch.bfloat16):
            found = experts(tokens, index, weights)
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2)
        found = experts.bfloat16()(tokens.bfloat16(), index, weights)
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2)


def test_each_expert_has_its_own_initialization():
    experts = Experts(FFN, 3, d_ff=5)
    assert experts.experts[0].up.out_features == 5
    assert not torch.equal(experts.experts[0].up.weight, experts.experts[1].up.weight)
    weight = stacked().up_weight
    assert not torch.equal(weight[0], weight[1])
    assert 0.5 / DIM**0.5 < weight.abs().max() <= 1 / DIM**0.5


def test_dropout_and_activation_of_stacked_experts():
    index, weights, tokens = torch.zeros(50, 1, dtype=torch.int64), torch.ones(50, 1), torch.ones(50, DIM)
    experts = stacked(drop_rate=0.5, activation=torch.relu)
    assert (experts(tokens, index, weights) == 0).float().mean() > 0.3
    outputs = experts.eval()(tokens, index, weights)
    hidden = torch.relu(F.linear(tokens, experts.up_weight[0], experts.up_bias[0]))
    torch.testing.assert_close(outputs, F.linear(hidden, experts.down_weight[0], experts.down_bias[0]))
    assert isinstance(stacked(activation=nn.SiLU).activation, nn.SiLU)


def test_experts_of_colossalai_by_their_keyword():
    assert isinstance(Experts(expert=FFN, num_experts=2).experts[1], FFN)


def test_the_interface_is_that_of_transformers():
    transformers = pytest.importorskip("transformers")
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    config = transformers.MixtralConfig(hidden_size=DIM, intermediate_size=HIDDEN, num_local_experts=NUM_EXPERTS)
    config._experts_implementation = "eager"
    theirs = MixtralExperts(config)
    for one in theirs.parameters():
        nn.init.normal_(one, std=0.3)

    def network(number):
        def forward(x):
            gate, up = F.linear(x, theirs.gate_up_proj[number]).chunk(2, dim=-1)
            return F.linear(theirs.act_fn(gate) * up, theirs.down_proj[number])

        return forward

    layer = MoeLayer(DIM, NUM_EXPERTS, Top2Router(min_capacity=1, capacity_factor_train=0.6), theirs)
    tokens = torch.randn(9, DIM)
    routing = layer.router(layer.gate(tokens))
    assert routing.num_dropped > 0
    expected = naive_experts([network(n) for n in range(E)], tokens, routing.top_k_index, routing.top_k_weights)
    torch.testing.assert_close(layer(tokens), expected)


@pytest.mark.parametrize(
    ("router", "num_tokens", "num_experts", "training", "expected"),
    [
        (Top1Router(1.25), 64, 4, True, 20),
        (Top1Router(1.25), 60, 4, True, 18),  # 18.75
        (Top1Router(1.25), 68, 4, True, 22),  # 21.25, odd
        (Top1Router(1.25), 64, 4, False, 32),
        (Top1Router(1.25, 1.0), 64, 4, False, 16),
        (Top2Router(1.25), 64, 4, True, 40),
        (Top1Router(1.25), 8, 4, True, 4),  # 2.5, below the minimum
        (Top1Router(1.25, min_capacity=1), 8, 4, True, 2),
        (Top1Router(1.25, min_capacity=7), 8, 4, True, 7),
        (Top1Router(1.25, min_capacity=1), 1, 4, True, 1),
    ],
)
def test_capacity(router, num_tokens, num_experts, training, expected):
    assert router.train(training).capacity(num_tokens, num_experts) == expected


@pytest.mark.parametrize("router", [Top1Router, Top2Router])
@pytest.mark.parametrize("factor", [0.4, 0.9, 5.0])
def test_the_first_tokens_of_an_expert_stay_and_first_choices_come_first(router, factor):
    torch.manual_seed(0)
    router = router(factor, min_capacity=1)
    logits = torch.randn(37, NUM_EXPERTS)
    routing = router(logits)
    probabilities = logits.softmax(-1)
    index, weights = naive_routing(probabilities, router.top_k, router.capacity(37, NUM_EXPERTS), range(37))
    if router.top_k == 2:
        weights = weights / probabilities.topk(2)[0].sum(-1, keepdim=True)
    assert torch.equal(routing.top_k_index, index)
    torch.testing.assert_close(routing.top_k_weights, weights)
    assert routing.num_dropped == (index == NUM_EXPERTS).sum()
    assert (routing.num_dropped == 0) == (factor == 5.0)
    assert routing.top_k_weights.dtype == torch.float32


@pytest.mark.parametrize("router_cls", [Top1Router, Top2Router])
def test_random_tokens_stay(router_cls):
    router = router_cls(0.5, select_policy="random", min_capacity=2)
    logits = torch.randn(40, NUM_EXPERTS)
    state = torch.random.get_rng_state()
    first = router(logits)
    order = torch.empty(0)
    torch.random.set_rng_state(state)
    order = torch.randperm(40).tolist()
    index, _ = naive_routing(logits.softmax(-1), router.top_k, router.capacity(40, NUM_EXPERTS), order)
    assert torch.equal(first.top_k_index, index)
    second = router(logits)
    assert not torch.equal(first.top_k_index, second.top_k_index)
    torch.random.set_rng_state(state)
    assert torch.equal(router(logits).top_k_index, first.top_k_index)
    assert torch.equal(first.auxiliary_loss, second.auxiliary_loss)


@pytest.mark.parametrize("router_cls", [Top1Router, Top2Router])
def test_nothing_is_dropped_without_a_capacity(router_cls):
    routing = router_cls(0.1, min_capacity=1, drop_tks=False)(torch.randn(40, NUM_EXPERTS))
    assert routing.num_dropped == 0
    assert (routing.top_k_index < NUM_EXPERTS).all()
    assert (routing.top_k_weights > 0).all()


def test_routers_compute_in_fp32():
    logits = torch.randn(40, NUM_EXPERTS).bfloat16()
    assert torch.equal(Top2Router()(logits).top_k_weights, Top2Router()(logits.float()).top_k_weights)


def test_the_load_balancing_loss_by_hand():
    probabilities = torch.tensor([[0.7, 0.2, 0.1], [0.6, 0.3, 0.1], [0.1, 0.8, 0.1], [0.5, 0.1, 0.4]])
    means, shares = [1.9 / 4, 1.4 / 4, 0.7 / 4], [3 / 4, 1 / 4, 0]
    expected = 3 * sum(mean * share for mean, share in zip(means, shares, strict=True))
    torch.testing.assert_close(load_balance_loss(probabilities, probabilities.argmax(1), 3), torch.tensor(expected))
    # Of tokens before any is dropped.
    logits = probabilities.log()
    torch.testing.assert_close(Top1Router(0.1, min_capacity=1)(logits).auxiliary_loss, torch.tensor(expected))
    torch.testing.assert_close(Top2Router(0.1, min_capacity=1)(logits).auxiliary_loss, torch.tensor(expected / 2))


def test_the_load_balancing_loss_is_one_in_balance_and_finite_without_tokens():
    torch.testing.assert_close(load_balance_loss(torch.eye(4), torch.arange(4), 4), torch.tensor(1.0))
    assert load_balance_loss(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), 4) == 0


def test_sums_of_other_batches_make_the_loss_that_of_all():
    torch.manual_seed(0)
    probabilities = torch.randn(10, NUM_EXPERTS).softmax(-1).requires_grad_()
    choice = probabilities.argmax(1)
    whole = load_balance_loss(probabilities, choice, NUM_EXPERTS)
    (expected,) = torch.autograd.grad(whole, probabilities)
    others = []
    load_balance_loss(probabilities[7:].detach(), choice[7:], NUM_EXPERTS, lambda sums: others.append(sums) or sums)
    found = load_balance_loss(probabilities[:7], choice[:7], NUM_EXPERTS, lambda sums: sums + others[0])
    torch.testing.assert_close(found, whole)
    torch.testing.assert_close(torch.autograd.grad(found, probabilities)[0][:7], expected[:7])
    router = Top1Router()
    router.sum_over_batch = lambda sums: sums + others[0]
    assert router(torch.randn(7, NUM_EXPERTS)).auxiliary_loss > 0


@pytest.mark.parametrize("router_cls", [Top1Router, Top2Router])
@pytest.mark.parametrize("noise", [NormalNoiseGenerator(NUM_EXPERTS), UniformNoiseGenerator(0.5)])
def test_noise_in_training_only(router_cls, noise):
    logits = torch.randn(40, NUM_EXPERTS)
    router = router_cls(noisy_func=noise)
    assert not torch.equal(router(logits).top_k_weights, router(logits).top_k_weights)
    exact = router_cls().eval()(logits)
    assert torch.equal(router.eval()(logits).top_k_weights, exact.top_k_weights)


def test_noise_has_its_size():
    torch.manual_seed(0)
    logits = torch.full((1000, NUM_EXPERTS), 3.0)
    assert abs(float((NormalNoiseGenerator(NUM_EXPERTS)(logits) - logits).std()) - 0.25) < 0.02
    factors = UniformNoiseGenerator(0.1)(logits) / logits
    assert 0.9 <= factors.min() < 0.91
    assert 1.09 < factors.max() <= 1.1


@pytest.mark.parametrize("router_cls", [Top1Router, Top2Router])
def test_a_layer_keeps_the_shape(router_cls):
    layer = MoeLayer(DIM, NUM_EXPERTS, router_cls(), Experts(FFN, NUM_EXPERTS))
    inputs = torch.randn(2, 3, 5, DIM)
    outputs = layer(inputs)
    assert outputs.shape == inputs.shape
    routing = layer.router(layer.gate(inputs.view(-1, DIM)))
    expected = naive_experts(layer.experts.experts, inputs.view(-1, DIM), routing.top_k_index, routing.top_k_weights)
    torch.testing.assert_close(outputs.view(-1, DIM), expected)
    assert torch.equal(layer.auxiliary_loss, routing.auxiliary_loss)
    assert torch.equal(layer.num_dropped, routing.num_dropped)
    assert [name for name, _ in layer.named_parameters() if not name.startswith("experts.")] == ["gate.weight"]
    copy.deepcopy(layer)  # also after a forward


def test_the_gate_computes_in_its_own_dtype_under_autocast():
    torch.manual_seed(0)
    layer = MoeLayer(DIM, NUM_EXPERTS, Top1Router(), stacked())
    tokens = torch.randn(30, DIM)
    layer(tokens)
    expected = layer.auxiliary_loss
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(tokens).dtype == torch.bfloat16
    assert torch.equal(layer.auxiliary_loss, expected)


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("context", [lambda: torch.device("meta"), FakeTensorMode])
def test_a_layer_without_values(maker, context):
    experts_module._has_grouped_mm.cache_clear()
    with context():
        layer = MoeLayer(DIM, NUM_EXPERTS, Top2Router(), MAKERS[maker]())
        outputs = layer(torch.empty(2, 3, DIM))
        assert outputs.shape == (2, 3, DIM)
        outputs.sum().backward()
    assert experts_module._has_grouped_mm.cache_info().currsize == 0


@pytest.mark.parametrize("top_k", [1, 2])
def test_a_residual_network_is_mixed_in(top_k):
    torch.manual_seed(0)
    module = MoeModule(DIM, NUM_EXPERTS, top_k=top_k, use_residual=True, expert_cls=FFN, d_ff=5)
    inputs = torch.randn(3, 4, DIM)
    first, second = F.linear(inputs, module.coefficient.weight, module.coefficient.bias).softmax(-1).unbind(-1)
    expected = module.moe_layer(inputs) * first[..., None] + module.residual(inputs) * second[..., None]
    torch.testing.assert_close(module(inputs), expected)
    assert module.residual.up.out_features == 5


def test_a_module_of_given_parts():
    residual, experts = FFN(), stacked()
    module = MoeModule(
        DIM, NUM_EXPERTS, 2, 1.5, 2.5, 6, "Gaussian", False,
        use_residual=True, residual_instance=residual, expert_instance=experts,
    )  # fmt: skip
    router = module.moe_layer.router
    assert (router.top_k, router.capacity_factor_train, router.capacity_factor_eval) == (2, 1.5, 2.5)
    assert (router.min_capacity, router.drop_tks) == (6, False)
    assert isinstance(router.noisy_func, NormalNoiseGenerator)
    assert module.residual is residual
    assert module.moe_layer.experts is experts
    plain = MoeModule(DIM, NUM_EXPERTS, noisy_policy="Jitter", expert_cls=FFN)
    assert isinstance(plain.moe_layer.router.noisy_func, UniformNoiseGenerator)
    inputs = torch.randn(3, DIM)
    assert torch.equal(plain.eval()(inputs), plain.moe_layer(inputs))


# Reentrant checkpoints in evaluation.
ignores_checkpoints = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")


class Model(nn.Module):
    """Layers with shared router and experts, the last of which runs twice; checkpoints in some way."""

    def __init__(self, way=None, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        router = Top2Router(0.8, min_capacity=1, select_policy="random", noisy_func=NormalNoiseGenerator(NUM_EXPERTS))
        experts = Experts(FFN, NUM_EXPERTS)
        self.way = way
        self.first = nn.Linear(DIM, DIM)
        self.layers = nn.ModuleList(MoeLayer(DIM, NUM_EXPERTS, router, experts) for _ in range(3))
        self.last = nn.Linear(DIM, 3)

    def forward(self, x):
        x = self.first(x)
        for layer in (*self.layers, self.layers[-1]):
            x = self.block(lambda y, layer=layer: y + layer(torch.tanh(y)), x)
        return self.last(x)

    def block(self, function, x):
        ways = {
            "reentrant": [True],
            "not": [False],
            "both": [True, False],
            "twice": [True, True],
            "other": [False, True],
        }
        for use_reentrant in ways.get(self.way, []):
            function = self.checkpointed(function, use_reentrant)
        return function(x)

    @staticmethod
    def checkpointed(function, use_reentrant):
        return lambda x: checkpoint(function, x, use_reentrant=use_reentrant) * 1.0


INPUTS, TARGETS = torch.randn(20, DIM, generator=torch.Generator().manual_seed(7)), torch.arange(20) % 3


def plain_step(model):
    """Returns the loss with every layer's auxiliary loss, added by hand; the model is not checkpointed."""
    collected = []
    routers = {layer.router for layer in model.layers}
    hooks = [one.register_forward_hook(lambda _, __, routing: collected.append(routing)) for one in routers]
    outputs = model(INPUTS)
    for hook in hooks:
        hook.remove()
    assert len(collected) == 4
    return F.cross_entropy(outputs, TARGETS) + 0.5 * sum(one.auxiliary_loss for one in collected)


def gradients(model):
    return {name: one.grad.clone() for name, one in model.named_parameters()}


def assert_same(found, expected):
    for name, one in expected.items():
        # Gradients of shared parameters are added up in another order.
        torch.testing.assert_close(found[name], one, rtol=1e-5, atol=1e-7, msg=name)


def expected_step(seed=1):
    model = Model()
    torch.manual_seed(seed)
    loss = plain_step(model)
    loss.backward()
    return loss.detach(), gradients(model)


@ignores_checkpoints
@pytest.mark.parametrize("way", [None, "not", "reentrant", "both", "twice", "other"])
def test_the_criterion_adds_what_every_run_of_a_layer_costs_once(way):
    expected_loss, expected = expected_step()
    model, criterion = Model(way), MoeLoss(0.5, nn.CrossEntropyLoss)
    for _ in range(3):  # nothing of a step is in the next
        model.zero_grad()
        torch.manual_seed(1)
        loss = criterion(model(INPUTS), TARGETS)
        loss.backward()
        torch.testing.assert_close(loss.detach(), expected_loss)
        torch.testing.assert_close(
            loss - F.cross_entropy(model_outputs(model), TARGETS), 0.5 * criterion.auxiliary_loss
        )
        assert_same(gradients(model), expected)


def model_outputs(model):
    with torch.no_grad():
        torch.manual_seed(1)
        return model(INPUTS)


@ignores_checkpoints
@pytest.mark.parametrize("way", [None, "reentrant"])
def test_forwards_without_a_loss_leave_nothing(way):
    expected_loss, expected = expected_step()
    model, criterion = Model(way), MoeLoss(0.5, nn.CrossEntropyLoss)
    kept = model(INPUTS)  # in training, with a graph that is still there
    with torch.no_grad():
        model(INPUTS)
        unweighted = criterion(model.eval()(INPUTS), TARGETS)
    torch.testing.assert_close(unweighted, F.cross_entropy(model(INPUTS), TARGETS).detach())
    model.train()
    torch.manual_seed(1)
    loss = criterion(model(INPUTS), TARGETS)
    loss.backward()
    torch.testing.assert_close(loss.detach(), expected_loss)
    assert_same(gradients(model), expected)
    assert kept.requires_grad


@pytest.mark.parametrize("way", [None, "reentrant"])
def test_another_criterion_has_no_auxiliary_loss(way):
    model = Model(way)
    MoeLoss(0.5, nn.CrossEntropyLoss)(model(INPUTS), TARGETS).backward()
    model.zero_grad()
    torch.manual_seed(1)
    outputs = model(INPUTS)
    F.cross_entropy(outputs, TARGETS).backward()
    found = gradients(model)
    other = Model()
    torch.manual_seed(1)
    F.cross_entropy(other(INPUTS), TARGETS).backward()
    assert_same(found, gradients(other))


@pytest.mark.parametrize("ways", [(None, None), ("reentrant", None), ("reentrant", "reentrant")])
def test_two_models_keep_their_auxiliary_losses_apart(ways):
    models = [Model(way, seed) for seed, way in enumerate(ways)]
    alone = []
    for number, model in enumerate(models):
        torch.manual_seed(number)
        (MoeLoss(0.1 + number, nn.CrossEntropyLoss)(model(INPUTS), TARGETS) * (1 + number)).backward()
        alone.append(gradients(model))
        model.zero_grad()
    outputs = []
    for number, model in enumerate(models):
        torch.manual_seed(number)
        outputs.append(model(INPUTS))
    losses = [MoeLoss(0.1 + n, nn.CrossEntropyLoss)(one, TARGETS) * (1 + n) for n, one in enumerate(outputs)]
    sum(losses).backward()  # one backward for both
    for model, expected in zip(models, alone, strict=True):
        assert_same(gradients(model), expected)


def test_threads_do_not_mix():
    expected, _ = expected_step()
    model, criterion, found = Model(), MoeLoss(0.5, nn.CrossEntropyLoss), []
    torch.manual_seed(1)
    outputs = model(INPUTS)

    def train_another():
        other = Model(seed=3)
        found.append(MoeLoss(0.5, nn.CrossEntropyLoss)(other(INPUTS), TARGETS).detach())

    thread = threading.Thread(target=train_another)
    thread.start()
    thread.join()
    torch.testing.assert_close(criterion(outputs, TARGETS).detach(), expected)
    assert found[0] != expected


def test_two_losses_of_one_forward_are_two_terms():
    expected_loss, expected = expected_step()
    model, criterion = Model(), MoeLoss(0.5, nn.CrossEntropyLoss)
    torch.manual_seed(1)
    outputs = model(INPUTS)
    loss = 0.25 * criterion(outputs, TARGETS) + 0.75 * criterion(outputs, TARGETS)
    torch.testing.assert_close(loss.detach(), expected_loss)
    loss.backward(retain_graph=True)
    assert_same(gradients(model), expected)
    model.zero_grad()
    torch.autograd.grad(loss, model.last.weight, retain_graph=True)  # stops before the layers
    loss.backward(retain_graph=True)
    assert_same(gradients(model), expected)
    model.zero_grad()
    F.cross_entropy(outputs, TARGETS).backward()  # the same graph, without
    other = Model()
    torch.manual_seed(1)
    F.cross_entropy(other(INPUTS), TARGETS).backward()
    assert_same(gradients(model), gradients(other))


def test_a_gradient_of_a_gradient():
    def penalty(model, loss):
        return sum(
            one.square().sum() for one in torch.autograd.grad(loss, model.layers[0].gate.weight, create_graph=True)
        )

    results = []
    for step in (plain_step, lambda model: MoeLoss(0.5, nn.CrossEntropyLoss)(model(INPUTS), TARGETS)):
        model = Model()
        torch.manual_seed(1)
        penalty(model, step(model)).backward()
        results.append({name: one.grad for name, one in model.named_parameters() if one.grad is not None})
    assert_same(*results)


def test_losses_of_items_get_the_auxiliary_loss_each():
    model, criterion = Model(), MoeLoss(0.5, nn.CrossEntropyLoss, reduction="none")
    expected_loss, expected = expected_step()
    torch.manual_seed(1)
    losses = criterion(model(INPUTS), TARGETS)
    assert losses.shape == (20,)
    losses.mean().backward()
    torch.testing.assert_close(losses.mean().detach(), expected_loss)
    assert_same(gradients(model), expected)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # of torch's own access
def test_a_compiled_model_counts_its_layers():
    expected_loss, expected = expected_step()
    model, criterion = Model(), MoeLoss(0.5, nn.CrossEntropyLoss)
    compiled = torch.compile(model, backend="aot_eager")
    torch.manual_seed(1)
    loss = criterion(compiled(INPUTS), TARGETS)
    loss.backward()
    torch.testing.assert_close(loss.detach(), expected_loss)
    assert_same(gradients(model), expected)


def test_nothing_outlives_its_graph():
    layer, criterion = MoeLayer(DIM, NUM_EXPERTS, Top1Router(), Experts(FFN, NUM_EXPERTS)), MoeLoss(0.1, nn.MSELoss)
    inputs = torch.randn(5, DIM)
    outputs = layer(inputs)
    criterion(outputs, inputs).backward()
    layer(inputs)  # without a loss
    del outputs
    gc.collect()
    assert not [one for one in gc.get_objects() if isinstance(one, _CarriedLoss)]
    assert layer.auxiliary_loss.grad_fn is None
    assert criterion.auxiliary_loss.grad_fn is None


def test_criteria_of_all_kinds():
    outputs = MoeLayer(DIM, NUM_EXPERTS, Top1Router(), stacked())(INPUTS)
    target = torch.zeros_like(outputs)
    expected = MoeLoss(0.1, nn.MSELoss)(outputs, target)
    assert torch.equal(MoeLoss(0.1, nn.MSELoss())(outputs, target), expected)
    assert torch.equal(MoeLoss(0.1, F.mse_loss)(outputs, target=target), expected)
    assert MoeLoss(0.1, nn.CrossEntropyLoss, label_smoothing=0.1).loss_fn.label_smoothing == 0.1
    assert MoeLoss(0, nn.MSELoss)(outputs, target) == F.mse_loss(outputs, target)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: Top1Router(capacity_factor_train=0), "capacity_factor_train=0 leaves no expert"),
        (lambda: Top2Router(capacity_factor_eval=-1.0), "capacity_factor_eval=-1.0"),
        (lambda: Top1Router(float("inf")), "drop_tks=False for no limit"),
        (lambda: Top1Router(min_capacity=0), "min_capacity=0"),
        (lambda: Top1Router(select_policy="last"), "select_policy='last' is unknown: give 'first'"),
        (lambda: Top1Router(noisy_func=0.1), "noisy_func=0.1 is not callable"),
        (lambda: Top1Router(drop_tks=1), "drop_tks must be a bool"),
        (lambda: Top2Router()(torch.zeros(3, 1)), "num_experts=1 is less than the 2 experts"),
        (lambda: MoeLayer(DIM, 1, Top2Router(), Experts(FFN, 1)), "num_experts=1 is less than the 2 experts"),
        (lambda: MoeLayer(DIM, 4, Top1Router(), Experts(FFN, 3)), "num_experts=4, but the experts given are 3"),
        (lambda: MoeLayer(0, 4, Top1Router(), Experts(FFN, 4)), "dim_model=0"),
        (lambda: MoeLayer(DIM, 4, Top1Router, Experts(FFN, 4)), "is not a module: construct it"),
        (lambda: Experts(FFN(), 4), "is not a class of experts"),
        (lambda: Experts(FFN, 2.0), "num_experts=2.0"),
        (lambda: FFNExperts(4, DIM, 0), "d_ff=0"),
        (lambda: FFNExperts(4, DIM, 8, activation="gelu"), "activation='gelu' is not callable"),
        (lambda: NormalNoiseGenerator(0), "num_experts=0"),
        (lambda: UniformNoiseGenerator(1.5), "eps=1.5"),
        (lambda: MoeModule(DIM, 4, 3, expert_cls=FFN), "top_k=3"),
        (lambda: MoeModule(DIM, 4, noisy_policy="gauss", expert_cls=FFN), "noisy_policy='gauss' is unknown"),
        (lambda: MoeModule(DIM, 4), "expert_instance is not given"),
        (lambda: MoeModule(DIM, 4, expert_instance=stacked(), use_residual=True), "residual_instance is not given"),
        (lambda: MoeModule(DIM, 4, expert_instance=stacked(), expert_cls=FFN), "no effect beside expert_instance"),
        (lambda: MoeModule(DIM, 4, expert_cls=FFN, residual_instance=FFN()), "without use_residual=True"),
        (lambda: MoeLoss(-0.1, nn.MSELoss), "aux_weight=-0.1"),
        (lambda: MoeLoss(0.1, "mse"), "loss_fn='mse'"),
        (lambda: MoeLoss(0.1, nn.MSELoss(), reduction="sum"), "is not a class that takes the arguments"),
        (lambda: MoeLoss(0.1, lambda: 3.0)(), "returned float"),
        (lambda: MoeLoss(0.1, nn.MSELoss)(FFN()(INPUTS), INPUTS), "does not depend on an MoE layer"),
    ],
)  # fmt: skip
def test_mistakes(call, text):
    with pytest.raises(ConfigError) as caught:
        call()
    assert text in str(caught.value)
