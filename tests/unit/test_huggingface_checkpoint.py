"""What is saved here opens with `from_pretrained`, and what `save_pretrained` wrote loads here."""

from __future__ import annotations

import json
import os
import warnings

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    BertConfig,
    BertForMaskedLM,
    CompileConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from booster.checkpoint_io import GeneralCheckpointIO
from booster.checkpoint_io.layout import MODEL, index_document, plan_files
from booster.checkpoint_io.saving.part import config_documents
from booster.errors import CheckpointError, ConfigError
from booster.interface import ModelWrapper

IO = GeneralCheckpointIO()


def _llama(tied):
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            vocab_size=37,
            tie_word_embeddings=tied,
        )
    )


MODELS = {
    "llama tied": (lambda: _llama(True), AutoModelForCausalLM),
    "llama untied": (lambda: _llama(False), AutoModelForCausalLM),
    "gpt2": (
        lambda: GPT2LMHeadModel(
            GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=16, vocab_size=37, bos_token_id=1, eos_token_id=2)
        ),
        AutoModelForCausalLM,
    ),
    "t5": (
        lambda: T5ForConditionalGeneration(
            T5Config(d_model=16, d_ff=24, num_layers=1, num_heads=2, d_kv=8, vocab_size=37)
        ),
        AutoModelForSeq2SeqLM,
    ),
    "bert": (
        lambda: BertForMaskedLM(
            BertConfig(
                hidden_size=16,
                intermediate_size=24,
                num_hidden_layers=1,
                num_attention_heads=2,
                max_position_embeddings=16,
                vocab_size=37,
            )
        ),
        AutoModelForMaskedLM,
    ),
}


@pytest.fixture(params=MODELS.values(), ids=MODELS.keys())
def case(request):
    return request.param


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        # Its own deprecations are transformers' business.
        warnings.filterwarnings("ignore", module="transformers")
        yield


def _build(make, seed):
    torch.manual_seed(seed)
    model = make()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


def _assert_equal(left, right):
    assert type(left) is type(right)
    left, right = left.state_dict(), right.state_dict()
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


@pytest.mark.parametrize("size", [4000, 10**6], ids=["shards", "one shard"])
@pytest.mark.parametrize("options", [{}, {"prefix": "fp16"}, {"use_safetensors": False}], ids=repr)
def test_from_pretrained_opens_what_was_saved(tmp_path, case, options, size):
    make, auto_class = case
    model = _build(make, 0)
    config_before = model.config.to_dict()
    IO.save_model(ModelWrapper(model), tmp_path / "m", shard=True, size_per_shard=size / 10**6, **options)
    assert model.config.to_dict() == config_before
    assert (len(os.listdir(tmp_path / "m")) > 4) is (size == 4000)
    loaded, report = auto_class.from_pretrained(
        tmp_path / "m", variant=options.get("prefix"), output_loading_info=True, local_files_only=True
    )
    assert not any(report.values())
    _assert_equal(loaded, model)


@pytest.mark.parametrize("options", [{}, {"prefix": "fp16"}, {"use_safetensors": False}], ids=repr)
def test_from_pretrained_opens_what_was_saved_over_an_older_one(tmp_path, options):
    for seed in range(3):
        model = _build(lambda: _llama(True), seed)
        IO.save_model(ModelWrapper(model), tmp_path / "m", shard=True, size_per_shard=0.004, **options)
        has_second_names = any(".b." in name for name in os.listdir(tmp_path / "m"))
        assert has_second_names is (seed == 1)
        loaded, report = AutoModelForCausalLM.from_pretrained(
            tmp_path / "m", variant=options.get("prefix"), output_loading_info=True, local_files_only=True
        )
        assert not any(report.values())
        _assert_equal(loaded, model)
        again = _build(lambda: _llama(True), 9)
        IO.load_model(ModelWrapper(again), tmp_path / "m")
        _assert_equal(again, model)


def test_the_number_format_is_in_the_config(tmp_path):
    model = _build(lambda: _llama(True), 0).bfloat16()
    IO.save_model(ModelWrapper(model), tmp_path / "m", shard=True)
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert config["architectures"] == ["LlamaForCausalLM"]
    _assert_equal(AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype="auto"), model)


def _documents(model, tmp_path):
    """What the model's own save_pretrained writes."""
    model.save_pretrained(tmp_path / "theirs")
    names = ("config.json", "generation_config.json")
    return {name: (tmp_path / "theirs" / name).read_bytes() for name in names if (tmp_path / "theirs" / name).exists()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_configs_are_those_of_save_pretrained_byte_for_byte(tmp_path, case, dtype):
    model = _build(case[0], 0).to(dtype)
    documents, before = config_documents(model), model.config.to_dict()
    assert documents["config.json"].startswith(b"{")
    assert model.config.to_dict() == before
    assert documents == _documents(model, tmp_path)


def test_what_was_loaded_and_changed_is_written_as_save_pretrained_does(tmp_path):
    _build(lambda: _llama(True), 0).save_pretrained(tmp_path / "first")
    model = LlamaForCausalLM.from_pretrained(tmp_path / "first", dtype=torch.bfloat16, local_files_only=True)
    model.config.custom = {"a": [1, 2.5, None]}
    model.generation_config.max_new_tokens = 7
    model.generation_config.compile_config = CompileConfig()
    documents = config_documents(model)
    assert model.generation_config.compile_config is not None
    assert b"compile_config" not in documents["generation_config.json"]
    assert documents == _documents(model, tmp_path)


def test_models_of_transformers_5_0_load(tmp_path):
    """Its models return the names that are needed; later ones change a record of them."""
    saved, loaded = (_build(lambda: _llama(True), seed) for seed in range(2))
    IO.save_model(ModelWrapper(saved), tmp_path / "m", shard=True)
    loaded._adjust_missing_and_unexpected_keys = lambda missing_keys, unexpected_keys: (missing_keys, unexpected_keys)
    IO.load_model(ModelWrapper(loaded), tmp_path / "m")
    _assert_equal(loaded, saved)


def test_adapters_are_saved_without_the_configs_of_their_base(tmp_path):
    """from_pretrained would make the base of them, find none of its names, and initialize it at random."""
    lora = LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    model, again = (get_peft_model(_build(lambda: _llama(True), seed), lora) for seed in range(2))
    IO.save_model(ModelWrapper(model), tmp_path / "m", shard=True)
    with pytest.raises((OSError, ValueError), match=r"config\.json"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "m", local_files_only=True)
    IO.load_model(ModelWrapper(again), tmp_path / "m")
    expected = again.state_dict()
    assert all(torch.equal(expected[name], value) for name, value in model.state_dict().items())
    merged = model.merge_and_unload()
    IO.save_model(ModelWrapper(merged), tmp_path / "merged", shard=True)
    _assert_equal(AutoModelForCausalLM.from_pretrained(tmp_path / "merged", local_files_only=True), merged)


class _Config:
    """Of another library, which knows none of transformers' attributes."""

    def __init__(self, text):
        self.text = text

    def to_json_string(self):
        return json.dumps(self.text) if isinstance(self.text, (str, set)) else self.text


@pytest.mark.parametrize("config", [None, {"a": 1}, object(), _Config, "text"], ids=repr)
def test_what_cannot_give_its_text_is_no_config(config):
    model = torch.nn.Linear(1, 1)
    model.config = config
    assert config_documents(model) == {}


def test_any_librarys_config_that_gives_its_text_is_written():
    model = torch.nn.Linear(1, 1)
    model.config = model.generation_config = _Config("\u00e4")
    assert config_documents(model) == dict.fromkeys(("config.json", "generation_config.json"), b'"\\u00e4"')
    model.can_generate = lambda: False
    assert list(config_documents(model)) == ["config.json"]
    assert vars(model.config) == {"text": "\u00e4"}


@pytest.mark.parametrize(("text", "reason"), [({1}, "not JSON serializable"), (7, "returned a int")])
def test_a_config_that_is_no_json_is_an_error(text, reason):
    model = torch.nn.Linear(1, 1)
    model.config = _Config(text)
    with pytest.raises(ConfigError, match=reason):
        config_documents(model)


def test_our_files_are_named_and_described_as_theirs(tmp_path, case):
    model = _build(case[0], 0)
    IO.save_model(ModelWrapper(model), tmp_path / "ours", shard=True, size_per_shard=6000e-6)
    model.save_pretrained(tmp_path / "theirs", max_shard_size=6000)
    assert set(os.listdir(tmp_path / "ours")) - {MODEL.names(is_safetensors=True).manifest} == set(
        os.listdir(tmp_path / "theirs")
    )
    ours, theirs = (
        json.loads((tmp_path / side / "model.safetensors.index.json").read_text()) for side in ("ours", "theirs")
    )
    assert ours["metadata"] == theirs["metadata"]
    assert ours["weight_map"].keys() == theirs["weight_map"].keys()
    configs = [(tmp_path / side / "config.json").read_bytes() for side in ("ours", "theirs")]
    assert configs[0] == configs[1]


@pytest.mark.parametrize("options", [{}, {"max_shard_size": "6KB"}, {"variant": "fp16"}], ids=repr)
def test_what_save_pretrained_wrote_loads(tmp_path, case, options):
    saved, loaded = _build(case[0], 0), _build(case[0], 1)
    saved.save_pretrained(tmp_path / "m", **options)
    IO.load_model(ModelWrapper(loaded), tmp_path / "m")
    _assert_equal(loaded, saved)


@pytest.mark.parametrize("size", [6000, 10**9], ids=["shards", "one shard"])
def test_bin_files_of_older_versions_load(tmp_path, case, size):
    """They hold every name of a tied tensor."""
    saved, loaded = _build(case[0], 0), _build(case[0], 1)
    state = saved.state_dict()
    sizes = {name: tensor.nbytes for name, tensor in state.items()}
    plan = plan_files(sizes, MODEL.names(is_safetensors=False), max_shard_bytes=size)
    for file_name, names in plan.files.items():
        torch.save({name: state[name] for name in names}, tmp_path / file_name)
    if plan.index is not None:
        (tmp_path / plan.index).write_text(json.dumps(index_document(plan, sizes)))
    IO.load_model(ModelWrapper(loaded), tmp_path)
    _assert_equal(loaded, saved)


def test_a_model_without_its_head_is_an_error_that_lists_the_names(tmp_path):
    saved, model = _build(lambda: _llama(False), 0), _build(lambda: _llama(False), 1)
    saved.model.save_pretrained(tmp_path / "base")
    with pytest.raises(CheckpointError, match=r"1 missing in the checkpoint:\n    lm_head\.weight\nLoad it"):
        IO.load_model(ModelWrapper(model), tmp_path / "base")
    head = model.lm_head.weight.clone()
    IO.load_model(ModelWrapper(model), tmp_path / "base", strict=False)
    _assert_equal(model.model, saved.model)
    assert torch.equal(model.lm_head.weight, head)


def test_the_names_of_the_base_model_get_and_lose_their_prefix(tmp_path):
    """Many files of releases hold a base model, whose tied head needs no file."""
    saved, model, base = (_build(MODELS["gpt2"][0], seed) for seed in range(3))
    saved.transformer.save_pretrained(tmp_path / "base")
    IO.load_model(ModelWrapper(model), tmp_path / "base")
    _assert_equal(model, saved)
    saved.save_pretrained(tmp_path / "whole")
    IO.load_model(ModelWrapper(base.transformer), tmp_path / "whole")
    _assert_equal(base.transformer, saved.transformer)
