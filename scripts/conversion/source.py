"""Loads the source of a conversion or a fine-tuning: checkpoints of ours, and stock Llama, Qwen2, Qwen3 and GPT-2.

Qwen's weights get the names of the Llama family: Qwen2 has biases on q, k and v (`attention_bias`), Qwen3 norms of
queries and keys (`qk_norm`).
"""

import re
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from whatwhere import WhatWhereLlamaConfig, WhatWhereLlamaForCausalLM

from ..evaluation.checkpoints import checked_loading
from ..families import FAMILIES, model_class

# What quantised weights have beside their integers.
_PARTS = re.compile("scale|SCB|absmax|quant|zero")
# Fields of Qwen's configurations that say which layers have a sliding window.
_WINDOWS = ("layer_types", "max_window_layers", "sliding_window", "use_sliding_window")


def load_source(source: str) -> Any:
    """Loads a folder or a Hub id as a model of ours with its own position encoding, dtype and logits."""
    with checked_loading(source):
        config = AutoConfig.from_pretrained(source)
    if (quantization := getattr(config, "quantization_config", None)) is not None:
        raise _quantised(source, f"quant_method={quantization.get('quant_method')!r}")
    if config.dtype is not None and config.dtype.itemsize < 2:
        raise _quantised(source, f"dtype={config.dtype}")
    if (own := model_class(config)) is not None:
        return _load(own, source)
    if config.model_type not in ("qwen2", "qwen3"):
        kinds = ", ".join(map(repr, (*FAMILIES, *(f"whatwhere_{name}" for name in FAMILIES), "qwen2", "qwen3")))
        raise ValueError(
            f"checkpoint={source!r} is not valid: its model_type is {config.model_type!r}. Allowed: {kinds}."
        )
    if "sliding_attention" in (config.layer_types or ()):
        raise ValueError(f"checkpoint={source!r} is not valid: it has layers with a sliding window.")
    stock = _load(AutoModelForCausalLM, source)
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


def _load(cls: Any, source: str) -> Any:
    with checked_loading(source):
        model, report = cls.from_pretrained(source, dtype="auto", output_loading_info=True)
    if report["missing_keys"]:
        missing = ", ".join(sorted(report["missing_keys"]))
        raise ValueError(f"checkpoint={source!r} is not valid: it is no causal language model, it has no {missing}.")
    # A configuration does not always tell.
    if parts := sorted(name for name in report["unexpected_keys"] if _PARTS.search(name.rpartition(".")[2])):
        raise _quantised(source, f"it has {parts[0]!r}")
    return model


def _quantised(source: str, what: str) -> ValueError:
    return ValueError(
        f"checkpoint={source!r} is not valid: its weights are quantised ({what}), which conversion and fine-tuning do "
        "not support. Give the checkpoint that they were made from."
    )
