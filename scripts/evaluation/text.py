"""The text that is measured: what runs held out, or what the options say.

The `data` and `held_out` of a run's `results.json` say where its text is from, and which documents were held out.
"""

import argparse
import filecmp
import functools
import itertools
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from .checkpoints import weights_of
from .data_description import is_transfer, text_of
from .results import read_json

GIVE = "Give the text: --validation-file FILE, or --data NAME (see `whatwhere length --help`)."
_HUB = re.compile(r"hub(:(?P<split>[^\[\]:]+(\[\d*:\d*\])?))?")


class Part(NamedTuple):
    """A split of one source of text: the name of its corpus or data set, and the split with its slice; or its files."""

    source: str
    name: str = ""
    split: str = ""
    files: tuple[str, ...] = ()


class Text(NamedTuple):
    """A text to measure: its `data` for results files, a function that returns its documents, and what it is part of.

    `parts` are empty for a part of training files that was held out.
    """

    data: dict[str, Any]
    documents: Callable[[], Iterable[str]]
    parts: Sequence[Part]


def given_text(options: argparse.Namespace) -> Text | None:
    """Returns the text that the options of `length` name, or None."""
    from ..data.corpora import load_corpus, parse_choice
    from ..data.folder import DATA_DIR_VARIABLE
    from ..data.rows import documents_of
    from ..data.source import load_text, read_files

    named, files = options.data, options.validation_file
    hub = _HUB.fullmatch(named or "")
    used = {
        "data": not files,
        "dataset": hub,
        "dataset_config": hub,
        "text_field": hub or files,
        "data_dir": not (hub or files or named == "stdlib"),
    }
    for option, is_used in used.items():
        if getattr(options, option) is not None and not is_used:
            given = "--validation-file" if files else f"--data {named}" if named else "neither --data hub nor files"
            raise ValueError(f"--{option.replace('_', '-')} has no effect with {given}.")
    field = options.text_field or "text"
    if files:
        found, rows = read_files("validation_file", files, text_field=field)
        data = {"corpus": "local", "split": "validation", "place": "local files", "files": files}
        return Text(data, functools.partial(documents_of, rows), [Part("local", files=tuple(found))])
    if named is None:
        return None
    if named == "stdlib":
        data = {"corpus": "stdlib", "split": "test", "place": "local files"}
        return Text(data, lambda: load_text()["test"]["text"], [Part("stdlib", split="test")])
    if hub:
        split = hub["split"] or "test"
        data = {"corpus": "hub", "split": split, "place": "the Hub", "dataset": options.dataset}
        if options.dataset_config:
            data["dataset_config"] = options.dataset_config
        # Only one split is read. `load_text` needs a value for each.
        place = {"dataset": options.dataset, "dataset_config": options.dataset_config, "text_field": field}
        place["splits"] = dict.fromkeys(("train", "validation"), split)
        part = Part("hub", f"{options.dataset} {options.dataset_config}", split)
        return Text(data, lambda: documents_of(load_text("hub", **place)["validation"]), [part])
    try:
        corpus, split, chosen = parse_choice(named if ":" in named else f"{named}:test")
    except ValueError as error:
        others = "Other sources: stdlib, hub, hub:SPLIT; for own files, give --validation-file"
        raise ValueError(f"data={named!r} is not valid. {error} {others}.") from error
    is_local = options.data_dir or DATA_DIR_VARIABLE in os.environ
    data = {"corpus": corpus, "split": split + chosen, "place": "local files" if is_local else "the Hub"}
    return Text(
        data,
        lambda: documents_of(load_corpus(corpus, split + chosen, data_dir=options.data_dir, streaming=True)),
        [Part("corpus", corpus, split + chosen)],
    )


def held_out_text(checkpoints: Sequence[str], data_dir: str | None) -> Text:
    """Returns the text that all checkpoints held out; raises ValueError if one does not say, or they differ."""
    found = {checkpoint: _results(checkpoint) for checkpoint in checkpoints}
    (first, results), *others = found.items()
    for checkpoint, other in others:
        if other["held_out"]["texts"] != results["held_out"]["texts"]:
            both = f"{first}: {text_of(results['data'])}; {checkpoint}: {text_of(other['data'])}"
            raise ValueError(f"the checkpoints held out different texts ({both}), and one table compares one. {GIVE}")
    return _held_out(first, results, data_dir)


def _results(checkpoint: str) -> dict[str, Any]:
    """Returns the results of the run in a folder; raises ValueError if they do not say what it held out."""
    file = pathlib.Path(checkpoint) / "results.json"
    results = read_json(file) if file.is_file() else {}
    if not os.path.isdir(checkpoint):
        reason = "it is not the folder of a run"
    elif not results:
        reason = "its folder has no results.json of a run"
    elif results.get("weights_sha256") != weights_of(checkpoint):
        reason = "its results.json is of other weights"
    elif results.get("data", {}).get("source") == "task":
        reason = "it was trained on a toy task, see `whatwhere task`"
    elif "held_out" not in results:
        reason = "its results.json is of an earlier version"
    else:
        return results
    raise ValueError(f"checkpoint={checkpoint!r} does not say which text was held out from training: {reason}. {GIVE}")


def _sources(data: Mapping[str, Any]) -> list[Any]:
    """Returns the texts of training, of `data.source.TextSource`, from the `data` of a run's results."""
    from ..data.source import TextSource

    texts = data.get("mixture") or [data]
    shared = {"streaming": data["streaming"]} if "streaming" in data else {}
    return [
        TextSource.model_construct(**{key: one[key] for key in TextSource.model_fields if key in one} | shared)
        for one in texts
    ]


def _held_out(checkpoint: str, results: Mapping[str, Any], data_dir: str | None) -> Text:
    from ..data.folder import DATA_DIR_VARIABLE
    from ..data.rows import documents_sha256
    from ..data.source import load_text

    about, held_out = results["data"], results["held_out"]
    sources, split = _sources(about), about["split"]
    in_folder = any(text.splits and text.source in ("local", "corpus") for text in sources)
    if data_dir is not None and not in_folder:
        raise ValueError(f"--data-dir has no effect: {text_of(about)} is not read from that folder.")
    folder = (pathlib.Path(checkpoint) / held_out["folder"]).resolve()
    parts = []
    try:
        if in_folder and about.get("place") == "local files" and not (data_dir or os.environ.get(DATA_DIR_VARIABLE)):
            raise ValueError(f"it was read from a folder of local data: give --data-dir, or set {DATA_DIR_VARIABLE}.")
        others = _held_out_files(sources, data_dir, folder)
        for text, record in zip(sources, held_out["texts"], strict=True):
            rows = load_text(text, data_dir=data_dir, folder=folder, held_out=others)[split]
            # Of a stream, only the beginning was held out.
            parts.append(functools.partial(_first, rows, record["documents"]))
            if documents_sha256(parts[-1]())[1] != record["sha256"]:
                raise ValueError("it has changed since training, or is another version.")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"checkpoint={checkpoint!r}: what it held out ({text_of(about)}) cannot be measured again: "
            f"{str(error).rstrip('.')}. {GIVE}"
        ) from error
    return Text(
        _data(about),
        lambda: itertools.chain.from_iterable(part() for part in parts),
        [part for text in sources if (part := _part(text, split, data_dir, folder))],
    )


def _held_out_files(sources: Iterable[Any], data_dir: str | None, folder: pathlib.Path) -> list[str]:
    from ..data.source import find_files, held_out_files

    local = [text for text in sources if text.source == "local"]
    return [file for text in local for file in held_out_files(find_files(text, data_dir, folder))]


def _first(rows: Any, count: int) -> Iterator[str]:
    from ..data.rows import documents_of

    return itertools.islice(documents_of(rows), count)


def _data(about: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the `data` of length results for the held-out text of a run, from the `data` of its results."""
    source, split = about["source"], about["split"]
    if source == "mixture":
        data = {"corpus": source, "split": split, "mixture": about["mixture"]}
        return data | ({"place": about["place"]} if "place" in about else {})
    if source == "corpus":
        corpus, _, chosen = about["splits"][split].partition(":")
        return {"corpus": corpus, "split": chosen, "place": about["place"]}
    if source == "hub":
        data = {"corpus": source, "split": (about.get("splits") or {}).get(split, split), "place": "the Hub"}
        return data | {key: about[key] for key in ("dataset", "dataset_config") if key in about}
    data = {"corpus": source, "split": split, "place": "local files"}
    if source == "local":
        files = about.get(f"{split}_file") or (about.get("splits") or {}).get(split)
        data["files"] = files or about["train_file"]
        if not files:
            data["held_out_part"] = True
    return data


def _part(
    text: Any, split: str, data_dir: str | None, folder: pathlib.Path, held_out: Sequence[str] = ()
) -> Part | None:
    """Returns a split of a text of training; None if it has no files of its own, or they are missing now."""
    from ..data.source import find_files, trained_files

    chosen = (text.splits or {}).get(split, split)
    if text.source == "local":
        try:
            found = find_files(text, data_dir, folder)
        except ValueError:
            return None
        if split == "train":
            return Part("local", files=tuple(trained_files(found, held_out)))
        return Part("local", files=tuple(found[split][1])) if split in found else None
    if text.source == "corpus":
        corpus, _, chosen = chosen.partition(":")
        return Part("corpus", corpus, chosen)
    return Part(text.source, f"{text.dataset} {text.dataset_config}", chosen)


def warnings(checkpoint: str, parts: Sequence[Part], data_dir: str | None) -> Iterator[tuple[str, bool]]:
    """Yields warnings if a checkpoint, or one that it was fine-tuned from, was or may have been trained on a text.

    The second value is whether it is known. `parts` are those of the text.
    """
    for name, part in _trained_on(checkpoint, data_dir):
        if part is None:
            if any(other.source == "local" for other in parts):
                reason = "its training files are not found"
                yield f"warning: it is not known if {name!r} was trained on this text: {reason}", False
            continue
        for other in parts:
            if shared := _shared(other, part):
                what = "" if name == checkpoint else f" (in {name!r}, from which it was fine-tuned)"
                yield (
                    f"warning: {checkpoint!r} was trained on {shared}{what}: its results on this text are not those "
                    "on new text",
                    True,
                )


def _trained_on(checkpoint: str, data_dir: str | None) -> Iterator[tuple[str, Part | None]]:
    """Yields the texts of training of a checkpoint and of its sources; None for files that are not found."""
    seen: set[str] = set()
    while checkpoint not in seen and (file := pathlib.Path(checkpoint) / "results.json").is_file():
        seen.add(checkpoint)
        results = read_json(file)
        data = results.get("data", {})
        if data.get("source") in (None, "task"):
            return
        folder = (pathlib.Path(checkpoint) / results.get("held_out", {}).get("folder", "")).resolve()
        sources = _sources(data)
        try:
            held_out = _held_out_files(sources, data_dir, folder)
        except ValueError:
            held_out = []
        for text in sources:
            yield checkpoint, _part(text, "train", data_dir, folder, held_out)
        base = (results.get("recipe") or {}).get("checkpoint")
        checkpoint = str(folder / base) if base else checkpoint


def _shared(one: Part, other: Part) -> str | None:
    """Returns the name of what two splits have in common, or None."""
    if one.source != other.source:
        return None
    if one.source == "local":
        by_size: dict[int, list[str]] = {}
        for file in other.files:
            by_size.setdefault(os.path.getsize(file), []).append(file)
        for file in one.files:
            same = by_size.get(os.path.getsize(file), [])
            if any(os.path.samefile(file, known) or filecmp.cmp(file, known, shallow=False) for known in same):
                return repr(file)
        return None
    names = [part.split.partition("[")[0] for part in (one, other)]
    is_same = not is_transfer(one.name, other.name) if one.source == "corpus" else one.name == other.name
    if not is_same or names[0] != names[1]:
        return None
    (start, stop), (begin, end) = (_bounds(part.split) for part in (one, other))
    return f"{other.name.removesuffix(' None')}:{other.split}" if start < end and begin < stop else None


def _bounds(split: str) -> tuple[float, float]:
    """Returns the first document of a slice such as `train[10:20]`, and the one after its last."""
    start, _, stop = split.partition("[")[2].rstrip("]").partition(":")
    return float(start or 0), float(stop or "inf")
