"""`whatwhere task`: its help is in `cli/task.py`."""

import collections
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from whatwhere_cli.task import parser

from ..processes import ALONE, Processes
from ..toy_tasks.alice import LARGEST_ANSWER, AliceConfig
from ..toy_tasks.registry import PROBES, TASKS, task_config
from ..toy_tasks.samples import TaskSamples
from ..writing import check_writable, write_json
from .answers import score_samples
from .checkpoints import (
    MAX_LENGTH,
    Loading,
    check_finished,
    loading_of,
    longest_length,
    names_of,
)
from .results import markdown_table, provenance, read_json
from .scorer import scorer
from .zero_shot import quiet

# Names of the metrics in tables.
_TITLES = {
    "token_error": "error per answer token",
    "sequence_error": "error per sequence",
    "accuracy": "right answers",
    "probability": "probability of the right answer",
    "most_common": "always the most common answer",
}


def read_recipe(checkpoint: str) -> dict[str, Any] | None:
    """Returns the recipe in a folder's `results.json`, with all defaults, or None if there is none."""
    folder = pathlib.Path(checkpoint)
    if (folder / "results.json").is_file():
        recipe = read_json(folder / "results.json").get("recipe")
        # The settings of a fine-tuning run have other keys.
        return recipe if recipe and "data" in recipe and "training" in recipe else None
    check_finished(checkpoint)
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
        task, sets: replace the recipe's. `sets` has for each name the parameters that differ from training.
        samples: of each set; by default as in the set, else the recipe, else the task.
    """
    data = recipe["data"] if recipe is not None and recipe["data"]["source"] == "task" else None
    block, sizes = None, {}
    parameters: dict[str, Any] = {}
    if data is not None and task in (None, data["task"]):
        task, block, parameters = str(data["task"]), data["sequence_length"], data.get("task_parameters") or {}
        sets = data.get("test_sets") if sets is None else sets
        sizes = {} if data.get("test_samples") is None else {"test_samples": data["test_samples"]}
    if task is None:
        reason = "has no recipe that names its task"
        if recipe is not None:
            reason = f"was trained on text (data.source: {recipe['data']['source']})"
        raise ValueError(
            f"checkpoint={checkpoint!r} {reason}: give --task. Allowed: {', '.join(map(repr, [*TASKS, *PROBES]))}."
        )
    if sets is None:
        sets = task_config(task, parameters).test_sets()
    fixed = {} if samples is None else {"test_samples": samples}
    configs = {}
    for name, values in sets.items():
        try:
            configs[name] = task_config(task, {**parameters, **sizes, "seed": seed, **values, **fixed})
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
    """Returns for each checkpoint `name`, `task`, and the results of `score_samples` or `ask` on its `test_sets`.

    Seed 0 gives the samples of the final evaluation in training. The processes divide the samples, and all return the
    same.
    """
    loading = loading or Loading()
    processes = loading.processes
    names = dict(zip(checkpoints, names_of(checkpoints)))
    # Raises errors before the first model runs.
    plans = {
        one: test_sets(one, read_recipe(one), task=task, sets=sets, samples=samples, seed=seed) for one in checkpoints
    }
    entries = []
    for checkpoint, (named, configs, block) in plans.items():
        config = loading.config(checkpoint)
        tokenizer = loading.tokenizer(checkpoint, config)
        model = loading.model(checkpoint, config)
        scores = {}
        for name, test in configs.items():
            if named in PROBES:
                scores[name] = ask(model, tokenizer, test, processes, name=names[checkpoint])
                continue
            length = (block or config.max_position_embeddings) if test.may_be_cut else None
            limit = longest_length(model)
            if limit is not None and (length or test.longest) > limit:
                raise ValueError(
                    f"test set {name!r} is not valid for checkpoint={checkpoint!r}: samples have up to "
                    f"{length or test.longest} tokens, and the position encoding supports at most {limit}."
                )
            rows = TaskSamples(test, tokenizer, "test", count=test.test_samples, block=length)
            shown = f"{names[checkpoint]}, {name}"
            scores[name] = score_samples(model, rows, name=shown, batch_size=batch_size, processes=processes)
        entries.append({"name": names[checkpoint], "task": named, "test_sets": scores})
    return entries


def ask(
    model: Any, tokenizer: Any, config: AliceConfig, processes: Processes = ALONE, *, name: str | None = None
) -> dict[str, Any]:
    """Asks a model the questions of the Alice probe; the results are described above. `name` is that of the progress.

    `accuracy_by_place` is of words only in the last sentence, only before it, in both, or in neither.
    """
    from lm_eval.api.instance import Instance

    rows = [config.row(config.sample("test", index)) for index in range(config.test_samples)]
    prompts = [row["prompt"] + "\n\nAnswer:" for row in rows]
    if any(tokenizer.unk_token_id in tokenizer(prompt)["input_ids"] for prompt in prompts if tokenizer.unk_token):
        raise ValueError(f"the tokenizer {tokenizer.name_or_path!r} does not know every word of {prompts[0][:60]!r}.")
    answers = range(LARGEST_ANSWER + 1)
    limit = longest_length(model) or MAX_LENGTH
    asker = scorer(processes, model, tokenizer=tokenizer, max_length=limit, batch_size=len(answers))
    asked = [Instance("loglikelihood", {}, (prompt, f" {answer}"), 0) for prompt in prompts for answer in answers]
    with quiet(name):
        found = torch.tensor([likelihood for likelihood, _ in asker.loglikelihood(asked)])
    places = collections.defaultdict(list)
    probability = 0.0
    for row, chances in zip(rows, found.view(-1, len(answers)).softmax(-1)):
        places[row["place"]].append(int(chances.argmax()) == int(row["answer"]))
        probability += chances[int(row["answer"])].item()
    right = [each for each_place in places.values() for each in each_place]
    common = collections.Counter(row["answer"] for row in rows).most_common(1)
    return {
        "accuracy": sum(right) / len(right),
        "probability": probability / len(right),
        "questions": len(right),
        "accuracy_by_place": {place: sum(found) / len(found) for place, found in sorted(places.items())},
        "most_common": common[0][1] / len(right),
    }


def table(entries: Sequence[Mapping[str, Any]]) -> str:
    """Formats the result of `evaluate` as Markdown tables, one for each task, in percent."""
    tables = []
    for task in dict.fromkeys(entry["task"] for entry in entries):
        chosen = [entry for entry in entries if entry["task"] == task]
        metrics = [metric for metric in _TITLES if metric in next(iter(chosen[0]["test_sets"].values()))]
        rows = [["checkpoint", "test set", *(_TITLES[metric] for metric in metrics)]]
        for entry in chosen:
            for name, scores in entry["test_sets"].items():
                rows.append([entry["name"], name, *(f"{100 * scores[metric]:.2f} %" for metric in metrics)])
        tables.append(f"{task}:\n\n{markdown_table(rows)}")
    return "\n\n".join(tables)


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line."""
    options = parser().parse_args(arguments)
    if options.json:
        check_writable(options.json.parent)
    loading = loading_of(options)
    entries = evaluate(
        options.checkpoints,
        loading,
        task=options.task,
        sets=dict(options.sets) if options.sets else None,
        samples=options.samples,
        seed=options.seed,
        batch_size=options.batch_size,
    )
    if not loading.processes.is_first:
        return
    print(table(entries))
    if options.json:
        origin = provenance("task", arguments)
        write_json(options.json, {"checkpoints": entries, "seed": options.seed, **origin})
        print(f"Written: {options.json}")
