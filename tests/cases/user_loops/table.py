"""The table of loops, and what each plugin refuses of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from strategies import FP32

from booster import Booster
from booster.plugins import GeminiPlugin, HybridParallelPlugin

from . import adversarial, averages, language, training
from .one_process import Outcome


def _gemini(**arguments: Any) -> Booster:
    return Booster(plugin=GeminiPlugin(precision="fp32", min_chunk_size_m=1e-4, search_range_m=2e-4, **arguments))


def _hybrid(**arguments: Any) -> Booster:
    return Booster(plugin=HybridParallelPlugin(precision="fp32", **arguments))


# Of two ranks, by name.
STRATEGIES: dict[str, Callable[[], Booster]] = {
    **FP32,
    "gemini_cpu": partial(_gemini, placement_policy="cpu"),
    "gemini_auto": partial(_gemini, placement_policy="auto"),
    "hybrid_sp": partial(_hybrid, sp_size=2, enable_sequence_parallelism=True, sequence_parallelism_mode="all_to_all"),
    "hybrid_pp": partial(_hybrid, pp_size=2, num_microbatches=2),
}
DDP, TENSOR, SEQUENCE, STAGES, FSDP = "ddp", "hybrid_tp", "hybrid_sp", "hybrid_pp", "fsdp"
ZERO = ("zero1", "zero2", "hybrid_dp", "hybrid_zero")
GEMINI = ("gemini", "gemini_whole", "gemini_cpu", "gemini_auto")

# What the errors say, as patterns.
TIED = r"'head\.weight' was replaced .* after boost\(\).*before boost\(\)"
TIED_STAGES = r"another pipeline stage holds this module: tie .* before boost|cannot assign .* as parameter 'weight'"
BY_STAGES = {STAGES: r"pp_size > 1.* write booster\.execute_pipeline"}
NO_PLAN = {TENSOR: r"no tensor-parallel plan is known for .*: give plan="}
NO_LAYERS = {STAGES: r"has no list of layers .*: give split="}


@dataclass(frozen=True)
class UserLoop:
    """One loop.

    Attributes:
        run: The loop, a function of a Booster or of `OneProcess`.
        refused: Patterns of the errors by strategy; under all others the loop gives what one process gives.
        has_sequences: Whether sequence parallelism is for its models.
        without: Strategies under which it computes something else.
        package: Package that it needs beside torch.
    """

    run: Callable[[Any], Outcome]
    refused: Mapping[str, str] = field(default_factory=dict)
    has_sequences: bool = False
    without: tuple[str, ...] = ()
    package: str | None = None

    @property
    def name(self) -> str:
        return self.run.__name__

    @property
    def strategies(self) -> list[str]:
        left_out = self.without if self.has_sequences else (*self.without, SEQUENCE)
        return [one for one in STRATEGIES if one not in left_out]


def _everywhere_but(*strategies: str, text: str) -> dict[str, str]:
    return dict.fromkeys((one for one in STRATEGIES if one not in strategies), text)


_LOOPS = (
    UserLoop(adversarial.gan, BY_STAGES),
    UserLoop(adversarial.gan_with_a_frozen_judge, BY_STAGES),
    UserLoop(adversarial.wgan_gp, BY_STAGES),
    UserLoop(adversarial.wgan_gp_by_parts, BY_STAGES),
    UserLoop(adversarial.gan_with_both_losses_first, BY_STAGES),
    UserLoop(adversarial.gradient_penalty, BY_STAGES),
    UserLoop(adversarial.encoder_and_decoder, BY_STAGES),
    UserLoop(adversarial.actor_and_critic, BY_STAGES),
    UserLoop(adversarial.optimizers_of_parts, _everywhere_but(text=r"a list of optimizers.*one with a param group")),
    UserLoop(adversarial.target_network, BY_STAGES),
    UserLoop(adversarial.momentum_teacher, BY_STAGES),
    UserLoop(averages.ema_by_hand),
    UserLoop(
        averages.ema_without_gathered,
        {
            TENSOR: r"size of tensor a \(16\) must match the size of tensor b \(8\)",
            STAGES: r"zip\(\) argument 2 is shorter|must match the size",
        },
    ),
    UserLoop(averages.ema_of_state_dicts, {TENSOR: "must match the size", STAGES: "KeyError"}),
    UserLoop(averages.ema_by_torch, BY_STAGES),
    UserLoop(averages.swa, {STAGES: rf"{BY_STAGES[STAGES]}|BatchNorm1d.* has no attribute 'running_mean'"}),  # by rank
    UserLoop(averages.schedule_free, package="schedulefree"),
    UserLoop(
        averages.sam_optimizer,
        {
            **_everywhere_but(DDP, text=r"SAM can't update shards of parameters: .*came out different.*torch_ddp"),
            FSDP: r"SAM needs all parameters at once.*came out different without the others.*TorchDDPPlugin",
        },
    ),
    UserLoop(averages.sam_by_given_norm),
    UserLoop(
        averages.sam_by_the_loop,
        _everywhere_but(DDP, text="'NoneType' object has no attribute 'norm'"),
        without=(STAGES,),  # there `p.grad` is that of the stage's parameters, and so is its norm
    ),
    UserLoop(training.distillation, BY_STAGES),
    UserLoop(training.distillation_from_a_plain_teacher),
    UserLoop(training.gradual_unfreezing),
    UserLoop(training.matrices_by_muon),
    UserLoop(training.unfreezing_by_new_groups),
    UserLoop(training.truncated_backpropagation, NO_PLAN | NO_LAYERS),
    UserLoop(training.recurrence_by_hand, NO_PLAN | NO_LAYERS),
    UserLoop(training.contrastive, BY_STAGES),
    UserLoop(training.contrastive_by_function, BY_STAGES),
    UserLoop(training.tying_after_boost, {FSDP: TIED, STAGES: TIED_STAGES}),
    UserLoop(training.tying_by_a_method_after_boost, {FSDP: TIED, STAGES: TIED_STAGES}),
    UserLoop(training.evaluation_in_between, without=(STAGES,)),  # there a batch norm normalizes each microbatch
    UserLoop(training.metrics_in_between, BY_STAGES),
    UserLoop(training.early_stop),
    UserLoop(training.loss_by_another_method, BY_STAGES),
    UserLoop(training.loss_by_submodules, BY_STAGES),
    UserLoop(training.features_by_hooks, BY_STAGES),
    UserLoop(training.boosted_alone, BY_STAGES),
    UserLoop(training.evaluated_alone),
    UserLoop(
        training.l2_penalty,
        BY_STAGES | {TENSOR: "losses of the same batch .* compute it from the model's outputs"},
    ),
    UserLoop(training.frozen_reference, BY_STAGES),
    UserLoop(training.frozen_before_backward, BY_STAGES),
    UserLoop(training.logged_weights, without=(TENSOR, STAGES)),  # there parameters are a rank's part
    UserLoop(language.dpo, BY_STAGES, has_sequences=True),
    UserLoop(language.dpo_with_two_forwards, BY_STAGES, has_sequences=True),
    UserLoop(language.dpo_of_pairs, has_sequences=True),
    UserLoop(language.generation_in_between, BY_STAGES, has_sequences=True),
    UserLoop(language.learning_from_samples, BY_STAGES, has_sequences=True),
    UserLoop(language.generation_alone, BY_STAGES, has_sequences=True),
    UserLoop(
        language.generation_with_a_cache,
        BY_STAGES | {SEQUENCE: r"sequence parallelism has no key-value cache \(set use_cache=False"},
        has_sequences=True,
    ),
    UserLoop(language.distillation_of_a_language_model, BY_STAGES, has_sequences=True),
)
LOOPS: dict[str, UserLoop] = {one.name: one for one in _LOOPS}

# Columns of the table in the docs, and the strategies behind each.
_COLUMNS = {
    "DDP": (DDP,),
    "ZeRO": ZERO,
    "Gemini": GEMINI,
    "FSDP": (FSDP,),
    "tp": (TENSOR,),
    "sp": (SEQUENCE,),
    "pp": (STAGES,),
}


def as_markdown() -> str:
    """Return the table of docs/loops.md: where a loop gives what one process gives."""
    lines = [f"| loop | {' | '.join(_COLUMNS)} |", f"| --- |{' --- |' * len(_COLUMNS)}"]
    for loop in LOOPS.values():
        marks = [
            "-" if not set(column) & set(loop.strategies) else "no" if set(column) & loop.refused.keys() else "yes"
            for column in _COLUMNS.values()
        ]
        lines.append(f"| {loop.name.replace('_', ' ')} | {' | '.join(marks)} |")
    return "\n".join(lines)
