"""Makes a table of the papers: trains what is missing, and prints our figures beside the printed ones.

On a laptop, the small version (what it leaves out is in the report, key by key):

    python -m whatwhere.scripts.reproduce cope_2 --small

On one or more GPUs, as in the paper:

    accelerate launch -m whatwhere.scripts.reproduce cope_2

| TABLE | paper | subject |
|---|---|---|
| cope_2, cope_10 | CoPE (2405.18719) | flip-flop and selective copy; the latter with standard deviations |
| cope_3, cope_4, cope_9 | CoPE | counting: variables; longer and shorter contexts; both, with standard deviations |
| cope_5 | CoPE | language models of WikiText-103, with RoPE and PoPE beside the paper's encodings, and of code |
| cope_7 | CoPE | flip-flop: architectures and ablations |
| cope_8 | CoPE | WikiText-103: ablations |
| pope_1 | PoPE (2509.10534) | indirect indexing |
| pope_2, pope_3 | PoPE | music (JSB, MAESTRO); the human reference genome |
| pope_4 | PoPE | OpenWebText, three sizes |
| pope_8 | PoPE, with the ICML version's | OpenWebText: ablations |
| pope_indexing | PoPE, ICML version | indirect indexing with more encodings |

Every run is one of `whatwhere.scripts.train` in a folder of its own, `OUTPUT/<recipe>/<row>[-<variant>]-seed<k>`. A
finished run is not made again, by no table that needs it; an interrupted one goes on, exactly. Ctrl-C or SIGTERM writes
a checkpoint first: the same command goes on. A folder that holds a run of another recipe is an error.

`--dry-run` lists runs and cells with what is done and what is missing, estimates the time of what is missing on this
machine (from finished runs, or by timing a few steps), and trains nothing; `--report-only` reports what
is there, which must be one finished run at least. `--set KEY=VALUE` changes every recipe; what the rows and columns
decide cannot be changed, and runs that are not those of the paper any more are never called exact.

Not every column has a small version (the report names those that are left out), and not every cell is in the paper: the
rows that are not can be left out by `--rows`.

The report goes to `OUTPUT/<TABLE>[_small].md` and `.json`; `report.py` says what its verdicts mean. `--cards DIR`
copies it to `DIR/<TABLE>[_small]/`, as README.md and results.json.
"""

import argparse
import os
import pathlib
import shlex
import sys

from ..evaluation.results import check_writable, provenance
from ..extras import explain
from . import report, runs
from .tables import TABLES


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    result = argparse.ArgumentParser(
        prog="python -m whatwhere.scripts.reproduce",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("table", choices=TABLES, metavar="TABLE", help=", ".join(TABLES))
    result.add_argument("--small", action="store_true", help="the small recipes")
    result.add_argument("--seeds", type=int, metavar="N", help="runs of each system; default: as many as in the paper")
    result.add_argument("--rows", nargs="+", metavar="ROW", help="only these rows; --dry-run shows their names")
    result.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="replace a key of all recipes")
    result.add_argument("--output", type=pathlib.Path, default=pathlib.Path("runs"), metavar="DIR", help="default runs")
    result.add_argument("--data-dir", metavar="DIR", help="the folder of local data; default $WHATWHERE_DATA_DIR")
    result.add_argument("--cards", type=pathlib.Path, metavar="DIR", help="copy the report there, as a model card")
    mode = result.add_mutually_exclusive_group()
    mode.add_argument("--report-only", action="store_true", help="train nothing")
    mode.add_argument("--dry-run", action="store_true", help="train and write nothing, list what is done and missing")
    return result


def estimate(planned: dict[tuple[str, str], list[runs.Run]]) -> str:
    """Returns a line with the estimated time of the unfinished runs: as finished ones of the same recipe, or timed."""
    from ..training.estimate import describe_seconds, estimate_seconds

    wanted = runs.unique(planned)

    def system(run: runs.Run) -> str:
        return str({**run.recipe.resolved(), "seed": None})

    done = {system(run): float(results["seconds"]) for run in wanted if (results := run.results()) is not None}
    missing = [run for run in wanted if run.state() != "done"]
    seconds: dict[str, float | None] = dict(done)
    for run in missing:
        if system(run) not in seconds:
            seconds[system(run)] = estimate_seconds(run.recipe)
    known = [value for run in missing if (value := seconds[system(run)]) is not None]
    if not missing:
        return "Nothing is missing."
    unknown = len(missing) - len(known)
    parts = [f"about {describe_seconds(sum(known))} for {len(known)} runs that are not done"] if known else []
    parts += [f"{unknown} runs are not estimated: their models are too large to be timed here"] if unknown else []
    return f"Time on this machine, in one process: {'; '.join(parts)}."


def listing(planned: dict[tuple[str, str], list[runs.Run]], left_out: dict[str, str]) -> str:
    """Returns a line for every run, with its state and its command, and one for every cell and column left out."""
    states = {run.folder: run.state() for run in runs.unique(planned)}
    lines = ["Runs:"]
    for run in runs.unique(planned):
        lines.append(f"  {states[run.folder]:<8}  {run.folder}")
        lines.append(f"  {'':<8}  {run.command()}")
    lines.append("Cells (row, column, finished seeds):")
    for (row, column), cell in planned.items():
        done = sum(states[run.folder] == "done" for run in cell)
        lines.append(f"  {row}, {column}: {done} of {len(cell)}")
    lines += [f"  {label}: left out, {recipe} has no small version for it" for label, recipe in left_out.items()]
    done = sum(state == "done" for state in states.values())
    return "\n".join([*lines, f"{done} of {len(states)} runs are done."])


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parser().parse_args(arguments)
    table = TABLES[options.table]
    # Set by torchrun and accelerate launch: every process trains, one speaks.
    speaks = int(os.environ.get("RANK", "0")) == 0
    try:
        planned = runs.plan(
            table,
            output=options.output,
            small=options.small,
            seeds=options.seeds,
            rows=options.rows,
            sets=options.set,
        )
        if options.dry_run:
            if speaks:
                print(listing(planned, report.left_out(table) if options.small else {}), flush=True)
                print(estimate(planned))
            return
        # A report of nothing must not take the place of an earlier one.
        if options.report_only and not any(run.state() == "done" for run in runs.unique(planned)):
            raise runs.ReproduceError(
                f"--report-only is not valid: no run of {table.name} is finished in {str(options.output)!r}. "
                "--dry-run shows where they are looked for."
            )
        check_writable(options.output)
        if not options.report_only:
            train_all(planned, options.data_dir, arguments, speaks)
        if speaks:
            found = report.collect(table, planned, small=options.small)
            found |= provenance("whatwhere.scripts.reproduce", arguments)
            written = [report.write(found, options.output)]
            if options.cards:
                written.append(report.write_card(found, options.cards))
            print(report.markdown(found))
            print(f"Written: {', '.join(map(str, written))}")
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f"error: {explain(error)}")


def train_all(
    planned: dict[tuple[str, str], list[runs.Run]], data_dir: str | None, arguments: list[str], speaks: bool
) -> None:
    """Trains every run that is not done; exits, with the way to go on, when one is interrupted or fails."""
    from ..training.loop import Interrupted, TrainingError

    wanted = runs.unique(planned)
    last = [run for run in wanted if run.state() != "done"][-1:]
    for number, run in enumerate(wanted, 1):
        state = run.state()
        if speaks:
            print(f"run {number} of {len(wanted)}, {state}: {run.folder}", flush=True)
        if state == "done":
            continue
        try:
            runs.train(run, data_dir, end=run in last)
        except TrainingError as error:
            sys.exit(f"error in {run.folder}: {error}")
        except (Interrupted, KeyboardInterrupt) as stop:
            if speaks:
                reason = str(stop).strip() or "interrupted"
                print(f"{run.folder}: {reason}. Go on with the same command:\n", file=sys.stderr)
                print(f"    python -m whatwhere.scripts.reproduce {shlex.join(arguments)}", file=sys.stderr)
            sys.exit(128 + getattr(stop, "number", 2))


if __name__ == "__main__":
    main()
