"""Draws the diagrams of the documentation: run it by hand after a change, `python docs/diagrams.py`.

`images/encodings.png`: what RoPE, PoPE and CoPE compute (docs/encodings.md). `images/forward.png`: the files that a
forward pass runs through (CONTRIBUTING.md). The same versions of this file and of matplotlib give the same bytes.
"""

import math
import pathlib
from typing import Any

import numpy as np
from matplotlib import patches

from whatwhere.scripts.evaluation.figures import new_figure, save_png

IMAGES = pathlib.Path(__file__).parent / "images"

# Content and positions, in colours that people with colour blindness can tell apart.
WHAT, WHERE = "#D55E00", "#0072B2"
INK, QUIET, LINE, PANEL = "#1A1A1A", "#5A5A5A", "#BBBBBB", "#F6F6F4"

# --- RoPE, PoPE and CoPE

TOKENS = ("Ada", "slept", ".", "Bo", "ran", ".", "Cy", "sang")
# sigmoid(q·k) of the last token with each: it counts sentences.
GATES = (0.05, 0.02, 0.95, 0.04, 0.03, 0.92, 0.05, 0.15)


def canvas(width: float, height: float) -> tuple[Any, Any]:
    """Returns a figure in inches and its only axes, which fill it, in the same units."""
    figure = new_figure(width, height)
    figure.set_layout_engine("none")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(0, height)
    axes.axis("off")
    return figure, axes


def panel(axes: Any, x: float, y: float, width: float, height: float, **options: Any) -> None:
    """Draws a box with round corners."""
    style = {"facecolor": PANEL, "edgecolor": LINE, "linewidth": 0.8, **options}
    shape = patches.FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0,rounding_size=0.07", **style)
    axes.add_patch(shape)


def arrow(axes: Any, start: tuple[float, float], end: tuple[float, float], **options: Any) -> None:
    """Draws an arrow."""
    style = {"arrowstyle": "-|>", "mutation_scale": 9, "linewidth": 1.6, "shrinkA": 0, "shrinkB": 0, "color": INK}
    axes.add_patch(patches.FancyArrowPatch(start, end, **{**style, **options}))


def heading(axes: Any, top: float, name: str, line: str, formula: str, texts: list[str]) -> None:
    """Writes the left column of a row: name, what is done in one line, formula, and explanations."""
    axes.text(0.22, top - 0.33, name, fontsize=14, weight="bold", color=INK)
    axes.text(0.86, top - 0.33, line, fontsize=9.5, color=INK)
    axes.text(0.22, top - 0.75, formula, fontsize=9.5, color=INK)
    for number, text in enumerate(texts):
        axes.text(0.22, top - 1.08 - 0.2 * number, text, fontsize=8.5, color=QUIET)


def plane(axes: Any, x: float, y: float, parts: list[tuple[float, str, str]], length: float, *, below: str) -> None:
    """Draws a vector of a length in inches, whose angle is the sum of coloured arcs (degrees, colour, label)."""
    axes.plot([x, x + 1.1], [y, y], color=LINE, linewidth=0.8)
    start, radius = 0.0, 0.34
    for degrees, colour, label in parts:
        arc = patches.Arc(
            (x, y), 2 * radius, 2 * radius, theta1=start, theta2=start + degrees, color=colour, linewidth=3
        )
        axes.add_patch(arc)
        middle = math.radians(start + degrees / 2)
        place = x + (radius + 0.09) * math.cos(middle), y + (radius + 0.09) * math.sin(middle)
        axes.text(*place, label, fontsize=8.5, color=colour, va="center", ha="left")
        start += degrees
    angle = math.radians(start)
    arrow(axes, (x, y), (x + length * math.cos(angle), y + length * math.sin(angle)))
    axes.plot([x], [y], "o", color=INK, markersize=3)
    axes.text(x + 0.55, y - 0.2, below, fontsize=8.5, color=QUIET, ha="center", va="top", linespacing=1.3)


def encodings() -> Any:
    """Returns the diagram that compares RoPE, PoPE and CoPE."""
    width, rows = 7.6, (2.02, 2.02, 2.42)
    figure, axes = canvas(width, sum(rows) + 0.46)
    top = sum(rows) + 0.46
    axes.text(0.22, top - 0.28, "what", fontsize=11, weight="bold", color=WHAT)
    axes.text(0.72, top - 0.28, "a token says, and", fontsize=11, color=INK)
    axes.text(2.22, top - 0.28, "where", fontsize=11, weight="bold", color=WHERE)
    axes.text(2.84, top - 0.28, "it is: how the logit of query i and key j depends on both", fontsize=11, color=INK)
    top -= 0.42
    for row in rows:
        panel(axes, 0.08, top - row + 0.06, width - 0.16, row - 0.06)
        top -= row
    top = sum(rows) + 0.04

    heading(
        axes,
        top,
        "RoPE",
        "rotates pairs of content channels",
        r"$\frac{1}{\sqrt{d}}\ \sum_c\ |q_c||k_c|\ \cos\,(\,(i-j)\,\theta_c+\alpha_{q,c}-\alpha_{k,c}\,)$",
        [
            r"Two channels are a vector with an angle $\alpha$.",
            "Rotation adds the position times a frequency θ:",
            "the angle mixes what and where.",
        ],
    )
    for x, content, position, below in (
        (4.32, 22, 44, "one content at\none position"),
        (6.02, 44, 22, "another content at\nanother position"),
    ):
        parts = [(content, WHAT, r"content $\alpha$"), (position, WHERE, "position j·θ")]
        plane(axes, x, top - 1.42, parts, 1.05, below=below)
    axes.text(5.6, top - 1.0, "=", fontsize=16, color=INK, ha="center", va="center")

    top -= rows[0]
    heading(
        axes,
        top,
        "PoPE",
        "gives each channel a length and an angle",
        r"$\frac{1}{\sqrt{d}}\ \sum_c\ \mathrm{softplus}(q_c)\,\mathrm{softplus}(k_c)"
        r"\ \cos\,(\,(j-i)\,\theta_c+\delta_c\,)$",
        [
            "Content sets only the length, position only the",
            "angle (δ is learned): matches of what and of",
            "where are separate factors.",
        ],
    )
    for x, length, degrees, below in (
        (4.02, 0.62, 30, "a token"),
        (5.2, 1.0, 30, "another content:\nonly longer"),
        (6.33, 0.62, 75, "another position:\nonly turned"),
    ):
        plane(axes, x, top - 1.42, [(degrees, WHERE, "j·θ + δ")], length, below=below)
        angle = math.radians(degrees)
        across = np.array([-math.sin(angle), math.cos(angle)]) * 0.07
        start, end = across, np.array([math.cos(angle), math.sin(angle)]) * length + across
        axes.plot([x + start[0], x + end[0]], [top - 1.42 + start[1], top - 1.42 + end[1]], color=WHAT, linewidth=3)
    axes.text(3.86, top - 0.93, "softplus(k)", fontsize=8.5, color=WHAT)

    top -= rows[1]
    heading(
        axes,
        top,
        "CoPE",
        "counts the tokens whose gates are open",
        r"$q_i\cdot k_j\,/\sqrt{d}\ +\ q_i\cdot e\,[p_{ij}]\qquad p_{ij}=\sum_{n=j}^{i}\,g_{in}$",
        [
            "A gate g = sigmoid(q·k / √d) opens by content.",
            "Open gates are summed from the query backwards:",
            "a position in sentences here, not in tokens.",
            "It need not be whole: e is interpolated.",
        ],
    )
    positions = np.cumsum(GATES[::-1])[::-1]
    left, step, base = 3.98, 0.44, top - 1.3
    for index, (token, gate, position) in enumerate(zip(TOKENS, GATES, positions)):
        x = left + step * index
        is_query = index == len(TOKENS) - 1
        axes.add_patch(
            patches.Rectangle((x - 0.13, base), 0.26, 0.72, facecolor="white", edgecolor=LINE, linewidth=0.8)
        )
        axes.add_patch(patches.Rectangle((x - 0.13, base), 0.26, 0.72 * gate, facecolor=WHAT))
        axes.text(
            x, base - 0.07, token, fontsize=9, color=INK, ha="center", va="top", weight="bold" if is_query else None
        )
        axes.text(x, base - 0.31, f"{position:.2f}", fontsize=8.5, color=WHERE, ha="center", va="top")
    axes.text(left - 0.22, base + 0.81, "gates", fontsize=8.5, color=WHAT, va="bottom")
    axes.text(left + 7 * step, base + 0.81, "query", fontsize=8.5, color=INK, va="bottom", ha="center")
    arrow(axes, (left + 7.3 * step, base - 0.56), (left - 0.2, base - 0.56), color=WHERE, linewidth=1.2)
    axes.text(
        left + 3.5 * step,
        base - 0.6,
        "position p: gates summed from the query backwards",
        fontsize=8.5,
        color=WHERE,
        ha="center",
        va="top",
    )
    low = math.floor(positions[4])
    share = positions[4] - low
    text = f"“ran”:  e[{positions[4]:.2f}] = {1 - share:.2f} · e[{low}] + {share:.2f} · e[{low + 1}]"
    axes.text(left + 3.5 * step, base - 0.95, text, fontsize=8.5, color=INK, ha="center", va="center")
    return figure


# --- A forward pass

# Boxes by name: file names, a line about them, row from the top, left and width in inches.
BOXES: dict[str, tuple[list[str], str, int, float, float]] = {
    "decoder": (["decoder.py"], "embeddings, all layers, then logits and loss", 0, 2.0, 3.6),
    "first": (
        ["forward_arguments.py", "attention_mask.py", "position_modules.py"],
        "once for all layers: checks, mask, and what encodings share, such as tables of angles",
        1,
        0.9,
        5.8,
    ),
    "layers": (
        ["modeling_whatwhere_llama.py", "modeling_whatwhere_gpt2.py"],
        "the layers of a family: projections, norms, feed-forward",
        2,
        1.35,
        4.9,
    ),
    "block": (["attention_block.py"], "project → before the cache → cache → attention → output", 3, 1.6, 4.4),
    "encoding": (
        ["position_rope.py", "position_pope.py", "position_cope.py", "..."],
        "one file for each encoding: its formula, parameters and hooks",
        4,
        0.1,
        4.9,
    ),
    "choice": (["attention_choice.py"], "chosen once, not at each step", 4, 5.15, 2.35),
    "attention": (["attention.py"], "auto: a kernel where there is one, else PyTorch", 5, 1.85, 3.9),
    "triton": (["attention_triton.py"], "on a GPU", 6, 0.1, 1.78),
    "blockwise": (["attention_blockwise.py"], "biases block by block", 6, 1.98, 2.03),
    "sdpa": (["attention_sdpa.py"], "biases as a mask", 6, 4.11, 1.7),
    "eager": (["attention.py"], "eager: all weights", 6, 5.91, 1.59),
    "kernels": (
        ["kernel_cope.py", "kernel_pope.py", "kernel_plain.py", "kernel_flash.py", "..."],
        "Triton kernels: forward, backward, decoding",
        7,
        0.1,
        5.71,
    ),
}
ARROWS = (
    ("decoder", "first"),
    ("first", "layers"),
    ("layers", "block"),
    ("block", "encoding"),
    ("block", "choice"),
    ("encoding", "attention"),
    ("choice", "attention"),
    ("attention", "triton"),
    ("attention", "blockwise"),
    ("attention", "sdpa"),
    ("attention", "eager"),
    ("triton", "kernels"),
)
HEIGHT, STEP = 0.5, 0.84


def forward() -> Any:
    """Returns the diagram of the files of `modeling/` that a forward pass runs through, from the top to the bottom."""
    tall = 7 * STEP + HEIGHT + 0.2
    figure, axes = canvas(7.6, tall)
    tops = {name: tall - 0.1 - STEP * row for name, (_, _, row, _, _) in BOXES.items()}

    def nearest(name: str, x: float) -> float:
        *_, left, width = BOXES[name]
        return min(max(x, left + 0.35), left + width - 0.35)

    for start, end in ARROWS:
        # Straight down where one box is above the other.
        *_, left, width = min(BOXES[start], BOXES[end], key=lambda box: box[-1])
        middle = left + width / 2
        places = (nearest(start, middle), tops[start] - HEIGHT), (nearest(end, middle), tops[end])
        arrow(axes, *places, color=QUIET, linewidth=1.1)
    for name, (files, line, _, left, width) in BOXES.items():
        colour = WHERE if name == "encoding" else WHAT if name in ("triton", "kernels") else LINE
        panel(axes, left, tops[name] - HEIGHT, width, HEIGHT, edgecolor=colour, linewidth=1.2)
        place = {"x": left + width / 2, "ha": "center", "va": "center"}
        axes.text(y=tops[name] - 0.17, s="   ".join(files), fontsize=9, family="monospace", color=INK, **place)
        axes.text(y=tops[name] - 0.37, s=line, fontsize=8.5, color=QUIET, **place)
    return figure


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    save_png(encodings(), IMAGES / "encodings.png", dpi=200)
    save_png(forward(), IMAGES / "forward.png", dpi=200)
