"""Errors of users, interruptions of runs, and their messages on the command line."""

import contextlib
import os
import shlex
import signal
import sys
from collections.abc import Iterator

from ..position_registration import imported_files
from .extras import explain
from .writing import why_not_written

# Commands that do not repeat what they have finished, and the options for that.
_CONTINUED = {"prepare": [], "demo": [], "reproduce": [], "benchmark": ["--resume"]}


class Refused(ValueError):
    """User input is not valid; the message has all known problems."""

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        super().__init__(problems[0] if len(problems) == 1 else "\n- ".join([f"{len(problems)} errors:", *problems]))


class TrainingError(RuntimeError):
    """A run cannot start or continue; the message gives the reason."""


class Interrupted(Exception):
    """A run was stopped by a signal; with `step`, after writing a checkpoint."""

    def __init__(self, number: int, step: int | None = None) -> None:
        written = "interrupted" if step is None else f"stopped after step {step}, with a checkpoint"
        super().__init__(f"{signal.Signals(number).name} received: {written}")
        self.number = number
        # Of the command line, to continue the run, if that is another command than the one that began it.
        self.arguments: list[str] | None = None


def program() -> list[str]:
    """Returns `whatwhere`, with the files of position encodings that were imported."""
    return ["whatwhere", *(word for file in imported_files for word in ("--import", file))]


def launched(arguments: list[str]) -> str:
    """Returns the command that runs `whatwhere` with these arguments, in as many processes as this run has."""
    processes = os.environ.get("WORLD_SIZE", "1")
    if processes == "1":
        return shlex.join([*program(), *arguments])
    command = shlex.join(["-m", *program(), *arguments])
    if processes == os.environ.get("LOCAL_WORLD_SIZE"):
        return f"torchrun --nproc_per_node {processes} {command}"
    return f"{command} (on every node, after the launcher and its options as before)"


@contextlib.contextmanager
def reported(name: str, arguments: list[str]) -> Iterator[None]:
    """Exits with a one-line message for errors of users, and for interruptions with the command to type next.

    `name` and `arguments` are of the command line.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except (ValueError, OSError, ImportError, TrainingError) as error:
        # An error of a setting is the same in all processes.
        sys.exit(1 if isinstance(error, Refused) and int(os.environ.get("RANK", "0")) else f"error: {explain(error)}")
    except (Interrupted, KeyboardInterrupt) as stop:
        if not int(os.environ.get("RANK", "0")):
            own, advice = getattr(stop, "arguments", None), "Start again with"
            if own is not None:
                arguments, advice = own, "Continue with"
            elif name in _CONTINUED:
                more = [option for option in _CONTINUED[name] if option not in arguments]
                arguments, advice = [*arguments, *more], "Continue with"
            print(f"{str(stop).strip() or 'interrupted'}. {advice}: {launched([name, *arguments])}", file=sys.stderr)
        sys.exit(128 + getattr(stop, "number", signal.SIGINT))
    except Exception as error:
        # Libraries raise exceptions of their own on a full disk.
        if (reason := why_not_written(error)) is None:
            raise
        sys.exit(f"error: a file cannot be read or written: {reason}.")
