"""Configuration of the GPT-2-style family."""

from typing import Any, Literal

from .configuration_common import WhatWhereConfig, checked


@checked
class WhatWhereGPT2Config(WhatWhereConfig):
    """Configuration of a GPT-2-style model with a choice of position encoding.

    Fields are those of `transformers.GPT2Config` (without the summary head's), plus `position_encoding` (default
    `"absolute"`), `position_encoding_parameters` and:

    Args:
        norm_type: `"layernorm"` (GPT-2) or `"rmsnorm"` (the models of the PoPE paper, Table 6).
        norm_position: `"pre"` (GPT-2), or `"post"`: norms after the residual sums and none at the end, as in Vaswani
            et al. 2017 (the released code of CoPE's counting task).
        num_key_value_heads: number of key/value heads; None for as many as query heads.

    Raises:
        ValueError: see `WhatWhereConfig`; also head counts that do not divide each other.
    """

    model_type = "whatwhere_gpt2"
    stock_model_type = "gpt2"
    stock_fields_without_effect = (
        "gradient_checkpointing",
        "n_ctx",
        "summary_activation",
        "summary_first_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
        "task_specific_params",
    )
    keys_to_ignore_at_inference = ["past_key_values"]
    attribute_map = {
        "hidden_size": "n_embd",
        # The name that most models use.
        "layer_norm_eps": "layer_norm_epsilon",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    }
    base_model_fsdp_plan = {"h.*": "free_full_weight", "ln_f": "keep_full_weight"}
    base_model_pp_plan = {
        "wte": (["input_ids"], ["inputs_embeds"]),
        "h": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "ln_f": (["hidden_states"], ["hidden_states"]),
    }

    position_encoding: str | list[str] = "absolute"
    vocab_size: int = 50257
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    n_inner: int | None = None
    activation_function: str = "gelu_new"
    resid_pdrop: float | int = 0.1
    embd_pdrop: float | int = 0.1
    attn_pdrop: float | int = 0.1
    layer_norm_epsilon: float = 1e-5
    initializer_range: float = 0.02
    scale_attn_weights: bool = True
    use_cache: bool = True
    bos_token_id: int | None = 50256
    eos_token_id: int | list[int] | None = 50256
    pad_token_id: int | None = None
    scale_attn_by_inverse_layer_idx: bool = False
    reorder_and_upcast_attn: bool = False
    add_cross_attention: bool = False
    tie_word_embeddings: bool = True
    norm_type: Literal["layernorm", "rmsnorm"] = "layernorm"
    norm_position: Literal["pre", "post"] = "pre"
    num_key_value_heads: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        # The base class reads other names of fields too late for what depends on these fields.
        for alias in self.attribute_map.keys() & kwargs.keys():
            setattr(self, alias, kwargs.pop(alias))
        if self.n_head < 1 or self.n_embd % self.n_head != 0:
            raise ValueError(
                f"n_head={self.n_head!r} is not valid: it must be at least 1 and divide n_embd={self.n_embd!r}."
            )
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.n_head
        super().__post_init__(**kwargs)

    def validate_architecture(self) -> None:
        """Checks the fields against each other; raises ValueError."""
        self.check_ranges(
            positive=("vocab_size", "n_positions", "n_embd", "n_layer", "n_inner", "layer_norm_epsilon"),
            probabilities=("resid_pdrop", "embd_pdrop", "attn_pdrop"),
            not_negative=("initializer_range",),
            activations=("activation_function",),
        )
        groups = self.n_head if self.num_key_value_heads is None else self.num_key_value_heads
        if groups < 1 or self.n_head % groups != 0:
            raise ValueError(
                f"num_key_value_heads={groups!r} is not valid: it must be at least 1, and divide {self.n_head}."
            )
        if self.add_cross_attention:
            raise ValueError("add_cross_attention=True is not supported: the models are decoders only. Allowed: False.")
