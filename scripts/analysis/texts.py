"""Texts of the analyses, and their tokens."""

import argparse
import pathlib
import sys
from typing import Any

import torch

from ..evaluation.data_description import own_files
from ..evaluation.text import Part, warnings

# Plain prose with paragraphs and section titles.
PROSE = pathlib.Path(__file__).with_name("prose.txt")


def own_documents(options: argparse.Namespace) -> tuple[list[str], str] | None:
    """Returns the documents of `--validation-file` that have text, and their name; None without the option.

    Prints a warning if a checkpoint was trained on one of the files.
    """
    files, field = options.validation_file, options.text_field
    if not files:
        if field:
            raise ValueError(f"text_field={field!r} has no effect without --validation-file.")
        return None
    from ..data.rows import documents_of
    from ..data.source import read_files

    found, rows = read_files("validation_file", files, text_field=field or "text")
    for checkpoint in options.checkpoint:
        for warning, _ in warnings(checkpoint, [Part("local", files=tuple(found))], None):
            print(warning, file=sys.stderr)
    return list(filter(None, documents_of(rows))), own_files(files)


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
