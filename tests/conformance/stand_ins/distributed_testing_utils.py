"""Stands in for a module that the source distribution of Transformers does not hold: starts ranks on the CPU (gloo)."""

import functools
import os
import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def _rank(rank: int, function: Callable, world_size: int, port: int, args: tuple, kwargs: dict) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    try:
        function(rank, *args, **kwargs)
    finally:
        dist.destroy_process_group()


def run_distributed(world_size: int) -> Callable:
    """Returns a decorator: the function is called as `function(rank, ...)` in every rank of a process group."""

    def decorate(function: Callable) -> Callable:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> None:
            _start_rank_processes(_rank, (function, world_size, _free_port(), args, kwargs), world_size)

        return call

    return decorate


def _start_rank_processes(function: Callable, args: tuple, nprocs: int) -> None:
    torch.multiprocessing.spawn(function, args=args, nprocs=nprocs)


def _get_distributed_backend() -> str:
    return "gloo"


def _get_distributed_device_type() -> str:
    return "cpu"


def _get_rank_device(rank: int) -> torch.device:
    return torch.device("cpu")


def _set_rank_device(rank: int) -> None:
    torch.set_num_threads(1)
