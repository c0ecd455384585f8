"""The progress of long work: a bar on a terminal, plain lines in a log."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from tqdm.auto import tqdm

# Seconds before the first line in a log, and between two lines; and between two states on a bar.
FIRST_LINE, NEXT_LINE, NEXT_STATE = 10.0, 30.0, 0.5


class Progress:
    """The progress of `total` units of work.

    A line in a log: `NAME: 40,960 of 163,840 tokens, 1,200 tokens/s, 01:42 left`.
    """

    def __init__(self, name: str, total: float, *, unit: str, done: float = 0, shown: bool = True) -> None:
        self.name, self.total, self.unit, self.done = name, total, unit, done
        options: dict[str, Any] = {"unit": f" {unit}", "unit_scale": True, "leave": False}
        self.bar = tqdm(total=total, initial=done, desc=name, disable=None if shown else True, **options)
        self._in_log = shown and self.bar.disable
        self._begun, self._first = time.monotonic(), done
        self._next_line = self._begun + FIRST_LINE
        self._next_state = self._begun

    def advance(self, count: float = 1, state: Callable[[], str] | None = None) -> None:
        """Counts completed units; `state` returns what a line says instead of their number, and the bar beside it."""
        self.done += count
        now = time.monotonic()
        # A state may wait for the device.
        if state is not None and not self.bar.disable and now >= self._next_state:
            self._next_state = now + NEXT_STATE
            self.bar.set_postfix_str(state(), refresh=False)
        self.bar.update(count)
        if not self._in_log or now < self._next_line or self.done <= self._first:
            return
        self._next_line = now + NEXT_LINE
        speed = (self.done - self._first) / (now - self._begun)
        left = tqdm.format_interval((self.total - self.done) / speed)
        what = state() if state else f"{self.done:,.0f} of {self.total:,.0f} {self.unit}"
        rate = f"{speed:,.{0 if speed >= 10 else 2}f} {self.unit}/s"
        print(f"{self.name}: {what}, {rate}, {left} left", file=sys.stderr, flush=True)

    def rename(self, name: str) -> None:
        """Changes the name."""
        self.name = name
        self.bar.set_description(name, refresh=False)

    def close(self) -> None:
        self.bar.close()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


@contextlib.contextmanager
def without_bars() -> Iterator[None]:
    """Shows no bars of `datasets` for what is not a data set of the user: texts in files, and generated samples."""
    import datasets

    if not datasets.is_progress_bar_enabled():
        yield
        return
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.enable_progress_bars()


def describe_seconds(seconds: float) -> str:
    """Returns a rounded duration: `40 s`, `12 min`, `3.5 h`, `4.2 days`."""
    for unit, size in (("days", 86_400), ("h", 3600)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"
