"""What a CoPE model counts on a text: gates, contextual positions, and the attention that positions alone would give.

Axes: L layers, H heads, T tokens; in a map (L, H, T, T) the rows are queries i, the columns keys j <= i.

The gates g_ij and positions p_ij are those of CoPE (2405.18719, Eq. 3 and 4). The position attention is what Figure 4
of the paper shows: the softmax of all that the encoding adds to the logits, z_i[p_ij] in plain CoPE, without the
content, scaled so that its largest weight is 1 for each query. Figure 6 shows the gates of the same heads.
"""

import contextlib
import dataclasses
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import torch

from ...position_base import PositionContext, join_digits
from ...position_cope import GatedCoPETerm
from ...position_registry import list_position_encodings
from ..evaluation.figures import new_figure, save_figure, wrapped
from .common import attention_layers, token_texts, watched

# The encodings that count, by what they are called in a model.
COUNTING = ("cope", "cope_alibi", "cope_mlp", "token_gated_cope")
ALLOWED = [name for name in list_position_encodings() if set(COUNTING) & set(name.split("+"))]

KINDS = ("gates", "positions", "position_attention", "attention")
TITLES = {
    "gates": "gates",
    "positions": "contextual positions",
    "position_attention": "attention by position alone (largest of a row: 1)",
    "attention": "attention",
}
# What the colours of a figure mean.
SCALES = {
    "gates": "gate",
    "positions": "position (counted tokens)",
    "position_attention": "weight / largest weight of the row",
    "attention": "weight / largest weight of the row",
}

# The marks of boundaries. The distance keeps those of neighbouring tokens apart.
MARKS: dict[str, dict[str, Any]] = {
    "newline": {"label": "newline", "marker": "+", "color": "black"},
    "heading": {"label": "section title", "marker": "x", "color": "red"},
}
DISTANCES = {"newline": 1, "heading": 2}

# Tokens that the axes of one map can name; with more, they have the tokens' indices.
LABELLED = 256

# A heading of WikiText (" = = Description = = ") or of Wikipedia's own source ("== Description ==").
_HEADING = re.compile(r"^\s*=[= ]*\s+\S.*\s+=[= ]*\s*$|^\s*(=+)[^=\s].*\1\s*$")


@dataclasses.dataclass(frozen=True)
class Maps:
    """The maps of one text.

    Attributes:
        encoding: as in `config.position_encoding`.
        tokens: the text of every token.
        boundaries: of every token "newline", if it holds one, "heading", if it begins a section's title, or "".
        layers: the indices of the layers; those that the encoding does not serve are left out.
        heads: the indices of the heads.
        last: the largest position, or None without a limit.
        gates, positions, position_attention, attention: float32 (L, H, T, T), 0 where j > i.
    """

    encoding: str
    tokens: list[str]
    boundaries: list[str]
    layers: list[int]
    heads: list[int]
    last: float | None
    gates: torch.Tensor
    positions: torch.Tensor
    position_attention: torch.Tensor
    attention: torch.Tensor

    @property
    def from_start(self) -> bool:
        """True if positions count from the first token on, and not back from the query."""
        return self.encoding.startswith("token_gated_cope")

    def summary(self) -> list[dict[str, Any]]:
        """Returns one entry per layer and head: mean gates over all pairs j <= i, and by what the key is.

        `gate_newline` and `gate_heading` are means over the keys that are such boundaries, `gate_other` over the rest;
        None without such keys. `gate_deviation` says how much the gates depend on the key: the standard deviation, over
        all pairs, of each key's mean gate. `first_position` is the mean over queries of the first token's position:
        back from the query that is how far it counts.
        """
        seen = torch.ones(len(self.tokens), len(self.tokens), dtype=torch.bool).tril()
        columns = {kind: torch.tensor([one == kind for one in self.boundaries]) for kind in ("newline", "heading", "")}
        entries = []
        for row, layer in enumerate(self.layers):
            for column, head in enumerate(self.heads):
                gates = self.gates[row, column].double()
                entry: dict[str, Any] = {"layer": layer, "head": head, "gate": gates[seen].mean().item()}
                for kind, chosen in columns.items():
                    mean = gates[seen & chosen].mean().item() if chosen.any() else None
                    entry[f"gate_{kind or 'other'}"] = mean
                counts = torch.arange(len(self.tokens), 0, -1)
                means = gates.sum(0) / counts
                entry["gate_deviation"] = ((means - entry["gate"]).square() * counts / counts.sum()).sum().sqrt().item()
                entry["first_position"] = self.positions[row, column, :, 0].double().mean().item()
                entries.append(entry)
        return entries

    def most_selective(self) -> dict[str, Any]:
        """Returns the entry of `summary` with the largest `gate_deviation`; the first of equal ones.

        A head that opens its gates to some tokens and not to others has a large one; a head that counts every token
        alike, and one whose gates are noise, a small one.
        """
        return max(self.summary(), key=lambda entry: entry["gate_deviation"])


def boundaries(tokens: Sequence[str]) -> list[str]:
    """Returns of every token "newline", if it holds one, "heading", if it begins a section's title, or ""."""
    # The line that every token begins in: what stands before its first newline belongs to that line.
    lines = "".join(tokens).split("\n")
    marks, line, fresh = [], 0, True
    for token in tokens:
        if "\n" in token:
            marks.append("newline")
            line += token.count("\n")
            fresh = True
        elif fresh and token.strip():
            marks.append("heading" if _HEADING.match(lines[line]) else "")
            fresh = False
        else:
            marks.append("")
    return marks


@torch.inference_mode()
def measure(
    model: Any,
    tokenizer: Any,
    ids: torch.Tensor,
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> Maps:
    """Runs a model on a text and returns its maps.

    Args:
        model: ours, with an encoding of `ALLOWED`, loaded with `attn_implementation="eager"`.
        tokenizer: its tokenizer, for the text of tokens.
        ids: int64 (1, T).
        layers: None for all that the encoding serves.
        heads: None for all.

    Raises:
        ValueError: an encoding that counts nothing; a layer or a head that there is not.
    """
    name = getattr(model.config, "position_encoding", None)
    if name not in ALLOWED:
        raise ValueError(f"position_encoding={name!r} counts nothing. Allowed: {', '.join(map(repr, ALLOWED))}.")
    if model.config._attn_implementation != "eager":
        raise ValueError(f"attn_implementation={model.config._attn_implementation!r} has no maps. Allowed: 'eager'.")
    counting = next(part for part in name.split("+") if part in COUNTING)
    served = {layer.layer_idx: layer for layer in attention_layers(model) if counting in layer.encodings}
    layers = _chosen("layers", layers, list(served))
    heads = _chosen("heads", heads, list(range(model.config.num_attention_heads)))
    found: dict[int, tuple[torch.Tensor, ...]] = {}
    with contextlib.ExitStack() as stack:
        for index in layers:
            encoding = served[index].encodings

            def watch(
                bias: torch.Tensor,
                logits: torch.Tensor,
                query: torch.Tensor,
                context: PositionContext,
                scaling: float,
                part: Any = encoding[counting],
                index: int = index,
            ) -> None:
                gates, positions = counted(part, logits, query, context, scaling)
                hidden = torch.ones_like(logits, dtype=torch.bool).triu(1)
                alone = bias.expand_as(logits).masked_fill(hidden, -torch.inf)
                alone = (alone - alone.amax(-1, keepdim=True)).exp()
                maps = (gates, positions.masked_fill(hidden, 0), alone)
                found[index] = tuple(one[0, heads].float().cpu() for one in maps)

            stack.enter_context(watched(encoding, "bias", watch))
        output = model(input_ids=ids, use_cache=False, output_attentions=True)
    gates, positions, alone = (torch.stack([found[index][which] for index in layers]) for which in range(3))
    part = served[layers[0]].encodings[counting]
    tokens = token_texts(tokenizer, ids[0].tolist())
    return Maps(
        encoding=name,
        tokens=tokens,
        boundaries=boundaries(tokens),
        layers=layers,
        heads=heads,
        last=_last(part),
        gates=gates,
        positions=positions,
        position_attention=alone,
        attention=torch.stack([output.attentions[index][0, heads].float().cpu() for index in layers]),
    )


def _chosen(field: str, wanted: Sequence[int] | None, available: list[int]) -> list[int]:
    """Returns the layers or heads to show, in order; raises ValueError for one that there is not."""
    for index in wanted or ():
        if index not in available:
            raise ValueError(f"{field}={list(wanted or ())!r} is not valid: {index} is not one of {available}.")
    return available if wanted is None else sorted(set(wanted))


def _last(part: Any) -> float | None:
    """Returns the position at which an encoding stops to count, or None."""
    if part.name == "cope_alibi":
        return None
    return part.parameters_.num_positions - (1.001 if part.name == "token_gated_cope" else 1)


def counted(
    part: Any, logits: torch.Tensor, query: torch.Tensor, context: PositionContext, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns gates and positions, (B, H, T, T) each, from what an encoding's `bias` is given, without a cache.

    Gates are 0 where a key is hidden; positions are as the encoding uses them, limited where it limits them.

    Args:
        part: the encoding of one layer, one of `COUNTING`.
        logits, query, context, scaling: see `PositionEncoding.bias`.
    """
    hidden = torch.ones_like(logits, dtype=torch.bool).triu(1)
    if part.name == "token_gated_cope":
        # A gate for each token, (B, G, T, n) to (B, H, 1, T).
        gates = join_digits(context.states[part.name]).transpose(2, 3).flatten(1, 2)[:, :, None]
        gates = gates.expand_as(logits).masked_fill(hidden, 0)
        positions = gates.cumsum(-1)
    else:
        opening = logits
        if part.term is GatedCoPETerm:
            tensors, (_, gate_scale) = part.term_inputs(context, scaling)
            gate_key = tensors[1].float()
            gate_key = gate_key.repeat_interleave(query.shape[1] // gate_key.shape[1], dim=1)
            opening = query.float() @ gate_key.transpose(2, 3) * gate_scale
        gates = torch.sigmoid(opening).masked_fill(hidden, 0)
        positions = gates.flip(-1).cumsum(-1).flip(-1)
    last = _last(part)
    return gates, positions if last is None else positions.clamp(0, last)


def draw(maps: Maps, kind: str, stem: str | pathlib.Path, *, name: str) -> list[pathlib.Path]:
    """Draws one kind of map for all layers (rows) and heads (columns); returns the paths of the PNG and the SVG.

    One map alone is large and has its tokens on the axes, up to `LABELLED` of them. Crosses beside the diagonal are
    boundaries; a legend says which, if there are any.

    Args:
        maps: from `measure`.
        kind: one of `KINDS`.
        stem: the path without its ending.
        name: of the model, for the title.
    """
    values = getattr(maps, kind)
    rows, columns, length, _ = values.shape
    alone = rows == columns == 1
    labelled = alone and length <= LABELLED
    places = {mark: [at for at, one in enumerate(maps.boundaries) if one == mark] for mark in MARKS}
    places = {mark: at for mark, at in places.items() if at}
    # All sizes are in inches. A layout engine would measure every text of up to hundreds of panels, several times.
    size = (max(6.0, 0.11 * length) if labelled else 8.0) if alone else 1.6
    gap = 0.12
    font = min(10.0, max(6.0, 36 * size / length))
    labels = [printable(token) for token in maps.tokens] if labelled else []
    # A monospaced character is 0.6 of its font's size wide.
    ticks = max(0.3, 0.62 * font / 72 * max(map(len, labels), default=0) + 0.1)
    inner_width, inner_height = columns * size + (columns - 1) * gap, rows * size + (rows - 1) * gap
    # The axis' name is one line, and two with the layer. Right: colour bar, its numbers and its name.
    left, right = ticks + (0.35 if alone else 0.5), 1.1
    width = max(5.0, left + inner_width + right)
    left += (width - left - inner_width - right) / 2
    title = wrapped(f"{name}: {TITLES[kind]}", width - 0.5)
    top = 0.45 + 0.2 * (title.count("\n") + 1)
    bottom = (ticks if labelled else 0.15) + 0.35 + (0.3 if places else 0)
    height = top + inner_height + bottom
    figure = new_figure(width, height)
    figure.set_layout_engine("none")
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator

    grid = figure.subplots(
        rows,
        columns,
        squeeze=False,
        sharex=True,
        sharey=True,
        gridspec_kw={
            "left": left / width,
            "right": (left + inner_width) / width,
            "bottom": bottom / height,
            "top": (bottom + inner_height) / height,
            "wspace": gap / size,
            "hspace": gap / size,
        },
    )
    # The axes share their limits and ticks: what is set on one holds for all.
    first = grid[0, 0]
    first.set_xlim(-0.5, length - 0.5)
    first.set_ylim(length - 0.5, -0.5)
    if labelled:
        first.set_xticks(range(length), labels, rotation=90, fontsize=font, family="monospace")
        first.set_yticks(range(length), labels, fontsize=font, family="monospace")
    else:
        for axis in (first.xaxis, first.yaxis):
            axis.set_major_locator(MaxNLocator(nbins=10 if alone else 3, integer=True))
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    shown = values.masked_fill(hidden, torch.nan)
    if kind == "attention":
        # Each row by its largest weight: in a long text all others would be pale.
        shown = shown / values.amax(-1, keepdim=True).clamp(min=1e-12)
    vmax = max(values.max().item(), 1e-6) if kind == "positions" else 1.0
    marker: dict[str, Any] = {"linestyle": "none", "markeredgewidth": 0.8, "markersize": 6 if alone else 4}
    # In tokens: the size of a mark, and at least one token.
    away = max(1.0, marker["markersize"] / 72 * length / size)
    for row in range(rows):
        for column in range(columns):
            axes = grid[row, column]
            image = axes.imshow(
                shown[row, column].numpy(),
                aspect="auto",
                extent=(-0.5, length - 0.5, length - 0.5, -0.5),
                cmap="viridis",
                vmin=0,
                vmax=vmax,
                interpolation="nearest",
            )
            # In the empty half, beside the diagonal.
            for mark, at in places.items():
                distance = DISTANCES[mark] * away
                x, y = [min(index + distance, length - 1) for index in at], [max(index - distance, 0) for index in at]
                axes.plot(x, y, **MARKS[mark], **marker, clip_on=False)
            # Only the outer panels have axes: drawing all of them takes most of the time.
            axes.xaxis.set_visible(row == rows - 1)
            axes.yaxis.set_visible(column == 0)
            if not labelled:
                axes.tick_params(labelsize="x-small", length=2)
            if alone:
                axes.set_xlabel("key" if labelled else "key (token)")
                axes.set_ylabel("query" if labelled else "query (token)")
                axes.set_title(f"layer {maps.layers[row]}, head {maps.heads[column]}", fontsize="medium")
            elif row == 0:
                axes.set_title(f"head {maps.heads[column]}", fontsize="small")
            if column == 0 and not alone:
                axes.set_ylabel(f"layer {maps.layers[row]}\nquery (token)", fontsize="small")
            if row == rows - 1 and not alone:
                axes.set_xlabel("key (token)", fontsize="small")
    figure.suptitle(title, fontsize="medium", x=0.5, y=1 - 0.1 / height, va="top")
    length_of_bar = min(0.8 * inner_height, 6.0)
    beside = [left + inner_width + 0.15, bottom + (inner_height - length_of_bar) / 2, 0.15, length_of_bar]
    bar = figure.add_axes([beside[0] / width, beside[1] / height, beside[2] / width, beside[3] / height])
    figure.colorbar(image, cax=bar)
    bar.tick_params(labelsize="small")
    bar.set_ylabel(SCALES[kind], fontsize="small")
    if places:
        figure.legend(
            handles=[Line2D([], [], **MARKS[mark], **marker) for mark in places],
            loc="lower center",
            bbox_to_anchor=(0.5, 0),
            ncols=len(places),
            fontsize="small",
            frameon=False,
        )
    return save_figure(figure, stem)


def printable(token: str) -> str:
    """Returns a token for an axis: what cannot be seen as a sign, `$` so that matplotlib reads no formula."""
    signs = token.replace("\n", "⏎").replace("\t", "→").replace(" ", "·").replace("$", r"\$")
    return "".join(sign if sign.isprintable() else "·" for sign in signs)


def table(summary: Sequence[dict[str, Any]]) -> str:
    """Returns the summary of `Maps.summary` as a table in Markdown."""
    keys = ("gate", "gate_newline", "gate_heading", "gate_other", "gate_deviation", "first_position")
    titles = (
        "mean gate",
        "of newlines",
        "of section titles",
        "of other tokens",
        "deviation between tokens",
        "position of the first token",
    )
    lines = ["| layer | head | " + " | ".join(titles) + " |", "|" + "---|" * (2 + len(keys))]
    for entry in summary:
        numbers = ("" if entry[key] is None else f"{entry[key]:.3f}" for key in keys)
        lines.append(f"| {entry['layer']} | {entry['head']} | " + " | ".join(numbers) + " |")
    return "\n".join(lines)
