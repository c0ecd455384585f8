"""Gives a pretrained model another position encoding and keeps as much of it as possible.

New parameters start as in a new model: CoPE's table at zero, so that `cope+rope` computes what the source computes.
For layers that change from RoPE to PoPE, the channels of queries and keys are reordered. RoPE rotates the channels
(i, i + D/2) of a head by theta^(-2 i / D) per token. PoPE's polar channels 2 i and 2 i + 1 get the frequencies
theta^(-2 i / D) and theta^(-(2 i + 1) / D) if its own base is theta^(R / D), its default here. Pair i becomes these two
channels, for i < R / 2. The other pairs, which turn slowest, become PoPE's plain channels (`partial_rotary_factor`),
whose product does not depend on the distance; so do channels that RoPE does not rotate, and D is then the number of
rotated ones. The part of RoPE's logits with sines and, with softplus, the signs are lost until training.

Axes: H query heads, G key heads, D head dim, E hidden size, R polar channels.
"""

import copy
from typing import Any

import torch
from transformers.utils import logging

from whatwhere.configuration.configuration_common import kept_parameters
from whatwhere.position_base import head_dim
from whatwhere.position_plan import layer_plan
from whatwhere.position_rope import check_rope_parameters

logger = logging.get_logger(__name__)

# Keys of `rope_parameters`: those that a new scaling does not change; the length before scaling.
_UNSCALED, _ORIGINAL = ("rope_theta", "partial_rotary_factor"), "original_max_position_embeddings"


def convert(
    model: Any,
    position_encoding: str | list[str] | None = None,
    parameters: dict[str, Any] | None = None,
    rope_parameters: dict[str, Any] | None = None,
) -> tuple[Any, list[str], list[str]]:
    """Returns a model with another position encoding, which shares the memory of the weights that stay the same.

    Args:
        model: from `load_source`; what is not given stays as it is in this model.
        position_encoding: a name, or a list of names, one for each layer or a pattern that repeats.
        parameters: `position_encoding_parameters`. For layers that change from RoPE to PoPE, the defaults of `theta`
            and `partial_rotary_factor` are those of the text of this file.
        rope_parameters: of the new model.

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
        rotated = int(head_dim(old) * rope.get("partial_rotary_factor", 1.0))
        if (kind := rope.get("rope_type", "default")) != "default":
            logger.warning(
                f"rope_type={kind!r} of the source has no equal in PoPE, which gets the unscaled frequencies."
            )
        nested = position_encoding != "pope"
        own = (given.get("pope") or {}) if nested else given
        own = {"partial_rotary_factor": rotated / head_dim(old), **own}
        polar = int(head_dim(old) * own["partial_rotary_factor"])
        if polar % 2 or polar > rotated:
            raise ValueError(
                f"partial_rotary_factor={own['partial_rotary_factor']!r} is not valid: the number of polar channels "
                f"must be even, and at most {rotated}, the channels that RoPE rotates."
            )
        own = {"theta": float(rope["rope_theta"] ** (polar / rotated)), **own}
        config = _with_encoding(old, position_encoding, {**given, "pope": own} if nested else own, **scaling)
        order = pope_order(head_dim(old), rotated, polar)
        for index in changed:
            _reorder(weights, model, index, order)
    result = type(model)._from_config(config, dtype=model.dtype)
    shapes = {name: value.shape for name, value in result.state_dict().items()}
    kept = {name: value for name, value in weights.items() if shapes.get(name) == value.shape}
    missing, _ = result.load_state_dict(kept, strict=False, assign=True)
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


def pope_order(channels: int, rotated: int, polar: int) -> torch.Tensor:
    """Returns the channel of RoPE, int64 (D), from which each channel of PoPE comes.

    Args:
        channels: D.
        rotated: the number of channels that RoPE rotates.
        polar: R, even, at most `rotated`.
    """
    pairs = torch.arange(rotated // 2)
    first, others = pairs[: polar // 2], pairs[polar // 2 :]
    half = rotated // 2
    turned = torch.stack((first, first + half), dim=1).flatten()
    return torch.cat((turned, others, others + half, torch.arange(rotated, channels)))


def _reorder(weights: dict[str, torch.Tensor], model: Any, index: int, order: torch.Tensor) -> None:
    """Reorders the channels of queries and keys of a layer, in `weights`."""
    config = model.config
    width, heads, key_heads = head_dim(config), config.num_attention_heads, config.num_key_value_heads

    def rows(count: int) -> torch.Tensor:
        return (torch.arange(count)[:, None] * width + order).flatten()

    if config.model_type == "whatwhere_gpt2":
        name = f"transformer.h.{index}.attn."
        values = torch.arange(key_heads * width) + (heads + key_heads) * width
        merged = torch.cat((rows(heads), rows(key_heads) + heads * width, values))
        weights[f"{name}c_attn.weight"] = weights[f"{name}c_attn.weight"][:, merged]
        weights[f"{name}c_attn.bias"] = weights[f"{name}c_attn.bias"][merged]
    else:
        name = f"model.layers.{index}.self_attn."
        for part, count in (("q_proj", heads), ("k_proj", key_heads)):
            for kind in ("weight", "bias"):
                if (full := f"{name}{part}.{kind}") in weights:
                    weights[full] = weights[full][rows(count)]
    for norm in ("query_norm", "key_norm"):
        if (full := f"{name}options.{norm}.weight") in weights:
            weights[full] = weights[full][:, order]
