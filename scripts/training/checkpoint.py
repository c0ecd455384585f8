"""Writes, checks and loads checkpoints without executing code from them.

| file | contents |
|---|---|
| `shard-<n>-*.safetensors` | tensors of process n: weights (`model.<name>`), optimiser (`optimizer.<name>.<key>`) |
| `run.json` | the step, the optimiser's parameter groups, of all processes the random states and places in a stream |
| `manifest.json` | the format, and the SHA-256 of each of the other files |

The shards are written and read by `torch.distributed.checkpoint`, on any number of processes and for any layout. They
are written in the background. The folder gets its name when all of its files are complete.
"""

import contextlib
import datetime
import json
import shutil
import sys
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from ..data.prepared import file_sha256
from ..errors import TrainingError
from ..writing import why_not_written, write_json
from .run_folder import RunFolder, step_of

FORMAT = 3
MANIFEST = "manifest.json"


class DamagedCheckpoint(Exception):
    """A checkpoint cannot be loaded; the message names the file and the reason."""


class Checkpoints:
    """The checkpoints of a run: the newest ones, and those with the best models of these.

    All processes must call `save` and `wait`; the folder must be the same for all.
    """

    def __init__(self, folder: RunFolder, keep: int, timeout: int) -> None:
        self.folder, self.keep, self.timeout = folder, keep, timeout
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        # The training's own group is used by another thread.
        limit = datetime.timedelta(seconds=timeout)
        self._group = dist.new_group(backend="gloo", timeout=limit) if dist.is_initialized() else None

    @property
    def has_failed(self) -> bool:
        """Whether writing the last checkpoint failed in this process; `wait` raises the error."""
        return self._error is not None

    def save(self, tensors: dict[str, torch.Tensor], state: dict[str, Any]) -> None:
        """Begins to write a checkpoint with copies of the tensors; old ones are deleted when it is complete.

        Args:
            tensors: see `training_tensors`.
            state: the contents of `run.json`; `best` is None, or has the `step` of the best model so far.

        Raises:
            TrainingError: the previous checkpoint could not be written.
        """
        self.wait()
        options = StagingOptions(
            use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
        )
        copied: Any = DefaultStager(options).stage(tensors)

        def write() -> None:
            try:
                self._write(copied, state)
            except BaseException as error:
                self._error = error

        # A daemon: a file system that does not answer must not keep a failed process alive.
        self._thread = threading.Thread(target=write, name="checkpoint", daemon=True)
        self._thread.start()

    def path_of(self, state: dict[str, Any]) -> Path:
        return self.folder.path / "checkpoints" / f"step-{state['step']:08d}"

    def _remove_old(self) -> None:
        folders = self.folder.checkpoints()
        newest = folders[-self.keep :]
        try:
            states = [json.loads((folder / "run.json").read_text(encoding="utf-8")) for folder in newest]
            kept = {*newest, *(self.path_of(state["best"]) for state in states if state["best"] is not None)}
            self.remove([folder for folder in folders if folder not in kept])
        except (OSError, ValueError) as error:
            # The new checkpoint is complete.
            print(f"an old checkpoint cannot be deleted: {error}", file=sys.stderr)

    def wait(self, *, failed: bool = False) -> None:
        """Waits until the last checkpoint is written, and raises its error in all processes.

        Args:
            failed: the run has failed: wait no longer than for communication, and raise nothing.
        """
        if self._thread is not None:
            self._thread.join(self.timeout if failed else None)
        if failed:
            return
        error, self._thread, self._error = self._error, None, None
        if error is not None:
            raise error

    def _write(self, tensors: dict[str, torch.Tensor], state: dict[str, Any]) -> None:
        """Writes a checkpoint; raises TrainingError in all processes if one cannot write a file."""
        folder = self.path_of(state)
        draft = folder.with_name(f".{folder.name}")
        if _is_first():
            shutil.rmtree(draft, ignore_errors=True)
        with self._agreed(folder, draft):
            writer = HuggingFaceStorageWriter(str(draft), save_distributed=True)
            with _alone():
                dcp.save(tensors, storage_writer=writer, process_group=self._group)
            number = 1 + (dist.get_rank() if dist.is_initialized() else 0)
            own = {file.name: file_sha256(file) for file in draft.glob(f"shard-{number:05d}-*.safetensors")}
        digests = {name: digest for each in self._gathered(own) for name, digest in each.items()}
        with self._agreed(folder, draft):
            if _is_first():
                write_json(draft / "run.json", state)
                digests["run.json"] = file_sha256(draft / "run.json")
                write_json(draft / MANIFEST, {"format": FORMAT, "sha256": digests})
                shutil.rmtree(folder, ignore_errors=True)
                draft.rename(folder)
        if _is_first():
            self._remove_old()

    def _gathered(self, value: Any) -> list[Any]:
        if self._group is None:
            return [value]
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, value, group=self._group)
        return found

    @contextlib.contextmanager
    def _agreed(self, folder: Path, draft: Path) -> Iterator[None]:
        """Raises an error of one process in all, as a TrainingError, and deletes the draft."""
        problem = ""
        try:
            with self.writing(folder):
                yield
        except TrainingError as error:
            problem = str(error)
        except Exception as error:
            problem = f"{str(folder)!r} cannot be written: {type(error).__name__}: {error}. {self.advice()}"
        if problem := next(filter(None, self._gathered(problem)), ""):
            if _is_first():
                shutil.rmtree(draft, ignore_errors=True)
            raise TrainingError(problem)

    def remove(self, folders: list[Path]) -> None:
        for folder in folders:
            # Renamed first: a process killed during the deletion leaves no incomplete checkpoint.
            draft = folder.with_name(f".{folder.name}")
            folder.rename(draft)
            shutil.rmtree(draft)

    def read(self, step: int | None) -> dict[str, Any] | None:
        """Checks the newest checkpoint, or the one after `step`, and returns its `run.json`; None if there is none yet.

        Raises:
            TrainingError: there is none after `step`; or it is damaged, and the message names the newest intact one.
        """
        folders = self.folder.checkpoints()
        steps = [step_of(folder) for folder in folders]
        if step is not None and step not in steps:
            raise TrainingError(
                f"--resume-from {step!r} is not valid: there is no checkpoint after this step. Allowed: "
                f"{', '.join(map(str, steps)) or 'none'}."
            )
        damage = None
        for folder in reversed(folders if step is None else folders[: steps.index(step) + 1]):
            try:
                state = read_checkpoint(folder)
                if state["best"] is not None and self.path_of(state["best"]) != folder:
                    read_checkpoint(self.path_of(state["best"]))
            except DamagedCheckpoint as error:
                damage = damage or error
                continue
            if damage is None:
                return state
            raise TrainingError(
                f"{damage}. {folder.name!r} is intact: continue from it with --resume-from {step_of(folder)}."
            ) from damage
        if damage is not None:
            raise TrainingError(f"{damage}. No earlier checkpoint is intact: start again in another folder.")
        return None

    def load_best(self, model: torch.nn.Module, best: dict[str, Any]) -> None:
        """Loads the weights of the best model."""
        folder = self.path_of(best)
        try:
            read_checkpoint(folder)
            read_tensors(folder, {f"model.{name}": tensor for name, tensor in weights(model).items()})
        except (DamagedCheckpoint, OSError, SafetensorError, RuntimeError) as error:
            raise TrainingError(f"{str(folder)!r}, the best model, cannot be read: {error}") from error

    @contextlib.contextmanager
    def writing(self, path: Path) -> Iterator[None]:
        """Converts errors of writing a file, such as a full disk, into a TrainingError with advice."""
        try:
            yield
        except (Exception, dcp.CheckpointException) as error:
            cause: BaseException = error
            if isinstance(error, dcp.CheckpointException):
                cause = next(iter(error.failures.values()))[0]
                if not isinstance(cause, (OSError, SafetensorError, RuntimeError)):
                    raise
            reason = why_not_written(cause)
            if reason is None:
                if not isinstance(error, (OSError, SafetensorError, dcp.CheckpointException)):
                    raise
                reason = getattr(cause, "strerror", None) or str(cause)
            raise TrainingError(f"{str(path)!r} cannot be written: {reason}. {self.advice()}") from error

    def advice(self) -> str:
        if not (folders := self.folder.checkpoints()):
            return "There is no checkpoint yet."
        return f"Continue from the last checkpoint, {folders[-1].name!r}, with --resume."


def training_tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Returns the trained weights of a model and the tensors of its optimiser, by their names in a checkpoint."""
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    result = {f"model.{name}": tensor for name, tensor in weights(model).items() if name not in frozen}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            result[f"optimizer.{name}.{key}"] = value
    return result


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns the parameters and saved buffers of a model by name; tied weights have one name."""
    found: dict[int, str] = {}
    state = model.state_dict(keep_vars=True)
    return {name: tensor.detach() for name, tensor in state.items() if found.setdefault(id(tensor), name) == name}


def initialise_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Creates the state of an optimiser that has not made a step, by a step that changes nothing."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates):
        group["lr"] = rate


def read_tensors(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Reads the values of these tensors, in place, from the shards in a folder."""
    with _alone():
        dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)))


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Hides PyTorch's warning that a single process saves or loads."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def read_checkpoint(folder: Path) -> dict[str, Any]:
    """Checks every file of a checkpoint against its manifest; returns the contents of `run.json`."""
    if not (folder / MANIFEST).exists() and [*folder.glob("*.pkl"), *folder.glob("*.pt")]:
        raise DamagedCheckpoint(
            f"{str(folder)!r} was written by an earlier version with pickled files, which can execute code and are no "
            "longer read. Finish the run with that version"
        )
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        version, digests = manifest["format"], dict(manifest["sha256"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it was truncated or changed"
        raise DamagedCheckpoint(f"{str(folder / MANIFEST)!r} cannot be read: {reason}") from error
    if version != FORMAT:
        raise DamagedCheckpoint(f"{str(folder)!r} has the format {version!r} of another version. Allowed: {FORMAT}")
    try:
        with ThreadPoolExecutor() as pool:
            found = list(pool.map(lambda name: file_sha256(folder / name), digests))
    except OSError as error:
        raise DamagedCheckpoint(f"{error.filename!r} cannot be read: {error.strerror}") from error
    for name, digest in zip(digests, found):
        if digest != digests[name]:
            raise DamagedCheckpoint(f"{str(folder / name)!r} is damaged: its SHA-256 is not that in {MANIFEST}")
    return json.loads((folder / "run.json").read_text(encoding="utf-8"))


def load_checkpoint(
    folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, state: dict[str, Any]
) -> None:
    """Loads the weights, the optimiser and the schedule of a checkpoint; `state` is from `read_checkpoint`."""
    initialise_optimizer(optimizer)
    read_tensors(folder, training_tensors(model, optimizer))
    # Another layout may have divided the parameters into other groups.
    saved = {name: group for group in state["parameter_groups"] for name in group["params"]}
    names = {parameter: name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for key, value in saved[names[group["params"][0]]].items():
            if key != "params":
                group[key] = tuple(value) if key == "betas" else value
    step = state["step"]
    scheduler.last_epoch, scheduler._step_count = step, step + 1
    scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]


def parameter_groups(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Returns the optimiser's settings for each group of parameters, with their names, as JSON."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [{**group, "params": [names[p] for p in group["params"]]} for group in optimizer.param_groups]


def random_state(device: torch.device) -> dict[str, Any]:
    """Returns the states of this process's global random number generators that training uses, as JSON."""
    return {
        "torch": _to_hex(torch.get_rng_state()),
        "device": None if device.type == "cpu" else _to_hex(torch.get_device_module(device.type).get_rng_state()),
        "device_type": device.type,
    }


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Restores a result of `random_state`, on a device of the same type."""
    torch.set_rng_state(_from_hex(state["torch"]))
    if state["device"] is not None:
        torch.get_device_module(device.type).set_rng_state(_from_hex(state["device"]))


def _to_hex(state: torch.Tensor) -> str:
    return state.cpu().numpy().tobytes().hex()


def _from_hex(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
