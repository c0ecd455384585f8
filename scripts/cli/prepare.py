"""The parser of `whatwhere prepare`."""

import argparse

from .options import add_recipe, check_recipe, command_parser

DESCRIPTION = """Tokenise the text of a recipe, by parallel processes, into files that training reads as memory maps.

    whatwhere prepare wikitext103 --processes 32
    whatwhere prepare demo_rope --train-file mytext/*.txt

`whatwhere train` does this too, if it was not done. Text is tokenised once for all runs with the same text and
tokenizer, into WHATWHERE_CACHE (default: beside the cache of `datasets`). Interrupted work continues. The command also
checks the SHA-256 of all files."""


def parser() -> argparse.ArgumentParser:
    result = command_parser("prepare", "RECIPE [OPTIONS]", DESCRIPTION, check=check_recipe)
    add_recipe(result)
    result.add_argument("--processes", type=int, metavar="N", help="number of processes; default: one for each core")
    return result
