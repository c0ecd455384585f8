"""Shared code of the command line parsers."""

import argparse
import contextlib
import pathlib
import shlex
import signal
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..errors import program


def recipe_of(options: argparse.Namespace) -> Any:
    """Returns the recipe of the options of `add_recipe`."""
    from ..training.recipe import load_recipe

    own = {"train_file": options.train_file, "validation_file": options.validation_file}
    recipe = load_recipe(options.recipe, options.set, **own)
    check_data_dir(options.data_dir, recipe.data.texts())
    return recipe


def check_data_dir(data_dir: str | None, texts: Iterable[Any]) -> None:
    """Raises ValueError if the option is given and none of the texts, of `TextSource`, is read from that folder."""
    if data_dir is not None and not any(text.splits and text.source in ("local", "corpus") for text in texts):
        raise ValueError(f"data_dir={data_dir!r} has no effect: no text has source='corpus', or 'local' with splits.")


@contextlib.contextmanager
def continued(output: str, record: str, data_dir: str | None) -> Iterator[None]:
    """Adds the arguments that continue a run to its interruption. `record` is the name of its settings file."""
    from ..errors import Interrupted

    try:
        yield
    except (Interrupted, KeyboardInterrupt) as stop:
        # Until the settings are written, there is nothing to continue.
        if not (pathlib.Path(output) / record).exists():
            raise
        found = stop if isinstance(stop, Interrupted) else Interrupted(signal.SIGINT)
        found.arguments = ["--output", output, "--resume"]
        if (pathlib.Path(output) / "results.json").exists():
            # Only the card is missing, for which a finished run is not refused.
            found.arguments.append("auto")
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
    from ..progress import describe_seconds

    count, steps = results["parameters"], results["steps"]
    lines = [
        f"{output}: {trained}, {count:,} parameters, {steps:,} steps in {describe_seconds(results['seconds'])}",
        *(line for word, key in scores.items() for line in _score_lines(word, results, results[key])),
    ]
    if following:
        lines.append(f"Next: {shlex.join([*program(), following, output])}")
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
