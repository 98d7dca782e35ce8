"""A model in pipeline stages and its twin in one process, which sees the batches of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hybrid_twins import ATOL, RTOL, adamw
from oracles.joined_slices import joined_over_ranks
from pipeline_cases import SCHEDULES, num_chunks_of, num_layers_for
from torch import nn
from zoo import Batch, WholeBatches, get_model, split_batch

from booster import Booster
from booster.plugins.hybrid_parallel.plugin import HybridParallelPlugin
from booster.pytree import map_tensors


class StagedTwins:
    """The two models, their optimizers, and batches of which this rank has a part.

    Args:
        name: Of a model in the zoo, whose batches and loss are used.
        schedule: Of the pipeline.
        pp_size: Its stages.
        optimizer: Makes an optimizer for a model.
        make_plugin: Makes another plugin, without stages.
        **arguments: Of the plugin; fp32 and two microbatches where not given.

    Attributes:
        plain: The model that one process trains.
        model: The boosted model; `optimizer` is its boosted optimizer.
    """

    def __init__(
        self,
        name: str,
        schedule: str = "1f1b",
        pp_size: int = 2,
        *,
        optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
        make_plugin: Callable[[], Any] | None = None,
        **arguments: Any,
    ) -> None:
        self.whole = WholeBatches(get_model(name, num_layers_for(name, num_chunks_of(schedule, pp_size))))
        given = {"precision": "fp32", "num_microbatches": 2, "zero_bucket_size_in_m": 0.004, **SCHEDULES[schedule]}
        given |= arguments
        if "microbatch_size" in arguments:
            del given["num_microbatches"]
        self.plugin = make_plugin() if make_plugin else HybridParallelPlugin(pp_size=pp_size, **given)
        self.booster = Booster(plugin=self.plugin)
        self.plain, raw = self.whole.build().to(self.booster.device), self.whole.build()
        self.initial = {name: tensor.clone().cpu() for name, tensor in self.plain.state_dict().items()}
        self.plain_optimizer = optimizer(self.plain)
        self.model, self.optimizer, *_ = self.booster.boost(raw, optimizer(raw))

    def batch(self, step: int, samples: int = 4) -> tuple[Batch, Batch]:
        """Returns the batch of all ranks, and this rank's part of that many samples."""
        whole = self.whole.entry.make_batch(step, samples * self.plugin.dp_size)
        whole = map_tensors(lambda tensor: tensor.to(self.booster.device), whole)
        return whole, split_batch(whole, self.plugin.dp_rank, self.plugin.dp_size)

    def forward(self, batch: Batch) -> tuple[Any, torch.Tensor]:
        """Returns outputs and loss of the plain model."""
        fed = self.whole.feed(batch)
        outputs = self.plain(fed) if self.whole.is_bare else self.plain(**fed)
        return outputs, self.whole.criterion(outputs, fed)

    def execute(self, batch: Batch, *, trains: bool = True, **options: Any) -> dict[str, Any]:
        """Has the stages run a batch, with the optimizer where they train."""
        return self.booster.execute_pipeline(
            iter([self.whole.feed(batch)]),
            self.model,
            self.whole.criterion,
            self.optimizer if trains else None,
            **options,
        )

    def backward(self, step: int, samples: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the losses of the plain model and of the stages."""
        whole, part = self.batch(step, samples)
        expected = self.forward(whole)[1]
        expected.backward()
        return expected.detach(), self.execute(part)["loss"]

    def step(self) -> None:
        for optimizer in (self.plain_optimizer, self.optimizer):
            optimizer.step()
            optimizer.zero_grad()

    def train(self, num_steps: int = 2, samples: int = 4) -> StagedTwins:
        for step in range(num_steps):
            self.backward(step, samples)
            self.step()
        return self

    def assert_equal(self, rtol: float = RTOL, atol: float = ATOL) -> None:
        """Both moved, and to the same place. Collective."""
        expected = {name: tensor.cpu() for name, tensor in self.plain.state_dict().items()}
        torch.testing.assert_close(joined_over_ranks(self.model), expected, rtol=rtol, atol=atol)
        assert any(not torch.equal(tensor, self.initial[name]) for name, tensor in expected.items())
