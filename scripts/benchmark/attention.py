"""The attention providers: the timed functions, their inputs, and the references for their checks.

Axes: B batch, H heads, T length, D head dim, R rotated channels, P positions in CoPE's table.
"""

import contextlib
import dataclasses
import functools
import importlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from whatwhere import WhatWhereLlamaConfig
from whatwhere.attention_blockwise import Bias, blockwise_attention
from whatwhere.position_alibi import ALiBiTerm, alibi_slopes
from whatwhere.position_base import PositionContext
from whatwhere.position_cope import CoPETerm
from whatwhere.position_fox import FoXTerm
from whatwhere.position_pope import PolarTables, PoPE, PoPEParameters, pope_frequencies

from .measure import CheckFailed, Refused, captured
from .references import (
    checked_gradient,
    chosen_rows,
    cope_reference,
    in_parts,
    plain_reference,
    pope_reference,
    results_of,
    rope_reference,
    scan_reference,
    undecided_rows,
)

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
DIRECTIONS = ("forward", "backward", "forward+backward", "decoding", "decoding graph")
# Default providers; on a GPU those of `FIRST`, then those of `MORE`.
HOST_PROVIDERS = ("rope-sdpa", "cope-half", "cope-closed", "cope-listing", "pope-sdpa", "fox", "alibi")
FIRST = (
    *("rope-sdpa-flash", "rope-sdpa-cudnn", "rope-sdpa-efficient"),
    *("cope-triton-half", "pope-triton", "fox-triton", "alibi-triton"),
)
MORE = (
    *("pope-sdpa-unpadded-cudnn", "pope-sdpa-padded-cudnn", "pope-sdpa-padded-flash", "pope-sdpa-padded-efficient"),
    *("pope-sdpa-unpadded-flash", "pope-sdpa-unpadded-efficient", "cope-triton-open", "cope-triton-closed"),
    *("pope-once", "pope-flex", "cope-once-half", "cope-flex-half", "cope-chip-half"),
    *("relative-triton", "stick_breaking-triton", "cope_alibi-triton", "cope+alibi-triton", "cope+relative-triton"),
    *("cope-listing", "cope-half", "fox", "alibi", "rope-sdpa-math"),
)
# Further encodings, by their kernels only.
OTHERS = ("relative", "cope+alibi", "cope+relative", "cope_alibi", "stick_breaking")
DISTANCES = 256
BASELINES = ("rope-sdpa", *(f"rope-sdpa-{backend}" for backend in BACKENDS))
PROVIDERS = (
    *BASELINES,
    "cope-listing",
    *(f"cope-{gates}" for gates in ("half", "open", "closed")),
    *(f"cope-triton-{gates}" for gates in ("half", "open", "closed")),
    *(f"pope-sdpa{how}" for how in ("", *(f"-{pad}-{name}" for pad in ("padded", "unpadded") for name in BACKENDS))),
    *("pope-triton", "pope-once", "pope-flex", "cope-once-half", "cope-flex-half", "cope-chip-half"),
    "pope-pytorch",
    *("fox", "fox-triton", "alibi", "alibi-triton", *(f"{name}-triton" for name in OTHERS)),
)
# Third-party providers, whose errors are not our failures.
FOREIGN = ("pope-pytorch",)
# PyTorch's providers: errors are not our failures, but a failed check means that our check is wrong.
STOCK_PREFIXES = ("rope-sdpa", "pope-sdpa-")


@dataclasses.dataclass
class Provider:
    """One way to compute attention.

    Attributes:
        kind: of its reference and its inputs.
        function: the timed function of the inputs.
        decode: computes the newest query against all keys, or None.
        context: context manager for all calls.
        tolerance: an error up to this share of the norm always passes.
    """

    kind: str
    function: Callable[..., torch.Tensor]
    decode: Callable[[], torch.Tensor] | None = None
    context: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    tolerance: float = 1e-4


class Errors(NamedTuple):
    """The largest errors of a comparison, relative to the reference's norm and to the allowed error."""

    relative: float
    share: float


def relative_errors(
    found: Sequence[torch.Tensor],
    plain: Sequence[torch.Tensor],
    exact: Sequence[torch.Tensor],
    names: Sequence[str],
    *,
    factor: float,
    tolerance: float,
    scale: float = 0.0,
) -> Errors:
    """Compares tensors with their float64 references.

    Args:
        found: the tensors to check.
        plain: the same from full-matrix attention in the type of `found`.
        exact: the same in float64.
        names: of the tensors, for messages.
        factor: the allowed multiple of the error of `plain`.
        tolerance: an error up to this share of the norm is always allowed.
        scale: lower bound of the norm, for tensors that are small because large terms cancel.

    Raises:
        CheckFailed: an error is larger, or NaN.
    """
    relative = share = 0.0
    for name, ours, theirs, truth in zip(names, found, plain, exact):
        norm = max(truth.norm().item(), scale)
        error, allowed = (ours - truth).norm().item(), factor * (theirs - truth).norm().item()
        allowed = max(allowed, tolerance * norm)
        # `not <=`, so that NaN fails.
        if not error <= allowed:
            raise CheckFailed(f"{name} is off by {error:.3g}; allowed {allowed:.3g} of {norm:.3g}")
        relative = max(relative, error / norm if norm else error)
        share = max(share, error / allowed if allowed else error)
    return Errors(relative, share)


class Workload:
    """Inputs of one shape, their providers and references."""

    def __init__(
        self,
        *,
        batch: int,
        heads: int,
        length: int,
        head_dim: int,
        num_positions: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.shape = (batch, heads, length, head_dim)
        self.dtype, self.device = dtype, device
        self.scaling = head_dim**-0.5
        self.generator = torch.Generator(device).manual_seed(0)
        self.query, self.key, self.value = (self._random(*self.shape).requires_grad_() for _ in range(3))
        self.grad = self._random(*self.shape)
        self.table = self._random(head_dim, num_positions).requires_grad_()
        fields: dict[str, Any] = {
            "hidden_size": heads * head_dim,
            "num_attention_heads": heads,
            "max_position_embeddings": max(length, 2),
        }
        config = WhatWhereLlamaConfig(**fields, num_key_value_heads=heads)
        positions = torch.arange(length, device=device)[None]
        # The tables are computed in float32; the timed calls convert them once, as a model does for all its layers.
        rotary = LlamaRotaryEmbedding(LlamaConfig(**fields)).to(device)
        self.rotary = rotary(torch.zeros((), device=device), positions)
        self.rotary_cast = tuple(table.to(dtype) for table in self.rotary)
        parameters = PoPEParameters()
        self.pope = PoPE(config, parameters, 0).to(device)
        assert self.pope.delta is not None, "PoPE has phase shifts by default"
        self.phase_shift = self.pope.delta
        self.delta = self.phase_shift.weight
        with torch.no_grad():
            self.delta.uniform_(-2.0, 0.0, generator=self.generator)
        self.polar_tables = PolarTables(head_dim, parameters.theta)
        self.polar = self._polar(positions, positions)
        self.phases = positions[0, :, None].float() * pope_frequencies(head_dim, parameters.theta, device)
        self._positions = positions
        self.slopes = torch.tensor(alibi_slopes(heads), device=device)
        self.distances = self._random(DISTANCES, head_dim).requires_grad_()
        self._inputs: dict[str, tuple[torch.Tensor, ...]] = {}
        self._references: dict[str, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        self._grads: dict[str, torch.Tensor] = {}
        self.rows = chosen_rows(length, device)
        self.parts = in_parts(self.rows, length)

    def _random(self, *shape: int) -> torch.Tensor:
        # Drawn in float32, because random numbers in float16 differ between devices.
        return torch.randn(*shape, generator=self.generator, device=self.device).to(self.dtype)

    def _polar(self, query_positions: torch.Tensor, key_positions: torch.Tensor) -> PositionContext:
        past, length = key_positions.shape[1] - query_positions.shape[1], key_positions.shape[1]
        context = PositionContext(query_positions, past_length=past, key_length=length, consecutive=True)
        context.shared["pope"] = self.polar_tables(torch.zeros((), device=self.device), context)
        return context

    # Inputs and references.

    def inputs(self, kind: str) -> tuple[torch.Tensor, ...]:
        """Returns the differentiable inputs of a kind of provider."""
        if kind not in self._inputs:
            self._inputs[kind] = self._make_inputs(kind)
        return self._inputs[kind]

    def _make_inputs(self, kind: str) -> tuple[torch.Tensor, ...]:
        if kind in ("rope", "alibi", "cope_alibi", "stick_breaking"):
            return (self.query, self.key, self.value)
        if kind == "relative":
            return (self.query, self.key, self.value, self.distances)
        if kind.startswith("cope+"):
            last = (self.distances,) if kind == "cope+relative" else ()
            return (self.query, self.key, self.value, self.table, *last)
        if kind == "pope":
            return (self.query, self.key, self.value, self.delta)
        if kind == "cope-half":
            return (self.query, self.key, self.value, self.table)
        if kind == "fox":
            gates = torch.randn(self.shape[:3], generator=self.generator, device=self.device)
            return (self.query, self.key, self.value, F.logsigmoid(gates + 3.0).requires_grad_())
        query, key = self._random(*self.shape) * 0.5, self._random(*self.shape) * 0.5
        # One shared channel sets every gate logit to about 8 or -8, and so every gate to about 1 or 0.0003.
        sign = 1.0 if kind == "cope-open" else -1.0
        query[..., 0], key[..., 0] = 8.0, sign * float(self.shape[-1]) ** 0.5
        return (query.requires_grad_(), key.requires_grad_(), self.value, self.table)

    def input_bytes(self, kind: str) -> int:
        """Returns the bytes of inputs, position tables and the gradient of the output."""
        tensors = [*self.inputs(kind), self.grad]
        if kind == "rope":
            tensors += self.rotary_cast
        if kind == "pope":
            tensors += self.polar.shared["pope"][:2]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def _one_head(self, inputs: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
        """Copies the last head of the last batch entry of the inputs; float32 tensors stay float32 in low precision."""
        parts = []
        for tensor in inputs:
            part = self._part(tensor)
            wanted = dtype if dtype == torch.float64 or tensor.dtype == self.dtype else tensor.dtype
            parts.append(part.detach().to(wanted).requires_grad_())
        return parts

    def _part(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() > 2:
            return tensor[-1:, -1:]
        return tensor[-1:] if tensor is self.delta or tensor.shape == self.delta.shape else tensor

    def _reference(self, kind: str, *inputs: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        options: dict[str, Any] = {"rows": rows, "scaling": self.scaling}
        if kind == "rope":
            return rope_reference(*inputs, tables=self.rotary, **options)
        if kind == "pope":
            query, key, value, delta = inputs
            query, key = F.softplus(query), F.softplus(key)
            tables = tuple(table[:, 0] for table in self.polar.shared["pope"])
            return pope_reference(query, key, value, delta, tables=tables, **options)
        if kind in ("fox", "alibi"):
            decay = tuple(part[:, -1:] for part in self._decay(*inputs[3:]))
            return plain_reference(*inputs[:3], decay=(decay[0], decay[1]), **options)
        if kind in ("cope_alibi", "stick_breaking"):
            query, key, value = inputs
            slopes = -self.slopes[-1:] if kind == "cope_alibi" else None
            return scan_reference(query, key, value, slopes, **options)
        if kind == "relative":
            return plain_reference(*inputs[:3], relative=(inputs[3], self._positions, self._positions), **options)
        if kind == "cope+relative":
            options["relative"] = inputs[4], self._positions, self._positions
        elif kind == "cope+alibi":
            options["decay"] = tuple(part[:, -1:] for part in self._decay())
        return cope_reference(*inputs[:4], **options)

    def references(self, kind: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Returns output and gradients of one head, in the timed type and in float64."""
        if kind not in self._references:
            plain, exact = (self._one_head(self.inputs(kind), dtype) for dtype in (self.dtype, torch.float64))
            undecided = None
            if kind.startswith(("cope-", "cope+")):
                options: dict[str, Any] = {"scaling": self.scaling, "num_positions": self.table.shape[1]}

                def undecided(query: torch.Tensor, key: torch.Tensor, *_: Any, rows: torch.Tensor) -> torch.Tensor:
                    return undecided_rows(query, key, rows=rows, **options)

            self._grads[kind], _ = checked_gradient(self._part(self.grad), undecided, exact, self.parts)
            reference = functools.partial(self._reference, kind)
            results = [results_of(reference, inputs, self._grads[kind], self.parts) for inputs in (plain, exact)]
            self._references[kind] = (results[0], results[1])
        return self._references[kind]

    def check(self, provider: Provider) -> Errors:
        """Compares output and gradients of one head with float64, for all rows or some of them.

        The incoming gradient of other heads and rows is 0, so that the gradients of keys, values, table and phases are
        compared completely. Raises CheckFailed.
        """
        plain, exact = self.references(provider.kind)
        inputs = self.inputs(provider.kind)
        only = torch.zeros_like(self.grad)
        only[-1:, -1:] = self._grads[provider.kind]
        out = provider.function(*inputs)
        gradients = torch.autograd.grad(out, inputs, only)
        found = [self._part(out.detach())[:, :, self.rows], *(self._part(gradient) for gradient in gradients)]
        del out, gradients
        last = {"pope": "ddelta", "fox": "dlog_forget"}.get(provider.kind, "dtable")
        names = ("output", "dq", "dk", "dv", last, "ddistances")
        scale = 0.1 * only.norm(dtype=torch.float32).item()
        return relative_errors(found, plain, exact, names, factor=2, tolerance=provider.tolerance, scale=scale)

    def check_decoding(self, provider: Provider, out: torch.Tensor) -> Errors:
        """Compares the newest row."""
        plain, exact = self.references(provider.kind)
        newest = slice(self.rows.numel() - 1, None)
        # The error of a single row varies, so a fixed share is also allowed.
        tolerance = max(provider.tolerance, 4 * torch.finfo(self.dtype).eps)
        return relative_errors(
            [self._part(out)],
            [plain[0][:, :, newest]],
            [exact[0][:, :, newest]],
            ["decoded row"],
            factor=2,
            tolerance=tolerance,
        )

    # Providers.

    def provider(self, name: str) -> Provider:
        """Returns a provider; raises Refused if it does not support this device or is not installed."""
        family = name.split("-")[0]
        makers = {"rope": self._rope, "cope": self._cope, "pope": self._pope, **dict.fromkeys(OTHERS, self._other)}
        return makers.get(family, self._decayed)(name)

    def _backend(self, name: str) -> Callable[[], contextlib.AbstractContextManager]:
        backend = BACKENDS.get(name.rpartition("-")[2])
        return contextlib.nullcontext if backend is None else lambda: sdpa_kernel([backend])

    def _rope(self, name: str) -> Provider:
        cos, sin = self.rotary_cast

        def function(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            query, key = apply_rotary_pos_emb(query, key, cos, sin)
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)

        # Cached keys are already rotated; the new query and the new key are not.
        newest = [tensor[:, :, -1:].detach().contiguous() for tensor in (self.query, self.key)]
        cached = apply_rotary_pos_emb(self.query[:, :, :1].detach(), self.key.detach(), cos, sin)[1]

        def decode() -> torch.Tensor:
            query, _ = apply_rotary_pos_emb(*newest, cos[:, -1:], sin[:, -1:])
            return F.scaled_dot_product_attention(query, cached, self.value)

        return Provider("rope", function, decode, self._backend(name))

    def _cope(self, name: str) -> Provider:
        if name == "cope-listing":
            rows = torch.arange(self.shape[2], device=self.device)

            def listing(*inputs: torch.Tensor) -> torch.Tensor:
                return cope_reference(*inputs, rows=rows, scaling=self.scaling)

            return Provider("cope-half", listing)
        kind = f"cope-{name.rpartition('-')[2]}"
        if "flex" in name or "chip" in name:
            self._kernel("kernel_cope")
            from .candidates import cope_flex, cope_on_chip

            attend = cope_flex if "flex" in name else cope_on_chip
            return Provider(kind, functools.partial(attend, scaling=self.scaling, position_scale=1.0))
        if "triton" in name or "once" in name:
            attention = self._kernel("kernel_cope").cope_attention
            from .candidates import cope_decode_once

            def function(
                query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, table: torch.Tensor
            ) -> torch.Tensor:
                once = "once" in name and query.shape[2] == 1
                attend = cope_decode_once if once else attention
                return attend(query, key, value, table, scaling=self.scaling, position_scale=1.0)

        else:

            def function(
                query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, table: torch.Tensor
            ) -> torch.Tensor:
                bias = Bias(CoPETerm, (table,), (1.0,))
                return blockwise_attention(query, key, value, scaling=self.scaling, biases=[bias])

        query, key, value, table = self.inputs(kind)
        newest = query[:, :, -1:].detach().contiguous()
        return Provider(kind, function, lambda: function(newest, key, value, table))

    def _pope(self, name: str) -> Provider:
        if name == "pope-pytorch":
            return self._pope_pytorch()
        if name in ("pope-triton", "pope-once"):
            attend = self._pope_kernel(once=name == "pope-once")
        else:
            attend = self._pope_rotated("unpadded" not in name, flex=name == "pope-flex")

        def function(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
            return attend(*self.pope.before_cache(query, key, self.polar), value, self.polar, True)

        # The cache contains magnitudes; those of the new query and the new key must be computed.
        newest = [tensor[:, :, -1:].detach().contiguous() for tensor in (self.query, self.key)]
        with torch.no_grad():
            cached = self.pope.before_cache(newest[0], self.key, self.polar)[1]
        polar = self._polar(self._positions[:, -1:], self._positions)

        def decode() -> torch.Tensor:
            query, _ = self.pope.before_cache(newest[0], newest[1], polar)
            return attend(query, cached, self.value, polar, False)

        context = self._backend(name) if name.startswith("pope-sdpa-") else contextlib.nullcontext
        return Provider("pope", function, decode, context)

    def _pope_kernel(self, *, once: bool) -> Callable[..., torch.Tensor]:
        """Our kernel; with `once`, decoding by one launch."""
        attention = self._kernel("kernel_pope").pope_attention
        from .candidates import decode_once

        def attend(
            query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, polar: PositionContext, causal: bool
        ) -> torch.Tensor:
            tables = tuple(table[:, 0] for table in polar.shared["pope"])
            if once and query.shape[2] == 1:
                return decode_once(query, key, value, scaling=self.scaling, polar=(*tables, self.phase_shift()))
            return attention(query, key, value, (*tables, self.phase_shift()), scaling=self.scaling)

        return attend

    def _pope_rotated(self, padded: bool, *, flex: bool) -> Callable[..., torch.Tensor]:
        """PyTorch's attention on turned pairs: SDPA, with values as wide as keys or not, or FlexAttention."""
        from .candidates import causal_flex

        def attend(
            query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, polar: PositionContext, causal: bool
        ) -> torch.Tensor:
            query, key = self.pope.after_cache(query, key, polar)
            width = value.shape[-1]
            if flex:
                return causal_flex(query, key, value, scaling=self.scaling)
            if padded:
                value = F.pad(value, (0, key.shape[-1] - width))
            out = F.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=self.scaling)
            return out[..., :width]

        return attend

    def _pope_pytorch(self) -> Provider:
        """The public package, which takes raw queries, keys and phases, and has no fused decoding."""
        try:
            package = importlib.import_module("PoPE_pytorch")
        except ImportError as error:
            raise Refused(f"not installed: {error}") from error
        attention = package.flash_attn_with_pope

        def function(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
            return attention(query, key, value, pos_emb=(self.phases, self.phase_shift()), causal=True)

        # A larger tolerance, since only the function must be the same, not the rounding.
        return Provider("pope", function, tolerance=2e-2)

    def _decay(self, *log_forget: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the numbers of the rows and of the keys whose differences FoX, or without gates ALiBi, adds."""
        if log_forget:
            sums = log_forget[0].double().cumsum(-1)
            return sums, sums
        numbers = -self.slopes[:, None].double() * self._positions[:, None]
        return numbers, numbers

    def _decayed(self, name: str) -> Provider:
        """FoX and ALiBi."""
        kind = name.split("-")[0]
        if name.endswith("-triton"):
            attention = self._kernel("kernel_plain").plain_attention

            def function(query: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
                rows, keys = self._decay(*inputs[2:])
                decay = rows[:, :, -query.shape[2] :], keys
                return attention(query, *inputs[:2], decay=decay, scaling=self.scaling)

        else:

            def function(query: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
                positions = self._positions[:, -query.shape[2] :], self._positions
                bias = Bias(FoXTerm, inputs[2:]) if kind == "fox" else Bias(ALiBiTerm, (self.slopes, *positions))
                return blockwise_attention(query, *inputs[:2], scaling=self.scaling, biases=[bias])

        query, *others = self.inputs(kind)
        newest = query[:, :, -1:].detach().contiguous()
        return Provider(kind, function, lambda: function(newest, *others))

    def _other(self, name: str) -> Provider:
        kind = name.removesuffix("-triton")
        modules = {"relative": "kernel_relative", "cope_alibi": "kernel_scan", "stick_breaking": "kernel_scan"}
        kernel = self._kernel(modules.get(kind, "kernel_cope"))

        def function(
            query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *tables: torch.Tensor
        ) -> torch.Tensor:
            positions = self._positions[:, -query.shape[2] :], self._positions
            if kind == "relative":
                return kernel.relative_attention(query, key, value, *tables, *positions, scaling=self.scaling)
            if kind == "cope_alibi":
                return kernel.cope_alibi_attention(query, key, value, -self.slopes, scaling=self.scaling)
            if kind == "stick_breaking":
                return kernel.stick_attention(query, key, value, scaling=self.scaling)[0]
            options: dict[str, Any] = {"scaling": self.scaling, "position_scale": 1.0}
            if kind == "cope+relative":
                options["relative"] = tables[1], *positions
            else:
                rows, keys = self._decay()
                options["decay"] = rows[:, :, -query.shape[2] :], keys
            return kernel.cope_attention(query, key, value, tables[0], **options)

        query, *others = self.inputs(kind)
        newest = query[:, :, -1:].detach().contiguous()
        return Provider(kind, function, lambda: function(newest, *others))

    def _kernel(self, module: str) -> Any:
        try:
            launch = importlib.import_module("whatwhere.kernel_launch")
            found = importlib.import_module(f"whatwhere.{module}")
        except ImportError as error:
            raise Refused(f"not available: {error}") from error
        if self.device.type != "cuda" and not launch.INTERPRETED:
            raise Refused("Triton kernels need a CUDA device (or, for tests, TRITON_INTERPRET=1)")
        return found

    # Timing.

    def run(self, provider: Provider, direction: str) -> Callable[[], Any] | None:
        """Returns the function to time, or None if the provider has no such direction.

        The function owns everything it needs for repeated calls, such as the graph of a backward.
        """
        inputs = self.inputs(provider.kind)
        decode = provider.decode
        if direction == "forward":

            def forward() -> None:
                with torch.no_grad():
                    provider.function(*inputs)

            return forward
        if direction == "backward":
            out = provider.function(*inputs)
            return lambda: torch.autograd.grad(out, inputs, self.grad, retain_graph=True)
        if direction == "forward+backward":
            return lambda: torch.autograd.grad(provider.function(*inputs), inputs, self.grad)
        if decode is None or (direction == "decoding graph" and self.device.type != "cuda"):
            return None
        step = torch.no_grad()(decode)
        self.check_decoding(provider, step())
        if direction == "decoding":
            return step
        replay, out = captured(step)
        replay()
        self.check_decoding(provider, out)
        return replay


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Converts "no available kernel" into Refused, with the reasons from PyTorch's warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield
        except RuntimeError as error:
            text = str(error)
            if "No available kernel" not in text and "No viable backend" not in text:
                raise
            reasons = [" ".join(str(warning.message).split("(Triggered")[0].split()) for warning in caught]
            # Disabled kernels are not a reason.
            reasons = [reason for reason in dict.fromkeys(reasons) if "not enabled" not in reason]
            reasons = [reason for reason in reasons if not reason.endswith("not used because:")]
            raise Refused("; ".join(reasons) or text) from error


def tiles_note() -> str:
    """Returns the tiles of the last kernels."""
    try:
        launch = importlib.import_module("whatwhere.kernel_launch")
    except ImportError:
        return ""
    parts = []
    for slot, tiles in launch.CHOSEN.items():
        parts.append(f"{slot[0]} {tiles}")
    return ", ".join(dict.fromkeys(parts))
