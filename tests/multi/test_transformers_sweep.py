"""Every model of transformers that can be made small: one step under each strategy equals one process, and reopens."""

from __future__ import annotations

import re

import pytest
from cases.sweep_cases import STRATEGIES, run_sweep_case
from cases.sweep_refusals import difference_of, refusal_of
from harness import preload
from zoo.transformers_models import TRANSFORMERS_MODULES
from zoo.transformers_sweep import TASKS

pytest.importorskip("transformers")
preload(*TRANSFORMERS_MODULES)
# What the models themselves warn of, in one process as well.
pytestmark = [
    pytest.mark.on_device,
    pytest.mark.filterwarnings("ignore:Version v4.12.0 introduces a better way:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning"),
]

# Of families that no other test has: a state-space model, a waveform, latent attention, per-layer embeddings; and
# experts that follow parameters of odd sizes, whose grouped products need aligned addresses on CUDA.
QUICK = (
    ("Mamba2ForCausalLM", "ddp"),
    ("Wav2Vec2ForCTC", "fsdp"),
    ("DeepseekV3ForCausalLM", "tp"),
    ("Gemma4ForCausalLM", "sp"),
    ("T5Gemma2ForConditionalGeneration", "split_gather"),
    ("MPNetForMaskedLM", "pp"),
    ("InklingForCausalLM", "tp"),
    ("JambaForCausalLM", "gemini"),
)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", TASKS)
def test_a_model_trains_as_in_one_process_or_is_refused(name, strategy, tmp_path):
    if (difference := difference_of(name, strategy)) is not None:
        with pytest.raises(AssertionError, match=re.escape(difference.message)):
            run_sweep_case(name, strategy, tmp_path)
        return
    expected, found = refusal_of(name, strategy), run_sweep_case(name, strategy, tmp_path)
    if expected is None:
        assert found is None, found
    else:
        assert found is not None, f"{name} trains under {strategy} now: remove it from cases/sweep_refusals.py"
        assert expected.message in found


def test_models_of_further_families_train_as_in_one_process(tmp_path):
    for name, strategy in QUICK:
        assert run_sweep_case(name, strategy, tmp_path / name) is None, (name, strategy)
