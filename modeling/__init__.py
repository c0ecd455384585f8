"""Position encodings that separate *what* from *where*, for Hugging Face Transformers."""

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

if __name__ != "whatwhere":
    raise ImportError(f"import this package as `whatwhere` (after `pip install -e .`), not as `{__name__}`")

__version__ = "0.1.0"


def _is_help() -> bool:
    """Whether this process was started as the command `whatwhere` to print a help text."""
    program = os.path.basename(sys.argv[0]) if sys.argv else ""
    starts = program in ("whatwhere", "whatwhere.exe") or (program == "-m" and "whatwhere" in sys.orig_argv[:3])
    return starts and (len(sys.argv) == 1 or sys.argv[-1] in ("-h", "--help"))


# The models take seconds to import, and a help text does not need them.
if TYPE_CHECKING or not _is_help():
    from .auto_classes import *  # noqa: F403
else:

    def __getattr__(name: str) -> Any:
        # Nothing else: the import system asks for names of its own.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(importlib.import_module(".auto_classes", __name__), name)
