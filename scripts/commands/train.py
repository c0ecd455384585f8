"""`whatwhere train`: see `training/loop.py`."""

import os
from pathlib import Path

from transformers import AutoConfig

from whatwhere.model_card import encoding_text
from whatwhere_cli.train import parser

from .run_options import continued, ending, recipe_of


def main(arguments: list[str] | None = None) -> None:
    options = parser().parse_args(arguments)
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
