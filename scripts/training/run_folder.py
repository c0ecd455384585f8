"""The folder of a run: what the run is, how far it has come, and who writes to it.

| file | holds |
|---|---|
| `recipe.yaml` or `finetune.json` | the record: every setting of the run |
| `checkpoints/` | `step-<n>` (or Trainer's `checkpoint-<n>`) |
| `results.json` | the results; written last: a run that has them is finished |
| `.lock`, `.lock.json` | the lock of the process that writes to the folder, and its name |

Files are replaced as a whole: a reader, or a run that was killed, never leaves half of one.
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

from ..evaluation.results import check_writable, write_json, write_text
from .errors import TrainingError

LOCK, OWNER, DRAFT = ".lock", ".lock.json", ".final"


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Returns, for every key in which two settings differ, a line `key: old → new`."""
    lines = []
    for key in sorted({*old, *new}):
        before, after = old.get(key), new.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            lines += differences(before, after, f"{prefix}{key}.")
        elif before != after:
            lines.append(f"{prefix}{key}: {before!r} → {after!r}")
    return lines


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """A folder for one run, which need not exist yet.

    Attributes:
        path: the folder.
        record: the name of the file that says what the run is.
    """

    path: Path
    record: str = "recipe.yaml"

    @property
    def is_begun(self) -> bool:
        """Whether a run has written its record here."""
        return (self.path / self.record).exists()

    def checkpoints(self) -> list[Path]:
        """Returns the folders of the checkpoints, the newest one last."""
        found = self.path.glob("checkpoints/*-*")
        return sorted((path for path in found if re.fullmatch(r"(step|checkpoint)-\d+", path.name)), key=step_of)

    def state(self, settings: Mapping[str, Any] | None = None) -> str:
        """Returns `done`, `missing`, or how far an unfinished run has come; `settings` are those of `results`."""
        if self.results(settings) is not None:
            return "done"
        if not self.is_begun:
            return "missing"
        checkpoints = self.checkpoints()
        return f"interrupted after step {step_of(checkpoints[-1])}" if checkpoints else "begun"

    def results(self, settings: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
        """Returns the results of the finished run, or None.

        Args:
            settings: those that the run must have; None for any.

        Raises:
            TrainingError: the results cannot be read, or are those of another run.
        """
        try:
            results = self._read("results.json")
        except FileNotFoundError:
            return None
        if settings is not None:
            self._compare(results.get("recipe", {}), settings)
        return results

    def check(self, settings: Mapping[str, Any], *, resume: bool, ignore: tuple[str, ...] = ()) -> None:
        """Refuses a folder in which the run cannot begin, or cannot be resumed.

        Args:
            settings: of the run.
            resume: whether it continues what is in the folder.
            ignore: settings that may have changed since.

        Raises:
            TrainingError: the folder holds something, or holds no run to resume, or another one.
        """
        # `runs/..` is the present folder, whether `runs` exists or not.
        path = self.path.resolve()
        names = {file.name for file in path.iterdir()} if path.exists() else set()
        if not resume:
            if names - {LOCK, OWNER, DRAFT, *(f".{name}.partial" for name in (self.record, "metrics.jsonl"))}:
                raise TrainingError(f"output={str(self.path)!r} is not empty. Choose another folder, or use --resume.")
            return
        if self.record not in names:
            raise TrainingError(f"output={str(self.path)!r} holds no run to resume: it has no {self.record}.")
        if "results.json" in names:
            raise TrainingError(f"output={str(self.path)!r} holds a finished run: there is nothing to resume.")
        self._compare(self._read(self.record), settings, ignore)

    def _compare(self, old: Mapping[str, Any], settings: Mapping[str, Any], ignore: tuple[str, ...] = ()) -> None:
        # As they are read back: tuples are lists.
        changed = differences(old, json.loads(json.dumps(settings)))
        if changed := [line for line in changed if line.partition(": ")[0] not in ignore]:
            raise TrainingError(
                f"output={str(self.path)!r} holds a run with other settings (before → now): {'; '.join(changed)}. "
                "Choose another folder, or move this one away."
            )

    def _read(self, name: str) -> dict[str, Any]:
        file = self.path / name
        try:
            text = file.read_text(encoding="utf-8")
            values = json.loads(text) if file.suffix == ".json" else yaml.safe_load(text)
            if not isinstance(values, dict):
                raise ValueError("it holds no mapping.")
        except (ValueError, yaml.YAMLError) as error:
            raise TrainingError(f"{str(file)!r} cannot be read: {error}") from error
        return values

    def write_record(self, settings: Mapping[str, Any]) -> None:
        """Writes what the run is."""
        file = self.path / self.record
        if file.suffix == ".json":
            write_json(file, dict(settings))
        else:
            write_text(file, yaml.safe_dump(dict(settings), sort_keys=False, allow_unicode=True))

    @contextlib.contextmanager
    def draft(self) -> Iterator[Path]:
        """Gives a folder whose files become the run's at the end of the block, `results.json` last."""
        draft = self.path / DRAFT
        draft.mkdir(parents=True)
        yield draft
        for file in sorted(draft.iterdir(), key=lambda file: file.name == "results.json"):
            file.replace(self.path / file.name)
        draft.rmdir()

    def remove_leftovers(self) -> None:
        """Deletes the unfinished files of a run that was killed."""
        found = [self.path / DRAFT, *(self.path / f".{name}.partial" for name in (self.record, "metrics.jsonl"))]
        if self.is_begun:
            # Temporary files of safetensors.
            found += [path for path in self.path.glob(".tmp??????") if path.is_file()]
        for path in [*found, *self.path.glob("checkpoints/.*")]:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Holds the lock. A missing folder is created, and removed again if it is empty at the end.

        The operating system releases the lock of a killed process. In a distributed run, rank 0 holds it.

        Raises:
            TrainingError: another run holds it, or the folder cannot be written.
        """
        try:
            check_writable(self.path)
        except OSError as error:
            raise TrainingError(str(error)) from error
        if int(os.environ.get("RANK", "0")):
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
            raise TrainingError(
                f"output={str(folder)!r} is in use: {holder} is training there. Wait for it, stop it, or choose "
                "another folder."
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


def step_of(checkpoint: Path) -> int:
    """Returns the step after which a checkpoint was written."""
    return int(checkpoint.name.rpartition("-")[2])
