"""Progress messages of a run (a bar on a terminal, lines in a log), and the signals that stop it."""

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType

import torch
from tqdm.auto import tqdm

# Seconds before the first progress line in a log, and between two lines.
FIRST_LINE, NEXT_LINE = 10.0, 60.0
# Schedulers of clusters announce the end of a job by SIGTERM or SIGUSR1. Windows has no SIGUSR1.
STOP_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name))


class Progress:
    """The progress of a run."""

    def __init__(self, name: str, *, step: int, steps: int, unit: str, per_step: int, is_first: bool) -> None:
        self.name, self.steps, self.unit, self.per_step, self.is_first = name, steps, unit, per_step, is_first
        # On a terminal only.
        self.bar = tqdm(total=steps, initial=step, desc=name, unit="step", disable=None if is_first else True)
        self.mark(step)
        self._begun, self._first_step, self._next_line = self._marked, step, self._marked + FIRST_LINE

    def mark(self, step: int) -> None:
        """Restarts the measurement of speed."""
        self._marked, self._marked_step = time.monotonic(), step

    def speed(self, step: int, loss: float) -> float:
        """Returns the units per second since the last mark, displays them, and sets a new mark."""
        speed = (step - self._marked_step) * self.per_step / (time.monotonic() - self._marked)
        self.mark(step)
        self.bar.set_postfix({"loss": f"{loss:.3f}", f"{self.unit}/s": f"{speed:,.0f}"})
        return speed

    def advance(self, step: int, loss: torch.Tensor) -> None:
        """Displays a completed step."""
        self.bar.update()
        now = time.monotonic()
        if not (self.bar.disable and self.is_first and now >= self._next_line):
            return
        self._next_line = now + NEXT_LINE
        speed = (step - self._first_step) / (now - self._begun)
        left = tqdm.format_interval((self.steps - step) / speed)
        done = f"step {step:,} of {self.steps:,}, loss {loss.item():.3f}"
        print(
            f"{self.name}: {done}, {speed * self.per_step:,.0f} {self.unit}/s, {left} left", file=sys.stderr, flush=True
        )


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


def describe_seconds(seconds: float) -> str:
    """Returns a rounded duration: `40 s`, `12 min`, `3.5 h`, `4.2 days`."""
    for unit, size in (("days", 86_400), ("h", 3600)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"
