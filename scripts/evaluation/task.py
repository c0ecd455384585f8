"""Errors of trained checkpoints in the answers of toy tasks, as mean, deviation and solve rate over seeds.

On a laptop (folders that `whatwhere train` made, of one recipe with three seeds):

    whatwhere task runs/flip_flop-0 runs/flip_flop-1 runs/flip_flop-2

On a GPU, on other test sets than those of the recipe (JSON: the parameters that differ from those of training):

    whatwhere task runs/flip_flop-* --sets 'sparser={"ignore": 0.995}' --samples 10000 --device cuda

A checkpoint is a folder or a Hub id. The task, its parameters and its test sets are those of the recipe in a folder's
`results.json`; --task names the task of a checkpoint that has none, with the task's own parameters. Checkpoints whose
recipes differ in the seed alone are one system.

Every answer is predicted from the correct tokens before it: `token_error` is the share of answer tokens that are wrong,
`sequence_error` that of sequences with a wrong one, and a checkpoint has solved a test set if its `sequence_error` is
at most --solved. Means and (sample) standard deviations are over checkpoints.

    whatwhere task --task alice openai-community/gpt2

asks any causal language model how often a word is in the last sentence (see `whatwhere.scripts.toy_tasks.alice`), and
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

from ...position_base import suggest
from ..extras import explain, fail_import
from .checkpoints import Loading, longest_length, names_of
from .options import add_loading, at_least_one, loading_of
from .results import check_writable, markdown_table, provenance, read_json, write_json

try:
    from ..data.samples import TaskSamples
    from ..toy_tasks.alice import LARGEST_ANSWER, AliceConfig
    from ..toy_tasks.registry import PROBES, TASKS, task_config
    from .answers import choice_likelihoods, score_samples
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


def read_recipe(checkpoint: str) -> dict[str, Any] | None:
    """Returns the recipe in a folder's `results.json`, with every default, or None if it holds none.

    Raises:
        ValueError: the folder is that of a run that is not finished, or its file is broken.
    """
    folder = pathlib.Path(checkpoint)
    if (folder / "results.json").is_file():
        recipe = read_json(folder / "results.json").get("recipe")
        # That of fine-tuning has other keys.
        return recipe if recipe and "data" in recipe and "training" in recipe else None
    if (folder / "recipe.yaml").is_file():
        raise ValueError(
            f"checkpoint={checkpoint!r} is a run that is not finished. Go on with: "
            f"whatwhere train {folder / 'recipe.yaml'} --output {folder} --resume"
        )
    return None


def test_sets(
    checkpoint: str,
    recipe: Mapping[str, Any] | None,
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
    """
    data = recipe["data"] if recipe is not None and recipe["data"]["source"] == "task" else None
    block, sizes = None, {}
    parameters: dict[str, Any] = {}
    if data is not None and task in (None, data["task"]):
        task, block, parameters = str(data["task"]), data["sequence_length"], data.get("task_parameters") or {}
        sets = data.get("test_sets") if sets is None else sets
        sizes = {} if data.get("test_samples") is None else {"test_samples": data["test_samples"]}
    if task is None:
        reason = "does not say which task it was trained on"
        if recipe is not None:
            reason = f"was trained on text (data.source: {recipe['data']['source']})"
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
    loading: Loading | None = None,
    *,
    task: str | None = None,
    sets: Mapping[str, Mapping[str, Any]] | None = None,
    samples: int | None = None,
    seed: int = 0,
    batch_size: int = 64,
) -> list[dict[str, Any]]:
    """Evaluates every checkpoint on its test sets.

    Args:
        checkpoints: folders or Hub ids.
        loading: how they are loaded.
        task, sets, samples: as in `test_sets`; the task may also be a probe.
        seed: decides the samples; with 0 they are those that training ends with.
        batch_size: samples in a batch.

    Returns:
        for each checkpoint its `checkpoint`, `name`, `recipe` (None without one), `task` and `test_sets`, which holds
        for every test set what `score_samples` or `ask` returns.

    Raises:
        ValueError: a checkpoint cannot be loaded, its task is not known, or a parameter is not valid.
    """
    loading = loading or Loading()
    if task is not None and task not in (*TASKS, *PROBES):
        raise ValueError(f"task={task!r} is not valid. {suggest(task, [*TASKS, *PROBES])}")
    for name, values in (sets or {}).items():
        if "seed" in values:
            raise ValueError(f"test set {name!r} is not valid: seed={values['seed']!r} must not be given, but --seed.")
    names = dict(zip(checkpoints, names_of(checkpoints)))
    # Everything is read before the first model runs: mistakes should not wait for minutes.
    recipes = {checkpoint: read_recipe(checkpoint) for checkpoint in checkpoints}
    plans = {
        checkpoint: test_sets(checkpoint, recipe, task=task, sets=sets, samples=samples, seed=seed)
        for checkpoint, recipe in recipes.items()
    }
    entries = []
    for checkpoint, (named, configs, block) in plans.items():
        config, tokenizer = loading.config(checkpoint), loading.tokenizer(checkpoint)
        model = loading.model(checkpoint, config).eval()
        scores = {}
        for name, test in configs.items():
            if named in PROBES:
                scores[name] = ask(model, tokenizer, test)
                continue
            length = (block or config.max_position_embeddings) if test.may_be_cut else None
            limit = longest_length(model)
            if limit is not None and (length or test.longest) > limit:
                raise ValueError(
                    f"test set {name!r} is not valid for checkpoint={checkpoint!r}: samples have up to "
                    f"{length or test.longest} tokens, and the position encoding supports at most {limit}."
                )
            rows = TaskSamples(test, tokenizer, "test", count=test.test_samples, block=length)
            scores[name] = score_samples(model, rows, batch_size=batch_size)
        recipe = recipes[checkpoint]
        entries.append(
            {
                "checkpoint": checkpoint,
                "name": recipe["name"] if recipe else names[checkpoint],
                "recipe": recipe,
                "task": named,
                "test_sets": scores,
            }
        )
    return entries


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
    names = collections.Counter((group[0]["task"], group[0]["name"]) for group in groups.values())
    for group in groups.values():
        task, name = group[0]["task"], group[0]["name"]
        # Systems of one name must not look the same.
        if names[task, name] > 1:
            name = f"{name} ({group[0]['checkpoint']})"
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
        tables.append(f"{task}:\n\n{markdown_table(rows)}")
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
        prog="whatwhere task",
        usage="%(prog)s CHECKPOINT [CHECKPOINT ...] [options]",
        description="Errors of checkpoints in the answers of toy tasks, over seeds.",
        epilog="example: whatwhere task runs/flip_flop-0 runs/flip_flop-1 --samples 500",
    )
    parser.add_argument("checkpoints", nargs="+", metavar="CHECKPOINT", help="a folder or a Hub id")
    parser.add_argument("--task", help=f"{', '.join([*TASKS, *PROBES])}; default: what the checkpoint says")
    parser.add_argument("--sets", action="append", default=[], metavar="NAME=JSON", help="a test set; may be repeated")
    parser.add_argument("--samples", type=at_least_one, metavar="N", help="of every test set; default: what it says")
    parser.add_argument("--seed", type=int, default=0, help="of the samples (default %(default)s)")
    parser.add_argument("--batch-size", type=at_least_one, default=64, metavar="N", help="default %(default)s")
    parser.add_argument("--solved", type=float, default=0.01, help="largest sequence error (default %(default)s)")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write every number to a file")
    add_loading(parser)
    options = parser.parse_args(arguments)
    try:
        if not 0 <= options.solved <= 1 or math.isnan(options.solved):
            raise ValueError(f"solved={options.solved!r} is not valid: it must be between 0 and 1.")
        if options.json:
            check_writable(options.json.parent)
        entries = evaluate(
            options.checkpoints,
            loading_of(options),
            task=options.task,
            sets=parse_sets(options.sets),
            samples=options.samples,
            seed=options.seed,
            batch_size=options.batch_size,
        )
        systems = summarise(entries, solved=options.solved)
        if options.json:
            origin = provenance("task", arguments)
            content = {"systems": systems, "checkpoints": entries, "solved": options.solved, "seed": options.seed}
            write_json(options.json, {**content, **origin})
    except (ValueError, OSError, ImportError) as error:
        parser.exit(2, f"error: {explain(error)}\n")
    print(table(systems))


if __name__ == "__main__":
    main()
