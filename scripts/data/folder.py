"""The folder of local data."""

import os
from pathlib import Path

DATA_DIR_VARIABLE = "WHATWHERE_DATA_DIR"


def data_folder(data_dir: str | os.PathLike[str] | None) -> Path | None:
    """Returns the folder of local data, by default WHATWHERE_DATA_DIR; None if neither is set."""
    data_dir = data_dir or os.environ.get(DATA_DIR_VARIABLE)
    root = Path(data_dir).expanduser() if data_dir else None
    if root is not None and not root.is_dir():
        raise ValueError(f"data_dir={str(data_dir)!r} is not valid: it must be an existing folder.")
    return root
