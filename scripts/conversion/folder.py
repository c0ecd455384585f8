"""Folders with converted models."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig
from transformers.utils import cached_file

from whatwhere.model_card import known_origin, weights_fingerprint
from whatwhere.position_plan import check_name

from ..data.files import read_text
from ..data.prepared import file_sha256
from ..data.sonnets import sonnets
from ..data.tokenize import gguf_options, load_tokenizer, why_not_loaded
from ..evaluation.checkpoints import check_vocabulary, checked_loading
from ..writing import check_writable, write_json, writing
from .encoding import Converted, convert
from .record import RECORD, prompt_of
from .source import check_gguf, gguf_name, load_source
from .stock import stock_model, write_stock_card

# Of a calibration text: the characters that are read, the least and the most tokens, and the most in a row.
_CALIBRATION_CHARACTERS, _CALIBRATION_LEAST, _CALIBRATION_MOST, _CALIBRATION_ROW = 1 << 16, 256, 8192, 2048
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
    calibration_file: Path | None = None,
    exact: bool = False,
    stock: bool = False,
) -> Converted:
    """Writes a folder, which must be empty or new, with a converted model; returns the same as `convert`.

    Args:
        source: a folder or a Hub id.
        position_encoding: None for that of the source.
        gguf_file: the name of a GGUF file in it, whose weights are dequantised.
        calibration_file: a text on which the queries and keys of layers that change from RoPE to PoPE are measured;
            by default a short one of this package.
        exact: see `convert`.
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
    if calibration_file is not None and not calibration_file.is_file():
        raise ValueError(f"calibration_file={str(calibration_file)!r} is not valid: it must be a text file.")
    check_gguf(source, gguf_file)
    with checked_loading(source):
        AutoConfig.from_pretrained(source, **gguf_options(gguf_file))
    try:
        tokenizer = load_tokenizer(source, gguf_file)
    except (OSError, ValueError) as error:
        raise ValueError(f"checkpoint={source!r} is not valid: {why_not_loaded(source, error)}.") from error
    converted = convert_checkpoint(
        source,
        position_encoding,
        parameters,
        rope_parameters,
        gguf_file=gguf_file,
        calibration_file=calibration_file,
        exact=exact,
    )
    model = converted.model
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
        "new_parameters": converted.new,
        "dropped_parameters": converted.dropped,
    }
    record |= {"prompt": prompt, **gguf_options(gguf_file)}
    if rope_parameters is not None:
        record["rope_parameters"] = rope_parameters
    if converted.errors:
        record["fit_errors"] = converted.errors
        record["calibration_sha256"] = None if calibration_file is None else file_sha256(calibration_file)
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
    return converted._replace(model=model)


def fit_tokenizer(tokenizer: Any, model: Any) -> None:
    """Gives a tokenizer that has a shorter length than a model (`model_max_length`) the model's."""
    tokenizer.model_max_length = max(tokenizer.model_max_length, model.config.max_position_embeddings)


def _tokens(source: str, gguf_file: str | None, config: Any, calibration_file: Path | None) -> torch.Tensor | None:
    """Returns tokens of the calibration text in rows of one length, int64 (rows, tokens).

    Without a file, None if there is no tokenizer of text. Raises ValueError for a file that gives too few tokens, or
    that the tokenizer does not read.
    """
    try:
        tokenizer = load_tokenizer(source, gguf_file)
    except (OSError, ValueError):
        if calibration_file is None:
            return None
        raise
    texts = sonnets() if calibration_file is None else ["".join(_beginning(calibration_file))]
    try:
        ids = torch.tensor([token for text in texts for token in tokenizer(text, verbose=False)["input_ids"]])
    # The type that a vocabulary of words raises if it has no token for unknown ones.
    except Exception as error:
        if calibration_file is None:
            return None
        raise ValueError(
            f"calibration_file={str(calibration_file)!r} is not valid: the model's tokenizer does not read it: {error}."
        ) from error
    ids = ids[ids < config.vocab_size].long()
    length = min(len(ids), config.max_position_embeddings, _CALIBRATION_ROW)
    unknown = ids.tolist().count(tokenizer.unk_token_id)
    if calibration_file is not None and (len(ids) < _CALIBRATION_LEAST or unknown > len(ids) / 10):
        raise ValueError(
            f"calibration_file={str(calibration_file)!r} is not valid: the model's tokenizer gives {len(ids)} tokens, "
            f"{unknown} of them unknown words. Allowed: at least {_CALIBRATION_LEAST} tokens, at most a tenth of them "
            "unknown."
        )
    if length < 2 or unknown > len(ids) / 10:
        return None
    ids = ids[:_CALIBRATION_MOST]
    return ids[: len(ids) // length * length].view(-1, length)


def _beginning(file: Path) -> Iterator[str]:
    """Yields the beginning of a text file."""
    length = 0
    for piece in read_text(str(file)):
        yield piece
        length += len(piece)
        if length >= _CALIBRATION_CHARACTERS:
            return


def convert_checkpoint(
    source: str,
    position_encoding: str | list[str] | None = None,
    parameters: dict[str, Any] | None = None,
    rope_parameters: dict[str, Any] | None = None,
    *,
    gguf_file: str | None = None,
    calibration_file: Path | None = None,
    exact: bool = False,
) -> Converted:
    """Loads a folder or a Hub id, and returns the same as `convert`; parameters that are new in the source stay new.

    The arguments are those of `convert_folder`; an encoding that is not given stays the source's.
    """
    model = load_source(source, gguf_file)
    measured = []

    def text() -> torch.Tensor | None:
        measured.append(calibration_file)
        return _tokens(source, gguf_file, model.config, calibration_file)

    converted = convert(model, position_encoding, parameters, rope_parameters, text, exact=exact)
    if calibration_file is not None and not measured:
        raise ValueError(
            f"calibration_file={str(calibration_file)!r} has no effect: no layer is fitted, as where RoPE "
            "changes to PoPE without exact. Leave it out."
        )
    optional = {f"_raise_exceptions_for_{kind}": False for kind in ("missing_entries", "connection_errors")}
    record: Any = cached_file(source, RECORD, **optional)
    known = json.loads(Path(record).read_text(encoding="utf-8"))["new_parameters"] if record else ()
    names = [name for name, _ in converted.model.named_parameters()]
    return converted._replace(new=converted.new + [name for name in names if name in set(known) - set(converted.new)])
