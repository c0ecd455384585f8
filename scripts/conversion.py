"""Gives a pretrained model another position encoding and keeps as much of it as possible; see `commands/convert.py`.

Sources are checkpoints of ours, and stock Llama, Qwen2, Qwen3 and GPT-2. Qwen's weights get the names of the Llama
family: Qwen2 has biases on q, k and v (`attention_bias`), Qwen3 norms of queries and keys (`qk_norm`).

New parameters start as in a new model: CoPE's table at zero, so that `cope+rope` computes what the source computes.
For layers that change from RoPE to PoPE, the channels of queries and keys are reordered. RoPE rotates the channels
(i, i + D/2) of a head by theta^(-2 i / D) per token. PoPE's polar channels 2 i and 2 i + 1 get the frequencies
theta^(-2 i / D) and theta^(-(2 i + 1) / D) if its own base is theta^(R / D), its default here. Pair i becomes these two
channels, for i < R / 2. The other pairs, which turn slowest, become PoPE's plain channels (`partial_rotary_factor`),
whose product does not depend on the distance; so do channels that RoPE does not rotate, and D is then the number of
rotated ones. RoPE's sine terms and, with softplus, the signs are lost until training.

Axes: H query heads, G key heads, D head dim, E hidden size, R polar channels.
"""

import copy
import json
import os
import re
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard
from huggingface_hub.errors import HfHubHTTPError
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import cached_file, logging

from whatwhere import WhatWhereGPT2ForCausalLM, WhatWhereLlamaConfig, WhatWhereLlamaForCausalLM
from whatwhere.configuration.configuration_common import kept_parameters
from whatwhere.position_base import head_dim
from whatwhere.position_plan import layer_plan
from whatwhere.position_rope import check_rope_parameters

from .evaluation.checkpoints import checked_loading

logger = logging.get_logger(__name__)

# The class that reads a family's checkpoints, stock ones and ours.
FAMILIES: dict[str, Any] = {"gpt2": WhatWhereGPT2ForCausalLM, "llama": WhatWhereLlamaForCausalLM}
# The file in a converted folder that lists the parameters that are new.
RECORD = "conversion.json"
# Keys of `rope_parameters`: those that a new scaling does not change; the length before scaling.
_UNSCALED, _ORIGINAL = ("rope_theta", "partial_rotary_factor"), "original_max_position_embeddings"
# Fields of Qwen's configurations that say which layers have a sliding window.
# What quantised weights have beside their integers.
_PARTS = re.compile("scale|SCB|absmax|quant|zero")
_WINDOWS = ("layer_types", "max_window_layers", "sliding_window", "use_sliding_window")


def load_source(source: str, field: str = "checkpoint") -> Any:
    """Loads a folder or a Hub id as a model of ours with its own position encoding, dtype and logits.

    Args:
        field: where the source is from, for errors.
    """
    with checked_loading(source, field):
        config = AutoConfig.from_pretrained(source)
    if (quantization := getattr(config, "quantization_config", None)) is not None:
        raise _quantised(source, field, f"quant_method={quantization.get('quant_method')!r}")
    if config.dtype is not None and config.dtype.itemsize < 2:
        raise _quantised(source, field, f"dtype={config.dtype}")
    if family := FAMILIES.get(config.model_type.removeprefix("whatwhere_")):
        return _load(family, source, field)
    if config.model_type not in ("qwen2", "qwen3"):
        kinds = ", ".join(map(repr, (*FAMILIES, *(f"whatwhere_{name}" for name in FAMILIES), "qwen2", "qwen3")))
        raise ValueError(f"{field}={source!r} is not valid: its model_type is {config.model_type!r}. Allowed: {kinds}.")
    if "sliding_attention" in (config.layer_types or ()):
        raise ValueError(f"{field}={source!r} is not valid: it has layers with a sliding window.")
    stock = _load(AutoModelForCausalLM, source, field)
    fields = {key: value for key, value in config.to_dict().items() if key not in _WINDOWS}
    weights = stock.state_dict()
    fields["model_type"] = "llama"
    if config.model_type == "qwen3":
        fields |= {"qk_norm": True, "qk_norm_eps": config.rms_norm_eps}
    else:
        fields["attention_bias"] = True
        for index in range(config.num_hidden_layers):
            name = f"model.layers.{index}.self_attn.o_proj"
            weights[f"{name}.bias"] = torch.zeros_like(weights[f"{name}.weight"][:, 0])
    for name in [name for name in weights if name.endswith(("q_norm.weight", "k_norm.weight"))]:
        heads = config.num_attention_heads if "q_norm" in name else config.num_key_value_heads
        ours = name.replace(".q_norm.", ".options.query_norm.").replace(".k_norm.", ".options.key_norm.")
        weights[ours] = weights.pop(name).expand(heads, -1).clone()
    model = WhatWhereLlamaForCausalLM._from_config(WhatWhereLlamaConfig.from_dict(fields), dtype=stock.dtype)
    model.load_state_dict(weights)
    model.generation_config = stock.generation_config
    model.config._name_or_path = source
    return model


def _load(cls: Any, source: str, field: str) -> Any:
    with checked_loading(source, field):
        model, report = cls.from_pretrained(source, dtype="auto", output_loading_info=True)
    if report["missing_keys"]:
        missing = ", ".join(sorted(report["missing_keys"]))
        raise ValueError(f"{field}={source!r} is not valid: it is no causal language model, it has no {missing}.")
    # A configuration does not always tell.
    if parts := sorted(name for name in report["unexpected_keys"] if _PARTS.search(name.rpartition(".")[2])):
        raise _quantised(source, field, f"it has {parts[0]!r}")
    return model


def _quantised(source: str, field: str, what: str) -> ValueError:
    return ValueError(
        f"{field}={source!r} is not valid: its weights are quantised ({what}), which conversion and fine-tuning do not "
        "support. Give the checkpoint that they were made from."
    )


def card_metadata(source: str) -> dict[str, Any]:
    """Returns `base_model` and the keys of the licence in a checkpoint's card."""
    local = os.path.isdir(source)
    path = os.path.join(source, "README.md") if local else source
    known: dict[str, Any] = {}
    if not local or os.path.isfile(path):
        try:
            known = ModelCard.load(path, ignore_metadata_errors=True).data.to_dict()
        except (OSError, ValueError, HfHubHTTPError) as error:
            logger.warning(f"The card of {source!r} cannot be read, so its licence is not known: {error}")
    keys = ("base_model", "license", "license_name", "license_link")
    return {key: known[key] for key in keys if isinstance(known.get(key), (str, list))}


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


def fit_tokenizer(tokenizer: Any, model: Any) -> None:
    """Gives a tokenizer that has a shorter length than a model (`model_max_length`) the model's."""
    tokenizer.model_max_length = max(tokenizer.model_max_length, model.config.max_position_embeddings)


def convert_checkpoint(source: str, *encoding: Any) -> tuple[Any, list[str], list[str]]:
    """Loads a folder or a Hub id, and returns the same as `convert`; parameters that are new in the source stay new.

    `encoding` are the arguments of `convert` after the model.
    """
    model, new, dropped = convert(load_source(source), *encoding)
    optional = {f"_raise_exceptions_for_{kind}": False for kind in ("missing_entries", "connection_errors")}
    record: Any = cached_file(source, RECORD, **optional)
    known = json.loads(Path(record).read_text(encoding="utf-8"))["new_parameters"] if record else ()
    new += [name for name, _ in model.named_parameters() if name in known and name not in new]
    return model, new, dropped


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
