"""The short model card (README.md) that saving and pushing writes; `whatwhere card` writes the full one, with results.

A generated card ends in a comment with a digest of its text, the fingerprint of its weights and the number of its tags.
A generated card without edits is replaced when other weights are saved to the folder, and copied with its weights.
Edited cards are kept.
"""

import hashlib
import json
import pathlib
import re
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

# Texts in the cards written by Transformers (when a model is pushed without a card) and by its Trainer.
_GENERIC = "This is the model card of a 🤗 transformers model that has been pushed on the Hub."
_TRAINER = "This model card has been generated automatically according to the information the Trainer had access to."
_MARK = "\n<!-- whatwhere card: text={text} weights={weights} tags={tags} -->\n"
_MARKED = re.compile(_MARK.format(text=r"(?P<text>\w+)", weights=r"(?P<weights>\w+)", tags=r"(?P<tags>\d+)") + r"\Z")
# The Hub's pipeline tag of each head.
PIPELINES = {
    "ForCausalLM": "text-generation",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
}

# In the card of a model that was saved without results.
NO_RESULTS = "No results are recorded for these weights."


def weights_fingerprint(folder: pathlib.Path) -> str:
    """Returns the SHA-256 of a folder's weights and position encoding: a change of the latter may leave all weights."""
    config = json.loads(file.read_bytes()) if (file := folder / "config.json").is_file() else {}
    encoding = {key: config[key] for key in config if key.startswith(("position_encoding", "rope"))}
    digest = hashlib.sha256(json.dumps(encoding, sort_keys=True).encode())
    for file in sorted([*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")]):
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def encoding_text(position_encoding: str | list[str]) -> str:
    """Returns `config.position_encoding` for readers: a name, or the names of a plan by layer, such as `rope, cope`."""
    return position_encoding if isinstance(position_encoding, str) else ", ".join(position_encoding)


def card_tags(config: Any) -> list[str]:
    """Returns the tags of a model's card."""
    return ["whatwhere", str(config.model_type), "position-encoding", *config.encoding_names]


def card_head(config: Any) -> tuple[str, str | None]:
    """Returns the Auto class that loads a model, and the Hub's pipeline tag."""
    head = next(filter((config.architectures or ["ForCausalLM"])[0].endswith, PIPELINES), "")
    return f"AutoModel{head}", PIPELINES.get(head)


def sign(data: ModelCardData, text: str, weights: str) -> ModelCard:
    """Returns a card with the comment that marks it as generated; `weights` is their fingerprint."""
    text = text.rstrip() + "\n"
    mark = _MARK.format(text=_digest(text), weights=weights, tags=len(data.tags or []))
    return ModelCard(f"---\n{data.to_yaml()}\n---\n{text}{mark}")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:16]


def read_card(folder: str | pathlib.Path | None) -> tuple[ModelCard | None, re.Match[str] | None]:
    """Returns the card in a folder, and its comment if it was generated here and not edited."""
    if folder is None or not (path := pathlib.Path(folder) / "README.md").is_file():
        return None, None
    card = ModelCard(path.read_text(encoding="utf-8"), ignore_metadata_errors=True)
    mark = _MARKED.search(card.text)
    return card, mark if mark and mark["text"] == _digest(card.text[: mark.start()]) else None


def plain(text: str) -> str:
    """Returns text on one line with Markdown characters and tags such as `<unk>` escaped."""
    return re.sub(r"[\\`*\[\]<|]|(?<!\w)_|_(?!\w)", r"\\\g<0>", " ".join(text.split()))


def encoding_rows(config: Any) -> str:
    """Returns the rows of a Markdown table with the position encoding and its parameters."""
    rows = [f"| `position_encoding` | `{encoding_text(config.position_encoding)}` |"]
    given = dict(config.position_encoding_parameters or {})
    given["rope_parameters"] = getattr(config, "rope_parameters", None) or {}
    for key, value in given.items():
        inside = {f"{key}.{inner}": one for inner, one in value.items()} if isinstance(value, dict) else {key: value}
        rows += [f"| `{name}` | `{one!r}` |" for name, one in inside.items()]
    return "\n".join(rows)


def loading_code(config: Any, name: str, *, comment: str = "", has_tokenizer: bool = False) -> str:
    """Returns the lines of Python that load a model, and its tokenizer."""
    auto, _ = card_head(config)
    lines = [f"from transformers import {auto}" + ", AutoTokenizer" * has_tokenizer, ""]
    lines.append(f"name = {json.dumps(name, ensure_ascii=False)}" + f"  # {comment}" * bool(comment))
    lines.append(f"model = {auto}.from_pretrained(name, trust_remote_code=True)")
    if has_tokenizer:
        lines.append("tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)")
    return "\n".join(lines)


def _short_text(config: Any, name: str) -> str:
    auto, _ = card_head(config)
    text = f"A `{config.model_type}` model with position encoding `{encoding_text(config.position_encoding)}`, made "
    text += f"with `whatwhere`. `{auto}` loads it, with the code in this repository:"
    end = f"{NO_RESULTS} Their licence is not known to this card."
    table = f"| parameter | value |\n|---|---|\n{encoding_rows(config)}"
    return "\n\n".join([f"\n# {plain(name)}", text, f"```python\n{loading_code(config, name)}\n```", table, end])


def complete_card(
    folder: str | pathlib.Path, config: Any, *, source: str | pathlib.Path | None = None, name: str | None = None
) -> None:
    """Writes README.md into a folder of newly saved weights, unless it has a user's card or an edited card.

    A card of the Trainer keeps its text, and missing metadata are added: licence, library, pipeline and tags. A
    generated card of the same weights in `source`, the folder that the model was loaded from, is copied without its
    figures. `name` is the Hub id, by default the folder's name.
    """
    folder = pathlib.Path(folder)
    name, weights = name or folder.resolve().name, weights_fingerprint(folder)
    text, pipeline = _short_text(config, name), card_head(config)[1]
    about: dict[str, Any] = {"license": "unknown", "library_name": "transformers"}
    about |= {"pipeline_tag": pipeline, "tags": card_tags(config)}
    data: Any = ModelCardData(**about)
    old, mark = read_card(folder)
    known, known_mark = read_card(source)
    if old is not None and mark is None and _GENERIC not in old.text:
        if _TRAINER in old.text:
            for key, value in about.items():
                mine = old.data.get(key)
                old.data[key] = list(dict.fromkeys([*(mine or []), *value])) if key == "tags" else mine or value
            old.save(folder / "README.md")
        return
    if mark and mark["weights"] == weights:
        return
    if known is not None and known_mark and known_mark["weights"] == weights:
        data, text = known.data, re.sub(r"!\[[^\]]*\]\([^)]*\)\n+", "", known.text[: known_mark.start()])
        text = re.sub(r'^name = "[^\n]*?"', lambda _: f"name = {json.dumps(name)}", text, flags=re.MULTILINE)
    card = sign(data, text, weights)
    if old is not None:
        # Additions by the user: tags after ours, and a licence.
        added = (old.data.get("tags") or [])[int(mark["tags"]) if mark else 0 :]
        card.data["tags"] = list(dict.fromkeys([*card.data["tags"], *added]))
        if mark and old.data.get("license") not in (None, "unknown"):
            card.data["license"] = old.data["license"]
    card.save(folder / "README.md")
