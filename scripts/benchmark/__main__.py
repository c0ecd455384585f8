"""Speed and memory of attention and of models. Only providers that pass a check of their results are timed.

On a laptop (a minute with `--quick`, about ten without):

    whatwhere benchmark --quick
    whatwhere benchmark --lengths 1024,4096 --threads 2

On a GPU (`make gpu-check` checks the kernels first; `--minutes` limits the time):

    whatwhere benchmark --device cuda --minutes 5
    whatwhere benchmark --device cuda --providers cope-triton-half,pope-triton --lengths 4096

Attention (`--parts attention`), shape batch x heads x length x head dim. Ratios are relative to RoPE + SDPA in the same
run, on a GPU with its fastest backend:

| provider | what is timed |
|---|---|
| rope-sdpa | Llama's rotation, then `scaled_dot_product_attention` |
| rope-sdpa-flash, -efficient, -cudnn, -math | the same with this backend only |
| sdpa-flash, -efficient, -cudnn, -math | SDPA without rotation |
| cope-listing | Listing 1 of the CoPE paper, up to `--listing-limit`, since it needs length x length memory |
| cope-half | blockwise CoPE, gates near 0.5 (random content); cope-open: near 1 |
| cope-closed | blockwise CoPE, gates near 0: the slowest case, in which no key can be skipped |
| cope-triton-half, -open, -closed | the CoPE kernel, likewise |
| pope-sdpa | PoPE's rotation, then SDPA with values padded to the keys' width |
| pope-sdpa-padded-flash, ... | the same with one backend; pope-sdpa-unpadded-...: without padding of values |
| pope-blockwise | PoPE's rotation, then blockwise attention |
| pope-triton | PoPE's magnitudes, then the PoPE kernel |
| pope-pytorch | the fused attention of the package PoPE-pytorch, if it is installed |

Directions: forward (without gradients), backward (alone, with a retained graph), forward+backward, decoding (the newest
query and key against cached keys), decoding graph (the same as a CUDA graph, without launch overhead). All PoPE
providers compute the gradient of the phase shifts, all CoPE providers that of the table.

Models (`--parts model`): a training step (forward, loss, backward, AdamW) and a decoding step (one token after `length`
cached ones), with ratios to the stock `LlamaForCausalLM`: our model with `rope`, `pope`, `cope`, `cope+rope`, `fox` and
`none` with the same weights, with their default attention and (`llama-pope-triton`, `llama-cope-triton`) with
`attn_implementation="triton"`.

Check of attention: output and all gradients of one head of the timed inputs, against full-matrix attention in float64.
The maximum error is twice that of full-matrix attention in the timed type, or 1e-4 (2e-2 for the public package) of the
reference's norm or a tenth of the incoming gradient's norm, whichever is larger. Above 2,048 tokens, three ranges of
rows are compared, and the incoming gradient of all others is 0. Check of models: the logits, with and without cache, of
at most 2,048 tokens against the stock model (rope), or against the same model with the eager reference (cope, pope). A
failed check gives the status "check failed" instead of a time, and the exit code 1 (except for the public package).

Timing on a CPU: the median of `--repeats` rounds after one warm-up, with the providers in turns and the listing last.
`--clock cpu` measures CPU time of this process's threads instead of wall time; use it with `--threads 1` on a shared
machine. `--isolate` measures each provider, with the baseline, in a separate process.

Timing on a GPU: the median of CUDA event times after a warm-up, with the L2 cache overwritten before every run. Peak
memory is that of one run: `above` is the memory allocated in addition to the inputs; `peak` includes the provider's
inputs, tables and the incoming gradient. The batch is `--tokens` / length.

Providers that are not supported, run out of memory, are not installed or exceed the time limit get a row with their
status, and a line at the end. This includes errors inside PyTorch's backends and the public package, which are not
failures. All rows are appended to `--output` (CSV) with device, versions and date. At the end, the command prints a
table of time against length and, on a GPU, the target figures, which do not affect the exit code.
"""

import argparse
import dataclasses
import gc
import itertools
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .attention import (
    BASELINES,
    DEVICE_PROVIDERS,
    DIRECTIONS,
    FOREIGN,
    HOST_PROVIDERS,
    PROVIDERS,
    STOCK_PREFIXES,
    Workload,
    refusals,
    tiles_note,
)
from .measure import CheckFailed, DeviceTimer, HostTimer, Refused, Sample, device_is_lost, one_line, out_of_memory
from .models import HOST_MODELS, MODELS, STOCK, Models, model_runs
from .report import TARGET_LENGTH, Report, Result, Shape, device_name, old_columns, versions

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
# Hidden size (which determines the number of heads) and lengths on a GPU.
DEVICE_WIDTH = 2048
DEVICE_LENGTHS = [512 << doubling for doubling in range(8)]
DEVICE_MODEL_LENGTHS = [4096, 16384]
# Shares of --minutes after which each stage starts no new measurement.
SHARES = {"attention 0": 0.75, "attention 1": 0.8, "model": 0.92, "attention 2": 1.0}


class Budget:
    """The time limits and the failures of a run.

    Attributes:
        failures: our failed checks.
        lost: why the GPU cannot be used any more, or empty.
    """

    def __init__(self, minutes: float | None, provider_seconds: float | None) -> None:
        self.start = time.monotonic()
        self.minutes = minutes
        self.provider_seconds = provider_seconds
        self.failures: list[str] = []
        self.lost = ""
        self.history: dict[tuple[str, int], tuple[Shape, float]] = {}

    def refuse(self, stage: str, provider: str, shape: Shape) -> str:
        """Returns the reason for not measuring a provider, or an empty text."""
        if self.lost:
            return f"left out: {self.lost}"
        share = SHARES.get(stage, 1.0)
        if self.minutes is not None and time.monotonic() - self.start > share * self.minutes * 60:
            return f"left out: the {self.minutes:g} minutes are used up"
        known = self.history.get((provider, shape.head_dim))
        if known is None or self.provider_seconds is None:
            return ""
        before, seconds = known
        expected = seconds * shape.batch / before.batch * (shape.length / before.length) ** 2
        if shape.length > before.length and expected > self.provider_seconds:
            return (
                f"left out: would take about {expected:.0f} s, more than --provider-seconds {self.provider_seconds:g}"
            )
        return ""

    def attempt(self, result: Result, shape: Shape, measure: Callable[[], None]) -> None:
        """Runs `measure`, and sets the status of the result if it fails."""
        start = time.monotonic()
        name = f"{result.provider}, {shape}"
        failure, ours = "", result.provider not in FOREIGN
        try:
            with refusals():
                measure()
            return
        except Refused as refusal:
            result.status = f"{result.stage}refused: {one_line(refusal)}"
        except CheckFailed as error:
            failure = f"{result.stage}check failed: {one_line(error)}"
        except Exception as error:
            # A failure of one provider does not end the run.
            if out_of_memory(error):
                result.status = f"{result.stage}out of memory"
            else:
                failure = f"{result.stage}{type(error).__name__}: {one_line(error)}"
                ours = ours and not result.provider.startswith(STOCK_PREFIXES)
            if device_is_lost(error):
                self.lost = f"the GPU cannot be used after the failure of {name}"
        finally:
            self.history[result.provider, shape.head_dim] = (shape, time.monotonic() - start)
        if failure:
            result.status = failure
            if ours:
                self.failures.append(f"{name}: {failure}")
        if torch.cuda.is_available() and not self.lost:
            gc.collect()
            torch.cuda.empty_cache()


def benchmark_attention(arguments: argparse.Namespace, report: Report, budget: Budget, group: int) -> None:
    """Checks and times a group of attention providers at every head dim and length."""
    device = torch.device(arguments.device)
    chosen = [name for name in arguments.attention_groups[group] if name in PROVIDERS]
    lengths = arguments.lengths if chosen else ()
    if group > 1:
        # Later groups start with the lengths of the targets.
        lengths = sorted(lengths, key=lambda length: (length < TARGET_LENGTH, length))
    for length, head_dim in itertools.product(lengths, arguments.head_dims):
        shape = arguments.shape(length, head_dim)
        workload: Workload | None = None
        results = []
        for name in chosen:
            result = Result(name, status=budget.refuse(f"attention {group}", name, shape))
            limited = arguments.listing_limit is not None and length > arguments.listing_limit
            if not result.status and name == "cope-listing" and limited:
                result.status = f"left out: longer than --listing-limit {arguments.listing_limit}"
            results.append(result)
        waiting = [result for result in results if not result.status]
        if waiting:
            workload = Workload(
                batch=shape.batch,
                heads=shape.heads,
                length=length,
                head_dim=head_dim,
                num_positions=arguments.num_positions,
                dtype=DTYPES[arguments.dtype],
                device=device,
            )
            if device.type == "cuda":
                on_device(arguments, workload, shape, waiting, budget, group)
            else:
                on_host(arguments, workload, shape, waiting, budget)
        # No row for lengths above the listing's limit.
        report.add("attention", shape, [result for result in results if "--listing-limit" not in result.status])
        del workload


def on_device(
    arguments: argparse.Namespace,
    workload: Workload,
    shape: Shape,
    results: Sequence[Result],
    budget: Budget,
    group: int,
) -> None:
    """Checks and times one provider after the other, and frees its memory."""
    timer = arguments.timer
    for result in results:
        refusal = budget.refuse(f"attention {group}", result.provider, shape)
        if refusal:
            result.status = refusal
            continue
        result.status = "ok"

        def measure(result: Result = result) -> None:
            provider = workload.provider(result.provider)
            with provider.context():
                result.error = workload.check(provider).relative
                for direction in arguments.directions:
                    result.stage = f"{direction}: "
                    function = workload.run(provider, direction)
                    if function is not None:
                        sample = timer(function, memory=direction in ("forward", "forward+backward"))
                        inputs = workload.input_bytes(provider.kind)
                        result.samples[direction] = dataclasses.replace(sample, inputs=inputs)
                    del function
            result.note = tiles_note() if "triton" in result.provider else ""

        budget.attempt(result, shape, measure)


def on_host(
    arguments: argparse.Namespace, workload: Workload, shape: Shape, results: Sequence[Result], budget: Budget
) -> None:
    """Checks all providers, then times them in turns."""
    runs: dict[str, dict[str, Callable[[], Any]]] = {}
    for result in results:
        result.status = "ok"

        def check(result: Result = result) -> None:
            provider = workload.provider(result.provider)
            with provider.context():
                result.error = workload.check(provider).relative
                for direction in arguments.directions:
                    result.stage = f"{direction}: "
                    function = workload.run(provider, direction)
                    if function is not None:
                        prepared = runs.setdefault(result.provider, {})
                        prepared[direction] = within(provider.context, function)

        budget.attempt(result, shape, check)
    # The listing is timed last, because memory allocation is slower after it.
    listing = {name: runs.pop(name) for name in ("cope-listing",) if name in runs}
    samples = arguments.timer.in_turns(runs) | arguments.timer.in_turns(listing)
    spread(samples, results)


def spread(samples: dict[tuple[str, str], Sample], results: Sequence[Result]) -> None:
    """Stores samples, by provider and direction, in their results."""
    for result in results:
        result.samples = {direction: sample for (name, direction), sample in samples.items() if name == result.provider}


def within(context: Callable[[], Any], function: Callable[[], Any]) -> Callable[[], Any]:
    """Returns a function that calls `function` inside the context."""

    def call() -> None:
        with context():
            function()

    return call


def benchmark_model(arguments: argparse.Namespace, report: Report, budget: Budget) -> None:
    """Checks and times a training step and a decoding step of our models and of the stock Llama."""
    device = torch.device(arguments.device)
    names = [STOCK, *(name for name in MODELS if name in arguments.models)]
    for head_dim in arguments.head_dims:
        if budget.refuse("model", STOCK, arguments.shape(arguments.model_lengths[0], head_dim)):
            models = None
        else:
            models = Models(
                heads=arguments.shape(1, head_dim).heads,
                head_dim=head_dim,
                layers=arguments.layers,
                max_length=max(arguments.model_lengths),
                dtype=DTYPES[arguments.dtype],
                device=device,
            )
        for length in arguments.model_lengths:
            shape = arguments.shape(length, head_dim, arguments.layers)
            results = [Result(name) for name in names]
            runs: dict[str, dict[str, Callable[[], Any]]] = {}
            for result in results:
                refusal = budget.refuse("model", result.provider, shape)
                if refusal or models is None:
                    result.status = refusal or "left out"
                    continue

                def measure(
                    result: Result = result, shape: Shape = shape, models: Models = models, runs: dict = runs
                ) -> None:
                    tokens = models.tokens(shape.batch, shape.length)
                    model = models.model(result.provider)
                    if result.provider != STOCK:
                        result.error = models.check(result.provider, model, tokens)
                    result.note = f"attention: {model.config._attn_implementation}"
                    if isinstance(arguments.timer, HostTimer):
                        runs[result.provider] = model_runs(model, tokens)
                        return
                    for direction, function in model_runs(model, tokens).items():
                        result.stage = f"{direction}: "
                        result.samples[direction] = arguments.timer(function, memory=direction == "training step")

                budget.attempt(result, shape, measure)
            if isinstance(arguments.timer, HostTimer):
                spread(arguments.timer.in_turns(runs), results)
            report.add("model", shape, results)


# The command.


def parse_lengths(text: str) -> list[int]:
    """Returns the lengths in a comma-separated list; raises ValueError for all but positive integers."""
    parts = text.split(",")
    if not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not valid: comma-separated positive integers, such as 1024,4096")
    return [int(part) for part in parts]


def positive(text: str) -> float:
    """Returns a number greater than 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not valid: it must be a number greater than 0")
    return number


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="whatwhere benchmark",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--parts", default="attention,model", help="attention, model, or both, comma-separated")
    parser.add_argument("--providers", type=lambda text: text.split(","), help="only these (and the baseline)")
    parser.add_argument("--directions", type=lambda text: text.split(","), help="of attention; on a CPU two by default")
    parser.add_argument(
        "--lengths", type=parse_lengths, default=None, help="default 1024,4096; with --quick 256; on a GPU 512 to 65536"
    )
    parser.add_argument("--model-lengths", type=parse_lengths, help="default: as --lengths; on a GPU 4096,16384")
    parser.add_argument("--batch", type=int, default=None, help="default 2; on a GPU --tokens / length")
    parser.add_argument("--tokens", type=int, default=16384, help="on a GPU: tokens of a batch, at least one sequence")
    parser.add_argument("--heads", type=int, default=None, help="default 4; on a GPU 2048 / head dim")
    parser.add_argument("--head-dim", type=parse_lengths, dest="head_dims", help="default 64; on a GPU 64,128")
    parser.add_argument("--num-positions", type=int, default=64, help="entries of CoPE's table")
    parser.add_argument("--layers", type=int, default=4, help="layers of the models")
    parser.add_argument("--dtype", choices=sorted(DTYPES), help="default float32; on a GPU bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads; default: PyTorch's")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--repeats", type=int, default=None, help="default 5; with --quick 2; on a GPU 3 to 50")
    parser.add_argument("--minutes", type=positive, help="start no measurement after this time")
    parser.add_argument(
        "--provider-seconds", type=positive, help="leave out providers that take longer at one length; on a GPU 12"
    )
    parser.add_argument("--listing-limit", type=int, help="maximum length of the listing; default 8192, on a GPU none")
    parser.add_argument("--isolate", action="store_true", help="run each provider in a separate process")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("runs/benchmark.csv"))
    parser.add_argument("--quick", action="store_true", help="one short length, two repeats")
    parsed = parser.parse_args(arguments)
    parsed.parts = parsed.parts.split(",")
    unknown = set(parsed.parts) - {"attention", "model"}
    if unknown:
        parser.error(f"--parts: {sorted(unknown)!r} is not valid; allowed: 'attention', 'model'")
    unknown = set(parsed.providers or ()) - {*PROVIDERS, *MODELS}
    if unknown:
        allowed = ", ".join(map(repr, (*PROVIDERS, *MODELS)))
        parser.error(f"--providers: {sorted(unknown)!r} is not valid; allowed: {allowed}")
    unknown = set(parsed.directions or ()) - set(DIRECTIONS)
    if unknown:
        parser.error(f"--directions: {sorted(unknown)!r} is not valid; allowed: {', '.join(map(repr, DIRECTIONS))}")
    for name in ("batch", "tokens", "heads", "layers", "repeats", "threads", "listing_limit"):
        value = getattr(parsed, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')}={value!r} is not valid: it must be at least 1")
    if parsed.num_positions < 2:
        parser.error(f"--num-positions={parsed.num_positions!r} is not valid: it must be at least 2")
    try:
        device = torch.device(parsed.device)
    except RuntimeError:
        parser.error(f"--device={parsed.device!r} is not valid; allowed: 'cpu', 'cuda'")
    if device.type not in ("cpu", "cuda"):
        parser.error(f"--device={parsed.device!r} is not valid; allowed: 'cpu', 'cuda'")
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device={parsed.device!r} is not valid here: PyTorch finds no CUDA device; allowed: 'cpu'")
    if parsed.clock == "cpu" and parsed.device != "cpu":
        parser.error("--clock='cpu' is for --device cpu; allowed here: 'wall'")
    if old_columns(parsed.output):
        parser.error(f"--output={str(parsed.output)!r} has other columns: move it away, or name another")
    set_defaults(parsed, device)
    return parsed


def set_defaults(parsed: argparse.Namespace, device: torch.device) -> None:
    """Sets defaults that depend on the device, and the groups of providers."""
    cuda = device.type == "cuda"
    parsed.lengths = parsed.lengths or ([256] if parsed.quick else DEVICE_LENGTHS if cuda else [1024, 4096])
    if not parsed.model_lengths:
        within_lengths = [length for length in DEVICE_MODEL_LENGTHS if length in parsed.lengths] if cuda else []
        parsed.model_lengths = within_lengths or parsed.lengths[:1] if cuda else parsed.lengths
    parsed.head_dims = parsed.head_dims or ([64, 128] if cuda else [64])
    parsed.dtype = parsed.dtype or ("bfloat16" if cuda else "float32")
    parsed.directions = parsed.directions or (DIRECTIONS if cuda else ("forward", "forward+backward"))
    if parsed.listing_limit is None and not cuda:
        parsed.listing_limit = 8192
    if parsed.provider_seconds is None and cuda:
        parsed.provider_seconds = 12.0
    groups: Sequence[Sequence[str]] = DEVICE_PROVIDERS if cuda else (HOST_PROVIDERS,)
    parsed.models = tuple(MODELS) if cuda else HOST_MODELS
    if parsed.providers:
        baselines = [name for name in BASELINES if any(name in group for group in groups)]
        groups = [[*baselines, *(name for name in parsed.providers if name not in baselines)]]
        parsed.models = parsed.providers
    parsed.attention_groups = groups

    def shape(length: int, head_dim: int, layers: int = 0) -> Shape:
        batch = parsed.batch or (max(1, parsed.tokens // length) if cuda else 2)
        return Shape(batch, parsed.heads or (max(1, DEVICE_WIDTH // head_dim) if cuda else 4), length, head_dim, layers)

    parsed.shape = shape


def isolate(arguments: Sequence[str], parsed: argparse.Namespace) -> int:
    """Runs this command once for each provider; returns the exit code."""
    rest = [argument for argument in arguments if argument != "--isolate"]
    chosen = list(dict.fromkeys(name for group in parsed.attention_groups for name in group))
    names = [name for name in chosen if name in PROVIDERS] if "attention" in parsed.parts else []
    names += [name for name in MODELS if name in parsed.models] if "model" in parsed.parts else []
    code = 0
    for name in names:
        part = "model" if name in MODELS else "attention"
        command = [sys.executable, "-m", "whatwhere", "benchmark", *rest, "--parts", part, "--providers", name]
        code = max(code, subprocess.run(command).returncode)
    return code


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parsed = parse(arguments)
    if parsed.isolate:
        return isolate(arguments, parsed)
    if parsed.threads:
        torch.set_num_threads(parsed.threads)
    device = torch.device(parsed.device)
    if device.type == "cuda":
        seconds = 0.02 if parsed.quick else 0.06
        parsed.timer = DeviceTimer(device, parsed.repeats or (2 if parsed.quick else None), seconds)
    else:
        parsed.timer = HostTimer(parsed.clock, parsed.repeats or (2 if parsed.quick else 5))
    common = {
        "dtype": parsed.dtype,
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "clock": "events" if device.type == "cuda" else parsed.clock,
        **versions(device),
    }
    report = Report(parsed.output, common)
    budget = Budget(parsed.minutes, parsed.provider_seconds)
    for group in range(len(parsed.attention_groups)):
        if "attention" in parsed.parts:
            benchmark_attention(parsed, report, budget, group)
        if "model" in parsed.parts and group == min(1, len(parsed.attention_groups) - 1):
            benchmark_model(parsed, report, budget)
    tables = [*report.growth(), *report.left_out()]
    if device.type == "cuda" and "attention" in parsed.parts:
        tables += report.summary()
    for line in tables:
        print(line)
    for failure in budget.failures:
        print(f"check failed: {failure}", file=sys.stderr)
    print(f"\nrows appended to {parsed.output}")
    return 1 if budget.failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
