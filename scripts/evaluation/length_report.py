"""The table and the figure of length extrapolation, from the entries of a results file (`length.LengthResults`)."""

import itertools
import math
import pathlib
from collections.abc import Sequence
from typing import Any

from ...model_card import encoding_text
from .figures import beside, legend_below, length_axis, line_styles, new_figure, number_ticks, save_figure, wrapped
from .results import markdown_table

METRICS = {"perplexity": "perplexity", "bits_per_byte": "bits per byte"}


def unit_of(entries: Sequence[dict[str, Any]]) -> str:
    """Returns what loss and perplexity of entries are per: "byte" or "token"."""
    return "byte" if {entry.get("unit") for entry in entries} == {"byte"} else "token"


def measure(entries: Sequence[dict[str, Any]], metric: str) -> str:
    """Returns the name of a metric with its unit, such as `perplexity per byte`."""
    return METRICS[metric] + (f" per {unit_of(entries)}" if metric == "perplexity" else "")


def heading(entries: Sequence[dict[str, Any]], text: str, *, metric: str = "perplexity") -> str:
    """Returns the heading of a table: the metric with its unit, and the name of the text."""
    name = measure(entries, metric)
    return f"{name[0].upper()}{name[1:]} ± standard error on {text}, by sequence length (tokens)"


def label(entry: dict[str, Any]) -> str:
    """Returns the label of an entry in tables and figures: its name and its variant."""
    return entry["name"] + (f", {entry['variant']}" if entry["variant"] else "")


def error(cell: dict[str, Any], metric: str) -> float | None:
    """Returns the standard error of a metric from that of the loss, to first order (bytes per token taken as fixed)."""
    if cell["standard_error"] is None:
        return None
    return cell[metric] * cell["standard_error"] / (1.0 if metric == "perplexity" else cell["loss"])


def text_of(cell: dict[str, Any] | None, metric: str) -> str:
    """Returns a cell of the table: the value and its standard error."""
    if cell is None or (cell["reached"] and cell[metric] is None):
        return "-"
    if not cell["reached"]:
        return "not supported"
    value, spread = cell[metric], error(cell, metric)
    digits = 3 if metric != "perplexity" else 2 if value < 1000 else 0
    return f"{value:,.{digits}f}" + ("" if spread is None else f" ± {spread:,.{digits}f}")


def table(entries: Sequence[dict[str, Any]], *, metric: str = "perplexity", aligned: bool = True) -> str:
    """Returns the table, one row per checkpoint and variant, one column per window (in tokens), in Markdown."""
    return markdown_table(table_rows(entries, metric=metric), aligned=aligned)


def table_rows(entries: Sequence[dict[str, Any]], *, metric: str = "perplexity") -> list[list[str]]:
    """Returns the rows of `table`, the heads of the columns first."""
    lengths = sorted({cell["length"] for entry in entries for cell in entry["cells"]})
    rows = [["model", "encoding", "trained at", *(f"{length:,}" for length in lengths)]]
    for entry in entries:
        cells = {cell["length"]: cell for cell in entry["cells"]}
        row = [label(entry), encoding_text(entry["position_encoding"] or "stock"), f"{entry['trained_length']:,}"]
        rows.append(row + [text_of(cells.get(length), metric) for length in lengths])
    return rows


def comparable(entries: Sequence[dict[str, Any]], metric: str) -> list[list[dict[str, Any]]]:
    """Returns the entries in groups for a table and a figure each; a group is on the same tokens.

    Bits per byte are also comparable between tokenizers, if the numbers of bytes scored differ by at most 1 % and no
    tokenizer changes the text.
    """
    groups: list[list[dict[str, Any]]] = []
    for entry in entries:
        for group in groups:
            if entry["tokens_sha256"] == group[0]["tokens_sha256"]:
                break
            if entry.get("changed_documents") or group[0].get("changed_documents"):
                continue
            counts = scored_bytes([entry]), scored_bytes(group)
            if metric == "bits_per_byte" and (0 in counts or max(counts) <= 1.01 * min(counts)):
                break
        else:
            groups.append(group := [])
        group.append(entry)
    return groups


def scored_bytes(entries: Sequence[dict[str, Any]]) -> int:
    """Returns the number of bytes scored, of all windows of one length; 0 if unknown."""
    return max((cell.get("bytes") or 0 for entry in entries for cell in entry["cells"]), default=0)


def remove_numbered_figures(stem: pathlib.Path, kept: Sequence[pathlib.Path]) -> None:
    """Removes `STEM_2.png` to `STEM_99.svg`, the figures of further tables of an earlier run, but for those `kept`."""
    # Larger numbers are lengths: people name files such as `length_pg19_65536.png`.
    for name in (f"{stem.name}_{number}{ending}" for number in range(2, 100) for ending in (".png", ".svg")):
        if stem.with_name(name) not in kept:
            stem.with_name(name).unlink(missing_ok=True)


def styles(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the options of each entry's line: the colour of the encoding, or another one, and dashes for variants."""
    # Of two models with one encoding, the one with the shorter name has its colour, in whichever order they are given.
    keys = [(bool(entry["variant"]), len(entry["name"]), entry["name"]) for entry in entries]
    order = sorted(range(len(entries)), key=lambda index: keys[index])
    encodings = [None if entries[index]["variant"] else entries[index]["position_encoding"] for index in order]
    found = dict(zip(order, line_styles(encodings)))
    return [
        {**found[index], "linestyle": "--"} if one["variant"] else found[index] for index, one in enumerate(entries)
    ]


def figure_of(entries: Sequence[dict[str, Any]], *, title: str, metric: str = "perplexity") -> Any:
    """Returns a figure of a metric against the window, and of loss by position in the longest window."""
    # One legend below both panels, with about three curves in a row.
    figure = new_figure(11.0, 4.5 + 0.2 * math.ceil(len(entries) / 3))
    left, right = figure.subplots(1, 2)
    figure.suptitle(wrapped(title, 10.0), fontsize="medium")
    for index, (entry, line) in enumerate(zip(entries, styles(entries))):
        cells = [cell for cell in entry["cells"] if cell["reached"] and cell[metric] is not None]
        unreached = [cell["length"] for cell in entry["cells"] if not cell["reached"]]
        text = label(entry) + (f" (≥ {min(unreached):,} tokens not supported)" if unreached else "")
        errors = [error(cell, metric) or 0.0 for cell in cells]
        values = [cell[metric] for cell in cells]
        lengths = beside([cell["length"] for cell in cells], index, len(entries))
        left.errorbar(lengths, values, yerr=errors, capsize=2, label=text, elinewidth=1, **line)
        if entry["by_position"]:
            longest = max(entry["by_position"], key=lambda one: one["length"])
            # Each bucket is drawn at its middle on the logarithmic axis.
            middles = [math.sqrt(max(1, start) * stop) for start, stop in itertools.pairwise(longest["edges"])]
            right.plot(middles, longest["loss"], **{**line, "marker": None})
    for axes in (left, right):
        for trained in sorted({entry["trained_length"] for entry in entries}):
            axes.axvline(trained, color="0.6", linestyle=":", linewidth=1)
        length_axis(axes)
        axes.grid(alpha=0.3)
    if metric == "perplexity":
        left.set_yscale("log")
    for axes in (left, right):
        number_ticks(axes.yaxis)
    left.set_xlabel("window (tokens); dotted: trained length")
    left.set_ylabel(f"{measure(entries, metric)} (bars: one standard error)")
    right.set_xlabel("position in the longest measured window (tokens)")
    right.set_ylabel(f"loss (nats per {unit_of(entries)})")
    legend_below(figure, left)
    return figure


def draw(
    entries: Sequence[dict[str, Any]], stem: str | pathlib.Path, *, title: str, metric: str = "perplexity"
) -> list[pathlib.Path]:
    """Writes the figure of entries; returns the two files."""
    return save_figure(figure_of(entries, title=title, metric=metric), stem)
