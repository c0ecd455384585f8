"""Rows, tables, growth of time with length, and the target figures of the kernels."""

import csv
import dataclasses
import datetime
import pathlib
import platform
import shutil
import subprocess
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers

from .attention import BASELINES
from .measure import Sample
from .models import STOCK

FIELDS = (
    "date",
    "part",
    "provider",
    "direction",
    "shape",
    "length",
    "head_dim",
    "dtype",
    "device",
    "threads",
    "clock",
    "milliseconds",
    "fastest",
    "ratio",
    "ratio_to",
    "peak_mib",
    "above_mib",
    "memory_ratio",
    "error",
    "repeats",
    "status",
    "note",
    "python",
    "torch",
    "transformers",
    "triton",
    "cuda",
    "driver",
)


@dataclasses.dataclass(frozen=True)
class Shape:
    """A measured shape: batch x heads x length x head dim, and for models the number of layers."""

    batch: int
    heads: int
    length: int
    head_dim: int
    layers: int = 0

    def __str__(self) -> str:
        text = f"{self.batch}x{self.heads}x{self.length}x{self.head_dim}"
        return f"{text}, {self.layers} layers" if self.layers else text


@dataclasses.dataclass
class Result:
    """One provider at one shape.

    Attributes:
        samples: by direction.
        status: "ok", or why measurements are missing.
        stage: the current stage, for the status.
        error: the largest relative error of the check.
        note: tiles or attention implementation.
    """

    provider: str
    samples: dict[str, Sample] = dataclasses.field(default_factory=dict)
    status: str = "ok"
    stage: str = ""
    error: float | None = None
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Target:
    """A target figure, in bfloat16 from 4,096 tokens; the worst length counts.

    Attributes:
        what: a description.
        provider: the provider to judge.
        direction: its direction.
        quantity: "time", "memory" (with inputs) or "above" (without inputs).
        bound: the target ratio.
        to: the provider must be `bound` times faster than this one; None: at most `bound` times the best RoPE.
    """

    what: str
    provider: str
    direction: str
    quantity: str
    bound: float
    to: str | None = None


TARGETS = (
    Target("CoPE forward + backward, gates half open", "cope-triton-half", "forward+backward", "time", 1.3),
    Target("PoPE forward + backward", "pope-triton", "forward+backward", "time", 1.7),
    Target("CoPE peak memory", "cope-triton-half", "forward+backward", "memory", 1.2),
    Target("PoPE peak memory", "pope-triton", "forward+backward", "memory", 1.2),
    Target("CoPE peak memory, inputs not counted", "cope-triton-half", "forward+backward", "above", 1.2),
    Target("PoPE peak memory, inputs not counted", "pope-triton", "forward+backward", "above", 1.2),
    Target("CoPE decoding", "cope-triton-half", "decoding", "time", 1.2),
    Target("PoPE decoding", "pope-triton", "decoding", "time", 1.2),
    Target("CoPE decoding, launches not counted", "cope-triton-half", "decoding graph", "time", 1.2),
    Target("PoPE decoding, launches not counted", "pope-triton", "decoding graph", "time", 1.2),
    Target("PoPE backward, times faster than PoPE-pytorch", "pope-triton", "backward", "time", 3.0, "pope-pytorch"),
)
TARGET_LENGTH = 4096
TARGET_DTYPE = "bfloat16"


class Report:
    """Collects results, prints tables, appends rows to a CSV file.

    Args:
        output: the CSV file.
        common: fields of all rows.
        show: prints a line.
    """

    def __init__(self, output: pathlib.Path, common: dict[str, Any], show: Callable[[str], None] = print) -> None:
        self.output = output
        self.common = common
        self.show = show
        self.results: dict[tuple[str, Shape], dict[str, Result]] = {}

    def add(self, part: str, shape: Shape, results: Sequence[Result]) -> None:
        """Prints results and appends their rows."""
        known = self.results.setdefault((part, shape), {})
        known.update({result.provider: result for result in results})
        rows = [row for result in results for row in self._rows(part, shape, result)]
        self._print(part, shape, rows)
        self._append(rows)

    def baseline(self, part: str, shape: Shape, direction: str) -> Result | None:
        """Returns the fastest baseline."""
        names = BASELINES if part == "attention" else (STOCK,)
        known = self.results.get((part, shape), {})
        found = [known[name] for name in names if name in known and direction in known[name].samples]
        return min(found, key=lambda result: result.samples[direction].median, default=None)

    def _rows(self, part: str, shape: Shape, result: Result) -> list[dict[str, Any]]:
        row: dict[str, Any] = {
            **self.common,
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "part": part,
            "provider": result.provider,
            "shape": str(shape),
            "length": shape.length,
            "head_dim": shape.head_dim,
            "status": result.status,
            "error": "" if result.error is None else f"{result.error:.2e}",
            "note": result.note,
        }
        rows = [{**row, "status": "ok", **self._numbers(part, shape, *item)} for item in result.samples.items()]
        return rows if result.status == "ok" else [*rows, row]

    def _numbers(self, part: str, shape: Shape, direction: str, sample: Sample) -> dict[str, Any]:
        numbers = {
            "direction": direction,
            "milliseconds": f"{sample.median:.3f}",
            "fastest": f"{min(sample.times):.3f}",
            "repeats": len(sample.times),
            "peak_mib": _mib(sample.total),
            "above_mib": _mib(sample.above),
        }
        best = self.baseline(part, shape, direction)
        if best is not None:
            reference = best.samples[direction]
            numbers["ratio"] = f"{sample.median / reference.median:.3f}"
            numbers["ratio_to"] = best.provider
            if sample.total and reference.total:
                numbers["memory_ratio"] = f"{sample.total / reference.total:.3f}"
        return numbers

    def _print(self, part: str, shape: Shape, rows: Sequence[dict[str, Any]]) -> None:
        common = self.common
        where = f"{common['device']}, {common['threads']} threads, {common['clock']} clock"
        self.show(f"\n{part}, {shape}, {common['dtype']}, {where}")
        self.show(
            f"{'provider':28} {'direction':18} {'ms':>10} {'fastest':>10} {'ratio':>8} {'peak MiB':>9} {'above':>9}"
        )
        for row in rows:
            if "direction" not in row:
                self.show(f"{row['provider']:28} {row['status']}")
                continue
            self.show(
                f"{row['provider']:28} {row['direction']:18} {row['milliseconds']:>10} {row['fastest']:>10} "
                f"{row.get('ratio', ''):>8} {row['peak_mib']:>9} {row['above_mib']:>9}".rstrip()
            )
        best = sorted({row["ratio_to"] for row in rows if row.get("ratio_to") not in (None, "rope-sdpa", STOCK)})
        if best:
            self.show(f"ratios are to the fastest RoPE in each direction: {', '.join(best)}")

    def _append(self, rows: Sequence[dict[str, Any]]) -> None:
        self.output.parent.mkdir(parents=True, exist_ok=True)
        new = not self.output.exists()
        with self.output.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, FIELDS)
            if new:
                writer.writeheader()
            writer.writerows(rows)

    # At the end of a run.

    def growth(self, direction: str = "forward+backward") -> list[str]:
        """Returns a table of the growth of a sequence's time when its length doubles (2 is linear, 4 quadratic)."""
        times: dict[tuple[int, str], dict[int, float]] = {}
        for (part, shape), results in self.results.items():
            for result in results.values():
                if part == "attention" and direction in result.samples:
                    per_sequence = result.samples[direction].median / shape.batch
                    times.setdefault((shape.head_dim, result.provider), {})[shape.length] = per_sequence
        lengths = sorted({length for by_length in times.values() for length in by_length})
        doublings = [length for length in lengths if 2 * length in lengths]
        if not doublings:
            return []
        lines = [f"\n{direction}: time of one sequence at twice the length, as a multiple (2: linear, 4: quadratic)"]
        head = "".join(f"{f'{length}-{2 * length}':>13}" for length in doublings)
        lines.append(f"{'head dim':>8} {'provider':28}{head}")
        for (head_dim, provider), by_length in sorted(times.items()):
            cells = []
            for length in doublings:
                both = length in by_length and 2 * length in by_length
                cells.append(f"{by_length[2 * length] / by_length[length]:.2f}" if both else "")
            lines.append(f"{head_dim:>8} {provider:28}{''.join(f'{cell:>13}' for cell in cells)}".rstrip())
        return lines

    def left_out(self) -> list[str]:
        """Returns a line for each provider and reason that was not measured."""
        found: dict[tuple[str, str, str], list[str]] = {}
        for (part, shape), results in self.results.items():
            for result in results.values():
                if result.status != "ok":
                    found.setdefault((part, result.provider, result.status), []).append(str(shape))
        if not found:
            return []
        lines = ["\nnot measured:"]
        lines += [f"{provider} ({'; '.join(shapes)}): {status}" for (_, provider, status), shapes in found.items()]
        return lines

    def summary(self) -> list[str]:
        """Returns the table of target figures."""
        lines = [
            f"\ntarget figures, {TARGET_DTYPE} from {TARGET_LENGTH} tokens, worst length:",
            f"{'figure':46} {'head dim':>8} {'target':>8} {'measured':>9} {'best':>7} {'at length':>10}  reached",
        ]
        head_dims = sorted({shape.head_dim for part, shape in self.results if part == "attention"})
        for target in TARGETS:
            for head_dim in head_dims:
                lines.append(self._judge(target, head_dim))
        return lines

    def _judge(self, target: Target, head_dim: int) -> str:
        ratios: dict[int, float] = {}
        reasons = []
        for (part, shape), results in self.results.items():
            if part != "attention" or shape.head_dim != head_dim or shape.length < TARGET_LENGTH:
                continue
            other = results.get(target.to) if target.to else self.baseline(part, shape, target.direction)
            ours = results.get(target.provider)
            for result in (ours, other):
                if result is not None and result.status != "ok":
                    reasons.append(f"{result.provider}: {result.status}")
            ratio = _ratio(target, ours, other)
            if ratio is not None:
                ratios[shape.length] = ratio
        sign = ">=" if target.to else "<="
        start = f"{target.what:46} {head_dim:>8} {sign + f' {target.bound:g}':>8}"
        if self.common["dtype"] != TARGET_DTYPE:
            return f"{start}  not judged: {self.common['dtype']}"
        if not ratios:
            return f"{start}  not measured" + (f": {reasons[0]}" if reasons else "")
        worst_of, best_of = (min, max) if target.to else (max, min)
        length = worst_of(ratios, key=lambda length: ratios[length])
        worst, best = ratios[length], best_of(ratios.values())
        reached = worst >= target.bound if target.to else worst <= target.bound
        return f"{start} {worst:>9.2f} {best:>7.2f} {length:>10}  {'yes' if reached else 'no'}"


def _ratio(target: Target, ours: Result | None, other: Result | None) -> float | None:
    if ours is None or other is None or not {target.direction} <= set(ours.samples) & set(other.samples):
        return None
    pair = ours.samples[target.direction], other.samples[target.direction]
    if target.quantity == "time":
        numbers: list[float | None] = [sample.median for sample in pair]
    elif target.quantity == "memory":
        numbers = [sample.total for sample in pair]
    else:
        numbers = [sample.above for sample in pair]
    first, second = reversed(numbers) if target.to else numbers
    return first / second if first and second else None


def _mib(count: int | None) -> str:
    return "" if count is None else f"{count / 2**20:.1f}"


def old_columns(output: pathlib.Path) -> bool:
    """Whether the file has other columns than the rows, so that nothing may be appended."""
    if not output.exists():
        return False
    with output.open(newline="", encoding="utf-8") as file:
        return tuple(next(csv.reader(file), ())) != FIELDS


def device_name(device: torch.device) -> str:
    """Returns the name of the device, if known."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = pathlib.Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def versions(device: torch.device) -> dict[str, str]:
    """Returns the versions of the software that a measurement depends on."""
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = ""
    cuda = device.type == "cuda"
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "triton": triton_version,
        "cuda": (torch.version.cuda or torch.version.hip or "") if cuda else "",
        "driver": _driver() if cuda else "",
    }


def _driver() -> str:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else ""
