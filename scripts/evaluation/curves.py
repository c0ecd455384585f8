"""Training curves: thins and draws the losses in a run's `metrics.jsonl`."""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from .figures import line_styles, new_figure, number_ticks, wrapped

# Maximum number of points of a curve.
POINTS = 100


def read_curves(path: pathlib.Path) -> dict[str, Any]:
    """Returns the contents of `curves.json`, without the fingerprint of the weights, from a run's `metrics.jsonl`.

    A point of `training` is the last step and the mean loss (nats per token) of consecutive lines.
    """
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    training = [line for line in lines if "loss" in line]
    size = -(-len(training) // POINTS) or 1
    groups = [training[start : start + size] for start in range(0, len(training), size)]
    means = [(group[-1]["step"], sum(line["loss"] for line in group) / len(group)) for group in groups]
    evaluated = [(line["step"], line["validation_loss"]) for line in lines if "validation_loss" in line]
    return {
        kind: [{"step": step, "loss": float(f"{loss:.6g}")} for step, loss in points]
        for kind, points in (("training", means), ("validation", evaluated))
    }


def curves_figure(runs: Mapping[str, Mapping[str, Any]], encodings: Sequence[Any], *, title: str, unit: str) -> Any:
    """Returns a figure of training and validation loss against steps, from the curves of runs by their names.

    `encodings` are those of the runs, `title` names the texts, and `unit` is what the loss is per.
    """
    several = len(runs) > 1
    figure = new_figure(6.4, 3.6)
    axes = figure.add_subplot()
    for (name, curves), line in zip(runs.items(), line_styles(encodings)):
        # Pale, since it is noisy.
        training = {**line, "linestyle": "-", "marker": None, "alpha": 0.5}
        validation = {**line, "linestyle": "--", "linewidth": 1.2, "markersize": 4.5}
        for key, style in (("training", training), ("validation", validation)):
            if rows := curves[key]:
                values = [row["step"] for row in rows], [row["loss"] for row in rows]
                axes.plot(*values, label=f"{name}, {key}" if several else key, **style)
    for axis in (axes.xaxis, axes.yaxis):
        number_ticks(axis)
    axes.set_title(wrapped(title, 5.6), fontsize="medium")
    axes.set_xlabel("optimiser steps")
    axes.set_ylabel(f"loss (nats per predicted {unit})")
    axes.legend(fontsize="small" if several else None)
    axes.grid(alpha=0.3)
    return figure
