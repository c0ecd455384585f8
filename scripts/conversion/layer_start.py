"""What gives a layer PoPE in place of RoPE: new queries, keys and phase shifts.

Axes: H query heads, G key heads, T tokens, D head dim, E hidden size, R polar channels, P pairs that RoPE rotates.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from whatwhere.position_base import head_dim

from ..processes import is_first_process
from ..progress import Progress

# Tokens at the beginning of a text, to which attention often goes whatever they say, are not measured.
SKIPPED = 8


@dataclasses.dataclass
class LayerStart:
    """The start of a layer, float64.

    Attributes:
        query, key: matrices (H, D', D) and (G, D', D), which give D' channels of PoPE from D of RoPE, before norms.
            Where D' is greater than D, values get channels that are zero.
        delta: the phase shifts, (H, R), in radians, within [-2 pi, 0].
        query_norm, key_norm: new weights of `qk_norm`, (H, D) and (G, D).
    """

    query: torch.Tensor
    key: torch.Tensor
    delta: torch.Tensor
    query_norm: torch.Tensor | None = None
    key_norm: torch.Tensor | None = None

    def write(self, weights: dict[str, torch.Tensor], config: Any, index: int) -> None:
        """Changes the projections and norms of the layer with an index in a model's weights."""
        heads, key_heads, width = len(self.query), len(self.key), head_dim(config)

        def apply(matrices: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            """Returns the rows (heads * D, ...) of a weight or a bias, turned."""
            turned = matrices.to(rows.device) @ rows.double().reshape(len(matrices), width, -1)
            return turned.reshape(-1, *rows.shape[1:]).to(rows.dtype)

        if config.model_type == "whatwhere_gpt2":
            name = f"transformer.h.{index}.attn."
            parts = (heads * width, key_heads * width, key_heads * width)
            for kind in ("weight", "bias"):
                full = f"{name}c_attn.{kind}"
                q, k, v = weights[full].T.split(parts) if kind == "weight" else weights[full].split(parts)
                rows = torch.cat((apply(self.query, q), apply(self.key, k), v))
                weights[full] = rows.T.contiguous() if kind == "weight" else rows
        else:
            name = f"model.layers.{index}.self_attn."
            for part, matrices in (("q_proj", self.query), ("k_proj", self.key)):
                for kind in ("weight", "bias"):
                    if (full := f"{name}{part}.{kind}") in weights:
                        weights[full] = apply(matrices, weights[full])
            if (added := self.key.shape[1] - width) > 0:
                wider = torch.eye(width + added, width, dtype=torch.float64)
                for kind in ("weight", "bias"):
                    if (full := f"{name}v_proj.{kind}") in weights:
                        weights[full] = apply(wider.expand(key_heads, -1, -1), weights[full])
                full = f"{name}o_proj.weight"
                weights[full] = apply(wider.expand(heads, -1, -1), weights[full].T).T.contiguous()
        for norm, new in (("query_norm", self.query_norm), ("key_norm", self.key_norm)):
            if new is not None:
                full = f"{name}options.{norm}.weight"
                weights[full] = new.to(weights[full])


def attention_of(model: Any, index: int) -> Any:
    """Returns the attention of the layer with an index."""
    layer = model.base_model.layers[index]
    return layer.attn if model.config.model_type == "whatwhere_gpt2" else layer.self_attn


def norm_weights(model: Any, index: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Returns the weights of the norms of a layer's queries (H, D) and keys (G, D), float64; None without `qk_norm`."""
    if not model.config.qk_norm:
        return None
    options = attention_of(model, index).options
    return options.query_norm.weight.detach().double().cpu(), options.key_norm.weight.detach().double().cpu()


@torch.no_grad()
def observe(model: Any, tokens: torch.Tensor, observers: dict[int, Callable[..., None]], name: str) -> None:
    """Runs a model with RoPE on texts, and calls each layer's observer with its queries and keys; see `observed`.

    Args:
        tokens: ids of texts of one length, int64 (texts, T).
        observers: by the layer's index.
        name: what the progress is called.
    """
    with contextlib.ExitStack() as stack:
        for index, observer in observers.items():
            stack.enter_context(observed(model, index, observer))
        training = model.training
        model.eval()
        progress = stack.enter_context(Progress(name, tokens.numel(), unit="tokens", shown=is_first_process()))
        for row in tokens:
            model.base_model(input_ids=row[None].to(model.device), use_cache=False)
            progress.advance(len(row))
        model.train(training)


@contextlib.contextmanager
def observed(model: Any, index: int, observer: Callable[..., None]) -> Iterator[None]:
    """Calls `observer` with a layer's queries (1, H, T, D) and keys (1, G, T, D) before RoPE, and those after it.

    Queries and keys that are not finite raise ValueError.
    """
    (rope,) = (one for one in attention_of(model, index).encodings.hooks["before_cache"] if one.name == "rope")
    rotate = rope.before_cache

    def rotate_observed(query: torch.Tensor, key: torch.Tensor, context: Any) -> Any:
        rotated = rotate(query, key, context)
        if not (query.isfinite().all() and key.isfinite().all()):
            raise ValueError(
                f"The queries or keys of layer {index} are not finite, with dtype={query.dtype}: PoPE cannot be fitted."
            )
        observer(query, key, *rotated)
        return rotated

    rope.before_cache = rotate_observed
    try:
        yield
    finally:
        del rope.before_cache


def rotated_channels(config: Any) -> int:
    """Returns the number of channels of a head that RoPE rotates; "proportional" pairs all, some of frequency 0."""
    rope = config.rope_parameters
    share = 1.0 if rope["rope_type"] == "proportional" else rope.get("partial_rotary_factor", 1.0)
    return int(head_dim(config) * share)
