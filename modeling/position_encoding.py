"""The base classes of a position encoding: its hooks, its parameters, and the parts of a model that it fills.

Axes: B batch, H query heads, G key heads (H % G == 0), Q query length, K key length, D head dim, E hidden size.

A model calls the hooks in this order, and never asks which encoding it has:

1. `embedding(config, parameters)`: a module that adds positions to the hidden states (absolute, sinusoidal).
2. `SharedPositionEncoding.forward`: what all layers need once per forward (cosines, a table shared by layers).
3. In every attention layer that the encoding serves (`serves_layer`): `rotate` and `carry` before the cache,
   `mix_cached` and `rotate_cached` after it, then the attention function, which asks for `bias` (eager: the readable
   specification), `block_term` (blockwise: the same, block by block) or `kernel_attention` (triton, which also does
   what `rotate_cached` does); an encoding that replaces softmax attention does it in `attend`. Last, `finish` changes
   the output of the heads.
"""

import dataclasses
import difflib
import math
import types
import typing
from typing import Any, ClassVar

import torch
from torch import nn

# One dictionary per forward pass, the same for all layers:
#   "query_positions"  int64 (1 or B, Q), the position of each query token
#   "key_positions"    int64 (1 or B, K), the position of each key token, cached ones included; present only if an
#                      encoding of the model has `needs_key_positions`
#   "key_mask"         bool (B, K), which key slots hold a token that is not padding, or None for all; present only if
#                      an encoding of the model has `needs_key_mask`
#   "attention_mask"   what "key_mask" was made from, 2D or 4D, or None; present with it
#   "<encoding name>"  whatever the shared part of that encoding returned
#   "<encoding name>, query"  (B, H, Q, D), what an encoding keeps of a layer's query before another one rotates it
# What a layer adds for its own attention function, to a copy:
#   "carried"          a dictionary: "<encoding name>" to what its `carry` returned, (B, G, K, c), cached ones included
#   "value"            (B, G, K, D), cached ones included
#   "new_value"        (B, G, Q, D), the values of the new tokens
PositionContext = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Parameters:
    """Base of an encoding's parameters: a frozen dataclass whose fields are checked when it is built.

    Fields are annotated with `bool`, `int`, `float`, `str`, `Literal[...]` or a union of these with `None`. Ranges and
    cross-field rules go into `validate`, which raises ValueError.
    """

    # A sentence that the error for an unknown key ends with.
    unknown_key_hint: ClassVar[str] = ""

    def validate(self, config: Any) -> None:
        """Checks ranges against `config`; raises ValueError that names the field, the value and what is allowed."""

    def resolve(self, config: Any) -> "Parameters":
        """Returns a copy in which every default that depends on `config` is filled in."""
        return self


def matches_type(value: Any, annotation: Any) -> bool:
    """Returns True if `value` is of the annotated type: `bool`, `int`, `float`, `str`, `Literal`, or a union."""
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return any(matches_type(value, argument) for argument in typing.get_args(annotation))
    if origin is typing.Literal:
        return any(value == choice and type(value) is type(choice) for choice in typing.get_args(annotation))
    if annotation is type(None):
        return value is None
    if annotation is bool:
        return isinstance(value, bool)
    if annotation is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, annotation)


def describe_type(annotation: Any) -> str:
    """Returns the words in which an error message says what is allowed."""
    if typing.get_origin(annotation) is typing.Literal:
        return "one of " + ", ".join(repr(choice) for choice in typing.get_args(annotation))
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return " or ".join(describe_type(argument) for argument in typing.get_args(annotation))
    return "None" if annotation is type(None) else f"of type {annotation.__name__}"


def suggest(name: str, allowed: typing.Iterable[str]) -> str:
    """Returns the end of an error message: the nearest valid name in any case, if any, and the allowed names."""
    allowed = sorted(allowed)
    near = difflib.get_close_matches(str(name).lower(), [one.lower() for one in allowed], n=1)
    found = [one for one in allowed if near and one.lower() == near[0]]
    return (f"Did you mean {found[0]!r}? " if found else "") + f"Allowed: {', '.join(map(repr, allowed)) or 'nothing'}."


def parse_parameters(cls: type[Parameters], values: dict, field: str) -> Parameters:
    """Builds `cls` from a dictionary; raises ValueError for unknown keys and wrong types.

    `field` is the name of the dictionary in error messages, for example `position_encoding_parameters['cope']`.
    """
    if not isinstance(values, dict):
        raise ValueError(f"{field}={values!r} is not valid: it must be a dictionary or None.")
    hints = typing.get_type_hints(cls)
    fields = {f.name: hints[f.name] for f in dataclasses.fields(cls)}
    for key, value in values.items():
        if key not in fields:
            hint = f" {cls.unknown_key_hint}" if cls.unknown_key_hint else ""
            raise ValueError(f"{field} has the unknown key {key!r}. {suggest(key, fields)}{hint}")
        if not matches_type(value, fields[key]):
            raise ValueError(f"{field}[{key!r}]={value!r} is not valid: it must be {describe_type(fields[key])}.")
        if isinstance(value, float) and math.isfinite(value) and abs(value) > torch.finfo(torch.float32).max:
            raise ValueError(f"{field}[{key!r}]={value!r} is not valid: it must be finite in float32.")
    return cls(**values)


def split_digits(states: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Writes float32 numbers (..., c) as two numbers of `dtype` each, (..., 2 c): the nearest, and what is left.

    In bfloat16 the sum has 16 binary digits instead of 8. `join_digits` gives it back.
    """
    high = states.to(dtype)
    return torch.cat((high, (states - high.to(states.dtype)).to(dtype)), dim=-1)


def join_digits(states: torch.Tensor) -> torch.Tensor:
    """Returns what `split_digits` split, (..., 2 c) to (..., c): float64 for float64, float32 for the rest."""
    high, low = states.to(torch.promote_types(states.dtype, torch.float32)).chunk(2, dim=-1)
    return high + low


@dataclasses.dataclass
class BlockTerm:
    """One encoding's contribution to the attention logits in the blockwise path.

    Attributes:
        name: the key of the term in `attention_blockwise.TERMS`.
        tensors: the tensors it needs (tables, slopes, positions); gradients are returned for those that require them.
        parameters: its settings, all of them hashable.
    """

    name: str
    tensors: tuple[torch.Tensor, ...]
    parameters: dict[str, bool | int | float | str]


class SharedPositionEncoding(nn.Module):
    """The part of an encoding that exists once per model; runs once per forward pass."""

    def __init__(self, config: Any, parameters: Any) -> None:
        super().__init__()
        self.config = config
        self.parameters_ = parameters

    def reset(self) -> None:
        """Fills parameters and buffers with `transformers.initialization` (loading builds on the meta device)."""

    def forward(self, hidden: torch.Tensor, context: PositionContext) -> Any:
        """Returns what the layers of this encoding find under its name in the context."""
        raise NotImplementedError(f"{type(self).__name__} defines no forward")


class PositionEncoding(nn.Module):
    """One encoding in one attention layer.

    Attributes of the class:
        name: as written in `config.position_encoding`.
        paper: the reference that defines it.
        parameters_class: its parameters.
        shared_class: its part that exists once per model, or None.
        stock_implementations: Transformers' own attention implementations that can serve it. `eager` and `blockwise`
            serve every encoding.
        default_implementation: the fast one in PyTorch, which a model uses when none is asked for; with a kernel, under
            the name "auto", where the kernel does not run.
        has_kernel: True if it has a Triton kernel (`kernel_attention`).
        has_bias: True if it adds to the attention logits (`bias` and `block_term`).
        needs_key_positions: True if it needs the position of every cached key.
        needs_key_mask: True if it needs to know which key slots are padding.
        biases_from_content: True if `bias` depends on the content logits (such an encoding comes first in a sum).
        biases_from_mask: True if `bias` reads from the logits only which of them are masked.
    """

    name: ClassVar[str]
    paper: ClassVar[str]
    summary: ClassVar[str]
    parameters_class: ClassVar[type[Parameters]] = Parameters
    shared_class: ClassVar[type[SharedPositionEncoding] | None] = None
    stock_implementations: ClassVar[tuple[str, ...]] = ("sdpa", "flex_attention")
    default_implementation: ClassVar[str] = "sdpa"
    has_kernel: ClassVar[bool] = False
    has_bias: ClassVar[bool] = False
    needs_key_positions: ClassVar[bool] = False
    needs_key_mask: ClassVar[bool] = False
    biases_from_content: ClassVar[bool] = False
    biases_from_mask: ClassVar[bool] = False

    def __init__(self, config: Any, parameters: Any, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.parameters_ = parameters
        self.layer_idx = layer_idx
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads

    @classmethod
    def embedding(cls, config: Any, parameters: Any) -> nn.Module | None:
        """Returns a module `(hidden (B, Q, E), position_ids) -> hidden` that adds positions to the input, or None."""
        return None

    @classmethod
    def reach(cls, config: Any, parameters: Any) -> int | None:
        """Returns the longest sequence, in tokens, that the encoding can serve, or None if there is no limit."""
        return None

    @classmethod
    def unlimited(cls) -> bool:
        """Returns True if the encoding serves every length, whatever its parameters."""
        return cls.reach.__func__ is PositionEncoding.reach.__func__  # type: ignore[attr-defined]

    def defines(self, hook: str) -> bool:
        """Returns True if the hook with this name does something here; a class whose parameters decide overrides it."""
        return getattr(type(self), hook) is not getattr(PositionEncoding, hook)

    @classmethod
    def serves_layer(cls, parameters: Any, layer_idx: int) -> bool:
        """Returns True if the layer with this index has the encoding."""
        return True

    def reset(self) -> None:
        """Fills parameters and buffers with `transformers.initialization` (loading builds on the meta device)."""

    def rotate(
        self, query: torch.Tensor, key: torch.Tensor, context: PositionContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Changes new queries (B, H, Q, D) and new keys (B, G, Q, D) before the keys go into the cache."""
        return query, key

    def carry(self, hidden: torch.Tensor, key: torch.Tensor, context: PositionContext) -> torch.Tensor:
        """Returns the state of new tokens that is cached beside their keys: (B, G, Q, c), in the type of the keys.

        It is cached in additional channels of the keys, so that every cache of Transformers can hold it. What needs
        more digits than a half-precision key has, is carried as the sum of two numbers: see `split_digits`.

        Args:
            hidden: (B, Q, E), the input of the attention layer.
            key: (B, G, Q, D), the new keys after `rotate`.
            context: the positions of this forward pass; "head_offset" is the first local head under tensor parallelism.
        """
        raise NotImplementedError(f"{type(self).__name__} carries nothing")

    def mix_cached(
        self, key: torch.Tensor, value: torch.Tensor, context: PositionContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Changes all keys and values, (B, G, K, D) each, the cached ones included, before `rotate_cached`."""
        return key, value

    def rotate_cached(
        self, query: torch.Tensor, key: torch.Tensor, context: PositionContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Changes queries (B, H, Q, D) and all keys (B, G, K, D), the cached ones included. The width may change."""
        return query, key

    def bias(self, logits: torch.Tensor, query: torch.Tensor, context: PositionContext, scaling: float) -> torch.Tensor:
        """Returns what is added to the logits, float32, broadcastable to (B, H, Q, K). The readable specification.

        Args:
            logits: float32 (B, H, Q, K), scaled content logits q.k * scaling, masked (very negative where masked).
            query: (B, H, Q, D), as given to the attention function.
            context: the positions of this forward pass.
            scaling: the factor on q.k.
        """
        raise NotImplementedError(f"{type(self).__name__} has no bias")

    def block_term(self, context: PositionContext, scaling: float) -> BlockTerm:
        """Returns the same contribution for the blockwise path."""
        raise NotImplementedError(f"{type(self).__name__} has no block term")

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        context: PositionContext,
        *,
        scaling: float,
        dropout: float,
        blockwise: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Replaces softmax attention; returns the output (B, H, Q, V) and the weights (B, H, Q, K) or None.

        Args:
            query: (B, H, Q, D). key: (B, G, K, D). value: (B, G, K, V).
            mask: as the implementation has it: "eager" an additive or boolean one (B, 1 or H, Q, K), or None for
                causal; "blockwise" see `blockwise_attention`.
            context: the positions of this forward pass.
            scaling: the factor on q.k.
            dropout: the probability of dropping an attention weight.
            blockwise: False: the readable specification, with weights. True: memory proportional to the length.
        """
        raise NotImplementedError(f"{type(self).__name__} uses softmax attention")

    def finish(self, output: torch.Tensor, hidden: torch.Tensor, context: PositionContext) -> torch.Tensor:
        """Changes the output of the heads, (B, Q, H, V), before its projection; the rest as in `carry`."""
        return output

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
        """Returns the attention output (B, H, Q, D) of the Triton kernel; imports the kernel, called where Triton is.

        Args:
            query: (B, H, Q, D). key, value: (B, G, K, D); keys as they are in the cache, before `rotate_cached`.
            context: the positions of this forward pass.
            limits: the mask, see `attention_triton`, or None for causal.
            scaling: the factor on q.k.
        """
        raise NotImplementedError(f"{type(self).__name__} has no kernel")
