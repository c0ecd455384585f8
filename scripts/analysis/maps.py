"""Maps of a CoPE model on a text: gates, contextual positions, position attention, and attention.

Axes: L layers, H heads, T tokens; in a map (L, H, T, T) the rows are queries i, the columns keys j <= i.

Gates g_ij and positions p_ij are defined in the CoPE paper (2405.18719, Eq. 3 and 4). Position attention, as in Figure
4, is the softmax of the position logits (z_i[p_ij] in plain CoPE) without the content logits, scaled so that the
largest weight of each query is 1. Figure 6 shows the gates of the same heads.
"""

import contextlib
import dataclasses
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import torch

from ...attention_blockwise import join_digits
from ...cope_bias import GatedCoPEBias
from ...position_base import PositionContext
from ...position_plan import list_position_encodings
from ..evaluation.figures import new_figure, save_figure, wrapped
from ..evaluation.results import markdown_table
from .layers import attention_layers, watched

# The encodings with contextual positions.
COUNTING = ("cope", "cope_alibi", "cope_mlp", "token_gated_cope")
ALLOWED = [name for name in list_position_encodings() if set(COUNTING) & set(name.split("+"))]

TITLES = {
    "gates": "gates",
    "positions": "contextual positions",
    "position_attention": "attention by position alone (largest of a row: 1)",
    "attention": "attention",
}
KINDS = tuple(TITLES)

# Maximum number of tokens on the axes of a single map.
LABELLED = 256

# A heading of WikiText (" = = Description = = ") or of Wikipedia's own source ("== Description ==").
_HEADING = re.compile(r"^\s*=[= ]*\s+\S.*\s+=[= ]*\s*$|^\s*(=+)[^=\s].*\1\s*$")


@dataclasses.dataclass(frozen=True)
class Maps:
    """The maps of one text.

    Attributes:
        tokens: the text of every token.
        boundaries: for every token "newline" if it contains one, "heading" if it begins a section title, or "".
        layers: the indices of the layers with this encoding.
        last: the maximum position, or None without a limit.
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
        """Whether positions count from the first token, instead of back from the query."""
        return self.encoding.startswith("token_gated_cope")

    def summary(self) -> list[dict[str, Any]]:
        """Returns an entry per layer and head with mean gates over all pairs j <= i, in total and by kind of key.

        `gate_newline` and `gate_heading` are means over keys that are boundaries of this kind, `gate_other` over all
        others; None without such keys. `gate_deviation` is the standard deviation of the gates of all pairs: a gate may
        depend on the key, on the query, or on both. `first_position` is the mean over queries of the first token's
        position.
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
                entry["gate_deviation"] = gates[seen].std(correction=0).item()
                entry["first_position"] = self.positions[row, column, :, 0].double().mean().item()
                entries.append(entry)
        return entries

    def most_selective(self) -> dict[str, Any]:
        """Returns the entry of `summary` whose gates differ most, by `gate_deviation`."""
        return max(self.summary(), key=lambda entry: entry["gate_deviation"])


def boundaries(tokens: Sequence[str]) -> list[str]:
    """Returns for every token "newline" if it contains one, "heading" if it begins a section title, or ""."""
    # The line of a token is the line of its first character.
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
    ids: torch.Tensor,
    tokens: list[str],
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> Maps:
    """Runs a model on a text, and returns its gates, contextual positions and attention, without changing the model.

    Args:
        model: one of ours, with `eager` attention.
        ids: of the tokens, int64 (1, T).
        tokens: the text of each token.
        layers, heads: indices of those to return; by default all that have the encoding.

    Raises:
        ValueError: the encoding has no contextual positions, or there is no such layer or head.
    """
    name = getattr(model.config, "position_encoding", None)
    if name not in ALLOWED:
        raise ValueError(
            f"position_encoding={name!r} has no contextual positions. Allowed: {', '.join(map(repr, ALLOWED))}."
        )
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
    """Returns the layers or heads to show, in order; raises ValueError for one that does not exist."""
    for index in wanted or ():
        if index not in available:
            raise ValueError(f"{field}={list(wanted or ())!r} is not valid: {index} is not one of {available}.")
    return available if wanted is None else sorted(set(wanted))


def _last(part: Any) -> float | None:
    """Returns the maximum position of an encoding, or None."""
    if part.name == "cope_alibi":
        return None
    return part.parameters_.num_positions - (1.001 if part.name == "token_gated_cope" else 1)


def counted(
    part: Any, logits: torch.Tensor, query: torch.Tensor, context: PositionContext, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns gates and positions, (B, H, T, T) each, from the arguments of an encoding's `bias`, without a cache.

    Gates of masked keys are 0; positions are clamped as in the encoding.
    """
    hidden = torch.ones_like(logits, dtype=torch.bool).triu(1)
    if part.name == "token_gated_cope":
        # A gate per token, (B, G, T, n) to (B, H, 1, T).
        gates = join_digits(context.states[part.name]).transpose(2, 3).flatten(1, 2)[:, :, None]
        gates = gates.expand_as(logits).masked_fill(hidden, 0)
        positions = gates.cumsum(-1)
    else:
        gate_logits = logits
        if part.block_bias is GatedCoPEBias:
            tensors, (_, gate_scale, unrotated) = part.bias_inputs(context, scaling)
            query = context.query if unrotated else query
            gate_key = tensors[1].float()
            gate_key = gate_key.repeat_interleave(query.shape[1] // gate_key.shape[1], dim=1)
            gate_logits = query.float() @ gate_key.transpose(2, 3) * gate_scale
        gates = torch.sigmoid(gate_logits).masked_fill(hidden, 0)
        positions = gates.flip(-1).cumsum(-1).flip(-1)
    last = _last(part)
    return gates, positions if last is None else positions.clamp(0, last)


def draw(maps: Maps, kind: str, stem: str | pathlib.Path, *, name: str, text: str) -> list[pathlib.Path]:
    """Draws one kind of map for all layers (rows) and heads (columns); returns the paths of the PNG and the SVG.

    A single map of at most `LABELLED` tokens has the tokens on its axes.

    Args:
        name: of the checkpoint.
        text: its name.
    """
    values = getattr(maps, kind)
    rows, columns, length, _ = values.shape
    shown = values
    if kind == "attention":
        # Otherwise most rows of a long text would be pale.
        shown = values / values.amax(-1, keepdim=True).clamp(min=1e-12)
    shown = shown.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), torch.nan)
    # One image of all maps, with gaps between them.
    gap = max(1, length // 16) if rows * columns > 1 else 0
    step = length + gap
    shown = torch.nn.functional.pad(shown, (0, gap, 0, gap), value=torch.nan)
    mosaic = shown.permute(0, 2, 1, 3).reshape(rows * step, columns * step)[: rows * step - gap, : columns * step - gap]
    labelled = rows == columns == 1 and length <= LABELLED
    size = max(6.0, 0.11 * length) if labelled else 8.0 if rows == columns == 1 else 1.6
    figure = new_figure(max(4.0, columns * size) + 2, rows * size + 1.5)
    axes = figure.add_subplot()
    vmax = max(values.max().item(), 1e-6) if kind == "positions" else 1.0
    image = axes.imshow(mosaic.numpy(), cmap="viridis", vmin=0, vmax=vmax, interpolation="nearest")
    if labelled:
        texts = [printable(token) for token in maps.tokens]
        font: dict[str, Any] = {"fontsize": min(10.0, 60 * size / length), "family": "monospace"}
        axes.set_xticks(range(length), texts, rotation=90, **font)
        axes.set_yticks(range(length), texts, **font)
    elif rows * columns > 1:
        middles = [index * step + (length - 1) / 2 for index in range(max(rows, columns))]
        axes.set_xticks(middles[:columns], maps.heads)
        axes.set_yticks(middles[:rows], maps.layers)
    axes.set_xlabel("head, keys from left to right" if rows * columns > 1 else "key")
    axes.set_ylabel("layer, queries from top to bottom" if rows * columns > 1 else "query")
    title = f"{name}: {TITLES[kind]}"
    if rows == columns == 1:
        title += f", layer {maps.layers[0]}, head {maps.heads[0]}"
    title += f"; text: {text}"
    figure.suptitle(wrapped(title, figure.get_figwidth() - 0.5), fontsize="medium")
    label = "weight / largest weight of the row" if kind.endswith("attention") else TITLES[kind]
    figure.colorbar(image, ax=axes, label=label, shrink=0.8)
    return save_figure(figure, stem, palette=False)


def printable(token: str) -> str:
    """Returns a token as an axis label, with symbols for invisible characters, and `$` escaped for matplotlib."""
    signs = token.replace("\n", "⏎").replace("\t", "→").replace(" ", "·").replace("$", r"\$")
    return "".join(sign if sign.isprintable() else "·" for sign in signs)


def table(summary: Sequence[dict[str, Any]]) -> str:
    """Returns the summary of `Maps.summary` as a table in Markdown."""
    rows = [list(summary[0])]
    for entry in summary:
        layer, head, *numbers = entry.values()
        rows.append([str(layer), str(head), *("" if number is None else f"{number:.3f}" for number in numbers)])
    return markdown_table(rows)
