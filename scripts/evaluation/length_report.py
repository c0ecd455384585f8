"""The table and the figure of length extrapolation, from the entries of a results file (`length.LengthResults`)."""

import itertools
import math
import pathlib
from collections.abc import Sequence
from typing import Any

from ...model_card import encoding_text
from .figures import log_perplexity, new_figure, save_figure, wrapped
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
    return f"{name[0].upper()}{name[1:]} ± standard error on {text}, by window (tokens)"


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
    lengths = sorted({cell["length"] for entry in entries for cell in entry["cells"]})
    rows = [["model", "encoding", "trained at", *(f"{length:,}" for length in lengths)]]
    for entry in entries:
        cells = {cell["length"]: cell for cell in entry["cells"]}
        row = [label(entry), encoding_text(entry["position_encoding"] or "stock"), f"{entry['trained_length']:,}"]
        rows.append(row + [text_of(cells.get(length), metric) for length in lengths])
    return markdown_table(rows, aligned=aligned)


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


def draw(
    entries: Sequence[dict[str, Any]], stem: str | pathlib.Path, *, title: str, metric: str = "perplexity"
) -> list[pathlib.Path]:
    """Draws a metric against the window, and loss by position in the longest window; returns the two files."""
    columns = 3
    # One legend below both panels, with three curves in a row.
    figure = new_figure(11.0, 4.5 + 0.2 * math.ceil(len(entries) / columns))
    left, right = figure.subplots(1, 2)
    figure.suptitle(wrapped(title, 10.0), fontsize="medium")
    # A colour for each checkpoint, a line style for each variant.
    names = list(dict.fromkeys(entry["name"] for entry in entries))
    variants = list(dict.fromkeys(entry["variant"] for entry in entries if entry["variant"]))
    for entry in entries:
        variant, index = entry["variant"], names.index(entry["name"])
        line: dict[str, Any] = {
            "color": f"C{index % 10}",
            "marker": "osD^vPX*"[index % 8],
            "markersize": 4,
            "linestyle": ("--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)))[variants.index(variant) % 4] if variant else "-",
        }
        cells = [cell for cell in entry["cells"] if cell["reached"] and cell[metric] is not None]
        unreached = [cell["length"] for cell in entry["cells"] if not cell["reached"]]
        text = label(entry) + (f" (≥ {min(unreached):,} tokens not supported)" if unreached else "")
        errors = [error(cell, metric) or 0.0 for cell in cells]
        values = [cell[metric] for cell in cells]
        left.errorbar([cell["length"] for cell in cells], values, yerr=errors, capsize=2, label=text, **line)
        if entry["by_position"]:
            longest = max(entry["by_position"], key=lambda one: one["length"])
            # Each bucket is drawn at its middle on the logarithmic axis.
            middles = [math.sqrt(max(1, start) * stop) for start, stop in itertools.pairwise(longest["edges"])]
            right.plot(middles, longest["loss"], **{**line, "marker": None})
    for axes in (left, right):
        for trained in sorted({entry["trained_length"] for entry in entries}):
            axes.axvline(trained, color="0.6", linestyle=":", linewidth=1)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.grid(alpha=0.3)
    if metric == "perplexity":
        log_perplexity(left)
    left.set_xlabel("window (tokens); dotted: trained length")
    left.set_ylabel(f"{measure(entries, metric)} (bars: one standard error)")
    right.set_xlabel("position in the longest measured window (tokens)")
    right.set_ylabel(f"loss (nats per {unit_of(entries)})")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=columns, fontsize="small")
    return save_figure(figure, stem)
