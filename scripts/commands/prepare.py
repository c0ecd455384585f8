"""`whatwhere prepare`: see `data/prepared.py`."""

import shlex
import time

from whatwhere_cli.prepare import parser

from ..errors import program
from .run_options import recipe_of


def main(arguments: list[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    from ..data.prepared import MixedBlocks, PreparedText
    from ..training.data import load_data

    if options.processes is not None and options.processes < 1:
        raise ValueError(f"--processes={options.processes!r} is not valid: it must be at least 1.")
    recipe = recipe_of(options)
    if recipe.data.source == "task" or recipe.data.streaming:
        field = "streaming=True" if recipe.data.streaming else "source='task'"
        advice = " Use --set data.streaming=false, also with `whatwhere train`." if recipe.data.streaming else ""
        reason = "streams" if recipe.data.streaming else "samples of tasks, which are generated,"
        raise ValueError(f"data.{field} is not valid: {reason} cannot be prepared.{advice}")
    data = load_data(recipe, options.data_dir, processes=options.processes)
    parts = [
        (split, part)
        for split, blocks in {"train": data.batches.blocks, **data.held_out}.items()
        for part in (blocks.parts if isinstance(blocks, MixedBlocks) else [blocks])
    ]
    for split, blocks in parts:
        started = time.monotonic()
        text = PreparedText(blocks.text.folder, verify=True)
        size = sum(file.stat().st_size for file in text.folder.iterdir())
        print(
            f"{split}: {text.tokens:,} tokens of {text.documents:,} documents, {size / 1e6:,.1f} MB in "
            f"{str(text.folder)!r}, verified in {time.monotonic() - started:.1f} s"
        )
    again = [options.recipe, *(text for one in options.set for text in ("--set", one))]
    for option, values in (
        ("--train-file", options.train_file),
        ("--validation-file", options.validation_file),
        ("--data-dir", options.data_dir and [options.data_dir]),
    ):
        again += [option, *values] if values else []
    print(f"Next: {shlex.join([*program(), 'train', *again])}")
