"""The page docs/tested_models.md, of the tables of the sweep.

Run: python tests/sweep_report.py, which writes it.
"""

from __future__ import annotations

from pathlib import Path

from cases.sweep_refusals import DIFFERENCES, INCLUDED, REFUSALS, refusal_of
from zoo.transformers_sweep import LEFT_OUT, NAMES, TASKS

PAGE = Path(__file__).parents[1] / "docs" / "tested_models.md"
_TITLES = {
    "ddp": "`TorchDDPPlugin()`",
    "gemini": "`GeminiPlugin()`",
    "fsdp": "`TorchFSDPPlugin()`",
    "tp": "`HybridParallelPlugin(tp_size=2)`",
    "sp": '`sp_size=2`, `"all_to_all"`',
    "ring_attn": '`sp_size=2`, `"ring_attn"`',
    "split_gather": '`tp_size=2`, `"split_gather"`',
    "ring": '`tp_size=2`, `"ring"`',
    "pp": "`pp_size=2`, 2 microbatches",
}
_TASKS = {
    "causal": "causal language",
    "masked": "masked language",
    "seq2seq": "sequence to sequence",
    "image": "image classification",
    "audio": "audio classification",
    "ctc": "CTC",
    "speech": "speech to text",
}
_HEAD = """# Tested models

Every class of transformers 5.23 for these tasks that can be built small, {total} of {all}: with two layers, small sizes
and fewer than 5 M parameters, from a default configuration. Each trains one step under each strategy on 2 ranks; loss,
gradient norm and weights are compared with those of one process, the model is saved as a sharded Hugging Face folder,
and `from_pretrained` gives the trained weights. `make test-sweep` runs them
(`tests/multi/test_transformers_sweep.py`).
"""


def page() -> str:
    """Return the text of the page."""
    counts = ", ".join(f"{len(names.split())} for {_TASKS[task]}" for task, names in NAMES.items())
    parts = [
        _HEAD.format(total=len(TASKS), all=len(TASKS) + len(LEFT_OUT)),
        f"\nBy task: {counts}.\n",
        "\n| strategy, in fp32 | equal to one process | refused | differs |\n| --- | --- | --- | --- |\n",
    ]
    for strategy, title in _TITLES.items():
        refused = sum(refusal_of(name, strategy) is not None for name in TASKS)
        differs = sum(one.strategy == strategy for one in DIFFERENCES)
        equal = len(TASKS) - refused - differs
        parts.append(f"| {title} | {equal} | {refused} | {differs} |\n")
    parts.append("\n## What is refused, and why\n\nBy an error on all ranks, most of them in `boost`.\n")
    parts.append("\n| strategy | reason | models |\n| --- | --- | --- |\n")
    parts += [f"| {_TITLES[one.strategy]} | {one.reason} | {', '.join(one.names.split())} |\n" for one in REFUSALS]
    for strategy, included in INCLUDED.items():
        parts.append(f"\n{_TITLES[strategy]} refuses what {_TITLES[included]} refuses as well.\n")
    parts.append("\nWhat sequence parallelism over `sp_size` refuses, it may take over `tp_size`: see")
    parts.append(" [its modes](plugins/hybrid.md#sequence-parallelism).\n")
    parts.append("\n## What differs\n\n")
    parts += [f"- {one.name} under {_TITLES[one.strategy]}: {one.reason}.\n" for one in DIFFERENCES]
    parts.append("\n## What is left out\n\n| class | reason |\n| --- | --- |\n")
    parts += [f"| {name} | {reason} |\n" for name, reason in LEFT_OUT.items()]
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
