"""Figures of tables: which share of the runs has not lifted off, by step, or perplexity by length."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..evaluation.figures import log_perplexity, new_figure


def curves(report: Mapping[str, Any]) -> dict[str, dict[str, list[tuple[float, float, float]]]]:
    """Returns, for each panel and label of a line, the points of a table's figure: x, y, and the error of y.

    A table with `solved` has a survival curve: a run counts until it lifts off, or to its last step (Kaplan and Meier's
    estimate, since no run ends before another lifts off). Other tables have perplexity by multiples of the trained
    length.
    """
    panels: dict[str, dict[str, list[tuple[float, float, float]]]] = {}
    for cell in report["cells"]:
        ours, panel = cell["ours"], panels.setdefault(cell.get("group", ""), {})
        name, *arguments = cell.get("measure", "").split()[:2] or [""]
        if report["solved"] is not None:
            steps = [seed["lift_off"] for seed in ours["seeds"] if "lift_off" in seed]
            if steps:
                last = max(seed["steps"] for seed in ours["seeds"])
                at = [0, *sorted(step for step in steps if step is not None), last]
                left = [1 - index / len(steps) for index in range(len(at) - 1)]
                panel[f"{cell['label']} (n = {len(steps)})"] = [(x, y, 0.0) for x, y in zip(at, [*left, left[-1]])]
        elif name == "length" and ours["mean"] is not None:
            point = (float(arguments[0]), ours["mean"], ours["spread"] or 0.0)
            panel.setdefault(cell["label"], []).append(point)
    return {name: lines for name, lines in panels.items() if lines}


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Draws the figure of a table as a PNG file, if it has one; the same report gives the same bytes."""
    panels = curves(report)
    if not panels:
        return
    survival = report["solved"] is not None
    figure = new_figure(4.5 + 2.5 * len(panels), 5.0)
    from matplotlib import ticker

    every = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axes, (name, lines) in zip(every, panels.items()):
        for number, (label, points) in enumerate(lines.items()):
            x, y, errors = zip(*points)
            if survival:
                axes.step(x, y, where="post", label=label)
            else:
                axes.errorbar(x, y, yerr=errors, marker="osD^vPX*"[number % 8], markersize=4, capsize=2, label=label)
        if not survival:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
            log_perplexity(axes)
        axes.set_title(name, fontsize="medium")
        axes.set_xlabel("optimiser steps" if survival else "length / trained length")
        axes.grid(alpha=0.3)
        axes.legend(
            fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3 if len(panels) == 1 else 1
        )
    every[0].set_ylabel(
        "share of runs that have not lifted off" if survival else "perplexity (bars: standard deviation)"
    )
    figure.savefig(path, dpi=100, metadata={"Software": None})
