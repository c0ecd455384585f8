"""What all Triton kernels share: matrices as arguments, products, launches and the selection of tile sizes.

Without Triton, kernels can be defined, but do not run. A kernel takes its tile sizes as constants: `BLOCK_M` query
rows, `BLOCK_N` keys.
"""

import dataclasses
import functools
import json
import os
import pathlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch

try:
    # The other files of kernels import Triton from here.
    import triton
    import triton.language as tl
except ImportError:  # Transformers checks the imports of every file of a checkpoint, but not those in a `try`.

    def _unchanged(value: Any = None, **options: Any) -> Any:
        return _unchanged if value is None else value

    class _Absent:
        """What the definitions of kernels need."""

        constexpr = constexpr_function = jit = staticmethod(_unchanged)

    triton = tl = _Absent()

# Far below every logit, and far from overflow. -inf would give NaN in rows that have seen no key yet.
MASKED = tl.constexpr(-1e30)

# True if kernels run on the CPU, one program after the other, by Triton's interpreter.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0", "false", "False")

# The interpreter multiplies bfloat16 as if it were integers.
WIDEN = tl.constexpr(INTERPRETED)


@triton.jit
def dot(left, right, acc, PRECISION: tl.constexpr):
    """left @ right, added to `acc` if that is not None: float32."""
    if WIDEN:
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, acc, input_precision=PRECISION)


@triton.jit
def pointer(matrices, b, h):
    """The pointer of `Heads` to the matrix of batch entry b and head h."""
    return matrices.data + b * matrices.batch + h * matrices.head


@triton.jit
def load(
    data, stride, start, length, other, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, WHOLE: tl.constexpr
):
    """Rows start.. of a (length, D) matrix as a (BLOCK, BLOCK_D) tile, `other` outside. WHOLE: no row is outside."""
    rows = tl.arange(0, BLOCK)[:, None]
    channels = tl.arange(0, BLOCK_D)[None, :]
    # 64 bits for the address of the tile only.
    pointers = data + tl.cast(start, tl.int64) * stride + (rows * stride + channels)
    if WHOLE and D == BLOCK_D:
        tile = tl.load(pointers)
    elif WHOLE:
        tile = tl.load(pointers, mask=channels < D, other=other)
    elif D == BLOCK_D:
        tile = tl.load(pointers, mask=start + rows < length, other=other)
    else:
        tile = tl.load(pointers, mask=(start + rows < length) & (channels < D), other=other)
    return tile


@triton.jit
def store(data, stride, start, length, tile, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """Writes a (BLOCK, BLOCK_D) tile to rows start.. of a (length, D) matrix."""
    rows = tl.arange(0, BLOCK)[:, None]
    channels = tl.arange(0, BLOCK_D)[None, :]
    pointers = data + tl.cast(start, tl.int64) * stride + (rows * stride + channels)
    tl.store(pointers, tile.to(data.dtype.element_ty), mask=(start + rows < length) & (channels < D))


class Heads(NamedTuple):
    """A (B, H, T, D) tensor as an argument of a kernel: the pointer, and the strides of batch, head and row."""

    data: Any
    batch: Any
    head: Any
    row: Any


def heads(tensor: torch.Tensor) -> Heads:
    """Returns a (B, H, T, D) tensor as an argument of a kernel; a copy if channels are not side by side in memory."""
    tensor = tensor if tensor.stride(-1) == 1 else tensor.contiguous()
    return Heads(tensor, *tensor.stride()[:3])


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The size of one program's work.

    Attributes:
        rows: query rows, a power of two, at least 16.
        columns: keys, a power of two, at least 16.
        warps: warps of a program.
        stages: depth of the software pipeline over loads.
    """

    rows: int
    columns: int
    warps: int = 4
    stages: int = 1

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}w{self.warps}s{self.stages}"


# The tiles that the kernels of this process run with, by name of the kernel, device and what the choice depends on.
CHOSEN: dict[tuple[Hashable, ...], Tiles] = {}


def launch(
    kernel: Any, grid: Callable[[Tiles], tuple[int, ...]] | tuple[int, ...], candidates: Sequence[Tiles],
    arguments: Sequence[Any], constants: dict[str, Any], *, key: tuple[Hashable, ...] = (), repeatable: bool = True,
) -> None:  # fmt: skip
    """Runs a kernel with the first tiles that compile and fit the device.

    The choice is the same in every process. The variable WHATWHERE_TILES names a JSON file with choices that
    `whatwhere gpu-check` measured, for a kind of device, a version of Triton and the present code of a kernel.

    Args:
        kernel: a `triton.jit` function.
        grid: the grid, or a function that returns it for some tiles.
        candidates: tiles, the preferred first.
        arguments: the positional arguments, a tensor or `Heads` first.
        constants: the constants, without the tile sizes.
        key: what the choice depends on besides the device, the kernel, its constants, the type of the first argument,
            and which arguments are None.
        repeatable: False for a kernel that adds to its results.

    Raises:
        RuntimeError: no candidate compiles and fits the device, or the device reports an error.
    """

    def run(tiles: Tiles) -> None:
        kernel[grid(tiles) if callable(grid) else grid](*arguments, **constants, **_options(tiles))

    if INTERPRETED:
        run(choose(kernel.fn.__name__, candidates, lambda tiles: None, None))
        return
    first = arguments[0].data if isinstance(arguments[0], Heads) else arguments[0]
    parts = (part for one in arguments for part in (one if isinstance(one, tuple) else (one,)))
    given = "".join("-" if part is None else "x" for part in parts)
    key = (*key, first.dtype, *constants.values(), given)
    with torch.cuda.device_of(first):
        slot = (kernel.fn.__name__, torch.cuda.current_device(), *key)
        compiles = functools.partial(_compile, kernel, arguments, constants)
        if slot not in CHOSEN:
            CHOSEN[slot] = choose(_name(kernel, key), candidates, compiles, run if repeatable else None)
        try:
            run(CHOSEN[slot])
        except Exception:
            # Triton compiles again where pointers or numbers are divisible by 16 or not, and that may need more memory.
            if compiles(CHOSEN[slot]) is None:
                raise
            CHOSEN[slot] = choose(_name(kernel, key), candidates, compiles, run if repeatable else None)
            run(CHOSEN[slot])


def _options(tiles: Tiles) -> dict[str, int]:
    return {"BLOCK_M": tiles.rows, "BLOCK_N": tiles.columns, "num_warps": tiles.warps, "num_stages": tiles.stages}


def _name(kernel: Any, key: tuple[Hashable, ...]) -> str:
    """Returns the name of a choice in the file of WHATWHERE_TILES."""
    versions = f"{torch.cuda.get_device_name()}, triton {triton.__version__}"
    return f"{kernel.fn.__name__} {kernel.cache_key[:16]} {key!r} on {versions}"


DEVICE_ERRORS = ("Triton Error [", "CUDA error", "HIP error", "out of memory")


def _compile(kernel: Any, arguments: Sequence[Any], constants: dict[str, Any], tiles: Tiles) -> Exception | None:
    """Compiles and loads a kernel; returns the error if it does not compile or fit. Other errors are raised."""
    try:
        # Compilers fail in many ways: besides Triton's own errors, assertions, and the RuntimeError of a pass of LLVM.
        compiled = kernel.warmup(*arguments, **constants, **_options(tiles), grid=(1,))
    except (triton.errors.TritonError, RuntimeError, AssertionError) as error:
        if any(text in str(error) for text in DEVICE_ERRORS):
            raise
        return error
    try:
        compiled._init_handles()
    except triton.runtime.OutOfResources as error:
        return error
    return None


def choose(
    name: str, candidates: Sequence[Tiles], compiles: Callable[[Tiles], Exception | None],
    run: Callable[[Tiles], None] | None,
) -> Tiles:  # fmt: skip
    """Returns the tiles of a kernel; `scripts/benchmark/kernel_tiles.py` replaces this, and times `run`."""
    file = os.environ.get("WHATWHERE_TILES")
    try:
        known = json.loads(pathlib.Path(file).read_text(encoding="utf-8")) if file else {}
    except (OSError, ValueError) as error:
        raise ValueError(f"WHATWHERE_TILES={file!r} cannot be read: {error}") from error
    measured = [Tiles(*known[name])] if name in known else []
    problem: Exception | None = None
    for tiles in (*measured, *candidates):
        problem = compiles(tiles)
        if problem is None:
            return tiles
    raise RuntimeError(f"No tiles compile for {name}.") from problem


def precision(dtype: torch.dtype, width: int) -> str:
    """Returns how products of the dtype are computed: float32 as PyTorch would (TF32 only if it is allowed).

    But heads of more than 128 channels have no TF32, for which shared memory is too small.
    """
    if dtype != torch.float32 or width > 128 or not torch.cuda.is_available():
        return "ieee"
    # Triton has it on one AMD architecture only.
    if torch.version.hip and not torch.cuda.get_device_properties().gcnArchName.startswith("gfx942"):
        return "ieee"
    # Follows `allow_tf32` too, which cannot be read once `fp32_precision` is set, as Transformers does.
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def block_width(channels: int) -> int:
    """Returns the power of two, at least 16, that holds the channels of a head."""
    return max(16, triton.next_power_of_2(channels))
