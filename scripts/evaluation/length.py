"""Length extrapolation: loss of checkpoints in windows of several lengths, on the same held-out text.

On a laptop (two minutes; the checkpoints are those of `whatwhere demo`): windows of 1, 2, 4, 8 and 10 times the trained
length, the same tokens in all of them:

    whatwhere length demo/rope demo/pope demo/cope

PoPE's Figure 2, the test books of PG-19, each by itself; with less of them on a laptop, all of them on a GPU:

    whatwhere length runs/rope runs/pope --data pg19 --windows 512,1024,2048,4096 --documents 4 --tokens 20480
    whatwhere length runs/rope runs/pope --data pg19 --variants yarn,interpolation --dtype bfloat16 --output results

CoPE's Figure 3, WikiText-103, whose articles are joined by the end-of-text token as in training:

    whatwhere length runs/relative runs/cope --data wikitext103_v1:validation --windows 512,1024,2048,4096 \\
        --variants relative-capped,relative-none --output results

Windows are given in tokens, or as multiples of the trained length (`1x,2x,4x`). The trained length is what the
checkpoint's `results.json` says, else `config.max_position_embeddings`, unless `--trained-length` is given. How windows
are cut and scored: `whatwhere.scripts.evaluation.windows`. `--variants` adds curves with changes at test time
(`whatwhere.scripts.evaluation.variants`). A model fine-tuned at a longer length is a checkpoint like any other: PoPE's
ICML version trains 500 steps of 64 sequences of 4,096 tokens first, which `whatwhere finetune` does.

A checkpoint is a folder or a Hub id that AutoModelForCausalLM and AutoTokenizer can load, ours or stock. A length that
an encoding cannot reach is reported as such.

Output (`--output`, by default the checkpoint's own folder if there is one checkpoint, else `length/`): `length.json`
(`length_CORPUS.json` for a corpus that is known by name, `length_CORPUS_SPLIT.json` if it is not the test split) with
every number, its standard error, date, versions and command, and the figure as PNG and SVG. The file grows: each number
is written when it is measured, the same command goes on where it was stopped, other windows, checkpoints and variants
are added, and what was measured with other weights or settings is measured again. Another checkpoint of the same name
needs another `--output`.
"""

import argparse
import dataclasses
import hashlib
import itertools
import os
import pathlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from ...model_card import weights_fingerprint
from ..extras import explain
from . import variants, windows
from .checkpoints import Loading, longest_length, names_of, trained_length_of
from .length_report import METRICS, draw, label, table
from .options import add_loading, at_least_one, loading_of
from .results import check_writable, provenance, read_json, write_json

SOURCES = ("stdlib", "hub", "local")
DEFAULT_WINDOWS = "1x,2x,4x,8x,10x"
# Of books, unless --windows says otherwise (PoPE, Figure 2).
BOOK_WINDOWS = ",".join(map(str, (*range(1024, 10241, 1024), 65536)))
# Corpora whose documents are long enough for windows of their own; documents of others are joined.
SEPARATE_DOCUMENTS = ("pg19",)


def parse_windows(text: str, trained_length: int) -> list[int]:
    """Returns the ascending lengths of a list such as `512,4x`; raises ValueError if one is no positive integer."""
    lengths = set()
    for part in text.split(","):
        try:
            length = float(part.strip().removesuffix("x")) * (trained_length if part.strip().endswith("x") else 1)
            whole = int(length)
        except (ValueError, OverflowError):
            length, whole = 0.0, 0
        if whole < 1 or whole != length:
            raise ValueError(
                f"windows={text!r} is not valid: {part!r} is no positive whole number of tokens (trained length "
                f"{trained_length}). Give a list such as 1024,2048,65536, or multiples such as 1x,2x,4x."
            )
        lengths.add(whole)
    return sorted(lengths)


def parse_data(text: str) -> tuple[str, str]:
    """Returns source and split of `--data`: one of `SOURCES` and "test", or a corpus and its split, by default "test".

    Raises:
        ValueError: there is no such source, corpus or split.
    """
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
    """Yields held-out documents of what `parse_data` returns; the other options are those of the command line."""
    from ..data.corpora import load_corpus
    from ..data.corpus import SPLITS, load_text, text_of

    if source == "stdlib":
        yield from load_text()["test"]["text"]
    elif source in SOURCES:
        # Only one split is read: the same one under every name.
        chosen = files or ("test" if source == "hub" else "**/*.txt")
        splits = dict.fromkeys(SPLITS, chosen)
        rows = load_text(source, data_dir=data_dir, dataset=dataset, splits=splits)["test"]
        yield from map(text_of, rows)
    else:
        yield from map(text_of, load_corpus(source, split, data_dir=data_dir, streaming=True))


class LengthResults:
    """The results file of a comparison, which grows with every cell that is measured.

    It holds `data` (what is scored, and how), `checkpoints` (one entry for each checkpoint and variant, with `cells` as
    in `windows.Cell` and `by_position`), and command, date and versions of the last run that added to it, with those of
    the runs before in `earlier`.
    """

    def __init__(self, folder: pathlib.Path, data: dict[str, Any], *, origin: dict[str, Any]) -> None:
        """Reads the file in a folder if there is one; `data` give it its name, `origin` is from `provenance`.

        Raises:
            ValueError: the file is about other data, or is broken.
        """
        corpus, split = data["corpus"], data["split"].partition("[")[0]
        parts = ["length"] if corpus in SOURCES else ["length", corpus, *([split] if split != "test" else [])]
        self.path, self.data, self.origin = folder / f"{'_'.join(parts)}.json", data, origin
        self.checkpoints: list[dict[str, Any]] = []
        self.earlier: list[dict[str, Any]] = []
        if not self.path.is_file():
            return
        try:
            content = read_json(self.path)
            before, self.checkpoints = content["data"], content["checkpoints"]
            self.earlier = [*content["earlier"], {key: content[key] for key in origin}]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{str(self.path)!r} is no results file of this command: {error!r}. Remove it.") from error
        changed = [f"{key}: {before.get(key)!r} → {value!r}" for key, value in data.items() if before.get(key) != value]
        if changed:
            raise ValueError(
                f"{str(self.path)!r} holds results of other data. Different (before → now): {'; '.join(changed)}. Take "
                "another --output, or remove it."
            )

    def entry(self, identity: dict[str, Any], details: dict[str, Any]) -> dict[str, Any]:
        """Returns the entry of a checkpoint and variant; a new one unless all of `identity` is as it was.

        Raises:
            ValueError: the file holds another checkpoint of that name, whose numbers would be lost.
        """
        entry = {**identity, **details, "cells": [], "by_position": []}
        for index, old in enumerate(self.checkpoints):
            if (old["name"], old["variant"]) == (identity["name"], identity["variant"]):
                known = identity["weights"] is not None
                if known and all(old.get(key) == value for key, value in identity.items()):
                    return old
                before, now = old.get("checkpoint"), details.get("checkpoint")
                if before != now and None not in (before, now) and old["weights"] != identity["weights"]:
                    raise ValueError(
                        f"checkpoint={now!r} is not valid: {str(self.path)!r} holds results of {before!r}, which is "
                        f"called {old['name']!r}, too. Take another --output."
                    )
                self.checkpoints[index] = entry
                return entry
        self.checkpoints.append(entry)
        return entry

    def add(self, entry: dict[str, Any], cell: windows.Cell, by_position: dict[str, Any] | None) -> None:
        """Adds what was measured at one length, and writes the file."""
        entry["cells"] = sorted([*entry["cells"], dataclasses.asdict(cell)], key=lambda one: one["length"])
        if by_position is not None:
            entry["by_position"] = sorted([*entry["by_position"], by_position], key=lambda one: one["length"])
        self.write(self.path.parent)

    def write(self, folder: pathlib.Path, *, weights: str | None = None) -> None:
        """Writes the file into a folder; with `weights` only the entries of these.

        In the folder of a checkpoint the file also states the fingerprint of its weights.
        """
        kept = [entry for entry in self.checkpoints if weights in (None, entry["weights"])]
        mine = {"weights_sha256": weights_fingerprint(folder)} if (folder / "config.json").is_file() else {}
        content = {"data": self.data, "checkpoints": kept, "earlier": self.earlier, **self.origin}
        write_json(folder / self.path.name, {**mine, **content})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curve:
    """A line of the figure: a checkpoint as it is, or with a change of its configuration at test time."""

    checkpoint: str
    name: str
    variant: str | None
    trained_length: int

    def changes(self, config: Any, length: int) -> dict[str, Any]:
        """Returns the fields of the configuration that are changed for windows of a length."""
        if self.variant is None:
            return {}
        return variants.changes(self.variant, config, trained_length=self.trained_length, length=length)


def curves_of(
    checkpoints: Sequence[str], names: Sequence[str], loading: Loading, *, trained_length: int | None = None
) -> list[Curve]:
    """Returns the curves of checkpoints: each as it is, then those of `names`' variants that apply to it.

    Raises:
        ValueError: a checkpoint cannot be read, or a variant does not exist or applies to no checkpoint.
    """
    curves, served = [], set()
    reasons: dict[str, str] = {}
    for checkpoint, title in zip(checkpoints, names_of(checkpoints)):
        config = loading.config(checkpoint)
        trained = trained_length or trained_length_of(checkpoint, config)
        curves.append(Curve(checkpoint=checkpoint, name=title, variant=None, trained_length=trained))
        for variant in names:
            try:
                variants.changes(variant, config, trained_length=trained, length=2 * trained)
            except variants.DoesNotApply as error:
                reasons[variant] = f"{title}: no {variant}, because {error}."
                _report(reasons[variant])
            else:
                served.add(variant)
                curves.append(dataclasses.replace(curves[-1], variant=variant))
    for variant in names:
        if variant not in served:
            raise ValueError(f"variants={variant!r} is not valid: it applies to no checkpoint ({reasons[variant]})")
    return curves


def tokenise(
    tokenizer: Any, texts: Iterable[str], data: dict[str, Any], lengths: Sequence[int]
) -> tuple[list[torch.Tensor], int]:
    """Returns what is cut into windows: int32 (tokens) of each document, or of all of them joined; and the documents.

    Args:
        tokenizer: each document ends with its end-of-text token.
        texts: the documents; no more are read than are wanted.
        data: `document_limit` says how many, `text_tokens` how much of each text, `joined` whether they are one text.
        lengths: a joined text of which some is scored is cut to a multiple of all of them, if it is long enough.

    Raises:
        ValueError: there is no document, or no end-of-text token.
    """
    from ..data.tokenize import tokenize_documents

    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"tokenizer={tokenizer.name_or_path!r} is not valid: it has no end-of-text token (`eos_token`)."
        )
    ids = tokenize_documents(tokenizer, itertools.islice(texts, data["document_limit"]))
    documents = [torch.tensor(document, dtype=torch.int32) for document in ids]
    if not documents:
        raise ValueError("data is not valid: it holds no document.")
    limit = data["text_tokens"]
    if not data["joined"]:
        return [document[: None if limit is None else limit + 1] for document in documents], len(documents)
    text = torch.cat(documents)
    if limit is None and data["corpus"] in SOURCES:
        limit = 16 * max(lengths)
    if limit is not None:
        text = text[: windows.common_tokens(limit, len(text) - 1, lengths) + 1]
    return [text], len(documents)


def compare(
    curves: Sequence[Curve],
    texts: Callable[[], Iterable[str]],
    results: LengthResults,
    lengths: str,
    loading: Loading,
    *,
    batch_tokens: int = 4096,
) -> None:
    """Measures what `results` does not hold yet.

    Args:
        curves: what is measured.
        texts: gives the documents, each time from the first one on.
        results: where the numbers go; `data` says what is read, and how.
        lengths: of windows, as in `parse_windows`; those that no text fills are skipped, and reported.
        loading: how checkpoints are loaded. The loss is float32 whatever the dtype is.
        batch_tokens: windows are batched up to this many tokens.

    Raises:
        ValueError: a checkpoint cannot be loaded, or no text is long enough for any window.
    """
    from ..data.tokenize import bytes_per_token

    # Mistakes should not wait for the first model.
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
        # Checkpoints that are compared often share a tokenizer: their text is tokenised once.
        backend = getattr(tokenizer, "backend_tokenizer", None)
        key = curve.checkpoint if backend is None else f"{tokenizer.eos_token_id} {backend.to_str()}"
        if key not in tokenised:
            parts, results.data["documents"] = tokenise(tokenizer, texts(), results.data, every)
            tokenised = {key: parts}
        parts = tokenised[key]
        filled, skipped = windows.fillable(parts, wanted[curve])
        if skipped:
            _report(
                f"{curve.name}: windows of {', '.join(map(str, skipped))} tokens are skipped, because the longest of "
                f"{len(parts)} texts has {max(map(len, parts)) - 1} tokens to score."
            )
        config = loading.config(curve.checkpoint)
        folder = pathlib.Path(curve.checkpoint)
        local = weights_fingerprint(folder) if any(folder.glob("*.safetensors")) else None
        entry = results.entry(
            {
                "name": curve.name,
                "variant": curve.variant,
                "weights": local or getattr(config, "_commit_hash", None),
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
            changed = curve.changes(config, length)
            if model is None or changed != loaded:
                model = loading.model(curve.checkpoint, loading.config(curve.checkpoint, **changed))
                loaded, entry["parameters"] = changed, model.num_parameters()
            limit = longest_length(model)
            if limit is not None and length > limit:
                multiple, reason = length / curve.trained_length, f"the position encoding reaches {limit} tokens"
                results.add(entry, windows.Cell(length=length, multiple=multiple, reached=False, reason=reason), None)
                continue
            cell, by_position = windows.measure_windows(
                model,
                parts,
                byte_counts,
                length,
                trained_length=curve.trained_length,
                batch_tokens=batch_tokens,
                name=f"{label(entry)} at {length}",
            )
            results.add(entry, cell, by_position)


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    result = argparse.ArgumentParser(
        prog="whatwhere length",
        usage="%(prog)s CHECKPOINT [CHECKPOINT ...] [options]",
        description="Length extrapolation: perplexity and bits per byte in windows of several lengths.",
        epilog="example: whatwhere length demo/rope demo/pope --windows 1x,2x,4x",
    )
    result.add_argument("checkpoints", nargs="+", metavar="CHECKPOINT", help="a folder or a Hub id")
    result.add_argument(
        "--windows",
        metavar="N,...",
        help=f"lengths in tokens, or multiples of the trained length (default {DEFAULT_WINDOWS}; pg19: the paper's)",
    )
    result.add_argument("--trained-length", type=at_least_one, metavar="N", help="default: what the checkpoint says")
    result.add_argument("--variants", metavar="NAME,...", help=f"further curves: {', '.join(variants.VARIANTS)}")
    result.add_argument("--metric", default="perplexity", choices=METRICS, help="of table and figure")
    result.add_argument("--output", type=pathlib.Path, metavar="DIR", help="for the results and the figure")
    text = result.add_argument_group("text")
    text.add_argument(
        "--data",
        default="stdlib",
        help="stdlib, hub, local, or a corpus by its name such as pg19, or pg19:validation (default %(default)s)",
    )
    text.add_argument("--data-dir", metavar="DIR", help="the folder of local data; default $WHATWHERE_DATA_DIR")
    text.add_argument("--dataset", metavar="ID", help="with --data hub: a data set")
    text.add_argument("--test-files", help="held-out files (a glob; local) or split (such as test[:100]; hub)")
    text.add_argument("--documents", type=at_least_one, metavar="N", help="the first N documents (default all)")
    text.add_argument(
        "--tokens",
        type=at_least_one,
        metavar="N",
        help="of each text (default all; of stdlib, hub and local, about 16 of the longest windows)",
    )
    text.add_argument(
        "--join",
        action=argparse.BooleanOptionalAction,
        help=f"cut windows from all documents joined (default, except {', '.join(SEPARATE_DOCUMENTS)}), or from each",
    )
    add_loading(result)
    result.add_argument(
        "--batch-tokens", type=at_least_one, default=4096, metavar="N", help="in a batch of windows (default 4096)"
    )
    return result


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line."""
    parse = parser()
    options = parse.parse_args(arguments)
    try:
        run(options, provenance("length", arguments))
    except (ValueError, OSError, ImportError) as error:
        parse.exit(2, f"error: {explain(error)}\n")
    except KeyboardInterrupt:
        parse.exit(130, "interrupted. The same command goes on from what was measured.\n")


def run(options: argparse.Namespace, origin: dict[str, Any]) -> LengthResults:
    """Measures, writes results and figure, and prints the table.

    Raises:
        ValueError, OSError, ImportError: an option, a checkpoint or the text is not valid, or something is missing.
    """
    source, split = parse_data(options.data)
    for name, used in (
        ("dataset", source == "hub"),
        ("test_files", source in ("hub", "local")),
        ("data_dir", source not in ("stdlib", "hub")),
    ):
        if getattr(options, name) is not None and not used:
            raise ValueError(f"--{name.replace('_', '-')} has no effect with --data {options.data}.")
    if options.output is None:
        alone = len(options.checkpoints) == 1 and pathlib.Path(options.checkpoints[0]).is_dir()
        options.output = pathlib.Path(options.checkpoints[0] if alone else "length")
    check_writable(options.output)
    loading = loading_of(options)
    curves = curves_of(
        options.checkpoints,
        options.variants.split(",") if options.variants is not None else [],
        loading,
        trained_length=options.trained_length,
    )
    from ..data.corpus import DATA_DIR_VARIABLE

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
    results = LengthResults(options.output, data, origin=origin)
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
    stem = results.path.with_suffix("")
    draw(results.checkpoints, stem, metric=options.metric, title=f"{source}, {split}")
    print(table(results.checkpoints, metric=options.metric))
    print(f"{METRICS[options.metric]} ± standard error. In {options.output}: {stem.name}.json, .png, .svg")
    return results


def _report(text: str) -> None:
    print(text, file=sys.stderr)


if __name__ == "__main__":
    main()
