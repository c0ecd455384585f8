"""Recipes: all settings of a training run in one YAML file, validated when it is read (see `checks.py`)."""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field

from whatwhere.validation import suggest

from ..checks import Checked, Count, Fraction, NotNegative, NotNegativeFloat, Positive, parse
from ..data.source import MixedText, TextSource
from ..errors import Refused
from ..families import FAMILIES

Mixture = Annotated[list[MixedText], Field(min_length=1)]
Schedule = Literal["cosine", "linear", "constant"]
RECIPES = Path(__file__).resolve().parent.parent / "recipes"


class RunText(TextSource):
    """The text of a run.

    With `source` "mixture", training sequences are drawn from the texts of `mixture` by their weights, see
    `MixedBatches`. Held-out data are those of all texts.
    """

    source: Literal["stdlib", "hub", "local", "corpus", "mixture"] = "stdlib"  # type: ignore[assignment]
    mixture: Mixture | None = None
    shuffle_buffer: Count = 1000

    def problems(self) -> Iterator[tuple[str, str]]:
        yield from super().problems()
        if self.source == "mixture" and self.mixture is None:
            yield "mixture", "source='mixture' needs a list of texts with weights"
        if self.source != "mixture" and self.mixture is not None:
            yield "source", "with data.mixture, it must be 'mixture'"
        for number, text in enumerate(self.texts() if self.mixture and self.streaming else ()):
            for name, reason in TextSource.problems(text):
                yield "streaming", f"data.mixture[{number}].{name}: {reason}"

    def texts(self) -> list[TextSource]:
        if self.mixture is None:
            return [self]
        return [text.model_copy(update={"streaming": self.streaming}) for text in self.mixture]

    def weights(self) -> list[float]:
        """Returns the share of each text in the training sequences; their sum is 1."""
        weights = [text.weight for text in self.mixture or ()] or [1.0]
        return [weight / sum(weights) for weight in weights]


class DataRecipe(RunText):
    """The data and their tokenisation; see `TextSource`, `build_tokenizer` and `Packer`.

    With `source` "task", the data are samples of a toy task, defined by `task` and the keys after it; see `TaskConfig`,
    `TaskSamples` and `ShuffledBatches`.
    """

    source: Literal["stdlib", "hub", "local", "corpus", "mixture", "task"] = "stdlib"  # type: ignore[assignment]
    sequence_length: Annotated[int, Field(ge=2)]
    # Processes that read batches ahead; by default 2 on a GPU; on a CPU 0, or 1 for a stream.
    workers: NotNegative | None = None
    tokenizer: str = "bytes"
    vocab_size: Annotated[int, Field(ge=258)] | None = None
    pack: Literal["concat", "documents", "separate"] = "concat"
    # For `source: task` only. Defaults of parameters and test sets are filled in when a recipe is parsed.
    task: str | None = None
    task_parameters: dict | None = None
    test_sets: dict | None = None
    test_samples: Count | None = None
    train_samples: Count | None = None
    loss: Literal["answer", "all"] | None = None

    def problems(self) -> Iterator[tuple[str, str]]:
        yield from super().problems()
        is_task = self.source == "task"
        for key in ("shuffle_buffer", "tokenizer", "vocab_size", "pack") if is_task else _TASK_KEYS:
            if getattr(self, key) != DataRecipe.model_fields[key].default:
                yield key, f"it has no effect with source={self.source!r}"
        if (self.vocab_size is None) == (self.tokenizer == "bpe"):
            yield "vocab_size", f"it is required with tokenizer='bpe', and not allowed with {self.tokenizer!r}"
        if self.tokenizer in ("jsb", "6mer") and self.pack != "separate":
            yield "pack", f"tokenizer={self.tokenizer!r} has no token that ends a document. Allowed: 'separate'"
        if self.tokenizer == "bpe" and self.streaming:
            yield "streaming", "tokenizer='bpe' is trained on the whole training split"

    def task_config(self, *, seed: int = 0, test_set: str | None = None) -> Any:
        """Returns the task's `TaskConfig` with the parameters of training, or of a test set."""
        from ..toy_tasks.registry import TASKS, task_config

        if self.task not in TASKS:
            raise Refused(f"data.task={self.task!r} is not valid. {suggest(str(self.task), TASKS)}")
        where, values = "task_parameters", self.task_parameters or {}
        if fixed := {"seed", "train_samples", "validation_samples", "test_samples"} & set(values):
            raise Refused(f"data.task_parameters={values!r} is not valid: the recipe has its own {min(fixed)}.")
        if test_set is not None:
            where, values = f"test_sets[{test_set!r}]", {**values, **(self.test_sets or {})[test_set]}
            if self.test_samples is not None:
                values["test_samples"] = self.test_samples
        try:
            return task_config(self.task, {**values, "seed": seed})
        except ValueError as error:
            raise Refused(f"data.{where} is not valid: {error}") from error

    def longest_input(self) -> int:
        """Returns the maximum number of tokens in a sequence of training or evaluation."""
        if self.source != "task" or self.task_config().may_be_cut:
            return self.sequence_length
        return max(self.sequence_length, *(self.task_config(test_set=name).longest for name in self.test_sets or {}))

    def with_task_defaults(self) -> "DataRecipe":
        """Returns the same with every parameter of the task and its test sets filled in."""
        from ..toy_tasks.common import shape

        training = self.task_config()
        if self.sequence_length < training.longest and not training.may_be_cut:
            reason = f"samples have up to {training.longest} tokens"
            raise Refused(f"data.sequence_length={self.sequence_length!r} is not valid: {reason}.")
        test_sets = training.test_sets() if self.test_sets is None else self.test_sets
        known = self.model_copy(update={"task_parameters": shape(training), "test_sets": test_sets})
        filled = {}
        for name, changes in test_sets.items():
            refused = f"data.test_sets[{name!r}]={changes!r} is not valid"
            if not isinstance(name, str) or not isinstance(changes, dict) or "seed" in changes:
                raise Refused(f"{refused}: it must be a mapping, without `seed`.")
            tested = known.task_config(test_set=name)
            if unknown := set(tested.symbols) - set(training.symbols):
                raise Refused(f"{refused}: training has no symbols {', '.join(map(repr, sorted(unknown)))}.")
            # The default size, too: later changes of defaults do not affect old recipes.
            filled[name] = {**changes, "test_samples": tested.test_samples}
        return known.model_copy(update={"test_sets": filled, "loss": self.loss or "answer"})


class TrainingRecipe(Checked):
    """The optimisation."""

    steps: Count
    batch_size: Count
    learning_rate: Positive
    micro_batch_size: Count | None = None
    schedule: Schedule = "cosine"
    warmup_steps: NotNegative = 0
    minimum_learning_rate: NotNegativeFloat = 0.0
    weight_decay: NotNegativeFloat = 0.0
    beta1: Fraction = 0.9
    beta2: Fraction = 0.999
    epsilon: Positive = 1e-8
    clip_norm: Positive | None = None
    mixed_precision: Literal["no", "bf16"] = "no"
    # "selective" keeps the results of matrix products and attention, and computes the others again.
    activation_checkpointing: bool | Literal["selective"] = False
    # "layers" compiles each layer by itself.
    compile: bool | Literal["layers"] = False
    # Compute the loss without the logits of all tokens at once; "liger": with the Triton kernel of liger-kernel.
    chunked_loss: bool | Literal["liger"] = False
    log_every: Count = 10
    checkpoint_every: Count | None = None
    keep_checkpoints: Count = 2
    trackers: list[str] = []
    # Timeout of communication between processes, in seconds.
    ddp_timeout: Count = 600

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.warmup_steps >= self.steps:
            yield "warmup_steps", f"it must be below steps={self.steps!r}"
        if self.minimum_learning_rate and self.schedule != "cosine":
            yield "minimum_learning_rate", f"it has no effect with schedule={self.schedule!r}. Allowed: 'cosine'"
        if self.minimum_learning_rate > self.learning_rate:
            yield "minimum_learning_rate", f"it must be at most learning_rate={self.learning_rate!r}"
        if self.micro_batch_size and self.batch_size % self.micro_batch_size:
            yield "micro_batch_size", f"it must divide batch_size={self.batch_size!r}"
        if self.chunked_loss == "liger" and self.compile is True:
            yield "compile", "with chunked_loss='liger', only layers can be compiled. Allowed: False, 'layers'"


class DistributedRecipe(Checked):
    """The number of processes along each dimension of parallelism, by accelerate's names; see `distributed.py`."""

    dp_replicate: Count | None = None
    dp_shard: Count = 1
    tp: Count = 1
    cp: Count = 1


class EvaluationRecipe(Checked):
    """Frequency and size of evaluations, and the model to keep: the last, or that with the lowest validation loss."""

    every: Count | None = None
    blocks: Count | None = None
    final_blocks: Count | None = None
    keep: Literal["last", "best"] = "last"

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.keep == "best" and self.every is None:
            yield "keep", "it needs every"


class RunSettings(Checked):
    """What the training loop needs to know of any run, beside its model."""

    name: str
    data: DataRecipe
    training: TrainingRecipe
    evaluation: EvaluationRecipe = EvaluationRecipe()
    distributed: DistributedRecipe = DistributedRecipe()
    seed: NotNegative = 0


class Recipe(RunSettings):
    """The settings of `train`; `model` has `family` (`llama` or `gpt2`) and fields of that family's configuration."""

    model: dict

    @classmethod
    def inner_keys(cls) -> Iterator[str]:
        yield "model.family"
        for model_class in FAMILIES.values():
            yield from (f"model.{field.name}" for field in dataclasses.fields(model_class.config_class))

    def problems(self) -> Iterator[tuple[str, str]]:
        # It is used as a folder name.
        if not re.fullmatch(r"\w[\w.-]*", self.name):
            yield "name", "allowed are letters, digits, '_', '-' and '.', and it must not begin with '-' or '.'"
        if self.data.streaming and not (self.evaluation.blocks and self.evaluation.final_blocks):
            yield "evaluation.final_blocks", "with data.streaming, it and evaluation.blocks must be given"
        if self.data.source == "task" and self.training.chunked_loss:
            yield "training.chunked_loss", "answers of toy tasks are scored by their logits. Allowed: False"
        if self.data.source == "task" and self.evaluation.final_blocks is not None:
            yield "evaluation.final_blocks", "with data.source='task', use data.test_samples instead"

    def resolved(self) -> dict[str, Any]:
        """Returns all keys with their values, for `parse_recipe`; keys of toy tasks are left out for text."""
        values = self.model_dump()
        if self.evaluation.keep == "last":
            # Results of older recipes do not have it.
            del values["evaluation"]["keep"]
        if self.data.source != "task":
            for key in _TASK_KEYS:
                del values["data"][key]
        return values


_TASK_KEYS = ("task", "task_parameters", "test_sets", "test_samples", "train_samples", "loss")


class _Loader(yaml.SafeLoader):
    """YAML 1.1, except that `2e-3` is a number, and that duplicate keys are errors."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise Refused(f"the key {key!r} is given twice (line {node.start_mark.line + 1} and below).")
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
        train_file, validation_file: own text; `train_file` replaces the recipe's source.
    """
    path = Path(source)
    if not path.suffix and not path.exists():
        shipped = sorted(file.stem for file in RECIPES.glob("*.yaml"))
        if str(source) not in shipped:
            raise Refused(
                f"recipe {str(source)!r} is neither a file nor a shipped recipe. {suggest(str(source), shipped)}"
            )
        path = RECIPES / f"{source}.yaml"
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except OSError as error:
        raise Refused(f"recipe {str(source)!r} cannot be read: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise Refused(f"recipe {str(source)!r} is not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise Refused(f"recipe {str(source)!r} is not valid: it must be a mapping of keys to values.")
    if isinstance(data := values.get("data"), dict):
        if train_file:
            kept = {key: value for key, value in data.items() if key not in (*TextSource.model_fields, "mixture")}
            data = values["data"] = {**kept, "source": "local", "train_file": list(train_file)}
        if validation_file:
            data["validation_file"] = list(validation_file)
    for override in overrides:
        _apply(values, override)
    return parse_recipe({"name": path.stem, **values})


def _apply(values: dict[str, Any], override: str) -> None:
    key, separator, value = override.partition("=")
    if not separator or not key:
        raise Refused(f"--set {override!r} is not valid: it must be key.sub=value.")
    *sections, last = key.split(".")
    for section in sections:
        if not isinstance(values.setdefault(section, {}), dict):
            raise Refused(f"--set {override!r} is not valid: {section!r} is not a section of the recipe.")
        values = values[section]
    try:
        values[last] = yaml.load(value, Loader=_Loader)
    except yaml.YAMLError as error:
        raise Refused(f"--set {override!r} is not valid: the value is not valid YAML.") from error


def parse_recipe(values: Mapping[str, Any]) -> Recipe:
    """Builds a recipe from a dictionary, such as `Recipe.resolved()`; checks everything except the model."""
    values = dict(values)
    model = values.get("model")
    problems: list[str] = []
    try:
        recipe = parse(Recipe, values)
    except Refused as error:
        problems += error.problems
    # Errors of the model alone are reported when it is built; here only together with other errors.
    if isinstance(model, dict) and (problems or not isinstance(model.get("family"), str)):
        problems += filter(None, [model_problem(model)])
    if problems:
        raise Refused(*problems)
    if recipe.data.source == "task":
        recipe = recipe.model_copy(update={"data": recipe.data.with_task_defaults()})
    return recipe


def model_problem(fields: Mapping[str, Any]) -> str | None:
    """Returns the error in the fields of a recipe's `model` (including `family`), or None."""
    fields = dict(fields)
    family = fields.pop("family", None)
    if family not in FAMILIES:
        return f"model.family={family!r} is not valid. {suggest(str(family), FAMILIES)}"
    try:
        FAMILIES[family].config_class(**fields)
    except (TypeError, ValueError) as error:
        return f"model is not valid: {error}"
    return None
