"""Methods that only the user's optimizer has: what they write reaches the model on all ranks, as in one process."""

from __future__ import annotations

import copy

import pytest
import torch
from harness import distributed
from oracles.weight_swapping_optimizers import ReplacingSGD, ScheduleFreeSGD, SignSAM, SwapSWA
from strategies import FP32, HALF, Pair, assert_masters_are_shown, batch

from booster import Booster
from booster.comm import group_rank
from booster.errors import BoosterError, ConfigError
from booster.optim import CAME, Adafactor, HybridAdam
from booster.plugins import GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin

pytestmark = pytest.mark.on_device


@pytest.mark.parametrize("strategy", FP32)
@distributed(2)
def test_a_schedule_free_optimizer_swaps_the_weights_of_the_model(strategy):
    pair = Pair(FP32[strategy](), ScheduleFreeSGD)
    for epoch in range(2):
        pair.on_both("train")
        pair.train(3 * epoch, 3 * epoch + 1, 3 * epoch + 2)
        trained = copy.deepcopy(pair.plain.state_dict())
        pair.on_both("eval")
        pair.assert_equal()
        assert any(not torch.equal(one, trained[name]) for name, one in pair.plain.state_dict().items())
    pair.on_both("train")
    pair.assert_equal()


class _HalvingAdam(HybridAdam):
    """Rounds weights within its own pass over them."""

    def train(self):
        pass

    @torch.no_grad()
    def eval(self):
        for group in self.param_groups:
            torch._foreach_mul_(group["params"], 0.5)


@pytest.mark.parametrize("make_optimizer", [ScheduleFreeSGD, _HalvingAdam])
@pytest.mark.parametrize("strategy", HALF)
@distributed(2)
def test_the_model_follows_masters_that_a_method_has_written(strategy, make_optimizer):
    pair = Pair(HALF[strategy](), make_optimizer)
    pair.optimizer.train()
    for step in range(2):
        pair.optimizer.zero_grad()
        pair.booster.backward(pair.losses(step)[0], pair.optimizer)
        pair.optimizer.step()
    assert pair.optimizer.num_skipped_steps == 0
    trained = pair.model(batch(0)).detach()
    pair.optimizer.eval()
    assert_masters_are_shown(pair.model)
    assert not torch.equal(pair.model(batch(0)).detach(), trained)


@pytest.mark.parametrize("strategy", FP32)
@distributed(2)
def test_steps_of_sharpness_aware_minimization(strategy):
    pair = Pair(FP32[strategy](), lambda parameters: SignSAM(parameters, lr=0.1, momentum=0.9))
    for step in range(3):
        for method in ("first_step", "second_step"):
            pair.backward(step)
            pair.on_both(method)
            pair.assert_equal()


@pytest.mark.parametrize("strategy", FP32)
@distributed(2)
def test_weights_that_are_exchanged_through_data(strategy):
    pair = Pair(FP32[strategy](), lambda parameters: SwapSWA(parameters, lr=0.1))
    for step in range(3):
        pair.train(step)
        pair.on_both("update_average")
    pair.on_both("swap")
    pair.assert_equal()
    pair.on_both("swap")
    pair.train(3)
    pair.assert_equal()


@pytest.mark.parametrize("strategy", FP32)
@distributed(2)
def test_a_step_that_replaces_the_memory_of_parameters(strategy):
    pair = Pair(FP32[strategy](), ReplacingSGD)
    pair.train(0, 1, 2)
    pair.assert_equal()


@pytest.mark.parametrize("strategy", FP32)
@distributed(2)
def test_a_learning_rate_finder_puts_everything_back(strategy):
    pair = Pair(FP32[strategy](), lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
    pair.train(0, 1)
    before = [
        (copy.deepcopy(one.state_dict()), copy.deepcopy(made.state_dict()))
        for one, made in ((pair.model, pair.optimizer), (pair.plain, pair.plain_optimizer))
    ]
    for step in range(2, 5):
        for group in (*pair.optimizer.param_groups, *pair.plain_optimizer.param_groups):
            group["lr"] *= 2
        pair.train(step)
    for (weights, state), one, made in zip(
        before, (pair.model, pair.plain), (pair.optimizer, pair.plain_optimizer), strict=True
    ):
        one.load_state_dict(weights)
        made.load_state_dict(state)
    pair.assert_equal()
    pair.train(5, 6)
    pair.assert_equal()


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "gemini", "fsdp", "hybrid_tp"])
@distributed(2)
def test_a_checkpoint_in_either_mode_continues(strategy, mode, tmp_path):
    pair = Pair(FP32[strategy](), ScheduleFreeSGD)
    pair.on_both("train")
    pair.train(0, 1)
    pair.on_both(mode)
    pair.booster.save(tmp_path / mode, pair.model, pair.optimizer)
    plain = pair.plain, pair.plain_optimizer
    pair = Pair(FP32[strategy](), ScheduleFreeSGD)
    pair.plain, pair.plain_optimizer = plain
    pair.booster.load(tmp_path / mode, pair.model, pair.optimizer)
    pair.assert_equal()
    pair.on_both("train")
    pair.train(2, 3)
    pair.on_both("eval")
    pair.assert_equal()


class _FailsOnOneRank(torch.optim.SGD):
    def swap(self):
        if torch.distributed.get_rank() == 1:
            raise ValueError("no average yet")


@pytest.mark.parametrize("strategy", ["zero1", "gemini", "fsdp", "hybrid_dp"])
@distributed(2)
def test_a_method_that_fails_on_one_rank_fails_on_all(strategy):
    pair = Pair(FP32[strategy](), lambda parameters: _FailsOnOneRank(parameters, lr=0.1))
    with pytest.raises((ValueError, BoosterError), match="no average yet"):
        pair.optimizer.swap()
    pair.train(0)
    pair.assert_equal()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@distributed(2)
def test_a_method_that_updates_from_scaled_gradients_is_refused(strategy):
    pair = Pair(HALF[strategy](), lambda parameters: SignSAM(parameters, lr=0.1))
    pair.booster.backward(pair.losses(0)[0], pair.optimizer)
    with pytest.raises(ConfigError, match="loss scale outside of step"):
        pair.optimizer.first_step()


@pytest.mark.parametrize(
    ("plugin", "options"), [(LowLevelZeroPlugin, {"stage": 2}), (GeminiPlugin, {}), (HybridParallelPlugin, {})]
)
@distributed(2)
def test_the_norm_after_a_method_is_that_of_unscaled_gradients(plugin, options):
    pair = Pair(Booster(plugin=plugin(precision="fp16", initial_scale=2.0**10, **options)), HybridAdam)
    pair.backward(0)
    pair.optimizer.prepare_states()
    expected = torch.nn.utils.get_total_norm([one.grad for one in pair.plain.parameters()])
    assert pair.optimizer.get_grad_norm() == pytest.approx(float(expected), rel=1e-2)  # float16 has 11 bits
    assert pair.optimizer.clip_grad_by_norm(1.0).item() == pytest.approx(float(expected), rel=1e-2)


@pytest.mark.parametrize("strategy", ["zero1", "gemini", "fsdp"])
@distributed(2)
def test_a_method_that_only_reads_leaves_graphs_and_gradients_alone(strategy):
    pair = Pair(FP32[strategy](), _Counting)
    loss, plain_loss = pair.losses(0)
    assert pair.optimizer.num_groups() == pair.plain_optimizer.num_groups() == 1
    pair.booster.backward(loss, pair.optimizer)
    plain_loss.backward()
    pair.on_both("step")
    pair.assert_equal()


class _Counting(torch.optim.SGD):
    def num_groups(self):
        return len(self.param_groups)


@pytest.mark.parametrize("strategy", ["gemini", "gemini_whole", "zero1", "fsdp"])
@distributed(2)
def test_weights_follow_a_step_after_a_forward_without_a_backward(strategy):
    pair = Pair(FP32[strategy](), lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    for step in range(3):
        pair.backward(step)
        pair.model(pair.part(step))  # for a metric, without torch.no_grad()
        pair.on_both("step")
        pair.on_both("zero_grad")
        pair.assert_equal()


@pytest.mark.parametrize("make_optimizer", [HybridAdam, torch.optim.AdamW])
@pytest.mark.parametrize("strategy", HALF)
@distributed(2)
def test_the_model_follows_masters_that_a_step_hook_has_written(strategy, make_optimizer):
    pair = Pair(HALF[strategy](), make_optimizer)

    @torch.no_grad()
    def clamp(optimizer, *_):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.clamp_(-0.05, 0.05)

    pair.optimizer.register_step_post_hook(clamp)
    pair.booster.backward(pair.losses(0)[0], pair.optimizer)
    pair.optimizer.step()
    assert_masters_are_shown(pair.model)


# States by `load_state_dict`.

KEEPING_STATES = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, amsgrad=True),
    "Adafactor": lambda parameters: Adafactor(parameters, beta1=0.9),
    "CAME": lambda parameters: CAME(parameters, lr=1e-3),
    "HybridAdam": lambda parameters: HybridAdam(parameters, lr=0.01),
}
SHARDING = [name for name in FP32 if name != "ddp"]


@pytest.mark.parametrize("name", KEEPING_STATES)
@pytest.mark.parametrize("strategy", FP32)
@distributed(2)
def test_a_state_dict_loads_where_it_came_from(strategy, name):
    pair = Pair(FP32[strategy](), KEEPING_STATES[name])
    pair.train(0, 1)
    state = copy.deepcopy(pair.optimizer.state_dict())
    other = Pair(FP32[strategy](), KEEPING_STATES[name])
    other.optimizer.load_state_dict(state)
    assert repr(other.optimizer.state_dict()["state"]) == repr(state["state"])
    pair.optimizer.load_state_dict(state)
    pair.train(2)
    pair.assert_equal()


@pytest.mark.parametrize("strategy", SHARDING)
@distributed(2)
def test_a_state_of_full_parameters_is_no_state_of_shards(strategy, tmp_path):
    pair = Pair(FP32[strategy](), KEEPING_STATES["AdamW"])
    pair.train(0)
    before = copy.deepcopy(pair.optimizer.state_dict())
    full = pair.plain_optimizer.state_dict()
    shapes = {id(one): one.shape for group in pair.optimizer.param_groups for one in group["params"]}
    with pytest.raises(ConfigError, match=r"load_state_dict\(\) was given .*booster.load_optimizer\(optimizer, path\)"):
        pair.optimizer.load_state_dict(full)
    assert repr(pair.optimizer.state_dict()) == repr(before)
    assert shapes == {id(one): one.shape for group in pair.optimizer.param_groups for one in group["params"]}
    # On all ranks, also if one of them alone is given it.
    with pytest.raises(ConfigError, match="load_state_dict"):
        pair.optimizer.load_state_dict(full if group_rank() == 1 else before)
    # What the message asks for.
    named = KEEPING_STATES["AdamW"](pair.plain.named_parameters())
    named.load_state_dict(full)
    pair.booster.save_optimizer(named, tmp_path / "plain")
    pair.booster.load_optimizer(pair.optimizer, tmp_path / "plain")
    pair.train(1)
    pair.assert_equal()


@distributed(2)
def test_an_optimizer_without_shards_takes_a_state_of_full_parameters():
    pair = Pair(FP32["ddp"](), KEEPING_STATES["AdamW"])
    pair.train(0)
    pair.optimizer.load_state_dict(copy.deepcopy(pair.plain_optimizer.state_dict()))
    pair.train(1)
    pair.assert_equal()
