"""What is compared in windows of several lengths: checkpoints, variants of them, fine-tuned ones; and its results file.

    {"data": {...}, "checkpoints": [{"name", "variant", "trained_length", "cells": [...], "by_position": [...]}]}

and the command, date and versions of the last run that added to it, with those of the runs before in `earlier`.
`cells` are those of `windows.WindowCell`, one for each length. The file grows: `evaluate_windows` writes each cell when
it is measured, and measures what is not there.
"""

import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ...model_card import weights_fingerprint
from . import length as length_evaluation
from . import variants, windows
from .checkpoints import load_config, load_model, load_tokenizer, names_of, trained_length_of
from .results import write_json


class WindowResults:
    """The results file of the windows protocol, which grows with every cell that is measured.

    Attributes:
        path: the file.
        data: what is scored, and how.
        checkpoints: its entries, one for each checkpoint and variant.
        earlier: `provenance` of the runs before this one.
    """

    def __init__(self, folder: pathlib.Path, data: dict[str, Any], *, origin: dict[str, Any]) -> None:
        """Reads the file if there is one.

        Args:
            folder: where it is.
            data: `corpus` and `split` give it its name.
            origin: from `provenance`.

        Raises:
            ValueError: the file is about other data, or is broken.
        """
        split = data["split"].partition("[")[0]
        name = f"length_{data['corpus']}" + ("" if split == "test" else f"_{split}")
        self.path, self.data, self.origin = folder / f"{name}.json", data, origin
        self.checkpoints: list[dict[str, Any]] = []
        self.earlier: list[dict[str, Any]] = []
        if not self.path.is_file():
            return
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
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

        Args:
            identity: `name` and `variant`, and what the numbers depend on.
            details: what else the entry says; `checkpoint` is its folder or Hub id.

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

    def add(self, entry: dict[str, Any], cell: windows.WindowCell, by_position: dict[str, Any] | None) -> None:
        """Adds what was measured at one length, and writes the file."""
        entry["cells"] = sorted([*entry["cells"], dataclasses.asdict(cell)], key=lambda one: one["length"])
        if by_position is not None:
            entry["by_position"] = sorted([*entry["by_position"], by_position], key=lambda one: one["length"])
        folder = self.path.parent
        mine = {"weights_sha256": weights_fingerprint(folder)} if (folder / "config.json").is_file() else {}
        content = {"data": self.data, "checkpoints": self.checkpoints, "earlier": self.earlier, **self.origin}
        write_json(self.path, {**mine, **content})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curve:
    """A line of the figure.

    Attributes:
        checkpoint: folder or Hub id.
        name: what it is called.
        variant: a variant of `whatwhere.scripts.evaluation.variants`, or what a fine-tuned one is called, or None.
        trained_length: tokens.
        changed: whether `variant` is a change of the configuration.
    """

    checkpoint: str
    name: str
    variant: str | None
    trained_length: int
    changed: bool = False

    def config(self, length: int, trust_remote_code: bool) -> tuple[Any, dict[str, Any]]:
        """Returns the configuration for windows of a length, and what is changed in it."""
        config = load_config(self.checkpoint, trust_remote_code=trust_remote_code)
        if not self.changed:
            return config, {}
        assert self.variant is not None, "a variant has a name"
        fields = variants.changes(self.variant, config, trained_length=self.trained_length, length=length)
        return load_config(self.checkpoint, trust_remote_code=trust_remote_code, **fields), fields


def curves_of(
    checkpoints: Sequence[str],
    names: Sequence[str],
    *,
    trained_length: int | None,
    trust_remote_code: bool,
    report: Callable[[str], None],
) -> list[Curve]:
    """Returns the curves of checkpoints: each as it is, then its variants.

    Args:
        checkpoints: folders or Hub ids.
        names: of variants.
        trained_length: in tokens; None to ask each checkpoint.
        trust_remote_code: run the code in the checkpoint's folder.
        report: is told which variants a checkpoint has no use for.

    Raises:
        ValueError: a checkpoint cannot be read, or a variant does not exist or means nothing for all checkpoints.
    """
    curves, served = [], set()
    reasons: dict[str, str] = {}
    for checkpoint, title in zip(checkpoints, names_of(checkpoints)):
        config = load_config(checkpoint, trust_remote_code=trust_remote_code)
        trained = trained_length or trained_length_of(checkpoint, config)
        curves.append(Curve(checkpoint=checkpoint, name=title, variant=None, trained_length=trained))
        for variant in names:
            try:
                variants.changes(variant, config, trained_length=trained, length=2 * trained)
            except variants.DoesNotApply as error:
                reasons[variant] = f"{title}: no {variant}, because {error}."
                report(reasons[variant])
            else:
                served.add(variant)
                curves.append(dataclasses.replace(curves[-1], variant=variant, changed=True))
    for variant in names:
        if variant not in served:
            raise ValueError(f"variants={variant!r} is not valid: it serves no checkpoint ({reasons[variant]})")
    return curves


def tokenise(
    tokenizer: Any, texts: Iterable[str], *, documents: int | None, document_tokens: int | None, joined: bool
) -> tuple[list[torch.Tensor], int]:
    """Returns what is cut into windows: int32 (tokens) of each document, or of all of them joined; and the documents.

    Args:
        tokenizer: each document ends with its end-of-text token.
        texts: the documents; no more are read than are wanted.
        documents: take only the first so many.
        document_tokens: score only the first so many tokens of each.
        joined: as one text.

    Raises:
        ValueError: there is no document, or no end-of-text token.
    """
    from ..data.tokenize import tokenize_documents

    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"tokenizer={tokenizer.name_or_path!r} is not valid: it has no end-of-text token (`eos_token`)."
        )
    stop = None if document_tokens is None else document_tokens + 1
    ids = tokenize_documents(tokenizer, itertools.islice(texts, documents))
    parts = [torch.tensor(document[:stop], dtype=torch.int32) for document in ids]
    if not parts:
        raise ValueError("data is not valid: it holds no document.")
    return ([torch.cat(parts)] if joined else parts), len(parts)


def evaluate_windows(
    curves: Iterable[Curve],
    texts: Callable[[], Iterable[str]],
    results: WindowResults,
    lengths: Sequence[int],
    *,
    device: str | None = None,
    dtype: str = "float32",
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    batch_tokens: int = 4096,
    report: Callable[[str], None] = print,
) -> None:
    """Measures what `results` does not hold yet.

    Args:
        curves: what is measured.
        texts: gives the documents, each time from the first one on.
        results: `data` says how many of them are read, how much of each, and whether they are joined.
        lengths: of windows, in tokens; those that no document fills are skipped, and reported.
        device: None for the GPU if there is one.
        dtype: of the model's weights and activations. The loss is float32 whatever it is.
        attn_implementation: None for the model's default.
        trust_remote_code: run the code in the checkpoint's folder.
        batch_tokens: windows are batched up to this many tokens.
        report: is told what a reader should know.

    Raises:
        ValueError: a checkpoint cannot be loaded, or no document is long enough for any window.
    """
    from ..data.tokenize import bytes_per_token

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    data = results.data
    written_by: tuple[str, list[torch.Tensor]] | None = None
    for curve in curves:
        tokenizer = load_tokenizer(curve.checkpoint, trust_remote_code=trust_remote_code)
        try:
            byte_counts = bytes_per_token(tokenizer)
        except ValueError as error:
            byte_counts = None
            report(f"{curve.name}: {error}")
        # Checkpoints that are compared often share a tokenizer: their text is tokenised once.
        key = _tokenizer_key(tokenizer, curve.checkpoint)
        if written_by is None or written_by[0] != key:
            options = {"documents": data["document_limit"], "document_tokens": data["document_tokens"]}
            parts, data["documents"] = tokenise(tokenizer, texts(), joined=data["joined"], **options)
            written_by = key, parts
        parts = written_by[1]
        # Mistakes should not wait for the shorter windows.
        filled, skipped = windows.fillable(parts, lengths)
        if skipped:
            report(
                f"{curve.name}: windows of {', '.join(map(str, skipped))} tokens are skipped, because the longest of "
                f"{len(parts)} texts has {max(map(len, parts)) - 1} tokens to score."
            )
        config = load_config(curve.checkpoint, trust_remote_code=trust_remote_code)
        folder = pathlib.Path(curve.checkpoint)
        local = weights_fingerprint(folder) if any(folder.glob("*.safetensors")) else None
        digest = hashlib.sha256(b"".join(ids.numpy().tobytes() for ids in parts))
        entry = results.entry(
            {
                "name": curve.name,
                "variant": curve.variant,
                "weights": local or getattr(config, "_commit_hash", None),
                "trained_length": curve.trained_length,
                "dtype": dtype,
                "attn_implementation": attn_implementation,
                "tokens_sha256": digest.hexdigest(),
            },
            {
                "checkpoint": curve.checkpoint,
                "model_type": config.model_type,
                "position_encoding": getattr(config, "position_encoding", None),
                "device": device,
                "tokens": sum(len(ids) - 1 for ids in parts),
            },
        )
        measured = {cell["length"] for cell in entry["cells"]}
        model, loaded = None, None
        for length in filled:
            if length in measured:
                continue
            config, changed = curve.config(length, trust_remote_code)
            if model is None or changed != loaded:
                model = load_model(
                    curve.checkpoint,
                    config,
                    dtype=dtype,
                    attn_implementation=attn_implementation,
                    trust_remote_code=trust_remote_code,
                ).to(device)
                loaded, entry["parameters"] = changed, model.num_parameters()
            limit = length_evaluation.reach(model)
            if limit is not None and length > limit:
                results.add(
                    entry,
                    windows.WindowCell(
                        length=length,
                        multiple=length / curve.trained_length,
                        reached=False,
                        reason=f"the position encoding reaches {limit} tokens",
                    ),
                    None,
                )
                continue
            if large := windows.quadratic_memory(model, length):
                report(f"{curve.name}: {large}.")
            title = f"{windows.label(entry)} at {length}"
            results.add(
                entry,
                *windows.measure_windows(
                    model,
                    parts,
                    byte_counts,
                    length,
                    trained_length=curve.trained_length,
                    batch_tokens=batch_tokens,
                    name=title,
                ),
            )


def _tokenizer_key(tokenizer: Any, checkpoint: str) -> str:
    """Returns a text that is equal for tokenizers that are."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return checkpoint if backend is None else f"{tokenizer.eos_token_id} {backend.to_str()}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finetuning:
    """The short training at a longer length; the defaults are those of PoPE's ICML version.

    Attributes:
        data: a corpus, see `whatwhere.scripts.finetune`.
        length: tokens in a sequence.
        steps: optimiser steps; the learning rate rises over a 25th of them, and stays.
        batch_size: sequences in a step.
        micro_batch_size: sequences at a time; it divides `batch_size`.
        learning_rate: the highest one.
    """

    data: str = "pg19"
    length: int = 4096
    steps: int = 500
    batch_size: int = 64
    micro_batch_size: int = 8
    learning_rate: float = 6e-5

    def __post_init__(self) -> None:
        for field in ("length", "steps", "batch_size", "micro_batch_size"):
            if getattr(self, field) < 1:
                name = f"finetune-{field.replace('_', '-')}"
                raise ValueError(f"{name}={getattr(self, field)!r} is not valid: it must be at least 1.")
        if self.batch_size % self.micro_batch_size:
            raise ValueError(
                f"finetune-micro-batch-size={self.micro_batch_size!r} is not valid: it must divide "
                f"finetune-batch-size={self.batch_size!r}."
            )

    def applies(self, curve: Curve) -> tuple[str | None, dict[str, Any]]:
        """Returns why a checkpoint cannot be trained at the length, or None; and YaRN's parameters if it has RoPE.

        Raises:
            ValueError: the checkpoint is of a kind that `whatwhere.scripts.finetune` does not take.
        """
        from whatwhere.position_registry import max_length

        from ..finetune import model_class

        config = model_class(curve.checkpoint).config_class.from_pretrained(curve.checkpoint)
        limit = max_length(config)
        if limit is not None and self.length > limit:
            return f"its position encoding reaches {limit} tokens", {}
        try:
            lengths = {"trained_length": curve.trained_length, "length": self.length}
            return None, variants.changes("yarn", config, **lengths)["rope_parameters"]
        except variants.DoesNotApply:
            return None, {}

    def run(self, curve: Curve, folder: pathlib.Path, *, data_dir: str | None, cpu: bool, bf16: bool) -> Curve:
        """Fine-tunes a checkpoint into a folder, or takes what the same fine-tuning left there; returns its curve.

        Raises:
            ValueError: it cannot be trained, or the folder holds something else.
        """
        from .. import finetune
        from ..training.loop import Interrupted, TrainingError
        from ..training.recipe import differences

        _, rope = self.applies(curve)
        arguments = [
            *(curve.checkpoint, "--output", str(folder), "--data", self.data, "--streaming"),
            *("--sequence-length", str(self.length), "--steps", str(self.steps)),
            *("--batch-size", str(self.micro_batch_size)),
            *("--accumulation", str(self.batch_size // self.micro_batch_size)),
            *("--learning-rate", str(self.learning_rate), "--schedule", "constant"),
            *("--warmup-steps", str(self.steps // 25), "--evaluation-blocks", "16"),
            *(["--rope-parameters", json.dumps(rope)] if rope else []),
            *(["--cpu"] if cpu else []),
            *(["--bf16"] if bf16 else []),
        ]
        options = finetune.parser().parse_args(arguments)
        # Where the text lies is not part of what a run is.
        options.data_dir = data_dir
        try:
            if (folder / "results.json").is_file():
                done = json.loads((folder / "results.json").read_text(encoding="utf-8"))
                before = {**done["recipe"], "base_weights_sha256": done["base_weights_sha256"]}
                weights = weights_fingerprint(curve.checkpoint) if os.path.exists(curve.checkpoint) else None
                now = {**finetune.settings_of(options), "base_weights_sha256": weights}
                if weights is not None:
                    # A folder may be called by another path.
                    now["checkpoint"] = before["checkpoint"]
                if changed := differences(before, now):
                    raise ValueError(
                        f"{str(folder)!r} holds another fine-tuning. Different (before → now): {'; '.join(changed)}. "
                        "Take another --output, or remove it."
                    )
            else:
                options.resume = (folder / "finetune.json").is_file()
                finetune.finetune(options, arguments)
        except TrainingError as error:
            raise ValueError(str(error)) from error
        except Interrupted as stop:
            raise KeyboardInterrupt(str(stop)) from stop
        variant = f"fine-tuned at {self.length}" + (" with YaRN" if rope else "")
        return Curve(checkpoint=str(folder), name=curve.name, variant=variant, trained_length=self.length)
