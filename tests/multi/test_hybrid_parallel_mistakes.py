"""What users get wrong with HybridParallelPlugin: one error on all ranks that says what to write."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import distributed
from torch import nn
from torch.nn.utils import parametrize

from booster import Booster
from booster.errors import CheckpointError, ConfigError, DesyncError
from booster.plugins import HybridParallelPlugin

pytestmark = pytest.mark.on_device


class Pair(nn.Module):
    """A column-parallel and a row-parallel layer, and one that stays whole."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6)
        self.last = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (batch, 6) to (batch, 3)."""
        return self.last(x + self.down(F.gelu(self.up(x))))


PLAN = {"up": "colwise", "down": "rowwise"}


def pair():
    torch.manual_seed(0)
    return Pair()


def boosted(model=None, make_optimizer=torch.optim.AdamW, **arguments):
    model = model or pair()
    plugin = HybridParallelPlugin(**{"tp_size": 2, "precision": "fp32", "plan": PLAN, **arguments})
    booster = Booster(plugin=plugin)
    return booster, *booster.boost(model, make_optimizer(model.parameters()))[:2]


def shapes(model):
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


@distributed(world_size=2)
def test_arguments_are_refused_when_the_plugin_is_made():
    with pytest.raises(ConfigError, match="pp_size=2 without num_microbatches and microbatch_size"):
        HybridParallelPlugin(tp_size=1, pp_size=2)
    with pytest.raises(ConfigError, match="tp_size=3 needs groups of 3 ranks, which do not divide world_size=2"):
        HybridParallelPlugin(tp_size=3)
    with pytest.raises(ConfigError, match="leave custom_policy out"):
        HybridParallelPlugin(tp_size=2, plan=PLAN, custom_policy=PLAN)
    with pytest.raises(ConfigError, match="growth_factor"):
        HybridParallelPlugin(tp_size=2, growth_factor=0.5)
    with pytest.raises(ConfigError, match="set enable_sequence_parallelism=True, or leave the mode out"):
        HybridParallelPlugin(tp_size=2, sequence_parallelism_mode="ring")


@distributed(world_size=2)
def test_the_configuration_style():
    plugin = HybridParallelPlugin.from_config({"tensor": {"size": 2, "mode": "1d"}}, precision="fp32")
    assert plugin.axis_sizes() == {"dp": 1, "pp": 1, "sp": 1, "tp": 2}
    assert HybridParallelPlugin.from_config({}, zero_stage=1).axis_sizes() == {"dp": 2, "pp": 1, "sp": 1, "tp": 1}
    assert HybridParallelPlugin.from_config({"data": 2}).dp_size == 2
    for config, said in [
        ({"tensor": 2}, "has no mode: write tensor="),
        ({"tensor": {"size": 2, "mode": "2d"}}, "tp_mode='2d' arranges q \\* q ranks, which tp_size=2 is not"),
        ({"tensor": {"size": 2, "mode": "2.5d"}}, "tp_mode='2.5d' with tp_size=2 has no depth: give tp_depth"),
        ({"tensor": {"size": 2, "mode": "1D"}}, "mode '1D' is unknown"),
        ({"tensor": {"size": 4, "mode": "1d"}}, "which do not divide world_size=2"),
        ({"pipeline": 2}, "pp_size=2 without num_microbatches and microbatch_size"),
        ({"data": 1}, "data=1 times pipeline=1 and tensor=1 is 1 ranks, but the world size is 2"),
    ]:
        with pytest.raises(ConfigError, match=said):
            HybridParallelPlugin.from_config(config)
    with pytest.raises(ConfigError, match="tp_size=2 was given in addition to 'tensor'=2 of the configuration"):
        HybridParallelPlugin.from_config({"tensor": {"size": 2, "mode": "1d"}}, tp_size=2)


@distributed(world_size=2)
def test_other_arguments_on_another_rank():
    rank = dist.get_rank()
    with pytest.raises(DesyncError, match="rank 0 has tp_size=1, rank 1 has tp_size=2"):
        HybridParallelPlugin(tp_size=1 + rank)
    for name, values in {"max_norm": (0.0, 1.0), "parallel_output": (True, False), "zero_stage": (0, 1)}.items():
        model = pair()
        with pytest.raises(DesyncError, match=name):
            boosted(model, **{name: values[rank]})
        assert shapes(model) == shapes(pair())
    with pytest.raises(DesyncError, match="plan="):
        boosted(plan=PLAN if rank else {"last": "colwise_gather_output"})


@distributed(world_size=2)
def test_an_argument_that_one_rank_alone_has_wrong():
    with pytest.raises(ConfigError, match="tp_size=0 is not a number of ranks"):
        HybridParallelPlugin(tp_size=dist.get_rank() * 2)


@distributed(world_size=2)
def test_precision_given_twice():
    with pytest.raises(ConfigError, match="a HybridParallelPlugin that has precision='fp32'"):
        Booster(plugin=HybridParallelPlugin(tp_size=2, precision="fp32"), mixed_precision="bf16")


@distributed(world_size=2)
@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({"upper": "colwise"}, "'upper', which matches no module"),
        ({"": "colwise"}, "'', which matches no module"),
        ({"up": "columns"}, "columns"),
        ({"up": "colwise"}, "up"),
    ],
)
def test_plans_that_cannot_be_carried_out_change_nothing(plan, said):
    model = pair()
    expected, numbers = shapes(model), {name: one.clone() for name, one in model.state_dict().items()}
    with pytest.raises(ConfigError, match=said):
        boosted(model, plan=plan)
    assert shapes(model) == expected
    assert all(torch.equal(one, numbers[name]) for name, one in model.state_dict().items())
    x = torch.ones(2, 6)
    assert torch.equal(model(x), pair()(x))


@distributed(world_size=2)
def test_a_plan_that_one_rank_alone_has_wrong():
    with pytest.raises(DesyncError, match=r"plan=\{'up': .* plan=\{'upper': "):
        boosted(plan={"upper": "colwise"} if dist.get_rank() else PLAN)
    model = pair()
    if dist.get_rank():
        model.upper = model.up
        del model.up
    before = shapes(model)
    with pytest.raises(ConfigError, match="'up', which matches no module"):
        boosted(model, plan=PLAN)
    assert shapes(model) == before


@distributed(world_size=2)
def test_optimizers_that_look_at_whole_tensors():
    model = pair()
    with pytest.raises(ConfigError, match="LBFGS"):
        boosted(model, torch.optim.LBFGS)
    assert shapes(model) == shapes(pair())


@distributed(world_size=2)
def test_other_models_on_other_ranks():
    torch.manual_seed(0)
    model = pair()
    if dist.get_rank():
        model.last = nn.Linear(6, 4)
    with pytest.raises(DesyncError, match=r"last\.(weight|bias)"):
        boosted(model)


@distributed(world_size=2)
def test_no_sync_without_the_optimizer():
    booster, model, optimizer = boosted()
    with pytest.raises(ConfigError, match=r"write booster\.no_sync\(model, optimizer\)"):
        booster.no_sync(model)
    with booster.no_sync(model, optimizer):
        booster.backward(model(torch.ones(1, 6, device=booster.device)).sum(), optimizer)


@distributed(world_size=2)
def test_a_model_that_is_boosted_twice():
    _, model, _ = boosted()
    with pytest.raises(ConfigError):
        boosted(model.unwrap())


@distributed(world_size=2)
def test_a_stack_is_needed_to_compute_layers_again():
    with pytest.raises(ConfigError, match="Pair has no stack of equal layers to recompute"):
        boosted(gradient_checkpoint_config=True)


class ConvolvedLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(6), nn.Conv1d(6, 6, 3, padding=1)

    def forward(self, x):
        return x + self.mix(self.norm(x).transpose(1, 2)).transpose(1, 2)


class Convolved(nn.Module):
    """Layers that combine neighbouring tokens."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(ConvolvedLayer() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@distributed(world_size=2)
def test_layers_that_combine_tokens_beside_attention_are_no_stack_to_split():
    plugin = HybridParallelPlugin(
        precision="fp32", enable_sequence_parallelism=True, sequence_parallelism_mode="all_to_all", sp_size=2
    )
    with pytest.raises(ConfigError, match=r"layers\.0\.mix is a Conv1d, which mixes tokens"):
        Booster(plugin=plugin).boost(Convolved())


@distributed(world_size=2)
def test_a_plan_is_checked_on_one_rank_too():
    plugin = HybridParallelPlugin(tp_size=1, precision="fp32", plan={"nonsense.*": "colwise"})
    with pytest.raises(ConfigError, match=r"nonsense\.\*"):
        Booster(plugin=plugin).boost(pair())


@distributed(world_size=2)
def test_explain_changes_nothing_and_needs_no_other_rank():
    model = pair()
    plugin = HybridParallelPlugin(tp_size=2, precision="fp32", plan=PLAN)
    if dist.get_rank() == 0:
        text = plugin.explain(model)
        assert all(name in text for name in ("up", "down", "colwise", "rowwise"))
        with torch.device("meta"):
            plugin.explain(Pair())
    assert shapes(model) == shapes(pair())
    assert torch.equal(model(torch.ones(1, 6)), pair()(torch.ones(1, 6)))


@distributed(world_size=2)
def test_pipelines_of_one_stage():
    booster, model, optimizer = boosted()
    outcome = booster.execute_pipeline(
        iter([torch.ones(2, 6)]), model, lambda outputs, _: outputs.square().mean(), optimizer, return_outputs=True
    )
    assert outcome["loss"] > 0
    assert outcome["outputs"].shape == (2, 3)
    optimizer.step()


class Embedded(nn.Module):
    """An embedding before a column-parallel and a row-parallel layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.embed = nn.Linear(8, 16), nn.Linear(16, 8), nn.Embedding(10, 8)

    def forward(self, tokens):
        return self.down(torch.tanh(self.up(self.embed(tokens))))


@distributed(world_size=2)
def test_a_vocabulary_parallel_embedding_refuses_foreign_tokens():
    plan = {"embed": "vocab", "up": "colwise", "down": "rowwise"}
    booster, model, _ = boosted(Embedded(), plan=plan)
    model(torch.tensor([[0, 9]], device=booster.device))
    if booster.device.type == "cpu":
        for token in (-1, 10):
            with pytest.raises(IndexError, match=f"index {token} is out of range of 10 embeddings"):
                model(torch.tensor([[0, token]]))


@distributed(world_size=2)
def test_the_configuration_s_data_counts_sequence_ranks():
    further = {"sp_size": 2, "enable_sequence_parallelism": True, "sequence_parallelism_mode": "all_to_all"}
    HybridParallelPlugin.from_config({"data": 1}, **further)
    with pytest.raises(ConfigError, match="sp_size=2 is 4 ranks, but the world size is 2"):
        HybridParallelPlugin.from_config({"data": 2}, **further)


@distributed(world_size=2)
def test_a_save_of_shards_that_were_replaced_after_boost(tmp_path):
    booster, model, _ = boosted()
    up = model.unwrap().up
    parametrize.register_parametrization(up, "weight", nn.Identity())
    with pytest.raises(CheckpointError, match=r"up\.parametrizations.*renamed or replaced after boost.*undo it"):
        booster.save_model(model, tmp_path / "a", shard=True)
    parametrize.remove_parametrizations(up, "weight", leave_parametrized=False)
    booster.save_model(model, tmp_path / "a", shard=True)
    before = up.weight
    up.weight = nn.Parameter(before.detach().clone())
    with pytest.raises(CheckpointError, match=r"'up\.weight': a sharded parameter was renamed or replaced"):
        booster.save_model(model, tmp_path / "b", shard=True)
    up.weight = before
    booster.save_model(model, tmp_path / "b", shard=True)


@pytest.mark.parametrize("arguments", [{}, {"zero_stage": 1}])
@distributed(world_size=4, fresh=True)
def test_num_items_that_differs_on_the_ranks_of_one_model_is_an_error_on_all(arguments):
    booster, model, optimizer = boosted(**arguments)
    rank = dist.get_rank()
    booster.backward(model(torch.ones(2, 6)).sum(), optimizer, num_items=2 + rank // 2)  # may differ along dp
    optimizer.step()
    optimizer.zero_grad()
    booster.backward(model(torch.ones(2, 6)).sum(), optimizer, num_items=2 + (rank == 3))
    with pytest.raises(DesyncError, match=r"num_items=2 on rank 2 and num_items=3 on rank 3.*of the whole batch"):
        optimizer.step()


class Codebook(Pair):
    """Its codes follow the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.zeros(6), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (batch, 6) to (batch, 3)."""
        with torch.no_grad():
            self.codes.add_(x.mean(0))
        return super().forward(x + self.codes)


@pytest.mark.parametrize("arguments", [{"tp_size": 1, "plan": None}, {"tp_size": 1, "plan": None, "zero_stage": 1}])
@distributed(world_size=2, fresh=True)
def test_a_forward_that_writes_weights_by_its_own_batch_is_an_error_on_all(arguments):
    booster, model, optimizer = boosted(Codebook(), **arguments)
    booster.backward(model(torch.full((2, 6), 1.0 + dist.get_rank())).sum(), optimizer)
    with pytest.raises(ConfigError, match=r"wrote to weights \('codes'\).*as a buffer"):
        optimizer.step()


class Gated(nn.Module):
    """Features of a rank's own layers between `up` and `down`."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 16), nn.PReLU(), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (batch, 8) to (batch, 8)."""
        return self.down(self.act(self.up(x)))


class CallsAnActivationAgain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Gated()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (batch, 8) to (batch, 8)."""
        return x + self.mlp.act(self.mlp(x))


@distributed(world_size=2)
def test_a_module_on_sharded_features_that_is_called_on_all_of_them():
    _, model, _ = boosted(nn.Sequential(Gated(), nn.Linear(8, 3)), plan=None)
    model(torch.randn(4, 8))
    _, model, _ = boosted(CallsAnActivationAgain(), plan=None)
    with pytest.raises(ConfigError, match=r"'mlp.act', which is used on sharded features, was called from outside"):
        model(torch.randn(4, 8))
