"""The attention providers: the timed functions, their inputs, and the references for their checks.

Inputs and references are those of `kernel_cases`.

Axes: B batch, H heads, T length, D head dim.
"""

import contextlib
import dataclasses
import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from whatwhere.attention_blockwise import biases_of, blockwise_attention
from whatwhere.attention_triton import run_kernel
from whatwhere.position_base import PositionContext
from whatwhere.position_pope import pope_frequencies

from .kernel_cases import KERNELS, Call, case
from .measure import CheckFailed, Shape, Unsupported, captured
from .references import checked_gradient, chosen_rows, in_parts, results_of

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
DIRECTIONS = ("forward", "backward", "forward+backward", "decoding", "decoding graph")
# Further encodings, by their kernels only.
OTHERS = ("relative", "cope+alibi", "cope+relative", "token_gated_cope")
# Default providers; on a GPU those of `FIRST`, then those of `MORE`.
HOST_PROVIDERS = ("rope-sdpa", "cope-half", "cope-closed", "cope-listing", "pope-sdpa", "fox", "alibi")
FIRST = (
    *("rope-sdpa-cudnn", "rope-sdpa-flash", "rope-sdpa-efficient", "plain-triton", "cope-triton-half", "pope-triton"),
    *("pope-sdpa-unpadded-cudnn", "pope-sdpa-padded-flash", "fox-triton", "alibi-triton"),
)
MORE = (
    *("pope-sdpa-padded-cudnn", "pope-sdpa-unpadded-efficient", "pope-sdpa-padded-efficient"),
    *("pope-sdpa-unpadded-flash", "cope-triton-open", "cope-triton-closed"),
    *(f"{name}-triton" for name in OTHERS),
    *("cope-listing", "cope-half", "fox", "alibi", "rope-sdpa-math"),
)
# What is also decoded with other batches.
DECODED = ("rope-sdpa-cudnn", "plain-triton", "cope-triton-half", "pope-triton", "fox-triton")
# The cases of `kernel_cases` that the kinds of providers compute: the kernel and its options.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in KERNELS},
    "rope": ("plain", {}),
    "cope-half": ("cope", {}),
    **{f"cope-{gates}": ("cope", {"gate_values": gates}) for gates in ("open", "closed")},
    **{name: ("cope", {"encoding": name}) for name in ("cope+alibi", "cope+relative")},
}
BASELINES = ("rope-sdpa", *(f"rope-sdpa-{backend}" for backend in BACKENDS))
# Third-party providers, whose errors are not our failures.
FOREIGN = ("pope-pytorch",)
# Those that run only by name.
NAMED = ("cope-open", "pope-sdpa-padded-math", "pope-sdpa-unpadded-math")
PROVIDERS = dict.fromkeys((*BASELINES, *HOST_PROVIDERS, *FIRST, *MORE, *FOREIGN, *NAMED))
# PyTorch's providers: errors are not our failures, but a failed check means that our check is wrong.
STOCK_PREFIXES = ("rope-sdpa", "pope-sdpa-")


@dataclasses.dataclass
class Provider:
    """One way to compute attention.

    Attributes:
        kind: of its reference and its inputs; see `KINDS`.
        function: the timed function of the inputs.
        decode: computes the newest query against all keys, or None.
        context: for all calls.
        tolerance: an error up to this share of the norm always passes.
    """

    kind: str
    function: Callable[..., torch.Tensor]
    decode: Callable[[], torch.Tensor] | None = None
    context: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    tolerance: float = 1e-4


def relative_errors(
    found: Sequence[torch.Tensor],
    plain: Sequence[torch.Tensor],
    exact: Sequence[torch.Tensor],
    names: Sequence[str],
    *,
    factor: float,
    tolerance: float,
    scale: float = 0.0,
) -> float:
    """Compares tensors with `exact` ones in float64; raises CheckFailed if an error is too large, or NaN.

    Returns the largest error, as a share of the allowed one.

    Args:
        plain: from full-matrix attention in the type of `found`.
        factor: the allowed multiple of the error of `plain`.
        tolerance: an error up to this share of the norm is always allowed.
        scale: lower bound of the norm, for tensors that are small because large terms cancel.
    """
    share = 0.0
    for name, ours, theirs, truth in zip(names, found, plain, exact):
        norm = max(truth.norm().item(), scale)
        error, allowed = (ours - truth).norm().item(), factor * (theirs - truth).norm().item()
        allowed = max(allowed, tolerance * norm)
        # `not <=`, so that NaN fails.
        if not error <= allowed:
            raise CheckFailed(f"{name} is off by {error:.3g}; allowed {allowed:.3g} of {norm:.3g}")
        share = max(share, error / allowed if allowed else error)
    return share


class Workload:
    """Inputs of one shape, their providers and references."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        batch, heads, length, head_dim, _ = shape
        self.shape, self.dtype, self.device = (batch, heads, length, head_dim), dtype, device
        self.scaling = head_dim**-0.5
        # Drawn in float32, because random numbers in float16 differ between devices.
        generator = torch.Generator(device).manual_seed(1)
        self.grad = torch.randn(*self.shape, generator=generator, device=device).to(dtype)
        # The tables are computed in float32; the timed calls convert them once, as a model does for all its layers.
        rotary = LlamaRotaryEmbedding(LlamaConfig(hidden_size=heads * head_dim, num_attention_heads=heads)).to(device)
        self.rotary = rotary(torch.zeros((), device=device), torch.arange(length, device=device)[None])
        self.rotary_cast = tuple(table.to(dtype) for table in self.rotary)
        self._calls: dict[str, Call] = {}
        self._references: dict[str, tuple[Any, ...]] = {}
        self.rows = chosen_rows(length, device)
        self.parts = in_parts(self.rows, length)

    # Inputs and references.

    def call(self, kind: str) -> Call:
        """Returns inputs and reference of a kind of provider, and its kernel; the same each time."""
        if kind not in self._calls:
            # One kind at a time, since long inputs take gigabytes.
            self._calls = {kind: self._make_call(kind)}
        return self._calls[kind]

    def _make_call(self, kind: str) -> Call:
        name, options = KINDS[kind]
        batch, heads, length, head_dim = self.shape
        shape = {"batch": batch, "heads": heads, "groups": heads}
        one = case(name, str(self.dtype).removeprefix("torch."), head_dim, length, **shape, **options)
        call = KERNELS[name].call(one, self.device)
        if kind == "rope":
            plain = call.reference

            def rotated(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, rows: torch.Tensor) -> Any:
                tables = (table.to(query.dtype) for table in self.rotary)
                return plain(*apply_rotary_pos_emb(query, key, *tables), value, rows=rows)

            call = call._replace(reference=rotated)
        if kind == "pope":
            # The timed functions begin before the magnitudes.
            magnitudes = call.reference

            def of_raw(query: torch.Tensor, key: torch.Tensor, *rest: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
                return magnitudes(F.softplus(query), F.softplus(key), *rest, rows=rows)

            states = KERNELS["plain"].call(dataclasses.replace(one, kernel="plain"), self.device).inputs
            call = call._replace(inputs=[*states, *call.inputs[3:]], reference=of_raw)
        return call._replace(inputs=[tensor.requires_grad_() for tensor in call.inputs])

    def input_bytes(self, kind: str) -> int:
        """Returns the bytes of inputs, position tables and the gradient of the output."""
        tensors = [*self.call(kind).inputs, self.grad]
        if kind == "rope":
            tensors += self.rotary_cast
        if kind == "pope":
            tensors += self.call(kind).layer(*self.call(kind).inputs)[1].shared["pope"][:2]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def _part(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the last head of the last batch entry; parameters of a layer as they are."""
        return tensor[-1:, -1:] if tensor.dim() > 2 else tensor

    def _one_head(self, call: Call, dtype: torch.dtype) -> list[torch.Tensor]:
        """Copies that part of the inputs; float32 tensors stay float32 in low precision."""
        parts = []
        for tensor in call.inputs:
            wanted = dtype if dtype == torch.float64 or tensor.dtype == self.dtype else tensor.dtype
            parts.append(self._part(tensor).detach().to(wanted).requires_grad_())
        return parts

    def references(self, kind: str) -> tuple[Any, ...]:
        """Returns the incoming gradient, and output and gradients of one head, in the timed type and in float64."""
        if kind not in self._references:
            call = self.call(kind)
            plain, exact = (self._one_head(call, dtype) for dtype in (self.dtype, torch.float64))
            grad, _ = checked_gradient(self._part(self.grad), call.undecided, exact, self.parts)
            results = (results_of(call.reference, inputs, grad, self.parts) for inputs in (plain, exact))
            self._references[kind] = (grad, *results)
        return self._references[kind]

    def check(self, provider: Provider) -> float:
        """Compares output and gradients of one head with float64, for all rows or some of them; raises CheckFailed.

        The incoming gradient of other heads and rows is 0, so that all other gradients are compared completely.
        """
        grad, plain, exact = self.references(provider.kind)
        call = self.call(provider.kind)
        only = torch.zeros_like(self.grad)
        only[-1:, -1:] = grad
        out = provider.function(*call.inputs)
        gradients = torch.autograd.grad(out, call.inputs, only)
        found = [self._part(out.detach())[:, :, self.rows], *map(self._part, gradients)]
        del out, gradients
        scale = 0.1 * only.norm(dtype=torch.float32).item()
        names = ("output", *call.names)
        return self._errors(provider, found, plain, exact, names, scale=scale)

    def check_decoding(self, provider: Provider, out: torch.Tensor) -> None:
        """Compares the newest row; raises CheckFailed."""
        _, plain, exact = self.references(provider.kind)
        newest = slice(self.rows.numel() - 1, None)
        rows = [self._part(out)], [plain[0][:, :, newest]], [exact[0][:, :, newest]]
        self._errors(provider, *rows, ["decoded row"])

    def _errors(self, provider: Provider, *compared: Any, scale: float = 0.0) -> float:
        # The error of a few rows varies, so a fixed share is also allowed.
        tolerance = max(provider.tolerance, 4 * torch.finfo(self.dtype).eps)
        return relative_errors(*compared, factor=2, tolerance=tolerance, scale=scale)

    # Providers.

    def provider(self, name: str) -> Provider:
        """Returns a provider; raises Unsupported if it does not support this device or is not installed."""
        if name.startswith("rope-"):
            return self._rope(name)
        if name.startswith("pope-"):
            return self._pope(name)
        kind = "cope-half" if name == "cope-listing" else name.replace("-triton", "")
        call = self.call(kind)
        if name == "cope-listing":
            rows = torch.arange(self.shape[2], device=self.device)
            return Provider(kind, functools.partial(call.reference, rows=rows))
        function: Callable[..., torch.Tensor] = functools.partial(self._blockwise, call)
        if "triton" in name:
            self._check_triton()
            function = call.kernel
        query, *others = call.inputs
        newest = query[:, :, -1:].detach().contiguous()
        decode = functools.partial(function, newest, *others)
        return Provider(kind, function, decode)

    def _blockwise(self, call: Call, *inputs: torch.Tensor) -> torch.Tensor:
        encodings, context = call.layer(*inputs)
        biases = biases_of(encodings, context, self.scaling)
        return blockwise_attention(*inputs[:3], scaling=self.scaling, biases=biases)

    def _backend(self, name: str) -> Callable[[], contextlib.AbstractContextManager]:
        backend = BACKENDS.get(name.rpartition("-")[2])
        return contextlib.nullcontext if backend is None else lambda: sdpa_kernel([backend])

    def _rope(self, name: str) -> Provider:
        cos, sin = self.rotary_cast

        def function(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            query, key = apply_rotary_pos_emb(query, key, cos, sin)
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)

        # Cached keys are already rotated; the new query and the new key are not.
        query, key, value = self.call("rope").inputs
        newest = [tensor[:, :, -1:].detach().contiguous() for tensor in (query, key)]
        cached = apply_rotary_pos_emb(query[:, :, :1].detach(), key.detach(), cos, sin)[1]

        def decode() -> torch.Tensor:
            query, _ = apply_rotary_pos_emb(*newest, cos[:, -1:], sin[:, -1:])
            return F.scaled_dot_product_attention(query, cached, value)

        return Provider("rope", function, decode, self._backend(name))

    def _pope(self, name: str) -> Provider:
        if name == "pope-pytorch":
            return self._pope_pytorch()
        if name == "pope-triton":
            self._check_triton()
        call = self.call("pope")
        query, key, value, delta = call.inputs
        newest = [tensor[:, :, -1:].detach().contiguous() for tensor in (query, key)]
        # With the tables, which are computed once for all layers of a model.
        encodings: Any
        encodings, of_all = call.layer(*call.inputs)
        _, of_newest = call.layer(newest[0], *call.inputs[1:])

        def attend(
            query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, delta: torch.Tensor, context: PositionContext
        ) -> torch.Tensor:
            encodings["pope"].delta.weight = delta
            if name == "pope-triton":
                options = {"key_ranges": None, "scaling": self.scaling, "dropout": 0.0}
                return run_kernel(encodings, query, key, value, context, **options)
            query, key = encodings["pope"].after_cache(query, key, context)
            width = value.shape[-1]
            if "unpadded" not in name:
                value = F.pad(value, (0, key.shape[-1] - width))
            causal = query.shape[2] > 1
            out = F.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=self.scaling)
            return out[..., :width]

        def function(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
            query, key = encodings["pope"].before_cache(query, key, of_all)
            return attend(query, key, value, delta, of_all)

        # The cache contains magnitudes; those of the new query and the new key must be computed.
        with torch.no_grad():
            cached = encodings["pope"].before_cache(newest[0], key, of_all)[1]

        def decode() -> torch.Tensor:
            query, _ = encodings["pope"].before_cache(newest[0], newest[1], of_newest)
            return attend(query, cached, value, delta, of_newest)

        return Provider("pope", function, decode, self._backend(name))

    def _pope_pytorch(self) -> Provider:
        """The public package, which takes raw queries, keys and phases, and has no fused decoding."""
        try:
            package = importlib.import_module("PoPE_pytorch")
        except ImportError as error:
            raise Unsupported(f"not installed: {error}") from error
        call = self.call("pope")
        part: Any = call.layer(*call.inputs)[0]["pope"]
        frequencies = pope_frequencies(part.config, part.parameters_, self.device)
        phases = torch.arange(self.shape[2], device=self.device)[:, None].float() * frequencies

        def function(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
            part.delta.weight = delta
            shifted = (phases, part.delta(None))
            return package.flash_attn_with_pope(query, key, value, pos_emb=shifted, causal=True)

        # A larger tolerance, since only the function must be the same, not the rounding.
        return Provider("pope", function, tolerance=2e-2)

    def _check_triton(self) -> None:
        try:
            launch = importlib.import_module("whatwhere.kernel_launch")
        except ImportError as error:
            raise Unsupported(f"not available: {error}") from error
        if self.device.type != "cuda" and not launch.INTERPRETED:
            raise Unsupported("Triton kernels need a CUDA device (or, for tests, TRITON_INTERPRET=1)")

    # Timing.

    def run(self, provider: Provider, direction: str) -> Callable[[], Any] | None:
        """Returns the function to time, or None if the provider has no such direction.

        The function owns everything it needs for repeated calls, such as the graph of a backward.
        """
        inputs = self.call(provider.kind).inputs
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


def tiles_note() -> str:
    """Returns the tiles of the last kernels."""
    from whatwhere.kernel_launch import CHOSEN

    return ", ".join(dict.fromkeys(f"{slot[0]} {tiles}" for slot, tiles in CHOSEN.items()))
