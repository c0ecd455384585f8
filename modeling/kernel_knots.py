"""CoPE with knots (CoPE_MLP): z_i of a position is linear between these, not between integers.

Then P is the number of pieces: a binary search finds the piece of a position, z and its slope have a table each, and
rows may skip pieces. A saved folder without CoPE_MLP is without this file, and what `kernel_cope` imports from it is
None there.

Axes: B batch, H query heads, Q query rows, D head dim, P pieces.
"""

import torch

from .kernel_launch import tl, triton

# The sums of a piece that a row skips; no pair has these bits.
UNWRITTEN = -1


@triton.jit
def knot_piece(knots, position, P):
    """The pieces of fixed-point positions: how many of the P - 1 knots are smaller."""
    piece = position * 0
    choices = P
    while choices > 1:
        half = choices // 2
        piece += tl.where(tl.load(knots + piece + (half - 1)) < position, half, 0)
        choices -= half
    return piece


@triton.jit
def knot_left(knots, piece):
    """The knots that fixed-point positions of pieces are larger than, -1 if there is none."""
    return tl.load(knots + piece - 1, mask=piece > 0, other=-1)


def knots_argument(knots: torch.Tensor, num_positions: int, bits: int) -> torch.Tensor:
    """Returns knots (P - 1,) as fixed-point positions with so many fractional bits, int32."""
    # The last piece is the largest position; all of the first may be left of 0.
    largest = ((num_positions - 1) << bits) - 1
    return (knots.double() * (1 << bits)).floor().clamp(-1, largest).int()


def fill_skipped(sums: torch.Tensor) -> torch.Tensor:
    """Returns pairs of prefix sums, float32 (B, H, Q, P, 2): where a row skips a piece, those of its next piece."""
    P = sums.shape[-2]
    written = sums.view(torch.int64)[..., 0] != UNWRITTEN
    pieces = torch.where(written, torch.arange(P, device=sums.device), P)
    pieces = pieces.flip(-1).cummin(-1).values.flip(-1)[..., None].expand(sums.shape)
    return torch.nn.functional.pad(sums, (0, 0, 0, 1)).gather(-2, pieces)


def check_knots(knots: torch.Tensor, table: torch.Tensor, num_positions: int | None) -> None:
    """Raises ValueError if the shapes of knots (P - 1,) and table (D, 2 P) do not fit, or there are no positions."""
    if knots.dim() != 1 or not len(knots) or table.shape[1:] != (2 * len(knots) + 2,) or knots.requires_grad:
        raise ValueError(
            f"knots={tuple(knots.shape)!r} is not valid: for a table of {tuple(table.shape)!r} it must be (P - 1,), P "
            "half the width of the table and at least 2, and not require a gradient."
        )
    if num_positions is None or num_positions < 2:
        raise ValueError(f"num_positions={num_positions!r} is not valid: with knots it must be at least 2.")
