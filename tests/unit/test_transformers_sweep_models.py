"""The models of the sweep are all that transformers has for their tasks."""

from __future__ import annotations

import pytest
from cases.sweep_cases import STRATEGIES
from cases.sweep_refusals import DIFFERENCES, REFUSALS
from sweep_report import PAGE, page
from zoo.transformers_sweep import LEFT_OUT, MIXES_SAMPLES, TASKS

MAPPINGS = (
    "CAUSAL_LM",
    "MASKED_LM",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "IMAGE_CLASSIFICATION",
    "AUDIO_CLASSIFICATION",
    "CTC",
    "SPEECH_SEQ_2_SEQ",
)


def test_every_class_of_the_auto_mappings_is_listed_or_has_a_reason():
    modeling_auto = pytest.importorskip("transformers.models.auto.modeling_auto")
    mappings = [getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES") for task in MAPPINGS]
    known = {
        name
        for mapping in mappings
        for names in mapping.values()
        for name in ((names,) if isinstance(names, str) else names)
    }
    assert not TASKS.keys() & LEFT_OUT.keys()
    assert known == TASKS.keys() | LEFT_OUT.keys()


def test_tables_name_models_of_the_sweep():
    assert set(MIXES_SAMPLES) <= TASKS.keys()
    for refusal in REFUSALS:
        assert refusal.strategy in STRATEGIES
        assert set(refusal.names.split()) <= TASKS.keys(), refusal
    assert {one.name for one in DIFFERENCES} <= TASKS.keys()


def test_the_page_says_what_the_tables_say():
    assert PAGE.read_text() == page(), "run: python tests/sweep_report.py"
