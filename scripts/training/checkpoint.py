"""Writes, checks and loads checkpoints without executing code from them.

| file | contents |
|---|---|
| `model.safetensors` | the weights |
| `optimizer.safetensors` | the tensors of the optimiser's state, named `<parameter>.<key>` |
| `run.json` | the step, the optimiser's parameter groups, of all processes the random states and places in a stream |
| `manifest.json` | the SHA-256 of each of the other files |

The learning-rate schedule is a function of the step, and is not saved.
"""

import contextlib
import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, load_model, save_file, save_model

from ..data.prepared import file_sha256
from .errors import TrainingError
from .run_folder import RunFolder, step_of

FORMAT = 2
FILES = ("model.safetensors", "optimizer.safetensors", "run.json")


class DamagedCheckpoint(Exception):
    """A checkpoint cannot be loaded; the message names the file and the reason."""


class Checkpoints:
    """The checkpoints of a run, and the weights of the best model so far. Each is written atomically.

    Args:
        folder: of the run.
        keep: number of checkpoints to keep.
    """

    def __init__(self, folder: RunFolder, keep: int) -> None:
        self.folder, self.keep = folder, keep

    def save(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        state: dict[str, Any],
        best: dict[str, Any] | None,
    ) -> None:
        """Writes a checkpoint after step `state["step"]`, and deletes old ones; `best` as in `save_best`.

        Raises:
            TrainingError: a file cannot be written.
        """
        folder = self.folder.path / "checkpoints" / f"step-{state['step']:08d}"
        draft = folder.with_name(f".{folder.name}")
        try:
            with self.writing(folder):
                draft.mkdir(parents=True)
                best_sha256 = None if best is None else file_sha256(self.best_file(best))
                write_checkpoint(draft, model, optimizer, {**state, "best": best, "best_sha256": best_sha256})
                draft.rename(folder)
        except TrainingError:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        self.remove(self.folder.checkpoints()[: -self.keep], best)

    def remove(self, folders: list[Path], best: dict[str, Any] | None) -> None:
        """Deletes checkpoints, and weights of former best models that no checkpoint needs."""
        for folder in folders:
            # Renamed first: a process killed during the deletion leaves no incomplete checkpoint.
            draft = folder.with_name(f".{folder.name}")
            folder.rename(draft)
            shutil.rmtree(draft)
        wanted = {self.best_file(best)} if best is not None else set()
        for folder in self.folder.checkpoints():
            with contextlib.suppress(OSError, ValueError):
                state = json.loads((folder / "run.json").read_text(encoding="utf-8"))
                if state["best"] is not None:
                    wanted.add(self.best_file(state["best"]))
        for file in self.folder.path.glob("checkpoints/best-*"):
            if file not in wanted:
                file.unlink()

    def until(self, step: int | None) -> list[Path]:
        """Returns the checkpoints up to the one after `step`, or all.

        Raises:
            TrainingError: there is no checkpoint after this step.
        """
        folders = self.folder.checkpoints()
        steps = [step_of(folder) for folder in folders]
        if step is not None and step not in steps:
            raise TrainingError(
                f"--resume-from {step!r} is not valid: there is no checkpoint after this step. Allowed: "
                f"{', '.join(map(str, steps)) or 'none'}."
            )
        return folders if step is None else folders[: steps.index(step) + 1]

    def read(self, folders: list[Path]) -> dict[str, Any]:
        """Checks the last of these checkpoints and returns the contents of its `run.json`.

        Raises:
            TrainingError: it is damaged; the message names the newest intact one.
        """
        try:
            return self._read(folders[-1])
        except DamagedCheckpoint as error:
            damage = error
        for folder in reversed(folders[:-1]):
            with contextlib.suppress(DamagedCheckpoint):
                self._read(folder)
                raise TrainingError(
                    f"{damage}. {folder.name!r} is intact: continue from it with --resume-from {step_of(folder)}."
                ) from damage
        raise TrainingError(f"{damage}. No earlier checkpoint is intact: start again in another folder.") from damage

    def _read(self, folder: Path) -> dict[str, Any]:
        state = read_checkpoint(folder)
        if state["best"] is not None:
            file = self.best_file(state["best"])
            if not file.exists() or file_sha256(file) != state["best_sha256"]:
                raise DamagedCheckpoint(f"{str(file)!r}, the best model of {folder.name!r}, is missing or damaged")
        return state

    def best_file(self, best: dict[str, Any]) -> Path:
        """Returns the file of the best model; `best["step"]` is its step."""
        return self.folder.path / "checkpoints" / f"best-{int(best['step']):08d}.safetensors"

    def save_best(self, model: torch.nn.Module, best: dict[str, Any]) -> None:
        """Writes the weights of the best model, and deletes weights that are no longer needed."""
        file = self.best_file(best)
        file.parent.mkdir(parents=True, exist_ok=True)
        draft = file.with_name(f".{file.name}")
        with self.writing(file):
            save_model(model, str(draft))
            draft.replace(file)
        self.remove([], best)

    def load_best(self, model: torch.nn.Module, best: dict[str, Any]) -> None:
        """Loads the weights of the best model; raises TrainingError if they cannot be read."""
        file = self.best_file(best)
        try:
            load_model(model, str(file))
        except (OSError, SafetensorError, RuntimeError) as error:
            raise TrainingError(f"{str(file)!r}, the best model, cannot be read: {error}") from error

    @contextlib.contextmanager
    def writing(self, path: Path) -> Iterator[None]:
        """Converts errors of writing a file, such as a full disk, into a TrainingError with advice."""
        try:
            yield
        except (OSError, SafetensorError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise TrainingError(f"{str(path)!r} cannot be written: {reason}. {self.advice()}") from error

    def advice(self) -> str:
        """Returns a message about how to continue the run."""
        if not (folders := self.folder.checkpoints()):
            return "There is no checkpoint yet."
        return f"Continue from the last checkpoint, {folders[-1].name!r}, with --resume."


def write_checkpoint(
    folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]
) -> None:
    """Writes the files of a checkpoint into an existing, empty folder, and flushes them to disk.

    `state` is the content of `run.json`; `parameter_groups` is added.
    """
    save_model(model, str(folder / "model.safetensors"))
    optimizer_state = optimizer.state_dict()
    tensors = {
        f"{index}.{key}": value.contiguous()
        for index, values in optimizer_state["state"].items()
        for key, value in values.items()
    }
    save_file(tensors, str(folder / "optimizer.safetensors"))
    state = {**state, "parameter_groups": optimizer_state["param_groups"]}
    (folder / "run.json").write_text(json.dumps(state) + "\n", encoding="utf-8")
    manifest = {"format": FORMAT, "sha256": {name: file_sha256(folder / name) for name in FILES}}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    for name in (*FILES, "manifest.json"):
        _flush(folder / name)


def read_checkpoint(folder: Path) -> dict[str, Any]:
    """Checks every file of a checkpoint against its manifest; returns the contents of `run.json`.

    Raises:
        DamagedCheckpoint: a file is missing, truncated or changed, or the checkpoint has another format.
    """
    if not (folder / "manifest.json").exists() and list(folder.glob("*.pkl")):
        raise DamagedCheckpoint(
            f"{str(folder)!r} was written by an earlier version of this package with pickled files, which can execute "
            "code and are no longer read. Finish the run with that version"
        )
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        version, digests = manifest["format"], dict(manifest["sha256"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it was truncated or changed"
        raise DamagedCheckpoint(f"{str(folder / 'manifest.json')!r} cannot be read: {reason}") from error
    if version != FORMAT:
        raise DamagedCheckpoint(
            f"{str(folder)!r} has the format {version!r}, written by another version of this package. Allowed: {FORMAT}"
        )
    for name in FILES:
        try:
            digest = file_sha256(folder / name)
        except OSError as error:
            raise DamagedCheckpoint(f"{str(folder / name)!r} cannot be read: {error.strerror}") from error
        if digest != digests.get(name):
            raise DamagedCheckpoint(
                f"{str(folder / name)!r} is damaged: it was truncated or changed after it was written (its SHA-256 "
                "differs from manifest.json)"
            )
    return json.loads((folder / "run.json").read_text(encoding="utf-8"))


def load_checkpoint(
    folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, state: dict[str, Any]
) -> None:
    """Loads the weights, the optimiser and the schedule of a checkpoint; `state` is from `read_checkpoint`."""
    load_model(model, str(folder / "model.safetensors"))
    values: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in load_file(str(folder / "optimizer.safetensors")).items():
        index, _, key = name.partition(".")
        values.setdefault(int(index), {})[key] = tensor
    groups = [
        {key: tuple(value) if key == "betas" else value for key, value in group.items()}
        for group in state["parameter_groups"]
    ]
    optimizer.load_state_dict({"state": values, "param_groups": groups})
    step = state["step"]
    # The schedule's functions are not saved; they come from the recipe.
    functions = [None] * len(groups)
    rates = [group["lr"] for group in groups]
    scheduler.load_state_dict({"last_epoch": step, "_step_count": step + 1, "_last_lr": rates, "lr_lambdas": functions})


def random_state(device: torch.device) -> dict[str, Any]:
    """Returns the states of this process's random number generators (Python, NumPy, torch, device), as JSON."""
    version, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(words), gauss],
        "numpy": [np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
        "torch": _to_hex(torch.get_rng_state()),
        "device": None if device.type == "cpu" else _to_hex(torch.get_device_module(device.type).get_rng_state()),
        "device_type": device.type,
    }


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Restores a result of `random_state`, on a device of the same type."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_from_hex(state["torch"]))
    if state["device"] is not None:
        torch.get_device_module(device.type).set_rng_state(_from_hex(state["device"]))


def _to_hex(state: torch.Tensor) -> str:
    return state.cpu().numpy().tobytes().hex()


def _from_hex(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
