"""Configuration of the Llama-style family."""

from typing import Any

from .configuration_common import WhatWhereConfig, checked


@checked
class WhatWhereLlamaConfig(WhatWhereConfig):
    """Configuration of a Llama-style model (RMSNorm, SwiGLU, grouped heads) with a choice of position encoding.

    Fields are those of `transformers.LlamaConfig`, plus `position_encoding` (default `"rope"`) and
    `position_encoding_parameters`. `rope_parameters` is Transformers' own field; only encodings that contain `rope`
    take it.

    Raises:
        ValueError: see `WhatWhereConfig`; also head counts that do not divide each other.
    """

    model_type = "whatwhere_llama"
    stock_model_type = "llama"
    keys_to_ignore_at_inference = ["past_key_values"]
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
    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    pretraining_tp: int | None = 1
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_dropout: int | float | None = 0.0
    mlp_bias: bool = False
    head_dim: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.num_attention_heads < 1 or self.hidden_size % self.num_attention_heads != 0:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads!r} is not valid: it must be at least 1 and divide "
                f"hidden_size={self.hidden_size!r}."
            )
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.attention_dropout is None:
            self.attention_dropout = 0.0
        super().__post_init__(**kwargs)

    def validate_architecture(self) -> None:
        """Checks the fields against each other; raises ValueError."""
        self.check_ranges(
            positive=(
                "vocab_size",
                "hidden_size",
                "intermediate_size",
                "num_hidden_layers",
                "max_position_embeddings",
                "rms_norm_eps",
                "head_dim",
            ),
            probabilities=("attention_dropout",),
            not_negative=("initializer_range",),
            activations=("hidden_act",),
        )
        groups = self.num_attention_heads if self.num_key_value_heads is None else self.num_key_value_heads
        if groups < 1 or self.num_attention_heads % groups != 0:
            raise ValueError(
                f"num_key_value_heads={groups!r} is not valid: it must be at least 1 and divide "
                f"num_attention_heads={self.num_attention_heads!r}."
            )
        if self.pad_token_id is not None and self.pad_token_id >= self.vocab_size:
            raise ValueError(
                f"pad_token_id={self.pad_token_id!r} is not valid: it must be less than "
                f"vocab_size={self.vocab_size!r}, or None."
            )
