"""Shared code of the command line parsers."""

import argparse
import contextlib
import json
import pathlib
import shlex
import signal
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import yaml


def command_parser(name: str, usage: str, description: str, **options: Any) -> argparse.ArgumentParser:
    """Returns the parser of `whatwhere NAME`, whose help is at most 120 characters wide."""
    return argparse.ArgumentParser(
        prog=f"whatwhere {name}",
        usage=f"whatwhere {name} {usage}",
        description=description,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=40, width=120),
        **options,
    )


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """Adds the argument RECIPE and the options for its keys and its text."""
    parser.add_argument("recipe", nargs="?", help="a YAML file, or the name of a shipped recipe")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="replace a key of the recipe")
    parser.add_argument(
        "--train-file",
        nargs="+",
        metavar="FILE",
        help="your text: UTF-8 text, jsonl or parquet files of one format, folders, patterns",
    )
    add_validation_file(parser, "default: a part of --train-file")
    parser.add_argument("--data-dir", metavar="DIR", help="the folder of local data; default $WHATWHERE_DATA_DIR")


def add_validation_file(parser: Any, default: str) -> None:
    """Adds the option for own text to evaluate on; `default` says what is read without it."""
    parser.add_argument("--validation-file", nargs="+", metavar="FILE", help=f"text to evaluate on; {default}")


def add_own_text(parser: Any, default: str) -> None:
    """Adds the options for own text of commands that do not train."""
    add_validation_file(parser, default)
    parser.add_argument("--text-field", metavar="NAME", help="column of the documents; default text")


def recipe_of(options: argparse.Namespace) -> Any:
    """Returns the recipe of the options of `add_recipe`."""
    from ..training.recipe import load_recipe

    if options.recipe is None:
        raise ValueError("no RECIPE is given: name a YAML file or a shipped recipe.")
    own = {"train_file": options.train_file, "validation_file": options.validation_file}
    recipe = load_recipe(options.recipe, options.set, **own)
    check_data_dir(options.data_dir, recipe.data.texts())
    return recipe


def check_data_dir(data_dir: str | None, texts: Iterable[Any]) -> None:
    """Raises ValueError if the option is given and none of the texts, of `TextSource`, is read from that folder."""
    if data_dir is not None and not any(text.splits and text.source in ("local", "corpus") for text in texts):
        raise ValueError(f"data_dir={data_dir!r} has no effect: no text has source='corpus', or 'local' with splits.")


def add_resume(parser: argparse.ArgumentParser) -> None:
    """Adds the options `--resume`, with the values False, True and "auto", and `--resume-from`."""
    parser.add_argument(
        "--resume",
        nargs="?",
        const=True,
        default=False,
        choices=["auto"],
        help="continue, with the settings of --output; auto: or begin, or end if finished",
    )
    parser.add_argument(
        "--resume-from",
        type=int,
        default=None,
        metavar="STEP",
        help="continue from this step; later checkpoints are deleted",
    )


def is_resumed(options: argparse.Namespace) -> bool:
    """Returns whether the options of `add_resume` are given."""
    return bool(options.resume) or options.resume_from is not None


@contextlib.contextmanager
def continued(output: str, record: str, data_dir: str | None) -> Iterator[None]:
    """Adds the arguments that continue a run to its interruption. `record` is the name of its settings file."""
    from ..training.errors import Interrupted

    try:
        yield
    except (Interrupted, KeyboardInterrupt) as stop:
        # Until the settings are written, there is nothing to continue.
        if not (pathlib.Path(output) / record).exists():
            raise
        found = stop if isinstance(stop, Interrupted) else Interrupted(signal.SIGINT)
        found.arguments = ["--output", output, "--resume"]
        if data_dir is not None:
            found.arguments += ["--data-dir", data_dir]
        raise found from None


def ending(
    output: str, trained: str, results: Mapping[str, Any], scores: Mapping[str, str], following: str | None
) -> str:
    """Returns the last lines of a run: what was trained and where it is, its scores, and the command to type next.

    Args:
        results: the content of `results.json`.
        scores: keys of `results` with scores, by the word that precedes them.
        following: the next command, for the folder.
    """
    from ..training.plan import describe_seconds

    count, steps = results["parameters"], results["steps"]
    lines = [
        f"{output}: {trained}, {count:,} parameters, {steps:,} steps in {describe_seconds(results['seconds'])}",
        *(line for word, key in scores.items() for line in _score_lines(word, results, results[key])),
    ]
    if following:
        lines.append(f"Next: {shlex.join(['whatwhere', following, output])}")
    return "\n".join(lines)


def _score_lines(word: str, results: Mapping[str, Any], scores: Mapping[str, Any]) -> Iterator[str]:
    from ..evaluation.data_description import loss_unit, text_of

    if "test_sets" in scores:
        for name, errors in scores["test_sets"].items():
            yield f"{word}{name}: {errors['token_error']:.2%} of the answer tokens are wrong"
        return
    names = {"loss": "loss", "perplexity": f"perplexity per {loss_unit(results)}", "bits_per_byte": "bits per byte"}
    found = ", ".join(f"{name} {scores[key]['value']:.4g}" for key, name in names.items() if key in scores)
    yield f"{word}{text_of(results['data'])}: {found or 'the loss is not finite'}"


def json_value(text: str) -> Any:
    """Returns the value of an option in JSON; an `argparse` type."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not valid JSON: {error}") from error
    if value is None:
        raise argparse.ArgumentTypeError("null is not valid: leave the option out for its default")
    return value


def name_or_list(text: str) -> Any:
    """Returns a name, or the list in a text such as `[rope, cope]` (YAML or JSON); an `argparse` type."""
    try:
        return yaml.safe_load(text) if text.lstrip().startswith("[") else text
    except yaml.YAMLError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a valid list: it must be like [rope, cope]") from error
