"""What the scripts say when a module is missing that the base install does not bring."""

import sys
from typing import NoReturn

# Modules and the extra of pyproject.toml that brings them.
EXTRAS = {
    **dict.fromkeys(("accelerate", "datasets", "peft", "tokenizers", "pyarrow"), "train"),
    **dict.fromkeys(("lm_eval", "evaluate", "matplotlib"), "eval"),
    **dict.fromkeys(("miditok", "symusic"), "music"),
    "triton": "kernels",
}


def explain(error: Exception) -> str:
    """Returns an error's text; for a missing module, which one it is and how to install it."""
    module = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if module in EXTRAS:
        return f'`{module}` is not installed: pip install "whatwhere[{EXTRAS[module]}]"'
    return str(error)


def leave(name: str, error: ImportError) -> NoReturn:
    """Ends the program with that sentence if `name` is `"__main__"`; raises ImportError with it otherwise."""
    if name == "__main__":
        sys.exit(f"error: {explain(error)}")
    raise ImportError(explain(error)) from error
