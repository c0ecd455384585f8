"""Checkpoints: written, checked and loaded without executing anything that they hold.

| file | holds |
|---|---|
| `model.safetensors` | the weights |
| `optimizer.safetensors` | the tensors of the optimiser's state, named `<parameter>.<key>` |
| `run.json` | the step, the optimiser's parameter groups, the random states of all processes |
| `manifest.json` | the SHA-256 of each of the others |

The learning-rate schedule is a function of the step: nothing of it is saved.
"""

import contextlib
import hashlib
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

from .errors import TrainingError
from .run_folder import RunFolder, step_of

FORMAT = 1
FILES = ("model.safetensors", "optimizer.safetensors", "run.json")


class DamagedCheckpoint(Exception):
    """A checkpoint that cannot be loaded, with the file and the reason."""


class Checkpoints:
    """The checkpoints of a run, and the weights of the best model so far; each is there whole or not at all.

    Args:
        folder: of the run.
        keep: how many of the newest checkpoints are kept.
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
        """Writes a checkpoint after step `state["step"]`, and deletes old ones; `best` is that of `save_best`.

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
        """Deletes checkpoints, and the weights that were the best but are neither `best` nor those of a checkpoint."""
        for folder in folders:
            # A process that is killed meanwhile leaves no incomplete checkpoint.
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
        """Returns the checkpoints up to that after `step`, or all.

        Raises:
            TrainingError: there is none after this step.
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
            TrainingError: it is damaged; the message names the newest one that is whole.
        """
        try:
            return self._read(folders[-1])
        except DamagedCheckpoint as error:
            damage = error
        for folder in reversed(folders[:-1]):
            with contextlib.suppress(DamagedCheckpoint):
                self._read(folder)
                raise TrainingError(
                    f"{damage}. {folder.name!r} is whole: continue from it with --resume-from {step_of(folder)}."
                ) from damage
        raise TrainingError(f"{damage}. No earlier checkpoint is whole: start again in another folder.") from damage

    def _read(self, folder: Path) -> dict[str, Any]:
        state = read_checkpoint(folder)
        if state["best"] is not None:
            file = self.best_file(state["best"])
            if not file.exists() or file_sha256(file) != state["best_sha256"]:
                raise DamagedCheckpoint(f"{str(file)!r}, the best model of {folder.name!r}, is missing or damaged")
        return state

    def best_file(self, best: dict[str, Any]) -> Path:
        """Returns the file of the best model, `best["step"]` of which is the step after which it was the best."""
        return self.folder.path / "checkpoints" / f"best-{int(best['step']):08d}.safetensors"

    def save_best(self, model: torch.nn.Module, best: dict[str, Any]) -> None:
        """Writes the weights of the best model, and deletes those that are not needed any more."""
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
        """Turns an error of writing a file (a full disk, most often) into a TrainingError that says how to continue."""
        try:
            yield
        except (OSError, SafetensorError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise TrainingError(f"{str(path)!r} cannot be written: {reason}. {self.advice()}") from error

    def advice(self) -> str:
        """Returns where a run that stops now can continue."""
        if not (folders := self.folder.checkpoints()):
            return "There is no checkpoint yet."
        return f"The last checkpoint, {folders[-1].name!r}, is whole: continue from it with --resume."


def write_checkpoint(
    folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]
) -> None:
    """Writes the files of a checkpoint into an existing, empty folder, and waits until they are on the disk.

    `state` is what else belongs to it, as JSON; `parameter_groups` is added.
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
        DamagedCheckpoint: a file is missing, cut or changed, or the checkpoint has another format.
    """
    if not (folder / "manifest.json").exists() and list(folder.glob("*.pkl")):
        raise DamagedCheckpoint(
            f"{str(folder)!r} was written by an earlier version of this package, with pickled files, which could "
            "execute code and are no longer read. Finish the run with that version"
        )
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        version, digests = manifest["format"], dict(manifest["sha256"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is cut or changed"
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
                f"{str(folder / name)!r} is damaged: it was cut or changed after it was written (its SHA-256 is not "
                "that of manifest.json)"
            )
    return json.loads((folder / "run.json").read_text(encoding="utf-8"))


def load_checkpoint(
    folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, state: dict[str, Any]
) -> None:
    """Loads the weights, the optimiser and the schedule of a checkpoint; `state` is what `read_checkpoint` returned."""
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
    # The functions of the step stay those of the recipe.
    functions = [None] * len(groups)
    rates = [group["lr"] for group in groups]
    scheduler.load_state_dict({"last_epoch": step, "_step_count": step + 1, "_last_lr": rates, "lr_lambdas": functions})


def random_state(device: torch.device) -> dict[str, Any]:
    """Returns the states of the random numbers of this process, as JSON: Python's, NumPy's, torch's, its device's."""
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
    """Restores what `random_state` returned, on a device of the same type."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_from_hex(state["torch"]))
    if state["device"] is not None:
        torch.get_device_module(device.type).set_rng_state(_from_hex(state["device"]))


def file_sha256(path: Path) -> str:
    """Returns the SHA-256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def _to_hex(state: torch.Tensor) -> str:
    return state.cpu().numpy().tobytes().hex()


def _from_hex(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
