"""Figures of tables: which share of the runs has not lifted off, by step, or perplexity by length."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..evaluation.data_description import measured_text
from ..evaluation.figures import (
    beside,
    legend_below,
    length_axis,
    line_styles,
    new_figure,
    number_ticks,
    save_png,
    wrapped,
)
from .measures import BOOKS


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


def encodings(report: Mapping[str, Any]) -> dict[str, str]:
    """Returns the encoding that a row's key names, such as `cope+rope`, by the row's label; see `line_styles`."""
    return {cell["label"]: cell["row"].replace("-", "+") for cell in report["cells"]}


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Draws the figure of a table as a PNG file, if it has one; the same report gives the same bytes."""
    panels = curves(report)
    if not panels:
        return
    survival = report["solved"] is not None
    rows = max(map(len, panels.values()))
    figure = new_figure(4.5 + 2.5 * len(panels), 4.6 + 0.2 * (rows if len(panels) > 1 else rows / 3))
    titles = [report["title"]] if survival else [report["title"], text()]
    width = figure.get_figwidth() - 0.5
    figure.suptitle("\n".join(wrapped(title, width) for title in titles), fontsize="medium")
    every = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    named = encodings(report)
    for axes, (name, lines) in zip(every, panels.items()):
        styles = line_styles([named[label.partition(" (n = ")[0]] for label in lines])
        for number, ((label, points), style) in enumerate(zip(lines.items(), styles)):
            x, y, errors = zip(*points)
            if survival:
                axes.step(x, y, where="post", label=label, **style)
            else:
                places = beside(x, number, len(lines))
                axes.errorbar(places, y, yerr=errors, capsize=2, label=label, elinewidth=1, **style)
        if not survival:
            length_axis(axes)
            axes.set_yscale("log")
        axes.set_title(name, fontsize="medium")
        axes.set_xlabel("optimiser steps" if survival else "length / trained length")
        axes.grid(alpha=0.3)
    if survival:
        number_ticks(every[0].xaxis)
    number_ticks(every[0].yaxis)
    if len(panels) == 1:
        legend_below(figure, every[0])
    else:
        for axes in every:
            axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.12))
    lifted = f"\n(validation accuracy of at least {report['lifted']:g} %)" if report.get("lifted") else ""
    every[0].set_ylabel(
        f"share of runs that have not lifted off{lifted}"
        if survival
        else "perplexity per token\n(bars: standard deviation of the runs)"
    )
    save_png(figure, path)


def text() -> str:
    """Returns the name of the text on which tables with lengths are measured."""
    return measured_text({**BOOKS, "documents": BOOKS["document_limit"]}, [])
