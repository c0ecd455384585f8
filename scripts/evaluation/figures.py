"""What all figures share: colours and markers of systems, ticks, legends, and files of the same bytes."""

import io
import itertools
import pathlib
import textwrap
from collections.abc import Sequence
from typing import Any

# Colours of Okabe and Ito, with grey in place of yellow: people with colour blindness can tell them apart. The same
# encoding looks the same in every figure.
ENCODINGS = {
    "rope": ("#0072B2", "o"),
    "pope": ("#D55E00", "s"),
    "cope": ("#009E73", "D"),
    "cope+rope": ("#CC79A7", "^"),
    "none": ("#7F7F7F", "v"),
    "absolute": ("#000000", "P"),
    "relative": ("#56B4E9", "X"),
    "fox": ("#E69F00", "p"),
}
# For all other systems: darker colours, after Tol's "muted" ones, and hollow markers.
OTHERS = ("#882255", "#332288", "#999933", "#44AA99", "#661100", "#AA4499", "#4D4D80", "#117733")
OTHER_MARKERS = "os^Dv<>h"
# After each round of `OTHERS`.
STYLES = ("-", "--", ":", "-.")


def new_figure(width: float, height: float) -> Any:
    """Returns an empty matplotlib figure, sizes in inches, without pyplot's global state."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def line_styles(encodings: Sequence[Any]) -> list[dict[str, Any]]:
    """Returns matplotlib's options for the line of each system of a figure; no two have the same colour and style.

    Each line is thinner than those before it, and drawn over them, so that both are seen where they coincide.

    Args:
        encodings: for each system its `position_encoding`, or None. The first system with one of `ENCODINGS` gets its
            colour and marker, all others get the next of `OTHERS`.
    """
    found: list[dict[str, Any]] = []
    others, used = itertools.count(), set()
    step = min(0.35, 1.75 / max(1, len(encodings) - 1))
    for index, encoding in enumerate(encodings):
        above = step * (len(encodings) - 1 - index)
        style: dict[str, Any] = {"linewidth": 1.25 + above, "markersize": 4.5 + 1.5 * above}
        style["zorder"] = 2 + index / len(encodings)
        if isinstance(encoding, str) and encoding in ENCODINGS and encoding not in used:
            used.add(encoding)
            style["color"], style["marker"] = ENCODINGS[encoding]
        else:
            turn, number = divmod(next(others), len(OTHERS))
            style |= {"color": OTHERS[number], "marker": OTHER_MARKERS[number], "markerfacecolor": "white"}
            style["linestyle"] = STYLES[turn % len(STYLES)]
        found.append(style)
    return found


def beside(lengths: Sequence[float], index: int, count: int) -> list[float]:
    """Returns lengths moved by less than a tenth of an octave, so that the error bars of `count` systems are apart."""
    return [length * 2 ** (0.12 * (index / (count - 1) - 0.5)) if count > 1 else length for length in lengths]


def length_axis(axes: Any) -> None:
    """Makes the horizontal axis logarithmic, for lengths in tokens or multiples of a length: 1,024 and not 2^10."""
    from matplotlib import ticker

    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.xaxis.set_minor_locator(ticker.NullLocator())


def number_ticks(axis: Any) -> None:
    """Gives an axis ticks at round numbers, such as 2,500; call it when everything is drawn."""
    from matplotlib import ticker

    low, high = axis.get_view_interval()
    locators: list[Any] = [ticker.MaxNLocator(8, steps=[1, 2, 2.5, 5, 10])]
    if axis.get_scale() == "log" and high > 10 * low:
        locators = [ticker.LogLocator(subs=subs) for subs in ((1, 2, 5), (1,))]
    for locator in locators:
        places = [place for place in locator.tick_values(low, high) if low <= place <= high]
        if len(places) <= 10:
            break
    decimals = next(n for n in range(12) if n == 11 or all(abs(round(x, n) - x) < 1e-3 * (high - low) for x in places))
    axis.set_minor_locator(ticker.NullLocator())
    axis.set_ticks(places, [f"{place:,.{decimals}f}" for place in places])


def legend_below(figure: Any, axes: Any) -> None:
    """Puts the legend of `axes` below all panels, with as many entries in a row as fit."""
    handles, labels = axes.get_legend_handles_labels()
    # About 13 characters an inch, and 7 for the line.
    fitting = int(13 * figure.get_figwidth() / (max(map(len, labels), default=0) + 7))
    figure.legend(
        handles, labels, loc="outside lower center", ncols=max(1, min(len(labels), fitting)), fontsize="small"
    )


def wrapped(text: str, width: float) -> str:
    """Wraps a title of medium font size into lines of at most `width` inches (about 11 characters an inch)."""
    return "\n".join(textwrap.wrap(text, max(1, int(11 * width))))


def save_png(figure: Any, path: pathlib.Path, *, dpi: int = 150, palette: bool = True) -> None:
    """Writes a figure as a PNG file; the same figure gives the same bytes.

    With `palette`, it has 256 colours, which is enough for lines, and is a third as large.
    """
    from PIL import Image

    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=dpi, metadata={"Software": None})
    with Image.open(drawn) as image:
        colours = image.convert("RGB")
        (colours.quantize(colors=256) if palette else colours).save(path, optimize=True)


def save_figure(figure: Any, stem: str | pathlib.Path, *, palette: bool = True) -> list[pathlib.Path]:
    """Writes `stem`.png (see `save_png`) and `stem`.svg, and returns their paths; both of the same bytes each time."""
    import matplotlib

    paths = [pathlib.Path(f"{stem}.{ending}") for ending in ("png", "svg")]
    paths[0].parent.mkdir(parents=True, exist_ok=True)
    save_png(figure, paths[0], palette=palette)
    # No date and no random ids.
    with matplotlib.rc_context({"svg.hashsalt": "whatwhere"}):
        figure.savefig(paths[1], metadata={"Date": None})
    return paths
