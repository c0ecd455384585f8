"""The check that a GPU's kernels must pass, run here by Triton's interpreter: it passes, and it can fail."""

import csv
import functools
import itertools
import os
import time

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are written in Triton")

import compile_kernels
from oracles import contextual_positions_of_all
from tiny import slow_but
from whatwhere import kernel_cope, kernel_flash, kernel_launch, kernel_plain, kernel_pope
from whatwhere.scripts.benchmark import references, report
from whatwhere.scripts.benchmark.kernel_cases import KERNELS, MASKS, case
from whatwhere.scripts.benchmark.measure import CheckFailed
from whatwhere.scripts.benchmark.references import visible
from whatwhere.scripts.commands import gpu_check
from whatwhere.scripts.commands.gpu_check import Group, check_all, check_case, groups_on_cpu, groups_on_gpu

pytestmark = pytest.mark.skipif(not kernel_launch.INTERPRETED, reason="runs in the interpreter: TRITON_INTERPRET=1")

CPU = torch.device("cpu")


def small(kernel="cope", **options):
    few = {"num_positions": 8} if kernel == "cope" else {}
    return case(kernel, "float32", 16, 20, 24, **{"batch": 1, "heads": 2, "groups": 1, **few, **options})


@pytest.fixture
def run(tmp_path, capfd):
    """Runs the command; returns the exit code, what it printed, and the rows in its folder."""

    def call(*arguments):
        code = gpu_check.main(["--device", "cpu", "--output", str(tmp_path / "found"), *arguments])
        rows = report.read_rows(tmp_path / "found" / "checks.csv")
        captured = capfd.readouterr()
        return code, captured.out, captured.err, rows

    return call


@pytest.mark.slow
def test_groups_in_processes(run, monkeypatch):
    """Real ones, of both kinds of checks; `test_kernel_cases` has all."""
    groups = [group for group in groups_on_cpu() if group.name in ("tiles plain", "model pope")]
    monkeypatch.setattr(gpu_check, "groups_on_cpu", lambda: iter(groups))
    code, out, err, rows = run()
    assert code == 0, err
    assert " 0 cases failed" in out
    assert {row["group"] for row in rows} == {group.name for group in groups}


@pytest.mark.parametrize("what", slow_but(["pope"], ["cope", "pope", "fox"]))
@pytest.mark.parametrize("mistake", ["wrong", "not written", "differs", "gradient"])
def test_finds_mistakes(monkeypatch, what, mistake):
    """Errors of the output and of a gradient; memory that is not written; results that differ from run to run."""
    modules = {"cope": (kernel_cope, "cope_attention"), "pope": (kernel_pope, "pope_attention")}
    module, name = modules.get(what, (kernel_plain, "plain_attention"))
    right = getattr(module, name)

    def kernel(query, *inputs, **options):
        if mistake == "gradient":
            # The value stays, the gradient of the queries doubles.
            return right(2 * query - query.detach(), *inputs, **options)
        out = right(query, *inputs, **options)
        if mistake == "wrong":
            return out * 1.01
        if mistake == "not written":
            hole = torch.empty(3, dtype=out.dtype)
            return torch.cat([out[..., :3] * 0 + hole, out[..., 3:]], -1)
        return out + 1e-6 * torch.rand_like(out)

    monkeypatch.setattr(module, name, kernel)
    expected = {"wrong": "output is off", "gradient": "dq is off"}.get(mistake, "differs between two runs")
    with pytest.raises(CheckFailed, match=expected):
        check_case(small(what), CPU)


def scaled_sums(monkeypatch):
    """The gradient of gates, and what the table's is made of."""
    right = kernel_cope.running_sums
    monkeypatch.setattr(kernel_cope, "running_sums", lambda *given: right(*given) * 1.001)


def scaled_steps(monkeypatch):
    """Interpolation between positions."""
    right = kernel_cope._interpolate

    def interpolate(*given):
        fraction, below, step = right(*given)
        return fraction, below, step * 1.001

    monkeypatch.setattr(kernel_cope, "_interpolate", interpolate)


def wrong_levels(monkeypatch):
    """The gradient of the table at floor and ceiling of each position are swapped."""
    right = kernel_cope._window_gradients

    def gradients(*given):
        found = right(*given)
        return found._replace(fraction=1.0 - found.fraction)

    monkeypatch.setattr(kernel_cope, "_window_gradients", gradients)


def shifted_count(monkeypatch):
    """Positions of the backward pass are off by a thousandth."""
    right = kernel_cope._Pass.window_backward

    def backward(self, grad, delta, window):
        return right(self, grad, delta, window._replace(total=window.total + (1 << 21) // 1000))

    monkeypatch.setattr(kernel_cope._Pass, "window_backward", backward)


def one_row(monkeypatch):
    """The gradient of one row of one head."""
    right = kernel_cope._Pass.window_backward

    def backward(self, *given):
        results = right(self, *given)
        results[0][0, 1, 7] *= 1.02
        return results

    monkeypatch.setattr(kernel_cope._Pass, "window_backward", backward)


@pytest.mark.parametrize(
    "mutate", slow_but([scaled_steps, one_row], [scaled_sums, scaled_steps, wrong_levels, shifted_count, one_row])
)
def test_finds_small_mistakes_in_the_kernels(monkeypatch, mutate):
    mutate(monkeypatch)
    with pytest.raises(CheckFailed, match="is off by"):
        check_case(small(), CPU)


def test_every_tile_is_checked(monkeypatch):
    """A mistake in the last tiles of one kernel only."""
    last, runs = kernel_flash._FLOAT32[-1], []
    right = kernel_launch.launch

    def launch(kernel, grid, candidates, arguments, constants, **options):
        def wrong(tiles):
            runs.append((kernel.fn.__name__, tiles))
            if kernel.fn.__name__ == "backward_rows_kernel" and tiles == last:
                arguments[6].add_(0.01)

        right(kernel, grid, candidates, arguments, constants, **options)
        wrong(kernel_launch.choose(kernel.fn.__name__, candidates, lambda tiles: None, None))

    monkeypatch.setattr(kernel_flash, "launch", launch)
    assert check_case(small("plain"), CPU)[1] <= 1
    assert {tiles for name, tiles in runs if name == "backward_rows_kernel"} == {kernel_flash._FLOAT32[0]}
    with pytest.raises(CheckFailed, match="dq is off"):
        check_case(small("plain"), CPU, all_tiles=True)


def test_long_cases(monkeypatch):
    """Some rows are compared, part by part; a mistake in the gradient of keys is found wherever it is."""
    monkeypatch.setattr(references, "ALL_ROWS", 64)
    monkeypatch.setattr(references, "SOME_ROWS", 32)
    monkeypatch.setattr(references, "LOGITS", 1000)
    long = case("plain", "float32", 16, 200, batch=1, heads=1, groups=1)
    rows = references.chosen_rows(200, CPU)
    assert (rows[0], rows[-1], len(rows)) == (0, 199, 32 - 2)
    checks, share = check_case(long, CPU)
    assert (checks, share <= 1) == (5, True)
    right = kernel_plain.flash_backward

    def backward(*given, **options):
        results = right(*given, **options)
        results[1][0, 0, 77] += 0.01
        return results

    monkeypatch.setattr(kernel_plain, "flash_backward", backward)
    with pytest.raises(CheckFailed, match="dk is off"):
        check_case(long, CPU)


def test_tf32(monkeypatch):
    """It is allowed within a case of this type only, and its inputs are exact in it."""
    right, found = kernel_plain.plain_attention, []
    before = torch.backends.cuda.matmul.fp32_precision

    def kernel(query, *inputs, **options):
        assert torch.equal(query, query.bfloat16().float())
        found.append(torch.backends.cuda.matmul.fp32_precision)
        # The error of TF32 is allowed.
        return right(query, *inputs, **options) * (1 + 2**-13)

    monkeypatch.setattr(kernel_plain, "plain_attention", kernel)
    check_case(case("plain", "tf32", 16, 80, batch=1, heads=2, groups=1), CPU)
    assert set(found) == {"tf32"}
    assert torch.backends.cuda.matmul.fp32_precision == before


# Groups in processes of their own; these functions are imported by them.


def passes(case, device, all_tiles):
    return 3, 0.5


def fails(case, device, all_tiles):
    if case.queries == 2:
        raise CheckFailed("output is off by 1")
    return 1, 0.1


def dies(case, device, all_tiles):
    if case.queries == 2:
        os.abort()
    return 1, 0.1


def loses_the_gpu(case, device, all_tiles):
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def runs_out_of_memory(once, case, device, all_tiles):
    if case.queries == 2 and not once.exists():
        once.touch()
        raise torch.OutOfMemoryError("no room for 2 GiB")
    return 1, 0.1


def sleeps(case, device, all_tiles):
    time.sleep(0.5 if case.queries == 1 else 60)
    return 1, 0.1


def statuses(rows):
    """The group, the length and the status of each row."""
    return [(row["group"], row["case"].split("/")[-1].split()[0], row["status"]) for row in rows]


def fake(name, check, count=3):
    return Group(name, tuple(case("plain", "float32", 16, length) for length in range(1, count + 1)), check)


FAKES = [fake("dies", dies), fake("fails", fails), fake("lost", loses_the_gpu), fake("passes", passes)]


def test_a_crash_ends_one_group(run, monkeypatch):
    """The others finish; a second run goes on behind it; the exit code stays."""
    monkeypatch.setattr(gpu_check, "groups_on_cpu", lambda: iter(FAKES))
    code, out, err, rows = run()
    assert code == 1
    found = {(group, length): status for group, length, status in statuses(rows)}
    assert found["dies", "1"] == found["fails", "1"] == found["fails", "3"] == "ok"
    assert found["dies", "2"] == "its process ended with exit code -6"
    assert found["fails", "2"].startswith("CheckFailed: output is off")
    assert found["lost", "1"].startswith("RuntimeError: CUDA error")
    assert not {("dies", "3"), ("lost", "2")} & set(found)
    assert sum(group == "passes" for group, _ in found) == 3
    # At once, with the command for this case alone.
    one = "plain float32 D=16 2x4/4x2/2 causal"
    assert f"FAILED {one}: CheckFailed: output is off by 1\n    whatwhere gpu-check --device cpu --case '{one}'" in err
    assert "9 of 12 cases, 2 of 4 groups, 12 comparisons passed, 3 cases failed" in out
    assert "not finished: dies, lost" in out
    # What failed is repeated, after what is open.
    code, out, err, more = run()
    assert code == 1
    assert "9 cases are in" in out
    assert "3 failed and are repeated" in out
    assert statuses(more[len(rows) :]) == [
        ("dies", "3", "ok"),
        ("dies", "2", "its process ended with exit code -6"),
        ("fails", "2", "CheckFailed: output is off by 1"),
        ("lost", "2", "RuntimeError: CUDA error: an illegal memory access was encountered"),
    ]
    assert "11 of 12 cases, 3 of 4 groups, 13 comparisons passed, 4 cases failed" in out


def test_what_failed_is_repeated(run, monkeypatch):
    """The latest row of a case counts."""
    monkeypatch.setattr(gpu_check, "groups_on_cpu", lambda: iter([fake("mended", fails)]))
    assert run()[0] == 1
    monkeypatch.setattr(gpu_check, "groups_on_cpu", lambda: iter([fake("mended", passes)]))
    code, out, err, rows = run()
    assert (code, len(rows)) == (0, 4), err
    assert "3 of 3 cases, 1 of 1 groups, 5 comparisons passed, 0 cases failed" in out


def dies_at_once(*arguments):
    os._exit(9)


def test_a_process_that_dies_before_its_first_case(run, monkeypatch):
    monkeypatch.setattr(gpu_check, "groups_on_cpu", lambda: iter([fake("passes", passes)]))
    monkeypatch.setattr(gpu_check, "_work", dies_at_once)
    code, out, _, rows = run()
    assert code == 1
    assert [row["status"] for row in rows] == ["its process ended with exit code 9"]
    assert "1 of 3 cases, 0 of 1 groups, 0 comparisons passed, 1 cases failed" in out


def test_nothing_checked_is_no_success(run, capfd):
    with pytest.raises(SystemExit):
        run("--minutes", "-1")
    assert "--minutes=-1.0 is not valid" in capfd.readouterr().err
    code, _, err, rows = run("--minutes", "0.0001")
    assert (code, rows) == (1, [])
    assert "nothing was checked" in err


def test_what_was_out_of_memory_runs_again_alone(run, monkeypatch, tmp_path):
    """In a process of its own, at the end."""
    groups = [fake("first", functools.partial(runs_out_of_memory, tmp_path / "once"), 2), fake("second", passes, 1)]
    monkeypatch.setattr(gpu_check, "groups_on_cpu", lambda: iter(groups))
    code, _, err, rows = run()
    assert code == 0, err
    assert statuses(rows) == [
        ("first", "1", "ok"),
        ("first", "2", "out of memory: no room for 2 GiB"),
        ("second", "1", "ok"),
        ("first", "2", "ok"),
    ]


def test_processes_for_the_memory_of_a_gpu(monkeypatch):
    monkeypatch.setattr(gpu_check.os, "cpu_count", lambda: 64)
    for free, expected in ((80, 12), (23, 5), (2, 1)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda free=free: (free << 30, 80 << 30))
        assert gpu_check.jobs_on("cuda") == expected
    assert gpu_check.jobs_on("cpu") == 1


def test_rows_of_another_state_are_not_taken(run, monkeypatch):
    monkeypatch.setattr(gpu_check, "groups_on_cpu", lambda: iter([fake("passes", passes, 1)]))
    assert run()[0] == 0
    monkeypatch.setattr(gpu_check, "device_name", lambda device: "another")
    code, out, _, rows = run()
    assert (code, len(rows)) == (0, 2)
    assert "1 of 1 cases" in out


def says_its_process(case, device, all_tiles):
    return os.getpid(), 0.1


def test_a_process_checks_one_group_after_the_other(tmp_path):
    """Until it dies, or loses the GPU."""
    groups = [fake("one", says_its_process, 2), fake("lost", loses_the_gpu, 2), fake("two", says_its_process, 1)]
    groups += [fake("dies", dies, 2), fake("three", says_its_process, 1), fake("four", says_its_process, 1)]
    found = list(check_all(groups, "cpu", tmp_path, 1, time.monotonic() + 100))
    pids = {group.name: row["comparisons"] for group, row in found if group.check is says_its_process}
    assert len({*pids.values()}) == 3
    assert pids["three"] == pids["four"]
    assert [group.name for group, _ in found] == ["one", "one", "lost", "two", "dies", "dies", "three", "four"]


@pytest.mark.slow
def test_time_is_limited(tmp_path):
    """What has not finished is ended; nothing more begins."""
    start = time.monotonic()
    groups = [fake("first", sleeps), fake("second", sleeps)]
    found = list(check_all(groups, "cpu", tmp_path, 1, time.monotonic() + 20))
    assert [(group.name, row["status"]) for group, row in found] == [("first", "ok")]
    assert time.monotonic() - start < 40
    assert not list(check_all(groups, "cpu", tmp_path, 1, time.monotonic() - 1))


def test_one_case(monkeypatch, capsys):
    """In this process, without files."""
    monkeypatch.setattr(gpu_check, "groups_on_cpu", lambda: iter([fake("fails", fails)]))
    assert gpu_check.main(["--device", "cpu", "--case", "plain float32 D=16 2x4/4x1/1 causal"]) == 0
    assert "1 comparisons passed, the largest error is 0.100" in capsys.readouterr().out
    with pytest.raises(CheckFailed):
        gpu_check.main(["--device", "cpu", "--case", "plain float32 D=16 2x4/4x2/2 causal"])
    assert gpu_check.main(["--device", "cpu", "--case", "nothing"]) == 2


VERSIONS = [("2.5.0", "3.6.0", False), ("2.3.1", "3.6.0", True), ("2.5.0", "3.7.1", True)]


@pytest.mark.parametrize(("numpy", "triton", "works"), VERSIONS)
def test_the_interpreter_of_older_versions(monkeypatch, capsys, numpy, triton, works):
    """It says so in a sentence, and goes on with compiled kernels if there is a GPU."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(gpu_check.importlib.metadata, "version", {"numpy": numpy, "triton": triton}.get)
    assert bool(gpu_check.interpreter_problem()) == (not works)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert gpu_check.parse(["--device", "cpu"]).device == ("cpu" if works else "cuda")
    sentence = "Triton 3.6.0's interpreter does not work with NumPy 2.5.0: it needs NumPy before 2.4, or Triton 3.7"
    assert (sentence in capsys.readouterr().out) == (not works)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if not works:
        with pytest.raises(SystemExit) as exit_:
            gpu_check.parse(["--device", "cpu"])
        assert exit_.value.code == 2
        assert sentence in capsys.readouterr().err


def test_stages_of_the_benchmark(monkeypatch, tmp_path):
    """Each in a process, with what is left of the time and the folder of kernels; what decides is not tuned."""
    calls, codes = [], iter([0, -6, 0, 0, 0, 1, 0])

    def run(command, env):
        calls.append((command, env["TRITON_CACHE_DIR"]))
        return gpu_check.subprocess.CompletedProcess(command, next(codes))

    monkeypatch.setattr(gpu_check.subprocess, "run", run)
    stages = [*gpu_check.DECISIVE, *gpu_check.STAGES]
    assert gpu_check.run_benchmark(tmp_path, stages, time.monotonic() + 60) == 1
    assert len(calls) == len(stages) == 7
    from whatwhere.scripts.benchmark.command import parse

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = [parse(command[4:]) for command, _ in calls]
    for index, (parsed, (_, cache)) in enumerate(zip(found, calls)):
        tiles = None if index < 3 else tmp_path / "tiles.json"
        assert (parsed.resume, parsed.tiles, cache) == (True, tiles, str(tmp_path / "cache"))
        assert 0 < parsed.minutes <= 1
    # SDPA with RoPE by backend, plain, CoPE, PoPE, and PoPE rotated; decoding in a graph at batch 1 and 16.
    order = ["rope-sdpa-cudnn", "plain-triton", "cope-triton-half", "pope-triton", "pope-sdpa-unpadded-cudnn"]
    assert [name for name in found[0].attention if name in order] == order
    assert found[0].lengths == [16384, 4096]
    assert [(one.batch, one.lengths) for one in found[1:3]] == [(1, [4096]), (16, [16384])]
    assert all("decoding graph" in one.directions for one in found[1:3])
    assert not gpu_check.run_benchmark(tmp_path, stages, time.monotonic() - 1)
    assert len(calls) == 7


def test_what_decides_comes_first(monkeypatch, tmp_path, capfd):
    """One case of each kernel and head dim, the benchmark of them, the other cases, the rest; each up to its time."""
    order, start = [], time.monotonic()
    groups = [fake("first cope", passes, 1), fake("long cope", passes, 1), fake("tiles cope", passes, 1)]

    def check(groups, device, cache, jobs, until):
        order.append(([group.name for group in groups], round(until - start)))
        for group in groups:
            yield group, {"case": str(group.cases[0]), "status": "ok", "comparisons": "1", "error": "0", "seconds": "0"}

    def benchmark(folder, stages, until):
        order.append((len(stages), round(until - start)))
        return 0

    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_check, "groups_on_gpu", lambda: iter(groups))
    for name, function in (("check_all", check), ("run_benchmark", benchmark), ("jobs_on", lambda device: 1)):
        monkeypatch.setattr(gpu_check, name, function)
    monkeypatch.setattr(gpu_check, "device_name", lambda device: "a GPU")
    monkeypatch.setattr(gpu_check, "versions", lambda device: dict.fromkeys(gpu_check.STATE, ""))
    options = ["--output", str(tmp_path), "--minutes", "10"]
    assert gpu_check.main(options) == 0
    assert order == [(["first cope"], 150), (3, 360), (["long cope", "tiles cope"], 480), (4, 600)]
    # What is checked is not checked again.
    order.clear()
    assert gpu_check.main(options) == 0
    assert [name for name, _ in order] == [[], 3, [], 4]
    order.clear()
    assert gpu_check.main([*options[:1], str(tmp_path / "other"), "--no-benchmark"]) == 0
    assert [name for name, _ in order] == [["first cope", "long cope", "tiles cope"]]


def test_rounding_at_integers_is_no_mistake(monkeypatch):
    """Positions just above an integer may be taken for just below, where the slope is another one."""

    def kernel(query, key, value, table, *, gate_key, position_query, key_ranges, scaling, position_scale, dropout):
        seen = visible(query.shape[2], key.shape[2], torch.arange(query.shape[2]))
        logits = query @ key.transpose(2, 3) * scaling
        gates = torch.sigmoid(logits) * seen
        positions = contextual_positions_of_all(gates)
        last = table.shape[1] - 1
        z = query @ table * position_scale
        floor = (positions.detach() - 4e-5).clamp(0, last).long()
        step = z.diff(dim=-1, append=z[..., -1:])
        logits = logits + z.gather(-1, floor) + (positions.clamp(max=last) - floor) * step.gather(-1, floor)
        return torch.softmax(logits.masked_fill(~seen, -1e30), -1) @ value

    monkeypatch.setattr(kernel_cope, "cope_attention", kernel)
    one = case("cope", "float32", 16, 192)
    assert check_case(one, CPU)[1] <= 1
    # Compared with these rows, it would be one.
    monkeypatch.setattr(references, "NEAR", 0.0)
    with pytest.raises(CheckFailed, match="is off by"):
        check_case(one, CPU)


def test_a_case_with_few_rows_to_compare_is_refused(monkeypatch):
    monkeypatch.setattr(references, "NEAR", 0.01)
    with pytest.raises(CheckFailed, match="rows are not compared: choose other inputs"):
        check_case(case("cope", "float32", 16, 100, batch=1, heads=1, groups=1), CPU)


def test_undecided_rows():
    """Positions near integers from 1 to the last, of keys that the row sees."""
    query, key = torch.zeros(1, 1, 4, 1, dtype=torch.float64), torch.ones(1, 1, 4, 1, dtype=torch.float64)
    # Every gate of a row is alike: 1/2, nearly 1/2, 0.3, nearly 0.
    wanted = torch.tensor([0.5, 0.5 + 1e-7, 0.3, 1e-7], dtype=torch.float64)
    query[0, 0, :, 0] = wanted.logit()
    options = {"rows": torch.arange(4), "scaling": 1.0}
    found = references.undecided_rows(query, key, torch.tensor([1, 2]), **options)
    # The first row sees one key, up to 0.5.
    assert found.tolist() == [[[False, True, False, False]]]
    key_ranges = torch.tensor([[0, 4]] * 4 + [[1, 0]] * 4, dtype=torch.int32)[None, None]
    found = references.undecided_rows(query, key, torch.tensor([1, 2]), key_ranges=key_ranges, **options)
    assert found.tolist() == [[[True, True, False, False]]]


def test_memory_is_poisoned():
    with gpu_check.poisoned():
        assert torch.empty(5).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu(capsys, monkeypatch):
    """Nothing is pretended."""
    monkeypatch.delenv("TRITON_INTERPRET")
    for arguments, text in (([], "finds no CUDA device"), (["--device", "cpu"], "TRITON_INTERPRET=1")):
        with pytest.raises(SystemExit) as exit_:
            gpu_check.main(arguments)
        assert exit_.value.code == 2
        assert text in capsys.readouterr().err


def test_groups():
    """Every kernel and every mask is among a GPU's, the long ones first; what is compiled without a GPU is checked."""
    gpu, cpu = list(groups_on_gpu()), list(groups_on_cpu())
    first = [group.cases[0] for group in gpu[: 2 * len(KERNELS)]]
    assert {(one.kernel, one.head_dim) for one in first} == set(itertools.product(KERNELS, (64, 128)))
    assert all(group.name.startswith(gpu_check.FIRST_GROUPS) for group in gpu[: 2 * len(KERNELS)])
    assert gpu[2 * len(KERNELS)].name.startswith("long cope")
    cases = [one for group in gpu for one in group.cases]
    assert {one.mask for one in cases} == {"causal", *MASKS}
    assert {one.dtype for one in cases} == {"float32", "tf32", "bfloat16", "float16"}
    assert {dict(one.options).get("gate_values") for one in cases} >= {None, "open", "closed"}
    for kernel in KERNELS:
        for kind in ("long", "tiles", "shapes", "wide"):
            assert any(f"{group.name} ".startswith(f"{kind} {kernel} ") for group in gpu)
        assert any(group.name == f"tiles {kernel}" for group in cpu)
    for encoding in ("cope", "cope+rope", "pope", "fox", "fox+rope", "alibi"):
        assert any(group.name == f"model {encoding}" for group in gpu)
    for groups in (gpu, cpu):
        assert len({group.name for group in groups}) == len(groups)
        assert all(len({str(one) for one in group.cases}) == len(group.cases) for group in groups)
    tiles = {(one.kernel, one.options, one.mask) for group in gpu if group.all_tiles for one in group.cases}
    compiled = [call.args[0] for _, call in compile_kernels.calls()]
    assert {(one.kernel, one.options, one.mask) for one in compiled} == tiles


def test_summary_is_one_screen(tmp_path):
    """From recorded files."""

    def write(name, rows):
        with (tmp_path / name).open("w", newline="") as file:
            writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
            writer.writeheader()
            writer.writerows(rows)

    rows = []
    for provider in (*report.SHOWN, *report.BASELINES):
        for head_dim in ("64", "128"):
            for length in ("1024", "4096", "16384", "65536"):
                for direction in ("forward", "backward", "forward+backward", "decoding", "decoding graph"):
                    memory = "1.1" if direction == "forward+backward" else ""
                    row = {"part": "attention", "shape": f"1x8x{length}x{head_dim}", "ratio": "1.25", "status": "ok"}
                    row |= {"milliseconds": "2" if provider == "pope-triton" else "1.6", "note": ""}
                    if provider == "cope-triton-half":
                        row["note"] = "ms of kernels: _window_rows 2.1, forward_kernel 1.0; tiles"
                    row |= {"direction": direction, "length": length, "head_dim": head_dim, "memory_ratio": memory}
                    rows.append({**row, "provider": provider, "device": "GPU"})
    rows += [{**rows[0], "direction": "", "provider": f"slow{index}", "status": "out of memory"} for index in range(20)]
    rows.append({**rows[0], "direction": "", "provider": "cope-triton-open", "status": "check failed: dq is off"})
    write("benchmark.csv", rows)
    names = ["forward_kernel (64,) on GPU", "rows (64,) on GPU"]
    times = [(names[0], "128x64w8s3", "2.0"), (names[0], "64x64w4s2", "1.6")]
    times += [(names[1], "64x64w4s2", "1"), (names[1], "32x32w4s1", "2")]
    write("tiles.csv", [dict(zip(("kernel", "tiles", "milliseconds"), one)) for one in times])
    common = {"group": "fails", "comparisons": "", "status": "ok"}
    checks = [{**common, "case": "a", "comparisons": "5"}, {**common, "case": "b", "status": "CheckFailed: no"}]
    lines = gpu_check.summary([fake("fails", fails), fake("left", passes)], checks, tmp_path, {"device": "GPU"})
    assert len(lines) < 80
    assert lines[0] == "checked: 2 of 6 cases, 0 of 2 groups, 5 comparisons passed, 1 cases failed"
    assert lines[1] == "  FAILED fails, 1 of its cases: b: CheckFailed: no"
    assert lines[2] == "  not finished: fails, left"
    cope = next(line for line in lines if line.startswith("cope-triton-half") and "1x8x4096x128 " in line)
    assert cope.endswith(
        " forward 1.25, backward 1.25, forward+backward 1.25, memory 1.10, decoding 1.25!, decoding graph 1.25!"
    )
    assert not any(line.startswith("rope-sdpa") or " 1x8x1024x" in line for line in lines)
    ours = "faster for pope, training, head dim 64 (`auto` runs 'sdpa'): 1x8x4096x64 pope-sdpa-"
    assert any(line.startswith(ours) and "(1.25)" in line for line in lines)
    assert "cope at 16384, head dim 64, ms of kernels: _window_rows 2.1, forward_kernel 1.0" in lines
    assert "FAILED cope-triton-open: check failed: dq is off (1x8x1024x64)" in lines
    assert "not measured, in addition: 10 kinds" in lines
    assert "tiles: 2 kernels measured, the first are the fastest of 1; others:" in lines
    assert lines[-1] == "  1.25 times faster, forward_kernel (64,): 64x64w4s2 instead of 128x64w8s3"
