"""Length extrapolation: checkpoints at lengths that they were not trained at, by one of two protocols.

**The same tokens at every length** (`--lengths`, the default): bits per byte at 1, 2, 4, 8 and 10 times the trained
length, on one text. On a laptop (two minutes; the checkpoints are those of `make demo`):

    python -m whatwhere.scripts.length demo/rope demo/pope demo/cope

On a GPU:

    python -m whatwhere.scripts.length runs/rope runs/pope --lengths 1,2,4,8,10 --tokens 1000000 --device cuda \\
        --dtype bfloat16 --output runs/length

The test split of `--data` is tokenised once per checkpoint and cut into windows of each length; the number of tokens is
a multiple of every window length, so exactly the same tokens are scored at every length (see
`whatwhere.scripts.evaluation.length`). Lengths are multiples of the trained one.

**The papers' windows** (`--windows`, the default of a corpus that is known by name): perplexity in disjoint windows of
so many tokens, and loss by position within the window (see `whatwhere.scripts.evaluation.windows`). PoPE's Figure 2,
the test books of PG-19, which are read one by one; on a laptop with less of them, on a GPU all, to 65,536 tokens:

    python -m whatwhere.scripts.length runs/rope runs/pope --data pg19 --windows 512,1024,2048,4096 --documents 4 \\
        --document-tokens 20480 --output runs/length
    python -m whatwhere.scripts.length runs/rope runs/pope --data pg19 --variants yarn,interpolation --finetune \\
        --dtype bfloat16 --output runs/length

CoPE's Figure 3, WikiText-103, whose articles are joined by the end-of-text token as in training:

    python -m whatwhere.scripts.length runs/relative runs/cope --data wikitext103_v1:validation \\
        --variants relative-capped,relative-none --output runs/length

`--variants` are further curves, of changes at test time (see `whatwhere.scripts.evaluation.variants`). `--finetune`
adds curves of the checkpoints after a short training at a longer length, as in PoPE's ICML version: 500 steps of 64
sequences of 4,096 tokens of PG-19's training books, learning rate 6e-5 after a warm-up of 20 steps, constant, no weight
decay; RoPE by YaRN, the others as they are. They are kept in `finetuned/` of the output folder.

A checkpoint is a folder or a Hub id that AutoModelForCausalLM and AutoTokenizer can load, ours or stock. A length that
an encoding cannot reach is reported as such. The trained length is what the checkpoint's `results.json` says, else
`config.max_position_embeddings`, unless `--trained-length` is given.

Output (`--output`, by default the checkpoint's own folder if there is one checkpoint, else `length/`): with `--lengths`
`length.json` with every number, its standard error, tokens, windows, date, versions and command; `length.png` and
`length.svg`. With `--windows` the same in `length_CORPUS` (`length_CORPUS_SPLIT` if it is not the test split). That
file grows: each number is written when it is measured, the same command goes on where it was stopped, other windows,
checkpoints and variants are added, and what was measured with other weights or settings is measured again. Another
checkpoint of the same name needs another `--output`.
"""

import argparse
import dataclasses
import hashlib
import itertools
import os
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..model_card import weights_fingerprint
from .evaluation import length as length_evaluation
from .evaluation import windows
from .evaluation.checkpoints import load_config, load_model, load_tokenizer, names_of, trained_length_of
from .evaluation.curves import Curve, Finetuning, WindowResults, curves_of, evaluate_windows
from .evaluation.results import check_writable, provenance, write_json
from .evaluation.variants import VARIANTS
from .extras import explain

DEFAULT_MULTIPLES = (1.0, 2.0, 4.0, 8.0, 10.0)
# Windows of a corpus that is known by name, unless --windows says others.
DEFAULT_WINDOWS = {"pg19": (*range(1024, 10241, 1024), 65536)}
OTHER_WINDOWS = (512, 1024, 2048, 4096)
# The documents of these are long enough for windows of their own; those of others are joined.
SEPARATE_DOCUMENTS = ("pg19",)
SOURCES = ("stdlib", "hub", "local")


def parse_multiples(text: str) -> list[float]:
    """Returns the ascending multiples in a comma-separated list; raises ValueError for all but positive numbers."""
    try:
        multiples = sorted({float(part) for part in text.split(",")})
    except ValueError:
        multiples = []
    if not multiples or not 0 < multiples[0] <= multiples[-1] < float("inf"):
        raise ValueError(
            f"lengths={text!r} is not valid: a comma-separated list of positive numbers, such as 1,2,4,8,10."
        )
    return multiples


def parse_windows(text: str) -> list[int]:
    """Returns the ascending lengths in a comma-separated list; raises ValueError for all but positive integers."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(
            f"windows={text!r} is not valid: a comma-separated list of positive integers, such as 1024,2048,65536."
        )
    return sorted({int(part) for part in parts})


def parse_data(text: str) -> tuple[str, str]:
    """Returns source and split of `--data`: one of `SOURCES` and "test", or a corpus and its split, by default "test".

    Raises:
        ValueError: there is no such source, corpus or split.
    """
    if text in SOURCES:
        return text, "test"
    from .data.corpora import parse_choice

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
    """Yields held-out documents, those of a corpus that is known by name as they are read.

    Args:
        source: `stdlib`, `hub` or `local`, or a corpus of `whatwhere.scripts.data.corpora`.
        split: of a corpus, with the documents wanted in brackets if not all.
        data_dir: the folder of `local`, or of a corpus.
        dataset: the id of `hub`.
        files: for `local` a glob pattern inside the folder, for `hub` a split such as `test[:100]`.
    """
    from .data.corpora import load_corpus
    from .data.corpus import SPLITS, load_text, text_of

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


def load_test_texts(source: str = "stdlib", split: str = "test", **options: Any) -> list[str]:
    """Returns the held-out documents that `iterate_texts` yields."""
    return list(iterate_texts(source, split, **options))


def evaluate(
    checkpoints: Sequence[str],
    texts: Sequence[str],
    *,
    multiples: Sequence[float] = DEFAULT_MULTIPLES,
    trained_length: int | None = None,
    tokens: int | None = None,
    device: str | None = None,
    dtype: str = "float32",
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    batch_tokens: int = 4096,
) -> list[dict[str, Any]]:
    """Measures every checkpoint on the same text and returns the `checkpoints` entry of `length.json`.

    Args:
        checkpoints: folders or Hub ids.
        texts: the held-out documents, in order.
        multiples: window lengths, as multiples of the trained length.
        trained_length: in tokens; None to ask each checkpoint (`trained_length_of`).
        tokens: at least this many tokens are scored; None for 16 of the longest windows.
        device: None for the GPU if there is one.
        dtype: of the model's weights and activations. The loss is float32 whatever it is.
        attn_implementation: None for the model's default.
        trust_remote_code: run the code in the checkpoint's folder.
        batch_tokens: windows are batched up to this many tokens.

    Raises:
        ValueError: a checkpoint that cannot be loaded, a length that is no whole number of tokens, too little text.
    """
    from .data.tokenize import evaluation_stream

    if trained_length is not None and trained_length < 1:
        raise ValueError(f"trained-length={trained_length!r} is not valid: it must be at least 1.")
    for name, value in (("tokens", tokens), ("batch-tokens", batch_tokens)):
        if value is not None and value < 1:
            raise ValueError(f"{name}={value!r} is not valid: it must be at least 1.")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    # Every configuration is read before the first model runs: mistakes should not wait for minutes.
    names, trained, tokenizers = dict(zip(checkpoints, names_of(checkpoints))), {}, {}
    for checkpoint in checkpoints:
        config = load_config(checkpoint, trust_remote_code=trust_remote_code)
        tokenizers[checkpoint] = load_tokenizer(checkpoint, trust_remote_code=trust_remote_code)
        trained[checkpoint] = trained_length or trained_length_of(checkpoint, config)
    lengths = {
        checkpoint: [_whole(multiple, trained[checkpoint]) for multiple in multiples] for checkpoint in checkpoints
    }
    every = sorted({length for each in lengths.values() for length in each})

    entries = []
    for checkpoint in checkpoints:
        model = load_model(
            checkpoint,
            None,
            dtype=dtype,
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
        )
        token_ids, byte_counts = evaluation_stream(tokenizers[checkpoint], texts)
        count = length_evaluation.usable_tokens(tokens, len(token_ids), every)
        token_ids, byte_counts = token_ids[: count + 1], byte_counts[: count + 1]
        cells = length_evaluation.measure(
            model.to(device),
            token_ids,
            byte_counts,
            lengths[checkpoint],
            trained_length=trained[checkpoint],
            batch_tokens=batch_tokens,
            name=checkpoint,
        )
        entries.append(
            {
                "name": names[checkpoint],
                "model_type": model.config.model_type,
                "position_encoding": getattr(model.config, "position_encoding", None),
                "trained_length": trained[checkpoint],
                "parameters": model.num_parameters(),
                "device": device,
                "dtype": dtype,
                "tokens_sha256": hashlib.sha256(token_ids.numpy().tobytes()).hexdigest(),
                "cells": [dataclasses.asdict(cell) for cell in cells],
            }
        )
    return entries


def _whole(multiple: float, trained: int) -> int:
    length = multiple * trained
    if length != int(length):
        raise ValueError(f"{multiple:g} times the trained length {trained} is no whole number of tokens.")
    return int(length)


def save(output: pathlib.Path, checkpoints: list[dict[str, Any]], *, data: dict[str, Any], origin: dict) -> None:
    """Writes `length.json`, `length.png` and `length.svg` into a folder.

    In the folder of the one checkpoint that was measured, `length.json` also states the weights' fingerprint.

    Args:
        output: the folder; made if it does not exist.
        checkpoints: from `evaluate`.
        data: what was scored: `source`, `split` and how it was chosen.
        origin: from `provenance`.
    """
    if (output / "config.json").is_file():
        origin = {"weights_sha256": weights_fingerprint(output), **origin}
    write_json(output / "length.json", {"data": data, "checkpoints": checkpoints, **origin})
    length_evaluation.draw(checkpoints, output / "length")


# The options of each protocol, refused with the other one.
_OF_LENGTHS = ("tokens",)
_OF_WINDOWS = ("documents", "document_tokens", "join", "variants", "finetune")


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    result = argparse.ArgumentParser(
        prog="python -m whatwhere.scripts.length",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("checkpoints", nargs="+", metavar="CHECKPOINT", help="a folder or a Hub id")
    result.add_argument("--trained-length", type=int, metavar="N", help="tokens; default: what the checkpoint says")
    result.add_argument(
        "--data",
        default="stdlib",
        help="stdlib, hub, local, or a corpus by its name such as pg19, or pg19:validation (default %(default)s)",
    )
    result.add_argument("--data-dir", help="the folder of local data; default $WHATWHERE_DATA_DIR")
    result.add_argument("--dataset", help="with --data hub: the id of a dataset")
    result.add_argument("--test-files", help="held-out files (a glob; local) or split (such as test[:100]; hub)")
    result.add_argument("--output", type=pathlib.Path, help="folder for the results and the figure")
    result.add_argument("--device", help="default: the GPU if there is one")
    result.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    result.add_argument("--attn-implementation", help="default: the model's own choice")
    result.add_argument(
        "--batch-tokens", type=int, default=4096, metavar="N", help="tokens in a batch of windows (default %(default)s)"
    )
    result.add_argument("--trust-remote-code", action="store_true", help="run the code in the checkpoint's folder")
    same = result.add_argument_group("the same tokens at every length")
    same.add_argument("--lengths", metavar="X,...", help="multiples of the trained length (default 1,2,4,8,10)")
    same.add_argument("--tokens", type=int, metavar="N", help="to score, at least (default 16 of the longest windows)")
    papers = result.add_argument_group("the papers' windows")
    defaults = "; ".join(f"{name}: {','.join(map(str, lengths))}" for name, lengths in DEFAULT_WINDOWS.items())
    papers.add_argument(
        "--windows",
        metavar="N,...",
        help=f"lengths in tokens (default {defaults}; other corpora: {','.join(map(str, OTHER_WINDOWS))})",
    )
    papers.add_argument("--documents", type=int, metavar="N", help="the first N documents (default all)")
    papers.add_argument("--document-tokens", type=int, metavar="N", help="the first N tokens of each (default all)")
    papers.add_argument(
        "--join",
        action=argparse.BooleanOptionalAction,
        help="cut windows from all documents joined by the end-of-text token, or from each by itself (default: joined, "
        f"except {', '.join(SEPARATE_DOCUMENTS)})",
    )
    papers.add_argument("--variants", metavar="NAME,...", help=f"further curves: {', '.join(VARIANTS)}")
    papers.add_argument(
        "--finetune", action="store_true", help="further curves, after a short training at 4,096 tokens"
    )
    for field in dataclasses.fields(Finetuning):
        name = f"--finetune-{field.name.replace('_', '-')}"
        papers.add_argument(name, type=type(field.default), metavar="X", help=f"default {field.default}")
    return result


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line."""
    parse = parser()
    options = parse.parse_args(arguments)
    try:
        options.source, options.split = parse_data(options.data)
        in_windows = options.windows is not None or (options.lengths is None and options.source not in SOURCES)
        _check_options(options, in_windows)
        if options.output is None:
            alone = len(options.checkpoints) == 1 and pathlib.Path(options.checkpoints[0]).is_dir()
            options.output = pathlib.Path(options.checkpoints[0] if alone else "length")
        check_writable(options.output)
        origin = provenance("whatwhere.scripts.length", arguments)
        if in_windows:
            _compare_in_windows(options, origin)
        else:
            _compare_on_the_same_tokens(options, origin)
    except (ValueError, OSError, ImportError) as error:
        parse.exit(2, f"error: {explain(error)}\n")
    except KeyboardInterrupt as stop:
        advice = "The same command goes on from what was measured." if in_windows else "Nothing was written."
        parse.exit(130, f"{str(stop).strip() or 'interrupted'}. {advice}\n")


def _check_options(options: argparse.Namespace, in_windows: bool) -> None:
    """Raises ValueError for options out of range, and for those that would have no effect."""
    if options.windows is not None and options.lengths is not None:
        raise ValueError("--windows and --lengths are two protocols: take one of them.")
    other = "--lengths" if in_windows else "--windows"
    for name in _OF_LENGTHS if in_windows else _OF_WINDOWS:
        if getattr(options, name) is not (False if name == "finetune" else None):
            raise ValueError(f"--{name.replace('_', '-')} has no effect without {other}.")
    for field in dataclasses.fields(Finetuning):
        if getattr(options, f"finetune_{field.name}") is not None and not options.finetune:
            raise ValueError(f"--finetune-{field.name.replace('_', '-')} has no effect without --finetune.")
    for name, useless in (
        ("dataset", options.source != "hub"),
        ("test_files", options.source not in ("hub", "local")),
        ("data_dir", options.source in ("stdlib", "hub")),
    ):
        if getattr(options, name) is not None and useless:
            raise ValueError(f"--{name.replace('_', '-')} has no effect with --data {options.data}.")
    for name in ("trained_length", "tokens", "batch_tokens", "documents", "document_tokens"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"{name.replace('_', '-')}={value!r} is not valid: it must be at least 1.")


def _texts(options: argparse.Namespace) -> Iterator[str]:
    return iterate_texts(
        options.source,
        options.split,
        data_dir=options.data_dir,
        dataset=options.dataset,
        files=options.test_files,
    )


def _compare_on_the_same_tokens(options: argparse.Namespace, origin: dict[str, Any]) -> None:
    entries = evaluate(
        options.checkpoints,
        list(_texts(options)),
        multiples=parse_multiples(options.lengths) if options.lengths is not None else DEFAULT_MULTIPLES,
        trained_length=options.trained_length,
        tokens=options.tokens,
        device=options.device,
        dtype=options.dtype,
        attn_implementation=options.attn_implementation,
        trust_remote_code=options.trust_remote_code,
        batch_tokens=options.batch_tokens,
    )
    data = {
        "source": options.source,
        "dataset": options.dataset,
        "files": options.test_files,
        "split": options.split,
    }
    save(options.output, entries, data=data, origin=origin)
    print(length_evaluation.table(entries))
    print(f"Bits per byte ± standard error over windows. In {options.output}: length.json, length.png, length.svg")


def _compare_in_windows(options: argparse.Namespace, origin: dict[str, Any]) -> None:
    from .data.corpus import DATA_DIR_VARIABLE

    corpus = options.source not in SOURCES
    local = options.data_dir or os.environ.get(DATA_DIR_VARIABLE) if corpus else options.source != "hub"
    if options.windows is not None:
        lengths: Sequence[int] = parse_windows(options.windows)
    else:
        lengths = DEFAULT_WINDOWS.get(options.source, OTHER_WINDOWS)
    data = {
        "protocol": "windows",
        "corpus": options.source,
        "split": options.split,
        "place": "local" if local else "Hub",
        "dataset": options.dataset,
        "files": options.test_files,
        "joined": options.source not in SEPARATE_DOCUMENTS if options.join is None else options.join,
        "document_limit": options.documents,
        "document_tokens": options.document_tokens,
    }
    results = WindowResults(options.output, data, origin=origin)
    curves = curves_of(
        options.checkpoints,
        options.variants.split(",") if options.variants is not None else [],
        trained_length=options.trained_length,
        trust_remote_code=options.trust_remote_code,
        report=_report,
    )
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    trained = _finetuned(options, curves, device) if options.finetune else iter(())
    evaluate_windows(
        itertools.chain(curves, trained),
        lambda: _texts(options),
        results,
        lengths,
        device=device,
        dtype=options.dtype,
        attn_implementation=options.attn_implementation,
        trust_remote_code=options.trust_remote_code,
        batch_tokens=options.batch_tokens,
        report=_report,
    )
    stem = results.path.with_suffix("")
    windows.draw(results.checkpoints, stem, title=f"{options.source}, {options.split}")
    print(windows.table(results.checkpoints))
    clusters = {cell["clusters"] for one in results.checkpoints for cell in one["cells"] if cell["clusters"]}
    print(
        f"Perplexity ± standard error over {' or '.join(sorted(clusters))}. In {options.output}: {stem.name}.json, "
        f"{stem.name}.png, {stem.name}.svg"
    )


def _finetuned(options: argparse.Namespace, curves: Sequence[Curve], device: str) -> Iterator[Curve]:
    """Yields the curves of the fine-tuned checkpoints, each when it is trained; what cannot be is found out before."""
    given = {field.name: getattr(options, f"finetune_{field.name}") for field in dataclasses.fields(Finetuning)}
    finetuning = Finetuning(**{name: value for name, value in given.items() if value is not None})
    plain = [curve for curve in curves if curve.variant is None]
    reasons = [finetuning.applies(curve)[0] for curve in plain]
    for curve, reason in zip(plain, reasons):
        if reason:
            _report(f"{curve.name}: no fine-tuning at {finetuning.length} tokens, because {reason}.")

    def trained() -> Iterator[Curve]:
        for curve, reason in zip(plain, reasons):
            if reason is None:
                folder = options.output / "finetuned" / curve.name.replace(os.sep, "_")
                cpu, bf16 = device == "cpu", options.dtype == "bfloat16"
                yield finetuning.run(curve, folder, data_dir=options.data_dir, cpu=cpu, bf16=bf16)

    return trained()


def _report(text: str) -> None:
    print(text, file=sys.stderr)


if __name__ == "__main__":
    main()
