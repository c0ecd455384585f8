"""RULER (Hsieh et al. 2024, 2404.06654): retrieval, tracing and counting in generated text of several lengths.

    whatwhere length demo/rope demo/pope --tasks ruler --windows 1x,2x,4x,8x,16x --samples 100

The six of RULER's 13 tasks whose texts are generated without downloads, with lm-eval's generators, prompts and scores.
Answers are generated greedily. The score of an answer is the share of the expected strings that it contains. A length
includes the tokens of the answer. `ruler.json` in `--output` is rewritten after every length.
"""

import argparse
import contextlib
import io
import math
import random
from typing import Any

import numpy as np
from transformers import GenerationConfig

from ..writing import check_writable, write_json
from .checkpoints import MAX_LENGTH, loading_of, longest_length, names_of, trained_length_of, weights_of
from .results import lm_eval_tasks, markdown_table
from .windows import parse_windows
from .zero_shot import load_scorer, quiet, task_manager

# Tokens of an answer, by task.
TASKS = {"niah_single_1": 128, "niah_multikey_2": 128, "niah_multikey_3": 128, "vt": 30, "cwe": 120, "fwe": 50}
# Tokens by which samples of the same number of sentences may differ.
MARGIN = 50
DEFAULT_WINDOWS, DEFAULT_SAMPLES = "1x,2x,4x,8x,16x", 100


def _generators() -> Any:
    """Returns lm-eval's modules `prepare_niah`, `niah_utils`, `vt_utils`, `cwe_utils` and `fwe_utils`."""
    import nltk  # type: ignore[import-untyped]

    # lm-eval downloads a model that splits sentences when it is imported; these tasks do not use it.
    download, nltk.download = nltk.download, lambda *args, **kwargs: False
    try:
        from lm_eval.tasks.ruler import cwe_utils, fwe_utils, niah_utils, prepare_niah, vt_utils
    finally:
        nltk.download = download
    return prepare_niah, niah_utils, vt_utils, cwe_utils, fwe_utils


def generate(task: str, tokenizer: Any, length: int, samples: int, seed: int = 0) -> list[dict[str, Any]] | None:
    """Returns the samples of a task: `input`, `gen_prefix`, `outputs`, and others; None if the length is too short.

    `length` is the maximum number of tokens of prompt and answer.
    """
    # The generators print.
    with contextlib.redirect_stdout(io.StringIO()):
        prepare_niah, niah_utils, vt_utils, cwe_utils, fwe_utils = _generators()
        random.seed(seed)
        np.random.seed(seed)
        cwe_utils.RNG.seed(seed)

        def size(*texts: str | list[str]) -> int:
            words = (text if isinstance(text, str) else " ".join(text) for text in texts)
            return len(tokenizer(" ".join(words)).input_ids) + TASKS[task]

        if task.startswith("niah"):
            uuids = task == "niah_multikey_3"
            haystack = "repeat" if task == "niah_single_1" else "needle"
            try:
                found = prepare_niah.generate_samples(
                    prepare_niah.get_haystack(haystack),
                    max_seq_length=length,
                    template=niah_utils.TEMPLATE,
                    type_haystack=haystack,
                    type_needle_k="uuids" if uuids else "words",
                    type_needle_v="uuids" if uuids else "numbers",
                    num_samples=samples,
                    TOKENIZER=tokenizer,
                )
            except ValueError:
                return None
        # The others do not end if the length is too short for their smallest text.
        elif task == "vt":
            # The size of the solved example before the text; bytes need more than lm-eval's 500 tokens.
            given = max(500, size(*vt_utils.generate_input_output(5, 1, 4, is_icl=True)) + MARGIN)
            example = vt_utils.sys_vartrack_w_noise_random(tokenizer, 1, given, incremental=5)[0]
            if given + size(*vt_utils.generate_input_output(10, 1, 4)) + MARGIN > length:
                return None
            found = vt_utils.sys_vartrack_w_noise_random(tokenizer, samples, length, icl_example=example)
        elif task == "cwe":
            if size(*cwe_utils.generate_input_output(10, length)) > length:
                return None
            found = cwe_utils.sys_word_pair_random(samples, length, tokenizer)
        else:
            # This generator leaves no room for the answer.
            length -= TASKS[task]
            if 2 * size(fwe_utils.TEMPLATE) > length:
                return None
            found = fwe_utils.sys_kwext(tokenizer, length, samples)
    # Where a length is just too short, expected words are missing in the text.
    fits = all(sample["outputs"] and all(word in sample["input"] for word in sample["outputs"]) for sample in found)
    return found if fits else None


def _task(name: str, documents: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the configuration of a task of lm-eval with our samples."""
    import datasets

    return {
        "task": name,
        "custom_dataset": lambda **_: {"test": datasets.Dataset.from_list(documents)},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{input}}",
        "doc_to_target": "{{outputs}}",
        "gen_prefix": "{{gen_prefix}}",
        "target_delimiter": "\n\n" if name == "cwe" else " ",
        "generation_kwargs": {"do_sample": False, "max_gen_toks": TASKS[name], "until": []},
        "process_results": lambda doc, answers: {"recall": _recall(doc["outputs"], answers[0])},
        "metric_list": [{"metric": "recall", "aggregation": "mean", "higher_is_better": True}],
    }


def _recall(expected: list[str], answer: str) -> float:
    from lm_eval.tasks.ruler.common_utils import postprocess_pred, string_match_all

    return string_match_all(postprocess_pred([answer]), [expected])


def run(options: argparse.Namespace, origin: dict[str, Any]) -> None:
    """Measures the checkpoints with the options of `whatwhere length`, and writes and prints the results."""
    import lm_eval

    check_writable(options.output)
    loading = loading_of(options)
    samples = options.samples or DEFAULT_SAMPLES
    lengths, configs = {}, {checkpoint: loading.config(checkpoint) for checkpoint in options.checkpoints}
    for checkpoint in options.checkpoints:
        trained = options.trained_length or trained_length_of(checkpoint, configs[checkpoint])
        lengths[checkpoint] = parse_windows(options.windows or DEFAULT_WINDOWS, trained)
    entries: list[dict[str, Any]] = []
    found = {"samples": samples, "checkpoints": entries, **origin}
    manager = task_manager()
    for checkpoint, name in zip(options.checkpoints, names_of(options.checkpoints)):
        tokenizer = loading.tokenizer(checkpoint, configs[checkpoint])
        entry: dict[str, Any] = {"name": name, "checkpoint": checkpoint, "weights": weights_of(checkpoint), "cells": []}
        entries.append(entry)
        model = load_scorer(checkpoint, loading, batch_size=1)
        limit = longest_length(model.model)
        if limit is None:
            # Otherwise lm-eval truncates prompts to the length in the configuration.
            model._max_length = MAX_LENGTH
        # Without the checkpoint's own settings, such as a repetition penalty.
        ends = {name: getattr(model.model.generation_config, name) for name in ("eos_token_id", "pad_token_id")}
        model.model.generation_config = GenerationConfig(**ends)
        for length in lengths[checkpoint]:
            tasks = {task: generate(task, tokenizer, length, samples) for task in TASKS}
            given = [_task(task, documents) for task, documents in tasks.items() if documents is not None]
            if limit is not None and length > limit:
                reason, scores = f"the position encoding supports at most {limit} tokens", {}
            elif given:
                model.batch_size_per_gpu = max(1, options.batch_tokens // length)
                with quiet(f"{checkpoint}, {length:,} tokens"):
                    report = lm_eval.simple_evaluate(model, tasks=given, task_manager=manager, log_samples=False)
                # The other processes get no report.
                reason, scores = None, lm_eval_tasks(report) if report else {}
            else:
                reason, scores = "no task fits into this length", {}
            metrics = {task: score["metrics"]["recall"] for task, score in scores.items()}
            entry["cells"].append({"length": length, "reason": reason, "tasks": metrics})
            if loading.processes.is_first:
                write_json(options.output / "ruler.json", found)
    if loading.processes.is_first:
        print(table(found))
        print(f"Recall, % ± standard error, of {samples} samples.\nWritten: {options.output / 'ruler.json'}")


def table(found: dict[str, Any]) -> str:
    """Returns the results as Markdown; "-" where a task does not fit into the length."""
    rows = [["checkpoint", "tokens", *TASKS]]
    for entry in found["checkpoints"]:
        for cell in entry["cells"]:
            scores = [cell["tasks"].get(task) for task in TASKS]
            rows.append([entry["name"], f"{cell['length']:,}", *(_percent(one, cell["reason"]) for one in scores)])
    return markdown_table(rows, aligned=True)


def _percent(score: dict[str, Any] | None, reason: str | None) -> str:
    if score is None:
        return "not supported" if reason and "supports" in reason else "-"
    error = score["standard_error"]
    return f"{100 * score['value']:.1f}" + (f" ± {100 * error:.1f}" if error and math.isfinite(error) else "")
