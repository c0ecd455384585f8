"""The kernels compile for GPUs that are not here, and fit them. (The interpreter accepts what does not compile.)"""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="the kernels are written in Triton")

import compile_kernels
from compile_kernels import CODE_TARGETS, TARGETS, Code, Compiled, Known, loops, occupancy, problems_of

pytestmark = pytest.mark.slow

# Under pytest-xdist the other core has work of its own.
JOBS = "1" if "PYTEST_XDIST_WORKER" in os.environ else "2"


def run(folder, *arguments, code=None):
    """Runs the command, or some code, in a process of its own: in this one kernels are interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # The tests share what they compile.
    environment |= {"TRITON_CACHE_DIR": str(folder.parent / "compiled_kernels"), "PYTHONWARNINGS": "ignore"}
    environment["PYTHONPATH"] = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    command = [compile_kernels.__file__]
    if code:
        # Triton reads the source of a kernel from its file.
        (folder / "command.py").write_text(code, encoding="utf-8")
        command = ["command.py"]
    return subprocess.run(
        [sys.executable, *command, *arguments], env=environment, cwd=folder, capture_output=True, text=True
    )


# Kernels that are the same for all flags.
ONCE = [f"{name} cope bfloat16 D=64" for name in ("row_products", "position_values", "combine")]
# Each kernel once, with most of what flags add.
EACH = [f"{name} bfloat16 D=64 mask=packed" for name in ("cope", "pope", "fox", "relative")]
WIDTHS = [f"{name} bfloat16 D={width}" for name in ("cope", "pope") for width in (128, 256)]
WIDTHS += ["cope bfloat16 D=40", "cope float32 D=64", "relative float32 D=64"]
WIDE = [f"{name} float32 D=256" for name in ("cope", "pope")]
WIDE += [f"{name} tf32 D=128" for name in ("window_columns cope", "columns pope")]
WIDE += ["window_columns cope tf32 D=64"]


@pytest.mark.parametrize(
    ("targets", "only"),
    [
        # All flags.
        (["sm_90"], [" bfloat16 D=64"]),
        # (All flags for all targets take half an hour.)
        (["sm_89", "sm_100"], [*EACH, *ONCE]),
        (["gfx942"], [*EACH, *ONCE, "turn pope bfloat16 D=64"]),
        # Other head dims and float32; sm_86, sm_89 and sm_120 have 99 KB of shared memory, less than others of NVIDIA.
        (["sm_89", "sm_90"], WIDTHS),
        # What needs most shared memory, where there is least.
        (["sm_89", "sm_120", "gfx942"], WIDE),
    ],
    ids=["flags", "sm_89, sm_100", "gfx942", "widths", "wide"],
)
def test_every_kernel_compiles_and_fits(tmp_path, targets, only):
    names = [argument for name in only for argument in ("--only", name)]
    output = tmp_path / "kernels.json"
    done = run(tmp_path, "--targets", ",".join(targets), *names, "--jobs", JOBS, "--json", str(output))
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [Compiled(**entry) for entry in json.loads(output.read_text())]
    fitting = {(result.target, result.variant) for result in found if result.fits}
    assert fitting == {(result.target, result.variant) for result in found}
    assert {target for target, _ in fitting} == set(targets)
    kernels = {variant.split()[0] for _, variant in fitting}
    assert kernels >= {"forward", "backward_rows", "backward_columns", "row_products", "decode", "combine"}
    assert kernels >= {"position_values", "window_forward", "window_rows", "window_columns"}
    for result in found:
        if result.fits:
            assert result.shared <= TARGETS[result.target].shared
            assert result.registers is None or 0 < result.registers <= TARGETS[result.target].registers


@pytest.mark.parametrize(
    ("target", "only"),
    # sm_80 and sm_89 have the same instructions, and the kernels for sm_100 compile slowly.
    [("sm_90", ""), ("sm_100", " D=64"), ("sm_80", " D=64"), ("sm_89", " D=128")],
)
def test_compiled_code_is_no_worse(tmp_path, target, only):
    """No serialised wgmma, no local memory in loops, and no more instructions than in kernel_code.json."""
    done = run(tmp_path, "--code", "--targets", target, "--only", only, "--jobs", JOBS)
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-3000:]


def test_loops_of_disassembly():
    """Innermost ones, with what is between the label and the jump back; forward jumps are none."""
    lines = [
        *("        /*0000*/                   S2R R0, SR_TID.X ;", ".L_x_1:", "        /*0010*/   @P0 BRA `(.L_x_3) ;"),
        *(".L_x_2:", "        /*0020*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;"),
        *("        /*0030*/  {                LDL.64 R2, [R1] ;", "        /*0040*/  @!P1 BRA `(.L_x_2) ;"),
        *("        /*0050*/                   HFMA2.MMA R1, -RZ, RZ, 0, 0 ;", "        /*0060*/  @P2 BRA `(.L_x_1) ;"),
        *(".L_x_3:", "        /*0070*/                   EXIT ;", ".L_x_4:", "        /*0080*/  BRA `(.L_x_4) ;"),
    ]
    assert loops("\n".join(lines)) == [["HMMA.16816.F32.BF16", "LDL.64", "BRA"], ["BRA"]]


def test_code_that_became_worse(monkeypatch):
    def found(loops, local=0, warnings=(), variant="forward plain"):
        code = Code(loops, local, list(warnings))
        return problems_of([Compiled(variant, "sm_90", "64x64", 4, 1, fits=True, code=code)], known)

    known = {"sm_90": {"forward plain": [300, 400], "other": [9]}}
    monkeypatch.setattr(compile_kernels, "EXCEPTIONS", ())
    assert found([300, 400]) == found([299, 400]) == []
    assert found([299, 401]) == [
        "sm_90, forward plain, tiles 64x64: more instructions in a loop: [299, 401], in kernel_code.json [300, 400]"
    ]
    assert "run with --code --write" in found([300])[0]
    assert "in kernel_code.json None" in found([9], variant="new")[0]
    assert found([300, 400], 2, ["C7515"]) == [
        "sm_90, forward plain, tiles 64x64: C7515 in a loop, which EXCEPTIONS does not list",
        "sm_90, forward plain, tiles 64x64: local memory in a loop, which EXCEPTIONS does not list",
    ]
    known_one = Known("C7515", "the reason", ("sm_80", "sm_90"), ("forward",))
    monkeypatch.setattr(compile_kernels, "EXCEPTIONS", (known_one,))
    assert found([300, 400], warnings=["C7515"]) == []
    # One that is mended is not kept.
    assert found([300, 400]) == ["EXCEPTIONS: ('C7515', 'sm_90', 'forward') is in no loop any more: remove it"]
    assert found([9], variant="other") == []


def test_every_exception_is_of_a_known_kernel():
    known = json.loads(compile_kernels.CODE_FILE.read_text())
    assert {*CODE_TARGETS} == known.keys() - {"triton"}
    for one in compile_kernels.EXCEPTIONS:
        for target in one.targets:
            assert all(any(name.startswith(start) for name in known[target]) for start in one.variants)


FALLBACK = """
import json
import pathlib
import sys
import compile_kernels
import torch
import triton
import triton.language as tl
from whatwhere.kernel_launch import Tiles

pathlib.Path("names.json").write_text(json.dumps(list(compile_kernels.variants())))

@triton.jit
def product(left, right, out, size, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WRONG: tl.constexpr):
    rows, columns = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_M, BLOCK_M], dtype=tl.float32)
    for start in range(0, size, BLOCK_N):
        a = tl.load(left + rows[:, None] * size + start + columns[None, :])
        b = tl.load(right + (start + columns)[:, None] * size + rows[None, :])
        total = tl.dot(a, b, total)
    if WRONG:
        total += tl.arange(0, 3)
    tl.store(out + rows[:, None] * size + rows[None, :], total)

arguments = (*torch.empty(2, 256, 256, dtype=torch.bfloat16), torch.empty(256, 256), 256)
tiles = {"falls back": [Tiles(256, 256, 8, 4), Tiles(32, 32, 4, 2)], "too large": [Tiles(256, 256, 8, 4)],
         "wrong": [Tiles(32, 32)]}
listed = {}
for name in tiles:
    listed[name] = [(product, arguments, {"WRONG": name == "wrong"}, tile) for tile in tiles[name]]
compile_kernels.variants = lambda code: listed
sys.exit(compile_kernels.main())
"""


def test_flags_of_launches_and_tiles_that_do_not_fit(tmp_path):
    """All in one process, which takes seconds to start."""
    result = tmp_path / "kernels.json"
    done = run(tmp_path, "--targets", "sm_80", "--json", str(result), code=FALLBACK)
    names = json.loads((tmp_path / "names.json").read_text())
    for kernel in ("window_forward", "window_rows", "window_columns"):
        assert f"{kernel} cope bfloat16 D=64" in names
        assert f"{kernel} cope bfloat16 D=64 mask=packed" in names
        assert f"{kernel} cope bfloat16 D=64 mask=padding gates=separate_key" in names
    assert "backward_columns pope bfloat16 D=64 groups=2" in names
    assert "window_forward cope bfloat16 D=64 decoding" in names
    assert "backward_rows plain bfloat16 D=64 mask=packed" in names
    assert "decode pope bfloat16 D=64 mask=packed decoding" in names
    # The first tiles are too large for the target's shared memory, the second are not.
    found = [Compiled(**entry) for entry in json.loads(result.read_text())]
    first, second = (entry for entry in found if entry.variant == "falls back")
    assert (first.tiles, first.fits, second.tiles, second.fits) == ("256x256", False, "32x32", True)
    assert first.shared > TARGETS["sm_80"].shared >= second.shared
    assert "1 variants fit" in done.stdout
    assert "falls back" not in done.stderr
    # A variant without tiles that fit, and one that does not compile, fail.
    assert done.returncode == 1, done.stderr
    for name, text in (("too large", "no tiles fit"), ("wrong", "does not compile")):
        assert any(name in line and text in line for line in done.stderr.splitlines()), done.stderr


def test_refuses_the_interpreter(monkeypatch, capsys):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(SystemExit) as exit_:
        compile_kernels.main([])
    assert exit_.value.code == 2
    assert "TRITON_INTERPRET='1' is set" in capsys.readouterr().err


def test_refuses_unknown_targets(monkeypatch, capsys):
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(SystemExit):
        compile_kernels.main(["--targets", "sm_90,sm_1"])
    error = capsys.readouterr().err
    assert "'sm_1'" in error
    assert "'sm_80', 'sm_89', 'sm_90', 'sm_100', 'sm_120', 'gfx942'" in error


def test_occupancy():
    """By hand: 65,536 registers, 228 KiB and 64 warps of a multiprocessor."""
    hopper = TARGETS["sm_90"]
    assert occupancy(255, 0, 4, hopper) == 8
    assert occupancy(128, 0, 4, hopper) == 16
    assert occupancy(32, 0, 4, hopper) == 64
    assert occupancy(32, 100 << 10, 8, hopper) == 16
    assert occupancy(None, 0, 4, hopper) is None
    assert occupancy(128, 0, 4, TARGETS["gfx942"]) == 16
