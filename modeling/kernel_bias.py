"""The bias that kernels add to the logits: a decay (FoX, ALiBi) or relative positions.

Axes: B batch, H query heads, Q query rows, K keys, D head dim, P distances.
"""

from typing import Any, NamedTuple

import torch

from .kernel_launch import MASKED, tl, triton
from .kernel_operator import only_deterministic

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# The distance of what is no row or no key from all others.
FAR = tl.constexpr(1 << 29)
# Keys of a block whose newest key is the reference of a decay: the columns of most tiles.
REFERENCE_KEYS = tl.constexpr(64)


class LogitBias(NamedTuple):
    """The bias of the logit of row i and key j: a decay (FoX, ALiBi), or a number for the distance of positions.

    A decay is c_i - c_j, or 0 if that is positive. Relative positions: z[i, n] for the distance n; negative distances
    have the first number, larger ones the last. Without a bias all attributes are None: `NO_BIAS`.

    Attributes:
        rows, keys: float32 (1 or B, H, Q, 2) and (1 or B, H, K, 2): c in base 2 as the sum of two numbers, since
            differences of large ones would lose their digits. Or int32 (1 or B, Q) and (1 or B, K), the positions.
        batch_rows, batch_keys: the strides of the batch.
        near: float32 (1 or B, H, K), for a decay: c of each key less the first number of the newest key of its block of
            REFERENCE_KEYS. None where nothing reads it.
        z: float32 (B, H, Q, P), or None for a decay.
        grad: zeros, to which the gradient of z is added, or None.
        last: P - 1, or None for a decay.
    """

    rows: Any = None
    keys: Any = None
    batch_rows: Any = None
    batch_keys: Any = None
    near: Any = None
    z: Any = None
    grad: Any = None
    last: Any = None


# Triton 3.6 does not compile a comparison of None with a tuple that holds None: kernels compare `rows`.
NO_BIAS = LogitBias()


@triton.jit
def _load_pair(data, index, mask, other):
    """Two neighbouring float32 at 2 * index; `other` and 0 where masked."""
    first = tl.load(data + index * 2, mask=mask, other=other)
    return first, tl.load(data + index * 2 + 1, mask=mask, other=0.0)


@triton.jit
def bias_rows(logit_bias, b, h, member, rows, inside, Q, K, AXIS: tl.constexpr):
    """Returns what `bias_values` and `bias_gradient` need for `rows`, those of head h that are `inside`.

    `member` is b * H + h. All have one axis, and AXIS is added to it; for rows of several heads, h has that axis too,
    and `member` does not. For a decay: c in two parts, and the addresses of the keys' c and of `near`. For relative
    positions: the address of the rows' numbers, the positions of the rows, and the address of the keys' positions.
    """
    if logit_bias.z is None:
        # Rows that are not there get no weights.
        at = logit_bias.rows + b * logit_bias.batch_rows + h * Q * 2
        first, second = _load_pair(at, tl.expand_dims(rows, AXIS), tl.expand_dims(inside, AXIS), MASKED)
        keys = logit_bias.keys + b * logit_bias.batch_keys + h * K * 2
    else:
        first = tl.expand_dims(member * Q + rows, AXIS) * (logit_bias.last + 1)
        second = tl.load(logit_bias.rows + b * logit_bias.batch_rows + rows, mask=inside, other=FAR)
        second = tl.expand_dims(second, AXIS)
        keys = logit_bias.keys + b * logit_bias.batch_keys
    near = keys
    if logit_bias.near is not None:
        near = logit_bias.near + b * (logit_bias.batch_keys // 2) + h * K
    return first, second, keys, tl.expand_dims(inside, AXIS), near


@triton.jit
def bias_values(logit_bias, of_rows, columns, K):
    """The bias of rows, given by `bias_rows`, and keys, of the shape that the two broadcast to."""
    if logit_bias.z is None:
        bias = _decay_values(of_rows, columns, K) * LN_2
    else:
        bias = _relative_values(logit_bias, of_rows, columns, K)
    return bias


@triton.jit
def biased_logits(logit_bias, logits, scale, of_rows, columns, newest, K):
    """Returns logits, times `scale` and with the bias of `bias_rows`, in base 2, and what is to be added to each row.

    newest: the last key of the block if all rows see all of its keys, else None. What is added to rows has the axes of
    what `bias_rows` returns, and saves an addition to each logit. It loses no digits that matter if c never grows: both
    numbers (that of a key is `near`, if columns are a block of it) are then differences that are part of c_i - c_j.
    """
    shift = tl.zeros_like(of_rows[1]).to(tl.float32)
    if logit_bias.z is not None:
        logits = logits * scale + _relative_values(logit_bias, of_rows, columns, K) * LOG2_E
    elif newest is None:
        logits = logits * scale + _decay_values(of_rows, columns, K)
    else:
        first, second, keys, _, near = of_rows
        reference = tl.load(keys + newest * 2)
        if columns.shape[1] == REFERENCE_KEYS:
            relative = tl.load(near + columns)
        else:
            key_high, key_rest = _load_pair(keys, columns, columns < K, 0.0)
            relative = (key_high - reference) + key_rest
        shift = (first - reference) + second
        logits = logits * scale - tl.maximum(relative, shift)
    return logits, shift


@triton.jit
def _decay_values(of_rows, columns, K):
    """A decay as in `bias_values`, in base 2."""
    first, second, keys, _, _ = of_rows
    key_high, key_rest = _load_pair(keys, columns, columns < K, 0.0)
    return tl.minimum((first - key_high) + (second - key_rest), 0.0)


@triton.jit
def _relative_values(logit_bias, of_rows, columns, K):
    """The bias of relative positions as in `bias_values`."""
    first, second, keys, inside, _ = of_rows
    z = logit_bias.z + first
    positions = tl.load(keys + columns, mask=columns < K, other=-FAR)
    # Far from the rows there is nothing to gather.
    if tl.min(second) - tl.max(positions) >= logit_bias.last:
        bias = tl.load(z + logit_bias.last, mask=inside, other=0.0)
        bias += (second - positions).to(tl.float32) * 0.0
    else:
        distance = tl.minimum(tl.maximum(second - positions, 0), logit_bias.last)
        bias = tl.load(z + distance, mask=inside & (distance >= 0), other=0.0)
    return bias


@triton.jit
def bias_gradient(logit_bias, of_rows, columns, K, grad):
    """Adds the gradients of logits to those of z, but for the last number of each row: returns its sum, (rows,)."""
    first, second, keys, inside, _ = of_rows
    if logit_bias.grad is None:
        beyond = 0.0
    else:
        z = logit_bias.grad + first
        positions = tl.load(keys + columns, mask=columns < K, other=-FAR)
        if tl.min(second) - tl.max(positions) >= logit_bias.last:
            beyond = tl.sum(grad, 1)
        else:
            distance = tl.maximum(second - positions, 0)
            near = distance < logit_bias.last
            # Sums, since positions may repeat; what is not seen has the gradient 0.
            tl.atomic_add(z + distance, grad, mask=inside & near & (grad != 0.0), sem="relaxed")
            beyond = tl.sum(tl.where(near, 0.0, grad), 1)
    return beyond


@triton.jit
def store_last(logit_bias, of_rows, grad):
    """Writes the gradients of the last numbers of rows, which `bias_gradient` returned."""
    first, _, _, inside, _ = of_rows
    if logit_bias.grad is not None:
        tl.store(logit_bias.grad + first + logit_bias.last, grad[:, None], mask=inside)


def check_bias(decay: Any, relative: Any, query: torch.Tensor, key: torch.Tensor) -> None:
    """Raises ValueError if both are given, or shapes do not fit. For `decay` and `relative` see `plain_attention`."""
    B, H, Q, D = query.shape
    lengths = (Q, key.shape[2])
    for numbers, length in zip(decay or (), lengths):
        if numbers.shape[0] not in (1, B) or numbers.shape[1:] != (H, length):
            raise ValueError(f"decay={tuple(numbers.shape)!r} is not valid: it must be (1 or {B}, {H}, {length}).")
    if relative is None:
        return
    if decay is not None:
        raise ValueError("relative positions with a decay are not valid: give one of them.")
    table, *both = relative
    if table.dim() != 2 or table.shape[1] != D or table.shape[0] < 1:
        raise ValueError(f"table={tuple(table.shape)!r} is not valid: it must be (P, {D}).")
    for positions, length in zip(both, lengths):
        if positions.shape not in ((1, length), (B, length)):
            raise ValueError(f"positions={tuple(positions.shape)!r} is not valid: it must be (1 or batch, {length}).")


def decay_argument(rows: torch.Tensor | None, keys: torch.Tensor | None, *, near: bool) -> LogitBias:
    """Returns the numbers of rows (1 or B, H, Q) and keys (1 or B, H, K), float64 or float32, for a kernel.

    near: whether the kernel is one of `flash_forward` or `flash_backward`, which read `LogitBias.near`.
    """
    if rows is None or keys is None:
        return NO_BIAS
    both = [one.double() * LOG2_E.value for one in (rows, keys)]
    pairs = [torch.stack((one.float(), (one - one.float()).float()), dim=-1) for one in both]
    of_keys = None
    if near:
        newest = torch.arange(keys.shape[2], device=keys.device) | (REFERENCE_KEYS.value - 1)
        reference = pairs[1][:, :, newest.clamp(max=keys.shape[2] - 1), 0]
        of_keys = (both[1] - reference).float().contiguous()
    row_stride, key_stride = (0 if one.shape[0] == 1 else one.stride(0) for one in pairs)
    return LogitBias(pairs[0], pairs[1], row_stride, key_stride, of_keys)


def relative_argument(
    query: torch.Tensor,
    table: torch.Tensor,
    query_positions: torch.Tensor,
    key_positions: torch.Tensor,
    scaling: float,
    *,
    grad: bool = False,
) -> LogitBias:
    """Returns `LogitBias` with z[i, n] = scaling * q_i.e[n], in float32, and with room for its gradient if asked.

    Raises ValueError for the gradient if PyTorch is to refuse what is not deterministic: where positions repeat, it is
    a sum in any order.

    Args:
        query: (B, H, Q, D). table: (P, D), e.
        query_positions, key_positions: integers (1 or B, Q) and (1 or B, K).
    """
    if grad and only_deterministic():
        raise ValueError(
            "torch.use_deterministic_algorithms(True) is not supported by the gradient of relative positions in the "
            "Triton kernels; allowed: False, or attn_implementation='blockwise' or 'eager'."
        )
    # In an operator autocast still holds.
    with torch.autocast(query.device.type, enabled=False):
        z = torch.matmul(query.float(), table.float().T).mul_(scaling)
    positions = [one.to(torch.int32).contiguous() for one in (query_positions, key_positions)]
    row_stride, key_stride = (0 if one.shape[0] == 1 else one.stride(0) for one in positions)
    grad_z = torch.zeros_like(z) if grad else None
    return LogitBias(positions[0], positions[1], row_stride, key_stride, None, z, grad_z, table.shape[0] - 1)


def relative_gradients(
    relative: LogitBias, query: torch.Tensor, table: torch.Tensor, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the gradients of query (B, H, Q, D) and table (P, D), float32, from that of z, which is changed."""
    with torch.autocast(query.device.type, enabled=False):
        grad = relative.grad.mul_(scaling)
        return grad @ table.float(), grad.flatten(0, 2).T @ query.float().flatten(0, 2)
