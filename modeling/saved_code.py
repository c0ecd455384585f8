"""The code in a saved folder: Transformers copies all of it, and what the configuration does not need is removed."""

import os
import pathlib
from typing import Any

from transformers.dynamic_module_utils import get_relative_import_files

from .attention_choice import layer_default, layer_kernel, supported_implementations
from .position_plan import layer_plan, parse
from .position_registry import ATTENTION_FUNCTIONS, PARTS, POSITION_ENCODINGS

_DOCSTRING = '"""The tables of what this folder has the code of: what its configuration needs."""'


def code_files(folder: pathlib.Path, model: Any) -> set[str]:
    """Returns the names of the files in a folder that the model's own file imports, directly or not."""
    name = f"{type(model).__module__.rpartition('.')[2]}.py"
    return {os.path.basename(path) for path in get_relative_import_files(folder / name)}


def reduce_code(folder: pathlib.Path, model: Any) -> None:
    """Writes the registry of a saved folder, and removes the files that it does not need."""
    own = pathlib.Path(__file__).parent
    registry = folder / "position_registry.py"
    # Never in the folder of this code.
    if not registry.is_file() or folder.samefile(own):
        return
    encodings = [cls for cls, _ in parse(model.config).values()]
    known = [cls for cls in POSITION_ENCODINGS.values() if cls in encodings]
    for cls in known:
        if cls.code is not None:
            name, text = cls.code
            (folder / name).write_text(text, encoding="utf-8")
    needed = _needed(model.config)
    functions = {name: function for name, function in ATTENTION_FUNCTIONS.items() if name in needed}
    parts = {name: part for name, part in PARTS.items() if name in needed}
    registry.write_text(registry_source(known, functions, parts), encoding="utf-8")
    for unused in code_files(own, model) - code_files(folder, model):
        (folder / unused).unlink(missing_ok=True)


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


def registry_source(encodings: list[Any], functions: dict[str, Any], parts: dict[str, Any]) -> str:
    """Returns the text of a `position_registry.py` with these encodings, attention functions and parts."""
    names: dict[str, set[str]] = {}
    for one in (*encodings, *functions.values(), *parts.values()):
        names.setdefault(one.__module__.rpartition(".")[2], set()).add(one.__name__)
    tables = {"ATTENTION_FUNCTIONS": functions, "PARTS": parts}
    lines = [f"from .{module} import {', '.join(sorted(names[module]))}" for module in sorted(names)]
    lines += ["", "COMPLETE = False", "", "POSITION_ENCODINGS = {"]
    lines += [f'    "{cls.name}": {cls.__name__},' for cls in encodings]
    for table, entries in tables.items():
        lines += ["}", "", f"{table} = {{", *(f'    "{name}": {part.__name__},' for name, part in entries.items())]
    return "\n".join([_DOCSTRING, "", *lines, "}", ""])
