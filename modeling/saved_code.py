"""The code of a saved folder: one file of the configuration and one of the model, made of the package's own files.

Each has the parts that the model needs, in the order of their imports, without the imports between them. Transformers
has copied every file before: these are removed. A folder's own code is not made again, but copied as it is.
"""

import ast
import dataclasses
import functools
import pathlib
import re
import sys
from collections.abc import Iterator
from typing import Any

from transformers.dynamic_module_utils import get_relative_import_files

from .attention_choice import layer_default, layer_kernel, supported_implementations
from .position_plan import layer_plan, parse
from .position_registry import ATTENTION_FUNCTIONS, PARTS, POSITION_ENCODINGS

FAMILIES = ("modeling_whatwhere_gpt2", "modeling_whatwhere_llama")
_MODELS = pathlib.Path(__file__).parent
_LINE_LENGTH = 120
_MODEL = '"""A model in one file: the parts of the package whatwhere that it needs, each under a heading."""'
_CONFIGURATION = '"""A configuration in one file: its parts in the package whatwhere, each under a heading."""'


@dataclasses.dataclass(frozen=True)
class Part:
    """A file of the package.

    Attributes:
        name: of its module.
        tree: its code.
        lines: its text.
    """

    name: str
    tree: ast.Module
    lines: list[str]

    @property
    def siblings(self) -> list[str]:
        """The modules beside it that it imports, inside functions, too."""
        return list(dict.fromkeys(str(node.module) for node in ast.walk(self.tree) if _is_relative(node)))

    @property
    def imports(self) -> list[ast.Import | ast.ImportFrom]:
        """The imports at its start that are not relative. What follows other statements stays where it is."""
        return [node for node in self._start() if not _is_relative(node)]

    @property
    def names(self) -> set[str]:
        """The names that it defines, without those that it imports."""
        return set(_defined(self.tree.body))

    def _start(self) -> Iterator[Any]:
        body = self.tree.body
        for node in body[1:] if ast.get_docstring(self.tree) is not None else body:
            if not isinstance(node, (ast.Import, ast.ImportFrom)):
                return
            yield node

    def text(self, present: set[str]) -> str:
        """Returns the text without imports, and without the assignments in `present`; it adds its own to them."""
        gone = {id(node): node for node in (*self._start(), *filter(_is_relative, ast.walk(self.tree)))}
        for node in self.tree.body:
            if isinstance(node, ast.Assign) and (code := ast.unparse(node)) in present:
                gone[id(node)] = node
            elif isinstance(node, ast.Assign):
                present.add(code)
        lines: list[str | None] = [*self.lines]
        for node in gone.values():
            # With the empty line after it.
            end = node.end_lineno + (node.end_lineno < len(lines) and not self.lines[node.end_lineno])
            lines[node.lineno - 1 : end] = [None] * (end - node.lineno + 1)
        kept = "\n".join(line for line in lines if line is not None).strip("\n")
        # As ruff formats: two empty lines before functions and classes, one before other code.
        docstring = re.match(r'""".*?"""\n*', kept, flags=re.DOTALL)
        if docstring is None:
            return kept
        rest = kept[docstring.end() :]
        space = "\n\n\n" if rest.startswith(("def ", "class ", "@")) else "\n\n"
        return docstring.group().rstrip("\n") + (space + rest if rest else "")


def _is_relative(node: ast.AST) -> bool:
    return isinstance(node, ast.ImportFrom) and node.level == 1


def _defined(body: list[Any]) -> Iterator[str]:
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name))
        elif isinstance(node, (ast.If, ast.Try)):
            yield from _defined([*node.body, *node.orelse])
            yield from _defined([one for handler in getattr(node, "handlers", ()) for one in handler.body])


@functools.cache
def read_part(folder: pathlib.Path, name: str) -> Part:
    """Reads a file of the package."""
    text = (folder / f"{name}.py").read_text(encoding="utf-8")
    return Part(name, ast.parse(text), text.split("\n"))


def in_order(folder: pathlib.Path, *names: str, registry: list[str] | None = None) -> list[Part]:
    """Returns modules and those that they import, directly or not, each after what it imports.

    Without the configuration, which is a file of its own. `registry`: what `position_registry` is to import.
    """
    found: dict[str, Part | None] = {}

    def visit(name: str) -> None:
        if name in found or (folder == _MODELS and name.startswith("configuration_")):
            return
        found[name] = None
        part = read_part(folder, name)
        for other in registry if registry is not None and name == "position_registry" else part.siblings:
            visit(other)
        del found[name]
        found[name] = part

    for name in names:
        visit(name)
    return [part for part in found.values() if part is not None]


@functools.cache
def definitions() -> dict[str, str]:
    """Returns the module of each name that a part of a model can define; a name has one module."""
    return {name: part.name for part in in_order(_MODELS, *FAMILIES) for name in part.names}


def merged(parts: list[Part], title: str, own: list[str], instead: dict[str, str]) -> str:
    """Returns the text of a file of parts.

    Args:
        parts: in their order.
        title: the docstring.
        own: lines that import other files of the folder.
        instead: the text of some parts, by their names.
    """
    plain, members = set(), dict[str, set[tuple[str, str | None]]]()
    for part in parts:
        for node in part.imports:
            pairs = [(one.name, one.asname) for one in node.names]
            if isinstance(node, ast.Import):
                plain.update(pairs)
            else:
                members.setdefault(str(node.module), set()).update(pairs)
    sections: tuple[list[str], list[str]] = [], []
    for module, name in sorted(plain, key=str):
        sections[not _is_standard(module)].append(f"import {module}" + f" as {name}" * (name is not None))
    for module, pairs in sorted(members.items()):
        sections[not _is_standard(module)].extend(_from_imports(module, pairs))
    head = [title, *("\n".join(lines) for lines in (*sections, own) if lines)]
    present: set[str] = set()
    blocks = [f"# ----- {part.name}.py -----\n{instead.get(part.name) or part.text(present)}" for part in parts]
    return "\n\n".join(head) + "\n\n" + "\n\n\n".join(blocks) + "\n"


def _is_standard(module: str) -> bool:
    return module.partition(".")[0] in sys.stdlib_module_names


def _from_imports(module: str, pairs: set[tuple[str, str | None]]) -> list[str]:
    """Returns statements, as ruff sorts and wraps them: one for the names, and one for each with another name."""
    names = sorted((name for name, other in pairs if other is None), key=_member)
    found = [([name], f"from {module} import {name} as {other}") for name, other in pairs if other is not None]
    if names:
        line = f"from {module} import {', '.join(names)}"
        if len(line) > _LINE_LENGTH:
            line = "\n".join([f"from {module} import (", *(f"    {name}," for name in names), ")"])
        found.append((names, line))
    return [line for _, line in sorted(found, key=lambda one: (_member(one[0][0]), one[1]))]


def _member(name: str) -> tuple[int, str, str]:
    """Constants, then classes, then the rest."""
    kind = 0 if name.isupper() and len(name) > 1 else 1 if name[0].isupper() else 2
    return kind, name.lower(), name


def configuration_code(cls: Any) -> str:
    """Returns the file of a class of configurations."""
    file = pathlib.Path(str(sys.modules[cls.__module__].__file__))
    return merged(in_order(file.parent, file.stem), _CONFIGURATION, [], {})


def model_code(family: str, config: Any) -> str:
    """Returns the file of a model, whose own module is `family`, for a configuration."""
    encodings = [cls for cls, _ in parse(config).values()]
    needed = _needed(config)
    tables = {
        "POSITION_ENCODINGS": {cls.name: cls for cls in POSITION_ENCODINGS.values() if cls in encodings},
        "ATTENTION_FUNCTIONS": {name: one for name, one in ATTENTION_FUNCTIONS.items() if name in needed},
        "PARTS": {name: one for name, one in PARTS.items() if name in needed},
    }
    imported, modules, text = [], {"position_base"}, ["COMPLETE = False", ""]
    for one in (one for table in tables.values() for one in table.values()):
        module = one.__module__.rpartition(".")[2]
        if (code := getattr(one, "code", None)) is None:
            modules.add(module)
        else:
            imported.append(f"from .{module} import {one.__name__}")
            modules.update(definitions()[name] for name in _own_names(code[1]))
    for table, entries in tables.items():
        kind = "type[PositionEncoding]" if table == "POSITION_ENCODINGS" else "Any"
        inside = "".join(f'\n    "{name}": {one.__name__},' for name, one in entries.items())
        text += [f"{table}: dict[str, {kind}] = {{{inside}" + "\n" * bool(inside) + "}", ""]
    docstring = '"""The tables of what this folder has the code of: what its configuration needs."""\n'
    registry = "\n".join([docstring, *sorted(imported), *[""] * bool(imported), *text]).rstrip("\n")
    parts = in_order(_MODELS, family, registry=sorted(modules))
    config_class = type(config).__name__
    own = [f"from .{family.replace('modeling', 'configuration', 1)} import {config_class}"]
    return merged(parts, _MODEL, own, {"position_registry": registry})


def _needed(config: Any) -> set[str]:
    """Returns names of what a configuration needs, among them keys of `ATTENTION_FUNCTIONS` and `PARTS`."""
    plan = layer_plan(config)
    needed = {*supported_implementations(config), *map(layer_default, plan)}
    if any(layer_kernel(parts) for parts in plan):
        needed.add("triton")
    if any(cls.overrides("bias") and cls.block_bias is None for parts in plan for cls, _ in parts):
        needed.add("autograd")
    if config.attention_options:
        needed.add("options")
    return needed


def _own_imports(text: str) -> list[ast.ImportFrom]:
    """Returns the imports of this package in a user's file: as its author, or this module, wrote them."""
    return [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom)
        and (node.level == 1 or (not node.level and str(node.module).startswith("whatwhere.")))
    ]


def _own_names(text: str) -> list[str]:
    return [one.name for node in _own_imports(text) for one in node.names]


def with_imports_from(module: str, text: str) -> str:
    """Returns a user's file with `from module import` in all imports of this package that are on one line."""
    lines = text.split("\n")
    for node in _own_imports(text):
        line = lines[node.lineno - 1].encode()
        rest = re.sub(rb"^from\s+\S+\s+import", f"from {module} import".encode(), line[node.col_offset :])
        lines[node.lineno - 1] = (line[: node.col_offset] + rest).decode()
    return "\n".join(lines)


def copied_files(family: str) -> set[str]:
    """Returns the names of the files that Transformers copies into a folder and that do not stay there."""
    files = {pathlib.Path(path).name for path in get_relative_import_files(_MODELS / f"{family}.py")}
    return {name for name in files if not name.startswith("configuration_")}


def check_folder(folder: pathlib.Path, family: str) -> None:
    """Raises FileExistsError for a folder with other code that Transformers would overwrite."""
    clash = sorted(name for name in copied_files(family) if (folder / name).exists())
    # A folder that was saved as many files has them all.
    if clash and not (folder / "position_registry.py").exists():
        raise FileExistsError(f"save_directory={str(folder)!r} has {clash!r}; the model's code needs these names.")


def write_configuration(folder: Any, config: Any) -> None:
    """Writes the file of a configuration."""
    file = pathlib.Path(folder) / f"{type(config).__module__.rpartition('.')[2]}.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(configuration_code(type(config)), encoding="utf-8")


def write_code(folder: pathlib.Path, family: str, config: Any) -> None:
    """Writes the code of a model, and removes what Transformers has copied."""
    for name in copied_files(family):
        (folder / name).unlink(missing_ok=True)
    write_configuration(folder, config)
    for cls, _ in parse(config).values():
        if cls.code is not None:
            (folder / cls.code[0]).write_text(with_imports_from(f".{family}", cls.code[1]), encoding="utf-8")
    (folder / f"{family}.py").write_text(model_code(family, config), encoding="utf-8")


def check_code(source: Any, config: Any) -> None:
    """Raises ValueError if a folder has another file of an encoding than the one that was imported under its name."""
    for name in config.encoding_names:
        if (code := POSITION_ENCODINGS[name].code) is None:
            continue
        file = pathlib.Path(source) / code[0]
        if file.is_file() and not _is_same(file.read_text(encoding="utf-8"), code[1]):
            raise ValueError(
                f"{str(source)!r} has another {file.name} than the one that was imported as {name!r}. Load it in a "
                "process of its own, with its own file."
            )


def _is_same(text: str, code: str) -> bool:
    try:
        return with_imports_from(".", text) == code
    except SyntaxError:
        return False
