"""Draws the loss curves of all runs into one picture.

Run: python examples/vit/plot.py runs/vit
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from matplotlib.figure import Figure

# Dashes of different lengths, so that a curve is seen below another one that lies upon it.
DASHES = ("-", (0, (6, 4)), (0, (2, 3)), "-.")


def draw(curves: list[dict]) -> Figure:
    """Returns a figure with the loss over the steps of every run, the later ones above the earlier."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss")
    for index, curve in enumerate(curves):
        label = f"{curve['parallel']}, {curve['ranks']} ranks: accuracy {curve['accuracy']:.1%}"
        steps = range(1, len(curve["losses"]) + 1)
        axes.plot(steps, curve["losses"], label=label, linestyle=DASHES[index % len(DASHES)], linewidth=2)
    axes.legend()
    return figure


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/vit")
    curves = [json.loads(line) for line in (folder / "curves.jsonl").read_text().splitlines()]
    draw(curves).savefig(folder / "curves.png", dpi=120)
    print(f"{len(curves)} curves in {folder / 'curves.png'}")


if __name__ == "__main__":
    main()
