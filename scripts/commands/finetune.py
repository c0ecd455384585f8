"""`whatwhere finetune`: see `training/finetune.py`."""

import argparse
from pathlib import Path

from whatwhere.model_card import encoding_text
from whatwhere_cli.finetune import parser

from ..cards.folder import card_of_run
from ..checks import parse
from ..training.finetune import FinetuneSettings, Finetuning, finetune
from ..training.run_folder import RunFolder
from .run_options import check_data_dir, continued, ending


def settings_of(options: argparse.Namespace) -> FinetuneSettings:
    """Returns the settings of a run; raises ValueError with all problems. Without CHECKPOINT, they continue a run."""
    others = ("output", "resume", "resume_from", "data_dir")
    values = {key: value for key, value in vars(options).items() if key not in others}
    if "checkpoint" not in values:
        saved = RunFolder(Path(options.output), Finetuning.record).settings()
        # Of earlier versions; a run with `distill_from` is refused as one with other settings.
        values = {**{key: saved[key] for key in saved if key not in ("distill", "distill_from")}, **values}
    found = [source for name, source in (("mixture", "mixture"), ("train_file", "local")) if values.get(name)]
    values.setdefault("data", (*found, "stdlib")[0])
    return parse(FinetuneSettings, values)


def main(arguments: list[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    settings = settings_of(options)
    check_data_dir(options.data_dir, settings.text(options.data_dir).texts())
    with continued(options.output, Finetuning.record, options.data_dir), card_of_run(options.output):
        results = finetune(
            settings,
            options.output,
            resume=options.resume,
            resume_from=options.resume_from,
            data_dir=options.data_dir,
            arguments=arguments,
        )
    if results:
        adapter = settings.lora and not settings.merge
        trained = f"{encoding_text(results['position_encoding'])}, {'adapter of' if adapter else 'from'} "
        trained += settings.checkpoint
        scores = {"before, ": "metrics_before", "after, ": "metrics"}
        print(ending(options.output, trained, results, scores, following=None if adapter else "length"))
