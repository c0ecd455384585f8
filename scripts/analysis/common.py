"""Shared code of the analyses: checkpoints, texts, the text of single tokens, figures."""

import argparse
import contextlib
import pathlib
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch

from ..evaluation.data_description import own_files
from ..evaluation.figures import wrapped

# The first ten of Shakespeare (1609, public domain). PoPE's Figures 3 to 6 are means over ten that it does not name.
SONNETS = pathlib.Path(__file__).with_name("sonnets.txt")

# Plain prose with paragraphs and section titles.
PROSE = pathlib.Path(__file__).with_name("prose.txt")


def describe(checkpoint: str, config: Any) -> dict[str, Any]:
    """Returns the entry of a checkpoint for a results file."""
    return {
        "name": pathlib.PurePath(checkpoint).name,
        "model_type": config.model_type,
        "position_encoding": getattr(config, "position_encoding", None),
    }


def sonnets() -> list[str]:
    """Returns the texts of `SONNETS`."""
    return SONNETS.read_text(encoding="utf-8").strip().split("\n\n")


def own_documents(options: argparse.Namespace) -> tuple[list[str], str] | None:
    """Returns the documents of `--validation-file` that have text, and their name; None without the option."""
    files, field = options.validation_file, options.text_field
    if not files:
        if field:
            raise ValueError(f"text_field={field!r} has no effect without --validation-file.")
        return None
    from ..data.rows import documents_of
    from ..data.source import read_files

    _, rows = read_files("validation_file", files, text_field=field or "text")
    return list(filter(None, documents_of(rows))), own_files(files)


def draw_heatmap(
    axes: Any, values: torch.Tensor, wavelengths: Sequence[float], *, label: str, title: str, **options: Any
) -> None:
    """Draws values (F, columns) with at most 8 wavelengths in tokens as labels of the rows."""
    image = axes.imshow(values.numpy(), aspect="auto", cmap="viridis", interpolation="nearest", **options)
    axes.figure.colorbar(image, ax=axes, label=label)
    every = -(-len(wavelengths) // 8)
    ticks = range(0, len(wavelengths), every)
    axes.set_yticks(ticks, [f"{wavelengths[tick]:,.0f}" for tick in ticks])
    axes.set_ylabel("wavelength (tokens)")
    axes.set_title(wrapped(title, 3.6), fontsize="medium")


def encode(tokenizer: Any, text: str, device: Any) -> torch.Tensor:
    """Returns the token ids of a text, int64 (1, T), with the tokenizer's default special tokens."""
    ids = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"].to(device)
    if ids.shape[1] == 0:
        raise ValueError(f"text={text[:40]!r} has no tokens.")
    return ids


def token_texts(tokenizer: Any, text: str) -> list[str]:
    """Returns the part of a text that each token adds: nothing for later bytes of a character; special tokens by name.

    Args:
        tokenizer: a fast one.
    """
    encoded = tokenizer(text, return_offsets_mapping=True, verbose=False)
    texts, end = [], 0
    names = tokenizer.convert_ids_to_tokens(encoded["input_ids"])
    for name, (before, after) in zip(names, encoded["offset_mapping"]):
        texts.append(name if before == after else text[end:after])
        end = max(end, after)
    return texts


def attention_layers(model: Any) -> list[Any]:
    """Returns the attention layers of one of our models, in order."""
    layers = [module for module in model.modules() if hasattr(module, "layer_idx")]
    return [module for module in layers if hasattr(module, "encodings")]


def watched(owner: Any, name: str, watch: Callable[..., None]) -> contextlib.AbstractContextManager:
    """Within it, `watch(result, *arguments)` is called after every call of the method `owner.name`."""
    method = getattr(owner, name)

    def call(*arguments: Any) -> Any:
        result = method(*arguments)
        watch(result, *arguments)
        return result

    return mock.patch.object(owner, name, call)
