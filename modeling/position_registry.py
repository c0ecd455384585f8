"""The registry of position encodings, the encodings of each layer, and the modules that a model builds from them.

Modules that a saved folder may leave out are imported in this file only.
"""

import dataclasses
from typing import Any

import torch
from torch import nn

from .attention_auto import auto_attention, ranges_path
from .attention_autograd import blockwise_attention_by_autograd
from .attention_blockwise import blockwise_path
from .attention_engine import AttentionFunctions, accepts_engine, batch_dependence
from .attention_mask import is_ranges
from .attention_options import AttentionOptions
from .attention_sdpa import flex_path, sdpa_path
from .attention_triton import check_available, triton_attention_forward
from .checkpoint_conversion import older_weights
from .position_absolute import AbsolutePositionEncoding
from .position_alibi import ALiBi
from .position_base import PositionContext, PositionEncoding, parse_parameters, suggest
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

# Transformers saves the files named in `from .x import` lines, so the list must be explicit. A saved folder has this
# file with its own encodings only; names from the modules above that these do not need are set to None.
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
# False in a saved folder.
COMPLETE = True
HINT = "install the package whatwhere and import it first."
# Supported sums, with their names in this order.
COMBINATIONS = ("cope+rope", "cope+relative", "cope+alibi", "fox+rope", "token_gated_cope+rope")

Part = tuple[type[PositionEncoding], Any]


def list_position_encodings() -> list[str]:
    """Returns every name that `config.position_encoding` takes."""
    sums = [name for name in COMBINATIONS if all(part in POSITION_ENCODINGS for part in name.split("+"))]
    return [*POSITION_ENCODINGS, *sums]


def check_name(name: Any) -> None:
    """Raises ValueError for a name that is not in `list_position_encodings`."""
    if not isinstance(name, str) or name not in list_position_encodings():
        known = list_position_encodings()
        if not COMPLETE:
            own = ", ".join(map(repr, known))
            raise ValueError(f"position_encoding={name!r} is not valid: this checkpoint has the code of {own}; {HINT}")
        meant = next((one for one in known if {*one.split("+")} == {*str(name).split("+")}), name)
        raise ValueError(f"position_encoding={name!r} is not valid. {suggest(meant, known)}")


def _check_pattern(pattern: list, config: Any) -> None:
    layers = config.num_hidden_layers
    if not pattern or layers % len(pattern):
        field = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
        raise ValueError(
            f"position_encoding={pattern!r} is not valid: its length must be at least 1 and divide {field}={layers}."
        )
    for name in pattern:
        check_name(name)
        for part in name.split("+"):
            if POSITION_ENCODINGS[part].overrides("embedding"):
                raise ValueError(
                    f"position_encoding={pattern!r} is not valid: {part!r} acts on the embeddings, not in a layer."
                )


def parse(config: Any) -> dict[str, Part]:
    """Returns the classes that `config.position_encoding` names and their resolved parameters, by name."""
    given, pattern = config.position_encoding_parameters or {}, config.position_encoding
    field = "position_encoding_parameters"
    if isinstance(pattern, list):
        _check_pattern(pattern, config)
    else:
        check_name(pattern)
    names = config.encoding_names
    fields = {name: f"{field}[{name!r}]" for name in names}
    if not is_nested(pattern):
        given, fields = {pattern: given}, {pattern: field}
    for key in given:
        if key not in names:
            raise ValueError(
                f"{field} has the unknown key {key!r}; for position_encoding={pattern!r} it is nested by name. "
                f"{suggest(key, names)}"
            )
    parts = {}
    for name in names:
        cls = POSITION_ENCODINGS[name]
        parts[name] = cls, parse_parameters(cls.parameters_class, given.get(name, {}), config, fields[name])
    return parts


def is_nested(position_encoding: str | list[str]) -> bool:
    """Returns True if the parameters of this `position_encoding` are nested by name."""
    return isinstance(position_encoding, list) or "+" in position_encoding


def check(config: Any) -> dict:
    """Checks `position_encoding` and its parameters; returns these with resolved defaults, or raises ValueError."""
    parts = parse(config)
    planned = {cls for layer in layer_plan(config) for cls, _ in layer}
    for cls, parameters in parts.values():
        if cls not in planned:
            field = "position_encoding_parameters" + (f"[{cls.name!r}]" if is_nested(config.position_encoding) else "")
            raise ValueError(
                f"{field}={dataclasses.asdict(parameters)!r} is not valid: it excludes all layers of "
                f"{config.position_encoding!r}."
            )
        if config.key_value_shift and cls.overrides("before_cache"):
            raise ValueError(
                f"key_value_shift=True is not valid for position_encoding={config.position_encoding!r}: {cls.name!r} "
                "changes keys before they are cached, each by its own position. It must be False."
            )
    if AttentionOptions is None and config.attention_options:
        field = config.attention_options[0]
        raise ValueError(f"{field}={getattr(config, field)!r} is not valid: this checkpoint has no code for it; {HINT}")
    resolved = {name: dataclasses.asdict(parameters) for name, (_, parameters) in parts.items()}
    return resolved if is_nested(config.position_encoding) else next(iter(resolved.values()))


def layer_plan(config: Any) -> list[list[Part]]:
    """Returns the encodings of each layer: the repeated pattern, without encodings that exclude the layer."""
    parts = parse(config)
    return [
        [parts[name] for name in config.layer_encodings(layer) if parts[name][1].in_layer(layer)]
        for layer in range(config.num_hidden_layers)
    ]


def layer_kernel(parts: list[Part]) -> str | None:
    """Returns the first encoding with a kernel that computes a layer; "" for plain attention; None if no kernel can."""
    found = [cls.name for cls, given in parts if cls.overrides("kernel") and given.in_kernel]
    others = [cls for cls, _ in parts if cls.overrides("bias") or cls.overrides("after_cache") or not cls.softmax]
    return None if any(cls.name not in found for cls in others) else next(iter(found), "")


def layer_default(parts: list[Part]) -> str:
    """Returns the implementation in PyTorch that is fast for a layer."""
    return "blockwise" if any(cls.overrides("bias") or not cls.softmax for cls, _ in parts) else "sdpa"


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
                names += ["flash_attention"]
    names += ["blockwise"] if "blockwise" in defaults else []
    return list(dict.fromkeys([*names, "eager"]))


def max_length(config: Any) -> int | None:
    """Returns the longest sequence, in tokens, that the encodings support, or None if there is no limit."""
    limits = [parameters.max_length(config) for _, parameters in parse(config).values()]
    return min((limit for limit in limits if limit is not None), default=None)


def embedding(config: Any) -> nn.Module | None:
    """Returns the module that adds positions to the token embeddings, or None."""
    modules = [cls.embedding(config, parameters) for cls, parameters in parse(config).values()]
    return next((module for module in modules if module is not None), None)


class SharedPositionEncodings(nn.ModuleDict):
    """The parts of the encodings that exist once per model, by name."""

    def __init__(self, config: Any) -> None:
        shared = {name: cls.shared(config, parameters) for name, (cls, parameters) in parse(config).items()}
        super().__init__({name: module for name, module in shared.items() if module is not None})
        self.max_length = max_length(config)

    def forward(self, hidden: torch.Tensor, context: PositionContext) -> PositionContext:
        """Fills `context.shared` for a forward pass over hidden states (B, Q, E); returns the context."""
        for name, module in self.items():
            context.shared[name] = module(hidden, context)
        return context


class PositionEncodings(nn.ModuleDict):
    """The encodings of one attention layer, by name; their hooks, composed."""

    # Blockwise attention for a bias without a term.
    attention_by_autograd = staticmethod(blockwise_attention_by_autograd)

    def __init__(self, config: Any, layer_idx: int) -> None:
        parts = layer_plan(config)[layer_idx]
        super().__init__({cls.name: cls(config, parameters, layer_idx) for cls, parameters in parts})
        self.kernel_name = layer_kernel(parts)
        self.default = layer_default(parts)
        # Default hooks are not called, to keep decoding steps fast.
        modules: list[Any] = [*self.values()]
        self.hooks = {
            hook: [part for part in modules if part.uses(hook)]
            for hook in ("before_cache", "cached_state", "after_cache", "bias", "attend", "kernel")
        }
        self.bias_reads_mask = any(part.bias_reads == "mask" for part in self.hooks["bias"])

    def before_cache(
        self, query: torch.Tensor, key: torch.Tensor, context: PositionContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `PositionEncoding.before_cache`."""
        for part in self.hooks["before_cache"]:
            query, key = part.before_cache(query, key, context)
        return query, key

    def cached_state(
        self, hidden: torch.Tensor, key: torch.Tensor, context: PositionContext
    ) -> dict[str, torch.Tensor]:
        """Returns the state of each encoding that has one, by name. See `PositionEncoding.cached_state`."""
        return {part.name: part.cached_state(hidden, key, context) for part in self.hooks["cached_state"]}

    def after_cache(
        self, query: torch.Tensor, key: torch.Tensor, context: PositionContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `PositionEncoding.after_cache`."""
        for part in self.hooks["after_cache"]:
            query, key = part.after_cache(query, key, context)
        return query, key

    def bias(self, logits: torch.Tensor, query: torch.Tensor, context: PositionContext, scaling: float) -> Any:
        """Returns the sum of all biases; each gets the content logits. See `PositionEncoding.bias`."""
        return sum(part.bias(logits, query, context, scaling) for part in self.hooks["bias"])

    def attend(self, *arguments: Any, **settings: Any) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """See `PositionEncoding.attend`."""
        for part in self.hooks["attend"]:
            found = part.attend(*arguments, **settings)
            if found is not None:
                return found
        return None

    def kernel(self, *arguments: Any, **settings: Any) -> torch.Tensor:
        """See `PositionEncoding.kernel`; plain attention in a layer whose encodings have none."""
        # The first encoding of a sum gets what the others add.
        for part in reversed(self.hooks["kernel"]):
            found = part.kernel(*arguments, **settings)
            if isinstance(found, torch.Tensor):
                return found
            settings |= found
        from .kernel_bias import plain_attention

        return plain_attention(*arguments[:3], **settings)
