"""What every position encoding is made of: its hooks, its parameters, and the context of a forward pass.

Axes: B batch, H query heads, G key heads (H % G == 0), Q query length, K key length, D head dim, E hidden size.
"""

import dataclasses
import typing
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from .attention_mask import is_hidden
from .validation import describe_type, matches_type, suggest


@dataclasses.dataclass(frozen=True)
class Parameters:
    """Base of an encoding's parameters: a frozen dataclass with a default for every field.

    Fields are annotated with `bool`, `int`, `float`, `str`, `Literal` of strings, a `list` of one of these, or a union
    of these with `None`.
    """

    # A sentence that the error for an unknown key ends with.
    unknown_key_hint: ClassVar[str] = ""
    # What `max_length` limits: the positions themselves, or the distances between a query and the keys that it sees.
    limits: ClassVar[Literal["positions", "distances"]] = "positions"
    # Whether the encoding's kernel supports these parameters.
    in_kernel = True

    def resolve(self, config: Any) -> "Parameters":
        """Returns a copy in which every default that depends on `config` is filled in; may raise ValueError."""
        return self

    def invalid(self, config: Any) -> Iterator[tuple[str, str]]:
        """Yields the name of each field that is out of range, and what is allowed: "it must be at least 2"."""
        return iter(())

    def max_length(self, config: Any) -> int | None:
        """Returns the longest sequence that the encoding supports, in tokens, or None if there is no limit."""
        return None

    def in_layer(self, layer_idx: int) -> bool:
        """Returns True if the layer with this index has the encoding."""
        return True


def parse_parameters(cls: type[Parameters], values: dict, config: Any, field: str) -> Parameters:
    """Builds the resolved parameters of an encoding from a dictionary, which messages call `field`.

    Raises:
        ValueError: an unknown key, a value of the wrong type or out of range.
    """
    if not isinstance(values, dict):
        raise ValueError(f"{field}={values!r} is not valid: it must be a dictionary.")
    hints = typing.get_type_hints(cls)
    fields = {f.name: hints[f.name] for f in dataclasses.fields(cls)}
    for key, value in values.items():
        if key not in fields:
            raise ValueError(
                f"{field} has the unknown key {key!r}. {suggest(key, fields)} {cls.unknown_key_hint}".rstrip()
            )
        if not matches_type(value, fields[key]):
            raise ValueError(f"{field}[{key!r}]={value!r} is not valid: it must be {describe_type(fields[key])}.")
        numbers = value if isinstance(value, list) else [value]
        if any(isinstance(one, float) and not abs(one) <= torch.finfo(torch.float32).max for one in numbers):
            raise ValueError(f"{field}[{key!r}]={value!r} is not valid: it must be finite in float32.")
    parameters = cls(**values).resolve(config)
    for key, allowed in parameters.invalid(config):
        raise ValueError(f"{field}[{key!r}]={getattr(parameters, key)!r} is not valid: {allowed}.")
    return parameters


@dataclasses.dataclass
class PositionContext:
    """What all layers of a forward pass share, and, in a layer's own copy, what belongs to that layer.

    Attributes:
        query_positions: int64 (1 or B, Q), the position of each query token.
        attention_mask: the mask that the model was given, 2D or 4D, or None.
        past_length: the number of cached tokens before this pass; a tensor for a static cache.
        key_length: K, the number of key slots.
        consecutive: True if positions number the slots, masked ones too; False if they skip what is masked.
        shared: what the shared part of each encoding returned, by the encoding's name.
        head_offset: the first head of this process under tensor parallelism.
        query, key: (B, H, Q, D) and (B, G, Q, D), the new queries and keys before any rotation.
        value: (B, G, K, V), cached ones included.
        new_value: (B, G, Q, V), the values of the new tokens.
        states: what each encoding's `cached_state` returned, (B, G, K, c), cached ones included, by name.
    """

    query_positions: torch.Tensor
    attention_mask: torch.Tensor | None = None
    past_length: int | torch.Tensor = 0
    key_length: int = 0
    consecutive: bool = False
    shared: dict[str, Any] = dataclasses.field(default_factory=dict)
    head_offset: int = 0
    query: Any = None
    key: Any = None
    value: Any = None
    new_value: Any = None
    states: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    # Filled when it is first asked for; the copies of all layers share it.
    _computed: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def key_positions(self) -> torch.Tensor:
        """The position of every key slot, int64 (1 or B, K).

        New tokens have the positions given. Cached ones are counted back from the first new token, over the tokens that
        the mask shows: right for left padding, right padding and packed documents, as long as cached positions were
        consecutive. Masked slots get an arbitrary value.
        """
        return self.once("key_positions", self._compute_key_positions)

    def once(self, name: str, compute: Callable[[], Any]) -> Any:
        """Returns what `compute` returned the first time in this forward pass, for all layers."""
        if name not in self._computed:
            self._computed[name] = compute()
        return self._computed[name]

    def _compute_key_positions(self) -> torch.Tensor:
        positions, length = self.query_positions, self.query_positions.shape[1]
        if isinstance(self.past_length, int) and self.past_length == 0 and self.key_length == length:
            return positions
        offsets = torch.arange(self.key_length, device=positions.device) - self.past_length
        new = positions[:, offsets.clamp(0, length - 1)]
        visible = None if self.consecutive else self.key_mask
        if visible is None:
            cached = positions[:, :1] + offsets
        else:
            past = (visible & (offsets < 0)).long()
            # The number of visible cached tokens from each slot to the last cached one.
            cached = positions[:, :1] - (past.sum(-1, keepdim=True) - past.cumsum(-1) + past)
        return torch.where(offsets < 0, cached, new)

    @property
    def key_mask(self) -> torch.Tensor | None:
        """Which key slots hold a token that is not padding, bool (B, K); None for all; the last row of a 4D mask."""
        mask = self.attention_mask
        if mask is None:
            return None
        if mask.ndim == 2:
            visible = mask != 0
        elif mask.dtype == torch.int32:
            # The key ranges of `attention_mask`.
            visible = mask[:, 0, self.query_positions.shape[1] :, 0] != 0
        else:
            visible = ~is_hidden(mask[:, 0, -1])
        missing = max(0, self.key_length - visible.shape[-1])
        return nn.functional.pad(visible, (0, missing))[:, : self.key_length]

    def to(self, *args: Any, **kwargs: Any) -> "PositionContext":
        """Returns a copy on another device: what accelerate calls when layers are on several."""
        return PositionContext(**tree_map_only(torch.Tensor, lambda one: one.to(*args, **kwargs), vars(self)))


class PositionEncoding(nn.Module):
    """One encoding in one attention layer.

    Parameters and buffers are filled in `reset()` of the module that holds them, with `transformers.initialization`:
    models are built on the meta device when they are loaded, and what `__init__` computes is lost.

    Attributes:
        name: as written in `config.position_encoding`.
        paper: the reference that defines it; cards link an arXiv id in brackets at its end.
        summary: one line for tables.
        parameters_class: its parameters.
        bias_reads: what `bias` reads of the logits that it is given: "content" (their values: only `eager` and
            `blockwise` attention have them), "mask" (only which are masked: `sdpa` too), "nothing" (`flex_attention`
            too).
        block_bias: the bias with a gradient written by hand, a `BlockBias` of `attention_blockwise`, or None.
        deterministic_kernel: False if the gradients of its kernel are not deterministic.
        softmax: False if `attend` always replaces softmax attention.
        code: name and text of a file from outside of this package, which is saved with models, or None.
    """

    name: ClassVar[str]
    paper: ClassVar[str]
    summary: ClassVar[str]
    parameters_class: ClassVar[type[Parameters]] = Parameters
    bias_reads: ClassVar[Literal["content", "mask", "nothing"]] = "content"
    block_bias: Any = None
    deterministic_kernel: ClassVar[bool] = True
    softmax: ClassVar[bool] = True
    code: ClassVar[tuple[str, str] | None] = None

    def __init__(self, config: Any, parameters: Any, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.parameters_ = parameters
        self.layer_idx = layer_idx
        self.head_dim = head_dim(config)

    @classmethod
    def overrides(cls, hook: str) -> bool:
        """Returns True if the class defines the hook with this name; a bias also by its `block_bias`."""
        # A classmethod is a new object each time that it is read from a class.
        defined = any(hook in vars(base) for base in cls.__mro__[: cls.__mro__.index(PositionEncoding)])
        return defined or (hook == "bias" and cls.block_bias is not None)

    def uses(self, hook: str) -> bool:
        """Returns True if the hook does something in this layer; override it where parameters decide."""
        return self.overrides(hook)

    @classmethod
    def embedding(cls, config: Any, parameters: Any) -> nn.Module | None:
        """Returns a module `(hidden (B, Q, E), position_ids (1 or B, Q)) -> hidden`, or None."""
        return None

    @classmethod
    def shared(cls, config: Any, parameters: Any) -> nn.Module | None:
        """Returns a module `(hidden (B, Q, E), context) -> Any` whose result is `context.shared[name]`, or None."""
        return None

    def before_cache(
        self, query: torch.Tensor, key: torch.Tensor, context: PositionContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Changes new queries (B, H, Q, D) and new keys (B, G, Q, D)."""
        return query, key

    def state_width(self) -> int:
        """Returns c, the numbers that `cached_state` has for each key head of a token."""
        return 0

    def cached_state(self, hidden: torch.Tensor, key: torch.Tensor, context: PositionContext) -> torch.Tensor:
        """Returns the state of new tokens that is cached beside their keys: (B, G, Q, c), in the type of the keys.

        It is cached in additional channels of the keys, so that every cache of Transformers can hold it. What needs
        more digits than a half-precision key has is cached as the sum of two numbers.

        Args:
            hidden: (B, Q, E), the input of the attention layer.
            key: (B, G, Q, D), the new keys after `before_cache`. context: the context of this layer.
        """
        raise NotImplementedError(f"{type(self).__name__} has no state")

    @classmethod
    def added_channels(cls, config: Any, parameters: Any) -> int:
        """Returns by how many channels `after_cache` widens queries and keys."""
        return 0

    def after_cache(
        self, query: torch.Tensor, key: torch.Tensor, context: PositionContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Changes queries (B, H, Q, D) and all keys (B, G, K, D), the cached ones included. See `added_channels`."""
        return query, key

    def bias(self, logits: torch.Tensor, query: torch.Tensor, context: PositionContext, scaling: float) -> torch.Tensor:
        """Returns what is added to the logits, float32, broadcastable to (B, H, Q, K).

        Args:
            logits: float32 (B, H, Q, K), scaled content logits q.k * scaling, very negative where masked.
            query: (B, H, Q, D), as given to the attention function.
            context: the context of this layer. scaling: the factor on q.k.
        """
        tensors, settings = self.bias_inputs(context, scaling)
        return self.block_bias.bias(logits, query, tensors, settings)

    def bias_inputs(self, context: PositionContext, scaling: float) -> tuple[tuple[torch.Tensor, ...], tuple]:
        """Returns the tensors and the settings (numbers) of `block_bias`, if there is one."""
        raise NotImplementedError(f"{type(self).__name__} has no block_bias")

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, context: Any, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Computes attention in the encoding's own way; called before `after_cache`.

        Args:
            query: (B, H, Q, D). key: (B, G, K, D), as cached. value: (B, G, K, V).
            mask: see `attention_mask`. context: the context of this layer.
            options: `scaling`, the factor on q.k; `dropout`, the probability of dropping an attention weight, 0 outside
                training; `implementation`, "eager", "blockwise", "sdpa" or "flex_attention".

        Returns:
            The output (B, H, Q, V) and the weights (B, H, Q, K) or None; or None: softmax attention does it.
        """
        return None

    def kernel(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, context: PositionContext, **options: Any
    ) -> torch.Tensor | dict[str, Any]:
        """Runs the encoding's Triton kernel, which also does what `after_cache` does.

        Import the kernel in the method: it is called only where Triton is installed.

        Args:
            query: (B, H, Q, D). key, value: (B, G, K, D), keys as cached. context: the context of this layer.
            options: `key_ranges`, the mask (see `attention_mask`), or None for causal; `scaling`, the factor on q.k;
                `dropout`, the probability of dropping an attention weight, 0 outside training; and what the other
                encodings of a sum returned.

        Returns:
            The output (B, H, Q, D). Or, of an encoding that is a bias only, more arguments: for the kernel of the first
            encoding of a sum, or for `plain_attention` if no encoding of the layer has a kernel of its own.
        """
        raise NotImplementedError(f"{type(self).__name__} has no kernel")


def head_dim(config: Any) -> int:
    """Returns D, the number of channels of a head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
