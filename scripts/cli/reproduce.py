"""The parser of `whatwhere reproduce`."""

import argparse
import pathlib

from .options import command_parser, read_yaml

# Tables of conversions, with modules of their own.
OWN = {
    "conversion": "A model with RoPE, converted to other encodings and trained on",
    "pretrained": "SmolLM2-135M-Instruct, converted to other encodings and trained on",
}
DESCRIPTION = """Train the models of a table, and compare our results with the paper's, or the table's systems.

On a laptop:  whatwhere reproduce cope_2 --small
On GPUs:      accelerate launch -m whatwhere reproduce cope_2

Tables of CoPE and PoPE, by their numbers in the papers, and our own:

{tables}

Each run is trained as by `whatwhere train` in OUTPUT/<recipe>/<row>[-<variant>]-seed<k>. Finished runs are reused,
interrupted runs are continued. The report is written to OUTPUT/<TABLE>[_small].md and .json."""


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    titles = {name: table["title"] for name, table in read_yaml("reproduction/tables.yaml")["tables"].items()} | OWN
    tables = "\n".join(f"  {name:<22}{title}" for name, title in titles.items())
    result = command_parser("reproduce", "TABLE [OPTIONS]", DESCRIPTION.format(tables=tables))
    result.add_argument("table", choices=titles, metavar="TABLE", help="a name of the list above")
    result.add_argument("--small", action="store_true", help="the small recipes")
    result.add_argument("--seeds", type=int, metavar="N", help="runs per system; default: as in the table")
    result.add_argument("--rows", nargs="+", metavar="ROW", help="only these rows; --dry-run lists all names")
    result.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="replace a recipe key that the table does not set",
    )
    result.add_argument("--output", type=pathlib.Path, default=pathlib.Path("runs"), metavar="DIR", help="default runs")
    result.add_argument("--data-dir", metavar="DIR", help="the folder of local data; default $WHATWHERE_DATA_DIR")
    result.add_argument("--cards", type=pathlib.Path, metavar="DIR", help="also write the report there as a model card")
    mode = result.add_mutually_exclusive_group()
    mode.add_argument("--report-only", action="store_true", help="train nothing")
    mode.add_argument("--dry-run", action="store_true", help="list finished and missing runs, train and write nothing")
    return result
