"""A lock on an output folder, so that only one run at a time writes to it."""

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

try:
    from filelock import FileLock, Timeout
except ImportError as error:
    raise ImportError('training needs `filelock`: pip install "whatwhere[train]"') from error

from ..evaluation.results import check_writable

# The lock file, and a file that names the process that holds it.
LOCK, OWNER = ".lock", ".lock.json"


class TrainingError(RuntimeError):
    """A run that cannot start or go on, with the reason."""


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Holds a lock on a folder. A missing folder is created, and removed again if it is empty at the end.

    The operating system releases the lock of a killed process. In a distributed run, the process of rank 0 holds it.

    Raises:
        TrainingError: another run holds it, or the folder cannot be written.
    """
    try:
        check_writable(folder)
    except OSError as error:
        raise TrainingError(str(error)) from error
    if int(os.environ.get("RANK", "0")):
        yield
        return
    # Resolves `runs/..` to the current folder.
    folder = folder.resolve()
    existed = folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    lock, owner = FileLock(folder / LOCK, timeout=0), folder / OWNER
    try:
        lock.acquire()
    except Timeout as error:
        holder = "another process"
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            found = json.loads(owner.read_text(encoding="utf-8"))
            holder = f"process {found['pid']} on {found['host']}"
        raise TrainingError(
            f"output={str(folder)!r} is in use: {holder} is training there. Wait for it, stop it, or choose another "
            "folder."
        ) from error
    try:
        owner.write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}), encoding="utf-8")
        yield
    finally:
        with contextlib.suppress(OSError):
            owner.unlink(missing_ok=True)
            (folder / LOCK).unlink(missing_ok=True)
            if not existed:
                folder.rmdir()
        lock.release()
