"""`whatwhere gpu-check`: its help is in `cli/gpu_check.py`."""

import argparse
import collections
import contextlib
import copy
import dataclasses
import importlib.metadata
import itertools
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

# Must be set before CUDA's libraries are loaded, for deterministic matrix products.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from torch.torch_version import TorchVersion

from whatwhere_cli.gpu_check import parser

from ..benchmark.attention import DECODED, FIRST, FOREIGN, MORE, relative_errors, tiles_note
from ..benchmark.kernel_cases import KERNELS, MASKS, Case, case, precision_of
from ..benchmark.kernel_tiles import chosen_by
from ..benchmark.measure import CheckFailed, device_is_lost, one_line, out_of_memory
from ..benchmark.references import checked_gradient, chosen_rows, in_parts, results_of
from ..benchmark.report import append_row, device_name, now, read_rows, summary_of_benchmark, versions

# Maximum share of rows in a case that are not compared; with fewer rows than this the tolerance is a whole unit.
MOST_UNDECIDED, FEW_ROWS = 0.1, 64
# The shares of the time after which the first check, what decides of the benchmark, and the check end.
FIRST_SHARE, DECISIVE_SHARE, CHECK_SHARE = 0.25, 0.6, 0.8
OUT_OF_MEMORY = "out of memory"
# Device memory for a process.
JOB_BYTES = 4 << 30
FIELDS = ("date", "group", "case", "status", "comparisons", "error", "seconds", "code", "device", "torch", "triton")
# What tells whether a row is about the present state.
STATE = ("code", "device", "torch", "triton")


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Within it, new memory is filled with NaN."""
    # PyTorch warns about operations without a deterministic version; two runs are compared in any case.
    warnings.filterwarnings("ignore", message=".*does not have a deterministic implementation")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


# One case.


@contextlib.contextmanager
def nth_tiles(index: int) -> Iterator[list[int]]:
    """Within it, kernels run with those tiles that are at `index` of those that compile, or the last.

    Yields the lengths of the lists that were used.
    """
    from whatwhere.kernel_launch import choose as original

    lengths = [1]

    def choose(name: str, candidates: Sequence[Any], compiles: Callable[[Any], Any], run: Any) -> Any:
        fitting = [tiles for tiles in candidates if compiles(tiles) is None]
        if not fitting:
            return original(name, candidates, compiles, run)
        lengths.append(len(fitting))
        return fitting[min(index, len(fitting) - 1)]

    with chosen_by(choose):
        yield lengths


def check_case(case: Case, device: torch.device, all_tiles: bool = False) -> tuple[int, float]:
    """Checks one case; returns the number of comparisons, and the largest error as a share of the allowed error."""
    with precision_of(case):
        call = KERNELS[case.kernel].call(case, device)
        inputs = [tensor.detach().requires_grad_() for tensor in call.inputs]
        exact_inputs = [tensor.detach().double().requires_grad_() for tensor in inputs]
        shape = (case.batch, case.heads, case.queries, case.head_dim)
        rows = chosen_rows(case.queries, device)
        parts = in_parts(rows, case.batch * case.heads * case.keys)
        grad = torch.randn(shape, generator=torch.Generator(device).manual_seed(1), device=device)
        grad, undecided = checked_gradient(grad.to(inputs[0].dtype), call.undecided, exact_inputs, parts)
        # One row may always be left out, since it is a large share of a small case.
        count = case.batch * case.heads * len(rows)
        if undecided > max(1, MOST_UNDECIDED * count):
            raise CheckFailed(f"{undecided} of {count} rows are not compared: choose other inputs")
        exact = results_of(call.reference, exact_inputs, grad, parts)
        plain = results_of(call.reference, inputs, grad, parts)
        names = ["output", *call.names]
        # Rounding errors of a few rows do not average out.
        units = 1.0 if count < FEW_ROWS else 0.5
        # TF32 has as many digits as float16.
        dtype = torch.float16 if case.dtype == "tf32" else inputs[0].dtype
        tolerance = 5e-5 if dtype == torch.float32 else units * torch.finfo(dtype).eps
        options = {"factor": 2.0, "tolerance": tolerance, "scale": 0.1 * grad.float().norm().item()}

        def compare() -> float:
            runs = []
            for _ in range(2):
                with poisoned():
                    out = call.kernel(*inputs)
                    runs.append([out.detach()[:, :, rows], *torch.autograd.grad(out, inputs, grad)])
            for name, first, second in zip(names, *runs):
                if not torch.equal(first, second):
                    raise CheckFailed(f"{name} differs between two runs, or is not a number")
            share = relative_errors(runs[0], plain, exact, names, **options)
            with torch.no_grad(), poisoned():
                inference = call.kernel(*inputs)[:, :, rows]
            relative_errors([inference], plain[:1], exact[:1], ["output without gradients"], **options)
            return share

        shares, index, last = [], 0, 0
        while index <= last:
            with nth_tiles(index) as lengths:
                try:
                    shares.append(compare())
                except CheckFailed as error:
                    raise CheckFailed(f"{error} (tiles: {tiles_note()})") from None
            last = max(lengths) - 1 if all_tiles else 0
            index += 1
    return len(shares) * (len(names) + 1), max(shares)


def check_model(case: Case, device: torch.device, all_tiles: bool = False) -> tuple[int, float]:
    """Compares a small model on the kernels with the same eager model in a wider type.

    Logits, gradients of all parameters, and the logits of tokens generated after a padded batch.
    """
    from whatwhere import WhatWhereLlamaConfig, WhatWhereLlamaForCausalLM
    from whatwhere.forward_arguments import CACHE

    torch.manual_seed(0)
    dtype, parameters = getattr(torch, case.dtype), dict(case.options)
    config = WhatWhereLlamaConfig(
        vocab_size=64,
        hidden_size=case.heads * case.head_dim,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=case.heads,
        num_key_value_heads=case.groups,
        max_position_embeddings=256,
        position_encoding=case.kernel,
        position_encoding_parameters=parameters or None,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = WhatWhereLlamaForCausalLM._from_config(config).to(device, dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "encodings." in name:
                parameter.uniform_(-1.0, 0.0)
    tokens = torch.randint(3, 64, (case.batch, case.queries), device=device)
    mask = torch.ones_like(tokens)
    mask[0, : case.queries // 3] = 0
    # Logits of padding rows are not compared.
    labels = tokens.masked_fill((mask == 0) | (mask.roll(1, 1) == 0), -100)
    continuation = torch.randint(3, 64, (case.batch, 4), device=device)

    def run(implementation: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        copied = copy.deepcopy(model).to(dtype)
        copied.set_attn_implementation(implementation)
        out = copied(tokens, attention_mask=mask, labels=labels)
        out.loss.backward()
        found = {"logits": out.logits[mask.bool()].detach()}
        for name, parameter in copied.named_parameters():
            if parameter.grad is not None:
                found[f"gradient of {name}"] = parameter.grad
        with torch.no_grad():
            cache = copied(tokens, attention_mask=mask, use_cache=True)[CACHE]
            seen = mask
            for number, step in enumerate(continuation.T):
                seen = torch.cat((seen, torch.ones_like(seen[:, :1])), dim=1)
                logits = copied(step[:, None], attention_mask=seen, cache=cache).logits
                found[f"logits of cached step {number}"] = logits
        return found

    found, plain, exact = run("triton", dtype), run("eager", dtype), run("eager", torch.float64)
    if found.keys() != exact.keys():
        raise RuntimeError(f"gradients of other parameters than expected: {sorted(found.keys() ^ exact.keys())}")
    # The rest of the model also rounds, so the tolerance is one unit instead of half a unit.
    tolerance = 1e-4 if dtype == torch.float32 else torch.finfo(dtype).eps
    scale = 0.01 * max(tensor.norm().item() for name, tensor in exact.items() if name.startswith("gradient"))
    ours, theirs, truth = (list(one.values()) for one in (found, plain, exact))
    return len(found), relative_errors(ours, theirs, truth, list(found), factor=2, tolerance=tolerance, scale=scale)


# Which cases.


@dataclasses.dataclass(frozen=True)
class Group:
    """Cases that share their compiled kernels, and a process."""

    name: str
    cases: tuple[Case, ...]
    check: Callable[[Case, torch.device, bool], tuple[int, float]] = check_case
    all_tiles: bool = False


def models() -> list[str]:
    """Returns the encodings that have a kernel."""
    from whatwhere import WhatWhereLlamaConfig
    from whatwhere.attention_choice import supported_implementations
    from whatwhere.position_plan import list_position_encodings

    configs = {name: WhatWhereLlamaConfig(position_encoding=name) for name in list_position_encodings()}
    return [name for name, config in configs.items() if "triton" in supported_implementations(config)]


# What the names of the groups begin with that come before the benchmark.
FIRST_GROUPS = "first "


def groups_on_gpu() -> Iterator[Group]:
    """Yields the groups to check on a GPU, the most important first: one case of each kernel and head dim."""
    for head_dim, name in itertools.product((64, 128), KERNELS):
        yield Group(f"{FIRST_GROUPS}{name} bfloat16 D={head_dim}", (case(name, "bfloat16", head_dim, 4096, batch=1),))
    for head_dim, name in itertools.product((64, 128), KERNELS):
        lengths = ((16384, 16384), (65536, 65536), (1, 65536))
        long = [case(name, "bfloat16", head_dim, *one, batch=1, heads=2, groups=2) for one in lengths]
        yield Group(f"long {name} bfloat16 D={head_dim}", tuple(long))
    yield from _tiles((("bfloat16", 64), ("bfloat16", 128)))
    for encoding in models():
        gates: tuple[dict[str, Any], ...] = ({},)
        if encoding == "cope":
            gates = ({}, *({"gates": gate, "every_n_layers": 2} for gate in ("separate_key", "value")))
        types = itertools.product(("bfloat16", "float32"), gates)
        cases = tuple(case(encoding, dtype, 64, 100, groups=2, **options) for dtype, options in types)
        yield Group(f"model {encoding}", cases, check_model)
    yield from _shapes((("bfloat16", 64),))
    # Where shared memory is short: wide heads in float32, with many heads for a key head, and TF32.
    for name in KERNELS:
        wide = [case(name, dtype, width, 300) for dtype, width in (("tf32", 64), ("tf32", 128), ("float32", 256))]
        yield Group(f"wide {name}", (*wide, case(name, "float32", 256, 1, 300, heads=128, groups=1)))
    yield from _tiles((("float16", 64), ("float32", 64), ("bfloat16", 256), ("bfloat16", 40), ("float32", 16)))
    yield from _shapes((("float32", 64), ("float16", 80), ("bfloat16", 128)))


def _tiles(types: Sequence[tuple[str, int]]) -> Iterator[Group]:
    for (dtype, head_dim), (name, kernel) in itertools.product(types, KERNELS.items()):
        # Some rows more than whole blocks of any tiles, and decoding.
        lengths = ((1100, 1300), (1, 1300))
        kinds = itertools.product(kernel.variants, lengths)
        cases = tuple(case(name, dtype, head_dim, *length, **variant) for variant, length in kinds)
        yield Group(f"tiles {name} {dtype} D={head_dim}", cases, all_tiles=True)


def _shapes(types: Sequence[tuple[str, int]]) -> Iterator[Group]:
    lengths = ((1, 1), (63, 63), (100, 257), (257, 257), (1, 300), (1000, 1000))
    for (dtype, head_dim), (name, kernel) in itertools.product(types, KERNELS.items()):
        cases = [case(name, dtype, head_dim, *length) for length in lengths]
        for mask, length in itertools.product(MASKS, ((257, 257), (100, 300), (1, 300))):
            cases.append(case(name, dtype, head_dim, *length, batch=3, groups=2, mask=mask))
        cases += [case(name, dtype, head_dim, 257, 300, **content) for content in kernel.contents]
        cases += [case(name, dtype, head_dim, 257, mask="padding", **content) for content in kernel.contents[:2]]
        yield Group(f"shapes {name} {dtype} D={head_dim}", tuple(cases))


def groups_on_cpu() -> Iterator[Group]:
    """Yields groups for the interpreter (a minute): every kind of check, on tiny shapes.

    Without bfloat16, which the interpreter truncates instead of rounding.
    """
    for name, kernel in KERNELS.items():
        small: dict[str, Any] = {"batch": 1, "heads": 2, "groups": 2}
        few: dict[str, Any] = {"num_positions": 8} if name == "cope" else {}
        decoded = case(name, "float16", 16, 1, 40, **{**small, **few, **kernel.variants[1]})
        yield Group(f"tiles {name}", (case(name, "float32", 16, 33, 40, **small, **few), decoded), all_tiles=True)
        variants = [case(name, "float32", 16, 20, 24, **{**small, **few, **one}) for one in kernel.variants[3:]]
        contents = [case(name, "float32", 16, 20, 24, **small, **one) for one in kernel.contents[:3]]
        masked = case(name, "float16", 16, 40, batch=2, heads=2, groups=1, mask="padding", **few)
        yield Group(f"shapes {name}", (*variants, *contents, masked))
    # Tests of `triton` in models have the other encodings.
    for encoding in ("cope", "pope", "fox"):
        yield Group(f"model {encoding}", (case(encoding, "float32", 16, 20, groups=2),), check_model)


# Processes.


def _work(device: str, cache: str, connection: Any) -> None:
    """Checks the cases of groups in a process, as they come; sends a row for each, and whether the GPU is lost."""
    os.environ |= {"TRITON_CACHE_DIR": cache, "TRITON_INTERPRET": "1" if device == "cpu" else "0"}
    torch.set_num_threads(1)
    while True:
        try:
            group = connection.recv()
        except EOFError:
            return
        for one in group.cases:
            start, lost = time.perf_counter(), False
            try:
                comparisons, error = group.check(one, torch.device(device), group.all_tiles)
                row = {"status": "ok", "comparisons": str(comparisons), "error": f"{error:.3f}"}
            except Exception as error:
                # Continue with the other cases, if the GPU can be used.
                lost = device_is_lost(error)
                kind = OUT_OF_MEMORY if out_of_memory(error) else type(error).__name__
                row = {"status": f"{kind}: {one_line(error)}"}
            row |= {"case": str(one), "seconds": f"{time.perf_counter() - start:.1f}"}
            connection.send((row, lost))
            if lost:
                return
        # The others need the memory.
        torch.cuda.empty_cache()


def check_all(
    groups: Sequence[Group], device: str, cache: pathlib.Path, jobs: int, until: float, last: bool = False
) -> Iterator[tuple[Group, dict[str, str]]]:
    """Yields groups with rows of their cases as they come, up to a time of the monotonic clock.

    Each process checks one group after the other, until it dies or loses the GPU. Cases that were out of memory run
    once more at the end, alone: they have two rows.
    """
    # A fork of a process that asked for the GPU cannot use it, and some imports ask.
    context: Any = multiprocessing.get_context("forkserver" if device == "cpu" else "spawn")
    if device == "cpu":
        context.set_forkserver_preload(["whatwhere.scripts.commands.gpu_check", "whatwhere"])
    waiting, again = list(groups), []
    # Processes by connection; those at work, with the cases without a row.
    processes: dict[Any, Any] = {}
    running: dict[Any, tuple[Group, list[Case]]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs and time.monotonic() < until:
                idle = [connection for connection in processes if connection not in running]
                connection = idle[0] if idle else _started(context, device, cache, processes)
                running[connection] = waiting[0], list(waiting[0].cases)
                # One that died since its last row is noticed below.
                with contextlib.suppress(BrokenPipeError):
                    connection.send(waiting.pop(0))
            left = until - time.monotonic()
            if left <= 0:
                return
            ready: list[Any] = multiprocessing.connection.wait(list(running), timeout=left)
            for connection in ready:
                group, cases = running[connection]
                try:
                    row, lost = connection.recv()
                except (EOFError, ConnectionResetError):
                    processes[connection].join()
                    code = processes.pop(connection).exitcode
                    del running[connection]
                    yield group, {"case": str(cases[0]), "status": f"its process ended with exit code {code}"}
                    continue
                one = cases.pop(0)
                if row["status"].startswith(OUT_OF_MEMORY):
                    again.append(dataclasses.replace(group, cases=(one,)))
                if lost or not cases:
                    del running[connection]
                if lost:
                    processes.pop(connection).join()
                yield group, row
    finally:
        for connection, process in processes.items():
            connection.close()
            if connection in running:
                process.kill()
            process.join()
    if again and not last:
        yield from check_all(again, device, cache, 1, until, last=True)


def _started(context: Any, device: str, cache: pathlib.Path, processes: dict[Any, Any]) -> Any:
    """Starts a process that checks groups, and returns its connection."""
    connection, other = context.Pipe()
    process = context.Process(target=_work, args=(device, str(cache), other))
    process.start()
    other.close()
    processes[connection] = process
    return connection


# The benchmark: each stage in a process.

# What decides, with the first tiles that fit: at a batch of 16,384 tokens, then one new token for 1 and 16 sequences.
DECISIVE = (
    ["--parts", "attention", "--lengths", "16384,4096", "--providers", ",".join(FIRST)],
    *(
        ["--parts", "attention", "--providers", ",".join(DECODED), "--directions", "decoding,decoding graph", *shape]
        for shape in (["--lengths", "4096", "--batch", "1"], ["--lengths", "16384", "--batch", "16"])
    ),
)
# The rest, with tiles that are measured.
STAGES = (
    ["--parts", "attention", "--lengths", "65536,1024", "--providers", ",".join(FIRST)],
    ["--parts", "model"],
    ["--parts", "attention", "--providers", ",".join(MORE)],
    # Third-party code comes last.
    ["--parts", "attention", "--providers", ",".join(FOREIGN)],
)


def run_benchmark(folder: pathlib.Path, stages: Sequence[list[str]], until: float) -> int:
    """Runs stages of the benchmark up to a time of the monotonic clock; returns the largest exit code."""
    code = 0
    for stage in stages:
        minutes = (until - time.monotonic()) / 60
        if minutes <= 0:
            print(f"left out, no time: whatwhere benchmark {' '.join(stage)}")
            continue
        files = ["--output", str(folder / "benchmark.csv"), "--resume"]
        files += ["--tiles", str(folder / "tiles.json")] if stage in STAGES else []
        command = [sys.executable, "-m", "whatwhere", "benchmark", "--device", "cuda", "--minutes", f"{minutes:.2f}"]
        environment = {**os.environ, "TRITON_CACHE_DIR": str(folder / "cache")}
        done = subprocess.run([*command, *files, *stage], env=environment).returncode
        if done not in (0, 1):
            print(f"the benchmark ended with exit code {done}: {' '.join(stage)}", file=sys.stderr)
        code = max(code, 1 if done else 0)
    return code


# The command.


def summary(
    groups: Sequence[Group], rows: Sequence[dict[str, str]], folder: pathlib.Path, state: dict[str, str]
) -> list[str]:
    """Returns one screen: what was checked, what failed, what was left out, the benchmark's figures, the tiles."""
    failed = [row for row in rows if row["status"] != "ok"]
    done = collections.Counter(row["group"] for row in rows)
    left = [group.name for group in groups if done[group.name] < len(group.cases)]
    comparisons = sum(int(row["comparisons"] or 0) for row in rows)
    lines = [
        f"checked: {len(rows)} of {sum(len(group.cases) for group in groups)} cases, {len(groups) - len(left)} of "
        f"{len(groups)} groups, {comparisons} comparisons passed, {len(failed)} cases failed"
    ]
    for name, count in collections.Counter(row["group"] for row in failed).items():
        first = next(row for row in failed if row["group"] == name)
        lines.append(f"  FAILED {name}, {count} of its cases: {first['case']}: {first['status'][:120]}")
    if left:
        lines.append(f"  not finished: {', '.join(left[:12])}" + f", and {len(left) - 12} more" * (len(left) > 12))
    return [*lines, *summary_of_benchmark(read_rows(folder / "benchmark.csv", **state), folder / "tiles.csv")]


def interpreter_problem() -> str:
    """Returns why Triton's interpreter does not work here, in one sentence, or an empty string."""
    try:
        old, new = (TorchVersion(importlib.metadata.version(name)) for name in ("triton", "numpy"))
    except importlib.metadata.PackageNotFoundError:
        return ""
    if old >= "3.7" or new < "2.4":
        return ""
    return f"Triton {old}'s interpreter does not work with NumPy {new}: it needs NumPy before 2.4, or Triton 3.7"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parsed = parser().parse_args(arguments)
    interpreted = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0", "false", "False")
    problem = interpreter_problem() if interpreted and parsed.device == "cpu" else ""
    if problem and torch.cuda.is_available():
        print(f"{problem}; checking the compiled kernels on the GPU instead.", flush=True)
        os.environ["TRITON_INTERPRET"], interpreted, parsed.device = "0", False, "cuda"
    elif problem:
        parser().error(f"{problem}; and PyTorch finds no CUDA device for the compiled kernels")
    if parsed.device == "cuda" and not torch.cuda.is_available():
        parser().error(
            f"PyTorch {torch.__version__} finds no CUDA device: nothing was checked. Without a GPU, `make test` runs "
            "the kernels in Triton's interpreter"
        )
    if interpreted != (parsed.device == "cpu"):
        parser().error("--device cpu needs the environment variable TRITON_INTERPRET=1; with --device cuda unset it")
    return parsed


def jobs_on(device: str) -> int:
    """Returns how many processes check at a time."""
    if device == "cpu":
        return 1
    return max(1, min(12, (os.cpu_count() or 2) // 2, torch.cuda.mem_get_info()[0] // JOB_BYTES))


def main(arguments: Sequence[str] | None = None) -> int:
    """Checks the kernels, then runs the benchmark; returns the exit code."""
    start = time.monotonic()
    parsed = parse(arguments)
    groups = list(groups_on_gpu() if parsed.device == "cuda" else groups_on_cpu())
    if parsed.case:
        for of_group, one in [(group, one) for group in groups for one in group.cases if str(one) == parsed.case]:
            comparisons, error = of_group.check(one, torch.device(parsed.device), of_group.all_tiles)
            print(f"{comparisons} comparisons passed, the largest error is {error:.3f} of the allowed one")
            return 0
        print(f"--case={parsed.case!r} is not valid: no case has this name", file=sys.stderr)
        return 2
    parsed.output.mkdir(parents=True, exist_ok=True)
    device = torch.device(parsed.device)
    state = {"device": device_name(device), **versions(device)}
    state = {name: state[name] for name in STATE}
    file = parsed.output / "checks.csv"
    # The latest row of each case.
    latest = {(row["group"], row["case"]): row for row in read_rows(file, **state)}
    open_groups = []
    for group in groups:
        known = {one: latest.get((group.name, str(one)), {}).get("status", "") for one in group.cases}
        # What failed may end the process again, and comes last.
        cases = sorted((one for one in group.cases if known[one] != "ok"), key=lambda one: known[one] != "")
        if cases:
            open_groups.append(dataclasses.replace(group, cases=tuple(cases)))
    if latest:
        failed = sum(row["status"] != "ok" for row in latest.values())
        print(f"{len(latest)} cases are in {file} already; {failed} failed and are repeated")
    cache = parsed.output / "cache"

    def ends(share: float) -> float:
        return start + 60 * parsed.minutes * share

    def check(groups: Sequence[Group], until: float) -> None:
        for group, found in check_all(groups, parsed.device, cache, jobs_on(parsed.device), until):
            row = {**dict.fromkeys(FIELDS, ""), **state, "date": now(), "group": group.name, **found}
            append_row(file, row)
            latest[row["group"], row["case"]] = row
            if row["status"] == "ok":
                print(f"{group.name:32} {row['case']:72} {row['error']:>6} {row['seconds']:>6} s", flush=True)
                continue
            again = f"whatwhere gpu-check --device {parsed.device} --case '{row['case']}'"
            print(f"FAILED {row['case']}: {row['status']}\n    {again}", file=sys.stderr, flush=True)

    code = 0
    if parsed.device == "cpu" or parsed.no_benchmark:
        check(open_groups, ends(1))
    else:
        first = [group for group in open_groups if group.name.startswith(FIRST_GROUPS)]
        check(first, ends(FIRST_SHARE))
        code = run_benchmark(parsed.output, DECISIVE, ends(DECISIVE_SHARE))
        check([group for group in open_groups if group not in first], ends(CHECK_SHARE))
        code = max(code, run_benchmark(parsed.output, STAGES, ends(1)))
    names = {group.name for group in groups}
    rows = [row for row in latest.values() if row["group"] in names]
    lines = summary(groups, rows, parsed.output, state)
    lines.append(f"{(time.monotonic() - start) / 60:.1f} minutes; files in {parsed.output}")
    (parsed.output / "summary.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("", *lines, sep="\n")
    if not rows:
        print("nothing was checked", file=sys.stderr)
    return 1 if code or not rows or any(row["status"] != "ok" for row in rows) else 0
