"""Speed and memory of attention and of models; a number is printed only for what has just passed its check.

On a laptop (a minute with `--quick`, about ten without):

    python -m whatwhere.scripts.benchmark --quick
    python -m whatwhere.scripts.benchmark --lengths 1024,4096 --threads 2

On a GPU:

    python -m whatwhere.scripts.benchmark --device cuda --dtype bfloat16 --lengths 1024,4096,16384 --heads 16

Attention (`--parts attention`), shape batch x heads x length x head dim, ratios to RoPE + SDPA in the same run:

| provider | what is timed |
|---|---|
| rope-sdpa | Llama's rotation, then `scaled_dot_product_attention` |
| cope-listing | Listing 1 of the CoPE paper (left out above `--listing-limit`: it needs length x length memory) |
| cope-half | blockwise CoPE, gates near 0.5 (random content) |
| cope-closed | blockwise CoPE, gates near 0: its slowest case, every key is counted |
| pope-sdpa | PoPE's rotation, then SDPA with values padded to the keys' width |
| pope-blockwise | PoPE's rotation, then blockwise attention |

Models (`--parts model`): a training step (forward, loss, backward, AdamW) and a decoding step (one token after `length`
cached ones), ratios to the stock `LlamaForCausalLM`: ours with `rope`, `pope`, `cope`, at the same Llama weights.

Check of an attention row: output and every gradient of one head of the timed inputs, against full-matrix attention in
float64; the error may be at most three times that of full-matrix attention in the timed type, or 1e-4 of the norm
(sums in another order cancel differently). Check of a model row: the logits, and those of a cached step, against the
stock model (rope), or against the same model with the eager reference (cope, pope). A failed check ends the run with
exit code 1.

Timing: providers take turns, `--repeats` rounds after one warm-up, the listing after the others; the median counts.
`--clock cpu` counts the time of this process's threads instead of wall time: use it with `--threads 1` where other
programs share the machine. Peak memory is measured on CUDA only. Every row is appended to `--output` (CSV) with device,
versions and date.
"""

import argparse
import csv
import datetime
import pathlib
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from whatwhere import WhatWhereLlamaConfig, WhatWhereLlamaForCausalLM
from whatwhere.attention_blockwise import blockwise_attention, compute_dtype
from whatwhere.position_cope import CoPE, CoPEParameters
from whatwhere.position_pope import PolarTables, PoPE, PoPEParameters

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
FIELDS = (
    "date",
    "part",
    "provider",
    "direction",
    "shape",
    "dtype",
    "device",
    "threads",
    "clock",
    "milliseconds",
    "fastest",
    "ratio",
    "ratio_to",
    "peak_mib",
    "repeats",
    "torch",
    "transformers",
)


class CheckFailed(Exception):
    """A provider computes something else than its reference."""


class Timer:
    """Runs a function and returns milliseconds and, on CUDA, the peak memory in MiB."""

    def __init__(self, device: torch.device, clock: str) -> None:
        self.device = device
        self.now = time.perf_counter if clock == "wall" else time.process_time

    def __call__(self, function: Callable[[], Any]) -> tuple[float, float | None]:
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        start = self.now()
        function()
        if cuda:
            torch.cuda.synchronize()
        elapsed = (self.now() - start) * 1e3
        return elapsed, torch.cuda.max_memory_allocated() / 2**20 if cuda else None


def measure(
    runs: dict[str, dict[str, Callable[[], Any]]], timer: Timer, repeats: int
) -> dict[tuple[str, str], tuple[list[float], float | None]]:
    """Times `{provider: {direction: function}}` in turns; returns times and peak memory by provider and direction."""
    results: dict[tuple[str, str], tuple[list[float], float | None]] = {}
    for turn in range(repeats + 1):
        for provider, directions in runs.items():
            for direction, function in directions.items():
                elapsed, peak = timer(function)
                if turn > 0:
                    times, _ = results.setdefault((provider, direction), ([], None))
                    results[provider, direction] = ([*times, elapsed], peak)
    return results


# Attention.


def full_matrix(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float) -> torch.Tensor:
    """Causal attention with all logits in memory: products in the type of the inputs, softmax in at least float32."""
    logits = (query @ key.transpose(2, 3)).to(compute_dtype(query.dtype)) * scaling
    future = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).triu(1)
    return torch.softmax(logits.masked_fill(future, float("-inf")), -1).to(value.dtype) @ value


def cope_listing(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The computation of Listing 1 of the CoPE paper: every step on the full matrix; table (D, P)."""
    logits = (query @ key.transpose(2, 3)).to(compute_dtype(query.dtype)) * query.shape[-1] ** -0.5
    logits = logits + torch.ones(logits.shape[-2:], dtype=logits.dtype, device=logits.device).tril().log()
    positions = torch.sigmoid(logits).flip(-1).cumsum(-1).flip(-1).clamp(max=table.shape[1] - 1)
    ceil, floor = positions.ceil().long(), positions.floor().long()
    z = query.to(logits.dtype) @ table.to(logits.dtype)
    fraction = positions - floor
    logits = logits + z.gather(-1, ceil) * fraction + z.gather(-1, floor) * (1 - fraction)
    return torch.softmax(logits, -1).to(value.dtype) @ value


class Provider:
    """One way to compute attention.

    Attributes:
        inputs: query, key, value and, for CoPE, the table; all require gradients.
        function: of the inputs; what is timed.
        reference: of the inputs, in any type; what must come out.
    """

    def __init__(
        self,
        inputs: Sequence[torch.Tensor],
        function: Callable[..., torch.Tensor],
        reference: Callable[..., torch.Tensor],
    ) -> None:
        self.inputs = list(inputs)
        self.function = function
        self.reference = reference

    def check(self, name: str, grad: torch.Tensor) -> None:
        """Compares output and gradients of the last head with float64; raises CheckFailed."""
        # No gradient enters the other heads, so the gradient of a shared table is that of this head alone.
        one = torch.zeros_like(grad)
        one[-1:, -1:] = grad[-1:, -1:]
        out = self.function(*self.inputs)
        found = [out[-1:, -1:].detach()]
        for tensor, gradient in zip(self.inputs, torch.autograd.grad(out, self.inputs, one)):
            found.append(gradient[-1:, -1:] if tensor.dim() == 4 else gradient)
        del out
        plain = self._reference(one.dtype, grad[-1:, -1:])
        exact = self._reference(torch.float64, grad[-1:, -1:])
        for what, ours, theirs, truth in zip(("output", "dq", "dk", "dv", "dtable"), found, plain, exact):
            error, allowed = (ours - truth).norm().item(), 3 * (theirs - truth).norm().item()
            # `not <=`, so that NaN fails.
            if not error <= max(allowed, 1e-4 * truth.norm().item()):
                raise CheckFailed(f"{name}: {what} is off by {error:.3g}; allowed {allowed:.3g} of {truth.norm():.3g}")

    def _reference(self, dtype: torch.dtype, grad: torch.Tensor) -> list[torch.Tensor]:
        inputs = []
        for tensor in self.inputs:
            part = tensor[-1:, -1:] if tensor.dim() == 4 else tensor
            inputs.append(part.detach().to(dtype).requires_grad_())
        out = self.reference(*inputs)
        return [out.detach(), *torch.autograd.grad(out, inputs, grad.to(dtype))]


def attention_providers(
    batch: int, heads: int, length: int, head_dim: int, num_positions: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Provider]:
    """Returns the attention providers by name."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    shape = (batch, heads, length, head_dim)
    scaling = head_dim**-0.5
    query, key, value = (random(*shape).requires_grad_() for _ in range(3))
    closed_query, closed_key = random(*shape) * 0.5, random(*shape) * 0.5
    # One channel that all share puts every logit near -8, and so every gate near 0.0003.
    closed_query[..., 0], closed_key[..., 0] = 8.0, -(float(head_dim) ** 0.5)
    closed_query, closed_key = closed_query.requires_grad_(), closed_key.requires_grad_()
    table = random(head_dim, num_positions).requires_grad_()
    config = WhatWhereLlamaConfig(
        hidden_size=heads * head_dim,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=max(length, 2),
    )
    positions = torch.arange(length, device=device)[None]
    llama = LlamaConfig(hidden_size=heads * head_dim, num_attention_heads=heads, max_position_embeddings=max(length, 2))
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(llama).to(device)
    cos, sin = rotary(torch.zeros((), device=device), positions)

    def rotated(query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return apply_rotary_pos_emb(query, key, cos.to(query.dtype), sin.to(query.dtype))

    def rope_sdpa(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(*rotated(query, key), value, is_causal=True)

    def rope_full(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return full_matrix(*rotated(query, key), value, scaling)

    cope = CoPE(config, CoPEParameters(num_positions=num_positions, scale_positions=False), 0).to(device)

    def cope_blockwise(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, table: torch.Tensor
    ) -> torch.Tensor:
        term = cope.block_term({}, scaling)
        term.tensors = (table,)
        return blockwise_attention(query, key, value, scaling=scaling, terms=[term])

    pope_parameters = PoPEParameters()
    pope = PoPE(config, pope_parameters, 0).to(device)
    pope.reset()
    context: dict[str, Any] = {"query_positions": positions, "key_positions": positions}
    context["pope"] = PolarTables(config, pope_parameters)(torch.zeros((), device=device), context)

    def polar(query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # The reference has one head; delta is the same for all heads here.
        return pope.rotate_cached(*pope.rotate(query, key, context), context)

    def pope_sdpa(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        query, key = polar(query, key)
        padded = F.pad(value, (0, key.shape[-1] - value.shape[-1]))
        out = F.scaled_dot_product_attention(query, key, padded, is_causal=True, scale=scaling)
        return out[..., : value.shape[-1]]

    def pope_blockwise(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return blockwise_attention(*polar(query, key), value, scaling=scaling)

    def pope_full(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return full_matrix(*polar(query, key), value, scaling)

    half, closed = (query, key, value, table), (closed_query, closed_key, value, table)
    return {
        "rope-sdpa": Provider((query, key, value), rope_sdpa, rope_full),
        "cope-half": Provider(half, cope_blockwise, cope_listing),
        "cope-closed": Provider(closed, cope_blockwise, cope_listing),
        "cope-listing": Provider(half, cope_listing, cope_listing),
        "pope-sdpa": Provider((query, key, value), pope_sdpa, pope_full),
        "pope-blockwise": Provider((query, key, value), pope_blockwise, pope_full),
    }


def benchmark_attention(arguments: argparse.Namespace, timer: Timer, write: Callable[..., None]) -> None:
    """Checks and times every attention provider at every length."""
    dtype = DTYPES[arguments.dtype]
    for length in arguments.lengths:
        providers = attention_providers(
            arguments.batch,
            arguments.heads,
            length,
            arguments.head_dim,
            arguments.num_positions,
            dtype,
            timer.device,
        )
        if length > arguments.listing_limit:
            del providers["cope-listing"]
        if arguments.providers:
            providers = {name: providers[name] for name in providers if name in {"rope-sdpa", *arguments.providers}}
        grad = torch.randn_like(providers["rope-sdpa"].inputs[2])
        runs: dict[str, dict[str, Callable[[], Any]]] = {}
        for name, provider in providers.items():
            provider.check(name, grad)

            def forward(provider: Provider = provider) -> None:
                with torch.no_grad():
                    provider.function(*provider.inputs)

            def both(provider: Provider = provider, grad: torch.Tensor = grad) -> None:
                torch.autograd.grad(provider.function(*provider.inputs), provider.inputs, grad)

            runs[name] = {"forward": forward, "forward+backward": both}
        shape = f"{arguments.batch}x{arguments.heads}x{length}x{arguments.head_dim}"
        # The listing comes last: after its gigabytes, the system serves the others' memory more slowly.
        listing = {name: runs.pop(name) for name in ("cope-listing",) if name in runs}
        timed = measure(runs, timer, arguments.repeats)
        write("attention", shape, timed | measure(listing, timer, arguments.repeats), "rope-sdpa")


# Models.


def benchmark_model(arguments: argparse.Namespace, timer: Timer, write: Callable[..., None]) -> None:
    """Checks and times a training step and a decoding step of our models and of the stock Llama."""
    dtype, device = DTYPES[arguments.dtype], timer.device
    fields: dict[str, Any] = {
        "vocab_size": 1024,
        "hidden_size": arguments.heads * arguments.head_dim,
        "intermediate_size": 3 * arguments.heads * arguments.head_dim,
        "num_hidden_layers": arguments.layers,
        "num_attention_heads": arguments.heads,
        "num_key_value_heads": arguments.heads,
        "max_position_embeddings": max(arguments.lengths) + 1,
    }
    torch.manual_seed(0)
    stock = LlamaForCausalLM._from_config(LlamaConfig(**fields), attn_implementation="sdpa").to(device, dtype)
    for length in arguments.lengths:
        tokens = torch.randint(fields["vocab_size"], (arguments.batch, length), device=device)
        runs: dict[str, dict[str, Callable[[], Any]]] = {"llama-stock": model_runs(stock, tokens)}
        for encoding in ("rope", "pope", "cope"):
            name = f"llama-{encoding}"
            if arguments.providers and name not in arguments.providers:
                continue
            config = WhatWhereLlamaConfig(**fields, position_encoding=encoding)
            model = WhatWhereLlamaForCausalLM._from_config(config).to(device, dtype)
            missing, unexpected = model.load_state_dict(stock.state_dict(), strict=False)
            if unexpected or any("position_encoding" not in key for key in missing):
                raise CheckFailed(f"{name}: weights do not match, missing {missing!r}, unexpected {unexpected!r}")
            with torch.no_grad():
                for key, parameter in model.named_parameters():
                    if "position_encoding" in key:
                        # A table of zeros would hide a mistake.
                        parameter.uniform_(-1.0, 0.0)
            check_model(name, model, stock if encoding == "rope" else None, tokens)
            runs[name] = model_runs(model, tokens)
        shape = f"{arguments.batch}x{arguments.heads}x{length}x{arguments.head_dim}, {arguments.layers} layers"
        write("model", shape, measure(runs, timer, arguments.repeats), "llama-stock")


def check_model(name: str, model: Any, stock: Any, tokens: torch.Tensor) -> None:
    """Compares logits, and the logits of a cached step, with the stock model or the eager reference."""
    tokens = tokens[:1]
    implementation = model.config._attn_implementation
    with torch.no_grad():
        found = model.eval()(tokens).logits
        cache = DynamicCache(config=model.config)
        model(tokens[:, :-1], past_key_values=cache)
        step = model(tokens[:, -1:], past_key_values=cache).logits
        if stock is not None:
            expected = stock.eval()(tokens).logits
        else:
            model.set_attn_implementation("eager")
            expected = model(tokens).logits
            model.set_attn_implementation(implementation)
    tolerance = 1e-4 if found.dtype in (torch.float32, torch.float64) else 5e-2
    for what, ours in (("logits", found), ("cached logits", step)):
        error = (ours - expected[:, -ours.shape[1] :]).float().norm() / expected.float().norm()
        if not error <= tolerance:
            raise CheckFailed(f"{name}: {what} are off by {error:.3g} of their norm; allowed {tolerance:.3g}")


def model_runs(model: Any, tokens: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """Returns the training step and the decoding step of a model."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(tokens, past_key_values=cache)

    def train() -> None:
        model.train()
        model(tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def decode() -> None:
        model.eval()
        with torch.no_grad():
            model(tokens[:, -1:], past_key_values=cache)
        cache.crop(-1)

    return {"training step": train, "decoding step": decode}


# The command.


def parse_lengths(text: str) -> list[int]:
    """Returns the lengths in a comma-separated list; raises ValueError for all but positive integers."""
    parts = text.split(",")
    if not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not valid: comma-separated positive integers, such as 1024,4096")
    return [int(part) for part in parts]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="attention,model", help="attention, model, or both, comma-separated")
    parser.add_argument("--providers", type=lambda text: text.split(","), help="only these (and what ratios refer to)")
    parser.add_argument("--lengths", type=parse_lengths, default=None, help="default 1024,4096; with --quick 256")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--num-positions", type=int, default=64, help="entries of CoPE's table")
    parser.add_argument("--layers", type=int, default=4, help="layers of the models")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads; default: PyTorch's")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--repeats", type=int, default=None, help="default 5; with --quick 2")
    parser.add_argument("--listing-limit", type=int, default=8192, help="longest length at which the listing is timed")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("runs/benchmark.csv"))
    parser.add_argument("--quick", action="store_true", help="one short length, two repeats")
    parsed = parser.parse_args(arguments)
    parsed.parts = parsed.parts.split(",")
    unknown = set(parsed.parts) - {"attention", "model"}
    if unknown:
        parser.error(f"--parts: {sorted(unknown)!r} is not valid; allowed: 'attention', 'model'")
    if parsed.clock == "cpu" and parsed.device != "cpu":
        parser.error("--clock='cpu' is for --device cpu; allowed here: 'wall'")
    if parsed.repeats is not None and parsed.repeats < 1:
        parser.error(f"--repeats={parsed.repeats!r} is not valid: it must be at least 1")
    parsed.lengths = parsed.lengths or ([256] if parsed.quick else [1024, 4096])
    parsed.repeats = parsed.repeats or (2 if parsed.quick else 5)
    return parsed


def device_name(device: torch.device) -> str:
    """Returns the name of the device, as far as the system tells it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = pathlib.Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit code."""
    parsed = parse(arguments)
    if parsed.threads:
        torch.set_num_threads(parsed.threads)
    device = torch.device(parsed.device)
    timer = Timer(device, parsed.clock)
    common = {
        "dtype": parsed.dtype,
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "clock": parsed.clock,
        "repeats": parsed.repeats,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }

    def write(part: str, shape: str, results: dict, ratio_to: str) -> None:
        print(
            f"\n{part}, {shape}, {parsed.dtype}, {common['device']}, {common['threads']} threads, {parsed.clock} clock"
        )
        print(f"{'provider':16} {'direction':18} {'ms':>10} {'fastest':>10} {'ratio':>8} {'peak MiB':>9}")
        parsed.output.parent.mkdir(parents=True, exist_ok=True)
        new = not parsed.output.exists()
        with parsed.output.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, FIELDS)
            if new:
                writer.writeheader()
            for (provider, direction), (times, peak) in results.items():
                median = statistics.median(times)
                row = {
                    **common,
                    "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
                    "part": part,
                    "provider": provider,
                    "direction": direction,
                    "shape": shape,
                    "milliseconds": f"{median:.3f}",
                    "fastest": f"{min(times):.3f}",
                    "ratio": f"{median / statistics.median(results[ratio_to, direction][0]):.3f}",
                    "ratio_to": ratio_to,
                    "peak_mib": "" if peak is None else f"{peak:.1f}",
                }
                writer.writerow(row)
                print(
                    f"{provider:16} {direction:18} {row['milliseconds']:>10} {row['fastest']:>10} {row['ratio']:>8} "
                    f"{row['peak_mib']:>9}"
                )

    try:
        if "attention" in parsed.parts:
            benchmark_attention(parsed, timer, write)
        if "model" in parsed.parts:
            benchmark_model(parsed, timer, write)
    except CheckFailed as failure:
        print(f"check failed, nothing more is measured: {failure}", file=sys.stderr)
        return 1
    print(f"\nrows appended to {parsed.output}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
