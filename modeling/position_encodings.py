"""The one list of position encodings; their check against a configuration; what a model builds from it."""

import dataclasses
from typing import Any

import torch
from torch import nn

from .attention_triton import is_limits, valid_slots
from .position_absolute import AbsolutePositionEncoding
from .position_alibi import ALiBi
from .position_cope import CoPE
from .position_cope_alibi import CoPEALiBi
from .position_cope_mlp import CoPEMLP
from .position_encoding import PositionContext, PositionEncoding, parse_parameters, suggest
from .position_fox import FoX
from .position_none import NoPositionEncoding
from .position_pope import PoPE
from .position_relative import RelativePosition
from .position_rope import RotaryPositionEncoding
from .position_sinusoidal import SinusoidalPositionEncoding
from .position_stick_breaking import StickBreaking
from .position_token_gated_cope import TokenGatedCoPE

# Transformers ships the files that it can read in `from .x import` lines: the list cannot be discovered.
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
# Sums that are defined, tested and documented; written in this order.
COMBINATIONS = ("cope+rope", "cope+relative", "cope+alibi", "fox+rope", "token_gated_cope+rope")


def list_position_encodings() -> list[str]:
    """Returns every value that `config.position_encoding` takes."""
    return [*POSITION_ENCODINGS, *COMBINATIONS]


def classes(config: Any) -> list[type[PositionEncoding]]:
    """Returns the classes that `config.position_encoding` names.

    Raises:
        ValueError: an unknown name, or a combination that is not defined.
    """
    name = config.position_encoding
    if not isinstance(name, str) or name not in list_position_encodings():
        reordered = [one for one in COMBINATIONS if sorted(one.split("+")) == sorted(str(name).split("+"))]
        hint = f"Did you mean {reordered[0]!r}? " if reordered else ""
        raise ValueError(f"position_encoding={name!r} is not valid. {hint or suggest(name, list_position_encodings())}")
    return [POSITION_ENCODINGS[part] for part in name.split("+")]


def parse(config: Any) -> list[tuple[type[PositionEncoding], Any]]:
    """Returns the classes and their resolved parameters.

    Raises:
        ValueError: see `check`.
    """
    parts = classes(config)
    given = config.position_encoding_parameters
    field = "position_encoding_parameters"
    if given is not None and not isinstance(given, dict):
        raise ValueError(f"{field}={given!r} is not valid: it must be a dictionary or None.")
    given = given or {}
    if len(parts) == 1:
        given = {parts[0].name: given}
    else:
        for key in given:
            if key not in [cls.name for cls in parts]:
                raise ValueError(
                    f"{field} has the unknown key {key!r}; for {config.position_encoding!r} it is nested by name. "
                    f"{suggest(key, [cls.name for cls in parts])}"
                )
    parsed = []
    for cls in parts:
        name = field if len(parts) == 1 else f"{field}[{cls.name!r}]"
        parameters = parse_parameters(cls.parameters_class, given.get(cls.name, {}), name).resolve(config)
        parameters.validate(config)
        parsed.append((cls, parameters))
    return parsed


def check(config: Any) -> dict:
    """Checks `position_encoding` and its parameters; returns the parameters with resolved defaults.

    Raises:
        ValueError: an unknown encoding, parameter or combination, a wrong type or range.
    """
    resolved = {cls.name: dataclasses.asdict(parameters) for cls, parameters in parse(config)}
    return next(iter(resolved.values())) if len(resolved) == 1 else resolved


def kernel(config: Any) -> str | None:
    """Returns the name of the encoding whose Triton kernel does the attention, or None."""
    if config.attention_weights != "softmax":
        return None
    parts = classes(config)
    found = [cls for cls in parts if cls.has_kernel]
    # A kernel knows one encoding; what changes queries and keys before the cache goes with it.
    others = [cls for cls in parts if cls.has_bias or cls.rotate_cached is not PositionEncoding.rotate_cached]
    return found[0].name if found and all(cls in found for cls in others) and len(found) == 1 else None


def pytorch_implementation(config: Any) -> str:
    """Returns the attention implementation that is fast without kernels."""
    if config.attention_weights != "softmax":
        return "eager"
    parts = classes(config)
    return next((cls.default_implementation for cls in parts if cls.has_bias), parts[0].default_implementation)


def default_implementation(config: Any) -> str:
    """Returns the attention implementation that a model uses when none is asked for: the fast one."""
    return "auto" if kernel(config) else pytorch_implementation(config)


def supported_implementations(config: Any) -> list[str]:
    """Returns the attention implementations that serve the configuration, the default first."""
    if config.attention_weights != "softmax":
        return ["eager"]
    stock = [set(cls.stock_implementations) for cls in classes(config)]
    shared = [name for name in ("sdpa", "flex_attention", "flash_attention") if all(name in one for one in stock)]
    kernels = ("auto", "triton") if kernel(config) else ()
    default = default_implementation(config)
    return [default, *(name for name in (*kernels, *shared, "blockwise", "eager") if name != default)]


def reach(config: Any) -> int | None:
    """Returns the longest sequence, in tokens, that the encoding can serve, or None if there is no limit."""
    limits = [cls.reach(config, parameters) for cls, parameters in parse(config)]
    return min((limit for limit in limits if limit is not None), default=None)


def embedding(config: Any) -> nn.Module | None:
    """Returns the module that adds positions to the input, or None."""
    modules = [cls.embedding(config, parameters) for cls, parameters in parse(config)]
    return next((module for module in modules if module is not None), None)


class SharedPositionEncodings(nn.ModuleDict):
    """The parts of the encoding that exist once per model, by name."""

    def __init__(self, config: Any) -> None:
        parsed = parse(config)
        super().__init__({cls.name: cls.shared_class(config, p) for cls, p in parsed if cls.shared_class is not None})
        self.needs_key_positions = any(cls.needs_key_positions for cls, _ in parsed)
        self.needs_key_mask = any(cls.needs_key_mask for cls, _ in parsed)
        self.reach = reach(config)

    def forward(
        self,
        hidden: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        past_length: int | torch.Tensor,
        key_length: int,
        *,
        consecutive: bool = False,
    ) -> PositionContext:
        """Computes what all layers share in one forward pass.

        Args:
            hidden: (B, Q, E).
            position_ids: int64 (1 or B, Q).
            attention_mask: (B, K) with 0 for padding, or 4D, or None.
            past_length: the number of cached tokens, before this pass.
            key_length: the number of key slots that the attention will see.
            consecutive: True if positions number the slots, masked ones too; False if they skip what is masked.

        Returns:
            The context that is passed to every layer.
        """
        context: PositionContext = {"query_positions": position_ids}
        if self.needs_key_positions:
            counted = None if consecutive else attention_mask
            context["key_positions"] = key_positions(position_ids, counted, past_length, key_length)
        if self.needs_key_mask:
            query_length = position_ids.shape[1]
            context["key_mask"] = None if attention_mask is None else key_mask(attention_mask, query_length, key_length)
            context["attention_mask"] = attention_mask
        for name, module in self.items():
            context[name] = module(hidden, context)
        return context


def key_positions(
    position_ids: torch.Tensor, attention_mask: torch.Tensor | None, past_length: int | torch.Tensor, key_length: int
) -> torch.Tensor:
    """Returns the position of every key slot: int64 (1 or B, K).

    New tokens have the positions given. Cached ones are counted back from the first new token, over the tokens that the
    mask shows; this is right for left padding, right padding and packed documents, as long as cached positions were
    consecutive. Slots that are masked get an arbitrary value.
    """
    query_length = position_ids.shape[1]
    if isinstance(past_length, int) and past_length == 0 and key_length == query_length:
        return position_ids
    slots = torch.arange(key_length, device=position_ids.device)
    offsets = slots - past_length
    new = position_ids[:, offsets.clamp(0, query_length - 1)]
    if attention_mask is None:
        cached = position_ids[:, :1] + offsets
    else:
        past = (key_mask(attention_mask, query_length, key_length) & (offsets < 0)).long()
        # the number of visible cached tokens from each slot to the last cached one
        ahead = past.sum(-1, keepdim=True) - past.cumsum(-1) + past
        cached = position_ids[:, :1] - ahead
    return torch.where(offsets < 0, cached, new)


def key_mask(attention_mask: torch.Tensor, query_length: int, key_length: int) -> torch.Tensor:
    """Returns which key slots are not padding, of a 2D or 4D mask or limits: bool (B, K). 4D: those of the last row."""
    if is_limits(attention_mask):
        visible = valid_slots(attention_mask, query_length)
    elif attention_mask.ndim == 4:
        visible = attention_mask[:, 0, -1]
        visible = visible if visible.dtype == torch.bool else visible > torch.finfo(visible.dtype).min / 2
    else:
        visible = attention_mask != 0
    return nn.functional.pad(visible, (0, max(0, key_length - visible.shape[-1])))[:, :key_length]


class PositionEncodings(nn.ModuleDict):
    """The parts of the encoding that exist in every attention layer, by name; their hooks, composed."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        here = [(cls, parameters) for cls, parameters in parse(config) if cls.serves_layer(parameters, layer_idx)]
        super().__init__({cls.name: cls(config, parameters, layer_idx) for cls, parameters in here})
        # Hooks that do nothing are not called: a decoding step is short.
        parts: list[PositionEncoding] = list(self.values())  # type: ignore[arg-type]
        self.biases = [part.name for part in parts if part.has_bias]
        self.rotations, self.carriers, self.mixers, self.cached_rotations, self.replacements, self.finishers = (
            [part.name for part in parts if part.defines(hook)]
            for hook in ("rotate", "carry", "mix_cached", "rotate_cached", "attend", "finish")
        )
        self.biases_from_mask = any(part.biases_from_mask for part in parts)
        self.kernel = kernel(config)
        self.pytorch_implementation = pytorch_implementation(config)
        self.attention_weights = config.attention_weights

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(name)

    def rotate(
        self, query: torch.Tensor, key: torch.Tensor, context: PositionContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `PositionEncoding.rotate`."""
        for name in self.rotations:
            query, key = self._modules[name].rotate(query, key, context)  # type: ignore[operator]
        return query, key

    def carry(self, hidden: torch.Tensor, key: torch.Tensor, context: PositionContext) -> dict[str, torch.Tensor]:
        """Returns what every encoding carries, by name. See `PositionEncoding.carry`."""
        return {name: self[name].carry(hidden, key, context) for name in self.carriers}

    def mix_cached(
        self, key: torch.Tensor, value: torch.Tensor, context: PositionContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `PositionEncoding.mix_cached`."""
        for name in self.mixers:
            key, value = self[name].mix_cached(key, value, context)
        return key, value

    def finish(self, output: torch.Tensor, hidden: torch.Tensor, context: PositionContext) -> torch.Tensor:
        """See `PositionEncoding.finish`."""
        for name in self.finishers:
            output = self[name].finish(output, hidden, context)
        return output

    def attend(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `PositionEncoding.attend`; called where `replacements` names an encoding."""
        (name,) = self.replacements
        return self[name].attend(*args, **kwargs)

    def rotate_cached(
        self, query: torch.Tensor, key: torch.Tensor, context: PositionContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `PositionEncoding.rotate_cached`."""
        for name in self.cached_rotations:
            query, key = self._modules[name].rotate_cached(query, key, context)  # type: ignore[operator]
        return query, key

    def bias(self, logits: torch.Tensor, query: torch.Tensor, context: PositionContext, scaling: float) -> torch.Tensor:
        """Returns the sum of all biases; each sees the content logits only. See `PositionEncoding.bias`."""
        first, *others = (self[name].bias(logits, query, context, scaling) for name in self.biases)
        return sum(others, start=first)

    def block_terms(self, context: PositionContext, scaling: float) -> list:
        """Returns the terms of the blockwise path."""
        return [self[name].block_term(context, scaling) for name in self.biases]

    def kernel_attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        context: PositionContext,
        *,
        limits: torch.Tensor | None,
        scaling: float,
    ) -> torch.Tensor:
        """See `PositionEncoding.kernel_attention`; plain attention in a layer that the encoding does not serve."""
        assert self.kernel is not None, "choose_implementation refuses an encoding without a kernel"
        if self.kernel not in self:
            from .kernel_plain import plain_attention

            return plain_attention(query, key, value, limits=limits, scaling=scaling)
        return self[self.kernel].kernel_attention(query, key, value, context, limits=limits, scaling=scaling)
