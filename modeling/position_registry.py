"""The tables of what this copy of the code has: position encodings, and parts that only some models need.

The package has everything. A saved folder has tables of its own, which `saved_code` writes, with what its
configuration needs. The imports are explicit because Transformers copies the files that `from .x import` lines name.
"""

from typing import Any

from .attention_autograd import autograd_attention_forward
from .attention_blockwise import blockwise_attention_forward
from .attention_options import AttentionOptions
from .attention_sdpa import flex_attention_forward, sdpa_attention_forward
from .attention_triton import TritonAttention
from .checkpoint_conversion import older_weights
from .position_absolute import AbsolutePositionEncoding
from .position_alibi import ALiBi
from .position_base import PositionEncoding
from .position_cope import CoPE
from .position_cope_alibi import CoPEALiBi
from .position_cope_mlp import CoPEMLP
from .position_fox import FoX
from .position_none import NoPositionEncoding
from .position_pope import PoPE
from .position_relative import RelativePosition
from .position_rope import RotaryPositionEncoding
from .position_sinusoidal import SinusoidalPositionEncoding
from .position_stick_breaking import StickBreaking
from .position_token_gated_cope import TokenGatedCoPE

COMPLETE = True

POSITION_ENCODINGS: dict[str, type[PositionEncoding]] = {
    cls.name: cls
    for cls in (
        NoPositionEncoding,
        AbsolutePositionEncoding,
        SinusoidalPositionEncoding,
        RelativePosition,
        ALiBi,
        RotaryPositionEncoding,
        CoPE,
        CoPEALiBi,
        CoPEMLP,
        PoPE,
        FoX,
        StickBreaking,
        TokenGatedCoPE,
    )
}

# Attention implementations in PyTorch; all models have "eager".
ATTENTION_FUNCTIONS: dict[str, Any] = {
    "blockwise": blockwise_attention_forward,
    "flex_attention": flex_attention_forward,
    "sdpa": sdpa_attention_forward,
}

PARTS: dict[str, Any] = {
    "autograd": autograd_attention_forward,
    "older_weights": older_weights,
    "options": AttentionOptions,
    "triton": TritonAttention,
}
