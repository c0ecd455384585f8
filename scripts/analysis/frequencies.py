"""Norms of queries and keys by frequency and layer, which show the used frequencies (PoPE, Figures 3 to 6).

Axes: F frequencies, L layers, H heads, T tokens, D channels of a head; R rotated channels.

For RoPE, which rotates R / 2 planes of two channels, the norm is the length in the plane. For PoPE, with R channels, it
is the magnitude. Neither depends on the position. Channels without rotation are left out. All numbers are means over
the tokens of a text and over heads, then over texts.
"""

import collections
import contextlib
import itertools
import math
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from ...position_plan import list_position_encodings
from ...position_pope import pope_frequencies
from ..evaluation.figures import new_figure, save_figure, wrapped
from ..evaluation.results import markdown_table
from .layers import attention_layers, draw_heatmap, watched, wavelengths_of
from .texts import encode

ALLOWED = [name for name in list_position_encodings() if {"rope", "pope"} & set(name.split("+"))]


def usage(
    kind: str, frequencies: torch.Tensor, layers: list[int], queries: torch.Tensor, keys: torch.Tensor, tokens: int
) -> dict[str, Any]:
    """Returns the entry of `frequencies.json`: all numbers, and a summary of each layer.

    `highest_quarter` is the share of the highest quarter of frequencies in the sum of norms (0.25 for equal norms).

    Args:
        frequencies: float64 (F,), radians per token, in the order of the channels (highest first).
        queries, keys: float64 (L, F), mean norms.
    """
    entry: dict[str, Any] = {"kind": kind, "tokens": tokens, "layers": layers, "frequencies": frequencies.tolist()}
    entry["wavelengths"] = wavelengths_of(frequencies)
    for side, norms in (("queries", queries), ("keys", keys)):
        quarter = max(1, round(norms.shape[1] / 4))
        entry[side] = norms.tolist()
        entry[f"{side}_highest_quarter"] = (norms[:, :quarter].sum(1) / norms.sum(1)).tolist()
    return entry


@torch.inference_mode()
def measure(model: Any, tokenizer: Any, texts: Sequence[str]) -> dict[str, Any]:
    """Returns `usage` of a model on texts; raises ValueError if its encoding is none of `ALLOWED`."""
    name = getattr(model.config, "position_encoding", None)
    if name not in ALLOWED:
        raise ValueError(f"position_encoding={name!r} has no frequencies. Allowed: {', '.join(map(repr, ALLOWED))}.")
    kind = "pope" if name == "pope" else "rope"
    shared = model.base_model.shared_encodings[kind]
    if kind == "pope":
        frequencies = pope_frequencies(model.config, shared.parameters_).double()
    else:
        frequencies = shared.rotary_emb.inv_freq.double().cpu()
    # The norms (F,) of each text, by side and layer.
    means = collections.defaultdict(list)
    layers = attention_layers(model)
    tokens = 0
    with contextlib.ExitStack() as stack:
        for layer in layers:
            part = layer.encodings[kind]

            def watch(result: Any, *arguments: Any, part: Any = part, index: int = layer.layer_idx) -> None:
                # The inputs of the attention; rotation does not change norms.
                query, key = result
                if kind == "pope":
                    if part.parameters_.scale == "1/sqrt(2d)":
                        # Our implementation applies a factor of the logits to the queries.
                        query = query * math.sqrt(2)
                    norms = [states[..., : part.rotated].abs() for states in (query, key)]
                else:
                    # Channels c and c + F are a plane.
                    planes = [states[..., : 2 * len(frequencies)].chunk(2, dim=-1) for states in (query, key)]
                    norms = [torch.hypot(*channels) for channels in planes]
                for side, one in zip(("queries", "keys"), norms):
                    means[side, index].append(one.double().mean((0, 1, 2)).cpu())

            stack.enter_context(watched(part, "before_cache", watch))
        for text in texts:
            ids = encode(tokenizer, text, model.device)
            tokens += ids.shape[1]
            model(input_ids=ids, use_cache=False)
    indices = [layer.layer_idx for layer in layers]
    queries, keys = (
        torch.stack([torch.stack(means[side, index]).mean(0) for index in indices]) for side in ("queries", "keys")
    )
    return usage(kind, frequencies, indices, queries, keys, tokens)


def draw(entries: Sequence[dict[str, Any]], stem: str | pathlib.Path, *, text: str) -> list[pathlib.Path]:
    """Draws heatmaps, one row of queries and keys per checkpoint, into `stem`.png and `stem`.svg; returns the paths.

    Checkpoints of the same kind have one colour scale. `text` is the name of the text.
    """
    figure = new_figure(9, 1 + 3.6 * len(entries))
    figure.suptitle(wrapped(f"text: {text}", 8.0), fontsize="medium")
    grid = figure.subplots(len(entries), 2, squeeze=False)
    for row, entry in zip(grid, entries):
        # Norms of planes of two channels, and magnitudes of single ones, are not compared.
        same = [one for one in entries if one["kind"] == entry["kind"]]
        top = max(norm for one in same for side in ("queries", "keys") for norms in one[side] for norm in norms)
        for axes, side in zip(row, ("queries", "keys")):
            norms = torch.tensor(entry[side], dtype=torch.float64).T
            title = f"{entry['name']}: {side} ({entry['kind']})"
            draw_heatmap(axes, norms, entry["wavelengths"], label="mean norm", title=title, vmin=0, vmax=top)
            every = max(1, len(entry["layers"]) // 12)
            axes.set_xticks(range(0, len(entry["layers"]), every), [str(i) for i in entry["layers"][::every]])
            axes.set_xlabel("layer")
    return save_figure(figure, stem, palette=False)


def table(entries: Sequence[dict[str, Any]]) -> str:
    """Returns a table with a row per checkpoint and side: the summary of `usage`, as the mean over layers."""
    rows = [["checkpoint", "side", "norms in the highest quarter of frequencies"]]
    for entry, side in itertools.product(entries, ("queries", "keys")):
        rows.append([entry["name"], side, f"{statistics.mean(entry[f'{side}_highest_quarter']):.3f}"])
    return markdown_table(rows)
