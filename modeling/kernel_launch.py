"""How the Triton kernels are launched: tile sizes, their choice by timing, and what a machine must have.

Imported only where Triton is. A kernel takes its tile sizes as constants: `BLOCK_M` query rows, `BLOCK_N` keys.
"""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch

try:
    import triton
    import triton.language as tl
    from triton.runtime.errors import OutOfResources
except ImportError:  # Transformers checks the imports of every file of a checkpoint, but not those in a `try`.
    raise

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


@dataclasses.dataclass(frozen=True)
class Launch:
    """A launch as it was asked for: what compiling its kernel needs to know; the grid with the first candidate."""

    kernel: Any
    grid: tuple[int, ...]
    candidates: tuple[Tiles, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]


_RECORD: list[Launch] | None = None


@contextlib.contextmanager
def recording() -> Iterator[list[Launch]]:
    """Within it launches are written down and not run: with tensors on the meta device, no GPU is needed."""
    global _RECORD
    _RECORD = []
    try:
        yield _RECORD
    finally:
        _RECORD = None


# The tiles chosen for (kernel, device, key), for the life of the process.
_CHOSEN: dict[Hashable, Tiles] = {}


def launch(
    kernel: Any,
    grid: Callable[[Tiles], tuple[int, ...]] | tuple[int, ...],
    candidates: Sequence[Tiles],
    key: tuple[Hashable, ...],
    arguments: Sequence[Any],
    constants: dict[str, Any],
    *,
    timed: bool = True,
) -> Tiles:
    """Runs a kernel with the fastest tiles, and returns them.

    The first launch for a key times the candidates that fit the device's shared memory and registers; the others
    reuse the result. With one candidate, in the interpreter, under CUDA graph capture, and with
    `torch.use_deterministic_algorithms(True)` (another tile size sums in another order) nothing is timed: the first
    candidate that fits runs. So the order of the candidates is the order of fallback.

    Args:
        kernel: a `triton.jit` function. If `timed`, it must not write where it reads: it runs more than once.
        grid: the grid, or what gives it for some tiles.
        candidates: tiles, the preferred first.
        key: what the choice depends on besides the kernel: head dim, dtype, flags.
        arguments: the positional arguments.
        constants: the constants, without the tile sizes.
        timed: False: the first candidate that fits runs.

    Raises:
        OutOfResources: no candidate fits the device.
    """

    def run(tiles: Tiles) -> None:
        kernel[grid(tiles) if callable(grid) else grid](
            *arguments,
            **constants,
            BLOCK_M=tiles.rows,
            BLOCK_N=tiles.columns,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )

    if _RECORD is not None:
        first = grid(candidates[0]) if callable(grid) else grid
        _RECORD.append(Launch(kernel, first, tuple(candidates), tuple(arguments), constants))
        return candidates[0]
    if INTERPRETED:
        run(candidates[0])
        return candidates[0]
    with torch.cuda.device_of(next(one for one in arguments if isinstance(one, torch.Tensor))):
        return _launch_chosen(kernel, run, candidates, key, timed)


def _launch_chosen(
    kernel: Any, run: Callable[[Tiles], None], candidates: Sequence[Tiles], key: tuple[Hashable, ...], timed: bool
) -> Tiles:
    """Runs the chosen tiles on the current device, or chooses them."""
    slot = (kernel.fn.__qualname__, kernel.fn.__module__, torch.cuda.current_device(), *key)
    chosen = _CHOSEN.get(slot)
    if chosen is not None and chosen in candidates:
        run(chosen)
        return chosen
    capturing = torch.cuda.is_current_stream_capturing()
    timed = timed and len(candidates) > 1 and not capturing and not torch.are_deterministic_algorithms_enabled()
    times: dict[Tiles, float] = {}
    refusal: OutOfResources | None = None
    for tiles in candidates:
        try:
            run(tiles)
            times[tiles] = triton.testing.do_bench(lambda tiles=tiles: run(tiles), warmup=5, rep=20) if timed else 0.0
        except OutOfResources as error:
            refusal = error
            continue
        if not timed:
            break
    if not times:
        assert refusal is not None, "there is at least one candidate"
        raise refusal
    chosen = min(times, key=lambda tiles: times[tiles])
    if timed:
        # What is left in the outputs is of the tiles that are returned, as in later launches.
        run(chosen)
    if not capturing:
        _CHOSEN[slot] = chosen
    return chosen


def precision(dtype: torch.dtype) -> str:
    """Returns how products of the dtype are computed: float32 as PyTorch would (TF32 only if it is allowed)."""
    if dtype != torch.float32 or not torch.cuda.is_available():
        return "ieee"
    # Follows `allow_tf32` too, which cannot be read once `fp32_precision` is set, as Transformers does.
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def block_width(channels: int) -> int:
    """Returns the power of two, at least 16, that holds the channels of a head."""
    return max(16, triton.next_power_of_2(channels))
