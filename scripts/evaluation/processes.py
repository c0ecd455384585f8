"""Evaluation in several processes, started by torchrun or accelerate: each has the whole model and a share of the work.

There is no communication in forward passes: the processes add their results once for each measurement, in float64.
Shares may be uneven or empty. Only the first process writes files and prints.
"""

import dataclasses
import datetime
import os
from collections.abc import Sequence
from typing import Any, TypeVar

import torch

T = TypeVar("T")

# Set by torchrun and accelerate, as WORLD_SIZE.
_VARIABLES = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclasses.dataclass(frozen=True)
class Processes:
    """The processes of an evaluation; by default one."""

    rank: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this process writes and prints."""
        return self.rank == 0

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """Returns this process's items: every `count`-th."""
        return items[self.rank :: self.count]

    def summed(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the sum of the tensors of all processes, which all call this."""
        if self.count == 1:
            return values
        from accelerate import PartialState
        from accelerate.utils import reduce

        return reduce(values.to(PartialState().device), "sum").to(values.device)

    def joined(self, results: Sequence[T], count: int) -> list[T]:
        """Returns the results of `count` items from those of all processes for their shares; all call this."""
        if self.count == 1:
            return list(results)
        from accelerate.utils import gather_object

        every = dict(gather_object(list(zip(range(count)[self.rank :: self.count], results))))
        return [every[item] for item in range(count)]

    def of_first(self, value: Any) -> Any:
        """Returns the first process's value; all call this."""
        if self.count == 1:
            return value
        from accelerate.utils import broadcast_object_list

        return broadcast_object_list([value])[0]


# One process.
ALONE = Processes()


def join(device: str | None) -> Processes:
    """Returns the processes that torchrun or accelerate started; each computes on the CPU or on its own GPU.

    `device` is the option `--device`: `cuda`, the default if there is a GPU, is this process's own GPU.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        return ALONE
    if missing := [name for name in _VARIABLES if name not in os.environ]:
        raise ValueError(
            f"WORLD_SIZE={count} is not valid without {', '.join(missing)}: start several processes with torchrun or "
            "accelerate launch."
        )
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device={device!r} is not valid with {count} processes. Allowed: 'cpu', 'cuda'.")
    gpus = torch.cuda.device_count()
    if device == "cuda" and int(os.environ["LOCAL_RANK"]) >= gpus:
        raise ValueError(
            f"device='cuda' is not valid with LOCAL_RANK={os.environ['LOCAL_RANK']}: this machine has {gpus} GPUs, and "
            "each process needs its own. Start fewer processes, or use --device cpu."
        )
    from accelerate import PartialState

    # A process may wait long for one with more work, or slower hardware; launchers notice those that end.
    state = PartialState(cpu=device == "cpu", timeout=datetime.timedelta(days=7))
    return Processes(state.process_index, state.num_processes)


def scorer(processes: Processes, *arguments: Any, **options: Any) -> Any:
    """Returns lm-eval's `HFLM`, with the requests divided among the processes; each process gets all answers.

    lm-eval's own division fails if a task has fewer questions than processes, and on CPUs it does not divide.
    """
    from lm_eval.models.huggingface import HFLM

    class Scorer(HFLM):
        # Requests (of all processes) that were too long.
        truncated = 0

        def _loglikelihood_tokens(
            self, requests: Any, disable_tqdm: bool = False, override_bs: int | None = None
        ) -> list[tuple[float, bool]]:
            self.truncated += sum(len(start) + len(end) > self.max_length + 1 for _, start, end in requests)
            mine, quiet = processes.share(requests), disable_tqdm or not processes.is_first
            answers = super()._loglikelihood_tokens(mine, quiet, override_bs) if mine else []
            return processes.joined(answers, len(requests))

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            mine = processes.share(requests)
            answers = super().generate_until(mine, disable_tqdm or not processes.is_first) if mine else []
            return processes.joined(answers, len(requests))

    model = Scorer(*arguments, **options)
    # lm-eval divides nothing.
    model._rank, model._world_size = 0, 1
    return model
