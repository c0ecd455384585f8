"""Training in several processes with accelerate: checks of its configuration, and errors of stopped processes."""

import contextlib
import datetime
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, InitProcessGroupKwargs, LoggerType

from whatwhere.position_base import suggest

from .errors import TrainingError
from .recipe import TrainingRecipe

# Parts of error messages of gloo and NCCL.
_TIMED_OUT = ("Timed out waiting", "timed out", "timeout")
_GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused")


def build_accelerator(training: TrainingRecipe, output: Path) -> Accelerator:
    """Returns the accelerator of a run; `output` is the folder for trackers.

    Raises:
        TrainingError: the batch cannot be divided among the processes, a tracker is not installed, or accelerate is
            configured for something other than data-parallel training.
    """
    known = [kind.value for kind in LoggerType if kind != LoggerType.ALL]
    if unknown := [name for name in training.trackers if name not in known]:
        raise TrainingError(
            f"training.trackers={training.trackers!r} is not valid: {unknown[0]!r} is not known. "
            f"{suggest(unknown[0], known)}"
        )
    accelerator = Accelerator(
        mixed_precision=training.mixed_precision,
        log_with=training.trackers or None,
        project_dir=str(output),
        # Without a GPU, accelerate would otherwise not set up the process group.
        cpu=not torch.accelerator.is_available(),
        kwargs_handlers=[InitProcessGroupKwargs(timeout=datetime.timedelta(seconds=training.ddp_timeout))],
    )
    kind, processes = accelerator.distributed_type, accelerator.num_processes
    if kind in (DistributedType.DEEPSPEED, DistributedType.FSDP, DistributedType.MEGATRON_LM):
        raise TrainingError(
            f"accelerate's distributed_type={kind.value!r} is not valid: only data-parallel training is supported."
        )
    if training.batch_size % (processes * (training.micro_batch_size or 1)):
        raise TrainingError(
            f"training.batch_size={training.batch_size!r} is not valid: it must be a multiple of "
            f"training.micro_batch_size={training.micro_batch_size!r} times the number of processes, {processes}."
        )
    # accelerate silently ignores trackers that are not installed.
    if missing := set(training.trackers) - {str(name) for name in accelerator.log_with}:
        raise TrainingError(f"training.trackers={training.trackers!r} is not valid: {min(missing)!r} is not installed.")
    return accelerator


@contextlib.contextmanager
def explained(accelerator: Accelerator, timeout: int, where: Callable[[], str]) -> Iterator[None]:
    """Converts errors of communication between processes into a TrainingError; `where` returns how to continue."""
    try:
        yield
    except RuntimeError as error:
        text, processes = str(error), accelerator.num_processes
        if processes == 1 or isinstance(error, TrainingError):
            raise
        if any(words in text for words in _TIMED_OUT):
            what = f"has not answered for {timeout} seconds (training.ddp_timeout)"
        elif any(words in text for words in _GONE):
            what = "has ended"
        else:
            raise
        raise TrainingError(
            f"another of {processes} processes {what}. Process {accelerator.process_index} stops {where()} "
            f"({text.splitlines()[0]})"
        ) from error


def any_process(accelerator: Accelerator, here: bool) -> bool:
    """Returns whether the condition is true in any process, so that all leave the loop at the same step."""
    if accelerator.num_processes == 1:
        return here
    if here:
        accelerator.set_trigger()
    return accelerator.check_trigger()
