"""The calls of the Triton kernels: checked on a GPU (`gpu_check`), timed (`benchmark`), and compiled for GPUs (tests).

Kernels are called as models call them, by the encodings of a layer. A new kernel, or a new use of one, is a line in
`KERNELS`, for the check and the compilation; a line in `benchmark.attention.KINDS` times it.

Axes: B batch, H query heads, G key heads, Q query rows, K keys, D head dim, N chosen rows.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from whatwhere import WhatWhereLlamaConfig
from whatwhere.attention_blockwise import split_digits
from whatwhere.attention_mask import key_ranges_mask
from whatwhere.attention_triton import run_kernel
from whatwhere.position_base import PositionContext
from whatwhere.position_modules import PositionEncodings, SharedPositionEncodings

from .references import attention, undecided_rows

# Parameters of encodings, if a case does not set them.
PARAMETERS: dict[str, dict[str, Any]] = {
    "cope": {"scale_positions": True},
    "relative": {"num_positions": 200, "beyond": "last"},
    "token_gated_cope": {"num_positions": 300},
}
# Options of a case that are no parameters of an encoding.
OPTIONS = ("encoding", "dropout", "gate_values")
MASKS = ("padding", "holes", "packed")


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of a kernel.

    Attributes:
        kernel: one of `KERNELS`, or a position encoding for `gpu_check.check_model`.
        dtype: of PyTorch; or "tf32", float32 where products may have TF32 (see `precision_of`).
        mask: "causal", or one of `MASKS`.
        options: pairs of name and value. The probability of `dropout`; `encoding`, for another than the kernel's own;
            `gate_values`, "open" or "closed", for gates that are nearly so. Others are parameters of the encoding, in a
            sum of the first one.
    """

    kernel: str
    dtype: str
    head_dim: int
    queries: int
    keys: int
    batch: int = 2
    heads: int = 4
    groups: int = 4
    mask: str = "causal"
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        shape = f"{self.batch}x{self.heads}/{self.groups}x{self.queries}/{self.keys}"
        options = [f"{name}={value}" for name, value in self.options]
        return " ".join([self.kernel, self.dtype, f"D={self.head_dim}", shape, self.mask, *options])

    def option(self, name: str, default: Any) -> Any:
        return dict(self.options).get(name, default)


def case(kernel: str, dtype: str, head_dim: int, queries: int, keys: int | None = None, **given: Any) -> Case:
    """Returns a case; what is no field of `Case` is an option. `keys` is by default as `queries`."""
    fields = {name: given.pop(name) for name in ("batch", "heads", "groups", "mask") if name in given}
    return Case(kernel, dtype, head_dim, queries, keys or queries, **fields, options=tuple(given.items()))


@contextlib.contextmanager
def precision_of(case: Case) -> Iterator[None]:
    """Within it, matrix products of float32 have TF32 if the case says so, and otherwise not."""
    products = torch.backends.cuda.matmul
    before, products.fp32_precision = products.fp32_precision, "tf32" if case.dtype == "tf32" else "ieee"
    try:
        yield
    finally:
        products.fp32_precision = before


class Call(NamedTuple):
    """A kernel with its inputs and what they should give.

    Attributes:
        inputs: the differentiable ones: query, key, value, cached states, parameters.
        layer: a function of the inputs: the encodings of a layer and a context that have them, until the next call.
        kernel: a function of the inputs; without a mask, of the last query rows too.
        reference: the same in any type, with the argument `rows`, int64 (N,): (B, H, N, D). Without a mask, of the last
            batch entry and the last head too.
        undecided: a function of inputs in float64 and `rows`: bool (B, H, N), see `undecided_rows`.
    """

    names: tuple[str, ...]
    inputs: list[torch.Tensor]
    layer: Callable[..., tuple[PositionEncodings, PositionContext]]
    kernel: Callable[..., torch.Tensor]
    reference: Callable[..., torch.Tensor]
    undecided: Callable[..., torch.Tensor] | None = None


def key_ranges_of(mask: str, batch: int, queries: int, keys: int, device: torch.device) -> torch.Tensor | None:
    """Returns a mask as the kernels read it, (B, 1, Q + K, 2), or None for causal."""
    if mask == "causal":
        return None
    slots = torch.arange(keys, device=device)
    if mask == "packed":
        starts = torch.tensor((keys // 5, keys // 2, keys // 2 + 1), device=device)
        documents = (slots[:, None] >= starts).sum(1)
        options: dict[str, Any] = {"mask_function": lambda batch, head, query, key: documents[query] == documents[key]}
    else:
        # Single keys, and where there are enough of them a whole block of rows.
        hidden = (slots % 7 == 3) | ((slots >= 64) & (slots < 128) & (slots.numel() > 192))
        valid = (~hidden if mask == "holes" else slots >= 0).repeat(batch, 1)
        if mask == "padding":
            # To the left in the first entry, to the right in the last.
            valid[0] &= slots >= keys // 3
            valid[-1] &= slots < keys - keys // 4
        options = {"attention_mask": valid}
    return key_ranges_mask(batch, queries, keys, keys - queries, device=device, **options)


def _hash(bits: torch.Tensor) -> torch.Tensor:
    """The function of this name in `kernel_flash`, of int64 numbers."""
    bits = bits & 0xFFFFFFFF
    bits = ((bits ^ (bits >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    bits = ((bits ^ (bits >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return bits ^ (bits >> 16)


def config_of(case: Case, encoding: str) -> WhatWhereLlamaConfig:
    """Returns the configuration of a model with one layer of a case's encoding."""
    names = encoding.split("+")
    parameters = {name: dict(PARAMETERS.get(name, {})) for name in names}
    parameters[names[0]] |= {name: value for name, value in case.options if name not in OPTIONS}
    return WhatWhereLlamaConfig(
        hidden_size=case.heads * case.head_dim,
        num_hidden_layers=1,
        num_attention_heads=case.heads,
        num_key_value_heads=case.groups,
        position_encoding=encoding,
        position_encoding_parameters=parameters if len(names) > 1 else parameters[encoding],
    )


class _Inputs:
    """The inputs of a case, and the encodings of the layer that they belong to.

    Attributes:
        states: what encodings cache beside the keys, by name.
        learned: the parameters of the layer, by name, without those of projections of hidden states.
        position_query: the query before RoPE, (B, H, Q, D), or None.
    """

    def __init__(self, case: Case, encoding: str, device: torch.device) -> None:
        # With TF32 inputs are bfloat16 numbers: then the logits are as exact as with these, and gates do not move.
        self.rounded = case.dtype == "tf32"
        self.case, self.dtype, self.device = case, getattr(torch, "float32" if self.rounded else case.dtype), device
        self.scaling, self.dropout = case.head_dim**-0.5, case.option("dropout", 0.0)
        self.generator = torch.Generator(device).manual_seed(0)
        config = config_of(case, encoding)
        self.encodings: Any = PositionEncodings(config, 0)
        self.shared = SharedPositionEncodings(config).to(device)
        self.query = self.random(case.batch, case.heads, case.queries, case.head_dim)
        self.key, self.value = (self.random(case.batch, case.groups, case.keys, case.head_dim) for _ in range(2))
        self.key_ranges = key_ranges_of(case.mask, case.batch, case.queries, case.keys, device)
        # Each entry of a masked batch has its own positions.
        self.positions = torch.arange(case.keys, device=device)[None]
        if self.key_ranges is not None:
            self.positions = self.positions + torch.arange(case.batch, device=device)[:, None]
        gate_values = case.option("gate_values", None)
        if gate_values is not None:
            # One shared channel sets every gate logit to about 8 or -8.
            self.query[..., 0] = 8.0
            self.key[..., 0] = (1.0 if gate_values == "open" else -1.0) * case.head_dim**0.5
        if encoding == "pope":
            # The magnitudes.
            pope: Any = self.encodings["pope"]
            self.query, self.key = pope.before_cache(self.query, self.key, PositionContext(self.positions))
        self.states = {part.name: self._state(part.name) for part in self.encodings.hooks["cached_state"]}
        self.position_query = self.random(*self.query.shape) if encoding == "cope+rope" else None
        self.learned: dict[str, torch.Tensor] = {}
        self.owners: dict[str, Any] = {}
        for module in (self.encodings, self.shared):
            for name, parameter in [*module.named_parameters()]:
                path, _, attribute = name.rpartition(".")
                if path.split(".")[1] in ("gate", "gate_key"):
                    continue
                owner, tensor = module.get_submodule(path), self._learned(name, parameter.shape)
                delattr(owner, attribute)
                setattr(owner, attribute, tensor)
                self.learned[name], self.owners[name] = tensor, (owner, attribute)

    def random(self, *shape: int) -> torch.Tensor:
        # Drawn in float32, because random numbers in float16 differ between devices.
        return torch.randn(*shape, generator=self.generator, device=self.device)

    def cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return (tensor.bfloat16() if self.rounded else tensor).to(self.dtype)

    def layer_of(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: torch.Tensor
    ) -> tuple[PositionEncodings, PositionContext]:
        """See `Call.layer`; `others` are states, parameters, and the query before RoPE if there is one."""
        named = dict(zip((*self.states, *self.learned), others))
        for name, owner in self.owners.items():
            setattr(owner[0], owner[1], named[name])
        Q, K = query.shape[2], key.shape[2]
        context = PositionContext(
            self.positions[:, K - Q :],
            past_length=K - Q,
            key_length=K,
            consecutive=True,
            head_offset=self.case.heads - query.shape[1],
            query=query if self.position_query is None else others[-1],
            value=value,
            states={name: named[name] for name in self.states},
        )
        return self.encodings, self.shared(query, context)

    def _state(self, name: str) -> torch.Tensor:
        """Returns gate keys (B, G, K, D), or in two digits (B, G, K, 2 H / G) log f or the gates of tokens."""
        if name == "cope":
            return self.random(*self.key.shape)
        drawn = self.random(self.case.batch, self.case.heads, self.case.keys)
        if name == "fox":
            # From heads that remember thousands of tokens to heads that forget in a few.
            fading = 0.1 ** torch.arange(self.case.heads, device=self.device).flip(0)[:, None]
            numbers = F.logsigmoid(drawn + 3.0) * fading
        else:
            # At an integer the derivative is discontinuous. Sums of these are 1/128 from one at least, and exact.
            numbers = (torch.sigmoid(drawn) * 64).ceil() / 64
            first = torch.zeros(self.case.batch, 1, dtype=torch.long, device=self.device)
            if self.key_ranges is not None:
                # The first token that each row sees.
                first = self.key_ranges[:, 0, : self.case.queries, 0].long()
            numbers += torch.zeros_like(numbers[:, 0]).scatter_(1, first, 1 / 128)[:, None]
        return split_digits(numbers.unflatten(1, (self.case.groups, -1)).transpose(2, 3), self.dtype)

    def _learned(self, name: str, shape: torch.Size) -> torch.Tensor:
        drawn = self.random(*shape)
        if name.endswith("delta.weight"):
            return drawn - 1.0
        if name.endswith("position_query.weight"):
            drawn = drawn * self.scaling
        return self.cast(drawn)

    def seeded(self) -> float:
        """Returns the probability that a weight is dropped; which are, is the same after each call."""
        if self.dropout > 0:
            torch.manual_seed(1)
        return self.dropout

    def kept(self, rows: torch.Tensor) -> torch.Tensor | None:
        """Returns 0 or 1 / (1 - p) for the weights of rows, (B, H, N, K), as the kernels do; None without dropout."""
        if self.seeded() == 0:
            return None
        seed = torch.randint(2**31 - 1, (1,), dtype=torch.int32, device=self.device).long()
        B, H = self.query.shape[:2]
        members = _hash(seed) + torch.arange(B * H, device=self.device).view(B, H, 1)
        keys = _hash(torch.arange(self.key.shape[2], device=self.device))
        bits = _hash(_hash(_hash(members) + rows)[..., None] + keys)
        return (bits >> 1 >= round(self.dropout * 2**31)) / (1 - self.dropout)


class Kernel(NamedTuple):
    """A kernel, and how it is called.

    Attributes:
        encoding: the position encoding that calls it.
        variants: fields and options that are kernels of their own when compiled.
        contents: fields and options that use the same kernels in another way.
    """

    encoding: str
    variants: tuple[dict[str, Any], ...]
    contents: tuple[dict[str, Any], ...] = ()

    def call(self, case: Case, device: torch.device) -> Call:
        """Makes the inputs of a case."""
        encoding = case.option("encoding", self.encoding)
        given = _Inputs(case, encoding, device)
        options: dict[str, Any] = {"key_ranges": given.key_ranges, "scaling": given.scaling}

        def kernel(*inputs: torch.Tensor) -> torch.Tensor:
            encodings, context = given.layer_of(*inputs)
            query, key, value, *_ = inputs
            return run_kernel(encodings, query, key, value, context, **options, dropout=given.seeded())

        def reference(*inputs: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            query, key, value, *_ = inputs
            encodings, context = given.layer_of(*inputs)
            options_of_rows = {"rows": rows, "kept": given.kept(rows), **options}
            return attention(query, key, value, encodings, context, **options_of_rows)

        def undecided(*inputs: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            query, key, value, *others = inputs
            last = given.encodings[encoding.split("+")[0]].parameters_.num_positions - 1
            gates = case.option("gates", "key")
            gate_key = value if gates == "value" else others[0] if gates == "separate_key" else key
            kinks = torch.arange(1, last + 1, device=device)
            return undecided_rows(query, gate_key, kinks, rows=rows, **options)

        names = ["dq", "dk", "dv", *(f"gradient of the state of {name}" for name in given.states)]
        inputs = [given.cast(one) for one in (given.query, given.key, given.value, *given.states.values())]
        names += [f"gradient of {name}" for name in given.learned]
        inputs += given.learned.values()
        if given.position_query is not None:
            names.append("gradient of the query before RoPE")
            inputs.append(given.cast(given.position_query))
        decide = undecided if self.encoding == "cope" else None
        return Call(tuple(names), inputs, given.layer_of, kernel, reference, decide)


_VARIANTS: tuple[dict[str, Any], ...] = ({}, {"mask": "packed"}, {"groups": 2}, {"dropout": 0.1})
KERNELS = {
    "cope": Kernel(
        "cope",
        (
            *(*_VARIANTS, {"mask": "padding", "gates": "separate_key"}, {"gates": "value"}),
            *({"encoding": name} for name in ("cope+rope", "cope+alibi", "cope+relative")),
        ),
        (
            *({"gate_values": "open"}, {"gate_values": "closed"}),
            *({"num_positions": 2}, {"num_positions": 33}, {"num_positions": 300}),
        ),
    ),
    "pope": Kernel("pope", (*_VARIANTS, {"partial_rotary_factor": 0.5, "use_delta": False})),
    "plain": Kernel("none", _VARIANTS),
    **{name: Kernel(name, _VARIANTS) for name in ("fox", "alibi", "relative")},
    "token_gated_cope": Kernel("token_gated_cope", _VARIANTS[:2]),
}
