"""Speed and memory of a run, and the signals that stop it."""

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType

import torch

# Schedulers of clusters announce the end of a job by SIGTERM or SIGUSR1. Windows has no SIGUSR1.
STOP_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name))


class Speed:
    """The units per second of a run, such as tokens."""

    def __init__(self, step: int, per_step: int) -> None:
        self.per_step = per_step
        self.mark(step)

    def mark(self, step: int) -> None:
        """Begins a measurement."""
        self._marked, self._marked_step = time.monotonic(), step

    def until(self, step: int) -> float:
        """Returns the units per second since the last mark, and sets a new mark."""
        speed = (step - self._marked_step) * self.per_step / (time.monotonic() - self._marked)
        self.mark(step)
        return speed


def peak_memory() -> int:
    """Returns the largest memory in bytes: allocated on this process's GPU, or resident without a GPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    # Windows has no such module.
    import resource

    # In KiB on Linux, in bytes on macOS.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@contextlib.contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Collects SIGINT, SIGTERM and SIGUSR1 in the yielded list; a second SIGINT raises KeyboardInterrupt."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(number)

    # Signal handlers can only be set in the main thread.
    numbers = STOP_SIGNALS if threading.current_thread() is threading.main_thread() else ()
    old = {number: signal.signal(number, note) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
