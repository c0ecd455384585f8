"""Errors of trained checkpoints in the answers of toy tasks, as mean, deviation and solve rate over seeds.

On a laptop (folders that `python -m whatwhere.scripts.train` made, of one recipe with three seeds):

    python -m whatwhere.scripts.evaluate_task runs/flip_flop-0 runs/flip_flop-1 runs/flip_flop-2

On a GPU, on other test sets than those of the recipe (JSON: the parameters that differ from those of training):

    python -m whatwhere.scripts.evaluate_task runs/flip_flop-* --sets 'sparser={"ignore": 0.995}' --samples 10000 \\
        --device cuda --json flip_flop.json

A checkpoint is a folder or a Hub id. The task, its parameters and its test sets are those of the recipe that a folder
holds; --task names the task of a checkpoint that has none, with the task's own parameters. Checkpoints whose recipes
differ in the seed alone are one system.

Every answer is predicted from the right tokens before it: `token_error` is the share of answer tokens that are wrong,
`sequence_error` that of sequences with a wrong one, and a checkpoint has solved a test set if its `sequence_error` is
at most --solved. Means and (sample) standard deviations are over checkpoints.

    python -m whatwhere.scripts.evaluate_task --task alice openai-community/gpt2

asks any causal language model how often a word is in the last sentence (see `whatwhere.scripts.tasks.alice`), and
reports how often the right one of the answers 0 to 5 is the most likely one (`accuracy`), its mean probability among
the six (`probability`), and how often the most common answer is right (`most_common`), which needs no model.
"""

import argparse
import collections
import json
import math
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from safetensors import SafetensorError

from ..position_base import suggest
from ..position_registry import max_length
from .extras import fail_import

try:
    from .data.samples import TaskSamples
    from .evaluation.answers import choice_likelihoods, score_samples
    from .evaluation.results import check_writable, provenance, write_json
    from .tasks.alice import LARGEST_ANSWER, AliceConfig
    from .tasks.registry import PROBES, TASKS, task_config
    from .training.recipe import Recipe, differences, load_recipe, parse_recipe
except ImportError as error:
    fail_import(__name__, error)

# Names of the metrics in tables.
_TITLES = {
    "token_error": "error per answer token",
    "sequence_error": "error per sequence",
    "accuracy": "right answers",
    "probability": "probability of the right answer",
    "most_common": "always the most common answer",
}


def read_recipe(checkpoint: str) -> Recipe | None:
    """Returns the recipe that a folder holds, in `results.json` or `recipe.yaml`, or None if it holds none.

    Raises:
        ValueError: the folder is that of a run that is not finished, or its files are broken.
    """
    folder = pathlib.Path(checkpoint)
    results = folder / "results.json"
    if results.is_file():
        try:
            recipe = json.loads(results.read_text(encoding="utf-8")).get("recipe")
        except ValueError as error:
            raise ValueError(f"{str(results)!r} is not valid JSON: {error}") from error
        # That of fine-tuning has other keys.
        return parse_recipe(recipe) if recipe and "data" in recipe and "training" in recipe else None
    if not (folder / "recipe.yaml").is_file():
        return None
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"checkpoint={checkpoint!r} is a run that is not finished. Go on with: "
            f"python -m whatwhere.scripts.train {folder / 'recipe.yaml'} --output {folder} --resume"
        )
    return load_recipe(folder / "recipe.yaml")


def test_sets(
    checkpoint: str,
    recipe: Recipe | None,
    *,
    task: str | None,
    sets: Mapping[str, Mapping[str, Any]] | None,
    samples: int | None,
    seed: int,
) -> tuple[str, dict[str, Any], int | None]:
    """Returns the task of a checkpoint, the configuration of each of its test sets, and the length of a training block.

    Args:
        checkpoint: for messages.
        recipe: that of the checkpoint, if it has one.
        task: replaces that of the recipe.
        sets: replace those of the recipe: for each name, the parameters that differ from those of training.
        samples: of each set; None for what the set says, or the recipe for all sets, or the task.
        seed: decides the samples.

    Raises:
        ValueError: neither the recipe nor `task` names a task, or a parameter is not valid.
    """
    data = recipe.data if recipe is not None and recipe.data.source == "task" else None
    block, parameters, sizes = None, {}, {}
    if data is not None and task in (None, data.task):
        task, block, parameters = str(data.task), data.sequence_length, data.task_parameters or {}
        sets = data.test_sets if sets is None else sets
        sizes = {} if data.test_samples is None else {"test_samples": data.test_samples}
    if task is None:
        reason = "does not say which task it was trained on"
        if recipe is not None:
            reason = f"was trained on text (data.source: {recipe.data.source})"
        elif not pathlib.Path(checkpoint).exists():
            reason = "is no folder here, and a checkpoint on the Hub does not say which task it was trained on"
        raise ValueError(
            f"checkpoint={checkpoint!r} {reason}: give --task. Allowed: {', '.join(map(repr, [*TASKS, *PROBES]))}."
        )
    if sets is None:
        sets = task_config(task, parameters).test_sets()
    changed = {"seed": seed} if samples is None else {"seed": seed, "test_samples": samples}
    configs = {}
    for name, values in sets.items():
        try:
            configs[name] = task_config(task, {**parameters, **sizes, **values, **changed})
        except ValueError as error:
            raise ValueError(f"test set {name!r} of task {task!r} is not valid: {error}") from error
    return task, configs, block


def evaluate(
    checkpoints: Sequence[str],
    *,
    task: str | None = None,
    sets: Mapping[str, Mapping[str, Any]] | None = None,
    samples: int | None = None,
    seed: int = 0,
    batch_size: int = 64,
    device: str | None = None,
    dtype: str = "float32",
    trust_remote_code: bool = False,
) -> list[dict[str, Any]]:
    """Evaluates every checkpoint on its test sets.

    Args:
        checkpoints: folders or Hub ids.
        task: the task of checkpoints that have no recipe, or a probe.
        sets: the test sets; None for those of the checkpoint's recipe, or the task's own.
        samples: of each set; None for what the set says, or the recipe for all sets, or the task.
        seed: decides the samples; with 0 they are those that training ends with.
        batch_size: samples in a batch.
        device: None for the GPU if there is one.
        dtype: of the model's weights and activations.
        trust_remote_code: run the code in the checkpoint's folder.

    Returns:
        for each checkpoint its `checkpoint`, `name`, `recipe` (None without one), `task` and `test_sets`, which holds
        for every test set what `score_samples` or `ask` returns.

    Raises:
        ValueError: a checkpoint cannot be loaded, its task is not known, or a parameter is not valid.
    """
    for name, value in (("samples", samples), ("batch-size", batch_size)):
        if value is not None and value < 1:
            raise ValueError(f"{name}={value!r} is not valid: it must be at least 1.")
    if task is not None and task not in (*TASKS, *PROBES):
        raise ValueError(f"task={task!r} is not valid. {suggest(task, [*TASKS, *PROBES])}")
    if twice := [checkpoint for checkpoint, count in collections.Counter(checkpoints).items() if count > 1]:
        raise ValueError(f"checkpoint={twice[0]!r} is given more than once.")
    for name, values in (sets or {}).items():
        if "seed" in values:
            raise ValueError(f"test set {name!r} is not valid: seed={values['seed']!r} must not be given, but --seed.")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=device)
    # PyTorch without CUDA raises AssertionError.
    except (AssertionError, RuntimeError) as error:
        raise ValueError(f"device={device!r} is not valid: {error}") from error
    # Everything is read before the first model runs: mistakes should not wait for minutes.
    recipes = {checkpoint: read_recipe(checkpoint) for checkpoint in checkpoints}
    plans = {
        checkpoint: test_sets(checkpoint, recipe, task=task, sets=sets, samples=samples, seed=seed)
        for checkpoint, recipe in recipes.items()
    }
    entries = []
    for checkpoint, (named, configs, block) in plans.items():
        model, tokenizer = _load(checkpoint, dtype=dtype, trust_remote_code=trust_remote_code)
        model = model.to(device).eval()
        scores = {}
        for name, config in configs.items():
            if named in PROBES:
                scores[name] = ask(model, tokenizer, config)
                continue
            length = (block or model.config.max_position_embeddings) if config.may_be_cut else None
            limit = max_length(model.config) if hasattr(model.config, "position_encoding") else None
            if limit is not None and (length or config.longest) > limit:
                raise ValueError(
                    f"test set {name!r} is not valid for checkpoint={checkpoint!r}: samples have up to "
                    f"{length or config.longest} tokens, and position_encoding={model.config.position_encoding!r} "
                    f"reaches {limit}."
                )
            rows = TaskSamples(config, tokenizer, "test", count=config.test_samples, block=length)
            scores[name] = score_samples(model, rows, batch_size=batch_size)
        recipe = recipes[checkpoint]
        entries.append(
            {
                "checkpoint": checkpoint,
                "name": recipe.name if recipe else pathlib.PurePath(checkpoint).name,
                "recipe": recipe.resolved() if recipe else None,
                "task": named,
                "test_sets": scores,
            }
        )
    return entries


def _load(checkpoint: str, *, dtype: str, trust_remote_code: bool) -> tuple[Any, Any]:
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=getattr(torch, dtype), trust_remote_code=trust_remote_code
        )
        return model, transformers.AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"checkpoint={checkpoint!r} cannot be loaded: {error}") from error


def ask(model: Any, tokenizer: Any, config: AliceConfig) -> dict[str, Any]:
    """Asks a model the questions of the Alice probe.

    Returns:
        `accuracy`, `probability`, `questions`, how many there were, `accuracy_by_place`, the accuracy for words that
        are only in the last sentence, only before it, in both or in neither, and `most_common`, the accuracy of always
        giving the most common answer.
    """
    choices = [f" {number}" for number in range(LARGEST_ANSWER + 1)]
    places = collections.defaultdict(list)
    answers: collections.Counter[str] = collections.Counter()
    probability = 0.0
    for index in range(config.test_samples):
        row = config.row(config.sample("test", index))
        chances = choice_likelihoods(model, tokenizer, row["prompt"] + "\n\nAnswer:", choices).softmax(-1)
        places[row["place"]].append(int(chances.argmax()) == int(row["answer"]))
        probability += chances[int(row["answer"])].item()
        answers[row["answer"]] += 1
    right = [each for each_place in places.values() for each in each_place]
    return {
        "accuracy": sum(right) / len(right),
        "probability": probability / len(right),
        "questions": len(right),
        "accuracy_by_place": {place: sum(found) / len(found) for place, found in sorted(places.items())},
        "most_common": answers.most_common(1)[0][1] / len(right),
    }


def summarise(entries: Sequence[Mapping[str, Any]], *, solved: float = 0.01) -> list[dict[str, Any]]:
    """Groups checkpoints that differ in the seed alone.

    Args:
        entries: from `evaluate`.
        solved: the largest `sequence_error` of a checkpoint that has solved a test set.

    Returns:
        for each system its `name`, `task`, `checkpoints` and `test_sets`: for each of these the `mean` and the
        `standard_deviation` (None for one checkpoint) of each metric, and of a toy task the `solve_rate`.
    """
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for entry in entries:
        recipe = entry["recipe"]
        same = {**recipe, "seed": None} if recipe else entry["checkpoint"]
        groups.setdefault(json.dumps([entry["task"], same], sort_keys=True), []).append(entry)
    systems = []
    first: dict[tuple[str, str], Mapping[str, Any] | None] = {}
    for group in groups.values():
        task, name, recipe = group[0]["task"], group[0]["name"], group[0]["recipe"]
        # Systems of one name must not look the same.
        if (task, name) in first:
            other = first[task, name]
            changed = differences({**other, "seed": None}, {**recipe, "seed": None}) if other and recipe else []
            name = f"{name} ({'; '.join(changed) or group[0]['checkpoint']})"
        else:
            first[task, name] = recipe
        sets: dict[str, dict[str, Any]] = {}
        for test_set, scores in group[0]["test_sets"].items():
            sets[test_set] = {}
            for metric in (metric for metric in _TITLES if metric in scores):
                values = [entry["test_sets"][test_set][metric] for entry in group]
                deviation = statistics.stdev(values) if len(values) > 1 else None
                sets[test_set][metric] = {"mean": statistics.fmean(values), "standard_deviation": deviation}
            if "sequence_error" in scores:
                errors = [entry["test_sets"][test_set]["sequence_error"] for entry in group]
                sets[test_set]["solve_rate"] = sum(error <= solved for error in errors) / len(errors)
        checkpoints = [entry["checkpoint"] for entry in group]
        systems.append({"name": name, "task": task, "checkpoints": checkpoints, "test_sets": sets})
    return systems


def table(systems: Sequence[Mapping[str, Any]]) -> str:
    """Returns Markdown tables of what `summarise` returns, one for each task, errors in percent."""
    tables = []
    for task in dict.fromkeys(system["task"] for system in systems):
        chosen = [system for system in systems if system["task"] == task]
        some = next(iter(chosen[0]["test_sets"].values()))
        metrics = [metric for metric in _TITLES if metric in some]
        solve = ["solved"] if "solve_rate" in some else []
        rows = [["system", "checkpoints", "test set", *(_TITLES[metric] for metric in metrics), *solve]]
        for system in chosen:
            for name, scores in system["test_sets"].items():
                cells = [_percent(scores[metric]) for metric in metrics]
                rate = [f"{100 * scores['solve_rate']:.0f} %"] if solve else []
                rows.append([system["name"], str(len(system["checkpoints"])), name, *cells, *rate])
        lines = ["| " + " | ".join(row) + " |" for row in rows]
        tables.append("\n".join([f"{task}:", "", lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]))
    return "\n\n".join(tables)


def _percent(score: Mapping[str, float | None]) -> str:
    deviation = score["standard_deviation"]
    return f"{100 * (score['mean'] or 0):.2f}" + ("" if deviation is None else f" ± {100 * deviation:.2f}") + " %"


def parse_sets(texts: Sequence[str]) -> dict[str, dict[str, Any]] | None:
    """Returns the test sets that `--sets NAME=JSON` gives, or None without any; raises ValueError."""
    sets = {}
    for text in texts:
        name, _, values = text.partition("=")
        try:
            parsed = json.loads(values)
        except ValueError:
            parsed = None
        if not name or not isinstance(parsed, dict):
            raise ValueError(
                f"sets={text!r} is not valid: it must be NAME=JSON, such as 'sparse={{\"ignore\": 0.98}}'."
            )
        if name in sets:
            raise ValueError(f"sets={text!r} is not valid: the name {name!r} is given twice.")
        sets[name] = parsed
    return sets or None


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m whatwhere.scripts.evaluate_task",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoints", nargs="+", metavar="CHECKPOINT", help="a folder or a Hub id")
    parser.add_argument("--task", help=f"{', '.join([*TASKS, *PROBES])}; default: what the checkpoint says")
    parser.add_argument("--sets", action="append", default=[], metavar="NAME=JSON", help="a test set; may be repeated")
    parser.add_argument("--samples", type=int, help="of every test set; default: what the set or the recipe says")
    parser.add_argument("--seed", type=int, default=0, help="of the samples (default %(default)s)")
    parser.add_argument("--batch-size", type=int, default=64, help="samples in a batch (default %(default)s)")
    parser.add_argument("--solved", type=float, default=0.01, help="largest sequence error (default %(default)s)")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write every number to a file")
    parser.add_argument("--device", help="default: the GPU if there is one")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--trust-remote-code", action="store_true", help="run the code in the checkpoint's folder")
    options = parser.parse_args(arguments)
    try:
        if not 0 <= options.solved <= 1 or math.isnan(options.solved):
            raise ValueError(f"solved={options.solved!r} is not valid: it must be between 0 and 1.")
        if options.json:
            check_writable(options.json.parent)
        entries = evaluate(
            options.checkpoints,
            task=options.task,
            sets=parse_sets(options.sets),
            samples=options.samples,
            seed=options.seed,
            batch_size=options.batch_size,
            device=options.device,
            dtype=options.dtype,
            trust_remote_code=options.trust_remote_code,
        )
        systems = summarise(entries, solved=options.solved)
        if options.json:
            origin = provenance("whatwhere.scripts.evaluate_task", arguments)
            content = {"systems": systems, "checkpoints": entries, "solved": options.solved, "seed": options.seed}
            write_json(options.json, {**content, **origin})
    except (ValueError, OSError) as error:
        parser.exit(2, f"error: {error}\n")
    print(table(systems))


if __name__ == "__main__":
    main()
