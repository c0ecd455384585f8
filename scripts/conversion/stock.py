"""Models of ours as models of Transformers itself: folders without code."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard, ModelCardData
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from ...model_card import base_links, licence_text, plain

# By family: the stock classes, and the encoding that they compute.
_STOCK: dict[str, tuple[Any, Any, str]] = {
    "whatwhere_llama": (LlamaConfig, LlamaForCausalLM, "rope"),
    "whatwhere_gpt2": (GPT2Config, GPT2LMHeadModel, "absolute"),
}
# Our fields that the stock models do not have, with the values that they compute.
_FIXED = {
    "attention_weights": "softmax",
    "key_value_shift": False,
    "norm_position": "pre",
    "norm_type": "layernorm",
    "output_gate": False,
    "output_norm": False,
    "qk_norm": False,
}
_CODE = """from transformers import AutoModelForCausalLM, AutoTokenizer

name = "{name}"
model = AutoModelForCausalLM.from_pretrained(name)
tokenizer = AutoTokenizer.from_pretrained(name)"""


def stock_model(model: Any) -> Any:
    """Returns the stock Llama or GPT-2 with the weights of a model of ours, which has the same logits.

    Raises:
        ValueError: stock models do not compute what this one does; the message names the fields.
    """
    config = model.config
    config_class, model_class, encoding = _STOCK[config.model_type]
    if problems := [*_not_stock(config, encoding)]:
        raise ValueError(f"--stock is not valid: stock {config_class.model_type} does not have {', '.join(problems)}.")
    names = {field.name for field in dataclasses.fields(config_class)} & {
        field.name for field in dataclasses.fields(config)
    }
    fields = {name: getattr(config, name) for name in names}
    if encoding == "rope":
        fields["rope_parameters"] = dict(config.rope_parameters)
    result = model_class._from_config(config_class(**fields), dtype=model.dtype)
    weights = model.state_dict()
    expected = result.state_dict()
    assert weights.keys() == expected.keys(), f"other weights: {sorted(weights.keys() ^ expected.keys())}"
    result.load_state_dict(weights, assign=True)
    result.tie_weights()
    result.generation_config = model.generation_config
    _compare(model, result)
    return result


def _not_stock(config: Any, encoding: str) -> Iterator[str]:
    if config.encoding_names != [encoding]:
        yield f"position_encoding={config.position_encoding!r} (allowed: {encoding!r})"
    for name, value in _FIXED.items():
        if (given := getattr(config, name, value)) != value:
            yield f"{name}={given!r}"
    if encoding == "absolute" and config.num_key_value_heads != config.num_attention_heads:
        yield f"num_key_value_heads={config.num_key_value_heads!r} with n_head={config.num_attention_heads!r}"
    factor = (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor", 1.0)
    if factor != 1.0:
        yield f"partial_rotary_factor={factor!r}"


@torch.no_grad()
def _compare(model: Any, stock: Any) -> None:
    """Raises ValueError if the logits of the two models differ by more than rounding in float32."""
    dtype = model.dtype
    length = min(64, model.config.max_position_embeddings)
    ids = torch.randint(model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    first, second = (one.float().eval()(ids.to(one.device)).logits.double() for one in (model, stock))
    for one in (model, stock):
        one.to(dtype)
    difference = (first - second).abs().max().item()
    if not difference <= 1e-4 * first.abs().max().item():
        raise ValueError(f"--stock is not valid: the logits of the stock model differ by {difference:.3g}.")


def write_stock_card(folder: Path, model: Any, origin: dict[str, Any]) -> None:
    """Writes the model card of a stock folder; `origin` is that of the configuration of the model of ours."""
    name = folder.resolve().name
    data = ModelCardData(library_name="transformers", pipeline_tag="text-generation", tags=["whatwhere"], **origin)
    base = f" Its weights were made from {base_links(origin['base_model'])}." if "base_model" in origin else ""
    licence = origin.get("license_name") or origin.get("license")
    stated = f"Weights: {licence_text(licence)}." if licence else "The licence of the weights is not stated."
    text = [
        f"# {plain(name)}",
        f"A stock `{model.config.model_type}` model of Transformers, written by `whatwhere convert --stock`.{base}",
        f"```python\n{_CODE.format(name=name)}\n```",
        f"## Licence\n\n{stated}",
    ]
    ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(text) + "\n").save(folder / "README.md")
