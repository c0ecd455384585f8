"""Shared code of the analyses: checkpoints, texts, the text of single tokens, figures."""

import contextlib
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from transformers.convert_slow_tokenizer import bytes_to_unicode

from ..evaluation.results import read_json

SONNETS = pathlib.Path(__file__).with_name("sonnets.txt")

# Plain prose with paragraphs and section titles, for models with an unknown training corpus.
PROSE = pathlib.Path(__file__).with_name("prose.txt")

# A byte token of SentencePiece-style tokenizers.
_BYTE_FALLBACK = re.compile(r"^<0x([0-9A-Fa-f]{2})>$")


def describe(checkpoint: str, config: Any) -> dict[str, Any]:
    """Returns the entry of a checkpoint for a results file."""
    return {
        "name": pathlib.PurePath(checkpoint).name,
        "model_type": config.model_type,
        "position_encoding": getattr(config, "position_encoding", None),
    }


def refuse_plan(config: Any) -> None:
    """Raises ValueError if the layers of a model have different encodings, which the analyses do not support."""
    if isinstance(encoding := getattr(config, "position_encoding", None), list):
        raise ValueError(f"plans by layer are not supported: position_encoding={encoding!r}.")


def read_texts(path: pathlib.Path) -> list[str]:
    """Returns the texts of a UTF-8 file, separated by blank lines.

    `SONNETS` contains the first ten sonnets of Shakespeare (1609, public domain). PoPE's Figures 3 to 6 are means over
    ten sonnets that the paper does not name.

    Raises:
        ValueError: there is no text.
    """
    parts = re.split(r"\n[ \t]*\n", path.read_text(encoding="utf-8"))
    texts = [part.strip("\n") for part in parts if part.strip()]
    if not texts:
        raise ValueError(f"texts={str(path)!r} is empty.")
    return texts


def held_out_text(checkpoint: str, *, characters: int) -> tuple[str, str]:
    """Returns a text for a model and its description: held-out documents of its training corpus, else `PROSE`.

    The corpus is read from `results.json` in the checkpoint's folder. Documents are joined by blank lines, up to
    `characters`.

    Raises:
        ValueError, OSError: `results.json` is broken, or the corpus cannot be read.
    """
    path = pathlib.Path(checkpoint) / "results.json"
    results = read_json(path) if path.is_file() else {}
    data = (results.get("recipe") or {}).get("data", {})
    source = data.get("source", "task")
    if source == "task":
        return PROSE.read_text(encoding="utf-8"), "a short article in English"
    from ..data.corpus import load_text

    # Reads only a few documents, without downloading or copying the corpus.
    options = {key: data[key] for key in ("dataset", "dataset_config", "splits", "text_field") if key in data}
    text, split = "", results["data"].get("split", "test")
    for row in load_text(source, streaming=source != "stdlib", **options)[split]:
        text += ("\n\n" if text else "") + row["text"]
        if len(text) >= characters:
            break
    name = (data.get("splits") or {}).get(split) or data.get("dataset") or source
    return text, f"held-out text of the model's training corpus ({name}, split {split})"


def label_wavelengths(axes: Any, wavelengths: Sequence[float]) -> None:
    """Labels the rows of a heatmap of frequencies with at most 8 wavelengths in tokens."""
    every = -(-len(wavelengths) // 8)
    ticks = range(0, len(wavelengths), every)
    axes.set_yticks(ticks, [f"{wavelengths[tick]:,.0f}" for tick in ticks])
    axes.set_ylabel("wavelength (tokens)")


def encode(tokenizer: Any, text: str, device: Any) -> torch.Tensor:
    """Returns the token ids of a text, int64 (1, T), with the tokenizer's default special tokens."""
    ids = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"].to(device)
    if ids.shape[1] == 0:
        raise ValueError(f"text={text[:40]!r} has no tokens.")
    return ids


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Returns the text of each token; incomplete characters are written as bytes, such as <E2> or <E2 80>."""
    byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
    texts = []
    for token_id, token in zip(ids, tokenizer.convert_ids_to_tokens(list(ids))):
        text = tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
        if fallback := _BYTE_FALLBACK.match(token):
            byte = int(fallback[1], 16)
            text = chr(byte) if byte < 0x80 else f"<{byte:02X}>"
        elif token.startswith("▁"):
            # Decoded separately, such a token loses its space.
            text = token.replace("▁", " ")
        elif "\ufffd" in text and all(character in byte_of for character in token):
            text = "<" + " ".join(f"{byte_of[character]:02X}" for character in token) + ">"
        texts.append(text)
    return texts


def attention_layers(model: Any) -> list[Any]:
    """Returns the attention layers of one of our models, in order."""
    layers = [module for module in model.modules() if hasattr(module, "layer_idx")]
    return [module for module in layers if hasattr(module, "encodings")]


@contextlib.contextmanager
def watched(owner: Any, name: str, watch: Callable[..., None]) -> Iterator[None]:
    """Calls `watch(result, *arguments)` after every call of the method `owner.name` inside the context."""
    method = getattr(owner, name)

    def call(*arguments: Any) -> Any:
        result = method(*arguments)
        watch(result, *arguments)
        return result

    # Set on the instance, where it overrides the method of the class.
    setattr(owner, name, call)
    try:
        yield
    finally:
        delattr(owner, name)
