"""Perplexity of a language model in windows of several lengths, and by the position of a token within its window.

The protocol of PoPE's Figure 2 (books) and CoPE's Figure 3 (WikiText): a text of N + 1 tokens is cut into disjoint
windows of exactly n tokens, what is left at its end is dropped, and each window is read on its own. A window's inputs
are tokens s .. s + n - 1, its targets tokens s + 1 .. s + n. Perplexity is exp of the mean negative log-likelihood of
all targets of all windows of all texts. A text that holds no window is left out, and counted.

Unlike `length.py`, the tokens that are scored may differ between lengths: longer windows drop more, and leave out
short texts. The papers compare lengths so; within a length all models are scored on the same tokens.

By position: the mean negative log-likelihood of the tokens at the same places of their windows. A model that uses its
context has a falling curve; one that breaks beyond its trained length has a curve that turns up there, while the
perplexity of long windows mixes both parts.

Memory is linear in the length: logits exist for some tokens at a time (`length.token_losses`), and the default
attention of our models, and of stock models with SDPA, holds no matrix of (length, length); see `quadratic_memory`.
"""

import dataclasses
import itertools
import math
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from tqdm.auto import tqdm

from .figures import new_figure, save_figure
from .length import Cell, aligned_table, has_plain_head, token_losses


@dataclasses.dataclass(frozen=True, kw_only=True)
class WindowCell(Cell):
    """One model in windows of one length. Measured fields are None if the model cannot reach the length.

    Attributes, where they differ from those of `Cell`:
        standard_error: of `loss`, in nats, from the spread over `clusters` (a ratio estimate); None for fewer than two.
            That of the perplexity is about `perplexity` times this.
        bits_per_byte: None also if the tokenizer does not say how many bytes its tokens stand for.
        clusters: "documents", or "windows" if all windows are of one text: of what the standard error takes the spread.
        documents: texts that hold a window.
        short_documents: texts that hold none.
        dropped_tokens: tokens that are in no window, those of short texts too.
    """

    clusters: str | None = None
    documents: int | None = None
    short_documents: int | None = None
    dropped_tokens: int | None = None


def position_edges(length: int) -> list[int]:
    """Returns the edges of the buckets of positions in a window: 0, 16, 23, 32, 45, 64, ..., `length`.

    Two buckets for each doubling; the edges of a shorter window are among those of a longer one, but for its last.
    """
    halves = (round(16 * 2 ** (step / 2)) for step in itertools.count())
    return [0, *itertools.takewhile(lambda edge: edge < length, halves), length]


def windows_in(texts: Sequence[torch.Tensor], length: int) -> list[int]:
    """Returns how many windows of `length` tokens each text holds; its first token is only ever context."""
    return [max(0, len(ids) - 1) // length for ids in texts]


def fillable(texts: Sequence[torch.Tensor], lengths: Sequence[int]) -> tuple[list[int], list[int]]:
    """Splits lengths into those that fit into a text and those that do not; raises ValueError if none fits."""
    longest = max(len(ids) - 1 for ids in texts)
    filled = [length for length in lengths if length <= longest]
    if not filled:
        raise ValueError(
            f"windows={min(lengths)!r} is not valid: the longest of {len(texts)} documents has {longest} tokens to "
            "score. Use shorter windows, or more of each document (--document-tokens), or join documents (--join)."
        )
    return filled, [length for length in lengths if length > longest]


def quadratic_memory(model: Any, length: int) -> str | None:
    """Returns what holds an entry for every pair of tokens in a window, in words with its size, or None if nothing."""
    config = model.config
    implementation = config._attn_implementation
    heads = config.num_attention_heads
    if implementation == "eager":
        what, size = f"attn_implementation='eager' holds all attention weights of a layer, {heads} heads", 4 * heads
    elif implementation in ("sdpa", "flex_attention") and any(
        hasattr(module, "encodings") and bool(module.encodings.hooks["bias"]) for module in model.modules()
    ):
        what, size = f"attn_implementation={implementation!r} holds the bias of all {heads} heads", 4 * heads
    elif implementation == "sdpa" and length > (getattr(config, "sliding_window", None) or length):
        what, size = f"attn_implementation='sdpa' holds the mask of a sliding window of {config.sliding_window}", 1
    else:
        return None
    return f"{what}: {size * length**2 / 2**30:.2f} GiB at {length} tokens"


@torch.inference_mode()
def measure_windows(
    model: Any,
    texts: Sequence[torch.Tensor],
    byte_counts: torch.Tensor | None,
    length: int,
    *,
    trained_length: int,
    batch_tokens: int = 4096,
    name: str = "",
) -> tuple[WindowCell, dict[str, Any]]:
    """Scores all windows of one length.

    Args:
        model: a causal language model of Transformers, in any mode; it is left in eval mode.
        texts: token ids of each, integers (tokens), on any device.
        byte_counts: int64 (vocabulary), bytes of text that each token stands for; None if that is not known.
        length: tokens in a window.
        trained_length: for `Cell.multiple`.
        batch_tokens: windows of one text are batched up to this many tokens (at least one window).
        name: shown beside the progress bar.

    Returns:
        the cell; and the losses by position: `length`, `edges` (buckets + 1), `loss` (mean nats per token) and
        `tokens` of each bucket.

    Raises:
        ValueError: no text holds a window.
    """
    fillable(texts, [length])
    counts = windows_in(texts, length)
    model.eval()
    plain_head = has_plain_head(model, texts[0][None, : min(16, length)].to(model.device, torch.int64))
    by_position = torch.zeros(length, dtype=torch.float64)
    # Nats, tokens and bytes, of each window and of each text with windows.
    windows: list[tuple[float, float, float]] = []
    documents: list[tuple[float, ...]] = []
    step = max(1, batch_tokens // length)
    with tqdm(total=sum(counts) * length, desc=name, unit="token", leave=False, disable=None) as bar:
        for ids, count in zip(texts, counts):
            first = len(windows)
            for start in range(0, count, step):
                some = ids[start * length : min(start + step, count) * length + 1].to(torch.int64)
                inputs, targets = some[:-1].view(-1, length), some[1:].view(-1, length)
                losses = token_losses(
                    model, inputs.to(model.device), targets.to(model.device), plain_head=plain_head
                ).to("cpu", torch.float64)
                by_position += losses.sum(0)
                bytes_ = torch.zeros(len(targets)) if byte_counts is None else byte_counts[targets.cpu()].sum(1)
                windows += [(nats, length, size) for nats, size in zip(losses.sum(1).tolist(), bytes_.tolist())]
                bar.update(targets.numel())
            if count:
                documents.append(tuple(map(sum, zip(*windows[first:]))))
    clusters, parts = ("documents", documents) if len(documents) > 1 else ("windows", windows)
    nats, tokens, bytes_ = torch.tensor(parts, dtype=torch.float64).T
    loss = (nats.sum() / tokens.sum()).item()
    error = None
    if len(parts) > 1:
        spread = (nats - loss * tokens).square().sum() * len(parts) / (len(parts) - 1)
        error = (spread.sqrt() / tokens.sum()).item()
    total = len(windows) * length
    cell = WindowCell(
        length=length,
        multiple=length / trained_length,
        reached=True,
        bits_per_byte=(nats.sum() / math.log(2) / bytes_.sum()).item() if bytes_.sum() > 0 else None,
        standard_error=error,
        loss=loss,
        perplexity=math.exp(loss),
        tokens=total,
        bytes=int(bytes_.sum().item()) if byte_counts is not None else None,
        windows=len(windows),
        clusters=clusters,
        documents=len(documents),
        short_documents=counts.count(0),
        dropped_tokens=sum(len(ids) - 1 for ids in texts) - total,
    )
    edges = position_edges(length)
    sums = [by_position[start:stop].sum().item() for start, stop in itertools.pairwise(edges)]
    sizes = [(stop - start) * len(windows) for start, stop in itertools.pairwise(edges)]
    means = [total_ / size for total_, size in zip(sums, sizes)]
    return cell, {"length": length, "edges": edges, "loss": means, "tokens": sizes}


def label(checkpoint: dict[str, Any]) -> str:
    """Returns what a checkpoint of a results file is called in tables and figures: its name and its variant."""
    return checkpoint["name"] + (f", {checkpoint['variant']}" if checkpoint["variant"] else "")


def table(checkpoints: Iterable[dict[str, Any]]) -> str:
    """Returns the table of perplexities, one row per checkpoint and variant, in Markdown.

    Args:
        checkpoints: as in the results file.
    """
    checkpoints = list(checkpoints)
    lengths = sorted({cell["length"] for checkpoint in checkpoints for cell in checkpoint["cells"]})
    rows = [["checkpoint", "encoding", "trained length", *(f"{length:,}" for length in lengths)]]
    for checkpoint in checkpoints:
        cells = {cell["length"]: cell for cell in checkpoint["cells"]}
        row = [label(checkpoint), checkpoint["position_encoding"] or "stock", f"{checkpoint['trained_length']:,}"]
        rows.append(row + [_text(cells.get(length)) for length in lengths])
    return aligned_table(rows)


def _text(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return "not measured"
    if not cell["reached"]:
        return "cannot reach"
    value, error = cell["perplexity"], cell["standard_error"]
    digits = 2 if value < 1000 else 0
    return f"{value:,.{digits}f}" + ("" if error is None else f" ± {value * error:,.{digits}f}")


def draw(checkpoints: Sequence[dict[str, Any]], stem: str | pathlib.Path, *, title: str) -> list[pathlib.Path]:
    """Draws perplexity against the window, and loss by position in the longest window; returns the two files.

    Args:
        checkpoints: as in the results file.
        stem: the path without its ending, .png and .svg.
        title: what was scored.
    """
    columns = 3
    # One legend for both panels, below them: a row of it for three curves.
    figure = new_figure(11.0, 4.5 + 0.2 * math.ceil(len(checkpoints) / columns))
    from matplotlib import ticker

    left, right = figure.subplots(1, 2)
    figure.suptitle(title, fontsize="medium")
    # A colour for each checkpoint, a line style for each variant.
    names = list(dict.fromkeys(checkpoint["name"] for checkpoint in checkpoints))
    variants = list(dict.fromkeys(checkpoint["variant"] for checkpoint in checkpoints if checkpoint["variant"]))
    lengths = sorted({cell["length"] for checkpoint in checkpoints for cell in checkpoint["cells"]})
    for checkpoint in checkpoints:
        variant = checkpoint["variant"]
        index = names.index(checkpoint["name"])
        line: dict[str, Any] = {
            "color": f"C{index % 10}",
            "marker": "osD^vPX*"[index % 8],
            "markersize": 4,
            "linestyle": ("--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)))[variants.index(variant) % 4] if variant else "-",
        }
        cells = [cell for cell in checkpoint["cells"] if cell["reached"]]
        unreached = [cell["length"] for cell in checkpoint["cells"] if not cell["reached"]]
        text = label(checkpoint) + (f" (cannot reach {min(unreached):,})" if unreached else "")
        values = [cell["perplexity"] for cell in cells]
        errors = [cell["perplexity"] * (cell["standard_error"] or 0.0) for cell in cells]
        left.errorbar([cell["length"] for cell in cells], values, yerr=errors, capsize=2, label=text, **line)
        if checkpoint["by_position"]:
            longest = max(checkpoint["by_position"], key=lambda one: one["length"])
            edges = longest["edges"]
            # Buckets are drawn at the middle of their positions on the axis.
            middles = [math.sqrt(max(1, start) * stop) for start, stop in itertools.pairwise(edges)]
            right.plot(middles, longest["loss"], **{**line, "marker": None})
    for trained in sorted({checkpoint["trained_length"] for checkpoint in checkpoints}):
        left.axvline(trained, color="0.6", linestyle=":", linewidth=1)
        right.axvline(trained, color="0.6", linestyle=":", linewidth=1)
    left.set_xscale("log", base=2)
    left.set_yscale("log")
    labelled: list[int] = []
    for length in reversed(lengths):
        # Closer ones would be written over each other.
        if not labelled or labelled[-1] >= 1.25 * length:
            labelled.append(length)
    texts = [f"{length:,}" if length in labelled else "" for length in lengths]
    left.set_xticks(lengths, texts, rotation=60 if len(labelled) > 5 else 0)
    left.xaxis.set_minor_locator(ticker.NullLocator())
    left.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    left.yaxis.set_minor_formatter(ticker.LogFormatter(minor_thresholds=(2, 0.7)))
    left.set_xlabel("window (tokens); dotted: trained length")
    bars = any(cell["reached"] and cell["standard_error"] for one in checkpoints for cell in one["cells"])
    left.set_ylabel("perplexity" + (" (bars: one standard error)" if bars else ""))
    right.set_xscale("log", base=2)
    right.xaxis.set_major_formatter(ticker.FuncFormatter(lambda position, _: f"{int(position):,}"))
    right.set_xlabel("position in the longest window that was reached (tokens)")
    right.set_ylabel("loss (nats per token)")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=columns, fontsize="small")
    return save_figure(figure, stem)
