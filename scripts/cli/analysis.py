"""Analyses trained checkpoints, with figures as PNG and SVG and an interactive HTML page.

    whatwhere analysis frequencies runs/rope runs/pope
    whatwhere analysis deltas runs/pope
    whatwhere analysis maps runs/cope --validation-file article.txt --tokens 256

A checkpoint is a folder or a Hub id; a GPU is used if there is one.

frequencies: mean norms of queries and keys per frequency and layer (PoPE, Figures 3 to 6), for rope, pope and sums with
rope, on the first ten of Shakespeare's sonnets, or on every document of --validation-file. A norm is the length of two
rotated channels (rope), or the magnitude of one (pope), as the mean over tokens and heads.
  table: checkpoint, side (queries or keys), and the share of the highest quarter of frequencies in the sum of norms, as
    the mean over layers (0.25 if all norms are equal).
  frequencies.json: for each checkpoint its kind (rope or pope), the number of tokens, layers, frequencies (radians per
    token, highest first), wavelengths (tokens; null for the frequency 0), queries and keys (the norms by layer and
    frequency), and queries_highest_quarter and keys_highest_quarter (the share of the table by layer).

deltas: the learned phase shifts of a PoPE model, with their mean and their range; "at a bound" are those at 0 or -2 pi.
  deltas.json: delta_init (how they started), layers, frequencies (radians per token), wavelengths (tokens), deltas
    (radians by layer, head and frequency), mean, smallest, largest, at_bounds (the share at a bound), and outside (the
    share whose weight is outside of the bounds, where the model reflects it).

maps: gates, positions and position attention on a text (CoPE, Figures 4 and 6), for cope, sums with cope, cope_alibi,
cope_mlp and token_gated_cope, on the first --tokens tokens of a short English article, or of the first document of
--validation-file; of all layers and heads, or those of --layers and --heads. maps.html opens without a server: hovering
over a token shows which tokens it counts.
  table, by layer and head: gate (the mean over all queries and the keys that they see), gate_newline, gate_heading and
    gate_other (the mean over keys with a newline, over first keys of a section's title, and over the rest; empty if
    there are none), gate_deviation (the standard deviation of the mean gates of keys: high if some tokens are counted
    and others are not), and first_position (of the first token, as the mean over queries).
  maps.json: tokens and token_ids, boundaries (of each token: "newline", "heading" or nothing), layers, heads,
    last_position (the largest position that the model has), and summary (the table).
  maps.safetensors: gates, positions, position_attention (of positions alone; the largest weight of a query is 1) and
    attention (of the model), float32 (layers, heads, queries, keys), 0 for keys after the query.

A document is a text file, a line of a jsonl file or a row of a parquet file, as in training.

Figures are PNG and SVG; the JSON files contain the numbers, the command, the date and the versions.
"""

import argparse
import pathlib
from typing import Any

from .options import add_own_text, command_parser

COMMAND = "analysis"


def parse_indices(text: str) -> list[int]:
    """Returns the numbers of a list such as `0,3,8-11`; an `argparse` type."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found.extend(range(int(first), int(last or first) + 1))
    if not found:
        raise ValueError("the list is empty")
    return found


def parser() -> argparse.ArgumentParser:
    result = command_parser(COMMAND, "frequencies|deltas|maps CHECKPOINT [OPTIONS]", __doc__ or "", check=_check)
    shared = argparse.ArgumentParser(add_help=False)
    about: dict[str, Any] = {
        "parents": [shared],
        "epilog": f"Columns of tables and contents of files: whatwhere {COMMAND} --help",
    }
    shared.add_argument("checkpoint", nargs="+", metavar="CHECKPOINT", help="a folder or a Hub id")
    shared.add_argument(
        "--output", type=pathlib.Path, default="analysis", metavar="DIR", help="for the files (default %(default)s)"
    )
    shared.add_argument("--device", help="default: the GPU if there is one")
    shared.add_argument("--trust-remote-code", action="store_true", help="run the code in the checkpoint's folder")
    commands = result.add_subparsers(prog=f"whatwhere {COMMAND}", dest="command", required=True, metavar="COMMAND")
    one = commands.add_parser("frequencies", **about, help="norms of queries and keys per frequency and layer")
    add_own_text(one, "default: ten sonnets of Shakespeare")
    commands.add_parser("deltas", **about, help="the learned phase shifts of PoPE")
    one = commands.add_parser("maps", **about, help="gates, positions and attention of CoPE on a text")
    add_own_text(one, "default: a short article in English")
    one.add_argument("--tokens", type=int, default=128, metavar="N", help="maximum number (default %(default)s)")
    one.add_argument("--layers", type=parse_indices, metavar="LIST", help="such as 0,3,8-11; default: all")
    one.add_argument("--heads", type=parse_indices, metavar="LIST", help="such as 0,3,8-11; default: all")
    return result


def _check(options: argparse.Namespace) -> None:
    if options.command != "frequencies" and len(options.checkpoint) > 1:
        raise argparse.ArgumentTypeError(f"{options.command} takes one CHECKPOINT.")
