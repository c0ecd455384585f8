"""Descriptions of data for results files and cards: titles, licences and Hub ids.

Training writes the description into `results.json`, so that cards need only that file.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

# Corpora of symbols with their own tokenizer, not of readable text.
NO_TEXT = ("jsb_chorales", "maestro", "maestro_transposed", "genome", "genome_chr2")
# Before the names of files whose end, or some of whose documents, are held out.
HELD_OUT = "a held-out part of "
# Sources of text without a name of its own; by default, only a part is measured.
UNNAMED = ("stdlib", "hub", "local", "mixture")


def describe_data(data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the `data` of a results file with the description for a card; described data are returned unchanged.

    It adds `kind` ("text", "symbols" or "task") and `described`: for each used split its `choice` (which documents),
    `corpus` (None for unnamed corpora), `title`, `licence` (None if unknown) and `dataset` (its Hub id).
    """
    if "described" in data:
        return dict(data)
    source = data.get("source") or data["corpus"]
    split = str(data["split"]).partition("[")[0]
    if source == "mixture":
        return _describe_mixture(data, split)
    if source == "corpus":
        choices = dict(data["splits"])
    else:
        parts = dict.fromkeys(("train", split) if "source" in data else (split,))
        is_corpus = source not in (*UNNAMED, "task")
        choices = {part: f"{source}:{part}" if is_corpus else None for part in parts}
    described = {part: _describe(source, part, choice, data) for part, choice in choices.items()}
    corpus = described.get("train", described[split])["corpus"]
    kind = "task" if source == "task" else "symbols" if corpus in NO_TEXT else "text"
    return {**data, "kind": kind, "described": described}


def _describe_mixture(data: Mapping[str, Any], split: str) -> dict[str, Any]:
    texts = [describe_data({"splits": None, "dataset": None, **text, "split": split}) for text in data["mixture"]]
    total = sum(text["weight"] for text in texts)
    described = {}
    for part in ("train", split):
        ones = [text["described"].get(part) or text["described"]["train"] for text in texts]
        titles = [f"{one['title']} ({text['weight'] / total:.0%})" for one, text in zip(ones, texts)]
        licences = dict.fromkeys(f"{one['title']}: {one['licence'] or 'not known'}" for one in ones)
        choices = [text["described"].get(part, {}).get("choice") for text in texts]
        described[part] = {
            "choice": ", ".join(filter(None, choices)) or None,
            "corpus": None,
            "title": ", ".join(titles),
            "licence": "; ".join(licences),
            "dataset": None,
        }
    kinds = {text["kind"] for text in texts}
    kind = "symbols" if "symbols" in kinds else "text"
    return {**data, "kind": kind, "described": described}


def is_transfer(train: str | None, test: str | None) -> bool:
    """Returns whether two corpora, by name, are different ones; the forms of one share a prefix, as `maestro` does."""
    return train is not None and test is not None and not train.startswith(test) and not test.startswith(train)


def text_of(data: Mapping[str, Any]) -> str:
    """Returns the name of the evaluated text of a results file, with its split."""
    about = describe_data(data)
    split = about["split"]
    one = about["described"][split.partition("[")[0]]
    if about.get("source") == "corpus":
        split = one["choice"].partition(":")[2]
    elif about.get("source") == "hub":
        split = one["choice"] or split
    return f"{one['title']}, {split} split"


def curves_title(training: Mapping[str, Any]) -> str:
    """Returns the texts of the losses in the curves of a run."""
    data = describe_data(training["data"])
    if data["kind"] == "task":
        return data["described"]["train"]["title"]
    validation = text_of({**data, "split": "validation"} if "validation" in data["described"] else data)
    return f"trained on {data['described']['train']['title']}; validation: {validation}"


def loss_unit(training: Mapping[str, Any]) -> str:
    """Returns what loss and perplexity in a run's results are per: "byte" or "token"."""
    # Results of earlier versions do not say it.
    data = (training.get("recipe") or {}).get("data")
    is_bytes = isinstance(data, dict) and data.get("source") != "task" and data.get("tokenizer") == "bytes"
    return training.get("unit") or ("byte" if is_bytes else "token")


def measured_text(data: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]) -> str:
    """Returns the name of the text of length results, and how much of it is measured."""
    documents, limit = data["documents"], data["text_tokens"]
    text = f"{text_of(data)}: {documents:,} document" + "s" * (documents > 1)
    if data["joined"] and documents > 1:
        text += ", joined"
    if limit:
        text += f", the first {limit:,} tokens" + " of each" * (documents > 1 and not data["joined"])
    elif data["corpus"] in UNNAMED and entries:
        text += f", {max(entry['tokens'] for entry in entries):,} tokens"
    if data.get("bos_windows"):
        text += ", every window begins with BOS"
    return text


def _files_of(data: Mapping[str, Any], part: str) -> str:
    """Returns the names of the user's own files of a split, or of those that a part is held out of."""
    given = data.get("files") or data.get(f"{part}_file") or (data.get("splits") or {}).get(part)
    is_part = bool(data.get("held_out_part"))
    if not given and data.get("train_file"):
        given, is_part = data["train_file"], part != "train"
    if not given:
        return "local files"
    return (HELD_OUT if is_part else "") + own_files([given] if isinstance(given, str) else given)


def own_files(names: Sequence[str]) -> str:
    """Returns the names of the user's own files, folders or patterns for readers."""
    # Folders outside the current one are of the machine, not of the text.
    names = [os.path.basename(name.rstrip("/")) if os.path.isabs(name) else name for name in names]
    return ", ".join(names) if len(names) <= 3 else f"{names[0]}, {names[1]} and {len(names) - 2} more"


def _describe(source: str, part: str, choice: str | None, data: Mapping[str, Any]) -> dict[str, Any]:
    about: dict[str, Any] = {"choice": choice, "corpus": None, "title": source, "licence": None, "dataset": None}
    if choice is not None:
        from ..data.corpora import CORPORA

        name = choice.partition(":")[0]
        corpus = CORPORA[name]
        # URLs outside the Hub are not data sets.
        hub = (corpus.hub.get("train", ("",))[0] or "").removeprefix("hf://datasets/").partition("@")[0]
        about |= {"corpus": name, "title": corpus.title, "licence": corpus.licence}
        about["dataset"] = hub if hub and "://" not in hub else None
    elif data.get("dataset"):
        about |= {"title": data["dataset"], "dataset": data["dataset"], "choice": (data.get("splits") or {}).get(part)}
    elif data.get("task"):
        about |= {"title": f"toy task {data['task'].replace('_', ' ')}", "licence": "generated by the code"}
    elif source == "stdlib":
        about |= {"title": "source code of Python's standard library", "licence": "PSF License"}
    elif source == "local":
        about["title"] = _files_of(data, part)
    return about
