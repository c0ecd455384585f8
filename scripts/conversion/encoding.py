"""Gives a pretrained model another position encoding and keeps as much of it as possible.

New parameters start as in a new model: CoPE's table at zero, so that `cope+rope` computes what the source computes.
For layers that change from RoPE to PoPE, see `polar_fit.py`, and with softplus or ReLU `alignment.py`.
"""

import copy
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers.utils import logging

from whatwhere.configuration.configuration_common import kept_parameters
from whatwhere.position_base import head_dim
from whatwhere.position_plan import layer_plan
from whatwhere.position_pope import PoPEParameters
from whatwhere.position_rope import RotaryTables, check_rope_parameters

from .alignment import aligned_starts, complete_turns
from .layer_start import LayerStart, attention_of, rotated_channels
from .polar_fit import exact_starts, fitted_starts

logger = logging.get_logger(__name__)

# Keys of `rope_parameters`: those that a new scaling does not change; the length before scaling.
_UNSCALED, _ORIGINAL = ("rope_theta", "partial_rotary_factor"), "original_max_position_embeddings"


class Converted(NamedTuple):
    """What `convert` returns.

    Attributes:
        model: the converted model.
        new: the names of its new parameters.
        dropped: the names of the parameters that were dropped.
        errors: of PoPE's fit to RoPE, by layer; see `polar_fit.Fit`.
    """

    model: Any
    new: list[str]
    dropped: list[str]
    errors: dict[int, float]


def convert(
    model: Any,
    position_encoding: str | list[str] | None = None,
    parameters: dict[str, Any] | None = None,
    rope_parameters: dict[str, Any] | None = None,
    text: Callable[[], torch.Tensor | None] = lambda: None,
    *,
    exact: bool = False,
) -> Converted:
    """Returns a model with another position encoding, which shares the memory of the weights that stay the same.

    Args:
        model: from `load_source`; what is not given stays as it is in this model.
        position_encoding: a name, or a list of names, one for each layer or a pattern that repeats.
        parameters: `position_encoding_parameters`. For layers that change from RoPE to PoPE, the default of `magnitude`
            is "identity", with two polar channels for each pair of RoPE. With the other magnitudes the default of
            `partial_rotary_factor` has one for each pair that completes a turn within the trained length.
        rope_parameters: of the new model; PoPE gets RoPE's frequencies with these.
        text: called if layers change from RoPE to PoPE. Returns tokens of texts of one length, int64 (texts, tokens),
            on which queries and keys are measured, or None for random ones.
        exact: PoPE in place of RoPE gets three channels for each pair, with the source's logits and wider heads.

    Raises:
        ValueError: parameters that are not valid, or that the conversion cannot keep.
    """
    old = model.config
    position_encoding = old.position_encoding if position_encoding is None else position_encoding
    scaling = {} if rope_parameters is None else _scaling(old, rope_parameters)
    given = _merged(
        kept_parameters(old.position_encoding, old.position_encoding_parameters, position_encoding), parameters
    )
    config = _with_encoding(old, position_encoding, given)
    before, after = layer_plan(old), layer_plan(config)
    changed = [i for i in range(config.num_hidden_layers) if _of(before[i], "rope") and _of(after[i], "pope")]
    # PoPE gets the frequencies of RoPE, but not its parameters.
    replaced = changed and not any(_of(layer, "rope") for layer in after)
    fields = {name: value for name, value in scaling.items() if not replaced or name != "rope_parameters"}
    config = _with_encoding(old, position_encoding, given, **fields)
    turned = [i for i, new in enumerate(after) if _of(before[i], "none") and (_of(new, "rope") or _of(new, "pope"))]
    if turned and "rope" in old.encoding_names:
        logger.warning(
            f"position_encoding={position_encoding!r} rotates queries and keys of layers {turned}, which have no "
            f"position encoding in the source. Its own is {old.position_encoding!r}."
        )
    weights = dict(model.state_dict())
    starts: dict[int, LayerStart] = {}
    errors: dict[int, float] = {}
    if exact:
        _check_exact(old, position_encoding, before, changed)
    if changed:
        if any(parameters.frequencies is None for layer in before for _, parameters in _pope(layer)):
            raise _other_frequencies(position_encoding)
        nested = position_encoding != "pope"
        own = (given.get("pope") or {}) if nested else given
        own, starts, errors = _polar_starts(model, changed, own, scaling, text, exact=exact)
        if exact:
            fields["head_dim"] = starts[0].key.shape[1]
        config = _with_encoding(old, position_encoding, {**given, "pope": own} if nested else own, **fields)
        if any(part not in after for old_layer, after in zip(before, layer_plan(config)) for part in _pope(old_layer)):
            raise _other_frequencies(position_encoding)
        for index, start in starts.items():
            start.write(weights, old, index)
    result = type(model)._from_config(config, dtype=model.dtype)
    shapes = {name: value.shape for name, value in result.state_dict().items()}
    kept = {name: value for name, value in weights.items() if shapes.get(name) == value.shape}
    missing, _ = result.load_state_dict(kept, strict=False, assign=True)
    for index, start in starts.items():
        (pope,) = (one for one in attention_of(result, index).encodings.hooks["after_cache"] if one.name == "pope")
        if pope.delta is not None:
            pope.delta.weight.data.copy_(start.delta)
    result.generation_config = copy.deepcopy(model.generation_config)
    result.config._name_or_path = old._name_or_path
    result.tie_weights()
    return Converted(result, list(missing), sorted(weights.keys() - kept.keys()), errors)


def fit_message(errors: dict[int, float]) -> str:
    """Returns a sentence on the errors of PoPE's fit to RoPE."""
    worst = max(errors, key=errors.__getitem__)
    return (
        f"PoPE's fit to RoPE loses {sum(errors.values()) / len(errors):.2%} of the variance of the scores, at most "
        f"{errors[worst]:.2%} (layer {worst})."
    )


def _polar_starts(
    model: Any,
    layers: list[int],
    given: dict[str, Any],
    scaling: dict[str, Any],
    text: Callable[[], torch.Tensor | None],
    *,
    exact: bool,
) -> tuple[dict[str, Any], dict[int, LayerStart], dict[int, float]]:
    """Returns PoPE's parameters, and the starts and the errors of the fit, for layers that change from RoPE to PoPE.

    given: the parameters that are given. scaling: what `_scaling` returned.
    """
    config = model.config
    pairs, width = rotated_channels(config) // 2, head_dim(config)
    identity = given.get("magnitude", "identity") == "identity"
    rope_config = _with_encoding(config, "rope", {}, **scaling)
    if (rotated := rotated_channels(rope_config)) != 2 * pairs:
        raise ValueError(
            f"rope_parameters={scaling['rope_parameters']!r} is not valid: it rotates {rotated} of {width} channels. "
            f"In place of RoPE, PoPE needs the pairs of the source: it must be {2 * pairs}."
        )
    rope = RotaryTables(rope_config).rotary_emb
    if (kind := rope.rope_type) in ("dynamic", "longrope"):
        logger.warning(
            f"rope_type={kind!r} changes the frequencies with the length of the text. PoPE gets those of short texts."
        )
    # A pair has two polar channels, or three, or one and a plain one.
    each = 3 if exact else 2 if identity else 1
    width += pairs if exact else 0
    length = rope_config.max_position_embeddings
    default = each * pairs if identity or exact else complete_turns(rope.inv_freq, length)
    own = {"partial_rotary_factor": _share(default, width), **given}
    polar = int(width * own["partial_rotary_factor"])
    if polar % each or not each <= polar <= each * pairs or (exact and polar != default):
        allowed = f"{default}" if exact else f"at least {each}, at most {each * pairs}, and a multiple of {each}"
        raise ValueError(
            f"partial_rotary_factor={own['partial_rotary_factor']!r} is not valid: it gives {polar} polar channels of "
            f"{width}. RoPE rotates {pairs} pairs, so it must give {allowed}."
        )
    frequencies = rope.inv_freq[: polar // each].double()
    found = frequencies.repeat_interleave(each).tolist()
    why = "in place of RoPE, PoPE gets its frequencies, which rope_parameters change. Leave it out"
    possible: dict[str, tuple[list[Any], str]] = {
        "theta": ([PoPEParameters.theta], why),
        "frequencies": ([None, found], why),
    }
    if exact:
        possible["magnitude"] = ["identity"], "exact=True needs 'identity'"
        possible["use_delta"] = [True], "exact=True needs True"
    for name, (values, why) in possible.items():
        if given.get(name, values[0]) not in values:
            raise ValueError(f"position_encoding_parameters[{name!r}]={given[name]!r} is not valid: {why}.")
    own |= {"magnitude": given.get("magnitude", "identity"), "frequencies": found}
    # PoPE has no factor of cosines and sines.
    plain = math.sqrt(2 if own.get("scale") == "1/sqrt(2d)" else 1) * math.sqrt(width / head_dim(config))
    factors = plain * rope.attention_scaling**2, plain
    if exact:
        return own, exact_starts(model, layers, factors), {}
    if (tokens := text()) is None:
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(config.vocab_size, (4, min(512, config.max_position_embeddings)), generator=generator)
    use_delta = own.get("use_delta", True)
    if not identity:
        return own, aligned_starts(model, tokens, layers, polar, use_delta=use_delta), {}
    return own, *fitted_starts(model, tokens, layers, frequencies, length, factors=factors, use_delta=use_delta)


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


def _pope(layer: Any) -> list[Any]:
    return [part for part in layer if part[0].name == "pope"]


def _share(polar: int, width: int) -> float:
    """Returns a `partial_rotary_factor` that gives a number of polar channels."""
    share = polar / width
    # The product is rounded down.
    return share if int(width * share) == polar else math.nextafter(share, 1.0)


def _check_exact(config: Any, position_encoding: Any, before: list[Any], changed: list[int]) -> None:
    """Raises ValueError if PoPE with three channels for each pair cannot replace RoPE."""
    problem = ""
    if len(changed) != len(before):
        problem = f"position_encoding={position_encoding!r} does not change all layers from RoPE to PoPE"
    elif any(len(layer) > 1 for layer in before):
        problem = f"layers of the source have more than RoPE, position_encoding={config.position_encoding!r}"
    elif not hasattr(config, "head_dim"):
        problem = "the width of heads cannot be changed in the GPT-2 family"
    elif others := [name for name in ("qk_norm", "output_norm", "output_gate") if getattr(config, name)]:
        problem = f"the source has {others[0]}=True, which would see the additional channels"
    if problem:
        raise ValueError(f"exact=True is not valid: {problem}. Leave it out.")


def _other_frequencies(position_encoding: Any) -> ValueError:
    return ValueError(
        f"position_encoding={position_encoding!r} is not valid: layers of the source have PoPE with other parameters "
        "than PoPE gets in place of its RoPE. Allowed: encodings that do not change its RoPE to PoPE."
    )
