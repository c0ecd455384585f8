"""`whatwhere benchmark`: its help is in `cli/benchmark.py`."""

import argparse
import contextlib
import functools
import gc
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from whatwhere_cli.benchmark import DEVICE_TOKENS, DEVICE_WIDTH, parser

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


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line, and sets defaults that depend on the device."""
    parsed = parser().parse_args(arguments)
    known = {
        "parts": ("attention", "model", "data", "serving"),
        "providers": (*PROVIDERS, *MODELS),
        "directions": DIRECTIONS,
    }
    for name, allowed in known.items():
        unknown = set(getattr(parsed, name) or ()) - set(allowed)
        if unknown:
            parser().error(f"--{name}: {sorted(unknown)!r} is not valid; allowed: {', '.join(map(repr, allowed))}")
    cuda = parsed.device == "cuda"
    if cuda and not torch.cuda.is_available():
        parser().error("--device='cuda' is not valid here: PyTorch finds no CUDA device; allowed: 'cpu'")
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
