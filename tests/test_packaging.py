"""What is installed, what may import what, and what must not be in the repository."""

import ast
import builtins
import contextlib
import graphlib
import importlib.util
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import zipfile

import pytest

import whatwhere
from processes import python
from whatwhere.pretrained_model import NEWEST_TESTED
from whatwhere.saved_code import FAMILIES, Part, in_order
from whatwhere.scripts.extras import EXTRAS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = pathlib.Path(__file__).resolve().parents[1]
MODELING = sorted((ROOT / "modeling").glob("*.py"))
CONFIGURATION = sorted((ROOT / "configuration").glob("*.py"))
SCRIPTS = sorted((ROOT / "scripts").rglob("*.py"))
# Every installation has these; anything else that may travel with a checkpoint is guarded by `try`.
CORE = {"huggingface_hub", "numpy", "safetensors", "torch", "transformers"}


def relative(path: pathlib.Path) -> str:
    return path.relative_to(ROOT).as_posix()


def tracked() -> list[pathlib.Path]:
    """The files of the repository: those that git tracks or would track."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True
    )
    if listing.returncode != 0:
        pytest.skip("not a git checkout")
    paths = [ROOT / name for name in listing.stdout.decode().split("\0") if name]
    return [path for path in paths if path.is_file()]


def imports(path: pathlib.Path) -> list[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Every import statement of a file, with True if a `try` guards it."""
    found = []

    def visit(node: ast.AST, guarded: bool) -> None:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found.append((node, guarded))
        for child in ast.iter_child_nodes(node):
            visit(child, guarded or (isinstance(node, ast.Try) and child in node.body))

    visit(ast.parse(path.read_text(encoding="utf-8")), False)
    return found


def modules(node: ast.Import | ast.ImportFrom) -> list[str]:
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The folder of the sdist and the wheel, built from a copy of the repository, without isolation: no network."""
    source = tmp_path_factory.mktemp("source")
    for path in tracked():
        copy = source / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    python("-m", "build", "--no-isolation", cwd=source)
    return source / "dist"


@pytest.fixture(scope="module")
def wheel(distributions: pathlib.Path) -> list[str]:
    """The files of the wheel."""
    (path,) = distributions.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        return archive.namelist()


def test_distributions_can_be_uploaded(distributions: pathlib.Path) -> None:
    files = [str(path) for path in distributions.iterdir()]
    assert len(files) == 2
    assert all(f"whatwhere-{whatwhere.__version__}" in name for name in files)
    python("-m", "twine", "check", "--strict", *files)


# Packages that are imported under another name.
NAMES = {
    "yaml": "pyyaml",
    "PIL": "pillow",
    "lm_eval": "lm-eval",
    "liger_kernel": "liger-kernel",
    "fla": "fla-core",
    "pydantic_core": "pydantic",
    "symusic": "miditok",
}


def test_every_import_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    core = {re.split(r"[>=<; ]", line)[0].lower() for line in project["dependencies"]}
    extras = {
        re.split(r"[>=<;\[ ]", line)[0].lower() for lines in project["optional-dependencies"].values() for line in lines
    }
    for path in (*MODELING, *CONFIGURATION, *SCRIPTS):
        for node, _ in imports(path):
            if isinstance(node, ast.ImportFrom) and node.level:
                continue
            for root in {module.split(".")[0] for module in modules(node)} - set(sys.stdlib_module_names):
                name = NAMES.get(root, root).lower()
                assert root in ("whatwhere", "whatwhere_cli") or name in core | extras, (
                    f"{relative(path)} imports {root}"
                )


def test_every_import_of_an_extra_has_advice() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for extra in ("train", "eval", "music"):
        for line in extras[extra]:
            package = re.split(r"[>=<;\[ ]", line)[0].lower()
            names = [package, *(module for module, name in NAMES.items() if name == package)]
            assert extra in {EXTRAS.get(name) for name in names}, package


def test_range_of_transformers() -> None:
    required = re.search(r"transformers>=[\d.]+,<\d+", (ROOT / "pyproject.toml").read_text(encoding="utf-8"))[0]
    source = (ROOT / "configuration" / "configuration_common.py").read_text(encoding="utf-8")
    assert f'require_version("{required}"' in source


def test_wheel_has_no_tests(wheel: list[str]) -> None:
    assert not [name for name in wheel if "test" in "/".join(name.split("/")[1:2])]


def test_wheel_has_one_package_and_the_command(wheel: list[str]) -> None:
    top = {name.split("/")[0] for name in wheel}
    assert {name for name in top if not name.endswith(".dist-info")} == {"whatwhere", "whatwhere_cli"}


def test_wheel_holds_every_module_and_data_file(wheel: list[str]) -> None:
    expected = {f"whatwhere/{path.name}" for path in MODELING} | {"whatwhere/py.typed"}
    expected |= {f"whatwhere/configuration/{path.name}" for path in CONFIGURATION}
    expected |= {f"whatwhere/{relative(path)}" for path in SCRIPTS}
    expected |= {f"whatwhere/{relative(path)}" for path in tracked() if path.is_relative_to(ROOT / "scripts")}
    # The command is a package of its own.
    expected = {name.replace("whatwhere/scripts/cli/", "whatwhere_cli/") for name in expected}
    assert expected <= set(wheel), f"missing from the wheel: {sorted(expected - set(wheel))}"


@pytest.mark.parametrize("name", ["modeling", "configuration"])
def test_the_folders_can_not_be_imported(name: str) -> None:
    done = subprocess.run([sys.executable, "-c", f"import {name}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert re.fullmatch(r"ImportError: import this package as `whatwhere[^`]*`.*", last), done.stderr


def test_import_beside_a_clone(tmp_path: pathlib.Path) -> None:
    # Python takes a folder of this name for a package if the installed one is found by a hook of imports only.
    (tmp_path / "whatwhere" / "modeling").mkdir(parents=True)
    assert python("-c", "import whatwhere; print(whatwhere.__version__)", cwd=tmp_path) == f"{whatwhere.__version__}\n"


def test_modeling_is_flat() -> None:
    folders = {path.name for path in (ROOT / "modeling").iterdir() if path.is_dir()}
    assert folders <= {"__pycache__"}


# No file that travels imports the command or the plugin for vLLM.
STAY = (
    "__main__.py",
    "position_registration.py",
    "vllm_attention.py",
    "vllm_check.py",
    "vllm_models.py",
    "vllm_plugin.py",
)


@pytest.mark.parametrize("path", [*(p for p in MODELING if p.name not in STAY), *CONFIGURATION], ids=relative)
def test_imports_of_files_that_travel_with_a_checkpoint(path: pathlib.Path) -> None:
    siblings = {p.stem for p in path.parent.glob("*.py")}
    travels = path.name != "__init__.py" and not (
        path.parent.name == "modeling" and path.name.startswith("configuration_whatwhere_")
    )
    for node, guarded in imports(path):
        where = f"{relative(path)}:{node.lineno}: `{ast.unparse(node)}`"
        if isinstance(node, ast.ImportFrom) and node.level:
            assert node.level == 1, f"{where} leaves the folder"
            assert node.module in siblings, f"{where}: write `from .name import X`"
            continue
        for module in modules(node):
            root = module.split(".")[0]
            if root == "whatwhere":
                assert not travels, f"{where}: a checkpoint's code does not know the package"
                assert not module.startswith("whatwhere.scripts"), f"{where}: models do not import scripts"
            elif root not in CORE and root not in sys.stdlib_module_names:
                assert guarded, f"{where}: not in every installation; guard it with try"


def travelling(folder: str) -> list[Part]:
    """The parts of which the files of saved folders are made."""
    if folder == "modeling":
        return in_order(pathlib.Path(whatwhere.__file__).parent, *FAMILIES)
    names = [name.replace("modeling", "configuration") for name in FAMILIES]
    return in_order(pathlib.Path(whatwhere.configuration.__file__).parent, *names)


def test_what_travels() -> None:
    stay = {*STAY, "__init__.py", "continuous_batching.py", "saved_code.py"}
    expected = {path.stem for path in MODELING if path.name not in stay}
    expected -= {name.replace("modeling", "configuration") for name in FAMILIES}
    assert {part.name for part in travelling("modeling")} == expected


def test_names_are_unique_among_the_parts_of_a_saved_file() -> None:
    found: dict[str, str] = {}
    for part in (*travelling("modeling"), *travelling("configuration")):
        for name in part.names - {"logger"}:
            assert name not in found, f"{part.name} and {found[name]} define {name}"
            assert not hasattr(builtins, name), f"{part.name} defines {name}, which is a builtin"
            found[name] = part.name


@pytest.mark.parametrize("folder", ["modeling", "configuration"])
def test_imports_have_one_meaning_in_a_saved_file(folder: str) -> None:
    parts, meaning = travelling(folder), dict[str, str]()
    defined = {name for part in parts for name in part.names}
    for part in parts:
        # Imports inside functions and `try` stay where they are.
        for node in part.imports:
            for one in node.names:
                name = one.asname or one.name.partition(".")[0]
                full = f"{node.module}.{one.name}" if isinstance(node, ast.ImportFrom) else one.name
                full = name if isinstance(node, ast.Import) and one.asname is None else full
                assert name not in defined, f"{part.name} imports {name}, which a part defines"
                assert meaning.setdefault(name, full) == full, f"{part.name}: {name} is {meaning[name]} elsewhere"
        for node in ast.walk(part.tree):
            if isinstance(node, ast.ImportFrom) and node.level:
                assert all(one.asname is None for one in node.names), f"{part.name}: `{ast.unparse(node)}` is left out"


@pytest.mark.parametrize("path", SCRIPTS, ids=relative)
def test_scripts_do_not_import_the_folders(path: pathlib.Path) -> None:
    for node, _ in imports(path):
        if isinstance(node, ast.Import) or not node.level:
            wrong = {module.split(".")[0] for module in modules(node)} & {"modeling", "configuration", "scripts"}
            assert not wrong, f"{relative(path)}:{node.lineno} imports {wrong}: import `whatwhere`"


# Each folder of `scripts/` imports only those before it; the files outside the folders are the first.
FOLDERS = ["", "data", "toy_tasks", "evaluation", "conversion", "training", "cards", "analysis"]
FOLDERS += ["benchmark", "reproduction", "commands", "cli"]


def import_graph() -> dict[pathlib.Path, set[pathlib.Path]]:
    """The files of the package that each file imports, inside functions, too."""
    folders = {"modeling": (), "configuration": ("configuration",), "scripts": ("scripts",)}
    paths = {}
    for path in (*MODELING, *CONFIGURATION, *SCRIPTS):
        folder, *parts = path.relative_to(ROOT).with_suffix("").parts
        parts = ["whatwhere", *folders[folder], *parts]
        paths[tuple(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    graph: dict[pathlib.Path, set[pathlib.Path]] = {}
    for own, path in paths.items():
        package = own if path.name == "__init__.py" else own[:-1]
        graph[path] = set()
        for node, _ in imports(path):
            level = node.level if isinstance(node, ast.ImportFrom) else 0
            start = package[: len(package) + 1 - level] if level else ()
            for module in modules(node):
                target = (*start, *filter(None, module.split(".")))
                names = [(*target, alias.name) for alias in node.names]
                files = [name for name in names if name in paths]
                # `from package import file` does not need the package's own names.
                needed = {*files, *([target] if len(files) < len(names) and target in paths else [])}
                graph[path] |= {paths[name] for name in needed - {own}}
    return graph


def test_no_circles_of_imports() -> None:
    graphlib.TopologicalSorter(import_graph()).prepare()


def test_folders_of_scripts_import_those_before_them() -> None:
    def place(path: pathlib.Path) -> int:
        folder, *rest = path.relative_to(ROOT / "scripts").parts
        return FOLDERS.index(folder if rest else "")

    for path, needed in import_graph().items():
        if path in SCRIPTS:
            wrong = [relative(other) for other in needed if other in SCRIPTS and place(other) > place(path)]
            assert not wrong, f"{relative(path)} imports {wrong}, of a later folder"


def test_evaluation_imports_nothing_that_it_does_not_use() -> None:
    code = "import sys, whatwhere.scripts.evaluation.length, whatwhere.scripts.evaluation.zero_shot\n"
    code += "import whatwhere.scripts.commands.compare, whatwhere.scripts.data.source\nprint(*sys.modules)"
    found = {name.removeprefix("whatwhere.scripts.") for name in python("-c", code).split()}
    unused = ["data.music", "data.genome", "toy_tasks", "conversion", "training", "cards", "analysis", "reproduction"]
    assert not found & {*unused, "matplotlib", "lm_eval"}


# Runs in a process of its own: finders that do not find the optional packages.
CORE_ONLY = """
import sys

HIDDEN = {"accelerate", "datasets", "evaluate", "lm_eval", "matplotlib", "peft", "triton"}

class Core:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in HIDDEN else self.finder.find_spec(name, path, target)

sys.meta_path[:] = [Core(finder) for finder in sys.meta_path]
import whatwhere

model = whatwhere.WhatWhereLlamaForCausalLM(
    whatwhere.WhatWhereLlamaConfig(
        vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
)
print(model.generate(model.dummy_inputs["input_ids"] % 11, max_new_tokens=2).shape[0])
"""


def test_the_core_runs_without_the_extras() -> None:
    assert int(python("-c", CORE_ONLY, cwd=os.path.sep).split()[-1]) > 0


def test_no_machine_paths_in_the_repository() -> None:
    here = re.escape(str(ROOT.parent))
    pattern = re.compile(rf"{here}/|/(?:home|Users|root|workspace|mnt)/\w|[A-Z]:\\\\Users")
    for path in tracked():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found = pattern.search(text)
        if path != pathlib.Path(__file__).resolve():
            assert not found, f"{relative(path)} names a path of one machine: {found and found.group()!r}"


BASE_INSTALL = """
import contextlib, importlib, io, json, sys

import whatwhere
import whatwhere_cli as cli

hidden, scripts = json.loads(sys.argv[1])
sys.modules.update(dict.fromkeys(hidden))
messages = {}
for script, arguments in scripts.items():
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            if "." in script:
                importlib.import_module("whatwhere.scripts." + script).main(arguments)
            else:
                cli.main([script, *arguments])
    except SystemExit as stop:
        messages[script] = said.getvalue().strip() + (stop.code if isinstance(stop.code, str) else "")
print(json.dumps(messages))
"""


def test_base_install_is_told_the_extra(tmp_path):
    """Missing modules give a one-line error. All scripts run in one process, which takes seconds to start."""
    from tiny import tiny_model
    from whatwhere.scripts.data.tokenize import build_tokenizer

    tiny_model("llama", "rope", vocab_size=257).save_pretrained(tmp_path / "CHECKPOINT")
    build_tokenizer("bytes").save_pretrained(tmp_path / "CHECKPOINT")
    hidden = ("accelerate", "datasets", "peft", "lm_eval", "evaluate", "matplotlib", "miditok", "symusic", "pyarrow")
    scripts = {
        "train": (["demo_rope"], "datasets", "train"),
        "finetune": (["x", "--output", "y"], "peft", "train"),
        "task": (["x"], "datasets", "train"),
        "demo": ([], "datasets", "train"),
        "length": (["x", "--data", "pg19"], "datasets", "train"),
        "zero-shot": (["CHECKPOINT"], "lm_eval", "eval"),
        "reproduce": (["cope_2", "--small", "--seeds", "1"], "datasets", "train"),
    }
    asked = json.dumps([hidden, {name: arguments for name, (arguments, _, _) in scripts.items()}])
    messages = json.loads(python("-c", BASE_INSTALL, asked, cwd=tmp_path).splitlines()[-1])
    for name, (_, module, extra) in scripts.items():
        message = str(messages.get(name))
        assert message.startswith("error: "), f"{name}: {message}"
        assert len(message.splitlines()) == 1, f"{name}: {message}"
        assert module in message, f"{name}: {message}"
        assert f'pip install "whatwhere[{extra}]"' in message, f"{name}: {message}"


def test_help_fits_a_screen(capsys):
    import whatwhere_cli as cli

    for words in ([], *([name] for _, name, *_ in cli.COMMANDS)):
        with contextlib.suppress(SystemExit):
            cli.main([*words, "--help"])
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) <= 50, words
        assert max(map(len, lines)) <= 120
        # An example.
        assert any(f"whatwhere {' '.join(words)}" in line for line in lines[2:]), words


def test_command(capsys):
    """Every sub-command has a module and a line of help with an example."""
    import whatwhere_cli as cli

    cli.main([])
    text = capsys.readouterr().out
    names = ["train", "prepare", "plan", "finetune", "convert", "demo", "length", "zero-shot", "task", "compare"]
    names += ["reproduce", "analysis", "card", "push", "benchmark", "gpu-check", "kernel-hub"]
    assert [name for _, name, *_ in cli.COMMANDS] == names
    for _, name, summary, example, module in cli.COMMANDS:
        assert f"whatwhere {name} {example}" in text
        assert summary in text
        assert importlib.util.find_spec(f"whatwhere.scripts.{module}")
    with pytest.raises(SystemExit, match=r"'trian'.*'train'"):
        cli.main(["trian"])


def test_the_list_of_commands_does_not_import_the_package():
    code = "import sys, whatwhere_cli; whatwhere_cli.main(['--help']); print({*sys.modules} & {'torch', 'whatwhere'})"
    assert python("-c", code).endswith("set()\n")


def test_closed_pipe():
    for arguments, status in (([], 0), (["--version"], 128 + signal.SIGPIPE)):
        read, write = os.pipe()
        os.close(read)
        # What the command `whatwhere` does; some packages print when the models are imported.
        command = [sys.executable, "-c", f"import sys, whatwhere_cli; sys.exit(whatwhere_cli.main({arguments}))"]
        done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
        os.close(write)
        assert (done.returncode, done.stderr) == (status, "")


def test_newest_tested_transformers():
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    (pinned,) = re.findall(r"^transformers==([\d.]+)", constraints, flags=re.MULTILINE)
    assert pinned.rpartition(".")[0] == NEWEST_TESTED
