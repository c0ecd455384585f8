"""Loading of checkpoints, ours or stock, with one clear sentence when that fails; the length they were trained at."""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from safetensors import SafetensorError


def names_of(checkpoints: Sequence[str]) -> list[str]:
    """Returns what checkpoints are called in results: the last part of each path, or the whole ones if two end alike.

    Raises:
        ValueError: one is given twice.
    """
    for checkpoint in checkpoints:
        if checkpoints.count(checkpoint) > 1:
            raise ValueError(f"checkpoint={checkpoint!r} is given twice.")
    short = [pathlib.PurePath(checkpoint).name for checkpoint in checkpoints]
    return short if len(set(short)) == len(short) else list(checkpoints)


def load_config(checkpoint: str, *, trust_remote_code: bool = False, **changes: Any) -> Any:
    """Returns the configuration of a folder or Hub id with some fields changed.

    Raises:
        ValueError: it cannot be read, with the reason.
    """
    folder = pathlib.Path(checkpoint)
    if folder.exists() and not (folder / "config.json").is_file():
        raise ValueError(f"checkpoint={checkpoint!r} is not a model folder: it has no config.json.")
    try:
        return transformers.AutoConfig.from_pretrained(checkpoint, trust_remote_code=trust_remote_code, **changes)
    except (OSError, ValueError) as error:
        where = "" if folder.exists() else "it is no folder here, and as a Hub id: "
        raise ValueError(f"checkpoint={checkpoint!r} cannot be loaded: {where}{error}") from error


def load_model(
    checkpoint: str, config: Any, *, dtype: str, attn_implementation: str | None, trust_remote_code: bool
) -> Any:
    """Returns the model of a folder or Hub id; raises ValueError with the reason if it cannot be loaded."""
    try:
        return transformers.AutoModelForCausalLM.from_pretrained(
            checkpoint,
            config=config,
            trust_remote_code=trust_remote_code,
            dtype=getattr(torch, dtype),
            attn_implementation=attn_implementation,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"checkpoint={checkpoint!r} cannot be loaded: {error}") from error


def load_tokenizer(checkpoint: str, *, trust_remote_code: bool = False) -> Any:
    """Returns the tokenizer of a folder or Hub id; raises ValueError with the reason if it cannot be loaded."""
    try:
        return transformers.AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(f"the tokenizer of checkpoint={checkpoint!r} cannot be loaded: {error}") from error


def trained_length_of(checkpoint: str, config: Any) -> int:
    """Returns the length a model was trained at: what its `results.json` says, else its configuration.

    Raises:
        ValueError: neither says it.
    """
    results = pathlib.Path(checkpoint) / "results.json"
    length = json.loads(results.read_text(encoding="utf-8")).get("length") if results.is_file() else None
    length = length or getattr(config, "max_position_embeddings", None)
    if not isinstance(length, int) or length < 1:
        raise ValueError(f"checkpoint={checkpoint!r} does not say the length it was trained at: give --trained-length.")
    return length
