"""What the analyses share: checkpoints, texts, the text of single tokens, figures."""

import contextlib
import hashlib
import json
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..data.tokenize import _byte_characters
from ..evaluation import checkpoints

SONNETS = pathlib.Path(__file__).with_name("sonnets.txt")

# Plain prose with paragraphs and section titles, for models whose training corpus is not known.
PROSE = pathlib.Path(__file__).with_name("prose.txt")

# A byte that SentencePiece-style tokenizers write as a token of its own.
_BYTE_FALLBACK = re.compile(r"^<0x([0-9A-Fa-f]{2})>$")


def load_model(
    checkpoint: str,
    *,
    device: str | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
) -> Any:
    """Returns a causal language model in float32, in eval mode.

    Args:
        checkpoint: a folder or a Hub id.
        device: None for the GPU if there is one.
        attn_implementation: None for the model's default.
        trust_remote_code: run the code in the checkpoint's folder.

    Raises:
        ValueError: it cannot be loaded, with the reason.
    """
    loading = checkpoints.Loading(
        device=checkpoints.choose_device(device),
        attn_implementation=attn_implementation,
        trust_remote_code=trust_remote_code,
    )
    return loading.model(checkpoint, loading.config(checkpoint)).eval()


def describe(checkpoint: str, config: Any) -> dict[str, Any]:
    """Returns what a results file says about a checkpoint."""
    return {
        "name": pathlib.PurePath(checkpoint).name,
        "model_type": config.model_type,
        "position_encoding": getattr(config, "position_encoding", None),
    }


def read_text(path: str | pathlib.Path) -> str:
    """Returns a text file, UTF-8; raises ValueError if it cannot be read or is blank."""
    try:
        text = pathlib.Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"text={str(path)!r} cannot be read: {error}") from error
    if not text.strip():
        raise ValueError(f"text={str(path)!r} holds no text.")
    return text


def read_texts(path: str | pathlib.Path) -> list[str]:
    """Returns the texts of a UTF-8 file, which blank lines separate.

    `SONNETS` holds the first ten sonnets of Shakespeare (1609, public domain): PoPE's Figures 3 to 6 are means over
    ten, and the paper does not say over which.
    """
    return [part.strip("\n") for part in re.split(r"\n[ \t]*\n", read_text(path)) if part.strip()]


def describe_texts(path: str | pathlib.Path, texts: Sequence[str]) -> dict[str, Any]:
    """Returns what a results file says about the texts it was made from."""
    source = "Shakespeare, sonnets 1 to 10" if pathlib.Path(path) == SONNETS else pathlib.PurePath(path).name
    return {"source": source, "count": len(texts), "sha256": hashlib.sha256("\n\n".join(texts).encode()).hexdigest()}


def held_out_text(checkpoint: str, *, characters: int) -> tuple[str, str]:
    """Returns a text that fits a model, and what it is: held-out documents of its training corpus, else `PROSE`.

    The corpus is the one that `results.json` in the folder of the checkpoint names. Documents are joined by a blank
    line until there are `characters`.

    Raises:
        ValueError: `results.json` is broken.
    """
    path = pathlib.Path(checkpoint) / "results.json"
    try:
        results = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        data, about = results.get("recipe", {}).get("data", {}), results.get("data", {})
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{str(path)!r} is not a results file of a run: {error}") from error
    source = data.get("source")
    if source is None:
        reason = "the checkpoint does not say what it was trained on"
    elif source == "task":
        reason = f"the model was trained on the task {data.get('task')!r}, not on text"
    else:
        split = about.get("split", "test")
        keys = ("dataset", "dataset_config", "splits", "text_field")
        try:
            from ..data.corpus import load_text

            # A few documents are enough: nothing is downloaded or copied as a whole.
            options = {key: data[key] for key in keys if key in data}
            corpus = load_text(source, streaming=source != "stdlib", **options)
            text = ""
            for row in corpus[split]:
                if not row["text"].strip():
                    continue
                text += ("\n\n" if text else "") + row["text"]
                if len(text) >= characters:
                    break
            if text:
                name = "the Python standard library" if source == "stdlib" else data.get("dataset") or source
                if isinstance(data.get("splits"), dict):
                    name = data["splits"].get(split, name)
                return text, f"held-out text of the model's training corpus ({name}, split {split})"
            reason = f"the split {split!r} of the training corpus holds no text"
        except (ValueError, KeyError, OSError, ImportError) as error:
            reason = f"the model's training corpus cannot be loaded: {error}"
    return read_text(PROSE), f"a short article in English; {reason}"


def label_wavelengths(axes: Any, wavelengths: Sequence[float]) -> None:
    """Labels the rows of a heatmap, one for each frequency, with wavelengths in tokens: every k-th row, at most 8."""
    every = -(-len(wavelengths) // 8)
    ticks = range(0, len(wavelengths), every)
    axes.set_yticks(ticks, [f"{wavelengths[tick]:,.0f}" for tick in ticks])
    axes.set_ylabel("wavelength (tokens)")


def encode(tokenizer: Any, text: str, device: Any) -> torch.Tensor:
    """Returns the token ids of a text, int64 (1, T), with the special tokens that the tokenizer adds by itself."""
    ids = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"].to(device)
    if ids.shape[1] == 0:
        raise ValueError(f"text={text[:40]!r} has no tokens.")
    return ids


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Returns the text of every token on its own; bytes that are only a part of a character as <E2> or <E2 80>."""
    byte_of = {character: byte for byte, character in enumerate(_byte_characters())}
    texts = []
    for token_id, token in zip(ids, tokenizer.convert_ids_to_tokens(list(ids))):
        text = tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
        if fallback := _BYTE_FALLBACK.match(token):
            byte = int(fallback[1], 16)
            text = chr(byte) if byte < 0x80 else f"<{byte:02X}>"
        elif token.startswith("▁"):
            # On its own such a token is decoded without its space.
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
    """While the context lasts, `watch(result, *arguments)` sees every call of the method `owner.name`."""
    method = getattr(owner, name)

    def call(*arguments: Any) -> Any:
        result = method(*arguments)
        watch(result, *arguments)
        return result

    # On the instance, where it hides the method of the class.
    setattr(owner, name, call)
    try:
        yield
    finally:
        delattr(owner, name)
