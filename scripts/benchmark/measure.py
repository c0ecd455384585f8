"""Timing, peak memory, and errors of measurements."""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

# Size of the buffer that is overwritten before each timed run on a GPU; larger than any L2 cache.
FLUSH_BYTES = 256 << 20


class CheckFailed(Exception):
    """The result of a provider differs from its reference."""


class Unsupported(Exception):
    """A provider does not support a configuration; the message gives the reason."""


class Shape(NamedTuple):
    """A measured shape: batch x heads x length x head dim, and for models the number of layers."""

    batch: int
    heads: int
    length: int
    head_dim: int
    layers: int = 0

    def __str__(self) -> str:
        text = f"{self.batch}x{self.heads}x{self.length}x{self.head_dim}"
        return f"{text}, {self.layers} layers" if self.layers else text


class Sample(NamedTuple):
    """The milliseconds of each run, and the peak bytes above those allocated before, if they were measured."""

    times: Sequence[float]
    above: int | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.times)


class HostTimer:
    """Times functions on a CPU, in turns."""

    def __init__(self, clock: str, repeats: int) -> None:
        self.now = time.perf_counter if clock == "wall" else time.process_time
        self.repeats = repeats

    def in_turns(self, runs: dict[str, dict[str, Callable[[], Any]]]) -> dict[tuple[str, str], Sample]:
        """Times `{provider: {direction: function}}` in rounds, after one warm-up."""
        times: dict[tuple[str, str], list[float]] = {}
        for turn in range(self.repeats + 1):
            for provider, directions in runs.items():
                for direction, function in directions.items():
                    start = self.now()
                    function()
                    if turn > 0:
                        times.setdefault((provider, direction), []).append((self.now() - start) * 1e3)
        return {slot: Sample(values) for slot, values in times.items()}


class DeviceTimer:
    """Times functions on a GPU with events, with the L2 cache overwritten before each run.

    Each runs `repeats` times; by default 3 to 50 times in about `seconds`, or once if that takes longer.
    """

    def __init__(self, device: torch.device, repeats: int | None, seconds: float) -> None:
        self.repeats = repeats
        self.seconds = seconds
        self.cache = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)

    def __call__(self, function: Callable[[], Any], *, memory: bool) -> Sample:
        """Times a function, and measures its peak memory in the warm-up run."""
        above = None
        if memory:
            gc.collect()
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            function()
            torch.cuda.synchronize()
            above = torch.cuda.max_memory_allocated() - before
        estimate = self._runs(function, 1)[0] / 1e3
        repeats = self.repeats or min(50, max(3 if estimate < self.seconds else 1, int(self.seconds / estimate)))
        return Sample(self._runs(function, repeats), above)

    def _runs(self, function: Callable[[], Any], repeats: int) -> list[float]:
        events = []
        for _ in range(repeats):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self.cache.zero_()
            start.record()
            function()
            end.record()
            events.append((start, end))
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in events]


def kernel_times(function: Callable[[], Any]) -> dict[str, float]:
    """Returns the milliseconds of each kernel of a call on a GPU, the longest first; empty without CUPTI."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function()
        torch.cuda.synchronize()
    times = {event.key: event.self_device_time_total / 1e3 for event in profile.key_averages()}
    return dict(sorted(((name, time) for name, time in times.items() if time > 0), key=lambda one: -one[1]))


def captured(function: Callable[[], torch.Tensor]) -> tuple[Callable[[], Any], torch.Tensor]:
    """Captures a function as a CUDA graph, to time it without launch overhead; raises Unsupported if it cannot.

    Returns the function that replays it, and the tensor with the result of each replay.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.no_grad():
        function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.no_grad(), torch.cuda.graph(graph):
            out = function()
    except RuntimeError as error:
        if "captur" in str(error):
            raise Unsupported(f"cannot be captured: {one_line(error)}") from error
        raise
    return graph.replay, out


def out_of_memory(error: BaseException) -> bool:
    """Whether an error means that the device or the system is out of memory."""
    words = ("out of memory", "not enough memory", "can't allocate memory", "DefaultCPUAllocator")
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    )


def device_is_lost(error: BaseException) -> bool:
    """Whether this process cannot use the GPU after an error, such as an illegal memory access, or after its cause."""
    words = ("CUDA error", "HIP error", "illegal memory access", "misaligned address", "unspecified launch failure")
    if not out_of_memory(error) and any(word in str(error) for word in (*words, "device-side assert")):
        return True
    return error.__cause__ is not None and device_is_lost(error.__cause__)


def one_line(error: BaseException, limit: int = 300) -> str:
    """Returns the text of an error on one line."""
    return (" ".join(str(error).split()) or type(error).__name__)[:limit]
