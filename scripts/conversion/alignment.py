"""The start of PoPE with softplus or ReLU in place of RoPE: channels of queries and keys that are turned.

RoPE rotates pairs of channels. With z = a + i b for the pair of a query or a key, its logit at distance i - j is
|z_q| |z_k| cos((i - j) w + arg z_q - arg z_k). PoPE has one magnitude instead of z, and one angle `delta` for each head
and frequency, which does not depend on the content. Here z is turned by the angle of its mean over a text, separately
for each head: its real part then holds most of it, and is mostly positive, as softplus wants it. It becomes the polar
channel. `delta` is the difference of the two angles. Pairs that do not complete a turn within the trained length hardly
depend on the distance, and become plain channels, as do channels that RoPE does not rotate. The imaginary parts of the
other pairs cannot be kept: they become plain channels that are zero in queries, and training can use them.

Axes: H query heads, G key heads, D head dim, R polar channels, P pairs that RoPE rotates.
"""

import functools
import math
from typing import Any

import torch

from whatwhere.position_base import head_dim

from .layer_start import SKIPPED, LayerStart, norm_weights, observe, rotated_channels


def complete_turns(frequencies: torch.Tensor, length: int) -> int:
    """Returns the number of frequencies, at least 1, that complete a turn within `length` tokens."""
    return max(1, int((length * frequencies >= 2 * math.pi).sum()))


def mean_angles(model: Any, tokens: torch.Tensor, layers: list[int]) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Returns, for each layer, the angles of the mean pairs of queries (H, P) and keys (G, P), float64, in radians.

    Args:
        model: with RoPE in these layers.
        tokens: ids of texts of one length, int64 (texts, tokens).
        layers: their indices.
    """
    pairs = rotated_channels(model.config) // 2
    sums: dict[int, list[torch.Tensor]] = {index: [] for index in layers}
    skipped = min(SKIPPED, tokens.shape[1] - 1)

    def measured(states: torch.Tensor) -> torch.Tensor:
        states = states[:, :, skipped:].double()
        return torch.complex(states[..., :pairs], states[..., pairs : 2 * pairs]).sum((0, 2)).cpu()

    def add(index: int, query: torch.Tensor, key: torch.Tensor, *_: torch.Tensor) -> None:
        found = [measured(query), measured(key)]
        sums[index] = [old + new for old, new in zip(sums[index], found)] or found

    observe(model, tokens, {index: functools.partial(add, index) for index in layers}, "mean angles of RoPE")
    return {index: (query.angle(), key.angle()) for index, (query, key) in sums.items()}


def turned_channels(angles: torch.Tensor, polar: int, channels: int) -> torch.Tensor:
    """Returns the matrices that give PoPE's channels from those of RoPE, float64 (heads, D, D).

    Args:
        angles: of the pairs, float64 (heads, P).
        polar: R, at most P.
        channels: D.
    """
    heads, pairs = angles.shape
    matrices = torch.zeros(heads, channels, channels, dtype=torch.float64)
    first = torch.arange(polar)
    cos, sin = angles[:, :polar].cos(), angles[:, :polar].sin()
    matrices[:, first, first], matrices[:, first, first + pairs] = cos, sin
    matrices[:, first + polar, first], matrices[:, first + polar, first + pairs] = -sin, cos
    others = torch.cat((torch.arange(polar, pairs), torch.arange(pairs + polar, channels)))
    matrices[:, torch.arange(2 * polar, channels), others] = 1.0
    return matrices


def aligned_starts(
    model: Any, tokens: torch.Tensor, layers: list[int], polar: int, *, use_delta: bool
) -> dict[int, LayerStart]:
    """Returns the starts of layers, with R = `polar` polar channels; for the other arguments see `mean_angles`."""
    width = head_dim(model.config)
    # Imaginary parts are removed from queries.
    kept = torch.ones(width, dtype=torch.float64)
    kept[polar : 2 * polar] = 0
    starts = {}
    for index, (query, key) in mean_angles(model, tokens, layers).items():
        n = len(query) // len(key)
        if not use_delta:
            # Without an angle of each head, queries are turned as their keys are.
            query = key.repeat_interleave(n, 0)
        norms = norm_weights(model, index)
        if norms is not None:
            # The weights of a norm are those of single channels: they can be exchanged and get another sign.
            query, key = (torch.round(angle / (math.pi / 2)) * (math.pi / 2) for angle in (query, key))
        delta = -torch.remainder((query - key.repeat_interleave(n, 0))[:, :polar], 2 * math.pi)
        turned_query, turned_key = (turned_channels(angles, polar, width) for angles in (query, key))
        if norms is None:
            starts[index] = LayerStart(turned_query * kept[:, None], turned_key, delta)
            continue
        # A norm measures all channels, so its weights remove those that are not kept.
        new = [
            (matrices.abs().round() @ weights[..., None])[..., 0]
            for matrices, weights in zip((turned_query, turned_key), norms)
        ]
        starts[index] = LayerStart(turned_query, turned_key, delta, new[0] * kept, new[1])
    return starts
