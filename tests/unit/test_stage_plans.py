"""Where models may be cut into stages: units and gaps are those of the forward, for every model of the zoo."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from zoo import get_model, model_names

from booster.errors import ConfigError
from booster.plugins.hybrid_parallel.pipeline_parallel.stage_partition.partition import choose_stage_plan
from booster.plugins.hybrid_parallel.pipeline_parallel.stage_partition.stage_plan import (
    StagePlan,
    parameters_below,
    shared_parameter_names,
)

ALL = model_names(layer_variants=True)


def layers(path: str, number: int = 2) -> tuple[str, ...]:
    return tuple(f"{path}.{index}" for index in range(number))


# Written by hand from the models' forwards.
EXPECTED: dict[str, tuple[tuple[str, ...], dict[str, int], dict[str, int]]] = {
    "llama": (layers("model.layers"), {"model.embed_tokens": 0, "model.norm": 2, "lm_head": 2}, {}),
    "gpt2": (
        layers("transformer.h"),
        {"transformer.wte": 0, "transformer.wpe": 0, "transformer.ln_f": 2, "lm_head": 2},
        {},
    ),
    "bert": (layers("bert.encoder.layer"), {"bert.embeddings": 0, "cls": 2}, {}),
    "opt": (
        layers("model.decoder.layers"),
        {
            "model.decoder.embed_tokens": 0,
            "model.decoder.embed_positions": 0,
            "model.decoder.final_layer_norm": 2,
            "lm_head": 2,
        },
        {},
    ),
    "t5": (
        (*layers("encoder.block"), *layers("decoder.block")),
        {
            "shared": 0,
            "encoder.embed_tokens": 0,
            "encoder.final_layer_norm": 2,
            "decoder.embed_tokens": 2,
            "decoder.final_layer_norm": 4,
            "lm_head": 4,
        },
        {"encoder": 2},
    ),
    "vit": (layers("vit.layers"), {"vit.embeddings": 0, "vit.layernorm": 2, "classifier": 2}, {}),
    "whisper": (
        (*layers("model.encoder.layers"), *layers("model.decoder.layers")),
        {
            "model.encoder.conv1": 0,
            "model.encoder.conv2": 0,
            "model.encoder.embed_positions": 0,
            "model.encoder.layer_norm": 2,
            "model.decoder.embed_tokens": 2,
            "model.decoder.embed_positions": 2,
            "model.decoder.layer_norm": 4,
            "proj_out": 4,
        },
        {"model.encoder": 2},
    ),
    "bloom": (
        layers("transformer.h"),
        {
            "transformer.word_embeddings": 0,
            "transformer.word_embeddings_layernorm": 0,
            "transformer.ln_f": 2,
            "lm_head": 2,
        },
        {},
    ),
    "falcon": (layers("transformer.h"), {"transformer.word_embeddings": 0, "transformer.ln_f": 2, "lm_head": 2}, {}),
    "dlrm": ((*layers("bottom", 3), *layers("top")), {"tables": 3, "click": 5}, {}),
    "torch_transformer": (layers("encoder.layers"), {"embed": 0, "pool": 2, "head": 2}, {}),
    "unlike_sequence": (tuple(str(index) for index in range(11)), {}, {}),
}

# They have no list of modules that all flows through.
WITHOUT_CHAIN = {
    "mlp_odd",
    "frozen_unused_conditional",
    "multi_output_groups",
    "convit",
    "lstm",
    "routed_experts",
    "deepfm",
    "long_skip",
    "albert_pretraining",
    "albert_unpooled",
}


def on_meta(name: str) -> nn.Module:
    with torch.device("meta"):
        return get_model(name).construct()


@pytest.mark.parametrize("name", EXPECTED)
def test_expected_plan(name: str) -> None:
    units, gaps, carried = EXPECTED[name]
    plan = choose_stage_plan(on_meta(name))
    assert plan.layers == units
    assert dict(plan.gaps) == gaps
    assert dict(plan.skip_outputs) == carried
    assert plan.bounds is None
    assert plan.sequence is None
    assert plan.source


@pytest.mark.parametrize("name", [name for name in ALL if name not in WITHOUT_CHAIN])
def test_every_parameter_has_one_place(name: str) -> None:
    model = on_meta(name)
    plan = choose_stage_plan(model)
    placed = [full for one in (*plan.layers, *plan.gaps) for full, _ in parameters_below(model, one)]
    placed += shared_parameter_names(model, plan)
    assert sorted(placed) == sorted(full for full, _ in model.named_parameters(remove_duplicate=False))
    assert choose_stage_plan(get_model(name).build()) == plan


@pytest.mark.parametrize("name", sorted(WITHOUT_CHAIN))
def test_models_without_a_chain_are_refused(name: str) -> None:
    words = "runs one group of layers again and again" if "albert" in name else r"give split=|goes around"
    with pytest.raises(ConfigError, match=words):
        choose_stage_plan(on_meta(name))


class Recorder:
    """Notes how many units have run whenever a unit, or a module in a gap, is called."""

    def __init__(self, model: nn.Module, plan: StagePlan) -> None:
        self.order: list[str] = []
        self.num_done = 0
        self.seen: dict[str, set[float]] = {name: set() for name in plan.gaps}
        self.complete: dict[str, set[int]] = {name: set() for name in plan.skip_outputs}
        for name in plan.layers:
            module = model.get_submodule(name)
            module.register_forward_pre_hook(lambda *_, name=name: self.order.append(name))
            module.register_forward_hook(self._unit_done)
        for name in plan.gaps:
            for module in model.get_submodule(name).modules():
                module.register_forward_pre_hook(lambda *_, name=name: self.seen[name].add(self._place()))
        for name in plan.skip_outputs:
            model.get_submodule(name).register_forward_hook(
                lambda *_, name=name: self.complete[name].add(self.num_done)
            )

    def _unit_done(self, *_: Any) -> None:
        self.num_done += 1

    def _place(self) -> float:
        is_inside = len(self.order) > self.num_done
        return self.num_done + 0.5 * is_inside


def check_order(model: nn.Module, plan: StagePlan, run: Any) -> dict[str, set[float]]:
    """Runs a model and compares with its plan; returns the gaps in which modules were called."""
    recorder = Recorder(model, plan)
    run()
    assert tuple(recorder.order) == plan.layers
    for name, places in recorder.seen.items():
        assert places <= {plan.gaps[name]}, f"{name} runs in {places}, the plan has {plan.gaps[name]}"
    assert recorder.complete == {name: {gap} for name, gap in plan.skip_outputs.items()}
    return recorder.seen


@pytest.mark.parametrize("name", [name for name in ALL if name not in WITHOUT_CHAIN])
def test_plan_is_the_order_of_the_forward(name: str) -> None:
    entry = get_model(name)
    model = entry.build().eval()  # the fast path of torch's encoder layers must not be taken: gradients are on
    plan = choose_stage_plan(model)
    seen = check_order(model, plan, lambda: entry.loss(model, entry.make_batch(0, 4)))
    not_called = {name for name, places in seen.items() if not places}
    assert not_called <= {"shared", "pooler", "spare", "model.encoder.embed_positions", "bert.pooler"}, not_called


SMALL = {
    "vocab_size": 51,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "use_cache": False,
}
OPT = {
    "vocab_size": 51,
    "hidden_size": 16,
    "ffn_dim": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "use_cache": False,
}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "opt with projections": ("OPTConfig", "OPTForCausalLM", {**OPT, "word_embed_proj_dim": 8}),
    "opt": ("OPTConfig", "OPTForCausalLM", {**OPT, "word_embed_proj_dim": 16, "do_layer_norm_before": True}),
    "bart": ("BartConfig", "BartForConditionalGeneration", SMALL),
    "mbart": ("MBartConfig", "MBartForConditionalGeneration", SMALL),
    "pegasus": ("PegasusConfig", "PegasusForConditionalGeneration", SMALL),
    "marian": ("MarianConfig", "MarianMTModel", SMALL),
    "blenderbot": ("BlenderbotConfig", "BlenderbotForConditionalGeneration", SMALL),
    "blenderbot_small": ("BlenderbotSmallConfig", "BlenderbotSmallForConditionalGeneration", SMALL),
    "plbart": ("PLBartConfig", "PLBartForConditionalGeneration", SMALL),
    "mvp": ("MvpConfig", "MvpForConditionalGeneration", SMALL),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_order_of_other_families(name: str) -> None:
    config_name, class_name, settings = FAMILIES[name]
    transformers = pytest.importorskip("transformers")
    model = getattr(transformers, class_name)(getattr(transformers, config_name)(**settings)).eval()
    plan = choose_stage_plan(model)
    assert len(plan.layers) == (2 if "opt" in name else 4)
    ids = torch.randint(4, 51, (2, 7), generator=torch.Generator().manual_seed(0))
    seen = check_order(model, plan, lambda: model(input_ids=ids, labels=ids))
    # Some share one embedding by its weight: then `shared` is never called.
    assert {name for name, places in seen.items() if not places} <= {"model.shared"}


BERT = {"vocab_size": 51, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.mark.parametrize("name", ["CamembertForCausalLM", "CamembertForMaskedLM", "RobertaForCausalLM"])
def test_a_head_runs_last_wherever_it_is_registered(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**BERT, is_decoder="Causal" in name, use_cache=False)).eval()
    plan = choose_stage_plan(model)
    assert plan.gaps["lm_head"] == len(plan.layers) == 2
    ids = torch.randint(4, 51, (2, 7), generator=torch.Generator().manual_seed(0))
    seen = check_order(model, plan, lambda: model(input_ids=ids, labels=ids))
    assert all(seen.values())


@pytest.mark.parametrize("name", ["FlaubertWithLMHeadModel", "XLMWithLMHeadModel", "SqueezeBertForMaskedLM"])
def test_models_without_layers_to_divide_are_refused(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    kind = getattr(transformers, name)
    with torch.device("meta"):
        model = kind(kind.config_class(n_layers=2, num_hidden_layers=2, vocab_size=51))
    with pytest.raises(ConfigError, match="so its layers can't be divided over stages: use pp_size=1"):
        choose_stage_plan(model)


def _plan_of_sweep_model(name: str) -> StagePlan:
    pytest.importorskip("transformers")
    with torch.device("meta"):
        return choose_stage_plan(get_model(name).construct())


@pytest.mark.parametrize(
    ("name", "modules"),
    [
        ("MPNetForMaskedLM", ["mpnet.encoder.relative_attention_bias"]),
        ("RoFormerForMaskedLM", ["roformer.encoder.embed_positions"]),
        ("CpmAntForCausalLM", ["cpmant.position_bias"]),
        ("Gemma4ForCausalLM", ["model.embed_tokens_per_layer", "model.per_layer_projection_norm"]),
        ("Zamba2ForCausalLM", ["model.embed_tokens"]),
    ],
)
def test_what_every_layer_takes_besides_the_output_of_the_one_before_is_sent_on(name: str, modules: list[str]) -> None:
    plan = _plan_of_sweep_model(name)
    assert plan.skip_outputs == dict.fromkeys(modules, 0)
    assert all(plan.gaps[module] == 0 for module in modules)


def test_layers_of_several_classes_are_those_that_the_configuration_counts() -> None:
    assert _plan_of_sweep_model("JambaForCausalLM").layers == ("model.layers.0", "model.layers.1")


def test_a_forward_that_changes_its_embeddings_in_place_is_known() -> None:
    assert _plan_of_sweep_model("CTRLLMHeadModel").overwrites_embeddings
    assert not _plan_of_sweep_model("LlamaForCausalLM").overwrites_embeddings


def test_what_the_stages_read_of_a_module_has_it_on_all_of_them() -> None:
    assert "perceiver.input_preprocessor" not in _plan_of_sweep_model("PerceiverForMaskedLM").gaps


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(8, 8), nn.Linear(8, 3)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.mark.parametrize("place", ["stem", "layers.1.0", "head"])
def test_a_parametrization_is_no_list_of_layers(place: str) -> None:
    model = Stacked()
    torch.nn.utils.parametrizations.weight_norm(model.get_submodule(place))
    plan = choose_stage_plan(model)
    assert plan.layers == choose_stage_plan(Stacked()).layers
    assert plan.gaps == {"stem": 0, "head": 3}


class Towers(nn.Module):
    """Two stacks side by side, and one joint head."""

    def __init__(self, depth: int = 2, other: int = 2, *, is_traceable: bool = True) -> None:
        super().__init__()
        self.text = nn.ModuleDict({"layers": nn.ModuleList(block() for _ in range(other))})
        self.image = nn.ModuleDict({"layers": nn.ModuleList(block() for _ in range(depth))})
        self.head = nn.Linear(8, 3)
        self.is_traceable = is_traceable

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_traceable and x.sum() == 0:
            return x
        left, right = x, x
        for layer in self.text["layers"]:
            left = layer(left)
        for layer in self.image["layers"]:
            right = layer(right)
        return self.head(left + right)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def block() -> nn.Module:
    return Pair()


class Heads(nn.Module):
    """Modules of one class that get the same input: a list, but no chain."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(8, 8)
        self.heads = nn.ModuleList(block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.trunk(x)
        return torch.stack([head(x) for head in self.heads]).sum(dim=0)


class PlainList(nn.Module):
    """Linear layers in a list, one after the other; `tracks` leaves something behind on the model."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.norm = nn.LayerNorm(8)
        self.gain = nn.Parameter(torch.ones(8))
        self.last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        self.last = x
        return self.norm(x) * self.gain


class ResidualsAround(nn.Module):
    """The model's forward, not the layers', adds what went in: it flows past the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def test_two_towers_leave_one_beside() -> None:
    plan = choose_stage_plan(Towers(depth=3, other=2, is_traceable=False))
    assert plan.layers == layers("image.layers", 3)
    assert dict(plan.gaps) == {"text": 0, "head": 3}
    assert dict(plan.skip_outputs) == {"text": 0}  # the head needs what it gives
    plan = choose_stage_plan(Towers(depth=2, other=3, is_traceable=False))
    assert plan.layers == layers("text.layers", 3)
    assert dict(plan.gaps) == {"image": 3, "head": 3}
    assert not plan.skip_outputs


def test_layers_of_several_classes_are_divided_as_transformers_plan_says() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.OlmoHybridConfig(num_hidden_layers=4)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    plan = choose_stage_plan(model)
    assert len({type(model.get_submodule(unit)) for unit in plan.layers}) > 1
    assert plan.layers == tuple(f"model.layers.{index}" for index in range(4))


def test_equal_towers_are_ambiguous() -> None:
    model = Towers(is_traceable=False)
    with pytest.raises(ConfigError, match=r"several lists of layers of the same size, text.layers and image.layers"):
        choose_stage_plan(model)
    plan = choose_stage_plan(model, split=["image.layers.1"])
    assert plan.layers[plan.bounds[1]] == "image.layers.1"


def test_modules_side_by_side_are_no_chain() -> None:
    with pytest.raises(ConfigError, match=r"returns goes around|no list of layers that are known to run one after"):
        choose_stage_plan(Heads())


def test_list_of_simple_modules_is_a_chain_where_the_forward_shows_it() -> None:
    model = PlainList()
    plan = choose_stage_plan(model)
    assert plan.layers == layers("layers", 4)
    assert dict(plan.gaps) == {"norm": 4}
    assert shared_parameter_names(model, plan) == ("gain",)
    assert model.last is None  # its forward ran on a copy
    check_order(model, plan, lambda: model(torch.randn(2, 8)))


def test_execution_order_before_registration_order() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(8, 3)
            self.layers = nn.ModuleList(block() for _ in range(2))
            self.embed = nn.Linear(5, 8)
            self.twice = nn.LayerNorm(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.twice(self.embed(x))
            for layer in self.layers:
                x = layer(x)
            return self.head(self.twice(x))

    model = Backwards()
    plan = choose_stage_plan(model)
    assert dict(plan.gaps) == {"head": 2, "embed": 0}
    assert shared_parameter_names(model, plan) == ("twice.weight", "twice.bias")  # it runs in two gaps


def test_sequential_is_opened_where_layers_are_in_it() -> None:
    inner = nn.Sequential(block(), block(), block())
    model = nn.Sequential(nn.Linear(5, 8), inner, nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 3)))
    assert choose_stage_plan(model).layers == ("0", "1.0", "1.1", "1.2", "2")
    assert choose_stage_plan(nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))).layers == ("0.0", "0.1")


def test_a_module_at_several_places_of_a_sequential() -> None:
    act, linear = nn.Tanh(), nn.Linear(4, 4)
    plan = choose_stage_plan(nn.Sequential(nn.Linear(4, 4), act, nn.Linear(4, 4), act))
    assert plan.layers == ("0", "2")
    with pytest.raises(ConfigError, match="0, 2 are the same module"):
        choose_stage_plan(nn.Sequential(linear, act, linear))


def test_second_names_have_a_place_or_none() -> None:
    model = get_model("byte_gpt").build()
    model.again = model.blocks
    model.head_again = model.head
    model.embedding_again = model.embedding
    plan = choose_stage_plan(model)
    assert plan.layers == layers("blocks")
    assert plan.gaps["head_again"] == 2
    assert not any(name.startswith("again") for name in plan.gaps)
    assert shared_parameter_names(model, plan) == ("positions",)


def test_split_at_units() -> None:
    plan = choose_stage_plan(on_meta("llama"), split=["model.layers.1"])
    assert plan.bounds == (0, 1, 2)
    assert dict(plan.gaps) == EXPECTED["llama"][1]


def test_split_at_children_of_a_parent() -> None:
    entry = get_model("named_chain")
    model = entry.build()
    plan = choose_stage_plan(model, split=["left", "tail"])
    assert plan.layers == ("stem", "left", "right", "tail", "head")
    assert plan.bounds == (0, 1, 3, 5)
    check_order(model, plan, lambda: entry.loss(model, entry.make_batch(0, 2)))


@pytest.mark.parametrize(
    ("split", "words"),
    [
        (["transformer.h.7"], "no such module: did you mean 'transformer.h.[01]'"),
        (["nonsense"], "take a name of model.named_modules"),
        (["transformer.h.0"], "the first module that can be divided"),
        (["transformer.h.1", "transformer.h.1"], "more than once"),
        (["transformer.h.1.mlp"], "which is inside of 'transformer.h.1', one layer"),
    ],
)
def test_mistakes_in_a_split(split: Any, words: str) -> None:
    model = on_meta("gpt2")
    with pytest.raises(ConfigError, match=words):
        choose_stage_plan(model, split=split)


def test_split_in_the_wrong_order() -> None:
    model = get_model("glued_chain").build()
    with pytest.raises(ConfigError, match=r"not in the order.*write \['layers.1', 'layers.3'\]"):
        choose_stage_plan(model, split=["layers.3", "layers.1"])


def test_split_where_values_go_around() -> None:
    with pytest.raises(ConfigError, match=r"what 'layers\.[01]' returns goes around 'layers\.1'"):
        choose_stage_plan(ResidualsAround(), split=["layers.2"])
    with pytest.raises(ConfigError, match=r"the layers 'layers\.0' to .* goes around"):
        choose_stage_plan(ResidualsAround())


def test_execution_sequence() -> None:
    model = get_model("named_chain").build()
    sequence = ["stem", torch.tanh, "left", nn.functional.gelu, "right", torch.tanh, "tail", "head"]
    plan = choose_stage_plan(model, execution_sequence=sequence, split=["right"])
    assert plan.layers == ("stem", "left", "right", "tail", "head")
    assert plan.sequence == tuple(sequence)
    assert plan.bounds == (0, 2, 5)
    assert not plan.gaps
    with pytest.raises(ConfigError, match="not in the execution sequence"):
        choose_stage_plan(model, execution_sequence=sequence, split=["left.1"])


@pytest.mark.parametrize(
    ("sequence", "words"),
    [
        (["stem", "left", "right", "head"], r"leaves out modules with parameters \(tail\)"),
        (["stem", "left.1", "right", "tail", "head"], r"leaves out modules with parameters \(left.0\)"),
        (["stem", "left", "left.1", "right", "tail", "head"], "names 'left.1' and 'left', which holds it"),
        (["stem", "left", "right", "tail", "head", "tail"], "names 'tail' more than once"),
        (["stem", "lefft"], "no such module: did you mean 'left'"),
        ([torch.tanh], "has no names of modules"),
        ([], "has no names of modules"),
        ([nn.Linear(6, 12)], "not in the model: put it in"),
    ],
)
def test_mistakes_in_an_execution_sequence(sequence: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        choose_stage_plan(get_model("named_chain").build(), execution_sequence=sequence)


def test_execution_sequence_wants_names_and_all_parameters() -> None:
    model = get_model("named_chain").build()
    with pytest.raises(ConfigError, match="write its name, 'stem'"):
        choose_stage_plan(model, execution_sequence=[model.stem])
    listed = PlainList()
    with pytest.raises(ConfigError, match="the model's own gain"):
        choose_stage_plan(listed, execution_sequence=[*layers("layers", 4), "norm"])
