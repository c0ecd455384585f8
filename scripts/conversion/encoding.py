"""Gives a pretrained model another position encoding and keeps as much of it as possible.

New parameters start as in a new model: CoPE's table at zero, so that `cope+rope` computes what the source computes.
For layers that change from RoPE to PoPE, see `alignment.py`.

Axes: H query heads, G key heads, D head dim, E hidden size, R polar channels.
"""

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from transformers.utils import logging

from whatwhere.configuration.configuration_common import kept_parameters
from whatwhere.position_base import head_dim
from whatwhere.position_plan import layer_plan
from whatwhere.position_rope import check_rope_parameters

from .alignment import attention_of, complete_turns, mean_angles, rotated_channels, turned_channels

logger = logging.get_logger(__name__)

# Keys of `rope_parameters`: those that a new scaling does not change; the length before scaling.
_UNSCALED, _ORIGINAL = ("rope_theta", "partial_rotary_factor"), "original_max_position_embeddings"


def convert(
    model: Any,
    position_encoding: str | list[str] | None = None,
    parameters: dict[str, Any] | None = None,
    rope_parameters: dict[str, Any] | None = None,
    text: Callable[[], torch.Tensor | None] = lambda: None,
) -> tuple[Any, list[str], list[str]]:
    """Returns a model with another position encoding, which shares the memory of the weights that stay the same.

    Args:
        model: from `load_source`; what is not given stays as it is in this model.
        position_encoding: a name, or a list of names, one for each layer or a pattern that repeats.
        parameters: `position_encoding_parameters`. For layers that change from RoPE to PoPE, the default of
            `partial_rotary_factor` has the pairs of RoPE that complete a turn within the trained length, and the
            default of `theta` gives them their frequencies.
        rope_parameters: of the new model.
        text: called if layers change from RoPE to PoPE. Returns tokens for `mean_angles`, int64 (texts, tokens), or
            None for random ones.

    Returns:
        the model, the names of its new parameters, and the names of the parameters that were dropped.
    """
    old = model.config
    position_encoding = old.position_encoding if position_encoding is None else position_encoding
    scaling = {} if rope_parameters is None else _scaling(old, rope_parameters)
    given = _merged(
        kept_parameters(old.position_encoding, old.position_encoding_parameters, position_encoding), parameters
    )
    config = _with_encoding(old, position_encoding, given, **scaling)
    before, after = layer_plan(old), layer_plan(config)
    changed = [i for i in range(config.num_hidden_layers) if _of(before[i], "rope") and _of(after[i], "pope")]
    turned = [i for i, new in enumerate(after) if _of(before[i], "none") and (_of(new, "rope") or _of(new, "pope"))]
    if turned and "rope" in old.encoding_names:
        logger.warning(
            f"position_encoding={position_encoding!r} rotates queries and keys of layers {turned}, which have no "
            f"position encoding in the source. Its own is {old.position_encoding!r}."
        )
    weights = dict(model.state_dict())
    if changed:
        rope = old.rope_parameters
        if (kind := rope.get("rope_type", "default")) != "default":
            logger.warning(
                f"rope_type={kind!r} of the source has no equal in PoPE, which gets the unscaled frequencies."
            )
        nested = position_encoding != "pope"
        own = (given.get("pope") or {}) if nested else given
        pairs = rotated_channels(old) // 2
        length = rope.get(_ORIGINAL) if kind == "yarn" else None
        turning = complete_turns(old, length or old.max_position_embeddings)
        own = {"partial_rotary_factor": turning / head_dim(old), **own}
        polar = int(head_dim(old) * own["partial_rotary_factor"])
        if not 1 <= polar <= pairs:
            raise ValueError(
                f"partial_rotary_factor={own['partial_rotary_factor']!r} is not valid: of {head_dim(old)} channels at "
                f"least 1 must be polar, and at most {pairs}, the number of pairs of channels that RoPE rotates."
            )
        own = {"theta": float(rope["rope_theta"] ** (polar / pairs)), **own}
        config = _with_encoding(old, position_encoding, {**given, "pope": own} if nested else own, **scaling)
        if (tokens := text()) is None:
            generator = torch.Generator().manual_seed(0)
            tokens = torch.randint(old.vocab_size, (4, min(512, old.max_position_embeddings)), generator=generator)
        angles = _angles(model, tokens, changed, own.get("use_delta", True))
        for index in changed:
            _turn(weights, model, index, angles[index], polar)
    result = type(model)._from_config(config, dtype=model.dtype)
    shapes = {name: value.shape for name, value in result.state_dict().items()}
    kept = {name: value for name, value in weights.items() if shapes.get(name) == value.shape}
    missing, _ = result.load_state_dict(kept, strict=False, assign=True)
    for index in changed:
        (pope,) = (one for one in attention_of(result, index).encodings.hooks["after_cache"] if one.name == "pope")
        if pope.delta is not None:
            query, key = (one[:, : pope.rotated] for one in angles[index])
            shift = query - key.repeat_interleave(len(query) // len(key), 0)
            pope.delta.weight.data.copy_(-torch.remainder(shift, 2 * math.pi))
    result.generation_config = copy.deepcopy(model.generation_config)
    result.config._name_or_path = old._name_or_path
    result.tie_weights()
    return result, list(missing), sorted(weights.keys() - kept.keys())


def _scaling(old: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a configuration that new `rope_parameters` change: these, and the length that they give.

    As in Transformers, `max_position_embeddings` is the scaled length of YaRN, LongRoPE and Llama 3, with the length
    before in `original_max_position_embeddings`. For the other types it is the length before.
    """
    before = getattr(old, "rope_parameters", None) or {}
    rope = {key: before[key] for key in _UNSCALED if key in before} | given if isinstance(given, dict) else given
    check_rope_parameters("rope_parameters", rope, old)
    kind, length = rope.get("rope_type", rope.get("type", "default")), old.max_position_embeddings
    known = before.get(_ORIGINAL) if before.get("rope_type") in (kind, "yarn") else None
    original = rope.get(_ORIGINAL) or known or length
    if kind in ("yarn", "llama3", "longrope"):
        scaled = int(original * (rope.get("factor") or 1))
        rope[_ORIGINAL], length = original, scaled if kind == "yarn" else max(length, scaled)
    elif before.get("rope_type") == "yarn":
        length = original
    return {"rope_parameters": rope, "max_position_embeddings": length}


def _merged(kept: dict[str, Any] | None, given: dict[str, Any] | None) -> dict[str, Any]:
    """Returns the source's parameters, replaced by those that are given; both may be nested by encoding."""
    if given is not None and not isinstance(given, dict):
        raise ValueError(f"position_encoding_parameters={given!r} is not valid: it must be a mapping.")
    result: dict[str, Any] = dict(kept or {})
    for name, value in (given or {}).items():
        inner = isinstance(value, dict) and isinstance(result.get(name), dict)
        result[name] = {**result[name], **value} if inner else value
    return result


def _with_encoding(config: Any, position_encoding: str | list[str], parameters: dict[str, Any], **fields: Any) -> Any:
    fields |= {"position_encoding": position_encoding, "position_encoding_parameters": parameters or None}
    return type(config).from_dict(copy.deepcopy(config.to_dict()), **fields)


def _of(layer: Any, name: str) -> bool:
    return any(cls.name == name for cls, _ in layer)


def _angles(
    model: Any, tokens: torch.Tensor, layers: list[int], use_delta: bool
) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Returns the angles by which the pairs of queries (H, P) and keys (G, P) of each layer are turned, in radians."""
    found = {}
    for index, (query, key) in mean_angles(model, tokens, layers).items():
        if not use_delta:
            # Without an angle of each head, queries are turned as their keys are.
            query = key.repeat_interleave(len(query) // len(key), 0)
        if model.config.qk_norm:
            # The weights of a norm are those of single channels: they can be exchanged and get another sign.
            query, key = (torch.round(angle / (math.pi / 2)) * (math.pi / 2) for angle in (query, key))
        found[index] = query, key
    return found


def _turn(
    weights: dict[str, torch.Tensor], model: Any, index: int, angles: tuple[torch.Tensor, torch.Tensor], polar: int
) -> None:
    """Turns the channels of queries and keys of a layer, in `weights`, by the angles of their pairs."""
    config = model.config
    width, heads, key_heads = head_dim(config), config.num_attention_heads, config.num_key_value_heads
    query, key = (turned_channels(one, polar, width) for one in angles)
    kept = torch.ones(width, dtype=torch.float64)
    kept[polar : 2 * polar] = 0

    def apply(matrices: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Returns the rows (heads * D, ...) of a weight or a bias, turned."""
        turned = matrices @ rows.double().reshape(len(matrices), width, -1).to(matrices.device)
        return turned.reshape(rows.shape).to(rows.dtype)

    # A norm measures all channels, so its weights remove those that are not kept.
    removed = query if config.qk_norm else query * kept[:, None]
    if config.model_type == "whatwhere_gpt2":
        name = f"transformer.h.{index}.attn."
        parts = (heads * width, key_heads * width, key_heads * width)
        for kind in ("weight", "bias"):
            full = f"{name}c_attn.{kind}"
            q, k, v = weights[full].T.split(parts) if kind == "weight" else weights[full].split(parts)
            rows = torch.cat((apply(removed, q), apply(key, k), v))
            weights[full] = rows.T.contiguous() if kind == "weight" else rows
    else:
        name = f"model.layers.{index}.self_attn."
        for part, matrices in (("q_proj", removed), ("k_proj", key)):
            for kind in ("weight", "bias"):
                if (full := f"{name}{part}.{kind}") in weights:
                    weights[full] = apply(matrices, weights[full])
    for norm, matrices in (("query_norm", query * kept[:, None]), ("key_norm", key)):
        if (full := f"{name}options.{norm}.weight") in weights:
            weights[full] = apply(matrices.abs().round(), weights[full])
