"""Softmax attention in blocks of query rows, with biases on the logits: memory O(T * block), plain PyTorch.

Computes `softmax(scaling * q.k + bias) v` for a block of query rows at a time, keeps only the output and the
log-sum-exp of each row, and recomputes the block in the backward pass. The bias of an encoding is a `BlockBias`, with
its gradient written by hand, in the file of the encoding. Other biases go through `attention_autograd`.

Supports: causal attention with rows aligned to the end (query row i has key slot K - Q + i), grouped heads (query
head h uses key head h // (H // G)), padding, packed documents, arbitrary 4D masks, dropout, key width different from
value width, float16, bfloat16, float32, float64, autocast, torch.compile. Does not support: gradients of gradients,
gradients with respect to an additive mask.

Axes: B batch, H query heads, G key heads, Q query length, K key length, D key width, V value width; N = B * G;
C a chunk of N; n = H // G heads that share a key head; R rows of a block; W columns of a block.

Internally the key axis is reversed: column 0 of a block is the newest key visible to any of its rows. Sums "from key j
to the query" are then ordinary cumulative sums, and the oldest keys are at the end of a row.
"""

import dataclasses
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F

from .attention_mask import causal_mask, dense_mask, is_key_ranges
from .kernel_operator import Operator, check_shapes

# Far below every logit, and far from overflow when biases are added. -inf would give NaN in fully masked rows.
HIDDEN_LOGIT = -1e30

# Attention weights below exp(NEGLIGIBLE_LOGIT), 2^-80, are 0 where many are. Next to 1 they are nothing in any type,
# and what is smaller makes `exp` and products up to 200 times slower on a CPU (results below the smallest normal
# number).
NEGLIGIBLE_LOGIT = -55.5

# Query rows of a block, and at most how many logits are in memory at once (unless one head has more). On a CPU few
# enough for a cache, enough for threads; on a GPU enough to fill it: 2^26 are 256 MiB.
BLOCK_ROWS, CHUNK_LOGITS = 64, 1 << 21
GPU_ROWS, GPU_LOGITS = 128, 1 << 26

# Up to this many query rows (decoding), the whole row of logits is computed at once with ordinary operations.
DIRECT_ROWS = 4


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


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of softmax, cumulative sums and positions: float64 for float64, float32 for the rest."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def decides_by_data(device: torch.device) -> bool:
    """Returns True if values of tensors may decide what is computed: on a CPU. On a GPU, reading them would wait."""
    return device.type == "cpu"


def block_rows(device: torch.device) -> int:
    """Returns the query rows of a block."""
    return BLOCK_ROWS if decides_by_data(device) else GPU_ROWS


def chunk_members(device: torch.device, members: int, logits: int) -> int:
    """Returns how many of `members` are computed at once, if a block of each has so many logits."""
    most = CHUNK_LOGITS if decides_by_data(device) else GPU_LOGITS
    return max(1, min(members, most // logits))


@dataclasses.dataclass
class Block:
    """Some query rows of some heads, and the keys that they can see.

    Attributes:
        query: (C, n, R, D), the rows, in the type of the inputs.
        chunk: the members of the chunk, on the axis N.
        batch: int64 (C,), the batch entry of each member of the chunk.
        group: int64 (C,), its key head.
        rows: the rows, on the query axis.
        columns: the keys, on the reversed key axis: column w is key slot K - 1 - columns.start - w.
        causal_only: True if row r sees column w exactly if w >= R - 1 - r.
        visible: bool, broadcastable to (C, n, R, W), or None if `causal_only` or if the mask is additive.
        additive: broadcastable to (C, n, R, W), or None.
    """

    query: torch.Tensor
    chunk: slice
    batch: torch.Tensor
    group: torch.Tensor
    rows: slice
    columns: slice
    causal_only: bool
    visible: torch.Tensor | None
    additive: torch.Tensor | None


# Subclasses of `BlockBias`, by name: an operator takes no classes.
BLOCK_BIASES: dict[str, type["BlockBias"]] = {}


class BlockBias:
    """A bias with its gradient. One instance is used for one forward or one backward pass.

    Attributes of the class:
        name: unique.
        reads_content: True if `add` reads the content logits. Such a bias comes first, because the logits are changed
            in place.
        fades: True if it makes the logits of most keys so low that their weights are negligible.
        softmax: False if weights are exp(logits), not normalised; the bias is then the only one, and has `logits`.
        differentiable: for each tensor of the bias, whether it gets a gradient; optional tensors come last.
    """

    name: ClassVar[str] = ""
    reads_content: ClassVar[bool] = False
    fades: ClassVar[bool] = False
    softmax: ClassVar[bool] = True
    differentiable: ClassVar[tuple[bool, ...]] = ()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        BLOCK_BIASES[cls.name] = cls

    @staticmethod
    def bias(content: torch.Tensor, query: torch.Tensor, tensors: Sequence, settings: Sequence) -> torch.Tensor:
        """Returns the whole contribution, broadcastable to (B, H, Q, K): the differentiable specification.

        Args:
            content: (B, H, Q, K) scaled content logits in the compute type, very negative where masked.
            query: (B, H, Q, D).
            tensors: those of `BiasInputs`.
            settings: its settings.
        """
        raise NotImplementedError

    def __init__(self, tensors: Sequence[torch.Tensor], settings: Sequence[float], attention: "_Attention") -> None:
        self.tensors = tensors
        self.settings = settings
        # No reference to the attention: a cycle would keep gigabytes of buffers until the next garbage collection.
        self.attention = weakref.proxy(attention)
        # What `backward` needs of the last block.
        self.state: tuple[torch.Tensor, ...] = ()
        self.prepare()

    def prepare(self) -> None:
        """Makes what all blocks need, from `tensors`, `settings` and `attention`."""

    def add(self, logits: torch.Tensor, block: Block, *, keep: bool) -> None:
        """Adds the contribution to `logits` (C, n, R, W) in place; keeps what `backward` needs if `keep`."""
        raise NotImplementedError

    def logits(self, block: Block, *, keep: bool) -> tuple[Block, torch.Tensor, torch.Tensor]:
        """Returns the block up to where weights are negligible, its logits, and a number of each row (C, n, R)."""
        raise NotImplementedError

    def backward(self, grad: torch.Tensor, block: Block) -> torch.Tensor | None:
        """Takes the gradient of the logits of the last `add`, adds the bias's own gradients to its accumulators.

        Adds to `grad` (C, n, R, W), in place, the gradient of the content logits through the bias. Every row of `grad`
        sums to 0, as gradients of a softmax do. Returns the gradient of the query rows (C, n, R, D), or None.
        """
        raise NotImplementedError

    def gradients(self) -> list[torch.Tensor]:
        """Returns the gradients of the differentiable tensors, summed over all blocks."""
        return []


class BiasInputs(NamedTuple):
    """The bias of one encoding in one call.

    Attributes:
        kind: the class that computes it.
        tensors: the tensors it needs (tables, slopes, positions); gradients are returned for those that require them.
        settings: numbers.
    """

    kind: type[BlockBias]
    tensors: tuple[torch.Tensor, ...]
    settings: tuple[float, ...] = ()


def _unpack(
    names: str, counts: Sequence[int], tensors: Sequence[Any], settings: Sequence[float]
) -> list[tuple[type[BlockBias], Sequence[Any], Sequence[float]]]:
    """Returns the class, tensors and settings of each bias, from the flat arguments of an operator.

    names: of the biases, joined by "+". counts: for each, how many tensors and how many settings it has.
    """
    found = []
    for index, name in enumerate(names.split("+") if names else ()):
        tensor_count, setting_count = counts[2 * index : 2 * index + 2]
        found.append((BLOCK_BIASES[name], tensors[:tensor_count], settings[:setting_count]))
        tensors, settings = tensors[tensor_count:], settings[setting_count:]
    return found


def _tensors(given: Sequence[Any]) -> tuple[Any, ...]:
    """Returns query, key, value, mask, seed and the tensors of all biases, from those of the operator.

    These are query, key, value, the tensors of the biases with None for those without gradients, the others, and None
    for the first, mask, and seed.
    """
    query, key, value, *tensors, mask, seed = given
    half = len(tensors) // 2
    joined = [other if one is None else one for one, other in zip(tensors[:half], tensors[half:])]
    return query, key, value, mask, seed, joined


def _product(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """`left @ right`, (C, M, L) x (C, L, O), in the compute type; in `out` if the inputs have that type."""
    dtype = compute_dtype(left.dtype)
    if left.dtype != dtype:
        return torch.bmm(left, right).to(dtype)
    return torch.bmm(left, right) if out is None else torch.bmm(left, right, out=out)


def _add_product(into: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """`into += left @ right`, with `into` in the compute type."""
    if left.dtype == into.dtype:
        into.baddbmm_(left, right)
    else:
        into.add_(torch.bmm(left, right))


def _reversed(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """(B, G, K, D) with the last key first, reshaped. (Faster than `flip`, which does not copy whole rows.)"""
    K = tensor.shape[2]
    return tensor.index_select(2, torch.arange(K - 1, -1, -1, device=tensor.device)).view(shape)


class _Attention:
    """Geometry, masks and logits that the forward and the backward pass share."""

    def __init__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None,
        biases: Sequence[tuple[type[BlockBias], Sequence[torch.Tensor], Sequence[float]]], seed: torch.Tensor | None,
        scaling: float, dropout: float, block_size: int,
    ) -> None:  # fmt: skip
        self.B, self.H, self.Q, self.D = query.shape
        self.G, self.K = key.shape[1], key.shape[2]
        self.V = value.shape[3]
        self.N, self.n = self.B * self.G, self.H // self.G
        self.offset = self.K - self.Q
        self.device = query.device
        self.dtype = compute_dtype(query.dtype)
        self.scaling, self.dropout = scaling, dropout
        self.seed = int(seed.item()) if seed is not None else 0
        self.block_size = min(block_size, self.Q)
        self.query = query.reshape(self.N, self.n, self.Q, self.D)
        self.key = _reversed(key, (self.N, self.K, self.D))
        self.value = _reversed(value, (self.N, self.K, self.V))
        self.by_data = decides_by_data(self.device)
        self.chunk = chunk_members(self.device, self.N, self.n * self.block_size * self.K)
        self.member = torch.arange(self.N, device=self.device)
        triangle = torch.ones(self.block_size, self.block_size, dtype=torch.bool, device=self.device)
        # True where column w of row r is in the future.
        self.future = triangle.triu_(1).flip(1).contiguous()
        # Adding is faster than filling.
        self.future_logits = self.future.to(self.dtype) * HIDDEN_LOGIT
        self._prepare_mask(mask)
        self.biases = [kind(tensors, settings, self) for kind, tensors, settings in biases]
        self.fades = any(bias.fades for bias in self.biases)
        # A bias without a softmax is alone.
        self.softmax = all(bias.softmax for bias in self.biases)
        # The gradient of the rows' numbers, (N, n, Q).
        self.grad_numbers: torch.Tensor | None = None
        size = self.chunk * self.n * self.block_size * self.K
        self.buffers = [torch.empty(size, dtype=self.dtype, device=self.device)]

    def _prepare_mask(self, mask: torch.Tensor | None) -> None:
        self.mask = self.low = None
        # True if row i is known to have the key slot offset + i.
        self.aligned = True
        if mask is None:
            return
        if not is_key_ranges(mask):
            self.mask = mask.flip(3)
            return
        low, high = mask[:, 0, : self.Q].long().unbind(-1)
        self.valid = mask[:, 0, self.Q :, 0] != 0
        sees = low < high
        # Fully masked rows are in no block's range.
        self.low, self.high = torch.where(sees, low, self.K), torch.where(sees, high, 0)
        if not self.by_data:
            # The offset is the largest possible one: every block has all keys that its rows may see.
            self.aligned = self.Q == self.K
            return
        # Rows are consecutive slots; a static cache may have empty ones behind them.
        slots = high - 1 - torch.arange(self.Q, device=self.device)
        if bool(sees.any()):
            self.offset = int(torch.where(sees, slots, 0).max())
        visible = F.pad(self.valid.cumsum(-1), (1, 0))
        count = visible.gather(1, high) - visible.gather(1, low)
        # True for rows that see all keys from `low` to their own slot.
        self.plain_rows = (slots == self.offset) & (count == high - low) & sees
        if bool((self.plain_rows & (low == 0)).all()) and self.offset == self.K - self.Q:
            self.low = None

    def buffer(self, index: int, *shape: int) -> torch.Tensor:
        """Returns reused memory for a block's logits."""
        while len(self.buffers) <= index:
            self.buffers.append(torch.empty_like(self.buffers[0]))
        return self.buffers[index][: math.prod(shape)].view(shape)

    def blocks(self) -> Iterator[Block]:
        """Yields all blocks in which some row sees some key."""
        for low in range(0, self.N, self.chunk):
            chunk = slice(low, min(low + self.chunk, self.N))
            member = self.member[chunk]
            batch, group = member // self.G, member % self.G
            batches = slice(low // self.G, (chunk.stop - 1) // self.G + 1)
            for start in range(0, self.Q, self.block_size):
                rows = slice(start, min(start + self.block_size, self.Q))
                block = self._block(chunk, batches, batch, group, rows)
                if block is not None:
                    yield block

    def _block(
        self, chunk: slice, batches: slice, batch: torch.Tensor, group: torch.Tensor, rows: slice
    ) -> Block | None:
        query = self.query[chunk, :, rows]
        R = rows.stop - rows.start
        if self.mask is not None:
            mask = self.mask[:, :, rows]
            mask = mask[batch] if mask.shape[0] > 1 else mask.expand(batch.shape[0], -1, -1, -1)
            if mask.shape[1] > 1:
                heads = group[:, None] * self.n + torch.arange(self.n, device=self.device)
                mask = mask[torch.arange(batch.shape[0], device=self.device)[:, None], heads]
            visible, additive = (mask, None) if mask.dtype == torch.bool else (None, mask)
            return Block(query, chunk, batch, group, rows, slice(0, self.K), False, visible, additive)
        end = min(self.offset + rows.stop, self.K)
        columns = slice(self.K - end, self.K)
        if self.low is None:
            return Block(query, chunk, batch, group, rows, columns, True, None, None)
        low, high = self.low[batches, rows], self.high[batches, rows]
        first = int(low.min()) if self.by_data else 0
        if first >= end:
            return None
        columns = slice(self.K - end, self.K - first)
        if self.by_data and first <= end - R and bool((self.plain_rows[batches, rows] & (low == first)).all()):
            return Block(query, chunk, batch, group, rows, columns, True, None, None)
        slots = torch.arange(end - 1, first - 1, -1, device=self.device)
        visible = (slots >= low[:, :, None]) & (slots < high[:, :, None]) & self.valid[batches, None, slots]
        visible = visible[batch - batches.start][:, None]
        return Block(query, chunk, batch, group, rows, columns, False, visible, None)

    def _future(self, square: torch.Tensor, rows: int, width: int) -> torch.Tensor:
        """The part (rows, width) of `future` or `future_logits` for a block of that size."""
        skip = self.block_size - rows
        return square[:rows, skip : skip + width]

    def of_heads(self, tensor: torch.Tensor) -> torch.Tensor:
        """What belongs to a query head, (at least H, ...), in the compute type: (G, n, ...), for `block.group`."""
        return tensor[: self.H].to(self.dtype).reshape(self.G, self.n, *tensor.shape[1:])

    def of_keys(self, tensor: torch.Tensor) -> torch.Tensor:
        """What belongs to a query head and a key, (B, H, K), in the compute type: (N, n, K), newest key first.

        Contiguous; to index by `[block.chunk, :, block.columns]`.
        """
        return tensor.flip(2).to(self.dtype).reshape(self.N, self.n, self.K).contiguous()

    def content(self, block: Block) -> torch.Tensor:
        """Returns the masked content logits (C, n, R, W) of a block, in a reused buffer."""
        C, n, R, _ = block.query.shape
        W = block.columns.stop - block.columns.start
        key = self.key[block.chunk, block.columns]
        flat = block.query.reshape(C, n * R, self.D)
        out = self.buffer(0, C, n * R, W)
        if flat.dtype == self.dtype:
            logits = torch.bmm(flat * self.scaling, key.transpose(1, 2), out=out)
        else:
            logits = _product(flat, key.transpose(1, 2)).mul_(self.scaling)
        logits = logits.view(C, n, R, W)
        if block.causal_only:
            width = min(R, W)
            logits[..., :width].add_(self._future(self.future_logits, R, width))
        elif block.visible is not None:
            logits.masked_fill_(~block.visible, HIDDEN_LOGIT)
        else:
            assert block.additive is not None, "a block that is not causal has one of the two masks"
            logits.add_(block.additive).clamp_(min=HIDDEN_LOGIT)
        return logits

    def logits(self, block: Block, *, keep: bool) -> tuple[Block, torch.Tensor, Any]:
        """Returns a block, perhaps with fewer keys, its logits, and the third result of `BlockBias.logits` or None."""
        if not self.softmax:
            return self.biases[0].logits(block, keep=keep)
        logits = self.content(block)
        for bias in self.biases:
            bias.add(logits, block, keep=keep)
        return block, logits, None

    def exponentials(self, logits: torch.Tensor, block: Block) -> torch.Tensor:
        """Returns exp(logits), in place, with 0 for negligible ones if the block may have many."""
        if block.causal_only and not self.fades:
            return logits.exp_()
        return torch.threshold_(logits.clamp_(min=NEGLIGIBLE_LOGIT).exp_(), 2.0**-80, 0.0)

    def keep_mask(self, block: Block, like: torch.Tensor) -> torch.Tensor:
        """The dropout mask of a block, 0 or 1 / (1 - dropout): the same each time it is asked for."""
        generator = torch.Generator(device=self.device)
        generator.manual_seed((self.seed + block.chunk.start * self.Q + block.rows.start) % (1 << 62))
        return torch.empty_like(like).bernoulli_(1 - self.dropout, generator=generator).div_(1 - self.dropout)


def _without_autocast(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, enabled=False)


def _blockwise_forward(
    given: Sequence[Any], names: str, counts: Sequence[int], settings: Sequence[float], block_size: int,
    scaling: float, dropout: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    query, key, value, mask, seed, tensors = _tensors(given)
    with torch.no_grad(), _without_autocast(query.device):
        biases = _unpack(names, counts, tensors, settings)
        attention = _Attention(query, key, value, mask, biases, seed, scaling, dropout, block_size)
        B, H, Q, V = attention.B, attention.H, attention.Q, attention.V
        out = query.new_zeros(B, H, Q, V)
        # For rows that see nothing: exp(logit - lse) is 0 with this log-sum-exp. Without softmax, the remainder is 1.
        nothing = -HIDDEN_LOGIT if attention.softmax else 1.0
        numbers = torch.full((B, H, Q), nothing, dtype=attention.dtype, device=query.device)
        out_view, numbers_view = out.view(attention.N, attention.n, Q, V), numbers.view(attention.N, attention.n, Q)
        for whole in attention.blocks():
            block, logits, row_numbers = attention.logits(whole, keep=False)
            C, n, R, W = logits.shape
            if row_numbers is None:
                maximum = logits.amax(-1, keepdim=True)
                logits.sub_(maximum)
            weights = attention.exponentials(logits, block)
            total = weights.sum(-1, keepdim=True) if row_numbers is None else None
            if dropout > 0:
                weights.mul_(attention.keep_mask(block, weights))
            rows = _product(weights.view(C, n * R, W).to(value.dtype), attention.value[block.chunk, block.columns])
            rows = rows.view(C, n, R, V)
            if total is not None:
                rows.div_(total)
                row_numbers = maximum.add_(total.log_()).squeeze(-1)
                if not block.causal_only:
                    unseen = row_numbers < HIDDEN_LOGIT / 2
                    rows.masked_fill_(unseen[..., None], 0.0)
                    row_numbers.masked_fill_(unseen, nothing)
            out_view[block.chunk, :, block.rows] = rows.to(out.dtype)
            numbers_view[block.chunk, :, block.rows] = row_numbers
        return out, numbers


def _blockwise_backward(
    grads: Sequence[Any], given: Sequence[Any], results: Sequence[torch.Tensor], names: str, counts: Sequence[int],
    settings: Sequence[float], block_size: int, scaling: float, dropout: float,
) -> list[torch.Tensor]:  # fmt: skip
    (query, key, value, mask, seed, tensors), (out, lse), (grad, grad_numbers) = _tensors(given), results, grads
    with torch.no_grad(), _without_autocast(query.device):
        biases = _unpack(names, counts, tensors, settings)
        attention = _Attention(query, key, value, mask, biases, seed, scaling, dropout, block_size)
        N, n, Q, K, D, V = attention.N, attention.n, attention.Q, attention.K, attention.D, attention.V
        dtype = attention.dtype
        grad_query = torch.zeros(N, n, Q, D, dtype=dtype, device=query.device)
        grad_key = torch.zeros(N, K, D, dtype=dtype, device=query.device)
        grad_value = torch.zeros(N, K, V, dtype=dtype, device=query.device)
        grad, out = grad.reshape(N, n, Q, V), out.view(N, n, Q, V)
        if attention.softmax:
            # delta_i = sum_j weight_ij d(weight_ij)
            delta = (grad.to(dtype) * out.to(dtype)).sum(-1)
            lse = lse.view(N, n, Q)
        elif grad_numbers is not None:
            attention.grad_numbers = grad_numbers.reshape(N, n, Q)
        for whole in attention.blocks():
            block, logits, _ = attention.logits(whole, keep=True)
            chunk = block.chunk
            C, n, R, W = logits.shape
            if attention.softmax:
                logits.sub_(lse[chunk, :, block.rows, None])
            weights = attention.exponentials(logits, block)
            grad_rows = grad[chunk, :, block.rows].reshape(C, n * R, V)
            key_part, value_part = attention.key[chunk, block.columns], attention.value[chunk, block.columns]
            grad_logits = _product(grad_rows, value_part.transpose(1, 2), out=attention.buffer(1, C, n * R, W))
            grad_logits = grad_logits.view(C, n, R, W)
            dropped = weights
            if dropout > 0:
                keep = attention.keep_mask(block, weights)
                grad_logits.mul_(keep)
                dropped = keep.mul_(weights)
            dropped = dropped.view(C, n * R, W).to(value.dtype)
            _add_product(grad_value[chunk, block.columns], dropped.transpose(1, 2), grad_rows)
            if attention.softmax:
                grad_logits.sub_(delta[chunk, :, block.rows, None])
            grad_logits.mul_(weights)
            from_biases = [bias.backward(grad_logits, block) for bias in reversed(attention.biases)]
            grad_logits = grad_logits.view(C, n * R, W).to(query.dtype)
            rows = _product(grad_logits, key_part).mul_(scaling).view(C, n, R, D)
            for part in from_biases:
                if part is not None:
                    rows.add_(part)
            grad_query[chunk, :, block.rows] = rows
            flat = block.query.reshape(C, n * R, D)
            _add_product(grad_key[chunk, block.columns], grad_logits.transpose(1, 2), flat)
        gradients = [
            grad_query.view(query.shape).to(query.dtype),
            _reversed(grad_key.mul_(scaling).view(key.shape), key.shape).to(key.dtype),
            _reversed(grad_value.view(value.shape), value.shape).to(value.dtype),
        ]
        for bias in attention.biases:
            tables = [tensor for tensor, wanted in zip(bias.tensors, bias.differentiable) if wanted]
            gradients += [part.to(table.dtype) for part, table in zip(bias.gradients(), tables)]
        return gradients


_BLOCKWISE_SETTINGS = "str names, int[] counts, float[] settings, int block_size, float scaling, float dropout"
_blockwise_operator = Operator("blockwise", _BLOCKWISE_SETTINGS, _blockwise_forward, _blockwise_backward)


def _hide(logits: torch.Tensor, mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Masks logits (B, H, Q, K) in place of `blockwise_attention`; returns them, and which rows see something.

    The second is bool (B, 1 or H, Q, 1), or None for all rows.
    """
    Q, K = logits.shape[2:]
    if mask is None:
        return (logits if Q == 1 else logits.masked_fill(~causal_mask(Q, K, logits.device), HIDDEN_LOGIT)), None
    if is_key_ranges(mask):
        mask = dense_mask(mask, Q)
    if mask.dtype == torch.bool:
        logits = logits.masked_fill(~mask, HIDDEN_LOGIT)
    else:
        logits = (logits + mask.to(logits.dtype)).clamp(min=HIDDEN_LOGIT)
    return logits, logits.amax(-1, keepdim=True) > HIDDEN_LOGIT / 2


def direct_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    weigh: Callable[[torch.Tensor], torch.Tensor],
    dropout: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """All logits at once, by differentiable operations; `weigh` gives the weights of the masked content logits.

    Returns the output and the weights after dropout.
    """
    B, H, Q, D = query.shape
    G, K, V = key.shape[1], key.shape[2], value.shape[3]
    dtype = compute_dtype(query.dtype)
    with _without_autocast(query.device):
        logits = query.reshape(B, G, H // G * Q, D) @ key.transpose(2, 3)
        logits, seen = _hide((logits.to(dtype) * scaling).view(B, H, Q, K), mask)
        weights = weigh(logits)
        if seen is not None:
            weights = weights * seen
        if dropout > 0:
            weights = F.dropout(weights, dropout)
        weights = weights.to(value.dtype)
        return (weights.view(B, G, H // G * Q, K) @ value).view(B, H, Q, V), weights


def check_blockwise_inputs(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> None:
    check_shapes(query, key, value)
    (B, H, Q, _), K = query.shape, key.shape[2]
    if mask is None:
        return
    key_ranges = mask.dtype == torch.int32 and mask.shape == (B, 1, Q + K, 2)
    full = mask.dim() == 4 and mask.shape[0] in (1, B) and mask.shape[1] in (1, H) and mask.shape[2:] == (Q, K)
    if not key_ranges and not (full and (mask.dtype == torch.bool or mask.is_floating_point())):
        raise ValueError(
            f"mask={tuple(mask.shape)!r} of type {mask.dtype!r} is not valid: it must be None, int32 key ranges "
            f"{(B, 1, Q + K, 2)!r}, or bool or floating {(B, '1 or ' + str(H), Q, K)!r}."
        )
    if mask.requires_grad:
        raise ValueError(
            f"mask.requires_grad={mask.requires_grad!r} is not valid: blockwise attention gives no gradient to a mask; "
            "it must be False, or use the 'eager' attention implementation."
        )


def blockwise_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    scaling: float,
    biases: Sequence[BiasInputs] = (),
    dropout: float = 0.0,
    block_size: int | None = None,
    direct: bool | None = None,
) -> torch.Tensor:
    """Softmax attention with biases on the logits, in memory proportional to the length.

    On a GPU nothing waits for the device, so that it can be part of a CUDA graph, without dropout.

    Args:
        query: (B, H, Q, D), float16, bfloat16, float32 or float64.
        key: (B, G, K, D), H a multiple of G, K at least Q. Query row i has key slot K - Q + i.
        value: (B, G, K, V).
        mask: None: causal. int32 (B, 1, Q + K, 2): key ranges, see `attention_mask`. bool (B, 1 or H, Q, K): True where
            visible, and nothing else decides (not causality). Floating (B, 1 or H, Q, K): added to the content logits,
            and nothing else decides. Rows that see nothing give 0.
        scaling: the factor on q.k.
        biases: what is added to the logits; one that reads the content logits comes first.
        dropout: probability of dropping an attention weight.
        block_size: query rows per block; None: chosen by the device.
        direct: True: all logits at once. None: so if there are at most 4 query rows.

    Returns:
        (B, H, Q, V) in the type of the query.
    """
    check_blockwise_inputs(query, key, value, mask)
    for position, (kind, *_) in enumerate(biases):
        if kind.reads_content and position > 0:
            raise ValueError(
                f"biases={[bias.kind.name for bias in biases]!r} is not valid: {kind.name!r} reads the content logits, "
                "so it must come first."
            )
    query, key, value = autocast_inputs(query, key, value)
    return _blockwise(query, key, value, mask, scaling, biases, dropout, block_size, direct)


def _blockwise(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scaling: float,
    biases: Sequence[BiasInputs], dropout: float, block_size: int | None, direct: bool | None,
) -> torch.Tensor:  # fmt: skip
    """`blockwise_attention` of inputs that are known to be valid."""
    if direct or (direct is None and query.shape[2] <= DIRECT_ROWS):

        def weigh(logits: torch.Tensor) -> torch.Tensor:
            bias = sum(kind.bias(logits, query, tensors, settings) for kind, tensors, settings in biases)
            return torch.softmax(logits + bias, -1)

        return direct_attention(query, key, value, mask, scaling, weigh, dropout)[0]
    return attend_in_blocks(query, key, value, mask, scaling, biases, dropout, block_size)[0]


def attend_in_blocks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    biases: Sequence[BiasInputs],
    dropout: float,
    block_size: int | None,
) -> list[torch.Tensor]:
    """Returns the output (B, H, Q, V) and the numbers of the rows (B, H, Q); see `blockwise_attention`."""
    tensors = [tensor for bias in biases for tensor in bias.tensors]
    counts = [count for bias in biases for count in (len(bias.tensors), len(bias.settings))]
    settings = [float(number) for bias in biases for number in bias.settings]
    names = "+".join([bias.kind.name for bias in biases])
    seed = torch.randint(1 << 62, (1,), dtype=torch.int64) if dropout > 0 else None
    rows = block_size or block_rows(query.device)
    wanted = [one for bias in biases for one in bias.kind.differentiable[: len(bias.tensors)]]
    first = [tensor if one else None for tensor, one in zip(tensors, wanted)]
    others = [None if one else tensor for tensor, one in zip(tensors, wanted)]
    arguments = (names, counts, settings, rows, scaling, dropout)
    return _blockwise_operator((query, key, value, *first), (*others, mask, seed), *arguments)


def autocast_inputs(*states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    device = states[0].device.type
    if not torch.is_autocast_enabled(device) or states[0].dtype == torch.float64:
        return states
    return tuple(state.to(torch.get_autocast_dtype(device)) for state in states)


def biases_of(encodings: Any, context: Any, scaling: float) -> list[BiasInputs]:
    """Returns the biases of a layer's encodings, all of which have a `BlockBias`."""
    return [BiasInputs(part.block_bias, *part.bias_inputs(context, scaling)) for part in encodings.hooks["bias"]]


def blockwise_attention_forward(
    layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, context: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    """The implementation `blockwise`, for `attention.attend`, of a layer whose biases are all `BlockBias`es."""
    scaling = options["scaling"]
    biases = biases_of(layer.encodings, context, scaling)
    query, key, value = autocast_inputs(query, key, value)
    output = _blockwise(query, key, value, mask, scaling, biases, options["dropout"], None, None)
    return output.transpose(1, 2).contiguous(), None
