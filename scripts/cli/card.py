"""Write model cards from results files: next to the weights, or in separate folders.

    whatwhere card demo/pope
    whatwhere card runs/mine --name you/your-model --licence mit
    whatwhere card runs/rope runs/pope --results results/length_pg19.json
    whatwhere card runs/rope runs/pope --output model_cards --results results/length_pg19.json
    whatwhere card --output model_cards    # rewrite all cards, and their list in README.md, if it has one

A card's folder contains `config.json`, `recipe.yaml`, the results files of its weights (`results.json`, `length.json`,
`length_*.json`, `lm_eval.json`, `sample.json`), `curves.json` (a thinned `metrics.jsonl`), one figure, and `card.json`
with the place of the weights. `--results` adds measurements of several checkpoints: each folder gets its own entries,
and cards in one folder also show those of the others that were measured on the same text. Metadata
that were given or changed by hand are kept, such as the licence; a card with edited text is refused. Absolute paths in
recorded commands are shortened to their last part. Cards of the papers' tables (`whatwhere reproduce --cards`) are
rewritten, too.
"""

import argparse
import pathlib

from .options import command_parser


def parser() -> argparse.ArgumentParser:
    result = command_parser("card", "[RUN ...] [OPTIONS]", __doc__, check=_check)
    result.add_argument("runs", nargs="*", type=pathlib.Path, metavar="RUN", help="default: every card in --output")
    result.add_argument(
        "--output", type=pathlib.Path, metavar="DIR", help="the folder of all cards (default: next to the weights)"
    )
    result.add_argument("--name", help="of the model (default: the folder's); with --output, of its card's folder")
    result.add_argument("--licence", metavar="ID", help="of the weights, an identifier of the Hub like apache-2.0")
    result.add_argument(
        "--results", nargs="+", default=[], type=pathlib.Path, metavar="FILE", help="length*.json of RUNs"
    )
    return result


def _check(options: argparse.Namespace) -> None:
    if options.output is None:
        if not options.runs:
            raise argparse.ArgumentTypeError("give a RUN, or --output with the folder of all cards.")
        if options.name and len(options.runs) > 1:
            raise argparse.ArgumentTypeError("--name needs a single RUN.")
