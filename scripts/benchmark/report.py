"""Rows of results, their tables, and the summary of a run on a GPU."""

import csv
import dataclasses
import datetime
import hashlib
import pathlib
import platform
import re
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch.utils import collect_env

import whatwhere
from whatwhere.attention_triton import WAYS

from .attention import BASELINES, FOREIGN, STOCK_PREFIXES
from .measure import Sample, Shape
from .models import MODELS, STOCK

# What is measured, in the rows with a number.
NUMBERS = ("milliseconds", "fastest", "repeats", "ratio", "ratio_to", "peak_mib", "above_mib", "memory_ratio")
STATE = ("dtype", "device", "threads", "clock", "code", "torch", "transformers", "triton")


@dataclasses.dataclass
class Result:
    """One provider at one shape: samples by direction, and why some are missing (`status`, in `stage`).

    `error` is the largest one of the check, as a share of the allowed one; `inputs` the bytes of inputs, tables and
    incoming gradients.
    """

    provider: str
    samples: dict[str, Sample] = dataclasses.field(default_factory=dict)
    status: str = "ok"
    stage: str = ""
    error: float | None = None
    note: str = ""
    inputs: int | None = None


def is_failure(provider: str, status: str) -> bool:
    """Whether a status is a failure of ours."""
    if provider.startswith(STOCK_PREFIXES):
        # PyTorch's own providers may raise errors; if their check fails, our check is wrong.
        return "check failed" in status
    harmless = status.startswith(("ok", "left out")) or "refused: " in status or "out of memory" in status
    return not harmless and provider not in FOREIGN


class Report:
    """Collects rows of results, prints tables, appends the rows to a CSV file.

    Args:
        common: fields of all rows.
        resume: begin with the rows of the file that are about the same state.
    """

    def __init__(self, output: pathlib.Path, common: dict[str, Any], *, resume: bool = False) -> None:
        self.output = output
        self.common = {name: str(value) for name, value in common.items()}
        self.rows = read_rows(output, **{name: self.common[name] for name in STATE}) if resume else []
        self.shown: tuple[str, Shape] | None = None

    def finished(self, part: str, shape: Shape, provider: str) -> bool:
        """Whether there is a result that is not to be repeated."""
        slot = (part, str(shape), provider)
        found = [row for row in self.rows if (row["part"], row["shape"], row["provider"]) == slot]
        return any(not row["status"].startswith("left out") for row in found)

    def add(self, part: str, shape: Shape, results: Sequence[Result]) -> None:
        """Prints results and appends their rows."""
        rows = [row for result in results for row in self._rows(part, shape, result)]
        self.rows += rows
        for row in rows:
            best = self.baseline(row) if row["direction"] else None
            if best is not None:
                row["ratio"] = f"{float(row['milliseconds']) / float(best['milliseconds']):.3f}"
                row["ratio_to"] = best["provider"]
                if row["peak_mib"] and float(best["peak_mib"] or 0):
                    row["memory_ratio"] = f"{float(row['peak_mib']) / float(best['peak_mib']):.3f}"
            self._print(part, shape, row)
            append_row(self.output, row)

    def baseline(self, row: dict[str, str]) -> dict[str, str] | None:
        """Returns the row of the fastest baseline of the same part, shape and direction."""
        names = BASELINES if row["part"] == "attention" else (STOCK,)
        same = ("part", "shape", "direction")
        found = [one for one in self.rows if one["provider"] in names and all(one[name] == row[name] for name in same)]
        return min(found, key=lambda one: float(one["milliseconds"]), default=None)

    def _rows(self, part: str, shape: Shape, result: Result) -> list[dict[str, str]]:
        row = {
            "date": now(),
            "part": part,
            "provider": result.provider,
            "direction": "",
            "shape": str(shape),
            "length": str(shape.length),
            "head_dim": str(shape.head_dim),
            **dict.fromkeys(NUMBERS, ""),
            "status": result.status,
            "error": "" if result.error is None else f"{result.error:.3f}",
            "note": result.note,
            **self.common,
        }
        rows = []
        for direction, sample in result.samples.items():
            numbers = {
                "direction": direction,
                "milliseconds": f"{sample.median:.4f}",
                "fastest": f"{min(sample.times):.4f}",
                "repeats": str(len(sample.times)),
            }
            if sample.above is not None:
                numbers["above_mib"] = f"{sample.above / 2**20:.1f}"
                if result.inputs is not None:
                    numbers["peak_mib"] = f"{(sample.above + result.inputs) / 2**20:.1f}"
            rows.append({**row, "status": "ok", **numbers})
        return rows if result.status == "ok" else [*rows, row]

    def _print(self, part: str, shape: Shape, row: dict[str, str]) -> None:
        line = "{:28} {:18} {:>10} {:>10} {:>8} {:>9} {:>9}  {}"
        if self.shown != (part, shape):
            self.shown = part, shape
            where = f"{row['device']}, {row['threads']} threads, {row['clock']} clock"
            print(f"\n{part}, {shape}, {row['dtype']}, {where}")
            print(line.format("provider", "direction", "ms", "fastest", "ratio", "peak MiB", "above", "ratio to"))
        if row["direction"]:
            columns = ("provider", "direction", "milliseconds", "fastest", "ratio", "peak_mib", "above_mib", "ratio_to")
            print(line.format(*(row[name] for name in columns)), flush=True)
        else:
            print(f"{row['provider']:28} {row['status']}", flush=True)


# What a run on a GPU says at its end: providers, with the target of their time forward and backward.
SHOWN: dict[str, float | None] = {
    "cope-triton-half": 1.3,
    "pope-triton": 1.65,
    **dict.fromkeys(("plain-triton", "fox-triton", "alibi-triton")),
    **dict.fromkeys(("pope-sdpa-unpadded-cudnn", "pope-sdpa-padded-flash")),
    # Its backward should take 3 times as long as ours.
    "pope-pytorch": None,
}
SHOWN_LENGTHS = ("4096", "16384", "65536")
# The directions that stand for what `auto` chooses a way for.
PHASES = {"forward+backward": "training", "forward": "prompt", "decoding": "decoding"}
KERNELS_NOTE = "ms of kernels: "
TARGETS = {"decoding": 1.2, "decoding graph": 1.2, "memory": 1.2}


def summary_of_benchmark(rows: Sequence[dict[str, str]], tiles: pathlib.Path) -> list[str]:
    """Returns lines for a screen: ratios, what failed or is missing, and tiles that are faster than the first ones."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        provider, direction = row["provider"], row["direction"]
        if row["ratio"] and (provider in MODELS or (provider in SHOWN and row["length"] in SHOWN_LENGTHS)):
            targets = {"forward+backward": SHOWN.get(provider), **TARGETS}
            cells = found.setdefault((provider, row["shape"]), [])
            cells.append(f"{direction} {_marked(row['ratio'], targets.get(direction))}")
            if direction == "forward+backward" and row["memory_ratio"]:
                cells.append(f"memory {_marked(row['memory_ratio'], TARGETS['memory'])}")
    lines = [f"{provider:24} {shape:20} {', '.join(cells)}" for (provider, shape), cells in sorted(found.items())]
    if lines:
        lines = ["", "as multiples of the fastest SDPA with RoPE, or of stock Llama (!: more than the target)", *lines]
    lines += [*summary_of_ways(rows), *summary_of_kernels(rows), *missing(rows)]
    return [*lines, *summary_of_tiles(read_rows(tiles))]


def summary_of_ways(rows: Sequence[dict[str, str]]) -> list[str]:
    """Returns a line for each head dim and phase: whether PoPE's kernel or its rotation and SDPA is faster."""
    # Milliseconds by head dim and direction, shape, provider.
    found: dict[tuple[str, str], dict[str, dict[str, float]]] = {}
    for row in rows:
        shown = row["length"] in SHOWN_LENGTHS and row["direction"] in PHASES
        if row["provider"].startswith("pope-") and row["ratio"] and shown:
            shapes = found.setdefault((row["head_dim"], row["direction"]), {})
            shapes.setdefault(row["shape"], {})[row["provider"]] = float(row["milliseconds"])
    lines = []
    for (head_dim, direction), shapes in sorted(found.items()):
        cells = []
        for shape, times in shapes.items():
            rotated = [(time, name) for name, time in times.items() if name.startswith("pope-sdpa-")]
            if rotated and "pope-triton" in times:
                best, ours = min(rotated), times["pope-triton"]
                cells.append(f"{shape} {'the kernel' if ours <= best[0] else best[1]} ({ours / best[0]:.2f})")
        if cells:
            way = f"`auto` runs {WAYS['pope'][PHASES[direction]]!r}"
            lines.append(f"faster for pope, {PHASES[direction]}, head dim {head_dim} ({way}): {', '.join(cells)}")
    return lines


def kernels_note(kernels: dict[str, float]) -> str:
    """Returns the times of kernels as the beginning of a note."""
    shown = ", ".join(f"{name.split('(')[0][:40]} {time:.3f}" for name, time in [*kernels.items()][:8])
    return f"{KERNELS_NOTE}{shown}; " if shown else ""


def summary_of_kernels(rows: Sequence[dict[str, str]]) -> list[str]:
    """Returns a line for each head dim: the times of CoPE's kernels at 16,384 tokens."""
    return [
        f"cope at 16384, head dim {row['head_dim']}, {row['note'].split(';')[0]}"
        for row in rows
        if (row["provider"], row["length"], row["direction"]) == ("cope-triton-half", "16384", "forward+backward")
        and row["note"].startswith(KERNELS_NOTE)
    ]


def _marked(ratio: str, target: float | None) -> str:
    return f"{float(ratio):.2f}" + ("!" if target and float(ratio) > target else "")


def missing(rows: Sequence[dict[str, str]], most: int = 10) -> list[str]:
    """Returns a line for each kind of failure, then for each reason why there is no number, up to `most`."""
    measured = {(row["part"], row["provider"], row["shape"]) for row in rows if row["status"] == "ok"}
    shapes: dict[str, list[str]] = {}
    for row in rows:
        known = row["status"].startswith("left out") and (row["part"], row["provider"], row["shape"]) in measured
        if row["status"] != "ok" and not known:
            shapes.setdefault(f"{row['provider']}: {row['status'][:90]}", []).append(row["shape"].split(",")[0])
    lines = [f"FAILED {text} ({', '.join(shapes[text])})" for text in shapes if "check failed" in text]
    others = [f"not measured: {text} ({', '.join(shapes[text])})" for text in shapes if "check failed" not in text]
    more = len(others) - most
    return [*lines, *others[:most], *([f"not measured, in addition: {more} kinds"] if more > 0 else [])]


def summary_of_tiles(rows: Sequence[dict[str, str]]) -> list[str]:
    """Returns a line for each kernel whose fastest tiles are not the first, the largest gain first."""
    times: dict[str, dict[str, float]] = {}
    for row in rows:
        times.setdefault(row["kernel"], {})[row["tiles"]] = float(row["milliseconds"])
    gains = []
    for kernel, by_tiles in times.items():
        first, best = next(iter(by_tiles)), min(by_tiles, key=lambda tiles: by_tiles[tiles])
        if best != first:
            gains.append((by_tiles[first] / by_tiles[best], f"{kernel.split(' on ')[0]}: {best} instead of {first}"))
    gains.sort(reverse=True)
    if not times:
        return []
    lines = [f"tiles: {len(times)} kernels measured, the first are the fastest of {len(times) - len(gains)}; others:"]
    return lines + [f"  {gain:.2f} times faster, {text}" for gain, text in gains[:12]]


# Files.


def now() -> str:
    """Returns date and time."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def append_row(file: pathlib.Path, row: dict[str, Any]) -> None:
    """Appends a row to a CSV file, with a header if it is new; raises ValueError if it has other columns."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a+", newline="", encoding="utf-8") as opened:
        opened.seek(0)
        header = next(csv.reader(opened), None)
        if header not in (None, list(row)):
            raise ValueError(f"{str(file)!r} has other columns: move it away, or name another --output.")
        writer = csv.DictWriter(opened, list(row))
        if header is None:
            writer.writeheader()
        writer.writerow(row)


def read_rows(file: pathlib.Path, **wanted: str) -> list[dict[str, str]]:
    """Returns the rows of a CSV file, if there is one, that have these values."""
    if not file.exists():
        return []
    with file.open(newline="", encoding="utf-8") as opened:
        # A process that was killed can leave half a row.
        rows = [row for row in csv.DictReader(opened) if None not in row and None not in row.values()]
    return [row for row in rows if all(row.get(name) == value for name, value in wanted.items())]


def device_name(device: torch.device) -> str:
    """Returns the name of the device, if known."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = pathlib.Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", info.read_text(encoding="utf-8")) if info.exists() else None
    return found[1] if found else platform.processor() or platform.machine()


def versions(device: torch.device) -> dict[str, str]:
    """Returns the versions of the software that a measurement depends on."""
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = ""
    cuda = device.type == "cuda"
    code = hashlib.sha256()
    for file in sorted(pathlib.Path(whatwhere.__file__).parent.glob("kernel_*.py")):
        code.update(file.read_bytes())
    return {
        "code": code.hexdigest()[:12],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "triton": triton_version,
        "cuda": (torch.version.cuda or torch.version.hip or "") if cuda else "",
        "driver": (collect_env.get_nvidia_driver_version(collect_env.run) or "") if cuda else "",
    }
