"""The model card of a checkpoint folder: README.md, made from the configuration and the results files beside it.

    python -m whatwhere.scripts.evaluation.card demo/pope

`results.json` (training), `length.json` and `length_*.json` (length extrapolation), each with the PNG file of its name,
and `lm_eval.json` are used if they are there and about these weights; without them the card says that nothing was
measured. No number is typed by hand, and running it again without new results writes the same bytes. A README.md that
is already there is replaced. The text is in `whatwhere.model_card`, which travels with every checkpoint.

`python -m whatwhere.scripts.cards` makes cards in folders of their own, with the curves of training and the papers'
figures.
"""

import argparse
import pathlib

import transformers

from ...model_card import folder_card, read_results
from .results import write_text


def write_card(folder: str | pathlib.Path, *, name: str | None = None) -> pathlib.Path:
    """Writes README.md into a checkpoint folder and returns its path.

    Args:
        folder: the checkpoint.
        name: of the model; by default that of the folder.

    Raises:
        ValueError: the folder holds no checkpoint of this package, or a results file is broken.
    """
    folder = pathlib.Path(folder)
    if not (folder / "config.json").is_file():
        raise ValueError(f"folder={str(folder)!r} is not a model folder: it has no config.json.")
    config = transformers.AutoConfig.from_pretrained(folder)
    if not hasattr(config, "position_encoding"):
        raise ValueError(
            f"folder={str(folder)!r} holds a model of type {config.model_type!r}, which is not one of ours."
        )
    card = folder_card(folder, config, results=read_results(folder), name=name or folder.resolve().name)
    path = folder / "README.md"
    write_text(path, str(card))
    return path


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m whatwhere.scripts.evaluation.card", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="a checkpoint folder")
    options = parser.parse_args(arguments)
    try:
        for folder in options.folders:
            print(write_card(folder))
    except (ValueError, OSError) as error:
        parser.exit(2, f"error: {error}\n")


if __name__ == "__main__":
    main()
