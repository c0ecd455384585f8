"""Models: a training step and a decoding step of ours and of the stock Llama, with the same weights."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from whatwhere import WhatWhereLlamaConfig, WhatWhereLlamaForCausalLM
from whatwhere.forward_arguments import CACHE

from .attention import relative_errors
from .measure import Shape

# Encodings by name of the model; all with their default attention, which is the kernel on a GPU, if there is one.
MODELS = {
    "llama-rope": "rope",
    "llama-pope": "pope",
    "llama-cope": "cope",
    "llama-cope-rope": "cope+rope",
    "llama-fox": "fox",
    "llama-none": "none",
}
STOCK = "llama-stock"
# The eager reference needs memory of length x length.
CHECKED_TOKENS = 2048


class Models:
    """The stock model for a shape, and ours with its weights."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        width = shape.heads * shape.head_dim
        self.fields: dict[str, Any] = {
            "vocab_size": 1024,
            "hidden_size": width,
            "intermediate_size": 3 * width,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.heads,
            "max_position_embeddings": shape.length + 1,
        }
        torch.manual_seed(0)
        stock = LlamaForCausalLM._from_config(LlamaConfig(**self.fields), attn_implementation="sdpa")
        self.stock = stock.to(device, dtype)

    def tokens(self) -> torch.Tensor:
        return torch.randint(self.fields["vocab_size"], (self.shape.batch, self.shape.length), device=self.device)

    def model(self, name: str) -> Any:
        """Returns a model with the stock model's weights."""
        if name == STOCK:
            return self.stock
        config = WhatWhereLlamaConfig(**self.fields, position_encoding=MODELS[name])
        model = WhatWhereLlamaForCausalLM._from_config(config).to(self.device, self.dtype)
        model.load_state_dict(self.stock.state_dict(), strict=False)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if "encodings." in key:
                    # The initial table of zeros would hide errors.
                    parameter.uniform_(-1.0, 0.0)
        return model

    def check(self, name: str, model: Any, tokens: torch.Tensor) -> float:
        """Compares logits, also of a cached step, with the stock model or eager attention; see `relative_errors`."""
        tokens = tokens[:1, :CHECKED_TOKENS]
        implementation = model.config._attn_implementation
        with torch.no_grad():
            found = model.eval()(tokens).logits
            cache = DynamicCache(config=model.config)
            model(tokens[:, :-1], **{CACHE: cache})
            step = model(tokens[:, -1:], **{CACHE: cache}).logits
            if name == "llama-rope":
                expected = self.stock.eval()(tokens).logits
            else:
                model.set_attn_implementation("eager")
                expected = model(tokens).logits
                model.set_attn_implementation(implementation)
        tolerance = 1e-4 if found.dtype in (torch.float32, torch.float64) else 5e-2
        ours, theirs = [found.float(), step.float()], [expected.float(), expected[:, -1:].float()]
        names = ["logits", "cached logits"]
        return relative_errors(ours, theirs, theirs, names, factor=0.0, tolerance=tolerance)


def model_runs(model: Any, tokens: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """Returns the training step and the decoding step of a model."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(tokens, **{CACHE: cache})

    def train() -> None:
        model.train()
        model(tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def decode() -> None:
        model.eval()
        with torch.no_grad():
            model(tokens[:, -1:], **{CACHE: cache})
        cache.crop(-1)

    return {"training step": train, "decoding step": decode}
