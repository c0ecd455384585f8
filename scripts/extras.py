"""Error messages for modules that only an optional extra installs."""

import sys
from typing import NoReturn

# The extra of pyproject.toml that installs each module.
EXTRAS = {
    **dict.fromkeys(("accelerate", "datasets", "filelock", "peft", "pyarrow", "pydantic", "tokenizers"), "train"),
    **dict.fromkeys(("lm_eval", "evaluate", "matplotlib"), "eval"),
    **dict.fromkeys(("miditok", "symusic"), "music"),
    "triton": "kernels",
}


def explain(error: Exception) -> str:
    """Returns the message of an error; for a missing module, its name and how to install it."""
    module = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if module in EXTRAS:
        return f'`{module}` is not installed: pip install "whatwhere[{EXTRAS[module]}]"'
    return str(error)


def fail_import(name: str, error: ImportError) -> NoReturn:
    """Exits with the message of `explain` if `name` is `"__main__"`; raises ImportError with it otherwise."""
    if name == "__main__":
        sys.exit(f"error: {explain(error)}")
    raise ImportError(explain(error)) from error
