"""The short model card (README.md) that saving and pushing writes: what is known without a results file.

`whatwhere card` writes the full card with the measured results. A generated card ends in a comment with a digest of its
text, the fingerprint of the weights it is about and the number of its own tags: a card that nobody has edited is
replaced when other weights are saved beside it, and travels with its weights; one that somebody has edited stays.
"""

import hashlib
import json
import pathlib
import re
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

# How a card begins that Transformers writes when a model is pushed to a repository without one, and its Trainer.
_GENERIC = "This is the model card of a 🤗 transformers model that has been pushed on the Hub."
_TRAINER = "This model card has been generated automatically according to the information the Trainer had access to."
_MARK = "\n<!-- whatwhere card: text={text} weights={weights} tags={tags} -->\n"
_MARKED = re.compile(_MARK.format(text=r"(?P<text>\w+)", weights=r"(?P<weights>\w+)", tags=r"(?P<tags>\d+)") + r"\Z")
_PIPELINES = {
    "ForCausalLM": "text-generation",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
}


def weights_fingerprint(folder: str | pathlib.Path) -> str:
    """Returns the SHA-256 of the folder's safetensors files, in the order of their names."""
    digest = hashlib.sha256()
    for file in sorted(pathlib.Path(folder).glob("*.safetensors")):
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def card_tags(config: Any) -> list[str]:
    """Returns the tags of a model's card."""
    return ["whatwhere", str(config.model_type), "position-encoding", *str(config.position_encoding).split("+")]


def card_head(config: Any) -> tuple[str, str | None]:
    """Returns the Auto class that loads a model, and the Hub's pipeline tag."""
    architecture = (getattr(config, "architectures", None) or ["ForCausalLM"])[0]
    head = next((head for head in _PIPELINES if architecture.endswith(head)), "")
    return f"AutoModel{head}", _PIPELINES.get(head)


def sign(card: ModelCard, weights: str) -> ModelCard:
    """Returns a generated card with the comment at its end that says so; `weights` is their fingerprint."""
    text = card.text.rstrip() + "\n"
    digest = hashlib.sha256(text.encode("utf-8")).hexdigest()[:16]
    mark = _MARK.format(text=digest, weights=weights, tags=len(card.data.tags or []))
    return ModelCard(f"---\n{card.data.to_yaml()}\n---\n{text}{mark}")


def _read(folder: pathlib.Path) -> tuple[ModelCard | None, re.Match[str] | None]:
    """Returns the card in a folder, and its comment if it was generated here and nobody has edited it."""
    if not (folder / "README.md").is_file():
        return None, None
    card = ModelCard((folder / "README.md").read_text(encoding="utf-8"), ignore_metadata_errors=True)
    mark = _MARKED.search(card.text)
    digest = mark and hashlib.sha256(card.text[: mark.start()].encode("utf-8")).hexdigest()[:16]
    return card, mark if mark and mark["text"] == digest else None


def _short_card(config: Any, name: str) -> ModelCard:
    auto, pipeline = card_head(config)
    encoding = {"position_encoding": config.position_encoding, **(config.position_encoding_parameters or {})}
    encoding |= {"rope_parameters": rope} if (rope := getattr(config, "rope_parameters", None)) else {}
    data = ModelCardData(
        license="unknown", library_name="transformers", pipeline_tag=pipeline, tags=card_tags(config), model_name=None
    )
    title = re.sub(r"[\\`*_\[\]<|]", r"\\\g<0>", " ".join(name.split()))
    rows = "\n".join(f"| `{key}` | `{value!r}` |" for key, value in encoding.items())
    return ModelCard(
        f"---\n{data.to_yaml()}\n---\n# {title}\n\nA {config.model_type} model (base class `{auto}`) with position "
        f"encoding `{config.position_encoding}`, made with `whatwhere`. Its code is in this repository.\n\n"
        f"```python\nfrom transformers import {auto}\n\nname = {json.dumps(name, ensure_ascii=False)}\n"
        f"model = {auto}.from_pretrained(name, trust_remote_code=True)\n```\n\n"
        f"| parameter | value |\n|---|---|\n{rows}\n\n"
        "No measured results are recorded for these weights, and no licence is stated.\n"
    )


def complete_card(
    folder: str | pathlib.Path, config: Any, *, source: str | pathlib.Path | None = None, name: str | None = None
) -> None:
    """Writes README.md into a folder of freshly saved weights, unless it holds a card that somebody wrote or edited.

    A card of the Trainer keeps its text and gets the metadata that it lacks: licence, library, pipeline and tags.

    Args:
        folder: where the model was saved.
        config: the model's configuration.
        source: the folder that the model was loaded from, if any. A generated card there about the same weights is
            taken, without its figures.
        name: the Hub id; None for the folder's name.
    """
    folder = pathlib.Path(folder)
    weights, name = weights_fingerprint(folder), name or folder.resolve().name
    old, mark = _read(folder)
    card = _short_card(config, name)
    if old is not None and mark is None and _GENERIC not in old.text:
        if _TRAINER in old.text:
            for key in ("license", "library_name", "pipeline_tag"):
                old.data[key] = old.data.get(key) or card.data.get(key)
            old.data["tags"] = list(dict.fromkeys([*(old.data.get("tags") or []), *card.data["tags"]]))
            old.save(folder / "README.md")
        return
    if mark and mark["weights"] == weights:
        return
    known, known_mark = _read(pathlib.Path(source)) if source else (None, None)
    if known is not None and known_mark and known_mark["weights"] == weights:
        text = re.sub(r"!\[[^\]]*\]\([^)]*\)\n+", "", known.text[: known_mark.start()])
        text = re.sub(r'^name = "[^\n]*?"', lambda _: f"name = {json.dumps(name)}", text, flags=re.MULTILINE)
        card = ModelCard(f"---\n{known.data.to_yaml()}\n---\n{text}")
    signed = sign(card, weights)
    if old is not None:
        # Those that somebody added: ours come first.
        added = (old.data.get("tags") or [])[int(mark["tags"]) if mark else 0 :]
        signed.data["tags"] = list(dict.fromkeys([*signed.data["tags"], *added]))
        if mark and old.data.get("license") != "unknown":
            signed.data["license"] = old.data.get("license")
    signed.save(folder / "README.md")
