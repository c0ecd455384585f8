"""Recipes: everything that decides a training run, in one YAML file, checked when it is read.

A recipe has the keys below and no others: a misspelt key, a wrong type, a value out of range or a length that the
position encoding cannot reach is an error that names the field, shows the value and says what is allowed.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml

from whatwhere.position_base import describe_type, matches_type, suggest

DDP_TIMEOUT = 600
RECIPES = Path(__file__).resolve().parent.parent / "recipes"


class RecipeError(ValueError):
    """A recipe that cannot be run, with all reasons that are known."""

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        lines = [f"the recipe has {len(problems)} errors:", *problems]
        super().__init__(problems[0] if len(problems) == 1 else "\n- ".join(lines))


def _field(default: Any = dataclasses.MISSING, **limits: float) -> Any:
    """A dataclass field whose value must be at least `minimum`, above `above`, at most `maximum` or below `below`."""
    return dataclasses.field(default=default, metadata=limits)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataRecipe:
    """What is read, and how it becomes tokens. `load_text`, `build_tokenizer` and `iterate_blocks` say it in full.

    With `source` "task" samples of a toy task are drawn, which is said by `task` and the keys that follow it;
    `TaskConfig`, `TaskSamples` and `TaskBatches` say it in full.
    """

    sequence_length: int = _field(minimum=2)
    source: Literal["stdlib", "hub", "local", "corpus", "task"] = "stdlib"
    dataset: str | None = None
    dataset_config: str | None = None
    splits: dict | None = None
    # For `source: local`: files, folders or patterns, relative to the current folder; `splits` are the other way.
    train_file: str | list | None = None
    validation_file: str | list | None = None
    text_field: str = "text"
    streaming: bool = False
    shuffle_buffer: int = _field(1000, minimum=1)
    tokenizer: str = "bytes"
    vocab_size: int | None = _field(None, minimum=258)
    pack: Literal["concat", "documents", "separate"] = "concat"
    # For `source: task` only. Parameters and test sets that are left out are filled in when a recipe is parsed.
    task: str | None = None
    task_parameters: dict | None = None
    test_sets: dict | None = None
    test_samples: int | None = _field(None, minimum=1)
    train_samples: int | None = _field(None, minimum=1)
    loss: Literal["answer", "all"] | None = None

    def problems(self) -> Iterator[str]:
        """Yields what is wrong with the fields together."""
        # What the other kind of source is about.
        for field in dataclasses.fields(self)[2:]:
            value = getattr(self, field.name)
            if (field.name in _TASK_KEYS) != (self.source == "task") and value != field.default:
                yield (f"data.{field.name}={value!r} has no effect with data.source={self.source!r}.")
        if self.source == "hub" and not self.dataset:
            yield (f"data.dataset={self.dataset!r} is not valid: data.source='hub' needs the id of a dataset.")
        if self.source == "local" and not self.splits and not self.train_file:
            from ..data.corpus import OWN_TEXT

            yield (
                f"data.splits={self.splits!r} is not valid: data.source='local' needs data.train_file (or data.splits, "
                f"which maps each split to patterns inside --data-dir). {OWN_TEXT}"
            )
        if self.train_file and self.splits:
            yield f"data.splits={self.splits!r} has no effect with data.train_file={self.train_file!r}."
        if self.validation_file and not self.train_file:
            yield f"data.validation_file={self.validation_file!r} is not valid without data.train_file."
        if self.train_file and self.streaming and not self.validation_file:
            yield "data.streaming=True needs data.validation_file: no part of a stream can be held out."
        if self.source == "corpus":
            yield from self._corpus_problems()
        for key in {
            "stdlib": ("dataset", "dataset_config", "splits", "streaming", "train_file", "validation_file"),
            "hub": ("train_file", "validation_file"),
            "local": ("dataset", "dataset_config"),
            "corpus": ("dataset", "dataset_config", "train_file", "validation_file"),
        }.get(self.source, ()):
            if getattr(self, key):
                yield (f"data.{key}={getattr(self, key)!r} has no effect with data.source={self.source!r}.")
        if (self.vocab_size is None) == (self.tokenizer == "bpe"):
            yield (
                f"data.vocab_size={self.vocab_size!r} is not valid with data.tokenizer={self.tokenizer!r}: 'bpe' "
                "needs it, the others have their own."
            )
        if self.tokenizer in ("jsb", "6mer") and self.pack != "separate":
            yield (
                f"data.pack={self.pack!r} is not valid with data.tokenizer={self.tokenizer!r}, which has no token that "
                "ends a document. Allowed: 'separate'."
            )
        if self.tokenizer == "bpe" and self.streaming:
            yield ("data.tokenizer='bpe' is trained on the whole training split: it needs data.streaming=false.")

    def _corpus_problems(self) -> Iterator[str]:
        from ..data.corpora import parse_choice

        if not self.splits:
            yield (
                f"data.splits={self.splits!r} is not valid: data.source='corpus' needs the split of a corpus a split, "
                "such as 'pg19:train'."
            )
        for name, choice in (self.splits or {}).items():
            try:
                parse_choice(choice)
            except ValueError as error:
                yield f"data.splits[{name!r}]={choice!r} is not valid: {error}"

    def task_config(self, *, seed: int = 0, test_set: str | None = None) -> Any:
        """Returns the configuration (`TaskConfig`) of the task with the parameters of training.

        Args:
            seed: decides the samples.
            test_set: the name of a test set, whose parameters are then taken.

        Raises:
            RecipeError: the task or a parameter is unknown or not valid.
        """
        # Text needs none of these modules.
        from ..tasks.registry import TASKS, task_config

        if self.task not in TASKS:
            raise RecipeError(f"data.task={self.task!r} is not valid. {suggest(str(self.task), TASKS)}")
        where, values = "task_parameters", self.task_parameters or {}
        if fixed := {"seed", "train_samples", "validation_samples", "test_samples"} & set(values):
            raise RecipeError(
                f"data.task_parameters={values!r} is not valid: {', '.join(sorted(fixed))} must not be given. The "
                "recipe's seed decides the training samples; data.train_samples, evaluation.blocks and "
                "data.test_samples say how many samples there are."
            )
        if test_set is not None:
            where, values = f"test_sets[{test_set!r}]", {**values, **(self.test_sets or {})[test_set]}
            if self.test_samples is not None:
                values["test_samples"] = self.test_samples
        try:
            return task_config(self.task, {**values, "seed": seed})
        except ValueError as error:
            raise RecipeError(f"data.{where} is not valid: {error}") from error

    def longest_input(self) -> int:
        """Returns the largest number of tokens that the model is given in training or evaluation."""
        if self.source != "task":
            return self.sequence_length
        if self.task_config().may_be_cut:
            return self.sequence_length
        return max(self.sequence_length, *(self.task_config(test_set=name).longest for name in self.test_sets or {}))

    def with_task_defaults(self) -> "DataRecipe":
        """Returns the same with every parameter of the task and its test sets filled in.

        Raises:
            RecipeError: a parameter, a test set or the length is not valid.
        """
        from ..tasks.common import shape

        training = self.task_config()
        if self.sequence_length < training.longest and not training.may_be_cut:
            raise RecipeError(
                f"data.sequence_length={self.sequence_length!r} is not valid: samples of data.task={self.task!r} have "
                f"up to {training.longest} tokens with these parameters."
            )
        test_sets = training.test_sets() if self.test_sets is None else self.test_sets
        for name, changes in test_sets.items():
            if not isinstance(name, str) or not isinstance(changes, dict) or "seed" in changes:
                raise RecipeError(
                    f"data.test_sets[{name!r}]={changes!r} is not valid: it must be a mapping of parameters, without "
                    "`seed`, for a name."
                )
        known = dataclasses.replace(self, task_parameters=shape(training), test_sets=test_sets)
        for name in test_sets:
            tested = known.task_config(test_set=name)
            if unknown := set(tested.symbols) - set(training.symbols):
                raise RecipeError(
                    f"data.test_sets[{name!r}]={test_sets[name]!r} is not valid: the model would not know the symbols "
                    f"{', '.join(map(repr, sorted(unknown)))}."
                )
        # With the size that the task gives it, so that a later default cannot change an old recipe.
        test_sets = {
            name: {**changes, "test_samples": known.task_config(test_set=name).test_samples}
            for name, changes in test_sets.items()
        }
        return dataclasses.replace(known, test_sets=test_sets, loss=self.loss or "answer")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingRecipe:
    """The optimisation."""

    steps: int = _field(minimum=1)
    batch_size: int = _field(minimum=1)
    learning_rate: float = _field(above=0)
    micro_batch_size: int | None = _field(None, minimum=1)
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_steps: int = _field(0, minimum=0)
    minimum_learning_rate: float = _field(0.0, minimum=0)
    weight_decay: float = _field(0.0, minimum=0)
    beta1: float = _field(0.9, minimum=0, below=1)
    beta2: float = _field(0.999, minimum=0, below=1)
    epsilon: float = _field(1e-8, above=0)
    clip_norm: float | None = _field(None, above=0)
    mixed_precision: Literal["no", "bf16"] = "no"
    activation_checkpointing: bool = False
    compile: bool = False
    log_every: int = _field(10, minimum=1)
    checkpoint_every: int | None = _field(None, minimum=1)
    keep_checkpoints: int = _field(2, minimum=1)
    trackers: list = dataclasses.field(default_factory=list)
    # Seconds that a process waits for the others before the run ends with an error.
    ddp_timeout: int = _field(DDP_TIMEOUT, minimum=1)

    def problems(self) -> Iterator[str]:
        """Yields what is wrong with the fields together."""
        if self.warmup_steps >= self.steps:
            yield (
                f"training.warmup_steps={self.warmup_steps!r} is not valid: it must be below "
                f"training.steps={self.steps!r}."
            )
        if self.minimum_learning_rate and self.schedule != "cosine":
            yield (
                f"training.minimum_learning_rate={self.minimum_learning_rate!r} has no effect with "
                f"training.schedule={self.schedule!r}. Allowed: 'cosine'."
            )
        if self.minimum_learning_rate > self.learning_rate:
            yield (
                f"training.minimum_learning_rate={self.minimum_learning_rate!r} is not valid: it must be at most "
                f"training.learning_rate={self.learning_rate!r}."
            )
        if self.micro_batch_size and self.batch_size % self.micro_batch_size:
            yield (
                f"training.micro_batch_size={self.micro_batch_size!r} is not valid: it must divide "
                f"training.batch_size={self.batch_size!r}."
            )
        if not all(isinstance(tracker, str) for tracker in self.trackers):
            yield (f"training.trackers={self.trackers!r} is not valid: it must be a list of names.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationRecipe:
    """When and on how much text the model is evaluated, and which one is kept: the last, or that of the lowest
    validation loss."""

    every: int | None = _field(None, minimum=1)
    blocks: int | None = _field(None, minimum=1)
    final_blocks: int | None = _field(None, minimum=1)
    keep: Literal["last", "best"] = "last"

    def problems(self) -> Iterator[str]:
        """Yields what is wrong with the fields together."""
        if self.keep == "best" and self.every is None:
            yield (
                "evaluation.keep='best' is not valid with evaluation.every=None: without evaluations none is the best."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """One run. `model` holds `family` (`llama` or `gpt2`) and the fields of that family's configuration."""

    name: str
    data: DataRecipe
    model: dict
    training: TrainingRecipe
    evaluation: EvaluationRecipe = dataclasses.field(default_factory=EvaluationRecipe)
    seed: int = _field(0, minimum=0)

    def problems(self) -> Iterator[str]:
        """Yields what is wrong with the fields together."""
        # It becomes the name of a folder.
        if not re.fullmatch(r"\w[\w.-]*", self.name):
            yield (
                f"name={self.name!r} is not valid: it must consist of letters, digits, '_', '-' and '.', and begin "
                "with a letter, a digit or '_'."
            )
        if self.data.streaming and not (self.evaluation.blocks and self.evaluation.final_blocks):
            yield ("evaluation.blocks and evaluation.final_blocks must be given when data.streaming is true.")
        if self.data.source == "task" and self.evaluation.final_blocks is not None:
            yield (
                f"evaluation.final_blocks={self.evaluation.final_blocks!r} has no effect with data.source='task': "
                "data.test_samples says how many samples of every test set are scored at the end."
            )

    def resolved(self) -> dict[str, Any]:
        """Returns every key with its value: `parse_recipe` makes an equal recipe of it.

        A recipe of text has no keys of toy tasks, and none says that the last model is kept, how long processes wait by
        default, or that no files are named: recipes that are older than those keys stay equal.
        """
        values = dataclasses.asdict(self)
        if self.evaluation.keep == "last":
            del values["evaluation"]["keep"]
        if self.training.ddp_timeout == DDP_TIMEOUT:
            del values["training"]["ddp_timeout"]
        if self.data.source != "task":
            for key in _TASK_KEYS:
                del values["data"][key]
        for key in ("train_file", "validation_file"):
            if values["data"][key] is None:
                del values["data"][key]
        return values


# What says where text comes from.
_ORIGIN_KEYS = (
    *("source", "dataset", "dataset_config", "splits", "text_field", "streaming"),
    *("train_file", "validation_file"),
)
_TASK_KEYS = ("task", "task_parameters", "test_sets", "test_samples", "train_samples", "loss")
_SECTIONS = {"data": DataRecipe, "training": TrainingRecipe, "evaluation": EvaluationRecipe}


class _Loader(yaml.SafeLoader):
    """YAML 1.1 with two traps removed: `2e-3` is a number, and a key given twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise RecipeError(f"the key {key!r} is given twice (line {node.start_mark.line + 1} and below).")
        return super().construct_mapping(node, deep=deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def load_recipe(
    source: str | Path,
    overrides: Sequence[str] = (),
    *,
    train_file: Sequence[str] | None = None,
    validation_file: Sequence[str] | None = None,
) -> Recipe:
    """Reads a recipe.

    Args:
        source: a YAML file, or the name of a shipped recipe (`demo_rope`).
        overrides: `key.sub=value`, applied in order; the value is YAML.
        train_file: the text to train on, in place of what the recipe's `data` says about where text comes from.
        validation_file: the text to evaluate on; needs `train_file`.

    Raises:
        RecipeError: the file or its contents are not valid.
    """
    path = Path(source)
    if not path.suffix and not path.exists():
        shipped = sorted(file.stem for file in RECIPES.glob("*.yaml"))
        if str(source) not in shipped:
            raise RecipeError(
                f"recipe {str(source)!r} is neither a file nor a shipped recipe. {suggest(str(source), shipped)}"
            )
        path = RECIPES / f"{source}.yaml"
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except OSError as error:
        raise RecipeError(f"recipe {str(source)!r} cannot be read: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(f"recipe {str(source)!r} is no valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise RecipeError(f"recipe {str(source)!r} is not valid: it must be a mapping of keys to values.")
    if train_file or validation_file:
        data = values.get("data")
        if isinstance(data, dict):
            kept = {key: value for key, value in data.items() if key not in _ORIGIN_KEYS}
            own = {"train_file": train_file, "validation_file": validation_file}
            values["data"] = {**kept, "source": "local", **{key: list(value) for key, value in own.items() if value}}
    for override in overrides:
        _apply(values, override)
    return parse_recipe({"name": path.stem, **values})


def _apply(values: dict[str, Any], override: str) -> None:
    key, separator, value = override.partition("=")
    if not separator or not key:
        raise RecipeError(f"--set {override!r} is not valid: it must be key.sub=value.")
    *sections, last = key.split(".")
    for section in sections:
        if not isinstance(values.setdefault(section, {}), dict):
            raise RecipeError(f"--set {override!r} is not valid: {section!r} is no section of the recipe.")
        values = values[section]
    try:
        values[last] = yaml.load(value, Loader=_Loader)
    except yaml.YAMLError as error:
        raise RecipeError(f"--set {override!r} is not valid: the value is no valid YAML.") from error


def parse_recipe(values: Mapping[str, Any]) -> Recipe:
    """Builds a recipe from a dictionary, such as `Recipe.resolved()` returns; checks everything but the model.

    Raises:
        RecipeError: the recipe is not valid; the message has all errors, with those of a section before those of
            sections together.
    """
    values, problems = dict(values), []
    data = values.get("data")
    if isinstance(data, dict) and data.get("train_file") and "source" not in data:
        values["data"] = {**data, "source": "local"}
    for name, cls in _SECTIONS.items():
        if name in values:
            values[name], found = _parse(cls, values[name], f"{name}.")
            problems += found
    recipe, found = _parse(Recipe, values, "", sections_are_valid=not problems)
    problems += found
    family = values["model"].get("family") if isinstance(values.get("model"), dict) else None
    if isinstance(values.get("model"), dict) and not isinstance(family, str):
        problems.append(f"model.family={family!r} is not valid. Allowed: 'gpt2', 'llama'.")
    if problems and isinstance(family, str):
        # Lazily, as the model's module imports this one.
        from .model import model_problem

        problems += filter(None, [model_problem(values["model"])])
    if problems:
        raise RecipeError(*problems)
    assert recipe is not None, "without a problem there is a recipe"
    if recipe.data.source == "task":
        recipe = dataclasses.replace(recipe, data=recipe.data.with_task_defaults())
    return recipe


def _parse(cls: Any, values: Any, prefix: str, *, sections_are_valid: bool = True) -> tuple[Any, list[str]]:
    """Returns an instance of `cls` and no problem, or None and what is wrong."""
    if not isinstance(values, dict):
        return None, [f"{prefix.rstrip('.')}={values!r} is not valid: it must be a mapping of keys to values."]
    problems = []
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for key, value in values.items():
        if key not in fields:
            problems.append(f"unknown key {prefix + str(key)!r} (given: {value!r}). {suggest(key, fields)}")
        elif cls is Recipe and key in _SECTIONS:
            continue
        elif not matches_type(value, fields[key].type):
            problems.append(f"{prefix}{key}={value!r} is not valid: it must be {describe_type(fields[key].type)}.")
        else:
            problems += _limit_problems(f"{prefix}{key}", value, fields[key].metadata)
    for name, field in fields.items():
        if name not in values and field.default is field.default_factory is dataclasses.MISSING:
            problems.append(f"{prefix}{name} is missing: it must be {describe_type(field.type)}.")
    if problems or not sections_are_valid:
        return None, problems
    # Numbers are stored as their field's type, so that a recipe that says 1 equals one that says 1.0.
    parsed = cls(
        **{
            key: float(v) if fields[key].type in (float, float | None) and v is not None else v
            for key, v in values.items()
        }
    )
    problems = list(parsed.problems())
    return (None if problems else parsed), problems


def _limit_problems(name: str, value: Any, limits: Mapping[str, float]) -> Iterator[str]:
    checks = {
        "minimum": ("at least", lambda limit: value >= limit),
        "above": ("above", lambda limit: value > limit),
        "maximum": ("at most", lambda limit: value <= limit),
        "below": ("below", lambda limit: value < limit),
    }
    for kind, limit in limits.items():
        words, holds = checks[kind]
        # written so that NaN fails
        if value is not None and not holds(limit):
            yield f"{name}={value!r} is not valid: it must be {words} {limit}."


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Returns, for every key in which two resolved recipes differ, a line `key: old → new`."""
    lines = []
    for key in sorted({*old, *new}):
        before, after = old.get(key), new.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            lines += differences(before, after, f"{prefix}{key}.")
        elif before != after:
            lines.append(f"{prefix}{key}: {before!r} → {after!r}")
    return lines
