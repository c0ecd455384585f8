"""The processes of a command, started by torchrun or accelerate, and the division of the work among them.

In an evaluation each process has the whole model and a share of the work. There is no communication in forward passes:
the processes add their results once for each measurement, in float64. Shares may be uneven or empty. Only the first
process writes files and prints. For the division of a training run see `training/distributed.py`.
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
    """The processes, by default one, and this one's `rank`; their number is the product of the sizes.

    Attributes:
        dp_replicate: copies of the model, each of which gets a share of the data.
        dp_shard: the processes that share a copy by FSDP, each with a share of the data.
        tp: the processes that share a copy by tensor parallelism, with the same data.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    rank: int = 0

    def __str__(self) -> str:
        return f"dp_replicate {self.dp_replicate}, dp_shard {self.dp_shard}, tp {self.tp}"

    @property
    def count(self) -> int:
        return self.dp_replicate * self.dp_shard * self.tp

    @property
    def is_first(self) -> bool:
        """Whether this process writes and prints."""
        return self.rank == 0

    @property
    def is_sharded(self) -> bool:
        """Whether a process has only a part of the weights."""
        return self.dp_shard * self.tp > 1

    @property
    def data_share(self) -> tuple[int, int]:
        """The index of this process's share of the data, and the number of shares."""
        return self.rank // self.tp, self.dp_replicate * self.dp_shard

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """Returns this process's share of the items, which lie at equal distances."""
        index, shares = self.data_share
        return items[index::shares]

    def summed(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the sum of the tensors of all shares of the data; all processes call this."""
        if self.count == 1:
            return values
        from accelerate import PartialState
        from accelerate.utils import reduce

        total = reduce(values.to(PartialState().device), "sum").to(values.device)
        # Tensor-parallel processes have the same share.
        return total if self.tp == 1 else total / self.tp

    def joined(self, results: Sequence[T], count: int) -> list[T]:
        """Returns the results of `count` items from those of all processes for their shares; all call this."""
        if self.count == 1:
            return list(results)
        from accelerate.utils import gather_object

        every = dict(gather_object(list(zip(self.share(range(count)), results))))
        return [every[item] for item in range(count)]

    def of_first(self, value: Any) -> Any:
        """Returns the first process's value; all call this."""
        if self.count == 1:
            return value
        from accelerate.utils import broadcast_object_list

        return broadcast_object_list([value])[0]


# One process.
ALONE = Processes()


def is_first_process() -> bool:
    """Returns whether this is the first of the processes that a launcher started, which need not have joined yet."""
    return int(os.environ.get("RANK", "0")) == 0


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
    return Processes(state.num_processes, rank=state.process_index)
