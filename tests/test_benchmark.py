"""The benchmark: what gets a number, what gets a reason instead, and what the tables say."""

import contextlib
import csv
import itertools
import json
import re
import types

import pytest
import torch

from tiny import slow_but
from whatwhere.scripts.benchmark import attention, command, data, measure, references
from whatwhere.scripts.benchmark.attention import DIRECTIONS, PROVIDERS, Provider, Workload, relative_errors
from whatwhere.scripts.benchmark.measure import (
    CheckFailed,
    DeviceTimer,
    Sample,
    Shape,
    Unsupported,
    device_is_lost,
    out_of_memory,
)
from whatwhere.scripts.benchmark.models import MODELS
from whatwhere.scripts.benchmark.report import SHOWN, Report, Result, is_failure, kernels_note, missing, read_rows
from whatwhere.scripts.benchmark.report import versions as report_versions

TINY = ["--lengths", "32", "--heads", "2", "--batch", "1", "--head-dim", "16", "--repeats", "1"]


def run(folder, *arguments):
    """Runs the benchmark on tiny shapes; returns the exit code and the rows."""
    output = folder / "rows.csv"
    code = command.main([*TINY, "--output", str(output), *arguments])
    with output.open(newline="", encoding="utf-8") as file:
        return code, list(csv.DictReader(file))


def test_rows(tmp_path):
    code, rows = run(tmp_path)
    assert code == 0
    found = {(row["part"], row["provider"], row["direction"]) for row in rows}
    for provider in ("rope-sdpa", "cope-half", "cope-closed", "cope-listing", "pope-sdpa", "fox", "alibi"):
        assert {("attention", provider, "forward"), ("attention", provider, "forward+backward")} <= found
    for provider in ("llama-stock", "llama-rope", "llama-pope", "llama-cope"):
        assert {("model", provider, "training step"), ("model", provider, "decoding step")} <= found
    for row in rows:
        assert row["status"] == "ok"
        assert float(row["milliseconds"]) >= float(row["fastest"]) > 0
        assert float(row["ratio"]) > 0
        assert row["ratio_to"] == ("rope-sdpa" if row["part"] == "attention" else "llama-stock")
        assert row["torch"] == torch.__version__


@pytest.mark.filterwarnings("ignore:Flash attention")
def test_every_direction_and_backend(tmp_path):
    """A backend that does not support the shape gives PyTorch's error; the others are checked and timed."""
    names = ["rope-sdpa-flash", "rope-sdpa-math", "rope-sdpa-cudnn", "cope-open"]
    names += ["pope-sdpa-padded-flash", "pope-sdpa-unpadded-flash", "pope-sdpa-unpadded-math"]
    directions = "forward,backward,forward+backward,decoding"
    code, rows = run(tmp_path, "--parts", "attention", "--providers", ",".join(names), "--directions", directions)
    assert code == 0
    reasons = {row["provider"]: row["status"] for row in rows if not row["direction"]}
    assert set(reasons) == {"rope-sdpa-cudnn", "pope-sdpa-unpadded-flash"}
    assert "RuntimeError: No available kernel" in reasons["pope-sdpa-unpadded-flash"]
    assert all(not row["milliseconds"] for row in rows if not row["direction"])
    for name in {*names, "rope-sdpa"} - set(reasons):
        assert [row["direction"] for row in rows if row["provider"] == name] == directions.split(",")


OTHERS = ",".join(f"{name}-triton" for name in attention.OTHERS)


@pytest.mark.parametrize(
    "names", slow_but(["fox-triton"], ["fox-triton", "cope-triton-half,pope-triton,alibi-triton", OTHERS])
)
def test_kernels(tmp_path, names):
    """In the interpreter: the same check, and the rows that a GPU would give."""
    pytest.importorskip("triton", reason="the kernels are written in Triton")
    options = ["--providers", names, "--directions", "forward,backward,decoding", "--heads", "1"]
    code, rows = run(tmp_path, "--parts", "attention", *options)
    assert code == 0, [row["status"] for row in rows]
    assert {row["provider"] for row in rows if row["direction"] == "decoding"} == {"rope-sdpa", *names.split(",")}


def test_no_number_without_a_check(tmp_path, monkeypatch, capsys):
    """A wrong provider gets a reason, the others their numbers, and the exit code is 1."""
    right = attention.blockwise_attention
    monkeypatch.setattr(attention, "blockwise_attention", lambda *inputs, **options: right(*inputs, **options) * 1.001)
    code, rows = run(tmp_path, "--parts", "attention", "--providers", "cope-half,pope-sdpa")
    assert code == 1
    wrong = [row for row in rows if row["provider"] == "cope-half"]
    assert len(wrong) == 1
    assert wrong[0]["status"].startswith("check failed: output is off by")
    assert not wrong[0]["milliseconds"]
    assert [row["status"] for row in rows if row["provider"] == "pope-sdpa"] == ["ok", "ok"]
    assert "check failed: cope-half" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), "out of memory", 0),
        (Unsupported("too wide"), "refused: too wide", 0),
        (ZeroDivisionError("no"), "ZeroDivisionError: no", 1),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "RuntimeError: CUDA error", 1),
    ],
)
def test_what_keeps_one_from_a_number(tmp_path, monkeypatch, failure, status, code):
    def fail(*inputs, **options):
        raise failure

    monkeypatch.setattr(attention, "blockwise_attention", fail)
    found, rows = run(tmp_path, "--parts", "attention", "--providers", "alibi,pope-sdpa")
    assert found == code
    statuses = {row["provider"]: row["status"] for row in rows}
    assert statuses["alibi"].startswith(status)
    assert statuses["pope-sdpa"].startswith("left out: the GPU" if "CUDA" in status else "ok")


@pytest.mark.parametrize(("provider", "failed"), [("rope-sdpa-cudnn", 0), ("cope-triton-half", 1), ("llama-cope", 1)])
def test_errors_of_pytorch_are_not_ours(provider, failed):
    def fail():
        raise RuntimeError("cuDNN Frontend error: no execution plan")

    result = Result(provider, stage="backward: ")
    command.Benchmark(command.parse([]), None, None).attempt(result, Shape(1, 1, 8, 16), fail)
    assert result.status == "backward: RuntimeError: cuDNN Frontend error: no execution plan"
    assert is_failure(provider, result.status) == failed
    assert is_failure(provider, "backward: check failed: dq is off")


def test_public_package(tmp_path, monkeypatch):
    """It is optional, and its mistakes are not ours."""
    monkeypatch.setitem(__import__("sys").modules, "PoPE_pytorch", None)
    arguments = ["--parts", "attention", "--providers", "pope-pytorch"]
    code, rows = run(tmp_path, *arguments)
    assert code == 0
    assert "refused: not installed" in rows[-1]["status"]

    wrong = Provider("pope", lambda query, key, value, delta: query + key + value + delta.sum())
    monkeypatch.setattr(Workload, "_pope_pytorch", lambda self: wrong)
    code, rows = run(tmp_path, *arguments)
    assert code == 0
    assert rows[-1]["status"].startswith("check failed")


def test_time_is_limited(tmp_path, capsys):
    code, rows = run(tmp_path, "--minutes", "1e-9")
    assert code == 0
    assert all(row["status"].startswith("left out: the 1e-09 minutes") for row in rows)
    assert "not measured:" in capsys.readouterr().out


def test_what_would_take_too_long_is_left_out(tmp_path, monkeypatch):
    """Four times the length is expected to take sixteen times as long."""
    monkeypatch.setitem(command.PROVIDER_SECONDS, "cpu", 0.05)
    code, rows = run(tmp_path, "--parts", "attention", "--lengths", "32,16384")
    assert code == 0
    later = [row for row in rows if row["length"] == "16384"]
    assert later
    assert all("s, more than 0.05" in row["status"] for row in later)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--providers", "cope-fast"], "'cope-fast'"),
        (["--directions", "sideways"], "'sideways'"),
        (["--parts", "speed"], "'speed'"),
        (["--lengths", "0"], "positive integers"),
        (["--minutes", "-1"], "--minutes=-1.0"),
        (["--batch", "0"], "--batch=0"),
        (["--device", "tpu"], "'tpu'"),
        (["--device", "cuda", "--clock", "cpu"], ""),
    ],
)
def test_refusals(arguments, text, capsys):
    with pytest.raises(SystemExit) as exit_:
        command.main(arguments)
    assert exit_.value.code == 2
    assert text in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu(capsys):
    with pytest.raises(SystemExit) as exit_:
        command.main(["--device", "cuda"])
    assert exit_.value.code == 2
    assert "PyTorch finds no CUDA device" in capsys.readouterr().err


def test_rows_of_another_time_are_not_mixed(tmp_path):
    output = tmp_path / "rows.csv"
    output.write_text("date,part,provider\n", encoding="utf-8")
    with pytest.raises(ValueError, match="has other columns"):
        run(tmp_path, "--parts", "attention", "--providers", "alibi")
    assert output.read_text(encoding="utf-8") == "date,part,provider\n"


def test_a_second_run_goes_on(tmp_path, monkeypatch, capsys):
    """Rows of the same state are not repeated, but are what new ones are compared with; failures still count."""
    right = attention.blockwise_attention
    monkeypatch.setattr(attention, "blockwise_attention", lambda *inputs, **options: right(*inputs, **options) * 1.001)
    options = ["--parts", "attention", "--resume", "--providers"]
    assert run(tmp_path, *options, "cope-half")[0] == 1
    capsys.readouterr()
    code, rows = run(tmp_path, *options, "cope-half,pope-sdpa")
    assert code == 1
    assert "check failed: cope-half" in capsys.readouterr().err
    assert [row["provider"] for row in rows] == ["rope-sdpa", "rope-sdpa", "cope-half", "pope-sdpa", "pope-sdpa"]
    assert {row["ratio_to"] for row in rows if row["provider"] == "pope-sdpa"} == {"rope-sdpa"}
    # What had no time is tried again, and so is everything after a change of the kernels.
    assert run(tmp_path, *options, "rope-sdpa-math", "--minutes", "1e-9")[1][-1]["status"].startswith("left out")
    assert len(run(tmp_path, *options, "rope-sdpa-math")[1]) == 5 + 1 + 2
    monkeypatch.setattr(command, "versions", lambda device: {**report_versions(device), "code": "another"})
    assert len(run(tmp_path, *options, "rope-sdpa-math")[1]) == 8 + 4


def test_names():
    """What runs by default is known by name."""
    on_device = [*attention.FIRST, *attention.MORE, *attention.FOREIGN]
    assert {*on_device, *attention.HOST_PROVIDERS, *SHOWN} <= set(PROVIDERS)
    assert len(set(on_device)) == len(on_device)
    assert not set(PROVIDERS) & set(MODELS)
    parsed = command.parse(["--device", "cpu"])
    assert (parsed.lengths, parsed.dtype, parsed.head_dims) == ([1024, 4096], "float32", [64])


# What a GPU runs, as far as it goes without one.


class Clock:
    """In the place of CUDA events: each run takes a millisecond."""

    now = 0.0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = Clock.now
        Clock.now += 1.0

    def elapsed_time(self, other):
        return other.at - self.at


@pytest.fixture
def timer(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Clock)
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 100)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 100 + (1 << 20))
    monkeypatch.setattr(measure, "FLUSH_BYTES", 16)
    return DeviceTimer(torch.device("cpu"), None, 0.01)


def test_device_timer(timer):
    calls = []
    sample = timer(lambda: calls.append(1), memory=True)
    # Ten of a millisecond in ten milliseconds, one to estimate, one for the memory.
    assert (len(sample.times), len(calls), sample.median, sample.above) == (10, 12, 1.0, 1 << 20)
    assert timer(lambda: None, memory=False).above is None
    assert len(DeviceTimer(torch.device("cpu"), 4, 0.01)(lambda: None, memory=False).times) == 4
    assert len(DeviceTimer(torch.device("cpu"), None, 1e-4)(lambda: None, memory=False).times) == 1


def test_device_path(timer, tmp_path):
    """One provider after the other, all directions, with memory; models likewise."""
    output = ["--output", str(tmp_path / "rows.csv")]
    parsed = command.parse([*TINY, *output, "--directions", ",".join(DIRECTIONS), "--layers", "1"])
    parsed.attention = ["rope-sdpa", "cope-listing", "rope-sdpa-cudnn", "pope-sdpa"]
    report = Report(tmp_path / "rows.csv", {"dtype": "float32", "device": "", "threads": 1, "clock": "events"})
    benchmark = command.Benchmark(parsed, report, timer)
    benchmark.attention()
    assert len(read_rows(tmp_path / "rows.csv", status="ok")) == 4 + 3 + 4
    found = {(row["provider"], row["direction"]): row for row in report.rows}
    directions = ["forward", "backward", "forward+backward", "decoding"]
    assert list(found) == [
        *(("rope-sdpa", direction) for direction in directions),
        *(("cope-listing", direction) for direction in directions[:3]),
        ("rope-sdpa-cudnn", ""),
        *(("pope-sdpa", direction) for direction in directions),
    ]
    assert (found["rope-sdpa", "forward"]["above_mib"], found["rope-sdpa", "forward"]["peak_mib"]) == ("1.0", "1.0")
    assert found["rope-sdpa", "backward"]["above_mib"] == ""
    assert found["rope-sdpa-cudnn", ""]["status"].startswith("RuntimeError: No viable backend")
    benchmark.models()
    models = [(row["provider"], row["direction"]) for row in report.rows if row["part"] == "model"]
    assert models == list(itertools.product(["llama-stock", *MODELS], ["training step", "decoding step"]))
    assert {row["above_mib"] for row in report.rows if row["direction"] == "training step"} == {"1.0"}
    assert not any(is_failure(row["provider"], row["status"]) for row in report.rows)


def test_defaults_on_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    parsed = command.parse(["--device", "cuda"])
    assert (parsed.lengths[:3], parsed.head_dims) == ([4096, 16384, 65536], [64, 128])
    assert (parsed.dtype, parsed.model_lengths) == ("bfloat16", [4096, 16384])
    benchmark = command.Benchmark(parsed, None, None)
    assert benchmark.shape(512, 64) == Shape(32, 32, 512, 64)
    assert benchmark.shape(65536, 128) == Shape(1, 16, 65536, 128)
    assert parsed.attention[: len(attention.FIRST)] == attention.FIRST
    parsed = command.parse(["--device", "cuda", "--providers", "pope-triton", "--lengths", "1024"])
    assert {"rope-sdpa-flash", "rope-sdpa-cudnn", "pope-triton"} <= set(parsed.attention)


# Checks.


@pytest.fixture
def long_workload(monkeypatch):
    """A workload whose check looks at some rows only."""
    monkeypatch.setattr(references, "ALL_ROWS", 64)
    monkeypatch.setattr(references, "SOME_ROWS", 40)
    monkeypatch.setattr(references, "LOGITS", 5000)
    return Workload(Shape(1, 2, 400, 16), torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("name", ["rope-sdpa", "cope-half", "cope-closed", "pope-sdpa", "fox", "alibi"])
def test_check_of_some_rows(long_workload, name):
    assert long_workload.rows.numel() < 400
    assert long_workload.check(long_workload.provider(name)) <= 1


def test_bytes_of_inputs(long_workload):
    """Query, key, value and gradient; the tables of cosines and sines."""
    assert long_workload.input_bytes("rope") == 4 * (4 * 2 * 400 * 16 + 2 * 400 * 16)


@pytest.mark.parametrize("which", range(4), ids=["dq", "dk", "dv", "table"])
def test_a_wrong_gradient_is_found(long_workload, which):
    """Keys and values far from the checked rows included: their gradients come from these rows alone."""

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, tensor):
            return tensor.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * 1.001

    provider = long_workload.provider("cope-half")
    right = provider.function

    def function(*inputs):
        return right(*(Wrong.apply(tensor) if index == which else tensor for index, tensor in enumerate(inputs)))

    provider.function = function
    with pytest.raises(CheckFailed, match=("dq", "dk", "dv", "cope.table")[which]):
        long_workload.check(provider)


def test_not_a_number_fails():
    one = torch.ones(3, dtype=torch.float64)
    with pytest.raises(CheckFailed, match="output"):
        relative_errors([one * float("nan")], [one], [one], ["output"], factor=2, tolerance=1.0)


def test_kinds_of_failures():
    assert out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert out_of_memory(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"))
    assert not out_of_memory(RuntimeError("CUDA error: an illegal memory access"))
    assert device_is_lost(RuntimeError("CUDA error: an illegal memory access"))
    assert not device_is_lost(RuntimeError("shapes do not fit"))
    assert device_is_lost(RuntimeError("HIP error: an address"))
    assert device_is_lost(RuntimeError("Triton Error [CUDA]: misaligned address"))
    assert not device_is_lost(RuntimeError("HIP error: out of memory"))
    outer = RuntimeError("No tiles compile.")
    outer.__cause__ = RuntimeError("CUDA error: an illegal memory access")
    assert device_is_lost(outer)
    outer.__cause__ = torch.OutOfMemoryError("CUDA error: out of memory")
    assert not device_is_lost(outer)


# Tables.


def sample(milliseconds, above=100 << 20):
    return Sample([milliseconds, milliseconds * 2, milliseconds / 2], above=above)


@pytest.fixture
def report(tmp_path):
    """Two lengths on a GPU that is not there: RoPE's backends, both kernels, and the public package at one length."""
    common = {"dtype": "bfloat16", "device": "GPU", "threads": 1, "clock": "events"}
    report = Report(tmp_path / "rows.csv", common)
    for length, factor in ((2048, 9.0), (4096, 1.0), (8192, 1.25)):
        shape = Shape(2, 4, length, 64)
        times = {"forward+backward": sample(4.0 * length / 4096), "backward": sample(3.0), "decoding": sample(1.0)}
        slower = {direction: Sample([10 * sample.median], sample.above * 2) for direction, sample in times.items()}
        kernel = {
            "forward+backward": sample(4.0 * length / 4096 * factor, above=140 << 20),
            "backward": sample(3.0 * factor),
            "decoding": sample(1.5),
        }
        results = [
            Result("rope-sdpa-flash", times, inputs=100 << 20),
            Result("rope-sdpa-math", slower, inputs=1),
            Result("rope-sdpa-cudnn", status="refused: no"),
            Result("cope-triton-half", kernel, note="tiles", inputs=100 << 20),
            Result("pope-triton", kernel, inputs=100 << 20),
        ]
        if length == 8192:
            results.append(Result("pope-pytorch", {"backward": sample(15.0)}))
        else:
            results.append(Result("pope-pytorch", status="out of memory"))
        report.add("attention", shape, results)
    return report


def test_what_is_missing(report):
    lines = missing(read_rows(report.output))
    assert "not measured: pope-pytorch: out of memory (2x4x2048x64, 2x4x4096x64)" in lines
    assert any(line.startswith("not measured: rope-sdpa-cudnn: refused: no") for line in lines)


def test_written_rows(report):
    with report.output.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    row = next(row for row in rows if row["provider"] == "cope-triton-half" and row["length"] == "8192")
    assert (row["direction"], row["ratio"], row["ratio_to"]) == ("forward+backward", "1.250", "rope-sdpa-flash")
    assert (row["peak_mib"], row["above_mib"], row["memory_ratio"], row["note"]) == ("240.0", "140.0", "1.200", "tiles")


@pytest.mark.slow
def test_figures_of_data(monkeypatch, capsys):
    """Everything is run once, on little text; on which the figures mean nothing."""
    monkeypatch.setattr(data, "QUICK_SIZES", (1, 2))
    monkeypatch.setattr(data, "QUICK_STEPS", 4)
    assert command.main(["--parts", "data", "--quick"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for line, (what, unit, aim) in zip(
        lines,
        [
            ("tokenising 1 MB", "x", "at least 1.7"),
            ("peak memory: .* for 2 MB", "%", "at most 10"),
            ("start of a run on 2 MB", "s", "at most 10"),
            ("waiting for data in a step of wikitext103_small", "%", "at most 2"),
        ],
        strict=True,
    ):
        assert re.fullmatch(rf"{what}.* +\d+\.\d\d {unit} +{aim}: (met|NOT MET) \(load .*\)", line)


def test_generated_text(tmp_path):
    data.write_text(tmp_path / "text.jsonl", 0.1)
    rows = [json.loads(line)["text"] for line in (tmp_path / "text.jsonl").read_text().splitlines()]
    assert 1e5 <= (tmp_path / "text.jsonl").stat().st_size < 1.1e5
    assert len(set(rows)) == len(rows)
    assert data.line("a", 1.65, "x", 1.7, at_least=True).endswith("1.65 x   at least 1.7: NOT MET")
    assert data.line("a", 1.65, "s", 1.7).endswith("1.65 s   at most 1.7: met")


def test_times_of_kernels(monkeypatch):
    """The longest first, in milliseconds; what runs on the host is left out."""
    event = types.SimpleNamespace
    events = [event(key="short", self_device_time_total=20.0), event(key="aten::mul", self_device_time_total=0)]
    events.append(event(key="_window_rows(float*)", self_device_time_total=2100.0))
    profile = types.SimpleNamespace(key_averages=lambda: events)
    monkeypatch.setattr(torch.profiler, "profile", lambda activities: contextlib.nullcontext(profile))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    calls = []
    found = measure.kernel_times(lambda: calls.append(1))
    assert (list(found.items()), calls) == ([("_window_rows(float*)", 2.1), ("short", 0.02)], [1])
    assert kernels_note(found) == "ms of kernels: _window_rows 2.100, short 0.020; "
    assert kernels_note({}) == ""
