"""The calls of the Triton kernels: checked on a GPU (`gpu_check`), timed (`benchmark`), compiled (`compile_kernels`).

A new kernel, or a new use of one, is a function here and a line in `KERNELS`: the check and the compilation use both,
and a line in `benchmark.attention.KINDS` times it.

Axes: B batch, H query heads, G key heads, Q query rows, K keys, D head dim, R rotated channels, P positions in CoPE's
table, N chosen rows.
"""

import contextlib
import dataclasses
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from whatwhere.attention_mask import ranges_mask
from whatwhere.position_alibi import alibi_slopes
from whatwhere.position_base import PositionContext
from whatwhere.position_pope import pope_frequencies
from whatwhere.position_token_gated_cope import TokenGatedCoPE

from .benchmark.references import (
    cope_reference,
    plain_reference,
    pope_reference,
    scan_reference,
    token_gated_reference,
    undecided_rows,
)

# Entries of the table of relative positions.
DISTANCES = 200
MASKS = ("padding", "holes", "packed")


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of a kernel.

    Attributes:
        kernel: one of `KERNELS`, or a position encoding for `gpu_check.check_model`.
        dtype: of PyTorch; or "tf32", float32 where products may have TF32 (see `precision_of`).
        mask: "causal", or one of `MASKS`.
        options: of this kernel, as pairs of name and value.
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
    names = {field.name for field in dataclasses.fields(Case)}
    fields = {name: value for name, value in given.items() if name in names}
    options = tuple((name, value) for name, value in given.items() if name not in names)
    return Case(kernel, dtype, head_dim, queries, keys or queries, **fields, options=options)


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
        names: of the inputs.
        inputs: the differentiable ones.
        kernel: a function of the inputs; without a mask, of the last query rows too.
        reference: the same in any type, with the argument `rows`, int64 (N,): (B, H, N, D). Without a mask, of the last
            batch entry and the last head too.
        undecided: a function of inputs in float64 and `rows`: bool (B, H, N), see `undecided_rows`.
    """

    names: tuple[str, ...]
    inputs: list[torch.Tensor]
    kernel: Callable[..., torch.Tensor]
    reference: Callable[..., torch.Tensor]
    undecided: Callable[..., torch.Tensor] | None = None


def ranges_of(mask: str, batch: int, queries: int, keys: int, device: torch.device) -> torch.Tensor | None:
    """Returns a mask as the kernels read it, (B, 1, Q + K, 2), or None for causal."""
    if mask == "causal":
        return None
    slots = torch.arange(keys, device=device)
    if mask == "packed":
        documents = sum((slots >= start).long() for start in (keys // 5, keys // 2, keys // 2 + 1))
        options: dict[str, Any] = {"mask_function": lambda batch, head, query, key: documents[query] == documents[key]}
    else:
        valid = (slots % 7 != 3 if mask == "holes" else slots >= 0).repeat(batch, 1)
        if mask == "padding":
            # To the left in the first entry, to the right in the last.
            valid[0] &= slots >= keys // 3
            valid[-1] &= slots < keys - keys // 4
        options = {"attention_mask": valid}
    return ranges_mask(batch, queries, keys, keys - queries, device=device, **options)


def _hash(bits: torch.Tensor) -> torch.Tensor:
    """The function of this name in `kernel_flash`, of int64 numbers."""
    bits = bits & 0xFFFFFFFF
    bits = ((bits ^ (bits >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    bits = ((bits ^ (bits >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return bits ^ (bits >> 16)


class _Inputs:
    """What all kernels take: query, key, value, ranges, scaling; `random` for more."""

    def __init__(self, case: Case, device: torch.device) -> None:
        # With TF32 inputs are bfloat16 numbers: then the logits are as exact as with these, and gates do not move.
        self.rounded = case.dtype == "tf32"
        self.dtype, self.scaling = getattr(torch, "float32" if self.rounded else case.dtype), case.head_dim**-0.5
        self.dropout = case.option("dropout", 0.0)
        self.generator, self.device = torch.Generator(device).manual_seed(0), device
        self.query = self.random(case.batch, case.heads, case.queries, case.head_dim)
        self.key, self.value = (self.random(case.batch, case.groups, case.keys, case.head_dim) for _ in range(2))
        self.ranges = ranges_of(case.mask, case.batch, case.queries, case.keys, device)
        # Each entry of a masked batch has its own positions.
        self.positions = torch.arange(case.keys, device=device)[None]
        if self.ranges is not None:
            self.positions = self.positions - torch.arange(case.batch, device=device)[:, None]
        self.slopes = alibi_slopes(case.heads, device)

    def random(self, *shape: int) -> torch.Tensor:
        # Drawn in float32, because random numbers in float16 differ between devices.
        drawn = torch.randn(*shape, generator=self.generator, device=self.device)
        return drawn.bfloat16().float() if self.rounded else drawn

    def states(self) -> list[torch.Tensor]:
        states = (self.query, self.key, self.value)
        return [(one.bfloat16() if self.rounded else one).to(self.dtype) for one in states]

    def positions_of(self, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the positions of the rows, which are the last ones, and of the keys."""
        return self.positions[:, -query.shape[2] :], self.positions

    def alibi(self, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns ALiBi's numbers of rows and keys."""
        slopes = -self.slopes[-query.shape[1] :, None].double()
        rows, keys = (slopes * one[:, None] for one in self.positions_of(query))
        return rows, keys

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


def _cope(case: Case, device: torch.device) -> Call:
    """Options: gates "half", "open", "closed"; gate "key", "separate", "value"; positions; own_query; dropout.

    And add: another encoding of a sum, "alibi" or "relative"; knots: how many, somewhere, in place of the integers.
    """
    given = _Inputs(case, device)
    gate, gates, P = case.option("gate", "key"), case.option("gates", "half"), case.option("positions", 64)
    gate_key = given.random(*given.key.shape)
    if gates != "half":
        # One shared channel sets every gate logit to about 8 or -8.
        given.query[..., 0] = 8.0
        opened = {"key": given.key, "separate": gate_key, "value": given.value}[gate]
        opened[..., 0] = (1.0 if gates == "open" else -1.0) * case.head_dim**0.5
    more, pieces = {"dtable": given.random(case.head_dim, P)}, {}
    if case.option("knots", 0):
        # Some are negative, some too large.
        places = torch.rand(case.option("knots", 0), generator=given.generator, device=device) * 1.2 - 0.1
        knots = F.pad((places * (P - 1)).clamp(max=P - 1).sort().values, (0, 1), value=P - 1)
        slopes = given.random(case.head_dim, len(knots)) / 4
        rises = slopes * knots.clamp(min=0).diff(prepend=knots.new_zeros(1))
        more["dtable"] = torch.cat((F.pad(rises.cumsum(1), (1, 0)), F.pad(slopes, (0, 1))), 1)
        pieces = {"knots": knots, "num_positions": P}
    if gate == "separate":
        more["dgate_key"] = gate_key
    if case.option("own_query", False):
        more["dposition_query"] = given.random(*given.query.shape)
    add = case.option("add", "")
    if add == "relative":
        more["drelative"] = given.random(DISTANCES, case.head_dim)
    options: dict[str, Any] = {"ranges": given.ranges, "scaling": given.scaling}

    def other(inputs: tuple[torch.Tensor, ...]) -> dict[str, Any]:
        found = dict(zip(more, inputs[3:]))
        gate_of = {"key": None, "separate": found.get("dgate_key"), "value": inputs[2]}[gate]
        result = {"gate_key": gate_of, "position_query": found.get("dposition_query"), "position_scale": given.scaling}
        result |= pieces
        if add == "alibi":
            result["decay"] = given.alibi(inputs[0])
        if add == "relative":
            result["relative"] = (found["drelative"], *given.positions_of(inputs[0]))
        return result

    def kernel(*inputs: torch.Tensor) -> torch.Tensor:
        from whatwhere.kernel_cope import cope_attention

        query, key, value, table, *_ = inputs
        return cope_attention(query, key, value, table, **other(inputs), **options, dropout=given.seeded())

    def reference(*inputs: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        query, key, value, table, *_ = inputs
        return cope_reference(query, key, value, table, rows=rows, **other(inputs), **options, kept=given.kept(rows))

    def undecided(*inputs: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        given = {"rows": rows, "num_positions": P, "knots": pieces.get("knots"), **options}
        return undecided_rows(inputs[0], inputs[1], other(inputs)["gate_key"], **given)

    inputs = given.states() + [one.to(given.dtype) for one in more.values()]
    return Call(("dq", "dk", "dv", *more), inputs, kernel, reference, undecided)


def _pope(case: Case, device: torch.device) -> Call:
    """Options: shift; partial: half of the channels have a phase."""
    given = _Inputs(case, device)
    R = case.head_dim // 2 if case.option("partial", False) else case.head_dim
    phases = given.positions[..., None].float() * pope_frequencies(R, 10000.0, device)
    # Cached tokens come first.
    tables = [table[:, -length:] for length in (case.queries, case.keys) for table in (phases.cos(), phases.sin())]
    for states in (given.query, given.key):
        states[..., :R] = F.softplus(states[..., :R])
    shift = [given.random(case.heads, R) - 1.0] if case.option("shift", True) else []
    options: dict[str, Any] = {"ranges": given.ranges, "scaling": given.scaling}

    def kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *shift: torch.Tensor) -> torch.Tensor:
        from whatwhere.kernel_pope import pope_attention

        cos_q, sin_q, cos_k, sin_k = tables
        everything = cos_q, sin_q, cos_k, sin_k, shift[0] if shift else None
        return pope_attention(query, key, value, everything, **options, dropout=given.seeded())

    def reference(*inputs: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return pope_reference(*inputs, tables=tuple(tables), rows=rows, kept=given.kept(rows), **options)

    return Call(("dq", "dk", "dv", "ddelta"), given.states() + shift, kernel, reference)


def _plain(case: Case, device: torch.device, decay: str = "") -> Call:
    """Plain attention; with decay "fox" or "alibi" what these add to the logits."""
    given = _Inputs(case, device)
    Q, K, ranges = case.queries, case.keys, given.ranges
    inputs = given.states()
    if decay == "fox":
        # From heads that remember thousands of tokens to heads that forget in a few.
        fading = 0.1 ** torch.arange(case.heads, device=device).flip(0)[:, None]
        inputs.append(F.logsigmoid(given.random(case.batch, case.heads, K) + 3.0) * fading)
    slots = torch.arange(K - Q, K, device=device)[None] if ranges is None else ranges[:, 0, :Q, 1].long() - 1

    def decays(query: torch.Tensor, *log_forget: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        if decay == "alibi":
            return given.alibi(query)
        if decay != "fox":
            return None
        (gates,) = log_forget
        sums = (gates if ranges is None else gates * (ranges[:, :, Q:, 0] != 0)).double().cumsum(-1)
        own = slots[:, None, -query.shape[2] :].clamp(min=0)
        return sums.gather(2, own.expand(*sums.shape[:2], -1)), sums

    def kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        from whatwhere.kernel_plain import plain_attention

        options: dict[str, Any] = {"decay": decays(query, *more), "ranges": ranges, "scaling": given.scaling}
        return plain_attention(query, key, value, **options, dropout=given.seeded())

    def reference(*inputs: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        options: dict[str, Any] = {"decay": decays(inputs[0], *inputs[3:]), "ranges": ranges, "scaling": given.scaling}
        return plain_reference(*inputs[:3], rows=rows, kept=given.kept(rows), **options)

    return Call(("dq", "dk", "dv", "dlog_forget"), inputs, kernel, reference)


def _relative(case: Case, device: torch.device) -> Call:
    given = _Inputs(case, device)
    options: dict[str, Any] = {"ranges": given.ranges, "scaling": given.scaling}

    def kernel(*inputs: torch.Tensor) -> torch.Tensor:
        from whatwhere.kernel_relative import relative_attention

        query, key, value, table = inputs
        positions = given.positions_of(query)
        return relative_attention(query, key, value, table, *positions, **options, dropout=given.seeded())

    def reference(*inputs: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        query, key, value, table = inputs
        relative = (table, *given.positions_of(query))
        return plain_reference(query, key, value, relative=relative, rows=rows, kept=given.kept(rows), **options)

    table = given.random(DISTANCES, case.head_dim).to(given.dtype)
    return Call(("dq", "dk", "dv", "drelative"), [*given.states(), table], kernel, reference)


def _scan(case: Case, device: torch.device, slopes: bool) -> Call:
    """CoPE_ALiBi with slopes, else stick-breaking attention."""
    given = _Inputs(case, device)
    inputs = given.states()
    if slopes:
        inputs.append(-given.slopes)
    options: dict[str, Any] = {"ranges": given.ranges, "scaling": given.scaling}

    def kernel(*inputs: torch.Tensor) -> torch.Tensor:
        from whatwhere.kernel_scan import cope_alibi_attention, stick_attention

        dropout = given.seeded()
        if slopes:
            return cope_alibi_attention(*inputs, **options, dropout=dropout)
        return stick_attention(*inputs, **options, dropout=dropout)[0]

    def reference(*inputs: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return scan_reference(*inputs, rows=rows, kept=given.kept(rows), **options)

    return Call(("dq", "dk", "dv", "dslopes"), inputs, kernel, reference)


def _token_gated(case: Case, device: torch.device) -> Call:
    """What token-gated CoPE makes of the kernel of plain attention: keys are twice as wide as values."""
    given = _Inputs(case, device)
    table = given.random(300, case.head_dim)
    matrix = given.random(case.head_dim, case.head_dim) * given.scaling
    # At an integer the derivative is discontinuous. Sums of these are 1/128 from one at least, and exact.
    gates = (torch.sigmoid(given.random(case.batch, case.heads, case.keys)) * 64).ceil() / 64
    first = torch.zeros(case.batch, 1, dtype=torch.long, device=device)
    if given.ranges is not None:
        # The first token that each row sees.
        valid = given.ranges[:, 0, case.queries :, 0] != 0
        shown = torch.where(valid, torch.arange(case.keys, device=device), case.keys - 1)
        first = shown.flip(1).cummin(1).values.flip(1).gather(1, given.ranges[:, 0, : case.queries, 0].long())
    gates += torch.zeros_like(gates[:, 0]).scatter_(1, first, 1 / 128)[:, None]
    options: dict[str, Any] = {"ranges": given.ranges, "scaling": given.scaling}

    def kernel(*inputs: torch.Tensor) -> torch.Tensor:
        query, key, value, gates, table, matrix = inputs
        encoding: Any = types.SimpleNamespace(
            _gates=lambda context: gates,
            table=lambda _: table,
            position_query=lambda query, dtype: F.linear(query.to(dtype), matrix.to(dtype)),
        )
        context = PositionContext(given.positions, query=query)
        return TokenGatedCoPE.kernel(encoding, query, key, value, context, **options, dropout=given.seeded())

    def reference(*inputs: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return token_gated_reference(*inputs, rows=rows, kept=given.kept(rows), **options)

    names = ("dq", "dk", "dv", "dgates", "dtable", "dmatrix")
    return Call(names, [*given.states(), gates, table, matrix], kernel, reference)


class Kernel(NamedTuple):
    """How a kernel is called.

    Attributes:
        call: makes the inputs of a case.
        variants: fields and options that are kernels of their own when compiled.
        contents: fields and options that use the same kernels in another way.
    """

    call: Callable[[Case, torch.device], Call]
    variants: tuple[dict[str, Any], ...]
    contents: tuple[dict[str, Any], ...] = ()


_VARIANTS: tuple[dict[str, Any], ...] = ({}, {"mask": "packed"}, {"groups": 2}, {"dropout": 0.1})
KERNELS = {
    "cope": Kernel(
        _cope,
        (
            *(*_VARIANTS, {"mask": "padding", "gate": "separate"}, {"gate": "value"}, {"own_query": True}),
            *({"add": "alibi"}, {"add": "relative"}, {"knots": 64}),
        ),
        (
            *({"gates": "open"}, {"gates": "closed"}, {"positions": 2}, {"positions": 33}, {"positions": 300}),
            {"knots": 5, "gates": "open"},
        ),
    ),
    "pope": Kernel(_pope, (*_VARIANTS, {"partial": True, "shift": False})),
    "plain": Kernel(_plain, _VARIANTS),
    "fox": Kernel(functools.partial(_plain, decay="fox"), _VARIANTS),
    "alibi": Kernel(functools.partial(_plain, decay="alibi"), _VARIANTS),
    "relative": Kernel(_relative, _VARIANTS),
    "cope_alibi": Kernel(functools.partial(_scan, slopes=True), _VARIANTS),
    "stick_breaking": Kernel(functools.partial(_scan, slopes=False), _VARIANTS),
    "token_gated_cope": Kernel(_token_gated, _VARIANTS[:2]),
}
