"""HybridParallelPlugin in stages: the loops that people write around `execute_pipeline`."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from harness import distributed, preload, run_ranks
from hybrid_twins import sgd
from oracles.joined_slices import joined_over_ranks
from pipeline_cases import SCHEDULES
from pipeline_twins import StagedTwins
from torch import nn
from zoo import TRANSFORMERS_MODULES

from booster import Booster
from booster.comm import observe_communication
from booster.device import current_device
from booster.errors import ConfigError
from booster.plugins import HybridParallelPlugin, TorchDDPPlugin
from booster.plugins.hybrid_parallel.pipeline_parallel.schedules import schedule_from_name
from booster.plugins.hybrid_parallel.pipeline_parallel.schedules.simulation import simulate
from booster.pytree import map_tensors

preload(*TRANSFORMERS_MODULES)

pytestmark = pytest.mark.on_device
BY_SCHEDULE = pytest.mark.parametrize("schedule", SCHEDULES)
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def holds_the_last_part(schedule: str, pp_size: int = 2) -> bool:
    """Returns whether this rank does, of a pipeline of all ranks: a V ends where it began."""
    return dist.get_rank() == (0 if schedule == "zbv" else pp_size - 1)


def flat(outputs) -> list[torch.Tensor]:
    """Returns the tensors of outputs in their order."""
    if isinstance(outputs, torch.Tensor):
        return [outputs]
    values = outputs.values() if hasattr(outputs, "values") else outputs
    return [tensor for value in values if value is not None for tensor in flat(value)]


@BY_SCHEDULE
@distributed(world_size=2)
def test_what_transformers_captures_of_layers_travels_with_the_output(schedule):
    for name in ("llama", "bert", "gpt2", "t5", "vit"):
        twins = StagedTwins(name, schedule)
        for module in (*twins.plain.modules(), *twins.model.unwrap().modules()):
            if hasattr(module, "config"):
                module.config._attn_implementation = "eager"  # others return no attentions
                module.config.output_hidden_states = module.config.output_attentions = True
        whole, _ = twins.batch(0)
        outputs, loss = twins.forward(whole)
        found = twins.execute(whole, return_outputs=True)
        torch.testing.assert_close(found["loss"], loss.detach(), rtol=1e-5, atol=1e-7)
        if holds_the_last_part(schedule):
            names = {"hidden_states", "attentions"} if name != "t5" else {"encoder_hidden_states", "decoder_attentions"}
            assert names <= set(found["outputs"])
            torch.testing.assert_close(flat(found["outputs"]), flat(outputs), **CLOSE)


@BY_SCHEDULE
@distributed(world_size=2)
def test_hooks_that_are_always_called_end_every_forward_that_has_begun(schedule):
    twins, running, ended = StagedTwins("llama", schedule), [], []
    module = twins.model.unwrap().model

    def leave(module, args, output):
        running.remove(module)

    def end(module, args, kwargs, output):
        ended.append(sorted(kwargs))

    module.register_forward_pre_hook(lambda module, args: running.append(module))
    module.register_forward_hook(leave, always_call=True)
    module.register_forward_hook(end, with_kwargs=True, always_call=True)
    twins.execute(twins.batch(0)[0])
    assert ended
    assert all("input_ids" in names for names in ended)
    assert running == []


@BY_SCHEDULE
@distributed(world_size=2)
def test_evaluation_is_the_models_own_forward(schedule):
    for name in ("glued_chain", "tied_lm", "gpt2", "t5"):
        twins = StagedTwins(name, schedule).train()
        for model in (twins.plain, twins.model):
            model.eval()
        for step, samples in ((10, 4), (11, 7), (12, 1)):
            whole, _ = twins.batch(step, samples)
            with torch.no_grad():
                outputs, loss = twins.forward(whole)
            found = twins.execute(whole, trains=False, return_outputs=True)
            torch.testing.assert_close(found["loss"], loss, rtol=1e-5, atol=1e-7)
            assert not found["loss"].requires_grad
            if not holds_the_last_part(schedule):
                assert found["outputs"] is None
                continue
            assert type(found["outputs"]) is type(outputs)
            torch.testing.assert_close(flat(found["outputs"]), flat(outputs), **CLOSE)
        for model in (twins.plain, twins.model):
            model.train()
        twins.train()
        twins.assert_equal()


@BY_SCHEDULE
@distributed(world_size=2)
def test_evaluation_between_batches_leaves_training_as_it_was(schedule):
    twins = StagedTwins("tied_lm", schedule)
    for step in range(3):
        twins.execute(twins.batch(step + 10, 3)[0], trains=False)
        twins.backward(step)
        twins.execute(twins.batch(step + 20)[0], trains=False, return_loss=False)
        twins.step()
    twins.assert_equal()


@BY_SCHEDULE
@distributed(world_size=2)
def test_a_model_without_optimizer_is_evaluated(schedule):
    twins = StagedTwins("glued_chain", schedule)
    model, *_ = twins.booster.boost(twins.whole.build())
    batch, _ = twins.batch(0, 5)
    found = twins.booster.execute_pipeline(iter([batch]), model, twins.whole.criterion)
    torch.testing.assert_close(found["loss"], twins.forward(batch)[1].detach(), rtol=1e-5, atol=0)


@BY_SCHEDULE
@distributed(world_size=2)
def test_batches_of_any_size_and_sequences_of_any_length(schedule):
    twins = StagedTwins("tied_lm", schedule, num_microbatches=3)
    for step, (samples, length) in enumerate([(6, 13), (6, 9), (6, 13), (4, 9), (1, 5), (7, 13)]):
        whole, _ = twins.batch(step, samples)
        batch = {"ids": whole["ids"][:, :length]}
        expected = twins.forward(batch)[1]
        expected.backward()
        torch.testing.assert_close(twins.execute(batch)["loss"], expected.detach(), rtol=1e-5, atol=0)
        twins.step()
    twins.assert_equal()


@distributed(world_size=2)
def test_metadata_that_is_sent_each_time_changes_nothing():
    twins = StagedTwins("t5", enable_metadata_cache=False)
    for step, samples in enumerate((4, 3, 4)):
        expected, found = twins.backward(step, samples)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
        twins.step()
    twins.assert_equal()


class Events:
    """Names of parameters as gradients arrive, and "reduced" as a reduction over data-parallel ranks starts."""

    def __init__(self, twins: StagedTwins) -> None:
        self.found: list[str] = []
        self.own = [(name, one) for name, one in twins.model.unwrap().named_parameters() if not one.is_meta]
        for name, parameter in self.own:
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: self.found.append(name))

    def on_start(self, operation, sent, received):
        if operation.name == "reduce_scatter":
            self.found.append("reduced")

    def on_end(self, operation):
        pass


@BY_SCHEDULE
@distributed(world_size=4)
def test_gradients_are_reduced_once_while_the_last_microbatch_runs(schedule):
    twins = StagedTwins("tied_lm", schedule, pp_size=2, zero_stage=1, num_microbatches=4)
    events, num_buckets = Events(twins), len(twins.optimizer._reducer.buckets)
    for step in range(2):
        events.found.clear()
        with observe_communication(events):
            twins.backward(step)
        reduced = [index for index, name in enumerate(events.found) if name == "reduced"]
        arrived = [index for index, name in enumerate(events.found) if name != "reduced"]
        assert reduced, events.found
        assert reduced[0] < arrived[-1], events.found
        # Each of them after all gradients of its bucket, of which there is one for each of the microbatches.
        assert 4 in Counter(events.found[: reduced[0]]).values(), events.found
        if step == 1:  # how often a parameter is used is known by then
            assert len(reduced) == num_buckets
        events.found.clear()
        with observe_communication(events):
            twins.step()
        assert step == 0 or not events.found
    twins.assert_equal()


@BY_SCHEDULE
@distributed(world_size=4)
def test_nothing_is_reduced_under_no_sync(schedule):
    twins = StagedTwins("glued_chain", schedule, pp_size=2, zero_stage=1)
    events = Events(twins)
    with observe_communication(events), twins.booster.no_sync(twins.model, twins.optimizer):
        twins.backward(0)
    assert events.found
    assert "reduced" not in events.found
    twins.backward(1)
    twins.step()
    twins.assert_equal()


@BY_SCHEDULE
@distributed(world_size=4)
def test_the_loss_is_on_every_rank(schedule):
    twins = StagedTwins("glued_chain", schedule, pp_size=2)
    _, part = twins.batch(0)
    found = twins.execute(part)["loss"]
    torch.testing.assert_close(found, twins.forward(part)[1].detach(), rtol=1e-5, atol=0)
    assert found.shape == ()
    assert twins.execute(part, return_loss=False)["loss"] is None


@BY_SCHEDULE
@distributed(world_size=2)
def test_a_loss_that_is_not_broadcast_is_on_the_last_stage_only(schedule):
    twins = StagedTwins("glued_chain", schedule, broadcast_loss=False)
    for step in range(2):
        whole, _ = twins.batch(step)
        expected = twins.forward(whole)[1]
        expected.backward()
        found = twins.execute(whole)["loss"]
        assert (found is not None) == holds_the_last_part(schedule)
        if found is not None:
            torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=0)
        twins.step()
    twins.assert_equal()


@BY_SCHEDULE
@distributed(world_size=2)
def test_outputs_of_training_are_those_of_the_whole_batch(schedule):
    twins = StagedTwins("gpt2", schedule, num_microbatches=3)
    whole, _ = twins.batch(0, 5)
    outputs, loss = twins.forward(whole)
    found = twins.execute(whole, return_outputs=True)
    torch.testing.assert_close(found["loss"], loss.detach(), rtol=1e-5, atol=0)
    if not holds_the_last_part(schedule):
        assert found["outputs"] is None
        return
    torch.testing.assert_close(found["outputs"].logits, outputs.logits.detach(), **CLOSE)
    torch.testing.assert_close(found["outputs"].loss, loss.detach(), rtol=1e-5, atol=0)
    assert not found["outputs"].logits.requires_grad


@distributed(world_size=2)
def test_iterators_that_end_together_end_the_loop_on_all_ranks():
    twins = StagedTwins("glued_chain")
    batches = iter([twins.batch(0)[0], twins.batch(1)[0]])
    num_batches = 0
    while True:
        try:
            twins.booster.execute_pipeline(batches, twins.model, twins.whole.criterion, twins.optimizer)
        except StopIteration:
            break
        num_batches += 1
    assert num_batches == 2
    # Nothing is broken by it.
    twins.execute(twins.batch(2)[0])
    twins.optimizer.step()


@distributed(world_size=2)
def test_a_direct_call_says_what_to_write():
    twins = StagedTwins("glued_chain")
    with pytest.raises(ConfigError, match=r"booster\.execute_pipeline\(data_iter, model, criterion, optimizer\)"):
        twins.model(**twins.batch(0)[0])
    with pytest.raises(ConfigError, match=r"booster\.execute_pipeline\(data_iter, model, criterion, optimizer\)"):
        twins.model.unwrap()(**twins.batch(0)[0])
    twins.train()
    twins.assert_equal()


@BY_SCHEDULE
@distributed(world_size=2)
def test_schedulers_step_and_epochs_of_a_boosted_loader(schedule):
    twins = StagedTwins("glued_chain", schedule)
    whole, _ = twins.batch(0, 10)
    samples = [{name: tensor[index] for name, tensor in whole.items()} for index in range(10)]
    raw = twins.whole.build()
    optimizer = sgd(raw)
    plain_optimizer = sgd(twins.plain)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in (optimizer, plain_optimizer)]
    loader = torch.utils.data.DataLoader(samples, batch_size=4)
    model, optimizer, _, loader, schedulers[0] = twins.booster.boost(raw, optimizer, None, loader, schedulers[0])
    for _ in range(2):
        batches = iter(loader)
        for batch in torch.utils.data.DataLoader(samples, batch_size=4):
            twins.forward(batch)[1].backward()
            plain_optimizer.step()
            plain_optimizer.zero_grad()
            twins.booster.execute_pipeline(batches, model, twins.whole.criterion, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        assert next(batches, None) is None
        for scheduler in schedulers:
            scheduler.step()
    assert schedulers[0].get_last_lr() == schedulers[1].get_last_lr()
    expected = {name: tensor.cpu() for name, tensor in twins.plain.state_dict().items()}
    torch.testing.assert_close(joined_over_ranks(model), expected, rtol=2e-4, atol=2e-6)


def losses_of(make_plugin) -> list[float]:
    """The same script under any plugin."""
    twins = StagedTwins("glued_chain", make_plugin=make_plugin)
    losses = []
    for step in range(3):
        whole = map_tensors(lambda tensor: tensor.to(current_device()), twins.whole.entry.make_batch(step, 4))
        size, rank = twins.plugin.dp_size, twins.plugin.dp_rank
        part = {name: tensor[4 * rank // size : 4 * (rank + 1) // size] for name, tensor in whole.items()}
        found = twins.execute(part, return_outputs=True)
        assert found["loss"] is not None
        twins.booster.clip_grad_norm_(twins.optimizer, 0.5)
        twins.optimizer.step()
        twins.optimizer.zero_grad()
        mean = found["loss"].double().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / dist.get_world_size())
    return losses


def test_the_same_script_gives_the_same_losses_without_stages():
    staged, replicated = run_ranks(losses_of, 2, None), run_ranks(losses_of, 2, TorchDDPPlugin)
    for found, expected in zip(staged, replicated, strict=True):
        assert found == pytest.approx(expected, rel=1e-5)


def sum_over_tokens(outputs, batch) -> torch.Tensor:
    """The loss of whatever tokens count, as a sum."""
    scores, labels = outputs.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
    return nn.functional.cross_entropy(scores.float(), labels, reduction="sum")


@BY_SCHEDULE
@distributed(world_size=4)
def test_tokens_count_alike_wherever_they_are(schedule):
    """Samples with other numbers of tokens that count, over microbatches, calls and ranks."""
    twins = StagedTwins("gpt2", schedule, num_microbatches=3)

    def labelled(step, samples):
        whole = twins.whole.entry.make_batch(step, samples * 2)
        counts = torch.arange(len(whole["labels"])) % 7 + 3 * step
        whole["labels"] = whole["labels"].masked_fill(torch.arange(12) > counts[:, None], -100)
        whole = map_tensors(lambda tensor: tensor.to(current_device()), whole)
        rank = twins.plugin.dp_rank
        return whole, {name: tensor[rank * samples : (rank + 1) * samples] for name, tensor in whole.items()}

    def num_tokens(batch):
        return int((batch["labels"][:, 1:] != -100).sum())

    total, sums = 0, []
    for step, samples in ((0, 5), (1, 4)):
        whole, part = labelled(step, samples)
        sums.append(sum_over_tokens(twins.plain(**whole), whole))
        total += num_tokens(whole)
        with twins.booster.accumulate(twins.model, twins.optimizer, 2):
            found = twins.booster.execute_pipeline(
                iter([part]), twins.model, sum_over_tokens, twins.optimizer, num_items=num_tokens(part)
            )
            expected = sum_over_tokens(twins.plain(**part), part).detach()
            torch.testing.assert_close(found["loss"], expected, rtol=1e-5, atol=0)
            twins.optimizer.step()
            twins.optimizer.zero_grad()
    (sum(sums) / total).backward()
    twins.plain_optimizer.step()
    twins.assert_equal()


@distributed(world_size=2)
def test_a_scaled_loss_overflows_on_one_stage_and_no_rank_steps():
    twins = StagedTwins("glued_chain", precision="fp16", initial_scale=2**8, hysteresis=1)
    overflows = [False]

    def spoil(gradient):
        return torch.full_like(gradient, float("inf")) if overflows[0] else gradient

    for name, parameter in twins.model.unwrap().named_parameters():
        if name == "layers.3.down.weight":  # only the last stage's
            parameter.register_hook(spoil)

    def train(step):
        before = joined_over_ranks(twins.model)
        twins.execute(twins.batch(step)[0])
        twins.optimizer.step()
        twins.optimizer.zero_grad()
        after = joined_over_ranks(twins.model)
        return [name for name in before if not torch.equal(before[name], after[name])]

    assert train(0)
    overflows[0] = True
    assert not train(1)
    assert twins.optimizer.num_skipped_steps == 1
    assert twins.optimizer.loss_scaler.state_dict()["scale"] == 2**7
    overflows[0] = False
    assert train(2)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
@distributed(world_size=4)
def test_norms_count_every_parameter_once(norm_type):
    for name, arguments in (("tied_lm", {}), ("glued_chain", {"zero_stage": 1}), ("gpt2", {"tp_size": 2})):
        twins = StagedTwins(name, optimizer=sgd, **arguments)
        twins.backward(0)
        found = twins.booster.clip_grad_norm_(twins.optimizer, 0.01, norm_type)
        expected = nn.utils.clip_grad_norm_(twins.plain.parameters(), 0.01, norm_type)
        torch.testing.assert_close(torch.as_tensor(float(found)), expected.cpu(), rtol=1e-5, atol=0)
        twins.step()
        twins.assert_equal()


@BY_SCHEDULE
@pytest.mark.parametrize("microbatches", [1, 2, 5, 8])
@distributed(world_size=(2, 4))
def test_no_stage_keeps_more_activations_than_the_schedule_says(schedule, microbatches, world_size):
    twins = StagedTwins("glued_chain", schedule, pp_size=world_size, num_microbatches=microbatches)
    twins.execute(twins.batch(0, microbatches)[0])
    num_chunks = SCHEDULES[schedule].get("num_model_chunks", 1)
    theory = simulate(schedule_from_name(schedule), world_size, microbatches, num_chunks)
    run = twins.model.last_pipeline_run
    assert run.num_microbatches == microbatches
    assert run.peak_live == theory.peak_live[dist.get_rank()]
    twins.model.eval()
    twins.execute(twins.batch(1, microbatches)[0], trains=False)
    assert twins.model.last_pipeline_run.peak_live == 0


@distributed(world_size=4)
def test_what_a_stage_holds_is_its_own():
    """No rank has the whole model: parameters, states, gradients."""
    twins = StagedTwins("glued_chain", pp_size=4).train()
    own = {name for name, _ in twins.model.named_parameters()}
    everything = {name for name, _ in twins.plain.named_parameters()}
    rank = dist.get_rank()
    expected = {name for name in everything if name.startswith(f"layers.{rank}.")} | {"gains"}
    expected |= {name for name in everything if name.startswith("embed.") and rank == 0}
    expected |= {name for name in everything if name.startswith(("norm.", "head.")) and rank == 3}
    assert own == expected
    states = {one.name.rpartition(".")[0] for one in twins.optimizer.checkpoint_state().slices()}
    assert states == expected


@distributed(world_size=2)
def test_a_pipeline_runs_on_after_its_data_ended_and_a_stage_was_frozen():
    plugin = HybridParallelPlugin(pp_size=2, num_microbatches=2, precision="fp32", execution_sequence=["0", "1"])
    booster = Booster(plugin=plugin)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def run(batches):
        return booster.execute_pipeline(
            iter(batches), model, lambda outputs, _: outputs.square().mean(), optimizer, return_loss=True
        )

    batch = torch.ones(4, 8, device=booster.device)
    first = run([batch])["loss"]
    optimizer.step()
    optimizer.zero_grad()
    for parameter in model.parameters():
        if dist.get_rank() == 0:
            parameter.requires_grad_(False)
    with pytest.raises(StopIteration):
        run([])
    assert run([batch])["loss"] < first


@distributed(world_size=2)
def test_a_pipeline_stage_may_have_no_parameters():
    plugin = HybridParallelPlugin(pp_size=2, num_microbatches=2, precision="fp32", execution_sequence=["0", "1"])
    booster = Booster(plugin=plugin)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    for _ in range(2):
        batch = torch.ones(4, 8, device=booster.device)
        losses.append(
            booster.execute_pipeline(
                iter([batch]), model, lambda outputs, _: outputs.square().mean(), optimizer, return_loss=True
            )["loss"]
        )
        optimizer.step()
        optimizer.zero_grad()
    assert losses[1] < losses[0]
