"""Speed and memory of attention and of models. Only providers that pass a check of their results are timed.

    whatwhere benchmark --quick                              # on a laptop: a minute; without --quick about ten
    whatwhere benchmark --lengths 1024,4096 --threads 2
    whatwhere benchmark --device cuda --minutes 5            # `whatwhere gpu-check` checks the kernels first
    whatwhere benchmark --device cuda --providers cope-triton-half,pope-triton --lengths 4096

Parts: `attention` and `model`, with ratios to RoPE + SDPA (on a GPU its fastest backend) and to the stock Llama;
`data`, which measures `whatwhere prepare` and reading (15 minutes and 5 GB in a temporary folder, with --quick two
minutes; the other options have no effect); `serving`, which compares `generate_batch` with `generate`.

All rows are appended to --output (CSV); a provider without a time gets its reason. The exit code is 1 if a check
failed. docs/kernels.md lists the providers, and says how they are checked and timed.
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

from ..commands.common import command_parser
from ..kernel_tiles import measured
from .attention import (
    BASELINES,
    DIRECTIONS,
    FIRST,
    FOREIGN,
    HOST_PROVIDERS,
    MORE,
    PROVIDERS,
    STOCK_PREFIXES,
    Workload,
    tiles_note,
)
from .data import benchmark_data
from .measure import CheckFailed, DeviceTimer, HostTimer, Refused, device_is_lost, one_line, out_of_memory
from .models import MODELS, STOCK, Models, model_runs
from .report import Report, Result, Shape, device_name, missing, old_columns, versions
from .serving import benchmark_serving

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
# Hidden size (which determines the number of heads) and lengths on a GPU.
DEVICE_WIDTH = 2048
DEVICE_LENGTHS = [4096, 16384, 65536, 1024, 2048, 8192, 32768, 512]
DEVICE_MODEL_LENGTHS = [4096, 16384]


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

    def refuse(self, provider: str, shape: Shape) -> str:
        """Returns the reason for not measuring a provider, or an empty text."""
        if self.lost:
            return f"left out: {self.lost}"
        if self.minutes is not None and time.monotonic() - self.start > self.minutes * 60:
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

    def note_failure(self, provider: str, shape: str, status: str) -> None:
        """Counts a status that is a failure of ours."""
        if status.split(":")[0] in ("ok", "left out") or provider in FOREIGN:
            return
        harmless = ("refused: ", "out of memory")
        # PyTorch's own providers may raise errors; if their check fails, our check is wrong.
        if provider.startswith(STOCK_PREFIXES) and "check failed" not in status:
            return
        if not any(text in status for text in harmless):
            self.failures.append(f"{provider}, {shape}: {status}")

    def attempt(self, result: Result, shape: Shape, measure: Callable[[], None]) -> None:
        """Runs `measure`, and sets the status of the result if it fails."""
        start = time.monotonic()
        result.status = "ok"
        try:
            measure()
            return
        except Refused as refusal:
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
        self.note_failure(result.provider, str(shape), result.status)
        if torch.cuda.is_available() and not self.lost:
            gc.collect()
            torch.cuda.empty_cache()


# What gives the checked functions to time, by direction, for a result.
Prepare = Callable[[Result], Iterator[tuple[str, Callable[[], Any]]]]


def measure(
    arguments: argparse.Namespace,
    report: Report,
    budget: Budget,
    part: str,
    shape: Shape,
    names: Sequence[str],
    prepare: Prepare,
) -> None:
    """Times providers or models at one shape: on a GPU one after the other, on a CPU all in turns."""
    timer, host = arguments.timer, isinstance(arguments.timer, HostTimer)
    results = [Result(name) for name in names if not report.finished(part, shape, name)]
    runs: dict[str, dict[str, Callable[[], Any]]] = {}
    for result in results:

        def run(result: Result = result) -> None:
            for direction, function in prepare(result):
                if host:
                    runs.setdefault(result.provider, {})[direction] = function
                else:
                    memory = direction in ("forward", "forward+backward", "training step")
                    result.samples[direction] = timer(function, memory=memory)
                # It may own the graph of a backward.
                del function

        result.status = budget.refuse(result.provider, shape)
        if not result.status:
            budget.attempt(result, shape, run)
        if not host:
            report.add(part, shape, [result])
    if host:
        # The listing is timed last, because memory allocation is slower after it.
        listing = {name: runs.pop(name) for name in ("cope-listing",) if name in runs}
        samples = timer.in_turns(runs) | timer.in_turns(listing)
        for result in results:
            result.samples = {key[1]: sample for key, sample in samples.items() if key[0] == result.provider}
        report.add(part, shape, results)


def benchmark_attention(arguments: argparse.Namespace, report: Report, budget: Budget) -> None:
    """Checks and times the attention providers at every head dim and length."""
    device = torch.device(arguments.device)
    for length, head_dim in itertools.product(arguments.lengths, arguments.head_dims):
        shape = arguments.shape(length, head_dim)
        limited = arguments.listing_limit is not None and length > arguments.listing_limit
        names = [name for name in arguments.attention if not (limited and name == "cope-listing")]
        make = functools.partial(
            Workload,
            batch=shape.batch,
            heads=shape.heads,
            length=length,
            head_dim=head_dim,
            num_positions=arguments.num_positions,
            dtype=DTYPES[arguments.dtype],
            device=device,
        )
        # Made for the first provider that is measured, kept until the next shape.
        workload = functools.cache(make)

        def prepare(result: Result, workload: Callable[[], Workload] = workload) -> Iterator[tuple[str, Any]]:
            provider = workload().provider(result.provider)
            with provider.context():
                result.error = workload().check(provider).relative
                result.inputs = workload().input_bytes(provider.kind)
                for direction in arguments.directions:
                    result.stage = f"{direction}: "
                    function = workload().run(provider, direction)
                    if function is not None:
                        yield direction, function if device.type == "cuda" else within(provider.context, function)
                    del function
            result.note = tiles_note() if "triton" in result.provider else ""

        measure(arguments, report, budget, "attention", shape, names, prepare)


def within(context: Callable[[], Any], function: Callable[[], Any]) -> Callable[[], Any]:
    """Returns a function that calls `function` inside the context."""

    def call() -> None:
        with context():
            function()

    return call


def benchmark_model(arguments: argparse.Namespace, report: Report, budget: Budget) -> None:
    """Checks and times a training step and a decoding step of our models and of the stock Llama."""
    names = [STOCK, *(name for name in MODELS if name in arguments.models)]
    for head_dim, length in itertools.product(arguments.head_dims, arguments.model_lengths):
        shape = arguments.shape(length, head_dim, arguments.layers)
        make = functools.partial(
            Models,
            heads=shape.heads,
            head_dim=head_dim,
            layers=arguments.layers,
            max_length=length,
            dtype=DTYPES[arguments.dtype],
            device=torch.device(arguments.device),
        )
        models = functools.cache(make)

        def prepare(
            result: Result, shape: Shape = shape, models: Callable[[], Models] = models
        ) -> Iterator[tuple[str, Any]]:
            tokens = models().tokens(shape.batch, shape.length)
            model = models().model(result.provider)
            if result.provider != STOCK:
                result.error = models().check(result.provider, model, tokens)
            result.note = f"attention: {model.config._attn_implementation}"
            for direction, function in model_runs(model, tokens).items():
                result.stage = f"{direction}: "
                yield direction, function

        measure(arguments, report, budget, "model", shape, names, prepare)


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
    parser = command_parser("benchmark", "[OPTIONS]", __doc__)
    parser.add_argument("--parts", default="attention,model", help="comma-separated; default attention,model")
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
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: CPU time, for a shared machine")
    parser.add_argument("--repeats", type=int, default=None, help="default 5; with --quick 2; on a GPU 3 to 50")
    parser.add_argument("--minutes", type=positive, help="start no measurement after this time")
    parser.add_argument(
        "--provider-seconds", type=positive, help="leave out providers that take longer at one length; on a GPU 12"
    )
    parser.add_argument("--listing-limit", type=int, help="maximum length of the listing; default 8192, on a GPU none")
    parser.add_argument(
        "--tiles", type=pathlib.Path, help="measure tile sizes, and write them here for WHATWHERE_TILES"
    )
    parser.add_argument("--resume", action="store_true", help="do not repeat what --output has from the same state")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("runs/benchmark.csv"))
    parser.add_argument("--quick", action="store_true", help="one short length, two repeats")
    parsed = parser.parse_args(arguments)
    parsed.parts = parsed.parts.split(",")
    known = {
        "parts": ("attention", "model", "data", "serving"),
        "providers": (*PROVIDERS, *MODELS),
        "directions": DIRECTIONS,
    }
    for name, allowed in known.items():
        unknown = set(getattr(parsed, name) or ()) - set(allowed)
        if unknown:
            parser.error(f"--{name}: {sorted(unknown)!r} is not valid; allowed: {', '.join(map(repr, allowed))}")
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
    defaults = (*FIRST, *MORE, *FOREIGN) if cuda else HOST_PROVIDERS
    parsed.attention, parsed.models = defaults, list(MODELS)
    if parsed.providers:
        chosen = [name for name in parsed.providers if name in PROVIDERS]
        parsed.attention = list(dict.fromkeys([name for name in defaults if name in BASELINES] + chosen))
        parsed.models = parsed.providers

    def shape(length: int, head_dim: int, layers: int = 0) -> Shape:
        batch = parsed.batch or (max(1, parsed.tokens // length) if cuda else 2)
        return Shape(batch, parsed.heads or (max(1, DEVICE_WIDTH // head_dim) if cuda else 4), length, head_dim, layers)

    parsed.shape = shape


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit code."""
    parsed = parse(arguments)
    if "data" in parsed.parts:
        for figure in benchmark_data(parsed.quick):
            print(f"{figure} (load {os.getloadavg()[0]:.1f})", flush=True)
        if parsed.parts == ["data"]:
            return 0
    if parsed.threads:
        torch.set_num_threads(parsed.threads)
    device = torch.device(parsed.device)
    if "serving" in parsed.parts:
        for line in benchmark_serving(parsed.quick, getattr(torch, parsed.dtype), device):
            print(line, flush=True)
        if parsed.parts == ["serving"]:
            return 0
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
    report = Report(parsed.output, common, resume=parsed.resume)
    budget = Budget(parsed.minutes, parsed.provider_seconds)
    for row in report.rows:
        budget.note_failure(row["provider"], row["shape"], row["status"])
    with measured(parsed.tiles) if parsed.tiles else contextlib.nullcontext():
        if "attention" in parsed.parts and parsed.attention:
            benchmark_attention(parsed, report, budget)
        if "model" in parsed.parts:
            benchmark_model(parsed, report, budget)
    for line in ["", *missing(report.rows)]:
        print(line)
    for failure in budget.failures:
        print(f"check failed: {failure}", file=sys.stderr)
    print(f"\nrows appended to {parsed.output}")
    return 1 if budget.failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
