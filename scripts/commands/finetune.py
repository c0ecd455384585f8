"""`whatwhere finetune`: see `training/finetune.py`."""

import argparse
import typing
from pathlib import Path

from whatwhere.model_card import encoding_text

from ..cards.folder import card_of_run
from ..checks import parse
from ..parsers import command_parser, json_value, name_or_list
from ..training.finetune import FinetuneSettings, Finetuning, finetune
from ..training.run_folder import RunFolder
from .run_options import add_resume, check_data_dir, continued, ending, is_resumed

DESCRIPTION = """Fine-tune CHECKPOINT, a folder or Hub id: ours, Llama, Mistral, Phi-3, Qwen2, Qwen3, SmolLM3 or GPT-2.

On your own text:    whatwhere finetune demo/pope --train-file mytext/*.txt --output runs/mine
GPT-2 with CoPE:     whatwhere finetune openai-community/gpt2 --position-encoding cope --lora --merge --output runs/cope
After Ctrl-C, SIGTERM or SIGUSR1, which write a checkpoint: whatwhere finetune --output runs/mine --resume"""


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line; options that are not given get the defaults of `FinetuneSettings`."""
    result = command_parser(
        "finetune", "CHECKPOINT --output DIR [OPTIONS]", DESCRIPTION, argument_default=argparse.SUPPRESS
    )
    result.add_argument("--output", required=True, metavar="DIR", help="the folder of the run")
    add_resume(result)
    result.add_argument("--data-dir", default=None, metavar="DIR", help="local data; default $WHATWHERE_DATA_DIR")
    for name, field in FinetuneSettings.model_fields.items():
        option, text = "--" + name.replace("_", "-"), field.description
        # The type itself, or the first of a union with None.
        kind = (*typing.get_args(field.annotation), field.annotation)[0]
        kind = getattr(kind, "__origin__", kind)
        if field.is_required():
            result.add_argument(name, nargs="?", help=argparse.SUPPRESS)
        elif field.annotation is bool:
            result.add_argument(option, action="store_true", help=text)
        elif name == "position_encoding":
            result.add_argument(option, type=name_or_list, metavar="NAME", help=text)
        elif kind is dict or name == "mixture":
            result.add_argument(option, type=json_value, metavar="JSON", help=text)
        elif kind is list:
            result.add_argument(option, nargs="+", metavar="FILE", help=text)
        else:
            kind = kind if kind in (int, float) else str
            result.add_argument(option, type=kind, metavar={int: "N", float: "X", str: "NAME"}[kind], help=text)
    return result


def settings_of(options: argparse.Namespace) -> FinetuneSettings:
    """Returns the settings of a run; raises ValueError with all problems. Without CHECKPOINT, they continue a run."""
    others = ("output", "resume", "resume_from", "data_dir")
    values = {key: value for key, value in vars(options).items() if key not in others}
    if "checkpoint" not in values:
        if not is_resumed(options):
            raise ValueError("no CHECKPOINT is given: name a folder or a Hub id.")
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
