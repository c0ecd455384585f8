"""Position encodings from outside of this package."""

import ast
import importlib.util
import inspect
import keyword
import pathlib
import sys
from typing import Any

from .position_base import PositionEncoding
from .position_registry import POSITION_ENCODINGS
from .saved_code import FAMILIES, definitions, with_imports_from

# What a saved folder may import beside its own files: Transformers needs PyTorch, NumPy and safetensors.
_LIBRARIES = {"torch", "transformers", "numpy", "safetensors"}
# Files that `import_position_encodings` has imported, as they were given.
imported_files: list[str] = []


def register_position_encoding(cls: type[PositionEncoding]) -> type[PositionEncoding]:
    """Makes `position_encoding=cls.name` valid in configurations, models, recipes and commands.

    The file that defines the class is saved with models that use it, so that they load elsewhere with
    `trust_remote_code=True`. It may import the standard library, PyTorch, NumPy, Transformers, safetensors, and modules
    of this package in the form `from whatwhere.position_base import PositionEncoding`. It is read now: later changes of
    the file do not change what is saved.

    Args:
        cls: a subclass of `PositionEncoding` with a `name`, `paper` and `summary`.

    Returns:
        The class.

    Raises:
        ValueError: the name is not valid or taken, or the file cannot be saved with models.
    """
    _check(cls)
    cls.code = _code(cls)
    POSITION_ENCODINGS[cls.name] = cls
    return cls


def import_position_encodings(path: str) -> list[type[PositionEncoding]]:
    """Imports a file and registers the position encodings that it defines.

    Args:
        path: a file of Python; also one that was saved with a model.

    Returns:
        The classes, in the order of the file.

    Raises:
        ValueError: there is no such file, it defines no position encoding, or one that cannot be registered.
    """
    file = pathlib.Path(path).resolve()
    if file.suffix != ".py" or not file.is_file():
        raise ValueError(f"{path!r} is not valid: there is no such file of Python.")
    text = file.read_text(encoding="utf-8")
    known = [cls for cls in POSITION_ENCODINGS.values() if cls.code == (file.name, _checked(file, text))]
    if known:
        return known
    present = getattr(sys.modules.get(file.stem), "__file__", None)
    if file.stem in {*sys.stdlib_module_names, *_LIBRARIES} or (present and pathlib.Path(present).resolve() != file):
        raise ValueError(f"{path!r} is not valid: {file.stem!r} is the name of another module.")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    # Pickling, as the workers of a data loader do, finds classes by the name of their module.
    sys.modules[file.stem] = module
    try:
        exec(compile(_absolute(text), str(file), "exec"), vars(module))
        own = [one for one in vars(module).values() if isinstance(one, type) and one.__module__ == file.stem]
        # Others are bases.
        found = [cls for cls in own if issubclass(cls, PositionEncoding) and "name" in vars(cls)]
        if not found:
            raise ValueError(f"{path!r} is not valid: it defines no subclass of PositionEncoding with a name.")
        for cls in found:
            _check(cls)
            _code(cls)
    except BaseException:
        del sys.modules[file.stem]
        raise
    if path not in imported_files:
        imported_files.append(path)
    return [register_position_encoding(cls) for cls in found]


def _check(cls: Any) -> None:
    """Raises ValueError for a class that cannot be registered."""
    if not (isinstance(cls, type) and issubclass(cls, PositionEncoding)):
        raise ValueError(f"cls={cls!r} is not valid: it must be a subclass of PositionEncoding.")
    missing = [field for field in ("name", "paper", "summary") if not isinstance(getattr(cls, field, None), str)]
    if missing:
        raise ValueError(f"{cls.__name__}.{missing[0]} is not valid: it must be a string.")
    if not cls.name.isidentifier():
        raise ValueError(f"{cls.__name__}.name={cls.name!r} is not valid: it must be an identifier of Python.")
    for taken in POSITION_ENCODINGS.values():
        # A class may be registered again, from the same file.
        again = taken.code is not None and taken.__name__ == cls.__name__ and _source(taken) == _source(cls)
        if taken.name == cls.name and not again:
            raise ValueError(f"{cls.__name__}.name={cls.name!r} is not valid: it is the name of {taken.__name__}.")
        if taken.name != cls.name and taken.__name__ == cls.__name__:
            raise ValueError(f"{cls.__name__} is not valid: the encoding {taken.name!r} has a class of this name.")
        if taken.code is not None and taken.code[0] == _source(cls).name and _source(taken) != _source(cls):
            raise ValueError(f"{cls.__name__} is not valid: {taken.name!r} is in another file {taken.code[0]!r}.")
    if "bias" in vars(cls):
        given = [hook for hook in ("block_bias", "kernel") if hook not in vars(cls) and _inherits(cls, hook)]
        if given:
            raise ValueError(
                f"{cls.__name__}.bias is not valid: {given[0]} of {cls.__mro__[1].__name__} would be used instead. "
                "Derive the class from PositionEncoding."
            )


def _inherits(cls: Any, hook: str) -> bool:
    bases = cls.__mro__[1 : cls.__mro__.index(PositionEncoding)]
    return any(vars(base).get(hook) is not None for base in bases)


def _source(cls: type) -> pathlib.Path:
    """Returns the file of a class; an empty path for one without a file."""
    try:
        return pathlib.Path(inspect.getsourcefile(cls) or "").resolve()
    except (TypeError, OSError):
        return pathlib.Path()


def _code(cls: type) -> tuple[str, str]:
    """Returns the name and the text of the file that is saved with models."""
    found = inspect.getsourcefile(cls) if cls.__module__ != "__main__" else None
    if found is None:
        raise ValueError(
            f"{cls.__name__} is not valid: it must be defined in a file of its own, which is saved with models, not in "
            "a notebook or in the script that runs."
        )
    file = pathlib.Path(found)
    own = pathlib.Path(__file__).parent
    if (own / file.name).exists():
        raise ValueError(f"{cls.__name__} is not valid: its file {file.name!r} has the name of a file of whatwhere.")
    if not file.stem.isidentifier() or keyword.iskeyword(file.stem):
        raise ValueError(f"{cls.__name__} is not valid: its file {file.name!r} must have an identifier as its name.")
    return file.name, _checked(file, file.read_text(encoding="utf-8"))


def _checked(file: pathlib.Path, text: str) -> str:
    """Returns the text of a file with `from . import` for imports of this package; refuses what cannot be saved."""
    own = pathlib.Path(__file__).parent
    for node in ast.walk(ast.parse(text)):
        module = str(getattr(node, "module", None))
        of_package = isinstance(node, ast.ImportFrom) and not node.level and module.startswith("whatwhere.")
        # The second is a file that was saved.
        if of_package or (isinstance(node, ast.ImportFrom) and node.level == 1 and (own / f"{module}.py").is_file()):
            if of_package and not (own / f"{module.partition('.')[2]}.py").is_file():
                _refuse(file, node, f"whatwhere has no module {module!r} for models")
            part = module.rpartition(".")[2]
            for one in node.names:
                if (found := definitions().get(one.name)) is None or part not in (found, *FAMILIES):
                    _refuse(file, node, f"{module!r} defines no {one.name!r} for models")
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [node.module or "."] if isinstance(node, ast.ImportFrom) else [one.name for one in node.names]
            for name in names:
                top = name.partition(".")[0] if not getattr(node, "level", 0) else "."
                if top not in _LIBRARIES and top not in sys.stdlib_module_names:
                    _refuse(file, node, f"it imports {name!r}")
    text = with_imports_from(".", text)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and not node.level and str(node.module).startswith("whatwhere"):
            _refuse(file, node, "write `from whatwhere.name import ...` on one line")
    return text


def _absolute(text: str) -> ast.Module:
    """Returns the code of a file, with the imports of a saved file as they are written in one of its author."""
    return _Absolute().visit(ast.parse(text))


class _Absolute(ast.NodeTransformer):
    def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:
        if node.level != 1:
            return node
        found = [ast.ImportFrom(f"{__package__}.{definitions()[one.name]}", [one], 0) for one in node.names]
        return [ast.copy_location(one, node) for one in found]


def _refuse(file: pathlib.Path, node: Any, reason: str) -> None:
    raise ValueError(
        f"{file.name}, line {node.lineno}: {reason}, and is saved with models. Allowed: the standard library, "
        f"{', '.join(sorted(_LIBRARIES))}, and `from whatwhere.position_base import ...` and the like."
    )
