"""The phases of PoPE in the kernels.

Axes: B batch, H query heads, Q query length, K key length, D head dim, R rotated channels.
"""

from typing import Any, NamedTuple

import torch

from .kernel_launch import dot, load, tl, triton


class Polar(NamedTuple):
    """The phases of PoPE in decoding: two magnitudes q, k have the score q k cos(phase_q - shift - phase_k).

    Attributes:
        cos_q, sin_q: float32 or float16 (1 or B, 1, R), of the query.
        cos_k, sin_k: the same (1 or B, K, R), of the keys.
        cos_shift, sin_shift: float32 (H, R), or None. Computed once: for large angles sines take a kernel many
            registers and local memory.
        batch_q, batch_k: the strides of the batch.
    """

    cos_q: Any
    sin_q: Any
    cos_k: Any
    sin_k: Any
    cos_shift: Any
    sin_shift: Any
    batch_q: Any
    batch_k: Any


@triton.jit
def subtract_phase(cos, sin, cos_shift, sin_shift):
    """Cosines and sines of phase - shift."""
    return cos * cos_shift + sin * sin_shift, sin * cos_shift - cos * sin_shift


@triton.jit
def polar_query(polar, q, b, g, groups, first, R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """Real and imaginary parts of magnitudes (BLOCK_M, BLOCK_D): one query row of the heads first.. of key head g."""
    channels = tl.arange(0, BLOCK_D)[None, :]
    cos = tl.load(polar.cos_q + b * polar.batch_q + channels, mask=channels < R, other=1.0).to(tl.float32)
    sin = tl.load(polar.sin_q + b * polar.batch_q + channels, mask=channels < R, other=0.0).to(tl.float32)
    if polar.cos_shift is not None:
        cos_shift = load(polar.cos_shift + g * groups * R, R, first, groups, 1.0, R, BLOCK_M, BLOCK_D, False)
        sin_shift = load(polar.sin_shift + g * groups * R, R, first, groups, 0.0, R, BLOCK_M, BLOCK_D, False)
        cos, sin = subtract_phase(cos, sin, cos_shift, sin_shift)
    imaginary = (q.to(tl.float32) * sin).to(q.dtype)
    return (q.to(tl.float32) * cos).to(q.dtype), imaginary


@triton.jit
def polar_products(
    polar, q, imaginary, k, b, begin, K,
    R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores of what `polar_query` returned with the magnitudes k of the keys begin.., (BLOCK_M, BLOCK_N)."""
    cos = load(polar.cos_k + b * polar.batch_k, R, begin, K, 1.0, R, BLOCK_N, BLOCK_D, False).to(tl.float32)
    sin = load(polar.sin_k + b * polar.batch_k, R, begin, K, 0.0, R, BLOCK_N, BLOCK_D, False).to(tl.float32)
    scores = dot(q, tl.trans((k.to(tl.float32) * cos).to(k.dtype)), None, PRECISION)
    return dot(imaginary, tl.trans((k.to(tl.float32) * sin).to(k.dtype)), scores, PRECISION)


def shift_tables(shift: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
    """Returns cosines and sines of the shift, (H, R), as the kernels take them."""
    return (None, None) if shift is None else (shift.cos().contiguous(), shift.sin().contiguous())


def polar_argument(
    cos_q: torch.Tensor, sin_q: torch.Tensor, cos_k: torch.Tensor, sin_k: torch.Tensor, shift: torch.Tensor | None
) -> Polar:
    """Returns the tensors of `Polar` as an argument of a kernel."""
    cos_q, sin_q, cos_k, sin_k = (table.contiguous() for table in (cos_q, sin_q, cos_k, sin_k))
    batch_q, batch_k = (0 if table.shape[0] == 1 else table.stride(0) for table in (cos_q, cos_k))
    cos_shift, sin_shift = shift_tables(shift)
    return Polar(cos_q, sin_q, cos_k, sin_k, cos_shift, sin_shift, batch_q, batch_k)
