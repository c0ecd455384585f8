"""The folder of a run: its settings, progress, results and lock.

| file | contents |
|---|---|
| `recipe.yaml` or `finetune.json` | the record: every setting of the run |
| `checkpoints/` | `step-<n>` (`checkpoint-<n>`, of earlier versions, is refused) |
| `results.json` | the results; written last, when the run is finished |
| `.lock`, `.lock.json` | the lock of the process that writes to the folder, and its host and process id |

Files are replaced atomically.
"""

import contextlib
import dataclasses
import json
import os
import re
import shutil
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from ..checks import material
from ..errors import TrainingError
from ..processes import is_first_process
from ..writing import check_writable, write_json, write_text

LOCK, OWNER, DRAFT = ".lock", ".lock.json", ".final"


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """The folder of a run; it need not exist yet. `record` is the name of the settings file."""

    path: Path
    record: str = "recipe.yaml"

    @property
    def is_begun(self) -> bool:
        return (self.path / self.record).exists()

    def checkpoints(self) -> list[Path]:
        """Returns the folders of the checkpoints, the newest one last."""
        found = self.path.glob("checkpoints/*-*")
        return sorted((path for path in found if re.fullmatch(r"(step|checkpoint)-\d+", path.name)), key=step_of)

    def state(self, settings: Mapping[str, Any] | None = None) -> str:
        """Returns `done`, `missing`, or the progress of an unfinished run; `settings` as in `results`."""
        if self.results(settings) is not None:
            return "done"
        if not self.is_begun:
            return "missing"
        checkpoints = self.checkpoints()
        return f"interrupted after step {step_of(checkpoints[-1])}" if checkpoints else "started"

    def results(self, settings: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
        """Returns the results of the finished run, or None; with `settings`, a TrainingError if the run has others."""
        try:
            results = self._read("results.json")
        except FileNotFoundError:
            return None
        if settings is not None:
            self._compare(results.get("recipe", {}), settings)
        return results

    def begin(self, resume: bool | str, settings: Mapping[str, Any]) -> tuple[bool, dict[str, Any] | None]:
        """Checks that the run can be started in this folder, or resumed with settings without `material` differences.

        Args:
            resume: True, False, or "auto": resume a run that was begun, and do nothing for a finished one.

        Returns:
            whether to resume, and the results if there is nothing left to do.
        """
        if resume == "auto":
            if (results := self.results(settings)) is not None:
                return True, results
            resume = self.is_begun
        # `runs/..` must be the current folder even if `runs` does not exist.
        path = self.path.resolve()
        names = {file.name for file in path.iterdir()} if path.exists() else set()
        if not resume:
            if names - {LOCK, OWNER, *(file.name for file in self._leftovers())}:
                raise TrainingError(f"output={str(self.path)!r} is not empty. Choose another folder, or use --resume.")
            return False, None
        old = self.settings()
        if "results.json" in names:
            raise TrainingError(
                f"output={str(self.path)!r} has a finished run: there is nothing to resume; to train further, "
                "fine-tune this folder."
            )
        self._compare(old, settings)
        return True, None

    def _compare(self, old: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        # Tuples are read back as lists.
        if changed := material(old, json.loads(json.dumps(settings))):
            raise TrainingError(
                f"output={str(self.path)!r} has a run with other settings (before → now): {'; '.join(changed)}."
            )

    def settings(self) -> dict[str, Any]:
        """Returns the settings of the run, as they were recorded."""
        if not self.is_begun:
            raise TrainingError(f"output={str(self.path)!r} has no run to resume: it has no {self.record}.")
        return self._read(self.record)

    def _read(self, name: str) -> dict[str, Any]:
        file = self.path / name
        try:
            text = file.read_text(encoding="utf-8")
            values = json.loads(text) if file.suffix == ".json" else yaml.safe_load(text)
            if not isinstance(values, dict):
                raise ValueError("it is not a mapping.")
        except (ValueError, yaml.YAMLError) as error:
            raise TrainingError(f"{str(file)!r} cannot be read: {error}") from error
        return values

    def write_record(self, settings: Mapping[str, Any]) -> None:
        file = self.path / self.record
        if file.suffix == ".json":
            write_json(file, dict(settings))
        else:
            write_text(file, yaml.safe_dump(dict(settings), sort_keys=False, allow_unicode=True))

    @contextlib.contextmanager
    def draft(self) -> Iterator[Path]:
        """Yields a folder whose files are moved to the run's folder at the end, `results.json` last."""
        draft = self.path / DRAFT
        draft.mkdir(parents=True)
        yield draft
        for file in sorted(draft.iterdir(), key=lambda file: file.name == "results.json"):
            file.replace(self.path / file.name)
        draft.rmdir()

    def _leftovers(self) -> list[Path]:
        patterns = (DRAFT, f".{self.record}*.partial", ".metrics.jsonl*.partial")
        return [path for pattern in patterns for path in self.path.resolve().glob(pattern)]

    def remove_leftovers(self) -> None:
        """Deletes incomplete files of a killed run."""
        for path in (*self._leftovers(), *self.path.glob("checkpoints/.*")):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Locks the folder. A missing folder is created, and removed again if it is empty at the end.

        The operating system releases the lock of a killed process. In a distributed run, only rank 0 takes the lock.
        The lock file stays in the folder: if it were deleted, two later processes could lock two files of this name.
        """
        check_writable(self.path)
        if not is_first_process():
            yield
            return
        folder = self.path.resolve()
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
            raise TrainingError(f"output={str(folder)!r} is in use: {holder} is training there.") from error
        try:
            owner.write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}), encoding="utf-8")
            yield
        finally:
            owner.unlink(missing_ok=True)
            lock.release()
            if not existed and os.listdir(folder) == [LOCK]:
                shutil.rmtree(folder, ignore_errors=True)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])
