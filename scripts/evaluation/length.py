"""Length extrapolation: perplexity and bits per byte in windows of several lengths, on the same held-out text.

    whatwhere length demo/rope demo/pope demo/cope
    whatwhere length runs/rope runs/pope --data pg19 --variants yarn --windows 512,1024,2048 --documents 4

--output gets length.json (length_CORPUS.json for a named corpus, length_CORPUS_SPLIT.json for another split than test),
and the figure as PNG and SVG. Each number is written when it is measured. Running the command again continues an
interrupted measurement, adds new windows, checkpoints and variants, and repeats what was measured with other weights or
settings.
"""

import argparse
import hashlib
import itertools
import os
import pathlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ...model_card import weights_fingerprint
from ..checks import differences
from ..commands.common import command_parser
from . import variants
from .checkpoints import (
    Loading,
    add_loading,
    at_least_one,
    loading_of,
    longest_length,
    names_of,
    output_of,
    trained_length_of,
    weights_of,
)
from .length_report import METRICS, comparable, draw, label, remove_numbered_figures, scored_bytes, table
from .processes import ALONE, Processes
from .results import check_writable, provenance, read_json, write_json
from .schema import Cell
from .windows import common_tokens, fillable, measure_windows, parse_windows

SOURCES = ("stdlib", "hub", "local")
DEFAULT_WINDOWS = "1x,2x,4x,8x,10x"
# The default of --windows for books (PoPE, Figure 2).
BOOK_WINDOWS = ",".join(map(str, (*range(1024, 10241, 1024), 65536)))
# Corpora with long documents, which are cut into windows one by one; documents of other corpora are joined.
SEPARATE_DOCUMENTS = ("pg19",)


def parse_data(text: str) -> tuple[str, str]:
    """Returns the source and the split of `--data`, such as `("local", "test")` or `("pg19", "validation")`."""
    if text in SOURCES:
        return text, "test"
    from ..data.corpora import parse_choice

    try:
        corpus, split, chosen = parse_choice(text if ":" in text else f"{text}:test")
    except ValueError as error:
        raise ValueError(f"data={text!r} is not valid. {error} Other sources: {', '.join(SOURCES)}.") from error
    return corpus, split + chosen


def iterate_texts(
    source: str = "stdlib",
    split: str = "test",
    *,
    data_dir: str | None = None,
    dataset: str | None = None,
    files: str | None = None,
) -> Iterator[str]:
    """Yields the documents of a source and split from `parse_data`; the other arguments are those of the parser.

    `files` are relative to the current folder, or with `data_dir` to that.
    """
    from ..data.corpora import load_corpus
    from ..data.source import SPLITS, load_text, text_of

    if source == "stdlib":
        yield from load_text()["test"]["text"]
    elif source == "local":
        from ..data.files import find_all, read_found
        from ..data.rows import DATA_DIR_VARIABLE, data_folder

        option, root = "--test-files" if files else "--data-dir", None
        if data_dir or not files:
            root = data_folder(data_dir)
            if root is None:
                raise ValueError(f"--data local needs --test-files, --data-dir or {DATA_DIR_VARIABLE}.")
        patterns = files or "**/*.txt"
        found = find_all(option, [patterns], root)
        rows = read_found(found, f"{option}={patterns!r}", text_field="text", streaming=False)
        yield from map(text_of, rows)
    elif source == "hub":
        # Only one split is read. `load_text` needs a value for each.
        splits = dict.fromkeys(SPLITS, files or "test")
        yield from map(text_of, load_text(source, dataset=dataset, splits=splits)["test"])
    else:
        yield from map(text_of, load_corpus(source, split, data_dir=data_dir, streaming=True))


class LengthResults:
    """The results file of a comparison, as in `schema.Lengths`. Every measured cell is added to it."""

    def __init__(
        self, folder: pathlib.Path, data: dict[str, Any], *, origin: dict[str, Any], processes: Processes = ALONE
    ) -> None:
        """Reads the file in `folder` if it exists; raises ValueError if it is of other data, or broken."""
        corpus, split = data["corpus"], data["split"].partition("[")[0]
        parts = ["length"] if corpus in SOURCES else ["length", corpus, *([split] if split != "test" else [])]
        self.processes = processes
        self.path, self.data, self.origin = folder / f"{'_'.join(parts)}.json", data, origin
        self.checkpoints: list[dict[str, Any]] = []
        self.earlier: list[dict[str, Any]] = []
        if self.path.is_file():
            content = read_json(self.path)
            before, self.checkpoints = content["data"], content["checkpoints"]
            self.earlier = [*content.get("earlier", []), {key: content[key] for key in self.origin}]
            if changed := differences({key: before.get(key) for key in self.data}, self.data):
                raise ValueError(
                    f"{str(self.path)!r} contains results on other data (before → now): {'; '.join(changed)}. Choose "
                    "another --output, or remove the file."
                )
        # All processes measure the same cells, also on a machine that does not have the file.
        self.checkpoints = processes.of_first(self.checkpoints)

    def entry(self, identity: dict[str, Any], details: dict[str, Any]) -> dict[str, Any]:
        """Returns the entry of a checkpoint and variant, or a new entry if any field of `identity` changed."""
        entry = {**identity, **details, "cells": [], "by_position": []}
        for index, old in enumerate(self.checkpoints):
            if (old["name"], old["variant"]) == (identity["name"], identity["variant"]):
                known = identity["weights"] is not None
                if known and all(old.get(key) == value for key, value in identity.items()):
                    return old
                before, now = old.get("checkpoint"), details.get("checkpoint")
                if before != now and None not in (before, now) and old["weights"] != identity["weights"]:
                    raise ValueError(
                        f"checkpoint={now!r} is not valid: {str(self.path)!r} contains results of {before!r}, which "
                        f"has the same name {old['name']!r}. Choose another --output."
                    )
                self.checkpoints[index] = entry
                return entry
        self.checkpoints.append(entry)
        return entry

    def add(self, entry: dict[str, Any], cell: Cell, by_position: dict[str, Any] | None) -> None:
        """Adds the measurements at one length, and writes the file."""
        entry["cells"] = sorted([*entry["cells"], cell.model_dump()], key=lambda one: one["length"])
        if by_position is not None:
            entry["by_position"] = sorted([*entry["by_position"], by_position], key=lambda one: one["length"])
        if self.processes.is_first:
            self.write(self.path.parent)

    def write(self, folder: pathlib.Path, *, weights: str | None = None) -> None:
        """Writes the file into a folder, with `weights` (a fingerprint) only the entries with these weights.

        In a checkpoint's folder, the fingerprint of its weights is added.
        """
        kept = [entry for entry in self.checkpoints if weights in (None, entry["weights"])]
        mine = {"weights_sha256": weights_fingerprint(folder)} if (folder / "config.json").is_file() else {}
        content = {"data": self.data, "checkpoints": kept, "earlier": self.earlier, **self.origin}
        write_json(folder / self.path.name, {**mine, **content})


class Curve(NamedTuple):
    """A curve of the figure: a checkpoint, unchanged or with a configuration changed at test time."""

    checkpoint: str
    name: str
    trained_length: int
    variant: str | None = None


def curves_of(
    checkpoints: Sequence[str], names: Sequence[str], loading: Loading, *, trained_length: int | None = None
) -> list[Curve]:
    """Returns the curves: each checkpoint unchanged, then with those variants in `names` that apply to it."""
    curves = []
    for checkpoint, title in zip(checkpoints, names_of(checkpoints)):
        config = loading.config(checkpoint)
        trained = trained_length or trained_length_of(checkpoint, config)
        curves.append(Curve(checkpoint, title, trained))
        for variant in names:
            if variants.changes(variant, config, trained_length=trained, length=2 * trained) is None:
                _report(f"{title}: {variant} does not apply.")
            else:
                curves.append(Curve(checkpoint, title, trained, variant))
    for variant in set(names) - {curve.variant for curve in curves}:
        raise ValueError(f"variants={variant!r} is not valid: it applies to none of the checkpoints.")
    return curves


def tokenise(
    tokenizer: Any, texts: Iterable[str], data: dict[str, Any], lengths: Sequence[int]
) -> tuple[list[torch.Tensor], int]:
    """Returns the token ids of the texts to cut into windows, each int32 (tokens), and the number of documents.

    Args:
        tokenizer: its end-of-text token is appended to each document.
        texts: the documents; only as many as needed are read.
        data: `document_limit`, `text_tokens` (of each text) and `joined` (whether the documents are one text).
        lengths: all window lengths; a joined text that is cut is cut to a multiple of all of them, if long enough.
    """
    from ..data.tokenize import tokenize_documents

    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"tokenizer={tokenizer.name_or_path!r} is not valid: it has no end-of-text token (`eos_token`)."
        )
    ids = tokenize_documents(tokenizer, itertools.islice(texts, data["document_limit"]))
    documents = [torch.tensor(document, dtype=torch.int32) for document in ids]
    if not documents:
        raise ValueError("data is not valid: it has no documents.")
    limit = data["text_tokens"]
    if not data["joined"]:
        return [document[: None if limit is None else limit + 1] for document in documents], len(documents)
    text = torch.cat(documents)
    if limit is None and data["corpus"] in SOURCES:
        limit = 16 * max(lengths)
    if limit is not None:
        text = text[: common_tokens(limit, len(text) - 1, lengths) + 1]
    return [text], len(documents)


def compare(
    curves: Sequence[Curve],
    texts: Callable[[], Iterable[str]],
    results: LengthResults,
    lengths: str,
    loading: Loading,
    *,
    batch_tokens: int,
) -> None:
    """Measures all cells that are not in `results` yet, and adds them.

    Args:
        texts: returns a new iterator over the documents.
        lengths: of windows, as in `parse_windows`; windows longer than every text are skipped, with a message.
    """
    from ..data.tokenize import bytes_per_token

    # Raises errors before the first model is loaded.
    wanted = {curve: parse_windows(lengths, curve.trained_length) for curve in curves}
    every = sorted({length for each in wanted.values() for length in each})
    tokenised: dict[str, list[torch.Tensor]] = {}
    for curve in curves:
        tokenizer = loading.tokenizer(curve.checkpoint)
        try:
            byte_counts = bytes_per_token(tokenizer)
        except ValueError as error:
            byte_counts = None
            _report(f"{curve.name}: {error}")
        # Compared checkpoints often share a tokenizer: tokenise once.
        backend = getattr(tokenizer, "backend_tokenizer", None)
        key = curve.checkpoint if backend is None else f"{tokenizer.eos_token_id} {backend.to_str()}"
        if key not in tokenised:
            parts, results.data["documents"] = tokenise(tokenizer, texts(), results.data, every)
            tokenised = {key: parts}
        parts = tokenised[key]
        filled, skipped = fillable(parts, wanted[curve])
        if skipped:
            _report(
                f"{curve.name}: windows of {', '.join(map(str, skipped))} tokens are skipped, because the longest of "
                f"{len(parts)} texts has {max(map(len, parts)) - 1} tokens to score."
            )
        config = loading.config(curve.checkpoint)
        entry = results.entry(
            {
                "name": curve.name,
                "variant": curve.variant,
                "weights": weights_of(curve.checkpoint) or getattr(config, "_commit_hash", None),
                "trained_length": curve.trained_length,
                "dtype": loading.dtype,
                "attn_implementation": loading.attn_implementation,
                "tokens_sha256": hashlib.sha256(b"".join(ids.numpy().tobytes() for ids in parts)).hexdigest(),
            },
            {
                "checkpoint": curve.checkpoint,
                "model_type": config.model_type,
                "position_encoding": getattr(config, "position_encoding", None),
                "device": loading.device,
                "tokens": sum(len(ids) - 1 for ids in parts),
            },
        )
        measured = {cell["length"] for cell in entry["cells"]}
        model, loaded = None, None
        for length in (length for length in filled if length not in measured):
            options = {"trained_length": curve.trained_length, "length": length}
            changed = (curve.variant and variants.changes(curve.variant, config, **options)) or {}
            if model is None or changed != loaded:
                model = loading.model(curve.checkpoint, loading.config(curve.checkpoint, **changed))
                loaded, entry["parameters"] = changed, model.num_parameters()
            limit = longest_length(model)
            if limit is not None and length > limit:
                multiple = length / curve.trained_length
                reason = f"the position encoding supports at most {limit} tokens"
                results.add(entry, Cell(length=length, multiple=multiple, reached=False, reason=reason), None)
                continue
            cell, by_position = measure_windows(
                model,
                parts,
                byte_counts,
                length,
                trained_length=curve.trained_length,
                batch_tokens=batch_tokens,
                name=f"{label(entry)} at {length}",
                processes=results.processes,
            )
            results.add(entry, cell, by_position)


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    result = command_parser("length", "CHECKPOINT [CHECKPOINT ...] [OPTIONS]", __doc__)
    result.add_argument("checkpoints", nargs="+", metavar="CHECKPOINT", help="a folder or a Hub id")
    result.add_argument(
        "--windows",
        metavar="N,...",
        help=f"lengths in tokens, or multiples of the trained length (default {DEFAULT_WINDOWS}; pg19: the paper's)",
    )
    result.add_argument("--trained-length", type=at_least_one, metavar="N", help="default: read from the checkpoint")
    result.add_argument("--variants", metavar="NAME,...", help=f"add curves: {', '.join(variants.VARIANTS)}")
    result.add_argument("--metric", default="perplexity", choices=METRICS, help="for table and figure")
    result.add_argument("--output", type=pathlib.Path, metavar="DIR", help="for results and figure")
    result.add_argument("--tasks", choices=("ruler",), help="RULER's generated tasks instead of perplexity (ruler.py)")
    result.add_argument("--samples", type=at_least_one, metavar="N", help="with --tasks: samples of each (default 100)")
    text = result.add_argument_group("text")
    text.add_argument(
        "--data",
        default="stdlib",
        help="stdlib, hub, local, or a named corpus such as pg19 or pg19:validation (default %(default)s)",
    )
    text.add_argument("--data-dir", metavar="DIR", help="the folder of local data; default $WHATWHERE_DATA_DIR")
    text.add_argument("--dataset", metavar="ID", help="a data set, with --data hub")
    text.add_argument(
        "--test-files", metavar="FILES", help="local: a file, folder or pattern; hub: a split such as test[:100]"
    )
    text.add_argument("--documents", type=at_least_one, metavar="N", help="only the first N documents (default all)")
    text.add_argument(
        "--tokens",
        type=at_least_one,
        metavar="N",
        help="tokens of each text (default all; for stdlib, hub and local about 16 of the longest windows)",
    )
    text.add_argument(
        "--join",
        action=argparse.BooleanOptionalAction,
        help=f"join all documents before cutting windows (default, except for {', '.join(SEPARATE_DOCUMENTS)})",
    )
    add_loading(result)
    result.add_argument(
        "--batch-tokens", type=at_least_one, default=4096, metavar="N", help="tokens per batch (default 4096)"
    )
    return result


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line."""
    options, origin = parser().parse_args(arguments), provenance("length", arguments)
    options.output = options.output or output_of(options.checkpoints, "length")
    if options.tasks is None:
        run(options, origin)
    else:
        from . import ruler

        unused = ("variants", "metric", "data", "data_dir", "dataset", "test_files", "documents", "tokens", "join")
        for name in unused:
            if getattr(options, name) != parser().get_default(name):
                raise ValueError(f"--{name.replace('_', '-')} has no effect with --tasks {options.tasks}.")
        ruler.run(options, origin)


def run(options: argparse.Namespace, origin: dict[str, Any]) -> LengthResults:
    """Measures the checkpoints, writes results and figure, and prints the table."""
    source, split = parse_data(options.data)
    for name, used in (
        ("samples", False),
        ("dataset", source == "hub"),
        ("test_files", source in ("hub", "local")),
        ("data_dir", source not in ("stdlib", "hub")),
    ):
        if getattr(options, name) is not None and not used:
            given = "without --tasks" if name == "samples" else f"with --data {options.data}"
            raise ValueError(f"--{name.replace('_', '-')} has no effect {given}.")
    check_writable(options.output)
    loading = loading_of(options)
    curves = curves_of(
        options.checkpoints,
        options.variants.split(",") if options.variants is not None else [],
        loading,
        trained_length=options.trained_length,
    )
    from ..data.source import DATA_DIR_VARIABLE

    is_local = source in ("stdlib", "local") or (
        source != "hub" and (options.data_dir or DATA_DIR_VARIABLE in os.environ)
    )
    data = {
        "corpus": source,
        "split": split,
        "place": "local files" if is_local else "the Hub",
        "dataset": options.dataset,
        "files": options.test_files,
        "joined": source not in SEPARATE_DOCUMENTS if options.join is None else options.join,
        "document_limit": options.documents,
        "text_tokens": options.tokens,
    }
    results = LengthResults(options.output, data, origin=origin, processes=loading.processes)
    books = BOOK_WINDOWS if source in SEPARATE_DOCUMENTS else DEFAULT_WINDOWS
    names = {"data_dir": options.data_dir, "dataset": options.dataset, "files": options.test_files}
    compare(
        curves,
        lambda: iterate_texts(source, split, **names),
        results,
        books if options.windows is None else options.windows,
        loading,
        batch_tokens=options.batch_tokens,
    )
    if not loading.processes.is_first:
        return results
    metric, files = options.metric, [results.path]
    groups = comparable(results.checkpoints, metric)
    for number, entries in enumerate(groups, 1):
        if number > 1:
            what = "tokens"
            if metric == "bits_per_byte":
                what = f"text ({scored_bytes(entries):,} bytes scored; {scored_bytes(groups[0]):,} in the first table)"
            print(f"\nOther {what}, so {METRICS[metric]} cannot be compared with the values above:\n")
        print(table(entries, metric=metric))
        stem = results.path.with_name(results.path.stem + f"_{number}" * (number > 1))
        files += draw(entries, stem, metric=metric, title=f"{source}, {split}")
    remove_numbered_figures(results.path.with_suffix(""), files)
    print(f"{METRICS[metric]} ± standard error.\nWritten: {', '.join(map(str, files))}")
    return results


def _report(text: str) -> None:
    if not int(os.environ.get("RANK", "0")):
        print(text, file=sys.stderr)
