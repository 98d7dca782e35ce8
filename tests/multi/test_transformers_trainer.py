"""transformers' Trainer under Booster plugins: its loop, evaluation, checkpoints and resume."""

from __future__ import annotations

import pytest
import torch
from harness import distributed, preload, run_ranks
from oracles.joined_slices import joined_over_ranks

pytest.importorskip("accelerate", reason="needs the extra 'trainer'")
preload("transformers.models.gpt2.modeling_gpt2", "transformers.trainer", "accelerate")

from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments  # noqa: E402

from booster import Booster  # noqa: E402
from booster.comm import barrier, group_rank  # noqa: E402
from booster.errors import ConfigError  # noqa: E402
from booster.integrations.transformers import BoosterTrainer  # noqa: E402
from booster.plugins import (  # noqa: E402
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)

PLUGINS = {
    "ddp": TorchDDPPlugin,
    "zero 2": lambda: LowLevelZeroPlugin(stage=2, precision="fp32", overlap_allgather=True),
    "gemini": lambda: GeminiPlugin(precision="fp32", min_chunk_size_m=1e-3, search_range_m=2e-3),
    "fsdp": TorchFSDPPlugin,
    "tp": lambda: HybridParallelPlugin(tp_size=2, precision="fp32"),
}


def make_model():
    torch.manual_seed(2)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=20, n_positions=8, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, bos_token_id=0, eos_token_id=1,
        )
    )  # fmt: skip


def make_dataset(num_samples, seed):
    tokens = torch.randint(0, 20, (num_samples, 8), generator=torch.Generator().manual_seed(seed))
    labels = tokens.clone()
    for row in range(0, num_samples, 3):  # unequal numbers of tokens
        labels[row, 5:] = -100
    return [{"input_ids": one, "labels": label} for one, label in zip(tokens, labels, strict=True)]


def arguments_for(folder, **given):
    settings = {
        "output_dir": str(folder),
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "learning_rate": 0.01,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "train_sampling_strategy": "sequential",
        "dataloader_pin_memory": False,
        "warmup_steps": 2,
    }
    return TrainingArguments(**(settings | given))


def accuracy(prediction):
    found, labels = prediction.predictions[:, :-1].argmax(-1), prediction.label_ids[:, 1:]
    counted = labels != -100
    return {"accuracy": float((found == labels)[counted].mean()), "rows": float(len(labels))}


class Stop(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = state.global_step >= self.step


def make_trainer(name, folder, callbacks=(), **given):
    return BoosterTrainer(
        Booster(plugin=PLUGINS[name]()),
        make_model(),
        arguments_for(folder, **given),
        train_dataset=make_dataset(48, 1),
        eval_dataset=make_dataset(10, 2),
        compute_metrics=accuracy,
        callbacks=list(callbacks),
    )


def run_plain(folder, given):
    """The Trainer itself, in one process."""
    trainer = Trainer(
        model=make_model(),
        args=arguments_for(folder, **given),
        train_dataset=make_dataset(48, 1),
        eval_dataset=make_dataset(10, 2),
        compute_metrics=accuracy,
    )
    before = trainer.evaluate()
    trainer.train()
    return losses_of(trainer), before, trainer.evaluate(), dict(trainer.model.state_dict())


def losses_of(trainer):
    return [(one["loss"], one["grad_norm"], one["learning_rate"]) for one in trainer.state.log_history if "loss" in one]


def run_boosted(name, folder, given):
    trainer = make_trainer(name, folder, **given)
    before = trainer.evaluate()
    trainer.train()
    return losses_of(trainer), before, trainer.evaluate(), joined_over_ranks(trainer.model_wrapped)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", list(PLUGINS))
def test_losses_norms_and_metrics_are_those_of_one_process(name, accumulate, tmp_path):
    one = {"gradient_accumulation_steps": accumulate, "per_device_train_batch_size": 8}
    [expected] = run_ranks(run_plain, 1, tmp_path / "plain", one)
    two = one | ({} if name == "tp" else {"per_device_train_batch_size": 4})
    for found in run_ranks(run_boosted, 2, name, tmp_path / "boosted", two):
        assert len(found[0]) == 6
        torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(expected[0]), rtol=1e-5, atol=1e-6)
        for metrics, plain in zip(found[1:3], expected[1:3], strict=True):
            assert metrics["eval_rows"] == 10
            assert metrics["eval_accuracy"] == pytest.approx(plain["eval_accuracy"])
        weights = {key: value for key, value in expected[3].items() if key in found[3]}
        for key in weights:
            if key.endswith("c_attn.bias"):  # the keys' gradient is zero up to rounding, by which AdamW divides it
                weights[key][16:32] = found[3][key][16:32] = 0
        torch.testing.assert_close(found[3], weights, rtol=1e-5, atol=1e-6)


def count_tokens(name, folder, given):
    """Losses, and the number of tokens seen: of the Trainer in one process, or of a BoosterTrainer."""
    data = {"train_dataset": make_dataset(48, 1)}
    if name is None:
        trainer = Trainer(model=make_model(), args=arguments_for(folder, **given), **data)
    else:
        trainer = make_trainer(name, folder, **given)
    trainer.train()
    assert trainer.get_total_train_batch_size(trainer.args) == 16
    return losses_of(trainer), trainer.state.num_input_tokens_seen


@pytest.mark.parametrize("averages", [True, False])
def test_ranks_that_compute_a_batch_together_count_it_once(averages, tmp_path):
    given = {
        "max_steps": 3,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "include_num_input_tokens_seen": True,
        "average_tokens_across_devices": averages,
    }
    [(losses, num_tokens)] = run_ranks(count_tokens, 1, None, tmp_path / "plain", given)
    assert num_tokens == 3 * 16 * 8
    for found in run_ranks(count_tokens, 2, "tp", tmp_path / "tp", given):
        torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(losses), rtol=1e-5, atol=1e-6)
        assert found[1] == num_tokens


@distributed(world_size=2)
@pytest.mark.parametrize("name", list(PLUGINS))
def test_resume_in_the_middle_of_an_epoch_is_exact(name, tmp_path):
    given = {
        "train_sampling_strategy": "random",
        "max_steps": 9,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 3,
    }
    whole = make_trainer(name, tmp_path / "a", **given)
    whole.train()
    saving = given | {"save_strategy": "steps", "save_steps": 4, "save_total_limit": 1}
    stopped = make_trainer(name, tmp_path / "b", [Stop(5)], **saving)
    stopped.train()
    assert stopped.state.global_step == 5
    resumed = make_trainer(name, tmp_path / "b", **saving)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 9
    assert losses_of(resumed)[-5:] == losses_of(whole)[-5:]
    expected = joined_over_ranks(whole.model_wrapped)
    for key, found in joined_over_ranks(resumed.model_wrapped).items():
        assert torch.equal(found, expected[key]), key
    [folder] = (tmp_path / "b").glob("checkpoint-*")
    assert folder.name == "checkpoint-9"
    assert not [one.name for one in folder.iterdir() if one.suffix in (".pt", ".pth", ".bin")]
    loaded = GPT2LMHeadModel.from_pretrained(folder)
    assert loaded.config.n_embd == 16
    resumed.save_model(str(tmp_path / "m"))
    final = GPT2LMHeadModel.from_pretrained(tmp_path / "m").state_dict()
    assert all(torch.equal(final[key], value) for key, value in expected.items() if key in final)


@distributed(world_size=2)
@pytest.mark.parametrize("name", ["ddp", "zero 2"])
def test_the_best_model_is_loaded_and_a_second_train_goes_further(name, tmp_path):
    best = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    trainer = make_trainer(name, tmp_path, load_best_model_at_end=True, metric_for_best_model="loss", **best)
    trainer.train()
    losses = {one["step"]: one["eval_loss"] for one in trainer.state.log_history if "eval_loss" in one}
    assert len(losses) == 3
    assert trainer.evaluate()["eval_loss"] == pytest.approx(min(losses.values()), rel=1e-5)
    assert trainer.predict(make_dataset(10, 2)).predictions.shape == (10, 8, 20)
    trainer.args.max_steps = 2
    trainer.train()
    assert trainer.state.global_step == 2


@distributed(world_size=2)
@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_checkpoints_of_a_model_with_adapters_open_with_peft(name, tmp_path):
    peft = pytest.importorskip("peft")

    def adapted(folder=tmp_path, **given):
        trainer = make_trainer(name, folder, **given)
        torch.manual_seed(4)
        lora = peft.LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True)
        trainer.model = trainer.model_wrapped = peft.get_peft_model(make_model(), lora)
        return trainer

    saving = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "learning_rate": 0.1}
    whole = adapted(**saving)
    whole.train()
    whole.save_model(str(tmp_path / "final"))
    expected = {key: value for key, value in joined_over_ranks(whole.model_wrapped).items() if "lora" in key}
    for folder in (tmp_path / "checkpoint-4", tmp_path / "final"):
        opened = peft.PeftModel.from_pretrained(make_model(), folder).state_dict()
        assert all(torch.equal(opened[key], value) for key, value in expected.items())
        with pytest.raises(OSError):  # noqa: PT011  (it looks for the base, of which the adapter has no name)
            GPT2LMHeadModel.from_pretrained(folder, local_files_only=True)
    assert not (tmp_path / "final" / "model.safetensors").exists()
    resumed = adapted(**saving)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert losses_of(resumed) == losses_of(whole)
    best = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "metric_for_best_model": "loss"}
    trainer = adapted(tmp_path / "best", **saving, **best, save_only_model=True)
    trainer.train()
    losses = [one["eval_loss"] for one in trainer.state.log_history if "eval_loss" in one]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(min(losses), rel=1e-5)


@distributed(world_size=2)
def test_the_order_follows_the_seeds_of_the_arguments(tmp_path):
    def order_of(sampler=None, **given):
        trainer = make_trainer("ddp", tmp_path, train_sampling_strategy="random", **given)
        if sampler is not None:
            trainer._get_train_sampler = lambda *_: sampler
        return trainer.get_train_dataloader().state_dict()["seed"]

    assert [order_of(seed=1), order_of(seed=2), order_of(seed=1, data_seed=5)] == [1, 2, 5]
    users = torch.utils.data.RandomSampler(make_dataset(48, 1), generator=torch.Generator().manual_seed(7))
    assert order_of(users, seed=1) == 7


@distributed(world_size=2)
def test_batches_of_equal_lengths_are_found_again(tmp_path):
    given = {"train_sampling_strategy": "group_by_length", "max_steps": 9}
    whole = make_trainer("ddp", tmp_path / "a", **given)
    whole.train()
    saving = given | {"save_strategy": "steps", "save_steps": 4}
    make_trainer("ddp", tmp_path / "b", [Stop(4)], **saving).train()
    resumed = make_trainer("ddp", tmp_path / "b", **saving)
    resumed.train(resume_from_checkpoint=True)
    assert losses_of(resumed) == losses_of(whole)


def with_random_tokens(rows):
    """Collate, and replace tokens at random, as for a masked language model."""
    tokens = torch.stack([one["input_ids"] for one in rows])
    masked = torch.where(torch.rand(tokens.shape) < 0.3, 0, tokens)
    return {"input_ids": masked, "labels": tokens}


@distributed(world_size=2)
@pytest.mark.parametrize("sampling", ["random", "group_by_length"])
def test_random_samples_are_found_again(sampling, tmp_path):
    def trained(folder, callbacks=(), resume=None, **given):
        settings = {"train_sampling_strategy": sampling, "gradient_accumulation_steps": 2, "max_steps": 7}
        trainer = make_trainer("ddp", folder, callbacks, **(settings | given))
        trainer.data_collator = with_random_tokens
        torch.manual_seed(0)
        trainer.train(resume_from_checkpoint=resume)
        return losses_of(trainer)

    whole = trained(tmp_path / "a")
    saving = {"save_strategy": "steps", "save_steps": 4}  # three steps are an epoch
    assert trained(tmp_path / "b", [Stop(4)], **saving) == whole[:4]
    assert trained(tmp_path / "b", resume=True, **saving) == whole


class RowCount:
    """Metric that is computed after the last batch."""

    def __init__(self):
        self.num_rows = 0

    def __call__(self, prediction, compute_result):
        self.num_rows += len(prediction.label_ids)
        if not compute_result:
            return None
        num_rows, self.num_rows = self.num_rows, 0
        return {"rows": float(num_rows)}


@distributed(world_size=2)
def test_metrics_of_batches_are_computed_after_the_last_one(tmp_path):
    trainer = make_trainer("ddp", tmp_path)
    trainer.args.batch_eval_metrics, trainer.compute_metrics = True, RowCount()
    assert [trainer.evaluate()["eval_rows"] for _ in range(2)] == [10, 10]


@distributed(world_size=2)
def test_resume_passes_over_what_a_crash_left_incomplete(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 2}
    make_trainer("ddp", tmp_path, max_steps=4, **saving).train()
    barrier()
    if group_rank() == 0:
        (tmp_path / "checkpoint-4" / "trainer_state.json").unlink()  # written after the training state
        (tmp_path / "checkpoint-9").mkdir()
    barrier()
    resumed = make_trainer("ddp", tmp_path, max_steps=4, **saving)
    for step in (4, 9, 100):
        with pytest.raises(ConfigError, match=f"checkpoint-{step}' is not a directory with training_state"):
            resumed.train(resume_from_checkpoint=tmp_path / f"checkpoint-{step}")
    resumed.train(resume_from_checkpoint=True)
    assert [one["step"] for one in resumed.state.log_history if "loss" in one] == [1, 2, 3, 4]
    assert (tmp_path / "checkpoint-4" / "trainer_state.json").exists()
    with pytest.raises(ConfigError, match=r"no complete checkpoint.*save_only_model=True"):
        make_trainer("ddp", tmp_path / "none").train(resume_from_checkpoint=True)


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(make_dataset(48, 1))


@distributed(world_size=2)
def test_a_stream_trains_and_is_not_resumed_inside_of_an_epoch(tmp_path):
    losses = []
    for dataset in (Stream(), make_dataset(48, 1)):
        trainer = make_trainer("ddp", tmp_path, max_steps=3, save_strategy="steps", save_steps=3)
        trainer.train_dataset = dataset
        trainer.train()
        losses.append(losses_of(trainer))
    assert losses[0] == losses[1]
    trainer = make_trainer("ddp", tmp_path, max_steps=6)
    trainer.train_dataset = Stream()
    with pytest.raises(ConfigError, match="ignore_data_skip=True"):
        trainer.train(resume_from_checkpoint=True)


@distributed(world_size=2)
def test_loops_of_older_versions_find_what_they_call(tmp_path):
    """Trainer of transformers 5.0 clips by the accelerator, and has no sampling strategies."""
    trainers = [make_trainer("zero 2", tmp_path, max_steps=2) for _ in range(2)]
    older, newer = trainers
    older._clip_grad_norm = lambda model: older.accelerator.clip_grad_norm_(model.parameters(), 0.5)
    for trainer in trainers:
        trainer.train()
    assert losses_of(older) == losses_of(newer)
    arguments = arguments_for(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(TrainingArguments, "train_sampling_strategy")
        del arguments.train_sampling_strategy
        BoosterTrainer(Booster(plugin="torch_ddp"), make_model(), arguments)


@distributed(world_size=2)
def test_weights_in_bf16_train(tmp_path):
    trainer = BoosterTrainer(
        Booster(plugin=LowLevelZeroPlugin(stage=2, precision="bf16")),
        make_model(),
        arguments_for(tmp_path, max_steps=3),
        train_dataset=make_dataset(48, 1),
        eval_dataset=make_dataset(10, 2),
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.model.lm_head.weight.dtype is torch.bfloat16
    assert trainer.evaluate()["eval_loss"] != before


@distributed(world_size=2)
def test_a_checkpoint_opens_under_another_plugin(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 3, "lr_scheduler_type": "constant"}
    first = make_trainer("zero 2", tmp_path, max_steps=3, **saving)
    first.train()
    second = make_trainer("ddp", tmp_path, max_steps=6, lr_scheduler_type="constant")
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    whole = make_trainer("ddp", tmp_path / "whole", max_steps=6, lr_scheduler_type="constant")
    whole.train()
    for found, expected in zip(losses_of(second), losses_of(whole), strict=True):
        assert found == pytest.approx(expected, rel=1e-4)


@distributed(world_size=2)
def test_mistakes_are_refused_on_all_ranks(tmp_path):
    for given, message in [
        ({"bf16": True}, r"TrainingArguments\(bf16=True\).*mixed_precision"),
        ({"torch_compile": True}, "compile=True"),
        ({"auto_find_batch_size": True}, "booster estimate"),
        ({"accelerator_config": {"split_batches": True}}, "split_batches"),
        ({"train_sampling_strategy": "batch_rebalance"}, "batch_rebalance"),
    ]:
        with pytest.raises(ConfigError, match=message):
            make_trainer("ddp", tmp_path, **given)
    with pytest.raises((ConfigError, RuntimeError), match="bf16"):
        make_trainer("ddp", tmp_path, bf16=group_rank() == 0)
    with pytest.raises(ConfigError, match="give the Booster first"):
        BoosterTrainer(make_model(), arguments_for(tmp_path))
    with pytest.raises(ConfigError, match="pp_size=2"):
        BoosterTrainer(
            Booster(plugin=HybridParallelPlugin(pp_size=2, num_microbatches=2)), make_model(), arguments_for(tmp_path)
        )
