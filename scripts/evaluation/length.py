"""Bits per byte of a language model at several sequence lengths, on the same tokens.

The held-out stream of N + 1 tokens is cut into windows of n tokens. A window's inputs are tokens s .. s + n - 1, its
targets tokens s + 1 .. s + n: the model never sees more than n tokens at once, and whatever n is, tokens 1 .. N are
scored, each exactly once. A longer window only adds context (and positions beyond the trained ones).
"""

import dataclasses
import importlib
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm

from .figures import new_figure, save_figure


@dataclasses.dataclass(frozen=True)
class Cell:
    """One checkpoint at one length. The measured fields are None if the model cannot reach the length.

    Attributes:
        length: tokens in a window.
        multiple: length divided by the trained length.
        reached: whether the model can serve sequences of this length.
        reason: why not, in words; None if reached.
        bits_per_byte: total negative log2-likelihood of the scored tokens over their bytes.
        standard_error: of bits_per_byte, from the spread over windows (a ratio estimate); None for fewer than two.
        loss: mean negative log-likelihood per token, in nats.
        perplexity: exp(loss), per token.
        tokens: scored tokens.
        bytes: bytes of text that the scored tokens stand for.
        windows: number of windows.
    """

    length: int
    multiple: float
    reached: bool
    reason: str | None = None
    bits_per_byte: float | None = None
    standard_error: float | None = None
    loss: float | None = None
    perplexity: float | None = None
    tokens: int | None = None
    bytes: int | None = None
    windows: int | None = None


def reach(model: nn.Module) -> int | None:
    """Returns the longest sequence that `model` can serve, or None if its position encoding sets no limit.

    Our models say so themselves. A stock model is limited if it looks positions up in a table of embeddings.
    """
    config: Any = model.config
    if hasattr(config, "position_encoding"):
        # The list of encodings beside this model's class: the package's, or the checkpoint's own copy.
        siblings = type(model).__module__.rpartition(".")[0]
        return importlib.import_module(f"{siblings}.position_registry").max_length(config)
    for name, module in model.named_modules():
        leaf = name.rpartition(".")[2]
        if isinstance(module, nn.Embedding) and (leaf == "wpe" or "position" in leaf):
            return module.num_embeddings - getattr(module, "offset", 0)
    return None


def usable_tokens(requested: int | None, available: int, lengths: Sequence[int]) -> int:
    """Returns how many tokens to score: a multiple of every length in `lengths`.

    Args:
        requested: at least this many are wanted; None for 16 windows of the longest length.
        available: tokens in the stream; one of them is only ever context.
        lengths: all window lengths.

    Raises:
        ValueError: the stream is too short.
    """
    step = math.lcm(*lengths)
    wanted = 16 * max(lengths) if requested is None else requested
    count = max(1, math.ceil(wanted / step)) * step
    if count > available - 1 and requested is None:
        count = (available - 1) // step * step
    if count < 1 or count > available - 1:
        raise ValueError(
            f"tokens={requested!r} with windows of {', '.join(map(str, lengths))} tokens needs a test stream of "
            f"{max(count, step) + 1} tokens, but it holds {available}. Use more text, fewer tokens or shorter lengths."
        )
    return count


def has_plain_head(model: Any, inputs: torch.Tensor) -> bool:
    """Whether the logits are just output embedding x last hidden state (no cap, no factor), tried on `inputs`."""
    head = model.get_output_embeddings()
    if head is None or model.base_model is model:
        return False
    hidden = model.base_model(input_ids=inputs, use_cache=False).last_hidden_state
    logits = model(input_ids=inputs, use_cache=False).logits
    return torch.allclose(head(hidden).float(), logits.float(), rtol=1e-3, atol=1e-3)


def token_losses(
    model: Any, inputs: torch.Tensor, targets: torch.Tensor, *, plain_head: bool, chunk: int = 1024
) -> torch.Tensor:
    """Returns the negative log-likelihood in nats, float32 (B, T), of `targets` given `inputs`, both int64 (B, T).

    With `plain_head` the logits, float32, exist for `chunk` tokens at a time; otherwise for all of them at once.
    """
    if not plain_head:
        logits = model(input_ids=inputs, use_cache=False).logits.flatten(0, 1)
        return nn.functional.cross_entropy(logits.float(), targets.flatten(), reduction="none").view_as(targets)
    head = model.get_output_embeddings()
    hidden = model.base_model(input_ids=inputs, use_cache=False).last_hidden_state.flatten(0, 1)
    losses = [
        nn.functional.cross_entropy(head(rows).float(), labels, reduction="none")
        for rows, labels in zip(hidden.split(chunk), targets.flatten().split(chunk))
    ]
    return torch.cat(losses).view_as(targets)


@torch.inference_mode()
def measure(
    model: Any,
    token_ids: torch.Tensor,
    byte_counts: torch.Tensor,
    lengths: Sequence[int],
    *,
    trained_length: int,
    batch_tokens: int = 4096,
    name: str = "",
) -> list[Cell]:
    """Scores tokens 1 .. N of a stream of N + 1 at every length.

    Args:
        model: a causal language model of Transformers.
        token_ids: int64 (N + 1,), on any device.
        byte_counts: int64 (N + 1,), bytes of text that each token stands for.
        lengths: window lengths; each divides N.
        trained_length: for `Cell.multiple`.
        batch_tokens: windows are batched up to this many tokens (at least one window).
        name: shown beside the progress bar.
    """
    total = len(token_ids) - 1
    for length in lengths:
        if length < 1 or total % length:
            raise ValueError(f"length={length!r} does not divide the {total} scored tokens.")
    was_training = model.training
    model.eval()
    limit = reach(model)
    reached = [length for length in lengths if limit is None or length <= limit]
    plain_head = has_plain_head(model, token_ids[None, : min(16, *lengths)].to(model.device))
    losses = torch.empty(total, dtype=torch.float64)
    bytes_ = byte_counts[1:].to("cpu", torch.float64)
    cells = []
    # `disable=None`: on a terminal only.
    with tqdm(total=total * len(reached), desc=name, unit="token", leave=False, disable=None) as bar:
        for length in lengths:
            multiple = length / trained_length
            if length not in reached:
                reason = f"the position encoding reaches {limit} tokens"
                cells.append(Cell(length=length, multiple=multiple, reached=False, reason=reason))
                continue
            bar.set_postfix_str(f"length {length}")
            step = length * max(1, batch_tokens // length)
            for start in range(0, total, step):
                stop = min(start + step, total)
                inputs = token_ids[start:stop].view(-1, length).to(model.device)
                targets = token_ids[start + 1 : stop + 1].view(-1, length).to(model.device)
                losses[start:stop] = (
                    token_losses(model, inputs, targets, plain_head=plain_head).flatten().to("cpu", torch.float64)
                )
                bar.update(stop - start)
            cells.append(_summarise(losses.view(-1, length).sum(1), bytes_.view(-1, length).sum(1), length, multiple))
    model.train(was_training)
    return cells


def _summarise(nats: torch.Tensor, bytes_: torch.Tensor, length: int, multiple: float) -> Cell:
    """Builds a cell from per-window sums: negative log-likelihood in nats and bytes, both float64 (windows,)."""
    windows = len(nats)
    tokens = windows * length
    if bytes_.sum() == 0:
        raise ValueError("the scored tokens stand for no bytes of text at all.")
    bits = nats / math.log(2)
    ratio = (bits.sum() / bytes_.sum()).item()
    error = None
    if windows > 1:
        spread = (bits - ratio * bytes_).square().sum() * windows / (windows - 1)
        error = (spread.sqrt() / bytes_.sum()).item()
    loss = (nats.sum() / tokens).item()
    return Cell(
        length=length,
        multiple=multiple,
        reached=True,
        bits_per_byte=ratio,
        standard_error=error,
        loss=loss,
        perplexity=math.exp(loss),
        tokens=tokens,
        bytes=int(bytes_.sum().item()),
        windows=windows,
    )


def table(checkpoints: Sequence[dict[str, Any]]) -> str:
    """Returns the table of bits per byte, one row per checkpoint, in Markdown.

    Args:
        checkpoints: as in `length.json`.
    """
    multiples = sorted({cell["multiple"] for checkpoint in checkpoints for cell in checkpoint["cells"]})
    rows = [["checkpoint", "encoding", "trained length", *(f"{multiple:g}x" for multiple in multiples)]]
    for checkpoint in checkpoints:
        cells = {cell["multiple"]: cell for cell in checkpoint["cells"]}
        row = [checkpoint["name"], checkpoint["position_encoding"] or "stock", str(checkpoint["trained_length"])]
        rows.append(row + [_text(cells.get(multiple)) for multiple in multiples])
    return aligned_table(rows)


def aligned_table(rows: Sequence[Sequence[str]]) -> str:
    """Returns a table in Markdown whose columns are aligned as text, too; the first row is the header."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["| " + " | ".join(text.ljust(width) for text, width in zip(row, widths)) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def _text(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return "not measured"
    if not cell["reached"]:
        return "cannot reach"
    error = "" if cell["standard_error"] is None else f" ± {cell['standard_error']:.3f}"
    return f"{cell['bits_per_byte']:.3f}{error}"


def draw(checkpoints: Sequence[dict[str, Any]], stem: str | pathlib.Path) -> list[pathlib.Path]:
    """Draws bits per byte against length into `stem`.png and `stem`.svg and returns their paths.

    Args:
        checkpoints: as in `length.json`.
        stem: the path without its ending.
    """
    figure = new_figure(6.4, 4.2)
    axes = figure.add_subplot()
    lengths = sorted({cell["length"] for checkpoint in checkpoints for cell in checkpoint["cells"]})
    for index, checkpoint in enumerate(checkpoints):
        cells = [cell for cell in checkpoint["cells"] if cell["reached"]]
        unreached = [cell["length"] for cell in checkpoint["cells"] if not cell["reached"]]
        label = checkpoint["name"]
        if unreached:
            label += f" (cannot reach {min(unreached)})"
        axes.errorbar(
            [cell["length"] for cell in cells],
            [cell["bits_per_byte"] for cell in cells],
            yerr=[cell["standard_error"] or 0.0 for cell in cells],
            color=f"C{index % 10}",
            marker="osD^vPX*"[index % 8],
            capsize=2,
            label=label,
        )
    for trained in sorted({checkpoint["trained_length"] for checkpoint in checkpoints}):
        axes.axvline(trained, color="0.6", linestyle=":", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [str(length) for length in lengths], rotation=45 if len(lengths) > 6 else 0)
    axes.minorticks_off()
    axes.set_xlabel("sequence length (tokens); dotted: trained length")
    bars = any(cell["reached"] and cell["standard_error"] for one in checkpoints for cell in one["cells"])
    axes.set_ylabel("bits per byte, held-out text" + ("\n(bars: one standard error)" if bars else ""))
    axes.legend()
    axes.grid(alpha=0.3)
    return save_figure(figure, stem)
