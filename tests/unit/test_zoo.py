"""Every model of the zoo builds, trains, repeats itself, and has a loss that parts of a batch average to."""

from __future__ import annotations

import pytest
import torch
from zoo import WholeBatches, get_model, model_names, needs_transformers, split_batch
from zoo.moe import MOE_MODELS

MODELS = [
    *(entry.name for entry in MOE_MODELS if entry.routes_by_rank),
    *model_names(transformers=False, layer_variants=True),
    *(pytest.param(name, marks=needs_transformers) for name in model_names(transformers=True, layer_variants=True)),
]
BATCH = 12  # divides over 1, 2, 3 and 4 ranks


def losses_and_gradients(name, num_steps=2):
    entry = get_model(name)
    model = entry.build()
    losses = []
    for step in range(num_steps):
        loss = entry.loss(model, entry.make_batch(step, BATCH))
        loss.backward()
        losses.append(loss.detach())
    return losses, {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", MODELS)
def test_loss_is_finite_and_gradients_reach_what_is_used(name):
    losses, gradients = losses_and_gradients(name, num_steps=4)  # in one of which each expert has a sample
    assert all(loss.shape == () and loss.isfinite() for loss in losses)
    missing = {key for key, gradient in gradients.items() if gradient is None}
    assert missing == set(get_model(name).never_used)
    assert all(gradient.isfinite().all() for gradient in gradients.values() if gradient is not None)


@pytest.mark.parametrize("name", MODELS)
def test_two_builds_are_bitwise_the_same_run(name):
    before = torch.random.get_rng_state()
    (first, first_gradients), (second, second_gradients) = losses_and_gradients(name), losses_and_gradients(name)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(torch.stack(first), torch.stack(second))
    assert not torch.equal(first[0], first[1])
    for key, gradient in first_gradients.items():
        assert gradient is None or torch.equal(gradient, second_gradients[key])


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_the_mean_over_parts_is_the_loss_of_the_whole(name, world_size):
    entry = get_model(name)
    model, batch = entry.build(), entry.make_batch(0, BATCH)
    with torch.no_grad():
        whole = entry.loss(model, batch)
        parts = torch.stack([entry.loss(model, split_batch(batch, rank, world_size)) for rank in range(world_size)])
    # Sums of float32 in another order: a few units of the last place, 1e-7 each.
    is_same = torch.allclose(parts.mean(), whole, rtol=1e-6, atol=0.0)
    assert is_same != entry.mixes_samples


@pytest.mark.parametrize("name", MODELS)
def test_a_loss_taken_apart_is_the_same_loss(name):
    entry = get_model(name)
    batch = entry.make_batch(0, 4)
    whole = WholeBatches(entry)
    model, fed = whole.build(), whole.feed(batch)
    taken_apart = whole.criterion(model(fed) if whole.is_bare else model(**fed), fed)
    assert whole.num_samples(fed) == 4
    assert torch.equal(taken_apart, entry.loss(entry.build(), batch))
    assert list(model.state_dict()) == list(entry.build().state_dict())


DEEP = [name for name in model_names(layer_variants=True) if get_model(name).construct_deep is not None]


@pytest.mark.parametrize("name", DEEP)
def test_models_can_be_had_with_more_layers(name):
    entry = get_model(name, num_layers=5)
    model = entry.build()
    entry.loss(model, entry.make_batch(0, 4)).backward()
    names = {key.replace(f".{4}.", ".#.") for key in model.state_dict() if ".4." in key}
    assert names or name.startswith("albert")  # one layer that is called five times
    assert get_model(name).build().state_dict().keys() <= model.state_dict().keys()


def test_a_depth_that_cannot_be_chosen_is_refused():
    with pytest.raises(ValueError, match=r"the depth of mlp_odd can.t be chosen"):
        get_model("mlp_odd", num_layers=3)


@pytest.mark.parametrize("name", MODELS)
def test_models_are_tiny_and_their_groups_complete(name):
    entry = get_model(name)
    model = entry.build()
    assert sum(parameter.numel() for parameter in model.parameters()) < 200_000
    grouped = [parameter for group in entry.param_groups(model) for parameter in group["params"]]
    trained = {parameter for parameter in model.parameters() if parameter.requires_grad}
    assert len(grouped) == len(trained)
    assert set(grouped) == trained


@pytest.mark.parametrize("name", MODELS)
def test_ties_are_declared(name):
    entry = get_model(name)
    names_by_parameter = {}
    for key, parameter in entry.build().named_parameters(remove_duplicate=False):
        names_by_parameter.setdefault(parameter, []).append(key)
    found = {frozenset(keys) for keys in names_by_parameter.values() if len(keys) > 1}
    assert found == {frozenset(keys) for keys in entry.tied}


def test_only_some_ranks_use_the_conditional_branch():
    entry = get_model("frozen_unused_conditional")
    batch = entry.make_batch(0, BATCH)
    used = []
    for rank in range(4):
        model = entry.build()
        entry.loss(model, split_batch(batch, rank, 4)).backward()
        used.append(model.branch.weight.grad is not None)
    assert used == [True, True, False, False]


def test_every_step_routes_ranks_to_other_experts():
    entry = get_model("routed_experts")
    firsts = set()
    for step in range(6):
        batch = entry.make_batch(step, 4)
        used = [set(split_batch(batch, rank, 2)["kind"].tolist()) for rank in range(2)]
        assert used[0].isdisjoint(used[1])
        firsts.add(int(batch["kind"][0]))
        model = entry.build()
        entry.loss(model, batch).backward()
        trained = {index for index, expert in enumerate(model.experts) if expert[0].weight.grad is not None}
        assert trained == used[0] | used[1]
    assert len(firsts) > 1


def test_unpicked_codes_get_zeros_and_the_choice_is_far_from_a_tie():
    entry = get_model("vq_autoencoder")
    model, batch = entry.build(), entry.make_batch(0, 4)
    entry.loss(model, batch).backward()
    is_zero = (model.quantize.codebook.grad == 0).all(dim=1)
    assert is_zero.any()
    assert not is_zero.all()
    with torch.no_grad():
        z = batch["x"] + 0.2 * model.encode(batch["x"])
        nearest, second = torch.cdist(z, model.quantize.codebook).topk(2, largest=False).values.T
    assert (second - nearest).min() > 0.3  # bfloat16 rounds numbers of this size by 2**-8


def test_only_those_who_ask_get_the_variants_of_layers():
    variants = set(model_names(layer_variants=True)) - set(model_names())
    assert variants == {name for name in model_names(layer_variants=True) if get_model(name).is_layer_variant}
    assert "mistral" in variants


def test_several_groups_differ_in_their_settings():
    entry = get_model("multi_output_groups")
    groups = entry.param_groups(entry.build())
    assert len({(group["lr"], group["weight_decay"]) for group in groups}) == 3


def test_a_batch_splits_into_contiguous_parts():
    batch = {"x": torch.arange(6), "nested": (torch.arange(12).view(6, 2), "text")}
    part = split_batch(batch, 1, 3)
    assert part["x"].tolist() == [2, 3]
    assert part["nested"][0].tolist() == [[4, 5], [6, 7]]
    assert part["nested"][1] == "text"


def test_a_batch_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="6 samples do not divide over 4 ranks"):
        split_batch(torch.arange(6), 0, 4)


def test_an_unknown_model_names_the_known_ones():
    with pytest.raises(KeyError, match=r"no model 'resnet' in the zoo: take one of mlp_odd, "):
        get_model("resnet")
