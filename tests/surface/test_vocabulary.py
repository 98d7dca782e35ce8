"""Words that docs/glossary.md retires appear in no source, docstring or message."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from import_graph import ROOT

FOLDERS = ("booster", "plugins", "kernels", "checkpoint_io", "examples", "tests", "benchmarks")
RETIRED = (
    r"how manieth",
    r"farewells?",
    r"meetings?",
    r"patience",
    r"imagined",
    r"whereabouts",
    r"carved?",
    r"stand[_ -]ins?",
    r"rooms?",
    r"number formats?",
    r"nobody",
    r"whoever",
    r"(?<!there )(?<!There )is no(?! longer)",
    r"under way",
    r"on its way",
    r"for good",
    # train_micro_batch_size_per_gpu is DeepSpeed's, NUM_MICRO_BATCHES ColossalAI's
    r"(?<!train_)(?<!num_)micro[_-]batch(es)?|(?-i:num_micro_batch(es)?)",
    r"goes on",
    r"lets go of",
    r"gives up",
    r"(?<!_)signs?(?! extension)",
    r"pieces?",
)
# Names of classes, functions and attributes that the field calls otherwise.
RETIRED_NAMES = """
Agenda AllocatesStates Assembly BatchAgreement BoundedStore CarvedModel CubeLinear CurrentPlace DIFFERS DiskWork
FollowedUnit GradientKeeper GradientWindow GradientsLoad HUNG_UP HalfWeights HeldParts Homes ImaginedMemory
IncomingLink InputWatch Inquiry JoinedBatches LabelledOutput LaterGradient LayoutPiece LeftOut LineSplitter Meeting
MemoryQuestion ModelSplit NoticeBoard ObstacleFound OperationPlace OutgoingLink OverlappedInput OwnDirectory OwnFormat
PackedGradients ParameterLayout ParameterStep PendingGradients PhaseObserver Piece PieceExchange PieceFinished
PieceRun PieceUpdate PlacedParts Planes ProcessRandomState RankNotes ReducedGradients RunningLayer SafeOutputs
SeesWholeSteps SharedParameter Slot SplitLogits SplitStream StandIns StepBatch StepFolders Stretch TensorParallelRanks
TimeLimits TokenOrder Trainee TreeForm UnitFormats WaitingForWeights WeightGathering Whereabouts WholeMember WholeStep
WindowCounts _AgreedRendezvous _Lifeline _PastOperation _RankAgent _ReaderAhead _Silence _SilencedHooks _end_with_them
_open_window _run_together _take_back _take_over _take_squares _take_turns _tell_of_gradients _witness agree_on_boost
agree_rank_zero_first agreement_group answer_within are_others_imagined are_rounded boost_facts break_off
choose_owners class_before complete_commits counting_group cut_model derive_random_state divide_layers draws_alike
end_here end_signs ending_signals ends_of_ranks ends_when_told enter_iteration failures_named find_nonfinite find_tie
gather_distinct goes_by_messages gradients_known hang_up has_leftovers homes_within how_often imagine_others
imagined_world in_bucket_shard interrupts_later is_whole_number join_running_layers laid_out_like last_signs_of
layout_of leaves_a_mark limit_of_messages log_on_master loss_is_elsewhere made_current make_replicas_equal make_room
missing_ranks_named move_main note_boosted note_failure noted_failures num_ranks_of_batch overlaps_gathering own_store
perform_started place_real ranks_that_know_ends read_signs rehoming require_values run_fleet say_farewell
say_that_ends_are_known scattered_product seconds_of_now share_facts show_stand_ins shown_whole spend_rest_of
start_signs state_form sum_shared_gradient take_note take_over take_tensors tell_refusal tell_started training_facts
users_proof was_multiplied was_told_to_end was_written_unseen where_ranks_were write_that_left
"""
# A heartbeat was called a sign: what is one in mathematics stays.
SIGN = re.compile(
    r"sign (bit|of|[|?=])|signs (of|differ|alternate|agree|only)|(opposite|any|its|gradient's) sign"
    r"|torch\.sign|\.sign_?\(",
    re.IGNORECASE,
)
WORDS = re.compile(rf"(?<![A-Za-z])(?:{'|'.join(RETIRED)})(?![A-Za-z])", re.IGNORECASE)
NAMES = re.compile(rf"\b(?:{'|'.join(RETIRED_NAMES.split())})\b")


def retired_words(text: str) -> list[str]:
    """Return the lines with retired words."""
    return [
        line.strip()
        for line in text.splitlines()
        if any(not match[0].lower().startswith("sign") or not SIGN.search(line) for match in WORDS.finditer(line))
        or NAMES.search(line)
    ]


def test_no_source_uses_a_retired_word():
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*"))]
    found = {}
    for path in paths:
        if path.suffix not in (".py", ".cpp", ".h", ".md") or path == Path(__file__):
            continue
        lines = retired_words(path.read_text())
        if lines:
            found[str(path.relative_to(ROOT))] = lines
    assert not found, "use the words of docs/glossary.md"


@pytest.mark.parametrize(
    "text",
    ["# rank 1 gave no sign", "stand_in = 1", "f'{x} is no number'", "micro_batches", "room left", "take_over(1)"],
)
def test_the_search_finds_retired_words(text):
    assert retired_words(text)


@pytest.mark.parametrize(
    "text", ["there is no file", "is no longer", "the sign of a corner", "x.sign()", "microbatch", "assign"]
)
def test_the_search_leaves_the_rest(text):
    assert not retired_words(text)
