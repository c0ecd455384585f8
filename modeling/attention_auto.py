"""Attention of attn_implementation="auto": the fastest implementation that a layer has, with ranges as the mask.

Axes: B batch, H query heads, G key heads (H % G == 0), Q query length, K key length, D head dim, V value width.
"""

from typing import Any

import torch

from .attention_mask import dense_mask, is_ranges, ranges_mask
from .attention_triton import auto_kernel

# On a CPU, PyTorch's attention gets a mask for this number of rows at a time.
CPU_ROWS = 128


def auto_attention(sdpa: Any, blockwise: Any) -> Any:
    """Returns the attention function of `auto`, from those of the implementations in PyTorch."""

    def auto_attention_forward(
        layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, context: Any, **options: Any
    ) -> tuple[torch.Tensor, None]:
        """The Triton kernel where it is supported, else the layer's fast implementation in PyTorch; no weights."""
        output = auto_kernel(layer, query, key, value, mask, context, options)
        if output is not None:
            return output, None
        rows, keys, default = query.shape[2], key.shape[2], layer.encodings.default
        if default == "sdpa" and mask is None and 1 < rows < keys:
            # PyTorch's own causal mask aligns the rows to the beginning of the keys. (No ranges for an int.)
            offset = torch.full((), keys - rows, device=query.device)
            mask = ranges_mask(1, rows, keys, offset, device=query.device)
        interface = sdpa if default == "sdpa" else blockwise
        return interface(layer, query, key, value, mask, context, **options)

    return auto_attention_forward


def ranges_path(sdpa: Any) -> Any:
    """Returns the path of `sdpa`, from the one in `attention`, for masks that are ranges too."""

    def sdpa_of_ranges(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **options: Any
    ) -> tuple[torch.Tensor, None]:
        Q = query.shape[2]
        if is_ranges(mask) and query.device.type == "cpu" and not torch.compiler.is_compiling():
            # A mask for all rows would take memory for 5 B Q K bytes, and what it hides would be computed.
            outputs = []
            for start in range(0, Q, CPU_ROWS):
                rows = slice(start, min(start + CPU_ROWS, Q))
                # Rows of padding see nothing, and attention needs a key.
                first, last = int(mask[:, :, rows, 0].min()), int(mask[:, :, rows, 1].max())
                keys = slice(min(first, key.shape[2] - 1), max(first + 1, last))
                dense = dense_mask(torch.cat((mask[:, :, rows], mask[:, :, Q:]), dim=2), rows.stop - rows.start)
                part = query[:, :, rows], key[:, :, keys], value[:, :, keys], dense[..., keys]
                outputs.append(sdpa(module, *part, **options)[0])
            return torch.cat(outputs, dim=1), None
        return sdpa(module, query, key, value, dense_mask(mask, Q) if is_ranges(mask) else mask, **options)

    return sdpa_of_ranges
