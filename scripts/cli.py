"""The command `whatwhere`: finds the sub-command and runs it. Nothing is imported before it is needed."""

import difflib
import importlib
import sys
from typing import Any

from .extras import explain

# Group, name, what it does, example, module. Each module has `main(arguments)`.
COMMANDS = (
    ("train", "train", "train a model from a recipe", "demo_rope", "commands.train"),
    ("train", "finetune", "fine-tune a checkpoint", "demo/pope --output runs/tuned", "commands.finetune"),
    ("train", "demo", "train three small models and compare them", "--steps 100", "commands.demo"),
    ("evaluate", "length", "perplexity beyond the trained length", "demo/rope demo/pope", "evaluation.length"),
    ("evaluate", "zero-shot", "zero-shot tasks, by lm-eval", "demo/pope --limit 100", "evaluation.zero_shot"),
    ("evaluate", "task", "error rates on a toy task", "runs/flip_flop", "evaluation.task"),
    ("compare", "reproduce", "a table of the papers beside our results", "cope_2 --small", "commands.reproduce"),
    ("compare", "analysis", "figures of frequencies, phases and gates", "maps runs/cope", "analysis.__main__"),
    ("compare", "card", "model cards of trained models", "runs/rope runs/pope", "cards.command"),
    ("kernels", "benchmark", "speed and memory of attention and models", "--quick", "benchmark.__main__"),
    ("kernels", "gpu-check", "check the kernels on a GPU, then time them", "--no-benchmark", "gpu_check"),
)
_MODULES = {name: module for _, name, _, _, module in COMMANDS}


def help_text() -> str:
    """Returns the help of the command: a line for each sub-command, with its example."""
    lines = ["usage: whatwhere COMMAND [OPTIONS]", "", "Position encodings for Hugging Face Transformers."]
    group = None
    for title, name, summary, example, _ in COMMANDS:
        if title != group:
            lines += ["", f"{title}:"]
            group = title
        lines.append(f"  {name:<10} {summary:<43} whatwhere {name} {example}")
    lines += [
        "",
        "`whatwhere COMMAND --help` explains a command. On several GPUs: accelerate launch -m whatwhere train RECIPE",
    ]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> Any:
    """Runs the command line; returns what the sub-command returns, its exit status or None."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(help_text())
        return None
    name, *rest = arguments
    if name not in _MODULES:
        near = difflib.get_close_matches(name, _MODULES, n=1)
        hint = f"Did you mean {near[0]!r}? " if near else ""
        sys.exit(f"error: command={name!r} is not valid. {hint}Allowed: {', '.join(_MODULES)}.")
    try:
        return importlib.import_module(f"whatwhere.scripts.{_MODULES[name]}").main(rest)
    except ImportError as error:
        sys.exit(f"error: {explain(error)}")
