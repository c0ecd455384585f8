"""Compiles every Triton kernel for several GPUs, on a machine without a GPU, and shows the resources of the code.

    python tests/compile_kernels.py                                  # all kernels, five targets
    python tests/compile_kernels.py --targets sm_90 --only "forward pope bfloat16 D=64"
    python tests/compile_kernels.py --targets sm_90 --all-tiles --json kernels.json
    python tests/compile_kernels.py --code --targets sm_90            # compared with kernel_code.json
    python tests/compile_kernels.py --code --write                   # after a change of a kernel

The interpreter accepts code that does not compile, and a compiled kernel can need more shared memory than a device has.
So each variant (a kernel with its flags, types and head dim) is compiled with its tile sizes in order, until one fits
the target, as in the fallback of `kernel_launch`. `--all-tiles` compiles all. The variants are the launches of calls of
`kernel_cases`, which are recorded but not executed.

The columns: tiles (query rows x keys), warps, stages, bytes of shared memory, registers per thread, spilled bytes per
thread (on gfx942: spilled registers), maximum number of warps per multiprocessor, seconds to compile. Values are
"unknown" without cuobjdump, which is part of Triton's package.

`--code` compiles what training and decoding in bfloat16 run, for the targets of `CODE_TARGETS`, and disassembles it. In
loops with matrix products, or of more than 60 instructions, it counts instructions, and reads and writes of local
memory (spills in a loop). ptxas says C75xx where it serialises wgmma. None of these may be new (`EXCEPTIONS` lists the
known ones, with reasons), and no loop longer than in `kernel_code.json`, which `--write` writes.

The exit code is 1 if some tiles do not compile, if no tiles of a variant fit a target, or if code became worse; 2 for a
wrong command.
TRITON_INTERPRET must not be set, because kernels for the interpreter cannot be compiled.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import functools
import importlib
import itertools
import json
import multiprocessing
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch

from whatwhere.scripts.benchmark.kernel_cases import KERNELS, Case, case, precision_of


@dataclasses.dataclass(frozen=True)
class Target:
    """A kind of GPU.

    Attributes:
        shared: maximum bytes of shared memory per block.
        registers: maximum registers per thread.
        unit_shared: bytes of shared memory per multiprocessor.
        unit_registers: 32-bit registers per multiprocessor.
        unit_warps: maximum warps per multiprocessor.
    """

    backend: str
    arch: int | str
    warp: int
    shared: int
    registers: int
    unit_shared: int
    unit_registers: int
    unit_warps: int


TARGETS = {
    "sm_80": Target("cuda", 80, 32, 163 << 10, 255, 164 << 10, 65536, 64),
    "sm_89": Target("cuda", 89, 32, 99 << 10, 255, 100 << 10, 65536, 48),
    "sm_90": Target("cuda", 90, 32, 227 << 10, 255, 228 << 10, 65536, 64),
    "sm_100": Target("cuda", 100, 32, 227 << 10, 255, 228 << 10, 65536, 64),
    "sm_120": Target("cuda", 120, 32, 99 << 10, 255, 100 << 10, 65536, 48),
    # A compute unit has four SIMD units of 512 registers for each of 64 lanes.
    "gfx942": Target("hip", "gfx942", 64, 64 << 10, 512, 64 << 10, 4 * 512 * 64, 32),
}


@dataclasses.dataclass
class Compiled:
    """One variant with some tiles, for one target; numbers are None where they are unknown."""

    variant: str
    target: str
    tiles: str
    warps: int
    stages: int
    shared: int | None = None
    registers: int | None = None
    spills: int | None = None
    occupancy: int | None = None
    seconds: float = 0.0
    error: str = ""
    fits: bool = False
    code: "Code | None" = None


@dataclasses.dataclass
class Code:
    """What a kernel for NVIDIA is made of.

    Attributes:
        loops: the instructions of each innermost loop with matrix products, or with more than 60 instructions.
        local: instructions in these loops that read or write local memory.
        warnings: of ptxas, by number.
    """

    loops: list[int]
    local: int
    warnings: list[str]


# What `--code` compiles for: mma.sync (with the least shared memory, too), wgmma, and tcgen05.
CODE_TARGETS = ("sm_80", "sm_89", "sm_90", "sm_100")
CODE_FILE = pathlib.Path(__file__).with_name("kernel_code.json")


@dataclasses.dataclass(frozen=True)
class Known:
    """A known warning of ptxas, or local memory in loops.

    Attributes:
        targets, variants: where it is; of variants the beginning of the names.
    """

    what: str
    reason: str
    targets: tuple[str, ...]
    variants: tuple[str, ...]


# A launch does not look for tiles without spills. Compilers report spilled bytes, not where they are: on sm_90 and
# sm_100 all are outside of loops, and tiles without need more instructions (backward_columns of cope with D=128: 440
# instead of 283). On sm_80 tiles without have 15 to 35 % more instructions in forward, and 14 % less to 7 % more in
# backward, as far as such tiles are known: `gpu-check` measures them.
_REGISTERS = "tiles are chosen for sm_90: products of Ampere have their operands in registers"
EXCEPTIONS = (
    Known(
        "local memory",
        _REGISTERS,
        ("sm_80", "sm_89"),
        (
            *(f"backward_columns {name} bfloat16 D=128" for name in ("cope", "fox", "plain")),
            *(
                "backward_rows cope bfloat16 D=128",
                "backward_rows plain bfloat16 D=128",
                "backward_rows pope bfloat16 D=64",
            ),
            *(f"forward {name} bfloat16 D=128" for name in ("cope", "fox", "plain")),
            *("position_values cope bfloat16 D=128", "window_forward cope bfloat16 D=128"),
            *("window_columns cope bfloat16 D=64", "window_columns cope bfloat16 D=128"),
        ),
    ),
    Known("local memory", _REGISTERS, ("sm_80",), ("backward_rows pope bfloat16 D=128",)),
    Known("local memory", _REGISTERS, ("sm_89",), ("backward_columns pope bfloat16 D=64",)),
)

# Kernel, arguments, constants, tiles.
Entry = tuple[Any, tuple[Any, ...], dict[str, Any], Any]


@dataclasses.dataclass(frozen=True)
class Launch:
    """A launch of a kernel, with the grid of its first candidate."""

    kernel: Any
    grid: tuple[int, ...]
    candidates: tuple[Any, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]


@contextlib.contextmanager
def recording() -> Iterator[list[Launch]]:
    """Within it, launches are recorded and not run: with tensors on the meta device, no GPU is needed."""
    from whatwhere import kernel_launch

    original, found = kernel_launch.launch, list[Launch]()

    def record(kernel, grid, candidates, arguments, constants, **settings):
        grid = grid(candidates[0]) if callable(grid) else grid
        found.append(Launch(kernel, grid, tuple(candidates), tuple(arguments), constants))

    # Every file of kernels has the function under this name.
    for file in sorted(pathlib.Path(kernel_launch.__file__).parent.glob("kernel_*.py")):
        importlib.import_module(f"whatwhere.{file.stem}")
    users = [module for name, module in sys.modules.items() if name.startswith("whatwhere.kernel_")]
    modules: list[Any] = [one for one in users if getattr(one, "launch", None) is original]
    for module in modules:
        module.launch = record
    try:
        yield found
    finally:
        for module in modules:
            module.launch = original


@functools.cache
def variants(code: bool = False) -> dict[str, list[Entry]]:
    """Returns the launches of `calls` or `code_calls` by name, with an entry for each tile size in order."""
    grouped: dict[str, list[Entry]] = {}
    known: list[tuple[Any, ...]] = []
    for label, call in code_calls() if code else calls():
        with recording() as launches:
            call()
        for one in launches:
            types = str([_type(argument) for argument in one.arguments])
            # Different flags can give the same kernel: the plain part of CoPE does not depend on gates.
            if (one.kernel, types, one.constants) not in known:
                known.append((one.kernel, types, one.constants))
                name = f"{one.kernel.fn.__name__.strip('_').removesuffix('_kernel')} {label}"
                # Both directions of a kernel, or its calls for queries and keys.
                name += f" {sum(other.startswith(name) for other in grouped) + 1}" if name in grouped else ""
                grouped[name] = [(one.kernel, one.arguments, one.constants, tiles) for tiles in one.candidates]
    return grouped


def _type(argument: Any) -> Any:
    if isinstance(argument, tuple):
        return [_type(part) for part in argument]
    return argument.dtype if isinstance(argument, torch.Tensor) else None if argument is None else type(argument)


class _Driver:
    """A driver that reports a target to Triton's compiler, without a GPU."""

    def __init__(self, target_name: str) -> None:
        # Triton caches compiled kernels by device number.
        self.number = list(TARGETS).index(target_name)
        self.target = TARGETS[target_name]

    def get_current_device(self) -> int:
        return self.number

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget(self.target.backend, self.target.arch, self.target.warp)


def calls() -> Iterator[tuple[str, Callable[[], None]]]:
    """Yields name and call of `kernel_cases`, forward and backward, and decoding.

    All variants with head dim 64 in bfloat16; other head dims, float32 and TF32 without options. What needs most shared
    memory, float32 with head dim 256, decodes with many heads for a key head.
    """
    types = [("bfloat16", width) for width in (64, 128, 256, 40)]
    types += [("float32", 64), ("float32", 256), ("tf32", 64), ("tf32", 128)]
    for (dtype, head_dim), (name, kernel), rows in itertools.product(types, KERNELS.items(), (1024, 1)):
        for variant in kernel.variants if (dtype, head_dim) == types[0] else kernel.variants[:1]:
            heads = {"heads": 128, "groups": 1} if (dtype, head_dim, rows) == ("float32", 256, 1) else {}
            yield _call(name, dtype, head_dim, rows, variant, heads)


def code_calls() -> Iterator[tuple[str, Callable[[], None]]]:
    """Yields name and call of what `--code` compiles: causal training and decoding in bfloat16."""
    kernels: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in ("plain", "pope", "fox", "cope")]
    kernels += [("cope", {"gates": gates}) for gates in ("separate_key", "value")]
    for head_dim, (name, variant), rows in itertools.product((64, 128), kernels, (1024, 1)):
        yield _call(name, "bfloat16", head_dim, rows, variant, {})


def _call(
    name: str, dtype: str, head_dim: int, rows: int, variant: dict[str, Any], heads: dict[str, int]
) -> tuple[str, Callable[[], None]]:
    flags = [name, dtype, f"D={head_dim}", *(f"{key}={value}" for key, value in variant.items())]
    one = case(name, dtype, head_dim, rows, 1024, **{"batch": 1, **variant, **heads})
    return " ".join([*flags, *(["decoding"] if rows == 1 else [])]), functools.partial(_run, one)


def _run(one: Case) -> None:
    call = KERNELS[one.kernel].call(one, torch.device("cpu"))
    inputs = [tensor.requires_grad_(one.queries > 1) for tensor in call.inputs]
    # Without a GPU there is no TF32.
    with precision_of(one), mock.patch("torch.cuda.is_available", return_value=one.dtype == "tf32"):
        out = call.kernel(*inputs)
        if one.queries > 1:
            out.backward(torch.empty_like(out))


def compile_one(name: str, entry: Entry, target_name: str, code: bool = False) -> Compiled:
    """Compiles one variant with some tiles for a target; with `code`, looks into what fits."""
    from triton.runtime import driver

    kernel, arguments, constants, tiles = entry
    target = TARGETS[target_name]
    result = Compiled(name, target_name, f"{tiles.rows}x{tiles.columns}", tiles.warps, tiles.stages)
    options = {"BLOCK_M": tiles.rows, "BLOCK_N": tiles.columns, "num_warps": tiles.warps, "num_stages": tiles.stages}
    driver.set_active(_Driver(target_name))
    start = time.perf_counter()
    try:
        compiled = kernel.warmup(*arguments, **constants, **options, grid=(1,))
    except Exception as error:
        # Any compiler error is reported in this line of the table.
        result.error = f"{type(error).__name__}: {' '.join(str(error).split())[-300:]}"
        return result
    finally:
        result.seconds = time.perf_counter() - start
    result.shared = compiled.metadata.shared
    result.registers, result.spills = resources(compiled.asm, target)
    result.occupancy = occupancy(result.registers, result.shared or 0, tiles.warps, target)
    result.fits = (result.shared or 0) <= target.shared and (result.registers or 0) <= target.registers
    if code and result.fits:
        result.code = code_of(compiled.asm)
    return result


def code_of(assembly: Any) -> Code:
    """Returns what a compiled kernel for NVIDIA is made of; see `Code`."""
    from triton.backends.nvidia.compiler import get_ptxas

    found = loops(_tool("nvdisasm", assembly["cubin"], "-c"))
    counted = [body for body in found if len(body) > 60 or any(_is_product(operation) for operation in body)]
    local = sum(operation.startswith(("LDL", "STL")) for body in counted for operation in body)
    # ptxas' messages are not kept with the kernel.
    arch = re.search(r"\.target (\w+)", assembly["ptx"])[1]
    # Triton has two, and which one compiles for a GPU depends on its version.
    ptxas = pathlib.Path(get_ptxas(int(re.sub(r"\D", "", arch))).path).name
    said = _tool(ptxas, assembly["ptx"].encode(), "-v", f"--gpu-name={arch}", "-o", os.devnull)
    return Code(list(map(len, counted)), local, sorted(set(re.findall(r"\((C75\d\d)\)", said))))


def _is_product(operation: str) -> bool:
    # HMMA, HGMMA, UTCHMMA; not HFMA2.MMA.
    return operation.partition(".")[0].endswith("MMA")


def loops(disassembly: str) -> list[list[str]]:
    """Returns the operations of each innermost loop, in the order of `nvdisasm -c`."""
    operations, labels, ends = list[str](), dict[str, int](), dict[int, int]()
    for line in disassembly.splitlines():
        if found := re.match(r"\s*(\.L\w+):", line):
            labels[found[1]] = len(operations)
        # /*0040*/  { @!P0 BRA `(.L_x_1) ;
        elif found := re.match(r"\s*/\*[0-9a-f]{4,}\*/[\s{]*(?:@\S+\s+)?([A-Z][\w.]*)(.*)", line):
            operations.append(found[1])
            target = re.search(r"`\((\.L\w+)\)", found[2]) if found[1].startswith("BRA") else None
            # A label that is known is a jump back, and its operation the end of a loop.
            if target and target[1] in labels:
                ends[labels[target[1]]] = len(operations)
    return [
        operations[first:end]
        for first, end in sorted(ends.items())
        if not any(first < other and ends[other] <= end for other in ends)
    ]


def _tool(name: str, content: bytes, *arguments: str) -> str:
    """Returns what a program of Triton's package says of a file."""
    import triton.backends.nvidia

    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "kernel"
        path.write_bytes(content)
        tool = pathlib.Path(triton.backends.nvidia.__file__).parent / "bin" / name
        done = subprocess.run([str(tool), *arguments, str(path)], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def resources(assembly: Any, target: Target) -> tuple[int | None, int | None]:
    """Returns the registers and the spills of a thread, in bytes or on AMD in registers."""
    if target.backend == "hip":
        text = assembly["amdgcn"]
        counts = [re.search(rf"\.{field}:\s*(\d+)", text) for field in ("vgpr_count", "vgpr_spill_count")]
        registers, spills = (int(found.group(1)) if found else None for found in counts)
        return registers, spills
    tool = _cuobjdump()
    if tool is None or "cubin" not in assembly:
        return None, None
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "kernel.cubin"
        path.write_bytes(assembly["cubin"])
        done = subprocess.run([tool, "--dump-resource-usage", str(path)], capture_output=True, text=True)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", done.stdout)
    if done.returncode != 0 or found is None:
        return None, None
    return int(found.group(1)), int(found.group(2)) + int(found.group(3))


def _cuobjdump() -> str | None:
    import triton.backends.nvidia

    tool = pathlib.Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    return str(tool) if os.access(tool, os.X_OK) else None


def occupancy(registers: int | None, shared: int, warps: int, target: Target) -> int | None:
    """Returns the maximum number of warps of a kernel per multiprocessor."""
    if registers is None:
        return None
    # Registers are allocated per warp in units of 256 (AMD: 8 per lane); a block needs 1 KiB more shared memory.
    unit = 8 * target.warp
    a_warp = -(-max(registers, 1) * target.warp // unit) * unit
    extra = 1024 if target.backend == "cuda" else 0
    by_registers = target.unit_registers // (a_warp * warps)
    by_shared = target.unit_shared // (shared + extra) if shared else 32
    return min(by_registers, by_shared, 32, target.unit_warps // warps) * warps


def compile_variant(name: str, target: str, all_tiles: bool, code: bool = False) -> list[Compiled]:
    """Compiles a variant with its tiles in order, up to the first that fit."""
    results = []
    for entry in variants(code)[name]:
        results.append(compile_one(name, entry, target, code))
        if results[-1].fits and not all_tiles:
            break
    return results


def compile_all(
    targets: Sequence[str], names: Sequence[str], *, all_tiles: bool, code: bool, jobs: int
) -> Iterable[tuple[str, str, list[Compiled]]]:
    """Yields target, variant and compiled kernels, target by target."""
    tasks = [(name, target) for target in targets for name in names]
    if jobs == 1:
        for name, target in tasks:
            yield target, name, compile_variant(name, target, all_tiles, code)
        return
    with concurrent.futures.ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(compile_variant, *task, all_tiles, code) for task in tasks]
        for (name, target), future in zip(tasks, futures):
            yield target, name, future.result()


def show(results: Sequence[Compiled], name: str) -> None:
    """Prints a line for each tile size of a variant."""

    def number(value: int | None) -> str:
        return "unknown" if value is None else str(value)

    for result in results:
        line = f"{name:58} {result.tiles:>8} {result.warps:>5} {result.stages:>6} "
        if result.error:
            print(f"{line} does not compile: {result.error}")
            continue
        line += f"{number(result.shared):>7} {number(result.registers):>9} {number(result.spills):>7} "
        line += f"{number(result.occupancy):>8} {result.seconds:>7.1f}"
        if result.code:
            line += f"  loops {result.code.loops}" + (f", {result.code.local} local" if result.code.local else "")
            line += f" {' '.join(result.code.warnings)}" if result.code.warnings else ""
        print(line + ("" if result.fits else "  does not fit"))


# What the code was.


def problems_of(found: Sequence[Compiled], known: dict[str, Any]) -> list[str]:
    """Returns a line for each kernel whose code is worse than known, and for each exception that is none any more.

    `known` has tiles and loops of each variant, by target.
    """
    problems, used = list[str](), set[tuple[str, str, str]]()
    exceptions = {(one.what, target, name) for one in EXCEPTIONS for target in one.targets for name in one.variants}
    for one in found:
        name, code = f"{one.target}, {one.variant}, tiles {one.tiles}", one.code
        if code is None:
            continue
        for what in [*code.warnings, *(["local memory"] if code.local else [])]:
            listed = {one_of for one_of in exceptions if one_of[0] == what and _is_of(one_of, one)}
            used |= listed
            problems += [] if listed else [f"{name}: {what} in a loop, which EXCEPTIONS does not list"]
        before = known.get(one.target, {}).get(one.variant)
        if before is None or len(before) != len(code.loops):
            problems.append(f"{name}: loops {code.loops}, in {CODE_FILE.name} {before}: run with --code --write")
        elif any(now > then for now, then in zip(code.loops, before)):
            problems.append(f"{name}: more instructions in a loop: {code.loops}, in {CODE_FILE.name} {before}")
    for exception in exceptions - used:
        if any(_is_of(exception, one) for one in found):
            problems.append(f"EXCEPTIONS: {exception!r} is in no loop any more: remove it")
    return sorted(problems)


def _is_of(exception: tuple[str, str, str], one: Compiled) -> bool:
    return one.target == exception[1] and one.variant.startswith(exception[2])


def compare_code(found: Sequence[Compiled], write: bool) -> list[str]:
    """Compares code with `CODE_FILE`, or writes this; returns the problems."""
    import triton

    kept = json.loads(CODE_FILE.read_text()) if CODE_FILE.exists() else {"triton": triton.__version__}
    if write:
        if kept["triton"] != triton.__version__:
            kept = {}
        kept["triton"] = triton.__version__
        for one in found:
            if one.code:
                kept.setdefault(one.target, {})[one.variant] = one.code.loops
        text = json.dumps(kept, indent=1, sort_keys=True)
        # The numbers of a variant in one line.
        text = re.sub(r"\[[\d,\s]*\]", lambda numbers: " ".join(numbers[0].split()), text)
        CODE_FILE.write_text(text.replace("[ ", "[").replace(" ]", "]") + "\n")
    if kept["triton"] != triton.__version__:
        print(f"not compared: {CODE_FILE.name} is of Triton {kept['triton']}, here is {triton.__version__}")
        return []
    return problems_of(found, kept)


# The command.


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--targets", help=f"default {','.join(TARGETS)}; with --code {','.join(CODE_TARGETS)}")
    parser.add_argument(
        "--only", action="append", default=[], help="variants whose name contains this; may be repeated"
    )
    parser.add_argument("--all-tiles", action="store_true", help="do not stop at the first tiles that fit")
    parser.add_argument("--code", action="store_true", help="disassemble, and compare with kernel_code.json")
    parser.add_argument("--write", action="store_true", help="with --code: write kernel_code.json")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--json", type=pathlib.Path, help="also write the results to this file")
    parsed = parser.parse_args(arguments)
    allowed = CODE_TARGETS if parsed.code else tuple(TARGETS)
    parsed.targets = parsed.targets.split(",") if parsed.targets else list(allowed)
    unknown = [target for target in parsed.targets if target not in allowed]
    if unknown:
        parser.error(f"--targets: {unknown!r} is not valid; allowed: {', '.join(map(repr, allowed))}")
    if parsed.write and not parsed.code:
        parser.error("--write is for --code")
    if parsed.code and parsed.all_tiles:
        parser.error("--all-tiles is not for --code, which compares the first tiles that fit")
    if parsed.jobs < 1:
        parser.error(f"--jobs={parsed.jobs!r} is not valid: it must be at least 1")
    interpreted = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0", "false", "False")
    if interpreted:
        parser.error(
            f"TRITON_INTERPRET={os.environ['TRITON_INTERPRET']!r} is set: kernels for the interpreter cannot be "
            "compiled; unset it"
        )
    return parsed


def main(arguments: Sequence[str] | None = None) -> int:
    """Compiles the kernels; returns the exit code."""
    parsed = parse(arguments)
    try:
        import triton
    except ImportError as error:
        print(f"the kernels need Triton: {error}", file=sys.stderr)
        return 2
    start = time.perf_counter()
    print(f"triton {triton.__version__}", end="")
    print("" if _cuobjdump() else "; registers on NVIDIA are unknown: Triton's package has no cuobjdump here")
    found: list[Compiled] = []
    failures = []
    listed = variants(parsed.code)
    names = [name for name in listed if not parsed.only or any(part in name for part in parsed.only)]
    options = {"all_tiles": parsed.all_tiles, "code": parsed.code, "jobs": parsed.jobs}
    shown = ""
    for target, name, results in compile_all(parsed.targets, names, **options):
        if target != shown:
            limits = TARGETS[target]
            print(f"\n{target}: at most {limits.shared} bytes of shared memory, {limits.registers} registers")
            print(
                f"{'variant':58} {'tiles':>8} {'warps':>5} {'stages':>6} {'shared':>7} {'registers':>9} {'spills':>7} "
                f"{'warps/SM':>8} {'seconds':>7}"
            )
            shown = target
        show(results, name)
        sys.stdout.flush()
        found += results
        failures += [f"{target}, {name}, tiles {r.tiles}: does not compile: {r.error}" for r in results if r.error]
        if not any(result.fits for result in results):
            failures.append(f"{target}, {name}: no tiles fit")
    for target in parsed.targets:
        later = [r for r in found if r.target == target and not r.fits and not r.error]
        of_target = [r for r in found if r.target == target and r.fits]
        spilling = [r for r in of_target if r.spills]
        print(
            f"\n{target}: {len({r.variant for r in of_target})} variants fit, {len({r.variant for r in later})} of "
            f"them not with the first tiles, {len(spilling)} spill"
        )
    if parsed.code:
        failures += compare_code(found, parsed.write)
    print(f"\n{len(found)} compiled in {time.perf_counter() - start:.0f} s")
    if parsed.json:
        parsed.json.write_text(json.dumps([dataclasses.asdict(result) for result in found], indent=1) + "\n")
    for failure in failures:
        print(failure, file=sys.stderr)
    if not found:
        print(f"nothing was compiled: --only={parsed.only!r} matches no variant", file=sys.stderr)
        return 2
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
