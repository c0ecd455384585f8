"""How kernels are launched: the choice of tiles, and how often a kernel is compiled."""

import ast
import contextlib
import inspect
import itertools
import json
import os
import pathlib
import sys
import types

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime import OutOfResources

import compile_kernels
from processes import python
from whatwhere import kernel_launch
from whatwhere.kernel_launch import Tiles
from whatwhere.scripts.benchmark import kernel_tiles

CANDIDATES = [Tiles(128, 64, 8, 3), Tiles(64, 64, 4, 2), Tiles(32, 32)]


def choose(failing=(), run=None):
    def compiles(tiles):
        return RuntimeError("ptxas died") if tiles in failing else None

    return kernel_launch.choose("a kernel", CANDIDATES, compiles, run)


def test_the_first_tiles_that_compile(monkeypatch):
    """Whatever the error of the compiler; nothing is timed."""
    monkeypatch.delenv("WHATWHERE_TILES", raising=False)
    assert choose() == CANDIDATES[0]
    assert choose(failing=CANDIDATES[:2]) == CANDIDATES[2]
    with pytest.raises(RuntimeError, match="No tiles compile for a kernel") as error:
        choose(failing=CANDIDATES)
    assert "ptxas died" in str(error.value.__cause__)


class Kernel:
    """Something like a compiled kernel: what `warmup` and loading raise."""

    fn, cache_key = types.SimpleNamespace(__name__="a_kernel"), "0" * 20

    def __init__(self, compilation=None, loading=None):
        self.compilation, self.loading, self.sizes = compilation, loading, []

    def warmup(self, *arguments, BLOCK_N, **constants):
        if self.compilation:
            raise self.compilation
        return self

    def _init_handles(self):
        if self.loading:
            raise self.loading

    def __getitem__(self, grid):
        return lambda *arguments, BLOCK_N, **constants: self.sizes.append(BLOCK_N)


@pytest.fixture
def a_gpu(monkeypatch):
    """Launches as on a GPU, which is not there."""
    monkeypatch.setattr(kernel_launch, "INTERPRETED", False)
    monkeypatch.setattr(kernel_launch, "CHOSEN", {})
    monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.delenv("WHATWHERE_TILES", raising=False)


def test_errors_of_the_device_are_raised(a_gpu):
    """They are not taken for tiles that do not fit."""

    def run(kernel):
        kernel_launch.launch(kernel, (1,), CANDIDATES, (torch.empty(1),), {})

    for error in (RuntimeError("ptxas died"), AssertionError("no layout")):
        with pytest.raises(RuntimeError, match="No tiles compile"):
            run(Kernel(compilation=error))
    with pytest.raises(RuntimeError, match="No tiles compile"):
        run(Kernel(loading=OutOfResources(2, 1, "shared memory")))
    for text in ("an illegal memory access was encountered", "out of memory"):
        error = RuntimeError(f"Triton Error [CUDA]: {text}")
        for kernel in (Kernel(loading=error), Kernel(compilation=error)):
            with pytest.raises(RuntimeError, match=text):
                run(kernel)
    # Nor are errors of the machine.
    for error in (OSError("No space left on device"), MemoryError()):
        with pytest.raises(type(error)):
            run(Kernel(compilation=error))


class Aligned(Kernel):
    """A kernel that needs more shared memory if a number is not divisible by 16: Triton compiles it for both."""

    def warmup(self, tensor, number, *, BLOCK_N, **constants):
        def load():
            if number % 16 and BLOCK_N > 32:
                raise OutOfResources(2, 1, "shared memory")

        return types.SimpleNamespace(_init_handles=load)

    def __getitem__(self, grid):
        def run(tensor, number, *, BLOCK_N, **constants):
            self.warmup(tensor, number, BLOCK_N=BLOCK_N)._init_handles()
            if number < 0:
                raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")
            self.sizes.append(BLOCK_N)

        return run


def test_tiles_that_fit_one_alignment_only(a_gpu):
    """The next candidate is taken at the launch, and kept."""
    kernel = Aligned()
    for number in (64, 63, 64):
        kernel_launch.launch(kernel, (1,), CANDIDATES, (torch.empty(1), number), {})
    assert kernel.sizes == [64, 32, 32]
    # Other errors of a launch are raised.
    with pytest.raises(RuntimeError, match="illegal memory access"):
        kernel_launch.launch(kernel, (1,), CANDIDATES, (torch.empty(1), -16), {})


def test_tiles_are_chosen_for_types_constants_and_optional_arguments(a_gpu):
    """What fits in one does not fit in another."""
    kernel = Kernel()
    for count, (dtype, precision) in enumerate(
        [(torch.float32, "ieee"), (torch.float32, "tf32"), (torch.bfloat16, "ieee")], start=1
    ):
        given = torch.empty(1, 1, 1, 1, dtype=dtype)
        for first, optional in itertools.product((given, kernel_launch.heads(given)), (given, None)):
            kernel_launch.launch(kernel, (1,), CANDIDATES, (first, optional), {"PRECISION": precision})
            kernel_launch.launch(kernel, (2,), CANDIDATES, (first, optional), {"PRECISION": precision})
        assert len(kernel_launch.CHOSEN) == 4 * count


@pytest.mark.parametrize(
    ("hip", "arch", "expected"),
    [
        (None, "", "tf32"),
        ("6.4", "gfx942:sramecc+:xnack-", "tf32"),
        ("6.4", "gfx90a", "ieee"),
        ("7.0", "gfx950", "ieee"),
    ],
)
def test_tf32_only_where_triton_has_it(monkeypatch, hip, arch, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda *device: types.SimpleNamespace(gcnArchName=arch, name="a GPU")
    )
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        assert kernel_launch.precision(torch.float32, 64) == expected
        # Wide heads do not fit the shared memory of every GPU.
        assert kernel_launch.precision(torch.float32, 256) == "ieee"
        assert kernel_launch.precision(torch.bfloat16, 64) == "ieee"
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert kernel_launch.precision(torch.float32, 64) == "ieee"


def test_a_file_has_what_was_measured(monkeypatch, tmp_path):
    file = tmp_path / "tiles.json"
    seconds = {CANDIDATES[0]: 3.0, CANDIDATES[1]: 1.0, CANDIDATES[2]: 2.0}
    monkeypatch.setattr(kernel_launch.triton.testing, "do_bench", lambda timed, **_: seconds[timed.args[0]])
    monkeypatch.delenv("WHATWHERE_TILES", raising=False)
    with kernel_tiles.measured(file):
        assert choose(run=lambda tiles: None) == CANDIDATES[1]
        assert choose(failing=CANDIDATES[1:2]) == CANDIDATES[0]
    # What is known is not measured again.
    with kernel_tiles.measured(file):
        assert choose(run=lambda tiles: None) == CANDIDATES[1]
    assert json.loads(file.read_text()) == {"a kernel": [64, 64, 4, 2]}
    rows = [line.split(",") for line in file.with_suffix(".csv").read_text().splitlines()[1:]]
    assert [row[1:] for row in rows[:3]] == [["128x64w8s3", "3.0000"], ["64x64w4s2", "1.0000"], ["32x32w4s1", "2.0000"]]
    assert choose() == CANDIDATES[0]
    monkeypatch.setenv("WHATWHERE_TILES", str(file))
    assert choose() == CANDIDATES[1]
    assert choose(failing=CANDIDATES[:2]) == CANDIDATES[2]
    # Other sizes than the candidates may not fit the grid, or the other kernels: those of a version with another list.
    file.write_text(json.dumps({"a kernel": [256, 64, 4, 2]}))
    assert choose() == CANDIDATES[0]
    with kernel_tiles.measured(file):
        assert choose(run=lambda tiles: None) == CANDIDATES[1]


COUNT = """
import json
import torch
import triton
from compile_kernels import _Driver
from whatwhere import kernel_cope, kernel_flash, kernel_pope
from whatwhere.kernel_cope import cope_attention
from whatwhere.kernel_pope import pope_attention

found = {}

def count(*, fn, compile, **_):
    found.setdefault(fn.name.rpartition(".")[2], set()).add(compile["key"])
    return True  # It is not compiled.

def launch(kernel, grid, candidates, arguments, constants, **_):
    tiles = candidates[0]
    sizes = {"BLOCK_M": tiles.rows, "BLOCK_N": tiles.columns, "num_warps": tiles.warps, "num_stages": tiles.stages}
    kernel.warmup(*arguments, **constants, **sizes, grid=(1,))

triton.knobs.runtime.jit_cache_hook = count
triton.runtime.driver.set_active(_Driver("sm_90"))
for module in (kernel_cope, kernel_flash, kernel_pope):
    module.launch = launch

def call(rows, keys, packed):
    query, key, value = (torch.empty(2, 4, length, 64, dtype=torch.bfloat16) for length in (rows, keys, keys))
    key_ranges = torch.empty(2, 1, rows + keys, 2, dtype=torch.int32) if packed else None
    table = torch.empty(64, 32)
    phases = [torch.empty(1, length, 64).half() for length in (rows, rows, keys, keys)]
    for one in (query, key, value):
        one.requires_grad_(rows > 1)
    cope = cope_attention(query, key, value, table, key_ranges=key_ranges, scaling=0.1, position_scale=1.0)
    pope = pope_attention(query, key, value, (*phases, torch.empty(4, 64)), key_ranges=key_ranges, scaling=0.1)
    if rows > 1:
        (cope + pope).sum().backward()

for packed in (False, True):
    for keys in range(100, 300):
        call(1, keys, packed)
    for length in (7, 64, 100, 129, 256, 300, 513, 777, 1000, 1024):
        call(length, length, packed)
print(json.dumps({name: len(keys) for name, keys in found.items()}))
"""


def test_lengths_do_not_compile_kernels_again(tmp_path):
    """200 decoding steps and ten lengths, with and without key ranges, as a GPU's driver would see them."""
    (tmp_path / "count.py").write_text(COUNT, encoding="utf-8")
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    said = python("count.py", env={"TRITON_INTERPRET": None, "PYTHONPATH": path}, cwd=tmp_path)
    counts = json.loads(said.splitlines()[-1])
    assert counts.keys() >= {"forward_kernel", "decode_kernel", "_window_forward", "_window_columns", "turn_kernel"}
    # With and without key ranges; and a cache whose strides are, or are not, multiples of 16.
    assert max(counts.values()) <= 4, counts


def test_tuples_that_hold_none_are_not_compared_with_none():
    """Triton 3.6 does not compile it, even if the result is known: kernels compare a member of the tuple."""
    names = set()
    for launches in compile_kernels.variants().values():
        kernel, arguments, *_ = launches[0]
        for name, argument in zip(inspect.signature(kernel.fn).parameters, arguments):
            if isinstance(argument, tuple) and any(part is None for part in argument):
                names.add(name)
    assert names == {"logit_bias", "polar"}
    compared = []
    for path in sorted(pathlib.Path(kernel_launch.__file__).parent.glob("kernel_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and "triton.jit" in "".join(map(ast.unparse, node.decorator_list)):
                comparisons = [one for one in ast.walk(node) if isinstance(one, ast.Compare)]
                compared += [
                    f"{path.name}:{one.lineno}: {ast.unparse(one)}"
                    for one in comparisons
                    if {ast.unparse(part) for part in (one.left, *one.comparators)} & names
                ]
    assert not compared, "\n".join(compared)


@pytest.mark.parametrize("content", [None, "{cut"])
def test_an_unreadable_file_of_tiles_is_named(tmp_path, monkeypatch, content):
    file = tmp_path / "tiles.json"
    if content is not None:
        file.write_text(content)
    monkeypatch.setenv("WHATWHERE_TILES", str(file))
    with pytest.raises(ValueError, match=r"WHATWHERE_TILES='.*tiles\.json' cannot be read"):
        kernel_launch.choose("kernel", [kernel_launch.Tiles(16, 16)], lambda tiles: None, None)
