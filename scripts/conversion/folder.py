"""Folders with converted models."""

import functools
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig
from transformers.utils import cached_file

from whatwhere.model_card import known_origin, weights_fingerprint
from whatwhere.position_plan import check_name

from ..data.prepared import file_sha256
from ..data.sonnets import sonnets
from ..data.tokenize import gguf_options, load_tokenizer, why_not_loaded
from ..evaluation.checkpoints import check_vocabulary, checked_loading
from ..writing import check_writable, write_json, writing
from .encoding import convert
from .record import RECORD, prompt_of
from .source import check_gguf, gguf_name, load_source
from .stock import stock_model, write_stock_card

# In the output, until it is complete.
DRAFT = ".partial"


def convert_folder(
    source: str,
    output: Path,
    position_encoding: str | list[str] | None,
    parameters: dict[str, Any] | None = None,
    rope_parameters: dict[str, Any] | None = None,
    *,
    gguf_file: str | None = None,
    stock: bool = False,
) -> tuple[Any, list[str], list[str]]:
    """Writes a folder, which must be empty or new, with a converted model; returns the same as `convert`.

    Args:
        source: a folder or a Hub id.
        position_encoding: None for that of the source.
        gguf_file: the name of a GGUF file in it, whose weights are dequantised.
        stock: write a stock Llama or GPT-2 (`stock_model`), which is returned.
    """
    # A killed conversion leaves its draft.
    if output.exists() and (not output.is_dir() or {file.name for file in output.iterdir()} - {DRAFT}):
        raise ValueError(f"output={str(output)!r} is not valid: it must be an empty or new folder.")
    check_writable(output)
    # Before a large source is loaded.
    for name in position_encoding if isinstance(position_encoding, list) else [position_encoding]:
        if name is not None:
            check_name(name)
    check_gguf(source, gguf_file)
    with checked_loading(source):
        AutoConfig.from_pretrained(source, **gguf_options(gguf_file))
    try:
        tokenizer = load_tokenizer(source, gguf_file)
    except (OSError, ValueError) as error:
        raise ValueError(f"checkpoint={source!r} is not valid: {why_not_loaded(source, error)}.") from error
    model, new, dropped = convert_checkpoint(
        source, position_encoding, parameters, rope_parameters, gguf_file=gguf_file
    )
    check_vocabulary(source, tokenizer, model.config)
    if rope_parameters is not None:
        fit_tokenizer(tokenizer, model)
    origin = known_origin(model.config)
    if stock:
        model = stock_model(model)
    local, prompt = None, None
    if os.path.isdir(source):
        folder = Path(source).resolve()
        local = weights_fingerprint(folder) if gguf_file is None else file_sha256(folder / gguf_file)
        name = None if gguf_file is None else gguf_name(str(folder / gguf_file))
        prompt, source = prompt_of(folder), name or folder.name
    record: dict[str, Any] = {
        "source": source,
        "source_weights_sha256": local,
        "new_parameters": new,
        "dropped_parameters": dropped,
    }
    record |= {"prompt": prompt, **gguf_options(gguf_file)}
    shutil.rmtree(output / DRAFT, ignore_errors=True)
    # The card has the name of its folder.
    draft = output / DRAFT / output.resolve().name
    try:
        with writing(output):
            model.save_pretrained(draft)
            tokenizer.save_pretrained(draft)
            if stock:
                write_stock_card(draft, model, origin)
            else:
                write_json(draft / RECORD, record)
        # Without config.json it does not load: a part is never taken for a model.
        for file in sorted(draft.iterdir(), key=lambda file: file.name == "config.json"):
            file.replace(output / file.name)
    finally:
        shutil.rmtree(output / DRAFT, ignore_errors=True)
    return model, new, dropped


def fit_tokenizer(tokenizer: Any, model: Any) -> None:
    """Gives a tokenizer that has a shorter length than a model (`model_max_length`) the model's."""
    tokenizer.model_max_length = max(tokenizer.model_max_length, model.config.max_position_embeddings)


def _tokens(source: str, gguf_file: str | None, config: Any) -> torch.Tensor | None:
    """Returns tokens of a text in rows of one length, int64 (rows, tokens); None without a tokenizer of text."""
    try:
        tokenizer = load_tokenizer(source, gguf_file)
    except (OSError, ValueError):
        return None
    ids = torch.tensor([token for text in sonnets() for token in tokenizer(text, verbose=False)["input_ids"]])
    ids = ids[ids < config.vocab_size]
    length = min(len(ids), config.max_position_embeddings, 2048)
    if length < 2 or ids.tolist().count(tokenizer.unk_token_id) > len(ids) / 10:
        return None
    return ids[: len(ids) // length * length].view(-1, length)


def convert_checkpoint(
    source: str,
    position_encoding: str | list[str] | None = None,
    parameters: dict[str, Any] | None = None,
    rope_parameters: dict[str, Any] | None = None,
    *,
    gguf_file: str | None = None,
) -> tuple[Any, list[str], list[str]]:
    """Loads a folder or a Hub id, and returns the same as `convert`; parameters that are new in the source stay new.

    The arguments are those of `convert_folder`; an encoding that is not given stays the source's.
    """
    model = load_source(source, gguf_file)
    text = functools.partial(_tokens, source, gguf_file, model.config)
    model, new, dropped = convert(model, position_encoding, parameters, rope_parameters, text)
    optional = {f"_raise_exceptions_for_{kind}": False for kind in ("missing_entries", "connection_errors")}
    record: Any = cached_file(source, RECORD, **optional)
    known = json.loads(Path(record).read_text(encoding="utf-8"))["new_parameters"] if record else ()
    new += [name for name, _ in model.named_parameters() if name in known and name not in new]
    return model, new, dropped
