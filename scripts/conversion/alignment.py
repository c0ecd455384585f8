"""The start of PoPE in place of RoPE: channels of queries and keys that are turned so that little is lost.

RoPE rotates pairs of channels. With z = a + i b for the pair of a query or a key, its logit at distance i - j is
|z_q| |z_k| cos((i - j) w + arg z_q - arg z_k). PoPE has one magnitude instead of z, and one angle `delta` for each head
and frequency, which does not depend on the content. Here z is turned by the angle of its mean over a text, separately
for each head: its real part then holds most of it, and is mostly positive, as softplus wants it. It becomes the polar
channel. `delta` is the difference of the two angles. Pairs that do not complete a turn within the trained length hardly
depend on the distance, and become plain channels, as do channels that RoPE does not rotate. The imaginary parts of the
other pairs cannot be kept: they become plain channels that are zero in queries, and training can use them.

Axes: H query heads, G key heads, D head dim, R polar channels, P pairs that RoPE rotates.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch

from whatwhere.position_base import head_dim

from ..processes import is_first_process
from ..progress import Progress

# Tokens at the beginning of a text, to which attention often goes whatever they say, are not measured.
_SKIPPED = 8


def complete_turns(config: Any, length: int) -> int:
    """Returns the number of RoPE's pairs of channels, at least 1, that complete a turn within `length` tokens."""
    rope = config.rope_parameters
    pairs = rotated_channels(config) // 2
    angles = length * rope["rope_theta"] ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
    return max(1, int((angles >= 2 * math.pi).sum()))


def rotated_channels(config: Any) -> int:
    """Returns the number of channels of a head that RoPE rotates."""
    return int(head_dim(config) * config.rope_parameters.get("partial_rotary_factor", 1.0))


@torch.no_grad()
def mean_angles(model: Any, tokens: torch.Tensor, layers: list[int]) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Returns, for each layer, the angles of the mean pairs of queries (H, P) and keys (G, P), float64, in radians.

    Args:
        model: with RoPE in these layers.
        tokens: ids of texts of one length, int64 (texts, tokens).
        layers: their indices.
    """
    pairs = rotated_channels(model.config) // 2
    sums: dict[int, list[torch.Tensor]] = {}
    skipped = min(_SKIPPED, tokens.shape[1] - 1)

    def measured(states: torch.Tensor) -> torch.Tensor:
        states = states[:, :, skipped:].double()
        return torch.complex(states[..., :pairs], states[..., pairs : 2 * pairs]).sum((0, 2))

    with contextlib.ExitStack() as stack:
        for index in layers:
            stack.enter_context(_observed(model, index, sums, measured))
        training = model.training
        model.eval()
        shown = is_first_process()
        progress = stack.enter_context(Progress("mean angles of RoPE", tokens.numel(), unit="tokens", shown=shown))
        for row in tokens:
            model.base_model(input_ids=row[None].to(model.device), use_cache=False)
            progress.advance(len(row))
        model.train(training)
    return {index: (query.angle(), key.angle()) for index, (query, key) in sums.items()}


@contextlib.contextmanager
def _observed(model: Any, index: int, sums: dict[int, list[torch.Tensor]], measured: Any) -> Iterator[None]:
    """Adds what `measured` returns of a layer's queries and keys before rotation to `sums`."""
    (rope,) = (one for one in attention_of(model, index).encodings.hooks["before_cache"] if one.name == "rope")
    rotate = rope.before_cache

    def observe(query: torch.Tensor, key: torch.Tensor, context: Any) -> Any:
        found = [measured(query), measured(key)]
        sums[index] = [old + new for old, new in zip(sums[index], found)] if index in sums else found
        return rotate(query, key, context)

    rope.before_cache = observe
    try:
        yield
    finally:
        del rope.before_cache


def attention_of(model: Any, index: int) -> Any:
    """Returns the attention of the layer with an index."""
    layer = model.base_model.layers[index]
    return layer.attn if model.config.model_type == "whatwhere_gpt2" else layer.self_attn


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
