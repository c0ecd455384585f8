"""Loads the source of a conversion or a fine-tuning: checkpoints of ours, and stock models.

Stock GPT-2 and Llama are read as they are. Mistral, Phi-3, Qwen2, Qwen3 and SmolLM3 become Llama-style models of ours:
Phi-3's fused projections are split, Qwen2 has biases on q, k and v (`attention_bias`), Qwen3 norms of queries and keys
(`qk_norm`), and SmolLM3 layers without RoPE (a list as `position_encoding`).
"""

import dataclasses
import importlib
import os
import pathlib
import re
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.utils import cached_file, logging

from whatwhere import WhatWhereLlamaConfig, WhatWhereLlamaForCausalLM

from ..evaluation.checkpoints import checked_loading, own_code
from ..families import FAMILIES, model_class
from .record import card_metadata

logger = logging.get_logger(__name__)

# Stock models that become Llama-style models of ours.
CONVERTED = ("mistral", "phi3", "qwen2", "qwen3", "smollm3")
# Ends of the names of causal language models.
_CAUSAL = ("ForCausalLM", "LMHeadModel")
# What quantised weights have beside their integers.
_PARTS = re.compile("scale|SCB|absmax|quant|zero")
# Fields of the configurations of these models that our configuration does not have: those that are read here, ...
_READ = {"layer_types", "no_rope_layers", "sliding_window"}
# ... and those that the stock models do not read themselves.
_WITHOUT_EFFECT = {
    "embd_pdrop",
    "max_window_layers",
    "no_rope_layer_interval",
    # Transformers copies it to `rope_parameters`.
    "original_max_position_embeddings",
    "use_sliding_window",
}


def load_source(source: str, gguf_file: str | None = None) -> Any:
    """Loads a folder or a Hub id as a model of ours with its own position encoding, dtype and logits.

    `gguf_file` is the name of a GGUF file in it, whose weights are dequantised to float32.
    """
    check_gguf(source, gguf_file)
    model = _load_stock(source) if gguf_file is None else _load_gguf(source, gguf_file)
    stated = card_metadata(source) | ({} if os.path.isdir(source) else {"base_model": source})
    model.config.origin = {**(model.config.origin or {}), **stated} or None
    return model


def _load_stock(source: str) -> Any:
    with checked_loading(source):
        scaling = PreTrainedConfig.get_config_dict(source)[0].get("rope_scaling") or {}
        if scaling.get("rope_type", scaling.get("type")) == "su":
            raise ValueError("rope_scaling has the type 'su', an old name: write 'longrope' into its config.json.")
        config = AutoConfig.from_pretrained(source)
    if config.architectures and not any(name.endswith(_CAUSAL) for name in config.architectures):
        raise ValueError(
            f"checkpoint={source!r} is not valid: it is no causal language model (architectures="
            f"{config.architectures!r})."
        )
    if (quantization := getattr(config, "quantization_config", None)) is not None:
        raise _quantised(source, f"quant_method={quantization.get('quant_method')!r}")
    if config.dtype is not None and config.dtype.itemsize < 2:
        raise _quantised(source, f"dtype={config.dtype}")
    if not getattr(config, "is_causal", True):
        raise ValueError(f"checkpoint={source!r} is not valid: is_causal={config.is_causal!r}. Allowed: True.")
    if (own := model_class(config)) is not None:
        if config.model_type.startswith("whatwhere_") and not hasattr(config, "encoding_names"):
            raise own_code(source)
        return _load(own, source, dtype="auto")
    if config.model_type not in CONVERTED:
        kinds = ", ".join(map(repr, (*FAMILIES, *(f"whatwhere_{name}" for name in FAMILIES), *CONVERTED)))
        raise ValueError(
            f"checkpoint={source!r} is not valid: its model_type is {config.model_type!r}. Allowed: {kinds}."
        )
    translated, config._attn_implementation = _translated(source, config), None
    return _converted(source, translated, _load(AutoModelForCausalLM, source, config=config, dtype="auto"))


def check_gguf(source: str, gguf_file: str | None) -> None:
    """Checks how GGUF is read.

    Raises:
        ModuleNotFoundError: `gguf_file` is given, and the package that reads it is not installed.
        ValueError: `source` is a GGUF file; or `gguf_file` is not in it, or is not given for a folder whose only model
            is a GGUF file. The message has what to give.
    """
    folder = pathlib.Path(source)
    if folder.is_file() and folder.suffix.lower() == ".gguf":
        raise ValueError(
            f"checkpoint={source!r} is not valid: it is a file. Give its folder, {str(folder.parent)!r}, to `whatwhere "
            f"convert` with --gguf-file {folder.name}."
        )
    files = sorted(file.name for file in folder.glob("*.[gG][gG][uU][fF]"))
    if gguf_file is not None:
        # Read by Transformers, whose error does not say what to install.
        importlib.import_module("gguf")
        path = pathlib.PurePath(gguf_file)
        outside = path.is_absolute() or ".." in path.parts
        if outside or (folder.is_dir() and not (folder / path).is_file()):
            allowed = "The folder has no GGUF file." if folder.is_dir() else "Allowed: a path inside the repository."
            allowed = f"Allowed: {', '.join(map(repr, files))}." if files else allowed
            raise ValueError(
                f"gguf_file={gguf_file!r} is not valid: it must be the name of a file in {source!r}. {allowed}"
            )
        return
    if files and not (folder / "config.json").is_file():
        options = " or ".join(f"--gguf-file {name}" for name in files)
        raise ValueError(f"checkpoint={source!r} has no config.json. `whatwhere convert` reads GGUF with {options}.")


def _load_gguf(source: str, gguf_file: str) -> Any:
    with checked_loading(source):
        config = AutoConfig.from_pretrained(source, gguf_file=gguf_file)
        # The whole path: Transformers would prefer a file of this name in the working folder.
        path = os.path.abspath(str(cached_file(source, gguf_file)))
        unread = _unread(path, config)
    kinds = ("llama", *CONVERTED)
    if config.model_type not in kinds:
        raise ValueError(
            f"gguf_file={gguf_file!r} is not valid: its model_type is {config.model_type!r}. Allowed: "
            f"{', '.join(map(repr, kinds))}."
        )
    if unread:
        raise ValueError(
            f"gguf_file={gguf_file!r} is not valid: it has {', '.join(unread)}, which Transformers does not read from "
            "GGUF. Give the checkpoint that it was made from."
        )
    translated = _translated(source, config)
    model = _converted(source, translated, _load(AutoModelForCausalLM, source, config=config, gguf_file=path))
    model.config.origin = _gguf_metadata(path)
    return model


def gguf_name(path: str) -> str | None:
    """Returns the name of the model that a GGUF file states, or None."""
    import gguf

    field = gguf.GGUFReader(path).fields.get("general.name")
    return None if field is None else str(field.contents())


def _gguf_metadata(path: str) -> dict[str, Any]:
    """Returns what a GGUF file states of a card's metadata: licence, languages and base model."""
    import gguf

    fields = gguf.GGUFReader(path).fields

    def value(name: str) -> Any:
        return fields[name].contents() if name in fields else None

    address = str(value("general.base_model.0.repo_url") or "").removeprefix("https://huggingface.co/")
    found = {
        "base_model": address if re.fullmatch(r"[\w.-]+/[\w.-]+", address) else None,
        "language": value("general.languages"),
        "license": value("general.license"),
        "license_name": value("general.license.name"),
        "license_link": value("general.license.link"),
    }
    return {key: one for key, one in found.items() if one}


def _unread(path: str, config: Any) -> list[str]:
    """Returns what a GGUF file has that changes the model, and that Transformers ignores."""
    import gguf

    reader = gguf.GGUFReader(path)
    # The architecture comes before their names.
    fields = {name.partition(".")[2]: field for name, field in reader.fields.items()}

    def value(name: str) -> Any:
        return fields[name].contents() if name in fields else None

    changing = {
        "rope.scaling.type": value("rope.scaling.type") not in (None, "none"),
        "attention.sliding_window": 0 < (value("attention.sliding_window") or 0) < config.max_position_embeddings,
        "rope.dimension_count": config.model_type == "phi3"
        and value("rope.dimension_count") not in (None, config.hidden_size // config.num_attention_heads),
    }
    found = [f"{name}={value(name)!r}" for name, changes in changing.items() if changes]
    # Tensors of scaled RoPE (Llama 3, LongRoPE), and biases.
    found += [one.name for one in reader.tensors if one.name.startswith("rope_")]
    return found + [one.name for one in reader.tensors if one.name.endswith(".bias") and config.model_type != "qwen2"]


def _converted(source: str, translated: WhatWhereLlamaConfig, stock: Any) -> Any:
    """Returns the model of ours with the weights of a stock one."""
    model = WhatWhereLlamaForCausalLM._from_config(translated, dtype=stock.dtype)
    model.load_state_dict(_weights(stock))
    model.generation_config = stock.generation_config
    model.config._name_or_path = source
    if translated.position_encoding == "none":
        # For the layers to which a conversion adds RoPE.
        model.config.rope_parameters = stock.config.rope_parameters
    return model


def _translated(source: str, config: Any) -> WhatWhereLlamaConfig:
    """Returns the configuration of the model of ours that computes what a stock one computes; or raises ValueError."""
    fields = {field.name: field for field in dataclasses.fields(config)}
    # A window acts in all layers, if there is no field that says in which.
    window, length = getattr(config, "sliding_window", None), config.max_position_embeddings
    acts = "sliding_attention" in config.layer_types if "layer_types" in fields else window is not None
    if acts and not (window or 0) >= length:
        raise ValueError(
            f"checkpoint={source!r} is not valid: its layers have a sliding window (sliding_window={window!r}), which "
            f"models of ours do not have. Allowed: None, or at least max_position_embeddings={length!r}."
        )
    ours = {field.name for field in dataclasses.fields(WhatWhereLlamaConfig)} | {"rope_parameters"}
    for name in fields.keys() - ours - _READ - _WITHOUT_EFFECT:
        if (value := getattr(config, name)) != (default := fields[name].default):
            raise ValueError(
                f"checkpoint={source!r} is not valid: it has {name}={value!r}, and models of ours have no such field. "
                f"Allowed: {default!r}."
            )
    kept = fields.keys() & ours - {"architectures"}
    values = {name: value for name, value in config.to_dict().items() if name in kept}
    # The models read it also where it is no field of their configuration.
    values |= {"model_type": "llama", "head_dim": getattr(config, "head_dim", None)}
    if config.model_type == "phi3":
        # In Llama `partial_rotary_factor` has no effect without scaling.
        values["model_type"] = WhatWhereLlamaConfig.model_type
    if config.model_type == "qwen2":
        values["attention_bias"] = True
    if config.model_type == "qwen3":
        values |= {"qk_norm": True, "qk_norm_eps": config.rms_norm_eps}
    if config.model_type == "smollm3":
        layers = config.no_rope_layers[: config.num_hidden_layers]
        return WhatWhereLlamaConfig.from_dict(
            values, position_encoding=_pattern(["rope" if rotated else "none" for rotated in layers])
        )
    return WhatWhereLlamaConfig.from_dict(values)


def _pattern(names: list[str]) -> str | list[str]:
    """Returns the shortest value of `position_encoding` for the encodings of all layers."""
    lengths = [length for length in range(1, len(names) + 1) if len(names) % length == 0]
    length = next(length for length in lengths if names[:length] * (len(names) // length) == names)
    return names[0] if length == 1 else names[:length]


def _weights(stock: Any) -> dict[str, torch.Tensor]:
    """Returns the weights of a stock model under the names that they have in the model of ours."""
    config, weights = stock.config, stock.state_dict()
    heads, key_heads = config.num_attention_heads, config.num_key_value_heads
    if config.model_type == "qwen2":
        for index in range(config.num_hidden_layers):
            name = f"model.layers.{index}.self_attn.o_proj"
            weights[f"{name}.bias"] = torch.zeros_like(weights[f"{name}.weight"][:, 0])
    for name in list(weights):
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            ours = name.replace(".q_norm.", ".options.query_norm.").replace(".k_norm.", ".options.key_norm.")
            weights[ours] = weights.pop(name).expand(heads if "q_norm" in name else key_heads, -1).clone()
        elif name.endswith("qkv_proj.weight"):
            fused = weights.pop(name)
            width = fused.shape[0] // (heads + 2 * key_heads)
            parts = fused.split([heads * width, key_heads * width, key_heads * width])
            weights |= {name.replace("qkv_proj", f"{part}_proj"): one for part, one in zip("qkv", parts)}
        elif name.endswith("gate_up_proj.weight"):
            parts = weights.pop(name).chunk(2)
            weights |= {name.replace("gate_up_proj", f"{part}_proj"): one for part, one in zip(("gate", "up"), parts)}
    return weights


def _load(cls: Any, source: str, **options: Any) -> Any:
    with checked_loading(source):
        stated = {} if "gguf_file" in options else PreTrainedConfig.get_config_dict(source)[0]
        for name in ("attn_implementation", "_attn_implementation"):
            if stated.get(name) is not None:
                # One that this machine or a model of ours does not have would be an error.
                logger.warning(f"{source}: {name}={stated[name]!r} of its config.json is not used.")
        model, report = cls.from_pretrained(source, output_loading_info=True, attn_implementation=None, **options)
    if report["missing_keys"]:
        missing = ", ".join(sorted(report["missing_keys"]))
        raise ValueError(f"checkpoint={source!r} is not valid: it is no causal language model, it has no {missing}.")
    # A configuration does not always tell.
    if parts := sorted(name for name in report["unexpected_keys"] if _PARTS.search(name.rpartition(".")[2])):
        raise _quantised(source, f"it has {parts[0]!r}")
    if unused := ", ".join(sorted(report["unexpected_keys"])):
        raise ValueError(f"checkpoint={source!r} is not valid: a causal language model of its kind has no {unused}.")
    return model


def _quantised(source: str, what: str) -> ValueError:
    return ValueError(
        f"checkpoint={source!r} is not valid: its weights are quantised ({what}), which conversion and fine-tuning do "
        "not support. Give the checkpoint that they were made from."
    )
