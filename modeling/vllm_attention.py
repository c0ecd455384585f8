"""Attention over vLLM's pages of keys and values, with every position encoding.

A layer computes queries, keys and states of new tokens, which lie beside each other in one row. Here its keys with
their states, and its values, are written to the pages; then all tokens of each sequence are read, and the attention of
this package is called: once for all sequences with one new token (decoding), padded to the left as `generate` pads
them; once for all prompts that have nothing in the cache, as packed documents; and once for each other sequence (a
further part of a prompt, or one with a cached prefix).

Axes: S sequences, T new tokens of all sequences, H query heads, G key heads, K key length, W width of a key with its
states, V value width.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)

from .attention_choice import choose_attention, supported_implementations
from .attention_mask import dense_mask, key_ranges_mask
from .position_base import PositionContext
from .vllm_plugin import interface

# The names in Transformers' table.
PAGED, NATIVE = "whatwhere_vllm", "whatwhere_vllm_native"


class PagedBackend(AttentionBackend):
    """What vLLM asks before it allocates pages, in which a token has W + V numbers for each key head."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.bfloat16, torch.float16]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type["PagedImpl"]:
        return PagedImpl

    @staticmethod
    def get_builder_cls() -> type["PagedMetadataBuilder"]:
        return PagedMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(1)]


class PagedImpl(AttentionImpl):
    """vLLM makes one for each layer. It is not called: layers call `paged_attention_forward`."""

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int, *args: Any, **options: Any
    ) -> None:
        self.num_heads, self.head_size, self.scale, self.num_kv_heads = num_heads, head_size, scale, num_kv_heads
        self.kv_cache_dtype = "auto"

    def forward(self, *args: Any, **options: Any) -> torch.Tensor:
        raise NotImplementedError("layers call paged_attention_forward")


@dataclasses.dataclass
class Sequences:
    """New tokens that are computed in one call.

    Attributes:
        tokens: int64 (S, Q), where these are among the T new tokens; Q tokens of each sequence.
        past: the number of cached tokens, P; for several sequences of different lengths, that of the longest one.
        slots: int64 (S, P + Q), where all tokens are in the cache: block * block size + offset. None: the new tokens
            are all tokens, and need not be read.
        mask: bool (S, P + Q), False where a shorter sequence is padded to the left; None for none.
        positions: int64 (S, Q), the positions of the new tokens.
        context: what all layers share, made by the first one.
        masks: the mask of each implementation, made by the first layer that has it.
    """

    tokens: torch.Tensor
    past: int
    slots: torch.Tensor | None
    mask: torch.Tensor | None
    positions: torch.Tensor
    context: PositionContext | None = None
    masks: dict[str, torch.Tensor | None] = dataclasses.field(default_factory=dict)

    def shared_context(self, shared_encodings: Any, like: torch.Tensor) -> PositionContext:
        """Returns the context that all layers share; `like` has the type of the hidden states."""
        if self.context is None:
            batch, rows = self.tokens.shape
            context = PositionContext(self.positions, self.mask, self.past, self.past + rows)
            self.context = shared_encodings(like.new_empty(batch, rows, 1), context)
        return self.context


@dataclasses.dataclass
class PagedMetadata:
    """One step of the engine: groups of sequences, the number of new tokens, and where each sequence's begin, and T."""

    groups: list[Sequences]
    num_tokens: int
    query_start_loc: list[int]


class PagedMetadataBuilder(AttentionMetadataBuilder[PagedMetadata]):
    """Groups the sequences of a step."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.block_size = kv_cache_spec.block_size

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PagedMetadata:
        given = common_attn_metadata
        with interface():
            starts = given.query_start_loc_cpu[: given.num_reqs + 1].tolist()
            lengths = given.seq_lens[: given.num_reqs].tolist()
            groups = list(grouped(starts, lengths, given.block_table_tensor, self.block_size))
            return PagedMetadata(groups, given.num_actual_tokens, starts)


def grouped(starts: list[int], lengths: list[int], block_table: torch.Tensor, block_size: int) -> Iterator[Sequences]:
    """Yields groups of sequences.

    Args:
        starts: S + 1 numbers: the first new token of each sequence, and T.
        lengths: S numbers of tokens, the new ones included.
        block_table: integers (S, blocks), the blocks of each sequence.
        block_size: tokens of a block.
    """
    device = block_table.device
    counts = [end - start for start, end in itertools.pairwise(starts)]

    def tensor(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    def slots(rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        # Places before the first token of a sequence are padding: any slot will do.
        places = places.clamp(min=0)
        blocks = block_table[rows[:, None], places // block_size].long()
        return blocks * block_size + places % block_size

    decoding = [i for i, (count, total) in enumerate(zip(counts, lengths)) if count == 1 and total > 1]
    if decoding:
        longest = max(lengths[i] for i in decoding)
        length = tensor([lengths[i] for i in decoding])
        places = torch.arange(longest, device=device) + (length - longest)[:, None]
        mask = None if all(lengths[i] == longest for i in decoding) else places >= 0
        tokens = tensor([starts[i] for i in decoding])[:, None]
        yield Sequences(tokens, longest - 1, slots(tensor(decoding), places), mask, length[:, None] - 1)
    fresh = [i for i, (count, total) in enumerate(zip(counts, lengths)) if count and count == total]
    if fresh:
        tokens = torch.cat([torch.arange(starts[i], starts[i + 1], device=device) for i in fresh])
        positions = torch.cat([torch.arange(counts[i], device=device) for i in fresh])
        yield Sequences(tokens[None], 0, None, None, positions[None])
    for i, (count, total) in enumerate(zip(counts, lengths)):
        if 1 < count < total:
            places = torch.arange(total, device=device)[None]
            tokens = torch.arange(starts[i], starts[i + 1], device=device)[None]
            yield Sequences(tokens, total - count, slots(tensor([i]), places), None, places[:, total - count :])


def paged_attention_forward(
    layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, context: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    """Attention of one layer for a step of vLLM; for the arguments see `attention`.

    The queries (1, H, T, D), keys (1, G, T, D) and values (1, G, T, V) are those of the new tokens.
    """
    states = {"key": key, **context.states}
    widths = [state.shape[-1] for state in (*states.values(), value)]
    new = torch.cat((*states.values(), value), dim=-1)[0].transpose(0, 1)
    metadata, cache = _step(layer, new)
    output = query.new_zeros(query.shape[2], query.shape[1], value.shape[-1])
    for group in metadata.groups:

        def of(tensor: torch.Tensor, group: Sequences = group) -> torch.Tensor:
            # (1, n, T, c) of all new tokens to (S, n, Q, c) of the group.
            return tensor[0, :, group.tokens].transpose(0, 1)

        if cache is None or group.slots is None:
            parts = [of(state) for state in (*states.values(), value)]
        else:
            parts = _read(cache, group.slots, widths)
        keys, *found, values = parts
        context_of_group = dataclasses.replace(
            group.shared_context(layer.shared_encodings[0], query),
            head_offset=context.head_offset,
            query=of(context.query),
            key=of(context.key),
            value=values,
            new_value=of(value),
            states=dict(zip(context.states, found)),
        )
        implementation = layer.paged_implementation
        if implementation not in group.masks:
            group.masks[implementation] = _mask(implementation, group, keys.shape[2])
        hidden = group.masks[implementation]
        attended, _ = layer.paged_attention(layer, of(query), keys, values, hidden, context_of_group, **options)
        output[group.tokens.flatten()] = attended.flatten(0, 1)
    return output[None], None


def native_attention_forward(
    layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, context: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    """Attention by vLLM's own kernels, for layers without a bias; for the arguments see `paged_attention_forward`."""
    for part in layer.encodings.hooks["after_cache"]:
        query, key = part.after_cache(query, key, context)
    width = query.shape[-1]
    padded = F.pad(value, (0, width - value.shape[-1])) if value.shape[-1] < width else value
    rows = [states[0].transpose(0, 1).flatten(1) for states in (query, key, padded)]
    output = layer.attn(*rows).view(1, query.shape[2], query.shape[1], width)
    return output[..., : value.shape[-1]], None


@torch.library.custom_op("whatwhere::stored", mutates_args=())
def _stored(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone()


@_stored.register_fake
def _(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor)


def store_output(module: torch.nn.Module) -> None:
    """Makes compiled code on a CPU store what a module returns.

    Inductor computes, say, a cosine of each position again for every head and layer that reads it.
    """

    def hook(module: Any, inputs: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return tuple(hook(module, inputs, one) for one in output)
        return _stored(output) if output.device.type == "cpu" else output

    module.register_forward_hook(hook)


def choose_paged_attention(layer: Any, shared_encodings: Any) -> None:
    """Sets the attention function that `paged_attention_forward` calls for a layer, and what layers share."""
    # In a list, so that the module is not registered again.
    layer.shared_encodings = [shared_encodings]
    supported = supported_implementations(layer.config)
    layer.paged_implementation = "eager" if supported == ["eager"] else "auto"
    layer.paged_attention = choose_attention(layer, layer.paged_implementation, None)


def _mask(implementation: str, group: Sequences, length: int) -> torch.Tensor | None:
    """Returns an implementation's mask for a group; `length` is the number of keys."""
    batch, rows = group.tokens.shape
    given: dict[str, Any] = {"attention_mask": group.mask, "device": group.tokens.device}
    if group.slots is None:
        # Documents begin where positions begin again.
        document = (group.positions == 0).cumsum(-1)

        def same(b: Any, h: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            return document[b, q] == document[b, k]

        if int(document[0, -1]) > 1:
            given["mask_function"] = same
    key_ranges = key_ranges_mask(batch, rows, length, length - rows, **given)
    if key_ranges is None or implementation != "eager":
        return key_ranges
    return dense_mask(key_ranges, rows)


def _step(layer: Any, new: torch.Tensor) -> tuple[PagedMetadata, torch.Tensor | None]:
    """Writes what new tokens (T, G, W + V) have to the cache; returns the metadata, and the cache.

    The cache is (blocks, block size, G, W + V). Before vLLM has allocated it there is none (None), and all tokens are
    one sequence: a run that measures memory.
    """
    context = get_forward_context()
    found, name = context.attn_metadata, layer.attn.layer_name
    if isinstance(found, list):
        found = found[0]
    if found is None:
        tokens = torch.arange(new.shape[0], device=new.device)[None]
        return PagedMetadata([Sequences(tokens, 0, None, None, tokens)], new.shape[0], [0, new.shape[0]]), None
    metadata = found[name]
    # (blocks, G, block size, W + V)
    cache = layer.attn.kv_cache.transpose(1, 2)
    slots = context.slot_mapping[name][: metadata.num_tokens].long()
    size = cache.shape[1]
    cache[slots // size, slots % size] = new[: metadata.num_tokens].to(cache.dtype)
    return metadata, cache


def _read(cache: torch.Tensor, slots: torch.Tensor, widths: list[int]) -> list[torch.Tensor]:
    """Returns what is at slots (S, K) of a cache (blocks, block size, G, W + V), in parts (S, G, K, width).

    Each part is contiguous: a batched product would copy others.
    """
    heads = cache.shape[2]
    rows = slots[:, None] * heads + torch.arange(heads, device=slots.device)[:, None]
    parts = cache.view(-1, cache.shape[3]).split(widths, dim=-1)
    return [part.index_select(0, rows.flatten()).view(*rows.shape, part.shape[-1]) for part in parts]


for _name, _function in ((PAGED, paged_attention_forward), (NATIVE, native_attention_forward)):
    # They are called with the context of the layer; see `attention_engine`.
    _function.takes_context = True  # type: ignore[attr-defined]
    ALL_ATTENTION_FUNCTIONS.register(_name, _function)
