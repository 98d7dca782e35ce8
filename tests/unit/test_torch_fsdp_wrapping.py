"""Which modules become units of FSDP2: by themselves, by torch's policies, and what can't be one."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    _or_policy,
    _recursive_wrap,
    _wrap_module_cls_individually,
    always_wrap_policy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)
from torch.nn.utils import parametrizations
from zoo import get_model, model_names

from booster.errors import ConfigError
from booster.plugins.torch_fsdp import wrap
from booster.plugins.torch_fsdp.wrap import plan_wrapping


@pytest.fixture(autouse=True)
def _as_if_large(monkeypatch):
    """Have the small models of these tests sharded as large ones are."""
    monkeypatch.setattr(wrap, "SINGLE_GROUP_BYTES", 0)


class Block(nn.Module):
    def __init__(self, width=4, num_experts=0):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(width, width)) for _ in range(num_experts))

    def forward(self, x):
        x = x + self.mix(self.norm(x))
        return x + sum(expert(x) for expert in self.experts)


class OtherBlock(Block):
    pass


class Model(nn.Module):
    """Has the modules that it is given, by name, and calls none of them."""

    def __init__(self, **modules):
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x):
        return x


class Ignorant(nn.Module):
    """Holds weights for others, which read them."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 3))


def names_of(model, policy=None, *, whole=(), keeps_own_format=()):
    plans = plan_wrapping(model, policy, replicated=whole, own_dtype_classes=keeps_own_format)
    check_invariants(model, plans, whole)
    return [plan.name for plan in plans]


def check_invariants(model, plans, whole=()):
    """What fully_shard needs of units that it is given in this order, told independently of how they are found."""
    by_name = dict(model.named_modules(remove_duplicate=False))
    modules = [plan.module for plan in plans]
    assert len(set(modules)) == len(modules)
    assert model not in modules
    left_out, holder = {id(parameter) for parameter in whole}, {}
    for index, plan in enumerate(plans):
        assert by_name[plan.name] is plan.module
        assert type(plan.module).forward is not nn.Module.forward
        assert not set(modules[index + 1 :]) & set(plan.module.modules()), "a unit comes after the unit around it"
        own = [one for one in plan.module.parameters() if id(one) not in left_out and id(one) not in holder]
        assert own, f"{plan.name} has nothing to gather"
        holder.update((id(parameter), plan.module) for parameter in own)
    # Whatever way leads to a parameter, it leads through its unit.
    for name, parameter in model.named_parameters(remove_duplicate=False):
        parts = name.split(".")[:-1]
        way = [by_name[".".join(parts[:length])] for length in range(len(parts) + 1)]
        assert id(parameter) in left_out or holder.get(id(parameter), model) in way, f"{name} is reached past its unit"


# None: the units of a model by themselves. Every model of the zoo that has none goes into the root whole.
ZOO = {
    "byte_gpt": ["blocks.0", "blocks.1"],
    "torch_transformer": ["encoder.layers.0", "encoder.layers.1"],
    "routed_experts": ["experts.0", "experts.1", "experts.2", "experts.3", "experts.4"],
    "dlrm": ["tables.0", "tables.1", "tables.2"],
    "deepfm": ["weights.0", "weights.1", "weights.2", "factors.0", "factors.1", "factors.2"],
    "llama": ["model.layers.0", "model.layers.1"],
    "gpt2": ["transformer.h.0", "transformer.h.1"],
    "gpt2_double_heads": ["transformer.h.0", "transformer.h.1"],
    "bert": ["bert.encoder.layer.0", "bert.encoder.layer.1"],  # the embeddings are tied to the head
    "bert_pretraining": ["bert.encoder.layer.0", "bert.encoder.layer.1"],
    "bert_unpooled": ["embeddings", "encoder.layer.0", "encoder.layer.1"],
    "opt": ["model.decoder.layers.0", "model.decoder.layers.1"],
    "t5": ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"],
    "vit": ["vit.embeddings", "vit.layers.0", "vit.layers.1"],
    "mixtral": ["model.layers.0", "model.layers.1"],
    "qwen3": ["model.layers.0", "model.layers.1"],
}


def build(name):
    if name in model_names(transformers=True):
        pytest.importorskip("transformers")
    return get_model(name).build()


@pytest.mark.parametrize("name", model_names())
def test_zoo_by_itself(name):
    assert names_of(build(name)) == ZOO.get(name, [])


def test_small_models_are_a_single_group(monkeypatch):
    blocks = Model(blocks=nn.ModuleList(Block(width=64) for _ in range(4)), embedding=nn.Embedding(8, 64))
    blocks.embedding.requires_grad_(False)
    num_bytes = sum(one.nbytes for one in blocks.parameters())
    monkeypatch.setattr(wrap, "SINGLE_GROUP_BYTES", num_bytes + 1)
    assert names_of(blocks) == []
    assert names_of(blocks, keeps_own_format=(nn.LayerNorm,)) == [f"blocks.{index}.norm" for index in range(4)]
    assert names_of(blocks, ModuleWrapPolicy({Block})) == [f"blocks.{index}" for index in range(4)]
    monkeypatch.setattr(wrap, "SINGLE_GROUP_BYTES", num_bytes)
    assert names_of(blocks) == [*(f"blocks.{index}" for index in range(4)), "embedding"]


def test_embeddings_that_do_not_train():
    """As under LoRA: not gathered longer than their forward, unless other modules use their weights."""
    for name, found in (
        ("llama", ["model.embed_tokens"]),
        ("opt", ["model.decoder.embed_positions"]),  # the others are tied to the head
        ("bert_unpooled", []),
        ("dlrm", []),
    ):
        model = build(name).requires_grad_(False)
        assert sorted(names_of(model)) == sorted([*ZOO[name], *found])


@pytest.mark.parametrize("name", model_names())
@pytest.mark.parametrize("min_num_params", [1, 200])
def test_zoo_by_size(name, min_num_params):
    model = build(name)
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=min_num_params)
    assert names_of(model, policy) or min_num_params > 1
    some = list(model.parameters())[::2]
    names_of(model, policy, whole=some)


@pytest.mark.parametrize("name", model_names())
def test_zoo_with_every_layer_in_its_own_format(name):
    layers = (nn.LayerNorm, nn.BatchNorm2d)
    model = build(name)
    plans = plan_wrapping(model, None, replicated=(), own_dtype_classes=layers)
    check_invariants(model, plans)
    kept = [plan.module for plan in plans if isinstance(plan.module, layers)]
    assert kept == [one for one in model.modules() if isinstance(one, layers) and list(one.parameters())]
    assert [plan.name for plan in plans if not isinstance(plan.module, layers)] == ZOO.get(name, [])


def test_transformers_names_are_looked_for_in_nested_models_and_base_classes():
    named = Model(_no_split_modules=["Block"], deep=Model(first=Block(), second=OtherBlock(), other=nn.Linear(1, 1)))
    assert names_of(Model(inner=named)) == ["inner.deep.first", "inner.deep.second"]
    assert names_of(Model(inner=named, outside=Block())) == ["inner.deep.first", "inner.deep.second", "outside"]


def test_transformers_names_of_no_module_leave_it_to_lists():
    blocks = nn.ModuleList(Block() for _ in range(2))
    for absent in (["Nowhere"], set(), None):
        assert names_of(Model(_no_split_modules=absent, blocks=blocks)) == ["blocks.0", "blocks.1"]
    # Named, but tied: there is still a list.
    embedding, head = nn.Embedding(3, 3), nn.Linear(3, 3, bias=False)
    head.weight = embedding.weight
    tied = Model(_no_split_modules=["Embedding"], embedding=embedding, blocks=blocks, head=head)
    assert names_of(tied) == ["blocks.0", "blocks.1"]


def stack(cls=Block, count=2, **given):
    return [cls(**given) for _ in range(count)]


def tree(first, second):
    return nn.ModuleDict({"first": first, "second": second})


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: Model(blocks=nn.ModuleList(stack(num_experts=3))), ["blocks.0", "blocks.1"]),
        (lambda: Model(block=Block(num_experts=2)), ["block.experts.0", "block.experts.1"]),
        (lambda: Model(e=nn.ModuleList(stack()), d=nn.ModuleList(stack())), ["e.0", "e.1", "d.0", "d.1"]),
        (lambda: Model(blocks=tree(Block(), Block())), ["blocks.first", "blocks.second"]),
        (lambda: Model(blocks=nn.Sequential(*stack())), ["blocks.0", "blocks.1"]),
        (lambda: nn.Sequential(*stack(count=3)), ["0", "1", "2"]),
        (lambda: Model(blocks=nn.ModuleList(stack(count=1))), []),
        (lambda: Model(blocks=nn.Sequential(Block(), nn.Dropout(), Block())), ["blocks.0", "blocks.2"]),
        (lambda: Model(blocks=nn.Sequential(Block(), OtherBlock())), []),
        (lambda: Model(blocks=nn.Sequential(Block(), Block(), nn.Linear(2, 2))), []),
        (lambda: Model(layers=nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))), []),
        (lambda: Model(layers=nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))), []),
        (lambda: Model(tables=nn.ModuleList(nn.Embedding(3, 2) for _ in range(2))), ["tables.0", "tables.1"]),
        # Of a mixed list: the blocks that repeat, and what repeats within the others.
        (lambda: Model(blocks=nn.ModuleList([Block(), OtherBlock(), Block()])), ["blocks.0", "blocks.2"]),
        (
            lambda: Model(blocks=nn.ModuleList([*stack(), OtherBlock(num_experts=2)])),
            ["blocks.0", "blocks.1", "blocks.2.experts.0", "blocks.2.experts.1"],
        ),
        (lambda: Model(layers=nn.ModuleList([nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2)])), []),
        # Lists in lists have no forward: the blocks are inside.
        (
            lambda: Model(stages=nn.ModuleList(nn.ModuleList(stack()) for _ in range(2))),
            ["stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1"],
        ),
        (lambda: nn.Sequential(nn.Sequential(*stack()), nn.Sequential(*stack())), ["0", "1"]),
        (lambda: Model(without=nn.ModuleList(nn.Tanh() for _ in range(3))), []),
        (lambda: Model(holders=nn.ModuleList(Ignorant() for _ in range(3))), []),
        (lambda: Model(blocks=nn.ModuleList([shared := Block(), shared])), []),
        (lambda: Model(blocks=nn.ModuleList([shared := Block(), Block(), shared])), ["blocks.0", "blocks.1"]),
    ],
)  # fmt: skip
def test_repeated_blocks(make, expected):
    assert names_of(make()) == expected


def plain_model():
    """A model of modules of several sizes, without ties."""
    torch.manual_seed(0)
    return Model(
        embed=nn.Embedding(11, 6),
        blocks=nn.ModuleList([Block(6, num_experts=2), Block(3), nn.Sequential(Block(5), nn.BatchNorm1d(5))]),
        attention=nn.MultiheadAttention(8, 2),
        parts=nn.ModuleDict({"a": nn.Linear(9, 9), "b": nn.Conv1d(2, 3, 3)}),
        norm=nn.BatchNorm1d(7),
        lstm=nn.LSTM(3, 5),
        head=nn.Linear(6, 11),
    )


def wrapped_by_torch(model, policy, keeps_own_format=(), ignored=()):
    """Returns what torch's FSDP1 wraps, in order, and the calls of the policy."""
    wrapped, calls = [], []

    def counted(module, recurse, nonwrapped_numel):
        calls.append((module, recurse, nonwrapped_numel))
        return policy(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel)

    def record(module):
        wrapped.append(module)
        return module

    both = counted
    if keeps_own_format:
        keep = functools.partial(_wrap_module_cls_individually, module_classes=keeps_own_format)
        both = functools.partial(_or_policy, policies=[counted, keep])
    parameters = {parameter for module in ignored for parameter in module.parameters()}
    _recursive_wrap(model, both, record, {below for one in ignored for below in one.modules()}, parameters, True)
    return wrapped, calls


def units_among(wrapped):
    """Returns those that can be units, in the order in which torch wraps them."""
    units, taken = [], set()
    for module in wrapped:
        own = set(module.parameters()) - taken
        if own and not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            units.append(module)
            taken |= own
    return units


def by_size(numel, **given):
    return functools.partial(size_based_auto_wrap_policy, min_num_params=numel, **given)


POLICIES = {
    "blocks": functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block, nn.Sequential}),
    "layers": functools.partial(
        lambda_auto_wrap_policy, lambda_fn=lambda module: type(module) in (nn.Linear, nn.Embedding, nn.LSTM)
    ),
    **{f"size {numel}": by_size(numel) for numel in (20, 42, 100, 10_000)},
    "leaves": by_size(30, force_leaf_modules={Block, nn.MultiheadAttention}, exclude_wrap_modules={nn.ModuleList}),
}


@pytest.mark.parametrize("name", POLICIES)
def test_functions_choose_as_in_torch(name):
    """The same calls with the same numbers in the same order; what torch wraps is a unit if it can be one."""
    model, calls = plain_model(), []

    def policy(module, recurse, nonwrapped_numel):
        calls.append((module, recurse, nonwrapped_numel))
        return POLICIES[name](module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel)

    wrapped, expected_calls = wrapped_by_torch(model, POLICIES[name])
    plans = plan_wrapping(model, policy, replicated=())
    check_invariants(model, plans)
    assert calls == expected_calls
    units = units_among(wrapped)
    assert [plan.module for plan in plans] == units
    assert (name == "size 10000") == (not units)


@pytest.mark.parametrize("name", ["blocks", "layers", "size 42", "size 100"])
def test_functions_choose_as_in_torch_around_modules_of_their_own_format(name):
    model = plain_model()
    keeps = (nn.BatchNorm1d, nn.LayerNorm)
    # torch asks the policy about what is in modules that it does not go into: here out_proj, which is never called.
    wrapped, _ = wrapped_by_torch(model, POLICIES[name], keeps)
    plans = plan_wrapping(model, POLICIES[name], replicated=(), own_dtype_classes=keeps)
    check_invariants(model, plans)
    units = units_among(one for one in wrapped if one is not model.attention.out_proj)
    assert [plan.module for plan in plans] == units
    assert len([one for one in units if isinstance(one, keeps)]) == 5


def test_functions_choose_as_in_torch_around_ignored_modules():
    model = plain_model()
    ignored = [model.blocks[0].mix, model.embed, model.parts]
    whole = [parameter for module in ignored for parameter in module.parameters()]
    for name in ("blocks", "layers", "size 20", "size 42"):
        calls = []

        def policy(name=name, calls=calls, **asked):
            calls.append(tuple(asked.values()))
            return POLICIES[name](**asked)

        wrapped, expected_calls = wrapped_by_torch(model, POLICIES[name], ignored=ignored)
        plans = plan_wrapping(model, policy, replicated=whole)
        check_invariants(model, plans, whole)
        assert calls == expected_calls
        assert [plan.module for plan in plans] == [one for one in wrapped if not isinstance(one, nn.ModuleList)]


def test_objects_choose_as_in_torch():
    model = plain_model()
    classes = {Block, nn.Embedding, nn.ModuleDict, nn.LSTM}
    function = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=classes)
    wrapped, _ = wrapped_by_torch(model, function)
    for policy in (ModuleWrapPolicy(classes), CustomPolicy(lambda module: isinstance(module, tuple(classes)))):
        plans = plan_wrapping(model, policy, replicated=())
        assert [plan.module for plan in plans] == [one for one in wrapped if one is not model.parts]
        kept = plan_wrapping(model, policy, replicated=(), own_dtype_classes=(nn.BatchNorm1d,))
        norms = ["blocks.2.1", "norm"]
        assert [plan.name for plan in kept if plan.name not in norms] == [plan.name for plan in plans]
        assert [plan.name for plan in kept if plan.name in norms] == norms


def test_custom_policies_say_what_units_do_after_forward():
    model = plain_model()
    says = {
        model.head: {"reshard_after_forward": False},
        model.blocks[1]: True,
        model.embed: {"reshard_after_forward": 2},
    }
    plans = plan_wrapping(model, CustomPolicy(lambda module: says.get(module, False)), replicated=())
    assert [(plan.name, plan.reshard_after_forward) for plan in plans] == [
        ("embed", 2),
        ("blocks.1", None),
        ("head", False),
    ]


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            {"sharding_strategy": 1, "reshard_after_forward": True},
            "gives 'head' sharding_strategy=: all parameter groups share that option",
        ),
        ({"reshard_after_forward": "yes"}, "give True, False, a number of ranks"),
        ("yes", "should return False/True or a kwarg dict"),
        (None, "should return False/True or a kwarg dict"),
    ],
)
def test_custom_policies_that_say_what_units_cannot_do(said, message):
    model = plain_model()
    with pytest.raises(ConfigError, match=message):
        plan_wrapping(model, CustomPolicy(lambda module: said if module is model.head else False), replicated=())


EVERY = CustomPolicy(lambda module: True)


def test_what_has_nothing_to_gather_is_no_unit():
    frozen = nn.Linear(2, 2)
    model = Model(act=nn.Tanh(), nested=nn.Sequential(nn.Linear(2, 2)), frozen=frozen, part=nn.LayerNorm(3))
    assert names_of(model, EVERY) == ["nested.0", "frozen", "part"]
    whole = [*frozen.parameters(), model.part.bias]
    assert names_of(model, EVERY, whole=whole) == ["nested.0", "part"]
    assert names_of(model, EVERY, whole=list(model.parameters())) == []


def test_what_has_no_forward_is_no_unit():
    model = Model(holder=Ignorant(), listed=nn.ModuleList([nn.Linear(1, 1)]), weights=nn.ParameterList([torch.ones(2)]))
    assert names_of(model, EVERY) == ["listed.0"]
    assert names_of(Model(around=Model(holder=Ignorant())), EVERY) == ["around"]
    model.holder.forward = lambda x: x @ model.holder.weight
    assert [plan.name for plan in plan_wrapping(model, EVERY, replicated=())] == ["holder", "listed.0"]


def tied_model():
    embedding, head = nn.Embedding(5, 4), nn.Linear(4, 5)
    head.weight = embedding.weight
    return Model(embedding=embedding, block=Block(), head=head)


def test_tied_weights_go_into_the_unit_around_all_who_use_them():
    assert names_of(tied_model(), EVERY) == ["block.norm", "block.mix"]
    assert names_of(Model(part=tied_model()), EVERY) == ["part.block.norm", "part.block.mix", "part"]
    # One user of a weight inside of a module, the other one outside: no unit up to the root.
    inside = tied_model()
    outside = nn.Linear(4, 5)
    outside.weight = inside.head.weight
    assert names_of(Model(part=inside, outside=outside), EVERY) == ["part.block.norm", "part.block.mix"]
    # A weight that is whole ties nothing.
    tied = tied_model()
    names = ["block.norm", "block.mix", "head"]
    assert names_of(tied, EVERY, whole=[tied.embedding.weight]) == names


def test_a_weight_twice_in_one_module_is_not_tied():
    layer = nn.Bilinear(2, 2, 2)
    layer.again = layer.weight
    assert names_of(Model(layer=layer), EVERY) == ["layer"]


def test_shared_modules_are_one_unit():
    shared = Block()
    model = Model(first=Model(block=shared), second=Model(block=shared))
    assert names_of(model, ModuleWrapPolicy({Block})) == ["first.block"]
    # What is reached from two sides does not belong to the unit around it on one side.
    assert names_of(model, ModuleWrapPolicy({Model})) == []
    model.first.own = nn.Linear(2, 2)
    assert names_of(model, ModuleWrapPolicy({Model, Block})) == ["first.block", "first"]
    assert names_of(model, ModuleWrapPolicy({Model})) == []
    assert names_of(Model(around=model), CustomPolicy(lambda module: module is model)) == ["around"]


def test_a_unit_that_is_bypassed_is_none():
    """The layer is used by the block and by the model itself, which does not call the block."""
    block = Block()
    model = Model(block=block, mix=block.mix)
    assert names_of(model, ModuleWrapPolicy({Block})) == []
    assert names_of(model, ModuleWrapPolicy({Block, nn.Linear})) == ["block.mix", "block"]


def test_layers_of_torch_jit_are_no_units():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.jit.trace(nn.Linear(3, 3), torch.ones(2, 3))
    model = Model(compiled=compiled, plain=nn.Linear(3, 3))
    plans = plan_wrapping(model, EVERY, replicated=list(compiled.parameters()))
    assert [plan.name for plan in plans] == ["plain"]


def test_what_is_never_called_belongs_to_the_enclosing_unit():
    attention = Model(attention=nn.MultiheadAttention(4, 2))
    for policy in (EVERY, always_wrap_policy, ModuleWrapPolicy({nn.Linear}), by_size(1, force_leaf_modules=set())):
        assert "attention.out_proj" not in names_of(attention, policy)
    assert names_of(attention, ModuleWrapPolicy({nn.MultiheadAttention})) == ["attention"]
    assert names_of(attention, by_size(1)) == []  # as in torch, which looks not at what it does not go into
    assert names_of(attention, by_size(1), keeps_own_format=(nn.LayerNorm,)) == ["attention"]
    projections = nn.ModuleList([attention.attention.out_proj, nn.MultiheadAttention(4, 2).out_proj])
    assert names_of(Model(projections=projections)) == []


def test_parametrized_layers():
    """Their forward reads the weight, which is computed from what was gathered before it."""
    model = Model(layer=parametrizations.weight_norm(nn.Linear(3, 4)))
    assert names_of(model, ModuleWrapPolicy({nn.Linear})) == ["layer"]
    with pytest.raises(ConfigError, match=r"'layer.parametrizations.weight', a ParametrizationList: it computes"):
        plan_wrapping(model, EVERY, replicated=())


def test_modules_of_their_own_format_are_units():
    model = Model(block=Block(), norm=nn.LayerNorm(3), plain=nn.LayerNorm(2, elementwise_affine=False))
    assert names_of(model, ModuleWrapPolicy({Block}), keeps_own_format=(nn.LayerNorm,)) == [
        "block.norm",
        "block",
        "norm",
    ]
    blocks = Model(blocks=nn.ModuleList(stack()))
    assert names_of(blocks, keeps_own_format=(nn.LayerNorm,)) == [
        "blocks.0.norm",
        "blocks.0",
        "blocks.1.norm",
        "blocks.1",
    ]


def test_modules_of_their_own_format_that_can_be_no_units_are_refused():
    tied = tied_model()
    with pytest.raises(ConfigError, match=r"'embedding' can't be one: its weights are used from outside"):
        plan_wrapping(tied, None, replicated=(), own_dtype_classes=(nn.Embedding,))
    attention = Model(attention=nn.MultiheadAttention(4, 2))
    with pytest.raises(ConfigError, match=r"'attention.out_proj' can't be one: nn.MultiheadAttention reads"):
        plan_wrapping(attention, None, replicated=(), own_dtype_classes=(nn.Linear,))
