"""Speed and memory of attention and of models. Only providers that pass a check of their results are timed.

    whatwhere benchmark --quick                              # on a laptop: a minute; without --quick about ten
    whatwhere benchmark --lengths 1024,4096 --threads 2
    whatwhere benchmark --device cuda --minutes 5            # `whatwhere gpu-check` checks the kernels first
    whatwhere benchmark --device cuda --providers cope-triton-half,pope-triton --lengths 4096

Parts: `attention` and `model`, with ratios to RoPE + SDPA (on a GPU its fastest backend) and to the stock Llama;
`data`, which measures `whatwhere prepare` and reading (15 minutes and 5 GB in a temporary folder, with --quick two
minutes; the other options have no effect); `serving`, which compares vLLM, where it is installed, and `generate_batch`
with `generate`.

All rows are appended to --output (CSV); a row without a time has the reason. The exit code is 1 if a check failed.
docs/kernels.md lists the providers, and says how they are checked and timed.
"""

import argparse
import contextlib
import functools
import gc
import itertools
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..parsers import command_parser
from .attention import BASELINES, DIRECTIONS, FIRST, FOREIGN, HOST_PROVIDERS, MORE, PROVIDERS, Workload, tiles_note
from .data import benchmark_data
from .kernel_tiles import measured
from .measure import (
    CheckFailed,
    DeviceTimer,
    HostTimer,
    Shape,
    Unsupported,
    device_is_lost,
    kernel_times,
    one_line,
    out_of_memory,
)
from .models import MODELS, STOCK, Models, model_runs
from .report import Report, Result, device_name, is_failure, kernels_note, missing, versions
from .serving import benchmark_serving

DTYPES = ("float32", "bfloat16", "float16", "float64")
# On a GPU: the hidden size (which determines the number of heads), the tokens of a batch, and lengths.
DEVICE_WIDTH, DEVICE_TOKENS = 2048, 16384
DEVICE_LENGTHS = [4096, 16384, 65536, 1024, 2048, 8192, 32768, 512]
# Providers that would take longer at one length are left out.
PROVIDER_SECONDS = {"cpu": float("inf"), "cuda": 12.0}
# The maximum length of the listing on a CPU.
LISTING_LENGTH = 8192

# What gives the checked functions to time, by direction, for a result.
Prepare = Callable[[Result], Iterator[tuple[str, Callable[[], Any]]]]


class Benchmark:
    """A run of the parts `attention` and `model`."""

    def __init__(self, arguments: argparse.Namespace, report: Report, timer: HostTimer | DeviceTimer) -> None:
        self.arguments, self.report, self.timer = arguments, report, timer
        self.device, self.dtype = torch.device(arguments.device), getattr(torch, arguments.dtype)
        # `lost`: why the GPU cannot be used any more.
        self.start, self.lost = time.monotonic(), ""
        # The shape and the seconds of the last measurement, by provider and head dim.
        self.history: dict[tuple[str, int], tuple[Shape, float]] = {}

    def refusal(self, provider: str, shape: Shape) -> str:
        """Returns the reason for not measuring a provider, or an empty text."""
        minutes = self.arguments.minutes
        if self.lost:
            return f"left out: {self.lost}"
        if minutes is not None and time.monotonic() - self.start > minutes * 60:
            return f"left out: the {minutes:g} minutes are used up"
        if (provider, shape.head_dim) in self.history:
            before, seconds = self.history[provider, shape.head_dim]
            expected = seconds * shape.batch / before.batch * (shape.length / before.length) ** 2
            most = PROVIDER_SECONDS[self.device.type]
            if shape.length > before.length and expected > most:
                return f"left out: would take about {expected:.0f} s, more than {most:g}"
        return ""

    def attempt(self, result: Result, shape: Shape, run: Callable[[], None]) -> None:
        """Runs `run`, and sets the status of the result if it fails."""
        start = time.monotonic()
        try:
            run()
            return
        except Unsupported as refusal:
            result.status = f"{result.stage}refused: {one_line(refusal)}"
        except CheckFailed as error:
            result.status = f"{result.stage}check failed: {one_line(error)}"
        except Exception as error:
            # A failure of one provider does not end the run.
            what = "out of memory" if out_of_memory(error) else f"{type(error).__name__}: {one_line(error)}"
            result.status = f"{result.stage}{what}"
            if device_is_lost(error):
                self.lost = f"the GPU cannot be used after the failure of {result.provider}, {shape}"
        finally:
            self.history[result.provider, shape.head_dim] = (shape, time.monotonic() - start)
        if torch.cuda.is_available() and not self.lost:
            gc.collect()
            torch.cuda.empty_cache()

    def measure(self, part: str, shape: Shape, names: Sequence[str], prepare: Prepare) -> None:
        """Times providers or models at one shape: on a GPU one after the other, on a CPU all in turns."""
        timer = self.timer
        results = [Result(name) for name in names if not self.report.finished(part, shape, name)]
        runs: dict[str, dict[str, Callable[[], Any]]] = {}
        for result in results:

            def run(result: Result = result) -> None:
                for direction, function in prepare(result):
                    if isinstance(timer, HostTimer):
                        runs.setdefault(result.provider, {})[direction] = function
                    else:
                        memory = direction in ("forward", "forward+backward", "training step")
                        result.samples[direction] = timer(function, memory=memory)
                    # It may own the graph of a backward.
                    del function

            reason = self.refusal(result.provider, shape)
            if reason:
                result.status = reason
            else:
                self.attempt(result, shape, run)
            if isinstance(timer, DeviceTimer):
                self.report.add(part, shape, [result])
        if isinstance(timer, HostTimer):
            # The listing is timed last, because memory allocation is slower after it.
            listing = {name: runs.pop(name) for name in ("cope-listing",) if name in runs}
            samples = timer.in_turns(runs) | timer.in_turns(listing)
            for result in results:
                result.samples = {key[1]: sample for key, sample in samples.items() if key[0] == result.provider}
            self.report.add(part, shape, results)

    def attention(self) -> None:
        """Checks and times the attention providers at every head dim and length."""
        for length, head_dim in itertools.product(self.arguments.lengths, self.arguments.head_dims):
            shape = self.shape(length, head_dim)
            names = list(self.arguments.attention)
            if self.device.type == "cpu" and length > LISTING_LENGTH:
                names = [name for name in names if name != "cope-listing"]
            # Made for the first provider that is measured, kept until the next shape.
            workload = functools.cache(functools.partial(Workload, shape, self.dtype, self.device))

            def prepare(result: Result, workload: Callable[[], Workload] = workload) -> Iterator[tuple[str, Any]]:
                provider, in_turns = workload().provider(result.provider), self.device.type == "cpu"
                kernels: dict[str, float] = {}
                with provider.context():
                    result.error = workload().check(provider)
                    result.inputs = workload().input_bytes(provider.kind)
                    for direction in self.arguments.directions:
                        result.stage = f"{direction}: "
                        function = workload().run(provider, direction)
                        if function is not None:
                            yield direction, within(provider.context, function) if in_turns else function
                            if direction == "forward+backward" and "triton" in result.provider and not in_turns:
                                kernels = kernel_times(function)
                        del function
                result.note = kernels_note(kernels) + tiles_note() if "triton" in result.provider else ""

            self.measure("attention", shape, names, prepare)

    def models(self) -> None:
        """Checks and times a training step and a decoding step of our models and of the stock Llama."""
        names = [STOCK, *(name for name in MODELS if name in self.arguments.models)]
        for head_dim, length in itertools.product(self.arguments.head_dims, self.arguments.model_lengths):
            shape = self.shape(length, head_dim, self.arguments.layers)
            models = functools.cache(functools.partial(Models, shape, self.dtype, self.device))

            def prepare(result: Result, models: Callable[[], Models] = models) -> Iterator[tuple[str, Any]]:
                tokens, model = models().tokens(), models().model(result.provider)
                if result.provider != STOCK:
                    result.error = models().check(result.provider, model, tokens)
                result.note = f"attention: {model.config._attn_implementation}"
                for direction, function in model_runs(model, tokens).items():
                    result.stage = f"{direction}: "
                    yield direction, function

            self.measure("model", shape, names, prepare)

    def shape(self, length: int, head_dim: int, layers: int = 0) -> Shape:
        """Returns the shape to measure; batch and heads as given, or by the device."""
        on_gpu = self.device.type == "cuda"
        batch = self.arguments.batch or (max(1, DEVICE_TOKENS // length) if on_gpu else 2)
        heads = self.arguments.heads or (max(1, DEVICE_WIDTH // head_dim) if on_gpu else 4)
        return Shape(batch, heads, length, head_dim, layers)


def within(context: Callable[[], Any], function: Callable[[], Any]) -> Callable[[], Any]:
    """Returns a function that calls `function` inside the context."""

    def call() -> None:
        with context():
            function()

    return call


# The command.


def parse_lengths(text: str) -> list[int]:
    """Returns the lengths in a comma-separated list; an `argparse` type."""
    parts = text.split(",")
    if not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not valid: comma-separated positive integers, such as 1024,4096")
    return [int(part) for part in parts]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line, and sets defaults that depend on the device."""
    parser = command_parser("benchmark", "[OPTIONS]", __doc__)
    names = functools.partial(str.split, sep=",")
    parser.add_argument("--parts", type=names, default="attention,model", help="comma-separated; default %(default)s")
    parser.add_argument("--providers", type=names, help="only these (and the baseline)")
    parser.add_argument("--directions", type=names, help="of attention; on a CPU two by default")
    parser.add_argument(
        "--lengths", type=parse_lengths, help="default 1024,4096; with --quick 256; on a GPU 512 to 65536"
    )
    parser.add_argument("--model-lengths", type=parse_lengths, help="default: as --lengths; on a GPU the first two")
    parser.add_argument("--batch", type=int, help=f"default 2; on a GPU {DEVICE_TOKENS} / length, at least 1")
    parser.add_argument("--heads", type=int, help=f"default 4; on a GPU {DEVICE_WIDTH} / head dim")
    parser.add_argument("--head-dim", type=parse_lengths, dest="head_dims", help="default 64; on a GPU 64,128")
    parser.add_argument("--layers", type=int, default=4, help="layers of the models")
    parser.add_argument("--dtype", choices=DTYPES, help="default float32; on a GPU bfloat16")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, help="CPU threads; default: PyTorch's")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: CPU time, for a shared machine")
    parser.add_argument("--repeats", type=int, help="default 5 (serving: 3); with --quick 2 (1); on a GPU 3 to 50")
    parser.add_argument("--minutes", type=float, help="start no measurement after this time")
    parser.add_argument(
        "--tiles", type=pathlib.Path, help="measure tile sizes, and write them here for WHATWHERE_TILES"
    )
    parser.add_argument("--resume", action="store_true", help="do not repeat what --output has from the same state")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("runs/benchmark.csv"))
    parser.add_argument("--quick", action="store_true", help="one short length, two repeats")
    parsed = parser.parse_args(arguments)
    known = {
        "parts": ("attention", "model", "data", "serving"),
        "providers": (*PROVIDERS, *MODELS),
        "directions": DIRECTIONS,
    }
    for name, allowed in known.items():
        unknown = set(getattr(parsed, name) or ()) - set(allowed)
        if unknown:
            parser.error(f"--{name}: {sorted(unknown)!r} is not valid; allowed: {', '.join(map(repr, allowed))}")
    for name in ("batch", "heads", "layers", "repeats", "threads", "minutes"):
        value = getattr(parsed, name)
        if value is not None and not value > 0:
            parser.error(f"--{name}={value!r} is not valid: it must be greater than 0")
    cuda = parsed.device == "cuda"
    if cuda and not torch.cuda.is_available():
        parser.error("--device='cuda' is not valid here: PyTorch finds no CUDA device; allowed: 'cpu'")
    if cuda and parsed.clock == "cpu":
        parser.error("--clock='cpu' is for --device cpu; allowed here: 'wall'")
    parsed.lengths = parsed.lengths or ([256] if parsed.quick else DEVICE_LENGTHS if cuda else [1024, 4096])
    parsed.model_lengths = parsed.model_lengths or (parsed.lengths[:2] if cuda else parsed.lengths)
    parsed.head_dims = parsed.head_dims or ([64, 128] if cuda else [64])
    parsed.dtype = parsed.dtype or ("bfloat16" if cuda else "float32")
    parsed.directions = parsed.directions or (DIRECTIONS if cuda else ("forward", "forward+backward"))
    parsed.attention = (*FIRST, *MORE, *FOREIGN) if cuda else HOST_PROVIDERS
    parsed.models = parsed.providers or list(MODELS)
    if parsed.providers:
        chosen = [name for name in parsed.providers if name in PROVIDERS]
        parsed.attention = list(dict.fromkeys([name for name in parsed.attention if name in BASELINES] + chosen))
    return parsed


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit code."""
    parsed = parse(arguments)
    device = torch.device(parsed.device)
    if "data" in parsed.parts:
        for figure in benchmark_data(parsed.quick):
            print(f"{figure} (load {os.getloadavg()[0]:.1f})", flush=True)
    if parsed.threads:
        torch.set_num_threads(parsed.threads)
    if "serving" in parsed.parts:
        now = time.perf_counter if parsed.clock == "wall" else time.process_time
        for line in benchmark_serving(parsed.quick, getattr(torch, parsed.dtype), device, parsed.repeats, now):
            print(line, flush=True)
    if not {"attention", "model"} & set(parsed.parts):
        return 0
    timer: HostTimer | DeviceTimer
    if device.type == "cuda":
        timer = DeviceTimer(device, parsed.repeats or (2 if parsed.quick else None), 0.02 if parsed.quick else 0.06)
    else:
        timer = HostTimer(parsed.clock, parsed.repeats or (2 if parsed.quick else 5))
    common = {
        "dtype": parsed.dtype,
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "clock": "events" if device.type == "cuda" else parsed.clock,
        **versions(device),
    }
    report = Report(parsed.output, common, resume=parsed.resume)
    benchmark = Benchmark(parsed, report, timer)
    with measured(parsed.tiles) if parsed.tiles else contextlib.nullcontext():
        if "attention" in parsed.parts:
            benchmark.attention()
        if "model" in parsed.parts:
            benchmark.models()
    print("", *missing(report.rows), sep="\n")
    failures = [row for row in report.rows if is_failure(row["provider"], row["status"])]
    for row in failures:
        print(f"check failed: {row['provider']}, {row['shape']}: {row['status']}", file=sys.stderr)
    print(f"\nrows appended to {parsed.output}")
    return 1 if failures else 0
