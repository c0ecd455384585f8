"""What is added to the logits of the kernels: decays (FoX, ALiBi) and relative positions.

A saved folder whose encodings need neither is without this file, and what the kernels import from it is None there.

Axes: B batch, H query heads, Q query rows, K keys, D head dim, P distances.
"""

from typing import Any, NamedTuple

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # Transformers checks the imports of every file of a checkpoint, but not those in a `try`.
    raise

# The constants of `kernel_flash`.
MASKED = tl.constexpr(-1e30)
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# The distance of what is no row or no key from all others.
FAR = tl.constexpr(1 << 29)


class Decay(NamedTuple):
    """Numbers c; c_i - c_j, or 0 if that is positive, is added to the logit of row i and key j: FoX, ALiBi.

    Attributes:
        rows, keys: float32 (1 or B, H, Q, 2) and (1 or B, H, K, 2): c as the sum of two numbers, since differences of
            large ones would lose their digits.
        batch_rows, batch_keys: the strides of the batch.
    """

    rows: Any
    keys: Any
    batch_rows: Any
    batch_keys: Any


class Relative(NamedTuple):
    """Numbers z[i, n], added to the logit of row i and key j for the distance n of their positions: see `relative`.

    Attributes:
        z: float32 (B, H, Q, P); negative distances have the first number, larger ones the last.
        grad: zeros, to which the gradient of z is added, or None.
        rows, keys: int32 (1 or B, Q) and (1 or B, K), the positions.
        batch_rows, batch_keys: the strides of the batch.
        last: P - 1.
    """

    z: Any
    grad: Any
    rows: Any
    keys: Any
    batch_rows: Any
    batch_keys: Any
    last: Any


@triton.jit
def load_pair(data, index, mask, other):
    """Two neighbouring float32 at 2 * index; `other` and 0 where masked."""
    first = tl.load(data + index * 2, mask=mask, other=other)
    return first, tl.load(data + index * 2 + 1, mask=mask, other=0.0)


@triton.jit
def decay_bias(row_high, row_rest, keys, index, mask):
    """c_i - c_j in base 2, given c of the rows in two parts, for the keys `index`; never positive."""
    key_high, key_rest = load_pair(keys, index, mask, 0.0)
    return tl.minimum((row_high - key_high) + (row_rest - key_rest), 0.0) * LOG2_E


@triton.jit
def relative_bias(z, rows, keys, known, last):
    """z at the distances of the positions of rows and keys; `z` points to the numbers of each row, read where known."""
    # Far from the rows there is nothing to gather.
    if tl.min(rows) - tl.max(keys) >= last:
        bias = tl.load(z + last, mask=known, other=0.0) + (rows - keys).to(tl.float32) * 0.0
    else:
        distance = tl.minimum(tl.maximum(rows - keys, 0), last)
        bias = tl.load(z + distance, mask=known & (distance >= 0), other=0.0)
    return bias


@triton.jit
def relative_gradient(z, rows, keys, grad, known, last):
    """Adds the gradients of logits to those of z, but for the last number of each row: returns its sum, (rows,)."""
    if tl.min(rows) - tl.max(keys) >= last:
        beyond = tl.sum(grad, 1)
    else:
        distance = tl.maximum(rows - keys, 0)
        near = distance < last
        # Sums, since positions may repeat; what is not seen has the gradient 0.
        tl.atomic_add(z + distance, grad, mask=known & near & (grad != 0.0), sem="relaxed")
        beyond = tl.sum(tl.where(near, 0.0, grad), 1)
    return beyond


@triton.jit
def decay_tile(decay, b, h, rows, columns, Q, K):
    """`Decay` of some rows and keys of a head, (rows, columns), to base e."""
    row_decay = decay.rows + b * decay.batch_rows + h * Q * 2
    row_high, row_rest = load_pair(row_decay, rows[:, None], rows[:, None] < Q, MASKED)
    key_decay = decay.keys + b * decay.batch_keys + h * K * 2
    return decay_bias(row_high, row_rest, key_decay, columns[None, :], columns[None, :] < K) * LN_2


@triton.jit
def relative_parts(relative, member, b, local, inside, columns, K, count):
    """Where the numbers of some rows of a chunk of `count` rows are, and the positions of rows and keys."""
    offsets = (member * count + local)[:, None] * (relative.last + 1)
    rows = tl.load(relative.rows + b * relative.batch_rows + local, mask=inside, other=FAR)[:, None]
    return offsets, rows, tl.load(relative.keys + b * relative.batch_keys + columns, mask=columns < K, other=-FAR)


@triton.jit
def relative_tile(relative, member, b, local, inside, columns, K, count):
    """`Relative` of some rows of a chunk and some keys, (rows, columns)."""
    offsets, rows, keys = relative_parts(relative, member, b, local, inside, columns, K, count)
    return relative_bias(relative.z + offsets, rows, keys, inside[:, None], relative.last)


def check_decay(decay: tuple[torch.Tensor, torch.Tensor] | None, query: torch.Tensor, key: torch.Tensor) -> None:
    """Raises ValueError if the numbers of rows (1 or B, H, Q) or of keys (1 or B, H, K) have another shape."""
    B, H = query.shape[:2]
    for numbers, length in zip(decay or (), (query.shape[2], key.shape[2])):
        if numbers.shape[0] not in (1, B) or numbers.shape[1:] != (H, length):
            raise ValueError(f"decay={tuple(numbers.shape)!r} is not valid: it must be (1 or {B}, {H}, {length}).")


def decay_pairs(rows: torch.Tensor | None, keys: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Returns the numbers of rows and keys, float64 or float32, each as the sum of two float32, on a last axis."""
    if rows is None or keys is None:
        return None
    high = [one.float() for one in (rows, keys)]
    pairs = [torch.stack((one, (exact - one).float()), dim=-1) for one, exact in zip(high, (rows, keys))]
    return pairs[0], pairs[1]


def decay_argument(decay: tuple[torch.Tensor, torch.Tensor] | None) -> Decay | None:
    """Returns what `decay_pairs` returned as an argument of a kernel."""
    if decay is None:
        return None
    rows, keys = (one.contiguous() for one in decay)
    return Decay(rows, keys, *(0 if one.shape[0] == 1 else one.stride(0) for one in (rows, keys)))


def relative_argument(
    query: torch.Tensor,
    table: torch.Tensor,
    query_positions: torch.Tensor,
    key_positions: torch.Tensor,
    scaling: float,
    *,
    grad: bool = False,
) -> Relative:
    """Returns `Relative` with z[i, n] = scaling * q_i.e[n], in float32, and with room for its gradient if asked.

    Args:
        query: (B, H, Q, D). table: (P, D), e.
        query_positions, key_positions: integers (1 or B, Q) and (1 or B, K).
    """
    # In an operator autocast still holds.
    with torch.autocast(query.device.type, enabled=False):
        z = torch.matmul(query.float(), table.float().T).mul_(scaling)
    positions = [one.to(torch.int32).contiguous() for one in (query_positions, key_positions)]
    row_stride, key_stride = (0 if one.shape[0] == 1 else one.stride(0) for one in positions)
    grad_z = torch.zeros_like(z) if grad else None
    return Relative(z, grad_z, positions[0], positions[1], row_stride, key_stride, table.shape[0] - 1)


def check_relative(
    table: torch.Tensor,
    query_positions: torch.Tensor,
    key_positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
) -> None:
    """Raises ValueError if the shapes of the table (P, D) or of the positions (1 or B, Q or K) do not fit."""
    if table.dim() != 2 or table.shape[1] != query.shape[3] or table.shape[0] < 1:
        raise ValueError(f"table={tuple(table.shape)!r} is not valid: it must be (P, {query.shape[3]}).")
    for positions, length in ((query_positions, query.shape[2]), (key_positions, key.shape[2])):
        if positions.shape not in ((1, length), (query.shape[0], length)):
            raise ValueError(f"positions={tuple(positions.shape)!r} is not valid: it must be (1 or batch, {length}).")


def relative_gradients(
    relative: Relative, query: torch.Tensor, table: torch.Tensor, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the gradients of query (B, H, Q, D) and table (P, D), float32, from that of z, which is changed."""
    with torch.autocast(query.device.type, enabled=False):
        grad = relative.grad.mul_(scaling)
        return grad @ table.float(), grad.flatten(0, 2).T @ query.float().flatten(0, 2)
