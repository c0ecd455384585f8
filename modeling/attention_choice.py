"""Which attention implementations support a configuration, and the attention function of a layer.

Transformers calls `choose_implementation` when a model is built, and when its implementation is changed. A layer calls
`choose_attention` only after a change.
"""

import functools
from collections.abc import Callable
from typing import Any

from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as TRANSFORMERS_FUNCTIONS

from .attention import attend, auto_attention_forward, eager_attention_forward
from .attention_engine import accepts_engine, engine_attention_forward, is_stock
from .position_plan import Part, layer_plan, max_length
from .position_registry import ATTENTION_FUNCTIONS, PARTS


def layer_kernel(parts: list[Part]) -> str | None:
    """Returns the first encoding with a kernel that computes a layer; "" for plain attention; None if no kernel can."""
    found = [cls.name for cls, given in parts if cls.overrides("kernel") and given.in_kernel]
    others = [cls for cls, _ in parts if cls.overrides("bias") or cls.overrides("after_cache") or not cls.softmax]
    return None if any(cls.name not in found for cls in others) else next(iter(found), "")


def layer_default(parts: list[Part]) -> str:
    """Returns the implementation in PyTorch that is fast for a layer."""
    return "blockwise" if any(cls.overrides("bias") or not cls.softmax for cls, _ in parts) else "sdpa"


def flash_names() -> list[str]:
    """Returns the names of flash attention in the installed version of Transformers."""
    return sorted(name for name in TRANSFORMERS_FUNCTIONS if name.startswith("flash_attention_"))


def supported_implementations(config: Any) -> list[str]:
    """Returns the attention implementations that support the configuration, the default first."""
    if config.attention_weights != "softmax":
        return ["eager"]
    plan = layer_plan(config)
    kernels = {layer_kernel(parts) for parts in plan}
    defaults = {layer_default(parts) for parts in plan}
    classes = {cls for parts in plan for cls, _ in parts}
    # `auto` is for models with a kernel, or with different layers.
    automatic = bool(kernels - {"", None}) or len(defaults) > 1
    names = ["auto"] if automatic else [*defaults]
    names += ["triton"] if kernels - {""} and None not in kernels else []
    reads = {cls.bias_reads for cls in classes if cls.overrides("bias")}
    if all(cls.softmax for cls in classes) and "content" not in reads:
        names += ["sdpa"]
        if "mask" not in reads:
            names += ["flex_attention"]
            if not reads and not any(cls.overrides("after_cache") for cls in classes):
                names += flash_names()
    names += ["blockwise"] if "blockwise" in defaults else []
    return list(dict.fromkeys([*names, "eager"]))


def choose_implementation(config: Any, requested: str | None) -> str:
    """Returns the attention implementation of a model; raises ValueError if `requested` is not supported."""
    supported = supported_implementations(config)
    if requested is None or requested == "auto":
        return supported[0]
    if accepts_engine(config, requested, supported, max_length(config)):
        return requested
    family = requested.removeprefix("paged|")
    flash = "flash_attention_2" in supported
    # A kernel of the Hub has another name.
    accepted = flash if "flash" in family and family != "flash_attention" else family in supported
    # Paged attention cannot change cached keys, and has no bias.
    if not accepted or (requested.startswith("paged|") and not flash):
        raise ValueError(
            # Transformers' wording, which its tests match.
            f'Specified `attn_implementation="{requested}"` is not supported for position_encoding='
            f"{config.position_encoding!r} with these parameters. Allowed: {', '.join(map(repr, supported))}."
        )
    if requested == "triton":
        PARTS["triton"].check_available(config, [name for name in supported if name != "triton"])
    return requested


def choose_attention(layer: Any, name: str, given: Any) -> Callable[..., Any]:
    """Returns the attention function of a layer for the implementation `name`; for its arguments see `attention`.

    `given` is what Transformers' table has under this name. Engines add names to it, and replace functions.
    """
    encodings = layer.encodings
    if name == "triton" and "triton" in PARTS:
        return PARTS["triton"].forward
    implementation = encodings.default if name == "auto" else name
    by_autograd = implementation == "blockwise" and any(part.block_bias is None for part in encodings.hooks["bias"])
    function = {**ATTENTION_FUNCTIONS, "eager": eager_attention_forward}.get(implementation)
    if by_autograd and function is not None:
        function = PARTS["autograd"]
    if getattr(given, "takes_context", False):
        return given
    if not is_stock(given) or function is None:
        return functools.partial(engine_attention_forward, name, TRANSFORMERS_FUNCTIONS.get_interface(name, given))
    if name != "auto":
        return functools.partial(attend, implementation=implementation, function=function)
    kernel = None if encodings.kernel_name is None or "triton" not in PARTS else PARTS["triton"].kernel
    return functools.partial(auto_attention_forward, kernel=kernel, implementation=implementation, function=function)
