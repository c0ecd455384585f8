"""Configuration of the GPT-2-style family."""

from typing import Literal

from .configuration_common import WhatWhereConfig, checked, limited


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
    vocab_size: int = limited("positive", 50257)
    n_positions: int = limited("positive", 1024)
    n_embd: int = limited("positive", 768)
    n_layer: int = limited("positive", 12)
    n_head: int = limited("positive", 12)
    n_inner: int | None = limited("positive", None)
    activation_function: str = limited("activation", "gelu_new")
    resid_pdrop: float | int = limited("probability", 0.1)
    embd_pdrop: float | int = limited("probability", 0.1)
    attn_pdrop: float | int = limited("probability", 0.1)
    layer_norm_epsilon: float = limited("positive", 1e-5)
    scale_attn_weights: bool = True
    bos_token_id: int | None = limited("token", 50256)
    eos_token_id: int | list[int] | None = limited("token", 50256)
    scale_attn_by_inverse_layer_idx: bool = False
    reorder_and_upcast_attn: bool = False
    add_cross_attention: Literal[False] = False
    tie_word_embeddings: bool = True
    norm_type: Literal["layernorm", "rmsnorm"] = "layernorm"
    norm_position: Literal["pre", "post"] = "pre"
