"""Checks the Triton kernels on this machine's GPU, then runs the benchmark: `make gpu-check`, at most 8 minutes.

    whatwhere gpu-check                    # the kernels' check, then the benchmark
    whatwhere gpu-check --no-benchmark
    TRITON_INTERPRET=1 whatwhere gpu-check --device cpu    # tiny shapes, by Triton's interpreter

The check, for CoPE and PoPE in float32, bfloat16 and float16, head dims 16 to 256:

* lengths 1, 63, 100, 257, 1000; more keys than queries; grouped heads; gates closed, half open and open; separate gate
  keys; tables of 2 to 300 positions; PoPE with and without phase shifts, and on part of the channels;
* padding on both sides, gaps in the mask, packed documents, fully masked rows;
* output and all gradients, including those of table and phase shifts, against full-matrix attention in float64. The
  maximum error is twice that of PyTorch's full-matrix attention in the same type, or 5e-5 in float32 and half a unit in
  the last place in other types, relative to the norm of the reference or a tenth of the norm of the incoming gradient,
  whichever is larger;
* CoPE rows with a contextual position within 5e-5 of an integer (one row in a hundred) get no gradient, because the
  derivative is discontinuous there;
* new memory is filled with NaN, to detect elements that a kernel does not write;
* two runs are bitwise equal;
* decoding one row without gradients;
* models with `attn_implementation="triton"` against eager ones: logits and gradients of a padded batch, logits of
  cached steps;
* the benchmark's shapes.

The kernels are compiled in `--jobs` parallel processes. The benchmark then gets the remaining time of `--minutes`, and
finds the compiled kernels in Triton's cache. It runs even if a check failed, since it checks each measurement itself.
The exit code is 1 if a check failed, and 2 if there is no GPU. Speeds do not affect it.
"""

import argparse
import concurrent.futures
import contextlib
import copy
import dataclasses
import multiprocessing
import os
import pathlib
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

# Must be set before CUDA's libraries are loaded, for deterministic matrix products.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch

# Minimum time of the benchmark, in minutes.
LEAST_BENCHMARK_MINUTES = 1.0
# Maximum share of rows in a case that are not compared.
MOST_UNDECIDED = 0.1


@dataclasses.dataclass(frozen=True)
class Case:
    """One shape.

    Attributes:
        queries, keys: lengths.
        mask: "causal", or one of `MASKS`.
        gates: "half", "open" or "closed" (CoPE).
        positions: entries of the table (CoPE).
    """

    queries: int
    keys: int
    batch: int = 2
    heads: int = 4
    groups: int = 4
    mask: str = "causal"
    gates: str = "half"
    positions: int = 64

    def __str__(self) -> str:
        return f"{self.batch}x{self.heads}/{self.groups}x{self.queries}/{self.keys} {self.mask} {self.gates}"


@dataclasses.dataclass(frozen=True)
class Group:
    """Cases that share their compiled kernels.

    Attributes:
        what: "cope", "pope", "model cope", "model pope" or "tuned".
        gate: "key", "separate" or "value" (CoPE). In a model, the last two come with a layer without CoPE.
        rotated: channels with a phase (PoPE).
        shift: whether there is a phase shift (PoPE).
        provider: of the benchmark, for "tuned".
    """

    what: str
    dtype: str
    head_dim: int
    cases: tuple[Case, ...] = ()
    gate: str = "key"
    rotated: int = 0
    shift: bool = True
    provider: str = ""

    def __str__(self) -> str:
        text = f"{self.what} {self.dtype} D={self.head_dim}"
        if self.provider:
            return f"{text} {self.provider} T={self.cases[0].queries}"
        if self.what == "cope" or self.gate != "key":
            text += f" gates by {self.gate}"
        if self.what == "pope":
            text += f" R={self.rotated} shift={self.shift}"
        masks = dict.fromkeys(case.mask for case in self.cases)
        return f"{text} {', '.join(masks)}".rstrip()


@dataclasses.dataclass
class Outcome:
    """The outcome of a group: number of checks, largest error as a share of the allowed error, and failures."""

    checks: int = 0
    largest: float = 0.0
    failures: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 0.0


# Masks: `ranges` (B, 1, Q + K, 2), as the kernels read it.


def ranges_of(mask: str, batch: int, queries: int, keys: int, device: torch.device) -> torch.Tensor | None:
    """Returns the ranges of a mask, or None for causal."""
    if mask == "causal":
        return None
    slots = torch.arange(keys, device=device)
    valid = torch.ones(batch, keys, dtype=torch.bool, device=device)
    low = torch.zeros(batch, queries, dtype=torch.long, device=device)
    own = slots[keys - queries :]
    if mask == "padding":
        # To the left in the first entry, to the right in the last.
        valid[0] &= slots >= keys // 3
        valid[-1] &= slots < keys - keys // 4
    elif mask == "holes":
        valid &= slots % 7 != 3
    elif mask == "packed":
        for start in (keys // 5, keys // 2, keys // 2 + 1):
            low = torch.where(own >= start, start, low)
    else:
        raise ValueError(f"mask={mask!r} is not valid; allowed: 'causal', {', '.join(map(repr, MASKS))}")
    # Padding rows are fully masked.
    high = torch.where(valid[:, keys - queries :], own + 1, low)
    tail = torch.stack([valid.long(), torch.zeros_like(valid, dtype=torch.long)], -1)
    return torch.cat([torch.stack([low, high], -1), tail], 1)[:, None].int().contiguous()


MASKS = ("padding", "holes", "packed")


# One case of a kernel.


class Poisoned:
    """Fills new memory with NaN."""

    def __enter__(self) -> None:
        # PyTorch warns about operations without a deterministic version; two runs are compared in any case.
        warnings.filterwarnings("ignore", message=".*does not have a deterministic implementation")
        torch.use_deterministic_algorithms(True, warn_only=True)

    def __exit__(self, *error: object) -> None:
        torch.use_deterministic_algorithms(False)


SEED = 0


def attention_of(
    group: Group, case: Case, device: torch.device
) -> tuple[list[torch.Tensor], Callable, Callable, Callable]:
    """Returns inputs, and three functions of them: the kernel, the reference (in any type), and the undecided rows.

    The last takes inputs in float64 and returns bool (B, H, Q), see `undecided_rows`.
    """
    from whatwhere.position_pope import pope_frequencies
    from whatwhere.scripts.benchmark.references import cope_reference, pope_reference, undecided_rows

    dtype = getattr(torch, group.dtype)
    D, scaling = group.head_dim, group.head_dim**-0.5
    generator = torch.Generator(device).manual_seed(SEED)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    query = random(case.batch, case.heads, case.queries, D)
    key, value, gate_key = (random(case.batch, case.groups, case.keys, D) for _ in range(3))
    ranges = ranges_of(case.mask, case.batch, case.queries, case.keys, device)
    rows = torch.arange(case.queries, device=device)
    if group.what == "pope":
        from whatwhere.kernel_pope import pope_attention

        R = group.rotated
        # Cached tokens come first; with padding, each batch entry has its own positions.
        positions = torch.arange(case.keys, device=device).expand(case.batch if ranges is not None else 1, -1)
        if ranges is not None:
            positions = positions - torch.arange(case.batch, device=device)[:, None]
        phases = positions[..., None].float() * pope_frequencies(R, 10000.0, device)
        cos_k, sin_k = phases.cos(), phases.sin()
        tables = (cos_k[:, -case.queries :].contiguous(), sin_k[:, -case.queries :].contiguous(), cos_k, sin_k)
        for states in (query, key):
            states[..., :R] = torch.nn.functional.softplus(states[..., :R])
        inputs = [query.to(dtype), key.to(dtype), value.to(dtype)]
        if group.shift:
            inputs.append(random(case.heads, R) - 1.0)

        def kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *shift: torch.Tensor) -> torch.Tensor:
            everything = (*tables, shift[0] if shift else None)
            return pope_attention(query, key, value, everything, ranges=ranges, scaling=scaling)

        def reference(*inputs: torch.Tensor) -> torch.Tensor:
            return pope_reference(*inputs, tables=tables, rows=rows, scaling=scaling, ranges=ranges)

        def decided(query: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
            return torch.zeros(query.shape[:3], dtype=torch.bool, device=device)

        return inputs, kernel, reference, decided
    from whatwhere.kernel_cope import cope_attention

    if case.gates != "half":
        # One shared channel sets every gate logit to about 8 or -8.
        query[..., 0] = 8.0
        gates = {"key": key, "separate": gate_key, "value": value}[group.gate]
        gates[..., 0] = (1.0 if case.gates == "open" else -1.0) * D**0.5
    inputs = [query.to(dtype), key.to(dtype), value.to(dtype), random(D, case.positions).to(dtype)]
    if group.gate == "separate":
        inputs.append(gate_key.to(dtype))
    options: dict[str, Any] = {"ranges": ranges, "scaling": scaling, "position_scale": scaling}

    def gate_of(inputs: Sequence[torch.Tensor]) -> torch.Tensor | None:
        return {"key": None, "separate": inputs[-1], "value": inputs[2]}[group.gate]

    def kernel_cope(*inputs: torch.Tensor) -> torch.Tensor:
        return cope_attention(*inputs[:4], gate_key=gate_of(inputs), **options)

    def reference_cope(*inputs: torch.Tensor) -> torch.Tensor:
        query, key, value, table = inputs[:4]
        return cope_reference(query, key, value, table, gate_of(inputs), rows=rows, **options)

    def undecided(*inputs: torch.Tensor) -> torch.Tensor:
        chosen: dict[str, Any] = {"ranges": ranges, "scaling": scaling, "num_positions": case.positions}
        return undecided_rows(inputs[0], inputs[1], gate_of(inputs), rows=rows, **chosen)

    return inputs, kernel_cope, reference_cope, undecided


def check_case(group: Group, case: Case, device: torch.device) -> tuple[int, float]:
    """Checks one shape; returns the number of comparisons, and the largest error as a share of the allowed error.

    Raises:
        CheckFailed: something differs.
    """
    from whatwhere.scripts.benchmark.attention import relative_errors
    from whatwhere.scripts.benchmark.measure import CheckFailed

    inputs, kernel, reference, undecided = attention_of(group, case, device)
    inputs = [tensor.requires_grad_() for tensor in inputs]
    with torch.no_grad():
        exact_inputs = [tensor.detach().double().requires_grad_() for tensor in inputs]
    truth_out = reference(*exact_inputs)
    grad = torch.randn(truth_out.shape, generator=torch.Generator(device).manual_seed(1), device=device)
    with torch.no_grad():
        left_out = undecided(*exact_inputs)
    # One row may always be left out, since it is a large share of a small case.
    if left_out.sum() > max(1, MOST_UNDECIDED * left_out.numel()):
        raise CheckFailed(f"{left_out.sum()} of {left_out.numel()} rows are not compared: choose other inputs")
    grad = grad.masked_fill(left_out[..., None], 0).to(inputs[0].dtype)
    exact = [truth_out.detach(), *torch.autograd.grad(truth_out, exact_inputs, grad.double())]
    plain_out = reference(*inputs)
    plain = [plain_out.detach(), *torch.autograd.grad(plain_out, inputs, grad)]
    runs = []
    for _ in range(2):
        with Poisoned():
            out = kernel(*inputs)
            runs.append([out.detach(), *torch.autograd.grad(out, inputs, grad)])
    names = ["output", "dq", "dk", "dv", "ddelta" if group.what == "pope" else "dtable", "dgate_key"]
    for name, first, second in zip(names, *runs):
        if not torch.equal(first, second):
            raise CheckFailed(f"{name} differs between two runs, or is not a number")
    tolerance = 5e-5 if inputs[0].dtype == torch.float32 else torch.finfo(inputs[0].dtype).eps / 2
    options = {"factor": 2.0, "tolerance": tolerance, "scale": 0.1 * grad.float().norm().item()}
    largest = relative_errors(runs[0], plain, exact, names, **options).share
    with torch.no_grad(), Poisoned():
        inference = kernel(*inputs)
    relative_errors([inference], plain[:1], exact[:1], ["output without gradients"], **options)
    return len(runs[0]) + 1, largest


# Models, and the benchmark's shapes.


def check_model(group: Group, device: torch.device) -> tuple[int, float]:
    """Compares a small model on the kernels with the same eager model in a wider type.

    Logits, gradients of all parameters, and the logits of tokens generated after a padded batch.
    """
    from whatwhere import WhatWhereLlamaConfig, WhatWhereLlamaForCausalLM
    from whatwhere.scripts.benchmark.attention import relative_errors

    torch.manual_seed(0)
    heads, dtype = 4, getattr(torch, group.dtype)
    gates = {"separate": "separate_key", "value": "value"}.get(group.gate)
    config = WhatWhereLlamaConfig(
        vocab_size=64,
        hidden_size=heads * group.head_dim,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=2,
        max_position_embeddings=256,
        position_encoding=group.what.split()[1],
        position_encoding_parameters={"gates": gates, "every_n_layers": 2} if gates else None,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = WhatWhereLlamaForCausalLM._from_config(config).to(device, dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "encodings." in name:
                parameter.uniform_(-1.0, 0.0)
    length = group.cases[0].queries
    tokens = torch.randint(3, 64, (2, length), device=device)
    mask = torch.ones_like(tokens)
    mask[0, : length // 3] = 0
    # Logits of padding rows are not compared.
    labels = tokens.masked_fill((mask == 0) | (mask.roll(1, 1) == 0), -100)
    continuation = torch.randint(3, 64, (2, 4), device=device)

    def run(implementation: str, dtype: torch.dtype) -> tuple[list[str], list[torch.Tensor]]:
        copied = copy.deepcopy(model).to(dtype)
        copied.set_attn_implementation(implementation)
        out = copied(tokens, attention_mask=mask, labels=labels)
        out.loss.backward()
        names, tensors = ["logits"], [out.logits[mask.bool()].detach()]
        for name, parameter in copied.named_parameters():
            if parameter.grad is not None:
                names.append(f"gradient of {name}")
                tensors.append(parameter.grad)
        with torch.no_grad():
            cache = copied(tokens, attention_mask=mask, use_cache=True).past_key_values
            seen = mask
            for step in continuation.T:
                seen = torch.cat((seen, torch.ones_like(seen[:, :1])), dim=1)
                names.append("logits of a cached step")
                tensors.append(copied(step[:, None], attention_mask=seen, past_key_values=cache).logits)
        return names, tensors

    names, found = run("triton", dtype)
    (_, plain), (wanted, exact) = run("eager", dtype), run("eager", torch.float64)
    if names != wanted:
        raise RuntimeError(f"gradients of other parameters than expected: {sorted(set(names) ^ set(wanted))}")
    # The rest of the model also rounds, so the tolerance is one unit instead of half a unit.
    tolerance = 1e-4 if dtype == torch.float32 else torch.finfo(dtype).eps
    scale = 0.01 * max(tensor.norm().item() for name, tensor in zip(wanted, exact) if name.startswith("gradient"))
    return len(found), relative_errors(found, plain, exact, names, factor=2, tolerance=tolerance, scale=scale).share


def check_tuned(group: Group, device: torch.device) -> tuple[int, float]:
    """Checks a provider of the benchmark at its shape; the kernels that it compiles stay in Triton's cache."""
    from whatwhere.scripts.benchmark.attention import Workload

    (case,) = group.cases
    workload = Workload(
        batch=case.batch,
        heads=case.heads,
        length=case.queries,
        head_dim=group.head_dim,
        num_positions=case.positions,
        dtype=getattr(torch, group.dtype),
        device=device,
    )
    provider = workload.provider(group.provider)
    share = workload.check(provider).share
    assert provider.decode is not None, "the kernels decode"
    with torch.no_grad():
        workload.check_decoding(provider, provider.decode())
    return 5, share


def check_group(group: Group, device_name: str) -> Outcome:
    """Checks all cases of a group, and collects failures."""
    from whatwhere.scripts.benchmark.measure import one_line

    device = torch.device(device_name)
    outcome = Outcome()
    start = time.perf_counter()
    for case in group.cases:
        try:
            if group.what.startswith("model"):
                checks, largest = check_model(group, device)
            elif group.what == "tuned":
                checks, largest = check_tuned(group, device)
            else:
                checks, largest = check_case(group, case, device)
        except Exception as error:
            # Continue with the other cases.
            outcome.failures.append(f"{group}, {case}: {type(error).__name__}: {one_line(error)}")
            continue
        outcome.checks += checks
        outcome.largest = max(outcome.largest, largest)
    outcome.seconds = time.perf_counter() - start
    return outcome


# Which cases.


def _lengths(**options: Any) -> tuple[Case, ...]:
    shapes = [(1, 1), (63, 63), (100, 257), (257, 257), (1, 300), (1000, 1000)]
    return tuple(Case(*shape, groups=2 if shape[0] == 257 else 4, **options) for shape in shapes)


def _masked(**options: Any) -> tuple[Case, ...]:
    cases = [Case(257, 257, batch=3, groups=2, mask=mask, **options) for mask in MASKS]
    return (*cases, Case(100, 300, batch=3, mask="packed", **options), Case(1, 300, batch=3, mask="padding", **options))


def groups_on_gpu() -> Iterator[Group]:
    """Yields the groups to check on a GPU, the slowest first."""
    for head_dim in (64, 128):
        for length in (4096, 16384):
            shape = Case(length, length, batch=max(1, 16384 // length), heads=2048 // head_dim, groups=2048 // head_dim)
            for provider in ("cope-triton-half", "pope-triton"):
                yield Group("tuned", "bfloat16", head_dim, (shape,), provider=provider)
    gates = (
        *_lengths(),
        *(Case(*shape, gates=kind) for kind in ("open", "closed") for shape in ((257, 257), (100, 400))),
    )
    tables = (Case(257, 257, positions=2), Case(257, 257, positions=33), Case(257, 257, positions=300))
    for dtype, head_dim in (("bfloat16", 64), ("bfloat16", 128), ("float32", 64), ("float16", 64)):
        yield Group("cope", dtype, head_dim, (*gates, *tables))
        yield Group("cope", dtype, head_dim, (*_masked(), *_masked(gates="closed")))
        yield Group("pope", dtype, head_dim, _lengths(), rotated=head_dim)
        yield Group("pope", dtype, head_dim, _masked(), rotated=head_dim)
    for dtype, head_dim, rotated in (
        ("float32", 16, 8),
        ("bfloat16", 40, 20),
        ("float16", 80, 80),
        ("bfloat16", 256, 256),
    ):
        few = (Case(100, 100, groups=1), Case(70, 300), Case(63, 63, mask="padding"))
        yield Group("cope", dtype, head_dim, few)
        yield Group("pope", dtype, head_dim, few, rotated=rotated, shift=False)
    for gate, dtype in (("separate", "bfloat16"), ("separate", "float32"), ("value", "bfloat16"), ("value", "float32")):
        some = (Case(100, 257), Case(257, 257, gates="closed"), Case(1, 300), Case(130, 130, mask="padding"))
        yield Group("cope", dtype, 64, some, gate=gate)
    for encoding in ("cope", "cope+rope", "pope"):
        for dtype in ("float32", "bfloat16"):
            yield Group(f"model {encoding}", dtype, 64, (Case(100, 100),))
    for gate in ("separate", "value"):
        yield Group("model cope", "bfloat16", 64, (Case(100, 100),), gate=gate)


def groups_on_cpu() -> Iterator[Group]:
    """Yields groups for the interpreter (a minute): every kind of check, on tiny shapes.

    Without bfloat16, which the interpreter truncates instead of rounding.
    """
    small: dict[str, Any] = {"batch": 1, "heads": 2, "positions": 8}
    few = (Case(33, 33, groups=1, **small), Case(9, 40, groups=2, gates="closed", **small))
    masked = (Case(40, 40, batch=2, heads=2, groups=2, mask="padding", positions=8),)
    yield Group("cope", "float32", 16, (*few, Case(1, 40, groups=2, **small)))
    yield Group("cope", "float16", 16, masked)
    yield Group("cope", "float32", 16, (Case(33, 33, groups=2, mask="packed", gates="open", **small),), gate="separate")
    yield Group("pope", "float32", 16, (*few[:1], Case(1, 40, groups=2, **small)), rotated=8)
    yield Group("pope", "float16", 16, masked, rotated=16, shift=False)
    for encoding in ("cope", "pope"):
        yield Group(f"model {encoding}", "float32", 16, (Case(20, 20),))
    yield Group("model cope", "float32", 16, (Case(20, 20),), gate="separate")
    case = Case(48, 48, groups=2, **small)
    yield Group("tuned", "float32", 16, (case,), provider="cope-triton-half")
    yield Group("tuned", "float32", 16, (case,), provider="pope-triton")


def check_all(groups: Sequence[Group], device: str, jobs: int) -> Iterator[tuple[Group, Outcome]]:
    """Yields groups with their outcomes."""
    if jobs == 1:
        for group in groups:
            yield group, check_group(group, device)
        return
    with concurrent.futures.ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(check_group, group, device): group for group in groups}
        for future in concurrent.futures.as_completed(futures):
            try:
                yield futures[future], future.result()
            except concurrent.futures.process.BrokenProcessPool as error:
                yield futures[future], Outcome(failures=[f"{futures[future]}: its process died: {error}"])


# The command.


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="whatwhere gpu-check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--minutes", type=float, default=8.0, help="time for check and benchmark")
    parser.add_argument("--jobs", type=int, default=None, help="processes; default: half the cores, at most 12")
    parser.add_argument("--only", action="append", default=[], help="groups whose name contains this; repeatable")
    parser.add_argument(
        "--tiles", type=pathlib.Path, help="write the measured tile sizes to this file, for WHATWHERE_TILES"
    )
    parser.add_argument("--no-benchmark", action="store_true", help="check only")
    parser.add_argument(
        "--output", type=pathlib.Path, default=pathlib.Path("runs/benchmark.csv"), help="file of the benchmark"
    )
    parsed = parser.parse_args(arguments)
    for name in ("minutes", "jobs"):
        value = getattr(parsed, name)
        if value is not None and not 0 < value < 10000:
            parser.error(f"--{name}={value!r} is not valid: it must be greater than 0")
    if parsed.jobs is None:
        parsed.jobs = min(12, max(1, (os.cpu_count() or 2) // 2)) if parsed.device == "cuda" else 1
    interpreted = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0", "false", "False")
    if parsed.device == "cuda" and not torch.cuda.is_available():
        parser.error(
            f"PyTorch {torch.__version__} finds no CUDA device: nothing was checked. Without a GPU, `make test` runs "
            "the kernels in Triton's interpreter"
        )
    if parsed.device == "cuda" and interpreted:
        parser.error(f"TRITON_INTERPRET={os.environ['TRITON_INTERPRET']!r} is set: kernels would not run on the GPU")
    if parsed.device == "cpu" and not interpreted:
        parser.error("--device cpu needs the environment variable TRITON_INTERPRET=1: kernels need a GPU otherwise")
    return parsed


def main(arguments: Sequence[str] | None = None) -> int:
    """Checks the kernels, then runs the benchmark; returns the exit code."""
    start = time.monotonic()
    parsed = parse(arguments)
    groups = list(groups_on_gpu() if parsed.device == "cuda" else groups_on_cpu())
    groups = [group for group in groups if not parsed.only or any(part in str(group) for part in parsed.only)]
    if not groups:
        print(f"--only={parsed.only!r} matches no group", file=sys.stderr)
        return 2
    print(f"{'checked':62} {'checks':>6} {'error':>7} {'seconds':>8}   (error: as a share of the allowed error)")
    checks, failures = 0, []
    for group, outcome in check_all(groups, parsed.device, parsed.jobs):
        verdict = "" if not outcome.failures else f"  {len(outcome.failures)} FAILED"
        print(f"{group!s:62} {outcome.checks:>6} {outcome.largest:>7.2f} {outcome.seconds:>8.1f}{verdict}", flush=True)
        checks += outcome.checks
        failures += outcome.failures
    for failure in failures:
        print(f"check failed: {failure}", file=sys.stderr)
    minutes = (time.monotonic() - start) / 60
    print(f"{checks} comparisons passed, {len(failures)} cases failed, {minutes:.1f} minutes", flush=True)
    code = 1 if failures else 0
    if parsed.no_benchmark or parsed.device == "cpu":
        return code
    from whatwhere.scripts.benchmark.__main__ import main as benchmark
    from whatwhere.scripts.kernel_tiles import measured

    left = max(LEAST_BENCHMARK_MINUTES, parsed.minutes - minutes)
    with measured(parsed.tiles) if parsed.tiles else contextlib.nullcontext():
        return max(code, benchmark(["--device", "cuda", "--minutes", f"{left:.2f}", "--output", str(parsed.output)]))


if __name__ == "__main__":
    raise SystemExit(main())
