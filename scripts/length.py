"""Length extrapolation: bits per byte of checkpoints at 1, 2, 4, 8 and 10 times their trained length, on one text.

On a laptop (two minutes; the checkpoints are those of `make demo`):

    python -m whatwhere.scripts.length demo/rope demo/pope demo/cope

On a GPU:

    python -m whatwhere.scripts.length runs/rope runs/pope --lengths 1,2,4,8,10 --tokens 1000000 --device cuda \
        --dtype bfloat16 --output runs/length

A checkpoint is a folder or a Hub id that AutoModelForCausalLM and AutoTokenizer can load, ours or stock. The test split
of `--data` is tokenised once per checkpoint and cut into windows of each length; the number of tokens is a multiple of
every window length, so exactly the same tokens are scored at every length (see `whatwhere.scripts.evaluation.length`).
A length that an encoding cannot reach is reported as such.

The trained length is what the checkpoint's `results.json` says, else `config.max_position_embeddings`, unless
`--trained-length` is given. Lengths are multiples of it. Output (`--output`, by default the checkpoint's own folder if
there is one checkpoint, else `length/`): `length.json` with every number, its standard error over windows, tokens,
windows, date, versions and command; `length.png` and `length.svg`.
"""

import argparse
import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from safetensors import SafetensorError

from ..model_card import weights_fingerprint
from .evaluation import length as length_evaluation
from .evaluation.results import check_writable, provenance, write_json

DEFAULT_MULTIPLES = (1.0, 2.0, 4.0, 8.0, 10.0)


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


def load_config(checkpoint: str, *, trust_remote_code: bool = False) -> Any:
    """Returns the configuration of a folder or Hub id; raises ValueError with the reason if it cannot be read."""
    folder = pathlib.Path(checkpoint)
    if folder.exists() and not (folder / "config.json").is_file():
        raise ValueError(f"checkpoint={checkpoint!r} is not a model folder: it has no config.json.")
    try:
        return transformers.AutoConfig.from_pretrained(checkpoint, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(f"checkpoint={checkpoint!r} cannot be loaded: {error}") from error


def load_test_texts(
    source: str = "stdlib", *, data_dir: str | None = None, dataset: str | None = None, files: str | None = None
) -> list[str]:
    """Returns the held-out documents of a corpus of `whatwhere.scripts.data.corpus`.

    Args:
        source: `stdlib`, `hub` or `local`.
        data_dir: the folder of `local`.
        dataset: the id of `hub`.
        files: for `local` a glob pattern inside the folder, for `hub` a split such as `test[:100]`.
    """
    from .data.corpus import SPLITS, load_text, text_of

    if source == "stdlib":
        return list(load_text()["test"]["text"])
    # Only one split is read: the same one under every name.
    chosen = files or ("test" if source == "hub" else "**/*.txt")
    splits = dict.fromkeys(SPLITS, chosen)
    rows = load_text(source, data_dir=data_dir, dataset=dataset, splits=splits)["test"]
    return [text_of(row) for row in rows]


def trained_length_of(checkpoint: str, config: Any) -> int:
    """Returns the length a model was trained at: what its `results.json` says, else its configuration.

    Raises:
        ValueError: neither says it.
    """
    results = pathlib.Path(checkpoint) / "results.json"
    length = json.loads(results.read_text(encoding="utf-8")).get("length") if results.is_file() else None
    length = length or getattr(config, "max_position_embeddings", None)
    if not isinstance(length, int) or length < 1:
        raise ValueError(f"checkpoint={checkpoint!r} does not say the length it was trained at: give --trained-length.")
    return length


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
    trained = {}
    for checkpoint in checkpoints:
        config = load_config(checkpoint, trust_remote_code=trust_remote_code)
        trained[checkpoint] = trained_length or trained_length_of(checkpoint, config)
    lengths = {
        checkpoint: [_whole(multiple, trained[checkpoint]) for multiple in multiples] for checkpoint in checkpoints
    }
    windows = sorted({length for each in lengths.values() for length in each})

    entries = []
    for checkpoint in checkpoints:
        try:
            model: Any = transformers.AutoModelForCausalLM.from_pretrained(
                checkpoint,
                trust_remote_code=trust_remote_code,
                dtype=getattr(torch, dtype),
                attn_implementation=attn_implementation,
            )
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise ValueError(f"checkpoint={checkpoint!r} cannot be loaded: {error}") from error
        tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=trust_remote_code)
        token_ids, byte_counts = evaluation_stream(tokenizer, texts)
        count = length_evaluation.usable_tokens(tokens, len(token_ids), windows)
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
                "name": pathlib.PurePath(checkpoint).name,
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
        data: what was scored: `name`, `split` and how it was chosen.
        origin: from `provenance`.
    """
    if (output / "config.json").is_file():
        origin = {"weights_sha256": weights_fingerprint(output), **origin}
    write_json(output / "length.json", {"data": data, "checkpoints": checkpoints, **origin})
    length_evaluation.draw(checkpoints, output / "length")


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m whatwhere.scripts.length", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("checkpoints", nargs="+", metavar="CHECKPOINT", help="a folder or a Hub id")
    parser.add_argument("--lengths", default="1,2,4,8,10", help="multiples of the trained length (default %(default)s)")
    parser.add_argument("--trained-length", type=int, help="tokens; default: what the checkpoint says")
    parser.add_argument("--data", default="stdlib", choices=("stdlib", "hub", "local"), help="default %(default)s")
    parser.add_argument("--data-dir", help="with --data local: a folder of .txt files, or see --test-files")
    parser.add_argument("--dataset", help="with --data hub: the id of a dataset")
    parser.add_argument("--test-files", help="held-out files (a glob; local) or split (such as test[:100]; hub)")
    parser.add_argument("--tokens", type=int, help="tokens to score, at least (default: 16 of the longest windows)")
    parser.add_argument("--output", type=pathlib.Path, help="folder for length.json and the figure")
    parser.add_argument("--device", help="default: the GPU if there is one")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--attn-implementation", help="default: the model's own choice")
    parser.add_argument(
        "--batch-tokens", type=int, default=4096, help="tokens in a batch of windows (default %(default)s)"
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="run the code in the checkpoint's folder")
    options = parser.parse_args(arguments)
    try:
        if options.output is None:
            alone = len(options.checkpoints) == 1 and pathlib.Path(options.checkpoints[0]).is_dir()
            options.output = pathlib.Path(options.checkpoints[0] if alone else "length")
        check_writable(options.output)
        entries = evaluate(
            options.checkpoints,
            load_test_texts(options.data, data_dir=options.data_dir, dataset=options.dataset, files=options.test_files),
            multiples=parse_multiples(options.lengths),
            trained_length=options.trained_length,
            tokens=options.tokens,
            device=options.device,
            dtype=options.dtype,
            attn_implementation=options.attn_implementation,
            trust_remote_code=options.trust_remote_code,
            batch_tokens=options.batch_tokens,
        )
        data = {"source": options.data, "dataset": options.dataset, "files": options.test_files, "split": "test"}
        save(options.output, entries, data=data, origin=provenance("whatwhere.scripts.length", arguments))
    except (ValueError, OSError, ImportError) as error:
        parser.exit(2, f"error: {error}\n")
    print(length_evaluation.table(entries))
    print(f"Bits per byte ± standard error over windows. In {options.output}: length.json, length.png, length.svg")


if __name__ == "__main__":
    main()
