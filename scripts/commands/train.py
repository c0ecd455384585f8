"""`whatwhere train`: see `training/loop.py`."""

import argparse
import itertools
import os
import shlex
import sys
from pathlib import Path

from transformers import AutoConfig

from whatwhere.model_card import encoding_text
from whatwhere_cli.train import parser

from .run_options import continued, ending, recipe_of


def main(arguments: list[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    if options.encodings or options.seeds:
        _several(options, sys.argv[1:] if arguments is None else arguments)
        return
    from ..cards.folder import card_of_run
    from ..training.loop import TrainingRun, train
    from ..training.run_folder import RunFolder

    if options.recipe is None:
        folder = RunFolder(Path(options.output), TrainingRun.record)
        folder.settings()
        options.recipe = folder.path / folder.record
    recipe = recipe_of(options)
    output = options.output or os.path.join("runs", recipe.name)
    resume = {"resume": options.resume, "resume_from": options.resume_from}
    with continued(output, TrainingRun.record, options.data_dir), card_of_run(output):
        results = train(recipe, output, **resume, data_dir=options.data_dir, arguments=arguments)
    if results:
        trained = encoding_text(AutoConfig.from_pretrained(output).position_encoding)
        if best := results.get("kept"):
            trained += f", the model of step {best['step']:,}"
        is_task = "task" in results["data"]
        print(ending(output, trained, results, {"": "metrics"}, following="task" if is_task else "length"))


def _several(options: argparse.Namespace, arguments: list[str]) -> None:
    """Trains each encoding with each seed, and compares the runs; those that are finished stay as they are."""
    from ..errors import Interrupted, program
    from ..processes import is_first_process
    from ..training.model import build_config
    from .compare import main as compare

    output = Path(options.output or os.path.join("runs", recipe_of(options).name))
    own = [options.recipe, *(word for one in options.set for word in ("--set", one)), "--resume", "auto"]
    for name in ("train_file", "validation_file"):
        if given := getattr(options, name):
            own += [f"--{name.replace('_', '-')}", *given]
    own += [] if options.data_dir is None else ["--data-dir", options.data_dir]
    runs = {}
    for encoding, seed in itertools.product(options.encodings or [None], options.seeds or [None]):
        sets = {"model.position_encoding": encoding, "seed": seed}
        chosen = [word for key, value in sets.items() if value is not None for word in ("--set", f"{key}={value}")]
        name = "-".join([*([encoding] if encoding else []), *([] if seed is None else [f"seed{seed}"])])
        runs[str(output / name)] = [*own, *chosen]
    # A mistake in the last of them is found before the first is trained.
    for run in runs.values():
        build_config(recipe_of(parser().parse_args(run)))
    for number, (folder, run) in enumerate(runs.items(), 1):
        if is_first_process():
            print(f"{folder} ({number} of {len(runs)})", file=sys.stderr)
        try:
            main([*run, "--output", folder])
        except Interrupted as stop:
            stop.arguments = arguments
            raise
    if len(runs) > 1 and is_first_process():
        compare([*runs, "--output", str(output / "comparison")])
        print(f"Next: {shlex.join([*program(), 'length', *runs, '--output', str(output / 'comparison')])}")
