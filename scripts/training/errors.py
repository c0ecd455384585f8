"""How a run ends early, and what the command line says about it."""

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator

from ..extras import explain


class TrainingError(RuntimeError):
    """A run that cannot start or continue, with the reason."""


class Interrupted(Exception):
    """A run that was asked to stop, and has written a checkpoint."""

    def __init__(self, number: int, step: int) -> None:
        super().__init__(f"{signal.Signals(number).name} received: stopped after step {step}, with a checkpoint")
        self.number = number


@contextlib.contextmanager
def reported(advice: Callable[[], str]) -> Iterator[None]:
    """Ends the process with one line for an error of the user, and with `advice()` for an interruption."""
    try:
        yield
    except (ValueError, OSError, ImportError, TrainingError) as error:
        sys.exit(f"error: {explain(error)}")
    except (Interrupted, KeyboardInterrupt) as stop:
        print(f"{str(stop).strip() or 'interrupted'}. {advice()}", file=sys.stderr)
        sys.exit(128 + getattr(stop, "number", signal.SIGINT))
