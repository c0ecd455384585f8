"""Every snippet of README.md and docs/ is executed, and the tables are those of the code."""

import ast
import importlib.util
import inspect
import pathlib
import re
import shlex
import sys

import pytest
from transformers import GPT2Config, GPT2LMHeadModel

import engine_matrix
import whatwhere
import whatwhere_cli as cli
from tiny import OLDER, tiny_model
from whatwhere.attention_choice import supported_implementations
from whatwhere.position_plan import COMBINATIONS
from whatwhere.position_registry import POSITION_ENCODINGS
from whatwhere.scripts.data.tokenize import build_tokenizer

ROOT = pathlib.Path(__file__).parent.parent
PAGES = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")))}


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGES[page], flags=re.MULTILINE | re.DOTALL)


def test_readme_is_short():
    assert len(PAGES["README.md"].splitlines()) <= 120


# Trainer pins memory on CPUs, too.
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true", "ignore:.*LeafSpec:FutureWarning")
# TRL uses names that this version of Transformers has deprecated.
@pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in:FutureWarning")
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")])
def test_python_snippets_run(page, tmp_path, monkeypatch):
    # The checkpoints that the text names.
    monkeypatch.chdir(tmp_path)
    tokenizer = build_tokenizer("bytes")
    for folder in ("demo/pope", "runs/pope"):
        tokenizer.save_pretrained(folder)
        tiny_model("llama", "pope", vocab_size=len(tokenizer)).save_pretrained(folder)
    GPT2LMHeadModel(GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=4)).save_pretrained("openai-community/gpt2")
    # What docs/own_encodings.md imports and registers is forgotten at the end.
    for table, name in ((POSITION_ENCODINGS, "t5"), (sys.modules, "t5_bias")):
        monkeypatch.setitem(table, name, None)
        del table[name]
    monkeypatch.syspath_prepend(tmp_path)
    if page == "own_encodings.md":
        (tmp_path / "t5_bias.py").write_text(blocks(page, "python")[0])
    names = {}
    if page == "chat.md":
        pytest.importorskip("trl", reason="trl is not installed")
    if any("kernels import" in code for code in blocks(page, "python")):
        pytest.importorskip("kernels", reason="the package `kernels` is not installed: pip install kernels")
        cli.main(["kernel-hub", "attention", "--build"])
    for code in blocks(page, "python"):
        if OLDER and "generate_batch" in code:
            # An error, which test_engines_batching.py tests.
            continue
        if "transformers.exporters" in code and not importlib.util.find_spec("onnxruntime"):
            # `make test-engines` runs it.
            continue
        exec(compile(code, page, "exec"), names)
    if page == "README.md":
        assert (tmp_path / "my-pope" / "README.md").exists()


COMMANDS = sorted(
    {line for page in PAGES for block in blocks(page, "bash") for line in block.splitlines() if line.strip()}
)


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_exist_and_take_these_options(line, capsys):
    command = shlex.split(line, comments=True)
    if command[0].startswith("WHATWHERE_IMPORT="):
        # tests/test_own_encodings.py tests the variable.
        assert command[1:] == ["vllm", "serve", "my-t5"]
        return
    if command[0] == "make":
        makefile = (ROOT / "Makefile").read_text()
        assert re.search(rf"^{command[1]}:", makefile, flags=re.MULTILINE)
        return
    if command[0] == "transformers":
        module = importlib.import_module(f"transformers.cli.{command[1]}")
        parameters = inspect.signature(getattr(module, command[1].capitalize())).parameters
        assert {word[2:].replace("-", "_") for word in command if word.startswith("--")} <= set(parameters)
        return
    if command[0] == "pip":
        (extra,) = re.findall(r"\.\[(\w+)\]", line) or [None]
        assert extra is None or re.search(rf"^{extra} = \[", (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)
        return
    if command[0] == "vllm":
        # tests/test_vllm.py runs it, where it is installed.
        assert command[1:] == ["serve", "FOLDER", "--trust-remote-code"]
        return
    if command[0] == "lm_eval":
        importlib.import_module("lm_eval.__main__")
        return
    start = command.index("whatwhere") + 1
    start += 2 * (command[start] == "--import")
    with pytest.raises(SystemExit) as stopped:
        cli.main([command[start], "--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    for option in (word for word in command[start:] if word.startswith("--")):
        assert option in text
    # A backslash that is lost at the end of a line leaves the next line's indentation inside a command.
    assert not re.search(r"\S {6,}--", text)


def test_links_lead_somewhere():
    for page, text in PAGES.items():
        folder = ROOT if page == "README.md" else ROOT / "docs"
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
            assert target.startswith("https://") or (folder / target).exists(), (page, target)


def test_the_diagram_of_a_forward_pass_names_files_that_exist():
    spec = importlib.util.spec_from_file_location("diagrams", ROOT / "docs" / "diagrams.py")
    diagrams = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(diagrams)
    names = {name for files, *_ in diagrams.BOXES.values() for name in files} - {"..."}
    assert [name for name in names if not (ROOT / "modeling" / name).is_file()] == []
    assert {name for arrow in diagrams.ARROWS for name in arrow} == set(diagrams.BOXES)


def test_the_example_page_is_small_and_of_no_machine():
    path = ROOT / "docs" / "maps_example.html"
    assert path.stat().st_size < 1_000_000
    text = path.read_text(encoding="utf-8")
    assert "What <span" in text
    assert not re.search(r"/(home|root|tmp|work|Users)/", text)


def test_the_table_is_the_list():
    rows = re.findall(r"^\| `(.+?)` \| (.*?) \| (.*?) \| (.*?) \|$", PAGES["encodings.md"], flags=re.MULTILINE)
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


def test_the_table_of_engines_is_the_matrix():
    _, _, after = PAGES["engines.md"].partition(engine_matrix.START)
    assert after.partition(engine_matrix.END)[0] == engine_matrix.text(), "run `make engines`"
    for name, engine in engine_matrix.ENGINES.items():
        # Without a test, this raises an error.
        engine_matrix.test_of(name)
        cells = {engine.cell(encoding) for encoding in whatwhere.list_position_encodings()}
        assert ("not run here" in cells) == (engine.elsewhere is not None)
        assert set(engine.cells) <= set(whatwhere.list_position_encodings())


def variants():
    """The encodings and parameters of the table of variants."""
    for row in re.findall(r"^\| .+? \| (`\w+`, `\{.*) \|$", PAGES["variants.md"], flags=re.MULTILINE):
        name, *settings = re.findall(r"`(.+?)`", row)
        for text in settings:
            if text.startswith("{") and "..." not in text:
                yield name, ast.literal_eval(text)


@pytest.mark.parametrize(("name", "parameters"), list(variants()))
def test_variants_are_configurations(name, parameters):
    config = whatwhere.WhatWhereLlamaConfig(position_encoding=name, position_encoding_parameters=parameters)
    assert config.position_encoding_parameters.items() >= parameters.items()
