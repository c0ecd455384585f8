"""What the parsers of the commands share. Their modules import only the standard library, so that help is quick."""

import argparse
import difflib
import json
import pathlib
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any, NoReturn

Check = Callable[[argparse.Namespace], None]


class Parser(argparse.ArgumentParser):
    """A parser that suggests the option which is meant, and whose `check` raises errors of valid options together.

    A ValueError of `check` passes through; an ArgumentTypeError is reported with the usage.
    """

    def __init__(self, *, check: Check | None = None, **options: Any) -> None:
        # In full: `--seed` is not short for `--seeds`.
        super().__init__(allow_abbrev=False, **options)
        self.check = check
        self._given: list[str] = []

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._given = list(sys.argv[1:] if args is None else args)
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        if self.check is not None:
            try:
                self.check(options)
            except argparse.ArgumentTypeError as error:
                self.error(str(error))
        return options

    def error(self, message: str) -> NoReturn:
        super().error(message + self._meant(message))

    def _meant(self, message: str) -> str:
        """Returns sentences on the first unknown option: its name if `message` lacks it, and what is meant."""
        own = list(self._all_options())
        for word, following in zip(self._given, [*self._given[1:], "..."]):
            name, _, value = word.partition("=")
            if not name.startswith("--") or name in own:
                continue
            near = difflib.get_close_matches(name, own, n=1, cutoff=0.8)
            if not near and "--set" in own:
                keys = {f"--{key.rpartition('.')[2].replace('_', '-')}": key for key in _recipe_keys()}
                if found := difflib.get_close_matches(name, keys, n=1, cutoff=0.8):
                    near = [f"--set {keys[found[0]]}={value or following}"]
            unknown = "" if name in message.replace("=", " ").split() else f" {name!r} is not an option."
            return f".{unknown} Did you mean {near[0]!r}?" if near else ""
        return ""

    def _all_options(self) -> Iterator[str]:
        for action in self._actions:
            yield from action.option_strings
            if isinstance(action, argparse._SubParsersAction):
                for parser in action.choices.values():
                    yield from parser._all_options()


def _recipe_keys() -> list[str]:
    """Returns the keys of a recipe with many keys, such as `training.steps`."""
    recipe = read_yaml("recipes/demo_rope.yaml")
    groups = [key for key, value in recipe.items() if isinstance(value, dict)]
    return [key for key in recipe if key not in groups] + [
        f"{group}.{key}" for group in groups for key in recipe[group]
    ]


def read_yaml(name: str) -> Any:
    """Returns the content of a file of `scripts/`; the package is not imported."""
    import yaml

    package: Any = find_spec("whatwhere")
    file = pathlib.Path(package.submodule_search_locations[0]) / "scripts" / name
    # The loader in C, where there is one, is ten times as fast.
    return yaml.load(file.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def command_parser(name: str, usage: str, description: str, **options: Any) -> Parser:
    """Returns the parser of `whatwhere NAME`, whose help is at most 120 characters wide."""
    return Parser(
        prog=f"whatwhere {name}",
        usage=f"whatwhere {name} {usage}",
        description=description,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=40, width=120),
        **options,
    )


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """Adds the argument RECIPE and the options for its keys and its text; see `check_recipe`."""
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


def check_recipe(options: argparse.Namespace) -> None:
    """Raises ValueError if there is no recipe, and no run whose recipe is continued."""
    if options.recipe is None:
        if not is_resumed(options):
            raise ValueError("no RECIPE is given: name a YAML file or a shipped recipe.")
        if options.output is None:
            raise ValueError("no --output is given: name the folder of the run to resume.")


def add_resume(parser: argparse.ArgumentParser) -> None:
    """Adds the options `--resume`, with the values False, True and "auto", and `--resume-from`."""
    parser.add_argument(
        "--resume",
        nargs="?",
        const=True,
        default=False,
        choices=["auto"],
        help="continue the run in --output with its settings; auto: start, continue, or do nothing if finished",
    )
    parser.add_argument(
        "--resume-from",
        type=int,
        default=None,
        metavar="STEP",
        help="continue from this step; later checkpoints are deleted",
    )


def is_resumed(options: argparse.Namespace) -> bool:
    """Returns whether the options of `add_resume` are given; False for a command that does not have them."""
    return bool(getattr(options, "resume", False)) or getattr(options, "resume_from", None) is not None


def add_validation_file(parser: Any, default: str) -> None:
    """Adds the option for own text to evaluate on; `default` says what is read without it."""
    parser.add_argument("--validation-file", nargs="+", metavar="FILE", help=f"text to evaluate on; {default}")


def add_own_text(parser: Any, default: str) -> None:
    """Adds the options for own text of commands that do not train."""
    add_validation_file(parser, default)
    parser.add_argument("--text-field", metavar="NAME", help="column of the documents; default text")


def add_loading(parser: argparse.ArgumentParser) -> None:
    """Adds the options of how a model is loaded, for `loading_of`."""
    group = parser.add_argument_group("model")
    group.add_argument("--device", help="default: the GPU if there is one, else the CPU")
    group.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    group.add_argument("--attn-implementation", metavar="NAME", help="default: the model's default")
    group.add_argument("--trust-remote-code", action="store_true", help="run the code in the checkpoint's folder")


def at_least_one(text: str) -> int:
    """Returns the positive integer of an option; argparse reports the error with the option's name."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not valid: it must be a whole number, at least 1")
    return int(text)


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
    if not text.lstrip().startswith("["):
        return text
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a valid list: it must be like [rope, cope]") from error
