"""What pipeline stages are asked for and cannot be: one error on all ranks that says what to write, nothing changed."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness import distributed
from pipeline_twins import StagedTwins
from zoo import WholeBatches, get_model

from booster import Booster
from booster.errors import ConfigError, DesyncError
from booster.plugins.hybrid_parallel.plugin import HybridParallelPlugin

pytestmark = pytest.mark.on_device


def boosted(name="glued_chain", num_layers=None, model=None, **arguments):
    raw = model if model is not None else WholeBatches(get_model(name, num_layers)).build()
    given = {"pp_size": 2, "precision": "fp32", "num_microbatches": 2, **arguments}
    booster = Booster(plugin=HybridParallelPlugin(**given))
    return booster, *booster.boost(raw, torch.optim.SGD(raw.parameters(), lr=0.1))[:2]


@distributed(world_size=2)
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"num_microbatches": None}, "give num_microbatches=4, or microbatch_size=1"),
        ({"microbatch_size": 1}, "leave one of them out"),
        ({"num_microbatches": 0}, "num_microbatches=0"),
        ({"pp_style": "zigzag"}, "pp_style='zigzag' is not known: choose one of"),
        ({"pp_style": "interleaved"}, "num_model_chunks"),
        ({"pp_style": "zbv"}, "num_model_chunks=2"),
        ({"pp_style": "1f1b", "num_model_chunks": 2}, "num_model_chunks"),
        ({"zero_stage": 2}, "zero_stage=1"),
        ({"num_layers_per_stage": [4]}, "num_layers_per_stage"),
        ({"num_layers_per_stage": [2, 3]}, "adds up to 5 layers, but the model has 4"),
        ({"num_layers_per_stage": [4, 0]}, "num_layers_per_stage"),
        ({"split": ["layers.7"]}, "'layers.7'"),
        ({"split": ["layers.1", "layers.2"]}, "split"),
        ({"execution_sequence": ["embed", "layers.9"]}, "'layers.9'"),
        ({"execution_sequence": ["embed", "head"]}, "leaves out modules with parameters"),
        ({"pp_size": 3}, "3"),
    ],
    ids=str,
)
def test_arguments_that_cannot_be(arguments, said):
    with pytest.raises(ConfigError, match=said):
        boosted(**arguments)


@distributed(world_size=4)
def test_more_parts_than_layers():
    with pytest.raises(ConfigError, match=r"has 2 layers to divide .* but the pipeline has 4 places"):
        boosted("llama", pp_size=4)
    with pytest.raises(ConfigError, match=r"has 4 layers to divide .* but the pipeline has 8 places"):
        boosted(pp_size=4, pp_style="zbv", num_model_chunks=2)


@distributed(world_size=2)
def test_models_without_a_way_to_divide():
    with pytest.raises(ConfigError, match="give split="):
        boosted("mlp_odd")
    with pytest.raises(ConfigError, match="one group of layers again and again"):
        boosted("albert_pretraining")


@distributed(world_size=2)
def test_other_arguments_on_another_rank():
    rank = dist.get_rank()
    with pytest.raises(DesyncError, match="num_layers_per_stage"):
        boosted(num_layers_per_stage=[2 + rank, 2 - rank])
    with pytest.raises(DesyncError, match="num_microbatches"):
        boosted(num_microbatches=2 + rank)
    with pytest.raises(DesyncError, match="pp_style"):
        boosted(pp_style="gpipe" if rank else "1f1b")


@distributed(world_size=2)
def test_mistakes_at_boost_leave_the_model_whole():
    raw = WholeBatches(get_model("glued_chain")).build()
    expected = {name: tensor.clone() for name, tensor in raw.state_dict().items()}
    for arguments in ({"num_layers_per_stage": [2, 3]}, {"split": ["layers.7"]}):
        with pytest.raises(ConfigError):
            boosted(model=raw, **arguments)
    batch = get_model("glued_chain").make_batch(0, 2)
    raw(**batch)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in raw.state_dict().items())


@distributed(world_size=2)
def test_losses_of_ones_own_backward_are_refused():
    """Gradients come of execute_pipeline alone: a loss has no graph to the other stages."""
    twins = StagedTwins("glued_chain")
    loss = twins.execute(twins.batch(0)[0])["loss"]
    with pytest.raises(ConfigError):
        twins.booster.backward(loss, twins.optimizer)


@distributed(world_size=2)
def test_no_sync_without_the_optimizer():
    booster, model, _ = boosted()
    with pytest.raises(ConfigError, match=r"write booster\.no_sync\(model, optimizer\)"):
        booster.no_sync(model)


@distributed(world_size=2)
def test_an_optimizer_of_another_model():
    booster, model, _ = boosted()
    other = boosted()[2]
    batch = get_model("glued_chain").make_batch(0, 2)
    with pytest.raises(ConfigError):
        booster.execute_pipeline(iter([batch]), model, lambda outputs, _: outputs.sum(), other)
