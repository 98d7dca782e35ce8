"""Loops as users write them, each once: they run under every plugin, and by plain torch in one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from strategies import FP32

from booster import Booster
from booster.plugins import GeminiPlugin, HybridParallelPlugin

from . import adversarial, averages, language, training
from .one_process import OneProcess, Outcome

Loop = Callable[[Any], Outcome]

LOOPS: dict[str, Loop] = {
    loop.__name__: loop
    for loop in (
        adversarial.gan,
        adversarial.gan_with_a_frozen_judge,
        adversarial.wgan_gp,
        adversarial.gradient_penalty,
        adversarial.encoder_and_decoder,
        adversarial.actor_and_critic,
        adversarial.optimizers_of_parts,
        adversarial.target_network,
        adversarial.momentum_teacher,
        averages.ema_by_hand,
        averages.ema_without_gathered,
        averages.ema_of_state_dicts,
        averages.ema_by_torch,
        averages.swa,
        averages.schedule_free,
        averages.sam_optimizer,
        averages.sam_by_the_loop,
        training.distillation,
        training.distillation_from_a_plain_teacher,
        training.gradual_unfreezing,
        training.unfreezing_by_new_groups,
        training.truncated_backpropagation,
        training.recurrence_by_hand,
        training.contrastive,
        training.contrastive_by_function,
        training.tying_after_boost,
        training.tying_by_a_method_after_boost,
        training.evaluation_in_between,
        training.early_stop,
        training.loss_by_another_method,
        training.loss_by_submodules,
        training.features_by_hooks,
        training.boosted_alone,
        training.l2_penalty,
        language.dpo,
        language.dpo_with_two_forwards,
        language.dpo_of_pairs,
        language.generation_in_between,
        language.learning_from_samples,
        language.generation_alone,
        language.distillation_of_a_language_model,
    )
}


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
