"""What every test gets: a seed, one thread, no network; Triton kernels on the CPU where there is no GPU."""

import os
import tempfile

# Read by the Hugging Face libraries when they are imported.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "Agg")
# Tokenised text of the tests; one folder for all processes of a machine, since tests repeat the same texts.
os.environ.setdefault("WHATWHERE_CACHE", os.path.join(tempfile.gettempdir(), f"whatwhere-tests-{os.getuid()}"))

import gc
import importlib
import inspect
import pathlib
import socket
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

# Read when Triton is imported: without a GPU kernels run in its interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import transformers

from processes import TORCHRUN, python

torch.set_num_threads(1)

try:
    from triton.runtime import interpreter
except ImportError:
    pass
else:
    # The interpreter looks through all members of `triton.language` whenever a kernel calls a function, a third of its
    # time. Which of them it replaces never changes: here it looks once.
    found_members: dict[Any, list[str]] = {}

    def patch_builtin(package: Any, *rest: Any) -> None:
        is_builtin = interpreter.tl.core.is_builtin
        if package not in found_members:
            found_members[package] = [name for name, member in inspect.getmembers(package) if is_builtin(member)]
        for name in found_members[package]:
            member = getattr(package, name)
            if is_builtin(member):
                interpreter._patch_attr(package, name, member, *rest)

    if hasattr(interpreter, "_patch_attr"):
        interpreter._patch_builtin = patch_builtin


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--position-encoding", metavar="FILE", help="a file with position encodings to be tested, too")


def pytest_configure(config: pytest.Config) -> None:
    if file := config.getoption("--position-encoding"):
        importlib.import_module("whatwhere").import_position_encodings(file)


def pytest_collection_finish() -> None:
    """Garbage collections, for which engines and trainers ask, leave out the million objects of what is imported."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seed() -> None:
    """Every test starts from the same random state; WHATWHERE_TEST_SEED is another one."""
    transformers.set_seed(int(os.environ.get("WHATWHERE_TEST_SEED", "0")))


@pytest.fixture(scope="session", autouse=True)
def copies(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keeps the copies that `datasets` makes out of the user's cache."""
    folder = tmp_path_factory.mktemp("datasets")
    os.environ["HF_DATASETS_CACHE"] = str(folder)
    if "datasets" in sys.modules:
        sys.modules["datasets"].config.HF_DATASETS_CACHE = folder


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuses connections to other machines."""
    connect = socket.socket.connect

    def connect_here(self: socket.socket, address: tuple) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6) and not _is_here(str(address[0])):
            raise OSError(f"tests do not use the network (tried to connect to {address!r})")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", connect_here)


def _is_here(host: str) -> bool:
    return host in ("localhost", "::1", "") or host.startswith("127.")


@pytest.fixture(scope="session")
def data_dir() -> pathlib.Path:
    """The folder of real data sets that WHATWHERE_DATA_DIR names."""
    folder = os.environ.get("WHATWHERE_DATA_DIR")
    if not folder:
        pytest.skip("WHATWHERE_DATA_DIR is not set: it names a folder of real data sets")
    if not os.path.isdir(folder):
        pytest.fail(f"WHATWHERE_DATA_DIR={folder!r} is not a folder")
    return pathlib.Path(folder)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernels are tested: a GPU if there is one, unless they are interpreted."""
    interpreted = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0", "false", "False")
    return torch.device("cuda" if torch.cuda.is_available() and not interpreted else "cpu")


@pytest.fixture
def on_device(device: torch.device) -> Iterator[None]:
    """New tensors are on the device of kernels; new memory is NaN, or the largest integer; tiles are chosen anew."""
    from whatwhere.kernel_launch import CHOSEN

    CHOSEN.clear()
    torch.use_deterministic_algorithms(True, warn_only=True)
    if device.type != "cpu":
        torch.set_default_device(device)
    yield
    torch.set_default_device(None)
    torch.use_deterministic_algorithms(False)
    CHOSEN.clear()


@pytest.fixture
def little_scratch(monkeypatch):
    """Kernels compute their scratch memory in chunks of rows, or one part after the other."""
    from whatwhere import kernel_flash, kernel_pope

    monkeypatch.setattr(kernel_flash, "SCRATCH_BYTES", 1)
    monkeypatch.setattr(kernel_pope, "POPE_SCRATCH_BYTES", 1)
    monkeypatch.setattr(kernel_flash, "SCRATCH_FACTOR", 0)


@pytest.fixture
def refused(capsys):
    """Runs `whatwhere` with arguments that it refuses, and returns its message."""
    import whatwhere_cli as cli

    def run(*arguments):
        with pytest.raises(SystemExit) as stop:
            cli.main(list(map(str, arguments)))
        assert stop.value.code not in (0, None)
        return stop.value.code if isinstance(stop.value.code, str) else capsys.readouterr().err

    return run


@pytest.fixture
def refuses(refused):
    """Checks a table of arguments of a `whatwhere` command that are refused, and words of the message."""

    def check(command, table, *options):
        for *arguments, words in table:
            message = refused(command, *arguments, *options)
            assert words in message, f"{arguments}: {message}"

    return check


@pytest.fixture
def two_processes():
    """Runs `whatwhere` with arguments in two processes on CPUs, and returns what they print."""

    def run(*arguments):
        return python(*TORCHRUN, 2, "-m", "whatwhere", *arguments, "--device", "cpu")

    return run
