"""The code in a saved folder: Transformers copies all of it, and what the configuration does not need is removed."""

import os
import pathlib
from typing import Any

from transformers.dynamic_module_utils import get_relative_import_files

from .attention_choice import layer_default, layer_kernel, supported_implementations
from .position_plan import layer_plan, parse
from .position_registry import PARTS, POSITION_ENCODINGS

_DOCSTRING = '"""The table of what this folder has the code of; it has what its configuration needs."""'


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
    needed = needed_parts(model.config)
    parts = {name: part for name, part in PARTS.items() if name in needed}
    registry.write_text(registry_source(known, parts), encoding="utf-8")
    for unused in code_files(own, model) - code_files(folder, model):
        (folder / unused).unlink(missing_ok=True)


def needed_parts(config: Any) -> set[str]:
    """Returns the keys of `PARTS` that a configuration needs."""
    plan = layer_plan(config)
    needed = {*supported_implementations(config), *map(layer_default, plan)}
    if any(layer_kernel(parts) for parts in plan):
        needed.add("triton")
    if any(cls.overrides("bias") and cls.block_bias is None for parts in plan for cls, _ in parts):
        needed.add("autograd")
    if config.attention_options:
        needed.add("options")
    return needed


def registry_source(encodings: list[Any], parts: dict[str, Any]) -> str:
    """Returns the text of a `position_registry.py` with these encodings and parts."""
    names: dict[str, set[str]] = {}
    for one in (*encodings, *parts.values()):
        names.setdefault(one.__module__.rpartition(".")[2], set()).add(one.__name__)
    return "\n".join(
        (
            _DOCSTRING,
            "",
            *(f"from .{module} import {', '.join(sorted(names[module]))}" for module in sorted(names)),
            "",
            "COMPLETE = False",
            "",
            f"POSITION_ENCODINGS = {{cls.name: cls for cls in ({', '.join(cls.__name__ for cls in encodings)},)}}",
            "",
            "PARTS = {",
            *(f'    "{name}": {part.__name__},' for name, part in parts.items()),
            "}",
            "",
        )
    )
