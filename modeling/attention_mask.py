"""The mask of `auto`, `blockwise` and `triton` attention, and its conversion for other implementations.

The mask is linear in the length: key ranges, int32 (B, 1, Q + K, 2). Query row i sees key slot j exactly if it is in
the row's range, `low <= j < high` for `low, high = key_ranges[b, 0, i]`, and is not padding: `key_ranges[b, 0, Q + j,
0]` is not 0. That covers causality, padding, packed documents, and the empty slots of a static cache. There are four
dimensions because Transformers passes 4D masks, such as those from `generate` for a static cache, to the model
unchanged. None means causal with the rows at the end of the keys. A user's 4D mask, boolean or additive (B, 1 or H, Q,
K), stays one; `is_hidden` says what it hides.

Axes: B batch, H query heads, Q query length, K key length.
"""

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask
from transformers.utils.import_utils import is_tracing

# Additive masks hide a key by the lowest number of any type, by -inf or by -1e4.
HIDDEN = -5e3


def is_hidden(mask: torch.Tensor) -> torch.Tensor:
    """Returns what a boolean or additive mask hides, or what is masked in logits with such a mask: bool, as large."""
    return ~mask if mask.dtype == torch.bool else mask < HIDDEN


def with_lowest(mask: Any) -> Any:
    """Returns an additive mask with the lowest number of its type where it hides a key; any other mask unchanged."""
    if not isinstance(mask, torch.Tensor) or mask.ndim != 4 or not mask.is_floating_point():
        return mask
    return mask.masked_fill(is_hidden(mask), torch.finfo(mask.dtype).min)


def readable(tensor: torch.Tensor) -> bool:
    """Returns True if a tensor has values: not in a compiled graph, a fake tensor, or a batch of `torch.vmap`."""
    functorch = torch._C._functorch
    if torch.compiler.is_compiling() or tensor.device.type == "meta":
        return False
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_batchedtensor(tensor):
            return False
        tensor = functorch.get_unwrapped(tensor)
    return not isinstance(tensor, FakeTensor)


def largest(tensor: torch.Tensor) -> int | None:
    """Returns the largest of some integers, of a batch of `torch.vmap` too; None where there are no values to read."""
    if torch.compiler.is_compiling() or tensor.device.type == "meta":
        return None
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return None if isinstance(tensor, FakeTensor) else int(tensor.max())


def is_key_ranges(mask: Any) -> bool:
    """Returns True if a mask has the form of key ranges."""
    return isinstance(mask, torch.Tensor) and mask.ndim == 4 and mask.dtype == torch.int32


def key_ranges_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> torch.Tensor | None:
    """Returns key ranges, or a 4D mask for mask functions that `sdpa` must evaluate.

    Waits for the device only to see whether a prompt, or a batch of training, has padding, as Transformers does.

    Returns:
        None for plain causal attention with the rows at the end of the keys, else key ranges. Padding rows are fully
        masked; other rows begin at the first slot of their document that is not left padding.
    """
    if use_vmap:
        arguments = (batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask)
        return sdpa_mask(*arguments, allow_is_causal_skip=False, use_vmap=True, device=device)  # type: ignore[arg-type]
    packed = mask_function is not causal_mask_function
    filled = isinstance(q_offset, int) and q_offset + q_length == kv_length and kv_offset == 0
    if filled and not packed and _hides_nothing(attention_mask, q_length, kv_length):
        return None
    slots = torch.arange(kv_length, device=device)
    # The slot of each row, (Q,) and on the device even if the cache counts there.
    rows = torch.arange(q_length, device=device) + q_offset - kv_offset
    own = rows.clamp(max=kv_length - 1)
    valid = torch.ones(batch_size, kv_length, dtype=torch.bool, device=device)
    if attention_mask is not None:
        given = attention_mask[:, kv_offset : kv_offset + kv_length].to(torch.bool)
        valid = torch.nn.functional.pad(given, (0, kv_length - given.shape[-1]))
    low = (valid.cumsum(-1) == 0).sum(-1, keepdim=True)
    if packed and kv_length > 1:
        # Documents are contiguous: a slot that does not attend to the slot before it begins a new one.
        batch = torch.arange(batch_size, device=device)[:, None]
        same = mask_function(batch, torch.zeros_like(batch), slots[None, 1:] + kv_offset, slots[None, :-1] + kv_offset)
        begins = torch.nn.functional.pad(~same.expand(batch_size, -1), (1, 0))
        first = torch.where(begins, slots, 0).cummax(-1).values
        low = torch.maximum(low, first[:, own])
    low = low.expand(batch_size, q_length)
    high = torch.where(valid[:, own], (rows + 1).clamp(max=kv_length), low)
    key_ranges = torch.stack((low, torch.maximum(high, low)), dim=-1)
    flags = torch.stack((valid, torch.zeros_like(valid)), dim=-1)
    return torch.cat((key_ranges.to(torch.int32), flags.to(torch.int32)), dim=1)[:, None]


def _hides_nothing(attention_mask: torch.Tensor | None, q_length: int, kv_length: int) -> bool:
    """Returns True if a 2D mask is known to have no padding. Other devices than CPUs are not waited for in decoding."""
    if attention_mask is None:
        return True
    worth = attention_mask.device.type == "cpu" or 1 < q_length == kv_length
    return worth and readable(attention_mask) and not is_tracing(attention_mask) and bool(attention_mask.all())


def dense_mask(key_ranges: torch.Tensor, query_length: int) -> torch.Tensor:
    """Returns key ranges (B, 1, Q + K, 2) as a boolean mask (B, 1, Q, K), True where visible."""
    low, high = key_ranges[:, :, :query_length].unsqueeze(-2).unbind(-1)
    valid = key_ranges[:, :, query_length:, 0].unsqueeze(2) != 0
    slots = torch.arange(valid.shape[-1], device=key_ranges.device)
    return (slots >= low) & (slots < high) & valid


def causal_mask(query_length: int, key_length: int, device: torch.device) -> torch.Tensor:
    """Returns a boolean (Q, K) mask, True where visible; queries are aligned to the end of the keys."""
    return torch.ones(query_length, key_length, dtype=torch.bool, device=device).tril(key_length - query_length)


def visible_keys(mask: Any, rows: slice, query_length: int, key_length: int, device: torch.device) -> torch.Tensor:
    """Returns what some query rows see by a mask in this form: bool (1 or B, rows, K); in any head, if heads differ."""
    if mask is None:
        return causal_mask(query_length, key_length, device)[None, rows]
    if is_key_ranges(mask):
        part = torch.cat((mask[:, :, rows], mask[:, :, query_length:]), dim=2)
        return dense_mask(part, rows.stop - rows.start)[:, 0]
    return ~is_hidden(mask[:, :, rows]).all(1)


# Transformers looks mask functions up globally; without an entry padding would be ignored.
for _name in ("auto", "blockwise", "triton"):
    AttentionMaskInterface.register(_name, key_ranges_mask)
