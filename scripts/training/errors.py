"""Errors and interruptions of runs, and their messages on the command line."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator

from ..checks import Refused
from ..extras import explain


class TrainingError(RuntimeError):
    """A run cannot start or continue; the message gives the reason."""


class Interrupted(Exception):
    """A run was stopped by a signal, after writing a checkpoint."""

    def __init__(self, number: int, step: int) -> None:
        super().__init__(f"{signal.Signals(number).name} received: stopped after step {step}, with a checkpoint")
        self.number = number


@contextlib.contextmanager
def reported(advice: str) -> Iterator[None]:
    """Exits with a one-line message for user errors, and with `advice` for interruptions."""
    try:
        yield
    except BrokenPipeError:
        raise
    except (ValueError, OSError, ImportError, TrainingError) as error:
        # An error of a setting is the same in all processes.
        sys.exit(1 if isinstance(error, Refused) and int(os.environ.get("RANK", "0")) else f"error: {explain(error)}")
    except (Interrupted, KeyboardInterrupt) as stop:
        if not int(os.environ.get("RANK", "0")):
            print(f"{str(stop).strip() or 'interrupted'}. {advice}", file=sys.stderr)
        sys.exit(128 + getattr(stop, "number", signal.SIGINT))
