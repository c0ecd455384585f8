"""Creates and saves figures reproducibly: the same numbers give the same bytes."""

import pathlib
import textwrap
from typing import Any


def new_figure(width: float, height: float) -> Any:
    """Returns an empty matplotlib figure, sizes in inches, without pyplot's global state."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def log_perplexity(axes: Any) -> None:
    """Makes the vertical axis logarithmic, with plain numbers as labels."""
    from matplotlib import ticker

    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    axes.yaxis.set_minor_formatter(ticker.LogFormatter(minor_thresholds=(2, 0.7)))


def wrapped(text: str, width: float) -> str:
    """Wraps a title of medium font size into lines of at most `width` inches (about 11 characters an inch)."""
    return "\n".join(textwrap.wrap(text, max(1, int(11 * width))))


def save_figure(figure: Any, stem: str | pathlib.Path) -> list[pathlib.Path]:
    """Writes `stem`.png and `stem`.svg and returns their paths; the same figure gives the same bytes."""
    import matplotlib

    paths = [pathlib.Path(f"{stem}.{ending}") for ending in ("png", "svg")]
    paths[0].parent.mkdir(parents=True, exist_ok=True)
    # No date and no random ids.
    with matplotlib.rc_context({"svg.hashsalt": "whatwhere"}):
        figure.savefig(paths[0], dpi=150, metadata={"Software": None})
        figure.savefig(paths[1], metadata={"Date": None})
    return paths
