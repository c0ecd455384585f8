"""Configuration of the Llama-style family."""

from typing import Any

from .configuration_common import WhatWhereConfig, checked, limited


@checked
class WhatWhereLlamaConfig(WhatWhereConfig):
    """Configuration of a Llama-style model (RMSNorm, SwiGLU, grouped heads) with a choice of position encoding.

    Fields are those of `transformers.LlamaConfig`, plus `position_encoding` (default `"rope"`) and
    `position_encoding_parameters`. `rope_parameters` is Transformers' own field; only encodings that contain `rope`
    take it.
    """

    model_type = "whatwhere_llama"
    stock_model_type = "llama"
    # What tokenizers know, and models do not read.
    stock_fields_without_effect = ("unk_token_id",)
    base_model_tp_plan = {
        "embed_tokens": "embedding_rowwise",
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }
    base_model_pp_plan = {
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
    }

    position_encoding: str | list[str] = "rope"
    vocab_size: int = limited("positive", 32000)
    hidden_size: int = limited("positive", 4096)
    intermediate_size: int = limited("positive", 11008)
    num_hidden_layers: int = limited("positive", 32)
    num_attention_heads: int = limited("positive", 32)
    hidden_act: str = limited("activation", "silu")
    max_position_embeddings: int = limited("positive", 2048)
    rms_norm_eps: float = limited("positive", 1e-6)
    bos_token_id: int | None = limited("token", 1)
    eos_token_id: int | list[int] | None = limited("token", 2)
    pretraining_tp: int | None = 1
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_dropout: int | float | None = limited("probability", 0.0)
    mlp_bias: bool = False
    head_dim: int | None = limited("positive", None)

    def __post_init__(self, **kwargs: Any) -> None:
        if self.head_dim is None:
            self.validate_architecture()
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.attention_dropout is None:
            self.attention_dropout = 0.0
        super().__post_init__(**kwargs)

    def validate_architecture(self) -> None:
        """Checks the fields against each other; raises ValueError."""
        super().validate_architecture()
        if self.pad_token_id is not None and self.pad_token_id >= self.vocab_size:
            raise ValueError(
                f"pad_token_id={self.pad_token_id!r} is not valid: it must be less than "
                f"vocab_size={self.vocab_size!r}, or None."
            )
