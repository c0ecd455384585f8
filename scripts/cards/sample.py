"""A sample of a model's own text for its card."""

import pathlib
from collections.abc import Mapping
from typing import Any

import torch
import transformers

from ...model_card import card_head
from ..evaluation.checkpoints import check_vocabulary, checked_loading, choose_device

TOKENS = 40
# For models whose text is not known, such as a conversion of a model of the Hub.
PROMPT = "The history of"


def generation(data: Mapping[str, Any], conversion: Mapping[str, Any]) -> tuple[str, int]:
    """Returns the prompt and the number of new tokens for a card's example, from `Facts`."""
    prompt = data.get("prompt") or conversion.get("prompt") or PROMPT
    return prompt, data["example"]["tokens"] if data.get("example") else TOKENS


def take_sample(folder: pathlib.Path, config: Any, data: Mapping[str, Any], prompt: str, tokens: int) -> dict | None:
    """Returns the content of `sample.json` without a fingerprint: what the code in the card prints.

    It has fewer tokens if the configured length is short. It is None for a prompt that leaves no room for new tokens,
    and for a model that generates no text.
    """
    if card_head(config)[0] != "AutoModelForCausalLM":
        return None
    with checked_loading(str(folder), "folder"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        check_vocabulary(str(folder), tokenizer, config)
        inputs = tokenizer(prompt, return_tensors="pt")
        length = inputs["input_ids"].shape[1]
        tokens = min(tokens, config.max_position_embeddings - length)
        # A special token in the prompt, for which the model may have no embedding.
        if length == 0 or tokens < 1 or inputs["input_ids"].max() >= config.vocab_size:
            return None
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
    device = choose_device()
    model = model.to(device).eval()
    with torch.inference_mode():
        output = model.generate(**inputs.to(device), max_new_tokens=tokens, do_sample=False)[0].cpu()
    text = tokenizer.decode(output[length:] if data.get("example") else output, skip_special_tokens=True)
    return {"prompt": prompt, "tokens": tokens, "text": text}
