"""What every test gets: a seed, one thread, no network, Triton kernels on the CPU."""

import os

# Read when Triton is imported: kernels run in its interpreter. Only attn_implementation="triton" asks for them here.
os.environ.setdefault("TRITON_INTERPRET", "1")
# Read by the Hugging Face libraries when they are imported.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "Agg")

import pathlib
import socket

import pytest
import torch
import transformers

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seed() -> None:
    """Every test starts from the same random state."""
    transformers.set_seed(0)


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
