"""PoPE attention in Triton: magnitudes are turned into pairs (mu cos, mu sin), then `kernel_flash` attends to them.

The pairs are twice as wide as the magnitudes. They are made again in the backward pass instead of being saved, and for
some heads at a time, so that they take little memory. In decoding they are made inside the kernel, which then reads
only magnitudes. The backward pass is deterministic: no atomics; PyTorch sums the gradient of the shift.

Supports and does not support: what `kernel_flash` does, and no gradients of gradients.

Axes: B batch, H query heads, G key heads, Q query length, K key length, D head dim, R rotated channels (the first R of
D), W = D + R: R cosine parts, R sine parts, D - R plain channels.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from .kernel_flash import (
    check_inputs,
    dropout_arguments,
    dropout_seed,
    flash_backward,
    flash_decode,
    flash_forward,
    row_products,
    shift_tables,
    subtract_phase,
)
from .kernel_launch import Tiles, block_width, heads, launch, load, pointer, tl, triton
from .kernel_operator import Operator

# Memory of the pairs that are made at once: as much as the query, and at least so many bytes.
POPE_SCRATCH_BYTES = 64 << 20


@triton.jit(do_not_specialize=["H", "T"])
def turn_kernel(
    features, turned, grad_features, grad_shift, cos, sin, cos_shift, sin_shift, table_batch, H, T,
    BACKWARD: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M rows of one head. BLOCK_N is not used.

    Forward: writes turned (B, H, T, W) from features (B, H, T, D). Backward: `turned` has the gradient of the pairs;
    writes grad_features, and the program's part of grad_shift (B, H, blocks, R), if that is not None.
    """
    blocks = tl.cdiv(T, BLOCK_M)
    start = tl.program_id(0) % blocks * BLOCK_M
    member = (tl.program_id(0) // blocks).to(tl.int64)
    b = member // H
    channels = tl.arange(0, BLOCK_D)[None, :]
    rows = start + tl.arange(0, BLOCK_M)[:, None]
    mu = load(pointer(features, b, member % H), features.row, start, T, 0.0, D, BLOCK_M, BLOCK_D, False)
    mu = mu.to(tl.float32)
    cos = load(cos + b * table_batch, R, start, T, 1.0, R, BLOCK_M, BLOCK_D, False).to(tl.float32)
    sin = load(sin + b * table_batch, R, start, T, 0.0, R, BLOCK_M, BLOCK_D, False).to(tl.float32)
    if cos_shift is not None:
        of_head = member % H * R + channels
        head_cos = tl.load(cos_shift + of_head, mask=channels < R, other=1.0)
        head_sin = tl.load(sin_shift + of_head, mask=channels < R, other=0.0)
        cos, sin = subtract_phase(cos, sin, head_cos, head_sin)
    # The plain channels follow the sine parts of the R others.
    first = turned + (member * T + rows) * (D + R) + channels
    second = first + R
    polar = channels < R
    inside = rows < T
    if BACKWARD:
        real = tl.load(first, mask=inside & polar, other=0.0).to(tl.float32)
        imaginary = tl.load(second, mask=inside & (channels < D), other=0.0).to(tl.float32)
        grad = tl.where(polar, real * cos + imaginary * sin, imaginary)
        to = grad_features + (member * T + rows) * D + channels
        tl.store(to, grad.to(grad_features.dtype.element_ty), mask=inside & (channels < D))
        if grad_shift is not None:
            part = tl.sum(mu * (real * sin - imaginary * cos), 0)[None, :]
            tl.store(grad_shift + (member * blocks + start // BLOCK_M) * R + channels, part, mask=polar)
    else:
        tl.store(first, (mu * cos).to(turned.dtype.element_ty), mask=inside & polar)
        tl.store(second, tl.where(polar, mu * sin, mu).to(turned.dtype.element_ty), mask=inside & (channels < D))


_TURN = Tiles(32, 16)


def _turn(
    features: torch.Tensor, phases: tuple[torch.Tensor, ...], shift: tuple[Any, Any], *,
    grad: torch.Tensor | None = None,
) -> Any:  # fmt: skip
    """Returns (B, H, T, W) for features (B, H, T, D), phases (cos, sin), each (B, T, R), and those of the shift.

    Cosines and sines of the shift are (H, R) each, or None.

    Or, if its gradient is given, the gradients of features and of shift.
    """
    (B, H, T, D), (cos, sin) = features.shape, phases
    R, blocks = cos.shape[-1], triton.cdiv(T, _TURN.rows)
    turned, grad_features, parts = grad, None, None
    if grad is None:
        turned = features.new_empty(B, H, T, D + R)
    else:
        grad_features = features.new_empty(features.shape)
        parts = None if shift[0] is None else features.new_empty(B, H, blocks, R, dtype=torch.float32)
    launch(
        turn_kernel,
        (blocks * B * H,),
        [_TURN],
        (heads(features), turned, grad_features, parts, cos, sin, *shift, cos.stride(0), H, T),
        {"BACKWARD": grad is not None, "D": D, "R": R, "BLOCK_D": block_width(D)},
    )
    return turned if grad is None else (grad_features, None if parts is None else parts.sum((0, 2)))


def _pope_parts(tensors: Sequence[Any], dropout: float) -> Iterator[tuple[Any, ...]]:
    """Yields what is computed at once: some batch entries, or some key heads of one entry with their query heads.

    Each takes at most the scratch memory (or is one key head): slices of batch and heads of queries, and of keys; the
    arguments of `_turn` for both; values; and options of `kernel_flash`.
    """
    # The first four may get gradients.
    query, key, value, shift, *phases, key_ranges, seed = tensors
    (B, H, Q, D), (_, G, K, _) = query.shape, key.shape
    n = H // G
    budget = max(POPE_SCRATCH_BYTES, query.numel() * query.element_size())
    most = max(1, budget // (2 * (n * Q + K) * D * query.element_size()))
    entries, groups = (most // G, G) if most >= G else (1, most)
    shifts = shift_tables(shift)
    tables = [table.contiguous().expand(B, -1, -1) for table in phases]
    for first in range(0, max(1, B), entries):
        batch = slice(first, first + entries)
        cos_q, sin_q, cos_k, sin_k = (table[batch] for table in tables)
        for group in range(0, G, groups):
            keys, queries = slice(group, group + groups), slice(group * n, (group + groups) * n)
            # Each part counts its heads from 0.
            own_seed = None if seed is None else seed + (first * G + group)
            visible = None if key_ranges is None else key_ranges[batch]
            yield (
                (batch, queries),
                (batch, keys),
                (query[batch, queries], (cos_q, sin_q), tuple(None if one is None else one[queries] for one in shifts)),
                (key[batch, keys], (cos_k, sin_k), (None, None)),
                value[batch, keys],
                {"key_ranges": visible, "dropout": dropout_arguments(own_seed, dropout)},
            )


def _join(parts: list[tuple[tuple[slice, slice], torch.Tensor]], shape: Sequence[int]) -> torch.Tensor:
    """Returns the tensor (B, H or G, ...) of the given shape whose parts these are."""
    if len(parts) == 1:
        return parts[0][1]
    whole = torch.empty(*shape, dtype=parts[0][1].dtype, device=parts[0][1].device)
    for place, part in parts:
        whole[place] = part
    return whole


def _pope_forward(tensors: Sequence[Any], scaling: float, dropout: float) -> list[torch.Tensor]:
    out, lse = [], []
    for at, _, of_query, of_key, values, options in _pope_parts(tensors, dropout):
        part_out, part_lse = flash_forward(_turn(*of_query), _turn(*of_key), values, scaling=scaling, **options)
        out.append((at, part_out))
        lse.append((at, part_lse))
    shape = tensors[0].shape
    return [_join(out, shape), _join(lse, shape[:3])]


def _pope_backward(
    grads: Sequence[Any], tensors: Sequence[Any], results: Sequence[torch.Tensor], scaling: float, dropout: float
) -> list[torch.Tensor]:
    (query, key, value, shift), (out, lse), (grad, _) = tensors[:4], results, grads
    queries, keys, values = [], [], []
    grad_shift = None if shift is None else shift.new_zeros(shift.shape)
    for at, at_keys, of_query, of_key, part_value, options in _pope_parts(tensors, dropout):
        turned, delta = (_turn(*of_query), _turn(*of_key)), row_products(grad[at], out[at])
        grad_query, grad_key, grad_value, _ = flash_backward(
            grad[at], *turned, part_value, lse[at], delta, scaling=scaling, **options
        )
        grad_query, part_shift = _turn(*of_query, grad=grad_query)
        if grad_shift is not None and part_shift is not None:
            grad_shift[at[1]] += part_shift
        queries.append((at, grad_query))
        keys.append((at_keys, _turn(*of_key, grad=grad_key)[0]))
        values.append((at_keys, grad_value))
    gradients = [_join(queries, query.shape), _join(keys, key.shape), _join(values, value.shape)]
    return gradients if grad_shift is None else [*gradients, grad_shift]


def _pope_decode(tensors: Sequence[Any], scaling: float, dropout: float) -> torch.Tensor:
    query, key, value, shift, *phases, key_ranges, _ = tensors
    return flash_decode(query, key, value, scaling=scaling, key_ranges=key_ranges, polar=(*phases, shift))


_pope_operator = Operator("pope", "float scaling, float dropout", _pope_forward, _pope_backward, _pope_decode)


def _check(query: torch.Tensor, key: torch.Tensor, tables: Sequence[torch.Tensor], shift: Any) -> None:
    B, H, Q, D = query.shape
    K, R = key.shape[2], tables[0].shape[-1]
    for table, length in zip(tables, (Q, Q, K, K)):
        if table.dim() != 3 or table.shape[0] not in (1, B) or table.shape[1:] != (length, R) or not 0 < R <= D:
            shapes = [tuple(one.shape) for one in tables]
            raise ValueError(
                f"tables={shapes!r} are not valid: they must be twice (1 or {B}, {Q}, R), then twice (1 or {B}, {K}, "
                f"R), with R from 1 to {D}."
            )
        if table.requires_grad:
            raise ValueError(
                f"tables that require_grad={table.requires_grad!r} are not valid: the PoPE kernels give no gradient to "
                "them; it must be False, or use the 'eager' attention implementation."
            )
    if shift is not None and shift.shape != (H, R):
        raise ValueError(f"shift={tuple(shift.shape)!r} is not valid: it must be {(H, R)!r}.")


def pope_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None],
    *,
    key_ranges: torch.Tensor | None = None,
    scaling: float,
    dropout: float = 0.0,
) -> torch.Tensor:
    """PoPE attention (2509.10534, Eq. 4 to 7): differentiable in query, key, value and shift.

    Args:
        query: (B, H, Q, D), float32, bfloat16 or float16: R magnitudes, then plain channels.
        key: (B, G, K, D), the same type, H a multiple of G, K at least Q: the same.
        value: (B, G, K, D), the same type.
        tables: cosines and sines of the queries (1 or B, Q, R), cosines and sines of the keys (1 or B, K, R), float32,
            or float16 beside half precision; then the shift (H, R), subtracted from the phases of the queries, float32,
            or None.
        key_ranges, scaling, dropout: see `kernel_flash`.

    Returns:
        (B, H, Q, D) in the type of the query; 0 in rows that see nothing.
    """
    *phases, shift = tables
    check_inputs(query, key, value, scaling, key_ranges)
    _check(query, key, phases, shift)
    shift = None if shift is None else shift.float()
    others = (*phases, key_ranges, dropout_seed(query, dropout))
    return _pope_operator((query, key, value, shift), others, scaling, dropout)[0]
