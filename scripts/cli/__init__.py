"""The command `whatwhere`, which imports and runs a sub-command.

It is imported as `whatwhere_cli`: the import of the package, which registers the models with the Auto classes, takes
seconds. The parsers of the sub-commands lie beside this file, for the same reason.
"""

import difflib
import importlib
import importlib.metadata
import io
import os
import signal
import sys

# Group, name, what it does, example, module. Each module has `main(arguments)`, which returns an exit status or None.
COMMANDS = (
    ("train", "train", "train a model from a recipe", "demo_rope", "commands.train"),
    ("train", "prepare", "tokenise the text of a recipe", "demo_rope --processes 8", "commands.prepare"),
    ("train", "plan", "memory, FLOPs and time of a recipe", "llama_7b --devices 64", "commands.plan"),
    ("train", "finetune", "fine-tune a checkpoint", "demo/pope --output runs/tuned", "commands.finetune"),
    (
        "train",
        "convert",
        "another encoding for a pretrained model",
        "gpt2 --position-encoding cope --output out",
        "commands.convert",
    ),
    ("train", "demo", "train three small models and compare them", "--steps 100", "commands.demo"),
    ("evaluate", "length", "perplexity beyond the trained length", "demo/rope demo/pope", "evaluation.length"),
    ("evaluate", "zero-shot", "zero-shot tasks, by lm-eval", "demo/pope --limit 100", "evaluation.zero_shot"),
    ("evaluate", "task", "error rates on a toy task", "runs/flip_flop", "evaluation.task"),
    ("compare", "compare", "results of models side by side", "runs/rope runs/pope", "commands.compare"),
    ("compare", "reproduce", "a table of the papers and our results", "cope_2 --small", "commands.reproduce"),
    ("compare", "analysis", "figures of frequencies, phases and gates", "maps runs/cope", "commands.analysis"),
    ("compare", "card", "model cards of trained models", "runs/rope runs/pope", "commands.card"),
    ("share", "push", "model, card and results to the Hub", "runs/pope you/pope --private", "commands.push"),
    ("kernels", "benchmark", "speed and memory of attention and models", "--quick", "benchmark.command"),
    ("kernels", "gpu-check", "check the kernels on a GPU, then time them", "--output gpu", "commands.gpu_check"),
    ("kernels", "kernel-hub", "the kernels for Hugging Face's Kernel Hub", "attention --build", "commands.kernel_hub"),
)
_HELP = ("-h", "--help", "help")
_MODULES = {name: module for _, name, _, _, module in COMMANDS}


def help_text() -> str:
    """Returns the help: a line for each sub-command, with an example."""
    lines = ["usage: whatwhere COMMAND [OPTIONS]", "", "Position encodings for Hugging Face Transformers."]
    group = None
    for title, name, summary, example, _ in COMMANDS:
        if title != group:
            lines += ["", f"{title}:"]
            group = title
        lines.append(f"  {name:<10} {summary:<43} whatwhere {name} {example}")
    lines += [
        "",
        "`whatwhere --import FILE COMMAND` registers position encodings of your own: docs/own_encodings.md",
        "`whatwhere COMMAND --help` describes a command. On several GPUs: accelerate launch -m whatwhere train RECIPE",
    ]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns its exit status."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal or a pipe that lacks a character must not fail a command whose work is done.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # The reader closed the pipe, as `head` does. Without this, Python prints a traceback when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        # Help is complete without its end; else the status of a process that a closed pipe stops.
        return 0 if not arguments or arguments[0] in _HELP else 128 + getattr(signal, "SIGPIPE", 13)
    except KeyboardInterrupt:
        # While libraries are imported; a command itself says how to go on.
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in _HELP:
        print(help_text())
        return 0
    files: list[str] = []
    while arguments[0] == "--import":
        if len(arguments) < 3:
            sys.exit("error: --import FILE is followed by a command, as in: whatwhere --import my_bias.py train ...")
        files, arguments = [*files, arguments[1]], arguments[2:]
    name, *rest = arguments
    if name == "--version":
        print(importlib.metadata.version("whatwhere"))
        return 0
    if name not in _MODULES:
        # Without the package's `suggest`, so that the answer comes at once.
        near = difflib.get_close_matches(name.lower(), _MODULES, n=1)
        meant = f"Did you mean {near[0]!r}? " if near else ""
        sys.exit(f"error: command={name!r} is not valid. {meant}Allowed: {', '.join(map(repr, sorted(_MODULES)))}.")
    if "--import" in rest:
        sys.exit(f"error: --import FILE goes before the command, as in: whatwhere --import my_bias.py {name} ...")
    # Before the package is imported: mistakes are found, and help is printed, at once.
    try:
        importlib.import_module(f"whatwhere_cli.{name.replace('-', '_')}").parser().parse_args(rest)
    except ValueError as error:
        sys.exit(f"error: {error}")
    from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
    from transformers.utils import logging

    from whatwhere.scripts.errors import reported

    # Those of loading weights say nothing to a user; this also disables those of downloads.
    downloads = sys.stderr.isatty() and not are_progress_bars_disabled()
    logging.disable_progress_bar()
    if downloads:
        enable_progress_bars()
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    with reported(name, rest):
        for file in files:
            importlib.import_module("whatwhere").import_position_encodings(file)
        status = importlib.import_module(f"whatwhere.scripts.{_MODULES[name]}").main(rest)
    # Without this, gloo's threads sometimes abort a process at its exit.
    distributed = sys.modules.get("torch.distributed")
    if distributed and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
    return status or 0
