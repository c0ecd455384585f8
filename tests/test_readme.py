"""Every snippet of README.md is executed, and its table is the list of encodings."""

import ast
import importlib
import pathlib
import re
import shlex

import pytest
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

import whatwhere
from tiny import tiny_model
from whatwhere.position_registry import COMBINATIONS, POSITION_ENCODINGS, supported_implementations
from whatwhere.scripts import cli

README = (pathlib.Path(__file__).parent.parent / "README.md").read_text()


# The modules of the sub-commands that README names.
SUBCOMMANDS = {
    "length": "evaluation.length",
    "zero-shot": "evaluation.zero_shot",
    "task": "evaluation.task",
    "card": "cards.command",
}


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


def test_python_snippets_run(tmp_path, monkeypatch):
    # The two checkpoints that the text names, and the one call that needs a network.
    monkeypatch.chdir(tmp_path)
    tiny_model("llama", "pope").save_pretrained("demo/pope")
    GPT2LMHeadModel(GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=4)).save_pretrained("openai-community/gpt2")
    pushed = []
    monkeypatch.setattr(PreTrainedModel, "push_to_hub", lambda self, name: pushed.append((name, self)))
    names = {}
    for code in blocks("python"):
        exec(compile(code, "README.md", "exec"), names)
    assert (tmp_path / "my-pope" / "README.md").exists()
    assert [name for name, _ in pushed] == ["you/your-model"]
    assert names["model"].config.position_encoding == "cope"


def commands():
    lines = "".join(blocks("bash")).splitlines()
    return [shlex.split(line, comments=True) for line in lines]


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_commands_exist_and_take_these_options(command, capsys):
    if command[0] == "make":
        makefile = (pathlib.Path(__file__).parent.parent / "Makefile").read_text()
        assert re.search(rf"^{command[1]}:", makefile, flags=re.MULTILINE)
        return
    if command[0] == "lm_eval":
        importlib.import_module("lm_eval.__main__")
        return
    if "whatwhere" in command:
        start = command.index("whatwhere") + 1
        main, arguments = cli.main, [command[start], "--help"]
    else:
        start = command.index("-m") + 1
        main, arguments = importlib.import_module(command[start]).main, ["--help"]
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    for option in (word for word in command[start:] if word.startswith("--")):
        assert option in text
    # A backslash that is lost at the end of a line leaves the next line's indentation inside a command.
    assert not re.search(r"\S {6,}--", text)


def test_the_table_is_the_list():
    rows = re.findall(r"^\| `(.+?)` \| (.*?) \| (.*?) \| (.*?) \|$", README, flags=re.MULTILINE)
    expected = [
        (
            name,
            cls.summary,
            cls.paper,
            ", ".join(supported_implementations(whatwhere.WhatWhereLlamaConfig(position_encoding=name))),
        )
        for name, cls in POSITION_ENCODINGS.items()
    ]
    assert [row for row in rows if row[0] in POSITION_ENCODINGS] == expected
    assert [row[0].split("`, `") for row in rows if "+" in row[0]] == [list(COMBINATIONS)]


def variants():
    """The encodings and parameters of the table of variants."""
    for row in re.findall(r"^\| .+? \| (`\w+`, `\{.*) \|$", README, flags=re.MULTILINE):
        name, *settings = re.findall(r"`(.+?)`", row)
        for text in settings:
            if text.startswith("{") and "..." not in text:
                yield name, ast.literal_eval(text)


@pytest.mark.parametrize(("name", "parameters"), list(variants()))
def test_variants_are_configurations(name, parameters):
    config = whatwhere.WhatWhereLlamaConfig(position_encoding=name, position_encoding_parameters=parameters)
    assert config.position_encoding_parameters.items() >= parameters.items()
