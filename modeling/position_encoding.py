"""The base classes of a position encoding: its hooks, its parameters, and the parts of a model that it fills.

Axes: B batch, H query heads, G key heads (H % G == 0), Q query length, K key length, D head dim, E hidden size.

A model calls the hooks in this order, and never asks which encoding it has:

1. `embedding(config, parameters)`: a module that adds positions to the hidden states (absolute, sinusoidal).
2. `SharedPositionEncoding.forward`: what all layers need once per forward (cosines, a table shared by layers).
3. In every attention layer: `rotate` before the cache, `rotate_cached` after it, then the attention function, which
   asks for `bias` (eager: the readable specification), `block_term` (blockwise: the same, block by block) or
   `kernel_attention` (triton, which also does what `rotate_cached` does).
"""

import dataclasses
import difflib
import types
import typing
from typing import Any, ClassVar

import torch
from torch import nn

# One dictionary per forward pass, the same for all layers:
#   "query_positions"  int64 (1 or B, Q), the position of each query token
#   "key_positions"    int64 (1 or B, K), the position of each key token, cached ones included; present only if an
#                      encoding of the model has `needs_key_positions`
#   "<encoding name>"  whatever the shared part of that encoding returned
PositionContext = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Parameters:
    """Base of an encoding's parameters: a frozen dataclass whose fields are checked when it is built.

    Fields are annotated with `bool`, `int`, `float`, `str`, `Literal[...]` or a union of these with `None`. Ranges and
    cross-field rules go into `validate`, which raises ValueError.
    """

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
    """Returns the end of an error message: the nearest valid name, if any, and the list of allowed names."""
    allowed = sorted(allowed)
    near = difflib.get_close_matches(str(name), allowed, n=1)
    return (f"Did you mean {near[0]!r}? " if near else "") + f"Allowed: {', '.join(map(repr, allowed)) or 'nothing'}."


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
            raise ValueError(f"{field} has the unknown key {key!r}. {suggest(key, fields)}")
        if not matches_type(value, fields[key]):
            raise ValueError(f"{field}[{key!r}]={value!r} is not valid: it must be {describe_type(fields[key])}.")
    return cls(**values)


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
        biases_from_content: True if `bias` depends on the content logits (such an encoding comes first in a sum).
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
    biases_from_content: ClassVar[bool] = False

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

    def reset(self) -> None:
        """Fills parameters and buffers with `transformers.initialization` (loading builds on the meta device)."""

    def rotate(
        self, query: torch.Tensor, key: torch.Tensor, context: PositionContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Changes new queries (B, H, Q, D) and new keys (B, G, Q, D) before the keys go into the cache."""
        return query, key

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
