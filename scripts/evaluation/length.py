"""`whatwhere length`: its help is in `cli/length.py`."""

import argparse
import hashlib
import itertools
import pathlib
import re
import shlex
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from whatwhere_cli.length import BOOK_WINDOWS, DEFAULT_WINDOWS, SEPARATE_DOCUMENTS, parser

from ..checks import differences
from ..errors import program
from ..processes import ALONE, Processes, is_first_process
from ..progress import Progress
from ..writing import check_writable, write_json
from . import variants
from .checkpoints import (
    Loading,
    loading_of,
    longest_length,
    names_of,
    output_of,
    trained_length_of,
    weights_of,
)
from .data_description import UNNAMED, measured_text
from .kept import file_of, read
from .length_report import METRICS, comparable, draw, heading, label, remove_numbered_figures, scored_bytes, table
from .results import provenance, read_json
from .schema import Cell, Measured
from .text import given_text, held_out_text, warnings
from .windows import common_tokens, fillable, measure_windows, parse_windows


class LengthResults:
    """The results file of a comparison, as in `schema.Lengths`. Every measured cell is added to it."""

    def __init__(
        self, folder: pathlib.Path, data: dict[str, Any], *, origin: dict[str, Any], processes: Processes = ALONE
    ) -> None:
        """Reads the file in `folder` if it exists; raises ValueError if it is of other data, or broken."""
        corpus, split = data["corpus"], data["split"].partition("[")[0]
        parts = ["length"] if corpus in UNNAMED else ["length", corpus, *([split] if split != "test" else [])]
        if corpus == "local" and "held_out_part" not in data:
            # Own text beside what the run held out.
            first = data["files"] if isinstance(data["files"], str) else data["files"][0]
            parts += ["local", re.sub(r"[^\w-]+", "_", pathlib.Path(first).stem).strip("_") or "files"]
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

    def add(self, measured: Iterable[tuple[dict[str, Any], Measured]]) -> None:
        """Adds measurements to their entries, and writes the file."""
        for entry, one in measured:
            entry["parameters"] = one.parameters
            entry["cells"] = sorted([*entry["cells"], one.cell.model_dump()], key=lambda cell: cell["length"])
            if one.by_position is not None:
                entry["by_position"] = sorted([*entry["by_position"], one.by_position], key=lambda part: part["length"])
        if self.processes.is_first:
            self.write(self.path.parent)

    def write(self, folder: pathlib.Path, *, own: bool = False) -> None:
        """Writes the file into a folder, with `own` only the entries with the weights in it.

        In a checkpoint's folder, the fingerprint of its weights is added.
        """
        mine = {"weights_sha256": weights_of(folder)} if (folder / "config.json").is_file() else {}
        kept = [entry for entry in self.checkpoints if not own or entry["weights"] == mine["weights_sha256"]]
        content = {"data": self.data, "checkpoints": kept, "earlier": self.earlier, **self.origin}
        write_json(folder / self.path.name, {**mine, **content})


class Curve(NamedTuple):
    """A curve of the figure: a checkpoint, unchanged or with a configuration changed at test time."""

    checkpoint: str
    name: str
    trained_length: int
    config: Any
    variant: str | None = None


def curves_of(
    checkpoints: Sequence[str], names: Sequence[str], loading: Loading, *, trained_length: int | None = None
) -> list[Curve]:
    """Returns the curves: each checkpoint unchanged, then with those variants in `names` that apply to it."""
    curves = []
    for checkpoint, title in zip(checkpoints, names_of(checkpoints)):
        config = loading.config(checkpoint)
        trained = trained_length or trained_length_of(checkpoint, config)
        curves.append(Curve(checkpoint, title, trained, config))
        for variant in names:
            if variants.changes(variant, config, trained_length=trained, length=2 * trained) is None:
                _report(f"{title}: {variant} does not apply.")
            else:
                curves.append(Curve(checkpoint, title, trained, config, variant))
    for variant in set(names) - {curve.variant for curve in curves}:
        raise ValueError(f"variants={variant!r} is not valid: it applies to none of the checkpoints.")
    return curves


class Tokens(NamedTuple):
    """The texts to cut into windows.

    Attributes:
        ids: of the tokens of each text, int32 (tokens).
        sizes: for each text the bytes of its tokens, int32 (tokens); None if unknown.
        documents: their number, and in `changed` that of those whose text the tokenizer changes.
    """

    ids: list[torch.Tensor]
    sizes: list[torch.Tensor] | None
    documents: int
    changed: int


def tokenise(tokenizer: Any, texts: Iterable[str], data: dict[str, Any], lengths: Sequence[int]) -> Tokens:
    """Returns the tokens of the texts to cut into windows.

    Args:
        tokenizer: each document has the tokens of `around_document`; there must be an end-of-text token.
        texts: the documents; only as many as needed are read.
        data: `document_limit`, `text_tokens` (of each text) and `joined` (whether the documents are one text).
        lengths: all window lengths; a joined text that is cut is cut to a multiple of all of them, if long enough.
    """
    from ..data.tokenize import check_bytes, measure_documents, tokenize_documents

    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"tokenizer={tokenizer.name_or_path!r} is not valid: it has no end-of-text token (`eos_token`)."
        )
    texts, changed = itertools.islice(texts, data["document_limit"]), 0
    try:
        check_bytes(tokenizer)
    except ValueError as error:
        _report(str(error))
        parts = [[torch.tensor(ids, dtype=torch.int32)] for ids in tokenize_documents(tokenizer, texts)]
    else:
        parts = []
        for ids, sizes, differs in measure_documents(tokenizer, texts):
            parts.append([torch.from_numpy(ids), torch.from_numpy(sizes)])
            changed += differs
    if not parts:
        raise ValueError("data is not valid: it has no documents.")
    # Ids, and sizes if they are known.
    every, limit = [list(some) for some in zip(*parts)], data["text_tokens"]
    if data["joined"]:
        every = [[torch.cat(some)] for some in every]
        if limit is None and data["corpus"] in UNNAMED:
            limit = 16 * max(lengths)
        if limit is not None:
            limit = common_tokens(limit, len(every[0][0]) - 1, lengths)
    if limit is not None:
        every = [[text[: limit + 1] for text in some] for some in every]
    return Tokens(every[0], every[1] if len(every) > 1 else None, len(parts), changed)


def window_begin(tokenizer: Any) -> int:
    """Returns the token with which `--bos-windows` begins every window: the one that the tokenizer puts before a text.

    Raises ValueError if it does not put one there.
    """
    from ..data.tokenize import added_tokens

    begin, _ = added_tokens(tokenizer)
    if len(begin) != 1:
        what = f"puts {len(begin)} tokens" if begin else "adds no token"
        raise ValueError(
            f"bos_windows=True is not valid: the tokenizer {tokenizer.name_or_path!r} {what} before a text. Allowed: "
            "tokenizers that put one token there, such as BOS."
        )
    return begin[0]


class Measurement(NamedTuple):
    """What is measured at once: a curve at one length of windows, which begin with `begin` if it is not None."""

    curve: Curve
    entry: dict[str, Any]
    text: Tokens
    length: int
    begin: int | None

    @property
    def tokens(self) -> int:
        """The number of tokens to score."""
        return sum((len(ids) - 1) // self.length * self.length for ids in self.text.ids)

    @property
    def kept(self) -> pathlib.Path | None:
        """The file in which this measurement is kept for other folders; None if the weights have no fingerprint."""
        if self.entry["weights"] is None:
            return None
        about = ("variant", "weights", "model_sha256", "trained_length", "dtype", "attn_implementation", "device")
        sizes = [hashlib.sha256(one.numpy().tobytes()).hexdigest() for one in self.text.sizes or []]
        texts: dict[str, Any] = {"texts": [len(ids) for ids in self.text.ids], "sizes": sizes}
        texts |= {"tokens_sha256": self.entry["tokens_sha256"], "begin": self.begin}
        return file_of({**{key: self.entry[key] for key in about}, **texts, "length": self.length})


def compare(
    curves: Sequence[Curve],
    texts: Callable[[], Iterable[str]],
    results: LengthResults,
    lengths: str,
    loading: Loading,
    *,
    batch_tokens: int,
    trained_on: Collection[str] = (),
) -> None:
    """Measures all cells that are not in `results` yet, and adds them; short windows of all models come first.

    Args:
        texts: returns a new iterator over the documents.
        lengths: of windows, as in `parse_windows`; windows longer than every text are skipped, with a message.
        trained_on: the checkpoints that were trained on a part of the text.
    """
    wanted, before = _missing(curves, texts, results, lengths, loading, trained_on)
    # Decided by the first process: files may appear meanwhile.
    kept = results.processes.of_first([(file := one.kept) and read(file) for one in wanted])
    if found := [(one.entry, known) for one, known in zip(wanted, kept) if known]:
        results.add(found)
    if done := before + len(found):
        every = before + len(wanted)
        _report(f"{done} of {every} measurements were made before, with the same weights and settings.")
    missing = [one for one, known in zip(wanted, kept) if not known]
    # Every other length has the models in reverse order, so that a model that is loaded is measured twice.
    order = {length: index for index, length in enumerate(sorted({one.length for one in missing}))}
    places = {id(one.entry): index for index, one in enumerate(missing)}
    missing.sort(key=lambda one: (one.length, places[id(one.entry)] * (-1) ** order[one.length]))
    model, loaded, keeping = None, None, results.processes.is_first
    total = sum(one.tokens for one in missing)
    with Progress("length", total, unit="tokens", shown=results.processes.is_first) as progress:
        for one in missing:
            curve, entry, text, length, begin = one
            progress.rename(f"{label(entry)} at {length}")
            options = {"trained_length": curve.trained_length, "length": length}
            changed = (curve.variant and variants.changes(curve.variant, curve.config, **options)) or {}
            if loaded != (curve.checkpoint, changed):
                model = None
                config = loading.config(curve.checkpoint, **changed) if changed else curve.config
                model, loaded = loading.model(curve.checkpoint, config), (curve.checkpoint, changed)
            assert model is not None, "it is loaded for the first measurement"
            parameters = model.num_parameters()
            limit = longest_length(model)
            if limit is not None and length > limit:
                multiple = length / curve.trained_length
                reason = f"the position encoding supports at most {limit} tokens"
                cell = Cell(length=length, multiple=multiple, reached=False, reason=reason)
                results.add([(entry, Measured(parameters=parameters, cell=cell, by_position=None))])
                continue
            cell, by_position = measure_windows(
                model,
                text.ids,
                text.sizes,
                length,
                trained_length=curve.trained_length,
                begin=begin,
                batch_tokens=batch_tokens,
                done=progress.advance,
                processes=results.processes,
            )
            measured = Measured(parameters=parameters, cell=cell, by_position=by_position)
            results.add([(entry, measured)])
            if keeping and (file := one.kept):
                try:
                    write_json(file, measured.model_dump())
                except OSError as error:
                    _report(f"warning: measurements are not kept for another --output (WHATWHERE_CACHE): {error}")
                    keeping = False


def _missing(
    curves: Sequence[Curve],
    texts: Callable[[], Iterable[str]],
    results: LengthResults,
    lengths: str,
    loading: Loading,
    trained_on: Collection[str],
) -> tuple[list[Measurement], int]:
    """Returns what is not measured yet, and how many are; adds an entry to `results` for each curve."""
    from ..data.tokenize import about_changes, around_document, begins_with_bos, token_unit

    # Raises errors before the first model is loaded.
    wanted = [parse_windows(lengths, curve.trained_length) for curve in curves]
    every = sorted({length for each in wanted for length in each})
    tokenised: dict[str, Tokens] = {}
    missing, known = [], 0
    for curve, windows in zip(curves, wanted):
        config = curve.config
        tokenizer = loading.tokenizer(curve.checkpoint, config)
        begin = window_begin(tokenizer) if results.data["bos_windows"] else None
        # Compared checkpoints often share a tokenizer: tokenise once.
        backend = getattr(tokenizer, "backend_tokenizer", None)
        key = curve.checkpoint if backend is None else f"{around_document(tokenizer)} {backend.to_str()}"
        if key not in tokenised:
            tokenised[key] = tokenise(tokenizer, texts(), results.data, every)
        text = tokenised[key]
        parts, results.data["documents"] = text.ids, text.documents
        if text.changed:
            _report(f"{curve.name}: {about_changes(text.changed, text.documents)}.")
        filled, skipped = fillable(parts, windows)
        if skipped:
            _report(
                f"{curve.name}: sequences of {', '.join(map(str, skipped))} tokens are skipped, because the longest of "
                f"{len(parts)} texts has {max(map(len, parts)) - 1} tokens to score."
            )
        entry = results.entry(
            {
                "name": curve.name,
                "variant": curve.variant,
                "weights": weights_of(curve.checkpoint) or getattr(config, "_commit_hash", None),
                "model_sha256": loading.model_sha256(curve.checkpoint, config),
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
                "changed_documents": text.changed,
            },
        )
        entry["unit"] = token_unit(tokenizer)
        if begins_with_bos(tokenizer):
            entry["bos"] = True
        if curve.checkpoint in trained_on:
            entry["trained_on"] = True
        measured = {cell["length"] for cell in entry["cells"]}
        missing += [Measurement(curve, entry, text, length, begin) for length in filled if length not in measured]
        known += len(measured.intersection(filled))
    return missing, known


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line."""
    options, origin = parser().parse_args(arguments), provenance("length", arguments)
    options.output = options.output or output_of(options.checkpoints, "length")
    if options.tasks is None:
        run(options, origin)
    else:
        from . import ruler

        unused = ("variants", "metric", "data", "data_dir", "dataset", "dataset_config", "validation_file")
        for name in (*unused, "text_field", "documents", "tokens", "join", "bos_windows"):
            if getattr(options, name) != parser().get_default(name):
                raise ValueError(f"--{name.replace('_', '-')} has no effect with --tasks {options.tasks}.")
        ruler.run(options, origin)


def run(options: argparse.Namespace, origin: dict[str, Any]) -> LengthResults:
    """Measures the checkpoints, writes results and figure, and prints the table."""
    if options.samples is not None:
        raise ValueError("--samples has no effect without --tasks.")
    text = given_text(options)
    check_writable(options.output)
    loading = loading_of(options)
    curves = curves_of(
        options.checkpoints,
        options.variants.split(",") if options.variants is not None else [],
        loading,
        trained_length=options.trained_length,
    )
    text = text or held_out_text(options.checkpoints, options.data_dir)
    separate = text.data["corpus"] in SEPARATE_DOCUMENTS
    data = {
        "dataset": None,
        "files": None,
        **text.data,
        "joined": not separate if options.join is None else options.join,
        "document_limit": options.documents,
        "text_tokens": options.tokens,
        # As in earlier results, which do not have it.
        "bos_windows": options.bos_windows or None,
    }
    results = LengthResults(options.output, data, origin=origin, processes=loading.processes)
    trained_on = set()
    for checkpoint in options.checkpoints:
        for warning, is_known in warnings(checkpoint, text.parts, options.data_dir):
            _report(warning)
            if is_known:
                trained_on.add(checkpoint)
    windows = BOOK_WINDOWS if separate else DEFAULT_WINDOWS
    compare(
        curves,
        text.documents,
        results,
        windows if options.windows is None else options.windows,
        loading,
        batch_tokens=options.batch_tokens,
        trained_on=trained_on,
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
                if any(group[0].get("changed_documents") for group in (entries, groups[0])):
                    what = "text, because a tokenizer changes it"
            print(f"\nOther {what}, so {METRICS[metric]} cannot be compared with the values above:\n")
        title = measured_text(results.data, entries)
        print(f"{heading(entries, title, metric=metric)}:\n\n{table(entries, metric=metric)}")
        stem = results.path.with_name(results.path.stem + f"_{number}" * (number > 1))
        files += draw(entries, stem, metric=metric, title=title)
    remove_numbered_figures(results.path.with_suffix(""), files)
    print(f"Written: {', '.join(map(str, files))}")
    if len(options.checkpoints) > 1:
        print(f"Next: {shlex.join(program())} compare {' '.join(options.checkpoints)} --results {results.path}")
    return results


def _report(text: str) -> None:
    if is_first_process():
        print(text, file=sys.stderr)
